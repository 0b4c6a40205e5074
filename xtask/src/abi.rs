//! Programs compiled against the system's libibverbs and librdmacm have to find the same interface in rdmux's: the names they ask for, with
//! their versions, structures of the same layout, and the same numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::process::{Signals, output};
use crate::{Outcome, installed, release, root, say};

#[derive(Args)]
pub(crate) struct Options {
    /// rdmux's library [default: libibverbs.so of the release build]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Folders of a Debian, with rdma-core's headers and libraries; the lab's is "$(lab/lab dir)/tree"
    #[arg(default_value = "/", value_name = "ROOT")]
    roots: Vec<PathBuf>,
}

/// Fields whose C name differs from the Rust name: structure, field, C name.
const FIELDS: [(&str, &str, &str); 29] = [
    ("Mw", "mw_type", "type"),
    ("VerbsContext", "size", "sz"),
    ("VerbsContext", "private", "priv"),
    ("VerbsContext", "destroy_flow", "ibv_destroy_flow"),
    ("VerbsContext", "create_flow", "ibv_create_flow"),
    ("ModifyCqAttr", "cq_count", "moderate.cq_count"),
    ("ModifyCqAttr", "cq_period", "moderate.cq_period"),
    ("SendWr", "remote_srqn", "qp_type.xrc.remote_srqn"),
    ("SrqInitAttrEx", "max_num_tags", "tm_cap.max_num_tags"),
    ("SrqInitAttrEx", "max_ops", "tm_cap.max_ops"),
    (
        "DeviceAttrEx",
        "qp_rate_limit_min",
        "packet_pacing_caps.qp_rate_limit_min",
    ),
    (
        "DeviceAttrEx",
        "qp_rate_limit_max",
        "packet_pacing_caps.qp_rate_limit_max",
    ),
    (
        "DeviceAttrEx",
        "qp_rate_limit_types",
        "packet_pacing_caps.supported_qpts",
    ),
    ("DeviceAttrEx", "odp_general_caps", "odp_caps.general_caps"),
    (
        "DeviceAttrEx",
        "odp_rc",
        "odp_caps.per_transport_caps.rc_odp_caps",
    ),
    (
        "DeviceAttrEx",
        "odp_uc",
        "odp_caps.per_transport_caps.uc_odp_caps",
    ),
    (
        "DeviceAttrEx",
        "odp_ud",
        "odp_caps.per_transport_caps.ud_odp_caps",
    ),
    ("DeviceAttrEx", "tag_matching", "tm_caps"),
    ("DeviceAttrEx", "max_cq_count", "cq_mod_caps.max_cq_count"),
    ("DeviceAttrEx", "max_cq_period", "cq_mod_caps.max_cq_period"),
    ("DeviceAttrEx", "pci_atomics", "pci_atomic_caps"),
    ("DeviceAttrEx", "xrc_odp", "xrc_odp_caps"),
    ("CmId", "src_addr", "route.addr.src_storage"),
    ("CmId", "dst_addr", "route.addr.dst_storage"),
    ("CmId", "sgid", "route.addr.addr.ibaddr.sgid"),
    ("CmId", "dgid", "route.addr.addr.ibaddr.dgid"),
    ("CmId", "pkey", "route.addr.addr.ibaddr.pkey"),
    ("CmId", "path_rec", "route.path_rec"),
    ("CmId", "num_paths", "route.num_paths"),
];

/// Fields that only newer headers have.
const NEW_FIELDS: [&str; 2] = ["wr_flush", "active_speed_ex"];

/// Structures that newer headers have made longer.
const GROWN: [&str; 2] = ["PortAttr", "QpEx"];

