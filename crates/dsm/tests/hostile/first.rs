//! A hostile node 0, through which the others join and make regions, and which decides on members: they have an error that names it, or ignore what it says.

use rdmux_dsm::Cluster;
use rdmux_wire::dsm::joining::Hello;

use super::played::{Answer, answer_all, step_of};
use super::*;

/// The hostile node.
pub(super) const FIRST: u32 = 0;
/// A node that joins a cluster and makes a region, and tells the error that ends one of the two, and its end after that.
pub(super) const JOINER: &str = "joiner";
/// The same, with less time to join.
pub(super) const IMPATIENT: &str = "impatient joiner";

pub(super) fn join(part: &str) {
    rdmux_soft::register();
    let time = match part {
        IMPATIENT => Duration::from_secs(4),
        _ => LONG / 2,
    };
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    match Session::join(Cluster::of_environment().unwrap(), time) {
        Err(error) => println!("@ ends: {error}"),
        Ok(session) => {
            println!("@ joins");
            println!(
                "@ ends: {}",
                region(&session, Consistency::Sequential).unwrap_err()
            );
        }
    }
    // Threads of the device close some after the end of what they belong to.
    let deadline = Instant::now() + LONG / 2;
    while descriptors() > before {
        let now = descriptors();
        assert!(Instant::now() < deadline, "{now} descriptors, {before} before");
        std::thread::yield_now();
    }
    println!("@ has left");
}

/// Checks that nodes have ended with an error: one that has a word, or that another node has told.
fn check_ends(name: &str, word: &str, mut nodes: Vec<Node>) {
    wait_for(&mut nodes, "@ has left");
    let said: Vec<String> = nodes.iter_mut().map(|node| line(node, "@ ends")).collect();
    println!("{name}: {said:?}");
    let is_told = |said: &String| {
        let words = [word, "has lost its connection to it", "cannot make region 0"];
        words.iter().any(|word| said.contains(word))
    };
    assert!(said.iter().any(|said| said.contains(word)), "{said:?}");
    assert!(said.iter().all(is_told), "{said:?}");
    for node in nodes {
        node.succeed();
    }
}

type Greeting = fn(Hello) -> Answer;

fn accept(hello: Hello) -> Answer {
    Answer::Accept(hello.emit().to_vec())
}

/// An answer to nodes that connect, and a word of their error.
const GREETINGS: [(&str, Greeting, &str); 12] = [
    (
        "no greeting",
        |_| Answer::Accept(Vec::new()),
        "is of another cluster",
    ),
    (
        "bytes that are no greeting",
        |_| Answer::Accept(vec![0xff; 150]),
        "is of another cluster",
    ),
    (
        "a greeting that ends early",
        |hello| Answer::Accept(hello.emit()[..20].to_vec()),
        "node 0",
    ),
    (
        "reserved bytes",
        |hello| {
            let mut bytes = hello.emit();
            bytes[10] = 1;
            Answer::Accept(bytes.to_vec())
        },
        "is of another cluster",
    ),
    (
        "another version",
        |hello| accept(Hello { version: 77, ..hello }),
        "version 77",
    ),
    (
        "pages of no bytes",
        |hello| {
            accept(Hello {
                page_bytes: 0,
                ..hello
            })
        },
        "have 0 bytes",
    ),
    (
        "another number of nodes",
        |hello| {
            accept(Hello {
                nodes: u32::MAX,
                ..hello
            })
        },
        "is of another cluster",
    ),
    (
        "the number of another node",
        |hello| accept(Hello { node: 1, ..hello }),
        "is of another cluster",
    ),
    (
        "another session",
        |hello| {
            accept(Hello {
                session: [7; 16],
                ..hello
            })
        },
        "is of another cluster",
    ),
    (
        "a refusal without a reason",
        |_| Answer::Reject(Vec::new()),
        "is of another cluster",
    ),
    (
        "a refusal by a node that is not there",
        |hello| {
            Answer::Reject(
                Hello {
                    node: u32::MAX,
                    ..hello
                }
                .emit()
                .to_vec(),
            )
        },
        "is of another cluster",
    ),
    (
        "a ring that nobody may write",
        |hello| accept(Hello { ring: 1, ..hello }),
        "node 0 is gone: ",
    ),
];

