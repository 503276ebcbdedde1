//! h2spec against the HTTP/2 servers of both directions.

use tulle_core::netns::Namespace;

use crate::programs;
use crate::testbed::{H2C, HTTP, SERVER, service, start_testbed};

/// Runs all h2spec cases and returns the failed ones.
fn failures(host: &Namespace, ip: &str, port: u16) -> Vec<String> {
    let port = port.to_string();
    let output = programs::run(host, "h2spec", &["-h", ip, "-p", &port, "-o", "10"], b"");
    let summary = output
        .out
        .lines()
        .find(|line| line.contains(" tests, "))
        .unwrap_or_default();
    assert!(
        summary.starts_with("145 tests, ") && summary.contains(" 0 skipped"),
        "{output:?}"
    );
    let list = output.out.split("Failures:").nth(1).unwrap_or_default();
    let failed = list.lines().map(str::trim).filter(|line| line.starts_with('×'));
    let failed: Vec<_> = failed.map(str::to_owned).collect();
    assert_eq!(output.status.success(), failed.is_empty(), "{output:?}");
    failed
}

#[test]
fn both_servers_conform_to_http_2() {
    let Some(testbed) = start_testbed(&["h2spec"]) else {
        return;
    };
    let outbound = failures(&testbed.client, &service(H2C).ip().to_string(), H2C);
    assert_eq!(outbound, [] as [&str; 0], "outbound");
    let inbound = failures(&testbed.outside, &SERVER.to_string(), H2C);
    assert_eq!(inbound, [] as [&str; 0], "inbound");
    // On a port with protocol detection, an invalid HTTP/2 preface is not HTTP/2.
    let detected = failures(&testbed.client, &service(HTTP).ip().to_string(), HTTP);
    assert_eq!(detected, ["× 2: Sends invalid connection preface"], "detected");
}
