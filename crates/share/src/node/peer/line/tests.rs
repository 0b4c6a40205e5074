//! All interleavings of two ends, with everything that may happen to them a few times.

use std::collections::{HashSet, VecDeque};

use super::*;

type Asked = u8;
/// The queue pairs of an end that is told of: the sender's, the receiver's.
type Pair = (u8, u8);

/// Times that things happen to an end at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Left {
    wants: u8,
    closes: u8,
    failures: u8,
    forgets: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Question {
    /// The asker's line and queue pair.
    Open(u8, u8),
    /// These name the receiver's line.
    Ready(u8),
    Close(u8, Asked),
    Over(u8),
    Told(u8, Pair),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Answer {
    /// To [`Question::Open`] with a line and queue pair: the other end's.
    Opened((u8, u8), Option<(u8, u8)>),
    /// To [`Question::Close`] with a queue pair.
    Close(u8, bool),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct End {
    line: Line<Asked, Pair>,
    /// Number of the line; 0 if there is none.
    id: u8,
    far: u8,
    own_qp: u8,
    far_qp: u8,
    /// Set while the user must not send.
    is_stopped: bool,
    /// Set while the user is asked.
    is_user_asked: bool,
    /// Set once the queue pair has failed.
    has_failed: bool,
    /// Set while the pool has the queue pair put away: it may be open again.
    is_closing: bool,
    /// Set while the pool is to open the next queue pair.
    is_wanted: bool,
    /// Set while that waits until the peer may have room.
    is_later: bool,
    /// Set while a connection waits until it is told that a queue pair is ready.
    waits: bool,
    left: Left,
    /// Questions that the peer has not answered.
    unanswered: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    ends: [End; 2],
    questions: [VecDeque<Question>; 2],
    answers: [VecDeque<Answer>; 2],
    numbers: u8,
}

impl World {
    fn new(left: Left) -> World {
        let end = End {
            line: Line::new(),
            id: 0,
            far: 0,
            own_qp: 0,
            far_qp: 0,
            is_stopped: true,
            is_user_asked: false,
            has_failed: false,
            is_closing: false,
            is_wanted: false,
            is_later: false,
            waits: false,
            left,
            unanswered: 0,
        };
        World {
            ends: [end.clone(), end],
            questions: Default::default(),
            answers: Default::default(),
            numbers: 0,
        }
    }

    fn number(&mut self) -> u8 {
        self.numbers += 1;
        self.numbers
    }

    fn ask(&mut self, from: usize, question: Question) {
        self.questions[1 - from].push_back(question);
    }

    fn on(&mut self, at: usize, input: Input<Asked, Pair>) {
        for what in self.ends[at].line.on(input) {
            let end = &mut self.ends[at];
            match what {
                Do::TellReady => {
                    let far = end.far;
                    self.ask(at, Question::Ready(far));
                }
                Do::Ready => (end.is_stopped, end.waits) = (false, false),
                Do::AskUser { .. } => end.is_user_asked = true,
                Do::AskPeer => {
                    let (far, own) = (end.far, end.own_qp);
                    end.unanswered += 1;
                    self.ask(at, Question::Close(far, own));
                }
                Do::Answer(asked, yes) => self.answers[1 - at].push_back(Answer::Close(asked, yes)),
                Do::Stays => (end.is_closing, end.is_wanted) = (false, false),
                Do::Stop => {
                    (end.is_stopped, end.is_user_asked) = (true, false);
                    end.is_closing = true;
                }
                Do::Tell(_) => {
                    let (far, pair) = (end.far, (end.own_qp, end.far_qp));
                    self.ask(at, Question::Told(far, pair));
                }
                Do::Away(told) => {
                    assert_eq!(told, (end.far_qp, end.own_qp), "told of another pair: {self:?}");
                    (end.own_qp, end.far_qp, end.has_failed) = (0, 0, false);
                    end.is_closing = false;
                }
                Do::Over => panic!("an end has told what it must not: {self:?}"),
            }
        }
    }

    /// Ends the line of an end for good.
    fn over(&mut self, at: usize, tells: bool) {
        let far = self.ends[at].far;
        if tells && far != 0 {
            self.ask(at, Question::Over(far));
        }
        let End {
            left,
            unanswered,
            is_wanted,
            is_later,
            waits,
            ..
        } = self.ends[at];
        self.ends[at] = End {
            unanswered,
            is_wanted,
            is_later,
            // Who waits is told that there is none, unless the pool opens another one.
            waits: waits && is_wanted,
            ..World::new(left).ends[0].clone()
        };
    }

    /// Begins to open a queue pair.
    fn open(&mut self, at: usize) {
        if self.ends[at].id == 0 {
            self.ends[at].id = self.number();
        }
        let own_qp = self.number();
        let end = &mut self.ends[at];
        end.own_qp = own_qp;
        (end.is_wanted, end.is_later) = (false, false);
        let id = end.id;
        self.ask(at, Question::Open(id, own_qp));
        self.on(at, Input::Asks);
    }

    /// Has a connection come that needs the queue pair. Returns false if it has it at once.
    fn want(&mut self, at: usize) -> bool {
        let end = &mut self.ends[at];
        let is_open = matches!(end.line.stage, Stage::Ready | Stage::Stopping(_)) && !end.is_closing;
        if is_open {
            return false;
        }
        end.waits = true;
        end.is_wanted |= end.is_closing;
        if end.line.is_away() && !end.is_wanted {
            self.open(at);
        }
        true
    }

    fn is(&self, at: usize, line: u8) -> bool {
        line != 0 && self.ends[at].id == line
    }

    fn spend(&mut self, at: usize, of: impl Fn(&mut Left) -> &mut u8) -> bool {
        let left = of(&mut self.ends[at].left);
        let spends = *left > 0;
        *left -= u8::from(spends);
        spends
    }

    /// Handles the next question to an end. `fails`: its device fails it.
    fn take_question(&mut self, at: usize, fails: bool) {
        let Some(question) = self.questions[at].pop_front() else {
            return;
        };
        match question {
            Question::Open(far, far_qp) => {
                let line = &self.ends[at].line;
                let answer = |of| Answer::Opened((far, far_qp), of);
                // The first of the two goes on.
                let collides = line.is_asked() && at == 0;
                if collides || !(line.is_asked() || line.is_away()) {
                    return self.answers[1 - at].push_back(answer(None));
                }
                if self.ends[at].id == 0 {
                    self.ends[at].id = self.number();
                }
                let own_qp = self.number();
                let end = &mut self.ends[at];
                (end.far, end.own_qp, end.far_qp) = (far, own_qp, far_qp);
                (end.is_wanted, end.is_later) = (false, false);
                let id = end.id;
                self.answers[1 - at].push_back(answer(Some((id, own_qp))));
                self.on(at, Input::Accepts);
            }
            Question::Ready(line) if self.is(at, line) => self.on(at, Input::PeerReady),
            Question::Close(line, asked) if self.is(at, line) => self.on(at, Input::CloseAsked(asked)),
            Question::Close(_, asked) => self.answers[1 - at].push_back(Answer::Close(asked, true)),
            Question::Over(line) if self.is(at, line) => self.over(at, true),
            Question::Told(line, pair) if self.is(at, line) => self.on(at, Input::Told(pair)),
            Question::Ready(_) | Question::Over(_) | Question::Told(..) => {}
        }
        if fails && self.ends[at].line.is_timed() {
            self.over(at, true);
        }
    }

    fn take_answer(&mut self, at: usize, fails: bool) {
        let Some(answer) = self.answers[at].pop_front() else {
            return;
        };
        match answer {
            Answer::Opened((line, own_qp), opened) => {
                let waits = self.is(at, line) && self.ends[at].own_qp == own_qp;
                match opened {
                    _ if !waits || !self.ends[at].line.is_asked() => {
                        if let Some((far, _)) = opened {
                            self.ask(at, Question::Over(far));
                        }
                    }
                    Some((far, far_qp)) => {
                        let end = &mut self.ends[at];
                        (end.far, end.far_qp) = (far, far_qp);
                        match fails {
                            true => self.over(at, true),
                            false => self.on(at, Input::Opened),
                        }
                    }
                    None => {
                        let end = &mut self.ends[at];
                        end.own_qp = 0;
                        (end.is_wanted, end.is_later) = (true, true);
                        self.on(at, Input::Later);
                    }
                }
            }
            Answer::Close(own_qp, yes) => {
                self.ends[at].unanswered -= 1;
                if self.ends[at].own_qp == own_qp {
                    self.on(at, Input::PeerSays(yes));
                }
            }
        }
    }

    /// Returns what may happen next; first what happens in any case, sooner or later.
    fn next(&self) -> (Vec<World>, Vec<World>) {
        let (mut must, mut may) = (Vec::new(), Vec::new());
        for at in 0..2 {
            let add = |to: &mut Vec<World>, happens: &dyn Fn(&mut World) -> bool| {
                let mut world = self.clone();
                if happens(&mut world) {
                    to.push(world);
                }
            };
            let end = &self.ends[at];
            if !self.questions[at].is_empty() {
                add(&mut must, &|world| {
                    world.take_question(at, false);
                    true
                });
                add(&mut may, &|world| {
                    world.take_question(at, true);
                    world.spend(at, |left| &mut left.failures)
                });
            }
            if !self.answers[at].is_empty() {
                add(&mut must, &|world| {
                    world.take_answer(at, false);
                    true
                });
                add(&mut may, &|world| {
                    world.take_answer(at, true);
                    world.spend(at, |left| &mut left.failures)
                });
            }
            if end.is_user_asked {
                for yes in [true, false] {
                    add(&mut must, &|world| {
                        let end = &mut world.ends[at];
                        end.is_user_asked = false;
                        end.is_stopped |= yes;
                        world.on(at, Input::UserSays(yes));
                        true
                    });
                }
            }
            if end.line.is_ending() {
                add(&mut must, &|world| {
                    world.on(at, Input::Drained(0));
                    true
                });
            }
            if end.line.is_away() && end.is_wanted && !end.is_later {
                add(&mut must, &|world| {
                    world.open(at);
                    true
                });
            }
            add(&mut may, &|world| {
                world.want(at) && world.spend(at, |left| &mut left.wants)
            });
            if end.line.is_away() {
                add(&mut may, &|world| {
                    let is_there = world.ends[at].id != 0;
                    world.over(at, false);
                    is_there && world.spend(at, |left| &mut left.forgets)
                });
            }
            add(&mut may, &|world| {
                let end = &mut world.ends[at];
                let is_open = matches!(end.line.stage, Stage::Ready | Stage::Stopping(_)) && !end.is_closing;
                end.is_closing = true;
                world.on(at, Input::Close { for_room: true });
                is_open && world.spend(at, |left| &mut left.closes)
            });
            add(&mut may, &|world| {
                world.ends[at].has_failed = true;
                world.on(at, Input::Failed);
                let is_up = end.own_qp != 0 && !end.line.is_asked();
                is_up && world.spend(at, |left| &mut left.failures)
            });
        }
        // The peer is asked again some time later, when nothing else happens any more.
        if must.is_empty() {
            for at in 0..2 {
                if self.ends[at].line.is_away() && self.ends[at].is_later {
                    let mut world = self.clone();
                    world.open(at);
                    must.push(world);
                }
            }
        }
        (must, may)
    }

    /// Checks what holds when nothing is under way.
    fn check_rest(&self) {
        let [a, b] = &self.ends;
        for end in [a, b] {
            assert!(matches!(end.line.stage, Stage::Away | Stage::Ready), "{self:?}");
            assert_eq!(end.is_stopped, end.line.is_away(), "{self:?}");
            assert!(!end.has_failed, "nobody ends it: {self:?}");
            assert_eq!(end.unanswered, 0, "{self:?}");
            assert!(!end.waits, "nobody tells its user of a queue pair: {self:?}");
            assert!(!end.is_closing && !end.is_wanted, "{self:?}");
        }
        assert_eq!(a.line.stage, b.line.stage, "{self:?}");
    }

    fn check(&self) {
        let [a, b] = &self.ends;
        if (a.line.stage, b.line.stage) == (Stage::Ready, Stage::Ready) && (a.far, b.far) == (b.id, a.id) {
            let (ours, theirs) = ((a.own_qp, a.far_qp), (b.far_qp, b.own_qp));
            assert_eq!(ours, theirs, "ready with queue pairs of two pairs: {self:?}");
        }
    }
}

/// Looks at all states, and returns their number.
fn explore(left: Left) -> usize {
    let first = World::new(left);
    let mut seen = HashSet::from([first.clone()]);
    let mut queue = VecDeque::from([first]);
    let mut rests = 0;
    while let Some(world) = queue.pop_front() {
        world.check();
        let (must, may) = world.next();
        if must.is_empty() {
            world.check_rest();
            rests += 1;
        }
        for next in must.into_iter().chain(may) {
            if seen.insert(next.clone()) {
                queue.push_back(next);
            }
        }
    }
    assert!(rests > 5, "{rests} states of rest");
    seen.len()
}

#[test]
fn on__whatever_happens_in_any_order_both_ends_agree() {
    let none = Left {
        wants: 0,
        closes: 0,
        failures: 0,
        forgets: 0,
    };
    let mut states = 0;
    // Opened by both, and failing.
    states += explore(Left {
        wants: 2,
        failures: 2,
        ..none
    });
    // Put away by both.
    states += explore(Left {
        wants: 2,
        closes: 1,
        ..none
    });
    // Forgotten by an end.
    states += explore(Left {
        wants: 2,
        closes: 1,
        forgets: 1,
        ..none
    });
    states += explore(Left {
        wants: 1,
        closes: 1,
        failures: 1,
        ..none
    });
    println!("{states} states");
    assert!(states > 10_000, "{states}");
}

#[test]
fn on__both_ends_that_want_it_put_away_agree() {
    let mut line = Line::<Asked, Pair>::new();
    for input in [Input::Accepts, Input::PeerReady, Input::Close { for_room: true }] {
        line.on(input);
    }
    assert_eq!(line.on(Input::UserSays(true)), [Do::AskPeer]);
    assert_eq!(line.on(Input::CloseAsked(7)), [Do::Answer(7, true), Do::Stop]);
    assert_eq!(line.on(Input::PeerSays(true)), []);
    assert!(line.is_ending());
}

#[test]
fn on__a_tale_of_an_end_that_is_not_ready_ends_the_line() {
    let mut line = Line::<Asked, Pair>::new();
    assert_eq!(line.on(Input::Told((1, 2))), [Do::Over]);
    line.on(Input::Accepts);
    assert_eq!(line.on(Input::Told((1, 2))), [Do::Over]);
    line.on(Input::PeerReady);
    assert_eq!(line.on(Input::Told((1, 2))), [Do::Stop]);
    assert_eq!(line.on(Input::Told((1, 2))), [Do::Over], "twice");
}
