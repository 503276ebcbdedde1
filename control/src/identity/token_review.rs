//! Reviews service account tokens of Kubernetes with the TokenReview API.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{Api, PostParams};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tracing::warn;
use tulle_core::backoff::Backoff;
use tulle_core::connections::client_network;
use tulle_core::drain::Watch;
use tulle_core::error_chain::ErrorChain;
use tulle_core::names::TOKEN_AUDIENCE;
use tulle_core::per_client_limiter::{Limits, PerClientLimiter, QueueFull};
use tulle_core::readiness::Latch;

use super::claims::{Audience, Claims, ClaimsError, OWN_TOKEN_PATH};
use super::token_review_result::{TokenReviewError, TokenReviewResult};
use crate::tls::sha256_hex;

/// Authenticates tokens with the API server.
///
/// Claims are checked first and rejections are cached for some seconds, so that an invalid token causes few reviews.
pub struct TokenReviews {
    reviews: Api<TokenReview>,
    limiter: PerClientLimiter,
    rejected: Mutex<RejectedTokenCache>,
    issuers: Mutex<TokenIssuers>,
    /// File with this process's own token for the API server.
    own_token: PathBuf,
}

/// Rejected tokens by their SHA-256, oldest first.
#[derive(Default)]
struct RejectedTokenCache {
    reviews: HashMap<String, TokenReviewResult>,
    order: VecDeque<(Instant, String)>,
}

/// Issuers of accepted tokens. The issuer of this process's own token is always known, whether it is in the set or not.
#[derive(Default)]
struct TokenIssuers {
    known: HashSet<String>,
    /// For each client network, the time at which its next token of an unknown issuer can be reviewed.
    next_unknown_at: HashMap<IpAddr, Instant>,
}

#[derive(Debug, thiserror::Error)]
enum AccessError {
    #[error("checking with the API server whether this process may review tokens")]
    Request(#[source] Box<kube::Error>),
    #[error("the API server did not respond within {0:?} to the check whether this process may review tokens")]
    Timeout(Duration),
    #[error(
        "this process may not review tokens{}; its role needs the rule apiGroups: [authentication.k8s.io], \
         resources: [tokenreviews], verbs: [create]",
        .reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default()
    )]
    Denied { reason: Option<String> },
}

impl TokenReviews {
    pub fn new(client: Client) -> Self {
        Self {
            reviews: Api::all(client),
            limiter: PerClientLimiter::new(REVIEW_LIMITS),
            rejected: Mutex::default(),
            issuers: Mutex::default(),
            own_token: OWN_TOKEN_PATH.into(),
        }
    }

    /// Waits until the API server permits this process to create TokenReviews, or until the drain. Meanwhile the latch keeps the
    /// process not ready and shows the reason. The process does not end, because a restart would not help.
    pub async fn wait_for_permission(client: Client, latch: Latch, drain: Watch) {
        let mut retries = PERMISSION_BACKOFF.start();
        let mut last_reason = None;
        loop {
            let permission = tokio::select! {
                () = drain.signaled() => return,
                permission = Self::check_permission(&client) => permission,
            };
            let Err(err) = permission else { return };
            let text = ErrorChain(&err).to_string();
            if last_reason.as_ref() != Some(&text) {
                warn!(
                    error = text,
                    "not ready: the permission to review tokens is not confirmed yet"
                );
            }
            latch.set_reason(&text);
            last_reason = Some(text);
            // Cancel-safe: both branches only wait.
            tokio::select! {
                () = drain.signaled() => return,
                () = sleep(retries.next_delay()) => {}
            }
        }
    }

