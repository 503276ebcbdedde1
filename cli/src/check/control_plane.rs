//! Checks of the control plane: its objects exist, its pods run, and its configuration covers the cluster's networks.

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod;
use kube::{Resource, ResourceExt as _};
use serde_json::Value;

use super::category::{Category, Check};
use super::problem::{CheckResult, Problem, error, listing, warning};
use super::snapshot::{CONFIG_MAP, ListResult, Snapshot, value_at};
use crate::kubernetes::resource;

pub(super) fn crds() -> Category {
    Category {
        name: "linkerd-crd",
        checks: vec![Check::new("control plane CustomResourceDefinitions exist", crds_exist)],
    }
}

pub(super) fn config() -> Category {
    Category {
        name: "linkerd-config",
        checks: vec![
            Check::new("control plane Namespace exists", namespace_exists).fatal(),
            Check::new("control plane ClusterRoles exist", |s| {
                check_objects_exist(s, "ClusterRole", &s.cluster_roles, &cluster_role_names(s))
            }),
            Check::new("control plane ClusterRoleBindings exist", |s| {
                check_objects_exist(
                    s,
                    "ClusterRoleBinding",
                    &s.cluster_role_bindings,
                    &cluster_role_binding_names(s),
                )
            }),
            Check::new("control plane ServiceAccounts exist", |s| {
                check_objects_exist(
                    s,
                    "ServiceAccount",
                    &s.service_accounts,
                    &DEPLOYMENTS.map(str::to_owned),
                )
            }),
            Check::new("control plane CustomResourceDefinitions exist", crds_exist),
            Check::new("control plane MutatingWebhookConfigurations exist", |s| {
                check_objects_exist(
                    s,
                    "MutatingWebhookConfiguration",
                    &s.mutating_webhooks,
                    &[INJECTOR_WEBHOOK.to_owned()],
                )
            }),
            Check::new("control plane ValidatingWebhookConfigurations exist", |s| {
                let names = VALIDATOR_WEBHOOKS.map(str::to_owned);
                check_objects_exist(s, "ValidatingWebhookConfiguration", &s.validating_webhooks, &names)
            }),
            Check::new(
                "proxy-init container runs as root user if docker container runtime is used",
                init_is_root_under_docker,
            ),
        ],
    }
}

pub(super) fn existence() -> Category {
    Category {
        name: "linkerd-existence",
        checks: vec![
            Check::new("'linkerd-config' config map exists", |s| s.values().map(drop)).fatal(),
            Check::new("control plane Deployments exist", |s| {
                check_objects_exist(s, "Deployment", &s.deployments, &DEPLOYMENTS.map(str::to_owned))
            }),
            Check::new("control plane replica sets are ready", replica_sets_are_ready).with_retry(),
            Check::new("no unschedulable pods", all_pods_are_schedulable).with_retry(),
            Check::new("control plane pods are ready", pods_are_ready).with_retry(),
            Check::new(
                "cluster networks contains all node podCIDRs",
                networks_contain_pod_cidrs,
            ),
            Check::new("cluster networks contains all pods", networks_contain_pods),
            Check::new("cluster networks contains all services", networks_contain_services),
        ],
    }
}

pub(super) fn version() -> Category {
    Category {
        name: "control-plane-version",
        checks: vec![
            Check::new("can retrieve the control plane version", |s| {
                control_plane_version(s).map(drop)
            }),
            Check::new("control plane is up-to-date", is_expected_version),
            Check::new("control plane and cli versions match", matches_cli),
        ],
    }
}

pub(super) fn high_availability() -> Category {
    Category {
        name: "linkerd-ha-checks",
        checks: vec![Check::new(
            "multiple replicas of control plane pods",
            has_multiple_replicas,
        )],
    }
}

pub(super) fn cni() -> Category {
    Category {
        name: "linkerd-cni-plugin",
        checks: vec![Check::new("cni plugin pod is running on all nodes", cni_is_ready).with_retry()],
    }
}

