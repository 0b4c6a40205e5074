//! Fault injection over sockets and over shared memory: each kind has its effect, programs still get what they are promised, and
//! one seed makes one sequence of decisions.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::process::Command;
use std::time::{Duration, Instant};

use common::{End, LONG, connect_ends, shareable};
use rdmux_verbs::faults::{Line, Spec, Stream};
use rdmux_verbs::*;

const BYTES: u32 = 64 << 10;
const ROUNDS: u64 = 60;

fn spec(text: &str) -> Spec {
    text.parse().unwrap()
}

/// Makes an end on a device with faults.
fn end_with(address: [u8; 4], faults: Option<Spec>, shared_memory: SharedMemory, qp_type: QpType) -> End {
    let options = Options {
        faults,
        shared_memory,
        ..Options::default()
    };
    let device = common::open_with(address.into(), options).unwrap();
    End::with(&device, shareable(BYTES as usize), |_, options| QpOptions {
        qp_type,
        ..options
    })
}

impl End {
    /// Posts a request with the first `bytes` bytes of the memory.
    fn post_bytes(&self, operation: Operation, bytes: u32) {
        self.post(operation, self.mr.sge(0, bytes));
    }

    fn receive(&self, bytes: u32) {
        let sges = self.mr.sge(0, bytes).into();
        self.qp.post_recv(RecvRequest { wr_id: 2, sges }).unwrap();
    }

    fn write(&self, to: &End, bytes: u32) -> Status {
        let (va, rkey) = (to.mr.iova(), to.mr.rkey());
        self.post_bytes(Operation::Write { va, rkey, imm: None }, bytes);
        self.wait().status
    }

    fn fill(&self, value: u8) {
        self.memory.write(0, &vec![value; BYTES as usize]).unwrap();
    }

    fn holds(&self, value: u8) -> bool {
        let mut bytes = vec![0; BYTES as usize];
        self.memory.read(0, &mut bytes).unwrap();
        bytes.iter().all(|byte| *byte == value)
    }
}

/// Two connected ends, the first with faults, on addresses of a test's own.
struct Pair {
    faulty: End,
    sound: End,
    _connections: [Connection; 2],
}

/// Runs a test over each carrier in turn.
fn over_each_carrier(net: u8, text: &str, test: impl Fn(&Pair)) {
    for (host, shared_memory) in [(1, SharedMemory::Off), (3, SharedMemory::Auto)] {
        let open = |host, faults| end_with([127, 0, net, host], faults, shared_memory, QpType::Rc);
        let (faulty, sound) = (open(host, Some(spec(text))), open(host + 1, None));
        let connections = connect_ends(&faulty, &sound);
        let carried = |end: &End| end.qp.carrier() == Some(Carrier::SharedMemory);
        let deadline = Instant::now() + LONG;
        while shared_memory == SharedMemory::Auto && !(carried(&faulty) && carried(&sound)) {
            assert!(Instant::now() < deadline, "{:?}", faulty.qp.carrier());
            std::thread::yield_now();
        }
        let pair = Pair {
            faulty,
            sound,
            _connections: connections,
        };
        test(&pair);
        for end in [&pair.faulty, &pair.sound] {
            assert_eq!(end.device.counters().direct_requests, 0, "all goes by packets");
        }
        let local = pair.sound.device.counters().rcvd_pkts_local;
        assert_eq!(
            local > 0,
            shared_memory == SharedMemory::Auto,
            "{local} packets by memory"
        );
    }
}

/// Writes both ways, and checks that the bytes arrive.
fn write_both_ways(pair: &Pair) {
    for round in 0..ROUNDS {
        let value = round as u8 + 1;
        for (from, to) in [(&pair.faulty, &pair.sound), (&pair.sound, &pair.faulty)] {
            from.fill(value);
            to.fill(0);
            assert_eq!(from.write(to, BYTES), Status::Success);
            assert!(to.holds(value), "round {round}");
        }
    }
}

