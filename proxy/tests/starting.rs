//! The proxy as it is started: what stops it, and how it says so.

#![allow(clippy::too_many_lines)]
#![allow(clippy::unwrap_used)] // as in every test; clippy sees only the functions marked as such

use std::net::TcpListener;
use std::process::{Command, Output};

fn start(variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tulle-proxy"));
    command.env_clear();
    for (name, value) in variables {
        command.env(format!("LINKERD2_PROXY_{name}"), value);
    }
    command.output().unwrap()
}

#[test]
fn a_wrong_configuration_is_told_as_a_whole_and_exits_with_64() {
    let output = start(&[("CORES", "none")]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(64), "{said}");
    for told in [
        "LINKERD2_PROXY_CORES=\"none\": expected a number",
        "LINKERD2_PROXY_POLICY_WORKLOAD: it is required",
        "LINKERD2_PROXY_IDENTITY_LOCAL_NAME: it is required",
    ] {
        assert!(said.contains(told), "{told} is not in {said}");
    }
}

#[test]
fn an_address_that_is_taken_exits_with_1() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let output = start(&[
        ("OUTBOUND_LISTEN_ADDR", "127.0.0.1:0"),
        ("INBOUND_LISTEN_ADDR", "127.0.0.1:0"),
        ("ADMIN_LISTEN_ADDR", &taken),
        ("DESTINATION_SVC_ADDR", "127.0.0.1:1"),
        ("POLICY_SVC_ADDR", "127.0.0.1:1"),
        ("IDENTITY_SVC_ADDR", "127.0.0.1:1"),
        ("POLICY_WORKLOAD", "{}"),
        ("IDENTITY_TRUST_ANCHORS", "/nowhere"),
        ("IDENTITY_TOKEN_FILE", "/nowhere"),
        ("IDENTITY_LOCAL_NAME", "web.shop.test"),
    ]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("listening on {taken} (admin)")), "{said}");
}
