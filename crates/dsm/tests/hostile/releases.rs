//! A hostile node that takes part in a region with release consistency: it spoils that region at most.

use rdmux_dsm::protocol::Homes;
use rdmux_dsm::sync::Call;
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::Memory;
use rdmux_wire::dsm::notice::{HEADER_LEN, LOG_LEN};

use super::*;

/// Pages of the regions of [`pair`]: two that its nodes share, each with another home, and one whose home is the hostile node.
const COUNTS: u64 = 0;
const SUM: u64 = PAGE;
const OF_HOSTILE: u64 = HOSTILE as u64 * PAGE;

fn word(region: &Region<'_>, at: u64) -> u64 {
    let mut bytes = [0; 8];
    region.read(at, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

/// The regions of [`pair`].
const CONSISTENCIES: [Consistency; 3] = [
    Consistency::Release,
    Consistency::Release,
    Consistency::Sequential,
];

/// Two nodes count in three regions, under a lock of a home that lives. The hostile node is a member of all regions, and attacks the first one.
pub(super) fn pair(session: &Session) {
    let regions = CONSISTENCIES.map(|it| region(session, it).unwrap());
    let lock = object_of(session, 0);
    let (own, other) = (session.node(), 1 - session.node());
    println!("@ begins");
    std::thread::scope(|scope| {
        if session.nodes() == NODES {
            scope.spawn(|| {
                // The hostile node never makes it.
                let error = region(session, Consistency::Sequential).unwrap_err();
                println!("@ misses {}: {error}", named(&error));
            });
        }
        let mut thread = session.thread(0).unwrap();
        let mut is_spoilt = false;
        let mut told = Instant::now();
        for round in 0.. {
            let mode = sync::Mode::Exclusive;
            thread.call(Call::Lock { object: lock, mode }).unwrap();
            for (number, region) in regions.iter().enumerate() {
                let count = |node: u32| word(region, COUNTS + 8 * u64::from(node));
                let (mine, sum) = (count(own), word(region, SUM));
                let is_right = mine == round && sum == mine.wrapping_add(count(other));
                if number == 0 && !is_right && !is_spoilt {
                    is_spoilt = true;
                    println!("@ spoilt in round {round}");
                }
                assert!(
                    number == 0 || is_right,
                    "region {number}: {mine} of {round}, sum {sum}"
                );
                let write = |at: u64, value: u64| region.write(at, &value.to_ne_bytes());
                write(COUNTS + 8 * u64::from(own), round + 1).unwrap();
                write(SUM, sum.wrapping_add(1)).unwrap();
                if number == 0
                    && let Err(error) = write(OF_HOSTILE + 8 * u64::from(own), round)
                {
                    assert!(matches!(error, Error::Lost { node: HOSTILE, .. }), "{error}");
                }
            }
            if let Err(error) = thread.call(Call::Unlock { object: lock, mode }) {
                assert!(matches!(error, Error::Unreleased { node: HOSTILE }), "{error}");
            }
            if told.elapsed() > Duration::from_millis(20) {
                told = Instant::now();
                println!("@ round {round}");
            }
        }
    });
}

/// Returns an object of synchronisation that has this home.
fn object_of(session: &Session, home: u32) -> u64 {
    let nodes: Vec<NodeId> = (0..session.nodes()).map(id).collect();
    let homes = Homes::hash(nodes).unwrap();
    (0..).find(|object| homes.of(*object).number() == home).unwrap()
}

/// Node 0 takes a lock when node 1 is gone, and then calls the hostile node.
pub(super) fn lone(session: &Session) {
    let _regions = CONSISTENCIES.map(|it| region(session, it).unwrap());
    println!("@ begins");
    if session.node() == 1 {
        stay();
    }
    // The hostile node never makes it.
    let error = region(session, Consistency::Sequential).unwrap_err();
    assert_eq!(named(&error), 1, "{error}");
    let mut thread = session.thread(0).unwrap();
    let guard = thread.lock(object_of(session, 0));
    println!("@ locks: {:?}", guard.is_ok());
    drop(guard);
    let error = thread.load(object_of(session, HOSTILE)).unwrap_err();
    println!("@ misses {}: {error}", named(&error));
    stay();
}

/// A hostile node that takes part in the regions of [`pair`], with the numbers of the messages about region 0 that it has sent to each other node.
struct Foe {
    it: Played,
    sent: [u64; HOSTILE as usize],
}

/// A flush that a node waits for.
#[derive(Clone, Copy)]
struct Asked {
    request: u64,
    unit: u64,
    units: u32,
}

impl Foe {
    fn begin(mode: FaultMode) -> (Vec<Node>, Foe) {
        Foe::begin_in("pair", mode)
    }

    fn begin_in(part: &str, mode: FaultMode) -> (Vec<Node>, Foe) {
        let clusters = clusters(NODES, LEASE);
        let start = |cluster| Node::start(command(&[], part, cluster, mode));
        let nodes: Vec<Node> = clusters[..HOSTILE as usize].iter().map(start).collect();
        let mut it = Played::join(&clusters[HOSTILE as usize]);
        assert_eq!(it.make_release_region(0), PAGES);
        // The log of region 1 is that of a node that writes nothing there.
        let silent = it.region().rkey().0;
        it.make(1, silent);
        it.make(2, 0);
        let foe = Foe {
            it,
            sent: [0; HOSTILE as usize],
        };
        (nodes, foe)
    }

    /// Sends a message about region 0, of the next number.
    fn say(&mut self, to: u32, request: u64, unit: u64, body: Body) {
        let sequence = self.sent[to as usize];
        self.sent[to as usize] += 1;
        let message = Message {
            sequence,
            request,
            ..about(unit, body)
        };
        self.it.send(to, emitted(message));
    }

    /// Returns the next flush of a node that has come.
    fn take_flush(&mut self, from: u32) -> Option<Asked> {
        while let Some(message) = self.it.take(from) {
            if let Some(asked) = flush_of(&message) {
                return Some(asked);
            }
        }
        None
    }

    /// Waits for a flush of a node, and answers those of the other one as a home does.
    fn wait_for_flush(&mut self, from: u32) -> Asked {
        let deadline = Instant::now() + LONG;
        loop {
            assert!(Instant::now() < deadline, "node {from} does not flush");
            self.it.pump();
            if let Some(asked) = self.take_flush(from) {
                return asked;
            }
            self.serve(1 - from);
            std::thread::yield_now();
        }
    }

    /// Answers the flushes of a node as a home does.
    fn serve(&mut self, from: u32) {
        while let Some(Asked { request, unit, units }) = self.take_flush(from) {
            self.say(from, request, unit, Body::Flushed { units });
        }
    }

    /// Answers all flushes until a condition holds.
    fn serve_until(&mut self, mut is_met: impl FnMut() -> bool) {
        let deadline = Instant::now() + LONG;
        while !is_met() {
            assert!(Instant::now() < deadline, "the nodes do not go on");
            self.it.pump();
            (0..HOSTILE).for_each(|from| self.serve(from));
            std::thread::yield_now();
        }
    }

    /// Serves until nodes have gone on for some rounds.
    fn go_on(&mut self, nodes: &mut [Node]) {
        let before: Vec<usize> = nodes.iter_mut().map(rounds).collect();
        self.serve_until(|| {
            let mut now = nodes.iter_mut().map(rounds).zip(&before);
            now.all(|(now, before)| now >= before + 2)
        });
    }

    fn log(&self) -> &AnonymousMemory {
        &self.it.shadow
    }

    /// Writes the counts of its log, and bytes for its runs.
    fn write_log(&self, begun: u64, ended: u64, run: impl FnMut(usize) -> [u8; 8]) {
        let mut bytes = [begun.to_le_bytes(), ended.to_le_bytes()].concat();
        bytes.extend((0..(LOG_LEN - HEADER_LEN) / 8).flat_map(run));
        self.log().write(PAGES * PAGE, &bytes).unwrap();
    }
}

/// Returns the flush that a message is.
fn flush_of(message: &[u8; MESSAGE_LEN]) -> Option<Asked> {
    match Message::parse(message).ok()? {
        Message {
            region: 0,
            request,
            unit,
            body: Body::Flush { units },
            ..
        } => Some(Asked { request, unit, units }),
        _ => None,
    }
}

/// Returns a run of a log.
fn run(first: u32, count: u32) -> [u8; 8] {
    let value = u64::from(first) | u64::from(count) << 32;
    value.to_le_bytes()
}

fn have_all(nodes: &mut [Node], words: &str) -> bool {
    nodes.iter_mut().all(|node| node.printed().contains(words))
}

fn has_none(nodes: &mut [Node], words: &str) -> bool {
    nodes.iter_mut().all(|node| !node.printed().contains(words))
}

#[test]
fn hostile__garbled_write_notices_spoil_nothing() {
    let mut others = start("pair", 2, FaultMode::Inline, LONG);
    for seed in 0..3 {
        println!("seed {seed}");
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let (mut nodes, mut foe) = Foe::begin(MODES[seed as usize % 3]);
        // All counts and runs of the protocol's limits, and some of none.
        let counts = [1, 3, 2, 0, u64::MAX, 1022, 1023, 2045, 5];
        let counts: Vec<u64> = counts
            .into_iter()
            .chain((0..6).map(|_| dice.next_u64()))
            .collect();
        for (begun, ended) in counts.iter().zip(counts.iter().skip(1).chain(&[7])) {
            let kind = dice.next_u32() % 5;
            foe.write_log(*begun, *ended, |_| match kind {
                0 => run(0, 0),
                1 => run(u32::MAX, u32::MAX),
                2 => run(0, PAGES as u32),
                3 => run(PAGES as u32 - 1, u32::MAX - PAGES as u32),
                _ => dice.next_u64().to_le_bytes(),
            });
            foe.go_on(&mut nodes);
        }
        // Others read it while it changes.
        let mut ended = 0u64;
        for _ in 0..200 {
            ended = ended.wrapping_add(dice.next_u64() % 3);
            foe.write_log(ended, ended, |_| run(dice.next_u32() % 16, dice.next_u32() % 3));
            foe.it.pump();
            (0..HOSTILE).for_each(|from| foe.serve(from));
        }
        foe.go_on(&mut nodes);
        assert!(has_none(&mut nodes, "misses") && has_none(&mut nodes, "spoilt"));
        drop(foe);
        wait_for(&mut nodes, "@ misses 2: node 2 is gone: ");
        go_on(&mut nodes);
        // The writes of region 0 that have other homes are there.
        assert!(has_none(&mut nodes, "spoilt"));
    }
    go_on(&mut others);
    assert!(has_none(&mut others, "spoilt"));
}

/// The count of a log goes from the last number to none, as that of no correct node does.
#[test]
fn hostile__write_notices_whose_count_wraps_spoil_nothing() {
    let (mut nodes, mut foe) = Foe::begin(FaultMode::Inline);
    for ended in [u64::MAX, 0, u64::MAX, 5] {
        foe.write_log(ended, ended, |_| run(0, PAGES as u32));
        foe.go_on(&mut nodes);
    }
    assert!(has_none(&mut nodes, "misses") && has_none(&mut nodes, "spoilt"));
}

/// The node does not tell that it stores no more of what node 1 has written.
#[test]
fn hostile__node_that_does_not_settle_has_to_leave() {
    for mode in MODES {
        let (mut nodes, mut foe) = Foe::begin_in("lone", mode);
        wait_for(&mut nodes, "@ begins");
        drop(nodes.remove(1));
        foe.serve_until(|| have_all(&mut nodes, "@ misses 2: "));
        assert!(have_all(&mut nodes, "@ locks: true"));
    }
}

type Release = fn(&mut Foe, u32);

/// A message of a region with release consistency that a node has to leave for, and a word of the error of the node that it is sent to.
const RELEASES: [(&str, Release, &str); 15] = [
    (
        "a wish for a right",
        |foe, to| foe.say(to, 0, to.into(), Body::Ask(Right::Exclusive)),
        "asked for",
    ),
    (
        "a recall",
        |foe, to| foe.say(to, 0, HOSTILE.into(), Body::Recall(Right::Invalid)),
        "asked for",
    ),
    (
        "a right given back",
        |foe, to| foe.say(to, 0, to.into(), Body::Yielded),
        "asked for",
    ),
    (
        "a grant",
        |foe, to| {
            let (right, source) = (Right::Exclusive, Some(id(HOSTILE)));
            foe.say(to, 0, HOSTILE.into(), Body::Grant { right, source });
        },
        "asked for",
    ),
    (
        "a refusal",
        |foe, to| foe.say(to, 0, HOSTILE.into(), Body::Refuse(id(to))),
        "asked for",
    ),
    (
        "a home",
        |foe, to| foe.say(to, 0, HOSTILE.into(), Body::Home(id(HOSTILE))),
        "another home",
    ),
    (
        "a wish for a home",
        |foe, to| foe.say(to, 0, to.into(), Body::Locate),
        "another home",
    ),
    (
        "the end of a flush to another home",
        |foe, to| foe.say(to, 1, to.into(), Body::Flushed { units: 1 }),
        "another home",
    ),
    (
        "the end of a flush of pages that the region lacks",
        |foe, to| foe.say(to, 1, PAGES, Body::Flushed { units: 1 }),
        "does not have",
    ),
    (
        "the end of a flush of another release",
        |foe, to| {
            let Asked { request, unit, units } = foe.wait_for_flush(to);
            foe.say(to, request.wrapping_sub(1), unit, Body::Flushed { units });
        },
        "asked for",
    ),
    (
        "the end of a flush of more units",
        |foe, to| {
            let Asked { request, unit, .. } = foe.wait_for_flush(to);
            foe.say(to, request, unit, Body::Flushed { units: u32::MAX });
        },
        "asked for",
    ),
    (
        "the end of a flush of other units",
        |foe, to| {
            let Asked { request, unit, units } = foe.wait_for_flush(to);
            foe.say(to, request, unit + u64::from(NODES), Body::Flushed { units });
        },
        "asked for",
    ),
    (
        "the end of a flush twice",
        |foe, to| {
            let Asked { request, unit, units } = foe.wait_for_flush(to);
            foe.say(to, request, unit, Body::Flushed { units });
            foe.say(to, request, unit, Body::Flushed { units });
        },
        "asked for",
    ),
    (
        "a flush of pages that nobody can read",
        |foe, to| {
            let joining = Joining {
                region: 0,
                attempt: 0,
                step: Step::Mapped { key: 1, shadow: 1 },
            };
            foe.it.send(to, joining.emit());
            foe.say(to, 0, to.into(), Body::Flush { units: 1 });
        },
        "",
    ),
    (
        "a message of another region's number",
        |foe, to| {
            let message = Message {
                region: 2,
                ..about(to.into(), Body::Flush { units: 1 })
            };
            foe.it.send(to, emitted(message));
        },
        "protocol",
    ),
];

#[test]
fn hostile__release_message_ends_the_part_of_its_sender_alone() {
    let mut others = start("pair", 2, FaultMode::Inline, LONG);
    for (number, (name, release, word)) in RELEASES.into_iter().enumerate() {
        let to = number as u32 % HOSTILE;
        println!("{name}, to node {to}");
        let (mut nodes, mut foe) = Foe::begin(MODES[number % 3]);
        foe.go_on(&mut nodes);
        release(&mut foe, to);
        assert!(foe.it.pump_until(LONG, |it| it.peer(to).is_ended), "{name}");
        wait_for(&mut nodes, "@ misses 2: node 2 is gone: ");
        let said = line(&mut nodes[to as usize], "@ misses");
        println!("{said}");
        assert!(said.contains(word), "{name}: {said}");
        go_on(&mut nodes);
        assert!(has_none(&mut nodes, "spoilt"), "{name}");
    }
    go_on(&mut others);
    assert!(has_none(&mut others, "spoilt"));
}

#[test]
fn hostile__flush_of_bytes_that_nobody_has_written_spoils_its_own_region_alone() {
    let mut others = start("pair", 2, FaultMode::Inline, LONG);
    for mode in MODES {
        let (mut nodes, mut foe) = Foe::begin(mode);
        foe.go_on(&mut nodes);
        assert!(has_none(&mut nodes, "spoilt"));
        foe.it
            .memory()
            .write(0, &vec![0xee; (2 * PAGE) as usize])
            .unwrap();
        foe.write_log(1, 1, |_| run(0, PAGES as u32));
        for to in 0..HOSTILE {
            foe.say(to, 0, to.into(), Body::Flush { units: 1 });
        }
        foe.serve_until(|| have_all(&mut nodes, "@ spoilt"));
        foe.go_on(&mut nodes);
        assert!(has_none(&mut nodes, "misses"));
        drop(foe);
        wait_for(&mut nodes, "@ misses 2: node 2 is gone: ");
        go_on(&mut nodes);
    }
    go_on(&mut others);
    assert!(has_none(&mut others, "spoilt"));
}

#[test]
fn hostile__home_that_does_not_answer_a_flush_ends_its_part() {
    let (mut nodes, mut foe) = Foe::begin(FaultMode::Thread);
    foe.go_on(&mut nodes);
    // It answers questions whether it is there.
    let is_expelled = foe
        .it
        .pump_until(LONG, |it| it.peer(0).is_ended && it.peer(1).is_ended);
    assert!(is_expelled);
    wait_for(&mut nodes, "@ misses 2: node 2 is gone: ");
    let said: Vec<String> = nodes.iter_mut().map(|node| line(node, "@ misses")).collect();
    println!("{said:?}");
    let word = "it takes messages, but has not answered one for";
    assert!(said.iter().any(|said| said.contains(word)), "{said:?}");
    go_on(&mut nodes);
    assert!(has_none(&mut nodes, "spoilt"));
}

#[test]
fn hostile__noise_of_releases_ends_nobody_else() {
    for seed in 0..6 {
        println!("seed {seed}");
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let (mut nodes, mut foe) = Foe::begin(MODES[seed as usize % 3]);
        foe.go_on(&mut nodes);
        for _ in 0..200 {
            let to = dice.next_u32() % HOSTILE;
            // Most flushes are those that a correct node may send. Others end the connection.
            let unit = match dice.next_u32() % 30 {
                0 => u64::from(dice.next_u32()) % 16,
                _ => u64::from(dice.next_u32() % 4 * NODES + to),
            };
            let body = match dice.next_u32() % 60 {
                0 => Body::Flushed { units: 1 },
                1 => Body::Flush {
                    units: dice.next_u32(),
                },
                _ => Body::Flush { units: 1 },
            };
            let request = dice.next_u64();
            foe.say(to, request, unit, body);
            let (begun, ended) = (dice.next_u64() % 3000, dice.next_u64() % 3000);
            foe.write_log(begun, ended, |_| run(dice.next_u32() % 16, dice.next_u32() % 3));
            let (at, bytes) = (u64::from(dice.next_u32()) % (PAGES * PAGE), dice.next_u64());
            foe.it.memory().write(at, &bytes.to_ne_bytes()).unwrap();
            foe.it.pump();
            (0..HOSTILE).for_each(|from| foe.serve(from));
        }
        drop(foe);
        wait_for(&mut nodes, "@ misses 2: node 2 is gone: ");
        go_on(&mut nodes);
    }
}
