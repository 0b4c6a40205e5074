//! Changes of a subsystem that hosts use.

use super::*;
use crate::auth::{HostAuthenticator, HostStep, Offer, Parties};
use crate::tls::Proof;
use crate::tls::psk::Psk;

fn status(step: Step) -> Status {
    completed(step).status
}

fn read_block(nsid: u32, slba: u64) -> Sqe {
    let mut sqe = Sqe::new(Opcode::READ, Cid(1), NsId(nsid));
    let (blocks, fua) = (1, false);
    Rw { slba, blocks, fua }.emit(&mut sqe);
    sqe
}

/// Returns the namespaces that the controller says have changed.
fn changed(queue: &mut Queue, now: Instant) -> Vec<u32> {
    let mut log = Sqe::new(Opcode::GET_LOG_PAGE, Cid(3), NsId::NONE);
    log.set_dword(10, 0x04 | 1023 << 16);
    queue.admit(&log, 4096, now).unwrap();
    let Step::Send(data, _) = queue.execute(&log, &[], now) else {
        panic!("the log is sent")
    };
    let ids = data
        .chunks(4)
        .map(|id| u32::from_le_bytes(id.try_into().unwrap()));
    ids.take_while(|id| *id != 0).collect()
}

fn asks_for_events(queue: &mut Queue, now: Instant) {
    let mut features = Sqe::new(Opcode::SET_FEATURES, Cid(1), NsId::NONE);
    features.set_dword(10, 0x0b);
    features.set_dword(11, IdentifyController::NAMESPACE_EVENTS);
    assert!(status(run(queue, &features, &[], now)).is_success());
    let request = Sqe::new(Opcode::ASYNC_EVENT_REQUEST, Cid(9), NsId::NONE);
    assert!(matches!(run(queue, &request, &[], now), Step::Wait));
}

#[test]
fn remove_namespace__tells_hosts_and_lets_its_storage_go() {
    let now = Instant::now();
    let (target, subsystem) = target();
    let storage = memory(2, 1 << 20);
    let weak = Arc::downgrade(&storage.backend);
    subsystem.add_namespace(storage).unwrap();
    let (mut queue, cntlid) = admin(&target, SUBSYSTEM, now);
    let (mut io, _) = io_queue(&target, cntlid, 1, now);
    asks_for_events(&mut queue, now);
    let read = read_block(2, 0);
    let admitted = io.admit(&read, 512, now).unwrap();
    subsystem.remove_namespace(NsId(2)).unwrap();
    assert_eq!(
        subsystem.remove_namespace(NsId(2)),
        Err(NamespaceError::Missing(NsId(2)))
    );
    // It was admitted before.
    let Admitted::Io(work) = admitted else { panic!() };
    assert!(work.execute(&mut [0; 512]).is_success());
    drop(work);
    io.handle_change();
    assert!(queue.poll_event().is_some());
    assert_eq!(changed(&mut queue, now), [2]);
    assert!(weak.upgrade().is_none(), "nobody holds the storage");
    let refused = io.admit(&read, 512, now).unwrap_err();
    assert!(refused.status.is(Status::INVALID_NAMESPACE));
}

#[test]
fn resize_namespace__hosts_see_the_new_size() {
    let now = Instant::now();
    let (target, subsystem) = target();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let namespace = Namespace {
        backend: Arc::new(FileBackend::open(file.path(), false, 512).unwrap()),
        ..memory(2, 512)
    };
    subsystem.add_namespace(namespace).unwrap();
    let (mut queue, cntlid) = admin(&target, SUBSYSTEM, now);
    let (mut io, _) = io_queue(&target, cntlid, 1, now);
    asks_for_events(&mut queue, now);
    let last = read_block(2, 4095);
    assert!(io.admit(&last, 512, now).is_err());
    assert_eq!(subsystem.resize_namespace(NsId(2)), Ok(false));
    assert_eq!(queue.poll_event(), None, "nothing has changed");
    file.as_file().set_len(2 << 20).unwrap();
    assert_eq!(subsystem.resize_namespace(NsId(2)), Ok(true));
    assert!(queue.poll_event().is_some());
    assert_eq!(changed(&mut queue, now), [2]);
    assert!(io.admit(&last, 512, now).is_ok());
    file.as_file().set_len(100).unwrap();
    let error = subsystem.resize_namespace(NsId(2)).unwrap_err().to_string();
    assert!(
        error.contains("100 bytes now, less than a block of 512"),
        "{error}"
    );
    assert_eq!(subsystem.list()[1].blocks(), 4096);
}

