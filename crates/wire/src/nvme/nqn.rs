//! NVMe qualified names. 4.5.

use std::fmt;

use crate::Malformed;

/// Name of the discovery service. 3.1.2.3.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// NVMe qualified name of a host or subsystem: 1 to 223 bytes of UTF-8 without control characters, so that a terminal can show it unchanged.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nqn(Box<str>);

impl Nqn {
    /// Maximum length in bytes.
    pub const LEN_MAX: usize = 223;
    /// Bytes of the field that holds a name and zeros.
    pub const FIELD_LEN: usize = 256;

    /// Returns the name if its length and characters are valid.
    pub fn new(nqn: &str) -> Option<Nqn> {
        let fits = (1..=Nqn::LEN_MAX).contains(&nqn.len()) && !nqn.chars().any(char::is_control);
        fits.then(|| Nqn(nqn.into()))
    }

    /// Reads a field: a name, and zeros behind it.
    ///
    /// # Errors
    /// It holds no valid name.
    ///
    /// # Panics
    /// The field is shorter than [`Nqn::FIELD_LEN`].
    pub fn parse(what: &'static str, field: &[u8]) -> Result<Nqn, Malformed> {
        let field = &field[..Nqn::FIELD_LEN];
        let len = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
        let name = std::str::from_utf8(&field[..len]).ok().and_then(Nqn::new);
        name.ok_or(Malformed::Undefined {
            what,
            value: len as u64,
        })
    }

    /// Writes a field of [`Nqn::FIELD_LEN`] bytes.
    pub fn emit(&self, field: &mut [u8]) {
        field[..Nqn::FIELD_LEN].fill(0);
        field[..self.0.len()].copy_from_slice(self.0.as_bytes());
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}
