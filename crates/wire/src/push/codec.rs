//! Conversion of messages to and from bytes.

use super::*;
use crate::bytes::{be16, be32, be64, need};

impl Message {
    /// Reads a message: returns its request id and the message. `bytes` are those of one SEND.
    pub fn parse(bytes: &[u8]) -> Result<(u64, Message), Malformed> {
        need("push header", bytes, HEADER_LEN)?;
        let type_code = be16(bytes, 0);
        if be16(bytes, 2) != version_of(type_code) {
            return Err(undefined("push version", be16(bytes, 2).into()));
        }
        let length = be32(bytes, 4);
        if bytes.len() > len_max_of(type_code) || length as usize != bytes.len() {
            return Err(undefined("push length", length.into()));
        }
        let mut r = Reader {
            bytes,
            at: HEADER_LEN,
        };
        let message = match type_code {
            1 => Message::Hello {
                version_min: r.u16()?,
                version_max: r.u16()?,
                client_nonce: r.array()?,
            },
            2 => Message::Challenge {
                version: r.u16()?,
                server_nonce: r.array()?,
                server_proof: r.array()?,
            },
            3 => Message::Proof {
                client_proof: r.array()?,
                client: r.array()?,
            },
            4 => Message::Welcome {
                keepalive_ms: r.u32()?,
                mappings_max: r.u32()?,
                messages_max: r.u16()?,
                revoked: r.u32()?,
            },
            5 => {
                let region = r.name()?;
                let (access, share, conflict) = (r.access()?, r.access()?, r.conflict()?);
                Message::Map {
                    region,
                    access,
                    share,
                    conflict,
                    offset: r.u64()?,
                    length: r.u64()?,
                    transfer: r.u64()?,
                }
            }
            6 => {
                let (mapping, region_bytes) = (r.u64()?, r.u64()?);
                let (domain, placement, ways) = (Domain::parse(r.u8()?)?, r.placement()?, r.ways()?);
                let count = usize::from(r.u16()?);
                need("extents", &r.bytes[r.at..], count * Extent::LEN)?;
                let extents = (0..count).map(|_| r.extent()).collect::<Result<_, _>>()?;
                Message::Mapped {
                    mapping,
                    region_bytes,
                    domain,
                    placement,
                    ways,
                    extents,
                }
            }
            7 => Message::Unmap { mapping: r.u64()? },
            8 => Message::Unmapped,
            9 => Message::Stat {
                region: r.name()?,
                transfer: r.u64()?,
            },
            10 => Message::Region(r.region()?),
            11 => Message::List,
            12 => {
                let (total, count) = (r.u32()?, r.u16()?);
                let regions = (0..count).map(|_| r.region()).collect::<Result<_, _>>()?;
                Message::Regions { total, regions }
            }
            13 => Message::Checksum {
                region: r.name()?,
                offset: r.u64()?,
                length: r.u64()?,
            },
            14 => Message::Checksummed { crc: r.u64()? },
            15 => Message::Goodbye,
            16 => {
                let code = ErrorCode::parse(r.u16()?)?;
                let len = usize::from(r.u16()?);
                Message::Error {
                    code,
                    text: r.text("error text", len)?.to_owned(),
                }
            }
            17 => Message::Flush {
                mapping: r.u64()?,
                offset: r.u64()?,
                length: r.u64()?,
                placement: r.placement()?,
            },
            18 => Message::Flushed,
            19 => {
                let region = r.name()?;
                let offset = r.u64()?;
                let (placement, conflict) = (r.placement()?, r.conflict()?);
                Message::Write {
                    region,
                    offset,
                    placement,
                    conflict,
                    bytes: r.data()?,
                }
            }
            20 => Message::Written,
            21 => Message::Read {
                region: r.name()?,
                offset: r.u64()?,
                length: r.data_len()?,
                conflict: r.conflict()?,
            },
            22 => Message::Bytes { bytes: r.data()? },
            23 => {
                let count = usize::from(r.u16()?);
                need("changes", &r.bytes[r.at..], count * Change::LEN)?;
                let changes = (0..count).map(|_| r.change()).collect::<Result<_, _>>()?;
                Message::Notice { changes }
            }
            24 => Message::Noticed,
            25 => Message::Release { mapping: r.u64()? },
            26 => Message::Released,
            other => return Err(undefined("push message type", other.into())),
        };
        if r.at != bytes.len() {
            return Err(undefined(
                "bytes after the push message",
                (bytes.len() - r.at) as u64,
            ));
        }
        Ok((be64(bytes, 8), message))
    }

