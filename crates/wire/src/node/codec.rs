//! Conversion of a node's messages to and from bytes. A message is declared once, by [`messages`]: its code, fields, and their order.
//!
//! A number has its own length, big endian; a `bool` and the mark before an optional field are one byte, 0 or 1; an address is the byte 4 or 6 and
//! as many bits as it has; a text has a length of two bytes and is UTF-8 without control characters; private data have a length of one byte; a
//! list has a count of two bytes; bytes of a fixed number stand for themselves.

use std::net::{IpAddr, SocketAddr};

use super::control::{PrivateData, TEXT_LEN_MAX, VALUES_MAX};
use crate::bytes::{be16, be32, need};
use crate::cm::{RejReason, ServiceId};
use crate::roce::{PathMtu, Transport};
use crate::{LKey, Malformed, Psn, Qpn, RKey};

/// Bytes of the header of a message: type u16, version u16, request u32.
pub(super) const HEADER_LEN: usize = 8;

/// A field of a message. There is one way to write each value.
pub(super) trait Field: Sized {
    /// Appends it.
    fn put(&self, out: &mut Vec<u8>);

    /// Takes it from the front.
    fn take(from: &mut Reader<'_>) -> Result<Self, Malformed>;
}

/// Takes the fields of a message one after the other.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn bytes(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let end = self.at + n;
        need("message of a node", self.bytes, end)?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    /// Ends the message.
    pub(super) fn end(self) -> Result<(), Malformed> {
        match self.bytes.len() - self.at {
            0 => Ok(()),
            more => Err(undefined("bytes after the message of a node", more as u64)),
        }
    }
}

/// Declares an enum of numbers.
macro_rules! codes {
    ($(#[$doc:meta])* $name:ident: $int:ident { $($(#[$item_doc:meta])* $item:ident = $code:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr($int)]
        pub enum $name {
            $($(#[$item_doc])* $item = $code,)*
        }

        impl $crate::node::codec::Field for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $crate::node::codec::Field::put(&(*self as $int), out);
            }

            fn take(from: &mut $crate::node::codec::Reader<'_>) -> Result<$name, $crate::Malformed> {
                match <$int as $crate::node::codec::Field>::take(from)? {
                    $($code => Ok($name::$item),)*
                    other => Err($crate::node::codec::undefined(stringify!($name), other.into())),
                }
            }
        }
    };
}

/// Declares a value of several fields.
macro_rules! record {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl $crate::node::codec::Field for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $($crate::node::codec::Field::put(&self.$field, out);)*
            }

            fn take(from: &mut $crate::node::codec::Reader<'_>) -> Result<$name, $crate::Malformed> {
                Ok($name {
                    $($field: $crate::node::codec::Field::take(from)?,)*
                })
            }
        }
    };
}

