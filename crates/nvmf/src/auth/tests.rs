use rdmux_wire::nvme::{AuthFailure, AuthMessage, DhGroup, HashId, Nqn, SecureChannel};

use super::chap::{Challenge, Side, generated_psk};
use super::dh::{EXPONENT_LEN, KeyPair};
use super::*;
use crate::tls::psk::{Derivation, Version};

fn nqn(name: &str) -> Nqn {
    Nqn::new(&format!("nqn.2014-08.org.example:{name}")).unwrap()
}

fn parties(controller: Option<Secret>) -> Parties {
    Parties {
        host: nqn("host"),
        subsystem: nqn("subsystem"),
        secrets: Secrets {
            host: Secret::new([1; 32]),
            controller,
        },
    }
}

fn authenticator(controller: Option<Secret>) -> Authenticator {
    Authenticator::new(parties(controller), || Some([7; 32]))
}

fn receive(controller: &mut Authenticator) -> AuthMessage {
    let (transaction, message) = AuthMessage::parse(&controller.poll().unwrap()).unwrap();
    assert_eq!(transaction, 9);
    message
}

fn negotiate(hashes: &[HashId], groups: &[DhGroup]) -> Vec<u8> {
    AuthMessage::Negotiate {
        secure_channel: 0,
        hashes: hashes.to_vec(),
        groups: groups.to_vec(),
    }
    .emit(9)
}

/// Plays the host's side as far as the controller's answer to its reply. Returns that answer and the response that it should have.
fn exchange(
    controller: &mut Authenticator,
    secret: &Secret,
    own_secret: Option<&Secret>,
    (hash, group): (HashId, DhGroup),
) -> (AuthMessage, Option<Vec<u8>>) {
    controller.handle(&negotiate(&[hash], &[group]));
    let AuthMessage::Challenge {
        hash,
        group,
        sequence,
        challenge,
        dh_value,
    } = receive(controller)
    else {
        panic!("no challenge");
    };
    let pair = KeyPair::new(group, &[3; EXPONENT_LEN]);
    let shared = pair.as_ref().map(|pair| pair.agree(&dh_value).unwrap());
    let (host, subsystem) = (nqn("host"), nqn("subsystem"));
    let of_host = Challenge {
        hash,
        challenge: &challenge,
        shared: shared.as_deref(),
        sequence,
        transaction: 9,
        channel: SecureChannel::None,
        host: &host,
        subsystem: &subsystem,
    };
    let own = vec![5; hash.digest_len()];
    let of_controller = Challenge {
        challenge: &own,
        sequence: 77,
        ..of_host
    };
    let reply = AuthMessage::Reply {
        sequence: 77,
        response: of_host.response(Side::Host, &secret.transformed(&host)),
        challenge: own_secret.map(|_| own.clone()),
        dh_value: pair.as_ref().map_or(Vec::new(), |pair| pair.public().to_vec()),
    };
    controller.handle(&reply.emit(9));
    let expected =
        own_secret.map(|own| of_controller.response(Side::Controller, &own.transformed(&subsystem)));
    (receive(controller), expected)
}

#[test]
fn exchange__authenticates_with_every_hash_and_group() {
    for hash in HashId::ALL {
        for group in DhGroup::ALL {
            for own in [None, Some(Secret::new([2; 32]))] {
                let mut controller = authenticator(own.clone());
                let (message, expected) = exchange(
                    &mut controller,
                    &Secret::new([1; 32]),
                    own.as_ref(),
                    (hash, group),
                );
                let success = AuthMessage::Success1 {
                    hash,
                    response: expected,
                };
                assert_eq!(message, success, "{hash:?} {group:?}");
                assert_eq!(controller.is_authenticated(), own.is_none());
                controller.handle(&AuthMessage::Success2.emit(9));
                assert_eq!(controller.is_authenticated(), own.is_some(), "{hash:?} {group:?}");
            }
        }
    }
}