#[test]
fn loss__is_made_up_for() {
    over_each_carrier(80, "loss=5%,seed=2", |pair| {
        write_both_ways(pair);
        let counts = pair.faulty.device.fault_counts().unwrap();
        assert!(
            counts.lost * 50 > counts.packets && counts.lost * 10 < counts.packets,
            "{counts:?}"
        );
        for end in [&pair.faulty, &pair.sound] {
            assert!(end.device.counters().retransmitted_packets > 0);
        }
        assert_eq!(pair.sound.device.fault_counts(), None);
    });
}

#[test]
fn dup__takes_effect_once() {
    over_each_carrier(81, "dup=20%", |pair| {
        write_both_ways(pair);
        assert!(pair.faulty.device.fault_counts().unwrap().duplicated > 0);
        let repeats = |end: &End| {
            let counters = end.device.counters();
            counters.duplicate_request + counters.stale_responses
        };
        assert!(repeats(&pair.faulty) > 0 && repeats(&pair.sound) > 0);
    });
}

#[test]
fn only__cm_messages_when_these_are_asked_for() {
    over_each_carrier(79, "dup=100%,only=cm", |pair| {
        write_both_ways(pair);
        let counts = pair.faulty.device.fault_counts().unwrap();
        // Connecting takes some messages, writing takes thousands.
        assert!(
            counts.duplicated > 0 && counts.duplicated * 10 < counts.packets,
            "{counts:?}"
        );
    });
}

#[test]
fn reorder__is_put_right() {
    over_each_carrier(82, "reorder=10%", |pair| {
        write_both_ways(pair);
        assert!(pair.faulty.device.fault_counts().unwrap().reordered > 0);
        assert!(pair.faulty.device.counters().out_of_sequence > 0);
        assert!(pair.sound.device.counters().out_of_sequence > 0);
    });
}

#[test]
fn corrupt__is_noticed() {
    over_each_carrier(83, "corrupt=5%,seed=3", |pair| {
        write_both_ways(pair);
        let counts = pair.faulty.device.fault_counts().unwrap();
        assert!(counts.corrupted > 0, "{counts:?}");
        let dropped = |end: &End| {
            let counters = end.device.counters();
            // The part that was damaged decides which counter rises.
            counters.rx_icrc_encapsulated + counters.malformed + counters.no_qp + counters.bad_pkey
        };
        assert!(dropped(&pair.faulty) > 0);
        // Shared memory carries no damaged packet: its receiver would not check it.
        let local = pair.faulty.qp.carrier() == Some(Carrier::SharedMemory);
        assert_eq!(dropped(&pair.sound) > 0, !local);
    });
}

#[test]
fn delay__is_waited_for() {
    over_each_carrier(84, "delay=3ms..5ms", |pair| {
        for (from, to) in [(&pair.faulty, &pair.sound), (&pair.sound, &pair.faulty)] {
            let since = Instant::now();
            assert_eq!(from.write(to, 8), Status::Success);
            let took = since.elapsed();
            assert!(took >= Duration::from_millis(6), "{took:?} there and back");
        }
    });
}

#[test]
fn rate__is_kept() {
    over_each_carrier(85, "rate=20Mbit", |pair| {
        for (from, to) in [(&pair.faulty, &pair.sound), (&pair.sound, &pair.faulty)] {
            let since = Instant::now();
            assert_eq!(from.write(to, BYTES), Status::Success);
            let least = Duration::from_nanos(u64::from(BYTES) * 8 * 50);
            let took = since.elapsed();
            assert!(took >= least, "{took:?}, at the rate {least:?}");
        }
    });
}

#[test]
fn rnr__though_a_receive_is_there() {
    over_each_carrier(86, "rnr=40%,seed=5", |pair| {
        let (responder, requester) = (&pair.faulty, &pair.sound);
        for imm in [None, Some(7)] {
            for _ in 0..20 {
                responder.receive(64);
                let (va, rkey) = (responder.mr.iova(), responder.mr.rkey());
                requester.post_bytes(
                    match imm {
                        None => Operation::Send { imm: None },
                        imm => Operation::Write { va, rkey, imm },
                    },
                    64,
                );
                assert_eq!(requester.wait().status, Status::Success);
                assert_eq!(responder.wait().status, Status::Success);
            }
        }
        let (sent, received) = (responder.device.counters(), requester.device.counters());
        assert!(
            sent.resources_rnr_nak >= 8,
            "{} RNR NAKs for 40 receives",
            sent.resources_rnr_nak
        );
        assert_eq!(sent.resources_rnr_nak, received.rcvd_rnr_err);
    });
}

