//! The paths of a session: a thread for each keeps a controller there, and knows the access that it gives to the namespaces in use. I/O goes to one
//! path at a time: the best one, and with equal ones that which has it.
//!
//! A controller that is lost may still get late copies of commands, and carry them out (NVMe Base 2.1, 9.6). Until it is known to have ended, the
//! session is unsettled: nothing but reads goes to any path.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rdmux_wire::nvme::AnaState;

use super::controller::{Controller, Event, NamespaceInfo, Probe};
use super::link::TICK;
use super::{HostError, Options};

/// Pause before the second try to connect again, which doubles with each further one, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Time after which the access is looked at again while it does not work: not every target tells of changes.
const ACCESS_AGAIN: Duration = Duration::from_millis(500);

/// What the threads of a session share.
#[derive(Debug)]
pub(super) struct Paths {
    options: Vec<Arc<Options>>,
    queues: u16,
    state: Mutex<State>,
    changed: Condvar,
    /// Changes when I/O is to go to another place, or to none.
    epoch: AtomicU64,
    /// Number of controllers that have had I/O, at least 1.
    generation: AtomicU64,
    /// Lost controllers that may not have ended.
    unsettled: AtomicUsize,
    is_over: AtomicBool,
}

#[derive(Debug)]
struct State {
    paths: Vec<Path>,
    /// The path to which I/O goes.
    current: Option<usize>,
    /// The controller of that path, or of the last one.
    last: Option<Arc<Controller>>,
    /// The last controller that an I/O queue was connected to.
    used: Option<Weak<Controller>>,
    /// Each path was tried once.
    has_begun: bool,
    /// Bytes of a command that each controller takes.
    transfer_max: u32,
    /// Namespaces in use, which all controllers have to have.
    namespaces: Vec<NamespaceInfo>,
    cause: Arc<HostError>,
    /// Is told of controllers that are lost.
    losses: Option<Sender<Loss>>,
    /// The session is over.
    failed: Option<HostError>,
    /// Controllers are shut down when the threads end.
    closes: bool,
}

impl State {
    /// Returns a path if it still has this controller.
    fn path_of(&mut self, at: usize, controller: &Arc<Controller>) -> Option<&mut Path> {
        let path = &mut self.paths[at];
        let own = path.controller.as_ref();
        own.is_some_and(|own| Arc::ptr_eq(own, controller))
            .then_some(path)
    }
}

#[derive(Debug, Default)]
struct Path {
    controller: Option<Arc<Controller>>,
    /// Access to the namespaces in use, as far as it is known.
    access: Option<AnaState>,
    /// Number of the namespaces for which that is known.
    assessed: usize,
    /// The controller was lost, and may go on.
    lost: Option<Arc<Controller>>,
    pause: Duration,
    was_tried: bool,
    /// The last try to connect failed.
    unreachable: Option<Arc<HostError>>,
    /// It leads to something that this session cannot use.
    failed: Option<HostError>,
}

/// A controller that was lost.
#[derive(Clone, Debug)]
pub struct Loss {
    /// Its address.
    pub address: SocketAddr,
    /// The cause.
    pub cause: Arc<HostError>,
    /// I/O goes by another path.
    pub has_other: bool,
}

/// Place to which I/O goes.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) epoch: u64,
    pub(super) path: usize,
    pub(super) controller: Arc<Controller>,
}

