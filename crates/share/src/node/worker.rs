//! A worker of the node: one thread, with an engine of the device, that serves some of the node's applications.
//!
//! It polls the rings of its applications and the device's completion queues while they have something, and else sleeps in epoll, as the waiting
//! policy says ([`Waiting`]).

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rdmux_rnic::sched::Quanta;
use rdmux_rnic::{Status, Time};
use rdmux_runtime::{Inbox, Mailbox, Waiting, mailbox, set_timer_slack};
use rdmux_verbs::moderation::now;
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::{Arm, CompletionQueue, Device, EngineWatch, EventQueue};
use rdmux_wire::node::control::{ErrorCode, Kind, Limits, Message, VERSION};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

use super::application::{self, Application, Belonging, Detached, Shared, Token};
use super::config::Resource;
use super::egress::{Egress, Piece};
use super::leaving::Leaving;
use super::observe::Part;
use super::peer::{self, Shares};
use super::post::{self, Take};
use super::services::Services;
use super::sharing::{Gate, Sharing};
use super::snapshot::Counts;
use super::tenants::{Schedule, Tenants};
use super::turns::{Batches, Turn, Turns};
use super::{NodeError, limits};
use crate::control::convert::Refusal;
use crate::control::{Channel, Ended, Received};
use crate::ring::{Layout, NodeEnd, WorkBytes};

/// Slots of an application's rings: of requests and of completions.
const SLOTS: (u32, u32) = (4096, 4096);
/// Passes over busy rings between two looks at descriptors, each of which is a system call.
const PASSES_PER_LOOK: u32 = 64;
/// Polls that find nothing between two looks at descriptors.
const POLLS_PER_LOOK: u32 = 8;
/// Events of connections that are handled in a row.
const EVENTS_PER_LOOK: usize = 64;

/// Doorbells and queues wake the worker each time that they ring, and need no call to be silent again.
const EDGE: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);
/// A descriptor that wants a turn does not wake the worker again until it has had that.
const ONCE: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);

/// An order of the node's.
#[derive(Debug)]
pub(super) enum Order {
    /// Serve an application.
    Serve(Box<(Channel, Belonging)>),
    /// Go on with what the tenants are now, and answer.
    Reload(mpsc::Sender<()>),
    /// Tell the state of the worker, with so many connections at most.
    Show(usize, mpsc::Sender<Part>),
    Stop,
}

/// Subject of an event of the epoll set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Orders,
    Events,
    Async,
    /// The engine, while the node sleeps in its place.
    Engine,
    /// A completion queue of what other nodes send, which the next pass looks at anyway.
    Peers,
    /// The control connection of the application of a slot.
    Control(u32),
    /// The doorbell or the completion queue of an application, which the next pass looks at anyway.
    Work(u32),
}

impl Source {
    pub(super) fn word(self) -> u64 {
        match self {
            Source::Orders => 0,
            Source::Events => 1,
            Source::Async => 2,
            Source::Engine => 3,
            Source::Peers => 4,
            Source::Control(slot) => 1 << 32 | u64::from(slot),
            Source::Work(slot) => 2 << 32 | u64::from(slot),
        }
    }

    pub(super) fn of_word(word: u64) -> Option<Source> {
        let slot = word as u32;
        Some(match (word >> 32, slot) {
            (0, 0) => Source::Orders,
            (0, 1) => Source::Events,
            (0, 2) => Source::Async,
            (0, 3) => Source::Engine,
            (0, 4) => Source::Peers,
            (1, _) => Source::Control(slot),
            (2, _) => Source::Work(slot),
            _ => return None,
        })
    }
}

/// Has the descriptor of a queue wake this thread for completions. `watch`: the place of the queue's engine, if this thread has it: an armed
/// queue would have the engine's thread wake up as well.
pub(super) fn arm(cq: &CompletionQueue, watch: Option<&mut EngineWatch>) {
    match watch {
        Some(watch) => watch.report(cq),
        None => cq.arm(Arm::Next),
    }
}

