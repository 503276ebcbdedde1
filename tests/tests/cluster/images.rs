//! The programs of the proxy image run under the security contexts that charts and injector set.

use std::fs;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tulle_tests::cluster::{Cluster, ClusterOptions};
use tulle_tests::images::Image;

/// A container without rights, as proxy, validator and hooks run.
fn unprivileged_container(name: &str, user: u32, command: &[&str]) -> Value {
    json!({
        "name": name,
        "image": Image::Proxy.reference(),
        "imagePullPolicy": "Never",
        "command": command,
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": true,
            "runAsGroup": user,
            "runAsNonRoot": true,
            "runAsUser": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    })
}

/// The init container as the injector writes it; `mode` are the flags for the chart's `iptablesMode` and `proxy.inboundMode`.
fn init_container(mode: &[&str]) -> Value {
    let ports = [
        "--incoming-proxy-port",
        "4143",
        "--outgoing-proxy-port",
        "4140",
        "--proxy-uid",
        "2102",
    ];
    let ignored = [
        "--inbound-ports-to-ignore",
        "4190,4191",
        "--ipv6=false",
        "--verify=false",
    ];
    let command = [&["/usr/lib/linkerd/linkerd2-proxy-init"], mode, &ports, &ignored].concat();
    let mut init = unprivileged_container("linkerd-init", 65534, &command);
    init["securityContext"]["capabilities"] = json!({"add": ["NET_ADMIN", "NET_RAW"]});
    init["volumeMounts"] = json!([{"name": "lock", "mountPath": "/run"}]);
    init
}

/// A pod that runs every program of the image, with the init container in this mode.
fn pod_with_every_program(name: &str, mode: &[&str]) -> Value {
    let validator = [
        "/usr/lib/linkerd/linkerd2-network-validator",
        "--log-format=plain",
        "--log-level=debug",
        "--connect-addr=1.1.1.1:20001",
        "--listen-addr=0.0.0.0:4140",
        "--timeout=10s",
    ];
    let waits = ["/usr/lib/linkerd/linkerd-await", "--timeout=10ms", "--port=4191"];
    let sleeps = ["/bin/sleep", "0"];
    let entry = ["/usr/lib/linkerd/linkerd2-proxy-identity"];
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "volumes": [{"name": "lock", "emptyDir": {}}],
            "initContainers": [init_container(mode), unprivileged_container("validator", 65534, &validator)],
            "containers": [
                unprivileged_container("await", 2102, &waits),
                unprivileged_container("proxy", 2102, &entry),
                unprivileged_container("sleep", 2102, &sleeps),
            ],
        },
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn every_program_of_the_proxy_image_runs_with_no_more_rights_than_its_chart_grants() {
    let options = ClusterOptions {
        images: vec![Image::Proxy],
        ..ClusterOptions::default()
    };
    let cluster = Cluster::start_with(options).await.unwrap();
    let nft = [
        "--firewall-bin-path",
        "iptables-nft",
        "--firewall-save-bin-path",
        "iptables-nft-save",
    ];
    let tproxy_flags = |backend| ["--backend", backend, "--inbound-mode", "tproxy"];
    let (nft_tproxy, legacy_tproxy) = (tproxy_flags("iptables-nft"), tproxy_flags("iptables-legacy"));
    let modes: [(&str, &[&str]); 5] = [
        ("nft", &nft),
        ("legacy", &[]),
        ("native", &["--backend", "native"]),
        ("nft-tproxy", &nft_tproxy),
        ("legacy-tproxy", &legacy_tproxy),
    ];
    for (name, mode) in modes {
        let pod = pod_with_every_program(name, mode);
        let manifest = cluster.dir().join(format!("{name}.json"));
        fs::write(&manifest, pod.to_string()).unwrap();
        cluster
            .kubectl(&["apply", "-f", manifest.to_str().unwrap()])
            .await
            .unwrap();
    }
    for (name, _) in modes {
        assert_exit_codes(&cluster, name).await;
    }
}

/// Waits until all containers of a pod have ended, and checks their exit codes.
async fn assert_exit_codes(cluster: &Cluster, name: &str) {
    let ended = async || {
        let pod = cluster.kubectl(&["get", "pod", name, "-o", "json"]).await?;
        let pod: Value = serde_json::from_str(&pod)?;
        let codes = ["initContainerStatuses", "containerStatuses"].map(|kind| {
            let statuses = pod["status"][kind].as_array().cloned().unwrap_or_default();
            let code = |status: &Value| status["state"]["terminated"]["exitCode"].as_i64();
            statuses.iter().map(code).collect::<Option<Vec<_>>>()
        });
        let [Some(init), Some(main)] = codes else {
            anyhow::bail!("{}", pod["status"])
        };
        ensure!(main.len() == 3, "{}", pod["status"]);
        Ok((init, main))
    };
    let mut codes = None;
    let waited = cluster
        .wait_until("all containers have ended", async || {
            codes = Some(ended().await.with_context(|| name.to_owned())?);
            Ok(())
        })
        .await;
    let mut logs = String::new();
    for container in ["linkerd-init", "validator", "await", "proxy"] {
        let log = cluster.kubectl(&["logs", name, "-c", container]).await;
        logs += &format!("{container}: {}\n", log.unwrap_or_else(|error| error.to_string()));
    }
    waited.unwrap_or_else(|error| panic!("{error:#}\n{logs}"));
    assert_eq!(
        codes,
        Some((vec![0, 0], vec![AWAIT_TIMEOUT, CONFIG_ERROR, 0])),
        "{name}:\n{logs}"
    );
}

/// The exit code of `linkerd-await` if the proxy is not ready in time; no proxy becomes ready here.
const AWAIT_TIMEOUT: i64 = 69;
/// The exit code of a proxy without a configuration.
const CONFIG_ERROR: i64 = 64;
