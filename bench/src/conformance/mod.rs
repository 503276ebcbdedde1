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
    /// In a few words, for the table.
    pub found: String,
    /// Why that is not what was wanted.
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

            let responses = client(dial().await, case).await;
            let requests = self.state.lock().requests.clone();
            outcomes.push(judge(case, &requests, &responses));
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

/// Sends what a row says, and returns all responses: those it must get, or all there are until the connection ends.
async fn client(mut stream: TcpStream, case: &Case) -> Vec<Message> {
    let n_wanted = match case.wanted {
        Wanted::Requests(requests) => requests.len(),
        Wanted::Response(_) | Wanted::BadGateway(_) => 1,
        // A refusal ends the connection, or is followed by silence; what is cut ends it.
        Wanted::Refused(_) | Wanted::Cut => usize::MAX,
    };
    let mut bytes = Vec::new();
    let exchange = async {
        // Once a connection is known to be one of HTTP, nobody takes what is bad HTTP for something else.
        stream.write_all(FIRST.as_bytes()).await?;
        while read_all(&bytes, case, End::Unknown).is_empty() {
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(End::Here);
            }
        }
        bytes.clear();
        for piece in case.sends {
            stream.write_all(&latin1(piece)).await?;
            stream.flush().await?;
            if case.sends.len() > 1 {
                // So that the pieces arrive as such; that they do decides nothing.
                tokio::time::sleep(PAUSE).await;
            }
        }
        while finals(&read_all(&bytes, case, End::Unknown)) < n_wanted {
            if stream.read_buf(&mut bytes).await? == 0 {
                return Ok(End::Here);
            }
        }
        Ok::<_, io::Error>(End::Unknown)
    };
    let end = tokio::time::timeout(PATIENCE, exchange).await;
    let end = match end {
        Ok(Ok(end)) => end,
        Ok(Err(_)) | Err(_) => End::Unknown,
    };
    read_all(&bytes, case, end)
}

fn read_all(bytes: &[u8], case: &Case, end: End) -> Vec<Message> {
    let is_head = case.sends.iter().any(|piece| piece.starts_with("HEAD "));
    let end = if is_head { End::AfterHead } else { end };
    let (mut messages, mut at) = (Vec::new(), 0);
    while let Some((message, used)) = message::read(&bytes[at..], end) {
        at += used;
        messages.push(message);
    }
    messages
}

fn finals(messages: &[Message]) -> usize {
    messages.iter().filter(|message| message.status() >= 200).count()
}

fn judge(case: &Case, requests: &[Message], responses: &[Message]) -> Outcome {
    let last = responses.last();
    let statuses: Vec<u16> = responses.iter().map(Message::status).collect();
    let told = |statuses: &[u16]| statuses.iter().map(u16::to_string).collect::<Vec<_>>().join(" ");
    let n_good = responses.iter().filter(|rsp| rsp.status() == 200).count();
    let said = match last {
        None => "no answer".to_owned(),
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
    let wrong = match &case.wanted {
        Wanted::Requests(wanted) => wanted
            .iter()
            .zip(requests)
            .find_map(|(wanted, got)| {
                let lacks = got.lacks(wanted.lines).map(|line| format!("not {line:?}"));
                lacks
                    .or_else(|| (got.first_line != wanted.line).then(|| "another request line".to_owned()))
                    .or_else(|| (got.body != latin1(wanted.body)).then(|| "another body".to_owned()))
            })
            .or_else(|| (requests.len() != wanted.len()).then(|| format!("{} requests", requests.len())))
            .or_else(|| (n_good != wanted.len()).then(|| format!("{n_good} good answers"))),
        Wanted::Refused(wanted) => match (requests.len(), last.map(Message::status)) {
            (0, Some(status)) if wanted.contains(&status) => None,
            (0, Some(_) | None) => Some("refused otherwise".to_owned()),
            _ => Some("it passed".to_owned()),
        },
        Wanted::Response(wanted) => match last {
            None => Some("no response".to_owned()),
            Some(_) if statuses != wanted.statuses => Some("other statuses".to_owned()),
            Some(last) if !last.is_whole => Some("it is cut".to_owned()),
            Some(last) if last.body != latin1(wanted.body) => Some("another body".to_owned()),
            Some(last) => last.lacks(wanted.lines).map(|line| format!("not {line:?}")),
        },
        Wanted::BadGateway(wanted) => match last {
            Some(last) if wanted.contains(&last.status()) => None,
            _ => Some("not refused".to_owned()),
        },
        Wanted::Cut => match last {
            Some(last) if last.is_whole && last.status() < 400 => Some("it looks whole".to_owned()),
            _ => None,
        },
    };
    let wrong = wrong.map(|why| format!("{why}; at the application {requests:?}, at the client {responses:?}"));
    Outcome {
        case: *case,
        found,
        wrong,
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
const PAUSE: Duration = Duration::from_millis(5);
/// How long a row may take.
const PATIENCE: Duration = Duration::from_secs(5);
