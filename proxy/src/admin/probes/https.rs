//! `httpGet` probes over TLS, as the kubelet makes them: the certificate is not verified, redirects to the same host are
//! followed, one to another host is a success, and so is every other status from 200 to 399.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
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

use super::check::{self, ProbeError};

/// What is asked for.
#[derive(Clone, Debug)]
pub(super) struct Get {
    pub(super) target: PathAndQuery,
    /// Those of the probe.
    pub(super) headers: HeaderMap,
    /// What the probe's header `Host` says.
    pub(super) host: Option<Authority>,
}

/// Where a request of a probe goes; the host is always the one that is probed.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    scheme: Scheme,
    port: u16,
    target: PathAndQuery,
    host: Option<Authority>,
}

/// Makes the request, and those that redirects on the same host lead to.
pub(super) async fn get(get: &Get, addr: SocketAddr, user_agent: &HeaderValue) -> Result<StatusCode, ProbeError> {
    let mut place = Place {
        scheme: Scheme::HTTPS,
        port: addr.port(),
        target: get.target.clone(),
        host: get.host.clone(),
    };
    for _ in 0..MAX_REQUESTS {
        let rsp = once(get, SocketAddr::new(addr.ip(), place.port), &place, user_agent).await?;
        match place.follow(addr.ip(), &rsp) {
            Next::Done => return Ok(rsp.status()),
            Next::At(next) => place = next,
            Next::Unusable(location) => return Err(ProbeError::Location { addr, location }),
        }
    }
    Err(ProbeError::Redirects {
        addr,
        limit: MAX_REQUESTS,
    })
}

/// One request; its response comes without a body, which has been read as far as the kubelet reads it.
async fn once(
    get: &Get,
    addr: SocketAddr,
    place: &Place,
    user_agent: &HeaderValue,
) -> Result<Response<()>, ProbeError> {
    let stream = check::dial(addr).await?;
    if place.scheme == Scheme::HTTP {
        return http1(get, addr, place, user_agent, stream).await;
    }
    // An address is no name for SNI, so none is sent.
    let name = ServerName::from(addr.ip());
    let tls = TlsConnector::from(TLS.clone()).connect(name, stream).await;
    let tls = tls.map_err(|source| ProbeError::Tls { addr, source })?;
    match tls.get_ref().1.alpn_protocol() == Some(HTTP2) {
        true => http2(get, addr, place, user_agent, tls).await,
        false => http1(get, addr, place, user_agent, tls).await,
    }
}

async fn http1<IO>(
    get: &Get,
    addr: SocketAddr,
    place: &Place,
    user_agent: &HeaderValue,
    io: IO,
) -> Result<Response<()>, ProbeError>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let exchange = async {
        let (mut sender, connection) = http1::Builder::new()
            // As Go writes the names of headers.
            .title_case_headers(true)
            .handshake(TokioIo::new(io))
            .await?;
        let mut req = place.request(get, user_agent, Uri::from(place.target.clone()));
        let host = place.authority(addr);
        let host = HeaderValue::from_str(host.as_str()).expect("an authority is visible ASCII");
        req.headers_mut().insert(HOST, host);
        req.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        beside(connection, async { read(sender.send_request(req).await?).await }).await
    };
    exchange.await.map_err(|source| ProbeError::Http { addr, source })
}

async fn http2<IO>(
    get: &Get,
    addr: SocketAddr,
    place: &Place,
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
            .scheme(place.scheme.clone())
            .authority(place.authority(addr))
            .path_and_query(place.target.clone());
        let uri = uri.build().expect("all parts of the URI are there");
        let req = place.request(get, user_agent, uri);
        beside(connection, async { read(sender.send_request(req).await?).await }).await
    };
    exchange.await.map_err(|source| ProbeError::Http { addr, source })
}

/// Drives a connection while `work` uses it; what breaks the connection fails the work.
pub(super) async fn beside<T>(connection: impl Future, work: impl Future<Output = T>) -> T {
    let connection = async {
        connection.await;
        std::future::pending::<Infallible>().await
    };
    // The connection is dropped with this future, so both branches may be cancelled.
    tokio::select! {
        biased;
        done = pin!(work) => done,
        never = pin!(connection) => match never {},
    }
}

/// Reads the body as far as the kubelet does: one that breaks before fails the probe.
async fn read(rsp: Response<Incoming>) -> Result<Response<()>, hyper::Error> {
    let (head, mut body) = rsp.into_parts();
    let mut n_read = 0;
    while n_read < MAX_BODY
        && let Some(frame) = body.frame().await
    {
        n_read += frame?.data_ref().map_or(0, Bytes::len);
    }
    Ok(Response::from_parts(head, ()))
}