type WarnFn = dyn FnMut(&str) + Send;

/// Takes what a person should know. Clones are one.
#[derive(Clone)]
pub(super) struct Warn(Arc<Mutex<WarnFn>>);

impl Warn {
    pub(super) fn by(warn: impl FnMut(&str) + Send + 'static) -> Warn {
        Warn(Arc::new(Mutex::new(warn)))
    }
}

impl std::fmt::Debug for Warn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Warn")
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Worker {
    /// Its place among the node's workers.
    number: usize,
    warn: Warn,
    pub(super) shared: Shared,
    epoll: OwnedFd,
    orders: Inbox<Order>,
    /// The node.
    front: Mailbox<super::Order>,
    /// Set once it is to end.
    ends: bool,
    pub(super) applications: Vec<Option<Application>>,
    /// Applications that are to be served, and those that have ended, whose objects are being destroyed and whose slots are not free yet.
    coming: VecDeque<(Channel, Belonging)>,
    leaving: VecDeque<Leaving>,
    turns: Turns,
    tenants: Arc<Mutex<Tenants>>,
    schedule: Schedule,
    /// Moved by those applications of tenants that have ended, or belong to another tenant now.
    pub(super) past: BTreeMap<String, Counts>,
    pub(super) waiting: Waiting,
    bytes: WorkBytes,
    /// Pieces for one queue pair, which are posted together.
    list: Vec<Piece>,
    /// Set once the descriptor of the engine is in the epoll set.
    watches_engine: bool,
}

impl Worker {
    /// Makes a worker on an engine of the device, and a mailbox for orders to it. `shares`: the engine's part, if the node shares queue pairs with others.
    /// `services`: those of the node.
    pub(super) fn new(
        number: usize,
        device: Device,
        tenants: &Arc<Mutex<Tenants>>,
        (shares, services): (Option<Shares>, &Services),
        front: Mailbox<super::Order>,
    ) -> Result<(Worker, Mailbox<Order>), NodeError> {
        let (mailbox, orders) = mailbox()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let known = tenants.lock();
        let quanta = Quanta {
            strict_percent: known.strict_percent(),
            ..Quanta::default()
        };
        let limits = limits::of_device(device.provider(), quanta, known.rate_bps());
        let mut egress = Egress::new(now(), limits);
        let mut schedule = Schedule::new(number);
        schedule.set(&mut egress, now(), &known);
        drop(known);
        let events = EventQueue::new()?;
        let sharing = match shares {
            Some(shares) => Some(Sharing::open(&events, &mut egress, shares)?),
            None => None,
        };
        let worker = Worker {
            number,
            warn: Warn::by(|_| {}),
            shared: Shared {
                sharing,
                device,
                egress,
                events,
                services: services.clone(),
            },
            epoll,
            orders,
            front,
            ends: false,
            applications: Vec::new(),
            coming: VecDeque::new(),
            leaving: VecDeque::new(),
            turns: Turns::new(now()),
            tenants: tenants.clone(),
            schedule,
            past: BTreeMap::new(),
            waiting: Waiting::new(None),
            bytes: WorkBytes::new(),
            list: Vec::new(),
            watches_engine: false,
        };
        let level = epoll::EventFlags::IN;
        add(&worker.epoll, &worker.orders, Source::Orders, level)?;
        add(&worker.epoll, &worker.shared.events, Source::Events, level)?;
        let asynchronous = worker.shared.device.async_event_fd();
        add(&worker.epoll, asynchronous, Source::Async, level)?;
        if let Some(sharing) = &worker.shared.sharing {
            for cq in sharing.cqs() {
                add(&worker.epoll, cq, Source::Peers, EDGE)?;
            }
        }
        Ok((worker, mailbox))
    }

