//! TCP client: reads an optional greeting, then sends messages and expects them back unchanged.

use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::ReadHalf;

use super::connect;
use super::outcome::{ExchangeResponse, Failure, ResponseStatus};
use super::target::Target;

pub(super) struct Tcp {
    target: Arc<Target>,
    /// The connection, with the name from its greeting.
    connection: Option<(TcpStream, Option<String>)>,
    buf: Vec<u8>,
}

impl Tcp {
    pub(super) fn new(target: Arc<Target>) -> Self {
        Self {
            target,
            connection: None,
            buf: vec![0; BUFFER_BYTES],
        }
    }

    pub(super) fn target(&self) -> &Arc<Target> {
        &self.target
    }

    pub(super) async fn exchange(&mut self) -> Result<ExchangeResponse, Failure> {
        let (mut stream, name) = match self.connection.take() {
            Some(connection) => connection,
            None => connect(&self.target).await?,
        };
        let payload = &self.target.payload;
        let (mut reader, mut writer) = stream.split();
        // Sends and receives concurrently, so that no side has to buffer the whole message.
        let send = async { Ok(writer.write_all(payload).await?) };
        tokio::try_join!(send, read_and_compare(&mut reader, payload, &mut self.buf))?;
        let bytes = payload.len() as u64;
        let response = ExchangeResponse {
            status: ResponseStatus::Echoed,
            replica: name.clone(),
            reason: None,
            sent: bytes,
            received: bytes,
        };
        if !self.target.reconnect {
            self.connection = Some((stream, name));
        }
        Ok(response)
    }
}

/// Connects, and reads the greeting if one is expected.
async fn connect(target: &Target) -> Result<(TcpStream, Option<String>), Failure> {
    let mut stream = connect::connect(target).await?;
    let Some(expected) = &target.greeting else {
        return Ok((stream, None));
    };
    let line = read_line(&mut stream).await?;
    if !line.starts_with(expected.as_str()) {
        return Err(Failure::UnexpectedResponse(format!("greeting {line:?}").into()));
    }
    let name = line.split_whitespace().next_back().map(str::to_owned);
    Ok((stream, name))
}

/// Reads one line, and no byte after it.
async fn read_line(stream: &mut TcpStream) -> Result<String, Failure> {
    let mut line = Vec::new();
    let mut seen = [0; MAX_GREETING_BYTES];
    while line.len() < MAX_GREETING_BYTES {
        let n = stream.peek(&mut seen).await?;
        if n == 0 {
            return Err(Failure::Closed);
        }
        let end = seen[..n].iter().position(|byte| *byte == b'\n');
        let take = end.map_or(n, |at| at + 1);
        stream.read_exact(&mut seen[..take]).await?;
        line.extend_from_slice(&seen[..take]);
        if end.is_some() {
            return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
        }
    }
    Err(Failure::UnexpectedResponse(
        format!("no end of line in the first {MAX_GREETING_BYTES} bytes").into(),
    ))
}

/// Reads as many bytes as `expected` has. Fails if they differ from `expected`.
async fn read_and_compare(reader: &mut ReadHalf<'_>, expected: &[u8], buf: &mut [u8]) -> Result<(), Failure> {
    let mut rest = expected;
    while !rest.is_empty() {
        let wanted = rest.len().min(buf.len());
        let n = reader.read(&mut buf[..wanted]).await?;
        if n == 0 {
            return Err(Failure::Closed);
        }
        if buf[..n] != rest[..n] {
            return Err(Failure::UnexpectedResponse("the bytes differ from those sent".into()));
        }
        rest = &rest[n..];
    }
    Ok(())
}

const BUFFER_BYTES: usize = 64 * 1024;
const MAX_GREETING_BYTES: usize = 256;
