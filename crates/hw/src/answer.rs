//! Answers queries for devices that have no engine to do so: those of RNICs. A thread sleeps until a query arrives.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::thread::{self, JoinHandle};

use rdmux_verbs::provider::Why;
use rdmux_verbs::provider::seqpacket::{receive_with_descriptors, send_bytes};
use rdmux_verbs::provider::user::{ROOT, check_user};
use rdmux_verbs::resources::places::bind_rnic_slot;
use rdmux_verbs::resources::report::{
    Answer, Page, QUESTION_BYTES_MAX, Question, RECORDS_MAX, Record, Setting,
};
use rdmux_verbs::resources::{Item, Object};
use rdmux_verbs::thread::spawn;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, listen};

/// Largest number of clients at a time; for one more, the oldest connection is closed.
const OPEN_MAX: usize = 16;

/// Time after which the thread tries again to accept a client, when the process had no descriptor left for it.
const PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Objects of a kind that a device has: at most [`RECORDS_MAX`], those with the lowest numbers from a given number on. Counters, whose
/// numbers are their places, are all included.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) items: Vec<Item>,
    /// Set when further objects follow these.
    pub(crate) more: bool,
}

/// Description of a device, for those who ask.
pub(crate) trait Asked: Send + 'static {
    /// Returns its objects of a kind, from a number on.
    fn items(&self, object: Object, from: u64) -> Told;

    /// Changes it.
    fn set(&self, setting: Setting) -> Answer;
}

/// Answers queries until it is dropped.
#[derive(Debug)]
pub(crate) struct Answering {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Answering {
    /// Begins to answer for a device of an address.
    pub(crate) fn begin(address: IpAddr, asked: impl Asked) -> io::Result<Answering> {
        let listener = bind_rnic_slot(address)?;
        listen(&listener, OPEN_MAX as i32)?;
        let stop = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let stopped = stop.try_clone()?;
        let thread = spawn("rdmux-res", move || run(&listener, &stopped, &asked))?;
        Ok(Answering {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        // The thread itself is the last to hold the device, if the device ends while the thread answers a query.
        let thread = self.thread.take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != thread::current().id()) {
            let _ = thread.join();
        }
    }
}

fn run(listener: &OwnedFd, stop: &OwnedFd, asked: &impl Asked) {
    let mut open: Vec<OwnedFd> = Vec::new();
    let mut is_full = false;
    loop {
        let knocks = if is_full {
            PollFlags::empty()
        } else {
            PollFlags::IN
        };
        let mut fds = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(listener, knocks)];
        fds.extend(open.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
        match poll(&mut fds, is_full.then_some(&PAUSE)) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return,
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready.first() == Some(&true) {
            return;
        }
        let mut asks = ready.iter().skip(2);
        open.retain(|socket| asks.next() != Some(&true) || answer(socket, asked).is_some());
        is_full = false;
        if ready.get(1) != Some(&true) {
            continue;
        }
        match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            // Processes of other users get no answer, except root's.
            Ok(socket) if matches!(check_user(&socket), Ok(_) | Err(Why::OtherUser(ROOT))) => {
                if open.len() == OPEN_MAX {
                    open.remove(0);
                }
                open.push(socket);
            }
            Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            // The client still waits, so the next poll of the listener would return at once.
            Err(_) => is_full = true,
        }
    }
}

/// Answers one query; returns `None` when the connection is to be closed.
fn answer(socket: &OwnedFd, asked: &impl Asked) -> Option<()> {
    let mut buffer = [0; QUESTION_BYTES_MAX];
    let packet = match receive_with_descriptors(socket, &mut buffer) {
        Err(Errno::AGAIN | Errno::INTR) => return Some(()),
        Err(_) | Ok((0, _)) => return None,
        Ok((len, _)) => buffer.get(..len)?,
    };
    let answer = match Setting::decode(packet) {
        Some(setting) => asked.set(setting).encode(),
        None => {
            let Question { object, from } = Question::decode(packet)?;
            page(object, from, asked.items(object, from)).encode()
        }
    };
    // A client that does not read gets no further answers.
    send_bytes(socket, &answer, &[]).ok()
}

/// Returns the objects from a number on, in the order of their numbers, as many as a page holds.
fn page(object: Object, from: u64, told: Told) -> Page {
    let record = |(place, item): (usize, &Item)| {
        let mut record = item.record()?;
        if object == Object::Counter {
            record.number = place as u64;
        }
        (record.number >= from).then_some(record)
    };
    let mut records: Vec<Record> = told.items.iter().enumerate().filter_map(record).collect();
    records.sort_by_key(|record| record.number);
    records.dedup_by_key(|record| record.number);
    let more = told.more || records.len() > RECORDS_MAX;
    records.truncate(RECORDS_MAX);
    Page {
        object,
        more,
        records,
    }
}
