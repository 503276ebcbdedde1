//! The interop client and server of grpc-go.

use tulle_bench::run::process::Process;
use tulle_tests::hosts::command;
use tulle_tests::programs::find;

use crate::programs;
use crate::testbed::{GRPC, Testbed, identity, service, start_testbed};

#[test]
fn the_interop_client_of_grpc_go_passes_every_plaintext_case() {
    let Some(testbed) = start_testbed(&["grpc-interop-client", "grpc-interop-server"]) else {
        return;
    };
    let _server = server(&testbed);
    let to = service(GRPC);
    let (host, port) = (to.ip().to_string(), to.port().to_string());
    let mut failed = Vec::new();
    for (case, flags) in CASES {
        let mut args = vec!["-server_host", &host, "-server_port", &port, "-test_case", case];
        args.extend(*flags);
        let output = programs::run(&testbed.client, "grpc-interop-client", &args, b"");
        println!("{case}: {}", if output.status.success() { "passed" } else { "failed" });
        if !output.status.success() {
            failed.push((case, output));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
    println!("{} cases passed", CASES.len());
    // All calls passed both sidecars: only the server's sidecar knows the client's identity, by mutual TLS with the
    // client's sidecar.
    let counted = testbed.series(
        "inbound_http_authz_allow_total",
        &["target_port=\"10000\""],
        "client_id",
    );
    assert_eq!(counted.keys().collect::<Vec<_>>(), [&identity("client")]);
}

fn server(testbed: &Testbed) -> Process {
    let program = find("grpc-interop-server").unwrap();
    let mut command = command(&testbed.server, &[], &program);
    command.args(["-port", &GRPC.to_string()]);
    let mut server = testbed.start("grpc-interop-server", command);
    server.wait_for_ports(&[GRPC]).unwrap();
    server
}

const ORCA: &[&str] = &[
    "-service_config_json",
    r#"{"loadBalancingConfig":[{"test_backend_metrics_load_balancer":{}}]}"#,
];
// The messages are large, so a request through unoptimised proxies may take longer than one second, the default limit.
const SOAK: &[&str] = &[
    "-soak_iterations=10",
    "-soak_per_iteration_max_acceptable_latency_ms=3000",
    "-soak_overall_timeout_seconds=15",
];

/// All cases without TLS or credentials. `pick_first_unary` is left out, because it needs a server that returns its
/// name, which this one does not.
const CASES: &[(&str, &[&str])] = &[
    ("empty_unary", &[]),
    ("large_unary", &[]),
    ("client_streaming", &[]),
    ("server_streaming", &[]),
    ("ping_pong", &[]),
    ("empty_stream", &[]),
    ("timeout_on_sleeping_server", &[]),
    ("cancel_after_begin", &[]),
    ("cancel_after_first_response", &[]),
    ("status_code_and_message", &[]),
    ("special_status_message", &[]),
    ("custom_metadata", &[]),
    ("unimplemented_method", &[]),
    ("unimplemented_service", &[]),
    ("orca_per_rpc", ORCA),
    ("orca_oob", ORCA),
    ("rpc_soak", SOAK),
    ("channel_soak", SOAK),
];
