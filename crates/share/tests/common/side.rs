//! An application that keeps to everything.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, ConnectParams, Connection, Device, Memory, MemoryRegion, Options,
    ProtectionDomain, QueuePair, Sge, Status, WcOpcode, WorkCompletion,
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

/// Connects the queue pairs of two of them by a port, which the server's device listens on meanwhile.
pub(crate) fn connect(client: &mut Side, server: &mut Side, port: u16, params: &ConnectParams) {
    let listener = server.device.listen(port).unwrap();
    let address = SocketAddr::new(server.device.address(), port);
    let (connected, accepted) = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let request = listener.accept(LONG).unwrap();
            assert_eq!(request.private_data()[..3], *b"hey");
            let accepted = request.accept(&server.qp, &ConnectParams::default(), b"ho");
            let accepted = accepted.unwrap();
            assert!(accepted.wait_established());
            accepted
        });
        let connected = client.device.connect(&client.qp, address, params, b"hey");
        (connected.unwrap(), accepted.join().unwrap())
    });
    assert_eq!(connected.private_data()[..2], *b"ho");
    client.connection = Some(connected);
    server.connection = Some(accepted);
}
