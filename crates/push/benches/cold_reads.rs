//! Random reads of a file that is not in the page cache, by several clients: what one disk's queue depth is worth.
//!
//! ```text
//! cargo bench -p rdmux-push --bench cold_reads -- FOLDER
//! ```
//!
//! The program makes a file of 1 GiB in FOLDER, which must be on a disk, and prints the reads per second of so many clients through a server,
//! beside those of so many threads that call `pread`.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rdmux_push::server::{BREAK_TIMEOUT_DEFAULT, Config};
use rdmux_push::{Access, Client, Key, Name, Options, Region, Server};
use rustix::fs::{Advice, fadvise};

type Failure = Box<dyn Error + Send + Sync>;

const FILE_BYTES: u64 = 1 << 30;
const READ_BYTES: u64 = 4096;
const CLIENTS: [usize; 5] = [1, 2, 4, 8, 16];
const ROUNDS: usize = 5;
const TIME: Duration = Duration::from_millis(500);
const ADDRESS: &str = "127.0.12.90:7174";

fn main() -> Result<(), Failure> {
    let folder = std::env::args_os().skip(1).find(|arg| arg != "--bench");
    let path = folder
        .map_or_else(std::env::temp_dir, PathBuf::from)
        .join("cold_reads.tmp");
    let result = measure(&path);
    let removed = std::fs::remove_file(&path);
    result?;
    Ok(removed?)
}

fn measure(path: &Path) -> Result<(), Failure> {
    let file = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(path)?;
    let piece = vec![0x5a; 1 << 20];
    for at in (0..FILE_BYTES).step_by(piece.len()) {
        file.write_all_at(&piece, at)?;
    }
    rdmux_soft::register();
    let name = Name::new("cold").ok_or("a name")?;
    let key = || Key::new([7; 32]);
    let server = Server::bind(Config {
        listen: vec![ADDRESS.parse()?],
        key: key(),
        regions: vec![Region::file(name.clone(), path, None, true)?],
        keepalive: Duration::from_secs(20),
        break_timeout: BREAK_TIMEOUT_DEFAULT,
        mappings_max: 64,
        device: rdmux_verbs::Options::default(),
    })?;
    let stopper = server.stopper();
    let serving = thread::spawn(move || server.run(|_| {}));
    println!("4 KiB reads per second, medians of {ROUNDS} rounds");
    println!("{:>7}  {:>8}  {:>8}", "clients", "rdmux", "pread");
    for clients in CLIENTS {
        let (mut by_rdmux, mut by_pread) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS as u64 {
            forget(&file)?;
            by_rdmux.push(count(clients, round, || {
                let mut client = Client::connect(ADDRESS.parse()?, &key(), &Options::default())?;
                let mapping = client.map(&name, Access::READ, 0, 0, 0)?;
                Ok(move |at, bytes: &mut [u8]| Ok(client.read(&mapping, at, bytes)?))
            })?);
            forget(&file)?;
            by_pread.push(count(clients, round, || {
                let file = file.try_clone()?;
                Ok(move |at, bytes: &mut [u8]| Ok(file.read_exact_at(bytes, at)?))
            })?);
        }
        println!(
            "{clients:>7}  {:>8.0}  {:>8.0}",
            median(by_rdmux),
            median(by_pread)
        );
    }
    stopper.stop();
    serving.join().map_err(|_| "the server panicked")??;
    Ok(())
}

/// Removes the file's pages from the page cache.
fn forget(file: &File) -> Result<(), Failure> {
    file.sync_data()?;
    fadvise(file, 0, None, Advice::DontNeed)?;
    Ok(())
}

/// Returns the reads per second of so many clients, each on a thread.
fn count<R: FnMut(u64, &mut [u8]) -> Result<(), Failure>>(
    clients: usize,
    round: u64,
    connect: impl Fn() -> Result<R, Failure> + Sync,
) -> Result<f64, Failure> {
    let ready = Barrier::new(clients);
    let run = |client: u64| {
        let connected = connect();
        ready.wait();
        let mut read = connected?;
        let mut rng = ChaCha8Rng::seed_from_u64(round << 32 | client);
        let mut bytes = [0; READ_BYTES as usize];
        let (began, mut reads) = (Instant::now(), 0u32);
        while began.elapsed() < TIME {
            read(
                rng.next_u64() % (FILE_BYTES / READ_BYTES) * READ_BYTES,
                &mut bytes,
            )?;
            reads += 1;
        }
        Ok(f64::from(reads) / began.elapsed().as_secs_f64())
    };
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..clients as u64)
            .map(|client| scope.spawn(move || run(client)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a client panicked")?)
            .sum()
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
