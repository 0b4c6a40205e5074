//! NVMe drives that a target could drive itself.

use std::path::Path;

use rdmux_drive::{Found, Listed, Offer};
use serde_json::{Value, json};

use super::{Finding, Verdict};
use crate::output;

/// Says what each NVMe drive offers, and what is missing to drive it from user space.
pub(super) fn drives(root: &Path) -> Vec<Finding> {
    let drives = rdmux_drive::list(root);
    if drives.is_empty() {
        return vec![Finding::new("-", Verdict::Ok, "no NVMe drive".to_owned())];
    }
    drives.iter().map(finding).collect()
}

fn finding(drive: &Listed) -> Finding {
    let address = drive.address.to_string();
    let has_it = match (&drive.driver, &drive.devices[..]) {
        (None, _) => "no driver has it".to_owned(),
        (Some(driver), []) => format!("{driver} has it"),
        (Some(driver), devices) => format!("{driver} has it, as {}", devices.join(", ")),
    };
    let used = drive.in_use.as_ref().map(|used| format!("; {used}"));
    let memory = match &drive.memory {
        None => "its memory is known only while a program drives it".to_owned(),
        Some(offer) => offered(offer),
    };
    let what = format!("{has_it}{}; {memory}", used.unwrap_or_default());
    let place = match drive.driver.as_deref() {
        None | Some("vfio-pci") => format!("rdmux nvme target --ns pcie:{address}"),
        Some(_) => format!("rdmux nvme target --ns pcie:{address},unbind"),
    };
    let needs = match drive.driver.as_deref() {
        Some("vfio-pci") => "the right to open its file in /dev/vfio, and memlock of 8 MiB",
        _ if drive.iommu => "root and the module vfio-pci, for the IOMMU before it",
        _ => "root",
    };
    let finding = Finding::new(&address, Verdict::Ok, what).with_details(json!({
        "driver": drive.driver,
        "devices": drive.devices,
        "in_use": drive.in_use,
        "iommu": drive.iommu,
        "memory": drive.memory.as_ref().map(to_json),
    }));
    match drive.in_use {
        Some(_) => finding,
        None => finding.with_advice(format!("to drive it: {place}; needs {needs}")),
    }
}

fn offered(offer: &Offer) -> String {
    let cmb = match &offer.cmb {
        Found::Unknown => "perhaps a CMB".to_owned(),
        Found::None => "no CMB".to_owned(),
        Found::Hidden => "a CMB, whose size it tells once it is driven".to_owned(),
        Found::Known(cmb) => format!(
            "a CMB of {} for {}",
            output::bytes(cmb.bytes),
            uses(cmb.reads, cmb.writes, cmb.submission_queues)
        ),
    };
    let pmr = match &offer.pmr {
        Found::Unknown | Found::Hidden => "perhaps a PMR".to_owned(),
        Found::None => "no PMR".to_owned(),
        Found::Known((pmr, bytes)) => format!(
            "a PMR of {} for {}",
            output::bytes(*bytes),
            uses(pmr.reads, pmr.writes, false)
        ),
    };
    format!("{cmb}, {pmr}")
}

/// Names what memory of a drive takes: data of reads (RDS), of writes (WDS), and submission queues (SQS).
fn uses(reads: bool, writes: bool, queues: bool) -> String {
    let uses = [(reads, "reads"), (writes, "writes"), (queues, "queues")];
    let named: Vec<&str> = uses
        .into_iter()
        .filter(|(takes, _)| *takes)
        .map(|(_, name)| name)
        .collect();
    match named[..] {
        [] => "nothing".to_owned(),
        _ => named.join(", "),
    }
}

fn to_json(offer: &Offer) -> Value {
    let cmb = match &offer.cmb {
        Found::None | Found::Unknown => Value::Null,
        Found::Hidden => json!({}),
        Found::Known(cmb) => json!({
            "bytes": cmb.bytes,
            "reads": cmb.reads,
            "writes": cmb.writes,
            "queues": cmb.submission_queues,
        }),
    };
    let pmr = match &offer.pmr {
        Found::Known((pmr, bytes)) => json!({ "bytes": bytes, "reads": pmr.reads, "writes": pmr.writes }),
        Found::None | Found::Unknown | Found::Hidden => Value::Null,
    };
    json!({ "cmb": cmb, "pmr": pmr })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn drives__say_who_has_them_and_what_is_missing() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        let folder = "sys/bus/pci/devices/0000:3b:00.0";
        for path in [
            &format!("{folder}/nvme/nvme0/nvme0n1"),
            "sys/class/block/nvme0n1/holders",
            "drivers/nvme",
        ] {
            fs::create_dir_all(at(path)).unwrap();
        }
        fs::write(at(&format!("{folder}/class")), "0x010802\n").unwrap();
        let other = at("sys/bus/pci/devices/0000:00:1f.0");
        fs::create_dir_all(&other).unwrap();
        fs::write(other.join("class"), "0x060100\n").unwrap();

        let [free] = &drives(root.path())[..] else {
            panic!("one drive")
        };
        assert_eq!(free.subject, "0000:3b:00.0");
        assert!(free.what.contains("no driver has it"), "{}", free.what);
        let advice = free.advice.as_deref().unwrap();
        assert!(advice.contains("--ns pcie:0000:3b:00.0;"), "{advice}");

        std::os::unix::fs::symlink(at("drivers/nvme"), at(&format!("{folder}/driver"))).unwrap();
        fs::create_dir(at(&format!("{folder}/iommu_group"))).unwrap();
        let [bound] = &drives(root.path())[..] else {
            panic!("one drive")
        };
        assert!(bound.what.contains("nvme has it, as nvme0n1"), "{}", bound.what);
        let advice = bound.advice.as_deref().unwrap();
        assert!(
            advice.contains(",unbind; needs root and the module vfio-pci"),
            "{advice}"
        );

        let controller = at(&format!("{folder}/nvme/nvme0"));
        fs::write(controller.join("cmbloc"), format!("{}\n", 0x62)).unwrap();
        fs::write(controller.join("cmbsz"), format!("{}\n", 0x1021d)).unwrap();
        fs::write(at("sys/class/block/nvme0n1/dev"), "259:0\n").unwrap();
        fs::create_dir_all(at("proc/self")).unwrap();
        fs::write(
            at("proc/self/mountinfo"),
            "29 1 259:0 / /srv rw - ext4 /dev/nvme0n1 rw\n",
        )
        .unwrap();
        let [used] = &drives(root.path())[..] else {
            panic!("one drive")
        };
        assert!(
            used.what.contains("/dev/nvme0n1 is mounted at /srv"),
            "{}",
            used.what
        );
        let memory = "a CMB of 16 MiB for reads, writes, queues, perhaps a PMR";
        assert!(used.what.ends_with(memory), "{}", used.what);
        assert_eq!(used.advice, None);
    }
}
