//! What must hold of bytes from the network, whatever they are: fuzz targets try it with bytes of their making, and the
//! tests here with those that they found worth keeping.

use std::{convert::Infallible, fmt::Debug, future::Future, num::NonZeroUsize};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};
use http_body_util::{BodyExt as _, Collected, Empty};
use hyper::{body::Incoming, client::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    http::h1::fuzz::{self as h1, Answer, Whole},
    net::{
        detect::{self, Verdict},
        socks,
    },
    policy::{decode, matches::path},
    tls::{
        header::{Decoded, TransportHeader},
        server::{self, Hello},
    },
    trace::context,
};

/// What is decided from the beginning of a ClientHello is not decided otherwise by its rest.
pub fn hello(bytes: &[u8]) {
    let all = server::sni(bytes);
    for end in 0..bytes.len().min(600) {
        let part = server::sni(&bytes[..end]);
        assert!(
            part == Hello::Incomplete || part == all,
            "{part:?} after {end} bytes, then {all:?}"
        );
    }
}

/// What is decided from the beginning of a connection is not decided otherwise by what follows. Only the first line of a request
/// is believed by its start, as by others; a server refuses it if the rest of it is none.
pub fn detection(bytes: &[u8]) {
    let all = detect::classify(bytes);
    for end in 0..bytes.len() {
        let part = detect::classify(&bytes[..end]);
        let believed =
            part == Verdict::Http1 && all == Verdict::NotHttp && !detect::first_line(&bytes[..end]).ends_with(b"\n");
        assert!(
            part == Verdict::Incomplete || part == all || believed,
            "{part:?} after {end} bytes, then {all:?}"
        );
    }
}

/// What a SOCKS client wants is not understood otherwise once more of it is there.
pub fn socks(bytes: &[u8]) {
    let (greeting, request) = (socks::greeting(bytes), socks::request(bytes));
    for end in 0..bytes.len() {
        let part = socks::greeting(&bytes[..end]);
        assert!(
            part == Ok(None) || part == greeting,
            "{part:?} after {end} bytes, then {greeting:?}"
        );
        let part = socks::request(&bytes[..end]);
        assert!(
            part == Ok(None) || part == request,
            "{part:?} after {end} bytes, then {request:?}"
        );
    }
}

/// A path that rules judge has no part that an application takes for something else, and its normal form is its own.
pub fn paths(bytes: &[u8]) {
    let Ok(path) = std::str::from_utf8(bytes) else { return };
    let Some(normal) = path::normal(path) else { return };
    assert_eq!(path::normal(&normal).as_deref(), Some(&*normal), "{path:?}");
    let mut segments: Vec<_> = normal.split('/').collect();
    assert!(normal.starts_with('/') || matches!(path, "" | "*"), "{path:?}");
    if normal.starts_with('/') {
        segments.remove(0);
        segments.pop_if(|last| last.is_empty());
        let is_plain = |segment: &&str| !segment.is_empty() && !matches!(*segment, "." | "..");
        assert!(segments.iter().all(is_plain), "{path:?} is {normal:?}");
        let lower = path.to_ascii_lowercase();
        assert!(
            !["%2f", "%5c", "\\", ";"].iter().any(|part| lower.contains(part)),
            "{path:?}"
        );
    }
    for length in 0..=normal.len() {
        let is_within_encoded = normal[..length].rfind('%').is_some_and(|at| length - at < 3);
        let original = path::original_len(path, length);
        if let Some(start) = path.get(..original).filter(|_| !is_within_encoded) {
            assert_eq!(path::decode(start).len(), length, "{start:?} of {path:?}");
        }
    }
}

/// A transport header is what it is written as, and ends where it ends, whatever follows.
pub fn transport_header(bytes: &[u8]) {
    if let Decoded::Header(header, len) = TransportHeader::decode(bytes) {
        let exact = TransportHeader::decode(&bytes[..len]);
        assert!(
            matches!(&exact, Decoded::Header(same, _) if *same == header),
            "{exact:?}, {header:?} with more"
        );
        for end in 0..len {
            let part = TransportHeader::decode(&bytes[..end]);
            assert!(matches!(part, Decoded::Incomplete), "{part:?} after {end} bytes");
        }
        let mut written = BytesMut::new();
        header.encode(&mut written);
        let Decoded::Header(again, len) = TransportHeader::decode(&written) else {
            panic!("{header:?} is written as {written:?}");
        };
        assert_eq!((again, len), (header, written.len()));
    }
}

