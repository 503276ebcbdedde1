//! HTTP/1 test cases: raw bytes of a client or an application, and the expected result.
//!
//! Source: RFC 9112; each case names its section. Where the RFC leaves a choice, and in the two cases in which tulle deviates on
//! purpose (`run/conformance.rs`), the case expects tulle's behaviour.

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub section: &'static str,
    pub name: &'static str,
    /// The bytes that the client sends, one element per write.
    pub client_writes: &'static [&'static str],
    /// The response of the application to each request.
    pub application_response: &'static str,
    pub expected: Expected,
}

#[derive(Clone, Copy, Debug)]
pub enum Expected {
    /// The application gets exactly these requests, and the client a successful response to each.
    Requests(&'static [Request]),
    /// The application gets no request: neither the request of the case nor the request that is sent directly after it. The client
    /// gets one of these statuses, and the connection is closed.
    Refused(&'static [u16]),
    /// The client gets this response.
    Response(Response),
    /// The client gets one of these statuses instead of the application's response.
    BadGateway(&'static [u16]),
    /// The client can tell that the response is truncated.
    TruncatedResponse,
}

/// A request as the application receives it.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub line: &'static str,
    pub body: &'static str,
    /// Header or trailer lines that must be present. After `!`, a name or a whole line must be absent.
    pub lines: &'static [&'static str],
}

/// A response as the client receives it.
#[derive(Clone, Copy, Debug)]
pub struct Response {
    /// Status codes in order, including 1xx responses.
    pub statuses: &'static [u16],
    pub body: &'static str,
    /// As in [`Request`], for the final response.
    pub lines: &'static [&'static str],
}

pub const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
const HOST: &str = "host: web.test";

const fn request(line: &'static str, body: &'static str, lines: &'static [&'static str]) -> Request {
    Request { line, body, lines }
}

/// A case whose requests must reach the application.
const fn forwarded(
    section: &'static str,
    name: &'static str,
    client_writes: &'static [&'static str],
    requests: &'static [Request],
) -> Case {
    Case {
        section,
        name,
        client_writes,
        application_response: OK,
        expected: Expected::Requests(requests),
    }
}

const fn refused(section: &'static str, name: &'static str, client_writes: &'static [&'static str]) -> Case {
    Case {
        section,
        name,
        client_writes,
        application_response: OK,
        expected: Expected::Refused(&[400]),
    }
}

/// A case for the response to a plain GET.
const fn response_case(
    section: &'static str,
    name: &'static str,
    application_response: &'static str,
    expected: Expected,
) -> Case {
    Case {
        section,
        name,
        client_writes: GET,
        application_response,
        expected,
    }
}

const fn response(statuses: &'static [u16], body: &'static str, lines: &'static [&'static str]) -> Expected {
    Expected::Response(Response { statuses, body, lines })
}

const GET: &[&str] = &["GET / HTTP/1.1\r\nhost: web.test\r\n\r\n"];
const GET_REQUEST: Request = request("GET / HTTP/1.1", "", &[HOST]);
const POST_HELLO_REQUESTS: &[Request] = &[request("POST / HTTP/1.1", "hello", &[HOST])];
const BAD_GATEWAY: Expected = Expected::BadGateway(&[502]);

macro_rules! post {
    ($lines:literal, $body:literal) => {
        &[concat!(
            "POST / HTTP/1.1\r\nhost: web.test\r\n",
            $lines,
            "\r\n\r\n",
            $body
        )]
    };
}

macro_rules! get {
    ($lines:literal) => {
        &[concat!("GET / HTTP/1.1\r\nhost: web.test\r\n", $lines, "\r\n\r\n")]
    };
}

