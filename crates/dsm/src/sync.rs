//! Synchronisation of the threads of a region: locks, barriers, reductions, conditions and words, as a state machine without I/O or clock.
//!
//! [`Node`] is one node's part, as [`protocol::Node`](crate::protocol::Node) is for units. Threads wait for *objects*. An object is a number, of
//! any value, and exists as soon as it is used. A lock, a barrier, a condition and a word of one number are four objects; a barrier and a
//! reduction of one number are one.
//!
//! # Protocol
//!
//! Each object has a home, which carries out one request at a time. All messages go between the home and the node of a thread; they are those of
//! [`rdmux_wire::dsm::sync`]. A thread waits for at most one call, so its number stands for the request, and a home keeps at most one request of
//! each thread. The home answers as soon as the request is carried out, and nobody asks twice. A thread that unlocks or signals goes on at once; its
//! next call begins when the home has answered.
//!
//! - **Lock**: the requests wait in a queue, in the order of their arrival. A lock is given to the first of them when nobody has it, or with
//!   others that share it if the first wants to share it too. So readers that follow each other share, and a writer is overtaken by nobody.
//! - **Barrier**, **reduction**: the home collects the values until all parties have come, reduces them in the order of the nodes and threads,
//!   and answers all. Thus the result of floating-point numbers is the same in each run. The nodes that come the first time are the parties from
//!   then on.
//! - **Condition**: a thread that waits is put into the condition's queue, gives its lock back, is woken, and asks for the lock again. The node
//!   takes these steps, since lock and condition may have two homes.
//! - **Word**: the home reads and writes it. It is 0 at first.
//!
//! # Nodes that leave
//!
//! Membership, epochs, numbers of messages and [`Ahead`] are as in [`protocol`](crate::protocol#nodes-that-leave); the driver tells both
//! machines. When a node has left:
//!
//! - What it had locked for itself is free, and who gets the lock next learns of that ([`Success::Locked`]): all up to the first that gets it for
//!   itself, since only that one can repair what the lock protects. A node that only shared a lock leaves no mark.
//! - A barrier or reduction whose party it was is broken for good: all waits end with its name ([`Failure::Gone`]), also those that begin
//!   afterwards. Before a barrier was passed for the first time, nobody knows the parties, and each node counts that was a member at the
//!   beginning. So a barrier that is first used after a node has left is refused. (To go on without the node, a later version can let programs say
//!   whose departure they have taken note of.)
//! - Waits for conditions end, with its name, as it may have been the one to signal. A thread that did not wait then, and was told by no other
//!   call, learns it from its next wait. So no thread waits for a signal of a node that has left, unless it was told so.
//! - Objects whose *home* it was are gone: all calls end with its name.
//! - A signal that a thread of the node had got is lost.
//! - A node that is told that it is gone itself ends all calls with its own name.
//!
//! # Bounds
//!
//! A node has less than [`THREADS_MAX`] threads. At a home it has at most [`BUDGET`] locks that its threads hold or wait for, and barriers and words
//! other than 0 that it was the first to use; more are refused ([`Failure::NoRoom`]). Locks that nobody uses, conditions without threads and
//! words of 0 take no memory. A message that no correct node sends changes nothing, and the driver gets to know it ([`Action::Accuse`]).
//!
//! # Release consistency
//!
//! Unlock, the arrival at a barrier and the begin of a wait are *releases*; Granted, the end of a barrier and the end of a wait are *acquires*.
//! Write notices belong to an object, and its home is the place where they meet: the node would attach them to the messages Unlock and Gather, and
//! take them from Granted and Done, whose last four bytes have room for their number. The driver can write back before it hands a release to
//! [`Node::handle_call`], and invalidate before it ends the thread's wait at [`Action::Done`].

mod gathering;
mod home;
mod lock;
mod threads;

use std::collections::VecDeque;
use std::num::NonZeroU32;

pub use rdmux_wire::dsm::NodeId;
pub use rdmux_wire::dsm::sync::{Body, Message, Mode, Operation, Refusal};

use self::home::Home;
use self::threads::Threads;
pub use crate::peers::Ahead;
use crate::peers::Peers;
use crate::protocol::Homes;

/// Threads of a node. Their numbers are below.
pub const THREADS_MAX: u16 = 4096;

/// Objects of one home that a node may use at once: locks that its threads hold or wait for, barriers and words that it was the first to use.
pub const BUDGET: u32 = 65536;

