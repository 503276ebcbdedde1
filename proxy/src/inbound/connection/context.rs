//! One accepted connection, and the steps that redirected and direct connections share.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;
use tulle_core::{drain, info_limited};

use crate::{
    inbound::{
        connection::{classified_connection::ClientAndPortPolicy, opaque::OpaqueForwarder},
        connection_addrs::ConnectionAddrs,
        context::Inbound,
        policy::{ActivePolicy, PortPolicy},
    },
    net::{
        first_bytes::FirstBytes,
        io::{Io, Tcp},
    },
    policy::server::ServerProtocol,
    tls::{client_chains::ClientChain, credentials::Alpn, server as tls_server, status::ServerTls},
};

/// The context of one accepted connection. Its methods get the stream as an argument.
pub(in crate::inbound) struct Connection {
    pub(in crate::inbound) inbound: Arc<Inbound>,
    pub(in crate::inbound) worker: usize,
    pub(in crate::inbound) drain: drain::Watch,
}

impl Connection {
    /// Returns the policy of the target port. Waits for it, for a bounded time, if it has not been received yet.
    pub(super) async fn wait_port_policy(&self, addrs: &ConnectionAddrs) -> (Arc<PortPolicy>, Arc<ActivePolicy>) {
        let (ports, target, client_ip) = (&self.inbound.port_policies, addrs.target, addrs.client.0.ip());
        let port_policy = match ports.get_watched(target.port()) {
            Some(port_policy) if port_policy.is_received() => port_policy,
            _ => Box::pin(ports.wait_for_policy(target, client_ip)).await,
        };
        let active_policy = port_policy.current();
        if active_policy.is_unknown {
            ports.warn_unknown_policy(target.port(), &port_policy, client_ip);
        }
        (port_policy, active_policy)
    }

    pub(super) fn with_client_metrics(
        &self,
        tcp: Tcp,
        client: &ClientAndPortPolicy,
        active_policy: &ActivePolicy,
    ) -> Io {
        let metrics = self
            .inbound
            .client_connection_metrics(&client.addrs, &client.tls, active_policy);
        Io::tcp(tcp).count(metrics)
    }

    pub(super) fn opaque_forwarder<'a>(&'a self, client: &'a ClientAndPortPolicy) -> OpaqueForwarder<'a> {
        OpaqueForwarder {
            inbound: &self.inbound,
            client,
        }
    }

    /// Terminates TLS. Returns `None` if the handshake fails or takes too long, or if its ALPN protocol is not `alpn`. These
    /// failures are counted by reason, and reset the connection. `alpn` is the protocol of the transport header for direct
    /// connections, and [`Alpn::Unset`] for others. The last element of the result is the client's certificates.
    pub(super) async fn terminate_tls(
        &self,
        stream: Tcp,
        prefix: Bytes,
        addrs: &ConnectionAddrs,
        alpn: Alpn,
    ) -> Option<(Io, ServerTls, Option<Arc<ClientChain>>)> {
        let handshake = tls_server::accept_or_reset(stream.prepend(prefix), &self.inbound.creds, alpn);
        match tokio::time::timeout(self.inbound.detect_timeout, handshake).await {
            Ok(Ok((tls, client_handshake))) if client_handshake.alpn != alpn => {
                tls.get_ref().0.reset_on_drop();
                let families = &self.inbound.families;
                families.record_tcp_error(addrs.target, "transport header", "bad-transport-header");
                let client = addrs.client.0;
                info_limited!(self.inbound.log_limiter, client.ip(), "connection refused: unexpected ALPN protocol", %client);
                None
            }
            Ok(Ok((tls, client_handshake))) => Some((
                Io::tls_server(tls),
                ServerTls::Terminated {
                    client_id: client_handshake.client_id,
                },
                client_handshake.chain,
            )),
            Ok(Err(error)) => {
                self.inbound
                    .families
                    .record_handshake_failure(addrs.target, error.failure());
                let (client, target) = (addrs.client.0, addrs.target);
                info_limited!(self.inbound.log_limiter, client.ip(), "TLS handshake failed", %client, %target, %error);
                None
            }
            Err(_) => {
                // Linkerd uses this label for every timeout before TLS is terminated.
                let families = &self.inbound.families;
                families.record_tcp_error(addrs.target, "tls detection timeout", "detect-timeout");
                None
            }
        }
    }

    /// Counts the detected protocol, if the policy requires protocol detection.
    pub(super) fn record_detection(
        &self,
        first: Option<&FirstBytes>,
        addrs: &ConnectionAddrs,
        active_policy: &ActivePolicy,
        began_at: Instant,
    ) {
        if let ServerProtocol::Detect { .. } = &active_policy.server_policy.protocol {
            let families = &self.inbound.families;
            let series = families.detect_series(&active_policy.server_policy.meta, addrs.target);
            series.record(first, began_at.elapsed());
        }
    }
}
