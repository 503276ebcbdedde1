//! Certificate, key and trust anchors from a SPIFFE Workload API, updated while the process runs.
//!
//! The API is a gRPC service on a Unix socket. The server identifies the caller by its process, so no token is sent. The server
//! decides when to renew: an update takes effect immediately, and stays in use while the server is unavailable.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{Request, Uri};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::{Interval, sleep, timeout};
use tonic::body::Body;
use tonic::metadata::MetadataValue;
use tonic::{Status, Streaming};
use tracing::{debug, info, warn};
use tulle_core::backoff::Backoff;
use tulle_core::error_chain::ErrorChain;
use tulle_core::identity::Identity;
use tulle_core::metrics::Registry;
use tulle_core::names::WORKLOAD_API_METADATA;
use tulle_core::readiness::Latch;
use tulle_proto::workload::spiffe_workload_api_client::SpiffeWorkloadApiClient;
use tulle_proto::workload::{X509svid, X509svidRequest, X509svidResponse};
use x509_parser::prelude::{FromDer, X509Certificate};
use zeroize::Zeroizing;

use crate::identity::anchors::{AnchorsError, TrustAnchorSource};
use crate::identity::certify::{ANCHORS_RELOAD_INTERVAL, WAITING_LOG_INTERVAL, interval_without_bursts};
use crate::identity::metrics::Metrics;
use crate::metrics::invalid_updates::InvalidUpdateReporter;
use crate::tls::credentials::{CertifiedKey, Credentials, CredentialsError, TrustAnchors};

/// Keeps [`Credentials`] up to date from a Workload API.
pub(crate) struct WorkloadApiClient {
    socket: PathBuf,
    /// Additional trust anchors.
    extra_anchors: Option<TrustAnchorSource>,
    /// The last valid content of `extra_anchors`.
    last_extra_anchors: Option<TrustAnchors>,
    /// Reports a file of additional anchors that cannot be used.
    invalid_anchors_reporter: Option<InvalidUpdateReporter>,
    creds: Credentials,
    metrics: Metrics,
    /// The last bundle of the API, without additional anchors.
    bundle: Option<TrustAnchors>,
}

