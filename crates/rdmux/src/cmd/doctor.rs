//! `rdmux doctor`: looks at the host, reports problems and gives advice.

mod drives;
mod dsm;
mod host;
mod idle;
mod network;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::ddio;
use crate::output::{self, Align};

/// A check: its name and its function.
type Check = (&'static str, fn(&Path) -> Vec<Finding>);

/// All checks. A new check needs only a line here.
const CHECKS: [Check; 16] = [
    ("cpu", host::cpu),
    ("idle", idle::idle),
    ("port", network::port),
    ("mtu", network::mtu),
    ("gso", network::gso),
    ("buffers", network::buffers),
    ("memlock", host::memlock),
    ("hugepages", host::huge_pages),
    ("userns", host::user_namespaces),
    ("ptrace", host::ptrace),
    ("io_uring", host::io_uring),
    ("userfaultfd", host::userfaultfd),
    ("dsm", dsm::dsm),
    ("rnic", host::rnic),
    ("ddio", ddio::findings),
    ("drives", drives::drives),
];

/// Check this host: report each limit or obstacle, and its remedy.
///
/// The verdict of a check is `ok`; `limit`: rdmux works, but more slowly or with restrictions; `blocked`: something does not work; or
/// `unknown`: the check could not find out. The exit status is 1 when a verdict is blocked or unknown.
///
/// `ddio` finds the PCI root port above each RNIC and reports whether the RNIC's writes go to the processor's cache, where a power cut
/// loses them; `rdmux ddio` changes that. `drives` says what memory NVMe drives have, and what is missing to drive them from user space.
/// `dsm` says by which ways page faults of a shared memory can be answered (docs/dsm.md).
#[derive(clap::Args, Debug)]
#[command(after_help = "\
JSON: an array of objects: check, subject, verdict (ok, limit, blocked or unknown), what, advice (or null), details (by check, or null).")]
pub(crate) struct Args {
    /// Run only this check [default: all].
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(CHECKS.map(|(name, _)| name)))]
    check: Option<String>,
    /// Print JSON: an array of objects.
    #[arg(long)]
    json: bool,
    /// Root of the host's file system.
    #[arg(long, hide = true, default_value = "/")]
    root: PathBuf,
}

/// Meaning of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Ok,
    /// It works, but slower or with less than it could.
    Limit,
    /// Something does not work.
    Blocked,
    /// The check could not find out.
    Unknown,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::Limit => "limit",
            Verdict::Blocked => "blocked",
            Verdict::Unknown => "unknown",
        }
    }
}

/// Something that a check found.
#[derive(Debug)]
pub(crate) struct Finding {
    /// Subject of the finding, such as a device.
    subject: String,
    verdict: Verdict,
    what: String,
    advice: Option<String>,
    details: Value,
}

impl Finding {
    pub(crate) fn new(subject: &str, verdict: Verdict, what: String) -> Finding {
        Finding {
            subject: subject.to_owned(),
            verdict,
            what,
            advice: None,
            details: Value::Null,
        }
    }

    pub(crate) fn with_advice(self, advice: String) -> Finding {
        Finding {
            advice: Some(advice),
            ..self
        }
    }

    pub(crate) fn with_details(self, details: Value) -> Finding {
        Finding { details, ..self }
    }

    fn to_json(&self, check: &str) -> Value {
        json!({
            "check": check,
            "subject": self.subject,
            "verdict": self.verdict.word(),
            "what": self.what,
            "advice": self.advice,
            "details": self.details,
        })
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted = CHECKS
        .iter()
        .filter(|(name, _)| args.check.as_deref().is_none_or(|wanted| wanted == *name));
    let found: Vec<(&str, Finding)> = wanted
        .flat_map(|(name, look)| look(&args.root).into_iter().map(move |finding| (*name, finding)))
        .collect();
    if args.json {
        let list = found.iter().map(|(check, finding)| finding.to_json(check));
        output::say(&format!("{:#}", Value::Array(list.collect())));
        return verdict(&found);
    }
    let columns = [
        ("check", Align::Left),
        ("subject", Align::Left),
        ("verdict", Align::Left),
        ("what", Align::Left),
    ];
    let mut rows = Vec::new();
    for (check, finding) in &found {
        let row = [
            *check,
            finding.subject.as_str(),
            finding.verdict.word(),
            finding.what.as_str(),
        ];
        rows.push(row.map(str::to_owned).to_vec());
        if let Some(advice) = &finding.advice {
            rows.push(["", "", "", advice.as_str()].map(str::to_owned).to_vec());
        }
    }
    output::say(&output::table(&columns, &rows));
    verdict(&found)
}

/// Returns the text of a file of the host.
fn text(root: &Path, file: &str) -> Option<String> {
    std::fs::read_to_string(root.join(file)).ok()
}

/// Returns the number in a file of the host.
fn number(root: &Path, file: &str) -> Option<u64> {
    text(root, file)?.trim().parse().ok()
}

/// Fails if a finding is blocked or unknown, so that scripts notice.
fn verdict(found: &[(&str, Finding)]) -> Result<()> {
    let of = |verdict: Verdict| {
        let with = found.iter().filter(|(_, finding)| finding.verdict == verdict);
        let names: Vec<String> = with
            .map(|(check, finding)| match finding.subject.as_str() {
                "-" => (*check).to_owned(),
                subject => format!("{check} {subject}"),
            })
            .collect();
        names.join(", ")
    };
    let (blocked, unknown) = (of(Verdict::Blocked), of(Verdict::Unknown));
    if !blocked.is_empty() {
        bail!("these checks found an obstacle: {blocked}");
    }
    if !unknown.is_empty() {
        bail!("these checks could not find out: {unknown}");
    }
    Ok(())
}
