//! The log of the units that a node has released, and how others read it ([`rdmux_wire::dsm::notice`]).

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use rdmux_memory::mapping::Mapping;
use rdmux_wire::dsm::notice::{HEADER_LEN, Header, LOG_LEN, RUN_LEN, RUNS, Run};

use super::Looked;

/// Adds units to the log at an offset of this node's memory.
///
/// # Panics
/// If the log is not inside of the memory, or the offset is no multiple of 8.
pub fn append(memory: &Mapping, log: usize, run: Run) {
    let (begun, ended) = (memory.double_word(log), memory.double_word(log + 8));
    let number = u64::from_le(ended.load(Ordering::Relaxed));
    begun.store((number + 1).to_le(), Ordering::Relaxed);
    // A reader of the run, even of a part of it, that reads the count of those begun after it, reads this one.
    fence(Ordering::Release);
    memory
        .double_word(log + place(number))
        .store(u64::from_ne_bytes(run.emit()), Ordering::Relaxed);
    ended.store((number + 1).to_le(), Ordering::Release);
}

/// Returns the offset of a run in a log.
fn place(number: u64) -> usize {
    HEADER_LEN + (number % RUNS) as usize * RUN_LEN
}

/// One node's view of the log of another one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reader {
    /// Runs that were read.
    seen: u64,
    /// Runs that are read with the second part of a look.
    until: u64,
}

/// The second part of a look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rest {
    /// There is none.
    Done(Looked),
    /// Read these bytes of the log, then its header again.
    Read([Range<usize>; 2]),
}

impl Reader {
    /// Takes the header of the log.
    pub fn begin(&mut self, header: &[u8]) -> Rest {
        let Ok(Header { ended, .. }) = Header::parse(header) else {
            return Rest::Done(Looked::Lapped);
        };
        // A log that loses runs makes no sense.
        let news = ended.checked_sub(self.seen);
        if news == Some(0) {
            return Rest::Done(Looked::Runs(Vec::new()));
        }
        if news.is_none_or(|news| news > RUNS) {
            self.seen = ended;
            return Rest::Done(Looked::Lapped);
        }
        self.until = ended;
        let (first, last) = (place(self.seen), place(ended - 1) + RUN_LEN);
        Rest::Read(match first < last {
            true => [first..last, 0..0],
            false => [first..LOG_LEN, HEADER_LEN..last],
        })
    }

    /// Takes the log of which the second part was read, with its new header. Runs of other bytes are of any content.
    pub fn end(&mut self, log: &[u8]) -> Looked {
        let runs = self.seen..self.until;
        self.seen = self.until;
        let begun = Header::parse(log).map_or(u64::MAX, |it| it.begun);
        if begun.wrapping_sub(runs.start) > RUNS {
            return Looked::Lapped;
        }
        let run = |number| Run::parse(*log.get(place(number)..)?.first_chunk()?).ok();
        runs.map(run)
            .collect::<Option<Vec<Run>>>()
            .map_or(Looked::Lapped, Looked::Runs)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    const LOG: usize = 64;

    /// Reads a log as a device does: parts in their order, words of a part in any.
    fn look(memory: &Mapping, reader: &mut Reader) -> Looked {
        let mut copy = vec![0xee; LOG_LEN];
        let read = |copy: &mut [u8], bytes: Range<usize>| {
            for at in bytes.step_by(8).rev() {
                let word = memory.double_word(LOG + at).load(Ordering::Relaxed);
                copy[at..at + 8].copy_from_slice(&word.to_ne_bytes());
            }
            fence(Ordering::Acquire);
        };
        read(&mut copy, 0..HEADER_LEN);
        match reader.begin(&copy) {
            Rest::Done(looked) => looked,
            Rest::Read(parts) => {
                parts.into_iter().for_each(|bytes| read(&mut copy, bytes));
                read(&mut copy, 0..HEADER_LEN);
                reader.end(&copy)
            }
        }
    }

    fn run(number: u64) -> Run {
        let (first, count) = (number as u32, 1 + number as u32 % 5);
        Run { first, count }
    }

    #[test]
    fn reader__takes_each_run_once_or_hears_that_the_log_has_lapped() {
        let memory = Mapping::anonymous(LOG + LOG_LEN).unwrap();
        let mut reader = Reader::default();
        let mut number = 0;
        for count in [0, 1, 3, RUNS, 5, RUNS - 1, RUNS + 1, 2, 4 * RUNS, 0] {
            let runs: Vec<Run> = (number..number + count).map(run).collect();
            runs.iter().for_each(|run| append(&memory, LOG, *run));
            number += count;
            let expected = match count > RUNS {
                true => Looked::Lapped,
                false => Looked::Runs(runs),
            };
            assert_eq!(look(&memory, &mut reader), expected);
        }
    }

    #[test]
    fn reader__misses_no_run_of_a_node_that_writes_meanwhile() {
        const RUNS_WRITTEN: u64 = 300_000;
        let memory = Mapping::anonymous(LOG + LOG_LEN).unwrap();
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..RUNS_WRITTEN).for_each(|number| append(&memory, LOG, run(number)));
                has_ended.store(true, Ordering::Release);
            });
            let mut reader = Reader::default();
            let mut number = 0;
            loop {
                let is_last = has_ended.load(Ordering::Acquire);
                match look(&memory, &mut reader) {
                    Looked::Runs(runs) => {
                        for it in runs {
                            assert_eq!(it, run(number));
                            number += 1;
                        }
                    }
                    _ => number = reader.seen,
                }
                if is_last {
                    break;
                }
            }
            assert_eq!(number, RUNS_WRITTEN);
        });
    }

    #[test]
    fn reader__of_a_log_that_makes_no_sense_takes_it_for_lapped() {
        let mut bytes = vec![0; LOG_LEN];
        let mut reader = Reader { seen: 7, until: 0 };
        assert_eq!(reader.begin(&bytes), Rest::Done(Looked::Lapped));
        // A run of no units.
        bytes[8] = 1;
        assert!(matches!(reader.begin(&bytes), Rest::Read(_)));
        assert_eq!(reader.end(&bytes), Looked::Lapped);
        assert_eq!(reader.begin(&bytes), Rest::Done(Looked::Runs(Vec::new())));
        // Counts that wrap, as those of no correct node do.
        for (seen, ended) in [(u64::MAX, 0), (0, u64::MAX)] {
            let mut reader = Reader { seen, until: 0 };
            bytes[8..16].copy_from_slice(&ended.to_le_bytes());
            assert_eq!(reader.begin(&bytes), Rest::Done(Looked::Lapped));
            assert_eq!(reader.begin(&bytes), Rest::Done(Looked::Runs(Vec::new())));
        }
    }
}
