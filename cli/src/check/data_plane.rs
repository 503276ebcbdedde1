//! Checks of the data plane: proxies are ready, pods that need a proxy have one, and annotations are consistent.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, Service, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;
use tulle_control::injection;
use tulle_control::injector_webhook::audit;
use tulle_control::resources::port_list::{PortList, ResolvedPorts};
use tulle_control::resources::workload::{long_running_containers, resolve_ports};
use tulle_core::names::{annotation, label};

use super::category::{Category, Check};
use super::control_plane::{COMPONENT, control_plane_version};
use super::problem::{CheckResult, MAX_LISTED_FINDINGS, Problem, error, listing, warning};
use super::snapshot::Snapshot;
use crate::kubernetes::resource;

pub(super) fn data_plane() -> Category {
    Category {
        name: "linkerd-data-plane",
        checks: vec![
            Check::new("data plane namespace exists", namespace_exists).fatal(),
            Check::new("data plane proxies are ready", proxies_are_ready).with_retry(),
            Check::new("data plane pods are injected", pods_are_injected),
            Check::new("proxy injector audit is clean", audit_is_clean),
            Check::new("data plane is up-to-date", |s| {
                proxy_versions_match(s, ReferenceVersion::Expected)
            }),
            Check::new("data plane and control plane versions match", |s| {
                proxy_versions_match(s, ReferenceVersion::ControlPlane)
            }),
            Check::new("data plane pod labels are configured correctly", pod_labels),
            Check::new("data plane service labels are configured correctly", service_labels),
            Check::new("data plane annotations are configured correctly", annotations),
            Check::new(
                "members of Redis Clusters see the addresses of their peers",
                redis_clusters,
            ),
        ],
    }
}

pub(super) fn opaque_ports() -> Category {
    Category {
        name: "linkerd-opaque-ports-definition",
        checks: vec![Check::new("opaque ports are properly annotated", opaque_ports_agree)],
    }
}

fn namespace_exists(snapshot: &Snapshot) -> CheckResult {
    let Some(name) = &snapshot.scope.namespace else {
        return Ok(());
    };
    if snapshot.has_namespace(name)? {
        return Ok(());
    }
    Err(error(
        format!("there is no namespace {name}"),
        "kubectl get namespaces lists the namespaces; select one with -n",
    ))
}

/// The application pods to check, of one namespace or of all.
fn application_pods(snapshot: &Snapshot) -> Result<Vec<&Pod>, Problem> {
    let pods = snapshot.pods.as_ref()?.iter();
    let is_in_scope = |pod: &&Pod| {
        let namespace = snapshot.scope.namespace.as_deref();
        namespace.is_none_or(|namespace| namespace == resource::namespace(pod))
            && !pod.labels().contains_key(COMPONENT)
            && !is_terminated(pod)
    };
    Ok(pods.filter(is_in_scope).collect())
}

/// The pods with a proxy of this control plane.
pub(super) fn meshed_pods(snapshot: &Snapshot) -> Result<Vec<&Pod>, Problem> {
    let mut pods = application_pods(snapshot)?;
    pods.retain(|pod| {
        pod.labels().get(label::CONTROL_PLANE_NS) == Some(&snapshot.scope.control_plane_namespace) && has_proxy(pod)
    });
    Ok(pods)
}

pub(crate) fn is_terminated(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed")) || pod.metadata.deletion_timestamp.is_some()
}

fn has_proxy(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    containers.into_iter().any(|container| container.name == PROXY)
}

/// The status of the proxy container, which can be a native sidecar or an ordinary container.
pub(crate) fn proxy_status(pod: &Pod) -> Option<&ContainerStatus> {
    let status = pod.status.as_ref()?;
    let mut containers = status
        .init_container_statuses
        .iter()
        .chain(&status.container_statuses)
        .flatten();
    containers.find(|container| container.name == PROXY)
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", resource::namespace(pod), pod.name_any())
}

fn proxies_are_ready(snapshot: &Snapshot) -> CheckResult {
    let pods = meshed_pods(snapshot)?;
    if pods.is_empty() {
        let scope = match &snapshot.scope.namespace {
            Some(namespace) => format!("namespace {namespace}"),
            None => "any namespace".to_owned(),
        };
        return Err(error(
            format!("there is no proxy in {scope}"),
            "kubectl annotate namespace NAMESPACE linkerd.io/inject=enabled, and then kubectl rollout restart its workloads",
        ));
    }
    let unready: Vec<_> = pods
        .iter()
        .filter(|pod| !proxy_status(pod).is_some_and(|status| status.ready))
        .map(|pod| full_name(pod))
        .collect();
    if unready.is_empty() {
        return Ok(());
    }
    Err(error(
        listing("the proxies of these pods are not ready:", &unready),
        "kubectl logs POD -c linkerd-proxy shows why",
    ))
}

