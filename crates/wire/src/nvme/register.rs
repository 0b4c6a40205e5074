//! The registers of a controller that a host reads and writes as properties. 3.1.3.

/// A register, by its offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Register(pub u32);

impl Register {
    /// Controller Capabilities, 8 bytes.
    pub const CAPABILITIES: Register = Register(0x00);
    /// Version, 4 bytes.
    pub const VERSION: Register = Register(0x08);
    /// Controller Configuration, 4 bytes.
    pub const CONFIGURATION: Register = Register(0x14);
    /// Controller Status, 4 bytes.
    pub const STATUS: Register = Register(0x1c);
    /// Controller Ready Timeouts, 4 bytes.
    pub const READY_TIMEOUTS: Register = Register(0x68);
}

/// Version 1.4 of the specification, as register and Identify have it.
pub const VERSION_1_4: u32 = 0x1_0400;
/// Version 2.0.
pub const VERSION_2_0: u32 = 0x2_0000;

/// Controller Capabilities. 3.1.3.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Maximum number of entries of a queue, 2 to 65,536.
    pub queue_entries: u32,
    /// Longest time to become ready, in 500 ms.
    pub timeout: u8,
}

impl Capabilities {
    const CONTIGUOUS: u64 = 1 << 16;
    const NVM_COMMAND_SET: u64 = 1 << 37;
    /// Hosts may enable all command sets (CSS 6), and find out which there are.
    const ALL_COMMAND_SETS: u64 = 1 << 43;
    /// The controller is ready with its media (CRMS), in the time of [`Register::READY_TIMEOUTS`].
    const READY_WITH_MEDIA: u64 = 1 << 59;

    /// Returns the register: contiguous queues, the NVM command set, pages of 4 KiB, ready with its media.
    pub const fn register(&self) -> u64 {
        (self.queue_entries as u64 - 1) & 0xffff
            | Capabilities::CONTIGUOUS
            | (self.timeout as u64) << 24
            | Capabilities::NVM_COMMAND_SET
            | Capabilities::ALL_COMMAND_SETS
            | Capabilities::READY_WITH_MEDIA
    }

    /// Reads the register.
    pub const fn parse(register: u64) -> Capabilities {
        Capabilities {
            queue_entries: (register & 0xffff) as u32 + 1,
            timeout: (register >> 24) as u8,
        }
    }
}

/// Controller Configuration. 3.1.3.5.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Configuration(pub u32);

impl Configuration {
    /// Returns the value that enables a controller for the NVM command set.
    pub const fn enabled() -> Configuration {
        // Entries of 2^6 and 2^4 bytes.
        Configuration(1 | 6 << 16 | 4 << 20)
    }

    /// Returns true if the controller is to run.
    pub const fn is_enabled(self) -> bool {
        self.0 & 1 != 0
    }

    /// Returns true if the host announces that it shuts the controller down.
    pub const fn is_shutting_down(self) -> bool {
        self.0 >> 14 & 3 != 0
    }

    /// Returns true if a controller for the NVM command set with pages of 4 KiB can run so: entries of 64 and 16 bytes, round robin.
    pub const fn is_supported(self) -> bool {
        let (css, mps, ams) = (self.0 >> 4 & 7, self.0 >> 7 & 0xf, self.0 >> 11 & 7);
        let (iosqes, iocqes) = (self.0 >> 16 & 0xf, self.0 >> 20 & 0xf);
        (css == 0 || css == 6) && mps == 0 && ams == 0 && iosqes == 6 && iocqes == 4
    }
}
