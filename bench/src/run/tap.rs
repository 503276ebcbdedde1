//! A tap client, for measuring the cost of tap.

use std::convert::Infallible;
use std::net::{Ipv4Addr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use anyhow::Context as _;
use http::uri::Authority;
use tokio::sync::oneshot;
use tulle_control::tls::client::connect_over;
use tulle_core::names::port;
use tulle_core::netns::Namespace;
use tulle_proto::tap::ObserveRequest;
use tulle_proto::tap::observe_request::{Match, r#match as kinds};
use tulle_proto::tap::tap_client::TapClient;

/// A running tap. Dropping the value ends it.
pub(super) struct TapSession {
    events: Arc<AtomicU64>,
    /// Dropping the sender ends the tap.
    _stop: oneshot::Sender<Infallible>,
}

impl TapSession {
    /// Number of events received so far.
    pub(super) fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }
}

/// Starts a tap of one in `one_in` requests at the sidecar in a namespace.
pub(super) fn start(namespace: &Namespace, one_in: u32) -> anyhow::Result<TapSession> {
    let stream = namespace.run(|| TcpStream::connect((Ipv4Addr::LOCALHOST, port::TAP)))?;
    let stream = stream.context("dialling the tap of a sidecar")?;
    stream.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("starting a runtime")?;
    let events = Arc::new(AtomicU64::new(0));
    let count = events.clone();
    let (started_tx, started_rx) = mpsc::channel();
    let (stop_tx, stop_rx) = oneshot::channel();
    std::thread::spawn(move || {
        let result = runtime.block_on(async {
            tokio::select! {
                result = count_events(stream, one_in, &count, &started_tx) => result,
                _ = stop_rx => Ok(()),
            }
        });
        let _ = started_tx.send(result); // reports an error if the tap has not started
    });
    started_rx
        .recv()
        .context("the tap panicked")?
        .context("tapping a sidecar")?;
    Ok(TapSession { events, _stop: stop_tx })
}

async fn count_events(
    stream: TcpStream,
    one_in: u32,
    events: &AtomicU64,
    started: &mpsc::Sender<anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let stream = tokio::net::TcpStream::from_std(stream)?;
    let channel = connect_over(stream, &Authority::from_static("tap")).await?;
    let every = kinds::Match::All(kinds::Seq::default());
    let request = ObserveRequest {
        limit: u32::MAX,
        r#match: Some(Match { r#match: Some(every) }),
        extract: None,
        sample_one_in: one_in,
    };
    let mut stream = TapClient::new(channel).observe(request).await?.into_inner();
    let _ = started.send(Ok(()));
    while stream.message().await?.is_some() {
        events.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
