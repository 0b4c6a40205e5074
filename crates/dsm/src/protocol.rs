//! The coherence protocol of a region with sequential consistency, as a state machine without I/O or clock.
//!
//! [`Node`] is one node's part. The nodes of a region share *units*. A node has a copy of a unit in its own memory, its *frame*, which
//! other nodes may only read (RDMA READ), and its program sees the frame through a *view* whose protection is the node's [`Right`]. Nobody
//! writes into the frame of another node, since a node that was stopped in the middle of a copy finishes it when it goes on.
//!
//! # Protocol
//!
//! Each unit has a home ([`Homes`]). The home has an entry for the unit, and carries out one request at a time, or several to read; the others
//! wait there, in the order of their arrival. All messages go between the home and one other node. (A home that is itself the node sends itself
//! the same messages, which are handled at once.) They are those of [`rdmux_wire::dsm`]:
//!
//! 1. A node whose program lacks a right sends *Ask*.
//! 2. The home sends *Recall* to each node whose right does not go with the request: to all others for a write, to a node that may write for a
//!    read. Such a node protects its view, and sends *Yielded* when that is done. Its frame keeps the contents.
//! 3. When all have yielded, the home sends *Grant*. It names a node to read the contents from, unless the frame of the node that asks has
//!    them. If nobody else has a right, a read is granted the right to write too (the E of MESI), and a later write costs nothing.
//! 4. The node reads the contents, changes its view, and sends *Installed*. The home begins the next request. Reads that follow each other do not
//!    wait for each other's Installed, unless one of them is granted the right to write.
//!
//! So a read, an upgrade and a cold write are one request each. A frame is read only while the home waits for Installed, in which time nobody
//! gets a right to write it. A request between three nodes takes four messages before the read of the contents. If the owner sent the grant, it
//! would take three, but a node could have got it of which the home does not know, and the repair after a death would have to ask all nodes.
//!
//! ## States
//!
//! A copy has a right, and besides at most one *recall* that is carried out, and at most one *request*:
//!
//! | state | event | next | output |
//! |---|---|---|---|
//! | right below the need, no request | fault | Asked | Ask |
//! | the same, home not known | fault | Locating | Locate |
//! | Locating | Home | Asked; poisoned if the home is gone | Ask; Poison |
//! | any, request | fault | as before | none: the wake-up wakes all; who needs more faults again |
//! | right enough | fault | as before | Wake |
//! | no recall; no request or Asked | Recall to a right below | recall | Protect |
//! | recall | protected | lower right | Yielded |
//! | Asked, no recall | Grant with a source | Pulling | Pull |
//! | Asked, no recall | Grant without source | Installing | Protect |
//! | Asked | Refuse, or the home is gone | poisoned | Poison |
//! | Locating | the registrar is gone | poisoned | Poison |
//! | Pulling | the contents have landed | Installing | Protect |
//! | Pulling | they could not be read | Asked; poisoned if the home is gone | Failed; Poison |
//! | Installing | protected | right as granted, no request | Installed, Wake |
//! | poisoned | fault | poisoned | Poison |
//!
//! A home's entry has *holders* (shared by some, exclusive to one, or lost with a node), the nodes whose frames are *fresh*, and *turns*, each a
//! request that is carried out. There are several only if all of them are granted the right to read. Each is in a state of its own:
//!
//! | state | event | next |
//! |---|---|---|
//! | no turn | Ask | Recalling those in the way; Granting if there are none; Refuse if the unit is lost |
//! | all turns get to read | Ask to read, no request waits | Granting besides them |
//! | other turns | Ask | the request waits in the queue |
//! | Recalling | Yielded | the holder is lowered; Granting after the last one |
//! | Granting | Installed | the holder is recorded; the next requests |
//! | Granting | Failed, the source is gone | Granting again, with another fresh source; if there is none, as the next row says |
//! | to be granted again, no fresh source | others read | waits for the first Installed, then Granting; if all of them fail, Refuse |
//! | Granting | Failed, the source is a member | as before, until the source is gone |
//!
//! ## Homes by first touch
//!
//! In such a region ([`Homes::first_touch`]) each unit has a *registrar*, which all nodes know. A node that lacks a right and does not know the home
//! sends *Locate* to the registrar, and its Ask to the home that *Home* names. The registrar makes the first node that sends Locate the home, for
//! good, and tells all who send it. So a node becomes the home of a unit only by its own request, and knows it when Home comes; the request of
//! another node that has heard of it before waits until then:
//!
//! | the receiver of Ask | the request |
//! |---|---|
//! | knows that it is the home | is carried out in its turn |
//! | does not know that | waits, and is carried out when Home names the receiver |
//! | does not know that, and the registrar is or gets gone | is refused, by the name of the registrar: the receiver has given the unit to nobody |
//!
//! If another node is the home, either the registrar or the sender has lied. The receiver cannot tell, and accuses nobody.
//!
//! Nodes that know the home do not need the registrar any more. For the others its end is that of the unit. A home that leaves stays the home, so
//! its units are poisoned as everywhere.
//!
//! ## Races
//!
//! - *Upgrade and invalidation*: a node that shares a unit asks to write it, and another node's request is first. The node is recalled while it
//!   is Asked. It yields, and its later Grant names a source.
//! - *Read of the contents and invalidation of the source*: the home recalls nobody before Installed.
//! - *Two threads of a node*: a read and a write of one unit share the request of the first; the writing thread faults again.
//! - *A right that is recalled before the program has used it*: the program faults again. The protocol does not bound how often.
//!
//! ## Nodes that leave
//!
//! The driver finds out who has left, and tells each node ([`Node::handle_gone`]), with the epoch that begins. All nodes agree on who has left by
//! which epoch. Messages between two members are neither lost nor altered: when a connection of two nodes fails, one of them has to
//! leave. A node that has left does not come back under its number.
//!
//! - A message of a node that is gone is dropped. That makes all its messages of old epochs void. Those of members are true in whatever epoch
//!   they were sent, and no message is lost with an epoch.
//! - A message of a newer epoch waits at the driver until its receiver has heard of that epoch ([`Ahead`]). So whoever learns anything from a
//!   node that knows of an expulsion knows of it too, and nothing of the node that is expelled reaches it any more. A node that was stopped, is
//!   expelled and goes on may read its old copies, but it cannot have seen anything newer, nor can others see what it does afterwards together
//!   with that.
//! - The driver must make the frames unreadable for a node (revoke its keys) before it tells that the node is gone.
//! - A node that a home waits for ([`Node::waits`]) and that does not answer within the driver's limit has to leave.
//! - The home removes the node from its entries. A unit is lost if the node could write it, or was being granted that, or had the only fresh
//!   frame: requests for it are refused, by the name of the node. (A node that reads a unit alone can write it, too.) For other units, another
//!   fresh frame serves.
//! - Units whose *home* is gone: a node keeps the copies that it has, with their rights, which nobody can recall. What it lacks it does not get:
//!   the unit is poisoned at that node, by the name of the home. (Another copy of the entries would be needed for more.)
//! - A node that is told that it is gone itself poisons all that it has used.
//!
//! ## Order and duplicates
//!
//! Messages are numbered for each pair of nodes. A number that has come is dropped. A message may be overtaken by at most 63 later ones; RC does
//! not reorder at all. For one unit, the home and a node take turns, and no order of messages that are underway at once matters.
//!
//! A message that no correct node sends changes nothing, and the driver gets to know it ([`Action::Accuse`]).
//!
//! ## Memory
//!
//! A node stores what is not as at the beginning: copies of units that its own program has used, and entries of units that others have asked
//! for. An entry that is as at the beginning again is removed. Storage grows by chunks of 16, a chunk does not move, and what is removed makes
//! room for what comes, so an event allocates only if more is in use than ever before. None is given back before the node ends.
//!
//! | of | bytes at most |
//! |---|---|
//! | a copy | 80 |
//! | an entry | 120, and if the region has more than 64 nodes, another 3/8 a node |
//! | a request at its home | 62 |
//! | a home that a registrar knows | 24 |
//! | a used unit without neighbours: additionally for each of these but requests | 76 for each factor of 16 in the number of units |
//!
//! A node has at most two requests for a unit at its home: one that is being carried out, and one that waits. So a member
//! that asks for all that there is makes the home of `n` units spend `n` entries and `2 n` requests, and a registrar `n` homes. If the first touch
//! makes the home, it can ask each node for each unit, which then costs an entry and a request. What else it sends costs nothing.

