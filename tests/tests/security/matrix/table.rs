//! The table: which clients a policy permits, how their bytes are handled, and which cells are equivalent.

use std::fmt;
use std::net::IpAddr;

use super::testbed::Ipv6Rules;
use super::words::words;

/// The decision of each policy about each identity of a client, in the words of [`Decision`]; `network` means that no
/// authorization matches. The rows of the cluster's networks are for IPv4: the client's IPv6 address is not in these networks.
///
/// `port` is the kind of port that the policy creates, a column of [`HANDLINGS`]. Identities that are not listed are
/// refused by the TLS handshake for every policy.
const DECISIONS: &str = "
policy                   port        none      anonymous    permitted other     other-domain
no-server                detect      no-tls    no-identity  ok        ok        ok
server                   detect      network   network      network   network   network
deny                     detect      network   network      network   network   network
audit                    detect      ok        ok           ok        ok        ok
cluster-authenticated    detect      no-tls    no-identity  ok        ok        ok
cluster-unauthenticated  detect      ok        ok           ok        ok        ok
server-authorization     detect      no-tls    no-identity  ok        identity  identity
by-identity              detect      no-tls    no-identity  ok        identity  identity
by-network               detect      ok        ok           ok        ok        ok
by-other-network         detect      network   network      network   network   network
own-http-route           own-routes  no-tls    no-identity  ok        identity  identity
own-grpc-route           grpc        no-tls    no-identity  ok        identity  identity
other-route              routes      no-route  no-route     no-route  no-route  no-route
rate-limit               routes      limited   limited      limited   limited   limited
identity-rate-limit      routes      limited   limited      ok        limited   limited
http1                    http1       ok        ok           ok        ok        ok
http2                    http2       ok        ok           ok        ok        ok
opaque                   opaque      no-tls    no-tls       ok        identity  identity
tls                      tls         ok        ok           ok        ok        ok
";

/// The handling of each input, by the kind of port; `unknown` is a port whose policy the proxy does not know.
///
/// For connections to the proxy's own port, the part before the colon is the protocol in the transport header: `1` for
/// HTTP/1, `2` for HTTP/2, `-` for none.
const HANDLINGS: &str = "
sent          detect       routes       own-routes     http1        http2        grpc         opaque            tls               unknown
http1         request      request      request        request      no-preface   no-preface   bytes             in-tls            unknown
http2         request      request      request        upgraded     request      request      bytes             in-tls            unknown
grpc          request      request      request        upgraded     request      request      bytes             in-tls            unknown
lowercase     bytes        not-http     only-requests  request      no-preface   no-preface   bytes             in-tls            unknown
tls           bytes        not-http     only-requests  bad-request  no-preface   no-preface   bytes             bytes             unknown
raw           bytes        not-http     only-requests  bad-request  no-preface   no-preface   bytes             in-tls            unknown
silence       bytes        no-input     no-input       idle         idle         idle         bytes             in-tls            unknown
incomplete    late         late         late           late         no-preface   no-preface   bytes             in-tls            late
1:http1       request      request      request        request      request      request      http-not-allowed  http-not-allowed  unknown
1:http2       bad-request  bad-request  bad-request    bad-request  bad-request  bad-request  bad-request       bad-request       bad-request
1:grpc        bad-request  bad-request  bad-request    bad-request  bad-request  bad-request  bad-request       bad-request       bad-request
1:lowercase   request      request      request        request      request      no-route     http-not-allowed  http-not-allowed  unknown
1:tls         bad-request  bad-request  bad-request    bad-request  bad-request  bad-request  bad-request       bad-request       bad-request
1:raw         bad-request  bad-request  bad-request    bad-request  bad-request  bad-request  bad-request       bad-request       bad-request
1:silence     idle         idle         idle           idle         idle         idle         idle              idle              idle
1:incomplete  late         late         late           late         late         late         late              late              late
2:http1       no-preface   no-preface   no-preface     no-preface   no-preface   no-preface   no-preface        no-preface        no-preface
2:http2       request      request      request        request      request      request      http-not-allowed  http-not-allowed  unknown
2:grpc        request      request      request        request      request      request      http-not-allowed  http-not-allowed  unknown
2:lowercase   no-preface   no-preface   no-preface     no-preface   no-preface   no-preface   no-preface        no-preface        no-preface
2:tls         no-preface   no-preface   no-preface     no-preface   no-preface   no-preface   no-preface        no-preface        no-preface
2:raw         no-preface   no-preface   no-preface     no-preface   no-preface   no-preface   no-preface        no-preface        no-preface
2:silence     idle         idle         idle           idle         idle         idle         idle              idle              idle
2:incomplete  no-preface   no-preface   no-preface     no-preface   no-preface   no-preface   no-preface        no-preface        no-preface
-:http1       bytes        request      request        request      no-preface   no-preface   bytes             bytes             unknown
-:http2       bytes        request      request        request      request      request      bytes             bytes             unknown
-:grpc        bytes        request      request        request      request      request      bytes             bytes             unknown
-:lowercase   bytes        not-http     only-requests  request      no-preface   no-preface   bytes             bytes             unknown
-:tls         bytes        not-http     only-requests  bad-request  no-preface   no-preface   bytes             bytes             unknown
-:raw         bytes        not-http     only-requests  bad-request  no-preface   no-preface   bytes             bytes             unknown
-:silence     bytes        no-input     no-input       idle         idle         idle         bytes             bytes             unknown
-:incomplete  bytes        late         late           late         no-preface   no-preface   bytes             bytes             late
";