    /// Replaces the contents of `out` by the message. Cuts the text of an [`Message::Error`] to fit, and replaces its control
    /// characters by spaces.
    ///
    /// # Panics
    ///
    /// If there are more extents than [`EXTENTS_MAX`], more changes than [`CHANGES_MAX`], more regions than [`Message::regions`] takes,
    /// no data, or more data than [`DATA_LEN_MAX`].
    pub fn emit(&self, request: u64, out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&self.type_code().to_be_bytes());
        out.extend_from_slice(&version_of(self.type_code()).to_be_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&request.to_be_bytes());
        match self {
            Message::Hello {
                version_min,
                version_max,
                client_nonce,
            } => {
                out.extend_from_slice(&version_min.to_be_bytes());
                out.extend_from_slice(&version_max.to_be_bytes());
                out.extend_from_slice(client_nonce);
            }
            Message::Challenge {
                version,
                server_nonce,
                server_proof,
            } => {
                out.extend_from_slice(&version.to_be_bytes());
                out.extend_from_slice(server_nonce);
                out.extend_from_slice(server_proof);
            }
            Message::Proof { client_proof, client } => {
                out.extend_from_slice(client_proof);
                out.extend_from_slice(client);
            }
            Message::Welcome {
                keepalive_ms,
                mappings_max,
                messages_max,
                revoked,
            } => {
                out.extend_from_slice(&keepalive_ms.to_be_bytes());
                out.extend_from_slice(&mappings_max.to_be_bytes());
                out.extend_from_slice(&messages_max.to_be_bytes());
                out.extend_from_slice(&revoked.to_be_bytes());
            }
            Message::Map {
                region,
                access,
                share,
                conflict,
                offset,
                length,
                transfer,
            } => {
                put_name(out, region);
                out.extend_from_slice(&access.bits().to_be_bytes());
                out.extend_from_slice(&share.bits().to_be_bytes());
                out.push(*conflict as u8);
                out.extend_from_slice(&offset.to_be_bytes());
                out.extend_from_slice(&length.to_be_bytes());
                out.extend_from_slice(&transfer.to_be_bytes());
            }
            Message::Mapped {
                mapping,
                region_bytes,
                domain,
                placement,
                ways,
                extents,
            } => {
                assert!(
                    extents.len() <= EXTENTS_MAX,
                    "{} extents do not fit a message",
                    extents.len()
                );
                out.extend_from_slice(&mapping.to_be_bytes());
                out.extend_from_slice(&region_bytes.to_be_bytes());
                out.extend_from_slice(&[*domain as u8, placement.bits(), ways.bits()]);
                out.extend_from_slice(&(extents.len() as u16).to_be_bytes());
                for extent in extents {
                    out.extend_from_slice(&extent.offset.to_be_bytes());
                    out.extend_from_slice(&extent.length.to_be_bytes());
                    out.extend_from_slice(&extent.va.to_be_bytes());
                    out.extend_from_slice(&extent.rkey.0.to_be_bytes());
                }
            }
            Message::Unmap { mapping } | Message::Release { mapping } => {
                out.extend_from_slice(&mapping.to_be_bytes())
            }
            Message::Stat { region, transfer } => {
                put_name(out, region);
                out.extend_from_slice(&transfer.to_be_bytes());
            }
            Message::Region(region) => put_region(out, region),
            Message::Regions { total, regions } => {
                out.extend_from_slice(&total.to_be_bytes());
                out.extend_from_slice(&(regions.len() as u16).to_be_bytes());
                regions.iter().for_each(|region| put_region(out, region));
            }
            Message::Checksum {
                region,
                offset,
                length,
            } => {
                put_name(out, region);
                out.extend_from_slice(&offset.to_be_bytes());
                out.extend_from_slice(&length.to_be_bytes());
            }
            Message::Checksummed { crc } => out.extend_from_slice(&crc.to_be_bytes()),
            Message::Unmapped
            | Message::List
            | Message::Goodbye
            | Message::Flushed
            | Message::Written
            | Message::Noticed
            | Message::Released => {}
            Message::Flush {
                mapping,
                offset,
                length,
                placement,
            } => {
                out.extend_from_slice(&mapping.to_be_bytes());
                out.extend_from_slice(&offset.to_be_bytes());
                out.extend_from_slice(&length.to_be_bytes());
                out.push(placement.bits());
            }
            Message::Write {
                region,
                offset,
                placement,
                conflict,
                bytes,
            } => {
                put_name(out, region);
                out.extend_from_slice(&offset.to_be_bytes());
                out.extend_from_slice(&[placement.bits(), *conflict as u8]);
                put_data(out, bytes);
            }
            Message::Read {
                region,
                offset,
                length,
                conflict,
            } => {
                put_name(out, region);
                out.extend_from_slice(&offset.to_be_bytes());
                out.extend_from_slice(&length.to_be_bytes());
                out.push(*conflict as u8);
            }
            Message::Bytes { bytes } => put_data(out, bytes),
            Message::Notice { changes } => {
                assert!(
                    changes.len() <= CHANGES_MAX,
                    "{} changes do not fit a message",
                    changes.len()
                );
                out.extend_from_slice(&(changes.len() as u16).to_be_bytes());
                for change in changes {
                    out.extend_from_slice(&change.mapping.to_be_bytes());
                    out.push(change.kind as u8);
                    out.extend_from_slice(&change.ms.to_be_bytes());
                }
            }
            Message::Error { code, text } => {
                out.extend_from_slice(&(*code as u16).to_be_bytes());
                let text = text.replace(char::is_control, " ");
                let mut end = text.len().min(CONTROL_LEN_MAX - HEADER_LEN - 4);
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                let text = &text[..end];
                out.extend_from_slice(&(text.len() as u16).to_be_bytes());
                out.extend_from_slice(text.as_bytes());
            }
        }
        assert!(
            out.len() <= len_max_of(self.type_code()),
            "a push message of {} bytes",
            out.len()
        );
        let length = out.len() as u32;
        out[4..8].copy_from_slice(&length.to_be_bytes());
    }

    const fn type_code(&self) -> u16 {
        match self {
            Message::Hello { .. } => 1,
            Message::Challenge { .. } => 2,
            Message::Proof { .. } => 3,
            Message::Welcome { .. } => 4,
            Message::Map { .. } => 5,
            Message::Mapped { .. } => 6,
            Message::Unmap { .. } => 7,
            Message::Unmapped => 8,
            Message::Stat { .. } => 9,
            Message::Region(_) => 10,
            Message::List => 11,
            Message::Regions { .. } => 12,
            Message::Checksum { .. } => 13,
            Message::Checksummed { .. } => 14,
            Message::Goodbye => 15,
            Message::Error { .. } => 16,
            Message::Flush { .. } => 17,
            Message::Flushed => 18,
            Message::Write { .. } => 19,
            Message::Written => 20,
            Message::Read { .. } => 21,
            Message::Bytes { .. } => 22,
            Message::Notice { .. } => 23,
            Message::Noticed => 24,
            Message::Release { .. } => 25,
            Message::Released => 26,
        }
    }
}

