//! A target that its user describes, as our host finds it: its discovery service as it changes, and the settings of its listeners.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_nvmf::control::Control;
use rdmux_nvmf::control::config::TargetConfig;
use rdmux_nvmf::control::rpc::respond;
use rdmux_nvmf::host::{Controller, Event, Options, Session, Transport, command};
use rdmux_nvmf::server::Handle;
use rdmux_wire::nvme::{DISCOVERY_NQN, DiscoveryEntry, Nqn, NsId, SubsystemKind};
use serde_json::{Value, json};

/// For what a correct target does at once.
const LONG: Duration = Duration::from_secs(60);

/// A target that runs.
struct Running {
    control: Control,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn new(config: &str) -> Running {
        rdmux_soft::register();
        let (control, server) = Control::start(TargetConfig::parse(config).unwrap()).unwrap();
        Running {
            control,
            handle: server.handle(),
            thread: Some(std::thread::spawn(move || server.run().unwrap())),
        }
    }

    fn ask(&self, method: &str, params: Value) -> Value {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let response = respond(&self.control, &request).unwrap();
        assert!(response["error"].is_null(), "{response}");
        response["result"].clone()
    }

    fn place(&self, nr: usize) -> SocketAddr {
        self.control.listeners()[nr].address
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))));
    }
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

