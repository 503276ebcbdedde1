//! Dialling, with a timeout and the socket options of the direction; refuses to dial the proxy's own listener.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep},
};

use crate::net::transparent;

/// Socket options for accepted or dialled connections.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SocketOptions {
    /// Idle time before the first TCP keepalive probe, and the interval of probes, which is at most 75 s. `None`: no keepalive.
    pub(crate) keepalive: Option<Duration>,
    /// `TCP_USER_TIMEOUT`. `None`: the kernel's default.
    pub(crate) user_timeout: Option<Duration>,
}

/// How to dial in one direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    /// Timeout of the TCP connection and the TLS handshake, if there is one, together.
    pub(crate) timeout: Duration,
    pub(crate) options: SocketOptions,
    /// The port of the inbound listener, if this config is for dialling the application. Addresses with this port are refused,
    /// because the connection would loop back to the proxy.
    pub(crate) own_port: Option<u16>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("dialling {addr} took longer than {limit:?}")]
    Timeout { addr: SocketAddr, limit: Duration },
    #[error("dialling {addr} failed")]
    Io {
        addr: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("{addr} is this proxy's own listener")]
    OwnListener { addr: SocketAddr },
    #[error("{addr} is an address of this gateway's own workload")]
    OwnWorkload { addr: SocketAddr },
}

impl ConnectError {
    pub(crate) fn addr(&self) -> SocketAddr {
        match self {
            Self::Timeout { addr, .. }
            | Self::Io { addr, .. }
            | Self::OwnListener { addr }
            | Self::OwnWorkload { addr } => *addr,
        }
    }

    /// The cause code for `l5d-proxy-cause`.
    pub(crate) fn cause(&self) -> &'static str {
        match self {
            Self::Timeout { .. } => "connect-timeout",
            Self::Io { .. } => "connect-refused", // this code also means that the address is unreachable
            Self::OwnListener { .. } | Self::OwnWorkload { .. } => "loop",
        }
    }
}

/// Opens a TCP connection.
///
/// # Errors
/// The connection is refused, the address is unreachable, its port is the proxy's own, or the timeout expires.
pub(crate) async fn dial(addr: SocketAddr, config: &Config) -> Result<TcpStream, ConnectError> {
    dial_from(None, addr, config).await
}

/// Like [`dial`], but the server sees `client` as the source address if it is given.
///
/// # Errors
/// Like [`dial`].
pub(crate) async fn dial_from(
    client: Option<IpAddr>,
    addr: SocketAddr,
    config: &Config,
) -> Result<TcpStream, ConnectError> {
    if config.own_port == Some(addr.port()) {
        return Err(ConnectError::OwnListener { addr });
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
            apply_options(&stream, config.options);
            Ok(stream)
        }
    }
}

/// Dials for a client whose connection to this proxy is already established. Repeats a refused dial for [`REFUSED_DIAL_TIMEOUT`].
///
/// Some clients wait for a server to listen, such as a ZooKeeper follower for its new leader. They connect again if a connection is
/// refused. But if an established connection is reset, they assume that the server has ended.
///
/// # Errors
/// The error of the last dial.
pub(crate) async fn dial_until_accepted<T, F>(dial: impl Fn() -> F) -> Result<T, ConnectError>
where
    F: Future<Output = Result<T, ConnectError>>,
{
    let give_up_at = Instant::now() + REFUSED_DIAL_TIMEOUT;
    loop {
        match dial().await {
            Err(ConnectError::Io { source, .. })
                if source.kind() == io::ErrorKind::ConnectionRefused && Instant::now() < give_up_at =>
            {
                sleep(REFUSED_DIAL_INTERVAL).await;
            }
            result => return result,
        }
    }
}

/// Sets socket options. Failures are only logged, because a connection without them still carries traffic.
pub(crate) fn apply_options<'a>(socket: impl Into<SockRef<'a>>, options: SocketOptions) {
    let socket = socket.into();
    let set = || -> io::Result<()> {
        socket.set_tcp_nodelay(true)?;
        if let Some(time) = options.keepalive {
            let time = time.clamp(MIN_KEEPALIVE, MAX_KEEPALIVE);
            // The kernel checks the user timeout only when it sends a probe, so probes must be frequent.
            let interval = time.min(MAX_KEEPALIVE_INTERVAL);
            let probes = TcpKeepalive::new().with_time(time).with_interval(interval);
            socket.set_tcp_keepalive(&probes)?;
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

/// Maximum time for which a refused dial is repeated: clients learn within a second that no server listens.
const REFUSED_DIAL_TIMEOUT: Duration = Duration::from_millis(500);
const REFUSED_DIAL_INTERVAL: Duration = Duration::from_millis(50);
/// The range that the kernel accepts for `TCP_KEEPIDLE`; values outside it are clamped.
const MIN_KEEPALIVE: Duration = Duration::from_secs(1);
const MAX_KEEPALIVE: Duration = Duration::from_secs(32_767);
/// The kernel's default of `TCP_KEEPINTVL`.
const MAX_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(75);

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_refused_dial_is_repeated_for_half_a_second_and_another_failure_is_not() {
        let addr: SocketAddr = ([127, 0, 0, 1], 1).into();
        let n_dials = Cell::new(0);
        let dial_with = async |kind: io::ErrorKind, n_failures| {
            let begun_at = Instant::now();
            n_dials.set(0);
            let dial = || {
                n_dials.set(n_dials.get() + 1);
                let source = kind.into();
                std::future::ready(if n_dials.get() > n_failures {
                    Ok(())
                } else {
                    Err(ConnectError::Io { addr, source })
                })
            };
            (dial_until_accepted(dial).await.is_ok(), begun_at.elapsed())
        };
        let refused = dial_with(io::ErrorKind::ConnectionRefused, 3).await;
        assert_eq!(refused, (true, REFUSED_DIAL_INTERVAL * 3));
        let refused = dial_with(io::ErrorKind::ConnectionRefused, 100).await;
        assert_eq!(refused, (false, REFUSED_DIAL_TIMEOUT));
        let unreachable = dial_with(io::ErrorKind::HostUnreachable, 100).await;
        assert_eq!(unreachable, (false, Duration::ZERO));
    }

    #[tokio::test]
    async fn dialled_connections_have_the_options_of_their_direction() {
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
        for (configured, expected) in [(0, 1), (36_000, 32_767)] {
            let keepalive = Some(Duration::from_secs(configured));
            apply_options(
                &stream,
                SocketOptions {
                    keepalive,
                    ..config.options
                },
            );
            let socket = SockRef::from(&stream);
            assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(expected));
            let interval = Duration::from_secs(expected).min(MAX_KEEPALIVE_INTERVAL);
            assert_eq!(socket.tcp_keepalive_interval().unwrap(), interval);
        }
        let own_port = Some(addr.port());
        let to_own_port = dial(addr, &Config { own_port, ..config }).await;
        assert!(
            matches!(to_own_port, Err(ConnectError::OwnListener { .. })),
            "{to_own_port:?}"
        );
    }
}
