//! Whether the proxy understands a message of the control plane. One that it does not has no effect.

use tulle_proto::{destination, inbound, outbound};

use crate::policy::decode;

/// # Errors
/// The policy of a destination cannot be read, and why.
pub fn outbound_policy(message: outbound::OutboundPolicy) -> anyhow::Result<()> {
    decode::outbound::client_policy(message)?;
    Ok(())
}

/// # Errors
/// The policy of a port cannot be read, and why.
pub fn inbound_policy(message: inbound::Server) -> anyhow::Result<()> {
    decode::inbound::server_policy(message)?;
    Ok(())
}

/// # Errors
/// The profile cannot be read, and why.
pub fn profile(message: destination::DestinationProfile) -> anyhow::Result<()> {
    decode::profile::profile(message)?;
    Ok(())
}

/// # Errors
/// The update of a service's endpoints, or one of them, cannot be read, and why.
pub fn endpoints(message: destination::Update) -> anyhow::Result<()> {
    let mut left_out = None;
    decode::endpoint::endpoint_update(message, |error| left_out = Some(error))?;
    match left_out {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}
