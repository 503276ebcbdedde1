//! Annotations of Kubernetes objects, and of manifests in a directory.

/// An annotation with its documentation. Texts are Markdown, for a cell of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// The whole name, or its prefix if there is a `placeholder`.
    pub name: &'static str,
    /// The word for the rest of the name if `name` is a prefix, otherwise empty.
    pub placeholder: &'static str,
    /// The kinds of objects on which it is read, or on which tulle writes it. Pod includes the pod templates of workloads.
    /// The value on a Namespace applies to those of its pods that do not have the annotation.
    pub objects: &'static str,
    /// The accepted values.
    pub values: &'static str,
    /// What applies without the annotation: a literal, the name of the chart's value, or `none`.
    pub default: &'static str,
    pub meaning: &'static str,
}

/// Declares the constants and [`ALL`] from one table, so that there is no name without documentation.
macro_rules! annotations {
    ($($constant:ident = $name:literal $(+ $placeholder:literal)? {
        objects: $objects:literal,
        values: $values:expr,
        default: $default:literal,
        meaning: $meaning:literal,
    })*) => {
        $(
            #[doc = $meaning]
            pub const $constant: &str = $name;
        )*

        /// All annotations, in the order of the documentation.
        pub const ALL: &[Annotation] = &[$(
            Annotation {
                name: $constant,
                placeholder: concat!($($placeholder)?),
                objects: $objects,
                values: $values,
                default: $default,
                meaning: $meaning,
            },
        )*];
    };
}

