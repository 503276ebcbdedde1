//! Linkerd's programs and images, built outside of this repository, for tests of interoperation.

use std::path::PathBuf;
use std::{env, fs};

use anyhow::{Context as _, ensure};
use tokio::process::Command;

use crate::commands;

/// The directory that `TULLE_TEST_LINKERD` names.
pub struct Linkerd {
    dir: PathBuf,
}

/// Which parts of a cluster are Linkerd's. The others are tulle's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LinkerdParts {
    None,
    /// The multicluster extension, and the commands for it.
    Multicluster,
    /// The control plane and the proxies.
    ControlPlane,
    /// The control plane, the proxies and the multicluster extension.
    All,
}

impl LinkerdParts {
    /// Whether the control plane and the proxies are Linkerd's.
    pub fn include_control_plane(self) -> bool {
        matches!(self, Self::ControlPlane | Self::All)
    }

    /// Whether the multicluster extension is Linkerd's.
    pub fn include_multicluster(self) -> bool {
        matches!(self, Self::Multicluster | Self::All)
    }
}

impl Linkerd {
    /// # Errors
    /// Fails if `TULLE_TEST_LINKERD` is not set.
    pub fn from_env() -> anyhow::Result<Self> {
        let dir = env::var_os("TULLE_TEST_LINKERD")
            .context("set TULLE_TEST_LINKERD to a directory with Linkerd's programs and images")?;
        Ok(Self { dir: dir.into() })
    }

    /// The program `linkerd`.
    pub fn program(&self) -> PathBuf {
        self.dir.join("linkerd")
    }

    /// The program `controller`, which has the service mirror and the destination service as subcommands.
    pub fn controller(&self) -> PathBuf {
        self.dir.join("controller")
    }

    /// The numbers of the version of the program `controller`, such as 26, 8 and 3 of `edge-26.8.3`: that of its build, or else the
    /// value of the variable `LINKERD_CONTAINER_VERSION_OVERRIDE`.
    ///
    /// # Errors
    /// Fails if the program cannot be started or fails, or if it is no edge version.
    pub async fn controller_version(&self) -> anyhow::Result<Vec<u32>> {
        let mut controller = Command::new(self.controller());
        controller.args(["service-mirror", "-version"]);
        let line = format!("{} service-mirror -version", self.controller().display());
        let output = commands::output(&line, controller).await?;
        let answer = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{line}: {}", answer.trim());
        let name = String::from_utf8_lossy(&output.stdout);
        let numbers = name.trim().strip_prefix("edge-").unwrap_or_default().split('.');
        let version: Result<Vec<u32>, _> = numbers.map(str::parse).collect();
        version.with_context(|| {
            format!("{name} is no edge version; LINKERD_CONTAINER_VERSION_OVERRIDE can be one (2.18 is edge-25.4.4)")
        })
    }

    /// The docker archives of the images that the manifests of the program name: all files that end in `.tar`.
    ///
    /// # Errors
    /// Fails if the directory cannot be read.
    pub fn images(&self) -> anyhow::Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.dir).with_context(|| format!("reading {}", self.dir.display()))?;
        let paths = entries.map(|entry| Ok(entry.context("reading a directory")?.path()));
        let paths: Vec<PathBuf> = paths.collect::<anyhow::Result<_>>()?;
        let is_archive = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "tar");
        Ok(paths.into_iter().filter(is_archive).collect())
    }
}
