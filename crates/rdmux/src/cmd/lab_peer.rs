#[derive(clap::Args, Debug)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> anyhow::Result<()> {
    anyhow::bail!("not built")
}
