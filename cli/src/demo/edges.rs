//! The edges of the demo: client, server, protocol, rate, and whether a policy allows the traffic.

use std::net::SocketAddrV4;

use serde::Serialize;

use super::topology::{Topology, Workload};

/// One client, one service and one protocol.
#[derive(Clone, Debug)]
pub(super) struct Edge {
    pub(super) client: Client,
    pub(super) service: &'static str,
    pub(super) protocol: Protocol,
    /// The address that the client dials.
    pub(super) target: SocketAddrV4,
    pub(super) endpoints: Vec<Endpoint>,
    /// The identities expected at both ends.
    pub(super) identities: Identities,
    /// Requests per second, sent in an open loop.
    pub(super) rate: u32,
}

#[derive(Clone, Debug)]
pub(super) struct Endpoint {
    pub(super) workload: String,
    pub(super) addr: SocketAddrV4,
}

/// The identities that mTLS verifies on an edge.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Identities {
    pub(super) client: Option<String>,
    pub(super) server: Option<String>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Client {
    /// The load generator in the mesh, which the policies allow.
    Load,
    /// The host without a sidecar, which the policies deny.
    Outside,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub(super) enum Protocol {
    #[serde(rename = "HTTP/1")]
    Http1,
    #[serde(rename = "HTTP/2")]
    Http2,
    #[serde(rename = "gRPC")]
    Grpc,
    WebSocket,
    /// Opaque TCP where the server sends first.
    #[serde(rename = "TCP")]
    Tcp,
}

/// All edges, in the order of the table.
pub(super) fn edges(topology: &Topology) -> Vec<Edge> {
    let edge = |client, service, port, protocol, rate| {
        let endpoints = topology.endpoints(service, port);
        let first = endpoints.first()?;
        // The host outside the mesh has no sidecar to resolve a cluster IP, so it dials an endpoint.
        let (target, identities) = match client {
            Client::Load => (
                topology.service_addr(service, port)?,
                Identities {
                    client: topology.load_workload().map(|load| load.identity.clone()),
                    server: Some(first.0.identity.clone()),
                },
            ),
            Client::Outside => (first.1, Identities::default()),
        };
        let endpoint = |(workload, addr): &(&Workload, SocketAddrV4)| Endpoint {
            workload: workload.name.clone(),
            addr: *addr,
        };
        Some(Edge {
            client,
            service,
            protocol,
            target,
            endpoints: endpoints.iter().map(endpoint).collect(),
            identities,
            rate,
        })
    };
    [
        edge(Client::Load, "web", "http", Protocol::Http1, 200),
        edge(Client::Load, "web", "grpc", Protocol::Grpc, 100),
        edge(Client::Load, "ws", "http", Protocol::Http2, 50),
        edge(Client::Load, "ws", "http", Protocol::WebSocket, 50),
        edge(Client::Load, "tcp", "echo", Protocol::Tcp, 20),
        edge(Client::Outside, "web", "http", Protocol::Http1, 5),
        edge(Client::Outside, "tcp", "echo", Protocol::Tcp, 5),
    ]
    .into_iter()
    .flatten()
    .collect()
}

impl Edge {
    /// The name in messages.
    pub(super) fn name(&self) -> String {
        format!("{} → {} {}", self.client.as_str(), self.service, self.protocol.as_str())
    }

    /// The name in file names.
    pub(super) fn file_name(&self) -> String {
        let protocol = self.protocol.as_argument();
        format!("{}-{}-{protocol}", self.client.as_str(), self.service)
    }

    /// The arguments of `tulle-bench`.
    pub(super) fn arguments(&self) -> Vec<String> {
        let mut arguments: Vec<String> = ["load", "--protocol", self.protocol.as_argument()]
            .map(str::to_owned)
            .into();
        arguments.extend(["--rate".to_owned(), self.rate.to_string()]);
        arguments.extend(["--duration", "1d", "--timeout", "5s", "--report-every", "1s", "--json"].map(str::to_owned));
        match self.protocol {
            Protocol::Tcp => {
                // Each exchange uses a new connection, so that delays of the first bytes of a connection are detected.
                arguments.extend(["--reconnect", "--body-size", "65536"].map(str::to_owned));
                // The client outside the mesh sends without waiting for the greeting. Otherwise the proxy would refuse it only
                // after the timeout of protocol detection.
                if self.client == Client::Load {
                    arguments.extend(["--expect-greeting", "hello"].map(str::to_owned));
                }
            }
            Protocol::WebSocket => arguments.extend(["--body-size", "1024"].map(str::to_owned)),
            Protocol::Http1 | Protocol::Http2 | Protocol::Grpc => {
                let authority = format!("{}.demo.svc.cluster.local:{}", self.service, self.target.port());
                arguments.extend(["--authority".to_owned(), authority]);
            }
        }
        if self.client == Client::Outside && self.protocol != Protocol::Tcp {
            arguments.push("--reconnect".to_owned());
        }
        arguments.push(match self.protocol {
            Protocol::Tcp => self.target.to_string(),
            _ => format!("{}/", self.target),
        });
        arguments
    }
}

impl Client {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Outside => "outside",
        }
    }
}

impl Protocol {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Http1 => "HTTP/1",
            Self::Http2 => "HTTP/2",
            Self::Grpc => "gRPC",
            Self::WebSocket => "WebSocket",
            Self::Tcp => "TCP",
        }
    }

    fn as_argument(self) -> &'static str {
        match self {
            Self::Http1 => "http1",
            Self::Http2 => "http2",
            Self::Grpc => "grpc",
            Self::WebSocket => "ws",
            Self::Tcp => "tcp",
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::manifests;
    use super::*;

    pub(in super::super) fn topology() -> Topology {
        let files: Vec<_> = manifests::shipped()
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .collect();
        Topology::parse(&files).unwrap()
    }

    #[test]
    fn permitted_edges_dial_the_service_and_refused_ones_an_endpoint() {
        let edges = edges(&topology());
        assert_eq!(edges.len(), 7);
        let first = &edges[0];
        assert_eq!(first.name(), "load → web HTTP/1");
        assert_eq!(first.target.to_string(), "10.96.0.10:80");
        assert_eq!(first.endpoints.len(), 3);
        assert!(first.identities.client.as_ref().unwrap().starts_with("load.demo."));
        let outside = edges.iter().find(|edge| edge.client == Client::Outside).unwrap();
        assert_eq!(outside.target.to_string(), "10.77.0.11:8080");
        assert!(outside.arguments().contains(&"--reconnect".to_owned()));
        assert_eq!(edges[4].arguments().last().unwrap(), "10.96.0.30:5000");
    }
}