    /// # Errors
    /// Fails if the API server denies access or does not respond.
    async fn check_permission(client: &Client) -> Result<(), AccessError> {
        let access_review = SelfSubjectAccessReview {
            metadata: ObjectMeta::default(),
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(ResourceAttributes {
                    group: Some("authentication.k8s.io".to_owned()),
                    version: Some("v1".to_owned()),
                    resource: Some("tokenreviews".to_owned()),
                    verb: Some("create".to_owned()),
                    ..ResourceAttributes::default()
                }),
                non_resource_attributes: None,
            },
            status: None,
        };
        let access_reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
        let answer = timeout(
            REVIEW_TIMEOUT,
            access_reviews.create(&PostParams::default(), &access_review),
        )
        .await
        .map_err(|_| AccessError::Timeout(REVIEW_TIMEOUT))?
        .map_err(|err| AccessError::Request(Box::new(err)))?;
        match answer.status {
            Some(status) if status.allowed => Ok(()),
            status => Err(AccessError::Denied {
                reason: status
                    .and_then(|status| status.reason)
                    .filter(|reason| !reason.is_empty()),
            }),
        }
    }

    /// Reviews a token. `client` is the address that sent it.
    pub(super) async fn review(&self, token: &[u8], client: IpAddr) -> Result<TokenReviewResult, TokenReviewError> {
        let invalid = |err: ClaimsError| TokenReviewResult::Invalid {
            reason: err.to_string(),
        };
        let claims = match Claims::parse(token) {
            Ok(claims) => claims,
            Err(err) => return Ok(invalid(err)),
        };
        let own_claims = Claims::read_own_token(&self.own_token);
        let api_server_audiences = own_claims.as_ref().map_or(&[][..], |own| &own.audiences);
        let audience = match claims.check(jsonwebtoken::get_current_timestamp(), api_server_audiences) {
            Ok(audience) => audience,
            Err(err) => return Ok(invalid(err)),
        };
        let digest = sha256_hex(token);
        if let Some(review) = self.rejected.lock().find(&digest) {
            return Ok(review);
        }
        // The token of this process shows the cluster's token issuer. The issuer of a legacy token is not compared, because it is
        // the same in all clusters.
        if let Some(own) = &own_claims
            && !claims.is_legacy()
            && !self.issuers.lock().may_review(&claims.issuer, &own.issuer, client)
        {
            return Err(TokenReviewError::UnknownIssuer(claims.issuer));
        }
        let Ok(token) = std::str::from_utf8(token) else {
            return Ok(invalid(ClaimsError::NotText));
        };
        let reviewing = self.limiter.run(client, 1, self.request_review(token, audience));
        let review = timeout(REVIEW_TIMEOUT, reviewing)
            .await
            .map_err(|_| TokenReviewError::Timeout(REVIEW_TIMEOUT))?
            .map_err(|QueueFull| TokenReviewError::Busy)??;
        match &review {
            TokenReviewResult::Authenticated { .. } => self.issuers.lock().add_accepted(claims.issuer),
            TokenReviewResult::Unauthenticated { .. } | TokenReviewResult::Invalid { .. } => {
                self.rejected.lock().insert(digest, &review)
            }
        }
        Ok(review)
    }

    /// Sends one TokenReview. Without audiences in the request, the API server expects one of its own audiences.
    async fn request_review(&self, token: &str, audience: Audience) -> Result<TokenReviewResult, TokenReviewError> {
        let review = TokenReview {
            metadata: ObjectMeta::default(),
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: match audience {
                    Audience::Identity => Some(vec![TOKEN_AUDIENCE.to_owned()]),
                    Audience::ApiServer => None,
                },
            },
            status: None,
        };
        let answer = self.reviews.create(&PostParams::default(), &review).await;
        let answer = answer.map_err(|err| TokenReviewError::Api(Box::new(err)))?;
        // A response without a status means that the token is not authenticated.
        Ok(evaluate_review(answer.status.unwrap_or_default()))
    }
}

impl RejectedTokenCache {
    fn find(&mut self, digest: &str) -> Option<TokenReviewResult> {
        self.remove_expired(Instant::now());
        self.reviews.get(digest).cloned()
    }

    fn insert(&mut self, digest: String, review: &TokenReviewResult) {
        let now = Instant::now();
        if self.order.len() == MAX_REJECTED_TOKENS
            && let Some((_, oldest)) = self.order.pop_front()
        {
            self.reviews.remove(&oldest);
        }
        if self.reviews.insert(digest.clone(), review.clone()).is_none() {
            self.order.push_back((now, digest));
        }
    }

    fn remove_expired(&mut self, now: Instant) {
        while let Some((since, digest)) = self.order.front()
            && now - *since >= REJECTED_TOKEN_TTL
        {
            self.reviews.remove(digest);
            self.order.pop_front();
        }
    }
}