impl Paths {
    pub(super) fn new(options: Vec<Options>, queues: u16) -> Paths {
        let paths = options.iter().map(|_| Path::default()).collect();
        Paths {
            options: options.into_iter().map(Arc::new).collect(),
            queues,
            state: Mutex::new(State {
                paths,
                current: None,
                last: None,
                used: None,
                has_begun: false,
                transfer_max: u32::MAX,
                namespaces: Vec::new(),
                cause: Arc::new(HostError::Closed(Some("no path"))),
                losses: None,
                failed: None,
                closes: false,
            }),
            changed: Condvar::new(),
            epoch: AtomicU64::new(0),
            generation: AtomicU64::new(1),
            unsettled: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until something has changed of which `waits` is not true, or so long.
    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        longest: Duration,
        waits: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let waited = self
            .changed
            .wait_timeout_while(state, longest, |state| !self.is_over() && waits(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns false while a lost controller may carry out what it was told before.
    pub(super) fn is_settled(&self) -> bool {
        self.unsettled.load(Ordering::Acquire) == 0
    }

    /// Returns the number of paths.
    pub(super) fn number(&self) -> usize {
        self.options.len()
    }

    /// Returns the time without a path after which the session gives up.
    pub(super) fn loss_timeout(&self) -> Duration {
        self.options[0].loss_timeout
    }

    pub(super) fn io_timeout(&self) -> Duration {
        self.options[0].io_timeout
    }

    /// Returns the error of a session, or of a queue, that has waited too long.
    pub(super) fn gave_up(&self) -> HostError {
        self.gave_up_by(&self.state())
    }

    fn gave_up_by(&self, state: &State) -> HostError {
        let within = self.loss_timeout();
        match *state.cause {
            HostError::NoAccess(state) => HostError::Inaccessible { within, state },
            _ => HostError::GaveUp {
                within,
                cause: state.cause.clone(),
            },
        }
    }

    /// Returns the controller to which I/O goes, or went last.
    ///
    /// # Panics
    /// The session has not begun.
    pub(super) fn controller(&self) -> Arc<Controller> {
        self.state()
            .last
            .clone()
            .expect("a session begins with a controller")
    }

    pub(super) fn transfer_max(&self) -> u32 {
        self.state().transfer_max
    }

    /// Returns the numbers of the paths by which no connection could be made, and the reasons.
    pub(super) fn unreachable(&self) -> Vec<(usize, Arc<HostError>)> {
        let state = self.state();
        let paths = state.paths.iter().enumerate();
        paths
            .filter_map(|(at, path)| Some((at, path.unreachable.clone()?)))
            .collect()
    }

    /// Returns the end of a channel by which all losses from here on come, until the session is over.
    pub(super) fn losses(&self) -> Receiver<Loss> {
        let (sender, receiver) = channel();
        self.state().losses = Some(sender);
        receiver
    }

    /// Waits until each path was tried once. One has to work, and none may lead to something else.
    pub(super) fn begin(&self) -> Result<(), HostError> {
        let longest = Duration::MAX;
        let waits = |state: &State| state.paths.iter().any(|path| !path.was_tried);
        let mut state = self.wait(self.state(), longest, waits);
        state.has_begun = true;
        if let Some(failed) = state.paths.iter().find_map(|path| path.failed.as_ref()) {
            return Err(failed.clone());
        }
        match state.last {
            Some(_) => Ok(()),
            None => Err(HostError::clone(&state.cause)),
        }
    }

    /// Ends the paths. Their threads shut the controllers down if they are asked to. Returns for each path if it has one.
    pub(super) fn end(&self, closes: bool) -> Vec<bool> {
        let mut state = self.state();
        state.closes = closes;
        let live = state.paths.iter().map(|path| path.controller.is_some()).collect();
        state.losses = None;
        // The threads have their controllers for themselves then.
        let last = state.last.take();
        self.is_over.store(true, Ordering::Release);
        drop(state);
        drop(last);
        self.changed.notify_all();
        live
    }

    /// Adds a namespace to those in use, and waits until each path is known to lead to it.
    ///
    /// # Errors
    /// One leads to another namespace.
    pub(super) fn add_namespace(&self, namespace: NamespaceInfo) -> Result<(), HostError> {
        let mut state = self.state();
        let number = state.namespaces.len() + 1;
        let current = state.current;
        state.namespaces.push(namespace);
        self.choose(&mut state);
        let waits = |state: &State| {
            let mut live = state.paths.iter().filter(|path| path.controller.is_some());
            live.any(|path| path.assessed < number)
        };
        let state = self.wait(state, self.options[0].admin_timeout, waits);
        // The one by which it was looked up has it.
        let others = state
            .paths
            .iter()
            .enumerate()
            .filter(|(at, _)| Some(*at) != current);
        match others.filter_map(|(_, path)| path.failed.as_ref()).next() {
            Some(failed) => Err(failed.clone()),
            None => Ok(()),
        }
    }

    /// Returns the place to which I/O goes; waits for one at most so long. `since` is when the caller has begun to wait.
    ///
    /// # Errors
    /// The session is over, or there was none for too long.
    pub(super) fn place(&self, longest: Duration, since: Instant) -> Result<Option<Place>, HostError> {
        let mut state = self.state();
        if state.current.is_none() && state.failed.is_none() {
            let within = self.loss_timeout();
            let left = within.saturating_sub(since.elapsed());
            if left.is_zero() {
                state.failed = Some(self.gave_up_by(&state));
            } else {
                let waits = |state: &State| state.current.is_none() && state.failed.is_none();
                state = self.wait(state, longest.min(left), waits);
            }
        }
        if let Some(failed) = &state.failed {
            return Err(failed.clone());
        }
        let place = state.current.and_then(|path| {
            let controller = state.paths[path].controller.clone()?;
            Some(Place {
                epoch: self.epoch(),
                path,
                controller,
            })
        });
        Ok(place)
    }

    /// A queue is connected to a controller, and will send it I/O.
    pub(super) fn connected(&self, controller: &Arc<Controller>) {
        let mut state = self.state();
        let controller = Arc::downgrade(controller);
        match state.used.replace(controller.clone()) {
            Some(last) if !last.ptr_eq(&controller) => self.generation.fetch_add(1, Ordering::AcqRel),
            _ => 0,
        };
    }

    /// A controller is lost. Commands on its queues, which are to be open, may still be carried out.
    pub(super) fn report(&self, at: usize, controller: &Arc<Controller>, cause: HostError) {
        let cause = Arc::new(cause);
        let mut state = self.state();
        if let Some(path) = state.path_of(at, controller) {
            path.lost = path.controller.take();
            path.access = None;
            if controller.has_queues() {
                self.unsettled.fetch_add(1, Ordering::AcqRel);
            } else {
                path.lost = None;
            }
            state.cause = cause.clone();
            self.choose(&mut state);
            let loss = Loss {
                address: controller.address(),
                cause: cause.clone(),
                has_other: state.current.is_some(),
            };
            // Whoever has asked for them may be gone.
            let _ = state.losses.as_ref().map(|losses| losses.send(loss));
        }
        drop(state);
        controller.abandon(&cause);
    }

    /// The controller of a path has refused a command because of the access to a namespace: the log of it is read again.
    pub(super) fn suspect(&self, at: usize, controller: &Arc<Controller>) {
        let mut state = self.state();
        if let Some(path) = state.path_of(at, controller) {
            path.access = None;
            self.choose(&mut state);
        }
    }

    /// A command is done after a loss.
    pub(super) fn recovered(&self, at: usize) {
        self.state().paths[at].pause = Duration::ZERO;
    }

    /// Chooses the path to which I/O goes.
    fn choose(&self, state: &mut State) {
        let rank = |path: &Path| match path.access {
            _ if path.controller.is_none() || path.assessed < state.namespaces.len() => None,
            Some(AnaState::Optimized) => Some(0),
            Some(AnaState::NonOptimized) => Some(1),
            _ => None,
        };
        let ranks = state.paths.iter().enumerate();
        let ranks = ranks.filter_map(|(at, path)| Some((rank(path)?, state.current != Some(at), at)));
        let best = ranks.min().map(|(_, _, at)| at);
        let controller = best.and_then(|at| state.paths[at].controller.clone());
        let is_last = match (&controller, &state.last) {
            (Some(controller), Some(last)) => Arc::ptr_eq(controller, last),
            _ => controller.is_none(),
        };
        if best != state.current || !is_last {
            self.epoch.fetch_add(1, Ordering::AcqRel);
        }
        if !is_last {
            state.last = controller;
        }
        state.current = best;
        self.changed.notify_all();
    }

    /// Keeps a controller at a path until the session is over.
    pub(super) fn keep(&self, at: usize) {
        let mut is_first = true;
        while std::mem::take(&mut is_first) || self.pause(at) {
            let began = Instant::now();
            match self.connect(at) {
                Ok(()) => {}
                Err(error) if error.is_of_path() => {
                    let mut state = self.state();
                    let error = Arc::new(error);
                    let path = &mut state.paths[at];
                    (path.was_tried, path.unreachable) = (true, Some(error.clone()));
                    state.cause = error;
                    self.changed.notify_all();
                    continue;
                }
                Err(error) => return self.fail(at, error),
            }
            let watched = self.watch(at);
            if began.elapsed() >= PAUSE.1 {
                self.state().paths[at].pause = Duration::ZERO;
            }
            match watched {
                Ok(Some(lost)) => self.settle(&lost),
                Ok(None) => {}
                Err(error) => return self.fail(at, error),
            }
        }
    }

    /// Sleeps before the next try. Returns false once the session is over.
    fn pause(&self, at: usize) -> bool {
        let mut state = self.state();
        let pause = state.paths[at].pause;
        state.paths[at].pause = (pause * 2).clamp(PAUSE.0, PAUSE.1);
        // Time is meant: the backoff, which spares a target that comes up.
        drop(self.wait(state, pause, |_| true));
        !self.is_over()
    }

    /// A path leads to something that this session cannot use. Without another one the session is over.
    fn fail(&self, at: usize, error: HostError) {
        let mut state = self.state();
        let path = &mut state.paths[at];
        let (controller, lost) = (path.controller.take(), path.lost.take());
        (path.was_tried, path.failed) = (true, Some(error.clone()));
        let controller = controller.filter(|controller| controller.has_queues());
        if controller.is_some() {
            self.unsettled.fetch_add(1, Ordering::AcqRel);
        }
        if state.paths.iter().all(|path| path.failed.is_some()) {
            state.failed = Some(error.clone());
        }
        self.choose(&mut state);
        drop(state);
        if let Some(controller) = controller {
            controller.abandon(&Arc::new(error));
            self.settle(&controller);
        }
        if let Some(lost) = lost {
            self.settle(&lost);
        }
    }

    /// Connects, and publishes the controller.
    fn connect(&self, at: usize) -> Result<(), HostError> {
        let options = &self.options[at];
        let controller = Arc::new(Controller::connect(options, self.queues)?);
        let inconsistent = |why| HostError::Inconsistent {
            what: "controller",
            why,
        };
        let info = controller.info();
        if info.queues < self.queues.into() {
            let (allowed, asked) = (info.queues, self.queues);
            return Err(inconsistent(format!("allows {allowed} I/O queues, not {asked}")));
        }
        let namespaces = self.state().namespaces.clone();
        for known in &namespaces {
            let differs = "than before the connection was lost: its blocks are gone";
            has_same(&controller, known, differs)?;
        }
        let access = access(&controller, &namespaces)?;
        let mut state = self.state();
        let (most, now) = (state.transfer_max, info.transfer_max);
        if now < most && state.has_begun {
            return Err(inconsistent(format!(
                "takes {now} bytes of a command at most, and earlier ones {most}"
            )));
        }
        state.transfer_max = most.min(now);
        let path = &mut state.paths[at];
        (path.controller, path.unreachable) = (Some(controller), None);
        (path.access, path.assessed, path.was_tried) = (Some(access), namespaces.len(), true);
        self.choose(&mut state);
        Ok(())
    }

    /// Watches the controller of a path until it is lost, or the session is over. Returns the one that is lost, if it may go on.
    fn watch(&self, at: usize) -> Result<Option<Arc<Controller>>, HostError> {
        let mut looked = Instant::now();
        loop {
            let mut state = self.state();
            let closes = state.closes;
            let path = &mut state.paths[at];
            if path.controller.is_none() {
                return Ok(path.lost.take());
            }
            if self.is_over() {
                let controller = path.controller.take();
                drop(state);
                // Queues that are open keep it.
                if let (Some(controller), true) = (controller.and_then(Arc::into_inner), closes) {
                    controller.close();
                }
                return Ok(None);
            }
            let (access, assessed) = (path.access, path.assessed);
            let controller = path.controller.clone();
            let number = state.namespaces.len();
            drop(state);
            let Some(controller) = controller else { continue };
            if let Some(why) = controller.lost() {
                self.report(at, &controller, HostError::Lost(why.clone()));
                continue;
            }
            let works = matches!(access, Some(AnaState::Optimized | AnaState::NonOptimized));
            let has_changed = controller.take_events().contains(&Event::AccessChanged);
            let is_new = assessed < number;
            if has_changed || access.is_none() || is_new || (!works && looked.elapsed() >= ACCESS_AGAIN) {
                looked = Instant::now();
                let namespaces = self.state().namespaces.clone();
                let found = match is_new {
                    true => namespaces.iter().try_for_each(|known| {
                        let differs = format!("by {} than by another path", controller.address());
                        has_same(&controller, known, &differs)
                    }),
                    false => Ok(()),
                };
                match found.and_then(|()| self::access(&controller, &namespaces)) {
                    Ok(found) => self.assess(at, &controller, found, namespaces.len()),
                    Err(error) if error.is_of_path() => self.report(at, &controller, error),
                    Err(error) => return Err(error),
                }
                continue;
            }
            drop(controller);
            let state = self.state();
            drop(self.wait(state, TICK, |state| {
                let path = &state.paths[at];
                path.controller.is_some() && path.access.is_some() && path.assessed >= state.namespaces.len()
            }));
        }
    }

    /// Publishes the access to namespaces that a controller gives.
    fn assess(&self, at: usize, controller: &Arc<Controller>, access: AnaState, assessed: usize) {
        let mut state = self.state();
        if let Some(path) = state.path_of(at, controller) {
            (path.access, path.assessed) = (Some(access), assessed);
            if access.refusal().is_some() {
                state.cause = Arc::new(HostError::NoAccess(access));
            }
            self.choose(&mut state);
        }
    }

    /// Returns true if a controller of this session has the id of one that is lost: it has ended then, since no two of a subsystem have the same.
    fn has_another(&self, lost: &Controller) -> bool {
        let state = self.state();
        let mut live = state.paths.iter().filter_map(|path| path.controller.as_ref());
        live.any(|controller| controller.info().cntlid == lost.info().cntlid)
    }

    /// Waits until a lost controller has ended, or the session is over.
    fn settle(&self, lost: &Controller) {
        let ends_at = Instant::now() + lost.ends_within();
        let (mut probe, mut pause) = (Probe::default(), Duration::ZERO);
        loop {
            let left = ends_at.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over() || self.has_another(lost) {
                break;
            }
            match lost.is_gone(&mut probe, left) {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => self.state().cause = Arc::new(error),
            }
            // Time is meant: a target does not tell when it has ended a controller.
            pause = (pause * 2).clamp(PAUSE.0, PAUSE.1).min(left);
            drop(self.wait(self.state(), pause, |_| true));
        }
        self.unsettled.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Returns the worst access that a controller gives to namespaces. One that the log lacks has none yet: it is looked at again.
fn access(controller: &Controller, namespaces: &[NamespaceInfo]) -> Result<AnaState, HostError> {
    let Some(log) = controller.ana_log()? else {
        return Ok(AnaState::Optimized);
    };
    let of = |namespace: &NamespaceInfo| {
        let mut groups = log.groups.iter();
        let group = groups.find(|group| group.namespaces.contains(&namespace.nsid));
        group.map_or(AnaState::Inaccessible, |group| group.state)
    };
    let states = namespaces.iter().map(of);
    Ok(states.max_by_key(|state| *state as u8).unwrap_or_default())
}

/// Checks that a controller has a namespace whose blocks are the same: a target that lost them has a new one of that number.
fn has_same(controller: &Controller, known: &NamespaceInfo, differs: &str) -> Result<(), HostError> {
    let now = controller.namespace(known.nsid)?;
    let is_same = (now.ids, now.block_shift) == (known.ids, known.block_shift) && now.blocks >= known.blocks;
    match is_same {
        true => Ok(()),
        false => Err(HostError::Inconsistent {
            what: "subsystem",
            why: format!("has another namespace {} {differs}", known.nsid),
        }),
    }
}
