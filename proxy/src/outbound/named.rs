//! What goes to a service by its name on behalf of somebody else than our application.

use std::{net::SocketAddr, sync::Arc};

use http::{Request, Response};
use tulle_core::{
    addr::{Addr, NameAddr},
    drain,
};

use crate::{
    http::{body::Body, error::Error},
    net::io::Io,
    outbound::{
        Outbound,
        destination::{Destination, Plan},
        explicit,
        http::{HttpConnection, Targets},
        opaque,
    },
};

impl Outbound {
    /// Sends a request to the service of a name.
    ///
    /// # Errors
    /// The control plane knows no such service, or it brought no response.
    pub(crate) async fn send_to(
        self: &Arc<Self>,
        name: &NameAddr,
        worker: usize,
        client: SocketAddr,
        drain: &drain::Watch,
        req: &mut Request<Body>,
    ) -> Result<Response<Body>, Error> {
        let connection = HttpConnection {
            outbound: self.clone(),
            worker,
            client,
            targets: Targets::Dialled(self.service(name).await?),
            drain: drain.clone(),
        };
        connection.serve(req).await
    }

    /// Opens a connection for bytes to the service of a name.
    ///
    /// # Errors
    /// The control plane knows no such service, it takes no bytes, or it cannot be reached.
    pub(crate) async fn open_to(&self, name: &NameAddr) -> Result<Io, Error> {
        let snapshot = self.service(name).await?.snapshot();
        match &snapshot.plan {
            Plan::Opaque(plan) | Plan::Detect { opaque: plan, .. } => {
                let opened = opaque::open(plan).await;
                opened.map_err(|error| explicit::answered(error, &snapshot))
            }
            Plan::Http1(_) | Plan::Http2(_) | Plan::Tls { .. } => Err(Error::RouteNotFound),
        }
    }

    /// What is known of a service; DNS is not asked for others.
    async fn service(&self, name: &NameAddr) -> Result<Arc<Destination>, Error> {
        let found = self.discover.get(Addr::Name(name.clone()), self.detect_timeout).await?;
        match found.snapshot().is_foreign {
            true => Err(Error::RouteNotFound),
            false => Ok(found),
        }
    }
}
