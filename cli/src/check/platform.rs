//! Checks of the cluster itself: can it be asked, is it new enough, and may this user install a mesh.

use kube::ResourceExt as _;

use super::snapshot::{Access, AccessScope, Snapshot};
use super::verdict::{Category, Check, Judgement, Problem, error, listing, warning};

pub(super) fn kubernetes_api() -> Category {
    Category {
        name: "kubernetes-api",
        checks: vec![
            Check::new("can initialize the client", client).ends_the_run(),
            Check::new("can query the Kubernetes API", reachable).ends_the_run(),
        ],
    }
}

pub(super) fn kubernetes_version() -> Category {
    Category {
        name: "kubernetes-version",
        checks: vec![Check::new("is running the minimum Kubernetes API version", version)],
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
            Check::new("control plane namespace does not already exist", namespace_is_free),
            Check::new("can create non-namespaced resources", |s| may(s, CLUSTER_WIDE)),
            Check::new("can create ServiceAccounts", |s| {
                may(s, &[namespaced("create", "", "serviceaccounts")])
            }),
            Check::new("can create Services", |s| {
                may(s, &[namespaced("create", "", "services")])
            }),
            Check::new("can create Deployments", |s| {
                may(s, &[namespaced("create", "apps", "deployments")])
            }),
            Check::new("can create ConfigMaps", |s| {
                may(s, &[namespaced("create", "", "configmaps")])
            }),
            Check::new("can create Secrets", |s| may(s, &[namespaced("create", "", "secrets")])),
            Check::new("can read Secrets", |s| may(s, &[namespaced("get", "", "secrets")])),
            Check::new("can create Roles and RoleBindings", |s| may(s, ROLES)),
            Check::new("no clock skew detected", clocks_agree),
        ],
    }
}

/// Everything that the checks ask about the user's rights.
pub(super) fn accesses() -> Vec<Access> {
    let mut all = CLUSTER_WIDE.to_vec();
    all.extend_from_slice(ROLES);
    all.extend(["serviceaccounts", "services", "configmaps", "secrets"].map(|name| namespaced("create", "", name)));
    all.push(namespaced("create", "apps", "deployments"));
    all.push(namespaced("get", "", "secrets"));
    all
}

const fn cluster_wide(group: &'static str, resource: &'static str) -> Access {
    Access {
        verb: "create",
        group,
        resource,
        scope: AccessScope::Cluster,
    }
}

const fn namespaced(verb: &'static str, group: &'static str, resource: &'static str) -> Access {
    Access {
        verb,
        group,
        resource,
        scope: AccessScope::Namespace,
    }
}

const CLUSTER_WIDE: &[Access] = &[
    cluster_wide("", "namespaces"),
    cluster_wide("rbac.authorization.k8s.io", "clusterroles"),
    cluster_wide("rbac.authorization.k8s.io", "clusterrolebindings"),
    cluster_wide("apiextensions.k8s.io", "customresourcedefinitions"),
    cluster_wide("admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    cluster_wide("admissionregistration.k8s.io", "validatingwebhookconfigurations"),
    cluster_wide("apiregistration.k8s.io", "apiservices"),
];

const ROLES: &[Access] = &[
    namespaced("create", "rbac.authorization.k8s.io", "roles"),
    namespaced("create", "rbac.authorization.k8s.io", "rolebindings"),
];

fn client(snapshot: &Snapshot) -> Judgement {
    snapshot.client.clone().map_err(|why| {
        error(
            why,
            "give --kubeconfig FILE or --context NAME; `kubectl config get-contexts` lists what there is",
        )
    })
}

fn reachable(snapshot: &Snapshot) -> Judgement {
    match &snapshot.kubernetes {
        Ok(_) => Ok(()),
        Err(why) => Err(error(
            why.clone(),
            "kubectl cluster-info (it has to work with the same kubeconfig and context)",
        )),
    }
}

fn version(snapshot: &Snapshot) -> Judgement {
    let Ok(version) = &snapshot.kubernetes else {
        return Ok(());
    };
    match parse_version(version) {
        Some(found) if found >= MINIMUM => Ok(()),
        Some(_) => Err(error(
            format!(
                "Kubernetes is {version}; v{}.{}.0 or newer is needed",
                MINIMUM.0, MINIMUM.1
            ),
            "upgrade the cluster",
        )),
        None => Err(warning(
            format!("the API server calls itself {version:?}, which is no version"),
            format!("make sure that it is v{}.{}.0 or newer", MINIMUM.0, MINIMUM.1),
        )),
    }
}

/// Major and minor of `v1.34.2+k3s1`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.strip_prefix('v')?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Since 1.31 everything that the charts use is stable.
const MINIMUM: (u32, u32) = (1, 31);

fn gateway_api_exists(snapshot: &Snapshot) -> Judgement {
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
        listing("routes of these kinds cannot be made:", &missing),
        format!(
            "{} --crds --set installGatewayAPI=true | kubectl apply -f -",
            snapshot.scope.tulle("install")
        ),
    ))
}

