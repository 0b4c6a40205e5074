use rdmux_wire::RKey;

use super::*;

fn identity(key: u8, node: u8) -> Identity {
    Identity {
        key: Key::new([key; 32]),
        node: NodeId([node; 16]),
        address: address(node),
        engines: engines(node),
    }
}

fn engines(node: u8) -> Engines {
    Engines::new(0, &[node]).unwrap()
}

fn address(node: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, node])
}

/// Two ends of a session, with what either has heard.
struct Pair {
    ends: [(Identity, Session<u32>); 2],
    now: Instant,
}

impl Pair {
    fn new(keys: [u8; 2]) -> Pair {
        Pair::between(keys, [2, 1])
    }

    /// `peers`: the node with which each end seems to talk.
    fn between(keys: [u8; 2], peers: [u8; 2]) -> Pair {
        let now = Instant::now();
        let end = |role, key, node, peer| {
            let identity = identity(key, node);
            let session = Session::new(role, &identity, address(peer), [node; 32], now);
            (identity, session)
        };
        Pair {
            ends: [
                end(Role::Connects, keys[0], 1, peers[0]),
                end(Role::Accepts, keys[1], 2, peers[1]),
            ],
            now,
        }
    }

    fn agreed() -> Pair {
        let mut pair = Pair::new([7, 7]);
        let heard = pair.run();
        assert_eq!(
            heard,
            [
                (0, Ok(Heard::Agreed(NodeId([2; 16]), engines(2)))),
                (1, Ok(Heard::Agreed(NodeId([1; 16]), engines(1)))),
            ]
        );
        pair
    }

    /// Passes messages until there are none. Returns who has heard what.
    fn run(&mut self) -> Vec<(usize, Result<Heard<u32>, Broken>)> {
        let mut all = Vec::new();
        let mut bytes = Vec::new();
        loop {
            let before = all.len();
            let mut any = false;
            for to in [1, 0] {
                while self.ends[1 - to].1.next_message(self.now, &mut bytes) {
                    any = true;
                    let (identity, session) = &mut self.ends[to];
                    match session.handle(identity, &bytes) {
                        Ok(Heard::Nothing) => {}
                        heard => all.push((to, heard)),
                    }
                }
            }
            if !any && all.len() == before {
                return all;
            }
        }
    }

    fn say(&mut self, to: usize, request: u32, message: &Message) -> Result<Heard<u32>, Broken> {
        let mut bytes = Vec::new();
        message.emit(request, &mut bytes);
        let (identity, session) = &mut self.ends[to];
        session.handle(identity, &bytes)
    }
}

fn question(rkey: u32) -> Message {
    let (domain, rkey) = (1, RKey(rkey));
    Message::ResolveKey { domain, rkey }
}

/// A host that passes on what two nodes say is not taken for either of them.
#[test]
fn handle__messages_that_a_third_host_passes_on() {
    for peers in [[3, 3], [3, 1], [2, 3]] {
        let mut pair = Pair::between([7, 7], peers);
        let heard = pair.run();
        assert!(
            heard.iter().any(|(_, heard)| *heard == Err(Broken::Key)),
            "{heard:?}"
        );
        assert!(!pair.ends[0].1.is_agreed() && !pair.ends[1].1.is_agreed());
    }
}

#[test]
fn handle__nodes_with_one_key_agree() {
    let mut pair = Pair::agreed();
    assert!(pair.ends[0].1.is_agreed() && pair.ends[1].1.is_agreed());
    assert_eq!(pair.ends[0].1.deadline(), None);
    pair.ends[0].1.ask(question(5), 50).unwrap();
    pair.ends[1].1.ask(question(6), 60).unwrap();
    let request = 1;
    assert_eq!(
        pair.run(),
        [
            (
                1,
                Ok(Heard::Question {
                    request,
                    message: question(5)
                })
            ),
            (
                0,
                Ok(Heard::Question {
                    request,
                    message: question(6)
                })
            ),
        ]
    );
    for end in &mut pair.ends {
        end.1.answer(1, Message::Done {});
        // Answers nothing twice.
        end.1.answer(1, Message::Waits {});
    }
    let message = Message::Done {};
    let answer = |tag| {
        let message = message.clone();
        Ok(Heard::Answer { tag, message })
    };
    assert_eq!(pair.run(), [(1, answer(60)), (0, answer(50))]);
}