/// Returns the header version of a message type.
fn version_of(type_code: u16) -> u16 {
    match type_code {
        1 | 2 | 16 => VERSION_FOREVER,
        _ => VERSION,
    }
}

/// Returns the maximum length of a message type.
fn len_max_of(type_code: u16) -> usize {
    match type_code {
        19 | 22 => MESSAGE_LEN_MAX,
        _ => CONTROL_LEN_MAX,
    }
}

fn put_data(out: &mut Vec<u8>, bytes: &[u8]) {
    assert!(
        (1..=DATA_LEN_MAX).contains(&bytes.len()),
        "{} bytes of data in a push message",
        bytes.len()
    );
    out.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
    out.extend_from_slice(bytes);
}

fn put_name(out: &mut Vec<u8>, name: &Name) {
    out.push(name.0.len() as u8);
    out.extend_from_slice(name.0.as_bytes());
}

fn put_region(out: &mut Vec<u8>, region: &Region) {
    put_name(out, &region.name);
    out.extend_from_slice(&region.bytes.to_be_bytes());
    out.extend_from_slice(&[
        region.domain as u8,
        region.placement.bits(),
        u8::from(region.read_only),
    ]);
    out.extend_from_slice(&region.transfer.to_be_bytes());
    out.extend_from_slice(&region.durable.to_be_bytes());
}