impl TokenIssuers {
    /// Returns whether a token of this issuer can be reviewed now. After a change of `--service-account-issuer`, API servers
    /// still accept tokens of the old issuer, and no API lists it. Unknown issuers are therefore not rejected, but limited to
    /// one token a second for each client, and to [`MAX_UNKNOWN_ISSUER_REVIEWS`] over all clients, until a token of the issuer
    /// is accepted.
    fn may_review(&mut self, issuer: &str, own_issuer: &str, client: IpAddr) -> bool {
        if issuer == own_issuer || self.known.contains(issuer) {
            return true;
        }
        let now = Instant::now();
        let next_at = &mut self.next_unknown_at;
        next_at.retain(|_, at| *at > now);
        if next_at.len() >= MAX_UNKNOWN_ISSUER_REVIEWS {
            return false;
        }
        match next_at.entry(client_network(client)) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(now + UNKNOWN_ISSUER_INTERVAL);
                true
            }
        }
    }

    fn add_accepted(&mut self, issuer: String) {
        if self.known.len() < MAX_ISSUERS {
            self.known.insert(issuer);
        }
    }
}

/// Converts the status of a TokenReview. `status.audiences` is not required: an API server without audience support
/// omits it. The token is then for the API server itself, which is accepted too.
fn evaluate_review(status: TokenReviewStatus) -> TokenReviewResult {
    if let Some(mut reason) = status.error.filter(|reason| !reason.is_empty()) {
        // The reason is cached, and can contain the token.
        reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
        return TokenReviewResult::Invalid { reason };
    }
    match (status.authenticated, status.user) {
        (Some(true), Some(user)) => TokenReviewResult::Authenticated {
            username: user.username.unwrap_or_default(),
            uid: user.uid,
        },
        _ => TokenReviewResult::Unauthenticated {
            reason: "the API server did not accept it".to_owned(),
        },
    }
}

