//! Egress policies: EgressNetworks, through the sidecar of a client.
//!
//! The policy depends on the dialled address, so there is an address for each policy. The application listens on all of them.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::mpsc;
use std::thread;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tulle_core::netns::Namespace;

use super::application::{self, ReceivedTokens};
use super::client::{Client, Observed};
use super::counts::ExpectedCounts;
use super::table::{self, ClientInput, Family, Header, Identity, InputKind, State};
use super::testbed::{self, Ipv6Rules, Testbed};
use super::words::words;
use super::{MAX_CONCURRENT_WAITING_CELLS, MIN_RESTARTS, runtime};

/// The expected result for each input, by the policy of the dialled address.
///
/// Identities are not varied, because the sidecar belongs to the client and does not authenticate it. Transport headers
/// are not varied, because applications send none.
const EXPECTED_RESULTS: &str = "
sent        none  allow  deny    http-route  other-route  grpc-route  tls-route  tcp-route
http1       ok    ok     403     ok          403          no-preface  no-name    ok
http2       ok    ok     403     ok          403          ok          no-name    ok
grpc        ok    ok     403     ok          403          ok          no-name    ok
lowercase   ok    ok     closed  closed      closed       no-preface  no-name    ok
tls         ok    ok     closed  closed      closed       no-preface  ok         ok
raw         ok    ok     closed  closed      closed       no-preface  no-name    ok
silence     ok    ok     closed  closed      closed       idle        no-name    ok
incomplete  late  late   late    late        late         no-preface  no-name    ok
";

/// The knowledge of the sidecar in each state of the control plane.
///
/// The control plane has an answer for every address outside the cluster, so there is no state in which it finds nothing.
const STATES: &[(State, Knowledge)] = &[
    (State::Up, Knowledge::Policy),
    (State::NotYet, Knowledge::Nothing),
    (State::DownBefore, Knowledge::Nothing),
    (State::DownAfter, Knowledge::Policy),
    (State::Restarting, Knowledge::Policy),
    (State::RestartingFirst, Knowledge::Maybe),
];

/// Cells that are left out because others give the same result, with the reason and the cells that cover them.
const SKIPPED_CELLS: &[SkippedCells] = &[
    SkippedCells {
        reason: "a GRPCRoute is enforced as an HTTPRoute, on an address that requires HTTP/2 (covered while the control \
                 plane is up, and in other states by `http-route`)",
        skips: |cell| cell.policy == EgressPolicy::GrpcRoute && cell.state != State::Up,
    },
    SkippedCells {
        reason: "an HTTP/2 server waits ten seconds for the first byte (covered by `http2` of inbound policies)",
        skips: |cell| cell.policy == EgressPolicy::GrpcRoute && cell.sent.kind == InputKind::Silence,
    },
    SkippedCells {
        reason: "during a restart, the first connection to an address waits for the policy as in the two states without \
                 restarts (covered by all inputs and policies while the control plane is up, and before it is up)",
        skips: |cell| {
            let policies = [
                EgressPolicy::Absent,
                EgressPolicy::Allow,
                EgressPolicy::Deny,
                EgressPolicy::HttpRoute,
            ];
            let inputs = [InputKind::Http1, InputKind::RawBytes, InputKind::Silence];
            let is_tried = policies.contains(&cell.policy) && inputs.contains(&cell.sent.kind);
            cell.state == State::RestartingFirst && !is_tried
        },
    },
    SkippedCells {
        reason: "the first connection to an address does not depend on its family (covered by one input)",
        skips: |cell| {
            let is_covered = cell.family == Family::V6 && cell.sent.kind != InputKind::Http1;
            cell.state == State::RestartingFirst && is_covered
        },
    },
];

