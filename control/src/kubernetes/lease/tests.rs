//! Candidates against an API server of one lease, in paused time. The suites of `tests/` do this with a real one.

use std::convert::Infallible;
use std::sync::Arc;

use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tulle_core::drain;

use super::*;

/// What an API server knows of one lease.
#[derive(Default)]
struct Server {
    lease: Option<Lease>,
    version: u32,
    requests: Vec<String>,
    /// Whether the Deployment has been deleted.
    uninstalled: bool,
    /// Whose requests are not answered any more.
    cut_off: Option<&'static str>,
}

type Shared = Arc<Mutex<Server>>;

fn client(server: &Shared, of: &'static str) -> Client {
    let server = server.clone();
    let service = tower::service_fn(move |req: Request<Body>| {
        let server = server.clone();
        async move {
            let (head, body) = req.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            if server.lock().cut_off == Some(of) {
                std::future::pending::<()>().await;
            }
            let (status, answer) = server.lock().answer(&head.method, head.uri.path(), &body);
            let rsp = Response::builder().status(status);
            Ok::<_, Infallible>(rsp.body(Body::from(serde_json::to_vec(&answer).unwrap())).unwrap())
        }
    });
    Client::new(service, "default")
}

impl Server {
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

fn start(server: &Shared, holder: &'static str, timing: Timing) -> Running {
    let config = Config {
        namespace: "linkerd".to_owned(),
        name: "policy-controller-write",
        holder: holder.to_owned(),
        field_manager: Some("policy-controller"),
        owner: Some("linkerd-destination".to_owned()),
        timing,
    };
    let (candidate, leadership) = candidate(&client(server, holder), config, &Registry::new());
    let (signal, drain) = drain::channel();
    let task = tokio::spawn(candidate.run(drain));
    Running {
        leadership,
        signal: Some(signal),
        task,
    }
}

async fn leads(running: &mut Running) -> Instant {
    while running.leadership.changed().await != Role::Leader {}
    Instant::now()
}

#[tokio::test(start_paused = true)]
async fn the_first_candidate_leads_and_renews_every_two_seconds() {
    let server = Shared::default();
    let mut first = start(&server, "a", Timing::FREQUENT);
    leads(&mut first).await;
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
    for timing in [Timing::FREQUENT, Timing::SPARSE] {
        let server = Shared::default();
        let mut first = start(&server, "a", timing);
        leads(&mut first).await;
        let mut second = start(&server, "b", timing);
        sleep(Duration::from_millis(61_700)).await;
        assert!(!second.leadership.is_leader());
        let killed_at = Instant::now();
        first.task.abort();
        let waited = leads(&mut second).await - killed_at;
        assert!(waited <= Duration::from_secs(30), "{waited:?}");
        let spec = server.lock().spec();
        assert_eq!(spec.holder_identity.as_deref(), Some("b"));
        assert_eq!(spec.lease_transitions, Some(1));
        second.task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_ends_hands_over_at_once() {
    let server = Shared::default();
    let mut first = start(&server, "a", Timing::FREQUENT);
    leads(&mut first).await;
    let mut second = start(&server, "b", Timing::FREQUENT);
    sleep(Duration::from_secs(7)).await;
    let ended_at = Instant::now();
    first.signal.take().unwrap().drain().await;
    first.task.await.unwrap();
    assert_eq!(server.lock().spec().holder_identity.as_deref(), Some(""));
    let waited = leads(&mut second).await - ended_at;
    assert!(waited <= Duration::from_secs(3), "{waited:?}");
    second.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_leader_without_its_api_server_stops_before_another_starts() {
    let server = Shared::default();
    let mut first = start(&server, "a", Timing::FREQUENT);
    leads(&mut first).await;
    let mut second = start(&server, "b", Timing::FREQUENT);
    sleep(Duration::from_secs(60)).await;
    server.lock().cut_off = Some("a");
    let cut_at = Instant::now();
    assert_eq!(first.leadership.changed().await, Role::Follower);
    let stopped = cut_at.elapsed();
    assert!(stopped <= Duration::from_secs(10), "{stopped:?}");
    leads(&mut second).await;
    assert!(cut_at.elapsed() <= Duration::from_secs(30));
    assert!(cut_at.elapsed() >= stopped + Duration::from_secs(10));
    // Back again, it sees that another leads and stays behind.
    server.lock().cut_off = None;
    sleep(Duration::from_secs(60)).await;
    assert!(!first.leadership.is_leader());
    assert!(second.leadership.is_leader());
    first.task.abort();
    second.task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_went_with_its_deployment_is_not_made_again() {
    let server = Shared::default();
    let mut first = start(&server, "a", Timing::FREQUENT);
    leads(&mut first).await;
    {
        let mut server = server.lock();
        server.lease = None;
        server.uninstalled = true;
    }
    while first.leadership.changed().await == Role::Leader {}
    sleep(Duration::from_secs(30)).await;
    assert_eq!(server.lock().lease, None);
    // Installed again, it goes on.
    server.lock().uninstalled = false;
    leads(&mut first).await;
    first.task.abort();
}
