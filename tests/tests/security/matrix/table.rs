//! The table: which clients a policy permits, how their bytes are handled, and which cells are equivalent.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::words::words;

/// The clients that each policy permits, and the cause for the others.
///
/// `port` is the kind of port that the policy creates, a column of [`HANDLINGS`]. Identities that are not listed are
/// refused by the TLS handshake for every policy.
const DECISIONS: &str = "
policy                port        none      anonymous    permitted other
no-server             detect      no-tls    no-identity  ok        ok
server                detect      network   network      network   network
deny                  detect      network   network      network   network
audit                 detect      ok        ok           ok        ok
server-authorization  detect      no-tls    no-identity  ok        identity
by-identity           detect      no-tls    no-identity  ok        identity
by-network            detect      ok        ok           ok        ok
by-other-network      detect      network   network      network   network
own-http-route        own-routes  no-tls    no-identity  ok        identity
own-grpc-route        grpc        no-tls    no-identity  ok        identity
other-route           routes      no-route  no-route     no-route  no-route
rate-limit            routes      limited   limited      limited   limited
http1                 http1       ok        ok           ok        ok
http2                 http2       ok        ok           ok        ok
opaque                opaque      no-tls    no-tls       ok        identity
tls                   tls         ok        ok           ok        ok
";

/// The handling of each input, by the kind of port; `unknown` is a port whose policy the proxy does not know.
///
/// For connections to the proxy's own port, the part before the colon is the protocol in the transport header: `1` for
/// HTTP/1, `2` for HTTP/2, `-` for none.
const HANDLINGS: &str = "
sent          detect    routes    own-routes     http1     http2     grpc      opaque            tls               unknown
http1         request   request   request        request   not-http  not-http  bytes             in-tls            unknown
http2         request   request   request        upgraded  request   request   bytes             in-tls            unknown
grpc          request   request   request        upgraded  request   request   bytes             in-tls            unknown
lowercase     bytes     not-http  only-requests  request   not-http  not-http  bytes             in-tls            unknown
tls           bytes     not-http  only-requests  not-http  not-http  not-http  bytes             bytes             unknown
raw           bytes     not-http  only-requests  not-http  not-http  not-http  bytes             in-tls            unknown
silence       bytes     no-input  no-input       no-input  no-input  no-input  bytes             in-tls            unknown
incomplete    late      late      late           late      not-http  not-http  bytes             in-tls            late
1:http1       request   request   request        request   request   request   http-not-allowed  http-not-allowed  unknown
2:http2       request   request   request        request   request   request   http-not-allowed  http-not-allowed  unknown
2:grpc        request   request   request        request   request   request   http-not-allowed  http-not-allowed  unknown
1:raw         not-http  not-http  not-http       not-http  not-http  not-http  not-http          not-http          not-http
-:http1       bytes     request   request        request   not-http  not-http  bytes             bytes             unknown
-:http2       bytes     request   request        request   request   request   bytes             bytes             unknown
-:lowercase   bytes     not-http  only-requests  request   not-http  not-http  bytes             bytes             unknown
-:tls         bytes     not-http  only-requests  not-http  not-http  not-http  bytes             bytes             unknown
-:raw         bytes     not-http  only-requests  not-http  not-http  not-http  bytes             bytes             unknown
-:silence     bytes     no-input  no-input       no-input  no-input  no-input  bytes             bytes             unknown
-:incomplete  bytes     late      late           late      not-http  not-http  bytes             bytes             late
";

/// Cells that are left out because others give the same result, with the reason and the cells that cover them.
const SKIPPED_CELLS: &[SkippedCells] = &[
    SkippedCells {
        reason: "a transport header needs TLS (covered by `anonymous`)",
        skips: |cell| cell.sent.header != Header::Absent && cell.identity == Identity::Absent,
    },
    SkippedCells {
        reason: "a failed handshake ends before the input (covered by `http1` and `1:http1`)",
        skips: |cell| cell.identity.is_invalid() && cell.sent.what != InputKind::Http1,
    },
    SkippedCells {
        reason: "the handshake on the proxy's own port does not depend on the transport header (covered by `1:http1`)",
        skips: |cell| !cell.identity.is_proven() && !matches!(cell.sent.header, Header::Absent | Header::Http1),
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
            cell.sent.what == InputKind::Grpc && !matches!(cell.policy, Policy::OwnGrpcRoute | Policy::ByIdentity)
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
            let tried = [Policy::Deny, Policy::Audit, Policy::OwnHttpRoute, Policy::Opaque];
            !cell.state.is_requested_before() && !tried.contains(&cell.policy)
        },
    },
    SkippedCells {
        reason: "a known policy does not depend on the state of the control plane (covered by each way into the proxy, as HTTP \
                 and as bytes)",
        skips: |cell| {
            let tried = ["http1", "raw", "silence", "1:http1", "-:http1", "-:raw"].map(ClientInput::of);
            !matches!(cell.state, State::Up | State::NotYet) && !tried.contains(&cell.sent)
        },
    },
];

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
        Expired = "expired",
        /// The right name, signed by another CA.
        OtherTrustDomain = "other trust domain",
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
        /// A request if the proxy terminated mesh TLS, because a peer's proxy may have upgraded it. Otherwise it is not HTTP.
        Upgraded = "upgraded",
        /// Refused, because it is not HTTP, or not the HTTP version of the port.
        NotHttp = "not-http",
        /// A request that does not complete.
        Late = "late",
        /// Not a request, and only requests are authorized.
        OnlyRequestsAllowed = "only-requests",
        /// No input, so there is nothing to authorize and no response.
        NoInput = "no-input",
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
        /// A connection that is not HTTP may also end without a response, with the cause `not-http`.
        BadRequest = "bad-request",
        HttpNotAllowed = "invalid-policy",
        Late = "head-timeout",
        /// The client sent nothing.
        Silent = "detect-timeout",
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
    Refused(Cause),
    /// The result of the policy, or refused as unknown, because the control plane may or may not answer in time.
    ByPolicyOrUnknown {
        /// The result of the policy; `None` if it permits.
        refusal: Option<Cause>,
    },
    /// The connection is not established.
    Dropped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClientInput {
    pub(super) header: Header,
    pub(super) what: InputKind,
}