/// Cells that are left out because others give the same result, with the reason and the cells that cover them.
const SKIPPED_CELLS: &[SkippedCells] = &[
    SkippedCells {
        reason: "a transport header needs TLS (covered by `anonymous`)",
        skips: |cell| cell.sent.header != Header::Absent && cell.identity == Identity::Absent,
    },
    SkippedCells {
        reason: "a failed handshake ends before the input (covered by `http1` and `1:http1`)",
        skips: |cell| cell.tls_refusal_cause().is_some() && cell.sent.kind != InputKind::Http1,
    },
    SkippedCells {
        reason: "the handshake on the proxy's own port does not depend on the transport header (covered by `1:http1`)",
        skips: |cell| {
            !cell.identity.has_valid_certificate() && !matches!(cell.sent.header, Header::Absent | Header::Http1)
        },
    },
    SkippedCells {
        reason: "an identity is compared as a whole, trust domain included (covered by `other` in other states, and for other \
                 inputs)",
        skips: |cell| {
            let is_tried = cell.state == State::Up && ClientInput::tried_in_all_states().contains(&cell.sent);
            cell.identity == Identity::OtherDomain && !is_tried
        },
    },
    SkippedCells {
        reason: "an opaque port passes TLS to the application and does not read identities (covered by `none`)",
        skips: |cell| {
            let is_tls = cell.identity != Identity::Absent && cell.sent.header == Header::Absent;
            is_tls && cell.policy.port() == PortKind::Opaque
        },
    },
    SkippedCells {
        reason: "gRPC is handled as HTTP/2 unless a GRPCRoute applies (covered by `own-grpc-route` and `by-identity`)",
        skips: |cell| {
            cell.sent.kind == InputKind::Grpc && !matches!(cell.policy, Policy::OwnGrpcRoute | Policy::ByIdentity)
        },
    },
    SkippedCells {
        reason: "policies do not depend on the address family (covered by IPv6 while the control plane is up, and by one \
                 input in other states)",
        skips: |cell| cell.state != State::Up && cell.family == Family::V6 && cell.sent != ClientInput::HTTP1,
    },
    SkippedCells {
        reason: "an unknown policy has no effect (covered by one that denies, one that permits all, one with routes and \
                 an opaque one)",
        skips: |cell| {
            let is_unknown = matches!(cell.state.knowledge(), Knowledge::Unknown);
            is_unknown && !Policy::tried_while_unknown().contains(&cell.policy)
        },
    },
    SkippedCells {
        reason: "a policy applies to the first connection to its port as to later ones (covered by one policy of each kind of \
                 port, and one that denies)",
        skips: |cell| cell.state == State::First && !Policy::tried_on_first_connection().contains(&cell.policy),
    },
    SkippedCells {
        reason: "a policy that is known before the connection does not depend on the state of the control plane (covered by \
                 each way into the proxy, as HTTP and as bytes)",
        skips: |cell| {
            let is_known = cell.state.is_requested_before() && cell.state != State::Up;
            is_known && !ClientInput::tried_in_all_states().contains(&cell.sent)
        },
    },
    SkippedCells {
        reason: "a port does not depend on why its policy is unknown (covered by all inputs before the control plane is up)",
        skips: |cell| {
            let is_unknown = matches!(cell.state, State::DownBefore | State::NotFoundBefore);
            is_unknown && !ClientInput::tried_in_all_states().contains(&cell.sent)
        },
    },
    SkippedCells {
        reason: "during a restart, the first connection to a port waits for the policy as in the two states without restarts \
                 (covered by all inputs and more policies as first connection, and before the control plane is up)",
        skips: |cell| {
            let is_tried = ClientInput::tried_in_all_states().contains(&cell.sent)
                && Policy::tried_while_unknown().contains(&cell.policy);
            cell.state == State::RestartingFirst && !is_tried
        },
    },
    SkippedCells {
        reason: "an access policy for the networks of the cluster is enforced as other authorizations (covered by requests \
                 and bytes while the control plane is up, and for other inputs by `no-server`, `audit` and \
                 `by-other-network`)",
        skips: |cell| {
            let is_tried = cell.state == State::Up && [ClientInput::HTTP1, ClientInput::RAW_BYTES].contains(&cell.sent);
            cell.policy.is_for_cluster() && !is_tried
        },
    },
    SkippedCells {
        reason: "limits by identity are enforced as limits in total (covered by HTTP/1 and HTTP/2 while the control plane is \
                 up, and for other inputs by `rate-limit`)",
        skips: |cell| {
            let is_tried = cell.state == State::Up && [ClientInput::HTTP1, ClientInput::HTTP2].contains(&cell.sent);
            cell.policy == Policy::IdentityRateLimit && !is_tried
        },
    },
];

