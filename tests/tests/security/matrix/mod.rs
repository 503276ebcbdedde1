//! The policy matrix: which connections to a sidecar are permitted, and which are refused with which cause.
//!
//! [`table`] has the data: policy × input × identity × state of the control plane × address family.
//! Each test brings the control plane of one testbed into one state and tries all cells of it at once, with the shipped
//! binaries in network namespaces. [`egress`] has the egress policies.

mod application;
mod client;
mod counts;
mod egress;
mod manifests;
mod outage;
mod table;
mod testbed;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::runtime::Builder;
use tokio::sync::Semaphore;

use self::application::ReceivedTokens;
use self::client::{Client, Observed};
use self::counts::ExpectedCounts;
use self::table::{Answer, Cause, Cell, ClientInput, Expected, Family, Identity, InputKind, Policy, Refusal, State};
use self::testbed::{Ipv6Rules, Testbed};

#[test]
fn while_the_control_plane_is_up_each_port_enforces_its_policy() {
    check(&[State::Up, State::First], testbed::start_control_plane_first);
}

#[test]
fn before_the_control_plane_is_up_no_client_is_permitted() {
    check(&[State::NotYet], testbed::start_without_control_plane);
}

#[test]
fn while_the_control_plane_is_down_known_policies_apply_and_unknown_ports_are_refused() {
    check(
        &[State::DownBefore, State::DownAfter],
        testbed::start_then_kill_control_plane,
    );
}

#[test]
fn a_port_keeps_its_policy_when_the_control_plane_forgets_it() {
    check(
        &[State::NotFoundBefore, State::NotFoundAfter],
        testbed::replace_with_empty_control_plane,
    );
}

#[test]
fn while_the_control_plane_restarts_each_port_enforces_its_policy() {
    let Some(run) = PreparedRun::prepare(&[State::Restarting, State::RestartingFirst], Ipv6Rules::Written) else {
        return;
    };
    let PreparedRun {
        mut testbed,
        cells,
        listeners,
    } = run;
    testbed::start_control_plane_first(&mut testbed);
    let (outside, client) = (testbed.outside.clone(), Client::new(&testbed.credentials));
    let (testbed, n_restarts) = (Mutex::new(testbed), Mutex::new(0));
    let is_over = || *n_restarts.lock() >= MIN_RESTARTS;
    let (mut mismatches, n_runs) = std::thread::scope(|scope| {
        let restarting = scope.spawn(|| testbed::restart_until(&testbed, &n_restarts, is_over));
        let result = outside.run(|| {
            runtime().block_on(async {
                let received_tokens = application::serve(listeners);
                let (mut mismatches, mut n_runs) = (Vec::new(), 0);
                loop {
                    let is_last = is_over() || restarting.is_finished();
                    mismatches.extend(find_mismatches(&cells, &client, &received_tokens).await);
                    n_runs += 1;
                    if is_last {
                        return (mismatches, n_runs);
                    }
                }
            })
        });
        restarting.join().unwrap();
        result.unwrap()
    });
    let testbed = testbed.into_inner();
    mismatches.extend(find_count_mismatches(&testbed, &[(&cells, n_runs)]));
    report(cells.len(), &mismatches, &testbed);
}

/// Without redirect rules for IPv6, IPv6 traffic must not bypass the proxy.
#[test]
fn without_ipv6_redirect_rules_no_ipv6_reaches_the_application() {
    let Some(run) = PreparedRun::prepare(&[State::Up], Ipv6Rules::Disabled) else {
        return;
    };
    let PreparedRun {
        mut testbed,
        mut cells,
        listeners,
    } = run;
    testbed::start_control_plane_first(&mut testbed);
    let expected = |cell: &Cell| match cell.family {
        Family::V4 => cell.expected(),
        Family::V6 => Expected::Dropped,
    };
    cells
        .iter_mut()
        .for_each(|cell_at_port| cell_at_port.expected = expected(&cell_at_port.cell));
    let mut mismatches = run_once(&testbed, &cells, listeners);
    mismatches.extend(find_count_mismatches(&testbed, &[(&cells, 1)]));
    report(cells.len(), &mismatches, &testbed);
}

