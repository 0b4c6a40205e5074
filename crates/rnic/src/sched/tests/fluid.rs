//! The service of every connection beside that of a fluid model (generalised processor sharing, Parekh and Gallager 1993), in which all
//! that wait send at once, each at the rate of its weights.

use std::num::{NonZeroU8, NonZeroU16};

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

use crate::sched::{CLASSES, ConnectionId, Entitlement, Hierarchy, Policy, Quanta};
use crate::time::Time;

struct Simulated {
    connection: ConnectionId,
    tenant: usize,
    class: usize,
    /// Bytes that wait, and that were sent: in the scheduler, and in the fluid model.
    queued: u64,
    sent: u64,
    fluid_queued: f64,
    fluid_sent: f64,
}

struct Model {
    rng: ChaCha8Rng,
    weights: Vec<u16>,
    policies: Vec<[Policy; CLASSES]>,
    hierarchy: Hierarchy<usize>,
    connections: Vec<Simulated>,
}

const NOW: Time = Time(1);

impl Model {
    /// Returns a model of up to 4 tenants with up to 3 classes each; with `strict`, one of them strict.
    fn new(seed: u64, quanta: Quanta, strict: bool) -> Model {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut below = |n: u32| rng.next_u32() % n;
        let mut hierarchy = Hierarchy::new(quanta);
        let (mut weights, mut policies, mut connections) = (Vec::new(), Vec::new(), Vec::new());
        for tenant in 0..=below(4) as usize {
            let mut classes = [Policy::default(); CLASSES];
            for class in &mut classes[..3] {
                *class = Policy::Ets(NonZeroU8::new(1 + below(6) as u8).unwrap());
            }
            if strict {
                classes[below(3) as usize] = Policy::Strict;
            }
            let entitlement = Entitlement {
                weight: NonZeroU16::new(1 + below(6) as u16).unwrap(),
                classes,
                ..Entitlement::default()
            };
            let id = hierarchy.add_tenant(&entitlement);
            weights.push(entitlement.weight.get());
            policies.push(classes);
            for class in 0..=below(3) as usize {
                let groups: Vec<_> = (0..=below(2)).map(|_| hierarchy.add_group(id, class)).collect();
                for _ in 0..=below(5) {
                    let group = groups[below(groups.len() as u32) as usize].unwrap();
                    connections.push(Simulated {
                        connection: hierarchy.add_connection(group, connections.len()).unwrap(),
                        tenant,
                        class,
                        queued: 0,
                        sent: 0,
                        fluid_queued: 0.0,
                        fluid_sent: 0.0,
                    });
                }
            }
        }
        Model {
            rng,
            weights,
            policies,
            hierarchy,
            connections,
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.rng.next_u64() % n
    }

    fn arrive(&mut self) {
        let at = self.below(self.connections.len() as u64) as usize;
        let bits = self.below(20);
        let bytes = 1 + self.below(1 << bits);
        let connection = &mut self.connections[at];
        connection.queued += bytes;
        connection.fluid_queued += bytes as f64;
        self.hierarchy.wake(NOW, connection.connection);
    }

    /// Sends one piece; returns its bytes.
    fn send(&mut self, piece_bytes: u64) -> u64 {
        let waits = self.connections.iter().any(|one| one.queued > 0);
        let Some(turn) = self.hierarchy.pick(NOW) else {
            assert!(!waits, "something waits, and nothing is picked");
            return 0;
        };
        let at = turn.id;
        let policies = &self.policies[self.connections[at].tenant];
        let higher = |class: usize| policies[class] == Policy::Strict && class != self.connections[at].class;
        let overtaken = |other: &Simulated| {
            let same = other.tenant == self.connections[at].tenant;
            same && other.queued > 0 && higher(other.class)
        };
        assert!(!self.connections.iter().any(overtaken), "a strict class waits");
        let connection = &mut self.connections[at];
        assert!(connection.queued > 0);
        let bytes = connection.queued.min(piece_bytes);
        connection.queued -= bytes;
        connection.sent += bytes;
        let more = connection.queued > 0;
        self.hierarchy.end(NOW, turn, bytes as u32, more);
        bytes
    }

    /// The rate of each connection in the fluid model, of a link whose rate is 1.
    fn rates(&self) -> Vec<f64> {
        let waits = |one: &&Simulated| one.fluid_queued > 1e-6;
        let counted = |tenant: usize, class: usize| {
            let inside = |one: &&Simulated| one.tenant == tenant && one.class == class;
            self.connections.iter().filter(waits).filter(inside).count() as f64
        };
        let tenant_waits = |tenant: usize| {
            self.connections
                .iter()
                .filter(waits)
                .any(|one| one.tenant == tenant)
        };
        let weights: f64 = (0..self.weights.len())
            .filter(|tenant| tenant_waits(*tenant))
            .map(|tenant| f64::from(self.weights[tenant]))
            .sum();
        let of_class = |tenant: usize, class: usize| {
            let waiting = (0..CLASSES).filter(|class| counted(tenant, *class) > 0.0);
            let strict = |class: &usize| self.policies[tenant][*class] == Policy::Strict;
            if let Some(first) = waiting.clone().filter(strict).max() {
                return if first == class { 1.0 } else { 0.0 };
            }
            let weight = |class: usize| match self.policies[tenant][class] {
                Policy::Ets(weight) => f64::from(weight.get()),
                Policy::Strict => 0.0,
            };
            weight(class) / waiting.map(weight).sum::<f64>()
        };
        let rate = |one: &Simulated| {
            if one.fluid_queued <= 1e-6 {
                return 0.0;
            }
            let of_tenant = f64::from(self.weights[one.tenant]) / weights;
            of_tenant * of_class(one.tenant, one.class) / counted(one.tenant, one.class)
        };
        self.connections.iter().map(rate).collect()
    }

    /// Lets the fluid model send as much as the scheduler has.
    fn flow(&mut self, bytes: u64) {
        let mut left = bytes as f64;
        while left > 1e-6 {
            let rates = self.rates();
            let empties = |(one, rate): (&Simulated, &f64)| one.fluid_queued / rate;
            let first = self
                .connections
                .iter()
                .zip(&rates)
                .filter(|(_, rate)| **rate > 0.0);
            let Some(first) = first.map(empties).min_by(f64::total_cmp) else {
                return;
            };
            let step = left.min(first);
            for (one, rate) in self.connections.iter_mut().zip(&rates) {
                one.fluid_queued -= step * rate;
                one.fluid_sent += step * rate;
            }
            left -= step;
        }
    }

    /// Largest difference between the scheduler and the fluid model that a connection may have: a quantum and a piece for each
    /// level, and the advances.
    fn bound(&self, one: &Simulated, quanta: &Quanta, piece_bytes: u64) -> f64 {
        let weight = |policy: &Policy| match policy {
            Policy::Ets(weight) => Some(f64::from(weight.get())),
            Policy::Strict => None,
        };
        let policies = &self.policies[one.tenant];
        let least = policies.iter().filter_map(weight).min_by(f64::total_cmp).unwrap();
        let class = weight(&policies[one.class]).unwrap_or(0.0) / least;
        let lightest = f64::from(*self.weights.iter().min().unwrap());
        let tenant = f64::from(self.weights[one.tenant]) / lightest;
        let quantum = f64::from(quanta.quantum_bytes);
        quantum * (1.0 + class + tenant) + 3.0 * piece_bytes as f64 + 2.0 * f64::from(quanta.sparse_bytes)
    }
}

/// Runs random traffic; returns the largest difference, as a part of the bound.
fn follow(seed: u64, quanta: Quanta, strict: bool, piece_bytes: u64, load: u64) -> f64 {
    let mut model = Model::new(seed, quanta, strict);
    let mut worst: f64 = 0.0;
    for _ in 0..2_000 {
        if model.below(100) < load {
            model.arrive();
        }
        let bytes = model.send(piece_bytes);
        model.flow(bytes);
        for one in &model.connections {
            let bound = model.bound(one, &quanta, piece_bytes);
            let apart = (one.sent as f64 - one.fluid_sent).abs() / bound;
            assert!(
                apart <= 1.0,
                "seed {seed}, {quanta:?}, pieces of {piece_bytes}, load {load}: connection {} of class {} of tenant {} has sent {}, \
                 in the fluid model {}; bound {bound}",
                one.connection.0.index,
                one.class,
                one.tenant,
                one.sent,
                one.fluid_sent
            );
            worst = worst.max(apart);
        }
    }
    worst
}

fn follow_all(quanta: Quanta, strict: bool, piece_bytes: u64) {
    let mut worst: f64 = 0.0;
    for seed in 1..=8 {
        for load in [20, 50, 90] {
            worst = worst.max(follow(seed, quanta, strict, piece_bytes, load));
        }
    }
    println!(
        "seeds 1 to 8, {quanta:?}, strict {strict}, pieces of {piece_bytes}: at most {worst:.3} of the bound"
    );
}

const WITHOUT_SPARSE: Quanta = Quanta {
    quantum_bytes: 16 << 10,
    sparse_bytes: 0,
    piece_bytes_max: 64 << 10,
    strict_percent: 100,
};

#[test]
fn pick__a_quantum_and_a_piece_from_the_fluid_model() {
    for piece_bytes in [4 << 10, 16 << 10, 64 << 10] {
        follow_all(WITHOUT_SPARSE, false, piece_bytes);
    }
}

#[test]
fn pick__strict_classes_in_the_fluid_model() {
    follow_all(WITHOUT_SPARSE, true, 16 << 10);
}

#[test]
fn pick__new_connections_are_ahead_of_the_fluid_model_by_their_advances() {
    let quanta = Quanta {
        sparse_bytes: 64 << 10,
        ..WITHOUT_SPARSE
    };
    follow_all(quanta, false, 16 << 10);
    follow_all(quanta, true, 16 << 10);
}