#[test]
fn qp_error__fails_the_queue_pair_of_that_packet() {
    over_each_carrier(87, "qp-error=10", |pair| {
        let failed = &pair.faulty;
        let deadline = Instant::now() + LONG;
        while failed.qp.query().unwrap().state != QpState::Error {
            assert!(Instant::now() < deadline, "it never fails");
            let (va, rkey) = (failed.mr.iova(), failed.mr.rkey());
            pair.sound.post_bytes(Operation::Write { va, rkey, imm: None }, 8);
            pair.sound.cq.wait(Duration::from_millis(100)).unwrap();
        }
        let event = failed.device.wait_async_event(LONG);
        assert_eq!(event, Some(AsyncEvent::QpFatal(failed.qp.qpn())));
        assert_eq!(failed.device.fault_counts().unwrap().qp_errors, 1);
        assert_eq!(failed.qp.error(), Some(Status::LocalQpOperation));
        failed.receive(8);
        assert_eq!(failed.wait().status, Status::Flushed);
    });
}

#[test]
fn down__then_up_again() {
    let ends = [1, 2].map(|host| {
        let faults = (host == 1).then(|| spec("down=0s..300ms"));
        end_with([127, 0, 88, host], faults, SharedMemory::Off, QpType::Rc)
    });
    let [faulty, sound] = &ends;
    // The client asks again until the server answers.
    let _connections = connect_ends(faulty, sound);
    let events = [(); 2].map(|()| faulty.device.wait_async_event(LONG));
    assert_eq!(events, [AsyncEvent::PortError, AsyncEvent::PortActive].map(Some));
    assert_eq!(faulty.write(sound, BYTES), Status::Success);
    assert!(
        faulty.device.fault_counts().unwrap().lost > 0,
        "it asked while it was down"
    );
}

/// Lets a device whose port delays packets end by `end` while a SEND waits there; its peer must receive it.
fn delayed_send_at_the_end(net: u8, end: impl Fn(End, &dyn Fn() -> bool)) {
    for (host, shared_memory) in [(1, SharedMemory::Off), (3, SharedMemory::Auto)] {
        let open = |host, faults| end_with([127, 0, net, host], faults, shared_memory, QpType::Uc);
        let (faulty, sound) = (open(host, Some(spec("delay=3600s"))), open(host + 1, None));
        faulty.bring_up(&sound);
        sound.bring_up(&faulty);
        let deadline = Instant::now() + LONG;
        while shared_memory == SharedMemory::Auto && faulty.qp.carrier() != Some(Carrier::SharedMemory) {
            assert!(Instant::now() < deadline, "{:?}", faulty.qp.carrier());
            std::thread::yield_now();
        }
        sound.receive(8);
        faulty.post_bytes(
            Operation::Send {
                imm: Some(host.into()),
            },
            8,
        );
        assert_eq!(faulty.wait().status, Status::Success);
        end(faulty, &|| {
            assert!(Instant::now() < deadline, "nothing arrives");
            sound.device.counters().rcvd_pkts == 0
        });
        let received = sound.wait();
        assert_eq!(
            (received.status, received.imm),
            (Status::Success, Some(host.into()))
        );
    }
}

#[test]
fn delay__ends_when_the_device_is_closed() {
    delayed_send_at_the_end(77, |faulty, _| drop(faulty));
}

#[test]
fn delay__ends_when_a_process_sends_what_is_pending() {
    delayed_send_at_the_end(78, |faulty, is_missing| {
        // A call does nothing while the device's thread is at work.
        while is_missing() {
            faulty.device.acknowledge();
        }
    });
}

/// Brings a queue pair up towards another one, with a timeout and retries that end soon.
fn bring_up(own: &End, peer: &End) {
    let mut steps = common::towards(&own.qp, peer.device.address(), peer.qp.qpn(), 0);
    let to_send = &mut steps[2].1;
    (to_send.timeout, to_send.retry_count) = (Some(10), Some(2));
    common::bring_up(&own.qp, steps);
}

