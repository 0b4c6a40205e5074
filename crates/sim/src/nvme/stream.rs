//! Byte streams between a host and the target, which deliver in pieces, stall, and are cut at any byte.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::SocketAddr;

use super::{MS, SLACK_NS};
use crate::dice::Dice;

/// A connection, by its number.
pub(super) type LinkId = u64;

/// Direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    Target,
    Host,
}

/// The end of a stream, as its receiver learns of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Eof {
    /// The peer has closed the connection.
    Closed,
    /// The connection has failed.
    Broken,
}

/// One direction of a connection.
#[derive(Debug)]
pub(super) struct Pipe {
    bytes: VecDeque<u8>,
    capacity: usize,
    piece_max: usize,
    /// The end, once the sender has closed it or it was cut, and the time at which the receiver learns of it at the latest.
    end: Option<(Eof, u64)>,
    /// Bytes that are sent do not arrive.
    pub(super) is_cut: bool,
    /// The receiver takes no more.
    pub(super) is_over: bool,
    pub(super) is_scheduled: bool,
    pub(super) stalled_until: u64,
}

impl Pipe {
    fn new(dice: &mut Dice) -> Pipe {
        Pipe {
            bytes: VecDeque::new(),
            capacity: dice.pick(&[300, 4 << 10, 64 << 10, 1 << 20]),
            piece_max: dice.pick(&[90, 700, 5000, 64 << 10, 64 << 10]),
            end: None,
            is_cut: false,
            is_over: false,
            is_scheduled: false,
            stalled_until: 0,
        }
    }

    /// Takes bytes as far as there is room, and returns how many.
    pub(super) fn send(&mut self, slices: &[IoSlice<'_>]) -> usize {
        let mut taken = 0;
        for slice in slices {
            let part = slice
                .len()
                .min(self.capacity - self.bytes.len().min(self.capacity));
            // A cut is not noticed at once: the sender's own buffers take what comes.
            if !self.is_cut && !self.is_over {
                self.bytes.extend(&slice[..part]);
            }
            taken += part;
            if part < slice.len() {
                break;
            }
        }
        taken
    }

    /// Moves the next piece out.
    pub(super) fn receive(&mut self, space: &mut [u8], dice: &mut Dice) -> usize {
        let most = self.bytes.len().min(space.len()).min(self.piece_max) as u64;
        if most == 0 {
            return 0;
        }
        let piece = match dice.one_in(3) {
            true => dice.log_uniform(most),
            false => most,
        };
        for (to, from) in space.iter_mut().zip(self.bytes.drain(..piece as usize)) {
            *to = from;
        }
        piece as usize
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the end, if its receiver learns of it now.
    pub(super) fn end(&self, now: u64) -> Option<Eof> {
        let (eof, latest) = self.end?;
        (self.bytes.is_empty() || latest <= now).then_some(eof)
    }

    /// Returns true if it has something for its receiver, now or later.
    pub(super) fn has_news(&self) -> bool {
        !self.is_over && (!self.bytes.is_empty() || self.end.is_some())
    }

    /// The sender closes it.
    pub(super) fn close(&mut self, now: u64) {
        if self.end.is_none() && !self.is_cut {
            self.end = Some((Eof::Closed, now + SLACK_NS));
        }
    }

    /// It is cut at any byte. `learns` says whether the receiver learns of it.
    pub(super) fn cut(&mut self, learns: bool, now: u64, dice: &mut Dice) {
        self.is_cut = true;
        let kept = dice.below(self.bytes.len() as u64 + 1) as usize;
        self.bytes.truncate(kept);
        if learns {
            self.end = Some((Eof::Broken, now + SLACK_NS));
        }
    }

    /// Loses the bytes that are on their way.
    pub(super) fn drop_bytes(&mut self) {
        self.bytes.clear();
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) host: usize,
    /// The controller's admin queue; its own id if it is one.
    pub(super) admin: LinkId,
    /// Life of the target to which it leads.
    pub(super) life: u64,
    /// Address at which the host reaches the target.
    pub(super) local: SocketAddr,
    pub(super) to_target: Pipe,
    pub(super) to_host: Pipe,
    latency_ns: u64,
}

impl Link {
    pub(super) fn new(host: usize, admin: LinkId, life: u64, local: SocketAddr, dice: &mut Dice) -> Link {
        Link {
            host,
            admin,
            life,
            local,
            to_target: Pipe::new(dice),
            to_host: Pipe::new(dice),
            latency_ns: dice.pick(&[20_000, 200_000, 2 * MS]),
        }
    }

    pub(super) fn pipe(&mut self, to: Side) -> &mut Pipe {
        match to {
            Side::Target => &mut self.to_target,
            Side::Host => &mut self.to_host,
        }
    }

    pub(super) fn delay(&self, dice: &mut Dice) -> u64 {
        self.latency_ns / 2 + dice.below(self.latency_ns)
    }
}
