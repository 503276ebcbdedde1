//! HTTP/1 and HTTP/2 clients on hyper's connections, without a connection pool.

use std::sync::Arc;

use bytes::Bytes;
use http::header::HOST;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, Version};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::Mutex;
use tonic::body::Body;

use super::connect::connect;
use super::outcome::{ExchangeResponse, Failure, ResponseStatus, proxy_reason};
use super::target::Target;

/// One HTTP/1.1 connection.
pub(super) struct Http1 {
    target: Arc<Target>,
    sender: Option<http1::SendRequest<Full<Bytes>>>,
}

/// One HTTP/2 connection, shared by the workers that use its streams.
#[derive(Clone)]
pub(super) struct Http2 {
    target: Arc<Target>,
    /// Locked while connecting, so that the streams of one connection share one dial.
    sender: Arc<Mutex<Option<http2::SendRequest<Body>>>>,
}

impl Http1 {
    pub(super) fn new(target: Arc<Target>) -> Self {
        Self { target, sender: None }
    }

    pub(super) fn target(&self) -> &Arc<Target> {
        &self.target
    }

    pub(super) async fn exchange(&mut self) -> Result<ExchangeResponse, Failure> {
        // If the server has closed the idle connection, a new one is opened. This is no retry, because nothing of the request has
        // been sent.
        let idle = match self.sender.take() {
            Some(mut sender) => sender.ready().await.is_ok().then_some(sender),
            None => None,
        };
        let mut sender = match idle {
            Some(sender) => sender,
            None => self.connect().await?,
        };
        let mut req = Request::new(Full::new(self.target.payload.clone()));
        *req.uri_mut() = Uri::from(self.target.path.clone());
        *req.method_mut() = method(&self.target);
        *req.headers_mut() = self.target.headers.clone();
        if !req.headers().contains_key(HOST) {
            req.headers_mut().insert(HOST, host(&self.target)?);
        }
        let sent = self.target.payload.len() as u64;
        let response = read_response(sender.send_request(req).await?, sent).await?;
        if !self.target.reconnect {
            self.sender = Some(sender);
        }
        Ok(response)
    }

    async fn connect(&self) -> Result<http1::SendRequest<Full<Bytes>>, Failure> {
        let io = TokioIo::new(connect(&self.target).await?);
        let (mut sender, connection) = http1::handshake(io).await?;
        // The task ends when the sender is dropped. Its error is also the error of the request in flight.
        tokio::spawn(async move { drop(connection.await) });
        sender.ready().await?;
        Ok(sender)
    }
}

impl Http2 {
    pub(super) fn new(target: Arc<Target>) -> Self {
        Self {
            target,
            sender: Arc::default(),
        }
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    pub(super) async fn exchange(&self) -> Result<ExchangeResponse, Failure> {
        let body = Body::new(Full::new(self.target.payload.clone()));
        let rsp = self
            .send(method(&self.target), self.target.path.clone(), HeaderMap::new(), body)
            .await?;
        read_response(rsp, self.target.payload.len() as u64).await
    }

    /// Sends one request with the headers of the target and `headers`. Returns when the response head has arrived.
    pub(super) async fn send(
        &self,
        method: Method,
        path: PathAndQuery,
        headers: HeaderMap,
        body: Body,
    ) -> Result<Response<Incoming>, Failure> {
        let mut sender = self.sender().await?;
        let uri = Uri::builder()
            .scheme("http")
            .authority(self.target.authority.clone())
            .path_and_query(path)
            .build();
        let mut req = Request::new(body);
        *req.version_mut() = Version::HTTP_2;
        *req.uri_mut() = uri.map_err(|error| Failure::Other(error.to_string()))?;
        *req.method_mut() = method;
        *req.headers_mut() = self.target.headers.clone();
        req.headers_mut().extend(headers);
        Ok(sender.send_request(req).await?)
    }

    async fn sender(&self) -> Result<http2::SendRequest<Body>, Failure> {
        if self.target.reconnect {
            return self.connect().await;
        }
        let mut current = self.sender.lock().await;
        if let Some(sender) = &*current
            && !sender.is_closed()
        {
            return Ok(sender.clone());
        }
        let sender = self.connect().await?;
        *current = Some(sender.clone());
        Ok(sender)
    }

    async fn connect(&self) -> Result<http2::SendRequest<Body>, Failure> {
        let io = TokioIo::new(connect(&self.target).await?);
        let (mut sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(HTTP2_WINDOW_BYTES)
            .initial_connection_window_size(HTTP2_WINDOW_BYTES)
            .handshake(io)
            .await?;
        tokio::spawn(async move { drop(connection.await) });
        sender.ready().await?;
        Ok(sender)
    }
}

/// Reads a response body to its end and counts its bytes.
async fn read_response(rsp: Response<Incoming>, sent: u64) -> Result<ExchangeResponse, Failure> {
    let mut response = response_from_head(&rsp);
    response.sent = sent;
    let mut body = rsp.into_body();
    while let Some(frame) = body.frame().await {
        if let Some(data) = frame?.data_ref() {
            response.received += data.len() as u64;
        }
    }
    Ok(response)
}

/// Creates a response from its head: status, replica and proxy error. The numbers of bytes are 0.
pub(super) fn response_from_head<B>(rsp: &Response<B>) -> ExchangeResponse {
    ExchangeResponse {
        status: ResponseStatus::Http(rsp.status().as_u16()),
        replica: rsp
            .headers()
            .get(X_REPLICA)
            .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned()),
        reason: proxy_reason(rsp.headers()),
        sent: 0,
        received: 0,
    }
}

fn method(target: &Target) -> Method {
    if target.payload.is_empty() {
        Method::GET
    } else {
        Method::POST
    }
}

fn host(target: &Target) -> Result<HeaderValue, Failure> {
    HeaderValue::from_str(target.authority.as_str()).map_err(|error| Failure::Other(error.to_string()))
}

const X_REPLICA: HeaderName = HeaderName::from_static("x-replica");
const HTTP2_WINDOW_BYTES: u32 = 4 << 20;
