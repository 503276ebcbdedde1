//! The applications at the opaque port.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::databases::{self, ONE_REDIS_CONNECTION, PgbenchLoad};
use super::generators::LoadResult;
use super::process::Process;
use super::setup::TcpApp;
use super::testbed::{SERVER_IP, TCP_PORT, Testbed};
use super::{brokers, tools};

/// Runs this application at [`TCP_PORT`] of a testbed, instead of another one. Clients will connect to `host`.
pub(super) fn run(app: TcpApp, testbed: &Testbed, host: &str) -> anyhow::Result<()> {
    testbed.run_tcp_app(app, || {
        let (name, command) = match app {
            TcpApp::Echo => ("echo", echo_command(testbed)?),
            TcpApp::Postgres => ("postgres", databases::postgres_command(testbed)?),
            TcpApp::Redis => ("redis", databases::redis_command(testbed)),
            TcpApp::Kafka => ("kafka", brokers::kafka_command(testbed, host)?),
            TcpApp::Nats => ("nats", brokers::nats_command(testbed)),
        };
        let mut process = Process::start(name, command, testbed.dir.path())?;
        process.wait_for_ports(&[TCP_PORT])?;
        if app == TcpApp::Postgres {
            databases::fill_postgres(testbed)?;
        }
        Ok(process)
    })
}

/// Sends some requests to an application other than the echo server, to open connections between the sidecars.
pub(super) fn send_some_requests(app: TcpApp, testbed: &Testbed, host: &str) -> anyhow::Result<LoadResult> {
    match app {
        TcpApp::Echo => bail!("the echo server has load generators of its own"),
        TcpApp::Postgres => databases::pgbench(testbed, host, PgbenchLoad { reconnect: true }, Duration::from_secs(1)),
        TcpApp::Redis => databases::redis_benchmark(testbed, host, ONE_REDIS_CONNECTION, WARM_UP_REQUESTS),
        TcpApp::Kafka => brokers::produce_to_kafka(testbed, host, WARM_UP_REQUESTS),
        TcpApp::Nats => brokers::publish_to_nats(testbed, host, WARM_UP_REQUESTS),
    }
}

/// Fails if the programs of an application are missing.
pub(super) fn check(app: TcpApp) -> anyhow::Result<()> {
    match app {
        TcpApp::Echo => Ok(()),
        TcpApp::Postgres => databases::postgres_program("pgbench").map(drop),
        TcpApp::Redis => ["redis-server", "redis-benchmark"]
            .into_iter()
            .try_for_each(tools::check_installed),
        TcpApp::Kafka => brokers::check_kafka(),
        TcpApp::Nats => ["nats-server", "nats"].into_iter().try_for_each(tools::check_installed),
    }
}

fn echo_command(testbed: &Testbed) -> anyhow::Result<Command> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = testbed.server.command(program);
    command.args(["serve", "--tcp", &format!("{SERVER_IP}:{TCP_PORT}")]);
    Ok(command)
}

const WARM_UP_REQUESTS: u64 = 1000;