const PERMISSION_BACKOFF: Backoff = Backoff {
    min: Duration::from_millis(500),
    max: Duration::from_secs(15),
    jitter: 0.5,
};
/// Maximum time of a review. It is less than the timeout of proxies for a certificate, so that they receive the error.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// At most 16 reviews run at a time. Of each client network, one review is in the global queue or runs. Up to 63 more wait for it
/// to end.
const REVIEW_LIMITS: Limits = Limits {
    total_weight: 16,
    queued_or_running_per_network: 1,
    requests_per_network: 64,
};
/// Time for which a rejection is cached. It is short, because a rejected token can become valid: replicas of the API server learn
/// of a new pod at different times.
const REJECTED_TOKEN_TTL: Duration = Duration::from_secs(10);
const MAX_REJECTED_TOKENS: usize = 4096;
const MAX_REASON_BYTES: usize = 1024;
const UNKNOWN_ISSUER_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum reviews of tokens of unknown issuers per [`UNKNOWN_ISSUER_INTERVAL`], each of another client.
const MAX_UNKNOWN_ISSUER_REVIEWS: usize = 16;
/// Maximum number of known issuers. A cluster has one issuer, or two while its issuer changes.
const MAX_ISSUERS: usize = 16;

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    use http_body_util::BodyExt as _;
    use jsonwebtoken::{EncodingKey, Header};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const OWN_ISSUER: &str = "https://kubernetes.default.svc";

    /// Starts an API server that accepts tokens with the subject `good`. The second value lists the reviewed tokens.
    async fn start() -> (TokenReviews, Arc<Mutex<Vec<String>>>) {
        let reviewed = Arc::<Mutex<Vec<String>>>::default();
        let seen = reviewed.clone();
        let service = tower::service_fn(move |req: http::Request<Body>| {
            let seen = seen.clone();
            async move {
                let (head, body) = req.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let mut answer: Value = serde_json::from_slice(&body).unwrap();
                answer["status"] = json!({"allowed": true});
                if head.uri.path().ends_with("/tokenreviews") {
                    let token = answer["spec"]["token"].as_str().unwrap().to_owned();
                    let claims: Value = jsonwebtoken::dangerous::insecure_decode_claims(&token).unwrap();
                    answer["status"] = match claims["sub"] == "good" {
                        true => json!({"authenticated": true, "user": {"username": "good"}}),
                        false => json!({"authenticated": false, "error": "invalid bearer token"}),
                    };
                    seen.lock().push(token);
                }
                Ok::<_, io::Error>(http::Response::new(Body::from(serde_json::to_vec(&answer).unwrap())))
            }
        });
        let mut reviews = TokenReviews::new(Client::new(service, "default"));
        reviews.own_token = "/does/not/exist".into();
        (reviews, reviewed)
    }

    fn token(issuer: &str, subject: &str, n: u32) -> String {
        let claims = json!({
            "iss": issuer, "sub": subject, "aud": TOKEN_AUDIENCE, "exp": jsonwebtoken::get_current_timestamp() + 600, "n": n,
        });
        jsonwebtoken::encode(&Header::default(), &claims, &EncodingKey::from_secret(b"x")).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn malformed_tokens_are_not_reviewed_and_a_rejected_token_is_reviewed_once() {
        let (reviews, reviewed) = start().await;
        for malformed in [&b"hello"[..], b"a.b.c", &[0xff; 9], &[b'a'; 100_000]] {
            let review = reviews.review(malformed, CLIENT).await.unwrap();
            assert!(matches!(review, TokenReviewResult::Invalid { .. }), "{review:?}");
        }
        assert!(reviewed.lock().is_empty());
        let bad = token(OWN_ISSUER, "bad", 0);
        for _ in 0..3 {
            let review = reviews.review(bad.as_bytes(), CLIENT).await.unwrap();
            assert!(matches!(review, TokenReviewResult::Invalid { .. }), "{review:?}");
        }
        assert_eq!(reviewed.lock().len(), 1);
        tokio::time::advance(REJECTED_TOKEN_TTL).await;
        reviews.review(bad.as_bytes(), CLIENT).await.unwrap();
        assert_eq!(reviewed.lock().len(), 2, "the cached rejection has expired");
        for n in 0..2 {
            let good = token(OWN_ISSUER, "good", n);
            let review = reviews.review(good.as_bytes(), CLIENT).await.unwrap();
            assert!(matches!(review, TokenReviewResult::Authenticated { .. }), "{review:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_of_unknown_issuers_are_rate_limited_until_one_is_accepted() {
        let (mut reviews, reviewed) = start().await;
        let own = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(own.path(), token(OWN_ISSUER, "us", 0)).unwrap();
        reviews.own_token = own.path().to_owned();
        let submit_as = async |client: IpAddr, issuer: &str, subject: &str, n| {
            let token = token(issuer, subject, n);
            reviews.review(token.as_bytes(), client).await
        };
        let submit = async |issuer: &str, subject: &str, n| submit_as(CLIENT, issuer, subject, n).await;
        let other = |last: u8| IpAddr::V4(Ipv4Addr::new(10, 0, 1, last));
        submit("https://elsewhere", "bad", 0).await.unwrap();
        for n in 1..100 {
            let refused = submit("https://elsewhere", "bad", n).await.unwrap_err();
            assert!(
                matches!(&refused, TokenReviewError::UnknownIssuer(issuer) if issuer == "https://elsewhere"),
                "{refused:?}"
            );
        }
        assert_eq!(reviewed.lock().len(), 1);
        submit(OWN_ISSUER, "good", 0).await.unwrap();
        // Other clients have their own rate, up to the global limit.
        for last in 1..100 {
            let _ = submit_as(other(last), "https://elsewhere", "bad", 100 + u32::from(last)).await;
        }
        assert_eq!(reviewed.lock().len(), MAX_UNKNOWN_ISSUER_REVIEWS + 1);
        tokio::time::advance(UNKNOWN_ISSUER_INTERVAL).await;
        submit("https://elsewhere", "bad", 100).await.unwrap();
        let review = submit_as(other(1), "https://former", "good", 0).await.unwrap();
        assert!(
            matches!(review, TokenReviewResult::Authenticated { .. }),
            "another client has its own limit: {review:?}"
        );
        for n in 0..10 {
            let review = submit("https://former", "good", n).await.unwrap();
            assert!(matches!(review, TokenReviewResult::Authenticated { .. }), "{review:?}");
        }
    }

    #[test]
    fn the_cache_of_rejected_tokens_is_bounded() {
        let mut refused = RejectedTokenCache::default();
        let review = TokenReviewResult::Invalid { reason: String::new() };
        for n in 0..=MAX_REJECTED_TOKENS {
            refused.insert(n.to_string(), &review);
        }
        assert_eq!(refused.reviews.len(), MAX_REJECTED_TOKENS);
        assert!(refused.find("0").is_none() && refused.find("1").is_some());
    }
}
