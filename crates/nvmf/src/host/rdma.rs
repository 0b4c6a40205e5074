//! NVMe/RDMA: the host's side of a connection, as a state machine without I/O.
//!
//! A command whose data do not go in its capsule ([`Connection::needs_memory`]) has memory that the driver has registered, with the data to
//! be sent in it. The driver passes both ([`Connection::submit`]), sends capsules ([`Connection::next_capsule`]), and passes responses
//! ([`Connection::handle_response`]), which make the memory of their command free. All that a target sends is checked: what does not fit ends the
//! connection, with an [`End`] that says what it was.

use std::collections::VecDeque;
use std::time::Instant;

use rdmux_wire::RKey;
use rdmux_wire::nvme::{CQE_LEN, Cqe, Opcode, SQE_LEN, Sgl};

use super::queue::{Command, Completion, Data, Queue};
use crate::rdma::Remote;

/// Maximum bytes of data in a capsule, whatever the controller takes: capsules have memory of their own.
const IN_CAPSULE_MAX: u32 = 16 << 10;

/// Properties of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Entries of the queue.
    pub entries: u16,
    /// Maximum bytes of data in the capsule of a command that is none of fabrics; 0 on the admin queue.
    pub in_capsule_max: u32,
    /// It is an I/O queue.
    pub is_io: bool,
}

impl Config {
    /// Returns the bytes of the longest capsule.
    pub fn capsule_bytes(&self) -> usize {
        SQE_LEN + self.in_capsule_max.min(IN_CAPSULE_MAX) as usize
    }
}

/// Reason for which a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// The target has violated the protocol.
    #[error("the target sent {0}: the connection is over")]
    Violation(&'static str),
}

/// State of a command in flight.
#[derive(Debug, Default)]
struct State {
    /// Its capsule is with the driver.
    is_sent: bool,
    /// Bytes of data in its capsule.
    in_capsule: usize,
}

/// A capsule to be sent, in parts.
pub type Capsule<'a> = [&'a [u8]; 2];

/// The host's side of a connection, which is a queue.
///
/// A target has taken each command that it has completed, and no more commands are in flight than the queue has entries less one: the queue's
/// head in a response (SQHD) allows whatever is free here.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    queue: Queue<State>,
    /// Commands whose capsules are to be sent.
    unsent: VecDeque<u16>,
    done: VecDeque<Completion>,
    end: Option<End>,
}

impl Connection {
    /// Makes the host's side of a connection that a target has accepted.
    pub fn new(config: Config) -> Connection {
        Connection {
            config,
            queue: Queue::new(config.entries),
            unsent: VecDeque::with_capacity(config.entries.into()),
            done: VecDeque::with_capacity(config.entries.into()),
            end: None,
        }
    }

    /// Returns why the connection is over: the driver closes it.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Returns the number of commands that may be submitted now.
    pub fn room(&self) -> usize {
        match self.end {
            None => self.queue.room(),
            Some(_) => 0,
        }
    }

    /// Returns the number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Returns true if a command was to be done before now.
    pub fn has_expired(&self, now: Instant) -> bool {
        self.queue.has_expired(now)
    }

    /// Takes the commands that are not done, when the connection is over.
    pub fn take_commands(&mut self) -> Vec<Command> {
        self.unsent.clear();
        self.queue.take_all()
    }

    /// Returns the bytes of registered memory that a command needs; 0: its data go in the capsule, or there are none.
    pub fn needs_memory(&self, command: &Command) -> usize {
        match self.in_capsule(command) {
            0 => command.data.len(),
            _ => 0,
        }
    }

    /// Returns true if the memory of a command that receives data is to hold those of its buffer before: of an I/O, the target writes all of it.
    pub fn fills_memory(&self) -> bool {
        !self.config.is_io
    }

    /// Returns the bytes of a command's data in its capsule.
    fn in_capsule(&self, command: &Command) -> usize {
        let most = match command.sqe.opcode() {
            // The controller's capsules may be smaller before it has its properties.
            Opcode::FABRICS => 0,
            _ => self.config.in_capsule_max.min(IN_CAPSULE_MAX) as usize,
        };
        match command.data {
            Data::Out(length) if length as usize <= most => length as usize,
            _ => 0,
        }
    }

