//! Compares the encoding of messages with bytes written by hand. Each key is `field number << 3 | wire type`.
//!
//! Wire types: 0 is a varint, 1 is 64 bits, 2 is a length and bytes, 5 is 32 bits.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use prost::Message;
use tulle_proto::convert::wire_duration;
use tulle_proto::{destination, http_route, http_types, identity, inbound, meta, net, outbound, transport};

/// The key, the length of the joined parts, and the parts.
fn length_delimited(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    let length = u8::try_from(body.len())
        .ok()
        .filter(|length| *length < 0x80)
        .expect("one byte of length");
    [key, &[length], &body[..]].concat()
}

#[track_caller]
fn check<M: Message + Default + PartialEq + Debug>(message: &M, bytes: &[u8]) {
    assert_eq!(message.encode_to_vec(), bytes);
    assert_eq!(&M::decode(bytes).expect("these are the bytes of a message"), message);
}

fn labels(key: &str, value: &str) -> BTreeMap<String, String> {
    [(key.to_owned(), value.to_owned())].into()
}

fn addr(text: &str) -> net::TcpAddress {
    text.parse::<SocketAddr>().expect("an address").into()
}

/// 10.0.0.1:8080. Field 1 is a message `IPAddress`, whose field 1 is `fixed32 ipv4`, in little-endian order. Field 2 is the port.
const ADDR: &[u8] = &[0x0a, 0x05, 0x0d, 0x01, 0x00, 0x00, 0x0a, 0x10, 0x90, 0x3f];

fn built_in(name: &str) -> meta::Metadata {
    meta::Metadata {
        kind: Some(meta::metadata::Kind::Default(name.to_owned())),
    }
}

fn weighted_addr() -> (destination::WeightedAddr, Vec<u8>) {
    use destination::{http2_client_params as http2, protocol_hint, tls_identity};
    let message = destination::WeightedAddr {
        addr: Some(addr("10.0.0.1:8080")),
        weight: 10_000,
        metric_labels: labels("pod", "a"),
        tls_identity: Some(destination::TlsIdentity {
            strategy: Some(tls_identity::Strategy::UriLikeIdentity(tls_identity::UriLikeIdentity {
                uri: "u".into(),
            })),
            server_name: Some(tls_identity::DnsLikeIdentity { name: "n".into() }),
        }),
        protocol_hint: Some(destination::ProtocolHint {
            opaque_transport: Some(protocol_hint::OpaqueTransport { inbound_port: 4143 }),
            protocol: Some(protocol_hint::Protocol::Opaque(protocol_hint::Opaque {})),
        }),
        authority_override: Some(destination::AuthorityOverride {
            authority_override: "o".into(),
        }),
        http2: Some(destination::Http2ClientParams {
            flow_control: Some(http2::FlowControl {
                initial_connection_window_size: 1,
                initial_stream_window_size: 2,
                adaptive_flow_control: true,
            }),
            keep_alive: Some(http2::KeepAlive {
                interval: None,
                timeout: None,
                while_idle: true,
            }),
            internals: Some(http2::Internals {
                max_concurrent_reset_streams: 3,
                max_frame_size: 4,
                max_send_buf_size: 5,
            }),
        }),
        resource_ref: Some(built_in("r")),
        is_fallback: true,
    };
    let identity = length_delimited(&[0x2a], &[&[0x1a, 3, 0x0a, 1, b'u'], &[0x22, 3, 0x0a, 1, b'n']]);
    // Field 3 precedes field 2: prost encodes a oneof at the position of its lowest number, and decoders accept any order.
    let hint = length_delimited(&[0x32], &[&[0x1a, 0], &[0x12, 3, 0x08, 0xaf, 0x20]]);
    let http2 = length_delimited(
        &[0x42],
        &[
            &[0x0a, 6, 0x08, 1, 0x10, 2, 0x18, 1],
            &[0x12, 2, 0x18, 1],
            &[0x1a, 6, 0x08, 3, 0x10, 4, 0x18, 5],
        ],
    );
    let bytes = [
        &length_delimited(&[0x0a], &[ADDR])[..],
        &[0x18, 0x90, 0x4e],
        &length_delimited(&[0x22], &[&[0x0a, 3], b"pod", &[0x12, 1, b'a']]),
        &identity,
        &hint,
        &[0x3a, 3, 0x0a, 1, b'o'],
        &http2,
        &[0x4a, 3, 0x0a, 1, b'r'],
        &[0xa0, 0x06, 1],
    ];
    (message, bytes.concat())
}

