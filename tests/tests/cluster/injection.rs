//! Pods of every workload kind run with a sidecar, and the audit lists pods that the injector missed.

use std::collections::BTreeSet;
use std::ops::Range;
use std::process::Stdio;
use std::time::Duration;
use std::{env, fs};

use anyhow::ensure;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition};
use serde_json::json;
use tokio::time::Instant;
use tulle_control::injector_webhook::audit::AuditFindings;

use tulle_tests::meshed::MeshedCluster;

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_every_workload_run_with_a_sidecar_and_jobs_end() {
    let meshed = MeshedCluster::start().await.unwrap();
    meshed.apply(WORKLOADS).await.unwrap();
    for namespace in ["plain", "native", "classic"] {
        for (_, manifest) in kinds() {
            let manifest = manifest.replace("@namespace", namespace);
            meshed.apply(&manifest).await.unwrap();
        }
    }
    for namespace in ["plain", "native", "classic"] {
        for (kind, _) in kinds() {
            let selector = format!("app={kind}");
            let exists = async || meshed.pods(namespace, &selector).await.map(drop);
            meshed.cluster.wait_until("a pod exists", exists).await.unwrap();
            if kind != "job" {
                let ready = format!("wait pod -n {namespace} -l {selector} --for=condition=Ready --timeout=60s");
                meshed.kubectl(&ready).await.unwrap();
            }
            let containers = "jsonpath={.items[0].spec.initContainers[*].name}/{.items[0].spec.containers[*].name}";
            let args = ["get", "pods", "-n", namespace, "-l", &selector, "-o", containers];
            let containers = meshed.cluster.kubectl(&args).await.unwrap();
            let expected = match namespace {
                "plain" => "/app",
                "native" => "linkerd-init linkerd-proxy/app",
                _ => "linkerd-init/linkerd-proxy app",
            };
            assert_eq!(containers, expected, "{kind} in {namespace}");
        }
    }
    // With a native sidecar a Job ends when its container exits. A classic sidecar is shut down by a wrapper around the command;
    // this Job has no such wrapper, so it would not end in the namespace "classic".
    for namespace in ["plain", "native"] {
        let complete = format!("wait job/job -n {namespace} --for=condition=complete --timeout=60s");
        meshed.kubectl(&complete).await.unwrap();
    }
    let from_schedule = "create job -n native once --from=cronjob/cronjob";
    meshed.kubectl(from_schedule).await.unwrap();
    let complete = "wait job/once -n native --for=condition=complete --timeout=60s";
    meshed.kubectl(complete).await.unwrap();

    measure_times_to_ready(&meshed).await;
    assert_outage_is_audited(&meshed).await;
}

/// Prints how long the same pod takes to become ready with and without a sidecar, and how much of that is after the
/// proxy's start. `TULLE_TEST_FULL=1` bounds the difference.
async fn measure_times_to_ready(meshed: &MeshedCluster) {
    let mut medians = Vec::new();
    for namespace in ["plain", "native", "classic"] {
        let mut times = Vec::new();
        for n in 0..3 {
            let name = format!("timed-{n}");
            let pod = POD.replace("@name", &name).replace("@in", namespace);
            let begun = Instant::now();
            meshed.apply(&pod).await.unwrap();
            let mut proxy_started = None;
            let ready = async || {
                let args = ["get", "pod", "-n", namespace, &name, "-o", "json"];
                let pod: Pod = serde_json::from_str(&meshed.cluster.kubectl(&args).await?)?;
                let status = pod.status.unwrap_or_default();
                let all = [status.init_container_statuses, status.container_statuses];
                let mut containers = all.into_iter().flatten().flatten();
                let is_started =
                    |status: &ContainerStatus| status.name == "linkerd-proxy" && status.started == Some(true);
                if containers.any(|status| is_started(&status)) {
                    proxy_started.get_or_insert_with(|| begun.elapsed());
                }
                let is_ready = |condition: &PodCondition| condition.type_ == "Ready" && condition.status == "True";
                let conditions = status.conditions.unwrap_or_default();
                ensure!(conditions.iter().any(is_ready), "{conditions:?}");
                Ok(())
            };
            meshed.cluster.wait_until("a pod is ready", ready).await.unwrap();
            let total = begun.elapsed();
            times.push((total, total - proxy_started.unwrap_or_default()));
        }
        times.sort_unstable();
        medians.push(times[times.len() / 2]);
        let (total, after) = medians[medians.len() - 1];
        eprintln!("{namespace}: median from creation to Ready {total:.1?}, from the proxy's start {after:.1?}");
    }
    let [(plain, _), native, classic] = medians[..] else {
        unreachable!("there are three namespaces")
    };
    if env::var_os("TULLE_TEST_FULL").is_some() {
        for (name, (_, after)) in [("native", native), ("classic", classic)] {
            let bound = plain + Duration::from_secs(1);
            assert!(
                after <= bound,
                "{name}: {after:.1?} after the proxy's start, {plain:.1?} without a sidecar"
            );
        }
    }
}

