//! Tests of the client against a Workload API on a Unix socket, whose updates the tests choose.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tulle_core::identity::Identity;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Readiness;
use tulle_proto::workload::spiffe_workload_api_server::{SpiffeWorkloadApi, SpiffeWorkloadApiServer};
use tulle_proto::workload::{X509BundlesRequest, X509BundlesResponse, X509svid, X509svidRequest, X509svidResponse};

use crate::api::tests::{self, with_timeout};
use crate::identity::anchors::TrustAnchorSource;
use crate::identity::workload_api::WorkloadApiClient;
use crate::tls::credentials::{Credentials, TrustAnchors};
use crate::tls::tests::{Authority, in_an_hour};

const VM: &str = "spiffe://root.linkerd.cluster.local/vm";

type Update = Result<X509svidResponse, Status>;

/// A Workload API that responds to each request with the next stream of the test.
#[derive(Clone)]
struct Api {
    streams: Arc<Mutex<mpsc::Receiver<mpsc::Receiver<Update>>>>,
}

#[tonic::async_trait]
impl SpiffeWorkloadApi for Api {
    type FetchX509SVIDStream = ReceiverStream<Update>;
    type FetchX509BundlesStream = ReceiverStream<Result<X509BundlesResponse, Status>>;

    async fn fetch_x509svid(
        &self,
        req: Request<X509svidRequest>,
    ) -> Result<Response<Self::FetchX509SVIDStream>, Status> {
        if req
            .metadata()
            .get("workload.spiffe.io")
            .is_none_or(|value| value != "true")
        {
            return Err(Status::invalid_argument("security header missing"));
        }
        match self.streams.lock().try_recv() {
            Ok(stream) => Ok(Response::new(ReceiverStream::new(stream))),
            Err(_) => Err(Status::permission_denied("no identity issued")),
        }
    }

    async fn fetch_x509_bundles(
        &self,
        _: Request<X509BundlesRequest>,
    ) -> Result<Response<Self::FetchX509BundlesStream>, Status> {
        Err(Status::unimplemented("not used by the proxy"))
    }
}

/// A running API and the proxy's client of it.
struct Fixture {
    streams: mpsc::Sender<mpsc::Receiver<Update>>,
    creds: Credentials,
    readiness: Readiness,
    registry: Registry,
    dir: TempDir,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn fixture(extra_authority: Option<&Authority>) -> Fixture {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("api.sock");
    let (streams_tx, streams_rx) = mpsc::channel(8);
    let api = Api {
        streams: Arc::new(Mutex::new(streams_rx)),
    };
    let listener = UnixListener::bind(&socket).unwrap();
    let server = tokio::spawn(serve(listener, api));
    let extra_anchors = extra_authority.map(|authority| {
        let file = dir.path().join("added.pem");
        fs::write(&file, authority.certificate.pem()).unwrap();
        TrustAnchorSource::File(file)
    });
    let creds = Credentials::new(VM.parse().unwrap(), "vm.example.com", TrustAnchors::none()).unwrap();
    let (registry, readiness) = (Registry::new(), Readiness::new());
    let workload = WorkloadApiClient::new(socket, extra_anchors, creds.clone(), &registry);
    let workload = tokio::spawn(workload.run(readiness.latch("no certificate yet")));
    Fixture {
        streams: streams_tx,
        creds,
        readiness,
        registry,
        dir,
        tasks: [server, workload],
    }
}

async fn serve(listener: UnixListener, api: Api) {
    let service = SpiffeWorkloadApiServer::new(api);
    // The connections are dropped with this task, which closes them.
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        connections.spawn(tests::serve(stream, service.clone()));
    }
}

impl Fixture {
    /// Opens the stream that the proxy's next request gets.
    async fn stream(&self) -> mpsc::Sender<Update> {
        let (updates_tx, updates_rx) = mpsc::channel(8);
        self.streams.send(updates_rx).await.unwrap();
        updates_tx
    }

