//! Memory beside the shared memory under test: the nodes of a test, which are processes of one host, tell by it what they have seen, and wait for
//! each other without a message.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rdmux_dsm::FaultMode;
use rdmux_memory::mapping::{Mapping, sealed_file};

use crate::common::{LONG, run_with};

/// Set to the path of the file.
const VARIABLE: &str = "RDMUX_DSM_TEST_BOARD";
const BYTES: usize = 1 << 20;
/// Words from one node's progress to that of the next: a line of the processor's caches.
const LINE_WORDS: usize = 8;
const NODES_MAX: usize = 8;

/// Runs nodes that have a board, as [`crate::common::run`] does. Returns what each has printed.
pub(crate) fn run_with_board(part: &str, nodes: u32, mode: FaultMode) -> Vec<String> {
    let file = sealed_file("rdmux-dsm-test", BYTES as u64).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    run_with(part, nodes, mode, &[(VARIABLE, &path)])
}

/// The board of a test, at one of its nodes.
pub(crate) struct Board {
    mapping: Mapping,
    node: usize,
    nodes: usize,
}

impl Board {
    pub(crate) fn open(node: usize, nodes: usize) -> Board {
        assert!(node < nodes && nodes <= NODES_MAX);
        let path = std::env::var(VARIABLE).expect("a board");
        let file = File::options().read(true).write(true).open(path).unwrap();
        let mapping = Mapping::of_sealed_file(&file, 0, BYTES, true).unwrap();
        Board { mapping, node, nodes }
    }

    /// Returns a word that all nodes may use.
    pub(crate) fn word(&self, number: usize) -> &AtomicU64 {
        self.mapping.double_word((NODES_MAX * LINE_WORDS + number) * 8)
    }

    /// Tells how far this node is, and waits until all others are there or were there.
    pub(crate) fn meet(&self, turn: u64) {
        let progress = |node: usize| self.mapping.double_word(node * LINE_WORDS * 8);
        progress(self.node).store(turn, Ordering::SeqCst);
        let deadline = Instant::now() + LONG;
        for node in 0..self.nodes {
            while progress(node).load(Ordering::SeqCst) < turn {
                assert!(
                    Instant::now() < deadline,
                    "node {node} does not come to turn {turn}"
                );
                std::thread::yield_now();
            }
        }
    }
}
