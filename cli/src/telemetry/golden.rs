//! `tulle stat`, `tulle edges` and `tulle routes`: golden metrics of the last minutes.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tulle_control::telemetry::api::{self, EdgeMetrics, GoldenMetrics, RouteMetrics, WorkloadMetrics};
use tulle_control::telemetry::counts::Direction;
use tulle_core::duration;
use tulle_core::names::telemetry::{EDGES, ROUTES, WORKLOADS};

use super::{Output, TelemetryQuery, WorkloadArgs};
use crate::{kubernetes, runtime, table};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    workloads: WorkloadArgs,
    /// Time window of the metrics, at most 5m. The output says how much of it was measured. The first query of a workload takes 2 s
    #[arg(short = 't', long, value_name = "DURATION", default_value = "1m", value_parser = parse_window)]
    window: Duration,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

fn parse_window(text: &str) -> Result<Duration, String> {
    let window = duration::parse(text).map_err(|err| err.to_string())?;
    match (Duration::from_secs(1)..=MAX_WINDOW).contains(&window) {
        true => Ok(window),
        false => Err(format!("{text:?} is not between 1s and 5m")),
    }
}

/// Runs `tulle stat`.
pub(crate) fn stat(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    query_and_print(args, flags, WORKLOADS, |query, rows: &[WorkloadMetrics], output| {
        if let (Some(name), []) = (&query.name, rows) {
            bail!("no running {} {name} found{}", query.kind, namespace_suffix(query));
        }
        let several_clusters = rows.iter().any(|row| !row.cluster.is_empty());
        let mut titles = vec!["NAME", "MESHED"];
        if several_clusters {
            titles.insert(CLUSTER_COLUMN, "CLUSTER");
        }
        titles.extend(golden_titles(output));
        if output == Output::Wide {
            titles.push("CAUSES");
        }
        let lines = rows.iter().map(|row| {
            let is_local = row.cluster.is_empty();
            let meshed = match is_local {
                true => format!("{}/{}", row.meshed, row.total),
                false => "-".to_owned(),
            };
            let mut line = vec![display_name(query, &row.resource), meshed];
            if several_clusters {
                line.insert(CLUSTER_COLUMN, or_dash(&row.cluster));
            }
            line.extend(match row.meshed {
                0 if is_local => vec!["-".to_owned(); golden_titles(output).len()],
                _ => golden_cells(&row.golden, output),
            });
            if output == Output::Wide {
                line.push(most_frequent_causes(row));
            }
            line
        });
        let namespaces = rows.iter().map(|row| &*row.resource.namespace).collect();
        Ok(table_with_namespaces(query, titles, lines, namespaces))
    })
}

/// Position of the column `CLUSTER` of `tulle stat`, before a column `NAMESPACE` is inserted.
const CLUSTER_COLUMN: usize = 1;

/// Runs `tulle edges`.
pub(crate) fn edges(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    query_and_print(args, flags, EDGES, |_, rows: &[EdgeMetrics], output| {
        let several_clusters = rows.iter().any(|row| !row.destination_cluster.is_empty());
        let mut titles = vec!["SRC", "DST", "SRC_NS", "DST_NS", "CLIENT_ID", "SERVER_ID", "SECURED"];
        if several_clusters {
            titles.insert(DST_CLUSTER_COLUMN, "DST_CLUSTER");
        }
        titles.extend(golden_titles(output));
        let lines = rows.iter().map(|row| {
            let secured = match &row.no_tls_reason {
                None => "√".to_owned(),
                Some(reason) => reason.clone(),
            };
            let mut line = vec![
                kind_and_name(&row.source),
                kind_and_name(&row.destination),
                or_dash(&row.source.namespace),
                or_dash(&row.destination.namespace),
                short_identity(row.client_id.as_deref()),
                short_identity(row.server_id.as_deref()),
                secured,
            ];
            if several_clusters {
                line.insert(DST_CLUSTER_COLUMN, or_dash(&row.destination_cluster));
            }
            line.extend(golden_cells(&row.golden, output));
            line
        });
        Ok(table::render_rows(&titles, lines))
    })
}

/// Position of the column `DST_CLUSTER` of `tulle edges`, after the namespace of the destination.
const DST_CLUSTER_COLUMN: usize = 4;

/// Runs `tulle routes`.
pub(crate) fn routes(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    query_and_print(args, flags, ROUTES, |query, rows: &[RouteMetrics], output| {
        let mut titles = vec!["NAME", "DIRECTION", "PARENT", "ROUTE"];
        titles.extend(golden_titles(output).into_iter().filter(|title| !is_tcp_column(title)));
        let lines = rows.iter().map(|row| {
            let direction = match row.direction {
                Direction::Inbound => "inbound",
                Direction::Outbound => "outbound",
            };
            let mut line = vec![
                display_name(query, &row.workload),
                direction.to_owned(),
                row.parent.clone(),
                row.name.clone(),
            ];
            let values = golden_titles(output).into_iter().zip(golden_cells(&row.golden, output));
            line.extend(
                values
                    .filter(|(title, _)| !is_tcp_column(title))
                    .map(|(_, value)| value),
            );
            line
        });
        let namespaces = rows.iter().map(|row| &*row.workload.namespace).collect();
        Ok(table_with_namespaces(query, titles, lines, namespaces))
    })
}

