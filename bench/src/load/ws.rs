//! WebSocket: binary messages that must come back as they were sent.

use std::sync::Arc;

use futures_util::{SinkExt as _, StreamExt as _};
use http::Request;
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{Error, Message};

use super::outcome::{Answer, Failure, Verdict, classify};
use super::target::Target;
use super::{http as client, worker};

/// One WebSocket.
pub(super) struct Ws {
    target: Arc<Target>,
    /// With the head of the answer to the upgrade.
    connection: Option<(WebSocketStream<TcpStream>, Answer)>,
}

impl Ws {
    pub(super) fn new(target: Arc<Target>) -> Self {
        Self {
            target,
            connection: None,
        }
    }

    pub(super) fn target(&self) -> &Arc<Target> {
        &self.target
    }

    pub(super) async fn exchange(&mut self) -> Result<Answer, Failure> {
        let (mut socket, head) = match self.connection.take() {
            Some(connection) => connection,
            None => match self.connect().await? {
                Upgrade::Done(connection) => *connection,
                Upgrade::Refused(answer) => return Ok(answer),
            },
        };
        let payload = &self.target.payload;
        socket.send(Message::Binary(payload.clone())).await.map_err(failure)?;
        let echoed = loop {
            match socket.next().await.ok_or(Failure::Closed)?.map_err(failure)? {
                Message::Ping(_) | Message::Pong(_) => (),
                Message::Close(_) => return Err(Failure::Closed),
                message => break message.into_data(),
            }
        };
        if echoed != *payload {
            return Err(Failure::Wrong("other bytes than those sent".into()));
        }
        let bytes = payload.len() as u64;
        let answer = Answer {
            sent: bytes,
            received: bytes,
            ..head.clone()
        };
        if !self.target.reconnect {
            self.connection = Some((socket, head));
        }
        Ok(answer)
    }

    async fn connect(&self) -> Result<Upgrade, Failure> {
        let req = self
            .target
            .uri("ws")
            .map_err(|error| Failure::Other(error.to_string()))?;
        let mut req: Request<()> = req.into_client_request().map_err(failure)?;
        req.headers_mut().extend(self.target.headers.clone());
        let stream = worker::connect(&self.target).await?;
        match tokio_tungstenite::client_async(req, stream).await {
            Ok((socket, rsp)) => {
                let head = Answer {
                    verdict: Verdict::Echoed,
                    ..client::head(&rsp)
                };
                Ok(Upgrade::Done(Box::new((socket, head))))
            }
            Err(Error::Http(rsp)) => Ok(Upgrade::Refused(client::head(&rsp))),
            Err(error) => Err(failure(error)),
        }
    }
}

/// A server or a proxy may answer the upgrade with an ordinary response.
enum Upgrade {
    Done(Box<(WebSocketStream<TcpStream>, Answer)>),
    Refused(Answer),
}

fn failure(error: Error) -> Failure {
    match error {
        Error::ConnectionClosed | Error::AlreadyClosed => Failure::Closed,
        Error::Protocol(error) => Failure::Wrong(error.to_string().into()),
        error => classify(&error),
    }
}