/// The context of a trace is what it is written as, in whatever form it comes.
pub fn trace_context(bytes: &[u8]) {
    let Ok(value) = HeaderValue::from_bytes(bytes) else {
        return;
    };
    for names in context::forms() {
        let line = |name: HeaderName| (name, value.clone());
        context::holds(names.into_iter().map(line).collect());
    }
}

/// Messages of the control plane are taken or refused.
pub fn policies(bytes: &[u8]) {
    use tulle_proto::{destination, inbound, outbound};
    if let Ok(message) = outbound::OutboundPolicy::decode(bytes) {
        let _ = decode::outbound::client_policy(message);
    }
    if let Ok(message) = inbound::Server::decode(bytes) {
        let _ = decode::inbound::server_policy(message);
    }
    if let Ok(message) = destination::DestinationProfile::decode(bytes) {
        let _ = decode::profile::profile(message);
    }
    if let Ok(message) = destination::Update::decode(bytes) {
        let _ = decode::endpoint::endpoint_update(message, drop);
    }
}

/// A body in chunks is the same in whatever pieces it arrives.
pub fn chunks(bytes: &[u8]) {
    let Some((step, bytes)) = bytes.split_first() else {
        return;
    };
    let step = NonZeroUsize::new(usize::from(*step)).unwrap_or(NonZeroUsize::MIN);
    let whole = h1::chunks(&mut [Bytes::copy_from_slice(bytes)].into_iter());
    let mut pieces = bytes.chunks(step.get()).map(Bytes::copy_from_slice);
    assert_eq!(h1::chunks(&mut pieces).ok(), whole.ok());
}

/// A request that we take, others read in the same way; and so do we, once we have written it anew. It is taken as soon as it is
/// there.
pub fn requests(bytes: &[u8]) {
    let [at_once, by_bytes] = h1::request_ends(bytes);
    assert_eq!(at_once, by_bytes);
    let ours = h1::requests(&mut Bytes::copy_from_slice(bytes));
    for whole in &ours {
        for written in h1::written(whole) {
            let mut rest = written.clone();
            let again = h1::requests(&mut rest);
            assert!(
                again.len() == 1 && rest.is_empty(),
                "{whole:?} is written as {written:?}"
            );
            same(&again[0], whole);
            assert_eq!(others_agree(&again, &written), 1, "others do not take {written:?}");
        }
    }
    if let Some(first) = ours.first() {
        others_agree(&ours, bytes);
        parser_agrees(first, at_once, bytes);
    }
}

/// httparse by itself, which knows nothing of bodies and of what a host is, reads the same lines, to the same end.
fn parser_agrees(ours: &Whole<(Method, String)>, end: Option<usize>, bytes: &[u8]) {
    let mut lines = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut theirs = httparse::Request::new(&mut lines);
    assert_eq!(theirs.parse(bytes).ok(), end.map(httparse::Status::Complete));
    let target = theirs
        .path
        .unwrap_or_default()
        .parse::<Uri>()
        .map(|uri| uri.to_string());
    assert_eq!(theirs.method, Some(ours.head.0.as_str()));
    assert_eq!(target.ok().as_ref(), Some(&ours.head.1));
    assert_eq!(h1::passed_on(&map(theirs.headers)), h1::passed_on(&ours.headers));
}

fn map(lines: &[httparse::Header<'_>]) -> HeaderMap {
    let line = |line: &httparse::Header<'_>| {
        let name = HeaderName::from_bytes(line.name.as_bytes()).expect("a name");
        (name, HeaderValue::from_bytes(line.value).expect("a value"))
    };
    lines.iter().map(line).collect()
}