/// The prefix in C of the numbers of each Rust module; "" is none.
const PREFIXES: [(&str, &str); 19] = [
    ("", "IBV_"),
    ("qp_attr", "IBV_QP_"),
    ("qp_type", "IBV_QPT_"),
    ("qp_init", "IBV_QP_INIT_ATTR_"),
    ("qp_open", "IBV_QP_OPEN_ATTR_"),
    ("qp_ex", "IBV_QP_EX_WITH_"),
    ("srq", "IBV_SRQ_"),
    ("parent_domain", "IBV_PARENT_DOMAIN_INIT_ATTR_"),
    ("xrcd", "IBV_XRCD_INIT_ATTR_"),
    ("wr_opcode", "IBV_WR_"),
    ("wc_opcode", "IBV_WC_"),
    ("wc_flags", "IBV_WC_"),
    ("cq_ex", "IBV_WC_EX_"),
    ("wc_status", "IBV_WC_"),
    ("event_type", "IBV_EVENT_"),
    ("cm_event", "RDMA_CM_EVENT_"),
    ("port_space", "RDMA_PS_"),
    ("cm_option", "RDMA_OPTION_ID_"),
    ("device_cap", "IBV_DEVICE_"),
];

/// Numbers that have another name in C: module, number, C name. None: Debian 12's headers lack it, or all do.
const NUMBERS: [(&str, &str, Option<&str>); 21] = [
    ("qp_attr", "UNKNOWN", None),
    ("qp_ex", "FLUSH", None),
    ("srq", "INIT_TYPE", Some("IBV_SRQ_INIT_ATTR_TYPE")),
    ("srq", "INIT_PD", Some("IBV_SRQ_INIT_ATTR_PD")),
    ("srq", "INIT_XRCD", Some("IBV_SRQ_INIT_ATTR_XRCD")),
    ("srq", "INIT_CQ", Some("IBV_SRQ_INIT_ATTR_CQ")),
    ("srq", "TYPE_BASIC", Some("IBV_SRQT_BASIC")),
    ("srq", "TYPE_XRC", Some("IBV_SRQT_XRC")),
    ("parent_domain", "ALLOW_CC_UNPROTECTED_ALLOC", None),
    ("wc_opcode", "FLUSH", None),
    ("cq_ex", "WITH_STANDARD", Some("IBV_WC_STANDARD_FLAGS")),
    (
        "cq_ex",
        "SINGLE_THREADED",
        Some("IBV_CREATE_CQ_ATTR_SINGLE_THREADED"),
    ),
    ("cq_ex", "INIT_FLAGS", Some("IBV_CQ_INIT_ATTR_MASK_FLAGS")),
    ("cq_ex", "INIT_PD", Some("IBV_CQ_INIT_ATTR_MASK_PD")),
    ("cq_ex", "MODERATE", Some("IBV_CQ_ATTR_MODERATE")),
    ("cq_ex", "RAW_CLOCK", Some("IBV_VALUES_MASK_RAW_CLOCK")),
    ("cm_option", "LEVEL_ID", Some("RDMA_OPTION_ID")),
    ("device_cap", "FLUSH_GLOBAL", None),
    ("device_cap", "FLUSH_PERSISTENT", None),
    ("device_cap", "ATOMIC_WRITE", None),
    ("", "ODP_WRITE_AND_READ", None),
];

