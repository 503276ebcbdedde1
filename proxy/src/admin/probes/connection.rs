//! The connections of probes, and the errors of failed probes.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use tokio::net::TcpStream;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum ProbeError {
    #[error("probing {addr} took longer than {limit:?}")]
    Timeout { addr: SocketAddr, limit: Duration },
    #[error("dialling {addr} failed")]
    Dial {
        addr: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("the TLS handshake with {addr} failed")]
    Tls {
        addr: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("the HTTP request to {addr} failed")]
    Http {
        addr: SocketAddr,
        #[source]
        source: hyper::Error,
    },
    #[error("{addr} redirected {limit} times")]
    Redirects { addr: SocketAddr, limit: usize },
    #[error("{addr} redirected to a target that cannot be used: {location:?}")]
    Location { addr: SocketAddr, location: String },
    #[error("the health check of service {service:?} failed with {code:?}: {message}")]
    HealthCheck {
        service: String,
        code: tonic::Code,
        message: String,
    },
    #[error("the health check of service {service:?} returned {status}")]
    NotServing { service: String, status: String },
}

/// Connects to a port of this host.
pub(super) async fn dial(addr: SocketAddr) -> Result<TcpStream, ProbeError> {
    let stream = TcpStream::connect(addr).await;
    stream.map_err(|source| ProbeError::Dial { addr, source })
}

/// Polls a connection while `work` uses it. If the connection fails, `work` fails too.
pub(super) async fn drive_connection<T>(connection: impl Future, work: impl Future<Output = T>) -> T {
    let connection = async {
        connection.await;
        std::future::pending::<Infallible>().await
    };
    // The connection is dropped with this future, so both branches may be cancelled.
    tokio::select! {
        biased;
        done = pin!(work) => done,
        never = pin!(connection) => match never {},
    }
}
