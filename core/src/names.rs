//! Externally visible names and numbers (headers, ports, annotations, labels), each defined once.

/// The ALPN protocol of a TLS handshake that is followed by a transport header.
pub const TRANSPORT_ALPN: &[u8] = b"transport.l5d.io/v1";

/// The audience of identity tokens.
pub const TOKEN_AUDIENCE: &str = "identity.l5d.io";

/// The metadata key of every request to a SPIFFE Workload API; its value is `true`.
pub const WORKLOAD_API_METADATA: &str = "workload.spiffe.io";

/// HTTP headers between proxies, and between proxies and applications.
pub mod header {
    use http::HeaderName;

    /// The mTLS identity of the client. The inbound proxy sets it and removes values that clients send.
    pub const L5D_CLIENT_ID: HeaderName = HeaderName::from_static("l5d-client-id");
    /// The version and URI form of an HTTP/1 request that is carried over HTTP/2.
    pub const L5D_ORIG_PROTO: HeaderName = HeaderName::from_static("l5d-orig-proto");
    /// The logical name of the destination, for ServiceProfiles.
    pub const L5D_DST_CANONICAL: HeaderName = HeaderName::from_static("l5d-dst-canonical");
    /// The server identity that the application requires.
    pub const L5D_REQUIRE_ID: HeaderName = HeaderName::from_static("l5d-require-id");
    /// The error text of a response that a proxy generates.
    pub const L5D_PROXY_ERROR: HeaderName = HeaderName::from_static("l5d-proxy-error");
    /// The cause of a response that a proxy generates, as a stable code with parameters: [`causes`](crate::causes).
    pub const L5D_PROXY_CAUSE: HeaderName = HeaderName::from_static("l5d-proxy-cause");
    /// `close` asks the peer's proxy to close its application's connection.
    pub const L5D_PROXY_CONNECTION: HeaderName = HeaderName::from_static("l5d-proxy-connection");
    /// The authority to send the request to, in ingress mode.
    pub const L5D_DST_OVERRIDE: HeaderName = HeaderName::from_static("l5d-dst-override");
    /// The HTTP statuses on which this request is retried.
    pub const L5D_RETRY_HTTP: HeaderName = HeaderName::from_static("l5d-retry-http");
    /// The gRPC statuses on which this request is retried.
    pub const L5D_RETRY_GRPC: HeaderName = HeaderName::from_static("l5d-retry-grpc");
    /// The maximum number of retries of this request.
    pub const L5D_RETRY_LIMIT: HeaderName = HeaderName::from_static("l5d-retry-limit");
    /// The timeout of one attempt of this request.
    pub const L5D_RETRY_TIMEOUT: HeaderName = HeaderName::from_static("l5d-retry-timeout");
    /// The timeout of this request and its response.
    pub const L5D_TIMEOUT: HeaderName = HeaderName::from_static("l5d-timeout");
    /// The older name of [`L5D_TIMEOUT`].
    pub const L5D_REQUEST_TIMEOUT: HeaderName = HeaderName::from_static("l5d-request-timeout");
    /// The timeout of the response after the request is sent.
    pub const L5D_RESPONSE_TIMEOUT: HeaderName = HeaderName::from_static("l5d-response-timeout");
    /// Headers that can contain credentials: taps show their names without their values.
    pub const CREDENTIALS: [HeaderName; 4] = [
        http::header::AUTHORIZATION,
        http::header::PROXY_AUTHORIZATION,
        http::header::COOKIE,
        http::header::SET_COOKIE,
    ];
}

/// TCP ports of proxies and of the control plane.
pub mod port {
    /// The proxy's port for connections to its application.
    pub const INBOUND: u16 = 4143;
    /// The proxy's port for connections from its application.
    pub const OUTBOUND: u16 = 4140;
    /// The proxy's port for tap.
    pub const TAP: u16 = 4190;
    /// The proxy's port for metrics and probes.
    pub const ADMIN: u16 = 4191;
    /// The control plane's port for certificate signing.
    pub const IDENTITY: u16 = 8080;
    /// The control plane's port for endpoints and profiles.
    pub const DESTINATION: u16 = 8086;
    /// The control plane's port for policies.
    pub const POLICY: u16 = 8090;
    /// The control plane's port for telemetry.
    pub const TELEMETRY: u16 = 8089;
}

