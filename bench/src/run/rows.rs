//! The scenarios of the benchmark, also called rows: the values of `--rows`, and the tables of `docs/reference/benchmarks.md`.

use std::time::Duration;

use super::setup::{InboundMode, Instrumentation, Peer, Rules, Setup, SidecarPath, TcpApp, Traffic};

/// A scenario of the benchmark. Scenarios run in this order. Adjacent scenarios that need the same sidecars share them.
#[derive(
    clap::ValueEnum, serde::Serialize, serde::Deserialize, Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd,
)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Scenario {
    /// HTTP/1 on one connection.
    HttpC1,
    /// HTTP/1 on 16 connections.
    HttpC16,
    /// HTTP/1 on 64 connections.
    HttpC64,
    /// POST of 1 KiB with an echoed body, on 16 connections.
    #[value(name = "post-1k")]
    #[serde(rename = "post-1k")]
    Post1Kib,
    /// POST of 32 KiB with an echoed body, on 16 connections.
    #[value(name = "post-32k")]
    #[serde(rename = "post-32k")]
    Post32Kib,
    /// HTTP/1 with a new connection for each request, 16 at a time; the connections between the sidecars are reused.
    NewHttp,
    /// POST of 1 MiB with an echoed body, on 4 connections.
    #[value(name = "post-1m")]
    #[serde(rename = "post-1m")]
    Post1Mib,
    /// HTTP/2 with 16 concurrent requests on each of 4 connections.
    Http2,
    /// gRPC unary calls, 32 at a time on 4 connections.
    Grpc,
    /// Messages of bidirectional gRPC streams: 100 per stream, with 8 concurrent streams on each of 4 connections.
    GrpcStream,
    /// Opaque TCP: messages of 1 MiB, echoed, on 4 connections.
    Bulk,
    /// Opaque TCP: messages of 64 bytes, echoed, on 50 connections.
    SmallOpaque,
    /// Opaque TCP: a new connection and mutual TLS handshake for each message, 16 at a time.
    NewMtls,
    /// PostgreSQL: pgbench with 8 clients that read one row in each transaction.
    Pgbench,
    /// PostgreSQL: the same with a new connection for each transaction.
    PgbenchConnect,
    /// Redis: redis-benchmark with `GET` on one connection.
    RedisC1,
    /// Redis: the same on 50 connections.
    RedisC50,
    /// Redis: the same on 50 connections, each with 16 requests before it waits for responses.
    RedisPipelined,
    /// Kafka: its producer test with messages of 100 bytes, in batches that the broker acknowledges.
    Kafka,
    /// NATS JetStream: `nats bench` with 8 clients, each with a message of 64 bytes that the server acknowledges.
    Nats,
    /// Memory of 800 idle HTTP/1 connections.
    Idle,
    /// Memory of 800 idle opaque connections.
    IdleOpaque,
    /// HTTP/1 on 16 connections, while 2000 slow clients of each sidecar send one byte of their request headers per second.
    SlowHeads,
    /// A client with 100 requests per second during an attack: 2000 clients with unfinished request headers, 1000 that do not read
    /// a response of 1 MiB, floods of RST_STREAM and CONTINUATION frames, and 100,000 host names.
    Hostile,
    /// HTTP/1 on 64 connections through the client's sidecar only; the server has none.
    OutboundOnly,
    /// HTTP/1 on 64 connections through the server's sidecar only; the client has none.
    InboundOnly,
    /// HTTP/1 on 64 connections without routes, measured directly before the scenarios that are compared with it, because
    /// the speed of the machine varies over time.
    HttpC64Baseline,
    /// HTTP/1 on 64 connections, with routes that have retries, timeouts, a filter and their own authorization.
    Routed,
    /// Like `routed`, with a URLRewrite of host and path.
    Rewritten,
    /// HTTP/1 on 64 connections, with a ServiceProfile that has retries and a timeout.
    Profiled,
    /// HTTP/1 on 64 connections, with sidecars whose application sees the addresses of its clients (mode `tproxy`).
    Tproxy,
    /// Opaque TCP in the mode `tproxy`: a new connection and mutual TLS handshake for each message, 16 at a time.
    TproxyNewMtls,
    /// HTTP/1 on 64 connections, with one worker per sidecar, limited to a quarter of a core.
    #[value(name = "workers-1")]
    #[serde(rename = "workers-1")]
    OneWorker,
    /// HTTP/1 on 64 connections, with two workers per sidecar, each limited to a quarter of a core.
    #[value(name = "workers-2")]
    #[serde(rename = "workers-2")]
    TwoWorkers,
    /// Allocations per request of tulle, measured with a build whose allocator counts.
    Allocations,
}

impl Scenario {
    /// Whether the scenario is measured for a peer.
    pub(super) fn applies_to(self, peer: Peer) -> bool {
        match self {
            Self::Idle | Self::IdleOpaque => peer != Peer::None,
            // nginx has one process per worker, and the measurement supports one process.
            Self::OneWorker | Self::TwoWorkers => !matches!(peer, Peer::None | Peer::Nginx),
            // Without a proxy, the result equals that of the scenario with both sidecars.
            Self::OutboundOnly | Self::InboundOnly => peer != Peer::None,
            // These are measured for tulle only:
            // - Allocations: only tulle has a build whose allocator counts.
            // - SlowHeads: only tulle's timeout of request heads is set, and clients without TLS connect to the server's sidecar.
            // - Hostile: clients without TLS connect to the server's sidecar.
            // - HttpC64Baseline: it is the baseline of Routed, Rewritten and Profiled.
            // - Routed, Rewritten, Profiled: their rules are resources of the mesh.
            // - Tproxy, TproxyNewMtls: they are compared with the same load in the other mode.
            Self::Allocations
            | Self::SlowHeads
            | Self::Hostile
            | Self::HttpC64Baseline
            | Self::Routed
            | Self::Rewritten
            | Self::Profiled
            | Self::Tproxy
            | Self::TproxyNewMtls => peer == Peer::Tulle,
            _ => true,
        }
    }

