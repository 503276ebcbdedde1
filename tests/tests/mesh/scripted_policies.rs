//! Proxy behaviour for policies that no manifest can produce: each protocol, each error status, valid and invalid policies.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response, Version};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::Code;
use tulle_proto::destination::{AuthorityOverride, ProtocolHint, WeightedAddr, protocol_hint};
use tulle_proto::grpc_route::GrpcFailureInjector;
use tulle_proto::http_route::{HttpFailureInjector, RequestHeaderModifier};
use tulle_proto::http_types::{Headers, headers::Header};
use tulle_proto::inbound::{self, Authn, Authz, Network, Server, authn};
use tulle_proto::meta::{Metadata, Resource, metadata};
use tulle_proto::net::{IpAddress, IpNetwork, ip_address};
use tulle_proto::outbound::proxy_protocol::{Detect, Grpc, Http1, Http2, Kind, Opaque, Tls};
use tulle_proto::outbound::{
    Backend, GrpcRoute, HttpRoute, OpaqueRoute, OutboundPolicy, ProxyProtocol, Queue, TlsRoute, backend, grpc_route,
    http_route, opaque_route, tls_route,
};
use tulle_proto::tls_route::{SniMatch, sni_match};
use tulle_tests::apps::{self, App};
use tulle_tests::client::{
    AnyBody, CollectedResponse, Http1 as Http1Client, Http2 as Http2Client, full, http2_request, read_until, request,
};
use tulle_tests::eventually::eventually;
use tulle_tests::fake_policy_service::{FakePolicyService, POLICY_ADDR};
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, UNMESHED_IP, identity, mesh};

/// The original destination of the application; no server has this address.
pub(crate) const ORIG_DST: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 66, 7, 7)), HTTP);

pub(crate) fn metadata(name: &str) -> Option<Metadata> {
    let resource = Resource {
        group: "core".into(),
        kind: "Service".into(),
        name: name.into(),
        namespace: "shop".into(),
        ..Resource::default()
    };
    Some(Metadata {
        kind: Some(metadata::Kind::Resource(resource)),
    })
}