    /// Calls a function with what a person should know.
    pub(super) fn warn_by(&mut self, warn: Warn) {
        self.warn = warn;
    }

    /// Serves until it is stopped.
    ///
    /// # Errors
    /// It can go on no more. Whatever an application does ends that application alone.
    pub(super) fn run(mut self) -> Result<(), NodeError> {
        while !self.ends {
            let mut passes = 0;
            while self.pass() {
                passes += 1;
                if passes == PASSES_PER_LOOK {
                    break;
                }
            }
            if self.look()? || passes == PASSES_PER_LOOK {
                continue;
            }
            self.wait()?;
        }
        Ok(())
    }

    /// Does what the node orders. Returns true.
    fn take_orders(&mut self) -> bool {
        self.orders.reset();
        while let Some(order) = self.orders.take() {
            match order {
                Order::Serve(application) => {
                    self.coming.push_back(*application);
                    self.turns.want(Turn::Serve);
                }
                Order::Reload(answer) => {
                    self.reload();
                    // A node that waits no more needs no answer.
                    let _ = answer.send(());
                }
                Order::Show(connections_max, answer) => {
                    let _ = answer.send(self.part(connections_max));
                }
                Order::Stop => self.ends = true,
            }
        }
        true
    }

    /// Begins to serve an application.
    fn serve(&mut self, (channel, belonging): (Channel, Belonging)) {
        let is_leaving = |slot: usize| self.leaving.iter().any(|leaving| leaving.slot() as usize == slot);
        let mut free = (0..self.applications.len()).filter(|slot| self.applications[*slot].is_none());
        let slot = free
            .find(|slot| !is_leaving(*slot))
            .unwrap_or(self.applications.len());
        if slot == self.applications.len() {
            self.applications.push(None);
        }
        let slot_number = slot as u32;
        let tenant = self.schedule.tenant_of(&belonging.account);
        let Ok(application) = Application::new(&mut self.shared, channel, slot_number, belonging, tenant)
        else {
            self.front.send(super::Order::Left(self.number));
            return;
        };
        let added = add(
            &self.epoll,
            &application.channel,
            Source::Control(slot_number),
            ONCE | epoll::EventFlags::RDHUP,
        )
        .and_then(|()| add(&self.epoll, &application.cq, Source::Work(slot_number), EDGE));
        match added {
            Ok(()) => self.applications[slot] = Some(application),
            Err(_) => self.leave(application),
        }
    }

    /// Goes on with what the tenants are now.
    fn reload(&mut self) {
        let tenants = self.tenants.clone();
        let tenants = tenants.lock();
        let now = now();
        self.schedule.set(&mut self.shared.egress, now, &tenants);
        for slot in 0..self.applications.len() {
            let Some(application) = &mut self.applications[slot] else {
                continue;
            };
            let belonging = &application.belonging;
            if tenants.keeps(&belonging.account, &belonging.identity) {
                continue;
            }
            match tenants.account_of(&belonging.identity) {
                Ok(account) => {
                    count_past(&mut self.past, &self.shared, application);
                    let tenant = self.schedule.tenant_of(account);
                    application.move_to(&mut self.shared, now, account, tenant);
                }
                Err(why) => self.detach(slot as u32, &Detached::Protocol(why)),
            }
        }
        self.past
            .retain(|past, _| tenants.names().any(|name| name == past));
        if let Some(sharing) = &mut self.shared.sharing {
            sharing.end_lines(|tenant| self.schedule.has(tenant));
        }
        self.schedule.sweep(&mut self.shared.egress);
    }

    /// Moves requests from rings to the device and completions from the device to rings, and takes a turn. Returns whether there was anything.
    fn pass(&mut self) -> bool {
        let any = self.move_data();
        self.take_turn() || any
    }

