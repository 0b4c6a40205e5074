//! Cuts requests into pieces.

use rdmux_rnic::{Operation, SGE_MAX, SendFlags, SendRequest, Sge, SgeList};

/// Returns whether a request may be carried out in pieces, as nobody but who waits for its completion can tell the difference. (A WRITE
/// whose later part the peer refuses has written its earlier part then.)
pub(super) fn may_cut(request: &SendRequest) -> bool {
    let in_pieces = matches!(
        request.operation,
        Operation::Write { imm: None, .. } | Operation::Read { .. }
    );
    in_pieces && request.sges.as_inline().is_none()
}

/// Returns the request for `length` bytes at `offset` of a request that [may be cut](may_cut), without a number. It begins after whatever
/// the request begins after.
pub(super) fn part_of(request: &SendRequest, offset: u32, length: u32) -> SendRequest {
    // The device checks addresses; one beyond the last address is in no region.
    let at = |va: u64| va.wrapping_add(offset.into());
    let operation = match request.operation {
        Operation::Write { va, rkey, imm } => Operation::Write {
            va: at(va),
            rkey,
            imm,
        },
        Operation::Read { va, rkey } => Operation::Read { va: at(va), rkey },
        ref other => other.clone(),
    };
    let mut flags = request.flags;
    if offset > 0 {
        // The others follow the first piece, which has waited.
        flags.remove(SendFlags::FENCE);
    }
    SendRequest {
        wr_id: 0,
        operation,
        sges: list_of_part(request.sges.as_slice(), offset, length),
        flags,
        to: request.to,
    }
}

/// Returns the elements of `length` bytes at `offset` of a list.
pub(super) fn list_of_part(list: &[Sge], offset: u32, length: u32) -> SgeList {
    let mut part = [Sge::default(); SGE_MAX];
    let (mut count, mut skip, mut left) = (0, offset, length);
    for sge in list {
        let skipped = skip.min(sge.length);
        skip -= skipped;
        let taken = (sge.length - skipped).min(left);
        if taken > 0 && count < part.len() {
            part[count] = Sge {
                addr: sge.addr.wrapping_add(skipped.into()),
                length: taken,
                lkey: sge.lkey,
            };
            count += 1;
            left -= taken;
        }
        if left == 0 {
            break;
        }
    }
    part[..count].into()
}

#[cfg(test)]
mod tests {
    use rdmux_rnic::{LKey, RKey, RemoteBuffer};

    use super::*;

    fn remote() -> RemoteBuffer {
        RemoteBuffer {
            address: 0x9000,
            length: 1 << 20,
            rkey: RKey(7),
        }
    }

    fn list() -> Vec<Sge> {
        [(0x1000, 10), (0x2000, 0), (0x3000, 5), (0x4000, 20)]
            .iter()
            .zip(1..)
            .map(|((addr, length), lkey)| Sge::new(*addr, *length, LKey(lkey)))
            .collect()
    }

    /// Returns each byte of a list: its address and key.
    fn bytes_of(list: &[Sge]) -> Vec<(u64, u32)> {
        list.iter()
            .flat_map(|sge| (0..u64::from(sge.length)).map(|at| (sge.addr + at, sge.lkey)))
            .collect()
    }

    #[test]
    fn part_of__parts_of_every_length_are_the_whole() {
        for length in 1..=36 {
            let whole = SendRequest::write(list().as_slice(), remote());
            let (mut all, mut offset) = (Vec::new(), 0);
            while offset < 35 {
                let length = length.min(35 - offset);
                let part = part_of(&whole, offset, length);
                assert_eq!(part.check(), Ok(length));
                let Operation::Write { va, rkey, imm: None } = part.operation else {
                    panic!("{part:?}");
                };
                assert_eq!((va, rkey), (0x9000 + u64::from(offset), RKey(7)));
                all.extend(bytes_of(part.sges.as_slice()));
                offset += length;
            }
            assert_eq!(all, bytes_of(&list()));
        }
    }

    #[test]
    fn part_of__the_first_part_alone_is_fenced() {
        let whole = SendRequest::read(list().as_slice(), remote()).fence().signaled();
        let parts = [part_of(&whole, 0, 10), part_of(&whole, 10, 25)];
        let fenced = parts.map(|part| part.flags.contains(SendFlags::FENCE));
        assert_eq!(fenced, [true, false]);
    }

    #[test]
    fn part_of__addresses_beyond_the_last_one() {
        let far = RemoteBuffer {
            address: u64::MAX,
            ..remote()
        };
        let whole = SendRequest::read(Sge::new(u64::MAX, 8, LKey(1)), far);
        let part = part_of(&whole, 4, 4);
        assert_eq!(part.sges.as_slice()[0].addr, 3);
    }

    #[test]
    fn may_cut__what_a_receive_or_a_single_access_belongs_to_stays_whole() {
        let local = || Sge::new(0, 8, LKey(1));
        let yes = [
            SendRequest::write(local(), remote()),
            SendRequest::read(local(), remote()),
        ];
        let no = [
            SendRequest::send(local()),
            SendRequest::write(local(), remote()).imm(1),
            SendRequest::write(SgeList::inline(b"x"), remote()),
            SendRequest::fetch_add(local(), remote(), 1),
            SendRequest::compare_swap(local(), remote(), 1, 2),
            SendRequest::atomic_write(local(), remote()),
        ];
        assert!(yes.iter().all(may_cut));
        assert!(!no.iter().any(may_cut));
    }
}
