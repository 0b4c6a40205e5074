//! Rates of tenants that several workers serve. Each worker has a scheduler of its own, which knows its own applications alone. It gets the part
//! of each rate that belongs to what waits there, so that all of them together keep to the node's configuration.

use std::num::NonZeroU16;

use rdmux_rnic::sched::Entitlement;

/// A tenant, and how many of its queue pairs have requests that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Demand {
    pub(super) entitlement: Entitlement,
    /// At one worker.
    pub(super) here: u32,
    /// At all workers.
    pub(super) all: u32,
}

impl Demand {
    /// Returns the part of the tenant that belongs to the worker. Rates of a tenant for which nothing waits are whole: it may begin anywhere.
    fn part(&self) -> f64 {
        match self.all {
            0 => 1.0,
            all => f64::from(self.here.min(all)) / f64::from(all),
        }
    }
}

/// Returns what the tenants are entitled to at a worker, and the rate of the worker, in bits per second. `rate_bps` is the node's rate, if it has one.
///
/// The rates that the tenants would have by the node's are divided in proportion to the queue pairs that wait at each worker; with these parts as rate, rates, weights and
/// ceilings, the worker's scheduler gives each tenant its part.
pub(super) fn divide(rate_bps: Option<u64>, demands: &[Demand]) -> (Option<u64>, Vec<Entitlement>) {
    let rate = rate_bps.map(|rate_bps| {
        let all = rates(rate_bps as f64, demands);
        let here: f64 = demands
            .iter()
            .zip(all)
            .map(|(demand, rate)| rate * demand.part())
            .sum();
        // Nothing waits here: what comes first may begin.
        if here < 1.0 { rate_bps } else { here as u64 }
    });
    let weights = weights(demands);
    let entitlements = demands.iter().zip(weights);
    let entitlements = entitlements.map(|(demand, weight)| {
        let part = demand.part();
        // A tenant for which nothing waits here yet is not stopped by a rate of nothing.
        let of_rate = |rate: u64| match part > 0.0 {
            true => (rate as f64 * part) as u64,
            false => rate,
        };
        Entitlement {
            weight,
            rate_bps: of_rate(demand.entitlement.rate_bps),
            ceiling_bps: demand
                .entitlement
                .ceiling_bps
                .map(|ceiling| of_rate(ceiling).max(1)),
            ..demand.entitlement
        }
    });
    (rate, entitlements.collect())
}

/// Returns the rate of each tenant: guaranteed rates first, and the rest by weight, up to the ceilings; by weight alone if the guaranteed rates exceed
/// the rate. The rate of a tenant for which nothing waits is 0.
fn rates(rate: f64, demands: &[Demand]) -> Vec<f64> {
    let waiting = || demands.iter().filter(|demand| demand.all > 0);
    let guaranteed: f64 = waiting().map(|demand| demand.entitlement.rate_bps as f64).sum();
    let at = |level: f64, demand: &Demand| {
        let Entitlement {
            weight,
            rate_bps,
            ceiling_bps,
            ..
        } = demand.entitlement;
        let by_weight = level * f64::from(weight.get());
        let ceiling = ceiling_bps.map_or(f64::INFINITY, |ceiling| ceiling as f64);
        match (demand.all, guaranteed > rate) {
            (0, _) => 0.0,
            (_, true) => by_weight.min(rate_bps as f64),
            (_, false) => (rate_bps as f64 + by_weight).min(ceiling),
        }
    };
    // The level that uses up the rate; at the highest one, ceilings leave some of it.
    let (mut low, mut high) = (0.0, rate);
    for _ in 0..64 {
        let middle = (low + high) / 2.0;
        match demands.iter().map(|demand| at(middle, demand)).sum::<f64>() < rate {
            true => low = middle,
            false => high = middle,
        }
    }
    demands.iter().map(|demand| at(high, demand)).collect()
}

