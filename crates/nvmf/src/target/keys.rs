//! Keys of TLS that authentications have led to, in memory alone. NVMe/TCP 3.6.1.4.

use std::time::{Duration, Instant};

use rdmux_wire::nvme::Nqn;

use crate::tls::psk::Psk;

/// Time for which connections can be set up with a key.
const LIFETIME: Duration = Duration::from_secs(600);
/// Keys of a host.
const OF_HOST_MAX: usize = 16;
/// Keys of all hosts: one that knows a secret may have many names.
const KEYS_MAX: usize = 1024;

#[derive(Debug)]
struct Key {
    host: Nqn,
    psk: Psk,
    made: Instant,
    /// The controller whose queues use it, and no other's.
    user: Option<u16>,
}

/// The keys of a subsystem's hosts.
#[derive(Debug, Default)]
pub(super) struct Keys(Vec<Key>);

impl Keys {
    fn forget_old(&mut self, now: Instant) {
        self.0
            .retain(|key| now.saturating_duration_since(key.made) < LIFETIME);
    }

    /// Keeps a key. If there are too many, the oldest one is forgotten: of those that no controller uses, unless all are used.
    pub(super) fn add(&mut self, host: &Nqn, psk: Psk, now: Instant) {
        self.forget_old(now);
        let is_own = |key: &Key| key.host == *host;
        let own = self.0.iter().filter(|key| is_own(key)).count();
        let is_own_full = own >= OF_HOST_MAX;
        if is_own_full || self.0.len() >= KEYS_MAX {
            // They are in the order in which they were made.
            let others = self.0.iter().enumerate();
            let others = others.filter(|(_, key)| !is_own_full || is_own(key));
            let superfluous = others.min_by_key(|(at, key)| (key.user.is_some(), *at));
            if let Some((at, _)) = superfluous {
                self.0.remove(at);
            }
        }
        self.0.push(Key {
            host: host.clone(),
            psk,
            made: now,
            user: None,
        });
    }

    /// Returns the keys that a host may have.
    pub(super) fn of_host(&mut self, host: &Nqn, now: Instant) -> Vec<Psk> {
        self.forget_old(now);
        let own = self.0.iter().filter(|key| key.host == *host);
        own.map(|key| key.psk.clone()).collect()
    }

    /// Has a queue of a controller use a key. Returns false if that is another controller's, or, for an admin queue, any controller's.
    pub(super) fn use_by(&mut self, (host, psk): (&Nqn, &Psk), cntlid: u16, qid: u16) -> bool {
        let known = self.0.iter_mut();
        let mut own = known.filter(|key| key.host == *host && key.psk == *psk);
        let Some(key) = own.next() else {
            return false;
        };
        let is_free = key.user.is_none() || (qid > 0 && key.user == Some(cntlid));
        if is_free {
            key.user = Some(cntlid);
        }
        is_free
    }

    /// Forgets the keys of a controller: it is over, or has another one.
    pub(super) fn forget_of(&mut self, cntlid: u16) {
        self.0.retain(|key| key.user != Some(cntlid));
    }

    /// Forgets the keys of the hosts of which that is not so.
    pub(super) fn retain(&mut self, is_kept: impl Fn(&Nqn) -> bool) {
        self.0.retain(|key| is_kept(&key.host));
    }
}

#[cfg(test)]
mod tests {
    use rdmux_wire::nvme::HashId;

    use super::*;

    fn host(number: usize) -> Nqn {
        Nqn::new(&format!("nqn.2014-08.org.example:{number}")).unwrap()
    }

    fn psk(number: u8) -> Psk {
        Psk::generated(HashId::Sha256, vec![number; 32]).unwrap()
    }

    #[test]
    fn use_by__is_for_one_controller() {
        let now = Instant::now();
        let mut keys = Keys::default();
        let (own, other) = (host(1), host(2));
        keys.add(&own, psk(1), now);
        assert!(!keys.use_by((&other, &psk(1)), 7, 0), "another host's");
        assert!(!keys.use_by((&own, &psk(2)), 7, 0), "no key");
        assert!(keys.use_by((&own, &psk(1)), 7, 0));
        assert!(keys.use_by((&own, &psk(1)), 7, 1));
        assert!(!keys.use_by((&own, &psk(1)), 8, 0), "a second association");
        assert!(!keys.use_by((&own, &psk(1)), 8, 1));
        keys.forget_of(8);
        assert_eq!(keys.of_host(&own, now), [psk(1)]);
        keys.forget_of(7);
        assert_eq!(keys.of_host(&own, now), []);
    }

    #[test]
    fn add__has_a_bound_for_a_host_and_for_all() {
        let now = Instant::now();
        let mut keys = Keys::default();
        keys.add(&host(0), psk(0), now);
        for number in 0..OF_HOST_MAX as u8 + 3 {
            keys.add(&host(1), psk(number), now);
        }
        let newest: Vec<_> = (3..OF_HOST_MAX as u8 + 3).map(psk).collect();
        assert_eq!(keys.of_host(&host(1), now), newest);
        assert_eq!(keys.of_host(&host(0), now), [psk(0)], "another one keeps its own");
        assert!(keys.use_by((&host(0), &psk(0)), 7, 0));
        for number in 1..=OF_HOST_MAX as u8 {
            keys.add(&host(0), psk(number), now);
        }
        assert!(keys.use_by((&host(0), &psk(0)), 7, 1), "one that is used stays");
        for number in 0..2 * KEYS_MAX {
            keys.add(&host(number), psk(0), now);
        }
        assert_eq!(keys.0.len(), KEYS_MAX);
        assert!(keys.use_by((&host(0), &psk(0)), 7, 2), "whatever others do");
    }

    #[test]
    fn of_host__ends_with_the_lifetime() {
        let now = Instant::now();
        let mut keys = Keys::default();
        keys.add(&host(1), psk(1), now);
        let last = now + LIFETIME - Duration::from_secs(1);
        assert_eq!(keys.of_host(&host(1), last), [psk(1)]);
        assert_eq!(keys.of_host(&host(1), now + LIFETIME), []);
        keys.add(&host(1), psk(1), now);
        keys.retain(|kept| *kept != host(1));
        assert_eq!(keys.of_host(&host(1), now), []);
    }
}
