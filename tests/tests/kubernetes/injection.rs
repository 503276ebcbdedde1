//! Injection as the API server sees it: pods and services that it stored after the injector's response.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tulle_control::app::App;
use tulle_control::cmd::Command;
use tulle_control::config::Config;
use tulle_control::injection::values::Values;
use tulle_control::injection::{self, Decision, InjectionOrigin, InjectionTarget, PodOwner};
use tulle_control::injector_webhook::{self, Injector, audit, config_reload};
use tulle_control::kubernetes::event_recorder::EventRecorder;
use tulle_control::webhook::ReviewHandler as _;
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Readiness;
use tulle_tests::client;
use tulle_tests::cluster::{ApiServer, Controllers, Options};
use tulle_tests::eventually::eventually;

/// An API server with the injector as its webhook.
struct InjectorFixture {
    server: ApiServer,
    injector: Option<App>,
    webhook: SocketAddr,
    admin: SocketAddr,
}

#[tokio::test]
async fn pods_of_every_workload_are_injected_and_their_owners_get_events() {
    let fixture = InjectorFixture::start(Controllers::All).await;
    let pod = json!({"containers": [{"name": "app", "image": "app:1", "ports": [{"containerPort": 3306}]}]});
    create_workloads(&fixture, &pod).await;
    // The pods of a DaemonSet need nodes, and there are none.
    for (prefix, label) in [
        ("deploy-", Some(("linkerd.io/proxy-deployment", "deploy"))),
        ("stateful-", Some(("linkerd.io/proxy-statefulset", "stateful"))),
        ("job-", Some(("linkerd.io/proxy-job", "job"))),
        ("cron-1-", None),
        ("bare", None),
    ] {
        assert_injected(&fixture, prefix, label).await;
    }
    for (kind, name) in [
        ("Deployment", "deploy"),
        ("StatefulSet", "stateful"),
        ("Job", "job"),
        ("CronJob", "cron"),
        ("Pod", "bare"),
    ] {
        let note = fixture.event("shop", kind, name, "Injected").await;
        assert_eq!(note, "the sidecar proxy was injected", "{kind}");
    }
    skipped_and_refused_pods_get_events(&fixture, &pod).await;

    let ports = json!({"ports": [{"name": "http", "port": 80}, {"name": "db", "port": 33, "targetPort": 3306}]});
    fixture.create("v1", "Service", "db", &ports).await;
    let db = Api::<Service>::namespaced(fixture.server.client(), "shop")
        .get("db")
        .await
        .unwrap();
    assert_eq!(db.metadata.annotations.unwrap()["config.linkerd.io/opaque-ports"], "33");
    assert_reviews_counted(&fixture.admin("/metrics").await);
}

/// Creates a workload of each kind, whose pods have this spec.
async fn create_workloads(fixture: &InjectorFixture, pod: &Value) {
    let template = |restart: &str| {
        let mut spec = pod.clone();
        spec["restartPolicy"] = restart.into();
        json!({"metadata": {"labels": {"app": "web"}}, "spec": spec})
    };
    let set = json!({
        "selector": {"matchLabels": {"app": "web"}}, "serviceName": "web", "template": template("Always"),
    });
    let mut deployment = set.clone();
    deployment.as_object_mut().unwrap().remove("serviceName");
    let job = json!({"template": template("Never")});
    let cron_job = json!({"schedule": "0 0 1 1 *", "jobTemplate": {"spec": job}});
    fixture.create("apps/v1", "Deployment", "deploy", &deployment).await;
    fixture.create("apps/v1", "DaemonSet", "daemon", &deployment).await;
    fixture.create("apps/v1", "StatefulSet", "stateful", &set).await;
    fixture.create("batch/v1", "Job", "job", &job).await;
    fixture.create("batch/v1", "CronJob", "cron", &cron_job).await;
    fixture.create("v1", "Pod", "bare", pod).await;
    let from = ["create", "job", "cron-1", "-n", "shop", "--from=cronjob/cron"];
    fixture.server.kubectl(&from).await.unwrap();
}