/// A call of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    /// Wait until all parties have come. Ends with [`Success::Done`].
    Barrier {
        /// The barrier.
        object: u64,
        /// Threads that have to come, the same number each time.
        parties: NonZeroU32,
    },
    /// Wait until all parties have come, and reduce their values. Ends with [`Success::Value`].
    Reduce {
        /// The barrier.
        object: u64,
        /// Threads that have to come, the same number each time.
        parties: NonZeroU32,
        /// The operation, the same of all.
        operation: Operation,
        /// The thread's value, as 64 bits of the operation's type.
        value: u64,
    },
    /// Take a lock. Ends with [`Success::Locked`].
    Lock {
        /// The lock.
        object: u64,
        /// Its use.
        mode: Mode,
    },
    /// Give a lock back. Ends with [`Success::Done`].
    Unlock {
        /// The lock.
        object: u64,
        /// The mode of the call that took it.
        mode: Mode,
    },
    /// Give back a lock that the thread has for itself, wait until the condition is signalled, and take the lock again. Ends with
    /// [`Success::Woken`]. After a failure the thread still has the lock, but not if the lock's home is gone, or after [`Failure::NoRoom`].
    Wait {
        /// The condition.
        condition: u64,
        /// The lock.
        lock: u64,
    },
    /// Wake the thread that has waited for a condition longest, if there is one. Ends with [`Success::Done`].
    Signal {
        /// The condition.
        condition: u64,
    },
    /// Wake all threads that wait for a condition. Ends with [`Success::Done`].
    Broadcast {
        /// The condition.
        condition: u64,
    },
    /// Add to a word, wrapping. Ends with [`Success::Value`], the value before.
    FetchAdd {
        /// The word.
        object: u64,
        /// The number to add.
        value: u64,
    },
    /// Set a word to a new value if it has the expected one. Ends with [`Success::Value`], the value before.
    CompareSwap {
        /// The word.
        object: u64,
        /// The expected value.
        expected: u64,
        /// The new value.
        new: u64,
    },
    /// Read a word. Ends with [`Success::Value`].
    Load {
        /// The word.
        object: u64,
    },
}

impl Call {
    /// Returns the object that the call is about: of a wait the condition.
    pub fn object(self) -> u64 {
        match self {
            Call::Barrier { object, .. }
            | Call::Reduce { object, .. }
            | Call::Lock { object, .. }
            | Call::Unlock { object, .. }
            | Call::FetchAdd { object, .. }
            | Call::CompareSwap { object, .. }
            | Call::Load { object } => object,
            Call::Wait { condition, .. } | Call::Signal { condition } | Call::Broadcast { condition } => {
                condition
            }
        }
    }
}

/// End of a call that was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Success {
    /// There is nothing to tell.
    Done,
    /// A value.
    Value(u64),
    /// The thread has the lock.
    Locked {
        /// Node that left while it had the lock for itself: what the lock protects may be half-changed. So `EOWNERDEAD` of robust mutexes.
        recovered: Option<NodeId>,
    },
    /// The thread waits no more for the condition, and has the lock.
    Woken {
        /// Node that has left, the condition's home or another one; `None` if the condition was signalled.
        gone: Option<NodeId>,
        /// As in [`Success::Locked`].
        recovered: Option<NodeId>,
    },
}

/// A call was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Failure {
    /// A node has left without which the call cannot end.
    #[error("node {} has left", .0.number())]
    Gone(NodeId),
    /// The thread does not have the lock, or has it in another mode.
    #[error("the thread does not have the lock in this mode")]
    NotHeld,
    /// The thread has the lock already.
    #[error("the thread has the lock already")]
    AlreadyHeld,
    /// Parties of a barrier differ in their number or operation, or the thread's node is none of those that came the first time.
    #[error("the parties of the barrier do not agree")]
    Mismatch,
    /// The node uses too many objects of one home.
    #[error("the node uses more than {BUDGET} locks, barriers and words of one home")]
    NoRoom,
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        match refusal {
            Refusal::Gone(node) => Failure::Gone(node),
            Refusal::Mismatch => Failure::Mismatch,
            Refusal::NoRoom => Failure::NoRoom,
        }
    }
}

/// End of a call.
pub type Outcome = Result<Success, Failure>;

/// A task of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a message.
    Send {
        /// The receiver.
        to: NodeId,
        /// The message.
        message: Message,
    },
    /// Let a thread go on: its call has ended.
    Done {
        /// The thread.
        ticket: u64,
        /// The end.
        outcome: Outcome,
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
    /// It is about another region.
    #[error("a message about another region")]
    WrongRegion,
    /// It is about a thread of a number that is too high.
    #[error("a message about a thread of a number that is too high")]
    NoSuchThread,
    /// It is for or from the home of the object, but that is another node.
    #[error("a message for another home")]
    NotHome,
    /// It names a node that never was a member, or says that a member has left.
    #[error("a message that names a wrong node")]
    WrongNode,
    /// The object or the thread is in no state in which the message could come.
    #[error("a message that nothing has asked for")]
    Unexpected,
}

/// A message that has no number yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Post {
    to: NodeId,
    thread: u16,
    object: u64,
    body: Body,
}

/// Tasks and messages that the parts of a node give out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Output {
    actions: VecDeque<Action>,
    /// Ends of calls, which come after the other actions.
    ends: VecDeque<Action>,
    /// Messages to other nodes and to this one.
    posts: VecDeque<Post>,
}

impl Output {
    fn done(&mut self, thread: u16, outcome: Outcome) {
        let ticket = thread.into();
        self.ends.push_back(Action::Done { ticket, outcome });
    }
}

/// One node's part of a region: its threads, and the objects whose home it is.
///
/// Each `handle_` method takes an event; afterwards the driver takes actions from [`Node::poll_action`] until there is none. Nothing here waits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    region: u32,
    peers: Peers,
    homes: Homes,
    threads: Threads,
    home: Home,
    out: Output,
}

