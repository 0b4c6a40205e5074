//! Completion queues, each with a completion channel of its own, and the policy by which threads wait for them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::{
    Arm, CqModeration, Cqn, Moderation, ModerationKind, Qpn, RKey, Status, WcOpcode, WorkCompletion,
};
use rdmux_verbs::abi::{self, wc_flags, wc_opcode, wc_status};
use rdmux_verbs::provider::{self, CompletionQueue as _, conditions};
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::waiting::{Plan, Policy, WaitMode};
use rdmux_verbs::{CreateError, Features, ResizeError, wake_cost_ns};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;

use super::device::{Device, Listed, poll_until};
use super::objects::{Cq, POLL_MAX};
use super::resources::ObjectEntry;

/// Vendor id of `rxe`.
const VENDOR_RXE: u32 = 0x00ff_ffff;
/// `IB_WC_WITH_INVALIDATE` of the kernel, which rxe gives to programs unchanged.
const WITH_INV_OF_RXE: u32 = 1 << 2;

/// Entry of a completion queue, for tools.
#[derive(Debug, Default)]
pub(super) struct CqCounts {
    events: AtomicU64,
    taken: AtomicU64,
    /// All but the counts.
    moderation: Mutex<CqModeration>,
}

impl CqCounts {
    pub(super) fn told(&self) -> CqModeration {
        CqModeration {
            events: self.events.load(Ordering::Relaxed),
            taken: self.taken.load(Ordering::Relaxed),
            ..*self.moderation.lock()
        }
    }
}

#[derive(Debug)]
struct Inner {
    device: Device,
    cq: Arc<Cq>,
    number: u32,
    /// Flag of receives that invalidated a key.
    with_inv: u32,
    /// For programs that wait by a descriptor: readable when the channel is. A program that reads the channel itself would take
    /// events that must be acknowledged; an epoll set gives nothing to readers.
    ready: OwnedFd,
    /// Wakes other threads that wait: one event can stand for several completions.
    others: OwnedFd,
    counts: Arc<CqCounts>,
    /// Set when an event was taken since the queue was armed.
    notified: AtomicBool,
    /// Threads in [`CompletionQueue::wait`].
    waiters: AtomicUsize,
    policy: Mutex<Policy>,
    began: Instant,
    _listed: Listed,
}

/// Completion queue.
#[derive(Clone, Debug)]
pub(crate) struct CompletionQueue(Arc<Inner>);

impl CompletionQueue {
    pub(super) fn new(device: &Device, depth: u32, vector: u32) -> Result<CompletionQueue, CreateError> {
        let number = device.next_number();
        let depth_max = u32::try_from(device.0.attr.orig_attr.max_cqe).unwrap_or(u32::MAX);
        // Not every device has a queue as long as requested; one that is too short overruns, which the device reports.
        let cq = Cq::new(&device.0.context, depth.min(depth_max), number, vector)
            .map_err(|error| device.create_error(error, Features::empty()))?;
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?;
        epoll::add(
            &ready,
            cq.fd(),
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN,
        )
        .map_err(io::Error::from)?;
        let mut policy = Policy::new(wake_cost_ns());
        policy.pin(device.0.waiting.or_else(WaitMode::of_environment));
        let counts: Arc<CqCounts> = Arc::default();
        let entry = ObjectEntry::Cq {
            number,
            depth,
            vector,
            counts: counts.clone(),
        };
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        Ok(CompletionQueue(Arc::new(Inner {
            device: device.clone(),
            cq: Arc::new(cq),
            number,
            with_inv: match device.0.attr.orig_attr.vendor_id {
                VENDOR_RXE => WITH_INV_OF_RXE,
                _ => wc_flags::WITH_INV,
            },
            ready,
            others: eventfd(0, flags).map_err(io::Error::from)?,
            counts,
            notified: AtomicBool::new(false),
            waiters: AtomicUsize::new(0),
            policy: Mutex::new(policy),
            began: Instant::now(),
            _listed: Listed::new(device, entry),
        })))
    }

    pub(super) fn object(&self) -> &Arc<Cq> {
        &self.0.cq
    }

    fn completion(&self, wc: &abi::Wc) -> WorkCompletion {
        let completion = completion(wc, self.0.with_inv);
        if completion.status != Status::Success {
            self.0.device.note_error(wc.qp_num, completion.status);
        }
        completion
    }

    /// Arms the queue. Returns whether there was an event, which the next thread that polls handles.
    fn rearm(&self, arm: Arm) -> bool {
        let came = self.take_events();
        self.0.notified.store(false, Ordering::Relaxed);
        self.0.cq.arm(arm == Arm::Solicited);
        came
    }

