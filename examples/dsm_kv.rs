//! A hash table of fixed-size records in a distributed shared memory, with locks over groups of buckets.
//!
//! ```text
//! rdmux dsm run -n 2 -- dsm_kv [OPERATIONS [KEYS]]
//! ```
//!
//! Each thread puts, gets and deletes keys of its own, in an order that the seed decides, and gets those of others too. The outcomes of
//! operations on its own keys depend on nobody else, so they are checked against those of a table of one process, `HashMap`; a record of
//! another's key has to be whole. Then all keys are counted. A group of buckets is a page, so who has its lock is not disturbed by other groups.

mod dsm;

use std::collections::HashMap;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use rdmux_dsm::Array;
use rdmux_dsm::sync::Operation;

use crate::dsm::{Node, Options, Party, Report, seconds};

/// Words of a record: the key, and the value, which is this often there, as a record that is torn has different ones.
const RECORD: usize = 8;
/// Records of a bucket.
const BUCKET: usize = 8;
/// Buckets of a group.
const GROUP: usize = 8;
/// Records of a group.
const GROUP_RECORDS: usize = GROUP * BUCKET;

/// Puts, gets and deletes in a hash table
#[derive(Parser)]
struct Arguments {
    /// Operations of each thread
    #[arg(default_value_t = 20_000)]
    operations: usize,
    /// Keys of each thread
    #[arg(default_value_t = 2_000)]
    keys: u64,
    /// Seed of the operations
    #[arg(long, default_value_t = 7)]
    seed: u64,
    #[command(flatten)]
    options: Options,
}

/// Records by their keys, which are not 0.
trait Store {
    /// Returns the value of a key.
    fn get(&mut self, key: u64) -> Result<Option<u64>>;
    /// Sets the value of a key, and returns the one before.
    fn put(&mut self, key: u64, value: u64) -> Result<Option<u64>>;
    /// Removes a key, and returns its value.
    fn delete(&mut self, key: u64) -> Result<Option<u64>>;
}

impl Store for HashMap<u64, u64> {
    fn get(&mut self, key: u64) -> Result<Option<u64>> {
        Ok(HashMap::get(self, &key).copied())
    }
    fn put(&mut self, key: u64, value: u64) -> Result<Option<u64>> {
        Ok(self.insert(key, value))
    }
    fn delete(&mut self, key: u64) -> Result<Option<u64>> {
        Ok(self.remove(&key))
    }
}

/// Returns the bucket of a key. The multiplier is 2^64 divided by the golden ratio; the upper half depends on all bits.
fn bucket_of(key: u64, groups: usize) -> usize {
    let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    hash as usize % (groups * GROUP)
}

/// Returns the number of groups with which no bucket can overflow, whichever of the keys 1 to `keys` are there.
fn groups_for(keys: u64) -> usize {
    let fits = |groups: &usize| {
        let mut counts = vec![0; groups * GROUP];
        (1..=keys).for_each(|key| counts[bucket_of(key, *groups)] += 1);
        counts.into_iter().all(|count| count <= BUCKET)
    };
    let twice = |groups: &usize| groups.checked_mul(2);
    let mut groups = std::iter::successors(Some(1), twice);
    groups.find(fits).unwrap_or(usize::MAX)
}

/// The table as a thread uses it.
struct Table<'t, 'p, 'a> {
    words: Array<'a, u64>,
    groups: usize,
    party: &'t mut Party<'p>,
}

impl Table<'_, '_, '_> {
    /// Calls a function with the first word of the record that has a key or, if there is none, of a free one, under the lock of its group.
    fn with_record<R>(
        &mut self,
        key: u64,
        is_shared: bool,
        f: impl FnOnce(Array<'_, u64>, usize, Option<u64>) -> R,
    ) -> Result<R> {
        let (words, bucket) = (self.words, bucket_of(key, self.groups));
        let group = (bucket / GROUP) as u64;
        let thread = &mut self.party.thread;
        let guard = match is_shared {
            true => thread.lock_shared(group),
            false => thread.lock(group),
        };
        let guard = guard?;
        let records = || (bucket * BUCKET..(bucket + 1) * BUCKET).map(|record| record * RECORD);
        let found = records().find(|at| words.get(*at) == key);
        let free = || records().find(|at| words.get(*at) == 0);
        let at = found.or_else(free).context("a bucket overflows")?;
        let value = match found {
            Some(at) => Some(value_of(words, at)?),
            None => None,
        };
        let result = f(words, at, value);
        guard.unlock()?;
        Ok(result)
    }
}