#[test]
fn weighted_addr_has_its_field_numbers() {
    let (message, bytes) = weighted_addr();
    check(&message, &bytes);
    let dns = destination::tls_identity::DnsLikeIdentity { name: "n".into() };
    let strategy = Some(destination::tls_identity::Strategy::DnsLikeIdentity(dns));
    check(
        &destination::TlsIdentity {
            strategy,
            server_name: None,
        },
        &[0x0a, 3, 0x0a, 1, b'n'],
    );
    let h2 = destination::protocol_hint::Protocol::H2(destination::protocol_hint::H2 {});
    check(
        &destination::ProtocolHint {
            protocol: Some(h2),
            opaque_transport: None,
        },
        &[0x0a, 0],
    );
}

#[test]
fn get_destination_has_its_field_numbers() {
    let message = destination::GetDestination {
        scheme: "s".into(),
        path: "p".into(),
        context_token: "t".into(),
        accepts_fallback: true,
    };
    let bytes = [0x0a, 1, b's', 0x12, 1, b'p', 0x1a, 1, b't', 0xa0, 0x06, 1];
    check(&message, &bytes);
}

#[test]
fn update_has_its_field_numbers() {
    use destination::{AddrSet, NoEndpoints, Update, WeightedAddr, WeightedAddrSet, update};
    let endpoint = WeightedAddr {
        addr: Some(addr("10.0.0.1:8080")),
        ..WeightedAddr::default()
    };
    let set = WeightedAddrSet {
        addrs: vec![endpoint],
        metric_labels: labels("k", "v"),
    };
    let endpoint = length_delimited(&[0x0a], &[&length_delimited(&[0x0a], &[ADDR])]);
    let bytes = length_delimited(&[0x0a], &[&endpoint, &[0x12, 6, 0x0a, 1, b'k', 0x12, 1, b'v']]);
    check(
        &Update {
            update: Some(update::Update::Add(set)),
        },
        &bytes,
    );

    let set = AddrSet {
        addrs: vec![addr("10.0.0.1:8080")],
    };
    check(
        &Update {
            update: Some(update::Update::Remove(set)),
        },
        &length_delimited(&[0x12], &[&length_delimited(&[0x0a], &[ADDR])]),
    );
    let none = NoEndpoints { exists: true };
    check(
        &Update {
            update: Some(update::Update::NoEndpoints(none)),
        },
        &[0x1a, 2, 0x08, 1],
    );
}

#[test]
fn outbound_backend_has_its_field_numbers() {
    use outbound::backend::{self, BalanceP2c, EndpointDiscovery, balance_p2c, endpoint_discovery};

    let dst = endpoint_discovery::DestinationGet { path: "d".into() };
    let ewma = balance_p2c::PeakEwma {
        default_rtt: Some(wire_duration(Duration::from_millis(30))),
        decay: Some(wire_duration(Duration::from_secs(10))),
    };
    let balancer = BalanceP2c {
        discovery: Some(EndpointDiscovery {
            kind: Some(endpoint_discovery::Kind::Dst(dst)),
        }),
        load: Some(balance_p2c::Load::PeakEwma(ewma)),
    };
    let backend = outbound::Backend {
        metadata: Some(built_in("b")),
        queue: Some(outbound::Queue {
            capacity: 100,
            failfast_timeout: Some(wire_duration(Duration::from_secs(3))),
        }),
        kind: Some(backend::Kind::Balancer(balancer)),
    };
    let ewma_bytes = length_delimited(
        &[0x12],
        &[&[0x0a, 5, 0x10, 0x80, 0x87, 0xa7, 0x0e], &[0x12, 2, 0x08, 10]],
    );
    let balancer_bytes = length_delimited(&[0x1a], &[&[0x0a, 5, 0x0a, 3, 0x0a, 1, b'd'], &ewma_bytes]);
    let backend_bytes = [
        &[0x0a, 3, 0x0a, 1, b'b'][..],
        &balancer_bytes,
        &[0x22, 6, 0x08, 100, 0x12, 2, 0x08, 3],
    ]
    .concat();
    check(&backend, &backend_bytes);
}

