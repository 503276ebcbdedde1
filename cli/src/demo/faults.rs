//! `tulle demo break`: what can be broken, and the socket over which the running demo is told.

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use super::rundir;

/// What to break.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Fault {
    /// Kill the control plane, and start it again later.
    ControlPlane,
    /// Kill the application of one of web's replicas, and start it again later.
    Replica,
    /// Replace the issuer: every sidecar gets a certificate of the new one.
    Certificate,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct Request {
    pub(super) fault: Fault,
    pub(super) seconds: f64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Answer {
    /// What was done.
    Done(String),
    /// Why it was not.
    Refused(String),
}

/// Where the running demo hears of faults.
pub(super) struct Listener(UnixListener);

/// One who asks, and waits for the answer.
pub(super) struct Asked {
    pub(super) request: Request,
    stream: UnixStream,
}

impl Listener {
    pub(super) fn bind(path: &Path) -> anyhow::Result<Self> {
        let listener = UnixListener::bind(path).with_context(|| format!("listening on {}", path.display()))?;
        Ok(Self(listener))
    }

    /// The next request; those that make no sense are answered here.
    ///
    /// Dropping the future loses a request that is being read; who asked sees the connection close.
    pub(super) async fn next(&self) -> io::Result<Asked> {
        loop {
            let (mut stream, _) = self.0.accept().await?;
            let mut line = String::new();
            let mut reader = BufReader::new((&mut stream).take(LONGEST));
            // Whoever connects and says nothing must not keep others out.
            let _ = timeout(PATIENCE, reader.read_line(&mut line)).await;
            match serde_json::from_str::<Request>(&line) {
                Ok(request) => return Ok(Asked { request, stream }),
                Err(err) => {
                    let answer = Answer::Refused(format!("this is no request: {err}"));
                    send(&mut stream, &answer).await;
                }
            }
        }
    }
}

impl Asked {
    pub(super) async fn answer(mut self, answer: Answer) {
        send(&mut self.stream, &answer).await;
    }
}

/// Asks the running demo to break something, and returns what it did.
pub(super) async fn ask(fault: Fault, length: Duration) -> anyhow::Result<String> {
    let socket = rundir::running_socket()
        .context("no demo of yours is running; start one with `tulle demo` in another terminal")?;
    let context = || format!("speaking to the demo at {}", socket.display());
    let mut stream = UnixStream::connect(&socket).await.with_context(context)?;
    let request = Request {
        fault,
        seconds: length.as_secs_f64(),
    };
    let mut line = serde_json::to_vec(&request)?;
    line.push(b'\n');
    stream.write_all(&line).await.with_context(context)?;
    let mut answer = String::new();
    timeout(ANSWER_LIMIT, stream.take(LONGEST).read_to_string(&mut answer))
        .await
        .context("the demo does not answer")?
        .with_context(context)?;
    match serde_json::from_str(&answer).context("the demo's answer makes no sense")? {
        Answer::Done(what) => Ok(what),
        Answer::Refused(why) => bail!("the demo refused: {why}"),
    }
}

async fn send(stream: &mut UnixStream, answer: &Answer) {
    let text = serde_json::to_vec(answer).expect("an answer is one string");
    // Whoever asked may have gone; what was done stays done.
    let _ = timeout(PATIENCE, stream.write_all(&text)).await;
}

const LONGEST: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(1);
const ANSWER_LIMIT: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_asks_for_nonsense_is_told_and_the_next_is_heard() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        let ask = async {
            let mut answers = Vec::new();
            for line in ["nonsense\n", "{\"fault\":\"replica\",\"seconds\":10}\n"] {
                let mut stream = UnixStream::connect(&path).await.unwrap();
                stream.write_all(line.as_bytes()).await.unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).await.unwrap();
                answers.push(answer);
            }
            answers
        };
        let serve = async {
            let asked = listener.next().await.unwrap();
            assert_eq!((asked.request.fault, asked.request.seconds), (Fault::Replica, 10.0));
            asked.answer(Answer::Done("web-1 is down".to_owned())).await;
        };
        let (answers, ()) = tokio::join!(ask, serve);
        assert!(answers[0].contains("this is no request"), "{}", answers[0]);
        assert_eq!(answers[1], r#"{"done":"web-1 is down"}"#);
    }
}