/// Prepares a testbed with `set_up`, and tries all cells of these states on it.
fn check(states: &[State], set_up: fn(&mut Testbed)) {
    let Some(run) = PreparedRun::prepare(states, Ipv6Rules::Written) else {
        return;
    };
    let PreparedRun {
        mut testbed,
        cells,
        listeners,
    } = run;
    set_up(&mut testbed);
    let mut mismatches = run_once(&testbed, &cells, listeners);
    mismatches.extend(find_count_mismatches(&testbed, &[(&cells, 1)]));
    report(cells.len(), &mismatches, &testbed);
}

/// A testbed whose processes are not started yet, with its cells.
struct PreparedRun {
    testbed: Testbed,
    cells: Vec<CellAtPort>,
    /// Listeners of the application, on the ports of all cells.
    listeners: Vec<std::net::TcpListener>,
}

struct CellAtPort {
    cell: Cell,
    expected: Expected,
    port: u16,
}

impl PreparedRun {
    fn prepare(states: &[State], ipv6: Ipv6Rules) -> Option<Self> {
        if !testbed::can_run() {
            return None;
        }
        let mut cells = Vec::new();
        for cell in states.iter().flat_map(|state| table::cells(*state, ipv6)) {
            let index = Policy::ALL.iter().position(|policy| *policy == cell.policy);
            let index = u16::try_from(index.expect("the cell is in the table")).unwrap();
            let port = match (cell.state.is_requested_before(), cell.state.is_first()) {
                (true, _) => DECLARED_PORTS_START + index,
                (false, false) => UNDECLARED_PORTS_START + index,
                (false, true) => SINGLE_USE_PORTS_START + u16::try_from(cells.len()).unwrap(),
            };
            let expected = cell.expected();
            cells.push(CellAtPort { cell, expected, port });
        }
        let ports: BTreeMap<_, _> = cells
            .iter()
            .map(|cell_at_port| (cell_at_port.port, cell_at_port.cell.policy))
            .collect();
        let watched_ports = cells
            .iter()
            .filter(|cell_at_port| cell_at_port.cell.state.is_requested_before());
        let watched_ports: BTreeSet<_> = watched_ports.map(|cell_at_port| cell_at_port.port).collect();
        let policies = ports.iter().map(|(port, policy)| manifests::policy(*policy, *port));
        let manifests = policies.collect::<String>() + &manifests::workload();
        let testbed = Testbed::build("server", &manifests, &Vec::from_iter(watched_ports), ipv6);
        let listeners = application::listen(&testbed.server, &Vec::from_iter(ports.into_keys()));
        Some(Self {
            testbed,
            cells,
            listeners,
        })
    }
}

fn run_once(testbed: &Testbed, cells: &[CellAtPort], listeners: Vec<std::net::TcpListener>) -> Vec<String> {
    let client = Client::new(&testbed.credentials);
    let run = || {
        runtime().block_on(async {
            let received_tokens = application::serve(listeners);
            find_mismatches(cells, &client, &received_tokens).await
        })
    };
    testbed.outside.run(run).unwrap()
}

/// A single-threaded runtime: sockets are opened in the namespace of the thread.
fn runtime() -> tokio::runtime::Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Tries all cells concurrently, with a separate limit for those that have to wait.
async fn find_mismatches(cells: &[CellAtPort], client: &Client, received_tokens: &ReceivedTokens) -> Vec<String> {
    let (quick, waiting) = (
        Semaphore::new(MAX_CONCURRENT_CELLS),
        Semaphore::new(MAX_CONCURRENT_WAITING_CELLS),
    );
    let results = cells.iter().enumerate().map(async |(n, cell_at_port)| {
        let waits = matches!(
            cell_at_port.cell.sent.kind,
            InputKind::Silence | InputKind::IncompleteHead
        ) || matches!(cell_at_port.expected, Expected::Refused(refusal) if refusal.cause == Cause::Unknown);
        let permits = if waits { &waiting } else { &quick };
        let _permit = permits.acquire().await.unwrap();
        cell_at_port.mismatch(n, client, received_tokens).await
    });
    let mut mismatches: Vec<_> = join_all(results).await.into_iter().flatten().collect();
    mismatches.extend(find_limits_without_permitted_request(cells, received_tokens));
    mismatches
}

