use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use rdmux_share::node::snapshot::{
    Application, Connection, Counts, NodeState, Route, SharedQp, Snapshot, Tenant,
};

use super::screen::{Screen, Then};
use super::*;

/// Returns what has moved after so many seconds: so many requests a second, of so many bytes.
fn counts(seconds: u64, per_s: u64, bytes: u64, ns: u64) -> Counts {
    let mut counts = Counts {
        requests: seconds * per_s,
        bytes: seconds * per_s * bytes,
        waiting_requests: per_s.min(16),
        ..Counts::default()
    };
    (0..seconds * per_s).for_each(|_| counts.latency.record(ns));
    counts
}

/// A database and its backup in a tenant, and somebody else's program in another.
fn snapshot(seconds: u64) -> Snapshot {
    let bulk = counts(seconds, 3000, 65_536, 900_000);
    let beats = counts(seconds, 500, 64, 5000);
    let mut web = counts(seconds, 100, 4096, 20_000);
    web.errors = seconds;
    let mut both = bulk;
    both.add(&beats);
    let tenant = |name: &str, applications, counts| Tenant {
        name: name.into(),
        applications,
        weight: Some(3),
        rate_bps: None,
        ceiling_bps: Some(1_000_000),
        counts,
    };
    let application = |id, pid, name: &str, tenant: &str, counts| Application {
        id,
        pid: Some(pid),
        uid: Some(1000),
        name: name.into(),
        tenant: tenant.into(),
        queue_pairs: 1,
        counts,
    };
    let connection = |application, qpn, class, shared_qp: Option<u64>, counts| Connection {
        application,
        qpn,
        peer: Some([10, 0, 0, 2].into()),
        class: Some(class),
        route: if shared_qp.is_some() {
            Route::Shared
        } else {
            Route::Own
        },
        shared_qp,
        counts,
    };
    Snapshot {
        node: NodeState {
            address: [10, 0, 0, 1].into(),
            provider: "soft".into(),
            time_ns: seconds * 1_000_000_000,
            waiting: "running".into(),
            retransmitted_packets: 7,
            is_whole: true,
        },
        tenants: vec![tenant("database", 2, both), tenant("web", 1, web)],
        applications: vec![
            application(1, 4711, "beats", "database", beats),
            application(2, 4712, "backup", "database", bulk),
            application(3, 4713, "nginx", "web", web),
        ],
        connections: vec![
            connection(1, 0x11, 7, Some(5), beats),
            connection(2, 0x12, 0, Some(6), bulk),
            connection(3, 0x13, 0, None, web),
        ],
        connections_left_out: 0,
        shared_qps: [5, 6]
            .map(|id| SharedQp {
                id,
                peer: [10, 0, 0, 2].into(),
                tenant: "database".into(),
                peer_tenant: "database".into(),
                class: 0,
                connections: 1,
                window_bytes: 65_536,
                in_flight_bytes: 0,
            })
            .into(),
    }
}

fn frame() -> Frame {
    Frame::of(&snapshot(1), &snapshot(3))
}

/// Returns a screen of so many frames.
fn screen(frames: u64) -> Screen {
    let mut screen = Screen::new();
    for second in 1..=frames {
        screen.take(Frame::of(&snapshot(second), &snapshot(second + 1)));
    }
    screen
}

fn press(screen: &mut Screen, keys: &str) {
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\x1b' => KeyCode::Esc,
            key => KeyCode::Char(key),
        };
        assert_eq!(screen.press(KeyEvent::new(code, KeyModifiers::NONE)), Then::Stay);
    }
}

