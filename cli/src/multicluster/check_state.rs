//! The input of the checks of Links: the state of this cluster and of the linked clusters.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, anyhow, bail, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::api::core::v1::{Endpoints, Pod, Secret, Service};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DynamicObject, ListParams, PostParams};
use kube::{Api, ResourceExt as _};
use tokio::time::timeout;
use tulle_control::kubernetes::credentials_expiry::EXPIRY_WARNING;
use tulle_control::kubernetes::{connect, remote_credentials};
use tulle_control::resources::meta::NamespacedName;
use tulle_core::names::{annotation, label, multicluster};

use super::check_trust::{self, ClusterTrust};
use super::extension::{
    self, CONTROLLER_SELECTOR, CREDENTIALS_SECRET_TYPE, EXTENSION_SELECTOR, LegacyController, links, target_cluster,
};
use super::gateways::{self, Probes};
use super::{check_permissions, check_routes};
use crate::check::data_plane;
use crate::kubernetes::{Cluster, reason, resource};

pub(super) struct MulticlusterState {
    /// The namespace of the extension.
    pub(super) namespace: Result<Option<String>, String>,
    pub(super) links: Result<Vec<LinkState>, String>,
    pub(super) trust: Result<ClusterTrust, String>,
    pub(super) controllers: Result<Vec<Controller>, String>,
    /// Whether this cluster has a gateway for other clusters.
    pub(super) has_gateway: Result<bool, String>,
    pub(super) mirrors: Result<Vec<MirrorService>, String>,
    /// The Secrets with the label of a linked cluster in the namespace of the control plane.
    pub(super) discovery_secrets: Result<Vec<DiscoverySecret>, String>,
    /// The pods of the extension without a proxy that is ready.
    pub(super) unready_proxies: Result<Vec<String>, String>,
    /// The routes of exported Services that have mirrors as backends.
    pub(super) routes_to_mirrors: Result<Vec<String>, String>,
}

pub(super) struct LinkState {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) cluster: String,
    pub(super) created_by: Option<String>,
    pub(super) has_gateway: bool,
    /// The linked cluster, read with the credentials of the Link.
    pub(super) target: Result<Target, String>,
    /// Whether the destination service accepts the Secret with the credentials for the linked cluster.
    pub(super) discovery_secret: Result<(), String>,
    /// The Secrets of its controller and of the destination service whose credentials expire soon, each with the time.
    pub(super) expiring_credentials: Vec<String>,
    /// Whether the objects that give its controller permissions exist.
    pub(super) permissions: Result<(), String>,
    /// An error with the cause if the status of the Link says that the exported Services cannot be read.
    pub(super) status: Result<(), String>,
    /// Whether the Service through which its controller probes the gateway has the port for it.
    pub(super) probe_service: Result<(), String>,
    /// Whether the gateway responds to probes. An error with the reason if it does not, or if this is not known.
    pub(super) gateway: Result<(), String>,
}

pub(super) struct Target {
    pub(super) trust: Result<ClusterTrust, String>,
}

pub(super) struct DiscoverySecret {
    pub(super) name: String,
    pub(super) cluster: String,
}

/// The Deployment of a service mirror.
pub(super) struct Controller {
    pub(super) namespace: String,
    pub(super) name: String,
    /// `None` if it mirrors the clusters of all Links of its namespace that have no controller of their own.
    pub(super) link_name: Option<String>,
    pub(super) available: i32,
    /// Whether the deprecated command `link` created it.
    pub(super) is_legacy: bool,
}

pub(super) struct MirrorService {
    pub(super) namespace: String,
    pub(super) name: String,
    /// `None` for federated Services.
    pub(super) cluster: Option<String>,
    /// The members of a federated Service in other clusters, as `<service>@<cluster>`.
    pub(super) members: Vec<String>,
    /// Whether its addresses are those of an Endpoints object in this cluster. For other mirrors, the destination service reads the
    /// addresses from the linked cluster.
    pub(super) needs_endpoints: bool,
    pub(super) has_endpoints: bool,
}

