//! x
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {}
pub(crate) fn main(_: &Args) -> anyhow::Result<()> { Ok(()) }
