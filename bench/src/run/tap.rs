//! Somebody who watches requests, so that it can be told what that costs.

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

/// A tap, until it is dropped.
pub(super) struct Watching {
    events: Arc<AtomicU64>,
    /// Ends it by its end.
    _until: oneshot::Sender<Infallible>,
}

impl Watching {
    /// Events that have come.
    pub(super) fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }
}

/// Watches one of so many requests of the sidecar in a namespace.
pub(super) fn begin(namespace: &Namespace, one_in: u32) -> anyhow::Result<Watching> {
    let stream = namespace.run(|| TcpStream::connect((Ipv4Addr::LOCALHOST, port::TAP)))?;
    let stream = stream.context("dialling the tap of a sidecar")?;
    stream.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("starting a runtime")?;
    let events = Arc::new(AtomicU64::new(0));
    let (count, (begun, beginning)) = (events.clone(), mpsc::channel());
    let (until, ended) = oneshot::channel();
    std::thread::spawn(move || {
        let watched = runtime.block_on(async {
            tokio::select! {
                watched = watch(stream, one_in, &count, &begun) => watched,
                _ = ended => Ok(()),
            }
        });
        let _ = begun.send(watched); // whoever still listens has to know
    });
    beginning
        .recv()
        .context("the tap panicked")?
        .context("tapping a sidecar")?;
    Ok(Watching { events, _until: until })
}

async fn watch(
    stream: TcpStream,
    one_in: u32,
    events: &AtomicU64,
    begun: &mpsc::Sender<anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let stream = tokio::net::TcpStream::from_std(stream)?;
    let channel = connect_over(stream, &Authority::from_static("tap")).await?;
    let every = kinds::Match::All(kinds::Seq::default());
    let wish = ObserveRequest {
        limit: u32::MAX,
        r#match: Some(Match { r#match: Some(every) }),
        extract: None,
        sample_one_in: one_in,
    };
    let mut stream = TapClient::new(channel).observe(wish).await?.into_inner();
    let _ = begun.send(Ok(()));
    while stream.message().await?.is_some() {
        events.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
