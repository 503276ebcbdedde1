//! The result of a run, as JSON.

use std::collections::BTreeMap;

use serde::Serialize;

use super::checks;
use super::rows::Row;

#[derive(Serialize)]
pub(super) struct Outcome<'a> {
    /// Duration of the load in seconds.
    seconds: f64,
    balancer: &'static str,
    edges: &'a [Row],
    /// Share of each replica in the responses of its service, from 0 to 1.
    replica_shares: BTreeMap<&'static str, BTreeMap<String, f64>>,
    events: &'a [String],
    /// The failed checks; empty if all passed.
    problems: &'a [String],
}

impl<'a> Outcome<'a> {
    pub(super) fn new(
        seconds: f64,
        balancer: &'static str,
        edges: &'a [Row],
        events: &'a [String],
        problems: &'a [String],
    ) -> Self {
        let shares = |service| {
            let responses = checks::responses_by_replica(edges, service);
            let all: u64 = responses.values().sum();
            let share = |n| n as f64 / all.max(1) as f64;
            (
                service,
                responses.into_iter().map(|(name, n)| (name, share(n))).collect(),
            )
        };
        Self {
            seconds,
            balancer,
            edges,
            replica_shares: edges.iter().map(|row| shares(row.service)).collect(),
            events,
            problems,
        }
    }

    pub(super) fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("all keys are strings");
        text.push('\n');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::edges::{edges, tests::topology};
    use super::super::rows::{self, tests};
    use super::*;

    #[test]
    fn the_result_holds_edges_shares_and_problems() {
        let rows: Vec<_> = edges(&topology())
            .iter()
            .map(|edge| rows::total_row(edge, &tests::reports(), &tests::scrapes()))
            .collect();
        let problems = ["something is off".to_owned()];
        let json: serde_json::Value =
            serde_json::from_str(&Outcome::new(30.0, "peak-ewma", &rows, &[], &problems).to_json()).unwrap();
        assert_eq!(json["edges"][0]["client"], "load");
        assert_eq!(json["edges"][0]["protocol"], "HTTP/1");
        assert_eq!(json["edges"][0]["latency_ms"]["p99"], 3.0);
        assert_eq!(json["replica_shares"]["web"]["web-1"], 200.0 / 396.0);
        assert_eq!(json["problems"][0], "something is off");
    }
}
