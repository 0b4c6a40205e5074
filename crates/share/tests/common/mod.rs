//! A node in a thread of the test, and the objects of an application.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::net::IpAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rdmux_key::Key;
use rdmux_memory::AnonymousMemory;
use rdmux_share::node::snapshot::Viewer;
use rdmux_share::node::{Node, NodeOptions, Stopper};
use rdmux_verbs::{
    Access, CompletionQueue, Connection, Device, Memory, MemoryRegion, Options, ProtectionDomain, QueuePair,
    Sge, Status, WcOpcode, WorkCompletion,
};

pub(crate) const LONG: Duration = Duration::from_secs(30);
/// Bytes of the memory of a [`Side`].
pub(crate) const BYTES: u64 = 1 << 20;

/// Opens a device of a provider.
pub(crate) fn open(address: IpAddr, provider: &'static str) -> Device {
    let options = Options {
        provider: Some(provider),
        ..Options::default()
    };
    Device::open_with(address, options).unwrap()
}

/// A node on a soft device, until it is dropped.
pub(crate) struct Served {
    pub(crate) address: IpAddr,
    pub(crate) device: Device,
    pub(crate) viewer: Viewer,
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    /// Starts a node; with a key, it shares queue pairs with nodes that have the same.
    pub(crate) fn at(address: impl Into<IpAddr>, key: Option<[u8; 32]>) -> Served {
        Served::with_faults(address, key, None)
    }

    /// Starts a node on a device with such faults.
    pub(crate) fn with_faults(
        address: impl Into<IpAddr>,
        key: Option<[u8; 32]>,
        faults: Option<&str>,
    ) -> Served {
        let options = NodeOptions {
            key: key.map(Key::new),
            ..NodeOptions::default()
        };
        Served::with_options(address, options, faults)
    }

    pub(crate) fn with_options(
        address: impl Into<IpAddr>,
        node: NodeOptions,
        faults: Option<&str>,
    ) -> Served {
        rdmux_soft::register();
        rdmux_share::register();
        let address = address.into();
        let options = Options {
            provider: Some("soft"),
            faults: faults.map(|faults| faults.parse().unwrap()),
            ..Options::default()
        };
        let device = Device::open_with(address, options).unwrap();
        let node = Node::open_with(device.clone(), node).unwrap();
        let (stopper, viewer) = (node.stopper(), node.viewer());
        let thread = std::thread::spawn(move || node.run().unwrap());
        Served {
            address,
            device,
            viewer,
            stopper,
            thread: Some(thread),
        }
    }

    pub(crate) fn stop(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The objects of an application.
pub(crate) struct Side {
    // A connection ends before its queue pair.
    pub(crate) connection: Option<Connection>,
    pub(crate) qp: QueuePair,
    pub(crate) mr: MemoryRegion,
    pub(crate) memory: Arc<AnonymousMemory>,
    pub(crate) cq: CompletionQueue,
    pub(crate) pd: ProtectionDomain,
    pub(crate) device: Device,
}

impl Side {
    /// Makes the objects, with the queue pair that `make` makes.
    pub(crate) fn of(
        device: Device,
        completions: u32,
        make: impl FnOnce(&ProtectionDomain, &CompletionQueue) -> QueuePair,
    ) -> Side {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(completions).unwrap();
        let qp = make(&pd, &cq);
        let memory = Arc::new(AnonymousMemory::shareable(BYTES as usize).unwrap());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let mr = pd.reg_mr_all(memory.clone(), memory.address(), access).unwrap();
        Side {
            connection: None,
            qp,
            mr,
            memory,
            cq,
            pd,
            device,
        }
    }

    pub(crate) fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write(at, bytes).unwrap();
    }

    pub(crate) fn got(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(at, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn sge(&self, at: u64, len: u64) -> Sge {
        self.mr.slice(at..at + len).unwrap()
    }

    pub(crate) fn next(&self) -> WorkCompletion {
        self.cq.wait(LONG).unwrap().expect("a completion")
    }

    pub(crate) fn expect(&self, wr_id: u64, opcode: WcOpcode) -> WorkCompletion {
        let wc = self.next();
        assert_eq!(
            (wc.wr_id, wc.status, wc.opcode, wc.qpn),
            (wr_id, Status::Success, opcode, self.qp.qpn())
        );
        wc
    }
}