/// Application probes that the proxy makes instead of the kubelet.
pub mod probes {
    /// The proxy's environment variable with the probes, a JSON list of [`DeclaredProbe`](crate::probes::DeclaredProbe).
    pub const VARIABLE: &str = "TULLE_PROXY_PROBES";
    /// The path prefix of the probes on the proxy's admin server; `<container>/<startup|readiness|liveness>` follows.
    ///
    /// The kubelet calls these paths without an identity, as it calls `/live` and `/ready`.
    pub const PATH_PREFIX: &str = "/probes/";
}

/// The telemetry API of the control plane, an aggregated API of Kubernetes.
pub mod telemetry {
    pub const GROUP: &str = "telemetry.tulle.dev";
    pub const VERSION: &str = "v1alpha1";
    /// The name of its APIService object.
    pub const API_SERVICE: &str = "v1alpha1.telemetry.tulle.dev";
    /// Golden metrics of workloads.
    pub const WORKLOADS: &str = "workloads";
    /// Pairs of clients and servers.
    pub const EDGES: &str = "edges";
    /// Golden metrics of routes.
    pub const ROUTES: &str = "routes";
    /// A live stream of requests; supports watch only.
    pub const TAPS: &str = "taps";
}

/// Annotations of Kubernetes objects, and of manifests in a directory.
pub mod annotation {
    pub const INJECT: &str = "linkerd.io/inject";
    /// A common mistake for [`INJECT`]; it has no effect.
    pub const INJECTED_TYPO: &str = "linkerd.io/injected";
    pub const CREATED_BY: &str = "linkerd.io/created-by";
    pub const PROXY_VERSION: &str = "linkerd.io/proxy-version";
    pub const TRUST_ROOT_SHA256: &str = "linkerd.io/trust-root-sha256";
    pub const DISABLE_TAP: &str = "viz.linkerd.io/disable-tap";
    /// `disabled` on a namespace exempts it from all admission webhooks.
    pub const ADMISSION_WEBHOOKS: &str = "config.linkerd.io/admission-webhooks";
    pub const OPAQUE_PORTS: &str = "config.linkerd.io/opaque-ports";
    pub const SKIP_INBOUND_PORTS: &str = "config.linkerd.io/skip-inbound-ports";
    pub const SKIP_OUTBOUND_PORTS: &str = "config.linkerd.io/skip-outbound-ports";
    /// `tproxy` preserves the client's address for the application. Not in Linkerd.
    pub const INBOUND_MODE: &str = "config.tulle.dev/inbound-mode";
    /// `allow` lets inbound IPv6 bypass the proxy where IPv6 is not redirected. Not in Linkerd.
    pub const UNREDIRECTED_IPV6: &str = "config.tulle.dev/unredirected-ipv6";
    /// `false` leaves all probes as they are declared. Not in Linkerd.
    pub const REWRITE_PROBES: &str = "config.tulle.dev/rewrite-probes";
    pub const DEFAULT_INBOUND_POLICY: &str = "config.linkerd.io/default-inbound-policy";
    pub const REQUIRE_IDENTITY_INBOUND_PORTS: &str = "config.linkerd.io/proxy-require-identity-inbound-ports";
    pub const ACCESS_LOG: &str = "config.linkerd.io/access-log";
    pub const ADMIN_PORT: &str = "config.linkerd.io/admin-port";
    pub const CLOSE_WAIT_TIMEOUT: &str = "config.linkerd.io/close-wait-timeout";
    pub const CONTROL_PORT: &str = "config.linkerd.io/control-port";
    pub const DEBUG_IMAGE: &str = "config.linkerd.io/debug-image";
    pub const DEBUG_IMAGE_PULL_POLICY: &str = "config.linkerd.io/debug-image-pull-policy";
    pub const DEBUG_IMAGE_VERSION: &str = "config.linkerd.io/debug-image-version";
    pub const ENABLE_DEBUG_SIDECAR: &str = "config.linkerd.io/enable-debug-sidecar";
    pub const ENABLE_EXTERNAL_PROFILES: &str = "config.linkerd.io/enable-external-profiles";
    pub const ENABLE_GATEWAY: &str = "config.linkerd.io/enable-gateway";
    pub const IMAGE_PULL_POLICY: &str = "config.linkerd.io/image-pull-policy";
    pub const INBOUND_PORT: &str = "config.linkerd.io/inbound-port";
    pub const OUTBOUND_PORT: &str = "config.linkerd.io/outbound-port";
    pub const POD_INBOUND_PORTS: &str = "config.linkerd.io/pod-inbound-ports";
    pub const PROXY_ADDITIONAL_ENV: &str = "config.linkerd.io/proxy-additional-env";
    pub const PROXY_ADMIN_SHUTDOWN: &str = "config.linkerd.io/proxy-admin-shutdown";
    pub const PROXY_AWAIT: &str = "config.linkerd.io/proxy-await";
    pub const PROXY_CPU_LIMIT: &str = "config.linkerd.io/proxy-cpu-limit";
    pub const PROXY_CPU_RATIO_LIMIT: &str = "config.linkerd.io/proxy-cpu-ratio-limit";
    pub const PROXY_CPU_REQUEST: &str = "config.linkerd.io/proxy-cpu-request";
    pub const PROXY_DISABLE_INBOUND_DETECT_TIMEOUT: &str =
        "config.linkerd.io/proxy-disable-inbound-protocol-detect-timeout";
    pub const PROXY_DISABLE_OUTBOUND_DETECT_TIMEOUT: &str =
        "config.linkerd.io/proxy-disable-outbound-protocol-detect-timeout";
    pub const PROXY_ENABLE_NATIVE_SIDECAR: &str = "config.linkerd.io/proxy-enable-native-sidecar";
    pub const PROXY_EPHEMERAL_STORAGE_LIMIT: &str = "config.linkerd.io/proxy-ephemeral-storage-limit";
    pub const PROXY_EPHEMERAL_STORAGE_REQUEST: &str = "config.linkerd.io/proxy-ephemeral-storage-request";
    pub const PROXY_GID: &str = "config.linkerd.io/proxy-gid";
    pub const PROXY_IMAGE: &str = "config.linkerd.io/proxy-image";
    pub const PROXY_INBOUND_CONNECT_TIMEOUT: &str = "config.linkerd.io/proxy-inbound-connect-timeout";
    pub const PROXY_INBOUND_DISCOVERY_CACHE_TIMEOUT: &str =
        "config.linkerd.io/proxy-inbound-discovery-cache-unused-timeout";
    pub const PROXY_LOG_FORMAT: &str = "config.linkerd.io/proxy-log-format";
    pub const PROXY_LOG_HTTP_HEADERS: &str = "config.linkerd.io/proxy-log-http-headers";
    pub const PROXY_LOG_LEVEL: &str = "config.linkerd.io/proxy-log-level";
    pub const PROXY_MEMORY_LIMIT: &str = "config.linkerd.io/proxy-memory-limit";
    pub const PROXY_MEMORY_REQUEST: &str = "config.linkerd.io/proxy-memory-request";
    pub const PROXY_METRICS_HOSTNAME_LABELS: &str = "config.linkerd.io/proxy-metrics-hostname-labels";
    pub const PROXY_OUTBOUND_CONNECT_TIMEOUT: &str = "config.linkerd.io/proxy-outbound-connect-timeout";
    pub const PROXY_OUTBOUND_DISCOVERY_CACHE_TIMEOUT: &str =
        "config.linkerd.io/proxy-outbound-discovery-cache-unused-timeout";
    pub const PROXY_UID: &str = "config.linkerd.io/proxy-uid";
    pub const PROXY_VERSION_OVERRIDE: &str = "config.linkerd.io/proxy-version";
    pub const SHUTDOWN_GRACE_PERIOD: &str = "config.linkerd.io/shutdown-grace-period";
    pub const SKIP_SUBNETS: &str = "config.linkerd.io/skip-subnets";
    pub const ALPHA_ENABLE_NATIVE_SIDECAR: &str = "config.alpha.linkerd.io/proxy-enable-native-sidecar";
    pub const BETA_ENABLE_NATIVE_SIDECAR: &str = "config.beta.linkerd.io/proxy-enable-native-sidecar";
    pub const ALPHA_WAIT_BEFORE_EXIT_SECONDS: &str = "config.alpha.linkerd.io/proxy-wait-before-exit-seconds";
    /// The prefix of trace attributes; the attribute's name follows.
    pub const TRACE_RESOURCE_PREFIX: &str = "resource.opentelemetry.io/";
    pub const RETRY_HTTP: &str = "retry.linkerd.io/http";
    pub const RETRY_GRPC: &str = "retry.linkerd.io/grpc";
    pub const RETRY_LIMIT: &str = "retry.linkerd.io/limit";
    pub const RETRY_TIMEOUT: &str = "retry.linkerd.io/timeout";
    pub const TIMEOUT_REQUEST: &str = "timeout.linkerd.io/request";
    pub const TIMEOUT_RESPONSE: &str = "timeout.linkerd.io/response";
    pub const TIMEOUT_IDLE: &str = "timeout.linkerd.io/idle";
    pub const FAILURE_ACCRUAL: &str = "balancer.linkerd.io/failure-accrual";
    pub const CONSECUTIVE_MAX_FAILURES: &str = "balancer.linkerd.io/failure-accrual-consecutive-max-failures";
    pub const CONSECUTIVE_MAX_PENALTY: &str = "balancer.linkerd.io/failure-accrual-consecutive-max-penalty";
    pub const CONSECUTIVE_MIN_PENALTY: &str = "balancer.linkerd.io/failure-accrual-consecutive-min-penalty";
    pub const CONSECUTIVE_JITTER_RATIO: &str = "balancer.linkerd.io/failure-accrual-consecutive-jitter-ratio";
    pub const SUCCESS_RATE_THRESHOLD: &str = "balancer.alpha.linkerd.io/failure-accrual-success-rate-threshold";
    pub const SUCCESS_RATE_WINDOW: &str = "balancer.alpha.linkerd.io/failure-accrual-success-rate-window";
    pub const SUCCESS_RATE_MIN_REQUESTS: &str = "balancer.alpha.linkerd.io/failure-accrual-success-rate-min-requests";
    pub const HONOR_RETRY_AFTER: &str = "balancer.alpha.linkerd.io/failure-accrual-honor-retry-after";
    pub const PENALIZE_FAILURES: &str = "balancer.alpha.linkerd.io/penalize-failures";
    pub const LOAD_BIASER_PENALTY: &str = "balancer.alpha.linkerd.io/load-biaser-penalty";
    pub const LOAD_BIASER_MAX_RETRY_AFTER: &str = "balancer.alpha.linkerd.io/load-biaser-max-retry-after";
    /// The name of the Service in its own cluster, on the Endpoints of its mirror.
    pub const REMOTE_SERVICE_NAME: &str = "mirror.linkerd.io/remote-svc-fq-name";
    /// The identity of the gateway to which the addresses of a mirror belong.
    pub const REMOTE_GATEWAY_IDENTITY: &str = "mirror.linkerd.io/remote-gateway-identity";
}

