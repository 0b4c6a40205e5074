//! Naps: sleep in a futex until a peer puts a packet into its ring, or this process wakes the sleeper.
//!
//! A nap costs one system call, and its end one of the peer's; a sleep on descriptors that ends by a doorbell costs three and one, and each of
//! them takes longer. But a thread that naps notices no descriptor, so another thread has to watch the sockets meanwhile.
//!
//! A peer cannot make this process wait by a nap. To end a nap is a call that the kernel carries out at once, whatever the other side does
//! with the word; and a napper whose peers never wake it wakes by its timeout, or by its own process ([`Nap`]).

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rdmux_verbs::provider::{NAP_ASLEEP, Nap};
use rustix::io::Errno;
use rustix::thread::futex::{self, Timespec, Wait, WaitFlags, WaitPtr, WaitvFlags};
use rustix::time::{ClockId, clock_gettime};

use crate::ring::NAPPING;
use crate::segment::{Segment, Side};

/// Most words of peers on which one thread naps; the kernel's limit is 128 words.
pub const WORDS_MAX: usize = 16;

/// The word of a link on which a thread naps.
#[derive(Debug)]
pub struct NapWord {
    pub(crate) segment: Arc<Segment>,
    /// The end that puts packets into the ring.
    pub(crate) from: Side,
}

/// The system has no call to nap on several words (Linux before 5.16), or refuses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the system has no futex_waitv")]
pub struct Unsupported;

/// Naps until a peer ends it on one of the words, of which [`WORDS_MAX`] count, somebody wakes `nap`, or the time is over. May end without
/// cause. The caller has called [`Nap::begin`] and [`crate::Channel::prepare_nap`], and looked for everything that others may have left for it
/// since.
///
/// # Errors
/// The system does not support it.
pub fn wait(nap: &Nap, words: &[NapWord], timeout: Option<Duration>) -> Result<(), Unsupported> {
    let mut waits = [Wait::new(); 1 + WORDS_MAX];
    waits[0] = entry(nap.word(), NAP_ASLEEP, WaitFlags::PRIVATE);
    let used = 1 + words.len().min(WORDS_MAX);
    for (wait, word) in waits[1..].iter_mut().zip(words) {
        *wait = entry(word.segment.napping(word.from), NAPPING, WaitFlags::empty());
    }
    // A call that waits by several words takes a time, not a duration.
    let until = timeout.map(|timeout| {
        let now = clock_gettime(ClockId::Monotonic);
        let ns = now.tv_nsec as u64 + u64::from(timeout.subsec_nanos());
        let seconds = timeout.as_secs().min(i64::MAX as u64 / 2) + ns / 1_000_000_000;
        Timespec {
            tv_sec: now.tv_sec.saturating_add(seconds as i64),
            tv_nsec: (ns % 1_000_000_000) as _,
        }
    });
    match futex::waitv(
        &waits[..used],
        WaitvFlags::empty(),
        until.as_ref(),
        ClockId::Monotonic,
    ) {
        // A word that changed before the nap began counts as a wake-up.
        Ok(_) | Err(Errno::AGAIN | Errno::TIMEDOUT | Errno::INTR) => Ok(()),
        Err(_) => Err(Unsupported),
    }
}

fn entry(word: &AtomicU32, value: u32, flags: WaitFlags) -> Wait {
    let mut wait = Wait::new();
    wait.val = u64::from(value);
    wait.uaddr = WaitPtr::new(word.as_ptr().cast());
    wait.flags = WaitFlags::SIZE_U32 | flags;
    wait
}

/// Ends the nap of a peer, whose word the ring has set to 0.
pub(crate) fn end(word: &AtomicU32) {
    // One thread at a time naps. A peer that has more of them wait there deceives itself.
    let _ = futex::wake(word, futex::Flags::empty(), 1);
}

/// Returns whether the system supports naps.
pub fn is_supported() -> bool {
    // A word of another value: the call ends at once where it exists.
    let nap = Nap::default();
    wait(&nap, &[], Some(Duration::ZERO)).is_ok()
}

#[cfg(test)]
mod tests;