/// Waits for a pod whose name starts with `prefix`, and checks its sidecar, its labels (`owner_label` names its workload) and its
/// annotations.
async fn assert_injected(fixture: &InjectorFixture, prefix: &str, owner_label: Option<(&str, &str)>) {
    let pods = fixture.pods("shop");
    let pod = eventually(prefix, async || {
        let all = pods.list(&ListParams::default()).await.unwrap();
        all.into_iter()
            .find(|pod| pod.metadata.name.as_deref().unwrap().starts_with(prefix))
    })
    .await;
    let init: Vec<_> = pod
        .spec
        .as_ref()
        .unwrap()
        .init_containers
        .iter()
        .flatten()
        .map(|one| &*one.name)
        .collect();
    assert_eq!(init, ["linkerd-init", "linkerd-proxy"], "{prefix}");
    let labels = pod.metadata.labels.as_ref().unwrap();
    assert_eq!(labels["linkerd.io/control-plane-ns"], "linkerd", "{prefix}");
    assert_eq!(labels["linkerd.io/workload-ns"], "shop", "{prefix}");
    match owner_label {
        Some((key, name)) => assert_eq!(labels.get(key).map(String::as_str), Some(name), "{prefix}"),
        None => assert!(
            !labels.keys().any(|key| key.starts_with("linkerd.io/proxy-")),
            "{prefix}: {labels:?}"
        ),
    }
    let annotations = pod.metadata.annotations.as_ref().unwrap();
    assert_eq!(annotations["config.linkerd.io/opaque-ports"], "3306", "{prefix}");
    assert_eq!(
        annotations["linkerd.io/inject"], "enabled",
        "{prefix}: inherited from the namespace"
    );
}

async fn skipped_and_refused_pods_get_events(fixture: &InjectorFixture, pod: &Value) {
    // A misspelt annotation injects nothing, and an event reports it.
    fixture.server.create_namespace("plain").await.unwrap();
    let misspelt = json!({"linkerd.io/injected": "enabled"});
    fixture.create_pod("plain", "typo", &misspelt, pod).await.unwrap();
    let note = fixture.event("plain", "Pod", "typo", "InjectionSkipped").await;
    assert!(note.contains("the key is linkerd.io/inject"), "{note}");
    let stored = fixture.pods("plain").get("typo").await.unwrap();
    assert!(stored.spec.unwrap().init_containers.is_none());
    assert_eq!(
        stored.metadata.annotations.unwrap()["config.linkerd.io/opaque-ports"],
        "3306"
    );

    // A pod that cannot have a sidecar is admitted without one. A pod that its sidecar would not protect is refused.
    // Events report both.
    let windows = json!({"os": {"name": "windows"}, "containers": [{"name": "app", "image": "app"}]});
    fixture
        .create_pod("shop", "windows", &json!({}), &windows)
        .await
        .unwrap();
    let note = fixture.event("shop", "Pod", "windows", "InjectionSkipped").await;
    assert!(note.contains("Windows"), "{note}");
    let stored = fixture.pods("shop").get("windows").await.unwrap();
    assert!(stored.spec.unwrap().init_containers.is_none());
    let as_proxy = json!({"containers": [{"name": "app", "image": "app", "securityContext": {"runAsUser": 2102}}]});
    let refused = fixture
        .create_pod("shop", "as-proxy", &json!({}), &as_proxy)
        .await
        .unwrap_err();
    let refused = refused.to_string();
    assert!(
        refused.contains("runs as user 2102") && refused.contains("config.linkerd.io/proxy-uid"),
        "{refused}"
    );
    let note = fixture.event("shop", "Pod", "as-proxy", "InjectionRefused").await;
    assert!(note.contains("runs as user 2102"), "{note}");
}