mod directory;
mod homes;
mod nodes;
mod pages;
mod slab;
mod table;

use std::collections::{BTreeSet, VecDeque};

pub use rdmux_wire::dsm::{Body, Message, NodeId, Right};

pub use self::homes::{Homes, HomesError};
pub use crate::Access;
pub use crate::peers::Ahead;

use self::directory::Directory;
use self::pages::Pages;
use self::table::Table;
use crate::peers::{Peers, Place};
impl Access {
    /// Returns the right that a program needs for the access.
    pub fn needs(self) -> Right {
        match self {
            Access::Read => Right::Shared,
            Access::Write => Right::Exclusive,
        }
    }
}

/// A region, as its nodes have agreed on it.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Number of the region.
    pub region: u32,
    /// Units of the region.
    pub units: u64,
    /// Homes of the units.
    pub homes: Homes,
    /// Epoch in which the region begins.
    pub epoch: u64,
    /// Members in that epoch.
    pub members: Vec<NodeId>,
}

/// A task of the driver. It carries out those of one unit in their order: one begins when the one before has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a message.
    Send {
        /// The receiver.
        to: NodeId,
        /// The message.
        message: Message,
    },
    /// Read the unit from the frame of a node into the own one, then call [`Node::handle_pulled`]. A node that is gone cannot be read from.
    Pull {
        /// The unit.
        unit: u64,
        /// Number of the task among those of the unit.
        task: u64,
        /// The node that has the contents.
        from: NodeId,
    },
    /// Protect the program's view of the unit, on all processors, then call [`Node::handle_protected`].
    Protect {
        /// The unit.
        unit: u64,
        /// Number of the task among those of the unit.
        task: u64,
        /// The program's right from now on.
        right: Right,
    },
    /// Let the threads go on that wait for the unit. They may fault again.
    Wake {
        /// The unit.
        unit: u64,
    },
    /// End the waits for the unit, and all later uses of it, with an error that names a node. As any other task, it begins when the unit's task in
    /// progress has ended: a protection that ended later would let the program use the unit again.
    Poison {
        /// The unit.
        unit: u64,
        /// The node with which it was lost.
        node: NodeId,
    },
    /// A node does not keep to the protocol: expel it.
    Accuse {
        /// The node.
        node: NodeId,
        /// The message that it sent.
        violation: Violation,
    },
}

