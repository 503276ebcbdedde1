//! Routes of exported Services that send requests to other clusters.
//!
//! A route in the namespace of its Service also applies to requests that arrive through the gateway. If the other cluster has such a
//! route too, requests go back and forth until a gateway refuses them.

use std::collections::BTreeSet;

use anyhow::{Context as _, anyhow};
use k8s_openapi::api::core::v1::Service;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use tulle_control::resources::meta::NamespacedName;
use tulle_control::resources::route::{ParentKind, Route};
use tulle_control::resources::{self, Kind};
use tulle_core::names::label;

use crate::kubernetes::{Cluster, reason};

/// Finds the routes that have one of these mirrors as a backend, and whose Service other clusters reach through the gateway.
///
/// # Errors
/// Fails if Services or routes cannot be listed.
pub(super) async fn routes_to_mirrors(
    cluster: &Cluster,
    mirrors: &BTreeSet<NamespacedName>,
) -> anyhow::Result<Vec<String>> {
    if mirrors.is_empty() {
        return Ok(Vec::new());
    }
    let exported = exported_services(cluster).await?;
    if exported.is_empty() {
        return Ok(Vec::new());
    }
    let mut lines = Vec::new();
    for kind in ROUTE_KINDS {
        for object in cluster.list_kind(None, kind).await? {
            let value = serde_json::to_value(&object).context("reading a route")?;
            // A route that the control plane cannot read sends no requests to its backends.
            let Ok(object) = resources::decode(kind, &value) else {
                continue;
            };
            lines.extend(object.route().and_then(|route| describe(route, &exported, mirrors)));
        }
    }
    Ok(lines)
}

/// The Services with the default label of exports through the gateway.
async fn exported_services(cluster: &Cluster) -> anyhow::Result<BTreeSet<NamespacedName>> {
    let selector = ListParams::default().labels(&format!("{}=true", label::EXPORTED));
    let services = cluster
        .list(&Api::<Service>::all(cluster.client.clone()), &selector)
        .await;
    let services = services.map_err(|error| anyhow!("listing exported Services: {}", reason(&error)))?;
    let name = |service: &Service| NamespacedName::new(service.namespace().unwrap_or_default(), service.name_any());
    Ok(services.iter().map(name).collect())
}

/// Describes the route if one of its Services is exported and one of its backends is a mirror.
fn describe(route: &Route, exported: &BTreeSet<NamespacedName>, mirrors: &BTreeSet<NamespacedName>) -> Option<String> {
    let namespace = &route.meta.name.namespace;
    // The route of another namespace applies to clients of its own namespace only.
    let service = route.parents.iter().find(|parent| {
        parent.kind == ParentKind::Service && parent.name.namespace == *namespace && exported.contains(&parent.name)
    })?;
    let backends = route.rules.backend_refs().into_iter();
    let mirror = backends
        .filter(|backend| backend.is_service())
        .map(|backend| backend.resolve(namespace))
        .find(|backend| mirrors.contains(backend))?;
    Some(format!(
        "{} {}: Service {}, backend {}",
        route.kind.kind(),
        route.meta.name,
        service.name.name,
        mirror.name
    ))
}

const ROUTE_KINDS: [Kind; 5] = [
    Kind::PolicyHttpRoute,
    Kind::GatewayHttpRoute,
    Kind::GrpcRoute,
    Kind::TlsRoute,
    Kind::TcpRoute,
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The description of an HTTPRoute in this namespace for the Service `shop/<service>` with this backend of `shop`.
    /// `shop/web` is exported, and `shop/web-east` is a mirror.
    fn description(namespace: &str, service: &str, backend: &str) -> Option<String> {
        let route = json!({
            "metadata": {"name": "split", "namespace": namespace},
            "spec": {
                "parentRefs": [{"group": "core", "kind": "Service", "name": service, "namespace": "shop", "port": 80}],
                "rules": [{"backendRefs": [
                    {"name": "web", "namespace": "shop", "port": 80},
                    {"name": backend, "namespace": "shop", "port": 80},
                ]}],
            },
        });
        let object = resources::decode(Kind::GatewayHttpRoute, &route).unwrap();
        let names = |name: &str| BTreeSet::from([NamespacedName::new("shop", name)]);
        describe(object.route().unwrap(), &names("web"), &names("web-east"))
    }

    #[test]
    fn a_route_of_an_exported_service_to_a_mirror_is_found() {
        let expected = "HTTPRoute shop/split: Service web, backend web-east";
        assert_eq!(description("shop", "web", "web-east").as_deref(), Some(expected));
        for (namespace, service, backend) in [
            ("shop", "private", "web-east"),
            ("shop", "web", "web-federated"),
            ("clients", "web", "web-east"),
        ] {
            let found = description(namespace, service, backend);
            assert_eq!(found, None, "{namespace}, {service}, {backend}");
        }
    }
}