/// Reads the state of this cluster and of each linked cluster. `limit` is the timeout for each linked cluster, for finding the
/// controllers, and for the metrics of each controller.
pub(super) async fn gather(cluster: &Cluster, limit: Duration) -> MulticlusterState {
    let namespace = extension::namespace(cluster).await;
    let probes = match &namespace {
        Ok(Some(_)) => gateways::read_probes(cluster, limit).await,
        Ok(None) | Err(_) => Ok(Probes::default()),
    };
    let trust = check_trust::read_own(cluster).await;
    let trust = trust.map_err(|error| format!("{error:#}"));
    let link_states = match links(cluster).await {
        Ok(None) => Err("the kind is not installed".to_owned()),
        Ok(Some(found)) => {
            let mut states = Vec::new();
            for link in &found {
                let mut state = read_link_state(cluster, link, &probes, limit).await;
                if let (Ok(own), Ok(target)) = (&trust, &mut state.target)
                    && let Ok(target) = &mut target.trust
                {
                    Box::pin(check_trust::read_gateway_if_needed(own, target, link, limit)).await;
                }
                states.push(state);
            }
            Ok(states)
        }
        Err(error) => Err(format!("{error:#}")),
    };
    let unready_proxies = match &namespace {
        Ok(Some(namespace)) => Box::pin(unready_proxies(cluster, namespace)).await,
        Ok(None) | Err(_) => Ok(Vec::new()),
    };
    let mirrors = mirrors(cluster).await.map_err(|error| reason(&error));
    let through_gateway = mirrors.iter().flatten().filter(|mirror| mirror.needs_endpoints);
    let names: BTreeSet<_> = through_gateway
        .map(|mirror| NamespacedName::new(&*mirror.namespace, &*mirror.name))
        .collect();
    let routes_to_mirrors = Box::pin(check_routes::routes_to_mirrors(cluster, &names)).await;
    MulticlusterState {
        namespace: namespace.map_err(|error| format!("{error:#}")),
        links: link_states,
        trust,
        controllers: controllers(cluster).await.map_err(|error| reason(&error)),
        has_gateway: has_gateway(cluster).await.map_err(|error| reason(&error)),
        mirrors,
        discovery_secrets: discovery_secrets(cluster).await.map_err(|error| reason(&error)),
        unready_proxies: unready_proxies.map_err(|error| reason(&error)),
        routes_to_mirrors: routes_to_mirrors.map_err(|error| format!("{error:#}")),
    }
}

async fn read_link_state(
    cluster: &Cluster,
    link: &DynamicObject,
    probes: &Result<Probes, String>,
    limit: Duration,
) -> LinkState {
    let name = link.name_any();
    let target_name = target_cluster(link);
    let reading = timeout(limit, read_target(cluster, link));
    let target = match reading.await {
        Ok(read) => read.map_err(|error| format!("{error:#}")),
        Err(_) => Err(format!("no response within {limit:?}")),
    };
    let gateway = match probes {
        Ok(probes) => probes.check(&name, &target_name),
        Err(cause) => Err(cause.clone()),
    };
    let namespace = link.namespace().unwrap_or_default();
    let secret = credentials_secret(link);
    let permissions = Box::pin(check_permissions::check(cluster, &name, &namespace, secret)).await;
    let probe_service = Box::pin(check_probe_service(cluster, &name, &namespace)).await;
    LinkState {
        expiring_credentials: Box::pin(expiring_credentials(cluster, link)).await,
        permissions: permissions.map_err(|error| format!("{error:#}")),
        status: check_status(link),
        probe_service: probe_service.map_err(|error| format!("{error:#}")),
        has_gateway: link.data["spec"]["gatewayAddress"]
            .as_str()
            .is_some_and(|address| !address.is_empty()),
        created_by: link.annotations().get(annotation::CREATED_BY).cloned(),
        discovery_secret: check_discovery_secret(cluster, &target_name)
            .await
            .map_err(|error| format!("{error:#}")),
        cluster: target_name,
        namespace,
        name,
        target,
        gateway,
    }
}

/// Fails with the cause if the status says that the exported Services cannot be read. The status of a Link without exported
/// Services does not say so.
fn check_status(link: &DynamicObject) -> Result<(), String> {
    let status = &link.data["status"];
    let entries = ["mirrorServices", "federatedServices"].map(|field| status[field].as_array());
    let mut conditions = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| &entry["conditions"][0]);
    match conditions.find(|condition| condition["status"] == "Unknown") {
        Some(condition) => Err(condition["message"].as_str().unwrap_or_default().to_owned()),
        None => Ok(()),
    }
}

