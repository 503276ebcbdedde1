//! The metrics that the proxy and the control plane register at start, on a real API server.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::thread;

use tulle_control::cmd::Command;
use tulle_control::config::Config;
use tulle_core::metrics::Description;
use tulle_proxy::app::{App, ProcessContext};
use tulle_proxy::env;
use tulle_tests::charts::install_custom_resources;
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;

use super::{check_page, heading, root, rust_files, table};

#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_the_proxy_and_of_the_control_plane() {
    let server = ApiServer::start().await.unwrap();
    install_custom_resources(&server).await.unwrap();
    server.create_namespace("linkerd").await.unwrap();
    let control_plane = control_plane_metrics(&server).await;
    // On its own thread, because a proxy owns runtimes, which must not be dropped inside another runtime.
    let proxy = thread::scope(|scope| scope.spawn(|| proxy_metrics(&server)).join()).unwrap();
    let mut page = heading(
        "Metrics",
        "the metrics that each program registers",
        "All metrics are in the Prometheus text format, at `/metrics` of the admin port: 4191 for proxies, 9990 and up for the control \
         plane. A metric without series is not shown. Times are in seconds, those of metrics named `…_ms` in milliseconds; sizes are in bytes.",
    );
    for (title, metrics) in [("Proxy", &proxy), ("Control plane", &control_plane)] {
        let rows = metrics
            .iter()
            .map(|metric| [format!("`{}`", metric.name), metric.kind.clone(), metric.help.clone()]);
        page += &format!("## {title}\n\n{}\n", table(["Metric", "Type", "Meaning"], rows));
    }
    assert_eq!(undocumented(&page), BTreeSet::new());
    check_page("metrics.md", &page);
}

/// Free ports on loopback, so that the services do not collide with others.
const LOOPBACK: &str = "-destination-addr 127.0.0.1:0 -identity-addr 127.0.0.1:0 -grpc-addr 127.0.0.1:0 -server-addr \
    127.0.0.1:0 -sp-validator-addr 127.0.0.1:0 -telemetry-addr 127.0.0.1:0 -metrics-addr 127.0.0.1:0 -sp-validator-metrics-addr 127.0.0.1:0 \
    -admin-addr 127.0.0.1:0";

/// The metrics of all services of the control plane.
async fn control_plane_metrics(server: &ApiServer) -> BTreeSet<Description> {
    let dir = server.dir();
    let anchor = tulle_control::trust::create_anchor("root", tulle_control::trust::ANCHOR_LIFETIME).unwrap();
    let issuer = tulle_control::trust::create_issuer("issuer", tulle_control::trust::ISSUER_LIFETIME, &anchor).unwrap();
    anchor.write(&dir.join("ca.crt"), &dir.join("ca.key")).unwrap();
    fs::create_dir_all(dir.join("issuer")).unwrap();
    issuer
        .write(&dir.join("issuer/crt.pem"), &dir.join("issuer/key.pem"))
        .unwrap();
    fs::write(dir.join("values.yaml"), "{}").unwrap();
    fs::create_dir_all(dir.join("manifests")).unwrap();
    let mut metrics = BTreeSet::new();
    let kubeconfig = server.kubeconfig();
    let (kubeconfig, dir) = (kubeconfig.display(), dir.display());
    for (line, last) in [
        (
            format!(
                "destination policy sp-validator identity telemetry -kubeconfig {kubeconfig} -issuer {dir}/issuer {LOOPBACK}"
            ),
            // The source registers the kinds in their order, and this metric belongs to the last one.
            "serviceprofiles_informer_lag_seconds",
        ),
        (
            format!(
                "proxy-injector -kubeconfig {kubeconfig} -values {dir}/values.yaml -addr 127.0.0.1:0 -metrics-addr 127.0.0.1:0"
            ),
            "proxy_inject_admission_requests_total",
        ),
        (
            format!("service-mirror -kubeconfig {kubeconfig} -link-name east -metrics-addr 127.0.0.1:0"),
            "service_mirror_endpoint_repairs",
        ),
        (
            format!("destination -manifests {dir}/manifests {LOOPBACK}"),
            "manifest_errors",
        ),
    ] {
        let line = format!("tulle-control {line} -linkerd-namespace linkerd -trust-anchors {dir}/ca.crt");
        let command = Command::parse_from_line(line.split_whitespace().map(Into::into)).unwrap();
        let app = tulle_control::app::App::build(Config::from_command(&command).unwrap())
            .await
            .unwrap();
        // Tasks register metrics after the start.
        let registered = eventually(last, async || {
            let found = app.metrics().descriptions();
            found.iter().any(|metric| metric.name == last).then_some(found)
        });
        metrics.extend(registered.await);
    }
    metrics
}