/// What hyper takes, it reads as we do; says how many of our requests these are. It may refuse a head, but the body of one that it
/// takes is ours.
fn others_agree(ours: &[Whole<(Method, String)>], bytes: &[u8]) -> usize {
    let theirs = block_on(hyper_s_requests(bytes));
    for (ours, theirs) in ours.iter().zip(&theirs) {
        match theirs {
            Ok(theirs) => {
                same(ours, theirs);
                // An absolute target has the host that counts, and we put the header right.
                if !ours.head.1.contains("://") {
                    assert_eq!(ours.headers.get(header::HOST), theirs.headers.get(header::HOST));
                }
            }
            Err(head) => panic!("of {head:?} the body is wrong, for us it is {ours:?}"),
        }
    }
    theirs.len().min(ours.len())
}

/// A response that we take, others read in the same way; and so do we, once we have written it anew, for whomever. It is taken
/// as soon as it is there.
pub fn responses(bytes: &[u8]) {
    let [at_once, by_bytes] = h1::response_ends(bytes);
    assert_eq!(at_once, by_bytes);
    let Some((ours, _)) = h1::response(Bytes::copy_from_slice(bytes), &Method::GET) else {
        return;
    };
    if let Some(theirs) = block_on(hyper_s_response(bytes)) {
        same(&ours.last, &theirs);
    }
    let mut lines = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut theirs = httparse::Response::new(&mut lines);
    // By itself it takes no blank before a colon.
    if let Ok(parsed) = theirs.parse(bytes) {
        assert!(parsed.is_complete(), "there is more of the head for httparse");
        let (status, headers) = match ours.interims.first() {
            Some((status, headers)) => (status, headers),
            None => (&ours.last.head, &ours.last.headers),
        };
        assert_eq!(theirs.code, Some(status.as_u16()));
        assert_eq!(h1::passed_on(&map(theirs.headers)), h1::passed_on(headers));
    }
    for (version, method) in [
        (Version::HTTP_11, Method::GET),
        (Version::HTTP_10, Method::GET),
        (Version::HTTP_11, Method::HEAD),
    ] {
        for written in h1::response_written(&ours, version, &method) {
            written_well(&ours, version, &method, &written);
        }
    }
}

/// What we have written to who asked in this way is read as what it was made of, up to its end.
fn written_well(ours: &Answer, version: Version, method: &Method, written: &Bytes) {
    let Some((again, true)) = h1::response(written.clone(), method) else {
        panic!("{ours:?} is written as {written:?}");
    };
    assert_eq!(again.interims.len(), ours.interims.len(), "{written:?}");
    for ((status, headers), (before, headers_before)) in again.interims.iter().zip(&ours.interims) {
        assert_eq!(status, before);
        assert_eq!(h1::passed_on(headers), h1::passed_on(headers_before));
    }
    let mut expected = ours.last.clone();
    if *method == Method::HEAD {
        expected.body.clear();
    }
    if *method == Method::HEAD || version == Version::HTTP_10 {
        expected.trailers.clear();
    }
    same(&again.last, &expected);
    if *method == Method::GET {
        let theirs = block_on(hyper_s_response(written));
        same(
            &again.last,
            &theirs.unwrap_or_else(|| panic!("{written:?} is none for others")),
        );
    }
}

/// Two readings of a message, of which we may have put the host right, and left out what is no trailer.
fn same<T: PartialEq + Debug>(one: &Whole<T>, other: &Whole<T>) {
    assert_eq!((&one.head, &one.body), (&other.head, &other.body));
    assert_eq!(h1::passed_on(&one.headers), h1::passed_on(&other.headers));
    assert_eq!(h1::trailers(&one.trailers), h1::trailers(&other.trailers));
}

/// How many headers and trailers hyper is to take: as many as we do, and more than an input has room for.
const MOST_HEADERS: usize = 2000;

fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime without I/O").block_on(future)
}

