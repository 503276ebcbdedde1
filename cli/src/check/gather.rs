//! Takes a snapshot of a cluster: lists the objects that the checks need, and fetches certificates from pods.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use futures_util::{StreamExt as _, stream};
use http::Request;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde::de::DeserializeOwned;
use tulle_control::injector_webhook::audit::AuditFindings;

use super::scope::{Mode, Scope};
use super::snapshot::{ListError, ListResult, Permission, PermissionScope, Snapshot};
use super::trust::WEBHOOKS;
use super::{control_plane, data_plane, platform};
use crate::certificates::Certificate;
use crate::kubernetes::{Cluster, forward, reason, resource};
use crate::{identity, kubernetes};

/// Lists the objects that the checks need in any mode. Also reads what they need only in this mode: permissions, certificates and
/// the injection audit.
pub(super) async fn take_snapshot(cluster: Result<&Cluster, &str>, scope: &Scope) -> Snapshot {
    let mut snapshot = Snapshot::empty(scope.clone(), system_time());
    let cluster = match cluster {
        Ok(cluster) => cluster,
        Err(why) => {
            snapshot.client = Err(why.to_owned());
            return snapshot;
        }
    };
    match api_server_version(cluster).await {
        Ok((version, date)) => {
            snapshot.kubernetes_version = Ok(version);
            snapshot.now = date.unwrap_or(snapshot.now);
        }
        Err(why) => {
            snapshot.kubernetes_version = Err(why);
            return snapshot;
        }
    }
    Box::pin(list_objects(cluster, &mut snapshot)).await;
    fetch_permissions_certificates_and_audit(cluster, &mut snapshot).await;
    snapshot
}

/// Updates the state that can change while checks are repeated: the control plane's objects, and pods.
pub(super) async fn refresh(cluster: &Cluster, snapshot: &mut Snapshot) {
    let (client, namespace) = (&cluster.client, &cluster.control_plane_namespace);
    let cni = snapshot.scope.cni_namespace.clone();
    (
        snapshot.mutating_webhooks,
        snapshot.validating_webhooks,
        snapshot.api_services,
        snapshot.secrets,
        snapshot.deployments,
        snapshot.replica_sets,
        snapshot.cni_daemon_sets,
    ) = tokio::join!(
        list_all(cluster, "mutatingwebhookconfigurations", Api::all(client.clone())),
        list_all(cluster, "validatingwebhookconfigurations", Api::all(client.clone())),
        list_all(cluster, "apiservices", Api::all(client.clone())),
        list_namespaced(cluster, "secrets", namespace),
        list_namespaced(cluster, "deployments", namespace),
        list_namespaced(cluster, "replicasets", namespace),
        list_namespaced(cluster, "daemonsets", &cni),
    );
    match namespaces_to_refresh(snapshot) {
        None => snapshot.pods = list_all(cluster, "pods", Api::all(client.clone())).await,
        Some(namespaces) => {
            for namespace in namespaces {
                let listed = list_namespaced(cluster, "pods", &namespace).await;
                replace_pods(&mut snapshot.pods, &namespace, listed);
            }
        }
    }
    fetch_permissions_certificates_and_audit(cluster, snapshot).await;
}

/// The namespaces whose pods are listed again. `None` means all, which is also the case if the last listing failed.
fn namespaces_to_refresh(snapshot: &Snapshot) -> Option<BTreeSet<String>> {
    let scope = &snapshot.scope;
    let selected = scope.namespace.clone().filter(|_| scope.mode == Mode::Proxy);
    if snapshot.pods.is_err() || (scope.mode == Mode::Proxy && selected.is_none()) {
        return None;
    }
    let always = [scope.control_plane_namespace.clone(), scope.cni_namespace.clone()];
    Some(always.into_iter().chain(selected).collect())
}

/// Replaces the listed pods of one namespace.
fn replace_pods(pods: &mut ListResult<Pod>, namespace: &str, listed: ListResult<Pod>) {
    match (pods.as_mut(), listed) {
        (Ok(pods), Ok(listed)) => {
            pods.retain(|pod| resource::namespace(pod) != namespace);
            pods.extend(listed);
        }
        (Ok(_), Err(list_error)) => *pods = Err(list_error),
        (Err(_), _) => {}
    }
}

