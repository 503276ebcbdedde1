//! The API server of Kubernetes: a client with the credentials of a pod or of a kubeconfig, which notices a server that has
//! gone, keeps to a rate, counts its requests and logs them; leases, by which one of several replicas leads; and a recorder of Events. What else is
//! asked, and what becomes of the answers, is decided above.

pub mod connect;
pub mod lease;
pub mod recorder;
mod requests;

use std::path::PathBuf;

use http::HeaderValue;
use http::header::USER_AGENT;
use kube::Client;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use tulle_core::metrics::Registry;

use crate::kubernetes::requests::RequestsLayer;

/// How the API server is reached.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// A kubeconfig file, whose current context counts. Default none: the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    pub rate: Rate,
}

/// How often the API server is asked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Requests a second, in the long run. Default 100.
    pub qps: f64,
    /// Requests at once, after a pause. Default 200.
    pub burst: u32,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    #[error("reading the kubeconfig {path:?}")]
    Kubeconfig {
        path: PathBuf,
        #[source]
        source: Box<KubeconfigError>,
    },
    #[error("reading the service account of this pod; outside of a cluster, pass -kubeconfig FILE or --manifests DIR")]
    ServiceAccount(#[source] InClusterError),
    #[error("making a client of the API server at {server}")]
    Client {
        server: String,
        #[source]
        source: Box<kube::Error>,
    },
}

impl Default for Config {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            rate: Rate { qps: 100.0, burst: 200 },
        }
    }
}

/// A client of the API server; nothing is sent yet.
///
/// # Errors
/// Credentials that cannot be read.
pub async fn client(config: &Config, registry: &Registry) -> Result<Client, ClientError> {
    let mut access = match &config.kubeconfig {
        Some(path) => from_file(path.clone()).await?,
        None => kube::Config::incluster().map_err(ClientError::ServiceAccount)?,
    };
    let agent = concat!("tulle-control/", env!("CARGO_PKG_VERSION"));
    access.headers.push((USER_AGENT, HeaderValue::from_static(agent)));
    let server = access.cluster_url.clone();
    let layer = RequestsLayer::new(&server, config.rate, registry);
    let builder = connect::builder(access).map_err(|source| ClientError::Client {
        server: server.to_string(),
        source: Box::new(source),
    })?;
    Ok(builder.with_layer(&layer).build())
}

async fn from_file(path: PathBuf) -> Result<kube::Config, ClientError> {
    let read = match Kubeconfig::read_from(&path) {
        Ok(kubeconfig) => kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await,
        Err(err) => Err(err),
    };
    read.map_err(|source| ClientError::Kubeconfig {
        path,
        source: Box::new(source),
    })
}
