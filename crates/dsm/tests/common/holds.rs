//! Things that a process holds, before it uses the library and after that.

use rdmux_dsm::{Cluster, Error};

use super::{LONG, clusters, named, until};

/// Things that a process holds: kinds of its descriptors, its threads, and mappings of files in memory.
#[derive(Debug)]
pub(crate) struct Holds {
    descriptors: Vec<String>,
    threads: Vec<String>,
    mappings: Vec<String>,
}

impl Holds {
    pub(crate) fn now() -> Holds {
        let list = |folder: &str, read: &dyn Fn(std::path::PathBuf) -> Option<String>| {
            let entries = std::fs::read_dir(folder).unwrap();
            let mut all: Vec<String> = entries.filter_map(|it| read(it.ok()?.path())).collect();
            all.sort();
            all
        };
        // Numbers of sockets are new for each.
        let kind = |target: String| target.split('[').next().map(str::to_owned);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Holds {
            descriptors: list("/proc/self/fd", &|path| {
                kind(std::fs::read_link(path).ok()?.to_str()?.to_owned())
            }),
            threads: list("/proc/self/task", &|path| {
                std::fs::read_to_string(path.join("comm")).ok()
            }),
            mappings: maps
                .lines()
                .filter_map(|line| Some(line.split_once("memfd:")?.1.to_owned()))
                .collect(),
        }
    }

    /// Returns whether another one has all of this. It may have more: threads that other parts of the library have left end when they have been idle.
    fn is_within(&self, other: &Holds) -> bool {
        let is_part = |of: &[String], all: &[String]| {
            let count = |list: &[String], kind: &String| list.iter().filter(|it| *it == kind).count();
            of.iter().all(|kind| count(of, kind) <= count(all, kind))
        };
        is_part(&self.descriptors, &other.descriptors)
            && is_part(&self.threads, &other.threads)
            && is_part(&self.mappings, &other.mappings)
    }

    /// Waits until the process holds no more than that.
    pub(crate) fn wait(&self) {
        until(|| {
            let now = Holds::now();
            match now.is_within(self) {
                true => Ok(()),
                false => Err(format!("{now:#?} instead of {self:#?}")),
            }
        });
    }
}

/// Has this process use the memory of a cluster of its own for some rounds, and then of the one of its environment until a node is missing. Tells the
/// error, and that the process holds no more than between the two.
pub(crate) fn leave(use_memory: impl Fn(Cluster, u64) -> Result<(), Error> + Sync) {
    // A thread keeps the links of the device at which it has polled until it ends.
    let in_thread = |cluster, rounds| {
        std::thread::scope(|scope| scope.spawn(|| use_memory(cluster, rounds)).join().unwrap())
    };
    // The things that the first use of the library leaves for good are no leak.
    in_thread(clusters(1, LONG).remove(0), 3).unwrap();
    let before = Holds::now();
    let error = in_thread(Cluster::of_environment().unwrap(), u64::MAX).unwrap_err();
    println!("@ misses {}: {error}", named(&error));
    before.wait();
    println!("@ left");
}
