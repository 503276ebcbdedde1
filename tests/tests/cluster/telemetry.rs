//! Telemetry of the tutorial's application, read with `tulle` from outside the cluster with the permissions of RBAC.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::process::Command;
use tokio::time::timeout;
use tulle_tests::cluster::Cluster;
use tulle_tests::programs;

/// Reads all telemetry of an application whose client sends requests to `web` continuously.
pub(crate) async fn check_telemetry(cluster: &Cluster) {
    let run = async |line: &str| run_tulle(cluster, line).await;
    wait_until_available(cluster).await;
    let stat = async || {
        let table = run("stat deploy -n quickstart").await?;
        let [success, rps] = cells(&table, &["web", "2/2"])?;
        ensure!(success == "100.00%" && !rps.starts_with("0.0"), "{table}");
        Ok(())
    };
    cluster
        .wait_until("stat shows the requests of web", stat)
        .await
        .unwrap();
    let edges = async || {
        let table = run("edges deploy -n quickstart").await?;
        let ends = ["deploy/client", "deploy/web", "quickstart", "quickstart"];
        let identities: [String; 3] = cells(&table, &ends)?;
        ensure!(identities == ["client.quickstart", "web.quickstart", "√"], "{table}");
        Ok(())
    };
    cluster.wait_until("an edge leads to web", edges).await.unwrap();
    let routes = async || {
        let table = run("routes deploy/web -n quickstart").await?;
        let [server] = cells(&table, &["web", "inbound"])?;
        ensure!(server.contains("web-http"), "{table}");
        Ok(())
    };
    cluster
        .wait_until("requests of web have a route of its Server", routes)
        .await
        .unwrap();

    let lines = run("tap deploy/web -n quickstart --headers --count 3").await.unwrap();
    let requests: Vec<_> = lines.lines().filter(|line| line.starts_with("req id=")).collect();
    let suffix = " :authority=web.quickstart.svc.cluster.local:80 :path=/";
    let suffix_without_port = suffix.replace(":80", "");
    for request in &requests {
        let is_whole = request.contains(" proxy=in ") && request.contains(" tls=true :method=GET");
        let names_web = request.ends_with(suffix) || request.ends_with(&suffix_without_port);
        assert!(is_whole && names_web, "{request}");
    }
    let ends = lines.lines().filter(|line| line.starts_with("end id=")).count();
    assert!(requests.len() >= 3 && ends == 3, "{lines}");
    assert!(lines.lines().any(|line| line.starts_with("    host: ")), "{lines}");

    let top = async || {
        let table = top(cluster, "top deploy/web -n quickstart").await?;
        let [_, method, path] = cells(&table, &["client.quickstart"])?;
        ensure!((&*method, &*path) == ("GET", "/"), "{table}");
        Ok(())
    };
    cluster.wait_until("top has seen requests", top).await.unwrap();

    let grant = async |role: &str| {
        let line = format!("create rolebinding {role} -n quickstart --clusterrole={role} --user=viewer");
        cluster.kubectl(&line.split(' ').collect::<Vec<_>>()).await.unwrap();
    };
    grant("view").await;
    let viewed = async || run("stat deploy -n quickstart --as viewer").await.map(drop);
    cluster.wait_until("a viewer sees metrics", viewed).await.unwrap();
    let tap = "tap deploy/web -n quickstart --count 1 --as viewer";
    for (line, what) in [
        (tap, "cannot watch resource \"taps\""),
        (
            "stat deploy -n linkerd --as viewer",
            "cannot list resource \"workloads\"",
        ),
    ] {
        let refused = run(line).await.unwrap_err().to_string();
        for part in ["User \"viewer\"", what, "telemetry.tulle.dev", "kubectl create role"] {
            assert!(refused.contains(part), "{part:?} is not in {refused}");
        }
    }
    grant("linkerd-telemetry-tap").await;
    let tapped = async || run(tap).await.map(drop);
    cluster.wait_until("a bound user may tap", tapped).await.unwrap();
}

/// Waits until `tulle check` reports telemetry and the API server forwards requests to it.
pub(crate) async fn wait_until_available(cluster: &Cluster) {
    let available = async || {
        // The command also fails for other checks.
        let report: Value = serde_json::from_slice(&output(cluster, "check --wait 0 -o json").await?.stdout)?;
        let categories = report["categories"].as_array().context("categories")?;
        let checks = categories.iter().flat_map(|category| category["checks"].as_array());
        let mut checks = checks.flatten();
        let check = checks.find(|check| check["description"] == "telemetry API service is available");
        let check = check.context("no check of telemetry")?;
        ensure!(check["result"] == "success", "{check}");
        run_tulle(cluster, "stat deploy -n quickstart").await.map(drop)
    };
    cluster.wait_until("telemetry is available", available).await.unwrap();
}

/// The output of `tulle`. Fails if the command fails, or prints a warning, for example about a sidecar that it cannot reach.
async fn run_tulle(cluster: &Cluster, line: &str) -> anyhow::Result<String> {
    let output = output(cluster, line).await?;
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(
        output.status.success() && !err.contains("tulle: "),
        "{line}: {out}{err}"
    );
    Ok(out)
}

async fn output(cluster: &Cluster, line: &str) -> anyhow::Result<std::process::Output> {
    let output = tulle(cluster, line)?.output();
    timeout(COMMAND_TIMEOUT, output)
        .await
        .with_context(|| line.to_owned())?
        .context("running tulle")
}

/// The output of `top`, interrupted after it has seen a request.
async fn top(cluster: &Cluster, line: &str) -> anyhow::Result<String> {
    let running = tulle(cluster, line)?.spawn().context("starting tulle")?;
    let id = i32::try_from(running.id().context("it runs")?)?;
    run_tulle(cluster, "tap deploy/web -n quickstart --count 3").await?;
    kill(Pid::from_raw(id), Signal::SIGINT)?;
    let output = timeout(COMMAND_TIMEOUT, running.wait_with_output()).await??;
    Ok(String::from_utf8(output.stdout)?)
}

fn tulle(cluster: &Cluster, line: &str) -> anyhow::Result<Command> {
    let mut command = Command::new(programs::built_binary("tulle")?);
    command
        .args(line.split(' '))
        .env("KUBECONFIG", cluster.kubeconfig_outside())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    Ok(command)
}

/// The cells after `first` in the first line of a table that starts with `first`.
fn cells<const N: usize>(table: &str, first: &[&str]) -> anyhow::Result<[String; N]> {
    for line in table.lines() {
        let cells: Vec<_> = line.split_whitespace().collect();
        if cells.starts_with(first) && cells.len() >= first.len() + N {
            return Ok(std::array::from_fn(|at| cells[first.len() + at].to_owned()));
        }
    }
    bail!("no line begins with {first:?} in\n{table}")
}

const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
