//! Tests with a simulated API server and paused time. The suites in `tests/` use a real API server.

use std::convert::Infallible;
use std::sync::Arc;

use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{advance, sleep};
use tulle_core::drain;

use super::*;

/// A simulated API server with one lease.
#[derive(Default)]
struct LeaseServer {
    lease: Option<Lease>,
    version: u32,
    requests: Vec<String>,
    /// Whether the Deployment is deleted.
    uninstalled: bool,
    /// The holder whose requests get no response.
    cut_off: Option<&'static str>,
    /// Whether writes are applied but get no response.
    loses_write_responses: bool,
}

type Shared = Arc<Mutex<LeaseServer>>;

fn client(server: &Shared, holder: &'static str) -> Client {
    let server = server.clone();
    let service = tower::service_fn(move |req: Request<Body>| {
        let server = server.clone();
        async move {
            let (head, body) = req.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            if server.lock().cut_off == Some(holder) {
                std::future::pending::<()>().await;
            }
            let (status, answer) = server.lock().answer(&head.method, head.uri.path(), &body);
            if server.lock().loses_write_responses && head.method != Method::GET {
                std::future::pending::<()>().await;
            }
            let rsp = Response::builder().status(status);
            Ok::<_, Infallible>(rsp.body(Body::from(serde_json::to_vec(&answer).unwrap())).unwrap())
        }
    });
    Client::new(service, "default")
}

impl LeaseServer {
    fn answer(&mut self, method: &Method, path: &str, body: &[u8]) -> (StatusCode, Value) {
        self.requests.push(format!("{method} {path}"));
        if path.starts_with("/apis/apps/") && self.uninstalled {
            return failure(StatusCode::NOT_FOUND);
        }
        if path.starts_with("/apis/apps/") {
            let uid = json!({"metadata": {"name": "linkerd-destination", "uid": "deploy-uid"}});
            return (StatusCode::OK, uid);
        }
        let sent: Option<Lease> = serde_json::from_slice(body).ok();
        let version = |lease: &Lease| lease.metadata.resource_version.clone();
        match (method.as_str(), &self.lease, sent) {
            ("GET", Some(lease), _) => return (StatusCode::OK, json!(lease)),
            ("POST", None, Some(new)) => self.lease = Some(new),
            ("PUT", Some(old), Some(new)) if version(old) == version(&new) => self.lease = Some(new),
            ("PUT" | "POST", Some(_), _) => return failure(StatusCode::CONFLICT),
            _ => return failure(StatusCode::NOT_FOUND),
        }
        self.version += 1;
        let lease = self.lease.as_mut().unwrap();
        lease.metadata.resource_version = Some(self.version.to_string());
        (StatusCode::OK, json!(lease))
    }

    fn spec(&self) -> LeaseSpec {
        self.lease.clone().unwrap().spec.unwrap()
    }
}

fn failure(status: StatusCode) -> (StatusCode, Value) {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status.as_u16()});
    (status, body)
}

struct Running {
    leadership: Leadership,
    signal: Option<drain::Signal>,
    task: JoinHandle<()>,
}

fn start(server: &Shared, holder: &'static str, timing: LeaseTiming) -> Running {
    let config = Config {
        namespace: "linkerd".to_owned(),
        name: "policy-controller-write".to_owned(),
        holder: holder.to_owned(),
        field_manager: Some("policy-controller"),
        owner: Some("linkerd-destination".to_owned()),
        timing,
    };
    let (candidate, leadership) = new_candidate(&client(server, holder), config, &Registry::new());
    let (signal, drain) = drain::channel();
    let task = tokio::spawn(candidate.run(drain));
    Running {
        leadership,
        signal: Some(signal),
        task,
    }
}

async fn wait_until_leader(running: &mut Running) -> Instant {
    while running.leadership.changed().await != Role::Leader {}
    Instant::now()
}

