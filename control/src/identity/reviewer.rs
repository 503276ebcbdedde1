//! Token reviews: authenticate a client by its token.
//!
//! Results have the form of the Kubernetes TokenReview, for join tokens too.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use rcgen::{PublicKeyData, SubjectPublicKeyInfo};
use serde::Deserialize;
use tracing::{info, warn};
use tulle_core::metrics::Registry;
use tulle_core::names::TOKEN_AUDIENCE;

use super::token_review::TokenReviews;
use super::token_review_result::{TokenReviewError, TokenReviewResult};
use crate::tls::unserved_files::UnservedFiles;

pub enum Reviewer {
    /// Join tokens, verified with public keys.
    JoinTokenKeys(JoinTokenKeys),
    /// Service account tokens of Kubernetes.
    TokenReview(Box<TokenReviews>),
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeysError {
    #[error("reading token keys from {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path:?} holds a malformed PEM block; expected blocks of BEGIN PUBLIC KEY")]
    Pem {
        path: PathBuf,
        #[source]
        source: pem::PemError,
    },
    #[error("{path:?} holds a {tag}; expected only public keys, blocks of BEGIN PUBLIC KEY")]
    Tag { path: PathBuf, tag: String },
    #[error("{path:?} holds a key that is not ECDSA P-256")]
    Algorithm { path: PathBuf },
    #[error("{path:?} holds no token keys; expected blocks of BEGIN PUBLIC KEY")]
    Empty { path: PathBuf },
}

/// ECDSA P-256 public keys from the `.pem` and `.pub` files of a directory.
pub struct JoinTokenKeys {
    dir: PathBuf,
    by_file: ArcSwap<KeysByFile>,
    unserved: UnservedFiles,
}

type KeysByFile = BTreeMap<PathBuf, Arc<[DecodingKey]>>;

impl Reviewer {
    /// Reviews a token. `client` is the address that sent it.
    pub(crate) async fn review(&self, token: &[u8], client: IpAddr) -> Result<TokenReviewResult, TokenReviewError> {
        match self {
            Self::JoinTokenKeys(keys) => keys.review(token),
            Self::TokenReview(reviews) => reviews.review(token, client).await,
        }
    }

    /// Reloads keys from files.
    pub(crate) fn reload(&self) {
        match self {
            Self::JoinTokenKeys(keys) => {
                if let Err(err) = keys.reload() {
                    warn!(
                        error = &err as &dyn std::error::Error,
                        "reading token keys failed; the previous keys stay"
                    );
                }
            }
            Self::TokenReview(_) => {}
        }
    }

    /// The directory that must be watched for changes, if there is one.
    pub(crate) fn watched_dir(&self) -> Option<&Path> {
        match self {
            Self::JoinTokenKeys(keys) => Some(&keys.dir),
            Self::TokenReview(_) => None,
        }
    }
}

impl JoinTokenKeys {
    /// Reads the keys of a directory. Invalid files are logged, counted in `unserved_configuration`, and skipped.
    ///
    /// # Errors
    /// Fails if the directory cannot be read.
    pub fn open(dir: PathBuf, registry: &Registry) -> Result<Self, KeysError> {
        let keys = Self {
            dir,
            by_file: ArcSwap::default(),
            unserved: UnservedFiles::new(registry, "token keys"),
        };
        keys.reload()?;
        Ok(keys)
    }

    /// Reads the directory again.
    ///
    /// If a file is invalid, its previous keys stay. Removing a file revokes its keys.
    pub(crate) fn reload(&self) -> Result<(), KeysError> {
        let before = self.by_file.load();
        let (mut after, mut invalid) = (KeysByFile::new(), Vec::new());
        let paths = pem_files(&self.dir).inspect_err(|_| self.unserved.set([&*self.dir]))?;
        for path in paths {
            match read_keys(&path) {
                Ok(keys) => {
                    after.insert(path, keys);
                }
                Err(err) => {
                    warn!(
                        error = &err as &dyn std::error::Error,
                        "reading a token key file failed; its previous keys stay"
                    );
                    if let Some(keys) = before.get(&path) {
                        after.insert(path.clone(), keys.clone());
                    }
                    invalid.push(path);
                }
            }
        }
        self.unserved.set(invalid.iter().map(PathBuf::as_path));
        // Only file names are compared: a changed key in a file is not logged.
        if before.keys().ne(after.keys()) {
            info!(dir = %self.dir.display(), n_files = after.len(), "the set of token key files changed");
        }
        self.by_file.store(Arc::new(after));
        Ok(())
    }

