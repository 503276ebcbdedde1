//! The control plane's own certificates: requested from the identity service, installed, and renewed before they
//! expire.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PublicKeyData, SubjectPublicKeyInfo};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{info, warn};
use tulle_core::addr::Addr;
use tulle_core::backoff::Backoff;
use tulle_core::drain::Watch;
use tulle_core::readiness::Latch;
use tulle_core::wall_clock::{Clock, Deadline};
use tulle_proto::identity as proto;
use tulle_proto::identity::identity_client::IdentityClient;

use super::issuer::{Issuer, LeafContent, SignError, rfc3339};
use super::server::IdentityService;
use crate::tls::anchors::{self, TrustAnchors};
use crate::tls::client::{self, TlsServer};
use crate::tls::file_watcher::{FileWatcher, WatchError, WatchPath};
use crate::tls::mesh_credentials::{self, LeafWithKey, MeshCredentials};

/// Renews the certificate of one server name.
pub struct CertificateRenewer {
    creds: Arc<MeshCredentials>,
    source: CertificateSource,
    /// Wall clock; tests replace it.
    pub(super) clock: Clock,
}

/// The identity service of another process.
#[derive(Clone, Debug)]
pub struct RemoteIdentity {
    pub addr: Addr,
    /// The TLS name of the identity service.
    pub name: String,
    /// Path of the token, which is read for every request because tokens are rotated.
    pub token: PathBuf,
    /// Path of a PEM bundle; a change renews the certificate immediately.
    pub trust_anchors: PathBuf,
}

enum CertificateSource {
    /// The issuer is in this process. It signs the certificates of this process without a token.
    Local {
        service: IdentityService,
        issuer: watch::Receiver<Option<Arc<Issuer>>>,
    },
    Remote {
        remote: RemoteIdentity,
        changes: FileWatcher,
        /// The trust anchors of the last request, as PEM; `None` if they could not be read.
        last_anchors_pem: Option<Vec<u8>>,
    },
}

