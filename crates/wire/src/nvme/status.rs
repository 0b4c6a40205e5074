//! Status of a completion. 3.3.3.2.1.

use std::fmt;

/// Status of a completed command: status code in bits 7:0, status code type in bits 10:8, command retry delay in bits 12:11, More in
/// bit 13, Do Not Retry in bit 14.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Status = Status($code);)*
        }

        /// Returns the specification's words for a status code of its type.
        fn text(code: u16) -> Option<&'static str> {
            match code {
                $($code => Some($text),)*
                _ => None,
            }
        }
    };
}

statuses! {
    /// The command is done.
    SUCCESS = 0x000, "success";
    /// The controller does not have the opcode.
    INVALID_OPCODE = 0x001, "invalid opcode";
    /// A field of the command is invalid.
    INVALID_FIELD = 0x002, "invalid field in command";
    /// The command id is that of an outstanding command.
    COMMAND_ID_CONFLICT = 0x003, "command id conflict";
    /// Data or metadata were not transferred.
    DATA_TRANSFER_ERROR = 0x004, "data transfer error";
    /// The controller has failed.
    INTERNAL_ERROR = 0x006, "internal error";
    /// An Abort named the command.
    ABORT_REQUESTED = 0x007, "command abort requested";
    /// Its queue was deleted.
    SQ_DELETED = 0x008, "command aborted due to SQ deletion";
    /// The other command of a fused pair has failed.
    FAILED_FUSED = 0x009, "command aborted due to failed fused command";
    /// The other command of a fused pair did not follow.
    MISSING_FUSED = 0x00a, "command aborted due to missing fused command";
    /// There is no such namespace, or its format does not allow the command.
    INVALID_NAMESPACE = 0x00b, "invalid namespace or format";
    /// The command is not allowed at this time.
    COMMAND_SEQUENCE_ERROR = 0x00c, "command sequence error";
    /// More blocks than the controller writes at once.
    ATOMIC_UNIT_EXCEEDED = 0x014, "atomic write unit exceeded";
    /// A length of the SGL is not what the command needs.
    SGL_LENGTH_INVALID = 0x00f, "data SGL length invalid";
    /// A descriptor of the SGL has a type that the controller does not take.
    SGL_TYPE_INVALID = 0x011, "SGL descriptor type invalid";
    /// The offset of data within the capsule is invalid, or they are too long.
    SGL_OFFSET_INVALID = 0x016, "SGL offset invalid";
    /// The host's id has another format than that of its other controllers.
    HOST_ID_FORMAT = 0x018, "host identifier inconsistent format";
    /// The keep-alive timeout is invalid.
    KEEP_ALIVE_INVALID = 0x01a, "keep alive timeout invalid";
    /// The namespace does not take writes.
    WRITE_PROTECTED = 0x020, "namespace is write protected";
    /// The controller was interrupted: the host tries again.
    INTERRUPTED = 0x021, "command interrupted";
    /// The transport has failed at this command: the host tries again.
    TRANSIENT_TRANSPORT = 0x022, "transient transport error";
    /// Blocks beyond the namespace's end.
    LBA_OUT_OF_RANGE = 0x080, "LBA out of range";
    /// The namespace's medium has no more room.
    CAPACITY_EXCEEDED = 0x081, "capacity exceeded";
    /// The namespace is not ready.
    NAMESPACE_NOT_READY = 0x082, "namespace not ready";
    /// Another host's reservation forbids the command.
    RESERVATION_CONFLICT = 0x083, "reservation conflict";
    /// The namespace is being formatted.
    FORMAT_IN_PROGRESS = 0x084, "format in progress";
    /// Fewer aborts are allowed at a time.
    ABORT_LIMIT = 0x103, "abort command limit exceeded";
    /// Fewer requests for asynchronous events are allowed at a time.
    EVENT_LIMIT = 0x105, "asynchronous event request limit exceeded";
    /// The controller does not have the log page.
    INVALID_LOG = 0x109, "invalid log page";
    /// The format is not supported.
    INVALID_FORMAT = 0x10a, "invalid format";
    /// The feature's value cannot be saved.
    FEATURE_NOT_SAVEABLE = 0x10d, "feature identifier not saveable";
    /// The feature's value cannot be changed.
    FEATURE_NOT_CHANGEABLE = 0x10e, "feature not changeable";
    /// Copy: the namespaces have different blocks.
    COPY_INCOMPATIBLE = 0x185, "incompatible namespace or format";
    /// Copy: it would not be fast, which the host has asked for.
    COPY_NOT_FAST = 0x186, "fast copy not possible";
    /// Copy: source and destination overlap.
    COPY_OVERLAPS = 0x187, "overlapping I/O range";
    /// Connect: the record format is unknown.
    CONNECT_INCOMPATIBLE = 0x180, "connect incompatible format";
    /// Connect: the controller has a host, or there is no further one.
    CONNECT_BUSY = 0x181, "connect controller busy";
    /// Connect: a parameter is invalid; the result names its offset.
    CONNECT_INVALID = 0x182, "connect invalid parameters";
    /// Connect: the host asks the discovery service again.
    CONNECT_RESTART_DISCOVERY = 0x183, "connect restart discovery";
    /// Connect: the subsystem does not allow this host.
    CONNECT_INVALID_HOST = 0x184, "connect invalid host";
    /// The discovery log has changed as it was read.
    DISCOVERY_RESTART = 0x190, "discover restart";
    /// The host has to authenticate itself first.
    AUTHENTICATION_REQUIRED = 0x191, "authentication required";
    /// The medium did not take the data.
    WRITE_FAULT = 0x280, "write fault";
    /// The medium did not give the data.
    READ_ERROR = 0x281, "unrecovered read error";
    /// Compared data are not equal.
    COMPARE_FAILURE = 0x285, "compare failure";
    /// The host has no access to the data.
    ACCESS_DENIED = 0x286, "access denied";
    /// The namespace is lost to this controller for ever.
    ANA_PERSISTENT_LOSS = 0x301, "asymmetric access persistent loss";
    /// Another controller has the namespace.
    ANA_INACCESSIBLE = 0x302, "asymmetric access inaccessible";
    /// The namespace is changing its state.
    ANA_TRANSITION = 0x303, "asymmetric access transition";
    /// The host has given up the command, on its side.
    HOST_ABORTED = 0x371, "command aborted by host";
}