/// Cells that are left out, because others give the same result.
struct SkippedCells {
    reason: &'static str,
    skips: fn(&Cell) -> bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Knowledge {
    Policy,
    /// The connection is refused, because its policy is not known.
    Nothing,
    /// The control plane may or may not answer in time.
    Maybe,
}

words! {
    EgressPolicy {
        /// No EgressNetwork contains the address.
        Absent = "none",
        Allow = "allow",
        Deny = "deny",
        /// Denies, with an HTTPRoute that matches.
        HttpRoute = "http-route",
        /// Denies, with an HTTPRoute that does not match.
        OtherRoute = "other-route",
        /// Denies, with a GRPCRoute that matches. The address then requires HTTP/2.
        GrpcRoute = "grpc-route",
        TlsRoute = "tls-route",
        TcpRoute = "tcp-route",
    }
}

words! {
    Expected {
        Permitted = "ok",
        /// HTTP status 403, or the matching gRPC status.
        Forbidden = "403",
        Closed = "closed",
        /// Closed, because a TLSRoute needs a server name.
        ClosedWithoutName = "no-name",
        /// Closed, because the address requires HTTP/2.
        ClosedWithoutPreface = "no-preface",
        /// Closed without an input, which is not a failure.
        Idle = "idle",
        /// The request does not complete; the client's sidecar answers 408 or the matching gRPC status after its time limit.
        Late = "late",
        /// Refused, because the policy is not known: with 503 or the matching gRPC status if it is HTTP, otherwise closed.
        Unknown = "unknown",
    }
}

#[test]
fn while_the_control_plane_is_up_egress_networks_are_enforced() {
    check(&[State::Up], testbed::start_control_plane_first, |_| {});
}

#[test]
fn before_the_control_plane_is_up_no_egress_is_permitted() {
    check(&[State::NotYet], testbed::start_without_control_plane, |_| {});
}

#[test]
fn while_the_control_plane_is_down_known_egress_policies_apply() {
    check(
        &[State::DownBefore, State::DownAfter],
        testbed::start_control_plane_first,
        Testbed::kill_control_plane,
    );
}

#[test]
fn while_the_control_plane_restarts_egress_networks_are_enforced() {
    let Some(run) = PreparedRun::prepare(&[State::Restarting, State::RestartingFirst]) else {
        return;
    };
    let PreparedRun {
        mut testbed,
        cells,
        listeners,
    } = run;
    let (first_cells, cells): (Vec<_>, Vec<_>) = cells.into_iter().partition(|cell| cell.state.is_first());
    testbed::start_control_plane_first(&mut testbed);
    let (host, client) = (testbed.client.clone(), Client::new(&testbed.credentials));
    let (testbed, n_restarts) = (Mutex::new(testbed), Mutex::new(0));
    let (testbed, n_restarts) = (&testbed, &n_restarts);
    let is_over = || *n_restarts.lock() >= MIN_RESTARTS;
    let (mut mismatches, n_runs) = thread::scope(|scope| {
        let (requested_tx, requested_rx) = mpsc::channel();
        let restarting = scope.spawn(move || {
            // The policies must be known before the first restart. If the requests panic, the sender is dropped.
            if requested_rx.recv().is_ok() {
                testbed::restart_until(testbed, n_restarts, is_over);
            }
        });
        let run = || {
            runtime().block_on(async {
                let received_tokens = application::serve(listeners);
                let mut mismatches = find_mismatches(&cells, &client, &received_tokens).await;
                requested_tx.send(()).unwrap();
                mismatches.extend(find_mismatches(&first_cells, &client, &received_tokens).await);
                let mut n_runs = 1;
                loop {
                    let is_last = is_over() || restarting.is_finished();
                    mismatches.extend(find_mismatches(&cells, &client, &received_tokens).await);
                    n_runs += 1;
                    if is_last {
                        return (mismatches, n_runs);
                    }
                }
            })
        };
        let result = host.run(run).unwrap();
        restarting.join().unwrap();
        result
    });
    mismatches.extend(find_count_mismatches(&host, &[(&cells, n_runs), (&first_cells, 1)]));
    super::report(cells.len() + first_cells.len(), &mismatches, &testbed.lock());
}

#[derive(Clone, Copy)]
struct Cell {
    state: State,
    policy: EgressPolicy,
    sent: ClientInput,
    family: Family,
    /// The dialled address. Cells in the state `RestartingFirst` have one of their own, others one for each policy.
    address: IpAddr,
}

/// A testbed whose processes are not started yet, with its cells.
struct PreparedRun {
    testbed: Testbed,
    cells: Vec<Cell>,
    /// Listeners of the application, on all addresses.
    listeners: Vec<std::net::TcpListener>,
}

impl PreparedRun {
    fn prepare(states: &[State]) -> Option<Self> {
        if !testbed::can_run() {
            return None;
        }
        let testbed = Testbed::build("client", &manifests(), &[], Ipv6Rules::Written);
        let cells = cells(states);
        let addresses: BTreeSet<_> = cells.iter().map(|cell| cell.address).collect();
        let lines = addresses.iter().map(|ip| match ip {
            IpAddr::V4(_) => format!("addr add {ip}/32 dev eth0\n"),
            IpAddr::V6(_) => format!("addr add {ip}/128 dev eth0 nodad\n"),
        });
        testbed.outside.ip(&lines.collect::<String>()).unwrap();
        let listeners = application::listen(&testbed.outside, &[PORT]);
        Some(Self {
            testbed,
            cells,
            listeners,
        })
    }
}

/// Tries all cells of some states: starts the testbed, sends the first requests, then applies `changes`.
fn check(states: &[State], bring_up: fn(&mut Testbed), changes: fn(&mut Testbed)) {
    let Some(run) = PreparedRun::prepare(states) else {
        return;
    };
    let PreparedRun {
        mut testbed,
        cells,
        listeners,
    } = run;
    bring_up(&mut testbed);
    let client = Client::new(&testbed.credentials);
    let is_requested_before = |cell: &&Cell| cell.state.is_requested_before();
    let requested_before: Vec<_> = cells.iter().filter(is_requested_before).copied().collect();
    let host = testbed.client.clone();
    let run = || {
        runtime().block_on(async {
            let received_tokens = application::serve(listeners);
            let mut mismatches = find_mismatches(&requested_before, &client, &received_tokens).await;
            changes(&mut testbed);
            mismatches.extend(find_mismatches(&cells, &client, &received_tokens).await);
            mismatches
        })
    };
    let mut mismatches = host.run(run).unwrap();
    mismatches.extend(find_count_mismatches(&host, &[(&requested_before, 1), (&cells, 1)]));
    super::report(cells.len(), &mismatches, &testbed);
}

fn cells(states: &[State]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &state in states {
        for &policy in EgressPolicy::ALL {
            for row in table::rows(EXPECTED_RESULTS) {
                let sent = ClientInput {
                    header: Header::Absent,
                    kind: InputKind::parse(row[0]),
                };
                let cell = |family: &Family| Cell {
                    state,
                    policy,
                    sent,
                    family: *family,
                    address: policy.address(state.is_requested_before(), *family),
                };
                cells.extend(Family::ALL.iter().map(cell));
            }
        }
    }
    for SkippedCells { reason, skips } in SKIPPED_CELLS {
        let n_before = cells.len();
        cells.retain(|cell| !skips(cell));
        eprintln!("{} cells are equivalent to others: {reason}", n_before - cells.len());
    }
    let first_cells = cells.iter_mut().filter(|cell| cell.state.is_first());
    for (cell, n) in first_cells.zip(1..) {
        cell.address = cell.policy.single_use_address(n, cell.family);
    }
    cells
}

async fn find_mismatches(cells: &[Cell], client: &Client, received_tokens: &ReceivedTokens) -> Vec<String> {
    let permits = Semaphore::new(MAX_CONCURRENT_WAITING_CELLS);
    let results = cells.iter().enumerate().map(async |(n, cell)| {
        let _permit = permits.acquire().await.unwrap();
        cell.mismatch(n, client, received_tokens).await
    });
    join_all(results).await.into_iter().flatten().collect()
}

/// The counters of the sidecar must equal the number of cells, for each cause. Each group of cells comes with the number of times
/// that it was tried.
fn find_count_mismatches(host: &Namespace, tried: &[(&[Cell], u64)]) -> Vec<String> {
    let causes: Vec<_> = Expected::ALL.iter().filter_map(|expected| expected.cause()).collect();
    let mut counts = ExpectedCounts::none("outbound", &causes);
    for (cells, n) in tried {
        for cell in *cells {
            let results = cell.expected();
            let causes: BTreeSet<_> = results.iter().filter_map(|expected| expected.cause()).collect();
            let is_always_counted = results.iter().all(|expected| expected.cause().is_some());
            let causes = Vec::from_iter(causes);
            match (&causes[..], is_always_counted) {
                ([cause], true) => counts.add(cause, *n),
                (causes, true) => counts.add_one_of(causes, *n),
                (causes, false) => causes.iter().for_each(|cause| counts.permit(cause, *n)),
            }
        }
    }
    counts.mismatches(host)
}

impl Cell {
    async fn mismatch(&self, n: usize, client: &Client, received_tokens: &ReceivedTokens) -> Option<String> {
        let to = SocketAddr::new(self.address, PORT);
        let token = format!("token-{}-{n}", self.state.is_requested_before());
        let observed = client.send(self.sent, Identity::Absent, to, &token).await;
        let reached = received_tokens.contains(&token);
        let expected = self.expected();
        let fits = |expected: &Expected| match expected {
            Expected::Permitted => {
                observed == Observed::Application && (reached || self.sent.kind == InputKind::Silence)
            }
            _ => !reached && expected.fits(&observed, self.sent),
        };
        (!expected.iter().any(fits))
            .then(|| format!("{self}\n    expected: {expected:?}\n    result: {observed:?}, reached: {reached}"))
    }