/// As hyper's server reads them, up to the first that it refuses; only their heads where the body is cut or wrong.
async fn hyper_s_requests(bytes: &[u8]) -> Vec<Result<Whole<(Method, String)>, (Method, String)>> {
    let seen = Mutex::new(Vec::new());
    let service = service_fn(|req: Request<Incoming>| async {
        let (parts, body) = req.into_parts();
        let head = (parts.method, parts.uri.to_string());
        let read = match body.collect().await {
            Ok(body) => Ok(whole(head, parts.headers, body)),
            Err(_) => Err(head),
        };
        seen.lock().push(read);
        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
    });
    let io = TokioIo::new(tokio::io::join(bytes, tokio::io::sink()));
    let mut server = hyper::server::conn::http1::Builder::new();
    // What it makes of the rest does not matter.
    let _ = server
        .half_close(true)
        .max_headers(MOST_HEADERS)
        .serve_connection(io, service)
        .await;
    seen.into_inner()
}

/// As hyper's client reads it, once it has asked: what came before would be nobody's.
async fn hyper_s_response(bytes: &[u8]) -> Option<Whole<StatusCode>> {
    let (client, mut server) = tokio::io::duplex(bytes.len().max(1024));
    let serve = async move {
        if matches!(server.read(&mut [0; 1024]).await, Ok(1..)) {
            // It may have seen enough.
            let _ = server.write_all(bytes).await;
        }
    };
    let exchange = async {
        let mut handshake = http1::Builder::new();
        handshake.max_headers(MOST_HEADERS);
        let (mut sender, connection) = handshake.handshake(TokioIo::new(client)).await.ok()?;
        let exchange = async {
            let rsp = sender.send_request(Request::new(Empty::<Bytes>::new())).await.ok()?;
            let (parts, body) = rsp.into_parts();
            let body = body.collect().await.ok()?;
            Some(whole(parts.status, parts.headers, body))
        };
        let (whole, _) = tokio::join!(exchange, connection);
        whole
    };
    tokio::join!(exchange, serve).0
}

fn whole<T>(head: T, headers: HeaderMap, body: Collected<Bytes>) -> Whole<T> {
    Whole {
        head,
        headers,
        trailers: body.trailers().cloned().unwrap_or_default(),
        body: body.to_bytes().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    #[test]
    fn others_read_messages_that_are_well_formed() {
        let requests = b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nokGET /b HTTP/1.1\r\nhost: a\r\n\r\n";
        let theirs = super::block_on(super::hyper_s_requests(requests));
        let theirs: Vec<_> = theirs.into_iter().map(|read| read.map(|whole| whole.body)).collect();
        assert_eq!(theirs, [Ok(b"ok".to_vec()), Ok(Vec::new())]);
        let response = b"HTTP/1.1 100 Continue\r\n\r\n\
            HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n";
        let theirs = super::block_on(super::hyper_s_response(response)).unwrap();
        assert_eq!((theirs.head.as_u16(), &theirs.body[..]), (201, &b"ok"[..]));
    }

    /// Tries everything that is kept for a target.
    fn replay(target: &str, holds: fn(&[u8])) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../fuzz/corpus")
            .join(target);
        let mut n = 0;
        for file in fs::read_dir(&dir).unwrap() {
            let path = file.unwrap().path();
            println!("{}", path.display());
            holds(&fs::read(path).unwrap());
            n += 1;
        }
        assert!(n > 0, "{} is empty", dir.display());
    }

    #[test]
    fn hellos_that_were_kept_hold() {
        replay("hello", super::hello);
    }

    #[test]
    fn detections_that_were_kept_hold() {
        replay("detection", super::detection);
    }

    #[test]
    fn paths_that_were_kept_hold() {
        replay("paths", super::paths);
    }

    #[test]
    fn transport_headers_that_were_kept_hold() {
        replay("transport_header", super::transport_header);
    }

    #[test]
    fn socks_clients_that_were_kept_hold() {
        replay("socks", super::socks);
    }

    #[test]
    fn trace_contexts_that_were_kept_hold() {
        replay("trace_context", super::trace_context);
    }

    #[test]
    fn policies_that_were_kept_hold() {
        replay("policies", super::policies);
    }

    #[test]
    fn chunks_that_were_kept_hold() {
        replay("chunks", super::chunks);
    }

    #[test]
    fn requests_that_were_kept_hold() {
        replay("requests", super::requests);
    }

    #[test]
    fn responses_that_were_kept_hold() {
        replay("responses", super::responses);
    }
}
