//! Creates credentials for meshes without another certificate authority: trust anchors, issuers, SPIFFE certificates and join
//! tokens.
//!
//! Existing files are never overwritten, and only the owner can read private keys.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jsonwebtoken::{Algorithm, EncodingKey, Header};
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CidrSubnet, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose, NameConstraints, SanType,
};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Serialize;
use time::OffsetDateTime;
use tulle_core::dns_names::is_dns_label;
use tulle_core::identity::Identity;
use tulle_core::issuer_constraints;
use tulle_core::names::TOKEN_AUDIENCE;
use x509_parser::certificate::X509Certificate;
use x509_parser::error::X509Error;

/// A certificate authority: its certificate and its private key, both PEM.
#[derive(Clone)]
pub struct CertificateAuthority {
    pub certificate: String,
    pub key: String,
}

/// A key pair that signs join tokens, both PEM.
#[derive(Clone)]
pub struct TokenKeys {
    /// Goes into the directory of token keys of the control plane.
    pub public: String,
    pub private: String,
}

#[derive(Clone, Debug)]
pub struct TokenSubject<'a> {
    pub service_account: &'a str,
    pub namespace: &'a str,
    pub lifetime: Duration,
}

/// A certificate that names a workload by a SPIFFE URI, with its key.
pub struct Svid {
    /// DER, the leaf first, then its issuers.
    pub chain: Vec<Vec<u8>>,
    /// PKCS#8 in DER.
    pub key: Vec<u8>,
    pub not_after: OffsetDateTime,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("{path:?} exists already, and credentials are never overwritten; choose another place or remove it")]
    Exists { path: PathBuf },
    #[error("writing {path:?}")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("reading {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{what} is not usable; expected PEM as created by this program")]
    Pem {
        what: &'static str,
        #[source]
        source: pem::Error,
    },
    #[error("parsing the authority's certificate")]
    Authority(#[source] X509Error),
    #[error("the authority's certificate may not sign others; expected an authority (CA, keyCertSign)")]
    NotAuthority,
    #[error(
        "the authority may sign leaf certificates only, no issuers (its path length is 0); expected an authority without this \
         limit"
    )]
    PathLength,
    #[error(
        "the subject of the authority cannot be copied unchanged; expected a subject that has each attribute once, and one \
         attribute for each relative distinguished name"
    )]
    Subject,
    #[error("the authority expired at {0}")]
    AuthorityExpired(OffsetDateTime),
    #[error("the authority's private key is not the key of its certificate")]
    AuthorityKey,
    #[error("{0:?} is not a SPIFFE identity; expected spiffe://<trust domain>/<path>")]
    Spiffe(String),
    #[error(
        "the authority may not sign a certificate for {identity}; create an issuer for this identity with create-issuer --identity"
    )]
    IdentityNotPermitted {
        identity: String,
        #[source]
        source: issuer_constraints::Error,
    },
    #[error(
        "{what} {value:?} is not a DNS label; expected at most 63 lower-case letters, digits and '-', with no '-' at the start \
         or end"
    )]
    Label { what: &'static str, value: String },
    #[error("a lifetime of {0:?} ends after the year 9999")]
    Lifetime(Duration),
    #[error("creating a certificate")]
    Certificate(#[source] rcgen::Error),
    #[error("signing a join token; expected an ECDSA P-256 key as PKCS#8 PEM")]
    Token(#[source] jsonwebtoken::errors::Error),
}

/// Creates a self-signed ECDSA P-256 certificate authority, the trust anchor of the mesh.
///
/// # Errors
/// Fails if a certificate cannot express the lifetime.
pub fn create_anchor(common_name: &str, lifetime: Duration) -> Result<CertificateAuthority, Error> {
    let key = KeyPair::generate().map_err(Error::Certificate)?;
    let params = ca_params(common_name, BasicConstraints::Unconstrained, not_after(lifetime)?);
    let certificate = params.self_signed(&key).map_err(Error::Certificate)?;
    Ok(CertificateAuthority {
        certificate: certificate.pem(),
        key: key.serialize_pem(),
    })
}

/// Creates an ECDSA P-256 issuer for the identity service, signed by a trust anchor.
///
/// It expires with its anchor at the latest, and can sign leaf certificates only.
///
/// # Errors
/// Fails if the anchor is not a certificate authority, may not sign other authorities, or has expired.
pub fn create_issuer(
    common_name: &str,
    lifetime: Duration,
    anchor: &CertificateAuthority,
) -> Result<CertificateAuthority, Error> {
    create_signed_authority(lifetime, anchor, |end| {
        Ok(ca_params(common_name, BasicConstraints::Constrained(0), end))
    })
}

/// Creates a single-identity issuer, for one workload outside of clusters. It signs only certificates of this SPIFFE identity.
///
/// Its name constraints exclude addresses and DNS names, which identify workloads of clusters. All X.509 verifiers
/// enforce these constraints. In addition, tulle's verifiers accept from such an issuer only certificates for the identity
/// that the issuer's own certificate names (`tulle_core::issuer_constraints`).
///
/// # Errors
/// Fails if the identity is not a SPIFFE URI with a path, or as [`create_issuer`].
pub fn create_single_identity_issuer(
    identity: &str,
    lifetime: Duration,
    anchor: &CertificateAuthority,
) -> Result<CertificateAuthority, Error> {
    let has_path = identity
        .strip_prefix("spiffe://")
        .is_some_and(|rest| rest.contains('/'));
    if !has_path || !matches!(identity.parse(), Ok(Identity::Uri(_))) {
        return Err(Error::Spiffe(identity.to_owned()));
    }
    create_signed_authority(lifetime, anchor, |end| {
        let mut params = ca_params(SINGLE_IDENTITY_ISSUER_NAME, BasicConstraints::Constrained(0), end);
        params.subject_alt_names = vec![SanType::URI(identity.try_into().map_err(Error::Certificate)?)];
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: Vec::new(),
            excluded_subtrees: vec![
                GeneralSubtree::DnsName(String::new()),
                GeneralSubtree::IpAddress(CidrSubnet::from_v4_prefix([0; 4], 0)),
                GeneralSubtree::IpAddress(CidrSubnet::from_v6_prefix([0; 16], 0)),
            ],
        });
        Ok(params)
    })
}

