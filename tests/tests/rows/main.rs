//! Runs the table tests of `tulle-control` again, with an API server instead of a directory as the source. `manifest_store`
//! replaces their module of that name.
//!
//! The start of an API server takes longer than most tables, so one server is used by all of them.
//! [`every_row_holds_with_an_api_server`] starts it and runs this program again, with all other tests in one process.
//! `TULLE_TEST_ROWS=NAME` selects the tests whose path contains this name.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

#[path = "../../../control/tests/streams/destination_rows.rs"]
mod destination_rows;
#[path = "../../../control/tests/streams/harness.rs"]
#[expect(dead_code, reason = "other tests of tulle-control use more of it")]
mod harness;
#[path = "../../../control/tests/streams/inbound_rows.rs"]
mod inbound_rows;
mod manifest_store;
#[path = "../../../control/tests/streams/mirror_rows.rs"]
mod mirror_rows;
#[path = "../../../control/tests/streams/outbound_rows.rs"]
mod outbound_rows;
#[path = "../../../control/tests/streams/profiles.rs"]
mod profiles;
#[path = "../../../control/tests/streams/recorded.rs"]
mod recorded;
#[path = "../../../control/tests/streams/route_rows.rs"]
mod route_rows;
#[path = "../../../control/tests/streams/show.rs"]
mod show;
mod stored;

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use tulle_tests::charts::install_custom_resources;
use tulle_tests::cluster::ApiServer;

#[tokio::test]
async fn every_row_holds_with_an_api_server() {
    assert!(
        std::env::var_os(KUBECONFIG_VARIABLE).is_none(),
        "this test does not run itself"
    );
    let server = ApiServer::start().await.unwrap();
    install_custom_resources(&server).await.unwrap();
    server.create_namespace("linkerd").await.unwrap();
    let selected = std::env::var_os("TULLE_TEST_ROWS");
    let tests = |more: &[&str]| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            // One server has the objects of one cluster.
            .args(["--skip=every_row_holds_with_an_api_server", "--skip=of_linked_clusters"])
            .args(more)
            .args(&selected)
            .env(KUBECONFIG_VARIABLE, server.kubeconfig());
        command
    };
    let listed = tests(&["--list", "--format=terse"]).output().unwrap().stdout;
    assert!(
        !listed.is_empty(),
        "no test is selected by TULLE_TEST_ROWS={selected:?}"
    );
    let mut running = tests(&["--test-threads=1"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut report = String::new();
    for line in BufReader::new(running.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        println!("{line}");
        report.push_str(&line);
        report.push('\n');
    }
    // The report of the test program ends with the names of the tests that failed.
    let (_, failures) = report.rsplit_once("\nfailures:\n").unwrap_or_default();
    let status = running.wait().unwrap();
    assert!(status.success(), "{status}; failures:\n{failures}");
}

/// The variable with the path of the kubeconfig of the server.
const KUBECONFIG_VARIABLE: &str = "TULLE_TEST_ROWS_KUBECONFIG";