/// Queries the API and prints the response: as JSON, or as the table that `format_table` returns. With a table, standard error
/// lists workloads that are missing, and the time window that was measured.
fn query_and_print<Row: Serialize + DeserializeOwned>(
    args: &Args,
    flags: &kubernetes::Flags,
    resource: &str,
    format_table: impl Fn(&TelemetryQuery, &[Row], Output) -> anyhow::Result<String>,
) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        let query = args.workloads.query(flags).await?;
        let window = [("window", args.window.as_secs().to_string())];
        let response: api::QueryResponse<Row> = query.get(resource, &window).await?;
        if args.output == Output::Json {
            let json = serde_json::to_string_pretty(&response).context("writing JSON")?;
            crate::print(&format!("{json}\n"))?;
        } else {
            crate::print(&format_table(&query, &response.rows, args.output)?)?;
            for sidecar in &response.unreachable {
                eprintln!(
                    "tulle: {} is missing: {}",
                    kind_and_name(&sidecar.workload),
                    sidecar.reason
                );
            }
            match response.window_seconds {
                0.0 => eprintln!("no sidecar found{}", namespace_suffix(&query)),
                seconds => eprintln!("measured over {seconds:.0} s"),
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn namespace_suffix(query: &TelemetryQuery) -> String {
    match &query.namespace {
        Some(namespace) => format!(" in namespace {namespace}; use -n for another namespace, -A for all"),
        None => String::new(),
    }
}

/// Formats a table. It has a namespace column if the query covers all namespaces, or if a line has another namespace than the query,
/// because clients can use Services of other clusters in other namespaces. `namespaces` contains the namespace of each line.
fn table_with_namespaces(
    query: &TelemetryQuery,
    mut titles: Vec<&str>,
    lines: impl Iterator<Item = Vec<String>>,
    namespaces: Vec<&str>,
) -> String {
    let is_another = |namespace: &&str| query.namespace.as_deref() != Some(*namespace);
    let has_namespace_column =
        query.kind != "namespace" && (query.namespace.is_none() || namespaces.iter().any(is_another));
    if has_namespace_column {
        titles.insert(0, "NAMESPACE");
    }
    let lines = lines.zip(namespaces).map(|(mut line, namespace)| {
        if has_namespace_column {
            line.insert(0, or_dash(namespace));
        }
        line
    });
    table::render_rows(&titles, lines)
}

/// The name of a resource, with its kind if workloads of every kind were queried.
fn display_name(query: &TelemetryQuery, resource: &api::ResourceName) -> String {
    match query.kind == "workload" {
        true => kind_and_name(resource),
        false => resource.name.clone(),
    }
}

/// Formats kind and name, such as `deploy/web`.
pub(super) fn kind_and_name(resource: &api::ResourceName) -> String {
    let kind = match resource.kind.as_str() {
        "deployment" => "deploy",
        "statefulset" => "sts",
        "daemonset" => "ds",
        "cronjob" => "cj",
        "replicaset" => "rs",
        "replicationcontroller" => "rc",
        "externalworkload" => "ew",
        "service" => "svc",
        "serviceaccount" => "sa",
        "address" => return resource.name.clone(),
        kind => kind,
    };
    format!("{kind}/{}", resource.name)
}

/// Formats an identity as `NAME.NAMESPACE`, without the suffix that all identities of the mesh share.
fn short_identity(id: Option<&str>) -> String {
    match id {
        None => "-".to_owned(),
        Some(id) => id.split(".serviceaccount.").next().unwrap_or(id).to_owned(),
    }
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-" } else { text }.to_owned()
}

fn golden_titles(output: Output) -> Vec<&'static str> {
    let mut titles = vec![
        "SUCCESS",
        "RPS",
        "LATENCY_P50",
        "LATENCY_P95",
        "LATENCY_P99",
        "TCP_CONN",
    ];
    if output == Output::Wide {
        titles.extend(["READ_BYTES/SEC", "WRITE_BYTES/SEC", "DENIED/SEC"]);
    }
    titles
}

fn is_tcp_column(title: &str) -> bool {
    ["TCP_CONN", "READ_BYTES/SEC", "WRITE_BYTES/SEC"].contains(&title)
}

fn golden_cells(golden: &GoldenMetrics, output: Output) -> Vec<String> {
    let ms = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), format_latency);
    let mut values = vec![
        golden
            .success_rate
            .map_or_else(|| "-".to_owned(), |rate| format!("{:.2}%", rate * 100.0)),
        match golden.success_rate {
            None => "-".to_owned(),
            Some(_) => format!("{:.1}rps", golden.requests_per_second),
        },
        ms(golden.latency_ms_p50),
        ms(golden.latency_ms_p95),
        ms(golden.latency_ms_p99),
        format!("{:.0}", golden.tcp_connections),
    ];
    if output == Output::Wide {
        values.extend([
            format!("{:.1}B/s", golden.read_bytes_per_second),
            format!("{:.1}B/s", golden.write_bytes_per_second),
            format!("{:.1}", golden.denied_per_second),
        ]);
    }
    values
}

