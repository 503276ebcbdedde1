//! The method Certify: it takes a token and a signing request, and returns a certificate.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use prost_types::Timestamp;
use time::OffsetDateTime;
use tonic::{Code, Request, Response, Status};
use tulle_core::dns_names::is_dns_label;
use tulle_core::error_chain::ErrorChain;
use tulle_core::identity::{self, Identity};
use tulle_core::info_limited;
use tulle_core::log_limit::LogLimiter;
use tulle_proto::identity as proto;

use crate::grpc::Caller;

use super::csr::{KeyError, MalformedError, NameError, SigningRequest};
use super::events::{AuthenticatedServiceAccount, Events};
use super::issuer::{Issuer, LeafContent, SignError, Validity, rfc3339};
use super::issuer_store::IssuerStore;
use super::metrics::Metrics;
use super::reviewer::Reviewer;
use super::token_review_result::{TokenReviewError, TokenReviewResult};

/// The identity service. Clones share their state.
#[derive(Clone)]
pub struct IdentityService {
    pub(super) issuer_store: Arc<IssuerStore>,
    pub(super) reviewer: Arc<Reviewer>,
    pub(super) identity_names: Arc<IdentityNames>,
    pub(super) validity: Validity,
    pub(super) metrics: Metrics,
    pub(super) events: Events,
    pub(super) log_limiters: Arc<LogLimiters>,
}

/// Limits of log lines about clients.
#[derive(Default)]
pub(super) struct LogLimiters {
    /// Limits by client address, because the clients are not authenticated.
    refused: LogLimiter,
    /// Limits by identity, because many workloads can share an address.
    issued: LogLimiter<String>,
}