/// Reads what the checks of this mode need besides listed objects: the permissions of the user, certificates, and the injection
/// audit. Then reads the time of the API server.
async fn fetch_permissions_certificates_and_audit(cluster: &Cluster, snapshot: &mut Snapshot) {
    match snapshot.scope.mode {
        Mode::Pre => snapshot.permissions = check_permissions(cluster).await,
        Mode::Crds | Mode::ControlPlane => {}
        Mode::Installed => snapshot.webhook_certificates = webhook_certificates(cluster, snapshot).await,
        Mode::Proxy => {
            snapshot.webhook_certificates = webhook_certificates(cluster, snapshot).await;
            snapshot.proxy_certificates = proxy_certificates(cluster, snapshot).await;
            snapshot.injection_audit = injection_audit(cluster, snapshot).await;
        }
    }
    // Read last: a certificate that was renewed after the time was read would seem not yet valid.
    if let Ok((_, Some(date))) = api_server_version(cluster).await {
        snapshot.now = date;
    }
}

fn system_time() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// The version of the API server, and its clock as Unix time in seconds.
async fn api_server_version(cluster: &Cluster) -> Result<(String, Option<i64>), String> {
    let request = Request::get("/version")
        .body(kube::client::Body::empty())
        .map_err(|error| error.to_string())?;
    let exchange = async {
        let response = cluster.client.send(request).await.map_err(|error| reason(&error))?;
        let date = response
            .headers()
            .get(http::header::DATE)
            .and_then(|date| date.to_str().ok())
            .and_then(parse_http_date);
        let status = response.status();
        let body = response
            .into_body()
            .collect_bytes()
            .await
            .map_err(|error| reason(&error))?;
        if !status.is_success() {
            return Err(format!("the API server responded with status {status}"));
        }
        let info: serde_json::Value =
            serde_json::from_slice(&body).map_err(|error| format!("the API server's version is not JSON: {error}"))?;
        Ok((info["gitVersion"].as_str().unwrap_or_default().to_owned(), date))
    };
    tokio::time::timeout(REQUEST_TIMEOUT, exchange)
        .await
        .map_err(|_elapsed| format!("the API server did not respond within {REQUEST_TIMEOUT:?}"))?
}

/// Parses a date such as `Sat, 21 Nov 2026 12:00:00 GMT` to Unix time in seconds.
fn parse_http_date(text: &str) -> Option<i64> {
    let utc = format!("{}+0000", text.strip_suffix("GMT")?);
    let time = time::OffsetDateTime::parse(&utc, &time::format_description::well_known::Rfc2822).ok()?;
    Some(time.unix_timestamp())
}

async fn list_objects(cluster: &Cluster, snapshot: &mut Snapshot) {
    let (client, namespace) = (&cluster.client, &cluster.control_plane_namespace);
    (
        snapshot.namespaces,
        snapshot.crds,
        snapshot.cluster_roles,
        snapshot.cluster_role_bindings,
        snapshot.mutating_webhooks,
        snapshot.validating_webhooks,
        snapshot.api_services,
        snapshot.nodes,
        snapshot.node_leases,
    ) = tokio::join!(
        list_all(cluster, "namespaces", Api::all(client.clone())),
        list_all(cluster, "customresourcedefinitions", Api::all(client.clone())),
        list_all(cluster, "clusterroles", Api::all(client.clone())),
        list_all(cluster, "clusterrolebindings", Api::all(client.clone())),
        list_all(cluster, "mutatingwebhookconfigurations", Api::all(client.clone())),
        list_all(cluster, "validatingwebhookconfigurations", Api::all(client.clone())),
        list_all(cluster, "apiservices", Api::all(client.clone())),
        list_all(cluster, "nodes", Api::all(client.clone())),
        list_all(
            cluster,
            "leases of kube-node-lease",
            Api::namespaced(client.clone(), "kube-node-lease")
        ),
    );
    (
        snapshot.pods,
        snapshot.services,
        snapshot.config_maps,
        snapshot.secrets,
        snapshot.service_accounts,
        snapshot.deployments,
        snapshot.replica_sets,
        snapshot.cni_daemon_sets,
    ) = tokio::join!(
        list_all(cluster, "pods", Api::all(client.clone())),
        list_all(cluster, "services", Api::all(client.clone())),
        list_namespaced(cluster, "configmaps", namespace),
        list_namespaced(cluster, "secrets", namespace),
        list_namespaced(cluster, "serviceaccounts", namespace),
        list_namespaced(cluster, "deployments", namespace),
        list_namespaced(cluster, "replicasets", namespace),
        list_namespaced(cluster, "daemonsets", &snapshot.scope.cni_namespace),
    );
}

