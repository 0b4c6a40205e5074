//! The descriptors of a service: sockets, timers, an io_uring. They are in an epoll set, so that a sleep waits for one descriptor, however
//! many the service has.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{Timespec, epoll};

/// At most so many descriptors are taken from the set at a time.
pub(crate) const BATCH: usize = 64;

/// A descriptor of the service. Numbers begin at 1 and are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DescriptorId(pub u64);

/// Conditions of a descriptor that are reported. A hang-up and an error count as both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Interest {
    /// Reading would not block.
    pub readable: bool,
    /// Writing would not block.
    pub writable: bool,
}

impl Interest {
    /// Readable alone.
    pub const READABLE: Interest = Interest {
        readable: true,
        writable: false,
    };
    /// Readable and writable.
    pub const BOTH: Interest = Interest {
        readable: true,
        writable: true,
    };

    fn flags(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, self.readable);
        flags.set(epoll::EventFlags::OUT, self.writable);
        // Hang-ups and errors are reported unasked. If nothing is asked, they end one sleep, and not each.
        flags.set(epoll::EventFlags::ET, flags.is_empty());
        flags
    }
}

/// A condition of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    Readable(DescriptorId),
    Writable(DescriptorId),
}

#[derive(Debug)]
struct Watched {
    descriptor: OwnedFd,
    interest: Interest,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Descriptors {
    epoll: OwnedFd,
    watched: HashMap<DescriptorId, Watched>,
    /// Number of descriptors so far.
    so_far: u64,
    /// Those of the last batch that are to be reported. The next one is taken only when there are none: so each condition is here once.
    reports: VecDeque<Report>,
}

impl Descriptors {
    pub(crate) fn new() -> io::Result<Descriptors> {
        Ok(Descriptors {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            watched: HashMap::new(),
            so_far: 0,
            reports: VecDeque::with_capacity(2 * BATCH),
        })
    }

    pub(crate) fn add(&mut self, descriptor: OwnedFd, interest: Interest) -> io::Result<DescriptorId> {
        let id = DescriptorId(self.so_far + 1);
        let data = epoll::EventData::new_u64(id.0);
        epoll::add(&self.epoll, &descriptor, data, interest.flags())?;
        self.so_far = id.0;
        self.watched.insert(id, Watched { descriptor, interest });
        Ok(id)
    }

    pub(crate) fn set_interest(&mut self, id: DescriptorId, interest: Interest) -> io::Result<()> {
        let watched = self.watched.get_mut(&id).ok_or(io::ErrorKind::NotFound)?;
        if watched.interest != interest {
            let data = epoll::EventData::new_u64(id.0);
            epoll::modify(&self.epoll, &watched.descriptor, data, interest.flags())?;
            watched.interest = interest;
        }
        Ok(())
    }

    pub(crate) fn remove(&mut self, id: DescriptorId) -> Option<OwnedFd> {
        let Watched { descriptor, .. } = self.watched.remove(&id)?;
        // The caller keeps it open.
        let _ = epoll::delete(&self.epoll, &descriptor);
        Some(descriptor)
    }

    pub(crate) fn get(&self, id: DescriptorId) -> Option<BorrowedFd<'_>> {
        self.watched.get(&id).map(|watched| watched.descriptor.as_fd())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.watched.is_empty()
    }

    /// Takes a batch of those that are ready, by one system call, unless some of the last batch are not yet reported. The set gives all that
    /// are ready in turn, however many there are.
    pub(crate) fn look(&mut self) -> io::Result<()> {
        if self.watched.is_empty() || !self.reports.is_empty() {
            return Ok(());
        }
        let mut found = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; BATCH];
        let count = epoll::wait(&self.epoll, &mut found, Some(&Timespec::default()))?;
        for &epoll::Event { flags, data, .. } in &found[..count] {
            let id = DescriptorId(data.u64());
            let broken = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
            if flags.intersects(epoll::EventFlags::IN | broken) {
                self.reports.push_back(Report::Readable(id));
            }
            if flags.intersects(epoll::EventFlags::OUT | broken) {
                self.reports.push_back(Report::Writable(id));
            }
        }
        Ok(())
    }

    /// Takes the oldest condition of the batch that the service wants to know of.
    pub(crate) fn report(&mut self) -> Option<Report> {
        while let Some(report) = self.reports.pop_front() {
            // It may have been removed since, or the interest changed.
            let interest = |id| self.watched.get(&id).map(|watched| watched.interest);
            let is_wanted = match report {
                Report::Readable(id) => interest(id).is_some_and(|interest| interest.readable),
                Report::Writable(id) => interest(id).is_some_and(|interest| interest.writable),
            };
            if is_wanted {
                return Some(report);
            }
        }
        None
    }
}

/// Readable while one of them is ready.
impl AsFd for Descriptors {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::Report::{Readable, Writable};
    use super::*;

    const NOTHING: Interest = Interest {
        readable: false,
        writable: false,
    };
    const WRITABLE: Interest = Interest {
        readable: false,
        writable: true,
    };

    /// Takes a batch, and returns all reports of it.
    fn reports(descriptors: &mut Descriptors) -> Vec<Report> {
        descriptors.look().unwrap();
        std::iter::from_fn(|| descriptors.report()).collect()
    }

