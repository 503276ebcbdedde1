//! Declared probes: what an injector takes out of a pod's containers, and the proxy makes in the kubelet's place.
//!
//! A list of them is a variable of the proxy, as JSON; the handler of each is as the manifest has it, so that the manifest can
//! be restored.

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};

use serde::{Deserialize, Serialize};

use crate::names;

/// One probe of one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeclaredProbe {
    pub container: String,
    pub probe: Kind,
    /// The port that the handler names.
    pub port: NonZeroU16,
    /// How long the probe may take, in seconds.
    pub timeout_seconds: NonZeroU32,
    #[serde(flatten)]
    pub handler: Handler,
}

/// What a probe decides about its container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Startup,
    Readiness,
    Liveness,
}

/// How a probe is made, with the names and values of Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Handler {
    /// A TCP connection that is established.
    TcpSocket { port: Port },
    /// `grpc.health.v1.Health/Check` in the clear, answered `SERVING`.
    Grpc {
        port: NonZeroU16,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        service: Option<String>,
    },
    /// A GET over TLS, whose certificate is not verified, with a status from 200 to 399.
    HttpGet {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path: Option<String>,
        port: Port,
        scheme: Scheme,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        http_headers: Vec<Header>,
    },
}

/// A port as a manifest writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Port {
    Number(NonZeroU16),
    Name(String),
}

/// The scheme of the HTTP probes that a proxy makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Scheme {
    Https,
}

/// A header of a probe's request. Values may be credentials, so `Debug` hides them.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    pub name: String,
    #[serde(default)]
    pub value: String,
}

impl DeclaredProbe {
    /// Where the proxy's admin server makes this probe.
    pub fn path(&self) -> String {
        format!("{}{}/{}", names::probes::PATH_PREFIX, self.container, self.probe)
    }
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::Startup, Self::Readiness, Self::Liveness];

    /// The field of a container that declares it.
    pub fn field(self) -> &'static str {
        match self {
            Self::Startup => "startupProbe",
            Self::Readiness => "readinessProbe",
            Self::Liveness => "livenessProbe",
        }
    }
}

impl Handler {
    /// The field of a probe that declares it.
    pub fn field(&self) -> &'static str {
        match self {
            Self::TcpSocket { .. } => "tcpSocket",
            Self::Grpc { .. } => "grpc",
            Self::HttpGet { .. } => "httpGet",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Startup => "startup",
            Self::Readiness => "readiness",
            Self::Liveness => "liveness",
        })
    }
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: …", self.name)
    }
}
