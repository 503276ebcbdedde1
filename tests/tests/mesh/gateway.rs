//! A proxy that is a gateway: forwards requests and bytes to the Services that clients name in the transport header, if the policy of
//! its own port permits the client.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_tungstenite::client_async;
use tokio_tungstenite::tungstenite::Message;
use tulle_proto::destination::{
    AuthorityOverride, ProtocolHint, TlsIdentity, WeightedAddr, protocol_hint, tls_identity,
};
use tulle_proto::outbound::proxy_protocol::{Kind, Tls};
use tulle_proto::outbound::{Backend, OutboundPolicy, TlsRoute, tls_route};
use tulle_proto::tls_route::{SniMatch, sni_match};
use tulle_tests::apps;
use tulle_tests::client::{Http1 as Http1Client, request};
use tulle_tests::eventually::eventually;
use tulle_tests::fake_policy_service::{FakePolicyService, POLICY_ADDR};
use tulle_tests::mesh::{DETECTED_TCP, HTTP, Mesh, OPAQUE, identity, mesh};

use crate::scripted_policies::{ORIG_DST, client_hello, endpoint, forward, http1, metadata, opaque, policy, rule};
use crate::{direct, websocket};

/// Runs a test in which `client` sends everything to the inbound port of the proxy of `web`, with a transport header.
/// `web` is a gateway for these suffixes.
fn run_with_gateway(suffixes: &str, test: impl AsyncFnOnce(&Mesh, &FakePolicyService, WeightedAddr) + Send) {
    run_with_gateway_env(&[("INBOUND_GATEWAY_SUFFIXES", suffixes)], test);
}

/// As [`run_with_gateway`], with these variables of `web`.
fn run_with_gateway_env(
    variables: &[(&str, &str)],
    test: impl AsyncFnOnce(&Mesh, &FakePolicyService, WeightedAddr) + Send,
) {
    let mesh = mesh()
        .workload("client")
        .workload_env("POLICY_SVC_ADDR", POLICY_ADDR)
        .workload("web");
    let mesh = variables
        .iter()
        .fold(mesh, |mesh, (name, value)| mesh.workload_env(name, value));
    mesh.workload("other").run(async |mesh: &Mesh| {
        let policies = FakePolicyService::serve().await;
        let name = tls_identity::DnsLikeIdentity { name: identity("web") };
        let to_proxy = WeightedAddr {
            tls_identity: Some(TlsIdentity {
                strategy: Some(tls_identity::Strategy::DnsLikeIdentity(name.clone())),
                server_name: Some(name),
            }),
            protocol_hint: Some(ProtocolHint {
                protocol: Some(protocol_hint::Protocol::H2(Default::default())),
                opaque_transport: Some(protocol_hint::OpaqueTransport { inbound_port: 4143 }),
            }),
            ..endpoint((mesh.ip("web"), 4143).into())
        };
        test(mesh, &policies, to_proxy).await;
    });
}

#[test]
fn a_transport_header_that_leads_back_to_its_proxy_is_refused() {
    run_with_gateway(
        "",
        async |mesh: &Mesh, policies: &FakePolicyService, back: WeightedAddr| {
            policies.set_destination_policy(Ok(http1(rule(forward(back)))));
            let answer = mesh.get("client", ORIG_DST, "/").await;
            assert_eq!((answer.status.as_u16(), answer.cause()), (502, "loop"));
        },
    );
}

#[test]
fn a_transport_header_with_a_name_is_refused_without_a_gateway() {
    run_with_gateway(
        "",
        async |mesh: &Mesh, policies: &FakePolicyService, to_proxy: WeightedAddr| {
            policies.set_destination_policy(Ok(http1(rule(forward(with_authority(to_proxy, "other.test:81"))))));
            assert_eq!(mesh.get("client", ORIG_DST, "/").await.status, 502);
            let cause = ["cause=\"bad-transport-header\""];
            mesh.wait_for_metric_at_least("web", "tulle_failures_total", &cause, 1.0)
                .await;
        },
    );
}

/// The same endpoint, with an authority override.
fn with_authority(endpoint: WeightedAddr, name: &str) -> WeightedAddr {
    WeightedAddr {
        authority_override: Some(AuthorityOverride {
            authority_override: name.into(),
        }),
        ..endpoint
    }
}