pub(crate) fn seconds(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

pub(crate) fn endpoint(addr: SocketAddr) -> WeightedAddr {
    WeightedAddr {
        addr: Some(addr.into()),
        weight: 1,
        ..WeightedAddr::default()
    }
}

pub(crate) fn forward(to: WeightedAddr) -> Backend {
    Backend {
        metadata: metadata("backend"),
        queue: Some(Queue {
            capacity: 10,
            failfast_timeout: seconds(1),
        }),
        kind: Some(backend::Kind::Forward(to)),
    }
}

/// A rule that sends all requests to a backend.
pub(crate) fn rule(backend: Backend) -> http_route::Rule {
    let to = http_route::RouteBackend {
        backend: Some(backend),
        ..Default::default()
    };
    let kind =
        http_route::distribution::Kind::FirstAvailable(http_route::distribution::FirstAvailable { backends: vec![to] });
    rule_with_distribution(kind)
}

fn rule_with_distribution(kind: http_route::distribution::Kind) -> http_route::Rule {
    http_route::Rule {
        backends: Some(http_route::Distribution { kind: Some(kind) }),
        ..Default::default()
    }
}

/// One route with this rule.
pub(crate) fn routes(rule: http_route::Rule) -> Vec<HttpRoute> {
    vec![HttpRoute {
        metadata: metadata("route"),
        rules: vec![rule],
        ..HttpRoute::default()
    }]
}

pub(crate) fn opaque(backend: Backend) -> Opaque {
    let to = opaque_route::RouteBackend {
        backend: Some(backend),
        ..Default::default()
    };
    let kind = opaque_route::distribution::Kind::FirstAvailable(opaque_route::distribution::FirstAvailable {
        backends: vec![to],
    });
    let rule = opaque_route::Rule {
        backends: Some(opaque_route::Distribution { kind: Some(kind) }),
        ..Default::default()
    };
    Opaque {
        routes: vec![OpaqueRoute {
            metadata: metadata("route"),
            rules: vec![rule],
        }],
    }
}

pub(crate) fn policy(kind: Kind) -> OutboundPolicy {
    OutboundPolicy {
        metadata: metadata("web"),
        protocol: Some(ProxyProtocol { kind: Some(kind) }),
    }
}

pub(crate) fn http1(rule: http_route::Rule) -> OutboundPolicy {
    policy(Kind::Http1(Http1 {
        routes: routes(rule),
        failure_accrual: None,
    }))
}

/// Runs a test with `client`, whose policies the test sets, and `legacy` without a sidecar.
pub(crate) fn run_with_policies(test: impl AsyncFnOnce(&Mesh, &FakePolicyService) + Send) {
    let mesh = mesh()
        .workload("client")
        .workload_env("POLICY_SVC_ADDR", POLICY_ADDR)
        .unmeshed("legacy");
    mesh.run(async |mesh: &Mesh| {
        let policies = FakePolicyService::serve().await;
        policies.set_port_policy(Err(Code::InvalidArgument));
        test(mesh, &policies).await;
    });
}

/// Repeats a request until the response is as expected, because a policy takes effect with a delay.
pub(crate) async fn wait_for_response(mesh: &Mesh, what: &str, expected: (u16, &str)) -> CollectedResponse {
    eventually(what, async || {
        let answer = mesh.get("client", ORIG_DST, "/").await;
        ((answer.status.as_u16(), answer.cause()) == expected).then_some(answer)
    })
    .await
}

/// The client's `/debug/destinations` entry of an address.
pub(crate) async fn destination_status(mesh: &Mesh, address: SocketAddr) -> serde_json::Value {
    let all = crate::debug::json(mesh, "client", "/debug/destinations").await;
    let mut all = all.as_array().unwrap().iter();
    let found = all.find(|shown| shown["address"] == address.to_string());
    found.unwrap().clone()
}

#[test]
fn http_rules_of_a_policy_are_applied() {
    run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
        apps::start_echo(mesh, "legacy").await;
        let legacy = || forward(endpoint((mesh.ip("legacy"), HTTP).into()));
        let weighted = |weights: &[u32]| {
            let backends = weights.iter().map(|weight| http_route::WeightedRouteBackend {
                backend: Some(http_route::RouteBackend {
                    backend: Some(legacy()),
                    ..Default::default()
                }),
                weight: *weight,
            });
            rule_with_distribution(http_route::distribution::Kind::RandomAvailable(
                http_route::distribution::RandomAvailable {
                    backends: backends.collect(),
                },
            ))
        };
        let failing = || http_route::Rule {
            filters: vec![http_route::Filter {
                kind: Some(http_route::filter::Kind::FailureInjector(HttpFailureInjector {
                    status: 507,
                    message: "nothing is left".into(),
                    ratio: None,
                })),
            }],
            ..rule(legacy())
        };
        let unknown = Backend { kind: None, ..legacy() };
        let empty = rule_with_distribution(http_route::distribution::Kind::Empty(Default::default()));
        let good = ("a valid policy", http1(rule(legacy())), (200, ""));
        for (what, policy, expected) in [
            good.clone(),
            ("a backend without a kind", http1(rule(unknown)), (502, "no-backend")),
            good.clone(),
            ("no backends", http1(empty), (503, "no-backend")),
            good.clone(),
            ("zero weights only", http1(weighted(&[0, 0])), (503, "no-backend")),
            ("a backend of weight zero", http1(weighted(&[0, 1])), (200, "")),
            ("no routes", policy(Kind::Http1(Http1::default())), (404, "no-route")),
            good.clone(),
            ("an injected failure", http1(failing()), (507, "injected")),
            good,
        ] {
            policies.set_destination_policy(Ok(policy));
            let answer = wait_for_response(mesh, what, expected).await;
            if what == "an injected failure" {
                assert_eq!(answer.header("l5d-proxy-error"), "nothing is left");
            }
        }
    });
}

#[test]
fn filters_of_a_backend_come_after_those_of_its_rule() {
    run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
        apps::start_echo(mesh, "legacy").await;
        let adding = |value: &str| http_route::Filter {
            kind: Some(http_route::filter::Kind::RequestHeaderModifier(RequestHeaderModifier {
                add: Some(Headers {
                    headers: vec![Header {
                        name: "x-filter".into(),
                        value: value.into(),
                    }],
                }),
                ..Default::default()
            })),
        };
        let to = http_route::RouteBackend {
            backend: Some(forward(endpoint((mesh.ip("legacy"), HTTP).into()))),
            filters: vec![adding("backend")],
            ..Default::default()
        };
        let first = http_route::distribution::FirstAvailable { backends: vec![to] };
        let rule = http_route::Rule {
            filters: vec![adding("rule")],
            ..rule_with_distribution(http_route::distribution::Kind::FirstAvailable(first))
        };
        policies.set_destination_policy(Ok(http1(rule)));
        let answer = mesh.get("client", ORIG_DST, "/headers").await;
        let seen: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(seen["x-filter"], serde_json::json!(["rule", "backend"]));
    });
}