/// All cells of a state that are not equivalent to others; prints how many are.
pub(super) fn cells(state: State) -> Vec<Cell> {
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
    for SkippedCells { reason, skips } in SKIPPED_CELLS {
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
        let refused = |port| self.refused_by_tls().or_else(|| self.refusal_cause(port));
        let cause = match self.state.knowledge() {
            Knowledge::Known => refused(self.policy.port()),
            Knowledge::Unknown => refused(PortKind::Unknown),
            Knowledge::Maybe => {
                return Expected::ByPolicyOrUnknown {
                    refusal: refused(self.policy.port()),
                };
            }
        };
        cause.map_or(Expected::Permitted, Expected::Refused)
    }

    fn refused_by_tls(&self) -> Option<Cause> {
        match self.identity {
            Identity::Expired => Some(Cause::Expired),
            Identity::OtherTrustDomain => Some(Cause::Untrusted),
            Identity::Anonymous if self.sent.header != Header::Absent => Some(Cause::Handshake),
            _ => None,
        }
    }

    /// The cause with which a port of this kind refuses it, if any.
    fn refusal_cause(&self, port: PortKind) -> Option<Cause> {
        let in_tls = self.identity != Identity::Absent;
        match self.handling(port) {
            Handling::Request | Handling::Bytes => self.decision().cause(),
            Handling::InTls | Handling::Upgraded if in_tls => self.decision().cause(),
            Handling::InTls if self.sent.what == InputKind::Silence => Some(Cause::Silent),
            Handling::InTls => Some(Cause::Denied),
            Handling::Upgraded | Handling::NotHttp => Some(Cause::BadRequest),
            Handling::Late => Some(Cause::Late),
            Handling::OnlyRequestsAllowed => Some(Cause::Denied),
            Handling::NoInput => Some(Cause::Silent),
            Handling::HttpNotAllowed => Some(Cause::HttpNotAllowed),
            Handling::Unknown => Some(Cause::Unknown),
        }
    }

    fn handling(&self, port: PortKind) -> Handling {
        Handling::of(at(HANDLINGS, &self.sent.to_string(), port.word()))
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

    /// Whether the refusal may be counted as denied. On a port whose Server authorizes no client, the counter depends
    /// on how many bytes the proxy read.
    pub(super) fn may_count_as_denied(&self) -> bool {
        let authorizes_no_client = matches!(self.policy, Policy::OwnHttpRoute | Policy::OwnGrpcRoute);
        authorizes_no_client && matches!(self.expected(), Expected::Refused(Cause::BadRequest | Cause::Silent))
    }

    fn decision(&self) -> Decision {
        Decision::of(at(DECISIONS, self.policy.word(), self.identity.word()))
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
        PortKind::of(at(DECISIONS, self.word(), "port"))
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

impl Identity {
    /// Whether the TLS handshake refuses it, so that the policy does not matter.
    fn is_invalid(self) -> bool {
        matches!(self, Self::Expired | Self::OtherTrustDomain)
    }

    /// Whether the client's certificate is accepted.
    pub(super) fn is_proven(self) -> bool {
        matches!(self, Self::Permitted | Self::Other)
    }
}

impl Family {
    pub(super) fn server(self) -> IpAddr {
        match self {
            Self::V4 => super::testbed::SERVER.into(),
            Self::V6 => v6(super::testbed::SERVER).into(),
        }
    }
}

/// The IPv6 address of a host: fd79::20 for 10.79.0.20. The decimal digits are reused as hexadecimal digits.
pub(super) fn v6(ip: Ipv4Addr) -> Ipv6Addr {
    let [_, network, _, host] = ip
        .octets()
        .map(|octet| u16::from_str_radix(&octet.to_string(), 16).unwrap());
    Ipv6Addr::new(0xfd00 + network, 0, 0, 0, 0, 0, 0, host)
}

impl ClientInput {
    pub(super) const HTTP1: Self = Self {
        header: Header::Absent,
        what: InputKind::Http1,
    };

    fn all() -> impl Iterator<Item = Self> {
        rows(HANDLINGS).map(|row| Self::of(row[0]))
    }

    fn of(word: &str) -> Self {
        let (header, what) = word.split_once(':').unwrap_or(("", word));
        Self {
            header: Header::of(header),
            what: InputKind::of(what),
        }
    }
}

impl fmt::Display for ClientInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.header {
            Header::Absent => write!(f, "{}", self.what),
            header => write!(f, "{header}:{}", self.what),
        }
    }
}

/// The word in a table, by the first word of its row and the title of its column.
pub(super) fn at(table: &'static str, row: &str, column: &str) -> &'static str {
    let titles = words_of(table.trim().lines().next().unwrap_or_default());
    let column = titles.iter().position(|title| *title == column).expect(column);
    let found = rows(table).find(|words| words[0] == row);
    found.unwrap_or_else(|| panic!("no row {row:?}"))[column]
}

pub(super) fn rows(table: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    table.trim().lines().skip(1).map(words_of)
}

fn words_of(line: &'static str) -> Vec<&'static str> {
    line.split_whitespace().collect()
}
