//! Probes give the same result with and without a sidecar, for each probe kind, application behaviour and default
//! policy. A rollout waits for an application that starts to listen late.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::core::ObjectList;
use serde_json::{Value, json};
use tulle_tests::images::Image;

use tulle_tests::meshed::{Client, MeshedCluster, assert_all_ok};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Application {
    Listens,
    /// Listens after [`BEHAVIOUR_CHANGE_AT_SECONDS`].
    ListensLate,
    NeverListens,
    /// Listens until [`BEHAVIOUR_CHANGE_AT_SECONDS`].
    StopsListening,
    /// Is stopped from [`BEHAVIOUR_CHANGE_AT_SECONDS`] on; the kernel still accepts connections.
    Hangs,
}

const APPLICATIONS: [Application; 5] = [
    Application::Listens,
    Application::ListensLate,
    Application::NeverListens,
    Application::StopsListening,
    Application::Hangs,
];

/// The probe kinds: container name, flag of the server, and handler.
const KINDS: [(&str, &str, &str); 5] = [
    (
        "http",
        "http",
        "{httpGet: {port: PORT, path: '/status/204?full=1', httpHeaders: [{name: Host, value: web.test}, {name: X-A, value: b}]}}",
    ),
    (
        "https",
        "https",
        "{httpGet: {port: PORT, scheme: HTTPS, path: '/status/204?full=1', httpHeaders: [{name: Host, value: web.test}, {name: X-A, value: b}]}}",
    ),
    ("tcp", "tcp", "{tcpSocket: {port: named}}"),
    ("grpc", "http", "{grpc: {port: PORT, service: any}}"),
    (
        "exec",
        "http",
        "{exec: {command: [/bin/curl, -sf, -m, '2', 'http://127.0.0.1:PORT/ready']}}",
    ),
];

/// The expected result of one container. A container with a startup probe passes if it has started, any other if it is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Expected {
    passes: Passes,
    restarts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passes {
    /// Soon after its start, and keeps passing.
    Soon,
    /// Not before [`BEHAVIOUR_CHANGE_AT_SECONDS`], and then keeps passing.
    Late,
    Never,
    /// Soon after its start, and stops passing later.
    Temporarily,
}

/// The result with readiness and liveness probes. It is that of Kubernetes without a mesh, which the test verifies in a namespace
/// without sidecars.
fn expected_with_readiness(application: Application, kind: &str) -> Expected {
    let (passes, restarts) = match (application, kind) {
        // The kernel accepts its connections.
        (Application::Hangs, "tcp") | (Application::Listens, _) => (Passes::Soon, false),
        (Application::ListensLate, _) => (Passes::Late, false),
        (Application::NeverListens, _) => (Passes::Never, true),
        (Application::StopsListening | Application::Hangs, _) => (Passes::Temporarily, true),
    };
    Expected { passes, restarts }
}

/// The result with a startup probe, which is not repeated after it has succeeded.
fn expected_with_startup(application: Application) -> Expected {
    let (passes, restarts) = match application {
        Application::ListensLate => (Passes::Late, false),
        Application::NeverListens => (Passes::Never, true),
        Application::Listens | Application::StopsListening | Application::Hangs => (Passes::Soon, false),
    };
    Expected { passes, restarts }
}