async fn list_namespaced<K>(cluster: &Cluster, what: &'static str, namespace: &str) -> ListResult<K>
where
    K: kube::Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    list_all(cluster, what, Api::namespaced(cluster.client.clone(), namespace)).await
}

async fn list_all<K: Clone + DeserializeOwned + Debug>(
    cluster: &Cluster,
    what: &'static str,
    api: Api<K>,
) -> ListResult<K> {
    let listed = cluster.list(&api, &ListParams::default()).await;
    listed.map_err(|error| ListError {
        kind: what,
        reason: reason(&error),
    })
}

async fn check_permissions(cluster: &Cluster) -> BTreeMap<Permission, Result<bool, String>> {
    let api: Api<SelfSubjectAccessReview> = Api::all(cluster.client.clone());
    let reviews = platform::required_permissions().into_iter().map(|permission| {
        let api = api.clone();
        let namespace = match permission.scope {
            PermissionScope::Cluster => None,
            PermissionScope::Namespace => Some(cluster.control_plane_namespace.clone()),
        };
        async move {
            let review = SelfSubjectAccessReview {
                spec: SelfSubjectAccessReviewSpec {
                    resource_attributes: Some(ResourceAttributes {
                        verb: Some(permission.verb.to_owned()),
                        group: Some(permission.group.to_owned()),
                        resource: Some(permission.resource.to_owned()),
                        namespace,
                        ..ResourceAttributes::default()
                    }),
                    ..SelfSubjectAccessReviewSpec::default()
                },
                ..SelfSubjectAccessReview::default()
            };
            let response = api.create(&PostParams::default(), &review).await;
            let allowed = response.map(|review| review.status.is_some_and(|status| status.allowed));
            (permission, allowed.map_err(|error| reason(&error)))
        }
    });
    stream::iter(reviews)
        .buffer_unordered(MAX_CONCURRENT_REQUESTS)
        .collect()
        .await
}

fn find_running_pod<'a>(snapshot: &'a Snapshot, component: &str) -> Option<&'a Pod> {
    let mut pods = control_plane::control_plane_pods(snapshot)
        .unwrap_or_default()
        .into_iter();
    pods.find(|pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        pod.labels().get(control_plane::COMPONENT).map(String::as_str) == Some(component) && phase == Some("Running")
    })
}

/// Fetches the certificate of each webhook from a running pod. For a webhook without a running pod, the checks use its Secret.
async fn webhook_certificates(cluster: &Cluster, snapshot: &Snapshot) -> BTreeMap<String, Result<Certificate, String>> {
    let requests = WEBHOOKS.iter().filter_map(|webhook| {
        let pod = find_running_pod(snapshot, webhook.component)?.name_any();
        let name = format!("{}.{}.svc", webhook.service, cluster.control_plane_namespace);
        Some(async move {
            let chain =
                identity::presented_chain(cluster, &cluster.control_plane_namespace, &pod, webhook.port, &name).await;
            let leaf = chain
                .map(|mut chain| chain.remove(0))
                .map_err(|error| format!("{error:#}"));
            (webhook.service.to_owned(), leaf)
        })
    });
    let requests: Vec<_> = requests.collect();
    stream::iter(requests)
        .buffer_unordered(MAX_CONCURRENT_REQUESTS)
        .collect()
        .await
}

