//! Records the streams of TCP connections, and writes them as a capture: the bytes are those of the two sides, in the order in which they were
//! passed on; the headers below them are made here.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use rdmux_capture::pcapng::{LinkType, write_interface, write_packet, write_section};

/// Bytes of a packet: less than those of the longest in IPv4.
const PACKET_BYTES: usize = 32 << 10;
/// Port of a target, by which dissectors know it.
const TARGET_PORT: u16 = 4420;
const HOST_PORT: u16 = 50_000;
const SYN: u8 = 2;
const ACK: u8 = 16;

/// Bytes of a connection from one side to the other.
struct Piece {
    connection: u16,
    to_target: bool,
    bytes: Vec<u8>,
}

/// Passes connections on to a target.
pub(crate) struct Recorder {
    /// Address to which hosts connect.
    pub(crate) address: SocketAddr,
    pieces: Arc<Mutex<Vec<Piece>>>,
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Recorder {
    /// Records the connections of hosts.
    pub(crate) fn start(target: SocketAddr) -> Recorder {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let pieces = Arc::new(Mutex::new(Vec::new()));
        let is_over = Arc::new(AtomicBool::new(false));
        let (all, ends) = (pieces.clone(), is_over.clone());
        let thread = thread::spawn(move || {
            let mut threads = Vec::new();
            for connection in 0.. {
                let (host, _) = listener.accept().unwrap();
                if ends.load(Ordering::SeqCst) {
                    break;
                }
                let target = TcpStream::connect(target).unwrap();
                for to_target in [true, false] {
                    let (host, target) = (host.try_clone().unwrap(), target.try_clone().unwrap());
                    let (from, to) = if to_target { (host, target) } else { (target, host) };
                    let pieces = all.clone();
                    threads.push(thread::spawn(move || {
                        pass_on(from, to, |bytes| {
                            let bytes = bytes.to_vec();
                            pieces.lock().unwrap().push(Piece {
                                connection,
                                to_target,
                                bytes,
                            });
                        });
                    }));
                }
            }
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        Recorder {
            address,
            pieces,
            is_over,
            thread,
        }
    }

    /// Waits until the connections have ended, and writes what was recorded.
    pub(crate) fn write(self, file: &Path) {
        self.is_over.store(true, Ordering::SeqCst);
        // Ends the last wait for a connection.
        drop(TcpStream::connect(self.address).unwrap());
        self.thread.join().unwrap();
        let mut out = Vec::new();
        write_section(&mut out);
        write_interface(&mut out, LinkType::RAW, None);
        // By connection: the next sequence numbers of the host and of the target.
        let mut next: Vec<[u32; 2]> = Vec::new();
        let mut number = 0;
        let mut add = |connection: u16, to_target: bool, flags: u8, next: [u32; 2], bytes: &[u8]| {
            let packet = packet(connection, to_target, flags, next, bytes);
            write_packet(&mut out, 0, number * 1000, packet.len() as u32, &packet, None);
            number += 1;
        };
        for piece in self.pieces.lock().unwrap().iter() {
            while next.len() <= piece.connection.into() {
                let connection = next.len() as u16;
                add(connection, true, SYN, [0, 0], &[]);
                add(connection, false, SYN | ACK, [1, 0], &[]);
                next.push([1, 1]);
                add(connection, true, ACK, [1, 1], &[]);
            }
            let next = &mut next[usize::from(piece.connection)];
            for bytes in piece.bytes.chunks(PACKET_BYTES) {
                add(piece.connection, piece.to_target, ACK, *next, bytes);
                next[usize::from(!piece.to_target)] += bytes.len() as u32;
            }
        }
        std::fs::write(file, out).unwrap();
    }
}

/// Passes bytes on until one side ends, and has the other end then.
fn pass_on(mut from: TcpStream, mut to: TcpStream, mut record: impl FnMut(&[u8])) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        // Before the other side can answer.
        record(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Returns a packet of IPv4 and TCP (RFC 791, RFC 9293) without checksums.
fn packet(connection: u16, to_target: bool, flags: u8, [host, target]: [u32; 2], bytes: &[u8]) -> Vec<u8> {
    let host_port = HOST_PORT + connection;
    let (ports, seq, ack) = match to_target {
        true => ([host_port, TARGET_PORT], host, target),
        false => ([TARGET_PORT, host_port], target, host),
    };
    let mut addresses = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
    if !to_target {
        addresses.reverse();
    }
    let len = (40 + bytes.len()) as u16;
    let mut packet = vec![0x45, 0];
    packet.extend_from_slice(&len.to_be_bytes());
    // No identification and fragments; 64 hops; TCP.
    packet.extend_from_slice(&[0, 0, 0, 0, 64, 6, 0, 0]);
    addresses
        .iter()
        .for_each(|address| packet.extend_from_slice(&address.octets()));
    ports
        .iter()
        .for_each(|port| packet.extend_from_slice(&port.to_be_bytes()));
    packet.extend_from_slice(&seq.to_be_bytes());
    packet.extend_from_slice(&ack.to_be_bytes());
    // A header of five words, and a full window.
    packet.extend_from_slice(&[5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
    packet.extend_from_slice(bytes);
    packet
}
