//! Probes that the proxy executes for the kubelet. The injector replaces such a probe in the manifest by an HTTP request to the
//! proxy's admin port, and the proxy executes the original probe for each such request.
//!
//! The proxy receives the original probes as a JSON list in an environment variable. The list has their handlers as they were written,
//! so that the manifest can be restored.
//! Plain HTTP probes are not among them: the kubelet sends them to the application, through the proxy.

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};

use serde::{Deserialize, Serialize};

use crate::names;

/// One probe of one container, as in its manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OriginalProbe {
    pub container: String,
    #[serde(rename = "probe")]
    pub kind: Kind,
    /// The number of the handler's port, which the injector has resolved if the handler names it.
    pub port: NonZeroU16,
    /// The timeout of the probe, in seconds.
    pub timeout_seconds: NonZeroU32,
    #[serde(flatten)]
    pub handler: Handler,
}

/// The kind of a probe, as in Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Startup,
    Readiness,
    Liveness,
}

/// The handler of a probe, with the field names and values of Kubernetes. An `exec` handler is not rewritten.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Handler {
    /// Succeeds if a TCP connection is established.
    TcpSocket { port: Port },
    /// Succeeds if `grpc.health.v1.Health/Check` in plaintext returns `SERVING`.
    Grpc {
        port: NonZeroU16,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        service: Option<String>,
    },
    /// Succeeds if a GET over TLS returns a status from 200 to 399; the certificate is not verified.
    HttpGet {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path: Option<String>,
        port: Port,
        scheme: Scheme,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        http_headers: Vec<Header>,
    },
}

/// A port as in a manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Port {
    Number(NonZeroU16),
    Name(String),
}

/// The scheme of rewritten HTTP probes: HTTPS only, see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Scheme {
    Https,
}

/// A header of a probe's request. Values can be credentials, so `Debug` hides them.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    pub name: String,
    #[serde(default)]
    pub value: String,
}

impl OriginalProbe {
    /// The path of this probe on the proxy's admin server.
    pub fn path(&self) -> String {
        format!("{}{}/{}", names::probes::PATH_PREFIX, self.container, self.kind)
    }
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::Startup, Self::Readiness, Self::Liveness];

    /// The container field of a probe of this kind.
    pub fn field(self) -> &'static str {
        match self {
            Self::Startup => "startupProbe",
            Self::Readiness => "readinessProbe",
            Self::Liveness => "livenessProbe",
        }
    }
}

impl Handler {
    /// The probe field that contains this handler.
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
