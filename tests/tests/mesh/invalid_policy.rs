//! An invalid inbound policy permits no client.

use std::collections::BTreeMap;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tulle_proto::inbound::{Authn, Authz, Network, ProxyProtocol, Server, authn, proxy_protocol};
use tulle_proto::net::{IpAddress, IpNetwork, ip_address};
use tulle_tests::apps;
use tulle_tests::client::{Http1, request};
use tulle_tests::eventually::eventually;
use tulle_tests::fake_policy_service::{FakePolicyService, POLICY_ADDR};
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, UNMESHED_IP, mesh};

/// A Server that permits all clients.
pub(crate) fn allow_all_server() -> Server {
    let authz = Authz {
        networks: vec![Network {
            net: Some(IpNetwork {
                ip: Some(IpAddress {
                    ip: Some(ip_address::Ip::Ipv4(0)),
                }),
                prefix_len: 0,
            }),
            except: Vec::new(),
        }],
        authentication: Some(Authn {
            permit: Some(authn::Permit::Unauthenticated(authn::PermitUnauthenticated {})),
        }),
        labels: BTreeMap::from([("name".into(), "everybody".into())]),
        metadata: None,
    };
    Server {
        protocol: Some(ProxyProtocol {
            kind: Some(proxy_protocol::Kind::Detect(proxy_protocol::Detect {
                timeout: Some(prost_types::Duration { seconds: 10, nanos: 0 }),
                ..Default::default()
            })),
        }),
        server_ips: Vec::new(),
        authorizations: vec![authz],
        labels: BTreeMap::from([("name".into(), "open".into())]),
    }
}

#[test]
fn an_invalid_update_denies_requests_and_closes_connections() {
    let mesh = mesh().workload("web").workload_env("POLICY_SVC_ADDR", POLICY_ADDR);
    mesh.run(async |mesh: &Mesh| {
        let policies = FakePolicyService::serve().await;
        policies.set_port_policy(Ok(allow_all_server()));
        apps::start_echo(mesh, "web").await;
        let mut client = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        let known = [r#"srv_name="open""#];
        eventually("the policy is known", async || {
            assert_eq!(client.fetch(request("/")).await.unwrap().status, 200);
            (mesh.metric("web", "inbound_http_authz_allow_total", &known).await >= 1.).then_some(())
        })
        .await;
        let mut bytes = mesh.dial_inbound(UNMESHED_IP, "web", OPAQUE).await;
        bytes.write_all(b"not HTTP, and long enough to know\n").await.unwrap();
        bytes.read_exact(&mut [0; 8]).await.unwrap();

        let mut bad = allow_all_server();
        bad.authorizations[0].networks.clear();
        policies.set_port_policy(Ok(bad));
        eventually("requests are refused", async || {
            let mut client = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
            // A connection that was permitted just before is closed.
            let answer = client.fetch(request("/")).await.ok()?;
            (answer.status == 500).then_some(())
        })
        .await;
        let mut rest = Vec::new();
        // The connection may also end with a reset.
        let _ = bytes.read_to_end(&mut rest).await;

        policies.set_port_policy(Ok(allow_all_server()));
        eventually("the valid policy is in force again", async || {
            let mut client = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
            let answer = client.fetch(request("/")).await.ok()?;
            (answer.status == 200).then_some(())
        })
        .await;
    });
}
