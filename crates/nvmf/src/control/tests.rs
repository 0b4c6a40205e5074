use std::fs::DirEntry;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;

use rdmux_wire::nvme::TransportKind;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use serde_json::{Value, json};

use super::rpc::{ANSWER_MAX, RpcError, RpcSocket, call, respond};
use super::*;
use crate::backend::{FileBackend, OpenError};
use crate::target::{CNTLID_MAX, Hosts, Subsystem};
use crate::tls::psk::Psk;

/// A target that runs.
struct Running {
    control: Arc<Control>,
    server: Option<JoinHandle<()>>,
}

impl Running {
    /// Returns the first subsystem.
    fn subsystem(&self) -> Arc<Subsystem> {
        let subsystems = self.control.subsystems.lock();
        subsystems.values().next().unwrap().subsystem.clone()
    }

    fn new(config: &str) -> Running {
        let config = TargetConfig::parse(config).unwrap();
        let (control, server) = Control::start(config).unwrap();
        Running {
            control: Arc::new(control),
            server: Some(std::thread::spawn(move || server.run().unwrap())),
        }
    }

    /// Carries a request out, and returns its result, or its error's code and message.
    fn ask(&self, method: &str, params: Value) -> Result<Value, (i64, String)> {
        let request = json!({ "jsonrpc": "2.0", "id": "a", "method": method, "params": params });
        let response = respond(&self.control, &request).unwrap();
        assert_eq!(
            (&response["jsonrpc"], &response["id"]),
            (&json!("2.0"), &json!("a"))
        );
        let error = &response["error"];
        match error.is_null() {
            true => Ok(response["result"].clone()),
            false => {
                let message = error["message"].as_str().unwrap().to_owned();
                assert!(!message.contains('\n'), "{message}");
                Err((error["code"].as_i64().unwrap(), message))
            }
        }
    }

    /// Returns the ids and storages of the namespaces of a subsystem.
    fn namespaces(&self, subsystem: usize) -> Vec<(u32, String)> {
        let info = self.control.subsystems().swap_remove(subsystem);
        let namespaces = info.namespaces.into_iter();
        namespaces
            .map(|info| (info.nsid.0, info.storage.to_string()))
            .collect()
    }

    fn reload(&self, config: &str) -> Result<(), String> {
        let config = TargetConfig::parse(config).unwrap();
        self.control.reload(config).map_err(|error| error.to_string())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.control.handle.stop();
        let ended = self.server.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))));
    }
}

/// Returns a description with one subsystem, which every host may use, and namespaces.
fn description(name: &str, namespaces: &str) -> String {
    format!(
        "listen = [\"tcp:127.0.0.1:0\"]\n[[subsystem]]\nnqn = \"nqn.2014-08.org.example:{name}\"\nother_hosts = \"any\"\n{}",
        namespaces
            .split_terminator(';')
            .map(|namespace| format!("[[subsystem.namespace]]\n{namespace}\n"))
            .collect::<String>()
    )
}

#[test]
fn requests__change_namespaces() {
    let running = Running::new(&description("requests-ns", "null = \"1M\";"));
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let add = |namespace: Value| running.ask("nvmf_subsystem_add_ns", json!({ "namespace": namespace }));
    assert_eq!(add(json!({ "path": file.path(), "block": "4K" })), Ok(json!(2)));
    assert_eq!(add(json!({ "memory": 65536, "nsid": 9 })), Ok(json!(9)));
    for (namespace, code, part) in [
        (
            json!({ "memory": 65536, "nsid": 9 }),
            -32000,
            "namespace 9 exists",
        ),
        (
            json!({ "memory": 65536, "nsid": 5000 }),
            -32000,
            "5000 is not a namespace id",
        ),
        (
            json!({ "path": file.path() }),
            -32000,
            "is namespace 2 of nqn.2014-08.org.example:requests-ns already",
        ),
        (json!({ "memory": 100 }), -32602, "no multiple of the block"),
        (
            json!({ "path": "/nonexistent" }),
            -32000,
            "cannot open /nonexistent",
        ),
        (
            json!({ "path": "/a", "null": 1 }),
            -32602,
            "one of path, memory, null",
        ),
        (
            json!({ "null": 512, "blok": 512 }),
            -32602,
            "unknown field `blok`",
        ),
    ] {
        let (got, message) = add(namespace).unwrap_err();
        assert!(got == code && message.contains(part), "{got} {message}");
    }
    file.as_file().set_len(2 << 20).unwrap();
    let resize = || running.ask("nvmf_subsystem_resize_ns", json!({ "nsid": 2 }));
    assert_eq!((resize(), resize()), (Ok(json!(true)), Ok(json!(false))));
    let memory = running.ask("nvmf_subsystem_resize_ns", json!({ "nsid": 9 }));
    let (_, message) = memory.unwrap_err();
    assert!(
        message.contains("namespace 9 is memory, which keeps the size"),
        "{message}"
    );
    let subsystems = running.ask("nvmf_get_subsystems", json!({})).unwrap();
    assert_eq!(subsystems[0]["namespaces"][1]["bytes"], 2 << 20);
    assert_eq!(subsystems[0]["namespaces"][2]["name"], "memory");
    let remove = |nsid| running.ask("nvmf_subsystem_remove_ns", json!({ "nsid": nsid }));
    assert_eq!(remove(2), Ok(json!(true)));
    assert_eq!(remove(2), Err((-32000, "there is no namespace 2".into())));
    assert_eq!(running.namespaces(0), [(1, "null".into()), (9, "memory".into())]);
    // The file is nobody's any more; hosts may still know the id.
    assert_eq!(add(json!({ "path": file.path() })), Ok(json!(10)));
}

