//! The embedded charts, and their rendering by the program `helm`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use serde::Deserialize as _;
use serde_json::Value;
use tempfile::TempDir;

/// A chart, and the name of its release in Linkerd's documentation.
pub(crate) struct Chart {
    name: &'static str,
    release: &'static str,
}

pub(crate) const CRDS: Chart = Chart {
    name: "tulle-crds",
    release: "linkerd-crds",
};
pub(crate) const CONTROL_PLANE: Chart = Chart {
    name: "tulle-control-plane",
    release: "linkerd-control-plane",
};

pub(crate) const MULTICLUSTER: Chart = Chart {
    name: "tulle-multicluster",
    release: "linkerd-multicluster",
};

/// The Helm binary, and a directory with the charts.
pub(crate) struct Helm {
    program: PathBuf,
    charts: TempDir,
    namespace: String,
    kubernetes_version: String,
}

impl Helm {
    /// Finds Helm, and writes the charts to a directory.
    ///
    /// # Errors
    /// Fails if Helm is not found.
    pub(crate) fn find(namespace: &str) -> anyhow::Result<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let name = format!("helm{}", std::env::consts::EXE_SUFFIX);
        let program = std::env::split_paths(&path)
            .map(|dir| dir.join(&name))
            .find(|program| program.is_file());
        let Some(program) = program else {
            bail!("{}", HELM_NOT_FOUND)
        };
        let charts = tempfile::Builder::new()
            .prefix("tulle-charts-")
            .tempdir()
            .context("creating a directory for the charts")?;
        for (name, text) in CHART_FILES {
            write(charts.path(), name, text)?;
        }
        for (name, text) in MERGE_CHART_FILES {
            write(charts.path(), name, text)?;
        }
        Ok(Self {
            program,
            charts,
            namespace: namespace.to_owned(),
            kubernetes_version: MIN_KUBERNETES_VERSION.to_owned(),
        })
    }

    /// Sets the Kubernetes version for which charts are rendered. If it is unknown, charts are rendered for the oldest version that
    /// they accept.
    pub(crate) fn with_kubernetes_version(self, version: Option<&str>) -> Self {
        let known = version.filter(|version| version.starts_with('v'));
        Self {
            kubernetes_version: known.unwrap_or(MIN_KUBERNETES_VERSION).to_owned(),
            ..self
        }
    }

    /// Renders the manifests of a chart with these values, in installation order.
    ///
    /// # Errors
    /// Fails with Helm's message if the chart rejects the values.
    pub(crate) fn render(&self, chart: &Chart, values: &Value) -> anyhow::Result<Vec<Value>> {
        let file = self.charts.path().join("values-of-tulle.yaml");
        // The file can contain the issuer's key. Only the current user can access its directory.
        fs::write(&file, serde_yaml_ng::to_string(values).context("writing the values")?)
            .with_context(|| format!("writing {file:?}"))?;
        self.run_helm_template(chart, &["--values".into(), file.into_os_string()])
    }

    /// Merges these `--values` and `--set` arguments, as Helm does.
    ///
    /// # Errors
    /// Fails if a file cannot be read, or if an assignment is invalid.
    pub(crate) fn merge(&self, args: &[std::ffi::OsString]) -> anyhow::Result<Value> {
        let merge = Chart {
            name: "merge",
            release: "merge",
        };
        let mut documents = self.run_helm_template(&merge, args)?;
        Ok(documents.pop().unwrap_or_else(|| Value::Object(serde_json::Map::new())))
    }

    /// The path of a chart's values for high availability.
    pub(crate) fn high_availability_values(&self, chart: &Chart) -> PathBuf {
        self.charts.path().join(chart.name).join("values-ha.yaml")
    }

    /// The path of a file in the directory of the charts.
    pub(crate) fn path_beside_charts(&self, name: &str) -> PathBuf {
        self.charts.path().join(name)
    }

    fn run_helm_template(&self, chart: &Chart, args: &[std::ffi::OsString]) -> anyhow::Result<Vec<Value>> {
        let output = Command::new(&self.program)
            .arg("template")
            .arg(chart.release)
            .arg(self.charts.path().join(chart.name))
            .args([
                "--namespace",
                &self.namespace,
                "--kube-version",
                &self.kubernetes_version,
            ])
            .args(args)
            .output()
            .with_context(|| format!("running {:?}", self.program))?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr);
            bail!(
                "helm template {}: {}",
                chart.name,
                message.trim().trim_start_matches("Error: ")
            );
        }
        let text = String::from_utf8(output.stdout).context("decoding the output of helm template")?;
        documents(&text).with_context(|| format!("parsing the output of helm template for {}", chart.name))
    }
}

/// Parses a YAML stream without its empty documents.
pub(crate) fn documents(text: &str) -> anyhow::Result<Vec<Value>> {
    let documents = serde_yaml_ng::Deserializer::from_str(text).map(Value::deserialize);
    let documents: Vec<Value> = documents.collect::<Result<_, _>>()?;
    Ok(documents.into_iter().filter(|document| !document.is_null()).collect())
}

fn write(dir: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let path = dir.join(name);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("creating {parent:?}"))?;
    }
    fs::write(&path, text).with_context(|| format!("writing {path:?}"))
}

/// All files of the charts, with their paths below `charts/`.
const CHART_FILES: &[(&str, &str)] = &include!(concat!(env!("OUT_DIR"), "/charts.rs"));

/// A chart that renders its values. Helm merges the values, so that `--set` has the same meaning as in Helm.
const MERGE_CHART_FILES: &[(&str, &str)] = &[
    ("merge/Chart.yaml", "apiVersion: v2\nname: merge\nversion: 0.0.0\n"),
    ("merge/templates/values.yaml", "{{ toYaml .Values }}\n"),
];

const MIN_KUBERNETES_VERSION: &str = "v1.31.0";

const HELM_NOT_FOUND: &str = "\
helm, which renders the charts, is not on the PATH; install it (https://helm.sh/docs/intro/install), or install on \
a machine that has Helm:
  helm repo add tulle https://tulle-mesh.github.io/tulle
  helm install linkerd-crds tulle/tulle-crds -n linkerd --create-namespace --set installGatewayAPI=true
  helm install linkerd-control-plane tulle/tulle-control-plane -n linkerd --set-file identityTrustAnchorsPEM=ca.crt \
--set-file identity.issuer.tls.crtPEM=issuer/crt.pem --set-file identity.issuer.tls.keyPEM=issuer/key.pem";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_charts_are_embedded() {
        for name in [
            "tulle-crds/Chart.yaml",
            "tulle-crds/values.yaml",
            "tulle-control-plane/Chart.yaml",
            "tulle-control-plane/values.yaml",
            "tulle-control-plane/values-ha.yaml",
            "tulle-multicluster/values-ha.yaml",
        ] {
            assert!(
                CHART_FILES.iter().any(|(file, text)| *file == name && !text.is_empty()),
                "{name}"
            );
        }
    }

    #[test]
    fn empty_documents_are_omitted() {
        let read = documents("# Source: a\n---\na: 1\n---\n# nothing\n---\nb: 2\n").unwrap();
        assert_eq!(read, [serde_json::json!({ "a": 1 }), serde_json::json!({ "b": 2 })]);
    }
}
