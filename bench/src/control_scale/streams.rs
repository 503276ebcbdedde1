//! Clients that subscribe to Services, and the latency of each change.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::{Stream, StreamExt as _};
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tulle_control::tls::anchors::TrustAnchors;
use tulle_control::tls::client::{self, TlsServer};
use tulle_core::addr::Addr;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::destination::{Update, update};

use crate::scale::destination::ClientPod;

/// The address that one change writes. It is unique to that change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Address(Ipv4Addr);

impl Address {
    pub(super) fn from_change_number(n: u32) -> Self {
        Self(Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 200, 0, 1)) + n))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

pub(super) struct Streams {
    shared: Arc<Shared>,
    n_streams: u64,
    tasks: JoinSet<()>,
}

/// The number of clients, each with its own connection, and of their streams.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientCounts {
    pub(super) n_clients: usize,
    pub(super) streams_per_client: usize,
}

impl ClientCounts {
    pub(super) fn n_streams(&self) -> usize {
        self.n_clients * self.streams_per_client
    }
}

struct Shared {
    /// Time of the write of each address.
    written_at: Mutex<HashMap<Address, Instant>>,
    /// Latencies from a write to a subscriber, in microseconds.
    latencies: Mutex<Histogram<u64>>,
    /// Latencies from a write to a watch of the API server, in microseconds.
    watch_latencies: Mutex<Histogram<u64>>,
}

impl Streams {
    /// Opens all streams at once and waits for the first message of each. `service` names the Service of the n-th stream.
    pub(super) async fn open(
        port: u16,
        anchors: &TrustAnchors,
        counts: ClientCounts,
        service: impl Fn(usize) -> String,
    ) -> anyhow::Result<Self> {
        // The maximum is fixed: `saturating_record` clamps larger values instead of resizing the histogram.
        let latencies = Histogram::new_with_max(MAX_LATENCY_US, 3).context("making a histogram")?;
        let shared = Arc::new(Shared {
            written_at: Mutex::default(),
            watch_latencies: Mutex::new(latencies.clone()),
            latencies: Mutex::new(latencies),
        });
        let (mut opening, mut tasks) = (JoinSet::new(), JoinSet::new());
        for client in 0..counts.n_clients {
            let first = client * counts.streams_per_client;
            let subscribed: Vec<String> = (first..first + counts.streams_per_client).map(&service).collect();
            let anchors = anchors.clone();
            opening.spawn(async move { open_client(port, &anchors, client, subscribed).await });
        }
        while let Some(opened) = opening.join_next().await {
            for mut stream in opened.context("a client failed")?? {
                let shared = shared.clone();
                tasks.spawn(async move {
                    while let Ok(Some(update)) = stream.message().await {
                        shared.record_update(&update, Instant::now());
                    }
                });
            }
        }
        Ok(Self {
            shared,
            n_streams: counts.n_streams() as u64,
            tasks,
        })
    }

    /// Starts to record the latencies from a write to `watch`, for comparison.
    pub(super) fn record_watch_latencies(&mut self, watch: impl Stream<Item = io::Result<String>> + Send + 'static) {
        let shared = self.shared.clone();
        self.tasks.spawn(async move {
            let mut watch = pin!(watch);
            while let Some(Ok(line)) = watch.next().await {
                let now = Instant::now();
                let addrs = line.split('"').filter_map(|text| text.parse().ok());
                addrs.for_each(|ip| shared.record_latency(&shared.watch_latencies, Address(ip), now));
            }
        });
    }

    /// Forgets the writes and latencies of earlier loads.
    pub(super) fn clear(&self) {
        self.shared.written_at.lock().clear();
        self.shared.latencies.lock().clear();
        self.shared.watch_latencies.lock().clear();
    }

    pub(super) fn n_streams(&self) -> u64 {
        self.n_streams
    }

    /// Records the time at which an address is written.
    pub(super) fn record_write(&self, addr: Address, at: Instant) {
        self.shared.written_at.lock().insert(addr, at);
    }

    /// Waits until `n_updates` updates have arrived, but not longer than `limit`.
    pub(super) async fn wait_for(&self, n_updates: u64, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.shared.latencies.lock().len() < n_updates && Instant::now() < deadline {
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Latencies from write to subscriber, in microseconds.
    pub(super) fn latencies(&self) -> Histogram<u64> {
        self.shared.latencies.lock().clone()
    }

    /// Latencies from write to the watch given to `record_watch_latencies`, in microseconds.
    pub(super) fn watch_latencies(&self) -> Histogram<u64> {
        self.shared.watch_latencies.lock().clone()
    }
}

impl Shared {
    fn record_update(&self, update: &Update, now: Instant) {
        let Some(update::Update::Add(set)) = &update.update else {
            return;
        };
        for addr in &set.addrs {
            let addr = addr.addr.and_then(|addr| SocketAddr::try_from(addr).ok());
            let Some(IpAddr::V4(ip)) = addr.map(|addr| addr.ip()) else {
                continue;
            };
            self.record_latency(&self.latencies, Address(ip), now);
        }
    }

    fn record_latency(&self, latencies: &Mutex<Histogram<u64>>, addr: Address, now: Instant) {
        if let Some(written_at) = self.written_at.lock().get(&addr) {
            let micros = u64::try_from((now - *written_at).as_micros()).unwrap_or(u64::MAX);
            latencies.lock().saturating_record(micros);
        }
    }
}

async fn open_client(
    port: u16,
    anchors: &TrustAnchors,
    client: usize,
    services: Vec<String>,
) -> anyhow::Result<Vec<tonic::Streaming<Update>>> {
    let addr = Addr::Socket(SocketAddr::from(([127, 0, 0, 1], port)));
    let peer = TlsServer {
        addr: &addr,
        name: "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local",
        identity: None,
        anchors,
    };
    let channel = client::connect(&peer, None)
        .await
        .context("connecting to destination")?;
    let pod = ClientPod {
        name: &format!("client-{client}"),
        node: client % 100,
    };
    let mut opening = JoinSet::new();
    for service in services {
        let mut destination = DestinationClient::new(channel.clone());
        let request = pod.request(&service);
        opening.spawn(async move {
            let mut stream = destination.get(request).await?.into_inner();
            stream.message().await?;
            Ok::<_, tonic::Status>(stream)
        });
    }
    let mut streams = Vec::new();
    while let Some(opened) = opening.join_next().await {
        streams.push(opened.context("a stream failed")?.context("a stream was refused")?);
    }
    Ok(streams)
}

/// Maximum recorded latency: one minute.
pub(super) const MAX_LATENCY_US: u64 = 60_000_000;
