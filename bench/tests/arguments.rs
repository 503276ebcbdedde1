//! Arguments that `tulle-bench` refuses before it does anything else. The error contains their value and the reason.

#![allow(clippy::unwrap_used)] // test helpers

use std::process::Command;

/// Checks that the program refuses these arguments, separated by spaces, with an error that has all of `parts`.
fn check_refused(arguments: &str, parts: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_tulle-bench"))
        .args(arguments.split_whitespace())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{arguments}: {text}");
    // clap exits with 2, an error of a command with 1, and a panic with 101.
    assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments}: {text}");
    for part in parts {
        assert!(text.contains(part), "{arguments}: no {part:?} in {text}");
    }
}

#[test]
fn invalid_values_are_refused() {
    for (arguments, value, reason) in [
        ("load 127.0.0.1:1 --rate 0", "\"0\"", "0.001"),
        ("load 127.0.0.1:1 --header x", "\"x\"", "name: value"),
        ("load nowhere", "\"nowhere\"", "HOST:PORT"),
        ("load 127.0.0.1:1 --report-every 0", "\"0\"", "longer duration"),
        ("load 127.0.0.1:1 --timeout 0s", "\"0s\"", "longer duration"),
        ("load 127.0.0.1:1 --duration 0s", "\"0s\"", "longer duration"),
        (
            "load 127.0.0.1:1 --arrivals poisson --rate 1000000 --duration 60s",
            "60000000",
            "at most 10000000",
        ),
        ("run --duration 1500ms", "\"1500ms\"", "whole seconds"),
        ("run --duration 0s", "\"0s\"", "at least 1s"),
        ("compare-builds a b --duration 500ms", "\"500ms\"", "whole seconds"),
        ("compare-builds a b --repeats 0", "'0'", "--repeats"),
        ("compare-builds a b --workers 0", "'0'", "--workers"),
        ("compare-builds a b --connections 1,0", "'0'", "--connections"),
        (
            "costs --row workers-1",
            "'workers-1'",
            "http-c1, new-http, routed, rewritten, profiled",
        ),
        (
            "costs --row grpc",
            "'grpc'",
            "http-c1, new-http, routed, rewritten, profiled",
        ),
        ("costs --tap-one-in 0", "'0'", "--tap-one-in"),
        ("conformance --peers tulle,none", "none", "sidecars"),
        ("control-scale --kubeconfig x --services 0", "'0'", "--services"),
        ("control-scale --kubeconfig x --endpoints 0", "'0'", "--endpoints"),
        ("control-scale --kubeconfig x --rollout 0", "'0'", "--rollout"),
        ("control-scale --kubeconfig x --rate 0", "'0'", "--rate"),
        ("control-scale --kubeconfig x --seconds 0", "'0'", "--seconds"),
    ] {
        check_refused(arguments, &[value, reason]);
    }
}

#[test]
fn options_that_have_no_effect_together_are_refused() {
    for (arguments, parts) in [
        ("costs --write --tap-one-in 100", &["--tap-one-in", "--write"][..]),
        ("costs --write --row new-http", &["--write", "new-http"]),
        ("load 127.0.0.1:1 --streams 2", &["--streams", "http1"]),
        ("load 127.0.0.1:1 --streams 2 --protocol tcp", &["--streams", "tcp"]),
        ("load 127.0.0.1:1 --streams 2 --protocol ws", &["--streams", "ws"]),
        ("load 127.0.0.1:1 --authority x --protocol tcp", &["--authority", "tcp"]),
        ("load 127.0.0.1:1 --header a:b --protocol tcp", &["--header", "tcp"]),
        ("load 127.0.0.1:1 --expect-greeting x", &["--expect-greeting", "http1"]),
        (
            "load 127.0.0.1:1 --grpc-method unary --protocol http2",
            &["--grpc-method", "http2"],
        ),
        (
            "load 127.0.0.1:1 --messages 3 --protocol http2",
            &["--messages", "http2"],
        ),
        (
            "load 127.0.0.1:1 --messages 3 --protocol grpc",
            &["--messages", "unary"],
        ),
    ] {
        check_refused(arguments, parts);
    }
}

#[test]
fn tcp_requests_that_exchange_nothing_are_refused() {
    for arguments in [
        "load 127.0.0.1:1 --protocol tcp",
        "load 127.0.0.1:1 --protocol tcp --body-size 0 --rate 10",
        "load 127.0.0.1:1 --protocol tcp --expect-greeting hello",
    ] {
        check_refused(arguments, &["--body-size", "--reconnect"]);
    }
}

#[test]
fn loads_that_need_the_initial_pods_are_refused_after_the_load_day() {
    for (loads, refused) in [
        ("day,updates", "updates"),
        ("updates,day,servers", "servers"),
        ("day,rollout,reconnect,day", "day"),
    ] {
        let message = format!("--load {refused} after day");
        check_refused(&format!("control-scale --kubeconfig x --load {loads}"), &[&message]);
    }
}

#[test]
fn an_unknown_load_of_the_scale_test_is_refused_with_the_known_loads() {
    check_refused(
        "control-scale --kubeconfig x --load weekend",
        &["'weekend'", "updates, rollout"],
    );
}
