//! Real databases and brokers with sidecars, under the default policy `all-authenticated`.
//!
//! A table of servers, each with its manifest and client commands, times a table of scenes. A default run does the short scenes with
//! three databases; `TULLE_TEST_FULL=1` runs all servers and all scenes, and then clusters of three. `TULLE_STATEFUL_SERVERS` selects
//! servers by their names, separated by commas, `TULLE_STATEFUL_DISTURBANCES` what happens to clusters (such as `Rollout`), and
//! `TULLE_STATEFUL_TIMES` is how often each of these happens.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

mod brokers;
mod cassandra;
mod clusters;
mod databases;
mod disturbances;
mod manifest;
mod results;
mod scenes;
mod selection;
mod server;
mod suite;

use std::env;

use tulle_tests::images::Image;

use self::server::Server;
use self::suite::Suite;

#[tokio::test(flavor = "multi_thread")]
async fn databases_and_brokers_work_with_sidecars_and_no_settings() {
    let is_full = env::var_os("TULLE_TEST_FULL").is_some();
    let mut images = vec![Image::Databases];
    let (mut servers, mut clusters) = (databases::SHORT.to_vec(), Vec::new());
    if is_full {
        images.push(Image::Brokers);
        servers.extend(databases::LONG);
        servers.extend(brokers::ALL);
        servers.push(cassandra::CASSANDRA);
        clusters.extend(clusters::ALL);
    }
    servers.retain(is_selected);
    clusters.retain(is_selected);
    let suite = Suite::start(1, &images, is_full).await.unwrap();
    suite.run(&servers, &clusters).await.unwrap();
    suite.results.print_and_assert();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes an hour; `./run stateful` runs it"]
async fn clusters_lose_no_acknowledged_write() {
    let suite = Suite::start(2, &[Image::Databases, Image::Brokers], true)
        .await
        .unwrap();
    let servers = clusters::ALL.iter().chain(&clusters::DISTURBED_ONLY);
    for server in servers.filter(|server| is_selected(server)) {
        if let Some(writer) = server.writer {
            suite.disturb_cluster(server, writer).await;
        }
    }
    suite.results.print_and_assert();
}

fn is_selected(server: &Server) -> bool {
    let all = [
        &databases::SHORT[..],
        &databases::LONG,
        &brokers::ALL,
        &[cassandra::CASSANDRA],
        &clusters::ALL,
        &clusters::DISTURBED_ONLY,
    ]
    .concat();
    let names = all.iter().map(|server| server.name.to_owned()).collect::<Vec<_>>();
    selection::is_selected("TULLE_STATEFUL_SERVERS", &names, server.name)
}
