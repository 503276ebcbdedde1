//! Fallback endpoints, such as those in other clusters, serve while no local endpoint can take the request.

use std::sync::atomic::Ordering;

use tokio::time::Instant;
use tonic::Code;
use tulle_proto::outbound::backend::{self, BalanceP2c, EndpointDiscovery, balance_p2c, endpoint_discovery};
use tulle_proto::outbound::failure_accrual::{self, ConsecutiveFailures};
use tulle_proto::outbound::proxy_protocol::{self, Kind};
use tulle_proto::outbound::{Backend, ExponentialBackoff, FailureAccrual, OutboundPolicy, Queue};
use tulle_tests::client::{Http1, request};
use tulle_tests::eventually::eventually;
use tulle_tests::fake_policy_service::{FakePolicyService, POLICY_ADDR};
use tulle_tests::mesh::{HTTP, Mesh, mesh};

use crate::breakers::Replica;
use crate::scripted_policies::{ORIG_DST, endpoint, metadata, policy, routes, rule, seconds};

/// A policy with the endpoints of `web`. Two failures in a row eject an endpoint, and it gets a probe each second.
fn policy_with_balancer() -> OutboundPolicy {
    let discovery = endpoint_discovery::DestinationGet {
        path: format!("web.shop.svc.cluster.local:{HTTP}"),
    };
    let load = balance_p2c::PeakEwma {
        default_rtt: seconds(1),
        decay: seconds(10),
    };
    let balancer = BalanceP2c {
        discovery: Some(EndpointDiscovery {
            kind: Some(endpoint_discovery::Kind::Dst(discovery)),
        }),
        load: Some(balance_p2c::Load::PeakEwma(load)),
    };
    let backend = Backend {
        metadata: metadata("web"),
        queue: Some(Queue {
            capacity: 10,
            failfast_timeout: seconds(5),
        }),
        kind: Some(backend::Kind::Balancer(balancer)),
    };
    let failures = ConsecutiveFailures {
        max_failures: 2,
        backoff: Some(ExponentialBackoff {
            min_backoff: seconds(1),
            max_backoff: seconds(1),
            ..ExponentialBackoff::default()
        }),
    };
    policy(Kind::Http1(proxy_protocol::Http1 {
        routes: routes(rule(backend)),
        failure_accrual: Some(FailureAccrual {
            kind: Some(failure_accrual::Kind::ConsecutiveFailures(failures)),
            ejection: None,
        }),
    }))
}

/// Sends a request. Returns its status, which is that of a replica.
async fn status(client: &mut Http1) -> u16 {
    let answer = client.fetch(request("/")).await.unwrap();
    assert_eq!(answer.cause(), "", "the proxy refuses no request");
    answer.status.as_u16()
}

#[test]
fn a_fallback_endpoint_serves_while_all_local_endpoints_are_ejected() {
    let mesh = mesh()
        .workload("client")
        .workload_env("POLICY_SVC_ADDR", POLICY_ADDR)
        .workload_env("DESTINATION_SVC_ADDR", POLICY_ADDR)
        .unmeshed("local-0")
        .unmeshed("local-1")
        .unmeshed("remote")
        .env("TULLE_PROXY_BALANCER", "round-robin");
    mesh.run(async |mesh: &Mesh| {
        let services = FakePolicyService::serve().await;
        services.set_port_policy(Err(Code::InvalidArgument));
        let locals = [
            Replica::start(mesh, "local-0", 200).await,
            Replica::start(mesh, "local-1", 200).await,
        ];
        let remote = Replica::start(mesh, "remote", 200).await;
        let mut addrs = ["local-0", "local-1", "remote"].map(|name| endpoint((mesh.ip(name), HTTP).into()));
        addrs[2].is_fallback = true;
        services.set_endpoints(addrs.to_vec());
        services.set_destination_policy(Ok(policy_with_balancer()));

        let mut client = Http1::handshake(mesh.dial("client", ORIG_DST).await).await;
        while locals.iter().any(|local| local.n_requests() < 5) {
            assert_eq!(status(&mut client).await, 200);
        }
        // If a first dial was slow, its request went to the fallback endpoint.
        let n_remote = remote.n_requests();
        let (start, mut n_failed) = (Instant::now(), 0);
        locals[0].status.store(500, Ordering::Relaxed);
        for _ in 0..20 {
            n_failed += u64::from(status(&mut client).await != 200);
        }
        assert_eq!(remote.n_requests(), n_remote, "one local endpoint can take requests");

        locals[1].status.store(500, Ordering::Relaxed);
        while remote.n_requests() < n_remote + 50 {
            n_failed += u64::from(status(&mut client).await != 200);
        }
        // Two failures of each local endpoint, and the probes.
        let max_failed = 4 + 2 * (start.elapsed().as_secs() + 1);
        assert!((4..=max_failed).contains(&n_failed), "{n_failed}");

        let recovered_at = locals.each_ref().map(Replica::n_requests);
        for local in &locals {
            local.status.store(200, Ordering::Relaxed);
        }
        eventually("both local endpoints are used again", async || {
            assert_eq!(status(&mut client).await, 200);
            let mut counts = locals.iter().zip(recovered_at);
            counts
                .all(|(local, before)| local.n_requests() > before + 5)
                .then_some(())
        })
        .await;
        let n_remote = remote.n_requests();
        for _ in 0..20 {
            assert_eq!(status(&mut client).await, 200);
        }
        assert_eq!(remote.n_requests(), n_remote);
    });
}
