//! Arguments of `tulle-bench load`.

use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Duration;

use anyhow::bail;
use clap::ValueEnum as _;
use http::{HeaderName, HeaderValue};

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Target as HOST:PORT, with a path for HTTP and WebSocket, such as "10.0.0.5:8080/echo". A scheme is ignored.
    pub target: String,
    #[arg(long, value_enum, default_value_t = Protocol::Http1)]
    pub protocol: Protocol,
    /// Open loop: send this many requests per second on a schedule. Without it, each connection, or each stream of HTTP/2 and
    /// gRPC, sends as soon as it is free.
    #[arg(long, value_parser = parse_rate)]
    pub rate: Option<f64>,
    /// The schedule of an open loop.
    #[arg(long, value_enum, default_value_t = Arrivals::Fixed, requires = "rate")]
    pub arrivals: Arrivals,
    /// Closed loop: mean pause of a connection, or of a stream of HTTP/2 and gRPC, between a response and the next request,
    /// exponentially distributed.
    #[arg(long, value_parser = parse_duration_with_micros, conflicts_with = "rate")]
    pub think_time: Option<Duration>,
    /// Number of connections; by default 1, or 64 in an open loop of a protocol without streams.
    #[arg(long)]
    pub connections: Option<NonZeroUsize>,
    /// Concurrent streams per connection of HTTP/2 or gRPC; by default 1, or 64 in an open loop.
    #[arg(long)]
    pub streams: Option<NonZeroUsize>,
    /// Duration of the run; "10s" if neither this nor --requests is given.
    #[arg(long, value_parser = parse_positive_duration)]
    pub duration: Option<Duration>,
    /// Stop after this many requests.
    #[arg(long)]
    pub requests: Option<u64>,
    /// Request timeout. A request that exceeds it counts as a timeout.
    #[arg(long, default_value = "10s", value_parser = parse_positive_duration)]
    pub timeout: Duration,
    /// A request header "name: value" (repeatable; not for TCP).
    #[arg(long = "header", value_name = "NAME: VALUE")]
    pub headers: Vec<Header>,
    /// The Host or :authority header of requests (not for TCP); by default the host and port of the target.
    #[arg(long)]
    pub authority: Option<String>,
    /// Payload size of each request or message, in bytes. TCP needs at least 1, except with --reconnect.
    #[arg(long, default_value_t = 0)]
    pub body_size: usize,
    /// The gRPC method; by default unary.
    #[arg(long, value_enum)]
    pub grpc_method: Option<Method>,
    /// Messages per gRPC stream, for all methods but unary; by default 1.
    #[arg(long)]
    pub messages: Option<u32>,
    /// TCP: expect a greeting line that starts with this text from the server. Its last word is taken as the server's name.
    #[arg(long, value_name = "TEXT")]
    pub expect_greeting: Option<String>,
    /// Open a new connection for every request.
    #[arg(long)]
    pub reconnect: bool,
    /// Number of threads. Each has its own runtime and its share of the connections.
    #[arg(long, default_value = "1")]
    pub threads: NonZeroUsize,
    /// Print a report as one line of JSON at this interval, such as "1s".
    #[arg(long, value_parser = parse_positive_duration)]
    pub report_every: Option<Duration>,
    /// Print the final report as one line of JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub enum Protocol {
    Http1,
    Http2,
    Grpc,
    Tcp,
    Ws,
}

/// When the requests of an open loop are due.
#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub enum Arrivals {
    /// At equal intervals.
    Fixed,
    /// Independent of each other: intervals are exponentially distributed.
    Poisson,
    /// In bursts of 50 at once, at equal intervals.
    Bursts,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub enum Method {
    Unary,
    ServerStream,
    ClientStream,
    Bidi,
}

