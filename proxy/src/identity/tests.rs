//! Certification against a real identity service, and keys from files and of our own.

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
use tulle_core::due::Clock;
use tulle_core::identity::Identity;
use tulle_core::metrics::Registry;
use tulle_core::ready::Readiness;
use tulle_proto::identity::identity_server::{Identity as Service, IdentityServer};
use tulle_proto::identity::{CertifyRequest, CertifyResponse};

use crate::api::channel::Security;
use crate::api::tests::{CLIENT, CONTROL, Server, connector, mutual_tls, quick, soon};
use crate::identity::Anchors;
use crate::identity::certify::{Certifier, Config};
use crate::identity::key::{Key, KeyError};
use crate::tls::creds::{Credentials, TrustAnchors};
use crate::tls::tests::Authority;

/// Signs whatever it is asked to, as told.
#[derive(Clone)]
struct Signer {
    shared: Arc<Signing>,
}

struct Signing {
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
        self.shared.requests.lock().push(req.clone());
        if let Some(status) = self.shared.refusals.lock().pop() {
            return Err(status);
        }
        let der = CertificateSigningRequestDer::from(req.certificate_signing_request);
        let mut csr = CertificateSigningRequestParams::from_der(&der).unwrap();
        csr.params.not_before = (SystemTime::now() - Duration::from_secs(60)).into();
        csr.params.not_after = (SystemTime::now() + self.shared.lifetime).into();
        let authority = self.shared.authority.lock().clone();
        let certificate = csr.signed_by(&authority.issuer).unwrap();
        Ok(Response::new(CertifyResponse {
            leaf_certificate: certificate.der().to_vec(),
            trust_anchors: self.shared.anchors.clone(),
            ..Default::default()
        }))
    }
}

/// A running certifier and what it works with.
struct Bench {
    authority: Arc<Authority>,
    signing: Arc<Signing>,
    creds: Credentials,
    readiness: Readiness,
    registry: Registry,
    dir: TempDir,
    certifier: JoinHandle<()>,
    _server: Server,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.certifier.abort();
    }
}

/// What differs between tests.
struct Setup {
    lifetime: Duration,
    /// What the service sends as bundle, given the authority of the mesh.
    anchors: fn(&Authority) -> Vec<Vec<u8>>,
    security: Security,
    refusals: Vec<Status>,
    /// Whether our anchors are in a file, or fixed.
    in_file: bool,
    signer: fn(Arc<Authority>) -> Arc<Authority>,
    clock: Clock,
    /// Whether the key comes from files.
    given_key: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            lifetime: Duration::from_secs(3600),
            anchors: |_| Vec::new(),
            security: mutual_tls(),
            refusals: Vec::new(),
            in_file: true,
            signer: |authority| authority,
            clock: SystemTime::now,
            given_key: false,
        }
    }
}

async fn bench(setup: Setup) -> Bench {
    let authority = Arc::new(Authority::new());
    let signing = Arc::new(Signing {
        authority: Mutex::new((setup.signer)(authority.clone())),
        lifetime: setup.lifetime,
        anchors: (setup.anchors)(&authority),
        refusals: Mutex::new(setup.refusals),
        requests: Mutex::new(Vec::new()),
    });
    let server_creds = match setup.security {
        Security::Loopback => None,
        Security::MutualTls(_) => Some(authority.credentials(CONTROL)),
    };
    let service = IdentityServer::new(Signer {
        shared: signing.clone(),
    });
    let server = Server::start(([127, 0, 0, 1], 0).into(), server_creds, service).await;

    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("token"), "first\n").unwrap();
    fs::write(dir.path().join("anchors.pem"), authority.root.pem()).unwrap();
    let id: Identity = CLIENT.parse().unwrap();
    let anchors = match setup.in_file {
        true => Anchors::File(dir.path().join("anchors.pem")),
        false => Anchors::Fixed(authority.anchors()),
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
    if setup.given_key {
        write(dir.path(), key.pkcs8.secret_pkcs8_der(), &key.csr);
        key = Key::load(Some(dir.path()), &id).unwrap();
    }
    let registry = Registry::new();
    let channel = connector(creds.clone(), &registry).channel(config.service.clone(), quick());
    let readiness = Readiness::new();
    let certifier = Certifier::new(config, anchors, key, creds.clone(), channel, &registry, setup.clock);
    let certifier = tokio::spawn(certifier.run(readiness.latch("no certificate yet")));
    Bench {
        authority,
        signing,
        creds,
        readiness,
        registry,
        dir,
        certifier,
        _server: server,
    }
}