/// Finds the pods without a proxy that the injector would inject. The injector's code decides.
fn find_uninjected_pods(snapshot: &Snapshot) -> Result<Vec<&Pod>, Problem> {
    let config = injection::Config {
        values: snapshot.injector_values()?,
        control_plane_namespace: snapshot.scope.control_plane_namespace.clone(),
        origin: injection::InjectionOrigin::Webhook,
    };
    let injector = &config.values.proxy_injector;
    let no_entries = BTreeMap::new();
    let mut uninjected_pods = Vec::new();
    for pod in application_pods(snapshot)? {
        let Some(spec) = &pod.spec else { continue };
        let name = resource::namespace(pod);
        let namespace = snapshot
            .namespaces
            .as_ref()?
            .iter()
            .find(|namespace| namespace.name_any() == name);
        let labels = namespace.map_or(&no_entries, |namespace| namespace.labels());
        let is_selected_by_webhook = audit::is_selected(injector, labels, pod.labels());
        let target = injection::InjectionTarget {
            pointer: &[],
            metadata: Some(&pod.metadata),
            spec,
            namespace: name,
            namespace_annotations: namespace.map_or(&no_entries, |namespace| namespace.annotations()),
            owner: None,
        };
        if is_selected_by_webhook && matches!(injection::decide(&config, &target), injection::Decision::Inject(_)) {
            uninjected_pods.push(pod);
        }
    }
    Ok(uninjected_pods)
}

/// Reports pods without a proxy that the injector would inject if they were created now.
fn pods_are_injected(snapshot: &Snapshot) -> CheckResult {
    let uninjected_pods = find_uninjected_pods(snapshot)?;
    if uninjected_pods.is_empty() {
        return Ok(());
    }
    Err(error(
        listing(
            "these pods should be injected, but have no proxy:",
            &full_names(&uninjected_pods),
        ),
        recreate_commands(&uninjected_pods),
    ))
}

/// Reports the findings of the injector's audit that `pods_are_injected` does not report.
///
/// The injector can read objects that this user cannot read, but its audit runs only every five minutes. Pods that were deleted
/// after the audit are ignored.
fn audit_is_clean(snapshot: &Snapshot) -> CheckResult {
    let findings = match &snapshot.injection_audit {
        None => return Ok(()),
        Some(Ok(findings)) => findings,
        Some(Err(why)) => {
            return Err(warning(
                format!("cannot read the injector's audit: {why}"),
                "act as a user with permission to forward ports of the control plane (--as USER, --context NAME)",
            ));
        }
    };
    let uninjected = find_uninjected_pods(snapshot);
    let already_reported: BTreeSet<_> = uninjected.iter().flatten().map(|pod| full_name(pod)).collect();
    let audited_pods: BTreeSet<_> = findings
        .uninjected_pods
        .iter()
        .map(|pod| format!("{}/{}", pod.namespace, pod.name))
        .collect();
    let mut remaining = application_pods(snapshot)?;
    remaining.retain(|pod| {
        let name = full_name(pod);
        !has_proxy(pod) && audited_pods.contains(&name) && !already_reported.contains(&name)
    });
    if remaining.is_empty() {
        return Ok(());
    }
    let audited_at = findings.audited_at.as_deref().unwrap_or("an unknown time");
    let message = listing(
        &format!(
            "according to the injector's audit of {audited_at}, these pods should be injected, but have no proxy:"
        ),
        &full_names(&remaining),
    );
    Err(match uninjected {
        // An object cannot be read, so this command cannot decide on injection itself. The audit is the only evidence.
        Err(_) => error(message, recreate_commands(&remaining)),
        // According to the current annotations and values, these pods need no proxy. The audit used older annotations or values.
        Ok(_) => warning(message, recreate_commands(&remaining)),
    })
}

fn full_names(pods: &[&Pod]) -> Vec<String> {
    pods.iter().map(|pod| full_name(pod)).collect()
}

