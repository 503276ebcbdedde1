//! Direct connections to the proxy's inbound port: mTLS with a transport header that names the target.

use std::{net::SocketAddr, num::NonZeroU16};

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;
use tulle_core::{
    addr::{self, ClientAddr, NameAddr, ParseAddrError},
    info_limited,
};

use crate::{
    http::{client::HttpVersion, error::Error},
    inbound::{
        connection::{
            classified_connection::{ClassifiedConnection, ClassifiedHttp, ClassifiedOpaque, ClientAndPortPolicy},
            context::Connection,
        },
        connection_addrs::ConnectionAddrs,
        gateway,
        policy::ActivePolicy,
    },
    metrics::hosts::HostSource,
    net::{
        detect,
        io::{Io, Tcp},
    },
    tls::{
        credentials::Alpn,
        handshake_failure::HandshakeFailure,
        header::{Decoded, InvalidHeader, SessionProtocol, TransportHeader},
        status::ServerTls,
    },
};

impl Connection {
    /// Finds the protocol of a connection to the proxy's own port. The connection must have mTLS and a transport header. For an
    /// opaque connection through the gateway, also opens the connection to its target.
    pub(super) async fn classify_direct(
        &self,
        stream: Tcp,
        client: ClientAddr,
        local: SocketAddr,
    ) -> Option<ClassifiedConnection> {
        let addrs = ConnectionAddrs { client, target: local };
        let deadline = Instant::now() + self.inbound.detect_timeout;
        let (io, tls, chain) = self
            .terminate_tls(stream, Bytes::new(), &addrs, Alpn::TransportHeader)
            .await?;
        let (io, header) = self.read_header(io, &addrs, &tls, deadline).await?;
        let addrs = match &header.name {
            // The policy of the proxy's own port authorizes clients of the gateway.
            Some(_) => addrs,
            None => ConnectionAddrs {
                client,
                target: target_addr(local, &header),
            },
        };
        let (port_policy, active_policy) = self.wait_port_policy(&addrs).await;
        let io = io.count(self.inbound.client_connection_metrics(&addrs, &tls, &active_policy));
        let client = ClientAndPortPolicy {
            addrs,
            tls,
            chain,
            port_policy,
        };
        // If the header has no protocol, the client's proxy treats the connection as opaque.
        let protocol = match (header.protocol, &header.name) {
            (Some(SessionProtocol::Http1), _) => HttpVersion::Http1,
            (Some(SessionProtocol::Http2), _) => HttpVersion::Http2,
            // The connection is for this workload, and the policy of its port requires HTTP. Its bytes may be HTTP, although the
            // client's proxy treats them as opaque.
            (None, None) if active_policy.requires_http => {
                return self.classify_after_tls(io, client, active_policy).await;
            }
            (None, None) => return Some(ClassifiedConnection::opaque(io, client)),
            // The connection is for the gateway, whose policy requires HTTP.
            (None, Some(_)) if active_policy.requires_http => {
                self.opaque_forwarder(&client).record_denied_or_not_http(&active_policy);
                io.reset_on_drop();
                return None;
            }
            (None, Some(name)) => {
                let upstream_io = self.connect_gateway(name, &client, &active_policy).await;
                if upstream_io.is_none() {
                    io.reset_on_drop();
                    return None;
                }
                return Some(ClassifiedConnection::Opaque(ClassifiedOpaque {
                    io,
                    upstream_io,
                    client_prefix: Bytes::new(),
                    client,
                    gateway_name: header.name,
                }));
            }
        };
        Some(ClassifiedConnection::Http(ClassifiedHttp {
            io,
            protocol,
            client,
            gateway_name: header.name,
        }))
    }

