//! A table of keys and values in the server's memory; clients look keys up by READ alone, so that the server runs no code for them.
//!
//! ```text
//! cargo run -p rdmux-examples --bin key_value -- serve 127.0.0.1 apple=red lemon=yellow
//! cargo run -p rdmux-examples --bin key_value -- get 127.0.0.1 127.0.0.1 lemon
//! ```
//!
//! The first address is the process's own, the second the server's.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{Access, ConnectParams, Device, Memory, QpOptions, RemoteBuffer, SendRequest, Status};

const PORT: u16 = 7176;
/// Bytes of a key and of a value, padded with zeros. A slot of the table has both; a key of zeros alone is a free slot.
const FIELD: usize = 32;
const SLOT: u64 = 2 * FIELD as u64;
const SLOTS: u64 = 1024;

fn main() -> Result<()> {
    rdmux_soft::register();
    rdmux_hw::register();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [verb, own, pairs @ ..] if verb == "serve" => serve(own.parse()?, pairs),
        [verb, own, server, keys @ ..] if verb == "get" => get(own.parse()?, server.parse()?, keys),
        _ => bail!("usage: key_value serve OWN KEY=VALUE ... | key_value get OWN SERVER KEY ..."),
    }
}

fn field(text: &str) -> Result<[u8; FIELD]> {
    let mut field = [0; FIELD];
    let bytes = field.get_mut(..text.len()).filter(|bytes| !bytes.is_empty());
    bytes
        .context("a key or a value has 1 to 32 bytes")?
        .copy_from_slice(text.as_bytes());
    Ok(field)
}

/// Returns the offsets of the slots in which a key may be, in their order: from that of its hash (FNV-1a) on.
fn slots_of(key: &[u8; FIELD]) -> impl Iterator<Item = u64> {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let first = key.iter().fold(0xcbf2_9ce4_8422_2325, step) % SLOTS;
    (0..SLOTS).map(move |n| (first + n) % SLOTS * SLOT)
}

fn serve(own: IpAddr, pairs: &[String]) -> Result<()> {
    let table = Arc::new(AnonymousMemory::new((SLOTS * SLOT) as usize)?);
    for pair in pairs {
        let (key, value) = pair.split_once('=').context("a pair is KEY=VALUE")?;
        let (key, value) = (field(key)?, field(value)?);
        let is_free = |offset: &u64| table.load_u8(*offset) == 0;
        let offset = slots_of(&key).find(is_free).context("the table is full")?;
        table.write(offset, &[key, value].concat())?;
    }
    let device = Device::open(own)?;
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(16)?;
    let mr = pd.reg_mr_all(table.clone(), table.address(), Access::REMOTE_READ)?;
    let remote = mr.remote(..).context("no memory")?.to_bytes();
    let listener = device.listen(PORT)?;
    println!("listening on {own}");
    let mut connections = Vec::new();
    loop {
        if let Some(request) = listener.accept(Duration::from_secs(1)) {
            let qp = pd.create_qp(&QpOptions::new(&cq))?;
            // A client that ends meanwhile is no reason to stop.
            connections.extend(request.accept(&qp, &ConnectParams::default(), &remote));
        }
        connections.retain(|connection| !connection.is_ended());
    }
}

fn get(own: IpAddr, server: IpAddr, keys: &[String]) -> Result<()> {
    let device = Device::open(own)?;
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(16)?;
    let qp = pd.create_qp(&QpOptions::new(&cq))?;
    let memory = Arc::new(AnonymousMemory::new(SLOT as usize)?);
    let mr = pd.reg_mr_all(memory.clone(), memory.address(), Access::LOCAL_WRITE)?;
    let local = mr.slice(..SLOT).context("no such bytes")?;
    let peer = (server, PORT).into();
    let connection = device
        .connect(&qp, peer, &ConnectParams::default(), b"")
        .map_err(|error| anyhow!("{peer}: {error}; first start `key_value serve {server}`"))?;
    let table = connection
        .private_data()
        .first_chunk()
        .context("the server sent no table")?;
    let table = RemoteBuffer::from_bytes(table);
    for key in keys {
        let (wanted, mut answer) = (field(key)?, "(not there)".to_owned());
        for offset in slots_of(&wanted) {
            let remote = table
                .slice(offset..offset + SLOT)
                .context("the server's table is short")?;
            qp.post_send(SendRequest::read(local, remote).signaled())?;
            let completion = cq
                .wait(Duration::from_secs(30))?
                .context("the server is silent")?;
            if completion.status != Status::Success {
                return Err(completion.status.into());
            }
            let (mut found, mut value) = ([0; FIELD], [0; FIELD]);
            memory.read(0, &mut found)?;
            memory.read(FIELD as u64, &mut value)?;
            if found == wanted {
                answer = String::from_utf8_lossy(&value).trim_end_matches('\0').to_owned();
            }
            if found == wanted || found == [0; FIELD] {
                break;
            }
        }
        println!("{key}: {answer}");
    }
    Ok(())
}
