//! The control plane's own certificates: asked for as a proxy would, installed, and renewed in time.

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
use tulle_core::due::{Clock, Due};
use tulle_core::ready::Latch;
use tulle_proto::identity as proto;
use tulle_proto::identity::identity_client::IdentityClient;

use super::issuer::{Issuer, SignError, Subject, rfc3339};
use super::server::IdentityService;
use crate::tls::anchors::{self, TrustAnchors};
use crate::tls::client::{self, Peer};
use crate::tls::creds::{self, Leaf, ServerCreds};
use crate::tls::files::{Changes, WatchError, Watched};

/// Keeps the certificate of one server name.
pub struct LeafKeeper {
    creds: Arc<ServerCreds>,
    source: Source,
    /// The clock by which certificates expire.
    pub(super) clock: Clock,
}

/// How an identity service elsewhere is asked.
#[derive(Clone, Debug)]
pub struct Remote {
    pub addr: Addr,
    /// The TLS name of the identity service.
    pub name: String,
    /// Read for every request, because tokens are rotated.
    pub token: PathBuf,
    /// PEM bundle; a change renews the certificate at once.
    pub trust_anchors: PathBuf,
}

enum Source {
    /// This process has the issuer, and needs no token for its own names.
    Here {
        service: IdentityService,
        issuer: watch::Receiver<Option<Arc<Issuer>>>,
    },
    Remote {
        remote: Remote,
        changes: Changes,
        /// The trust anchors that the last request went by; none if they could not be read.
        used: Option<Vec<u8>>,
    },
}

