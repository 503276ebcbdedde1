//! Renders the live table and the final table as text.

use std::fmt::Write as _;

use super::checks;
use super::edges::Client;
use super::rows::Row;

/// The content of a table.
pub(super) struct View<'a> {
    /// The first line: elapsed time, counts and state.
    pub(super) title: String,
    pub(super) rows: &'a [Row],
    /// Services with several replicas, and a note for each replica.
    pub(super) services: &'a [(&'a str, Vec<(String, String)>)],
    /// Recent events, oldest first.
    pub(super) events: &'a [String],
}

/// Renders the view. No line is longer than `width` characters.
pub(super) fn render(view: &View<'_>, width: usize) -> String {
    let mut lines = vec![view.title.clone(), String::new()];
    lines.extend(table_lines(view.rows));
    for (service, replicas) in view.services {
        lines.push(String::new());
        lines.extend(share_lines(view.rows, service, replicas));
    }
    let denials_and_failures = denial_and_failure_lines(view.rows);
    if !denials_and_failures.is_empty() {
        lines.push(String::new());
        lines.extend(denials_and_failures);
    }
    if !view.events.is_empty() {
        lines.push(String::new());
        lines.extend(view.events.iter().cloned());
    }
    let mut text = String::new();
    for line in lines {
        text.extend(line.chars().take(width));
        text.push('\n');
    }
    text
}

fn table_lines(rows: &[Row]) -> Vec<String> {
    let titles = [
        "CLIENT",
        "SERVICE",
        "PROTOCOL",
        "REQ/S",
        "SUCCESS",
        "P50",
        "P95",
        "P99",
        "BYTES/S",
        "CLIENT IDENTITY",
        "SERVER IDENTITY",
    ];
    let mut cells = vec![titles.map(str::to_owned)];
    cells.extend(rows.iter().map(row_cells));
    let widths: Vec<usize> = (0..titles.len())
        .map(|column| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let line = |row: &[String; 11]| {
        let mut line = String::new();
        for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
            // Numbers are aligned right, text left.
            let _ = match NUMERIC_COLUMNS.contains(&at) {
                true => write!(line, "{cell:>width$}  "),
                false => write!(line, "{cell:<width$}  "),
            };
        }
        line.trim_end().to_owned()
    };
    cells.iter().map(line).collect()
}

fn row_cells(row: &Row) -> [String; 11] {
    let latency = |percentile: fn(&super::load_reports::LatencyMs) -> f64| {
        row.latency_ms
            .as_ref()
            .map_or_else(dash, |latency| format_milliseconds(percentile(latency)))
    };
    let success = match (row.client, row.success_rate) {
        (_, None) => dash(),
        (Client::Outside, Some(0.0)) => "refused".to_owned(),
        (_, Some(rate)) => format_percent(rate),
    };
    let bytes = match row.bytes_per_second {
        0.0 => dash(),
        n => format_bytes(n),
    };
    [
        row.client.as_str().to_owned(),
        row.service.to_owned(),
        row.protocol.as_str().to_owned(),
        format!("{:.1}", row.requests_per_second),
        success,
        latency(|latency| latency.p50),
        latency(|latency| latency.p95),
        latency(|latency| latency.p99),
        bytes,
        short_identity(row.client_identity.as_deref()),
        short_identity(row.server_identity.as_deref()),
    ]
}

/// Renders one line per replica: its share of the responses, as a number and as a bar.
fn share_lines(rows: &[Row], service: &str, replicas: &[(String, String)]) -> Vec<String> {
    let responses = checks::responses_by_replica(rows, service);
    let all: u64 = responses.values().sum();
    let mut lines = vec![format!("REPLICAS OF {service}")];
    for (name, note) in replicas {
        let share = responses.get(name).map_or(0.0, |n| *n as f64 / all.max(1) as f64);
        let bar = "█".repeat((share * BAR_LENGTH).round() as usize);
        let line = format!(
            "{name:<10} {:>6.1} %  {bar:<width$}  {note}",
            share * 100.0,
            width = BAR_LENGTH as usize
        );
        lines.push(line.trim_end().to_owned());
    }
    lines
}

