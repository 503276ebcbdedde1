//! The outbound side: from the application to a backend.
//!
//! [`connection`] accepts connections, finds their destination and detects their protocol (O1–O4). HTTP requests are routed and
//! sent by [`request`] (O6–O12), after the HTTP layers have admitted them (O5). Opaque bytes get one backend for each connection.
//! [`destination`] discovers destinations from the control plane and DNS.
//!
//! `ARCHITECTURE.md` defines the steps of a request, O1 to O12.

pub(crate) mod backend;
mod connection;
pub(crate) mod connector;
mod debug;
pub(crate) mod destination;
pub(crate) mod endpoint;
pub(crate) mod metrics;
mod mirror;
mod mode;
mod request;

pub(crate) use connection::context::{AcceptedClient, Outbound};
pub(crate) use mode::Mode;
