//! Tests of the service: files and requests in, certificates and status codes out.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use http_body_util::BodyExt as _;
use kube::Client;
use kube::client::Body;
use rcgen::{CertificateParams, DistinguishedName, KeyPair, SanType};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use serde_json::{Value, json};
use tonic::{Code, Request};
use tulle_core::drain;
use tulle_core::log_capture::LogCapture;
use tulle_core::readiness::Readiness;
use tulle_proto::identity as proto;
use tulle_proto::identity::identity_server::Identity as _;

use super::own_certificate::CertificateRenewer;
use super::reviewer::JoinTokenKeys;
use super::token_review::TokenReviews;
use super::*;
use crate::tls::anchors::TrustAnchors;
use crate::tls::mesh_credentials::{ClientCertificates, MeshCredentials};
use crate::trust::{self, CertificateAuthority, TokenKeys, TokenSubject};

const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";
const HOUR: Duration = Duration::from_secs(3600);

struct TestService {
    dir: tempfile::TempDir,
    anchor: CertificateAuthority,
    keys: TokenKeys,
    registry: Registry,
    service: IdentityService,
    reload: CredentialReloader,
}

impl TestService {
    fn new() -> Self {
        Self::with_changed_files(|_| ())
    }

    /// Applies `change` to the files before the service reads them.
    fn with_changed_files(change: impl FnOnce(&Path)) -> Self {
        Self::build(change, |keys| {
            Reviewer::JoinTokenKeys(JoinTokenKeys::open(keys, &Registry::new()).unwrap())
        })
    }

    fn build(change: impl FnOnce(&Path), reviewer: impl FnOnce(PathBuf) -> Reviewer) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path_of = |name: &str| dir.path().join(name);
        for name in ["issuer", "keys"] {
            fs::create_dir(path_of(name)).unwrap();
        }
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
        anchor.write(&path_of("ca.crt"), &path_of("ca.key")).unwrap();
        let issuer = trust::create_issuer("issuer", trust::ISSUER_LIFETIME, &anchor).unwrap();
        issuer
            .write(&path_of("issuer/crt.pem"), &path_of("issuer/key.pem"))
            .unwrap();
        let keys = trust::create_token_keys().unwrap();
        keys.write(&path_of("keys/join.pub"), &path_of("join.key")).unwrap();
        change(dir.path());
        let config = Config {
            issuer: path_of("issuer"),
            trust_anchors: path_of("ca.crt"),
            controller_namespace: "linkerd".to_owned(),
            trust_domain: "cluster.local".to_owned(),
            validity: Validity {
                lifetime: 24 * HOUR,
                clock_skew: Duration::from_secs(20),
            },
        };
        let registry = Registry::new();
        let reviewer = reviewer(path_of("keys"));
        let (service, reload) = IdentityService::new(&config, reviewer, EventRecorder::default(), &registry).unwrap();
        Self {
            dir,
            anchor,
            keys,
            registry,
            service,
            reload,
        }
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn token(&self, service_account: &str, namespace: &str) -> Vec<u8> {
        let subject = TokenSubject {
            service_account,
            namespace,
            lifetime: HOUR,
        };
        trust::create_token(&self.keys.private, &subject).unwrap().into_bytes()
    }

    fn valid_request(&self) -> proto::CertifyRequest {
        proto::CertifyRequest {
            identity: WEB.to_owned(),
            token: self.token("web", "shop"),
            certificate_signing_request: csr(&[WEB], &KeyPair::generate().unwrap()),
        }
    }

    async fn certify(&self, req: proto::CertifyRequest) -> Result<proto::CertifyResponse, tonic::Status> {
        self.service
            .certify(Request::new(req))
            .await
            .map(tonic::Response::into_inner)
    }

    async fn assert_refused(&self, change: impl FnOnce(&mut proto::CertifyRequest), code: Code, message: &str) {
        let mut req = self.valid_request();
        change(&mut req);
        let status = self.certify(req).await.unwrap_err();
        assert_eq!(status.code(), code, "{status}");
        assert!(status.message().contains(message), "{status} has no {message}");
    }
}

fn csr(names: &[&str], key: &KeyPair) -> Vec<u8> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = names
        .iter()
        .map(|name| SanType::DnsName((*name).try_into().unwrap()))
        .collect();
    params.serialize_request(key).unwrap().der().to_vec()
}

