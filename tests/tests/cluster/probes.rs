//! Probes mean with a sidecar what they mean without one: every kind of probe, of applications that listen, listen late, never,
//! stop listening, and hang, under every default policy; and that a rollout waits for an application that listens late.

use std::collections::BTreeMap;

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::core::ObjectList;
use serde_json::{Value, json};
use tulle_tests::images::Image;

use crate::meshed::{Client, Meshed, assert_all_ok};

/// What an application does after its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Application {
    Listens,
    /// Listens after [`MOMENT`].
    ListensLate,
    NeverListens,
    /// Listens until [`MOMENT`].
    StopsListening,
    /// Stands still from [`MOMENT`] on; the kernel accepts for it.
    Hangs,
}

const APPLICATIONS: [Application; 5] = [
    Application::Listens,
    Application::ListensLate,
    Application::NeverListens,
    Application::StopsListening,
    Application::Hangs,
];

/// The kinds of probes, by the name of the container, with the flag of the server and the handler at a port.
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

/// What becomes of a container with readiness and liveness probes, and of one with a startup probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Expected {
    ready: Ready,
    restarts: bool,
    started: Ready,
    /// Of the container with the startup probe.
    startup_restarts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ready {
    /// And it stays so.
    Soon,
    /// Not before [`MOMENT`].
    Late,
    Never,
    /// First, and then no more.
    Once,
}

/// The outcome that Kubernetes gives without a mesh; the same test looks whether that is so.
fn expected(application: Application, kind: &str) -> Expected {
    let (ready, restarts) = match (application, kind) {
        // Its connections are established by the kernel.
        (Application::Hangs, "tcp") | (Application::Listens, _) => (Ready::Soon, false),
        (Application::ListensLate, _) => (Ready::Late, false),
        (Application::NeverListens, _) => (Ready::Never, true),
        (Application::StopsListening | Application::Hangs, _) => (Ready::Once, true),
    };
    // Once it has succeeded, a startup probe is not made again.
    let (started, startup_restarts) = match application {
        Application::ListensLate => (Ready::Late, false),
        Application::NeverListens => (Ready::Never, true),
        Application::Listens | Application::StopsListening | Application::Hangs => (Ready::Soon, false),
    };
    Expected {
        ready,
        restarts,
        started,
        startup_restarts,
    }
}

/// Namespaces, and the annotations of each.
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
async fn every_probe_means_what_it_means_without_a_mesh_and_a_rollout_waits_for_it() {
    let meshed = Meshed::start().await.unwrap();
    let mut wrong = Vec::new();
    // One after the other: the probes of all at once would take longer than they may on a small machine.
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
        let mut seen = BTreeMap::<String, Seen>::new();
        let settled = async || {
            look(&meshed, namespace, &mut seen).await?;
            let unsettled = rows().filter_map(|row| row.unsettled(&seen));
            let unsettled: Vec<String> = unsettled.collect();
            ensure!(unsettled.is_empty(), "{}", unsettled.join("\n"));
            Ok(())
        };
        if let Err(error) = meshed.cluster.until("containers settle", settled).await {
            wrong.push(format!("{namespace}: {error:#}"));
        }
        wrong.extend(rows().filter_map(|row| Some(format!("{namespace}: {}", row.mistaken(&seen)?))));
        let delete = format!("delete pods -n {namespace} --all --force --grace-period=0 --wait=false");
        meshed.kubectl(&delete).await.unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    a_rollout_loses_nothing(&meshed).await;
}

/// A row of the table: one container.
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
        rows.filter(|row| !row.is_startup || starts_differently(row.application))
    })
}

/// What an application does later means nothing to a startup probe that has succeeded.
fn starts_differently(application: Application) -> bool {
    !matches!(application, Application::StopsListening | Application::Hangs)
}

/// What has been seen of a container.
#[derive(Debug, Default)]
struct Seen {
    /// How long it had been running, in seconds, when it was ready (or started) for the first time, and had not been restarted.
    good_after: Option<i64>,
    /// Whether it was good, and then not, without having been restarted.
    became_bad: bool,
    is_good: bool,
    restarts: i32,
    /// How long it has been running without a restart, in seconds.
    ran: i64,
}

impl Row {
    fn name(&self) -> String {
        let probe = if self.is_startup { "startup" } else { "ready" };
        format!("{}/{}-{probe}", pod_name(self.application), self.kind)
    }

    fn expected(&self) -> (Ready, bool) {
        let expected = expected(self.application, self.kind);
        match self.is_startup {
            true => (expected.started, expected.startup_restarts),
            false => (expected.ready, expected.restarts),
        }
    }

