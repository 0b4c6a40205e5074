//! The peer of lab/peer/verbs.c, scenario by scenario.

use std::net::IpAddr;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rdmux_memory::DaxMemory;
use rdmux_verbs::{
    Access, Arm, AsyncEvent, Bind, Memory, MemoryWindow, Operation, Placement, QpType, Qpn, RKey,
    Selectivity, SendFlags, SendRequest, Status, Target, WindowType,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::side::{GRH, MEMORY, ManualQp, SETTLE, Side, all_rights, expect_imm};
use super::{Scenario, WAIT, expect, expect_pattern, expect_status, pattern_bytes, say};

/// A key that nobody has.
const WRONG: RKey = RKey(0xdead_be00);

pub(super) const SCENARIOS: &[Scenario] = &[
    ("send", send),
    ("solicited", solicited),
    ("not-ready", not_ready),
    ("write", write),
    ("read", read),
    ("atomics", atomics),
    ("atomic-write", atomic_write),
    ("flush", flush),
    ("flush-dax", flush_dax),
    ("window-1", window_1),
    ("window-2", window_2),
    ("send-invalidate", send_invalidate),
    ("srq", shared_receives),
    ("refusals", refusals),
    ("wrong-invalidate", wrong_invalidate),
    ("uc", unreliable),
    ("uc-many", |side| many(side, QpType::Uc, 3000)),
    ("ud", datagrams),
    ("ud-many", |side| many(side, QpType::Ud, 1000)),
    ("multicast", multicast),
];

fn send(s: &Side) -> Result<()> {
    const LENGTHS: [u32; 5] = [0, 1, 4096, 12289, 1000];
    let mut e = ManualQp::new(s, QpType::Rc, Access::empty())?;
    if s.asks {
        s.put_pattern(0, 20000)?;
    } else {
        for i in 0..5 {
            e.post_receive(i.into(), 13000 * i, 13000)?;
        }
    }
    e.join(&s.memory_mr)?;
    if s.asks {
        let mut list: Vec<_> = (0..).zip(LENGTHS).map(|(i, n)| e.send(i, n)).collect();
        list[4] = e.send_imm(4, 1000, 0x0102_0304);
        e.run("SEND", list)?;
    } else {
        for (i, length) in (0..).zip(LENGTHS) {
            let wc = e.received(i.into(), length)?;
            expect_pattern("SEND", &s.local(13000 * i, length)?, i)?;
            if i == 4 {
                expect_imm(&wc, 0x0102_0304)?;
            }
        }
    }
    e.close()
}

fn has_event(e: &ManualQp<'_>, timeout: Duration) -> Result<bool> {
    let mut fds = [PollFd::new(&e.cq, PollFlags::IN)];
    Ok(poll(&mut fds, Some(&Timespec::try_from(timeout)?))? > 0)
}

fn solicited(s: &Side) -> Result<()> {
    let mut e = ManualQp::new(s, QpType::Rc, Access::empty())?;
    if !s.asks {
        for i in 0..2 {
            e.post_receive(i, 0, 64)?;
        }
        e.cq.arm(Arm::Solicited);
    }
    e.join(&s.memory_mr)?;
    if s.asks {
        e.run("SEND", vec![e.send(0, 8)])?;
    }
    s.barrier()?;
    if !s.asks {
        ensure!(
            !has_event(&e, Duration::ZERO)?,
            "a SEND that is not solicited woke the receiver"
        );
    }
    s.barrier()?;
    if s.asks {
        let mut request = e.send(0, 8);
        request.flags |= SendFlags::SOLICITED;
        e.run("solicited SEND", vec![request])?;
    } else {
        ensure!(has_event(&e, WAIT)?, "a solicited SEND did not wake the receiver");
        for i in 0..2 {
            e.received(i, 8)?;
        }
    }
    e.close()
}

fn not_ready(s: &Side) -> Result<()> {
    let mut e = ManualQp::new(s, QpType::Rc, Access::empty())?;
    if s.asks {
        s.put_pattern(0, 100)?;
    }
    let rnr_naks = s.rnr_naks();
    e.join(&s.memory_mr)?;
    if s.asks {
        e.run("SEND", vec![e.send(0, 100)])?;
    } else {
        s.await_rnr_nak(rnr_naks)?;
        for i in 0..2 {
            e.post_receive(i.into(), 100 * i, 100)?;
        }
        e.received(0, 100)?;
        expect_pattern("SEND", &s.local(0, 100)?, 0)?;
    }
    s.barrier()?;
    ensure!(e.cq.poll().is_none(), "there is a completion too many");
    e.close()
}

fn write(s: &Side) -> Result<()> {
    let mut e = ManualQp::new(s, QpType::Rc, Access::REMOTE_WRITE)?;
    if s.asks {
        s.put_pattern(0, 30000)?;
    } else {
        e.post_receive(0, 0, 0)?;
    }
    e.join(&s.memory_mr)?;
    if s.asks {
        let list = vec![
            e.write(e.rkey(), 0, 0, 1),
            e.write(RKey(0x1234_5678), 0, 0, 0),
            e.write(e.rkey(), 1, 1, 4096),
            e.write_imm(4097, 4097, 25903, 0xfffe_fdfc),
        ];
        e.run("WRITE", list)?;
    } else {
        expect_imm(&e.received(0, 25903)?, 0xfffe_fdfc)?;
        expect_pattern("WRITE", &s.memory(0, 30000)?, 0)?;
        expect_zeroes(&s.memory(30000, MEMORY - 30000)?)?;
    }
    e.close()
}

fn expect_zeroes(bytes: &[u8]) -> Result<()> {
    ensure!(
        bytes.iter().all(|byte| *byte == 0),
        "bytes that nobody was to reach have changed"
    );
    Ok(())
}

fn read(s: &Side) -> Result<()> {
    let mut e = ManualQp::new(s, QpType::Rc, Access::REMOTE_READ)?;
    if !s.asks {
        s.memory.write(0, &pattern_bytes(0, 40000))?;
    }
    e.join(&s.memory_mr)?;
    if s.asks {
        let mut list = vec![
            e.read(e.rkey(), 5, 0, 1),
            e.read(RKey(0x1234_5678), 0, 0, 0),
            e.read(e.rkey(), 1, 1, 4096),
            e.read(e.rkey(), 4097, 4097, 35903),
        ];
        if s.lossy && !e.peer_is_rdmux() {
            // rxe does not answer a repeated READ of nothing.
            list.remove(1);
        }
        e.run("READ", list)?;
        expect_pattern("READ", &s.local(0, 1)?, 5)?;
        expect_pattern("READ", &s.local(1, 39999)?, 1)?;
    }
    e.close()
}

fn atomics(s: &Side) -> Result<()> {
    let mut e = ManualQp::new(s, QpType::Rc, Access::REMOTE_ATOMIC)?;
    s.memory.write(8, &1000u64.to_ne_bytes())?;
    e.join(&s.memory_mr)?;
    if s.asks {
        let key = e.rkey();
        let adds = (0..20).map(|i| e.fetch_add(key, 8, 8 * i, 3)).collect();
        e.run("FETCH ADD", adds)?;
        for i in 0..20 {
            expect(
                "FETCH ADD's answer",
                s.local_word(8 * i)?,
                1000 + 3 * u64::from(i),
            )?;
        }
        let list = vec![
            e.compare_swap(key, 8, 0, 1060, 7),
            e.compare_swap(key, 8, 8, 1060, 9),
            e.fetch_add(key, 8, 16, 8u64.wrapping_neg()),
            e.compare_swap(key, 8, 24, u64::MAX, 0x0102_0304_0506_0708),
        ];
        e.run("COMPARE SWAP", list)?;
        expect("answer of a CAS that hits", s.local_word(0)?, 1060)?;
        expect("answer of a CAS that misses", s.local_word(8)?, 7)?;
        expect("answer of a FETCH ADD of -8", s.local_word(16)?, 7)?;
        expect("answer of a CAS of 64 bits", s.local_word(24)?, u64::MAX)?;
    }
    s.barrier()?;
    if !s.asks {
        expect("the word before", s.word(0)?, 0)?;
        expect("the word", s.word(8)?, 0x0102_0304_0506_0708)?;
        expect("the word behind", s.word(16)?, 0)?;
    }
    e.close()
}

fn atomic_write(s: &Side) -> Result<()> {
    let mut e = ManualQp::new(s, QpType::Rc, Access::REMOTE_WRITE | Access::REMOTE_READ)?;
    e.join(&s.memory_mr)?;
    if s.asks {
        s.put_pattern(0, 64)?;
        let value = u64::from_ne_bytes(*b"rdmux/rc");
        let list = vec![
            e.write(e.rkey(), 0, 0, 64),
            e.atomic_write(e.rkey(), 16, value),
            e.read(e.rkey(), 0, 64, 64),
        ];
        e.run("ATOMIC WRITE", list)?;
        expect("what ATOMIC WRITE wrote", s.local_word(64 + 16)?, value)?;
    }
    s.barrier()?;
    if !s.asks {
        expect_pattern("before the ATOMIC WRITE", &s.memory(0, 16)?, 0)?;
        ensure!(
            s.memory(16, 8)? == b"rdmux/rc",
            "ATOMIC WRITE wrote something else"
        );
        expect_pattern("behind the ATOMIC WRITE", &s.memory(24, 40)?, 24)?;
    }
    e.close()
}

fn flush_request(e: &ManualQp<'_>, rkey: RKey, length: u32, selectivity: Selectivity) -> SendRequest {
    flush_to(e, Placement::GLOBAL, rkey, 0, length, selectivity)
}

fn flush_to(
    e: &ManualQp<'_>,
    placement: Placement,
    rkey: RKey,
    at: u32,
    length: u32,
    selectivity: Selectivity,
) -> SendRequest {
    let operation = Operation::Flush {
        va: e.va(at),
        rkey,
        length,
        placement,
        selectivity,
    };
    e.request(operation, 0, 0)
}

fn flush(s: &Side) -> Result<()> {
    let rights = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::FLUSH_GLOBAL;
    let mut e = ManualQp::new(s, QpType::Rc, rights)?;
    if s.asks {
        s.put_pattern(0, 10000)?;
    }
    e.join(&s.memory_mr)?;
    if s.asks {
        let list = vec![
            e.write(e.rkey(), 0, 0, 10000),
            flush_request(&e, e.rkey(), 10000, Selectivity::Range),
            flush_request(&e, e.rkey(), 0, Selectivity::MemoryRegion),
            e.read(e.rkey(), 0, 20000, 10000),
        ];
        e.run("FLUSH", list)?;
        expect_pattern("READ behind FLUSH", &s.local(20000, 10000)?, 0)?;
    }
    s.barrier()?;
    if !s.asks {
        expect_pattern("memory", &s.memory(0, 10000)?, 0)?;
    }
    e.close()
}

/// Runs FLUSH with an answerer whose memory is a device of persistent memory, named by the variable LAB_DAX.
fn flush_dax(s: &Side) -> Result<()> {
    let rights = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::FLUSH_GLOBAL | Access::FLUSH_PERSISTENT;
    let memory = match s.asks {
        true => None,
        false => {
            let device = std::env::var_os("LAB_DAX").context("LAB_DAX names no device")?;
            Some(Arc::new(DaxMemory::device(device.as_ref(), None)?))
        }
    };
    let mr = match &memory {
        Some(memory) => {
            memory.write(0, &[0; 32768])?;
            let access = rights | Access::LOCAL_WRITE;
            Some(s.pd.reg_mr(memory.clone(), 0, 2 << 20, 0x10_0000, access)?)
        }
        None => None,
    };
    let mut e = ManualQp::new(s, QpType::Rc, rights)?;
    if s.asks {
        s.put_pattern(0, 10000)?;
    }
    e.join(mr.as_ref().unwrap_or(&s.memory_mr))?;
    if s.asks {
        let (persistent, both) = (Placement::PERSISTENT, Placement::GLOBAL | Placement::PERSISTENT);
        let list = vec![
            e.write(e.rkey(), 0, 0, 10000),
            flush_to(&e, persistent, e.rkey(), 0, 10000, Selectivity::Range),
            e.write(e.rkey(), 20003, 0, 100),
            flush_to(&e, both, e.rkey(), 0, 0, Selectivity::MemoryRegion),
            e.atomic_write(e.rkey(), 30000, u64::from_ne_bytes(*b"rdmux/pm")),
            flush_to(&e, persistent, e.rkey(), 30000, 8, Selectivity::Range),
            e.read(e.rkey(), 0, 20000, 10000),
        ];
        e.run("FLUSH to persistence", list)?;
        expect_pattern("READ behind FLUSH", &s.local(20000, 10000)?, 0)?;
    }
    s.barrier()?;
    if let Some(memory) = &memory {
        let mut bytes = vec![0; 32768];
        memory.read(0, &mut bytes)?;
        expect_pattern("memory", &bytes[..10000], 0)?;
        expect_pattern("memory of the second WRITE", &bytes[20003..20103], 0)?;
        ensure!(
            &bytes[30000..30008] == b"rdmux/pm",
            "ATOMIC WRITE wrote something else"
        );
    }
    e.close()
}

fn window_rights() -> Access {
    Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
}

/// Binds `length` bytes at 4096 of the memory to a window; returns its new key.
fn bind_1(s: &Side, e: &ManualQp<'_>, window: &MemoryWindow, length: u64) -> Result<RKey> {
    let from = s.memory_mr.iova() + 4096;
    let flags = SendFlags::SIGNALED;
    let key = e.qp.bind_mw(
        0,
        window,
        &s.memory_mr,
        from..from + length,
        window_rights(),
        flags,
    )?;
    expect_status("BIND", &e.completion()?, Status::Success)?;
    Ok(key)
}

fn bind_2(s: &Side, e: &ManualQp<'_>, window: &MemoryWindow) -> Result<RKey> {
    let key = window.rkey().next();
    let bind = Bind {
        window: key,
        region: s.memory_mr.lkey(),
        va: s.memory_mr.iova() + 4096,
        length: 4096,
        access: window_rights(),
    };
    e.run("BIND", vec![e.request(Operation::Bind(bind), 0, 0)])?;
    Ok(key)
}

/// Allocates the answerer's window, if this is the answerer.
fn make_window(s: &Side, window_type: WindowType) -> Result<Option<MemoryWindow>> {
    Ok(match s.asks {
        true => None,
        false => Some(s.pd.alloc_mw(window_type)?),
    })
}

/// Accesses, as the asker, a window that the answerer has bound.
fn use_window(s: &Side, e: &ManualQp<'_>, key: RKey) -> Result<()> {
    s.put_pattern(0, 4096)?;
    let list = vec![
        e.write(key, 4096, 0, 4096),
        e.fetch_add(key, 8192 - 8, 8192, 1),
        e.read(key, 4097, 4096, 4000),
    ];
    e.run("access to a window", list)?;
    expect_pattern("READ of a window", &s.local(4096, 4000)?, 1)?;
    expect(
        "FETCH ADD on a window",
        s.local_word(8192)?,
        s.local_word(4096 - 8)?,
    )
}

fn window_1(s: &Side) -> Result<()> {
    let window = make_window(s, WindowType::One)?;
    let mut e = ManualQp::new(s, QpType::Rc, window_rights())?;
    e.join(&s.memory_mr)?;
    let bind = |e: &ManualQp<'_>, length| match &window {
        Some(window) => s.swap_key(bind_1(s, e, window, length)?),
        None => s.swap_key(RKey(0)),
    };
    let old = bind(&e, 4096)?;
    if s.asks {
        use_window(s, &e, old)?;
    }
    s.barrier()?;
    let key = bind(&e, 2048)?;
    if s.asks {
        e.run("WRITE to a window bound anew", vec![e.write(key, 4096, 0, 8)])?;
        let request = e.write(old, 4096, 0, 8);
        e.fails("WRITE by a window's old key", request, Status::RemoteAccess)?;
    }
    e.close()?;
    let mut e = ManualQp::new(s, QpType::Rc, window_rights())?;
    e.join(&s.memory_mr)?;
    if s.asks {
        e.run(
            "WRITE through another QP to a window of type 1",
            vec![e.write(key, 4096, 0, 8)],
        )?;
        let wanted = match e.peer_is_rdmux() {
            true => Status::RemoteAccess,
            false => Status::Success,
        };
        let request = e.write(key, 4096 + 2048 - 7, 0, 8);
        e.fails("WRITE past the end of a window", request, wanted)?;
    }
    e.close()
}