/// Cells that are left out in addition without redirect rules for IPv6.
const SKIPPED_CELLS_WITHOUT_IPV6_RULES: &[SkippedCells] = &[SkippedCells {
    reason: "without redirect rules for IPv6, its packets are dropped before the proxy, and IPv4 is handled as with the rules \
             (covered by three policies, with and without an identity, as HTTP and as bytes)",
    skips: |cell| {
        let is_tried = matches!(cell.policy, Policy::Audit | Policy::Deny | Policy::Opaque)
            && matches!(cell.identity, Identity::Absent | Identity::Permitted)
            && matches!(cell.sent.kind, InputKind::Http1 | InputKind::RawBytes);
        !is_tried
    },
}];

/// One connection and its expected result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) state: State,
    pub(super) policy: Policy,
    pub(super) sent: ClientInput,
    pub(super) identity: Identity,
    pub(super) family: Family,
}

/// Cells that are left out, because others give the same result.
struct SkippedCells {
    reason: &'static str,
    skips: fn(&Cell) -> bool,
}

words! {
    /// The state of the control plane, and whether the port's policy was requested before.
    State {
        /// It has answered before the connection.
        Up = "up",
        /// It is up, and the connection is the first on its port.
        First = "first connection to the port",
        /// It has not been up since the proxy started.
        NotYet = "not up yet",
        /// It went down before the port's policy was requested.
        DownBefore = "down before the policy was requested",
        /// It went down after it had answered.
        DownAfter = "down after the policy was received",
        /// It was replaced by one without the workload, before the port's policy was requested.
        NotFoundBefore = "workload deleted before the policy was requested",
        /// It was replaced by one without the workload, after the port's policy was received.
        NotFoundAfter = "workload deleted after the policy was received",
        /// It is killed and restarted repeatedly.
        Restarting = "restarting",
        /// It is killed and restarted repeatedly, and the connection is the first on its port.
        RestartingFirst = "restarting, first connection to the port",
    }
}

