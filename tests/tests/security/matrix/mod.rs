//! The policy matrix: which connections to a sidecar are permitted, and which are refused for which cause.
//!
//! [`table`] is the data: policy × what is sent × identity × state of the control plane × family.
//! Each test brings the control plane of one scene into one state and tries all cells of it at once, through the shipped
//! binaries in network namespaces. [`egress`] has the policies of the way out.

mod application;
mod client;
mod egress;
mod manifests;
mod outage;
mod scene;
mod table;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::application::Reached;
use self::client::{Client, Saw};
use self::scene::{Ipv6Rules, Scene};
use self::table::{Cause, Cell, Expected, Family, Identity, Policy, State, What};

#[test]
fn while_the_control_plane_is_up_each_port_is_held_to_its_policy() {
    check(&[State::Up, State::First], scene::up);
}

#[test]
fn before_the_control_plane_has_come_nobody_is_permitted() {
    check(&[State::NotYet], scene::not_yet);
}

#[test]
fn while_the_control_plane_is_down_what_it_said_holds_and_nobody_is_permitted_elsewhere() {
    check(&[State::DownBefore, State::DownAfter], scene::down);
}

#[test]
fn a_control_plane_that_forgets_a_port_takes_its_policy_away_from_nobody() {
    check(&[State::NotFoundBefore, State::NotFoundAfter], scene::not_found);
}

#[test]
fn while_the_control_plane_restarts_each_port_is_held_to_its_policy() {
    let Some(run) = Run::prepare(&[State::Restarting, State::RestartingFirst], Ipv6Rules::Written) else {
        return;
    };
    let Run {
        mut scene,
        cells,
        listeners,
    } = run;
    scene::up(&mut scene);
    let (outside, credentials) = (scene.outside.clone(), Client::new(&scene.credentials));
    let (scene, n_restarts) = (Mutex::new(scene), Mutex::new(0));
    let is_over = || *n_restarts.lock() >= MIN_RESTARTS;
    let faults = std::thread::scope(|scope| {
        let restarting = scope.spawn(|| scene::restarting(&scene, &n_restarts, is_over));
        let faults = outside.run(|| {
            runtime().block_on(async {
                let reached = application::serve(listeners);
                let mut faults = Vec::new();
                loop {
                    let is_last = is_over();
                    faults.extend(faults_of(&cells, &credentials, &reached).await);
                    if is_last {
                        return faults;
                    }
                }
            })
        });
        restarting.join().unwrap();
        faults.unwrap()
    });
    report(cells.len(), &faults, &scene.lock());
}

/// Where rules for IPv6 are not written, what comes by it must not go round the proxy.
#[test]
fn where_ipv6_is_not_redirected_nothing_of_it_reaches_the_application() {
    let Some(run) = Run::prepare(&[State::Up], Ipv6Rules::Disabled) else {
        return;
    };
    let Run {
        mut scene,
        mut cells,
        listeners,
    } = run;
    scene::up(&mut scene);
    // What is dropped before the proxy has no policy, and no protocol: one of each kind is tried.
    cells.retain(|tried| {
        let cell = &tried.cell;
        let policies = [Policy::Audit, Policy::Deny, Policy::Opaque];
        let identities = [Identity::Nobody, Identity::Right];
        policies.contains(&cell.policy)
            && identities.contains(&cell.identity)
            && [What::Http1, What::Raw].contains(&cell.sent.what)
    });
    let expected = |cell: &Cell| match cell.family {
        Family::V4 => cell.expected(),
        Family::V6 => Expected::Dropped,
    };
    cells
        .iter_mut()
        .for_each(|tried| tried.expected = expected(&tried.cell));
    let faults = run_once(&scene, &cells, listeners);
    report(cells.len(), &faults, &scene);
}

/// Tries all cells of some states, which one state of the scene has.
fn check(states: &[State], bring_into: fn(&mut Scene)) {
    let Some(run) = Run::prepare(states, Ipv6Rules::Written) else {
        return;
    };
    let Run {
        mut scene,
        cells,
        listeners,
    } = run;
    bring_into(&mut scene);
    let mut faults = run_once(&scene, &cells, listeners);
    faults.extend(faults_of_counts(&scene, &cells));
    report(cells.len(), &faults, &scene);
}

/// A scene whose processes are not started yet, and its cells.
struct Run {
    scene: Scene,
    cells: Vec<Tried>,
    /// Of the application, on the ports of all cells.
    listeners: Vec<std::net::TcpListener>,
}

/// A cell at its port.
struct Tried {
    cell: Cell,
    expected: Expected,
    port: u16,
}