    /// Reads and records the transport header. Resets the connection if it is missing or invalid, or if the client has no
    /// certificate.
    async fn read_header(
        &self,
        mut io: Io,
        addrs: &ConnectionAddrs,
        tls: &ServerTls,
        deadline: Instant,
    ) -> Option<(Io, DirectTarget)> {
        let (families, log) = (&self.inbound.families, &self.inbound.log_limiter);
        let (client, local) = (addrs.client.0, addrs.target);
        let ServerTls::Terminated { client_id: Some(_) } = tls else {
            let failure = HandshakeFailure::NoCertificate;
            families.record_handshake_failure(local, failure);
            info_limited!(log, client.ip(), "direct connection refused", %client, %failure);
            io.reset_on_drop();
            return None;
        };
        let reading = read_transport_header(&mut io, self.inbound.gateway.is_some());
        let (header, rest) = match tokio::time::timeout_at(deadline, reading).await {
            Ok(Ok(read)) => read,
            Ok(Err(error)) => {
                families.record_tcp_error(local, "transport header", "bad-transport-header");
                info_limited!(log, client.ip(), "direct connection refused", %client, %error);
                io.reset_on_drop();
                return None;
            }
            Err(_) => {
                families.record_tcp_error(local, "transport header timeout", "detect-timeout");
                io.reset_on_drop();
                return None;
            }
        };
        let server_name_labels = &self.inbound.server_name_labels;
        let label_name = header.name.as_ref().map(|name| &*name.name);
        let label_name = label_name.filter(|name| server_name_labels.add(name, HostSource::Trusted));
        let protocol = match header.protocol {
            Some(SessionProtocol::Http1) => "http/1",
            Some(SessionProtocol::Http2) => "http/2",
            None => "",
        };
        families.record_transport_header(protocol, target_addr(local, &header), label_name.unwrap_or(""), tls);
        Some((io.prepend(rest), header))
    }

    /// Opens an opaque connection to `name` through the gateway, if the client is authorized.
    async fn connect_gateway(
        &self,
        name: &NameAddr,
        client: &ClientAndPortPolicy,
        active_policy: &ActivePolicy,
    ) -> Option<Io> {
        let inbound = &self.inbound;
        self.opaque_forwarder(client).authorize_and_record(active_policy)?;
        let opened = async {
            let client_id = client.tls.client_id().map_or("", |id| id.as_str());
            gateway::check_loop(&inbound.identity_name, client_id, None)?;
            let gateway = inbound.gateway.as_ref().ok_or(Error::RouteNotFound)?;
            gateway.connect(name).await
        };
        match opened.await {
            Ok(io) => Some(io),
            Err(error) => {
                let (target, client) = (client.addrs.target, client.addrs.client.0);
                info_limited!(inbound.log_limiter, client.ip(), "connection refused", %client, target = %name, %error);
                inbound.families.record_tcp_error(target, error.label(), error.cause());
                None
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum DirectError {
    #[error("client closed before its transport header was complete")]
    ClientClosed,
    #[error("cannot read the transport header")]
    Io(#[source] std::io::Error),
    #[error(transparent)]
    Invalid(#[from] InvalidHeader),
    #[error("{name} can only be reached through a gateway, and this proxy is not a gateway")]
    NotAGateway { name: NameAddr },
    #[error(transparent)]
    Name(#[from] ParseAddrError),
}

/// The target in a transport header.
struct DirectTarget {
    /// The name of a service, which only a gateway accepts.
    name: Option<NameAddr>,
    port: NonZeroU16,
    protocol: Option<SessionProtocol>,
}

impl DirectTarget {
    fn from_header(header: TransportHeader) -> Result<Self, ParseAddrError> {
        let TransportHeader { name, port, protocol } = header;
        let name = name.map(|name| format!("{name}:{port}").parse()).transpose()?;
        Ok(Self { name, port, protocol })
    }
}

/// Reads the transport header. Returns the bytes after it, too.
///
/// # Errors
/// The header is missing or invalid, or it names a service and this proxy is not a gateway.
async fn read_transport_header(io: &mut Io, is_gateway: bool) -> Result<(DirectTarget, Bytes), DirectError> {
    let mut bytes = BytesMut::new();
    loop {
        match TransportHeader::decode(&bytes) {
            Decoded::Header(header, used) => {
                let _ = bytes.split_to(used);
                let target = DirectTarget::from_header(header)?;
                match target.name {
                    Some(name) if !is_gateway => return Err(DirectError::NotAGateway { name }),
                    _ => return Ok((target, bytes.freeze())),
                }
            }
            Decoded::Invalid(reason) => return Err(reason.into()),
            Decoded::Incomplete => {}
        }
        if detect::read_some(io, &mut bytes).await.map_err(DirectError::Io)? == 0 {
            return Err(DirectError::ClientClosed);
        }
    }
}

/// The application's address: the local address of the connection, with the port of the header.
fn target_addr(local: SocketAddr, target: &DirectTarget) -> SocketAddr {
    SocketAddr::new(addr::canonical(local).ip(), target.port.get())
}
