//! `httpGet` probes over TLS, with the rules of the kubelet. The certificate is not verified. Redirects to the same host are
//! followed. A redirect to another host is a success, as is any other status from 200 to 399.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use http::header::{ACCEPT, CONNECTION, HOST, LOCATION, USER_AGENT};
use http::uri::{Authority, InvalidUri, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;

use super::connection::{self, ProbeError, drive_connection};

#[derive(Clone, Debug)]
pub(super) struct HttpGetAction {
    pub(super) path_and_query: PathAndQuery,
    pub(super) headers: HeaderMap,
    /// The value of the probe's `Host` header.
    pub(super) host: Option<Authority>,
}

/// The target of a probe's request, at the probed IP address.
#[derive(Clone, Debug, PartialEq)]
struct RequestTarget {
    scheme: Scheme,
    /// The port in the URL; `None` for the default of the scheme.
    port: Option<u16>,
    path_and_query: PathAndQuery,
    /// The value of the probe's `Host` header; `None` for the address in the URL.
    host: Option<Authority>,
}

/// Sends the request, and follows redirects to the same host.
pub(super) async fn send(
    action: &HttpGetAction,
    addr: SocketAddr,
    user_agent: &HeaderValue,
) -> Result<StatusCode, ProbeError> {
    let mut request_target = RequestTarget {
        scheme: Scheme::HTTPS,
        port: Some(addr.port()),
        path_and_query: action.path_and_query.clone(),
        host: action.host.clone(),
    };
    for _ in 0..MAX_REQUESTS {
        let rsp = send_request(
            action,
            SocketAddr::new(addr.ip(), request_target.port()),
            &request_target,
            user_agent,
        )
        .await?;
        match request_target.evaluate_redirect(addr.ip(), &rsp) {
            RedirectOutcome::Final => return Ok(rsp.status()),
            RedirectOutcome::Follow(next) => request_target = next,
            RedirectOutcome::InvalidLocation(location) => return Err(ProbeError::Location { addr, location }),
        }
    }
    Err(ProbeError::Redirects {
        addr,
        limit: MAX_REQUESTS,
    })
}

/// Sends one request. The body is read as far as the kubelet reads it, and dropped.
async fn send_request(
    action: &HttpGetAction,
    addr: SocketAddr,
    request_target: &RequestTarget,
    user_agent: &HeaderValue,
) -> Result<Response<()>, ProbeError> {
    let stream = connection::dial(addr).await?;
    if request_target.scheme == Scheme::HTTP {
        return send_http1(action, addr, request_target, user_agent, stream).await;
    }
    // An IP address is not permitted in SNI, so rustls sends no SNI.
    let name = ServerName::from(addr.ip());
    let tls = TlsConnector::from(TLS_CONFIG.clone()).connect(name, stream).await;
    let tls = tls.map_err(|source| ProbeError::Tls { addr, source })?;
    match tls.get_ref().1.alpn_protocol() == Some(HTTP2) {
        true => send_http2(action, addr, request_target, user_agent, tls).await,
        false => send_http1(action, addr, request_target, user_agent, tls).await,
    }
}

async fn send_http1<IO>(
    action: &HttpGetAction,
    addr: SocketAddr,
    request_target: &RequestTarget,
    user_agent: &HeaderValue,
    io: IO,
) -> Result<Response<()>, ProbeError>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let exchange = async {
        let (mut sender, connection) = http1::Builder::new()
            // Go writes header names in title case.
            .title_case_headers(true)
            .handshake(TokioIo::new(io))
            .await?;
        let mut req = request_target.request(action, user_agent, Uri::from(request_target.path_and_query.clone()));
        let host = request_target.authority(addr);
        let host = HeaderValue::from_str(host.as_str()).expect("an authority is visible ASCII");
        req.headers_mut().insert(HOST, host);
        req.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        drive_connection(connection, async { read_body(sender.send_request(req).await?).await }).await
    };
    exchange.await.map_err(|source| ProbeError::Http { addr, source })
}