/// A rate limit permits requests until it is reached, so one request under each limit must have reached the application.
fn find_limits_without_permitted_request(cells: &[CellAtPort], received_tokens: &ReceivedTokens) -> Vec<String> {
    let mut has_permitted = BTreeMap::new();
    for (n, cell_at_port) in cells.iter().enumerate() {
        let Some(limit) = cell_at_port.limit() else { continue };
        let is_permitted = |n_try| received_tokens.contains(&token(n, n_try));
        *has_permitted.entry(limit).or_insert(false) |= (0..MAX_REQUESTS_BEFORE_LIMIT).any(is_permitted);
    }
    let without = has_permitted.into_iter().filter(|(_, has_permitted)| !has_permitted);
    without
        .map(|((port, identity), _)| format!("port {port}, identity {identity:?}: the rate limit permitted no request"))
        .collect()
}

/// The token of a request of a cell.
fn token(n_cell: usize, n_try: usize) -> String {
    format!("token-{n_cell}-{n_try}")
}

impl CellAtPort {
    /// The rate limit that refuses the cell's last request, as its port, and the identity if each has a limit of its own. Clients
    /// without an identity share a limit.
    fn limit(&self) -> Option<(u16, Option<Identity>)> {
        let is_limited = matches!(self.expected, Expected::Refused(refusal) if refusal.cause == Cause::Limited);
        let Cell { policy, identity, .. } = self.cell;
        let has_own = policy == Policy::IdentityRateLimit && identity.has_valid_certificate();
        is_limited.then(|| (self.port, has_own.then_some(identity)))
    }

    /// Tries the cell and returns what was wrong.
    async fn mismatch(&self, n: usize, client: &Client, received_tokens: &ReceivedTokens) -> Option<String> {
        let Cell {
            sent, identity, family, ..
        } = self.cell;
        let to = SocketAddr::new(family.server(), self.port);
        // The rate limit lets the first requests pass.
        let n_tries = self.limit().map_or(1, |_| MAX_REQUESTS_BEFORE_LIMIT);
        let mut result = (Observed::Timeout, false);
        for n_try in 0..n_tries {
            let token = token(n, n_try);
            let observed = client.send(sent, identity, to, &token).await;
            result = (observed, received_tokens.contains(&token));
            if result.0 != Observed::Application {
                break;
            }
        }
        let (observed, reached) = result;
        let is_silent = sent.kind == InputKind::Silence;
        let fits = match self.expected {
            Expected::Permitted => observed == Observed::Application && (reached || is_silent),
            Expected::Refused(refusal) => !reached && refusal.fits(&observed, sent, identity),
            Expected::ByPolicyOrUnknown { refusal: None, .. } if observed == Observed::Application => {
                reached || is_silent
            }
            Expected::ByPolicyOrUnknown { refusal, unknown } => {
                let mut refusals = refusal.into_iter().chain([unknown]);
                !reached && refusals.any(|refusal| refusal.fits(&observed, sent, identity))
            }
            Expected::Dropped => !reached && observed == Observed::Unreachable,
        };
        let got = if reached {
            "the application received the input"
        } else {
            "the application did not receive the input"
        };
        let Self { cell, expected, .. } = self;
        (!fits).then(|| format!("{cell}\n    expected: {expected:?}\n    result: {observed:?}, and {got}"))
    }
}

impl Refusal {
    /// Whether a client that is refused in this way may observe `observed`.
    fn fits(self, observed: &Observed, sent: ClientInput, identity: Identity) -> bool {
        match (self.answer, observed) {
            (Answer::Closed, Observed::Closed) => true,
            (Answer::Status, Observed::Status { status, grpc, cause }) => {
                let (expected_status, expected_grpc) = self.cause.codes();
                let is_status = match sent.kind {
                    InputKind::Grpc => *grpc == Some(expected_grpc),
                    _ => *status == expected_status && grpc.is_none(),
                };
                // Clients without an identity do not get the cause.
                let expected_cause = identity.has_valid_certificate().then_some(self.cause.word());
                is_status && cause.as_deref() == expected_cause
            }
            _ => false,
        }
    }
}