    /// Takes a command, which is to be done before the deadline, if there is one. `memory`: that of its data, if it needs some. Returns the
    /// place of the command, by which its memory is known.
    ///
    /// # Panics
    /// There is no [room](Connection::room), or the buffer is shorter than the data, or memory that it needs is missing.
    pub fn submit(&mut self, mut command: Command, deadline: Option<Instant>, memory: Option<Remote>) -> u16 {
        assert!(self.room() > 0, "the caller has looked at the room");
        let length = command.data.len() as u32;
        let in_capsule = self.in_capsule(&command);
        command.sqe.set_sgl(match memory {
            _ if in_capsule > 0 => Sgl::InCapsule { offset: 0, length },
            Some(Remote { address, rkey }) => Sgl::Keyed {
                address,
                length,
                rkey,
                // The key stays for the next command.
                invalidate: false,
            },
            None => {
                assert!(length == 0, "the command needs memory");
                Sgl::Keyed {
                    address: 0,
                    length: 0,
                    rkey: RKey(0),
                    invalidate: false,
                }
            }
        });
        let state = State {
            is_sent: false,
            in_capsule,
        };
        let at = self.queue.begin(command, deadline, state);
        self.unsent.push_back(at);
        at
    }

    /// Returns true if [`Connection::next_capsule`] has one.
    pub fn has_capsule(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Returns the next capsule to be sent.
    pub fn next_capsule(&mut self) -> Option<Capsule<'_>> {
        let at = self.unsent.pop_front()?;
        let in_flight = self.queue.get_mut(at)?;
        in_flight.transport.is_sent = true;
        let (command, state) = (&in_flight.command, &in_flight.transport);
        Some([command.sqe.as_bytes(), &command.buffer[..state.in_capsule]])
    }

    /// Takes a response. `copy` copies the data of the command at a place out of its memory. Returns the place of the command that is done.
    pub fn handle_response(&mut self, bytes: &[u8], copy: impl FnOnce(u16, &mut [u8])) -> Option<u16> {
        if self.end.is_some() {
            return None;
        }
        match self.check(bytes) {
            Ok((at, cqe)) => {
                self.complete(at, &cqe, copy);
                Some(at)
            }
            Err(what) => {
                self.end = Some(End::Violation(what));
                None
            }
        }
    }