words! {
    Policy {
        /// The default policy of the control plane, `all-authenticated`.
        NoServer = "no-server",
        /// A Server without an authorization.
        Server = "server",
        /// A Server with `accessPolicy: deny`.
        Deny = "deny",
        Audit = "audit",
        /// Servers with an `accessPolicy` for the networks of the cluster.
        ClusterAuthenticated = "cluster-authenticated",
        ClusterUnauthenticated = "cluster-unauthenticated",
        ServerAuthorization = "server-authorization",
        /// An AuthorizationPolicy that requires an identity.
        ByIdentity = "by-identity",
        /// An AuthorizationPolicy that requires the network of the client.
        ByNetwork = "by-network",
        ByOtherNetwork = "by-other-network",
        /// An HTTPRoute with its own authorization, on a Server that denies.
        OwnHttpRoute = "own-http-route",
        OwnGrpcRoute = "own-grpc-route",
        /// An HTTPRoute for another path, on a Server that permits all.
        OtherRoute = "other-route",
        RateLimit = "rate-limit",
        /// A limit for each identity, and a higher one for the permitted identity.
        IdentityRateLimit = "identity-rate-limit",
        /// Servers of one protocol. All of them permit, except the opaque one.
        Http1 = "http1",
        Http2 = "http2",
        Opaque = "opaque",
        Tls = "tls",
    }
}

words! {
    /// The kind of port that a policy creates.
    PortKind {
        /// Protocol detection, without rules for requests.
        Detect = "detect",
        /// Protocol detection, with routes or rate limits for requests.
        Routes = "routes",
        /// Protocol detection, with routes that are the only authorizations.
        OwnRoutes = "own-routes",
        Http1 = "http1",
        Http2 = "http2",
        Grpc = "grpc",
        Opaque = "opaque",
        Tls = "tls",
        /// The policy of the port is not known.
        Unknown = "unknown",
    }
}

words! {
    Identity {
        /// No TLS.
        Absent = "none",
        /// TLS without a client certificate.
        Anonymous = "anonymous",
        /// The identity that policies permit.
        Permitted = "permitted",
        /// Another workload of the mesh.
        Other = "other",
        /// The permitted service account of another trust domain that has the same trust anchor.
        OtherDomain = "other-domain",
        Expired = "expired",
        /// The right name, signed by another CA.
        OtherCa = "other CA",
    }
}

words! {
    Family {
        V4 = "IPv4",
        V6 = "IPv6",
    }
}

words! {
    /// What the client sends.
    InputKind {
        Http1 = "http1",
        Http2 = "http2",
        Grpc = "grpc",
        /// A request with a lower-case method.
        LowercaseMethod = "lowercase",
        /// A ClientHello for another server name.
        Tls = "tls",
        RawBytes = "raw",
        Silence = "silence",
        /// A request line and a header, without the end of the headers.
        IncompleteHead = "incomplete",
    }
}

words! {
    /// The protocol in the transport header.
    Header {
        /// No transport header; the connection goes to the application's port.
        Absent = "",
        NoProtocol = "-",
        Http1 = "1",
        Http2 = "2",
    }
}

words! {
    /// The handling of an input.
    Handling {
        /// It is a request; the rules for requests apply.
        Request = "request",
        /// It is opaque bytes; the authorizations of the Server apply.
        Bytes = "bytes",
        /// Opaque bytes if the proxy terminated mesh TLS, otherwise refused.
        InTls = "in-tls",
        /// A request if the proxy terminated mesh TLS, because a peer's proxy may have upgraded it. Otherwise as `bad-request`.
        Upgraded = "upgraded",
        /// Refused, because it is not HTTP.
        NotHttp = "not-http",
        /// An HTTP/1 server reads it, and refuses it.
        BadRequest = "bad-request",
        /// An HTTP/2 server reads it, and refuses it.
        NoPreface = "no-preface",
        /// A request that no route matches, because routes for gRPC match only `POST`.
        NoRoute = "no-route",
        /// A request that does not complete.
        Late = "late",
        /// Not a request, and only requests are authorized.
        OnlyRequestsAllowed = "only-requests",
        /// Refused without an input, because the port requires HTTP.
        NoInput = "no-input",
        /// Without TLS, as `no-input`. Inside TLS, an HTTP server waits for a request until its time limit.
        Idle = "idle",
        /// Refused, because the port does not accept requests.
        HttpNotAllowed = "http-not-allowed",
        /// Refused, because the policy of the port is not known.
        Unknown = "unknown",
    }
}

words! {
    /// The decision of a policy about a client.
    Decision {
        Permitted = "ok",
        /// The proxy reports `network` when no authorization matches.
        NotAuthorized = "network",
        NoTls = "no-tls",
        NoIdentity = "no-identity",
        OtherIdentity = "identity",
        NoRoute = "no-route",
        Limited = "limited",
    }
}

