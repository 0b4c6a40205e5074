//! Asymmetric access to namespaces (ANA): by which ways hosts reach which groups of them. NVMe Base 2.0, 8.1.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use rdmux_wire::nvme::{AnaGroup, AnaLog, AnaState, NsId, TransportKind};

use super::subsystem::{Listener, NamespaceError};

/// The highest id of a group of namespaces that share a state of access.
pub(crate) const ANA_GROUP_MAX: u32 = 128;

/// A state of access, and where it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnaRule {
    /// The group of namespaces; `None`: all groups.
    pub group: Option<u32>,
    /// The way by which hosts have reached the target; `None`: all ways. Listeners for RDMA of one address are one way.
    pub at: Option<Listener>,
    /// The state.
    pub state: AnaState,
}

impl AnaRule {
    fn check(&self) -> Result<(), NamespaceError> {
        self.group.map_or(Ok(()), check_group)
    }

    fn applies(&self, group: u32, way: &Listener) -> bool {
        self.group.is_none_or(|own| own == group) && self.at.is_none_or(|own| own == *way)
    }

    /// Returns true if it applies wherever another one does.
    fn covers(&self, other: &AnaRule) -> bool {
        (self.group.is_none() || self.group == other.group) && (self.at.is_none() || self.at == other.at)
    }
}

pub(super) fn check_group(group: u32) -> Result<(), NamespaceError> {
    match (1..=ANA_GROUP_MAX).contains(&group) {
        true => Ok(()),
        false => Err(NamespaceError::Group(group)),
    }
}

/// Returns a listener as rules know it: a connection by RDMA does not tell which port of the address it has come by.
fn way(listener: Listener) -> Listener {
    let port = match listener.transport {
        TransportKind::Tcp => listener.address.port(),
        TransportKind::Rdma => 0,
    };
    Listener {
        address: SocketAddr::new(listener.address.ip().to_canonical(), port),
        ..listener
    }
}

/// The states of access to the groups of a subsystem. Groups for which nothing was set are optimized.
#[derive(Debug, Default)]
pub(super) struct AnaStates {
    /// The last one that applies decides. With each the number of changes when it was set.
    rules: Vec<(AnaRule, u64)>,
    /// Number of changes of the rules, and of the groups of namespaces.
    changes: u64,
    /// Number of changes when all rules were replaced.
    replaced: u64,
}

impl AnaStates {
    /// Sets a state wherever the rule applies, whatever was set before. Returns true if the rule is new.
    pub(super) fn set(&mut self, rule: AnaRule) -> Result<bool, NamespaceError> {
        rule.check()?;
        if self.rules.last().is_some_and(|(last, _)| *last == normal(rule)) {
            return Ok(false);
        }
        self.changes += 1;
        self.push(rule);
        Ok(true)
    }

    /// Forgets what was set before. Returns true if the rules are other ones.
    pub(super) fn replace(&mut self, rules: &[AnaRule]) -> Result<bool, NamespaceError> {
        rules.iter().try_for_each(AnaRule::check)?;
        let mut new = AnaStates {
            changes: self.changes + 1,
            replaced: self.changes + 1,
            ..AnaStates::default()
        };
        rules.iter().for_each(|rule| new.push(*rule));
        let plain = |states: &AnaStates| states.rules.iter().map(|(rule, _)| *rule).collect::<Vec<_>>();
        if plain(self) == plain(&new) {
            return Ok(false);
        }
        *self = new;
        Ok(true)
    }

    fn push(&mut self, rule: AnaRule) {
        let rule = normal(rule);
        self.rules.retain(|(old, _)| !rule.covers(old));
        self.rules.push((rule, self.changes));
    }

    /// A namespace is in another group now.
    pub(super) fn moved(&mut self) {
        self.changes += 1;
    }

    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns the state of access to a group for hosts that have come by a listener, and the number of changes when it was set.
    fn at(&self, group: u32, listener: Listener) -> (AnaState, u64) {
        let way = way(listener);
        let mut rules = self.rules.iter().rev();
        let found = rules.find(|(rule, _)| rule.applies(group, &way));
        found.map_or((AnaState::default(), self.replaced), |(rule, changes)| {
            (rule.state, *changes)
        })
    }

    pub(super) fn state(&self, group: u32, listener: Listener) -> AnaState {
        self.at(group, listener).0
    }

