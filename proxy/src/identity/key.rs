//! The key pair of this process, and its certificate signing request.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rcgen::{
    CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType, KeyPair, PKCS_ECDSA_P256_SHA256,
    PublicKeyData, SanType,
};
use rustls::pki_types::{CertificateSigningRequestDer, PrivatePkcs8KeyDer};
use tulle_core::identity::Identity;
use zeroize::Zeroizing;

/// An ECDSA P-256 key and its signing request. The key is never printed, and its memory is overwritten when it is dropped.
pub(crate) struct Key {
    pub(super) pkcs8: Zeroizing<PrivatePkcs8KeyDer<'static>>,
    /// PKCS#10 in DER.
    pub(super) csr: Vec<u8>,
    origin: KeyOrigin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyOrigin {
    Generated,
    /// Read from files. The proxy does not replace such a key.
    Files,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum KeyError {
    #[error("creating a key pair and signing request for {id} failed")]
    Generate {
        id: Identity,
        #[source]
        source: rcgen::Error,
    },
    #[error("{} cannot be read", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the directory {} does not exist", .path.display())]
    NoDirectory { path: PathBuf },
    #[error("{} exists, but {} does not; both or neither must exist", .found.display(), .missing.display())]
    IncompletePair { found: PathBuf, missing: PathBuf },
    #[error("{} cannot be used, expected an ECDSA P-256 key in PKCS#8 DER", .path.display())]
    BadKey {
        path: PathBuf,
        #[source]
        source: rcgen::Error,
    },
    #[error("{} cannot be used, expected a PKCS#10 signing request in DER", .path.display())]
    BadSigningRequest {
        path: PathBuf,
        #[source]
        source: rcgen::Error,
    },
    #[error("the signing request {} is for another key than {}", .csr.display(), .key.display())]
    Mismatch { key: PathBuf, csr: PathBuf },
}

impl Key {
    /// Loads the files in `dir` if they exist, otherwise creates a key pair. Injectors name a directory that is empty unless
    /// another program writes the files.
    ///
    /// # Errors
    /// The directory does not exist, one of the two files is missing, or they cannot be used.
    pub(crate) fn load(dir: Option<&Path>, id: &Identity) -> Result<Self, KeyError> {
        let Some(dir) = dir else { return Self::generate(id) };
        let (key_path, csr_path) = (dir.join(KEY_FILE), dir.join(CSR_FILE));
        match (read(&key_path)?, read(&csr_path)?) {
            (None, None) if dir.is_dir() => Self::generate(id),
            (None, None) => Err(KeyError::NoDirectory { path: dir.to_owned() }),
            (Some(_), None) => Err(KeyError::IncompletePair {
                found: key_path,
                missing: csr_path,
            }),
            (None, Some(_)) => Err(KeyError::IncompletePair {
                found: csr_path,
                missing: key_path,
            }),
            (Some(key_der), Some(csr_der)) => Self::from_files(key_der, csr_der, key_path, csr_path),
        }
    }

    pub(crate) fn generate(id: &Identity) -> Result<Self, KeyError> {
        let failed = |source| KeyError::Generate { id: id.clone(), source };
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, id.as_str());
        params.subject_alt_names = vec![match id {
            Identity::Dns(name) => SanType::DnsName((&**name).try_into().map_err(failed)?),
            Identity::Uri(uri) => SanType::URI((&**uri).try_into().map_err(failed)?),
        }];
        let request = params.serialize_request(&pair).map_err(failed)?;
        Ok(Self {
            pkcs8: Zeroizing::new(PrivatePkcs8KeyDer::from(pair.serialize_der())),
            csr: request.der().to_vec(),
            origin: KeyOrigin::Generated,
        })
    }

    /// Replaces a generated key with a new one; a key from files stays.
    pub(super) fn renew(&mut self, id: &Identity) -> Result<(), KeyError> {
        if self.origin == KeyOrigin::Generated {
            *self = Self::generate(id)?;
        }
        Ok(())
    }

    /// Checks that key and signing request match; otherwise each certificate request would fail later.
    fn from_files(key_der: Vec<u8>, csr_der: Vec<u8>, key_path: PathBuf, csr_path: PathBuf) -> Result<Self, KeyError> {
        let pkcs8 = Zeroizing::new(PrivatePkcs8KeyDer::from(key_der));
        let pair = KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8, &PKCS_ECDSA_P256_SHA256).map_err(|source| {
            KeyError::BadKey {
                path: key_path.clone(),
                source,
            }
        })?;
        let parsed = CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(&csr_der[..]))
            .map_err(|source| KeyError::BadSigningRequest {
                path: csr_path.clone(),
                source,
            })?;
        if parsed.public_key.der_bytes() != pair.der_bytes() {
            return Err(KeyError::Mismatch {
                key: key_path,
                csr: csr_path,
            });
        }
        Ok(Self {
            pkcs8,
            csr: csr_der,
            origin: KeyOrigin::Files,
        })
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, KeyError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(KeyError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

const KEY_FILE: &str = "key.p8";
const CSR_FILE: &str = "csr.der";
