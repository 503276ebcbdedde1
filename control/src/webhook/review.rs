//! AdmissionReviews, `v1` and `v1beta1`: reading one, and answering in its own version.

use json_patch::Patch;
use k8s_openapi::ByteString;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionReview};
use serde::{Deserialize, Serialize};

/// What the API server asks about: an object, who sends it, and what for.
pub type Request = AdmissionRequest<DynamicObject>;

/// What becomes of an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    denied: Option<String>,
    patch: Option<Patch>,
    warnings: Vec<String>,
}

/// A review that asks something.
pub(crate) struct Review {
    pub(crate) id: Id,
    /// An object that cannot be read is refused, and the review is answered all the same.
    pub(crate) request: Result<Box<Request>, serde_json::Error>,
}

/// What an answer repeats.
#[derive(Clone, Debug)]
pub(crate) struct Id {
    api_version: String,
    pub(crate) uid: String,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReviewError {
    #[error("the body is not an AdmissionReview with a request")]
    Decode(#[source] serde_json::Error),
    #[error("{api_version} {kind} is not understood; expected admission.k8s.io/v1 or v1beta1 AdmissionReview")]
    Version { api_version: String, kind: String },
}

impl Answer {
    pub fn allow() -> Self {
        Self::default()
    }

    /// Refuses the object; the API server shows the reason to whoever sent it.
    pub fn deny(reason: impl Into<String>) -> Self {
        Self {
            denied: Some(reason.into()),
            ..Self::default()
        }
    }

    /// Changes the object; an empty patch changes nothing and is not sent.
    #[must_use]
    pub fn patch(mut self, patch: Patch) -> Self {
        self.patch = (!patch.0.is_empty()).then_some(patch);
        self
    }

    /// Tells whoever sent the object, who gets no more than 256 characters to see.
    #[must_use]
    pub fn warn(mut self, warning: impl Into<String>) -> Self {
        self.warnings.push(warning.into());
        self
    }

    /// Why the object is refused, if it is.
    pub fn denied(&self) -> Option<&str> {
        self.denied.as_deref()
    }

    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The review that carries this answer, as JSON.
    pub(crate) fn to_json(&self, id: &Id) -> Result<Vec<u8>, serde_json::Error> {
        let patch = self.patch.as_ref().map(serde_json::to_vec).transpose()?;
        serde_json::to_vec(&ReviewOut {
            kind: KIND,
            api_version: &id.api_version,
            response: Response {
                uid: &id.uid,
                allowed: self.denied.is_none(),
                status: self.denied.as_deref().map(|message| Status {
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

impl Review {
    /// # Errors
    /// A body that is no review, or asks nothing.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ReviewError> {
        // Skips the object without recursion, so that an object that is nested too deep leaves us its id.
        let outline: Outline = serde_json::from_slice(body).map_err(ReviewError::Decode)?;
        if outline.kind != KIND || !VERSIONS.contains(&outline.api_version.as_str()) {
            return Err(ReviewError::Version {
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
            id: Id {
                api_version: outline.api_version,
                uid: outline.request.uid,
            },
            request,
        })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Outline {
    api_version: String,
    kind: String,
    request: OutlineRequest,
}

#[derive(Deserialize)]
struct OutlineRequest {
    uid: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReviewOut<'a> {
    kind: &'static str,
    api_version: &'a str,
    response: Response<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Response<'a> {
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
