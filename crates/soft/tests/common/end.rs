//! One end of a connection: what most of the tests here begin with. A test file adds the methods that it alone needs.

use std::net::IpAddr;
use std::sync::Arc;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::*;

use super::{LONG, bring_up, connect, open, towards};

/// Bytes of an end's memory, unless a test chooses.
pub(crate) const END_BYTES: usize = 64 << 10;

/// Rights on the memory: all that it can have.
pub(crate) const RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::FLUSH_GLOBAL)
    .union(Access::MW_BIND);

/// A queue pair with its device, and with what it needs to send and receive.
pub(crate) struct End {
    pub(crate) device: Device,
    pub(crate) pd: ProtectionDomain,
    /// For the completions of sends.
    pub(crate) cq: CompletionQueue,
    /// For the completions of receives: the same queue, unless the test chooses another one.
    pub(crate) recv_cq: CompletionQueue,
    pub(crate) qp: QueuePair,
    pub(crate) memory: Arc<AnonymousMemory>,
    /// All of the memory, with [`RIGHTS`]. Its addresses are those of the memory in this process.
    pub(crate) mr: MemoryRegion,
}

impl End {
    /// Opens a device and makes an RC queue pair on it. Peers reach its memory by packets alone.
    pub(crate) fn new(address: impl Into<IpAddr>) -> End {
        End::of_type(address, QpType::Rc)
    }

    /// Opens a device and makes a queue pair of a type on it.
    pub(crate) fn of_type(address: impl Into<IpAddr>, qp_type: QpType) -> End {
        let device = open(address.into()).unwrap();
        End::with(&device, private(END_BYTES), |_, options| QpOptions {
            qp_type,
            ..options
        })
    }

    /// Makes an RC queue pair on a device, and gives it a memory.
    pub(crate) fn on(device: &Device, memory: AnonymousMemory) -> End {
        End::with(device, memory, |_, options| options)
    }

    /// Makes a queue pair on a device with the options that a test chooses, and gives it a memory.
    pub(crate) fn with(
        device: &Device,
        memory: AnonymousMemory,
        choose: impl FnOnce(&ProtectionDomain, QpOptions) -> QpOptions,
    ) -> End {
        let pd = device.alloc_pd().unwrap();
        let options = choose(&pd, QpOptions::new(&device.create_cq(1024).unwrap()));
        let qp = pd.create_qp(&options).unwrap();
        let memory = Arc::new(memory);
        let mr = pd.reg_mr_all(memory.clone(), memory.address(), RIGHTS).unwrap();
        End {
            device: device.clone(),
            pd,
            cq: options.send_cq,
            recv_cq: options.recv_cq,
            qp,
            memory,
            mr,
        }
    }

    /// Makes an XRC target on a device, and a queue of 16 for its receives, which complete to the end's queue.
    pub(crate) fn xrc_target(device: &Device, memory: AnonymousMemory) -> (End, SharedReceiveQueue) {
        let xrcd = device.alloc_xrcd().unwrap();
        let end = End::with(device, memory, |_, options| QpOptions {
            qp_type: QpType::XrcRecv,
            xrcd: Some(xrcd.clone()),
            ..options
        });
        let srq = end.pd.create_xrc_srq(16, &xrcd, &end.cq).unwrap();
        (end, srq)
    }

    /// Brings the queue pair up towards another one, or itself, without a message of connection management.
    pub(crate) fn bring_up(&self, peer: &End) {
        let steps = towards(&self.qp, peer.device.address(), peer.qp.qpn(), 0);
        bring_up(&self.qp, steps);
    }

    /// Posts a request to the connected peer.
    pub(crate) fn post(&self, operation: Operation, sges: impl Into<SgeList>) {
        self.try_post(operation, sges.into(), Target::Connected).unwrap();
    }

    pub(crate) fn try_post(&self, operation: Operation, sges: SgeList, to: Target) -> Result<(), PostError> {
        self.qp.post_send(SendRequest {
            wr_id: 1,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to,
        })
    }

    pub(crate) fn wait(&self) -> WorkCompletion {
        self.cq.wait(LONG).unwrap().expect("a completion")
    }

    /// Waits for the completion of a request that succeeds.
    pub(crate) fn wait_success(&self) -> WorkCompletion {
        let wc = self.wait();
        assert_eq!(wc.status, Status::Success);
        wc
    }

    /// Posts a request to the connected peer and waits for its completion.
    pub(crate) fn does(&self, operation: Operation, sges: impl Into<SgeList>) -> WorkCompletion {
        self.post(operation, sges);
        self.wait()
    }

    /// Returns the word at an offset of the memory.
    pub(crate) fn word(&self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read(offset, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }
}

/// Returns memory that peers on this host cannot map.
pub(crate) fn private(bytes: usize) -> AnonymousMemory {
    AnonymousMemory::new(bytes).unwrap()
}

/// Returns memory that peers on this host may map.
pub(crate) fn shareable(bytes: usize) -> AnonymousMemory {
    AnonymousMemory::shareable(bytes).unwrap()
}

/// Makes two ends on one address, the first of which is connected to the second.
pub(crate) fn connected(address: impl Into<IpAddr>) -> (End, End, [Connection; 2]) {
    let address = address.into();
    let (client, server) = (End::new(address), End::new(address));
    let connections = connect_ends(&client, &server);
    (client, server, connections)
}

/// Connects two ends.
pub(crate) fn connect_ends(client: &End, server: &End) -> [Connection; 2] {
    connect(&client.qp, &server.qp, &ConnectParams::default())
}
