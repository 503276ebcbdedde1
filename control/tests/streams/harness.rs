//! A control plane that reads from a [`ManifestStore`], with gRPC clients in the same process.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::{Status, Streaming};
use tulle_control::cluster::remote_clusters::{AllClusters, RemoteClusters};
use tulle_control::cluster::{Cluster, Config};
use tulle_control::grpc::Service;
use tulle_control::tls::mesh_credentials::ClientCertificates;
use tulle_control::{destination, policy};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::destination::{DestinationProfile, GetDestination, Http2ClientParams, Update, WeightedAddr, update};
use tulle_proto::inbound::inbound_server_policies_client::InboundServerPoliciesClient;
use tulle_proto::inbound::{PortSpec, Server};
use tulle_proto::outbound::outbound_policies_client::OutboundPoliciesClient;
use tulle_proto::outbound::{OutboundPolicy, TrafficSpec, traffic_spec};

use crate::manifest_store::ManifestStore;

/// A control plane without proxies, with clients that send the requests of proxies.
pub(crate) struct Mesh {
    pub(crate) manifests: ManifestStore,
    pub(crate) cluster: Cluster,
    pub(crate) remote_clusters: RemoteClusters,
    pub(crate) registry: Registry,
    _signal: drain::Signal,
    source: JoinHandle<()>,
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.source.abort();
    }
}

/// Starts a control plane and waits until it has read these manifests.
pub(crate) async fn mesh(yaml: &str) -> Mesh {
    mesh_with(yaml, Config::default()).await
}

pub(crate) async fn mesh_with(yaml: &str, config: Config) -> Mesh {
    let registry = Registry::new();
    let (signal, drain) = drain::channel();
    let manifests = ManifestStore::new(yaml, &registry).await;
    let cluster = Cluster::new(config.clone(), &registry);
    let source = manifests.source(&config, cluster.sink(), &registry, drain).await;
    let source = tokio::spawn(source);
    with_timeout(cluster.synced()).await;
    Mesh {
        manifests,
        cluster,
        remote_clusters: RemoteClusters::default(),
        registry,
        _signal: signal,
        source,
    }
}

/// Waits for a future. Panics after 20 seconds.
pub(crate) async fn with_timeout<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future)
        .await
        .expect("the result arrives within 20 seconds")
}

