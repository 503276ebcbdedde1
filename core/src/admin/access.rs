//! Authorization of admin requests; each binary supplies the check.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use http::{StatusCode, request};

use crate::identity::Identity;

/// Authorizes a request before its handler runs. An error is the status of the response.
pub type AuthorizeFn = Arc<dyn Fn(Caller, request::Parts) -> AuthorizeFuture + Send + Sync>;

/// The future of an authorization check.
pub type AuthorizeFuture = Pin<Box<dyn Future<Output = Result<(), StatusCode>> + Send>>;

/// The client of an admin request.
#[derive(Clone, Debug)]
pub struct Caller {
    pub client: SocketAddr,
    /// The local address that the client connected to.
    pub local: SocketAddr,
    pub tls: Tls,
}

/// Whether the client's connection uses TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tls {
    #[default]
    None,
    Terminated {
        /// The client's verified identity, if it presented a certificate.
        client_id: Option<Identity>,
    },
}
