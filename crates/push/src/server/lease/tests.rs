use std::collections::{BTreeSet, HashMap};

use super::*;

const TIMEOUT: Duration = Duration::from_secs(35);
const READ: Access = Access::READ;
const WRITE: Access = Access::WRITE;
const NONE: Access = Access::empty();

fn client(number: u64) -> Owner {
    Owner::Client(ClientId(number))
}

fn number(owner: Owner) -> u64 {
    match owner {
        Owner::Client(ClientId(number)) => number,
        Owner::Local(_) => panic!("{owner:?} is no client"),
    }
}

fn claim(owner: u64, offset: u64, length: u64, access: Access, share: Access) -> Claim {
    Claim {
        owner: client(owner),
        region: RegionId(0),
        offset,
        length,
        access,
        share,
    }
}

fn writer(owner: u64) -> Claim {
    claim(owner, 0, 100, WRITE, NONE)
}

fn reader(owner: u64) -> Claim {
    claim(owner, 0, 100, READ, READ)
}

fn effects(leases: &mut Leases) -> Vec<Effect> {
    std::iter::from_fn(|| leases.poll()).collect()
}

fn ask(leases: &mut Leases, now: Duration, claim: Claim) -> (LeaseId, Answer) {
    leases.request(now, claim, Kind::Mapping, Conflict::Break)
}

#[test]
fn conflicts__several_readers_or_one_writer_unless_shared() {
    let both = READ | WRITE;
    for (a, b, expected) in [
        (reader(1), reader(2), false),
        (reader(1), writer(2), true),
        (writer(1), writer(2), true),
        (writer(1), writer(1), false),
        (claim(1, 0, 50, WRITE, NONE), claim(2, 50, 50, WRITE, NONE), false),
        (claim(1, 0, 51, WRITE, NONE), claim(2, 50, 50, WRITE, NONE), true),
        (claim(1, 0, 9, WRITE, READ), claim(2, 0, 9, READ, both), false),
        (claim(1, 0, 9, WRITE, READ), claim(2, 0, 9, READ, READ), true),
        (claim(1, 0, 9, both, both), claim(2, 0, 9, both, both), false),
        (
            claim(1, 1, u64::MAX, WRITE, NONE),
            claim(2, u64::MAX, 1, WRITE, NONE),
            false,
        ),
        (
            claim(1, 1, u64::MAX, WRITE, NONE),
            claim(2, 7, 1, WRITE, NONE),
            true,
        ),
    ] {
        assert_eq!(a.conflicts(&b), expected, "{a:?} {b:?}");
        assert_eq!(b.conflicts(&a), expected, "{b:?} {a:?}");
    }
    let elsewhere = Claim {
        region: RegionId(1),
        ..writer(2)
    };
    assert!(!writer(1).conflicts(&elsewhere));
}

#[test]
fn request__holder_that_lets_go_is_followed_by_the_one_that_asked() {
    let (mut leases, now) = (Leases::new(TIMEOUT), Duration::ZERO);
    let (held, answer) = ask(&mut leases, now, writer(1));
    assert_eq!(answer, Answer::Granted);
    let (asked, answer) = ask(&mut leases, now, reader(2));
    assert_eq!(answer, Answer::Waiting);
    let until = now + TIMEOUT;
    let notify = Effect::Notify {
        lease: held,
        owner: client(1),
        until,
    };
    assert_eq!(effects(&mut leases), [notify]);
    assert_eq!(leases.next_timeout(), Some(until));
    leases.handle_timeout(until - Duration::from_millis(1));
    assert_eq!(effects(&mut leases), []);
    leases.release(now, held);
    let granted = Effect::Granted {
        lease: asked,
        owner: client(2),
    };
    assert_eq!(effects(&mut leases), [granted]);
    assert_eq!(leases.next_timeout(), None);
}

#[test]
fn handle_timeout__a_holder_that_does_not_let_go_is_revoked_first() {
    let (mut leases, now) = (Leases::new(TIMEOUT), Duration::ZERO);
    let (held, _) = ask(&mut leases, now, writer(1));
    let (asked, _) = ask(&mut leases, now, writer(2));
    effects(&mut leases);
    leases.handle_timeout(now + TIMEOUT);
    leases.handle_timeout(now + TIMEOUT);
    let revoke = Effect::Revoke {
        lease: held,
        owner: client(1),
    };
    assert_eq!(
        effects(&mut leases),
        [revoke],
        "once, and nobody else holds it yet"
    );
    assert!(!leases.is_held(asked));
    leases.release(now + TIMEOUT, held);
    let granted = Effect::Granted {
        lease: asked,
        owner: client(2),
    };
    assert_eq!(effects(&mut leases), [granted]);
}

