//! The table: whom a policy permits, what becomes of the bytes they send, and which cells are folded.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::words::words;

/// Whom each policy permits, and why it refuses the others.
///
/// `port` is the kind of port that the policy makes, a column of [`BYTES`]. The identities that are not here are
/// refused by the TLS handshake, whatever the policy.
const CLIENTS: &str = "
policy                port        none      anonymous    right     wrong
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
no-such-route         routes      no-route  no-route     no-route  no-route
rate-limit            routes      limited   limited      limited   limited
http1                 http1       ok        ok           ok        ok
http2                 http2       ok        ok           ok        ok
opaque                opaque      no-tls    no-tls       ok        identity
tls                   tls         ok        ok           ok        ok
";

/// What becomes of what a client sends, by the kind of port; `unknown` is one whose policy the proxy does not know.
///
/// Before the colon stands what the transport header says, where the client sends one to the proxy's own port: `1` for
/// HTTP/1, `2` for HTTP/2, `-` for no protocol.
const BYTES: &str = "
sent       detect    routes    own-routes  http1     http2     grpc      opaque    tls       unknown
http1      request   request   request     request   not-http  not-http  bytes     in-tls    unknown
http2      request   request   request     upgraded  request   request   bytes     in-tls    unknown
grpc       request   request   request     upgraded  request   request   bytes     in-tls    unknown
odd        bytes     not-http  no-request  request   not-http  not-http  bytes     in-tls    unknown
tls        bytes     not-http  no-request  not-http  not-http  not-http  bytes     bytes     unknown
raw        bytes     not-http  no-request  not-http  not-http  not-http  bytes     in-tls    unknown
silence    bytes     nothing   nothing     nothing   nothing   nothing   bytes     in-tls    unknown
half       late      late      late        late      not-http  not-http  bytes     in-tls    late
1:http1    request   request   request     request   request   request   no-http   no-http   unknown
2:http2    request   request   request     request   request   request   no-http   no-http   unknown
2:grpc     request   request   request     request   request   request   no-http   no-http   unknown
1:raw      not-http  not-http  not-http    not-http  not-http  not-http  not-http  not-http  not-http
-:http1    bytes     request   request     request   not-http  not-http  bytes     bytes     unknown
-:http2    bytes     request   request     request   request   request   bytes     bytes     unknown
-:odd      bytes     not-http  no-request  request   not-http  not-http  bytes     bytes     unknown
-:tls      bytes     not-http  no-request  not-http  not-http  not-http  bytes     bytes     unknown
-:raw      bytes     not-http  no-request  not-http  not-http  not-http  bytes     bytes     unknown
-:silence  bytes     nothing   nothing     nothing   nothing   nothing   bytes     bytes     unknown
-:half     bytes     late      late        late      not-http  not-http  bytes     bytes     late
";

/// Cells that cannot differ from others, and why.
const FOLDS: &[Fold] = &[
    Fold {
        reason: "a transport header comes in TLS: without TLS there is none, and `anonymous` is tried",
        folds: |cell| cell.sent.header != Header::Absent && cell.identity == Identity::Nobody,
    },
    Fold {
        reason: "a handshake that fails ends before a byte of what would follow: `http1` and `1:http1` are tried",
        folds: |cell| cell.identity.is_invalid() && cell.sent.what != What::Http1,
    },
    Fold {
        reason: "the handshake on the proxy's own port does not ask what its transport header says: `1:http1` is tried",
        folds: |cell| !cell.identity.is_proven() && !matches!(cell.sent.header, Header::Absent | Header::Http1),
    },
    Fold {
        reason: "on an opaque port TLS is bytes for the application, and identities in it are not seen: `none` is tried",
        folds: |cell| {
            let is_tls = cell.identity != Identity::Nobody && cell.sent.header == Header::Absent;
            is_tls && cell.policy.port() == PortKind::Opaque
        },
    },
    Fold {
        reason: "gRPC is HTTP/2 where no GRPCRoute looks at it: `own-grpc-route` and `by-identity` are tried",
        folds: |cell| cell.sent.what == What::Grpc && !matches!(cell.policy, Policy::OwnGrpcRoute | Policy::ByIdentity),
    },
    Fold {
        reason: "policies are kept by port, whatever the control plane does meanwhile: IPv6 is tried while it is up, and \
                 with one request elsewhere",
        folds: |cell| cell.state != State::Up && cell.family == Family::V6 && cell.sent != Sent::HTTP1,
    },
    Fold {
        reason: "what a policy would say that is not known cannot matter: one that denies, one that permits all, one \
                 with routes and an opaque one are tried",
        folds: |cell| {
            let tried = [Policy::Deny, Policy::Audit, Policy::OwnHttpRoute, Policy::Opaque];
            !cell.state.is_asked() && !tried.contains(&cell.policy)
        },
    },
    Fold {
        reason: "a known policy does not change by what the control plane does: each way into the proxy is tried, as \
                 HTTP and as bytes",
        folds: |cell| {
            let tried = ["http1", "raw", "silence", "1:http1", "-:http1", "-:raw"].map(Sent::of);
            !matches!(cell.state, State::Up | State::NotYet) && !tried.contains(&cell.sent)
        },
    },
];

