//! The target and the request, parsed once at the start.

use std::net::SocketAddr;

use anyhow::Context as _;
use bytes::Bytes;
use hickory_resolver::{ResolverBuilder, TokioResolver};
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, Uri};
use tulle_core::addr::Addr;

use super::args::{Args, Method, Protocol};

/// The resolved target, and the request that every client sends to it.
pub(super) struct Target {
    pub(super) protocol: Protocol,
    pub(super) addr: SocketAddr,
    pub(super) authority: Authority,
    pub(super) path: PathAndQuery,
    pub(super) headers: HeaderMap,
    pub(super) payload: Bytes,
    pub(super) method: Method,
    pub(super) messages: u32,
    pub(super) greeting: Option<String>,
    pub(super) reconnect: bool,
}

impl Target {
    /// Parses the target and resolves its name. The run uses the first address only.
    pub(super) async fn resolve(args: &Args) -> anyhow::Result<Self> {
        let (host, path) = split_target(&args.target, args.protocol);
        let addr = look_up(host).await?;
        let authority = args.authority.as_deref().unwrap_or(host);
        Ok(Self {
            protocol: args.protocol,
            addr,
            authority: authority
                .parse()
                .with_context(|| format!("{authority:?} is not an authority"))?,
            path: path.parse().with_context(|| format!("{path:?} is not a path"))?,
            headers: args
                .headers
                .iter()
                .map(|header| (header.0.clone(), header.1.clone()))
                .collect(),
            payload: payload(args.body_size),
            method: args.grpc_method(),
            messages: args.messages(),
            greeting: args.expect_greeting.clone(),
            reconnect: args.reconnect,
        })
    }

    /// `<scheme>://authority/path`, for the WebSocket client.
    pub(super) fn uri(&self, scheme: &str) -> Result<Uri, http::Error> {
        Uri::builder()
            .scheme(scheme)
            .authority(self.authority.clone())
            .path_and_query(self.path.clone())
            .build()
    }
}

/// Resolves `HOST:PORT` to its first address, without getaddrinfo, which static binaries do not have.
async fn look_up(host: &str) -> anyhow::Result<SocketAddr> {
    let addr: Addr = host.parse().with_context(|| format!("{host:?} is not HOST:PORT"))?;
    let name = match addr {
        Addr::Socket(addr) => return Ok(addr),
        Addr::Name(name) => name,
    };
    let resolver = TokioResolver::builder_tokio().and_then(ResolverBuilder::build);
    let ip = resolver
        .context("reading the configuration of the resolver")?
        .lookup_ip(&*name.name)
        .await
        .with_context(|| format!("looking up {:?}", name.name))?
        .iter()
        .next()
        .with_context(|| format!("{:?} has no address", name.name))?;
    Ok(SocketAddr::new(ip, name.port))
}

/// Splits a target, with or without a scheme, into host and path.
fn split_target(target: &str, protocol: Protocol) -> (&str, &str) {
    let rest = target.split_once("://").map_or(target, |(_, rest)| rest);
    let default = if protocol == Protocol::Ws { "/ws" } else { "/" };
    match rest.find('/') {
        Some(at) => (&rest[..at], &rest[at..]),
        None => (rest, default),
    }
}

/// A payload with a period of 251 bytes, a prime number. Lost or repeated bytes shift the rest, usually by the size of a buffer. This
/// is a power of two and no multiple of 251, so the shifted bytes differ from the payload.
fn payload(size: usize) -> Bytes {
    (0..size).map(|i| (i % 251) as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::super::args::Header;
    use super::*;

    #[test]
    fn targets_have_an_optional_scheme_and_path() {
        for (target, protocol, host, path) in [
            ("a:1", Protocol::Http1, "a:1", "/"),
            ("http://a:1/x?y=/z", Protocol::Http2, "a:1", "/x?y=/z"),
            ("ws://[::1]:2", Protocol::Ws, "[::1]:2", "/ws"),
            ("tcp://10.0.0.1:3", Protocol::Tcp, "10.0.0.1:3", "/"),
        ] {
            assert_eq!(split_target(target, protocol), (host, path), "{target}");
        }
    }

    #[test]
    fn headers_without_a_colon_or_with_bad_bytes_are_refused() {
        let header: Header = "l5d-dst: web:80".parse().unwrap();
        assert_eq!((header.0.as_str(), header.1.as_bytes()), ("l5d-dst", &b"web:80"[..]));
        for text in ["x", "a b: c", ": c", "a: b\nc"] {
            assert!(text.parse::<Header>().is_err(), "{text:?}");
        }
    }
}