async fn send_http2<IO>(
    action: &HttpGetAction,
    addr: SocketAddr,
    request_target: &RequestTarget,
    user_agent: &HeaderValue,
    io: IO,
) -> Result<Response<()>, ProbeError>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let exchange = async {
        let (mut sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .handshake(TokioIo::new(io))
            .await?;
        let uri = Uri::builder()
            .scheme(request_target.scheme.clone())
            .authority(request_target.authority(addr))
            .path_and_query(request_target.path_and_query.clone());
        let uri = uri.build().expect("the URI has all parts");
        let req = request_target.request(action, user_agent, uri);
        drive_connection(connection, async { read_body(sender.send_request(req).await?).await }).await
    };
    exchange.await.map_err(|source| ProbeError::Http { addr, source })
}

/// Reads the body as far as the kubelet does; an error before that fails the probe.
async fn read_body(rsp: Response<Incoming>) -> Result<Response<()>, hyper::Error> {
    let (head, mut body) = rsp.into_parts();
    let mut n_read = 0;
    while n_read < MAX_BODY_BYTES
        && let Some(frame) = body.frame().await
    {
        n_read += frame?.data_ref().map_or(0, Bytes::len);
    }
    Ok(Response::from_parts(head, ()))
}

/// The result of evaluating a response for redirects.
enum RedirectOutcome {
    /// The response is final.
    Final,
    Follow(RequestTarget),
    /// A redirect with an invalid target.
    InvalidLocation(String),
}

impl RequestTarget {
    fn request(&self, action: &HttpGetAction, user_agent: &HeaderValue, uri: Uri) -> Request<Empty<Bytes>> {
        let mut req = Request::new(Empty::new());
        *req.uri_mut() = uri;
        let headers = req.headers_mut();
        headers.clone_from(&action.headers);
        headers.entry(USER_AGENT).or_insert_with(|| user_agent.clone());
        headers.entry(ACCEPT).or_insert(ACCEPT_ANY);
        // An empty value means that the header is not sent.
        for name in [USER_AGENT, ACCEPT] {
            if headers.get(&name).is_some_and(HeaderValue::is_empty) {
                headers.remove(&name);
            }
        }
        req
    }

    fn port(&self) -> u16 {
        let default_port = if self.scheme == Scheme::HTTP { 80 } else { 443 };
        self.port.unwrap_or(default_port)
    }

    /// The host of the request to `addr`, with a port only if the URL has one.
    fn authority(&self, addr: SocketAddr) -> Authority {
        let host_in_url = || {
            let text = match (self.port, addr.ip()) {
                (Some(_), _) => addr.to_string(),
                (None, IpAddr::V4(ip)) => ip.to_string(),
                (None, IpAddr::V6(ip)) => format!("[{ip}]"),
            };
            Authority::try_from(text).expect("an address is an authority")
        };
        self.host.clone().unwrap_or_else(host_in_url)
    }

    /// Whether the response is a redirect to follow, and its target.
    fn evaluate_redirect(&self, host: IpAddr, rsp: &Response<()>) -> RedirectOutcome {
        let location = rsp
            .headers()
            .get(LOCATION)
            .filter(|location| REDIRECT_STATUSES.contains(&rsp.status()) && !location.is_empty());
        let Some(location) = location else {
            return RedirectOutcome::Final;
        };
        let invalid_location =
            || RedirectOutcome::InvalidLocation(String::from_utf8_lossy(location.as_bytes()).into_owned());
        let Ok(text) = location.to_str() else {
            return invalid_location();
        };
        let text = text.split('#').next().unwrap_or_default();
        // As in Go, the probe's `Host` header also applies after the redirect, unless the reference has a scheme.
        let (absolute, next_host) = match text.strip_prefix("//") {
            Some(rest) => (Some(format!("{}://{rest}", self.scheme)), self.host.clone()),
            None => (is_absolute(text).then(|| text.to_owned()), None),
        };
        let Some(absolute) = absolute else {
            return match self.join(text).parse() {
                Ok(path_and_query) => RedirectOutcome::Follow(Self {
                    path_and_query,
                    ..self.clone()
                }),
                Err(_) => invalid_location(),
            };
        };
        let Ok(uri) = absolute.parse::<Uri>() else {
            return invalid_location();
        };
        let parts = uri.into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
            return invalid_location();
        };
        // As in the kubelet, a redirect to another host is not followed, whatever its scheme.
        if authority.host().trim_matches(['[', ']']).parse() != Ok(host) {
            return RedirectOutcome::Final;
        }
        // Other schemes cannot be followed.
        if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
            return invalid_location();
        }
        let (path, query) = parts
            .path_and_query
            .as_ref()
            .map_or(("/", None), |target| (target.path(), target.query()));
        let Ok(path_and_query) = join_target(path, query).parse() else {
            return invalid_location();
        };
        RedirectOutcome::Follow(Self {
            port: authority.port_u16(),
            path_and_query,
            scheme,
            host: next_host,
        })
    }

    /// Resolves a relative reference against the current target.
    fn join(&self, reference: &str) -> String {
        let base = self.path_and_query.path();
        let (path, query) = match reference.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (reference, None),
        };
        match path.chars().next() {
            None => join_target(base, query.or_else(|| self.path_and_query.query())),
            Some('/') => join_target(path, query),
            Some(_) => {
                let dir = &base[..=base.rfind('/').unwrap_or(0)];
                join_target(&format!("{dir}{path}"), query)
            }
        }
    }
}

