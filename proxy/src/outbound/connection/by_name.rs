//! Requests and connections to a service by name, for the gateway.

use std::sync::Arc;

use http::{Request, Response};
use tulle_core::addr::{Addr, NameAddr};

use crate::{
    http::{body::Body, error::Error},
    net::io::Io,
    outbound::{
        connection::{
            context::{AcceptedClient, Outbound},
            http::{HttpConnection, TargetSource},
            opaque,
        },
        destination::snapshot::{Destination, Plan},
        endpoint::LocalEndpoints,
    },
};

impl Outbound {
    /// Sends a request to the service `name`.
    ///
    /// # Errors
    /// The control plane does not know the service, it is not exported, its endpoint is this workload, or the request failed.
    pub(crate) async fn send_to_service(
        self: &Arc<Self>,
        name: &NameAddr,
        client: AcceptedClient,
        req: &mut Request<Body>,
    ) -> Result<Response<Body>, Error> {
        let connection = HttpConnection {
            outbound: self.clone(),
            client,
            target_source: TargetSource::GatewayService(self.service_destination(name).await?),
        };
        connection.serve(req).await
    }

    /// Opens a connection for opaque bytes to the service `name`.
    ///
    /// # Errors
    /// The control plane does not know the service, or the service is not exported, does not accept opaque bytes, cannot be reached,
    /// or has this workload as its endpoint.
    pub(crate) async fn connect_to_service(&self, name: &NameAddr) -> Result<Io, Error> {
        let snapshot = self.service_destination(name).await?.snapshot();
        match &snapshot.plan {
            Plan::Opaque(route) | Plan::Detect { opaque: route, .. } => {
                let opened = opaque::open(route, LocalEndpoints::Refuse).await;
                opened.map_err(|error| error.into_http_error(&snapshot))
            }
            Plan::Http1(_) | Plan::Http2(_) | Plan::Tls { .. } => Err(Error::RouteNotFound),
        }
    }

    /// Waits until the service `name` is not exported any more. Never returns if the service is not known.
    pub(crate) async fn wait_not_exported(&self, name: &NameAddr) {
        let found = self.discovery.get(Addr::Name(name.clone()), self.detect_timeout).await;
        // The policy is watched as long as the destination is held.
        let Ok(destination) = found else {
            return std::future::pending().await;
        };
        let mut published = destination.has_snapshot.subscribe();
        while !destination.snapshot().policy.meta.is_not_exported() {
            if published.changed().await.is_err() {
                return std::future::pending().await; // does not happen: the destination keeps the sender
            }
        }
    }

    /// The destination of a service. Names of other targets are refused, without a DNS lookup, and so are services that the control
    /// plane does not permit this gateway to serve.
    async fn service_destination(&self, name: &NameAddr) -> Result<Arc<Destination>, Error> {
        let found = self
            .discovery
            .get(Addr::Name(name.clone()), self.detect_timeout)
            .await?;
        let snapshot = found.snapshot();
        if snapshot.is_unknown_name {
            return Err(Error::RouteNotFound);
        }
        if snapshot.policy.meta.is_not_exported() {
            return Err(Error::GatewayNotExported(name.name.clone()));
        }
        Ok(found)
    }
}