#[test]
fn request__that_may_fail_does_and_disturbs_nobody() {
    let (mut leases, now) = (Leases::new(TIMEOUT), Duration::ZERO);
    let (held, _) = ask(&mut leases, now, writer(1));
    let (_, answer) = leases.request(now, reader(2), Kind::Mapping, Conflict::Fail);
    assert_eq!(answer, Answer::Refused(writer(1)));
    assert_eq!(effects(&mut leases), []);
    leases.release(now, held);
    assert_eq!(effects(&mut leases), []);
}

#[test]
fn request__an_operation_is_waited_for_and_not_broken() {
    let (mut leases, now) = (Leases::new(TIMEOUT), Duration::ZERO);
    let operation = claim(1, 0, 10, WRITE, READ | WRITE);
    let (running, answer) = leases.request(now, operation, Kind::Operation, Conflict::Break);
    assert_eq!(answer, Answer::Granted);
    let (asked, _) = ask(&mut leases, now, writer(2));
    assert_eq!((effects(&mut leases), leases.next_timeout()), (vec![], None));
    leases.release(now, running);
    let granted = Effect::Granted {
        lease: asked,
        owner: client(2),
    };
    assert_eq!(effects(&mut leases), [granted]);
}

#[test]
fn request__who_asked_first_is_served_first_and_broken_for_the_next() {
    let (mut leases, now) = (Leases::new(TIMEOUT), Duration::ZERO);
    let (first, _) = ask(&mut leases, now, reader(1));
    let (second, _) = ask(&mut leases, now, writer(2));
    // The reader would not conflict with the holder, but it asked after the writer.
    let (third, answer) = ask(&mut leases, now, reader(3));
    assert_eq!(answer, Answer::Waiting);
    effects(&mut leases);
    leases.release(now, first);
    let granted = Effect::Granted {
        lease: second,
        owner: client(2),
    };
    let notify = Effect::Notify {
        lease: second,
        owner: client(2),
        until: now + TIMEOUT,
    };
    assert_eq!(effects(&mut leases), [granted, notify]);
    leases.owner_ended(now, client(2));
    let granted = Effect::Granted {
        lease: third,
        owner: client(3),
    };
    assert_eq!(effects(&mut leases), [granted]);
    assert_eq!(leases.len(), 1);
}

#[test]
fn owner_ended__takes_back_what_it_waited_for() {
    let (mut leases, now) = (Leases::new(TIMEOUT), Duration::ZERO);
    let (held, _) = ask(&mut leases, now, writer(1));
    ask(&mut leases, now, writer(2));
    effects(&mut leases);
    leases.owner_ended(now, client(2));
    leases.release(now, held);
    assert_eq!(effects(&mut leases), []);
    assert!(leases.is_empty());
}

#[test]
fn owner_ended__a_granted_operation_is_still_told_of_to_be_released() {
    let (mut leases, now) = (Leases::new(TIMEOUT), Duration::ZERO);
    let (held, _) = ask(&mut leases, now, writer(1));
    let (asked, answer) = leases.request(now, writer(2), Kind::Operation, Conflict::Break);
    assert_eq!(answer, Answer::Waiting);
    effects(&mut leases);
    leases.release(now, held);
    leases.owner_ended(now, client(2));
    let granted = Effect::Granted {
        lease: asked,
        owner: client(2),
    };
    assert_eq!(effects(&mut leases), [granted]);
    leases.release(now, asked);
    assert!(leases.is_empty());
}

/// SplitMix64 (Steele, Lea, Flood, 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// A packet from a client to the server; packets on one connection stay in order.
#[derive(Clone, Debug)]
enum Packet {
    Map(Claim, Conflict),
    Write {
        key: LeaseId,
        at: u64,
    },
    Release(LeaseId),
    /// The first packet on a new connection of the client.
    Connect {
        before: Option<u64>,
    },
}

/// A defect of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    None,
    /// The driver tells the table that a lease is gone while its key still works.
    ReleasesFirst,
    /// The driver accepts a new connection before it invalidates the old one's keys.
    ForgetsOldConnections,
    /// The driver forgets a break that the client does not answer in time.
    NeverRevokes,
}

/// A client program, and the keys that it believes to be valid.
#[derive(Debug, Default)]
struct Client {
    connection: u64,
    keys: Vec<(LeaseId, Claim)>,
    /// Set while the client is stopped: it does nothing, but its packets are still in flight.
    stopped: bool,
}

/// A server, clients and the network between them. Packets arrive in order within a connection, after any time.
struct World {
    now: Duration,
    random: Random,
    defect: Defect,
    leases: Leases,
    clients: Vec<Client>,
    connections: u64,
    alive: BTreeSet<u64>,
    /// Keys that the server's NIC accepts, with the connection on which they are valid.
    keys: HashMap<LeaseId, Claim>,
    to_server: HashMap<u64, VecDeque<Packet>>,
    to_client: HashMap<u64, VecDeque<Effect>>,
    claims: HashMap<LeaseId, Claim>,
    waiting: BTreeSet<LeaseId>,
    placed: u64,
    killed: u64,
}

