//! I/O commands. NVM Command Set 1.0, 3.2.

use rdmux_wire::nvme::{DatasetRange, Opcode, Rw, Sqe, Status};

use super::admin::NAMESPACE;
use super::controller::{Controller, Work};

/// Most blocks that one range of Dataset Management gives up here.
const DEALLOCATED_MAX: u64 = 1 << 20;

impl Controller {
    /// Returns the bytes of data that a command has.
    pub(super) fn io_data_len(&self, sqe: &Sqe) -> usize {
        match sqe.opcode() {
            Opcode::READ | Opcode::WRITE => (Rw::parse(sqe).blocks as usize) << self.media.block_shift(),
            Opcode::DATASET_MANAGEMENT => usize::from(DatasetRange::count(sqe)) * DatasetRange::LEN,
            _ => 0,
        }
    }

    pub(super) fn begin_io(&mut self, sqe: &Sqe) -> Work {
        if sqe.nsid() != NAMESPACE {
            return Work::None(Status::INVALID_NAMESPACE.do_not_retry(), 0);
        }
        let limit = match self.shape.mdts {
            0 => usize::MAX,
            mdts => 4096 << mdts,
        };
        if self.io_data_len(sqe) > limit {
            return Work::None(Status::INVALID_FIELD.do_not_retry(), 0);
        }
        match sqe.opcode() {
            Opcode::READ => match self.blocks(sqe) {
                Ok((block, bytes)) => {
                    let mut data = vec![0; bytes];
                    self.media.read(block, &mut data);
                    self.counts.reads += 1;
                    Work::ToHost(data)
                }
                Err(status) => Work::None(status, 0),
            },
            Opcode::WRITE => match self.blocks(sqe) {
                Ok(_) => Work::FromHost,
                Err(status) => Work::None(status, 0),
            },
            Opcode::DATASET_MANAGEMENT => Work::FromHost,
            Opcode::WRITE_ZEROES => match self.blocks(sqe) {
                Ok((block, bytes)) => {
                    self.write_blocks(block, &vec![0; bytes], Rw::parse(sqe).fua);
                    Work::None(Status::SUCCESS, 0)
                }
                Err(status) => Work::None(status, 0),
            },
            Opcode::FLUSH => {
                self.media.flush();
                self.counts.flushes += 1;
                Work::None(Status::SUCCESS, 0)
            }
            _ => Work::None(Status::INVALID_OPCODE.do_not_retry(), 0),
        }
    }

    /// Returns first block and bytes of a command's blocks.
    fn blocks(&self, sqe: &Sqe) -> Result<(u64, usize), Status> {
        let rw = Rw::parse(sqe);
        let end = rw.slba.checked_add(rw.blocks.into());
        match end.is_some_and(|end| end <= self.media.blocks()) {
            true => Ok((rw.slba, (rw.blocks as usize) << self.media.block_shift())),
            false => Err(Status::LBA_OUT_OF_RANGE.do_not_retry()),
        }
    }

    fn write_blocks(&mut self, block: u64, bytes: &[u8], fua: bool) {
        self.media.write(block, bytes, fua || !self.write_cache);
        self.counts.writes += 1;
    }

    /// Returns first block and bytes of the whole blocks that a command is to write and that are here.
    pub(super) fn to_write(&self, sqe: &Sqe, bytes: &[u8]) -> Option<(u64, Vec<u8>)> {
        let (block, _) = self.blocks(sqe).ok()?;
        let whole = bytes.len() >> self.media.block_shift() << self.media.block_shift();
        (sqe.opcode() == Opcode::WRITE && whole > 0).then(|| (block, bytes[..whole].to_vec()))
    }

    /// Carries out a command whose data are here.
    pub(super) fn finish_io(&mut self, sqe: &Sqe, bytes: &[u8]) -> Status {
        if sqe.opcode() == Opcode::WRITE {
            self.write_blocks(Rw::parse(sqe).slba, bytes, Rw::parse(sqe).fua);
            return Status::SUCCESS;
        }
        if sqe.dword(11) & DatasetRange::DEALLOCATE == 0 {
            return Status::SUCCESS;
        }
        for range in DatasetRange::parse(bytes) {
            let number = u64::from(range.blocks).min(DEALLOCATED_MAX);
            let end = range.slba.checked_add(number);
            if end.is_none_or(|end| end > self.media.blocks()) {
                return Status::LBA_OUT_OF_RANGE.do_not_retry();
            }
            if number > 0 {
                let zeroes = vec![0; (number as usize) << self.media.block_shift()];
                self.write_blocks(range.slba, &zeroes, false);
            }
        }
        Status::SUCCESS
    }
}