fn assert_reviews_counted(metrics: &str) {
    let assert_counted = |name: &str, owner: &str, rest: &str| {
        let start = format!("{name}{{owner_kind=\"{owner}\",namespace=\"shop\",annotation_at=\"namespace\"{rest}");
        assert!(
            metrics.lines().any(|line| line.starts_with(&start)),
            "no {start} in {metrics}"
        );
    };
    for owner in ["deployment", "statefulset", "job", "cronjob", "pod"] {
        assert_counted("proxy_inject_admission_requests_total", owner, "");
        assert_counted(
            "proxy_inject_admission_responses_total",
            owner,
            ",skip=\"false\",skip_reason=\"\"",
        );
    }
    for name in ["namespace_cache_size", "replicaset_cache_size", "job_cache_size"] {
        assert!(
            metrics.contains(&format!("{name}{{cluster=\"local\"}}")),
            "no {name} in {metrics}"
        );
    }
}

#[tokio::test]
async fn an_audit_after_an_outage_lists_exactly_the_pods_that_were_missed() {
    let mut fixture = InjectorFixture::start(Controllers::None).await;
    for namespace in ["other", "kept-out"] {
        fixture.server.create_namespace(namespace).await.unwrap();
    }
    // Pods need a service account, and without controllers no component creates it.
    fixture.server.token("kube-system", "default", &[]).await.unwrap();
    let enabled = json!({"linkerd.io/inject": "enabled"});
    let spec = json!({"containers": [{"name": "app", "image": "app:1"}]});
    create_pods_that_need_no_sidecar(&fixture, &enabled, &spec).await;

    let created = (0..300).map(|n| {
        let (namespace, annotations) = match n % 3 {
            0 => ("other", enabled.clone()),
            _ => ("shop", json!({})),
        };
        (namespace, format!("pod-{n}"), annotations)
    });
    let mut created: Vec<_> = created.collect();
    let late = created.split_off(150);
    fixture.create_all(created, &spec).await;
    let (tasks, n_created) = fixture.create_in_background(late, &spec);
    // Some pods are still being created.
    eventually("twenty more pods are created", async || {
        (n_created.load(Ordering::Relaxed) >= 20).then_some(())
    })
    .await;
    fixture.kill();
    tasks.join_all().await;

    let missing = missed_pods(&fixture).await;
    assert!(
        (1..300).contains(&missing.len()),
        "{} of 300 were missed",
        missing.len()
    );

    fixture.restart().await;
    let listed = fixture.audit_findings().await;
    assert_eq!(listed, missing);
    let metrics = fixture.admin("/metrics").await;
    let mut by_namespace: BTreeMap<&str, usize> = BTreeMap::new();
    for (namespace, _) in &missing {
        *by_namespace.entry(namespace).or_default() += 1;
    }
    for (namespace, n_pods) in by_namespace {
        let line = format!("tulle_uninjected_pods{{namespace=\"{namespace}\"}} {n_pods}");
        assert!(metrics.contains(&line), "no {line} in {metrics}");
    }

    // When the pods are deleted and created again, they have a sidecar and the list is empty.
    for (namespace, name) in &missing {
        let now = kube::api::DeleteParams::default().grace_period(0);
        fixture.pods(namespace).delete(name, &now).await.unwrap();
        let annotations = if namespace == "other" { &enabled } else { &json!({}) };
        fixture.create_pod(namespace, name, annotations, &spec).await.unwrap();
    }
    eventually("an audit finds no pod", async || {
        fixture.audit_findings().await.is_empty().then_some(())
    })
    .await;
}

/// Creates pods that need no sidecar, or for which the API server does not call the injector.
async fn create_pods_that_need_no_sidecar(fixture: &InjectorFixture, enabled: &Value, spec: &Value) {
    let label = [
        "label",
        "ns",
        "kept-out",
        "config.linkerd.io/admission-webhooks=disabled",
    ];
    fixture.server.kubectl(&label).await.unwrap();
    let (none, disabled) = (json!({}), json!({"linkerd.io/inject": "disabled"}));
    let host_network = json!({"hostNetwork": true, "containers": spec["containers"]});
    for (namespace, name, annotations, spec) in [
        ("other", "unannotated", &none, spec),
        ("shop", "disabled", &disabled, spec),
        ("shop", "host", &none, &host_network),
        ("kept-out", "annotated", enabled, spec),
        ("kube-system", "annotated", enabled, spec),
    ] {
        fixture.create_pod(namespace, name, annotations, spec).await.unwrap();
    }
}