/// A message that no correct node sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Violation {
    /// It is about another region, or about a unit that the region does not have.
    #[error("a message about a unit that the region does not have")]
    NoSuchUnit,
    /// It is for or from the home of the unit, but that is another node.
    #[error("a message for another home")]
    NotHome,
    /// It is about more units than a message may be about.
    #[error("a message about too many units")]
    TooMany,
    /// It names a node that never was a member, or says that a unit was lost with a member.
    #[error("a message that names a wrong node")]
    WrongNode,
    /// The unit is in no state in which the message could come.
    #[error("a message that nothing has asked for")]
    Unexpected,
}

/// A wait of a unit's home for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Wait {
    /// The unit.
    pub unit: u64,
    /// The node whose request is carried out, and the request's number at it.
    pub request: (NodeId, u64),
    /// The node that has not answered.
    pub node: NodeId,
}

/// Tasks and messages that the parts of a node give out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Output {
    actions: VecDeque<Action>,
    /// Messages to other nodes and to this one, with unit and request, that have no number yet.
    posts: VecDeque<(NodeId, u64, u64, Body)>,
}

impl Output {
    fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    fn post(&mut self, to: NodeId, unit: u64, request: u64, body: Body) {
        self.posts.push_back((to, unit, request, body));
    }
}

/// One node's part of a region: its copies, and the entries of the units whose home it is.
///
/// Each `handle_` method takes an event; afterwards the driver takes actions from [`Node::poll_action`] until there is none. Nothing here waits,
/// and memory grows only by units that are used.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    region: u32,
    units: u64,
    peers: Peers,
    pages: Pages,
    directory: Directory,
    /// Homes of the units whose registrar this node is.
    registered: Table<Place>,
    out: Output,
}

impl Node {
    /// Makes the part of one node, `own`. At the beginning no node has a right, and the frame of each unit's home has its contents.
    pub fn new(own: NodeId, settings: &Settings) -> Node {
        Node {
            region: settings.region,
            units: settings.units,
            peers: Peers::new(own, settings.epoch, &settings.members),
            pages: Pages::new(settings.homes.clone(), settings.units),
            directory: Directory::new(settings.units),
            registered: Table::new(settings.units),
            out: Output::default(),
        }
    }