/// What a response leads to.
enum Next {
    Done,
    At(Place),
    /// A redirect whose target is none.
    Unusable(String),
}

impl Place {
    fn request(&self, get: &Get, user_agent: &HeaderValue, uri: Uri) -> Request<Empty<Bytes>> {
        let mut req = Request::new(Empty::new());
        *req.uri_mut() = uri;
        let headers = req.headers_mut();
        headers.clone_from(&get.headers);
        headers.entry(USER_AGENT).or_insert_with(|| user_agent.clone());
        headers.entry(ACCEPT).or_insert(ANYTHING);
        // An empty value says that the header is not to be sent.
        for name in [USER_AGENT, ACCEPT] {
            if headers.get(&name).is_some_and(HeaderValue::is_empty) {
                headers.remove(&name);
            }
        }
        req
    }

    fn authority(&self, addr: SocketAddr) -> Authority {
        let of_addr = || Authority::try_from(addr.to_string()).expect("an address is an authority");
        self.host.clone().unwrap_or_else(of_addr)
    }

    /// Where a redirect of the probed host leads.
    fn follow(&self, host: IpAddr, rsp: &Response<()>) -> Next {
        let location = rsp
            .headers()
            .get(LOCATION)
            .filter(|_| REDIRECTS.contains(&rsp.status()));
        let Some(location) = location else {
            return Next::Done;
        };
        let unusable = || Next::Unusable(String::from_utf8_lossy(location.as_bytes()).into_owned());
        let Ok(text) = location.to_str() else {
            return unusable();
        };
        let text = text.split('#').next().unwrap_or_default();
        let absolute = match text.strip_prefix("//") {
            Some(rest) => Some(format!("{}://{rest}", self.scheme)),
            None => is_absolute(text).then(|| text.to_owned()),
        };
        let Some(absolute) = absolute else {
            return match self.join(text).parse() {
                Ok(target) => Next::At(Self { target, ..self.clone() }),
                Err(_) => unusable(),
            };
        };
        let Ok(uri) = absolute.parse::<Uri>() else {
            return unusable();
        };
        let parts = uri.into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
            return unusable();
        };
        let is_same = authority.host().trim_matches(['[', ']']).parse() == Ok(host);
        let default_port = match scheme.as_str() {
            "http" => 80,
            "https" => 443,
            // Nobody but a browser can follow it.
            _ => return unusable(),
        };
        match is_same {
            false => Next::Done,
            true => Next::At(Self {
                port: authority.port_u16().unwrap_or(default_port),
                target: parts.path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/")),
                scheme,
                host: None,
            }),
        }
    }

    /// A relative reference, from where we are.
    fn join(&self, reference: &str) -> String {
        let path = self.target.path();
        match reference.chars().next() {
            None => self.target.to_string(),
            Some('/') => reference.to_owned(),
            Some('?') => format!("{path}{reference}"),
            Some(_) => {
                let dir = &path[..=path.rfind('/').unwrap_or(0)];
                format!("{dir}{reference}")
            }
        }
    }
}