pub(crate) fn run(options: &Options, signals: &Signals) -> Result<Outcome> {
    for tool in ["cc", "objdump"] {
        if !installed(tool) {
            return Ok(Outcome::Skipped(format!("there is no {tool}")));
        }
    }
    let library = options
        .library
        .clone()
        .unwrap_or_else(|| release("libibverbs.so"));
    let mut passed = true;
    let mut complain = |complaint: String| {
        passed = false;
        say(format_args!("abi: {complaint}"))
    };

    let own = symbols(&library, signals)?;
    let map = map(&fs::read_to_string(root().join("capi/ibverbs/libibverbs.map"))?);
    if own != map {
        let differences = map.difference(&own).map(|symbol| format!("< {symbol}"));
        let differences = differences.chain(own.difference(&map).map(|symbol| format!("> {symbol}")));
        let first: Vec<String> = differences.take(5).collect();
        let library = library.display();
        complain(format!(
            "libibverbs.map (<) and {library} (>) differ: {}",
            first.join(" ")
        ))?;
    }

    let sources = root().join("crates/verbs/src");
    let checks = checks(
        &fs::read_to_string(sources.join("abi.rs"))?,
        &fs::read_to_string(sources.join("abi/layout.rs"))?,
        &fs::read_to_string(sources.join("abi/numbers.rs"))?,
    )?;
    for root in &options.roots {
        if ["infiniband/verbs.h", "rdma/rdma_cma.h"]
            .iter()
            .any(|header| !root.join("usr/include").join(header).exists())
        {
            return Ok(Outcome::Skipped(format!(
                "{} has no headers of rdma-core (Debian: libibverbs-dev and librdmacm-dev)",
                root.display()
            )));
        }
        let errors = compile(&checks, &root.join("usr/include"), signals)?;
        if !errors.is_empty() {
            complain(format!("{}: {}", root.display(), errors.join(" ")))?;
        }
        let mut found = 0;
        for name in ["libibverbs.so.1", "librdmacm.so.1"] {
            let Some(theirs) = find(root, name) else {
                complain(format!("{}: there is no {name}", root.display()))?;
                continue;
            };
            let symbols = symbols(&theirs, signals)?;
            found += symbols.len();
            let missing = missing(&symbols, &own);
            if !missing.is_empty() {
                let (root, theirs) = (root.display(), theirs.display());
                complain(format!(
                    "{root}: {theirs} has, and rdmux's library has not: {}",
                    missing.join(" ")
                ))?;
            }
        }
        say(format_args!(
            "abi: {}: {} sizes, offsets and numbers, {found} symbols of the system's two libraries",
            root.display(),
            checks.len()
        ))?;
    }
    Ok(Outcome::of(passed))
}

/// A symbol's name and version, separated by a space.
type Symbol = String;

/// Returns the symbols that a library defines.
fn symbols(library: &Path, signals: &Signals) -> Result<BTreeSet<Symbol>> {
    let output = output(Command::new("objdump").arg("-T").arg(library), signals)?;
    if !output.end.success() {
        bail!("objdump: {} ({})", output.stderr.trim(), output.end);
    }
    let defined = output
        .stdout
        .lines()
        .filter(|line| line.starts_with(|first: char| matches!(first, '0'..='9' | 'a'..='f')))
        .filter(|line| !line.contains("*UND*") && !line.contains("*ABS*"));
    Ok(defined
        .filter_map(|line| {
            let mut words = line.split_whitespace().rev();
            let (name, version) = (words.next()?, words.next()?);
            Some(format!("{name} {}", version.trim_matches(['(', ')'])))
        })
        .collect())
}

/// Returns the symbols of a linker's map.
fn map(text: &str) -> BTreeSet<Symbol> {
    let mut symbols = BTreeSet::new();
    let mut version = "";
    for line in text.lines() {
        if line.starts_with(|first: char| first.is_ascii_uppercase()) {
            version = line.split_whitespace().next().unwrap_or("");
        } else if let Some(name) = line.trim_start().strip_suffix(';')
            && !name.contains(['}', ' ', ':'])
        {
            symbols.insert(format!("{name} {version}"));
        }
    }
    symbols
}

/// Returns the symbols that the system's library has and `own` has not. A name of the first version may have a later one: only programs from before 2007
/// ask for the first.
fn missing(theirs: &BTreeSet<Symbol>, own: &BTreeSet<Symbol>) -> Vec<Symbol> {
    let names: BTreeSet<&str> = own.iter().filter_map(|symbol| symbol.split(' ').next()).collect();
    theirs
        .difference(own)
        .filter(|symbol| {
            let (name, version) = symbol.split_once(' ').unwrap_or((symbol, ""));
            let section = ["text", "data", "bss"].contains(&version.trim_start_matches('.'));
            !(section || version == "IBVERBS_1.0" && names.contains(name))
        })
        .cloned()
        .collect()
}

fn find(root: &Path, library: &str) -> Option<PathBuf> {
    ["usr/lib", "lib"].iter().find_map(|folder| {
        let folder = root.join(folder);
        let inner = fs::read_dir(&folder).ok()?.flatten().map(|entry| entry.path());
        [folder]
            .into_iter()
            .chain(inner)
            .map(|folder| folder.join(library))
            .find(|path| path.exists())
    })
}