#[test]
fn a_gateway_forwards_requests_to_the_names_that_it_serves() {
    run_with_gateway(
        "svc.cluster.local.",
        async |mesh: &Mesh, policies: &FakePolicyService, to_proxy: WeightedAddr| {
            apps::start_echo(mesh, "other").await;
            let service = format!("other.shop.svc.cluster.local:{HTTP}");
            policies.set_destination_policy(Ok(http1(rule(forward(with_authority(to_proxy.clone(), &service))))));
            let answer = mesh.get("client", ORIG_DST, "/headers").await;
            assert_eq!(answer.status, 200, "{answer:?}");
            let seen: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
            // The gateway has sent the request to the other sidecar on behalf of the client.
            assert_eq!(seen["l5d-client-id"], serde_json::json!([identity("web")]));
            let (gateway, client) = (identity("web"), identity("client"));
            let passed = format!("by={gateway};for={client};host=\"{service}\";proto=https");
            assert_eq!(seen["forwarded"], serde_json::json!([passed]));

            let elsewhere = with_authority(to_proxy.clone(), "other.test:81");
            policies.set_destination_policy(Ok(http1(rule(forward(elsewhere)))));
            eventually("the gateway refuses a name that it does not serve", async || {
                let answer = mesh.get("client", ORIG_DST, "/").await;
                (answer.cause() == "gateway-domain").then(|| assert_eq!(answer.status, 404))
            })
            .await;
            let counted = [
                "error=\"gateway domain invalid\"",
                "target_port=\"4143\"",
                "srv_kind=\"default\"",
                "srv_port=\"4143\"",
            ];
            mesh.wait_for_metric_at_least("web", "inbound_http_errors_total", &counted, 1.0)
                .await;

            policies.set_destination_policy(Ok(http1(rule(forward(with_authority(to_proxy, &service))))));
            eventually("the gateway refuses a request that has passed it before", async || {
                let mut again = request("/");
                let passed = format!("by={gateway};for=x").parse().unwrap();
                again.headers_mut().append("forwarded", passed);
                let mut client = Http1Client::handshake(mesh.dial("client", ORIG_DST).await).await;
                let answer = client.fetch(again).await.unwrap();
                (answer.cause() == "gateway-loop").then(|| assert_eq!(answer.status, 508))
            })
            .await;
        },
    );
}

/// The policy that sends bytes to this endpoint.
fn bytes_to(endpoint: WeightedAddr) -> OutboundPolicy {
    policy(Kind::Opaque(opaque(forward(endpoint))))
}

/// The policy that sends TLS connections for this server name to the backend, and refuses others.
fn tls_to(server_name: &str, backend: Backend) -> OutboundPolicy {
    let to = tls_route::RouteBackend {
        backend: Some(backend),
        ..Default::default()
    };
    let kind =
        tls_route::distribution::Kind::FirstAvailable(tls_route::distribution::FirstAvailable { backends: vec![to] });
    let route = TlsRoute {
        metadata: metadata("route"),
        snis: vec![SniMatch {
            r#match: Some(sni_match::Match::Exact(server_name.into())),
        }],
        rules: vec![tls_route::Rule {
            backends: Some(tls_route::Distribution { kind: Some(kind) }),
            filters: Vec::new(),
        }],
    };
    policy(Kind::Tls(Tls { routes: vec![route] }))
}

/// The same endpoint for opaque bytes, with an authority override.
fn opaque_with_authority(endpoint: WeightedAddr, name: &str) -> WeightedAddr {
    WeightedAddr {
        protocol_hint: Some(ProtocolHint {
            protocol: Some(protocol_hint::Protocol::Opaque(Default::default())),
            opaque_transport: Some(protocol_hint::OpaqueTransport { inbound_port: 4143 }),
        }),
        ..with_authority(endpoint, name)
    }
}

/// Sends bytes, and returns those that the echo server sends back: all of them, or none if the connection is closed.
async fn echoed(mut stream: TcpStream, sent: &[u8]) -> Option<Vec<u8>> {
    // The write fails if the connection is already closed.
    stream.write_all(sent).await.ok()?;
    let mut back = vec![0; sent.len()];
    stream.read_exact(&mut back).await.ok()?;
    Some(back)
}

