//! Tests of the parents that accept a route, and of the resulting conditions.

use super::*;

#[test]
fn a_route_with_a_rejected_reference_displaces_no_other_route() {
    let mut index = TestIndex::new();
    index.service("web", "10.96.0.7");
    let with_section = json!([{"group": "", "kind": "Service", "name": "web", "port": 80, "sectionName": "x"}]);
    index.route(Kind::GrpcRoute, "grpc", with_section, json!([]));
    index.route(Kind::GatewayHttpRoute, "http", json!([service_ref("web")]), json!([]));
    let condition = first_condition(&index, Kind::GrpcRoute, "shop", "grpc");
    assert!(condition.starts_with("False NoMatchingParent: "), "{condition}");
    let condition_of_http = |index: &TestIndex| first_condition(index, Kind::GatewayHttpRoute, "shop", "http");
    assert_eq!(condition_of_http(&index), "True Accepted: ");
    let affected = index.route(Kind::GrpcRoute, "grpc", json!([service_ref("web")]), json!([]));
    assert!(affected.contains(&"http".to_owned()), "{affected:?}");
    let condition = condition_of_http(&index);
    assert!(condition.starts_with("False RouteReasonConflicted: "), "{condition}");
}

#[test]
fn a_route_is_displaced_only_by_routes_of_preceding_kinds_on_all_its_ports() {
    const HTTP: Kind = Kind::GatewayHttpRoute;
    const GRPC: Kind = Kind::GrpcRoute;
    const TLS: Kind = Kind::TlsRoute;
    const TCP: Kind = Kind::TcpRoute;
    /// Kind and port of the reference of a route.
    type Reference = (Kind, Option<u16>);
    let mut index = TestIndex::new();
    let ports = |all: &[(&str, u16, Option<&str>)]| {
        let port =
            |(name, port, app): &(&str, u16, Option<&str>)| json!({"name": name, "port": port, "appProtocol": app});
        all.iter().map(port).collect::<Vec<_>>()
    };
    let one = ports(&[("a", 80, None)]);
    let two = ports(&[("a", 80, None), ("b", 90, None)]);
    let h2c = ports(&[("a", 80, Some("kubernetes.io/h2c"))]);
    let http_and_opaque = ports(&[("a", 80, Some("http")), ("b", 90, Some("redis"))]);
    // The ports of the Service, the routes that take precedence, a route, and whether it is accepted.
    let rows: [(&[Value], &[Reference], Reference, bool); 14] = [
        // A reference without a port includes all ports.
        (&two, &[(HTTP, None)], (TCP, Some(80)), false),
        (&two, &[(GRPC, None)], (HTTP, Some(80)), false),
        (&two, &[(HTTP, None)], (TLS, None), false),
        // A port on which nothing takes precedence is enough.
        (&two, &[(HTTP, Some(80))], (TCP, None), true),
        (&two, &[(HTTP, Some(80)), (GRPC, Some(80))], (TCP, None), true),
        (&two, &[(HTTP, Some(80)), (TLS, Some(90))], (TCP, None), false),
        (&one, &[(HTTP, Some(80))], (TCP, None), false),
        (&two, &[(HTTP, Some(90))], (TCP, Some(80)), true),
        (&two, &[(TCP, None)], (HTTP, Some(80)), true),
        // A port that the Service does not list.
        (&two, &[(HTTP, None)], (TCP, Some(70)), false),
        (&two, &[(HTTP, Some(80)), (HTTP, Some(90))], (TCP, Some(70)), true),
        // Routes displace no others on ports whose protocol does not support their kind.
        (&http_and_opaque, &[(HTTP, None)], (TCP, Some(90)), true),
        (&http_and_opaque, &[(HTTP, None)], (TCP, None), true),
        (&h2c, &[(GRPC, None)], (HTTP, Some(80)), false),
    ];
    for (ports, preceding, (kind, port), is_accepted) in rows {
        let row = format!("{ports:?} {preceding:?} {kind:?} {port:?}");
        let metadata = json!({"name": "web", "namespace": "shop"});
        let spec = json!({"clusterIP": "10.96.0.7", "ports": ports});
        index.apply(Kind::Service, json!({"metadata": metadata, "spec": spec}));
        let parent = |port: Option<u16>| {
            let mut parent = service_ref("web");
            parent["port"] = json!(port);
            json!([parent])
        };
        for (n, (kind, port)) in preceding.iter().enumerate() {
            index.route(*kind, &format!("other-{n}"), parent(*port), json!([]));
        }
        index.route(kind, "r", parent(port), json!([]));
        let condition = first_condition(&index, kind, "shop", "r");
        let expected = match is_accepted {
            true => "True Accepted: ",
            false => "False RouteReasonConflicted: ",
        };
        assert!(condition.starts_with(expected), "{row}: {condition}");
        index.0.delete(&ObjectId::new(kind, NamespacedName::new("shop", "r")));
        for (n, (kind, _)) in preceding.iter().enumerate() {
            let name = NamespacedName::new("shop", format!("other-{n}"));
            index.0.delete(&ObjectId::new(*kind, name));
        }
    }
}