#[test]
fn down__for_good() {
    for (host, shared_memory) in [(1, SharedMemory::Off), (3, SharedMemory::Auto)] {
        let open = |host, faults| end_with([127, 0, 89, host], faults, shared_memory, QpType::Rc);
        let (faulty, sound) = (open(host, Some(spec("down=0s.."))), open(host + 1, None));
        bring_up(&faulty, &sound);
        bring_up(&sound, &faulty);
        assert_eq!(faulty.device.wait_async_event(LONG), Some(AsyncEvent::PortError));
        assert_eq!(faulty.write(&sound, 8), Status::RetryExceeded, "nothing is sent");
        assert_eq!(sound.device.counters().rcvd_pkts, 0);
        assert_eq!(
            sound.write(&faulty, 8),
            Status::RetryExceeded,
            "nothing is received"
        );
        assert_eq!(faulty.device.counters().rcvd_pkts, 0);
    }
}

/// Returns which of many datagrams arrive, in their order, when the sender's port misbehaves.
fn datagrams_that_arrive(text: &str, count: u32) -> Vec<u32> {
    let end = |host, faults| {
        let end = end_with([127, 0, 90, host], faults, SharedMemory::Off, QpType::Ud);
        end.qp.ready_datagram(RDMA_UDP_QKEY).unwrap();
        end
    };
    let (from, to) = (end(1, Some(spec(text))), end(2, None));
    let handle = from.device.create_ah(to.device.address(), 0);
    let target = handle.to(to.qp.qpn(), RDMA_UDP_QKEY).unwrap();
    let mut found = Vec::new();
    for number in 0..count {
        to.receive(64);
        let request = SendRequest {
            wr_id: 1,
            operation: Operation::Send { imm: Some(number) },
            sges: from.mr.sge(0, 8).into(),
            flags: SendFlags::SIGNALED,
            to: target,
        };
        from.qp.post_send(request).unwrap();
        assert_eq!(from.wait().status, Status::Success);
    }
    // All datagrams have been sent by now, and loopback loses none of so few.
    while let Some(wc) = to.cq.wait(Duration::from_millis(200)).unwrap() {
        found.push(wc.imm.expect("a number"));
    }
    found
}

#[test]
fn seed__decides_packet_by_packet() {
    const COUNT: u32 = 100;
    let text = "loss=30%,dup=10%,seed=11";
    let first = datagrams_that_arrive(text, COUNT);
    let mut line = Line::new(spec(text), Stream::Sent);
    let kept: Vec<u32> = (0..COUNT).filter(|_| !line.next_fate().lost).collect();
    let mut once = first.clone();
    once.sort_unstable();
    assert!(once.len() > kept.len(), "some come twice");
    once.dedup();
    assert_eq!(once, kept);
    let sorted = |mut numbers: Vec<u32>| {
        numbers.sort_unstable();
        numbers
    };
    assert_eq!(sorted(datagrams_that_arrive(text, COUNT)), sorted(first.clone()));
    let other = datagrams_that_arrive("loss=30%,dup=10%,seed=12", COUNT);
    assert_ne!(sorted(other), sorted(first));
}

/// Set for the process that [`environment__says_it_for_every_program`] starts.
const INSIDE: &str = "RDMUX_FAULTS_INSIDE";

/// Returns the outcome of opening a device in a process with this environment variable.
fn opened_with(faults: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "environment__opens_a_device", "--nocapture"]);
    let output = command
        .envs([("RDMUX_FAULT", faults), (INSIDE, "1")])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn environment__opens_a_device() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    match common::open([127, 0, 91, 1].into()) {
        Ok(device) => println!("lost: {:?}", device.fault_counts().map(|counts| counts.lost)),
        Err(error) => println!("error: {error}"),
    }
}

#[test]
fn environment__says_it_for_every_program() {
    assert!(opened_with("loss=1%,seed=9").contains("lost: Some(0)"));
    assert!(opened_with("").contains("lost: None"));
    let error = opened_with("loss=1%,delay=5");
    let expected = "error: RDMUX_FAULT: 'delay=5': give a time, or two: delay=5ms, delay=1ms..20ms\n";
    assert!(error.contains(expected), "{error}");
}