#[test]
fn a_gateway_forwards_bytes_to_the_names_that_it_serves() {
    run_with_gateway(
        "svc.cluster.local.",
        async |mesh: &Mesh, policies: &FakePolicyService, to_proxy: WeightedAddr| {
            apps::start_echo(mesh, "other").await;
            let to_port = |port: u16| {
                let name = format!("other.shop.svc.cluster.local:{port}");
                opaque_with_authority(to_proxy.clone(), &name)
            };
            // Each case uses its own destination, so that it need not wait for a policy change.
            let at = |n: u8| SocketAddr::from(([10, 66, 7, n], HTTP));
            policies.set_destination_policy(Ok(bytes_to(to_port(OPAQUE))));
            let back = echoed(mesh.dial("client", at(1)).await, b"hello").await;
            assert_eq!(back.as_deref(), Some(&b"hello"[..]));

            // TLS of the application arrives unchanged.
            policies.set_destination_policy(Ok(tls_to("app.test", forward(to_port(DETECTED_TCP)))));
            for (server_name, arrives) in [("app.test", true), ("unknown.test", false)] {
                let hello = client_hello(server_name);
                let back = echoed(mesh.dial("client", at(2)).await, &hello).await;
                assert_eq!(back.is_some(), arrives, "{server_name}");
                assert!(back.is_none_or(|back| back == hello), "{server_name}");
            }
        },
    );
}

/// A Service for the admin port of the gateway `web`, whose policy permits nobody to use this port.
const ADMIN_SERVICE: &str = "\
apiVersion: v1
kind: Service
metadata: {name: admin, namespace: shop}
spec: {clusterIP: 10.66.1.200, selector: {app: web}, ports: [{name: admin, port: 4191, targetPort: 4191}]}
---
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: admin, namespace: shop}
spec: {podSelector: {matchLabels: {app: web}}, port: 4191, proxyProtocol: HTTP/1, accessPolicy: deny}
";

#[test]
fn a_gateway_does_not_forward_to_ports_of_its_own_workload() {
    run_with_gateway(
        "svc.cluster.local.",
        async |mesh: &Mesh, policies: &FakePolicyService, to_proxy: WeightedAddr| {
            apps::start_echo(mesh, "web").await;
            mesh.write("admin", ADMIN_SERVICE);
            // Each case uses its own destination, so that it need not wait for a policy change.
            let at = |n: u8| SocketAddr::from(([10, 66, 6, n], HTTP));
            for (n, name, path) in [
                (1, format!("web.shop.svc.cluster.local:{HTTP}"), "/"),
                (2, "admin.shop.svc.cluster.local:4191".to_owned(), "/metrics"),
                (3, "admin.shop.svc.cluster.local:4191".to_owned(), "/env.json"),
            ] {
                policies.set_destination_policy(Ok(http1(rule(forward(with_authority(to_proxy.clone(), &name))))));
                let answer = eventually(&format!("the gateway knows {name}"), async || {
                    let answer = mesh.get("client", at(n), path).await;
                    (answer.status != 404).then_some(answer)
                })
                .await;
                assert_eq!((answer.status.as_u16(), answer.cause()), (502, "loop"), "{name}{path}");
            }
            let opaque = opaque_with_authority(to_proxy, &format!("web.shop.svc.cluster.local:{OPAQUE}"));
            policies.set_destination_policy(Ok(bytes_to(opaque)));
            let back = echoed(mesh.dial("client", at(4)).await, b"hello").await;
            assert_eq!(back, None);
            let cause = ["cause=\"loop\"", "direction=\"inbound\""];
            mesh.wait_for_metric_at_least("web", "tulle_failures_total", &cause, 4.0)
                .await;
        },
    );
}

/// Variables of a gateway that serves the Services with the label `exported`.
const ENV_WITH_SELECTOR: [(&str, &str); 3] = [
    ("INBOUND_GATEWAY_SUFFIXES", "svc.cluster.local."),
    ("POLICY_WORKLOAD", WORKLOAD_WITH_SELECTOR),
    ("DESTINATION_CONTEXT", WORKLOAD_WITH_SELECTOR),
];
const WORKLOAD_WITH_SELECTOR: &str = r#"{"ns":"shop", "pod":"web", "exportedServices":"exported"}"#;