#[test]
fn outbound_rule_has_its_field_numbers() {
    use outbound::http_route::{Distribution, Retry, RouteBackend, Rule, WeightedRouteBackend, distribution, retry};

    let weighted = WeightedRouteBackend {
        backend: Some(RouteBackend {
            backend: Some(outbound::Backend::default()),
            filters: vec![],
            request_timeout: None,
            filter_extensions: vec![],
        }),
        weight: 1,
    };
    let random = distribution::RandomAvailable {
        backends: vec![weighted],
    };
    let status_ranges = vec![retry::conditions::StatusRange { start: 1, end: 2 }];
    let rule = Rule {
        matches: vec![http_route::HttpRouteMatch::default()],
        filters: vec![],
        backends: Some(Distribution {
            kind: Some(distribution::Kind::RandomAvailable(random)),
        }),
        request_timeout: Some(wire_duration(Duration::from_secs(4))),
        timeouts: Some(http_route::Timeouts {
            response: Some(wire_duration(Duration::from_secs(1))),
            request: Some(wire_duration(Duration::from_secs(2))),
            idle: Some(wire_duration(Duration::from_secs(3))),
        }),
        retry: Some(Retry {
            max_retries: 1,
            max_request_bytes: 2,
            conditions: Some(retry::Conditions { status_ranges }),
            timeout: Some(wire_duration(Duration::from_secs(4))),
            backoff: Some(outbound::ExponentialBackoff {
                min_backoff: None,
                max_backoff: None,
                jitter_ratio: 1.0,
                respect_retry_after_hint: true,
            }),
        }),
        allow_l5d_request_headers: true,
        filter_extensions: vec![],
    };
    let rule_bytes = [
        &[0x0a, 0][..],
        &[0x1a, 10, 0x1a, 8, 0x0a, 6, 0x0a, 2, 0x0a, 0, 0x10, 1],
        &[0x22, 2, 0x08, 4],
        &[0x2a, 12, 0x0a, 2, 0x08, 1, 0x12, 2, 0x08, 2, 0x1a, 2, 0x08, 3],
        &length_delimited(
            &[0x32],
            &[
                &[0x08, 1, 0x10, 2, 0x1a, 6, 0x0a, 4, 0x08, 1, 0x10, 2, 0x22, 2, 0x08, 4],
                &[0x2a, 7, 0x1d, 0x00, 0x00, 0x80, 0x3f, 0x20, 1],
            ],
        ),
        &[0x38, 1],
    ];
    check(&rule, &rule_bytes.concat());
}

