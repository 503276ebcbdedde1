//! The table: raw bytes of a client, or of an application, and what must come of them.
//!
//! Source: RFC 9112, by section; where it leaves a choice, ours, with the reason.

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub section: &'static str,
    pub name: &'static str,
    /// What the client sends, a piece a write.
    pub sends: &'static [&'static str],
    /// What the application answers each request with.
    pub answers: &'static str,
    pub wanted: Wanted,
}

/// What must come of a row.
#[derive(Clone, Copy, Debug)]
pub enum Wanted {
    /// The application gets these requests and no others, and the client a good answer to each.
    Requests(&'static [Request]),
    /// The application gets no whole request, neither this nor one that comes at once behind it, and the client one of these
    /// statuses and the end of its connection.
    Refused(&'static [u16]),
    /// The client gets this response.
    Response(Response),
    /// The client gets one of these statuses instead of what the application said.
    BadGateway(&'static [u16]),
    /// The client can tell that the response is cut.
    Cut,
}

/// A request at the application.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub line: &'static str,
    pub body: &'static str,
    /// Header lines that must be there, and names after a `!` that must not; trailers count.
    pub lines: &'static [&'static str],
}

/// A response at the client.
#[derive(Clone, Copy, Debug)]
pub struct Response {
    /// Every status, interim ones included.
    pub statuses: &'static [u16],
    pub body: &'static str,
    /// As in [`Request`], of the final response.
    pub lines: &'static [&'static str],
}

pub const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
const HOST: &str = "host: web.test";

const fn request(line: &'static str, body: &'static str, lines: &'static [&'static str]) -> Request {
    Request { line, body, lines }
}

/// A request that must arrive as it is.
const fn passes(
    section: &'static str,
    name: &'static str,
    sends: &'static [&'static str],
    requests: &'static [Request],
) -> Case {
    Case {
        section,
        name,
        sends,
        answers: OK,
        wanted: Wanted::Requests(requests),
    }
}

const fn refused(section: &'static str, name: &'static str, sends: &'static [&'static str]) -> Case {
    Case {
        section,
        name,
        sends,
        answers: OK,
        wanted: Wanted::Refused(&[400]),
    }
}

/// What comes of an answer to a plain GET.
const fn answers(section: &'static str, name: &'static str, answers: &'static str, wanted: Wanted) -> Case {
    Case {
        section,
        name,
        sends: GET,
        answers,
        wanted,
    }
}

const fn response(statuses: &'static [u16], body: &'static str, lines: &'static [&'static str]) -> Wanted {
    Wanted::Response(Response { statuses, body, lines })
}

const GET: &[&str] = &["GET / HTTP/1.1\r\nhost: web.test\r\n\r\n"];
const AT_ROOT: Request = request("GET / HTTP/1.1", "", &[HOST]);
const HELLO: &[Request] = &[request("POST / HTTP/1.1", "hello", &[HOST])];
const BAD_GATEWAY: Wanted = Wanted::BadGateway(&[502]);

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

