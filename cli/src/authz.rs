//! `tulle authz`: the names of the authorizations that apply to the ports and routes of a workload.
//!
//! The command reads the objects of the cluster, and runs the policy service's code on them.

use std::collections::BTreeSet;
use std::process::ExitCode;

use anyhow::{Context as _, anyhow, ensure};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Pod as KubernetesPod;
use kube::ResourceExt as _;
use serde_json::Value;
use tulle_control::cluster::views::inbound::{Key, WorkloadId};
use tulle_control::cluster::{self, Cluster as State};
use tulle_control::model::inbound::{
    Authorization, AuthorizationReference, InboundPolicy, Route, Routes, ServerReference,
};
use tulle_control::model::reference::Reference;
use tulle_control::resources::event::Event;
use tulle_control::resources::port_list::PortList;
use tulle_control::resources::service::PortRef;
use tulle_control::resources::unreadable::Unreadable;
use tulle_control::resources::workload::{Pod, resolve_declared};
use tulle_control::resources::{self, Kind, Object};
use tulle_core::metrics::Registry;
use tulle_core::names::annotation;

use crate::kubernetes::resource::{Kind as ResourceKind, ResourceRef};
use crate::kubernetes::{self, Cluster};
use crate::{config, runtime, table};

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// A workload, or all of a type: deploy/web, pod/web-1, deploy
    #[arg(value_name = "TYPE/NAME", required = true, num_args = 1..=2)]
    resource: Vec<String>,
    /// The namespace of the workload [default: the namespace of the kubeconfig's context]
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
}

pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let resource = ResourceRef::parse(&args.resource)?;
    runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        let namespace = match (&resource.kind, &resource.name) {
            (ResourceKind::Namespace, Some(name)) => name,
            _ => args.namespace.as_ref().unwrap_or(&cluster.namespace),
        };
        let pods = resource.pods(&cluster, namespace).await?;
        ensure!(
            !pods.is_empty(),
            "{} of namespace {namespace} has no pods",
            args.resource.join(" ")
        );
        let mut events = Vec::new();
        for kind in KINDS {
            events.extend(list(&cluster, Some(namespace), kind).await?);
        }
        for kind in REFERENCED_KINDS {
            // Authorizations can refer to objects of other namespaces, which the user may not be allowed to read.
            let in_all_namespaces = list(&cluster, None, kind).await;
            events.extend(match in_all_namespaces {
                Ok(found) => found,
                Err(error) => {
                    eprintln!(
                        "tulle: the output may lack authorizations that refer to authentications of other namespaces: {error:#}"
                    );
                    list(&cluster, Some(namespace), kind).await?
                }
            });
        }
        let values = config::values(&cluster).await.unwrap_or_else(|error| {
            eprintln!(
                "tulle: using built-in defaults for the default policy, cluster networks and opaque ports, because the control \
                 plane's configuration cannot be read: {error:#}"
            );
            Value::Null
        });
        let rows = authorization_rows(policy_config(&cluster.control_plane_namespace, &values)?, events, pods)?;
        crate::print(&table::render(&TITLES, rows))?;
        Ok(ExitCode::SUCCESS)
    })
}

/// The installed configuration of the policy service, as far as it affects authorizations.
fn policy_config(control_plane: &str, values: &Value) -> anyhow::Result<cluster::Config> {
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let mut config = cluster::Config {
        controller_namespace: control_plane.to_owned(),
        ..cluster::Config::default()
    };
    if let Some(policy) = text(&values["proxy"]["defaultInboundPolicy"]) {
        config.default_policy = policy.parse().context("reading the value proxy.defaultInboundPolicy")?;
    }
    if let Some(domain) = text(&values["identityTrustDomain"]).or_else(|| text(&values["clusterDomain"])) {
        config.trust_domain = domain;
    }
    if let Some(list) = text(&values["clusterNetworks"]) {
        config.cluster_networks = parse_networks(list.split(',')).context("reading the value clusterNetworks")?;
    }
    if let Some(list) = values["policyController"]["probeNetworks"].as_array() {
        let list = list.iter().filter_map(Value::as_str);
        config.probe_networks = parse_networks(list).context("reading the value policyController.probeNetworks")?;
    }
    if let Some(list) = text(&values["proxy"]["opaquePorts"]) {
        config.default_opaque_ports = list.parse().context("reading the value proxy.opaquePorts")?;
    }
    Ok(config)
}