    /// Takes a fault of the program: an access for which the view lacks a right. The thread waits for [`Action::Wake`] or [`Action::Poison`].
    ///
    /// # Panics
    /// If the region has no such unit.
    pub fn handle_fault(&mut self, unit: u64, access: Access) {
        assert!(unit < self.units, "unit {unit} of {}", self.units);
        self.pages.fault(unit, access.needs(), &self.peers, &mut self.out);
        self.settle();
    }

    /// Takes a message of another node.
    ///
    /// # Errors
    /// The message has to wait, and nothing has changed. The driver keeps it where it has come, takes no later one of this node, and tries again
    /// after [`Node::handle_gone`]. So the receive buffers bound the messages that wait, and none is lost.
    pub fn handle_message(&mut self, from: NodeId, message: &Message) -> Result<(), Ahead> {
        if self.peers.arrived(from, message.epoch, message.sequence)? {
            let outcome = self.dispatch(from, message);
            self.accuse(from, outcome);
            self.settle();
        }
        Ok(())
    }

    /// Takes the end of [`Action::Pull`]: whether the contents have landed. The end of a task that is not in progress is ignored.
    ///
    /// The driver reports a failure only when nothing can land any more: when the queue pair of the read is in the error state, and the read has
    /// completed. A later read may have the same frame for its target. Reads from a node that is a member should fail only if one of the two
    /// nodes is about to leave.
    pub fn handle_pulled(&mut self, unit: u64, task: u64, has_landed: bool) {
        self.pages
            .pulled(unit, task, has_landed, &self.peers, &mut self.out);
        self.settle();
    }

    /// Takes the end of [`Action::Protect`]. The end of a task that is not in progress is ignored.
    pub fn handle_protected(&mut self, unit: u64, task: u64) {
        self.pages.protected(unit, task, &mut self.out);
        self.settle();
    }

    /// Takes the news that an epoch has begun, with the nodes that have left since the one before which this node has heard of; maybe this one.
    /// An epoch that is not newer is ignored. The driver offers again the messages that wait ([`Ahead`]).
    pub fn handle_gone(&mut self, epoch: u64, gone: &[NodeId]) {
        if epoch <= self.peers.epoch() {
            return;
        }
        self.peers.remove(epoch, gone);
        self.pages.gone(&self.peers, &mut self.out);
        let own = self.peers.own();
        if self.peers.is_member(own) {
            self.directory
                .gone(gone, self.pages.homes(), &self.peers, &mut self.out);
        } else {
            self.directory = Directory::new(self.units);
        }
        self.settle();
    }

