//! Trust anchor, issuer, join tokens, and certificates that the control plane would never issue.

#![allow(clippy::unwrap_used)] // only tests call this

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use tulle_control::trust::{self, CertificateAuthority, TokenKeys, TokenSubject};

pub struct Credentials {
    dir: PathBuf,
    pub anchor: CertificateAuthority,
    issuer: CertificateAuthority,
    tokens: TokenKeys,
}

/// Files of a leaf certificate, its key and its chain.
pub struct Leaf {
    pub certificate: PathBuf,
    pub chain: PathBuf,
    pub key: PathBuf,
    /// The leaf certificate, PEM.
    pub pem: String,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Validity {
    Current,
    Expired,
}

impl Credentials {
    /// Creates new credentials below `dir`.
    ///
    /// # Panics
    /// Panics if a credential cannot be created or written.
    pub fn create(dir: &Path) -> Self {
        let anchor = trust::create_anchor(ROOT, trust::ANCHOR_LIFETIME).unwrap();
        let issuer = trust::create_issuer(ISSUER, trust::ISSUER_LIFETIME, &anchor).unwrap();
        let tokens = trust::create_token_keys().unwrap();
        for part in ["issuer", "token-keys", "leaves"] {
            fs::create_dir(dir.join(part)).unwrap();
        }
        for (name, text) in [
            ("anchors.pem", &anchor.certificate),
            ("issuer/crt.pem", &issuer.certificate),
            ("issuer/key.pem", &issuer.key),
            ("token-keys/tests.pem", &tokens.public),
        ] {
            fs::write(dir.join(name), text).unwrap();
        }
        Self {
            dir: dir.to_owned(),
            anchor,
            issuer,
            tokens,
        }
    }

    pub fn anchors(&self) -> PathBuf {
        self.dir.join("anchors.pem")
    }

    pub fn issuer(&self) -> PathBuf {
        self.dir.join("issuer")
    }

    pub fn token_keys(&self) -> PathBuf {
        self.dir.join("token-keys")
    }

    /// Writes a join token to a file that the proxy's user can read.
    pub fn token(&self, service_account: &str) -> PathBuf {
        let subject = TokenSubject {
            service_account,
            namespace: NAMESPACE,
            lifetime: trust::TOKEN_LIFETIME,
        };
        let path = self.dir.join(format!("{service_account}.token"));
        fs::write(&path, trust::create_token(&self.tokens.private, &subject).unwrap()).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        path
    }

    /// A leaf certificate of this mesh.
    pub fn leaf(&self, name: &str, validity: Validity) -> Leaf {
        self.sign(&self.issuer, name, validity)
    }

    /// A leaf certificate of another mesh, whose CAs have the same names.
    pub fn foreign_leaf(&self, name: &str) -> Leaf {
        let anchor = trust::create_anchor(ROOT, trust::ANCHOR_LIFETIME).unwrap();
        let issuer = trust::create_issuer(ISSUER, trust::ISSUER_LIFETIME, &anchor).unwrap();
        self.sign(&issuer, name, Validity::Current)
    }

    fn sign(&self, issuer: &CertificateAuthority, name: &str, validity: Validity) -> Leaf {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        if validity == Validity::Expired {
            params.not_before = rcgen::date_time_ymd(2020, 1, 1);
            params.not_after = rcgen::date_time_ymd(2021, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        let signer = Issuer::from_ca_cert_pem(&issuer.certificate, KeyPair::from_pem(&issuer.key).unwrap()).unwrap();
        let pem = params.signed_by(&key, &signer).unwrap().pem();
        // Several leaf certificates of a test may have the same name.
        let n = fs::read_dir(self.dir.join("leaves")).unwrap().count();
        let file = |ending: &str, text: &str| {
            let path = self.dir.join(format!("leaves/{n}-{ending}.pem"));
            fs::write(&path, text).unwrap();
            path
        };
        Leaf {
            certificate: file("leaf", &pem),
            chain: file("chain", &issuer.certificate),
            key: file("key", &key.serialize_pem()),
            pem,
        }
    }
}

/// The namespace of all service accounts.
pub const NAMESPACE: &str = "shop";
const ROOT: &str = "root.linkerd.cluster.local";
const ISSUER: &str = "identity.linkerd.cluster.local";
