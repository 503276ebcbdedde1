//! Failure causes of requests and connections: the codes of `l5d-proxy-cause`, their meaning, and what to do.
//!
//! A published code does not change, because scripts and dashboards depend on it.

use std::fmt::Write as _;

/// The party that can fix the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Responsible {
    /// The sender of the request.
    Client,
    /// The owner of the workload that receives the request.
    Server,
    /// The author of the policies.
    Policy,
    /// The operator of the mesh.
    Mesh,
}

/// One failure cause.
#[derive(Debug)]
pub struct Cause {
    pub code: &'static str,
    pub responsible: Responsible,
    /// HTTP status and gRPC status name of the response, or how the connection ends.
    pub statuses: &'static str,
    /// Markdown on one line, because `tulle explain` lists it in a table.
    pub meaning: &'static str,
    /// Markdown.
    pub advice: &'static str,
}

impl Responsible {
    pub fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
            Self::Policy => "policy",
            Self::Mesh => "mesh",
        }
    }
}

/// Finds a cause by its code, or by the value of an `l5d-proxy-cause` header.
pub fn find(text: &str) -> Option<&'static Cause> {
    let code = text.split([';', ':']).next().unwrap_or_default().trim();
    ALL.iter().find(|cause| cause.code == code)
}

/// Renders `docs/reference/errors.md`.
pub fn markdown() -> String {
    let mut page = PAGE_HEADER.to_owned();
    for cause in ALL {
        let Cause {
            code,
            responsible,
            statuses,
            meaning,
            advice,
        } = cause;
        let _ = write!(
            page,
            "\n## {code}\n\n*{}; {statuses}*\n\n{meaning}\n\n**What to do.** {advice}\n",
            responsible.name()
        );
    }
    page
}

const PAGE_HEADER: &str = "\
<!-- Generated from core/src/causes.rs; change that file, then run: ./run docs -->
# Why a request failed

Every response that a proxy generates has these headers, if its client has an identity or, outside ingress mode, is the proxy's own
application:

```text
l5d-proxy-error: no endpoints
l5d-proxy-cause: no-endpoints; direction=outbound; hop=web.shop.serviceaccount.identity.linkerd.cluster.local; target=10.0.0.7:80
```

- `l5d-proxy-error` is for people; where Linkerd has a text for the error, it is the same.
- `l5d-proxy-cause` starts with a code that does not change between versions. After the codes `policy-denied` and `forbidden`, a
  colon and the policy that decided can follow. Then there are parameters, separated by semicolons: the side (`direction`) and the
  proxy (`hop`) that failed, the address that it tried to reach (`target`), and further details.
- The line below each heading of this page starts with the party that can fix the failure: `client` is the sender of the request,
  `server` the owner of the workload that was requested, `policy` the author of the policies, and `mesh` the operator of the mesh.
  Then it has the HTTP status and the gRPC status of the response.
- gRPC clients receive the status in `grpc-status`, and the same text in `grpc-message`.
- `tulle explain` prints the text of this page for a code, a header, or a whole response;
  [debug-a-request.md](../how-to/debug-a-request.md) says how to find the cause where there is no response.
- In responses from a peer's proxy, the local proxy removes `l5d-proxy-error`, as Linkerd's does, and logs it at level `debug`.
  `l5d-proxy-cause` stays; `direction=inbound` and `hop` identify the other proxy.
- Clients without an identity receive only a status. A gRPC stream that is aborted has the reason in its trailers, however.

`tulle_failures_total{direction,cause}` counts failures, including those of opaque connections.

A connection to the inbound or outbound port that the proxy refuses or stops without a response ends with a TCP reset. After a failed
TLS handshake, the reset follows a TLS alert. A connection that must begin with HTTP/2 and begins with other bytes is closed.

The log has a line of level `info` for each refusal by inbound policy and for each failed TLS handshake of a client. Clients
cannot fill the log: for each pair of client address and kind of failure, the proxy writes at most one line per minute, and in
a minute it writes lines for at most 256 pairs. The same limit applies to refused outbound connections and failed outbound
handshakes, for each pair of target and cause; and to requests and connections that only the authorization `audit` permits, for
each pair of client address and port.
The first line of a minute has the field `suppressed_all_kinds`: the number of lines that were suppressed in the previous
minute, of all kinds that share the limit. A minute begins with its first line, so the previous one may have ended long before.
The metrics count the failures of suppressed lines, too.
";