words! {
    /// The cause of a refusal: codes of `docs/reference/errors.md`.
    Cause {
        Denied = "policy-denied",
        Unknown = "policy_unknown",
        NoRoute = "no-route",
        Limited = "rate-limited",
        BadRequest = "bad-request",
        NotHttp = "not-http",
        HttpNotAllowed = "invalid-policy",
        Late = "head-timeout",
        Silent = "detect-timeout",
        /// An HTTP connection without a request, which is not a failure.
        Idle = "idle",
        Expired = "tls-expired",
        Untrusted = "tls-untrusted",
        Handshake = "tls-handshake",
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// The application receives the input, and the client gets its response.
    Permitted,
    /// The application receives nothing.
    Refused(Refusal),
    /// The result of the policy, or refused as unknown, because the control plane may or may not answer in time.
    ByPolicyOrUnknown {
        /// The result of the policy; `None` if it permits.
        refusal: Option<Refusal>,
        unknown: Refusal,
    },
    /// The connection is not established.
    Dropped,
}

/// A refusal, as the client sees it and as the sidecar counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) cause: Cause,
    pub(super) answer: Answer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// A response with the status of the cause.
    Status,
    /// The connection ends without a response that the client can read.
    Closed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClientInput {
    pub(super) header: Header,
    pub(super) kind: InputKind,
}

/// All cells of a state that are not equivalent to others; prints how many are.
pub(super) fn cells(state: State, ipv6: Ipv6Rules) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &policy in Policy::ALL {
        for sent in ClientInput::all() {
            for &identity in Identity::ALL {
                for &family in Family::ALL {
                    cells.push(Cell {
                        state,
                        policy,
                        sent,
                        identity,
                        family,
                    });
                }
            }
        }
    }
    let more_skipped: &[SkippedCells] = match ipv6 {
        Ipv6Rules::Written => &[],
        Ipv6Rules::Disabled => SKIPPED_CELLS_WITHOUT_IPV6_RULES,
    };
    for SkippedCells { reason, skips } in SKIPPED_CELLS.iter().chain(more_skipped) {
        let n_before = cells.len();
        cells.retain(|cell| !skips(cell));
        eprintln!(
            "{state}: {} cells are equivalent to others: {reason}",
            n_before - cells.len()
        );
    }
    cells
}

impl Cell {
    pub(super) fn expected(&self) -> Expected {
        let refusal = |port| match self.tls_refusal_cause() {
            Some(cause) => Some(Refusal::closed(cause)),
            None => self.refusal_after_tls(port),
        };
        let refusal = match self.state.knowledge() {
            Knowledge::Known => refusal(self.policy.port()),
            Knowledge::Unknown => refusal(PortKind::Unknown),
            Knowledge::Maybe => {
                return Expected::ByPolicyOrUnknown {
                    refusal: refusal(self.policy.port()),
                    unknown: refusal(PortKind::Unknown).expect("an unknown port permits nothing"),
                };
            }
        };
        refusal.map_or(Expected::Permitted, Expected::Refused)
    }

    /// The cause if the TLS handshake refuses the client.
    fn tls_refusal_cause(&self) -> Option<Cause> {
        match self.identity {
            Identity::Expired => Some(Cause::Expired),
            Identity::OtherCa => Some(Cause::Untrusted),
            Identity::Anonymous if self.sent.header != Header::Absent => Some(Cause::Handshake),
            _ => None,
        }
    }