async fn proxy_certificates(
    cluster: &Cluster,
    snapshot: &Snapshot,
) -> BTreeMap<String, Result<Vec<Certificate>, String>> {
    let pods = data_plane::meshed_pods(snapshot).unwrap_or_default();
    let trust_domain = snapshot
        .values()
        .ok()
        .as_ref()
        .map(identity::trust_domain)
        .unwrap_or_default();
    let requests: Vec<_> = pods
        .into_iter()
        .filter(|pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running"))
        .map(|pod| {
            let trust_domain = trust_domain.clone();
            async move {
                let chain = identity::fetch_certificate_chain(cluster, pod, &trust_domain).await;
                let name = format!("{}/{}", resource::namespace(pod), pod.name_any());
                (name, chain.map_err(|error| format!("{error:#}")))
            }
        })
        .collect();
    stream::iter(requests)
        .buffer_unordered(MAX_CONCURRENT_REQUESTS)
        .collect()
        .await
}

async fn injection_audit(cluster: &Cluster, snapshot: &Snapshot) -> Option<Result<AuditFindings, String>> {
    let pod = find_running_pod(snapshot, "proxy-injector")?;
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let (_, port) = containers
        .flat_map(resource::ports)
        .find(|(name, _)| *name == "injector-admin")?;
    let page = forward::get(
        cluster,
        &cluster.control_plane_namespace,
        &pod.name_any(),
        port,
        "/injection-audit",
    )
    .await;
    let findings =
        page.and_then(|page| serde_json::from_str(&page).context("parsing the injector's audit page as JSON"));
    Some(findings.map_err(|error| format!("{error:#}")))
}

/// Maximum number of concurrent requests to the cluster.
const MAX_CONCURRENT_REQUESTS: usize = 16;
const REQUEST_TIMEOUT: std::time::Duration = kubernetes::REQUEST_TIMEOUT;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refresh_replaces_the_pods_of_its_namespace() {
        let pod = |namespace: &str, name: &str| -> Pod {
            serde_json::from_value(serde_json::json!({ "metadata": { "namespace": namespace, "name": name } })).unwrap()
        };
        let mut pods = Ok(vec![pod("shop", "a"), pod("linkerd", "old")]);
        replace_pods(&mut pods, "linkerd", Ok(vec![pod("linkerd", "new")]));
        let names: Vec<String> = pods.iter().flatten().map(|pod| pod.name_any()).collect();
        assert_eq!(names, ["a", "new"]);
    }

    #[test]
    fn pods_that_could_not_be_listed_are_listed_again() {
        let mut snapshot = Snapshot::empty(super::super::tests::scope(Mode::Installed), 0);
        snapshot.pods = Ok(Vec::new());
        let namespaces = namespaces_to_refresh(&snapshot).unwrap();
        assert_eq!(namespaces.into_iter().collect::<Vec<_>>(), ["linkerd", "linkerd-cni"]);
        let failed = ListError {
            kind: "pods",
            reason: "timeout".to_owned(),
        };
        replace_pods(&mut snapshot.pods, "linkerd", Err(failed));
        assert_eq!(namespaces_to_refresh(&snapshot), None);
    }

    #[tokio::test]
    async fn a_refresh_reads_the_time_again() {
        let service = tower::service_fn(|_: Request<kube::client::Body>| {
            let response = http::Response::builder().header(http::header::DATE, "Sat, 21 Nov 2026 12:00:00 GMT");
            let body = kube::client::Body::from(b"{}".to_vec());
            std::future::ready(Ok::<_, std::convert::Infallible>(response.body(body).unwrap()))
        });
        let cluster = Cluster {
            client: kube::Client::new(service, "default"),
            control_plane_namespace: "linkerd".to_owned(),
            namespace: "default".to_owned(),
        };
        let mut snapshot = Snapshot::empty(super::super::tests::scope(Mode::Crds), 0);
        Box::pin(refresh(&cluster, &mut snapshot)).await;
        assert_eq!(snapshot.now, 1_795_262_400);
    }

    #[test]
    fn the_date_header_of_a_response_is_parsed() {
        assert_eq!(parse_http_date("Sat, 21 Nov 2026 12:00:00 GMT"), Some(1_795_262_400));
        assert_eq!(parse_http_date("yesterday"), None);
    }
}
