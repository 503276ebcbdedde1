//! The state of the outbound side that all connections share.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tulle_core::{
    addr::{self, Addr, ClientAddr},
    drain,
    log_limit::LogLimiter,
};

use crate::{
    http::{
        error::Error, server_config::ServerConfig, stack::error_response::ErrorDetail, stack::layers::ServiceStack,
    },
    net::{connect::ConnectError, orig_dst},
    outbound::{
        destination::discovery::{Discovery, ResolvedTarget},
        metrics::Families,
        mode::Mode,
    },
    trace::Tracer,
};

/// The outbound side of the process; shared by all workers.
pub(crate) struct Outbound {
    pub(crate) orig_dst_lookup: orig_dst::OrigDstLookup,
    /// The listeners of this proxy. A connection to one of them is refused, because it would loop.
    pub(crate) own_listeners: Vec<SocketAddr>,
    pub(crate) discovery: Arc<Discovery>,
    pub(crate) detect_timeout: Duration,
    pub(crate) server: ServerConfig,
    pub(crate) service_stack: ServiceStack,
    pub(crate) error_detail: ErrorDetail,
    pub(crate) families: Families,
    /// Creates trace spans; `None` if tracing is disabled.
    pub(crate) tracer: Option<Tracer>,
    pub(crate) mode: Mode,
    /// The identity of this proxy.
    pub(crate) identity_name: Arc<str>,
    /// Limits the log messages about clients that are refused because of the bytes that they send, or because they dial this proxy,
    /// by the client's address.
    pub(crate) log_limiter: LogLimiter,
    /// Limits the log messages about targets that cannot be reached, by target and cause.
    pub(crate) target_log_limiter: Arc<LogLimiter<(Addr, &'static str)>>,
}

/// A client whose connection was accepted.
#[derive(Clone)]
pub(crate) struct AcceptedClient {
    /// Index of the worker that serves the client.
    pub(crate) worker: usize,
    pub(crate) addr: ClientAddr,
    pub(crate) drain: drain::Watch,
}

impl Outbound {
    /// Resolves a target that a client names.
    ///
    /// # Errors
    /// Discovery fails, DNS has no address, or the target is a listener of this proxy, or a local or multicast address.
    pub(super) async fn resolve_target(&self, target: Addr) -> Result<ResolvedTarget, Error> {
        let (destination, fallback_addrs) = match target {
            Addr::Name(name) => self.discovery.resolve_name(name, self.detect_timeout).await?,
            Addr::Socket(addr) => {
                self.check_target(addr)?;
                (self.discovery.get(target, self.detect_timeout).await?, Vec::new())
            }
        };
        // A name may resolve to an address that clients are not allowed to name.
        if let Addr::Socket(addr) = destination.target {
            self.check_target(addr)?;
        }
        Ok((destination, fallback_addrs))
    }

    /// # Errors
    /// The address is a listener of this proxy, or a local or multicast address, which clients may not name.
    fn check_target(&self, addr: SocketAddr) -> Result<(), Error> {
        if self.is_own_listener(addr) {
            return Err(Error::Connect(ConnectError::OwnListener { addr }));
        }
        match addr::is_local_or_multicast(addr.ip()) {
            true => Err(Error::TargetForbidden(Addr::Socket(addr))),
            false => Ok(()),
        }
    }

    pub(super) fn is_own_listener(&self, dst: SocketAddr) -> bool {
        self.own_listeners.iter().any(|own| is_listener(*own, dst))
    }
}

/// Whether a connection to `dst` could loop back to the listener at `own`. If the listener has an unspecified address, every
/// connection to its port counts, even one to another host, because this proxy does not know all addresses of this host.
fn is_listener(own: SocketAddr, dst: SocketAddr) -> bool {
    own.port() == dst.port() && (own.ip() == dst.ip() || own.ip().is_unspecified())
}
