//! One row per edge: the load generator's report, joined with the metrics of the sidecars at both ends.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tulle_core::metrics::samples::{Sample, Samples};

use super::edges::{Client, Edge, Protocol};
use super::load_reports::{LatencyMs, Report, Reports};

/// The last scrape of each sidecar, by workload.
pub(super) type Scrapes = BTreeMap<String, Samples>;

/// The measurements of an edge in an interval.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) client: Client,
    pub(super) service: &'static str,
    pub(super) protocol: Protocol,
    pub(super) requests: u64,
    pub(super) succeeded: u64,
    pub(super) failed: u64,
    pub(super) requests_per_second: f64,
    /// From 0 to 1; `None` without requests.
    pub(super) success_rate: Option<f64>,
    /// Latency of responses and timeouts, from the scheduled time of a request; `None` if no request succeeded.
    pub(super) latency_ms: Option<LatencyMs>,
    /// Payload in both directions.
    pub(super) bytes_per_second: f64,
    /// The client identity that the server's sidecar verified.
    pub(super) client_identity: Option<String>,
    /// The server identity that the client's sidecar verified.
    pub(super) server_identity: Option<String>,
    /// Requests and connections that left the client's sidecar without mTLS.
    pub(super) plaintext: u64,
    /// Responses by replica.
    pub(super) replicas: BTreeMap<String, u64>,
    /// Failed requests by the error that the client reported.
    pub(super) errors: BTreeMap<String, u64>,
    /// Requests or connections that the servers' sidecars have denied since they started, by client and policy. Only for edges
    /// from outside the mesh.
    pub(super) denials: BTreeMap<String, u64>,
}

/// The row of the last second.
pub(super) fn live_row(edge: &Edge, reports: &Reports, scrapes: &Scrapes) -> Row {
    row(edge, &reports.last, scrapes)
}

/// The row of the whole run.
pub(super) fn total_row(edge: &Edge, reports: &Reports, scrapes: &Scrapes) -> Row {
    let nothing = Report::default();
    row(edge, reports.total.as_ref().unwrap_or(&nothing), scrapes)
}

fn row(edge: &Edge, report: &Report, scrapes: &Scrapes) -> Row {
    let client = scrapes.get(edge.client.as_str());
    let servers = edge.endpoints.iter().filter_map(|endpoint| {
        let samples = scrapes.get(&endpoint.workload)?;
        Some((samples, endpoint.addr.port()))
    });
    let mut client_ids = BTreeSet::new();
    let mut denials = BTreeMap::new();
    for (samples, port) in servers {
        match edge.client {
            Client::Load => client_ids.extend(verified_clients(samples, port)),
            Client::Outside => count_denials(samples, port, edge.protocol, &mut denials),
        }
    }
    let client_side = client
        .map(|samples| ClientSideMetrics::from_samples(edge, samples))
        .unwrap_or_default();
    Row {
        client: edge.client,
        service: edge.service,
        protocol: edge.protocol,
        requests: report.requests,
        succeeded: report.succeeded,
        failed: report.failed(),
        requests_per_second: report.per_second(report.requests),
        success_rate: (report.requests > 0).then(|| report.succeeded as f64 / report.requests as f64),
        latency_ms: report.latency_ms().filter(|_| report.succeeded > 0),
        bytes_per_second: report.per_second(report.sent_bytes + report.received_bytes),
        client_identity: join_identities(client_ids),
        server_identity: join_identities(client_side.server_ids),
        plaintext: client_side.plaintext,
        replicas: report.replicas.clone(),
        errors: report.errors.clone(),
        denials,
    }
}

/// The client sidecar's metrics of the connections to an edge's endpoints.
#[derive(Default)]
struct ClientSideMetrics {
    server_ids: BTreeSet<String>,
    plaintext: u64,
}

impl ClientSideMetrics {
    fn from_samples(edge: &Edge, samples: &Samples) -> Self {
        let mut metrics = Self::default();
        for sample in endpoint_counters(samples) {
            if sample.value == 0.0
                || !edge
                    .endpoints
                    .iter()
                    .any(|endpoint| has_target_addr(sample, endpoint.addr))
            {
                continue;
            }
            match sample.label("server_id") {
                Some(id) if sample.label("tls") == Some("true") => {
                    metrics.server_ids.insert(id.to_owned());
                }
                _ => metrics.plaintext += sample.value as u64,
            }
        }
        metrics
    }
}

/// The metrics of requests and connections to endpoints.
fn endpoint_counters(samples: &Samples) -> impl Iterator<Item = &Sample> {
    let requests = samples.named("request_total", &[("direction", "outbound")]);
    requests.chain(samples.named("tcp_open_total", &[("direction", "outbound"), ("peer", "dst")]))
}

fn has_target_addr(sample: &Sample, addr: std::net::SocketAddrV4) -> bool {
    sample.label("target_addr").and_then(|text| text.parse().ok()) == Some(addr)
}

