//! Cost on this host of each of the system calls under the `soft` provider. `rdmux-bench` measures what UDP carries. `cargo bench
//! -p rdmux-soft --bench udp [-- ADDRESS]`

use std::error::Error;
use std::io::IoSlice;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use rdmux_soft::udp::{Outgoing, RxBatch, RxSocket, TxSocket};
use rustix::net::{RecvFlags, SendFlags};

fn main() -> Result<(), Box<dyn Error>> {
    let ip = std::env::args()
        .skip(1)
        .find_map(|a| a.parse().ok())
        .unwrap_or_else(|| Ipv4Addr::LOCALHOST.into());
    println!("address {ip}");
    system_calls(ip)
}

/// Measures the time of each call on one thread: the peer's half of the work is done between the measurements.
fn system_calls(ip: IpAddr) -> Result<(), Box<dyn Error>> {
    const ROUNDS: u32 = 20_000;
    let rx = RxSocket::bind(SocketAddr::new(ip, 0), false)?;
    let tx = TxSocket::bind(ip)?;
    let dst = rx.local_addr();
    let mut batch = RxBatch::new();
    let mut buffer = [0; 2048];
    println!("receive buffer {} B", rx.buffer_bytes()?);

    let start = Instant::now();
    for _ in 0..ROUNDS {
        let _ = rustix::net::recvfrom(&rx, &mut buffer[..], RecvFlags::DONTWAIT);
    }
    println!(
        "recvfrom, empty queue    {:5} ns",
        (start.elapsed() / ROUNDS).as_nanos()
    );
    let start = Instant::now();
    for _ in 0..ROUNDS {
        rx.recv_batch(&mut batch)?;
    }
    println!(
        "recv_batch, empty queue  {:5} ns",
        (start.elapsed() / ROUNDS).as_nanos()
    );

    let payload = [0; 64];
    let parts = [IoSlice::new(&payload)];
    let one = Outgoing {
        dst,
        segment_size: None,
        tos: 0,
        parts: &parts,
    };
    let mut times = [Duration::ZERO; 6];
    let mut timed = |i: usize, f: &mut dyn FnMut()| {
        let start = Instant::now();
        f();
        times[i] += start.elapsed();
    };
    for _ in 0..ROUNDS {
        timed(0, &mut || {
            let _ = rustix::net::sendto(&tx, &payload, SendFlags::DONTWAIT, &dst);
        });
        timed(1, &mut || {
            let _ = rustix::net::recvfrom(&rx, &mut buffer[..], RecvFlags::DONTWAIT);
        });
        let _ = rx.recv_batch(&mut batch);
        timed(2, &mut || {
            let _ = tx.send_batch(&[one]);
        });
        timed(3, &mut || {
            let _ = rx.recv_batch(&mut batch); // recvmsg
        });
        let _ = tx.send_batch(&[one]);
        timed(4, &mut || {
            let _ = rx.recv_batch(&mut batch); // recvmmsg that finds one
        });
        timed(5, &mut || {
            let _ = rx.recv_batch(&mut batch); // recvmmsg that finds none
        });
    }
    let names = [
        "sendto 64 B",
        "recvfrom 64 B",
        "send_batch(1) 64 B",
        "recv_batch 64 B, single",
        "recv_batch 64 B, wide",
        "recv_batch empty, wide",
    ];
    for (name, time) in names.iter().zip(times) {
        println!("{name:24} {:5} ns", (time / ROUNDS).as_nanos());
    }
    let start = Instant::now();
    for _ in 0..ROUNDS / 16 {
        let _ = tx.send_batch(&[one; 16]);
        while rx.recv_batch(&mut batch)? > 0 {}
    }
    println!(
        "16 x 64 B sent and received, each {:5} ns",
        (start.elapsed() / ROUNDS).as_nanos()
    );
    Ok(())
}