/// Namespace and name of each pod `pod-<n>` that was stored without a sidecar.
async fn missed_pods(fixture: &InjectorFixture) -> BTreeSet<(String, String)> {
    let mut missing = BTreeSet::new();
    for namespace in ["shop", "other"] {
        for pod in fixture.pods(namespace).list(&ListParams::default()).await.unwrap() {
            let name = pod.metadata.name.unwrap();
            let is_injected = pod.spec.unwrap().init_containers.is_some();
            if name.starts_with("pod-") && !is_injected {
                missing.insert((namespace.to_owned(), name));
            }
        }
    }
    missing
}

/// Values of the chart, for every form of sidecar.
const SIDECAR_VALUES: &[&str] = &[
    "{}",
    "cniEnabled: true",
    "disableIPv6: false",
    "identity: {serviceAccountTokenProjection: false}",
    "proxy: {nativeSidecar: false}",
    "proxy: {nativeSidecar: false, await: false, waitBeforeExitSeconds: 5}",
    "proxy: {await: false, gid: 2103, resources: {cpu: {request: 100m, limit: 1}, memory: {limit: 250Mi}}}",
    "{cniEnabled: true, proxy: {tracing: {enabled: true, \
     collector: {endpoint: 'c:4317', meshIdentity: {serviceAccountName: c, namespace: o}}}}}",
    "proxyInit: {runAsRoot: true, closeWaitTimeoutSecs: 5, iptablesMode: native}",
    "proxyInit: {privileged: true, iptablesMode: legacy}",
];

#[tokio::test]
async fn every_form_of_sidecar_is_accepted_by_the_api_server() {
    let server = ApiServer::start().await.unwrap();
    server.create_namespace("shop").await.unwrap();
    let pods = Api::<Pod>::namespaced(server.client(), "shop");
    let manifest = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web", "annotations": {
            "linkerd.io/inject": "ingress",
            "config.linkerd.io/proxy-additional-env": r#"[{"name": "A", "value": "b"}]"#,
            "config.linkerd.io/skip-subnets": "10.0.0.0/8",
            "config.linkerd.io/debug-image": "debug",
        }},
        "spec": {
            "initContainers": [
                {"name": "own", "image": "own"},
                {"name": "side", "image": "side", "restartPolicy": "Always", "startupProbe": {"tcpSocket": {"port": 1}}},
            ],
            "volumes": [{"name": "linkerd-identity-end-entity", "configMap": {"name": "a"}}],
            "containers": [{"name": "app", "image": "app", "ports": [{"containerPort": 25, "name": "smtp"}],
                "startupProbe": {"grpc": {"port": 26}, "failureThreshold": 9},
                "readinessProbe": {"tcpSocket": {"port": "smtp"}},
                "livenessProbe": {"httpGet": {"port": 443, "scheme": "HTTPS"}, "terminationGracePeriodSeconds": 5},
                "securityContext": {"capabilities": {"drop": ["ALL"]}}}],
        },
    });
    for values in SIDECAR_VALUES {
        for debug in ["true", "false"] {
            let mut manifest = manifest.clone();
            manifest["metadata"]["annotations"]["config.linkerd.io/enable-debug-sidecar"] = debug.into();
            let pod = inject(values, manifest);
            let dry_run = PostParams {
                dry_run: true,
                ..PostParams::default()
            };
            let stored = pods
                .create(&dry_run, &pod)
                .await
                .unwrap_or_else(|err| panic!("{values}: {err}"));
            // The API server drops no field that the injector wrote.
            let containers = |pod: &Pod| {
                let spec = pod.spec.clone().unwrap();
                let all = spec
                    .containers
                    .into_iter()
                    .chain(spec.init_containers.into_iter().flatten());
                all.map(|one| (one.name, one.restart_policy, one.lifecycle, one.args))
                    .collect::<Vec<_>>()
            };
            assert_eq!(containers(&stored), containers(&pod), "{values}");
        }
    }
}

