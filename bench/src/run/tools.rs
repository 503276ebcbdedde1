//! Programs the scenario needs, and where they are.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::peer::Peer;

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

/// Peers and load generators, as they call themselves.
pub(super) fn versions(peers: &[Peer]) -> anyhow::Result<Vec<String>> {
    let peers = peers
        .iter()
        .filter(|peer| **peer != Peer::None)
        .map(|peer| peer.version());
    let generators: [(&str, &[&str]); 3] = [("wrk", &["-v"]), ("h2load", &["--version"]), ("ghz", &["--version"])];
    let generators = generators.iter().map(|(program, args)| {
        let line = first_line(program, args)?;
        Ok(if line.starts_with(program) {
            line
        } else {
            format!("{program} {line}")
        })
    });
    peers.chain(generators).collect()
}

/// The first line a program prints, of either output.
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
