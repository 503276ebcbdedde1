//! Alerts and dashboards: how the chart renders them, and how Prometheus evaluates the alerts.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;
use tulle_tests::charts::{Helm, chart_path};
use tulle_tests::programs;

use crate::render::{REQUIRED_VALUES, objects};

/// The objects of these templates, by name.
fn render(templates: &[&str], values: &[&str]) -> BTreeMap<String, Value> {
    let shown: Vec<String> = templates
        .iter()
        .map(|name| format!("--show-only=templates/{name}.yaml"))
        .collect();
    let enabled = ["--set=prometheusRule.enabled=true,dashboards.enabled=true"];
    let mut args = [REQUIRED_VALUES, &enabled, values].concat();
    args.extend(shown.iter().map(String::as_str));
    let rendered = Helm::new().unwrap().template("tulle-control-plane", &args).unwrap();
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    objects(&rendered)
        .into_iter()
        .map(|object| (name(&object), object))
        .collect()
}

/// The PrometheusRule that the chart renders with these values.
fn prometheus_rule(values: &[&str]) -> Value {
    let mut rendered = render(&["prometheusrule"], values);
    assert_eq!(rendered.len(), 1);
    rendered.pop_first().unwrap().1
}

/// The alerts of a PrometheusRule by name.
fn alerts(rule: &Value) -> BTreeMap<&str, &Value> {
    let groups = rule["spec"]["groups"].as_array().unwrap().iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().unwrap());
    rules.map(|alert| (alert["alert"].as_str().unwrap(), alert)).collect()
}

/// The test files for `promtool test rules`.
fn test_files() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/charts/alerts");
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> = files
        .filter(|path| path.extension() == Some(OsStr::new("yaml")))
        .collect();
    files.sort();
    files
}

fn promtool(dir: &TempDir, args: &[&str]) {
    let mut command = Command::new(programs::find("promtool").unwrap());
    let output = command.current_dir(dir.path()).args(args).output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success(),
        "promtool {}:\n{}",
        args.join(" "),
        String::from_utf8_lossy(&printed)
    );
}

#[test]
fn alerts_are_valid_and_pass_their_rule_tests() {
    let dir = tempfile::tempdir().unwrap();
    let rules = serde_yaml_ng::to_string(&prometheus_rule(&[])["spec"]).unwrap();
    fs::write(dir.path().join("rules.yaml"), rules).unwrap();
    promtool(&dir, &["check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"]);
    let files = test_files();
    let names = files.iter().map(|path| path.file_name().unwrap().to_str().unwrap());
    let names: Vec<&str> = names.collect();
    for (path, name) in files.iter().zip(&names) {
        fs::copy(path, dir.path().join(name)).unwrap();
    }
    promtool(&dir, &[&["test", "rules"], &names[..]].concat());
}

#[test]
fn each_alert_has_a_test_that_fires_and_one_that_does_not() {
    let (mut fired, mut silent) = (BTreeSet::new(), BTreeSet::new());
    for path in test_files() {
        let text = fs::read_to_string(path).unwrap();
        let file: Value = serde_yaml_ng::from_str(&text).unwrap();
        for test in file["tests"].as_array().unwrap() {
            let cases = test["alert_rule_test"].as_array().unwrap();
            let fires = |case: &Value| case["exp_alerts"].as_array().is_some_and(|alerts| !alerts.is_empty());
            let seen = if cases.iter().any(fires) {
                &mut fired
            } else {
                &mut silent
            };
            seen.extend(cases.iter().map(|case| case["alertname"].as_str().unwrap().to_owned()));
        }
    }
    let rule = prometheus_rule(&[]);
    let names: BTreeSet<String> = alerts(&rule).into_keys().map(str::to_owned).collect();
    assert!(names.len() > 30, "{names:?}");
    assert_eq!(fired, names, "the alerts with a test that fires");
    assert_eq!(silent, names, "the alerts with a test that does not fire");
}

#[test]
fn each_runbook_annotation_leads_to_the_section_of_its_alert() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/alerts.md")).unwrap();
    let headings: BTreeSet<&str> = page.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let rule = prometheus_rule(&[]);
    let alerts = alerts(&rule);
    for (name, alert) in &alerts {
        let url = alert["annotations"]["runbook_url"].as_str().unwrap();
        let expected = format!("/docs/reference/alerts.md#{}", name.to_ascii_lowercase());
        assert!(url.ends_with(&expected), "{name}: {url}");
        for annotation in ["summary", "description"] {
            assert!(
                alert["annotations"][annotation].is_string(),
                "{name} has no {annotation}"
            );
        }
        let severity = alert["labels"]["severity"].as_str().unwrap();
        assert!(
            ["critical", "warning", "info"].contains(&severity),
            "{name}: {severity}"
        );
    }
    assert_eq!(headings, alerts.into_keys().collect());
}

