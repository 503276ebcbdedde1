//! Token and signing request in, certificate out, for as long as the process lives.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::Status;
use tracing::{debug, info, warn};
use tulle_core::backoff::{Backoff, Steps};
use tulle_core::due::{Clock, Due};
use tulle_core::metrics::Registry;
use tulle_core::ready::Latch;
use tulle_proto::identity::identity_client::IdentityClient;
use tulle_proto::identity::{CertifyRequest, CertifyResponse};
use zeroize::Zeroizing;

use crate::api::channel::{Channel, ControlAddr, Security};
use crate::identity::Anchors;
use crate::identity::key::Key;
use crate::identity::metrics::{Metrics, causes};
use crate::metrics::unreadable::Reporter;
use crate::tls::creds::{Credentials, CredentialsError, Leaf, TrustAnchors};

/// How certificates are asked for.
#[derive(Clone, Debug)]
pub struct Config {
    /// The identity service.
    pub service: ControlAddr,
    /// Where `key.p8` and `csr.der` may be; we make our own where there are none.
    pub dir: Option<PathBuf>,
    /// Read again for every request, because it is replaced before it expires.
    pub token_file: PathBuf,
    /// Bounds of the time between two certificates; 10 s and 24 h.
    pub min_refresh: Duration,
    pub max_refresh: Duration,
}

/// Keeps [`Credentials`] certified.
pub(crate) struct Certifier {
    config: Config,
    anchors: Anchors,
    /// What the file said last that could be understood.
    in_file: Option<TrustAnchors>,
    /// What a control plane sent last that our anchors had verified.
    sent: Option<TrustAnchors>,
    /// Tells of a file that cannot be used as it is.
    unreadable: Reporter,
    key: Key,
    /// The clock by which certificates expire.
    clock: Clock,
    creds: Credentials,
    client: IdentityClient<Channel>,
    /// Whether the answers come from whom they should.
    security: Security,
    metrics: Metrics,
}

