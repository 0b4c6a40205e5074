//! `rdmux doctor`: looks at the host and says what stands in the way, and what to do.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::ddio;
use crate::output::{self, Align};

/// A check: its name, and what finds.
type Check = (&'static str, fn(&Path) -> Vec<Finding>);

/// All checks. One more is a line here.
const CHECKS: [Check; 1] = [("ddio", ddio::findings)];

/// Look at this host: what stands in the way, what is not known, and what to do about it.
///
/// `ddio` finds the PCI root port above each RNIC and says whether what it writes goes to the processor's cache, where a power cut
/// loses it; `rdmux ddio` changes that.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Only this check [default: all].
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(CHECKS.map(|(name, _)| name)))]
    check: Option<String>,
    /// Print JSON: a list of objects.
    #[arg(long)]
    json: bool,
    /// Where the file system of the host begins.
    #[arg(long, hide = true, default_value = "/")]
    root: PathBuf,
}

/// How what was found is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Ok,
    /// It could not be told.
    Unknown,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::Unknown => "unknown",
        }
    }
}

/// Something that a check found.
#[derive(Debug)]
pub(crate) struct Finding {
    /// What it is about, such as a device.
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
        return unless_unknown(&found);
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
    unless_unknown(&found)
}

/// What could not be told is a failure, so that scripts notice.
fn unless_unknown(found: &[(&str, Finding)]) -> Result<()> {
    let unknown: Vec<&str> = (found.iter())
        .filter(|(_, finding)| finding.verdict == Verdict::Unknown)
        .map(|(_, finding)| finding.subject.as_str())
        .collect();
    if unknown.is_empty() {
        Ok(())
    } else {
        bail!("not everything could be told: {}", unknown.join(", "))
    }
}