/// The commands that recreate these pods, without duplicates.
fn recreate_commands(pods: &[&Pod]) -> String {
    let commands: BTreeSet<_> = pods.iter().map(|pod| recreate_command(pod)).collect();
    let mut shown: Vec<_> = commands.iter().take(MAX_LISTED_FINDINGS).cloned().collect();
    if commands.len() > MAX_LISTED_FINDINGS {
        shown.push(format!("… and {} more", commands.len() - MAX_LISTED_FINDINGS));
    }
    shown.join("\n")
}

fn recreate_command(pod: &Pod) -> String {
    let (namespace, name) = (resource::namespace(pod), pod.name_any());
    let restart = |kind: &str, name: &str| format!("kubectl rollout restart {kind}/{name} -n {namespace}");
    let owner = pod
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true));
    let Some(owner) = owner else {
        return format!("kubectl get pod {name} -n {namespace} -o yaml | kubectl replace --force -f -");
    };
    // The name of a ReplicaSet is the name of its Deployment and the hash of the pod template.
    let hash = pod.labels().get("pod-template-hash").map(|hash| format!("-{hash}"));
    let deployment = hash.and_then(|hash| owner.name.strip_suffix(&hash).map(str::to_owned));
    match (owner.kind.as_str(), deployment) {
        ("ReplicaSet", Some(deployment)) => restart("deployment", &deployment),
        ("DaemonSet", _) => restart("daemonset", &owner.name),
        ("StatefulSet", _) => restart("statefulset", &owner.name),
        // The owner creates a new pod.
        _ => format!("kubectl delete pod {name} -n {namespace}"),
    }
}

#[derive(Clone, Copy)]
enum ReferenceVersion {
    Expected,
    ControlPlane,
}

fn proxy_versions_match(snapshot: &Snapshot, against: ReferenceVersion) -> CheckResult {
    let wanted = match (against, &snapshot.scope.expected_version) {
        (ReferenceVersion::Expected, Some(version)) => version.clone(),
        (ReferenceVersion::Expected, None) => return Ok(()),
        (ReferenceVersion::ControlPlane, _) => control_plane_version(snapshot)?,
    };
    let other: Vec<_> = meshed_pods(snapshot)?
        .iter()
        .filter_map(|pod| {
            let version = pod.annotations().get(annotation::PROXY_VERSION)?;
            (*version != wanted).then(|| format!("{} runs {version}", full_name(pod)))
        })
        .collect();
    if other.is_empty() {
        return Ok(());
    }
    Err(warning(
        listing(&format!("these proxies are not {wanted}:"), &other),
        "kubectl rollout restart their workloads",
    ))
}

fn pod_labels(snapshot: &Snapshot) -> CheckResult {
    let pods = application_pods(snapshot)?;
    let wrong = pods
        .iter()
        .flat_map(|pod| find_misplaced_labels(&format!("pod {}", full_name(pod)), pod.labels().keys()));
    report_misplaced_labels(wrong.collect())
}

fn service_labels(snapshot: &Snapshot) -> CheckResult {
    let services = services(snapshot)?;
    let wrong = services.iter().flat_map(|service| {
        let name = format!("service {}", service_name(service));
        find_misplaced_labels(&name, service.labels().keys())
    });
    report_misplaced_labels(wrong.collect())
}

/// Labels that have an effect only as annotations.
fn find_misplaced_labels<'a>(object: &str, keys: impl Iterator<Item = &'a String>) -> Vec<String> {
    let is_misplaced = |key: &&String| *key == annotation::INJECT || annotation::has_configuration_prefix(key);
    keys.filter(is_misplaced)
        .map(|key| format!("{object} has the label {key}"))
        .collect()
}

fn report_misplaced_labels(wrong: Vec<String>) -> CheckResult {
    if wrong.is_empty() {
        return Ok(());
    }
    Err(warning(
        listing("these labels have no effect:", &wrong),
        "make them annotations (of the pod template, for pods)",
    ))
}