/// One connection, and what is expected of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) state: State,
    pub(super) policy: Policy,
    pub(super) sent: Sent,
    pub(super) identity: Identity,
    pub(super) family: Family,
}

/// What cannot differ.
struct Fold {
    reason: &'static str,
    folds: fn(&Cell) -> bool,
}

words! {
    /// What the control plane does, and whether the port was asked for before.
    State {
        /// It has answered before the connection comes.
        Up = "up",
        /// It is up, and the connection is the first to its port.
        First = "first connection to the port",
        /// It has not been there since the proxy started.
        NotYet = "not up yet",
        /// It has gone before the port was asked for.
        DownBefore = "down before the port was asked for",
        /// It has gone after it had answered.
        DownAfter = "down after",
        /// It knows nothing of the port, and never has.
        NotFoundBefore = "not found before the port was asked for",
        /// It has forgotten the port.
        NotFoundAfter = "not found after",
        /// It is killed and started again and again.
        Restarting = "restarting",
        /// The same, and the connection is the first to its port.
        RestartingFirst = "restarting, first connection to the port",
    }
}

words! {
    Policy {
        /// The default policy of the control plane, `all-authenticated`.
        NoServer = "no-server",
        /// A Server, and nothing that authorizes.
        Server = "server",
        /// The same, said.
        Deny = "deny",
        Audit = "audit",
        ServerAuthorization = "server-authorization",
        /// An AuthorizationPolicy that requires an identity.
        ByIdentity = "by-identity",
        /// One that requires the network of the client.
        ByNetwork = "by-network",
        ByOtherNetwork = "by-other-network",
        /// An HTTPRoute with an authorization of its own, of a Server that denies.
        OwnHttpRoute = "own-http-route",
        OwnGrpcRoute = "own-grpc-route",
        /// An HTTPRoute for another path, of a Server that permits all.
        NoSuchRoute = "no-such-route",
        RateLimit = "rate-limit",
        /// Servers of one protocol, which permit all but the opaque one.
        Http1 = "http1",
        Http2 = "http2",
        Opaque = "opaque",
        Tls = "tls",
    }
}

words! {
    /// What a policy makes of its port.
    PortKind {
        /// Of no protocol that is known, and without rules for requests.
        Detect = "detect",
        /// The same, with routes or limits for requests.
        Routes = "routes",
        /// The same, where only the routes authorize somebody.
        OwnRoutes = "own-routes",
        Http1 = "http1",
        Http2 = "http2",
        Grpc = "grpc",
        Opaque = "opaque",
        Tls = "tls",
        /// Its policy is not known.
        Unknown = "unknown",
    }
}