    /// Returns the next task of the driver.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.out.actions.pop_front()
    }

    /// Returns the number of this node.
    pub fn id(&self) -> NodeId {
        self.peers.own()
    }

    /// Returns the epoch that this node has heard of last.
    pub fn epoch(&self) -> u64 {
        self.peers.epoch()
    }

    /// Returns whether a node, maybe this one, is a member as far as this node has heard.
    pub fn is_member(&self, node: NodeId) -> bool {
        self.peers.is_member(node)
    }

    /// Returns the home of a unit. If the first use makes the home, this node knows it when the registrar has answered its first request.
    pub fn home(&self, unit: u64) -> Option<NodeId> {
        self.pages.home(unit)
    }

    /// Returns the right of this node's copy. While [`Action::Protect`] is in progress it is the one before.
    pub fn right(&self, unit: u64) -> Right {
        self.pages.right(unit)
    }

    /// Returns whether a request of this node for the unit has not ended.
    pub fn is_awaited(&self, unit: u64) -> bool {
        self.pages.is_awaited(unit)
    }

    /// Returns the nodes whose messages, or whose end, the requests wait for that this node carries out as the unit's home. A node that stays among
    /// them longer than the driver allows for, such as its lease, is to be expelled. Empty if there is no such request.
    pub fn waits_for(&self, unit: u64) -> impl Iterator<Item = NodeId> {
        self.directory.waits_for(unit, &self.peers)
    }

    /// Returns all waits of the requests that this node carries out as a home: see [`Node::waits_for`]. Takes time for each such request.
    pub fn waits(&self) -> impl Iterator<Item = Wait> {
        self.directory.waits(&self.peers)
    }

    /// Returns the nodes that have a right to a unit, or are being granted one, as its home has recorded them. Empty if this node is not its home.
    pub fn holders(&self, unit: u64) -> BTreeSet<NodeId> {
        self.directory.holders(unit, &self.peers)
    }

    /// Returns the node with which a unit was lost, if this node is its home.
    pub fn lost(&self, unit: u64) -> Option<NodeId> {
        self.directory.lost(unit, &self.peers)
    }

    fn dispatch(&mut self, from: NodeId, message: &Message) -> Result<(), Violation> {
        if message.region != self.region || message.unit >= self.units {
            return Err(Violation::NoSuchUnit);
        }
        self.handle_body(from, message.unit, message.request, message.body)
    }

    fn handle_body(&mut self, from: NodeId, unit: u64, request: u64, body: Body) -> Result<(), Violation> {
        let Node {
            peers,
            pages,
            directory,
            registered,
            out,
            ..
        } = self;
        let (home, own) = (pages.home(unit), peers.own());
        let registrar = pages.homes().of(unit);
        // A node may hear of a home before that hears of itself.
        let is_early = pages.homes().is_first_touch() && home != Some(own);
        let is_late = is_early && !peers.is_member(registrar);
        let is_right = match body {
            Body::Ask(_) => is_early || home == Some(own),
            Body::Yielded | Body::Installed | Body::Failed => home == Some(own),
            Body::Recall(_) | Body::Grant { .. } | Body::Refuse(_) => home == Some(from),
            Body::Locate => pages.homes().is_first_touch() && registrar == own,
            Body::Home(_) => pages.homes().is_first_touch() && registrar == from,
            Body::Flush { .. } | Body::Flushed { .. } | Body::Settled => return Err(Violation::Unexpected),
        };
        if !is_right {
            return Err(Violation::NotHome);
        }
        let is_wrong = match body {
            Body::Home(node) => !peers.was_member(node),
            Body::Grant { source, .. } => source.is_some_and(|it| !peers.was_member(it)),
            // The home has heard of no newer epoch than this node.
            Body::Refuse(node) => !peers.was_member(node) || peers.is_member(node),
            _ => false,
        };
        let Some(place) = peers.place(from).filter(|_| !is_wrong) else {
            return Err(Violation::WrongNode);
        };
        match body {
            Body::Ask(right) => {
                let registrar = peers.place(registrar).filter(|_| is_late);
                match registrar {
                    Some(it) => directory.ask_late(unit, (place, request), right, it, (peers, out)),
                    None if is_early => directory.ask_early(unit, (place, request), right, (peers, out)),
                    None => directory.ask(unit, (place, request), right, (peers, out)),
                }
            }
            Body::Yielded => directory.yielded(unit, place, (peers, out)),
            Body::Installed => directory.installed(unit, (place, request), (peers, out)),
            Body::Failed => directory.failed(unit, (place, request), (peers, out)),
            Body::Recall(right) => pages.recall(unit, request, right, out),
            Body::Grant { right, source } => pages.grant(unit, request, (right, source), peers, out),
            Body::Refuse(node) => pages.refuse(unit, request, node, out),
            Body::Locate => {
                let mut home = *registered.get_or_insert(unit, || place);
                if mutant!(RegistrationForgotten) {
                    home = place;
                }
                out.post(from, unit, request, Body::Home(peers.node(home)));
                Ok(())
            }
            Body::Home(node) => {
                pages.located(unit, request, node, peers, out)?;
                if node == own {
                    directory.confirm(unit, (peers, out));
                }
                Ok(())
            }
            Body::Flush { .. } | Body::Flushed { .. } | Body::Settled => Err(Violation::Unexpected),
        }
    }

    /// Numbers the messages to others, and handles those to this node, until there is none.
    fn settle(&mut self) {
        let own = self.peers.own();
        while let Some((to, unit, request, body)) = self.out.posts.pop_front() {
            if to == own {
                let outcome = self.handle_body(own, unit, request, body);
                self.accuse(own, outcome);
            } else if let Some(sequence) = self.peers.number(to) {
                let message = Message {
                    region: self.region,
                    epoch: self.peers.epoch(),
                    sequence,
                    request,
                    unit,
                    body,
                };
                self.out.act(Action::Send { to, message });
            }
        }
    }

    fn accuse(&mut self, node: NodeId, outcome: Result<(), Violation>) {
        if let Err(violation) = outcome {
            self.out.act(Action::Accuse { node, violation });
        }
    }
}