    async fn wait_until(&self, condition: impl Fn(&Self) -> bool) {
        with_timeout(async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }
}

fn svid(authority: &Authority, id: &str, until: SystemTime) -> X509svid {
    let leaf = authority.leaf(&[id], until);
    X509svid {
        spiffe_id: id.to_owned(),
        x509_svid: leaf.chain.iter().flat_map(|der| der.to_vec()).collect(),
        x509_svid_key: leaf.key.secret_pkcs8_der().to_vec(),
        bundle: authority.certificate.der().to_vec(),
        hint: String::new(),
    }
}

fn update(svids: Vec<X509svid>) -> Update {
    Ok(X509svidResponse {
        svids,
        ..X509svidResponse::default()
    })
}

#[tokio::test]
async fn certificate_key_and_anchors_come_from_the_socket_and_updates_take_effect_at_once() {
    let (one, two) = (Authority::new(), Authority::named("two"));
    let fixture = fixture(None);
    assert!(!fixture.readiness.is_ready(), "no certificate has been issued yet");
    let stream = fixture.stream().await;
    let other = svid(&one, "spiffe://root.linkerd.cluster.local/other", in_an_hour());
    stream
        .send(update(vec![other, svid(&one, VM, in_an_hour())]))
        .await
        .unwrap();
    fixture.wait_until(|fixture| fixture.readiness.is_ready()).await;
    assert_eq!(fixture.creds.id(), &VM.parse::<Identity>().unwrap());
    assert!(fixture.creds.anchors() == one.anchors());
    assert_eq!(fixture.creds.generation(), 1);

    // A new root is published before the first certificate that it signs.
    let mut both = svid(&one, VM, in_an_hour());
    both.bundle.extend_from_slice(two.certificate.der());
    stream.send(update(vec![both])).await.unwrap();
    fixture.wait_until(|fixture| fixture.creds.generation() == 2).await;
    assert!(fixture.creds.anchors() == one.anchors().union(&two.anchors()).unwrap());
    stream.send(update(vec![svid(&two, VM, in_an_hour())])).await.unwrap();
    fixture.wait_until(|fixture| fixture.creds.generation() == 3).await;
    assert!(fixture.creds.anchors() == two.anchors());
    let metrics = fixture.registry.render();
    assert!(
        metrics.contains("control_identity_cert_refreshes_total{result=\"ok\"} 3"),
        "{metrics}"
    );

    // The API stops and restarts: the last answer stays in force in between.
    drop(stream);
    fixture
        .stream()
        .await
        .send(update(vec![svid(&two, VM, in_an_hour())]))
        .await
        .unwrap();
    fixture.wait_until(|fixture| fixture.creds.generation() == 4).await;
}

#[tokio::test]
async fn an_invalid_answer_changes_nothing() {
    let (one, foreign) = (Authority::new(), Authority::named("foreign"));
    let fixture = fixture(None);
    fixture
        .stream()
        .await
        .send(update(vec![svid(&one, VM, in_an_hour())]))
        .await
        .unwrap();
    fixture.wait_until(|fixture| fixture.creds.generation() == 1).await;
    let good = || svid(&one, VM, in_an_hour());
    let mut bad = vec![
        update(vec![]),
        update(vec![svid(
            &one,
            "spiffe://root.linkerd.cluster.local/other",
            in_an_hour(),
        )]),
        Err(Status::permission_denied("not any more")),
    ];
    let changes: [fn(&mut X509svid, &Authority); 6] = [
        |svid, _| svid.bundle.clear(),
        |svid, _| svid.bundle = b"hello".to_vec(),
        |svid, foreign| svid.bundle = foreign.certificate.der().to_vec(),
        |svid, _| svid.x509_svid.clear(),
        |svid, _| svid.x509_svid_key = b"hello".to_vec(),
        |svid, foreign| svid.x509_svid = foreign.leaf(&[VM], in_an_hour()).chain[0].to_vec(),
    ];
    for change in changes {
        let mut svid = good();
        change(&mut svid, &foreign);
        bad.push(update(vec![svid]));
    }
    let n_bad = bad.len();
    for update in bad {
        fixture.stream().await.send(update).await.unwrap();
    }
    fixture.stream().await.send(update(vec![good()])).await.unwrap();
    fixture.wait_until(|fixture| fixture.creds.generation() > 1).await;
    assert_eq!(fixture.creds.generation(), 2, "only valid answers are installed");
    let metrics = fixture.registry.render();
    let failed = metrics
        .lines()
        .find_map(|line| line.strip_prefix("control_identity_cert_refreshes_total{result=\"error\"} "))
        .unwrap();
    assert!(failed.parse::<usize>().unwrap() >= n_bad, "{failed}");
    assert!(fixture.creds.anchors() == one.anchors());
}

#[tokio::test]
async fn trust_anchors_of_the_environment_are_added_to_those_of_the_socket() {
    let (own, mesh) = (Authority::new(), Authority::named("mesh"));
    let fixture = fixture(Some(&mesh));
    let stream = fixture.stream().await;
    stream.send(update(vec![svid(&own, VM, in_an_hour())])).await.unwrap();
    fixture.wait_until(|fixture| fixture.readiness.is_ready()).await;
    assert!(fixture.creds.anchors() == own.anchors().union(&mesh.anchors()).unwrap());
    let next = Authority::named("next");
    fs::write(fixture.dir.path().join("added.pem"), next.certificate.pem()).unwrap();
    fixture
        .wait_until(|fixture| fixture.creds.anchors() == own.anchors().union(&next.anchors()).unwrap())
        .await;
    assert_eq!(fixture.creds.generation(), 1, "the certificate is the same");
}

#[tokio::test]
async fn a_broken_file_of_trust_anchors_does_not_delay_the_next_certificate() {
    let (own, mesh) = (Authority::new(), Authority::named("mesh"));
    let fixture = fixture(Some(&mesh));
    let stream = fixture.stream().await;
    stream.send(update(vec![svid(&own, VM, in_an_hour())])).await.unwrap();
    fixture.wait_until(|fixture| fixture.readiness.is_ready()).await;
    fs::write(fixture.dir.path().join("added.pem"), "no certificate").unwrap();
    stream.send(update(vec![svid(&own, VM, in_an_hour())])).await.unwrap();
    fixture.wait_until(|fixture| fixture.creds.generation() == 2).await;
    assert!(fixture.creds.anchors() == own.anchors().union(&mesh.anchors()).unwrap());
    let metrics = fixture.registry.render();
    let count = "tulle_unreadable_updates_total{kind=\"trust_anchors\"} ";
    assert!(
        metrics
            .lines()
            .any(|line| line.strip_prefix(count).is_some_and(|n| n != "0")),
        "{metrics}"
    );
}

#[tokio::test]
async fn the_file_of_trust_anchors_is_watched_while_the_api_is_down() {
    let (own, mesh, next) = (Authority::new(), Authority::named("mesh"), Authority::named("next"));
    let fixture = fixture(Some(&mesh));
    let stream = fixture.stream().await;
    stream.send(update(vec![svid(&own, VM, in_an_hour())])).await.unwrap();
    fixture.wait_until(|fixture| fixture.readiness.is_ready()).await;
    let [server, _] = &fixture.tasks;
    server.abort();
    drop(stream);
    fs::remove_file(fixture.dir.path().join("api.sock")).unwrap();
    let errors = "control_identity_cert_refreshes_total{result=\"error\"} ";
    let has_failed = |line: &str| line.strip_prefix(errors).is_some_and(|count| count != "0");
    fixture
        .wait_until(|fixture| fixture.registry.render().lines().any(has_failed))
        .await;

    tokio::time::pause(); // from here on, the test waits only for timers
    fs::write(fixture.dir.path().join("added.pem"), next.certificate.pem()).unwrap();
    fixture
        .wait_until(|fixture| fixture.creds.anchors() == own.anchors().union(&next.anchors()).unwrap())
        .await;
}