impl Status {
    /// The host must not try the same command again.
    const DNR: u16 = 1 << 14;

    /// Copy: more blocks or ranges than the namespace allows. Connect has another meaning for the number.
    pub const COPY_TOO_LONG: Status = Status(0x183);

    /// Returns the status with Do Not Retry.
    #[must_use]
    pub const fn do_not_retry(self) -> Status {
        Status(self.0 | Status::DNR)
    }

    /// Returns the status of a drive as that of a target which the drive is behind. One about paths means the path to the drive, not the host's.
    #[must_use]
    pub const fn of_drive(self) -> Status {
        const PATH: u16 = 3;
        match (self.code() >> 8, self.is_final()) {
            (PATH, _) => Status::INTERNAL_ERROR,
            (_, true) => Status(self.code()).do_not_retry(),
            (_, false) => Status(self.code()),
        }
    }

    /// Returns true if the host must not try the same command again.
    pub const fn is_final(self) -> bool {
        self.0 & Status::DNR != 0
    }

    /// Returns true if the command is done.
    pub const fn is_success(self) -> bool {
        self.code() == 0
    }

    /// Returns status code type and status code, without the other bits.
    pub const fn code(self) -> u16 {
        self.0 & 0x7ff
    }

    /// Returns true if the codes are equal, whatever the other bits.
    pub const fn is(self, other: Status) -> bool {
        self.code() == other.code()
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status({:#x}: {self})", self.0)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match text(self.code()) {
            Some(text) => f.write_str(text)?,
            None => write!(f, "status {:#x}", self.code())?,
        }
        f.write_str(if self.is_final() { " (do not retry)" } else { "" })
    }
}
