//! The turns under loom, which tries the orders in which threads may run and every value that a load may return. A thread that nobody wakes makes a
//! model hang, which loom reports: no sleep ends by time here. The models hold as the code is, and not without
//! any of the parts that `Without` names.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex, MutexGuard};
use loom::thread;

use crate::protocol::{Homes, NodeId};
use crate::stat::NodeCounter;
use crate::sync::{Action, Call, Mode, Outcome, Success};

const STAGE: NodeCounter = NodeCounter::Stage2Events;

/// The turns again, on loom's locks and atomics.
#[path = "driving.rs"]
mod driving;

mod sync {
    use std::rc::Rc;

    use super::{Device, WITHOUT, Without};

    use loom::sync::atomic::AtomicU32;
    pub(super) use loom::sync::atomic::{AtomicBool, Ordering};
    pub(super) use loom::sync::{Mutex, MutexGuard};

    pub(super) const TURNS: u32 = 1;
    pub(super) const RESTS: u32 = 1;

    pub(super) fn spin_loop() {}

    #[derive(Debug)]
    pub(super) struct Pollers(AtomicU32);

    impl Pollers {
        pub(super) fn new(value: u32) -> Pollers {
            Pollers(AtomicU32::new(value))
        }

        pub(super) fn load(&self, order: Ordering) -> u32 {
            match WITHOUT.get() {
                Without::Service => 1,
                _ => self.0.load(order),
            }
        }

        pub(super) fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
            self.0.fetch_add(value, order)
        }

        pub(super) fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
            match WITHOUT.get() {
                Without::Last => 2,
                _ => self.0.fetch_sub(value, order),
            }
        }
    }

    /// The timer among the descriptors on which the service thread sleeps. It goes off at once: loom tries all orders.
    #[derive(Debug)]
    pub(super) struct Alarm {
        device: Rc<Device>,
        is_set: AtomicBool,
    }

    impl Alarm {
        pub(super) fn new(device: Rc<Device>) -> Alarm {
            Alarm {
                device,
                is_set: AtomicBool::new(false),
            }
        }

        pub(super) fn set(&self) {
            if !self.is_set.swap(true, Ordering::Relaxed) {
                self.device.go_off();
            }
        }

        pub(super) fn is_set(&self) -> bool {
            self.is_set.load(Ordering::Relaxed)
        }

        /// After the sleep has ended.
        pub(super) fn take(&self) {
            let has_gone_off = std::mem::take(&mut self.device.state().has_gone_off);
            if has_gone_off && WITHOUT.get() != Without::Taken {
                self.is_set.store(false, Ordering::Relaxed);
            }
        }
    }

    #[derive(Debug)]
    pub(super) struct Sleepers(AtomicU32);

    impl Sleepers {
        pub(super) fn new(value: u32) -> Sleepers {
            Sleepers(AtomicU32::new(value))
        }

        pub(super) fn load(&self, order: Ordering) -> u32 {
            match WITHOUT.get() {
                Without::Sleeper => 0,
                _ => self.0.load(order),
            }
        }

        pub(super) fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
            self.0.fetch_add(value, order)
        }

        pub(super) fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
            self.0.fetch_sub(value, order)
        }
    }

    #[derive(Debug)]
    pub(super) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(super) fn new() -> Condvar {
            Condvar(loom::sync::Condvar::new())
        }

        pub(super) fn notify_all(&self) {
            if WITHOUT.get() != Without::Notice {
                self.0.notify_all();
            }
        }
    }

    pub(super) fn wait_while<'a, T>(
        changed: &Condvar,
        mut guard: MutexGuard<'a, T>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        if WITHOUT.get() == Without::Check {
            guard = changed.0.wait(guard).unwrap();
        }
        while condition(&mut guard) {
            guard = changed.0.wait(guard).unwrap();
        }
        guard
    }

    /// The eventfd among those on which the service thread sleeps.
    #[derive(Debug)]
    pub(super) struct Waker(pub(super) Rc<Device>);

    impl Waker {
        pub(super) fn wake(&self) {
            self.0.wake();
        }
    }
}

use driving::{Drive, Driving, Pause, Service, Turns};

/// The part that a model leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    /// Nobody notices that it was the last poller.
    Last,
    /// The service thread takes others for pollers always.
    Service,
    /// The last poller that cannot rest wakes nobody.
    Wake,
    /// An alarm does not go off.
    Alarm,
    /// An alarm that has gone off counts as set.
    Taken,
    /// A node rests without having its descriptors become readable.
    Arm,
    /// A node rests without a last look.
    Look,
    /// The finds of a last look, and the ends of calls, count as no change.
    Change,
    /// Threads that sleep are not told of changes.
    Notice,
    /// Nobody knows of the threads that sleep.
    Sleeper,
    /// The service thread looks for frames alone after its sleep.
    Thorough,
    /// A thread sleeps without looking whether something has changed.
    Check,
    /// A thread goes on before its call has ended.
    Outcome,
}

