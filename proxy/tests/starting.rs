//! Failed starts of the proxy: exit codes and error messages.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

use std::net::TcpListener;
use std::process::{Command, Output};

fn start_proxy(variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tulle-proxy"));
    command.env_clear();
    for (name, value) in variables {
        command.env(format!("LINKERD2_PROXY_{name}"), value);
    }
    command.output().unwrap()
}

#[test]
fn an_invalid_configuration_reports_all_errors_and_exits_with_64() {
    let output = start_proxy(&[("CORES", "none")]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(64), "{stderr}");
    for expected in [
        "LINKERD2_PROXY_CORES=\"none\": expected a number",
        "LINKERD2_PROXY_POLICY_WORKLOAD: it is required",
        "LINKERD2_PROXY_IDENTITY_LOCAL_NAME: it is required",
    ] {
        assert!(stderr.contains(expected), "{expected} is not in {stderr}");
    }
}

#[test]
fn an_address_in_use_exits_with_1() {
    let used_addr = TcpListener::bind("127.0.0.1:0").unwrap();
    let used_addr = used_addr.local_addr().unwrap().to_string();
    let output = start_proxy(&[
        ("OUTBOUND_LISTEN_ADDR", "127.0.0.1:0"),
        ("INBOUND_LISTEN_ADDR", "127.0.0.1:0"),
        ("ADMIN_LISTEN_ADDR", &used_addr),
        ("DESTINATION_SVC_ADDR", "127.0.0.1:1"),
        ("POLICY_SVC_ADDR", "127.0.0.1:1"),
        ("IDENTITY_SVC_ADDR", "127.0.0.1:1"),
        ("POLICY_WORKLOAD", "{}"),
        ("IDENTITY_TRUST_ANCHORS", "/nowhere"),
        ("IDENTITY_TOKEN_FILE", "/nowhere"),
        ("IDENTITY_LOCAL_NAME", "web.shop.test"),
    ]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains(&format!("listening on {used_addr} (admin)")),
        "{stderr}"
    );
}