/// Formats milliseconds; fractions are shown only for small values.
fn format_latency(ms: f64) -> String {
    if ms < 0.1 {
        format!("{ms:.2}ms")
    } else if ms < 10.0 {
        format!("{ms:.1}ms")
    } else {
        format!("{ms:.0}ms")
    }
}

/// The two most frequent causes of failures, in the format that `tulle explain` accepts.
fn most_frequent_causes(row: &WorkloadMetrics) -> String {
    let mut causes: Vec<_> = row.causes.iter().collect();
    causes.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let most_frequent = causes
        .iter()
        .take(2)
        .map(|(cause, rate)| format!("{cause} {rate:.1}/s"));
    or_dash(&most_frequent.collect::<Vec<_>>().join(", "))
}

const MAX_WINDOW: Duration = Duration::from_secs(300);

pub(crate) const STAT_EXAMPLES: &str = "\
  tulle stat deploy -n shop
  tulle stat deploy/web -n shop -o wide      # with bytes, denied requests and causes: see `tulle explain`
  tulle stat svc -n shop                     # also Services of other clusters, as the clients in shop see them
  tulle stat ns
  tulle stat -A -t 5m -o json
  tulle stat --control 127.0.0.1:8089        # without Kubernetes, on the machine of the control plane

Requires permission to list workloads.telemetry.tulle.dev in the namespace.";

pub(crate) const EDGES_EXAMPLES: &str = "\
  tulle edges deploy -n shop
  tulle edges deploy/web -n shop             # clients of web, and servers that web calls
  tulle edges --control 127.0.0.1:8089

SECURED shows whether connections use mTLS, and if not, why.
Requires permission to list edges.telemetry.tulle.dev in the namespace.";

pub(crate) const ROUTES_EXAMPLES: &str = "\
  tulle routes deploy/web -n shop
  tulle routes svc -n shop
  tulle routes --control 127.0.0.1:8089

Routes of a Server are inbound, those of a Service or EgressNetwork outbound.
Routes of a ServiceProfile are counted by both the client's and the server's proxy.
Requires permission to list routes.telemetry.tulle.dev in the namespace.";

#[cfg(test)]
mod tests {
    use super::super::tests::telemetry_query;
    use super::*;

    #[test]
    fn a_row_has_the_format_of_linkerd() {
        let values = GoldenMetrics {
            success_rate: Some(0.98765),
            requests_per_second: 12.34,
            latency_ms_p50: Some(1.5),
            tcp_connections: 3.0,
            ..GoldenMetrics::default()
        };
        assert_eq!(
            golden_cells(&values, Output::Table),
            ["98.77%", "12.3rps", "1.5ms", "-", "-", "3"]
        );
        for output in [Output::Table, Output::Wide] {
            assert_eq!(golden_cells(&values, output).len(), golden_titles(output).len());
        }
        assert_eq!(golden_cells(&GoldenMetrics::default(), Output::Table)[..2], ["-", "-"]);
    }

    #[test]
    fn latencies_below_a_millisecond_are_not_rounded_away() {
        for (ms, text) in [
            (0.04, "0.04ms"),
            (0.4, "0.4ms"),
            (1.0, "1.0ms"),
            (9.96, "10.0ms"),
            (12.3, "12ms"),
        ] {
            assert_eq!(format_latency(ms), text);
        }
    }

    #[test]
    fn namespaces_are_shown_if_there_are_several() {
        let table = |namespace: Option<&str>| {
            let lines = std::iter::once(vec!["web".to_owned()]);
            table_with_namespaces(&telemetry_query(namespace, "deploy"), vec!["NAME"], lines, vec!["shop"])
        };
        assert_eq!(table(None), "NAMESPACE   NAME\nshop        web\n");
        assert_eq!(table(Some("shop")), "NAME\nweb\n");
        assert_eq!(table(Some("bank")), table(None));
    }

    #[test]
    fn windows_are_bounded() {
        assert_eq!(parse_window("10s"), Ok(Duration::from_secs(10)));
        for text in ["0", "6m", "10", "x"] {
            assert!(parse_window(text).is_err(), "{text}");
        }
    }
}