/// Creates an ECDSA P-256 authority below an anchor. It expires with the anchor at the latest.
fn create_signed_authority(
    lifetime: Duration,
    anchor: &CertificateAuthority,
    params: impl FnOnce(OffsetDateTime) -> Result<CertificateParams, Error>,
) -> Result<CertificateAuthority, Error> {
    let anchor = Signer::new(anchor)?;
    if anchor.path_length == Some(0) {
        return Err(Error::PathLength);
    }
    let key = KeyPair::generate().map_err(Error::Certificate)?;
    let params = params(not_after(lifetime)?.min(anchor.not_after))?;
    let certificate = anchor.sign(&params, &key)?;
    Ok(CertificateAuthority {
        certificate: certificate.pem(),
        key: key.serialize_pem(),
    })
}

/// Creates a certificate and a new ECDSA P-256 key for a workload with a SPIFFE identity.
///
/// The certificate expires with its authority at the latest.
///
/// # Errors
/// Fails if the identity is not a SPIFFE URI, or if the authority is invalid, has expired, or is for another workload.
pub fn create_svid(identity: &str, lifetime: Duration, authority: &CertificateAuthority) -> Result<Svid, Error> {
    if !matches!(identity.parse(), Ok(Identity::Uri(_))) {
        return Err(Error::Spiffe(identity.to_owned()));
    }
    let signer = Signer::new(authority)?;
    let key = KeyPair::generate().map_err(Error::Certificate)?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(identity.try_into().map_err(Error::Certificate)?)];
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyAgreement];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    params.not_before = OffsetDateTime::now_utc() - CLOCK_SKEW;
    params.not_after = not_after(lifetime)?.min(signer.not_after);
    let leaf = signer.sign(&params, &key)?;
    issuer_constraints::verify_issuers(leaf.der(), signer.chain.iter().map(AsRef::as_ref)).map_err(|source| {
        Error::IdentityNotPermitted {
            identity: identity.to_owned(),
            source,
        }
    })?;
    let issuers = signer.chain.iter().map(|certificate| certificate.to_vec());
    Ok(Svid {
        chain: std::iter::once(leaf.der().to_vec()).chain(issuers).collect(),
        key: key.serialize_der(),
        not_after: params.not_after,
    })
}

