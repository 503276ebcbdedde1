//! The page of metrics, which is rendered once for all who ask while another is rendered.
//!
//! A large page takes a while: one thread renders one at a time, however many ask, and who asks gets a page that shows all
//! that happened before.

use std::io::{self, Write};
use std::sync::Arc;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::metrics::Registry;

/// How a page is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    Plain,
    Gzip,
}

/// The pages of one registry.
pub(super) struct Pages {
    registry: Registry,
    /// Held by the thread that renders.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Pages that nobody has begun to render, plain and packed.
    next: Mutex<[Page; 2]>,
}

/// A page, once it is there; nothing where rendering failed.
type Page = Arc<OnceCell<Option<Bytes>>>;

impl Pages {
    pub(super) fn new(registry: Registry) -> Self {
        Self {
            registry,
            turn: Arc::default(),
            next: Mutex::default(),
        }
    }

    /// A page that is rendered after this is called; nothing if that fails.
    pub(super) async fn get(&self, coding: Coding) -> Option<Bytes> {
        let page = self.next.lock()[coding as usize].clone();
        // If whoever renders it leaves, another one does.
        page.get_or_init(|| self.render(coding)).await.clone()
    }

    async fn render(&self, coding: Coding) -> Option<Bytes> {
        let turn = self.turn.clone().lock_owned().await;
        // Who asks from now on waits for the one after it.
        self.next.lock()[coding as usize] = Page::default();
        let registry = self.registry.clone();
        let rendered = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let plain = registry.render();
            match coding {
                Coding::Plain => Some(plain.into()),
                Coding::Gzip => gzip(plain.as_bytes()).ok(),
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
    async fn who_asks_while_a_page_is_rendered_shares_the_next_one() {
        let registry = Registry::new();
        let n_rendered = Arc::new(AtomicUsize::new(0));
        let (go_on, wait) = mpsc::channel::<()>();
        let (began, mut beginning) = tokio::sync::mpsc::unbounded_channel();
        let (wait, counted) = (Mutex::new(wait), n_rendered.clone());
        registry.measured(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            began.send(()).unwrap();
            wait.lock().recv_timeout(Duration::from_secs(5)).unwrap();
        });
        let pages = Arc::new(Pages::new(registry));
        let ask = |asking: &mut JoinSet<Option<Bytes>>| {
            let pages = pages.clone();
            asking.spawn(async move { pages.get(Coding::Plain).await })
        };
        let mut asking = JoinSet::new();
        ask(&mut asking);
        beginning.recv().await.unwrap();
        let first_to_wait = ask(&mut asking);
        for _ in 0..100 {
            ask(&mut asking);
        }
        tokio::task::yield_now().await;
        first_to_wait.abort(); // which was to render the page of all the others
        for _ in 0..2 {
            go_on.send(()).unwrap();
        }
        let mut n_answered = 0;
        while let Some(answer) = asking.join_next().await {
            n_answered += usize::from(answer.is_ok_and(|page| page.is_some()));
        }
        assert_eq!((n_answered, n_rendered.load(Ordering::Relaxed)), (101, 2));
    }
}