#[test]
fn the_oldest_route_for_the_same_connections_is_accepted() {
    let metadata = |namespace: &str, name: &str, day: u8| json!({"name": name, "namespace": namespace, "creationTimestamp": format!("2026-01-0{day}T00:00:00Z")});
    let web = |port: Option<u16>| {
        let mut parent = json!({"group": "", "kind": "Service", "name": "web", "namespace": "shop"});
        if let Some(port) = port {
            parent["port"] = json!(port);
        }
        parent
    };
    let spec = |port, hosts: &[&str]| json!({"parentRefs": [web(port)], "hostnames": hosts, "rules": [{}]});
    let accepted = "True Accepted: ";
    let older =
        |name: &str| format!("False RouteReasonConflicted: shop/{name} is older and matches the same connections");
    let tcp = Kind::TcpRoute;
    let mut index = TestIndex::new();
    index.service("web", "10.96.0.7");
    apply_route(&mut index, tcp, metadata("shop", "b", 1), spec(Some(80), &[]));
    let affected = apply_route(&mut index, tcp, metadata("shop", "a", 2), spec(Some(80), &[]));
    assert_eq!(affected, ["a", "b"]);
    apply_route(&mut index, tcp, metadata("shop", "c", 1), spec(None, &[]));
    apply_route(&mut index, tcp, metadata("shop", "d", 3), spec(Some(81), &[]));
    // A route outside the Service's namespace: older routes of the Service's namespace displace it.
    apply_route(&mut index, tcp, metadata("other", "z", 2), spec(Some(82), &[]));
    let condition_of = |name: &str| first_condition(&index, tcp, "shop", name);
    assert_eq!(condition_of("b"), accepted);
    assert_eq!(condition_of("a"), older("b"));
    assert_eq!(condition_of("c"), older("b"));
    assert_eq!(condition_of("d"), older("c"));
    assert_eq!(first_condition(&index, tcp, "other", "z"), older("c"));
    let tls = Kind::TlsRoute;
    let mut index = TestIndex::new();
    index.service("web", "10.96.0.7");
    apply_route(&mut index, tls, metadata("shop", "a", 1), spec(Some(80), &["a.b"]));
    apply_route(
        &mut index,
        tls,
        metadata("shop", "b", 2),
        spec(Some(80), &["c.d", "a.b"]),
    );
    apply_route(&mut index, tls, metadata("shop", "c", 3), spec(Some(80), &["e.f"]));
    let condition_of = |name: &str| first_condition(&index, tls, "shop", name);
    assert_eq!(
        (condition_of("a").as_str(), condition_of("c").as_str()),
        (accepted, accepted)
    );
    assert_eq!(condition_of("b"), older("a"));
}