#[test]
fn set_hosts__ends_controllers_of_those_that_may_no_more_and_no_other() {
    let now = Instant::now();
    let (target, subsystem) = target();
    let (name, host) = (Nqn::new(SUBSYSTEM).unwrap(), Nqn::new(HOST).unwrap());
    let (mut queue, cntlid) = admin(&target, SUBSYSTEM, now);
    let (io, _) = io_queue(&target, cntlid, 1, now);
    let mut hosts = Hosts::default();
    hosts.named.insert(host.clone(), Terms::default());
    target.set_hosts(&name, hosts.clone()).unwrap();
    assert!(
        !queue.is_over() && !io.is_over(),
        "it may still, on the same terms"
    );
    // A host that has proved nothing has to begin again where a proof is asked for.
    let proof = Authentication {
        secrets: Secrets {
            host: Secret::new([1; 32]),
            controller: None,
        },
        random: || Some([3; 32]),
    };
    hosts.named.entry(host).or_default().authentication = Some(proof);
    target.set_hosts(&name, hosts).unwrap();
    assert!(queue.is_over() && io.is_over());
    target.set_hosts(&name, Hosts::default()).unwrap();
    let data = emitted(&connect_data(SUBSYSTEM, ConnectData::ANY_CONTROLLER));
    queue = Queue::new(target.clone(), PORT, LOCAL, now);
    assert!(
        status(run(&mut queue, &connect(0).command(Cid(0)), &data, now)).is(Status::CONNECT_INVALID_HOST)
    );
    let entries = DiscoveryHeader::parse(&discovery::log(
        &target,
        &Nqn::new(HOST).unwrap(),
        LOCAL.address.ip(),
    ))
    .unwrap();
    assert_eq!(entries.entries, 0);
    assert_eq!(subsystem.hosts(), Hosts::default());
    let missing = Nqn::new("nqn.2014-08.org.example:none").unwrap();
    let error = target.set_hosts(&missing, Hosts::default()).unwrap_err();
    assert_eq!(error, TargetError::Missing(missing));
}

#[test]
fn terms__limit_the_queues_of_a_controller() {
    let now = Instant::now();
    let (target, _) = target();
    let terms = Terms {
        queues: Some(2),
        ..Terms::default()
    };
    target
        .set_hosts(&Nqn::new(SUBSYSTEM).unwrap(), Hosts::any(terms))
        .unwrap();
    let (mut queue, cntlid) = admin(&target, SUBSYSTEM, now);
    let mut features = Sqe::new(Opcode::SET_FEATURES, Cid(1), NsId::NONE);
    features.set_dword(10, 0x07);
    features.set_dword(11, 7 | 7 << 16);
    let cqe = completed(run(&mut queue, &features, &[], now));
    assert_eq!(cqe.result, 1 | 1 << 16, "two, from 0");
    assert!(io_queue(&target, cntlid, 2, now).1.status.is_success());
    let (_, refused) = io_queue(&target, cntlid, 3, now);
    assert_eq!(
        (refused.status.is(Status::CONNECT_INVALID), refused.result),
        (true, 42)
    );
}

#[test]
fn proof_by_tls__holds_for_its_host_subsystem_and_key_alone() {
    let now = Instant::now();
    let psk = Psk::new([1; 32]);
    let hosts = |psk: &Psk| {
        Hosts::any(Terms {
            psk: Some(psk.clone()),
            ..Terms::default()
        })
    };
    let name = Nqn::new(SUBSYSTEM).unwrap();
    let target = Arc::new(Target::default());
    let subsystem = Subsystem::new(name.clone(), "serial", hosts(&psk));
    target.add_subsystem(Arc::new(subsystem)).unwrap();
    let [host, other] = [HOST, "nqn.2014-08.org.example:other"].map(|name| Nqn::new(name).unwrap());
    let discovery = Nqn::new(DISCOVERY_NQN).unwrap();
    let try_connect = |host: &Nqn, subsystem: &Nqn, wanted: &Nqn| {
        let mut queue = Queue::new(target.clone(), PORT, LOCAL, now);
        queue.set_proof(Proof {
            host: host.clone(),
            subsystem: subsystem.clone(),
            psk: psk.clone(),
        });
        let data = emitted(&connect_data(wanted.as_str(), ConnectData::ANY_CONTROLLER));
        completed(run(&mut queue, &connect(0).command(Cid(0)), &data, now)).status
    };
    assert_eq!(try_connect(&host, &name, &name), Status::SUCCESS);
    assert_eq!(try_connect(&host, &discovery, &discovery), Status::SUCCESS);
    for (host, subsystem, wanted) in [
        (&other, &name, &name),
        (&host, &name, &discovery),
        (&host, &discovery, &name),
    ] {
        let status = try_connect(host, subsystem, wanted);
        assert!(
            status.is(Status::CONNECT_INVALID_HOST),
            "{host} {subsystem} {wanted}"
        );
    }
    // The key may have changed since the handshake.
    target.set_hosts(&name, hosts(&Psk::new([2; 32]))).unwrap();
    assert!(try_connect(&host, &name, &name).is(Status::CONNECT_INVALID_HOST));
}

/// Returns hosts that all need a secret.
fn secret_hosts(secret: u8) -> Hosts {
    Hosts::any(Terms {
        authentication: Some(Authentication {
            secrets: Secrets {
                host: Secret::new([secret; 32]),
                controller: None,
            },
            random: || Some([3; 32]),
        }),
        concat: true,
        ..Terms::default()
    })
}