#[test]
fn grpc_rules_of_a_policy_are_applied() {
    run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
        let failing = grpc_route::Rule {
            filters: vec![grpc_route::Filter {
                kind: Some(grpc_route::filter::Kind::FailureInjector(GrpcFailureInjector {
                    code: 8,
                    message: "too much".into(),
                    ratio: None,
                })),
            }],
            backends: Some(grpc_route::Distribution {
                kind: Some(grpc_route::distribution::Kind::Empty(Default::default())),
            }),
            ..Default::default()
        };
        let route = GrpcRoute {
            metadata: metadata("route"),
            rules: vec![failing],
            ..GrpcRoute::default()
        };
        policies.set_destination_policy(Ok(policy(Kind::Grpc(Grpc {
            routes: vec![route],
            failure_accrual: None,
        }))));
        let mut client = Http2Client::handshake(mesh.dial("client", ORIG_DST).await).await;
        let answer = client.fetch(call()).await.unwrap();
        let reported = (answer.header("grpc-status"), answer.header("grpc-message"));
        assert_eq!((answer.status.as_u16(), reported), (200, ("8", "too much")));
    });
}

fn call() -> Request<AnyBody> {
    let call = Request::post("http://web.test/shop.Web/Buy").version(Version::HTTP_2);
    call.header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(full(&b"\0\0\0\0\0"[..]))
        .unwrap()
}

/// An application that echoes the request head.
async fn request_echo_server(listener: TcpListener) -> App {
    apps::serve_tcp(listener, |mut stream| async move {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => return, // the client closed without a request
            }
        }
        let _ = stream.write_all(&head).await;
    })
}

/// A request that an HTTP proxy would change.
const HEAD: &str = "GET / HTTP/1.1\r\nhost: web.test\r\nconnection: x-hop\r\nx-hop: 1\r\n\r\n";

/// The bytes that come back for [`HEAD`].
async fn echoed_request(mut stream: TcpStream) -> String {
    stream.write_all(HEAD.as_bytes()).await.unwrap();
    let mut back = Vec::new();
    // The connection may also end with a reset.
    let _ = stream.read_to_end(&mut back).await;
    String::from_utf8_lossy(&back).into_owned()
}

#[test]
fn the_protocol_of_a_policy_replaces_detection() {
    run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
        let _app = request_echo_server(mesh.listen("legacy", OPAQUE).await).await;
        let _http = apps::serve_http(
            TcpListener::bind((UNMESHED_IP, HTTP)).await.unwrap(),
            |req| async move { Response::new(full(format!("{:?}", req.version()))) },
        );
        let (bytes, http) = (
            || forward(endpoint((mesh.ip("legacy"), OPAQUE).into())),
            || forward(endpoint((UNMESHED_IP, HTTP).into())),
        );
        // Each case uses its own destination, so that it need not wait for a policy change.
        let at = |n: u8| SocketAddr::from(([10, 66, 7, n], HTTP));

        policies.set_destination_policy(Ok(policy(Kind::Opaque(opaque(bytes())))));
        assert_eq!(echoed_request(mesh.dial("client", at(1)).await).await, HEAD);

        policies.set_destination_policy(Ok(http1(rule(http()))));
        assert_eq!(mesh.get("client", at(2), "/").await.text(), "HTTP/1.1");
        let mut stream = mesh.dial("client", at(2)).await;
        stream.write_all(b"HELO mail.test\r\n\r\n").await.unwrap();
        let refused = read_until(&mut stream, "\r\n\r\n").await;
        assert!(refused.starts_with("HTTP/1.1 400 "), "{refused}");

        let http2 = policy(Kind::Http2(Http2 {
            routes: routes(rule(http())),
            failure_accrual: None,
        }));
        policies.set_destination_policy(Ok(http2));
        let mut client = Http2Client::handshake(mesh.dial("client", at(3)).await).await;
        assert_eq!(client.fetch(http2_request("/")).await.unwrap().text(), "HTTP/2.0");
        let refused = echoed_request(mesh.dial("client", at(3)).await).await;
        assert!(!refused.contains("HTTP/1.1"), "{refused}");

        let detect = policy(Kind::Detect(Detect {
            timeout: seconds(10),
            opaque: Some(opaque(bytes())),
            http1: Some(Http1 {
                routes: routes(rule(http())),
                failure_accrual: None,
            }),
            http2: Some(Http2 {
                routes: routes(rule(http())),
                failure_accrual: None,
            }),
        }));
        policies.set_destination_policy(Ok(detect));
        assert_eq!(mesh.get("client", at(4), "/").await.text(), "HTTP/1.1");
        let mut client = Http2Client::handshake(mesh.dial("client", at(4)).await).await;
        assert_eq!(client.fetch(http2_request("/")).await.unwrap().text(), "HTTP/2.0");
        let mut stream = mesh.dial("client", at(4)).await;
        stream.write_all(b"HELO mail.test\r\n\r\n").await.unwrap();
        assert_eq!(read_until(&mut stream, "\r\n\r\n").await, "HELO mail.test\r\n\r\n");
    });
}