fn drawn(screen: &mut Screen, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|surface| screen.draw(surface)).unwrap();
    let buffer = terminal.backend().buffer();
    let lines = (0..height).map(|y| {
        let line: String = (0..width).map(|x| buffer[(x, y)].symbol()).collect();
        line.trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the first column of the table.
fn names(screen: &mut Screen) -> Vec<String> {
    let text = drawn(screen, 120, 20);
    let rows = text.lines().skip(5).take_while(|line| !line.is_empty());
    rows.map(|line| line.chars().take(26).collect::<String>().trim_end().to_owned())
        .collect()
}

#[test]
fn table__plain() {
    let expected = "\
node 10.0.0.1 (soft), running: 3 applications, 3 connections, 2 shared, 197 MB/s, 7 packets retransmitted
WHO            PEER      ROUTE     CLASS       RATE  SHARE  REQ/S      P50      P99  DEPTH  ERRORS
database                                   197 MB/s  99.8%  3.50k   743 us  1.04 ms     32       0
  4711 beats                              32.0 kB/s   0.0%    500  6.14 us  8.15 us     16       0
    0x000011   10.0.0.2  shared 5      7  32.0 kB/s   0.0%    500  6.14 us  8.15 us     16       0
  4712 backup                              197 MB/s  99.8%  3.00k   786 us  1.04 ms     16       0
    0x000012   10.0.0.2  shared 6      0   197 MB/s  99.8%  3.00k   786 us  1.04 ms     16       0
web                                        410 kB/s   0.2%    100  24.6 us  32.6 us     16       2
  4713 nginx                               410 kB/s   0.2%    100  24.6 us  32.6 us     16       2
    0x000013   10.0.0.2  own           0   410 kB/s   0.2%    100  24.6 us  32.6 us     16       2";
    assert_eq!(table(&frame()), expected);
}

#[test]
fn title__of_a_node_without_tenants() {
    let none = Snapshot {
        tenants: Vec::new(),
        applications: Vec::new(),
        connections: Vec::new(),
        ..snapshot(1)
    };
    let title = Frame::of(&none, &none).title();
    assert!(title.contains("0 connections, 2 shared, 0 B/s"), "{title}");
}

#[test]
fn json__keys() {
    let value = serde_json::to_value(frame()).unwrap();
    assert_eq!(value["interval_ns"], 2_000_000_000_u64);
    let connection = &value["connections"][1];
    assert_eq!(connection["bytes_per_s"], 3000.0 * 65_536.0);
    assert_eq!(connection["route"], "shared");
    for (list, keys) in [
        ("tenants", "name, applications"),
        ("applications", "id, pid, uid, name, tenant, queue_pairs"),
        ("connections", "application, qpn, peer, class, route, shared_qp"),
        (
            "shared_qps",
            "id, peer, tenant, peer_tenant, class, connections, window_bytes, in_flight_bytes",
        ),
    ] {
        for key in keys.split(", ") {
            assert!(value[list][0].get(key).is_some(), "{list} {key}");
        }
        let common = "requests_per_s, bytes_per_s, receives_per_s, received_bytes_per_s, share, p50_ns, p99_ns, \
                      waiting_requests, waiting_bytes, errors";
        for key in common.split(", ") {
            assert!(
                value[list][0].get(key).is_some() || list == "shared_qps",
                "{list} {key}"
            );
        }
    }
}

#[test]
fn draw__tree() {
    let expected = "\
node 10.0.0.1 (soft), running: 3 applications, 3 connections, 2 shared, 197 MB/s, 7 packets retransmitted
████████████                                                                                                max 197 MB/s
████████████
████████████
WHO                         PEER            ROUTE     CL     RATE▽  SHARE  REQ/S     P50     P99  DEPTH   ERR LATELY
database                                                  197 MB/s  99.8%  3.50k  743 us 1.04 ms     32     0 ██████████
  4712 backup                                             197 MB/s  99.8%  3.00k  786 us 1.04 ms     16     0 ██████████
    0x000012                10.0.0.2        shared 6   0  197 MB/s  99.8%  3.00k  786 us 1.04 ms     16     0 ██████████
  4711 beats                                             32.0 kB/s   0.0%    500 6.14 us 8.15 us     16     0 ██████████
    0x000011                10.0.0.2        shared 5   7 32.0 kB/s   0.0%    500 6.14 us 8.15 us     16     0 ██████████
web                                                       410 kB/s   0.2%    100 24.6 us 32.6 us     16     1 ██████████
  4713 nginx                                              410 kB/s   0.2%    100 24.6 us 32.6 us     16     1 ██████████
    0x000013                10.0.0.2        own        0  410 kB/s   0.2%    100 24.6 us 32.6 us     16     1 ██████████


F1Help F4Filter F5Tree F6Sort: RATE F7Turn SpaceHold F10Quit";
    assert_eq!(drawn(&mut screen(12), 120, 16), expected);
}

#[test]
fn draw__whatever_the_size() {
    let mut screen = screen(3);
    for (width, height) in [(1, 1), (10, 3), (40, 5), (300, 100)] {
        drawn(&mut screen, width, height);
    }
    // A narrow one spares what matters least.
    let text = drawn(&mut screen, 60, 20);
    for words in ["database", "197 MB/s", "1.04 ms", "99.8%"] {
        assert!(text.contains(words), "{words}:\n{text}");
    }
    assert!(!text.contains("10.0.0.2") && !text.contains("LATELY"), "{text}");
    press(&mut screen, "h");
    drawn(&mut screen, 3, 2);
    let help = drawn(&mut screen, 80, 24);
    for words in ["this help", "several connections go", "by polling (running)"] {
        assert!(help.contains(words), "{words}:\n{help}");
    }
    press(&mut screen, "h");
    assert!(!drawn(&mut screen, 80, 24).contains("this help"));
}

#[test]
fn press__order_filter_and_level() {
    let mut screen = screen(2);
    let tree = [
        "database",
        "  4712 backup",
        "    0x000012",
        "  4711 beats",
        "    0x000011",
        "web",
        "  4713 nginx",
        "    0x000013",
    ];
    assert_eq!(names(&mut screen), tree);
    press(&mut screen, "I");
    assert_eq!(names(&mut screen)[..2], ["web", "  4713 nginx"]);
    press(&mut screen, "I<");
    // By name.
    assert_eq!(names(&mut screen)[1], "  4711 beats");
    press(&mut screen, ">/BEATS\n");
    assert_eq!(names(&mut screen), ["database", "  4711 beats", "    0x000011"]);
    press(&mut screen, "\x1bt");
    assert_eq!(names(&mut screen), ["database", "web"]);
    press(&mut screen, "tt");
    assert_eq!(names(&mut screen), ["0x000012", "0x000013", "0x000011"]);
    press(&mut screen, "/shared 5\n");
    assert_eq!(names(&mut screen), ["0x000011"]);
    press(&mut screen, "/\x1b ");
    screen.take(Frame::of(
        &snapshot(1),
        &Snapshot {
            connections: Vec::new(),
            ..snapshot(2)
        },
    ));
    // It is held.
    assert_eq!(names(&mut screen).len(), 3);
    let quits = [
        (KeyCode::Char('q'), KeyModifiers::NONE),
        (KeyCode::F(10), KeyModifiers::NONE),
        (KeyCode::Char('c'), KeyModifiers::CONTROL),
    ];
    for (code, modifiers) in quits {
        assert_eq!(screen.press(KeyEvent::new(code, modifiers)), Then::Quit);
    }
}

#[test]
fn interval__bounds() {
    assert_eq!(interval("0.05"), Ok(Duration::from_millis(50)));
    assert_eq!(interval("86400"), Ok(Duration::from_secs(86_400)));
    for text in ["0.04", "-1", "nan", "inf", "86401", "", "x"] {
        assert!(interval(text).is_err(), "{text}");
    }
}