    fn move_data(&mut self) -> bool {
        let mut any = false;
        let now = now();
        let batches = Batches::of(
            self.shared.egress.is_beside_short(now),
            self.turns.are_together(now),
        );
        let take = Take::Turn(batches.requests);
        for slot in 0..self.applications.len() {
            let Some(application) = &mut self.applications[slot] else {
                continue;
            };
            match application.take_work(&mut self.shared, now, &mut self.bytes, take) {
                Ok(true) => {
                    any = true;
                    self.turns.moved(now, slot as u32);
                }
                Ok(false) => {}
                Err(why) => self.detach(slot as u32, &why),
            }
        }
        self.schedule.divide(&mut self.shared.egress, now, false);
        any |= self.post(now, batches);
        any |= self.share();
        for application in self.applications.iter_mut().flatten() {
            // The time of a piece that completes at once is that of its execution.
            any |= application.take_completions(&mut self.shared, rdmux_verbs::moderation::now);
        }
        any | self.put_completions(now)
    }

    /// Does what waits for its turn, if it is due. Returns whether there was anything.
    fn take_turn(&mut self) -> bool {
        if self.turns.is_empty() {
            return false;
        }
        let began = now();
        let Some(turn) = self.turns.next(began, self.shared.egress.is_beside_short(began)) else {
            return false;
        };
        match turn {
            Turn::Serve => {
                if let Some(application) = self.coming.pop_front() {
                    self.serve(application);
                }
                if !self.coming.is_empty() {
                    self.turns.want(turn);
                }
            }
            Turn::Message(slot) => self.control(slot),
            Turn::Leave => self.destroy_one(began),
        }
        let ended = now();
        self.turns.took(ended, turn, ended.since_ns(began));
        true
    }

    /// Handles what has come over shared queue pairs, and tells applications. Returns whether there was anything.
    fn share(&mut self) -> bool {
        let Shared { sharing, egress, .. } = &mut self.shared;
        let Some(sharing) = sharing else { return false };
        // The pass may have posted what has completed by now: the time of that is not the one at which the pass began.
        let now = now();
        let any = sharing.poll(egress, now);
        self.tell_news(now) || any
    }

    fn tell_news(&mut self, now: Time) -> bool {
        let mut any = false;
        while let Some((owner, news)) = self.shared.sharing.as_mut().and_then(Sharing::next_news) {
            any = true;
            if let Some(Some(application)) = self.applications.get_mut(owner.application as usize)
                && let Err(why) = application.has_news(&mut self.shared, now, owner.qp, news)
            {
                self.detach(owner.application, &why);
            }
        }
        while let Some(rkey) = self.shared.sharing.as_mut().and_then(Sharing::next_region_gone) {
            any = true;
            self.region_gone(rkey);
        }
        if let Some(sharing) = &mut self.shared.sharing {
            for warning in sharing.take_warnings() {
                (self.warn.0.lock())(&warning);
            }
            while let Some(slot) = sharing.next_quarantined() {
                if let Some(Some(application)) = self.applications.get(slot as usize) {
                    (self.warn.0.lock())(&format!(
                        "requests of the application {} (process {}) make shared queue pairs fail: its further connections have queue pairs of their own",
                        application.name.replace(char::is_control, "?"),
                        application.belonging.identity.pid
                    ));
                }
            }
        }
        any
    }

    /// Answers the application that has deregistered a region which nobody uses any more.
    fn region_gone(&mut self, rkey: rdmux_verbs::RKey) {
        for slot in 0..self.applications.len() {
            if let Some(application) = &mut self.applications[slot]
                && let Some(request) = application.going.remove(&rkey)
                && let Err(why) = application.channel.send(request, &Message::Done {})
            {
                self.detach(slot as u32, &why.into());
            }
        }
    }