/// Creates an ECDSA P-256 key pair for join tokens.
///
/// # Errors
/// Fails if the system has no randomness.
pub fn create_token_keys() -> Result<TokenKeys, Error> {
    let key = KeyPair::generate().map_err(Error::Certificate)?;
    Ok(TokenKeys {
        public: key.public_key_pem(),
        private: key.serialize_pem(),
    })
}

/// Creates a join token: an ES256 JWT that the identity service accepts for a service account.
///
/// # Errors
/// Fails if a name is not valid for a service account, or if the key is invalid.
pub fn create_token(private_key: &str, subject: &TokenSubject<'_>) -> Result<String, Error> {
    for (what, value) in [
        ("service account", subject.service_account),
        ("namespace", subject.namespace),
    ] {
        if !is_dns_label(value) {
            return Err(Error::Label {
                what,
                value: value.to_owned(),
            });
        }
    }
    let key = EncodingKey::from_ec_pem(private_key.as_bytes()).map_err(Error::Token)?;
    let claims = Claims {
        sub: format!(
            "system:serviceaccount:{}:{}",
            subject.namespace, subject.service_account
        ),
        aud: [TOKEN_AUDIENCE],
        iat: OffsetDateTime::now_utc().unix_timestamp(),
        exp: not_after(subject.lifetime)?.unix_timestamp(),
    };
    jsonwebtoken::encode(&Header::new(Algorithm::ES256), &claims, &key).map_err(Error::Token)
}

impl CertificateAuthority {
    /// Reads an existing authority.
    ///
    /// # Errors
    /// Fails if a file cannot be read.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, Error> {
        Ok(Self {
            certificate: read(certificate)?,
            key: read(key)?,
        })
    }

    /// Writes both files, the key with mode 0600.
    ///
    /// # Errors
    /// Fails if one of the files exists; then none is written. Fails if writing fails; then an incomplete file can remain.
    pub fn write(&self, certificate: &Path, key: &Path) -> Result<(), Error> {
        write_pair((certificate, &self.certificate), (key, &self.key))
    }
}

impl TokenKeys {
    /// Writes both files, the private key with mode 0600.
    ///
    /// # Errors
    /// Fails if one of the files exists; then none is written. Fails if writing fails; then an incomplete file can remain.
    pub fn write(&self, public: &Path, private: &Path) -> Result<(), Error> {
        write_pair((public, &self.public), (private, &self.private))
    }
}

/// Writes a secret, such as a token, with mode 0600.
///
/// # Errors
/// Fails if the file exists or cannot be written.
pub fn write_secret(path: &Path, text: &str) -> Result<(), Error> {
    write_new(path, text, 0o600)
}

/// A parsed authority that can sign.
struct Signer {
    /// Its certificate, then its issuers.
    chain: Vec<CertificateDer<'static>>,
    issuer: Issuer<'static, KeyPair>,
    not_after: OffsetDateTime,
    /// Maximum number of further authorities between its certificate and a leaf. `None` if it is not limited.
    path_length: Option<u32>,
}

