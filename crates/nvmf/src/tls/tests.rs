//! Sessions between a host and a target, on a pair of sockets.

use std::io::IoSlice;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rdmux_wire::nvme::Nqn;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::psk::Psk;
use super::{Channel, Keys, Proof, Server, Session};

fn names() -> [Nqn; 2] {
    ["nqn.2014-08.org.example:host", "nqn.2014-08.org.example:disk"].map(|nqn| Nqn::new(nqn).unwrap())
}

fn sha384() -> Psk {
    let text = "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";
    Psk::parse(text).unwrap()
}

/// An end of a session.
struct End(UnixStream, Channel);

impl End {
    fn handshake(&mut self) -> Result<bool, Errno> {
        self.1.handshake(self.0.as_fd())
    }

    fn receive(&mut self, space: &mut [u8]) -> Result<usize, Errno> {
        self.1.receive(self.0.as_fd(), space, RecvFlags::DONTWAIT)
    }

    fn send(&mut self, bytes: &[&[u8]]) -> Result<usize, Errno> {
        let slices: Vec<_> = bytes.iter().map(|bytes| IoSlice::new(bytes)).collect();
        self.1.send(self.0.as_fd(), &slices)
    }
}

/// Returns a host with a key, and a target that knows these.
fn ends(key: &Psk, known: Vec<Psk>) -> [End; 2] {
    let [host, subsystem] = names();
    let (one, other) = UnixStream::pair().unwrap();
    let is_known = [host.clone(), subsystem.clone()];
    let keys = Keys(Arc::new(move |host, subsystem| {
        match is_known == [host.clone(), subsystem.clone()] {
            true => known.clone(),
            false => Vec::new(),
        }
    }));
    let client = Session::connect(key, &host, &subsystem).unwrap();
    let server = Server::new(keys).unwrap().accept().unwrap();
    let secure = |session| Channel::Secure(Box::new(session));
    [End(one, secure(client)), End(other, secure(server))]
}

/// Takes a handshake to its end.
fn agree(ends: &mut [End; 2]) -> Result<(), Errno> {
    for _ in 0..10 {
        let done = [ends[0].handshake()?, ends[1].handshake()?];
        if done == [true, true] {
            return Ok(());
        }
    }
    panic!("the handshake makes no progress")
}

#[test]
fn session__proves_the_key_that_the_host_has_offered() {
    for key in [Psk::new([7; 32]), sha384()] {
        // The target finds it among others.
        let mut ends = ends(&key, vec![Psk::new([8; 32]), key.clone()]);
        agree(&mut ends).unwrap();
        let [host, subsystem] = names();
        let proof = Proof {
            host,
            subsystem,
            psk: key,
        };
        assert_eq!(ends[1].1.take_proof(), Some(proof));
        assert_eq!((ends[1].1.take_proof(), ends[0].1.take_proof()), (None, None));
    }
}

#[test]
fn session__carries_bytes_both_ways_whatever_the_socket_takes() {
    let mut ends = ends(&Psk::new([7; 32]), vec![Psk::new([7; 32])]);
    agree(&mut ends).unwrap();
    // Many times what the sockets hold, in pieces that are no records.
    let data: Vec<u8> = (0..3_000_000u32)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    for (from, to) in [(0, 1), (1, 0)] {
        let (mut sent, mut got) = (0, Vec::new());
        let mut blocked = 0;
        while got.len() < data.len() {
            if sent < data.len() {
                let rest = &data[sent..];
                let (first, second) = rest.split_at(rest.len().min(100));
                match ends[from].send(&[first, second]) {
                    Ok(bytes) => {
                        sent += bytes;
                        continue;
                    }
                    Err(error) => {
                        assert_eq!(error, Errno::AGAIN);
                        blocked += 1;
                    }
                }
            }
            let mut space = [0; 1000];
            match ends[to].receive(&mut space) {
                Ok(bytes) => got.extend_from_slice(&space[..bytes]),
                Err(error) => assert_eq!(error, Errno::AGAIN),
            }
        }
        assert!(got == data && blocked > 0);
        assert!(!ends[to].1.has_bytes());
    }
    // A part of a record is told of.
    assert_eq!(ends[0].send(&[b"two ", b"parts"]), Ok(9));
    let mut space = [0; 4];
    assert_eq!(ends[1].receive(&mut space), Ok(4));
    assert!(ends[1].1.has_bytes());
}

#[test]
fn session__ends_with_the_socket() {
    let [mut host, mut target] = ends(&Psk::new([7; 32]), vec![Psk::new([7; 32])]);
    let mut both = [host, target];
    agree(&mut both).unwrap();
    [host, target] = both;
    assert_eq!(host.send(&[b"last"]), Ok(4));
    drop(host);
    let mut space = [0; 100];
    assert_eq!(target.receive(&mut space), Ok(4));
    assert_eq!(target.receive(&mut space), Ok(0));
}

#[test]
fn handshake__fails_with_another_key_and_without_one() {
    let key = Psk::new([7; 32]);
    for known in [vec![Psk::new([8; 32]), sha384()], vec![]] {
        let mut ends = ends(&key, known);
        assert_eq!(agree(&mut ends), Err(Errno::PROTO));
        assert!(ends.iter().any(|end| end.1.failure().is_some()));
    }
}

#[test]
fn handshake__with_something_else_ends_it() {
    for bytes in [
        &[0u8; 128][..],
        b"GET / HTTP/1.1\r\n\r\n",
        &[22, 3, 1, 0, 4, 1, 0, 0, 0],
    ] {
        let [_, mut target] = ends(&Psk::new([7; 32]), vec![Psk::new([7; 32])]);
        let (mut peer, socket) = UnixStream::pair().unwrap();
        target.0 = socket;
        assert_eq!(target.handshake(), Ok(false));
        std::io::Write::write_all(&mut peer, bytes).unwrap();
        // The longest could be the beginning of a record, the others are none.
        if bytes[0] == 22 {
            drop(peer);
        }
        let mut results = (0..3).map(|_| target.handshake());
        assert!(results.any(|result| result == Err(Errno::PROTO)), "{bytes:?}");
        assert_eq!(target.1.take_proof(), None);
    }
}
