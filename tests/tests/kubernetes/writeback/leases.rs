//! Leader election between replicas.

use k8s_openapi::api::apps::v1::Deployment;
use kube::api::PostParams;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_leader_is_replaced_within_thirty_seconds_and_a_stopped_one_at_once() {
    let server = api_server().await;
    let deployment: Deployment = serde_json::from_value(json!({
        "metadata": {"name": "linkerd-destination"},
        "spec": {
            "selector": {"matchLabels": {"app": "x"}},
            "template": {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "x", "image": "x"}]}},
        },
    }))
    .unwrap();
    let deployments = Api::<Deployment>::namespaced(server.client(), "linkerd");
    let deployment = deployments.create(&PostParams::default(), &deployment).await.unwrap();

    let first = Replica::start(&server.client(), "first");
    for lease in [ENDPOINT_LEASE, STATUS_LEASE] {
        wait_for_leader(&server, lease, "first").await;
    }
    let leases = Api::<Lease>::namespaced(server.client(), "linkerd");
    for lease in [ENDPOINT_LEASE, STATUS_LEASE] {
        let lease = leases.get(lease).await.unwrap();
        let owners: Vec<_> = lease.owner_references().iter().map(|owner| &owner.uid).collect();
        assert_eq!(
            owners,
            [deployment.metadata.uid.as_ref().unwrap()],
            "{}",
            lease.name_any()
        );
    }
    let lease = leases.get(STATUS_LEASE).await.unwrap();
    assert_eq!(lease.managed_fields()[0].manager.as_deref(), Some("policy-controller"));
    assert_eq!(lease.spec.unwrap().lease_duration_seconds, Some(30));

    let second = Replica::start(&server.client(), "second");
    // A candidate reads the lease as often as the holder renews it, so the second replica tries several times.
    wait_for_renewals(&server, ENDPOINT_LEASE, 3).await;
    for lease in [ENDPOINT_LEASE, STATUS_LEASE] {
        assert_eq!(holder(&server, lease).await.as_deref(), Some("first"), "{lease}");
    }
    let killed_at = Instant::now();
    first.kill();
    for lease in [ENDPOINT_LEASE, STATUS_LEASE] {
        let takeover = async {
            while holder(&server, lease).await.as_deref() != Some("second") {
                sleep(Duration::from_millis(20)).await;
            }
        };
        takeover.await;
        let waited = killed_at.elapsed();
        println!("{lease}: taken over {waited:?} after the kill");
        assert!(waited <= Duration::from_secs(30), "{lease}: {waited:?}");
        let lease = leases.get(lease).await.unwrap();
        assert_eq!(lease.spec.unwrap().lease_transitions, Some(1));
    }

    let third = Replica::start(&server.client(), "third");
    wait_for_renewals(&server, ENDPOINT_LEASE, 2).await;
    second.end().await;
    let ended_at = Instant::now();
    for lease in [ENDPOINT_LEASE, STATUS_LEASE] {
        wait_for_leader(&server, lease, "third").await;
    }
    // A lease that was not released would expire after 27 seconds or more.
    let waited = ended_at.elapsed();
    println!("taken over {waited:?} after the end");
    assert!(waited < Duration::from_secs(10), "{waited:?}");
    third.end().await;
    assert_eq!(
        holder(&server, ENDPOINT_LEASE).await,
        None,
        "the lease must be released"
    );
}

/// Waits until the holder of a lease has renewed it `n` times.
async fn wait_for_renewals(server: &ApiServer, lease: &str, n: usize) {
    let leases = Api::<Lease>::namespaced(server.client(), "linkerd");
    let renewed_at = async || leases.get(lease).await.unwrap().spec.unwrap().renew_time;
    let mut seen = renewed_at().await;
    for _ in 0..n {
        let renewed = eventually("the lease is renewed", async || {
            let now = renewed_at().await;
            (now != seen).then_some(now)
        });
        seen = renewed.await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lease_for_endpoint_slices_is_renewed_every_two_seconds() {
    let server = api_server().await;
    let replica = Replica::start(&server.client(), "only");
    wait_for_leader(&server, ENDPOINT_LEASE, "only").await;
    let leases = Api::<Lease>::namespaced(server.client(), "linkerd");
    let mut renewals = Vec::new();
    while renewals.len() < 5 {
        let spec = leases.get(ENDPOINT_LEASE).await.unwrap().spec.unwrap();
        let renewed_at = spec.renew_time.unwrap().0;
        if renewals.last() != Some(&renewed_at) {
            renewals.push(renewed_at);
        }
        sleep(Duration::from_millis(50)).await;
    }
    for pair in renewals.windows(2) {
        let apart = pair[1].duration_since(pair[0]).as_secs_f64();
        assert!((1.9..4.0).contains(&apart), "{renewals:?}");
    }
    replica.end().await;
}