    /// The possible results.
    fn expected(&self) -> Vec<Expected> {
        let known = STATES.iter().find(|(state, _)| *state == self.state);
        let by_policy = table::lookup(EXPECTED_RESULTS, self.sent.kind.word(), self.policy.word());
        let by_policy = Expected::parse(by_policy);
        let unknown = match self.sent.kind {
            InputKind::IncompleteHead => Expected::Late,
            _ => Expected::Unknown,
        };
        match known.expect("the cell has a row").1 {
            Knowledge::Policy => vec![by_policy],
            Knowledge::Nothing => vec![unknown],
            Knowledge::Maybe => vec![by_policy, unknown],
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            state,
            policy,
            sent,
            family,
            address: _,
        } = self;
        write!(f, "control plane: {state}; egress: {policy}; sent: {sent}; {family}")
    }
}

impl Expected {
    /// Whether a client that sends this and is refused may observe `observed`.
    fn fits(self, observed: &Observed, sent: ClientInput) -> bool {
        let (expected_status, expected_grpc) = match self {
            Self::Permitted => return false,
            Self::Closed | Self::ClosedWithoutName | Self::ClosedWithoutPreface | Self::Idle => {
                return *observed == Observed::Closed;
            }
            Self::Unknown if !sent.is_request() => return *observed == Observed::Closed,
            Self::Forbidden => (403, 9),
            Self::Late => (408, 4),
            Self::Unknown => (503, 14),
        };
        let Observed::Status { status, grpc, cause } = observed else {
            return false;
        };
        let is_status = match sent.kind {
            InputKind::Grpc => *grpc == Some(expected_grpc),
            _ => *status == expected_status && grpc.is_none(),
        };
        is_status && cause.as_deref() == self.cause()
    }

