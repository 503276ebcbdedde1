//! A gateway: what peers send to names of another network goes on by the outbound side, as if our application had sent it.

use std::sync::Arc;

use http::{Request, Response};
use tulle_core::addr::NameAddr;

use crate::{
    api::destination::Suffixes,
    http::{body::Body, error::Error},
    inbound::gateway::{Gateway, Going, Onward},
    net::io::Io,
    outbound::Outbound,
};

/// Goes on by the outbound side, to names with these suffixes.
pub(crate) struct Through {
    pub(crate) outbound: Arc<Outbound>,
    pub(crate) suffixes: Suffixes,
}

impl Through {
    fn check(&self, name: &NameAddr) -> Result<(), Error> {
        match self.suffixes.contain(&name.name) {
            true => Ok(()),
            false => Err(Error::GatewayDomain(name.name.clone())),
        }
    }
}

impl Gateway for Through {
    fn send<'a>(&'a self, onward: &'a Onward, req: &'a mut Request<Body>) -> Going<'a, Response<Body>> {
        Box::pin(async move {
            self.check(&onward.name)?;
            let Onward {
                name,
                worker,
                client,
                drain,
            } = onward;
            self.outbound.send_to(name, *worker, *client, drain, req).await
        })
    }

    fn open<'a>(&'a self, name: &'a NameAddr) -> Going<'a, Io> {
        Box::pin(async move {
            self.check(name)?;
            self.outbound.open_to(name).await
        })
    }
}
