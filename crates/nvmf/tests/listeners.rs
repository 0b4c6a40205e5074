//! Listeners for RDMA that come, change and go while hosts work. A single test: it counts what the process has.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rdmux_nvmf::control::config::{TargetConfig, parse_listener};
use rdmux_nvmf::control::rpc::respond;
use rdmux_nvmf::control::{Control, ControlError};
use rdmux_nvmf::host::{Options, Session, Transport, command};
use rdmux_verbs::Device;
use rdmux_wire::nvme::{Nqn, NsId};
use serde_json::{Value, json};

/// For what a correct target does at once.
const LONG: Duration = Duration::from_secs(60);
/// Descriptors that a device may keep for peers that it has had. Another device has more, and threads.
const DESCRIPTORS_KEPT: usize = 10;
const SUBSYSTEM: &str = "nqn.2014-08.org.example:listeners";

/// Returns the numbers of descriptors and threads of this process.
fn counts() -> [usize; 2] {
    ["/proc/self/fd", "/proc/self/task"].map(|folder| std::fs::read_dir(folder).unwrap().count())
}

/// Waits until this process has no more devices than before: one whose connections have just ended takes a while.
fn returns_to(before: [usize; 2], what: &str) {
    let deadline = Instant::now() + LONG;
    loop {
        let [descriptors, threads] = counts();
        if descriptors <= before[0] + DESCRIPTORS_KEPT && threads <= before[1] {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{what}: {before:?} became {:?}",
            [descriptors, threads]
        );
        std::thread::sleep(Duration::from_millis(5)); // time is meant: the system tells nobody that a thread of a device has ended, or a descriptor is closed
    }
}

fn place(ip: &str) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), 4420)
}

/// Returns true if nobody listens on an address.
fn is_free(ip: &str) -> bool {
    let place = place(ip);
    Device::open(place.ip()).unwrap().listen(place.port()).is_ok()
}

fn try_session(to: SocketAddr) -> Option<Arc<Session>> {
    let options = Options {
        transport: Transport::Rdma,
        ..Options::new(vec![to], Nqn::new(SUBSYSTEM).unwrap())
    };
    Session::connect(options, 2).ok()
}

/// Reads and writes by two queues of a session until it is dropped; each command must succeed.
struct Works {
    session: Arc<Session>,
    ends: Arc<AtomicBool>,
    done: Arc<(Mutex<u64>, Condvar)>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Works {
    fn at(to: SocketAddr, nr: u8) -> Works {
        let session = try_session(to).expect("a listener");
        let (ends, done): (_, Arc<(Mutex<u64>, Condvar)>) =
            (Arc::new(AtomicBool::new(false)), Arc::default());
        let mut threads = Vec::new();
        for qid in 1..=2_u16 {
            let (session, ends, done) = (session.clone(), ends.clone(), done.clone());
            let base = (u64::from(nr) * 2 + u64::from(qid)) * 16;
            threads.push(std::thread::spawn(move || {
                let mut queue = session.queue(qid, 8).unwrap();
                let mut round = nr;
                while !ends.load(Ordering::Relaxed) {
                    round = round.wrapping_add(1);
                    // In the capsule, and fetched.
                    for blocks in [1, 4] {
                        let bytes = blocks * 4096;
                        let data = vec![round; bytes as usize];
                        queue
                            .run("Write", command::write(NsId(1), base, blocks, bytes, data))
                            .unwrap();
                        let room = vec![0; bytes as usize];
                        let read = command::read(NsId(1), base, blocks, bytes, room);
                        let read = queue.run("Read", read).unwrap();
                        assert!(read.bytes().iter().all(|byte| *byte == round));
                    }
                    *done.0.lock().unwrap() += 1;
                    done.1.notify_all();
                }
            }));
        }
        Works {
            session,
            ends,
            done,
            threads,
        }
    }

    /// Waits until it has done something that began after this call.
    fn goes_on(&self) {
        let (done, changed) = &*self.done;
        let done = done.lock().unwrap();
        let enough = *done + 4;
        let waited = changed.wait_timeout_while(done, LONG, |done| *done < enough);
        assert!(!waited.unwrap().1.timed_out(), "its commands are not carried out");
    }

    fn end(self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap();
        }
        self.session.close();
    }
}

