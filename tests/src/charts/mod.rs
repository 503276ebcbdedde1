//! The Helm charts of this repository, and how they are installed.

mod helm;
mod repository;

use std::fs;

use anyhow::Context as _;

pub use helm::{Helm, chart_path};
pub use repository::Repository;

use crate::cluster::ApiServer;

/// Installs all custom resources of tulle and of the Gateway API, and waits until they can be used.
///
/// # Errors
/// Fails if Helm or the API server fails.
pub async fn install_custom_resources(server: &ApiServer) -> anyhow::Result<()> {
    let definitions = Helm::new()?.template("tulle-crds", &["--set=installGatewayAPI=true"])?;
    fs::write(server.dir().join("crds.yaml"), definitions).context("writing a manifest")?;
    server.kubectl(&["apply", "--server-side", "-f", "crds.yaml"]).await?;
    server.wait_for_custom_resources().await
}
