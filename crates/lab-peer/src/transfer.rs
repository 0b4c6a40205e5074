//! The peer of lab/peer/transfer.c.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, ConnectParams, Connection, Device, Listener, Memory, MemoryRegion, Operation,
    Placement, ProtectionDomain, QpOptions, QueuePair, RKey, RecvRequest, Selectivity, SendFlags,
    SendRequest, SgeList, Status, Target, WorkCompletion,
};

use super::{WAIT, pattern, say};

/// FNV-1a 64, length 4, number of data bytes 4.
const MESSAGE_HEADER: usize = 16;
const MESSAGE_DATA: usize = 6000;
const MESSAGE: usize = MESSAGE_HEADER + MESSAGE_DATA;
/// Bytes of memory on each side of the connections of "refused".
const REFUSED_BYTES: u32 = 8192;

pub(super) fn server(address: SocketAddr, bytes: u32, connections: u32) -> Result<()> {
    let device = Device::open(address.ip())?;
    let listener = device.listen(address.port())?;
    say("listening")?;
    for i in 0..connections {
        let (end, connection) = accept_one(&listener, bytes)?;
        ensure!(connection.wait_ended(WAIT), "the client did not disconnect");
        if i + 1 == connections {
            end.check_served()?;
        }
    }
    Ok(())
}

fn accept_one(listener: &Listener, bytes: u32) -> Result<(TransferEnd, Connection)> {
    let mut request = listener.accept(WAIT).context("no client came")?;
    let end = TransferEnd::new(listener.device(), bytes)?;
    let connection = request.accept_after(&end.qp, &params(), &end.told_memory(), || {
        let sges = end.message_mr.sge(0, MESSAGE as u32).into();
        end.qp
            .post_recv(RecvRequest { wr_id: 0, sges })
            .map_err(std::io::Error::other)?;
        Ok(())
    })?;
    ensure!(
        connection.wait_established(),
        "the client went away while connecting"
    );
    PeerMemory::parse(connection.private_data())?;
    Ok((end, connection))
}

pub(super) fn client(peer: SocketAddr, bytes: u32) -> Result<()> {
    client_on(&Device::open(Device::address_to(peer)?)?, peer, bytes)
}

fn client_on(device: &Device, peer: SocketAddr, bytes: u32) -> Result<()> {
    let (end, connection, there) = connect_to(device, peer, bytes)?;
    let length = there.length.min(bytes);
    for cut in [0..1, 1..4097, 4097..length] {
        let cut = cut.start.min(length)..cut.end.min(length);
        let name = format!("WRITE [{}, {})", cut.start, cut.end);
        end.expect(&name, end.write(&there, there.rkey, cut)?, Status::Success)?;
    }
    let flushed = end.flush(&there, Placement::GLOBAL, there.va, length)?;
    end.expect("FLUSH global", flushed, Status::Success)?;
    end.expect("READ", end.read(&there, there.va, length)?, Status::Success)?;
    expect_pattern("READ", &*end.memory, 0, length)?;
    end.expect("SEND", end.send(length)?, Status::Success)?;
    connection.disconnect_and_wait(WAIT);
    say(&format!("ok CLIENT {length}"))
}

pub(super) fn refused(peer: SocketAddr) -> Result<()> {
    refused_on(&Device::open(Device::address_to(peer)?)?, peer)
}

fn refused_on(device: &Device, peer: SocketAddr) -> Result<()> {
    for i in 0..6 {
        let (end, connection, there) = connect_to(device, peer, REFUSED_BYTES)?;
        let past = there.va + u64::from(there.length) - 63;
        let beyond = PeerMemory { va: past, ..there };
        let (name, wc, wanted) = match i {
            0 => (
                "WRITE, wrong rkey",
                end.write(&there, RKey(there.rkey.0 ^ 0x100), 0..64)?,
                Status::RemoteAccess,
            ),
            1 => (
                "WRITE past the end",
                end.write(&beyond, there.rkey, 0..64)?,
                Status::RemoteAccess,
            ),
            2 => (
                "READ past the end",
                end.read(&there, past, 64)?,
                Status::RemoteAccess,
            ),
            3 => (
                "FLUSH past the end",
                end.flush(&there, Placement::GLOBAL, past, 64)?,
                Status::RemoteAccess,
            ),
            4 => {
                let wc = end.flush(&there, Placement::PERSISTENT, there.va, 64)?;
                ("FLUSH to persistence", wc, Status::RemoteAccess)
            }
            _ => ("SEND", end.send(0)?, Status::Success),
        };
        end.expect(name, wc, wanted)?;
        connection.disconnect_and_wait(WAIT);
    }
    say("ok REFUSED")
}

