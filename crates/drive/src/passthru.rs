//! Commands by the kernel's NVMe driver. Linux, include/uapi/linux/nvme_ioctl.h.
#![allow(unsafe_code, reason = "a command is an ioctl with pointers")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use rdmux_wire::nvme::{Sqe, Status};

/// `struct nvme_passthru_cmd64`.
#[repr(C)]
#[derive(Default)]
struct Command {
    opcode: u8,
    flags: u8,
    reserved1: u16,
    nsid: u32,
    dwords_2_3: [u32; 2],
    metadata: u64,
    address: u64,
    metadata_len: u32,
    data_len: u32,
    dwords_10_15: [u32; 6],
    timeout_ms: u32,
    reserved2: u32,
    result: u64,
}

/// Returns the number of a request that reads and writes a [`Command`]: `_IOWR('N', number, struct nvme_passthru_cmd64)`.
const fn request(number: libc::c_ulong) -> libc::c_ulong {
    3 << 30 | (size_of::<Command>() as libc::c_ulong) << 16 | (b'N' as libc::c_ulong) << 8 | number
}

/// Queue of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// That of the controller's own commands, by the file of a controller.
    Admin,
    /// One of those of a namespace, by the file of the namespace.
    Io,
}

/// Has the kernel's driver carry out a command, and waits for its end. Opcode, namespace and dwords are those of `sqe`; `data` are read or written, as the
/// opcode says. Returns the status and the result.
///
/// # Errors
/// The kernel refuses the command, has given it up, or has lost the drive.
pub(crate) fn submit(
    file: &File,
    queue: Queue,
    sqe: &Sqe,
    data: &mut [u8],
    timeout: Duration,
) -> io::Result<(Status, u64)> {
    let mut command = Command {
        opcode: sqe.opcode().0,
        nsid: sqe.nsid().0,
        dwords_2_3: [sqe.dword(2), sqe.dword(3)],
        address: match data.len() {
            0 => 0,
            _ => data.as_mut_ptr().expose_provenance() as u64,
        },
        data_len: u32::try_from(data.len()).map_err(io::Error::other)?,
        dwords_10_15: std::array::from_fn(|at| sqe.dword(10 + at)),
        timeout_ms: u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX),
        ..Command::default()
    };
    let request = request(match queue {
        Queue::Admin => 0x47,
        Queue::Io => 0x48,
    });
    // SAFETY: the argument of both requests is a pointer to a value of this layout, which lives during the call. By it the driver reads or writes the
    // `data_len` bytes at `address`, which are borrowed for this call alone; it returns once the command has ended and the pages are released. A file
    // of another kind does not know the numbers, whose bits say the size of the value, and refuses them.
    let status = unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut command) };
    match u16::try_from(status) {
        Ok(status) => Ok((Status(status), command.result)),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use rdmux_wire::nvme::{Cid, NsId, Opcode};

    use super::*;

    #[test]
    fn request__has_the_numbers_of_the_kernel() {
        assert_eq!(request(0x47), 0xc050_4e47, "NVME_IOCTL_ADMIN64_CMD");
        assert_eq!(request(0x48), 0xc050_4e48, "NVME_IOCTL_IO64_CMD");
    }

    #[test]
    fn submit__is_refused_by_a_file_of_another_kind() {
        let file = tempfile::tempfile().unwrap();
        let sqe = Sqe::new(Opcode::IDENTIFY, Cid(0), NsId::NONE);
        let submitted = submit(&file, Queue::Admin, &sqe, &mut [0; 4096], Duration::from_secs(1));
        assert_eq!(submitted.unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    }
}