/// Reads the linked cluster with the credentials of its Link.
async fn read_target(cluster: &Cluster, link: &DynamicObject) -> anyhow::Result<Target> {
    let namespace = link.namespace().unwrap_or_default();
    let name = credentials_secret(link);
    let secret = read_secret(cluster, &namespace, name).await?;
    let access = remote_credentials::read(&secret)
        .await
        .with_context(|| format!("Secret {namespace}/{name}"))?;
    let client = connect::builder(access.config).context("creating a client")?.build();
    client
        .apiserver_version()
        .await
        .map_err(|error| anyhow!("{}", reason(&error)))?;
    for verb in ["get", "list", "watch"] {
        ensure!(
            may_access_services(&client, verb).await?,
            "the account of the Link may not {verb} Services of that cluster"
        );
    }
    let linkerd_namespace = link.data["spec"]["targetClusterLinkerdNamespace"]
        .as_str()
        .unwrap_or("linkerd");
    let target = Cluster {
        client,
        control_plane_namespace: linkerd_namespace.to_owned(),
        namespace: String::new(),
    };
    Ok(Target {
        trust: check_trust::read_target(&target)
            .await
            .map_err(|error| format!("{error:#}")),
    })
}

/// The name of the Secret with the credentials of a Link.
fn credentials_secret(link: &DynamicObject) -> &str {
    let name = link.data["spec"]["clusterCredentialsSecret"].as_str();
    name.unwrap_or_default()
}

/// Describes the copies of the credentials for a linked cluster that expire soon. Its controller has one copy, and the destination
/// service another. Other checks report a copy that cannot be read.
async fn expiring_credentials(cluster: &Cluster, link: &DynamicObject) -> Vec<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let namespace = link.namespace().unwrap_or_default();
    let discovery_secret = remote_credentials::secret_name(&target_cluster(link));
    let mut expiring = Vec::new();
    for (namespace, name) in [
        (&namespace, credentials_secret(link)),
        (&cluster.control_plane_namespace, &*discovery_secret),
    ] {
        let Ok(secret) = read_secret(cluster, namespace, name).await else {
            continue;
        };
        let access = remote_credentials::read(&secret).await;
        let expires_at = access.ok().and_then(|access| access.expires_at);
        if let Some(time) = expires_at.and_then(|expires_at| expiry_if_soon(expires_at, now.as_secs())) {
            expiring.push(format!("those in Secret {namespace}/{name} expire at {time}"));
        }
    }
    expiring
}

/// Formats the time at which credentials expire, if it is soon. Both arguments are in seconds since 1970.
fn expiry_if_soon(expires_at: u64, now: u64) -> Option<String> {
    let time = Timestamp::from_second(i64::try_from(expires_at).ok()?).ok()?;
    let is_soon = expires_at.saturating_sub(now) < EXPIRY_WARNING.as_secs();
    is_soon.then(|| time.to_string())
}

async fn may_access_services(client: &kube::Client, verb: &str) -> anyhow::Result<bool> {
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                verb: Some(verb.to_owned()),
                resource: Some("services".to_owned()),
                version: Some("v1".to_owned()),
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let api: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let review = api.create(&PostParams::default(), &review).await;
    let review = review.map_err(|error| anyhow!("reading the permissions of its account: {}", reason(&error)))?;
    Ok(review.status.is_some_and(|status| status.allowed))
}

/// Fails if the destination service would not accept the Secret.
async fn check_discovery_secret(cluster: &Cluster, target: &str) -> anyhow::Result<()> {
    let namespace = &cluster.control_plane_namespace;
    let name = remote_credentials::secret_name(target);
    let secret = read_secret(cluster, namespace, &name).await?;
    let read = remote_credentials::read_linked_cluster(&secret, target).await;
    read.map(drop).with_context(|| format!("Secret {namespace}/{name}"))
}