/// Starts the nodes of a cluster but the first one. Returns them, and the cluster as the first one knows it.
fn start_others(part: &str, lease: Duration, mode: FaultMode) -> (Vec<Node>, Cluster) {
    let mut clusters = clusters(NODES, lease);
    let start = |cluster| Node::start(command(&[], part, cluster, mode));
    let nodes = clusters[1..].iter().map(start).collect();
    (nodes, clusters.swap_remove(FIRST as usize))
}

fn have_left(nodes: &[Node]) -> bool {
    nodes.iter().all(|node| node.printed().contains("@ has left"))
}

/// Has two nodes join a cluster whose first node greets them so, and checks their error.
fn check_greeting(part: &str, (name, greeting, word): (&str, Greeting, &str), mode: FaultMode) {
    println!("{name}");
    let (nodes, first) = start_others(part, LEASE, mode);
    answer_all(&first, greeting, || have_left(&nodes));
    check_ends(name, word, nodes);
}

#[test]
fn hostile__first_node_that_greets_wrongly_ends_the_joining_of_the_others() {
    let mut others = start("bystander", 2, FaultMode::Inline, LONG);
    for (number, greeting) in GREETINGS.into_iter().enumerate() {
        check_greeting(JOINER, greeting, MODES[number % 3]);
    }
    wait_for(&mut others, "@ begins");
    go_on(&mut others);
    assert!(others.iter_mut().all(|node| !node.printed().contains("misses")));
}

#[test]
fn hostile__first_node_that_does_not_answer_is_absent_in_time() {
    let began = Instant::now();
    check_greeting(
        IMPATIENT,
        ("no answer", |_| Answer::Nothing, "has not joined within"),
        FaultMode::Inline,
    );
    // Time is meant: that of the joining, with what a busy host takes.
    assert!(began.elapsed() < LONG / 2, "after {:?}", began.elapsed());
}

/// Returns what a correct first node offers: a region of an address, with the other settings of the nodes of a program.
pub(super) fn offer(program: &str) -> Step {
    let clusters = clusters(2, LONG);
    let _first = Node::start(command(&[], program, &clusters[0], FaultMode::Inline));
    let mut second = Played::join(&clusters[1]);
    let offer = second.receive(FIRST, |message| match step_of(message, 0)? {
        Step::Propose { pages, digest, .. } => Some(Step::Propose {
            address: 3 << 44,
            pages,
            digest,
        }),
        _ => None,
    });
    offer.expect("an offer")
}

/// Returns an offer whose address, pages or digest are changed.
pub(super) fn changed(offer: Step, change: impl FnOnce(&mut [u64; 3])) -> Step {
    match offer {
        Step::Propose {
            address,
            pages,
            digest,
        } => {
            let mut numbers = [address, pages, digest];
            change(&mut numbers);
            let [address, pages, digest] = numbers;
            Step::Propose {
                address,
                pages,
                digest,
            }
        }
        other => other,
    }
}

/// Addresses that no region can have.
const ADDRESSES: [u64; 16] = [
    0,
    1,
    8,
    PAGE + 8,
    u64::MAX,
    u64::MAX - PAGE + 1,
    0_u64.wrapping_sub(PAGES * PAGE),
    0_u64.wrapping_sub(4 * PAGES * PAGE),
    1 << 63,
    (1 << 63) - PAGE,
    (1 << 47) - PAGE,
    1 << 56,
    1 << 60,
    (3 << 44) + 1,
    (3 << 44) + PAGE / 2,
    0xffff_8000_0000_0000,
];

