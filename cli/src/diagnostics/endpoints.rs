//! `tulle diagnostics endpoints`: the endpoints of a service.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::Serialize;
use tonic::Status;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::destination::update::Update;
use tulle_proto::destination::{GetDestination, WeightedAddr, WeightedAddrSet, protocol_hint, tls_identity};

use super::context::{Output, QueryContext};
use crate::table;

#[derive(clap::Args, Clone, Debug)]
pub(super) struct Args {
    /// <service>.<namespace>.svc.<domain>:<port>
    #[arg(required = true, value_name = "AUTHORITY")]
    authorities: Vec<String>,
    /// The client's context token, as its proxy would send it, such as {"ns":"shop","nodeName":"n1"}
    #[arg(long, value_name = "JSON")]
    token: Option<String>,
}

/// One endpoint, with the field names of Linkerd's command.
#[derive(Debug, PartialEq, Serialize)]
struct Endpoint {
    namespace: String,
    ip: String,
    port: u16,
    /// The pod or external workload.
    pod: String,
    service: String,
    weight: u32,
    http2: bool,
    opaque: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    identity: Option<String>,
    labels: BTreeMap<String, String>,
}

/// Queries each authority in turn.
pub(super) async fn query(query_context: &QueryContext<'_>, args: &Args) -> anyhow::Result<String> {
    let mut client = DestinationClient::new(query_context.connect_to_destination().await?);
    let mut endpoints = Vec::new();
    for authority in &args.authorities {
        let request = GetDestination {
            path: authority.clone(),
            context_token: args.token.clone().unwrap_or_default(),
            ..GetDestination::default()
        };
        let exchange = async {
            let mut updates = client.get(request).await?.into_inner();
            // The first update contains everything known now. Later updates would contain changes.
            updates
                .message()
                .await?
                .ok_or_else(|| Status::unavailable("the stream ended without a response"))
        };
        let update = query_context.with_timeout("Destination API", exchange).await?;
        if let Some(Update::Add(set)) = update.update {
            endpoints.extend(to_endpoints(authority, set));
        }
    }
    match query_context.output() {
        Output::Json => Ok(serde_json::to_string_pretty(&endpoints)? + "\n"),
        Output::Table if endpoints.is_empty() => Ok("No endpoints found.\n".to_owned()),
        Output::Table => Ok(render_table(&endpoints)),
    }
}

fn to_endpoints(authority: &str, set: WeightedAddrSet) -> Vec<Endpoint> {
    let service = authority.split('.').take(2).collect::<Vec<_>>().join(".");
    let namespace = set.metric_labels.get("namespace").cloned().unwrap_or_default();
    let endpoint = |addr: WeightedAddr| {
        let socket = addr.addr.and_then(|addr| SocketAddr::try_from(addr).ok())?;
        let name = ["pod", "external_workload"]
            .into_iter()
            .find_map(|key| addr.metric_labels.get(key));
        let protocol = addr.protocol_hint.and_then(|hint| hint.protocol);
        Some(Endpoint {
            namespace: namespace.clone(),
            ip: socket.ip().to_string(),
            port: socket.port(),
            pod: name.cloned().unwrap_or_default(),
            service: service.clone(),
            weight: addr.weight,
            http2: matches!(protocol, Some(protocol_hint::Protocol::H2(_))),
            opaque: matches!(protocol, Some(protocol_hint::Protocol::Opaque(_))),
            identity: addr
                .tls_identity
                .and_then(|tls| tls.strategy)
                .map(|strategy| match strategy {
                    tls_identity::Strategy::DnsLikeIdentity(dns) => dns.name,
                    tls_identity::Strategy::UriLikeIdentity(uri) => uri.uri,
                }),
            labels: addr.metric_labels.into_iter().collect(),
        })
    };
    let mut endpoints: Vec<_> = set.addrs.into_iter().filter_map(endpoint).collect();
    endpoints.sort_by(|a, b| (&a.ip, a.port).cmp(&(&b.ip, b.port)));
    endpoints
}

fn render_table(endpoints: &[Endpoint]) -> String {
    let rows = endpoints.iter().map(|endpoint| {
        [
            endpoint.namespace.clone(),
            endpoint.ip.clone(),
            endpoint.port.to_string(),
            endpoint.pod.clone(),
            endpoint.service.clone(),
            endpoint.identity.clone().unwrap_or_else(|| "-".to_owned()),
        ]
    });
    table::render(&["NAMESPACE", "IP", "PORT", "POD", "SERVICE", "IDENTITY"], rows)
}

#[cfg(test)]
mod tests {
    use tulle_proto::destination::{ProtocolHint, TlsIdentity};

    use super::*;

    #[test]
    fn endpoints_are_shown_with_workload_and_identity() {
        let addr = WeightedAddr {
            addr: Some(SocketAddr::from(([10, 77, 0, 11], 8080)).into()),
            weight: 10_000,
            metric_labels: [("external_workload".to_owned(), "web-1".to_owned())].into(),
            tls_identity: Some(TlsIdentity {
                strategy: Some(tls_identity::Strategy::DnsLikeIdentity(tls_identity::DnsLikeIdentity {
                    name: "web.demo".to_owned(),
                })),
                server_name: None,
            }),
            protocol_hint: Some(ProtocolHint {
                protocol: Some(protocol_hint::Protocol::H2(protocol_hint::H2 {})),
                opaque_transport: None,
            }),
            ..WeightedAddr::default()
        };
        let set = WeightedAddrSet {
            // An address without an IP is left out. Its default value must not be shown as 0.0.0.0:0.
            addrs: vec![addr, WeightedAddr::default()],
            metric_labels: [("namespace".to_owned(), "demo".to_owned())].into(),
        };
        let endpoints = to_endpoints("web.demo.svc.cluster.local:80", set);
        assert!(endpoints[0].http2 && !endpoints[0].opaque);
        let expected = "\
NAMESPACE   IP           PORT   POD     SERVICE    IDENTITY
demo        10.77.0.11   8080   web-1   web.demo   web.demo
";
        assert_eq!(render_table(&endpoints), expected);
    }
}
