//! Traffic cannot fill the log of a proxy: log lines about traffic are rate-limited at the levels `info` and `warn`.

use std::fs;
use std::path::Path;

use crate::{files_below, root};

/// Modules of the proxy that handle connections and requests.
const TRAFFIC: &[&str] = &["gateway", "inbound", "outbound"];

#[test]
fn log_lines_about_traffic_are_limited() {
    let src = root().join("proxy/src");
    let mut unlimited = Vec::new();
    for file in TRAFFIC.iter().flat_map(|module| files_below(&src.join(module))) {
        let source = fs::read_to_string(&file).expect("sources are readable UTF-8");
        unlimited.extend(unlimited_lines(&file, &source));
    }
    assert!(
        unlimited.is_empty(),
        "use `info_limited!` or `warn_limited!`:\n{}",
        unlimited.join("\n")
    );
}

fn unlimited_lines(file: &Path, source: &str) -> Vec<String> {
    let is_unlimited = |line: &str| ["info!(", "warn!("].iter().any(|macro_name| line.contains(macro_name));
    let numbered = source.lines().zip(1..);
    let unlimited = numbered.filter(|(line, _)| is_unlimited(line));
    unlimited
        .map(|(line, number)| format!("{}:{number}: {}", file.display(), line.trim()))
        .collect()
}

#[test]
fn limited_lines_are_distinguished_from_unlimited_ones() {
    let n_found = |source| unlimited_lines(Path::new("a.rs"), source).len();
    assert_eq!(n_found("tracing::info!(%dst, \"refused\");\ndebug!(\"found\");"), 1);
    assert_eq!(n_found("    warn!(\n"), 1);
    assert_eq!(n_found("info_limited!(log, ip, \"refused\"); warn_limited!("), 0);
}
