//! Databases at the opaque port, and their load generators.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use nix::unistd::{User, chown};
use tulle_core::netns::Namespace;

use super::generators::{LoadResult, run_to_end, seconds_option};
use super::testbed::{SERVER_IP, TCP_PORT, Testbed};

/// A load of pgbench: 8 clients that read one row in each transaction.
#[derive(Clone, Copy, Debug)]
pub(super) struct PgbenchLoad {
    /// Whether each transaction uses a new connection.
    pub(super) reconnect: bool,
}

/// A load of redis-benchmark: `GET` of a value of 64 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RedisLoad {
    pub(super) connections: u32,
    /// Requests that a connection sends before it waits for responses.
    pub(super) pipelined: u32,
}

pub(super) fn redis_command(testbed: &Testbed) -> Command {
    let mut command = testbed.server.command("redis-server");
    command
        .args(["--bind", SERVER_IP, "--port", &TCP_PORT.to_string()])
        .args(["--protected-mode", "no", "--save", "", "--appendonly", "no", "--dir"])
        .arg(testbed.dir.path());
    command
}

/// The command of a server, whose files are created if there are none yet.
pub(super) fn postgres_command(testbed: &Testbed) -> anyhow::Result<Command> {
    let files = testbed.file("postgres");
    if !files.exists() {
        std::fs::create_dir(&files).with_context(|| format!("creating {}", files.display()))?;
        let user = User::from_name(POSTGRES_USER)?.with_context(|| format!("there is no user {POSTGRES_USER}"))?;
        chown(&files, Some(user.uid), None).with_context(|| format!("changing the owner of {}", files.display()))?;
        let mut initdb = command_as_postgres_user(&testbed.server, postgres_program("initdb")?);
        initdb
            .args(["--username", POSTGRES_USER, "--auth=trust", "--no-sync", "--pgdata"])
            .arg(&files);
        run_to_end(initdb)?;
        let access = format!("host all {POSTGRES_USER} all trust\n");
        std::fs::write(files.join("pg_hba.conf"), access).context("writing pg_hba.conf")?;
    }
    let mut command = command_as_postgres_user(&testbed.server, postgres_program("postgres")?);
    command.arg("-D").arg(files).args([
        "-p",
        &TCP_PORT.to_string(),
        "-c",
        &format!("listen_addresses={SERVER_IP}"),
        "-c",
        "unix_socket_directories=",
    ]);
    Ok(command)
}

/// Creates the tables of pgbench, without sidecars.
pub(super) fn fill_postgres(testbed: &Testbed) -> anyhow::Result<()> {
    let mut command = testbed.server.command(postgres_program("pgbench")?);
    command
        .args(["--initialize", "--quiet"])
        .args(postgres_target(SERVER_IP));
    run_to_end(command).map(drop)
}

/// Load with pgbench, which writes the time of each transaction to files.
pub(super) fn pgbench(
    testbed: &Testbed,
    host: &str,
    load: PgbenchLoad,
    duration: Duration,
) -> anyhow::Result<LoadResult> {
    let logs = testbed.file("pgbench");
    if logs.exists() {
        std::fs::remove_dir_all(&logs).context("removing the logs of an earlier pgbench")?;
    }
    std::fs::create_dir(&logs).context("creating a directory for logs")?;
    let mut command = testbed.client.command(postgres_program("pgbench")?);
    command
        .args(["--select-only", "--no-vacuum", "--client=8", "--jobs=2"])
        .args([&seconds_option("--time=", duration), "--log", "--log-prefix"])
        .arg(logs.join("log"));
    if load.reconnect {
        command.arg("--connect");
    }
    command.args(postgres_target(host));
    let text = run_to_end(command)?;
    // Columns: client, number, time in microseconds, and others.
    let mut times = Vec::new();
    for file in std::fs::read_dir(&logs).context("reading the logs of pgbench")? {
        let log = std::fs::read_to_string(file?.path()).context("reading a log of pgbench")?;
        times.extend(
            log.lines()
                .filter_map(|line| line.split(' ').nth(2)?.parse::<u64>().ok()),
        );
    }
    ensure!(!times.is_empty(), "pgbench printed {text:?}");
    let failed = 0; // pgbench fails if a transaction does
    Ok(LoadResult::from_times(times, duration, failed))
}

/// The arguments that name the database.
fn postgres_target(host: &str) -> [String; 4] {
    [
        format!("--host={host}"),
        format!("--port={TCP_PORT}"),
        format!("--username={POSTGRES_USER}"),
        "postgres".to_owned(),
    ]
}

/// Load with redis-benchmark.
pub(super) fn redis_benchmark(
    testbed: &Testbed,
    host: &str,
    load: RedisLoad,
    requests: u64,
) -> anyhow::Result<LoadResult> {
    let mut command = testbed.client.command("redis-benchmark");
    command.args([
        "-h",
        host,
        "-p",
        &TCP_PORT.to_string(),
        "-t",
        "get",
        "-d",
        "64",
        "--csv",
    ]);
    command.args(["-c", &load.connections.to_string(), "-P", &load.pipelined.to_string()]);
    command.args(["-n", &requests.to_string()]);
    let text = run_to_end(command)?;
    let line = text.lines().last().unwrap_or_default();
    // Columns: test, requests per second, and the average, the minimum, p50, p95, p99 and the maximum in milliseconds.
    let columns: Vec<f64> = line
        .split(',')
        .skip(1)
        .filter_map(|column| column.trim_matches('"').parse().ok())
        .collect();
    let &[per_second, _, _, p50, _, p99, _] = &columns[..] else {
        bail!("redis-benchmark printed {text:?}");
    };
    Ok(LoadResult {
        requests,
        seconds: requests as f64 / per_second,
        p50_us: p50 * 1e3,
        p99_us: p99 * 1e3,
        failed: 0, // redis-benchmark fails if a request does
    })
}

/// The path of a program of PostgreSQL, of the newest installed version.
pub(super) fn postgres_program(name: &str) -> anyhow::Result<PathBuf> {
    let versions = std::fs::read_dir(POSTGRES_VERSIONS).with_context(|| missing(name))?;
    let programs = versions.filter_map(|version| Some(version.ok()?.path().join("bin").join(name)));
    let newest = programs.filter(|program| program.exists()).max();
    newest.with_context(|| missing(name))
}

fn missing(program: &str) -> String {
    format!("there is no {POSTGRES_VERSIONS}/VERSION/bin/{program}; \"./run bench\" installs it")
}

/// PostgreSQL refuses to run as root.
fn command_as_postgres_user(namespace: &Namespace, program: PathBuf) -> Command {
    let mut command = namespace.command("setpriv");
    command
        .args([&format!("--reuid={POSTGRES_USER}"), "--clear-groups"])
        .arg(program);
    command
}

const POSTGRES_VERSIONS: &str = "/usr/lib/postgresql";
/// The user that the Debian package creates, also in the database.
const POSTGRES_USER: &str = "postgres";
pub(super) const ONE_REDIS_CONNECTION: RedisLoad = RedisLoad {
    connections: 1,
    pipelined: 1,
};