type Making = fn(&mut Played, Step);

/// An act of the first node when a region is made, with a correct offer, and a word of the error of the others.
const MAKINGS: [(&str, Making, &str); 10] = [
    (
        "other pages",
        |it, offer| it.tell_all(0, changed(offer, |[_, pages, _]| *pages = u64::MAX)),
        "region 0",
    ),
    (
        "other settings",
        |it, offer| it.tell_all(0, changed(offer, |[.., digest]| *digest = 0)),
        "region 0",
    ),
    (
        "no region",
        |it, _| it.tell_all(0, Step::Differs),
        "node 0 cannot make region 0",
    ),
    (
        "addresses that no region can have",
        |it, offer| {
            for (attempt, address) in (0..).zip(ADDRESSES) {
                it.tell_all_of(attempt, 0, changed(offer, |[at, ..]| *at = address));
                for node in it.others() {
                    it.receive(node, |message| {
                        (step_of(message, 0)? == Step::Taken).then_some(())
                    });
                }
            }
        },
        "region",
    ),
    (
        "one address for all attempts",
        |it, offer| it.tell_all_of(u32::MAX, 0, offer),
        "region",
    ),
    (
        "a word about a region that there cannot be",
        |it, _| it.tell_all(64, Step::Agreed),
        "kind 20",
    ),
    (
        "the end before the beginning",
        |it, _| {
            it.tell_all(0, Step::Agreed);
            it.tell_all(0, Step::Taken);
            it.tell_all(u32::MAX, Step::Taken);
        },
        "kind 18",
    ),
    (
        "memory that is not there, and no word after that",
        |it, offer| {
            it.tell_all(0, offer);
            it.tell_all(0, Step::Mapped { key: 1, shadow: 1 });
            it.is_present = false;
        },
        "has taken no message for",
    ),
    (
        "no word at all",
        |it, _| it.is_present = false,
        "has taken no message for",
    ),
    (
        "a message of no kind",
        |it, _| {
            it.others()
                .into_iter()
                .for_each(|to| it.send(to, [9; MESSAGE_LEN]))
        },
        "node 0 is gone: it does not keep to the protocol",
    ),
];

#[test]
fn hostile__first_node_that_makes_a_region_wrongly_ends_the_making() {
    let offer = offer("follower");
    for (number, (name, making, word)) in MAKINGS.into_iter().enumerate() {
        println!("{name}");
        let (nodes, first) = start_others(JOINER, LEASE, MODES[number % 3]);
        let mut hostile = Played::join(&first);
        making(&mut hostile, offer);
        hostile.pump_until(LONG, |_| have_left(&nodes));
        check_ends(name, word, nodes);
    }
}

/// Starts two nodes that live, and joins them as the first one, with a region.
fn begin_first(offer: Step, mode: FaultMode, lease: Duration) -> (Vec<Node>, Played) {
    let (mut nodes, first) = start_others("follower", lease, mode);
    let mut hostile = Played::join(&first);
    hostile.lead(0, offer);
    wait_for(&mut nodes, "@ begins");
    (nodes, hostile)
}

fn expel(it: &mut Played, to: u32, epoch: u64, node: u32) {
    it.send(
        to,
        Membership::Expel {
            epoch,
            node: id(node),
        }
        .emit(),
    );
}

