//! `rdmux generate`: man pages and completions, from the one definition of the command line.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap_complete::Shell;

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Prefix folder: the files go to share/man, share/bash-completion, share/zsh and share/fish below it.
    #[arg(value_name = "DIR")]
    into: PathBuf,
}

/// Path below a prefix where each shell looks for completions.
const SHELLS: [(Shell, &str); 3] = [
    (Shell::Bash, "share/bash-completion/completions/rdmux"),
    (Shell::Zsh, "share/zsh/site-functions/_rdmux"),
    (Shell::Fish, "share/fish/vendor_completions.d/rdmux.fish"),
];

pub(crate) fn run(args: &Args, mut command: clap::Command) -> Result<()> {
    let man = args.into.join("share/man/man1");
    folder(&man)?;
    clap_mangen::generate_to(command.clone(), &man)
        .with_context(|| format!("cannot write man pages into {}", man.display()))?;
    for (shell, path) in SHELLS {
        let path = args.into.join(path);
        folder(path.parent().unwrap_or(&args.into))?;
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut command, "rdmux", &mut script);
        fs::write(&path, script).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))
}