#[test]
fn the_schema_has_the_alerts_and_their_thresholds() {
    let schema = fs::read_to_string(format!("{}/values.schema.json", chart_path("tulle-control-plane"))).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let alerts_schema = &schema["properties"]["prometheusRule"]["properties"]["alerts"]["properties"];
    let permits_threshold: BTreeMap<&str, bool> = alerts_schema
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, alert)| (name.as_str(), alert["$ref"] == "#/definitions/alert"))
        .collect();
    let text = fs::read_to_string(format!("{}/files/alerts.yaml", chart_path("tulle-control-plane"))).unwrap();
    let file: Value = serde_yaml_ng::from_str(&text).unwrap();
    let file = json!({ "spec": file });
    let alerts = alerts(&file);
    let with_threshold = alerts.iter().map(|(name, alert)| {
        let used = alert["expr"].as_str().unwrap().contains("$threshold");
        assert_eq!(used, alert.get("threshold").is_some(), "{name}");
        (*name, used)
    });
    assert_eq!(permits_threshold, with_threshold.collect());
}

#[test]
fn alerts_can_be_changed_one_by_one_and_all_together() {
    let values = [
        "--set=prometheusRule.namespace=monitoring,prometheusRule.labels.release=prometheus,prometheusRule.annotations.a=b",
        "--set=prometheusRule.alertLabels.team=mesh,prometheusRule.alertAnnotations.chat=#mesh",
        "--set=prometheusRule.runbookURL=https://wiki/alerts,prometheusRule.controllerJob=mesh",
        "--set=prometheusRule.alerts.TulleIssuerExpiresSoon.threshold=0",
        "--set=prometheusRule.alerts.TulleIssuerExpiresSoon.for=1h",
        "--set=prometheusRule.alerts.TulleIssuerExpiresSoon.labels.severity=page",
        "--set=prometheusRule.alerts.TulleIssuerExpiresSoon.annotations.summary=Renew it.",
        "--set=prometheusRule.alerts.TulleBreakerOpen.enabled=false",
    ];
    let before = prometheus_rule(&[]);
    let after = prometheus_rule(&values);
    assert_eq!(after["metadata"]["namespace"], "monitoring");
    assert_eq!(after["metadata"]["labels"]["release"], "prometheus");
    assert_eq!(after["metadata"]["annotations"]["a"], "b");
    let (before, after) = (alerts(&before), alerts(&after));
    assert!(before.contains_key("TulleBreakerOpen"));
    assert_eq!(after.len(), before.len() - 1);
    assert!(!after.contains_key("TulleBreakerOpen"));
    let changed = after["TulleIssuerExpiresSoon"];
    assert_eq!(
        changed["expr"],
        "min(issuer_cert_ttl_seconds{job=\"mesh\"}) < 0 * 86400"
    );
    assert_eq!(changed["for"], "1h");
    assert_eq!(changed["labels"], json!({"severity": "page", "team": "mesh"}));
    assert_eq!(changed["annotations"]["summary"], "Renew it.");
    for (name, alert) in after {
        assert_eq!(alert["labels"]["team"], "mesh", "{name}");
        assert_eq!(alert["annotations"]["chat"], "#mesh", "{name}");
        let url = format!("https://wiki/alerts#{}", name.to_ascii_lowercase());
        assert_eq!(alert["annotations"]["runbook_url"], url.as_str());
    }
    let refused = |value: &str| {
        let value = format!("--set=prometheusRule.alerts.{value}");
        let rendered = Helm::new()
            .unwrap()
            .template("tulle-control-plane", &[REQUIRED_VALUES, &[value.as_str()]].concat());
        rendered.unwrap_err().to_string()
    };
    assert!(refused("TulleBreakersOpen.enabled=false").contains("'TulleBreakersOpen' not allowed"));
    // A threshold that would have no effect.
    let refusal = refused("TulleControlPlaneDown.threshold=1");
    assert!(
        refusal.contains("/TulleControlPlaneDown") && refusal.contains("'threshold' not allowed"),
        "{refusal}"
    );
}

