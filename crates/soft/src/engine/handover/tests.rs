//! The hand-over under loom, which tries the orders in which threads may run and every value that a load may return. A packet that nobody
//! watches for makes a model hang, which loom reports. The models hold as the code is, and fail without any single fence.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::rc::Rc;

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Condvar, Mutex, MutexGuard};
use loom::thread;

/// The state again, on loom's atomics.
#[path = "state.rs"]
mod state;

mod sync {
    use super::{Cell, Location, function_at};

    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

    thread_local! {
        /// The function whose fence is left out.
        pub(super) static WITHOUT: Cell<Option<&'static str>> = const { Cell::new(None) };
    }

    #[track_caller]
    pub(super) fn fence(order: Ordering) {
        if WITHOUT.get() != Some(function_at(Location::caller().line())) {
            loom::sync::atomic::fence(order);
        }
    }
}

use state::{HandOver, POLLER_LEASE_NS, Wake};
use sync::WITHOUT;

const STATE: &str = include_str!("state.rs");

/// Returns the name of the function that contains a line of `state.rs`.
fn function_at(line: u32) -> &'static str {
    let name = |line: &'static str| Some(line.split_once("fn ")?.1.split_once('(')?.0);
    let before = STATE.lines().take(line as usize);
    before.filter_map(name).last().unwrap_or_default()
}

/// Numbers of the datagrams that the two callers wait for.
const OF_LEADER: usize = 0;
const OF_OTHER: usize = 1;

/// Sockets and wakers, as the kernel keeps them, and the datagrams that were taken in.
#[derive(Debug, Default)]
struct World {
    /// A datagram lies in the socket.
    arrived: [bool; 2],
    taken_in: [bool; 2],
    kick: bool,
    stop: bool,
}

impl World {
    /// Takes in the datagrams that have arrived.
    fn drive(&mut self) {
        for (arrived, taken_in) in self.arrived.iter_mut().zip(&mut self.taken_in) {
            *taken_in |= std::mem::take(arrived);
        }
    }
}

struct Model {
    hand_over: HandOver,
    /// The state under the engine's lock.
    world: Mutex<World>,
    changed: Condvar,
    /// Completion queues that are armed.
    armed: AtomicUsize,
    /// Set if the thread looks again by itself when the lease is over. Where it is not set, nobody may rely on that.
    lease_ends: bool,
}

impl Model {
    fn new(lease_ends: bool) -> Rc<Model> {
        Rc::new(Model {
            hand_over: HandOver::new(),
            world: Mutex::default(),
            changed: Condvar::new(),
            armed: AtomicUsize::new(0),
            lease_ends,
        })
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    fn change<R>(&self, change: impl FnOnce(&mut World) -> R) -> R {
        let result = change(&mut self.world());
        self.changed.notify_all();
        result
    }

    /// Sleeps until the condition holds.
    fn wait(&self, until: impl Fn(&World) -> bool) -> MutexGuard<'_, World> {
        let mut world = self.world();
        while !until(&world) {
            world = self.changed.wait(world).unwrap();
        }
        world
    }

    fn wake(&self, who: Wake) {
        match who {
            Wake::Nobody => {}
            Wake::Thread => self.change(|world| world.kick = true),
        }
    }

    /// The engine's thread.
    fn run(&self) {
        let mut now_ns = 1;
        while !self.world().stop {
            if self.hand_over.lease(now_ns) {
                let kicked = !self.lease_ends || self.world().kick;
                if !kicked {
                    now_ns += POLLER_LEASE_NS;
                }
                if kicked || self.hand_over.park() {
                    self.wait(|world| world.kick || world.stop).kick = false;
                }
                self.hand_over.unpark();
                continue;
            }
            self.hand_over.unpark();
            self.change(World::drive);
            let something = |world: &World| world.kick || world.stop || world.arrived.contains(&true);
            self.wait(something).kick = false;
        }
    }

    fn is_any_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed) > 0
    }

    /// A caller that polls.
    fn poll(&self) {
        self.change(|world| {
            if !self.is_any_armed() {
                self.hand_over.polls(1);
            }
            world.drive();
        });
    }

    /// A caller that arms a completion queue, polls it until it is empty, and sleeps until a descriptor notifies it.
    fn sleep_armed(&self) {
        self.armed.fetch_add(1, Ordering::Relaxed);
        // The caller holds the engine's lock.
        drop(self.world());
        self.wake(self.hand_over.hand_over());
        self.poll();
        drop(self.wait(|world| world.taken_in[OF_OTHER]));
    }

    /// A follower: a caller that sleeps and relies on others.
    fn sleep(&self) {
        self.hand_over.rely();
        assert!(self.hand_over.has_followers());
        // The caller holds the engine's lock before it sleeps.
        drop(self.world());
        self.wake(self.hand_over.hand_over());
        drop(self.wait(|world| world.taken_in[OF_OTHER]));
        self.hand_over.rely_no_more();
    }

    /// A leader that waits until its datagram is taken in.
    fn lead(&self) {
        loop {
            self.hand_over.lead();
            self.change(World::drive);
            if self.world().taken_in[OF_LEADER] {
                break;
            }
            // Its completion queue is armed: others that take in its datagram wake it.
            drop(self.wait(|world| world.arrived.contains(&true) || world.taken_in[OF_LEADER]));
        }
        self.wake(self.hand_over.stop_leading(1, || self.is_any_armed()));
    }

    fn end(&self) {
        self.change(|world| world.stop = true);
    }
}

