//! Check of the idle states of the processors, which delay a wake-up: a message to a process that sleeps waits until an idle CPU has left its
//! state, which may take longer than all the rest.

use std::path::Path;

use serde_json::json;

use super::host::entries;
use super::{Finding, Verdict, number, text};

const CPUIDLE: &str = "sys/devices/system/cpu/cpuidle";
const STATES: &str = "sys/devices/system/cpu/cpu0/cpuidle";
const HALT_POLL_NS: &str = "sys/module/haltpoll/parameters/guest_halt_poll_ns";
/// File that holds the longest latency that somebody has asked for, in us: a number of 32 bits, in binary.
const DMA_LATENCY: &str = "dev/cpu_dma_latency";

/// Latency of an idle state that doubles what a wake-up costs at best.
const LATENCY_US_MAX: u64 = 10;
/// Advice for a processor whose states the system knows.
const HOLD: &str =
    "where latency matters, hold /dev/cpu_dma_latency at 0 (tuned-adm profile latency-performance does)";

/// An idle state that is switched on.
struct State {
    name: String,
    latency_us: u64,
}

/// Checks how long an idle CPU takes to wake up.
pub(super) fn idle(root: &Path) -> Vec<Finding> {
    let trimmed = |file: &str| text(root, file).map(|text| text.trim().to_owned());
    let driver = trimmed(&format!("{CPUIDLE}/current_driver")).filter(|driver| driver != "none");
    let governor = trimmed(&format!("{CPUIDLE}/current_governor"));
    let is_guest = text(root, "proc/cpuinfo").is_some_and(|info| {
        let flags = info.lines().find(|line| line.starts_with("flags"));
        flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
    });
    let held = held_us(root);
    let deepest = states(root).into_iter().max_by_key(|state| state.latency_us);
    let halt_poll_ns = number(root, HALT_POLL_NS);
    let details = json!({
        "driver": driver,
        "governor": governor,
        "deepest": deepest.as_ref().map(|state| &state.name),
        "latency_us": deepest.as_ref().map(|state| state.latency_us),
        "guest_halt_poll_ns": halt_poll_ns,
        "dma_latency_us": held,
    });
    let ok = |what: String| Finding::new("-", Verdict::Ok, what);
    let limit =
        |what: String, advice: &str| Finding::new("-", Verdict::Limit, what).with_advice(advice.to_owned());
    let finding = match (driver.as_deref(), deepest) {
        _ if held.is_some_and(|us| us <= LATENCY_US_MAX) => ok(format!(
            "/dev/cpu_dma_latency is held at {} us: idle CPUs wake up at once",
            held.unwrap_or_default()
        )),
        (Some("haltpoll"), _) => match halt_poll_ns {
            Some(0) => limit(
                "an idle virtual CPU halts at once: a wake-up costs an exit to the host, some 20 us"
                    .to_owned(),
                &format!("echo 200000 >/{HALT_POLL_NS}, or hold /dev/cpu_dma_latency at 0"),
            ),
            ns => ok(format!(
                "an idle virtual CPU polls for up to {} us before it halts",
                ns.unwrap_or_default() / 1_000
            )),
        },
        (None, _) if is_guest => limit(
            "no idle driver in this virtual machine: a wake-up costs an exit to the host, some 20 us"
                .to_owned(),
            "modprobe cpuidle_haltpoll force=1",
        ),
        (Some(_), Some(State { name, latency_us })) if latency_us > LATENCY_US_MAX => limit(
            format!(
                "an idle CPU takes {latency_us} us to leave state {name}: so long waits a message to a process that sleeps"
            ),
            HOLD,
        ),
        _ => ok("idle CPUs wake up at once".to_owned()),
    };
    vec![finding.with_details(details)]
}

/// Returns the latency that somebody has asked for; `None` where this user may not know.
fn held_us(root: &Path) -> Option<u64> {
    let bytes = std::fs::read(root.join(DMA_LATENCY)).ok()?;
    let us = i32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
    u64::try_from(us).ok()
}

/// Returns the idle states of the first CPU that are switched on.
fn states(root: &Path) -> Vec<State> {
    let state = |folder: String| {
        let file = |name: &str| format!("{STATES}/{folder}/{name}");
        if number(root, &file("disable")) == Some(1) {
            return None;
        }
        Some(State {
            name: text(root, &file("name"))?.trim().to_owned(),
            latency_us: number(root, &file("latency"))?,
        })
    };
    entries(root, STATES).into_iter().filter_map(state).collect()
}
