//! The control plane is down while more ports are in use than a sidecar watches.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use tokio::time::Instant;

use super::application;
use super::client::{Client, Observed};
use super::manifests;
use super::table::{Cell, ClientInput, Family, Identity, Policy, State};
use super::testbed::{self, Ipv6Rules, Testbed};
use super::{CellAtPort, find_count_mismatches, find_mismatches, report, runtime};

/// With `TULLE_TEST_FULL=1` the outage lasts ten minutes, longer than the default timeout of nextest: use its profile `full`.
#[test]
fn policies_of_300_ports_apply_while_the_control_plane_is_down() {
    if !testbed::can_run() {
        return;
    }
    let policy_of = |port: u16| POLICIES[usize::from(port) % POLICIES.len()];
    let all = PORTS.chain(UNUSED_PORTS);
    let policies = all.clone().map(|port| manifests::policy(policy_of(port), port));
    let manifests = policies.collect::<String>() + &manifests::workload();
    let mut testbed = Testbed::build("server", &manifests, &[], Ipv6Rules::Written);
    let listeners = application::listen(&testbed.server, &Vec::from_iter(all));
    testbed::start_control_plane_first(&mut testbed);

    let cells = |state, ports: Range<u16>| {
        let cells = ports.flat_map(|port| {
            IDENTITIES.map(|identity| {
                let policy = policy_of(port);
                let cell = Cell {
                    state,
                    policy,
                    sent: ClientInput::HTTP1,
                    identity,
                    family: Family::V4,
                };
                CellAtPort {
                    expected: cell.expected(),
                    cell,
                    port,
                }
            })
        });
        Vec::from_iter(cells)
    };
    let first_cells = cells(State::First, PORTS);
    let mut outage_cells = cells(State::DownAfter, PORTS);
    outage_cells.extend(cells(State::DownBefore, UNUSED_PORTS));
    let recovered_cells = cells(State::First, UNUSED_PORTS);

    let (outside, client) = (testbed.outside.clone(), Client::new(&testbed.credentials));
    let (n_tried, mismatches) = outside
        .run(|| {
            runtime().block_on(async {
                let received_tokens = application::serve(listeners);
                let mut mismatches = find_mismatches(&first_cells, &client, &received_tokens).await;
                testbed.kill_control_plane();
                let until = Instant::now() + outage_duration();
                let mut n_runs = 0;
                while mismatches.is_empty() {
                    mismatches = find_mismatches(&outage_cells, &client, &received_tokens).await;
                    n_runs += 1;
                    if Instant::now() > until {
                        break;
                    }
                }
                if mismatches.is_empty() {
                    mismatches = find_count_mismatches(&testbed, &[(&first_cells, 1), (&outage_cells, n_runs as u64)]);
                }
                testbed.start_control_plane("manifests");
                let open = { UNUSED_PORTS }.find(|port| policy_of(*port) == Policy::Audit);
                let took = wait_until_permitted(&client, open.expect("one of them is open")).await;
                eprintln!("unknown policies apply {took:?} after the control plane is back");
                mismatches.extend(find_mismatches(&recovered_cells, &client, &received_tokens).await);
                let n_tried = first_cells.len() + outage_cells.len() * n_runs + recovered_cells.len();
                (n_tried, mismatches)
            })
        })
        .unwrap();
    report(n_tried, &mismatches, &testbed);
}

/// The time until a port answers.
async fn wait_until_permitted(client: &Client, port: u16) -> Duration {
    let to = SocketAddr::new(Family::V4.server(), port);
    let started_at = Instant::now();
    loop {
        let observed = client.send(ClientInput::HTTP1, Identity::Absent, to, "back").await;
        let took = started_at.elapsed();
        assert!(took < max_recovery_time(), "{observed:?} after {took:?}");
        if observed == Observed::Application {
            return took;
        }
    }
}

/// The maximum time until policies apply after the control plane is back. While a connection waits for a policy, the sidecar
/// shortens its backoff to 200 ms.
fn max_recovery_time() -> Duration {
    match std::env::var_os("TULLE_TEST_FULL") {
        Some(_) => Duration::from_secs(1),
        None => Duration::from_secs(5), // other tests may run at the same time
    }
}

fn outage_duration() -> Duration {
    match std::env::var_os("TULLE_TEST_FULL") {
        Some(_) => Duration::from_secs(600),
        None => Duration::from_secs(5),
    }
}

/// More ports than a sidecar watches.
const PORTS: Range<u16> = 13_000..13_300;
/// Ports without a connection before the outage.
const UNUSED_PORTS: Range<u16> = 13_300..13_300 + POLICIES.len() as u16;
const POLICIES: [Policy; 4] = [Policy::Deny, Policy::Audit, Policy::ByIdentity, Policy::ByOtherNetwork];
const IDENTITIES: [Identity; 3] = [Identity::Absent, Identity::Permitted, Identity::Other];