    pub(super) fn setup(self) -> Setup {
        let opaque = |tcp_app| Setup {
            traffic: Traffic::Opaque,
            tcp_app,
            ..Setup::DEFAULT
        };
        match self {
            Self::HttpC1
            | Self::HttpC16
            | Self::HttpC64
            | Self::Post1Kib
            | Self::Post32Kib
            | Self::NewHttp
            | Self::HttpC64Baseline => Setup::DEFAULT,
            // After this row, HAProxy's connection between the sidecars can stop responding.
            Self::Post1Mib => Setup {
                exclusive: true,
                ..Setup::DEFAULT
            },
            Self::Http2 | Self::Grpc | Self::GrpcStream => Setup {
                traffic: Traffic::Http2,
                ..Setup::DEFAULT
            },
            Self::Bulk | Self::SmallOpaque | Self::NewMtls => opaque(TcpApp::Echo),
            Self::Pgbench | Self::PgbenchConnect => opaque(TcpApp::Postgres),
            Self::RedisC1 | Self::RedisC50 | Self::RedisPipelined => opaque(TcpApp::Redis),
            Self::Kafka => opaque(TcpApp::Kafka),
            Self::Nats => opaque(TcpApp::Nats),
            Self::Idle | Self::Hostile => Setup {
                exclusive: true,
                ..Setup::DEFAULT
            },
            Self::IdleOpaque => Setup {
                traffic: Traffic::Opaque,
                exclusive: true,
                ..Setup::DEFAULT
            },
            Self::SlowHeads => Setup {
                head_timeout: Some(HEAD_TIMEOUT),
                exclusive: true,
                ..Setup::DEFAULT
            },
            Self::OutboundOnly => Setup {
                path: SidecarPath::Outbound,
                ..Setup::DEFAULT
            },
            Self::InboundOnly => Setup {
                path: SidecarPath::Inbound,
                ..Setup::DEFAULT
            },
            Self::Routed => Setup {
                rules: Rules::Routes,
                ..Setup::DEFAULT
            },
            Self::Rewritten => Setup {
                rules: Rules::Rewrite,
                ..Setup::DEFAULT
            },
            Self::Profiled => Setup {
                rules: Rules::Profile,
                ..Setup::DEFAULT
            },
            Self::Tproxy => Setup {
                inbound_mode: InboundMode::Tproxy,
                ..Setup::DEFAULT
            },
            Self::TproxyNewMtls => Setup {
                inbound_mode: InboundMode::Tproxy,
                ..opaque(TcpApp::Echo)
            },
            Self::OneWorker | Self::TwoWorkers => Setup {
                workers: if self == Self::OneWorker { 1 } else { 2 },
                throttle: Some(25),
                ..Setup::DEFAULT
            },
            Self::Allocations => Setup {
                instrumentation: Instrumentation::CountingAllocator,
                ..Setup::DEFAULT
            },
        }
    }

    /// The name on the command line, in the JSON and in `budgets.toml`.
    pub(super) fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Description for the tables.
    pub(super) fn description(self) -> String {
        let value = clap::ValueEnum::to_possible_value(&self);
        let help = value.as_ref().and_then(clap::builder::PossibleValue::get_help);
        help.map_or_else(String::new, ToString::to_string)
    }
}

/// Groups the scenarios by the sidecars that they share, in order.
pub(super) fn group_by_setup(rows: &[Scenario]) -> Vec<Vec<Scenario>> {
    let mut rows = rows.to_vec();
    rows.sort_unstable();
    rows.dedup();
    rows.chunk_by(|a, b| !a.setup().exclusive && a.setup() == b.setup())
        .map(<[Scenario]>::to_vec)
        .collect()
}

/// The timeout of request heads of the sidecars in the scenario `slow-heads`. The default is 30 s.
pub(super) const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn rows_with_equal_setups_share_sidecars() {
        assert_eq!(
            group_by_setup(&[
                Scenario::Idle,
                Scenario::HttpC64,
                Scenario::HttpC64,
                Scenario::Post1Mib,
                Scenario::Grpc,
                Scenario::HttpC1
            ]),
            [
                vec![Scenario::HttpC1, Scenario::HttpC64],
                vec![Scenario::Post1Mib],
                vec![Scenario::Grpc],
                vec![Scenario::Idle]
            ]
        );
        assert_eq!(
            group_by_setup(&[Scenario::Idle, Scenario::IdleOpaque, Scenario::Bulk]).len(),
            3
        );
        assert_eq!(group_by_setup(&[Scenario::OneWorker, Scenario::TwoWorkers]).len(), 2);
    }

    #[test]
    fn rows_have_unique_names_and_a_description() {
        for row in Scenario::value_variants() {
            assert_eq!(serde_json::to_value(row).unwrap(), row.name());
            assert!(!row.description().is_empty(), "{row:?}");
        }
    }
}