#[tokio::test(start_paused = true)]
async fn the_first_candidate_leads_and_renews_every_two_seconds() {
    let server = Shared::default();
    let mut first = start(&server, "a", LeaseTiming::FREQUENT);
    wait_until_leader(&mut first).await;
    let spec = server.lock().spec();
    assert_eq!(spec.holder_identity.as_deref(), Some("a"));
    assert_eq!(spec.lease_duration_seconds, Some(30));
    assert_eq!(spec.lease_transitions, Some(0));
    let owner = server.lock().lease.clone().unwrap().metadata.owner_references.unwrap();
    assert_eq!((&*owner[0].kind, &*owner[0].uid), ("Deployment", "deploy-uid"));
    server.lock().requests.clear();
    sleep(Duration::from_secs(61)).await;
    let path = "/apis/coordination.k8s.io/v1/namespaces/linkerd/leases/policy-controller-write";
    assert_eq!(server.lock().requests, vec![format!("PUT {path}"); 30]);
    assert!(first.leadership.is_leader());
    first.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_killed_leader_is_replaced_within_thirty_seconds() {
    for timing in [LeaseTiming::FREQUENT, LeaseTiming::SPARSE] {
        let server = Shared::default();
        let mut first = start(&server, "a", timing);
        wait_until_leader(&mut first).await;
        let mut second = start(&server, "b", timing);
        sleep(Duration::from_millis(61_700)).await;
        assert!(!second.leadership.is_leader());
        let killed_at = Instant::now();
        first.task.abort();
        let waited = wait_until_leader(&mut second).await - killed_at;
        assert!(waited <= Duration::from_secs(30), "{waited:?}");
        let spec = server.lock().spec();
        assert_eq!(spec.holder_identity.as_deref(), Some("b"));
        assert_eq!(spec.lease_transitions, Some(1));
        second.task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_shuts_down_releases_its_lease() {
    let server = Shared::default();
    let mut first = start(&server, "a", LeaseTiming::FREQUENT);
    wait_until_leader(&mut first).await;
    let mut second = start(&server, "b", LeaseTiming::FREQUENT);
    sleep(Duration::from_secs(7)).await;
    let ended_at = Instant::now();
    first.signal.take().unwrap().drain().await;
    first.task.await.unwrap();
    assert_eq!(server.lock().spec().holder_identity.as_deref(), Some(""));
    let waited = wait_until_leader(&mut second).await - ended_at;
    assert!(waited <= Duration::from_secs(3), "{waited:?}");
    second.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_lease_acquired_during_a_shutdown_is_released() {
    let server = Shared::default();
    server.lock().loses_write_responses = true;
    let mut first = start(&server, "a", LeaseTiming::FREQUENT);
    // Shorter than the timeout of the write.
    sleep(Duration::from_secs(1)).await;
    assert_eq!(server.lock().spec().holder_identity.as_deref(), Some("a"));
    assert!(!first.leadership.is_leader());
    server.lock().loses_write_responses = false;
    first.signal.take().unwrap().drain().await;
    first.task.await.unwrap();
    assert_eq!(server.lock().spec().holder_identity.as_deref(), Some(""));
}

#[tokio::test(start_paused = true)]
async fn a_leader_without_its_api_server_stops_before_another_starts() {
    let server = Shared::default();
    let mut first = start(&server, "a", LeaseTiming::FREQUENT);
    wait_until_leader(&mut first).await;
    let mut second = start(&server, "b", LeaseTiming::FREQUENT);
    sleep(Duration::from_secs(60)).await;
    server.lock().cut_off = Some("a");
    let cut_at = Instant::now();
    assert_eq!(first.leadership.changed().await, Role::Follower);
    let stopped = cut_at.elapsed();
    assert!(stopped <= Duration::from_secs(10), "{stopped:?}");
    wait_until_leader(&mut second).await;
    assert!(cut_at.elapsed() <= Duration::from_secs(30));
    assert!(cut_at.elapsed() >= stopped + Duration::from_secs(10));
    // After reconnecting, the former leader sees the new leader and stays a follower.
    server.lock().cut_off = None;
    sleep(Duration::from_secs(60)).await;
    assert!(!first.leadership.is_leader());
    assert!(second.leadership.is_leader());
    first.task.abort();
    second.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_was_paused_stops_before_it_gets_a_response() {
    let server = Shared::default();
    let mut first = start(&server, "a", LeaseTiming::FREQUENT);
    wait_until_leader(&mut first).await;
    server.lock().cut_off = Some("a");
    let paused_at = Instant::now();
    // As after SIGSTOP and SIGCONT: all timers are late, and no request was sent in between.
    advance(Duration::from_secs(40)).await;
    assert_eq!(first.leadership.changed().await, Role::Follower);
    let stopped = paused_at.elapsed();
    assert!(stopped < Duration::from_secs(41), "{stopped:?}");
    first.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_lease_deleted_with_its_deployment_is_not_recreated() {
    let server = Shared::default();
    let mut first = start(&server, "a", LeaseTiming::FREQUENT);
    wait_until_leader(&mut first).await;
    {
        let mut server = server.lock();
        server.lease = None;
        server.uninstalled = true;
    }
    while first.leadership.changed().await == Role::Leader {}
    sleep(Duration::from_secs(30)).await;
    assert_eq!(server.lock().lease, None);
    // After a new installation the candidate competes again.
    server.lock().uninstalled = false;
    wait_until_leader(&mut first).await;
    first.task.abort();
}
