//! The proxy with an allocator that counts allocations, for the row `allocations`. callgrind counts allocations too
//! (`tulle-bench costs`), but a proxy under callgrind is too slow for a measurement under load.
//!
//! The program is configured like `tulle-proxy`. Its only argument is a listen address. It writes one line to each connection
//! there: the number of allocations and the number of allocated bytes so far.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write as _;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use tulle_core::logging;
use tulle_proxy::app::{App, ProcessContext};
use tulle_proxy::env;

fn main() -> anyhow::Result<()> {
    let addr = std::env::args()
        .nth(1)
        .context("the argument with the listen address is missing")?;
    let listener = TcpListener::bind(&addr).with_context(|| format!("listening on {addr}"))?;
    std::thread::spawn(move || write_counts(&listener));
    let config = env::load(|name| std::env::var_os(name)).map_err(|errors| {
        anyhow::anyhow!(
            "{}",
            errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        )
    })?;
    let log = logging::init(&config.log.filter, config.log.format).context("starting the log")?;
    App::build(config, ProcessContext::with_redirect(Some(log), Default::default())).and_then(App::run)
}

fn write_counts(listener: &TcpListener) {
    for mut stream in listener.incoming().flatten() {
        let (calls, bytes) = (CALLS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
        // The client may have closed the connection already.
        let _ = writeln!(stream, "{calls} {bytes}");
    }
}

/// The system allocator with counters. A reallocation counts as one allocation of the new size.
struct CountingAllocator;

static CALLS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

fn count(bytes: usize) {
    CALLS.fetch_add(1, Ordering::Relaxed);
    BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
}

// SAFETY: every call is forwarded unchanged to the system allocator; counting neither allocates nor touches the memory.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller upholds the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size);
        // SAFETY: the caller upholds the contract of `realloc`.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