/// The request target with this path and query, without dot segments in the path (RFC 3986 section 5.2.4). Percent-encoded dot
/// segments are kept, as in Go; URL parsers for browsers would remove them.
fn join_target(path: &str, query: Option<&str>) -> String {
    let mut segments = Vec::new();
    for segment in path.split('/').skip(1) {
        match segment {
            "." => {}
            ".." => drop(segments.pop()),
            _ => segments.push(segment),
        }
    }
    if path.ends_with("/.") || path.ends_with("/..") {
        segments.push("");
    }
    let query = query.map_or_else(String::new, |query| format!("?{query}"));
    format!("/{}{query}", segments.join("/"))
}

/// The request target that the kubelet makes of a probe's path: with a leading slash, without a fragment, and percent-encoded
/// where a URL requires it.
///
/// # Errors
/// The path is too long for a request target.
pub(super) fn path_to_target(declared: &str) -> Result<PathAndQuery, InvalidUri> {
    let is_url = !declared.chars().any(|ch| ch.is_ascii_control()) && has_valid_escapes(declared);
    let url = match is_url {
        true => declared.split('#').next().unwrap_or_default(),
        // A path that is not a valid URL is used as it is.
        false => declared,
    };
    let (path, query) = match url.split_once('?').filter(|_| is_url) {
        Some((path, query)) => (path, Some(query)),
        None => (url, None),
    };
    let mut target = String::new();
    if !path.starts_with('/') {
        target.push('/');
    }
    escape(
        path,
        if is_url { PATH_BYTES } else { PATH_BYTES_WITHOUT_ESCAPES },
        &mut target,
    );
    if let Some(query) = query {
        target.push('?');
        escape(query, QUERY_BYTES, &mut target);
    }
    target.parse()
}

/// Whether a reference starts with a scheme and `://`. A URL in its query does not count.
fn is_absolute(reference: &str) -> bool {
    let is_scheme = |scheme: &str| {
        scheme
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
    };
    reference.split_once("://").is_some_and(|(scheme, _)| is_scheme(scheme))
}

fn has_valid_escapes(text: &str) -> bool {
    let mut parts = text.split('%');
    parts.next();
    parts.all(|part| part.len() >= 2 && part.bytes().take(2).all(|byte| byte.is_ascii_hexdigit()))
}

fn escape(text: &str, allowed: &[u8], out: &mut String) {
    for byte in text.bytes() {
        match byte.is_ascii_alphanumeric() || allowed.contains(&byte) {
            true => out.push(char::from(byte)),
            false => out.push_str(&format!("%{byte:02X}")),
        }
    }
}

