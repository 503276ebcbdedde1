//! Connections that a redirect rule sent to the proxy (I3–I5): port policy, TLS, protocol.

use std::sync::Arc;

use bytes::BytesMut;
use tokio::time::Instant;
use tulle_core::info_limited;

use crate::{
    http::client::HttpVersion,
    inbound::{
        connection::{
            classified_connection::{ClassifiedConnection, ClassifiedHttp, ClassifiedOpaque, ClientAndPortPolicy},
            context::Connection,
            tls_detection::{TLS_DETECTION_TIMEOUT_ERROR, TlsDetection, is_not_client_hello},
        },
        connection_addrs::ConnectionAddrs,
        policy::ActivePolicy,
    },
    metrics::hosts::HostSource,
    net::{
        detect::{self, DetectedProtocol},
        first_bytes::FirstBytes,
        io::{Io, Tcp},
    },
    policy::{authz::Denied, server::ServerProtocol},
    tls::{
        credentials::Alpn,
        status::{NoServerTls, ServerTls},
    },
};

impl Connection {
    /// Finds the protocol of a redirected connection, under the policy of the dialled port.
    pub(super) async fn classify_redirected(
        &self,
        stream: Tcp,
        addrs: ConnectionAddrs,
    ) -> Option<ClassifiedConnection> {
        let (port_policy, active_policy) = self.wait_port_policy(&addrs).await; // I3
        let client = |tls| ClientAndPortPolicy {
            addrs,
            tls,
            chain: None,
            port_policy: port_policy.clone(),
        };
        if active_policy.server_policy.protocol == ServerProtocol::Opaque {
            let client = client(ServerTls::Plain(NoServerTls::PortSkipped));
            let io = self.with_client_metrics(stream, &client, &active_policy);
            return Some(ClassifiedConnection::opaque(io, client));
        }
        let plaintext_client = client(ServerTls::Plain(NoServerTls::NoTlsFromRemote));
        let began_at = Instant::now();
        // I4
        let (stream, detection) = match self.detect_tls(stream, &plaintext_client, &active_policy).await {
            Ok(detected) => detected,
            Err(error) => {
                self.record_detection_error(&plaintext_client, &active_policy, error);
                return None;
            }
        };
        match detection {
            TlsDetection::Terminate(prefix) => {
                let (io, tls, chain) = self.terminate_tls(stream, prefix, &addrs, Alpn::Unset).await?;
                let io = io.count(self.inbound.client_connection_metrics(&addrs, &tls, &active_policy));
                let client = ClientAndPortPolicy { chain, ..client(tls) };
                self.classify_after_tls(io, client, active_policy).await // I5
            }
            TlsDetection::PassThrough { prefix, sni } => {
                let is_label = self.inbound.server_name_labels.add(&sni, HostSource::Untrusted);
                let sni = if is_label { sni } else { String::new() };
                let client = client(ServerTls::PassedThrough { sni });
                if active_policy.requires_http {
                    self.opaque_forwarder(&client).record_denied_or_not_http(&active_policy);
                    stream.reset_on_drop();
                    return None;
                }
                let io = self.with_client_metrics(stream.prepend(prefix), &client, &active_policy);
                Some(ClassifiedConnection::opaque(io, client))
            }
            TlsDetection::Other(first)
                if active_policy.server_policy.protocol == ServerProtocol::Tls && is_not_client_hello(&first) =>
            {
                self.record_not_tls(&plaintext_client, &active_policy);
                stream.reset_on_drop();
                None
            }
            TlsDetection::Other(first) => {
                let metrics = self
                    .inbound
                    .client_connection_metrics(&addrs, &plaintext_client.tls, &active_policy);
                metrics.record_read(first.n_read() as u64); // counts the bytes that detection has read
                let io = Io::tcp(stream).count(metrics);
                self.record_detection(Some(&first), &addrs, &active_policy, began_at);
                self.classify_by_first_bytes(io, first, plaintext_client, active_policy)
            }
        }
    }