/// Takes the fields of a message one after the other.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let end = self.at + n;
        need("push message", self.bytes, end)?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    fn text(&mut self, what: &'static str, len: usize) -> Result<&'a str, Malformed> {
        let text = str::from_utf8(self.take(len)?).map_err(|e| undefined(what, e.valid_up_to() as u64))?;
        match text.chars().find(|c| c.is_control()) {
            Some(control) => Err(undefined(what, u32::from(control).into())),
            None => Ok(text),
        }
    }

    fn name(&mut self) -> Result<Name, Malformed> {
        let len = usize::from(self.u8()?);
        if len == 0 {
            return Err(undefined("length of a region's name", 0));
        }
        Ok(Name(self.text("region name", len)?.into()))
    }

    fn placement(&mut self) -> Result<Placement, Malformed> {
        let bits = self.u8()?;
        Placement::from_bits(bits).ok_or_else(|| undefined("placement", bits.into()))
    }

    fn access(&mut self) -> Result<Access, Malformed> {
        let bits = self.u32()?;
        Access::from_bits(bits).ok_or_else(|| undefined("access", bits.into()))
    }

    fn ways(&mut self) -> Result<Ways, Malformed> {
        let bits = self.u8()?;
        Ways::from_bits(bits).ok_or_else(|| undefined("ways to durability", bits.into()))
    }

    fn conflict(&mut self) -> Result<Conflict, Malformed> {
        match self.u8()? {
            0 => Ok(Conflict::Break),
            1 => Ok(Conflict::Fail),
            other => Err(undefined("answer to a conflict", other.into())),
        }
    }

    fn change(&mut self) -> Result<Change, Malformed> {
        Ok(Change {
            mapping: self.u64()?,
            kind: match self.u8()? {
                1 => ChangeKind::Break,
                2 => ChangeKind::Revoked,
                other => return Err(undefined("change of a mapping", other.into())),
            },
            ms: self.u32()?,
        })
    }

    fn data_len(&mut self) -> Result<u32, Malformed> {
        let length = self.u32()?;
        if !(1..=DATA_LEN_MAX as u32).contains(&length) {
            return Err(undefined("bytes of data", length.into()));
        }
        Ok(length)
    }

    fn data(&mut self) -> Result<Vec<u8>, Malformed> {
        let length = self.data_len()?;
        self.take(length as usize).map(<[u8]>::to_vec)
    }

    fn extent(&mut self) -> Result<Extent, Malformed> {
        Ok(Extent {
            offset: self.u64()?,
            length: self.u64()?,
            va: self.u64()?,
            rkey: RKey(self.u32()?),
        })
    }

    fn region(&mut self) -> Result<Region, Malformed> {
        Ok(Region {
            name: self.name()?,
            bytes: self.u64()?,
            domain: Domain::parse(self.u8()?)?,
            placement: self.placement()?,
            read_only: match self.u8()? {
                0 => false,
                1 => true,
                other => return Err(undefined("read-only mark", other.into())),
            },
            transfer: self.u64()?,
            durable: self.u64()?,
        })
    }
}
