//! Brokers at the opaque port, and their load generators.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use tulle_core::netns::Namespace;

use super::generators::{LoadResult, run_to_end};
use super::testbed::{SERVER_IP, TCP_PORT, Testbed};
use super::tools;

/// The command of a Kafka broker that tells clients to use `host`.
pub(super) fn kafka_command(testbed: &Testbed, host: &str) -> anyhow::Result<Command> {
    let (files, properties) = (testbed.file("kafka"), testbed.file("kafka.properties"));
    // An earlier broker may have told clients to use another host.
    if files.exists() {
        std::fs::remove_dir_all(&files).with_context(|| format!("removing {}", files.display()))?;
    }
    let text = format!(
        "process.roles=broker,controller\nnode.id=1\n\
         controller.quorum.voters=1@127.0.0.1:{KAFKA_CONTROLLER_PORT}\n\
         listeners=PLAINTEXT://{SERVER_IP}:{TCP_PORT},CONTROLLER://127.0.0.1:{KAFKA_CONTROLLER_PORT}\n\
         advertised.listeners=PLAINTEXT://{host}:{TCP_PORT}\n\
         controller.listener.names=CONTROLLER\nlog.dirs={}\noffsets.topic.replication.factor=1\n",
        files.display()
    );
    std::fs::write(&properties, text).with_context(|| format!("writing {}", properties.display()))?;
    let mut format = kafka_program(&testbed.server, "kafka.tools.StorageTool")?;
    format
        .args(["format", "--cluster-id", KAFKA_CLUSTER_ID, "--config"])
        .arg(&properties);
    run_to_end(format)?;
    let mut command = kafka_program(&testbed.server, "kafka.Kafka")?;
    command.arg(properties);
    Ok(command)
}

/// Load with Kafka's producer test: messages of 100 bytes from one producer, each acknowledged by the broker.
pub(super) fn produce_to_kafka(testbed: &Testbed, host: &str, messages: u64) -> anyhow::Result<LoadResult> {
    let mut command = kafka_program(&testbed.client, "org.apache.kafka.tools.ProducerPerformance")?;
    command
        .args(["--topic", "bench", "--num-records", &messages.to_string()])
        .args(["--record-size", "100", "--throughput", "-1", "--producer-props"])
        .args([&format!("bootstrap.servers={host}:{TCP_PORT}"), "acks=all"]);
    let text = run_to_end(command)?;
    // N records sent, N records/sec (N MB/sec), N ms avg latency, N ms max latency, N ms 50th, N ms 95th, N ms 99th, N ms 99.9th.
    let last = text.lines().last().unwrap_or_default();
    let number_before = |unit: &str| -> anyhow::Result<f64> {
        let before = last.split(unit).next().unwrap_or_default();
        let number = before.rsplit(' ').next().unwrap_or_default().parse();
        number.with_context(|| format!("Kafka's producer test printed {text:?}"))
    };
    ensure!(
        number_before(" records sent")? as u64 == messages,
        "Kafka's producer test printed {text:?}"
    );
    Ok(LoadResult {
        requests: messages,
        seconds: messages as f64 / number_before(" records/sec")?,
        p50_us: number_before(" ms 50th")? * 1e3,
        p99_us: number_before(" ms 99th")? * 1e3,
        failed: 0, // all are acknowledged
    })
}

/// The command of a NATS server with JetStream.
pub(super) fn nats_command(testbed: &Testbed) -> Command {
    let mut command = testbed.server.command("nats-server");
    command
        .args([
            "--addr",
            SERVER_IP,
            "--port",
            &TCP_PORT.to_string(),
            "--jetstream",
            "--store_dir",
        ])
        .arg(testbed.file("nats"));
    command
}

/// Load with `nats bench`: 8 clients that publish a message of 64 bytes to a stream in memory, and wait for its acknowledgement.
pub(super) fn publish_to_nats(testbed: &Testbed, host: &str, messages: u64) -> anyhow::Result<LoadResult> {
    let mut command = testbed.client.command("nats");
    command
        .env("HOME", testbed.dir.path())
        .args(["--no-context", "--server", &format!("nats://{host}:{TCP_PORT}")])
        .args([
            "bench",
            "js",
            "pub",
            "sync",
            "bench",
            "--create",
            "--purge",
            "--storage=memory",
        ])
        .args([
            "--clients=8",
            "--size=64",
            "--no-progress",
            &format!("--msgs={messages}"),
        ]);
    let text = run_to_end(command)?;
    // … aggregated stats: 30,064 msgs/sec ~ …
    // latencies per operation min 19.58us | avg 128.21us | … | P50 104.25us | P90 214.82us | P99 523.20us | P99.9: 1,612.39us
    let number_between = |before: &str, after: &str| -> anyhow::Result<f64> {
        let number = text.split(before).nth(1).and_then(|rest| rest.split(after).next());
        let number = number.and_then(|number| number.replace(',', "").parse().ok());
        number.with_context(|| format!("nats bench printed {text:?}"))
    };
    Ok(LoadResult {
        requests: messages,
        seconds: messages as f64 / number_between("aggregated stats: ", " msgs/sec")?,
        p50_us: number_between("| P50 ", "us")?,
        p99_us: number_between("| P99 ", "us")?,
        failed: 0, // it fails if a message is not acknowledged
    })
}

/// Fails if Kafka or Java are missing.
pub(super) fn check_kafka() -> anyhow::Result<()> {
    kafka_jars()?;
    tools::check_installed("java")
}

/// A program of Kafka, given by its class.
fn kafka_program(namespace: &Namespace, class: &str) -> anyhow::Result<Command> {
    let mut command = namespace.command("java");
    command
        .args(["-Xmx512m", "-cp"])
        .arg(kafka_jars()?.join("*"))
        .arg(class);
    Ok(command)
}

fn kafka_jars() -> anyhow::Result<PathBuf> {
    let dir = std::env::var_os(KAFKA_JARS).unwrap_or_default();
    let dir = Path::new(&dir);
    ensure!(
        dir.is_dir(),
        "{KAFKA_JARS} is {:?}; expected the directory with Kafka's jars. \"./run bench\" and \"./run with\" set it",
        dir.display().to_string()
    );
    Ok(dir.to_owned())
}

const KAFKA_JARS: &str = "KAFKA_JARS";
const KAFKA_CONTROLLER_PORT: u16 = 9093;
/// 16 bytes in base64; any will do.
const KAFKA_CLUSTER_ID: &str = "MkU3OEVBNTcwNTJENDM2Qg";