#[test]
fn each_error_status_of_the_policy_service_is_handled() {
    run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
        for (n, code, expected) in [
            (1, Code::NotFound, (200, "")),
            (2, Code::Unimplemented, (200, "")),
            (3, Code::InvalidArgument, (500, "invalid-policy")),
            (4, Code::FailedPrecondition, (500, "invalid-policy")),
            (5, Code::PermissionDenied, (503, "discovery-denied")),
        ] {
            let addr = SocketAddr::from(([10, 66, 7, n], HTTP));
            let _app = apps::serve_http(TcpListener::bind(addr).await.unwrap(), |_| async {
                Response::new(full("as dialled"))
            });
            policies.set_destination_policy(Err(code));
            let answer = mesh.get("client", addr, "/").await;
            assert_eq!((answer.status.as_u16(), answer.cause()), expected, "{code:?}");
            let shown = destination_status(mesh, addr).await["policy_error"].clone();
            if expected.0 != 200 {
                let reason = answer.header("l5d-proxy-error");
                assert!(reason.contains("the control plane refuses the "), "{reason}");
                let is_shown = shown.as_str().is_some_and(|shown| reason.contains(shown));
                assert!(is_shown, "{shown}: {reason}");
            } else {
                assert_eq!(shown, serde_json::Value::Null);
            }
        }
        // The proxy requests the policy again until it gets one, and keeps that one.
        apps::start_echo(mesh, "legacy").await;
        policies.set_destination_policy(Err(Code::Unavailable));
        let waiting = mesh.get("client", ORIG_DST, "/");
        let answering = async {
            let unavailable = ["grpc_status=\"14\""];
            eventually("the policy is requested", async || {
                (mesh.metric("client", "control_response_total", &unavailable).await >= 1.).then_some(())
            })
            .await;
            let legacy = forward(endpoint((mesh.ip("legacy"), HTTP).into()));
            policies.set_destination_policy(Ok(http1(rule(legacy))));
        };
        let (answer, ()) = tokio::join!(waiting, answering);
        assert_eq!(answer.text(), "legacy\n");
        let before = mesh.metric("client", "control_response_total", &[]).await;
        policies.set_destination_policy(Err(Code::InvalidArgument));
        eventually("the policy is requested again", async || {
            assert_eq!(mesh.get("client", ORIG_DST, "/").await.text(), "legacy\n");
            (mesh.metric("client", "control_response_total", &[]).await > before + 1.).then_some(())
        })
        .await;
    });
}

/// A server that answers any input with this byte.
async fn start_byte_server(addr: SocketAddr, byte: u8) -> App {
    apps::serve_tcp(TcpListener::bind(addr).await.unwrap(), move |mut stream| async move {
        stream.readable().await.unwrap();
        stream.write_all(&[byte]).await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    })
}

/// The ClientHello for a server name.
pub(crate) fn client_hello(name: &str) -> Bytes {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let mut client = ClientConnection::new(Arc::new(config), name.to_owned().try_into().unwrap()).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello.into()
}

