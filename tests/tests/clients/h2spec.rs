//! h2spec against the HTTP/2 servers of both directions.

use tulle_core::netns::Namespace;

use crate::programs;
use crate::scene::{H2C, HTTP, SERVER, scene, service};

/// Runs all of it, and returns what failed.
fn failures(host: &Namespace, ip: &str, port: u16) -> Vec<String> {
    let port = port.to_string();
    let said = programs::run(host, "h2spec", &["-h", ip, "-p", &port, "-o", "2"], b"");
    let summary = said
        .out
        .lines()
        .find(|line| line.contains(" tests, "))
        .unwrap_or_default();
    assert!(
        summary.starts_with("145 tests, ") && summary.contains(" 0 skipped"),
        "{said:?}"
    );
    let list = said.out.split("Failures:").nth(1).unwrap_or_default();
    let failed = list.lines().map(str::trim).filter(|line| line.starts_with('×'));
    let failed: Vec<_> = failed.map(str::to_owned).collect();
    assert_eq!(said.status.success(), failed.is_empty(), "{said:?}");
    failed
}

#[test]
fn both_servers_of_http_2_conform() {
    let Some(scene) = scene(&["h2spec"]) else { return };
    let outbound = failures(&scene.client, &service(H2C).ip().to_string(), H2C);
    assert_eq!(outbound, [] as [&str; 0], "outbound");
    let inbound = failures(&scene.outside, &SERVER.to_string(), H2C);
    assert_eq!(inbound, [] as [&str; 0], "inbound");
    // Where nothing says what is spoken, what is not the preface of HTTP/2 is not HTTP/2.
    let detected = failures(&scene.client, &service(HTTP).ip().to_string(), HTTP);
    assert_eq!(detected, ["× 2: Sends invalid connection preface"], "detected");
}
