//! Connections that stop being HTTP: upgrades such as WebSocket, and CONNECT.

use tokio::sync::oneshot;
use tulle_core::drain;

use crate::net::{copy, io::Io};

/// Joins the client's connection, once the server lets go of it, with the upstream one; bytes pass until both have
/// ended.
///
/// A tunnel does not hear of a drain, it holds it open. It is cut when `refused` is ready.
pub(crate) fn spawn(
    client: oneshot::Receiver<Io>,
    mut upstream: Io,
    drain: &drain::Watch,
    refused: impl Future<Output = ()> + Send + 'static,
) {
    let guard = drain.guard();
    tokio::spawn(async move {
        let _guard = guard;
        let Ok(mut client) = client.await else {
            return tracing::debug!("the client left before its upgrade");
        };
        tokio::select! {
            copied = copy::both(&mut client, &mut upstream) => {
                if let Err(error) = copied {
                    tracing::debug!(%error, "tunnel ended");
                }
            }
            () = refused => {}
        }
    });
}
