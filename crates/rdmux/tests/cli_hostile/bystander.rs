//! An application of two nodes that keeps to everything, and checks each byte that it moves and those that nobody may touch.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::provider::seqpacket::{receive_with_descriptors, send_bytes};
use rdmux_verbs::{
    Access, AsyncEvent, CompletionQueue, ConnectParams, Memory as _, MemoryRegion, ProtectionDomain,
    QpOptions, QueuePair, RecvRequest, SendRequest, WcOpcode,
};
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use crate::hostile::{CLASS_4, Dice};
use crate::side::{BYTES, Side, connect, open};

const PORT: u16 = 6999;
/// Bytes of a message at most.
const MESSAGE_BYTES: u64 = 64 << 10;
/// Bytes of the memory that nobody may touch.
const CANARY_BYTES: u64 = 64 << 10;
const CANARY: u8 = 0xc5;

/// The last message for the bystander.
pub(crate) const END: &[u8] = b"end";

/// Where a region is, and its keys.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Keys {
    pub(crate) va: u64,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// The address and key of the canary of an end.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Target {
    pub(crate) keys: Keys,
    /// The queue pair of the same protection domain.
    pub(crate) qpn: u32,
}

/// One end of the bystander's connection.
struct End {
    side: Side,
    /// Bytes that its memory has to hold.
    expected: Vec<u8>,
    canary: Arc<AnonymousMemory>,
    canary_region: MemoryRegion,
}

impl End {
    fn open(address: IpAddr) -> End {
        let make = |pd: &ProtectionDomain, cq: &CompletionQueue| -> QueuePair {
            let qp = pd.create_qp(&QpOptions::new(cq)).unwrap();
            qp.init().unwrap();
            qp
        };
        let side = Side::of(open(address, "shared"), 64, make);
        let canary = Arc::new(AnonymousMemory::shareable(CANARY_BYTES as usize).unwrap());
        canary.write(0, &[CANARY; CANARY_BYTES as usize]).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let region = side.pd.reg_mr_all(canary.clone(), canary.address(), access);
        End {
            expected: vec![0; BYTES as usize],
            canary,
            canary_region: region.unwrap(),
            side,
        }
    }

    fn target(&self) -> Target {
        Target {
            keys: Keys {
                va: self.canary.address(),
                lkey: self.canary_region.lkey().0,
                rkey: self.canary_region.rkey().0,
            },
            qpn: self.side.qp.qpn().value(),
        }
    }

    /// Makes bytes of the memory new ones.
    fn renew(&mut self, dice: &mut Dice, at: u64, len: u64) {
        let bytes = &mut self.expected[at as usize..(at + len) as usize];
        dice.fill(bytes);
        self.side.put(at, bytes);
    }

    fn check(&self) {
        assert!(
            self.side.got(0, BYTES as usize) == self.expected,
            "the bystander's memory has changed"
        );
        let mut canary = vec![0; CANARY_BYTES as usize];
        self.canary.read(0, &mut canary).unwrap();
        assert!(
            canary.iter().all(|byte| *byte == CANARY),
            "the canary has changed"
        );
        let event: Option<AsyncEvent> = self.side.device.poll_async_event();
        assert!(
            event.is_none() && self.side.qp.error().is_none(),
            "{event:?} {:?}",
            self.side.qp.error()
        );
    }
}

struct Bystander {
    /// Both ends of two connections, of two classes.
    pairs: [[End; 2]; 2],
    dice: Dice,
    operations: u64,
}

impl Bystander {
    /// Moves bytes from one end to the other, or adds to some.
    fn step(&mut self) {
        let dice = &mut self.dice;
        let most = *dice.pick(&[64, 4096, MESSAGE_BYTES]);
        let len = 1 + dice.below(most);
        let [here, there] = [(); 2].map(|()| dice.below((BYTES - len) / 8) * 8);
        let pair = &mut self.pairs[dice.below(2) as usize];
        let [mut near, mut far] = pair.each_mut();
        if dice.below(2) == 0 {
            std::mem::swap(&mut near, &mut far);
        }
        near.renew(dice, here, len);
        let number = self.operations;
        let remote = far.side.mr.remote(there..there + len).unwrap();
        let local = near.side.sge(here, len);
        let (request, opcode) = match dice.below(4) {
            0 => (SendRequest::write(local, remote), WcOpcode::Write),
            1 => (SendRequest::read(local, remote), WcOpcode::Read),
            2 => {
                let receive = RecvRequest::new(number, far.side.sge(there, len));
                far.side.qp.post_recv(receive).unwrap();
                (SendRequest::send(local), WcOpcode::Send)
            }
            _ => {
                let word = far.side.mr.remote(there..there + 8).unwrap();
                let local = near.side.sge(here, 8);
                (SendRequest::fetch_add(local, word, number), WcOpcode::FetchAdd)
            }
        };
        near.side.qp.post_send(request.wr_id(number).signaled()).unwrap();
        near.side.expect(number, opcode);
        let [own, other] = [here, there].map(|at| at as usize..(at + len) as usize);
        match opcode {
            WcOpcode::Read => near.expected[own].copy_from_slice(&far.expected[other]),
            WcOpcode::FetchAdd => {
                let (before, _) = far.expected[other.start..].split_first_chunk().unwrap();
                let sum = u64::from_ne_bytes(*before).wrapping_add(number);
                near.expected[own.start..own.start + 8].copy_from_slice(before);
                far.expected[other.start..other.start + 8].copy_from_slice(&sum.to_ne_bytes());
            }
            _ => far.expected[other].copy_from_slice(&near.expected[own]),
        }
        if opcode == WcOpcode::Send {
            let wc = far.side.expect(number, WcOpcode::Recv);
            assert_eq!(u64::from(wc.byte_len), len);
        }
        self.operations += 1;
        if self.operations.is_multiple_of(32) {
            self.check();
        }
    }

    fn check(&self) {
        self.pairs.iter().flatten().for_each(End::check);
    }
}

/// Sends its [`Target`]s as JSON, and then, for each message, the number of operations so far, all of them exact;
/// [`END`] ends it.
pub(crate) fn run(socket: BorrowedFd<'_>, addresses: [IpAddr; 2], seed: u64) {
    rdmux_share::register();
    let pairs = [0, CLASS_4].map(|traffic_class| {
        let mut ends = addresses.map(End::open);
        let [near, far] = &mut ends;
        let params = ConnectParams {
            traffic_class,
            ..ConnectParams::default()
        };
        connect(&mut near.side, &mut far.side, PORT, &params);
        ends
    });
    let mut bystander = Bystander {
        pairs,
        dice: Dice(seed),
        operations: 1,
    };
    let targets: Vec<Target> = bystander.pairs.iter().flatten().map(End::target).collect();
    send_bytes(socket, &serde_json::to_vec(&targets).unwrap(), &[]).unwrap();
    loop {
        bystander.step();
        let now = Default::default();
        if poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&now)) == Ok(0) {
            continue;
        }
        bystander.check();
        let mut message = [0; 8];
        let (len, _) = receive_with_descriptors(socket, &mut message).unwrap();
        if message[..len] == *END {
            return;
        }
        send_bytes(socket, bystander.operations.to_string().as_bytes(), &[]).unwrap();
    }
}
