//! The wire API between proxies and the control plane, generated from the `.proto` files beside this crate.
//!
//! Package names, message names and field numbers are a contract with proxies and control planes that are not ours.
//! Package `io.linkerd.proxy.<name>` is module `<name>`; package `transport.l5d.io` is module `transport`, what has no
//! package, the SPIFFE Workload API, is module `workload`, the collector of OpenTelemetry is module `trace`, and gRPC's health
//! checks are module `health`.

pub mod codec;
pub mod convert;

/// Makes a module of one generated file, which our lints do not judge.
macro_rules! generated {
    ($(#[$doc:meta])* $module:ident, $package:literal) => {
        $(#[$doc])*
        #[allow(clippy::all, clippy::or_fun_call, clippy::use_self, clippy::redundant_clone)]
        #[allow(missing_docs, unreachable_pub, unused_qualifications, elided_lifetimes_in_paths)]
        pub mod $module {
            include!(concat!(env!("OUT_DIR"), "/", $package, ".rs"));
        }
    };
}

generated!(
    /// Where a destination's endpoints are, and what its profile says.
    destination,
    "io.linkerd.proxy.destination"
);
generated!(
    /// How gRPC calls are matched.
    grpc_route,
    "io.linkerd.proxy.grpc_route"
);
generated!(
    /// Whether a gRPC server's services are up, as applications tell the kubelet.
    health,
    "grpc.health.v1"
);
generated!(
    /// How HTTP requests are matched and changed.
    http_route,
    "io.linkerd.proxy.http_route"
);
generated!(
    /// Methods, schemes and headers.
    http_types,
    "io.linkerd.proxy.http_types"
);
generated!(
    /// Certificates for workloads.
    identity,
    "io.linkerd.proxy.identity"
);
generated!(
    /// What a workload's port speaks, and who may reach it.
    inbound,
    "io.linkerd.proxy.inbound"
);
generated!(
    /// Which resource stands behind a decision.
    meta,
    "io.linkerd.proxy.meta"
);
generated!(
    /// Addresses and networks.
    net,
    "io.linkerd.proxy.net"
);
generated!(
    /// Why connections of bytes are refused.
    opaque_route,
    "io.linkerd.proxy.opaque_route"
);
generated!(
    /// How traffic to a destination is routed, balanced and retried.
    outbound,
    "io.linkerd.proxy.outbound"
);
generated!(
    /// A live view of requests.
    tap,
    "io.linkerd.proxy.tap"
);
generated!(
    /// How TLS connections that stay encrypted are matched.
    tls_route,
    "io.linkerd.proxy.tls_route"
);
generated!(
    /// Spans of traces, for collectors of OpenTelemetry.
    trace,
    "opentelemetry.proto.collector.trace.v1"
);
generated!(
    /// What proxies tell each other before the bytes of a connection.
    transport,
    "transport.l5d.io"
);
generated!(
    /// Keys and certificates from a SPIFFE Workload API.
    workload,
    "_"
);