#[test]
fn listeners__come_change_and_go_while_hosts_work() {
    rdmux_soft::register();
    for reactors in [1, 2] {
        let described = |listen: &str| {
            let text = format!(
                "listen = [\"tcp:127.0.0.1:0\", {listen}]\nreactors = {reactors}\n[[subsystem]]\nnqn = \"{SUBSYSTEM}\"\n\
                 other_hosts = \"any\"\n[[subsystem.namespace]]\nmemory = \"16M\"\nblock = 4096\n"
            );
            TargetConfig::parse(&text).unwrap()
        };
        let (control, server) = Control::start(described("\"rdma:127.0.36.1\"")).unwrap();
        let handle = server.handle();
        let thread = std::thread::spawn(move || server.run().unwrap());
        let ask = |method: &str, ip: &str, port: &str| {
            let address = json!({ "trtype": "RDMA", "traddr": ip, "trsvcid": port });
            let params = json!({ "listen_address": address });
            let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
            let response = respond(&control, &request).unwrap();
            let error = response["error"]["message"].as_str().map(str::to_owned);
            error.map_or(Ok(response["result"].clone()), Err)
        };
        let refused = |result: Result<Value, String>| result.unwrap_err();
        let elsewhere = parse_listener("rdma:127.0.36.4").unwrap();
        let error = handle.prepare(elsewhere.into()).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("the server does not listen on {elsewhere}: ")),
            "{error}"
        );
        let add = |ip: &str, port: &str| ask("nvmf_target_add_listener", ip, port);
        let remove = |ip: &str, port: &str| ask("nvmf_target_remove_listener", ip, port);

        let first = Works::at(place("127.0.36.1"), 0);
        first.goes_on();
        // The port by which it has come goes with it, beside the one that takes its place.
        let other = "{ address = \"rdma:127.0.36.1\", in_capsule_bytes = 0 }";
        control.reload(described(other)).unwrap();
        let alone = counts();

        // A second one, of another address and so another device, and a third of the same.
        assert!(is_free("127.0.36.2"));
        add("127.0.36.2", "4420").unwrap();
        add("127.0.36.2", "4421").unwrap();
        let second = Works::at(place("127.0.36.2"), 1);
        let third = Works::at(SocketAddr::new("127.0.36.2".parse().unwrap(), 4421), 2);
        let works = [&first, &second, &third];
        works.iter().for_each(|host| host.goes_on());

        // An impossible change changes nothing.
        for (ip, part) in [
            ("127.0.36.2", "listens on rdma:127.0.36.2:4420 already"),
            ("192.0.2.1", "192.0.2.1"),
        ] {
            let error = refused(add(ip, "4420"));
            assert!(error.contains(part) && !error.contains('\n'), "{error}");
        }
        assert_eq!(
            refused(remove("127.0.36.3", "4420")),
            "the target does not listen on rdma:127.0.36.3:4420"
        );
        let error = control.reload(described("\"rdma:127.0.36.4\", \"rdma:192.0.2.1\""));
        assert!(matches!(error, Err(ControlError::Serve(_))), "{error:?}");
        assert!(is_free("127.0.36.4"));
        assert_eq!(control.listeners().len(), 4);
        works.iter().for_each(|host| host.goes_on());

        // Hosts that have come by one that goes stay; nobody comes by it.
        remove("127.0.36.2", "4420").unwrap();
        assert!(is_free("127.0.36.2") && try_session(place("127.0.36.2")).is_none());
        works.iter().for_each(|host| host.goes_on());
        // It comes again, beside the host that it had before.
        add("127.0.36.2", "4420").unwrap();
        let again = Works::at(place("127.0.36.2"), 3);
        again.goes_on();
        second.end();
        third.end();
        again.goes_on();

        // A file: the first gets other settings, which hosts that come see.
        let other = "{ address = \"rdma:127.0.36.1\", in_capsule_bytes = \"16K\" }, \"rdma:127.0.36.5\"";
        for (listen, size) in [
            (other, 16 << 10),
            ("\"rdma:127.0.36.1\"", 4096),
            (other, 16 << 10),
        ] {
            control.reload(described(listen)).unwrap();
            let came = Works::at(place("127.0.36.1"), 4);
            assert_eq!(came.session.controller().info().in_capsule_max, size);
            [&first, &again, &came].iter().for_each(|host| host.goes_on());
            came.end();
        }
        let fifth = Works::at(place("127.0.36.5"), 5);
        fifth.goes_on();
        control.reload(described("\"rdma:127.0.36.1\"")).unwrap();
        assert!(is_free("127.0.36.2") && is_free("127.0.36.5"));
        [&first, &again, &fifth].iter().for_each(|host| host.goes_on());
        again.end();
        fifth.end();
        first.goes_on();
        // Each session of a host has ended, and so have the devices of the listeners.
        returns_to(alone, "after the listeners have gone");
        first.end();
        handle.stop();
        thread.join().unwrap();
    }
}