fn window_2(s: &Side) -> Result<()> {
    let window = make_window(s, WindowType::Two)?;
    let mut other = ManualQp::new(s, QpType::Rc, window_rights())?;
    other.join(&s.memory_mr)?;
    let mut e = ManualQp::new(s, QpType::Rc, window_rights())?;
    e.join(&s.memory_mr)?;
    let own = window.as_ref().map(|window| bind_2(s, &e, window)).transpose()?;
    let key = s.swap_key(own.unwrap_or(RKey(0)))?;
    if s.asks {
        use_window(s, &e, key)?;
        let request = other.write(key, 4096, 0, 8);
        other.fails(
            "WRITE through another QP to a window of type 2",
            request,
            Status::RemoteAccess,
        )?;
    }
    s.barrier()?;
    if let Some(rkey) = own {
        let request = e.request(Operation::LocalInvalidate { rkey }, 0, 0);
        e.run("LOCAL INVALIDATE", vec![request])?;
    }
    s.barrier()?;
    if s.asks {
        let request = e.write(key, 4096, 0, 8);
        e.fails("WRITE to an invalidated window", request, Status::RemoteAccess)?;
    }
    other.close()?;
    e.close()
}

fn send_invalidate(s: &Side) -> Result<()> {
    let window = make_window(s, WindowType::Two)?;
    let mut e = ManualQp::new(s, QpType::Rc, window_rights())?;
    if s.asks {
        s.put_pattern(0, 5000)?;
    } else {
        e.post_receive(0, 0, 5000)?;
    }
    e.join(&s.memory_mr)?;
    let own = window.as_ref().map(|window| bind_2(s, &e, window)).transpose()?;
    let key = s.swap_key(own.unwrap_or(RKey(0)))?;
    if s.asks {
        e.run("WRITE", vec![e.write(key, 4096, 0, 8)])?;
        let request = e.request(Operation::SendInvalidate { rkey: key }, 0, 5000);
        e.run("SEND with invalidate", vec![request])?;
        let request = e.write(key, 4096, 0, 8);
        e.fails(
            "WRITE to a window that the peer invalidated",
            request,
            Status::RemoteAccess,
        )?;
    } else {
        let wc = e.received(0, 5000)?;
        ensure!(
            wc.invalidated == own,
            "the receive tells of {:?}, not {own:?}",
            wc.invalidated
        );
        expect_pattern("SEND with invalidate", &s.local(0, 5000)?, 0)?;
    }
    e.close()
}