impl World {
    fn new(seed: u64, defect: Defect) -> World {
        World {
            now: Duration::ZERO,
            random: Random(seed),
            defect,
            leases: Leases::new(TIMEOUT),
            clients: (0..4).map(|_| Client::default()).collect(),
            connections: 0,
            alive: BTreeSet::new(),
            keys: HashMap::new(),
            to_server: HashMap::new(),
            to_client: HashMap::new(),
            claims: HashMap::new(),
            waiting: BTreeSet::new(),
            placed: 0,
            killed: 0,
        }
    }

    fn step(&mut self) -> Result<(), String> {
        match self.random.below(10) {
            0..=3 => self.client_acts(),
            4..=6 => {
                let mut links: Vec<u64> = self
                    .to_server
                    .iter()
                    .filter(|(_, q)| !q.is_empty())
                    .map(|(c, _)| *c)
                    .collect();
                links.sort_unstable();
                if links.is_empty() {
                    return Ok(());
                }
                let connection = links[self.random.below(links.len() as u64) as usize];
                let packet = self
                    .to_server
                    .get_mut(&connection)
                    .and_then(VecDeque::pop_front)
                    .unwrap();
                self.arrives(connection, packet)?;
            }
            7 | 8 => self.client_hears(),
            _ => {
                self.now += Duration::from_millis(self.random.below(20_000));
                self.leases.handle_timeout(self.now);
            }
        }
        self.carry_out()
    }

    fn client_acts(&mut self) {
        let at = self.random.below(4) as usize;
        let what = self.random.below(12);
        let (offset, length) = (self.random.below(8), 1 + self.random.below(4));
        let bits = self.random.below(4) as u32;
        let (access, share) = (
            [READ, WRITE, READ | WRITE, WRITE][self.random.below(4) as usize],
            Access::from_bits_truncate(bits),
        );
        let pick = self.random.below(100) as usize;
        let client = &mut self.clients[at];
        if client.stopped {
            client.stopped = what != 0;
            return;
        }
        let packet = match what {
            // The client connects, for the first time or again; its earlier packets may still be in flight.
            0 => {
                let before = (client.connection != 0).then_some(client.connection);
                self.connections += 1;
                client.connection = self.connections;
                client.keys.clear();
                Packet::Connect { before }
            }
            _ if client.connection == 0 => return,
            1 => {
                client.stopped = true;
                return;
            }
            2..=4 => {
                let conflict = if what == 2 {
                    Conflict::Fail
                } else {
                    Conflict::Break
                };
                Packet::Map(claim(client.connection, offset, length, access, share), conflict)
            }
            5 if !client.keys.is_empty() => {
                // Sometimes the client releases a lease twice.
                let at = pick % client.keys.len();
                let key = client.keys[at].0;
                if pick.is_multiple_of(2) {
                    client.keys.remove(at);
                }
                Packet::Release(key)
            }
            _ if !client.keys.is_empty() => {
                let (key, claim) = &client.keys[pick % client.keys.len()];
                let at = claim.offset + pick as u64 % claim.length;
                Packet::Write { key: *key, at }
            }
            _ => return,
        };
        self.to_server
            .entry(client.connection)
            .or_default()
            .push_back(packet);
    }

    /// A client acts on a message from the server, or ignores it.
    fn client_hears(&mut self) {
        let at = self.random.below(4) as usize;
        let obeys = self.random.below(4) != 0;
        let client = &mut self.clients[at];
        if client.stopped {
            return;
        }
        let heard = self
            .to_client
            .get_mut(&client.connection)
            .and_then(VecDeque::pop_front);
        match heard {
            Some(Effect::Granted { lease, .. }) => {
                let claim = self.claims[&lease].clone();
                client.keys.push((lease, claim));
            }
            Some(Effect::Notify { lease, .. }) if obeys => {
                client.keys.retain(|(key, _)| *key != lease);
                let queue = self.to_server.entry(client.connection).or_default();
                queue.push_back(Packet::Release(lease));
            }
            _ => {}
        }
    }