/// An act of the first node, which has to leave for it, and a word of the error of the node that it is sent to.
const OF_FIRST: [(&str, Attack, &str); 13] = [
    ("an epoch too early", |it, to| expel(it, to, 2, 3 - to), "kind 25"),
    ("no epoch", |it, to| expel(it, to, 0, 3 - to), "kind 25"),
    (
        "the last epoch",
        |it, to| expel(it, to, u64::MAX, 3 - to),
        "kind 25",
    ),
    ("its own expulsion", |it, to| expel(it, to, 1, FIRST), "kind 25"),
    (
        "an expulsion of a node that is not there",
        |it, to| expel(it, to, 1, 77),
        "kind 25",
    ),
    (
        "a consent that nobody has asked for",
        |it, to| it.send(to, Membership::Consent { epoch: 0 }.emit()),
        "kind 27",
    ),
    (
        "an offer of a region that there cannot be",
        |it, to| {
            let step = Step::Propose {
                address: 1,
                pages: u64::MAX,
                digest: 0,
            };
            let joining = Joining {
                region: u32::MAX,
                attempt: 0,
                step,
            };
            it.send(to, joining.emit());
        },
        "kind 16",
    ),
    (
        "a lock that nobody waits for",
        |it, to| {
            let body = sync::Body::Granted { recovered: None };
            it.send(to, of_thread(0, 1, body));
        },
        "protocol",
    ),
    (
        "the value of a word that nobody has asked for",
        |it, to| it.send(to, of_thread(0, 1, sync::Body::Done(1))),
        "protocol",
    ),
    (
        "a page that nobody has asked for",
        |it, to| {
            let body = Body::Grant {
                right: Right::Exclusive,
                source: Some(id(FIRST)),
            };
            it.send(to, emitted(about(FIRST.into(), body)));
        },
        "asked for",
    ),
    (
        "a page of another home",
        |it, to| it.send(to, emitted(about(u64::from(3 - to), Body::Ask(Right::Exclusive)))),
        "another home",
    ),
    (
        "memory that nobody has asked for",
        |it, to| it.send(to, of_heap(heap::Body::Done { unit: 0 })),
        "kind 23",
    ),
    ("an end without a word", |it, _| it.leave(), ""),
];

#[test]
fn hostile__message_of_the_first_node_ends_the_part_of_that_alone() {
    let mut others = start("bystander", 2, FaultMode::Inline, LONG);
    wait_for(&mut others, "@ begins");
    let offer = offer("follower");
    for (number, attack) in OF_FIRST.into_iter().enumerate() {
        check(number, attack, begin_first(offer, MODES[number % 3], LEASE));
    }
    go_on(&mut others);
    assert!(others.iter_mut().all(|node| !node.printed().contains("misses")));
}

type Decision = fn(&mut Played);

/// Wrong decisions of the first node about the membership.
const DECISIONS: [(&str, Decision); 6] = [
    ("an expulsion that it tells to one alone", |it| {
        expel(it, 1, 1, 2);
    }),
    ("an expulsion that it tells to the node alone", |it| {
        expel(it, 2, 1, 2);
    }),
    ("an expulsion that it tells both", |it| {
        expel(it, 1, 1, 2);
        expel(it, 2, 1, 2);
    }),
    ("two expulsions by one epoch", |it| {
        expel(it, 1, 1, 2);
        expel(it, 2, 1, 1);
    }),
    ("a suspicion that it tells to one alone", |it| {
        it.send(1, Membership::Suspect(id(2)).emit());
    }),
    ("two suspicions", |it| {
        it.send(1, Membership::Suspect(id(2)).emit());
        it.send(2, Membership::Suspect(id(1)).emit());
    }),
];

#[test]
fn hostile__wrong_decision_of_the_first_node_is_told_to_all() {
    let offer = offer("follower");
    for (number, (name, decide)) in DECISIONS.into_iter().enumerate() {
        println!("{name}");
        let lease = Duration::from_secs(2);
        let (mut nodes, mut hostile) = begin_first(offer, MODES[number % 3], lease);
        decide(&mut hostile);
        // It answers questions, and carries out nothing.
        let are_told = |_: &mut Played| nodes.iter().all(|node| node.printed().contains("@ misses"));
        let all_told = hostile.pump_until(LONG, are_told);
        let printed: Vec<String> = nodes.iter().map(Node::printed).collect();
        assert!(all_told, "{name}: a node hears nothing: {printed:?}");
        let said: Vec<String> = nodes.iter_mut().map(|node| line(node, "@ misses")).collect();
        println!("{said:?}");
        go_on(&mut nodes);
        drop(hostile);
        go_on(&mut nodes);
    }
}

