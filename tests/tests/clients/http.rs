//! curl and h2load.

use std::time::Duration;

use tokio::time::Instant;
use tulle_core::netns::Namespace;

use crate::programs;
use crate::testbed::{HTTP, OUTSIDE, SERVER, identity, service, start_testbed};

/// Asks the application which headers it received. Returns the version, the status and the body.
fn curl(host: &Namespace, flag: &str) -> (String, String, String) {
    let url = format!("http://{}/headers", service(HTTP));
    let output = programs::run(
        host,
        "curl",
        &["-sS", flag, "-w", "\n%{http_version} %{http_code}", &url],
        b"",
    );
    assert!(output.status.success(), "{output:?}");
    let (body, version_and_status) = output.out.rsplit_once('\n').unwrap();
    let (version, status) = version_and_status.split_once(' ').unwrap();
    (version.into(), status.into(), body.into())
}

fn check_curl(flag: &str, expected_version: &str) {
    let Some(testbed) = start_testbed(&["curl"]) else {
        return;
    };
    let (version, status, headers) = curl(&testbed.client, flag);
    assert_eq!((&*version, &*status), (expected_version, "200"), "{headers}");
    // Both sidecars handled the request: only the server's sidecar knows the client's identity, by mutual TLS with the
    // client's sidecar.
    let client = format!(r#""l5d-client-id":["{}"]"#, identity("client"));
    assert!(headers.contains(&client), "{headers}");
}

#[test]
fn the_access_log_records_clients_and_requests() {
    let Some(testbed) = start_testbed(&["curl"]) else {
        return;
    };
    curl(&testbed.client, "--http1.1");
    let lines = testbed.json_lines("server");
    let [line] = &lines[..] else { panic!("{lines:?}") };
    let (client, target) = (identity("client"), format!("http://{}/headers", service(HTTP)));
    for (name, value) in [
        ("client.id", client.as_str()),
        ("method", "GET"),
        ("uri", &target),
        ("version", "HTTP/1.1"),
        ("direction", "inbound"),
    ] {
        assert_eq!(line[name], value, "{line}");
    }
    assert_eq!(line["status"], 200, "{line}");
}

#[test]
fn requests_permitted_by_audit_are_logged() {
    let Some(testbed) = start_testbed(&["curl"]) else {
        return;
    };
    let url = format!("http://{SERVER}:{HTTP}/");
    let request_status = || {
        let args = ["-sS", "-o", "/dev/null", "-w", "%{http_code}", &url];
        programs::run(&testbed.outside, "curl", &args, b"").out
    };
    assert_eq!(
        request_status(),
        "403",
        "the default policy permits no client outside the mesh"
    );
    // A manifest takes effect with a delay.
    let wait_until = |what: &str, holds: &dyn Fn() -> bool| {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !holds() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(POLL_INTERVAL);
        }
    };
    let logged = |what: &str| {
        let lines = testbed.lines("server", |line| line.contains(what).then(|| line.to_owned()));
        for line in &lines {
            let (client, target) = (format!("client={OUTSIDE}:"), format!("target={SERVER}:{HTTP}"));
            assert!(
                line.contains(" INFO ") && line.contains(&client) && line.contains(&target),
                "{line}"
            );
        }
        lines.len()
    };
    testbed.manifest("audit.yaml", &AUDIT.replace("PROTOCOL", "HTTP/1"));
    wait_until("requests are permitted", &|| request_status() == "200");
    for _ in 0..5 {
        assert_eq!(request_status(), "200");
    }
    assert_eq!(logged("request audited"), 1, "one line a minute");
    let requests = testbed.series("inbound_http_authz_allow_total", &[], "authz_name");
    assert!(requests.values().sum::<u64>() >= 6, "all are counted: {requests:?}");
    testbed.manifest("audit.yaml", &AUDIT.replace("PROTOCOL", "opaque"));
    wait_until("connections are permitted", &|| {
        request_status() == "200"
            && !testbed
                .series("inbound_tcp_authz_allow_total", &[], "authz_name")
                .is_empty()
    });
    assert_eq!(logged("connection audited"), 1, "one line a minute");
}

const AUDIT: &str = "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: audited, namespace: shop}
spec:
  externalWorkloadSelector: {matchLabels: {app: server}}
  port: http
  proxyProtocol: PROTOCOL
  accessPolicy: audit
";
const WAIT_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

#[test]
fn curl_speaks_http_1_0() {
    // curl prints this version for HTTP/1.0.
    check_curl("--http1.0", "1");
}

#[test]
fn curl_speaks_http_1_1() {
    check_curl("--http1.1", "1.1");
}

#[test]
fn curl_speaks_http_2_by_prior_knowledge() {
    check_curl("--http2-prior-knowledge", "2");
}

#[test]
fn an_upgrade_to_h2c_is_answered_as_http_1_1() {
    check_curl("--http2", "1.1");
}

#[test]
fn no_request_of_h2load_fails() {
    let Some(testbed) = start_testbed(&["h2load"]) else {
        return;
    };
    let n = requests();
    let (n_text, url) = (n.to_string(), format!("http://{}/", service(HTTP)));
    let output = programs::run(
        &testbed.client,
        "h2load",
        &["-n", &n_text, "-c", "10", "-m", "10", &url],
        b"",
    );
    let line = |start: &str| {
        output
            .out
            .lines()
            .find(|line| line.starts_with(start))
            .unwrap_or_default()
    };
    println!("{}\n{}\n{}", line("finished"), line("requests:"), line("status codes:"));
    let all = format!("requests: {n} total, {n} started, {n} done, {n} succeeded, 0 failed, 0 errored, 0 timeout");
    assert_eq!(line("requests:"), all, "{output:?}");
    assert!(
        line("status codes:").starts_with(&format!("status codes: {n} 2xx,")),
        "{output:?}"
    );
    // The server's sidecar has counted all requests, with the client's identity.
    testbed.wait_for_series(
        "inbound_http_authz_allow_total",
        &[],
        "client_id",
        &[(&identity("client"), n)],
    );
}

/// Unoptimised proxies would need a minute for all requests.
fn requests() -> u64 {
    match std::env::var_os("TULLE_TEST_FULL") {
        Some(_) => 100_000,
        None => 5_000,
    }
}