/// Namespaces with their annotations: one outside the mesh, and one for each default policy that is tested.
const POLICIES: [(&str, &str); 4] = [
    ("unmeshed", "{}"),
    (
        "open",
        "{linkerd.io/inject: enabled, config.linkerd.io/default-inbound-policy: all-unauthenticated}",
    ),
    (
        "authenticated",
        "{linkerd.io/inject: enabled, config.linkerd.io/default-inbound-policy: all-authenticated}",
    ),
    (
        "deny",
        "{linkerd.io/inject: enabled, config.linkerd.io/default-inbound-policy: deny}",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn probes_work_as_without_a_mesh_and_a_rollout_waits_for_them() {
    let meshed = MeshedCluster::start().await.unwrap();
    let mut wrong = Vec::new();
    // One namespace after another, because all probes at once would exceed their timeouts on a small machine.
    for (namespace, annotations) in POLICIES {
        meshed
            .apply(&format!(
                "{{apiVersion: v1, kind: Namespace, metadata: {{name: {namespace}, annotations: {annotations}}}}}"
            ))
            .await
            .unwrap();
        let pods: Vec<Value> = APPLICATIONS.into_iter().map(|app| pod(namespace, app)).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": pods});
        meshed.apply(&list.to_string()).await.unwrap();
        let mut seen = BTreeMap::<String, ObservedContainer>::new();
        let settled = async || {
            observe(&meshed, namespace, &mut seen).await?;
            let unsettled = rows().filter_map(|row| row.pending_expectation(&seen));
            let unsettled: Vec<String> = unsettled.collect();
            ensure!(unsettled.is_empty(), "{}", unsettled.join("\n"));
            Ok(())
        };
        if let Err(error) = meshed.cluster.wait_until("containers settle", settled).await {
            wrong.push(format!("{namespace}: {error:#}"));
        }
        wrong.extend(rows().filter_map(|row| Some(format!("{namespace}: {}", row.find_violation(&seen)?))));
        let delete = format!("delete pods -n {namespace} --all --force --grace-period=0 --wait=false");
        meshed.kubectl(&delete).await.unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_rollout_loses_nothing(&meshed).await;
}

/// One container, which is one row of the table.
struct Row {
    application: Application,
    kind: &'static str,
    /// Whether it is the container with the startup probe.
    is_startup: bool,
}

fn rows() -> impl Iterator<Item = Row> {
    APPLICATIONS.into_iter().flat_map(|application| {
        let kinds = KINDS.iter().flat_map(|(kind, ..)| [(*kind, false), (*kind, true)]);
        let rows = kinds.map(move |(kind, is_startup)| Row {
            application,
            kind,
            is_startup,
        });
        rows.filter(|row| !row.is_startup || has_startup_probe(row.application))
    })
}

/// Whether there is a container with a startup probe. `StopsListening` and `Hangs` start as `Listens` does, so the startup probe
/// of that kind of start is tested once, with `Listens`.
fn has_startup_probe(application: Application) -> bool {
    !matches!(application, Application::StopsListening | Application::Hangs)
}

#[derive(Debug, Default)]
struct ObservedContainer {
    /// The container's age in seconds, counted from its latest start, when it first passed.
    first_passed_at: Option<i64>,
    /// Whether it passed and then not, without a restart.
    stopped_passing: bool,
    is_passing: bool,
    restarts: i32,
    /// Age in seconds when last observed before the first restart.
    age: i64,
}

impl Row {
    fn name(&self) -> String {
        let probe = if self.is_startup { "startup" } else { "ready" };
        format!("{}/{}-{probe}", pod_name(self.application), self.kind)
    }

    fn expected(&self) -> Expected {
        match self.is_startup {
            true => expected_with_startup(self.application),
            false => expected_with_readiness(self.application, self.kind),
        }
    }

    /// The expected state that has not been observed yet, if any.
    fn pending_expectation(&self, seen: &BTreeMap<String, ObservedContainer>) -> Option<String> {
        let name = self.name();
        let Some(seen) = seen.get(&name) else {
            return Some(format!("{name} does not run"));
        };
        let expected = self.expected();
        let is_settled = (!expected.restarts || seen.restarts > 0)
            && (expected.restarts || seen.age > OBSERVATION_SECONDS)
            && match expected.passes {
                Passes::Soon | Passes::Late => seen.is_passing,
                Passes::Never => true,
                Passes::Temporarily => seen.stopped_passing,
            };
        (!is_settled).then(|| format!("{name}: {expected:?}: {seen:?}"))
    }

    /// An observed state that contradicts the expectation, if any.
    fn find_violation(&self, seen: &BTreeMap<String, ObservedContainer>) -> Option<String> {
        let seen = seen.get(&self.name())?;
        let expected = self.expected();
        let is_right = (expected.restarts || seen.restarts == 0)
            && match expected.passes {
                Passes::Soon => !seen.stopped_passing,
                Passes::Temporarily => true,
                Passes::Late => {
                    // Kubernetes reports times in whole seconds.
                    let is_late = |age| age >= BEHAVIOUR_CHANGE_AT_SECONDS - 1;
                    !seen.stopped_passing && seen.first_passed_at.is_none_or(is_late)
                }
                Passes::Never => seen.first_passed_at.is_none(),
            };
        (!is_right).then(|| format!("{}: {expected:?}: {seen:?}", self.name()))
    }
}

/// Adds the current statuses of all containers.
async fn observe(
    meshed: &MeshedCluster,
    namespace: &str,
    seen: &mut BTreeMap<String, ObservedContainer>,
) -> anyhow::Result<()> {
    let args = ["get", "pods", "-n", namespace, "-o", "json"];
    let pods: ObjectList<Pod> =
        serde_json::from_str(&meshed.cluster.kubectl(&args).await?).context("a list of pods")?;
    let now = Timestamp::now().as_second();
    for pod in pods.items {
        let name = pod.metadata.name.unwrap_or_default();
        for status in pod
            .status
            .and_then(|status| status.container_statuses)
            .unwrap_or_default()
        {
            let seen = seen.entry(format!("{name}/{}", status.name)).or_default();
            seen.record(&status, now);
        }
    }
    Ok(())
}

impl ObservedContainer {
    fn record(&mut self, status: &ContainerStatus, now: i64) {
        self.restarts = self.restarts.max(status.restart_count);
        self.is_passing = match status.name.ends_with("-startup") {
            true => status.started == Some(true),
            false => status.ready,
        };
        let running = status.state.as_ref().and_then(|state| state.running.as_ref());
        let Some(since) = running.and_then(|running| running.started_at.as_ref()) else {
            return;
        };
        let age = now - since.0.as_second();
        if self.is_passing {
            self.first_passed_at.get_or_insert(age);
        }
        if status.restart_count == 0 {
            self.age = age;
            self.stopped_passing |= self.first_passed_at.is_some() && !self.is_passing;
        }
    }
}

fn pod_name(application: Application) -> String {
    format!("{application:?}").to_lowercase()
}

fn pod(namespace: &str, application: Application) -> Value {
    let mut containers = Vec::new();
    for (n, (kind, flag, handler)) in KINDS.iter().enumerate() {
        for (is_startup, port) in [(false, 8000 + n), (true, 8100 + n)] {
            if is_startup && !has_startup_probe(application) {
                continue;
            }
            let probe = |failures: usize| {
                let mut probe: Value = serde_yaml_ng::from_str(&handler.replace("PORT", &port.to_string())).unwrap();
                probe["periodSeconds"] = 1.into();
                probe["timeoutSeconds"] = 2.into();
                probe["failureThreshold"] = failures.into();
                probe
            };
            // A pod that listens late needs a higher failure threshold.
            let failures_allowed = if application == Application::ListensLate { 60 } else { 6 };
            let mut container = json!({
                "image": Image::Workload.reference(),
                "command": ["/bin/sh", "-c", script(application, &format!("/tulle-bench serve --{flag}=0.0.0.0:{port}"))],
                "ports": [{"name": "named", "containerPort": port}],
            });
            match is_startup {
                true => {
                    container["name"] = format!("{kind}-startup").into();
                    container["startupProbe"] = probe(failures_allowed);
                }
                false => {
                    container["name"] = format!("{kind}-ready").into();
                    // A single probe that a busy machine delays must not make a container unready.
                    container["readinessProbe"] = probe(2);
                    container["livenessProbe"] = probe(failures_allowed);
                }
            }
            containers.push(container);
        }
    }
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod_name(application), "namespace": namespace},
        "spec": {"terminationGracePeriodSeconds": 1, "containers": containers},
    })
}

