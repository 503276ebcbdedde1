//! The programs that the benchmark starts, and the process itself: its descriptor limit and its output.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The path of another binary of tulle, in the directory of this program.
pub(super) fn sibling_binary(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program")?;
    let path = own.with_file_name(name);
    if !path.exists() {
        bail!("{} is missing; \"./run bench\" builds it", path.display());
    }
    Ok(path)
}

/// Checks that a program can be started.
pub(super) fn check_installed(name: &str) -> anyhow::Result<()> {
    match Command::new(name).arg("-v").output() {
        Ok(_) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("starting {name}; \"./run bench\" installs it")),
    }
}

/// The first line that a program prints to standard output or standard error.
pub(super) fn first_line(program: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> anyhow::Result<String> {
    let program = program.as_ref();
    let output = Command::new(program).args(args).output();
    let output = output.with_context(|| format!("starting {}", program.display()))?;
    let text = [output.stdout, output.stderr].concat();
    let line = String::from_utf8_lossy(&text)
        .lines()
        .map(str::trim)
        .find(|line| !line.is_empty())
        .map(str::to_owned);
    line.with_context(|| format!("{} {args:?} prints nothing", program.display()))
}

/// Raises the limit of file descriptors, because the idle rows open more connections than the default allows. Child processes
/// inherit the limit.
pub(super) fn raise_descriptor_limit() -> anyhow::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("reading the descriptor limit")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raising the descriptor limit")
}

pub(super) fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("writing to standard output")
}
