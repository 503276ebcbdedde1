//! Requests certificates with a token and a signing request, and renews them while the process runs.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::Status;
use tracing::{debug, info, warn};
use tulle_core::backoff::{Backoff, BackoffDelays};
use tulle_core::error_chain::ErrorChain;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Latch;
use tulle_core::wall_clock::{Clock, Deadline};
use tulle_proto::identity::identity_client::IdentityClient;
use tulle_proto::identity::{CertifyRequest, CertifyResponse};
use zeroize::Zeroizing;

use crate::api::channel::{Channel, ControlAddr, Security};
use crate::identity::anchors::TrustAnchorSource;
use crate::identity::key::Key;
use crate::identity::metrics::Metrics;
use crate::metrics::invalid_updates::InvalidUpdateReporter;
use crate::tls::credentials::{CertifiedKey, Credentials, CredentialsError, TrustAnchors};

/// The settings of certificate requests.
#[derive(Clone, Debug)]
pub struct Config {
    /// The identity service.
    pub service: ControlAddr,
    /// Directory of `key.p8` and `csr.der`; without them the proxy makes its own key.
    pub dir: Option<PathBuf>,
    /// The file of the service account token. It is read for every request, because the token is replaced before it expires.
    pub token_file: PathBuf,
    /// Bounds of the time between two certificates; default 10 s and 24 h.
    pub min_refresh: Duration,
    pub max_refresh: Duration,
}

/// Keeps [`Credentials`] certified.
pub(crate) struct Certifier {
    config: Config,
    anchors: TrustAnchorSource,
    /// The last valid content of the file of trust anchors, if there is one.
    file_anchors: Option<TrustAnchors>,
    /// The last bundle that the control plane sent over a connection verified with the proxy's own anchors.
    control_plane_anchors: Option<TrustAnchors>,
    /// Reports a file of trust anchors that cannot be used.
    invalid_anchors_reporter: InvalidUpdateReporter,
    key: Key,
    /// The clock by which certificates expire.
    clock: Clock,
    creds: Credentials,
    client: IdentityClient<Channel>,
    /// Whether the channel verifies the identity service.
    security: Security,
    metrics: Metrics,
}

