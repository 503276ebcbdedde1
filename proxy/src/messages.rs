//! Checks whether the proxy can decode a message of the control plane. If the proxy cannot decode an inbound policy, it closes the
//! port. It ignores any other message that it cannot decode, if an earlier one was valid.

use tulle_proto::{destination, inbound, outbound};

use crate::policy::decode;

/// Checks the policy of a destination.
///
/// # Errors
/// The policy cannot be decoded.
pub fn check_outbound_policy(message: outbound::OutboundPolicy) -> anyhow::Result<()> {
    decode::outbound::client_policy(message)?;
    Ok(())
}

/// Checks the policy of a port.
///
/// # Errors
/// The policy cannot be decoded.
pub fn check_inbound_policy(message: inbound::Server) -> anyhow::Result<()> {
    decode::inbound::server_policy(message)?;
    Ok(())
}

/// Checks a profile and the keep-alive settings of its endpoint.
///
/// # Errors
/// The profile or the keep-alive settings cannot be decoded.
pub fn check_profile(message: destination::DestinationProfile) -> anyhow::Result<()> {
    let mut endpoint_error = None;
    decode::profile::profile(message, |error| endpoint_error = Some(error))?;
    match endpoint_error {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

/// Checks an update of a service's endpoints.
///
/// # Errors
/// The update or one of its endpoints cannot be decoded.
pub fn check_endpoints(message: destination::Update) -> anyhow::Result<()> {
    let mut endpoint_error = None;
    decode::endpoint::endpoint_update(message, |error| endpoint_error = Some(error))?;
    match endpoint_error {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}
