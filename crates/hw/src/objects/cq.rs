//! Completion queues and their channels.
#![allow(unsafe_code, reason = "objects of a C library, and calls of it")]

use std::ffi::c_int;
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdmux_verbs::abi;
use rustix::io::Errno;

use super::{Context, done, made, set_nonblocking};

/// Most completions that are taken by one call.
pub(crate) const POLL_MAX: usize = 16;

shared! { CompChannel Cq }

/// A completion channel.
#[derive(Debug)]
struct CompChannel {
    context: Arc<Context>,
    pub(super) pointer: NonNull<abi::CompChannel>,
}

impl CompChannel {
    fn new(context: &Arc<Context>) -> Result<CompChannel, Errno> {
        // SAFETY: the context is open, and held.
        let pointer = made(unsafe { (context.library.ibv_create_comp_channel)(context.pointer.as_ptr()) })?;
        let channel = CompChannel {
            context: context.clone(),
            pointer,
        };
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.pointer.as_ptr()).fd) }
    }
}

impl Drop for CompChannel {
    fn drop(&mut self) {
        // SAFETY: its completion queue holds it, and has ended before.
        unsafe { (self.context.library.ibv_destroy_comp_channel)(self.pointer.as_ptr()) };
    }
}

/// A completion queue with a channel of its own.
#[derive(Debug)]
pub(crate) struct Cq {
    pub(super) pointer: NonNull<abi::Cq>,
    poll: abi::PollCq,
    notify: abi::ReqNotifyCq,
    channel: CompChannel,
}

impl Cq {
    /// Makes a queue for `depth` completions, whose events carry `number`, with a completion vector.
    pub(crate) fn new(context: &Arc<Context>, depth: u32, number: u32, vector: u32) -> Result<Cq, Errno> {
        let (poll, notify) = context
            .ops()
            .poll_cq
            .zip(context.ops().req_notify_cq)
            .ok_or(Errno::OPNOTSUPP)?;
        let channel = CompChannel::new(context)?;
        let depth = c_int::try_from(depth.max(1)).map_err(|_| Errno::INVAL)?;
        let vector = c_int::try_from(vector).map_err(|_| Errno::INVAL)?;
        // SAFETY: context and channel live as long as the queue. Its own context is a number, which nobody takes for a pointer.
        let pointer = made(unsafe {
            (context.library.ibv_create_cq)(
                context.pointer.as_ptr(),
                depth,
                std::ptr::without_provenance_mut(number as usize),
                channel.pointer.as_ptr(),
                vector,
            )
        })?;
        Ok(Cq {
            pointer,
            poll,
            notify,
            channel,
        })
    }

    /// Takes completions; returns how many.
    pub(crate) fn poll(&self, into: &mut [abi::Wc; POLL_MAX], max: usize) -> usize {
        let max = max.min(POLL_MAX) as c_int;
        // SAFETY: there is room for as many completions as are asked for.
        let taken = unsafe { (self.poll)(self.pointer.as_ptr(), max, into.as_mut_ptr()) };
        // A queue that overran returns an error: it has no more completions.
        usize::try_from(taken).unwrap_or(0).min(POLL_MAX)
    }

    /// Makes room for `depth` completions.
    pub(crate) fn resize(&self, depth: u32) -> Result<(), Errno> {
        let depth = c_int::try_from(depth.max(1)).map_err(|_| Errno::INVAL)?;
        // SAFETY: the queue lives.
        done(unsafe { (self.channel.context.library.ibv_resize_cq)(self.pointer.as_ptr(), depth) })
    }

    /// Has an event wait for so many completions, or for so long after the first; zeros end that.
    ///
    /// # Errors
    /// `OPNOTSUPP` or another one if the library or the device does not moderate.
    pub(crate) fn moderate(&self, count: u16, period_us: u16) -> Result<(), Errno> {
        let context = &self.channel.context;
        let modify: Option<abi::ModifyCq> = context.extended(offset_of!(abi::VerbsContext, modify_cq));
        let modify = modify.ok_or(Errno::OPNOTSUPP)?;
        let mut attr = abi::ModifyCqAttr {
            attr_mask: abi::cq_ex::MODERATE,
            cq_count: count,
            cq_period: period_us,
        };
        // SAFETY: the queue lives, and the attributes are this function's.
        done(unsafe { modify(self.pointer.as_ptr(), &mut attr) })
    }

    /// Requests an event at the next completion.
    pub(crate) fn arm(&self, solicited_only: bool) {
        // SAFETY: the queue lives. It cannot fail but for what the arguments rule out.
        unsafe { (self.notify)(self.pointer.as_ptr(), solicited_only.into()) };
    }

    /// Returns a descriptor that is readable when there is an event.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    /// Takes and acknowledges all events. Returns how many there were.
    pub(crate) fn take_events(&self) -> u32 {
        let library = self.channel.context.library;
        let (mut cq, mut context) = (null_mut(), null_mut());
        let mut events = 0;
        // SAFETY: the channel lives, and its descriptor does not block. Events are of this queue, the only one on the channel.
        while unsafe { (library.ibv_get_cq_event)(self.channel.pointer.as_ptr(), &mut cq, &mut context) } == 0
        {
            events += 1;
        }
        if events > 0 {
            // SAFETY: so many events were taken by the calls above.
            unsafe { (library.ibv_ack_cq_events)(self.pointer.as_ptr(), events) };
        }
        events
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold it, so that none is left; all events that were taken are acknowledged, so that it does not wait.
        unsafe { (self.channel.context.library.ibv_destroy_cq)(self.pointer.as_ptr()) };
    }
}
