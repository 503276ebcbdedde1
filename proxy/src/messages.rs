//! Checks whether the proxy can decode a message of the control plane. An inbound policy that it cannot decode
//! closes its port. Any other such message has no effect if an earlier one was valid.

use tulle_proto::{destination, inbound, outbound};

use crate::policy::decode;

/// # Errors
/// Why the policy of a destination cannot be decoded.
pub fn outbound_policy(message: outbound::OutboundPolicy) -> anyhow::Result<()> {
    decode::outbound::client_policy(message)?;
    Ok(())
}

/// # Errors
/// Why the policy of a port cannot be decoded.
pub fn inbound_policy(message: inbound::Server) -> anyhow::Result<()> {
    decode::inbound::server_policy(message)?;
    Ok(())
}

/// # Errors
/// Why the profile, or the keep-alive settings of its endpoint, cannot be decoded.
pub fn profile(message: destination::DestinationProfile) -> anyhow::Result<()> {
    let mut left_out = None;
    decode::profile::profile(message, |error| left_out = Some(error))?;
    match left_out {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

/// # Errors
/// Why the update of a service's endpoints, or one of them, cannot be decoded.
pub fn endpoints(message: destination::Update) -> anyhow::Result<()> {
    let mut left_out = None;
    decode::endpoint::endpoint_update(message, |error| left_out = Some(error))?;
    match left_out {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}