#[test]
fn outbound_policy_has_its_field_numbers() {
    use outbound::{failure_accrual, proxy_protocol};

    let consecutive = failure_accrual::ConsecutiveFailures {
        max_failures: 7,
        backoff: None,
    };
    let http1 = proxy_protocol::Http1 {
        routes: vec![outbound::HttpRoute {
            metadata: None,
            hosts: vec![],
            rules: vec![outbound::http_route::Rule::default()],
        }],
        failure_accrual: Some(outbound::FailureAccrual {
            kind: Some(failure_accrual::Kind::ConsecutiveFailures(consecutive)),
            ejection: Some(failure_accrual::EjectionConfig { min_ready_endpoints: 1 }),
        }),
    };
    let http1_bytes: &[u8] = &[0x0a, 2, 0x1a, 0, 0x12, 8, 0x0a, 2, 0x08, 7, 0x1a, 2, 0x08, 1];
    let detect = proxy_protocol::Detect {
        timeout: Some(wire_duration(Duration::from_secs(10))),
        opaque: Some(proxy_protocol::Opaque { routes: vec![] }),
        http1: Some(http1),
        http2: Some(proxy_protocol::Http2::default()),
    };
    let detect_bytes = length_delimited(
        &[0x0a],
        &[
            &[0x0a, 2, 0x08, 10],
            &[0x12, 0],
            &length_delimited(&[0x1a], &[http1_bytes]),
            &[0x22, 0],
        ],
    );
    let policy = outbound::OutboundPolicy {
        protocol: Some(outbound::ProxyProtocol {
            kind: Some(proxy_protocol::Kind::Detect(detect)),
        }),
        metadata: Some(built_in("p")),
    };
    check(
        &policy,
        &[
            &length_delimited(&[0x0a], &[&detect_bytes])[..],
            &[0x12, 3, 0x0a, 1, b'p'],
        ]
        .concat(),
    );
}

#[test]
fn other_messages_of_outbound_have_their_field_numbers() {
    use outbound::grpc_route::retry::Conditions;
    use outbound::proxy_protocol::{Grpc, Http2, Kind, Opaque, Tls};
    let conditions = Conditions {
        cancelled: true,
        deadine_exceeded: true,
        resource_exhausted: true,
        internal: true,
        unavailable: true,
    };
    check(&conditions, &[0x08, 1, 0x20, 1, 0x40, 1, 0x68, 1, 0x70, 1]);
    for (kind, key) in [
        (Kind::Opaque(Opaque::default()), 0x12),
        (Kind::Http2(Http2::default()), 0x22),
        (Kind::Grpc(Grpc::default()), 0x2a),
        (Kind::Tls(Tls::default()), 0x32),
    ] {
        check(&outbound::ProxyProtocol { kind: Some(kind) }, &[key, 0]);
    }
    let rewrite = outbound::filter_extension::UrlRewrite {
        host: "h".to_owned(),
        path: None,
    };
    let mirror = outbound::filter_extension::RequestMirror {
        backend: None,
        ratio: Some(http_route::Ratio {
            numerator: 1,
            denominator: 2,
        }),
    };
    let cors = outbound::filter_extension::Cors {
        allow_origins: vec!["o".to_owned()],
        allow_credentials: true,
        allow_methods: vec!["m".to_owned()],
        allow_headers: vec!["h".to_owned()],
        expose_headers: vec!["e".to_owned()],
        max_age_seconds: 7,
    };
    let extensions = [
        outbound::filter_extension::Kind::UrlRewrite(rewrite),
        outbound::filter_extension::Kind::RequestMirror(mirror),
        outbound::filter_extension::Kind::Cors(cors),
    ];
    let filter_extensions = extensions.map(|kind| outbound::FilterExtension { kind: Some(kind) });
    let rule = outbound::http_route::Rule {
        filter_extensions: filter_extensions.to_vec(),
        ..Default::default()
    };
    let rewrite_bytes: &[u8] = &[0xca, 0x3e, 5, 0x0a, 3, 0x0a, 1, b'h'];
    let mirror_bytes: &[u8] = &[0xca, 0x3e, 8, 0x12, 6, 0x12, 4, 0x08, 1, 0x10, 2];
    let cors_bytes: &[u8] = &[
        0xca, 0x3e, 18, 0x1a, 16, 0x0a, 1, b'o', 0x10, 1, 0x1a, 1, b'm', 0x22, 1, b'h', 0x2a, 1, b'e', 0x30, 7,
    ];
    check(&rule, &[rewrite_bytes, mirror_bytes, cors_bytes].concat());
    let backend = outbound::opaque_route::RouteBackend {
        backend: None,
        filters: vec![outbound::opaque_route::Filter {
            kind: Some(outbound::opaque_route::filter::Kind::Forbidden(
                tulle_proto::opaque_route::Forbidden {},
            )),
        }],
    };
    check(&backend, &[0x1a, 2, 0x12, 0]);
    let rules = vec![outbound::tls_route::Rule::default()];
    check(
        &outbound::TlsRoute {
            metadata: None,
            snis: vec![],
            rules,
        },
        &[0x1a, 0],
    );
    let target = Some(outbound::traffic_spec::Target::Authority("a".into()));
    let spec = outbound::TrafficSpec {
        source_workload: "w".into(),
        target,
    };
    check(&spec, &[0x0a, 1, b'w', 0x1a, 1, b'a']);
}