#[test]
fn a_gateway_with_a_selector_forwards_only_to_exported_services() {
    run_with_gateway_env(
        &ENV_WITH_SELECTOR,
        async |mesh: &Mesh, policies: &FakePolicyService, to_proxy: WeightedAddr| {
            apps::start_echo(mesh, "other").await;
            let name = |port: u16| format!("other.shop.svc.cluster.local:{port}");
            let http = || http1(rule(forward(with_authority(to_proxy.clone(), &name(HTTP)))));
            let bytes = || bytes_to(opaque_with_authority(to_proxy.clone(), &name(OPAQUE)));
            // Each case uses its own destination, so that it need not wait for a change of its policy.
            let at = |n: u8| SocketAddr::from(([10, 66, 7, n], HTTP));
            policies.set_destination_policy(Ok(http()));
            let answer = mesh.get("client", at(1), "/").await;
            assert_eq!((answer.status.as_u16(), answer.cause()), (404, "gateway-not-exported"));
            policies.set_destination_policy(Ok(bytes()));
            assert_eq!(echoed(mesh.dial("client", at(2)).await, b"hello").await, None);
            let refused = ["direction=\"inbound\"", "cause=\"gateway-not-exported\""];
            mesh.wait_for_metric_at_least("web", "tulle_failures_total", &refused, 2.)
                .await;

            // The gateway follows the labels of the Service.
            let unlabelled = mesh.manifest("service-other");
            let labelled = unlabelled.replace("metadata:\n", "metadata:\n  labels: {exported: \"true\"}\n");
            mesh.write("service-other", &labelled);
            policies.set_destination_policy(Ok(http()));
            eventually("requests are forwarded", async || {
                (mesh.get("client", at(3), "/").await.status == 200).then_some(())
            })
            .await;
            policies.set_destination_policy(Ok(bytes()));
            eventually("bytes are forwarded", async || {
                echoed(mesh.dial("client", at(4)).await, b"hello").await
            })
            .await;
            let (mut open, mut back) = (mesh.dial("client", at(4)).await, [0_u8; 5]);
            open.write_all(b"hello").await.unwrap();
            open.read_exact(&mut back).await.unwrap();
            mesh.write("service-other", &unlabelled);
            let end = tokio::time::timeout(Duration::from_secs(5), open.read(&mut back)).await;
            let end = end.expect("open connections for bytes are closed");
            assert!(!matches!(end, Ok(1..)), "{end:?}");
            let closed = ["reason=\"not-exported\""];
            mesh.wait_for_metric_at_least("web", "tulle_inbound_denied_total", &closed, 1.)
                .await;
            policies.set_destination_policy(Ok(http()));
            eventually("requests are refused again", async || {
                let answer = mesh.get("client", at(5), "/").await;
                (answer.cause() == "gateway-not-exported").then_some(())
            })
            .await;
        },
    );
}

#[test]
fn open_tunnels_through_a_gateway_are_closed_when_their_service_is_exported_no_longer() {
    run_with_gateway_env(
        &ENV_WITH_SELECTOR,
        async |mesh: &Mesh, policies: &FakePolicyService, to_proxy: WeightedAddr| {
            let _app = websocket::server(mesh, "other", websocket::echo).await;
            let unlabelled = mesh.manifest("service-other");
            let labelled = unlabelled.replace("metadata:\n", "metadata:\n  labels: {exported: \"true\"}\n");
            mesh.write("service-other", &labelled);
            let mut tunnels = Vec::new();
            // Each protocol uses its own destination, so that it need not wait for a policy change.
            for (n, endpoint) in (1..).zip(over_both_protocols(to_proxy)) {
                policies.set_destination_policy(Ok(http1(rule(forward(endpoint)))));
                let dst = SocketAddr::from(([10, 66, 7, n], HTTP));
                let (mut tunnel, _) = eventually("a tunnel through the gateway", async || {
                    let stream = mesh.dial("client", dst).await;
                    client_async("ws://web.test/", stream).await.ok()
                })
                .await;
                tunnel.send(Message::text("hello")).await.unwrap();
                let echoed = tunnel.next().await.expect("the tunnel is open");
                assert_eq!(echoed.unwrap(), Message::text("hello"));
                tunnels.push(tunnel);
            }
            mesh.write("service-other", &unlabelled);
            for mut tunnel in tunnels {
                let next = tokio::time::timeout(Duration::from_secs(5), tunnel.next());
                // The client's proxy may end it in order or by a reset.
                let next = next.await.expect("the tunnel is closed");
                assert!(!matches!(next, Some(Ok(_))), "{next:?}");
            }
            let closed = ["reason=\"not-exported\""];
            mesh.wait_for_metric_at_least("web", "tulle_inbound_denied_total", &closed, 2.)
                .await;
        },
    );
}

/// The endpoint for requests to `other` through the gateway, over HTTP/1 and over HTTP/2. A tunnel to the gateway is a whole HTTP/1
/// connection, or a stream of an HTTP/2 connection (extended CONNECT).
fn over_both_protocols(to_proxy: WeightedAddr) -> [WeightedAddr; 2] {
    let over_http2 = with_authority(to_proxy, &format!("other.shop.svc.cluster.local:{HTTP}"));
    let over_http1 = WeightedAddr {
        protocol_hint: Some(ProtocolHint {
            protocol: None,
            opaque_transport: Some(protocol_hint::OpaqueTransport { inbound_port: 4143 }),
        }),
        ..over_http2.clone()
    };
    [over_http1, over_http2]
}

