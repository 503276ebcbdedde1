//! grpc-go's interop client and server.

use tulle_bench::run::process::Process;
use tulle_tests::hosts::command;
use tulle_tests::programs::find;

use crate::programs;
use crate::scene::{GRPC, Scene, identity, scene, service};

#[test]
fn the_interop_client_of_grpc_go_passes_every_plaintext_case() {
    let Some(scene) = scene(&["grpc-interop-client", "grpc-interop-server"]) else {
        return;
    };
    let _server = server(&scene);
    let to = service(GRPC);
    let (host, port) = (to.ip().to_string(), to.port().to_string());
    let mut failed = Vec::new();
    for (case, flags) in CASES {
        let mut args = vec!["-server_host", &host, "-server_port", &port, "-test_case", case];
        args.extend(*flags);
        let said = programs::run(&scene.client, "grpc-interop-client", &args, b"");
        println!("{case}: {}", if said.status.success() { "passed" } else { "failed" });
        if !said.status.success() {
            failed.push((case, said));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
    println!("{} cases passed", CASES.len());
    // All calls went through both sidecars: only the server's knows who the client is, by mutual TLS with the client's.
    let counted = scene.series(
        "inbound_http_authz_allow_total",
        &["target_port=\"10000\""],
        "client_id",
    );
    assert_eq!(counted.keys().collect::<Vec<_>>(), [&identity("client")]);
}

fn server(scene: &Scene) -> Process {
    let program = find("grpc-interop-server").unwrap();
    let mut command = command(&scene.server, &[], &program);
    command.args(["-port", &GRPC.to_string()]);
    let mut server = scene.start("grpc-interop-server", command);
    server.listening(&[GRPC]).unwrap();
    server
}

const ORCA: &[&str] = &[
    "-service_config_json",
    r#"{"loadBalancingConfig":[{"test_backend_metrics_load_balancer":{}}]}"#,
];
// Large messages, for which unoptimised proxies get more than the usual second.
const SOAK: &[&str] = &[
    "-soak_iterations=10",
    "-soak_per_iteration_max_acceptable_latency_ms=3000",
    "-soak_overall_timeout_seconds=15",
];

/// All that need neither TLS nor credentials; without `pick_first_unary`, for which the server has to tell its name, and
/// this one does not.
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