/// Injects a sidecar into a pod of Deployment `web`, as the chart's values configure it.
fn inject(values: &str, mut manifest: Value) -> Pod {
    let pod: Pod = serde_json::from_value(manifest.clone()).unwrap();
    let config = injection::Config {
        values: Values::from_yaml(values).unwrap(),
        control_plane_namespace: "linkerd".to_owned(),
        origin: InjectionOrigin::CommandLine,
    };
    let subject = InjectionTarget {
        pointer: &[],
        metadata: Some(&pod.metadata),
        spec: pod.spec.as_ref().unwrap(),
        namespace: "shop",
        namespace_annotations: &BTreeMap::new(),
        owner: Some(PodOwner {
            kind: "deployment".to_owned(),
            name: "web".to_owned(),
        }),
    };
    let outcome = injection::inject_pod(&config, &subject);
    assert!(matches!(outcome.decision, Decision::Inject(_)), "{values}: {outcome:?}");
    json_patch::patch(&mut manifest, &outcome.patch).unwrap();
    serde_json::from_value(manifest).unwrap()
}

#[tokio::test]
async fn invalid_reviews_are_refused_without_side_effects() {
    let server = ApiServer::start().await.unwrap();
    server.create_namespace("shop").await.unwrap();
    let (signal, drain) = drain::channel();
    let injector = open_injector(&server, drain).await;
    let review = |namespace: &str, object: Value| {
        let request = json!({
            "uid": "1", "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"}, "operation": "CREATE",
            "userInfo": {}, "namespace": namespace, "object": object,
        });
        injector.review(serde_json::from_value(request).unwrap())
    };
    let pod = |annotations: Value, spec: Value| json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "annotations": annotations}, "spec": spec});
    let spec = json!({"containers": [{"name": "app", "image": "app"}]});
    let enabled = json!({"linkerd.io/inject": "enabled"});
    for (namespace, object, reason) in [
        ("shop", Value::Null, "no object"),
        ("", pod(enabled.clone(), spec.clone()), "no namespace"),
        ("nowhere", pod(enabled.clone(), spec.clone()), "namespace nowhere"),
        (
            "shop",
            pod(enabled.clone(), json!({"containers": "none"})),
            "spec cannot be read",
        ),
        (
            "shop",
            pod(enabled.clone(), json!({"containers": [{"name": 5}]})),
            "spec cannot be read",
        ),
        ("shop", pod(enabled.clone(), json!(17)), "spec cannot be read"),
    ] {
        let refused = review(namespace, object).await.unwrap_err();
        assert!(refused.to_string().contains(reason), "{reason}: {refused}");
        // The next review is answered normally.
        let answer = review("shop", pod(enabled.clone(), spec.clone())).await.unwrap();
        assert_eq!((answer.denial_reason(), answer.warnings().len()), (None, 0));
    }
    // Pods of these namespaces are needed to repair the mesh itself.
    for namespace in ["linkerd", "kube-system"] {
        let answer = review(namespace, pod(enabled.clone(), json!(17))).await.unwrap();
        assert_eq!(answer.denial_reason(), None);
        assert!(answer.warnings()[0].contains("spec cannot be read"), "{answer:?}");
    }
    let as_proxy = json!({"containers": [{"name": "app", "image": "app", "securityContext": {"runAsUser": 2102}}]});
    for (namespace, is_refused) in [("shop", true), ("kube-system", false)] {
        let answer = review(namespace, pod(enabled.clone(), as_proxy.clone())).await.unwrap();
        assert_eq!(answer.denial_reason().is_some(), is_refused, "{answer:?}");
        let message = answer
            .denial_reason()
            .or_else(|| answer.warnings().first().map(String::as_str))
            .unwrap();
        assert!(message.contains("runs as user 2102"), "{message}");
    }
    let huge = json!({"linkerd.io/inject": "enabled", "config.linkerd.io/proxy-log-level": "x".repeat(5 << 20)});
    let answer = review("shop", pod(huge, spec.clone())).await.unwrap();
    assert_eq!(answer.denial_reason(), None);
    drop(signal);
}