/// Derives the identities of service accounts.
pub(super) struct IdentityNames {
    pub(super) controller_namespace: String,
    pub(super) trust_domain: String,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum CertifyError {
    #[error("cert issuer not ready yet")]
    NotReady,
    #[error("the request has no {0}")]
    Missing(&'static str),
    #[error("expected a DNS name as identity, found {0:?}")]
    Identity(String),
    #[error(transparent)]
    Malformed(MalformedError),
    #[error("the trust anchors no longer verify the issuer")]
    Issuer(#[source] rustls::Error),
    #[error(transparent)]
    Names(NameError),
    #[error("the token is invalid: {0}")]
    InvalidToken(String),
    #[error("the token is not authenticated: {0}")]
    Unauthenticated(String),
    #[error("the token could not be reviewed")]
    Review(#[source] TokenReviewError),
    #[error("the token is for {0:?}; expected system:serviceaccount:<namespace>:<name>")]
    Username(String),
    #[error(
        "the token is for service account {service_account:?} in namespace {namespace:?}, which cannot form an identity: both \
         names must be DNS labels of at most 63 lower-case letters, digits and '-'; use a service account with another name"
    )]
    NotDnsLabel { namespace: String, service_account: String },
    #[error("the token is for {authenticated}, but the request is for {requested}")]
    Mismatch { authenticated: String, requested: String },
    #[error(transparent)]
    Key(KeyError),
    #[error(transparent)]
    Sign(SignError),
}

#[tonic::async_trait]
impl proto::identity_server::Identity for IdentityService {
    async fn certify(&self, req: Request<proto::CertifyRequest>) -> Result<Response<proto::CertifyResponse>, Status> {
        let client = Caller::ip_from_extensions(req.extensions());
        let req = req.into_inner();
        match self.issue(&req, client, OffsetDateTime::now_utc()).await {
            Ok(rsp) => {
                self.metrics.count_request("issued");
                Ok(Response::new(rsp))
            }
            Err(err) => {
                self.metrics.count_request(err.outcome());
                let text = ErrorChain(&err).to_string();
                let text = &text[..text.floor_char_boundary(MAX_MESSAGE_BYTES)];
                let identity = || req.identity.chars().take(MAX_LOGGED_NAME_LEN).collect::<String>();
                info_limited!(
                    self.log_limiters.refused,
                    client,
                    "certificate refused",
                    identity = identity(),
                    %client,
                    error = text
                );
                Err(Status::new(err.code(), text))
            }
        }
    }
}

impl IdentityService {
    /// Checks a request and signs the certificate. If several checks would fail, the first one determines the error.
    pub(super) async fn issue(
        &self,
        req: &proto::CertifyRequest,
        client: IpAddr,
        now: OffsetDateTime,
    ) -> Result<proto::CertifyResponse, CertifyError> {
        let issuer = self.issuer_store.issuer().ok_or(CertifyError::NotReady)?;
        let csr = parse(req)?;
        self.verify(&issuer, now).map_err(CertifyError::Issuer)?;
        csr.check_names(&req.identity).map_err(CertifyError::Names)?;
        let service_account = self.authenticate(req, client).await?;
        let key = csr.public_key().map_err(CertifyError::Key)?;
        let content = LeafContent {
            identity: &req.identity,
            with_common_name: csr.has_common_name(),
            key: &key,
        };
        let rsp = self.sign(&issuer, &content, now).map_err(CertifyError::Sign)?;
        self.events
            .issued(&service_account, issued_event_message(&req.identity, &rsp));
        Ok(rsp)
    }

    /// Checks that the trust anchors still verify the issuer. Records an Event if they do not.
    pub(super) fn verify(&self, issuer: &Issuer, now: OffsetDateTime) -> Result<(), rustls::Error> {
        issuer.verify(now).inspect_err(|err| {
            let text = format!("the trust anchors no longer verify the issuer: {err}");
            self.events.issuer_validation_failed(text);
        })
    }

    /// Signs a certificate. The caller must have authenticated the identity, unless it is the identity of this process.
    pub(super) fn sign(
        &self,
        issuer: &Issuer,
        content: &LeafContent<'_>,
        now: OffsetDateTime,
    ) -> Result<proto::CertifyResponse, SignError> {
        let issued = issuer.sign(content, self.validity, now)?;
        let valid_until = rfc3339(issued.valid_until);
        let identity = content.identity;
        info_limited!(
            self.log_limiters.issued,
            identity.to_owned(),
            "certificate issued",
            identity,
            valid_until
        );
        let ders = |certs: &[rustls::pki_types::CertificateDer<'_>]| certs.iter().map(|cert| cert.to_vec()).collect();
        Ok(proto::CertifyResponse {
            leaf_certificate: issued.certificate.der().to_vec(),
            intermediate_certificates: ders(issuer.chain()),
            valid_until: Some(Timestamp::from(SystemTime::from(issued.valid_until))),
            trust_anchors: ders(issuer.anchors().certs()),
        })
    }

    async fn authenticate(
        &self,
        req: &proto::CertifyRequest,
        client: IpAddr,
    ) -> Result<AuthenticatedServiceAccount, CertifyError> {
        let review = self.reviewer.review(&req.token, client).await;
        match review.map_err(CertifyError::Review)? {
            TokenReviewResult::Authenticated { username, uid } => {
                let (namespace, service_account) = self.identity_names.check(&username, &req.identity)?;
                Ok(AuthenticatedServiceAccount {
                    namespace,
                    service_account,
                    uid,
                })
            }
            TokenReviewResult::Unauthenticated { reason } => Err(CertifyError::Unauthenticated(reason)),
            TokenReviewResult::Invalid { reason } => Err(CertifyError::InvalidToken(reason)),
        }
    }
}

impl IdentityNames {
    /// Checks that the token's username is the requested identity. Returns namespace and name of its service account.
    fn check(&self, username: &str, requested: &str) -> Result<(String, String), CertifyError> {
        let mut parts = username.split(':');
        let (Some("system"), Some("serviceaccount"), Some(ns), Some(sa), None) =
            (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(CertifyError::Username(username.to_owned()));
        };
        if !is_dns_label(ns) || !is_dns_label(sa) {
            return Err(CertifyError::NotDnsLabel {
                namespace: ns.to_owned(),
                service_account: sa.to_owned(),
            });
        }
        let authenticated = identity::service_account_identity(sa, ns, &self.controller_namespace, &self.trust_domain);
        match authenticated == requested {
            true => Ok((ns.to_owned(), sa.to_owned())),
            false => Err(CertifyError::Mismatch {
                authenticated,
                requested: requested.to_owned(),
            }),
        }
    }
}

impl CertifyError {
    pub(super) fn code(&self) -> Code {
        match self {
            Self::NotReady => Code::Unavailable,
            Self::Missing(_) | Self::Identity(_) | Self::Malformed(_) | Self::InvalidToken(_) => Code::InvalidArgument,
            Self::Issuer(_) => Code::Unknown,
            Self::Names(_)
            | Self::Unauthenticated(_)
            | Self::Username(_)
            | Self::NotDnsLabel { .. }
            | Self::Mismatch { .. } => Code::FailedPrecondition,
            Self::Review(TokenReviewError::Busy | TokenReviewError::UnknownIssuer(_)) => Code::ResourceExhausted,
            // An unsupported key is an error of the client, but Linkerd responds with Internal, too.
            Self::Review(_) | Self::Key(_) | Self::Sign(_) => Code::Internal,
        }
    }

    fn outcome(&self) -> &'static str {
        match self {
            Self::NotReady => "not_ready",
            Self::Missing(_) | Self::Identity(_) | Self::Malformed(_) => "bad_request",
            Self::Issuer(_) => "bad_issuer",
            Self::Names(_) => "wrong_names",
            Self::InvalidToken(_) => "invalid_token",
            Self::Unauthenticated(_) => "unauthenticated",
            Self::Username(_) | Self::NotDnsLabel { .. } | Self::Mismatch { .. } => "wrong_identity",
            Self::Review(_) => "review_failed",
            Self::Key(_) => "wrong_key",
            Self::Sign(_) => "signing_failed",
        }
    }
}

fn parse(req: &proto::CertifyRequest) -> Result<SigningRequest, CertifyError> {
    if req.identity.is_empty() {
        return Err(CertifyError::Missing("identity"));
    }
    if req.token.is_empty() {
        return Err(CertifyError::Missing("token"));
    }
    if req.certificate_signing_request.is_empty() {
        return Err(CertifyError::Missing("certificate signing request"));
    }
    match req.identity.parse() {
        Ok(Identity::Dns(_)) => {}
        Ok(Identity::Uri(_)) | Err(_) => return Err(CertifyError::Identity(req.identity.clone())),
    }
    SigningRequest::parse(&req.certificate_signing_request).map_err(CertifyError::Malformed)
}

/// The message of the Event about the service account.
fn issued_event_message(identity: &str, rsp: &proto::CertifyResponse) -> String {
    let until = rsp.valid_until.and_then(|end| SystemTime::try_from(end).ok());
    let until = until.map(|end| rfc3339(end.into())).unwrap_or_default();
    let fingerprint = crate::tls::sha256_hex(&rsp.leaf_certificate);
    format!("issued a certificate for {identity} until {until}, sha256 {fingerprint}")
}

/// Maximum length of an error message. The message can contain text of the client, and is sent in a header, whose size HTTP/2
/// limits.
const MAX_MESSAGE_BYTES: usize = 1024;
/// Maximum length of a requested identity in logs, in characters.
const MAX_LOGGED_NAME_LEN: usize = 253;