#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error("connecting to the Workload API at {} failed", .path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("starting HTTP/2 with the Workload API failed")]
    Http(#[source] hyper::Error),
    #[error("the Workload API at {} did not answer within {RESPONSE_TIMEOUT:?}", .path.display())]
    Timeout { path: PathBuf },
    #[error("the request to the Workload API failed ({:?}): {}", .0.code(), .0.message())]
    Failed(Status),
    #[error("the Workload API ended the stream")]
    Ended,
    #[error("the Workload API issues the identities [{}] and not {expected}", .issued.join(", "))]
    IdentityNotIssued { expected: Identity, issued: Vec<String> },
    #[error("the {what} from the Workload API are not certificates in DER")]
    InvalidDer { what: &'static str },
    #[error(transparent)]
    ExtraAnchors(AnchorsError),
    #[error("the trust anchors from the Workload API cannot be used")]
    Anchors(#[source] CredentialsError),
    #[error("the certificate from the Workload API cannot be used")]
    Certificate(#[source] CredentialsError),
}

impl WorkloadApiClient {
    pub(crate) fn new(
        socket: PathBuf,
        extra_anchors: Option<TrustAnchorSource>,
        creds: Credentials,
        registry: &Registry,
    ) -> Self {
        Self {
            socket,
            invalid_anchors_reporter: extra_anchors.as_ref().map(|source| source.reporter(registry)),
            last_extra_anchors: extra_anchors.as_ref().and_then(|source| source.read().ok()),
            extra_anchors,
            creds,
            metrics: Metrics::new(registry),
            bundle: None,
        }
    }

    /// Watches the API and the file of additional trust anchors; never returns.
    ///
    /// The proxy becomes ready when `ready_latch` is dropped, with the first certificate.
    pub(crate) async fn run(mut self, ready_latch: Latch) {
        let state = Arc::new(Mutex::new(IssuanceState {
            ready_latch: Some(ready_latch),
            error: None,
        }));
        let logging = log_missing_certificate(state.clone());
        tokio::select! {
            () = self.watch(&state) => {}
            () = logging => {}
        }
    }

    async fn watch(&mut self, state: &Mutex<IssuanceState>) {
        let mut reload_interval = interval_without_bursts(ANCHORS_RELOAD_INTERVAL);
        let mut delays = RECONNECT_BACKOFF.start();
        loop {
            let generation_before = self.creds.generation();
            let error = match self.read_updates(state, &mut reload_interval).await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            self.metrics.failed();
            if self.creds.generation() != generation_before {
                delays.reset();
            }
            let delay = delays.next_delay();
            debug!(error = %ErrorChain(&error), ?delay, "the Workload API failed");
            state.lock().failed(&error);
            self.reload_anchors_during(sleep(delay), &mut reload_interval).await;
        }
    }

    /// Waits for `future`. Meanwhile, reads the file of additional trust anchors again at each tick, so that a root that is removed
    /// from it loses its trust even while the API is down.
    async fn reload_anchors_during<T>(&mut self, future: impl Future<Output = T>, reload_interval: &mut Interval) -> T {
        let mut future = pin!(future);
        loop {
            tokio::select! {
                output = &mut future => return output,
                // Cancel-safe.
                _ = reload_interval.tick() => self.reload_anchors_file(),
            }
        }
    }

    /// Opens a stream of updates and installs them until the stream fails.
    async fn read_updates(
        &mut self,
        state: &Mutex<IssuanceState>,
        reload_interval: &mut Interval,
    ) -> Result<std::convert::Infallible, FetchError> {
        // The task of the connection. It is dropped at the end of the stream, which closes the connection.
        let mut connection = JoinSet::new();
        let path = self.socket.clone();
        let connecting = timeout(RESPONSE_TIMEOUT, connect(&path, &mut connection));
        let connected = self.reload_anchors_during(connecting, reload_interval).await;
        let mut updates = connected.map_err(|_| FetchError::Timeout { path: path.clone() })??;
        loop {
            let update = self.reload_anchors_during(updates.message(), reload_interval).await;
            let update = update.map_err(FetchError::Failed)?.ok_or(FetchError::Ended)?;
            self.install(update)?;
            state.lock().succeeded();
        }
    }

    fn install(&mut self, update: X509svidResponse) -> Result<(), FetchError> {
        let svid = select_svid(update.svids, self.creds.id())?;
        let bundle = certificates(svid.bundle, "trust anchors")?;
        let bundle = TrustAnchors::from_der(bundle).map_err(FetchError::Anchors)?;
        let anchors = self.with_extra_anchors(&bundle)?;
        let certified_key = CertifiedKey {
            chain: certificates(svid.x509_svid, "certificates")?,
            key: Zeroizing::new(PrivatePkcs8KeyDer::from(svid.x509_svid_key)),
        };
        let validity = self
            .creds
            .replace(certified_key, anchors)
            .map_err(FetchError::Certificate)?;
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

    /// The trust anchors of the bundle and the additional ones. If the additional ones cannot be read now, the last valid ones are
    /// used, and the failure is reported: a broken file must not delay the next certificate.
    ///
    /// # Errors
    /// No valid additional trust anchors have been read yet, or the anchors cannot be used together.
    fn with_extra_anchors(&mut self, bundle: &TrustAnchors) -> Result<TrustAnchors, FetchError> {
        let Some(source) = &self.extra_anchors else {
            return Ok(bundle.clone());
        };
        match source.read() {
            Ok(read) => self.last_extra_anchors = Some(read),
            Err(error) if self.last_extra_anchors.is_none() => return Err(FetchError::ExtraAnchors(error)),
            Err(error) => self.report_invalid_anchors(&error),
        }
        match &self.last_extra_anchors {
            Some(extra) => bundle.union(extra).map_err(FetchError::Anchors),
            None => Ok(bundle.clone()),
        }
    }

    fn report_invalid_anchors(&mut self, error: &dyn std::error::Error) {
        if let Some(reporter) = &mut self.invalid_anchors_reporter {
            reporter.report(error);
        }
    }

    /// Reads the file of additional trust anchors again. If they have changed, the proxy uses them.
    fn reload_anchors_file(&mut self) {
        let (Some(TrustAnchorSource::File(_)), Some(bundle)) = (&self.extra_anchors, self.bundle.clone()) else {
            return;
        };
        let replaced = self
            .with_extra_anchors(&bundle)
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
            // The old anchors stay.
            Err(error) => self.report_invalid_anchors(&error),
        }
    }
}

/// The state of the first certificate and the last error, for logs and readiness.
struct IssuanceState {
    /// Held until the first certificate.
    ready_latch: Option<Latch>,
    /// Last error since the last certificate.
    error: Option<String>,
}

impl IssuanceState {
    fn succeeded(&mut self) {
        self.ready_latch = None;
        self.error = None;
    }

    /// Stores the error, and shows it as the reason why the proxy is not ready, until the first certificate. Logs it if it is the
    /// first one since the last certificate.
    fn failed(&mut self, error: &FetchError) {
        if self.error.is_none() {
            warn!(error = %ErrorChain(error), "no certificate from the Workload API, retrying");
        }
        if let Some(ready_latch) = &self.ready_latch {
            ready_latch.set_reason(format!("no certificate yet: {}", ErrorChain(error)));
        }
        self.error = Some(ErrorChain(error).to_string());
    }
}

/// Logs at intervals that the first certificate is still missing.
async fn log_missing_certificate(state: Arc<Mutex<IssuanceState>>) {
    let mut log_interval = interval_without_bursts(WAITING_LOG_INTERVAL);
    loop {
        log_interval.tick().await;
        let state = state.lock();
        if state.ready_latch.is_some()
            && let Some(error) = &state.error
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
    // HTTP/2 requires an authority, which a socket does not have.
    let mut client = SpiffeWorkloadApiClient::with_origin(service, Uri::from_static("http://localhost"));
    let mut req = tonic::Request::new(X509svidRequest {});
    req.metadata_mut()
        .insert(WORKLOAD_API_METADATA, MetadataValue::from_static("true"));
    let updates = client.fetch_x509svid(req).await.map_err(FetchError::Failed)?;
    Ok(updates.into_inner())
}

/// Selects the SVID of this proxy's identity.
fn select_svid(svids: Vec<X509svid>, expected: &Identity) -> Result<X509svid, FetchError> {
    let issued = svids.iter().map(|svid| svid.spiffe_id.clone()).collect();
    let ours = svids.into_iter().find(|svid| svid.spiffe_id == expected.as_str());
    ours.ok_or_else(|| FetchError::IdentityNotIssued {
        expected: expected.clone(),
        issued,
    })
}

/// Splits concatenated DER certificates.
fn certificates(der: Vec<u8>, what: &'static str) -> Result<Vec<CertificateDer<'static>>, FetchError> {
    let mut certificates = Vec::new();
    let mut left = &der[..];
    while !left.is_empty() {
        let (rest, _) = X509Certificate::from_der(left).map_err(|_| FetchError::InvalidDer { what })?;
        let (certificate, _) = left.split_at(left.len() - rest.len());
        certificates.push(CertificateDer::from(certificate.to_vec()));
        left = rest;
    }
    Ok(certificates)
}

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of HTTP/2 pings, which detect a server that hangs. The stream is then reopened.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
const RECONNECT_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(100),
    max: Duration::from_secs(1),
    jitter: 0.2,
};
