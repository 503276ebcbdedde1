//! Policies of EgressNetworks: no profile overrides them.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tulle_proto::meta::{Metadata, Resource, metadata};
use tulle_proto::outbound::proxy_protocol::{Kind, Tls};
use tulle_proto::outbound::{Backend, OutboundPolicy, ProxyProtocol, TlsRoute, tls_route};
use tulle_proto::tls_route::{SniMatch, sni_match};
use tulle_tests::apps;
use tulle_tests::fake_policy_service::FakePolicyService;
use tulle_tests::mesh::{Mesh, OPAQUE};

use crate::scripted_policies::{client_hello, endpoint, forward, run_with_policies};

/// Not the address of a pod; its port is opaque by default.
const OUTSIDE: ([u8; 4], u16) = ([10, 66, 8, 7], OPAQUE);

fn resource(kind: &str) -> Option<Metadata> {
    let resource = Resource {
        group: "policy.linkerd.io".into(),
        kind: kind.into(),
        name: "out".into(),
        namespace: "shop".into(),
        ..Resource::default()
    };
    Some(Metadata {
        kind: Some(metadata::Kind::Resource(resource)),
    })
}

/// The policy of an EgressNetwork that denies, with a TLSRoute for `api.test`.
fn denying_network(to: SocketAddr) -> OutboundPolicy {
    let route = |snis, backends: Vec<Backend>, filters| {
        let backends = backends.into_iter().map(|backend| tls_route::RouteBackend {
            backend: Some(backend),
            ..Default::default()
        });
        let kind = tls_route::distribution::Kind::FirstAvailable(tls_route::distribution::FirstAvailable {
            backends: backends.collect(),
        });
        TlsRoute {
            metadata: resource("TLSRoute"),
            snis,
            rules: vec![tls_route::Rule {
                backends: Some(tls_route::Distribution { kind: Some(kind) }),
                filters,
            }],
        }
    };
    let permitted = SniMatch {
        r#match: Some(sni_match::Match::Exact("api.test".into())),
    };
    let forbidden = tls_route::Filter {
        kind: Some(tls_route::filter::Kind::Forbidden(Default::default())),
    };
    let backend = || forward(endpoint(to));
    let routes = vec![
        route(vec![permitted], vec![backend()], vec![]),
        route(vec![], vec![backend()], vec![forbidden]),
    ];
    OutboundPolicy {
        metadata: resource("EgressNetwork"),
        protocol: Some(ProxyProtocol {
            kind: Some(Kind::Tls(Tls { routes })),
        }),
    }
}

#[test]
fn an_opaque_profile_does_not_bypass_an_egress_network_that_denies() {
    run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
        // The port is opaque by an annotation of the pod, or by default.
        for dst in [SocketAddr::from((mesh.ip("legacy"), OPAQUE)), OUTSIDE.into()] {
            let listener = TcpListener::bind(dst).await.unwrap();
            let _app = apps::serve_tcp(listener, |mut stream| async move {
                stream.readable().await.unwrap();
                stream.write_all(b"1").await.unwrap();
                let _ = stream.read_to_end(&mut Vec::new()).await;
            });
            policies.set_destination_policy(Ok(denying_network(dst)));
            let (permitted, other) = (client_hello("api.test"), client_hello("other.test"));
            for (sent, expected) in [
                (&b"not TLS, and long enough to know\n"[..], None),
                (&other, None),
                (&permitted, Some(b'1')),
            ] {
                let mut stream = mesh.dial("client", dst).await;
                stream.write_all(sent).await.unwrap();
                assert_eq!(stream.read_u8().await.ok(), expected, "{dst} {sent:?}");
            }
        }
    });
}
