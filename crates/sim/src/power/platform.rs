//! Properties of a server, the ways to durability, and the table of which way holds on which server.

use strum::{IntoStaticStr, VariantArray};

use std::fmt;
use std::str::FromStr;

/// Part of a server that survives a power cut. SNIA NVM Programming Model 1.2, 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// Nothing: DRAM, tmpfs.
    None,
    /// Data synced to a file; writes go to the page cache.
    File,
    /// The memory controller's write pending queue and the media. Caches and I/O buffers are lost.
    Adr,
    /// Caches too: eADR, CXL global persistent flush.
    Eadr,
    /// Every byte that the host accepted: a whole system on battery.
    WholeSystem,
}

/// First destination of what peers write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inbound {
    /// Through I/O buffers to the last level cache: an RNIC, DDIO on. Or to a file's page cache.
    Cache,
    /// Through I/O buffers to the write pending queue: an RNIC, DDIO off.
    Queue,
    /// Placed by a processor with non-temporal stores, or with a write-back behind each store: bytes move to the write pending
    /// queue in any order, until a fence. FLUSHes, READs and atomic operations have one in front.
    Stores,
}

/// A server, as far as durability depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Platform {
    /// Part that survives.
    pub domain: Domain,
    /// First destination of what peers write.
    pub inbound: Inbound,
    /// Set when the RNIC acknowledges a WRITE while its bytes are still inside of it. rdmux places them first.
    pub acks_early: bool,
}

/// Way in which a client makes sure that a WRITE is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Method {
    /// The WRITE's own acknowledgement.
    Write,
    /// A READ behind it on the same QP.
    Read,
    /// FLUSH with placement type global visibility. IBTA Vol 1, A19.
    FlushGlobal,
    /// FLUSH with placement type persistence.
    FlushPersistent,
    /// A message behind it on the same QP, which the server answers after its processor wrote the range back.
    SoftwareFlush,
}

impl Method {
    /// Its name.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Cell of the table: meaning of a method's answer for the bytes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The bytes survive every power cut.
    Durable,
    /// The bytes do not survive some cuts.
    Lost,
    /// The server refuses to give this answer.
    Refused,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Durable => "durable",
            Verdict::Lost => "lost",
            Verdict::Refused => "refused",
        })
    }
}

impl Platform {
    const fn new(domain: Domain, inbound: Inbound, acks_early: bool) -> Platform {
        Platform {
            domain,
            inbound,
            acks_early,
        }
    }

    /// The rows of the table.
    pub const ALL: [Platform; 8] = [
        Platform::new(Domain::None, Inbound::Cache, false),
        Platform::new(Domain::File, Inbound::Cache, false),
        Platform::new(Domain::Adr, Inbound::Cache, false),
        Platform::new(Domain::Adr, Inbound::Queue, false),
        Platform::new(Domain::Adr, Inbound::Stores, false),
        Platform::new(Domain::Eadr, Inbound::Cache, false),
        Platform::new(Domain::WholeSystem, Inbound::Cache, false),
        Platform::new(Domain::WholeSystem, Inbound::Cache, true),
    ];

    /// ADR with DDIO on, the platform on which most goes wrong.
    pub const ADR_CACHED: Platform = Platform::ALL[2];

    /// Its name.
    pub fn name(self) -> &'static str {
        match (self.domain, self.inbound, self.acks_early) {
            (Domain::None, ..) => "none",
            (Domain::File, ..) => "file",
            (Domain::Adr, Inbound::Cache, _) => "adr",
            (Domain::Adr, Inbound::Queue, _) => "adr-direct",
            (Domain::Adr, Inbound::Stores, _) => "adr-stores",
            (Domain::Eadr, ..) => "eadr",
            (Domain::WholeSystem, _, false) => "battery",
            (Domain::WholeSystem, _, true) => "battery-early-ack",
        }
    }

    /// Returns whether written bytes wait in I/O buffers on their way. Bytes that a processor places, or copies to a file, do
    /// not.
    pub fn buffers(self) -> bool {
        self.domain != Domain::File && self.inbound != Inbound::Stores
    }

    /// Returns a cell of the table: whether an answer by this method promises durability here.
    pub fn verdict(self, method: Method) -> Verdict {
        let durable = match method {
            Method::FlushPersistent | Method::SoftwareFlush if self.domain == Domain::None => {
                return Verdict::Refused;
            }
            Method::FlushPersistent | Method::SoftwareFlush => true,
            Method::Read | Method::FlushGlobal => match self.domain {
                Domain::None | Domain::File => false,
                Domain::Adr => self.inbound != Inbound::Cache,
                Domain::Eadr | Domain::WholeSystem => true,
            },
            Method::Write => self.domain == Domain::WholeSystem && !self.acks_early,
        };
        if durable { Verdict::Durable } else { Verdict::Lost }
    }
}

/// Deliberate defect of the server or of what a client relies on, which power cuts must reveal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Defect {
    /// A persistent flush does not write back the cache.
    WriteBackDropped,
    /// A persistent flush writes back the cache before it waits for the I/O buffers.
    WriteBackBeforeDrain,
    /// A flush is answered before the write-back is fenced.
    AckBeforeFence,
    /// A flush leaves out the last line of its range.
    LineShort,
    /// The server acts on a software flush before it is notified of the message's arrival.
    MessageTooEarly,
    /// A revoked mapping's I/O buffers are not drained.
    RevokedUndrained,
    /// A READ has no fence in front, although a processor places the bytes.
    ReadUnfenced,
}

impl Defect {
    /// Returns a platform on which the defect shows.
    pub fn platform(self) -> Platform {
        match self {
            Defect::ReadUnfenced => Platform::ALL[4],
            _ => Platform::ADR_CACHED,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(text: &str) -> Result<Platform, String> {
        crate::named(&Platform::ALL, Platform::name, text)
    }
}

impl FromStr for Method {
    type Err = String;

    fn from_str(text: &str) -> Result<Method, String> {
        crate::named(Method::VARIANTS, Method::name, text)
    }
}

impl FromStr for Defect {
    type Err = String;

    fn from_str(text: &str) -> Result<Defect, String> {
        crate::named(Defect::VARIANTS, Defect::name, text)
    }
}
