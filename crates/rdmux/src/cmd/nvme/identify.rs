//! `rdmux nvme id-ctrl` and `id-ns`: structures of Identify, field by field, with nvme-cli's names. NVMe Base 2.0, 5.17.2; NVM 4.1.5.

use anyhow::Result;
use rdmux_nvmf::host::Url;
use rdmux_nvmf::identity::uuid_text;
use rdmux_wire::nvme::NsId;
use serde_json::{Map, Value, json};

use super::host::{HostArgs, parse_nsid};
use crate::output;

/// Show what a controller says of itself, in nvme-cli's words.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "JSON: one object with the names of the text; a number above 64 bits and an identifier are text."
)]
pub(crate) struct ControllerArgs {
    /// The subsystem: nvme+tcp://HOST[:PORT]/NQN or nvme+rdma://HOST[:PORT]/NQN.
    #[arg(value_name = "URL")]
    url: Url,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Show what a controller says of a namespace, in nvme-cli's words.
#[derive(clap::Args, Debug)]
#[command(after_help = "JSON: one object with the names of the text, and lbafs (array of ms, lbads, rp).")]
pub(crate) struct NamespaceArgs {
    /// The subsystem: nvme+tcp://HOST[:PORT]/NQN or nvme+rdma://HOST[:PORT]/NQN.
    #[arg(value_name = "URL")]
    url: Url,
    /// Number of the namespace.
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_nsid)]
    nsid: NsId,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Form of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Decimal,
    Hex,
    /// Text, up to its padding.
    Text,
    /// An identifier: its bytes in their order.
    Bytes,
    /// The same, in parts.
    Uuid,
    /// An organization's identifier, the lowest byte first.
    Oui,
}

