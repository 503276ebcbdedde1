//! Programs the scenario needs, and where they are.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// One of our own binaries, beside this one.
pub(super) fn beside(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program")?;
    let path = own.with_file_name(name);
    if !path.exists() {
        bail!(
            "{} is missing: build it first, or leave the peer tulle out with --peers haproxy,none",
            path.display()
        );
    }
    Ok(path)
}

/// Checks that a program of the system can be started.
pub(super) fn installed(name: &str, package: &str) -> anyhow::Result<()> {
    match Command::new(name).arg("-v").output() {
        Ok(_) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("starting {name}; it is in Debian's package {package}")),
    }
}

/// The gRPC load generator, built with Go when it is not there yet.
pub(super) fn ghz() -> anyhow::Result<PathBuf> {
    let cache = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
        (_, Some(home)) => Path::new(&home).join(".cache"),
        _ => bail!("neither XDG_CACHE_HOME nor HOME is set, so there is no place for ghz"),
    };
    let bin = cache.join("tulle/bin");
    let ghz = bin.join("ghz");
    if !ghz.exists() {
        eprintln!("building {GHZ} into {}", bin.display());
        let status = Command::new("go").args(["install", GHZ]).env("GOBIN", &bin).status();
        let status = status.context("starting go; it is needed once, to build ghz")?;
        anyhow::ensure!(status.success(), "go install {GHZ} failed with {status}");
    }
    Ok(ghz)
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

const GHZ: &str = "github.com/bojand/ghz/cmd/ghz@v0.120.0";
