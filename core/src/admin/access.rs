//! Who may have what the admin server shows: a judgement that a binary brings.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use http::{StatusCode, request};

use crate::identity::Identity;

/// Judges a request before its handler sees it; an error is the status of the answer.
pub type Guard = Arc<dyn Fn(Caller, request::Parts) -> Judging + Send + Sync>;

/// A judgement under way.
pub type Judging = Pin<Box<dyn Future<Output = Result<(), StatusCode>> + Send>>;

/// Who asks.
#[derive(Clone, Debug)]
pub struct Caller {
    pub client: SocketAddr,
    /// The address of this machine at which the client asks.
    pub local: SocketAddr,
    pub tls: Tls,
}

/// How the connection of a client is secured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tls {
    #[default]
    None,
    Terminated {
        /// The verified identity of the client, if it has shown one.
        client_id: Option<Identity>,
    },
}