/// The target of a request for a probe's path, as the kubelet makes it: with a leading slash, without a fragment, and
/// escaped where a URL cannot hold it.
///
/// # Errors
/// One that is too long for a target.
pub(super) fn target(declared: &str) -> Result<PathAndQuery, InvalidUri> {
    let is_url = !declared.chars().any(|ch| ch.is_ascii_control()) && escapes_are_whole(declared);
    let url = match is_url {
        true => declared.split('#').next().unwrap_or_default(),
        // What is no URL is a path as it stands.
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
    escape(path, if is_url { PATH } else { PATH_WITHOUT_ESCAPES }, &mut target);
    if let Some(query) = query {
        target.push('?');
        escape(query, QUERY, &mut target);
    }
    target.parse()
}

/// Whether a reference begins with a scheme and an authority; a query may have them as well.
fn is_absolute(reference: &str) -> bool {
    let is_scheme = |scheme: &str| {
        scheme
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
    };
    reference.split_once("://").is_some_and(|(scheme, _)| is_scheme(scheme))
}

fn escapes_are_whole(text: &str) -> bool {
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

/// Accepts every certificate, as the kubelet's probes do: they ask whether an application works, not who it is.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
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

/// TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1; shared by all probes, none of which says who we are.
static TLS: LazyLock<Arc<ClientConfig>> = LazyLock::new(|| {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
        .expect("the provider has suites of both versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Unverified(provider)))
        .with_no_client_auth();
    config.resumption = rustls::client::Resumption::disabled();
    config.alpn_protocols = vec![HTTP2.to_vec(), b"http/1.1".to_vec()];
    Arc::new(config)
});

const HTTP2: &[u8] = b"h2";
/// Requests of one probe at most; Go's HTTP client stops after as many.
const MAX_REQUESTS: usize = 10;
/// Bytes of a body that are read at most, as the kubelet does.
const MAX_BODY: usize = 10 * 1024;
const ANYTHING: HeaderValue = HeaderValue::from_static("*/*");
const REDIRECTS: [StatusCode; 5] = [
    StatusCode::MOVED_PERMANENTLY,
    StatusCode::FOUND,
    StatusCode::SEE_OTHER,
    StatusCode::TEMPORARY_REDIRECT,
    StatusCode::PERMANENT_REDIRECT,
];
/// What stands in a path, in a query, and in a path whose percent signs mean themselves (RFC 3986 section 3.3).
const PATH: &[u8] = b"-._~!$&'()*+,;=:@/%";
const QUERY: &[u8] = b"-._~!$&'()*+,;=:@/%?";
const PATH_WITHOUT_ESCAPES: &[u8] = b"-._~!$&'()*+,;=:@/";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_path_and_any_redirect_are_used_or_refused(path in ".{0,40}", location in "[ -~]{0,40}", text in any::<Vec<u8>>()) {
            let target = target(&path).unwrap();
            prop_assert!(target.as_str().starts_with('/'));
            let place = Place { scheme: Scheme::HTTPS, port: 1, target, host: None };
            for location in [location.as_bytes(), format!("https://{location}").as_bytes(), &text] {
                let Ok(location) = HeaderValue::from_bytes(location) else { continue };
                let rsp = Response::builder().status(302).header(LOCATION, location).body(()).unwrap();
                if let Next::At(next) = place.follow(IpAddr::from([10, 0, 0, 1]), &rsp) {
                    prop_assert!(next.target.as_str().starts_with('/'));
                }
            }
        }
    }

    #[test]
    fn a_probes_path_becomes_the_target_that_the_kubelet_asks_for() {
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
            assert_eq!(target(declared).unwrap(), *expected, "{declared}");
        }
        assert!(target(&"é".repeat(20_000)).is_err());
    }

    #[test]
    fn redirects_are_followed_on_the_same_host_only() {
        let place = Place {
            scheme: Scheme::HTTPS,
            port: 8443,
            target: PathAndQuery::from_static("/a/b?c"),
            host: Some(Authority::from_static("web.test")),
        };
        let at = |scheme: Scheme, port, target: &'static str, host: Option<&'static str>| Place {
            scheme,
            port,
            target: PathAndQuery::from_static(target),
            host: host.map(Authority::from_static),
        };
        let host = Some("web.test");
        for (status, location, expected) in [
            (302, Some("/login"), Some(at(Scheme::HTTPS, 8443, "/login", host))),
            (301, Some("login?x"), Some(at(Scheme::HTTPS, 8443, "/a/login?x", host))),
            (307, Some("?x"), Some(at(Scheme::HTTPS, 8443, "/a/b?x", host))),
            (
                302,
                Some("/login?next=https://a.test/b"),
                Some(at(Scheme::HTTPS, 8443, "/login?next=https://a.test/b", host)),
            ),
            (
                308,
                Some("https://10.0.0.1/x#y"),
                Some(at(Scheme::HTTPS, 443, "/x", None)),
            ),
            (303, Some("http://10.0.0.1:81"), Some(at(Scheme::HTTP, 81, "/", None))),
            (302, Some("//10.0.0.1:82/x"), Some(at(Scheme::HTTPS, 82, "/x", None))),
            (302, Some("https://web.test/login"), None),
            (302, Some("https://10.0.0.2:8443/login"), None),
            (302, None, None),
            (200, Some("/login"), None),
            (304, Some("/login"), None),
        ] {
            let mut rsp = Response::builder().status(status);
            if let Some(location) = location {
                rsp = rsp.header(LOCATION, location);
            }
            let next = place.follow(IpAddr::from([10, 0, 0, 1]), &rsp.body(()).unwrap());
            match (next, expected) {
                (Next::At(next), Some(expected)) => assert_eq!(next, expected, "{location:?}"),
                (Next::Done, None) => {}
                _ => panic!("{status} {location:?}"),
            }
        }
    }
}
