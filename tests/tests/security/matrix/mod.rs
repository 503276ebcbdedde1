//! The policy matrix: which connections to a sidecar are permitted, and which are refused with which cause.
//!
//! [`table`] has the data: policy × input × identity × state of the control plane × address family.
//! Each test brings the control plane of one testbed into one state and tries all cells of it at once, with the shipped
//! binaries in network namespaces. [`egress`] has the egress policies.

mod application;
mod client;
mod egress;
mod manifests;
mod outage;
mod table;
mod testbed;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::application::ReceivedTokens;
use self::client::{Client, Observed};
use self::table::{Cause, Cell, Expected, Family, Identity, InputKind, Policy, State};
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
    let faults = std::thread::scope(|scope| {
        let restarting = scope.spawn(|| testbed::restart_until(&testbed, &n_restarts, is_over));
        let faults = outside.run(|| {
            runtime().block_on(async {
                let reached = application::serve(listeners);
                let mut faults = Vec::new();
                loop {
                    let is_last = is_over() || restarting.is_finished();
                    faults.extend(faults_of(&cells, &client, &reached).await);
                    if is_last {
                        return faults;
                    }
                }
            })
        });
        restarting.join().unwrap();
        faults.unwrap()
    });
    report(cells.len(), &faults, &testbed.lock());
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
    // Packets are dropped before the proxy, so policy and protocol do not matter: one cell of each kind is tried.
    cells.retain(|cell_at_port| {
        let cell = &cell_at_port.cell;
        let policies = [Policy::Audit, Policy::Deny, Policy::Opaque];
        let identities = [Identity::Absent, Identity::Permitted];
        policies.contains(&cell.policy)
            && identities.contains(&cell.identity)
            && [InputKind::Http1, InputKind::RawBytes].contains(&cell.sent.what)
    });
    let expected = |cell: &Cell| match cell.family {
        Family::V4 => cell.expected(),
        Family::V6 => Expected::Dropped,
    };
    cells
        .iter_mut()
        .for_each(|cell_at_port| cell_at_port.expected = expected(&cell_at_port.cell));
    let faults = run_once(&testbed, &cells, listeners);
    report(cells.len(), &faults, &testbed);
}

/// Tries all cells of some states, which share one state of the testbed.
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
    let mut faults = run_once(&testbed, &cells, listeners);
    faults.extend(faults_of_counts(&testbed, &cells));
    report(cells.len(), &faults, &testbed);
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
        for cell in states.iter().flat_map(|state| table::cells(*state)) {
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
            let reached = application::serve(listeners);
            faults_of(cells, &client, &reached).await
        })
    };
    testbed.outside.run(run).unwrap()
}

/// A single-threaded runtime: sockets are opened in the namespace of the thread.
fn runtime() -> tokio::runtime::Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Tries all cells concurrently, with a separate limit for those that have to wait.
async fn faults_of(cells: &[CellAtPort], client: &Client, reached: &ReceivedTokens) -> Vec<String> {
    let (quick, waiting) = (
        Semaphore::new(MAX_CONCURRENT_CELLS),
        Semaphore::new(MAX_CONCURRENT_WAITING_CELLS),
    );
    let results = cells.iter().enumerate().map(async |(n, cell_at_port)| {
        let waits = matches!(
            cell_at_port.cell.sent.what,
            InputKind::Silence | InputKind::IncompleteHead
        ) || cell_at_port.expected == UNKNOWN;
        let permits = if waits { &waiting } else { &quick };
        let _permit = permits.acquire().await.unwrap();
        cell_at_port.fault(n, client, reached).await
    });
    join_all(results).await.into_iter().flatten().collect()
}

impl CellAtPort {
    /// Tries the cell and returns what was wrong.
    async fn fault(&self, n: usize, client: &Client, reached: &ReceivedTokens) -> Option<String> {
        let Cell {
            sent,
            identity,
            family,
            policy,
            ..
        } = self.cell;
        let to = SocketAddr::new(family.server(), self.port);
        // The rate limit lets the first requests pass.
        let n_tries = if policy == Policy::RateLimit { MAX_UNLIMITED } else { 1 };
        let mut result = (Observed::Timeout, false);
        for n_try in 0..n_tries {
            let token = format!("token-{n}-{n_try}");
            let observed = client.send(sent, identity, to, &token).await;
            result = (observed, reached.contains(&token));
            if result.0 != Observed::Application {
                break;
            }
        }
        let (observed, reached) = result;
        let is_silent = sent.what == InputKind::Silence;
        let fits = match self.expected {
            Expected::Permitted => observed == Observed::Application && (reached || is_silent),
            Expected::Refused(cause) => !reached && cause.matches(&observed, identity),
            Expected::ByPolicyOrUnknown { refusal: None } if observed == Observed::Application => reached || is_silent,
            Expected::ByPolicyOrUnknown { refusal } => {
                let is_refusal = refusal.is_some_and(|cause| cause.matches(&observed, identity));
                !reached && (is_refusal || Cause::Unknown.matches(&observed, identity))
            }
            Expected::Dropped => !reached && observed == Observed::Unreachable,
        };
        let got = if reached {
            "the application got it"
        } else {
            "the application did not get it"
        };
        let Self { cell, expected, .. } = self;
        (!fits).then(|| format!("{cell}\n    expected: {expected:?}\n    result: {observed:?}, and {got}"))
    }
}