#[test]
fn inbound_server_has_its_field_numbers() {
    use inbound::authn::{Permit, PermitMeshTls, permit_mesh_tls};
    use inbound::{Authn, Authz, HttpRoute, Identity, IdentitySuffix, Network, ProxyProtocol, Server, proxy_protocol};

    let clients = permit_mesh_tls::PermitClientIdentities {
        identities: vec![Identity { name: "i".into() }],
        suffixes: vec![IdentitySuffix {
            parts: vec!["s".into()],
        }],
    };
    let permit = PermitMeshTls {
        clients: Some(permit_mesh_tls::Clients::Identities(clients)),
    };
    let network = net::IpNetwork {
        ip: Some(IpAddr::from([10, 0, 0, 0]).into()),
        prefix_len: 8,
    };
    let authz = Authz {
        networks: vec![Network {
            net: Some(network),
            except: vec![net::IpNetwork::default()],
        }],
        authentication: Some(Authn {
            permit: Some(Permit::MeshTls(permit)),
        }),
        labels: labels("k", "v"),
        metadata: Some(built_in("a")),
    };
    let authz_bytes = [
        &[0x0a, 13, 0x0a, 9, 0x0a, 5, 0x0d, 0, 0, 0, 10, 0x10, 8, 0x12, 0][..],
        &[
            0x12, 14, 0x12, 12, 0x12, 10, 0x0a, 3, 0x0a, 1, b'i', 0x12, 3, 0x0a, 1, b's',
        ],
        &[0x1a, 6, 0x0a, 1, b'k', 0x12, 1, b'v'],
        &[0x22, 3, 0x0a, 1, b'a'],
    ];
    let detect = proxy_protocol::Detect {
        timeout: Some(wire_duration(Duration::from_secs(10))),
        http_routes: vec![HttpRoute {
            rules: vec![inbound::http_route::Rule::default()],
            authorizations: vec![Authz::default()],
            ..HttpRoute::default()
        }],
        http_local_rate_limit: Some(inbound::HttpLocalRateLimit::default()),
    };
    let detect_bytes = length_delimited(
        &[0x0a],
        &[&[0x0a, 2, 0x08, 10], &[0x1a, 4, 0x1a, 0, 0x22, 0], &[0x22, 0]],
    );
    let server = Server {
        protocol: Some(ProxyProtocol {
            kind: Some(proxy_protocol::Kind::Detect(detect)),
        }),
        server_ips: vec![IpAddr::from([10, 0, 0, 1]).into()],
        authorizations: vec![authz],
        labels: labels("k", "v"),
    };
    let bytes = [
        &length_delimited(&[0x0a], &[&detect_bytes])[..],
        &[0x12, 5, 0x0d, 1, 0, 0, 10],
        &length_delimited(&[0x1a], &[&authz_bytes.concat()]),
        &[0x22, 6, 0x0a, 1, b'k', 0x12, 1, b'v'],
    ];
    check(&server, &bytes.concat());
}