    /// Takes the events. Returns whether there were any.
    fn take_events(&self) -> bool {
        let events = self.0.cq.take_events();
        if events > 0 {
            self.0.counts.events.fetch_add(events.into(), Ordering::Relaxed);
            self.0.notified.store(true, Ordering::Relaxed);
        }
        events > 0
    }

    /// Takes completions; returns how many.
    fn take(&self, into: &mut [abi::Wc; POLL_MAX], max: usize) -> usize {
        let count = self.0.cq.poll(into, max);
        if count > 0 {
            self.0.counts.taken.fetch_add(count as u64, Ordering::Relaxed);
        }
        count
    }

    fn wake_others(&self, but: usize) {
        if self.0.waiters.load(Ordering::SeqCst) > but {
            // Fails only after 2^64 wake-ups that no thread has read.
            let _ = rustix::io::write(&self.0.others, &1u64.to_ne_bytes());
        }
    }

    fn wait_until(&self, deadline: Option<Instant>) -> io::Result<Option<WorkCompletion>> {
        let began = Instant::now();
        let elapsed_ns = || began.elapsed().as_nanos() as u64;
        let is_over = || deadline.is_some_and(|at| Instant::now() >= at);
        // One waiting thread at a time uses the policy; another sleeps at once.
        let mut policy = self.0.policy.try_lock();
        while let Some(policy) = policy.as_deref_mut() {
            match policy.plan(elapsed_ns(), conditions(self.0.began.elapsed().as_nanos() as u64)) {
                Plan::Spin { .. } => std::hint::spin_loop(),
                Plan::Yield => std::thread::yield_now(),
                Plan::Sleep => break,
            }
            if let Some(wc) = self.poll() {
                policy.came(elapsed_ns());
                return Ok(Some(wc));
            }
            if is_over() {
                policy.gave_up(elapsed_ns());
                return Ok(None);
            }
        }
        loop {
            self.rearm(Arm::Next);
            if let Some(wc) = self.poll() {
                if let Some(policy) = policy.as_deref_mut() {
                    policy.came(elapsed_ns());
                }
                return Ok(Some(wc));
            }
            let woken = !is_over() && poll_until(&[self.0.cq.fd(), self.0.others.as_fd()], deadline)?;
            let _ = rustix::io::read(&self.0.others, &mut [0u8; 8]);
            let found = self.poll();
            if let Some(policy) = policy.as_deref_mut() {
                match &found {
                    Some(_) => policy.woke(elapsed_ns(), None),
                    None if !woken => policy.gave_up(elapsed_ns()),
                    None => {}
                }
            }
            if found.is_some() || !woken {
                return Ok(found);
            }
        }
    }
}

impl provider::CompletionQueue for CompletionQueue {
    fn cqn(&self) -> Cqn {
        Cqn(self.0.number)
    }

    fn poll(&self) -> Option<WorkCompletion> {
        let mut taken = [abi::Wc::default(); POLL_MAX];
        let count = self.take(&mut taken, 1);
        (count > 0).then(|| self.completion(&taken[0]))
    }

    fn poll_many(&self, max: usize, into: &mut VecDeque<WorkCompletion>) -> usize {
        let mut taken = [abi::Wc::default(); POLL_MAX];
        let mut total = 0;
        while total < max {
            let count = self.take(&mut taken, max - total);
            into.extend(taken[..count].iter().map(|wc| self.completion(wc)));
            total += count;
            if count < POLL_MAX {
                break;
            }
        }
        total
    }

    fn poll_into(&self, into: &mut [WorkCompletion]) -> usize {
        let mut taken = [abi::Wc::default(); POLL_MAX];
        let mut total = 0;
        while total < into.len() {
            let left = &mut into[total..];
            let count = self.take(&mut taken, left.len());
            for (to, wc) in left.iter_mut().zip(&taken[..count]) {
                *to = self.completion(wc);
            }
            total += count;
            if count < POLL_MAX {
                break;
            }
        }
        total
    }

    fn resize(&self, depth: u32) -> Result<(), ResizeError> {
        self.0.cq.resize(depth).map_err(|errno| match errno {
            // A device answers so to a depth that is too short.
            Errno::INVAL => ResizeError::TooShort,
            other => ResizeError::Io(other.into()),
        })
    }

    fn arm(&self, arm: Arm) {
        if self.rearm(arm) {
            // The event was also for threads that sleep.
            self.wake_others(0);
        }
    }