    /// The cause that the sidecar counts; `None` if it counts no failure.
    fn cause(self) -> Option<&'static str> {
        match self {
            Self::Permitted | Self::Idle => None,
            Self::Forbidden => Some("injected"),
            Self::Closed => Some("forbidden"),
            Self::ClosedWithoutName => Some("no-server-name"),
            Self::ClosedWithoutPreface => Some("bad-request"),
            Self::Late => Some("head-timeout"),
            Self::Unknown => Some("discovery-timeout"),
        }
    }
}

impl EgressPolicy {
    fn index(self) -> u8 {
        let index = Self::ALL.iter().position(|policy| *policy == self);
        u8::try_from(index.expect("the policy is in the table")).unwrap()
    }

    /// An address with this policy, for one cell.
    fn single_use_address(self, n: u8, family: Family) -> IpAddr {
        match family {
            Family::V4 => Ipv4Addr::new(198, 18, self.index(), n).into(),
            Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 1, self.index().into(), 0, 0, 0, n.into()).into(),
        }
    }

    /// An address with this policy: one that is dialled before the state begins, or another.
    fn address(self, requested_before: bool, family: Family) -> IpAddr {
        let index = self.index();
        let host = if requested_before { 10 + index } else { 110 + index };
        match family {
            Family::V4 => Ipv4Addr::new(198, 51, 100, host).into(),
            Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, host.into()).into(),
        }
    }

    fn manifest(self) -> String {
        let policy = match self {
            Self::Absent => return String::new(),
            Self::Allow => "Allow",
            _ => "Deny",
        };
        let cidr = |requested_before, family: &Family| match self.address(requested_before, *family) {
            IpAddr::V4(ip) => format!("{{cidr: {ip}/32}}"),
            IpAddr::V6(ip) => format!("{{cidr: \"{ip}/128\"}}"),
        };
        let networks = [true, false].map(|requested_before| {
            Family::ALL
                .iter()
                .map(|family| cidr(requested_before, family))
                .collect::<Vec<_>>()
                .join(", ")
        });
        let index = self.index();
        let single_use = format!("{{cidr: 198.18.{index}.0/24}}, {{cidr: \"2001:db8:1:{index:x}::/64\"}}");
        let networks = format!("{}, {single_use}", networks.join(", "));
        let network = format!(
            "\
---
apiVersion: policy.linkerd.io/v1alpha1
kind: EgressNetwork
metadata: {{name: {self}, namespace: shop}}
spec: {{trafficPolicy: {policy}, networks: [{networks}]}}
"
        );
        let path = |path: &str| format!("matches: [{{path: {{type: PathPrefix, value: {path}}}}}], ");
        network
            + &match self {
                Self::Absent | Self::Allow | Self::Deny => String::new(),
                Self::HttpRoute => self.route("HTTPRoute", "v1", "", &path("/own")),
                Self::OtherRoute => self.route("HTTPRoute", "v1", "", &path("/other")),
                Self::GrpcRoute => {
                    let matches = "matches: [{method: {service: own, method: Call}}], ";
                    self.route("GRPCRoute", "v1", "", matches)
                }
                Self::TlsRoute => self.route("TLSRoute", "v1alpha2", "  hostnames: [\"*.test\"]\n", ""),
                Self::TcpRoute => self.route("TCPRoute", "v1alpha2", "", ""),
            }
    }

    /// A route of the EgressNetwork to the address that the client dials.
    fn route(self, kind: &str, version: &str, hostnames: &str, matches: &str) -> String {
        format!(
            "\
---
apiVersion: gateway.networking.k8s.io/{version}
kind: {kind}
metadata: {{name: {self}, namespace: shop}}
spec:
  parentRefs: [{{group: policy.linkerd.io, kind: EgressNetwork, name: {self}, port: {PORT}}}]
{hostnames}  rules: [{{{matches}backendRefs: [{{group: policy.linkerd.io, kind: EgressNetwork, name: {self}}}]}}]
"
        )
    }
}

fn manifests() -> String {
    let client = testbed::identity("client");
    let workload = format!(
        "\
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {{name: client, namespace: shop, labels: {{app: client}}}}
spec:
  meshTLS: {{identity: {client}, serverName: {client}}}
  workloadIPs: [{{ip: 10.79.0.10}}, {{ip: \"fd79::10\"}}]
"
    );
    let policies = EgressPolicy::ALL.iter().map(|policy| policy.manifest());
    workload + &policies.collect::<String>()
}

const PORT: u16 = 8000;
