//! AdmissionReviews in `v1` and `v1beta1`: parses one and responds in the same version.

use json_patch::Patch;
use k8s_openapi::ByteString;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionReview};
use serde::{Deserialize, Serialize};

/// An object, its operation and its user.
pub type Request = AdmissionRequest<DynamicObject>;

/// The decision about an object, which becomes the `response` of the AdmissionReview.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdmissionResponse {
    denial_reason: Option<String>,
    patch: Option<Patch>,
    warnings: Vec<String>,
}

/// A parsed review.
pub(crate) struct ParsedReview {
    pub(crate) id: ReviewId,
    /// An object that cannot be decoded is denied in a regular response.
    pub(crate) request: Result<Box<Request>, serde_json::Error>,
}

/// The parts of the review that the response repeats.
#[derive(Clone, Debug)]
pub(crate) struct ReviewId {
    api_version: String,
    pub(crate) uid: String,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum InvalidReview {
    #[error("the body is not an AdmissionReview with a request")]
    Decode(#[source] serde_json::Error),
    #[error("{api_version} {kind} is not supported; expected admission.k8s.io/v1 or v1beta1 AdmissionReview")]
    Version { api_version: String, kind: String },
}

impl AdmissionResponse {
    pub fn allow() -> Self {
        Self::default()
    }

    /// Denies the object. The API server returns the reason to the requester.
    pub fn deny(reason: impl Into<String>) -> Self {
        Self {
            denial_reason: Some(reason.into()),
            ..Self::default()
        }
    }

    /// Patches the object. An empty patch is not sent.
    #[must_use]
    pub fn patch(mut self, patch: Patch) -> Self {
        self.patch = (!patch.0.is_empty()).then_some(patch);
        self
    }

    /// Adds a warning for the requester. The API server truncates warnings to 256 characters.
    #[must_use]
    pub fn warn(mut self, warning: impl Into<String>) -> Self {
        self.warnings.push(warning.into());
        self
    }

    /// `None` if the object is allowed.
    pub fn denial_reason(&self) -> Option<&str> {
        self.denial_reason.as_deref()
    }

    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The AdmissionReview of the response, as JSON.
    pub(crate) fn to_json(&self, id: &ReviewId) -> Result<Vec<u8>, serde_json::Error> {
        let patch = self.patch.as_ref().map(serde_json::to_vec).transpose()?;
        serde_json::to_vec(&SerializedReview {
            kind: KIND,
            api_version: &id.api_version,
            response: SerializedResponse {
                uid: &id.uid,
                allowed: self.denial_reason.is_none(),
                status: self.denial_reason.as_deref().map(|message| Status {
                    status: "Failure",
                    message,
                    code: 400,
                }),
                patch_type: patch.as_ref().map(|_| "JSONPatch"),
                patch: patch.map(ByteString),
                warnings: &self.warnings,
            },
        })
    }
}

impl ParsedReview {
    /// # Errors
    /// Fails if the body is not a review with a request.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, InvalidReview> {
        // Skips the object without recursion, so that the id of an object with too deep nesting is known.
        let outline: RawReview = serde_json::from_slice(body).map_err(InvalidReview::Decode)?;
        if outline.kind != KIND || !VERSIONS.contains(&outline.api_version.as_str()) {
            return Err(InvalidReview::Version {
                api_version: outline.api_version,
                kind: outline.kind,
            });
        }
        let full = serde_json::from_slice::<AdmissionReview<DynamicObject>>(body);
        let request = full.and_then(|review| {
            let missing = || serde::de::Error::missing_field("request");
            review.request.map(Box::new).ok_or_else(missing)
        });
        Ok(Self {
            id: ReviewId {
                api_version: outline.api_version,
                uid: outline.request.uid,
            },
            request,
        })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawReview {
    api_version: String,
    kind: String,
    request: RawRequest,
}

#[derive(Deserialize)]
struct RawRequest {
    uid: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SerializedReview<'a> {
    kind: &'static str,
    api_version: &'a str,
    response: SerializedResponse<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SerializedResponse<'a> {
    uid: &'a str,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    /// Base64.
    patch: Option<ByteString>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    warnings: &'a [String],
}

#[derive(Serialize)]
struct Status<'a> {
    status: &'static str,
    message: &'a str,
    code: u16,
}

const KIND: &str = "AdmissionReview";
const VERSIONS: [&str; 2] = ["admission.k8s.io/v1", "admission.k8s.io/v1beta1"];