/// An assertion in C, and its name.
type Check = (String, String);

/// Returns the sizes and offsets of `layout.rs` and the numbers of `numbers.rs`, as assertions about C's types. The documentation in `abi.rs`
/// has the C name of each structure.
fn checks(abi: &str, layout: &str, numbers: &str) -> Result<Vec<Check>> {
    let types = types(abi);
    let mut checks = Vec::new();
    let (_, table) = layout
        .split_once("\nlayout! {")
        .context("layout.rs has no table")?;
    for entry in table.split('}') {
        let Some((head, fields)) = entry.split_once('{') else {
            continue;
        };
        let (name, size) = assignment(head)?;
        let c_type = types
            .get(name)
            .with_context(|| format!("abi.rs says no C name of {name}"))?;
        let relation = if GROWN.contains(&name) { "<=" } else { "==" };
        checks.push((
            format!("sizeof({c_type}) {relation} {size}"),
            format!("size of {name}"),
        ));
        for field in fields.split(',').filter(|field| !field.trim().is_empty()) {
            let (field, offset) = assignment(field)?;
            if NEW_FIELDS.contains(&field) {
                continue;
            }
            let other = FIELDS.iter().find(|(of, rust, _)| *of == name && *rust == field);
            let c_field = other.map_or(field, |(_, _, c)| c);
            checks.push((
                format!("offsetof({c_type}, {c_field}) == {offset}"),
                format!("{name}.{field}"),
            ));
        }
    }
    let mut module = "";
    for line in numbers.lines() {
        if let Some(rest) = line.strip_prefix("pub mod ") {
            module = rest.trim_end_matches(" {");
        } else if line == "}" {
            module = "";
        } else if let Some(constant) = line.trim_start().strip_prefix("pub const ") {
            let (name, number) = assignment(constant)?;
            let name = name.split(':').next().unwrap_or(name);
            let number = number.trim_end_matches(';');
            let prefix = PREFIXES.iter().find(|(of, _)| *of == module);
            let (_, prefix) = prefix.with_context(|| format!("abi: no C name of the module {module}"))?;
            let c_name = match NUMBERS
                .iter()
                .find(|(of, rust, _)| *of == module && *rust == name)
            {
                Some((_, _, None)) => continue,
                Some((_, _, Some(c_name))) => (*c_name).to_owned(),
                None => format!("{prefix}{name}"),
            };
            checks.push((format!("{c_name} == ({number})"), format!("{module}::{name}")));
        }
    }
    Ok(checks)
}

fn assignment(text: &str) -> Result<(&str, &str)> {
    let (name, value) = text
        .split_once(" = ")
        .with_context(|| format!("no \" = \" in {text}"))?;
    Ok((name.trim(), value.trim()))
}

/// Returns the C type of each structure: the first line of its documentation is `struct ibv_x`, or names a member of one.
fn types(abi: &str) -> BTreeMap<&str, String> {
    let mut types = BTreeMap::new();
    let mut documentation = None;
    for line in abi.lines() {
        if line.starts_with("///") {
            documentation.get_or_insert(line);
        } else if !line.starts_with("#[") {
            let item = line
                .strip_prefix("pub struct ")
                .or(line.strip_prefix("pub union "));
            let c_type = documentation.take().and_then(c_type);
            if let (Some(item), Some(c_type)) = (item, c_type) {
                let end = item
                    .find(|c: char| !c.is_ascii_alphanumeric())
                    .unwrap_or(item.len());
                types.insert(&item[..end], c_type);
            }
        }
    }
    types
}

fn c_type(documentation: &str) -> Option<String> {
    let mut words = documentation.strip_prefix("/// `")?.split('`');
    let first = words.next()?;
    if first.starts_with("struct ") || first.starts_with("union ") {
        return Some(first.to_owned());
    }
    let within = (words.next()? == " of ").then(|| words.next())??;
    Some(format!("__typeof__((({within} *)0)->{first})"))
}

