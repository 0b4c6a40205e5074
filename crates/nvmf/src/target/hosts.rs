//! Hosts that may use a subsystem, and on which terms.

use std::collections::BTreeMap;

use rdmux_wire::nvme::Nqn;

use super::limit::Rates;
use crate::auth::{Random, Secrets};
use crate::tls::psk::Psk;

/// Hosts that may use a subsystem. By default none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hosts {
    /// Terms of hosts that are not named; `None`: they are refused.
    pub others: Option<Terms>,
    /// Terms of hosts by their name.
    pub named: BTreeMap<Nqn, Terms>,
}

impl Hosts {
    /// Returns those of a subsystem that every host may use, on the same terms.
    pub fn any(terms: Terms) -> Hosts {
        Hosts {
            others: Some(terms),
            named: BTreeMap::new(),
        }
    }

    /// Returns the terms of a host; `None`: it is refused.
    pub fn terms(&self, host: &Nqn) -> Option<&Terms> {
        self.named.get(host).or(self.others.as_ref())
    }
}

/// Terms on which a host may use a subsystem.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Terms {
    /// The proof that it is that host. `None`: its word is enough.
    pub authentication: Option<Authentication>,
    /// The key of its connections to listeners that require TLS. `None`: it has none.
    pub psk: Option<Psk>,
    /// It may as well agree on a key by its secret, with each of its controllers (secure channel concatenation).
    pub concat: bool,
    /// Maximum number of I/O queues of each of its controllers; `None`: the target's.
    pub queues: Option<u16>,
    /// Limits of its I/Os.
    pub rates: Rates,
}

/// Authentication by DH-HMAC-CHAP.
#[derive(Clone, Debug)]
pub struct Authentication {
    /// The secrets of both sides.
    pub secrets: Secrets,
    /// Source of challenges.
    pub random: Random,
}

impl PartialEq for Authentication {
    /// Compares the secrets: a host that has proved to have them need not do it again.
    fn eq(&self, other: &Authentication) -> bool {
        self.secrets == other.secrets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms__of_a_named_host_come_first() {
        let host = |name: &str| Nqn::new(&format!("nqn.2014-08.org.example:{name}")).unwrap();
        let queues = |queues| Terms {
            queues: Some(queues),
            ..Terms::default()
        };
        let mut hosts = Hosts::default();
        assert_eq!(hosts.terms(&host("a")), None);
        hosts.named.insert(host("a"), queues(1));
        assert_eq!(
            (hosts.terms(&host("a")), hosts.terms(&host("b"))),
            (Some(&queues(1)), None)
        );
        hosts.others = Some(queues(2));
        assert_eq!(
            (hosts.terms(&host("a")), hosts.terms(&host("b"))),
            (Some(&queues(1)), Some(&queues(2)))
        );
    }
}