impl Node {
    /// Makes the part of one node, `own`, of a region that begins in an epoch with these members. Locks are free, and words are 0.
    pub fn new(own: NodeId, region: u32, epoch: u64, members: &[NodeId], homes: Homes) -> Node {
        Node {
            region,
            peers: Peers::new(own, epoch, members),
            homes,
            threads: Threads::default(),
            home: Home::default(),
            out: Output::default(),
        }
    }

    /// Takes a call of a thread, which waits for [`Action::Done`] with its ticket.
    ///
    /// A ticket is the number of a thread among those of this node, below [`THREADS_MAX`]. Locks belong to a thread, and reductions are carried out
    /// in the order of the nodes and tickets.
    ///
    /// # Panics
    /// If the ticket is too high, or the thread waits already.
    pub fn handle_call(&mut self, call: Call, ticket: u64) {
        let thread = u16::try_from(ticket).ok().filter(|it| *it < THREADS_MAX);
        let Some(thread) = thread else {
            panic!("ticket {ticket} of at most {THREADS_MAX}");
        };
        self.threads
            .call(thread, call, &self.homes, &self.peers, &mut self.out);
        self.settle();
    }

    /// Takes a message of another node.
    ///
    /// # Errors
    /// As [`protocol::Node::handle_message`](crate::protocol::Node::handle_message).
    pub fn handle_message(&mut self, from: NodeId, message: &Message) -> Result<(), Ahead> {
        if self.peers.arrived(from, message.epoch, message.sequence)? {
            let outcome = self.dispatch(from, message);
            self.accuse(from, outcome);
            self.settle();
        }
        Ok(())
    }

    /// Takes the news that an epoch has begun. As [`protocol::Node::handle_gone`](crate::protocol::Node::handle_gone).
    pub fn handle_gone(&mut self, epoch: u64, gone: &[NodeId]) {
        if epoch <= self.peers.epoch() {
            return;
        }
        self.peers.remove(epoch, gone);
        self.threads.gone(&self.homes, &self.peers, &mut self.out);
        if self.peers.is_member(self.peers.own()) {
            self.home.gone(gone, &mut self.out);
        } else {
            self.home = Home::default();
        }
        self.settle();
    }

    /// Returns the next task of the driver. Messages come before ends of calls, since threads of other nodes may wait for them.
    pub fn poll_action(&mut self) -> Option<Action> {
        let Output { actions, ends, .. } = &mut self.out;
        actions.pop_front().or_else(|| ends.pop_front())
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

    /// Returns whether a thread's call has not ended.
    pub fn is_waiting(&self, ticket: u64) -> bool {
        self.threads.is_waiting(ticket)
    }

    fn dispatch(&mut self, from: NodeId, message: &Message) -> Result<(), Violation> {
        if message.region != self.region {
            return Err(Violation::WrongRegion);
        }
        let Message {
            thread, object, body, ..
        } = *message;
        self.handle_body(from, message.epoch, thread, object, body)
    }

    fn handle_body(
        &mut self,
        from: NodeId,
        epoch: u64,
        thread: u16,
        object: u64,
        body: Body,
    ) -> Result<(), Violation> {
        let Node {
            peers,
            homes,
            threads,
            home,
            out,
            ..
        } = self;
        let named = match body {
            Body::Granted { recovered: node } | Body::Woken { gone: node } => node,
            Body::Refused(Refusal::Gone(node)) => Some(node),
            _ => None,
        };
        let is_answer = matches!(
            body,
            Body::Done(_) | Body::Granted { .. } | Body::Queued | Body::Woken { .. } | Body::Refused(_)
        );
        if homes.of(object) != if is_answer { from } else { peers.own() } {
            return Err(Violation::NotHome);
        }
        // The home has heard of no newer epoch than this node.
        if named.is_some_and(|it| !peers.was_member(it) || peers.is_member(it)) {
            return Err(Violation::WrongNode);
        }
        match is_answer {
            true => threads.answer(thread, object, body, homes, peers, out),
            false => home.request((from, thread), epoch, object, body, peers, out),
        }
    }

    /// Numbers the messages to others, and handles those to this node, until there is none.
    fn settle(&mut self) {
        let (own, epoch) = (self.peers.own(), self.peers.epoch());
        while let Some(post) = self.out.posts.pop_front() {
            let Post {
                to,
                thread,
                object,
                body,
            } = post;
            if to == own {
                let outcome = self.handle_body(own, epoch, thread, object, body);
                self.accuse(own, outcome);
            } else if let Some(sequence) = self.peers.number(to) {
                let region = self.region;
                let message = Message {
                    region,
                    epoch,
                    sequence,
                    thread,
                    object,
                    body,
                };
                self.out.actions.push_back(Action::Send { to, message });
            }
        }
    }

    fn accuse(&mut self, node: NodeId, outcome: Result<(), Violation>) {
        if let Err(violation) = outcome {
            self.out.actions.push_back(Action::Accuse { node, violation });
        }
    }
}
