//! `rdmux doctor dsm`: the ways by which faults of a shared memory can be answered on this host.

use std::path::Path;

use rdmux_dsm::FaultMode;
use rdmux_dsm::memory::Error;
use rdmux_dsm::memory::userfault::{Abilities, Catches, Route};
use serde_json::json;
use strum::VariantArray;

use super::{Finding, Verdict, number};

const DEVICE: &str = "dev/userfaultfd";
const SETTING: &str = "proc/sys/vm/unprivileged_userfaultfd";

/// Reports each mode of faults, and what would allow more.
pub(super) fn dsm(root: &Path) -> Vec<Finding> {
    let abilities = abilities(root);
    let best = FaultMode::best(&abilities);
    let finding = |mode: &FaultMode| {
        let finding = of_mode(root, *mode, &abilities, best);
        finding.with_details(json!({
            "is_default": *mode == best,
            "is_allowed": mode.engine(&abilities).is_ok(),
            "route": abilities.route.map(|route| match route {
                Route::Call => "userfaultfd(2)",
                Route::Device => "/dev/userfaultfd",
            }),
            "system_calls": abilities.catches == Some(Catches::All),
            "minor_and_write_protect": abilities.files,
            "install_for_reading": abilities.install_for_reading,
            "sigbus": abilities.signal,
            "poison": abilities.poison,
            "record": abilities.record,
            "unprivileged_userfaultfd": number(root, SETTING),
        }))
    };
    FaultMode::VARIANTS.iter().map(finding).collect()
}

fn of_mode(root: &Path, mode: FaultMode, abilities: &Abilities, best: FaultMode) -> Finding {
    let catches_all = abilities.catches == Some(Catches::All);
    let refused = mode.engine(abilities).err();
    let is_limit = refused.is_some() || mode == FaultMode::Thread && !catches_all;
    let mut what = match (mode, &refused) {
        (_, Some(Error::NotPermitted)) => "not allowed: this user may not use userfaultfd(2)".to_owned(),
        (_, Some(error)) => error.to_string(),
        (FaultMode::Thread, None) if catches_all => {
            "a service thread answers faults, and those of system calls".to_owned()
        }
        (FaultMode::Thread, None) => {
            "a service thread answers faults; system calls on pages that are away fail with EFAULT".to_owned()
        }
        (FaultMode::Inline, None) => "the thread that faults answers it, in a handler of SIGBUS".to_owned(),
        (FaultMode::Mprotect, None) => {
            "the thread that faults answers it by mprotect(2), in a handler of SIGSEGV".to_owned()
        }
    };
    if refused.is_none() && mode != FaultMode::Mprotect && abilities.route == Some(Route::Device) {
        what += ", through /dev/userfaultfd";
    }
    if mode == FaultMode::Mprotect
        && let Some(ranges) = number(root, "proc/sys/vm/max_map_count")
    {
        what += &format!("; up to {ranges} ranges of equal rights (vm.max_map_count)");
    }
    if mode == best {
        what += "; used without --faults";
    }
    match is_limit {
        true => {
            let finding = Finding::new(&mode.to_string(), Verdict::Limit, what);
            finding.with_advice(advice(root, refused.as_ref()))
        }
        false => Finding::new(&mode.to_string(), Verdict::Ok, what),
    }
}

/// Returns what would allow a mode, or let it catch all faults.
fn advice(root: &Path, refused: Option<&Error>) -> String {
    if let Some(Error::Lacks(_)) = refused {
        return "start a newer kernel".to_owned();
    }
    let mut text = "as root: sysctl -w vm.unprivileged_userfaultfd=1".to_owned();
    if root.join(DEVICE).exists() {
        text +=
            ", or chmod 0666 /dev/userfaultfd (for good: a udev rule KERNEL==\"userfaultfd\", MODE=\"0666\")";
    }
    if refused.is_some() {
        text += "; in a container, allow userfaultfd in its seccomp profile";
    }
    text
}

/// Returns what the library itself goes by; of another host's files, what their setting tells.
fn abilities(root: &Path) -> Abilities {
    if root == Path::new("/") {
        return Abilities::probe();
    }
    let catches = match number(root, SETTING) {
        None => return Abilities::default(),
        Some(0) => Catches::Threads,
        Some(_) => Catches::All,
    };
    Abilities {
        catches: Some(catches),
        route: Some(Route::Call),
        files: true,
        install_for_reading: true,
        signal: true,
        poison: true,
        record: true,
    }
}
