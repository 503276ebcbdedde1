//! Connections that stop being HTTP: upgrades such as WebSocket, and CONNECT.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tulle_core::drain;

use crate::net::{copy, io::Io};

/// Joins the client's connection, once hyper lets go of it, with the upstream one; bytes pass until both have ended.
///
/// A tunnel does not hear of a drain, it holds it open.
pub(crate) fn spawn(client: OnUpgrade, mut upstream: Io, drain: &drain::Watch) {
    let guard = drain.guard();
    tokio::spawn(async move {
        let _guard = guard;
        let upgraded = match client.await {
            Ok(upgraded) => upgraded,
            Err(error) => return tracing::debug!(%error, "client left before its upgrade"),
        };
        // Our servers only ever serve `TokioIo<Io>`; taking it apart spares a layer.
        let result = match upgraded.downcast::<TokioIo<Io>>() {
            Ok(parts) => {
                let mut io = parts.io.into_inner().unread(parts.read_buf);
                copy::both(&mut io, &mut upstream).await
            }
            Err(upgraded) => copy::both(&mut TokioIo::new(upgraded), &mut upstream).await,
        };
        if let Err(error) = result {
            tracing::debug!(%error, "tunnel ended");
        }
    });
}