fn spawn(model: &Rc<Model>, run: impl FnOnce(&Model) + 'static) -> thread::JoinHandle<()> {
    let model = model.clone();
    thread::spawn(move || run(&model))
}

/// A caller polls, and then sleeps: the thread watches at once, not when the lease is over.
fn poller_sleeps() {
    let model = Model::new(false);
    let thread = spawn(&model, Model::run);
    let caller = spawn(&model, |model| {
        model.poll();
        model.sleep();
        model.end();
    });
    model.change(|world| world.arrived[OF_OTHER] = true);
    caller.join().unwrap();
    thread.join().unwrap();
}

/// A caller polls, arms, polls until its queue is empty, and sleeps.
fn poller_arms() {
    let model = Model::new(false);
    let thread = spawn(&model, Model::run);
    let caller = spawn(&model, |model| {
        model.poll();
        model.sleep_armed();
        model.end();
    });
    model.change(|world| world.arrived[OF_OTHER] = true);
    caller.join().unwrap();
    thread.join().unwrap();
}

/// One caller has armed a queue and sleeps; another polls a queue that is not armed, and does not come back.
fn poller_leaves_beside_armed() {
    let model = Model::new(false);
    let thread = spawn(&model, Model::run);
    let poller = spawn(&model, |model| {
        model.poll();
        model.poll();
        model.change(|world| world.arrived[OF_OTHER] = true);
    });
    model.sleep_armed();
    model.end();
    poller.join().unwrap();
    thread.join().unwrap();
}

/// A follower sleeps and relies on the leader, which stops leading.
fn leader_is_relied_on() {
    follower_beside_leader(Model::sleep);
}

/// The same with a caller that has armed a queue and sleeps.
fn leader_is_relied_on_by_armed() {
    follower_beside_leader(Model::sleep_armed);
}

fn follower_beside_leader(sleep: fn(&Model)) {
    let model = Model::new(false);
    let thread = spawn(&model, Model::run);
    let leader = spawn(&model, |model| {
        model.lead();
        model.change(|world| world.arrived[OF_OTHER] = true);
    });
    model.change(|world| world.arrived[OF_LEADER] = true);
    sleep(&model);
    model.end();
    leader.join().unwrap();
    thread.join().unwrap();
}

/// The leader stops leading, and its caller does not come back: the thread takes in the requests of a peer.
fn leader_stops() {
    let model = Model::new(true);
    let thread = spawn(&model, Model::run);
    model.change(|world| world.arrived[OF_LEADER] = true);
    model.lead();
    model.change(|world| world.arrived[OF_OTHER] = true);
    drop(model.wait(|world| world.taken_in[OF_OTHER]));
    model.end();
    thread.join().unwrap();
}

/// Returns whether all models hold, without one fence if one is given.
fn hold(without: Option<&'static str>) -> bool {
    let models = [
        poller_sleeps,
        poller_arms,
        poller_leaves_beside_armed,
        leader_is_relied_on,
        leader_is_relied_on_by_armed,
        leader_stops,
    ];
    models.into_iter().all(|model| {
        let run = || {
            let mut builder = loom::model::Builder::new();
            builder.preemption_bound.get_or_insert(2);
            builder.check(move || {
                WITHOUT.set(without);
                model();
            });
        };
        let held = catch_unwind(AssertUnwindSafe(run)).is_ok();
        WITHOUT.set(None);
        held
    })
}

#[test]
fn hand_over__somebody_looks_out() {
    assert!(hold(None));
}

#[test]
fn hand_over__needs_each_fence() {
    let lines = (1..).zip(STATE.lines());
    let fences: BTreeSet<&str> = lines
        .filter(|(_, line)| line.contains("fence(Ordering"))
        .map(|(line, _)| function_at(line))
        .collect();
    assert!(fences.len() >= 5, "{fences:?}");
    for without in fences {
        assert!(!hold(Some(without)), "the fence of {without} is not needed");
    }
}
