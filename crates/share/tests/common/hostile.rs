//! Everything that an application can send to a node, and write into the memory that they share, at random. Several tests include it.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rdmux_memory::mapping::Mapping;
use rdmux_wire::node::Descriptor;
use rdmux_wire::node::control::Message;
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_setfl, ftruncate};

/// Traffic class of class 4. The other class is 0, and so is its traffic class.
pub(crate) const CLASS_4: u8 = 0x80;

/// Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }

    /// Fills bytes.
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_ne_bytes()[..chunk.len()]);
        }
    }
}

/// Messages and work requests of every kind, the fuzzer's, from which hostile ones are made.
pub(crate) struct Corpus {
    messages: Vec<Vec<u8>>,
    works: Vec<Vec<u8>>,
}

impl Corpus {
    pub(crate) fn read() -> Corpus {
        let read = |name: &str| {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
            let files = std::fs::read_dir(folder.join(name)).unwrap();
            let mut paths: Vec<_> = files.map(|file| file.unwrap().path()).collect();
            // A seed stands for the same on every file system.
            paths.sort();
            paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
        };
        Corpus {
            messages: read("node_control"),
            works: read("node"),
        }
    }

    /// Returns a message of any type with some bytes changed; in some, type and version are changed too. No node that takes it sends packets
    /// to another address than the peer's.
    pub(crate) fn message(&self, dice: &mut Dice, peer: SocketAddr) -> Vec<u8> {
        let from = [0, 4][usize::from(dice.below(8) > 0)];
        let mut bytes = mutated(&self.messages, dice, from);
        if let Ok((number, message)) = Message::parse(&bytes) {
            sent_to(message, peer).emit(number, &mut bytes);
        }
        bytes
    }

    /// Returns the descriptors of a work request of any kind with some bytes changed.
    pub(crate) fn work(&self, dice: &mut Dice) -> Vec<Descriptor> {
        mutated(&self.works, dice, 0).as_chunks().0.to_vec()
    }
}

/// Returns one of these with some bytes changed, none of them before `from`.
fn mutated(from_these: &[Vec<u8>], dice: &mut Dice, from: usize) -> Vec<u8> {
    let mut bytes = dice.pick(from_these).clone();
    for _ in 0..dice.below(4) {
        let at = from + dice.below((bytes.len() - from) as u64) as usize;
        // Most ids and lengths are small, and small ids are those of objects that the application has.
        let any = dice.next() as u8;
        bytes[at] = *dice.pick(&[0, 1, 2, 3, any]);
    }
    bytes
}

/// Returns a message with the peer's address in place of any other, and of one of two classes: for each class that applications use, a node
/// that shares queue pairs keeps one for a while.
fn sent_to(mut message: Message, to: SocketAddr) -> Message {
    match &mut message {
        Message::Connect { peer, params, .. } => {
            *peer = to;
            params.traffic_class &= CLASS_4;
        }
        Message::Accept { params, .. } => params.traffic_class &= CLASS_4,
        Message::Modify { attributes, .. } => {
            if let Some(path) = &mut attributes.path {
                path.dst = to.ip();
                path.traffic_class &= CLASS_4;
            }
        }
        Message::CreateAddressHandle { address, .. } => *address = to.ip(),
        _ => {}
    }
    message
}

/// The rings of an application, in the hands of one that keeps to nothing.
pub(crate) struct Vandal {
    /// The node's file, the application's, the node's bell and the application's.
    files: [OwnedFd; 4],
    memory: Mapping,
    /// The node's memory, which the application can only read.
    theirs: Mapping,
    /// Numbers of rings of requests, and of all rings; there are a few.
    submissions: u64,
    rings: u64,
}

impl Vandal {
    pub(crate) fn new(files: [BorrowedFd<'_>; 4], submissions: u64, rings: u64) -> Vandal {
        let [node, application, ..] = files;
        let bytes = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_size as usize;
        assert!(Mapping::of_sealed_file(node, 0, bytes(node), true).is_err());
        Vandal {
            memory: Mapping::of_sealed_file(application, 0, bytes(application), true).unwrap(),
            theirs: Mapping::of_sealed_file(node, 0, bytes(node), false).unwrap(),
            files: files.map(|fd| fd.try_clone_to_owned().unwrap()),
            submissions,
            rings,
        }
    }

    /// Does anything that an application can do to its rings and bells.
    pub(crate) fn step(&mut self, dice: &mut Dice) {
        let [node, application, rings, is_rung] = self.files.each_ref().map(|fd| fd.as_fd());
        // The words of both files are before the descriptors, which begin at a page: those of a ring at 256 bytes for each, in the
        // application's file behind the sets.
        let (page, stride, sets) = (4096, 256, 512);
        let bytes = self.memory.len() as u64;
        let ring = dice.below(self.rings);
        // Tail or head of a ring, near the other one, so that some are possible.
        let near = self.theirs.load(stride * ring as usize);
        let distance = dice.below(20) as u32;
        let near = match ring < self.submissions {
            true => near.wrapping_add(distance),
            false => near.wrapping_sub(distance),
        };
        match dice.below(4096) {
            0 => {
                let _ = ftruncate(application, dice.below(1 << 20));
                let _ = ftruncate(node, 0);
            }
            1 => {
                let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(application, holes, 0, bytes);
                let _ = fallocate(node, holes, 0, bytes);
                let _ = rustix::io::pwrite(node, &[0xff; 64], 0);
            }
            2..10 => {
                let flags = *dice.pick(&[OFlags::empty(), OFlags::NONBLOCK]);
                let _ = fcntl_setfl(rings, OFlags::NONBLOCK);
                let _ = rustix::io::write(rings, &(u64::MAX - 1).to_ne_bytes());
                let _ = rustix::io::read(rings, &mut [0; 8]);
                let _ = fcntl_setfl(rings, flags);
                let _ = fcntl_setfl(is_rung, flags);
            }
            10..400 => {
                let at = 4 * dice.below(page / 4) as usize;
                self.memory.word(at).store(dice.next() as u32, Ordering::Relaxed);
            }
            400..2000 => {
                let word = self.memory.word(sets + stride * ring as usize);
                word.store(near, Ordering::Release);
            }
            2000..3800 => {
                // A descriptor with an opcode, flags and a count that are often possible.
                let mut first = dice.next().to_ne_bytes();
                first[0] %= 14;
                first[1] %= 16;
                first[3] %= 2;
                let line = (page + 64 * dice.below((bytes - page) / 64)) as usize;
                let mut descriptor = self.memory.load_line(line);
                descriptor[..8].copy_from_slice(&first);
                self.memory.store_line(line, &descriptor);
            }
            _ => {
                let at = 8 * dice.below(bytes / 8) as usize;
                let word = self.memory.double_word(at);
                word.store(dice.next(), Ordering::Relaxed);
            }
        }
    }
}