words! {
    Identity {
        /// No TLS.
        Nobody = "none",
        /// TLS without a certificate.
        Anonymous = "anonymous",
        /// Whom policies permit.
        Right = "right",
        /// Another workload of the mesh.
        Wrong = "wrong",
        Expired = "expired",
        /// The right name, by an authority that is not ours.
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
    What {
        Http1 = "http1",
        Http2 = "http2",
        Grpc = "grpc",
        /// A request whose method is in small letters.
        Odd = "odd",
        /// A ClientHello for another name.
        Tls = "tls",
        Raw = "raw",
        Silence = "silence",
        /// A request line and a header, and no end of them.
        Half = "half",
    }
}

words! {
    /// What a transport header says of what follows it.
    Header {
        /// There is none, and the connection goes to the application's port.
        Absent = "",
        NoProtocol = "-",
        Http1 = "1",
        Http2 = "2",
    }
}

words! {
    /// What becomes of what a client sent.
    Fate {
        /// It is a request, and judged by the rules for requests.
        Request = "request",
        /// It is bytes, and judged by the authorizations of the Server.
        Bytes = "bytes",
        /// Bytes where the mesh's TLS ends here, else refused.
        InTls = "in-tls",
        /// A request where the mesh's TLS ends here: a peer's proxy may have upgraded it. Else it is not HTTP.
        Upgraded = "upgraded",
        /// It is refused, because it is not the HTTP of the port.
        NotHttp = "not-http",
        /// It is a request that does not come to its end.
        Late = "late",
        /// It is no request, and only requests are authorized.
        NoRequest = "no-request",
        /// There is nothing to judge, and nobody to tell.
        Nothing = "nothing",
        /// It is refused, because a request is nothing that the port knows.
        NoHttp = "no-http",
        /// It is refused, because nobody has said who may use the port.
        Unknown = "unknown",
    }
}

words! {
    /// What a policy says of a client.
    Clearance {
        Permitted = "ok",
        OtherNetwork = "network",
        NoTls = "no-tls",
        NoIdentity = "no-identity",
        OtherIdentity = "identity",
        NoRoute = "no-route",
        Limited = "limited",
    }
}

words! {
    /// Why a connection or request is refused: codes of `docs/errors.md`.
    Cause {
        Denied = "policy-denied",
        Unknown = "policy_unknown",
        NoRoute = "no-route",
        Limited = "rate-limited",
        NotHttp = "bad-request",
        NoHttp = "invalid-policy",
        Late = "head-timeout",
        /// Nothing was said.
        Silent = "detect-timeout",
        Expired = "tls-expired",
        Untrusted = "tls-untrusted",
        Handshake = "tls-handshake",
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    /// The application gets what was sent, and its answer comes back.
    Permitted,
    /// The application gets nothing.
    Refused(Cause),
    /// What the policy says, or refused because it is unknown: the control plane may answer in time, or not.
    EitherOrUnknown(Option<Cause>),
    /// No connection comes to be.
    Dropped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sent {
    pub(super) header: Header,
    pub(super) what: What,
}

/// All cells of a state that are not folded; says how many are.
pub(super) fn cells(state: State) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &policy in Policy::ALL {
        for sent in Sent::all() {
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
    for Fold { reason, folds } in FOLDS {
        let n_before = cells.len();
        cells.retain(|cell| !folds(cell));
        eprintln!("{state}: {} cells are folded: {reason}", n_before - cells.len());
    }
    cells
}

impl Cell {
    pub(super) fn expected(&self) -> Expected {
        let refused = |port| self.refused_by_tls().or_else(|| self.judged(port));
        let cause = match self.state.knowledge() {
            Knowledge::Known => refused(self.policy.port()),
            Knowledge::Unknown => refused(PortKind::Unknown),
            Knowledge::Maybe => return Expected::EitherOrUnknown(refused(self.policy.port())),
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

    /// Why a port of this kind refuses it, if it does.
    fn judged(&self, port: PortKind) -> Option<Cause> {
        let in_tls = self.identity != Identity::Nobody;
        match self.fate(port) {
            Fate::Request | Fate::Bytes => self.clearance().cause(),
            Fate::InTls | Fate::Upgraded if in_tls => self.clearance().cause(),
            Fate::InTls if self.sent.what == What::Silence => Some(Cause::Silent),
            Fate::InTls => Some(Cause::Denied),
            Fate::Upgraded | Fate::NotHttp => Some(Cause::NotHttp),
            Fate::Late => Some(Cause::Late),
            Fate::NoRequest => Some(Cause::Denied),
            Fate::Nothing => Some(Cause::Silent),
            Fate::NoHttp => Some(Cause::NoHttp),
            Fate::Unknown => Some(Cause::Unknown),
        }
    }

    fn fate(&self, port: PortKind) -> Fate {
        Fate::of(at(BYTES, &self.sent.to_string(), port.word()))
    }

    /// What the policy finds missing, where it denies.
    pub(super) fn missing(&self) -> &'static str {
        let missing = match (self.fate(self.policy.port()), self.clearance()) {
            (Fate::NoRequest, _) => Clearance::OtherNetwork,
            (_, Clearance::Permitted) => Clearance::NoTls, // the port demands it
            (_, clearance) => clearance,
        };
        missing.word()
    }

    /// Whether it is refused for what it is by a port whose Server authorizes nobody: which of the two is counted depends on
    /// how far the proxy looked.
    pub(super) fn may_count_as_denied(&self) -> bool {
        let authorizes_nobody = matches!(self.policy, Policy::OwnHttpRoute | Policy::OwnGrpcRoute);
        authorizes_nobody && matches!(self.expected(), Expected::Refused(Cause::NotHttp | Cause::Silent))
    }

    fn clearance(&self) -> Clearance {
        Clearance::of(at(CLIENTS, self.policy.word(), self.identity.word()))
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
        PortKind::of(at(CLIENTS, self.word(), "port"))
    }
}

impl Clearance {
    fn cause(self) -> Option<Cause> {
        match self {
            Self::Permitted => None,
            Self::OtherNetwork | Self::NoTls | Self::NoIdentity | Self::OtherIdentity => Some(Cause::Denied),
            Self::NoRoute => Some(Cause::NoRoute),
            Self::Limited => Some(Cause::Limited),
        }
    }
}

/// What the proxy can know of a policy.
enum Knowledge {
    Known,
    Unknown,
    Maybe,
}

impl State {
    /// Whether the port was asked for before the connection came.
    pub(super) fn is_asked(self) -> bool {
        matches!(
            self,
            Self::Up | Self::DownAfter | Self::NotFoundAfter | Self::Restarting
        )
    }

    /// Whether each connection has to have a port of its own, to be the first there.
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
    /// Whether no policy has to refuse it, because TLS does.
    fn is_invalid(self) -> bool {
        matches!(self, Self::Expired | Self::OtherTrustDomain)
    }

    /// Whether the client's certificate is accepted.
    pub(super) fn is_proven(self) -> bool {
        matches!(self, Self::Right | Self::Wrong)
    }
}

impl Family {
    pub(super) fn server(self) -> IpAddr {
        match self {
            Self::V4 => super::scene::SERVER.into(),
            Self::V6 => v6(super::scene::SERVER).into(),
        }
    }
}

/// The other address of a host: fd79::20 for 10.79.0.20.
pub(super) fn v6(ip: Ipv4Addr) -> Ipv6Addr {
    let [_, network, _, host] = ip
        .octets()
        .map(|octet| u16::from_str_radix(&octet.to_string(), 16).unwrap());
    Ipv6Addr::new(0xfd00 + network, 0, 0, 0, 0, 0, 0, host)
}

impl Sent {
    pub(super) const HTTP1: Self = Self {
        header: Header::Absent,
        what: What::Http1,
    };

    fn all() -> impl Iterator<Item = Self> {
        rows(BYTES).map(|row| Self::of(row[0]))
    }

    fn of(word: &str) -> Self {
        let (header, what) = word.split_once(':').unwrap_or(("", word));
        Self {
            header: Header::of(header),
            what: What::of(what),
        }
    }
}

impl fmt::Display for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.header {
            Header::Absent => write!(f, "{}", self.what),
            header => write!(f, "{header}:{}", self.what),
        }
    }
}

/// The word of a table in a row, by its first word, and a column, by its title.
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