thread_local! {
    static WITHOUT: Cell<Without> = const { Cell::new(Without::Nothing) };
}

/// Messages of a model.
const MESSAGES: usize = 2;

/// The device and the kernel: what comes from outside, and the descriptors on which the service thread sleeps.
#[derive(Debug, Default)]
struct Device {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    arrived: [bool; MESSAGES],
    taken: [bool; MESSAGES],
    is_armed: bool,
    /// The others take this node for awake, and ring no bell.
    is_relied_on: bool,
    is_readable: bool,
    has_gone_off: bool,
    ends: bool,
}

impl Device {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// A message comes.
    fn deliver(&self, message: usize) {
        let mut state = self.state();
        state.arrived[message] = true;
        if !state.is_relied_on && std::mem::take(&mut state.is_armed) {
            state.is_readable = true;
            self.changed.notify_all();
        }
    }

    fn wake(&self) {
        let mut state = self.state();
        if state.ends || WITHOUT.get() != Without::Wake {
            state.is_readable = true;
            self.changed.notify_all();
        }
    }

    fn go_off(&self) {
        let mut state = self.state();
        if WITHOUT.get() != Without::Alarm {
            state.has_gone_off = true;
            state.is_readable = true;
            self.changed.notify_all();
        }
    }

    /// Sleeps until a condition holds.
    fn wait(&self, until: impl Fn(&State) -> bool) {
        let mut state = self.state();
        while !until(&state) {
            state = self.changed.wait(state).unwrap();
        }
    }
}

/// The driver of the models: messages, for which threads wait.
#[derive(Debug)]
struct Messages {
    device: Rc<Device>,
    got: [bool; MESSAGES],
    changes: u64,
    /// As that of [`crate::driver::Driver`]: the device is armed, and no thorough turn has been since.
    is_armed: bool,
    /// It has told the others that it rests.
    has_told: bool,
}

impl Messages {
    fn take(&mut self) -> bool {
        let mut state = self.device.state();
        let arrived = std::mem::take(&mut state.arrived);
        for ((got, taken), arrived) in self.got.iter_mut().zip(&mut state.taken).zip(arrived) {
            *got |= arrived;
            *taken |= arrived;
        }
        self.device.changed.notify_all();
        arrived.contains(&true)
    }
}

impl Drive for Messages {
    fn turn(&mut self, thoroughly: bool) -> bool {
        let any = self.take();
        self.changes += u64::from(any);
        self.is_armed &= !thoroughly;
        any
    }

    fn uses_packets(&self) -> bool {
        false
    }

    /// As [`crate::driver::rest::rest`].
    fn rest(&mut self) -> bool {
        self.has_told = true;
        // Its word is not there yet.
        if std::mem::take(&mut self.device.state().is_relied_on) {
            return false;
        }
        if self.is_armed {
            return !self.turn(false);
        }
        self.device.state().is_armed = WITHOUT.get() != Without::Arm;
        if WITHOUT.get() == Without::Look {
            return true;
        }
        let has_come = match WITHOUT.get() {
            Without::Change => self.take(),
            _ => self.turn(true),
        };
        // Nobody may count on the descriptors of a node that does not rest.
        if has_come {
            self.device.state().is_armed = false;
        }
        self.is_armed = !has_come;
        !has_come
    }

    fn tell_awake(&mut self) {
        if std::mem::take(&mut self.has_told) {
            self.device.state().is_relied_on = true;
        }
    }

    fn settle(&mut self, _: NodeCounter) {}

    fn changes(&self) -> u64 {
        self.changes
    }
}

/// Polls a few times, and then sleeps always.
struct Polls(u32);

impl Pause for Polls {
    fn saw(&mut self, _: bool) {}

    fn pause(&mut self) -> bool {
        let polls = self.0 > 0;
        self.0 = self.0.saturating_sub(1);
        polls
    }

    fn keeps_cpu(&self) -> bool {
        true
    }
}

struct Serving {
    turns: Rc<Turns<Messages>>,
    has_slept: bool,
}

impl Pause for Serving {
    fn saw(&mut self, _: bool) {}

    fn pause(&mut self) -> bool {
        false
    }

    fn keeps_cpu(&self) -> bool {
        false
    }
}

impl Service for Serving {
    fn turn(&mut self) -> bool {
        let thoroughly = std::mem::take(&mut self.has_slept) && WITHOUT.get() != Without::Thorough;
        self.turns.lock_in(STAGE).turn(thoroughly)
    }

    fn has_asked(&self) -> bool {
        false
    }

