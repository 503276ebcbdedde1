//! The gateway interface: forwards to services that clients name in the transport header.

use std::{net::SocketAddr, pin::Pin};

use http::{HeaderValue, Request, Response, header};
use tulle_core::{addr::NameAddr, drain};

use crate::{
    http::{body::Body, error::Error, headers},
    net::io::Io,
};

/// Forwards to services by name; the outbound side implements it.
pub(crate) trait Gateway: Send + Sync {
    /// Sends a request to a service.
    ///
    /// # Errors
    /// The gateway does not serve the name, the service does not exist, or it returned no response.
    fn send<'a>(
        &'a self,
        gateway_connection: &'a GatewayConnection,
        req: &'a mut Request<Body>,
    ) -> GatewayFuture<'a, Response<Body>>;

    /// Opens a connection to a service.
    ///
    /// # Errors
    /// The gateway does not serve the name, the service does not exist, or it cannot be reached.
    fn connect<'a>(&'a self, name: &'a NameAddr) -> GatewayFuture<'a, Io>;

    /// Waits until a service is not exported any more, while a connection or tunnel to it is open.
    fn wait_not_exported<'a>(&'a self, name: &'a NameAddr) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;
}

pub(crate) type GatewayFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// The target of the requests of one connection, and the context of the connection.
pub(crate) struct GatewayConnection {
    pub(crate) name: NameAddr,
    pub(crate) worker: usize,
    /// The client's address.
    pub(crate) client: SocketAddr,
    pub(crate) drain: drain::Watch,
}

/// Checks that this proxy has not sent the request or connection itself.
///
/// # Errors
/// The client has this proxy's identity, or a `Forwarded` header names this proxy.
pub(super) fn check_loop(own_identity: &str, client: &str, req: Option<&Request<Body>>) -> Result<(), Error> {
    let lines = req.map(|req| req.headers().get_all(header::FORWARDED).iter());
    let mut hops = lines
        .into_iter()
        .flatten()
        .flat_map(|line| line.to_str().unwrap_or_default().split([',', ';']));
    let is_own_hop = |hop: &str| {
        let (name, value) = hop.split_once('=').unwrap_or_default();
        name.trim().eq_ignore_ascii_case("by") && value.trim().trim_matches('"') == own_identity
    };
    match client == own_identity || hops.any(is_own_hop) {
        true => Err(Error::GatewayLoop),
        false => Ok(()),
    }
}

/// Appends this hop to the `Forwarded` header (RFC 7239).
pub(super) fn append_forwarded_header(own_identity: &str, client: &str, req: &mut Request<Body>) {
    let host_header = || headers::get(req.headers(), &header::HOST).and_then(|host| host.to_str().ok());
    let host = req
        .uri()
        .authority()
        .map(|authority| authority.as_str())
        .or_else(host_header);
    let line = [
        ("by", Some(own_identity)),
        ("for", Some(client)),
        ("host", host),
        ("proto", Some("https")),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some(format!("{name}={}", quote_unless_token(value?))))
    .collect::<Vec<_>>()
    .join(";");
    // Identities and hosts were validated earlier, so this conversion does not fail.
    if let Ok(line) = HeaderValue::try_from(line) {
        req.headers_mut().append(header::FORWARDED, line);
    }
}

/// Quotes a value that is not a token (RFC 9110).
fn quote_unless_token(value: &str) -> String {
    match value
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
    {
        true => value.to_owned(),
        false => format!("\"{}\"", value.replace(['"', '\\'], "")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gateway_loops_are_found_in_any_forwarded_syntax() {
        let mut req = Request::get("http://web.test:81/").body(Body::empty()).unwrap();
        append_forwarded_header("gate.test", "spiffe://a/b", &mut req);
        let line = "by=gate.test;for=\"spiffe://a/b\";host=\"web.test:81\";proto=https";
        assert_eq!(req.headers()["forwarded"], line);
        fn is_loop(own_identity: &str, req: &Request<Body>) -> bool {
            matches!(check_loop(own_identity, "a", Some(req)), Err(Error::GatewayLoop))
        }
        assert!(is_loop("gate.test", &req));
        assert!(!is_loop("web.test:81", &req));
        let lines = HeaderValue::from_static("for=x, By=\"other.test\" ;for=y");
        req.headers_mut().append(header::FORWARDED, lines);
        assert!(is_loop("other.test", &req));
        assert!(matches!(check_loop("a", "a", None), Err(Error::GatewayLoop)));
        assert!(check_loop("b", "a", None).is_ok());
    }
}
