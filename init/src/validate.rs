//! The network validator for init containers: checks whether the traffic of this pod is redirected; the exit code is the
//! result.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time;

/// Parameters of the check.
#[derive(Clone, Copy, Debug)]
pub struct ValidateConfig {
    /// The address to listen on, in place of the proxy's outbound port.
    pub listen: SocketAddr,
    /// The address to connect to; must be routable, and should be unused.
    pub connect: SocketAddr,
    pub timeout: Duration,
}

/// The reason why redirection is not proven.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ValidateError {
    #[error("listening on {addr}; does a proxy run here already?")]
    Listen {
        addr: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("registering signal handlers")]
    Signals(#[source] std::io::Error),
    #[error("there is no route to {addr}; choose another --connect-addr")]
    NoRoute {
        addr: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("dialling {addr}, which should be redirected to this process")]
    Connect {
        addr: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("reading from {addr}")]
    Read {
        addr: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("{addr} answered {answer:?} instead of the expected token; traffic is not redirected")]
    UnexpectedAnswer { addr: SocketAddr, answer: String },
    #[error("no answer within {0:?}; traffic is not redirected")]
    Timeout(Duration),
    #[error("stopped by {0} before redirection was proven")]
    Signal(&'static str),
}

impl ValidateError {
    /// Whether the check ran but did not prove redirection; `false` if the check could not run.
    ///
    /// As in Linkerd's validator, it is also `true` if there is no route to the address, or if a signal ended the check.
    #[must_use]
    pub fn is_unproven(&self) -> bool {
        !matches!(self, Self::Listen { .. } | Self::Signals(_))
    }
}

/// Listens on the proxy's port, connects to `connect`, and checks that this listener answers.
///
/// # Errors
/// If it does not answer within the timeout, or a signal ends the check.
pub async fn run(config: ValidateConfig) -> Result<(), ValidateError> {
    let mut interrupted = signal(SignalKind::interrupt()).map_err(ValidateError::Signals)?;
    let mut terminated = signal(SignalKind::terminate()).map_err(ValidateError::Signals)?;
    let listening = TcpListener::bind(config.listen).await;
    let listener = listening.map_err(|source| ValidateError::Listen {
        addr: config.listen,
        source,
    })?;
    let token: String = std::iter::repeat_with(fastrand::alphanumeric).take(TOKEN_LEN).collect();
    tokio::select! {
        never = serve(&listener, &token) => match never {},
        result = time::timeout(config.timeout, check_answer(config.connect, &token)) => {
            result.unwrap_or(Err(ValidateError::Timeout(config.timeout)))
        }
        _ = interrupted.recv() => Err(ValidateError::Signal("SIGINT")),
        _ = terminated.recv() => Err(ValidateError::Signal("SIGTERM")),
    }
}

/// Sends the token to every client.
async fn serve(listener: &TcpListener, token: &str) -> std::convert::Infallible {
    loop {
        match listener.accept().await {
            Ok((mut stream, peer)) => {
                tracing::debug!(%peer, "accepted");
                // The token fits into the socket buffer, so a client that does not read cannot block this loop.
                if let Err(error) = stream.write_all(format!("{token}\n").as_bytes()).await {
                    tracing::debug!(%peer, %error, "the peer closed the connection");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "accepting failed");
                time::sleep(ACCEPT_ERROR_BACKOFF).await;
            }
        }
    }
}

async fn check_answer(addr: SocketAddr, token: &str) -> Result<(), ValidateError> {
    use std::io::ErrorKind::{AddrNotAvailable, HostUnreachable, NetworkUnreachable};
    let stream = TcpStream::connect(addr).await.map_err(|source| match source.kind() {
        NetworkUnreachable | HostUnreachable | AddrNotAvailable => ValidateError::NoRoute { addr, source },
        _ => ValidateError::Connect { addr, source },
    })?;
    let mut answer = Vec::new();
    let limit = u64::try_from(TOKEN_LEN + 1).unwrap_or(u64::MAX);
    let read = BufReader::new(stream.take(limit)).read_until(b'\n', &mut answer).await;
    read.map_err(|source| ValidateError::Read { addr, source })?;
    if answer == format!("{token}\n").as_bytes() {
        return Ok(());
    }
    Err(ValidateError::UnexpectedAnswer {
        addr,
        answer: String::from_utf8_lossy(&answer).into_owned(),
    })
}

/// Exit code if traffic is not redirected, or redirection is not proven. By this code, the repair controller of Linkerd's CNI
/// plugin finds the pods that it has to recreate.
pub const EXIT_CODE_NOT_REDIRECTED_OR_UNPROVEN: u8 = 95;
const TOKEN_LEN: usize = 63;
const ACCEPT_ERROR_BACKOFF: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_of_another_server_is_recognised() {
        let other_server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = other_server.local_addr().unwrap();
        let answering = tokio::spawn(async move {
            let (mut stream, _) = other_server.accept().await.unwrap();
            stream.write_all(b"220 mail ready\n").await.unwrap();
        });
        let error = check_answer(addr, "token").await.unwrap_err();
        assert!(matches!(error, ValidateError::UnexpectedAnswer { .. }), "{error}");
        answering.await.unwrap();

        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let token = "a".repeat(TOKEN_LEN);
        tokio::select! {
            never = serve(&listener, &token) => match never {},
            result = check_answer(addr, &token) => result.unwrap(),
        }
    }
}
