//! Why requests and connections fail: the codes of `l5d-proxy-cause`, what each means, and what to do.
//!
//! A code once told stays what it is: scripts and dashboards read it.

use std::fmt::Write as _;

/// Whose it is to mend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Of who sent the request.
    Client,
    /// Of the workload that it was for.
    Server,
    /// Of who wrote the policies.
    Policy,
    /// Of who runs the mesh.
    Mesh,
}

/// One reason.
#[derive(Debug)]
pub struct Cause {
    pub code: &'static str,
    pub whose: Whose,
    /// Status of HTTP and name of gRPC's, as clients are told; nothing where there are none.
    pub answers: &'static str,
    pub meaning: &'static str,
    pub advice: &'static str,
}

impl Whose {
    pub fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
            Self::Policy => "policy",
            Self::Mesh => "mesh",
        }
    }
}

/// The reason behind a code, or behind all of an `l5d-proxy-cause` header.
pub fn find(text: &str) -> Option<&'static Cause> {
    let code = text.split([';', ':']).next().unwrap_or_default().trim();
    ALL.iter().find(|cause| cause.code == code)
}

/// `docs/errors.md`.
pub fn markdown() -> String {
    let mut page = HEAD.to_owned();
    for cause in ALL {
        let Cause {
            code,
            whose,
            answers,
            meaning,
            advice,
        } = cause;
        let answers = match answers.is_empty() {
            true => "the connection is closed",
            false => answers,
        };
        let _ = write!(
            page,
            "\n## {code}\n\n*{}; {answers}*\n\n{meaning}\n\n**What to do.** {advice}\n",
            whose.name()
        );
    }
    page
}

const HEAD: &str = "\
<!-- Written by core/src/causes.rs, where changes belong: TULLE_WRITE_DOCS=1 cargo nextest run -p tulle-core causes -->
# Why a request failed

Every response that a proxy makes itself says so in headers:

```text
l5d-proxy-error: no endpoints
l5d-proxy-cause: no-endpoints; direction=outbound; hop=web.shop.serviceaccount.identity.linkerd.cluster.local; target=10.0.0.7:80
```

- `l5d-proxy-error` is for people, as Linkerd words it where it has words for it.
- `l5d-proxy-cause` begins with a code that stays what it is. After it come, between semicolons, which side of which proxy gave up
  (`direction`, `hop`) and what it wanted to reach (`target`), and what else there is to know.
- Clients of gRPC get the status in `grpc-status`, and `grpc-message` with the same words.
- `tulle explain` says what is written here, from a code, the header, or a whole response.
- What the proxy of a peer answers comes without `l5d-proxy-error`: one's own proxy takes that out, as Linkerd's does, and logs it
  at `debug`. `l5d-proxy-cause` stays; `direction=inbound` and `hop` tell whose it is.
- Clients without an identity are told a status and nothing more; but a stream of gRPC that breaks off says why in its trailers.

Failures are counted in `tulle_failures_total{direction,cause}`, those of connections that carry no HTTP as well.

The log has a line of level `info` for what inbound policy refuses and for TLS handshakes of clients that fail: one a minute for each
client address and kind, of 256 such pairs at most, so that nobody can fill it. `left_out` is how many lines were not written in the
minute before; the counter has all of them.
";

const fn cause(
    code: &'static str,
    whose: Whose,
    answers: &'static str,
    meaning: &'static str,
    advice: &'static str,
) -> Cause {
    Cause {
        code,
        whose,
        answers,
        meaning,
        advice,
    }
}