/// Creates pods while the injector is killed, and compares the audit of its successor with the pods that have no sidecar.
async fn assert_outage_is_audited(meshed: &MeshedCluster) {
    // The pods are never scheduled: injection happens before scheduling.
    let pod = |n: usize| {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": format!("pod-{n}"), "namespace": "native", "labels": {"app": "many"}},
            "spec": {
                "schedulingGates": [{"name": "tulle.dev/never"}],
                "containers": [{"name": "app", "image": "ghcr.io/tulle-mesh/bench:0.1.0"}],
            },
        })
    };
    let create = |name: &str, pods: Range<usize>| {
        let file = meshed.file(name);
        let pods = json!({"apiVersion": "v1", "kind": "List", "items": pods.map(pod).collect::<Vec<_>>()});
        fs::write(&file, pods.to_string()).unwrap();
        let mut create = meshed.cluster.command("kubectl").unwrap();
        create.args(["create", "-f"]).arg(&file).stdout(Stdio::null());
        create.spawn().unwrap()
    };
    let mut creating = create("pods.json", 0..300);
    let count = async || meshed.pods("native", "app=many").await.map(|pods| pods.len());
    let some = async || {
        let n = count().await?;
        ensure!(n >= 50, "{n} pods");
        Ok(())
    };
    meshed.cluster.wait_until("fifty pods are created", some).await.unwrap();
    let injector = "linkerd.io/control-plane-component=proxy-injector";
    let scale = "scale -n linkerd deploy/linkerd-proxy-injector --replicas";
    meshed.kubectl(&format!("{scale}=0")).await.unwrap();
    let kill = format!("delete pod -n linkerd -l {injector} --force --grace-period=0");
    meshed.kubectl(&kill).await.unwrap();
    assert!(creating.wait().await.unwrap().success());
    // These pods are created while no injector runs, even if the first ones were all created earlier.
    let gone = async || {
        let args = ["get", "pods", "-n", "linkerd", "-l", injector, "-o", "name"];
        let pods = meshed.cluster.kubectl(&args).await?;
        ensure!(pods.is_empty(), "{pods}");
        Ok(())
    };
    meshed.cluster.wait_until("the injector is gone", gone).await.unwrap();
    assert!(create("late.json", 300..N_PODS).wait().await.unwrap().success());
    meshed.kubectl(&format!("{scale}=1")).await.unwrap();

    let path = "jsonpath={range .items[*]}{.metadata.name}/{.spec.initContainers[*].name}{\"\\n\"}{end}";
    let args = ["get", "pods", "-n", "native", "-l", "app=many", "-o", path];
    let found = meshed.cluster.kubectl(&args).await.unwrap();
    let without = found.lines().filter_map(|line| line.strip_suffix('/'));
    let missed: BTreeSet<String> = without.map(|name| format!("native/{name}")).collect();
    assert_eq!(found.lines().count(), N_PODS);
    assert!(
        (1..N_PODS).contains(&missed.len()),
        "{} of {N_PODS} have no sidecar",
        missed.len()
    );
    let listed = async || {
        let pod = &meshed.pods("linkerd", injector).await?[0];
        let path = format!("/api/v1/namespaces/linkerd/pods/{pod}:9995/proxy/injection-audit");
        let findings = meshed.cluster.kubectl(&["get", "--raw", &path]).await?;
        let findings: AuditFindings = serde_json::from_str(&findings)?;
        ensure!(findings.audited_at.is_some(), "no audit yet");
        let missing = findings.uninjected_pods.iter();
        let listed: BTreeSet<String> = missing.map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect();
        ensure!(listed == missed, "listed {listed:?}, missed {missed:?}");
        Ok(())
    };
    meshed
        .cluster
        .wait_until("the audit lists the pods that the injector missed", listed)
        .await
        .unwrap();
    eprintln!(
        "{} of {N_PODS} pods were missed, and the audit lists them",
        missed.len()
    );
}