    fn check(&self, bytes: &[u8]) -> Result<(u16, Cqe), &'static str> {
        let cqe = match bytes.len() {
            CQE_LEN => Cqe::parse(bytes).map_err(|_| "a response that is none")?,
            _ => return Err("a response of another length than 16 bytes"),
        };
        if cqe.sq_head >= self.config.entries {
            return Err("a head outside of the queue (SQHD)");
        }
        let at = self.queue.find(cqe.cid);
        let at = at.filter(|at| self.queue.get(*at).is_some_and(|found| found.transport.is_sent));
        let at = at.ok_or("a response to no command in flight")?;
        Ok((at, cqe))
    }

    fn complete(&mut self, at: u16, cqe: &Cqe, copy: impl FnOnce(u16, &mut [u8])) {
        let mut received = 0;
        if let Some(in_flight) = self.queue.get_mut(at)
            && let Data::In(length) = in_flight.command.data
            && cqe.status.is_success()
        {
            // No message tells how many bytes the target has written: all of them, if it has carried out the command.
            received = length as usize;
            copy(at, &mut in_flight.command.buffer[..received]);
        }
        self.done.extend(self.queue.finish(at, cqe, received));
    }

    /// Returns a command that is done.
    pub fn poll(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    /// Returns true if a command is done.
    pub fn has_completions(&self) -> bool {
        !self.done.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{RngCore, SeedableRng};
    use rdmux_wire::nvme::{Cid, NsId, Sqe, Status};

    use super::super::command::{flush, identify, read, write};
    use super::*;

    const KEY: Remote = Remote {
        address: 0x1000,
        rkey: RKey(7),
    };

    fn host(is_io: bool) -> Connection {
        Connection::new(Config {
            entries: 5,
            in_capsule_max: if is_io { 8192 } else { 0 },
            is_io,
        })
    }

    fn response(cid: Cid, status: Status) -> [u8; CQE_LEN] {
        let mut bytes = [0; CQE_LEN];
        let cqe = Cqe {
            result: 0,
            sq_head: 1,
            cid,
            status,
        };
        cqe.emit(&mut bytes);
        bytes
    }

    /// Returns the next command that is sent, and the data in its capsule.
    fn sent(host: &mut Connection) -> (Sqe, Vec<u8>) {
        let [sqe, data] = host.next_capsule().unwrap();
        (Sqe::parse(sqe).unwrap(), data.to_vec())
    }

    fn submit(host: &mut Connection, command: Command) -> u16 {
        let memory = (host.needs_memory(&command) > 0).then_some(KEY);
        host.submit(command, None, memory)
    }

    #[test]
    fn submit__puts_data_in_the_capsule_or_names_their_memory() {
        let mut host = host(true);
        submit(&mut host, write(NsId(1), 0, 2, 8192, vec![3; 8192]));
        let (sqe, data) = sent(&mut host);
        let in_capsule = Sgl::InCapsule {
            offset: 0,
            length: 8192,
        };
        assert_eq!((sqe.sgl(), data), (Ok(in_capsule), vec![3; 8192]));
        let keyed = |length| Sgl::Keyed {
            address: KEY.address,
            length,
            rkey: KEY.rkey,
            invalidate: false,
        };
        for command in [
            write(NsId(1), 0, 3, 12288, vec![3; 12288]),
            read(NsId(1), 0, 3, 12288, vec![0; 12288]),
        ] {
            assert_eq!(host.needs_memory(&command), 12288);
            submit(&mut host, command);
            let (sqe, data) = sent(&mut host);
            assert_eq!((sqe.sgl(), data), (Ok(keyed(12288)), Vec::new()));
        }
        submit(&mut host, flush(NsId(1)));
        let (sqe, data) = sent(&mut host);
        assert_eq!(sqe.sgl().map(|sgl| sgl.length()), Ok(0));
        assert!(data.is_empty() && host.room() == 0 && !host.has_capsule());
        // No capsule of an admin queue has data.
        let mut admin = self::host(false);
        let send = Command::sending(Sqe::new(Opcode::FABRICS, Cid(0), NsId::NONE), vec![1; 64]);
        assert_eq!(admin.needs_memory(&send), 64);
        submit(&mut admin, send);
        assert!(sent(&mut admin).1.is_empty());
    }

    #[test]
    fn response__brings_the_data_of_a_command_that_has_succeeded() {
        let mut host = host(true);
        for status in [Status::SUCCESS, Status::LBA_OUT_OF_RANGE] {
            let at = submit(&mut host, read(NsId(1), 0, 1, 4096, vec![0; 4096]));
            let (sqe, _) = sent(&mut host);
            let mut copied = false;
            let done = host.handle_response(&response(sqe.cid(), status), |place, data| {
                assert_eq!(place, at);
                data.fill(9);
                copied = true;
            });
            assert_eq!((done, copied), (Some(at), status.is_success()));
            let completion = host.poll().unwrap();
            let expected = if status.is_success() { 4096 } else { 0 };
            assert_eq!((completion.status, completion.received), (status, expected));
            assert!(completion.bytes().iter().all(|byte| *byte == 9));
        }
        assert!(host.end().is_none() && host.room() == 4);
    }

    #[test]
    fn response__that_does_not_fit_ends_the_connection() {
        let ends = |bytes: &[u8], part: &str| {
            let mut host = host(true);
            submit(&mut host, read(NsId(1), 0, 1, 4096, vec![0; 4096]));
            sent(&mut host);
            // This one is not on its way.
            submit(&mut host, flush(NsId(1)));
            assert_eq!(host.handle_response(bytes, |_, _| panic!("copies")), None);
            let end = host.end().unwrap().to_string();
            assert!(end.contains(part), "{end}");
            assert_eq!((host.room(), host.poll().is_none()), (0, true));
            assert_eq!(host.take_commands().len(), 2);
            assert!(host.next_capsule().is_none());
        };
        let good = response(Cid(0), Status::SUCCESS);
        ends(&good[..15], "16 bytes");
        ends(&[], "16 bytes");
        for cid in [1, 2, 1024, 0xffff] {
            ends(&response(Cid(cid), Status::SUCCESS), "no command in flight");
        }
        let mut beyond = good;
        beyond[8..10].copy_from_slice(&5u16.to_le_bytes());
        ends(&beyond, "SQHD");
    }

    #[test]
    fn response__of_any_bytes_does_a_command_once_or_ends_the_connection() {
        let seed = 5;
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (mut done, mut ended) = (0, 0);
        for _ in 0..2000 {
            let mut host = host(true);
            let mut in_flight = Vec::new();
            while host.end().is_none() {
                while host.room() > 0 {
                    submit(&mut host, identify(rdmux_wire::nvme::Cns::CONTROLLER, NsId::NONE));
                    in_flight.push(sent(&mut host).0.cid());
                }
                let mut bytes = response(in_flight[random.next_u32() as usize % 4], Status::SUCCESS);
                if random.next_u32().is_multiple_of(8) {
                    bytes[random.next_u32() as usize % CQE_LEN] = random.next_u32() as u8;
                }
                host.handle_response(&bytes, |_, _| {});
                while let Some(completion) = host.poll() {
                    let cid = completion.command.sqe.cid();
                    let at = in_flight.iter().position(|known| *known == cid);
                    in_flight.swap_remove(at.expect("it is done once"));
                    done += 1;
                }
            }
            assert_eq!(host.take_commands().len(), in_flight.len());
            ended += 1;
        }
        assert!(done > 2000 && ended == 2000, "{done} {ended}");
    }

    #[test]
    fn deadline__of_a_command_that_is_not_answered() {
        let (mut host, now) = (host(true), Instant::now());
        host.submit(flush(NsId(1)), Some(now + Duration::from_secs(1)), None);
        assert!(!host.has_expired(now) && host.has_expired(now + Duration::from_secs(1)));
    }
}