impl Bench {
    async fn until(&self, condition: impl Fn(&Self) -> bool) {
        soon(async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }

    fn metric(&self, line: &str) -> bool {
        self.registry.render().lines().any(|found| found == line)
    }
}

#[tokio::test]
async fn the_first_certificate_makes_ready() {
    let bench = bench(Setup::default()).await;
    assert_eq!(bench.readiness.reasons(), ["no certificate yet"]);
    soon(bench.creds.certified()).await;
    bench.until(|bench| bench.readiness.is_ready()).await;
    let req = bench.signing.requests.lock()[0].clone();
    assert_eq!((req.identity.as_str(), req.token.as_slice()), (CLIENT, &b"first"[..]));
    assert!(bench.metric(r#"control_identity_cert_refreshes_total{result="ok"} 1"#));
    let expires = bench
        .creds
        .validity()
        .unwrap()
        .not_after
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap();
    assert!(bench.metric(&format!(
        "control_identity_cert_expiration_timestamp_seconds {}",
        expires.as_secs()
    )));
}

#[tokio::test]
async fn certificates_are_renewed_in_time_with_the_token_of_now() {
    let bench = bench(Setup {
        lifetime: Duration::from_secs(2),
        ..Setup::default()
    })
    .await;
    soon(bench.creds.certified()).await;
    fs::write(bench.dir.path().join("token"), "second").unwrap();
    bench.until(|bench| bench.creds.generation() >= 2).await;
    assert!(
        bench.creds.validity().unwrap().not_after > SystemTime::now(),
        "the former one has not run out"
    );
    assert_eq!(bench.signing.requests.lock()[1].token, b"second");
}

#[tokio::test]
async fn each_certificate_is_of_a_key_of_its_own_unless_the_key_is_given() {
    for given_key in [false, true] {
        let bench = bench(Setup {
            lifetime: Duration::from_secs(2),
            given_key,
            ..Setup::default()
        })
        .await;
        bench.until(|bench| bench.creds.generation() >= 2).await;
        let requests = bench.signing.requests.lock().clone();
        let is_same = requests[0].certificate_signing_request == requests[1].certificate_signing_request;
        assert_eq!(is_same, given_key);
    }
}

/// How long the machine was suspended.
static SUSPENDED: AtomicU64 = AtomicU64::new(0);

#[tokio::test]
async fn a_machine_that_was_suspended_asks_for_a_certificate_as_soon_as_it_wakes() {
    let bench = bench(Setup {
        clock: || SystemTime::now() + Duration::from_secs(SUSPENDED.load(Ordering::Relaxed)),
        ..Setup::default()
    })
    .await;
    soon(bench.creds.certified()).await;
    SUSPENDED.store(3600, Ordering::Relaxed);
    skip(Duration::from_secs(6)).await;
    bench.until(|bench| bench.creds.generation() >= 2).await;
}

#[tokio::test]
async fn refusals_are_asked_again() {
    let refusals = vec![Status::unavailable("no issuer"), Status::permission_denied("bad token")];
    let bench = bench(Setup {
        refusals,
        ..Setup::default()
    })
    .await;
    soon(bench.creds.certified()).await;
    assert!(bench.metric(r#"control_identity_cert_refreshes_total{result="error"} 2"#));
}

#[tokio::test]
async fn a_certificate_of_a_foreign_authority_is_not_used() {
    let foreign = |_| Arc::new(Authority::named("somebody else"));
    let bench = bench(Setup {
        signer: foreign,
        ..Setup::default()
    })
    .await;
    bench.until(|bench| bench.signing.requests.lock().len() >= 2).await;
    assert_eq!(bench.creds.generation(), 0);
    let reasons = bench.readiness.reasons();
    assert!(
        reasons[0].starts_with("no certificate yet: using the certificate: "),
        "{reasons:?}"
    );
    *bench.signing.authority.lock() = bench.authority.clone();
    soon(bench.creds.certified()).await;
}

fn both_roots(authority: &Authority) -> Vec<Vec<u8>> {
    vec![
        authority.root.der().to_vec(),
        Authority::named("next").root.der().to_vec(),
    ]
}

#[tokio::test]
async fn anchors_that_come_with_a_certificate_are_taken_from_a_verified_server() {
    let bench = bench(Setup {
        anchors: both_roots,
        ..Setup::default()
    })
    .await;
    let before = bench.authority.anchors();
    soon(bench.creds.certified()).await;
    assert_ne!(bench.creds.anchors(), before);
}

#[tokio::test]
async fn anchors_of_file_and_control_plane_overlap() {
    let bench = bench(Setup {
        anchors: both_roots,
        ..Setup::default()
    })
    .await;
    soon(bench.creds.certified()).await;
    let sent = bench.creds.anchors();
    // A root that somebody adds to the file stays, whatever the control plane sends with the next certificate.
    let file = bench.authority.root.pem() + &Authority::named("added").root.pem();
    let added = TrustAnchors::from_pem(&file).unwrap();
    fs::write(bench.dir.path().join("anchors.pem"), file).unwrap();
    skip(Duration::from_secs(11)).await;
    let all = added.and(&sent).unwrap();
    bench.until(|bench| bench.creds.anchors() == all).await;
    let before = bench.creds.generation();
    bench.until(|bench| bench.creds.generation() > before).await;
    assert_eq!(bench.creds.anchors(), all);
}

#[tokio::test]
async fn anchors_from_a_server_that_nobody_verified_are_ignored() {
    let bench = bench(Setup {
        anchors: both_roots,
        security: Security::Loopback,
        ..Setup::default()
    })
    .await;
    soon(bench.creds.certified()).await;
    assert_eq!(bench.creds.anchors(), bench.authority.anchors());
}

#[tokio::test]
async fn a_bundle_without_the_issuer_is_not_taken() {
    let next_only = |_: &Authority| vec![Authority::named("next").root.der().to_vec()];
    let bench = bench(Setup {
        anchors: next_only,
        in_file: false,
        ..Setup::default()
    })
    .await;
    bench.until(|bench| bench.signing.requests.lock().len() >= 2).await;
    assert_eq!(bench.creds.generation(), 0);
    assert_eq!(bench.creds.anchors(), bench.authority.anchors());
}

#[tokio::test]
async fn the_file_of_anchors_is_followed_and_a_bad_one_is_not() {
    let bench = bench(Setup::default()).await;
    soon(bench.creds.certified()).await;
    let file = bench.dir.path().join("anchors.pem");
    let both = bench.authority.root.pem() + &Authority::named("next").root.pem();
    fs::write(&file, "no certificate").unwrap();
    skip(Duration::from_secs(11)).await;
    assert_eq!(bench.creds.anchors(), bench.authority.anchors());
    bench
        .until(|bench| {
            let page = bench.registry.render();
            page.contains("tulle_unreadable_updates_total{kind=\"trust_anchors\"} ")
                && !page.contains("{kind=\"trust_anchors\"} 0")
        })
        .await;
    fs::write(&file, both).unwrap();
    skip(Duration::from_secs(11)).await;
    bench
        .until(|bench| bench.creds.anchors() != bench.authority.anchors())
        .await;
    // Peers may have changed whom they accept, too.
    bench.until(|bench| bench.creds.generation() >= 2).await;
}

/// Lets that time pass at once.
async fn skip(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

fn id() -> Identity {
    CLIENT.parse().unwrap()
}

#[test]
fn our_own_request_names_us_and_nobody_else() {
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

fn write(dir: &Path, key: &[u8], csr: &[u8]) {
    fs::write(dir.join("key.p8"), key).unwrap();
    fs::write(dir.join("csr.der"), csr).unwrap();
}

#[test]
fn files_are_used_when_they_are_there_and_fit() {
    let (dir, given) = (TempDir::new().unwrap(), Key::generate(&id()).unwrap());
    let path = Some(dir.path());
    assert_ne!(Key::load(path, &id()).unwrap().csr, given.csr, "an empty directory");
    write(dir.path(), given.pkcs8.secret_pkcs8_der(), &given.csr);
    assert_eq!(Key::load(path, &id()).unwrap().csr, given.csr);

    let other = Key::generate(&id()).unwrap();
    write(dir.path(), given.pkcs8.secret_pkcs8_der(), &other.csr);
    assert!(matches!(Key::load(path, &id()), Err(KeyError::Mismatch { .. })));
    let p384 = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap().serialize_der();
    write(dir.path(), &p384, &given.csr);
    assert!(matches!(Key::load(path, &id()), Err(KeyError::BadKey { .. })));
    write(dir.path(), given.pkcs8.secret_pkcs8_der(), b"no request");
    assert!(matches!(Key::load(path, &id()), Err(KeyError::BadRequest { .. })));
    fs::remove_file(dir.path().join("csr.der")).unwrap();
    let half = Key::load(path, &id()).unwrap_err();
    assert!(
        half.to_string().ends_with("csr.der, both or neither are needed"),
        "{half}"
    );
}