impl Run {
    fn prepare(states: &[State], ipv6: Ipv6Rules) -> Option<Self> {
        if !scene::can_run() {
            return None;
        }
        let mut cells = Vec::new();
        for cell in states.iter().flat_map(|state| table::cells(*state)) {
            let index = Policy::ALL.iter().position(|policy| *policy == cell.policy);
            let index = u16::try_from(index.expect("it is one of them")).unwrap();
            let port = match (cell.state.is_asked(), cell.state.is_first()) {
                (true, _) => ASKED_PORTS + index,
                (false, false) => OTHER_PORTS + index,
                (false, true) => FIRST_PORTS + u16::try_from(cells.len()).unwrap(),
            };
            let expected = cell.expected();
            cells.push(Tried { cell, expected, port });
        }
        let ports: BTreeMap<_, _> = cells.iter().map(|tried| (tried.port, tried.cell.policy)).collect();
        let asked = cells.iter().filter(|tried| tried.cell.state.is_asked());
        let asked: BTreeSet<_> = asked.map(|tried| tried.port).collect();
        let policies = ports.iter().map(|(port, policy)| manifests::policy(*policy, *port));
        let manifests = policies.collect::<String>() + &manifests::workload();
        let scene = Scene::build("server", &manifests, &Vec::from_iter(asked), ipv6);
        let listeners = application::listen(&scene.server, &Vec::from_iter(ports.into_keys()));
        Some(Self {
            scene,
            cells,
            listeners,
        })
    }
}

fn run_once(scene: &Scene, cells: &[Tried], listeners: Vec<std::net::TcpListener>) -> Vec<String> {
    let client = Client::new(&scene.credentials);
    let run = || {
        runtime().block_on(async {
            let reached = application::serve(listeners);
            faults_of(cells, &client, &reached).await
        })
    };
    scene.outside.run(run).unwrap()
}

/// One thread: sockets are opened in the namespace of the thread.
fn runtime() -> tokio::runtime::Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Tries all cells at once, those that have to wait beside those that have not.
async fn faults_of(cells: &[Tried], client: &Client, reached: &Reached) -> Vec<String> {
    let (quick, waiting) = (Semaphore::new(MAX_QUICK), Semaphore::new(MAX_WAITING));
    let tries = cells.iter().enumerate().map(async |(n, tried)| {
        let waits = matches!(tried.cell.sent.what, What::Silence | What::Half) || tried.expected == UNKNOWN;
        let places = if waits { &waiting } else { &quick };
        let _place = places.acquire().await.unwrap();
        tried.fault(n, client, reached).await
    });
    join_all(tries).await.into_iter().flatten().collect()
}

impl Tried {
    /// Tries the cell; what is wrong with what came.
    async fn fault(&self, n: usize, client: &Client, reached: &Reached) -> Option<String> {
        let Cell {
            sent,
            identity,
            family,
            policy,
            ..
        } = self.cell;
        let to = SocketAddr::new(family.server(), self.port);
        // A limit lets the first ones through.
        let n_tries = if policy == Policy::RateLimit { MAX_UNLIMITED } else { 1 };
        let mut came = (Saw::Silence, false);
        for n_try in 0..n_tries {
            let token = format!("token-{n}-{n_try}");
            let saw = client.send(sent, identity, to, &token).await;
            came = (saw, reached.contains(&token));
            if came.0 != Saw::Application {
                break;
            }
        }
        let (saw, reached) = came;
        let is_silent = sent.what == What::Silence;
        let fits = match self.expected {
            Expected::Permitted => saw == Saw::Application && (reached || is_silent),
            Expected::Refused(cause) => !reached && cause.fits(&saw, identity),
            Expected::EitherOrUnknown(None) if saw == Saw::Application => reached || is_silent,
            Expected::EitherOrUnknown(cause) => {
                let cause = cause.is_some_and(|cause| cause.fits(&saw, identity));
                !reached && (cause || Cause::Unknown.fits(&saw, identity))
            }
            Expected::Dropped => !reached && saw == Saw::Unreachable,
        };
        let got = if reached {
            "the application got it"
        } else {
            "the application did not get it"
        };
        let Self { cell, expected, .. } = self;
        (!fits).then(|| format!("{cell}\n    expected: {expected:?}\n    came: {saw:?}, and {got}"))
    }
}

impl Cause {
    /// Whether a client may see this when it is refused for this cause.
    fn fits(self, saw: &Saw, identity: Identity) -> bool {
        match saw {
            Saw::Application | Saw::Unreachable => false,
            Saw::Closed => true,
            Saw::Silence => self == Self::Silent,
            Saw::Status { status, grpc, cause } => {
                // Clients without an identity are told no cause.
                let told = identity.is_proven().then_some(self.word());
                let status = grpc.map_or(self.status() == *status, |code| self.grpc() == code);
                status && cause.as_deref() == told
            }
        }
    }

