//! Kubeconfig files.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use k8s_openapi::ByteString;
use serde_json::{Value, json};

/// Writes a kubeconfig as JSON, which is also YAML. It contains the certificate of the CA, because `linkerd multicluster link-gen`
/// would pass its path on to the other cluster.
///
/// `user` is the value of `users[].user`: certificates or a token.
pub(super) fn write(path: &Path, server: &str, ca: &Path, user: &Value) -> anyhow::Result<()> {
    let ca = fs::read(ca).with_context(|| format!("reading {}", ca.display()))?;
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": {"server": server, "certificate-authority-data": ByteString(ca)}}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "user"}}],
        "current-context": "tests",
    });
    fs::write(path, config.to_string()).with_context(|| format!("writing {}", path.display()))
}

/// A user that authenticates with the certificate `<pki>/<name>.crt`.
pub(super) fn certificate_user(pki: &Path, name: &str) -> Value {
    json!({
        "client-certificate": pki.join(format!("{name}.crt")),
        "client-key": pki.join(format!("{name}.key")),
    })
}

/// A client with the credentials of a kubeconfig.
///
/// # Errors
/// Fails if the file cannot be read, or is invalid.
pub async fn client(path: &Path) -> anyhow::Result<kube::Client> {
    let file = kube::config::Kubeconfig::read_from(path)?;
    let config = kube::Config::from_custom_kubeconfig(file, &kube::config::KubeConfigOptions::default()).await?;
    Ok(kube::Client::try_from(config)?)
}
