//! Dialling: bounded in time, with the socket options of the direction, and never ourselves.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

use crate::net::transparent;

/// Socket options for accepted or dialled connections.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SocketOptions {
    /// TCP keepalive time; off when absent.
    pub(crate) keepalive: Option<Duration>,
    /// `TCP_USER_TIMEOUT`; the kernel's default when absent.
    pub(crate) user_timeout: Option<Duration>,
}

/// How to dial in one direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    /// Bound on the TCP handshake, and again on the TLS handshake.
    pub(crate) timeout: Duration,
    pub(crate) options: SocketOptions,
    /// The port of a listener of ours that must not be dialled: it would come back as a new connection for ever.
    pub(crate) own_port: Option<u16>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("dialling {addr} took longer than {limit:?}")]
    Timeout { addr: SocketAddr, limit: Duration },
    #[error("dialling {addr}")]
    Io {
        addr: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("{addr} is this proxy's own listener")]
    Ourselves { addr: SocketAddr },
}

impl ConnectError {
    /// What was dialled.
    pub(crate) fn addr(&self) -> SocketAddr {
        match self {
            Self::Timeout { addr, .. } | Self::Io { addr, .. } | Self::Ourselves { addr } => *addr,
        }
    }

    /// What it is called in `l5d-proxy-cause`.
    pub(crate) fn cause(&self) -> &'static str {
        match self {
            Self::Timeout { .. } => "connect-timeout",
            Self::Io { .. } => "connect-refused",
            Self::Ourselves { .. } => "loop",
        }
    }
}

/// Opens a TCP connection.
///
/// # Errors
/// Refused, unreachable, or not established within the limit.
pub(crate) async fn dial(addr: SocketAddr, config: &Config) -> Result<TcpStream, ConnectError> {
    dial_as(None, addr, config).await
}

/// As [`dial`], and whoever is dialled sees `client`, where there is one, instead of us.
///
/// # Errors
/// As [`dial`].
pub(crate) async fn dial_as(
    client: Option<IpAddr>,
    addr: SocketAddr,
    config: &Config,
) -> Result<TcpStream, ConnectError> {
    if config.own_port == Some(addr.port()) {
        return Err(ConnectError::Ourselves { addr });
    }
    let connecting = async {
        match client {
            None => TcpStream::connect(addr).await,
            Some(client) => Box::pin(transparent::connect(client, addr)).await,
        }
    };
    match tokio::time::timeout(config.timeout, connecting).await {
        Err(_) => Err(ConnectError::Timeout {
            addr,
            limit: config.timeout,
        }),
        Ok(Err(source)) => Err(ConnectError::Io { addr, source }),
        Ok(Ok(stream)) => {
            apply(&stream, config.options);
            Ok(stream)
        }
    }
}

/// Sets the options a connection should have. A kernel that refuses one still carries traffic, so failures are only
/// logged.
pub(crate) fn apply<'a>(socket: impl Into<SockRef<'a>>, options: SocketOptions) {
    let socket = socket.into();
    let set = || -> io::Result<()> {
        socket.set_tcp_nodelay(true)?;
        if let Some(time) = options.keepalive {
            let time = time.clamp(KEEPALIVE_LEAST, KEEPALIVE_MOST);
            socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(time))?;
        }
        if options.user_timeout.is_some() {
            socket.set_tcp_user_timeout(options.user_timeout)?;
        }
        Ok(())
    };
    if let Err(error) = set() {
        tracing::debug!(%error, "setting socket options failed");
    }
}

/// What the kernel takes for `TCP_KEEPIDLE`: what is told beyond it would count for nothing.
const KEEPALIVE_LEAST: Duration = Duration::from_secs(1);
const KEEPALIVE_MOST: Duration = Duration::from_secs(32_767);

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn what_is_dialled_has_the_options_of_its_direction() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let config = Config {
            timeout: Duration::from_secs(10),
            options: SocketOptions {
                keepalive: Some(Duration::from_secs(11)),
                user_timeout: Some(Duration::from_secs(12)),
            },
            own_port: None,
        };
        let stream = dial(addr, &config).await.unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(11));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(12)));
        for (told, expected) in [(0, 1), (36_000, 32_767)] {
            let keepalive = Some(Duration::from_secs(told));
            apply(
                &stream,
                SocketOptions {
                    keepalive,
                    ..config.options
                },
            );
            let socket = SockRef::from(&stream);
            assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(expected));
        }
        let own_port = Some(addr.port());
        let ourselves = dial(addr, &Config { own_port, ..config }).await;
        assert!(
            matches!(ourselves, Err(ConnectError::Ourselves { .. })),
            "{ourselves:?}"
        );
    }
}