#[test]
fn alerts_use_only_metrics_that_tulle_exports() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut source = String::new();
    for dir in ["proxy/src", "control/src", "core/src"] {
        append_rust_files(&root.join(dir), &mut source);
    }
    let rule = prometheus_rule(&[]);
    let mut queried = BTreeSet::new();
    for alert in alerts(&rule).into_values() {
        queried.extend(metrics(alert["expr"].as_str().unwrap()));
    }
    assert!(queried.len() > 20, "{queried:?}");
    queried.retain(|name| name != "up");
    // Names of balancer metrics are composed in the source, so only the part after `_balancer_` is searched.
    let missing = queried.iter().filter(|name| {
        let name = name.rsplit_once("_balancer_").map_or(name.as_str(), |(_, name)| name);
        !source.contains(&format!("\"{name}\"")) && !source.contains(&format!("# TYPE {name} "))
    });
    let missing: Vec<_> = missing.collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The metrics of a query: words that are not functions, labels or keywords.
fn metrics(expr: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    // Quoted text has metric names only for `__name__`, which the alerts use for metrics of balancers.
    for (n, part) in expr.split('"').enumerate() {
        let is_quoted = n % 2 == 1;
        for word in part.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
            let is_metric = word == "up" || word.contains('_') && !word.starts_with('_');
            if is_metric && !is_quoted && !NON_METRIC_WORDS.contains(&word) {
                found.insert(word.to_owned());
            }
        }
        if is_quoted && (part.ends_with("_balancer_p2c_endpoints") || part.ends_with("_balancer_endpoints")) {
            found.insert(part.to_owned());
        }
    }
    found
}

/// Appends the content of all Rust files below a directory.
fn append_rust_files(dir: &Path, text: &mut String) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            append_rust_files(&path, text);
        } else if path.extension() == Some(OsStr::new("rs")) {
            text.push_str(&fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn dashboards_are_config_maps_that_grafana_s_sidecar_finds() {
    let dir = format!("{}/files/dashboards", chart_path("tulle-control-plane"));
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    let files: Vec<PathBuf> = files.collect();
    let check = |values: &[&str], namespace: &str, labels: &Value, annotation: Option<&str>| {
        let maps = render(&["dashboards"], values);
        assert_eq!(maps.len(), files.len());
        for file in &files {
            let stem = file.file_stem().unwrap().to_str().unwrap();
            let map = &maps[&format!("tulle-dashboard-{stem}")];
            assert_eq!(map["kind"], "ConfigMap");
            assert_eq!(map["metadata"]["namespace"], namespace);
            assert_eq!(&map["metadata"]["labels"], labels);
            assert_eq!(map["metadata"]["annotations"]["grafana_folder"].as_str(), annotation);
            let data = map["data"].as_object().unwrap();
            let shown: Value = serde_json::from_str(data[&format!("tulle-{stem}.json")].as_str().unwrap()).unwrap();
            let ours: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
            assert_eq!((data.len(), shown), (1, ours));
        }
    };
    let labels = json!({"linkerd.io/control-plane-ns": "linkerd", "grafana_dashboard": "1"});
    check(&[], "linkerd", &labels, None);
    let values = [
        "--set=dashboards.namespace=monitoring,dashboards.label=dashboard,dashboards.labelValue=mesh,dashboards.labels.a=b",
        "--set=dashboards.annotations.grafana_folder=tulle",
    ];
    let labels = json!({"linkerd.io/control-plane-ns": "linkerd", "dashboard": "mesh", "a": "b"});
    check(&values, "monitoring", &labels, Some("tulle"));
}

#[test]
fn objects_for_prometheus_and_grafana_are_opt_in() {
    let rendered = Helm::new()
        .unwrap()
        .template("tulle-control-plane", REQUIRED_VALUES)
        .unwrap();
    for object in objects(&rendered) {
        assert_ne!(object["kind"], "PrometheusRule");
        let name = object["metadata"]["name"].as_str().unwrap();
        assert!(!name.starts_with("tulle-dashboard"), "{name}");
    }
}

/// Words with an underscore in the queries of alerts that are functions or labels, not metrics.
const NON_METRIC_WORDS: &[&str] = &[
    "label_replace",
    "max_over_time",
    "exported_namespace",
    "endpoint_state",
    "srv_kind",
    "srv_name",
    "backend_namespace",
    "backend_name",
    "backend_port",
];