#[test]
fn hostile__first_node_that_says_what_is_of_no_use_is_ignored() {
    let offer = offer("follower");
    for mode in MODES {
        let (mut nodes, mut hostile) = begin_first(offer, mode, LEASE);
        for to in hostile.others() {
            for message in [
                Membership::Suspect(id(FIRST)),
                Membership::Suspect(id(to)),
                Membership::Suspect(id(77)),
                Membership::Takeover { epoch: u64::MAX },
                Membership::Takeover { epoch: 0 },
                Membership::Present,
            ] {
                hostile.send(to, message.emit());
            }
        }
        // The region is made: a second making of it changes nothing.
        for attempt in [0, 1, u32::MAX] {
            for step in [
                changed(offer, |[at, ..]| *at = 8),
                Step::Agreed,
                Step::Taken,
                offer,
            ] {
                hostile.tell_all_of(attempt, 0, step);
            }
        }
        for to in hostile.others() {
            hostile.send(to, Membership::Probe.emit());
            let is_present = |message: &[u8; MESSAGE_LEN]| {
                (Membership::parse(message) == Ok(Membership::Present)).then_some(())
            };
            hostile.receive(to, is_present).expect("an answer");
        }
        go_on(&mut nodes);
        assert!(nodes.iter_mut().all(|node| !node.printed().contains("misses")));
        drop(hostile);
        wait_for(&mut nodes, "@ misses 0: node 0 is gone: ");
        go_on(&mut nodes);
    }
}

/// Makes a region as a first node that has mapped it.
fn has_mapped(it: &mut Played) {
    let key = it.region().rkey().0;
    it.tell_all(0, Step::Mapped { key, shadow: 0 });
}

/// An act of a first node that answers all questions, but never says how the making of a region ends.
const WITHHELD: [(&str, Making); 4] = [
    ("no word after all have mapped it", |it, offer| {
        it.tell_all(0, offer);
        has_mapped(it);
    }),
    ("no offer after one that is taken", |it, offer| {
        it.tell_all(0, changed(offer, |[at, ..]| *at = 8));
        has_mapped(it);
    }),
    ("an agreement without its own answer", |it, offer| {
        it.tell_all(0, offer);
        it.tell_all(0, Step::Agreed);
    }),
    (
        "an agreement although the address is taken at a node",
        |it, offer| {
            let [taken, free] = [changed(offer, |[at, ..]| *at = 8), offer];
            for (node, step) in [(1, taken), (2, free)] {
                let (region, attempt) = (0, 0);
                let message = Joining {
                    region,
                    attempt,
                    step,
                };
                it.send(node, message.emit());
            }
            has_mapped(it);
            it.tell_all(0, Step::Agreed);
        },
    ),
];

/// A node that makes a region has an error in bounded time, also if the first node does all else that a correct one does.
#[test]
fn hostile__first_node_that_withholds_the_end_of_a_making_ends_its_part() {
    let offer = offer("follower");
    let withhold = |name: &str, making: Making| {
        let (nodes, first) = start_others(JOINER, LEASE, FaultMode::Inline);
        let mut hostile = Played::join(&first);
        making(&mut hostile, offer);
        let has_ended = hostile.pump_until(LONG, |_| have_left(&nodes));
        let printed: Vec<String> = nodes.iter().map(Node::printed).collect();
        assert!(has_ended, "{name}: nodes hang: {printed:?}");
        check_ends(name, "it takes messages, but has not answered one for", nodes);
    };
    // Each takes two leases, in which nobody computes.
    std::thread::scope(|scope| {
        for (name, making) in WITHHELD {
            scope.spawn(move || withhold(name, making));
        }
    });
}
