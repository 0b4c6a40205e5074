//! The cost and the fairness of sharing: queue pairs and devices with several users, S1 to S15. docs/sharing-benchmarks.md has the results.
//!
//! Each has a suite of its own. Hosts are addresses of this machine ([`hosts`]), the users are programs of [`super::load`].

mod cost;
mod crowds;
mod hosts;
mod isolation;
mod latency;
mod mice;
#[cfg(test)]
mod tests;
mod threads;

use self::hosts::{Carrier, Placement};
use super::plot::{File, draw};
use super::table::{Suite, Table};

/// The link of measurements in which the link is what is shared: slow enough that the CPUs are not.
const LINK: Carrier = Carrier::Link { mbit: 1000 };

const OWN: &str = "engines of their own";
const NODES: &str = "nodes";
const SHARED: &str = "nodes, --share";
const ROWS: [(&str, Placement); 3] = [
    (OWN, Placement::Own),
    (NODES, Placement::Nodes),
    (SHARED, Placement::Shared),
];

/// Returns all parts; `gigabytes` is what S8 transfers.
pub(super) fn suites(gigabytes: u32) -> Vec<Suite> {
    let mut suites = vec![threads::suite(), crowds::connections(), crowds::applications()];
    suites.extend(crowds::clusters());
    suites.extend([
        mice::suite(),
        latency::suite(),
        cost::waiting(gigabytes),
        isolation::matrix(),
        isolation::kills(),
        isolation::unequal(),
        cost::one_cpu(),
    ]);
    suites
}

/// Draws a part; returns the name and the contents of the file.
pub(super) fn plots(suite: &Suite) -> Vec<File> {
    let tables: Vec<&Table> = suite.tables.iter().collect();
    let title = "medians; docs/sharing-benchmarks.md has the conditions";
    vec![(format!("share-{}.svg", suite.key), draw(title, &tables))]
}

/// Returns Jain's index of rates: 1 if all are equal, 1/n if one has all.
fn jain(rates: &[f64]) -> f64 {
    let sum: f64 = rates.iter().sum();
    let squares: f64 = rates.iter().map(|rate| rate * rate).sum();
    if squares == 0.0 {
        return 0.0;
    }
    sum * sum / (rates.len() as f64 * squares)
}
