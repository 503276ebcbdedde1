//! Decodes and validates messages of the control plane.
//!
//! A message that lacks a required field or has an invalid value is refused as a whole, with the reason: half a policy could
//! permit what the whole one forbids, and half a profile could send requests elsewhere. An invalid endpoint in an update of
//! endpoints is left out and reported; the other endpoints are used. Incomplete keep-alive settings of an endpoint in such an update
//! or in a profile are reported, and the endpoint is used without them. Unknown fields are ignored. An unknown variant counts as a
//! missing field, so the message is refused if the field is required.
//!
//! Further exceptions: an unknown filter in a server policy and an unknown kind of backend refuse only the requests they apply
//! to. An invalid identity in a server policy matches no client. An invalid reference to a resource that only debug output shows
//! is ignored.

pub(crate) mod endpoint;
mod fields;
pub(crate) mod inbound;
pub(crate) mod outbound;
pub(crate) mod profile;
#[cfg(test)]
mod recorded_tests;
mod routes;

pub(crate) use routes::method;
