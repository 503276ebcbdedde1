//! Trust anchor, issuer, join tokens, and certificates that the control plane would never issue.

#![allow(clippy::unwrap_used)] // only tests call this

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use tulle_control::trust::{self, CertificateAuthority, TokenKeys, TokenSubject};
use tulle_core::names::port;

/// The credentials of tests that start the shipped binaries. A [`Mesh`](crate::mesh::Mesh) has
/// [`ControlPlaneFiles`](crate::control::ControlPlaneFiles).
pub struct Credentials {
    dir: PathBuf,
    pub anchor: CertificateAuthority,
    issuer: CertificateAuthority,
    token_keys: TokenKeys,
}

/// The files of a leaf certificate, of its key and of its chain.
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
        let token_keys = trust::create_token_keys().unwrap();
        for part in ["issuer", "token-keys", "leaves"] {
            fs::create_dir(dir.join(part)).unwrap();
        }
        for (name, text) in [
            ("anchors.pem", &anchor.certificate),
            ("issuer/crt.pem", &issuer.certificate),
            ("issuer/key.pem", &issuer.key),
            ("token-keys/tests.pem", &token_keys.public),
        ] {
            fs::write(dir.join(name), text).unwrap();
        }
        Self {
            dir: dir.to_owned(),
            anchor,
            issuer,
            token_keys,
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
    pub fn create_token_file(&self, service_account: &str) -> PathBuf {
        let subject = TokenSubject {
            service_account,
            namespace: NAMESPACE,
            lifetime: trust::TOKEN_LIFETIME,
        };
        let path = self.dir.join(format!("{service_account}.token"));
        fs::write(&path, trust::create_token(&self.token_keys.private, &subject).unwrap()).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        path
    }

    /// The environment of the sidecar of an external workload. Its control plane serves all its ports at one address.
    pub fn sidecar_variables(&self, name: &str, control_plane: Ipv4Addr, networks: &str) -> BTreeMap<String, String> {
        let service = |port: u16| SocketAddr::from((control_plane, port)).to_string();
        let workload = serde_json::json!({"ns": NAMESPACE, "external_workload": name}).to_string();
        let variables = [
            ("LOG", "warn,tulle_proxy=info".to_owned()),
            ("DESTINATION_SVC_ADDR", service(port::DESTINATION)),
            ("DESTINATION_SVC_NAME", control_plane_identity("linkerd-destination")),
            ("DESTINATION_CONTEXT", workload.clone()),
            ("DESTINATION_PROFILE_NETWORKS", networks.to_owned()),
            ("INBOUND_LISTEN_ADDR", format!("[::]:{}", port::INBOUND)),
            ("POLICY_SVC_ADDR", service(port::POLICY)),
            ("POLICY_SVC_NAME", control_plane_identity("linkerd-destination")),
            ("POLICY_WORKLOAD", workload),
            ("POLICY_CLUSTER_NETWORKS", networks.to_owned()),
            ("IDENTITY_SVC_ADDR", service(port::IDENTITY)),
            ("IDENTITY_SVC_NAME", control_plane_identity("linkerd-identity")),
            ("IDENTITY_LOCAL_NAME", identity(name)),
            ("IDENTITY_TRUST_ANCHORS", self.anchor.certificate.clone()),
            (
                "IDENTITY_TOKEN_FILE",
                self.create_token_file(name).display().to_string(),
            ),
        ];
        let prefixed = variables.map(|(variable, value)| (format!("LINKERD2_PROXY_{variable}"), value));
        prefixed.into()
    }

    /// A leaf certificate of this mesh.
    pub fn leaf(&self, name: &str, validity: Validity) -> Leaf {
        self.sign(&self.issuer, name, validity)
    }

    /// A leaf certificate for a service account of another trust domain, whose issuer has the same anchor.
    pub fn leaf_in_domain(&self, service_account: &str, trust_domain: &str) -> Leaf {
        let name = format!("identity.{CONTROL_NAMESPACE}.{trust_domain}");
        let issuer = trust::create_issuer(&name, trust::ISSUER_LIFETIME, &self.anchor).unwrap();
        self.sign(
            &issuer,
            &identity_in_domain(service_account, trust_domain),
            Validity::Current,
        )
    }

    /// A leaf certificate that CAs of another mesh signed. These CAs have the same names as those of this mesh.
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

/// The identity of a workload's service account.
pub fn identity(service_account: &str) -> String {
    identity_in_domain(service_account, TRUST_DOMAIN)
}

fn identity_in_domain(service_account: &str, trust_domain: &str) -> String {
    tulle_core::identity::service_account_identity(service_account, NAMESPACE, CONTROL_NAMESPACE, trust_domain)
}

pub fn control_plane_identity(service_account: &str) -> String {
    tulle_core::identity::service_account_identity(service_account, CONTROL_NAMESPACE, CONTROL_NAMESPACE, TRUST_DOMAIN)
}

/// The namespace of the service accounts of workloads.
pub const NAMESPACE: &str = "shop";
const CONTROL_NAMESPACE: &str = "linkerd";
const TRUST_DOMAIN: &str = "cluster.local";
const ROOT: &str = "root.linkerd.cluster.local";
const ISSUER: &str = "identity.linkerd.cluster.local";
