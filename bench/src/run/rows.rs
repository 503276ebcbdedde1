//! What can be measured.

use std::time::Duration;

use super::peer::Peer;
use super::slow;

/// One thing to measure. Rows that need the same sidecars stand together, and run in this order.
#[derive(
    clap::ValueEnum, serde::Serialize, serde::Deserialize, Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd,
)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Row {
    /// HTTP/1 on one connection.
    HttpC1,
    /// HTTP/1 on 16 connections.
    HttpC16,
    /// HTTP/1 on 64 connections.
    HttpC64,
    /// POST of 1 KiB, which comes back, on 16 connections.
    #[value(name = "post-1k")]
    #[serde(rename = "post-1k")]
    Post1Kib,
    /// The same with 32 KiB.
    #[value(name = "post-32k")]
    #[serde(rename = "post-32k")]
    Post32Kib,
    /// HTTP/1 with a new connection for each request, 16 at a time; the sidecars know each other already.
    NewHttp,
    /// POST of 1 MiB, which comes back, on 4 connections.
    #[value(name = "post-1m")]
    #[serde(rename = "post-1m")]
    Post1Mib,
    /// HTTP/2, 16 requests at a time on each of 4 connections.
    Http2,
    /// gRPC unary calls, 32 at a time on 4 connections.
    Grpc,
    /// Messages of gRPC streams in both directions: 100 on each stream, 8 streams at a time on each of 4 connections.
    GrpcStream,
    /// Opaque TCP: messages of 1 MiB echoed on 4 connections.
    Bulk,
    /// Opaque TCP: a new connection, thus a handshake of mutual TLS, for each message; 16 at a time.
    NewMtls,
    /// Memory of 800 idle HTTP/1 connections.
    Idle,
    /// Memory of 800 idle opaque connections.
    IdleOpaque,
    /// HTTP/1 on 16 connections, while 2000 clients of each sidecar send a byte of a head a second.
    SlowHeads,
    /// A client of 100 requests a second among 2000 that never end a head, 1000 that read nothing of 1 MiB, floods of resets and of
    /// header frames, and 100,000 names of hosts.
    Hostile,
    /// HTTP/1 on 64 connections through the client's sidecar alone, to a server that has none.
    OutboundOnly,
    /// HTTP/1 on 64 connections through the server's sidecar alone, from a client that has none.
    InboundOnly,
    /// HTTP/1 on 64 connections without any rules once more, beside the two that are compared with it: the machine of an hour ago
    /// is another one.
    Unruled,
    /// HTTP/1 on 64 connections by routes with retries, timeouts and a filter, and a route's own authorization.
    Routed,
    /// HTTP/1 on 64 connections by a ServiceProfile with retries and a timeout.
    Profiled,
    /// HTTP/1 on 64 connections, with one worker a sidecar that may use a quarter of a core.
    #[value(name = "workers-1")]
    #[serde(rename = "workers-1")]
    OneWorker,
    /// The same with two workers, each of which may use a quarter of a core.
    #[value(name = "workers-2")]
    #[serde(rename = "workers-2")]
    TwoWorkers,
    /// Allocations per request of tulle, by a build of it that counts them.
    Allocations,
}

/// What the sidecars have to carry; they are started for one kind at a time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Traffic {
    Http1,
    /// Also gRPC.
    Http2,
    Opaque,
}

/// Which sidecars there are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Path {
    /// Both, with mutual TLS between them.
    Both,
    Outbound,
    Inbound,
}

/// Which build of tulle, and under what it runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Build {
    Shipped,
    /// The one that counts allocations.
    Counting,
    /// The shipped one, with its instructions counted.
    Callgrind,
}

/// What decides about requests.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Rules {
    Default,
    Routes,
    Profile,
}

/// How sidecars are started.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Setup {
    pub(super) traffic: Traffic,
    pub(super) path: Path,
    pub(super) workers: u16,
    /// Each thread of a sidecar may use this share of a core, in percent: the workers are then what limits the row, also where
    /// they share the machine with the load.
    pub(super) throttle: Option<u16>,
    pub(super) build: Build,
    /// Heads have to come within this time, where it can be told; otherwise all have their defaults.
    pub(super) head_timeout: Option<Duration>,
    /// What there is beside a policy that permits the client.
    pub(super) rules: Rules,
    /// Nothing else is measured with the same processes.
    pub(super) alone: bool,
}

