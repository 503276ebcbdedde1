//! Programs the scenario needs, and where they are.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// One of our own binaries, beside this one.
pub(super) fn beside(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program")?;
    let path = own.with_file_name(name);
    if !path.exists() {
        bail!(
            "{} is missing: \"./run bench\" builds all that is measured",
            path.display()
        );
    }
    Ok(path)
}

/// Checks that a program can be started, before anything else is.
pub(super) fn installed(name: &str) -> anyhow::Result<()> {
    match Command::new(name).arg("-v").output() {
        Ok(_) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("starting {name}; \"./run bench\" installs what is missing")),
    }
}

/// The idle row opens more connections than the usual limit of descriptors allows; children inherit the new one.
pub(super) fn raise_descriptor_limit() -> anyhow::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("reading the descriptor limit")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raising the descriptor limit")
}

pub(super) fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("writing to standard output")
}
