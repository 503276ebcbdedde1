//! Forwards opaque connections. The client is authorized before the application is dialled. A policy change that denies the
//! client closes the connection.

use bytes::Bytes;
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tulle_core::{addr::NameAddr, info_limited, metrics::Labels};

use crate::{
    inbound::{
        app_clients::AppTarget, client_certificate, connection::classified_connection::ClientAndPortPolicy,
        context::Inbound, metrics::with_meta, policy::ActivePolicy,
    },
    net::{
        connect::{self, ConnectError},
        copy,
        io::{Io, Tcp},
    },
    policy::authz::{self, Denied},
};

/// Authorizes and forwards the opaque connection of a client.
pub(in crate::inbound) struct OpaqueForwarder<'a> {
    pub(in crate::inbound) inbound: &'a Inbound,
    pub(in crate::inbound) client: &'a ClientAndPortPolicy,
}

/// The decision of the policy to permit a connection.
pub(in crate::inbound) struct Permitted {
    /// Labels of the metric of permitted connections.
    labels: Labels,
    is_audited: bool,
}

impl OpaqueForwarder<'_> {
    /// Authorizes the client under `active_policy`.
    fn authorize(&self, active_policy: &ActivePolicy) -> Result<Permitted, (Labels, Denied)> {
        let policy = &active_policy.server_policy;
        let families = &self.inbound.families;
        let labels = families.connection_labels(self.client.addrs.target, &self.client.tls, &policy.meta);
        match authz::authorize(
            &policy.authorizations,
            self.client.addrs.client.0.ip(),
            self.client.tls.to_connection_tls(),
        ) {
            Ok(authorization) => Ok(Permitted {
                labels: with_meta(labels, "authz", &authorization.meta),
                is_audited: authorization.meta.is_audit(),
            }),
            Err(denied) => Err((labels, denied)),
        }
    }

    /// Dials the application if the client is authorized.
    pub(in crate::inbound) async fn dial_if_authorized(&self, active_policy: &ActivePolicy) -> Option<Io> {
        self.authorize(active_policy).ok()?;
        self.app_io_or_record_error(self.dial_app().await)
    }

    /// Authorizes the client under `active_policy`, and records a denial. Returns `None` if the client is denied.
    pub(in crate::inbound) fn authorize_and_record(&self, active_policy: &ActivePolicy) -> Option<Permitted> {
        match self.authorize(active_policy) {
            Ok(permitted) => Some(permitted),
            Err(_) if active_policy.is_unknown => {
                let error = self.client.port_policy.unknown_policy_error();
                self.inbound
                    .families
                    .record_tcp_error(self.client.addrs.target, error.label(), error.cause());
                None
            }
            Err((labels, denied)) => {
                let (client, target) = (self.client.addrs.client.0, self.client.addrs.target);
                info_limited!(self.inbound.log_limiter, client.ip(), "connection refused", %client, %target, %denied);
                self.inbound.families.record_tcp_denied(&labels, denied);
                None
            }
        }
    }

    /// Records why a connection that is not HTTP is refused on a port whose policy requires HTTP: either the client is not
    /// authorized, or the connection is not HTTP. The caller resets the connection.
    pub(super) fn record_denied_or_not_http(&self, active_policy: &ActivePolicy) {
        if self.authorize_and_record(active_policy).is_some() {
            let (client, target) = (self.client.addrs.client.0, self.client.addrs.target);
            self.inbound.families.record_not_http(target);
            tracing::debug!(%client, %target, "connection refused: it is not HTTP");
        }
    }

    async fn dial_app(&self) -> Result<TcpStream, ConnectError> {
        let AppTarget { addr, source_ip } = self.inbound.app_clients.target(&self.client.addrs);
        connect::dial_from(source_ip, addr, &self.inbound.app_clients.connect).await
    }

    /// Counts the bytes of a dialled connection, or records why there is none.
    fn app_io_or_record_error(&self, dialled: Result<TcpStream, ConnectError>) -> Option<Io> {
        let target = self.inbound.app_clients.target(&self.client.addrs).addr;
        match dialled {
            Ok(stream) => Some(Io::tcp(Tcp::new(stream)).count(self.inbound.families.app_connection_metrics(target))),
            Err(error) => {
                tracing::debug!(%target, %error, "application cannot be reached");
                self.inbound.families.record_tcp_error(target, "i/o", error.cause());
                None
            }
        }
    }

    /// Records that the connection is closed although the policy of the port permits it.
    fn record_closed(&self, active_policy: &ActivePolicy, denied: Denied) {
        let families = &self.inbound.families;
        let (client, target) = (self.client.addrs.client.0, self.client.addrs.target);
        let labels = families.connection_labels(target, &self.client.tls, &active_policy.server_policy.meta);
        info_limited!(self.inbound.log_limiter, client.ip(), "connection closed", %client, %target, %denied);
        families.record_tcp_terminated(&labels, denied);
    }

    /// Waits until the service behind the gateway is not exported any more. Never returns for connections to the application.
    async fn wait_not_exported(&self, gateway_name: Option<&NameAddr>) {
        match (gateway_name, &self.inbound.gateway) {
            (Some(name), Some(gateway)) => gateway.wait_not_exported(name).await,
            _ => std::future::pending().await,
        }
    }

    /// Copies between the client and the application, or the gateway, until both directions have ended, a changed policy denies the
    /// client, the trust anchors no longer verify its certificate, or the service behind the gateway is not exported any more.
    ///
    /// `client_prefix` are bytes already read from the client. `upstream_io` is the connection to the application, or through the
    /// gateway to the service `gateway_name`, if it is open already.
    pub(in crate::inbound) async fn forward(
        &self,
        (mut client_io, client_prefix): (Io, Bytes),
        upstream_io: Option<Io>,
        gateway_name: Option<&NameAddr>,
    ) {
        // The policy may have changed during protocol detection.
        let mut current = self.client.port_policy.current();
        if current.requires_http {
            client_io.reset_on_drop();
            return self.record_denied_or_not_http(&current);
        }
        let Some(permitted) = self.authorize_and_record(&current) else {
            return client_io.reset_on_drop(); // the reset tells the client that the connection is refused
        };
        let log_audited = || {
            let (client, target) = (self.client.addrs.client.0, self.client.addrs.target);
            let client_and_port = (client.ip(), target.port());
            info_limited!(self.inbound.audit_log_limiter, client_and_port, "connection audited", %client, %target);
        };
        if permitted.is_audited {
            log_audited();
        }
        let upstream_io = match upstream_io {
            Some(io) => Some(io),
            None => self.app_io_or_record_error(connect::dial_until_accepted(|| self.dial_app()).await),
        };
        let Some(mut upstream_io) = upstream_io else {
            return client_io.reset_on_drop();
        };
        self.inbound.families.tcp_allow.get(&permitted.labels).inc();
        let mut was_audited = permitted.is_audited;
        if !client_prefix.is_empty() && upstream_io.write_all(&client_prefix).await.is_err() {
            return client_io.reset_on_drop();
        }
        // If this future is dropped before its end, both connections are reset.
        let copy_future = copy::copy_bidirectional(&mut client_io, &mut upstream_io);
        let not_exported = self.wait_not_exported(gateway_name);
        tokio::pin!(copy_future, not_exported);
        loop {
            tokio::select! {
                result = &mut copy_future => {
                    if let Err(error) = result {
                        tracing::debug!(target = %self.client.addrs.target, %error, "connection ended");
                    }
                    return;
                }
                () = client_certificate::wait_untrusted(self.client.chain.as_deref()) => {
                    return self.record_closed(&current, Denied::CertificateUntrusted);
                }
                () = &mut not_exported => return self.record_closed(&current, Denied::NotExported),
                changed = self.client.port_policy.wait_changed(&current) => {
                    current = changed;
                    let (client, log) = (self.client.addrs.client.0, &self.inbound.log_limiter);
                    match self.authorize(&current) {
                        Ok(permitted) => {
                            if permitted.is_audited && !was_audited {
                                log_audited();
                            }
                            was_audited = permitted.is_audited;
                        }
                        Err((labels, denied)) => {
                            info_limited!(log, client.ip(), "connection closed by a policy change", %client, %denied);
                            return self.inbound.families.record_tcp_terminated(&labels, denied);
                        }
                    }
                    if current.requires_http {
                        info_limited!(log, client.ip(), "connection closed: the changed policy requires HTTP", %client);
                        return self.inbound.families.record_not_http(self.client.addrs.target);
                    }
                }
            }
        }
    }
}
