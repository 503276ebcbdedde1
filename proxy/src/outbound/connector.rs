//! Opens connections to one endpoint: TCP, mTLS with its identity, and the transport header if its proxy requires one.

use std::{net::SocketAddr, num::NonZeroU16, sync::Arc};

use bytes::BytesMut;
use tokio::{io::AsyncWriteExt, time::Instant};
use tulle_core::{addr::Addr, info_limited, log_limit::LogLimiter};

use crate::{
    http::{client::HttpVersion, error::Error},
    net::{
        connect,
        io::{Io, Tcp},
        tcp_metrics::ConnectionMetrics,
    },
    policy::endpoint::{EndpointSpec, EndpointTls, ProtocolHint},
    tls::{
        client,
        credentials::{Alpn, Credentials},
        header::{SessionProtocol, TransportHeader},
        sessions::EndpointSessions,
    },
};

/// Opens connections to one endpoint.
pub(crate) struct Connector {
    /// Address to dial. The port is the endpoint's, or that of its proxy for connections with a transport header.
    addr: SocketAddr,
    tls: Option<(Credentials, EndpointTls)>,
    /// TLS sessions that later connections with a transport header resume.
    sessions: EndpointSessions,
    header: Option<TransportHeaderFields>,
    config: ConnectorConfig,
    metrics: Arc<ConnectionMetrics>,
}

/// Settings that all connectors share.
#[derive(Clone)]
pub(crate) struct ConnectorConfig {
    pub(crate) connect: connect::Config,
    /// Limits log lines about failures, by target and cause.
    pub(crate) log_limiter: Arc<LogLimiter<(Addr, &'static str)>>,
}

/// Fields of the transport header, except the protocol.
struct TransportHeaderFields {
    port: NonZeroU16,
    name: Option<String>,
    /// Whether the header may name the protocol.
    sends_protocol: bool,
}

impl Connector {
    /// `creds` is `None` for loopback addresses and addresses of this workload.
    pub(super) fn new(
        spec: &EndpointSpec,
        creds: Option<&Credentials>,
        config: ConnectorConfig,
        metrics: Arc<ConnectionMetrics>,
    ) -> Self {
        let tls = creds.cloned().zip(spec.tls.clone());
        let mut addr = spec.addr;
        let mut header = None;
        if tls.is_some() {
            let authority_override = spec.authority_override.as_ref();
            let header_port = authority_override
                .and_then(|authority| authority.port_u16())
                .unwrap_or_else(|| spec.addr.port());
            if (spec.opaque_transport.is_some() || authority_override.is_some())
                && let Some(port) = NonZeroU16::new(header_port)
            {
                header = Some(TransportHeaderFields {
                    port,
                    name: authority_override.map(|authority| authority.host().to_owned()),
                    sends_protocol: spec.hint != ProtocolHint::Opaque,
                });
            }
            if let Some(proxy_port) = spec.opaque_transport {
                addr.set_port(proxy_port.get());
            }
        }
        Self {
            addr,
            tls,
            sessions: EndpointSessions::default(),
            header,
            config,
            metrics,
        }
    }

    pub(super) fn metrics(&self) -> &ConnectionMetrics {
        &self.metrics
    }