#[test]
fn handle__nodes_with_two_keys_do_not() {
    let mut pair = Pair::new([7, 8]);
    // The one that connects notices first, and its proof is not sent.
    assert_eq!(pair.run(), [(0, Err(Broken::Key)), (1, Err(Broken::Key))]);
    assert!(!pair.ends[0].1.is_agreed() && !pair.ends[1].1.is_agreed());
}

#[test]
fn handle__other_versions() {
    for (version_min, version_max, fits) in [
        (VERSION, VERSION, true),
        (0, 9, true),
        (VERSION + 1, 9, false),
        (0, VERSION - 1, false),
    ] {
        let mut pair = Pair::new([7, 7]);
        let hello = Message::Hello {
            version_min,
            version_max,
            nonce: [1; 32],
            node: NodeId([1; 16]),
        };
        let heard = pair.say(1, 0, &hello);
        assert_eq!(heard.is_ok(), fits, "{version_min} to {version_max}: {heard:?}");
        let refusal = Message::Refused {
            reason: Reason::Version,
        };
        let mut bytes = Vec::new();
        assert!(pair.ends[1].1.next_message(pair.now, &mut bytes));
        assert_eq!(Message::parse(&bytes) == Ok((0, refusal.clone())), !fits);
        assert_eq!(pair.say(0, 0, &refusal), Err(Broken::Version));
    }
}

/// A proof of one node, sent back to it, or of an earlier session, is none.
#[test]
fn handle__proofs_of_others() {
    let mut pair = Pair::new([7, 7]);
    let mut other = Pair::new([7, 7]);
    other.ends[1].1.nonce = [9; 32];
    let mut sent = Vec::new();
    let mut bytes = Vec::new();
    for to in [1, 0, 1] {
        assert!(other.ends[1 - to].1.next_message(other.now, &mut bytes));
        sent.push(bytes.clone());
        let (identity, session) = &mut other.ends[to];
        session.handle(identity, &bytes).unwrap();
    }
    let (identity, session) = &mut pair.ends[1];
    session.handle(identity, &sent[0]).unwrap();
    assert_eq!(session.handle(identity, &sent[2]), Err(Broken::Key), "a replay");
    // The challenge's proof, in place of that of the one that connects.
    let mut pair = Pair::new([7, 7]);
    let (identity, session) = &mut pair.ends[1];
    session.handle(identity, &sent[0]).unwrap();
    assert!(session.next_message(pair.now, &mut bytes));
    let Ok((0, Message::Challenge { proof, .. })) = Message::parse(&bytes) else {
        panic!("{bytes:?}");
    };
    assert_eq!(pair.say(1, 0, &Message::Proof { proof }), Err(Broken::Key));
}

/// Any message, at any point of the handshake, other than the one that belongs there, ends it; none makes an agreement.
#[test]
fn handle__any_other_message_before_the_agreement() {
    let zero = [0; 32];
    let others = [
        Message::Challenge {
            version: 1,
            nonce: zero,
            node: NodeId([3; 16]),
            proof: zero,
        },
        Message::Proof { proof: zero },
        Message::Agreed {},
        Message::Refused { reason: Reason::Busy },
        Message::Engine { engines: engines(1) },
        question(1),
        Message::Done {},
        Message::CloseQp {
            line: 1,
            failed: false,
        },
    ];
    let mut bytes = Vec::new();
    for steps in 0..6 {
        for message in &others {
            for request in [0, 1] {
                let mut pair = Pair::new([7, 7]);
                // Lets so many messages of a true handshake pass.
                for step in 0..steps {
                    let to = (step + 1) % 2;
                    assert!(pair.ends[1 - to].1.next_message(pair.now, &mut bytes));
                    let (identity, session) = &mut pair.ends[to];
                    session.handle(identity, &bytes).unwrap();
                }
                let to = (steps + 1) % 2;
                assert!(!pair.ends[to].1.is_agreed());
                let due = match steps {
                    3 => Some(Message::Agreed {}),
                    4 | 5 => Some(Message::Engine { engines: engines(1) }),
                    _ => None,
                };
                let is_due = request == 0 && due.as_ref() == Some(message);
                let heard = pair.say(to, request, message);
                assert_eq!(heard.is_ok(), is_due, "step {steps}: {message:?}: {heard:?}");
                assert_eq!(pair.ends[to].1.is_agreed(), is_due && steps > 3);
                if !is_due {
                    let due = due.unwrap_or(Message::Agreed {});
                    assert!(pair.say(to, 0, &due).is_err(), "it is over");
                }
            }
        }
    }
}

