//! Results of token reviews.

use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TokenReviewResult {
    /// The token belongs to `system:serviceaccount:<namespace>:<name>`.
    Authenticated {
        username: String,
        /// UID of the ServiceAccount object, if there is one.
        uid: Option<String>,
    },
    /// The reviewer does not know who signed the token, for example because another cluster issued it.
    Unauthenticated { reason: String },
    /// The token is malformed, expired, not valid yet, or for another audience, or the API server reported an error for it. Some of
    /// these tokens can be accepted later.
    Invalid { reason: String },
}

/// The review failed, so there is no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum TokenReviewError {
    #[error("no public key in {dir:?}; expected keys that verify join tokens")]
    NoKeys { dir: PathBuf },
    #[error("requesting a token review from the API server")]
    Api(#[source] Box<kube::Error>),
    #[error("no response of the API server within {0:?}, including the wait for other reviews")]
    Timeout(Duration),
    #[error("the client's network has too many tokens under review")]
    Busy,
    #[error(
        "{0:?} is not the cluster's token issuer; tokens of unknown issuers are reviewed at most once a second for each client"
    )]
    UnknownIssuer(String),
}
