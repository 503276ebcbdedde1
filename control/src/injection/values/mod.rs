//! The configuration of injection: the part of the chart's values that affects a sidecar, with the chart's defaults.
//!
//! It is read from the key `values` of the ConfigMap `linkerd-config`. Without a cluster, a values file or the defaults apply.

mod defaults;
mod schema;

pub(super) use self::defaults::{LINKERD_DEBUG_IMAGE, LINKERD_DEBUG_IMAGE_VERSION};
pub use self::schema::{
    Collector, Constraints, ControlClient, DebugContainer, Identity, Image, InboundMode, IptablesMode, Metrics,
    MountPath, NetworkValidator, Ports, Probe, ProtocolParameters, Proxy, ProxyInit, ProxyInjector, Resources, Runtime,
    ServiceAccount, StartupProbe, StreamTimeouts, Tap, Tracing, Values, ValuesError, Workers,
};