/// Declares the messages of a protocol: `up to` their maximum length in bytes, in `version`, but for those that have version `forever`.
macro_rules! messages {
    (up to $len_max:ident, $version:ident, $forever:ident for $($first:literal)|+;
     $($(#[$doc:meta])* $code:literal $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {
        /// A message.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Message {
            $($(#[$doc])* $name { $($(#[$field_doc])* $field: $type,)* },)*
        }

        impl Message {
            const fn type_code(&self) -> u16 {
                match self {
                    $(Message::$name { .. } => $code,)*
                }
            }

            /// Returns the name of its type.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Message::$name { .. } => stringify!($name),)*
                }
            }

            fn put(&self, out: &mut Vec<u8>) {
                let _ = &out;
                match self {
                    $(Message::$name { $($field),* } => { $($crate::node::codec::Field::put($field, out);)* })*
                }
            }

            fn take(type_code: u16, from: &mut $crate::node::codec::Reader<'_>) -> Result<Message, Malformed> {
                match type_code {
                    $($code => Ok(Message::$name { $($field: $crate::node::codec::Field::take(from)?,)* }),)*
                    other => Err($crate::node::codec::undefined("type of a node's message", other.into())),
                }
            }

            fn version_of(type_code: u16) -> u16 {
                match [$($first),+].contains(&type_code) {
                    true => $forever,
                    false => $version,
                }
            }

            /// Reads a message: returns its request and the message. `bytes` are those of one packet.
            ///
            /// # Errors
            /// The bytes are not one of the messages, or have another version.
            pub fn parse(bytes: &[u8]) -> Result<(u32, Message), Malformed> {
                let (type_code, request, mut reader) =
                    $crate::node::codec::open(bytes, $len_max, Message::version_of)?;
                let message = Message::take(type_code, &mut reader)?;
                reader.end()?;
                Ok((request, message))
            }

            /// Replaces the contents of `out` by the message. Cuts a text to [`TEXT_LEN_MAX`](crate::node::control::TEXT_LEN_MAX), and
            /// replaces its control characters by spaces.
            ///
            /// # Panics
            /// If a list has more than [`VALUES_MAX`](crate::node::control::VALUES_MAX) values, or the message is too long.
            pub fn emit(&self, request: u32, out: &mut Vec<u8>) {
                let type_code = self.type_code();
                $crate::node::codec::begin(out, type_code, Message::version_of(type_code), request);
                self.put(out);
                assert!(out.len() <= $len_max, "a node's message of {} bytes", out.len());
            }
        }
    };
}

pub(super) use {codes, messages, record};

/// Begins to read a message: returns its type, its request, and the reader of its fields.
pub(super) fn open(
    bytes: &[u8],
    len_max: usize,
    version_of: fn(u16) -> u16,
) -> Result<(u16, u32, Reader<'_>), Malformed> {
    need("message of a node", bytes, HEADER_LEN)?;
    if bytes.len() > len_max {
        return Err(undefined("length of a node's message", bytes.len() as u64));
    }
    let type_code = be16(bytes, 0);
    if be16(bytes, 2) != version_of(type_code) {
        return Err(undefined("version of a node's message", be16(bytes, 2).into()));
    }
    let at = HEADER_LEN;
    Ok((type_code, be32(bytes, 4), Reader { bytes, at }))
}

/// Begins to write a message in place of the contents of `out`.
pub(super) fn begin(out: &mut Vec<u8>, type_code: u16, version: u16, request: u32) {
    out.clear();
    out.extend_from_slice(&type_code.to_be_bytes());
    out.extend_from_slice(&version.to_be_bytes());
    out.extend_from_slice(&request.to_be_bytes());
}

pub(super) fn undefined(what: &'static str, value: u64) -> Malformed {
    Malformed::Undefined { what, value }
}

macro_rules! numbers {
    ($($int:ty)*) => {$(
        impl Field for $int {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_be_bytes());
            }

            fn take(from: &mut Reader<'_>) -> Result<$int, Malformed> {
                from.array().map(<$int>::from_be_bytes)
            }
        }
    )*};
}

numbers! { u8 u16 u32 u64 }

impl<const N: usize> Field for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }

    fn take(from: &mut Reader<'_>) -> Result<[u8; N], Malformed> {
        from.array()
    }
}

impl Field for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn take(from: &mut Reader<'_>) -> Result<bool, Malformed> {
        match u8::take(from)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(undefined("mark in a node's message", other.into())),
        }
    }
}

impl<T: Field> Field for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(from: &mut Reader<'_>) -> Result<Option<T>, Malformed> {
        bool::take(from)?.then(|| T::take(from)).transpose()
    }
}

impl Field for Vec<u64> {
    fn put(&self, out: &mut Vec<u8>) {
        assert!(
            self.len() <= VALUES_MAX,
            "{} values in a node's message",
            self.len()
        );
        (self.len() as u16).put(out);
        self.iter().for_each(|value| value.put(out));
    }

    fn take(from: &mut Reader<'_>) -> Result<Vec<u64>, Malformed> {
        let count = usize::from(u16::take(from)?);
        if count > VALUES_MAX {
            return Err(undefined("number of values in a node's message", count as u64));
        }
        (0..count).map(|_| u64::take(from)).collect()
    }
}

