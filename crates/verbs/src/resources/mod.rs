//! Queries for the objects of the devices in a network namespace, from outside of their processes: for tools that show them.
//!
//! [`devices`] finds the devices, and [`ask`] asks them for objects of one kind, all at once. A device answers only processes of its own
//! user, and of root. A query costs the device little: it reports a bounded number of objects at a time and never waits.
//!
//! The modules are for providers, whose devices answer: [`places`] says where tools find them, and [`report`] what they answer.
//!
//! ```no_run
//! use rdmux_verbs::resources::{Object, ask, devices};
//! use std::time::Duration;
//!
//! for (device, answer) in ask(&devices(), Object::Qp, Duration::from_secs(1)) {
//!     match answer {
//!         Ok(told) => println!("{device}: {} queue pairs", told.items.len()),
//!         Err(error) => println!("{device}: {error}"),
//!     }
//! }
//! ```

mod items;
pub mod places;
pub mod report;

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

pub use self::items::{CounterResource, Counts, DeviceResource, Direct, Item, QpResource};
pub use self::report::{Object, Setting};

use self::places::{SLOTS, connect_slot, is_rnic_slot, slots_in_use};
use self::report::{Answer, PAGE_BYTES_MAX, Page};
use crate::interface::{interface_name, interface_of, local_addresses};
use crate::provider::seqpacket::{receive_with_descriptors, send_bytes};
use crate::provider::user::{ROOT, check_user, peer_credentials};
use crate::why::Why;

/// Largest number of objects of a kind that a device can have: regions and windows are the most.
const ITEMS_MAX: usize = 1 << 20;

/// Time between two attempts to connect to a device whose backlog is full.
const KNOCK_AGAIN: Duration = Duration::from_millis(5);

/// A device of some process: a place on port 4791 of a local address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceAt {
    /// The local address.
    pub address: IpAddr,
    /// The top byte of its QPNs; each process of the address has its own.
    pub slot: u8,
}

impl fmt::Display for DeviceAt {
    /// Writes `address/slot`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.slot)
    }
}

impl FromStr for DeviceAt {
    type Err = BadName;

    fn from_str(text: &str) -> Result<DeviceAt, BadName> {
        let parts = text.split_once('/').and_then(|(address, slot)| {
            Some(DeviceAt {
                address: address.parse().ok()?,
                slot: slot.parse().ok().filter(is_slot)?,
            })
        });
        parts.ok_or_else(|| BadName(text.to_owned()))
    }
}

/// A text that names no device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device: give ADDRESS/SLOT, as `rdmux dev show` prints it")]
pub struct BadName(String);

/// The objects of a kind that a device has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// Its process; `None` when that is in a PID namespace which this process does not see into.
    pub pid: Option<u32>,
    /// Its user: that of this process, unless this process is root's.
    pub uid: u32,
    /// All objects, in the order of their numbers. Objects may come and go while the device reports them.
    pub items: Vec<Item>,
}

/// Reason why a device did not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// There is no such device at the moment.
    #[error("there is no such device")]
    NotThere,
    /// It belongs to a process of another user.
    #[error("it belongs to user {uid}")]
    OtherUser {
        /// The user.
        uid: u32,
    },
    /// It may belong to another user: this user namespace has numbers for some users only, and shows the others as one.
    #[error("its user is unknown in this user namespace and may be another one")]
    UnknownUser,
    /// It did not answer in time: its process is stopped, or gets no CPU.
    #[error("it does not answer")]
    NoAnswer {
        /// Its process, as in [`Told::pid`].
        pid: Option<u32>,
    },
    /// It answered nonsense or nothing: it has just ended, or runs another version of rdmux.
    #[error("it has ended, or runs another version of rdmux")]
    Ended {
        /// Its process, as in [`Told::pid`].
        pid: Option<u32>,
    },
    /// It does not have what is to be set.
    #[error("it does not moderate the events of completion queues")]
    NotOffered,
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Why> for AskError {
    fn from(why: Why) -> AskError {
        match why {
            Why::OtherUser(uid) => AskError::OtherUser { uid },
            Why::UnknownUser => AskError::UnknownUser,
            Why::System(errno) => AskError::Io(errno.into()),
            _ => AskError::NotThere,
        }
    }
}