    /// Posts a batch of pieces of requests to the device: successive ones for the same queue pair as one list, so that the device sends
    /// them with few system calls. Returns whether there were any.
    fn post(&mut self, now: Time, mut batch: Batches) -> bool {
        let mut any = false;
        while batch.has_room() {
            let Shared { sharing, egress, .. } = &mut self.shared;
            let Some(piece) = egress.next(now, &mut Gate(sharing.as_mut())) else {
                break;
            };
            any = true;
            batch.posted(piece.length);
            if let Some(sharing) = sharing
                && sharing.add_piece(egress, now, &piece)
            {
                continue;
            }
            if self.list.first().is_some_and(|first| first.owner != piece.owner) {
                self.post_list(now);
            }
            self.list.push(piece);
        }
        self.post_list(now);
        if let Some(sharing) = &mut self.shared.sharing {
            sharing.post_list();
        }
        any
    }

    /// Posts the pieces of the list, which are for one queue pair.
    fn post_list(&mut self, now: Time) {
        let Some(first) = self.list.first() else { return };
        match self.applications.get_mut(first.owner.application as usize) {
            Some(Some(application)) => application.post_pieces(&mut self.shared, now, &self.list),
            Some(None) | None => self
                .shared
                .egress
                .refused(now, &self.list, Status::LocalQpOperation),
        }
        self.list.clear();
    }

    /// Puts completions into the rings of applications, and has messages that found no room wait for it. Returns whether there were completions.
    fn put_completions(&mut self, now: Time) -> bool {
        while let Some(done) = self.shared.egress.poll_done() {
            if let Some(Some(application)) = self.applications.get_mut(done.owner.application as usize) {
                application.done(&done);
            }
        }
        let mut any = false;
        for slot in 0..self.applications.len() {
            let Some(application) = &mut self.applications[slot] else {
                continue;
            };
            // The worker comes here after any message that it has sent, and before it sleeps.
            if application.channel.has_waiting() && !application.awaits_room {
                self.turns.want(Turn::Message(slot as u32));
            }
            let put = application.put_completions();
            let told = match application.has_drained() {
                true => application.tell_drained(&mut self.shared, now),
                false => Ok(()),
            };
            match put.and_then(|put| told.map(|()| put)) {
                Ok(true) => {
                    any = true;
                    self.turns.moved(now, slot as u32);
                }
                Ok(false) => {}
                Err(why) => self.detach(slot as u32, &why),
            }
        }
        any
    }

    /// Polls as long as the policy expects that to cost less than a wake-up, and then sleeps.
    fn wait(&mut self) -> Result<(), NodeError> {
        let began = Instant::now();
        self.waiting.end_run();
        let mut polls = 0_u32;
        while self.waiting.pause(began) {
            polls = polls.wrapping_add(1);
            if self.pass() || polls.is_multiple_of(POLLS_PER_LOOK) && self.look()? {
                self.waiting.came(began);
                return Ok(());
            }
        }
        let mut watch = self.shared.device.watch();
        if let Some(watch) = &watch
            && !self.watches_engine
        {
            add(&self.epoll, watch, Source::Engine, epoll::EventFlags::IN)?;
            self.watches_engine = true;
        }
        let is_silent = watch.as_mut().is_none_or(EngineWatch::prepare);
        let sleeps = self.prepare_sleep(watch.as_mut()) && is_silent;
        if sleeps {
            let began = now();
            let turn = self.turns.next_time(self.shared.egress.is_beside_short(began));
            let until = self.shared.egress.next_time(began).into_iter().chain(turn).min();
            let until = until.map(|until| Duration::from_nanos(until.since_ns(began)));
            let deadline = self.shared.sharing.as_mut().and_then(Sharing::deadline);
            let deadline = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            self.look_for([until, deadline].into_iter().flatten().min())?;
        }
        // Processes the packets that woke this thread, before the next pass.
        drop(watch);
        match sleeps {
            true => self.waiting.slept(began, true),
            false => self.waiting.came(began),
        }
        for application in self.applications.iter_mut().flatten() {
            application.awake();
        }
        Ok(())
    }