#[test]
fn a_route_without_a_matching_parent_is_not_accepted() {
    let mut index = TestIndex::new();
    index.server("srv");
    let opaque = json!({"podSelector": {}, "port": 81, "proxyProtocol": "opaque"});
    index.apply(
        Kind::Server,
        json!({"metadata": {"name": "opaque", "namespace": "shop"}, "spec": opaque}),
    );
    for namespace in ["shop", "linkerd-egress"] {
        index.apply(
            Kind::EgressNetwork,
            json!({"metadata": {"name": "net", "namespace": namespace}, "spec": {"trafficPolicy": "Allow"}}),
        );
    }
    let mut condition_of = |kind: Kind, parent: Value| {
        apply_route(
            &mut index,
            kind,
            json!({"name": "r", "namespace": "shop"}),
            json!({"parentRefs": [parent], "rules": [{}]}),
        );
        first_condition(&index, kind, "shop", "r")
    };
    let other = json!({"group": POLICY, "kind": "Server", "name": "srv", "namespace": "other"});
    assert_eq!(
        condition_of(Kind::PolicyHttpRoute, other),
        "False NoMatchingParent: the parent does not exist"
    );
    assert!(condition_of(Kind::PolicyHttpRoute, server_ref("srv")).starts_with("True"));
    assert_eq!(
        condition_of(Kind::PolicyHttpRoute, server_ref("opaque")),
        "False NoMatchingParent: the Server's proxyProtocol is opaque, which does not support routes of this kind"
    );
    assert!(condition_of(Kind::GrpcRoute, server_ref("srv")).starts_with("False NoMatchingParent: the Server's"));
    let port = json!({"group": POLICY, "kind": "Server", "name": "srv", "port": 80});
    assert!(condition_of(Kind::PolicyHttpRoute, port).starts_with("False UnsupportedValue: the parentRef has a port"));
    let network = |namespace: &str| json!({"group": POLICY, "kind": "EgressNetwork", "name": "net", "namespace": namespace, "port": 443});
    assert!(condition_of(Kind::TcpRoute, network("shop")).starts_with("True"));
    assert!(condition_of(Kind::TcpRoute, network("linkerd-egress")).starts_with("True"));
    let mut without_port = network("shop");
    without_port.as_object_mut().unwrap().remove("port");
    assert_eq!(
        condition_of(Kind::TcpRoute, without_port),
        "False NoMatchingParent: the parentRef of an EgressNetwork has no port; add it"
    );
    let mut with_section = network("shop");
    with_section["sectionName"] = json!("a");
    assert!(
        condition_of(Kind::TcpRoute, with_section)
            .starts_with("False NoMatchingParent: the parentRef has a sectionName")
    );
    index.apply(
        Kind::EgressNetwork,
        json!({"metadata": {"name": "net", "namespace": "third"}, "spec": {"trafficPolicy": "Allow"}}),
    );
    apply_route(
        &mut index,
        Kind::TcpRoute,
        json!({"name": "r", "namespace": "shop"}),
        json!({"parentRefs": [network("third")], "rules": [{}]}),
    );
    assert_eq!(
        first_condition(&index, Kind::TcpRoute, "shop", "r"),
        "False NoMatchingParent: the parent is in another namespace and accepts only routes of its own namespace"
    );
    // A Server of another namespace is not a valid parent, although it exists.
    index.apply(
        Kind::Server,
        json!({"metadata": {"name": "srv", "namespace": "other"}, "spec": {"podSelector": {}, "port": 80}}),
    );
    let other = json!({"group": POLICY, "kind": "Server", "name": "srv", "namespace": "other"});
    apply_route(
        &mut index,
        Kind::PolicyHttpRoute,
        json!({"name": "r", "namespace": "shop"}),
        json!({"parentRefs": [other], "rules": [{}]}),
    );
    assert!(first_condition(&index, Kind::PolicyHttpRoute, "shop", "r").contains("another namespace"));
}

