//! Tests of statuses: tables, preserved entries, and the objects that a change affects.

mod report;
mod route_acceptance;

use serde_json::{Value, json};

use super::*;
use crate::resources;
use crate::resources::meta::NamespacedName;
use crate::resources::unreadable::Unreadable;

const POLICY: &str = "policy.linkerd.io";

struct TestIndex(StatusIndex);

fn settings() -> StatusesConfig {
    StatusesConfig {
        cluster_domain: "cluster.local".to_owned(),
        cluster_networks: vec!["10.0.0.0/8".parse().unwrap()],
        global_egress_namespace: "linkerd-egress".to_owned(),
        default_opaque_ports: "3306".parse().unwrap(),
        patch_timeout: Duration::from_secs(5),
    }
}

impl TestIndex {
    fn new() -> Self {
        Self(StatusIndex::new(settings()))
    }

    fn apply(&mut self, kind: Kind, manifest: Value) -> Vec<String> {
        let object = resources::decode(kind, manifest).unwrap();
        let affected = self.0.apply(&object);
        affected.iter().map(|id| id.name.name.to_string()).collect()
    }

    fn service(&mut self, name: &str, cluster_ip: &str) -> Vec<String> {
        let manifest = json!({"metadata": {"name": name, "namespace": "shop"}, "spec": {"clusterIP": cluster_ip}});
        self.apply(Kind::Service, manifest)
    }

    fn server(&mut self, name: &str) -> Vec<String> {
        let spec = json!({"podSelector": {}, "port": 80});
        self.apply(
            Kind::Server,
            json!({"metadata": {"name": name, "namespace": "shop"}, "spec": spec}),
        )
    }

    fn route(&mut self, kind: Kind, name: &str, parents: Value, backends: Value) -> Vec<String> {
        self.route_with(kind, (name, "1"), (parents, backends), json!([]))
    }

    fn route_with(
        &mut self,
        kind: Kind,
        (name, version): (&str, &str),
        (parents, backends): (Value, Value),
        statuses: Value,
    ) -> Vec<String> {
        let metadata = json!({"name": name, "namespace": "shop", "generation": 4, "resourceVersion": version});
        let spec = json!({"parentRefs": parents, "rules": [{"backendRefs": backends}]});
        self.apply(
            kind,
            json!({"metadata": metadata, "spec": spec, "status": {"parents": statuses}}),
        )
    }

    fn patch(&self, kind: Kind, name: &str) -> Option<Value> {
        let id = ObjectId::new(kind, NamespacedName::new("shop", name));
        self.0.build_patch(&id, "2026-01-01T00:00:00Z").map(|patch| patch.body)
    }

    /// Returns our conditions, as `parent: type=status reason`.
    fn conditions_of(&self, kind: Kind, name: &str) -> Vec<String> {
        let body = self.patch(kind, name).expect("there is a patch");
        let mut found = Vec::new();
        for parent in body["status"]["parents"].as_array().unwrap() {
            assert_eq!(parent["controllerName"], "linkerd.io/policy-controller");
            let parent_ref = &parent["parentRef"];
            let port = parent_ref["port"]
                .as_u64()
                .map(|port| format!(":{port}"))
                .unwrap_or_default();
            let [group, kind, name] = ["group", "kind", "name"].map(|field| parent_ref[field].as_str().unwrap());
            for condition in parent["conditions"].as_array().unwrap() {
                assert_eq!(condition["observedGeneration"], 4);
                let [condition_type, status, reason] =
                    ["type", "status", "reason"].map(|field| condition[field].as_str().unwrap());
                found.push(format!(
                    "{group}/{kind}/{name}{port}: {condition_type}={status} {reason}"
                ));
            }
        }
        found
    }
}

fn service_ref(name: &str) -> Value {
    json!({"group": "", "kind": "Service", "name": name, "port": 80})
}

fn server_ref(name: &str) -> Value {
    json!({"group": POLICY, "kind": "Server", "name": name})
}

