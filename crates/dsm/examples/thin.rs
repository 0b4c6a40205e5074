use rdmux_dsm::{Cluster, FaultMode, RegionOptions, Session};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};
fn main() {
    rdmux_soft::register();
    let mode = match std::env::var("MODE").as_deref() {
        Ok("inline") => FaultMode::Inline,
        Ok("mprotect") => FaultMode::Mprotect,
        _ => FaultMode::Thread,
    };
    let session = Session::join(Cluster::of_environment().unwrap(), Duration::from_secs(10)).unwrap();
    let me = session.node();
    let region = session
        .region(&RegionOptions {
            bytes: 1 << 20,
            row: 1,
            mode,
        })
        .unwrap();
    println!("node {me}: {:#x}", region.address());
    let word = region.mapping().double_word(4096 * 3);
    let start = Instant::now();
    let n = 2000;
    for i in 0..n {
        while word.load(SeqCst) % 2 != u64::from(me) {
            std::hint::spin_loop();
        }
        word.fetch_add(1, SeqCst);
        let _ = i;
    }
    println!(
        "node {me}: {} us per turn, {:?}",
        start.elapsed().as_micros() as f64 / f64::from(n) / 2.0,
        region.stat()
    );
    while word.load(SeqCst) < 2 * n as u64 {}
    std::thread::sleep(Duration::from_millis(300));
}
