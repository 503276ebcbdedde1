//! The dashboards use only metrics that proxies export.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tulle_tests::apps;
use tulle_tests::client::{Http1, request};
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, UNMESHED_IP, mesh};

/// The metrics of a query: words before `{`, because every metric in the dashboards has a selector.
fn metrics(expr: &str) -> impl Iterator<Item = String> {
    let is_of_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let before = expr.match_indices('{').map(move |(at, _)| &expr[..at]);
    before.map(move |before| {
        let start = before.rfind(|c| !is_of_word(c)).map_or(0, |at| at + 1);
        before[start..].to_owned()
    })
}

/// Collects all queries of a dashboard.
fn queries(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("expr").and_then(Value::as_str).map(str::to_owned));
            fields.values().for_each(|value| queries(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| queries(value, found)),
        _ => {}
    }
}

#[test]
fn every_metric_of_the_dashboards_is_exported() {
    let mut queried = BTreeSet::new();
    let dashboards = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/tulle-control-plane/files/dashboards");
    for file in std::fs::read_dir(dashboards).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let text = std::fs::read_to_string(path).unwrap();
        let mut exprs = Vec::new();
        queries(&serde_json::from_str(&text).unwrap(), &mut exprs);
        assert!(exprs.len() > 3);
        queried.extend(exprs.iter().flat_map(|expr| metrics(expr)));
    }
    assert!(queried.len() > 15, "{queried:?}");
    let mesh = mesh()
        .flag("--default-policy=all-authenticated")
        .env("INBOUND_DEFAULT_POLICY", "all-authenticated")
        .env("TULLE_PROXY_MEMORY_LIMIT", &(1_u64 << 40).to_string());
    mesh.workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        assert_eq!(
            mesh.get("client", mesh.service_addr("web", HTTP), "/").await.status,
            200
        );
        // Clients without an identity are refused, with HTTP and with bytes.
        let mut http = Http1::handshake(mesh.dial_inbound(UNMESHED_IP, "web", HTTP).await).await;
        assert_eq!(http.fetch(request("/")).await.unwrap().status, 403);
        let mut bytes = mesh.dial_inbound(UNMESHED_IP, "web", OPAQUE).await;
        // The proxy may reset the connection before the client writes.
        let _ = bytes.write_all(b"hello").await;
        assert!(matches!(bytes.read(&mut [0]).await, Ok(0) | Err(_)));
        let pages = mesh.metrics("client").await + &mesh.metrics("web").await;
        let is_exported = |name: &&String| {
            let mut lines = pages.lines().filter_map(|line| line.strip_prefix(name.as_str()));
            lines.any(|rest| rest.starts_with(['{', ' ']))
        };
        let missing: Vec<_> = queried.iter().filter(|name| !is_exported(name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    });
}
