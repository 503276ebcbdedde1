//! The checks after a run of `--once`.

use std::collections::BTreeMap;

use super::edges::{Client, Edge, Protocol};
use super::options::Balancer;
use super::rows::Row;
use super::topology::{App, Topology};

/// Returns one sentence per failed check; empty if all passed.
pub(super) fn check(topology: &Topology, edges: &[Edge], rows: &[Row], balancer: Balancer) -> Vec<String> {
    let mut problems = Vec::new();
    for (edge, row) in edges.iter().zip(rows) {
        let found = match edge.client {
            Client::Load => check_permitted(edge, row),
            Client::Outside => check_refused(row),
        };
        problems.extend(found.into_iter().map(|problem| format!("{}: {problem}", edge.name())));
    }
    problems.extend(check_balance(topology, rows, balancer));
    problems
}

/// Number of responses by replica of a service, over all edges from the load generator to it.
pub(super) fn responses_by_replica(rows: &[Row], service: &str) -> BTreeMap<String, u64> {
    let mut responses = BTreeMap::new();
    for row in rows
        .iter()
        .filter(|row| row.service == service && row.client == Client::Load)
    {
        for (replica, n) in &row.replicas {
            *responses.entry(replica.clone()).or_default() += n;
        }
    }
    responses
}

fn check_permitted(edge: &Edge, row: &Row) -> Vec<String> {
    let mut problems = Vec::new();
    if row.requests == 0 {
        problems.push("no request was sent".to_owned());
    }
    let mut errors = row.errors.clone();
    let unsent = errors.remove(NOT_SENT).unwrap_or_default();
    if unsent > 0 {
        problems.push(format!(
            "{unsent} of {} requests were not sent, because every connection waited for a response: the machine is \
             overloaded, or responses take too long",
            row.requests
        ));
    }
    let failed = row.failed.saturating_sub(unsent);
    if failed > 0 {
        problems.push(format!(
            "{failed} of {} requests failed: {}",
            row.requests,
            format_counts(&errors)
        ));
    }
    let identities = [
        ("client", &row.client_identity, &edge.identities.client),
        ("server", &row.server_identity, &edge.identities.server),
    ];
    for (end, shown, expected) in identities {
        if shown != expected {
            let or_none = |identity: &Option<String>| identity.clone().unwrap_or_else(|| "none".to_owned());
            problems.push(format!(
                "the {end}'s identity is {}, expected {}",
                or_none(shown),
                or_none(expected)
            ));
        }
    }
    if row.plaintext > 0 {
        problems.push(format!("{} requests or connections did not use mTLS", row.plaintext));
    }
    problems
}

fn check_refused(row: &Row) -> Vec<String> {
    let mut problems = Vec::new();
    if row.requests == 0 {
        problems.push("no attempt was made".to_owned());
    }
    if row.succeeded > 0 {
        problems.push(format!("{} of {} attempts succeeded", row.succeeded, row.requests));
    }
    // Errors that no policy causes, such as a refused connection to a host that is down, are problems.
    let others: BTreeMap<_, _> = row
        .errors
        .iter()
        .filter(|(reason, _)| !is_policy_denial(row.protocol, reason))
        .map(|(reason, n)| (reason.clone(), *n))
        .collect();
    if !others.is_empty() {
        problems.push(format!("not refused by policy: {}", format_counts(&others)));
    }
    if row.denials.is_empty() {
        problems.push("no sidecar has counted a denied request".to_owned());
    }
    problems
}

/// The error of `tulle-bench load` for requests that were due while every connection was busy.
const NOT_SENT: &str = "not sent: every connection was busy";

/// Whether the client's error is the one that a policy denial causes.
fn is_policy_denial(protocol: Protocol, reason: &str) -> bool {
    match protocol {
        Protocol::Tcp => reason == "closed" || reason.starts_with("reset"),
        _ => reason.starts_with("status 403"),
    }
}

fn check_balance(topology: &Topology, rows: &[Row], balancer: Balancer) -> Vec<String> {
    let slow = topology
        .workloads
        .iter()
        .filter(|workload| matches!(workload.app, App::Web(delay) if !delay.is_zero()));
    let responses = responses_by_replica(rows, "web");
    let all: u64 = responses.values().sum();
    let share = |name: &str| {
        responses
            .get(name)
            .map_or(0.0, |n| *n as f64 * 100.0 / all.max(1) as f64)
    };
    match balancer {
        Balancer::PeakEwma => slow
            .filter(|workload| share(&workload.name) >= MAX_SLOW_REPLICA_PERCENT)
            .map(|workload| {
                format!(
                    "slow replica {} answered {:.1} % of web's requests, expected less than {MAX_SLOW_REPLICA_PERCENT} %",
                    workload.name,
                    share(&workload.name)
                )
            })
            .collect(),
        Balancer::RoundRobin => {
            let web: Vec<_> = topology
                .workloads
                .iter()
                .filter(|workload| matches!(workload.app, App::Web(_)))
                .collect();
            let fair = 100.0 / web.len().max(1) as f64;
            web.into_iter()
                .filter(|workload| (share(&workload.name) - fair).abs() > ROUND_ROBIN_TOLERANCE_PERCENT)
                .map(|workload| {
                    format!(
                        "round robin: {} answered {:.1} % of web's requests, expected {fair:.0} % ± \
                         {ROUND_ROBIN_TOLERANCE_PERCENT}",
                        workload.name,
                        share(&workload.name)
                    )
                })
                .collect()
        }
    }
}

