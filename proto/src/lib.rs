//! The gRPC API between proxies and the control plane, generated from the `.proto` files of this crate.
//!
//! Package names, message names and field numbers are a contract with Linkerd's proxies and control plane. Package
//! `io.linkerd.proxy.<name>` is module `<name>`, and package `transport.l5d.io` is module `transport`. The SPIFFE Workload
//! API, which has no package, is module `workload`. The OpenTelemetry collector is module `trace`, and gRPC health checks
//! are module `health`.

pub mod codec;
pub mod convert;

/// Makes a module from one generated file, without our lints.
macro_rules! generated {
    ($(#[$doc:meta])* $module:ident, $package:literal) => {
        $(#[$doc])*
        #[allow(clippy::all, clippy::or_fun_call, clippy::use_self, clippy::redundant_clone)]
        #[allow(clippy::too_many_lines)]
        #[allow(missing_docs, unreachable_pub, unused_qualifications, elided_lifetimes_in_paths)]
        pub mod $module {
            include!(concat!(env!("OUT_DIR"), "/", $package, ".rs"));
        }
    };
}

generated!(
    /// Endpoints and profiles of destinations.
    destination,
    "io.linkerd.proxy.destination"
);
generated!(
    /// Matches on gRPC calls.
    grpc_route,
    "io.linkerd.proxy.grpc_route"
);
generated!(
    /// gRPC health checks, as the kubelet uses them.
    health,
    "grpc.health.v1"
);
generated!(
    /// Matches on HTTP requests, and filters.
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
    /// Server policies: protocol and authorization of a workload's port.
    inbound,
    "io.linkerd.proxy.inbound"
);
generated!(
    /// The resource behind a decision.
    meta,
    "io.linkerd.proxy.meta"
);
generated!(
    /// Addresses and networks.
    net,
    "io.linkerd.proxy.net"
);
generated!(
    /// Reasons to refuse opaque connections.
    opaque_route,
    "io.linkerd.proxy.opaque_route"
);
generated!(
    /// Client policies: routing, load balancing and retries for a destination.
    outbound,
    "io.linkerd.proxy.outbound"
);
generated!(
    /// A live stream of requests.
    tap,
    "io.linkerd.proxy.tap"
);
generated!(
    /// Matches on TLS connections that are not terminated.
    tls_route,
    "io.linkerd.proxy.tls_route"
);
generated!(
    /// The trace service of OpenTelemetry collectors (OTLP), and its spans.
    trace,
    "opentelemetry.proto.collector.trace.v1"
);
generated!(
    /// The transport header that a proxy sends at the start of a connection to another proxy.
    transport,
    "transport.l5d.io"
);
generated!(
    /// The SPIFFE Workload API, from which a proxy gets its key and certificates. Its workloads are processes, not the pods and
    /// ExternalWorkloads of the mesh.
    workload,
    "_"
);