impl Store for Table<'_, '_, '_> {
    fn get(&mut self, key: u64) -> Result<Option<u64>> {
        self.with_record(key, true, |_, _, value| value)
    }

    fn put(&mut self, key: u64, value: u64) -> Result<Option<u64>> {
        self.with_record(key, false, |words, at, before| {
            words.set(at, key);
            (1..RECORD).for_each(|word| words.set(at + word, value));
            before
        })
    }

    fn delete(&mut self, key: u64) -> Result<Option<u64>> {
        self.with_record(key, false, |words, at, before| {
            words.set(at, 0);
            before
        })
    }
}

/// Returns the value of a record.
fn value_of(words: Array<'_, u64>, at: usize) -> Result<u64> {
    let value = words.get(at + 1);
    let is_whole = (2..RECORD).all(|word| words.get(at + word) == value);
    ensure!(is_whole, "the record of key {} is torn", words.get(at));
    Ok(value)
}

/// The operations of the threads.
#[derive(Clone, Copy)]
struct Mix {
    operations: usize,
    keys: u64,
    seed: u64,
    parties: usize,
}

impl Mix {
    /// Carries out the operations of one thread. Returns a digest of the outcomes of those on its own keys.
    fn play(self, store: &mut impl Store, party: usize) -> Result<u64> {
        let parties = self.parties as u64;
        let mut random = fastrand::Rng::with_seed(self.seed.wrapping_mul(parties).wrapping_add(party as u64));
        let mut digest = 0u64;
        for _ in 0..self.operations {
            let number = random.u64(0..self.keys);
            let own = 1 + number * parties + party as u64;
            let value = random.u64(..);
            let outcome = match random.u8(0..10) {
                0..5 => store.get(own)?,
                5 => {
                    let other = random.u64(0..parties);
                    store.get(1 + number * parties + other)?;
                    continue;
                }
                6..9 => store.put(own, value)?,
                _ => store.delete(own)?,
            };
            let word = outcome.map_or(1, |value| value | 2);
            digest = digest.rotate_left(5).wrapping_mul(0x100_0000_01b3) ^ word;
        }
        Ok(digest)
    }
}

fn main() -> Result<()> {
    let Arguments {
        operations,
        keys,
        seed,
        options,
    } = Arguments::parse();
    ensure!(keys > 0, "no keys");
    let node = Node::join(options)?;
    let mix = Mix {
        operations,
        keys,
        seed,
        parties: node.parties(),
    };
    let groups = groups_for(keys * node.parties() as u64);
    let all_words = groups * GROUP_RECORDS * RECORD;
    let region = node.region(all_words, 1)?;
    let words = region.array::<u64>(0, all_words);
    let outcomes = node.run(|party| {
        let mut digest = 0;
        let number = party.number;
        let timed = party.time(&region, |party| {
            let mut table = Table { words, groups, party };
            digest = mix.play(&mut table, number)?;
            Ok(())
        })?;
        // Each thread counts the records of some groups.
        let own = dsm::share(groups, mix.parties, number);
        let records = own.start * GROUP_RECORDS..own.end * GROUP_RECORDS;
        let count = records.filter(|record| words.get(record * RECORD) != 0).count();
        let count = party.reduce(Operation::SumU64, count as u64)?;
        Ok((timed, digest, count))
    })?;
    let &(shared, _, count) = outcomes.first().context("no thread")?;

    let mut alone = HashMap::new();
    let mut digests = Ok(Vec::new());
    let seconds = seconds(|| {
        let play = |party| mix.play(&mut alone, party);
        digests = (0..mix.parties).map(play).collect();
    });
    let digests = digests?;
    let first = node.number() * node.threads();
    for (at, (_, digest, _)) in outcomes.iter().enumerate() {
        ensure!(
            *digest == digests[first + at],
            "seed {seed}: thread {at} had other outcomes than alone"
        );
    }
    ensure!(
        count == alone.len() as u64,
        "seed {seed}: {count} keys instead of {}",
        alone.len()
    );
    for record in 0..groups * GROUP_RECORDS {
        let (at, key) = (record * RECORD, words.get(record * RECORD));
        if key != 0 && alone.get(&key).copied() != Some(value_of(words, at)?) {
            bail!(
                "seed {seed}: key {key} has value {}, not {:?}",
                words.get(at + 1),
                alone.get(&key)
            );
        }
    }
    node.end(&Report {
        shared,
        alone: seconds,
        result: ("keys", count as f64),
    })
}
