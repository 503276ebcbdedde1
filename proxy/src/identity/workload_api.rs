//! Certificate, key and trust anchors from a SPIFFE Workload API, for as long as the process lives.
//!
//! The API is a gRPC service on a Unix socket; whoever serves it knows the caller by its process, so nothing is shown.
//! It renews in its own time: what it sends takes effect at once, and while it is gone the last answer stays.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{Request, Uri};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::body::Body;
use tonic::metadata::MetadataValue;
use tonic::{Status, Streaming};
use tracing::{debug, info, warn};
use tulle_core::backoff::Backoff;
use tulle_core::identity::Identity;
use tulle_core::metrics::Registry;
use tulle_core::names::WORKLOAD_API_METADATA;
use tulle_core::ready::Latch;
use tulle_proto::workload::spiffe_workload_api_client::SpiffeWorkloadApiClient;
use tulle_proto::workload::{X509svid, X509svidRequest, X509svidResponse};
use x509_parser::prelude::{FromDer, X509Certificate};
use zeroize::Zeroizing;

use crate::identity::certify::{ANCHORS_INTERVAL, REMINDER_INTERVAL, ticks};
use crate::identity::metrics::{Metrics, causes};
use crate::identity::{Anchors, AnchorsError};
use crate::metrics::unreadable::Reporter;
use crate::tls::creds::{Credentials, CredentialsError, Leaf, TrustAnchors};

/// Keeps [`Credentials`] as a Workload API says.
pub(crate) struct Workload {
    socket: PathBuf,
    /// Trusted besides what the API says.
    added: Option<Anchors>,
    /// Tells of a file of them that cannot be read.
    unreadable: Option<Reporter>,
    creds: Credentials,
    metrics: Metrics,
    /// What the API said last, without what is added.
    bundle: Option<TrustAnchors>,
}