    fn review(&self, token: &[u8]) -> Result<TokenReviewResult, TokenReviewError> {
        let by_file = self.by_file.load();
        if by_file.is_empty() {
            return Err(TokenReviewError::NoKeys { dir: self.dir.clone() });
        }
        for key in by_file.values().flat_map(|keys| keys.iter()) {
            match jsonwebtoken::decode::<JoinTokenClaims>(token, key, &validation()) {
                Ok(token) => {
                    return Ok(TokenReviewResult::Authenticated {
                        username: token.claims.sub,
                        uid: None,
                    });
                }
                Err(err) if *err.kind() == ErrorKind::InvalidSignature => {}
                Err(err) => {
                    return Ok(TokenReviewResult::Invalid {
                        reason: rejection_reason(err.kind()),
                    });
                }
            }
        }
        Ok(TokenReviewResult::Unauthenticated {
            reason: "it is not signed by a known key".to_owned(),
        })
    }
}

#[derive(Deserialize)]
struct JoinTokenClaims {
    #[serde(default)]
    sub: String,
}

fn validation() -> Validation {
    let mut validation = Validation::new(Algorithm::ES256);
    validation.set_audience(&[TOKEN_AUDIENCE]);
    validation.set_required_spec_claims(&["exp", "aud", "sub"]);
    validation.validate_nbf = true;
    validation.leeway = LEEWAY_SECS;
    validation
}

/// The reason why a token is rejected, for the error that its sender gets.
fn rejection_reason(kind: &ErrorKind) -> String {
    match kind {
        ErrorKind::ExpiredSignature => "it has expired".to_owned(),
        ErrorKind::ImmatureSignature => "it is not valid yet".to_owned(),
        ErrorKind::InvalidAudience => format!("it has another audience; expected {TOKEN_AUDIENCE}"),
        ErrorKind::InvalidAlgorithm => "it has another algorithm; expected ES256".to_owned(),
        ErrorKind::MissingRequiredClaim(claim) | ErrorKind::InvalidClaimFormat(claim) => {
            format!("it has no readable {claim}")
        }
        _ => "it is not a JSON Web Token".to_owned(),
    }
}

fn pem_files(dir: &Path) -> Result<Vec<PathBuf>, KeysError> {
    let failed = |source| KeysError::Read {
        path: dir.to_owned(),
        source,
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == OsStr::new("pem") || extension == OsStr::new("pub"))
        {
            paths.push(path);
        }
    }
    Ok(paths)
}

fn read_keys(path: &Path) -> Result<Arc<[DecodingKey]>, KeysError> {
    let text = fs::read(path).map_err(|source| KeysError::Read {
        path: path.to_owned(),
        source,
    })?;
    let blocks = pem::parse_many(text).map_err(|source| KeysError::Pem {
        path: path.to_owned(),
        source,
    })?;
    if blocks.is_empty() {
        return Err(KeysError::Empty { path: path.to_owned() });
    }
    let keys = blocks.iter().map(|block| {
        if block.tag() != "PUBLIC KEY" {
            return Err(KeysError::Tag {
                path: path.to_owned(),
                tag: block.tag().to_owned(),
            });
        }
        match SubjectPublicKeyInfo::from_der(block.contents()) {
            Ok(key) if key.algorithm() == &rcgen::PKCS_ECDSA_P256_SHA256 => {
                Ok(DecodingKey::from_ec_der(key.der_bytes()))
            }
            _ => Err(KeysError::Algorithm { path: path.to_owned() }),
        }
    });
    keys.collect()
}