/// Accepts every certificate, as the kubelet's probes do: they check that the application works, not its identity.
#[derive(Debug)]
struct AcceptAnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1, without a client certificate; shared by all probes.
static TLS_CONFIG: LazyLock<Arc<ClientConfig>> = LazyLock::new(|| {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
        .expect("the provider has suites of both versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate(provider)))
        .with_no_client_auth();
    config.resumption = rustls::client::Resumption::disabled();
    config.alpn_protocols = vec![HTTP2.to_vec(), b"http/1.1".to_vec()];
    Arc::new(config)
});

const HTTP2: &[u8] = b"h2";
/// Maximum number of requests for one probe, as in Go's HTTP client.
const MAX_REQUESTS: usize = 10;
/// Maximum number of body bytes to read, as in the kubelet.
const MAX_BODY_BYTES: usize = 10 * 1024;
const ACCEPT_ANY: HeaderValue = HeaderValue::from_static("*/*");
const REDIRECT_STATUSES: [StatusCode; 5] = [
    StatusCode::MOVED_PERMANENTLY,
    StatusCode::FOUND,
    StatusCode::SEE_OTHER,
    StatusCode::TEMPORARY_REDIRECT,
    StatusCode::PERMANENT_REDIRECT,
];
/// Characters allowed unencoded in a path, in a query, and in a path whose percent signs are literal (RFC 3986 section 3.3).
const PATH_BYTES: &[u8] = b"-._~!$&'()*+,;=:@/%";
const QUERY_BYTES: &[u8] = b"-._~!$&'()*+,;=:@/%?";
const PATH_BYTES_WITHOUT_ESCAPES: &[u8] = b"-._~!$&'()*+,;=:@/";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_path_and_any_redirect_are_used_or_refused(path in ".{0,40}", location in "[ -~]{0,40}", text in any::<Vec<u8>>()) {
            let path_and_query = path_to_target(&path).unwrap();
            prop_assert!(path_and_query.as_str().starts_with('/'));
            let request_target = RequestTarget { scheme: Scheme::HTTPS, port: Some(1), path_and_query, host: None };
            for location in [location.as_bytes(), format!("https://{location}").as_bytes(), &text] {
                let Ok(location) = HeaderValue::from_bytes(location) else { continue };
                let rsp = Response::builder().status(302).header(LOCATION, location).body(()).unwrap();
                if let RedirectOutcome::Follow(next) = request_target.evaluate_redirect(IpAddr::from([10, 0, 0, 1]), &rsp) {
                    prop_assert!(next.path_and_query.as_str().starts_with('/'));
                }
            }
        }
    }

    #[test]
    fn the_path_of_a_probe_becomes_the_request_target_of_the_kubelet() {
        for (declared, expected) in [
            ("", "/"),
            ("/", "/"),
            ("healthz", "/healthz"),
            ("/healthz?verbose=1&x=a b", "/healthz?verbose=1&x=a%20b"),
            ("/a b", "/a%20b"),
            ("/a%20b", "/a%20b"),
            ("/%zz?x", "/%25zz%3Fx"),
            ("/a#b", "/a"),
            ("/é", "/%C3%A9"),
            ("?x=1", "/?x=1"),
        ] {
            assert_eq!(path_to_target(declared).unwrap(), *expected, "{declared}");
        }
        assert!(path_to_target(&"é".repeat(20_000)).is_err());
    }

    /// The first rows are from RFC 3986 section 5.4.
    #[test]
    fn dot_segments_of_a_redirect_are_resolved() {
        let request_target = RequestTarget {
            scheme: Scheme::HTTPS,
            port: None,
            path_and_query: PathAndQuery::from_static("/b/c/d;p?q"),
            host: None,
        };
        for (reference, expected) in [
            ("g", "/b/c/g"),
            ("./g", "/b/c/g"),
            ("g/", "/b/c/g/"),
            ("/g", "/g"),
            ("?y", "/b/c/d;p?y"),
            ("g?y", "/b/c/g?y"),
            ("", "/b/c/d;p?q"),
            (".", "/b/c/"),
            ("./", "/b/c/"),
            ("..", "/b/"),
            ("../", "/b/"),
            ("../g", "/b/g"),
            ("../..", "/"),
            ("../../g", "/g"),
            ("../../../g", "/g"),
            ("/./g", "/g"),
            ("/../g", "/g"),
            ("g.", "/b/c/g."),
            ("..g", "/b/c/..g"),
            ("./g/.", "/b/c/g/"),
            ("g/../h", "/b/c/h"),
            ("g?y/../x", "/b/c/g?y/../x"),
            ("/a//../b", "/a/b"),
            ("/a/%2e%2e/b", "/a/%2e%2e/b"),
        ] {
            assert_eq!(request_target.join(reference), expected, "{reference}");
        }
    }

    /// As Go does, the host of the URL is sent unchanged, with its port if it has one, unless the probe has a `Host` header.
    #[test]
    fn a_port_is_sent_if_the_url_has_one() {
        for (location, addr, expected) in [
            ("/x", "10.0.0.1:8443", "10.0.0.1:8443"),
            ("https://10.0.0.1/x", "10.0.0.1:443", "10.0.0.1"),
            ("https://10.0.0.1:443/x", "10.0.0.1:443", "10.0.0.1:443"),
            ("http://10.0.0.1/x", "10.0.0.1:80", "10.0.0.1"),
            ("//[fd00::1]/x", "[fd00::1]:443", "[fd00::1]"),
            ("//[fd00::1]:82/x", "[fd00::1]:82", "[fd00::1]:82"),
        ] {
            let addr: SocketAddr = addr.parse().unwrap();
            let request_target = RequestTarget {
                scheme: Scheme::HTTPS,
                port: Some(8443),
                path_and_query: PathAndQuery::from_static("/"),
                host: None,
            };
            let rsp = Response::builder().status(302).header(LOCATION, location);
            let RedirectOutcome::Follow(next) = request_target.evaluate_redirect(addr.ip(), &rsp.body(()).unwrap())
            else {
                panic!("{location}");
            };
            assert_eq!((next.port(), next.authority(addr).as_str()), (addr.port(), expected));
        }
    }

    #[test]
    fn redirects_are_followed_on_the_same_host_only() {
        let request_target = RequestTarget {
            scheme: Scheme::HTTPS,
            port: Some(8443),
            path_and_query: PathAndQuery::from_static("/a/b?c"),
            host: Some(Authority::from_static("web.test")),
        };
        let target_at = |scheme: Scheme, port: u16, target: &'static str, host: Option<&'static str>| RequestTarget {
            scheme,
            port: (port > 0).then_some(port),
            path_and_query: PathAndQuery::from_static(target),
            host: host.map(Authority::from_static),
        };
        let host = Some("web.test");
        for (status, location, expected) in [
            (
                302,
                Some("/login"),
                Some(target_at(Scheme::HTTPS, 8443, "/login", host)),
            ),
            (
                301,
                Some("login?x"),
                Some(target_at(Scheme::HTTPS, 8443, "/a/login?x", host)),
            ),
            (307, Some("?x"), Some(target_at(Scheme::HTTPS, 8443, "/a/b?x", host))),
            (
                302,
                Some("/login?next=https://a.test/b"),
                Some(target_at(Scheme::HTTPS, 8443, "/login?next=https://a.test/b", host)),
            ),
            (
                308,
                Some("https://10.0.0.1/x#y"),
                Some(target_at(Scheme::HTTPS, 0, "/x", None)),
            ),
            (
                303,
                Some("http://10.0.0.1:81"),
                Some(target_at(Scheme::HTTP, 81, "/", None)),
            ),
            (
                302,
                Some("//10.0.0.1:82/x"),
                Some(target_at(Scheme::HTTPS, 82, "/x", host)),
            ),
            (
                302,
                Some("../login?next=/x/../y"),
                Some(target_at(Scheme::HTTPS, 8443, "/login?next=/x/../y", host)),
            ),
            (
                302,
                Some("https://10.0.0.1/x/../y"),
                Some(target_at(Scheme::HTTPS, 0, "/y", None)),
            ),
            (302, Some("#y"), Some(target_at(Scheme::HTTPS, 8443, "/a/b?c", host))),
            (302, Some(""), None),
            (302, Some("https://web.test/login"), None),
            (302, Some("https://10.0.0.2:8443/login"), None),
            (302, Some("app://login.test/x"), None),
            (302, None, None),
            (200, Some("/login"), None),
            (304, Some("/login"), None),
        ] {
            let mut rsp = Response::builder().status(status);
            if let Some(location) = location {
                rsp = rsp.header(LOCATION, location);
            }
            let next = request_target.evaluate_redirect(IpAddr::from([10, 0, 0, 1]), &rsp.body(()).unwrap());
            match (next, expected) {
                (RedirectOutcome::Follow(next), Some(expected)) => assert_eq!(next, expected, "{location:?}"),
                (RedirectOutcome::Final, None) => {}
                _ => panic!("{status} {location:?}"),
            }
        }
    }
}
