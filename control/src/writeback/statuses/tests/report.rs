//! Tests of the report for a source without statuses.

use tulle_core::metrics::Registry;

use super::*;
use crate::cluster::{self, Cluster};
use crate::resources::unserved;
use crate::writeback::statuses::report::StatusReport;

struct TestReport {
    registry: Registry,
    sink: EventSink,
}

impl TestReport {
    fn new() -> Self {
        let registry = Registry::new();
        let cluster = Cluster::new(cluster::Config::default(), &registry);
        let sink = StatusReport::new(cluster, settings()).sink();
        Self { registry, sink }
    }

    fn apply(&self, objects: &[(Kind, Value)]) {
        let event = |(kind, manifest): &(Kind, Value)| Event::Applied(resources::decode(*kind, manifest).unwrap());
        self.sink.apply(objects.iter().map(event).collect());
    }

    fn counted(&self) -> Vec<String> {
        unserved::counted_parts(&self.registry)
    }
}

fn object(name: &str, spec: Value) -> Value {
    json!({"metadata": {"name": name, "namespace": "shop", "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": spec})
}

fn service(name: &str, cluster_ip: &str) -> (Kind, Value) {
    let spec = json!({"clusterIP": cluster_ip, "ports": [{"port": 80}]});
    (Kind::Service, object(name, spec))
}

fn route(kind: Kind, name: &str, parent: Value, rule: Value) -> (Kind, Value) {
    (kind, object(name, json!({"parentRefs": [parent], "rules": [rule]})))
}

#[test]
fn routes_without_effect_are_counted_until_they_have_an_effect() {
    let report = TestReport::new();
    let http = |name: &str, parent: Value| route(Kind::GatewayHttpRoute, name, parent, json!({}));
    let mut with_section = service_ref("web");
    with_section["sectionName"] = json!("x");
    let mut foreign_server = server_ref("srv");
    foreign_server["namespace"] = json!("other");
    let mirror = json!({"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "gone", "port": 80}}});
    report.apply(&[
        service("web", "10.96.0.7"),
        service("headless", "None"),
        http("accepted", service_ref("web")),
        http("without-parent", service_ref("gone")),
        http("of-headless", service_ref("headless")),
        http("with-section", with_section),
        http("of-other-server", foreign_server),
        http("of-gateway", json!({"name": "edge"})),
        route(
            Kind::GatewayHttpRoute,
            "mirroring",
            service_ref("web"),
            json!({"filters": [mirror]}),
        ),
        route(
            Kind::TcpRoute,
            "displaced",
            service_ref("web"),
            json!({"backendRefs": [{"name": "web", "port": 80}]}),
        ),
        // Counted for all sources, by the rules of the object alone.
        route(
            Kind::GatewayHttpRoute,
            "unsupported",
            service_ref("web"),
            json!({"filters": [{"type": "ExtensionRef"}]}),
        ),
    ]);
    let expected = [
        "displaced spec.parentRefs",
        "mirroring spec.rules",
        "of-headless spec.parentRefs",
        "of-other-server spec.parentRefs",
        "with-section spec.parentRefs",
        "without-parent spec.parentRefs",
    ];
    assert_eq!(report.counted(), expected);
    report.apply(&[service("gone", "10.96.0.8"), service("headless", "10.96.0.9")]);
    let expected = [
        "displaced spec.parentRefs",
        "of-other-server spec.parentRefs",
        "with-section spec.parentRefs",
    ];
    assert_eq!(report.counted(), expected);
    let deleted = |kind: Kind, name: &str| Event::Deleted(kind, NamespacedName::new("shop", name));
    report.sink.apply(vec![
        deleted(Kind::GatewayHttpRoute, "with-section"),
        deleted(Kind::GatewayHttpRoute, "of-other-server"),
        deleted(Kind::TcpRoute, "displaced"),
    ]);
    assert_eq!(report.counted(), [""; 0]);
}

#[test]
fn other_objects_without_effect_are_counted() {
    let report = TestReport::new();
    let limit = |name: &str, server: &str| {
        let spec = json!({"targetRef": server_ref(server), "total": {"requestsPerSecond": 5}});
        (Kind::RateLimitPolicy, object(name, spec))
    };
    let network = |name: &str, cidr: &str| {
        let spec = json!({"trafficPolicy": "Deny", "networks": [{"cidr": cidr}]});
        (Kind::EgressNetwork, object(name, spec))
    };
    let workload = |name: &str, ip: &str| {
        let mesh_tls = json!({"identity": "vm.shop", "serverName": "vm.shop"});
        let spec = json!({"meshTLS": mesh_tls, "ports": [{"port": 80}], "workloadIPs": [{"ip": ip}]});
        (Kind::ExternalWorkload, object(name, spec))
    };
    let server = json!({"podSelector": {}, "port": 80});
    report.apply(&[
        (Kind::Server, object("srv", server.clone())),
        limit("a-limit", "srv"),
        limit("b-limit", "srv"),
        limit("c-limit", "gone"),
        network("inside", "10.1.0.0/16"),
        network("outside", "203.0.113.0/24"),
        network("overridden", "203.0.113.0/24"),
        service("web", "192.0.2.1"),
        workload("vm-1", "192.0.2.1"),
        workload("vm-2", "192.0.2.2"),
    ]);
    let expected = [
        "b-limit spec.targetRef",
        "c-limit spec.targetRef",
        "inside spec.networks",
        "overridden spec.networks",
        "vm-1 spec.workloadIPs",
    ];
    assert_eq!(report.counted(), expected);
    report.apply(&[
        (Kind::Server, object("gone", server)),
        limit("b-limit", "gone"),
        network("inside", "203.0.113.0/25"),
        service("web", "192.0.2.3"),
    ]);
    assert_eq!(report.counted(), ["c-limit spec.targetRef", "overridden spec.networks"]);
    let outside = NamespacedName::new("shop", "outside");
    report.sink.apply(vec![Event::Deleted(Kind::EgressNetwork, outside)]);
    assert_eq!(report.counted(), ["c-limit spec.targetRef"]);
}
