//! A gateway: forwards requests to services that clients name in the transport header. The outbound side sends them, as if the
//! local application had sent them.

use std::{pin::Pin, sync::Arc};

use http::{Request, Response};
use tulle_core::addr::{ClientAddr, NameAddr};

use crate::{
    api::destination::Suffixes,
    http::{body::Body, error::Error},
    inbound::gateway::{Gateway, GatewayConnection, GatewayFuture},
    net::io::Io,
    outbound::{AcceptedClient, Outbound},
};

/// A gateway to the services whose names have one of these suffixes.
pub(crate) struct OutboundGateway {
    pub(crate) outbound: Arc<Outbound>,
    pub(crate) suffixes: Suffixes,
}

impl OutboundGateway {
    fn check_suffix(&self, name: &NameAddr) -> Result<(), Error> {
        match self.suffixes.matches(&name.name) {
            true => Ok(()),
            false => Err(Error::GatewayDomain(name.name.clone())),
        }
    }
}

impl Gateway for OutboundGateway {
    fn send<'a>(
        &'a self,
        connection: &'a GatewayConnection,
        req: &'a mut Request<Body>,
    ) -> GatewayFuture<'a, Response<Body>> {
        Box::pin(async move {
            self.check_suffix(&connection.name)?;
            let GatewayConnection {
                name,
                worker,
                client,
                drain,
            } = connection;
            let client = AcceptedClient {
                worker: *worker,
                addr: ClientAddr(*client),
                drain: drain.clone(),
            };
            self.outbound.send_to_service(name, client, req).await
        })
    }

    fn connect<'a>(&'a self, name: &'a NameAddr) -> GatewayFuture<'a, Io> {
        Box::pin(async move {
            self.check_suffix(name)?;
            self.outbound.connect_to_service(name).await
        })
    }

    fn wait_not_exported<'a>(&'a self, name: &'a NameAddr) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(self.outbound.wait_not_exported(name))
    }
}
