//! The network validator: is the traffic of this pod redirected? Answers by exit code, for init containers.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time;

/// What is tried.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// Where the proxy would take connections of its application.
    pub listen: SocketAddr,
    /// Who is dialled; must be routable, and should not exist.
    pub connect: SocketAddr,
    pub timeout: Duration,
}

/// Why redirection is not proven.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ValidateError {
    #[error("listening on {addr}; does a proxy run here already?")]
    Listen {
        addr: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("preparing for signals")]
    Signals(#[source] std::io::Error),
    #[error("there is no route to {addr}, so rules cannot be asked; choose another --connect-addr")]
    NoRoute {
        addr: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("dialling {addr}, which rules should have led here")]
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
    #[error("{addr} answered {answer:?}, which is not what we say; traffic is not redirected")]
    Stranger { addr: SocketAddr, answer: String },
    #[error("no answer within {0:?}; traffic is not redirected")]
    Timeout(Duration),
    #[error("stopped by {0} before redirection was proven")]
    Signal(&'static str),
}

impl ValidateError {
    /// Whether the namespace is to blame, which repairing it can cure; otherwise the trial could not be made.
    #[must_use]
    pub fn is_verdict(&self) -> bool {
        !matches!(self, Self::Listen { .. } | Self::Signals(_))
    }
}

/// Stands in for the proxy, dials, and expects to meet itself.
///
/// # Errors
/// Whatever keeps it from doing so in time, signals included.
pub async fn run(trial: Trial) -> Result<(), ValidateError> {
    let mut interrupted = signal(SignalKind::interrupt()).map_err(ValidateError::Signals)?;
    let mut terminated = signal(SignalKind::terminate()).map_err(ValidateError::Signals)?;
    let listening = TcpListener::bind(trial.listen).await;
    let listener = listening.map_err(|source| ValidateError::Listen {
        addr: trial.listen,
        source,
    })?;
    let token: String = std::iter::repeat_with(fastrand::alphanumeric).take(TOKEN_LEN).collect();
    tokio::select! {
        never = serve(&listener, &token) => match never {},
        asked = time::timeout(trial.timeout, ask(trial.connect, &token)) => {
            asked.unwrap_or(Err(ValidateError::Timeout(trial.timeout)))
        }
        _ = interrupted.recv() => Err(ValidateError::Signal("SIGINT")),
        _ = terminated.recv() => Err(ValidateError::Signal("SIGTERM")),
    }
}

/// Says the token to everybody who comes.
async fn serve(listener: &TcpListener, token: &str) -> std::convert::Infallible {
    loop {
        match listener.accept().await {
            Ok((mut stream, peer)) => {
                tracing::debug!(%peer, "accepted");
                // Fits into the socket's buffer, so a peer that does not read holds nobody up.
                if let Err(error) = stream.write_all(format!("{token}\n").as_bytes()).await {
                    tracing::debug!(%peer, %error, "the peer has gone");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "accepting failed");
                time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn ask(addr: SocketAddr, token: &str) -> Result<(), ValidateError> {
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
    Err(ValidateError::Stranger {
        addr,
        answer: String::from_utf8_lossy(&answer).into_owned(),
    })
}

/// Of the process when traffic is not redirected; repair controllers look for it.
pub const NOT_REDIRECTED: u8 = 95;
const TOKEN_LEN: usize = 63;
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stranger_is_told_from_ourselves() {
        let stranger = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = stranger.local_addr().unwrap();
        let speaks = tokio::spawn(async move {
            let (mut stream, _) = stranger.accept().await.unwrap();
            stream.write_all(b"220 mail ready\n").await.unwrap();
        });
        let error = ask(addr, "token").await.unwrap_err();
        assert!(matches!(error, ValidateError::Stranger { .. }), "{error}");
        speaks.await.unwrap();

        let ours = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = ours.local_addr().unwrap();
        let token = "a".repeat(TOKEN_LEN);
        tokio::select! {
            never = serve(&ours, &token) => match never {},
            asked = ask(addr, &token) => asked.unwrap(),
        }
    }
}
