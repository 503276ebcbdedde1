//! What the control plane writes to a cluster: leases, EndpointSlices of external workloads, statuses of policies.

mod leases;
mod slices;
mod statuses;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;
use kube::{Client, ResourceExt};
use serde_json::Value;
use tokio::task::JoinSet;
use tulle_control::resources::event::EventSink;
use tulle_control::resources::service::EndpointsSource;
use tulle_control::source::kubernetes::kinds::WatchRequirements;
use tulle_control::source::kubernetes::{self, Config};
use tulle_control::writeback;
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::ports::PortSet;
use tulle_core::readiness::Readiness;
use tulle_tests::charts::install_custom_resources;
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::{eventually, within};

/// The writing part of one control-plane process: the shared watches and the controllers.
struct Replica {
    registry: Registry,
    signal: drain::Signal,
    tasks: JoinSet<()>,
}

impl Replica {
    fn start(client: &Client, name: &str) -> Self {
        let registry = Registry::new();
        let (signal, drain) = drain::channel();
        let config = writeback::config::Config {
            controller_namespace: "linkerd".to_owned(),
            lease_holder: name.to_owned(),
            lease_owner_deployment: "linkerd-destination".to_owned(),
            write_slices: true,
            statuses: Some(writeback::config::StatusesConfig {
                cluster_domain: "cluster.local".to_owned(),
                cluster_networks: vec!["10.0.0.0/8".parse().unwrap()],
                global_egress_namespace: "linkerd-egress".to_owned(),
                default_opaque_ports: PortSet::default(),
                patch_timeout: Duration::from_secs(5),
            }),
        };
        let no_other_receiver = EventSink::new(|_| {});
        let (sink, controllers) = writeback::add_controllers(client, config, no_other_receiver, &registry, &drain);
        let mut tasks = JoinSet::new();
        for controller in controllers {
            tasks.spawn(controller.run);
        }
        let source = Config {
            requirements: WatchRequirements {
                destination: true,
                policy: true,
                endpoints_source: EndpointsSource::EndpointSlices,
            },
            log_addr: ":8086".to_owned(),
            stale_kinds: Readiness::new(),
        };
        let watching = kubernetes::run(client.clone(), source, sink, registry.clone(), drain);
        tasks.spawn(async move { watching.await.expect("the watches last as long as the replica") });
        Self {
            registry,
            signal,
            tasks,
        }
    }

    /// Stops as on SIGTERM.
    async fn end(mut self) {
        let ended = async {
            self.signal.drain().await;
            while let Some(ended) = self.tasks.join_next().await {
                ended.unwrap();
            }
        };
        within("the replica has ended", ended).await;
    }

    /// Stops as on SIGKILL.
    fn kill(mut self) {
        self.tasks.abort_all();
    }

    fn metric(&self, series: &str) -> f64 {
        let page = self.registry.render();
        let value = page
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }
}

/// Starts an API server with our custom resources and the namespaces `linkerd` and `simple-app`.
async fn api_server() -> ApiServer {
    let server = ApiServer::start().await.unwrap();
    install_custom_resources(&server).await.unwrap();
    for namespace in ["linkerd", "simple-app"] {
        server.create_namespace(namespace).await.unwrap();
    }
    server
}

async fn apply(server: &ApiServer, manifest: &Value) {
    let name = manifest["metadata"]["name"].as_str().expect("manifests have names");
    let kind = manifest["kind"].as_str().expect("manifests have kinds");
    let file = server.dir().join(format!("{kind}-{name}.json"));
    std::fs::write(&file, manifest.to_string()).unwrap();
    server
        .kubectl(&["apply", "--server-side", "-f", file.to_str().unwrap()])
        .await
        .unwrap();
}

async fn holder(server: &ApiServer, lease: &str) -> Option<String> {
    let leases = Api::<Lease>::namespaced(server.client(), "linkerd");
    let lease = leases.get_opt(lease).await.unwrap()?;
    lease.spec?.holder_identity.filter(|holder| !holder.is_empty())
}

async fn wait_for_leader(server: &ApiServer, lease: &str, replica: &str) {
    let what = format!("{replica} holds {lease}");
    eventually(&what, async || {
        (holder(server, lease).await.as_deref() == Some(replica)).then_some(())
    })
    .await;
}

const ENDPOINT_LEASE: &str = "linkerd-destination-endpoint-write";
const STATUS_LEASE: &str = "policy-controller-write";
