//! A server of the table.

use tulle_tests::images::Image;

/// A server: how its pod runs it, and what its clients do. All scripts are for bash.
#[derive(Clone, Copy)]
pub(super) struct Server {
    /// The name of the StatefulSet and the Service.
    pub(super) name: &'static str,
    pub(super) image: Image,
    pub(super) user: u32,
    /// The port that clients of this server use by default.
    pub(super) port: u16,
    /// Another port, if `port` is in the chart's list of opaque ports. No such list has this one.
    pub(super) unlisted_port: Option<u16>,
    /// Starts the server on `$PORT`, with its files below `/data`.
    pub(super) start: &'static str,
    pub(super) readiness: Readiness,
    /// Prints the version of the server.
    pub(super) version: &'static str,
    /// Definitions before each script of a client. The name of the server is in `$host` and its port in `$port`.
    pub(super) client: &'static str,
    pub(super) query: Script,
    /// A query with little work, for many connections. `None`: the same as `query`.
    pub(super) small_query: Option<Script>,
    /// Writes and reads 10 MiB.
    pub(super) large: Option<Script>,
    /// Uses a connection before and after `sleep $idle`.
    pub(super) idle: Option<Script>,
    /// Scenes that only this server has.
    pub(super) own_scenes: &'static [(&'static str, Script)],
    /// Whether clients need an address of the pod, because they connect to more than one port.
    pub(super) needs_pod_addr: bool,
    /// The number of pods.
    pub(super) members: u8,
    pub(super) inbound_mode: InboundMode,
    /// Its output shows that all members know each other.
    pub(super) formation_check: Script,
    pub(super) writer: Option<Writer>,
    /// What happens to a cluster while the writer writes to it.
    pub(super) disturbances: &'static [Disturbance],
}

/// How the program `writer` writes to a cluster while its members are disturbed.
#[derive(Clone, Copy)]
pub(super) struct Writer {
    /// The first argument of the program.
    pub(super) kind: &'static str,
    pub(super) port: u16,
    /// A script that prints the pod whose loss stops writes. What is written has the name `$name`.
    pub(super) leader: &'static str,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Disturbance {
    ControlPlaneGone,
    /// The sidecar of the leader is killed. Outside of the mesh nothing happens.
    SidecarKilled,
    Rollout,
    LeaderKilled,
    /// The leader's pod is deleted at once, so that nobody has its address.
    PodDeleted,
    NodeDrained,
}

impl Disturbance {
    pub(super) const ALL: [Self; 6] = [
        Self::ControlPlaneGone,
        Self::SidecarKilled,
        Self::Rollout,
        Self::LeaderKilled,
        Self::PodDeleted,
        Self::NodeDrained,
    ];

    pub(super) fn scene(self) -> &'static str {
        match self {
            Self::ControlPlaneGone => "control plane gone for 15 s",
            Self::SidecarKilled => "sidecar of the leader killed",
            Self::Rollout => "rolling restart",
            Self::LeaderKilled => "leader killed",
            Self::PodDeleted => "leader's pod deleted by force",
            Self::NodeDrained => "node drained",
        }
    }
}

/// How the sidecar of a server hands connections to it.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum InboundMode {
    /// The server sees the sidecar as its client. The default.
    Redirect,
    /// The server sees the address of its client.
    Tproxy,
}

/// The readiness probe of the usual chart of a server.
#[derive(Clone, Copy)]
pub(super) enum Readiness {
    /// Connects to the port of the server.
    Tcp,
    /// Gets a path from a port, or from that of the server.
    Http(&'static str, Option<u16>),
    Script(&'static str),
    /// No probe: the pod counts as ready as soon as its containers run.
    None,
}

/// A script and its expected standard output.
#[derive(Clone, Copy)]
pub(super) struct Script {
    pub(super) run: &'static str,
    pub(super) prints: &'static str,
}

pub(super) const fn script(run: &'static str, prints: &'static str) -> Script {
    Script { run, prints }
}

impl Server {
    /// What most servers have in common. Each server sets the other fields.
    pub(super) const DEFAULT: Self = Self {
        name: "",
        image: Image::Databases,
        user: 1000,
        port: 0,
        unlisted_port: None,
        start: "",
        readiness: Readiness::Tcp,
        version: "",
        client: "",
        query: script("", ""),
        small_query: None,
        large: None,
        idle: None,
        own_scenes: &[],
        needs_pod_addr: false,
        members: 1,
        inbound_mode: InboundMode::Redirect,
        formation_check: script("", ""),
        writer: None,
        disturbances: &Disturbance::ALL,
    };
}

/// The output of the scripts that write and read 10 MiB.
pub(super) const TEN_MIB: &str = "10485760";