#[derive(Debug, thiserror::Error)]
enum RenewError {
    #[error("cert issuer not ready yet")]
    NotReady,
    #[error("the issuer is not accepted by the trust anchors any more")]
    Issuer(#[source] rustls::Error),
    #[error("making a key")]
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
    #[error("the identity service refused")]
    Refused(#[source] Box<tonic::Status>),
    #[error("the identity service did not answer within {0:?}")]
    Timeout(Duration),
    #[error("the identity service answered without an end of validity")]
    NoEnd,
    #[error("installing the certificate")]
    Install(#[source] creds::Error),
}

impl LeafKeeper {
    /// Signs with the identity service of this process.
    pub fn here(creds: Arc<ServerCreds>, service: IdentityService) -> Self {
        let issuer = service.authority.subscribe();
        Self {
            creds,
            source: Source::Here { service, issuer },
            clock: SystemTime::now,
        }
    }

    /// Asks an identity service elsewhere.
    ///
    /// # Errors
    /// Trust anchors that cannot be watched.
    pub fn remote(creds: Arc<ServerCreds>, remote: Remote) -> Result<Self, WatchError> {
        let changes = Changes::watch(&[Watched::File(&remote.trust_anchors)])?;
        Ok(Self {
            creds,
            source: Source::Remote {
                remote,
                changes,
                used: None,
            },
            clock: SystemTime::now,
        })
    }

    /// Renews until the drain; the latch goes with the first certificate.
    pub async fn run(mut self, latch: Latch, drain: Watch) {
        let mut latch = Some(latch);
        let mut retries = RETRIES.steps();
        loop {
            let wait = match self.renew().await {
                Ok(valid_until) => {
                    latch.take();
                    retries.reset();
                    refresh_in(valid_until, (self.clock)())
                }
                Err(err) => {
                    let name = self.creds.name();
                    warn!(
                        name,
                        error = &err as &dyn std::error::Error,
                        "our certificate is not renewed yet"
                    );
                    retries.next_delay()
                }
            };
            let due = Due::after(wait, self.clock);
            // All branches only wait, and a change that is lost is seen at the next renewal.
            tokio::select! {
                () = drain.signaled() => return,
                () = due.wait() => {}
                () = self.source.changed() => {}
            }
        }
    }

    async fn renew(&mut self) -> Result<SystemTime, RenewError> {
        let name = self.creds.name();
        // A new key every time: a stolen one is worth one lifetime.
        let key = KeyPair::generate().map_err(RenewError::Key)?;
        let (rsp, anchors) = match &mut self.source {
            Source::Here { service, .. } => sign_here(service, name, &key)?,
            Source::Remote { remote, used, .. } => ask(remote, used, name, &key).await?,
        };
        let valid_until = rsp
            .valid_until
            .and_then(|end| SystemTime::try_from(end).ok())
            .ok_or(RenewError::NoEnd)?;
        let chain = std::iter::once(rsp.leaf_certificate)
            .chain(rsp.intermediate_certificates)
            .map(CertificateDer::from)
            .collect();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        self.creds
            .install(Leaf { chain, key }, &anchors)
            .map_err(RenewError::Install)?;
        info!(
            name,
            valid_until = rfc3339(valid_until.into()),
            "our certificate is renewed"
        );
        Ok(valid_until)
    }
}

impl Source {
    async fn changed(&mut self) {
        match self {
            Self::Here { service: _, issuer } => {
                // The sender lives in the service beside it.
                let _ = issuer.changed().await;
            }
            Self::Remote { remote, changes, used } => {
                changes
                    .wait_for_other_content(&remote.trust_anchors, used.as_deref())
                    .await;
            }
        }
    }
}

fn sign_here(
    service: &IdentityService,
    name: &str,
    key: &KeyPair,
) -> Result<(proto::CertifyResponse, TrustAnchors), RenewError> {
    let (issuer, now) = (
        service.authority.issuer().ok_or(RenewError::NotReady)?,
        OffsetDateTime::now_utc(),
    );
    service.verify(&issuer, now).map_err(RenewError::Issuer)?;
    let key = SubjectPublicKeyInfo::from_der(&key.subject_public_key_info()).map_err(RenewError::Key)?;
    let subject = Subject {
        identity: name,
        with_common_name: true,
        key: &key,
    };
    let rsp = service.sign(&issuer, &subject, now).map_err(RenewError::Sign)?;
    Ok((rsp, issuer.anchors().clone()))
}

/// Asks for a certificate, and notes by which trust anchors.
async fn ask(
    remote: &Remote,
    used: &mut Option<Vec<u8>>,
    name: &str,
    key: &KeyPair,
) -> Result<(proto::CertifyResponse, TrustAnchors), RenewError> {
    let path = &remote.trust_anchors;
    *used = None;
    let pem = std::fs::read(path).map_err(|source| RenewError::AnchorsFile {
        path: path.clone(),
        source,
    })?;
    let pem = &*used.insert(pem);
    let anchors = TrustAnchors::parse(pem, path).map_err(RenewError::Anchors)?;
    let token = read_token(&remote.token).await?;
    let peer = Peer {
        addr: &remote.addr,
        name: &remote.name,
        identity: None,
        anchors: &anchors,
    };
    let channel = client::connect(&peer, None).await.map_err(RenewError::Connect)?;
    let req = proto::CertifyRequest {
        identity: name.to_owned(),
        token,
        certificate_signing_request: signing_request(name, key)?,
    };
    let mut client = IdentityClient::new(channel);
    let rsp = timeout(CERTIFY_LIMIT, client.certify(req))
        .await
        .map_err(|_| RenewError::Timeout(CERTIFY_LIMIT))?
        .map_err(|status| RenewError::Refused(Box::new(status)))?;
    Ok((rsp.into_inner(), anchors))
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

/// 70 % of what is left, as proxies do.
fn refresh_in(valid_until: SystemTime, now: SystemTime) -> Duration {
    let left = valid_until.duration_since(now).unwrap_or_default();
    left.mul_f64(0.7).clamp(MIN_REFRESH, MAX_REFRESH)
}

/// Short, because nothing is ready without the first certificate, and the identity service may start after us.
const RETRIES: Backoff = Backoff {
    min: Duration::from_millis(200),
    max: Duration::from_secs(2),
    jitter: 0.5,
};
const CERTIFY_LIMIT: Duration = Duration::from_secs(10);
const MIN_REFRESH: Duration = Duration::from_secs(10);
const MAX_REFRESH: Duration = Duration::from_secs(24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_renewed_after_seven_tenths_of_what_is_left() {
        let now = SystemTime::now();
        let check = |left: u64, expected: u64| {
            let wait = refresh_in(now + Duration::from_secs(left), now);
            assert_eq!(wait.as_secs(), expected);
        };
        check(1000, 700);
        check(1, 10);
        check(1_000_000, 24 * 3600);
        assert_eq!(refresh_in(now - Duration::from_secs(5), now), MIN_REFRESH);
    }
}