#[test]
fn inbound_protocols_and_rate_limits_have_their_field_numbers() {
    use inbound::http_local_rate_limit::{Limit, Override, r#override::ClientIdentities};
    use inbound::proxy_protocol::{Grpc, Http1, Http2, Kind, Opaque, Tls};
    let http1 = Http1 {
        routes: vec![inbound::HttpRoute::default()],
        local_rate_limit: Some(Default::default()),
    };
    check(&http1, &[0x12, 0, 0x1a, 0]);
    for (kind, key) in [
        (Kind::Opaque(Opaque {}), 0x12),
        (Kind::Tls(Tls {}), 0x1a),
        (Kind::Http1(Http1::default()), 0x22),
        (Kind::Http2(Http2::default()), 0x2a),
        (Kind::Grpc(Grpc::default()), 0x32),
    ] {
        check(&inbound::ProxyProtocol { kind: Some(kind) }, &[key, 0]);
    }
    let limit = |requests_per_second| Some(Limit { requests_per_second });
    let clients = ClientIdentities {
        identities: vec![inbound::Identity { name: "i".into() }],
    };
    let message = inbound::HttpLocalRateLimit {
        metadata: None,
        total: limit(1),
        identity: limit(2),
        overrides: vec![Override {
            limit: limit(3),
            clients: Some(clients),
        }],
    };
    let bytes = [
        0x12, 2, 0x08, 1, 0x1a, 2, 0x08, 2, 0x22, 11, 0x0a, 2, 0x08, 3, 0x12, 5, 0x0a, 3, 0x0a, 1, b'i',
    ];
    check(&message, &bytes);
}

#[test]
fn the_transport_header_has_its_field_numbers() {
    use transport::{Header, SessionProtocol, session_protocol};
    let http2 = session_protocol::Kind::Http2(session_protocol::Http2 {});
    let header = Header {
        port: 80,
        name: "n".into(),
        session_protocol: Some(SessionProtocol { kind: Some(http2) }),
    };
    check(&header, &[0x08, 80, 0x12, 1, b'n', 0x1a, 2, 0x12, 0]);
    let http1 = session_protocol::Kind::Http1(session_protocol::Http1 {});
    check(&SessionProtocol { kind: Some(http1) }, &[0x0a, 0]);
}

#[test]
fn certify_has_its_field_numbers() {
    let request = identity::CertifyRequest {
        identity: "i".into(),
        token: b"t".to_vec(),
        certificate_signing_request: b"c".to_vec(),
    };
    check(&request, &[0x0a, 1, b'i', 0x12, 1, b't', 0x1a, 1, b'c']);
    let response = identity::CertifyResponse {
        leaf_certificate: b"l".to_vec(),
        intermediate_certificates: vec![b"i".to_vec()],
        valid_until: Some(prost_types::Timestamp { seconds: 7, nanos: 0 }),
        trust_anchors: vec![b"a".to_vec()],
    };
    let bytes = [0x0a, 1, b'l', 0x12, 1, b'i', 0x1a, 2, 0x08, 7, 0xa2, 0x06, 1, b'a'];
    check(&response, &bytes);
}

#[test]
fn unknown_fields_are_skipped() {
    let bytes = [0x08, 80, 0xa2, 0x06, 1, b'a'];
    assert_eq!(transport::Header::decode(&bytes[..]).unwrap().port, 80);
}

#[test]
fn routes_have_their_field_numbers() {
    use http_route::{
        HeaderMatch, HttpRouteMatch, PathMatch, QueryParamMatch, header_match, path_match, query_param_match,
    };
    let message = HttpRouteMatch {
        path: Some(PathMatch {
            kind: Some(path_match::Kind::Prefix("/".into())),
        }),
        headers: vec![HeaderMatch {
            name: "h".into(),
            value: Some(header_match::Value::Regex("r".into())),
        }],
        query_params: vec![QueryParamMatch {
            name: "q".into(),
            value: Some(query_param_match::Value::Exact("e".into())),
        }],
        method: Some(http_types::HttpMethod {
            r#type: Some(http_types::http_method::Type::Registered(
                http_types::http_method::Registered::Trace.into(),
            )),
        }),
    };
    let bytes = [
        &[0x0a, 3, 0x12, 1, b'/'][..],
        &[0x12, 6, 0x0a, 1, b'h', 0x1a, 1, b'r'],
        &[0x1a, 6, 0x0a, 1, b'q', 0x12, 1, b'e'],
        &[0x22, 2, 0x08, 8],
    ];
    check(&message, &bytes.concat());
}
