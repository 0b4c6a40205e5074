//! What `/proc/self/maps` and `/proc/self/smaps` say of this process's memory: proc(5).

use std::fs::read_to_string;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use rustix::fs::{fstat, major, minor};

/// A mapping of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Vma {
    pub(super) addresses: Range<u64>,
    /// As `rw-p`: the rights, and whether the mapping is private or shared.
    pub(super) rights: [u8; 4],
    /// Offset in the file.
    pub(super) offset: u64,
    pub(super) file: FileId,
    /// Name of the file, or of the kind of memory, such as `[stack]`.
    pub(super) name: String,
    /// The kernel's flags of it, two letters each. Empty unless [`described`] was asked.
    pub(super) flags: Vec<String>,
}

/// A file's device and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: (u32, u32),
    inode: u64,
}

impl FileId {
    /// That of memory without a file.
    pub(super) const NONE: FileId = FileId {
        device: (0, 0),
        inode: 0,
    };

    pub(super) fn of(file: impl AsFd) -> io::Result<FileId> {
        let stat = fstat(file)?;
        Ok(FileId {
            device: (major(stat.st_dev), minor(stat.st_dev)),
            inode: stat.st_ino,
        })
    }
}

/// Returns all mappings, without their flags.
pub(super) fn all() -> io::Result<Vec<Vma>> {
    Ok(read_to_string("/proc/self/maps")?
        .lines()
        .filter_map(parse)
        .collect())
}

/// Returns the mappings that have a part in a range, with their flags, and the number of all mappings. The kernel looks at each page for
/// this answer.
pub(super) fn described(range: &Range<u64>) -> io::Result<(Vec<Vma>, usize)> {
    let (mut found, mut count) = (Vec::new(), 0);
    // The lines of a mapping follow its head.
    let mut current = false;
    for line in read_to_string("/proc/self/smaps")?.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if let Some(vma) = found.last_mut().filter(|_| current) {
                let vma: &mut Vma = vma;
                vma.flags = flags.split_whitespace().map(str::to_owned).collect();
            }
        } else if let Some(vma) = parse(line) {
            count += 1;
            current = vma.addresses.start < range.end && range.start < vma.addresses.end;
            if current {
                found.push(vma);
            }
        }
    }
    Ok((found, count))
}

/// Parses the head of a mapping. Other lines of `smaps` have a colon in their first word.
fn parse(line: &str) -> Option<Vma> {
    let mut words = line.splitn(6, ' ');
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = words.next()?.split_once('-')?;
    let addresses = hex(start)?..hex(end)?;
    let rights = words.next()?.as_bytes().try_into().ok()?;
    let offset = hex(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let device = (
        u32::from_str_radix(major, 16).ok()?,
        u32::from_str_radix(minor, 16).ok()?,
    );
    let inode = words.next()?.parse().ok()?;
    Some(Vma {
        addresses,
        rights,
        offset,
        file: FileId { device, inode },
        name: words.next().unwrap_or_default().trim().to_owned(),
        flags: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::{Mapping, sealed_file};

    #[test]
    fn parse__lines_of_the_kernel() {
        let vma = parse("7f1c2a000000-7f1c2a021000 rw-p 00001000 00:01 1026   /memfd:a b (deleted)").unwrap();
        assert_eq!(vma.addresses, 0x7f1c_2a00_0000..0x7f1c_2a02_1000);
        assert_eq!((&vma.rights, vma.offset), (b"rw-p", 4096));
        assert_eq!(
            vma.file,
            FileId {
                device: (0, 1),
                inode: 1026
            }
        );
        assert_eq!(vma.name, "/memfd:a b (deleted)");
        let anonymous = parse("00400000-00401000 r--s 00000000 00:00 0 ").unwrap();
        assert_eq!((anonymous.file, anonymous.name.as_str()), (FileId::NONE, ""));
        for other in [
            "Size:                  4 kB",
            "VmFlags: rd wr",
            "",
            "12-zz rw-p 0 0:0 0",
        ] {
            assert_eq!(parse(other), None);
        }
    }

    #[test]
    fn all__shows_a_mapping_of_a_file() {
        let file = sealed_file("rdmux-test", 8192).unwrap();
        let mapping = Mapping::of_file(&file, 4096, 4096, true).unwrap();
        let id = FileId::of(&file).unwrap();
        let found: Vec<_> = all().unwrap().into_iter().filter(|vma| vma.file == id).collect();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].addresses, mapping.address()..mapping.address() + 4096);
        assert_eq!((found[0].offset, &found[0].rights), (4096, b"rw-s"));
        let (described, count) = described(&found[0].addresses).unwrap();
        assert_eq!(described.len(), 1);
        assert!(
            described[0].flags.iter().any(|flag| flag == "sh"),
            "{described:?}"
        );
        assert!(count > 5);
    }
}
