//! Tests of the wait for the control plane. The API server is a function.

use std::convert::Infallible;
use std::future;

use http::{Request, Response};
use kube::client::Body;

use super::*;

/// A cluster whose API server responds to each listing with the objects that `list` returns for its path.
fn cluster(mut list: impl FnMut(&str) -> Vec<Value> + Send + 'static) -> Cluster {
    let service = tower::service_fn(move |req: Request<Body>| {
        let body = match req.uri().path() {
            "/version" => json!({ "gitVersion": "v1.34.2" }),
            path => json!({ "apiVersion": "v1", "kind": "List", "metadata": {}, "items": list(path) }),
        };
        let body = Body::from(body.to_string().into_bytes());
        future::ready(Ok::<_, Infallible>(Response::new(body)))
    });
    Cluster {
        client: kube::Client::new(service, "default"),
        control_plane_namespace: "linkerd".to_owned(),
        namespace: "default".to_owned(),
    }
}

/// A cluster that is healthy from the listing of pods with this number, counted from 1. In earlier listings, a pod of the identity
/// component is not ready.
fn starting_cluster(first_ready_listing: usize) -> Cluster {
    let objects = healthy_objects(&authorities(100));
    let mut n_listings = 0;
    cluster(move |path| {
        if path.contains("/linkerd-cni/") {
            return Vec::new();
        }
        let plural = path.rsplit('/').next().unwrap();
        let is_listed = |object: &&Value| format!("{}s", object["kind"].as_str().unwrap().to_lowercase()) == plural;
        let mut found: Vec<Value> = objects.iter().filter(is_listed).cloned().collect();
        if plural == "pods" {
            n_listings += 1;
            if n_listings < first_ready_listing {
                found.push(control_plane_pod("identity", "False"));
            }
        }
        found
    })
}

#[tokio::test(start_paused = true)]
async fn pods_that_are_not_ready_are_waited_for() {
    let started_at = Instant::now();
    let waited = wait_for_control_plane(&starting_cluster(3), Duration::from_secs(60)).await;
    waited.unwrap();
    assert_eq!(started_at.elapsed().as_secs(), 2 * REFRESH_INTERVAL.as_secs());
}

#[tokio::test(start_paused = true)]
async fn the_wait_ends_with_the_failed_check_and_its_fix() {
    let started_at = Instant::now();
    let waited = wait_for_control_plane(&starting_cluster(usize::MAX), Duration::from_secs(5)).await;
    let error = waited.unwrap_err().to_string();
    for text in [
        "× control plane pods are ready",
        "linkerd-identity-1: its phase is Running",
        "fix: kubectl describe deployments,pods -n linkerd",
    ] {
        assert!(error.contains(text), "{text:?} is not in {error}");
    }
    assert_eq!(started_at.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_control_plane_that_is_not_installed_is_not_waited_for() {
    let started_at = Instant::now();
    let waited = wait_for_control_plane(&cluster(|_| Vec::new()), Duration::from_secs(60)).await;
    let error = waited.unwrap_err().to_string();
    for text in [
        "× 'linkerd-config' config map exists",
        "fix: tulle install --crds | kubectl apply -f -",
    ] {
        assert!(error.contains(text), "{text:?} is not in {error}");
    }
    assert!(started_at.elapsed() < REFRESH_INTERVAL);
}
