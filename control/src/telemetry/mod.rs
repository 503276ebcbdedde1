//! The telemetry API: golden metrics of the last minutes, and requests as they pass.
//!
//! What it takes is bounded, as proxies depend on the process: sidecars, questions and taps are counted, a question has a
//! deadline, and what is computed is computed beside the threads that serve proxies.
//! Sidecars are asked only while somebody asks us, directly and not by way of a store of metrics: their pages become
//! `counts`, two of them a `history`, and those of all that belong together the rows of an answer (`view`).
//! `tap` joins the streams of sidecars. On Kubernetes the API server forwards what RBAC permits (`access`);
//! without it, whoever is on this machine may ask.

mod access;
pub mod api;
pub mod counts;
pub mod events;
mod history;
mod recorder;
mod request;
mod scrape;
mod server;
mod tap;
mod view;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use kube::Client;
use tokio::sync::Semaphore;
use tulle_core::drain::Watch;

use crate::cluster::Cluster;
use crate::tls::creds::ServerCreds;
use crate::webhook::creds::Creds;
use recorder::Recorder;
pub use server::Askers;
use server::{Api, MOST_QUESTIONS, MOST_TAPS};
use tap::Tapper;

/// The API, and what has to run beside it.
pub struct Parts {
    pub api: Api,
    /// Looks at sidecars as long as somebody wants it to, until the drain.
    pub record: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// Opens the API over what there is in the cluster; sidecars take us for who the credentials say.
pub fn open(cluster: Cluster, creds: Arc<ServerCreds>, askers: Askers, drain: &Watch) -> Parts {
    let recorder = Arc::new(Recorder::new(cluster, creds.clone()));
    let api = Api {
        recorder: recorder.clone(),
        tapper: Tapper {
            recorder: recorder.clone(),
            creds,
        },
        drain: drain.clone(),
        taps: Arc::new(Semaphore::new(MOST_TAPS)),
        questions: Arc::new(Semaphore::new(MOST_QUESTIONS)),
        askers,
    };
    let drain = drain.clone();
    let record = Box::pin(async move { recorder.keep(drain).await });
    Parts { api, record }
}

/// Lets the API server connect and nobody else, until the drain.
pub async fn believe_the_api_server(client: Client, creds: Arc<Creds>, drain: Watch) {
    access::keep(client, creds, drain).await;
}
