//! Tokens of Kubernetes' service accounts, reviewed by the API server that made them.

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
use tulle_core::connections::network;
use tulle_core::drain::Watch;
use tulle_core::names::TOKEN_AUDIENCE;
use tulle_core::ready::Latch;

use super::authority::with_causes;
use super::claims::{Audience, Claims, ClaimsError, OWN_TOKEN};
use super::tokens::{Review, ReviewError};
use super::turns::{Busy, Turns};
use crate::tls::sha256;

/// Asks the API server whose a token is.
///
/// What a token says of itself is read first, and what was refused is remembered for a while: a garbage token costs the API
/// server no review, or one.
pub struct TokenReviews {
    reviews: Api<TokenReview>,
    turns: Turns,
    refused: Mutex<Refused>,
    issuers: Mutex<Issuers>,
    /// Where the token of this process for the API server is.
    own_token: PathBuf,
}

/// Tokens that the API server has refused, by their digest, the oldest first.
#[derive(Default)]
struct Refused {
    reviews: HashMap<String, Review>,
    order: VecDeque<(Instant, String)>,
}

/// Issuers of tokens that the API server has accepted, besides that of our own token.
#[derive(Default)]
struct Issuers {
    known: HashSet<String>,
    /// Client addresses of which a token of an unknown issuer was reviewed, and when they may have another.
    next_unknown_at: HashMap<IpAddr, Instant>,
}

/// Why tokens cannot be reviewed at all.
#[derive(Debug, thiserror::Error)]
enum AccessError {
    #[error("asking the API server whether this process may review tokens")]
    Ask(#[source] Box<kube::Error>),
    #[error("the API server did not say within {0:?} whether this process may review tokens")]
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
            turns: Turns::new(REVIEWS_AT_ONCE),
            refused: Mutex::default(),
            issuers: Mutex::default(),
            own_token: OWN_TOKEN.into(),
        }
    }

    /// Asks until the API server says that this process may review tokens, or the drain; the latch says why not, and goes
    /// then. Without reviews there are no certificates, and nothing is mended by an end of this process.
    pub async fn until_permitted(client: Client, latch: Latch, drain: Watch) {
        let mut retries = RETRIES.steps();
        let mut told = None;
        loop {
            let asked = tokio::select! {
                () = drain.signaled() => return,
                asked = Self::ask_permission(&client) => asked,
            };
            let Err(err) = asked else { return };
            let text = with_causes(&err);
            if told.as_ref() != Some(&text) {
                warn!(error = text, "not ready");
            }
            latch.explain(&text);
            told = Some(text);
            // Both only wait.
            tokio::select! {
                () = drain.signaled() => return,
                () = sleep(retries.next_delay()) => {}
            }
        }
    }

    /// # Errors
    /// An API server that says no, or nothing.
    async fn ask_permission(client: &Client) -> Result<(), AccessError> {
        let question = SelfSubjectAccessReview {
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
        let questions: Api<SelfSubjectAccessReview> = Api::all(client.clone());
        let answer = timeout(LIMIT, questions.create(&PostParams::default(), &question))
            .await
            .map_err(|_| AccessError::Timeout(LIMIT))?
            .map_err(|err| AccessError::Ask(Box::new(err)))?;
        match answer.status {
            Some(status) if status.allowed => Ok(()),
            status => Err(AccessError::Denied {
                reason: status
                    .and_then(|status| status.reason)
                    .filter(|reason| !reason.is_empty()),
            }),
        }
    }

    /// Says whose a token is that a client at this address has sent.
    pub(super) async fn review(&self, token: &[u8], client: IpAddr) -> Result<Review, ReviewError> {
        let invalid = |err: ClaimsError| Review::Invalid {
            reason: err.to_string(),
        };
        let claims = match Claims::parse(token) {
            Ok(claims) => claims,
            Err(err) => return Ok(invalid(err)),
        };
        let own = Claims::own(&self.own_token);
        let of_api_server = own.as_ref().map_or(&[][..], |own| &own.audiences);
        let audience = match claims.check(jsonwebtoken::get_current_timestamp(), of_api_server) {
            Ok(audience) => audience,
            Err(err) => return Ok(invalid(err)),
        };
        let digest = sha256(token);
        if let Some(review) = self.refused.lock().find(&digest) {
            return Ok(review);
        }
        let issuer = own.filter(|_| !claims.is_legacy()).map(|own| own.issuer);
        if issuer.is_some_and(|own| !self.issuers.lock().may_review(&claims.issuer, &own, client)) {
            return Err(ReviewError::UnknownIssuer(claims.issuer));
        }
        let Ok(token) = std::str::from_utf8(token) else {
            return Ok(invalid(ClaimsError::NotText));
        };
        let reviewing = self.turns.run(client, self.ask(token, audience));
        let review = timeout(LIMIT, reviewing)
            .await
            .map_err(|_| ReviewError::Timeout(LIMIT))?
            .map_err(|Busy| ReviewError::Busy)??;
        match &review {
            Review::Authenticated { .. } => self.issuers.lock().learn(claims.issuer),
            Review::Unauthenticated { .. } | Review::Invalid { .. } => self.refused.lock().keep(digest, &review),
        }
        Ok(review)
    }

    /// One review. For itself the API server knows the audience.
    async fn ask(&self, token: &str, audience: Audience) -> Result<Review, ReviewError> {
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
        let answer = answer.map_err(|err| ReviewError::Api(Box::new(err)))?;
        // No status is no authentication.
        Ok(judge(answer.status.unwrap_or_default()))
    }
}

