//! The destination service of the cluster with the mirrors. It reads their endpoints from the other API server.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use futures_util::future::try_join_all;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Code;
use tulle_control::tls::client::Channel;
use tulle_proto::destination::destination_client::DestinationClient;

use super::mirrors::MirrorChange;
use super::objects::mirror_name;
use crate::run::process::Process;
use crate::scale::control_plane::{ControlPlane, PORTS};
use crate::scale::destination::{self, ClientPod, STREAMS_PER_CONNECTION};

/// A destination service, and the connections of its clients.
pub(super) struct Destination {
    pub(super) process: Process,
    /// The streams end when their connection is dropped.
    connections: Vec<Channel>,
    /// Has the log and the certificates of the process.
    _dir: TempDir,
}

impl Destination {
    /// Starts the process and waits until it is ready. The objects of the other API server need not be listed then.
    pub(super) async fn start(kubeconfig: &Path, program: Option<&Path>) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir().context("making a directory")?;
        let control_plane = ControlPlane {
            kubeconfig,
            program,
            runs_policy_service: false,
        };
        let (process, _) = control_plane.start(dir.path(), PORTS).await?;
        Ok(Self {
            process,
            connections: Vec::new(),
            _dir: dir,
        })
    }

    /// Opens a stream for the mirror of each Service. Returns the changes of the endpoints; those of a new stream come first.
    pub(super) async fn open_streams(
        &mut self,
        n_services: usize,
        deadline: Instant,
    ) -> anyhow::Result<BoxStream<'static, anyhow::Result<MirrorChange>>> {
        for _ in 0..n_services.div_ceil(STREAMS_PER_CONNECTION) {
            self.connections.push(destination::connect(PORTS.destination).await?);
        }
        let connection = |n: usize| self.connections[n / STREAMS_PER_CONNECTION].clone();
        let opening = try_join_all((0..n_services).map(|n| open_stream(connection(n), n)));
        let streams = timeout_at(deadline, opening).await;
        let streams = streams.with_context(|| format!("not all of {n_services} streams are open in time"))??;
        Ok(stream::select_all(streams).boxed())
    }
}

/// Opens a stream for the mirror of the n-th Service.
async fn open_stream(
    connection: Channel,
    n: usize,
) -> anyhow::Result<BoxStream<'static, anyhow::Result<MirrorChange>>> {
    let name = mirror_name(n);
    let pod = ClientPod {
        name: "client",
        node: 0,
    };
    let mut client = DestinationClient::new(connection);
    let updates = loop {
        match client.get(pod.request(&name)).await {
            Ok(response) => break response.into_inner(),
            // The objects of the other API server are not listed yet. A proxy opens the stream again, too.
            Err(status) if status.code() == Code::Unavailable => sleep(OPEN_RETRY_DELAY).await,
            Err(status) => return Err(status).with_context(|| format!("opening the stream of {name}")),
        }
    };
    let ended = anyhow!("the stream of {name} has ended");
    let mut endpoints = BTreeMap::new();
    let changes = updates.map(move |update| {
        let update = update.with_context(|| format!("the stream of {name}"))?;
        destination::apply_update(&mut endpoints, update);
        anyhow::Ok(MirrorChange::Endpoints {
            n,
            n_endpoints: endpoints.len(),
        })
    });
    Ok(changes.chain(stream::once(std::future::ready(Err(ended)))).boxed())
}

const OPEN_RETRY_DELAY: Duration = Duration::from_millis(100);
