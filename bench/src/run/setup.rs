//! The sidecars of a measurement: their kind, their position on the path of a request, and their configuration.

use std::time::Duration;

use serde::Serialize;

/// A kind of sidecar that is compared with others. In this crate, a peer is not the other end of a connection.
#[derive(clap::ValueEnum, serde::Serialize, serde::Deserialize, Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Peer {
    /// tulle as in its images: built with profile-guided optimization.
    Tulle,
    /// tulle, built without profile-guided optimization.
    TulleNoProfile,
    Haproxy,
    Nginx,
    Envoy,
    /// No proxy: the maximum that the client and the application reach.
    None,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Side {
    Client,
    Server,
}

impl Side {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

/// The protocol that the sidecars carry. They are started for one protocol at a time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Traffic {
    Http1,
    /// HTTP/2, including gRPC.
    Http2,
    Opaque,
}

/// The sidecars on the path of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum SidecarPath {
    /// Both sidecars, with mutual TLS between them.
    Both,
    Outbound,
    Inbound,
}

/// How inbound connections reach tulle's sidecars.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum InboundMode {
    Redirect,
    /// The application sees the addresses of its clients.
    Tproxy,
}

impl InboundMode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Redirect => "redirect",
            Self::Tproxy => "tproxy",
        }
    }
}

/// The application at the opaque port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum TcpApp {
    /// Our own, which sends all bytes back.
    Echo,
    Postgres,
    Redis,
    Kafka,
    /// With JetStream.
    Nats,
}

/// How the instructions or allocations of tulle are counted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Instrumentation {
    /// They are not counted: the program runs as it is shipped.
    None,
    /// The build whose allocator counts.
    CountingAllocator,
    /// The program runs under callgrind.
    Callgrind,
}

/// The routing rules of a scenario.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Rules {
    /// Only the policy that permits the client.
    None,
    Routes,
    Rewrite,
    Profile,
}

/// The configuration of the sidecars of a scenario.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Setup {
    pub(super) traffic: Traffic,
    pub(super) path: SidecarPath,
    pub(super) workers: u16,
    /// CPU limit of each thread of a sidecar, in percent of a core. With it, the workers are the bottleneck, although the load
    /// generator uses the same cores.
    pub(super) throttle: Option<u16>,
    pub(super) instrumentation: Instrumentation,
    /// Timeout of request heads, only for tulle. `None` keeps the default.
    pub(super) head_timeout: Option<Duration>,
    /// Rules in addition to the policy that permits the client.
    pub(super) rules: Rules,
    pub(super) inbound_mode: InboundMode,
    pub(super) tcp_app: TcpApp,
    /// Whether the sidecars are started for this scenario only.
    pub(super) exclusive: bool,
}

impl Setup {
    /// HTTP/1 through both sidecars, without rules.
    pub(super) const DEFAULT: Self = Self {
        traffic: Traffic::Http1,
        path: SidecarPath::Both,
        workers: 1,
        throttle: None,
        instrumentation: Instrumentation::None,
        head_timeout: None,
        rules: Rules::None,
        inbound_mode: InboundMode::Redirect,
        tcp_app: TcpApp::Echo,
        exclusive: false,
    };
}

/// The name of a value in JSON.
pub(super) fn json_name(value: impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        other => format!("{other:?}"),
    }
}