fn shared_receives(s: &Side) -> Result<()> {
    let srq = match s.asks {
        true => None,
        false => Some(s.pd.create_srq(16)?),
    };
    let mut ends = Vec::new();
    for _ in 0..2 {
        ends.push(ManualQp::with_srq(s, QpType::Rc, Access::empty(), srq.clone())?);
    }
    if let Some(srq) = &srq {
        for i in 0..5 {
            srq.post_recv(s.receive(i.into(), 5000 * i, 5000))?;
        }
        srq.modify(None, Some(2))?;
    } else {
        s.put_pattern(0, 6000)?;
    }
    let rnr_naks = s.rnr_naks();
    for e in &mut ends {
        e.join(&s.memory_mr)?;
    }
    for i in 0..6 {
        let e = &ends[i as usize % 2];
        match &srq {
            None => {
                e.post(vec![e.send(i, 5000)])?;
                if i == 5 {
                    s.barrier()?;
                }
                expect_status("SEND", &e.completion()?, Status::Success)?;
            }
            Some(srq) => {
                if i == 5 {
                    while !matches!(
                        s.device.wait_async_event(WAIT).context("no event of the SRQ")?,
                        AsyncEvent::SrqLimitReached(srqn) if srqn == srq.srqn()
                    ) {}
                    s.barrier()?;
                    s.await_rnr_nak(rnr_naks)?;
                    srq.post_recv(s.receive(5, 25000, 5000))?;
                }
                let wc = e.received(i.into(), 5000)?;
                ensure!(wc.qpn == e.qp.qpn(), "the receive tells of another QP");
                expect_pattern("SEND", &s.local(5000 * i, 5000)?, i)?;
            }
        }
    }
    for e in ends {
        e.close()?;
    }
    Ok(())
}

