//! Faults that the faulting thread answers itself, in a handler of `SIGBUS` (userfaultfd with signals) or `SIGSEGV` (mprotect).
//!
//! The handler takes locks and may allocate. That is safe because such a fault is synchronous: it interrupts an instruction that touches a view,
//! and no code that holds one of these locks does that.
#![allow(unsafe_code, reason = "signal handlers")]

use std::ops::Range;
use std::ptr;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use crate::memory::userfault::{Delivery, Fault, Kind};
use crate::memory::{Access, PageState};
use crate::region::Pages;
use crate::session::Shared;

/// A region whose faults raise signals.
#[derive(Clone)]
struct Caught {
    addresses: Range<u64>,
    shared: Arc<Shared>,
    region: u32,
    pages: Pages,
}

static CAUGHT: RwLock<Vec<Caught>> = RwLock::new(Vec::new());

/// Handlers that were there before.
static BEFORE: OnceLock<[libc::sigaction; 2]> = OnceLock::new();

const SIGNALS: [libc::c_int; 2] = [libc::SIGBUS, libc::SIGSEGV];

/// `SEGV_ACCERR`: the page is mapped, without the right. A child of this process has no view: its touches are `SEGV_MAPERR`.
const ACCESS_ERROR: libc::c_int = 2;

/// Answers the faults of a region from now on, if they raise signals.
///
/// # Errors
/// The system refuses a handler.
pub(crate) fn catch(shared: Arc<Shared>, region: u32, pages: &Pages) -> std::io::Result<()> {
    if pages.delivery() != Delivery::Signal {
        return Ok(());
    }
    let mut caught = CAUGHT.write().unwrap_or_else(PoisonError::into_inner);
    caught.push(Caught {
        addresses: pages.addresses(),
        shared,
        region,
        pages: pages.clone(),
    });
    // Under the lock: of two threads the second would take this handler for the one before.
    install()
}

/// Ends that.
pub(crate) fn release(pages: &Pages) {
    let mut caught = CAUGHT.write().unwrap_or_else(PoisonError::into_inner);
    let start = pages.addresses().start;
    caught.retain(|it| it.addresses.start != start);
}

fn install() -> std::io::Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    // SAFETY: all fields of a sigaction may be zero.
    let mut before: [libc::sigaction; 2] = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = handle;
    action.sa_sigaction = handler as usize;
    // Without SA_ONSTACK: the stacks that std makes for handlers are too small. SA_NODEFER: a handler of the program's may touch a view.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
    for (signal, before) in SIGNALS.iter().zip(&mut before) {
        // SAFETY: both point to a sigaction, and the handler has the type that SA_SIGINFO asks for.
        if unsafe { libc::sigaction(*signal, &raw const action, before) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    let _ = BEFORE.set(before);
    Ok(())
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes a siginfo_t; of a signal that the kernel sent for a fault it has an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as u64) };
    let is_fault = match signal {
        libc::SIGSEGV => code == ACCESS_ERROR,
        _ => code > 0,
    };
    // SAFETY: the address of the thread's errno.
    let errno = unsafe { *libc::__errno_location() };
    let caught = is_fault.then(|| find(address)).flatten();
    // SAFETY: the system passes a ucontext_t with SA_SIGINFO.
    let access = unsafe { access_of(context) };
    let is_answered = caught.is_some_and(|caught| caught.answer(address, access));
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if !is_answered {
        // SAFETY: the arguments are those of this handler.
        unsafe { pass_on(signal, code > 0, info, context) };
    }
}

/// Returns the access that failed, where the processor tells.
///
/// # Safety
/// `context` points to a `ucontext_t` of a fault.
#[cfg(target_arch = "x86_64")]
unsafe fn access_of(context: *mut libc::c_void) -> Option<Access> {
    // SAFETY: the caller says so.
    let error = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_ERR as usize] };
    // Bit 1 of the page fault's error code (Intel SDM Vol 3, 4.7).
    Some(match error & 2 {
        0 => Access::Read,
        _ => Access::Write,
    })
}

/// Returns the access that failed, where the processor tells.
///
/// # Safety
/// `context` points to a `ucontext_t` of a fault.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn access_of(_context: *mut libc::c_void) -> Option<Access> {
    None
}

fn find(address: u64) -> Option<Caught> {
    let caught = CAUGHT.read().unwrap_or_else(PoisonError::into_inner);
    caught.iter().find(|it| it.addresses.contains(&address)).cloned()
}

impl Caught {
    /// Waits until the access is allowed. Returns false if it never is.
    fn answer(&self, address: u64, access: Option<Access>) -> bool {
        let unit = self.pages.geometry().unit_at(address - self.addresses.start);
        let view = self.pages.view();
        let access = access.unwrap_or_else(|| match self.pages.state(unit) {
            PageState::Shared => Access::Write,
            // A write faults once more.
            _ => Access::Read,
        });
        if !self.pages.allow(unit, access) {
            let wanted = unit..unit + 1;
            return self
                .shared
                .acquire(self.region, &self.pages, wanted, access)
                .is_ok();
        }
        // A batch has taken this page's rights together with those of its neighbours.
        let fault = Fault {
            address: address - address % rustix::param::page_size() as u64,
            access,
            kind: Kind::Absent,
        };
        // The page may have been taken away again: then the thread faults once more.
        view.resolve(fault).is_ok()
    }
}

/// Calls the handler that was there before, or ends the process as the system does without a handler.
///
/// # Safety
/// The arguments are those of a signal handler.
unsafe fn pass_on(
    signal: libc::c_int,
    is_fault: bool,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let before = BEFORE.get().map(|before| match signal {
        libc::SIGBUS => before[0],
        _ => before[1],
    });
    match before {
        Some(before) if before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN => {
            if before.sa_flags & libc::SA_SIGINFO != 0 {
                // SAFETY: with SA_SIGINFO the action is a function of these arguments.
                let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    unsafe { std::mem::transmute(before.sa_sigaction) };
                handler(signal, info, context);
            } else {
                // SAFETY: without SA_SIGINFO the action is a function of the signal.
                let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(before.sa_sigaction) };
                handler(signal);
            }
        }
        Some(before) if before.sa_sigaction == libc::SIG_IGN && !is_fault => {}
        _ => {
            // A fault comes again, and ends the process.
            // SAFETY: all fields of a sigaction may be zero, which is the default action.
            let default: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: it points to a sigaction.
            unsafe { libc::sigaction(signal, &raw const default, ptr::null_mut()) };
            if !is_fault {
                // SAFETY: the number of a signal.
                unsafe { libc::raise(signal) };
            }
        }
    }
}