/// Returns the soft devices of this network namespace, those of other users included, by address and slot. Without a mounted `/proc` they
/// cannot be listed: then the result is all slots of 127.0.0.1, most of which have no device.
pub fn devices() -> Vec<DeviceAt> {
    let loopback = || {
        let address = IpAddr::from(Ipv4Addr::LOCALHOST);
        (1..SLOTS as u8).map(|slot| (address, slot)).collect()
    };
    let slots = slots_in_use().unwrap_or_else(loopback);
    let slots = slots.into_iter();
    slots
        .map(|(address, slot)| DeviceAt { address, slot })
        .filter(|device| !device.is_rnic())
        .collect()
}

/// Returns the node GUID of the devices of a local address: an EUI-64 of local scope, made from the address, so that it is the same in
/// every process and after every start, as an RNIC's is.
///
/// The GUID in CM messages is another one, different for each opening: see [`rdmux_rnic::Config::guid`].
pub fn node_guid(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            u64::from_be_bytes([0x02, 0, 0, 0xff, a ^ 0xfe, b, c, d])
        }
        IpAddr::V6(address) => {
            let [.., e, f, g, h] = address.segments();
            let low = [e, f, g, h]
                .into_iter()
                .fold(0, |low, part| low << 16 | u64::from(part));
            low | 0x02 << 56
        }
    }
}

/// Returns the devices of provider `hw` that processes of this network namespace have open, those of other users included, by address and
/// slot. [`ask`] works for them too; they report no connections and no shared receive queues.
pub fn rnics() -> Vec<DeviceAt> {
    let slots = slots_in_use().unwrap_or_default().into_iter();
    slots
        .map(|(address, slot)| DeviceAt { address, slot })
        .filter(|device| device.is_rnic())
        .collect()
}

fn is_slot(slot: &u8) -> bool {
    (1..SLOTS as u8).contains(slot) || is_rnic_slot(*slot)
}

impl DeviceAt {
    /// Returns whether it is a device of provider `hw`.
    pub fn is_rnic(&self) -> bool {
        is_rnic_slot(self.slot)
    }
}

/// Returns name and index of the network interface that has a local address.
pub fn netdev_of(address: IpAddr) -> Option<(String, u32)> {
    let index = interface_of(address).ok()?.index;
    Some((interface_name(index)?, index))
}

/// Returns the local addresses that programs see devices for: those of a list in the format of `RDMUX_DEVICES`, in its order, else those of
/// all interfaces that are up, loopback last.
///
/// # Errors
/// The word of the list that is no address.
pub fn visible_addresses(list: Option<&str>) -> Result<Vec<IpAddr>, String> {
    let Some(list) = list else {
        return Ok(local_addresses().unwrap_or_else(|_| vec![Ipv4Addr::LOCALHOST.into()]));
    };
    let words = list.split([',', ' ']).filter(|word| !word.is_empty());
    words
        .map(|word| word.parse().map_err(|_| word.to_owned()))
        .collect()
}

/// Asks devices for their objects of a kind, all at once, and waits for no answer longer than `timeout`. The answers are in the order of
/// `devices`.
pub fn ask(
    devices: &[DeviceAt],
    object: Object,
    timeout: Duration,
) -> Vec<(DeviceAt, Result<Told, AskError>)> {
    let deadline = Instant::now() + timeout;
    let new = |device: &DeviceAt| Question::new(*device, object);
    let mut asked: Vec<Question> = devices.iter().map(new).collect();
    loop {
        for question in asked.iter_mut().filter(|question| question.is_new()) {
            question.ask();
        }
        let open = asked.iter_mut().filter(|question| question.answer.is_none());
        let (mut open, at_a_door): (Vec<_>, Vec<_>) = open.partition(|question| question.socket.is_some());
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || (open.is_empty() && at_a_door.is_empty()) {
            break;
        }
        let sockets = open.iter().filter_map(|question| question.socket.as_ref());
        let mut fds: Vec<_> = sockets.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let wait = if at_a_door.is_empty() {
            left
        } else {
            left.min(KNOCK_AGAIN)
        };
        let wait = Timespec::try_from(wait).ok();
        let polled = poll(&mut fds, wait.as_ref());
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if polled.is_err_and(|errno| errno != Errno::INTR) {
            break;
        }
        for (question, ready) in open.iter_mut().zip(ready) {
            if ready {
                question.hear();
            }
        }
    }
    asked.into_iter().map(Question::end).collect()
}