pub const CASES: &[Case] = &[
    // Lines
    forwarded("2.1", "a plain request", GET, &[GET_REQUEST]),
    forwarded(
        "2.2",
        "an empty line before the request line is ignored",
        &["\r\nGET / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[GET_REQUEST],
    ),
    forwarded(
        "2.2",
        "LF alone ends a header line",
        &["GET / HTTP/1.1\nhost: web.test\n\n"],
        &[GET_REQUEST],
    ),
    refused("2.2", "CR within a header value", get!("a: b\rc")),
    refused(
        "2.2",
        "CR within the request line",
        &["GET /\r HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    refused(
        "2.2",
        "a space before the first header line",
        &["GET / HTTP/1.1\r\n host: web.test\r\n\r\n"],
    ),
    Case {
        expected: Expected::Refused(&[400, 505]),
        ..refused(
            "2.3",
            "an unsupported major version",
            &["GET / HTTP/3.0\r\nhost: web.test\r\n\r\n"],
        )
    },
    refused(
        "2.3",
        "a version in lower case",
        &["GET / http/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    forwarded(
        "2.3",
        "HTTP/1.0",
        &["GET / HTTP/1.0\r\nhost: web.test\r\n\r\n"],
        &[request("GET / HTTP/1.0", "", &[HOST])],
    ),
    // Request line
    refused(
        "3",
        "two spaces after the method",
        &["GET  / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    refused(
        "3",
        "a space within the target",
        &["GET /a b HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    refused("3", "no target", &["GET HTTP/1.1\r\nhost: web.test\r\n\r\n"]),
    refused("3", "no version", &["GET /\r\nhost: web.test\r\n\r\n"]),
    forwarded(
        "3.1",
        "an unknown method",
        &["FROB / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request("FROB / HTTP/1.1", "", &[HOST])],
    ),
    refused(
        "3.1",
        "a method that is not a token",
        &["G(T / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    forwarded(
        "3.2.1",
        "a target with a query",
        &["GET /a/%2e%2E//b?c=d&e=%20 HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request("GET /a/%2e%2E//b?c=d&e=%20 HTTP/1.1", "", &[HOST])],
    ),
    // Browsers encode these characters. The proxy encodes them for other clients, so that an application receives the same target
    // from every client.
    forwarded(
        "3.2.1",
        "characters that are not allowed in a URI are encoded",
        &["GET /a<b>?d=\"e\"&f=<g> HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request("GET /a%3Cb%3E?d=%22e%22&f=%3Cg%3E HTTP/1.1", "", &[HOST])],
    ),
    refused(
        "3.2.1",
        "a target with a fragment",
        &["GET /a#b HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    forwarded(
        "3.2.2",
        "the host of an absolute target overrides the Host header",
        &["GET http://other.test/a HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request(
            "GET http://other.test/a HTTP/1.1",
            "",
            &["host: other.test", "!l5d-orig-proto"],
        )],
    ),
    refused(
        "3.2.3",
        "an authority as a target",
        &["GET web.test:80 HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    refused(
        "3.2.3",
        "CONNECT to a path",
        &["CONNECT / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    refused(
        "3.2.3",
        "CONNECT with a body",
        &["CONNECT web.test:80 HTTP/1.1\r\nhost: web.test:80\r\ncontent-length: 1\r\n\r\nx"],
    ),
    refused(
        "3.2.3",
        "CONNECT with a chunked body",
        &["CONNECT web.test:80 HTTP/1.1\r\nhost: web.test:80\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"],
    ),
    forwarded(
        "3.2.4",
        "OPTIONS with an asterisk as the target",
        &["OPTIONS * HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request("OPTIONS * HTTP/1.1", "", &[HOST])],
    ),
    // The proxy forwards the request to its original destination. The application decides whether to refuse it, as without a proxy.
    forwarded(
        "3.2",
        "no Host header",
        &["GET / HTTP/1.1\r\n\r\n"],
        &[request("GET / HTTP/1.1", "", &["!host"])],
    ),
    refused("3.2", "two different Host headers", get!("host: other.test")),
    refused("3.2", "the same Host header twice", get!("host: web.test")),
    refused(
        "3.2",
        "a Host header with a path",
        &["GET / HTTP/1.1\r\nhost: web.test/a\r\n\r\n"],
    ),
    refused(
        "3.2",
        "a Host header with a user name",
        &["GET / HTTP/1.1\r\nhost: me@web.test\r\n\r\n"],
    ),
    // Headers
    refused("5.1", "a space before the colon", get!("a : b")),
    refused("5.1", "a space within a header name", get!("a b: c")),
    refused("5.1", "an empty header name", get!(": b")),
    refused("5.1", "a header line without a colon", get!("ab")),
    refused("5.1", "a control character in a header name", get!("a\u{1}: b")),
    refused(
        "5.1",
        "a control character in the first header name",
        &["GET / HTTP/1.1\r\na\u{1}: b\r\nhost: web.test\r\n\r\n"],
    ),
    refused(
        "5.1",
        "a first header line without a colon",
        &["GET / HTTP/1.1\r\nab\r\nhost: web.test\r\n\r\n"],
    ),
    refused("5.2", "a folded header line", get!("a: b\r\n c")),
    refused("5.5", "NUL in a header value", get!("a: b\0c")),
    forwarded(
        "5.1",
        "spaces and tabs around a header value are removed",
        get!("a: \t b c \t\r\nd:e\r\nf:"),
        &[request("GET / HTTP/1.1", "", &["a: b c", "d: e", "f: "])],
    ),
    forwarded(
        "5.5",
        "non-ASCII bytes in a header value",
        get!("a: \u{e4}\u{f6}"),
        &[request("GET / HTTP/1.1", "", &["a: \u{e4}\u{f6}"])],
    ),
    forwarded(
        "5.3",
        "header lines of one name keep their order",
        get!("a: 1\r\nb: 2\r\na: 3"),
        &[request("GET / HTTP/1.1", "", &["a: 1", "a: 3", "b: 2"])],
    ),
    // Framing
    forwarded(
        "6.2",
        "content-length",
        post!("content-length: 5", "hello"),
        POST_HELLO_REQUESTS,
    ),
    forwarded(
        "6.2",
        "content-length with leading zeros",
        post!("content-length: 005", "hello"),
        POST_HELLO_REQUESTS,
    ),
    forwarded(
        "6.2",
        "content-length of zero",
        post!("content-length: 0", ""),
        &[request("POST / HTTP/1.1", "", &["content-length: 0"])],
    ),
    forwarded(
        "6.2",
        "a body in several writes",
        &[
            "POST / HTTP/1.1\r\nhost: web",
            ".test\r\ncontent-length: 5\r",
            "\n\r",
            "\nhe",
            "llo",
        ],
        POST_HELLO_REQUESTS,
    ),
    refused(
        "6.3",
        "the same content-length twice",
        post!("content-length: 5\r\ncontent-length: 5", "hello"),
    ),
    refused(
        "6.3",
        "two different content-lengths",
        post!("content-length: 5\r\ncontent-length: 6", "hello!"),
    ),
    refused(
        "6.3",
        "a list of content-lengths",
        post!("content-length: 5, 5", "hello"),
    ),
    refused(
        "6.3",
        "content-length with a plus sign",
        post!("content-length: +5", "hello"),
    ),
    refused("6.3", "a negative content-length", post!("content-length: -5", "hello")),
    refused(
        "6.3",
        "a hexadecimal content-length",
        post!("content-length: 0x5", "hello"),
    ),
    refused(
        "6.3",
        "two numbers in one content-length",
        post!("content-length: 5 5", "hello"),
    ),
    refused("6.3", "an empty content-length", post!("content-length:", "hello")),
    refused(
        "6.3",
        "a content-length of more than 64 bits",
        post!("content-length: 18446744073709551621", "hello"),
    ),
    refused(
        "6.3",
        "content-length, then chunked",
        post!(
            "content-length: 5\r\ntransfer-encoding: chunked",
            "5\r\nhello\r\n0\r\n\r\n"
        ),
    ),
    refused(
        "6.3",
        "chunked, then content-length",
        post!(
            "transfer-encoding: chunked\r\ncontent-length: 5",
            "5\r\nhello\r\n0\r\n\r\n"
        ),
    ),
    Case {
        expected: Expected::Refused(&[400, 501]),
        ..refused(
            "6.1",
            "an unknown transfer coding",
            post!("transfer-encoding: frob, chunked", "0\r\n\r\n"),
        )
    },
    Case {
        expected: Expected::Refused(&[400, 501]),
        ..refused(
            "6.1",
            "chunked that is not the last coding",
            post!("transfer-encoding: chunked, gzip", "0\r\n\r\n"),
        )
    },
    Case {
        expected: Expected::Refused(&[400, 501]),
        ..refused(
            "6.1",
            "the transfer coding identity",
            post!("transfer-encoding: identity", "0\r\n\r\n"),
        )
    },
    Case {
        expected: Expected::Refused(&[400, 501]),
        ..refused(
            "6.1",
            "an unknown transfer coding that ends with \"chunked\"",
            post!("transfer-encoding: xchunked", "0\r\n\r\n"),
        )
    },
    Case {
        expected: Expected::Refused(&[400, 501]),
        ..refused(
            "6.1",
            "chunked after a vertical tab",
            post!("transfer-encoding: \u{b}chunked", "0\r\n\r\n"),
        )
    },
    refused(
        "6.1",
        "chunked twice",
        post!("transfer-encoding: chunked, chunked", "0\r\n\r\n"),
    ),
    refused(
        "6.1",
        "chunked in two header lines",
        post!("transfer-encoding: chunked\r\ntransfer-encoding: chunked", "0\r\n\r\n"),
    ),
    refused(
        "6.1",
        "chunked in HTTP/1.0",
        &["POST / HTTP/1.0\r\nhost: web.test\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"],
    ),
    // Chunks
    forwarded(
        "7.1",
        "a chunked body",
        post!("transfer-encoding: chunked", "2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"),
        POST_HELLO_REQUESTS,
    ),
    forwarded(
        "7.1",
        "chunked in upper case",
        post!("Transfer-Encoding: CHUNKED", "0005\r\nhello\r\n00\r\n\r\n"),
        POST_HELLO_REQUESTS,
    ),
    forwarded(
        "7.1",
        "a chunked body in many small writes",
        &[
            "POST / HTTP/1.1\r\nhost: web.test\r\ntransfer-encoding: chunked\r\n\r\n",
            "5",
            "\r",
            "\n",
            "h",
            "ello",
            "\r",
            "\n",
            "0",
            "\r",
            "\n",
            "\r",
            "\n",
        ],
        POST_HELLO_REQUESTS,
    ),
    forwarded(
        "7.1.1",
        "chunk extensions are removed",
        post!("transfer-encoding: chunked", "5;a=b;c=\"d e\"\r\nhello\r\n0;f\r\n\r\n"),
        POST_HELLO_REQUESTS,
    ),
    forwarded(
        "7.1.2",
        "trailers",
        post!(
            "transfer-encoding: chunked\r\nte: trailers\r\ntrailer: a",
            "5\r\nhello\r\n0\r\na: b\r\n\r\n"
        ),
        &[request("POST / HTTP/1.1", "hello", &["a: b"])],
    ),
    forwarded(
        "7.1.2",
        "trailers about framing or routing are removed",
        post!(
            "transfer-encoding: chunked",
            "5\r\nhello\r\n0\r\ncontent-length: 9\r\nhost: other.test\r\ntransfer-encoding: x\r\n\r\n"
        ),
        &[request(
            "POST / HTTP/1.1",
            "hello",
            &[HOST, "!content-length: 9", "!host: other.test"],
        )],
    ),
    refused(
        "7.1",
        "a negative chunk size",
        post!("transfer-encoding: chunked", "-5\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "a chunk size with the prefix 0x",
        post!("transfer-encoding: chunked", "0x5\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "a space before a chunk size",
        post!("transfer-encoding: chunked", " 5\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "a chunk without a size",
        post!("transfer-encoding: chunked", "\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "a chunk size of more than 64 bits",
        post!("transfer-encoding: chunked", "10000000000000005\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "a chunk longer than its size",
        post!("transfer-encoding: chunked", "4\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "LF alone after a chunk size",
        post!("transfer-encoding: chunked", "5\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "LF alone after a chunk",
        post!("transfer-encoding: chunked", "5\r\nhello\n0\r\n\r\n"),
    ),
    refused(
        "7.1.1",
        "LF alone within a chunk extension",
        post!("transfer-encoding: chunked", "5;a\nb\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1.1",
        "CR alone within a chunk extension",
        post!("transfer-encoding: chunked", "5;a\rb\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1.2",
        "a trailer line without a colon",
        post!("transfer-encoding: chunked", "5\r\nhello\r\n0\r\na b\r\n\r\n"),
    ),
    refused(
        "7.1.2",
        "a trailer that ends with LF alone",
        post!("transfer-encoding: chunked", "5\r\nhello\r\n0\r\na: b\n\n"),
    ),
    // Connections
    forwarded(
        "9.3.2",
        "three requests in one write",
        &[
            "GET /1 HTTP/1.1\r\nhost: web.test\r\n\r\nPOST /2 HTTP/1.1\r\nhost: web.test\r\ncontent-length: 2\r\n\r\nhiGET /3 HTTP/1.1\r\nhost: web.test\r\n\r\n",
        ],
        &[
            request("GET /1 HTTP/1.1", "", &[]),
            request("POST /2 HTTP/1.1", "hi", &[]),
            request("GET /3 HTTP/1.1", "", &[]),
        ],
    ),
    forwarded(
        "2.2",
        "an empty line after a body is not part of the next request",
        &[
            "POST /1 HTTP/1.1\r\nhost: web.test\r\ncontent-length: 2\r\n\r\nhi\r\nGET /2 HTTP/1.1\r\nhost: web.test\r\n\r\n",
        ],
        &[
            request("POST /1 HTTP/1.1", "hi", &[]),
            request("GET /2 HTTP/1.1", "", &[]),
        ],
    ),
    forwarded(
        "6.3",
        "a body that looks like a request stays a body",
        post!("content-length: 37", "GET /a HTTP/1.1\r\nhost: other.test\r\n\r\n"),
        &[request(
            "POST / HTTP/1.1",
            "GET /a HTTP/1.1\r\nhost: other.test\r\n\r\n",
            &[],
        )],
    ),
    forwarded(
        "6.3",
        "a GET with a body",
        &["GET / HTTP/1.1\r\nhost: web.test\r\ncontent-length: 2\r\n\r\nhiGET / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request("GET / HTTP/1.1", "hi", &[]), GET_REQUEST],
    ),
    forwarded(
        "7.6.1 of RFC 9110",
        "hop-by-hop headers of a request are removed",
        get!("connection: keep-alive, x-hop\r\nkeep-alive: timeout=5\r\nx-hop: 1\r\nx-end: 2"),
        &[request("GET / HTTP/1.1", "", &["x-end: 2", "!x-hop", "!keep-alive"])],
    ),
    forwarded(
        "7.6.1 of RFC 9110",
        "a Connection header cannot remove Host or content-length",
        post!("connection: host, content-length\r\ncontent-length: 5", "hello"),
        POST_HELLO_REQUESTS,
    ),
    forwarded(
        "9.6",
        "a request with \"connection: close\"",
        get!("connection: close"),
        &[GET_REQUEST],
    ),
    // Messages of applications
    response_case(
        "6.2",
        "a response with content-length",
        OK,
        response(&[200], "ok", &["content-length: 2"]),
    ),
    response_case(
        "7.1",
        "a chunked response with a trailer",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: a\r\n\r\n1;x\r\no\r\n1\r\nk\r\n0\r\na: b\r\n\r\n",
        response(&[200], "ok", &["a: b", "transfer-encoding: chunked"]),
    ),
    response_case(
        "6.3",
        "a response that ends with its connection",
        "HTTP/1.1 200 OK\r\n\r\nok",
        response(&[200], "ok", &[]),
    ),
    response_case(
        "2.3",
        "an HTTP/1.0 response",
        "HTTP/1.0 200 OK\r\n\r\nok",
        response(&[200], "ok", &[]),
    ),
    response_case(
        "6.3",
        "a response without content",
        "HTTP/1.1 204 No Content\r\na: b\r\n\r\n",
        response(&[204], "", &["a: b", "!content-length", "!transfer-encoding"]),
    ),
    Case {
        client_writes: &["HEAD / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        ..response_case(
            "6.3",
            "a response to HEAD",
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n",
            response(&[200], "", &["content-length: 2"]),
        )
    },
    response_case(
        "6.3",
        "a response with status 304 and content-length",
        "HTTP/1.1 304 Not Modified\r\ncontent-length: 2\r\n\r\n",
        response(&[304], "", &["content-length: 2"]),
    ),
    response_case(
        "15.2 of RFC 9110",
        "status 103 before the response",
        "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        response(&[103, 200], "ok", &[]),
    ),
    Case {
        client_writes: &["GET / HTTP/1.0\r\nhost: web.test\r\n\r\n"],
        ..response_case(
            "15.2 of RFC 9110",
            "status 103 is not sent to an HTTP/1.0 client",
            "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
            response(&[200], "ok", &[]),
        )
    },
    response_case(
        "15.2 of RFC 9110",
        "status 100 that the client did not request is removed",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        response(&[200], "ok", &[]),
    ),
    response_case(
        "5.1",
        "a response with a space before a colon",
        "HTTP/1.1 200 OK\r\ncontent-length : 2\r\n\r\nok",
        response(&[200], "ok", &["content-length: 2"]),
    ),
    response_case(
        "6.3",
        "a response with the same content-length twice",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nok",
        response(&[200], "ok", &["content-length: 2"]),
    ),
    response_case(
        "6.3",
        "a response with chunked and content-length",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        response(&[200], "ok", &["!content-length: 9"]),
    ),
    response_case(
        "7.6.1 of RFC 9110",
        "hop-by-hop headers of a response are removed",
        "HTTP/1.1 200 OK\r\nconnection: close, x-hop\r\nx-hop: 1\r\ncontent-length: 2\r\n\r\nok",
        response(&[200], "ok", &["!x-hop", "!connection"]),
    ),
    Case {
        client_writes: &["GET / HTTP/1.0\r\nhost: web.test\r\n\r\n"],
        ..response_case(
            "6.1",
            "a chunked response for an HTTP/1.0 client",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            response(&[200], "ok", &["!transfer-encoding"]),
        )
    },
    response_case(
        "6.3",
        "a response with two different content-lengths",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        BAD_GATEWAY,
    ),
    response_case(
        "6.3",
        "a response with a signed content-length",
        "HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nok",
        BAD_GATEWAY,
    ),
    response_case(
        "6.1",
        "a response with an unknown transfer coding",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: frob, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        BAD_GATEWAY,
    ),
    response_case(
        "4",
        "a response without a status code",
        "HTTP/1.1 OK\r\ncontent-length: 2\r\n\r\nok",
        BAD_GATEWAY,
    ),
    response_case(
        "4",
        "bytes that are not an HTTP response",
        "220 mail.test ESMTP\r\n\r\n",
        BAD_GATEWAY,
    ),
    response_case(
        "2.2",
        "a response with CR in a value",
        "HTTP/1.1 200 OK\r\na: b\rc\r\ncontent-length: 2\r\n\r\nok",
        BAD_GATEWAY,
    ),
    response_case(
        "5.5",
        "a response with NUL in a value",
        "HTTP/1.1 200 OK\r\na: b\0c\r\ncontent-length: 2\r\n\r\nok",
        BAD_GATEWAY,
    ),
    response_case(
        "8",
        "a response that ends within its headers",
        "HTTP/1.1 200 OK\r\ncontent-le",
        BAD_GATEWAY,
    ),
    response_case(
        "8",
        "a response shorter than its content-length",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok",
        Expected::TruncatedResponse,
    ),
    response_case(
        "8",
        "a response that ends within a chunk",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nok",
        Expected::TruncatedResponse,
    ),
    response_case(
        "8",
        "a response that ends before its last chunk",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        Expected::TruncatedResponse,
    ),
    response_case(
        "7.1",
        "a response with a bad chunk",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nokay\r\n0\r\n\r\n",
        Expected::TruncatedResponse,
    ),
];
