//! AdmissionReviews in `v1` and `v1beta1`: parses one and responds in the same version.

use std::net::IpAddr;

use bytes::Bytes;
use json_patch::Patch;
use k8s_openapi::ByteString;
use kube::core::{DynamicObject, GroupVersionKind};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The parts of a review that handlers read. The previous version of the object is not included.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    pub kind: GroupVersionKind,
    pub namespace: Option<String>,
    #[serde(default)]
    pub dry_run: bool,
    /// Absent in the review of a deletion.
    pub object: Option<DynamicObject>,
    /// The client that sent the review; `None` within this process.
    #[serde(skip)]
    pub client: Option<IpAddr>,
}

/// The parts of a review that handlers read if its object cannot be decoded.
#[derive(Debug, Deserialize)]
pub struct RequestHead {
    pub kind: GroupVersionKind,
    pub namespace: Option<String>,
    object: Option<ObjectHead>,
    /// The client that sent the review; `None` within this process.
    #[serde(skip)]
    pub client: Option<IpAddr>,
}

#[derive(Debug, Deserialize)]
struct ObjectHead {
    metadata: Option<MetadataHead>,
}

#[derive(Debug, Deserialize)]
struct MetadataHead {
    annotations: Option<AnnotationsHead>,
}

#[derive(Debug, Deserialize)]
struct AnnotationsHead {
    #[serde(rename = "linkerd.io/inject")]
    inject: Option<String>,
}

/// The decision about an object, which becomes the `response` of the AdmissionReview.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdmissionResponse {
    denial_reason: Option<String>,
    patch: Option<Patch>,
    warnings: Vec<String>,
}

/// A review whose object is not decoded yet.
pub(crate) struct ReviewOutline {
    pub(crate) id: ReviewId,
    object_size: JsonSize,
    /// The JSON objects in `spec`, or all if `spec` is not unique.
    n_spec_objects: usize,
    body: Bytes,
}

/// The size of a JSON text, from which the memory of its decoded form is derived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct JsonSize {
    n_bytes: usize,
    n_objects: usize,
    /// Upper bound of the number of values, without the outermost one and the first value of each object: a `,` or a `[` precedes
    /// each of the others.
    n_values: usize,
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

impl RequestHead {
    /// Returns the value of the annotation `linkerd.io/inject` of the object.
    pub fn inject_annotation(&self) -> Option<&str> {
        let metadata = self.object.as_ref()?.metadata.as_ref()?;
        metadata.annotations.as_ref()?.inject.as_deref()
    }
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

    /// Returns the reason of a denial. `None` if the object is allowed.
    pub fn denial_reason(&self) -> Option<&str> {
        self.denial_reason.as_deref()
    }

    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the AdmissionReview of the response, as JSON.
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

impl ReviewOutline {
    /// # Errors
    /// Fails if the body is not a review with a request.
    pub(crate) fn parse(body: Bytes) -> Result<Self, InvalidReview> {
        // Skips the object without recursion, so that the id of an object with too deep nesting is known.
        let outline: RawReview<'_> = serde_json::from_slice(&body).map_err(InvalidReview::Decode)?;
        if outline.kind != KIND || !VERSIONS.contains(&outline.api_version.as_str()) {
            return Err(InvalidReview::Version {
                api_version: outline.api_version,
                kind: outline.kind,
            });
        }
        let object = outline.request.object.map(RawValue::get);
        let object_size = object.map(JsonSize::measure).unwrap_or_default();
        let n_spec_objects = match object.map(serde_json::from_str::<RawObject<'_>>) {
            None => 0,
            Some(Ok(RawObject { spec })) => spec.map_or(0, |spec| JsonSize::measure(spec.get()).n_objects),
            // For example two members `spec`.
            Some(Err(_)) => object_size.n_objects,
        };
        Ok(Self {
            id: ReviewId {
                api_version: outline.api_version,
                uid: outline.request.uid,
            },
            object_size,
            n_spec_objects,
            body,
        })
    }

    /// Returns the maximum memory of the decoded object in bytes, if a handler decodes each JSON object in its `spec` to types
    /// of this size.
    pub(crate) fn decoded_bytes(&self, typed_bytes_per_spec_object: usize) -> usize {
        let JsonSize {
            n_bytes,
            n_objects,
            n_values,
        } = self.object_size;
        n_bytes * COPIES_OF_TEXT
            + n_objects * BYTES_PER_JSON_OBJECT
            + self.n_spec_objects * typed_bytes_per_spec_object
            + n_values * BYTES_PER_JSON_VALUE
    }