impl Signer {
    fn new(authority: &CertificateAuthority) -> Result<Self, Error> {
        let pem = |what| move |source| Error::Pem { what, source };
        let chain = CertificateDer::pem_slice_iter(authority.certificate.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .map_err(pem("the authority's certificate"))?;
        let Some(certificate) = chain.first() else {
            return Err(pem("the authority's certificate")(pem::Error::NoItemsFound));
        };
        let key =
            PrivateKeyDer::from_pem_slice(authority.key.as_bytes()).map_err(pem("the authority's private key"))?;
        let key = KeyPair::try_from(&key).map_err(Error::Certificate)?;
        let (not_after, path_length) = {
            let (_, parsed) =
                x509_parser::parse_x509_certificate(certificate).map_err(|err| Error::Authority(err.into()))?;
            if rcgen::PublicKeyData::subject_public_key_info(&key) != parsed.public_key().raw {
                return Err(Error::AuthorityKey);
            }
            if !is_authority(&parsed).map_err(Error::Authority)? {
                return Err(Error::NotAuthority);
            }
            let constraints = parsed.basic_constraints().map_err(Error::Authority)?;
            (
                parsed.validity().not_after.to_datetime(),
                constraints.and_then(|constraints| constraints.value.path_len_constraint),
            )
        };
        if not_after <= OffsetDateTime::now_utc() {
            return Err(Error::AuthorityExpired(not_after));
        }
        let issuer = Issuer::from_ca_cert_der(certificate, key).map_err(Error::Certificate)?;
        Ok(Self {
            chain,
            issuer,
            not_after,
            path_length,
        })
    }

    fn sign(&self, params: &CertificateParams, key: &KeyPair) -> Result<Certificate, Error> {
        let certificate = params.signed_by(key, &self.issuer).map_err(Error::Certificate)?;
        match self.chain.first() {
            Some(own) if issuer_name_matches(certificate.der(), own) => Ok(certificate),
            _ => Err(Error::Subject),
        }
    }
}

/// Returns whether a certificate may sign others: it is a CA, and its key usage, if it has one, contains keyCertSign.
pub(crate) fn is_authority(certificate: &X509Certificate<'_>) -> Result<bool, X509Error> {
    let usage = certificate.key_usage()?;
    Ok(certificate.is_ca() && usage.is_none_or(|usage| usage.value.key_cert_sign()))
}

/// Returns whether the issuer name of a certificate equals the subject of its issuer byte for byte, as peers compare them.
///
/// rcgen keeps one value per attribute, so the name differs if an attribute is repeated.
pub(crate) fn issuer_name_matches(certificate: &CertificateDer<'_>, issuer: &CertificateDer<'_>) -> bool {
    let parsed = [certificate, issuer].map(|der| x509_parser::parse_x509_certificate(der));
    let [Ok((_, certificate)), Ok((_, issuer))] = parsed else {
        return false;
    };
    certificate.issuer().as_raw() == issuer.subject().as_raw()
}

#[derive(Serialize)]
struct Claims {
    sub: String,
    aud: [&'static str; 1],
    iat: i64,
    exp: i64,
}

fn ca_params(common_name: &str, constraints: BasicConstraints, not_after: OffsetDateTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.is_ca = IsCa::Ca(constraints);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    params.not_before = OffsetDateTime::now_utc() - CLOCK_SKEW;
    params.not_after = not_after;
    params
}

fn not_after(lifetime: Duration) -> Result<OffsetDateTime, Error> {
    time::Duration::try_from(lifetime)
        .ok()
        .and_then(|lifetime| OffsetDateTime::now_utc().checked_add(lifetime))
        .ok_or(Error::Lifetime(lifetime))
}

fn read(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })
}

/// Writes two files. The key is written first, so that a complete certificate never exists without its key.
fn write_pair(public: (&Path, &str), private: (&Path, &str)) -> Result<(), Error> {
    for (path, _) in [public, private] {
        if path.exists() {
            return Err(Error::Exists { path: path.to_owned() });
        }
    }
    write_new(private.0, private.1, 0o600)?;
    write_new(public.0, public.1, 0o644).inspect_err(|_| {
        // Returns the first error. If the key cannot be removed, the next attempt fails because the key exists.
        let _ = fs::remove_file(private.0);
    })
}

fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), Error> {
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => Error::Exists { path: path.to_owned() },
        _ => Error::Write {
            path: path.to_owned(),
            source,
        },
    })
}

/// The common name of single-identity issuers. Their identity is in the subject alternative names.
const SINGLE_IDENTITY_ISSUER_NAME: &str = "tulle workload issuer";

/// Maximum clock skew of hosts that verify a new certificate.
const CLOCK_SKEW: Duration = Duration::from_secs(60);