    /// What is still to come, if anything.
    fn unsettled(&self, seen: &BTreeMap<String, Seen>) -> Option<String> {
        let name = self.name();
        let Some(seen) = seen.get(&name) else {
            return Some(format!("{name} does not run"));
        };
        let (ready, restarts) = self.expected();
        let is_settled = (!restarts || seen.restarts > 0)
            && (restarts || seen.ran > WATCHED)
            && match ready {
                Ready::Soon | Ready::Late => seen.is_good,
                Ready::Never => true,
                Ready::Once => seen.became_bad,
            };
        (!is_settled).then(|| format!("{name}: expected {ready:?}, restarts {restarts}: {seen:?}"))
    }

    /// What must not have been.
    fn mistaken(&self, seen: &BTreeMap<String, Seen>) -> Option<String> {
        let seen = seen.get(&self.name())?;
        let (ready, restarts) = self.expected();
        let is_right = (restarts || seen.restarts == 0)
            && match ready {
                Ready::Soon | Ready::Once => true,
                // Kubernetes tells times in whole seconds.
                Ready::Late => seen.good_after.is_none_or(|after| after >= MOMENT - 1),
                Ready::Never => seen.good_after.is_none(),
            };
        (!is_right).then(|| format!("{}: expected {ready:?}, restarts {restarts}: {seen:?}", self.name()))
    }
}

/// Adds what the statuses of all containers say now.
async fn look(meshed: &Meshed, namespace: &str, seen: &mut BTreeMap<String, Seen>) -> anyhow::Result<()> {
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
            seen.note(&status, now);
        }
    }
    Ok(())
}

impl Seen {
    fn note(&mut self, status: &ContainerStatus, now: i64) {
        self.restarts = self.restarts.max(status.restart_count);
        self.is_good = match status.name.ends_with("-startup") {
            true => status.started == Some(true),
            false => status.ready,
        };
        let running = status.state.as_ref().and_then(|state| state.running.as_ref());
        let Some(since) = running.and_then(|running| running.started_at.as_ref()) else {
            return;
        };
        let ran = now - since.0.as_second();
        if self.is_good {
            self.good_after.get_or_insert(ran);
        }
        if status.restart_count == 0 {
            self.ran = ran;
            self.became_bad |= self.good_after.is_some() && !self.is_good;
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
            if is_startup && !starts_differently(application) {
                continue;
            }
            let probe = |failures: usize| {
                let mut probe: Value = serde_yaml_ng::from_str(&handler.replace("PORT", &port.to_string())).unwrap();
                probe["periodSeconds"] = 1.into();
                probe["timeoutSeconds"] = 2.into();
                probe["failureThreshold"] = failures.into();
                probe
            };
            // One that listens late is to be waited for.
            let patience = if application == Application::ListensLate { 60 } else { 5 };
            let mut container = json!({
                "image": Image::Workload.reference(),
                "command": ["/bin/sh", "-c", script(application, &format!("/tulle-bench serve --{flag}=0.0.0.0:{port}"))],
                "ports": [{"name": "named", "containerPort": port}],
            });
            match is_startup {
                true => {
                    container["name"] = format!("{kind}-startup").into();
                    container["startupProbe"] = probe(patience);
                }
                false => {
                    container["name"] = format!("{kind}-ready").into();
                    container["readinessProbe"] = probe(1);
                    container["livenessProbe"] = probe(patience);
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

/// What a container runs.
fn script(application: Application, serve: &str) -> String {
    match application {
        Application::Listens => format!("exec {serve}"),
        Application::ListensLate => format!("sleep {MOMENT}; exec {serve}"),
        Application::NeverListens => "exec sleep 1000000".to_owned(),
        Application::StopsListening => format!("{serve} & sleep {MOMENT}; kill -9 $!; exec sleep 1000000"),
        Application::Hangs => format!("{serve} & sleep {MOMENT}; kill -STOP $!; exec sleep 1000000"),
    }
}

const CLIENT: Client = Client {
    namespace: "shop",
    deployment: "client",
    container: "client",
};

/// Two replicas that listen 8 s after their start, with a `tcpSocket` probe: a client that never tries again loses nothing while
/// they are replaced.
async fn a_rollout_loses_nothing(meshed: &Meshed) {
    meshed.apply(SHOP).await.unwrap();
    meshed.client_ready("shop", "client").await.unwrap();
    meshed.cluster.deployment_ready("shop", "web").await.unwrap();
    let restart = async {
        meshed.kubectl("rollout restart -n shop deploy/web").await?;
        meshed
            .kubectl("rollout status -n shop deploy/web --timeout=90s")
            .await?;
        Ok(())
    };
    let line = "http://web:80/echo --rate=50 --body-size=200 --duration=60s";
    let (report, _) = meshed.load_during(CLIENT, line, restart).await.unwrap();
    assert_all_ok(&report, "a rollout of replicas that listen late");
    eprintln!("{} POSTs during a rollout, none failed", report.requests);
}

/// Seconds after the start of a container.
const MOMENT: i64 = 10;
/// How long a container that is not to be restarted is looked at, in seconds: liveness probes fail after 5.
const WATCHED: i64 = MOMENT + 9;

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
