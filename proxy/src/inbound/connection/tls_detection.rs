//! Detects TLS and the protocol from the first bytes of a connection.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::{io::AsyncRead, time::Instant};

use crate::{
    inbound::{
        connection::{context::Connection, started_connection::PortClient},
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

/// The first bytes of a connection, before TLS.
pub(super) enum TlsDetection {
    /// TLS for this proxy; the bytes are its start.
    Terminate(Bytes),
    /// TLS for another server name; it is passed through.
    PassThrough { seen: Bytes, sni: String },
    /// No TLS for this proxy; how the connection began.
    Plain(FirstBytes),
}

/// True if the client has sent bytes that are not a complete ClientHello.
pub(super) fn is_not_client_hello(first: &FirstBytes) -> bool {
    matches!(first, FirstBytes::Client(prefix, ..) if !matches!(tls_server::parse_client_hello(prefix), ParsedHello::ClientHello { .. }))
}

impl Connection {
    /// Detects TLS. If the policy asks for detection and the client is silent, the server is dialled too, because it may speak
    /// first. A policy with rules for HTTP requests excludes this: HTTP clients speak first.
    pub(super) async fn detect_tls(
        &self,
        stream: Tcp,
        client: &PortClient,
        current: &ActivePolicy,
    ) -> Result<(Tcp, TlsDetection), &'static str> {
        let limit = self.inbound.detect_timeout;
        let deadline = Instant::now() + limit;
        let mut stream = stream;
        let first = if let ServerProtocol::Detect { timeout, .. } = &current.server_policy.protocol {
            let limit = (*timeout).min(limit);
            match self.detect_protocol(&mut stream, client, current, limit).await {
                Ok(first) => first,
                Err(_) => {
                    stream.reset(); // client or application
                    return Err("i/o");
                }
            }
        } else {
            let mut prefix = BytesMut::new();
            match read_more(&mut stream, &mut prefix, deadline).await? {
                0 => FirstBytes::Closed,
                _ => FirstBytes::Client(prefix.freeze(), DetectedProtocol::Incomplete, None),
            }
        };
        let FirstBytes::Client(prefix, verdict, app) = first else {
            return Ok((stream, TlsDetection::Plain(first)));
        };
        if prefix.is_empty() && app.is_none() {
            stream.reset();
            return Err(TLS_DETECTION_TIMEOUT_ERROR); // the client was silent, and there is no connection to the application
        }
        let mut prefix = BytesMut::from(prefix);
        loop {
            match tls_server::parse_client_hello(&prefix) {
                ParsedHello::NotTls => {
                    return Ok((
                        stream,
                        TlsDetection::Plain(FirstBytes::Client(prefix.freeze(), verdict, app)),
                    ));
                }
                ParsedHello::ClientHello { sni: Some(sni) } if self.inbound.creds.is_own_server_name(&sni) => {
                    return Ok((stream, TlsDetection::Terminate(prefix.freeze())));
                }
                ParsedHello::ClientHello { sni: Some(sni) } => {
                    return Ok((
                        stream,
                        TlsDetection::PassThrough {
                            seen: prefix.freeze(),
                            sni,
                        },
                    ));
                }
                ParsedHello::ClientHello { sni: None } => {
                    return Ok((
                        stream,
                        TlsDetection::Plain(FirstBytes::Client(prefix.freeze(), DetectedProtocol::NotHttp, app)),
                    ));
                }
                ParsedHello::Incomplete => {
                    if read_more(&mut stream, &mut prefix, deadline).await? == 0 {
                        return Ok((
                            stream,
                            TlsDetection::Plain(FirstBytes::Client(prefix.freeze(), DetectedProtocol::NotHttp, app)),
                        ));
                    }
                }
            }
        }
    }

    /// Waits for the first bytes of a port whose protocol is detected.
    pub(super) async fn detect_protocol(
        &self,
        stream: &mut (impl AsyncRead + Unpin),
        client: &PortClient,
        current: &ActivePolicy,
        limit: Duration,
    ) -> std::io::Result<FirstBytes> {
        let is_terminated = matches!(client.tls, ServerTls::Terminated { .. });
        let learned = &client.port_policy.learned_speakers[usize::from(is_terminated)];
        if current.requires_http {
            return first_bytes::wait_for_client(stream, learned, limit).await;
        }
        let forward = self.opaque_forwarder(client);
        first_bytes::wait_for_either(stream, learned, limit, || forward.dial_if_authorized(current)).await
    }
}

/// Reads more bytes from the client. Resets the connection on a timeout or error.
async fn read_more(stream: &mut Tcp, prefix: &mut BytesMut, deadline: Instant) -> Result<usize, &'static str> {
    let read = match tokio::time::timeout_at(deadline, detect::read_some(stream, prefix)).await {
        Ok(read) => read.map_err(|_| "i/o"),
        Err(_) => Err(TLS_DETECTION_TIMEOUT_ERROR),
    };
    if read.is_err() {
        stream.reset();
    }
    read
}