    /// Opens a connection for HTTP, or for opaque bytes if `protocol` is `None`.
    ///
    /// # Errors
    /// The endpoint refuses the connection, dialling and the TLS handshake together exceed the timeout, the handshake fails, or the
    /// endpoint has a different identity.
    pub(crate) async fn open(&self, protocol: Option<HttpVersion>) -> Result<Io, Error> {
        let config = &self.config;
        let deadline = Instant::now() + config.connect.timeout;
        let stream = connect::dial(self.addr, &config.connect)
            .await
            .map_err(Error::from_connect)?;
        let Some((creds, peer)) = &self.tls else {
            return Ok(Io::tcp(Tcp::new(stream)).count(self.metrics.clone()));
        };
        let (alpn, sessions) = if self.header.is_some() {
            (Alpn::TransportHeader, Some(&self.sessions))
        } else {
            (Alpn::Unset, None)
        };
        let server = client::Server {
            id: &peer.identity,
            name: &peer.server_name,
            alpn,
            sessions,
        };
        // Only connections that carry HTTP are replaced before the credentials expire.
        let lifetime = protocol.map(|_| creds.lifetime());
        let handshake = client::connect(Tcp::new(stream), creds, server);
        let tls = match tokio::time::timeout_at(deadline, handshake).await {
            Ok(Ok(tls)) => tls,
            Ok(Err(source)) => {
                let failure = source.failure();
                let (addr, reason) = (self.addr, failure.as_str());
                let target_and_cause = (Addr::Socket(addr), reason);
                info_limited!(config.log_limiter, target_and_cause, "TLS handshake with an endpoint failed", %addr, reason);
                return Err(Error::Tls {
                    addr: self.addr,
                    cause: failure.cause(),
                    source: Box::new(source),
                });
            }
            Err(_) => {
                return Err(Error::from_connect(connect::ConnectError::Timeout {
                    addr: self.addr,
                    limit: config.connect.timeout,
                }));
            }
        };
        let negotiated = client::alpn(&tls);
        let retirement = lifetime.map(|lifetime| lifetime.retirement(&tls));
        let mut io = Io::tls_client(tls).count(self.metrics.clone());
        if let Some(retirement) = retirement {
            io = io.retire(retirement);
        }
        if let (Some(header), Alpn::TransportHeader) = (&self.header, negotiated) {
            let mut bytes = BytesMut::new();
            header.with_protocol(protocol).encode(&mut bytes);
            // Nothing of a request has been sent yet.
            let lost = Error::ConnectionClosed {
                addr: self.addr,
                reused: false,
                may_be_processed: false,
            };
            io.write_all(&bytes).await.map_err(|_| lost)?;
        }
        Ok(io)
    }
}

impl TransportHeaderFields {
    fn with_protocol(&self, protocol: Option<HttpVersion>) -> TransportHeader {
        let protocol = protocol.filter(|_| self.sends_protocol).map(|protocol| match protocol {
            HttpVersion::Http1 => SessionProtocol::Http1,
            HttpVersion::Http2 => SessionProtocol::Http2,
        });
        TransportHeader {
            port: self.port,
            name: self.name.clone(),
            protocol,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::{TcpListener, TcpSocket, TcpStream};
    use tulle_core::{
        log_capture::LogCapture,
        metrics::{Labels, Registry},
    };

    use super::*;
    use crate::{
        net::{connect::SocketOptions, tcp_metrics},
        tls::tests::Authority,
    };

    const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";

    fn config(timeout: Duration) -> ConnectorConfig {
        ConnectorConfig {
            connect: connect::Config {
                timeout,
                options: SocketOptions::default(),
                own_port: None,
            },
            log_limiter: Arc::default(),
        }
    }

    /// A connector with mTLS to `addr`.
    fn connector_to(addr: SocketAddr, config: &ConnectorConfig) -> Connector {
        let spec = EndpointSpec {
            tls: Some(EndpointTls {
                identity: WEB.parse().unwrap(),
                server_name: WEB.into(),
            }),
            ..EndpointSpec::plain(addr)
        };
        let creds = Authority::new().credentials(WEB);
        let metrics = tcp_metrics::Families::new(&Registry::new()).series(Labels::new());
        Connector::new(&spec, Some(&creds), config.clone(), metrics)
    }

    #[tokio::test]
    async fn failed_handshakes_with_an_endpoint_cause_one_log_line_a_minute() {
        let log = LogCapture::start();
        let config = config(Duration::from_secs(10));
        for n_endpoints in 1..=2 {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let connector = connector_to(listener.local_addr().unwrap(), &config);
            for _ in 0..5 {
                let close = async { drop(listener.accept().await.unwrap()) };
                let (opened, ()) = tokio::join!(connector.open(None), close);
                assert!(matches!(opened, Err(Error::Tls { .. })));
            }
            assert_eq!(log.lines().len(), n_endpoints, "{:#?}", log.lines());
        }
    }

    #[tokio::test]
    async fn the_connect_timeout_covers_tcp_and_tls_together() {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let listener = socket.listen(0).unwrap();
        let addr = listener.local_addr().unwrap();
        let _queued = TcpStream::connect(addr).await.unwrap();
        let connector = connector_to(addr, &config(Duration::from_millis(1500)));
        let began_at = Instant::now();
        // The accept queue is full, so the kernel drops the first SYN and accepts the second SYN one second later. The TLS
        // handshake then gets no answer.
        let (opened, _accepted) = tokio::join!(connector.open(None), listener.accept());
        let error = opened.expect_err("the server is silent");
        assert!(matches!(error, Error::ConnectTimeout(_)), "{error}");
        assert!(began_at.elapsed() < Duration::from_secs(2), "{:?}", began_at.elapsed());
    }
}
