//! Goodput under the virtual clock: streams of WRITEs from several hosts to one, each over a QP of its own.

use std::sync::Arc;

use rdmux_rnic::{
    Access, Cqn, HeapMemory, LKey, Operation, Path, Psn, QpAttributes, QpInit, QpState, Qpn, RKey,
    RegionSpec, SendFlags, SendRequest, Sge, Status, Target,
};

use crate::network::Network;
pub use crate::network::{LinkProperties, Marking, Switched};

/// Address by which each host names its memory.
const IOVA: u64 = 1 << 40;

/// Parameters of a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Streams {
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Sending hosts, at most 250.
    pub senders: u8,
    /// Bytes of each WRITE.
    pub message_bytes: u32,
    /// WRITEs that each sender keeps posted.
    pub posted: u32,
    /// Path MTU.
    pub path_mtu: u32,
    /// Bytes that each QP may have in flight.
    pub window_bytes: u32,
    /// Set when both ends retransmit selectively.
    pub selective: bool,
    /// Local ACK timeout code.
    pub timeout: u8,
    /// Time before the measurement begins.
    pub warm_up_ns: u64,
    /// Time measured.
    pub measured_ns: u64,
}

/// Result of a measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct Goodput {
    /// Payload bytes of the WRITEs that each sender completed during the measurement.
    pub bytes: Vec<u64>,
    /// Counts of the switch before the measurement began.
    pub before: Switched,
    /// Counts of the switch from then on.
    pub switched: Switched,
}

impl Goodput {
    /// Payload of all senders, as a share of what `link` carries in the time measured.
    pub fn share_of(&self, link: &LinkProperties, streams: &Streams) -> f64 {
        let carried = link.bits_per_second as f64 / 8.0 * streams.measured_ns as f64 / 1e9;
        self.bytes.iter().sum::<u64>() as f64 / carried
    }

    /// Jain's index of fairness: 1 when all senders got the same, 1 / n when one got all.
    pub fn fairness(&self) -> f64 {
        let sum: f64 = self.bytes.iter().map(|b| *b as f64).sum();
        let squares: f64 = self.bytes.iter().map(|b| (*b as f64).powi(2)).sum();
        sum * sum / (self.bytes.len() as f64 * squares)
    }
}

struct StreamEnd {
    qpn: Qpn,
    cq: Cqn,
    lkey: LKey,
    rkey: RKey,
}

/// Measures `streams` over `link`.
///
/// # Panics
/// When a WRITE fails: nothing here can be lost for good.
pub fn measure(link: &LinkProperties, streams: &Streams) -> Goodput {
    let senders = usize::from(streams.senders);
    let mut network = Network::new(streams.seed, *link, streams.senders + 1);
    let ends = connect(&mut network, streams);
    let (begin, end) = (
        network.now + streams.warm_up_ns,
        network.now + (streams.warm_up_ns + streams.measured_ns),
    );
    let (mut bytes, mut before) = (vec![0; senders], None);
    for (sender, (own, peer)) in ends.iter().enumerate() {
        for _ in 0..streams.posted {
            post(&mut network, sender, own, peer.rkey, streams.message_bytes);
        }
    }
    while let Some(host) = network.step(end) {
        if before.is_none() && network.now >= begin {
            before = Some(std::mem::take(&mut network.switched));
        }
        let Some((own, peer)) = ends.get(host) else {
            continue;
        };
        while let Some(wc) = network.hosts[host].rnic.poll_cq(own.cq) {
            assert_eq!(wc.status, Status::Success, "WRITE of sender {host}");
            if network.now >= begin {
                bytes[host] += u64::from(streams.message_bytes);
            }
            post(&mut network, host, own, peer.rkey, streams.message_bytes);
        }
    }
    Goodput {
        bytes,
        before: before.unwrap_or_default(),
        switched: network.switched,
    }
}

fn post(network: &mut Network, host: usize, own: &StreamEnd, rkey: RKey, bytes: u32) {
    let request = SendRequest {
        wr_id: 0,
        operation: Operation::Write {
            va: IOVA,
            rkey,
            imm: None,
        },
        sges: Sge::new(IOVA, bytes, own.lkey).into(),
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    };
    let posted = network.with(host, |rnic, now| rnic.post_send(now, own.qpn, request));
    posted.expect("room for as many as were posted before");
}

/// Connects every sender to the last host. Returns each sender's own end and the one at the last host.
fn connect(network: &mut Network, streams: &Streams) -> Vec<(StreamEnd, StreamEnd)> {
    let sink = usize::from(streams.senders);
    let pairs = (0..sink).map(|sender| {
        let ends = [sender, sink].map(|host| make_end(network, host, streams));
        for (host, own, peer) in [(sender, 0, 1), (sink, 1, 0)] {
            let to = if host == sink { sender } else { sink };
            let path = Path {
                src: network.hosts[host].address,
                dst: network.hosts[to].address,
                src_port: 0xc001,
                traffic_class: 0,
            };
            bring_up(network, host, &ends[own], ends[peer].qpn, path, streams);
        }
        ends.into()
    });
    pairs.collect()
}

fn make_end(network: &mut Network, host: usize, streams: &Streams) -> StreamEnd {
    network.with(host, |rnic, _| {
        let pd = rnic.alloc_pd();
        let spec = RegionSpec {
            memory: Arc::new(HeapMemory::new(streams.message_bytes as usize)),
            memory_offset: 0,
            length: streams.message_bytes.into(),
            iova: IOVA,
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        };
        let (lkey, rkey) = rnic
            .reg_mr(pd, spec)
            .expect("the region lies inside of its memory");
        let cq = rnic.create_cq(streams.posted);
        let init = QpInit {
            max_send_wr: streams.posted,
            max_recv_wr: 0,
            ..QpInit::new(pd, cq)
        };
        let qpn = rnic.create_qp(init).expect("PD and CQ were just made");
        StreamEnd { qpn, cq, lkey, rkey }
    })
}

fn bring_up(network: &mut Network, host: usize, own: &StreamEnd, peer: Qpn, path: Path, streams: &Streams) {
    let init = QpAttributes {
        access: Some(Access::REMOTE_WRITE),
        ..Default::default()
    };
    let to_receive = QpAttributes {
        path: Some(path),
        path_mtu: Some(streams.path_mtu),
        dest_qpn: Some(peer),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(16),
        min_rnr_timer: Some(1),
        window_bytes: Some(streams.window_bytes),
        peer_is_rdmux: Some(true),
        selective: Some(streams.selective),
        ..Default::default()
    };
    let to_send = QpAttributes {
        sq_psn: Some(Psn::new(0)),
        timeout: Some(streams.timeout),
        retry_count: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(16),
        ..Default::default()
    };
    for (state, attributes) in [
        (QpState::Init, init),
        (QpState::Rtr, to_receive),
        (QpState::Rts, to_send),
    ] {
        let modified = network.with(host, |rnic, now| rnic.modify_qp(now, own.qpn, state, &attributes));
        modified.expect("the attributes are those that the transition asks for");
    }
}
