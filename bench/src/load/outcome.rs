//! The outcome of one request.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::io;

use http::{HeaderMap, HeaderName};
use tulle_core::names::header::{L5D_PROXY_CAUSE, L5D_PROXY_ERROR};

/// A request that got a complete response, successful or not.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct ExchangeResponse {
    pub(super) status: ResponseStatus,
    /// Name of the server that responded, from `x-replica` or the TCP greeting.
    pub(super) replica: Option<String>,
    /// The error message of a proxy.
    pub(super) reason: Option<String>,
    /// Payload bytes.
    pub(super) sent: u64,
    pub(super) received: u64,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum ResponseStatus {
    /// The payload came back unchanged.
    #[default]
    Echoed,
    Http(u16),
    /// A gRPC status code; 0 is OK.
    Grpc(u16),
}

/// A request without a complete response.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Failure {
    /// The connection could not be opened.
    Connect(Cow<'static, str>),
    /// The peer reset the connection or the stream.
    Reset(Cow<'static, str>),
    /// The connection ended before the response did.
    Closed,
    Timeout,
    /// The response has the wrong payload or violates the protocol.
    UnexpectedResponse(Cow<'static, str>),
    Other(String),
}

impl ExchangeResponse {
    pub(super) fn succeeded(&self) -> bool {
        match self.status {
            ResponseStatus::Echoed => true,
            ResponseStatus::Http(status) => status < 400,
            ResponseStatus::Grpc(code) => code == 0,
        }
    }

    /// The label under which this response is counted.
    pub(super) fn label(&self) -> Cow<'static, str> {
        match self.status {
            ResponseStatus::Echoed => "echoed".into(),
            ResponseStatus::Http(status) => match status / 100 {
                2 => "2xx".into(),
                3 => "3xx".into(),
                4 => "4xx".into(),
                5 => "5xx".into(),
                _ => "other status".into(),
            },
            ResponseStatus::Grpc(0) => "grpc ok".into(),
            ResponseStatus::Grpc(code) => format!("grpc {code}").into(),
        }
    }

    /// The reason this response is a failure: its status and the error message of the proxy, if any. `None` if it succeeded.
    pub(super) fn error(&self) -> Option<String> {
        if self.succeeded() {
            return None;
        }
        let status = match self.status {
            ResponseStatus::Echoed => String::new(),
            ResponseStatus::Http(status) => format!("status {status}"),
            ResponseStatus::Grpc(code) => format!("grpc status {code}"),
        };
        Some(match &self.reason {
            Some(reason) => format!("{status}: {reason}"),
            None => status,
        })
    }
}

impl Failure {
    /// The label under which this failure is counted.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect error",
            Self::Reset(_) => "reset",
            Self::Closed => "closed",
            Self::Timeout => "timeout",
            Self::UnexpectedResponse(_) => "wrong answer",
            Self::Other(_) => "other error",
        }
    }

    /// Classifies an error of `connect`.
    pub(super) fn from_connect_error(error: &io::Error) -> Self {
        Self::Connect(match error.kind() {
            io::ErrorKind::ConnectionRefused => "refused".into(),
            io::ErrorKind::ConnectionReset => "reset".into(),
            io::ErrorKind::TimedOut => "timed out".into(),
            _ => error.to_string().into(),
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(why) => write!(f, "connect error: {why}"),
            Self::Reset(why) => write!(f, "reset: {why}"),
            Self::UnexpectedResponse(why) => write!(f, "wrong answer: {why}"),
            Self::Other(why) => write!(f, "other error: {why}"),
            Self::Closed | Self::Timeout => f.write_str(self.label()),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        classify(&error)
    }
}

impl From<hyper::Error> for Failure {
    fn from(error: hyper::Error) -> Self {
        if error.is_incomplete_message() || error.is_canceled() {
            return Self::Closed;
        }
        classify(&error)
    }
}

/// Finds the error of the socket or the stream in a chain of sources.
pub(super) fn classify(error: &(dyn Error + 'static)) -> Failure {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            match io.kind() {
                io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted => {
                    return Failure::Reset("connection".into());
                }
                io::ErrorKind::UnexpectedEof | io::ErrorKind::NotConnected => return Failure::Closed,
                io::ErrorKind::TimedOut => return Failure::Timeout,
                _ => (),
            }
        }
        if let Some(reason) = error.downcast_ref::<h2::Error>().and_then(h2::Error::reason) {
            return Failure::Reset(reason.description().to_owned().into());
        }
        // `source()` of an I/O error skips the error that it wraps; `get_ref` returns the wrapped error.
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause = inner
            .map(|inner| inner as &(dyn Error + 'static))
            .or_else(|| error.source());
    }
    Failure::Other(error.to_string())
}

/// The message and the cause that a proxy adds to its own error responses.
pub(super) fn proxy_reason(headers: &HeaderMap) -> Option<String> {
    let text = |name: HeaderName| {
        headers
            .get(name)
            .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned())
    };
    match (text(L5D_PROXY_ERROR), text(L5D_PROXY_CAUSE)) {
        (Some(error), Some(cause)) => {
            let code = cause.split(';').next().unwrap_or_default();
            Some(format!("{error} ({code})"))
        }
        (error, cause) => error.or(cause),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_from_400_and_grpc_codes_other_than_0_are_failures() {
        for (status, succeeded, label) in [
            (ResponseStatus::Http(204), true, "2xx"),
            (ResponseStatus::Http(302), true, "3xx"),
            (ResponseStatus::Http(404), false, "4xx"),
            (ResponseStatus::Http(503), false, "5xx"),
            (ResponseStatus::Grpc(0), true, "grpc ok"),
            (ResponseStatus::Grpc(14), false, "grpc 14"),
            (ResponseStatus::Echoed, true, "echoed"),
        ] {
            let response = ExchangeResponse {
                status,
                ..ExchangeResponse::default()
            };
            assert_eq!(
                (response.succeeded(), &*response.label()),
                (succeeded, label),
                "{status:?}"
            );
        }
    }

    #[test]
    fn errors_contain_the_message_of_the_proxy() {
        let mut headers = HeaderMap::new();
        headers.insert(L5D_PROXY_ERROR, "no endpoints".parse().unwrap());
        headers.insert(L5D_PROXY_CAUSE, "no-endpoints; direction=outbound".parse().unwrap());
        let response = ExchangeResponse {
            status: ResponseStatus::Http(503),
            reason: proxy_reason(&headers),
            ..ExchangeResponse::default()
        };
        assert_eq!(response.error().unwrap(), "status 503: no endpoints (no-endpoints)");
        let success = ExchangeResponse {
            status: ResponseStatus::Http(200),
            ..response
        };
        assert_eq!(success.error(), None);
    }

    #[test]
    fn socket_errors_are_found_below_other_errors() {
        let check = |kind: io::ErrorKind, label: &str| {
            let wrapped = io::Error::other(io::Error::from(kind));
            assert_eq!(classify(&wrapped).label(), label, "{kind:?}");
        };
        check(io::ErrorKind::ConnectionReset, "reset");
        check(io::ErrorKind::BrokenPipe, "reset");
        check(io::ErrorKind::UnexpectedEof, "closed");
        check(io::ErrorKind::TimedOut, "timeout");
        check(io::ErrorKind::InvalidData, "other error");
        assert_eq!(classify(&h2::Error::from(h2::Reason::REFUSED_STREAM)).label(), "reset");
    }
}
