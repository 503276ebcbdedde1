//! Checks of the cluster itself: the API server answers, the version is supported, and the user is allowed to install a mesh.

use kube::ResourceExt as _;

use super::category::{Category, Check};
use super::problem::{CheckResult, Problem, error, listing, warning};
use super::snapshot::{Permission, PermissionScope, Snapshot};

pub(super) fn kubernetes_api() -> Category {
    Category {
        name: "kubernetes-api",
        checks: vec![
            Check::new("can initialize the client", client_is_created).fatal(),
            Check::new("can query the Kubernetes API", api_is_reachable).fatal(),
        ],
    }
}

pub(super) fn kubernetes_version() -> Category {
    Category {
        name: "kubernetes-version",
        checks: vec![Check::new(
            "is running the minimum Kubernetes API version",
            kubernetes_is_new_enough,
        )],
    }
}

pub(super) fn gateway_api() -> Category {
    Category {
        name: "gateway-api-crd",
        checks: vec![Check::new(
            "Gateway API CustomResourceDefinitions exist",
            gateway_api_exists,
        )],
    }
}

pub(super) fn pre_kubernetes_setup() -> Category {
    Category {
        name: "pre-kubernetes-setup",
        checks: vec![
            Check::new(
                "control plane namespace does not already exist",
                namespace_does_not_exist,
            ),
            Check::new("can create non-namespaced resources", |s| {
                has_permissions(s, CLUSTER_PERMISSIONS)
            }),
            Check::new("can create ServiceAccounts", |s| {
                has_permissions(s, &[namespace_permission("create", "", "serviceaccounts")])
            }),
            Check::new("can create Services", |s| {
                has_permissions(s, &[namespace_permission("create", "", "services")])
            }),
            Check::new("can create Deployments", |s| {
                has_permissions(s, &[namespace_permission("create", "apps", "deployments")])
            }),
            Check::new("can create ConfigMaps", |s| {
                has_permissions(s, &[namespace_permission("create", "", "configmaps")])
            }),
            Check::new("can create Secrets", |s| {
                has_permissions(s, &[namespace_permission("create", "", "secrets")])
            }),
            Check::new("can read Secrets", |s| {
                has_permissions(s, &[namespace_permission("get", "", "secrets")])
            }),
            Check::new("can create Roles and RoleBindings", |s| {
                has_permissions(s, ROLE_PERMISSIONS)
            }),
            Check::new("no clock skew detected", clocks_are_synchronized),
        ],
    }
}

/// The permissions that an installation needs.
pub(super) fn required_permissions() -> Vec<Permission> {
    let mut all = CLUSTER_PERMISSIONS.to_vec();
    all.extend_from_slice(ROLE_PERMISSIONS);
    all.extend(
        ["serviceaccounts", "services", "configmaps", "secrets"].map(|name| namespace_permission("create", "", name)),
    );
    all.push(namespace_permission("create", "apps", "deployments"));
    all.push(namespace_permission("get", "", "secrets"));
    all
}

const fn cluster_create_permission(group: &'static str, resource: &'static str) -> Permission {
    Permission {
        verb: "create",
        group,
        resource,
        scope: PermissionScope::Cluster,
    }
}

const fn namespace_permission(verb: &'static str, group: &'static str, resource: &'static str) -> Permission {
    Permission {
        verb,
        group,
        resource,
        scope: PermissionScope::Namespace,
    }
}

