//! HTTP headers between proxies, and between proxies and applications.

use http::HeaderName;

/// A header with its documentation. Texts are Markdown, for a cell of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub name: &'static str,
    /// What sets it and what reads it. A proxy that reads a header also removes it, unless the meaning says otherwise. Headers of
    /// traces are kept.
    pub direction: &'static str,
    /// The accepted values.
    pub values: &'static str,
    pub meaning: &'static str,
}

/// Declares the constants and [`ALL`] from one table, so that there is no name without documentation.
macro_rules! headers {
    ($($constant:ident = $name:literal {
        direction: $direction:expr,
        values: $values:expr,
        meaning: $meaning:literal,
    })*) => {
        $(
            #[doc = $meaning]
            pub const $constant: HeaderName = HeaderName::from_static($name);
        )*

        /// All headers, in the order of the documentation.
        pub const ALL: &[Header] = &[$(
            Header {
                name: $name,
                direction: $direction,
                values: $values,
                meaning: $meaning,
            },
        )*];
    };
}

headers! {
    L5D_CLIENT_ID = "l5d-client-id" {
        direction: "from the server's proxy to its application",
        values: "an identity such as `web.shop.serviceaccount.identity.linkerd.cluster.local`, or a SPIFFE ID",
        meaning: "The mTLS identity of the client. The inbound proxy sets it and removes values that clients send, in requests that it handles as HTTP; bytes that it does not detect as HTTP pass unchanged.",
    }
    L5D_DST_OVERRIDE = "l5d-dst-override" {
        direction: APPLICATION_TO_PROXY,
        values: "a DNS name, with a port if it is not 80, such as `web.shop.svc.cluster.local:8080`",
        meaning: "The destination of the request, in ingress mode. Without ingress mode it has no effect and is \
                  forwarded.",
    }
    L5D_REQUIRE_ID = "l5d-require-id" {
        direction: APPLICATION_TO_PROXY,
        values: "an identity",
        meaning: "The server identity that the application requires. Endpoints without it do not get the request.",
    }

    // Timeouts and retries
    L5D_TIMEOUT = "l5d-timeout" {
        direction: APPLICATION_TO_PROXY_IF_ENABLED,
        values: TIMEOUT,
        meaning: "The timeout of this request and its response.",
    }
    L5D_REQUEST_TIMEOUT = "l5d-request-timeout" {
        direction: APPLICATION_TO_PROXY_IF_ENABLED,
        values: TIMEOUT,
        meaning: "Older name of `l5d-timeout`. If a request has both, `l5d-request-timeout` applies.",
    }
    L5D_RESPONSE_TIMEOUT = "l5d-response-timeout" {
        direction: APPLICATION_TO_PROXY_IF_ENABLED,
        values: TIMEOUT,
        meaning: "The timeout from the end of this request to the end of its response.",
    }
    L5D_RETRY_HTTP = "l5d-retry-http" {
        direction: APPLICATION_TO_PROXY_IF_ENABLED,
        values: "HTTP statuses, ranges of statuses, `5xx` and `gateway-error` (502 to 504), such as \
                 `gateway-error,429`",
        meaning: "The HTTP statuses on which this request is retried.",
    }
    L5D_RETRY_GRPC = "l5d-retry-grpc" {
        direction: APPLICATION_TO_PROXY_IF_ENABLED,
        values: "a list of `cancelled`, `deadline-exceeded`, `internal`, `resource-exhausted` and `unavailable`, such \
                 as `internal,unavailable`",
        meaning: "The gRPC statuses on which this request is retried.",
    }
    L5D_RETRY_LIMIT = "l5d-retry-limit" {
        direction: APPLICATION_TO_PROXY_IF_ENABLED,
        values: "a number",
        meaning: "The maximum number of retries of this request.",
    }
    L5D_RETRY_TIMEOUT = "l5d-retry-timeout" {
        direction: APPLICATION_TO_PROXY_IF_ENABLED,
        values: TIMEOUT,
        meaning: "The timeout of an attempt, after which this request is retried.",
    }

    // Errors
    L5D_PROXY_ERROR = "l5d-proxy-error" {
        direction: ERROR_RESPONSE,
        values: "a text",
        meaning: "The error text of a response that a proxy generates. If the server's proxy sent it, the client's proxy \
                  logs the text and removes the header.",
    }
    L5D_PROXY_CAUSE = "l5d-proxy-cause" {
        direction: ERROR_RESPONSE,
        values: "a code with parameters, such as `no-endpoints; direction=outbound; hop=IDENTITY; target=10.0.0.7:80`",
        meaning: "The cause of a response that a proxy generates, as a stable code with parameters. If the server's \
                  proxy sent it, the client's proxy forwards it. Not in Linkerd.",
    }
    L5D_PROXY_CONNECTION = "l5d-proxy-connection" {
        direction: ERROR_RESPONSE,
        values: "`close`",
        meaning: "Tells the client's proxy to close the connection of its application after this response.",
    }

    // Between proxies
    L5D_ORIG_PROTO = "l5d-orig-proto" {
        direction: "from the client's proxy to the server's proxy, and back in the response",
        values: "`HTTP/1.1` or `HTTP/1.0`; in a request, `; absolute-form` can follow",
        meaning: "The version and URI form of an HTTP/1 request that is carried over HTTP/2. From clients without an \
                  identity it has no effect.",
    }
    L5D_DST_CANONICAL = "l5d-dst-canonical" {
        direction: "from the client's proxy to the server's proxy",
        values: "a name and a port, such as `web.shop.svc.cluster.local:80`",
        meaning: "The logical name of the destination, for ServiceProfiles. The server's proxy forwards it, and \
                  ignores it from clients without an identity.",
    }

    // Traces
    TRACEPARENT = "traceparent" {
        direction: IN_REQUESTS,
        values: "ids in hexadecimal, as in W3C Trace Context",
        meaning: "The trace and the parent span of a request. A proxy that exports traces replaces the parent by its own span.",
    }
    TRACESTATE = "tracestate" {
        direction: IN_REQUESTS,
        values: "as in W3C Trace Context",
        meaning: "Kept and exported with `traceparent`; removed if `traceparent` is invalid.",
    }
    GRPC_TRACE = "grpc-trace-bin" {
        direction: IN_REQUESTS,
        values: "base64",
        meaning: "As `traceparent`, in the form of gRPC with OpenCensus.",
    }
    B3_TRACE = "x-b3-traceid" {
        direction: IN_REQUESTS,
        values: "32 or 16 hexadecimal digits",
        meaning: "The trace of a request, in the form of Zipkin. It is used if neither `traceparent` nor `grpc-trace-bin` is valid.",
    }
    B3_SPAN = "x-b3-spanid" {
        direction: IN_REQUESTS,
        values: "16 hexadecimal digits",
        meaning: "The parent span, with `x-b3-traceid`. A proxy that exports traces replaces it by its own span.",
    }
    B3_PARENT = "x-b3-parentspanid" {
        direction: IN_REQUESTS,
        values: "16 hexadecimal digits",
        meaning: "The parent of the span in `x-b3-spanid`.",
    }
    B3_SAMPLED = "x-b3-sampled" {
        direction: IN_REQUESTS,
        values: "`1` or `true`, `0` or `false`",
        meaning: "Whether spans of the trace are exported, with `x-b3-traceid`.",
    }
    B3_FLAGS = "x-b3-flags" {
        direction: IN_REQUESTS,
        values: "`1`",
        meaning: "Debug: spans of the trace are exported, whatever `x-b3-sampled` says.",
    }

    // Gateways
    FORWARDED = "forwarded" {
        direction: "from a gateway to the next proxy",
        values: "`by=IDENTITY;for=IDENTITY;host=NAME;proto=https` (RFC 7239)",
        meaning: "A gateway appends itself, and refuses requests that it has appended itself to before (cause `gateway-loop`).",
    }
}

/// Headers that can contain credentials: taps show their names without their values.
pub const CREDENTIALS: [HeaderName; 4] = [
    http::header::AUTHORIZATION,
    http::header::PROXY_AUTHORIZATION,
    http::header::COOKIE,
    http::header::SET_COOKIE,
];

const IN_REQUESTS: &str = "in requests, from any client to any server";
const APPLICATION_TO_PROXY: &str = "from the application to its proxy";
const APPLICATION_TO_PROXY_IF_ENABLED: &str =
    "from the application to its proxy, if the policy service has the flag `--allow-l5d-request-headers`";
const ERROR_RESPONSE: &str = "to the proxy's own application (not in ingress mode), and to proxies of meshed clients";
const TIMEOUT: &str = "digits and one of `ms`, `s`, `m`, `h`, `d`, such as `100ms`";
