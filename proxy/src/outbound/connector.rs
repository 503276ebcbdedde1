//! Opens connections to one endpoint: TCP, mTLS with its identity, and the transport header if its proxy requires one.

use std::{net::SocketAddr, num::NonZeroU16, sync::Arc};

use bytes::BytesMut;
use tokio::{io::AsyncWriteExt, time::Instant};

use crate::{
    http::{client::Protocol, error::Error},
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
    },
};

/// Opens connections to one endpoint.
pub(crate) struct Connector {
    /// Address to dial. The port is the endpoint's, or that of its proxy for connections with a transport header.
    addr: SocketAddr,
    tls: Option<(Credentials, EndpointTls)>,
    header: Option<TransportHeaderFields>,
    connect: connect::Config,
    metrics: Arc<ConnectionMetrics>,
}

/// Fields of the transport header, except the protocol.
struct TransportHeaderFields {
    port: NonZeroU16,
    name: Option<String>,
    /// Whether the header may name the protocol.
    sends_protocol: bool,
}

impl Connector {
    /// `creds` is `None` for addresses of this workload and loopback.
    pub(super) fn new(
        spec: &EndpointSpec,
        creds: Option<&Credentials>,
        connect: connect::Config,
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
            header,
            connect,
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
    pub(crate) async fn open(&self, protocol: Option<Protocol>) -> Result<Io, Error> {
        let deadline = Instant::now() + self.connect.timeout;
        let stream = connect::dial(self.addr, &self.connect)
            .await
            .map_err(Error::from_connect)?;
        let Some((creds, peer)) = &self.tls else {
            return Ok(Io::tcp(Tcp::new(stream)).count(self.metrics.clone()));
        };
        let alpn = if self.header.is_some() {
            Alpn::TransportHeader
        } else {
            Alpn::Unset
        };
        let handshake = client::connect(Tcp::new(stream), creds, &peer.identity, &peer.server_name, alpn);
        let tls = match tokio::time::timeout_at(deadline, handshake).await {
            Ok(Ok(tls)) => tls,
            Ok(Err(source)) => {
                let failure = source.failure();
                tracing::info!(addr = %self.addr, reason = %failure, "TLS handshake with an endpoint failed");
                return Err(Error::Tls {
                    addr: self.addr,
                    cause: failure.cause(),
                    source: Box::new(source),
                });
            }
            Err(_) => {
                return Err(Error::from_connect(connect::ConnectError::Timeout {
                    addr: self.addr,
                    limit: self.connect.timeout,
                }));
            }
        };
        let negotiated = client::alpn(&tls);
        let mut io = Io::tls_client(tls).count(self.metrics.clone());
        if let (Some(header), Alpn::TransportHeader) = (&self.header, negotiated) {
            let mut bytes = BytesMut::new();
            header.with_protocol(protocol).encode(&mut bytes);
            // Nothing of a request has been sent yet.
            let lost = Error::ConnectionClosed {
                addr: self.addr,
                reused: false,
                sent: false,
            };
            io.write_all(&bytes).await.map_err(|_| lost)?;
        }
        Ok(io)
    }
}

impl TransportHeaderFields {
    fn with_protocol(&self, protocol: Option<Protocol>) -> TransportHeader {
        let protocol = protocol.filter(|_| self.sends_protocol).map(|protocol| match protocol {
            Protocol::Http1 => SessionProtocol::Http1,
            Protocol::Http2 => SessionProtocol::Http2,
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

    use tokio::net::{TcpSocket, TcpStream};
    use tulle_core::metrics::{Labels, Registry};

    use super::*;
    use crate::{
        net::{connect::SocketOptions, tcp_metrics},
        tls::tests::Authority,
    };

    const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";

    #[tokio::test]
    async fn the_connect_timeout_covers_tcp_and_tls_together() {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let listener = socket.listen(0).unwrap();
        let addr = listener.local_addr().unwrap();
        let _queued = TcpStream::connect(addr).await.unwrap();
        let spec = EndpointSpec {
            tls: Some(EndpointTls {
                identity: WEB.parse().unwrap(),
                server_name: WEB.into(),
            }),
            ..EndpointSpec::plain(addr)
        };
        let creds = Authority::new().credentials(WEB);
        let config = connect::Config {
            timeout: Duration::from_millis(1500),
            options: SocketOptions::default(),
            own_port: None,
        };
        let metrics = tcp_metrics::Families::new(&Registry::new()).series(Labels::new());
        let connector = Connector::new(&spec, Some(&creds), config, metrics);
        let began_at = Instant::now();
        // The accept queue is full, so the kernel drops the first SYN and accepts the second one, a second later. The TLS handshake
        // then gets no answer.
        let (opened, _accepted) = tokio::join!(connector.open(None), listener.accept());
        let error = opened.expect_err("the server is silent");
        assert!(matches!(error, Error::ConnectTimeout(_)), "{error}");
        assert!(began_at.elapsed() < Duration::from_secs(2), "{:?}", began_at.elapsed());
    }
}
