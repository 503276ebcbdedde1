//! A policy that cannot be understood lets nobody in.

use std::collections::BTreeMap;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tulle_proto::inbound::{Authn, Authz, Network, ProxyProtocol, Server, authn, proxy_protocol};
use tulle_proto::net::{IpAddress, IpNetwork, ip_address};
use tulle_tests::apps;
use tulle_tests::client::{Http1, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, STRANGER, mesh};
use tulle_tests::policies::{self, Policies};

/// Everybody may.
pub(crate) fn open() -> Server {
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
fn an_update_that_cannot_be_understood_denies_and_cuts() {
    let mesh = mesh().workload("web").its_env("POLICY_SVC_ADDR", policies::ADDR);
    mesh.run(async |mesh: &Mesh| {
        let policies = Policies::serve().await;
        policies.say_of_ports(Ok(open()));
        apps::echo(mesh, "web").await;
        let mut client = Http1::over(mesh.arrive(STRANGER, "web", HTTP).await).await;
        let known = [r#"srv_name="open""#];
        eventually("the policy is known", async || {
            assert_eq!(client.ask(request("/")).await.unwrap().status, 200);
            (mesh.metric("web", "inbound_http_authz_allow_total", &known).await >= 1.).then_some(())
        })
        .await;
        let mut bytes = mesh.arrive(STRANGER, "web", OPAQUE).await;
        bytes.write_all(b"not HTTP, and long enough to know\n").await.unwrap();
        bytes.read_exact(&mut [0; 8]).await.unwrap();

        let mut bad = open();
        bad.authorizations[0].networks.clear();
        policies.say_of_ports(Ok(bad));
        eventually("requests are refused", async || {
            let mut client = Http1::over(mesh.arrive(STRANGER, "web", HTTP).await).await;
            // A connection that was let in just before is cut.
            let answer = client.ask(request("/")).await.ok()?;
            (answer.status == 500).then_some(())
        })
        .await;
        let mut rest = Vec::new();
        // A reset is an end as well.
        let _ = bytes.read_to_end(&mut rest).await;

        policies.say_of_ports(Ok(open()));
        eventually("a good policy is in force again", async || {
            let mut client = Http1::over(mesh.arrive(STRANGER, "web", HTTP).await).await;
            let answer = client.ask(request("/")).await.ok()?;
            (answer.status == 200).then_some(())
        })
        .await;
    });
}