    /// # Errors
    /// Fails if the object cannot be decoded. The handler then gets only the head ([`Self::decode_head`]), and the client still
    /// gets an AdmissionReview.
    pub(crate) fn decode(&self) -> Result<Box<Request>, serde_json::Error> {
        serde_json::from_slice(&self.body).map(|DecodedReview { request }| request)
    }

    /// Decodes only the head, without recursion, and in little memory.
    ///
    /// # Errors
    /// Fails if the head itself cannot be decoded.
    pub(crate) fn decode_head(&self) -> Result<RequestHead, serde_json::Error> {
        serde_json::from_slice(&self.body).map(|DecodedHead { request }| request)
    }
}

impl JsonSize {
    fn measure(text: &str) -> Self {
        let mut size = Self {
            n_bytes: text.len(),
            ..Self::default()
        };
        let mut bytes = text.bytes();
        while let Some(byte) = bytes.next() {
            match byte {
                b'{' => size.n_objects += 1,
                b',' | b'[' => size.n_values += 1,
                b'"' => skip_string(&mut bytes),
                _ => {}
            }
        }
        size
    }
}

/// Skips the rest of a string, and the quotation mark at its end.
fn skip_string(bytes: &mut impl Iterator<Item = u8>) {
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => return,
            // Skips an escaped quotation mark.
            b'\\' => {
                bytes.next();
            }
            _ => {}
        }
    }
}

#[derive(Deserialize)]
struct RawObject<'a> {
    #[serde(borrow)]
    spec: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawReview<'b> {
    api_version: String,
    kind: String,
    #[serde(borrow)]
    request: RawRequest<'b>,
}

#[derive(Deserialize)]
struct RawRequest<'b> {
    uid: String,
    #[serde(borrow)]
    object: Option<&'b RawValue>,
}

#[derive(Deserialize)]
struct DecodedReview {
    request: Box<Request>,
}

#[derive(Deserialize)]
struct DecodedHead {
    request: RequestHead,
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

// Measured with lists of 100,000 elements of many forms: decoding needs at most three quarters of what these numbers allow.

/// Copies of a text: one in the decoded object, one in the types of a handler, and one in reserve. The body has its own budget.
const COPIES_OF_TEXT: usize = 3;
/// Memory of a JSON object with one member: a node of the map, and the buffer of the fields that [`DynamicObject`] has no types
/// for.
const BYTES_PER_JSON_OBJECT: usize = 1024;
/// Memory of one more value of a list or member of an object, with the spare capacity of the list.
const BYTES_PER_JSON_VALUE: usize = 256;
const KIND: &str = "AdmissionReview";
const VERSIONS: [&str; 2] = ["admission.k8s.io/v1", "admission.k8s.io/v1beta1"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_an_object_ignores_the_content_of_strings() {
        let check = |text: &str, n_objects, n_values| {
            let size = JsonSize {
                n_bytes: text.len(),
                n_objects,
                n_values,
            };
            assert_eq!(JsonSize::measure(text), size, "{text}");
        };
        check("null", 0, 0);
        check(r#"{"a": [1, {"b": "c"}], "d": {}}"#, 3, 3);
        check(r#"{"a,[{": "{\"[,\\"}"#, 1, 0);
        check(r#"{"unfinished \"#, 1, 0);
    }

    #[test]
    fn memory_for_types_of_a_handler_is_counted_for_objects_in_the_spec_only() {
        let decoded_bytes = |object: &str, typed_bytes| {
            let body = format!(
                r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{{"uid":"1","object":{object}}}}}"#
            );
            ReviewOutline::parse(body.into()).unwrap().decoded_bytes(typed_bytes)
        };
        for (object, n_typed) in [
            (
                r#"{"metadata":{"managedFields":[{},{}]},"spec":{"containers":[{}]}}"#,
                2,
            ),
            (r#"{"metadata":{}}"#, 0),
            (r#"{"spec":{},"spec":{"containers":[{}]}}"#, 4),
        ] {
            let typed_bytes = decoded_bytes(object, 1000) - decoded_bytes(object, 0);
            assert_eq!(typed_bytes, n_typed * 1000, "{object}");
        }
    }
}
