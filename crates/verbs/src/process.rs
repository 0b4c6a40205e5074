//! Options of all devices that this process opens: for programs whose user decides, and for those whose devices are opened
//! elsewhere.

use std::path::{Path, PathBuf};

use rdmux_rnic::faults::{Spec, SpecError};
use rdmux_rnic::sync::Mutex;

use crate::moderation::{ModerationPolicy, UnknownPolicy};

/// Faults of the devices that this process opens, unless their options specify others.
static FAULTS: Mutex<Option<Spec>> = Mutex::new(None);

/// File that the devices of this process are captured to.
static CAPTURE: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Makes the devices that this process opens from now on misbehave as `spec` says, unless [`Options::faults`](crate::Options::faults) says
/// otherwise: for programs whose devices are opened elsewhere. It takes precedence over the environment variable `RDMUX_FAULT`.
pub fn set_process_faults(spec: Spec) {
    *FAULTS.lock() = Some(spec);
}

/// Returns the faults that this process or its environment asks for.
pub fn faults() -> Result<Option<Spec>, SpecError> {
    if let Some(spec) = *FAULTS.lock() {
        return Ok(Some(spec));
    }
    match std::env::var_os("RDMUX_FAULT") {
        Some(text) if !text.is_empty() => text.to_string_lossy().parse().map(Some),
        _ => Ok(None),
    }
}

/// Returns the moderation that the environment asks for.
pub(crate) fn moderation() -> Result<Option<ModerationPolicy>, UnknownPolicy> {
    match std::env::var_os("RDMUX_MODERATION") {
        Some(text) if !text.is_empty() => text.to_string_lossy().parse().map(Some),
        _ => Ok(None),
    }
}

/// Captures all devices that this process opens from now on to this one file; `%p` in its name stands for the process ID. It takes
/// precedence over the environment variable `RDMUX_CAPTURE`.
pub fn set_process_capture(file: &Path) {
    *CAPTURE.lock() = Some(file.into());
}

/// Returns the file that this process or its environment names for captures of its devices.
pub fn capture_file() -> Option<PathBuf> {
    let set = CAPTURE.lock().clone();
    set.or_else(|| {
        let named = std::env::var_os("RDMUX_CAPTURE").filter(|name| !name.is_empty());
        named.map(PathBuf::from)
    })
}

/// Counts of the faults injected into a device's packets since it was opened, for both directions together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// All packets.
    pub packets: u64,
    /// Lost: at random, at a port that was down, or in a full queue.
    pub lost: u64,
    /// Damaged.
    pub corrupted: u64,
    /// Duplicated.
    pub duplicated: u64,
    /// Held back to be overtaken.
    pub reordered: u64,
    /// Queue pairs put in error.
    pub qp_errors: u64,
}