annotations! {
    INJECT = "linkerd.io/inject" {
        objects: "Namespace, Pod",
        values: "`enabled`, `ingress` or `disabled`",
        default: "`disabled`",
        meaning: "Adds the proxy to new pods. With `ingress`, the proxy routes requests by the header \
                  `l5d-dst-override`.",
    }

    // Redirection
    SKIP_INBOUND_PORTS = "config.linkerd.io/skip-inbound-ports" {
        objects: "Namespace, Pod",
        values: PORTS_OF_POD,
        default: "`proxyInit.ignoreInboundPorts`",
        meaning: "Ports whose inbound connections bypass the proxy: their traffic is neither encrypted nor authorized.",
    }
    SKIP_OUTBOUND_PORTS = "config.linkerd.io/skip-outbound-ports" {
        objects: "Namespace, Pod",
        values: "ports and ranges of ports, such as `25,8000-8100`",
        default: "`proxyInit.ignoreOutboundPorts`",
        meaning: "Destination ports of outbound connections that bypass the proxy.",
    }
    SKIP_SUBNETS = "config.linkerd.io/skip-subnets" {
        objects: "Namespace, Pod",
        values: "networks such as `10.0.0.0/8,fd00::/8`",
        default: "`proxyInit.skipSubnets`",
        meaning: "Networks of clients whose inbound connections bypass the proxy.",
    }
    INBOUND_MODE = "config.tulle.dev/inbound-mode" {
        objects: "Namespace, Pod",
        values: "`redirect` or `tproxy`",
        default: "`proxy.inboundMode`",
        meaning: "How inbound connections reach the proxy; `tproxy` preserves the client's address for the \
                  application. Not in Linkerd.",
    }
    UNREDIRECTED_IPV6 = "config.tulle.dev/unredirected-ipv6" {
        objects: "Namespace, Pod",
        values: "`drop` or `allow`",
        default: "`proxyInit.unredirectedIPv6`",
        meaning: "What happens to inbound IPv6 connections where IPv6 is not redirected; `allow` lets them bypass the \
                  proxy. Not in Linkerd.",
    }
    CLOSE_WAIT_TIMEOUT = "config.linkerd.io/close-wait-timeout" {
        objects: "Pod",
        values: GO_DURATION,
        default: "`proxyInit.closeWaitTimeoutSecs`",
        meaning: "Conntrack timeout of half-closed connections; fractions of a second are dropped. It needs the value \
                  `proxyInit.runAsRoot` to be true.",
    }

    // Protocols and policies
    OPAQUE_PORTS = "config.linkerd.io/opaque-ports" {
        objects: "Namespace, Pod, ExternalWorkload, Service, EgressNetwork",
        values: "ports, ranges of ports and names of ports that the object declares, such as `3306,8000-8100,mysql`; \
                 an EgressNetwork accepts no names; an empty value means no ports",
        default: "`proxy.opaquePorts`",
        meaning: "Ports whose bytes the proxy carries without protocol detection, whatever the `appProtocol` of a \
                  Service's port. The injector adds this annotation to pods and Services that do not have it.",
    }
    DEFAULT_INBOUND_POLICY = "config.linkerd.io/default-inbound-policy" {
        objects: "Namespace, Pod, ExternalWorkload",
        values: "`all-unauthenticated`, `all-authenticated`, `cluster-unauthenticated`, `cluster-authenticated`, \
                 `deny` or `audit`",
        default: "`proxy.defaultInboundPolicy`",
        meaning: "The policy of ports that no Server selects. With an invalid value, the injector refuses new pods, \
                  and the policy of existing pods and of ExternalWorkloads is `deny`.",
    }
    REQUIRE_IDENTITY_INBOUND_PORTS = "config.linkerd.io/proxy-require-identity-inbound-ports" {
        objects: "Namespace, Pod, ExternalWorkload",
        values: PORTS_OF_POD,
        default: "`proxy.requireIdentityOnInboundPorts`",
        meaning: "Ports that only meshed clients can use, where no Server selects the port. With an invalid entry, the \
                  injector refuses new pods, and on existing pods and ExternalWorkloads, the policy of ports that \
                  are neither listed nor selected by a Server is `deny`.",
    }
    PROXY_DISABLE_INBOUND_DETECT_TIMEOUT = "config.linkerd.io/proxy-disable-inbound-protocol-detect-timeout" {
        objects: "Namespace, Pod",
        values: BOOLEAN,
        default: "`proxy.disableInboundProtocolDetectTimeout`",
        meaning: "Inbound protocol detection waits for the first bytes without a timeout.",
    }
    PROXY_DISABLE_OUTBOUND_DETECT_TIMEOUT = "config.linkerd.io/proxy-disable-outbound-protocol-detect-timeout" {
        objects: "Namespace, Pod",
        values: BOOLEAN,
        default: "`proxy.disableOutboundProtocolDetectTimeout`",
        meaning: "Outbound protocol detection waits for the first bytes without a timeout.",
    }
    ENABLE_EXTERNAL_PROFILES = "config.linkerd.io/enable-external-profiles" {
        objects: "Namespace, Pod",
        values: BOOLEAN,
        default: "`proxy.enableExternalProfiles`",
        meaning: "The proxy looks up profiles of all names, not only of those of the cluster.",
    }
    ENABLE_GATEWAY = "config.linkerd.io/enable-gateway" {
        objects: "Pod",
        values: BOOLEAN,
        default: "`proxy.isGateway`",
        meaning: "The proxy is a gateway: it forwards requests of meshed peers in other networks to Services of its own cluster.",
    }
    GATEWAY_EXPORTED_SERVICES = "config.tulle.dev/gateway-exported-services" {
        objects: "Pod",
        values: "a label selector of at most 256 characters, such as `mirror.linkerd.io/exported` or \
                 `team in (a,b),!internal`; an empty value means all Services",
        default: "none",
        meaning: "The Services that a gateway serves to other clusters, by their labels; without it, all. The value \
                  `gateway.exportedServices` of `tulle-multicluster` sets it. With an invalid value, the injector refuses \
                  new pods. Not in Linkerd.",
    }
    REWRITE_PROBES = "config.tulle.dev/rewrite-probes" {
        objects: "Namespace, Pod",
        values: BOOLEAN,
        default: "`true`",
        meaning: "Replaces `tcpSocket`, `grpc` and HTTPS probes by a request to the proxy, which executes the original \
                  probe; `false` leaves them unchanged. Not in Linkerd.",
    }

    // The proxy
    PROXY_IMAGE = "config.linkerd.io/proxy-image" {
        objects: "Namespace, Pod",
        values: "the name of an image, without a tag",
        default: "`proxy.image.name`",
        meaning: "The image of the proxy, and of the init container and the network validator.",
    }
    PROXY_VERSION_OVERRIDE = "config.linkerd.io/proxy-version" {
        objects: "Namespace, Pod",
        values: "the tag of an image, with or without a digest",
        default: "`proxy.image.version`",
        meaning: "The version of the proxy's image.",
    }
    IMAGE_PULL_POLICY = "config.linkerd.io/image-pull-policy" {
        objects: "Namespace, Pod",
        values: PULL_POLICY,
        default: "`proxy.image.pullPolicy`",
        meaning: "The pull policy of the proxy's image.",
    }
    PROXY_ENABLE_NATIVE_SIDECAR = "config.linkerd.io/proxy-enable-native-sidecar" {
        objects: "Namespace, Pod",
        values: BOOLEAN,
        default: "`proxy.nativeSidecar`",
        meaning: "The proxy is a native sidecar: an init container with the restart policy `Always`.",
    }
    BETA_ENABLE_NATIVE_SIDECAR = "config.beta.linkerd.io/proxy-enable-native-sidecar" {
        objects: "Pod",
        values: BOOLEAN,
        default: "`proxy.nativeSidecar`",
        meaning: "Older name of `config.linkerd.io/proxy-enable-native-sidecar`. If both are set, \
                  `config.linkerd.io/proxy-enable-native-sidecar` applies.",
    }
    ALPHA_ENABLE_NATIVE_SIDECAR = "config.alpha.linkerd.io/proxy-enable-native-sidecar" {
        objects: "Namespace, Pod",
        values: BOOLEAN,
        default: "`proxy.nativeSidecar`",
        meaning: "Older name of `config.linkerd.io/proxy-enable-native-sidecar`. If that or the `config.beta` name is \
                  set too, this one has no effect.",
    }
    PROXY_AWAIT = "config.linkerd.io/proxy-await" {
        objects: "Namespace, Pod",
        values: "`enabled` or `disabled`",
        default: "`proxy.await`",
        meaning: "The containers of the pod start after the proxy is ready.",
    }
    ALPHA_WAIT_BEFORE_EXIT_SECONDS = "config.alpha.linkerd.io/proxy-wait-before-exit-seconds" {
        objects: "Namespace, Pod",
        values: "a number of seconds",
        default: "`proxy.waitBeforeExitSeconds`",
        meaning: "How long the proxy continues to serve when the pod is stopped, before it drains.",
    }
    SHUTDOWN_GRACE_PERIOD = "config.linkerd.io/shutdown-grace-period" {
        objects: "Namespace, Pod",
        values: GO_DURATION,
        default: "`proxy.shutdownGracePeriod`",
        meaning: "Maximum time for open requests to end. The time begins when the application has stopped listening, at most 10 s after SIGTERM, and ends early with the pod's `terminationGracePeriodSeconds`.",
    }
    PROXY_ADMIN_SHUTDOWN = "config.linkerd.io/proxy-admin-shutdown" {
        objects: "Namespace, Pod",
        values: "`enabled` or `disabled`",
        default: "`proxy.enableShutdownEndpoint`",
        meaning: "Enables `POST /shutdown` on the admin port, which ends the proxy.",
    }
    INBOUND_PORT = "config.linkerd.io/inbound-port" {
        objects: "Namespace, Pod",
        values: PORT,
        default: "`proxy.ports.inbound`",
        meaning: "The proxy's port for redirected inbound connections.",
    }
    OUTBOUND_PORT = "config.linkerd.io/outbound-port" {
        objects: "Namespace, Pod",
        values: PORT,
        default: "`proxy.ports.outbound`",
        meaning: "The proxy's port for redirected outbound connections.",
    }
    ADMIN_PORT = "config.linkerd.io/admin-port" {
        objects: "Namespace, Pod",
        values: PORT,
        default: "`proxy.ports.admin`",
        meaning: "The proxy's port for metrics and probes.",
    }
    CONTROL_PORT = "config.linkerd.io/control-port" {
        objects: "Namespace, Pod",
        values: PORT,
        default: "`proxy.ports.control`",
        meaning: "The proxy's port for tap.",
    }
    PROXY_UID = "config.linkerd.io/proxy-uid" {
        objects: "Namespace, Pod",
        values: "a user ID from `1` to `2147483647`",
        default: "`proxy.uid`",
        meaning: "The user ID of the proxy. The injector refuses pods whose other containers run as this user.",
    }
    PROXY_GID = "config.linkerd.io/proxy-gid" {
        objects: "Namespace, Pod",
        values: "a group ID from `0` to `2147483647`, or `-1` for that of the image",
        default: "`proxy.gid`",
        meaning: "The group ID of the proxy. The injector refuses pods whose other containers run as this group.",
    }
    PROXY_ADDITIONAL_ENV = "config.linkerd.io/proxy-additional-env" {
        objects: "Namespace, Pod",
        values: "a JSON list of variables such as `[{\"name\": \"A\", \"value\": \"b\"}]`",
        default: "`proxy.additionalEnv`",
        meaning: "Further environment variables of the proxy. The lists are joined: for the same name, the pod takes \
                  precedence over the namespace, and the namespace over the chart.",
    }
    PROXY_INBOUND_CONNECT_TIMEOUT = "config.linkerd.io/proxy-inbound-connect-timeout" {
        objects: "Namespace, Pod",
        values: GO_DURATION,
        default: "`proxy.inboundConnectTimeout`",
        meaning: "Timeout of the proxy's connections to its own application. Shorter times than `4s` are raised to `4s`, with \
                  a warning.",
    }
    PROXY_OUTBOUND_CONNECT_TIMEOUT = "config.linkerd.io/proxy-outbound-connect-timeout" {
        objects: "Namespace, Pod",
        values: GO_DURATION,
        default: "`proxy.outboundConnectTimeout`",
        meaning: "Timeout of the proxy's connections to endpoints.",
    }
    PROXY_INBOUND_DISCOVERY_CACHE_TIMEOUT = "config.linkerd.io/proxy-inbound-discovery-cache-unused-timeout" {
        objects: "Namespace, Pod",
        values: GO_DURATION,
        default: "`proxy.inboundDiscoveryCacheUnusedTimeout`",
        meaning: "Time after which the proxy forgets the policy of an unused inbound port; fractions of a second are \
                  dropped.",
    }
    PROXY_OUTBOUND_DISCOVERY_CACHE_TIMEOUT = "config.linkerd.io/proxy-outbound-discovery-cache-unused-timeout" {
        objects: "Namespace, Pod",
        values: GO_DURATION,
        default: "`proxy.outboundDiscoveryCacheUnusedTimeout`",
        meaning: "Time after which the proxy forgets an unused destination; fractions of a second are dropped.",
    }

    // Resources
    PROXY_CPU_REQUEST = "config.linkerd.io/proxy-cpu-request" {
        objects: "Namespace, Pod",
        values: QUANTITY,
        default: "`proxy.resources.cpu.request`",
        meaning: "The CPU request of the proxy. Rounded up, it is also the minimum number of worker threads.",
    }
    PROXY_CPU_LIMIT = "config.linkerd.io/proxy-cpu-limit" {
        objects: "Namespace, Pod",
        values: QUANTITY,
        default: "`proxy.resources.cpu.limit`",
        meaning: "The CPU limit of the proxy. Rounded up, it is also the maximum number of worker threads.",
    }
    PROXY_CPU_RATIO_LIMIT = "config.linkerd.io/proxy-cpu-ratio-limit" {
        objects: "Pod",
        values: "a number above `0` and below `1`",
        default: "`proxy.runtime.workers.maximumCPURatio`",
        meaning: "Maximum number of worker threads, as a fraction of the node's CPUs.",
    }
    PROXY_MEMORY_REQUEST = "config.linkerd.io/proxy-memory-request" {
        objects: "Namespace, Pod",
        values: QUANTITY,
        default: "`proxy.resources.memory.request`",
        meaning: "The memory request of the proxy.",
    }
    PROXY_MEMORY_LIMIT = "config.linkerd.io/proxy-memory-limit" {
        objects: "Namespace, Pod",
        values: QUANTITY,
        default: "`proxy.resources.memory.limit`",
        meaning: "The memory limit of the proxy.",
    }
    PROXY_EPHEMERAL_STORAGE_REQUEST = "config.linkerd.io/proxy-ephemeral-storage-request" {
        objects: "Namespace, Pod",
        values: QUANTITY,
        default: "`proxy.resources.ephemeral-storage.request`",
        meaning: "The ephemeral storage request of the proxy.",
    }
    PROXY_EPHEMERAL_STORAGE_LIMIT = "config.linkerd.io/proxy-ephemeral-storage-limit" {
        objects: "Namespace, Pod",
        values: QUANTITY,
        default: "`proxy.resources.ephemeral-storage.limit`",
        meaning: "The ephemeral storage limit of the proxy.",
    }

    // Logs, metrics, traces and tap
    PROXY_LOG_LEVEL = "config.linkerd.io/proxy-log-level" {
        objects: "Namespace, Pod",
        values: "a level or a filter such as `warn,linkerd=debug`",
        default: "`proxy.logLevel`",
        meaning: "The log level of the proxy.",
    }
    PROXY_LOG_FORMAT = "config.linkerd.io/proxy-log-format" {
        objects: "Namespace, Pod",
        values: "`plain` or `json`",
        default: "`proxy.logFormat`",
        meaning: "The log format of the proxy.",
    }
    PROXY_LOG_HTTP_HEADERS = "config.linkerd.io/proxy-log-http-headers" {
        objects: "Namespace, Pod",
        values: "`off` or `insecure`",
        default: "`proxy.logHTTPHeaders`",
        meaning: "With `insecure`, logs can contain the values of headers, which can be secrets.",
    }
    ACCESS_LOG = "config.linkerd.io/access-log" {
        objects: "Namespace, Pod",
        values: "`apache`, `json` or `none`",
        default: "`proxy.accessLog`",
        meaning: "The format of the access log.",
    }
    PROXY_METRICS_HOSTNAME_LABELS = "config.linkerd.io/proxy-metrics-hostname-labels" {
        objects: "Namespace, Pod",
        values: BOOLEAN,
        default: "`proxy.metrics.hostnameLabels`",
        meaning: "Outbound request metrics have the label `hostname`.",
    }
    TRACE_RESOURCE_PREFIX = "resource.opentelemetry.io/" + "ATTRIBUTE" {
        objects: "Pod",
        values: "a text",
        default: "`proxy.tracing.labels`",
        meaning: "An attribute of all spans of the proxy. `service.name` sets the service name of its traces; without \
                  it, the label `app.kubernetes.io/instance`, then `app.kubernetes.io/name`, then \
                  `proxy.tracing.traceServiceName` applies.",
    }
    DISABLE_TAP = "viz.linkerd.io/disable-tap" {
        objects: "Namespace, Pod",
        values: BOOLEAN,
        default: "`false`",
        meaning: "`true` disables tap for the pod, even if `proxy.tap.enabled` is true.",
    }

    // The debug container
    ENABLE_DEBUG_SIDECAR = "config.linkerd.io/enable-debug-sidecar" {
        objects: "Namespace, Pod",
        values: BOOLEAN,
        default: "`false`",
        meaning: "Adds the debug container to the pod, if an image is set for it.",
    }
    DEBUG_IMAGE = "config.linkerd.io/debug-image" {
        objects: "Pod",
        values: "the name of an image, without a tag",
        default: "`debugContainer.image.name`",
        meaning: "The image of the debug container.",
    }
    DEBUG_IMAGE_VERSION = "config.linkerd.io/debug-image-version" {
        objects: "Pod",
        values: "the tag of an image, with or without a digest",
        default: "`debugContainer.image.version`",
        meaning: "The version of the debug container's image.",
    }
    DEBUG_IMAGE_PULL_POLICY = "config.linkerd.io/debug-image-pull-policy" {
        objects: "Pod",
        values: PULL_POLICY,
        default: "`debugContainer.image.pullPolicy`",
        meaning: "The pull policy of the debug container's image.",
    }

    // Retries and timeouts
    RETRY_HTTP = "retry.linkerd.io/http" {
        objects: "Service, EgressNetwork, HTTPRoute",
        values: "HTTP statuses, ranges of statuses, `5xx` and `gateway-error` (502 to 504), such as \
                 `gateway-error,429`",
        default: "none",
        meaning: "The HTTP statuses on which a request is retried.",
    }
    RETRY_GRPC = "retry.linkerd.io/grpc" {
        objects: "Service, EgressNetwork, GRPCRoute",
        values: "a list of `cancelled`, `deadline-exceeded`, `internal`, `resource-exhausted` and `unavailable`, such \
                 as `internal,unavailable`",
        default: "none",
        meaning: "The gRPC statuses on which a request is retried.",
    }
    RETRY_LIMIT = "retry.linkerd.io/limit" {
        objects: "Service, EgressNetwork, HTTPRoute, GRPCRoute",
        values: "a number up to `65535`; `0` counts as not set",
        default: "`1`",
        meaning: "The maximum number of retries of a request.",
    }
    RETRY_TIMEOUT = "retry.linkerd.io/timeout" {
        objects: "Service, EgressNetwork, HTTPRoute, GRPCRoute",
        values: TIMEOUT,
        default: "none",
        meaning: "Timeout of an attempt, after which the request is retried.",
    }
    TIMEOUT_REQUEST = "timeout.linkerd.io/request" {
        objects: "Service, EgressNetwork, HTTPRoute, GRPCRoute",
        values: TIMEOUT,
        default: "none",
        meaning: "Timeout from the start of the request to the end of the response, with all retries. The timeouts of \
                  a route replace all timeouts of the Service or EgressNetwork.",
    }
    TIMEOUT_RESPONSE = "timeout.linkerd.io/response" {
        objects: "Service, EgressNetwork, HTTPRoute, GRPCRoute",
        values: TIMEOUT,
        default: "none",
        meaning: "Timeout from the end of the request to the end of the response, of each attempt.",
    }
    TIMEOUT_IDLE = "timeout.linkerd.io/idle" {
        objects: "Service, EgressNetwork, HTTPRoute, GRPCRoute",
        values: TIMEOUT,
        default: "none",
        meaning: "Maximum time without data in either direction, after the response has begun.",
    }

    // Load balancing
    FAILURE_ACCRUAL = "balancer.linkerd.io/failure-accrual" {
        objects: "Service, EgressNetwork",
        values: "`consecutive` or `unified`",
        default: "none",
        meaning: "Circuit breaking: ejects an endpoint from the balancer after consecutive failures, and with \
                  `unified` also if its success rate is low.",
    }
    CONSECUTIVE_MAX_FAILURES = "balancer.linkerd.io/failure-accrual-consecutive-max-failures" {
        objects: "Service, EgressNetwork",
        values: "a number; with `unified`, `0` for no maximum",
        default: "`7`",
        meaning: "The number of consecutive failures after which the breaker ejects an endpoint.",
    }
    CONSECUTIVE_MIN_PENALTY = "balancer.linkerd.io/failure-accrual-consecutive-min-penalty" {
        objects: "Service, EgressNetwork",
        values: DURATION,
        default: "`1s`",
        meaning: "The delay before the first probe request to an ejected endpoint.",
    }
    CONSECUTIVE_MAX_PENALTY = "balancer.linkerd.io/failure-accrual-consecutive-max-penalty" {
        objects: "Service, EgressNetwork",
        values: DURATION,
        default: "`60s`",
        meaning: "The delay between probe requests doubles after each failure, up to this maximum. With zero or a \
                  value below the minimum penalty, there is no circuit breaking.",
    }
    CONSECUTIVE_JITTER_RATIO = "balancer.linkerd.io/failure-accrual-consecutive-jitter-ratio" {
        objects: "Service, EgressNetwork",
        values: "a number from `0` to `100`",
        default: "`0.5`",
        meaning: "The maximum random addition to the delay between probe requests, as a fraction of the delay.",
    }
    SUCCESS_RATE_THRESHOLD = "balancer.alpha.linkerd.io/failure-accrual-success-rate-threshold" {
        objects: "Service, EgressNetwork",
        values: "a number from `0` to `1`",
        default: "`0.8`",
        meaning: "With `unified`, the success rate below which the breaker ejects an endpoint; `0` for none.",
    }
    SUCCESS_RATE_WINDOW = "balancer.alpha.linkerd.io/failure-accrual-success-rate-window" {
        objects: "Service, EgressNetwork",
        values: "digits and one of `ms`, `s`, `m`, `h`, `d`; at least `10ms`",
        default: "`10s`",
        meaning: "With `unified`, the time over which the success rate is computed.",
    }
    SUCCESS_RATE_MIN_REQUESTS = "balancer.alpha.linkerd.io/failure-accrual-success-rate-min-requests" {
        objects: "Service, EgressNetwork",
        values: "a number from `1` to `1000000`",
        default: "`5`",
        meaning: "With `unified`, the minimum number of requests in the window before the success rate is \
                  evaluated.",
    }
    HONOR_RETRY_AFTER = "balancer.alpha.linkerd.io/failure-accrual-honor-retry-after" {
        objects: "Service, EgressNetwork",
        values: BOOLEAN,
        default: "`false`",
        meaning: "With `unified`, the next probe request waits at least as long as the endpoint's `retry-after` says.",
    }
    PENALIZE_FAILURES = "balancer.alpha.linkerd.io/penalize-failures" {
        objects: "Service",
        values: BOOLEAN,
        default: "`false`",
        meaning: "Failed requests count as slow, so that an endpoint that fails fast does not attract more requests.",
    }
    LOAD_BIASER_PENALTY = "balancer.alpha.linkerd.io/load-biaser-penalty" {
        objects: "Service",
        values: DURATION,
        default: "`5s`",
        meaning: "With `penalize-failures`, the minimum latency with which a failed request is recorded.",
    }
    LOAD_BIASER_MAX_RETRY_AFTER = "balancer.alpha.linkerd.io/load-biaser-max-retry-after" {
        objects: "Service",
        values: DURATION,
        default: "`300s`",
        meaning: "With `penalize-failures`, a failed request with `retry-after` is recorded with at least that time as \
                  its latency, up to this limit.",
    }

    // Other clusters
    REMOTE_SERVICE_NAME = "mirror.linkerd.io/remote-svc-fq-name" {
        objects: "Endpoints, EndpointSlice",
        values: "the name of a service such as `web.shop.svc.east.example`",
        default: "none",
        meaning: "The name of the mirrored Service in its own cluster. Requests to its endpoints are sent with this \
                  name as the authority.",
    }
    REMOTE_GATEWAY_IDENTITY = "mirror.linkerd.io/remote-gateway-identity" {
        objects: "Endpoints, EndpointSlice",
        values: "an identity",
        default: "none",
        meaning: "The identity of the gateway to which the addresses of a mirrored Service belong.",
    }

    GATEWAY_IDENTITY = "mirror.linkerd.io/gateway-identity" {
        objects: "Service",
        values: "an identity",
        default: "none; required",
        meaning: "The identity of the proxy of a gateway, on the Service of the gateway. `tulle multicluster link-gen` copies it.",
    }
    PROBE_PERIOD = "mirror.linkerd.io/probe-period" {
        objects: "Service",
        values: "seconds, or a duration such as `3s`",
        default: "none; required",
        meaning: "On the Service of a gateway: how often other clusters probe the gateway.",
    }
    PROBE_PATH = "mirror.linkerd.io/probe-path" {
        objects: "Service",
        values: "a path such as `/ready`",
        default: "none; required",
        meaning: "On the Service of a gateway: the path that other clusters request to probe it.",
    }
    REMOTE_RESOURCE_VERSION = "mirror.linkerd.io/remote-resource-version" {
        objects: "written on Service",
        values: "a resource version",
        default: "none",
        meaning: "The version of the exported Service that a mirror is a copy of.",
    }
    REMOTE_DISCOVERY = "multicluster.linkerd.io/remote-discovery" {
        objects: "written on Service",
        values: "a list such as `web@east,web@north`",
        default: "none",
        meaning: "The members of a federated Service in other clusters, in the order in which they joined.",
    }
    LOCAL_DISCOVERY = "multicluster.linkerd.io/local-discovery" {
        objects: "written on Service",
        values: "the name of a Service",
        default: "none",
        meaning: "The member of a federated Service in its own cluster.",
    }
    TRUST_DOMAIN = "multicluster.linkerd.io/trust-domain" {
        objects: "Secret",
        values: "a DNS name",
        default: "none; required",
        meaning: "The trust domain of the cluster to which the Secret gives access.",
    }
    CLUSTER_DOMAIN = "multicluster.linkerd.io/cluster-domain" {
        objects: "Secret",
        values: "a DNS name",
        default: "none; required",
        meaning: "The domain of Services of the cluster to which the Secret gives access.",
    }
    PREFER_LOCAL = "config.tulle.dev/prefer-local" {
        objects: "Service",
        values: BOOLEAN,
        default: "`false`",
        meaning: "Whether clients of a federated Service use its members in other clusters only for requests that no \
                  endpoint in their own cluster can take: it has none that is ready, or they are ejected by a circuit \
                  breaker, cannot be reached, or do not respond. Linkerd's proxies do so only while none is ready. Not \
                  in Linkerd.",
    }

    // Written by tulle
    CREATED_BY = "linkerd.io/created-by" {
        objects: "written on Pod, and on objects of the charts",
        values: "`linkerd/proxy-injector VERSION` or `linkerd/cli VERSION`; from the charts `tulle/helm VERSION`",
        default: "none",
        meaning: "What has injected the pod, or created the object.",
    }
    PROXY_VERSION = "linkerd.io/proxy-version" {
        objects: "written on Pod",
        values: "a version",
        default: "none",
        meaning: "The version of the injected proxy, which `tulle check` and `tulle version` read.",
    }
    TRUST_ROOT_SHA256 = "linkerd.io/trust-root-sha256" {
        objects: "written on Pod",
        values: "64 hexadecimal digits",
        default: "none",
        meaning: "The SHA-256 of the trust anchors with which the pod was injected.",
    }

    // The demo
    DEMO_DELAY = "demo.tulle.dev/delay" {
        objects: "ExternalWorkload of the demo",
        values: "duration, such as `50ms`",
        default: "none",
        meaning: "How long the demo's application delays its responses. Not in Linkerd.",
    }

    // Without effect
    INJECTED_TYPO = "linkerd.io/injected" {
        objects: "Namespace, Pod",
        values: "any",
        default: "none",
        meaning: "A common mistake for `linkerd.io/inject`, without effect. The injector and `tulle check` warn about \
                  it.",
    }
    POD_INBOUND_PORTS = "config.linkerd.io/pod-inbound-ports" {
        objects: "none",
        values: "any",
        default: "none",
        meaning: "Without effect: the injector finds the ports in the pod's containers.",
    }
}

