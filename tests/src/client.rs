//! HTTP clients over a given connection.

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Body, Incoming};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};
use tokio::net::TcpStream;

/// What requests and responses of tests are made of.
pub type AnyBody = BoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;

/// A response that has come to its end.
#[derive(Debug)]
pub struct Answer {
    pub version: Version,
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: HeaderMap,
}

impl Answer {
    /// Reads a response to its end.
    ///
    /// # Errors
    /// The body is cut off.
    pub async fn of(rsp: Response<Incoming>) -> hyper::Result<Self> {
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

    /// The code in `l5d-proxy-cause`; empty without it.
    pub fn cause(&self) -> &str {
        let told = self.header("l5d-proxy-cause");
        told.split([';', ':']).next().unwrap_or_default()
    }

    /// The value of a header; empty without it.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap_or("not text"))
    }
}

/// An HTTP/1.1 connection.
pub struct Http1(http1::SendRequest<AnyBody>);

impl Http1 {
    /// Begins to speak HTTP/1.1.
    pub async fn over(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .expect("nothing is sent yet");
        tokio::spawn(connection.with_upgrades());
        Self(sender)
    }

    /// Whether another request may be sent.
    pub fn is_open(&self) -> bool {
        !self.0.is_closed()
    }

    /// Sends a request and reads the response to its end.
    ///
    /// # Errors
    /// There is none, or not all of it.
    pub async fn ask(&mut self, req: Request<AnyBody>) -> hyper::Result<Answer> {
        Answer::of(self.send(req).await?).await
    }

    /// Sends a request.
    ///
    /// # Errors
    /// There is no response.
    pub async fn send(&mut self, req: Request<AnyBody>) -> hyper::Result<Response<Incoming>> {
        self.0.ready().await?;
        self.0.send_request(req).await
    }
}

/// An HTTP/2 connection.
#[derive(Clone)]
pub struct Http2(http2::SendRequest<AnyBody>);

impl Http2 {
    /// Begins to speak HTTP/2, by prior knowledge.
    pub async fn over(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        let handshake = http2::Builder::new(TokioExecutor::new()).handshake(TokioIo::new(stream));
        let (sender, connection) = handshake.await.expect("the proxy speaks HTTP/2");
        tokio::spawn(connection);
        Self(sender)
    }

    /// Whether another request may be sent.
    pub fn is_open(&self) -> bool {
        !self.0.is_closed()
    }

    /// Sends a request and reads the response to its end.
    ///
    /// # Errors
    /// There is none, or not all of it.
    pub async fn ask(&mut self, req: Request<AnyBody>) -> hyper::Result<Answer> {
        Answer::of(self.send(req).await?).await
    }

    /// Sends a request.
    ///
    /// # Errors
    /// There is no response.
    pub async fn send(&mut self, req: Request<AnyBody>) -> hyper::Result<Response<Incoming>> {
        self.0.ready().await?;
        self.0.send_request(req).await
    }
}

/// `GET` as the only request of a connection.
///
/// # Panics
/// Without a response.
pub async fn get(stream: TcpStream, path: &str) -> Answer {
    try_get(stream, path).await.expect("a response")
}

/// As [`get`], for connections that may be closed instead.
///
/// # Errors
/// There is no response, or not all of it.
pub async fn try_get(stream: TcpStream, path: &str) -> hyper::Result<Answer> {
    Http1::over(stream).await.ask(request(path)).await
}

/// `GET http://web.test<path>`, in origin form for HTTP/1.
pub fn request(path: &str) -> Request<AnyBody> {
    let req = Request::get(path).header("host", "web.test");
    req.body(empty()).expect("a path")
}

/// `GET` for HTTP/2, where the authority is part of the target.
pub fn request2(path: &str) -> Request<AnyBody> {
    let req = Request::get(format!("http://web.test{path}")).version(Version::HTTP_2);
    req.body(empty()).expect("a path")
}

/// No body.
pub fn empty() -> AnyBody {
    any(Empty::<Bytes>::new())
}

/// A body of known length.
pub fn full(bytes: impl Into<Bytes>) -> AnyBody {
    any(Full::new(bytes.into()))
}

/// Any body as the one type.
pub fn any<B>(body: B) -> AnyBody
where
    B: Body<Data = Bytes> + Send + Sync + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    body.map_err(Into::into).boxed()
}

/// Reads until what was read ends so.
///
/// # Panics
/// The connection ends before, or carries no text.
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
