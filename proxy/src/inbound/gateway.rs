//! What peers want from another network, which a gateway takes on for them.

use std::{net::SocketAddr, pin::Pin};

use http::{HeaderValue, Request, Response, header};
use tulle_core::{addr::NameAddr, drain};

use crate::{
    http::{body::Body, error::Error, headers},
    net::io::Io,
};

/// The way to names of other networks; made of the outbound side.
pub(crate) trait Gateway: Send + Sync {
    /// Sends a request to the service of a name.
    ///
    /// # Errors
    /// The name is not served here or not known, or its service brought no response.
    fn send<'a>(&'a self, onward: &'a Onward, req: &'a mut Request<Body>) -> Going<'a, Response<Body>>;

    /// Opens a connection to the service of a name.
    ///
    /// # Errors
    /// The name is not served here or not known, or its service cannot be reached.
    fn open<'a>(&'a self, name: &'a NameAddr) -> Going<'a, Io>;
}

pub(crate) type Going<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// Where the requests of one connection go on to.
pub(crate) struct Onward {
    pub(crate) name: NameAddr,
    pub(crate) worker: usize,
    /// The peer's end.
    pub(crate) client: SocketAddr,
    pub(crate) drain: drain::Watch,
}

/// Refuses what has passed `own` before, or comes from it.
pub(super) fn check_loop(own: &str, client: &str, req: Option<&Request<Body>>) -> Result<(), Error> {
    let lines = req.map(|req| req.headers().get_all(header::FORWARDED).iter());
    let mut hops = lines
        .into_iter()
        .flatten()
        .flat_map(|line| line.to_str().unwrap_or_default().split([',', ';']));
    let is_ours = |hop: &str| {
        let (name, value) = hop.split_once('=').unwrap_or_default();
        name.trim().eq_ignore_ascii_case("by") && value.trim().trim_matches('"') == own
    };
    match client == own || hops.any(is_ours) {
        true => Err(Error::GatewayLoop),
        false => Ok(()),
    }
}

/// Notes down that a request has passed here (RFC 7239).
pub(super) fn mark(own: &str, client: &str, req: &mut Request<Body>) {
    let of_header = || headers::get(req.headers(), &header::HOST).and_then(|host| host.to_str().ok());
    let host = req
        .uri()
        .authority()
        .map(|authority| authority.as_str())
        .or_else(of_header);
    let line = [
        ("by", Some(own)),
        ("for", Some(client)),
        ("host", host),
        ("proto", Some("https")),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some(format!("{name}={}", value_of(value?))))
    .collect::<Vec<_>>()
    .join(";");
    // Identities and hosts have been found to be text before.
    if let Ok(line) = HeaderValue::try_from(line) {
        req.headers_mut().append(header::FORWARDED, line);
    }
}

/// As it is if it is a token, and quoted otherwise.
fn value_of(value: &str) -> String {
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
    fn what_has_passed_before_is_found_however_it_is_written() {
        let mut req = Request::get("http://web.test:81/").body(Body::empty()).unwrap();
        mark("gate.test", "spiffe://a/b", &mut req);
        let line = "by=gate.test;for=\"spiffe://a/b\";host=\"web.test:81\";proto=https";
        assert_eq!(req.headers()["forwarded"], line);
        fn is_loop(own: &str, req: &Request<Body>) -> bool {
            matches!(check_loop(own, "a", Some(req)), Err(Error::GatewayLoop))
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