fn parse_networks<'a>(list: impl Iterator<Item = &'a str>) -> anyhow::Result<Vec<IpNet>> {
    let list = list.map(str::trim).filter(|text| !text.is_empty());
    list.map(|text| {
        text.parse()
            .with_context(|| format!("{text:?} is not a network such as 10.0.0.0/8"))
    })
    .collect()
}

/// Lists the objects of a kind in one namespace or in all. Returns an empty list if the kind is not installed.
async fn list(cluster: &Cluster, namespace: Option<&str>, kind: Kind) -> anyhow::Result<Vec<Event>> {
    let mut events = Vec::new();
    for object in cluster.list_kind(namespace, kind).await? {
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let value = serde_json::to_value(&object).context("reading an object")?;
        match resources::decode(kind, &value) {
            Ok(object) => events.push(Event::Applied(object)),
            // A running policy service uses the last readable version of the object. This command has no earlier version, so it
            // shows the rows of a policy service that has just started.
            Err(error) => {
                eprintln!("tulle: {} {namespace}/{name} cannot be read: {error}", kind.info().name);
                let unreadable = Unreadable::from_value(kind, &value, &error.to_string());
                events.extend(unreadable.map(|unreadable| Event::Unreadable(unreadable.into())));
            }
        }
    }
    Ok(events)
}

/// Returns the rows of the table: route, server, AuthorizationPolicy, ServerAuthorization. `*` stands for all routes.
fn authorization_rows(
    config: cluster::Config,
    mut events: Vec<Event>,
    pods: Vec<KubernetesPod>,
) -> anyhow::Result<BTreeSet<[String; 4]>> {
    let object = |event: &Event| match event {
        Event::Applied(object) => Some(object.clone()),
        Event::Unreadable(unreadable) => unreadable.placeholder.clone(),
        Event::Deleted(..) | Event::Synced => None,
    };
    let server_ports: Vec<PortRef> = events
        .iter()
        .filter_map(|event| match object(event)? {
            Object::Server(server) => server.port.clone(),
            _ => None,
        })
        .collect();
    let mut workloads = Vec::new();
    for pod in pods {
        let name = pod.name_any();
        let pod = Pod::from_kubernetes(pod).map_err(|error| anyhow!("reading pod {name}: {error}"))?;
        workloads.push((pod.meta.name.clone(), ports_to_show(&pod, &server_ports)));
        events.push(Event::Applied(Object::Pod(pod.into())));
    }
    let state = State::new(config, &Registry::default());
    state.sink().apply(events);
    let mut rows = BTreeSet::new();
    for (name, ports) in workloads {
        for port in ports {
            let workload = WorkloadId::Pod(name.clone());
            let policy = state.inbound(Key { workload, port }).current();
            if let Some(policy) = &**policy {
                rows.extend(policy_rows(policy));
            }
        }
    }
    Ok(rows)
}

/// The ports for which rows are shown: the ports that the pod declares, the port numbers of all Servers of the namespace, and one
/// more port that requires an identity. If there are none, port 65535 is the example of a port without a Server.
fn ports_to_show(pod: &Pod, server_ports: &[PortRef]) -> BTreeSet<u16> {
    let numbers = server_ports.iter().filter_map(|port| match port {
        PortRef::Number(number) => Some(*number),
        PortRef::Name(_) => None,
    });
    let mut ports: BTreeSet<u16> = pod.ports.iter().map(|port| port.port).chain(numbers).collect();
    if let Some(list) = pod.meta.annotation(annotation::REQUIRE_IDENTITY_INBOUND_PORTS) {
        // One more port is enough: all ports that no Server selects and that require an identity have the same authorizations.
        let listed = resolve_declared(&PortList::parse(list), &pod.ports).to_set();
        let other = listed.ranges().flatten().find(|port| !ports.contains(port));
        ports.extend(other);
    }
    if ports.is_empty() {
        ports.insert(u16::MAX);
    }
    ports
}

fn policy_rows(policy: &InboundPolicy) -> Vec<[String; 4]> {
    let server = match &policy.reference {
        ServerReference::Default(name) => format!("default:{name}"),
        ServerReference::Server(name) => name.to_string(),
    };
    let mut rows: Vec<_> = policy
        .authorizations
        .iter()
        .map(|authorization| row("*", &server, authorization))
        .collect();
    match &policy.routes {
        Routes::Http(routes) => rows.extend(routes.iter().flat_map(|route| route_rows(route, &server))),
        Routes::Grpc(routes) => rows.extend(routes.iter().flat_map(|route| route_rows(route, &server))),
        Routes::Opaque => {}
    }
    if rows.is_empty() {
        rows.push(["*".to_owned(), server, NO_CLIENT.to_owned(), String::new()]);
    }
    rows
}