/// Labels of Kubernetes objects, and of manifests in a directory.
pub mod label {
    pub const CONTROL_PLANE_NS: &str = "linkerd.io/control-plane-ns";
    pub const WORKLOAD_NS: &str = "linkerd.io/workload-ns";
    /// On the control plane's own pods and services, which are never injected.
    pub const CONTROL_PLANE_COMPONENT: &str = "linkerd.io/control-plane-component";
    pub const CNI_RESOURCE: &str = "linkerd.io/cni-resource";
    pub const APP_INSTANCE: &str = "app.kubernetes.io/instance";
    pub const APP_NAME: &str = "app.kubernetes.io/name";
    /// The label that the API server sets on each namespace.
    pub const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";
    pub const ZONE: &str = "topology.kubernetes.io/zone";
    pub const SERVICE_NAME: &str = "kubernetes.io/service-name";
    pub const HEADLESS: &str = "service.kubernetes.io/headless";
    pub const SLICE_MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
    pub const POD_TEMPLATE_HASH: &str = "pod-template-hash";
    /// The prefix of the labels with a workload's owner; the owner's kind in lower case follows.
    pub const PROXY_OWNER_PREFIX: &str = "linkerd.io/proxy-";
    /// The name of the mirrored cluster.
    pub const MIRRORED_CLUSTER: &str = "mirror.linkerd.io/cluster-name";
}
