//! Chooses the worker of an accepted connection: the worker that accepted it, unless another worker has clearly fewer connections.
//!
//! The kernel chooses a worker by the connection's ports. A few busy connections, which are common between sidecars, would
//! often end up on one worker while others are idle.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{net::TcpStream, runtime::Handle};

use crate::net::{io::Tcp, listen::AcceptedSocket};

/// All workers, each with its number of connections in one direction.
pub(super) struct WorkerBalancer(Vec<WorkerLoad>);

struct WorkerLoad {
    runtime: Handle,
    n_connections: AtomicUsize,
}

/// Counts a connection for its worker until this value is dropped.
pub(super) struct WorkerAssignment {
    balancer: Arc<WorkerBalancer>,
    pub(super) worker: usize,
}

impl WorkerBalancer {
    pub(super) fn new(runtimes: &[Handle]) -> Arc<Self> {
        let worker_load = |runtime: &Handle| WorkerLoad {
            runtime: runtime.clone(),
            n_connections: AtomicUsize::new(0),
        };
        Arc::new(Self(runtimes.iter().map(worker_load).collect()))
    }

    /// Assigns a client that `worker` has accepted, and registers it with the runtime of the chosen worker.
    ///
    /// # Errors
    /// The process lacks the resources to register a socket.
    pub(super) fn assign(
        self: &Arc<Self>,
        worker: usize,
        client: AcceptedSocket,
    ) -> io::Result<(WorkerAssignment, Tcp)> {
        let assignment = WorkerAssignment {
            balancer: self.clone(),
            worker: self.choose(worker),
        };
        let worker_load = assignment.worker_load();
        worker_load.n_connections.fetch_add(1, Ordering::Relaxed);
        let _runtime_guard = worker_load.runtime.enter();
        let stream = TcpStream::from_std(client.stream)?;
        Ok((assignment, Tcp::with_prefix(stream, client.prefix)))
    }

    /// Returns the least loaded worker if it has more than 20 % fewer connections, otherwise the worker that accepted the
    /// connection. Moving a connection wakes another worker, which costs more than a smaller difference is worth.
    fn choose(&self, accepted_by: usize) -> usize {
        let n_connections = |index: usize| self.0[index].n_connections.load(Ordering::Relaxed);
        let n_own_connections = n_connections(accepted_by);
        let least_loaded = (0..self.0.len()).min_by_key(|&index| n_connections(index));
        least_loaded
            .filter(|&index| n_own_connections * 4 > n_connections(index) * 5)
            .unwrap_or(accepted_by)
    }
}

impl WorkerAssignment {
    fn worker_load(&self) -> &WorkerLoad {
        &self.balancer.0[self.worker]
    }

    /// The runtime of the assigned worker.
    pub(super) fn runtime(&self) -> &Handle {
        &self.worker_load().runtime
    }
}

impl Drop for WorkerAssignment {
    fn drop(&mut self) {
        self.worker_load().n_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_connection_moves_only_to_a_worker_with_over_20_percent_fewer_connections() {
        let balancer = WorkerBalancer::new(&[Handle::current(), Handle::current()]);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut assignments = Vec::new();
        // Connections that one worker accepts are spread over all.
        for _ in 0..40 {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let client = AcceptedSocket {
                stream: stream.into_std().unwrap(),
                prefix: Bytes::new(),
            };
            assignments.push(balancer.assign(0, client).unwrap().0);
        }
        let n_first = assignments.iter().filter(|assignment| assignment.worker == 0).count();
        assert!((20..=23).contains(&n_first), "{n_first}");
        // Closed connections free their assignments.
        assignments.retain(|assignment| assignment.worker == 0);
        assert_eq!(balancer.choose(0), 1);
        assert_eq!(balancer.choose(1), 1);
        assignments.clear();
        assert_eq!(
            balancer.choose(0),
            0,
            "a worker without connections keeps what it accepts"
        );
        assert_eq!(balancer.choose(1), 1);
    }
}
