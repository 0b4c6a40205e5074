//! What the devices of this user's processes have, asked from outside: for tools that show it.
//!
//! [`devices`] finds the devices of a network namespace, and [`ask`] asks them, all at once. A device answers only processes of
//! its own user. Asking costs it little: it tells of a bounded number of queue pairs at a time and never waits.
//!
//! ```no_run
//! use rdmux_verbs::soft::resources::{ask, devices};
//! use std::time::Duration;
//!
//! for (device, answer) in ask(&devices(), Duration::from_secs(1)) {
//!     match answer {
//!         Ok(resources) => println!("{device}: {} queue pairs", resources.queue_pairs.len()),
//!         Err(error) => println!("{device}: {error}"),
//!     }
//! }
//! ```

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rdmux_rnic::{QpState, QpType, Qpn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::group::{self, SLOTS};
use super::shm::link::check_user;
use super::shm::message::Message;
use super::shm::report::{Carried, PAGE_BYTES_MAX, Page, QpReport};
use super::shm::why::Why;
use crate::device::Carrier;

/// Queue pairs that a device can have: its QPNs are those of one slot.
const QPS_MAX: usize = 1 << 16;

/// How often a device is asked anew that too many others ask.
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
    /// As `address/slot`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.slot)
    }
}

/// What a device has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Its process; `None` when that is in a PID namespace which this process does not see into.
    pub pid: Option<u32>,
    /// Queue pairs.
    pub qps: u32,
    /// Memory regions.
    pub mrs: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Each queue pair, in the order of their numbers. They come and go while they are told of.
    pub queue_pairs: Vec<QpResource>,
}

/// What is known of a queue pair from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpResource {
    /// Its number.
    pub qpn: Qpn,
    /// Transport service.
    pub qp_type: QpType,
    /// State.
    pub state: QpState,
    /// Its peer, once it has one: address and number.
    pub peer: Option<(IpAddr, Qpn)>,
    /// Path MTU in bytes.
    pub path_mtu: u32,
    /// What carries its packets; `None` while it has no peer, or not one.
    pub carrier: Option<Carrier>,
    /// What of its peer's memory it reaches without packets.
    pub direct: Direct,
}

/// What a queue pair reaches without packets: regions of a peer on the same host, by WRITE and READ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Direct {
    /// Regions that are mapped.
    pub mapped: u32,
    /// Regions that the kernel copies to and from (`process_vm_writev`).
    pub by_calls: u32,
    /// Why the last region that is reached by packets is not one of those.
    pub why_not: Option<String>,
}

/// Why a device did not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// There is no such device now.
    #[error("there is no such device")]
    NotThere,
    /// It belongs to a process of another user.
    #[error("it belongs to user {uid}")]
    OtherUser {
        /// The user.
        uid: u32,
    },
    /// It may belong to another user: this user namespace has numbers for some users alone, and shows the others as one.
    #[error("its user may be another one: this user namespace does not tell")]
    UnknownUser,
    /// It did not answer in time: its process is stopped, or gets no CPU.
    #[error("it does not answer")]
    NoAnswer {
        /// Its process, as in [`Resources::pid`].
        pid: Option<u32>,
    },
    /// It answered nonsense or nothing: it has just ended, or runs another version of rdmux.
    #[error("it has ended, or runs another version of rdmux")]
    Ended {
        /// Its process, as in [`Resources::pid`].
        pid: Option<u32>,
    },
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

/// The devices of this network namespace, those of other users included, by address and slot. Where `/proc` is not mounted they
/// cannot be listed: then these are the places of 127.0.0.1, most of which nobody has.
pub fn devices() -> Vec<DeviceAt> {
    let loopback = || {
        let address = IpAddr::from(Ipv4Addr::LOCALHOST);
        (1..SLOTS as u8).map(|slot| (address, slot)).collect()
    };
    let slots = group::slots_in_use().unwrap_or_else(loopback);
    slots
        .into_iter()
        .map(|(address, slot)| DeviceAt { address, slot })
        .collect()
}