/// Maximum clock skew of token issuers, in seconds.
const LEEWAY_SECS: u64 = 10;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jsonwebtoken::{EncodingKey, Header};
    use serde_json::{Value, json};

    use super::*;
    use crate::trust::{self, TokenKeys, TokenSubject};

    fn now() -> u64 {
        jsonwebtoken::get_current_timestamp()
    }

    fn sign(keys: &TokenKeys, claims: &Value) -> Vec<u8> {
        let key = EncodingKey::from_ec_pem(keys.private.as_bytes()).unwrap();
        jsonwebtoken::encode(&Header::new(Algorithm::ES256), claims, &key)
            .unwrap()
            .into_bytes()
    }

    fn good() -> Value {
        json!({"sub": "system:serviceaccount:shop:web", "aud": "identity.l5d.io", "exp": now() + 60})
    }

    fn open(files: &[(&str, &str)]) -> (tempfile::TempDir, JoinTokenKeys) {
        let (dir, keys, _) = open_with_registry(files);
        (dir, keys)
    }

    fn open_with_registry(files: &[(&str, &str)]) -> (tempfile::TempDir, JoinTokenKeys, Registry) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let registry = Registry::new();
        let keys = JoinTokenKeys::open(dir.path().to_owned(), &registry).unwrap();
        (dir, keys, registry)
    }

    #[test]
    fn a_join_token_authenticates_its_subject() {
        let (one, two) = (trust::create_token_keys().unwrap(), trust::create_token_keys().unwrap());
        let (_dir, reviewer) = open(&[("one.pem", &one.public), ("two.pub", &two.public), ("README", "hello")]);
        let username = "system:serviceaccount:shop:web".to_owned();
        let subject = TokenSubject {
            service_account: "web",
            namespace: "shop",
            lifetime: Duration::from_secs(60),
        };
        for keys in [&one, &two] {
            let token = trust::create_token(&keys.private, &subject).unwrap();
            let review = reviewer.review(token.as_bytes()).unwrap();
            assert_eq!(
                review,
                TokenReviewResult::Authenticated {
                    username: username.clone(),
                    uid: None,
                }
            );
            let mut claims = good();
            claims["aud"] = json!(["other", "identity.l5d.io"]);
            assert_eq!(
                reviewer.review(&sign(keys, &claims)).unwrap(),
                TokenReviewResult::Authenticated {
                    username: username.clone(),
                    uid: None,
                }
            );
        }
    }

    #[test]
    fn a_token_with_a_wrong_claim_is_refused_with_the_reason() {
        let keys = trust::create_token_keys().unwrap();
        let (_dir, reviewer) = open(&[("one.pem", &keys.public)]);
        let check = |claim: &str, value: Value, expected: &str| {
            let mut claims = good();
            match value {
                Value::Null => {
                    claims.as_object_mut().unwrap().remove(claim);
                }
                value => claims[claim] = value,
            }
            let review = reviewer.review(&sign(&keys, &claims)).unwrap();
            assert!(
                matches!(&review, TokenReviewResult::Invalid { reason } if reason.contains(expected)),
                "{review:?} has no {expected}"
            );
        };
        check("aud", json!("kubernetes"), "another audience");
        check("aud", Value::Null, "no readable aud");
        check("exp", json!(now() - 60), "expired");
        check("exp", Value::Null, "no readable exp");
        check("exp", json!("tomorrow"), "no readable exp");
        check("nbf", json!(now() + 60), "not valid yet");
        check("sub", Value::Null, "no readable sub");
        check("sub", json!(7), "not a JSON Web Token");
    }

    #[test]
    fn a_token_signed_by_an_unknown_key_is_not_authenticated() {
        let (ours, theirs) = (trust::create_token_keys().unwrap(), trust::create_token_keys().unwrap());
        let (_dir, reviewer) = open(&[("one.pem", &ours.public)]);
        let review = reviewer.review(&sign(&theirs, &good())).unwrap();
        assert!(
            matches!(review, TokenReviewResult::Unauthenticated { .. }),
            "{review:?}"
        );

        let hmac = jsonwebtoken::encode(
            &Header::new(Algorithm::HS256),
            &good(),
            &EncodingKey::from_secret(ours.public.as_bytes()),
        );
        // {"alg":"none"} with valid claims: a known attack.
        let none = b"eyJhbGciOiJub25lIn0.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6YTpiIn0.";
        for token in [hmac.unwrap().as_bytes(), none, b"", b"hello", b"a.b.c", b"\xff\x00."] {
            let review = reviewer.review(token).unwrap();
            assert!(matches!(review, TokenReviewResult::Invalid { .. }), "{review:?}");
        }
    }

    #[test]
    fn without_keys_a_review_fails() {
        let (_dir, reviewer) = open(&[("README", "hello")]);
        assert!(matches!(reviewer.review(b"x"), Err(TokenReviewError::NoKeys { .. })));
        assert!(matches!(
            JoinTokenKeys::open("/does/not/exist".into(), &Registry::new()),
            Err(KeysError::Read { .. })
        ));
    }

    #[test]
    fn keys_are_added_and_removed_with_their_files_and_invalid_files_change_nothing() {
        let (one, two) = (trust::create_token_keys().unwrap(), trust::create_token_keys().unwrap());
        let (dir, reviewer, registry) = open_with_registry(&[("one.pem", &one.public)]);
        let is_counted = |file: &str| {
            registry
                .render()
                .contains(&format!("{file}\",field=\"token keys\"}} 1"))
        };
        let accepts = |keys: &TokenKeys| {
            matches!(
                reviewer.review(&sign(keys, &good())),
                Ok(TokenReviewResult::Authenticated { .. })
            )
        };
        fs::write(
            dir.path().join("two.pem"),
            "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        )
        .unwrap();
        fs::write(dir.path().join("one.pem"), "").unwrap();
        reviewer.reload().unwrap();
        assert!(accepts(&one) && !accepts(&two));
        assert!(is_counted("one.pem") && is_counted("two.pem"));
        fs::write(dir.path().join("two.pem"), &two.public).unwrap();
        fs::remove_file(dir.path().join("one.pem")).unwrap();
        reviewer.reload().unwrap();
        assert!(!accepts(&one) && accepts(&two));
        assert!(!is_counted("one.pem") && !is_counted("two.pem"));
        fs::remove_dir_all(dir.path()).unwrap();
        assert!(reviewer.reload().is_err());
        assert!(accepts(&two));
        assert!(is_counted(&dir.path().display().to_string()));
    }

    #[test]
    fn private_keys_and_keys_of_other_algorithms_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.pem");
        let check = |text: &str, expected: &str| {
            fs::write(&path, text).unwrap();
            let err = read_keys(&path).err().unwrap().to_string();
            assert!(err.contains(expected), "{err}");
        };
        check(&trust::create_token_keys().unwrap().private, "holds a PRIVATE KEY");
        let p384 = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
        check(&p384.public_key_pem(), "not ECDSA P-256");
        check("", "holds no token keys");
    }
}
