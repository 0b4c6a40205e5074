//! A target with the model of a drive, whose data may go between queue pairs and memory that the drive reaches.
#![allow(dead_code, reason = "not every test uses all of it")]

#[path = "../rdma_host/mod.rs"]
pub(crate) mod rdma_host;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_drive::{Buffer, MemoryKind};
use rdmux_nvmf::backend::Backend;
use rdmux_nvmf::backend::drive::{DriveBackend, DriveSettings};
use rdmux_nvmf::backend::peer::PeerToPeer;
use rdmux_nvmf::host::{IoQueue, command};
use rdmux_nvmf::target::Target;
use rdmux_sim::drive::{Bytes, Drive, Media, Shape};
use rdmux_verbs::Device;
use rdmux_verbs::ledger::{Entries, Ledger};
use rdmux_wire::nvme::{NsId, Opcode};

pub(crate) use rdma_host::*;

/// Bytes of a block of the namespace.
pub(crate) const BLOCK: u32 = 4096;

/// A thread that moves a drive.
pub(crate) struct Mover {
    began: Instant,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    /// Moves a drive whose time began then.
    pub(crate) fn new(drive: &Arc<Drive>, began: Instant) -> Mover {
        let ends = Arc::new(AtomicBool::new(false));
        let moved = (drive.clone(), ends.clone());
        let thread = std::thread::spawn(move || {
            let (drive, ends) = moved;
            while !ends.load(Ordering::Relaxed) {
                drive.set_now(began.elapsed().as_nanos() as u64);
                if !drive.step() {
                    // Time is meant: the drive tells nobody when it has something to do, and others need the processor.
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        });
        Mover {
            began,
            ends,
            thread: Some(thread),
        }
    }

    /// Has the drive stand still. Returns the begin of its time, with which another mover goes on.
    pub(crate) fn stop(self) -> Instant {
        self.began
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, None | Some(Ok(()))));
    }
}

/// A target with a drive.
pub(crate) struct Peered {
    pub(crate) server: Running,
    pub(crate) drive: Arc<Drive>,
    pub(crate) backend: Arc<DriveBackend>,
    /// Bytes of buffers in a row while there are no commands.
    pub(crate) room: usize,
    pub(crate) ledger: Arc<Ledger>,
    /// Ends last: the drive is shut down before.
    pub(crate) mover: RefCell<Option<Mover>>,
}

impl Peered {
    pub(crate) fn new(buffers: MemoryKind, p2p: PeerToPeer) -> Peered {
        Peered::with_media(Bytes::new(64 << 10), buffers, p2p)
    }

    pub(crate) fn with_media(media: Arc<dyn Media>, buffers: MemoryKind, p2p: PeerToPeer) -> Peered {
        let settings = DriveSettings {
            buffers,
            p2p,
            ..DriveSettings::default()
        };
        Peered::with_settings(media, settings, |backend| backend)
    }

    /// Serves the drive, by the offload engine if its settings say so, as the backend that is made of it.
    pub(crate) fn with_settings<B: Backend + 'static>(
        media: Arc<dyn Media>,
        settings: DriveSettings,
        served: impl FnOnce(Arc<DriveBackend>) -> Arc<B>,
    ) -> Peered {
        let drive = Drive::new(Shape::default(), media, 1);
        let mover = Mover::new(&drive, Instant::now());
        let ledger = Arc::new(Ledger::default());
        let settings = DriveSettings {
            ledger: Some(ledger.clone()),
            ..settings
        };
        let offload = settings.offload;
        let backend = Arc::new(DriveBackend::of_function(drive.clone(), None, settings).unwrap());
        let target = Target::default().with_ledger(ledger.clone());
        let server = Running::by(target, served(backend.clone()), offload);
        Peered {
            server,
            drive,
            room: backend.pool().room(),
            backend,
            ledger,
            mover: RefCell::new(Some(mover)),
        }
    }

    /// Returns what the target has booked of its RNIC and its driver, and what the drive has moved by its own account.
    pub(crate) fn entries(&self) -> (Entries, Entries) {
        (self.ledger.entries(), self.drive.entries())
    }

    /// Takes all buffers.
    pub(crate) fn take_all(&self) -> Buffer {
        self.backend.pool().allocate(self.room).unwrap()
    }

    pub(crate) fn wait_until_free(&self) {
        wait_for(|| self.backend.pool().room() == self.room);
    }

    /// Has queue pairs die, one after the other, with data of reads and writes on their way, and waits each time until the buffers are free.
    pub(crate) fn lose_queue_pairs(&self, device: &Device) {
        for round in 0..20u16 {
            let (admin, cntlid) = self.server.admin(device);
            let io = self.server.io(device, cntlid, 1);
            for cid in 0..4 {
                let (opcode, data) = match cid % 2 {
                    0 => (Opcode::WRITE, vec![round as u8; 128 << 10]),
                    _ => (Opcode::READ, Vec::new()),
                };
                io.command(rw(opcode, cid, u64::from(cid) * 32, 32), &data, 128 << 10);
            }
            drop(io);
            drop(admin);
            self.wait_until_free();
        }
    }
}

/// Waits until something holds, which nobody tells.
pub(crate) fn wait_for(holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "it does not come");
        std::thread::yield_now();
    }
}

impl Drop for Peered {
    fn drop(&mut self) {
        self.server.stop();
        if !std::thread::panicking() {
            assert_eq!(self.drive.violation(), None);
        }
    }
}

/// Writes and reads blocks of several lengths. Returns the bytes of one direction.
pub(crate) fn write_and_read(queue: &mut IoQueue, seed: u8) -> u64 {
    let blocks = [1, 2, 31, 32, 33, 100, 128];
    let slba = |at: usize| at as u64 * 256;
    let data = |at: usize| {
        let bytes =
            (0..blocks[at] * BLOCK).map(move |byte| (byte / 7 + byte / BLOCK) as u8 ^ (at as u8 + seed));
        bytes.collect::<Vec<u8>>()
    };
    let write = |at| command::write(NsId(1), slba(at), blocks[at], blocks[at] * BLOCK, data(at));
    run_all(queue, (0..blocks.len()).map(write));
    let read = |at: usize| {
        let bytes = blocks[at] * BLOCK;
        command::read(NsId(1), slba(at), blocks[at], bytes, vec![0; bytes as usize])
    };
    let done = run_all(queue, (0..blocks.len()).map(read));
    for (at, done) in done.iter().enumerate() {
        assert!(done.bytes() == data(at), "{} blocks", blocks[at]);
    }
    blocks.iter().map(|blocks| u64::from(blocks * BLOCK)).sum()
}