/// Default lifetime of a trust anchor: 10 years.
pub const ANCHOR_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Default lifetime of an issuer: 1 year.
pub const ISSUER_LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// Default lifetime of a join token: 1 day.
pub const TOKEN_LIFETIME: Duration = Duration::from_secs(24 * 3600);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn an_issuer_ends_with_its_anchor_at_the_latest() {
        let anchor = create_anchor("root", Duration::from_secs(3600)).unwrap();
        let issuer = create_issuer("issuer", ISSUER_LIFETIME, &anchor).unwrap();
        let ends = [&anchor, &issuer].map(|authority| {
            let der = CertificateDer::from_pem_slice(authority.certificate.as_bytes()).unwrap();
            let (_, parsed) = x509_parser::parse_x509_certificate(&der).unwrap();
            assert!(parsed.is_ca());
            parsed.validity().not_after.timestamp()
        });
        assert_eq!(ends[0], ends[1]);
    }

    #[test]
    fn an_issuer_needs_an_anchor_with_its_own_key() {
        let (one, other) = (
            create_anchor("one", ANCHOR_LIFETIME).unwrap(),
            create_anchor("other", ANCHOR_LIFETIME).unwrap(),
        );
        let mixed = CertificateAuthority {
            key: other.key,
            ..one.clone()
        };
        assert!(matches!(
            create_issuer("x", ISSUER_LIFETIME, &mixed),
            Err(Error::AuthorityKey)
        ));
        let broken = CertificateAuthority {
            certificate: "hello".to_owned(),
            ..one
        };
        let err = create_issuer("x", ISSUER_LIFETIME, &broken).err().unwrap();
        assert!(
            err.to_string().starts_with("the authority's certificate is not usable"),
            "{err}"
        );
        assert!(matches!(create_anchor("x", Duration::MAX), Err(Error::Lifetime(_))));
    }

    #[test]
    fn an_authority_that_would_sign_invalid_chains_is_refused() {
        // A self-signed authority with unusual parameters.
        let authority_with = |customize: fn(&mut CertificateParams)| {
            let key = KeyPair::generate().unwrap();
            let mut params = ca_params(
                "root",
                BasicConstraints::Unconstrained,
                not_after(ANCHOR_LIFETIME).unwrap(),
            );
            customize(&mut params);
            CertificateAuthority {
                certificate: params.self_signed(&key).unwrap().pem(),
                key: key.serialize_pem(),
            }
        };
        let vm = "spiffe://root.test/vm";
        let issuer_error = |authority: &CertificateAuthority| {
            let errors = [
                create_issuer("x", ISSUER_LIFETIME, authority).err(),
                create_single_identity_issuer(vm, ISSUER_LIFETIME, authority).err(),
            ];
            let [one, other] = errors.map(|err| err.map(|err| err.to_string()));
            assert_eq!(one, other);
            one.unwrap_or_default()
        };
        let leaf_error = |authority: &CertificateAuthority| {
            let err = create_svid(vm, ISSUER_LIFETIME, authority).err();
            err.map(|err| err.to_string()).unwrap_or_default()
        };
        type Customize = fn(&mut CertificateParams);
        let refused: [(Customize, &str); 4] = [
            (|params| params.is_ca = IsCa::ExplicitNoCa, "may not sign others"),
            (|params| params.is_ca = IsCa::NoCa, "may not sign others"),
            (
                |params| params.key_usages = vec![KeyUsagePurpose::DigitalSignature],
                "may not sign others",
            ),
            (
                |params| {
                    params.distinguished_name.push(DnType::OrganizationName, "a");
                    let organization = DnType::CustomDnType(vec![2, 5, 4, 10]);
                    params.distinguished_name.push(organization, "b");
                },
                "cannot be copied unchanged",
            ),
        ];
        for (customize, expected) in refused {
            let authority = authority_with(customize);
            let errors = [issuer_error(&authority), leaf_error(&authority)];
            assert!(errors.iter().all(|err| err.contains(expected)), "{errors:?}");
        }
        let only_for_leaves = authority_with(|params| params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0)));
        let err = issuer_error(&only_for_leaves);
        assert!(err.contains("its path length is 0"), "{err}");
        assert_eq!(leaf_error(&only_for_leaves), "");
        let without_usages = authority_with(|params| params.key_usages = Vec::new());
        assert_eq!(issuer_error(&without_usages), "");
        assert_eq!(leaf_error(&without_usages), "");
    }

    #[test]
    fn a_spiffe_leaf_has_only_the_spiffe_identity() {
        let anchor = create_anchor("root", ANCHOR_LIFETIME).unwrap();
        let issuer = create_issuer("issuer", ISSUER_LIFETIME, &anchor).unwrap();
        let hour = Duration::from_secs(3600);
        let svid = create_svid("spiffe://root/vm", hour, &issuer).unwrap();
        let issuer_der = CertificateDer::from_pem_slice(issuer.certificate.as_bytes()).unwrap();
        assert_eq!(svid.chain[1], issuer_der.to_vec());
        let (_, leaf) = x509_parser::parse_x509_certificate(&svid.chain[0]).unwrap();
        let names = leaf.subject_alternative_name().unwrap().unwrap();
        assert_eq!(names.value.general_names.len(), 1);
        assert!(names.value.general_names[0].to_string().contains("spiffe://root/vm"));
        assert!(
            !leaf.is_ca() && leaf.validity().not_after.to_datetime() == svid.not_after.replace_nanosecond(0).unwrap()
        );
        for invalid in ["vm.example.com", "spiffe://", ""] {
            assert!(matches!(create_svid(invalid, hour, &issuer), Err(Error::Spiffe(_))));
        }
    }

    #[test]
    fn a_single_identity_issuer_needs_a_spiffe_identity_with_a_path() {
        let anchor = create_anchor("root", ANCHOR_LIFETIME).unwrap();
        let hour = Duration::from_secs(3600);
        for invalid in ["spiffe://root.test", "vm", "spiffe://"] {
            let made = create_single_identity_issuer(invalid, hour, &anchor);
            assert!(matches!(made, Err(Error::Spiffe(_))), "{invalid}");
        }
        let issuer = create_single_identity_issuer("spiffe://root.test/vm", hour, &anchor).unwrap();
        let other = create_svid("spiffe://root.test/other", hour, &issuer);
        assert!(matches!(other, Err(Error::IdentityNotPermitted { .. })));
    }

    #[test]
    fn keys_are_private_and_nothing_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let (crt, key) = (dir.path().join("ca.crt"), dir.path().join("ca.key"));
        let anchor = create_anchor("root", ANCHOR_LIFETIME).unwrap();
        anchor.write(&crt, &key).unwrap();
        assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(CertificateAuthority::read(&crt, &key).unwrap().key, anchor.key);
        let other = dir.path().join("other.key");
        let err = anchor.write(&crt, &other).unwrap_err();
        assert!(matches!(&err, Error::Exists { path } if *path == crt), "{err}");
        assert!(!other.exists());
        assert!(matches!(write_secret(&key, "x"), Err(Error::Exists { .. })));
    }

    #[test]
    fn tokens_are_created_only_for_names_that_are_dns_labels() {
        let keys = create_token_keys().unwrap();
        let token = |service_account, namespace| {
            let lifetime = TOKEN_LIFETIME;
            create_token(
                &keys.private,
                &TokenSubject {
                    service_account,
                    namespace,
                    lifetime,
                },
            )
        };
        assert_eq!(token("web", "shop").unwrap().split('.').count(), 3);
        for (sa, ns) in [("", "shop"), ("web", "a:b"), ("We", "shop"), ("-web", "shop")] {
            let err = token(sa, ns).unwrap_err();
            assert!(matches!(err, Error::Label { .. }), "{sa} {ns}");
            assert!(err.to_string().contains("lower-case letters"), "{err}");
        }
        let subject = TokenSubject {
            service_account: "web",
            namespace: "shop",
            lifetime: TOKEN_LIFETIME,
        };
        assert!(matches!(create_token(&keys.public, &subject), Err(Error::Token(_))));
    }
}
