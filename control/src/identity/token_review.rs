//! Tokens of Kubernetes' service accounts, reviewed by the API server that made them.

use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::time::timeout;
use tulle_core::names::TOKEN_AUDIENCE;

use super::tokens::{Review, ReviewError};

/// Asks the API server whose a token is.
pub struct TokenReviews {
    reviews: Api<TokenReview>,
}

/// Why tokens cannot be reviewed at all.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
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
    /// A reviewer that may review.
    ///
    /// # Errors
    /// An API server that says no, or nothing: without reviews there are no certificates, and the pod should say so.
    pub async fn open(client: Client) -> Result<Self, AccessError> {
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
            Some(status) if status.allowed => Ok(Self {
                reviews: Api::all(client),
            }),
            status => Err(AccessError::Denied {
                reason: status
                    .and_then(|status| status.reason)
                    .filter(|reason| !reason.is_empty()),
            }),
        }
    }

    pub(super) async fn review(&self, token: &[u8]) -> Result<Review, ReviewError> {
        let Ok(token) = std::str::from_utf8(token) else {
            return Ok(Review::Invalid {
                reason: "it is not text".to_owned(),
            });
        };
        let mut status = self.ask(token, Some(TOKEN_AUDIENCE)).await?;
        // Pods without a projected token send the one for the API server itself, which has other audiences.
        if status.error.as_ref().is_some_and(|err| err.contains("token audiences")) {
            status = self.ask(token, None).await?;
        }
        Ok(judge(status))
    }

    /// One review. Without an audience the API server looks for its own.
    async fn ask(&self, token: &str, audience: Option<&str>) -> Result<TokenReviewStatus, ReviewError> {
        let review = TokenReview {
            metadata: ObjectMeta::default(),
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: audience.map(|audience| vec![audience.to_owned()]),
            },
            status: None,
        };
        let answer = timeout(LIMIT, self.reviews.create(&PostParams::default(), &review))
            .await
            .map_err(|_| ReviewError::Timeout(LIMIT))?
            .map_err(|err| ReviewError::Api(Box::new(err)))?;
        // No status is no authentication.
        Ok(answer.status.unwrap_or_default())
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

/// Less than proxies wait for a certificate, so that they learn the reason.
const LIMIT: Duration = Duration::from_secs(10);