impl Refused {
    fn find(&mut self, digest: &str) -> Option<Review> {
        self.forget(Instant::now());
        self.reviews.get(digest).cloned()
    }

    fn keep(&mut self, digest: String, review: &Review) {
        let now = Instant::now();
        if self.order.len() == MAX_REFUSED
            && let Some((_, oldest)) = self.order.pop_front()
        {
            self.reviews.remove(&oldest);
        }
        if self.reviews.insert(digest.clone(), review.clone()).is_none() {
            self.order.push_back((now, digest));
        }
    }

    fn forget(&mut self, now: Instant) {
        while let Some((since, digest)) = self.order.front()
            && now - *since >= REFUSED_FOR
        {
            self.reviews.remove(digest);
            self.order.pop_front();
        }
    }
}

impl Issuers {
    /// Whether a token of this issuer may be reviewed now. A cluster whose issuer was changed accepts tokens of the former one,
    /// and nobody tells us which that is: of unknown issuers one token a second and client address is reviewed, and so
    /// many of all clients, until one is accepted.
    fn may_review(&mut self, issuer: &str, own: &str, client: IpAddr) -> bool {
        if issuer == own || self.known.contains(issuer) {
            return true;
        }
        let now = Instant::now();
        let next = &mut self.next_unknown_at;
        next.retain(|_, at| *at > now);
        if next.len() >= MAX_UNKNOWN_ISSUERS {
            return false;
        }
        match next.entry(network(client)) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(now + UNKNOWN_ISSUER_INTERVAL);
                true
            }
        }
    }

    fn learn(&mut self, issuer: String) {
        if self.known.len() < MAX_ISSUERS {
            self.known.insert(issuer);
        }
    }
}

/// A review that authenticates somebody without naming an audience is by a server that knows none: the token is for the
/// server itself, and those are taken as well.
fn judge(status: TokenReviewStatus) -> Review {
    if let Some(reason) = status.error.filter(|reason| !reason.is_empty()) {
        return Review::Invalid { reason };
    }
    match (status.authenticated, status.user) {
        (Some(true), Some(user)) => Review::Authenticated {
            username: user.username.unwrap_or_default(),
            uid: user.uid,
        },
        _ => Review::Unauthenticated {
            reason: "the API server does not know it".to_owned(),
        },
    }
}

