//! Requests without a pause, from several clients, while something happens.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;

use futures_util::future::{join, join_all};

use crate::client::{Http1, request};
use crate::mesh::Mesh;

/// What became of the requests.
#[derive(Debug, Default)]
pub struct Outcome {
    pub n_ok: usize,
    /// What went wrong, one line each.
    pub failures: Vec<String>,
}

/// Sends `GET /` from `n_clients` connections of `workload` to `dst` until `during` has ended.
pub async fn load(
    mesh: &Mesh,
    workload: &str,
    dst: SocketAddr,
    n_clients: usize,
    during: impl Future<Output = ()>,
) -> Outcome {
    let (ended, n_ok, failures) = (Cell::new(false), Cell::new(0), RefCell::new(Vec::new()));
    let client = async || {
        let mut kept: Option<Http1> = None;
        while !ended.get() {
            let mut connection = match kept.take() {
                Some(connection) if connection.is_open() => connection,
                _ => Http1::over(mesh.dial(workload, dst).await).await,
            };
            match connection.ask(request("/")).await {
                Ok(answer) if answer.status == 200 => {
                    n_ok.set(n_ok.get() + 1);
                    kept = Some(connection).filter(|_| answer.header("connection") != "close");
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
    Outcome {
        n_ok: n_ok.get(),
        failures: failures.into_inner(),
    }
}

impl Outcome {
    /// # Panics
    /// When a request failed, or none was sent.
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
