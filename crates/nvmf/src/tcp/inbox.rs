//! Bytes that a connection has received and not looked at: headers and digests, and data that do not go straight into their buffers.

use crc_fast::Digest;
use rdmux_wire::nvme_tcp::{COMMON_LEN, Common, DIGEST_LEN, Digests, Fatal, Header, PduType};

use super::new_digest;

/// Received bytes.
#[derive(Debug)]
pub(crate) struct Inbox {
    bytes: Box<[u8]>,
    /// Those that wait: `bytes[at..end]`.
    at: usize,
    end: usize,
}

impl Inbox {
    /// Makes one for so many bytes, at least those of the longest header.
    pub(crate) fn new(bytes: usize) -> Inbox {
        Inbox {
            bytes: vec![0; bytes].into_boxed_slice(),
            at: 0,
            end: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// Returns the number of bytes that wait.
    pub(crate) fn len(&self) -> usize {
        self.end - self.at
    }

    /// Returns the place for the next bytes. It is not empty where all that can be looked at was.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        if self.at > 0 {
            // A part of a header is left.
            self.bytes.copy_within(self.at..self.end, 0);
            (self.at, self.end) = (0, self.end - self.at);
        }
        &mut self.bytes[self.end..]
    }

    /// Takes note of bytes in [`Inbox::space`].
    pub(crate) fn received(&mut self, bytes: usize) {
        self.end += bytes;
    }

    /// Returns true if the next header, of which a byte is there, is one of this kind.
    pub(crate) fn begins_with(&self, kind: PduType) -> bool {
        self.bytes[self.at..self.end].first() == Some(&(kind as u8))
    }

    /// Takes a header, with its digest and the padding behind it. `None` if it is not there as a whole.
    pub(crate) fn take_header(&mut self, digests: Digests) -> Result<Option<(Common, Header)>, Fatal> {
        let bytes = &self.bytes[self.at..self.end];
        if bytes.len() < COMMON_LEN {
            return Ok(None);
        }
        let common = Common::parse(bytes, digests)?;
        if bytes.len() < common.data_offset {
            return Ok(None);
        }
        let header = check_header(&common, bytes)?;
        self.at += common.data_offset;
        Ok(Some((common, header)))
    }

    /// Takes so many bytes, as far as they are there.
    pub(crate) fn take(&mut self, most: usize) -> &[u8] {
        let at = self.at;
        self.at += most.min(self.len());
        &self.bytes[at..self.at]
    }

    /// Takes the digest of data, and returns true if it is right. `None` if it is not there as a whole.
    pub(crate) fn take_digest(&mut self, of: &Digest) -> Option<bool> {
        if self.len() < DIGEST_LEN {
            return None;
        }
        let expected = (of.finalize() as u32).to_le_bytes();
        Some(self.take(DIGEST_LEN) == expected)
    }
}

/// Checks the digest of a header, of which all bytes are there, and parses it.
pub(crate) fn check_header(common: &Common, bytes: &[u8]) -> Result<Header, Fatal> {
    let header_len = common.kind.header_len();
    if common.digests.contains(Digests::HEADER) {
        let mut digest = new_digest();
        digest.update(&bytes[..header_len]);
        if bytes[header_len..header_len + DIGEST_LEN] != (digest.finalize() as u32).to_le_bytes() {
            return Err(Fatal::HeaderDigest);
        }
    }
    Header::parse(common.kind, bytes)
}
