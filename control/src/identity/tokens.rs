//! Reviews of tokens: who somebody is, by what they can show.
//!
//! The answer has the form of Kubernetes' TokenReview, so that one path judges it wherever it comes from.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use rcgen::{PublicKeyData, SubjectPublicKeyInfo};
use serde::Deserialize;
use tracing::{info, warn};
use tulle_core::names::TOKEN_AUDIENCE;

use super::token_review::TokenReviews;

/// Who reviews tokens.
pub enum Reviewer {
    /// Join tokens, checked against public keys.
    StaticKeys(StaticKeys),
    /// Tokens of Kubernetes' service accounts.
    TokenReview(Box<TokenReviews>),
}

/// What a review says of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Review {
    /// Somebody known: `system:serviceaccount:<namespace>:<name>`.
    Authenticated {
        username: String,
        /// Of the service account, where it is an object.
        uid: Option<String>,
    },
    /// Nobody that the reviewer knows.
    Unauthenticated { reason: String },
    /// A token that proves nothing, whoever it belongs to.
    Invalid { reason: String },
}

/// The review itself failed; nothing is known of the token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ReviewError {
    #[error("no public key in {dir:?} to check join tokens with")]
    NoKeys { dir: PathBuf },
    #[error("asking the API server")]
    Api(#[source] Box<kube::Error>),
    #[error("the API server did not answer within {0:?}")]
    Timeout(Duration),
    #[error("this client address has too many tokens under review")]
    Busy,
    #[error("the cluster's issuer is another than {0:?}, of whose tokens one a second is reviewed")]
    UnknownIssuer(String),
}

/// Why token keys were not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeysError {
    #[error("reading token keys from {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path:?} holds no token keys; expected blocks of BEGIN PUBLIC KEY")]
    Pem {
        path: PathBuf,
        #[source]
        source: pem::PemError,
    },
    #[error("{path:?} holds a {tag}; expected only public keys, blocks of BEGIN PUBLIC KEY")]
    Tag { path: PathBuf, tag: String },
    #[error("{path:?} holds a key that is not ECDSA P-256")]
    Algorithm { path: PathBuf },
    #[error("{path:?} is empty; expected blocks of BEGIN PUBLIC KEY")]
    Empty { path: PathBuf },
}

/// Public keys from the `.pem` and `.pub` files of a directory, ECDSA P-256.
pub struct StaticKeys {
    dir: PathBuf,
    by_file: ArcSwap<KeysByFile>,
}

type KeysByFile = BTreeMap<PathBuf, Arc<[DecodingKey]>>;

impl Reviewer {
    /// Says whose token this is that a client at this address has sent, if it was made for us.
    pub(crate) async fn review(&self, token: &[u8], client: IpAddr) -> Result<Review, ReviewError> {
        match self {
            Self::StaticKeys(keys) => keys.review(token),
            Self::TokenReview(reviews) => reviews.review(token, client).await,
        }
    }

    /// Looks again at what may have changed.
    pub(crate) fn reload(&self) {
        match self {
            Self::StaticKeys(keys) => {
                if let Err(err) = keys.reload() {
                    warn!(error = &err as &dyn std::error::Error, "keeping the token keys");
                }
            }
            Self::TokenReview(_) => {}
        }
    }

    /// The directory whose changes matter, if there is one.
    pub(crate) fn dir(&self) -> Option<&Path> {
        match self {
            Self::StaticKeys(keys) => Some(&keys.dir),
            Self::TokenReview(_) => None,
        }
    }
}

impl StaticKeys {
    /// Reads the keys of a directory; bad files are reported and left out.
    ///
    /// # Errors
    /// A directory that cannot be read.
    pub fn open(dir: PathBuf) -> Result<Self, KeysError> {
        let keys = Self {
            dir,
            by_file: ArcSwap::default(),
        };
        keys.reload()?;
        Ok(keys)
    }

    /// Reads the directory again.
    ///
    /// The keys of a file that turned bad stay; those of a file that is gone go, for that is how a key is revoked.
    pub(crate) fn reload(&self) -> Result<(), KeysError> {
        let before = self.by_file.load();
        let mut after = KeysByFile::new();
        for path in pem_files(&self.dir)? {
            match read_keys(&path) {
                Ok(keys) => {
                    after.insert(path, keys);
                }
                Err(err) => {
                    warn!(error = &err as &dyn std::error::Error, "skipping a file of token keys");
                    if let Some(keys) = before.get(&path) {
                        after.insert(path, keys.clone());
                    }
                }
            }
        }
        if before.keys().ne(after.keys()) {
            info!(dir = %self.dir.display(), n_files = after.len(), "token keys changed");
        }
        self.by_file.store(Arc::new(after));
        Ok(())
    }

