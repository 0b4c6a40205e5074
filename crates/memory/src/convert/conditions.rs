//! When memory of the program may move into a file, and when not.

use std::ffi::OsStr;
use std::fs::{read_dir, read_link, read_to_string};
use std::io;
use std::ops::Range;
use std::path::Path;

use rdmux_rnic::NotShared;
use rdmux_verbs::thread::{ProgramThreads, program_threads};

use super::Mode;
use super::maps::{self, FileId, Vma};
use super::userfault::{Catches, Userfault};

/// Most mappings that a process may have for its memory to be converted: Linux gives it 65,530 by default, and each conversion may divide
/// one into three.
const MAPPINGS_MAX: usize = 20_000;

/// The kernel's flags of ordinary private memory: proc(5), `VmFlags`. `sd` and `ac` are the kernel's own accounts.
const PLAIN: [&str; 7] = ["rd", "wr", "mr", "mw", "me", "sd", "ac"];

/// Advice of the program that new pages in the same place get too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Advised {
    /// `MADV_DONTFORK`.
    pub(super) dont_fork: bool,
    /// `MADV_DONTDUMP`.
    pub(super) dont_dump: bool,
    /// `MADV_HUGEPAGE`.
    pub(super) huge: bool,
    /// `MADV_NOHUGEPAGE`.
    pub(super) not_huge: bool,
    /// `MAP_NORESERVE`.
    pub(super) no_reserve: bool,
}

/// How the program's threads are kept from pages that move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guard {
    /// There is none but this one.
    Alone,
    /// Those that touch the pages wait.
    Faults(Catches),
}

impl Guard {
    /// Returns how the program's threads are kept away, if they can be; `None` if only the program's only thread can move pages.
    pub(super) fn choose(mode: Mode) -> Result<Option<Guard>, NotShared> {
        let threads = program_threads();
        if threads == ProgramThreads::This {
            return Ok(Some(Guard::Alone));
        }
        let Err(error) = Userfault::new(Catches::All) else {
            return Ok(Some(Guard::Faults(Catches::All)));
        };
        if mode == Mode::User {
            let permitted = Userfault::new(Catches::Threads).map_err(|_| NotShared::Userfaultfd);
            return permitted.map(|_| Some(Guard::Faults(Catches::Threads)));
        }
        match threads {
            ProgramThreads::Another => Ok(None),
            _ if error.kind() == io::ErrorKind::PermissionDenied => Err(NotShared::Threads),
            _ => Err(NotShared::Userfaultfd),
        }
    }
}

/// Checks what is mapped in a range: private memory without a file, to be read and written, all of it with the same advice.
pub(super) fn check_pages(range: &Range<u64>) -> Result<Advised, NotShared> {
    let (vmas, count) = maps::described(range).map_err(|_| NotShared::Unknown)?;
    if count > MAPPINGS_MAX {
        return Err(NotShared::ManyMappings);
    }
    check_cover(range, &vmas)?;
    let mut all = None;
    for vma in vmas {
        let mut advised = Advised::default();
        for flag in &vma.flags {
            match flag.as_str() {
                "dc" => advised.dont_fork = true,
                "dd" => advised.dont_dump = true,
                "hg" => advised.huge = true,
                "nh" => advised.not_huge = true,
                "nr" => advised.no_reserve = true,
                "gd" => return Err(NotShared::NotPrivate),
                flag if PLAIN.contains(&flag) => {}
                _ => return Err(NotShared::Special),
            }
        }
        if all.is_some_and(|all| all != advised) {
            return Err(NotShared::Special);
        }
        all = Some(advised);
    }
    all.ok_or(NotShared::NotPrivate)
}

/// Checks as [`check_pages`] does, at less cost, but for what only the kernel's flags say.
pub(super) fn check_place(range: &Range<u64>) -> Result<(), NotShared> {
    let vmas = maps::all().map_err(|_| NotShared::Unknown)?;
    let inside = vmas
        .into_iter()
        .filter(|vma| super::overlap(&vma.addresses, range));
    check_cover(range, &inside.collect::<Vec<_>>())
}

