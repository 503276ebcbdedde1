//! Kubernetes API client with TCP keep-alive, a rate limit, metrics and request logs. Also leader election by leases,
//! and a recorder of Events.

pub mod connect;
pub mod credentials_expiry;
pub mod event_recorder;
pub mod lease;
pub mod remote_credentials;
pub mod request_layer;
pub(crate) mod watches;

use std::path::PathBuf;

use http::HeaderValue;
use http::header::USER_AGENT;
use kube::Client;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use tulle_core::metrics::Registry;

use crate::kubernetes::request_layer::{RequestLayer, RequestRate};

/// Settings of the client of the API server.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// A kubeconfig file; its current context is used. Default none: the client uses the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    pub request_rate: RequestRate,
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
    #[error("reading the service account of this pod; outside of a cluster, pass --kubeconfig FILE or --manifests DIR")]
    ServiceAccount(#[source] InClusterError),
    #[error("creating a client for the API server at {server}")]
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
            request_rate: RequestRate { qps: 100.0, burst: 200 },
        }
    }
}

/// Creates a client of the API server of this cluster. Sends no request.
///
/// # Errors
/// Fails if the credentials cannot be read.
pub async fn client(config: &Config, registry: &Registry) -> Result<Client, ClientError> {
    let access = match &config.kubeconfig {
        Some(path) => config_from_kubeconfig(path.clone()).await?,
        None => kube::Config::incluster().map_err(ClientError::ServiceAccount)?,
    };
    build_client(access, config.request_rate, registry, None)
}

/// Creates a client of the API server of another cluster, whose name is a label of its metrics. Sends no request.
///
/// # Errors
/// Fails if the credentials are invalid.
pub(crate) fn remote_client(
    access: kube::Config,
    request_rate: RequestRate,
    registry: &Registry,
    cluster: &str,
) -> Result<Client, ClientError> {
    build_client(access, request_rate, registry, Some(cluster))
}

fn build_client(
    mut access: kube::Config,
    request_rate: RequestRate,
    registry: &Registry,
    cluster: Option<&str>,
) -> Result<Client, ClientError> {
    let agent = concat!("tulle-control/", env!("CARGO_PKG_VERSION"));
    access.headers.push((USER_AGENT, HeaderValue::from_static(agent)));
    let server = access.cluster_url.clone();
    let layer = RequestLayer::new(&server, request_rate, registry, cluster);
    let builder = connect::builder(access).map_err(|source| ClientError::Client {
        server: server.to_string(),
        source: Box::new(source),
    })?;
    Ok(builder.with_layer(&layer).build())
}

async fn config_from_kubeconfig(path: PathBuf) -> Result<kube::Config, ClientError> {
    let read = match Kubeconfig::read_from(&path) {
        Ok(kubeconfig) => kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await,
        Err(err) => Err(err),
    };
    read.map_err(|source| ClientError::Kubeconfig {
        path,
        source: Box::new(source),
    })
}