const N_PODS: usize = 310;

/// The kinds of workloads, each with a manifest for the namespace `@namespace`.
fn kinds() -> Vec<(&'static str, String)> {
    let app =
        "containers: [{name: app, image: 'ghcr.io/tulle-mesh/bench:0.1.0', args: [serve, '--http=0.0.0.0:8080']}]";
    let exits =
        "restartPolicy: Never, containers: [{name: app, image: 'ghcr.io/tulle-mesh/bench:0.1.0', args: [--version]}]";
    let template = |kind: &str, spec: &str| format!("{{metadata: {{labels: {{app: {kind}}}}}, spec: {{{spec}}}}}");
    let object = |kind: &str, api: &str, name: &str, spec: &str| {
        format!("apiVersion: {api}\nkind: {kind}\nmetadata: {{name: {name}, namespace: '@namespace'}}\nspec: {spec}\n")
    };
    let selected = |kind: &str| {
        format!(
            "{{selector: {{matchLabels: {{app: {kind}}}}}, template: {}}}",
            template(kind, app)
        )
    };
    let job = format!("{{template: {}}}", template("job", exits));
    vec![
        (
            "deployment",
            object("Deployment", "apps/v1", "deployment", &selected("deployment")),
        ),
        (
            "statefulset",
            object("StatefulSet", "apps/v1", "statefulset", &selected("statefulset")),
        ),
        (
            "daemonset",
            object("DaemonSet", "apps/v1", "daemonset", &selected("daemonset")),
        ),
        (
            "job",
            object("Job", "batch/v1", "job", &job)
                + "---\n"
                + &object(
                    "CronJob",
                    "batch/v1",
                    "cronjob",
                    &format!("{{schedule: '0 0 1 1 *', jobTemplate: {{spec: {job}}}}}"),
                ),
        ),
        ("pod", POD.replace("@name", "pod").replace("@in", "@namespace")),
    ]
}

/// `@in` is the namespace: `@namespace` begins with the other placeholder.
const POD: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: '@name'
  namespace: '@in'
  labels: {app: pod}
spec:
  containers:
    - name: app
      image: ghcr.io/tulle-mesh/bench:0.1.0
      args: [serve, '--http=0.0.0.0:8080']
      readinessProbe: {httpGet: {path: /ready, port: 8080}, periodSeconds: 1}
";

const WORKLOADS: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: plain}
---
apiVersion: v1
kind: Namespace
metadata: {name: native, annotations: {linkerd.io/inject: enabled}}
---
apiVersion: v1
kind: Namespace
metadata:
  name: classic
  annotations: {linkerd.io/inject: enabled, config.linkerd.io/proxy-enable-native-sidecar: 'false'}
";
