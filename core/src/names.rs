//! Every string and number that others can see, spelled once.

/// What the TLS handshake offers when a transport header follows it.
pub const TRANSPORT_ALPN: &[u8] = b"transport.l5d.io/v1";

/// The audience that identity tokens must be made for.
pub const TOKEN_AUDIENCE: &str = "identity.l5d.io";

/// HTTP headers that proxies speak to each other and to applications.
pub mod header {
    use http::HeaderName;

    /// The mTLS identity of the client; set by the inbound side, never believed from outside.
    pub const L5D_CLIENT_ID: HeaderName = HeaderName::from_static("l5d-client-id");
    /// The version and form of an HTTP/1 request that travels over HTTP/2.
    pub const L5D_ORIG_PROTO: HeaderName = HeaderName::from_static("l5d-orig-proto");
    /// The logical name of the destination, on the service profile path.
    pub const L5D_DST_CANONICAL: HeaderName = HeaderName::from_static("l5d-dst-canonical");
    /// The identity that the application demands of the server.
    pub const L5D_REQUIRE_ID: HeaderName = HeaderName::from_static("l5d-require-id");
    /// What went wrong, on a response that a proxy made.
    pub const L5D_PROXY_ERROR: HeaderName = HeaderName::from_static("l5d-proxy-error");
    /// Why a request never reached the application: `connect-refused` or `connect-timeout`.
    pub const L5D_PROXY_CAUSE: HeaderName = HeaderName::from_static("l5d-proxy-cause");
    /// `close` asks the peer's proxy to end the connection of its application as well.
    pub const L5D_PROXY_CONNECTION: HeaderName = HeaderName::from_static("l5d-proxy-connection");
    /// The authority to send to, in ingress mode.
    pub const L5D_DST_OVERRIDE: HeaderName = HeaderName::from_static("l5d-dst-override");
    /// Which HTTP statuses this request is retried on.
    pub const L5D_RETRY_HTTP: HeaderName = HeaderName::from_static("l5d-retry-http");
    /// Which gRPC statuses this request is retried on.
    pub const L5D_RETRY_GRPC: HeaderName = HeaderName::from_static("l5d-retry-grpc");
    /// How often this request is retried at most.
    pub const L5D_RETRY_LIMIT: HeaderName = HeaderName::from_static("l5d-retry-limit");
    /// How long one try of this request may take.
    pub const L5D_RETRY_TIMEOUT: HeaderName = HeaderName::from_static("l5d-retry-timeout");
    /// How long this request and its response may take.
    pub const L5D_TIMEOUT: HeaderName = HeaderName::from_static("l5d-timeout");
    /// The older name of [`L5D_TIMEOUT`].
    pub const L5D_REQUEST_TIMEOUT: HeaderName = HeaderName::from_static("l5d-request-timeout");
    /// How long the response may take once the request is sent.
    pub const L5D_RESPONSE_TIMEOUT: HeaderName = HeaderName::from_static("l5d-response-timeout");
}

/// TCP ports of proxies and of the control plane.
pub mod port {
    /// Where the proxy takes connections for its application.
    pub const INBOUND: u16 = 4143;
    /// Where the proxy takes connections of its application.
    pub const OUTBOUND: u16 = 4140;
    /// Where the proxy serves tap.
    pub const TAP: u16 = 4190;
    /// Where the proxy serves metrics and probes.
    pub const ADMIN: u16 = 4191;
    /// Where the control plane signs certificates.
    pub const IDENTITY: u16 = 8080;
    /// Where the control plane serves endpoints and profiles.
    pub const DESTINATION: u16 = 8086;
    /// Where the control plane serves policies.
    pub const POLICY: u16 = 8090;
}

/// Annotations of Kubernetes objects and of their copies in a directory.
pub mod annotation {
    pub const INJECT: &str = "linkerd.io/inject";
    pub const OPAQUE_PORTS: &str = "config.linkerd.io/opaque-ports";
    pub const SKIP_INBOUND_PORTS: &str = "config.linkerd.io/skip-inbound-ports";
    pub const SKIP_OUTBOUND_PORTS: &str = "config.linkerd.io/skip-outbound-ports";
    pub const DEFAULT_INBOUND_POLICY: &str = "config.linkerd.io/default-inbound-policy";
    pub const REQUIRE_IDENTITY_INBOUND_PORTS: &str = "config.linkerd.io/proxy-require-identity-inbound-ports";
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
}

/// Labels of Kubernetes objects and of their copies in a directory.
pub mod label {
    pub const CONTROL_PLANE_NS: &str = "linkerd.io/control-plane-ns";
    pub const WORKLOAD_NS: &str = "linkerd.io/workload-ns";
    pub const ZONE: &str = "topology.kubernetes.io/zone";
    pub const SERVICE_NAME: &str = "kubernetes.io/service-name";
    pub const POD_TEMPLATE_HASH: &str = "pod-template-hash";
    /// The prefix of the labels that name a workload's owner; the owner's kind in lower case follows.
    pub const PROXY_OWNER_PREFIX: &str = "linkerd.io/proxy-";
}
