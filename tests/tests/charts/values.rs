//! The values of Linkerd's charts: which are accepted, which defaults differ, and which are named as without effect.

use std::collections::BTreeMap;
use std::fs;

use serde::Deserialize as _;
use serde_json::{Map, Value, json};
use tulle_tests::charts::{Helm, chart_path};
use tulle_tests::cluster::ApiServer;

use crate::render::REQUIRED_VALUES;

/// Values by path, such as `proxy.ports.admin`.
type Values = BTreeMap<String, Value>;

#[test]
fn every_value_of_linkerds_chart_is_accepted() {
    let [defaults, others] = linkerd_values();
    for (name, values) in [("defaults", defaults), ("values without a default", others)] {
        let dir = tempfile::tempdir().unwrap();
        let file = write(&dir, &values);
        let rendered = Helm::new()
            .unwrap()
            .template("tulle-control-plane", &[&[file.as_str()][..], REQUIRED_VALUES].concat());
        rendered.unwrap_or_else(|err| panic!("{name}: {err:#}"));
    }
}

#[test]
fn every_value_of_linkerds_multicluster_chart_is_accepted_or_refused_with_the_reason() {
    let helm = Helm::new().unwrap();
    let render = |values: &Values| {
        let dir = tempfile::tempdir().unwrap();
        helm.template("tulle-multicluster", &[write(&dir, values).as_str()])
    };
    let refused = |path: &str| path == "createNamespaceMetadataJob" || path.starts_with("namespaceMetadata.");
    let documents = linkerd_multicluster_values();
    for (name, values) in [("defaults", &documents[0]), ("values without a default", &documents[1])] {
        let mut values = values.clone();
        values.retain(|path, _| !refused(path));
        render(&values).unwrap_or_else(|err| panic!("{name}: {err:#}"));
    }
    for (path, value) in documents[0].iter().filter(|(path, _)| refused(path)) {
        let refusal = render(&Values::from([(path.clone(), value.clone())])).unwrap_err();
        let refusal = refusal.to_string();
        // This is not the refusal of the schema, which has the value.
        let expected = "createNamespaceMetadataJob and namespaceMetadata are not supported: remove them";
        assert!(refusal.contains(expected), "{path}: {refusal}");
    }
}

#[test]
fn defaults_are_those_of_linkerd_except_documented_ones() {
    let [control_plane, _] = linkerd_values();
    check_defaults("tulle-control-plane", &control_plane, &DIFFERENT_DEFAULTS);
    let [multicluster, _] = linkerd_multicluster_values();
    check_defaults("tulle-multicluster", &multicluster, &DIFFERENT_MULTICLUSTER_DEFAULTS);
}

