//! Certification against a real identity service, with keys from files and generated keys.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rcgen::{CertificateSigningRequestParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384};
use rustls::pki_types::CertificateSigningRequestDer;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tonic::{Request, Response, Status};
use tulle_core::identity::Identity;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Readiness;
use tulle_core::wall_clock::Clock;
use tulle_proto::identity::identity_server::{Identity as Service, IdentityServer};
use tulle_proto::identity::{CertifyRequest, CertifyResponse};

use crate::api::channel::Security;
use crate::api::tests::{CLIENT, CONTROL, Server, connector, mutual_tls, test_config, with_timeout};
use crate::identity::anchors::TrustAnchorSource;
use crate::identity::certify::{Certifier, CertifierParams, Config};
use crate::identity::key::{Key, KeyError};
use crate::tls::credentials::{Credentials, TrustAnchors};
use crate::tls::tests::Authority;

/// An identity service that signs or refuses requests as its state says.
#[derive(Clone)]
struct Signer {
    state: Arc<SignerState>,
}

struct SignerState {
    authority: Mutex<Arc<Authority>>,
    lifetime: Duration,
    anchors: Vec<Vec<u8>>,
    refusals: Mutex<Vec<Status>>,
    requests: Mutex<Vec<CertifyRequest>>,
}

#[tonic::async_trait]
impl Service for Signer {
    async fn certify(&self, req: Request<CertifyRequest>) -> Result<Response<CertifyResponse>, Status> {
        let req = req.into_inner();
        self.state.requests.lock().push(req.clone());
        if let Some(status) = self.state.refusals.lock().pop() {
            return Err(status);
        }
        let der = CertificateSigningRequestDer::from(req.certificate_signing_request);
        let mut csr = CertificateSigningRequestParams::from_der(&der).unwrap();
        csr.params.not_before = (SystemTime::now() - Duration::from_secs(60)).into();
        csr.params.not_after = (SystemTime::now() + self.state.lifetime).into();
        let authority = self.state.authority.lock().clone();
        let certificate = csr.signed_by(&authority.issuer).unwrap();
        Ok(Response::new(CertifyResponse {
            leaf_certificate: certificate.der().to_vec(),
            trust_anchors: self.state.anchors.clone(),
            ..Default::default()
        }))
    }
}

/// A running certifier and its environment.
struct Fixture {
    authority: Arc<Authority>,
    signer: Arc<SignerState>,
    creds: Credentials,
    readiness: Readiness,
    registry: Registry,
    dir: TempDir,
    certifier: JoinHandle<()>,
    _server: Server,
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.certifier.abort();
    }
}

struct Setup {
    lifetime: Duration,
    /// The bundle that the service sends, given the authority of the mesh.
    anchors: fn(&Authority) -> Vec<Vec<u8>>,
    security: Security,
    refusals: Vec<Status>,
    /// Whether the proxy's anchors are in a file, or fixed.
    anchors_in_file: bool,
    signing_authority: fn(Arc<Authority>) -> Arc<Authority>,
    clock: Clock,
    has_key_files: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            lifetime: Duration::from_secs(3600),
            anchors: |_| Vec::new(),
            security: mutual_tls(),
            refusals: Vec::new(),
            anchors_in_file: true,
            signing_authority: |authority| authority,
            clock: SystemTime::now,
            has_key_files: false,
        }
    }
}

