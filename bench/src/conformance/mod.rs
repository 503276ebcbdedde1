//! HTTP/1 conformance: sends raw bytes through proxies, by a table of cases from RFC 9112, and reports the deviations.

mod app;
pub mod cases;
mod message;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use self::app::{State, WARM_UP_PATH};
use self::cases::{CASES, Case, Expected, Request};
use self::message::{Message, StreamEnd};

/// The result of one case.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub case: Case,
    /// Short description of the observed result.
    pub observed: String,
    /// Short description of the deviation from the expected result; `None` if there is no deviation.
    pub deviation: Option<String>,
    /// The deviation with all messages.
    pub deviation_details: Option<String>,
}

/// The test application of all cases, at one address.
pub struct App {
    state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

impl App {
    pub fn start(listener: TcpListener) -> Self {
        let state = Arc::<Mutex<State>>::default();
        let task = tokio::spawn(app::serve(listener, state.clone()));
        Self { state, task }
    }

    /// Sends every case to the application, each over a connection that `dial` opens through the proxies under test.
    pub async fn run_all(&self, dial: impl AsyncFn() -> TcpStream) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for case in CASES {
            {
                let mut state = self.state.lock();
                state.response = encode_latin1(case.application_response);
                state.requests.clear();
            }

            let mut attempts = 0;
            let observation = loop {
                attempts += 1;
                match run_client(dial().await, case).await {
                    // The proxy may not be ready yet, or it may reuse an upstream connection that the previous case has closed.
                    None if attempts < MAX_ATTEMPTS => tokio::time::sleep(RETRY_INTERVAL).await,
                    observation => break observation.unwrap_or_default(),
                }
            };
            let requests = self.state.lock().requests.clone();
            outcomes.push(evaluate(case, &requests, &observation));
        }
        outcomes
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Encodes text as Latin-1: each character is one byte.
fn encode_latin1(text: &str) -> Vec<u8> {
    let byte = |c| u8::try_from(u32::from(c)).unwrap_or(b'?');
    text.chars().map(byte).collect()
}

/// The responses that the client received.
#[derive(Default)]
struct ClientObservation {
    responses: Vec<Message>,
    /// Whether the connection was still open when the case timed out.
    is_open: bool,
}

/// Sends the bytes of a case and returns the responses: the expected number of them, or all until the connection ends. Returns
/// `None` if the warm-up request fails.
async fn run_client(mut stream: TcpStream, case: &Case) -> Option<ClientObservation> {
    let n_expected = match case.expected {
        Expected::Requests(requests) => requests.len(),
        Expected::Response(_) | Expected::BadGateway(_) => 1,
        // These cases wait for the end of the connection.
        Expected::Refused(_) | Expected::TruncatedResponse => usize::MAX,
    };
    // A valid request first, so that the proxy detects HTTP and does not treat the invalid bytes as an opaque protocol.
    tokio::time::timeout(CASE_TIMEOUT, send_warm_up_request(&mut stream))
        .await
        .ok()?
        .ok()?;
    let mut bytes = Vec::new();
    let exchange = async {
        for (n, piece) in case.client_writes.iter().enumerate() {
            let mut piece = encode_latin1(piece);
            if n + 1 == case.client_writes.len() && matches!(case.expected, Expected::Refused(_)) {
                piece.extend_from_slice(SMUGGLED_REQUEST.as_bytes());
            }
            stream.write_all(&piece).await?;
            stream.flush().await?;
            if case.client_writes.len() > 1 {
                // The pause makes it likely that the pieces arrive separately. The result of a case does not depend on it.
                tokio::time::sleep(WRITE_INTERVAL).await;
            }
        }
        while n_final_responses(&parse_responses(&bytes, case, StreamEnd::Unknown).0) < n_expected {
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(StreamEnd::Eof);
            }
        }
        Ok::<_, io::Error>(StreamEnd::Unknown)
    };
    let exchanged = tokio::time::timeout(CASE_TIMEOUT, exchange).await;
    let is_open = exchanged.is_err();
    let end = match exchanged {
        Ok(Ok(end)) => end,
        Ok(Err(_)) | Err(_) => StreamEnd::Unknown,
    };
    let (mut responses, len) = parse_responses(&bytes, case, end);
    if len < bytes.len() {
        responses.push(Message::unparsed(&bytes[len..]));
    }
    Some(ClientObservation { responses, is_open })
}

/// Sends a valid request and waits for its response.
async fn send_warm_up_request(stream: &mut TcpStream) -> io::Result<()> {
    let request = format!("GET {WARM_UP_PATH} HTTP/1.1\r\nhost: web.test\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::new();
    loop {
        if let Some((rsp, _)) = message::parse(&bytes, false, StreamEnd::Unknown) {
            return match rsp.status() {
                200 => Ok(()),
                _ => Err(io::ErrorKind::ConnectionRefused.into()),
            };
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Parses all responses and returns them with the number of bytes parsed.
fn parse_responses(bytes: &[u8], case: &Case, end: StreamEnd) -> (Vec<Message>, usize) {
    let is_head = case.client_writes.iter().any(|piece| piece.starts_with("HEAD "));
    let (mut messages, mut at) = (Vec::new(), 0);
    while let Some((message, used)) = message::parse(&bytes[at..], is_head, end) {
        at += used;
        messages.push(message);
    }
    (messages, at)
}

fn n_final_responses(messages: &[Message]) -> usize {
    messages.iter().filter(|message| message.status() >= 200).count()
}

fn evaluate(case: &Case, requests: &[Message], observation: &ClientObservation) -> Outcome {
    let (observed, deviation) = match &case.expected {
        Expected::Requests(wanted) => evaluate_requests(wanted, requests, observation),
        Expected::Refused(wanted) => evaluate_refusal(wanted, requests, observation),
        Expected::Response(wanted) => {
            let last = observation.responses.last();
            let deviation = match last {
                Some(last) if observation.statuses() != wanted.statuses || !last.is_complete => {
                    Some(observation.describe())
                }
                Some(last) if last.body != encode_latin1(wanted.body) => Some("another body".to_owned()),
                Some(last) => last.first_unmet_condition(wanted.lines).map(describe_unmet_condition),
                None => Some(observation.describe()),
            };
            (observation.describe(), deviation)
        }
        Expected::BadGateway(wanted) => {
            let status = observation.responses.last().map(Message::status);
            let is_expected = status.is_some_and(|status| wanted.contains(&status));
            (observation.describe(), (!is_expected).then(|| observation.describe()))
        }
        Expected::TruncatedResponse => {
            let deviation = match observation.responses.last() {
                Some(last) if last.is_complete && last.status() < 400 => Some("looks complete"),
                Some(_) if observation.is_open => Some("left open"),
                Some(_) => None,
                None => Some("no answer"),
            };
            (observation.describe(), deviation.map(str::to_owned))
        }
    };
    let responses = &observation.responses;
    let details = deviation
        .as_ref()
        .map(|deviation| format!("{deviation}; at the application {requests:?}, at the client {responses:?}"));
    Outcome {
        case: *case,
        observed,
        deviation,
        deviation_details: details,
    }
}

/// Evaluates requests that must reach the application: what was observed, and the deviation.
fn evaluate_requests(
    wanted: &[Request],
    requests: &[Message],
    observation: &ClientObservation,
) -> (String, Option<String>) {
    let n = requests.len();
    if n == wanted.len() && n == observation.n_ok() && n > 0 {
        let deviation = wanted.iter().zip(requests).find_map(|(wanted, got)| {
            let line = (got.first_line != wanted.line).then(|| format!("sends `{}`", got.first_line));
            line.or_else(|| (got.body != encode_latin1(wanted.body)).then(|| "another body".to_owned()))
                .or_else(|| got.first_unmet_condition(wanted.lines).map(describe_unmet_condition))
        });
        return ("forwarded".to_owned(), deviation);
    }
    if n == 0 {
        return (observation.describe(), Some(observation.describe()));
    }
    partly_forwarded(n, observation)
}

/// Evaluates a request that no proxy may forward. The response must have one of the statuses `wanted`.
fn evaluate_refusal(wanted: &[u16], requests: &[Message], observation: &ClientObservation) -> (String, Option<String>) {
    let n = requests.len();
    if n == 0 {
        let observed = observation.describe();
        let is_refused = observation
            .responses
            .last()
            .is_some_and(|last| wanted.contains(&last.status()));
        let deviation = match (is_refused, observation.is_open) {
            (true, false) => None,
            (true, true) => Some(format!("{observed}, left open")),
            (false, _) => Some(observed.clone()),
        };
        return (observed, deviation);
    }
    if n == observation.n_ok() {
        return ("forwarded".to_owned(), Some("forwards it".to_owned()));
    }
    partly_forwarded(n, observation)
}

/// The result if `n` requests reached the application, and the client did not get the expected number of successful responses.
fn partly_forwarded(n: usize, observation: &ClientObservation) -> (String, Option<String>) {
    let received = observation.describe();
    (
        format!("{n} forwarded, {received}"),
        Some(format!("forwards {n}, {received}")),
    )
}

impl ClientObservation {
    fn statuses(&self) -> Vec<u16> {
        self.responses.iter().map(Message::status).collect()
    }

    fn list_statuses(&self) -> String {
        let statuses: Vec<_> = self.statuses().iter().map(u16::to_string).collect();
        statuses.join(" ")
    }

    /// The number of responses with status 200.
    fn n_ok(&self) -> usize {
        self.responses.iter().filter(|rsp| rsp.status() == 200).count()
    }

    /// A short description of the responses.
    fn describe(&self) -> String {
        match self.responses.last() {
            None => "no answer".to_owned(),
            Some(last) if last.status() == 0 => "other bytes".to_owned(),
            Some(last) if !last.is_complete => format!("{}, cut", self.list_statuses()),
            Some(_) => self.list_statuses(),
        }
    }
}

/// Describes an unsatisfied condition.
fn describe_unmet_condition(line: &str) -> String {
    match line.strip_prefix('!') {
        Some(absent) => format!("with `{absent}`"),
        None => format!("without `{line}`"),
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} (section {}): {}",
            self.case.name, self.case.section, self.observed
        )?;
        match &self.deviation_details {
            Some(details) => write!(f, ", deviation: {details}"),
            None => Ok(()),
        }
    }
}

/// Sent directly after each request that must be refused. No proxy may process it as a request of its own.
const SMUGGLED_REQUEST: &str = "GET /smuggled HTTP/1.1\r\nhost: web.test\r\n\r\n";
const WRITE_INTERVAL: Duration = Duration::from_millis(5);
const RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Timeout of the warm-up request and of each case.
const CASE_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_ATTEMPTS: u32 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    fn message(first_line: &str, body: &str) -> Message {
        Message {
            first_line: first_line.to_owned(),
            body: body.into(),
            is_complete: true,
            ..Message::default()
        }
    }

    #[test]
    fn the_committed_document_explains_each_deviation() {
        const WANTED: Request = Request {
            line: "GET / HTTP/1.1",
            body: "",
            lines: &["!x-hop", "a: b"],
        };
        let ok = || message("HTTP/1.1 200 OK", "");
        let refusal = || message("HTTP/1.1 400 Bad Request", "");
        let get = || message("GET / HTTP/1.1", "");
        let with_line = |name: &str| Message {
            lines: vec![(name.to_owned(), "b".to_owned())],
            ..get()
        };
        let cut = Message {
            is_complete: false,
            ..ok()
        };
        let (one, two) = (&[WANTED; 1][..], &[WANTED; 2][..]);
        let forwarded = |expected, requests: &[Message], responses| {
            let observation = ClientObservation {
                responses,
                is_open: false,
            };
            evaluate_requests(expected, requests, &observation).1
        };
        let refused = |requests: &[Message], responses, is_open| {
            evaluate_refusal(&[400], requests, &ClientObservation { responses, is_open }).1
        };
        for (deviation, expected, terms) in [
            (forwarded(one, &[], vec![]), "no answer", &["no answer"][..]),
            (forwarded(one, &[], vec![refusal()]), "400", &["status codes"]),
            (
                forwarded(one, &[], vec![message("x", "")]),
                "other bytes",
                &["other bytes"],
            ),
            (
                forwarded(one, &[message("GET /x HTTP/1.1", "")], vec![ok()]),
                "sends `GET /x HTTP/1.1`",
                &["sends"],
            ),
            (
                forwarded(one, &[message("GET / HTTP/1.1", "x")], vec![ok()]),
                "another body",
                &["another body"],
            ),
            (
                forwarded(one, &[with_line("x-hop")], vec![ok()]),
                "with `x-hop`",
                &["with"],
            ),
            (forwarded(one, &[get()], vec![ok()]), "without `a: b`", &["without"]),
            (
                forwarded(two, &[get()], vec![ok()]),
                "forwards 1, 200",
                &["forwards N, …", "status codes"],
            ),
            (
                forwarded(two, &[get()], vec![cut]),
                "forwards 1, 200, cut",
                &["forwards N, …", "cut"],
            ),
            (refused(&[get()], vec![ok()], false), "forwards it", &["forwards it"]),
            (
                refused(&[get()], vec![refusal()], false),
                "forwards 1, 400",
                &["forwards N, …"],
            ),
            (refused(&[], vec![refusal()], true), "400, left open", &["left open"]),
        ] {
            assert_eq!(deviation.as_deref(), Some(expected));
            for term in terms {
                assert!(
                    DOCUMENT.contains(&format!("\n- {term}: ")) || DOCUMENT.contains(&format!("\n- \"{term}\": ")),
                    "the document does not explain {term:?} of {expected:?}"
                );
            }
        }
    }

    const DOCUMENT: &str = include_str!("../../../docs/reference/conformance.md");
}