    fn ends_a_sleep(descriptors: &Descriptors) -> bool {
        let mut fds = [PollFd::new(descriptors, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    }

    /// Adds a descriptor that is readable until it is removed.
    fn add_readable(descriptors: &mut Descriptors) -> DescriptorId {
        let readable = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
        descriptors.add(readable, Interest::READABLE).unwrap()
    }

    #[test]
    fn report__readable_and_writable_as_asked() {
        let mut descriptors = Descriptors::new().unwrap();
        let (socket, mut peer) = UnixStream::pair().unwrap();
        let mut read = socket.try_clone().unwrap();
        let id = descriptors.add(socket.into(), Interest::READABLE).unwrap();
        assert_eq!(reports(&mut descriptors), []);
        descriptors.set_interest(id, Interest::BOTH).unwrap();
        assert_eq!(reports(&mut descriptors), [Writable(id)]);
        peer.write_all(b"x").unwrap();
        assert_eq!(reports(&mut descriptors), [Readable(id), Writable(id)]);
        descriptors.set_interest(id, Interest::READABLE).unwrap();
        assert_eq!(reports(&mut descriptors), [Readable(id)]);
        assert_eq!(
            reports(&mut descriptors),
            [Readable(id)],
            "as long as it is readable"
        );
        read.read_exact(&mut [0]).unwrap();
        assert_eq!(reports(&mut descriptors), []);
        assert!(!ends_a_sleep(&descriptors));
    }

    #[test]
    fn report__hung_up_or_failed_counts_as_what_is_asked() {
        let (hung_up, _) = UnixStream::pair().unwrap();
        // A full pipe that nobody reads any more has failed, and is neither readable nor writable.
        let (read, failed) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        while rustix::io::write(&failed, &[0; 4096]).is_ok() {}
        drop(read);
        for descriptor in [hung_up.into(), failed] {
            let mut descriptors = Descriptors::new().unwrap();
            let id = descriptors.add(descriptor, NOTHING).unwrap();
            for (interest, expected) in [
                (Interest::READABLE, vec![Readable(id)]),
                (WRITABLE, vec![Writable(id)]),
                (Interest::BOTH, vec![Readable(id), Writable(id)]),
                (NOTHING, vec![]),
            ] {
                descriptors.set_interest(id, interest).unwrap();
                assert_eq!(reports(&mut descriptors), expected);
                assert_eq!(ends_a_sleep(&descriptors), interest != NOTHING, "{interest:?}");
            }
        }
    }

    #[test]
    fn report__what_changes_while_it_waits() {
        let mut descriptors = Descriptors::new().unwrap();
        let [removed, deaf, other] = [(); 3].map(|()| add_readable(&mut descriptors));
        descriptors.look().unwrap();
        assert_eq!(descriptors.reports.len(), 3);
        assert!(descriptors.remove(removed).is_some());
        descriptors.set_interest(deaf, NOTHING).unwrap();
        let added = add_readable(&mut descriptors);
        assert_eq!(reports(&mut descriptors), [Readable(other)]);
        let mut two = reports(&mut descriptors);
        two.sort_unstable_by_key(|(Readable(id) | Writable(id))| *id);
        assert_eq!(two, [Readable(other), Readable(added)]);
    }

    #[test]
    fn remove__a_descriptor_that_stays_open() {
        let mut descriptors = Descriptors::new().unwrap();
        let id = add_readable(&mut descriptors);
        assert!(descriptors.get(id).is_some() && !descriptors.is_empty());
        let open = descriptors.remove(id).unwrap();
        assert!(descriptors.get(id).is_none() && descriptors.is_empty());
        assert!(!ends_a_sleep(&descriptors));
        assert!(descriptors.remove(id).is_none());
        let unknown = descriptors.set_interest(id, Interest::BOTH).unwrap_err();
        assert_eq!(unknown.kind(), io::ErrorKind::NotFound);
        let again = descriptors.add(open, Interest::READABLE).unwrap();
        assert_ne!(again, id);
        assert_eq!(reports(&mut descriptors), [Readable(again)]);
    }

    #[test]
    fn look__does_not_report_again_what_waits() {
        let mut descriptors = Descriptors::new().unwrap();
        let ids = [(); 2].map(|()| add_readable(&mut descriptors));
        for _ in 0..10 {
            descriptors.look().unwrap();
        }
        assert_eq!(descriptors.reports.len(), 2);
        assert!(descriptors.report().is_some());
        descriptors.look().unwrap();
        assert_eq!(descriptors.reports.len(), 1);
        assert_eq!(descriptors.watched.len(), ids.len());
    }

    #[test]
    fn look__all_are_reported_before_one_is_again() {
        let mut descriptors = Descriptors::new().unwrap();
        let ids: HashSet<_> = (0..3 * BATCH + 1)
            .map(|_| add_readable(&mut descriptors))
            .collect();
        let mut reported = HashSet::new();
        while reported.len() < ids.len() {
            descriptors.look().unwrap();
            let Some(Readable(id)) = descriptors.report() else {
                panic!("all are readable");
            };
            assert!(reported.insert(id), "{id:?} again");
        }
        assert_eq!(reported, ids);
    }

    #[test]
    fn add__what_the_system_does_not_watch() {
        let mut descriptors = Descriptors::new().unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(descriptors.add(file.into(), Interest::READABLE).is_err());
        assert!(descriptors.is_empty());
        assert_eq!(add_readable(&mut descriptors), DescriptorId(1));
    }
}