fn namespace_exists(snapshot: &Snapshot) -> CheckResult {
    let name = &snapshot.scope.control_plane_namespace;
    if snapshot.has_namespace(name)? {
        return Ok(());
    }
    Err(error(
        format!("namespace {name} does not exist, so it has no control plane"),
        format!("{}; use -L for another namespace", snapshot.scope.install_command()),
    ))
}

fn crds_exist(snapshot: &Snapshot) -> CheckResult {
    let crds = snapshot.crds.as_ref()?;
    let mut problems = Vec::new();
    for (name, needed) in CRDS {
        let Some(crd) = crds.iter().find(|crd| crd.name_any() == *name) else {
            problems.push(format!("{name} is missing"));
            continue;
        };
        if !crd
            .spec
            .versions
            .iter()
            .any(|version| version.served && version.name == *needed)
        {
            problems.push(format!("{name} does not serve version {needed}"));
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(error(
        listing("CustomResourceDefinitions:", &problems),
        format!(
            "{} --crds | kubectl apply -f -",
            snapshot.scope.tulle_command("install")
        ),
    ))
}

fn check_objects_exist<K: Resource>(
    snapshot: &Snapshot,
    kind: &str,
    listed: &ListResult<K>,
    wanted: &[String],
) -> CheckResult {
    let found = listed.as_ref()?;
    let missing: Vec<_> = wanted
        .iter()
        .filter(|name| !found.iter().any(|object| object.meta().name.as_ref() == Some(*name)))
        .map(|name| format!("{kind} {name}"))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(error(listing("missing:", &missing), snapshot.scope.upgrade_command()))
}

fn cluster_role_names(snapshot: &Snapshot) -> Vec<String> {
    let mut names = component_role_names(snapshot);
    names.push("linkerd-policy".to_owned());
    names
}

fn cluster_role_binding_names(snapshot: &Snapshot) -> Vec<String> {
    let mut names = component_role_names(snapshot);
    names.push("linkerd-destination-policy".to_owned());
    names
}

fn component_role_names(snapshot: &Snapshot) -> Vec<String> {
    let namespace = &snapshot.scope.control_plane_namespace;
    ["destination", "identity", "proxy-injector"]
        .map(|component| format!("linkerd-{namespace}-{component}"))
        .to_vec()
}

fn init_is_root_under_docker(snapshot: &Snapshot) -> CheckResult {
    let docker = snapshot.nodes.as_ref()?.iter().find(|node| {
        let info = node.status.as_ref().and_then(|status| status.node_info.as_ref());
        info.is_some_and(|info| info.container_runtime_version.starts_with("docker:"))
    });
    let Some(node) = docker else {
        return Ok(());
    };
    let values = snapshot.values()?;
    if value_at(&values, "proxyInit.runAsRoot") == &Value::Bool(true)
        || value_at(&values, "cniEnabled") == &Value::Bool(true)
    {
        return Ok(());
    }
    Err(error(
        format!(
            "node {} uses Docker, which gives no capabilities to users other than root, and proxyInit.runAsRoot is false",
            node.name_any()
        ),
        format!(
            "{} --set proxyInit.runAsRoot=true | kubectl apply -f -",
            snapshot.scope.tulle_command("upgrade")
        ),
    ))
}

fn replica_sets_are_ready(snapshot: &Snapshot) -> CheckResult {
    let sets = snapshot.replica_sets.as_ref()?.iter();
    let unready: Vec<_> = sets
        .filter(|set| set.labels().contains_key(COMPONENT))
        .filter_map(|set| {
            let wanted = set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
            let ready = set
                .status
                .as_ref()
                .and_then(|status| status.ready_replicas)
                .unwrap_or(0);
            (ready < wanted).then(|| format!("{}: {ready} of {wanted} replicas are ready", set.name_any()))
        })
        .collect();
    if unready.is_empty() {
        return Ok(());
    }
    Err(error(listing("not ready:", &unready), not_ready_fix(snapshot)))
}

fn not_ready_fix(snapshot: &Snapshot) -> String {
    format!(
        "kubectl describe deployments,pods -n {} shows why",
        snapshot.scope.control_plane_namespace
    )
}

pub(super) fn control_plane_pods(snapshot: &Snapshot) -> Result<Vec<&Pod>, Problem> {
    let pods = snapshot.pods.as_ref()?.iter();
    let is_control_plane_pod = |pod: &&Pod| {
        resource::namespace(pod) == snapshot.scope.control_plane_namespace && pod.labels().contains_key(COMPONENT)
    };
    Ok(pods.filter(is_control_plane_pod).collect())
}

fn all_pods_are_schedulable(snapshot: &Snapshot) -> CheckResult {
    let mut unschedulable = Vec::new();
    for pod in control_plane_pods(snapshot)? {
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        for condition in conditions {
            if condition.type_ == "PodScheduled" && condition.reason.as_deref() == Some("Unschedulable") {
                let why = condition.message.as_deref().unwrap_or("no reason given");
                unschedulable.push(format!("{}: {why}", pod.name_any()));
            }
        }
    }
    if unschedulable.is_empty() {
        return Ok(());
    }
    Err(error(
        listing("these pods cannot be scheduled:", &unschedulable),
        "fix the cause that the message gives, such as missing resources, taints or node selectors; kubectl get nodes \
         lists the nodes",
    ))
}

fn pods_are_ready(snapshot: &Snapshot) -> CheckResult {
    let pods = control_plane_pods(snapshot)?;
    let mut unready = Vec::new();
    for component in COMPONENTS {
        let mut count = 0;
        for pod in &pods {
            if pod.labels().get(COMPONENT).map(String::as_str) != Some(*component) {
                continue;
            }
            count += 1;
            if let Some(why) = not_ready_reason(pod) {
                unready.push(format!("{}: {why}", pod.name_any()));
            }
        }
        if count == 0 {
            unready.push(format!("there is no pod of linkerd-{component}"));
        }
    }
    if unready.is_empty() {
        return Ok(());
    }
    Err(error(listing("not ready:", &unready), not_ready_fix(snapshot)))
}

/// The reason why a pod is not ready. `None` if it is ready, has succeeded, or is being deleted.
///
/// If a container cannot start, its state is the reason, because it is more specific than the pod's conditions.
fn not_ready_reason(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    if phase == Some("Succeeded") || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let conditions = status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    if ready {
        return None;
    }
    let containers = status.iter().flat_map(|status| {
        let init = status.init_container_statuses.iter().flatten();
        init.chain(status.container_statuses.iter().flatten())
    });
    for container in containers {
        let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
        if let Some(reason) = waiting.and_then(|waiting| waiting.reason.as_deref())
            && !matches!(reason, "PodInitializing" | "ContainerCreating")
        {
            return Some(format!("container {} is in {reason}", container.name));
        }
    }
    Some(format!("its phase is {}", phase.unwrap_or("unknown")))
}

fn cluster_networks(snapshot: &Snapshot) -> Result<Vec<IpNet>, Problem> {
    let values = snapshot.values()?;
    let text = value_at(&values, "clusterNetworks")
        .as_str()
        .unwrap_or_default()
        .to_owned();
    text.split(',')
        .map(str::trim)
        .filter(|net| !net.is_empty())
        .map(|net| {
            net.parse().map_err(|_| {
                error(
                    format!("clusterNetworks contains {net:?}, which is not a network such as 10.0.0.0/8"),
                    networks_fix(snapshot, "NETWORKS"),
                )
            })
        })
        .collect()
}

fn networks_fix(snapshot: &Snapshot, networks: &str) -> String {
    format!(
        "{} --set clusterNetworks=\"{networks}\" | kubectl apply -f - (commas written as \\,)",
        snapshot.scope.tulle_command("upgrade")
    )
}

/// Fails if addresses are outside of clusterNetworks: proxies do not look up such addresses in the mesh, so traffic to them is
/// plaintext.
fn check_networks_contain(snapshot: &Snapshot, heading: &str, found: Vec<(String, String)>) -> CheckResult {
    let networks = cluster_networks(snapshot)?;
    let contained = |address: &str| {
        if let Ok(net) = address.parse::<IpNet>() {
            return networks.iter().any(|network| network.contains(&net));
        }
        address
            .parse::<IpAddr>()
            .is_ok_and(|ip| networks.iter().any(|network| network.contains(&ip)))
    };
    let outside: Vec<_> = found
        .into_iter()
        .filter(|(_, address)| !contained(address))
        .map(|(name, address)| format!("{name} ({address})"))
        .collect();
    if outside.is_empty() {
        return Ok(());
    }
    let all = networks.iter().map(ToString::to_string).collect::<Vec<_>>().join("\\,");
    Err(error(
        listing(heading, &outside),
        networks_fix(snapshot, &format!("{all}\\,MISSING_NETWORKS")),
    ))
}

fn networks_contain_pod_cidrs(snapshot: &Snapshot) -> CheckResult {
    let mut found = Vec::new();
    for node in snapshot.nodes.as_ref()? {
        let Some(spec) = &node.spec else { continue };
        let mut cidrs = spec.pod_cidrs.clone().unwrap_or_default();
        cidrs.extend(spec.pod_cidr.clone().filter(|cidr| !cidrs.contains(cidr)));
        found.extend(
            cidrs
                .into_iter()
                .map(|cidr| (format!("node {}", node.name_any()), cidr)),
        );
    }
    check_networks_contain(snapshot, "clusterNetworks do not contain the pods of:", found)
}

fn networks_contain_pods(snapshot: &Snapshot) -> CheckResult {
    let mut found = Vec::new();
    for pod in snapshot.pods.as_ref()? {
        // A host-network pod has the address of its node, which can be outside the cluster's networks.
        let host = pod.spec.as_ref().and_then(|spec| spec.host_network).unwrap_or(false);
        let status = pod.status.as_ref();
        let running = status.and_then(|status| status.phase.as_deref()) == Some("Running");
        if host || !running {
            continue;
        }
        let ips = status.iter().flat_map(|status| status.pod_ips.iter().flatten());
        let name = || format!("pod {}/{}", resource::namespace(pod), pod.name_any());
        found.extend(ips.map(|ip| (name(), ip.ip.clone())));
    }
    check_networks_contain(snapshot, "clusterNetworks do not contain:", found)
}

fn networks_contain_services(snapshot: &Snapshot) -> CheckResult {
    let mut found = Vec::new();
    for service in snapshot.services.as_ref()? {
        let Some(spec) = &service.spec else { continue };
        let mut ips = spec.cluster_ips.clone().unwrap_or_default();
        ips.extend(spec.cluster_ip.clone().filter(|ip| !ips.contains(ip)));
        ips.retain(|ip| !ip.is_empty() && ip != "None");
        let name = format!(
            "service {}/{}",
            service.namespace().unwrap_or_default(),
            service.name_any()
        );
        found.extend(ips.into_iter().map(|ip| (name.clone(), ip)));
    }
    check_networks_contain(snapshot, "clusterNetworks do not contain:", found)
}

/// The version of the control plane, from its configuration.
pub(super) fn control_plane_version(snapshot: &Snapshot) -> Result<String, Problem> {
    let values = snapshot.values()?;
    match value_at(&values, "linkerdVersion").as_str() {
        Some(version) if !version.is_empty() => Ok(version.to_owned()),
        _ => Err(warning(
            format!("ConfigMap {CONFIG_MAP} has no value linkerdVersion"),
            snapshot.scope.upgrade_command(),
        )),
    }
}

fn is_expected_version(snapshot: &Snapshot) -> CheckResult {
    let found = control_plane_version(snapshot)?;
    match &snapshot.scope.expected_version {
        Some(expected) if *expected != found => Err(warning(
            format!("the control plane is {found}, expected {expected}"),
            snapshot.scope.upgrade_command(),
        )),
        _ => Ok(()),
    }
}

fn matches_cli(snapshot: &Snapshot) -> CheckResult {
    let found = control_plane_version(snapshot)?;
    if found == crate::version::CLI_VERSION {
        return Ok(());
    }
    Err(warning(
        format!(
            "the control plane is {found}, and this command is {}",
            crate::version::CLI_VERSION
        ),
        format!(
            "upgrade the older of the two: `{}`, or install the matching tulle",
            snapshot.scope.upgrade_command()
        ),
    ))
}

fn has_multiple_replicas(snapshot: &Snapshot) -> CheckResult {
    let values = snapshot.values()?;
    if value_at(&values, "highAvailability") != &Value::Bool(true) {
        return Ok(());
    }
    let single: Vec<_> = snapshot
        .deployments
        .as_ref()?
        .iter()
        .filter(|deployment| DEPLOYMENTS.contains(&deployment.name_any().as_str()))
        .filter_map(|deployment| {
            let replicas = deployment
                .status
                .as_ref()
                .and_then(|status| status.available_replicas)
                .unwrap_or(0);
            (replicas < 2).then(|| format!("{}: {replicas} replicas are available", deployment.name_any()))
        })
        .collect();
    if single.is_empty() {
        return Ok(());
    }
    Err(warning(
        listing("components with fewer than two available replicas:", &single),
        format!("{} --ha | kubectl apply -f -", snapshot.scope.tulle_command("upgrade")),
    ))
}

fn cni_is_ready(snapshot: &Snapshot) -> CheckResult {
    let sets = snapshot.cni_daemon_sets.as_ref()?;
    let namespace = &snapshot.scope.cni_namespace;
    let Some(status) = sets
        .iter()
        .find(|set| set.name_any() == "linkerd-cni")
        .map(|set| set.status.as_ref())
    else {
        return Err(error(
            format!(
                "there is no DaemonSet linkerd-cni in namespace {namespace}, so nothing redirects the traffic of new pods to their proxies"
            ),
            "install the CNI plugin, or disable it: --set cniEnabled=false",
        ));
    };
    let (wanted, ready) = status.map_or((0, 0), |status| (status.desired_number_scheduled, status.number_ready));
    if ready >= wanted && wanted > 0 {
        return Ok(());
    }
    Err(error(
        format!("the CNI plugin is ready on {ready} of {wanted} nodes"),
        format!("kubectl describe daemonset linkerd-cni -n {namespace} shows why"),
    ))
}

pub(super) const COMPONENT: &str = tulle_core::names::label::CONTROL_PLANE_COMPONENT;
pub(super) const COMPONENTS: &[&str] = &["destination", "identity", "proxy-injector"];
const DEPLOYMENTS: [&str; 3] = ["linkerd-destination", "linkerd-identity", "linkerd-proxy-injector"];
pub(super) const INJECTOR_WEBHOOK: &str = "linkerd-proxy-injector-webhook-config";
pub(super) const VALIDATOR_WEBHOOKS: [&str; 2] = [
    "linkerd-sp-validator-webhook-config",
    "linkerd-policy-validator-webhook-config",
];

/// The kinds of the mesh, each with the newest version that the control plane can read. The CustomResourceDefinitions of this
/// version of tulle serve these versions.
pub(super) const CRDS: &[(&str, &str)] = &[
    ("authorizationpolicies.policy.linkerd.io", "v1alpha1"),
    ("egressnetworks.policy.linkerd.io", "v1alpha1"),
    ("externalworkloads.workload.linkerd.io", "v1beta1"),
    ("httplocalratelimitpolicies.policy.linkerd.io", "v1alpha1"),
    ("httproutes.policy.linkerd.io", "v1beta3"),
    ("meshtlsauthentications.policy.linkerd.io", "v1alpha1"),
    ("networkauthentications.policy.linkerd.io", "v1alpha1"),
    ("serverauthorizations.policy.linkerd.io", "v1beta1"),
    ("servers.policy.linkerd.io", "v1beta3"),
    ("serviceprofiles.linkerd.io", "v1alpha2"),
];