#[derive(Debug, thiserror::Error)]
enum CertifyError {
    #[error("reading the identity token from {}", .path.display())]
    Token {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("identity token in {} is empty", .path.display())]
    NoToken { path: PathBuf },
    #[error("asking for a certificate ({:?}): {}", .0.code(), .0.message())]
    Refused(Status),
    #[error("asking for a certificate took longer than {CERTIFY_TIMEOUT:?}")]
    Timeout,
    #[error("using the trust anchors that came with the certificate")]
    Anchors(#[source] CredentialsError),
    #[error("using the certificate")]
    Certificate(#[source] CredentialsError),
}

impl Certifier {
    /// Certifies `creds` with `key` at the identity service behind `channel`.
    pub(crate) fn new(
        config: Config,
        anchors: Anchors,
        key: Key,
        creds: Credentials,
        channel: Channel,
        registry: &Registry,
        clock: Clock,
    ) -> Self {
        let security = channel.target().security.clone();
        let client = IdentityClient::new(channel);
        Self {
            config,
            in_file: match &anchors {
                Anchors::Fixed(_) => None,
                file @ Anchors::File(_) => file.read().ok(),
            },
            sent: None,
            unreadable: anchors.reporter(registry),
            anchors,
            key,
            clock,
            creds,
            client,
            security,
            metrics: Metrics::new(registry),
        }
    }

    /// Gets a certificate, then a new one in time, and follows the file of trust anchors; never returns.
    ///
    /// `uncertified` is dropped with the first certificate.
    pub(crate) async fn run(mut self, uncertified: Latch) {
        let mut uncertified = Some(uncertified);
        let mut look_at_file = ticks(ANCHORS_INTERVAL);
        let mut remind = ticks(REMINDER_INTERVAL);
        let mut delays = self.backoff();
        let mut due = Due::after(Duration::ZERO, self.clock);
        let mut last_error = None;
        loop {
            // Each branch only waits; certifying itself is bounded by a timeout.
            tokio::select! {
                () = due.wait() => match self.certify().await {
                    Ok(lifetime) => {
                        uncertified = None;
                        last_error = None;
                        delays.reset();
                        due = Due::after(lifetime, self.clock);
                    }
                    Err(error) => {
                        self.metrics.failed();
                        let delay = delays.next_delay();
                        debug!(error = %causes(&error), ?delay, "certification failed");
                        if let Some(uncertified) = &uncertified {
                            uncertified.explain(format!("no certificate yet: {}", causes(&error)));
                        }
                        if last_error.is_none() {
                            warn!(error = %causes(&error), "no new certificate, trying again");
                        }
                        last_error = Some(error);
                        due = Due::after(delay, self.clock);
                    }
                },
                _ = remind.tick() => {
                    if uncertified.is_some() && let Some(error) = &last_error {
                        warn!(error = %causes(error), "still waiting for a certificate");
                    }
                }
                _ = look_at_file.tick() => {
                    if self.follow_file() {
                        // Whom others accept may have changed with whom we accept.
                        due = Due::after(Duration::ZERO, self.clock);
                    }
                }
            }
        }
    }

    /// Quick at first, because a mesh may start all at once; then at the cadence of the configuration.
    fn backoff(&self) -> Steps {
        let max = self.config.min_refresh.max(FIRST_RETRY);
        Backoff {
            min: FIRST_RETRY,
            max,
            jitter: 0.1,
        }
        .steps()
    }

    /// Gets and installs one certificate; returns the time until the next is due.
    async fn certify(&mut self) -> Result<Duration, CertifyError> {
        let req = CertifyRequest {
            identity: self.creds.id().to_string(),
            token: self.token().await?,
            certificate_signing_request: self.key.csr.clone(),
        };
        let answer = timeout(CERTIFY_TIMEOUT, self.client.certify(req))
            .await
            .map_err(|_| CertifyError::Timeout)?;
        let answer = answer.map_err(CertifyError::Refused)?.into_inner();
        let anchors = self.anchors_of(&answer)?;
        let intermediates = answer.intermediate_certificates.into_iter();
        let chain = std::iter::once(answer.leaf_certificate)
            .chain(intermediates)
            .map(CertificateDer::from)
            .collect();
        let leaf = Leaf {
            chain,
            key: Zeroizing::new(self.key.pkcs8.clone_key()),
        };
        let validity = self.creds.replace(leaf, anchors).map_err(CertifyError::Certificate)?;

        // The next certificate is of another key.
        if let Err(error) = self.key.renew(self.creds.id()) {
            warn!(error = %causes(&error), "the key stays what it is");
        }
        let now = (self.clock)();
        let left = validity.not_after.duration_since(now).unwrap_or_default();
        self.metrics.refreshed(now, validity.not_after);
        let next = refresh_after(left, &self.config);
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
            true => Err(CertifyError::NoToken { path: path.clone() }),
            false => Ok(token.to_vec()),
        }
    }

    /// The bundle to trust from now on; a control plane that ours has verified may send a new one.
    fn anchors_of(&mut self, answer: &CertifyResponse) -> Result<TrustAnchors, CertifyError> {
        let current = self.creds.anchors();
        let verified = matches!(self.security, Security::MutualTls(_));
        if answer.trust_anchors.is_empty() || !verified {
            return Ok(current);
        }
        let certificates = answer.trust_anchors.iter().cloned().map(CertificateDer::from).collect();
        let sent = TrustAnchors::from_der(certificates).map_err(CertifyError::Anchors)?;
        if self.sent.as_ref() != Some(&sent) && sent != current {
            info!("the control plane sent new trust anchors");
        }
        self.sent = Some(sent);
        self.effective().map_err(CertifyError::Anchors)
    }

    /// All that is trusted: what the control plane has sent takes the place of what was fixed, and adds to what is in a file.
    fn effective(&self) -> Result<TrustAnchors, CredentialsError> {
        match (&self.in_file, &self.sent) {
            (Some(in_file), Some(sent)) => in_file.and(sent),
            (Some(only), None) | (None, Some(only)) => Ok(only.clone()),
            (None, None) => Ok(self.creds.anchors()),
        }
    }

    /// Takes over a bundle that has changed in its file; true if it has.
    fn follow_file(&mut self) -> bool {
        if let Anchors::Fixed(_) = self.anchors {
            return false;
        }
        let read = match self.anchors.read() {
            Ok(read) => read,
            Err(error) => {
                self.unreadable.report(&error); // they stay as they were
                return false;
            }
        };
        if self.in_file.as_ref() == Some(&read) {
            return false;
        }
        self.in_file = Some(read);
        match self.effective().and_then(|anchors| self.creds.replace_anchors(anchors)) {
            Ok(()) => info!("trust anchors have changed"),
            Err(error) => drop(self.unreadable.report(&error)),
        }
        true
    }
}

/// 70 % of what is left, a little earlier at random so that a fleet that started together spreads, within the bounds.
fn refresh_after(left: Duration, config: &Config) -> Duration {
    left.mul_f64(fastrand::f64().mul_add(-0.07, 0.7))
        .clamp(config.min_refresh, config.max_refresh)
}

pub(super) fn ticks(period: Duration) -> tokio::time::Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Longer than a channel waits for a connection, so that its reason is seen.
const CERTIFY_TIMEOUT: Duration = Duration::from_secs(20);
const FIRST_RETRY: Duration = Duration::from_millis(500);
pub(super) const REMINDER_INTERVAL: Duration = Duration::from_secs(15);
/// A mounted file changes rarely; this is how long a revoked root lives on at most.
pub(super) const ANCHORS_INTERVAL: Duration = Duration::from_secs(10);