/// Returns the annotation with this key. The name of an annotation with a placeholder is a prefix of its keys.
pub fn find(key: &str) -> Option<&'static Annotation> {
    ALL.iter().find(|annotation| match annotation.placeholder {
        "" => annotation.name == key,
        _ => key.starts_with(annotation.name),
    })
}

/// Whether a key has a prefix under which there are only annotations that configure the mesh.
pub fn has_configuration_prefix(key: &str) -> bool {
    [
        "config.linkerd.io/",
        "config.beta.linkerd.io/",
        "config.alpha.linkerd.io/",
        "config.tulle.dev/",
    ]
    .iter()
    .any(|prefix| key.starts_with(prefix))
}

const BOOLEAN: &str = "`true` or `false`";
/// Durations of the injector.
const GO_DURATION: &str = "a duration such as `100ms`, `1.5s` or `1h30m`";
/// Durations of policies.
const DURATION: &str = "digits and one of `ms`, `s`, `m`, `h`, `d`, such as `100ms`";
const TIMEOUT: &str = "digits and one of `ms`, `s`, `m`, `h`, `d`, such as `100ms`; `0` for none";
const PORT: &str = "a port from `1` to `65535`";
const PORTS_OF_POD: &str = "ports, ranges of ports and names of declared ports, such as `3306,8000-8100,mysql`";
const PULL_POLICY: &str = "`Always`, `Never` or `IfNotPresent`";
const QUANTITY: &str = "a quantity such as `100m`, `0.5` or `64Mi`";