const CLUSTER_PERMISSIONS: &[Permission] = &[
    cluster_create_permission("", "namespaces"),
    cluster_create_permission("rbac.authorization.k8s.io", "clusterroles"),
    cluster_create_permission("rbac.authorization.k8s.io", "clusterrolebindings"),
    cluster_create_permission("apiextensions.k8s.io", "customresourcedefinitions"),
    cluster_create_permission("admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    cluster_create_permission("admissionregistration.k8s.io", "validatingwebhookconfigurations"),
    cluster_create_permission("apiregistration.k8s.io", "apiservices"),
];

const ROLE_PERMISSIONS: &[Permission] = &[
    namespace_permission("create", "rbac.authorization.k8s.io", "roles"),
    namespace_permission("create", "rbac.authorization.k8s.io", "rolebindings"),
];

fn client_is_created(snapshot: &Snapshot) -> CheckResult {
    snapshot.client.clone().map_err(|why| {
        error(
            why,
            "pass --kubeconfig FILE or --context NAME; `kubectl config get-contexts` lists the contexts",
        )
    })
}

fn api_is_reachable(snapshot: &Snapshot) -> CheckResult {
    match &snapshot.kubernetes_version {
        Ok(_) => Ok(()),
        Err(why) => Err(error(
            why.clone(),
            "kubectl cluster-info (must work with the same kubeconfig and context)",
        )),
    }
}

fn kubernetes_is_new_enough(snapshot: &Snapshot) -> CheckResult {
    let Ok(version) = &snapshot.kubernetes_version else {
        return Ok(());
    };
    match parse_version(version) {
        Some(found) if found >= MIN_KUBERNETES_VERSION => Ok(()),
        Some(_) => Err(error(
            format!(
                "Kubernetes is {version}; v{}.{}.0 or newer is required",
                MIN_KUBERNETES_VERSION.0, MIN_KUBERNETES_VERSION.1
            ),
            "upgrade the cluster",
        )),
        None => Err(warning(
            format!("the API server reports the version {version:?}, which cannot be parsed"),
            format!(
                "make sure that it is v{}.{}.0 or newer",
                MIN_KUBERNETES_VERSION.0, MIN_KUBERNETES_VERSION.1
            ),
        )),
    }
}

/// Parses major and minor version of `v1.34.2+k3s1`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.strip_prefix('v')?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The oldest version in which all APIs that the charts use are stable.
const MIN_KUBERNETES_VERSION: (u32, u32) = (1, 31);

fn gateway_api_exists(snapshot: &Snapshot) -> CheckResult {
    let crds = snapshot.crds.as_ref()?;
    let missing: Vec<_> = GATEWAY_CRDS
        .iter()
        .filter(|name| !crds.iter().any(|crd| crd.name_any() == **name))
        .map(|name| (*name).to_owned())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(warning(
        listing("routes of these kinds cannot be created:", &missing),
        format!(
            "{} --crds --set installGatewayAPI=true | kubectl apply -f -",
            snapshot.scope.tulle_command("install")
        ),
    ))
}

const GATEWAY_CRDS: &[&str] = &[
    "httproutes.gateway.networking.k8s.io",
    "grpcroutes.gateway.networking.k8s.io",
];

fn namespace_does_not_exist(snapshot: &Snapshot) -> CheckResult {
    let name = &snapshot.scope.control_plane_namespace;
    if !snapshot.has_namespace(name)? {
        return Ok(());
    }
    Err(error(
        format!("the namespace {name} exists already"),
        format!(
            "choose another with -L NAMESPACE; if it contains a control plane, check it with `{}`, or remove it with `{} | kubectl delete -f -`",
            snapshot.scope.tulle_command("check"),
            snapshot.scope.tulle_command("uninstall")
        ),
    ))
}

fn has_permissions(snapshot: &Snapshot, wanted: &[Permission]) -> CheckResult {
    let mut denied = Vec::new();
    for permission in wanted {
        let name = match permission.group {
            "" => permission.resource.to_owned(),
            group => format!("{}.{group}", permission.resource),
        };
        match snapshot.permissions.get(permission) {
            Some(Ok(true)) => {}
            Some(Ok(false)) => denied.push((permission, name)),
            Some(Err(why)) => return Err(warning(format!("unknown: {why}"), "kubectl auth can-i --list")),
            None => {
                return Err(warning(
                    "unknown: the permission was not checked",
                    "kubectl auth can-i --list",
                ));
            }
        }
    }
    let Some((first, name)) = denied.first() else {
        return Ok(());
    };
    let denied_actions = denied
        .iter()
        .map(|(permission, name)| format!("{} {name}", permission.verb))
        .collect::<Vec<_>>();
    Err(error(
        format!("you may not {}", denied_actions.join(", ")),
        format!(
            "act as an administrator (--as USER, --context NAME); verify with `kubectl auth can-i {} {name}{}`",
            first.verb,
            match first.scope {
                PermissionScope::Cluster => String::new(),
                PermissionScope::Namespace => format!(" -n {}", snapshot.scope.control_plane_namespace),
            }
        ),
    ))
}

/// Each node renews a lease every 10 s with the time of its own clock. The check compares this time with the API server's clock.
///
/// The lease of a node that is down is old as well, so nodes that are not ready are skipped.
fn clocks_are_synchronized(snapshot: &Snapshot) -> CheckResult {
    let nodes = snapshot.nodes.as_ref()?;
    let leases = snapshot.node_leases.as_ref().map_err(Problem::from)?;
    let mut skewed = Vec::new();
    for lease in leases {
        let renewed = lease.spec.as_ref().and_then(|spec| spec.renew_time.as_ref());
        let ready = nodes
            .iter()
            .any(|node| node.name_any() == lease.name_any() && is_ready(node));
        let Some(renewed) = renewed.map(|time| time.0.as_second()).filter(|_| ready) else {
            continue;
        };
        let ahead = renewed - snapshot.now;
        if ahead > MAX_CLOCK_AHEAD_SECONDS {
            skewed.push(format!("{} is {ahead} s ahead of the API server", lease.name_any()));
        } else if -ahead > MAX_CLOCK_BEHIND_SECONDS {
            skewed.push(format!(
                "{} is up to {} s behind the API server",
                lease.name_any(),
                -ahead
            ));
        }
    }
    if skewed.is_empty() {
        return Ok(());
    }
    Err(warning(
        listing("certificates can be rejected because of clock skew:", &skewed),
        "synchronise the clocks of these nodes: `timedatectl set-ntp true` on each",
    ))
}

fn is_ready(node: &k8s_openapi::api::core::v1::Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Certificates that a node signs are not yet valid for others if its clock is ahead by more than 20 s: leaf certificates are
/// back-dated by this time. The limit is smaller, because the measured difference is smaller than the real one: a lease is
/// renewed some seconds before the time of the API server is read.
const MAX_CLOCK_AHEAD_SECONDS: i64 = 15;
/// By default, a node that does not renew its lease stays ready for up to 60 s: the `node-monitor-grace-period` of 50 s (40 s before
/// Kubernetes 1.32), and two intervals of 5 s between the checks of leases. The lease of a ready node is older than this only if the
/// clock of the node is behind.
const MAX_CLOCK_BEHIND_SECONDS: i64 = 60;