/// A request that a responder must refuse: name, rights that the QP lacks, rights that the region lacks, expected status, request.
type Refusal = (
    &'static str,
    Access,
    Access,
    Status,
    fn(&ManualQp<'_>) -> SendRequest,
);

/// Line by line as in verbs.c.
#[rustfmt::skip]
fn refusal_list() -> Vec<Refusal> {
    let none = Access::empty();
    let (access, invalid) = (Status::RemoteAccess, Status::RemoteInvalidRequest);
    let (write, read) = (Access::REMOTE_WRITE, Access::REMOTE_READ);
    let (atomic, flush) = (Access::REMOTE_ATOMIC, Access::FLUSH_GLOBAL);
    vec![
        ("CAS, wrong rkey", none, none, access, |e| e.compare_swap(WRONG, 0, 0, 0, 0)),
        ("FAA, wrong rkey", none, none, access, |e| e.fetch_add(WRONG, 0, 0, 0)),
        ("ATOMIC WRITE, wrong rkey", none, none, access, |e| e.atomic_write(WRONG, 0, 0)),
        ("FLUSH, wrong rkey", none, none, access, |e| flush_request(e, WRONG, 8, Selectivity::Range)),
        ("CAS, misaligned", none, none, invalid, |e| e.compare_swap(e.rkey(), 4, 0, 0, 0)),
        ("FAA, misaligned", none, none, invalid, |e| e.fetch_add(e.rkey(), 1, 0, 0)),
        ("ATOMIC WRITE, misaligned", none, none, invalid, |e| e.atomic_write(e.rkey(), 4, 0)),
        ("FAA past the end", none, none, access, |e| e.fetch_add(e.rkey(), MEMORY, 0, 0)),
        ("ATOMIC WRITE past the end", none, none, access, |e| e.atomic_write(e.rkey(), MEMORY, 0)),
        ("CAS, region without right", none, atomic, access, |e| e.compare_swap(e.rkey(), 0, 0, 0, 0)),
        ("WRITE, region without right", none, write, access, |e| e.write(e.rkey(), 0, 0, 8)),
        ("ATOMIC WRITE, region without right", none, write, access, |e| e.atomic_write(e.rkey(), 0, 0)),
        ("READ, region without right", none, read, access, |e| e.read(e.rkey(), 0, 0, 8)),
        ("FLUSH, region without right", none, flush, access, |e| flush_request(e, e.rkey(), 8, Selectivity::Range)),
        ("CAS, QP without right", atomic, none, invalid, |e| e.compare_swap(e.rkey(), 0, 0, 0, 0)),
        ("WRITE, QP without right", write, none, invalid, |e| e.write(e.rkey(), 0, 0, 8)),
        ("READ, QP without right", read, none, invalid, |e| e.read(e.rkey(), 0, 0, 8)),
        ("SEND longer than the receive", none, none, invalid, |e| e.send(0, 65)),
    ]
}

fn refusals(s: &Side) -> Result<()> {
    for refusal in refusal_list() {
        say(refusal.0)?;
        refuse(s, &refusal)?;
    }
    Ok(())
}

fn refuse(s: &Side, (what, qp_lacks, mr_lacks, wanted, request): &Refusal) -> Result<()> {
    let rights = all_rights() - *mr_lacks;
    let mr = s.pd.reg_mr_all(s.memory.clone(), s.memory.address(), rights)?;
    let mut e = ManualQp::new(s, QpType::Rc, all_rights() - *qp_lacks)?;
    if !s.asks {
        for i in 0..2 {
            e.post_receive(i, 0, 64)?;
        }
    }
    e.join(&mr)?;
    let is_send = *what == "SEND longer than the receive";
    if s.asks {
        let behind = || e.write(e.rkey(), 0, 0, 8);
        let own_refuses = s.device.provider() == "hw" && what.contains("misaligned");
        if own_refuses && e.post(vec![request(&e)]).is_err() {
            // The library refused the request. The peer expects the queue pair to fail, so it gets another request to refuse.
            say("refused here")?;
            e.post(vec![e.fetch_add(WRONG, 0, 0, 0), behind()])?;
            expect_status(what, &e.completion()?, Status::RemoteAccess)?;
            expect_status("the WRITE behind it", &e.completion()?, Status::Flushed)?;
            s.barrier()?;
            return e.close();
        }
        if own_refuses {
            e.post(vec![behind()])?;
        } else {
            e.post(vec![request(&e), behind()])?;
        }
        let wanted = match is_send && !e.peer_is_rdmux() {
            true => Status::RemoteOperation,
            false => *wanted,
        };
        e.expect_refusal(what, &e.completion()?, wanted)?;
        expect_status("the WRITE behind it", &e.completion()?, Status::Flushed)?;
    } else {
        let wc = e.completion()?;
        // rxe reports this status for a receive that is too short.
        let is_rxe = s.device.provider() == "hw" && wc.status == Status::LocalQpOperation;
        match is_send {
            true if is_rxe => {}
            true => expect_status(what, &wc, Status::LocalLength)?,
            false => expect_status(what, &wc, Status::Flushed)?,
        }
        expect_status("a receive", &e.completion()?, Status::Flushed)?;
    }
    s.barrier()?;
    expect_zeroes(&s.memory(0, MEMORY)?)?;
    e.close()
}

fn wrong_invalidate(s: &Side) -> Result<()> {
    let mut e = ManualQp::new(s, QpType::Rc, all_rights())?;
    if !s.asks {
        for i in 0..2 {
            e.post_receive(i, 0, 64)?;
        }
    }
    e.join(&s.memory_mr)?;
    if s.asks {
        let request = e.request(Operation::SendInvalidate { rkey: WRONG }, 0, 8);
        let wanted = match e.peer_is_rdmux() {
            true => Status::RetryExceeded,
            false => Status::Success,
        };
        e.fails("SEND with invalidate, wrong rkey", request, wanted)?;
    } else {
        expect_status("its receive", &e.completion()?, Status::RemoteInvalidRequest)?;
        expect_status("a receive", &e.completion()?, Status::Flushed)?;
    }
    e.close()
}

fn unreliable(s: &Side) -> Result<()> {
    let mut e = ManualQp::new(s, QpType::Uc, Access::REMOTE_WRITE)?;
    if s.asks {
        s.put_pattern(0, 20000)?;
    } else {
        for i in 0..5 {
            e.post_receive(i.into(), 13000 * i, 13000)?;
        }
    }
    e.join(&s.memory_mr)?;
    if s.asks {
        let list = vec![
            e.send(0, 0),
            e.send(1, 12289),
            e.write(e.rkey(), 0, 0, 10000),
            e.write(WRONG, 0, 1, 100),
            e.send_imm(2, 4096, 0x0102_0304),
            e.write_imm(10000, 10000, 10000, 0x0506_0708),
            e.send(4, 1),
        ];
        e.run("UC request", list)?;
    } else {
        e.received(0, 0)?;
        e.received(1, 12289)?;
        expect_imm(&e.received(2, 4096)?, 0x0102_0304)?;
        expect_imm(&e.received(3, 10000)?, 0x0506_0708)?;
        e.received(4, 1)?;
        expect_pattern("SEND", &s.local(13000, 12289)?, 1)?;
        expect_pattern("SEND with immediate", &s.local(26000, 4096)?, 2)?;
        expect_pattern("SEND", &s.local(52000, 1)?, 4)?;
        expect_pattern("WRITE", &s.memory(0, 20000)?, 0)?;
    }
    e.close()
}

/// Returns the addresses in the 40 bytes in front of a datagram.
fn header_addresses(header: &[u8]) -> Result<(IpAddr, IpAddr)> {
    fn v4(bytes: &[u8]) -> Result<IpAddr> {
        Ok(IpAddr::from(<[u8; 4]>::try_from(bytes)?))
    }
    fn v6(bytes: &[u8]) -> Result<IpAddr> {
        Ok(IpAddr::from(<[u8; 16]>::try_from(bytes)?))
    }
    match (header[0] >> 4, header[20]) {
        (6, _) => Ok((v6(&header[8..24])?, v6(&header[24..40])?)),
        (_, 0x45) => {
            expect("IPv4 protocol", header[20 + 9], 17)?;
            Ok((v4(&header[32..36])?, v4(&header[36..40])?))
        }
        _ => bail!("the datagram's header is neither IPv4 nor IPv6"),
    }
}

fn expect_header(s: &Side, e: &ManualQp<'_>, at: u32) -> Result<()> {
    let (from, to) = header_addresses(&s.local(at, GRH)?)?;
    ensure!(
        from == e.peer_address() && to == s.device.address(),
        "a datagram from {from} to {to}"
    );
    Ok(())
}

fn datagrams(s: &Side) -> Result<()> {
    let mut e = ManualQp::new(s, QpType::Ud, Access::empty())?;
    for i in 0..3 {
        e.post_receive(i.into(), 2000 * i, GRH + 1000)?;
    }
    s.put_pattern(8000, 2000)?;
    e.join(&s.memory_mr)?;
    if s.asks {
        let mut wrong = e.send(8001, 1000);
        if let Target::Datagram { qkey, .. } = &mut wrong.to {
            *qkey += 1;
        }
        let list = vec![
            e.send(8000, 1000),
            wrong,
            e.send(0, 0),
            e.send_imm(8002, 999, 0x0102_0304),
        ];
        e.run("UD SEND", list)?;
        e.received(0, GRH + 500)?;
        expect_header(s, &e, 0)?;
        expect_pattern("UD answer", &s.local(GRH, 500)?, 3)?;
    } else {
        for (i, (from, length)) in (0..).zip([(0, 1000), (0, 0), (2, 999)]) {
            let wc = e.received(i.into(), GRH + length)?;
            ensure!(wc.src_qpn == Some(e.peer_qpn()), "source QP {:?}", wc.src_qpn);
            expect_header(s, &e, 2000 * i)?;
            expect_pattern("UD SEND", &s.local(2000 * i + GRH, length)?, from)?;
            if i == 2 {
                expect_imm(&wc, 0x0102_0304)?;
                answer_datagram(s, &e, wc.src_qpn)?;
            }
        }
    }
    e.close()
}

/// Sends an answer to the source address of the last datagram.
fn answer_datagram(s: &Side, e: &ManualQp<'_>, qpn: Option<Qpn>) -> Result<()> {
    let qpn = qpn.context("a datagram without a source QP")?;
    let (from, _) = header_addresses(&s.local(4000, GRH)?)?;
    let mut request = e.send(8003, 500);
    if let Target::Datagram { path, qpn: to, .. } = &mut request.to {
        (*path, *to) = (s.path_to(from, qpn)?, qpn);
    }
    e.run("UD answer", vec![request])
}

fn multicast(s: &Side) -> Result<()> {
    let group: IpAddr = match s.device.address() {
        IpAddr::V4(_) => [239, 9, 0, 9].into(),
        IpAddr::V6(_) => [0xff05, 0, 0, 0, 0, 0, 0, 0x909].into(),
    };
    let mut e = ManualQp::new(s, QpType::Ud, Access::empty())?;
    e.post_receive(0, 0, GRH + 1000)?;
    s.put_pattern(8000, 2000)?;
    e.join(&s.memory_mr)?;
    for receiver_asks in [false, true] {
        let from = receiver_asks.into();
        if s.asks == receiver_asks {
            e.qp.attach_mcast(group)?;
            s.barrier()?;
            let wc = e.received(0, GRH + 1000)?;
            ensure!(wc.src_qpn == Some(e.peer_qpn()), "source QP {:?}", wc.src_qpn);
            let addresses = header_addresses(&s.local(0, GRH)?)?;
            ensure!(
                addresses == (e.peer_address(), group),
                "from and to {addresses:?}"
            );
            expect_pattern("multicast", &s.local(GRH, 1000)?, from)?;
            for wr_id in 1..3 {
                e.post_receive(wr_id, 0, GRH + 1000)?;
            }
            e.qp.detach_mcast(group)?;
            s.barrier()?;
            // Only the datagram that follows the one to the group arrives.
            e.received(1, GRH + 1000)?;
            expect_header(s, &e, 0)?;
            ensure!(e.cq.poll().is_none(), "a datagram after the QP was detached");
        } else {
            s.barrier()?;
            e.run(
                "SEND to the group",
                vec![e.send_to_group(group, 8000 + from, 1000)?],
            )?;
            s.barrier()?;
            let list = vec![e.send_to_group(group, 8000, 1000)?, e.send(8000, 1000)];
            e.run("SEND to the group and to the peer", list)?;
        }
        s.barrier()?;
    }
    e.close()
}

fn many(s: &Side, qp_type: QpType, length: u32) -> Result<()> {
    let header = if qp_type == QpType::Ud { GRH } else { 0 };
    let mut e = ManualQp::new(s, qp_type, Access::empty())?;
    if s.asks {
        s.put_pattern(0, MEMORY)?;
    } else {
        for i in 0..16 {
            e.post_receive(i.into(), 4096 * i, header + length)?;
        }
    }
    e.join(&s.memory_mr)?;
    if s.asks {
        for i in 0..16 {
            e.run("SEND", vec![e.send_imm(i, length, i)])?;
        }
        s.barrier()?;
        return e.close();
    }
    s.barrier()?;
    if s.lossy {
        sleep(SETTLE);
    }
    let (mut n, mut next) = (0, 0);
    while n < 16 {
        let wc = match s.lossy {
            true => e.cq.poll(),
            false => Some(e.completion()?),
        };
        let Some(wc) = wc else { break };
        expect_status("receive", &wc, Status::Success)?;
        expect("number of the receive", wc.wr_id, n.into())?;
        expect("bytes received", wc.byte_len, header + length)?;
        let number = wc.imm.context("no immediate data")?;
        ensure!(
            (next..16).contains(&number),
            "message {number} came when {next} was next"
        );
        expect_pattern("SEND", &s.local(4096 * n + header, length)?, number)?;
        (n, next) = (n + 1, number + 1);
    }
    let least = if s.lossy { 4 } else { 16 };
    ensure!(n >= least, "only {n} of 16 messages came");
    e.close()
}