impl Field for String {
    fn put(&self, out: &mut Vec<u8>) {
        let text = self.replace(char::is_control, " ");
        let mut end = text.len().min(TEXT_LEN_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let text = &text[..end];
        (text.len() as u16).put(out);
        out.extend_from_slice(text.as_bytes());
    }

    fn take(from: &mut Reader<'_>) -> Result<String, Malformed> {
        const WHAT: &str = "text in a node's message";
        let len = usize::from(u16::take(from)?);
        if len > TEXT_LEN_MAX {
            return Err(undefined(WHAT, len as u64));
        }
        let text =
            str::from_utf8(from.bytes(len)?).map_err(|error| undefined(WHAT, error.valid_up_to() as u64))?;
        match text.chars().find(|c| c.is_control()) {
            Some(control) => Err(undefined(WHAT, u32::from(control).into())),
            None => Ok(text.to_owned()),
        }
    }
}

impl Field for PrivateData {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(self.bytes().len() as u8);
        out.extend_from_slice(self.bytes());
    }

    fn take(from: &mut Reader<'_>) -> Result<PrivateData, Malformed> {
        let len = usize::from(u8::take(from)?);
        let bytes = from.bytes(len)?;
        PrivateData::new(bytes).ok_or(undefined("private data in a node's message", len as u64))
    }
}

impl Field for IpAddr {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            IpAddr::V4(address) => {
                out.push(4);
                out.extend_from_slice(&address.octets());
            }
            IpAddr::V6(address) => {
                out.push(6);
                out.extend_from_slice(&address.octets());
            }
        }
    }

    fn take(from: &mut Reader<'_>) -> Result<IpAddr, Malformed> {
        match u8::take(from)? {
            4 => Ok(from.array::<4>()?.into()),
            6 => Ok(from.array::<16>()?.into()),
            other => Err(undefined("family of an address", other.into())),
        }
    }
}

impl Field for SocketAddr {
    fn put(&self, out: &mut Vec<u8>) {
        self.ip().put(out);
        self.port().put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<SocketAddr, Malformed> {
        Ok(SocketAddr::new(IpAddr::take(from)?, u16::take(from)?))
    }
}

impl Field for Qpn {
    fn put(&self, out: &mut Vec<u8>) {
        self.value().put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<Qpn, Malformed> {
        let value = u32::take(from)?;
        let qpn = Qpn::new(value);
        (qpn.value() == value)
            .then_some(qpn)
            .ok_or(undefined("QPN", value.into()))
    }
}

impl Field for Psn {
    fn put(&self, out: &mut Vec<u8>) {
        self.value().put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<Psn, Malformed> {
        let value = u32::take(from)?;
        let psn = Psn::new(value);
        (psn.value() == value)
            .then_some(psn)
            .ok_or(undefined("PSN", value.into()))
    }
}

macro_rules! wrapped {
    ($($name:ident)*) => {$(
        impl Field for $name {
            fn put(&self, out: &mut Vec<u8>) {
                self.0.put(out);
            }

            fn take(from: &mut Reader<'_>) -> Result<$name, Malformed> {
                Field::take(from).map($name)
            }
        }
    )*};
}

wrapped! { LKey RKey ServiceId RejReason }

impl Field for PathMtu {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(self.code());
    }

    fn take(from: &mut Reader<'_>) -> Result<PathMtu, Malformed> {
        let code = u8::take(from)?;
        PathMtu::from_code(code).ok_or(undefined("path MTU", code.into()))
    }
}

impl Field for Transport {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(match self {
            Transport::Rc => 0,
            Transport::Uc => 1,
            Transport::Ud => 2,
            Transport::Xrc => 3,
        });
    }

    fn take(from: &mut Reader<'_>) -> Result<Transport, Malformed> {
        match u8::take(from)? {
            0 => Ok(Transport::Rc),
            1 => Ok(Transport::Uc),
            2 => Ok(Transport::Ud),
            3 => Ok(Transport::Xrc),
            other => Err(undefined("transport service", other.into())),
        }
    }
}

/// Checks that the fuzzer's seeds of a folder are the messages that `emit` writes, byte for byte. `RDMUX_NODE_SEEDS_WRITE=1` writes the seeds
/// again.
#[cfg(test)]
pub(super) fn check_seeds(folder: &str, count: usize, emit: impl Fn(usize, &mut Vec<u8>)) {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(folder);
    for at in 0..count {
        let mut bytes = Vec::new();
        emit(at, &mut bytes);
        let file = folder.join(format!("{:02}", at + 1));
        if std::env::var_os("RDMUX_NODE_SEEDS_WRITE").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&file, &bytes).unwrap();
        }
        let seed = std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert_eq!(seed, bytes, "message {at}");
    }
}