    fn take_event(&self) -> bool {
        self.take_events()
    }

    fn moderate(&self, kind: ModerationKind, moderation: Option<Moderation>) {
        let moderation = moderation.filter(|to| to.period_us > 0);
        let (count, period_us) = moderation.map_or((0, 0), |to| (to.count, to.period_us));
        let mut shown = self.0.counts.moderation.lock();
        // A device may refuse a moderation beyond its limits: it keeps the one that it has.
        let moderation = match self.0.cq.moderate(count, period_us) {
            Ok(()) => moderation,
            Err(_) => shown.moderation,
        };
        shown.changes += u64::from(shown.kind == kind && shown.moderation != moderation);
        (shown.kind, shown.moderation) = (kind, moderation);
    }

    fn has_notified(&self) -> bool {
        if self.take_events() {
            // The event was also for threads that sleep.
            self.wake_others(0);
        }
        self.0.notified.load(Ordering::Relaxed)
    }

    fn wait(&self, timeout: Duration) -> io::Result<Option<WorkCompletion>> {
        if let Some(wc) = self.poll() {
            self.wake_others(0);
            return Ok(Some(wc));
        }
        if timeout.is_zero() {
            self.arm(Arm::Next);
            return Ok(self.poll());
        }
        self.0.waiters.fetch_add(1, Ordering::SeqCst);
        let found = self.wait_until(Instant::now().checked_add(timeout));
        self.0.waiters.fetch_sub(1, Ordering::SeqCst);
        // The event may have been for all waiting threads, and so may the arming: they poll and arm again.
        self.wake_others(0);
        found
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.ready.as_fd()
    }
}

/// Converts a completion into the type of this crate.
fn completion(wc: &abi::Wc, with_inv: u32) -> WorkCompletion {
    let is_receive = wc.opcode & wc_opcode::RECV != 0;
    let has = |flag| is_receive && wc.wc_flags & flag != 0;
    WorkCompletion {
        wr_id: wc.wr_id,
        status: status(wc.status),
        opcode: match wc.opcode {
            wc_opcode::SEND => WcOpcode::Send,
            wc_opcode::RDMA_WRITE => WcOpcode::Write,
            wc_opcode::RDMA_READ => WcOpcode::Read,
            wc_opcode::COMP_SWAP => WcOpcode::CompareSwap,
            wc_opcode::FETCH_ADD => WcOpcode::FetchAdd,
            wc_opcode::BIND_MW => WcOpcode::BindWindow,
            wc_opcode::LOCAL_INV => WcOpcode::LocalInvalidate,
            wc_opcode::FLUSH => WcOpcode::Flush,
            wc_opcode::ATOMIC_WRITE => WcOpcode::AtomicWrite,
            wc_opcode::RECV_RDMA_WITH_IMM => WcOpcode::RecvRdmaWithImm,
            other if other & wc_opcode::RECV != 0 => WcOpcode::Recv,
            // Opcodes of requests that are never posted here.
            _ => WcOpcode::Send,
        },
        byte_len: wc.byte_len,
        imm: has(wc_flags::WITH_IMM).then(|| u32::from_be(wc.imm_data)),
        qpn: Qpn::new(wc.qp_num),
        invalidated: has(with_inv).then_some(RKey(wc.imm_data)),
        src_qpn: has(wc_flags::GRH).then(|| Qpn::new(wc.src_qp)),
    }
}

fn status(status: u32) -> Status {
    match status {
        wc_status::SUCCESS => Status::Success,
        wc_status::LOC_LEN_ERR => Status::LocalLength,
        wc_status::LOC_PROT_ERR | wc_status::LOC_ACCESS_ERR => Status::LocalProtection,
        wc_status::WR_FLUSH_ERR => Status::Flushed,
        wc_status::MW_BIND_ERR => Status::MemoryBind,
        wc_status::BAD_RESP_ERR => Status::BadResponse,
        wc_status::REM_INV_REQ_ERR => Status::RemoteInvalidRequest,
        wc_status::REM_ACCESS_ERR => Status::RemoteAccess,
        wc_status::REM_OP_ERR => Status::RemoteOperation,
        wc_status::RETRY_EXC_ERR => Status::RetryExceeded,
        wc_status::RNR_RETRY_EXC_ERR => Status::RnrRetryExceeded,
        wc_status::LOC_QP_OP_ERR => Status::LocalQpOperation,
        // Statuses of kinds of queue pair that are never made here, or the vendor's own.
        _ => Status::LocalQpOperation,
    }
}