#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error("connecting to the Workload API at {}", .path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("starting HTTP/2 with the Workload API")]
    Http(#[source] hyper::Error),
    #[error("the Workload API at {} did not answer within {ANSWER_LIMIT:?}", .path.display())]
    Timeout { path: PathBuf },
    #[error("the Workload API has nothing for this process ({:?}): {}", .0.code(), .0.message())]
    Refused(Status),
    #[error("the Workload API ended the stream")]
    Ended,
    #[error("the Workload API offers [{}] where {expected} is needed", .offered.join(", "))]
    OtherIdentity { expected: Identity, offered: Vec<String> },
    #[error("the {what} from the Workload API are not certificates in DER")]
    Der { what: &'static str },
    #[error(transparent)]
    Added(AnchorsError),
    #[error("using the trust anchors from the Workload API")]
    Anchors(#[source] CredentialsError),
    #[error("using the certificate from the Workload API")]
    Certificate(#[source] CredentialsError),
}

impl Workload {
    pub(crate) fn new(socket: PathBuf, added: Option<Anchors>, creds: Credentials, registry: &Registry) -> Self {
        Self {
            socket,
            unreadable: added.as_ref().map(|added| added.reporter(registry)),
            added,
            creds,
            metrics: Metrics::new(registry),
            bundle: None,
        }
    }

    /// Follows the API and the file of added trust anchors; never returns.
    ///
    /// `uncertified` is dropped with the first certificate.
    pub(crate) async fn run(mut self, uncertified: Latch) {
        let waiting = Arc::new(Mutex::new(Waiting {
            uncertified: Some(uncertified),
            error: None,
        }));
        let reminding = remind(waiting.clone());
        tokio::select! {
            () = self.follow(&waiting) => {}
            () = reminding => {}
        }
    }

    async fn follow(&mut self, waiting: &Mutex<Waiting>) {
        let mut delays = RETRIES.steps();
        loop {
            let before = self.creds.generation();
            let error = match self.stream(waiting).await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            self.metrics.failed();
            if self.creds.generation() != before {
                delays.reset();
            }
            let delay = delays.next_delay();
            debug!(error = %causes(&error), ?delay, "the Workload API failed");
            waiting.lock().failed(&error);
            sleep(delay).await;
        }
    }

    /// Takes one stream of updates to its end, which is an error.
    async fn stream(&mut self, waiting: &Mutex<Waiting>) -> Result<std::convert::Infallible, FetchError> {
        // Ends the connection with the stream.
        let mut connection = JoinSet::new();
        let connecting = connect(&self.socket, &mut connection);
        let mut updates = timeout(ANSWER_LIMIT, connecting)
            .await
            .map_err(|_| FetchError::Timeout {
                path: self.socket.clone(),
            })??;
        let mut look_at_file = ticks(ANCHORS_INTERVAL);
        loop {
            // Both branches only wait, and a message is read whole or not at all.
            tokio::select! {
                update = updates.message() => {
                    let update = update.map_err(FetchError::Refused)?.ok_or(FetchError::Ended)?;
                    self.install(update)?;
                    waiting.lock().succeeded();
                }
                _ = look_at_file.tick() => self.follow_file(),
            }
        }
    }

    fn install(&mut self, update: X509svidResponse) -> Result<(), FetchError> {
        let svid = pick(update.svids, self.creds.id())?;
        let bundle = certificates(svid.bundle, "trust anchors")?;
        let bundle = TrustAnchors::from_der(bundle).map_err(FetchError::Anchors)?;
        let anchors = self.with_added(&bundle)?;
        let leaf = Leaf {
            chain: certificates(svid.x509_svid, "certificates")?,
            key: Zeroizing::new(PrivatePkcs8KeyDer::from(svid.x509_svid_key)),
        };
        let validity = self.creds.replace(leaf, anchors).map_err(FetchError::Certificate)?;
        if self.bundle.as_ref().is_some_and(|known| *known != bundle) {
            info!("the Workload API sent new trust anchors");
        }
        self.bundle = Some(bundle);
        let now = SystemTime::now();
        self.metrics.refreshed(now, validity.not_after);
        let left = validity.not_after.duration_since(now).unwrap_or_default();
        info!(id = %self.creds.id(), ?left, "certified by the Workload API");
        Ok(())
    }

    fn with_added(&self, bundle: &TrustAnchors) -> Result<TrustAnchors, FetchError> {
        match &self.added {
            Some(added) => bundle
                .and(&added.read().map_err(FetchError::Added)?)
                .map_err(FetchError::Anchors),
            None => Ok(bundle.clone()),
        }
    }

    /// Takes over added trust anchors that have changed in their file.
    fn follow_file(&mut self) {
        let (Some(Anchors::File(_)), Some(bundle)) = (&self.added, &self.bundle) else {
            return;
        };
        let replaced = self
            .with_added(bundle)
            .and_then(|anchors| match anchors == self.creds.anchors() {
                true => Ok(false),
                false => self
                    .creds
                    .replace_anchors(anchors)
                    .map(|()| true)
                    .map_err(FetchError::Anchors),
            });
        match replaced {
            Ok(true) => info!("trust anchors have changed"),
            Ok(false) => {}
            // They stay as they were.
            Err(error) => drop(self.unreadable.as_mut().map(|unreadable| unreadable.report(&error))),
        }
    }
}

/// What is told of while there is no certificate.
struct Waiting {
    uncertified: Option<Latch>,
    error: Option<String>,
}

impl Waiting {
    fn succeeded(&mut self) {
        self.uncertified = None;
        self.error = None;
    }

    /// The first error of an outage is told.
    fn failed(&mut self, error: &FetchError) {
        if self.error.is_none() {
            warn!(error = %causes(error), "no certificate from the Workload API, trying again");
        }
        if let Some(uncertified) = &self.uncertified {
            uncertified.explain(format!("no certificate yet: {}", causes(error)));
        }
        self.error = Some(causes(error));
    }
}

async fn remind(waiting: Arc<Mutex<Waiting>>) {
    let mut remind = ticks(REMINDER_INTERVAL);
    loop {
        remind.tick().await;
        let waiting = waiting.lock();
        if waiting.uncertified.is_some()
            && let Some(error) = &waiting.error
        {
            warn!(error, "still waiting for a certificate");
        }
    }
}

async fn connect(
    socket: &PathBuf,
    connection: &mut JoinSet<Result<(), hyper::Error>>,
) -> Result<Streaming<X509svidResponse>, FetchError> {
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|source| FetchError::Connect {
            path: socket.clone(),
            source,
        })?;
    let (sender, driver) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(FetchError::Http)?;
    connection.spawn(driver);
    let service = tower::service_fn(move |req: Request<Body>| sender.clone().send_request(req));
    // HTTP/2 wants an authority, and a socket has none.
    let mut client = SpiffeWorkloadApiClient::with_origin(service, Uri::from_static("http://localhost"));
    let mut req = tonic::Request::new(X509svidRequest {});
    req.metadata_mut()
        .insert(WORKLOAD_API_METADATA, MetadataValue::from_static("true"));
    let updates = client.fetch_x509svid(req).await.map_err(FetchError::Refused)?;
    Ok(updates.into_inner())
}

/// The one of several identities that is ours.
fn pick(svids: Vec<X509svid>, expected: &Identity) -> Result<X509svid, FetchError> {
    let offered = svids.iter().map(|svid| svid.spiffe_id.clone()).collect();
    let ours = svids.into_iter().find(|svid| svid.spiffe_id == expected.as_str());
    ours.ok_or_else(|| FetchError::OtherIdentity {
        expected: expected.clone(),
        offered,
    })
}

/// Takes certificates apart that stand one after the other.
fn certificates(der: Vec<u8>, what: &'static str) -> Result<Vec<CertificateDer<'static>>, FetchError> {
    let mut certificates = Vec::new();
    let mut left = &der[..];
    while !left.is_empty() {
        let (rest, _) = X509Certificate::from_der(left).map_err(|_| FetchError::Der { what })?;
        let (certificate, _) = left.split_at(left.len() - rest.len());
        certificates.push(CertificateDer::from(certificate.to_vec()));
        left = rest;
    }
    Ok(certificates)
}

const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// An agent that hangs is found out, and asked anew.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
const RETRIES: Backoff = Backoff {
    min: Duration::from_millis(100),
    max: Duration::from_secs(1),
    jitter: 0.2,
};