    /// The refusal by a port of this kind, if any.
    fn refusal_after_tls(&self, port: PortKind) -> Option<Refusal> {
        let in_tls = self.identity != Identity::Absent;
        let by_decision = |refusal: fn(Cause) -> Refusal| self.decision().cause().map(refusal);
        match self.handling(port) {
            Handling::Request => by_decision(Refusal::status),
            Handling::Upgraded if in_tls => by_decision(Refusal::status),
            Handling::Bytes => by_decision(Refusal::closed),
            Handling::InTls if in_tls => by_decision(Refusal::closed),
            Handling::InTls if self.sent.kind == InputKind::Silence => Some(Refusal::closed(Cause::Silent)),
            Handling::InTls => Some(Refusal::closed(Cause::Denied)),
            // No HTTP server reads TLS for another server name.
            Handling::BadRequest | Handling::NoPreface if !in_tls && self.sent.kind == InputKind::Tls => {
                Some(Refusal::closed(Cause::NotHttp))
            }
            // A client of HTTP/2 cannot read the response.
            Handling::Upgraded | Handling::BadRequest if self.sent.kind.is_http2() => {
                Some(Refusal::closed(Cause::BadRequest))
            }
            Handling::Upgraded | Handling::BadRequest => Some(Refusal::status(Cause::BadRequest)),
            Handling::NoPreface => Some(Refusal::closed(Cause::BadRequest)),
            Handling::NotHttp => Some(Refusal::closed(Cause::NotHttp)),
            Handling::NoRoute => Some(Refusal::status(Cause::NoRoute)),
            Handling::Late => Some(Refusal::status(Cause::Late)),
            Handling::OnlyRequestsAllowed => Some(Refusal::closed(Cause::Denied)),
            Handling::NoInput | Handling::Idle if !in_tls => Some(Refusal::closed(Cause::Silent)),
            Handling::NoInput => Some(Refusal::closed(Cause::NotHttp)),
            Handling::Idle => Some(Refusal::closed(Cause::Idle)),
            Handling::HttpNotAllowed => Some(Refusal::status(Cause::HttpNotAllowed)),
            Handling::Unknown if self.sent.is_request() => Some(Refusal::status(Cause::Unknown)),
            Handling::Unknown => Some(Refusal::closed(Cause::Unknown)),
        }
    }

    fn handling(&self, port: PortKind) -> Handling {
        Handling::parse(lookup(HANDLINGS, &self.sent.to_string(), port.word()))
    }

    /// The reason of the policy for a denial.
    pub(super) fn denial_reason(&self) -> &'static str {
        let reason = match (self.handling(self.policy.port()), self.decision()) {
            (Handling::OnlyRequestsAllowed, _) => Decision::NotAuthorized,
            (_, Decision::Permitted) => Decision::NoTls, // the port requires it
            (_, decision) => decision,
        };
        reason.word()
    }

    /// Whether a refusal for this cause may be counted as denied instead. On a port whose only authorizations
    /// are those of routes, the counter depends on how many bytes the proxy read.
    pub(super) fn may_count_as_denied(&self, cause: Cause) -> bool {
        let authorizes_by_routes_only = matches!(self.policy, Policy::OwnHttpRoute | Policy::OwnGrpcRoute);
        authorizes_by_routes_only && matches!(cause, Cause::BadRequest | Cause::NotHttp | Cause::Silent | Cause::Idle)
    }

    fn decision(&self) -> Decision {
        if self.policy.is_for_cluster() && self.family == Family::V6 {
            return Decision::NotAuthorized;
        }
        Decision::parse(lookup(DECISIONS, self.policy.word(), self.identity.word()))
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            state,
            policy,
            sent,
            identity,
            family,
        } = self;
        write!(
            f,
            "control plane: {state}; policy: {policy}; sent: {sent}; identity: {identity}; {family}"
        )
    }
}

impl Policy {
    pub(super) fn port(self) -> PortKind {
        PortKind::parse(lookup(DECISIONS, self.word(), "port"))
    }

    /// Whether the policy permits only clients in the networks of the cluster.
    fn is_for_cluster(self) -> bool {
        matches!(self, Self::ClusterAuthenticated | Self::ClusterUnauthenticated)
    }

    /// The policies that are tried while the policy of the port is unknown: one that denies, one that permits all, one with
    /// routes, and an opaque one.
    fn tried_while_unknown() -> [Self; 4] {
        [Self::Deny, Self::Audit, Self::OwnHttpRoute, Self::Opaque]
    }

    /// The policies that are tried on the first connection to a port: one for each kind of port, and one that denies.
    fn tried_on_first_connection() -> [Self; 9] {
        [
            Self::Deny,
            Self::Audit,
            Self::OtherRoute,
            Self::OwnHttpRoute,
            Self::Http1,
            Self::Http2,
            Self::OwnGrpcRoute,
            Self::Opaque,
            Self::Tls,
        ]
    }
}