#[test]
fn tls_routes_match_the_server_name() {
    run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
        let (one, other) = (([10, 66, 8, 1], 443).into(), ([10, 66, 8, 2], 443).into());
        let _servers = [start_byte_server(one, b'1').await, start_byte_server(other, b'2').await];
        let route = |snis, to, filters| {
            let to = tls_route::RouteBackend {
                backend: Some(forward(endpoint(to))),
                ..Default::default()
            };
            let kind = tls_route::distribution::Kind::FirstAvailable(tls_route::distribution::FirstAvailable {
                backends: vec![to],
            });
            TlsRoute {
                metadata: metadata("route"),
                snis: vec![SniMatch { r#match: Some(snis) }],
                rules: vec![tls_route::Rule {
                    backends: Some(tls_route::Distribution { kind: Some(kind) }),
                    filters,
                }],
            }
        };
        let below = |labels: [&str; 2]| {
            sni_match::Match::Suffix(sni_match::Suffix {
                reverse_labels: labels.map(str::to_owned).to_vec(),
            })
        };
        let forbidden = tls_route::Filter {
            kind: Some(tls_route::filter::Kind::Forbidden(Default::default())),
        };
        policies.set_destination_policy(Ok(policy(Kind::Tls(Tls {
            routes: vec![
                route(sni_match::Match::Exact("a.test".into()), one, vec![]),
                route(below(["test", "b"]), other, vec![]),
                route(sni_match::Match::Exact("c.test".into()), one, vec![forbidden]),
            ],
        }))));
        for (name, expected) in [
            ("a.test", Some(b'1')),
            ("A.TEST", Some(b'1')),
            ("x.b.test", Some(b'2')),
            ("b.test", None),
            ("c.test", None),
            ("d.test", None),
        ] {
            let mut stream = mesh.dial("client", ORIG_DST).await;
            stream.write_all(&client_hello(name)).await.unwrap();
            assert_eq!(stream.read_u8().await.ok(), expected, "{name}");
        }
        let mut stream = mesh.dial("client", ORIG_DST).await;
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        assert_eq!(stream.read_u8().await.ok(), None, "bytes that are not TLS");
    });
}

#[test]
fn the_authority_override_of_an_endpoint_is_sent() {
    run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
        apps::start_echo(mesh, "legacy").await;
        let other = WeightedAddr {
            authority_override: Some(AuthorityOverride {
                authority_override: "other.test:81".into(),
            }),
            ..endpoint((mesh.ip("legacy"), HTTP).into())
        };
        policies.set_destination_policy(Ok(http1(rule(forward(other)))));
        let answer = mesh.get("client", ORIG_DST, "/headers").await;
        let seen: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(seen["host"], serde_json::json!(["other.test:81"]));
    });
}

#[test]
fn a_stream_that_an_endpoint_resets_is_a_bad_gateway_for_http_1() {
    run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
        let _app = apps::serve_tcp(mesh.listen("legacy", HTTP).await, |stream| async move {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                respond.send_reset(h2::Reason::INADEQUATE_SECURITY);
            }
        });
        let http2_endpoint = WeightedAddr {
            protocol_hint: Some(ProtocolHint {
                protocol: Some(protocol_hint::Protocol::H2(Default::default())),
                opaque_transport: None,
            }),
            ..endpoint((mesh.ip("legacy"), HTTP).into())
        };
        policies.set_destination_policy(Ok(http1(rule(forward(http2_endpoint)))));
        let answer = mesh.get("client", ORIG_DST, "/").await;
        let reported = (answer.status.as_u16(), answer.cause(), answer.header("connection"));
        assert_eq!(reported, (502, "stream-reset", "close"));
    });
}

/// A Server of this protocol that permits all clients.
fn server(kind: inbound::proxy_protocol::Kind) -> Server {
    let everywhere = IpNetwork {
        ip: Some(IpAddress {
            ip: Some(ip_address::Ip::Ipv4(0)),
        }),
        prefix_len: 0,
    };
    let authz = Authz {
        networks: vec![Network {
            net: Some(everywhere),
            except: Vec::new(),
        }],
        authentication: Some(Authn {
            permit: Some(authn::Permit::Unauthenticated(authn::PermitUnauthenticated {})),
        }),
        labels: [("name".to_owned(), "everybody".to_owned())].into(),
        metadata: None,
    };
    Server {
        protocol: Some(inbound::ProxyProtocol { kind: Some(kind) }),
        server_ips: Vec::new(),
        authorizations: vec![authz],
        labels: [("name".to_owned(), "web".to_owned())].into(),
    }
}