    /// Prepares all applications for a sleep, in the place of the engine if this thread has it. Returns false if there is something to do.
    fn prepare_sleep(&mut self, mut watch: Option<&mut EngineWatch>) -> bool {
        let mut sleeps = true;
        for slot in 0..self.applications.len() {
            let Some(application) = &mut self.applications[slot] else {
                continue;
            };
            match application.prepare_sleep(&mut self.shared, now, watch.as_deref_mut()) {
                Ok(may) => sleeps &= may,
                Err(why) => {
                    self.detach(slot as u32, &why);
                    sleeps = false;
                }
            }
        }
        let Shared { sharing, egress, .. } = &mut self.shared;
        if let Some(sharing) = sharing {
            sleeps &= sharing.prepare_sleep(egress, now(), watch);
        }
        self.schedule.divide(egress, now(), true);
        sleeps & !self.tell_news(now())
    }

    /// Looks at descriptors. Returns whether there was something to do besides what a pass does.
    fn look(&mut self) -> Result<bool, NodeError> {
        self.look_for(Some(Duration::ZERO))
    }

    /// Waits until a descriptor is readable, or the time is over, and looks at them.
    fn look_for(&mut self, timeout: Option<Duration>) -> Result<bool, NodeError> {
        let mut any = false;
        let Shared { sharing, egress, .. } = &mut self.shared;
        if let Some(sharing) = sharing {
            any |= sharing.look(egress, now());
        }
        any |= self.tell_news(now());
        // A token is there before the descriptor says so.
        for _ in 0..EVENTS_PER_LOOK {
            let Some(word) = self.shared.events.poll() else {
                break;
            };
            any = true;
            let Shared { sharing, egress, .. } = &mut self.shared;
            match sharing.as_mut().filter(|_| peer::is_token(word)) {
                Some(sharing) => sharing.happened(egress, now(), word),
                None => self.happened(Token::of_word(word)),
            }
        }
        any |= self.tell_news(now());
        let timeout = if any { Some(Duration::ZERO) } else { timeout };
        // A time that is too long for the system is as good as none.
        let mut timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // epoll's timeout counts in milliseconds. A rate has a piece wait for microseconds.
        if let Some(precise) = timeout.filter(|time| time.tv_sec == 0 && time.tv_nsec > 0) {
            set_timer_slack();
            let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
            match poll(&mut fds, Some(&precise)) {
                Ok(_) | Err(Errno::INTR) => timeout = Some(Timespec::default()),
                Err(error) => return Err(error.into()),
            }
        }
        let mut found = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 32];
        let count = match epoll::wait(&self.epoll, &mut found, timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        for event in &found[..count] {
            any |= match Source::of_word(event.data.u64()) {
                Some(Source::Async) => self.device_has_news(),
                Some(Source::Control(slot)) => {
                    self.turns.want(Turn::Message(slot));
                    true
                }
                Some(Source::Orders) => self.take_orders(),
                Some(Source::Events) => true,
                Some(Source::Engine | Source::Peers | Source::Work(_)) | None => false,
            };
        }
        Ok(any)
    }

    /// Handles a message of an application, if there is one.
    fn control(&mut self, slot: u32) {
        match self.message(slot) {
            Ok(true) => self.turns.want(Turn::Message(slot)),
            Ok(false) => {
                let Some(Some(application)) = self.applications.get_mut(slot as usize) else {
                    return;
                };
                application.awaits_room = application.channel.has_waiting();
                let mut flags = ONCE | epoll::EventFlags::RDHUP;
                flags.set(epoll::EventFlags::OUT, application.awaits_room);
                let data = epoll::EventData::new_u64(Source::Control(slot).word());
                if epoll::modify(&self.epoll, &application.channel, data, flags).is_err() {
                    // Nothing would tell of its messages.
                    self.detach(slot, &Detached::Ended(Ended::Gone));
                }
            }
            Err(why) => self.detach(slot, &why),
        }
    }