#[tokio::test]
async fn refusals_of_a_client_and_certificates_of_a_workload_are_logged_once_a_minute() {
    let log = LogCapture::start();
    let test = TestService::new();
    for _ in 0..3 {
        test.certify(test.valid_request()).await.unwrap();
        test.certify(proto::CertifyRequest::default()).await.unwrap_err();
    }
    for message in ["certificate issued", "certificate refused"] {
        assert_eq!(log.lines_with(message).len(), 1, "{message}: {:#?}", log.lines());
    }
}

#[tokio::test]
async fn a_workload_that_proves_its_identity_gets_a_certificate_for_it() {
    let test = TestService::new();
    let rsp = test.certify(test.valid_request()).await.unwrap();
    let anchors = TrustAnchors::read(&test.path_of("ca.crt")).unwrap();
    let leaf = CertificateDer::from(rsp.leaf_certificate);
    let chain: Vec<_> = rsp
        .intermediate_certificates
        .into_iter()
        .map(CertificateDer::from)
        .collect();
    let name = ServerName::try_from(WEB).unwrap();
    anchors.verify(&leaf, &chain, &name, UnixTime::now()).unwrap();
    let bundle: Vec<_> = anchors.certs().iter().map(|cert| cert.to_vec()).collect();
    assert_eq!(rsp.trust_anchors, bundle, "the current trust anchors are included");

    let valid_until = SystemTime::try_from(rsp.valid_until.unwrap()).unwrap();
    let left = valid_until.duration_since(SystemTime::now()).unwrap();
    assert!(
        left <= 24 * HOUR + Duration::from_secs(20) && left > 24 * HOUR,
        "{left:?}"
    );
    let metrics = test.registry.render();
    assert!(
        metrics.contains("certify_requests_total{outcome=\"issued\"} 1"),
        "{metrics}"
    );
    let ttl = metrics
        .lines()
        .find_map(|line| line.strip_prefix("issuer_cert_ttl_seconds "))
        .unwrap();
    let days = ttl.parse::<f64>().unwrap() / 86400.0;
    assert!((364.0..=365.0).contains(&days), "{days}");
}

type Change = fn(&mut proto::CertifyRequest);

/// Changes that make a request invalid, and a part of the reason.
const INVALID_REQUESTS: &[(Change, &str)] = &[
    (|req| req.identity.clear(), "no identity"),
    (|req| req.token.clear(), "no token"),
    (
        |req| req.certificate_signing_request.clear(),
        "no certificate signing request",
    ),
    (|req| req.identity = "a b".to_owned(), "expected a DNS name"),
    (|req| req.identity = "ä".repeat(30_000), "as identity"),
    (|req| req.identity = "spiffe://a/b".to_owned(), "expected a DNS name"),
    (
        |req| req.certificate_signing_request = b"hello".to_vec(),
        "expected PKCS#10",
    ),
    (|req| req.token = b"a.b.c".to_vec(), "not a JSON Web Token"),
];

#[tokio::test]
async fn each_refusal_has_its_code_and_its_reason() {
    use Code::{FailedPrecondition, Internal, InvalidArgument};
    let test = TestService::new();
    let key = KeyPair::generate().unwrap();
    let other = "api.shop.serviceaccount.identity.linkerd.cluster.local";

    for &(change, message) in INVALID_REQUESTS {
        test.assert_refused(change, InvalidArgument, message).await;
    }
    test.assert_refused(
        |req| req.certificate_signing_request = csr(&[WEB, other], &key),
        FailedPrecondition,
        "has 2 subject",
    )
    .await;
    test.assert_refused(
        |req| req.certificate_signing_request = csr(&[other], &key),
        FailedPrecondition,
        "asks for the DNS name",
    )
    .await;
    let theirs = TestService::new().token("web", "shop");
    test.assert_refused(
        |req| req.token = theirs,
        FailedPrecondition,
        "not signed by a known key",
    )
    .await;
    let api = test.token("api", "shop");
    test.assert_refused(|req| req.token = api, FailedPrecondition, "the token is for api.shop.")
        .await;
    test.assert_refused(
        |req| {
            req.identity = other.to_owned();
            req.certificate_signing_request = csr(&[other], &key);
        },
        FailedPrecondition,
        "but the request is for api.shop.",
    )
    .await;
    let rsa = KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).unwrap();
    test.assert_refused(
        |req| req.certificate_signing_request = csr(&[WEB], &rsa),
        Internal,
        "expected ECDSA",
    )
    .await;

    let metrics = test.registry.render();
    for (outcome, n) in [("bad_request", 7), ("wrong_names", 2), ("wrong_identity", 2)] {
        let line = format!("certify_requests_total{{outcome=\"{outcome}\"}} {n}\n");
        assert!(metrics.contains(&line), "no {line} in {metrics}");
    }
}