#[derive(Debug, thiserror::Error)]
enum RenewError {
    #[error("cert issuer not ready yet")]
    NotReady,
    #[error("the trust anchors no longer verify the issuer")]
    Issuer(#[source] rustls::Error),
    #[error("generating a key or its signing request")]
    Key(#[source] rcgen::Error),
    #[error(transparent)]
    Sign(SignError),
    #[error("reading trust anchors")]
    Anchors(#[source] anchors::Error),
    #[error("reading trust anchors from {path:?}")]
    AnchorsFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("reading the token from {path:?}")]
    Token {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("connecting to the identity service")]
    Connect(#[source] client::Error),
    #[error("the identity service rejected the request")]
    Rejected(#[source] Box<tonic::Status>),
    #[error("the identity service did not answer within {0:?}")]
    Timeout(Duration),
    #[error("the response of the identity service has no valid_until")]
    MissingValidUntil,
    #[error("installing the certificate")]
    Install(#[source] mesh_credentials::Error),
}

impl CertificateRenewer {
    /// Creates a renewer that gets certificates from the identity service of this process.
    pub fn local(creds: Arc<MeshCredentials>, service: IdentityService) -> Self {
        let issuer = service.issuer_store.subscribe();
        Self {
            creds,
            source: CertificateSource::Local { service, issuer },
            clock: SystemTime::now,
        }
    }

    /// Creates a renewer that requests certificates from the identity service of another process.
    ///
    /// # Errors
    /// Fails if the trust anchors cannot be watched.
    pub fn remote(creds: Arc<MeshCredentials>, remote: RemoteIdentity) -> Result<Self, WatchError> {
        let changes = FileWatcher::watch(&[WatchPath::File(&remote.trust_anchors)])?;
        Ok(Self {
            creds,
            source: CertificateSource::Remote {
                remote,
                changes,
                last_anchors_pem: None,
            },
            clock: SystemTime::now,
        })
    }

    /// Renews the certificate until the drain. The latch is released when the first certificate is installed.
    pub async fn run(mut self, latch: Latch, drain: Watch) {
        let mut latch = Some(latch);
        let mut retries = RENEWAL_BACKOFF.start();
        loop {
            let wait = match self.renew().await {
                Ok(valid_until) => {
                    latch.take();
                    retries.reset();
                    renewal_delay(valid_until, (self.clock)())
                }
                Err(err) => {
                    let name = self.creds.name();
                    warn!(
                        name,
                        error = &err as &dyn std::error::Error,
                        "renewing the certificate failed; it is retried"
                    );
                    retries.next_delay()
                }
            };
            let due = Deadline::after(wait, self.clock);
            // Cancel-safe: the branches only wait. `changed` also reports a change that happened during the renewal.
            tokio::select! {
                () = drain.signaled() => return,
                () = due.wait() => {}
                () = self.source.changed() => {}
            }
        }
    }

    async fn renew(&mut self) -> Result<SystemTime, RenewError> {
        let name = self.creds.name();
        // A new key for every certificate limits the use of a stolen key to one lifetime.
        let key = KeyPair::generate().map_err(RenewError::Key)?;
        let (rsp, anchors) = match &mut self.source {
            CertificateSource::Local { service, .. } => sign_locally(service, name, &key)?,
            CertificateSource::Remote {
                remote,
                last_anchors_pem,
                ..
            } => {
                *last_anchors_pem = None;
                let pem = last_anchors_pem.insert(read_anchors(&remote.trust_anchors)?);
                request_certificate(remote, pem, name, &key).await?
            }
        };
        let valid_until = rsp
            .valid_until
            .and_then(|end| SystemTime::try_from(end).ok())
            .ok_or(RenewError::MissingValidUntil)?;
        let chain = std::iter::once(rsp.leaf_certificate)
            .chain(rsp.intermediate_certificates)
            .map(CertificateDer::from)
            .collect();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        self.creds
            .install(LeafWithKey { chain, key }, &anchors)
            .map_err(RenewError::Install)?;
        info!(
            name,
            valid_until = rfc3339(valid_until.into()),
            "the certificate is renewed"
        );
        Ok(valid_until)
    }
}

impl CertificateSource {
    /// Waits until the issuer or the trust anchors have changed since the last renewal.
    async fn changed(&mut self) {
        match self {
            Self::Local { service: _, issuer } => {
                // Cannot fail: `service` holds the sender.
                let _ = issuer.changed().await;
            }
            Self::Remote {
                remote,
                changes,
                last_anchors_pem,
            } => {
                changes
                    .wait_for_content_change(&remote.trust_anchors, last_anchors_pem.as_deref())
                    .await;
            }
        }
    }
}

fn sign_locally(
    service: &IdentityService,
    name: &str,
    key: &KeyPair,
) -> Result<(proto::CertifyResponse, TrustAnchors), RenewError> {
    let (issuer, now) = (
        service.issuer_store.issuer().ok_or(RenewError::NotReady)?,
        OffsetDateTime::now_utc(),
    );
    service.verify(&issuer, now).map_err(RenewError::Issuer)?;
    let key = SubjectPublicKeyInfo::from_der(&key.subject_public_key_info()).map_err(RenewError::Key)?;
    let content = LeafContent {
        identity: name,
        with_common_name: true,
        key: &key,
    };
    let rsp = service.sign(&issuer, &content, now).map_err(RenewError::Sign)?;
    Ok((rsp, issuer.anchors().clone()))
}

/// Requests a certificate from a server that these trust anchors verify.
async fn request_certificate(
    remote: &RemoteIdentity,
    anchors_pem: &[u8],
    name: &str,
    key: &KeyPair,
) -> Result<(proto::CertifyResponse, TrustAnchors), RenewError> {
    let anchors = TrustAnchors::parse(anchors_pem, &remote.trust_anchors).map_err(RenewError::Anchors)?;
    let token = read_token(&remote.token).await?;
    let server = TlsServer {
        addr: &remote.addr,
        name: &remote.name,
        identity: None,
        anchors: &anchors,
    };
    let channel = client::connect(&server, None).await.map_err(RenewError::Connect)?;
    let req = proto::CertifyRequest {
        identity: name.to_owned(),
        token,
        certificate_signing_request: signing_request(name, key)?,
    };
    let mut client = IdentityClient::new(channel);
    let rsp = timeout(CERTIFY_TIMEOUT, client.certify(req))
        .await
        .map_err(|_| RenewError::Timeout(CERTIFY_TIMEOUT))?
        .map_err(|status| RenewError::Rejected(Box::new(status)))?;
    Ok((rsp.into_inner(), anchors))
}

fn read_anchors(path: &Path) -> Result<Vec<u8>, RenewError> {
    std::fs::read(path).map_err(|source| RenewError::AnchorsFile {
        path: path.to_owned(),
        source,
    })
}

async fn read_token(path: &Path) -> Result<Vec<u8>, RenewError> {
    let token = tokio::fs::read(path).await.map_err(|source| RenewError::Token {
        path: path.to_owned(),
        source,
    })?;
    Ok(token.trim_ascii().to_vec())
}

fn signing_request(name: &str, key: &KeyPair) -> Result<Vec<u8>, RenewError> {
    let mut params = CertificateParams::new([name.to_owned()]).map_err(RenewError::Key)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let csr = params.serialize_request(key).map_err(RenewError::Key)?;
    Ok(csr.der().to_vec())
}

/// The time until the next renewal: 70 % of the remaining lifetime, as in proxies.
fn renewal_delay(valid_until: SystemTime, now: SystemTime) -> Duration {
    let left = valid_until.duration_since(now).unwrap_or_default();
    left.mul_f64(0.7).clamp(MIN_RENEWAL_DELAY, MAX_RENEWAL_DELAY)
}

/// Backoff of failed renewals. It is short, because no service is ready without its first certificate, and the identity service may
/// start later than this process.
const RENEWAL_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(200),
    max: Duration::from_secs(2),
    jitter: 0.5,
};
const CERTIFY_TIMEOUT: Duration = Duration::from_secs(10);
const MIN_RENEWAL_DELAY: Duration = Duration::from_secs(10);
const MAX_RENEWAL_DELAY: Duration = Duration::from_secs(24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_renewed_after_70_percent_of_their_remaining_lifetime() {
        let now = SystemTime::now();
        let check = |left: u64, expected: u64| {
            let wait = renewal_delay(now + Duration::from_secs(left), now);
            assert_eq!(wait.as_secs(), expected);
        };
        check(1000, 700);
        check(1, 10);
        check(1_000_000, 24 * 3600);
        assert_eq!(renewal_delay(now - Duration::from_secs(5), now), MIN_RENEWAL_DELAY);
    }
}
