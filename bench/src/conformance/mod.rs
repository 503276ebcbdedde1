//! What becomes of raw bytes on their way through proxies: a table from RFC 9112, and who keeps to it.

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

use self::app::State;
use self::cases::{CASES, Case, Wanted};
use self::message::{End, Message};

/// What came of one row.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub case: Case,
    /// In a few words.
    pub found: String,
    /// What was done instead of what was wanted, in a few words; nothing if it was that.
    pub instead: Option<String>,
    /// The same, with all messages.
    pub wrong: Option<String>,
}

/// The application of all rows, at one address.
pub struct App {
    state: Arc<Mutex<State>>,
    serving: JoinHandle<()>,
}

impl App {
    /// Starts it.
    pub fn start(listener: TcpListener) -> Self {
        let state = Arc::<Mutex<State>>::default();
        let serving = tokio::spawn(app::serve(listener, state.clone()));
        Self { state, serving }
    }

    /// Has every row sent to the application over a connection that `dial` opens, through whatever is on the way.
    pub async fn try_all(&self, dial: impl AsyncFn() -> TcpStream) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for case in CASES {
            {
                let mut state = self.state.lock();
                state.answer = latin1(case.answers);
                state.requests.clear();
            }

            let mut tries = 0;
            let answer = loop {
                tries += 1;
                match client(dial().await, case).await {
                    // A proxy may not be ready, or use a connection that the answer of the row before has ended.
                    None if tries < MOST_TRIES => tokio::time::sleep(PAUSE).await,
                    answer => break answer.unwrap_or_default(),
                }
            };
            let requests = self.state.lock().requests.clone();
            outcomes.push(judge(case, &requests, &answer));
        }
        outcomes
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Characters of the table are bytes.
fn latin1(text: &str) -> Vec<u8> {
    let byte = |c| u8::try_from(u32::from(c)).unwrap_or(b'?');
    text.chars().map(byte).collect()
}

/// What a client got.
#[derive(Default)]
struct Answer {
    responses: Vec<Message>,
    /// Whether more could come, had it waited longer.
    is_open: bool,
}

/// Sends what a row says, and returns all responses: those it must get, or all there are until the connection ends; nothing
/// if the connection was no good from the beginning.
async fn client(mut stream: TcpStream, case: &Case) -> Option<Answer> {
    let n_wanted = match case.wanted {
        Wanted::Requests(requests) => requests.len(),
        Wanted::Response(_) | Wanted::BadGateway(_) => 1,
        // Both end the connection.
        Wanted::Refused(_) | Wanted::Cut => usize::MAX,
    };
    // Once a connection is known to be one of HTTP, nobody takes what is bad HTTP for something else.
    tokio::time::timeout(PATIENCE, first(&mut stream)).await.ok()?.ok()?;
    let mut bytes = Vec::new();
    let exchange = async {
        for (n, piece) in case.sends.iter().enumerate() {
            let mut piece = latin1(piece);
            if n + 1 == case.sends.len() && matches!(case.wanted, Wanted::Refused(_)) {
                piece.extend_from_slice(SMUGGLED.as_bytes());
            }
            stream.write_all(&piece).await?;
            stream.flush().await?;
            if case.sends.len() > 1 {
                // So that the pieces arrive as such; that they do decides nothing.
                tokio::time::sleep(PAUSE).await;
            }
        }
        while finals(&read_all(&bytes, case, End::Unknown).0) < n_wanted {
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(End::Here);
            }
        }
        Ok::<_, io::Error>(End::Unknown)
    };
    let exchanged = tokio::time::timeout(PATIENCE, exchange).await;
    let is_open = exchanged.is_err();
    let end = match exchanged {
        Ok(Ok(end)) => end,
        Ok(Err(_)) | Err(_) => End::Unknown,
    };
    let (mut responses, len) = read_all(&bytes, case, end);
    if len < bytes.len() {
        responses.push(Message::unread(&bytes[len..]));
    }
    Some(Answer { responses, is_open })
}