#[tokio::test]
async fn a_subject_that_is_no_service_account_is_refused() {
    let test = TestService::new();
    let sign = |sub: &str| {
        let key = jsonwebtoken::EncodingKey::from_ec_pem(test.keys.private.as_bytes()).unwrap();
        let exp = jsonwebtoken::get_current_timestamp() + 60;
        let claims = json!({"sub": sub, "aud": "identity.l5d.io", "exp": exp});
        let header = jsonwebtoken::Header::new(jsonwebtoken::Algorithm::ES256);
        jsonwebtoken::encode(&header, &claims, &key).unwrap().into_bytes()
    };
    for sub in [
        "",
        "web",
        "system:node:shop:web",
        "system:serviceaccount:shop",
        "system:serviceaccount:shop:web:x",
    ] {
        test.assert_refused(
            |req| req.token = sign(sub),
            Code::FailedPrecondition,
            "expected system:serviceaccount",
        )
        .await;
    }
    for (sub, names) in [
        (
            "system:serviceaccount:shop:a.b",
            r#"service account "a.b" in namespace "shop""#,
        ),
        ("system:serviceaccount::web", r#"service account "web" in namespace """#),
    ] {
        for part in [names, "digits and '-'; use a service account with another name"] {
            test.assert_refused(|req| req.token = sign(sub), Code::FailedPrecondition, part)
                .await;
        }
    }
}

/// A reviewer whose API server returns this status for each review. With `None` the request fails.
fn reviewer(status: Option<Value>) -> Reviewer {
    let service = tower::service_fn(move |req: http::Request<Body>| {
        let status = status.clone();
        async move {
            let (head, body) = req.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let mut answer: Value = serde_json::from_slice(&body).unwrap();
            answer["status"] = match head.uri.path().ends_with("/tokenreviews") {
                true => status.ok_or_else(|| io::Error::other("the API server is gone"))?,
                false => json!({"allowed": true}),
            };
            Ok::<_, io::Error>(http::Response::new(Body::from(serde_json::to_vec(&answer).unwrap())))
        }
    });
    Reviewer::TokenReview(Box::new(TokenReviews::new(Client::new(service, "default"))))
}

#[tokio::test]
async fn the_status_of_a_token_review_decides_the_code() {
    let check = async |status: Option<Value>, code: Code, message: &str| {
        let reviewer = reviewer(status);
        let test = TestService::build(|_| (), |_| reviewer);
        test.assert_refused(|_| (), code, message).await;
    };
    let rejected = "the token is not authenticated: the API server did not accept it";
    check(
        Some(json!({"authenticated": false})),
        Code::FailedPrecondition,
        rejected,
    )
    .await;
    check(
        Some(json!({"authenticated": false, "error": ""})),
        Code::FailedPrecondition,
        rejected,
    )
    .await;
    check(Some(json!({})), Code::FailedPrecondition, rejected).await;
    check(
        Some(json!({"authenticated": false, "error": "it has expired"})),
        Code::InvalidArgument,
        "the token is invalid: it has expired",
    )
    .await;
    check(None, Code::Internal, "the token could not be reviewed").await;
}

#[tokio::test]
async fn without_an_issuer_or_keys_no_certificate_is_signed() {
    let test = TestService::with_changed_files(|dir| fs::remove_file(dir.join("issuer/crt.pem")).unwrap());
    test.assert_refused(|_| (), Code::Unavailable, "cert issuer not ready yet")
        .await;
    let test = TestService::with_changed_files(|dir| fs::remove_file(dir.join("keys/join.pub")).unwrap());
    test.assert_refused(|_| (), Code::Internal, "no public key in").await;
}

#[tokio::test]
async fn an_expired_issuer_signs_no_certificate() {
    let test = TestService::new();
    let later = time::OffsetDateTime::now_utc() + 2 * trust::ISSUER_LIFETIME;
    let err = test
        .service
        .issue(&test.valid_request(), Ipv4Addr::LOCALHOST.into(), later)
        .await
        .unwrap_err();
    assert_eq!(err.code(), Code::Unknown, "{err}");
    assert!(err.to_string().contains("no longer verify the issuer"), "{err}");
}

#[tokio::test]
async fn a_new_issuer_is_used_immediately_and_an_invalid_issuer_changes_nothing() {
    let test = TestService::new();
    let (crt, key) = (test.path_of("issuer/crt.pem"), test.path_of("issuer/key.pem"));
    let bundle = test.path_of("ca.crt");
    let anchor = test.anchor.clone();
    let service = test.service.clone();
    let issuer = || service.issuer_store.issuer().unwrap();
    let first = issuer().chain()[0].clone();
    let (signal, watch) = drain::channel();
    let reload = tokio::spawn(test.reload.run(watch));

    let second = trust::create_issuer("second", trust::ISSUER_LIFETIME, &anchor).unwrap();
    fs::write(&key, &second.key).unwrap();
    fs::write(&crt, &second.certificate).unwrap();
    eventually(|| issuer().chain()[0] != first).await;

    // An issuer of another CA is refused until its anchor is added to the bundle.
    let other = trust::create_anchor("other", trust::ANCHOR_LIFETIME).unwrap();
    let third = trust::create_issuer("third", trust::ISSUER_LIFETIME, &other).unwrap();
    fs::write(&key, &third.key).unwrap();
    fs::write(&crt, &third.certificate).unwrap();
    let in_use = issuer().chain()[0].clone();
    service.issuer_store.reload();
    assert_eq!(issuer().chain()[0], in_use);
    let registry = test.registry.clone();
    let is_counted = || registry.render().contains("/issuer\",field=\"issuer\"} 1");
    assert!(is_counted());
    fs::write(&bundle, [anchor.certificate, other.certificate].concat()).unwrap();
    eventually(|| issuer().chain()[0] != in_use).await;
    assert!(!is_counted());
    assert_eq!(issuer().anchors().certs().len(), 2);

    signal.drain().await;
    reload.await.unwrap();
}

#[tokio::test]
async fn the_service_signs_its_own_certificate_and_renews_it_when_the_issuer_changes() {
    let test =
        TestService::with_changed_files(|dir| fs::rename(dir.join("issuer/crt.pem"), dir.join("later.pem")).unwrap());
    let creds = Arc::new(MeshCredentials::new(
        test.service.name().to_owned(),
        ClientCertificates::Optional,
    ));
    let readiness = Readiness::new();
    let (signal, watch) = drain::channel();
    let renewer = CertificateRenewer::local(creds.clone(), test.service.clone());
    let renewer = tokio::spawn(renewer.run(readiness.latch("certificate"), watch));
    assert!(!readiness.is_ready() && creds.server_config().is_none());

    fs::rename(test.path_of("later.pem"), test.path_of("issuer/crt.pem")).unwrap();
    test.service.issuer_store.reload();
    eventually(|| readiness.is_ready()).await;
    let before = creds.server_config().unwrap();
    let second = trust::create_issuer("second", trust::ISSUER_LIFETIME, &test.anchor).unwrap();
    fs::write(test.path_of("issuer/key.pem"), second.key).unwrap();
    fs::write(test.path_of("issuer/crt.pem"), second.certificate).unwrap();
    test.service.issuer_store.reload();
    eventually(|| !Arc::ptr_eq(&before, &creds.server_config().unwrap())).await;
    signal.drain().await;
    renewer.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_is_due_after_a_jump_of_the_clock_is_renewed_within_seconds() {
    static AHEAD: AtomicU64 = AtomicU64::new(0);
    let test = TestService::new();
    let creds = Arc::new(MeshCredentials::new(
        test.service.name().to_owned(),
        ClientCertificates::Optional,
    ));
    let readiness = Readiness::new();
    let (signal, watch) = drain::channel();
    let mut renewer = CertificateRenewer::local(creds.clone(), test.service.clone());
    renewer.clock = || SystemTime::now() + Duration::from_secs(AHEAD.load(Ordering::SeqCst));
    let renewer = tokio::spawn(renewer.run(readiness.latch("certificate"), watch));
    eventually(|| readiness.is_ready()).await;
    let before = creds.server_config().unwrap();
    // As if the machine and its timers were suspended for 20 hours.
    AHEAD.store(20 * 3600, Ordering::SeqCst);
    eventually(|| !Arc::ptr_eq(&before, &creds.server_config().unwrap())).await;
    signal.drain().await;
    renewer.await.unwrap();
}

async fn eventually(mut condition: impl FnMut() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), waiting)
        .await
        .expect("the condition did not come true");
}
