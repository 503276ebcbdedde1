//! The unverified claims of a service account token.
//!
//! A token whose claims cannot be accepted is rejected without a review, to save the API server work.

use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tulle_core::names::TOKEN_AUDIENCE;

/// Claims before verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claims {
    pub(crate) issuer: String,
    pub(crate) audiences: Vec<String>,
    /// Seconds since 1970.
    expires_at: Option<u64>,
}

/// The audience of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// The identity service.
    Identity,
    /// The API server. A pod without a token for the identity service sends its token for the API server.
    ApiServer,
}

/// Why a token is rejected without a review.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ClaimsError {
    #[error("it is not text")]
    NotText,
    #[error("invalid bearer token, not a JSON Web Token of a service account")]
    NotJwt,
    #[error("it is longer than {MAX_TOKEN_BYTES} bytes")]
    TooLong,
    #[error("service account token has expired")]
    Expired,
    #[error("it has no exp claim")]
    NoExpiry,
    #[error("token audiences {found:?} do not contain {TOKEN_AUDIENCE:?}")]
    Audience { found: Vec<String> },
}

#[derive(Deserialize)]
struct RawClaims {
    #[serde(default)]
    iss: String,
    #[serde(default)]
    aud: Value,
    exp: Option<u64>,
}

impl Claims {
    pub(crate) fn parse(token: &[u8]) -> Result<Self, ClaimsError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(ClaimsError::TooLong);
        }
        if std::str::from_utf8(token).is_err() {
            return Err(ClaimsError::NotText);
        }
        let raw: RawClaims = jsonwebtoken::dangerous::insecure_decode_claims(token).map_err(|_| ClaimsError::NotJwt)?;
        let text = |value: Value| match value {
            Value::String(text) => Ok(text),
            _ => Err(ClaimsError::NotJwt),
        };
        let audiences = match raw.aud {
            Value::Null => Vec::new(),
            Value::Array(audiences) => audiences.into_iter().map(text).collect::<Result<_, _>>()?,
            audience => vec![text(audience)?],
        };
        Ok(Self {
            issuer: raw.iss,
            audiences,
            expires_at: raw.exp,
        })
    }

    /// Checks expiry and audience, which needs no key. If `api_server_audiences` is empty, the audiences of the API server are
    /// unknown, and the review decides.
    pub(crate) fn check(&self, now: u64, api_server_audiences: &[String]) -> Result<Audience, ClaimsError> {
        let is_legacy = self.is_legacy();
        match self.expires_at {
            Some(expires_at) if expires_at.saturating_add(LEEWAY_SECS) < now => return Err(ClaimsError::Expired),
            None if !is_legacy => return Err(ClaimsError::NoExpiry),
            _ => {}
        }
        if self.audiences.iter().any(|audience| audience == TOKEN_AUDIENCE) {
            return Ok(Audience::Identity);
        }
        let is_for_api_server = self
            .audiences
            .iter()
            .any(|audience| api_server_audiences.contains(audience));
        match is_legacy || is_for_api_server || api_server_audiences.is_empty() {
            true => Ok(Audience::ApiServer),
            false => Err(ClaimsError::Audience {
                found: self.audiences.clone(),
            }),
        }
    }

    /// Returns whether the token comes from a Secret of the kind that Kubernetes created before 1.24. Such a token has no expiry
    /// and no audience.
    pub(crate) fn is_legacy(&self) -> bool {
        self.issuer == LEGACY_ISSUER
    }

    /// Reads the claims of this process's own token for the API server, if Kubernetes mounts one. They contain the cluster's
    /// token issuer and the audiences of its API server.
    pub(crate) fn read_own_token(path: &Path) -> Option<Self> {
        let token = fs::read(path).ok()?;
        Self::parse(token.trim_ascii()).ok()
    }
}

/// Path at which Kubernetes mounts the token of a pod for the API server.
pub(super) const OWN_TOKEN_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";
const LEGACY_ISSUER: &str = "kubernetes/serviceaccount";
/// Maximum size of a token. Tokens of service accounts have one or two KiB.
const MAX_TOKEN_BYTES: usize = 16 * 1024;
/// Maximum clock skew, in seconds.
const LEEWAY_SECS: u64 = 10;

#[cfg(test)]
mod tests {
    use jsonwebtoken::{EncodingKey, Header};
    use serde_json::json;

    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn claims(claims: &Value) -> Result<Claims, ClaimsError> {
        let token = jsonwebtoken::encode(&Header::default(), claims, &EncodingKey::from_secret(b"x")).unwrap();
        Claims::parse(token.as_bytes())
    }

    #[test]
    fn a_token_is_reviewed_only_if_it_could_be_accepted() {
        let api_server = ["https://kubernetes".to_owned()];
        let check = |given: Value, expected: Result<Audience, ClaimsError>| {
            let checked = claims(&given).and_then(|claims| claims.check(NOW, &api_server));
            assert_eq!(checked, expected, "{given}");
        };
        let audience = |found: &[&str]| ClaimsError::Audience {
            found: found.iter().map(|&name| name.to_owned()).collect(),
        };
        let later = NOW + 60;
        check(json!({"aud": "identity.l5d.io", "exp": later}), Ok(Audience::Identity));
        check(
            json!({"aud": ["x", "identity.l5d.io"], "exp": later}),
            Ok(Audience::Identity),
        );
        check(
            json!({"aud": ["https://kubernetes"], "exp": later}),
            Ok(Audience::ApiServer),
        );
        check(json!({"iss": "kubernetes/serviceaccount"}), Ok(Audience::ApiServer));
        check(json!({"aud": ["vault"], "exp": later}), Err(audience(&["vault"])));
        check(json!({"exp": later}), Err(audience(&[])));
        check(json!({"aud": "identity.l5d.io"}), Err(ClaimsError::NoExpiry));
        check(
            json!({"aud": "identity.l5d.io", "exp": NOW - 60}),
            Err(ClaimsError::Expired),
        );
        check(json!({"aud": 7, "exp": later}), Err(ClaimsError::NotJwt));
        check(json!({"aud": [7], "exp": later}), Err(ClaimsError::NotJwt));
        check(json!([]), Err(ClaimsError::NotJwt));
        let unknown = claims(&json!({"aud": "vault", "exp": later})).unwrap().check(NOW, &[]);
        assert_eq!(unknown, Ok(Audience::ApiServer), "the review decides");
    }

    #[test]
    fn malformed_tokens_are_refused_with_the_reason() {
        for (token, expected) in [
            (&b"hello"[..], ClaimsError::NotJwt),
            (b"a.b.c", ClaimsError::NotJwt),
            (b"", ClaimsError::NotJwt),
            (b"\xff\xff", ClaimsError::NotText),
            (&[b'a'; MAX_TOKEN_BYTES + 1], ClaimsError::TooLong),
        ] {
            assert_eq!(Claims::parse(token), Err(expected));
        }
    }
}