/// Has a request answered that nothing is wrong with.
async fn first(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(FIRST.as_bytes()).await?;
    let mut bytes = Vec::new();
    loop {
        if let Some((rsp, _)) = message::read(&bytes, End::Unknown) {
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

/// All responses, and how many bytes they are.
fn read_all(bytes: &[u8], case: &Case, end: End) -> (Vec<Message>, usize) {
    let is_head = case.sends.iter().any(|piece| piece.starts_with("HEAD "));
    let end = if is_head { End::AfterHead } else { end };
    let (mut messages, mut at) = (Vec::new(), 0);
    while let Some((message, used)) = message::read(&bytes[at..], end) {
        at += used;
        messages.push(message);
    }
    (messages, at)
}

fn finals(messages: &[Message]) -> usize {
    messages.iter().filter(|message| message.status() >= 200).count()
}

fn judge(case: &Case, requests: &[Message], Answer { responses, is_open }: &Answer) -> Outcome {
    let last = responses.last();
    let statuses: Vec<u16> = responses.iter().map(Message::status).collect();
    let told = |statuses: &[u16]| statuses.iter().map(u16::to_string).collect::<Vec<_>>().join(" ");
    let n_good = responses.iter().filter(|rsp| rsp.status() == 200).count();
    let said = match last {
        None => "no answer".to_owned(),
        Some(last) if last.status() == 0 => "other bytes".to_owned(),
        Some(last) if !last.is_whole => format!("{}, cut", told(&statuses)),
        Some(_) => told(&statuses),
    };
    let found = match (requests.len(), &case.wanted) {
        (_, Wanted::Response(_) | Wanted::BadGateway(_) | Wanted::Cut) => said,
        (0, _) => said,
        (n, Wanted::Requests(wanted)) if n == wanted.len() && n_good == n => "passed".to_owned(),
        (n, Wanted::Refused(_)) if n_good == n => "passed".to_owned(),
        (n, _) => format!("{n} passed, {said}"),
    };
    let instead = match &case.wanted {
        Wanted::Requests(wanted) if requests.len() == wanted.len() && n_good == requests.len() => {
            wanted.iter().zip(requests).find_map(|(wanted, got)| {
                let line = (got.first_line != wanted.line).then(|| format!("sends `{}`", got.first_line));
                line.or_else(|| (got.body != latin1(wanted.body)).then(|| "another body".to_owned()))
                    .or_else(|| got.lacks(wanted.lines).map(but))
            })
        }
        Wanted::Requests(_) => Some(match requests.len() {
            0 => found.clone(),
            n => format!("passes {n}, {}", told(&statuses)),
        }),
        Wanted::Refused(wanted) => match (requests.len(), last.map(Message::status)) {
            (0, Some(status)) if wanted.contains(&status) => is_open.then(|| format!("{found}, left open")),
            (0, _) => Some(found.clone()),
            _ if found == "passed" => Some("passes it".to_owned()),
            _ => Some(found.clone()),
        },
        Wanted::Response(wanted) => match last {
            Some(last) if statuses != wanted.statuses || !last.is_whole => Some(found.clone()),
            Some(last) if last.body != latin1(wanted.body) => Some("another body".to_owned()),
            Some(last) => last.lacks(wanted.lines).map(but),
            None => Some(found.clone()),
        },
        Wanted::BadGateway(wanted) => match last {
            Some(last) if wanted.contains(&last.status()) => None,
            _ => Some(found.clone()),
        },
        Wanted::Cut => match last {
            Some(last) if last.is_whole && last.status() < 400 => Some("looks whole".to_owned()),
            Some(_) if *is_open => Some("left open".to_owned()),
            Some(_) => None,
            None => Some("no answer".to_owned()),
        },
    };
    let wrong = instead
        .as_ref()
        .map(|instead| format!("{instead}; at the application {requests:?}, at the client {responses:?}"));
    Outcome {
        case: *case,
        found,
        instead,
        wrong,
    }
}

/// What of the table's lines is not so.
fn but(line: &str) -> String {
    match line.strip_prefix('!') {
        Some(absent) => format!("with `{absent}`"),
        None => format!("without `{line}`"),
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} (RFC 9112 §{}): {}",
            self.case.name, self.case.section, self.found
        )?;
        match &self.wrong {
            Some(why) => write!(f, ", wrong: {why}"),
            None => Ok(()),
        }
    }
}

/// What each connection begins with; the application says OK and forgets it.
const FIRST: &str = "GET /first HTTP/1.1\r\nhost: web.test\r\n\r\n";
/// What comes right behind each request that is to be refused, which must not be taken for another one.
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nhost: web.test\r\n\r\n";
const PAUSE: Duration = Duration::from_millis(5);
/// How long a row may take.
const PATIENCE: Duration = Duration::from_secs(5);
const MOST_TRIES: u32 = 100;