#[test]
fn exchange__refuses_a_wrong_secret() {
    let mut controller = authenticator(None);
    let wrong = Secret::new([9; 32]);
    let (message, _) = exchange(
        &mut controller,
        &wrong,
        None,
        (HashId::Sha256, DhGroup::Ffdhe2048),
    );
    assert_eq!(message, AuthMessage::Failure1(AuthFailure::Failed));
    assert!(!controller.is_authenticated());
    // A controller without a secret of its own cannot respond.
    let right = Secret::new([1; 32]);
    let (message, _) = exchange(
        &mut controller,
        &right,
        Some(&right),
        (HashId::Sha256, DhGroup::Null),
    );
    assert_eq!(message, AuthMessage::Failure1(AuthFailure::Failed));
    assert!(!controller.is_authenticated());
}

#[test]
fn handle__refuses_what_it_cannot_or_does_not_expect() {
    let refused = |bytes: &[u8], transaction: u16, failure| {
        let mut controller = authenticator(None);
        controller.handle(bytes);
        let expected = AuthMessage::Failure1(failure).emit(transaction);
        assert_eq!(controller.poll(), Some(expected), "{failure:?}");
        assert_eq!(controller.poll(), None);
    };
    let null = [DhGroup::Null];
    refused(&negotiate(&[], &null), 9, AuthFailure::Hash);
    refused(&negotiate(&[HashId::Sha256], &[]), 9, AuthFailure::Group);
    let mut secure = negotiate(&[HashId::Sha256], &null);
    secure[6] = 1;
    refused(&secure, 9, AuthFailure::Concatenation);
    refused(&[0; 8], 0, AuthFailure::Payload);
    refused(&[], 0, AuthFailure::Payload);
    refused(&AuthMessage::Success2.emit(9), 9, AuthFailure::Message);
    // A reply that is used again.
    let mut controller = authenticator(None);
    let secret = Secret::new([1; 32]);
    exchange(&mut controller, &secret, None, (HashId::Sha256, DhGroup::Null));
    assert!(controller.is_authenticated());
    let reply = AuthMessage::Reply {
        sequence: 0,
        response: vec![0; 32],
        challenge: None,
        dh_value: Vec::new(),
    };
    controller.handle(&reply.emit(9));
    assert_eq!(
        receive(&mut controller),
        AuthMessage::Failure1(AuthFailure::Message)
    );
    assert!(!controller.is_authenticated());
}