impl Row {
    /// Whether there is anything to measure.
    pub(super) fn applies_to(self, peer: Peer) -> bool {
        match self {
            Self::Idle | Self::IdleOpaque => peer != Peer::None,
            // nginx has a process for each worker, and one process is what is measured.
            Self::OneWorker | Self::TwoWorkers => !matches!(peer, Peer::None | Peer::Nginx),
            // The same as with both for who has none.
            Self::OutboundOnly | Self::InboundOnly => peer != Peer::None,
            // The others wait for as long as anything may take, or know nothing of it.
            Self::Allocations | Self::SlowHeads | Self::Hostile | Self::Unruled | Self::Routed | Self::Profiled => {
                peer == Peer::Tulle
            }
            _ => true,
        }
    }

    pub(super) fn setup(self) -> Setup {
        let both = Setup {
            traffic: Traffic::Http1,
            path: Path::Both,
            workers: 1,
            throttle: None,
            build: Build::Shipped,
            head_timeout: None,
            rules: Rules::Default,
            alone: false,
        };
        match self {
            Self::HttpC1
            | Self::HttpC16
            | Self::HttpC64
            | Self::Post1Kib
            | Self::Post32Kib
            | Self::NewHttp
            | Self::Unruled => both,
            // After it, HAProxy's connection between the sidecars may answer nothing any more.
            Self::Post1Mib => Setup { alone: true, ..both },
            Self::Http2 | Self::Grpc | Self::GrpcStream => Setup {
                traffic: Traffic::Http2,
                ..both
            },
            Self::Bulk | Self::NewMtls => Setup {
                traffic: Traffic::Opaque,
                ..both
            },
            Self::Idle | Self::Hostile => Setup { alone: true, ..both },
            Self::IdleOpaque => Setup {
                traffic: Traffic::Opaque,
                alone: true,
                ..both
            },
            Self::SlowHeads => Setup {
                head_timeout: Some(slow::HEAD_TIMEOUT),
                alone: true,
                ..both
            },
            Self::OutboundOnly => Setup {
                path: Path::Outbound,
                ..both
            },
            Self::InboundOnly => Setup {
                path: Path::Inbound,
                ..both
            },
            Self::Routed => Setup {
                rules: Rules::Routes,
                ..both
            },
            Self::Profiled => Setup {
                rules: Rules::Profile,
                ..both
            },
            Self::OneWorker | Self::TwoWorkers => Setup {
                workers: if self == Self::OneWorker { 1 } else { 2 },
                throttle: Some(25),
                ..both
            },
            Self::Allocations => Setup {
                build: Build::Counting,
                ..both
            },
        }
    }

    /// The name on the command line and in files.
    pub(super) fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// What it is, for readers of tables.
    pub(super) fn help(self) -> String {
        let value = clap::ValueEnum::to_possible_value(&self);
        let help = value.as_ref().and_then(clap::builder::PossibleValue::get_help);
        help.map_or_else(String::new, ToString::to_string)
    }
}

/// Rows that share one start of the sidecars, in their order.
pub(super) fn groups(rows: &[Row]) -> Vec<Vec<Row>> {
    let mut rows = rows.to_vec();
    rows.sort_unstable();
    rows.dedup();
    rows.chunk_by(|a, b| !a.setup().alone && a.setup() == b.setup())
        .map(<[Row]>::to_vec)
        .collect()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn rows_share_sidecars_where_they_can() {
        assert_eq!(
            groups(&[
                Row::Idle,
                Row::HttpC64,
                Row::HttpC64,
                Row::Post1Mib,
                Row::Grpc,
                Row::HttpC1
            ]),
            [
                vec![Row::HttpC1, Row::HttpC64],
                vec![Row::Post1Mib],
                vec![Row::Grpc],
                vec![Row::Idle]
            ]
        );
        assert_eq!(groups(&[Row::Idle, Row::IdleOpaque, Row::Bulk]).len(), 3);
        assert_eq!(groups(&[Row::OneWorker, Row::TwoWorkers]).len(), 2);
    }

    #[test]
    fn rows_have_one_name_and_say_what_they_are() {
        for row in Row::value_variants() {
            assert_eq!(serde_json::to_value(row).unwrap(), row.name());
            assert!(!row.help().is_empty(), "{row:?}");
        }
    }
}