async fn open_injector(server: &ApiServer, drain: drain::Watch) -> Injector {
    let registry = Registry::new();
    let config = injector_webhook::Config {
        files: files(server),
        audit: audit::Config {
            interval: std::time::Duration::from_secs(60),
        },
    };
    let parts = injector_webhook::open(config, &server.client(), EventRecorder::default(), &registry)
        .await
        .unwrap();
    let latch = Readiness::new().latch("caches");
    tokio::spawn(parts.watches.run(latch, drain));
    parts.injector
}

fn files(server: &ApiServer) -> config_reload::Files {
    let dir = server.dir().join("config");
    fs::create_dir_all(&dir).unwrap();
    let values = dir.join("values");
    fs::write(&values, "{linkerdVersion: edge-1, identityTrustAnchorsPEM: anchors}").unwrap();
    config_reload::Files {
        values,
        trust_anchors: dir.join("none"),
        control_plane_namespace: "linkerd".to_owned(),
    }
}

impl InjectorFixture {
    async fn start(controllers: Controllers) -> Self {
        let options = Options {
            controllers,
            ..Options::default()
        };
        let server = ApiServer::start_with(options).await.unwrap();
        for namespace in ["linkerd", "shop"] {
            server.create_namespace(namespace).await.unwrap();
        }
        let annotate = ["annotate", "ns", "shop", "linkerd.io/inject=enabled"];
        server.kubectl(&annotate).await.unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let injector = run_injector(&server, any).await;
        let (webhook, admin) = (
            injector.addrs().proxy_injector.unwrap(),
            injector.addrs().proxy_injector_admin.unwrap(),
        );
        let mut fixture = Self {
            server,
            injector: Some(injector),
            webhook,
            admin,
        };
        fixture.register().await;
        fixture
    }