fn annotations(snapshot: &Snapshot) -> CheckResult {
    let mut wrong = Vec::new();
    let mut check_object_annotations = |object: String, annotations: &BTreeMap<String, String>| {
        for (key, value) in annotations {
            if key == "linkerd.io/injected" {
                wrong.push(format!(
                    "{object}: {key} has no effect; the annotation that injects a proxy is {}",
                    annotation::INJECT
                ));
            }
            if key == annotation::INJECT && !matches!(value.as_str(), "enabled" | "disabled" | "ingress") {
                wrong.push(format!(
                    "{object}: {key} is {value:?}; expected enabled, ingress or disabled"
                ));
            }
            if let Err(reason) = injection::check_annotation(key, value) {
                wrong.push(format!("{object}: {reason}"));
            }
        }
    };
    for pod in application_pods(snapshot)? {
        check_object_annotations(format!("pod {}", full_name(pod)), pod.annotations());
    }
    for namespace in snapshot.namespaces.as_ref()? {
        let name = namespace.name_any();
        if snapshot
            .scope
            .namespace
            .as_ref()
            .is_none_or(|namespace| *namespace == name)
        {
            check_object_annotations(format!("namespace {name}"), namespace.annotations());
        }
    }
    for service in services(snapshot)? {
        for item in annotated_opaque_ports(service).unknown {
            wrong.push(format!(
                "service {}: {} names {item:?}, which is neither a port of this service nor a range such as 3306-3309",
                service_name(service),
                annotation::OPAQUE_PORTS
            ));
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(warning(
        listing("annotations:", &wrong),
        "set the expected values with kubectl annotate --overwrite",
    ))
}

/// A member of a Redis Cluster learns the addresses of its peers from their connections. In the inbound mode `redirect`, the source
/// of these connections is the address of the member's own pod.
fn redis_clusters(snapshot: &Snapshot) -> CheckResult {
    let mut pods = meshed_pods(snapshot)?;
    pods.retain(|pod| is_redis_cluster_member(pod) && !preserves_client_addresses(pod));
    if pods.is_empty() {
        return Ok(());
    }
    Err(warning(
        listing(
            "these pods do not see the addresses of their peers, so they find no other members of their Redis Cluster:",
            &full_names(&pods),
        ),
        format!("annotate their pod template with {}=tproxy", annotation::INBOUND_MODE),
    ))
}

/// Whether a container is a Redis server in cluster mode that announces no address. Settings in configuration files are not known.
fn is_redis_cluster_member(pod: &Pod) -> bool {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.into_iter().any(|container| {
        let texts = container.command.iter().chain(&container.args).flatten();
        let words: Vec<&str> = texts.flat_map(|text| text.split([' ', '\n', '=', '\'', '"'])).collect();
        let is_enabled = words
            .windows(2)
            .any(|pair| pair[0].ends_with("cluster-enabled") && pair[1] == "yes");
        is_enabled && !words.iter().any(|word| word.ends_with("cluster-announce-ip"))
    })
}

/// Whether the inbound mode of the pod is `tproxy`. Only in this mode does the proxy have the capability `NET_RAW`.
fn preserves_client_addresses(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let mut containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let added = containers
        .find(|container| container.name == PROXY)
        .and_then(|proxy| proxy.security_context.as_ref()?.capabilities.as_ref()?.add.as_ref());
    added.is_some_and(|added| added.iter().any(|name| name == "NET_RAW"))
}

fn services(snapshot: &Snapshot) -> Result<Vec<&Service>, Problem> {
    let services = snapshot.services.as_ref()?.iter();
    let is_in_scope = |service: &&Service| {
        let namespace = snapshot.scope.namespace.as_deref();
        namespace.is_none_or(|namespace| Some(namespace) == service.metadata.namespace.as_deref())
            && !service.labels().contains_key(COMPONENT)
    };
    Ok(services.filter(is_in_scope).collect())
}

fn service_name(service: &Service) -> String {
    format!("{}/{}", service.namespace().unwrap_or_default(), service.name_any())
}

/// The client's proxy reads the annotation of the Service, and the server's proxy reads that of the pod, so both must list the same
/// opaque ports.
fn opaque_ports_agree(snapshot: &Snapshot) -> CheckResult {
    let pods = meshed_pods(snapshot)?;
    let default = snapshot.injector_values()?.proxy.opaque_ports;
    let mut problems = BTreeSet::new();
    for service in services(snapshot)? {
        let Some(spec) = &service.spec else { continue };
        let selector = spec.selector.clone().unwrap_or_default();
        if selector.is_empty() {
            continue;
        }
        let service_list = opaque_port_list(service.annotations(), &default);
        let service_opaque_ports = resolve_service_ports(service, service_list).to_set();
        let selected_pods = pods.iter().filter(|pod| {
            Some(resource::namespace(pod)) == service.metadata.namespace.as_deref()
                && selector.iter().all(|(key, value)| pod.labels().get(key) == Some(value))
        });
        let mut missing_in_service = BTreeSet::new();
        for pod in selected_pods {
            let Some(pod_spec) = &pod.spec else { continue };
            let pod_list = opaque_port_list(pod.annotations(), &default);
            let pod_opaque_ports = resolve_ports(&PortList::parse(pod_list), pod_spec).to_set();
            let mut missing_in_pod = BTreeSet::new();
            for (port, target) in target_ports(pod, spec) {
                match (service_opaque_ports.contains(port), pod_opaque_ports.contains(target)) {
                    (false, true) => {
                        missing_in_service.insert(port);
                    }
                    (true, false) => {
                        missing_in_pod.insert(target);
                    }
                    _ => {}
                }
            }
            if !missing_in_pod.is_empty() {
                problems.insert(format!(
                    "{} opaque in service {} but not in pod {}: annotate the pod template with {}: {:?}",
                    ports_with_verb(&missing_in_pod),
                    service.name_any(),
                    full_name(pod),
                    annotation::OPAQUE_PORTS,
                    add_ports(pod_list, &missing_in_pod),
                ));
            }
        }
        if !missing_in_service.is_empty() {
            problems.insert(format!(
                "{} opaque in the pods of service {} but not in the service: kubectl annotate --overwrite service {} -n {} {}={}",
                ports_with_verb(&missing_in_service),
                service_name(service),
                service.name_any(),
                service.namespace().unwrap_or_default(),
                annotation::OPAQUE_PORTS,
                add_ports(service_list, &missing_in_service),
            ));
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(warning(
        listing("services and pods disagree:", &problems.into_iter().collect::<Vec<_>>()),
        "set these annotations",
    ))
}

/// The list of opaque ports that applies to an object: its annotation, or else the default of the cluster.
fn opaque_port_list<'a>(annotations: &'a BTreeMap<String, String>, default: &'a str) -> &'a str {
    annotations
        .get(annotation::OPAQUE_PORTS)
        .map_or(default, String::as_str)
}

/// Adds ports to a list of opaque ports. An annotation replaces the list that applied before, so it must contain that list.
fn add_ports(list: &str, ports: &BTreeSet<u16>) -> String {
    let listed = list.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    let entries = listed.map(str::to_owned).chain(ports.iter().map(u16::to_string));
    entries.collect::<Vec<_>>().join(",")
}

/// The ports with a verb, as the start of a sentence: "port 80 is" or "ports 80, 81 are".
fn ports_with_verb(ports: &BTreeSet<u16>) -> String {
    let numbers: Vec<_> = ports.iter().map(u16::to_string).collect();
    match numbers.len() {
        1 => format!("port {} is", numbers[0]),
        _ => format!("ports {} are", numbers.join(", ")),
    }
}

/// The ports that a Service's annotation lists, by number or by name.
fn annotated_opaque_ports(service: &Service) -> ResolvedPorts {
    resolve_service_ports(service, opaque_port_list(service.annotations(), ""))
}

/// Resolves a list of numbers and names of the Service's ports.
fn resolve_service_ports(service: &Service, list: &str) -> ResolvedPorts {
    PortList::parse(list).resolve(|name| {
        let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
        let named = ports.filter(|port| port.name.as_deref() == Some(name));
        named.filter_map(|port| u16::try_from(port.port).ok()).collect()
    })
}

/// The ports of a Service, each with its target port in the pod.
fn target_ports<'a>(pod: &'a Pod, spec: &'a ServiceSpec) -> impl Iterator<Item = (u16, u16)> + 'a {
    spec.ports.iter().flatten().filter_map(|port| {
        let number = u16::try_from(port.port).ok()?;
        Some((number, target_port(pod, port.target_port.as_ref(), number)?))
    })
}

fn target_port(pod: &Pod, target: Option<&IntOrString>, port: u16) -> Option<u16> {
    match target {
        None => Some(port),
        Some(IntOrString::Int(number)) => u16::try_from(*number).ok(),
        Some(IntOrString::String(name)) => {
            let containers = pod.spec.iter().flat_map(long_running_containers);
            let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
            let found = ports.find(|port| port.name.as_deref() == Some(name))?;
            u16::try_from(found.container_port).ok()
        }
    }
}

const PROXY: &str = "linkerd-proxy";
