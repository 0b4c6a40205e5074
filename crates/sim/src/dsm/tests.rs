use std::num::NonZeroU32;

use rdmux_dsm::sync::Call;
use rdmux_dsm::trace::{Event, RegionMade, Step};
use rdmux_dsm::{Access, Consistency, Placement};

use super::*;

/// Costs by which times can be added up in the head.
const COSTS: Costs = Costs {
    latency_ns: 100,
    bytes_per_s: 1_000_000_000,
    message_ns: 10,
    fault_ns: 3,
    read_ns: 5,
    protect_ns: 7,
    protect_more_ns: 1,
    memory_bytes_per_s: 1_000_000_000,
    late_ns: 0,
};

fn step(cpu_ns: u64, event: Event) -> Step {
    Step { cpu_ns, event }
}

/// A region of units whose homes are the two nodes in turn.
fn region(consistency: Consistency) -> Step {
    step(
        0,
        Event::Region(RegionMade {
            number: 0,
            units: 16,
            unit_bytes: 4096,
            homes: Placement::InTurn(1),
            consistency,
        }),
    )
}

fn touch(cpu_ns: u64, first: u32, count: u32, access: Access) -> Step {
    let (region, waits) = (0, true);
    step(
        cpu_ns,
        Event::Pages {
            region,
            first,
            count,
            access,
            waits,
        },
    )
}

fn barrier(cpu_ns: u64) -> Step {
    let parties = NonZeroU32::MIN.saturating_add(1);
    let (thread, object) = (0, 0);
    step(
        cpu_ns,
        Event::Call {
            thread,
            call: Call::Barrier { object, parties },
        },
    )
}

fn mark(cpu_ns: u64, number: u32) -> Step {
    step(cpu_ns, Event::Mark(number))
}

fn traces(steps: [Vec<Step>; 2]) -> Vec<Trace> {
    let trace = |(node, steps)| Trace {
        node,
        nodes: 2,
        steps,
    };
    (0..).zip(steps).map(trace).collect()
}

/// Returns the times of the marks of a node.
fn times(report: &Report) -> Vec<u64> {
    report.marks.iter().map(|(_, moment)| moment.at_ns).collect()
}

/// A node that reads one unit of the other, which computes for a while, and then writes it.
fn read_of_one_unit(computing_ns: u64) -> Vec<Trace> {
    let region = || region(Consistency::Sequential);
    traces([
        vec![
            region(),
            mark(1000, 1),
            touch(500, 1, 1, Access::Read),
            mark(0, 2),
            touch(100, 1, 1, Access::Write),
            mark(0, 3),
        ],
        vec![region(), mark(computing_ns, 9)],
    ])
}

#[test]
fn costs__by_default_are_those_that_the_documentation_states() {
    let page = include_str!("../../../../docs/dsm.md");
    let us = |ns: u64| format!("{:.1}", ns as f64 / 1e3);
    let gb = |bytes: u64| format!("{} GB/s", bytes / 1_000_000_000);
    let costs = Costs::default();
    let (first, more) = (us(costs.protect_ns), us(costs.protect_more_ns));
    for (cost, value) in [
        ("latency of a message", us(costs.latency_ns) + " us"),
        ("handling of a message", us(costs.message_ns) + " us"),
        ("a wait for a page", us(costs.fault_ns) + " us"),
        ("a READ at its node", us(costs.read_ns) + " us"),
        ("bytes that leave a node", gb(costs.bytes_per_s)),
        ("a change of rights", format!("{first}, {more} us")),
        ("copying and comparing", gb(costs.memory_bytes_per_s)),
        ("a node that computes answers late by", costs.late_ns.to_string()),
    ] {
        let begin = format!("| {cost}");
        let row = page.lines().find(|line| line.starts_with(&begin)).expect(cost);
        assert_eq!(row.split(" | ").nth(1), Some(&value[..]), "{row}");
    }
}

#[test]
fn replay__adds_up_the_costs_of_a_read() {
    let reports = replay(&read_of_one_unit(0), COSTS).unwrap();
    // The thread 3, Ask 100 + 10, Grant 100 + 10, READ 100 + 4096 + 100 + 5, and the change of the right 7.
    assert_eq!(
        times(&reports[0]),
        [1000, 1500 + 3 + 220 + 4301 + 7, 6031 + 100 + 3]
    );
    let part = reports[0].between(1, 2).unwrap();
    // Ask and Installed.
    assert_eq!((part.at_ns, part.units_read, part.messages), (5031, 1, 2));
    assert_eq!(reports[0].between(1, 4), None);
    assert_eq!((reports[1].end.units_read, reports[1].end.messages), (0, 1));
}