/// Checks that the defaults of a chart are these, except the different ones.
fn check_defaults(chart: &str, linkerd_defaults: &Values, different: &[&str]) {
    let values = fs::read_to_string(format!("{}/values.yaml", chart_path(chart))).unwrap();
    let values: Value = serde_yaml_ng::from_str(&values).unwrap();
    for (path, linkerd_default) in linkerd_defaults {
        let default = path.split('.').fold(&values, |within, name| &within[name]);
        let differs = default != linkerd_default && !(is_empty(default) && is_empty(linkerd_default));
        assert_eq!(
            differs,
            different.contains(&path.as_str()),
            "{chart}: {path}: {default}, in Linkerd {linkerd_default}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn values_without_effect_are_named_after_an_installation() {
    // Helm queries the version of the API server before it renders notes, and nothing else.
    let server = ApiServer::start().await.unwrap();
    let helm = Helm::with_kubeconfig(server.kubeconfig()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let listed = |values: &Values| {
        let file = write(&dir, values);
        let chart = chart_path("tulle-control-plane");
        let fixed = ["install", "tulle", &chart, "--dry-run=client", "--hide-secret", &file];
        let notes = helm.run(&[&fixed[..], REQUIRED_VALUES].concat()).unwrap();
        let (_, lines) = notes.split_once("Values without effect:").unwrap_or_default();
        let names = lines.lines().filter_map(|line| line.trim().split_once(": "));
        names.map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(listed(&Values::new()), [""; 0]);
    let [mut defaults, _] = linkerd_values();
    assert_eq!(listed(&defaults), ["disableHeartBeat"]);

    let unused: Values = UNUSED
        .iter()
        .map(|(path, value)| ((*path).to_owned(), serde_yaml_ng::from_str(value).unwrap()))
        .collect();
    let mut set = unused.clone();
    let collector =
        json!({"endpoint": "collector:4317", "meshIdentity": {"serviceAccountName": "a", "namespace": "b"}});
    set.insert("proxy.tracing.collector".to_owned(), collector);
    // Parameters of HTTP/2 that the proxy reads.
    for direction in ["inbound", "outbound"] {
        let path = format!("proxy.{direction}.server.http2.maxPendingAcceptResetStreams");
        set.insert(path, json!(20));
    }
    let mut names = listed(&set);
    names.sort();
    assert_eq!(names, unused.keys().cloned().collect::<Vec<_>>());
    // A value with an effect is not listed even if it is set.
    defaults.insert("kubeAPI.clientQPS".to_owned(), json!(50));
    defaults.insert("disableHeartBeat".to_owned(), json!(true));
    assert_eq!(listed(&defaults), [""; 0]);

    let text = fs::read_to_string(format!("{}/values.yaml", chart_path("tulle-control-plane"))).unwrap();
    for path in documented_as_unused(&text) {
        assert!(unused.contains_key(&path), "the notes do not know {path}");
    }
}

/// The paths below comments that start with `Not used`.
fn documented_as_unused(text: &str) -> Vec<String> {
    let mut within: Vec<(usize, &str)> = Vec::new();
    let mut found = Vec::new();
    let mut is_unused = false;
    for line in text.lines() {
        let (key, indent) = (line.trim_start(), line.len() - line.trim_start().len());
        if key.starts_with('#') {
            is_unused = key.starts_with("# Not used");
            continue;
        }
        let Some((name, _)) = key.split_once(':') else { continue };
        within.retain(|(outer, _)| *outer < indent);
        within.push((indent, name));
        if std::mem::take(&mut is_unused) {
            found.push(within.iter().map(|(_, name)| *name).collect::<Vec<_>>().join("."));
        }
    }
    assert!(found.len() > 10, "{found:?}");
    found
}

/// The values of Linkerd's chart for the control plane: those with a default, and others.
fn linkerd_values() -> [Values; 2] {
    parse(include_str!("linkerd_values.yaml"))
}

/// The values of Linkerd's chart for the multicluster extension: those with a default, and others.
fn linkerd_multicluster_values() -> [Values; 2] {
    parse(include_str!("linkerd_multicluster_values.yaml"))
}

fn parse(text: &str) -> [Values; 2] {
    let documents = serde_yaml_ng::Deserializer::from_str(text);
    let values: Vec<Values> = documents
        .map(|document| Values::deserialize(document).unwrap())
        .collect();
    values.try_into().unwrap()
}

/// Writes a values file and returns its path as an argument for Helm.
fn write(dir: &tempfile::TempDir, values: &Values) -> String {
    let mut nested = Map::new();
    for (path, value) in values {
        let (outer, name) = path.rsplit_once('.').unwrap_or(("", path));
        let mut within = &mut nested;
        for part in outer.split('.').filter(|part| !part.is_empty()) {
            let entry = within.entry(part).or_insert_with(|| json!({}));
            within = entry
                .as_object_mut()
                .unwrap_or_else(|| panic!("{path} is inside another value"));
        }
        within.insert(name.to_owned(), value.clone());
    }
    let file = dir.path().join("values.json");
    fs::write(&file, Value::Object(nested).to_string()).unwrap();
    format!("--values={}", file.display())
}

/// Charts write an empty value in several ways.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// Defaults that differ from Linkerd's.
const DIFFERENT_DEFAULTS: [&str; 13] = [
    "controllerImage",
    "proxy.image.name",
    // tulle has no debug container.
    "debugContainer.image.name",
    // tulle reports nothing.
    "disableHeartBeat",
    // Defaults to the setting of kubeAPI.
    "identity.kubeAPI.clientQPS",
    "identity.kubeAPI.clientBurst",
    // There is no linkerd-viz.
    "podMonitor.controller.namespaceSelector",
    // The proxy is probed immediately, because clients wait for the pod to be ready.
    "proxy.readinessProbe.initialDelaySeconds",
    // The injector sets these without a value.
    "networkValidator.securityContext",
    "proxy.tracing.labels",
    // No port bypasses policies unless it is skipped explicitly: 4567 and 4568 (Galera) are opaque instead.
    "proxyInit.ignoreInboundPorts",
    "proxyInit.ignoreOutboundPorts",
    "proxy.opaquePorts",
];

/// Defaults of the chart for the multicluster extension that differ from Linkerd's.
const DIFFERENT_MULTICLUSTER_DEFAULTS: [&str; 8] = [
    "controllerDefaults.image.name",
    "localServiceMirror.image.name",
    // That of the control plane, which Helm reads in the cluster.
    "identityTrustDomain",
    // No image sets the labels of the namespace.
    "createNamespaceMetadataJob",
    "namespaceMetadata.image.name",
    "namespaceMetadata.image.pullPolicy",
    "namespaceMetadata.image.registry",
    "namespaceMetadata.image.tag",
];

/// Every value without effect, and an example of a setting of it.
const UNUSED: [(&str, &str); 36] = [
    ("configs", "{global: a}"),
    ("controller.tracing", "{enabled: true}"),
    ("controllerResources", "{cpu: {request: 100m}}"),
    ("destinationProxyResources", "{cpu: {request: 100m}}"),
    ("disableHeartBeat", "false"),
    ("enablePSP", "true"),
    ("enablePprof", "true"),
    ("heartbeat", "{additionalEnv: [{name: A, value: b}]}"),
    ("heartbeatResources", "{cpu: {request: 100m}}"),
    ("heartbeatSchedule", "0 0 * * *"),
    ("identityProxyResources", "{cpu: {request: 100m}}"),
    ("image", "{version: a}"),
    ("networkValidator.enableSecurityContext", "false"),
    ("partials", "{a: b}"),
    ("podMonitor.serviceMirror", "{enabled: false}"),
    ("policyController.livenessProbe", "{timeoutSeconds: 2}"),
    ("policyController.readinessProbe", "{timeoutSeconds: 2}"),
    ("policyController.resources", "{cpu: {request: 100m}}"),
    ("prometheusUrl", "http://prometheus"),
    ("proxy.inbound.server.http2.adaptiveFlowControl", "true"),
    ("proxy.loadTrustBundleFromConfigMap", "true"),
    ("proxy.outbound.server.http2.adaptiveFlowControl", "true"),
    ("proxy.podInboundPorts", "'80'"),
    ("proxy.requireTLSOnInboundPorts", "'80'"),
    ("proxy.saMountPath", "{name: token}"),
    ("proxy.tracing.protocol", "opencensus"),
    ("proxyContainerName", "linkerd-proxy"),
    ("proxyInit.capabilities", "{add: [SYS_ADMIN]}"),
    ("proxyInit.kubeAPIServerPorts", "'443'"),
    ("proxyInit.resources", "{cpu: {request: 100m}}"),
    ("proxyInit.saMountPath", "{name: token}"),
    ("proxyInjectorProxyResources", "{cpu: {request: 100m}}"),
    ("spValidator.livenessProbe", "{timeoutSeconds: 2}"),
    ("spValidator.readinessProbe", "{timeoutSeconds: 2}"),
    ("spValidatorResources", "{cpu: {request: 100m}}"),
    ("stage", "control-plane"),
];