#[test]
fn secret__has_the_form_of_nvme_cli() {
    // Of libnvme's tests.
    let text = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
    let secret = Secret::parse(text).unwrap();
    assert_eq!(secret.text(), text);
    assert_eq!(secret.transformed(&nqn("host")).len(), 32);
    let own = Secret::new([4; 32]);
    assert!(own.text().starts_with("DHHC-1:01:"));
    assert_eq!(Secret::parse(&own.text()).unwrap(), own);
    assert_ne!(own.transformed(&nqn("host")), own.transformed(&nqn("other")));
    for wrong in [
        "",
        "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2o:",
        "DHHC-1:04:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:",
        "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n",
        "DHHC-1:00::",
    ] {
        assert!(Secret::parse(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn secrets__are_made_once_in_a_private_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret");
    assert!(matches!(Secrets::load(&path), Err(SecretError::Missing(_))));
    let secrets = Secrets::load_or_create(&path).unwrap();
    assert_eq!(Secrets::load_or_create(&path).unwrap(), secrets);
    let controller = secrets.controller.unwrap();
    assert_ne!(secrets.host, controller);
    let one = folder.path().join("one");
    rdmux_key::create_private(&one, &controller.text()).unwrap();
    assert_eq!(Secrets::load(&one).unwrap().controller, None);
    let none = folder.path().join("none");
    rdmux_key::create_private(&none, "x\n").unwrap();
    let error = Secrets::load(&none).unwrap_err().to_string();
    assert!(error.contains("holds no secret"), "{error}");
}

fn host(controller: Option<Secret>, offer: Offer) -> HostAuthenticator {
    HostAuthenticator::new(parties(controller), offer, || Some([3; 32]), 9)
}

/// Has host and controller talk until the host is done; returns the messages that it has sent.
fn converse(host: &mut HostAuthenticator, controller: &mut Authenticator) -> (Result<(), AuthError>, usize) {
    for sent in 0..10 {
        match host.next() {
            Ok(HostStep::Send(bytes)) => controller.handle(&bytes),
            Ok(HostStep::Receive) => {
                // As it comes: with room behind it.
                let mut bytes = controller.poll().unwrap();
                bytes.resize(4096, 0);
                if let Err(error) = host.handle(&bytes) {
                    return (Err(error), sent);
                }
            }
            Ok(HostStep::Done) => return (Ok(()), sent),
            Err(error) => return (Err(error), sent),
        }
    }
    panic!("the exchange has no end");
}

#[test]
fn host__agrees_with_the_controller_by_every_hash_and_group() {
    for hash in HashId::ALL {
        for group in DhGroup::ALL {
            for own in [None, Some(Secret::new([2; 32]))] {
                let mut controller = authenticator(Some(Secret::new([2; 32])));
                let offer = Offer {
                    hashes: vec![hash],
                    groups: vec![group],
                };
                let (result, messages) = converse(&mut host(own.clone(), offer), &mut controller);
                assert_eq!(result, Ok(()), "{hash:?} {group:?}");
                // Negotiate, challenge, reply, success, and who was challenged hears that it has succeeded.
                assert_eq!(messages, 4 + usize::from(own.is_some()));
                assert!(controller.is_authenticated());
            }
        }
    }
}

#[test]
fn host__takes_no_wrong_proof_and_tells_the_controller() {
    let mut controller = authenticator(Some(Secret::new([2; 32])));
    let mut mistaken = host(Some(Secret::new([9; 32])), Offer::default());
    let (result, messages) = converse(&mut mistaken, &mut controller);
    assert_eq!((result, messages), (Err(AuthError::ControllerFailed), 5));
    assert!(!controller.is_authenticated());
    // The error stays.
    assert_eq!(mistaken.next(), Err(AuthError::ControllerFailed));
    // A controller that says nothing about its secret.
    let mut controller = authenticator(None);
    let mut asking = host(Some(Secret::new([2; 32])), Offer::default());
    let (result, _) = converse(&mut asking, &mut controller);
    assert_eq!(result, Err(AuthError::Refused(AuthFailure::Failed)));
}

#[test]
fn host__refuses_what_it_did_not_offer() {
    let challenge = |hash: HashId, group: DhGroup, value: Vec<u8>| AuthMessage::Challenge {
        hash,
        group,
        sequence: 1,
        challenge: vec![5; hash.digest_len()],
        dh_value: value,
    };
    let only = || Offer {
        hashes: vec![HashId::Sha256],
        groups: vec![DhGroup::Ffdhe2048],
    };
    let answered = |message: AuthMessage, transaction: u16| {
        let mut host = host(None, only());
        assert!(matches!(host.next(), Ok(HostStep::Send(_))));
        assert_eq!(host.next(), Ok(HostStep::Receive));
        host.handle(&message.emit(transaction))
    };
    let value = KeyPair::new(DhGroup::Ffdhe2048, &[3; EXPONENT_LEN])
        .unwrap()
        .public()
        .to_vec();
    assert_eq!(
        answered(challenge(HashId::Sha256, DhGroup::Ffdhe2048, value.clone()), 9),
        Ok(())
    );
    // A weaker group, another function, and a value of which everybody knows the powers.
    let mut one = vec![0; 256];
    one[255] = 1;
    for message in [
        challenge(HashId::Sha256, DhGroup::Null, Vec::new()),
        challenge(HashId::Sha512, DhGroup::Ffdhe2048, value.clone()),
        challenge(HashId::Sha256, DhGroup::Ffdhe2048, one),
    ] {
        assert_eq!(answered(message, 9), Err(AuthError::NotOffered));
    }
    let own = challenge(HashId::Sha256, DhGroup::Ffdhe2048, value);
    for (message, transaction) in [
        (own, 8),
        // Success before any proof.
        (
            AuthMessage::Success1 {
                hash: HashId::Sha256,
                response: None,
            },
            9,
        ),
        (AuthMessage::Success2, 9),
    ] {
        assert_eq!(answered(message, transaction), Err(AuthError::Message));
    }
    assert_eq!(host(None, only()).handle(&[]), Err(AuthError::Message));
}

#[test]
fn generated_psk__is_that_of_linux() {
    // The values of Linux's drivers/nvme/common/tests/auth_kunit.c; Python's hmac and hashlib give the same.
    let bytes = |first: u8, step: u8, hash: HashId| -> Vec<u8> {
        let number = 0..hash.digest_len() as u8;
        number
            .map(|at| first.wrapping_add(at.wrapping_mul(step)))
            .collect()
    };
    let [host, subsystem] = ["hostnqn", "subsysnqn"].map(|name| Nqn::new(name).unwrap());
    let expected = [
        (
            HashId::Sha256,
            "OldoKuTfKddMuyCznAZojkWD7P4D9/AtzDzLimtOxqI=",
            "3c17da628474a04d2247c4cab47968c915388193f7c071bd9489cc3666cd7cc8",
        ),
        (
            HashId::Sha384,
            "cffMWk8TSS7HOQebjgYEIkrPrjWPV4JE5cdPB8WhEvY4JBW5YynKyv66XscN4A9n",
            "2774753233537b3fa50eb7d16a8e43457d85f4906c005b2236616c5d80939d08\
             98fff15bb8b77119d2be0aac423e7590",
        ),
    ];
    for (hash, digest, tls) in expected {
        let session_key = bytes(b'A', 1, hash);
        let challenges = [bytes(0, 1, hash), bytes(0xff, 0xff, hash)];
        let psk = generated_psk(hash, &session_key, [&challenges[0], &challenges[1]]).unwrap();
        let form = (Version::V1, Derivation::Standard);
        let credentials = psk.credentials(form, &host, &subsystem).unwrap();
        let id = hash as u8;
        assert_eq!(
            credentials.identity,
            format!("NVMe1G{id:02} hostnqn subsysnqn {digest}")
        );
        let key: String = credentials.key.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(key, tls);
    }
    let long = [7; 64];
    assert_eq!(generated_psk(HashId::Sha512, &long, [&long, &long]), None);
}

#[test]
fn concat__has_both_sides_agree_on_a_key() {
    for group in DhGroup::ALL.into_iter().skip(1) {
        for own in [None, Some(Secret::new([2; 32]))] {
            let mut controller = authenticator(Some(Secret::new([2; 32]))).with_new_psk();
            let offer = Offer {
                groups: vec![group],
                ..Offer::default()
            };
            let mut host = host(own.clone(), offer).with_channel(SecureChannel::NewTlsPsk);
            assert_eq!(host.take_psk(), None, "nothing is proved");
            let (result, messages) = converse(&mut host, &mut controller);
            assert_eq!(
                (result, messages),
                (Ok(()), 4 + usize::from(own.is_some())),
                "{group:?}"
            );
            let psk = host.take_psk();
            assert!(psk.is_some() && psk == controller.take_psk(), "{group:?}");
            assert_eq!((host.take_psk(), controller.take_psk()), (None, None));
        }
    }
}

#[test]
fn concat__again_leaves_the_host_authenticated_until_it_fails() {
    let mut controller = authenticator(Some(Secret::new([2; 32]))).with_psk(0);
    let replace = |own: u8| {
        let own = Some(Secret::new([own; 32]));
        host(own, Offer::default()).with_channel(SecureChannel::ReplaceTlsPsk)
    };
    let mut host = replace(2);
    // Also while it has still to say that the controller's response is right: nothing else may be held up by that.
    while let Ok(step) = host.next() {
        match step {
            HostStep::Send(bytes) => controller.handle(&bytes),
            HostStep::Receive => host.handle(&controller.poll().unwrap()).unwrap(),
            HostStep::Done => break,
        }
        assert!(controller.is_authenticated());
    }
    assert!(controller.take_psk().is_some());
    let (result, _) = converse(&mut replace(9), &mut controller);
    assert_eq!(result, Err(AuthError::ControllerFailed));
    assert!(!controller.is_authenticated() && controller.take_psk().is_none());
}

#[test]
fn concat__has_no_key_before_both_have_proved_themselves() {
    let mut controller = authenticator(Some(Secret::new([2; 32]))).with_new_psk();
    // A host that does not believe the controller: it has responded, and would have the same key.
    let mut mistaken =
        host(Some(Secret::new([9; 32])), Offer::default()).with_channel(SecureChannel::NewTlsPsk);
    let (result, _) = converse(&mut mistaken, &mut controller);
    assert_eq!(result, Err(AuthError::ControllerFailed));
    assert_eq!((mistaken.take_psk(), controller.take_psk()), (None, None));
}

#[test]
fn concat__is_refused_where_it_does_not_fit() {
    use SecureChannel::{NewTlsPsk, None as NoChannel, ReplaceTlsPsk};
    let both = [DhGroup::Null, DhGroup::Ffdhe2048];
    let refused = |controller: Authenticator, code: u8, offer: (&[HashId], &[DhGroup]), failure| {
        let mut controller = controller;
        let mut bytes = negotiate(offer.0, offer.1);
        bytes[6] = code;
        controller.handle(&bytes);
        let message = receive(&mut controller);
        match failure {
            Some(failure) => assert_eq!(message, AuthMessage::Failure1(failure)),
            // The best of both.
            None => assert!(matches!(
                message,
                AuthMessage::Challenge {
                    group: DhGroup::Ffdhe2048,
                    ..
                }
            )),
        }
    };
    let any: (&[HashId], &[DhGroup]) = (&HashId::ALL, &both);
    let mismatch = Some(AuthFailure::Concatenation);
    let plain = || authenticator(None);
    let exposed = || authenticator(None).with_new_psk();
    let secure = || authenticator(None).with_psk(0);
    let cases = [
        // Without TLS at the listener.
        (plain as fn() -> Authenticator, [true, false, false]),
        // With TLS there, before and behind its handshake.
        (exposed, [false, true, false]),
        (secure, [true, false, true]),
        (|| authenticator(None).with_psk(1), [true, false, false]),
    ];
    for (controller, is_right) in cases {
        for (channel, is_right) in [NoChannel, NewTlsPsk, ReplaceTlsPsk].into_iter().zip(is_right) {
            let failure = if is_right { None } else { mismatch };
            refused(controller(), channel as u8, any, failure);
        }
        // Obsolete, and without a meaning.
        refused(controller(), 1, any, mismatch);
        refused(controller(), 4, any, mismatch);
    }
    let null = [DhGroup::Null];
    refused(exposed(), 2, (&HashId::ALL, &null), mismatch);
    let hash = Some(AuthFailure::Hash);
    refused(exposed(), 2, (&[HashId::Sha512], &both), hash);
    assert!(secure().is_authenticated() && !exposed().is_authenticated());
    // Without a challenge of the host there is no key.
    let mut controller = exposed();
    let mut bytes = negotiate(&[HashId::Sha256], &[DhGroup::Ffdhe2048]);
    bytes[6] = NewTlsPsk as u8;
    controller.handle(&bytes);
    receive(&mut controller);
    let pair = KeyPair::new(DhGroup::Ffdhe2048, &[3; EXPONENT_LEN]).unwrap();
    let reply = AuthMessage::Reply {
        sequence: 0,
        response: vec![0; 32],
        challenge: None,
        dh_value: pair.public().to_vec(),
    };
    controller.handle(&reply.emit(9));
    let failure = AuthMessage::Failure1(AuthFailure::Payload);
    assert_eq!(receive(&mut controller), failure);
    assert_eq!(controller.take_psk(), None);
}

#[test]
fn response__covers_the_secure_channel() {
    let (host, subsystem) = (nqn("host"), nqn("subsystem"));
    let response = |channel| {
        let challenge = Challenge {
            hash: HashId::Sha256,
            challenge: &[5; 32],
            shared: None,
            sequence: 1,
            transaction: 9,
            channel,
            host: &host,
            subsystem: &subsystem,
        };
        challenge.response(Side::Host, &[1; 32])
    };
    let channels = [
        SecureChannel::None,
        SecureChannel::NewTlsPsk,
        SecureChannel::ReplaceTlsPsk,
    ];
    let [none, new, replace] = channels.map(response);
    assert!(none != new && new != replace && none != replace);
}
