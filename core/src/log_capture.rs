//! Captures log lines, for the tests of several crates.

use std::io;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use tracing::Dispatch;
use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::DefaultFields;
use tracing_subscriber::fmt::{self, FormatEvent};
use tracing_subscriber::layer::SubscriberExt as _;

/// The log lines of this thread of the level `info` and above. The capture ends when this is dropped.
#[must_use]
pub struct LogCapture {
    written: Written,
    _default: DefaultGuard,
}

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl LogCapture {
    pub fn start() -> Self {
        Self::start_with(fmt::format())
    }

    /// As [`start`](Self::start), with lines in this format.
    pub fn start_with(format: impl FormatEvent<Registry, DefaultFields> + Send + Sync + 'static) -> Self {
        LazyLock::force(&SECOND_DISPATCH);
        let written = Written::default();
        let writer = written.clone();
        let lines = fmt::layer()
            .with_ansi(false)
            .event_format(format)
            .with_writer(move || writer.clone());
        let subscriber = tracing_subscriber::registry().with(lines).with(LevelFilter::INFO);
        Self {
            written,
            _default: tracing::subscriber::set_default(subscriber),
        }
    }

    /// The lines that were logged so far.
    pub fn lines(&self) -> Vec<String> {
        let text = self.written.0.lock();
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }

    /// The lines that contain a text.
    pub fn lines_with(&self, text: &str) -> Vec<String> {
        let mut lines = self.lines();
        lines.retain(|line| line.contains(text));
        lines
    }
}

impl io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A second dispatcher, so that every call site asks the subscriber of its own thread. With a single dispatcher, `tracing` asks the
/// subscriber of the first thread that reaches a call site, and a thread without a capture disables the call site for all threads.
static SECOND_DISPATCH: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn the_lines_of_this_thread_are_captured_also_if_another_thread_logs_first() {
        let log = LogCapture::start();
        let write = |n: u32| tracing::warn!(n, "written");
        thread::spawn(move || write(1)).join().unwrap();
        write(2);
        tracing::debug!("left out");
        tracing::info!("other");
        let lines = log.lines();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].ends_with("written n=2"), "{lines:?}");
        assert_eq!(log.lines_with("written"), lines[..1]);
    }
}
