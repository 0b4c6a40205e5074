//! Counters of a device. They only grow. Names follow rxe's and mlx5's `hw_counters` where those have one.

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Event counts of a device since its creation.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Counters {
            /// Name, value and meaning of each counter.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64, &'static str)> {
                [$((stringify!($name), self.$name, concat!($($doc),+).trim_ascii_start())),+].into_iter()
            }

            /// Returns the counters of these values, in the order of [`Counters::iter`]; those that have none are 0.
            pub fn of_values(values: &[u64]) -> Counters {
                let mut values = values.iter().copied();
                Counters {
                    $($name: values.next().unwrap_or(0),)+
                }
            }
        }
    };
}

counters! {
    /// RoCEv2 packets received, good or bad.
    rcvd_pkts,
    /// RoCEv2 packets built to be sent.
    sent_pkts,
    /// Bytes of RoCEv2 packets received, from BTH to ICRC.
    rcvd_bytes,
    /// Bytes of RoCEv2 packets built to be sent, from BTH to ICRC.
    sent_bytes,
    /// RoCEv2 packets received through memory of this host; these are in `rcvd_pkts` too.
    rcvd_pkts_local,
    /// RoCEv2 packets whose payload was copied once, out of memory of a peer on this host; these are in `rcvd_pkts_local` too.
    rcvd_pkts_named,
    /// WRITEs and READs executed in memory that a peer on this host granted, without packets.
    direct_requests,
    /// Bytes written and read in memory that a peer on this host granted, without packets.
    direct_bytes,
    /// WRITEs with immediate data to a peer on this host, which go as packets because they consume a receive.
    by_packets_immediate,
    /// WRITEs and READs to a peer on this host that went as packets because their QP sends at a limited rate.
    by_packets_rate_limited,
    /// WRITEs and READs to a peer on this host that went as packets because it had not granted the memory.
    by_packets_not_granted,
    /// WRITEs and READs to a peer on this host that went as packets because requests before them were not answered yet.
    by_packets_behind_others,
    /// Regions granted to peers on this host.
    grants,
    /// Packets dropped because they are malformed.
    malformed,
    /// Packets dropped because their ICRC is wrong.
    rx_icrc_encapsulated,
    /// Packets dropped because no QP of their transport has their number.
    no_qp,
    /// Packets dropped because their addresses are not those of the QP's peer.
    wrong_peer,
    /// Packets dropped because their partition key does not match.
    bad_pkey,
    /// Packets dropped because the QP's state does not accept packets.
    wrong_state,
    /// Datagrams dropped because their Q_Key is not that of the QP. IBTA Vol 1, 10.2.5.
    bad_qkey,
    /// Messages of UC and UD dropped because no receive was posted.
    resources_dropped,
    /// Messages of UC dropped because a packet is missing, has the wrong length, or requests an operation without the right to it.
    dropped_messages,
    /// Requests dropped because the peer exceeds its limit of open requests.
    dropped_busy,
    /// Requests that had been executed before.
    duplicate_request,
    /// Requests after a gap.
    out_of_sequence,
    /// Requests after a gap that were kept for later execution.
    kept_requests,
    /// READ responses after a gap that were kept for later execution.
    kept_responses,
    /// Packets sent to detect losses when no response arrived.
    tail_probes,
    /// Responses to requests that are not open.
    stale_responses,
    /// READ responses after a gap.
    out_of_seq_responses,
    /// NAKs received that report a gap.
    packet_seq_err,
    /// RNR NAKs received.
    rcvd_rnr_err,
    /// RNR NAKs sent.
    resources_rnr_nak,
    /// NAKs sent that end a connection.
    sent_naks,
    /// Timeouts of the local ACK timer.
    local_ack_timeout_err,
    /// Timeouts of the local ACK timer at which a peer on this host had not yet received the packets; nothing was retransmitted.
    local_stalls,
    /// Packets retransmitted.
    retransmitted_packets,
    /// Requests that failed because no retry was left.
    retry_exceeded_err,
    /// Packets of connections received that a switch had marked (ECN).
    np_ecn_marked_roce_packets,
    /// Congestion notification packets sent.
    np_cnp_sent,
    /// Congestion notification packets received that slowed a QP down.
    rp_cnp_handled,
    /// Send requests that completed with an error other than a flush.
    req_cqe_error,
    /// Send requests flushed because their QP was in error.
    req_cqe_flush_error,
    /// Receive requests that completed with an error other than a flush.
    resp_cqe_error,
    /// Receive requests flushed because their QP was in error.
    resp_cqe_flush_error,
    /// Events that armed completion queues raised.
    cq_events,
    /// Completions polled from completion queues.
    cq_completions,
    /// Changes of the moderation of completion queues by an adaptive policy.
    cq_moderation_changes,
    /// FLUSHes with the ICRC of rxe.
    rxe_flush_icrc,
    /// IPv4 packets whose identification was found by solving the ICRC for it, with 16 check bits left.
    icrc_residual_16,
}
