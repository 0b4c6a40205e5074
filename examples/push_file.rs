//! Writes a file into a region of `rdmux serve` by RDMA and makes it durable there.
//!
//! ```text
//! rdmux serve --file ./data,size=1G
//! cargo run --release -p rdmux-examples --bin push_file -- big.img rdmux://127.0.0.1/data
//! ```
//!
//! A third argument is the own address; without it, it is the one from which packets to the server leave. Both sides use the key
//! file of the user, which the first of them makes.

use std::fs::File;
use std::io::Read;

use anyhow::{Context, Result, bail};
use rdmux_push::{Access, Client, Key, MapRequest, Options, Placement, Target};
use rdmux_verbs::Memory;

/// Bytes of a request, and requests in flight at a time, each with a part of the buffer.
const CHUNK: usize = 1 << 20;
const DEPTH: usize = 8;

fn main() -> Result<()> {
    rdmux_soft::register();
    rdmux_hw::register();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (path, target, from) = match &arguments[..] {
        [path, target] => (path, target, None),
        [path, target, from] => (path, target, Some(from.parse()?)),
        _ => bail!("usage: push_file FILE rdmux://HOST[:PORT]/REGION[@OFFSET] [OWN]"),
    };
    let target: Target = target.parse()?;
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    if length == 0 {
        bail!("the file is empty");
    }
    let server = *target.resolve()?.first().context("the host has no address")?;
    let options = Options {
        from,
        ..Options::default()
    };
    let mut client = Client::connect(server, &Key::load_or_create()?, &options)?;
    let range = MapRequest {
        offset: target.offset,
        length,
        ..MapRequest::new(Access::WRITE)
    };
    let mapping = client.map_as(&target.region, &range)?;
    if !mapping.placement().contains(Placement::PERSISTENT) {
        bail!("{target} does not survive a loss of power");
    }

    let buffer = client.buffer(DEPTH * CHUNK)?;
    let mut chunk = vec![0; CHUNK];
    for number in 0..length.div_ceil(CHUNK as u64) {
        // Requests are done in order: with one place free, it is that of the oldest.
        if client.in_flight() == DEPTH {
            client.next_done()?;
        }
        let at = number * CHUNK as u64;
        let bytes = (length - at).min(CHUNK as u64);
        let part = &mut chunk[..bytes as usize];
        file.read_exact(part)?;
        let place = number % DEPTH as u64 * CHUNK as u64;
        buffer.memory().write(place, part)?;
        client.post_write(&mapping, target.offset + at, &buffer, place, bytes as u32, number)?;
    }
    // Everything before is in the server's memory; the flush waits for it and for the medium.
    client.flush(&mapping, target.offset, length, Placement::PERSISTENT)?;
    client.unmap(mapping)?;
    client.close();
    println!("{length} bytes are durable in {target}");
    Ok(())
}