async fn discovery_secrets(cluster: &Cluster) -> Result<Vec<DiscoverySecret>, kube::Error> {
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), &cluster.control_plane_namespace);
    let labelled = ListParams::default()
        .labels(label::CREDENTIALS_OF_CLUSTER)
        .fields(&format!("type={CREDENTIALS_SECRET_TYPE}"));
    let secrets = cluster.list(&api, &labelled).await?;
    let described = secrets.iter().map(|secret| {
        let target = secret.labels().get(label::CREDENTIALS_OF_CLUSTER);
        DiscoverySecret {
            cluster: target.cloned().unwrap_or_default(),
            name: secret.name_any(),
        }
    });
    Ok(described.collect())
}

/// Fails if the controller of a Link has no Service through which it probes the gateway, or if this Service has no port for probes.
/// The number of the port may differ from that of the gateway, because the endpoints of the Service map it.
async fn check_probe_service(cluster: &Cluster, link: &str, namespace: &str) -> anyhow::Result<()> {
    let api: Api<Service> = Api::namespaced(cluster.client.clone(), namespace);
    let of_chart = multicluster::probe_service_of_chart(link);
    let of_service_mirror = multicluster::probe_service(link);
    let of_legacy = LegacyController::new(link).probe_service;
    for name in [&of_chart, &of_service_mirror, &of_legacy] {
        let service = api.get_opt(name).await;
        let service = service.map_err(|error| anyhow!("reading Service {namespace}/{name}: {}", reason(&error)))?;
        if let Some(service) = service {
            let mut ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
            let has_port = ports.any(|port| port.name.as_deref() == Some(multicluster::PROBE_PORT));
            ensure!(
                has_port,
                "the Service {namespace}/{name} has no port {}",
                multicluster::PROBE_PORT
            );
            return Ok(());
        }
    }
    bail!("there is no Service {namespace}/{of_service_mirror} or {of_chart}")
}

async fn read_secret(cluster: &Cluster, namespace: &str, name: &str) -> anyhow::Result<Secret> {
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), namespace);
    let secret = api.get_opt(name).await;
    let secret = secret.map_err(|error| anyhow!("reading Secret {namespace}/{name}: {}", reason(&error)))?;
    secret.with_context(|| format!("there is no Secret {namespace}/{name}"))
}

async fn controllers(cluster: &Cluster) -> Result<Vec<Controller>, kube::Error> {
    let api: Api<Deployment> = Api::all(cluster.client.clone());
    let found = cluster
        .list(&api, &ListParams::default().labels(CONTROLLER_SELECTOR))
        .await?;
    let controller = |deployment: Deployment| {
        let link_name = deployment.labels().get(label::MIRRORED_CLUSTER).cloned();
        let is_of_chart = deployment.labels().get("component").map(String::as_str) == Some("controller");
        Controller {
            namespace: deployment.namespace().unwrap_or_default(),
            name: deployment.name_any(),
            is_legacy: link_name.is_some() && !is_of_chart,
            link_name,
            available: deployment
                .status
                .and_then(|status| status.available_replicas)
                .unwrap_or_default(),
        }
    };
    // Deployments of other programs can have these labels, too.
    let controllers = found.into_iter().map(controller);
    let controllers =
        controllers.filter(|found| found.link_name.is_some() || found.name == multicluster::SERVICE_MIRROR);
    Ok(controllers.collect())
}

async fn has_gateway(cluster: &Cluster) -> Result<bool, kube::Error> {
    let api: Api<Deployment> = Api::all(cluster.client.clone());
    let of_gateways = ListParams::default().labels(&format!("{EXTENSION_SELECTOR},component=gateway"));
    Ok(!cluster.list(&api, &of_gateways).await?.is_empty())
}

async fn unready_proxies(cluster: &Cluster, namespace: &str) -> Result<Vec<String>, kube::Error> {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let pods = cluster
        .list(&api, &ListParams::default().labels(EXTENSION_SELECTOR))
        .await?;
    let is_unready = |pod: &&Pod| {
        let is_ready = data_plane::proxy_status(pod).is_some_and(|status| status.ready);
        !is_ready && !data_plane::is_terminated(pod)
    };
    let names = pods.iter().filter(is_unready);
    Ok(names
        .map(|pod| format!("{}/{}", resource::namespace(pod), pod.name_any()))
        .collect())
}