/// All rows.
pub const CASES: &[Case] = &[
    // Lines
    passes("2.1", "a plain request", GET, &[AT_ROOT]),
    passes(
        "2.2",
        "an empty line before the request line is ignored",
        &["\r\nGET / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[AT_ROOT],
    ),
    passes(
        "2.2",
        "LF alone ends a line of a head",
        &["GET / HTTP/1.1\nhost: web.test\n\n"],
        &[AT_ROOT],
    ),
    refused("2.2", "CR within a header value", get!("a: b\rc")),
    refused(
        "2.2",
        "CR within the request line",
        &["GET /\r HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    refused(
        "2.2",
        "blanks between the request line and the headers",
        &["GET / HTTP/1.1\r\n host: web.test\r\n\r\n"],
    ),
    Case {
        wanted: Wanted::Refused(&[400, 505]),
        ..refused(
            "2.3",
            "another major version",
            &["GET / HTTP/3.0\r\nhost: web.test\r\n\r\n"],
        )
    },
    refused(
        "2.3",
        "a version in small letters",
        &["GET / http/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    passes(
        "2.3",
        "HTTP/1.0",
        &["GET / HTTP/1.0\r\nhost: web.test\r\n\r\n"],
        &[request("GET / HTTP/1.0", "", &[HOST])],
    ),
    // Request line
    refused(
        "3",
        "two blanks after the method",
        &["GET  / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    refused(
        "3",
        "a blank within the target",
        &["GET /a b HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    refused("3", "no target", &["GET HTTP/1.1\r\nhost: web.test\r\n\r\n"]),
    refused("3", "no version", &["GET /\r\nhost: web.test\r\n\r\n"]),
    passes(
        "3.1",
        "a method that nobody knows",
        &["FROB / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request("FROB / HTTP/1.1", "", &[HOST])],
    ),
    refused(
        "3.1",
        "a method that is no token",
        &["G(T / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    passes(
        "3.2.1",
        "a target with a query",
        &["GET /a/%2e%2E//b?c=d&e=%20 HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request("GET /a/%2e%2E//b?c=d&e=%20 HTTP/1.1", "", &[HOST])],
    ),
    // As browsers do, so that applications get them which get them without proxies.
    passes(
        "3.2.1",
        "characters of a target that no URI has are encoded",
        &["GET /a<b>?d=\"e\"&f=<g> HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request("GET /a%3Cb%3E?d=%22e%22&f=%3Cg%3E HTTP/1.1", "", &[HOST])],
    ),
    refused(
        "3.2.1",
        "a target with a fragment",
        &["GET /a#b HTTP/1.1\r\nhost: web.test\r\n\r\n"],
    ),
    passes(
        "3.2.2",
        "the host of an absolute target counts",
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
        "CONNECT with a body in chunks",
        &["CONNECT web.test:80 HTTP/1.1\r\nhost: web.test:80\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"],
    ),
    passes(
        "3.2.4",
        "OPTIONS of all",
        &["OPTIONS * HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request("OPTIONS * HTTP/1.1", "", &[HOST])],
    ),
    // Ours goes where it was sent, as without proxies: the application is who should refuse it.
    passes(
        "3.2",
        "no host",
        &["GET / HTTP/1.1\r\n\r\n"],
        &[request("GET / HTTP/1.1", "", &["!host"])],
    ),
    refused("3.2", "two hosts", get!("host: other.test")),
    refused("3.2", "a host twice", get!("host: web.test")),
    refused(
        "3.2",
        "a host with a path",
        &["GET / HTTP/1.1\r\nhost: web.test/a\r\n\r\n"],
    ),
    refused(
        "3.2",
        "a host with a user",
        &["GET / HTTP/1.1\r\nhost: me@web.test\r\n\r\n"],
    ),
    // Headers
    refused("5.1", "a blank before the colon", get!("a : b")),
    refused("5.1", "a blank within a name", get!("a b: c")),
    refused("5.1", "no name", get!(": b")),
    refused("5.1", "no colon", get!("ab")),
    refused("5.1", "a control character in a name", get!("a\u{1}: b")),
    refused(
        "5.1",
        "a control character in the first name",
        &["GET / HTTP/1.1\r\na\u{1}: b\r\nhost: web.test\r\n\r\n"],
    ),
    refused(
        "5.1",
        "no colon in the first line",
        &["GET / HTTP/1.1\r\nab\r\nhost: web.test\r\n\r\n"],
    ),
    refused("5.2", "a folded line", get!("a: b\r\n c")),
    refused("5.5", "NUL in a value", get!("a: b\0c")),
    passes(
        "5.1",
        "blanks around a value are not part of it",
        get!("a: \t b c \t\r\nd:e\r\nf:"),
        &[request("GET / HTTP/1.1", "", &["a: b c", "d: e", "f: "])],
    ),
    passes(
        "5.5",
        "bytes above ASCII in a value",
        get!("a: \u{e4}\u{f6}"),
        &[request("GET / HTTP/1.1", "", &["a: \u{e4}\u{f6}"])],
    ),
    passes(
        "5.3",
        "lines of one name stay in order",
        get!("a: 1\r\nb: 2\r\na: 3"),
        &[request("GET / HTTP/1.1", "", &["a: 1", "a: 3", "b: 2"])],
    ),
    // Framing
    passes("6.2", "a length", post!("content-length: 5", "hello"), HELLO),
    passes(
        "6.2",
        "a length with zeros",
        post!("content-length: 005", "hello"),
        HELLO,
    ),
    passes(
        "6.2",
        "a length of nothing",
        post!("content-length: 0", ""),
        &[request("POST / HTTP/1.1", "", &["content-length: 0"])],
    ),
    passes(
        "6.2",
        "a body in pieces",
        &[
            "POST / HTTP/1.1\r\nhost: web",
            ".test\r\ncontent-length: 5\r",
            "\n\r",
            "\nhe",
            "llo",
        ],
        HELLO,
    ),
    refused(
        "6.3",
        "the length twice",
        post!("content-length: 5\r\ncontent-length: 5", "hello"),
    ),
    refused(
        "6.3",
        "two lengths",
        post!("content-length: 5\r\ncontent-length: 6", "hello!"),
    ),
    refused("6.3", "a list of lengths", post!("content-length: 5, 5", "hello")),
    refused("6.3", "a positive length", post!("content-length: +5", "hello")),
    refused("6.3", "a negative length", post!("content-length: -5", "hello")),
    refused("6.3", "a hexadecimal length", post!("content-length: 0x5", "hello")),
    refused("6.3", "a length and something", post!("content-length: 5 5", "hello")),
    refused("6.3", "an empty length", post!("content-length:", "hello")),
    refused(
        "6.3",
        "a length that nobody can count",
        post!("content-length: 18446744073709551621", "hello"),
    ),
    refused(
        "6.3",
        "a length and chunks",
        post!(
            "content-length: 5\r\ntransfer-encoding: chunked",
            "5\r\nhello\r\n0\r\n\r\n"
        ),
    ),
    refused(
        "6.3",
        "chunks and a length",
        post!(
            "transfer-encoding: chunked\r\ncontent-length: 5",
            "5\r\nhello\r\n0\r\n\r\n"
        ),
    ),
    Case {
        wanted: Wanted::Refused(&[400, 501]),
        ..refused(
            "6.1",
            "a coding that nobody knows",
            post!("transfer-encoding: frob, chunked", "0\r\n\r\n"),
        )
    },
    Case {
        wanted: Wanted::Refused(&[400, 501]),
        ..refused(
            "6.1",
            "chunks that are not the last coding",
            post!("transfer-encoding: chunked, gzip", "0\r\n\r\n"),
        )
    },
    Case {
        wanted: Wanted::Refused(&[400, 501]),
        ..refused("6.1", "no chunks", post!("transfer-encoding: identity", "0\r\n\r\n"))
    },
    Case {
        wanted: Wanted::Refused(&[400, 501]),
        ..refused(
            "6.1",
            "something like chunks",
            post!("transfer-encoding: xchunked", "0\r\n\r\n"),
        )
    },
    Case {
        wanted: Wanted::Refused(&[400, 501]),
        ..refused(
            "6.1",
            "chunks behind a vertical tab",
            post!("transfer-encoding: \u{b}chunked", "0\r\n\r\n"),
        )
    },
    refused(
        "6.1",
        "chunks twice",
        post!("transfer-encoding: chunked, chunked", "0\r\n\r\n"),
    ),
    refused(
        "6.1",
        "chunks on two lines",
        post!("transfer-encoding: chunked\r\ntransfer-encoding: chunked", "0\r\n\r\n"),
    ),
    refused(
        "6.1",
        "chunks in HTTP/1.0",
        &["POST / HTTP/1.0\r\nhost: web.test\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"],
    ),
    // Chunks
    passes(
        "7.1",
        "chunks",
        post!("transfer-encoding: chunked", "2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"),
        HELLO,
    ),
    passes(
        "7.1",
        "chunks in capitals",
        post!("Transfer-Encoding: CHUNKED", "0005\r\nhello\r\n00\r\n\r\n"),
        HELLO,
    ),
    passes(
        "7.1",
        "chunks byte by byte",
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
        HELLO,
    ),
    passes(
        "7.1.1",
        "chunk extensions are dropped",
        post!("transfer-encoding: chunked", "5;a=b;c=\"d e\"\r\nhello\r\n0;f\r\n\r\n"),
        HELLO,
    ),
    passes(
        "7.1.2",
        "trailers",
        post!(
            "transfer-encoding: chunked\r\nte: trailers\r\ntrailer: a",
            "5\r\nhello\r\n0\r\na: b\r\n\r\n"
        ),
        &[request("POST / HTTP/1.1", "hello", &["a: b"])],
    ),
    passes(
        "7.1.2",
        "trailers that frame or address are dropped",
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
        "a chunk of a negative size",
        post!("transfer-encoding: chunked", "-5\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "a chunk size with a prefix",
        post!("transfer-encoding: chunked", "0x5\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "a chunk size after a blank",
        post!("transfer-encoding: chunked", " 5\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "a chunk without a size",
        post!("transfer-encoding: chunked", "\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "a chunk size that nobody can count",
        post!("transfer-encoding: chunked", "10000000000000005\r\nhello\r\n0\r\n\r\n"),
    ),
    refused(
        "7.1",
        "a chunk longer than it says",
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
        "a trailer that is no header",
        post!("transfer-encoding: chunked", "5\r\nhello\r\n0\r\na b\r\n\r\n"),
    ),
    refused(
        "7.1.2",
        "a trailer that ends with LF alone",
        post!("transfer-encoding: chunked", "5\r\nhello\r\n0\r\na: b\n\n"),
    ),
    // Connections
    passes(
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
    passes(
        "2.2",
        "an empty line behind a body is not part of the next request",
        &[
            "POST /1 HTTP/1.1\r\nhost: web.test\r\ncontent-length: 2\r\n\r\nhi\r\nGET /2 HTTP/1.1\r\nhost: web.test\r\n\r\n",
        ],
        &[
            request("POST /1 HTTP/1.1", "hi", &[]),
            request("GET /2 HTTP/1.1", "", &[]),
        ],
    ),
    passes(
        "6.3",
        "what looks like a request within a body is body",
        post!("content-length: 37", "GET /a HTTP/1.1\r\nhost: other.test\r\n\r\n"),
        &[request(
            "POST / HTTP/1.1",
            "GET /a HTTP/1.1\r\nhost: other.test\r\n\r\n",
            &[],
        )],
    ),
    passes(
        "6.3",
        "a GET with a body",
        &["GET / HTTP/1.1\r\nhost: web.test\r\ncontent-length: 2\r\n\r\nhiGET / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        &[request("GET / HTTP/1.1", "hi", &[]), AT_ROOT],
    ),
    passes(
        "7.6.1 of RFC 9110",
        "what concerns one connection stays there",
        get!("connection: keep-alive, x-hop\r\nkeep-alive: timeout=5\r\nx-hop: 1\r\nx-end: 2"),
        &[request("GET / HTTP/1.1", "", &["x-end: 2", "!x-hop", "!keep-alive"])],
    ),
    passes(
        "7.6.1 of RFC 9110",
        "who is addressed is not one connection's concern",
        post!("connection: host, content-length\r\ncontent-length: 5", "hello"),
        HELLO,
    ),
    passes(
        "9.6",
        "a client that asks to close",
        get!("connection: close"),
        &[AT_ROOT],
    ),
    // Messages of applications
    answers(
        "6.2",
        "a response with a length",
        OK,
        response(&[200], "ok", &["content-length: 2"]),
    ),
    answers(
        "7.1",
        "a response in chunks, with a trailer",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: a\r\n\r\n1;x\r\no\r\n1\r\nk\r\n0\r\na: b\r\n\r\n",
        response(&[200], "ok", &["a: b", "transfer-encoding: chunked"]),
    ),
    answers(
        "6.3",
        "a response up to the end of its connection",
        "HTTP/1.1 200 OK\r\n\r\nok",
        response(&[200], "ok", &[]),
    ),
    answers(
        "2.3",
        "a response of HTTP/1.0",
        "HTTP/1.0 200 OK\r\n\r\nok",
        response(&[200], "ok", &[]),
    ),
    answers(
        "6.3",
        "a response without content",
        "HTTP/1.1 204 No Content\r\na: b\r\n\r\n",
        response(&[204], "", &["a: b", "!content-length", "!transfer-encoding"]),
    ),
    Case {
        sends: &["HEAD / HTTP/1.1\r\nhost: web.test\r\n\r\n"],
        ..answers(
            "6.3",
            "a response to HEAD",
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n",
            response(&[200], "", &["content-length: 2"]),
        )
    },
    answers(
        "6.3",
        "a response that was not modified",
        "HTTP/1.1 304 Not Modified\r\ncontent-length: 2\r\n\r\n",
        response(&[304], "", &["content-length: 2"]),
    ),
    answers(
        "15.2 of RFC 9110",
        "a hint before the response",
        "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        response(&[103, 200], "ok", &[]),
    ),
    Case {
        sends: &["GET / HTTP/1.0\r\nhost: web.test\r\n\r\n"],
        ..answers(
            "15.2 of RFC 9110",
            "a hint, which clients of HTTP/1.0 do not know",
            "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
            response(&[200], "ok", &[]),
        )
    },
    answers(
        "15.2 of RFC 9110",
        "a permission that nobody waits for",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        response(&[200], "ok", &[]),
    ),
    answers(
        "5.1",
        "a response with a blank before a colon",
        "HTTP/1.1 200 OK\r\ncontent-length : 2\r\n\r\nok",
        response(&[200], "ok", &["content-length: 2"]),
    ),
    answers(
        "6.3",
        "a response with the length twice",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nok",
        response(&[200], "ok", &["content-length: 2"]),
    ),
    answers(
        "6.3",
        "a response with chunks and a length",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        response(&[200], "ok", &["!content-length: 9"]),
    ),
    answers(
        "7.6.1 of RFC 9110",
        "what concerns the application's connection stays there",
        "HTTP/1.1 200 OK\r\nconnection: close, x-hop\r\nx-hop: 1\r\ncontent-length: 2\r\n\r\nok",
        response(&[200], "ok", &["!x-hop", "!connection"]),
    ),
    Case {
        sends: &["GET / HTTP/1.0\r\nhost: web.test\r\n\r\n"],
        ..answers(
            "6.1",
            "chunks for a client of HTTP/1.0",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            response(&[200], "ok", &["!transfer-encoding"]),
        )
    },
    answers(
        "6.3",
        "a response with two lengths",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        BAD_GATEWAY,
    ),
    answers(
        "6.3",
        "a response with a signed length",
        "HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nok",
        BAD_GATEWAY,
    ),
    answers(
        "6.1",
        "a response in a coding that nobody knows",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: frob, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        BAD_GATEWAY,
    ),
    answers(
        "4",
        "a response with no status",
        "HTTP/1.1 OK\r\ncontent-length: 2\r\n\r\nok",
        BAD_GATEWAY,
    ),
    answers("4", "what is no response", "220 mail.test ESMTP\r\n\r\n", BAD_GATEWAY),
    answers(
        "2.2",
        "a response with CR in a value",
        "HTTP/1.1 200 OK\r\na: b\rc\r\ncontent-length: 2\r\n\r\nok",
        BAD_GATEWAY,
    ),
    answers(
        "5.5",
        "a response with NUL in a value",
        "HTTP/1.1 200 OK\r\na: b\0c\r\ncontent-length: 2\r\n\r\nok",
        BAD_GATEWAY,
    ),
    answers(
        "8",
        "a response that ends within its head",
        "HTTP/1.1 200 OK\r\ncontent-le",
        BAD_GATEWAY,
    ),
    answers(
        "8",
        "a response shorter than it says",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok",
        Wanted::Cut,
    ),
    answers(
        "8",
        "a response that ends within a chunk",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nok",
        Wanted::Cut,
    ),
    answers(
        "8",
        "a response that ends before its last chunk",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        Wanted::Cut,
    ),
    answers(
        "7.1",
        "a response with a bad chunk",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nokay\r\n0\r\n\r\n",
        Wanted::Cut,
    ),
];