#[test]
fn referrals__and_all_other_changes_reach_hosts_that_stay() {
    let name = "nqn.2014-08.org.example:discovery-changes";
    let subsystem = format!("[[subsystem]]\nnqn = \"{name}\"\nother_hosts = \"any\"\n");
    let described = format!("listen = [\"tcp:127.0.0.1:0\"]\n{subsystem}");
    let target = Running::new(&described);
    let options = Options {
        // Its host takes events when it sends Keep Alive.
        keep_alive: Duration::from_millis(500),
        ..Options::new(vec![target.place(0)], nqn(DISCOVERY_NQN))
    };
    let stays = Controller::connect(&Arc::new(options), 0).unwrap();
    let read = || {
        let log = stays.discovery_log().unwrap();
        let entries: Vec<DiscoveryEntry> = log.entries.into_iter().map(Result::unwrap).collect();
        (log.generation, entries)
    };
    let (mut generation, entries) = read();
    assert_eq!(
        entries[0].flags,
        DiscoveryEntry::PERSISTENT | DiscoveryEntry::SAME_LOG
    );
    let mut is_told = |what: &str| {
        let deadline = Instant::now() + LONG;
        while stays.take_events() != [Event::DiscoveryChanged] {
            assert!(Instant::now() < deadline, "{what}: no event");
            std::thread::sleep(Duration::from_millis(5)); // time is meant: the host looks for events between its keep-alives, and wakes nobody
        }
        let (now, entries) = read();
        assert!(now > generation, "{what}");
        generation = now;
        entries
    };
    let kinds = |entries: &[DiscoveryEntry]| entries.iter().map(|entry| entry.kind).collect::<Vec<_>>();

    let address = json!({ "trtype": "tcp", "traddr": "192.0.2.1", "trsvcid": "8009", "adrfam": "ipv4" });
    let first = json!({ "address": address });
    target.ask("nvmf_discovery_add_referral", first.clone());
    let entries = is_told("a referral");
    let referral = entries.last().unwrap();
    assert_eq!(referral.kind, SubsystemKind::Referral);
    assert_eq!(
        (referral.address, referral.subsystem.as_str(), referral.is_secure),
        ("192.0.2.1:8009".parse().unwrap(), DISCOVERY_NQN, false)
    );
    let own =
        json!({ "address": address, "subnqn": "nqn.2014-08.org.example:theirs", "secure_channel": true });
    target.ask("nvmf_discovery_add_referral", own.clone());
    let entries = is_told("a second one");
    assert_eq!(kinds(&entries)[2..], [SubsystemKind::Referral; 2]);
    assert!(entries[3].is_secure && entries[3].subsystem == nqn("nqn.2014-08.org.example:theirs"));
    // Nothing new: no host is told.
    target.ask("nvmf_discovery_add_referral", own);
    target.ask("nvmf_discovery_remove_referral", first);
    assert_eq!(is_told("the first goes").len(), 3);

    let other = json!({ "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "0" });
    let added = target.ask("nvmf_target_add_listener", json!({ "listen_address": other }));
    assert_eq!(is_told("a listener").len(), 5);
    let named = json!({ "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": added["trsvcid"] });
    target.ask("nvmf_target_remove_listener", json!({ "listen_address": named }));
    assert_eq!(is_told("it goes").len(), 3);
    target.ask("nvmf_subsystem_set_other_hosts", json!({ "other_hosts": "none" }));
    let entries = is_told("the host may no more");
    assert_eq!(
        kinds(&entries),
        [SubsystemKind::Discovery, SubsystemKind::Referral]
    );

    // The file is in force again: its referrals and no others.
    let of_file = format!("{described}[[referral]]\naddress = \"rdma:192.0.2.7\"\n");
    target
        .control
        .reload(TargetConfig::parse(&of_file).unwrap())
        .unwrap();
    let entries = is_told("the file");
    assert_eq!(
        kinds(&entries),
        [
            SubsystemKind::Discovery,
            SubsystemKind::Nvm,
            SubsystemKind::Referral
        ]
    );
    assert_eq!(entries[2].address, "192.0.2.7:4420".parse().unwrap());
    target
        .control
        .reload(TargetConfig::parse(&described).unwrap())
        .unwrap();
    assert_eq!(is_told("the file without").len(), 2);
    stays.close();
}

#[test]
fn in_capsule__each_listener_has_its_own_size() {
    let name = "nqn.2014-08.org.example:in-capsule";
    let target = Running::new(&format!(
        "listen = [\"tcp:127.0.0.1:0\", {{ address = \"tcp:127.0.0.1:0\", in_capsule_bytes = 0 }}, \
         {{ address = \"tcp:127.0.0.2:0\", in_capsule_bytes = 8192 }}, \
         \"rdma:127.0.33.201\", {{ address = \"rdma:127.0.33.202\", in_capsule_bytes = 0 }}, \
         {{ address = \"rdma:127.0.33.203\", in_capsule_bytes = \"16K\" }}]\n\
         [[subsystem]]\nnqn = \"{name}\"\nother_hosts = \"any\"\n[[subsystem.namespace]]\nmemory = \"1M\"\nblock = 512\n"
    ));
    let listening = target.ask("nvmf_target_get_listeners", json!({}));
    let sizes = [16 << 10, 0, 8192, 4096, 0, 16 << 10];
    for (nr, size) in sizes.into_iter().enumerate() {
        assert_eq!(listening[nr]["in_capsule_data_size"], size);
        let transport = if nr < 3 { Transport::Tcp } else { Transport::Rdma };
        let options = Options {
            transport,
            ..Options::new(vec![target.place(nr)], nqn(name))
        };
        let session = Session::connect(options, 1).unwrap();
        assert_eq!(session.controller().info().in_capsule_max, size);
        session.open_namespace(NsId(1)).unwrap();
        let mut queue = session.queue(1, 8).unwrap();
        // Sizes on both sides of each limit.
        for blocks in [1_u32, 8, 9, 16, 17, 32, 33] {
            let bytes = blocks as usize * 512;
            let data: Vec<u8> = (0..bytes).map(|at| (at / 512 + at + nr) as u8).collect();
            let write = command::write(NsId(1), 0, blocks, bytes as u32, data.clone());
            queue.run("Write", write).unwrap();
            let read = command::read(NsId(1), 0, blocks, bytes as u32, vec![0; bytes]);
            let read = queue.run("Read", read).unwrap();
            assert!(read.bytes() == data, "{transport:?} {size} {blocks}");
        }
        drop(queue);
        session.close();
    }
    // One that comes later.
    let listener = json!({ "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "0" });
    let params = json!({ "listen_address": listener, "in_capsule_data_size": 512 });
    target.ask("nvmf_target_add_listener", params);
    let options = Options::new(vec![target.place(6)], nqn(name));
    let controller = Controller::connect(&Arc::new(options), 0).unwrap();
    assert_eq!(controller.info().in_capsule_max, 512);
}

#[test]
fn in_capsule__wrong_sizes_are_one_line() {
    let start = |listen: &str| {
        let text = format!("listen = [{listen}]\nsubsystem = []\n");
        let error = match TargetConfig::parse(&text) {
            Ok(config) => Control::start(config).err().map(|error| error.to_string()),
            Err((_, what)) => Some(what),
        };
        error.expect("it is refused")
    };
    let error = start("{ address = \"tcp:127.0.0.1:0\", in_capsule_bytes = 32768 }");
    assert!(
        error.contains("'32768' is no size of data in capsules: give a multiple of 16, from 0 to 16K"),
        "{error}"
    );
}

#[test]
fn reload__other_settings_of_listeners_are_those_of_hosts_that_come() {
    let name = "nqn.2014-08.org.example:settings";
    let described = |sizes: [u32; 3]| {
        format!(
            "listen = [{{ address = \"tcp:127.0.0.1:0\", in_capsule_bytes = {} }}, \
             {{ address = \"rdma:127.0.33.204\", in_capsule_bytes = {} }}, \
             {{ address = \"rdma:127.0.33.204:4421\", in_capsule_bytes = {} }}]\n\
             [[subsystem]]\nnqn = \"{name}\"\nother_hosts = \"any\"\n[[subsystem.namespace]]\nmemory = \"1M\"\nblock = 512\n",
            sizes[0], sizes[1], sizes[2]
        )
    };
    let first = [0, 4096, 8192];
    let target = Running::new(&described(first));
    let session = |nr: usize| {
        let transport = if nr == 0 { Transport::Tcp } else { Transport::Rdma };
        let options = Options {
            transport,
            ..Options::new(vec![target.place(nr)], nqn(name))
        };
        let session = Session::connect(options, 1).unwrap();
        session.open_namespace(NsId(1)).unwrap();
        let queue = session.queue(1, 8).unwrap();
        (session, queue)
    };
    let mut stay: Vec<_> = (0..3).map(session).collect();
    let places: Vec<_> = (0..3).map(|nr| target.place(nr)).collect();
    for sizes in [[16 << 10, 0, 8192], [4096, 16 << 10, 0], first] {
        let config = TargetConfig::parse(&described(sizes)).unwrap();
        target.control.reload(config).unwrap();
        let mut come: Vec<_> = (0..3).map(session).collect();
        for (of, sizes) in [(&mut stay, first), (&mut come, sizes)] {
            for ((session, queue), size) in of.iter_mut().zip(sizes) {
                assert_eq!(session.controller().info().in_capsule_max, size);
                for blocks in [1_u32, 8, 9, 16, 17, 32, 33] {
                    let bytes = blocks * 512;
                    let data = vec![blocks as u8; bytes as usize];
                    let write = command::write(NsId(1), 0, blocks, bytes, data.clone());
                    queue.run("Write", write).unwrap();
                    let read = command::read(NsId(1), 0, blocks, bytes, vec![0; bytes as usize]);
                    assert!(queue.run("Read", read).unwrap().bytes() == data);
                }
            }
        }
        assert_eq!((0..3).map(|nr| target.place(nr)).collect::<Vec<_>>(), places);
    }
    // A change that fails changes none of them.
    let wrong = described([512; 3]).replace(
        "\nmemory",
        "\npath = \"/nonexistent\"\n[[subsystem.namespace]]\nmemory",
    );
    assert!(
        target
            .control
            .reload(TargetConfig::parse(&wrong).unwrap())
            .is_err()
    );
    let listening = target.ask("nvmf_target_get_listeners", json!({}));
    for (nr, size) in first.into_iter().enumerate() {
        assert_eq!(listening[nr]["in_capsule_data_size"], size);
        assert_eq!(session(nr).0.controller().info().in_capsule_max, size);
    }
}