const GATEWAY_CRDS: &[&str] = &[
    "httproutes.gateway.networking.k8s.io",
    "grpcroutes.gateway.networking.k8s.io",
];

fn namespace_is_free(snapshot: &Snapshot) -> Judgement {
    let name = &snapshot.scope.control_plane;
    if !snapshot.has_namespace(name)? {
        return Ok(());
    }
    Err(error(
        format!("the namespace {name} exists already"),
        format!(
            "choose another with -L NAMESPACE; if a control plane is there: `{}`, or remove it with `{} | kubectl delete -f -`",
            snapshot.scope.tulle("check"),
            snapshot.scope.tulle("uninstall")
        ),
    ))
}

fn may(snapshot: &Snapshot, wanted: &[Access]) -> Judgement {
    let mut denied = Vec::new();
    for access in wanted {
        let name = match access.group {
            "" => access.resource.to_owned(),
            group => format!("{}.{group}", access.resource),
        };
        match snapshot.access.get(access) {
            Some(Ok(true)) => {}
            Some(Ok(false)) => denied.push((access, name)),
            Some(Err(why)) => return Err(warning(format!("cannot tell: {why}"), "kubectl auth can-i --list")),
            None => return Err(warning("it was not asked", "kubectl auth can-i --list")),
        }
    }
    let Some((first, name)) = denied.first() else {
        return Ok(());
    };
    let what = denied
        .iter()
        .map(|(access, name)| format!("{} {name}", access.verb))
        .collect::<Vec<_>>();
    Err(error(
        format!("you may not {}", what.join(", ")),
        format!(
            "act as an administrator (--as USER, --context NAME); ask `kubectl auth can-i {} {name}{}`",
            first.verb,
            match first.scope {
                AccessScope::Cluster => String::new(),
                AccessScope::Namespace => format!(" -n {}", snapshot.scope.control_plane),
            }
        ),
    ))
}

/// Nodes renew a lease every 10 s by their own clock; what is far from the API server's clock is skewed.
///
/// A node that is down has an old lease as well, so only ready nodes count as late.
fn clocks_agree(snapshot: &Snapshot) -> Judgement {
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
        if ahead > MAX_AHEAD {
            skewed.push(format!("{} is {ahead} s ahead of the API server", lease.name_any()));
        } else if -ahead > MAX_BEHIND {
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
        listing("certificates are refused by clocks that disagree:", &skewed),
        "synchronise the clocks of these nodes: `timedatectl set-ntp true` on each",
    ))
}

fn is_ready(node: &k8s_openapi::api::core::v1::Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Seconds; leaf certificates are back-dated by 20 s, and the answer is up to some seconds old.
const MAX_AHEAD: i64 = 15;
/// Seconds; a ready node has renewed its lease within 40 s.
const MAX_BEHIND: i64 = 60;