    /// Returns the log for hosts that have come by a listener: the groups that have namespaces, and those with a state of their own.
    pub(super) fn log(
        &self,
        namespaces: impl IntoIterator<Item = (NsId, u32)>,
        listener: Listener,
    ) -> AnaLog {
        let named = self.rules.iter().filter_map(|(rule, _)| rule.group);
        let mut groups: BTreeMap<u32, Vec<NsId>> = named.map(|group| (group, Vec::new())).collect();
        for (nsid, group) in namespaces {
            groups.entry(group).or_default().push(nsid);
        }
        let groups = groups.into_iter().map(|(id, namespaces)| {
            let (state, changes) = self.at(id, listener);
            AnaGroup {
                id,
                changes,
                state,
                namespaces,
            }
        });
        AnaLog {
            changes: self.changes,
            groups: groups.collect(),
        }
    }
}

fn normal(rule: AnaRule) -> AnaRule {
    AnaRule {
        at: rule.at.map(way),
        ..rule
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listener(transport: TransportKind, address: &str) -> Listener {
        Listener {
            transport,
            address: address.parse().unwrap(),
        }
    }

    fn rule(group: impl Into<Option<u32>>, at: impl Into<Option<Listener>>, state: AnaState) -> AnaRule {
        AnaRule {
            group: group.into(),
            at: at.into(),
            state,
        }
    }

    #[test]
    fn set__the_last_that_applies_decides() {
        let [one, two] =
            ["10.0.0.1:4420", "10.0.0.1:4421"].map(|address| listener(TransportKind::Tcp, address));
        let mut states = AnaStates::default();
        assert_eq!(states.state(1, one), AnaState::Optimized);
        assert_eq!(states.set(rule(1, one, AnaState::Inaccessible)), Ok(true));
        assert_eq!(states.state(1, one), AnaState::Inaccessible);
        assert_eq!(states.state(1, two), AnaState::Optimized, "another port");
        assert_eq!(states.state(2, one), AnaState::Optimized, "another group");
        states.set(rule(None, one, AnaState::NonOptimized)).unwrap();
        assert_eq!(states.state(1, one), AnaState::NonOptimized);
        assert_eq!(states.state(2, one), AnaState::NonOptimized);
        states.set(rule(2, None, AnaState::Change)).unwrap();
        assert_eq!(states.state(2, one), AnaState::Change);
        assert_eq!(states.state(1, one), AnaState::NonOptimized);
        states.set(rule(None, None, AnaState::Optimized)).unwrap();
        assert_eq!(states.state(2, one), AnaState::Optimized);
        assert_eq!(states.rules.len(), 1, "what is covered is forgotten");
        // Nothing is different then, and hosts need no event.
        let changes = states.changes();
        assert_eq!(states.set(rule(None, None, AnaState::Optimized)), Ok(false));
        assert_eq!(states.changes(), changes);
        let beyond = rule(129, None, AnaState::Change);
        assert_eq!(states.set(beyond), Err(NamespaceError::Group(129)));
        assert_eq!(states.replace(&[beyond]), Err(NamespaceError::Group(129)));
        assert_eq!(states.changes(), changes);
    }

    #[test]
    fn state__ports_of_rdma_are_one_way_and_tcp_is_another() {
        let [one, two] =
            ["10.0.0.1:4420", "10.0.0.1:4421"].map(|address| listener(TransportKind::Rdma, address));
        let tcp = listener(TransportKind::Tcp, "10.0.0.1:4420");
        let mut states = AnaStates::default();
        states.set(rule(None, two, AnaState::Inaccessible)).unwrap();
        let all = [one, two, tcp].map(|listener| states.state(1, listener));
        assert_eq!(
            all,
            [
                AnaState::Inaccessible,
                AnaState::Inaccessible,
                AnaState::Optimized
            ]
        );
    }

    #[test]
    fn replace__forgets_and_counts_what_is_other() {
        let one = listener(TransportKind::Tcp, "10.0.0.1:4420");
        let mut states = AnaStates::default();
        states.set(rule(3, None, AnaState::Inaccessible)).unwrap();
        let rules = [rule(None, one, AnaState::NonOptimized)];
        assert_eq!(states.replace(&rules), Ok(true));
        assert_eq!(states.state(3, one), AnaState::NonOptimized);
        assert_eq!(states.replace(&rules), Ok(false));
        assert_eq!(states.replace(&[]), Ok(true));
        let log = states.log([(NsId(1), 1), (NsId(7), 2), (NsId(9), 1)], one);
        let groups: Vec<_> = log
            .groups
            .iter()
            .map(|group| (group.id, group.state, group.changes, &group.namespaces[..]))
            .collect();
        assert_eq!(
            groups,
            [
                (1, AnaState::Optimized, 3, &[NsId(1), NsId(9)][..]),
                (2, AnaState::Optimized, 3, &[NsId(7)][..])
            ]
        );
        assert_eq!(log.changes, 3);
    }
}