#[test]
fn ports_use_the_protocol_of_their_policy() {
    use inbound::proxy_protocol::{Grpc, Http1, Http2, Kind, Opaque};
    let mesh = mesh().workload("web").workload_env("POLICY_SVC_ADDR", POLICY_ADDR);
    mesh.run(async |mesh: &Mesh| {
        let policies = FakePolicyService::serve().await;
        let _app = request_echo_server(mesh.listen("web", OPAQUE).await).await;
        let _http = apps::serve_http(mesh.listen("web", 8888).await, |req| async move {
            Response::new(full(format!("{:?}", req.version())))
        });
        let set_protocol = async |what: &str, kind: Kind| {
            let mut port_policy = server(kind);
            port_policy.labels.insert("name".into(), what.into());
            policies.set_port_policy(Ok(port_policy));
            let name = format!("srv_name=\"{what}\"");
            eventually("the policy is known", async || {
                drop(mesh.dial_inbound(UNMESHED_IP, "web", OPAQUE).await);
                drop(mesh.dial_inbound(UNMESHED_IP, "web", 8888).await);
                let ports = ["srv_port=\"3306\"", "srv_port=\"8888\""];
                for port in ports {
                    if mesh.metric("web", "tcp_open_total", &[&name, port]).await < 1. {
                        return None;
                    }
                }
                Some(())
            })
            .await;
        };
        set_protocol("bytes", Kind::Opaque(Opaque {})).await;
        assert_eq!(
            echoed_request(mesh.dial_inbound(UNMESHED_IP, "web", OPAQUE).await).await,
            HEAD
        );

        set_protocol("http1", Kind::Http1(Http1::default())).await;
        let mut client = Http1Client::handshake(mesh.dial_inbound(UNMESHED_IP, "web", 8888).await).await;
        assert_eq!(client.fetch(request("/")).await.unwrap().text(), "HTTP/1.1");

        set_protocol("http2", Kind::Http2(Http2::default())).await;
        let mut client = Http2Client::handshake(mesh.dial_inbound(UNMESHED_IP, "web", 8888).await).await;
        assert_eq!(client.fetch(http2_request("/")).await.unwrap().text(), "HTTP/2.0");
        let refused = echoed_request(mesh.dial_inbound(UNMESHED_IP, "web", 8888).await).await;
        assert!(!refused.contains("HTTP/1.1"), "{refused}");

        set_protocol("grpc", Kind::Grpc(Grpc::default())).await;
        let mut client = Http2Client::handshake(mesh.dial_inbound(UNMESHED_IP, "web", 8888).await).await;
        assert_eq!(client.fetch(call()).await.unwrap().text(), "HTTP/2.0");
    });
}

#[test]
fn a_tls_port_accepts_nothing_else() {
    let mesh = mesh().workload("web").workload_env("POLICY_SVC_ADDR", POLICY_ADDR);
    mesh.run(async |mesh: &Mesh| {
        let policies = FakePolicyService::serve().await;
        let tls = inbound::proxy_protocol::Kind::Tls(Default::default());
        policies.set_port_policy(Ok(server(tls)));
        let _app = start_byte_server(mesh.app_addr("web", OPAQUE), b'1').await;
        let answer = async |sent: &[u8]| {
            let mut stream = mesh.dial_inbound(UNMESHED_IP, "web", OPAQUE).await;
            stream.write_all(sent).await.unwrap();
            stream.read_u8().await.ok()
        };
        eventually("plaintext is refused", async || {
            let plain = answer(b"GET / HTTP/1.1\r\n\r\n").await;
            plain.is_none().then_some(())
        })
        .await;
        let address = "10.0.0.1"; // a ClientHello for an address has no server name
        for name in ["a.test", address] {
            assert_eq!(answer(&client_hello(name)).await, Some(b'1'), "{name}");
        }
        let labels = ["srv_name=\"web\"", "reason=\"no-tls\""];
        mesh.wait_for_metric_at_least("web", "tulle_inbound_denied_total", &labels, 1.)
            .await;
    });
}

#[test]
fn an_unfinished_handshake_times_out() {
    let mesh = mesh().workload("web").workload_env("INBOUND_DETECT_TIMEOUT", "300ms");
    mesh.run(async |mesh: &Mesh| {
        let mut stream = mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await;
        stream.write_all(&client_hello(&identity("web"))).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await; // The connection may also end with a reset.
        assert!(!answer.is_empty(), "the server's part of the handshake");
        let late = ["error=\"tls detection timeout\""];
        eventually("the timeout is counted", async || {
            (mesh.metric("web", "inbound_tcp_errors_total", &late).await == 1.).then_some(())
        })
        .await;
    });
}