#[test]
fn a_route_is_accepted_by_parents_that_exist() {
    let mut index = TestIndex::new();
    index.service("web", "10.96.0.7");
    index.service("headless", "None");
    index.server("srv");
    let parents = json!([
        server_ref("srv"), server_ref("gone"), service_ref("web"), service_ref("headless"), service_ref("gone"),
        {"group": "core", "kind": "service", "name": "web"},
        {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "edge"},
    ]);
    index.route(
        Kind::PolicyHttpRoute,
        "r",
        parents,
        json!([{"name": "web", "port": 80}]),
    );
    let resolved = |parent: &str| format!("/Service/{parent}: ResolvedRefs=True ResolvedRefs");
    let refused = |parent: &str| format!("/Service/{parent}: Accepted=False NoMatchingParent");
    assert_eq!(
        index.conditions_of(Kind::PolicyHttpRoute, "r"),
        [
            "policy.linkerd.io/Server/srv: Accepted=True Accepted".to_owned(),
            "policy.linkerd.io/Server/gone: Accepted=False NoMatchingParent".to_owned(),
            "/Service/web:80: Accepted=True Accepted".to_owned(),
            resolved("web:80"),
            refused("headless:80"),
            resolved("headless:80"),
            refused("gone:80"),
            resolved("gone:80"),
            "/Service/web: Accepted=True Accepted".to_owned(),
            resolved("web"),
        ]
    );
    let body = index.patch(Kind::PolicyHttpRoute, "r").unwrap();
    assert_eq!(
        (&body["kind"], &body["metadata"]),
        (&json!("HTTPRoute"), &json!({"name": "r", "resourceVersion": "1"})),
        "concurrent changes of other controllers are not overwritten"
    );
    let headless = &body["status"]["parents"][3];
    assert_eq!(
        headless["conditions"][0]["message"],
        "parent service must have a ClusterIP"
    );
    assert_eq!(headless["conditions"][0]["lastTransitionTime"], "2026-01-01T00:00:00Z");
    assert_eq!(headless["parentRef"]["namespace"], "shop");
}

fn apply_route(index: &mut TestIndex, kind: Kind, metadata: Value, spec: Value) -> Vec<String> {
    index.apply(kind, json!({"metadata": metadata, "spec": spec}))
}

/// Returns the first condition of the first parent, as `status reason: message`.
fn first_condition(index: &TestIndex, kind: Kind, namespace: &str, name: &str) -> String {
    let patch = index
        .0
        .build_patch(
            &ObjectId::new(kind, NamespacedName::new(namespace, name)),
            "2026-01-01T00:00:00Z",
        )
        .unwrap();
    let condition = &patch.body["status"]["parents"][0]["conditions"][0];
    let [status, reason, message] = ["status", "reason", "message"].map(|field| condition[field].as_str().unwrap());
    format!("{status} {reason}: {message}")
}

#[test]
fn a_route_with_unsupported_features_is_not_accepted() {
    let condition_of = |kind: Kind, parent: Value, rule: Value| {
        let mut index = TestIndex::new();
        index.service("web", "10.96.0.7");
        index.server("srv");
        apply_route(
            &mut index,
            kind,
            json!({"name": "r", "namespace": "shop"}),
            json!({"parentRefs": [parent], "rules": [rule]}),
        );
        first_condition(&index, kind, "shop", "r")
    };
    let extension_ref = json!({"group": "a", "kind": "b", "name": "c"});
    let extension = json!({"filters": [{"type": "ExtensionRef", "extensionRef": extension_ref}]});
    assert_eq!(
        condition_of(Kind::GatewayHttpRoute, service_ref("web"), extension.clone()),
        "False UnsupportedValue: filter ExtensionRef is not supported by the mesh"
    );
    let cors = json!({"filters": [{"type": "CORS", "cors": {}}]});
    assert!(condition_of(Kind::GatewayHttpRoute, service_ref("web"), cors.clone()).starts_with("True"));
    assert_eq!(
        condition_of(Kind::GatewayHttpRoute, server_ref("srv"), cors),
        "False UnsupportedValue: filter CORS is not supported where the parent is a Server"
    );
    let backend_filter = json!({"backendRefs": [{"name": "web", "port": 80, "filters": extension["filters"]}]});
    assert!(
        condition_of(Kind::GatewayHttpRoute, service_ref("web"), backend_filter.clone())
            .starts_with("False UnsupportedValue")
    );
    assert!(condition_of(Kind::GatewayHttpRoute, server_ref("srv"), backend_filter).starts_with("True"));
    let response =
        json!({"filters": [{"type": "ResponseHeaderModifier", "responseHeaderModifier": {"remove": ["x"]}}]});
    assert!(condition_of(Kind::GatewayHttpRoute, service_ref("web"), response.clone()).starts_with("True"));
    for (kind, parent) in [
        (Kind::GatewayHttpRoute, server_ref("srv")),
        (Kind::PolicyHttpRoute, server_ref("srv")),
        (Kind::GrpcRoute, service_ref("web")),
    ] {
        assert!(
            condition_of(kind, parent, response.clone()).starts_with("False UnsupportedValue"),
            "{kind:?}"
        );
    }
    let regex = json!({"matches": [{"path": {"type": "RegularExpression", "value": "("}}]});
    assert!(
        condition_of(Kind::GatewayHttpRoute, service_ref("web"), regex).starts_with("False UnsupportedValue: regular")
    );
}