/// Changes a device of this user, or of any user for root, and waits for its answer no longer than `timeout`. All engines of the device heed
/// it. A completion queue does when its handler waits the next time.
///
/// # Errors
/// [`AskError::NotOffered`] if the device does not have what is to be set.
pub fn set(device: DeviceAt, setting: Setting, timeout: Duration) -> Result<(), AskError> {
    let deadline = Instant::now() + timeout;
    let left = || deadline.saturating_duration_since(Instant::now());
    let socket = loop {
        match connect_slot(device.address, device.slot) {
            Ok(socket) => break socket,
            Err(Errno::AGAIN) if left().is_zero() => return Err(AskError::NoAnswer { pid: None }),
            // No event tells that a Unix socket's queue has room again: only time passes.
            Err(Errno::AGAIN) => std::thread::sleep(KNOCK_AGAIN),
            Err(Errno::CONNREFUSED) => return Err(AskError::NotThere),
            Err(errno) => return Err(AskError::Io(errno.into())),
        }
    };
    let (_, pid) = owner(&socket)?;
    let ended = || AskError::Ended { pid };
    send_bytes(&socket, &setting.encode(), &[]).map_err(|_| ended())?;
    loop {
        let wait = Timespec::try_from(left()).ok();
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], wait.as_ref()) {
            Ok(0) => return Err(AskError::NoAnswer { pid }),
            Err(errno) if errno != Errno::INTR => return Err(AskError::Io(errno.into())),
            _ => {}
        }
        let mut buffer = [0; 8];
        let answer = match receive_with_descriptors(&socket, &mut buffer) {
            Err(Errno::AGAIN | Errno::INTR) => continue,
            Ok((len, _)) => buffer.get(..len).and_then(Answer::decode),
            Err(_) => None,
        };
        return match answer {
            Some(Answer::Done) => Ok(()),
            Some(Answer::NotOffered) => Err(AskError::NotOffered),
            None => Err(ended()),
        };
    }
}

/// Returns the user and the process at the other end, if this process may ask it.
fn owner(socket: &OwnedFd) -> Result<(u32, Option<u32>), AskError> {
    let (uid, pid) = peer_credentials(socket)?;
    match check_user(socket) {
        // Root may query the devices of all users, and does not trust their answers.
        Err(Why::OtherUser(_)) if rustix::process::geteuid().as_raw() == ROOT => {}
        checked => drop(checked?),
    }
    Ok((uid, u32::try_from(pid).ok().filter(|pid| *pid > 0)))
}

/// A query to a device.
struct Question {
    device: DeviceAt,
    object: Object,
    socket: Option<OwnedFd>,
    /// Objects that it has reported so far.
    told: Told,
    /// Number from which the next page starts.
    from: u64,
    /// Set when the query is over: success, or the reason for failure.
    answer: Option<Result<(), AskError>>,
}

impl Question {
    fn new(device: DeviceAt, object: Object) -> Question {
        Question {
            device,
            object,
            socket: None,
            told: Told {
                pid: None,
                uid: 0,
                items: Vec::new(),
            },
            from: 0,
            answer: None,
        }
    }

    /// Returns whether the query was not sent yet.
    fn is_new(&self) -> bool {
        self.socket.is_none() && self.answer.is_none()
    }

    /// Connects and asks for the first page, unless the device's backlog is full.
    fn ask(&mut self) {
        let asked = match connect_slot(self.device.address, self.device.slot) {
            Ok(socket) => self.ask_by(socket),
            Err(Errno::AGAIN) => Ok(()),
            Err(Errno::CONNREFUSED) => Err(AskError::NotThere),
            Err(errno) => Err(AskError::Io(errno.into())),
        };
        self.answer = asked.err().map(Err);
    }