    /// Registers the injector as a webhook, and waits until the API server calls it.
    async fn register(&mut self) {
        // A Service of this type is dialled by its name, without pods or a cluster network.
        let service = json!({"type": "ExternalName", "externalName": "localhost"});
        self.create_in(
            "linkerd",
            ("v1", "Service"),
            "linkerd-proxy-injector",
            &json!({"spec": service}),
        )
        .await;
        let port = self.webhook.port();
        let webhook = json!({
            "name": "linkerd-proxy-injector.linkerd.io",
            "clientConfig": {"service": {"name": "linkerd-proxy-injector", "namespace": "linkerd", "path": "/", "port": port}},
            "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods", "services"], "scope": "Namespaced"}],
            "namespaceSelector": {"matchExpressions": [
                {"key": "config.linkerd.io/admission-webhooks", "operator": "NotIn", "values": ["disabled"]},
                {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", "cert-manager"]},
            ]},
            "objectSelector": {"matchExpressions": [
                {"key": "linkerd.io/control-plane-component", "operator": "DoesNotExist"},
                {"key": "linkerd.io/cni-resource", "operator": "DoesNotExist"},
            ]},
            "failurePolicy": "Ignore", "sideEffects": "None", "admissionReviewVersions": ["v1", "v1beta1"], "timeoutSeconds": 10,
        });
        let body = json!({"webhooks": [webhook]});
        let (api, kind) = ("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration");
        self.create_in("", (api, kind), "linkerd-proxy-injector-webhook-config", &body)
            .await;
        self.wait_until_injecting().await;
    }

    /// Waits until a new pod gets a sidecar.
    async fn wait_until_injecting(&self) {
        let spec = json!({"containers": [{"name": "app", "image": "app:1"}]});
        let mut pod: Pod = serde_json::from_value(json!({"metadata": {"name": "probe"}, "spec": spec})).unwrap();
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        pod.metadata.namespace = Some("shop".to_owned());
        eventually("the API server calls the injector", async || {
            let stored = self.pods("shop").create(&dry_run, &pod).await.unwrap();
            stored.spec.unwrap().init_containers.map(drop)
        })
        .await;
    }

    /// Stops the injector like SIGKILL: its sockets close without a drain.
    fn kill(&mut self) {
        drop(self.injector.take());
    }

    async fn restart(&mut self) {
        let injector = run_injector(&self.server, self.webhook).await;
        self.admin = injector.addrs().proxy_injector_admin.unwrap();
        self.injector = Some(injector);
        self.wait_until_injecting().await;
    }

    /// The findings of the latest audit; waits for the first.
    async fn audit_findings(&self) -> BTreeSet<(String, String)> {
        let report: Value = eventually("an audit", async || {
            let report: Value = serde_json::from_str(&self.admin("/injection-audit").await).unwrap();
            report["auditedAt"].is_string().then_some(report)
        })
        .await;
        let missing = report["uninjectedPods"].as_array().unwrap().iter();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        missing
            .map(|pod| (text(&pod["namespace"]), text(&pod["name"])))
            .collect()
    }

    async fn admin(&self, path: &str) -> String {
        client::get(TcpStream::connect(self.admin).await.unwrap(), path)
            .await
            .text()
    }

    /// Waits for an event about an object, and returns its note.
    async fn event(&self, namespace: &str, kind: &str, name: &str, reason: &str) -> String {
        let events = Api::<Event>::namespaced(self.server.client(), namespace);
        eventually(&format!("{reason} on {kind} {name}"), async || {
            let all = events.list(&ListParams::default()).await.unwrap();
            let found = all.into_iter().find(|event| {
                let about = event.regarding.as_ref().unwrap();
                about.kind.as_deref() == Some(kind)
                    && about.name.as_deref() == Some(name)
                    && event.reason.as_deref() == Some(reason)
            });
            found.and_then(|event| event.note)
        })
        .await
    }

    async fn create_all(&self, pods: Vec<(&'static str, String, Value)>, spec: &Value) {
        self.create_in_background(pods, spec).0.join_all().await;
    }

    /// Creates pods, eight at a time. Returns the tasks and the number of pods created so far.
    fn create_in_background(
        &self,
        pods: Vec<(&'static str, String, Value)>,
        spec: &Value,
    ) -> (JoinSet<()>, Arc<AtomicUsize>) {
        let (mut tasks, n_created) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
        for part in pods.chunks(pods.len().div_ceil(8)) {
            let (part, client, spec, n_created) =
                (part.to_vec(), self.server.client(), spec.clone(), n_created.clone());
            tasks.spawn(async move {
                for (namespace, name, annotations) in part {
                    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
                    pods.create(&PostParams::default(), &pod_with(&name, &annotations, &spec))
                        .await
                        .unwrap();
                    n_created.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        (tasks, n_created)
    }

    async fn create_pod(&self, namespace: &str, name: &str, annotations: &Value, spec: &Value) -> kube::Result<Pod> {
        self.pods(namespace)
            .create(&PostParams::default(), &pod_with(name, annotations, spec))
            .await
    }

    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.server.client(), namespace)
    }

    async fn create(&self, api_version: &str, kind: &str, name: &str, spec: &Value) {
        self.create_in("shop", (api_version, kind), name, &json!({"spec": spec}))
            .await;
    }

    async fn create_in(&self, namespace: &str, (api_version, kind): (&str, &str), name: &str, body: &Value) {
        let mut object = body.clone();
        object["apiVersion"] = api_version.into();
        object["kind"] = kind.into();
        object["metadata"] = match namespace {
            "" => json!({"name": name}),
            namespace => json!({"name": name, "namespace": namespace}),
        };
        let path = self.server.dir().join("manifest.json");
        fs::write(&path, object.to_string()).unwrap();
        self.server
            .kubectl(&["create", "-f", path.to_str().unwrap()])
            .await
            .unwrap();
    }
}

fn pod_with(name: &str, annotations: &Value, spec: &Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": name, "annotations": annotations}, "spec": spec})).unwrap()
}

async fn run_injector(server: &ApiServer, webhook: SocketAddr) -> App {
    let files = files(server);
    let line = format!(
        "tulle-control proxy-injector -kubeconfig {} -values {} -trust-anchors {} -linkerd-namespace linkerd \
         -addr {webhook} -metrics-addr 127.0.0.1:0 -audit-interval 1s",
        server.kubeconfig().display(),
        files.values.display(),
        files.trust_anchors.display(),
    );
    let command = Command::parse_from_line(line.split_whitespace().map(Into::into)).unwrap();
    App::build(Config::from_command(&command).unwrap()).await.unwrap()
}
