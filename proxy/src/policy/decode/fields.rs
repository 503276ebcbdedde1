//! Fields that several messages share, and the errors of decoding.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use tulle_proto::convert::{self, ConvertError};
use tulle_proto::meta::{Metadata, metadata};

use crate::policy::meta::{Meta, Resource};

/// The reason why a message is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum DecodeError {
    #[error("{0} is missing")]
    Missing(&'static str),
    /// The decoder reports a kind that this proxy does not know as a missing one.
    #[error("kind of {0} is missing or unknown to this proxy")]
    UnknownKind(&'static str),
    #[error("{field} is {value:?}; expected {expected}")]
    Invalid {
        field: &'static str,
        value: String,
        expected: &'static str,
    },
    #[error("{field} is {pattern:?}; expected a regular expression")]
    Pattern {
        field: &'static str,
        pattern: String,
        #[source]
        source: regex::Error,
    },
    #[error("invalid {field}")]
    Convert {
        field: &'static str,
        #[source]
        source: ConvertError,
    },
    #[error("in {resource}")]
    InResource {
        resource: Arc<Meta>,
        #[source]
        source: Box<Self>,
    },
}

impl DecodeError {
    pub(super) fn invalid(field: &'static str, value: impl ToString, expected: &'static str) -> Self {
        Self::Invalid {
            field,
            value: value.to_string(),
            expected,
        }
    }

    /// Adds the resource that contains the error.
    pub(super) fn in_resource(self, resource: &Arc<Meta>) -> Self {
        Self::InResource {
            resource: resource.clone(),
            source: Box::new(self),
        }
    }
}

pub(super) fn duration(field: &'static str, message: Option<prost_types::Duration>) -> Result<Duration, DecodeError> {
    optional_duration(field, message)?.ok_or(DecodeError::Missing(field))
}

pub(super) fn optional_duration(
    field: &'static str,
    message: Option<prost_types::Duration>,
) -> Result<Option<Duration>, DecodeError> {
    message
        .map(|message| convert::std_duration(&message).map_err(|source| DecodeError::Convert { field, source }))
        .transpose()
}

/// A resource in a client policy; it has a namespace.
pub(super) fn client_meta(message: Option<Metadata>) -> Result<Arc<Meta>, DecodeError> {
    let meta = meta(message)?;
    match &*meta {
        Meta::Resource(resource) if resource.namespace.is_empty() => Err(DecodeError::Missing("metadata.namespace")),
        _ => Ok(meta),
    }
}

/// A resource in a server policy; some control planes leave its namespace out.
pub(super) fn meta(message: Option<Metadata>) -> Result<Arc<Meta>, DecodeError> {
    let kind = message
        .and_then(|message| message.kind)
        .ok_or(DecodeError::Missing("metadata"))?;
    let resource = match kind {
        metadata::Kind::Default(name) => return Ok(Meta::default_named(&name)),
        metadata::Kind::Resource(resource) => resource,
    };
    let required = |field, value: String| {
        if value.is_empty() {
            Err(DecodeError::Missing(field))
        } else {
            Ok(Arc::from(value))
        }
    };
    let port = u16::try_from(resource.port)
        .map_err(|_| DecodeError::invalid("metadata.port", resource.port, "a port from 1 to 65535, or none"))?;
    Ok(Arc::new(Meta::Resource(Resource {
        group: required("metadata.group", resource.group)?,
        kind: required("metadata.kind", resource.kind)?,
        name: required("metadata.name", resource.name)?,
        namespace: resource.namespace.into(),
        section: resource.section.into(),
        port: NonZeroU16::new(port),
    })))
}
