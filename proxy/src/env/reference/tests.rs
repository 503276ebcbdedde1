use std::cell::RefCell;
use std::collections::BTreeSet;

use super::*;
use crate::env::tests::required;
use crate::env::{Config, load};

/// Settings with which the proxy reads further variables.
const SCENARIOS: [&[(&str, &str)]; 3] = [
    &[],
    &[
        ("LINKERD2_PROXY_TRACE_COLLECTOR_SVC_ADDR", "localhost:4317"),
        ("LINKERD2_PROXY_TAP_SVC_NAME", "tap.local"),
    ],
    &[
        ("LINKERD2_PROXY_IDENTITY_SPIRE_SOCKET", "unix:///spire"),
        ("LINKERD2_PROXY_IDENTITY_SERVER_ID", "spiffe://root.local/web"),
        ("LINKERD2_PROXY_IDENTITY_SERVER_NAME", "web.local"),
    ],
];

fn load_scenario(scenario: &[(&str, &str)], more: &[(String, String)], read: &RefCell<BTreeSet<String>>) -> Config {
    let mut variables = required();
    variables.extend(
        scenario
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned())),
    );
    variables.extend(more.iter().cloned());
    let lookup = |name: &str| {
        read.borrow_mut().insert(name.to_owned());
        variables.get(name).cloned()
    };
    load(lookup).unwrap()
}

#[test]
fn every_variable_that_is_read_is_documented_and_no_other() {
    let read = RefCell::default();
    for scenario in SCENARIOS {
        load_scenario(scenario, &[], &read);
    }
    let documented: BTreeSet<String> = variables().into_iter().map(|variable| variable.name).collect();
    let read = read.into_inner();
    let difference: Vec<_> = read.symmetric_difference(&documented).collect();
    assert!(difference.is_empty(), "{difference:?}");
}

#[test]
fn documented_defaults_are_those_of_the_code() {
    let defaults: Vec<(String, String)> = variables()
        .into_iter()
        .filter_map(|variable| match variable.default {
            Value(default) => Some((variable.name, default.to_owned())),
            Required | Text(_) => None,
        })
        .collect();
    assert!(defaults.len() > 30, "{}", defaults.len());
    for scenario in SCENARIOS {
        let config = |more: &[(String, String)]| format!("{:#?}", load_scenario(scenario, more, &RefCell::default()));
        assert_same_lines(&config(&[]), &config(&defaults));
    }
}

/// Fails with the first line that differs.
fn assert_same_lines(expected: &str, found: &str) {
    for (expected, found) in expected.lines().zip(found.lines()) {
        assert_eq!(expected, found);
    }
    assert_eq!(expected.lines().count(), found.lines().count());
}