    /// Handles a message of an application. Returns false if there is none, or it does not take its answers.
    fn message(&mut self, slot: u32) -> Result<bool, Detached> {
        let Some(Some(application)) = self.applications.get_mut(slot as usize) else {
            return Ok(false);
        };
        application.channel.flush()?;
        // One that does not read its answers gets no more of them.
        if application.channel.has_waiting() {
            return Ok(false);
        }
        let Some(received) = application.channel.receive()? else {
            return Ok(false);
        };
        if application.rings.is_none() {
            application.attach(&self.shared, &self.epoll, received.request, &received.message)?;
            return Ok(true);
        }
        // Work that it has posted before the request comes before the request. There was a ring of it at most: what comes meanwhile waits.
        let now = now();
        for _ in 0..SLOTS.0.div_ceil(post::BATCH as u32) {
            if !application.take_work(&mut self.shared, now, &mut self.bytes, Take::All)? {
                break;
            }
        }
        self.post(now, Batches::LONG);
        if let Some(Some(application)) = self.applications.get_mut(slot as usize) {
            application.answer(&mut self.shared, now, received)?;
        }
        Ok(true)
    }

    /// Passes on what happened to an object of an application.
    fn happened(&mut self, token: Token) {
        let Some(Some(application)) = self.applications.get_mut(token.slot as usize) else {
            return;
        };
        if let Err(why) = application.happened(&mut self.shared, now(), token) {
            self.detach(token.slot, &why);
        }
    }

    /// Passes the device's events on. Returns whether there were any.
    fn device_has_news(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.shared.device.poll_async_event() {
            any = true;
            for slot in 0..self.applications.len() {
                if let Some(application) = &mut self.applications[slot]
                    && let Err(why) = application.device_has_news(&mut self.shared, now(), event)
                {
                    self.detach(slot as u32, &why);
                }
            }
        }
        any
    }

    /// Ends an application: everything that it has goes.
    fn detach(&mut self, slot: u32, why: &Detached) {
        let Some(application) = self.applications.get_mut(slot as usize).and_then(Option::take) else {
            return;
        };
        let mut application = application;
        count_past(&mut self.past, &self.shared, &application);
        if let Detached::Protocol(why) = why {
            let text = format!("detached: {why}");
            let _ = application
                .channel
                .send(0, &Refusal::new(ErrorCode::Protocol, text).message());
        }
        self.turns.forget(Turn::Message(slot));
        self.leave(application);
    }

    /// Has an application that has ended leave, an object in each turn.
    fn leave(&mut self, application: Application) {
        if let Some(rings) = &application.rings {
            // Its process has this open file too, so its bell would stay in the epoll set, and wake the worker, as long as the process runs.
            let _ = epoll::delete(&self.epoll, rings.waiter());
        }
        self.leaving.push_back(Leaving::new(application));
        self.turns.want(Turn::Leave);
    }

    /// Destroys an object of an application that has ended.
    fn destroy_one(&mut self, now: Time) {
        let Some(mut leaving) = self.leaving.pop_front() else {
            return;
        };
        match leaving.step(&mut self.shared, now) {
            // Those with much to destroy take turns with those with little.
            Some(()) => self.leaving.push_back(leaving),
            None => {
                // Its other descriptors leave the epoll set when they are closed.
                drop(leaving);
                self.schedule.sweep(&mut self.shared.egress);
                self.front.send(super::Order::Left(self.number));
            }
        }
        if !self.leaving.is_empty() {
            self.turns.want(Turn::Leave);
        }
    }
}