    fn review(&self, token: &[u8]) -> Result<Review, ReviewError> {
        let by_file = self.by_file.load();
        if by_file.is_empty() {
            return Err(ReviewError::NoKeys { dir: self.dir.clone() });
        }
        for key in by_file.values().flat_map(|keys| keys.iter()) {
            match jsonwebtoken::decode::<Claims>(token, key, &validation()) {
                Ok(token) => {
                    return Ok(Review::Authenticated {
                        username: token.claims.sub,
                        uid: None,
                    });
                }
                Err(err) if *err.kind() == ErrorKind::InvalidSignature => {}
                Err(err) => {
                    return Ok(Review::Invalid {
                        reason: refusal(err.kind()),
                    });
                }
            }
        }
        Ok(Review::Unauthenticated {
            reason: "it is signed by no key that we know".to_owned(),
        })
    }
}

#[derive(Deserialize)]
struct Claims {
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

/// Says what is wrong in words for whoever made the token.
fn refusal(kind: &ErrorKind) -> String {
    match kind {
        ErrorKind::ExpiredSignature => "it has expired".to_owned(),
        ErrorKind::ImmatureSignature => "it is not valid yet".to_owned(),
        ErrorKind::InvalidAudience => format!("it was made for another audience; expected {TOKEN_AUDIENCE}"),
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

/// How far the clocks of those who make tokens may be off.
const LEEWAY_SECS: u64 = 10;

#[cfg(test)]
mod tests {
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

    fn open(files: &[(&str, &str)]) -> (tempfile::TempDir, StaticKeys) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let keys = StaticKeys::open(dir.path().to_owned()).unwrap();
        (dir, keys)
    }

    #[test]
    fn a_join_token_says_who_it_was_made_for() {
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
                Review::Authenticated {
                    username: username.clone(),
                    uid: None,
                }
            );
            let mut claims = good();
            claims["aud"] = json!(["other", "identity.l5d.io"]);
            assert_eq!(
                reviewer.review(&sign(keys, &claims)).unwrap(),
                Review::Authenticated {
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
                matches!(&review, Review::Invalid { reason } if reason.contains(expected)),
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
    fn a_token_that_is_not_signed_by_our_keys_authenticates_nobody() {
        let (ours, theirs) = (trust::create_token_keys().unwrap(), trust::create_token_keys().unwrap());
        let (_dir, reviewer) = open(&[("one.pem", &ours.public)]);
        let review = reviewer.review(&sign(&theirs, &good())).unwrap();
        assert!(matches!(review, Review::Unauthenticated { .. }), "{review:?}");

        let hmac = jsonwebtoken::encode(
            &Header::new(Algorithm::HS256),
            &good(),
            &EncodingKey::from_secret(ours.public.as_bytes()),
        );
        // {"alg":"none"} and the good claims: the oldest trick there is.
        let none = b"eyJhbGciOiJub25lIn0.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6YTpiIn0.";
        for token in [hmac.unwrap().as_bytes(), none, b"", b"hello", b"a.b.c", b"\xff\x00."] {
            let review = reviewer.review(token).unwrap();
            assert!(matches!(review, Review::Invalid { .. }), "{review:?}");
        }
    }

    #[test]
    fn without_keys_nothing_can_be_said() {
        let (_dir, reviewer) = open(&[("README", "hello")]);
        assert!(matches!(reviewer.review(b"x"), Err(ReviewError::NoKeys { .. })));
        assert!(matches!(
            StaticKeys::open("/does/not/exist".into()),
            Err(KeysError::Read { .. })
        ));
    }

    #[test]
    fn keys_come_and_go_with_their_files_and_bad_files_change_nothing() {
        let (one, two) = (trust::create_token_keys().unwrap(), trust::create_token_keys().unwrap());
        let (dir, reviewer) = open(&[("one.pem", &one.public)]);
        let accepts =
            |keys: &TokenKeys| matches!(reviewer.review(&sign(keys, &good())), Ok(Review::Authenticated { .. }));
        fs::write(
            dir.path().join("two.pem"),
            "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        )
        .unwrap();
        fs::write(dir.path().join("one.pem"), "").unwrap();
        reviewer.reload().unwrap();
        assert!(accepts(&one) && !accepts(&two));
        fs::write(dir.path().join("two.pem"), &two.public).unwrap();
        fs::remove_file(dir.path().join("one.pem")).unwrap();
        reviewer.reload().unwrap();
        assert!(!accepts(&one) && accepts(&two));
        fs::remove_dir_all(dir.path()).unwrap();
        assert!(reviewer.reload().is_err());
        assert!(accepts(&two));
    }

    #[test]
    fn private_and_foreign_keys_are_not_token_keys() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.pem");
        let check = |text: &str, expected: &str| {
            fs::write(&path, text).unwrap();
            let err = read_keys(&path).err().unwrap().to_string();
            assert!(err.contains(expected), "{err}");
        };
        check(&trust::create_token_keys().unwrap().private, "holds a PRIVATE KEY");
        let rsa = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
        check(&rsa.public_key_pem(), "not ECDSA P-256");
        check("", "is empty");
    }
}
