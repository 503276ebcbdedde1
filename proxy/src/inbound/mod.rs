//! The inbound side: from the client to the local application.
//!
//! [`connection`] accepts a connection, finds the policy of its port, terminates TLS, detects the protocol, and serves the
//! connection (I1–I7). [`request`] authorizes HTTP requests and sends them to the application (I8–I11).
//!
//! `ARCHITECTURE.md` defines the steps of a request, I1 to I11.

pub(crate) mod admin;
pub(crate) mod app_clients;
mod client_certificate;
mod connection;
mod connection_addrs;
mod context;
mod debug;
pub(crate) mod gateway;
pub(crate) mod http_server_configs;
pub(crate) mod metrics;
pub(crate) mod policy;
pub(crate) mod port_labels;
pub(crate) mod profiles;
mod request;
mod run_until;

pub(crate) use context::Inbound;
