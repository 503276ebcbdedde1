//! `tulle demo break`: the faults, and the socket on which the running demo receives requests to inject them.

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

use super::rundir;

#[derive(clap::ValueEnum, Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Fault {
    /// Kill the control plane, and restart it later.
    ControlPlane,
    /// Kill the application of one of web's replicas, and restart it later.
    Replica,
    /// Replace the issuer; every sidecar gets a certificate from the new one.
    #[value(name = "certificate", alias = "issuer")]
    Issuer,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct FaultRequest {
    pub(super) fault: Fault,
    pub(super) seconds: f64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum FaultResponse {
    /// The fault was injected; describes what was done.
    Done(String),
    /// The fault was not injected; gives the reason.
    Refused(String),
}

/// The socket on which the running demo receives fault requests.
pub(super) struct Listener(UnixListener);

/// A client that requested a fault and waits for the response.
pub(super) struct PendingRequest {
    pub(super) request: FaultRequest,
    stream: UnixStream,
}

impl Listener {
    pub(super) fn bind(path: &Path) -> anyhow::Result<Self> {
        let listener = UnixListener::bind(path).with_context(|| format!("listening on {}", path.display()))?;
        Ok(Self(listener))
    }

    /// Waits for the next valid request. Sends an error to the clients of invalid requests.
    ///
    /// Dropping the future drops a request that is being read, and its client sees the connection close.
    pub(super) async fn next(&self) -> io::Result<PendingRequest> {
        loop {
            let (mut stream, _) = self.0.accept().await?;
            let mut line = String::new();
            let mut reader = BufReader::new((&mut stream).take(MAX_REQUEST_BYTES));
            // A client that connects and sends nothing must not block other clients.
            let _ = timeout(CLIENT_TIMEOUT, reader.read_line(&mut line)).await;
            match serde_json::from_str::<FaultRequest>(&line) {
                Ok(request) => return Ok(PendingRequest { request, stream }),
                Err(err) => {
                    let response = FaultResponse::Refused(format!("the request is invalid: {err}"));
                    send(&mut stream, &response).await;
                }
            }
        }
    }
}

impl PendingRequest {
    pub(super) async fn respond(mut self, response: FaultResponse) {
        send(&mut self.stream, &response).await;
    }
}

/// Sends a fault request to the running demo, and returns the description of what was done.
pub(super) async fn send_request(fault: Fault, length: Duration) -> anyhow::Result<String> {
    let socket = rundir::running_socket()
        .context("no demo of yours is running; start one with `tulle demo` in another terminal")?;
    let context = || format!("sending a request to the demo at {}", socket.display());
    let mut stream = UnixStream::connect(&socket).await.with_context(context)?;
    let request = FaultRequest {
        fault,
        seconds: length.as_secs_f64(),
    };
    let mut line = serde_json::to_vec(&request)?;
    line.push(b'\n');
    stream.write_all(&line).await.with_context(context)?;
    let mut response = String::new();
    timeout(
        RESPONSE_TIMEOUT,
        stream.take(MAX_REQUEST_BYTES).read_to_string(&mut response),
    )
    .await
    .context("the demo does not respond")?
    .with_context(context)?;
    match serde_json::from_str(&response).context("parsing the response of the demo")? {
        FaultResponse::Done(what) => Ok(what),
        FaultResponse::Refused(why) => bail!("the demo refused: {why}"),
    }
}

async fn send(stream: &mut UnixStream, response: &FaultResponse) {
    let text = serde_json::to_vec(response).expect("a response is one string");
    // The client may have disconnected; the fault stays injected.
    let _ = timeout(CLIENT_TIMEOUT, stream.write_all(&text)).await;
}

const MAX_REQUEST_BYTES: u64 = 4096;
/// Maximum time to read a request from a client, or to send the response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(1);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_invalid_request_gets_an_error_and_the_next_request_is_returned() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        let ask = async {
            let mut responses = Vec::new();
            for line in ["nonsense\n", "{\"fault\":\"replica\",\"seconds\":10}\n"] {
                let mut stream = UnixStream::connect(&path).await.unwrap();
                stream.write_all(line.as_bytes()).await.unwrap();
                let mut response = String::new();
                stream.read_to_string(&mut response).await.unwrap();
                responses.push(response);
            }
            responses
        };
        let serve = async {
            let pending = listener.next().await.unwrap();
            assert_eq!((pending.request.fault, pending.request.seconds), (Fault::Replica, 10.0));
            pending.respond(FaultResponse::Done("web-1 is down".to_owned())).await;
        };
        let (responses, ()) = tokio::join!(ask, serve);
        assert!(responses[0].contains("the request is invalid"), "{}", responses[0]);
        assert_eq!(responses[1], r#"{"done":"web-1 is down"}"#);
    }
}
