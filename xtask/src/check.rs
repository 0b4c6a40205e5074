//! C programs that use the drop-in library in ways that no packaged program does: `capi/checks`. Each describes its checks in its first comment.

use std::fs::{self, File};
use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::process::{Job, Signals, output};
use crate::{Outcome, installed, last_lines, rdmux, root, say};

#[derive(Args)]
pub(crate) struct Options {
    /// The program rdmux, with its libraries beside it [default: that of the release build]
    #[arg(long, value_name = "RDMUX")]
    binary: Option<PathBuf>,
    /// The address of the device
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    device: IpAddr,
    /// The threads' rounds many times over
    #[arg(long)]
    long: bool,
    /// Only those whose name has the word
    #[arg(long, value_name = "WORD", default_value = "")]
    only: String,
}

const HEADERS: &str = "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n";

pub(crate) fn run(options: &Options, signals: &Signals) -> Result<Outcome> {
    let work = tempfile::tempdir()?;
    if !installed("cc") || !compiles(HEADERS, work.path(), signals)? {
        let why =
            "there is no C compiler, or no headers of rdma-core (Debian: libibverbs-dev and librdmacm-dev)";
        return Ok(Outcome::Skipped(why.to_owned()));
    }
    let binary = rdmux(options.binary.as_deref())?;
    let mut sources = sources(&options.only)?;
    sources.sort();
    let mut passed = true;
    for source in sources {
        let check = Check::new(&source, work.path())?;
        let name = format!("capi/checks/{}", check.name);
        if let Some(missing) = check.missing(signals)? {
            say(format_args!("{:<8}{name}: there is no {missing}", "skipped"))?;
            continue;
        }
        if check.compile(signals)? && check.run(&binary, options, signals)? {
            say(format_args!("{:<8}{name}", "ok"))?;
        } else {
            passed = false;
            say(format_args!("{:<8}{name}", "FAILED"))?;
            for line in last_lines(&check.output, 20) {
                say(format_args!("  {line}"))?;
            }
        }
    }
    Ok(Outcome::of(passed))
}

fn sources(only: &str) -> Result<Vec<PathBuf>> {
    let folder = root().join("capi/checks");
    let mut sources = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or("");
        if path.extension().is_some_and(|extension| extension == "c") && name.contains(only) {
            sources.push(path);
        }
    }
    if sources.is_empty() {
        bail!("no program in capi/checks has '{only}' in its name");
    }
    Ok(sources)
}

/// Returns whether a C source compiles, which it writes to a file in `work`.
pub(crate) fn compiles(source: &str, work: &Path, signals: &Signals) -> Result<bool> {
    let file = work.join("compiles.c");
    fs::write(&file, source)?;
    let mut command = Command::new("cc");
    Ok(output(command.arg("-fsyntax-only").arg(file), signals)?
        .end
        .success())
}

/// A program of `capi/checks`.
struct Check<'a> {
    name: String,
    source: &'a Path,
    text: String,
    program: PathBuf,
    work: &'a Path,
    /// The file for the messages of the compiler and the program.
    output: PathBuf,
}

impl<'a> Check<'a> {
    fn new(source: &'a Path, work: &'a Path) -> Result<Self> {
        let name = source
            .file_stem()
            .context("a source without a name")?
            .to_string_lossy()
            .into_owned();
        Ok(Self {
            source,
            text: fs::read_to_string(source)?,
            program: work.join(&name),
            work,
            output: work.join(format!("{name}.output")),
            name,
        })
    }

    /// The library that the program is linked with besides rdma-core's, and its header: the comment `needs: -lx x.h` in the source.
    fn needs(&self) -> Option<(&str, &str)> {
        self.comment("needs")
    }

    /// A compiler of its own, and the command that starts the program as several processes: the comment `launcher: cc command...`.
    fn launcher(&self) -> Option<(&str, &str)> {
        self.comment("launcher")
    }

    /// Returns the first word and the rest of the line ` * what: ... */` in the source.
    fn comment(&self, what: &str) -> Option<(&str, &str)> {
        let mut lines = self.text.lines();
        let found = lines.find_map(|line| line.strip_prefix(" * ")?.strip_prefix(what)?.strip_prefix(": "));
        found?.strip_suffix(" */")?.split_once(' ')
    }

    /// Returns what this host lacks for the program: a compiler or a header.
    fn missing(&self, signals: &Signals) -> Result<Option<&str>> {
        if let Some((compiler, _)) = self.launcher() {
            return Ok((!installed(compiler)).then_some(compiler));
        }
        let Some((_, header)) = self.needs() else {
            return Ok(None);
        };
        let source = format!("#include <stddef.h>\n#include <{header}>\n");
        let found = compiles(&source, self.work, signals)?;
        Ok((!found).then_some(header))
    }

    /// Some sources are two programs: one that opens its library at run time, and a plugin.
    fn compile(&self, signals: &Signals) -> Result<bool> {
        let plugin = self.program.with_extension("so");
        Ok(self.compile_to(&self.program, &[], signals)?
            && (!self.text.lines().any(|line| line.starts_with("#ifdef PLUGIN"))
                || self.compile_to(&plugin, &["-fPIC", "-shared", "-DPLUGIN"], signals)?))
    }

    fn compile_to(&self, program: &Path, options: &[&str], signals: &Signals) -> Result<bool> {
        let mut command = Command::new(self.launcher().map_or("cc", |(compiler, _)| compiler));
        command
            .args(["-Wall", "-Werror", "-O1", "-pthread"])
            .args(options);
        command
            .arg("-o")
            .args([program, self.source])
            .arg("-Wl,--as-needed");
        command.args(self.needs().map(|(library, _)| library));
        command.args(["-lrdmacm", "-libverbs"]);
        let output = output(&command, signals)?;
        fs::write(&self.output, output.stderr)?;
        Ok(output.end.success())
    }

    fn run(&self, binary: &Path, options: &Options, signals: &Signals) -> Result<bool> {
        let (rounds, limit) = if options.long { ("3000", 1200) } else { ("60", 300) };
        let mut output = File::create(&self.output)?;
        let mut command = Command::new(binary);
        let launcher = self.launcher().map_or("", |(_, launcher)| launcher);
        command
            .args(["run", "--device", &options.device.to_string(), "--"])
            .args(launcher.split_whitespace())
            .arg(&self.program)
            .arg(rounds);
        let limit = Duration::from_secs(limit);
        let mut job = Job::start(&command, output.try_clone()?, output.try_clone()?, limit)?;
        let end = job.wait(signals)?;
        if !end.success() {
            writeln!(output, "{}: {end}", self.name)?;
        }
        Ok(end.success())
    }
}
