//! The mode of the outbound side.

/// The kind of client that sends requests to this proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// An application, which dials its destinations.
    Sidecar,
    /// An ingress, which dials an endpoint that it has chosen, and names the service in `l5d-dst-override`.
    Ingress,
}
