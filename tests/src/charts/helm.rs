//! Runs `helm`, with files and settings of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::programs;
use anyhow::{Context as _, bail};
use tempfile::TempDir;

/// Helm with nothing from the user's home; its files go with it.
pub struct Helm {
    home: TempDir,
    kubeconfig: Option<PathBuf>,
}

impl Helm {
    /// For what needs no cluster.
    ///
    /// # Errors
    /// When there is no place for its files.
    pub fn new() -> anyhow::Result<Self> {
        let home = tempfile::tempdir().context("creating a directory for helm")?;
        Ok(Self { home, kubeconfig: None })
    }

    /// For a cluster.
    ///
    /// # Errors
    /// As [`Helm::new`].
    pub fn of(kubeconfig: PathBuf) -> anyhow::Result<Self> {
        Ok(Self {
            kubeconfig: Some(kubeconfig),
            ..Self::new()?
        })
    }

    /// What it prints.
    ///
    /// # Errors
    /// What it says when it fails.
    pub fn run<S: AsRef<str>>(&self, args: &[S]) -> anyhow::Result<String> {
        let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
        let Output { status, stdout, stderr } = self.command()?.args(&args).output().context("starting helm")?;
        if !status.success() {
            bail!("helm {}: {}", args.join(" "), String::from_utf8_lossy(&stderr).trim());
        }
        String::from_utf8(stdout).context("what helm prints")
    }

    /// A chart as it would be installed in the namespace `linkerd`, as one YAML text.
    ///
    /// # Errors
    /// What it says when it fails.
    pub fn template(&self, chart: &str, args: &[&str]) -> anyhow::Result<String> {
        let chart = path_of(chart);
        let fixed = [
            "template",
            chart.as_str(),
            "--namespace",
            "linkerd",
            "--kube-version",
            KUBE_VERSION,
        ];
        self.run(&[&fixed[..], args].concat())
    }

    fn command(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(programs::find("helm")?);
        command.current_dir(self.home.path());
        for (variable, dir) in [
            ("HELM_CACHE_HOME", "cache"),
            ("HELM_CONFIG_HOME", "config"),
            ("HELM_DATA_HOME", "data"),
        ] {
            command.env(variable, self.home.path().join(dir));
        }
        // Without one, nothing of the user's must be found by accident.
        command.env(
            "KUBECONFIG",
            self.kubeconfig.as_deref().unwrap_or_else(|| Path::new("/dev/null")),
        );
        Ok(command)
    }
}

/// The directory of a chart in this repository.
pub fn path_of(chart: &str) -> String {
    format!("{}/../charts/{chart}", env!("CARGO_MANIFEST_DIR"))
}

/// What `helm template` pretends to install on.
const KUBE_VERSION: &str = "1.34.2";
