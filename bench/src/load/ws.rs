//! WebSocket client: sends binary messages and expects them back unchanged.

use std::sync::Arc;

use futures_util::{SinkExt as _, StreamExt as _};
use http::Request;
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{Error, Message};

use super::connect::connect;
use super::http::response_from_head;
use super::outcome::{ExchangeResponse, Failure, ResponseStatus, classify};
use super::target::Target;

pub(super) struct Ws {
    target: Arc<Target>,
    /// The connection, with the status and headers of the upgrade response.
    connection: Option<(WebSocketStream<TcpStream>, ExchangeResponse)>,
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

    pub(super) async fn exchange(&mut self) -> Result<ExchangeResponse, Failure> {
        let (mut socket, head) = match self.connection.take() {
            Some(connection) => connection,
            None => match self.connect().await? {
                Upgrade::Done(connection) => *connection,
                Upgrade::Refused(response) => return Ok(response),
            },
        };
        let payload = &self.target.payload;
        socket
            .send(Message::Binary(payload.clone()))
            .await
            .map_err(websocket_failure)?;
        let echoed = loop {
            match socket.next().await.ok_or(Failure::Closed)?.map_err(websocket_failure)? {
                Message::Ping(_) | Message::Pong(_) => (),
                Message::Close(_) => return Err(Failure::Closed),
                message => break message.into_data(),
            }
        };
        if echoed != *payload {
            return Err(Failure::UnexpectedResponse("the bytes differ from those sent".into()));
        }
        let bytes = payload.len() as u64;
        let response = ExchangeResponse {
            sent: bytes,
            received: bytes,
            ..head.clone()
        };
        if !self.target.reconnect {
            self.connection = Some((socket, head));
        }
        Ok(response)
    }

    async fn connect(&self) -> Result<Upgrade, Failure> {
        let req = self
            .target
            .uri("ws")
            .map_err(|error| Failure::Other(error.to_string()))?;
        let mut req: Request<()> = req.into_client_request().map_err(websocket_failure)?;
        req.headers_mut().extend(self.target.headers.clone());
        let stream = connect(&self.target).await?;
        match tokio_tungstenite::client_async(req, stream).await {
            Ok((socket, rsp)) => {
                let head = ExchangeResponse {
                    status: ResponseStatus::Echoed,
                    ..response_from_head(&rsp)
                };
                Ok(Upgrade::Done(Box::new((socket, head))))
            }
            Err(Error::Http(rsp)) => Ok(Upgrade::Refused(response_from_head(&rsp))),
            Err(error) => Err(websocket_failure(error)),
        }
    }
}

/// The result of an upgrade request. The server or a proxy may refuse it with an ordinary response.
enum Upgrade {
    Done(Box<(WebSocketStream<TcpStream>, ExchangeResponse)>),
    Refused(ExchangeResponse),
}

fn websocket_failure(error: Error) -> Failure {
    match error {
        Error::ConnectionClosed | Error::AlreadyClosed => Failure::Closed,
        Error::Protocol(error) => Failure::UnexpectedResponse(error.to_string().into()),
        error => classify(&error),
    }
}