/// Client identities that a server's sidecar verified on this port.
fn verified_clients(samples: &Samples, port: u16) -> BTreeSet<String> {
    let port = port.to_string();
    let client_ids_of = |name, labels: &[(&str, &str)]| -> BTreeSet<String> {
        let verified = samples
            .named(name, labels)
            .filter(|sample| sample.label("target_port") == Some(&port) && sample.value > 0.0);
        let ids = verified.filter_map(|sample| sample.label("client_id"));
        ids.filter(|id| !id.is_empty()).map(str::to_owned).collect()
    };
    let mut ids = client_ids_of("request_total", &[("direction", "inbound"), ("tls", "true")]);
    ids.extend(client_ids_of(
        "tcp_open_total",
        &[("direction", "inbound"), ("peer", "src"), ("tls", "true")],
    ));
    ids
}

fn count_denials(samples: &Samples, port: u16, protocol: Protocol, denials: &mut BTreeMap<String, u64>) {
    let port = port.to_string();
    let family = match protocol {
        Protocol::Tcp => "inbound_tcp_authz_deny_total",
        _ => "inbound_http_authz_deny_total",
    };
    for sample in samples.named(family, &[("target_port", &port)]) {
        let client_name = match (sample.label("client_id"), sample.label("no_tls_reason")) {
            (Some(id), _) if !id.is_empty() => id.to_owned(),
            (_, Some(reason)) => format!("no identity ({reason})"),
            _ => "no identity".to_owned(),
        };
        let policy = match (sample.label("srv_kind"), sample.label("srv_name")) {
            (Some("default"), Some(name)) => format!("policy {name}"),
            (Some(_), Some(name)) => format!("Server {name}"),
            _ => "policy".to_owned(),
        };
        *denials.entry(format!("{client_name}, by {policy}")).or_default() += sample.value as u64;
    }
    denials.retain(|_, n| *n > 0);
}

fn join_identities(ids: BTreeSet<String>) -> Option<String> {
    (!ids.is_empty()).then(|| ids.into_iter().collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::edges::{edges, tests::topology};
    use super::super::load_reports::tests::INTERVAL;
    use super::*;

    /// Metrics that sidecars served after a few seconds, shortened.
    pub(in super::super) fn scrapes() -> Scrapes {
        let load = "request_total{direction=\"outbound\",target_addr=\"10.77.0.11:8080\",tls=\"true\",\
             server_id=\"web.demo.serviceaccount.identity.linkerd.cluster.local\"} 90\n\
             tcp_open_total{direction=\"outbound\",peer=\"dst\",target_addr=\"10.77.0.31:5000\",tls=\"no_identity\",\
             no_tls_reason=\"not_provided_by_service_discovery\"} 4\n\
             tcp_open_total{direction=\"outbound\",peer=\"src\",target_addr=\"10.96.0.10:80\",tls=\"no_identity\"} 8\n";
        let web = "request_total{direction=\"inbound\",target_addr=\"10.77.0.11:8080\",target_port=\"8080\",tls=\"true\",\
             client_id=\"load.demo.serviceaccount.identity.linkerd.cluster.local\"} 90\n\
             inbound_http_authz_deny_total{target_port=\"8080\",srv_kind=\"server\",srv_name=\"web-http\",\
             tls=\"no_identity\",no_tls_reason=\"no_tls_from_remote\"} 15\n";
        let page = |name: &str, text| (name.to_owned(), Samples::parse(text));
        Scrapes::from([page("load", load), page("web-1", web)])
    }

    pub(in super::super) fn reports() -> Reports {
        let mut reports = Reports::default();
        assert!(reports.add_line(&INTERVAL.replace('\n', " ")));
        assert!(reports.add_line(&INTERVAL.replace('\n', " ").replace("interval", "total")));
        reports
    }

    #[test]
    fn a_row_joins_the_load_with_the_sidecars_of_both_ends() {
        let edges = edges(&topology());
        let row = live_row(&edges[0], &reports(), &scrapes());
        assert_eq!(row.requests_per_second, 200.0);
        assert_eq!(row.success_rate, Some(0.99));
        assert_eq!(row.client_identity, edges[0].identities.client);
        assert_eq!(row.server_identity, edges[0].identities.server);
        assert_eq!(row.plaintext, 0);
        assert!(row.denials.is_empty());
    }

    #[test]
    fn connections_without_mtls_are_counted_and_have_no_server_identity() {
        let edges = edges(&topology());
        let row = live_row(&edges[4], &reports(), &scrapes());
        assert_eq!((row.server_identity, row.plaintext), (None, 4));
    }

    #[test]
    fn denials_name_the_client_and_the_policy() {
        let edges = edges(&topology());
        let row = live_row(&edges[5], &reports(), &scrapes());
        let expected = "no identity (no_tls_from_remote), by Server web-http".to_owned();
        assert_eq!(row.denials, BTreeMap::from([(expected, 15)]));
        assert_eq!(row.client_identity, None);
    }
}