impl Cause {
    /// Whether a client that is refused for this cause may observe `observed`.
    fn matches(self, observed: &Observed, identity: Identity) -> bool {
        match observed {
            Observed::Application | Observed::Unreachable => false,
            Observed::Closed => true,
            Observed::Timeout => self == Self::Silent,
            Observed::Status { status, grpc, cause } => {
                // Clients without an identity do not get the cause.
                let expected_cause = identity.is_proven().then_some(self.word());
                let status = grpc.map_or(self.status() == *status, |code| self.grpc() == code);
                status && cause.as_deref() == expected_cause
            }
        }
    }

    fn status(self) -> u16 {
        match self {
            Self::Denied => 403,
            Self::NoRoute => 404,
            Self::Limited => 429,
            Self::Late => 408,
            Self::HttpNotAllowed => 500,
            Self::Unknown => 503,
            // The connection ends without a response, except that `bad-request` may be a 400.
            Self::BadRequest | Self::Silent | Self::Expired | Self::Untrusted | Self::Handshake => 400,
        }
    }

    fn grpc(self) -> u16 {
        match self {
            Self::Denied => 7,
            Self::NoRoute => 5,
            Self::Limited => 8,
            Self::HttpNotAllowed => 13,
            Self::Unknown => 14,
            Self::Late => 4,
            Self::BadRequest | Self::Silent | Self::Expired | Self::Untrusted | Self::Handshake => 3,
        }
    }
}

/// The counters of the sidecar must equal the number of cells, for each cause and for each reason of each policy. They
/// may be higher only by cells for which [`Cell::may_count_as_denied`] holds.
fn faults_of_counts(testbed: &Testbed, cells: &[CellAtPort]) -> Vec<String> {
    // The minimum count, and by how much the counter may exceed it.
    let mut expected = BTreeMap::<_, (u64, u64)>::new();
    let by_cause = |cause: Cause| {
        let labels = ["direction=\"inbound\"".to_owned(), format!("cause=\"{cause}\"")];
        ("tulle_failures_total", labels)
    };
    let by_reason = |cell_at_port: &CellAtPort, why: &str| {
        let labels = [
            format!("target_port=\"{}\"", cell_at_port.port),
            format!("reason=\"{why}\""),
        ];
        ("tulle_inbound_denied_total", labels)
    };
    for cause in COUNTED {
        expected.insert(by_cause(*cause), (0, 0));
    }
    for cell_at_port in cells {
        match cell_at_port.expected {
            Expected::Refused(cause) if COUNTED.contains(&cause) => {
                expected.entry(by_cause(cause)).or_default().0 += 1;
                if cause == Cause::Denied {
                    expected
                        .entry(by_reason(cell_at_port, cell_at_port.cell.denial_reason()))
                        .or_default()
                        .0 += 1;
                }
            }
            _ if cell_at_port.cell.may_count_as_denied() => {
                expected.entry(by_cause(Cause::Denied)).or_default().1 += 1;
                expected.entry(by_reason(cell_at_port, "network")).or_default().1 += 1;
            }
            _ => {}
        }
    }
    // A client may see the end of its connection before it is counted.
    let deadline = Instant::now() + COUNT_LIMIT;
    loop {
        let metrics = Testbed::metrics(&testbed.server);
        let count = |(family, labels): &(&str, [String; 2])| {
            testbed::sum(&metrics, family, &labels.each_ref().map(|label| &**label))
        };
        let wrong = expected.iter().map(|(key, n)| (key, *n, count(key)));
        let wrong = wrong.filter(|(_, (n, more), counted)| !(*n..=n + more).contains(counted));
        let wrong: Vec<_> = wrong.collect();
        if wrong.is_empty() || Instant::now() > deadline {
            let describe = |((family, labels), (n, more), counted): &(&(&str, [String; 2]), (u64, u64), u64)| {
                let labels = labels.join(",");
                format!("{family}{{{labels}}} is {counted}; {n} cells expect it, and {more} may")
            };
            return wrong.iter().map(describe).collect();
        }
        std::thread::sleep(COUNT_PAUSE);
    }
}

fn report(n_cells: usize, faults: &[String], testbed: &Testbed) {
    eprintln!("{n_cells} cells tried, {} failures", faults.len());
    let faults: String = faults.iter().map(|fault| format!("\n\n{fault}")).collect();
    assert!(
        faults.is_empty(),
        "{faults}\n\nend of the log of the sidecar:\n{}",
        testbed.log_tail()
    );
}

const UNKNOWN: Expected = Expected::Refused(Cause::Unknown);
/// Causes that count exactly one failure for each connection.
const COUNTED: &[Cause] = &[
    Cause::Denied,
    Cause::Unknown,
    Cause::NoRoute,
    Cause::Limited,
    Cause::Expired,
    Cause::Untrusted,
];
/// Ports whose policies the sidecar watches from its start, one for each policy.
const DECLARED_PORTS_START: u16 = 10_000;
/// Ports whose policies the sidecar does not request before a connection.
const UNDECLARED_PORTS_START: u16 = 11_000;
/// First of the undeclared ports that are used by one cell only.
const SINGLE_USE_PORTS_START: u16 = 12_000;
const MAX_CONCURRENT_CELLS: usize = 16;
const MAX_CONCURRENT_WAITING_CELLS: usize = 200;
/// Maximum number of requests until the rate limit of one per second refuses one.
const MAX_UNLIMITED: usize = 5;
const MIN_RESTARTS: u32 = 4;
const COUNT_LIMIT: Duration = Duration::from_secs(10);
const COUNT_PAUSE: Duration = Duration::from_millis(50);