/// The policy of the gateway `web`: it permits only this identity, and only from this network.
fn gateway_policy(identity: &str, network: &str) -> String {
    format!(
        "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {{name: gateway, namespace: shop}}
spec: {{podSelector: {{matchLabels: {{app: web}}}}, port: 4143, accessPolicy: deny}}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {{name: gateway, namespace: shop}}
spec:
  targetRef: {{group: policy.linkerd.io, kind: Server, name: gateway}}
  requiredAuthenticationRefs:
  - {{group: policy.linkerd.io, kind: MeshTLSAuthentication, name: gateway}}
  - {{group: policy.linkerd.io, kind: NetworkAuthentication, name: gateway}}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: MeshTLSAuthentication
metadata: {{name: gateway, namespace: shop}}
spec: {{identities: [\"{identity}\"]}}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: NetworkAuthentication
metadata: {{name: gateway, namespace: shop}}
spec: {{networks: [{{cidr: {network}}}]}}
"
    )
}

#[test]
fn the_policy_of_a_gateway_permits_one_identity_from_one_network() {
    run_with_gateway(
        "svc.cluster.local.",
        async |mesh: &Mesh, policies: &FakePolicyService, to_proxy: WeightedAddr| {
            apps::start_echo(mesh, "other").await;
            let name = |port: u16| format!("other.shop.svc.cluster.local:{port}");
            let http = || http1(rule(forward(with_authority(to_proxy.clone(), &name(HTTP)))));
            let bytes = || bytes_to(opaque_with_authority(to_proxy.clone(), &name(OPAQUE)));
            // Connections between proxies have addresses in 10.66.0.0/16.
            for (n, identity, network, expected) in [
                (1, identity("other"), "10.66.0.0/16", (403, "why=identity")),
                (2, identity("client"), "10.67.0.0/16", (403, "why=network")),
                (3, identity("client"), "10.66.0.0/16", (200, "")),
            ] {
                // Each case uses its own destinations, so that it need not wait for a change of their policy.
                let at = |kind: u8| SocketAddr::from(([10, 66, kind, n], HTTP));
                mesh.write("gateway-policy", &gateway_policy(&identity, network));
                policies.set_destination_policy(Ok(http()));
                let (status, cause) = expected;
                eventually(&format!("{status} {cause}"), async || {
                    let answer = mesh.get("client", at(7), "/").await;
                    let has_cause = answer.header("l5d-proxy-cause").contains(cause);
                    (answer.status == status && has_cause).then_some(())
                })
                .await;
                policies.set_destination_policy(Ok(bytes()));
                let back = echoed(mesh.dial("client", at(8)).await, b"hello").await;
                assert_eq!(back.is_some(), status == 200, "{identity} from {network}");
            }
            for reason in ["reason=\"identity\"", "reason=\"network\""] {
                // A request and a connection.
                let labels = ["srv_name=\"gateway\"", reason];
                mesh.wait_for_metric_at_least("web", "tulle_inbound_denied_total", &labels, 2.)
                    .await;
            }
            let server = ["srv_name=\"gateway\""];
            mesh.wait_for_metric_at_least("web", "inbound_http_authz_deny_total", &server, 2.)
                .await;
            mesh.wait_for_metric_at_least("web", "inbound_tcp_authz_deny_total", &server, 2.)
                .await;
        },
    );
}

/// Connections with a transport header, by its protocol.
const TRANSPORT_HEADERS: &str = "inbound_tcp_transport_header_connections_total";

/// A route of the gateway `web` that has no rule for the requests of other paths.
const ROUTE_OF_ANOTHER_PATH: &str = "\
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {name: gateway, namespace: shop}
spec:
  parentRefs: [{group: policy.linkerd.io, kind: Server, name: gateway}]
  rules: [{matches: [{path: {type: Exact, value: /elsewhere}}]}]
";

#[test]
fn a_policy_change_to_deny_closes_tunnels_through_a_gateway() {
    let denied = gateway_policy(&identity("other"), "10.66.0.0/16");
    assert_tunnels_are_closed_by(&denied, "reason=\"identity\"", false);
}

#[test]
fn changed_rules_close_tunnels_through_a_gateway_whose_requests_they_refuse() {
    let permitted = gateway_policy(&identity("client"), "10.66.0.0/16");
    let with_route = format!("{permitted}---\n{ROUTE_OF_ANOTHER_PATH}");
    assert_tunnels_are_closed_by(&with_route, "reason=\"tunnel-request\"", true);
}

/// Checks that open tunnels through a gateway stay open with a policy that permits them, and are closed by this policy, for this
/// reason. A tunnel of the path `/elsewhere`, over the same HTTP/2 connection, stays open if `keeps_elsewhere`.
fn assert_tunnels_are_closed_by(changed_policy: &str, reason: &str, keeps_elsewhere: bool) {
    run_with_gateway(
        "svc.cluster.local.",
        async |mesh: &Mesh, policies: &FakePolicyService, to_proxy: WeightedAddr| {
            let _app = websocket::server(mesh, "other", websocket::echo).await;
            let [over_http1, over_http2] = over_both_protocols(to_proxy);
            // Each protocol uses its own destination, so that it need not wait for a policy change.
            let at = |n: u8| SocketAddr::from(([10, 66, 7, n], HTTP));
            policies.set_destination_policy(Ok(http1(rule(forward(over_http1)))));
            let http1_tunnel = websocket::connect(mesh, at(1)).await;
            policies.set_destination_policy(Ok(http1(rule(forward(over_http2)))));
            let http2_tunnel = websocket::connect(mesh, at(2)).await;
            let mut elsewhere = websocket::connect_path(mesh, at(2), "/elsewhere").await;
            let mut tunnels = [http1_tunnel, http2_tunnel];
            for protocol in ["session_protocol=\"http/1\"", "session_protocol=\"http/2\""] {
                mesh.wait_for_metric_at_least("web", TRANSPORT_HEADERS, &[protocol], 1.)
                    .await;
            }

            mesh.write("gateway-policy", &gateway_policy(&identity("client"), "10.66.0.0/16"));
            let of_gateway = ["srv_name=\"gateway\""];
            eventually("the policy is known", async || {
                drop(websocket::connect(mesh, at(2)).await);
                let allowed = mesh.metric("web", "inbound_http_authz_allow_total", &of_gateway);
                (allowed.await > 0.).then_some(())
            })
            .await;
            for tunnel in &mut tunnels {
                tunnel.send(Message::text("hello")).await.unwrap();
                let echoed = tunnel.next().await.expect("a permitted tunnel stays open");
                assert_eq!(echoed.unwrap(), Message::text("hello"));
            }

            mesh.write("gateway-policy", changed_policy);
            for mut tunnel in tunnels {
                let next = tokio::time::timeout(Duration::from_secs(5), tunnel.next());
                // The client's proxy may end it in order or by a reset.
                let next = next.await.expect("the tunnel is closed");
                assert!(!matches!(next, Some(Ok(_))), "{next:?}");
            }
            let sent = elsewhere.send(Message::text("hello")).await;
            let is_open = sent.is_ok() && matches!(elsewhere.next().await, Some(Ok(Message::Text(_))));
            assert_eq!(is_open, keeps_elsewhere);
            mesh.wait_for_metric_at_least("web", "inbound_tcp_authz_terminate_total", &[], 2.)
                .await;
            mesh.wait_for_metric_at_least("web", "tulle_inbound_denied_total", &[reason], 2.)
                .await;
        },
    );
}

#[test]
fn a_gateway_refuses_clients_without_a_certificate_of_its_anchors() {
    run_with_gateway(
        "svc.cluster.local.",
        async |mesh: &Mesh, _: &FakePolicyService, _: WeightedAddr| {
            let mut plaintext = TcpStream::connect((mesh.ip("web"), 4143)).await.unwrap();
            plaintext
                .write_all(b"GET / HTTP/1.1\r\nhost: other.shop.svc.cluster.local\r\n\r\n")
                .await
                .unwrap();
            let mut received = Vec::new();
            // The connection may also end with a reset.
            let _ = plaintext.read_to_end(&mut received).await;
            assert!(!received.starts_with(b"HTTP/"), "at most a TLS alert");
            direct::assert_refused_with_other_anchor(mesh).await;
            for cause in ["cause=\"tls-handshake\"", "cause=\"tls-untrusted\""] {
                mesh.wait_for_metric("web", "tulle_failures_total", &[cause], 1.).await;
            }
            mesh.wait_for_metric("web", "tulle_inbound_tls_failures_total", &[], 2.)
                .await;
        },
    );
}