impl Decision {
    fn cause(self) -> Option<Cause> {
        match self {
            Self::Permitted => None,
            Self::NotAuthorized | Self::NoTls | Self::NoIdentity | Self::OtherIdentity => Some(Cause::Denied),
            Self::NoRoute => Some(Cause::NoRoute),
            Self::Limited => Some(Cause::Limited),
        }
    }
}

impl Refusal {
    fn status(cause: Cause) -> Self {
        Self {
            cause,
            answer: Answer::Status,
        }
    }

    fn closed(cause: Cause) -> Self {
        Self {
            cause,
            answer: Answer::Closed,
        }
    }
}

/// What the proxy can know about a policy.
enum Knowledge {
    Known,
    Unknown,
    Maybe,
}

impl State {
    /// Whether the port's policy is requested before the connection.
    pub(super) fn is_requested_before(self) -> bool {
        matches!(
            self,
            Self::Up | Self::DownAfter | Self::NotFoundAfter | Self::Restarting
        )
    }

    /// Whether each connection needs its own port, to be the first on it.
    pub(super) fn is_first(self) -> bool {
        matches!(self, Self::First | Self::RestartingFirst)
    }

    fn knowledge(self) -> Knowledge {
        match self {
            Self::Up | Self::First | Self::DownAfter | Self::NotFoundAfter | Self::Restarting => Knowledge::Known,
            Self::NotYet | Self::DownBefore | Self::NotFoundBefore => Knowledge::Unknown,
            Self::RestartingFirst => Knowledge::Maybe,
        }
    }
}

impl InputKind {
    fn is_http2(self) -> bool {
        matches!(self, Self::Http2 | Self::Grpc)
    }
}

impl Identity {
    /// Whether the client's certificate is accepted.
    pub(super) fn has_valid_certificate(self) -> bool {
        matches!(self, Self::Permitted | Self::Other | Self::OtherDomain)
    }
}

impl Family {
    pub(super) fn server(self) -> IpAddr {
        match self {
            Self::V4 => super::testbed::SERVER.into(),
            Self::V6 => super::testbed::v6(super::testbed::SERVER).into(),
        }
    }
}

impl ClientInput {
    pub(super) const HTTP1: Self = Self {
        header: Header::Absent,
        kind: InputKind::Http1,
    };
    const HTTP2: Self = Self {
        header: Header::Absent,
        kind: InputKind::Http2,
    };
    const RAW_BYTES: Self = Self {
        header: Header::Absent,
        kind: InputKind::RawBytes,
    };

    /// Whether a port that serves every kind of request serves it as one. The transport header for HTTP/1 permits any method.
    pub(super) fn is_request(self) -> bool {
        match self.kind {
            InputKind::Http1 | InputKind::Http2 | InputKind::Grpc => true,
            InputKind::LowercaseMethod => self.header == Header::Http1,
            _ => false,
        }
    }

    /// The inputs that are tried in all states: for each way into the proxy one input as HTTP and one as bytes, and a client
    /// that sends nothing.
    fn tried_in_all_states() -> [Self; 6] {
        ["http1", "raw", "silence", "1:http1", "-:http1", "-:raw"].map(Self::parse)
    }

    fn all() -> impl Iterator<Item = Self> {
        rows(HANDLINGS).map(|row| Self::parse(row[0]))
    }

    fn parse(word: &str) -> Self {
        let (header, kind) = word.split_once(':').unwrap_or(("", word));
        Self {
            header: Header::parse(header),
            kind: InputKind::parse(kind),
        }
    }
}

impl fmt::Display for ClientInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.header {
            Header::Absent => write!(f, "{}", self.kind),
            header => write!(f, "{header}:{}", self.kind),
        }
    }
}

/// The word in a table in this row, which the first word identifies, and in the column with this title.
pub(super) fn lookup(table: &'static str, row: &str, column: &str) -> &'static str {
    let titles = split_words(table.trim().lines().next().unwrap_or_default());
    let column = titles.iter().position(|title| *title == column).expect(column);
    let found = rows(table).find(|words| words[0] == row);
    found.unwrap_or_else(|| panic!("no row {row:?}"))[column]
}

pub(super) fn rows(table: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    table.trim().lines().skip(1).map(split_words)
}

fn split_words(line: &'static str) -> Vec<&'static str> {
    line.split_whitespace().collect()
}