/// Checks that mappings are private memory without a file, to be read and written, and that there is one for each address of a range.
fn check_cover(range: &Range<u64>, vmas: &[Vma]) -> Result<(), NotShared> {
    let mut at = range.start;
    for vma in vmas {
        let is_plain = vma.rights == *b"rw-p" && vma.file == FileId::NONE && !vma.name.starts_with("[stack");
        if vma.addresses.start > at || !is_plain {
            return Err(NotShared::NotPrivate);
        }
        at = vma.addresses.end;
    }
    if at < range.end {
        return Err(NotShared::NotPrivate);
    }
    Ok(())
}

/// Checks that nothing in this process holds on to pages by other means than their addresses, as far as can be seen: rings of requests,
/// requests that bypass the page cache, and devices may have pinned them.
pub(super) fn check_process() -> Result<(), NotShared> {
    let unknown = |_: io::Error| NotShared::Unknown;
    for entry in read_dir("/proc/self/fd").map_err(unknown)? {
        let entry = entry.map_err(unknown)?;
        // A descriptor that is closed meanwhile holds nothing.
        let Ok(target) = read_link(entry.path()) else {
            continue;
        };
        if let Some(reason) = holds_pages(&target, || flags_of(&entry.file_name())) {
            return Err(reason);
        }
    }
    // An io_context of libaio(7) shows as a mapping.
    let vmas = maps::all().map_err(unknown)?;
    if vmas.iter().any(|vma| vma.name.starts_with("/[aio]")) {
        return Err(NotShared::AsyncIo);
    }
    Ok(())
}

/// Returns why what a descriptor stands for may hold on to pages.
fn holds_pages(target: &Path, flags: impl FnOnce() -> Option<u32>) -> Option<NotShared> {
    /// Devices that copy, and do so before a call returns.
    const COPY: [&str; 8] = [
        "null", "zero", "full", "random", "urandom", "ptmx", "console", "kmsg",
    ];
    let target = target.to_str()?;
    if target == "anon_inode:[io_uring]" {
        return Some(NotShared::IoUring);
    }
    if !target.starts_with('/') || target.starts_with("/memfd:") {
        return None;
    }
    match target.strip_prefix("/dev/") {
        Some(device) if COPY.contains(&device) || device.starts_with("tty") || device.starts_with("pts/") => {
            None
        }
        Some(device) if !device.starts_with("shm/") => Some(NotShared::Device),
        _ => flags()
            .is_some_and(|flags| flags & libc::O_DIRECT.cast_unsigned() != 0)
            .then_some(NotShared::DirectIo),
    }
}

/// Returns the flags with which a descriptor of this process is open.
fn flags_of(number: &OsStr) -> Option<u32> {
    let info = read_to_string(Path::new("/proc/self/fdinfo").join(number)).ok()?;
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
    u32::from_str_radix(flags.trim(), 8).ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn holds_pages__by_what_a_descriptor_stands_for() {
        let direct = Some(libc::O_DIRECT.cast_unsigned());
        for (target, flags, expected) in [
            ("anon_inode:[io_uring]", None, Some(NotShared::IoUring)),
            ("anon_inode:[eventpoll]", None, None),
            ("socket:[77]", None, None),
            ("/dev/pts/3", None, None),
            ("/dev/null", direct, None),
            ("/dev/shm/posix", Some(0), None),
            ("/dev/infiniband/uverbs0", None, Some(NotShared::Device)),
            ("/dev/vfio/vfio", None, Some(NotShared::Device)),
            ("/srv/data", direct, Some(NotShared::DirectIo)),
            ("/srv/data", Some(2), None),
            ("/memfd:rdmux-mr (deleted)", direct, None),
        ] {
            assert_eq!(holds_pages(Path::new(target), || flags), expected, "{target}");
        }
    }

    #[test]
    fn check_process__a_file_open_for_direct_io() {
        use std::os::unix::fs::OpenOptionsExt;
        let file = std::env::current_exe().unwrap();
        // A file system may refuse direct I/O.
        let opened = File::options().read(true).custom_flags(libc::O_DIRECT).open(file);
        if let Ok(_file) = opened {
            assert_eq!(check_process(), Err(NotShared::DirectIo));
        }
    }
}