    fn arrives(&mut self, connection: u64, packet: Packet) -> Result<(), String> {
        if let Packet::Connect { before } = packet {
            if let Some(before) = before
                && self.defect != Defect::ForgetsOldConnections
            {
                self.end(before);
            } else if let Some(before) = before {
                self.leases.owner_ended(self.now, client(before));
            }
            self.alive.insert(connection);
            return Ok(());
        }
        if !self.alive.contains(&connection) {
            return Ok(());
        }
        match packet {
            Packet::Map(claim, conflict) => {
                let (id, answer) = self
                    .leases
                    .request(self.now, claim.clone(), Kind::Mapping, conflict);
                self.claims.insert(id, claim);
                match answer {
                    Answer::Granted => self.granted(id)?,
                    Answer::Waiting => drop(self.waiting.insert(id)),
                    Answer::Refused(_) => {}
                }
            }
            Packet::Release(id) => {
                if self.defect == Defect::ReleasesFirst {
                    self.leases.release(self.now, id);
                    self.carry_out()?;
                }
                self.keys.remove(&id);
                self.leases.release(self.now, id);
            }
            Packet::Write { key, at } => match self.keys.get(&key) {
                Some(claim) if claim.owner == client(connection) => self.place(key, at)?,
                _ => {
                    self.killed += 1;
                    self.end(connection);
                }
            },
            Packet::Connect { .. } => unreachable!(),
        }
        Ok(())
    }

    fn end(&mut self, connection: u64) {
        self.alive.remove(&connection);
        self.keys.retain(|_, claim| claim.owner != client(connection));
        self.waiting
            .retain(|id| self.claims[id].owner != client(connection));
        self.leases.owner_ended(self.now, client(connection));
    }

    fn carry_out(&mut self) -> Result<(), String> {
        while let Some(effect) = self.leases.poll() {
            match effect {
                Effect::Granted { lease, .. } => {
                    self.waiting.remove(&lease);
                    self.granted(lease)?;
                }
                Effect::Revoke { lease, .. } => {
                    if self.defect != Defect::NeverRevokes {
                        self.keys.remove(&lease);
                    }
                    self.leases.release(self.now, lease);
                }
                Effect::Notify { owner, .. } => {
                    self.to_client.entry(number(owner)).or_default().push_back(effect);
                }
            }
        }
        Ok(())
    }

    /// Gives out a key, and checks that no key of a conflicting lease is left: nothing may be written through such a key from
    /// here on.
    fn granted(&mut self, lease: LeaseId) -> Result<(), String> {
        let claim = self.claims[&lease].clone();
        if let Some(other) = self.keys.values().find(|other| other.conflicts(&claim)) {
            return Err(format!("{claim:?} is granted while {other:?} has a key"));
        }
        let owner = claim.owner;
        self.keys.insert(lease, claim);
        self.to_client
            .entry(number(owner))
            .or_default()
            .push_back(Effect::Granted { lease, owner });
        Ok(())
    }

    fn place(&mut self, key: LeaseId, at: u64) -> Result<(), String> {
        self.placed += 1;
        let byte = |owner| claim(owner, at, 1, WRITE, READ | WRITE);
        let claim = &self.claims[&key];
        let other = self
            .keys
            .iter()
            .find(|(id, other)| **id != key && other.conflicts(&byte(number(claim.owner))));
        if !self.leases.is_held(key) {
            return Err(format!("a write through {claim:?}, which is not held any more"));
        }
        if let (Some((_, other)), true) = (other, claim.access.contains(WRITE)) {
            return Err(format!("a write through {claim:?} into {other:?}"));
        }
        Ok(())
    }

    /// Checks that every request that still waits is granted when time goes on and no more requests come.
    fn finish(&mut self) -> Result<(), String> {
        for _ in 0..1_000 {
            if self.waiting.is_empty() {
                return Ok(());
            }
            self.now += TIMEOUT;
            self.leases.handle_timeout(self.now);
            self.carry_out()?;
        }
        Err(format!("{:?} wait for ever", self.waiting))
    }
}

fn run(seed: u64, defect: Defect) -> Result<(u64, u64), String> {
    let mut world = World::new(seed, defect);
    for _ in 0..400 {
        world.step()?;
    }
    world.finish()?;
    Ok((world.placed, world.killed))
}

#[test]
fn leases__no_write_after_the_revocation_point_in_random_runs() {
    let (mut placed, mut killed) = (0, 0);
    for seed in 0..3_000 {
        let (p, k) = run(seed, Defect::None).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        placed += p;
        killed += k;
    }
    println!("{placed} writes placed, {killed} late ones ended their connection");
    assert!(placed > 10_000 && killed > 1_000, "{placed} {killed}");
}

#[test]
fn leases__wrong_drivers_are_caught() {
    for defect in [
        Defect::ReleasesFirst,
        Defect::ForgetsOldConnections,
        Defect::NeverRevokes,
    ] {
        let caught = (0..500).find(|seed| run(*seed, defect).is_err());
        assert!(caught.is_some(), "{defect:?} in 500 seeds");
        println!("{defect:?} is caught by seed {caught:?}");
    }
}