impl Application {
    /// Carries out a request and answers it.
    fn answer(&mut self, shared: &mut Shared, now: Time, received: Received) -> Result<(), Detached> {
        let answer = match received.message {
            Message::Destroy {
                kind: Kind::Region,
                id,
            } => match self.deregister(shared, received.request, id) {
                Ok(None) => return Ok(()),
                Ok(Some(answer)) => Ok(answer),
                Err(refusal) => Err(refusal),
            },
            message => self.carry_out(shared, now, message, received.descriptors),
        };
        let answer = match answer {
            Err(refusal) if refusal.code == ErrorCode::Protocol => {
                return Err(Detached::Protocol(refusal.text));
            }
            Err(refusal) => refusal.message(),
            Ok(answer) => answer,
        };
        Ok(self.channel.send(received.request, &answer)?)
    }

    /// Agrees on a version with an application, and gives it its rings.
    fn attach(
        &mut self,
        shared: &Shared,
        epoll: impl AsFd,
        request: u32,
        message: &Message,
    ) -> Result<(), Detached> {
        let Message::Attach {
            version_min,
            version_max,
            name,
        } = message
        else {
            return Err(Detached::Protocol(format!("{} before Attach", message.name())));
        };
        if !(*version_min..=*version_max).contains(&VERSION) {
            let text =
                format!("the node has version {VERSION}, the application {version_min} to {version_max}");
            let refusal = Refusal::new(ErrorCode::Version, text);
            self.channel.send(request, &refusal.clone().message())?;
            return Err(Detached::Protocol(refusal.text));
        }
        match self.belonging.account.charge(Resource::Applications, 1) {
            Ok(charge) => self.belonging.charge = Some(charge),
            Err(refusal) => {
                self.channel.send(request, &refusal.clone().message())?;
                return Err(Detached::Protocol(refusal.text));
            }
        }
        self.name.clone_from(name);
        let made = Layout::new(1, SLOTS.0, 1, SLOTS.1)
            .map_err(io::Error::other)
            .and_then(NodeEnd::create);
        let (end, files) = made.map_err(|error| Detached::Protocol(error.to_string()))?;
        let source = Source::Work(self.slot);
        add(epoll, end.waiter(), source, EDGE).map_err(|error| Detached::Protocol(error.to_string()))?;
        let device = &shared.device;
        let limits = device.limits();
        let account = &self.belonging.account;
        let most = |device: u32, own: usize, resource| {
            let tenant = account.limit(resource).try_into().unwrap_or(u32::MAX);
            device.min(own as u32).min(tenant)
        };
        let answer = Message::Attached {
            version: VERSION,
            address: device.address(),
            features: (device.features() & crate::FEATURES).bits(),
            limits: Limits {
                queue_pairs: most(limits.queue_pairs, application::QPS_MAX, Resource::QueuePairs),
                memory_regions: most(limits.memory_regions, application::REGIONS_MAX, Resource::Regions),
                work_requests: application::WORK_REQUESTS_MAX,
                sges: limits.sges,
                inline_bytes: limits.inline_bytes,
                message_bytes: limits.message_bytes,
            },
            active_mtu: device.active_mtu(),
            vectors: device.completion_vectors(),
            submission_slots: SLOTS.0,
            completion_slots: SLOTS.1,
        };
        self.channel.send_with(request, &answer, &files.as_fds())?;
        self.rings = Some(post::Rings::new(end));
        Ok(())
    }
}

/// Adds what an application has moved that leaves its tenant.
fn count_past(past: &mut BTreeMap<String, Counts>, shared: &Shared, application: &Application) {
    let moved = shared
        .egress
        .counts_of(application.slot)
        .since(&application.before)
        .moved();
    let tenant = application.belonging.account.name();
    match past.get_mut(tenant) {
        Some(past) => past.add(&moved),
        None => drop(past.insert(tenant.to_owned(), moved)),
    }
}

fn add(epoll: impl AsFd, descriptor: impl AsFd, source: Source, flags: epoll::EventFlags) -> io::Result<()> {
    let descriptor: BorrowedFd<'_> = descriptor.as_fd();
    let data = epoll::EventData::new_u64(source.word());
    Ok(epoll::add(epoll, descriptor, data, flags)?)
}

#[cfg(test)]
mod tests;
