//! HTTP clients on a given connection.

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Body, Incoming};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};
use tokio::net::TcpStream;

/// The body type of requests and responses in tests.
pub type AnyBody = BoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;

/// A response that has been read to its end.
#[derive(Debug)]
pub struct CollectedResponse {
    pub version: Version,
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: HeaderMap,
}

impl CollectedResponse {
    /// Reads a response to its end.
    ///
    /// # Errors
    /// Fails if the body is truncated.
    pub async fn collect(rsp: Response<Incoming>) -> hyper::Result<Self> {
        let (head, body) = rsp.into_parts();
        let body = body.collect().await?;
        Ok(Self {
            version: head.version,
            status: head.status,
            headers: head.headers,
            trailers: body.trailers().cloned().unwrap_or_default(),
            body: body.to_bytes(),
        })
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The code in `l5d-proxy-cause`; empty if the header is missing.
    pub fn cause(&self) -> &str {
        let value = self.header("l5d-proxy-cause");
        value.split([';', ':']).next().unwrap_or_default()
    }

    /// The value of a header; empty if it is missing.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap_or("not text"))
    }
}

pub struct Http1(http1::SendRequest<AnyBody>);

impl Http1 {
    /// Starts HTTP/1.1 on a connection.
    pub async fn handshake(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .expect("nothing is sent yet");
        tokio::spawn(connection.with_upgrades());
        Self(sender)
    }

    /// Whether another request can be sent.
    pub fn is_open(&self) -> bool {
        !self.0.is_closed()
    }

    /// Sends a request and reads the response to its end.
    ///
    /// # Errors
    /// Fails if there is no response, or if it is truncated.
    pub async fn fetch(&mut self, req: Request<AnyBody>) -> hyper::Result<CollectedResponse> {
        CollectedResponse::collect(self.send(req).await?).await
    }

    /// Sends a request.
    ///
    /// # Errors
    /// Fails if there is no response.
    pub async fn send(&mut self, req: Request<AnyBody>) -> hyper::Result<Response<Incoming>> {
        self.0.ready().await?;
        self.0.send_request(req).await
    }
}

#[derive(Clone)]
pub struct Http2(http2::SendRequest<AnyBody>);

impl Http2 {
    /// Starts HTTP/2 on a connection, with prior knowledge.
    pub async fn handshake(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let handshake = http2::Builder::new(TokioExecutor::new()).handshake(TokioIo::new(stream));
        let (sender, connection) = handshake.await.expect("the proxy speaks HTTP/2");
        tokio::spawn(connection);
        Self(sender)
    }

    /// Whether another request can be sent.
    pub fn is_open(&self) -> bool {
        !self.0.is_closed()
    }

    /// Sends a request and reads the response to its end.
    ///
    /// # Errors
    /// Fails if there is no response, or if it is truncated.
    pub async fn fetch(&mut self, req: Request<AnyBody>) -> hyper::Result<CollectedResponse> {
        CollectedResponse::collect(self.send(req).await?).await
    }

    /// Sends a request.
    ///
    /// # Errors
    /// Fails if there is no response.
    pub async fn send(&mut self, req: Request<AnyBody>) -> hyper::Result<Response<Incoming>> {
        self.0.ready().await?;
        self.0.send_request(req).await
    }
}

/// Sends `GET` as the only request of a connection.
///
/// # Panics
/// Panics if there is no response.
pub async fn get(stream: TcpStream, path: &str) -> CollectedResponse {
    try_get(stream, path).await.expect("a response")
}

/// As [`get`], for connections that may be closed without a response.
///
/// # Errors
/// Fails if there is no response, or if it is truncated.
pub async fn try_get(stream: TcpStream, path: &str) -> hyper::Result<CollectedResponse> {
    Http1::handshake(stream).await.fetch(request(path)).await
}

/// `GET http://web.test<path>`, in origin form for HTTP/1.
pub fn request(path: &str) -> Request<AnyBody> {
    let req = Request::get(path).header("host", "web.test");
    req.body(empty()).expect("a path")
}

/// `GET` for HTTP/2, where the authority is part of the target.
pub fn http2_request(path: &str) -> Request<AnyBody> {
    let req = Request::get(format!("http://web.test{path}")).version(Version::HTTP_2);
    req.body(empty()).expect("a path")
}

pub fn empty() -> AnyBody {
    any(Empty::<Bytes>::new())
}

/// A body of known length.
pub fn full(bytes: impl Into<Bytes>) -> AnyBody {
    any(Full::new(bytes.into()))
}

/// Converts any body to [`AnyBody`].
pub fn any<B>(body: B) -> AnyBody
where
    B: Body<Data = Bytes> + Send + Sync + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    body.map_err(Into::into).boxed()
}

/// Reads until the text that was read ends with `end`.
///
/// # Panics
/// Panics if the connection ends earlier, or the bytes are not UTF-8.
pub async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut read = Vec::new();
    while !read.ends_with(end.as_bytes()) {
        let mut byte = [0];
        stream.read_exact(&mut byte).await.unwrap_or_else(|error| {
            panic!("{error} after {:?}, before {end:?}", String::from_utf8_lossy(&read));
        });
        read.push(byte[0]);
    }
    String::from_utf8(read).expect("tests send text")
}