/// Name, offset, bytes, form.
type Field = (&'static str, usize, usize, Form);

#[rustfmt::skip]
const CONTROLLER: [Field; 85] = [
    ("vid", 0, 2, Form::Hex), ("ssvid", 2, 2, Form::Hex), ("sn", 4, 20, Form::Text), ("mn", 24, 40, Form::Text), ("fr", 64, 8, Form::Text),
    ("rab", 72, 1, Form::Decimal), ("ieee", 73, 3, Form::Oui), ("cmic", 76, 1, Form::Hex), ("mdts", 77, 1, Form::Decimal),
    ("cntlid", 78, 2, Form::Hex), ("ver", 80, 4, Form::Hex), ("rtd3r", 84, 4, Form::Hex), ("rtd3e", 88, 4, Form::Hex),
    ("oaes", 92, 4, Form::Hex), ("ctratt", 96, 4, Form::Hex), ("rrls", 100, 2, Form::Hex), ("cntrltype", 111, 1, Form::Decimal),
    ("fguid", 112, 16, Form::Uuid), ("crdt1", 128, 2, Form::Decimal), ("crdt2", 130, 2, Form::Decimal), ("crdt3", 132, 2, Form::Decimal),
    ("nvmsr", 253, 1, Form::Decimal), ("vwci", 254, 1, Form::Decimal), ("mec", 255, 1, Form::Decimal),
    ("oacs", 256, 2, Form::Hex), ("acl", 258, 1, Form::Decimal), ("aerl", 259, 1, Form::Decimal), ("frmw", 260, 1, Form::Hex),
    ("lpa", 261, 1, Form::Hex), ("elpe", 262, 1, Form::Decimal), ("npss", 263, 1, Form::Decimal), ("avscc", 264, 1, Form::Hex),
    ("apsta", 265, 1, Form::Hex), ("wctemp", 266, 2, Form::Decimal), ("cctemp", 268, 2, Form::Decimal), ("mtfa", 270, 2, Form::Decimal),
    ("hmpre", 272, 4, Form::Decimal), ("hmmin", 276, 4, Form::Decimal), ("tnvmcap", 280, 16, Form::Decimal),
    ("unvmcap", 296, 16, Form::Decimal), ("rpmbs", 312, 4, Form::Hex), ("edstt", 316, 2, Form::Decimal), ("dsto", 318, 1, Form::Decimal),
    ("fwug", 319, 1, Form::Decimal), ("kas", 320, 2, Form::Decimal), ("hctma", 322, 2, Form::Hex), ("mntmt", 324, 2, Form::Decimal),
    ("mxtmt", 326, 2, Form::Decimal), ("sanicap", 328, 4, Form::Hex),
    ("hmminds", 332, 4, Form::Decimal), ("hmmaxd", 336, 2, Form::Decimal), ("nsetidmax", 338, 2, Form::Decimal), ("endgidmax", 340, 2, Form::Decimal),
    ("anatt", 342, 1, Form::Decimal), ("anacap", 343, 1, Form::Decimal),
    ("anagrpmax", 344, 4, Form::Decimal), ("nanagrpid", 348, 4, Form::Decimal), ("pels", 352, 4, Form::Decimal),
    ("domainid", 356, 2, Form::Decimal), ("megcap", 368, 16, Form::Decimal), ("sqes", 512, 1, Form::Hex), ("cqes", 513, 1, Form::Hex), ("maxcmd", 514, 2, Form::Decimal),
    ("nn", 516, 4, Form::Decimal), ("oncs", 520, 2, Form::Hex), ("fuses", 522, 2, Form::Hex), ("fna", 524, 1, Form::Hex),
    ("vwc", 525, 1, Form::Hex), ("awun", 526, 2, Form::Decimal), ("awupf", 528, 2, Form::Decimal), ("icsvscc", 530, 1, Form::Decimal),
    ("nwpc", 531, 1, Form::Decimal), ("acwu", 532, 2, Form::Decimal), ("ocfs", 534, 2, Form::Hex), ("sgls", 536, 4, Form::Hex),
    ("mnan", 540, 4, Form::Decimal), ("maxdna", 544, 16, Form::Decimal), ("maxcna", 560, 4, Form::Decimal),
    ("subnqn", 768, 256, Form::Text), ("ioccsz", 1792, 4, Form::Decimal), ("iorcsz", 1796, 4, Form::Decimal),
    ("icdoff", 1800, 2, Form::Decimal), ("fcatt", 1802, 1, Form::Hex), ("msdbd", 1803, 1, Form::Decimal), ("ofcs", 1804, 2, Form::Decimal),
];

#[rustfmt::skip]
const NAMESPACE: [Field; 36] = [
    ("nsze", 0, 8, Form::Hex), ("ncap", 8, 8, Form::Hex), ("nuse", 16, 8, Form::Hex), ("nsfeat", 24, 1, Form::Hex),
    ("nlbaf", 25, 1, Form::Decimal), ("flbas", 26, 1, Form::Hex), ("mc", 27, 1, Form::Hex), ("dpc", 28, 1, Form::Hex),
    ("dps", 29, 1, Form::Hex), ("nmic", 30, 1, Form::Hex), ("rescap", 31, 1, Form::Hex), ("fpi", 32, 1, Form::Hex),
    ("dlfeat", 33, 1, Form::Decimal), ("nawun", 34, 2, Form::Decimal), ("nawupf", 36, 2, Form::Decimal), ("nacwu", 38, 2, Form::Decimal),
    ("nabsn", 40, 2, Form::Decimal), ("nabo", 42, 2, Form::Decimal), ("nabspf", 44, 2, Form::Decimal), ("noiob", 46, 2, Form::Decimal),
    ("nvmcap", 48, 16, Form::Decimal), ("npwg", 64, 2, Form::Decimal), ("npwa", 66, 2, Form::Decimal), ("npdg", 68, 2, Form::Decimal),
    ("npda", 70, 2, Form::Decimal), ("nows", 72, 2, Form::Decimal), ("mssrl", 74, 2, Form::Decimal), ("mcl", 76, 4, Form::Decimal),
    ("msrc", 80, 1, Form::Decimal), ("nulbaf", 81, 1, Form::Decimal), ("anagrpid", 92, 4, Form::Decimal), ("nsattr", 99, 1, Form::Decimal),
    ("nvmsetid", 100, 2, Form::Decimal), ("endgid", 102, 2, Form::Decimal), ("nguid", 104, 16, Form::Bytes), ("eui64", 120, 8, Form::Bytes),
];

/// Returns the value of a field, little endian.
fn number(field: &[u8]) -> u128 {
    field
        .iter()
        .rev()
        .fold(0, |all, byte| all << 8 | u128::from(*byte))
}

/// Returns what a text field holds, in which only visible ASCII is shown as it is.
fn text(field: &[u8]) -> String {
    let end = field
        .iter()
        .rposition(|byte| !matches!(byte, 0 | b' '))
        .map_or(0, |at| at + 1);
    let shown = |byte: &u8| {
        if (b' '..=b'~').contains(byte) {
            char::from(*byte)
        } else {
            '?'
        }
    };
    field[..end].iter().map(shown).collect()
}

fn hex(field: &[u8]) -> String {
    field.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a hexadecimal number, of which 0 has no prefix, as C prints it.
fn prefixed(number: u128) -> String {
    match number {
        0 => "0".to_owned(),
        _ => format!("{number:#x}"),
    }
}

fn shown((_, at, len, form): &Field, bytes: &[u8]) -> String {
    let field = &bytes[*at..*at + *len];
    match form {
        Form::Decimal => number(field).to_string(),
        Form::Hex => prefixed(number(field)),
        Form::Text => text(field),
        Form::Bytes => hex(field),
        Form::Uuid => field.try_into().map_or_else(|_| hex(field), uuid_text),
        Form::Oui => format!("{:06x}", number(field)),
    }
}

fn value(field: &Field, bytes: &[u8]) -> Value {
    let (_, at, len, form) = *field;
    match (form, u64::try_from(number(&bytes[at..at + len.min(16)]))) {
        (Form::Decimal | Form::Hex, Ok(number)) => number.into(),
        _ => shown(field, bytes).into(),
    }
}

fn lines(title: &str, width: usize, fields: &[Field], bytes: &[u8]) -> String {
    let lines = fields.iter().map(|field| {
        let line = format!("{:<width$}: {}", field.0, shown(field, bytes));
        line.trim_end().to_owned()
    });
    std::iter::once(title.to_owned())
        .chain(lines)
        .collect::<Vec<_>>()
        .join("\n")
}

fn object(fields: &[Field], bytes: &[u8]) -> Map<String, Value> {
    fields
        .iter()
        .map(|field| (field.0.to_owned(), value(field, bytes)))
        .collect()
}

pub(super) fn controller(args: &ControllerArgs) -> Result<()> {
    let controller = args.host.ask(&args.url)?;
    let bytes = &controller.info().identify_bytes;
    output::say(&match args.json {
        true => format!("{:#}", Value::from(object(&CONTROLLER, bytes))),
        false => lines("NVME Identify Controller:", 10, &CONTROLLER, bytes),
    });
    controller.close();
    Ok(())
}

pub(super) fn namespace(args: &NamespaceArgs) -> Result<()> {
    let controller = args.host.ask(&args.url)?;
    let namespace = controller.namespace(args.nsid)?;
    let bytes = &namespace.identify_bytes;
    // The number is 0-based.
    let formats = bytes[128..192].chunks_exact(4).take(usize::from(bytes[25]) + 1);
    let formats = formats.map(|format| (number(&format[..2]) as u64, format[2], format[3] & 3));
    let used = usize::from(bytes[26] & 0xf);
    if args.json {
        let mut all = object(&NAMESPACE, bytes);
        let formats: Vec<_> = formats
            .map(|(ms, lbads, rp)| json!({ "ms": ms, "lbads": lbads, "rp": rp }))
            .collect();
        all.insert("lbafs".to_owned(), formats.into());
        output::say(&format!("{:#}", Value::from(all)));
    } else {
        let title = format!("NVME Identify Namespace {}:", args.nsid);
        // Bit 4 of NSFEAT: these fields have a meaning.
        let is_optimal = |name: &str| matches!(name, "npwg" | "npwa" | "npdg" | "npda" | "nows");
        let has_optimal = bytes[24] & 1 << 4 != 0;
        let fields: Vec<_> = NAMESPACE
            .into_iter()
            .filter(|field| has_optimal || !is_optimal(field.0))
            .collect();
        let mut all = lines(&title, 8, &fields, bytes);
        for (at, (ms, lbads, rp)) in formats.enumerate() {
            let in_use = if at == used { " (in use)" } else { "" };
            let rp = prefixed(rp.into());
            all += &format!("\nlbaf {at:>2} : ms:{ms:<3} lbads:{lbads:<2} rp:{rp}{in_use}");
        }
        output::say(&all);
    }
    controller.close();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields__follow_each_other_within_the_structure() {
        for fields in [&CONTROLLER[..], &NAMESPACE[..]] {
            let mut end = 0;
            for (name, at, len, _) in fields {
                assert!(*at >= end, "{name}");
                end = at + len;
            }
            assert!(end <= 4096);
        }
    }

    #[test]
    fn shown__has_the_form_of_nvme_cli() {
        let mut bytes = vec![0; 4096];
        bytes[..4].copy_from_slice(&[0xf4, 0x1a, 0, 0]);
        bytes[4..8].copy_from_slice(b"ab\x1b ");
        let text = lines("t", 10, &CONTROLLER[..3], &bytes);
        assert_eq!(text, "t\nvid       : 0x1af4\nssvid     : 0\nsn        : ab?");
        bytes[280..296].fill(0xff);
        let all = object(&CONTROLLER, &bytes);
        assert_eq!(all["vid"], 0x1af4);
        assert_eq!(all["tnvmcap"], u128::MAX.to_string());
    }
}