/// All of them, by whose they are.
pub const ALL: &[Cause] = &[
    cause(
        "bad-request",
        Whose::Client,
        "400, INVALID_ARGUMENT",
        "The request breaks the rules of HTTP or in HTTP/1 has more than 128 trailers, or its body broke off. A request of HTTP/2 needs an authority, in `:authority` or in `host`; where it has both, they must be the same. In a target of HTTP/1, `<`, `>`, a double quote, a backquote and bytes that are not UTF-8 are percent-encoded as browsers encode them (counted in `tulle_http_encoded_targets_total`); blanks, control characters and `#` are refused. In HTTP/2 such a target resets its stream with `PROTOCOL_ERROR`.",
        "`l5d-proxy-error` says which rule. Compare what the client sends with RFC 9112; a client that gave up on an upload is seen like this, too.",
    ),
    cause(
        "ambiguous_path",
        Whose::Client,
        "400, INVALID_ARGUMENT",
        "Rules of the port differ by path, and applications could take the path of the request for another one: it has an encoded slash or backslash (`%2f`, `%5c`), a backslash, a semicolon, a dot segment (`.`, `..`, encoded or not), repeated slashes, or a percent sign that encodes nothing.",
        "Send the path in its plain form. Other encoded characters do not matter: such rules see a path in which `%41` is `A` and `%c3` is `%C3`; the application gets it as it was sent. Ports without HTTPRoutes and GRPCRoutes that look at the path take any.",
    ),
    cause(
        "head-too-long",
        Whose::Client,
        "431, RESOURCE_EXHAUSTED",
        "Request line and headers are longer than 64 KiB, or have more than 4096 lines; in HTTP/2 their list is longer than 256 KiB, each header with 32 bytes more than its name and value have. Who sends twice as much in HTTP/2 is told 431 and nothing else, or loses the connection, and is not counted.",
        "Send fewer cookies and headers, or raise `TULLE_PROXY_INBOUND_HTTP1_MAX_HEAD_SIZE` or its outbound twin.",
    ),
    cause(
        "head-timeout",
        Whose::Client,
        "408, DEADLINE_EXCEEDED",
        "The client did not finish its request line and headers in 30 seconds. Where the protocol of a connection has to be found out, less than a request line (`P`, `PO`, `GET ` alone) is waited for until the detection timeout (10 seconds) has passed; from then on it counts as HTTP/1 where it has a method, and else as bytes.",
        "Look for a client that stalls, or for one that does it on purpose; `TULLE_PROXY_INBOUND_HTTP1_HEAD_TIMEOUT` is the limit.",
    ),
    cause(
        "body-timeout",
        Whose::Client,
        "408, DEADLINE_EXCEEDED",
        "The client began to send a body, and then nothing more of it came for an hour, in which nothing of the response was sent either; in HTTP/1 and HTTP/2. Where the response had begun, it is cut.",
        "Look for a client that stalls, or for one that does it on purpose; `TULLE_PROXY_INBOUND_HTTP1_IDLE_TIMEOUT` or its outbound twin is the limit.",
    ),
    cause(
        "no-extended-connect",
        Whose::Client,
        "501, UNIMPLEMENTED",
        "The client asked for another protocol by an extended CONNECT of HTTP/2 (RFC 8441), and `target` has not announced that it takes such.",
        "Let the application announce it (`SETTINGS_ENABLE_CONNECT_PROTOCOL`), or the client ask for a WebSocket by HTTP/1.1.",
    ),
    cause(
        "client-left",
        Whose::Client,
        "400, INVALID_ARGUMENT",
        "The client closed its connection or reset its stream before it had its answer. A client of HTTP/1 that only ends its own side of the connection, after a complete request, is answered; where it is on another host and speaks no TLS, it cannot be told from one that has closed, and its request goes on to its end.",
        "Compare the client's timeout with how long the server takes; a cancelled request is no failure of the server.",
    ),
    cause(
        "detect-timeout",
        Whose::Client,
        "the connection is closed; one without TLS is reset",
        "The client began to speak TLS and did not go on, or said nothing where something had to be said.",
        "Mark ports on which the server speaks first as opaque (`config.linkerd.io/opaque-ports`); else look for the client that stalls.",
    ),
    cause(
        "no-server-name",
        Whose::Client,
        "",
        "Routes go by the server name of TLS here, and the client sent none.",
        "Let the client send SNI (`openssl s_client -servername`), or use a route that does not look at it.",
    ),
    cause(
        "connect-refused",
        Whose::Server,
        "502, UNAVAILABLE; a byte stream is reset",
        "Nobody listens at the address, or the network says that it cannot be reached.",
        "Check that the application runs and listens on the port and address that its pod or Service names (`ss -ltn` in the pod), and that its readiness probe tells the truth.",
    ),
    cause(
        "connect-timeout",
        Whose::Server,
        "504, DEADLINE_EXCEEDED; a byte stream is reset",
        "Dialling took longer than the connect timeout: packets are dropped, or the listener's queue is full.",
        "Look for network policies, firewalls, and an application that is too busy to accept; a sidecar tells 502 of its own application.",
    ),
    cause(
        "connection-closed",
        Whose::Server,
        "502, UNAVAILABLE",
        "The connection ended before a response, and the request could not be sent again safely: as it may have been processed, it is sent again only if its method is idempotent, or as `TULLE_PROXY_OUTBOUND_RESEND` and its inbound twin say.",
        "Look for crashes and restarts of the server, and for keep-alive timeouts shorter than the client's.",
    ),
    cause(
        "stream-reset",
        Whose::Server,
        "502, UNAVAILABLE",
        "The server reset the HTTP/2 stream, or broke HTTP/2's rules. A stream that the server says it has not processed (`REFUSED_STREAM`, or above the last one of a `GOAWAY`) is sent again on a new connection; where its body is too long to be kept, clients of HTTP/2 see the stream reset with `REFUSED_STREAM`.",
        "The server's log has the reason; `l5d-proxy-error` has the code that it sent.",
    ),
    cause(
        "no-free-stream",
        Whose::Server,
        "503, UNAVAILABLE",
        "`target` permits so few HTTP/2 streams at a time (`SETTINGS_MAX_CONCURRENT_STREAMS`) that none was free for three seconds: on 64 connections for each worker of the proxy, or on one where it permits no stream at all.",
        "Let the server permit more streams, or add replicas; look for streams that never end.",
    ),
    cause(
        "bad-response",
        Whose::Server,
        "502, UNAVAILABLE",
        "The response breaks the rules of HTTP, in HTTP/1 has a head of more than 64 KiB (`its head is too long`), or ended before its length.",
        "`l5d-proxy-error` says how. Ask the server without a mesh (`curl --raw`) and compare.",
    ),
    cause(
        "deadline",
        Whose::Server,
        "504, DEADLINE_EXCEEDED",
        "The request, with all its tries, took longer than its route allows.",
        "Find out what is slow (`response_latency_ms` of the sidecars), or raise `timeouts.request` of the route, `timeout.linkerd.io/request`, or the profile's `timeout`.",
    ),
    cause(
        "response-timeout",
        Whose::Server,
        "504, DEADLINE_EXCEEDED",
        "The response took longer than its route allows once the request was sent.",
        "Find out what is slow, or raise `timeout.linkerd.io/response` or `retry.linkerd.io/timeout`.",
    ),
    cause(
        "idle-timeout",
        Whose::Server,
        "504, DEADLINE_EXCEEDED",
        "No data passed in either direction for longer than the route allows.",
        "Streams that are silent for long need keep-alive messages, or a larger `timeout.linkerd.io/idle`.",
    ),
    cause(
        "no-endpoints",
        Whose::Server,
        "503, UNAVAILABLE",
        "The Service has no ready endpoint at all.",
        "`kubectl get endpointslices` shows why: a selector that matches nothing, pods that are not ready, a port that they do not have.",
    ),
    cause(
        "endpoints-unready",
        Whose::Server,
        "503, UNAVAILABLE; 504, DEADLINE_EXCEEDED for those who waited",
        "There are endpoints, and none of them could be reached; `after` is why one of them could not, where that has been tried.",
        "Mend what `after` names: `connect-refused` and `connect-timeout` are of the pods behind the Service, `tls-identity-mismatch`, `tls-handshake` and their like of the mesh. Without it, look for these in the same proxy's `tulle_failures_total`.",
    ),
    cause(
        "breaker-open",
        Whose::Server,
        "503, UNAVAILABLE; 504, DEADLINE_EXCEEDED for those who waited",
        "Endpoints were taken out because their answers failed, and the others cannot be reached either.",
        "Look at the errors of the service itself; `balancer.linkerd.io/failure-accrual*` says how many failures it takes, and for how long.",
    ),
    cause(
        "body-too-large-to-retry",
        Whose::Server,
        "as its `after`",
        "The request was not processed and would have been sent to another endpoint, but its body was too long to be kept.",
        "Mend what `after` names. Bodies up to 64 KiB are kept, or as many bytes as the route says.",
    ),
    cause(
        "no-route",
        Whose::Policy,
        "404, NOT_FOUND",
        "No route of the Service, or of the Server, matches the request.",
        "Compare method, path, host and headers with the routes (`kubectl get httproutes,grpcroutes`); a route without matches catches the rest.",
    ),
    cause(
        "target-forbidden",
        Whose::Client,
        "403, PERMISSION_DENIED; a byte stream is reset",
        "The request names a target that no client is led to: an address of loopback, link-local or multicast, or, in `l5d-dst-override` of an ingress, a name of none of the suffixes that have profiles. Or an inbound connection is for an address that is not one of `LINKERD2_PROXY_INBOUND_IPS`.",
        "Dial such an address directly if it is meant. Names of other suffixes are allowed by `LINKERD2_PROXY_DESTINATION_PROFILE_SUFFIXES` of the ingress (`proxy.enableExternalProfiles` for all).",
    ),
    cause(
        "gateway-domain",
        Whose::Mesh,
        "404, NOT_FOUND",
        "A gateway was asked for a name that is none of those it serves.",
        "`hop` is the gateway. Add the name's suffix to its `LINKERD2_PROXY_INBOUND_GATEWAY_SUFFIXES`, or look for who sends it there.",
    ),
    cause(
        "gateway-loop",
        Whose::Mesh,
        "508, ABORTED",
        "A request came to a gateway that it had passed before, as its `forwarded` headers tell, or that it was sent by.",
        "Look at where the gateway's cluster has the name lead to: probably back to where the request came from.",
    ),
    cause(
        "no-backend",
        Whose::Policy,
        "502 or 503, UNAVAILABLE",
        "The route has no backends, all of them have the weight 0, or the one that was drawn does not exist.",
        "The route's status names the backend that could not be resolved.",
    ),
    cause(
        "policy_unknown",
        Whose::Mesh,
        "503, UNAVAILABLE",
        "The control plane has not told who may use this port, so nobody may. A connection waits 3 seconds for the policy. Then it is refused: with this answer if its client has begun to speak HTTP, otherwise it is reset. A policy once known stays in force without a control plane.",
        "Check `linkerd-destination` (its port 8090) and the way to it: `tulle check`, and `control plane is not reachable` in the proxy's log. Ports in `LINKERD2_PROXY_INBOUND_PORTS`, which the injector sets to the declared ones, are asked for when the proxy starts. `TULLE_INBOUND_UNKNOWN_POLICY=default` judges such connections by the environment's default instead, as Linkerd's proxy does.",
    ),
    cause(
        "invalid-policy",
        Whose::Policy,
        "500, INTERNAL",
        "A policy or profile cannot be understood and none before it could, or it has a filter that nobody knows; until it is mended nothing passes.",
        "The proxy's log and `/debug/destinations` name the field; `tulle check` and the status of routes and policies help as well. Where an earlier one was understood, it stays in force; `tulle_unreadable_updates_total` counts those that are not.",
    ),
    cause(
        "not-http",
        Whose::Policy,
        "the connection is reset",
        "The policy of the port has rules for HTTP (routes, rate limits, or a Server whose `proxyProtocol` is HTTP or gRPC), and the connection is something else, or silent until the detection timeout, or became one of bytes before the policy had them.",
        "If the port carries other protocols too, give them a port of their own; if none of it is HTTP, remove the routes and limits, or let the Server say `proxyProtocol: opaque`.",
    ),
    cause(
        "policy-denied",
        Whose::Policy,
        "403, PERMISSION_DENIED; a byte stream is reset",
        "No authorization permits this client. After the code stands the server or default policy that decided; `why` is what was missing: `network`, `no-tls`, `no-identity`, `identity`.",
        "`no-tls` and `no-identity`: mesh the client, or permit clients without identity. Else add the client to the AuthorizationPolicy (`tulle diagnostics policy` shows what is in force).",
    ),
    cause(
        "forbidden",
        Whose::Policy,
        "",
        "A route lets no connection pass: traffic to the outside that an EgressNetwork denies, most often.",
        "Allow it by a route of the EgressNetwork, or by its `trafficPolicy: Allow`.",
    ),
    cause(
        "rate-limited",
        Whose::Policy,
        "429, RESOURCE_EXHAUSTED",
        "The client, or all of them together, asked more often than the HTTPLocalRateLimitPolicy allows.",
        "`limit` names the policy. Raise it, add an override for this client, or let the client slow down.",
    ),
    cause(
        "redirect",
        Whose::Policy,
        "as the filter says",
        "A filter of the route answers with a redirect.",
        "Nothing: this is what the route says.",
    ),
    cause(
        "injected",
        Whose::Policy,
        "as the filter says",
        "A filter of the route answers with a failure.",
        "Nothing, if it is meant; else remove the filter. A backend that does not exist, or traffic to the outside that is denied, is answered so, too; and so is a rule or a backend of a route that asks for something that no proxy does (URLRewrite, RequestMirror, `retry`, `sessionPersistence` and others) or that cannot be read, a route that its Server cannot have (of a kind that the `proxyProtocol` does not have, or with a port or a section in its `parentRef`), the rate limit of a gRPC Server, and whatever an HTTPLocalRateLimitPolicy or an EgressNetwork that cannot be read is for: 500, or 13 of gRPC, with the route and the cause as the message, which its status (`Accepted: False`) repeats.",
    ),
    cause(
        "tls-identity-mismatch",
        Whose::Mesh,
        "502, UNAVAILABLE",
        "The endpoint has another identity than discovery says, or than the client demands with `l5d-require-id`.",
        "Often an address that has passed on to another pod: it mends itself in seconds. If it lasts, compare service accounts and trust domains.",
    ),
    cause(
        "tls-untrusted",
        Whose::Mesh,
        "502, UNAVAILABLE",
        "The other side's certificate does not come from our trust anchors.",
        "Let the bundles overlap while a root is replaced: `tulle check --proxy` shows who still has the old one.",
    ),
    cause(
        "tls-expired",
        Whose::Mesh,
        "502, UNAVAILABLE",
        "A certificate has expired, or is not valid yet.",
        "Check the clocks, and why the proxy got no new certificate: the log of its identity, and `linkerd-identity`.",
    ),
    cause(
        "tls-refused",
        Whose::Mesh,
        "502, UNAVAILABLE",
        "The other side ended the TLS handshake: it does not accept our certificate.",
        "Its log has the reason; most often it trusts other roots than ours.",
    ),
    cause(
        "tls-handshake",
        Whose::Mesh,
        "502, UNAVAILABLE",
        "The TLS handshake failed, or the certificate of the peer cannot be used: as when the issuer of one workload outside of the cluster signed it for another.",
        "The proxy's log names the reason; `openssl s_client -connect` shows what listens there.",
    ),
    cause(
        "bad-transport-header",
        Whose::Mesh,
        "",
        "A connection to port 4143 did not begin as peers begin it.",
        "Only proxies speak there; look for a client that dials the port directly.",
    ),
    cause(
        "loop",
        Whose::Mesh,
        "502, UNAVAILABLE",
        "The request would come back to the proxy itself.",
        "A Service or route that names the proxy's own port (4140, 4143) is the usual reason.",
    ),
    cause(
        "discovery-timeout",
        Whose::Mesh,
        "503, UNAVAILABLE",
        "The control plane did not say where the destination is.",
        "Check `linkerd-destination` and the way to it (`tulle check`); what is known already goes on working.",
    ),
    cause(
        "name-unresolved",
        Whose::Client,
        "503, UNAVAILABLE",
        "The name that a request or connection asks for is of no service of the mesh, and DNS tells no address of it that can be reached from here.",
        "Check the name; one of a Service is `<name>.<namespace>.svc.<cluster domain>`. The proxy asks the servers of `/etc/resolv.conf`; addresses of this machine's loopback do not count.",
    ),
    cause(
        "queue-full",
        Whose::Mesh,
        "503, UNAVAILABLE",
        "As many requests wait for an endpoint of the service as may: `LINKERD2_PROXY_OUTBOUND_HTTP_QUEUE_CAPACITY` (10,000), or what its policy says if that is more.",
        "As for `endpoints-unready`: the waiting is not the cause.",
    ),
    cause(
        "overload",
        Whose::Mesh,
        "503, UNAVAILABLE",
        "The proxy has as many requests in flight as it may (`LINKERD2_PROXY_INBOUND_MAX_IN_FLIGHT`, or its outbound twin); or clients name more targets at a time than it follows (4096); or they have more connections open, in one direction, than a quarter of the files that the proxy may open (`ulimit -n`). Then a client address that has fewer connections than another takes a place of the one that has the most: its longest silent connection is closed, which `tulle_connections_closed_total{cause=\"place_taken\"}` counts. Tunnels (WebSocket, CONNECT) count as what they were before. A client address that has the most itself keeps the connections that it uses: those that have never carried a byte are closed for new ones, and where there are none, new ones are reset. Or the requests in flight on one HTTP/2 connection have header lists of more than 16 MiB, and further ones are reset with `REFUSED_STREAM`.",
        "Find out why they take so long, or who opens so many, add replicas, or raise the limit.",
    ),
    cause(
        "memory-short",
        Whose::Mesh,
        "503, UNAVAILABLE",
        "The proxy uses nine tenths of the memory that it may have (`TULLE_PROXY_MEMORY_LIMIT`, or the limit of its container), and refuses new requests and connections before the kernel ends it.",
        "Give the proxy more memory (`config.linkerd.io/proxy-memory-limit`), or add replicas. `tulle_memory_limit_bytes` and `process_resident_memory_bytes` tell how much there is and is used.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_found_in_headers() {
        let code = |text| find(text).map(|cause| cause.code);
        assert_eq!(code("deadline"), Some("deadline"));
        assert_eq!(code("policy-denied:Server/web; why=no-tls"), Some("policy-denied"));
        assert_eq!(code("no-endpoints; direction=outbound"), Some("no-endpoints"));
        assert_eq!(code("unheard-of"), None);
    }

    #[test]
    fn the_page_is_what_is_here() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/errors.md");
        if std::env::var_os("TULLE_WRITE_DOCS").is_some() {
            std::fs::write(path, markdown()).unwrap();
        }
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            page == markdown(),
            "docs/errors.md is old; TULLE_WRITE_DOCS=1 cargo nextest run -p tulle-core causes writes it anew"
        );
    }

    #[test]
    fn each_code_is_there_once() {
        let mut codes: Vec<_> = ALL.iter().map(|cause| cause.code).collect();
        codes.sort_unstable();
        let all = codes.len();
        codes.dedup();
        assert_eq!(codes.len(), all);
    }
}