const fn cause(
    code: &'static str,
    responsible: Responsible,
    statuses: &'static str,
    meaning: &'static str,
    advice: &'static str,
) -> Cause {
    Cause {
        code,
        responsible,
        statuses,
        meaning,
        advice,
    }
}

/// All causes, in the order of the documentation. `ambiguous_path` and `policy_unknown` have an underscore although the others
/// have hyphens: they are older, and a code does not change.
pub const ALL: &[Cause] = &[
    cause(
        "bad-request",
        Responsible::Client,
        "400, INVALID_ARGUMENT",
        "The request violates HTTP, has more than 128 trailers (HTTP/1), or its body ended early, for example because the client aborted an upload. An HTTP/2 request needs an authority, in `:authority` or in `host`; if it has both, they must be equal. Request targets in HTTP/1: `<`, `>`, a double quote, a backquote and bytes that are not UTF-8 are percent-encoded as browsers encode them (counted in `tulle_http_encoded_targets_total`); spaces, control characters and `#` are refused. Request targets in HTTP/2: nothing is encoded, and a character that is not permitted there resets the stream with `PROTOCOL_ERROR`.",
        "`l5d-proxy-error` names the rule. Compare the request with RFC 9112.",
    ),
    cause(
        "ambiguous_path",
        Responsible::Client,
        "400, INVALID_ARGUMENT",
        "The port, or the EgressNetwork of the destination, has rules that depend on the path, and applications may interpret the path of the request in different ways. It contains an encoded slash or backslash (`%2f`, `%5c`), a backslash, a semicolon, a dot segment (`.`, `..`, encoded or not), repeated slashes, or a percent sign that encodes nothing.",
        "Send the path in its normal form. Other encoded characters are no problem: for the rules, `%41` is `A` and `%c3` is `%C3`; the application receives the path unchanged. Ports and EgressNetworks without HTTPRoutes and GRPCRoutes that match on the path accept every path, and so do Services.",
    ),
    cause(
        "head-too-long",
        Responsible::Client,
        "431, RESOURCE_EXHAUSTED",
        "The request line and headers are longer than 64 KiB, or have more than 4096 lines. In HTTP/2, the header list is longer than 256 KiB, where each header counts as its name, its value and 32 bytes. An HTTP/2 client that sends more than twice the limit receives the status 431 without a cause, or the connection is closed; such requests are not counted.",
        "Send fewer cookies and headers, or raise `TULLE_PROXY_INBOUND_HTTP_MAX_HEAD_SIZE` or its outbound counterpart.",
    ),
    cause(
        "head-timeout",
        Responsible::Client,
        "408, DEADLINE_EXCEEDED",
        "The client did not send the complete request line and headers within 30 seconds. During protocol detection, the proxy waits for the rest of an incomplete request line (`P`, `PO`, `GET ` alone) until the detection timeout (10 seconds). Then the connection counts as HTTP/1 if it starts with a method, and as opaque otherwise. If a connection must begin with HTTP/2, its preface has a limit of 10 seconds; if the client has sent a part of it by then, the connection is reset. A header block of HTTP/2 has the same limit as a head of HTTP/1; if it is exceeded, the connection ends with GOAWAY.",
        "Look for a client that stalls, or that does so on purpose. `TULLE_PROXY_INBOUND_HTTP_HEAD_TIMEOUT` or its outbound counterpart is the limit.",
    ),
    cause(
        "body-timeout",
        Responsible::Client,
        "408, DEADLINE_EXCEEDED",
        "The client started to send a body and then sent nothing for an hour, while no part of the response was sent either (HTTP/1 and HTTP/2). If the response had started, it is aborted.",
        "Look for a client that stalls, or that does so on purpose. `TULLE_PROXY_INBOUND_HTTP_IDLE_TIMEOUT` or its outbound counterpart is the limit.",
    ),
    cause(
        "no-extended-connect",
        Responsible::Client,
        "501, UNIMPLEMENTED",
        "The client requested another protocol with an extended CONNECT of HTTP/2 (RFC 8441), and `target` has not announced support for it. Or all streams for it are in use: this proxy uses at most half of the streams that `target` permits on each connection.",
        "Let the application announce support for extended CONNECT (`SETTINGS_ENABLE_CONNECT_PROTOCOL`), or let the client request a WebSocket over HTTP/1.1. If it does, raise `SETTINGS_MAX_CONCURRENT_STREAMS` of the application.",
    ),
    cause(
        "client-left",
        Responsible::Client,
        "400, INVALID_ARGUMENT",
        "The client closed its connection or reset its stream before the response. An HTTP/1 client that only shuts down its sending side after a complete request gets its response. If such a client is on another host and does not use TLS, the proxy cannot distinguish it from one that has closed the connection, so its request continues.",
        "Compare the client's timeout with the response time of the server. A cancelled request is not a failure of the server.",
    ),
    cause(
        "detect-timeout",
        Responsible::Client,
        "the connection is reset",
        "The client sent nothing although the proxy needed its first bytes, or it started a TLS handshake and did not complete it. Each of the two has the limit `LINKERD2_PROXY_INBOUND_DETECT_TIMEOUT` (10 seconds). A client of HTTP/2 over TLS that sends nothing after the handshake is not counted, and its connection is closed without a reset.",
        "Mark ports on which the server sends first as opaque (`config.linkerd.io/opaque-ports`); otherwise look for the client that stalls.",
    ),
    cause(
        "no-server-name",
        Responsible::Client,
        "the connection is reset",
        "The routes match on the server name of TLS, and the client sent none.",
        "Let the client send SNI (`openssl s_client -servername`), or use a route that does not match on it.",
    ),
    cause(
        "connect-refused",
        Responsible::Server,
        "502, UNAVAILABLE; an opaque connection is reset",
        "No process listens at the address, or the network reports that it is unreachable. The client's proxy has tried other endpoints, up to three, or as many as could be dialled within a second if all of them refused. A byte stream to the application of this pod is refused after half a second, in case the application is about to listen.",
        "Check that the application runs and listens on the port and address that its pod or Service names (`ss -ltn` in the pod), and that its readiness probe is correct.",
    ),
    cause(
        "connect-timeout",
        Responsible::Server,
        "504, DEADLINE_EXCEEDED; 502, UNAVAILABLE if the address is that of the sidecar's own application; an opaque connection is reset",
        "The connection attempt exceeded the connect timeout: packets are dropped, or the accept queue of the listener is full.",
        "Look for network policies, firewalls, and an application that is too busy to accept.",
    ),
    cause(
        "connection-closed",
        Responsible::Server,
        "502, UNAVAILABLE",
        "The connection ended before a response, and the request could not be sent again safely. Because the server may have processed it, it is sent again only if its method is idempotent, or as `TULLE_PROXY_OUTBOUND_RESEND` and its inbound counterpart define.",
        "Look for crashes and restarts of the server, and for keep-alive timeouts that are shorter than the client's.",
    ),
    cause(
        "stream-reset",
        Responsible::Server,
        "502, UNAVAILABLE",
        "The server reset the HTTP/2 stream, or violated HTTP/2. A stream that the server reports as not processed (`REFUSED_STREAM`, or above the last one of a `GOAWAY`) is sent again on a new connection. If the body of the request is too long to be buffered, it is not sent again, and an HTTP/2 client receives a reset with `REFUSED_STREAM`.",
        "The server's log contains the reason; `l5d-proxy-error` has the code that the server sent.",
    ),
    cause(
        "no-free-stream",
        Responsible::Server,
        "503, UNAVAILABLE",
        "No HTTP/2 stream to `target` was free for three seconds, because `target` limits concurrent streams (`SETTINGS_MAX_CONCURRENT_STREAMS`). Each worker of the proxy opens up to 64 connections to `target`; if `target` permits no streams (limit 0), only one.",
        "Let the server permit more streams, or add replicas. Look for streams that never end.",
    ),
    cause(
        "bad-response",
        Responsible::Server,
        "502, UNAVAILABLE",
        "The response violates HTTP, has a head of more than 64 KiB in HTTP/1 (`the response head is too long`), or ended before its declared length.",
        "`l5d-proxy-error` names the violation. Request the server without a mesh (`curl --raw`) and compare.",
    ),
    cause(
        "deadline",
        Responsible::Server,
        "504, DEADLINE_EXCEEDED",
        "The request, including all attempts, exceeded the timeout of its route.",
        "Find out what is slow (`response_latency_ms` of the sidecars), or raise `timeouts.request` of the route, `timeout.linkerd.io/request`, or the `timeout` of the ServiceProfile.",
    ),
    cause(
        "response-timeout",
        Responsible::Server,
        "504, DEADLINE_EXCEEDED",
        "After the request was sent, the response exceeded the timeout of its route.",
        "Find out what is slow, or raise `timeout.linkerd.io/response` or `retry.linkerd.io/timeout`.",
    ),
    cause(
        "idle-timeout",
        Responsible::Server,
        "504, DEADLINE_EXCEEDED",
        "After the response had begun, no data was sent in either direction for longer than the idle timeout of the route. The response is aborted.",
        "Streams with long pauses need keep-alive messages, or a larger `timeout.linkerd.io/idle`.",
    ),
    cause(
        "no-endpoints",
        Responsible::Server,
        "503, UNAVAILABLE",
        "The Service has no ready endpoint.",
        "`kubectl get endpointslices` shows why: a selector that matches nothing, pods that are not ready, or a port that the pods do not have.",
    ),
    cause(
        "endpoints-unready",
        Responsible::Server,
        "503, UNAVAILABLE; 504, DEADLINE_EXCEEDED if the request waited in the queue",
        "The Service has endpoints, but the proxy cannot connect to any of them. `after` is the cause of a failed attempt, if there was one.",
        "Fix what `after` names: `connect-refused` and `connect-timeout` concern the pods of the Service; `tls-identity-mismatch`, `tls-handshake` and similar causes concern the mesh. Without `after`, look for these causes in the `tulle_failures_total` of the same proxy.",
    ),
    cause(
        "breaker-open",
        Responsible::Server,
        "503, UNAVAILABLE; 504, DEADLINE_EXCEEDED if the request waited in the queue",
        "Circuit breakers have ejected endpoints because their responses failed, and the proxy cannot connect to the others either.",
        "Look at the errors of the service itself. `balancer.linkerd.io/failure-accrual*` sets how many failures eject an endpoint, and for how long.",
    ),
    cause(
        "body-too-large-to-retry",
        Responsible::Server,
        "as for the cause in `after`",
        "The request was not processed and would have been sent to another endpoint, but its body was too long to be buffered.",
        "Fix what `after` names. Bodies of up to 64 KiB are buffered, or of the length that the route sets.",
    ),
    cause(
        "no-route",
        Responsible::Policy,
        "404, NOT_FOUND",
        "No route of the Service or the Server matches the request.",
        "Compare method, path, host and headers with the routes (`kubectl get httproutes,grpcroutes`). A route without matches matches every request.",
    ),
    cause(
        "target-forbidden",
        Responsible::Client,
        "403, PERMISSION_DENIED; an opaque connection is reset",
        "The proxy does not forward to this target: a loopback, link-local or multicast address, or, in ingress mode, a name in `l5d-dst-override` that ends with none of the profile suffixes. Or an inbound connection is for an address that is not in `LINKERD2_PROXY_INBOUND_IPS`.",
        "If such an address is intended, connect to it directly. `LINKERD2_PROXY_DESTINATION_PROFILE_SUFFIXES` of the ingress permits names with other suffixes (`proxy.enableExternalProfiles` permits all).",
    ),
    cause(
        "gateway-domain",
        Responsible::Mesh,
        "404, NOT_FOUND",
        "The name in a request to a gateway is not one that the gateway serves.",
        "`hop` is the gateway. Add the suffix of the name to its `LINKERD2_PROXY_INBOUND_GATEWAY_SUFFIXES`, or find the sender of the request.",
    ),
    cause(
        "gateway-not-exported",
        Responsible::Policy,
        "404, NOT_FOUND",
        "A gateway does not serve this Service to other clusters, because its labels do not match the selector of the gateway, or because it does not exist.",
        "Export the Service by the label `mirror.linkerd.io/exported=true`. If Links select Services by other labels, set `gateway.exportedServices` of the chart `tulle-multicluster` to their selector, in the cluster of the gateway (`hop`).",
    ),
    cause(
        "gateway-loop",
        Responsible::Mesh,
        "508, ABORTED",
        "A gateway received a request that it had forwarded before, according to the `forwarded` headers, or whose sender has the identity of the gateway.",
        "Check where the name leads in the gateway's cluster: probably back to the source of the request.",
    ),
    cause(
        "no-backend",
        Responsible::Policy,
        "502 or 503, UNAVAILABLE",
        "The route has no backends, all of them have weight 0, or the selected one names neither a Service nor an address.",
        "Correct the backends of the route. A backend that does not exist has the cause `injected`.",
    ),
    cause(
        "policy_unknown",
        Responsible::Mesh,
        "503, UNAVAILABLE",
        "The control plane has not sent the policy of this port yet, so the proxy refuses all clients. A connection waits 3 seconds for the policy. Then it is refused: with this response if the client has started an HTTP request, otherwise with a reset. A policy that was received stays in force without a control plane.",
        "Check `linkerd-destination` (its port 8090) and the path to it: `tulle check`, and `control plane is not reachable` in the proxy's log. The proxy requests the policies of the ports in `LINKERD2_PROXY_INBOUND_PORTS` when it starts; the injector sets it to the declared ports. With `TULLE_INBOUND_UNKNOWN_POLICY=default`, the proxy's own default policy (`LINKERD2_PROXY_INBOUND_DEFAULT_POLICY`) applies to connections whose policy has not arrived, as in Linkerd's proxy.",
    ),
    cause(
        "port-not-watched",
        Responsible::Client,
        "503, UNAVAILABLE",
        "Clients connect to many ports that the pod does not declare and on which no application listens; usually they scan ports. The proxy limits the number of such ports for which it requests a policy: for each client network (an IPv4 address or the /64 of a global IPv6 address) a burst of 16 ports, then 1 a second; for all clients together a burst of 64, then 20 a second. A connection beyond that waits up to 3 seconds for its turn, or is refused at once if its turn would come later: with this response if the client has started an HTTP request, otherwise with a reset.",
        "The proxy's log names a client and a port, once a minute. If the clients do not scan ports, look for applications that have not started or have ended, or declare their ports (`containerPort`). `TULLE_INBOUND_UNKNOWN_POLICY=default` does not permit these connections.",
    ),
    cause(
        "invalid-policy",
        Responsible::Policy,
        "500, INTERNAL",
        "The proxy cannot decode a policy or profile, or the control plane rejected the proxy's request for one. Inbound: all requests and connections of the port are refused until the policy is fixed, even if an earlier one was valid. Outbound (a policy or a profile): the last valid one stays in force; requests are refused only if there was none. Inbound, a rule with an unknown filter refuses only the requests that it matches; outbound, an unknown filter makes the whole update invalid.",
        "`l5d-proxy-error`, the proxy's log and `/debug/destinations` name the reason; `tulle check` and the status of routes and policies help as well. `tulle_unreadable_updates_total` counts the updates that cannot be decoded.",
    ),
    cause(
        "not-http",
        Responsible::Policy,
        "the connection is reset",
        "The policy of the port has rules for HTTP (routes, rate limits, or a Server whose `proxyProtocol` is HTTP or gRPC), but the connection is not HTTP, or the client sent nothing until the detection timeout, or the connection became opaque before the policy had these rules.",
        "If the port also carries other protocols, give them a port of their own. If it carries no HTTP at all, remove the routes and limits, or set `proxyProtocol: opaque` in the Server.",
    ),
    cause(
        "policy-denied",
        Responsible::Policy,
        "403, PERMISSION_DENIED; an opaque connection is reset",
        "No authorization permits this client. After the colon: the Server or default policy that decided, as in `policy-denied:server/web-http`. `why` is the reason: no authorization has the client's `network` or its `identity`, or the authorizations require TLS (`no-tls`) or an identity (`no-identity`), which the client does not have. `connect-tunnel`: authorizations permit the client, but the request opens a tunnel (`CONNECT`), and rules of the port would not see the bytes in it. `tunnel-request`: the rules were changed while a request for a tunnel waited for its response, and now refuse it. `certificate-expired`, `certificate-untrusted`: since the client connected, its certificate has expired, or its trust anchor was removed. `not-exported`: the Service of an open connection or tunnel through a gateway is not exported any more.",
        "`no-tls` and `no-identity`: mesh the client, or permit clients without identity. Otherwise add the client to the AuthorizationPolicy (`tulle diagnostics policy` shows the policies in force). `connect-tunnel`: to permit tunnels, add an HTTPRoute with `method: CONNECT`.",
    ),
    cause(
        "forbidden",
        Responsible::Policy,
        "403, PERMISSION_DENIED; an opaque connection is reset",
        "A route forbids the outbound connection; usually an EgressNetwork denies traffic to destinations outside the cluster. An EgressNetwork with routes forbids tunnels (`CONNECT`), except by a rule with `method: CONNECT`.",
        "Permit it by a route of the EgressNetwork, or by its `trafficPolicy: Allow`.",
    ),
    cause(
        "rate-limited",
        Responsible::Policy,
        "429, RESOURCE_EXHAUSTED",
        "This client, or all clients together, exceeded the request rate of the HTTPLocalRateLimitPolicy.",
        "`limit` names the policy. Raise it, add an override for this client, or reduce the client's request rate.",
    ),
    cause(
        "redirect",
        Responsible::Policy,
        "as the filter defines",
        "A filter of the route responds with a redirect.",
        "Nothing: this is the purpose of the route.",
    ),
    cause(
        "injected",
        Responsible::Policy,
        "as the filter defines",
        "A filter of the route injected this failure (fault injection, not the injection of sidecars). Either the route has such a filter, or the control plane has put one in place of a rule or backend that cannot be served.",
        "Nothing if the filter is intended. If the control plane has added it, the status is 500 or gRPC status 13: fix what the message names; the status of a route has the same reason (`Accepted` or `ResolvedRefs` is `False`). The control plane does so for:\n\n- a backend that does not exist, or is neither a Service with a port nor an EgressNetwork that is a parent of the route;\n- requests to destinations outside the cluster that an EgressNetwork denies, with status 403 or gRPC status 7;\n- a rule or a backend of a route with a feature that the proxy does not support (`ExtensionRef`, `sessionPersistence` and others), or that cannot be decoded;\n- a route that its Server cannot have: of a kind that does not fit the `proxyProtocol`, or with a port or a section in its `parentRef`;\n- a Server with an HTTPLocalRateLimitPolicy that cannot be decoded;\n- a gRPC Server with an HTTPLocalRateLimitPolicy, even a valid one;\n- an EgressNetwork that cannot be decoded.",
    ),
    cause(
        "tls-identity-mismatch",
        Responsible::Mesh,
        "502, UNAVAILABLE",
        "The endpoint has another identity than discovery reports, or than the client requires with `l5d-require-id`.",
        "Often the address now belongs to another pod; this resolves within seconds. If it lasts, compare service accounts and trust domains.",
    ),
    cause(
        "tls-untrusted",
        Responsible::Mesh,
        "502, UNAVAILABLE",
        "The peer's certificate is not signed by a trust anchor of this proxy, or the trust anchor of a connected client was removed.",
        "While a root is replaced, trust both roots. `tulle check --proxy` shows the proxies that still have the old one.",
    ),
    cause(
        "tls-expired",
        Responsible::Mesh,
        "502, UNAVAILABLE",
        "A certificate has expired or is not valid yet, or the proxy has none yet. Requests that are still in progress a minute after the certificate of their client has expired are ended, too.",
        "Check the clocks, and why the proxy got no new certificate: see the identity messages in its log, and `linkerd-identity`.",
    ),
    cause(
        "tls-refused",
        Responsible::Mesh,
        "502, UNAVAILABLE",
        "The peer ended the TLS handshake: it does not accept the certificate of this proxy.",
        "The peer's log contains the reason; usually it trusts other roots.",
    ),
    cause(
        "tls-handshake",
        Responsible::Mesh,
        "502, UNAVAILABLE",
        "The TLS handshake failed, or the certificate of the peer cannot be used; for example, the issuer of one external workload has signed it for another.",
        "The proxy's log names the reason. `openssl s_client -connect` shows what listens at the address.",
    ),
    cause(
        "bad-transport-header",
        Responsible::Mesh,
        "the connection is reset",
        "A connection to port 4143 did not start with the transport header of a proxy.",
        "Only proxies connect to this port; look for a client that connects to it directly.",
    ),
    cause(
        "loop",
        Responsible::Mesh,
        "502, UNAVAILABLE",
        "The request would come back to the proxy itself, or a gateway would send it to its own workload.",
        "Usually a Service or route names the proxy's own port (4140, 4143), or an exported Service selects the pods of the gateway.",
    ),
    cause(
        "discovery-timeout",
        Responsible::Mesh,
        "503, UNAVAILABLE",
        "The control plane did not resolve the destination in time.",
        "Check `linkerd-destination` and the path to it (`tulle check`). Destinations that are already known continue to work.",
    ),
    cause(
        "discovery-denied",
        Responsible::Mesh,
        "503, UNAVAILABLE",
        "The control plane denies this proxy a policy or a profile (`PermissionDenied`), because the certificate of the proxy is for another workload or namespace than its settings. Inbound: a connection waits 3 seconds for the policy of the port, as for `policy_unknown`, and is then refused, unless `TULLE_INBOUND_UNKNOWN_POLICY=default` applies. Outbound: requests and connections to new destinations are refused at once. Policies and profiles that the proxy has received stay in force. The proxy repeats a denied request within 9 seconds, or as soon as the control plane permits another request of this proxy.",
        "The proxy logs a warning with the reason, once a minute; outbound, `l5d-proxy-error` and `/debug/destinations` have it too. Compare the namespace and the workload in the proxy's `LINKERD2_PROXY_DESTINATION_CONTEXT` and `LINKERD2_PROXY_POLICY_WORKLOAD` with its certificate. The proxy of a machine outside the cluster needs an ExternalWorkload with its identity in this namespace.",
    ),
    cause(
        "name-unresolved",
        Responsible::Client,
        "503, UNAVAILABLE",
        "The name in a request or connection is not a service of the mesh, and DNS returns no address for it that is reachable from the proxy.",
        "Check the name; that of a Service is `<name>.<namespace>.svc.<cluster domain>`. The proxy queries the servers in `/etc/resolv.conf`. In their answers it ignores addresses that are loopback, unspecified, link-local, multicast or broadcast, or to which it has no route.",
    ),
    cause(
        "queue-full",
        Responsible::Mesh,
        "503, UNAVAILABLE",
        "The queue of requests that wait for an endpoint of the service is full: `LINKERD2_PROXY_OUTBOUND_HTTP_QUEUE_CAPACITY` (10,000), or the value of its policy if that is higher.",
        "As for `endpoints-unready`: the full queue is only a consequence.",
    ),
    cause(
        "overload",
        Responsible::Mesh,
        "503, UNAVAILABLE",
        "The proxy has reached a limit: of requests in flight, names of destinations, connections, header lists, or memory for incomplete request heads.",
        "Find out why requests take so long, or which client opens so many connections. Add replicas, or raise the limit:\n\n- requests in flight: `LINKERD2_PROXY_INBOUND_MAX_IN_FLIGHT`, or its outbound counterpart;\n- names of destinations: 4096 in use at a time, a fixed limit;\n- connections in one direction: a quarter of the files that the proxy may open (`ulimit -n`), or 32 for each MiB of the memory limit, if that is less. At this limit, most new connections replace others, which `tulle_connections_closed_total{cause=\"evicted\"}` counts; the section \"Eviction of connections\" of `docs/explanation/security.md` has the rules;\n- header lists on one HTTP/2 connection: 16 MiB for all requests in flight; further requests are reset with `REFUSED_STREAM`;\n- incomplete request heads of more than 8 KiB in HTTP/1, and incomplete header blocks of HTTP/2: an eighth of the memory limit for all clients, or 64 MiB without a limit, of which each client has a share; if a header block is refused, its HTTP/2 connection is closed.\n\nA tunnel (WebSocket, CONNECT) continues to count as the connection or request that it was before.",
    ),
    cause(
        "memory-short",
        Responsible::Mesh,
        "503, UNAVAILABLE",
        "The proxy is under memory pressure: it uses 90 % of its memory limit (`TULLE_PROXY_MEMORY_LIMIT`, or the limit of its container) and refuses new requests and connections, and large request heads that are not complete, so that the kernel does not kill it. Below 85 % it accepts them again.",
        "Give the proxy more memory (`config.linkerd.io/proxy-memory-limit`), or add replicas. `tulle_memory_short` is 1 while the proxy refuses. `tulle_memory_limit_bytes` is the limit. It is compared with the memory usage of the container, without page cache, if the container has a limit; otherwise with `process_resident_memory_bytes`.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_found_in_headers() {
        let code = |text| find(text).map(|cause| cause.code);
        assert_eq!(code("deadline"), Some("deadline"));
        assert_eq!(code("policy-denied:server/web-http; why=no-tls"), Some("policy-denied"));
        assert_eq!(code("no-endpoints; direction=outbound"), Some("no-endpoints"));
        assert_eq!(code("unheard-of"), None);
    }

    #[test]
    fn each_code_is_unique() {
        let mut codes: Vec<_> = ALL.iter().map(|cause| cause.code).collect();
        codes.sort_unstable();
        let all = codes.len();
        codes.dedup();
        assert_eq!(codes.len(), all);
    }
}