/// The metrics of a proxy with all optional features.
fn proxy_metrics(server: &ApiServer) -> BTreeSet<Description> {
    let anchors = server.dir().join("ca.crt");
    let identity = "proxy.default.serviceaccount.identity.linkerd.cluster.local";
    let variables: BTreeMap<&str, &str> = [
        ("LINKERD2_PROXY_INBOUND_LISTEN_ADDR", "127.0.0.1:0"),
        ("LINKERD2_PROXY_OUTBOUND_LISTEN_ADDR", "127.0.0.1:0"),
        ("LINKERD2_PROXY_ADMIN_LISTEN_ADDR", "127.0.0.1:0"),
        ("LINKERD2_PROXY_CONTROL_LISTEN_ADDR", "127.0.0.1:0"),
        ("LINKERD2_PROXY_DESTINATION_SVC_ADDR", "localhost:8086"),
        ("LINKERD2_PROXY_POLICY_SVC_ADDR", "localhost:8090"),
        ("LINKERD2_PROXY_IDENTITY_SVC_ADDR", "localhost:8080"),
        ("LINKERD2_PROXY_POLICY_WORKLOAD", "{}"),
        ("LINKERD2_PROXY_IDENTITY_TOKEN_FILE", "token"),
        ("LINKERD2_PROXY_IDENTITY_LOCAL_NAME", identity),
        ("LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS", anchors.to_str().unwrap()),
        ("LINKERD2_PROXY_TAP_SVC_NAME", identity),
        ("LINKERD2_PROXY_ACCESS_LOG", "json"),
        ("LINKERD2_PROXY_TRACE_COLLECTOR_SVC_ADDR", "localhost:4317"),
        ("TULLE_PROXY_MEMORY_LIMIT", "1000000000"),
        ("TULLE_PROXY_PROBES", PROBES),
    ]
    .into();
    let config = env::load(|name| variables.get(name).map(|value| (*value).to_owned())).unwrap();
    let app = App::build(config, ProcessContext::with_redirect(None, BTreeMap::new())).unwrap();
    // The proxy registers these when it has started its runtimes.
    tulle_core::metrics::register_runtime_metrics(app.metrics(), Vec::new());
    app.metrics().descriptions().into_iter().collect()
}

const PROBES: &str =
    r#"[{"container":"app","probe":"readiness","port":80,"timeoutSeconds":1,"tcpSocket":{"port":80}}]"#;

/// Names in the source code that are not on the page.
fn undocumented(page: &str) -> BTreeSet<String> {
    let mut missing = BTreeSet::new();
    for crate_name in ["proxy", "control", "core"] {
        for file in rust_files(&root().join(crate_name).join("src")) {
            let text = fs::read_to_string(&file).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            for call in [".counter(", ".gauge(", ".seconds(", ".histogram("] {
                for arguments in code.split(call).skip(1) {
                    let name = arguments
                        .trim_start()
                        .strip_prefix('"')
                        .and_then(|rest| rest.split_once('"'));
                    if let Some((name, _)) = name.filter(|(name, _)| !page.contains(&format!("`{name}`"))) {
                        missing.insert(name.to_owned());
                    }
                }
            }
        }
    }
    missing
}

#[test]
fn a_longer_name_does_not_document_a_metric() {
    let missing = undocumented("`tcp_open_total` `outbound_tcp_close_total`");
    assert!(
        !missing.contains("tcp_open_total") && missing.contains("tcp_close_total"),
        "{missing:?}"
    );
}