#[test]
fn a_route_is_accepted_only_if_the_protocol_of_a_port_supports_its_kind() {
    const HTTP: Kind = Kind::GatewayHttpRoute;
    const GRPC: Kind = Kind::GrpcRoute;
    const TLS: Kind = Kind::TlsRoute;
    const TCP: Kind = Kind::TcpRoute;
    const ALL: [Kind; 4] = [HTTP, GRPC, TLS, TCP];
    let mut index = TestIndex::new();
    let service = |annotations: Value, ports: Value| {
        json!({
            "metadata": {"name": "web", "namespace": "shop", "annotations": annotations},
            "spec": {"clusterIP": "10.96.0.7", "ports": ports},
        })
    };
    let ports = |app_protocol: Option<&str>| {
        let port = |name: &str, port: u16| json!({"name": name, "port": port, "appProtocol": app_protocol});
        json!([port("a", 80), port("b", 3306)])
    };
    let opaque = |ports: &str| json!({"config.linkerd.io/opaque-ports": ports});
    /// Annotations and `appProtocol` of the Service, the port of the reference, and the accepted kinds.
    type Row = (Value, Option<&'static str>, Option<u16>, &'static [Kind]);
    let rows: [Row; 14] = [
        (json!({}), None, Some(80), &ALL),
        (json!({}), Some("http"), Some(80), &[HTTP]),
        (json!({}), Some("kubernetes.io/h2c"), Some(80), &[HTTP, GRPC]),
        (json!({}), Some("grpc"), Some(80), &[HTTP, GRPC]),
        (json!({}), Some("redis"), Some(80), &[TCP]),
        (opaque("80"), None, Some(80), &[TCP]),
        // The opaque-ports annotation takes precedence over `appProtocol`, as in proxies.
        (opaque("a"), Some("grpc"), Some(80), &[TCP]),
        (opaque("80"), Some("http"), Some(80), &[TCP]),
        // By the cluster's default, unless the annotation says otherwise.
        (json!({}), None, Some(3306), &[TCP]),
        (json!({}), Some("kubernetes.io/h2c"), Some(3306), &[TCP]),
        (opaque(""), Some("http"), Some(3306), &[HTTP]),
        (opaque(""), None, Some(3306), &[HTTP, GRPC, TLS, TCP]),
        // Without a port in the reference, one port is enough.
        (json!({}), None, None, &ALL),
        (opaque("80,3306"), None, None, &[TCP]),
    ];
    for (annotations, app_protocol, port, accepted) in rows {
        let row = format!("{annotations} {app_protocol:?} {port:?}");
        let mut parent = service_ref("web");
        parent["port"] = json!(port);
        for kind in ALL {
            index.apply(Kind::Service, service(json!({}), json!([{"port": 80}])));
            index.route(kind, "r", json!([parent]), json!([]));
            let affected = index.apply(Kind::Service, service(annotations.clone(), ports(app_protocol)));
            assert!(affected.contains(&"r".to_owned()), "{row}");
            let condition = first_condition(&index, kind, "shop", "r");
            let expected = match accepted.contains(&kind) {
                true => "True Accepted: ",
                false => "False NoMatchingParent: the protocol of ",
            };
            assert!(condition.starts_with(expected), "{row} {kind:?}: {condition}");
            index.0.delete(&ObjectId::new(kind, NamespacedName::new("shop", "r")));
        }
    }
    for (annotations, kind, expected) in [
        (json!({}), GRPC, "True Accepted: "),
        (opaque("443"), TCP, "True Accepted: "),
        (
            opaque("443"),
            TLS,
            "False NoMatchingParent: the protocol of port 443 is opaque, which does not support routes of this kind; check appProtocol \
             and opaque ports of the parent",
        ),
    ] {
        let metadata = json!({"name": "net", "namespace": "shop", "annotations": annotations});
        index.apply(
            Kind::EgressNetwork,
            json!({"metadata": metadata, "spec": {"trafficPolicy": "Allow"}}),
        );
        let parent = json!({"group": POLICY, "kind": "EgressNetwork", "name": "net", "port": 443});
        index.route(kind, "e", json!([parent]), json!([]));
        assert_eq!(first_condition(&index, kind, "shop", "e"), expected);
    }
}