/// Has host and controller agree on a key by the admin queue.
fn agree(queue: &mut Queue, channel: SecureChannel, now: Instant) -> Psk {
    let parties = Parties {
        host: Nqn::new(HOST).unwrap(),
        subsystem: Nqn::new(SUBSYSTEM).unwrap(),
        secrets: Secrets {
            host: Secret::new([1; 32]),
            controller: None,
        },
    };
    let offer = Offer {
        groups: vec![DhGroup::Ffdhe2048],
        ..Offer::default()
    };
    let mut host = HostAuthenticator::new(parties, offer, || Some([seed(); 32]), 1).with_channel(channel);
    loop {
        match host.next().unwrap() {
            HostStep::Send(bytes) => {
                let send = authentication(FabricsType::AUTHENTICATION_SEND, Cid(1), bytes.len() as u32);
                assert!(status(run(queue, &send, &bytes, now)).is_success());
            }
            HostStep::Receive => {
                let receive = authentication(FabricsType::AUTHENTICATION_RECEIVE, Cid(1), 4096);
                queue.admit(&receive, 4096, now).unwrap();
                host.handle(&sent(queue.execute(&receive, &[], now))).unwrap();
            }
            HostStep::Done => return host.take_psk().unwrap(),
        }
    }
}

/// Returns another number each time.
fn seed() -> u8 {
    static LAST: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);
    LAST.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn generated_key__is_known_until_its_controller_ends_or_has_another_one() {
    let now = Instant::now();
    let name = Nqn::new(SUBSYSTEM).unwrap();
    let host = Nqn::new(HOST).unwrap();
    let target = Arc::new(Target::default());
    let subsystem = Subsystem::new(name.clone(), "serial", secret_hosts(1));
    target.add_subsystem(Arc::new(subsystem)).unwrap();
    let keys = |now| target.psks(&host, &name, now);
    let data = emitted(&connect_data(SUBSYSTEM, ConnectData::ANY_CONTROLLER));
    let begin = |psk: Option<&Psk>| {
        let mut queue = Queue::new(target.clone(), PORT, LOCAL, now);
        queue.require_tls();
        if let Some(psk) = psk {
            queue.set_proof(Proof {
                host: host.clone(),
                subsystem: name.clone(),
                psk: psk.clone(),
            });
        }
        let cqe = completed(run(&mut queue, &connect(0).command(Cid(0)), &data, now));
        (queue, cqe)
    };
    // Authentication and a secure channel, in place of authentication alone (Base 2.0, 6.3).
    let (mut plain, cqe) = begin(None);
    assert_eq!((cqe.status, cqe.result >> 16), (Status::SUCCESS, 4));
    assert!(configure(&mut plain, Configuration::enabled().0, now).is(Status::AUTHENTICATION_REQUIRED));
    assert_eq!(keys(now), []);
    let first = agree(&mut plain, SecureChannel::NewTlsPsk, now);
    assert_eq!(keys(now), std::slice::from_ref(&first));
    // The host has to come back, whatever it sends here.
    let features = Sqe::new(Opcode::SET_FEATURES, Cid(1), NsId::NONE);
    let refused = plain.admit(&features, 0, now).unwrap_err();
    assert!(refused.status.is(Status::AUTHENTICATION_REQUIRED));
    assert!(plain.has_expired(now + Duration::from_secs(10)));
    drop(plain);
    // The key stands for the secret.
    let (mut secure, cqe) = begin(Some(&first));
    assert_eq!((cqe.status, cqe.result >> 16), (Status::SUCCESS, 0));
    assert!(configure(&mut secure, Configuration::enabled().0, now).is_success());
    assert!(begin(Some(&first)).1.status.is(Status::CONNECT_INVALID_HOST));
    let second = agree(&mut secure, SecureChannel::ReplaceTlsPsk, now);
    assert_eq!(keys(now), std::slice::from_ref(&second));
    assert!(begin(Some(&first)).1.status.is(Status::CONNECT_INVALID_HOST));
    // Another controller may use the new one; then it ends with that.
    let (other, cqe) = begin(Some(&second));
    assert!(cqe.status.is_success());
    drop(secure);
    assert_eq!(keys(now), [second]);
    drop(other);
    assert_eq!(keys(now), []);
    // A secret that changes takes with it what it has led to, and what has not been used ends with time.
    let (mut plain, _) = begin(None);
    let third = agree(&mut plain, SecureChannel::NewTlsPsk, now);
    target.set_hosts(&name, secret_hosts(1)).unwrap();
    assert_eq!(keys(now), [third]);
    target.set_hosts(&name, secret_hosts(2)).unwrap();
    assert_eq!(keys(now), []);
    let mut hosts = secret_hosts(1);
    hosts.others.as_mut().unwrap().concat = false;
    target.set_hosts(&name, hosts).unwrap();
    assert!(begin(None).1.status.is(Status::CONNECT_INVALID_HOST));
    target.set_hosts(&name, secret_hosts(1)).unwrap();
    let (mut plain, _) = begin(None);
    agree(&mut plain, SecureChannel::NewTlsPsk, now);
    assert_eq!(keys(now + Duration::from_secs(599)).len(), 1);
    assert_eq!(keys(now + Duration::from_secs(600)), []);
}