/// Returns weights in the proportion of the tenants' parts.
fn weights(demands: &[Demand]) -> Vec<NonZeroU16> {
    let of = |demand: &Demand| f64::from(demand.entitlement.weight.get()) * demand.part();
    let waiting = demands.iter().map(of).filter(|weight| *weight > 0.0);
    let (least, most) = waiting.fold((f64::INFINITY, 0.0_f64), |(least, most), weight| {
        (least.min(weight), most.max(weight))
    });
    // Finer than the lowest one by 16, as far as the highest one allows.
    let scale = (16.0 / least).min(f64::from(u16::MAX) / most);
    let scaled = demands.iter().map(|demand| (of(demand) * scale).round() as u16);
    scaled
        .map(|weight| NonZeroU16::new(weight).unwrap_or(NonZeroU16::MIN))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(weight: u16, rate_bps: u64, ceiling_bps: Option<u64>, here: u32, all: u32) -> Demand {
        Demand {
            entitlement: Entitlement {
                weight: NonZeroU16::new(weight).unwrap(),
                rate_bps,
                ceiling_bps,
                ..Entitlement::default()
            },
            here,
            all,
        }
    }

    #[test]
    fn divide__in_proportion_to_what_waits() {
        // 1,000 has 300 of its own and a quarter of the rest; it has a third of its queue pairs here, and the other one all.
        let demands = [
            demand(1, 300, None, 1, 3),
            demand(3, 0, None, 2, 2),
            demand(5, 100, None, 0, 0),
        ];
        let (rate, entitlements) = divide(Some(1000), &demands);
        assert_eq!(rate, Some((300 + 175) / 3 + 525));
        assert_eq!(entitlements[0].rate_bps, 100);
        let weights = entitlements.iter().map(|one| one.weight.get());
        assert_eq!(weights.collect::<Vec<_>>(), [16, 144, 240]);
        // Without a rate of the node, the tenants' own are divided.
        let (rate, entitlements) = divide(None, &[demand(1, 300, Some(600), 1, 3)]);
        assert_eq!(
            (rate, entitlements[0].rate_bps, entitlements[0].ceiling_bps),
            (None, 100, Some(200))
        );
    }

    #[test]
    fn divide__ceilings_and_too_many_guarantees() {
        let demands = [demand(9, 0, Some(200), 1, 1), demand(1, 0, None, 0, 1)];
        assert_eq!(divide(Some(1000), &demands).0, Some(200));
        let demands = [demand(1, 900, None, 1, 1), demand(3, 900, None, 0, 1)];
        assert_eq!(divide(Some(1000), &demands).0, Some(250));
    }

    #[test]
    fn divide__where_nothing_waits() {
        let demands = [demand(1, 100, Some(500), 0, 4), demand(1, 0, None, 0, 0)];
        let (rate, entitlements) = divide(Some(1000), &demands);
        assert_eq!(
            (rate, entitlements[0].rate_bps, entitlements[0].ceiling_bps),
            (Some(1000), 100, Some(500))
        );
    }

    /// The parts of all workers are the whole, and each worker's scheduler gives the tenants their parts of it.
    #[test]
    fn divide__random_parts_make_the_whole() {
        for seed in 0..500 {
            let mut random = fastrand_of(seed);
            let tenants = 1 + random(6) as usize;
            let workers = 1 + random(5) as usize;
            let rate = 1_000_000 + random(1_000_000_000);
            let plain: Vec<Demand> = (0..tenants)
                .map(|_| {
                    let guaranteed = random(3) * rate / 8;
                    let ceiling = (random(3) == 0).then(|| guaranteed + random(rate) + 1);
                    demand(1 + random(20) as u16, guaranteed, ceiling, 0, 0)
                })
                .collect();
            let waits: Vec<Vec<u32>> = (0..workers)
                .map(|_| (0..tenants).map(|_| random(4) as u32).collect())
                .collect();
            let at = |worker: &Vec<u32>| -> Vec<Demand> {
                let all = |tenant: usize| waits.iter().map(|worker| worker[tenant]).sum();
                let of = |(tenant, demand): (usize, &Demand)| Demand {
                    here: worker[tenant],
                    all: all(tenant),
                    ..*demand
                };
                plain.iter().enumerate().map(of).collect()
            };
            let whole = rates(rate as f64, &at(&waits[0]));
            let mut sum = vec![0.0; tenants];
            for worker in waits
                .iter()
                .filter(|worker| worker.iter().any(|waits| *waits > 0))
            {
                let (part, entitlements) = divide(Some(rate), &at(worker));
                let own: Vec<Demand> = entitlements
                    .into_iter()
                    .zip(worker)
                    .map(|(entitlement, waits)| Demand {
                        entitlement,
                        here: *waits,
                        all: *waits,
                    })
                    .collect();
                for (sum, rate) in sum.iter_mut().zip(rates(part.unwrap() as f64, &own)) {
                    *sum += rate;
                }
            }
            for (tenant, (sum, whole)) in sum.iter().zip(&whole).enumerate() {
                assert!(
                    (sum - whole).abs() <= whole * 0.04 + rate as f64 * 0.001,
                    "seed {seed}, tenant {tenant}: {sum} of {whole}"
                );
            }
        }
    }

    /// Returns a source of numbers below a limit (xorshift).
    fn fastrand_of(seed: u64) -> impl FnMut(u64) -> u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        move |below| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        }
    }
}