fn route_rows<M>(route: &Route<M>, server: &str) -> Vec<[String; 4]> {
    let name = match &route.reference {
        Reference::Default(name) => (*name).to_owned(),
        Reference::Object(object) => object.name.to_string(),
    };
    let authorizations = route.authorizations.iter();
    authorizations
        .map(|authorization| row(&name, server, authorization))
        .collect()
}

fn row(route: &str, server: &str, authorization: &Authorization) -> [String; 4] {
    let (policy, server_authorization) = match &authorization.reference {
        AuthorizationReference::Default(policy) => (format!("default/{policy}"), String::new()),
        AuthorizationReference::Object { kind, name, .. } if *kind == "serverauthorization" => {
            (String::new(), name.to_string())
        }
        AuthorizationReference::Object { name, .. } => (name.to_string(), String::new()),
    };
    [route.to_owned(), server.to_owned(), policy, server_authorization]
}

/// The kinds that are listed in the namespace of the workload.
const KINDS: [Kind; 6] = [
    Kind::Server,
    Kind::ServerAuthorization,
    Kind::AuthorizationPolicy,
    Kind::PolicyHttpRoute,
    Kind::GatewayHttpRoute,
    Kind::GrpcRoute,
];

/// The kinds to which authorizations refer. The referenced objects can be in other namespaces, so these kinds are listed in all
/// namespaces.
const REFERENCED_KINDS: [Kind; 2] = [Kind::MeshTlsAuthentication, Kind::NetworkAuthentication];

const TITLES: [&str; 4] = ["ROUTE", "SERVER", "AUTHORIZATION_POLICY", "SERVER_AUTHORIZATION"];

/// Shown if no authorization applies to a port.
const NO_CLIENT: &str = "(nobody)";

const EXAMPLES: &str = "\
  tulle authz deploy/web -n shop
  tulle authz pod -n shop

