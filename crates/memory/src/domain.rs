//! The persistence domain of a device, as the system reports it.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{fstatfs, major, minor};

use crate::PersistenceDomain;

const TMPFS: i64 = 0x0102_1994;

/// Returns whether a file's bytes are in memory alone, on no device: tmpfs, ramfs, hugetlbfs.
pub(crate) fn is_in_memory(file: impl AsFd) -> io::Result<bool> {
    const RAMFS: i64 = 0x8584_58f6;
    const HUGETLBFS: i64 = 0x9584_58f6;
    Ok([TMPFS, RAMFS, HUGETLBFS].contains(&fstatfs(file)?.f_type))
}

/// Returns whether a file keeps its blocks until somebody truncates it or punches a hole. On ext2 to ext4, XFS, btrfs and tmpfs
/// `st_blocks` counts allocated blocks, and no write lowers it. Elsewhere a write may: ZFS counts blocks after compression, and the server
/// of a network file system or FUSE may count in any way.
pub(crate) fn keeps_its_blocks(file: impl AsFd) -> io::Result<bool> {
    Ok(counts_what_is_allocated(fstatfs(file)?.f_type))
}

/// Returns whether a file system, given by its statfs(2) number, counts allocated blocks.
fn counts_what_is_allocated(file_system: i64) -> bool {
    const EXT: i64 = 0xef53;
    const XFS: i64 = 0x5846_5342;
    const BTRFS: i64 = 0x9123_683e;
    [EXT, XFS, BTRFS, TMPFS].contains(&file_system)
}

/// Returns whether a block device, given by its folder, keeps its bytes in memory alone.
pub(crate) fn is_ram_disk(device: &Path) -> bool {
    let name = device
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    name.starts_with("ram") || name.starts_with("zram")
}

/// Returns the folder of a device in sysfs. `kind` is `block` or `char`.
pub(crate) fn device_folder(kind: &str, number: u64) -> io::Result<PathBuf> {
    let path = format!("/sys/dev/{kind}/{}:{}", major(number), minor(number));
    Path::new(&path).canonicalize()
}

/// Returns the persistence domain that the system reports for a device, given by its folder; `None` if the system reports none, or
/// does not know it. For a device that is made of others, the weakest report holds.
pub(crate) fn domain_of(device: &Path) -> Option<PersistenceDomain> {
    let word = device
        .ancestors()
        .find_map(|folder| fs::read_to_string(folder.join("persistence_domain")).ok());
    if let Some(word) = word {
        // Linux, Documentation/ABI/testing/sysfs-bus-nvdimm.
        return match word.trim() {
            "memory_controller" => Some(PersistenceDomain::Adr),
            "cpu_cache" => Some(PersistenceDomain::Eadr),
            _ => None,
        };
    }
    let below = fs::read_dir(device.join("slaves")).ok()?;
    let mut weakest = None;
    for device in below {
        let domain = domain_of(&device.ok()?.path().canonicalize().ok()?)?;
        weakest = Some(match weakest {
            Some(PersistenceDomain::Adr) => PersistenceDomain::Adr,
            _ => domain,
        });
    }
    weakest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_is_allocated__where_compressing_makes_it_no_less() {
        for kept in [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994] {
            assert!(counts_what_is_allocated(kept), "{kept:#x}");
        }
        // ZFS, overlayfs (of which any other may be the upper), NFS, FUSE, SMB.
        for other in [0x2fc1_2fc1, 0x794c_7630, 0x6969, 0x6573_5546, 0xff53_4d42] {
            assert!(!counts_what_is_allocated(other), "{other:#x}");
        }
    }

    #[test]
    fn domain_of__what_a_region_says_holds_for_what_is_below_it() {
        let root = std::env::temp_dir().join(format!("rdmux-domain-{}", std::process::id()));
        let device = |region: &str, word: &str| {
            let device = root.join(format!("ndbus0/{region}/namespace0.0/block/pmem0"));
            fs::create_dir_all(device.join("slaves")).unwrap();
            fs::write(root.join("ndbus0").join(region).join("persistence_domain"), word).unwrap();
            device
        };
        let adr = device("region0", "memory_controller\n");
        let eadr = device("region1", "cpu_cache\n");
        let unknown = device("region2", "unknown\n");
        assert_eq!(domain_of(&adr), Some(PersistenceDomain::Adr));
        assert_eq!(domain_of(&adr.join("pmem0p1")), Some(PersistenceDomain::Adr));
        assert_eq!(domain_of(&eadr), Some(PersistenceDomain::Eadr));
        assert_eq!(domain_of(&unknown), None);

        // Devices made of others.
        let made_of = |name: &str, parts: &[&PathBuf]| {
            let device = root.join(name);
            fs::create_dir_all(device.join("slaves")).unwrap();
            for (at, part) in parts.iter().enumerate() {
                std::os::unix::fs::symlink(part, device.join(format!("slaves/{at}"))).unwrap();
            }
            domain_of(&device)
        };
        assert_eq!(made_of("dm-0", &[&adr, &eadr]), Some(PersistenceDomain::Adr));
        assert_eq!(made_of("dm-1", &[&eadr, &adr]), Some(PersistenceDomain::Adr));
        assert_eq!(made_of("dm-2", &[&eadr, &eadr]), Some(PersistenceDomain::Eadr));
        assert_eq!(made_of("dm-3", &[&adr, &unknown]), None);
        assert_eq!(made_of("sda", &[]), None);
        fs::remove_dir_all(&root).unwrap();
    }
}
