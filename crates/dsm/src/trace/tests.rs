use super::*;

const TEXT: &str = "\
rdmux-dsm-trace 1 node 1 nodes 2
10 region 0 64 4096 sequential in-turn 4
11 region 1 16 256 release named 0 1 8 0
12 region 2 16 4096 sequential first-touch
13 region 3 16 4096 release hash
20 begin 0
30 pages 0 60 4 write
31 prefetch 1 0 16 read
32 release
33 acquire
34 exchange 0
40 barrier 0 7 2
41 reduce 0 7 2 sum-f64 4607182418800017408
42 lock 0 8 exclusive
43 unlock 0 8 exclusive
44 lock 0 9 shared
45 wait 0 10 8
46 signal 0 10
47 broadcast 0 10
48 fetch-add 0 11 1
49 compare-swap 0 11 1 2
50 load 0 11
51 mark 2
60 end 0
stop
";

#[test]
fn parse__returns_what_was_written() {
    let trace = Trace::parse(TEXT).unwrap();
    assert_eq!((trace.node, trace.nodes, trace.steps.len()), (1, 2, 23));
    let pages = Event::Pages {
        region: 0,
        first: 60,
        count: 4,
        access: Access::Write,
        waits: true,
    };
    assert_eq!(
        trace.steps[5],
        Step {
            cpu_ns: 30,
            event: pages
        }
    );
    assert_eq!(trace.to_string(), TEXT);
}

#[test]
fn parse__names_the_line_that_is_damaged() {
    for (old, new, expected) in [
        ("trace 1", "trace 2", "line 1: not the first line of a trace"),
        ("node 1 nodes 2", "node 2 nodes 2", "line 1: "),
        ("10 region 0", "10 region 1", "line 2: a region that cannot be"),
        ("in-turn 4", "in-turn", "line 2: it ends too early"),
        ("in-turn 4", "by-turn 4", "line 2: \"by-turn\" is no placement"),
        ("0 60 4 write", "0 60 5 write", "line 7: units that no region has"),
        ("0 60 4 write", "4 0 1 write", "line 7: units that no region has"),
        (
            "0 60 4 write",
            "0 4294967295 4 write",
            "line 7: units that no region has",
        ),
        ("4 write", "4 touch", "line 7: \"touch\" may not stand here"),
        ("4 write", "4 write 5", "line 7: \"5\" is too much"),
        ("20 begin 0", "20 begin 4096", "line 6: a thread of a number"),
        (
            "34 exchange 0",
            "34 exchange 2",
            "line 11: a node that is not there",
        ),
        (
            "barrier 0 7 2",
            "barrier 0 7 0",
            "line 12: \"0\" may not stand here",
        ),
        ("46 signal", "46 sing", "line 18: \"sing\" is no event"),
        ("50 load", "-50 load", "line 22: \"-50\" may not stand here"),
        ("stop\n", "", "it has no end"),
        ("stop\n", "stop\n50 acquire\n", "line 26: it is behind the end"),
    ] {
        assert!(TEXT.contains(old), "{old}");
        let problem = Trace::parse(&TEXT.replacen(old, new, 1)).unwrap_err();
        assert!(
            problem.starts_with(expected) && !problem.contains('\n'),
            "{new}: {problem}"
        );
    }
}

#[test]
fn read_all__refuses_traces_that_do_not_go_together() {
    let folder = tempfile::tempdir().unwrap();
    let write = |node: u32, text: &str| {
        std::fs::write(folder.path().join(Trace::file_name(node)), text).unwrap();
    };
    let refused = || Trace::read_all(folder.path()).unwrap_err().to_string();
    assert!(refused().contains("node-0.trace: No such file"), "{}", refused());
    let first = TEXT.replacen("node 1", "node 0", 1);
    write(0, &first);
    write(1, TEXT);
    assert_eq!(Trace::read_all(folder.path()).unwrap().len(), 2);
    write(1, &first);
    assert!(
        refused().contains("node-1.trace: it is of another node"),
        "{}",
        refused()
    );
    write(1, &TEXT.replacen("in-turn 4", "in-turn 5", 1));
    assert!(refused().contains("node-1.trace: its regions"), "{}", refused());
    write(1, &TEXT.replacen("20 begin 0", "20 begin 0\n20 begin 1", 1));
    assert!(refused().contains("several threads"), "{}", refused());
}