SERVER is default:POLICY for ports that no Server selects; (nobody) marks a port that refuses all clients.";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(kind: Kind, name: &str, spec: Value) -> Object {
        let accepted = json!({ "type": "Accepted", "status": "True", "reason": "Accepted",
            "lastTransitionTime": "2026-01-01T00:00:00Z", "message": "" });
        let parents = spec["parentRefs"].as_array().cloned().unwrap_or_default();
        let parents: Vec<Value> = parents
            .iter()
            .map(|parent| json!({ "parentRef": parent, "controllerName": "linkerd.io/policy-controller", "conditions": [accepted] }))
            .collect();
        let value = json!({
            "metadata": { "name": name, "namespace": "shop", "labels": { "of": name } },
            "spec": spec,
            "status": { "parents": parents },
        });
        resources::decode(kind, &value).unwrap()
    }

    fn pod(app: &str, ports: &[u16]) -> KubernetesPod {
        let ports: Vec<Value> = ports.iter().map(|port| json!({ "containerPort": port })).collect();
        serde_json::from_value(json!({
            "metadata": { "name": app, "namespace": "shop", "labels": { "app": app } },
            "spec": { "containers": [{ "name": app, "image": app, "ports": ports }] },
        }))
        .unwrap()
    }

    fn target(group: &str, kind: &str, name: &str) -> Value {
        json!({ "group": group, "kind": kind, "name": name })
    }

    fn policy(name: &str, target: Value) -> Object {
        let spec = json!({ "targetRef": target, "requiredAuthenticationRefs": [] });
        object(Kind::AuthorizationPolicy, name, spec)
    }

    fn server(name: &str, app: &str, port: u16) -> Object {
        let spec = json!({ "podSelector": { "matchLabels": { "app": app } }, "port": port });
        object(Kind::Server, name, spec)
    }

    fn render_table(objects: Vec<Object>, pod: KubernetesPod) -> String {
        let events = objects.into_iter().map(Event::Applied).collect();
        let rows = authorization_rows(cluster::Config::default(), events, vec![pod]).unwrap();
        table::render(&TITLES, rows)
    }

    #[test]
    fn authorizations_are_found_by_server_route_and_namespace() {
        let objects = vec![
            server("web-http", "web", 80),
            server("db-tcp", "db", 80),
            object(
                Kind::PolicyHttpRoute,
                "read",
                json!({
                    "parentRefs": [target("policy.linkerd.io", "Server", "web-http")],
                    "rules": [{ "matches": [{ "method": "GET" }] }],
                }),
            ),
            policy("all-of-web", target("policy.linkerd.io", "Server", "web-http")),
            policy("all-of-db", target("policy.linkerd.io", "Server", "db-tcp")),
            policy("readers", target("policy.linkerd.io", "HTTPRoute", "read")),
            policy("writers", target("policy.linkerd.io", "HTTPRoute", "write")),
            policy("everything", target("", "Namespace", "shop")),
            object(
                Kind::ServerAuthorization,
                "by-label",
                json!({
                    "server": { "selector": { "matchLabels": { "of": "web-http" } } },
                    "client": { "unauthenticated": true },
                }),
            ),
        ];
        let expected = "\
ROUTE   SERVER     AUTHORIZATION_POLICY   SERVER_AUTHORIZATION
*       web-http                          by-label
*       web-http   all-of-web
*       web-http   everything
read    web-http   readers
";
        assert_eq!(render_table(objects, pod("web", &[])), expected);
    }

    #[test]
    fn ports_without_a_server_have_the_default_policy_and_servers_without_authorizations_permit_no_client() {
        let objects = vec![server("web-http", "web", 80)];
        let expected = "\
ROUTE   SERVER                        AUTHORIZATION_POLICY          SERVER_AUTHORIZATION
*       default:all-unauthenticated   default/all-unauthenticated
*       web-http                      (nobody)
";
        assert_eq!(render_table(objects, pod("web", &[80, 9000])), expected);
        let only_default = render_table(Vec::new(), pod("web", &[]));
        assert!(only_default.contains("default/all-unauthenticated"), "{only_default}");
        assert_eq!(only_default.lines().count(), 2);
    }

    #[test]
    fn the_older_of_two_servers_of_one_port_applies() {
        let server_created_at = |name: &str, seconds: i64| {
            let mut server = server(name, "web", 80);
            server.meta_mut().created_at = Some(seconds);
            server
        };
        let objects = vec![
            server_created_at("a", 2),
            server_created_at("b", 1),
            policy("of-a", target("policy.linkerd.io", "Server", "a")),
            policy("of-b", target("policy.linkerd.io", "Server", "b")),
        ];
        let shown = render_table(objects, pod("web", &[80]));
        assert!(shown.contains("of-b") && !shown.contains("of-a"), "{shown}");
    }

    #[test]
    fn ports_that_require_an_identity_are_shown_in_addition_to_declared_ports() {
        let mut pod = pod("web", &[80]);
        let key = annotation::REQUIRE_IDENTITY_INBOUND_PORTS.to_owned();
        pod.metadata.annotations = Some([(key, "80-81,9000".to_owned())].into());
        let table_with_declared_port = render_table(Vec::new(), pod.clone());
        assert!(
            table_with_declared_port.contains("default/all-authenticated"),
            "{table_with_declared_port}"
        );
        let key = annotation::REQUIRE_IDENTITY_INBOUND_PORTS.to_owned();
        pod.metadata.annotations = Some([(key, "9000".to_owned())].into());
        let shown = render_table(Vec::new(), pod);
        for policy in ["default/all-unauthenticated", "default/all-authenticated"] {
            assert!(shown.contains(policy), "{policy}: {shown}");
        }
    }

    #[test]
    fn settings_come_from_the_chart_values() {
        let values = json!({
            "clusterNetworks": "10.0.0.0/8, fd00::/8",
            "policyController": { "probeNetworks": ["192.168.7.0/24"] },
            "proxy": { "opaquePorts": "25,3306", "defaultInboundPolicy": "deny" },
        });
        let config = policy_config("mesh", &values).unwrap();
        let texts = |networks: &[IpNet]| networks.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(&config.cluster_networks), ["10.0.0.0/8", "fd00::/8"]);
        assert_eq!(texts(&config.probe_networks), ["192.168.7.0/24"]);
        assert!(config.default_opaque_ports.contains(3306));
        assert_eq!(
            (config.default_policy.as_str(), &*config.controller_namespace),
            ("deny", "mesh")
        );
        let error = policy_config("mesh", &json!({ "clusterNetworks": "10/8" })).unwrap_err();
        assert!(format!("{error:#}").contains("clusterNetworks: \"10/8\""), "{error:#}");
    }
}