    fn status(self) -> u16 {
        match self {
            Self::Denied => 403,
            Self::NoRoute => 404,
            Self::Limited => 429,
            Self::Late => 408,
            Self::NoHttp => 500,
            Self::Unknown => 503,
            // Nothing of HTTP is said to them.
            Self::NotHttp | Self::Silent | Self::Expired | Self::Untrusted | Self::Handshake => 400,
        }
    }

    fn grpc(self) -> u16 {
        match self {
            Self::Denied => 7,
            Self::NoRoute => 5,
            Self::Limited => 8,
            Self::NoHttp => 13,
            Self::Unknown => 14,
            Self::Late => 4,
            Self::NotHttp | Self::Silent | Self::Expired | Self::Untrusted | Self::Handshake => 3,
        }
    }
}

/// What the sidecar counts has to be as many as there are cells, for each cause, and for each reason of each policy; more only
/// by cells that may count as denied.
fn faults_of_counts(scene: &Scene, cells: &[Tried]) -> Vec<String> {
    // How many at least, and how many more at most.
    let mut expected = BTreeMap::<_, (u64, u64)>::new();
    let by_cause = |cause: Cause| {
        let labels = ["direction=\"inbound\"".to_owned(), format!("cause=\"{cause}\"")];
        ("tulle_failures_total", labels)
    };
    let by_reason = |tried: &Tried, why: &str| {
        let labels = [format!("target_port=\"{}\"", tried.port), format!("reason=\"{why}\"")];
        ("tulle_inbound_denied_total", labels)
    };
    for cause in COUNTED {
        expected.insert(by_cause(*cause), (0, 0));
    }
    for tried in cells {
        match tried.expected {
            Expected::Refused(cause) if COUNTED.contains(&cause) => {
                expected.entry(by_cause(cause)).or_default().0 += 1;
                if cause == Cause::Denied {
                    expected.entry(by_reason(tried, tried.cell.missing())).or_default().0 += 1;
                }
            }
            _ if tried.cell.may_count_as_denied() => {
                expected.entry(by_cause(Cause::Denied)).or_default().1 += 1;
                expected.entry(by_reason(tried, "network")).or_default().1 += 1;
            }
            _ => {}
        }
    }
    // Clients may know of their end before it is counted.
    let deadline = Instant::now() + COUNT_LIMIT;
    loop {
        let metrics = Scene::metrics(&scene.server);
        let count = |(family, labels): &(&str, [String; 2])| {
            scene::sum(&metrics, family, &labels.each_ref().map(|label| &**label))
        };
        let wrong = expected.iter().map(|(key, n)| (key, *n, count(key)));
        let wrong = wrong.filter(|(_, (n, more), counted)| !(*n..=n + more).contains(counted));
        let wrong: Vec<_> = wrong.collect();
        if wrong.is_empty() || Instant::now() > deadline {
            let told = |((family, labels), (n, more), counted): &(&(&str, [String; 2]), (u64, u64), u64)| {
                let labels = labels.join(",");
                format!("{family}{{{labels}}} is {counted}; {n} cells expect it, and {more} may")
            };
            return wrong.iter().map(told).collect();
        }
        std::thread::sleep(COUNT_PAUSE);
    }
}

/// Fails with all faults.
fn report(n_cells: usize, faults: &[String], scene: &Scene) {
    eprintln!("{n_cells} cells are tried, {} faults are found", faults.len());
    let faults: String = faults.iter().map(|fault| format!("\n\n{fault}")).collect();
    assert!(
        faults.is_empty(),
        "{faults}\n\nlast words of the sidecar:\n{}",
        scene.last_words()
    );
}

const UNKNOWN: Expected = Expected::Refused(Cause::Unknown);
/// Causes for which exactly one failure is counted for each connection.
const COUNTED: &[Cause] = &[
    Cause::Denied,
    Cause::Unknown,
    Cause::NoRoute,
    Cause::Limited,
    Cause::Expired,
    Cause::Untrusted,
];
/// Ports that the sidecar asks for when it starts, one for each policy.
const ASKED_PORTS: u16 = 10_000;
/// Ports that it does not ask for before a connection comes.
const OTHER_PORTS: u16 = 11_000;
/// The same, one for each cell.
const FIRST_PORTS: u16 = 12_000;
const MAX_QUICK: usize = 16;
const MAX_WAITING: usize = 200;
/// Requests to a port whose limit is one a second, of which one is over it at the latest.
const MAX_UNLIMITED: usize = 5;
const MIN_RESTARTS: u32 = 4;
const COUNT_LIMIT: Duration = Duration::from_secs(10);
const COUNT_PAUSE: Duration = Duration::from_millis(50);
