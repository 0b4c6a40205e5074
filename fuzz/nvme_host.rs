//! Bytes of an NVMe/TCP target for our host, as a fuzz target.
//!
//! Two programs share this file, as they do `targets.rs`: `fuzz_targets/nvme_host.rs`, and `crates/nvmf/tests/fuzz.rs`.

use std::io::IoSlice;

use rdmux_nvmf::host::command::{flush, read, write};
use rdmux_nvmf::host::tcp::{Config, Connection};
use rdmux_wire::nvme::NsId;
use rdmux_wire::nvme_tcp::Digests;

/// A byte of settings, then what the target sends: the host takes it, whatever it is, or ends the connection; each command is done once or is
/// left, and no data are outside of its buffer.
///
/// Settings: 1 header digests, 2 data digests, 4 an I/O queue; the other bits are the bytes that arrive at a time.
pub(crate) fn nvme_host(input: &[u8]) {
    let [settings, bytes @ ..] = input else {
        return;
    };
    let mut host = Connection::new(Config {
        digests: Digests::from_bits_truncate(settings & 3),
        entries: 5,
        in_capsule_max: 8192,
        is_io: settings & 4 != 0,
    });
    let step = 1 + usize::from(settings >> 3) * 97;
    let (mut submitted, mut done) = (0, 0);
    for mut part in bytes.chunks(step) {
        while !part.is_empty() && host.end().is_none() {
            let space = host.space();
            let len = space.len().min(part.len());
            space[..len].copy_from_slice(&part[..len]);
            host.received(len);
            part = &part[len..];
        }
        loop {
            let mut slices = [IoSlice::new(&[]); 4];
            let number = host.slices(&mut slices);
            if number == 0 {
                break;
            }
            let len: usize = slices[..number].iter().map(|slice| slice.len()).sum();
            // As a socket that takes less than it is given.
            host.sent(len.div_ceil(2));
        }
        while let Some(completion) = host.poll() {
            assert!(completion.received <= completion.command.data.len());
            done += 1;
        }
        while host.room() > 0 && submitted < 64 {
            host.submit(
                match submitted % 4 {
                    0 => read(NsId(1), 0, 2, 8192, vec![0; 8192]),
                    1 => write(NsId(1), 0, 1, 4096, vec![1; 4096]),
                    2 => write(NsId(1), 0, 4, 16384, vec![2; 16384]),
                    _ => flush(NsId(1)),
                },
                None,
            );
            submitted += 1;
        }
    }
    assert_eq!(done + host.in_flight(), submitted);
    assert_eq!(host.take_commands().len(), submitted - done);
}
