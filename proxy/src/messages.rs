//! Checks whether the proxy can decode a message of the control plane. An inbound policy that it cannot decode
//! closes its port. Any other such message has no effect if an earlier one was valid.

use tulle_proto::{destination, inbound, outbound};

use crate::policy::decode;

/// Checks the policy of a destination.
///
/// # Errors
/// Why the policy of a destination cannot be decoded.
pub fn check_outbound_policy(message: outbound::OutboundPolicy) -> anyhow::Result<()> {
    decode::outbound::client_policy(message)?;
    Ok(())
}

/// Checks the policy of a port.
///
/// # Errors
/// Why the policy of a port cannot be decoded.
pub fn check_inbound_policy(message: inbound::Server) -> anyhow::Result<()> {
    decode::inbound::server_policy(message)?;
    Ok(())
}

/// Checks a profile.
///
/// # Errors
/// Why the profile, or the keep-alive settings of its endpoint, cannot be decoded.
pub fn check_profile(message: destination::DestinationProfile) -> anyhow::Result<()> {
    let mut invalid_part = None;
    decode::profile::profile(message, |error| invalid_part = Some(error))?;
    match invalid_part {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

/// Checks an update of a service's endpoints.
///
/// # Errors
/// Why the update, or one of its endpoints, cannot be decoded.
pub fn check_endpoints(message: destination::Update) -> anyhow::Result<()> {
    let mut invalid_part = None;
    decode::endpoint::endpoint_update(message, |error| invalid_part = Some(error))?;
    match invalid_part {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}
