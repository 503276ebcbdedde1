//! The access log: one line per request that reaches the service, in a format like Apache's common log or as JSON. A request
//! that is refused earlier, because its head is invalid, late or too long, has no line.
//!
//! A dedicated thread writes the lines, so that a slow or stuck reader does not block requests.

use std::{
    io::Write,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};
use serde_json::{Map, Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::time::Instant;
use tulle_core::{metrics::Counter, names::header as names};

use crate::http::{body::Body, stack::error_response::ConnectionInfo, upgrade::websocket};

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Format {
    Apache,
    Json,
}

/// The access log of a process.
#[derive(Clone)]
pub(crate) struct AccessLog {
    format: Format,
    lines_tx: SyncSender<LogMessage>,
    dropped: Arc<Counter>,
}

enum LogMessage {
    Text(String),
    /// The writer replies when all earlier messages are written.
    Flush(SyncSender<()>),
}

/// The log entry of a request that waits for its response.
pub(crate) struct AccessLogEntry {
    log: AccessLog,
    connection: Arc<ConnectionInfo>,
    timestamp: OffsetDateTime,
    started_at: Instant,
    /// Total duration of the polls of the request until its response head.
    processing_time: Duration,
    method: Method,
    uri: Uri,
    version: Version,
    /// The client's HTTP version, if the peer's proxy upgraded the request to HTTP/2.
    orig_proto: Option<HeaderValue>,
    /// Whether the request is an extended CONNECT that carries a WebSocket handshake. It is logged as the handshake.
    is_websocket: bool,
    trace_id: Option<HeaderValue>,
    content_length: Option<HeaderValue>,
    user_agent: Option<HeaderValue>,
    host: Option<HeaderValue>,
}

impl AccessLog {
    /// Starts the writer thread. Lines that exceed the queue are dropped and counted in `dropped`.
    pub(crate) fn start(
        format: Format,
        out: impl Write + Send + 'static,
        dropped: Arc<Counter>,
    ) -> std::io::Result<Self> {
        let (lines_tx, lines_rx) = sync_channel(MAX_QUEUED_LINES);
        thread::Builder::new()
            .name("access-log".into())
            .spawn(move || run_writer(out, &lines_rx))?;
        Ok(Self {
            format,
            lines_tx,
            dropped,
        })
    }

    /// Starts the entry of a new request.
    pub(crate) fn entry(&self, req: &Request<Body>, connection: &Arc<ConnectionInfo>) -> Box<AccessLogEntry> {
        let headers = req.headers();
        let is_websocket = websocket::is_extended_connect_from_proxy(req);
        Box::new(AccessLogEntry {
            log: self.clone(),
            connection: connection.clone(),
            timestamp: OffsetDateTime::now_utc(),
            started_at: Instant::now(),
            processing_time: Duration::ZERO,
            method: if is_websocket {
                Method::GET
            } else {
                req.method().clone()
            },
            uri: req.uri().clone(),
            version: req.version(),
            orig_proto: headers.get(names::L5D_ORIG_PROTO).cloned(),
            is_websocket,
            trace_id: trace_id(headers).cloned(),
            content_length: headers.get(header::CONTENT_LENGTH).cloned(),
            user_agent: headers.get(header::USER_AGENT).cloned(),
            host: headers.get(header::HOST).cloned(),
        })
    }

    /// Waits until all queued lines are written, for at most [`FLUSH_TIMEOUT`].
    pub(crate) fn flush(&self) {
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        let (written_tx, written_rx) = sync_channel(1);
        let mut message = LogMessage::Flush(written_tx);
        // The queue has no blocking send with a timeout.
        let is_timed_out = loop {
            match self.lines_tx.try_send(message) {
                Ok(()) => {
                    let remaining = deadline.saturating_duration_since(Instant::now());
                    break written_rx.recv_timeout(remaining) == Err(RecvTimeoutError::Timeout);
                }
                Err(TrySendError::Full(unsent)) if Instant::now() < deadline => message = unsent,
                Err(error) => break matches!(error, TrySendError::Full(_)),
            }
            thread::sleep(FULL_QUEUE_POLL_INTERVAL);
        };
        if is_timed_out {
            tracing::warn!("the access log was not written before the exit; its last lines are lost");
        }
    }
}

impl AccessLogEntry {
    pub(crate) fn add_processing_time(&mut self, started_at: Instant) {
        self.processing_time += started_at.elapsed();
    }

    /// Queues the line; `rsp` is `None` if the request got no response.
    pub(crate) fn finish(self, rsp: Option<&Response<Body>>) {
        let status = rsp.map(|rsp| match self.is_websocket && websocket::is_tunnel_response(rsp) {
            true => StatusCode::SWITCHING_PROTOCOLS,
            false => rsp.status(),
        });
        let line = match self.log.format {
            Format::Apache => self.apache(status),
            Format::Json => {
                let length = rsp.and_then(|rsp| rsp.headers().get(header::CONTENT_LENGTH));
                self.json(status, length).to_string() + "\n"
            }
        };
        if self.log.lines_tx.try_send(LogMessage::Text(line)).is_err() {
            self.log.dropped.inc();
        }
    }

    /// `<client> <identity> - [<time>] "<method> <uri> <version>" <status>`
    fn apache(&self, status: Option<StatusCode>) -> String {
        let Self { method, uri, .. } = self;
        let version = self.version();
        let (client, id) = (self.connection.client_addr, self.client_id());
        // The URI is quoted in the line.
        let uri = uri.to_string().replace('\\', "\\\\").replace('"', "\\\"");
        let status = status.map_or_else(|| "-".to_owned(), |status| status.as_u16().to_string());
        format!(
            "{client} {id} - [{}] \"{method} {uri} {version}\" {status}\n",
            self.timestamp()
        )
    }

    fn json(&self, status: Option<StatusCode>, length: Option<&HeaderValue>) -> Value {
        let text = |value: Option<&HeaderValue>| {
            value.map_or_else(String::new, |value| {
                String::from_utf8_lossy(value.as_bytes()).into_owned()
            })
        };
        let mut line = Map::new();
        let mut add_field = |name: &str, value: Value| drop(line.insert(name.to_owned(), value));
        add_field("client.addr", json!(self.connection.client_addr.to_string()));
        add_field("client.id", json!(self.client_id()));
        add_field("direction", json!(self.connection.direction));
        add_field("timestamp", json!(self.timestamp()));
        add_field("method", json!(self.method.as_str()));
        add_field("uri", json!(self.uri.to_string()));
        add_field("version", json!(self.version()));
        add_field("trace_id", json!(text(self.trace_id.as_ref())));
        add_field("request_bytes", json!(text(self.content_length.as_ref())));
        add_field("user_agent", json!(text(self.user_agent.as_ref())));
        add_field("host", json!(text(self.host.as_ref())));
        if let Some(status) = status {
            add_field("status", json!(status.as_u16()));
        }
        if let Some(length) = length {
            add_field("response_bytes", json!(text(Some(length))));
        }
        add_field("total_ns", json!(self.started_at.elapsed().as_nanos().to_string()));
        add_field("processing_ns", json!(self.processing_time.as_nanos().to_string()));
        Value::Object(line)
    }

    fn version(&self) -> String {
        let original = self.orig_proto.as_ref().and_then(|proto| proto.to_str().ok());
        match original.and_then(|proto| proto.split(';').next()) {
            Some(version @ ("HTTP/1.0" | "HTTP/1.1")) => version.to_owned(),
            _ => format!("{:?}", self.version),
        }
    }

    fn client_id(&self) -> &str {
        let id = self.connection.client_id.as_ref().and_then(|id| id.to_str().ok());
        id.unwrap_or("-")
    }

    fn timestamp(&self) -> String {
        self.timestamp.format(&Rfc3339).unwrap_or_default()
    }
}

fn trace_id(headers: &HeaderMap) -> Option<&HeaderValue> {
    let names = ["x-b3-traceid", "x-request-id", "x-amzn-trace-id"];
    names.into_iter().find_map(|name| headers.get(name))
}

fn run_writer(mut out: impl Write, lines_rx: &Receiver<LogMessage>) {
    while let Ok(message) = lines_rx.recv() {
        // A write error cannot be reported: the log itself has failed.
        let _ = match message {
            LogMessage::Text(line) => out.write_all(line.as_bytes()),
            LogMessage::Flush(written_tx) => {
                let flushed = out.flush();
                let _ = written_tx.send(());
                flushed
            }
        };
    }
}

const MAX_QUEUED_LINES: usize = 4096;
/// Maximum time that a flush waits at the exit of the process.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
const FULL_QUEUE_POLL_INTERVAL: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, SocketAddr};

    use parking_lot::Mutex;
    use tulle_core::addr::Addr;

    use super::*;
    use crate::http::upgrade::http1_over_http2;

    const UNUSED_ADDR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// The log line of a sample request.
    fn line(format: Format, client_id: Option<&'static str>) -> String {
        let req = Request::post("http://web.test/buy?what=tea")
            .header("host", "web.test")
            .header("x-request-id", "r1")
            .header("content-length", "5")
            .header("user-agent", "curl \"quoted\"")
            .body(Body::empty())
            .unwrap();
        let rsp = Response::builder().status(201).header("content-length", "7");
        written(format, client_id, &req, &rsp.body(Body::empty()).unwrap())
    }

    fn written(format: Format, client_id: Option<&'static str>, req: &Request<Body>, rsp: &Response<Body>) -> String {
        let sink = Sink::default();
        let log = AccessLog::start(format, sink.clone(), Arc::default()).unwrap();
        let connection = Arc::new(ConnectionInfo {
            direction: "inbound",
            proxy_identity: "web".into(),
            target: Addr::Socket(UNUSED_ADDR),
            client_addr: ([10, 0, 0, 1], 4321).into(),
            client_id: client_id.map(HeaderValue::from_static),
            error_labeler: None,
        });
        log.entry(req, &connection).finish(Some(rsp));
        log.flush();
        let written = sink.0.lock().clone();
        String::from_utf8(written).unwrap()
    }

    #[test]
    fn the_apache_format_has_client_request_and_status() {
        let line = line(Format::Apache, None);
        let (before, after) = line.split_once(" - [").unwrap();
        assert_eq!(before, "10.0.0.1:4321 -");
        let (time, after) = after.split_once("] ").unwrap();
        assert!(OffsetDateTime::parse(time, &Rfc3339).is_ok(), "{time}");
        assert_eq!(after, "\"POST http://web.test/buy?what=tea HTTP/1.1\" 201\n");
    }

    #[test]
    fn the_json_format_has_every_field() {
        let line = line(Format::Json, Some("client.shop"));
        let line: Value = serde_json::from_str(&line).unwrap();
        for (name, value) in [
            ("client.addr", json!("10.0.0.1:4321")),
            ("client.id", json!("client.shop")),
            ("direction", json!("inbound")),
            ("method", json!("POST")),
            ("uri", json!("http://web.test/buy?what=tea")),
            ("version", json!("HTTP/1.1")),
            ("trace_id", json!("r1")),
            ("request_bytes", json!("5")),
            ("status", json!(201)),
            ("response_bytes", json!("7")),
            ("user_agent", json!("curl \"quoted\"")),
            ("host", json!("web.test")),
        ] {
            assert_eq!(line[name], value, "{name}");
        }
        for name in ["timestamp", "total_ns", "processing_ns"] {
            assert!(line[name].is_string(), "{name}");
        }
    }

    #[test]
    fn a_websocket_over_http2_is_logged_as_its_http1_handshake() {
        let handshake = Request::get("/chat").header("host", "web.test");
        let connect = http1_over_http2::to_extended_connect(&handshake.body(Body::empty()).unwrap()).unwrap();
        let line = written(Format::Apache, None, &connect, &Response::new(Body::empty()));
        assert!(line.ends_with("\"GET http://web.test/chat HTTP/1.1\" 101\n"), "{line}");
    }

    #[test]
    fn a_flush_is_confirmed_when_the_log_is_flushed() {
        /// A log that checks at each flush that the confirmation is not sent yet.
        struct Unconfirmed(Receiver<()>);
        impl Write for Unconfirmed {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                Ok(bytes.len())
            }

            fn flush(&mut self) -> std::io::Result<()> {
                assert_eq!(self.0.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
                Ok(())
            }
        }
        let (lines_tx, lines_rx) = sync_channel(1);
        let (written_tx, written_rx) = sync_channel(1);
        lines_tx.send(LogMessage::Flush(written_tx)).unwrap();
        drop(lines_tx);
        run_writer(Unconfirmed(written_rx), &lines_rx);
    }

    #[test]
    fn a_flush_waits_for_a_full_queue() {
        /// A log that is blocked until the sender is dropped.
        struct Blocked(Receiver<()>, Sink);
        impl Write for Blocked {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                let _ = self.0.recv();
                self.1.write(bytes)
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let (unblock, blocked) = sync_channel(0);
        let (sink, dropped) = (Sink::default(), Arc::<Counter>::default());
        let log = AccessLog::start(Format::Apache, Blocked(blocked, sink.clone()), dropped.clone()).unwrap();
        while dropped.get() == 0 {
            log.entry(&Request::new(Body::empty()), &connection()).finish(None);
        }
        let unblocking = thread::spawn(move || drop(unblock));
        log.flush();
        unblocking.join().unwrap();
        let n_lines = sink.0.lock().iter().filter(|byte| **byte == b'\n').count();
        assert!(n_lines >= MAX_QUEUED_LINES, "{n_lines}");
    }

    fn connection() -> Arc<ConnectionInfo> {
        Arc::new(ConnectionInfo {
            direction: "inbound",
            proxy_identity: "web".into(),
            target: Addr::Socket(UNUSED_ADDR),
            client_addr: UNUSED_ADDR,
            client_id: None,
            error_labeler: None,
        })
    }

    #[test]
    fn a_blocked_reader_does_not_block_requests() {
        struct Stuck;
        impl Write for Stuck {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                loop {
                    thread::park();
                }
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let dropped = Arc::<Counter>::default();
        let log = AccessLog::start(Format::Apache, Stuck, dropped.clone()).unwrap();
        for _ in 0..2 * MAX_QUEUED_LINES {
            log.entry(&Request::new(Body::empty()), &connection()).finish(None);
        }
        assert!(dropped.get() >= MAX_QUEUED_LINES as u64 - 1, "{}", dropped.get());
    }
}