    fn sleep(&mut self) {
        self.has_slept = true;
        let device = &self.turns.waker().0;
        device.wait(|state| state.is_readable);
        // As the kernel does: not at the moment in which the sleep ends.
        device.state().is_readable = false;
        self.turns.alarm().take();
    }

    fn awake(&mut self, _: bool) {}
}

/// A node with its service thread.
struct Node {
    device: Rc<Device>,
    turns: Rc<Turns<Messages>>,
    service: thread::JoinHandle<()>,
}

impl Node {
    fn new() -> Node {
        let device = Rc::new(Device::default());
        let messages = Messages {
            device: device.clone(),
            got: [false; MESSAGES],
            changes: 0,
            is_armed: false,
            has_told: false,
        };
        let turns = Rc::new(Turns::new(
            messages,
            sync::Waker(device.clone()),
            sync::Alarm::new(device.clone()),
        ));
        let service = thread::spawn({
            let turns = turns.clone();
            let mut serving = Serving {
                turns: turns.clone(),
                has_slept: false,
            };
            move || turns.serve(STAGE, &mut serving)
        });
        Node {
            device,
            turns,
            service,
        }
    }

    /// A thread of the program waits for a message.
    fn wait_for(&self, message: usize, mut pause: Polls) -> thread::JoinHandle<()> {
        let turns = self.turns.clone();
        thread::spawn(move || {
            let mut has_sent = false;
            let has_come = |messages: &mut Messages| {
                if !std::mem::replace(&mut has_sent, true) {
                    messages.device.state().is_relied_on = true;
                }
                Ok::<_, ()>(messages.got[message].then_some(()))
            };
            turns.wait(&mut pause, has_come).unwrap();
        })
    }

    fn end(self) {
        self.device.state().ends = true;
        self.turns.stop();
        self.service.join().unwrap();
    }
}

/// A thread waits for a message, and polls for it some times more before it sleeps.
fn one_waits_and_polls(times: u32) {
    let node = Node::new();
    let waits = node.wait_for(0, Polls(times));
    node.device.deliver(0);
    waits.join().unwrap();
    node.end();
}

fn one_waits() {
    one_waits_and_polls(0);
}

fn one_polls() {
    one_waits_and_polls(1);
}

/// Two threads wait, each for a message of its own.
fn two_wait() {
    let node = Node::new();
    let waits = [0, 1].map(|message| node.wait_for(message, Polls(0)));
    node.device.deliver(0);
    node.device.deliver(1);
    for thread in waits {
        thread.join().unwrap();
    }
    node.end();
}

/// A thread leaves something to do while messages come, and does not come back. The service thread takes all of them.
fn one_acts() {
    let node = Node::new();
    let acts = thread::spawn({
        let turns = node.turns.clone();
        move || turns.act(|messages| messages.changes += 1)
    });
    for message in 0..MESSAGES {
        node.device.deliver(message);
        node.device.wait(|state| state.taken[message]);
    }
    acts.join().unwrap();
    node.end();
}

/// The same of two threads, each of which leaves once.
fn two_act() {
    let node = Node::new();
    let acts = [(); 2].map(|()| {
        let turns = node.turns.clone();
        thread::spawn(move || turns.act(|messages| messages.changes += 1))
    });
    node.device.deliver(0);
    node.device.wait(|state| state.taken[0]);
    for thread in acts {
        thread.join().unwrap();
    }
    node.end();
}

fn holds(model: fn(), without: Without) -> bool {
    let held = crate::model::holds(2, move || {
        WITHOUT.set(without);
        model();
    });
    WITHOUT.set(Without::Nothing);
    held
}

#[test]
fn wait__ends_when_its_message_comes() {
    assert!(holds(one_waits, Without::Nothing));
    assert!(holds(one_polls, Without::Nothing));
    assert!(holds(two_wait, Without::Nothing));
}

#[test]
fn serve__takes_what_comes_while_a_poller_leaves() {
    assert!(holds(one_acts, Without::Nothing));
    assert!(holds(two_act, Without::Nothing));
}

#[test]
fn turns__without_any_part_somebody_is_not_woken() {
    for without in [
        Without::Last,
        Without::Wake,
        Without::Arm,
        Without::Change,
        Without::Notice,
        Without::Sleeper,
        Without::Check,
    ] {
        assert!(!holds(one_waits, without), "{without:?}");
    }
    for without in [
        Without::Last,
        Without::Service,
        Without::Alarm,
        Without::Look,
        Without::Thorough,
    ] {
        assert!(!holds(one_acts, without), "{without:?}");
    }
    assert!(!holds(two_act, Without::Taken));
}

/// The driver of a node that is alone, as far as its threads call locks, barriers and conditions.
#[derive(Debug)]
struct Calls {
    node: crate::sync::Node,
    outcomes: [Option<Outcome>; 2],
    changes: u64,
}