const RETRIES: Backoff = Backoff {
    min: Duration::from_millis(500),
    max: Duration::from_secs(15),
    jitter: 0.5,
};
/// Less than proxies wait for a certificate, so that they learn the reason.
const LIMIT: Duration = Duration::from_secs(10);
/// Reviews that the API server makes for us at a time.
const REVIEWS_AT_ONCE: usize = 16;
/// How long a refusal holds. A token may be refused that is accepted a moment later: replicas of the API server learn of a new pod
/// one after the other.
const REFUSED_FOR: Duration = Duration::from_secs(10);
const MAX_REFUSED: usize = 4096;
const UNKNOWN_ISSUER_INTERVAL: Duration = Duration::from_secs(1);
/// Tokens of unknown issuers that are reviewed in that time, each of another client address.
const MAX_UNKNOWN_ISSUERS: usize = 16;
/// Clusters have one, or two while they change it.
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

    /// An API server that accepts tokens with the subject `good`, and the tokens that it has reviewed.
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
    async fn garbage_costs_no_review_and_a_refused_token_costs_one() {
        let (reviews, reviewed) = start().await;
        for garbage in [&b"hello"[..], b"a.b.c", &[0xff; 9], &[b'a'; 100_000]] {
            let review = reviews.review(garbage, CLIENT).await.unwrap();
            assert!(matches!(review, Review::Invalid { .. }), "{review:?}");
        }
        assert!(reviewed.lock().is_empty());
        let bad = token(OWN_ISSUER, "bad", 0);
        for _ in 0..3 {
            let review = reviews.review(bad.as_bytes(), CLIENT).await.unwrap();
            assert!(matches!(review, Review::Invalid { .. }), "{review:?}");
        }
        assert_eq!(reviewed.lock().len(), 1);
        tokio::time::advance(REFUSED_FOR).await;
        reviews.review(bad.as_bytes(), CLIENT).await.unwrap();
        assert_eq!(reviewed.lock().len(), 2, "it may be good by now");
        for n in 0..2 {
            let good = token(OWN_ISSUER, "good", n);
            let review = reviews.review(good.as_bytes(), CLIENT).await.unwrap();
            assert!(matches!(review, Review::Authenticated { .. }), "{review:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn of_unknown_issuers_one_token_a_second_and_client_is_reviewed_until_one_is_accepted() {
        let (mut reviews, reviewed) = start().await;
        let own = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(own.path(), token(OWN_ISSUER, "us", 0)).unwrap();
        reviews.own_token = own.path().to_owned();
        let ask_as = async |client: IpAddr, issuer: &str, subject: &str, n| {
            let token = token(issuer, subject, n);
            reviews.review(token.as_bytes(), client).await
        };
        let ask = async |issuer: &str, subject: &str, n| ask_as(CLIENT, issuer, subject, n).await;
        let other = |last: u8| IpAddr::V4(Ipv4Addr::new(10, 0, 1, last));
        ask("https://elsewhere", "bad", 0).await.unwrap();
        for n in 1..100 {
            let refused = ask("https://elsewhere", "bad", n).await.unwrap_err();
            assert!(
                matches!(&refused, ReviewError::UnknownIssuer(issuer) if issuer == "https://elsewhere"),
                "{refused:?}"
            );
        }
        assert_eq!(reviewed.lock().len(), 1);
        ask(OWN_ISSUER, "good", 0).await.unwrap();
        // Others have their own share, as long as they are not too many.
        for last in 1..100 {
            let _ = ask_as(other(last), "https://elsewhere", "bad", 100 + u32::from(last)).await;
        }
        assert_eq!(reviewed.lock().len(), MAX_UNKNOWN_ISSUERS + 1);
        tokio::time::advance(UNKNOWN_ISSUER_INTERVAL).await;
        ask("https://elsewhere", "bad", 100).await.unwrap();
        let review = ask_as(other(1), "https://former", "good", 0).await.unwrap();
        assert!(
            matches!(review, Review::Authenticated { .. }),
            "a stranger took its share: {review:?}"
        );
        for n in 0..10 {
            let review = ask("https://former", "good", n).await.unwrap();
            assert!(matches!(review, Review::Authenticated { .. }), "{review:?}");
        }
    }

    #[test]
    fn refusals_that_are_remembered_are_bounded() {
        let mut refused = Refused::default();
        let review = Review::Invalid { reason: String::new() };
        for n in 0..=MAX_REFUSED {
            refused.keep(n.to_string(), &review);
        }
        assert_eq!(refused.reviews.len(), MAX_REFUSED);
        assert!(refused.find("0").is_none() && refused.find("1").is_some());
    }
}