fn connect_to(
    device: &Device,
    peer: SocketAddr,
    bytes: u32,
) -> Result<(TransferEnd, Connection, PeerMemory)> {
    let end = TransferEnd::new(device, bytes)?;
    let connection = device.connect(&end.qp, peer, &params(), &end.told_memory())?;
    let there = PeerMemory::parse(connection.private_data())?;
    Ok((end, connection, there))
}

/// Returns the parameters that transfer.c asks for.
fn params() -> ConnectParams {
    ConnectParams {
        responder_resources: 4,
        initiator_depth: 4,
        ..ConnectParams::default()
    }
}

/// The peer's memory, as described in the private data.
#[derive(Clone, Copy, Debug)]
struct PeerMemory {
    va: u64,
    rkey: RKey,
    length: u32,
}

impl PeerMemory {
    fn parse(private_data: &[u8]) -> Result<PeerMemory> {
        let bytes = private_data
            .first_chunk::<16>()
            .context("the peer told no memory")?;
        let number = u128::from_be_bytes(*bytes);
        let there = PeerMemory {
            va: (number >> 64) as u64,
            rkey: RKey((number >> 32) as u32),
            length: number as u32,
        };
        ensure!(
            there.va.checked_add(u64::from(there.length)).is_some(),
            "the peer's memory wraps around"
        );
        ensure!(
            there.length >= 64,
            "the peer's memory has only {} bytes",
            there.length
        );
        say(&format!(
            "peer: va {:#018x} rkey {:#010x} length {}",
            there.va, there.rkey.0, there.length
        ))?;
        Ok(there)
    }
}

/// One end of a connection. The message has memory of its own, which no peer may reach.
struct TransferEnd {
    cq: CompletionQueue,
    qp: QueuePair,
    /// Memory that the peer may reach; the client's READ lands here.
    memory: Arc<AnonymousMemory>,
    memory_mr: MemoryRegion,
    /// Region of the client's pattern.
    source_mr: MemoryRegion,
    message: Arc<AnonymousMemory>,
    message_mr: MemoryRegion,
    bytes: u32,
}

impl TransferEnd {
    fn new(device: &Device, bytes: u32) -> Result<TransferEnd> {
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(16)?;
        let qp = pd.create_qp(&QpOptions {
            max_send_wr: 4,
            max_recv_wr: 4,
            ..QpOptions::new(&cq)
        })?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::FLUSH_GLOBAL;
        let (memory, memory_mr) = region(&pd, bytes, access)?;
        let (source, source_mr) = region(&pd, bytes, Access::empty())?;
        let pattern: Vec<u8> = (0..bytes).map(pattern).collect();
        source.write(0, &pattern)?;
        let (message, message_mr) = region(&pd, MESSAGE as u32, Access::LOCAL_WRITE)?;
        Ok(TransferEnd {
            cq,
            qp,
            memory,
            memory_mr,
            source_mr,
            message,
            message_mr,
            bytes,
        })
    }

    fn told_memory(&self) -> [u8; 24] {
        let mut info = [0; 24];
        info[..8].copy_from_slice(&self.memory_mr.iova().to_be_bytes());
        info[8..12].copy_from_slice(&self.memory_mr.rkey().0.to_be_bytes());
        info[12..16].copy_from_slice(&self.bytes.to_be_bytes());
        info
    }

    fn request(&self, operation: Operation, sges: SgeList) -> Result<WorkCompletion> {
        self.qp.post_send(SendRequest {
            wr_id: 1,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        })?;
        self.cq.wait(WAIT)?.context("no completion")
    }

    fn write(&self, there: &PeerMemory, rkey: RKey, range: Range<u32>) -> Result<WorkCompletion> {
        let (from, length) = (u64::from(range.start), range.end - range.start);
        let operation = Operation::Write {
            va: there.va + from,
            rkey,
            imm: None,
        };
        self.request(operation, self.source_mr.sge(from, length).into())
    }

    fn read(&self, there: &PeerMemory, va: u64, length: u32) -> Result<WorkCompletion> {
        let operation = Operation::Read { va, rkey: there.rkey };
        self.request(operation, self.memory_mr.sge(0, length).into())
    }

    fn flush(
        &self,
        there: &PeerMemory,
        placement: Placement,
        va: u64,
        length: u32,
    ) -> Result<WorkCompletion> {
        let selectivity = Selectivity::Range;
        self.request(
            Operation::Flush {
                va,
                rkey: there.rkey,
                length,
                placement,
                selectivity,
            },
            SgeList::EMPTY,
        )
    }