#[test]
fn replay__lets_a_node_that_computes_answer_late() {
    let costs = Costs {
        late_ns: 300,
        ..COSTS
    };
    let end = |traces: &[Trace]| times(&replay(traces, costs).unwrap()[0])[1];
    assert_eq!(end(&read_of_one_unit(0)), 6031);
    assert_eq!(end(&read_of_one_unit(100_000)), 6331);
    // It has come to its end before it would have answered.
    assert_eq!(end(&read_of_one_unit(1_700)), 6128);
}

#[test]
fn replay__changes_the_rights_to_units_of_the_node_itself_together() {
    let own = Placement::node(0);
    let mut steps = [
        vec![region(Consistency::Sequential)],
        vec![region(Consistency::Sequential)],
    ];
    for steps in &mut steps {
        if let Event::Region(region) = &mut steps[0].event {
            region.homes = own.clone();
        }
    }
    steps[0].extend([touch(10, 0, 16, Access::Write), mark(0, 1)]);
    let reports = replay(&traces(steps), COSTS).unwrap();
    assert_eq!(times(&reports[0]), [10 + 3 + 7 + 15]);
    assert_eq!(reports[0].end.messages, 0);
}

#[test]
fn replay__sends_the_data_of_a_node_one_after_the_other() {
    let region = || region(Consistency::Sequential);
    let first = vec![region(), touch(0, 1, 1, Access::Read), mark(0, 1)];
    let mut both = first.clone();
    // Unit 3 has the same home, and is asked for together with unit 1 and 2.
    both[1] = touch(0, 1, 3, Access::Read);
    let end = |steps| times(&replay(&traces([steps, vec![region()]]), COSTS).unwrap()[0])[0];
    let (one, two) = (end(first), end(both));
    assert!((one + 4096..one + 4096 + 100).contains(&two), "{one} {two}");
}

#[test]
fn replay__ends_a_barrier_when_the_last_node_has_come() {
    let [first, second] = [1000, 2000].map(|cpu_ns| vec![barrier(cpu_ns), mark(0, 1)]);
    let reports = replay(&traces([first, second]), COSTS).unwrap();
    // Node 0 is the barrier's home.
    assert_eq!(times(&reports[0]), [2110]);
    assert_eq!(times(&reports[1]), [2220]);
}

#[test]
fn replay__with_release_consistency_reads_again_what_was_noticed() {
    for (acquires, reads) in [(true, 2), (false, 1)] {
        let region = || region(Consistency::Release);
        let writer = vec![
            region(),
            barrier(0),
            touch(0, 0, 2, Access::Write),
            step(0, Event::Release),
            barrier(0),
        ];
        let mut reader = vec![region(), touch(0, 0, 1, Access::Read), barrier(0), barrier(0)];
        if acquires {
            reader.push(step(0, Event::Acquire));
        }
        reader.push(touch(0, 0, 1, Access::Read));
        let reports = replay(&traces([writer, reader]), COSTS).unwrap();
        // The writer is the home of unit 0, and reads unit 1 from its home.
        assert_eq!([0, 1].map(|node: usize| reports[node].end.units_read), [1, reads]);
    }
}

#[test]
fn replay__says_which_node_waits_for_ever() {
    let error = replay(&traces([vec![mark(0, 1), barrier(0)], vec![]]), COSTS).unwrap_err();
    assert_eq!(error, ReplayError::Stuck { node: 0, line: 3 });
    let text = error.to_string();
    assert!(text.starts_with("node 0 waits for ever in line 3 "), "{text}");
}

#[test]
fn replay__refuses_traces_that_are_not_of_one_run() {
    let both = traces([vec![region(Consistency::Sequential)], vec![]]);
    for wrong in [&both[..0], &both[..1], &both[1..], &both[..]] {
        assert!(
            matches!(replay(wrong, COSTS), Err(ReplayError::Nodes(..))),
            "{wrong:?}"
        );
    }
    let mut hashed = traces([
        vec![region(Consistency::Sequential)],
        vec![region(Consistency::Sequential)],
    ]);
    for trace in &mut hashed {
        if let Event::Region(region) = &mut trace.steps[0].event {
            region.homes = Placement::InTurn(0);
        }
    }
    let text = replay(&hashed, COSTS).unwrap_err().to_string();
    assert_eq!(text, "region 0: a run of no units");
}

#[test]
fn replay__reports_a_call_that_fails() {
    let call = Call::Unlock {
        object: 1,
        mode: rdmux_dsm::sync::Mode::Exclusive,
    };
    let steps = vec![step(0, Event::Call { thread: 0, call })];
    let text = replay(&traces([steps, vec![]]), COSTS).unwrap_err().to_string();
    assert_eq!(
        text,
        "node 0, line 2 of its trace: the thread does not have the lock in this mode"
    );
}
