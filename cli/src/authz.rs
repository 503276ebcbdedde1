//! `tulle authz`: which authorizations speak of the ports of a workload.
//!
//! Goes by the objects, as the policy service does; what a port really accepts, `tulle diagnostics policy` asks it.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use anyhow::{Context as _, anyhow, ensure};
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::{Api, ResourceExt as _};
use serde::de::IntoDeserializer as _;
use tulle_control::resources::policy::authorization::{AuthorizationTarget, Servers};
use tulle_control::resources::policy::server::Workloads;
use tulle_control::resources::route::ParentKind;
use tulle_control::resources::{self, Kind, Object};

use crate::kubernetes::resource::{Kind as ResourceKind, Named};
use crate::kubernetes::{self, Cluster, reason};
use crate::{runtime, table};

/// Whose authorizations to show.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// A workload, or all of a type: deploy/web, pod/web-1, deploy
    #[arg(value_name = "TYPE/NAME", required = true, num_args = 1..=2)]
    resource: Vec<String>,
    /// The namespace of the workload; that of the kubeconfig's context if not given
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
}

pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let named = Named::parse(&args.resource)?;
    runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        let namespace = match (&named.kind, &named.name) {
            (ResourceKind::Namespace, Some(name)) => name,
            _ => args.namespace.as_ref().unwrap_or(&cluster.namespace),
        };
        let pods = named.pods(&cluster, namespace).await?;
        ensure!(
            !pods.is_empty(),
            "{} of namespace {namespace} has no pods",
            args.resource.join(" ")
        );
        let mut objects = Vec::new();
        for kind in KINDS {
            objects.extend(list(&cluster, namespace, kind).await?);
        }
        let labels: Vec<_> = pods.iter().map(|pod| pod.labels()).collect();
        crate::print(&table::text(&TITLES, rows(&objects, &labels)))?;
        Ok(ExitCode::SUCCESS)
    })
}

/// The objects of a kind in a namespace; none where the kind is not installed.
async fn list(cluster: &Cluster, namespace: &str, kind: Kind) -> anyhow::Result<Vec<Object>> {
    let info = kind.info();
    let version = info.versions.first().context("a kind without versions")?;
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(info.group, version, info.name));
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), namespace, &resource);
    let found = match cluster.list(&api, &ListParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Vec::new(),
        found => found.map_err(|error| anyhow!("listing {} of {namespace}: {}", resource.plural, reason(&error)))?,
    };
    let mut objects = Vec::new();
    for object in found {
        let name = object.name_any();
        let value = serde_json::to_value(&object).context("reading an object")?;
        match resources::decode(kind, value.into_deserializer()) {
            Ok(object) => objects.push(object),
            // The policy service leaves such an object out as well.
            Err(error) => eprintln!("tulle: {} {namespace}/{name} is left out: {error}", info.name),
        }
    }
    Ok(objects)
}

/// Route, server, AuthorizationPolicy, ServerAuthorization; `*` where a row speaks of all routes.
fn rows(objects: &[Object], pods: &[&BTreeMap<String, String>]) -> BTreeSet<[String; 4]> {
    let mut rows = BTreeSet::new();
    let servers = objects.iter().filter_map(|object| match object {
        Object::Server(server) => Some(server),
        _ => None,
    });
    for server in servers {
        let Workloads::Pods(selector) = &server.workloads else {
            continue;
        };
        if !pods.iter().any(|labels| selector.matches_map(labels)) {
            continue;
        }
        let name = server.meta.name.name.to_string();
        for object in objects {
            match object {
                Object::ServerAuthorization(authorization) => {
                    let meant = match &authorization.servers {
                        Servers::Named(named) => **named == name,
                        Servers::Selected(selector) => selector.matches(&server.meta.labels),
                    };
                    if meant {
                        let authorization = authorization.meta.name.name.to_string();
                        rows.insert(["*".to_owned(), name.clone(), String::new(), authorization]);
                    }
                }
                Object::AuthorizationPolicy(policy) => {
                    let route = match &policy.target {
                        AuthorizationTarget::Namespace => Some("*".to_owned()),
                        AuthorizationTarget::Server(target) => (**target == name).then(|| "*".to_owned()),
                        AuthorizationTarget::Route(_, target) => {
                            attached(objects, object_of(&policy.target), target, &name).then(|| target.to_string())
                        }
                    };
                    if let Some(route) = route {
                        let policy = policy.meta.name.name.to_string();
                        rows.insert([route, name.clone(), policy, String::new()]);
                    }
                }
                _ => {}
            }
        }
    }
    rows
}

fn object_of(target: &AuthorizationTarget) -> Option<resources::route::RouteKind> {
    match target {
        AuthorizationTarget::Route(kind, _) => Some(*kind),
        AuthorizationTarget::Server(_) | AuthorizationTarget::Namespace => None,
    }
}

/// Whether the route of this kind and name is a route of the server.
fn attached(objects: &[Object], kind: Option<resources::route::RouteKind>, name: &str, server: &str) -> bool {
    objects.iter().any(|object| match object {
        Object::PolicyHttpRoute(route) | Object::GatewayHttpRoute(route) | Object::GrpcRoute(route) => {
            Some(route.kind) == kind
                && &*route.meta.name.name == name
                && route
                    .parents
                    .iter()
                    .any(|parent| parent.kind == ParentKind::Server && &*parent.name.name == server)
        }
        _ => false,
    })
}

const KINDS: [Kind; 6] = [
    Kind::Server,
    Kind::ServerAuthorization,
    Kind::AuthorizationPolicy,
    Kind::PolicyHttpRoute,
    Kind::GatewayHttpRoute,
    Kind::GrpcRoute,
];

const TITLES: [&str; 4] = ["ROUTE", "SERVER", "AUTHORIZATION_POLICY", "SERVER_AUTHORIZATION"];

const EXAMPLES: &str = "\
  tulle authz deploy/web -n shop
  tulle authz pod -n shop";

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object(kind: Kind, name: &str, spec: Value) -> Object {
        let value =
            json!({ "metadata": { "name": name, "namespace": "shop", "labels": { "of": name } }, "spec": spec });
        resources::decode(kind, value.into_deserializer()).unwrap()
    }

    #[test]
    fn authorizations_are_found_by_server_route_and_namespace() {
        let target = |group: &str, kind: &str, name: &str| json!({ "group": group, "kind": kind, "name": name });
        let policy = |name: &str, target: Value| {
            let spec = json!({ "targetRef": target, "requiredAuthenticationRefs": [] });
            object(Kind::AuthorizationPolicy, name, spec)
        };
        let server = |name: &str, app: &str| {
            object(
                Kind::Server,
                name,
                json!({ "podSelector": { "matchLabels": { "app": app } }, "port": 80 }),
            )
        };
        let objects = [
            server("web-http", "web"),
            server("db-tcp", "db"),
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
        let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
        let found = table::text(&TITLES, rows(&objects, &[&labels]));
        let expected = "\
ROUTE   SERVER     AUTHORIZATION_POLICY   SERVER_AUTHORIZATION
*       web-http                          by-label
*       web-http   all-of-web
*       web-http   everything
read    web-http   readers
";
        assert_eq!(found, expected);
    }
}
