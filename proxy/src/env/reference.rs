//! The documentation of the variables, for `docs/reference/environment.md`.

/// A variable that [`load`](super::load) reads.
#[derive(Clone, Debug)]
pub struct Variable {
    /// With its prefix.
    pub name: String,
    /// The accepted values.
    pub values: &'static str,
    pub default: Fallback,
    pub meaning: &'static str,
}

/// The behaviour if a variable is not set.
#[derive(Clone, Copy, Debug)]
pub enum Fallback {
    /// The proxy does not start.
    Required,
    /// The variable has this value.
    Value(&'static str),
    /// A description of the behaviour.
    Text(&'static str),
}

/// A variable that exists once for inbound and once for outbound.
struct DirectionVariable {
    /// The name after the direction.
    name: &'static str,
    /// Whether the name begins with `TULLE_PROXY_`.
    is_tulle_only: bool,
    values: &'static str,
    inbound: Fallback,
    outbound: Fallback,
    meaning: &'static str,
}

/// All variables: those that exist once, then those that exist for each direction.
pub fn variables() -> Vec<Variable> {
    let both = DIRECTION_VARIABLES.iter().flat_map(|variable| {
        let prefix = match variable.is_tulle_only {
            true => super::TULLE_PREFIX,
            false => super::LINKERD_PREFIX,
        };
        [("INBOUND", variable.inbound), ("OUTBOUND", variable.outbound)].map(|(direction, default)| Variable {
            name: format!("{prefix}{direction}_{}", variable.name),
            values: variable.values,
            default,
            meaning: variable.meaning,
        })
    });
    let single = VARIABLES.iter().map(|&(name, values, default, meaning)| Variable {
        name: super::full_name(name),
        values,
        default,
        meaning,
    });
    let unprefixed = UNPREFIXED.iter().map(|&(name, values, default, meaning)| Variable {
        name: name.to_owned(),
        values,
        default,
        meaning,
    });
    single.chain(unprefixed).chain(both).collect()
}

/// Name, accepted values, default and meaning.
type Row = (&'static str, &'static str, Fallback, &'static str);

use Fallback::{Required, Text, Value};

const FLAG: &str = "`true` or `false`";
const DURATION: &str = "duration, such as `500ms`, `10s`, `1h`";
const NUMBER: &str = "number from 0";
const COUNT: &str = "number from 1";
const ADDR: &str = "`IP:PORT` or `[IPv6]:PORT`";
const SERVICE: &str = "`HOST:PORT` or `IP:PORT`";
const IDENTITY: &str = "DNS name or `spiffe://` URI";
const NONE: Fallback = Text("none");
const NO_LIMIT: Fallback = Text("no limit");
const LIBRARY: Fallback = Text("that of the HTTP/2 library");

/// Variables that exist once: for the process, or for one direction. The names of Linkerd's variables omit the prefix.
const VARIABLES: &[Row] = &[
    (
        "OUTBOUND_LISTEN_ADDR",
        ADDR,
        Value("127.0.0.1:4140"),
        "The address for connections of the application.",
    ),
    (
        "OUTBOUND_LISTEN_ADDRS",
        "one or two addresses with ports, separated by a comma",
        Text("the value of `LINKERD2_PROXY_OUTBOUND_LISTEN_ADDR`"),
        "The addresses for connections of the application, one for each IP family. It takes precedence over \
         `LINKERD2_PROXY_OUTBOUND_LISTEN_ADDR`.",
    ),
    (
        "INBOUND_LISTEN_ADDR",
        ADDR,
        Value("0.0.0.0:4143"),
        "The address for connections to the application.",
    ),
    (
        "ADMIN_LISTEN_ADDR",
        ADDR,
        Value("127.0.0.1:4191"),
        "The address for metrics, probes and debugging.",
    ),
    (
        "CONTROL_LISTEN_ADDR",
        ADDR,
        Value("0.0.0.0:4190"),
        "The address of the tap API. Without `LINKERD2_PROXY_TAP_SVC_NAME` the proxy does not listen there.",
    ),
    (
        super::EXPLICIT_LISTEN_ADDR,
        "loopback address and port",
        NONE,
        "An address where applications name their destination by HTTP CONNECT, HTTP requests in absolute form, or SOCKS5.",
    ),
    (
        super::INBOUND_MODE,
        "`redirect` or `tproxy`",
        Value("redirect"),
        "How connections reach the inbound listener. With `tproxy` the application sees the addresses of its clients; it needs \
         other redirect rules and the capability `NET_RAW`.",
    ),
    (
        "INGRESS_MODE",
        FLAG,
        Value("false"),
        "Whether requests with the header `l5d-dst-override` go to the Service that it names. Others go to their \
         original destination.",
    ),
    (
        super::BALANCER,
        "`peak-ewma` or `round-robin`",
        Value("peak-ewma"),
        "How an endpoint is chosen.",
    ),
    (
        "OUTBOUND_DISABLE_INFORMATIONAL_HEADERS",
        FLAG,
        Text("`false`; in ingress mode `true`"),
        "Whether responses to the application have no `l5d-proxy-error` and `l5d-proxy-cause`.",
    ),
    (
        "OUTBOUND_METRICS_HOSTNAME_LABELS",
        FLAG,
        Value("false"),
        "Whether metrics of routes have the label `hostname`. A route has at most 1000 of them, in ingress mode 64.",
    ),
    (
        "INBOUND_METRICS_AUTHORITY_LABELS",
        "`unsafe`",
        NONE,
        "Whether inbound metrics have the label `authority`. Clients choose its value; there are at most 1000 values \
         from meshed clients, and 64 from others.",
    ),
    ("OUTBOUND_TCP_QUEUE_CAPACITY", COUNT, NONE, NO_EFFECT),
    ("OUTBOUND_TCP_FAILFAST_TIMEOUT", DURATION, NONE, NO_EFFECT),
    ("INBOUND_HTTP_QUEUE_CAPACITY", COUNT, NONE, NO_EFFECT),
    ("INBOUND_HTTP_FAILFAST_TIMEOUT", DURATION, NONE, NO_EFFECT),
    (
        "OUTBOUND_HTTP_QUEUE_CAPACITY",
        COUNT,
        Value("10000"),
        "Maximum number of requests that wait for an endpoint of a backend, unless its policy permits more.",
    ),
    (
        "OUTBOUND_HTTP_FAILFAST_TIMEOUT",
        DURATION,
        Value("3s"),
        "Maximum time that a request waits for an endpoint, unless its policy specifies one.",
    ),
    (
        "MAX_IDLE_CONNS_PER_ENDPOINT",
        NUMBER,
        Value("10000"),
        "Maximum number of idle HTTP/1 connections of each worker to a port of the application.",
    ),
    (
        "OUTBOUND_MAX_IDLE_CONNS_PER_ENDPOINT",
        NUMBER,
        Value("10000"),
        "Maximum number of idle HTTP/1 connections of each worker to an endpoint.",
    ),
    (
        "HTTP2_INITIAL_STREAM_WINDOW_SIZE",
        WINDOW,
        Value("1048576"),
        "Initial flow-control window of a stream.",
    ),
    (
        "HTTP2_INITIAL_CONNECTION_WINDOW_SIZE",
        WINDOW,
        Value("4194304"),
        "Initial flow-control window of a connection.",
    ),
    (
        super::INBOUND_UNKNOWN_POLICY,
        "`refuse` or `default`",
        Value("refuse"),
        "What happens to connections to a port whose policy the control plane has not sent yet. `refuse`: they wait up to 3 s, \
         and then fail with the cause `policy_unknown`, or `discovery-denied` if the control plane denies it. `default`: the \
         policy of `LINKERD2_PROXY_INBOUND_DEFAULT_POLICY` applies, as in Linkerd's proxy.",
    ),
    (
        "INBOUND_DEFAULT_POLICY",
        "`deny`, `all-authenticated`, `all-unauthenticated`, `cluster-authenticated`, `cluster-unauthenticated` or `audit`",
        Value("all-unauthenticated"),
        "The policy of ports whose policy is not known, with `TULLE_INBOUND_UNKNOWN_POLICY=default`.",
    ),
    (
        "POLICY_CLUSTER_NETWORKS",
        "networks, separated by commas",
        NONE,
        "The networks of the cluster, for the default policies `cluster-*`. Also required for `audit`, which permits every network \
         nevertheless.",
    ),
    (
        "INBOUND_PORTS",
        PORTS,
        NONE,
        "Ports whose policy is watched from the start.",
    ),
    ("INBOUND_PORTS_REQUIRE_TLS", PORTS, NONE, NO_EFFECT),
    (
        "INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION",
        PORTS,
        NONE,
        "Ports that are opaque while their policy is not known: the proxy does not detect their protocol. Only with \
         `TULLE_INBOUND_UNKNOWN_POLICY=default`.",
    ),
    (
        "INBOUND_IPS",
        "IP addresses, separated by commas",
        NONE,
        "The addresses of the host or pod.",
    ),
    (
        "INBOUND_GATEWAY_SUFFIXES",
        "DNS suffixes, separated by commas",
        NONE,
        "The suffixes of the names that this proxy serves to other clusters as a gateway.",
    ),
    (
        "TAP_SVC_NAME",
        "identities, separated by commas",
        NONE,
        "The clients that may tap. Without it the proxy has no tap API.",
    ),
    (
        "SHUTDOWN_ENDPOINT_ENABLED",
        FLAG,
        Value("false"),
        "Whether `POST /shutdown` on the admin address stops the proxy.",
    ),
    (
        super::names::probes::VARIABLE,
        "JSON list",
        NONE,
        "Probes of the application that the proxy executes for the kubelet. The injector sets it.",
    ),
    (
        "CORES",
        COUNT,
        NONE,
        "Older name of `LINKERD2_PROXY_CORES_MIN`. It has no effect if that is set.",
    ),
    (
        "CORES_MIN",
        COUNT,
        Value("1"),
        "Minimum number of worker threads, and their number if neither `LINKERD2_PROXY_CORES_MAX` nor the ratio is set; never more \
         than there are CPUs.",
    ),
    (
        "CORES_MAX",
        COUNT,
        NONE,
        "Number of worker threads, unless `LINKERD2_PROXY_CORES_MIN` is higher; never more than there are CPUs.",
    ),
    (
        "CORES_MAX_RATIO",
        "number above 0, up to 1",
        NONE,
        "Number of worker threads, as a fraction of the CPUs. Without effect if `LINKERD2_PROXY_CORES_MAX` is set.",
    ),
    (
        "LOG",
        "directives of `tracing`, such as `info` or `warn,tulle=debug`",
        Value(super::DEFAULT_LOG),
        "The log filter.",
    ),
    (
        "LOG_FORMAT",
        "`plain` or `json`",
        Value("plain"),
        "The format of log lines.",
    ),
    (
        "ACCESS_LOG",
        "`apache` or `json`",
        NONE,
        "Writes an access log in this format.",
    ),
    (
        super::ACCESS_LOG_DIRECTIONS,
        "`inbound`, `outbound` or `both`",
        Value("inbound"),
        "Which requests are in the access log. Requests that are refused because their head is invalid, late or too long have no line; see `tulle_failures_total`.",
    ),
    (
        "SHUTDOWN_GRACE_PERIOD",
        DURATION,
        Value("2m"),
        "Maximum duration of the drain, in which requests end. It begins at most 10 s after SIGTERM.",
    ),
    (
        "METRICS_RETAIN_IDLE",
        DURATION,
        Value("10m"),
        "How long metric series stay after their connection, endpoint or route is gone.",
    ),
    (
        super::MEMORY_LIMIT,
        "bytes",
        Text("the limit of the control group, if there is one"),
        "The memory that the proxy can use. At 90 %, it starts to refuse requests and connections (cause `memory-short`); below 85 %, it accepts them again.",
    ),
    (
        "IDENTITY_DISABLED",
        "none",
        NONE,
        "Not supported: the proxy does not start if it is set.",
    ),
    (
        "IDENTITY_LOCAL_NAME",
        IDENTITY,
        Required,
        "The identity of this proxy, which is also its TLS server name. Not used if `LINKERD2_PROXY_IDENTITY_SERVER_ID` is set.",
    ),
    (
        "IDENTITY_SERVER_ID",
        IDENTITY,
        NONE,
        "The identity of this proxy where it differs from its TLS server name. \
         `LINKERD2_PROXY_IDENTITY_SERVER_NAME` has to be set too.",
    ),
    (
        "IDENTITY_SERVER_NAME",
        "DNS name",
        NONE,
        "The TLS server name of this proxy. `LINKERD2_PROXY_IDENTITY_SERVER_ID` has to be set too.",
    ),
    (
        "IDENTITY_TRUST_ANCHORS",
        "PEM certificates, or the path of a file of them",
        Required,
        "The trust anchors. A file is watched for changes. Optional with a SPIFFE Workload API.",
    ),
    (
        "IDENTITY_TOKEN_FILE",
        "path",
        Required,
        "The service account token for the identity service. Not used with a SPIFFE Workload API.",
    ),
    (
        "IDENTITY_DIR",
        "path",
        NONE,
        "The directory of `key.p8` and `csr.der`. It must exist. Without the variable, or if the directory has neither file, the \
         proxy creates its own key. Not used with a SPIFFE Workload API.",
    ),
    (
        "IDENTITY_MIN_REFRESH",
        DURATION,
        Value("10s"),
        "Minimum time between certificates.",
    ),
    (
        "IDENTITY_MAX_REFRESH",
        DURATION,
        Value("1d"),
        "Maximum time between certificates.",
    ),
    (
        "IDENTITY_SPIRE_WORKLOAD_API_ADDRESS",
        "`unix:///PATH`",
        NONE,
        "The socket of a SPIFFE Workload API, which certifies this proxy instead of the identity service.",
    ),
    (
        "IDENTITY_SPIRE_SOCKET",
        "`unix:///PATH`",
        NONE,
        "Older name of `LINKERD2_PROXY_IDENTITY_SPIRE_WORKLOAD_API_ADDRESS`.",
    ),
    (
        "IDENTITY_SVC_ADDR",
        SERVICE,
        Required,
        "The identity service. Not used with a SPIFFE Workload API.",
    ),
    (
        "IDENTITY_SVC_NAME",
        IDENTITY,
        Text(NAME_DEFAULT),
        "The identity of the identity service.",
    ),
    ("DESTINATION_SVC_ADDR", SERVICE, Required, "The destination service."),
    (
        "DESTINATION_SVC_NAME",
        IDENTITY,
        Text(NAME_DEFAULT),
        "The identity of the destination service.",
    ),
    ("POLICY_SVC_ADDR", SERVICE, Required, "The policy service."),
    (
        "POLICY_SVC_NAME",
        IDENTITY,
        Text(NAME_DEFAULT),
        "The identity of the policy service.",
    ),
    (
        "POLICY_WORKLOAD",
        "text",
        Required,
        "The workload, as the policy service knows it. The injector sets it.",
    ),
    (
        "DESTINATION_CONTEXT",
        "text",
        NONE,
        "The workload, as the destination service knows it. The injector sets it.",
    ),
    (
        "DESTINATION_PROFILE_SUFFIXES",
        "DNS suffixes, separated by commas; `.` for all names",
        Value("svc.cluster.local."),
        "The suffixes of the names that are looked up at the destination service.",
    ),
    (
        "DESTINATION_PROFILE_NETWORKS",
        "networks, separated by commas",
        NONE,
        "The networks whose addresses are looked up at the destination service.",
    ),
    (
        "DESTINATION_PROFILE_INITIAL_TIMEOUT",
        DURATION,
        Value("500ms"),
        "Maximum time that an inbound request waits for the ServiceProfile of its name.",
    ),
    (
        "CONTROL_STREAM_INITIAL_TIMEOUT",
        DURATION,
        NO_LIMIT,
        "Maximum time to the first message of a stream of the control plane. The stream is then opened again.",
    ),
    (
        "CONTROL_STREAM_IDLE_TIMEOUT",
        DURATION,
        NO_LIMIT,
        "Maximum time between messages of a stream of the control plane.",
    ),
    (
        "CONTROL_STREAM_LIFETIME",
        DURATION,
        NO_LIMIT,
        "Maximum lifetime of a stream of the control plane.",
    ),
    (
        "DNS_MIN_TTL",
        DURATION,
        Text("`5s`"),
        "Minimum time that a DNS result is used.",
    ),
    (
        "DNS_MAX_TTL",
        DURATION,
        Text("the TTL of the record"),
        "Maximum time that a DNS result is used.",
    ),
    (
        "TRACE_COLLECTOR_SVC_ADDR",
        SERVICE,
        NONE,
        "An OpenTelemetry collector (OTLP over gRPC). Without it no spans are exported.",
    ),
    (
        "TRACE_COLLECTOR_SVC_NAME",
        IDENTITY,
        Text(NAME_DEFAULT),
        "The identity of the collector.",
    ),
    (
        super::TRACE_SAMPLING,
        "number from 0 to 1",
        Value("0"),
        "The fraction of requests without a trace context that start a trace.",
    ),
    (
        "TRACE_SERVICE_NAME",
        "text",
        Value("linkerd-proxy"),
        "The resource attribute `service.name`.",
    ),
    (
        "TRACE_ATTRIBUTES_PATH",
        "path",
        NONE,
        "A file of pod labels, one `name=\"value\"` on each line, which become resource attributes.",
    ),
    (
        "TRACE_EXTRA_ATTRIBUTES",
        "one `NAME=VALUE` on each line",
        NONE,
        "Additional resource attributes.",
    ),
];

/// Variables of other systems.
const UNPREFIXED: &[Row] = &[
    (
        "OTEL_RESOURCE_ATTRIBUTES",
        "`NAME=VALUE`, separated by commas",
        NONE,
        "Additional resource attributes. They override those of `LINKERD2_PROXY_TRACE_EXTRA_ATTRIBUTES`.",
    ),
    ("HOSTNAME", "text", NONE, "The resource attribute `host.name`."),
];

const DIRECTION_VARIABLES: &[DirectionVariable] = &[
    direction(
        "DETECT_TIMEOUT",
        DURATION,
        [Value("10s"), Value("10s")],
        "Maximum time to detect the protocol of a connection. The outbound variable also limits discovery (to at most 10 s). \
         The inbound variable also limits the wait for the ClientHello and, separately, the rest of the TLS handshake.",
    ),
    direction(
        "ACCEPT_KEEPALIVE",
        DURATION,
        [NONE, NONE],
        "Idle time after which TCP keep-alive probes an accepted connection, and the time between probes (at most 75 s). Linux counts whole seconds from 1 to 32767; other values become the nearest of these.",
    ),
    direction(
        "ACCEPT_USER_TIMEOUT",
        DURATION,
        [NONE, NONE],
        "`TCP_USER_TIMEOUT` of accepted connections.",
    ),
    direction(
        "TCP_LISTEN_BACKLOG",
        NUMBER,
        [Text("`4096`"), Text("`4096`")],
        "Length of the accept queue.",
    ),
    direction(
        "CONNECT_TIMEOUT",
        DURATION,
        [Text("`4s`; shorter times count as `4s`"), Value("1s")],
        "Maximum time for TCP and TLS together, for a new connection.",
    ),
    direction(
        "CONNECT_KEEPALIVE",
        DURATION,
        [NONE, NONE],
        "Idle time after which TCP keep-alive probes a connection that the proxy has dialled, and the time between probes (at most 75 s). Linux counts whole seconds from 1 to 32767; other values become the nearest of these.",
    ),
    direction(
        "CONNECT_USER_TIMEOUT",
        DURATION,
        [NONE, NONE],
        "`TCP_USER_TIMEOUT` of connections of the proxy.",
    ),
    direction(
        "CONNECT_EXP_BACKOFF_MIN",
        DURATION,
        [Value("100ms"), Value("100ms")],
        "First delay before the control plane is dialled again, or a stream of it opened again. Must be set together with the \
         maximum.",
    ),
    direction(
        "CONNECT_EXP_BACKOFF_MAX",
        DURATION,
        [Value("10s"), Value("60s")],
        "Maximum delay before a stream of the control plane is opened again, and before the control plane is dialled again; for \
         the latter, a value above 5 s counts as 5 s. Must be set together with the first delay.",
    ),
    direction(
        "CONNECT_EXP_BACKOFF_JITTER",
        "number from 0 to 100",
        [Value("0.1"), Value("0.1")],
        "Random addition to these delays, as a fraction of them.",
    ),
    direction(
        "HTTP1_CONNECTION_POOL_IDLE_TIMEOUT",
        DURATION,
        [Value("3s"), Value("3s")],
        "How long an idle HTTP/1 connection to an endpoint is kept.",
    ),
    direction(
        "MAX_IN_FLIGHT",
        COUNT,
        [Value("100000"), Value("100000")],
        "Maximum number of concurrent HTTP requests. Further ones fail.",
    ),
    direction(
        "DISCOVERY_IDLE_TIMEOUT",
        DURATION,
        [Value("90s"), Value("5s")],
        "How long unused results of discovery are kept.",
    ),
    direction(
        "SERVER_HTTP2_INITIAL_STREAM_WINDOW_SIZE",
        WINDOW,
        [Text(STREAM_WINDOW), Text(STREAM_WINDOW)],
        "Initial flow-control window of a stream, for servers. Must be set together with that of the connection.",
    ),
    direction(
        "SERVER_HTTP2_INITIAL_CONNECTION_WINDOW_SIZE",
        WINDOW,
        [Text(CONNECTION_WINDOW), Text(CONNECTION_WINDOW)],
        "Initial flow-control window of a connection, for servers. Must be set together with that of a stream.",
    ),
    direction("SERVER_HTTP2_ADAPTIVE_FLOW_CONTROL", FLAG, [NONE, NONE], NO_EFFECT),
    direction(
        "SERVER_HTTP2_KEEP_ALIVE_INTERVAL",
        DURATION,
        [NONE, NONE],
        "Interval of HTTP/2 pings to clients. Must be set together with the timeout.",
    ),
    direction(
        "SERVER_HTTP2_KEEP_ALIVE_TIMEOUT",
        DURATION,
        [NONE, NONE],
        "Maximum time for the response to such a ping. Must be set together with the interval.",
    ),
    direction(
        "SERVER_HTTP2_MAX_CONCURRENT_STREAMS",
        NUMBER,
        [Value("16384"), Value("16384")],
        "Maximum number of concurrent requests of a connection. Inbound, clients without an identity have at most 1024, and \
         unauthorized ones 16.",
    ),
    direction(
        "SERVER_HTTP2_MAX_FRAME_SIZE",
        "16384 to 16777215",
        [Text(MAX_FRAME_SIZE), Text(MAX_FRAME_SIZE)],
        "Maximum size of an HTTP/2 frame from clients.",
    ),
    direction(
        "SERVER_HTTP2_MAX_HEADER_LIST_SIZE",
        NUMBER,
        [Text(HEADER_LIST), Text(HEADER_LIST)],
        "Maximum size of the header list of an HTTP/2 request, in bytes.",
    ),
    direction(
        "SERVER_HTTP2_MAX_PENDING_ACCEPT_RESET_STREAMS",
        NUMBER,
        [LIBRARY, LIBRARY],
        "Maximum number of streams that a client has reset and the proxy has not accepted.",
    ),
    direction(
        "SERVER_HTTP2_MAX_SEND_BUF_SIZE",
        COUNT,
        [LIBRARY, LIBRARY],
        "Maximum number of buffered bytes of each stream to clients.",
    ),
    tulle_only(
        "HTTP_MAX_HEAD_SIZE",
        COUNT,
        "65536",
        "Maximum size of an HTTP/1 request head, in bytes. Longer ones, and those of more than 4096 lines, fail with the cause \
         `head-too-long`. By default, header lists of HTTP/2 requests can be four times as long.",
    ),
    tulle_only(
        "HTTP_HEAD_TIMEOUT",
        DURATION,
        "30s",
        "In HTTP/1, maximum time of a request head from its first byte (cause `head-timeout`); in HTTP/2, maximum time for the \
         first request of a connection, and for each header block.",
    ),
    tulle_only(
        "HTTP_IDLE_TIMEOUT",
        DURATION,
        "1h",
        "Maximum time of a connection without a request, and, while a request \
         body is received, maximum time without bytes in either direction (cause `body-timeout`).",
    ),
    tulle_only(
        "RESEND",
        "`never`, `safe` or `idempotent`",
        "idempotent",
        "Which requests are sent again if their connection was lost before the response, although the server may have processed \
         them: `safe` are `GET`, `HEAD`, `OPTIONS` and `TRACE`; `idempotent` adds `PUT` and `DELETE`. Requests that the server \
         has not processed are always sent again.",
    ),
];

const fn direction(
    name: &'static str,
    values: &'static str,
    [inbound, outbound]: [Fallback; 2],
    meaning: &'static str,
) -> DirectionVariable {
    DirectionVariable {
        name,
        is_tulle_only: false,
        values,
        inbound,
        outbound,
        meaning,
    }
}

const fn tulle_only(
    name: &'static str,
    values: &'static str,
    default: &'static str,
    meaning: &'static str,
) -> DirectionVariable {
    DirectionVariable {
        name,
        is_tulle_only: true,
        values,
        inbound: Value(default),
        outbound: Value(default),
        meaning,
    }
}

const WINDOW: &str = "1 to 2147483647 bytes";
const PORTS: &str = "ports and ranges, such as `25,8000-8100`";
const NAME_DEFAULT: &str = "required, unless the address is loopback";
const STREAM_WINDOW: &str = "the value of `LINKERD2_PROXY_HTTP2_INITIAL_STREAM_WINDOW_SIZE`";
const CONNECTION_WINDOW: &str = "the value of `LINKERD2_PROXY_HTTP2_INITIAL_CONNECTION_WINDOW_SIZE`";
const MAX_FRAME_SIZE: &str = "`65536` for clients with TLS, for others that of the HTTP/2 library";
const HEADER_LIST: &str = "four times `TULLE_PROXY_…_HTTP_MAX_HEAD_SIZE`";
const NO_EFFECT: &str = "Accepted for compatibility; it has no effect.";

#[cfg(test)]
mod tests;