fn format_counts(counts: &BTreeMap<String, u64>) -> String {
    let each: Vec<_> = counts.iter().map(|(reason, n)| format!("{reason} ({n})")).collect();
    each.join(", ")
}

/// Maximum share of a slow replica in the requests of its service, in percent.
const MAX_SLOW_REPLICA_PERCENT: f64 = 15.0;
/// Maximum deviation from the equal share, in percentage points.
const ROUND_ROBIN_TOLERANCE_PERCENT: f64 = 6.0;

#[cfg(test)]
mod tests {
    use super::super::edges::{edges, tests::topology};
    use super::super::rows;
    use super::*;

    /// A run in which all checks pass.
    fn passing_run() -> (Topology, Vec<Edge>, Vec<Row>) {
        let topology = topology();
        let edges = edges(&topology);
        let rows = edges.iter().map(passing_row).collect();
        (topology, edges, rows)
    }

    fn passing_row(edge: &Edge) -> Row {
        let mut row = rows::total_row(edge, &rows::tests::reports(), &rows::tests::scrapes());
        row.client_identity = edge.identities.client.clone();
        row.server_identity = edge.identities.server.clone();
        row.plaintext = 0;
        let count = |name: &str, n| BTreeMap::from([(name.to_owned(), n)]);
        (row.errors, row.denials, row.replicas) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        match edge.client {
            Client::Load => {
                (row.succeeded, row.failed) = (row.requests, 0);
                if edge.service == "web" {
                    row.replicas = [("web-1", 480), ("web-2", 480), ("web-3", 40)]
                        .map(|(name, n)| (name.to_owned(), n))
                        .into();
                }
            }
            Client::Outside => {
                (row.succeeded, row.failed) = (0, row.requests);
                row.denials = count("no identity", 200);
                row.errors = match edge.protocol {
                    Protocol::Tcp => count("closed", 200),
                    _ => count("status 403", 200),
                };
            }
        }
        row
    }

    #[test]
    fn a_run_without_failures_has_no_problems() {
        let (topology, edges, rows) = passing_run();
        assert_eq!(
            check(&topology, &edges, &rows, Balancer::PeakEwma),
            Vec::<String>::new()
        );
    }

    #[test]
    fn each_failed_check_is_named() {
        let check_one_failure = |change: &dyn Fn(&mut [Row]), expected: &str| {
            let (topology, edges, mut rows) = passing_run();
            change(&mut rows);
            let problems = check(&topology, &edges, &rows, Balancer::PeakEwma);
            assert_eq!(problems, [expected]);
        };
        check_one_failure(
            &|rows| {
                rows[1].failed = 3;
                rows[1].errors = BTreeMap::from([("grpc status 14".to_owned(), 3)]);
            },
            "load → web gRPC: 3 of 200 requests failed: grpc status 14 (3)",
        );
        check_one_failure(
            &|rows| {
                rows[0].failed = 2;
                rows[0].errors = BTreeMap::from([(NOT_SENT.to_owned(), 2)]);
            },
            "load → web HTTP/1: 2 of 200 requests were not sent, because every connection waited for a response: the \
             machine is overloaded, or responses take too long",
        );
        check_one_failure(
            &|rows| rows[2].server_identity = None,
            "load → ws HTTP/2: the server's identity is none, expected \
             ws.demo.serviceaccount.identity.linkerd.cluster.local",
        );
        check_one_failure(
            &|rows| rows[4].plaintext = 2,
            "load → tcp TCP: 2 requests or connections did not use mTLS",
        );
        check_one_failure(
            &|rows| rows[5].succeeded = 1,
            "outside → web HTTP/1: 1 of 200 attempts succeeded",
        );
        check_one_failure(
            &|rows| rows[6].errors = BTreeMap::from([("connect error: refused".to_owned(), 200)]),
            "outside → tcp TCP: not refused by policy: connect error: refused (200)",
        );
        check_one_failure(
            &|rows| rows[6].denials.clear(),
            "outside → tcp TCP: no sidecar has counted a denied request",
        );
        check_one_failure(
            &|rows| {
                rows[0].replicas.insert("web-3".to_owned(), 400);
            },
            "slow replica web-3 answered 18.6 % of web's requests, expected less than 15 %",
        );
    }

    #[test]
    fn round_robin_requires_equal_shares() {
        let (topology, edges, mut rows) = passing_run();
        assert_eq!(check(&topology, &edges, &rows, Balancer::RoundRobin).len(), 3);
        for row in &mut rows {
            row.replicas.values_mut().for_each(|n| *n = 333);
        }
        assert_eq!(
            check(&topology, &edges, &rows, Balancer::RoundRobin),
            Vec::<String>::new()
        );
    }
}