impl Calls {
    fn new() -> Rc<Turns<Calls>> {
        let own = NodeId::new(0).unwrap();
        let calls = Calls {
            node: crate::sync::Node::new(own, 0, 0, &[own], Homes::hash(vec![own]).unwrap()),
            outcomes: [None, None],
            changes: 0,
        };
        let device: Rc<Device> = Rc::default();
        Rc::new(Turns::new(
            calls,
            sync::Waker(device.clone()),
            sync::Alarm::new(device),
        ))
    }

    /// As `Driver::call` and `Driver::synchronise`.
    fn call(&mut self, thread: usize, call: Call) {
        self.node.handle_call(call, thread as u64);
        while let Some(action) = self.node.poll_action() {
            let Action::Done { ticket, outcome } = action else {
                panic!("{action:?}");
            };
            self.outcomes[ticket as usize] = Some(outcome);
            self.changes += u64::from(WITHOUT.get() != Without::Change);
        }
    }
}

impl Drive for Calls {
    fn turn(&mut self, _: bool) -> bool {
        false
    }

    fn uses_packets(&self) -> bool {
        false
    }

    fn rest(&mut self) -> bool {
        true
    }

    fn tell_awake(&mut self) {}

    fn settle(&mut self, _: NodeCounter) {}

    fn changes(&self) -> u64 {
        self.changes
    }
}

/// A thread's call, as `Thread::carry_out` makes it.
fn carry_out(turns: &Turns<Calls>, thread: usize, call: Call) {
    let mut driver: Driving<'_, _> = turns.lock();
    driver.call(thread, call);
    drop(driver);
    let outcome = turns.wait(&mut Polls(0), |calls| {
        let outcome = calls.outcomes[thread].take();
        match WITHOUT.get() {
            Without::Outcome => Ok(Some(Ok(Success::Done))),
            _ => Ok::<_, ()>(outcome),
        }
    });
    outcome.unwrap().unwrap();
}

const LOCK: u64 = 1;
const OTHER: u64 = 2;

fn lock(turns: &Turns<Calls>, thread: usize) {
    let mode = Mode::Exclusive;
    carry_out(turns, thread, Call::Lock { object: LOCK, mode });
}

fn unlock(turns: &Turns<Calls>, thread: usize) {
    let mode = Mode::Exclusive;
    carry_out(turns, thread, Call::Unlock { object: LOCK, mode });
}

/// Runs a function in two threads of a node, which share cells.
fn two_threads(f: fn(&Turns<Calls>, usize, &[UnsafeCell<u32>; 2])) {
    let turns = Calls::new();
    let cells = Rc::new([(); 2].map(|()| UnsafeCell::new(0)));
    let other = thread::spawn({
        let (turns, cells) = (turns.clone(), cells.clone());
        move || f(&turns, 1, &cells)
    });
    f(&turns, 0, &cells);
    other.join().unwrap();
}

/// Both threads write a cell under a lock.
fn two_lock() {
    two_threads(|turns, thread, cells| {
        lock(turns, thread);
        cells[0].with_mut(|_| ());
        unlock(turns, thread);
    });
}

/// Each thread writes a cell, and reads that of the other behind a barrier.
fn two_meet() {
    two_threads(|turns, thread, cells| {
        cells[thread].with_mut(|_| ());
        let parties = NonZeroU32::new(2).unwrap();
        carry_out(
            turns,
            thread,
            Call::Barrier {
                object: OTHER,
                parties,
            },
        );
        cells[1 - thread].with(|_| ());
    });
}

/// A thread waits for a condition, which the other one signals once it waits.
fn one_signals() {
    let turns = Calls::new();
    let other = thread::spawn({
        let turns = turns.clone();
        move || {
            lock(&turns, 1);
            carry_out(&turns, 1, Call::Signal { condition: OTHER });
            unlock(&turns, 1);
        }
    });
    lock(&turns, 0);
    let is_first = turns.lock().node.is_waiting(1);
    if is_first {
        let (condition, lock) = (OTHER, LOCK);
        carry_out(&turns, 0, Call::Wait { condition, lock });
    }
    unlock(&turns, 0);
    other.join().unwrap();
}

#[test]
fn call__waits_for_its_outcome() {
    for model in [two_lock, two_meet, one_signals] {
        assert!(holds(model, Without::Nothing));
    }
}

#[test]
fn call__without_any_part_is_not_woken_or_goes_on_too_early() {
    for model in [two_lock, two_meet, one_signals] {
        for without in [Without::Change, Without::Notice, Without::Check] {
            assert!(!holds(model, without), "{without:?}");
        }
    }
    for model in [two_lock, two_meet] {
        assert!(!holds(model, Without::Outcome));
    }
}