#[test]
fn an_external_workload_with_a_taken_address_is_not_accepted() {
    let mut index = TestIndex::new();
    let kind = Kind::ExternalWorkload;
    let ready = json!({"type": "Ready", "status": "True", "lastProbeTime": "2026-01-01T00:00:00Z"});
    let workload = |version: &str, conditions: Value| {
        json!({
            "metadata": {"name": "vm", "namespace": "shop", "resourceVersion": version},
            "spec": {"meshTLS": {"identity": "vm", "serverName": "vm"}, "workloadIPs": [{"ip": "10.1.0.1"}]},
            "status": {"conditions": conditions},
        })
    };
    index.apply(kind, workload("7", json!([ready])));
    assert_eq!(index.patch(kind, "vm"), None, "no condition without a conflict");
    let pod = json!({
        "metadata": {"name": "web", "namespace": "other"},
        "spec": {"containers": []},
        "status": {"podIP": "10.1.0.1", "phase": "Running"},
    });
    assert_eq!(index.apply(Kind::Pod, pod.clone()), ["vm"]);
    let body = index.patch(kind, "vm").unwrap();
    assert_eq!(
        body["metadata"]["resourceVersion"], "7",
        "concurrent changes of other controllers are not overwritten"
    );
    let refused = json!({
        "type": "Accepted", "status": "False", "reason": "AddressTaken",
        "message": "10.1.0.1 is an address of Pod other/web; clients do not reach this ExternalWorkload there",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    assert_eq!(body["status"]["conditions"], json!([ready, refused]));
    index.apply(kind, workload("8", json!([ready, refused])));
    assert_eq!(index.patch(kind, "vm"), None);
    let mut ended_pod = pod;
    ended_pod["status"]["phase"] = json!("Succeeded");
    assert_eq!(index.apply(Kind::Pod, ended_pod), ["vm"]);
    assert_eq!(
        index.patch(kind, "vm").unwrap()["status"]["conditions"][1]["status"],
        "True"
    );
    assert_eq!(index.service("api", "10.1.0.1"), ["vm"]);
    let patch = index.patch(kind, "vm").unwrap();
    let message = &patch["status"]["conditions"][1]["message"];
    assert_eq!(
        message,
        "10.1.0.1 is an address of Service shop/api; clients do not reach this ExternalWorkload there"
    );
}

#[test]
fn an_external_workload_with_the_address_of_an_older_one_is_refused() {
    let mut index = TestIndex::new();
    let kind = Kind::ExternalWorkload;
    let workload = |namespace: &str, name: &str, day: u8, port: u16| {
        json!({
            "metadata": {"name": name, "namespace": namespace, "creationTimestamp": format!("2026-01-0{day}T00:00:00Z")},
            "spec": {"meshTLS": {"identity": "vm", "serverName": "vm"}, "ports": [{"port": port}],
                     "workloadIPs": [{"ip": "10.2.0.1"}]},
        })
    };
    let condition_of = |index: &TestIndex, namespace: &str, name: &str| {
        let patch = index.0.build_patch(
            &ObjectId::new(kind, NamespacedName::new(namespace, name)),
            "2026-01-01T00:00:00Z",
        );
        patch.map(|patch| patch.body["status"]["conditions"][0]["message"].to_string())
    };
    index.apply(kind, workload("evil", "vm", 3, 90));
    assert_eq!(condition_of(&index, "evil", "vm"), None);
    assert!(
        index
            .apply(kind, workload("shop", "db", 2, 80))
            .contains(&"vm".to_owned())
    );
    let taken_by_older =
        "\"10.2.0.1 is an address of ExternalWorkload shop/db; clients do not reach this ExternalWorkload there\"";
    assert_eq!(condition_of(&index, "evil", "vm").as_deref(), Some(taken_by_older));
    assert_eq!(condition_of(&index, "shop", "db"), None);
    // In one namespace several workloads can share an address if their ports differ.
    index.apply(kind, workload("shop", "web", 4, 90));
    assert_eq!(condition_of(&index, "shop", "web"), None);
    index.apply(kind, workload("shop", "web", 4, 80));
    assert_eq!(condition_of(&index, "shop", "web").as_deref(), Some(taken_by_older));
    let freed = index.0.delete(&ObjectId::new(kind, NamespacedName::new("shop", "db")));
    assert!(freed.contains(&ObjectId::new(kind, NamespacedName::new("evil", "vm"))));
    assert_eq!(condition_of(&index, "evil", "vm"), None);
}

#[test]
fn the_backend_of_a_mirror_must_exist() {
    let condition_of = |backend: &str| {
        let mut index = TestIndex::new();
        index.service("web", "10.96.0.7");
        let mirror = json!({"backendRef": {"name": backend, "port": 80}});
        let rule = json!({"filters": [{"type": "RequestMirror", "requestMirror": mirror}]});
        apply_route(
            &mut index,
            Kind::GatewayHttpRoute,
            json!({"name": "r", "namespace": "shop", "generation": 4}),
            json!({"parentRefs": [service_ref("web")], "rules": [rule]}),
        );
        index.conditions_of(Kind::GatewayHttpRoute, "r").swap_remove(1)
    };
    assert_eq!(condition_of("web"), "/Service/web:80: ResolvedRefs=True ResolvedRefs");
    assert_eq!(
        condition_of("gone"),
        "/Service/web:80: ResolvedRefs=False BackendNotFound"
    );
}

#[test]
fn backends_must_exist_and_be_services_or_networks_of_the_route() {
    let check = |backends: Value, expected: &str| {
        let mut index = TestIndex::new();
        index.service("web", "10.96.0.7");
        index.apply(
            Kind::EgressNetwork,
            json!({"metadata": {"name": "net", "namespace": "shop"}, "spec": {"trafficPolicy": "Allow"}}),
        );
        index.route(Kind::GatewayHttpRoute, "r", json!([service_ref("web")]), backends);
        assert_eq!(
            index.conditions_of(Kind::GatewayHttpRoute, "r")[1],
            format!("/Service/web:80: ResolvedRefs={expected}")
        );
    };
    check(json!([]), "True ResolvedRefs");
    check(json!([{"name": "web", "port": 80}]), "True ResolvedRefs");
    check(
        json!([{"name": "web", "port": 80}, {"name": "gone", "port": 80}]),
        "False BackendNotFound",
    );
    check(
        json!([{"name": "web", "namespace": "other", "port": 80}]),
        "False BackendNotFound",
    );
    check(
        json!([{"group": POLICY, "kind": "EgressNetwork", "name": "net", "port": 80}]),
        "False InvalidKind",
    );
    check(
        json!([{"group": "apps", "kind": "Deployment", "name": "web", "port": 80}]),
        "False InvalidKind",
    );
}

#[test]
fn routes_of_the_more_specific_protocol_take_precedence_on_a_port() {
    let mut index = TestIndex::new();
    index.service("web", "10.96.0.7");
    let accepted = |index: &TestIndex, kind, name: &str| index.conditions_of(kind, name)[0].contains("Accepted=True");
    index.route(Kind::GatewayHttpRoute, "http", json!([service_ref("web")]), json!([]));
    assert!(accepted(&index, Kind::GatewayHttpRoute, "http"));
    let affected = index.route(Kind::GrpcRoute, "grpc", json!([service_ref("web")]), json!([]));
    assert_eq!(affected, ["http", "grpc"], "ordered by kind");
    assert!(accepted(&index, Kind::GrpcRoute, "grpc"));
    assert_eq!(
        index.conditions_of(Kind::GatewayHttpRoute, "http")[0],
        "/Service/web:80: Accepted=False RouteReasonConflicted"
    );
    // A reference to another port is a different parent.
    let elsewhere = json!([{"group": "", "kind": "Service", "name": "web", "port": 81}]);
    index.route(Kind::GatewayHttpRoute, "elsewhere", elsewhere, json!([]));
    assert!(accepted(&index, Kind::GatewayHttpRoute, "elsewhere"));
    let freed = index
        .0
        .delete(&ObjectId::new(Kind::GrpcRoute, NamespacedName::new("shop", "grpc")));
    assert!(freed.contains(&ObjectId::new(
        Kind::GatewayHttpRoute,
        NamespacedName::new("shop", "http")
    )));
    assert!(accepted(&index, Kind::GatewayHttpRoute, "http"));
}

#[test]
fn a_route_is_accepted_while_its_egress_network_is() {
    let mut index = TestIndex::new();
    let network = |net: &str| {
        let metadata = json!({"name": "net", "namespace": "shop", "generation": 4, "resourceVersion": net});
        json!({"metadata": metadata, "spec": {"trafficPolicy": "Allow", "networks": [{"cidr": net}]}})
    };
    let parent = json!([{"group": POLICY, "kind": "EgressNetwork", "name": "net", "port": 443}]);
    index.apply(Kind::EgressNetwork, network("192.0.2.0/24"));
    index.route(Kind::GatewayHttpRoute, "r", parent, json!([]));
    let condition_of = |index: &TestIndex| index.conditions_of(Kind::GatewayHttpRoute, "r")[0].clone();
    assert_eq!(
        condition_of(&index),
        "policy.linkerd.io/EgressNetwork/net:443: Accepted=True Accepted"
    );
    let own = index.patch(Kind::EgressNetwork, "net").unwrap();
    assert_eq!(own["status"]["conditions"][0]["status"], "True");
    assert_eq!(index.apply(Kind::EgressNetwork, network("10.1.0.0/16")), ["net", "r"]);
    assert_eq!(
        condition_of(&index),
        "policy.linkerd.io/EgressNetwork/net:443: Accepted=False NoMatchingParent"
    );
    let own = &index.patch(Kind::EgressNetwork, "net").unwrap()["status"]["conditions"][0];
    assert_eq!(own["reason"], "EgressReasonNetworkOverlap");
    let message = own["message"].as_str().unwrap();
    assert!(
        message.starts_with("spec.networks overlaps clusterNetworks; "),
        "{message}"
    );
}

#[test]
fn a_network_that_others_override_is_not_accepted() {
    let mut index = TestIndex::new();
    let network = |name: &str, day: u8| {
        let created = format!("2026-01-0{day}T00:00:00Z");
        let metadata = json!({"name": name, "namespace": "shop", "creationTimestamp": created, "generation": 4});
        json!({"metadata": metadata, "spec": {"trafficPolicy": "Deny"}})
    };
    let reason_of = |index: &TestIndex, name: &str| {
        let condition = &index.patch(Kind::EgressNetwork, name).unwrap()["status"]["conditions"][0];
        let [status, reason] = ["status", "reason"].map(|field| condition[field].as_str().unwrap().to_owned());
        (
            format!("{status} {reason}"),
            condition["message"].as_str().unwrap().to_owned(),
        )
    };
    assert_eq!(index.apply(Kind::EgressNetwork, network("young", 2)), ["young"]);
    assert_eq!(reason_of(&index, "young").0, "True Accepted");
    let parent = json!({"group": POLICY, "kind": "EgressNetwork", "name": "young", "port": 443});
    index.route(Kind::TcpRoute, "r", json!([parent]), json!([]));
    let is_overridden = |index: &TestIndex| {
        let conditions = index.conditions_of(Kind::TcpRoute, "r");
        assert!(conditions[0].contains("Accepted=True"), "{conditions:?}");
        conditions
            .iter()
            .any(|condition| condition.ends_with("Overridden=True EgressNetwork"))
    };
    assert!(!is_overridden(&index));
    assert_eq!(
        index.apply(Kind::EgressNetwork, network("old", 1)),
        ["old", "young", "r"]
    );
    assert!(is_overridden(&index));
    assert_eq!(reason_of(&index, "old").0, "True Accepted");
    let (reason, message) = reason_of(&index, "young");
    assert_eq!(reason, "False EgressReasonConflicted");
    assert!(
        message.contains(": other EgressNetworks (shop/old) cover all of its addresses with "),
        "{message}"
    );
    assert_eq!(
        index.apply(Kind::EgressNetwork, network("old", 1)),
        ["old"],
        "nothing has changed"
    );
    let old = ObjectId::new(Kind::EgressNetwork, NamespacedName::new("shop", "old"));
    let young = ObjectId::new(Kind::EgressNetwork, NamespacedName::new("shop", "young"));
    let route = ObjectId::new(Kind::TcpRoute, NamespacedName::new("shop", "r"));
    assert_eq!(index.0.delete(&old), BTreeSet::from([young, route]));
    assert_eq!(reason_of(&index, "young").0, "True Accepted");
    assert!(!is_overridden(&index));
}

#[test]
fn a_route_that_a_profile_replaces_is_overridden() {
    let mut index = TestIndex::new();
    index.service("web", "10.96.0.7");
    index.route(
        Kind::GatewayHttpRoute,
        "r",
        json!([service_ref("web"), service_ref("gone")]),
        json!([]),
    );
    let profile = |name: &str, spec: Value| json!({"metadata": {"name": name, "namespace": "shop"}, "spec": spec});
    let routes = json!({"routes": [{"name": "get", "condition": {"method": "GET"}}]});
    let overridden = |index: &TestIndex| {
        let mut found = index.conditions_of(Kind::GatewayHttpRoute, "r");
        found.retain(|condition| condition.contains("Overridden"));
        found
    };
    let name = "web.shop.svc.cluster.local";
    assert_eq!(index.apply(Kind::ServiceProfile, profile(name, json!({}))), ["r"]);
    assert_eq!(overridden(&index), [""; 0]);
    for name in ["gone.shop.svc.cluster.local", "web.shop.svc.example.org"] {
        index.apply(Kind::ServiceProfile, profile(name, routes.clone()));
        assert_eq!(overridden(&index), [""; 0], "{name}");
    }
    assert_eq!(index.apply(Kind::ServiceProfile, profile(name, routes)), ["r"]);
    assert_eq!(overridden(&index), ["/Service/web:80: Overridden=True ServiceProfile"]);
    assert!(index.conditions_of(Kind::GatewayHttpRoute, "r")[0].contains("Accepted=True"));
    let id = ObjectId::new(Kind::ServiceProfile, NamespacedName::new("shop", name));
    assert_eq!(index.0.delete(&id).len(), 1);
    assert_eq!(overridden(&index), [""; 0]);
}

#[test]
fn the_oldest_rate_limit_of_a_server_is_accepted() {
    let mut index = TestIndex::new();
    let limit = |name: &str, created: &str| {
        let metadata = json!({"name": name, "namespace": "shop", "creationTimestamp": created, "generation": 4});
        let target = json!({"group": POLICY, "kind": "Server", "name": "srv"});
        json!({"metadata": metadata, "spec": {"targetRef": target, "total": {"requestsPerSecond": 5}}})
    };
    let reason = |index: &TestIndex, name: &str| {
        let status = index.patch(Kind::RateLimitPolicy, name).unwrap()["status"].take();
        assert_eq!(
            status["targetRef"],
            json!({"group": POLICY, "kind": "Server", "name": "srv"})
        );
        let condition = &status["conditions"][0];
        assert_eq!(condition["type"], "Accepted");
        format!(
            "{} {}",
            condition["status"].as_str().unwrap(),
            condition["reason"].as_str().unwrap()
        )
    };
    index.apply(Kind::RateLimitPolicy, limit("young", "2026-01-02T00:00:00Z"));
    assert_eq!(reason(&index, "young"), "False NoMatchingTarget");
    assert_eq!(index.server("srv"), ["young"]);
    assert_eq!(reason(&index, "young"), "True Accepted");
    let affected = index.apply(Kind::RateLimitPolicy, limit("old", "2026-01-01T00:00:00Z"));
    assert_eq!(affected, ["old", "young"]);
    assert_eq!(reason(&index, "old"), "True Accepted");
    assert_eq!(reason(&index, "young"), "False RateLimitReasonAlreadyExists");
    index.0.delete(&ObjectId::new(
        Kind::RateLimitPolicy,
        NamespacedName::new("shop", "old"),
    ));
    assert_eq!(reason(&index, "young"), "True Accepted");
    for protocol in ["gRPC", "opaque", "TLS"] {
        let server = json!({
            "metadata": {"name": "srv", "namespace": "shop"},
            "spec": {"podSelector": {}, "port": 80, "proxyProtocol": protocol},
        });
        index.apply(Kind::Server, server);
        assert_eq!(reason(&index, "young"), "False UnsupportedValue", "{protocol}");
    }
}

#[test]
fn conditions_of_other_controllers_are_kept_in_policies() {
    let foreign = json!({
        "type": "Ready", "status": "True", "reason": "Probed", "message": "", "lastTransitionTime": "2025-05-05T00:00:00Z",
    });
    let target = json!({"group": POLICY, "kind": "Server", "name": "srv"});
    for (kind, spec) in [
        (
            Kind::EgressNetwork,
            json!({"trafficPolicy": "Allow", "networks": [{"cidr": "192.0.2.0/24"}]}),
        ),
        (
            Kind::RateLimitPolicy,
            json!({"targetRef": target, "total": {"requestsPerSecond": 5}}),
        ),
    ] {
        let mut index = TestIndex::new();
        let policy = |version: &str, status: &Value| {
            let metadata = json!({"name": "p", "namespace": "shop", "generation": 4, "resourceVersion": version});
            json!({"metadata": metadata, "spec": spec, "status": status})
        };
        index.apply(kind, policy("7", &json!({"conditions": [foreign]})));
        let body = index.patch(kind, "p").unwrap();
        let conditions = body["status"]["conditions"].as_array().unwrap();
        assert_eq!((conditions.len(), &conditions[0]), (2, &foreign), "{kind:?}");
        assert_eq!(conditions[1]["type"], "Accepted");
        assert_eq!(
            body["metadata"]["resourceVersion"], "7",
            "concurrent changes of other controllers are not overwritten"
        );
        index.apply(kind, policy("8", &body["status"]));
        assert_eq!(index.patch(kind, "p"), None, "{kind:?}");
    }
}

/// Returns the parents in the status after a patch.
fn statuses(body: &Value) -> Value {
    body["status"]["parents"].clone()
}

#[test]
fn only_changed_conditions_are_written_and_entries_of_other_controllers_are_kept() {
    let mut index = TestIndex::new();
    let kind = Kind::GatewayHttpRoute;
    let parents = json!([service_ref("web")]);
    let foreign = json!({
        "parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "edge"},
        "controllerName": "example.com/edge",
        "conditions": [{"type": "Accepted", "status": "True", "reason": "Accepted", "message": "",
            "lastTransitionTime": "2025-05-05T00:00:00Z"}],
    });
    index.route_with(kind, ("r", "1"), (parents.clone(), json!([])), json!([foreign]));
    let body = index.patch(kind, "r").unwrap();
    assert_eq!(statuses(&body)[0], foreign);
    assert_eq!(
        body["metadata"]["resourceVersion"], "1",
        "concurrent changes of another controller are not overwritten"
    );
    assert_eq!(statuses(&body)[1]["conditions"][0]["status"], "False");
    // The status as written, in a different order: no patch.
    let ours = statuses(&body)[1].clone();
    index.route_with(kind, ("r", "2"), (parents.clone(), json!([])), json!([ours, foreign]));
    assert_eq!(index.patch(kind, "r"), None);
    // The parent is created: one condition changes, the other keeps its time.
    assert_eq!(index.service("web", "10.96.0.7"), ["r"]);
    let mut old = ours;
    for condition in old["conditions"].as_array_mut().unwrap() {
        condition["lastTransitionTime"] = json!("2025-05-05T00:00:00Z");
    }
    index.route_with(kind, ("r", "3"), (parents, json!([])), json!([old]));
    let conditions = &statuses(&index.patch(kind, "r").unwrap())[0]["conditions"];
    assert_eq!(conditions[0]["status"], "True");
    assert_eq!(conditions[0]["lastTransitionTime"], "2026-01-01T00:00:00Z");
    assert_eq!(conditions[1]["lastTransitionTime"], "2025-05-05T00:00:00Z");
    // No parent in the mesh is left: our entries are removed. Routes that never had one get no patch.
    index.route_with(kind, ("r", "4"), (json!([]), json!([])), json!([old]));
    assert_eq!(statuses(&index.patch(kind, "r").unwrap()), json!([]));
    index.route(kind, "never", json!([]), json!([]));
    assert_eq!(index.patch(kind, "never"), None);
}

#[test]
fn a_written_status_is_not_written_again_before_the_watch_reports_it() {
    let mut index = TestIndex::new();
    let kind = Kind::GrpcRoute;
    index.route(kind, "r", json!([service_ref("web")]), json!([]));
    let id = ObjectId::new(kind, NamespacedName::new("shop", "r"));
    let patch = index.0.build_patch(&id, "2026-01-01T00:00:00Z").unwrap();
    index.0.record_write(id, patch);
    assert_eq!(index.patch(kind, "r"), None);
    index.service("web", "10.96.0.7");
    assert!(index.patch(kind, "r").is_some(), "another change was applied");
    index
        .0
        .delete(&ObjectId::new(Kind::Service, NamespacedName::new("shop", "web")));
    assert_eq!(index.patch(kind, "r"), None);
    // The watch reports that another client has removed the status.
    index.route_with(kind, ("r", "2"), (json!([service_ref("web")]), json!([])), json!([]));
    assert!(index.patch(kind, "r").is_some());
}

#[test]
fn a_change_affects_dependent_objects_only() {
    let mut index = TestIndex::new();
    index.route(Kind::GrpcRoute, "a", json!([service_ref("web")]), json!([]));
    index.route(
        Kind::GrpcRoute,
        "b",
        json!([service_ref("api")]),
        json!([{"name": "web", "port": 80}]),
    );
    index.route(Kind::GrpcRoute, "c", json!([service_ref("api")]), json!([]));
    assert_eq!(index.service("web", "10.96.0.7"), ["a", "b"]);
    assert_eq!(index.service("web", "10.96.0.8"), [""; 0], "it still has a ClusterIP");
    assert_eq!(index.service("web", "None"), ["a", "b"]);
    let statuses = json!([{"parentRef": service_ref("api"), "controllerName": "x", "conditions": []}]);
    let parents = json!([service_ref("api")]);
    let affected = index.route_with(Kind::GrpcRoute, ("c", "2"), (parents, json!([])), statuses);
    assert_eq!(affected, ["c"], "the other routes of the parent are not affected");
}

/// Returns a controller whose API server never responds.
fn unresponsive_controller() -> Controller {
    let client = Client::new(
        tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<kube::client::Body>, Infallible>>()
        }),
        "default",
    );
    Controller::new(client, settings(), &Registry::new())
}

