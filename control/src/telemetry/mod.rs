//! The telemetry API: golden metrics of the last minutes, and live taps of requests.
//!
//! The process can also serve proxies, so its load is bounded: the numbers of sidecars, queries and taps are limited, a
//! query has a deadline, and results are computed on blocking threads. Sidecars are scraped directly, without a metrics
//! store, and only while clients query them. A metrics page becomes `counts`, two or more pages of a sidecar a
//! `history`, and the histories of all matching sidecars the rows of a response (`rows`). `tap` merges the streams of
//! sidecars. On Kubernetes the API server authorizes requests by RBAC and forwards them (`access`); otherwise only
//! clients on this machine have access.

mod access;
pub mod api;
pub mod counts;
pub mod events;
mod history;
mod request;
mod rows;
mod scrape;
mod scraper;
mod server;
mod tap;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use kube::Client;
use tokio::sync::Semaphore;
use tulle_core::drain::Watch;
use tulle_core::log_limit::LogLimiter;

use crate::cluster::Cluster;
use crate::tls::mesh_credentials::MeshCredentials;
use crate::webhook::server_credentials::ServerCredentials;
use scraper::SidecarScraper;
pub use server::AllowedClients;
use server::{Api, MAX_CONCURRENT_QUERIES, MAX_CONCURRENT_TAPS};
use tap::Tapper;

/// The API and its background task.
pub struct Telemetry {
    pub api: Api,
    /// Scrapes recently queried namespaces until the drain.
    pub scrape_task: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Creates the API for the workloads of the cluster. `creds` identifies this process to sidecars.
pub fn new(cluster: Cluster, creds: Arc<MeshCredentials>, allowed_clients: AllowedClients, drain: &Watch) -> Telemetry {
    let scraper = Arc::new(SidecarScraper::new(cluster, creds.clone()));
    let api = Api {
        scraper: scraper.clone(),
        tapper: Tapper {
            scraper: scraper.clone(),
            creds,
        },
        drain: drain.clone(),
        tap_slots: Arc::new(Semaphore::new(MAX_CONCURRENT_TAPS)),
        query_slots: Arc::new(Semaphore::new(MAX_CONCURRENT_QUERIES)),
        allowed_clients,
        log_limiter: LogLimiter::default(),
    };
    let drain = drain.clone();
    let scrape_task = Box::pin(async move { scraper.run(drain).await });
    Telemetry { api, scrape_task }
}

/// Keeps the CA that verifies the API server current until the drain. All other clients are rejected.
pub async fn watch_client_ca(client: Client, creds: Arc<ServerCredentials>, drain: Watch) {
    access::watch_client_ca(client, creds, drain).await;
}