    fn send(&self, length: u32) -> Result<WorkCompletion> {
        let data = length.min(MESSAGE_DATA as u32);
        let mut message = Vec::with_capacity(MESSAGE);
        message.extend_from_slice(&fnv1a_of_pattern(length).to_be_bytes());
        message.extend_from_slice(&length.to_be_bytes());
        message.extend_from_slice(&data.to_be_bytes());
        message.extend((0..data).map(pattern));
        self.message.write(0, &message)?;
        self.request(
            Operation::Send { imm: None },
            self.message_mr.sge(0, message.len() as u32).into(),
        )
    }

    fn expect(&self, name: &str, wc: WorkCompletion, wanted: Status) -> Result<()> {
        say(&format!("{name}: {}", wc.status))?;
        ensure!(wc.status == wanted, "{name}: \"{}\", not \"{wanted}\"", wc.status);
        Ok(())
    }

    fn check_served(&self) -> Result<()> {
        let wc = self.cq.wait(WAIT)?.context("no message came")?;
        self.expect("receive", wc, Status::Success)?;
        let mut header = [0; MESSAGE_HEADER];
        self.message.read(0, &mut header)?;
        let number = u128::from_be_bytes(header);
        let (hash, length, data) = ((number >> 64) as u64, (number >> 32) as u32, number as u32);
        ensure!(
            length <= self.bytes && data <= length && data as usize <= MESSAGE_DATA,
            "the message's lengths {length} and {data} are out of bounds"
        );
        ensure!(
            wc.byte_len as usize == MESSAGE_HEADER + data as usize,
            "the message has {} bytes, not as many as it says",
            wc.byte_len
        );
        ensure!(
            hash == fnv1a_of_pattern(length),
            "the message's checksum is not the pattern's"
        );
        expect_pattern("message", &*self.message, MESSAGE_HEADER as u64, data)?;
        expect_pattern("memory", &*self.memory, 0, length)?;
        say(&format!("ok SERVER {length}"))
    }
}

fn region(pd: &ProtectionDomain, bytes: u32, access: Access) -> Result<(Arc<AnonymousMemory>, MemoryRegion)> {
    let memory = Arc::new(AnonymousMemory::new(bytes as usize).context("memory")?);
    let mr = pd.reg_mr(memory.clone(), 0, u64::from(bytes), memory.address(), access)?;
    Ok((memory, mr))
}

fn fnv1a_of_pattern(length: u32) -> u64 {
    (0..length).fold(0xcbf2_9ce4_8422_2325, |hash: u64, i| {
        (hash ^ u64::from(pattern(i))).wrapping_mul(0x0100_0000_01b3)
    })
}

fn expect_pattern(what: &str, memory: &dyn Memory, from: u64, length: u32) -> Result<()> {
    let mut bytes = vec![0; length as usize];
    memory.read(from, &mut bytes)?;
    super::expect_pattern(what, &bytes, 0)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn fnv1a_of_pattern__is_that_of_the_c_program() {
        // Printed by peer.c's functions.
        assert_eq!((pattern(0), pattern(1), pattern(0xffff_ffff)), (0x9e, 0x3c, 0));
        assert_eq!(fnv1a_of_pattern(0), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a_of_pattern(1), 0xaf64_534c_8602_b6c1);
        assert_eq!(fnv1a_of_pattern(1 << 20), 0x0c4d_f310_5707_f9a7);
    }

    #[test]
    fn client_and_refused__pass_against_our_own_server() {
        let address: IpAddr = "127.0.0.91".parse().unwrap();
        rdmux_soft::register();
        let device = Device::open(address).unwrap();
        for (port, bytes, connections) in [(7471, 1 << 20, 1), (7472, REFUSED_BYTES, 6)] {
            let listener = device.listen(port).unwrap();
            std::thread::scope(|scope| {
                let serving = scope.spawn(|| {
                    for i in 0..connections {
                        let (end, connection) = accept_one(&listener, bytes).unwrap();
                        assert!(connection.wait_ended(WAIT));
                        if i + 1 == connections {
                            end.check_served().unwrap();
                        }
                    }
                });
                let own = Device::open(address).unwrap();
                let peer = SocketAddr::new(address, port);
                if connections == 1 {
                    client_on(&own, peer, bytes).unwrap()
                } else {
                    refused_on(&own, peer).unwrap()
                }
                serving.join().unwrap();
            });
        }
    }
}
