//! Serves HTTP connections (I7).

use std::{future::pending, sync::Arc};

use futures_util::FutureExt as _;
use http::HeaderValue;
use parking_lot::Mutex;
use tulle_core::{addr::Addr, connections::ConnectionHandle};

use crate::{
    http::{
        connection_closer::{CloseSignals, ConnectionCloser},
        server,
        stack::error_response::{ConnectionInfo, ErrorDetail},
    },
    inbound::{
        client_certificate::ClientCertificate,
        connection::{
            classified_connection::{ClassifiedHttp, ClientAndPortPolicy},
            context::Connection,
        },
        gateway::GatewayConnection,
        request::context::{HttpConnection, Upstream},
        run_until,
    },
};

impl Connection {
    pub(super) fn serve_http(&self, http: ClassifiedHttp) -> impl Future<Output = ()> {
        let ClassifiedHttp {
            io,
            protocol,
            client,
            gateway_name,
        } = http;
        let is_authorized = client.is_authorized();
        let ClientAndPortPolicy {
            addrs,
            tls,
            chain,
            port_policy,
        } = client;
        let inbound = &self.inbound;
        let config = match (is_authorized, tls.client_id()) {
            (false, _) => &inbound.server_configs.unauthorized,
            (true, None) => &inbound.server_configs.unmeshed,
            (true, Some(_)) => &inbound.server_configs.meshed,
        };
        let closer = ConnectionCloser::default();
        let client_id = tls.client_id().and_then(|id| HeaderValue::from_str(id.as_str()).ok());
        let error_detail = if client_id.is_some() {
            ErrorDetail::Include
        } else {
            ErrorDetail::Omit
        };
        let target = gateway_name.clone().map_or(Addr::Socket(addrs.target), Addr::Name);
        let upstream = match (gateway_name, &inbound.gateway) {
            (Some(name), Some(gateway)) => {
                let gateway_connection = GatewayConnection {
                    name,
                    worker: self.worker,
                    client: addrs.client.0,
                    drain: self.drain.clone(),
                };
                Upstream::Gateway(gateway.clone(), Box::new(gateway_connection))
            }
            _ => Upstream::App(inbound.app_clients.client(self.worker, &addrs)),
        };
        let connection = Arc::new(HttpConnection {
            protocol,
            upstream,
            inbound: inbound.clone(),
            addrs,
            tls,
            certificate: ClientCertificate::new(chain),
            port_policy,
            client_id: client_id.clone(),
            authorized_routes: Mutex::default(),
            cached_authority: Mutex::default(),
            unauthorized_closer: (!is_authorized).then(|| closer.clone()),
            drain: self.drain.clone(),
        });
        let info = ConnectionInfo {
            direction: "inbound",
            proxy_identity: inbound.identity_name.clone(),
            target,
            client_addr: addrs.client.0,
            client_id,
            error_labeler: Some(connection.clone()),
        };
        let stop_signal = wait_until_stopped(connection.clone(), io.handle(), closer.clone());
        let serve = move |mut req| {
            let connection = connection.clone();
            async move { connection.serve(&mut req).await }
        };
        let service = inbound.service_stack.build(serve, error_detail, info, closer.clone());
        let signals = CloseSignals {
            closer,
            drain: &self.drain,
        };
        let serving = server::serve(io, protocol, service, config, signals);
        run_until::run_until(stop_signal, serving).map(move |served| {
            if let Some(Err(error)) = served {
                tracing::debug!(client = %addrs.client.0, %error, "HTTP connection ended");
            }
        })
    }
}

/// Waits until a changed policy denies a request in progress, or the certificate of the client ends the connection. If a request is
/// in progress at that time, dropping the connection resets it, provided that the client has acknowledged all data.
async fn wait_until_stopped(
    connection: Arc<HttpConnection>,
    handle: Option<ConnectionHandle>,
    closer: ConnectionCloser,
) {
    // Boxed, so that the futures of connections without a certificate stay small.
    let has_certificate = connection.certificate.chain.is_some();
    let certificate_end = has_certificate.then(|| Box::pin(connection.clone().wait_until_certificate_ends(closer)));
    let certificate_end = async {
        match certificate_end {
            Some(certificate_end) => certificate_end.await,
            None => pending().await,
        }
    };
    tokio::select! {
        () = connection.clone().wait_until_denied() => {}
        () = certificate_end => {}
    }
    if let Some(handle) = handle
        && connection.has_request_in_progress()
    {
        handle.prefer_reset();
    }
}