/// Returns a route whose parent is the Server of the same name.
fn route(name: &str) -> Event {
    let spec = json!({"parentRefs": [server_ref(name)], "rules": []});
    let manifest = json!({"metadata": {"name": name, "namespace": "shop"}, "spec": spec});
    Event::Applied(resources::decode(Kind::PolicyHttpRoute, manifest).unwrap())
}

#[tokio::test]
async fn only_changed_statuses_are_queued_and_only_while_leading() {
    let controller = unresponsive_controller();
    let server = |name: &str| {
        let manifest =
            json!({"metadata": {"name": name, "namespace": "shop"}, "spec": {"podSelector": {}, "port": 80}});
        Event::Applied(resources::decode(Kind::Server, manifest).unwrap())
    };
    let enqueued = || controller.0.metrics.enqueues.get();
    controller.apply(vec![route("a")]);
    assert_eq!(enqueued(), 0, "another process leads");
    controller.0.state.lock().queue = Some(StatusQueue::default());
    controller.apply(vec![route("b"), server("b"), server("unused")]);
    controller.apply(vec![route("b")]);
    assert_eq!(enqueued(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_timed_out_patch_is_counted_and_retried_at_the_next_resync() {
    let controller = unresponsive_controller();
    controller.apply(vec![route("a")]);
    controller.0.state.lock().queue = Some(StatusQueue::default());
    let metrics = &controller.0.metrics;
    let start = Instant::now();
    // The resync interval is 10 s, and a patch times out after 5 s.
    let checks = async {
        for (seconds, enqueued, timed_out) in [(4, 1, 0), (6, 1, 1), (9, 1, 1), (11, 2, 1), (16, 2, 2), (21, 3, 2)] {
            tokio::time::sleep_until(start + Duration::from_secs(seconds)).await;
            assert_eq!(
                (metrics.enqueues.get(), metrics.timeouts.get()),
                (enqueued, timed_out),
                "after {seconds} s"
            );
        }
    };
    tokio::select! {
        never = controller.resync_periodically() => match never {},
        never = controller.run_worker() => match never {},
        () = checks => {}
    }
    assert_eq!((metrics.patches.get(), metrics.api_errors.get()), (0, 0));
}

#[tokio::test]
async fn queue_overflows_are_counted() {
    let controller = unresponsive_controller();
    controller.0.state.lock().queue = Some(StatusQueue::default());
    controller.apply((0..MAX_QUEUED_OBJECTS + 3).map(|n| route(&n.to_string())).collect());
    let metrics = &controller.0.metrics;
    assert_eq!((metrics.enqueues.get(), metrics.overflows.get()), (10_000, 3));
    // Objects that are queued already do not need space.
    let queued = controller.0.state.lock().queue.as_ref().unwrap().waiting[0].clone();
    controller.apply(vec![route(&queued.name.name)]);
    assert_eq!((metrics.enqueues.get(), metrics.overflows.get()), (10_000, 3));
}

#[test]
fn statuses_of_unreadable_objects_have_the_reason() {
    let target = json!({"group": POLICY, "kind": "Server", "name": "s"});
    let web = json!([{"group": "core", "kind": "Service", "name": "web", "port": 80}]);
    let rules = json!([{"timeouts": {"request": "soon"}}]);
    for (kind, spec) in [
        (Kind::GatewayHttpRoute, json!({"parentRefs": web, "rules": rules})),
        (Kind::TlsRoute, json!({"parentRefs": web, "rules": 7})),
        (Kind::RateLimitPolicy, json!({"targetRef": target, "total": 7})),
        (Kind::EgressNetwork, json!({"trafficPolicy": "Maybe"})),
    ] {
        let metadata = json!({"name": "x", "namespace": "shop", "generation": 4, "resourceVersion": "9"});
        let object = json!({"metadata": metadata, "spec": spec});
        let reason = resources::decode(kind, &object).unwrap_err().to_string();
        let unreadable = Unreadable::from_value(kind, &object, &reason).unwrap();
        let mut index = TestIndex::new();
        index.server("s");
        index.service("web", "10.0.0.1");
        index.0.apply_unreadable(&unreadable);
        let body = index.patch(kind, "x").unwrap();
        let status = match kind.is_route() {
            true => &body["status"]["parents"][0],
            false => &body["status"],
        };
        let condition = &status["conditions"][0];
        let summary = [&condition["type"], &condition["status"], &condition["reason"]];
        assert_eq!(summary, ["Accepted", "False", "UnsupportedValue"], "{kind:?}: {body}");
        assert_eq!(condition["observedGeneration"], 4);
        let message = condition["message"].as_str().unwrap();
        assert!(message.contains(&reason), "{message} does not say {reason}");
    }
}
