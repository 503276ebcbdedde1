//! Continuous requests from several clients while an event happens.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;

use futures_util::future::{join, join_all};

use crate::client::{Http1, request};
use crate::mesh::Mesh;

/// The results of the requests.
#[derive(Debug, Default)]
pub struct LoadOutcome {
    pub n_ok: usize,
    /// Failures, one line each.
    pub failures: Vec<String>,
}

/// Sends `GET /` to `dst` on `n_clients` connections of `workload` until `during` ends.
pub async fn load(
    mesh: &Mesh,
    workload: &str,
    dst: SocketAddr,
    n_clients: usize,
    during: impl Future<Output = ()>,
) -> LoadOutcome {
    let (ended, n_ok, failures) = (Cell::new(false), Cell::new(0), RefCell::new(Vec::new()));
    let client = async || {
        let mut idle_connection: Option<Http1> = None;
        while !ended.get() {
            let mut connection = match idle_connection.take() {
                Some(connection) if connection.is_open() => connection,
                _ => Http1::handshake(mesh.dial(workload, dst).await).await,
            };
            match connection.fetch(request("/")).await {
                Ok(answer) if answer.status == 200 => {
                    n_ok.set(n_ok.get() + 1);
                    idle_connection = Some(connection).filter(|_| answer.header("connection") != "close");
                }
                Ok(answer) => failures.borrow_mut().push(format!(
                    "{} {} {}",
                    answer.status,
                    answer.header("l5d-proxy-cause"),
                    answer.header("l5d-proxy-error")
                )),
                Err(error) => failures.borrow_mut().push(format!("{error:?}")),
            }
        }
    };
    let clients = join_all((0..n_clients).map(|_| client()));
    let during = async {
        during.await;
        ended.set(true);
    };
    join(clients, during).await;
    LoadOutcome {
        n_ok: n_ok.get(),
        failures: failures.into_inner(),
    }
}

impl LoadOutcome {
    /// # Panics
    /// Panics if a request failed, or none was sent.
    pub fn assert_all_ok(&self) {
        let some: Vec<_> = self.failures.iter().take(5).collect();
        assert!(
            self.failures.is_empty() && self.n_ok > 0,
            "{} failed, {} did not: {some:#?}",
            self.failures.len(),
            self.n_ok
        );
    }
}