/// Waits until the condition is true.
pub(crate) async fn eventually(condition: impl Fn() -> bool) {
    with_timeout(async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

impl Mesh {
    /// Errors in the manifests.
    pub(crate) fn errors(&self) -> Vec<String> {
        self.manifests.errors()
    }

    pub(crate) fn destination(
        &self,
        config: destination::config::Config,
    ) -> DestinationClient<Service<destination::server::Service>> {
        let clusters = AllClusters {
            local: self.cluster.clone(),
            remote: self.remote_clusters.clone(),
        };
        DestinationClient::new(destination::server(clusters, ClientCertificates::Optional, config))
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Streaming<Update>, Status> {
        self.get_from(path, "").await
    }

    pub(crate) async fn get_from(&self, path: &str, token: &str) -> Result<Streaming<Update>, Status> {
        self.get_with(destination::config::Config::default(), path, token).await
    }

    pub(crate) async fn get_with(
        &self,
        config: destination::config::Config,
        path: &str,
        token: &str,
    ) -> Result<Streaming<Update>, Status> {
        with_timeout(self.destination(config).get(target(path, token)))
            .await
            .map(tonic::Response::into_inner)
    }

    /// As `get_from`, of a client that supports fallback endpoints.
    pub(crate) async fn get_with_fallback(&self, path: &str, token: &str) -> Result<Streaming<Update>, Status> {
        let request = GetDestination {
            accepts_fallback: true,
            ..target(path, token)
        };
        let mut client = self.destination(destination::config::Config::default());
        let response = with_timeout(client.get(request)).await?;
        Ok(response.into_inner())
    }

    pub(crate) async fn get_profile(&self, path: &str, token: &str) -> Result<Streaming<DestinationProfile>, Status> {
        // With HTTP/2 settings, so that a response shows whether its endpoint is meshed.
        let config = destination::config::Config {
            http2: Some(Http2ClientParams::default()),
            ..destination::config::Config::default()
        };
        self.get_profile_with(config, path, token).await
    }

    pub(crate) async fn get_profile_with(
        &self,
        config: destination::config::Config,
        path: &str,
        token: &str,
    ) -> Result<Streaming<DestinationProfile>, Status> {
        with_timeout(self.destination(config).get_profile(target(path, token)))
            .await
            .map(tonic::Response::into_inner)
    }

    /// Returns the first profile of a stream of `GetProfile`.
    pub(crate) async fn first_profile(&self, path: &str) -> DestinationProfile {
        next(&mut self.get_profile(path, "").await.unwrap()).await
    }

    /// Returns the stream of `WatchPort`.
    pub(crate) async fn watch_port(&self, workload: &str, port: u32) -> Result<Streaming<Server>, Status> {
        let server = policy::inbound_server(self.cluster.clone(), ClientCertificates::Optional);
        let request = PortSpec {
            workload: workload.to_owned(),
            port,
        };
        let mut client = InboundServerPoliciesClient::new(server);
        with_timeout(client.watch_port(request))
            .await
            .map(tonic::Response::into_inner)
    }

    /// Returns the response of `GetPort`.
    pub(crate) async fn get_port(&self, workload: &str, port: u32) -> Result<Server, Status> {
        let server = policy::inbound_server(self.cluster.clone(), ClientCertificates::Optional);
        let request = PortSpec {
            workload: workload.to_owned(),
            port,
        };
        let mut client = InboundServerPoliciesClient::new(server);
        with_timeout(client.get_port(request))
            .await
            .map(tonic::Response::into_inner)
    }

    pub(crate) async fn watch_policy(&self, workload: &str, target: &str) -> Result<Streaming<OutboundPolicy>, Status> {
        let config = policy::config::Config::default();
        let server = policy::outbound_server(self.cluster.clone(), ClientCertificates::Optional, config);
        let target = match target.parse::<std::net::SocketAddr>() {
            Ok(addr) => traffic_spec::Target::Addr(addr.into()),
            Err(_) => traffic_spec::Target::Authority(target.to_owned()),
        };
        let request = TrafficSpec {
            source_workload: workload.to_owned(),
            target: Some(target),
        };
        with_timeout(OutboundPoliciesClient::new(server).watch(request))
            .await
            .map(tonic::Response::into_inner)
    }

    pub(crate) async fn get_policy(&self, workload: &str, target: &str) -> Result<OutboundPolicy, Status> {
        Ok(next(&mut self.watch_policy(workload, target).await?).await)
    }
}

pub(crate) fn target(path: &str, token: &str) -> GetDestination {
    GetDestination {
        path: path.to_owned(),
        context_token: token.to_owned(),
        ..GetDestination::default()
    }
}

/// Returns the next message of a stream. Panics if the stream has ended.
pub(crate) async fn next<T>(stream: &mut Streaming<T>) -> T {
    with_timeout(stream.message())
        .await
        .unwrap()
        .expect("the stream is open")
}

/// Formats an update: `+` and the added addresses, `-` and the removed ones; without endpoints, `1` if the service exists, else
/// `0`.
pub(crate) fn update_summary(update: &Update) -> String {
    let socket = |addr: tulle_proto::net::TcpAddress| std::net::SocketAddr::try_from(addr).unwrap().to_string();
    match update.update.as_ref().unwrap() {
        update::Update::Add(set) => {
            let addrs: Vec<_> = set
                .addrs
                .iter()
                .map(|weighted| socket(weighted.addr.unwrap()))
                .collect();
            format!("+{}", addrs.join(","))
        }
        update::Update::Remove(set) => {
            let addrs: Vec<_> = set.addrs.iter().map(|addr| socket(*addr)).collect();
            format!("-{}", addrs.join(","))
        }
        update::Update::NoEndpoints(none) => format!("{}", u8::from(none.exists)),
    }
}

/// Returns the addresses that an update adds.
pub(crate) fn added(update: Update) -> Vec<WeightedAddr> {
    match update.update {
        Some(update::Update::Add(set)) => set.addrs,
        other => panic!("no addition: {other:?}"),
    }
}
