//! Bytes to the application: authorized before it is dialled, cut when the policy turns.

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tulle_core::{info_limited, metrics::Labels};

use crate::{
    http::error::Error,
    inbound::{
        App, Inbound, Peer,
        metrics::{connection_labels, with_meta},
        policy::{Current, Port},
    },
    net::{
        connect, copy,
        io::{Io, Tcp},
    },
    policy::authz::{self, Denied},
    tls::status::ServerTls,
};

/// How a connection reaches the application as bytes.
pub(super) struct Forward<'a> {
    pub(super) inbound: &'a Inbound,
    pub(super) peer: &'a Peer,
    pub(super) tls: &'a ServerTls,
    pub(super) port: &'a Port,
}

impl Forward<'_> {
    /// Whether the client may have a connection under `current`.
    fn authorize(&self, current: &Current) -> Result<Labels, (Labels, Denied)> {
        let policy = &current.policy;
        let labels = connection_labels(self.peer.target, self.tls, &policy.meta);
        match authz::authorize(&policy.authorizations, self.peer.client.0.ip(), self.tls.proven()) {
            Ok(authorization) => {
                if authorization.meta.is_audit() {
                    tracing::info!(client = %self.peer.client.0, target = %self.peer.target, "connection audited");
                }
                Ok(with_meta(labels, "authz", &authorization.meta))
            }
            Err(denied) => Err((labels, denied)),
        }
    }

    /// Dials the application, if the client may.
    pub(super) async fn open(&self, current: &Current) -> Option<Io> {
        let permitted = self.authorize(current).ok()?;
        self.dial(&permitted).await
    }

    /// Whether the client may have a connection; if not, that is counted.
    pub(super) fn permit(&self, current: &Current) -> Option<Labels> {
        match self.authorize(current) {
            Ok(permitted) => Some(permitted),
            Err(_) if current.is_unknown => {
                let error = Error::PolicyUnknown;
                self.inbound
                    .families
                    .tcp_failed(self.peer.target, error.label(), error.cause());
                None
            }
            Err((labels, denied)) => {
                let (client, target) = (self.peer.client.0, self.peer.target);
                info_limited!(self.inbound.log, client.ip(), "connection refused", %client, %target, %denied);
                self.inbound.families.tcp_denied(&labels, denied);
                None
            }
        }
    }

    async fn dial(&self, permitted: &Labels) -> Option<Io> {
        let App { target, client } = self.inbound.reached_by(self.peer);
        match connect::dial_as(client, target, &self.inbound.connect).await {
            Ok(stream) => {
                self.inbound.families.tcp_allow.get(permitted).inc();
                Some(Io::tcp(Tcp::new(stream)).count(self.inbound.app_counts(target)))
            }
            Err(error) => {
                tracing::debug!(%target, %error, "application cannot be reached");
                self.inbound.families.tcp_failed(target, "i/o", error.cause());
                None
            }
        }
    }

    /// Copies between `client` and the application until both are done or the policy refuses the client.
    ///
    /// `app` is the application's side where it was dialled before, `first` what the client said meanwhile.
    pub(super) async fn run(&self, mut client: Io, app: Option<Io>, first: Bytes) {
        // It may have changed while the protocol was found out.
        let mut current = self.port.current();
        if current.demands_http {
            client.reset();
            return self.inbound.families.not_http(self.peer.target);
        }
        let Some(permitted) = self.permit(&current) else {
            return client.reset(); // as a connection that is refused
        };
        let dialled = match app {
            Some(app) => Some(app),
            None => self.dial(&permitted).await,
        };
        let Some(mut app) = dialled else {
            return client.reset();
        };
        if !first.is_empty() && app.write_all(&first).await.is_err() {
            return client.reset();
        }
        let copying = copy::both(&mut client, &mut app);
        tokio::pin!(copying);
        loop {
            tokio::select! {
                result = &mut copying => {
                    if let Err(error) = result {
                        tracing::debug!(target = %self.peer.target, %error, "connection ended");
                    }
                    return;
                }
                changed = self.port.changed_from(&current) => {
                    current = changed;
                    if current.demands_http {
                        tracing::info!(client = %self.peer.client.0, "connection ended: by a changed policy it has to be HTTP");
                        return self.inbound.families.not_http(self.peer.target);
                    }
                    if let Err((labels, denied)) = self.authorize(&current) {
                        tracing::info!(client = %self.peer.client.0, %denied, "connection ended by a changed policy");
                        return self.inbound.families.tcp_terminated(&labels, denied);
                    }
                }
            }
        }
    }
}
