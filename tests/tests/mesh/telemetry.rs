//! Telemetry of workloads with `tulle`: golden metrics, clients and servers, and requests in real time.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use tulle_core::identity::service_account_identity;
use tulle_tests::apps;
use tulle_tests::client::{Http1, request};
use tulle_tests::control::CONTROL_NS;
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Builder, HTTP, Mesh, identity, mesh};
use tulle_tests::programs::built_binary;

/// Runs `tulle …` with the control plane of the mesh; it is killed at the end of the test.
fn tulle(line: &str) -> Command {
    let mut command = Command::new(built_binary("tulle").unwrap());
    command
        .args(line.split(' '))
        .args(["--control", "127.0.0.1:8089"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

async fn run_tulle(line: &str) -> String {
    let output = tulle(line).output().await.unwrap();
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

async fn json_lines(line: &str) -> Vec<Value> {
    let lines = run_tulle(line).await;
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

async fn json(line: &str) -> Value {
    serde_json::from_str(&run_tulle(&format!("{line} -o json")).await).unwrap()
}

/// `client` sends requests continuously to `web` and to `broken`, whose application is not running. `guarded` permits
/// taps only to another identity, and `plain` is not meshed.
fn run_with_traffic(test: impl AsyncFnOnce(&Mesh) + Send) {
    run_mesh_with_traffic(mesh(), test);
}

fn run_mesh_with_traffic(mesh: Builder, test: impl AsyncFnOnce(&Mesh) + Send) {
    let telemetry = service_account_identity("linkerd-destination", CONTROL_NS, CONTROL_NS, "cluster.local");
    let mesh = mesh.env("TAP_SVC_NAME", &telemetry);
    let mesh = mesh
        .workload("client")
        .workload("web")
        .workload("broken")
        .unmeshed("plain");
    let mesh = mesh
        .workload("guarded")
        .workload_env("TAP_SVC_NAME", &identity("watcher"));
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let load = async {
            loop {
                for service in ["web", "broken"] {
                    let mut client =
                        Http1::handshake(mesh.dial("client", mesh.service_addr(service, HTTP)).await).await;
                    client.fetch(request("/ready")).await.unwrap();
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            () = test(mesh) => {}
            () = load => {}
        }
    });
}

/// Waits until a workload has traffic, and returns its row.
async fn wait_for_row(name: &str) -> Value {
    eventually(&format!("there is traffic to {name}"), async || {
        let answer = json(&format!("stat pod/{name} -n shop")).await;
        let row = answer["rows"][0].clone();
        (row["requestsPerSecond"].as_f64()? > 0.0).then_some(row)
    })
    .await
}

#[test]
fn golden_metrics_show_servers_and_success_rates() {
    run_with_traffic(async |_: &Mesh| {
        let web = wait_for_row("web").await;
        assert_eq!(
            (&web["successRate"], &web["meshed"], &web["total"]),
            (&1.0.into(), &1.into(), &1.into())
        );
        assert!(web["latencyMsP99"].as_f64().is_some(), "{web}");
        assert_eq!(wait_for_row("broken").await["successRate"], 0.0);

        let table = run_tulle("stat -o wide").await;
        let line = |name: &str| -> Vec<&str> {
            let line = table.lines().find(|line| line.contains(&format!("pod/{name} ")));
            line.unwrap_or_else(|| panic!("no {name} in\n{table}"))
                .split_whitespace()
                .collect()
        };
        assert_eq!(line("web")[..4], ["shop", "pod/web", "1/1", "100.00%"], "{table}");
        assert_eq!(line("plain")[2..4], ["0/1", "-"], "{table}");
        assert!(line("broken").contains(&"inbound/connect-refused"), "{table}");

        let services = json("stat svc/web -n shop").await;
        assert_eq!(services["rows"][0]["successRate"], 1.0, "{services}");
    });
}

#[test]
fn edges_show_both_identities_and_routes_show_requests() {
    run_with_traffic(async |_: &Mesh| {
        wait_for_row("web").await;
        let edges = json("edges pod/web -n shop").await;
        let rows = edges["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 1, "{edges}");
        assert_eq!(
            (&rows[0]["source"]["name"], &rows[0]["destination"]["name"]),
            (&"client".into(), &"web".into())
        );
        let ids = [identity("client"), identity("web")];
        assert_eq!(
            [&rows[0]["clientId"], &rows[0]["serverId"]],
            [&ids[0], &ids[1]],
            "{edges}"
        );
        assert!(rows[0]["requestsPerSecond"].as_f64().unwrap() > 0.0, "{edges}");
        let table = run_tulle("edges -n shop").await;
        assert!(
            table.contains("pod/client") && table.contains("client.shop") && table.contains('√'),
            "{table}"
        );

        let routes = json("routes -n shop").await;
        let of = |workload: &str, direction: &str| {
            let rows = routes["rows"].as_array().unwrap().iter();
            let found: Vec<_> = rows
                .filter(|row| row["workload"]["name"] == workload && row["direction"] == direction)
                .map(|row| (row["parent"].as_str().unwrap(), row["successRate"].as_f64()))
                .collect();
            found
        };
        let sent = of("client", "outbound");
        assert!(sent.contains(&("service/web.shop", Some(1.0))), "{routes}");
        assert!(sent.contains(&("service/broken.shop", Some(0.0))), "{routes}");
        assert!(!of("web", "inbound").is_empty(), "{routes}");
    });
}

#[test]
fn a_tap_shows_requests_and_the_causes_of_failures() {
    run_with_traffic(async |_: &Mesh| {
        let text = run_tulle("tap pod/broken -n shop --path /ready --count 2").await;
        let line = |kind: &str| text.lines().find(|line| line.starts_with(kind)).unwrap_or_default();
        let request = line("req id=");
        assert!(request.contains("proxy=in ") && request.contains("tls=true"), "{text}");
        assert!(
            request.ends_with(":method=GET :authority=web.test :path=/ready"),
            "{text}"
        );
        let end = line("end id=");
        assert!(
            end.contains("cause=\"connect-refused; direction=inbound; target="),
            "{text}"
        );
        assert_eq!(text.lines().filter(|line| line.starts_with("end")).count(), 2, "{text}");

        // The client's sidecar sees the response of the server's sidecar.
        let sent = json_lines("tap pod/client -n shop --to pod/broken --count 1 -o json").await;
        let response = sent
            .iter()
            .find_map(|event| event["responseInitEvent"].as_object())
            .unwrap();
        assert_eq!(response["httpStatus"], 502, "{sent:?}");
        let cause = response["cause"].as_str().unwrap();
        assert!(cause.starts_with("connect-refused; direction=inbound; hop="), "{cause}");

        let explained = Command::new(built_binary("tulle").unwrap())
            .args(["explain", cause])
            .output()
            .await
            .unwrap();
        let explained = String::from_utf8(explained.stdout).unwrap();
        assert!(
            explained.starts_with("connect-refused: No process listens"),
            "{explained}"
        );
        assert!(explained.contains(&identity("broken")), "{explained}");
    });
}

#[test]
fn a_refused_request_is_shown_with_its_policy() {
    // The injector gives the control plane and the sidecar the same default; the sidecar uses its own until a policy arrives.
    let mesh = mesh()
        .flag("--default-policy=deny")
        .env("INBOUND_DEFAULT_POLICY", "deny");
    run_mesh_with_traffic(mesh, async |_: &Mesh| {
        eventually("the policy refuses a request, as the default did before", async || {
            let text = run_tulle("tap pod/web -n shop --count 1").await;
            let end = text.lines().last().unwrap_or_default();
            assert!(end.contains("cause=\"policy-denied:default"), "{text}");
            end.contains("cause=\"policy-denied:default/deny; why=").then_some(())
        })
        .await;
        eventually("there are refused requests", async || {
            let answer = json("stat pod/web -n shop").await;
            (answer["rows"][0]["deniedPerSecond"].as_f64()? > 0.0).then_some(())
        })
        .await;
    });
}

#[test]
fn a_tap_selects_by_destination_and_reports_sidecars_that_refuse() {
    run_with_traffic(async |mesh: &Mesh| {
        let mut all = tulle("tap -n shop --to pod/web -o json").spawn().unwrap();
        let mut lines = BufReader::new(all.stdout.take().unwrap()).lines();
        let event: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
        assert_eq!(event["proxyDirection"], "OUTBOUND", "{event}");
        assert_eq!(event["workload"]["name"], "client", "{event}");
        assert_eq!(event["destination"]["ip"], mesh.ip("web").to_string(), "{event}");

        let mut guarded = tulle("tap pod/guarded -n shop").spawn().unwrap();
        let mut errors = BufReader::new(guarded.stderr.take().unwrap()).lines();
        let error = errors.next_line().await.unwrap().unwrap();
        assert!(
            error.starts_with("tulle: pod/guarded is not watched: its sidecar rejected the tap: only "),
            "{error}"
        );
    });
}

#[test]
fn top_summarises_requests() {
    run_with_traffic(async |_: &Mesh| {
        let mut top = tulle("top pod/web -n shop").spawn().unwrap();
        // Waits for two requests, which `top` then shows.
        run_tulle("tap pod/web -n shop --count 2").await;
        let id = i32::try_from(top.id().unwrap()).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), nix::sys::signal::Signal::SIGINT).unwrap();
        let mut table = String::new();
        tokio::io::AsyncReadExt::read_to_string(&mut top.stdout.take().unwrap(), &mut table)
            .await
            .unwrap();
        assert!(top.wait().await.unwrap().success());
        let line = table.lines().nth(1).unwrap_or_default();
        let cells: Vec<_> = line.split_whitespace().collect();
        assert_eq!(cells[..4], ["client.shop", "pod/web", "GET", "/ready"], "{table}");
        assert_eq!(cells.last(), Some(&"100.00%"), "{table}");
    });
}

#[test]
fn missing_objects_and_servers_are_reported() {
    mesh().workload("web").run(async |_: &Mesh| {
        let refused = |line: &'static str| async move {
            let output = tulle(line).output().await.unwrap();
            assert!(!output.status.success(), "{output:?}");
            String::from_utf8(output.stderr).unwrap()
        };
        let missing = refused("stat deploy/nothing -n shop").await;
        assert!(
            missing.contains("no running deployment nothing found in namespace shop"),
            "{missing}"
        );
        let nowhere = Command::new(built_binary("tulle").unwrap())
            .args(["stat", "--control", "127.0.0.1:1"])
            .output()
            .await
            .unwrap();
        let nowhere = String::from_utf8(nowhere.stderr).unwrap();
        assert!(
            nowhere.contains("querying the control plane at 127.0.0.1:1"),
            "{nowhere}"
        );
    });
}
