//! Opening connections to one endpoint: TCP, mTLS towards its identity, and the transport header where its proxy wants
//! one.

use std::{net::SocketAddr, num::NonZeroU16, sync::Arc};

use bytes::BytesMut;
use tokio::io::AsyncWriteExt;

use crate::{
    http::{client::Protocol, error::Error},
    net::{
        connect,
        counts::Counts,
        io::{Io, Tcp},
    },
    policy::endpoint::{EndpointSpec, EndpointTls, ProtocolHint},
    tls::{
        client,
        creds::{Alpn, Credentials},
        header::{SessionProtocol, TransportHeader},
    },
};

/// All that is needed to reach one endpoint.
pub(crate) struct Connector {
    /// Where to dial: the endpoint, or its proxy's port for connections behind a transport header.
    addr: SocketAddr,
    tls: Option<(Credentials, EndpointTls)>,
    header: Option<Header>,
    connect: connect::Config,
    counts: Arc<Counts>,
}

/// What the transport header says, the protocol aside.
struct Header {
    port: NonZeroU16,
    name: Option<String>,
    /// Whether the peer may be told the protocol.
    tells_protocol: bool,
}

impl Connector {
    /// `creds` is `None` for endpoints that are on this host.
    pub(super) fn new(
        spec: &EndpointSpec,
        creds: Option<&Credentials>,
        connect: connect::Config,
        counts: Arc<Counts>,
    ) -> Self {
        let tls = creds.cloned().zip(spec.tls.clone());
        let mut addr = spec.addr;
        let mut header = None;
        if tls.is_some() {
            let overridden = spec.authority_override.as_ref();
            let port = overridden
                .and_then(|authority| authority.port_u16())
                .unwrap_or_else(|| spec.addr.port());
            if let (true, Some(port)) = (
                spec.opaque_transport.is_some() || overridden.is_some(),
                NonZeroU16::new(port),
            ) {
                header = Some(Header {
                    port,
                    name: overridden.map(|authority| authority.host().to_owned()),
                    tells_protocol: spec.hint != ProtocolHint::Opaque,
                });
            }
            if let Some(port) = spec.opaque_transport {
                addr.set_port(port.get());
            }
        }
        Self {
            addr,
            tls,
            header,
            connect,
            counts,
        }
    }

    /// What its connections are counted in.
    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Opens a connection for HTTP of some version, or for bytes.
    ///
    /// # Errors
    /// The endpoint refuses, is not reached in time, or is not who it should be.
    pub(crate) async fn open(&self, protocol: Option<Protocol>) -> Result<Io, Error> {
        let stream = connect::dial(self.addr, &self.connect).await.map_err(Error::connect)?;
        let Some((creds, target)) = &self.tls else {
            return Ok(Io::tcp(Tcp::new(stream)).count(self.counts.clone()));
        };
        let alpn = if self.header.is_some() {
            Alpn::TransportHeader
        } else {
            Alpn::Unset
        };
        let shaking = client::connect(Tcp::new(stream), creds, &target.identity, &target.server_name, alpn);
        let tls = match tokio::time::timeout(self.connect.timeout, shaking).await {
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
                return Err(Error::connect(connect::ConnectError::Timeout {
                    addr: self.addr,
                    limit: self.connect.timeout,
                }));
            }
        };
        let negotiated = client::alpn(&tls);
        let mut io = Io::tls_client(tls).count(self.counts.clone());
        if let (Some(header), Alpn::TransportHeader) = (&self.header, negotiated) {
            let mut bytes = BytesMut::new();
            header.with_protocol(protocol).encode(&mut bytes);
            // Nothing of a request has been sent yet.
            let lost = Error::Closed {
                addr: self.addr,
                reused: false,
                sent: false,
            };
            io.write_all(&bytes).await.map_err(|_| lost)?;
        }
        Ok(io)
    }
}

impl Header {
    fn with_protocol(&self, protocol: Option<Protocol>) -> TransportHeader {
        let protocol = protocol.filter(|_| self.tells_protocol).map(|protocol| match protocol {
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