impl Args {
    /// Fails if an option would have no effect with this protocol or gRPC method, or if requests would exchange nothing.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let (protocol, method) = (self.protocol, self.grpc_method());
        let options = [
            ("--header", !self.headers.is_empty(), protocol != Protocol::Tcp),
            ("--authority", self.authority.is_some(), protocol != Protocol::Tcp),
            ("--streams", self.streams.is_some(), protocol.has_streams()),
            (
                "--expect-greeting",
                self.expect_greeting.is_some(),
                protocol == Protocol::Tcp,
            ),
            ("--grpc-method", self.grpc_method.is_some(), protocol == Protocol::Grpc),
            ("--messages", self.messages.is_some(), protocol == Protocol::Grpc),
        ];
        for (option, is_given, has_effect) in options {
            if is_given && !has_effect {
                bail!("{option} has no effect with --protocol {}", protocol.name());
            }
        }
        if self.messages.is_some() && method == Method::Unary {
            bail!("--messages has no effect with the gRPC method unary");
        }
        // On an open connection, a request without a payload would succeed although the server sends no byte.
        if protocol == Protocol::Tcp && self.body_size == 0 && !self.reconnect {
            bail!(
                "--protocol tcp needs a --body-size of at least 1, or --reconnect to measure connections without a payload"
            );
        }
        Ok(())
    }

    pub(super) fn grpc_method(&self) -> Method {
        self.grpc_method.unwrap_or(Method::Unary)
    }

    pub(super) fn messages(&self) -> u32 {
        self.messages.unwrap_or(1)
    }

    pub(super) fn connections(&self) -> usize {
        let default = if self.rate.is_some() && !self.protocol.has_streams() {
            DEFAULT_OPEN_LOOP_CONCURRENCY
        } else {
            1
        };
        self.connections.map_or(default, NonZeroUsize::get)
    }

    pub(super) fn streams(&self) -> usize {
        if !self.protocol.has_streams() {
            return 1;
        }
        let default = if self.rate.is_some() {
            DEFAULT_OPEN_LOOP_CONCURRENCY
        } else {
            1
        };
        self.streams.map_or(default, NonZeroUsize::get)
    }
}

impl Protocol {
    pub(super) fn has_streams(self) -> bool {
        matches!(self, Self::Http2 | Self::Grpc)
    }

    /// The name on the command line.
    fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Parses a duration other than 0.
fn parse_positive_duration(text: &str) -> Result<Duration, String> {
    match tulle_core::duration::parse(text) {
        Ok(duration) if duration.is_zero() => Err(format!("{text:?} is zero: give a longer duration, such as 1s")),
        Ok(duration) => Ok(duration),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses a duration; microseconds ("250us") are accepted too.
fn parse_duration_with_micros(text: &str) -> Result<Duration, String> {
    let micros = text.strip_suffix("us").and_then(|digits| digits.parse().ok());
    match micros {
        Some(micros) => Ok(Duration::from_micros(micros)),
        None => tulle_core::duration::parse(text).map_err(|error| error.to_string()),
    }
}

fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (0.001..=1e7).contains(&rate) => Ok(rate),
        _ => Err(format!(
            "{text:?} is not a rate: give requests per second from 0.001 to 10000000"
        )),
    }
}

/// Default maximum of requests in flight in an open loop.
const DEFAULT_OPEN_LOOP_CONCURRENCY: usize = 64;

/// A header from the command line, as "name: value".
#[derive(Clone, Debug)]
pub struct Header(pub(super) HeaderName, pub(super) HeaderValue);

impl FromStr for Header {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = |why: String| format!("{text:?} is not a header: {why}; give \"name: value\"");
        let (name, value) = text.split_once(':').ok_or_else(|| invalid("it has no colon".into()))?;
        let name = HeaderName::from_str(name.trim()).map_err(|e| invalid(e.to_string()))?;
        let value = HeaderValue::from_str(value.trim()).map_err(|e| invalid(e.to_string()))?;
        Ok(Self(name, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_rates_are_refused() {
        assert_eq!(parse_rate("250.5"), Ok(250.5));
        for text in ["0", "-1", "nan", "inf", "1e9", "fast"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }
}