    fn ask_by(&mut self, socket: OwnedFd) -> Result<(), AskError> {
        (self.told.uid, self.told.pid) = owner(&socket)?;
        self.socket = Some(socket);
        self.ask_for_a_page()
    }

    /// Asks for the objects that follow those received.
    fn ask_for_a_page(&self) -> Result<(), AskError> {
        let (object, from) = (self.object, self.from);
        let question = report::Question { object, from }.encode();
        let pid = self.told.pid;
        let socket = self.socket.as_ref().ok_or(AskError::NotThere)?;
        send_bytes(socket, &question, &[]).map_err(|_| AskError::Ended { pid })
    }

    /// Receives a page.
    fn hear(&mut self) {
        let mut buffer = vec![0; PAGE_BYTES_MAX];
        let socket = self.socket.as_ref();
        let page = match socket.map(|fd| receive_with_descriptors(fd, &mut buffer)) {
            Some(Err(Errno::AGAIN | Errno::INTR)) => return,
            Some(Ok((len, _))) => buffer.get(..len).and_then(Page::decode),
            _ => None,
        };
        self.answer = match page {
            Some(page) => self.take(page),
            None => Some(Err(AskError::Ended { pid: self.told.pid })),
        };
    }

    fn take(&mut self, page: Page) -> Option<Result<(), AskError>> {
        let ended = Some(Err(AskError::Ended { pid: self.told.pid }));
        let goes_on = page
            .records
            .first()
            .is_none_or(|record| record.number >= self.from);
        let room = ITEMS_MAX - self.told.items.len();
        if !goes_on || page.object != self.object || page.records.len() > room {
            return ended;
        }
        for record in &page.records {
            match Item::parse(self.object, record) {
                Some(item) => self.told.items.push(item),
                None => return ended,
            }
        }
        if !page.more {
            return Some(Ok(()));
        }
        // A page that is empty, or ends with the last number, cannot have a successor.
        let Some(next) = page.records.last().and_then(|last| last.number.checked_add(1)) else {
            return ended;
        };
        self.from = next;
        self.ask_for_a_page().err().map(Err)
    }

    fn end(self) -> (DeviceAt, Result<Told, AskError>) {
        let pid = self.told.pid;
        let answer = self.answer.unwrap_or(Err(AskError::NoAnswer { pid }));
        (self.device, answer.map(|()| self.told))
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use super::*;

    #[test]
    fn node_guid__is_of_the_address() {
        let guid = |text: &str| node_guid(text.parse().unwrap());
        assert_eq!(guid("127.0.0.1"), 0x0200_00ff_8100_0001);
        assert_eq!(guid("2001:db8::a:b:c:d"), 0x020a_000b_000c_000d);
    }

    #[test]
    fn device_at__as_it_is_printed() {
        for device in ["127.0.0.1/3", "fd00::1/127"] {
            let parsed: DeviceAt = device.parse().unwrap();
            assert_eq!(parsed.to_string(), device);
        }
        for nonsense in [
            "",
            "127.0.0.1",
            "127.0.0.1/",
            "127.0.0.1/0",
            "127.0.0.1/256",
            "eth0/1",
        ] {
            let refused = nonsense.parse::<DeviceAt>().unwrap_err();
            assert!(refused.to_string().contains("rdmux dev show"), "{refused}");
        }
    }

    #[test]
    fn ask__device_that_is_not_there() {
        let nobody = DeviceAt {
            address: IpAddr::from([127, 0, 6, 2]),
            slot: 1,
        };
        let (_, answer) = ask(&[nobody], Object::Qp, Duration::from_secs(60)).remove(0);
        assert!(matches!(answer, Err(AskError::NotThere)), "{answer:?}");
    }

    #[test]
    fn take__more_behind_nothing_is_no_whole_list() {
        let device = "127.0.0.1/1".parse().unwrap();
        let page = |more| Page {
            object: Object::Qp,
            more,
            records: Vec::new(),
        };
        let take = |more| Question::new(device, Object::Qp).take(page(more));
        assert!(matches!(take(false), Some(Ok(()))));
        assert!(matches!(take(true), Some(Err(AskError::Ended { .. }))));
    }
}