#[test]
fn listeners__with_tls_need_tcp_a_key_and_the_feature() {
    let plain = description("tls", "null = 4096;");
    let mut config = TargetConfig::parse(&plain).unwrap();
    let listen = config.listen[0].listener;
    let by_rdma = Listener {
        transport: TransportKind::Rdma,
        ..listen
    };
    let tls = |listener: Listener| Listen {
        tls: true,
        ..listener.into()
    };
    config.listen = vec![tls(by_rdma)];
    let error = Control::start(config.clone()).unwrap_err().to_string();
    assert!(error.contains("TLS is for tcp alone"), "{error}");
    let psk = tempfile::NamedTempFile::new().unwrap();
    config.listen = vec![tls(listen)];
    config.subsystems[0].psk = Some(psk.path().into());
    let error = Control::start(config.clone()).unwrap_err().to_string();
    if !crate::tls::is_present() {
        assert!(error.contains("without TLS") && !error.contains('\n'), "{error}");
        let running = Running::new(&plain);
        let error = running.control.reload(config).unwrap_err().to_string();
        assert!(error.contains("without TLS"), "{error}");
        assert!(!running.control.listening()[0].tls);
        return;
    }
    assert!(error.contains(psk.path().to_str().unwrap()), "{error}");
    let text = Psk::new([1; 32]).text();
    std::fs::write(psk.path(), format!("{text}\n")).unwrap();
    std::fs::set_permissions(psk.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    let (control, server) = Control::start(config.clone()).unwrap();
    assert!(control.listening()[0].tls);
    assert_eq!(control.subsystems()[0].psk_file.as_deref(), Some(psk.path()));
    drop((control, server));
    // A listener that had none gets it.
    let running = Running::new(&plain);
    let places = running.control.listeners();
    for tls in [true, false] {
        config.listen[0].tls = tls;
        running.control.reload(config.clone()).unwrap();
        assert_eq!(running.control.listening()[0].tls, tls);
        assert_eq!(running.control.target.ways(), [(places[0], tls)]);
    }
}

#[test]
fn reload__several_listeners_of_one_address_keep_their_settings() {
    if !crate::tls::is_present() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let psk = folder.path().join("psk");
    std::fs::write(&psk, format!("{}\n", Psk::new([1; 32]).text())).unwrap();
    std::fs::set_permissions(&psk, std::fs::Permissions::from_mode(0o600)).unwrap();
    let nqn = Nqn::new("nqn.2014-08.org.example:reload-ports").unwrap();
    let described = |listen: &str| {
        format!("listen = [{listen}]\n[[subsystem]]\nnqn = \"{nqn}\"\nother_hosts = \"any\"\npsk = {psk:?}\n")
    };
    let secure = "{ address = \"tcp:127.0.0.1:0\", tls = \"required\" }";
    let plain = "\"tcp:127.0.0.1:0\"";
    for (listen, has_tls) in [([secure, plain], [true, false]), ([plain, secure], [false, true])] {
        let text = described(&listen.join(", "));
        let running = Running::new(&text);
        let ways: Vec<_> = running.control.listeners().into_iter().zip(has_tls).collect();
        let comes_without_tls = |way: &Listener| {
            let options = crate::host::Options::new(vec![way.address], nqn.clone());
            crate::host::Controller::connect(&Arc::new(options), 0).is_ok()
        };
        let has = |expected: &[(Listener, bool)]| {
            assert_eq!(running.control.target.ways(), expected);
            let listening = running.control.listening();
            let listening = listening.iter().map(|listen| (listen.listener, listen.tls));
            assert_eq!(listening.collect::<Vec<_>>(), expected);
            for (way, tls) in expected {
                assert_eq!(comes_without_tls(way), !tls, "{way}");
            }
        };
        has(&ways);
        running.reload(&text).unwrap();
        has(&ways);
        // Their order means nothing.
        running
            .reload(&described(&[listen[1], listen[0]].join(", ")))
            .unwrap();
        has(&ways);
        // Only the one whose settings are gone from the file takes others.
        running.reload(&described(&[plain, plain].join(", "))).unwrap();
        has(&[(ways[0].0, false), (ways[1].0, false)]);
        running.reload(&described(plain)).unwrap();
        has(&[(ways[0].0, false)]);
        assert!(
            std::net::TcpStream::connect(ways[1].0.address).is_err(),
            "it is gone"
        );
    }
}

/// Returns another descriptor of the socket of this process that listens on a port, as a child has between its fork and its program.
fn other_descriptor(port: u16) -> OwnedFd {
    // proc_pid_net(5): the local address, the state (0A: it listens) and the inode are the second, fourth and tenth field.
    let sockets = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let mut lines = sockets
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let is_it = |line: &Vec<&str>| line[1].ends_with(&format!(":{port:04X}")) && line[3] == "0A";
    let link = format!("socket:[{}]", lines.find(is_it).unwrap()[9]);
    let mut entries = std::fs::read_dir("/proc/self/fd").unwrap().map(Result::unwrap);
    // Descriptors of other tests come and go.
    let is_it = |entry: &DirEntry| std::fs::read_link(entry.path()).is_ok_and(|at| at.as_os_str() == &*link);
    let number = entries.find(is_it).unwrap().file_name();
    let number = number.to_str().unwrap().parse().unwrap();
    let own = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    pidfd_getfd(&own, number, PidfdGetfdFlags::empty()).unwrap()
}

#[test]
fn remove_listener__holds_also_for_a_child_that_has_the_socket() {
    let running = Running::new(&description("removed", "null = \"1M\";"));
    let listener = running.control.listeners()[0];
    let _kept = other_descriptor(listener.address.port());
    assert!(std::net::TcpStream::connect(listener.address).is_ok());
    running.control.remove_listener(&listener).unwrap();
    assert!(std::net::TcpStream::connect(listener.address).is_err());
}

#[test]
fn requests__change_hosts_and_listeners() {
    let running = Running::new(&description("requests-hosts", "null = 4096;"));
    let host = "nqn.2014-08.org.example:host";
    let secret = tempfile::NamedTempFile::new().unwrap();
    let text = crate::auth::Secret::new([1; 32]).text();
    std::fs::write(secret.path(), format!("{text}\n")).unwrap();
    std::fs::set_permissions(secret.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    let add = json!({ "host": host, "secret": secret.path(), "queues": 2 });
    assert_eq!(
        running.ask("nvmf_subsystem_add_host", add.clone()),
        Ok(json!(true))
    );
    let others = |others| running.ask("nvmf_subsystem_set_other_hosts", json!({ "other_hosts": others }));
    assert_eq!(others("none"), Ok(json!(true)));
    let info = running.control.subsystems().swap_remove(0);
    assert!(info.other_hosts == OtherHosts::None && info.hosts[0].queues == Some(2));
    assert!(info.secret_file.is_none(), "its own is enough");
    let zero = json!({ "host": host, "queues": 0 });
    assert_eq!(
        running.ask("nvmf_subsystem_add_host", zero).unwrap_err().0,
        -32602
    );
    let remove = || running.ask("nvmf_subsystem_remove_host", json!({ "host": host }));
    assert_eq!(remove(), Ok(json!(true)));
    let subsystem = running.subsystem();
    assert_eq!(
        subsystem.hosts(),
        Hosts::default(),
        "an empty list lets nobody in"
    );
    assert!(remove().unwrap_err().1.contains("has no host"));
    assert_eq!(others("any"), Ok(json!(true)));
    let missing = json!({ "host": host, "secret": "/nonexistent" });
    assert!(running.ask("nvmf_subsystem_add_host", missing).is_err());
    assert!(
        running.control.subsystems()[0].hosts.is_empty(),
        "nothing half done"
    );

    let address =
        |port: &str| json!({ "listen_address": { "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port } });
    let added = running.ask("nvmf_target_add_listener", address("0")).unwrap();
    let port = added["trsvcid"].as_str().unwrap();
    assert!(std::net::TcpStream::connect(("127.0.0.1", port.parse().unwrap())).is_ok());
    let (code, message) = running
        .ask("nvmf_target_add_listener", address(port))
        .unwrap_err();
    assert!(
        code == -32000 && message.contains("this target listens on tcp:127.0.0.1"),
        "{message}"
    );
    assert_eq!(
        running.ask("nvmf_target_remove_listener", address(port)),
        Ok(json!(true))
    );
    let (_, message) = running
        .ask("nvmf_target_remove_listener", address(port))
        .unwrap_err();
    assert_eq!(
        message,
        format!("the target does not listen on tcp:127.0.0.1:{port}")
    );
    let listeners = running.ask("nvmf_target_get_listeners", json!({})).unwrap();
    assert_eq!(listeners.as_array().unwrap().len(), 1);
    let all = json!({ "listen_address": { "trtype": "TCP", "traddr": "0.0.0.0" } });
    assert_eq!(
        running.ask("nvmf_target_add_listener", all).unwrap_err().0,
        -32602
    );
}

/// Returns the states of access, by listener.
fn ana(running: &Running) -> Vec<Vec<(u64, String, Vec<u64>)>> {
    let listed = running.ask("nvmf_subsystem_get_listeners", json!({})).unwrap();
    let array = |value: &Value| value.as_array().unwrap().clone();
    let group = |group: &Value| {
        let namespaces = array(&group["namespaces"]);
        (
            group["ana_group"].as_u64().unwrap(),
            group["ana_state"].as_str().unwrap().to_owned(),
            namespaces.iter().map(|nsid| nsid.as_u64().unwrap()).collect(),
        )
    };
    let listeners = array(&listed);
    let states = listeners.iter().map(|listener| array(&listener["ana_states"]));
    states.map(|groups| groups.iter().map(group).collect()).collect()
}

#[test]
fn requests__change_the_access_to_namespaces() {
    let two = description("requests-ana", "null = 4096;null = 8192\nana_group = 3;")
        .replace("\"tcp:127.0.0.1:0\"", "\"tcp:127.0.0.1:0\", \"tcp:127.0.0.2:0\"");
    let two = two.replace("other_hosts", "cntlids = \"5-9\"\nother_hosts");
    let described =
        format!("{two}[[subsystem.ana]]\nlistener = \"tcp:127.0.0.2:0\"\nstate = \"non-optimized\"\n");
    let running = Running::new(&described);
    let state = |group, state: &str, nsid| (group, state.to_owned(), vec![nsid]);
    let first = || vec![state(1, "optimized", 1), state(3, "optimized", 2)];
    let second = vec![state(1, "non_optimized", 1), state(3, "non_optimized", 2)];
    assert_eq!(ana(&running), [first(), second]);
    let subsystems = running.ask("nvmf_get_subsystems", json!({})).unwrap();
    assert_eq!(
        (&subsystems[0]["min_cntlid"], &subsystems[0]["max_cntlid"]),
        (&json!(5), &json!(9))
    );
    assert_eq!(subsystems[0]["namespaces"][1]["ana_group"], 3);

    let address = subsystems[0]["listen_addresses"][1].clone();
    let set = |params: Value| running.ask("nvmf_subsystem_listener_set_ana_state", params);
    let change = json!({ "listen_address": address, "ana_state": "inaccessible", "anagrpid": 3 });
    assert_eq!(set(change), Ok(json!(true)));
    let changed = vec![state(1, "non_optimized", 1), state(3, "inaccessible", 2)];
    assert_eq!(ana(&running), [first(), changed.clone()]);
    let elsewhere = json!({ "trtype": "TCP", "traddr": "127.0.0.3" });
    for (params, code, part) in [
        (json!({}), -32602, "missing field `ana_state`"),
        (
            json!({ "ana_state": "fast" }),
            -32602,
            "'fast' is no state of access",
        ),
        (
            json!({ "ana_state": "change", "anagrpid": 0 }),
            -32602,
            "'0' is no group of namespaces",
        ),
        (
            json!({ "ana_state": "change", "listen_address": elsewhere }),
            -32000,
            "the target does not listen on tcp:127.0.0.3:4420",
        ),
        (
            json!({ "ana_state": "change", "nqn": "nqn.2014-08.org.example:none" }),
            -32000,
            "there is no subsystem",
        ),
    ] {
        let (got, message) = set(params).unwrap_err();
        assert!(got == code && message.contains(part), "{got} {message}");
    }
    let group = |nsid, group| {
        let params = json!({ "nsid": nsid, "anagrpid": group });
        running.ask("nvmf_subsystem_set_ns_ana_group", params)
    };
    assert!(group(7, 1).unwrap_err().1.contains("there is no namespace 7"));
    assert_eq!(group(1, 129).unwrap_err().0, -32602);
    assert_eq!(ana(&running), [first(), changed], "nothing half done");
    assert_eq!(group(1, 3), Ok(json!(true)));
    let moved = |state: &str| vec![(3, state.to_owned(), vec![1, 2])];
    assert_eq!(ana(&running), [moved("optimized"), moved("inaccessible")]);
    // By all ways, whatever was set before.
    assert_eq!(set(json!({ "ana_state": "persistent_loss" })), Ok(json!(true)));
    assert_eq!(
        ana(&running),
        [moved("persistent_loss"), moved("persistent_loss")]
    );
    // The file is in force again; what it says wrongly changes nothing.
    let elsewhere = described.replace("listener = \"tcp:127.0.0.2:0\"", "listener = \"tcp:127.0.0.3\"");
    let error = running.reload(&elsewhere).unwrap_err();
    assert_eq!(error, "the target does not listen on tcp:127.0.0.3:4420");
    let other_ids = described.replace("5-9", "5-10");
    let error = running.reload(&other_ids).unwrap_err();
    assert!(error.contains("ids of controllers of nqn.2014-08.org.example:requests-ana change only"));
    assert_eq!(
        ana(&running),
        [moved("persistent_loss"), moved("persistent_loss")]
    );
    let other_groups = described
        .replace("ana_group = 3", "ana_group = 4")
        .replace("state = \"non-", "state = \"");
    running.reload(&other_groups).unwrap();
    let groups = vec![state(1, "optimized", 1), state(4, "optimized", 2)];
    assert_eq!(ana(&running), [groups.clone(), groups]);
    running.reload(&described).unwrap();
    let second = vec![state(1, "non_optimized", 1), state(3, "non_optimized", 2)];
    assert_eq!(ana(&running), [first(), second]);
}

#[test]
fn respond__names_what_is_wrong_with_a_request() {
    let running = Running::new(&description("respond", "null = 4096;"));
    let respond = |request: Value| respond(&running.control, &request);
    let code = |request: Value| respond(request).unwrap()["error"]["code"].as_i64();
    assert_eq!(code(json!([1])), Some(-32600));
    assert_eq!(
        code(json!({ "jsonrpc": "1.0", "id": 1, "method": "x" })),
        Some(-32600)
    );
    assert_eq!(code(json!({ "jsonrpc": "2.0", "id": 1 })), Some(-32600));
    assert_eq!(
        code(json!({ "jsonrpc": "2.0", "id": 1, "method": "x" })),
        Some(-32601)
    );
    let unknown = json!({ "jsonrpc": "2.0", "id": 1, "method": "rpc_get_methods", "params": { "a": 1 } });
    assert_eq!(code(unknown), Some(-32602));
    let unasked = json!({ "jsonrpc": "2.0", "method": "rpc_get_methods" });
    assert_eq!(respond(unasked), None);
    let name = json!({ "nqn": "nqn.2014-08.org.example:none", "nsid": 1 });
    let (_, message) = running.ask("nvmf_subsystem_remove_ns", name).unwrap_err();
    assert_eq!(message, "there is no subsystem nqn.2014-08.org.example:none");
    for method in running
        .ask("rpc_get_methods", json!({}))
        .unwrap()
        .as_array()
        .unwrap()
    {
        let answered = running.ask(method.as_str().unwrap(), json!({}));
        assert!(
            answered.is_ok() || answered.is_err_and(|(code, _)| code == -32602),
            "{method}"
        );
    }
}

#[test]
fn requests__that_are_wrong_change_no_referral_and_no_listener() {
    let described = description("referrals", "null = 4096;");
    let running = Running::new(&described);
    let at = |port: &str| json!({ "trtype": "tcp", "traddr": "192.0.2.1", "trsvcid": port });
    let (add, remove) = ("nvmf_discovery_add_referral", "nvmf_discovery_remove_referral");
    running.ask(add, json!({ "address": at("8009") })).unwrap();
    let listeners = running.control.listening();
    for (method, params, code, part) in [
        (add, json!({ "address": at("0") }), -32602, "has no port"),
        (
            add,
            json!({ "address": at("8009"), "subnqn": "x" }),
            -32602,
            "'x' is no NQN",
        ),
        (
            add,
            json!({ "address": at("8009"), "secure": true }),
            -32602,
            "unknown field `secure`",
        ),
        (
            remove,
            json!({ "address": at("8009"), "subnqn": "nqn.2014-08.org.example:other" }),
            -32000,
            "refers no host to nqn.2014-08.org.example:other at tcp:192.0.2.1:8009",
        ),
        (
            "nvmf_target_add_listener",
            json!({ "listen_address": at("4420"), "in_capsule_data_size": 17 }),
            -32602,
            "'17' is no size of data in capsules",
        ),
    ] {
        let (got, message) = running.ask(method, params).unwrap_err();
        assert!(got == code && message.contains(part), "{got} {message}");
    }
    let referral = "[[referral]]\naddress = \"rdma:192.0.2.2\"\n";
    let error = running
        .reload(&format!("{described}{referral}{referral}"))
        .unwrap_err();
    assert_eq!(error, "two referrals are to rdma:192.0.2.2:4420");
    assert_eq!(running.control.listening(), listeners);
    let listed = running.ask("nvmf_discovery_get_referrals", json!({})).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["address"]["trsvcid"], "8009");
}

#[test]
fn reload__changes_what_is_other_and_nothing_if_it_fails() {
    let files: Vec<_> = (0..2).map(|_| tempfile::NamedTempFile::new().unwrap()).collect();
    let paths: Vec<_> = files
        .iter()
        .map(|file| file.path().display().to_string())
        .collect();
    files
        .iter()
        .for_each(|file| file.as_file().set_len(1 << 20).unwrap());
    let first = format!("path = \"{}\";memory = 65536;null = 4096;", paths[0]);
    let running = Running::new(&description("reload", &first));
    let before = running.control.subsystems()[0].namespaces[1].uuid;
    let wrong = format!(
        "path = \"{}\";path = \"{}\";path = \"/nonexistent\";",
        paths[0], paths[1]
    );
    let error = running.reload(&description("reload", &wrong)).unwrap_err();
    assert!(error.contains("cannot open /nonexistent"), "{error}");
    let all = [(1, paths[0].clone()), (2, "memory".into()), (3, "null".into())];
    assert_eq!(running.namespaces(0), all);
    files[0].as_file().set_len(3 << 20).unwrap();
    let next = format!("memory = 65536;path = \"{}\";path = \"{}\";", paths[0], paths[1]);
    running.reload(&description("reload", &next)).unwrap();
    let info = running.control.subsystems().swap_remove(0);
    assert_eq!(info.namespaces[0].bytes, 3 << 20);
    assert_eq!(info.namespaces[1].uuid, before, "the memory is the same");
    // Hosts may still know what was namespace 3.
    let ids: Vec<_> = info.namespaces.iter().map(|info| info.nsid.0).collect();
    assert_eq!(ids, [1, 2, 4]);
    let listeners = running.control.listeners();
    let other_storage = format!("nsid = 1\npath = \"{}\";", paths[1]);
    let error = running
        .reload(&description("reload", &other_storage))
        .unwrap_err();
    assert!(error.contains("changes its storage: remove it first"), "{error}");
    let same_id = description("reload", "nsid = 7\nnull = 4096;nsid = 7\nnull = 8192;");
    let error = running.reload(&same_id).unwrap_err();
    assert!(
        error.contains("two namespaces of nqn.2014-08.org.example:reload have the id 7"),
        "{error}"
    );
    let error = running
        .reload(&description("reload", &next).replace("nqn.2014-08.org.example:reload", DISCOVERY_NQN))
        .unwrap_err();
    assert!(error.contains("name of the discovery service"), "{error}");
    let twice =
        description("reload", &next).replace("tcp:127.0.0.1:0\"", "tcp:127.0.0.1\", \"tcp:127.0.0.1\"");
    let error = running.reload(&twice).unwrap_err();
    assert_eq!(error, "two listeners are for tcp:127.0.0.1:4420");
    assert_eq!(running.control.listeners(), listeners, "the same ports");
    assert_eq!(running.control.subsystems()[0].namespaces.len(), 3);
    // The same file in other blocks.
    let blocks = format!("nsid = 1\npath = \"{}\"\nblock = 4096;", paths[0]);
    let error = running.reload(&description("reload", &blocks)).unwrap_err();
    assert!(error.contains("changes its blocks: remove it first"), "{error}");
    for of_start in ["reactors = 2", "ledger = true", "offload = true"] {
        let changed = format!("{of_start}\n{}", description("reload", &next));
        let error = running.reload(&changed).unwrap_err();
        assert!(error.contains("changes only with a restart"), "{error}");
    }
    let twice = description("reload", "") + description("reload", "").split_once('\n').unwrap().1;
    assert!(
        running
            .reload(&twice)
            .unwrap_err()
            .contains("two subsystems have the name")
    );
    // Another subsystem comes, and this one goes.
    let other = description("reload-other", "null = 4096;");
    running.reload(&other).unwrap();
    let names: Vec<_> = running
        .control
        .subsystems()
        .into_iter()
        .map(|info| info.nqn)
        .collect();
    assert_eq!(names, [Nqn::new("nqn.2014-08.org.example:reload-other").unwrap()]);
    // Its name and files are free.
    let name = Nqn::new("nqn.2014-08.org.example:reload").unwrap();
    drop(identity::claim(&name, &(1..=CNTLID_MAX)).unwrap());
    drop(FileBackend::open(files[0].path(), false, 512).unwrap());
}

#[test]
fn reload__that_cannot_read_reservations_changes_nothing() {
    const FOLDER: &str = "XDG_CONFIG_HOME";
    const INSIDE: &str = "RDMUX_TEST_RELOAD";
    if std::env::var_os(INSIDE).is_none() {
        // A process of its own has another folder of configuration.
        let folder = tempfile::tempdir().unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args([
            "control::tests::reload__that_cannot_read_reservations_changes_nothing",
            "--exact",
        ]);
        let output = command.env(INSIDE, "1").env(FOLDER, folder.path()).output();
        let output = output.unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let described = |listen: &str, hosts: &str, namespaces: &str| {
        format!(
            "listen = [{{ address = \"tcp:127.0.0.1:0\"{listen} }}]\n[[subsystem]]\n\
             nqn = \"nqn.2014-08.org.example:reload-reservations\"\nother_hosts = \"none\"\n{hosts}{namespaces}"
        )
    };
    let [first, second] = ["first", "second"].map(|name| {
        let secret = std::path::Path::new(&std::env::var_os(FOLDER).unwrap()).join(name);
        std::fs::write(&secret, crate::auth::Secret::new([1; 32]).text() + "\n").unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        format!("[[subsystem.host]]\nnqn = \"nqn.2014-08.org.example:{name}\"\nsecret = {secret:?}\n")
    });
    let null = "[[subsystem.namespace]]\nnull = 4096\n";
    let uuid = "5a3ed6c1-5a06-4b29-9fd9-2d15a8f4d9b1";
    let other = format!("[[subsystem.namespace]]\nmemory = 65536\nuuid = \"{uuid}\"\nana_group = 2\n");
    let running = Running::new(&described("", &(first.clone() + &second), null));
    let unreadable = rdmux_key::config_path("nvme-reservations").unwrap().join(uuid);
    std::fs::create_dir_all(&unreadable).unwrap();
    let state = || {
        let info = running.control.subsystems().swap_remove(0);
        let subsystem = running.subsystem();
        let (hosts, listening) = (subsystem.hosts(), running.control.listening());
        (running.namespaces(0), info.hosts, hosts, listening)
    };
    let before = state();
    let next = described(", in_capsule_bytes = 4096", &second, &other);
    let error = running.reload(&next).unwrap_err();
    assert_eq!(state(), before);
    let expected = "cannot export memory: cannot read the reservations of namespace 2: ";
    assert!(error.starts_with(expected) && error.contains(uuid), "{error}");
    std::fs::remove_dir(&unreadable).unwrap();
    running.reload(&next).unwrap();
    let (namespaces, hosts, terms, listening) = state();
    assert_eq!(namespaces, [(2, "memory".into())]);
    assert!(hosts.len() == 1 && terms.named.len() == 1, "{hosts:?}");
    assert_eq!(listening[0].in_capsule_bytes, 4096);
}

#[test]
fn socket__serves_its_user_alone() {
    let running = Running::new(&description("socket", "null = 4096;"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let file = folder.path().join("file");
    std::fs::write(&file, "data").unwrap();
    let error = RpcSocket::listen(&file, running.control.clone()).unwrap_err();
    assert!(error.to_string().contains("no socket") && std::fs::read(&file).unwrap() == b"data");
    // One that was left behind.
    drop(UnixListener::bind(&path).unwrap());
    let socket = RpcSocket::listen(&path, running.control.clone()).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = RpcSocket::listen(&path, running.control.clone());
    assert_eq!(second.unwrap_err().kind(), io::ErrorKind::AddrInUse);
    let listeners = call(&path, "nvmf_target_get_listeners", json!({}), ANSWER_MAX).unwrap();
    assert_eq!(listeners[0]["trtype"], "TCP");
    let refused = call(
        &path,
        "nvmf_subsystem_remove_ns",
        json!({ "nsid": 7 }),
        ANSWER_MAX,
    )
    .unwrap_err();
    assert_eq!(refused.to_string(), "there is no namespace 7");
    // Two requests in parts, and what is none.
    let mut stream = UnixStream::connect(&path).unwrap();
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": "rpc_get_methods" }).to_string();
    let twice = format!("{request}{request}");
    for part in twice.as_bytes().chunks(7) {
        stream.write_all(part).unwrap();
    }
    stream.write_all(b"}").unwrap();
    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    let codes: Vec<_> = all
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["error"]["code"].as_i64())
        .collect();
    assert_eq!(codes, [None, None, Some(-32700)]);
    drop(socket);
    assert!(!path.exists());
    assert!(matches!(
        call(&path, "rpc_get_methods", json!({}), ANSWER_MAX),
        Err(RpcError::NoTarget { .. })
    ));
}

#[test]
fn start__refuses_a_name_that_another_target_has() {
    let running = Running::new(&description("start", "null = 4096;"));
    let second = Control::start(TargetConfig::parse(&description("start", "null = 4096;")).unwrap());
    let error = second.err().map(|error| error.to_string());
    assert!(error.is_some_and(|error| error.contains("another target of this host serves")));
    let wanted = running.control.listeners()[0];
    assert_eq!(wanted.transport, TransportKind::Tcp);
    let text = description("start-other", "null = 4096;").replace("127.0.0.1:0", &wanted.address.to_string());
    let taken = Control::start(TargetConfig::parse(&text).unwrap()).err();
    assert!(taken.is_some_and(|error| error.to_string().contains("cannot listen on")));
}

#[test]
fn file__may_be_in_several_subsystems_which_know_of_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let path = path.to_str().unwrap();
    let subsystem = |name: &str, options: &str| {
        format!(
            "[[subsystem]]\nnqn = \"nqn.2014-08.org.example:{name}-{}\"\nother_hosts = \"any\"\n[[subsystem.namespace]]\npath = \"{path}\"\n{options}\n",
            std::process::id()
        )
    };
    let listen = "listen = [\"tcp:127.0.0.1:0\"]\n";
    let running = Running::new(&format!(
        "{listen}{}{}",
        subsystem("drives", ""),
        subsystem("copies", "nsid = 7")
    ));
    assert_eq!(running.namespaces(0)[0].1, path);
    assert_eq!(running.namespaces(1)[0].1, path);
    let subsystems: Vec<_> = running
        .control
        .subsystems
        .lock()
        .values()
        .map(|one| one.subsystem.clone())
        .collect();
    let [first, second] = [0, 1].map(|at: usize| subsystems[at].list()[0].clone());
    assert!(Arc::ptr_eq(&first.backend, &second.backend) && Arc::ptr_eq(first.medium(), second.medium()));
    assert_ne!(first.uuid, second.uuid, "hosts do not take one for the other");
    drop((first, second, subsystems));
    // One is not enough to let go of the file; not in the same way it stays in use.
    running
        .reload(&format!("{listen}{}", subsystem("copies", "nsid = 7")))
        .unwrap();
    assert!(matches!(
        FileBackend::open(std::path::Path::new(path), false, 512),
        Err(OpenError::InUse(_))
    ));
    let refused = running.reload(&format!(
        "{listen}{}{}",
        subsystem("copies", "nsid = 7"),
        subsystem("drives", "read_only = true")
    ));
    assert!(refused.unwrap_err().contains("is in use"));
    drop(running);
    FileBackend::open(std::path::Path::new(path), false, 512).unwrap();
}

#[test]
fn start__says_in_a_line_why_a_controller_is_not_exported() {
    let refused = |description: &str| {
        let text = format!(
            "listen = [\"tcp:127.0.0.1:0\"]\n[[subsystem]]\nnqn = \"nqn.2014-08.org.example:controller-{}\"\nother_hosts = \"any\"\n{description}",
            std::process::id()
        );
        let started = Control::start(TargetConfig::parse(&text).unwrap());
        started.err().map(|error| error.to_string()).unwrap()
    };
    assert!(refused("controller = \"/dev/nvme-none\"").starts_with("there is no /dev/nvme-none: give"));
    assert!(refused("controller = \"/dev/null\"").starts_with("/dev/null is no controller of an NVMe drive"));
    let both = refused("controller = \"/dev/null\"\n[[subsystem.namespace]]\nnull = 4096");
    assert!(both.contains("are those of the drive /dev/null"), "{both}");
}