/// Asks devices what they have, all at once, and waits for no answer longer than `timeout`. In the order of `devices`.
pub fn ask(devices: &[DeviceAt], timeout: Duration) -> Vec<(DeviceAt, Result<Resources, AskError>)> {
    let deadline = Instant::now() + timeout;
    let mut asked: Vec<Question> = devices.iter().copied().map(Question::new).collect();
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

/// A device that is asked.
struct Question {
    device: DeviceAt,
    socket: Option<OwnedFd>,
    /// What it has told so far.
    resources: Resources,
    /// The whole, or why there is none.
    answer: Option<Result<(), AskError>>,
}

impl Question {
    fn new(device: DeviceAt) -> Question {
        Question {
            device,
            socket: None,
            resources: Resources {
                pid: None,
                qps: 0,
                mrs: 0,
                cqs: 0,
                queue_pairs: Vec::new(),
            },
            answer: None,
        }
    }

    /// Whether it was not asked yet.
    fn is_new(&self) -> bool {
        self.socket.is_none() && self.answer.is_none()
    }

    /// Asks the first question, unless too many wait at the device's door.
    fn ask(&mut self) {
        let asked = match group::connect_slot(self.device.address, self.device.slot) {
            Ok(socket) => self.ask_by(socket),
            Err(Errno::AGAIN) => Ok(()),
            Err(Errno::CONNREFUSED) => Err(AskError::NotThere),
            Err(errno) => Err(AskError::Io(errno.into())),
        };
        self.answer = asked.err().map(Err);
    }

    fn ask_by(&mut self, socket: OwnedFd) -> Result<(), AskError> {
        let pid = check_user(&socket)?;
        self.resources.pid = u32::try_from(pid).ok().filter(|pid| *pid > 0);
        self.socket = Some(socket);
        self.ask_for_a_page()
    }

    /// Asks for the queue pairs behind those that were told of.
    fn ask_for_a_page(&self) -> Result<(), AskError> {
        let last = self.resources.queue_pairs.last();
        let after = last.map_or(0, |qp| qp.qpn.value());
        let question = Message::List { after }.encode();
        let pid = self.resources.pid;
        let socket = self.socket.as_ref().ok_or(AskError::NotThere)?;
        group::send_bytes(socket, &question, &[]).map_err(|_| AskError::Ended { pid })
    }

    /// Takes a page.
    fn hear(&mut self) {
        let mut buffer = vec![0; PAGE_BYTES_MAX];
        let socket = self.socket.as_ref();
        let page = match socket.map(|fd| group::receive_with_descriptors(fd, &mut buffer)) {
            Some(Err(Errno::AGAIN | Errno::INTR)) => return,
            Some(Ok((len, _))) => buffer.get(..len).and_then(Page::decode),
            _ => None,
        };
        self.answer = match page {
            Some(page) => self.take(page),
            None => Some(Err(AskError::Ended {
                pid: self.resources.pid,
            })),
        };
    }

    fn take(&mut self, page: Page) -> Option<Result<(), AskError>> {
        let resources = &mut self.resources;
        [resources.qps, resources.mrs, resources.cqs] = page.counts;
        let before = resources.queue_pairs.last().map_or(0, |qp| qp.qpn.value());
        let goes_on = page.qps.first().is_none_or(|qp| qp.qpn.value() > before);
        if !goes_on || resources.queue_pairs.len() + page.qps.len() > QPS_MAX {
            return Some(Err(AskError::Ended { pid: resources.pid }));
        }
        resources
            .queue_pairs
            .extend(page.qps.iter().map(QpResource::from));
        if page.more && !page.qps.is_empty() {
            return self.ask_for_a_page().err().map(Err);
        }
        Some(Ok(()))
    }

    fn end(self) -> (DeviceAt, Result<Resources, AskError>) {
        let pid = self.resources.pid;
        let answer = self.answer.unwrap_or(Err(AskError::NoAnswer { pid }));
        (self.device, answer.map(|()| self.resources))
    }
}

impl From<&QpReport> for QpResource {
    fn from(report: &QpReport) -> QpResource {
        QpResource {
            qpn: report.qpn,
            qp_type: report.qp_type,
            state: report.state,
            peer: report.peer,
            path_mtu: report.path_mtu,
            carrier: match report.carrier {
                Carried::Nowhere => None,
                Carried::Shared => Some(Carrier::SharedMemory),
                Carried::Udp(why) => Some(Carrier::Udp(why.to_string())),
            },
            direct: Direct {
                mapped: report.mapped.into(),
                by_calls: report.by_calls.into(),
                why_not: report.not_direct.map(|why| why.to_string()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use std::sync::Arc;

    use rdmux_rnic::{
        Access, Operation, Path, Psn, QpAttributes, RKey, SendFlags, SendRequest, SgeList, Target,
    };

    use super::*;
    use crate::device::{Device, QpOptions, QueuePair};
    use crate::memory::AnonymousMemory;

    const LONG: Duration = Duration::from_secs(20);

    fn at(device: &Device) -> DeviceAt {
        let address = device.address();
        let mine = |found: &DeviceAt| found.address == address;
        devices().into_iter().find(mine).expect("it is listed")
    }

    fn resources(device: &Device) -> Resources {
        let (_, answer) = ask(&[at(device)], LONG).remove(0);
        answer.expect("an answer")
    }

    fn raw_question(device: DeviceAt) -> OwnedFd {
        group::connect_slot(device.address, device.slot).unwrap()
    }

    /// Whether the engine ended the connection, after what it may have said before.
    fn is_ended(socket: &OwnedFd) -> bool {
        let deadline = Instant::now() + LONG;
        let mut buffer = vec![0; PAGE_BYTES_MAX];
        while Instant::now() < deadline {
            match group::receive_with_descriptors(socket, &mut buffer) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return true,
                Ok(_) => {}
                Err(_) => std::thread::yield_now(),
            }
        }
        false
    }

    /// A device with a queue pair of each kind, and many of one.
    fn populated(address: [u8; 4], many: usize) -> (Device, Vec<QueuePair>) {
        let device = Device::open(IpAddr::from(address)).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(16).unwrap();
        let kinds = [QpType::Uc, QpType::Ud, QpType::XrcSend];
        let kinds = kinds.into_iter().chain(std::iter::repeat_n(QpType::Rc, many));
        let make = |qp_type| {
            let options = QpOptions {
                qp_type,
                ..QpOptions::new(&cq)
            };
            pd.create_qp(&options).unwrap()
        };
        let qps = kinds.map(make).collect();
        (device, qps)
    }

    #[test]
    fn ask__tells_of_every_queue_pair_in_pages() {
        let (device, qps) = populated([127, 0, 6, 1], 600);
        let found = resources(&device);
        assert_eq!(found.pid, Some(std::process::id()));
        assert_eq!((found.qps, found.mrs, found.cqs), (603, 0, 1));
        let mut expected: Vec<_> = qps.iter().map(|qp| (qp.qpn().value(), qp.qp_type())).collect();
        expected.sort_unstable_by_key(|(qpn, _)| *qpn);
        let told: Vec<_> = found
            .queue_pairs
            .iter()
            .map(|qp| (qp.qpn.value(), qp.qp_type))
            .collect();
        assert_eq!(told, expected);
        for qp in &found.queue_pairs {
            assert_eq!((qp.state, qp.peer, &qp.carrier), (QpState::Reset, None, &None));
        }
    }

    #[test]
    fn ask__device_that_is_not_there() {
        let nobody = DeviceAt {
            address: IpAddr::from([127, 0, 6, 2]),
            slot: 1,
        };
        let (_, answer) = ask(&[nobody], LONG).remove(0);
        assert!(matches!(answer, Err(AskError::NotThere)), "{answer:?}");
    }

    #[test]
    fn ask__process_that_does_not_answer() {
        // Bound, listening, and never accepting, as a stopped process is.
        let silent = DeviceAt {
            address: IpAddr::from([127, 0, 6, 3]),
            slot: 7,
        };
        let _listener = group::listen_silently(silent.address, silent.slot);
        let (device, _qps) = populated([127, 0, 6, 4], 1);
        let since = Instant::now();
        let mut answers = ask(&[silent, at(&device)], Duration::from_millis(200));
        assert!(since.elapsed() < LONG);
        assert!(answers.remove(1).1.is_ok());
        let pid = Some(std::process::id());
        assert!(matches!(answers[0].1, Err(AskError::NoAnswer { pid: p }) if p == pid));
    }

    #[test]
    fn ask__what_is_reached_directly_and_why_not() {
        let server = Device::open(IpAddr::from([127, 0, 6, 5])).unwrap();
        let client = Device::open(IpAddr::from([127, 0, 6, 6])).unwrap();
        let [asking, asked] = [&client, &server].map(|device| {
            let cq = device.create_cq(16).unwrap();
            device
                .alloc_pd()
                .unwrap()
                .create_qp(&QpOptions::new(&cq))
                .unwrap()
        });
        bring_up(&asking, &asked);
        bring_up(&asked, &asking);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let shared = Arc::new(AnonymousMemory::shareable(4096).unwrap());
        let private = Arc::new(AnonymousMemory::new(4096).unwrap());
        let regions = [&shared, &private].map(|memory| {
            let memory = Arc::clone(memory);
            let iova = memory.address();
            asked.pd().reg_mr_all(memory, iova, access).unwrap()
        });
        let write = |va, rkey| {
            let request = SendRequest {
                wr_id: 1,
                operation: Operation::Write { va, rkey, imm: None },
                sges: SgeList::inline(b"something"),
                flags: SendFlags::SIGNALED,
                to: Target::Connected,
            };
            asking.post_send(request).unwrap();
        };
        let until = |enough: &dyn Fn(&QpResource) -> bool| {
            let deadline = Instant::now() + LONG;
            loop {
                let found = resources(&client).queue_pairs.remove(0);
                if enough(&found) {
                    return;
                }
                assert!(Instant::now() < deadline, "{found:?}");
            }
        };
        until(&|found| found.carrier == Some(Carrier::SharedMemory));
        write(regions[0].iova(), regions[0].rkey());
        until(&|found| found.direct.mapped == 1);
        write(regions[1].iova(), regions[1].rkey());
        // Where the system refuses the calls it says so.
        until(&|found| found.direct.by_calls == 1 || found.direct.why_not.is_some());
        let [shared_region, _private_region] = regions;
        drop(shared_region);
        until(&|found| found.direct.mapped == 0);
        write(0, RKey(0));
        until(&|found| found.direct.why_not.as_deref() == Some("not granted by the peer"));
    }

    /// To RTS, as the peer of another.
    fn bring_up(qp: &QueuePair, peer: &QueuePair) {
        let access = Access::REMOTE_WRITE;
        let init = QpAttributes {
            access: Some(access),
            ..QpAttributes::default()
        };
        let rtr = QpAttributes {
            path: Some(Path {
                src: qp.device().address(),
                dst: peer.device().address(),
                src_port: qp.device().source_port(peer.qpn()).unwrap(),
                traffic_class: 0,
            }),
            path_mtu: Some(1024),
            dest_qpn: Some(peer.qpn()),
            rq_psn: Some(Psn::new(0)),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(1),
            ..QpAttributes::default()
        };
        let rts = QpAttributes {
            sq_psn: Some(Psn::new(0)),
            timeout: Some(14),
            retry_count: Some(7),
            rnr_retry: Some(7),
            max_rd_atomic: Some(1),
            ..QpAttributes::default()
        };
        for (to, attributes) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
            qp.modify(to, &attributes).unwrap();
        }
    }

    #[test]
    fn ask__engine_that_is_asked_nonsense_goes_on() {
        let (device, _qps) = populated([127, 0, 6, 7], 300);
        let place = at(&device);
        for nonsense in [&b"nonsense"[..], &[], &[0; 4096], &Message::Welcome.encode()] {
            let socket = raw_question(place);
            let _ = group::send_bytes(&socket, nonsense, &[]);
            assert!(is_ended(&socket), "{nonsense:?}");
        }
        assert_eq!(resources(&device).qps, 303);
    }

    #[test]
    fn ask__who_does_not_read_is_dropped() {
        let (device, _qps) = populated([127, 0, 6, 8], 300);
        let place = at(&device);
        let deaf = raw_question(place);
        let question = Message::List { after: 0 }.encode();
        // Until the engine's side is full: then it ends the connection.
        let deadline = Instant::now() + LONG;
        loop {
            match group::send_bytes(&deaf, &question, &[]) {
                Ok(()) => {}
                Err(Errno::AGAIN) => std::thread::yield_now(),
                Err(_) => break,
            }
            assert!(Instant::now() < deadline);
        }
        // And those who never ask keep nobody out.
        let idle: Vec<_> = (0..200)
            .filter_map(|_| group::connect_slot(place.address, place.slot).ok())
            .collect();
        assert!(idle.len() >= 64);
        assert_eq!(resources(&device).qps, 303);
    }
}
