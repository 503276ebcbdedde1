//! Response bodies that clients receive slowly: the memory of all of them is bounded.
//!
//! A client that does not read keeps the content of its response in memory, for example a metrics page. Responses can share a
//! content, such as one page for concurrent requests; it counts once. If the contents need too much memory, the oldest responses
//! to the client network with the most bytes end early.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use parking_lot::Mutex;

use crate::connections::client_network;

/// The responses of a server that are not sent completely.
pub struct OpenResponses {
    max_bytes: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next_id: u64,
    /// Bytes of all contents.
    n_bytes: usize,
    /// The number of responses with each content.
    n_sharers: HashMap<ContentId, usize>,
    /// By id: the oldest first.
    responses: BTreeMap<u64, OpenResponse>,
}

struct OpenResponse {
    network: IpAddr,
    content: SharedContent,
    content_id: ContentId,
}

/// Identifies a content by its address and length. Unique while a response has the content.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct ContentId {
    addr: usize,
    n_bytes: usize,
}

/// The content of a response; `None` once the response has to end early.
type SharedContent = Arc<Mutex<Option<Bytes>>>;

/// A response body. It hands hyper copies of small parts, so that bytes that hyper buffers for a slow client do not keep the whole
/// content in memory.
pub struct ResponseBody {
    responses: Arc<OpenResponses>,
    id: u64,
    content: SharedContent,
    n_sent: usize,
    n_bytes: usize,
}

/// The response ends early, because open responses need too much memory.
#[derive(Debug, thiserror::Error)]
#[error("open responses need too much memory")]
pub struct ResponseEnded;

impl OpenResponses {
    /// Creates a limit of `max_bytes` for all responses together; one response alone may exceed it.
    pub fn new(max_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            max_bytes,
            state: Mutex::default(),
        })
    }

    /// Adds a response to this client. Ends other responses if all together need too much memory.
    pub fn add(self: &Arc<Self>, client: IpAddr, content: Bytes) -> ResponseBody {
        let n_bytes = content.len();
        let content_id = ContentId {
            addr: content.as_ptr() as usize,
            n_bytes,
        };
        let content = Arc::new(Mutex::new(Some(content)));
        let response = OpenResponse {
            network: client_network(client),
            content: content.clone(),
            content_id,
        };
        let mut state = self.state.lock();
        let id = state.insert(response);
        while state.n_bytes > self.max_bytes
            && let Some(victim) = state.select_victim(content_id)
        {
            state.remove(victim);
        }
        drop(state);
        ResponseBody {
            responses: self.clone(),
            id,
            content,
            n_sent: 0,
            n_bytes,
        }
    }
}

impl State {
    fn insert(&mut self, response: OpenResponse) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let n_sharers = self.n_sharers.entry(response.content_id).or_default();
        *n_sharers += 1;
        if *n_sharers == 1 {
            self.n_bytes += response.content_id.n_bytes;
        }
        self.responses.insert(id, response);
        id
    }

    /// Selects the response to end: the oldest one of the network with the most bytes. A content that `k` responses share counts
    /// as `1 / k` for each. Responses with the content of the newest response stay, because ending them would free nothing.
    fn select_victim(&self, newest: ContentId) -> Option<u64> {
        let mut by_network = HashMap::<IpAddr, usize>::new();
        for response in self.responses.values() {
            let ContentId { n_bytes, .. } = response.content_id;
            *by_network.entry(response.network).or_default() += n_bytes / self.n_sharers[&response.content_id];
        }
        let candidates = self
            .responses
            .iter()
            .filter(|(_, response)| response.content_id != newest && response.content_id.n_bytes > 0);
        // Of equal keys, `max_by_key` returns the last one: in reverse order the oldest.
        let victim = candidates
            .rev()
            .max_by_key(|(_, response)| by_network[&response.network]);
        victim.map(|(id, _)| *id)
    }

    fn remove(&mut self, id: u64) {
        let Some(ended) = self.responses.remove(&id) else {
            return;
        };
        let content_id = ended.content_id;
        if let Entry::Occupied(mut n_sharers) = self.n_sharers.entry(content_id) {
            *n_sharers.get_mut() -= 1;
            if *n_sharers.get() == 0 {
                n_sharers.remove();
                self.n_bytes -= content_id.n_bytes;
            }
        }
        *ended.content.lock() = None;
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = ResponseEnded;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, ResponseEnded>>> {
        let this = &mut *self;
        if this.is_end_stream() {
            return Poll::Ready(None);
        }
        let content = this.content.lock();
        let Some(content) = &*content else {
            return Poll::Ready(Some(Err(ResponseEnded)));
        };
        let end = this.n_bytes.min(this.n_sent + PART_BYTES);
        let part = Bytes::copy_from_slice(&content[this.n_sent..end]);
        this.n_sent = end;
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.n_sent == self.n_bytes
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact((self.n_bytes - self.n_sent) as u64)
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        self.responses.state.lock().remove(self.id);
    }
}

/// Maximum bytes of a response that are handed to hyper in one part, and that hyper buffers for an HTTP/2 stream.
pub const PART_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use http_body_util::BodyExt;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    fn page(kilobytes: usize) -> Bytes {
        vec![b'x'; kilobytes * 1000].into()
    }

    #[tokio::test]
    async fn clients_that_do_not_read_keep_a_bounded_number_of_pages() {
        let responses = OpenResponses::new(100_000);
        let mut unread: Vec<_> = (0..50).map(|_| responses.add(ip(1), page(20))).collect();
        assert_eq!(responses.state.lock().n_bytes, 100_000);
        let read = responses.add(ip(2), page(20));
        for _ in 0..50 {
            unread.push(responses.add(ip(1), page(20)));
        }
        assert_eq!(read.collect().await.unwrap().to_bytes(), page(20));
        let n_open = unread.iter().filter(|body| body.content.lock().is_some()).count();
        assert_eq!(n_open, 4);
        assert!(unread.remove(0).frame().await.unwrap().is_err());
        let last = unread.pop().unwrap();
        assert_eq!(last.collect().await.unwrap().to_bytes(), page(20));
        drop(unread);
        assert_eq!(responses.state.lock().n_bytes, 0);
        assert!(responses.state.lock().responses.is_empty());
    }

    #[tokio::test]
    async fn a_page_that_responses_share_counts_once() {
        let responses = OpenResponses::new(100_000);
        let n_bytes = || responses.state.lock().n_bytes;
        let shared = page(60);
        let mut unread: Vec<_> = (1..=5).map(|n| responses.add(ip(n), shared.clone())).collect();
        assert_eq!(n_bytes(), 60_000);
        let ended = responses.add(ip(6), page(30));
        // The end of a response with the shared page would free nothing.
        let slow = responses.add(ip(7), page(20));
        assert_eq!(n_bytes(), 80_000);
        assert!(ended.collect().await.is_err());
        unread.push(responses.add(ip(7), shared.clone()));
        for body in unread {
            assert_eq!(body.collect().await.unwrap().to_bytes(), shared);
        }
        assert_eq!(n_bytes(), 20_000);
        drop(slow);
        assert!(responses.state.lock().n_sharers.is_empty());
    }

    #[tokio::test]
    async fn one_page_is_sent_however_large_it_is() {
        let responses = OpenResponses::new(1000);
        let empty = responses.add(ip(1), Bytes::new());
        assert!(empty.is_end_stream());
        let body = responses.add(ip(1), page(50));
        assert_eq!(body.size_hint().exact(), Some(50_000));
        assert_eq!(body.collect().await.unwrap().to_bytes(), page(50));
    }
}
