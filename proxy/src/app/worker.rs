//! Workers: threads that accept connections and serve them.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener},
    sync::Arc,
};

use anyhow::Context;
use futures_util::FutureExt as _;
use tokio::{sync::watch, task::JoinSet};
use tulle_core::{addr::ClientAddr, capabilities, connections::ConnectionPermit, drain};

use crate::{
    app::{build::accept_options, worker_balancer::WorkerBalancer},
    config::{Config, DirectionSettings, InboundMode},
    http::stack::admission::Admission,
    inbound::Inbound,
    net::{
        copy::CopyFuture,
        io::Tcp,
        listen::{self, PortSharing},
        transparent,
    },
    outbound::Outbound,
    tls::credentials::Credentials,
};

/// Start-up error if the inbound mode is `tproxy` and the process lacks the capability `NET_RAW`.
const NET_RAW_ERROR: &str = "TULLE_PROXY_INBOUND_MODE=tproxy needs the capability NET_RAW: add it to the proxy's container \
     (securityContext.capabilities.add), or to its service (AmbientCapabilities=CAP_NET_RAW), or unset the variable";

/// One worker: a thread with its own runtime, listeners and connections.
pub(super) struct Worker {
    pub(super) index: usize,
    pub(super) outbound: Arc<Outbound>,
    pub(super) inbound: Arc<Inbound>,
    pub(super) creds: Credentials,
    pub(super) balancers: WorkerBalancers,
    pub(super) drain: drain::Watch,
    pub(super) shutdown_done: watch::Receiver<bool>,
}

pub(super) struct WorkerListeners {
    pub(super) outbound: Vec<TcpListener>,
    pub(super) explicit: Option<TcpListener>,
    pub(super) inbound: TcpListener,
}

/// The balancers of connections between workers, by direction.
#[derive(Clone)]
pub(super) struct WorkerBalancers {
    pub(super) outbound: Arc<WorkerBalancer>,
    pub(super) inbound: Arc<WorkerBalancer>,
}

/// The balancer and the admission that the connections of one listener share.
struct AcceptContext {
    balancer: Arc<WorkerBalancer>,
    admission: Arc<Admission>,
}

impl Worker {
    pub(super) async fn run(mut self, sockets: WorkerListeners) {
        let certified = async {
            tokio::select! {
                () = self.creds.wait_certified() => true,
                () = self.drain.signaled() => false,
            }
        };
        if certified.await {
            self.accept(sockets).await;
        }
        // Connections continue until all have ended or the grace period is over.
        let _ = self.shutdown_done.wait_for(|ended| *ended).await;
    }

    async fn accept(&self, sockets: WorkerListeners) {
        let mut loops = JoinSet::new();
        for listener in sockets.outbound {
            let outbound = self.outbound.clone();
            let serve = move |worker, stream, client, drain| outbound.clone().serve(worker, stream, client, drain);
            loops.spawn(self.accept_loop(listener, self.outbound_context(), serve));
        }
        if let Some(listener) = sockets.explicit {
            let outbound = self.outbound.clone();
            let serve =
                move |worker, stream, client, drain| outbound.clone().serve_explicit(worker, stream, client, drain);
            loops.spawn(self.accept_loop(listener, self.outbound_context(), serve));
        }
        let inbound = self.inbound.clone();
        let serve = move |worker, stream, client, drain| inbound.clone().serve(worker, stream, client, drain);
        let context = AcceptContext {
            balancer: self.balancers.inbound.clone(),
            admission: self.inbound.service_stack.admission.clone(),
        };
        loops.spawn(self.accept_loop(sockets.inbound, context, serve));
        while loops.join_next().await.is_some() {}
    }

    fn outbound_context(&self) -> AcceptContext {
        AcceptContext {
            balancer: self.balancers.outbound.clone(),
            admission: self.outbound.service_stack.admission.clone(),
        }
    }

    /// Accepts connections on one listener. Until a connection ends, it delays the end of the drain and counts towards the limit of
    /// connections.
    fn accept_loop<F>(
        &self,
        listener: TcpListener,
        context: AcceptContext,
        serve: impl Fn(usize, Tcp, ClientAddr, drain::Watch) -> F + Send + Sync + 'static,
    ) -> impl Future<Output = ()> + Send + 'static
    where
        F: Future<Output = Option<CopyFuture>> + Send + 'static,
    {
        let (index, drain) = (self.index, self.drain.clone());
        let AcceptContext { balancer, admission } = context;
        // The drain waits until the queued connections are accepted.
        let (stop, accept_guard) = (drain.clone(), drain.guard());
        async move {
            let spawn = |client, addr| {
                let permit = admission.admit_connection(addr);
                let (assignment, stream) = match balancer.assign(index, client) {
                    Ok(assigned) => assigned,
                    Err(error) => return tracing::warn!(%error, "a connection cannot be served"),
                };
                let runtime = assignment.runtime().clone();
                let eviction_handle = permit.as_ref().map(ConnectionPermit::handle);
                let copy_eviction_handle = eviction_handle.clone();
                let serving = serve(assignment.worker, stream.with_permit(permit), addr, drain.clone());
                let guard_and_assignment = (drain.guard(), assignment);
                // `map` instead of an async block, which would store the future twice. A connection that only copies bytes
                // continues in a smaller future.
                let task = runtime.spawn(serving.map(move |copy_future| {
                    let Some(copy_future) = copy_future else {
                        return drop(guard_and_assignment);
                    };
                    let copy_task = tokio::spawn(copy_future.map(move |()| drop(guard_and_assignment)));
                    if let Some(handle) = copy_eviction_handle {
                        handle.replace_task(copy_task.abort_handle());
                    }
                }));
                if let Some(handle) = eviction_handle {
                    // `set_task` does not overwrite the task of an earlier `replace_task`, so it does not matter which runs first.
                    handle.set_task(task.abort_handle());
                }
            };
            listen::accept_loop(listener, stop.signaled(), spawn).await;
            drop(accept_guard);
        }
    }
}

