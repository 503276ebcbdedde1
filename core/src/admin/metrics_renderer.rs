//! Renders the metrics page, and shares one rendering between concurrent requests.
//!
//! Rendering a large page takes time, so one thread renders at a time. A request that arrives during a rendering waits for
//! the next one, so its page contains everything that happened before the request.

use std::io::{self, Write};
use std::sync::Arc;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::metrics::Registry;

/// The content encoding of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentEncoding {
    Plain,
    Gzip,
}

/// Renders the metrics page of one registry.
pub(super) struct MetricsRenderer {
    registry: Registry,
    /// Held while a page is rendered.
    render_lock: Arc<tokio::sync::Mutex<()>>,
    /// Pages whose rendering has not started, indexed by [`ContentEncoding`].
    pending: Mutex<[PageCell; 2]>,
}

/// Set when the page is rendered; `None` if rendering failed.
type PageCell = Arc<OnceCell<Option<Bytes>>>;

impl MetricsRenderer {
    pub(super) fn new(registry: Registry) -> Self {
        Self {
            registry,
            render_lock: Arc::default(),
            pending: Mutex::default(),
        }
    }

    /// Returns a page whose rendering starts after this call; `None` if rendering fails.
    pub(super) async fn get(&self, coding: ContentEncoding) -> Option<Bytes> {
        let page = self.pending.lock()[coding as usize].clone();
        // If the request that renders the page is cancelled, another waiting request renders it.
        page.get_or_init(|| self.render(coding)).await.clone()
    }

    async fn render(&self, coding: ContentEncoding) -> Option<Bytes> {
        let turn = self.render_lock.clone().lock_owned().await;
        // Requests from here on wait for the next page.
        self.pending.lock()[coding as usize] = PageCell::default();
        let registry = self.registry.clone();
        let rendered = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let plain = registry.render();
            match coding {
                ContentEncoding::Plain => Some(plain.into()),
                ContentEncoding::Gzip => gzip(plain.as_bytes()).ok(),
            }
        });
        rendered.await.ok().flatten()
    }
}

fn gzip(plain: &[u8]) -> io::Result<Bytes> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(plain)?;
    Ok(encoder.finish()?.into())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::task::JoinSet;

    use super::*;

    #[tokio::test]
    async fn requests_during_a_render_share_the_next_page() {
        let registry = Registry::new();
        let n_rendered = Arc::new(AtomicUsize::new(0));
        let (continue_tx, continue_rx) = mpsc::channel::<()>();
        let (started_tx, mut started_rx) = tokio::sync::mpsc::unbounded_channel();
        let (continue_rx, counted) = (Mutex::new(continue_rx), n_rendered.clone());
        registry.before_render(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            started_tx.send(()).unwrap();
            continue_rx.lock().recv_timeout(Duration::from_secs(5)).unwrap();
        });
        let pages = Arc::new(MetricsRenderer::new(registry));
        let request_page = |requests: &mut JoinSet<Option<Bytes>>| {
            let pages = pages.clone();
            requests.spawn(async move { pages.get(ContentEncoding::Plain).await })
        };
        let mut requests = JoinSet::new();
        request_page(&mut requests);
        started_rx.recv().await.unwrap();
        let first_to_wait = request_page(&mut requests);
        for _ in 0..100 {
            request_page(&mut requests);
        }
        tokio::task::yield_now().await;
        first_to_wait.abort(); // the others wait for the page that this request would render
        for _ in 0..2 {
            continue_tx.send(()).unwrap();
        }
        let mut n_pages = 0;
        while let Some(page) = requests.join_next().await {
            n_pages += usize::from(page.is_ok_and(|page| page.is_some()));
        }
        assert_eq!((n_pages, n_rendered.load(Ordering::Relaxed)), (101, 2));
    }
}