fn denial_and_failure_lines(rows: &[Row]) -> Vec<String> {
    let mut lines = Vec::new();
    for row in rows {
        for (client_and_policy, n) in &row.denials {
            let errors: Vec<_> = row.errors.keys().map(String::as_str).collect();
            lines.push(format!(
                "{} → {} {}: refused {n} times: {client_and_policy}{}{}",
                row.client.as_str(),
                row.service,
                row.protocol.as_str(),
                if errors.is_empty() {
                    ""
                } else {
                    "; errors of the client: "
                },
                errors.join(", "),
            ));
        }
        if row.client == Client::Load && row.failed > 0 {
            let errors: Vec<_> = row.errors.iter().map(|(reason, n)| format!("{reason} ({n})")).collect();
            lines.push(format!(
                "{} → {} {}: {} failed: {}",
                row.client.as_str(),
                row.service,
                row.protocol.as_str(),
                row.failed,
                errors.join(", ")
            ));
        }
    }
    if !lines.is_empty() {
        lines.insert(0, "REFUSALS AND FAILURES".to_owned());
    }
    lines
}

/// Shortens an identity to `<service account>.<namespace>`. The rest is the same for the whole mesh and is in the title.
fn short_identity(full: Option<&str>) -> String {
    let Some(full) = full else { return dash() };
    full.split_once(".serviceaccount.identity.")
        .map_or(full, |(short, _)| short)
        .to_owned()
}

fn format_percent(rate: f64) -> String {
    // If a request failed, the rounded rate must not be 100 %.
    let shown = if rate < 1.0 { (rate * 100.0).min(99.99) } else { 100.0 };
    format!("{shown:.2} %")
}

fn format_milliseconds(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.0} ms"),
    }
}

fn format_bytes(n: f64) -> String {
    match n {
        n if n < 1e3 => format!("{n:.0} B"),
        n if n < 1e6 => format!("{:.1} kB", n / 1e3),
        n => format!("{:.1} MB", n / 1e6),
    }
}

fn dash() -> String {
    "-".to_owned()
}

const NUMERIC_COLUMNS: std::ops::RangeInclusive<usize> = 3..=8;
/// Length of the bar of a replica that serves all requests, in characters.
const BAR_LENGTH: f64 = 30.0;

#[cfg(test)]
mod tests {
    use super::super::edges::{edges, tests::topology};
    use super::super::rows;
    use super::*;

    fn rows() -> Vec<Row> {
        let edges = edges(&topology());
        let shown = [&edges[0], &edges[5]];
        shown
            .map(|edge| rows::live_row(edge, &rows::tests::reports(), &rows::tests::scrapes()))
            .into()
    }

    #[test]
    fn columns_are_aligned_and_show_the_rows() {
        let mut rows = rows();
        rows[1].success_rate = Some(0.0);
        rows[1].latency_ms = None;
        let services = [(
            "web",
            vec![
                ("web-1".to_owned(), String::new()),
                ("web-3".to_owned(), "+50 ms".to_owned()),
            ],
        )];
        let events = ["00:00:12  the control plane is back".to_owned()];
        let view = View {
            title: "tulle demo".to_owned(),
            rows: &rows,
            services: &services,
            events: &events,
        };
        let expected = "\
tulle demo

CLIENT   SERVICE  PROTOCOL  REQ/S  SUCCESS     P50     P95     P99  BYTES/S  CLIENT IDENTITY  SERVER IDENTITY
load     web      HTTP/1    200.0  99.00 %  0.8 ms  1.5 ms  3.0 ms  25.6 kB  load.demo        web.demo
outside  web      HTTP/1    200.0  refused       -       -       -  25.6 kB  -                -

REPLICAS OF web
web-1        50.5 %  ███████████████
web-3         0.0 %                                  +50 ms

REFUSALS AND FAILURES
load → web HTTP/1: 2 failed: status 502 (2)
outside → web HTTP/1: refused 15 times: no identity (no_tls_from_remote), by Server web-http; errors of the client: status 502

00:00:12  the control plane is back
";
        assert_eq!(render(&view, 200), expected);
        assert!(render(&view, 40).lines().all(|line| line.chars().count() <= 40));
    }

    #[test]
    fn a_rate_below_100_percent_is_not_rounded_to_100_percent() {
        assert_eq!(format_percent(1.0), "100.00 %");
        assert_eq!(format_percent(0.999_999), "99.99 %");
    }
}