#[derive(Debug, thiserror::Error)]
enum CertifyError {
    #[error("the identity token in {} cannot be read", .path.display())]
    Token {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the identity token in {} is empty", .path.display())]
    EmptyToken { path: PathBuf },
    #[error("the request for a certificate failed ({:?}): {}", .0.code(), .0.message())]
    Failed(Status),
    #[error("requesting a certificate took longer than {CERTIFY_TIMEOUT:?}")]
    Timeout,
    #[error("the trust anchors that came with the certificate cannot be used")]
    Anchors(#[source] CredentialsError),
    #[error("the certificate cannot be used")]
    Certificate(#[source] CredentialsError),
}

/// The parameters of a certifier.
pub(crate) struct CertifierParams {
    pub(crate) config: Config,
    pub(crate) anchors: TrustAnchorSource,
    pub(crate) key: Key,
    /// The credentials that get the certificates.
    pub(crate) creds: Credentials,
    /// The channel to the identity service.
    pub(crate) channel: Channel,
    pub(crate) clock: Clock,
}

impl Certifier {
    pub(crate) fn new(params: CertifierParams, registry: &Registry) -> Self {
        let CertifierParams {
            config,
            anchors,
            key,
            creds,
            channel,
            clock,
        } = params;
        let security = channel.target().security.clone();
        let client = IdentityClient::new(channel);
        Self {
            config,
            file_anchors: match &anchors {
                TrustAnchorSource::Fixed(_) => None,
                file @ TrustAnchorSource::File(_) => file.read().ok(),
            },
            control_plane_anchors: None,
            invalid_anchors_reporter: anchors.reporter(registry),
            anchors,
            key,
            clock,
            creds,
            client,
            security,
            metrics: Metrics::new(registry),
        }
    }

    /// Requests a certificate, renews it in time, and watches the file of trust anchors; never returns.
    ///
    /// The proxy becomes ready when `ready_latch` is dropped, with the first certificate.
    pub(crate) async fn run(mut self, ready_latch: Latch) {
        let mut ready_latch = Some(ready_latch);
        let mut reload_interval = interval_without_bursts(ANCHORS_RELOAD_INTERVAL);
        let mut log_interval = interval_without_bursts(WAITING_LOG_INTERVAL);
        let mut delays = self.backoff();
        let mut due = Deadline::after(Duration::ZERO, self.clock);
        let mut last_error = None;
        loop {
            // Cancel-safe: the branches only wait. A certificate request delays the other branches, at most for its timeout.
            tokio::select! {
                () = due.wait() => match self.certify().await {
                    Ok(renewal_delay) => {
                        ready_latch = None;
                        last_error = None;
                        delays.reset();
                        due = Deadline::after(renewal_delay, self.clock);
                    }
                    Err(error) => {
                        self.metrics.failed();
                        let delay = delays.next_delay();
                        debug!(error = %ErrorChain(&error), ?delay, "certification failed");
                        if let Some(ready_latch) = &ready_latch {
                            ready_latch.set_reason(format!("no certificate yet: {}", ErrorChain(&error)));
                        }
                        if last_error.is_none() {
                            warn!(error = %ErrorChain(&error), "certificate request failed, retrying");
                        }
                        last_error = Some(error);
                        due = Deadline::after(delay, self.clock);
                    }
                },
                _ = log_interval.tick() => {
                    if ready_latch.is_some() && let Some(error) = &last_error {
                        warn!(error = %ErrorChain(error), "still waiting for a certificate");
                    }
                }
                _ = reload_interval.tick() => {
                    if self.reload_anchors_file() {
                        // After a change of the trust anchors, peers may accept only certificates of a new issuer.
                        due = Deadline::after(Duration::ZERO, self.clock);
                    }
                }
            }
        }
    }

    /// The first retries are fast, because the identity service may start at the same time; the delay grows to `min_refresh`.
    fn backoff(&self) -> BackoffDelays {
        let max = self.config.min_refresh.max(MIN_CERTIFY_BACKOFF);
        Backoff {
            min: MIN_CERTIFY_BACKOFF,
            max,
            jitter: 0.1,
        }
        .start()
    }

    /// Requests and installs one certificate; returns the time until the renewal.
    async fn certify(&mut self) -> Result<Duration, CertifyError> {
        let req = CertifyRequest {
            identity: self.creds.id().to_string(),
            token: self.token().await?,
            certificate_signing_request: self.key.csr.clone(),
        };
        let response = timeout(CERTIFY_TIMEOUT, self.client.certify(req))
            .await
            .map_err(|_| CertifyError::Timeout)?;
        let response = response.map_err(CertifyError::Failed)?.into_inner();
        let anchors = self.update_anchors(&response)?;
        let intermediates = response.intermediate_certificates.into_iter();
        let chain = std::iter::once(response.leaf_certificate)
            .chain(intermediates)
            .map(CertificateDer::from)
            .collect();
        let certified_key = CertifiedKey {
            chain,
            key: Zeroizing::new(self.key.pkcs8.clone_key()),
        };
        let validity = self
            .creds
            .replace(certified_key, anchors)
            .map_err(CertifyError::Certificate)?;

        // The next certificate gets a new key.
        if let Err(error) = self.key.renew(self.creds.id()) {
            warn!(error = %ErrorChain(&error), "renewing the key failed, the old one stays in use");
        }
        let now = (self.clock)();
        let left = validity.not_after.duration_since(now).unwrap_or_default();
        self.metrics.refreshed(now, validity.not_after);
        let next = renewal_delay(left, &self.config);
        info!(id = %self.creds.id(), ?left, ?next, "certified");
        Ok(next)
    }

    async fn token(&self) -> Result<Vec<u8>, CertifyError> {
        let path = &self.config.token_file;
        let token = tokio::fs::read(path).await.map_err(|source| CertifyError::Token {
            path: path.clone(),
            source,
        })?;
        let token = token.trim_ascii();
        match token.is_empty() {
            true => Err(CertifyError::EmptyToken { path: path.clone() }),
            false => Ok(token.to_vec()),
        }
    }

    /// Stores the trust anchors of a response, and returns those to use with its certificate. Only a control plane that the current
    /// anchors have verified can change them.
    fn update_anchors(&mut self, response: &CertifyResponse) -> Result<TrustAnchors, CertifyError> {
        let current = self.creds.anchors();
        let verified = matches!(self.security, Security::MutualTls(_));
        if response.trust_anchors.is_empty() || !verified {
            return Ok(current);
        }
        let certificates = response
            .trust_anchors
            .iter()
            .cloned()
            .map(CertificateDer::from)
            .collect();
        let sent = TrustAnchors::from_der(certificates).map_err(CertifyError::Anchors)?;
        if self.control_plane_anchors.as_ref() != Some(&sent) && sent != current {
            info!("the control plane sent new trust anchors");
        }
        self.control_plane_anchors = Some(sent);
        self.merged_anchors().map_err(CertifyError::Anchors)
    }

    /// All trust anchors. Trust anchors from the control plane replace fixed ones, and are added to those of a file.
    fn merged_anchors(&self) -> Result<TrustAnchors, CredentialsError> {
        match (&self.file_anchors, &self.control_plane_anchors) {
            (Some(in_file), Some(sent)) => in_file.union(sent),
            (Some(only), None) | (None, Some(only)) => Ok(only.clone()),
            (None, None) => Ok(self.creds.anchors()),
        }
    }

    /// Reads the file of trust anchors again; true if it has changed.
    fn reload_anchors_file(&mut self) -> bool {
        if let TrustAnchorSource::Fixed(_) = self.anchors {
            return false;
        }
        let read = match self.anchors.read() {
            Ok(read) => read,
            Err(error) => {
                self.invalid_anchors_reporter.report(&error); // the old anchors stay
                return false;
            }
        };
        if self.file_anchors.as_ref() == Some(&read) {
            return false;
        }
        self.file_anchors = Some(read);
        match self
            .merged_anchors()
            .and_then(|anchors| self.creds.replace_anchors(anchors))
        {
            Ok(()) => info!("trust anchors have changed"),
            Err(error) => drop(self.invalid_anchors_reporter.report(&error)),
        }
        true
    }
}

/// The time until the renewal: 63 % to 70 % of the remaining time, within the configured bounds. It is random, so that
/// proxies that started together do not renew together.
fn renewal_delay(left: Duration, config: &Config) -> Duration {
    left.mul_f64(fastrand::f64().mul_add(-0.07, 0.7))
        .clamp(config.min_refresh, config.max_refresh)
}

pub(super) fn interval_without_bursts(period: Duration) -> tokio::time::Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Maximum time of a certificate request. The channel gives up waiting for a connection earlier, so that
/// its error is reported instead of this timeout.
const CERTIFY_TIMEOUT: Duration = Duration::from_secs(20);
const MIN_CERTIFY_BACKOFF: Duration = Duration::from_millis(500);
pub(super) const WAITING_LOG_INTERVAL: Duration = Duration::from_secs(15);
/// Interval at which the file of trust anchors is read again. Until then, a root that was removed from the file is still trusted.
pub(super) const ANCHORS_RELOAD_INTERVAL: Duration = Duration::from_secs(10);