async fn fixture(setup: Setup) -> Fixture {
    let authority = Arc::new(Authority::new());
    let signer = Arc::new(SignerState {
        authority: Mutex::new((setup.signing_authority)(authority.clone())),
        lifetime: setup.lifetime,
        anchors: (setup.anchors)(&authority),
        refusals: Mutex::new(setup.refusals),
        requests: Mutex::new(Vec::new()),
    });
    let server_creds = match setup.security {
        Security::Loopback => None,
        Security::MutualTls(_) => Some(authority.credentials(CONTROL)),
    };
    let service = IdentityServer::new(Signer { state: signer.clone() });
    let server = Server::start(([127, 0, 0, 1], 0).into(), server_creds, service).await;

    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("token"), "first\n").unwrap();
    fs::write(dir.path().join("anchors.pem"), authority.certificate.pem()).unwrap();
    let id: Identity = CLIENT.parse().unwrap();
    let anchors = match setup.anchors_in_file {
        true => TrustAnchorSource::File(dir.path().join("anchors.pem")),
        false => TrustAnchorSource::Fixed(authority.anchors()),
    };
    let config = Config {
        service: server.target(setup.security.clone()),
        dir: None,
        token_file: dir.path().join("token"),
        min_refresh: Duration::from_millis(100),
        max_refresh: Duration::from_secs(86_400),
    };
    let creds = Credentials::new(id.clone(), CLIENT, anchors.read().unwrap()).unwrap();
    let mut key = Key::generate(&id).unwrap();
    if setup.has_key_files {
        write_key_files(dir.path(), key.pkcs8.secret_pkcs8_der(), &key.csr);
        key = Key::load(Some(dir.path()), &id).unwrap();
    }
    let registry = Registry::new();
    let channel = connector(creds.clone(), &registry).channel(config.service.clone(), test_config());
    let readiness = Readiness::new();
    let certifier = Certifier::new(
        CertifierParams {
            config,
            anchors,
            key,
            creds: creds.clone(),
            channel,
            clock: setup.clock,
        },
        &registry,
    );
    let certifier = tokio::spawn(certifier.run(readiness.latch("no certificate yet")));
    Fixture {
        authority,
        signer,
        creds,
        readiness,
        registry,
        dir,
        certifier,
        _server: server,
    }
}