/// Returns the compiler's errors about the checks, 5 at most. It finds rdma-core's headers in `include`, and all others on this host.
fn compile(checks: &[Check], include: &Path, signals: &Signals) -> Result<Vec<String>> {
    let folder = tempfile::tempdir()?;
    for name in ["infiniband", "rdma"] {
        symlink(include.join(name).canonicalize()?, folder.path().join(name))?;
    }
    let mut source =
        "#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n".to_owned();
    for (assertion, name) in checks {
        writeln!(source, "_Static_assert({assertion}, \"{name}\");")?;
    }
    let file = folder.path().join("layout.c");
    fs::write(&file, source)?;
    let mut command = Command::new("cc");
    command
        .env("LC_ALL", "C")
        .args(["-fsyntax-only", "-I"])
        .args([folder.path(), &file]);
    let output = output(&command, signals)?;
    let errors = output
        .stderr
        .lines()
        .filter_map(|line| Some(line.split_once("error: ")?.1.to_owned()));
    let errors: Vec<String> = errors.take(5).collect();
    if errors.is_empty() && !output.end.success() {
        bail!("cc: {} ({})", output.stderr.trim(), output.end);
    }
    Ok(errors)
}

#[cfg(test)]
#[allow(non_snake_case, reason = "tests are named function__case")]
mod tests {
    use super::*;

    #[test]
    fn checks__name_types_fields_and_numbers() {
        let abi = "/// `struct ibv_mw`.\n///\n/// More.\n#[repr(C)]\npub struct Mw {\n}\n\n/// `wr.ud` of `struct ibv_send_wr`.\npub struct Ud {\n}\n";
        let layout = "macro_rules! layout {}\n\nlayout! {\n    Mw = 32 { rkey = 16,\n        mw_type = 24 }\n    Ud = 16 { ah = 0 }\n}\n";
        let numbers = "pub mod srq {\n    pub const LIMIT: u32 = 1 << 1;\n    pub const TYPE_XRC: u32 = 1;\n}\npub mod qp_ex {\n    pub const FLUSH: u32 = 2;\n}\npub const ODP_SUPPORT: u64 = 1;\n";
        let checks = checks(abi, layout, numbers).unwrap();
        let assertions: Vec<&str> = checks.iter().map(|(assertion, _)| assertion.as_str()).collect();
        assert_eq!(
            assertions,
            [
                "sizeof(struct ibv_mw) == 32",
                "offsetof(struct ibv_mw, rkey) == 16",
                "offsetof(struct ibv_mw, type) == 24",
                "sizeof(__typeof__(((struct ibv_send_wr *)0)->wr.ud)) == 16",
                "offsetof(__typeof__(((struct ibv_send_wr *)0)->wr.ud), ah) == 0",
                "IBV_SRQ_LIMIT == (1 << 1)",
                "IBV_SRQT_XRC == (1)",
                "IBV_ODP_SUPPORT == (1)",
            ]
        );
    }

    #[test]
    fn checks__refuses_a_structure_without_a_c_name() {
        let layout = "\nlayout! {\n    Mw = 32 { rkey = 16 }\n}\n";
        assert!(checks("pub struct Mw {\n}\n", layout, "").is_err());
    }

    #[test]
    fn missing__forgives_the_first_version() {
        let set = |symbols: &[&str]| symbols.iter().map(|symbol| (*symbol).to_owned()).collect();
        let own = set(&["ibv_a IBVERBS_1.1"]);
        let theirs = set(&[
            "ibv_a IBVERBS_1.0",
            "ibv_a IBVERBS_1.1",
            "ibv_b IBVERBS_1.0",
            "local .text",
        ]);
        assert_eq!(missing(&theirs, &own), ["ibv_b IBVERBS_1.0"]);
    }

    #[test]
    fn map__has_each_name_with_its_version() {
        let text = "/* Versions. */\nV_1.0 {\n\tglobal:\n\t\tibv_a;\n\tlocal: *;\n};\n\nV_1.1 {\n\tglobal:\n\t\tibv_b;\n} V_1.0;\n";
        let symbols: Vec<Symbol> = map(text).into_iter().collect();
        assert_eq!(symbols, ["ibv_a V_1.0", "ibv_b V_1.1"]);
    }
}
