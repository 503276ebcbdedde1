//! Detects TLS and the protocol from the first bytes of a connection.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::{io::AsyncRead, time::Instant};

use crate::{
    inbound::{
        connection::{classified_connection::ClientAndPortPolicy, context::Connection},
        policy::ActivePolicy,
    },
    net::{
        detect::{self, DetectedProtocol},
        first_bytes::{self, FirstBytes},
        io::Tcp,
    },
    policy::server::ServerProtocol,
    tls::{
        server::{self as tls_server, ParsedHello},
        status::ServerTls,
    },
};

/// Value of the metric label `error` if TLS detection times out.
pub(super) const TLS_DETECTION_TIMEOUT_ERROR: &str = "tls detection timeout";

/// How the proxy handles the TLS of a connection. The first bytes decide it.
pub(super) enum TlsDetection {
    /// TLS for this proxy. The bytes are the start of the TLS stream.
    Terminate(Bytes),
    /// TLS for another server name. Its bytes are forwarded unchanged.
    PassThrough { prefix: Bytes, sni: String },
    /// Everything else, for example plaintext, TLS without a server name, or first bytes of the application.
    Other(FirstBytes),
}

/// Whether the client has sent bytes that are not a complete ClientHello.
pub(super) fn is_not_client_hello(first: &FirstBytes) -> bool {
    let FirstBytes::ClientOrNeither { client_bytes, .. } = first else {
        return false;
    };
    !matches!(
        tls_server::parse_client_hello(client_bytes),
        ParsedHello::ClientHello { .. }
    )
}

impl Connection {
    /// Reads the first bytes of a connection. They decide how its TLS is handled.
    ///
    /// If the policy requires protocol detection, [`Self::detect_protocol`] reads the first bytes, and the TLS parser then gets the
    /// same bytes. Otherwise this function reads them. In both cases the client has the proxy's own `detect_timeout` to start
    /// TLS, even if the policy has a shorter timeout. If the application was dialled, and neither side has sent a byte when this
    /// time is over, the connection is opaque.
    pub(super) async fn detect_tls(
        &self,
        stream: Tcp,
        client: &ClientAndPortPolicy,
        active_policy: &ActivePolicy,
    ) -> Result<(Tcp, TlsDetection), &'static str> {
        let tls_deadline = Instant::now() + self.inbound.detect_timeout;
        let mut stream = stream;
        let first = if let ServerProtocol::Detect { timeout, .. } = &active_policy.server_policy.protocol {
            let detected = self.detect_protocol(&mut stream, client, active_policy, *timeout).await;
            let remaining = tls_deadline - Instant::now();
            let detected = match detected {
                // The policy's timeout has passed, but TLS may still begin.
                Ok(FirstBytes::ClientOrNeither {
                    client_bytes,
                    server: Some(app_io),
                    ..
                }) if client_bytes.is_empty() && !remaining.is_zero() => {
                    let learned = &client.port_policy.learned_speaker_without_tls;
                    Box::pin(first_bytes::wait_longer(&mut stream, learned, remaining, app_io)).await
                }
                detected => detected,
            };
            match detected {
                Ok(first) => first,
                Err(_) => {
                    stream.reset_on_drop(); // the client or the application has failed
                    return Err("i/o");
                }
            }
        } else {
            let mut prefix = BytesMut::new();
            match read_more(&mut stream, &mut prefix, tls_deadline).await? {
                0 => FirstBytes::Closed,
                _ => FirstBytes::ClientOrNeither {
                    client_bytes: prefix.freeze(),
                    protocol: DetectedProtocol::Incomplete,
                    server: None,
                },
            }
        };
        let (prefix, protocol, app_io) = match first {
            FirstBytes::ClientOrNeither {
                client_bytes,
                protocol,
                server,
            } if !client_bytes.is_empty() => (client_bytes, protocol, server),
            // The client is silent, and the application was not dialled.
            FirstBytes::ClientOrNeither { server: None, .. } => {
                stream.reset_on_drop();
                return Err(TLS_DETECTION_TIMEOUT_ERROR);
            }
            first => return Ok((stream, TlsDetection::Other(first))),
        };
        let mut prefix = BytesMut::from(prefix);
        let protocol = loop {
            match tls_server::parse_client_hello(&prefix) {
                ParsedHello::NotTls => break protocol,
                ParsedHello::ClientHello { sni: Some(sni) } => {
                    let prefix = prefix.freeze();
                    let detection = match self.inbound.creds.is_own_server_name(&sni) {
                        true => TlsDetection::Terminate(prefix),
                        false => TlsDetection::PassThrough { prefix, sni },
                    };
                    return Ok((stream, detection));
                }
                ParsedHello::ClientHello { sni: None } => break DetectedProtocol::NotHttp,
                ParsedHello::Incomplete => {
                    if read_more(&mut stream, &mut prefix, tls_deadline).await? == 0 {
                        break DetectedProtocol::NotHttp; // the client has closed its side
                    }
                }
            }
        };
        let first = FirstBytes::ClientOrNeither {
            client_bytes: prefix.freeze(),
            protocol,
            server: app_io,
        };
        Ok((stream, TlsDetection::Other(first)))
    }

    /// Waits for the first bytes of a connection to a port whose protocol is detected. If the client is silent, the application is
    /// dialled, because it may send first. If the policy requires HTTP, it is not dialled, because HTTP clients send first.
    pub(super) async fn detect_protocol(
        &self,
        stream: &mut (impl AsyncRead + Unpin),
        client: &ClientAndPortPolicy,
        active_policy: &ActivePolicy,
        limit: Duration,
    ) -> std::io::Result<FirstBytes> {
        let learned = match client.tls {
            ServerTls::Terminated { .. } => &client.port_policy.learned_speaker_inside_tls,
            _ => &client.port_policy.learned_speaker_without_tls,
        };
        if active_policy.requires_http {
            return first_bytes::wait_for_client(stream, learned, limit).await;
        }
        let forwarder = self.opaque_forwarder(client);
        first_bytes::wait_for_either(stream, learned, limit, || forwarder.dial_if_authorized(active_policy)).await
    }
}

/// Reads more bytes from the client. Resets the connection on a timeout or error.
async fn read_more(stream: &mut Tcp, prefix: &mut BytesMut, deadline: Instant) -> Result<usize, &'static str> {
    let read = match tokio::time::timeout_at(deadline, detect::read_some(stream, prefix)).await {
        Ok(read) => read.map_err(|_| "i/o"),
        Err(_) => Err(TLS_DETECTION_TIMEOUT_ERROR),
    };
    if read.is_err() {
        stream.reset_on_drop();
    }
    read
}