async fn mirrors(cluster: &Cluster) -> Result<Vec<MirrorService>, kube::Error> {
    let mirrored = ListParams::default().labels(&format!("{}=true", label::MIRRORED_SERVICE));
    let services = cluster
        .list(&Api::<Service>::all(cluster.client.clone()), &mirrored)
        .await?;
    let endpoints = cluster
        .list(&Api::<Endpoints>::all(cluster.client.clone()), &mirrored)
        .await?;
    let with_addresses: BTreeSet<_> = endpoints
        .iter()
        .filter(|endpoints| has_addresses(endpoints))
        .map(|endpoints| (endpoints.namespace(), endpoints.name_any()))
        .collect();
    let mirror = |service: &Service| {
        let is_discovered = [annotation::REMOTE_DISCOVERY, annotation::LOCAL_DISCOVERY]
            .iter()
            .any(|key| service.annotations().contains_key(*key))
            || service.labels().contains_key(label::REMOTE_DISCOVERY);
        let members = service.annotations().get(annotation::REMOTE_DISCOVERY);
        let members = members.map_or("", String::as_str).split(',').map(str::trim);
        MirrorService {
            namespace: service.namespace().unwrap_or_default(),
            name: service.name_any(),
            cluster: service.labels().get(label::MIRRORED_CLUSTER).cloned(),
            members: members.filter(|member| !member.is_empty()).map(str::to_owned).collect(),
            needs_endpoints: !is_discovered,
            has_endpoints: with_addresses.contains(&(service.namespace(), service.name_any())),
        }
    };
    Ok(services.iter().map(mirror).collect())
}

fn has_addresses(endpoints: &Endpoints) -> bool {
    let subsets = endpoints.subsets.iter().flatten();
    subsets.into_iter().any(|subset| {
        let ready = subset.addresses.as_ref().map_or(0, Vec::len);
        let unready = subset.not_ready_addresses.as_ref().map_or(0, Vec::len);
        ready + unready > 0
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    fn response(code: u16, body: &Value) -> Response<Body> {
        let body = Body::from(body.to_string().into_bytes());
        Response::builder().status(code).body(body).unwrap()
    }

    fn cluster(client: kube::Client) -> Cluster {
        Cluster {
            client,
            control_plane_namespace: "linkerd".to_owned(),
            namespace: "default".to_owned(),
        }
    }

    /// Checks how the controller of the Link `east` probes its gateway, in a cluster with one Service, which has one port.
    async fn check_probes(service: &'static str, port: &'static str) -> Result<(), String> {
        let api = tower::service_fn(move |req: Request<Body>| {
            let is_found = req.uri().path().rsplit('/').next() == Some(service);
            let (code, body) = match is_found {
                true => (
                    200,
                    json!({
                        "apiVersion": "v1", "kind": "Service", "metadata": {"name": service},
                        "spec": {"ports": [{"name": port, "port": 1}]},
                    }),
                ),
                false => (
                    404,
                    json!({"apiVersion": "v1", "kind": "Status", "code": 404, "reason": "NotFound", "message": "not found"}),
                ),
            };
            future::ready(Ok::<_, Infallible>(response(code, &body)))
        });
        let cluster = cluster(kube::Client::new(api, "default"));
        let checked = check_probe_service(&cluster, "east", "mesh").await;
        checked.map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn the_probe_service_of_a_link_has_the_port_for_probes() {
        for (service, port, expected) in [
            ("probe-east", "mc-probe", Ok(())),
            ("probe-gateway-east", "mc-probe", Ok(())),
            (
                "probe-east",
                "http",
                Err("the Service mesh/probe-east has no port mc-probe"),
            ),
            ("mirror-probe-east", "mc-probe", Ok(())),
            (
                "probe-north",
                "mc-probe",
                Err("there is no Service mesh/mirror-probe-east or probe-east"),
            ),
        ] {
            let found = check_probes(service, port).await;
            assert_eq!(found, expected.map_err(str::to_owned), "{service}, {port}");
        }
    }

    #[test]
    fn only_tokens_that_expire_within_a_week_have_a_time() {
        let week = 7 * 86_400;
        for (expires_at, now, expected) in [
            (week, 0, None),
            (week, 1, Some("1970-01-08T00:00:00Z")),
            // It has expired.
            (week, 2 * week, Some("1970-01-08T00:00:00Z")),
        ] {
            let found = expiry_if_soon(expires_at, now);
            assert_eq!(found.as_deref(), expected, "{expires_at} at {now}");
        }
    }
}
