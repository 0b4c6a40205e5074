//! Cost of TCP on this host: two spinning sockets without delay, each on a CPU of its own.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail};

use super::{CPUS, LOOPBACK, count, pin};

fn spin_read(stream: &mut TcpStream, buffer: &mut [u8]) -> std::io::Result<usize> {
    loop {
        match stream.read(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

fn spin_exchange(stream: &mut TcpStream, buffer: &mut [u8], write: bool) -> Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        let result = if write {
            stream.write(&buffer[done..])
        } else {
            stream.read(&mut buffer[done..])
        };
        match result {
            Ok(0) => bail!("the TCP connection ended"),
            Ok(n) => done += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Returns a connected pair of spinning TCP sockets without delay.
fn pair() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((LOOPBACK, 0))?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    Ok((near, far))
}

/// Returns the median half round trip, in microseconds.
pub(super) fn latency(size: usize) -> Result<f64> {
    const ROUNDS: usize = 10_000;
    let (mut near, mut far) = pair()?;
    thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<()> {
            pin(CPUS[1])?;
            let mut buffer = vec![0; size];
            for _ in 0..ROUNDS {
                spin_exchange(&mut far, &mut buffer, false)?;
                spin_exchange(&mut far, &mut buffer, true)?;
            }
            Ok(())
        });
        let ping = scope.spawn(move || -> Result<f64> {
            pin(CPUS[0])?;
            let mut buffer = vec![0; size];
            let mut samples = Vec::with_capacity(ROUNDS);
            for _ in 0..ROUNDS {
                let begin = Instant::now();
                spin_exchange(&mut near, &mut buffer, true)?;
                spin_exchange(&mut near, &mut buffer, false)?;
                samples.push(begin.elapsed().as_nanos() as u64);
            }
            samples.sort_unstable();
            Ok(samples[ROUNDS / 2] as f64 / 2e3)
        });
        let half = ping
            .join()
            .map_err(|_| anyhow::anyhow!("the TCP client failed"))?;
        echo.join()
            .map_err(|_| anyhow::anyhow!("the TCP server failed"))??;
        half
    })
}

/// Returns MB/s of messages in one direction.
pub(super) fn bandwidth(size: usize) -> Result<f64> {
    let (mut near, mut far) = pair()?;
    let total = u64::from(count(size)) * size as u64;
    thread::scope(|scope| {
        let sink = scope.spawn(move || -> Result<f64> {
            pin(CPUS[1])?;
            let mut buffer = vec![0; size];
            let (begin, mut received) = (Instant::now(), 0u64);
            while received < total {
                match spin_read(&mut far, &mut buffer)? {
                    0 => bail!("the TCP connection ended"),
                    n => received += n as u64,
                }
            }
            Ok(total as f64 / begin.elapsed().as_secs_f64() / 1e6)
        });
        scope.spawn(move || -> Result<()> {
            pin(CPUS[0])?;
            let mut buffer = vec![0; size];
            for _ in 0..count(size) {
                spin_exchange(&mut near, &mut buffer, true)?;
            }
            Ok(())
        });
        sink.join()
            .map_err(|_| anyhow::anyhow!("the TCP server failed"))?
    })
}
