//! Accepts and serves one connection (I1–I7): policy, TLS, protocol detection. Then HTTP is served request by request, and other
//! bytes are forwarded.

mod classified_connection;
mod context;
mod direct;
mod http;
mod opaque;
mod redirected;
mod tls_detection;

use std::sync::Arc;

use tulle_core::{
    addr::{ClientAddr, OrigDst},
    drain, info_limited,
};

use self::{
    classified_connection::{ClassifiedConnection, ClassifiedOpaque},
    context::Connection,
};
use crate::{
    inbound::{connection_addrs::ConnectionAddrs, context::Inbound},
    net::{copy::CopyFuture, io::Tcp},
};

impl Inbound {
    /// Serves one accepted connection. Returns once an HTTP connection has ended; for an opaque connection, returns the future
    /// that copies its bytes.
    pub(crate) async fn serve(
        self: Arc<Self>,
        worker: usize,
        stream: Tcp,
        client: ClientAddr,
        drain: drain::Watch,
    ) -> Option<CopyFuture> {
        // I1
        let OrigDst(target) = match (self.orig_dst_lookup)(stream.socket(), client.0) {
            Ok(target) => target,
            Err(error) => {
                tracing::debug!(client = %client.0, %error, "reading the original destination failed");
                stream.reset_on_drop();
                return None;
            }
        };
        if !self.local_ips.is_empty() && !self.local_ips.contains(&target.ip()) {
            let ip = client.0.ip();
            info_limited!(self.log_limiter, ip, "refused: not an address of this workload", client = %client.0, %target);
            self.families.record_foreign_target();
            stream.reset_on_drop();
            return None;
        }
        if let Some(refusal) = self.service_stack.admission.connection_refusal(&stream) {
            self.families.record_tcp_error(target, refusal.label(), refusal.cause());
            tracing::debug!(client = %client.0, %target, %refusal, "connection refused");
            stream.reset_on_drop();
            return None;
        }
        let connection = Connection {
            inbound: self,
            worker,
            drain,
        };
        let classified = if target.port() == connection.inbound.own_port {
            Box::pin(connection.classify_direct(stream, client, target)).await // I2
        } else {
            connection
                .classify_redirected(stream, ConnectionAddrs { client, target }) // I3 to I5
                .await
        };
        let serving = match classified? {
            ClassifiedConnection::Http(http) => connection.serve_http(http), // I7
            ClassifiedConnection::Opaque(opaque) => return Some(Box::pin(connection.serve_opaque(opaque))), // I6
        };
        // Awaited here and not inside the detection future, so that an idle HTTP connection does not hold the state of detection.
        serving.await;
        None
    }
}

impl Connection {
    async fn serve_opaque(self, opaque: ClassifiedOpaque) {
        let ClassifiedOpaque {
            io,
            upstream_io,
            client_prefix,
            client,
            gateway_name,
        } = opaque;
        self.opaque_forwarder(&client)
            .forward((io, client_prefix), upstream_io, gateway_name.as_ref())
            .await;
    }
}