impl Fixture {
    async fn wait_until(&self, condition: impl Fn(&Self) -> bool) {
        with_timeout(async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }

    fn has_metric(&self, line: &str) -> bool {
        self.registry.render().lines().any(|found| found == line)
    }
}

#[tokio::test]
async fn the_first_certificate_makes_the_proxy_ready() {
    let fixture = fixture(Setup::default()).await;
    assert_eq!(fixture.readiness.reasons(), ["no certificate yet"]);
    with_timeout(fixture.creds.wait_certified()).await;
    fixture.wait_until(|fixture| fixture.readiness.is_ready()).await;
    let req = fixture.signer.requests.lock()[0].clone();
    assert_eq!((req.identity.as_str(), req.token.as_slice()), (CLIENT, &b"first"[..]));
    assert!(fixture.has_metric(r#"control_identity_cert_refreshes_total{result="ok"} 1"#));
    let expires = fixture
        .creds
        .validity()
        .unwrap()
        .not_after
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap();
    assert!(fixture.has_metric(&format!(
        "control_identity_cert_expiration_timestamp_seconds {}",
        expires.as_secs()
    )));
}

#[tokio::test]
async fn certificates_are_renewed_in_time_with_the_current_token() {
    let fixture = fixture(Setup {
        lifetime: Duration::from_secs(2),
        ..Setup::default()
    })
    .await;
    with_timeout(fixture.creds.wait_certified()).await;
    fs::write(fixture.dir.path().join("token"), "second").unwrap();
    fixture.wait_until(|fixture| fixture.creds.generation() >= 2).await;
    assert!(
        fixture.creds.validity().unwrap().not_after > SystemTime::now(),
        "the certificate in use has not expired"
    );
    assert_eq!(fixture.signer.requests.lock()[1].token, b"second");
}

#[tokio::test]
async fn each_certificate_has_a_new_key_unless_the_key_is_from_files() {
    for has_key_files in [false, true] {
        let fixture = fixture(Setup {
            lifetime: Duration::from_secs(2),
            has_key_files,
            ..Setup::default()
        })
        .await;
        fixture.wait_until(|fixture| fixture.creds.generation() >= 2).await;
        let requests = fixture.signer.requests.lock().clone();
        let is_same = requests[0].certificate_signing_request == requests[1].certificate_signing_request;
        assert_eq!(is_same, has_key_files);
    }
}

static SUSPENDED: AtomicU64 = AtomicU64::new(0);

#[tokio::test]
async fn a_suspended_machine_requests_a_certificate_when_it_resumes() {
    let fixture = fixture(Setup {
        clock: || SystemTime::now() + Duration::from_secs(SUSPENDED.load(Ordering::Relaxed)),
        ..Setup::default()
    })
    .await;
    with_timeout(fixture.creds.wait_certified()).await;
    SUSPENDED.store(3600, Ordering::Relaxed);
    advance_clock(Duration::from_secs(6)).await;
    fixture.wait_until(|fixture| fixture.creds.generation() >= 2).await;
}

#[tokio::test]
async fn refused_certificate_requests_are_retried() {
    let refusals = vec![Status::unavailable("no issuer"), Status::permission_denied("bad token")];
    let fixture = fixture(Setup {
        refusals,
        ..Setup::default()
    })
    .await;
    with_timeout(fixture.creds.wait_certified()).await;
    assert!(fixture.has_metric(r#"control_identity_cert_refreshes_total{result="error"} 2"#));
}

#[tokio::test]
async fn a_certificate_of_a_foreign_authority_is_not_used() {
    let foreign = |_| Arc::new(Authority::named("foreign"));
    let fixture = fixture(Setup {
        signing_authority: foreign,
        ..Setup::default()
    })
    .await;
    fixture
        .wait_until(|fixture| fixture.signer.requests.lock().len() >= 2)
        .await;
    assert_eq!(fixture.creds.generation(), 0);
    let reasons = fixture.readiness.reasons();
    assert!(
        reasons[0].starts_with("no certificate yet: the certificate cannot be used: "),
        "{reasons:?}"
    );
    *fixture.signer.authority.lock() = fixture.authority.clone();
    with_timeout(fixture.creds.wait_certified()).await;
}

fn both_roots(authority: &Authority) -> Vec<Vec<u8>> {
    vec![
        authority.certificate.der().to_vec(),
        Authority::named("next").certificate.der().to_vec(),
    ]
}

#[tokio::test]
async fn anchors_in_a_certificate_response_are_used_if_the_server_is_verified() {
    let fixture = fixture(Setup {
        anchors: both_roots,
        ..Setup::default()
    })
    .await;
    let initial_anchors = fixture.authority.anchors();
    with_timeout(fixture.creds.wait_certified()).await;
    assert_ne!(fixture.creds.anchors(), initial_anchors);
}

#[tokio::test]
async fn trust_anchors_of_the_file_and_of_the_control_plane_are_combined() {
    let fixture = fixture(Setup {
        anchors: both_roots,
        ..Setup::default()
    })
    .await;
    with_timeout(fixture.creds.wait_certified()).await;
    let sent = fixture.creds.anchors();
    // A root that is added to the file stays when the control plane sends a bundle with the next certificate.
    let file = fixture.authority.certificate.pem() + &Authority::named("added").certificate.pem();
    let added = TrustAnchors::from_pem(&file).unwrap();
    fs::write(fixture.dir.path().join("anchors.pem"), file).unwrap();
    advance_clock(Duration::from_secs(11)).await;
    let all = added.union(&sent).unwrap();
    fixture.wait_until(|fixture| fixture.creds.anchors() == all).await;
    let generation_before = fixture.creds.generation();
    fixture
        .wait_until(|fixture| fixture.creds.generation() > generation_before)
        .await;
    assert_eq!(fixture.creds.anchors(), all);
}

#[tokio::test]
async fn anchors_from_an_unverified_server_are_ignored() {
    let fixture = fixture(Setup {
        anchors: both_roots,
        security: Security::Loopback,
        ..Setup::default()
    })
    .await;
    with_timeout(fixture.creds.wait_certified()).await;
    assert_eq!(fixture.creds.anchors(), fixture.authority.anchors());
}

#[tokio::test]
async fn anchors_without_the_root_of_the_certificate_are_not_used() {
    let next_only = |_: &Authority| vec![Authority::named("next").certificate.der().to_vec()];
    let fixture = fixture(Setup {
        anchors: next_only,
        anchors_in_file: false,
        ..Setup::default()
    })
    .await;
    fixture
        .wait_until(|fixture| fixture.signer.requests.lock().len() >= 2)
        .await;
    assert_eq!(fixture.creds.generation(), 0);
    assert_eq!(fixture.creds.anchors(), fixture.authority.anchors());
}

#[tokio::test]
async fn the_anchors_file_is_reloaded_unless_it_is_invalid() {
    let fixture = fixture(Setup::default()).await;
    with_timeout(fixture.creds.wait_certified()).await;
    let file = fixture.dir.path().join("anchors.pem");
    let both = fixture.authority.certificate.pem() + &Authority::named("next").certificate.pem();
    fs::write(&file, "no certificate").unwrap();
    advance_clock(Duration::from_secs(11)).await;
    assert_eq!(fixture.creds.anchors(), fixture.authority.anchors());
    fixture
        .wait_until(|fixture| {
            let page = fixture.registry.render();
            page.contains("tulle_unreadable_updates_total{kind=\"trust_anchors\"} ")
                && !page.contains("{kind=\"trust_anchors\"} 0")
        })
        .await;
    fs::write(&file, both).unwrap();
    advance_clock(Duration::from_secs(11)).await;
    fixture
        .wait_until(|fixture| fixture.creds.anchors() != fixture.authority.anchors())
        .await;
    // A new certificate is requested too, because peers may accept only certificates of a new issuer.
    fixture.wait_until(|fixture| fixture.creds.generation() >= 2).await;
}

/// Advances the clock of timers, without waiting.
async fn advance_clock(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

fn id() -> Identity {
    CLIENT.parse().unwrap()
}

#[test]
fn a_generated_request_for_a_certificate_names_only_the_identity_of_the_proxy() {
    for id in [id(), "spiffe://root/vm".parse().unwrap()] {
        let key = Key::generate(&id).unwrap();
        KeyPair::from_pkcs8_der_and_sign_algo(&key.pkcs8, &PKCS_ECDSA_P256_SHA256).unwrap();
        let csr = CertificateSigningRequestDer::from(&key.csr[..]);
        let params = CertificateSigningRequestParams::from_der(&csr).unwrap().params;
        let [name] = &params.subject_alt_names[..] else {
            panic!("{:?}", params.subject_alt_names)
        };
        assert!(format!("{name:?}").contains(id.as_str()), "{name:?}");
        assert_eq!(format!("{key:?}"), "Key(…)");
    }
}

fn write_key_files(dir: &Path, key: &[u8], csr: &[u8]) {
    fs::write(dir.join("key.p8"), key).unwrap();
    fs::write(dir.join("csr.der"), csr).unwrap();
}

#[test]
fn key_files_are_used_if_they_exist_and_match() {
    let (dir, given) = (TempDir::new().unwrap(), Key::generate(&id()).unwrap());
    let path = Some(dir.path());
    assert_ne!(Key::load(path, &id()).unwrap().csr, given.csr, "an empty directory");
    let absent = dir.path().join("absent");
    assert!(matches!(Key::load(Some(&absent), &id()), Err(KeyError::NoDirectory { path }) if path == absent));
    write_key_files(dir.path(), given.pkcs8.secret_pkcs8_der(), &given.csr);
    assert_eq!(Key::load(path, &id()).unwrap().csr, given.csr);

    let other = Key::generate(&id()).unwrap();
    write_key_files(dir.path(), given.pkcs8.secret_pkcs8_der(), &other.csr);
    assert!(matches!(Key::load(path, &id()), Err(KeyError::Mismatch { .. })));
    let p384 = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap().serialize_der();
    write_key_files(dir.path(), &p384, &given.csr);
    assert!(matches!(Key::load(path, &id()), Err(KeyError::BadKey { .. })));
    write_key_files(dir.path(), given.pkcs8.secret_pkcs8_der(), b"no request");
    assert!(matches!(
        Key::load(path, &id()),
        Err(KeyError::BadSigningRequest { .. })
    ));
    fs::remove_file(dir.path().join("csr.der")).unwrap();
    let error = Key::load(path, &id()).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("csr.der does not; both or neither must exist"),
        "{error}"
    );
}