/// Binds the listeners of all workers. For port 0, the bound port is written back to the configuration.
pub(super) fn bind_workers(config: &mut Config, workers: usize) -> anyhow::Result<Vec<WorkerListeners>> {
    let sharing = if workers > 1 {
        PortSharing::Workers
    } else {
        PortSharing::Exclusive
    };
    if config.inbound.mode == InboundMode::Tproxy {
        capabilities::enable_net_raw(); // this thread starts the workers, which inherit the capability
    }
    let bind = |addr: SocketAddr, direction: &DirectionSettings, what: &str| {
        listen::bind(addr, direction.accept.backlog, sharing, accept_options(direction))
            .with_context(|| format!("listening on {addr} ({what})"))
    };
    skip_absent_families(&mut config.outbound.listen, listen::is_local_addr);
    let mut all = Vec::new();
    for _ in 0..workers {
        let mut outbound = Vec::new();
        for addr in &mut config.outbound.listen {
            let listener = bind(*addr, &config.outbound.direction, "outbound")?;
            *addr = listener.local_addr()?;
            listen::disable_quickack(&listener);
            outbound.push(listener);
        }
        let mut explicit = None;
        if let Some(addr) = &mut config.outbound.explicit_listen {
            let listener = bind(*addr, &config.outbound.direction, "TULLE_PROXY_EXPLICIT_LISTEN_ADDR")?;
            *addr = listener.local_addr()?;
            explicit = Some(listener);
        }
        let inbound = bind(config.inbound.listen, &config.inbound.direction, "inbound")?;
        if config.inbound.mode == InboundMode::Tproxy {
            transparent::set_transparent(&inbound).context(NET_RAW_ERROR)?;
        }
        config.inbound.listen = inbound.local_addr()?;
        all.push(WorkerListeners {
            outbound,
            explicit,
            inbound,
        });
    }
    Ok(all)
}

/// Removes IPv6 addresses if this machine has no IPv6. `is_local` says whether this machine has the given address.
fn skip_absent_families(listen: &mut Vec<SocketAddr>, is_local: impl Fn(IpAddr) -> bool) {
    // Charts configure the loopback addresses of both families, even on hosts with only one.
    if listen.len() < 2 {
        return;
    }
    // If the machine has IPv6, binding an address that it does not have fails and reports the error.
    let has_ipv6 = is_local(Ipv6Addr::LOCALHOST.into());
    let is_available = |addr: &&SocketAddr| addr.is_ipv4() || has_ipv6 || is_local(addr.ip());
    let (available, others): (Vec<_>, Vec<SocketAddr>) = listen.iter().partition(is_available);
    if !available.is_empty() {
        for addr in others {
            tracing::warn!(%addr, "not listening: this machine has no IPv6");
        }
        *listen = available;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_addresses_are_left_out_only_on_a_machine_without_ipv6() {
        let both = ["127.0.0.1:4140", "[::1]:4140"];
        let foreign = ["127.0.0.1:4140", "[fd00::99]:4140"];
        let (v4, v6): (IpAddr, IpAddr) = ([127, 0, 0, 1].into(), Ipv6Addr::LOCALHOST.into());
        for (listen, local, expected) in [
            (&both[..], &[v4, v6][..], &both[..]),
            (&both, &[v4], &both[..1]),
            // Binding this address fails and reports the error.
            (&foreign, &[v4, v6], &foreign),
            (&foreign, &[v4], &foreign[..1]),
            (&foreign, &[v4, "fd00::99".parse().unwrap()], &foreign),
            (&both[1..], &[v4], &both[1..]),
        ] {
            let mut addrs: Vec<SocketAddr> = listen.iter().map(|addr| addr.parse().unwrap()).collect();
            skip_absent_families(&mut addrs, |ip| local.contains(&ip));
            let left: Vec<_> = addrs.iter().map(ToString::to_string).collect();
            assert_eq!(left, expected, "{local:?}");
        }
    }
}
