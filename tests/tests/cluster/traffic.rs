//! The demo's workloads on two nodes: every protocol, every form of a service name, both identities, refusals.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::ensure;

use tulle_tests::meshed::{Client, MeshedCluster, assert_all_ok};

const LOAD: Client = Client {
    namespace: "demo",
    deployment: "load",
    container: "http",
};
const UNMESHED: Client = Client {
    namespace: "outside",
    deployment: "stranger",
    container: "http",
};

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_s_workloads_reach_each_other_by_every_name_and_protocol() {
    let meshed = MeshedCluster::start().await.unwrap();
    start_demo(&meshed).await;
    every_edge_is_answered(&meshed).await;
    clients_without_an_identity_are_refused(&meshed).await;
    both_sides_have_verified_each_other(&meshed).await;
}

/// Applies the demo and waits until its workloads are available.
async fn start_demo(meshed: &MeshedCluster) {
    let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/kubernetes-demo");
    meshed.apply_files(&manifests).await.unwrap();
    meshed
        .mark_opaque_for_third_party_proxies("demo", "tcp", 5000)
        .await
        .unwrap();
    meshed.set_up_client("demo", "load").await.unwrap();
    for (namespace, name) in [("demo", "web"), ("demo", "tcp"), ("outside", "stranger")] {
        meshed.cluster.wait_for_deployment(namespace, name).await.unwrap();
    }
    let status = "rollout status -n demo statefulset/ws --timeout=60s";
    meshed.kubectl(status).await.unwrap();
}

/// Sends requests to every name of the demo's services, and waits until all expected replicas have answered.
async fn every_edge_is_answered(meshed: &MeshedCluster) {
    let replicas = meshed.pods("demo", "app=web").await.unwrap();
    let ips = "get pods -n demo -l app=web -o jsonpath={.items[*].status.podIP}";
    let ips = meshed.kubectl(ips).await.unwrap();
    let ip = ips.split(' ').next().unwrap();
    let all: Vec<&str> = replicas.iter().map(String::as_str).collect();
    let greeters = meshed.pods("demo", "app=tcp").await.unwrap();
    let greeters: Vec<&str> = greeters.iter().map(String::as_str).collect();
    let domain = "svc.cluster.local";
    let edges = [
        ("HTTP/1", format!("web.demo.{domain}:80/"), &all[..]),
        ("HTTP/2", "web:80/ --protocol=http2".to_owned(), &all),
        ("gRPC", "web:9090 --protocol=grpc".to_owned(), &all),
        (
            "gRPC both ways",
            "web.demo:9090 --protocol=grpc --grpc-method=bidi --messages=5".to_owned(),
            &all,
        ),
        ("ExternalName", format!("alias.demo.{domain}:80/"), &all),
        ("a pod's address", format!("{ip}:8080/"), &all[..1]),
        ("a headless service", format!("ws.demo.{domain}:8080/"), &[]),
        (
            "a StatefulSet's first pod",
            format!("ws-0.ws.demo.{domain}:8080/"),
            &["ws-0"],
        ),
        (
            "a StatefulSet's second pod",
            format!("ws-1.ws.demo.{domain}:8080/"),
            &["ws-1"],
        ),
        ("WebSocket", "ws-1.ws:8080/ws --protocol=ws".to_owned(), &["ws-1"]),
        (
            "a server that speaks first",
            "tcp:5000 --protocol=tcp --expect-greeting=hello --body-size=1000".to_owned(),
            &greeters,
        ),
    ];
    for (what, target, expected) in &edges {
        let expected: BTreeSet<String> = expected.iter().map(|&replica| replica.to_owned()).collect();
        let mut answered = BTreeSet::new();
        // The balancer avoids a slow replica for some seconds, so a single run may not reach it.
        let all_answer = async || {
            let line = format!("{target} --rate=200 --requests=200");
            let report = meshed.load(LOAD, &line).await?;
            assert_all_ok(&report, what);
            assert_eq!(report.requests, 200, "{what}");
            answered.extend(report.replicas.into_keys());
            ensure!(expected.is_subset(&answered), "of {expected:?} only {answered:?}");
            Ok(())
        };
        meshed.cluster.wait_until(what, all_answer).await.unwrap();
        assert!(expected.is_empty() || answered == expected, "{what}: {answered:?}");
    }
}

/// Checks the refusal of each protocol, and that the path of a probe is open to all clients.
async fn clients_without_an_identity_are_refused(meshed: &MeshedCluster) {
    for target in ["web.demo:80/", "web.demo:9090/", "ws.demo:8080/"] {
        let report = meshed
            .load(UNMESHED, &format!("{target} --rate=20 --requests=20"))
            .await
            .unwrap();
        assert_eq!(report.errors.get("status 403"), Some(&20), "{target}: {report:?}");
    }
    let bytes = "tcp.demo:5000 --protocol=tcp --reconnect --body-size=10 --rate=20 --requests=20";
    let report = meshed.load(UNMESHED, bytes).await.unwrap();
    assert_eq!((report.requests, report.failed), (20, 20), "{report:?}");
    let probe = meshed
        .load(UNMESHED, "web.demo:80/ready --rate=20 --requests=20")
        .await
        .unwrap();
    assert_all_ok(&probe, "a probe");
}

/// Checks the identities that the proxies count, on one node and across nodes and zones.
async fn both_sides_have_verified_each_other(meshed: &MeshedCluster) {
    let load = &meshed.pods("demo", "app=load").await.unwrap()[0];
    let identity = |account: &str| format!("{account}.demo.serviceaccount.identity.linkerd.cluster.local");
    for account in ["web", "ws", "tcp"] {
        let client_label = format!("client_id=\"{}\"", identity("load"));
        let mut verified = 0;
        for pod in meshed.pods("demo", &format!("app={account}")).await.unwrap() {
            let metrics = meshed.proxy_metrics_from_client(LOAD, "demo", &pod).await.unwrap();
            // The admin port also counts the client that reads these metrics.
            let of_load = |line: &str| line.contains(&client_label) && !line.contains(":4191\"");
            verified += usize::from(metrics.lines().any(of_load));
        }
        assert!(verified > 0, "no proxy of {account} has verified load");
        let metrics = meshed.proxy_metrics("demo", load).await.unwrap();
        let server_label = format!("server_id=\"{}\"", identity(account));
        assert!(
            metrics.lines().any(|line| line.contains(&server_label)),
            "load has not verified {account}"
        );
    }
    let metrics = meshed.proxy_metrics("demo", load).await.unwrap();
    for locality in ["local", "remote"] {
        let label = format!("dst_zone_locality=\"{locality}\"");
        assert!(
            metrics.contains(&label),
            "no request to an endpoint of a {locality} zone"
        );
    }
}