fn script(application: Application, serve: &str) -> String {
    match application {
        Application::Listens => format!("exec {serve}"),
        Application::ListensLate => format!("sleep {BEHAVIOUR_CHANGE_AT_SECONDS}; exec {serve}"),
        Application::NeverListens => "exec sleep 1000000".to_owned(),
        Application::StopsListening => {
            format!("{serve} & sleep {BEHAVIOUR_CHANGE_AT_SECONDS}; kill -9 $!; exec sleep 1000000")
        }
        Application::Hangs => {
            format!("{serve} & sleep {BEHAVIOUR_CHANGE_AT_SECONDS}; kill -STOP $!; exec sleep 1000000")
        }
    }
}

const CLIENT: Client = Client {
    namespace: "shop",
    deployment: "client",
    container: "client",
};

/// Two replicas that listen 8 s after their start, with a `tcpSocket` probe. A client without retries loses no request
/// while they are replaced.
async fn assert_rollout_loses_nothing(meshed: &MeshedCluster) {
    meshed.apply(SHOP).await.unwrap();
    meshed.set_up_client("shop", "client").await.unwrap();
    meshed.cluster.wait_for_deployment("shop", "web").await.unwrap();
    let restart = async {
        meshed.kubectl("rollout restart -n shop deploy/web").await?;
        meshed
            .kubectl("rollout status -n shop deploy/web --timeout=90s")
            .await?;
        Ok(())
    };
    let line = "http://web:80/echo --rate=50 --body-size=200";
    let loaded = meshed.load_during(CLIENT, line, MIN_LOAD_DURATION, restart).await;
    let (report, _) = loaded.unwrap();
    assert_all_ok(&report, "a rollout of replicas that listen late");
    eprintln!("{} POSTs during a rollout, none failed", report.requests);
}

/// Minimum duration of the load during a rollout.
const MIN_LOAD_DURATION: Duration = Duration::from_secs(20);
const BEHAVIOUR_CHANGE_AT_SECONDS: i64 = 10;
/// How long a container that must not restart is observed, in seconds; liveness probes fail after 6.
const OBSERVATION_SECONDS: i64 = BEHAVIOUR_CHANGE_AT_SECONDS + 10;

const SHOP: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop, annotations: {linkerd.io/inject: enabled}}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 15
      containers:
      - name: web
        image: ghcr.io/tulle-mesh/bench:0.1.0
        command: [/bin/sh, -c, 'sleep 8; exec /tulle-bench serve --http=0.0.0.0:8080']
        readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: client, namespace: shop}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: client
        image: ghcr.io/tulle-mesh/bench:0.1.0
        args: [serve, '--http=0.0.0.0:8080']
        readinessProbe: {httpGet: {path: /ready, port: 8080}, periodSeconds: 1}
";