#[test]
fn ask__at_most_so_many_at_a_time() {
    let mut pair = Pair::agreed();
    for tag in 0..200 {
        pair.ends[0].1.ask(question(tag), tag).unwrap();
    }
    let mut answered = Vec::new();
    for _ in 0..10 {
        let mut asked = 0;
        for (to, heard) in pair.run() {
            match heard.unwrap() {
                Heard::Question { request, .. } => {
                    assert_eq!(to, 1);
                    asked += 1;
                    pair.ends[1].1.answer(request, Message::Done {});
                }
                Heard::Answer { tag, .. } => answered.push(tag),
                other => panic!("{other:?}"),
            }
        }
        assert!(asked <= QUESTIONS_MAX, "{asked}");
    }
    assert_eq!(answered, (0..200).collect::<Vec<_>>());
}

#[test]
fn handle__more_questions_than_allowed_or_answers_that_nobody_asked_for() {
    let mut pair = Pair::agreed();
    for request in 0..QUESTIONS_MAX as u32 {
        pair.say(1, request, &question(1)).unwrap();
    }
    assert_eq!(pair.say(1, 1000, &question(1)), Err(Broken::TooMany));
    let mut pair = Pair::agreed();
    pair.say(1, 5, &question(1)).unwrap();
    assert!(
        pair.say(1, 5, &question(2)).is_err(),
        "two questions of one number"
    );
    let mut pair = Pair::agreed();
    assert_eq!(pair.say(1, 5, &Message::Done {}), Err(Broken::Unexpected("Done")));
    let mut pair = Pair::agreed();
    assert!(
        pair.say(1, 0, &Message::Agreed {}).is_err(),
        "the handshake is over"
    );
}

#[test]
fn check_time__of_the_handshake_and_of_a_question() {
    let mut pair = Pair::new([7, 7]);
    let late = pair.now + ANSWER_TIME;
    assert_eq!(pair.ends[0].1.deadline(), Some(late));
    assert_eq!(pair.ends[0].1.check_time(late - Duration::from_millis(1)), Ok(()));
    assert_eq!(pair.ends[0].1.check_time(late), Err(Broken::Silent));
    assert_eq!(pair.ends[0].1.deadline(), None);

    let mut pair = Pair::agreed();
    pair.ends[0].1.ask(question(1), 1).unwrap();
    assert_eq!(pair.ends[0].1.deadline(), None, "it is not sent yet");
    pair.now += Duration::from_secs(9);
    pair.run();
    assert_eq!(pair.ends[0].1.deadline(), Some(pair.now + ANSWER_TIME));
    assert_eq!(pair.ends[0].1.check_time(pair.now), Ok(()));
    assert_eq!(
        pair.ends[0].1.check_time(pair.now + ANSWER_TIME),
        Err(Broken::Silent)
    );
}

/// Messages with random changes end the session or are handled; whatever was said, nobody who lacks the key is believed.
#[test]
fn handle__changed_bytes() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let mut bytes = Vec::new();
    for round in 0..5000 {
        let mut pair = Pair::new([7, 7]);
        let changed_at = random(4);
        let mut is_changed = false;
        for step in 0..6 {
            let to = (step + 1) % 2;
            if !pair.ends[1 - to].1.next_message(pair.now, &mut bytes) {
                break;
            }
            if step == changed_at {
                let at = random(bytes.len());
                let before = bytes[at];
                bytes[at] = random(256) as u8;
                is_changed = bytes[at] != before;
            }
            let (identity, session) = &mut pair.ends[to];
            if session.handle(identity, &bytes).is_err() {
                break;
            }
        }
        let agreed = pair.ends.each_ref().map(|end| end.1.is_agreed());
        assert_eq!(
            agreed, [!is_changed; 2],
            "round {round}: a byte of message {changed_at} is another one"
        );
    }
}