impl Cause {
    /// The HTTP status and the gRPC status of its responses.
    fn codes(self) -> (u16, u16) {
        match self {
            Self::Denied => (403, 7),
            Self::NoRoute => (404, 5),
            Self::Limited => (429, 8),
            Self::Late => (408, 4),
            Self::HttpNotAllowed => (500, 13),
            Self::Unknown => (503, 14),
            Self::BadRequest => (400, 3),
            Self::NotHttp | Self::Silent | Self::Idle | Self::Expired | Self::Untrusted | Self::Handshake => {
                panic!("{self} has no responses")
            }
        }
    }
}

/// The counters of the sidecar must equal the number of cells, for each cause and for each reason of each policy. Each group of
/// cells comes with the number of times that it was tried.
fn find_count_mismatches(testbed: &Testbed, tried: &[(&[CellAtPort], u64)]) -> Vec<String> {
    let causes = Cause::ALL.iter().filter(|cause| **cause != Cause::Idle);
    let causes: Vec<_> = causes.map(|cause| cause.word()).collect();
    let mut counts = ExpectedCounts::none("inbound", &causes);
    for (cells, n) in tried {
        for cell_at_port in *cells {
            cell_at_port.add_to(&mut counts, *n);
        }
    }
    counts.mismatches(&testbed.server)
}

impl CellAtPort {
    /// Adds what the sidecar counts if the cell is tried `n` times.
    fn add_to(&self, counts: &mut ExpectedCounts, n: u64) {
        let Self { cell, expected, port } = *self;
        let refusals = match expected {
            Expected::Permitted | Expected::Dropped => return,
            Expected::Refused(refusal) => vec![refusal],
            Expected::ByPolicyOrUnknown { refusal, unknown } => refusal.into_iter().chain([unknown]).collect(),
        };
        let mut causes: BTreeSet<_> = refusals.iter().map(|refusal| refusal.cause).collect();
        let may_count_as_denied = causes.iter().any(|cause| cell.may_count_as_denied(*cause));
        if may_count_as_denied {
            causes.insert(Cause::Denied);
        }
        let is_always_counted =
            !causes.remove(&Cause::Idle) && !matches!(expected, Expected::ByPolicyOrUnknown { refusal: None, .. });
        let words: Vec<_> = causes.iter().map(|cause| cause.word()).collect();
        match (&words[..], is_always_counted) {
            ([cause], true) => counts.add(cause, n),
            (causes, true) => counts.add_one_of(causes, n),
            (causes, false) => causes.iter().for_each(|cause| counts.permit(cause, n)),
        }
        if causes.contains(&Cause::Denied) {
            let reason = if may_count_as_denied {
                "network"
            } else {
                cell.denial_reason()
            };
            match (causes.len(), is_always_counted) {
                (1, true) => counts.add_denials(port, reason, n),
                _ => counts.permit_denials(port, reason, n),
            }
        }
    }
}

fn report(n_cells: usize, mismatches: &[String], testbed: &Testbed) {
    eprintln!("{n_cells} cells tried, {} failures", mismatches.len());
    let mismatches: String = mismatches.iter().map(|mismatch| format!("\n\n{mismatch}")).collect();
    assert!(
        mismatches.is_empty(),
        "{mismatches}\n\nend of the log of the sidecar:\n{}",
        testbed.log_tail()
    );
}

/// Ports whose policies the sidecar watches from its start, one for each policy.
const DECLARED_PORTS_START: u16 = 10_000;
/// Ports whose policies the sidecar does not request before a connection.
const UNDECLARED_PORTS_START: u16 = 11_000;
/// First of the undeclared ports that are used by one cell only.
const SINGLE_USE_PORTS_START: u16 = 12_000;
const MAX_CONCURRENT_CELLS: usize = 16;
const MAX_CONCURRENT_WAITING_CELLS: usize = 200;
/// Maximum number of requests until the rate limit of one per second refuses one.
const MAX_REQUESTS_BEFORE_LIMIT: usize = 5;
const MIN_RESTARTS: u32 = 4;
