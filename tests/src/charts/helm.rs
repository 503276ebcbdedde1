//! Runs `helm` with its own files and settings.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::programs;
use anyhow::{Context as _, bail};
use tempfile::TempDir;

/// Helm with an empty home directory of its own, which is removed when this is dropped.
pub struct Helm {
    home: TempDir,
    kubeconfig: Option<PathBuf>,
}

impl Helm {
    /// For commands that need no cluster.
    ///
    /// # Errors
    /// Fails if its directory cannot be created.
    pub fn new() -> anyhow::Result<Self> {
        let home = tempfile::tempdir().context("creating a directory for helm")?;
        Ok(Self { home, kubeconfig: None })
    }

    /// For commands on a cluster.
    ///
    /// # Errors
    /// The same as [`Helm::new`].
    pub fn with_kubeconfig(kubeconfig: PathBuf) -> anyhow::Result<Self> {
        Ok(Self {
            kubeconfig: Some(kubeconfig),
            ..Self::new()?
        })
    }

    /// Runs Helm and returns its standard output.
    ///
    /// # Errors
    /// Fails if Helm fails; the error contains its output.
    pub fn run<S: AsRef<str>>(&self, args: &[S]) -> anyhow::Result<String> {
        let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
        let Output { status, stdout, stderr } = self.command()?.args(&args).output().context("starting helm")?;
        if !status.success() {
            bail!("helm {}: {}", args.join(" "), String::from_utf8_lossy(&stderr).trim());
        }
        String::from_utf8(stdout).context("the output of helm")
    }

    /// Renders a chart as for an installation in the namespace `linkerd`, as one YAML text.
    ///
    /// # Errors
    /// Fails if Helm fails; the error contains its output.
    pub fn template(&self, chart: &str, args: &[&str]) -> anyhow::Result<String> {
        let chart = chart_path(chart);
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
        // Without a kubeconfig, Helm must not use the one of the user.
        command.env(
            "KUBECONFIG",
            self.kubeconfig.as_deref().unwrap_or_else(|| Path::new("/dev/null")),
        );
        Ok(command)
    }
}

pub fn chart_path(chart: &str) -> String {
    format!("{}/../charts/{chart}", env!("CARGO_MANIFEST_DIR"))
}

/// The Kubernetes version that `helm template` assumes.
const KUBE_VERSION: &str = "1.34.2";