    /// Finds the protocol of a connection whose TLS was terminated: from the policy, or by detection.
    pub(super) async fn classify_after_tls(
        &self,
        mut io: Io,
        client: ClientAndPortPolicy,
        active_policy: Arc<ActivePolicy>,
    ) -> Option<ClassifiedConnection> {
        let protocol = match &active_policy.server_policy.protocol {
            ServerProtocol::Detect { timeout, .. } => {
                let began_at = Instant::now();
                let first = self.detect_protocol(&mut io, &client, &active_policy, *timeout).await;
                self.record_detection(first.as_ref().ok(), &client.addrs, &active_policy, began_at);
                return match first {
                    Ok(first) => self.classify_by_first_bytes(io, first, client, active_policy),
                    Err(_) => {
                        let families = &self.inbound.families;
                        // In most cases the client has failed: the application is dialled only if the client is silent.
                        families.record_tcp_error(client.addrs.target, "i/o", "client-left");
                        io.reset_on_drop(); // the client or the application has failed
                        None
                    }
                };
            }
            // The client's proxy may have converted HTTP/1 to HTTP/2.
            ServerProtocol::Http1(_) => {
                let mut prefix = BytesMut::new();
                let detection = detect::detect(&mut io, &mut prefix, self.inbound.detect_timeout).await;
                io = io.prepend(prefix.freeze());
                match detection {
                    Ok(detect::Detection::Detected(DetectedProtocol::Http2)) => HttpVersion::Http2,
                    Ok(detect::Detection::Closed) => return None,
                    Err(_) => {
                        io.reset_on_drop(); // the client has failed
                        return None;
                    }
                    Ok(_) => HttpVersion::Http1,
                }
            }
            ServerProtocol::Http2(_) | ServerProtocol::Grpc(_) => HttpVersion::Http2,
            ServerProtocol::Opaque | ServerProtocol::Tls => return Some(ClassifiedConnection::opaque(io, client)),
        };
        Some(ClassifiedConnection::Http(ClassifiedHttp {
            io,
            protocol,
            client,
            gateway_name: None,
        }))
    }

    /// Finds the protocol of a connection by its first bytes and the policy.
    fn classify_by_first_bytes(
        &self,
        io: Io,
        first: FirstBytes,
        client: ClientAndPortPolicy,
        active_policy: Arc<ActivePolicy>,
    ) -> Option<ClassifiedConnection> {
        let (client_prefix, detected, app_io) = match first {
            FirstBytes::Closed => return None,
            FirstBytes::Server {
                server: app_io,
                client_bytes,
            } => (client_bytes, DetectedProtocol::NotHttp, Some(app_io)),
            FirstBytes::ClientOrNeither {
                client_bytes,
                protocol,
                server,
            } => (client_bytes, protocol, server),
        };
        let protocol = match (&active_policy.server_policy.protocol, detected) {
            (ServerProtocol::Http1(_), _) | (ServerProtocol::Detect { .. }, DetectedProtocol::Http1) => {
                HttpVersion::Http1
            }
            (ServerProtocol::Http2(_) | ServerProtocol::Grpc(_), _)
            | (ServerProtocol::Detect { .. }, DetectedProtocol::Http2) => HttpVersion::Http2,
            _ if active_policy.requires_http => {
                self.opaque_forwarder(&client).record_denied_or_not_http(&active_policy);
                io.reset_on_drop();
                return None;
            }
            _ => {
                return Some(ClassifiedConnection::Opaque(ClassifiedOpaque {
                    io,
                    upstream_io: app_io,
                    client_prefix,
                    client,
                    gateway_name: None,
                }));
            }
        };
        drop(app_io); // HTTP requests use the connections of the pool
        Some(ClassifiedConnection::Http(ClassifiedHttp {
            io: io.prepend(client_prefix),
            protocol,
            client,
            gateway_name: None,
        }))
    }

    /// Records a connection that ended during detection. If the client is not authorized, the denial is recorded instead.
    fn record_detection_error(&self, client: &ClientAndPortPolicy, active_policy: &ActivePolicy, error: &'static str) {
        let addrs = &client.addrs;
        let permitted = self.opaque_forwarder(client).authorize_and_record(active_policy);
        if permitted.is_some() {
            let cause = match error {
                TLS_DETECTION_TIMEOUT_ERROR => "detect-timeout",
                _ => "client-left",
            };
            self.inbound.families.record_tcp_error(addrs.target, error, cause);
        }
        tracing::debug!(client = %addrs.client.0, error, "connection ended before it was served");
    }

    /// Records a connection without TLS to a port that requires TLS.
    fn record_not_tls(&self, client: &ClientAndPortPolicy, active_policy: &ActivePolicy) {
        let addrs = &client.addrs;
        let families = &self.inbound.families;
        let labels = families.connection_labels(addrs.target, &client.tls, &active_policy.server_policy.meta);
        families.record_tcp_denied(&labels, Denied::NoTls);
        let (client, target) = (addrs.client.0, addrs.target);
        info_limited!(self.inbound.log_limiter, client.ip(), "connection refused: this port requires TLS", %client, %target);
    }
}
