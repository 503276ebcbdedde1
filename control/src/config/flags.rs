//! The flags of the command line.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgAction, Args};
use tulle_core::addr::Addr;
use tulle_core::logging::Format;
use tulle_core::names::{label, port};

use crate::tls::mesh_credentials::ClientCertificates;

/// A listen address in Go's syntax: `:8086` means all interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenAddr {
    AllInterfaces(u16),
    Socket(SocketAddr),
}

#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Directory of manifests with services, workloads and policies, reloaded on change. Without it the objects of the
    /// Kubernetes API server are watched.
    #[arg(long, value_name = "DIR")]
    pub(super) manifests: Option<PathBuf>,
    /// Kubeconfig file for the API server; by default the service account of this pod.
    #[arg(long, value_name = "FILE")]
    pub(super) kubeconfig: Option<PathBuf>,
    /// Average number of requests per second to the API server.
    #[arg(long, value_name = "N", default_value_t = 100.0)]
    pub(super) kube_apiclient_qps: f64,
    /// Maximum burst of requests to the API server.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub(super) kube_apiclient_burst: u32,
    /// Trust anchors, a PEM bundle; reloaded on change.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/var/run/linkerd/identity/trust-roots/ca-bundle.crt"
    )]
    pub(super) trust_anchors: PathBuf,
    /// Directory of the issuer: crt.pem and key.pem, or tls.crt and tls.key; reloaded on change.
    #[arg(long, value_name = "DIR", default_value = "/var/run/linkerd/identity/issuer")]
    pub(super) issuer: PathBuf,
    /// Directory of public keys for join tokens (*.pem, *.pub; ECDSA P-256); reloaded on change. Without it the
    /// Kubernetes API server reviews the tokens.
    #[arg(long, value_name = "DIR")]
    pub(super) token_keys: Option<PathBuf>,
    /// Identity service that signs the certificate of this process, if it does not run identity itself; by default the
    /// identity service in the namespace of the control plane.
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) identity_svc_addr: Option<Addr>,
    /// Token file for requests to that identity service; read before each request.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/var/run/secrets/tokens/linkerd-identity-token"
    )]
    pub(super) identity_token: PathBuf,
    /// Whether clients of destination and policy need a client certificate of the mesh. Plaintext is served on loopback
    /// only. Use optional only for a migration from Linkerd's proxies, which connect before they have a certificate.
    #[arg(long, value_name = "RULE", value_enum, default_value_t = ClientCertificates::Required)]
    pub(super) client_certificates: ClientCertificates,

    /// Namespace of the control plane.
    #[arg(long, visible_aliases = ["control-plane-namespace", "linkerd-namespace"], default_value = "linkerd")]
    pub(crate) controller_namespace: String,
    /// DNS domain of the cluster.
    #[arg(long, default_value = "")]
    pub(super) cluster_domain: String,
    /// Trust domain of identities; by default the cluster domain.
    #[arg(long, visible_alias = "identity-domain", default_value = "")]
    pub(super) identity_trust_domain: String,
    /// Networks of the cluster.
    #[arg(long, default_value = "10.0.0.0/8,100.64.0.0/10,172.16.0.0/12,192.168.0.0/16")]
    pub(super) cluster_networks: String,
    /// Source networks of health probes.
    #[arg(long, default_value = "")]
    pub(super) probe_networks: String,
    /// Default opaque ports, if no annotation sets them, such as 25,3306,8000-8100.
    #[arg(long, default_value = "")]
    pub(super) default_opaque_ports: String,
    /// Default policy of ports that no Server selects: all-unauthenticated, all-authenticated, cluster-unauthenticated,
    /// cluster-authenticated, deny or audit.
    #[arg(long, value_name = "POLICY", default_value = "all-unauthenticated")]
    pub(super) default_policy: String,
    /// Namespace of the EgressNetworks that apply to namespaces without their own.
    #[arg(long, default_value = "linkerd-egress")]
    pub(super) global_egress_network_namespace: String,

    /// Whether clients upgrade connections to meshed endpoints to HTTP/2.
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub(super) enable_h2_upgrade: bool,
    /// Whether endpoints are read from EndpointSlices instead of Endpoints.
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub(super) enable_endpoint_slices: bool,
    /// Whether IPv6 endpoints are served.
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub(super) enable_ipv6: bool,
    /// Whether endpoints in the client's own zone have a higher weight.
    #[arg(long, default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub(super) ext_endpoint_zone_weights: bool,
    /// Which ports of a meshed workload clients reach through the inbound port of its proxy (4143), with a transport header:
    /// transparent (opaque ports) or transport-header (all ports). Clients connect to the proxy's admin and control ports
    /// directly.
    #[arg(long, value_name = "MODE", default_value = "transparent")]
    pub(super) outbound_transport_mode: String,
    /// HTTP/2 settings for clients of meshed endpoints, as JSON.
    #[arg(long, value_name = "JSON", default_value = "")]
    pub(super) meshed_http2_client_params: String,
    /// Whether proxies honor the headers l5d-timeout and l5d-retry-* of requests.
    #[arg(long, default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub(super) allow_l5d_request_headers: bool,

    /// Lifetime of certificates.
    #[arg(long, value_name = "DURATION", default_value = "24h0m0s")]
    pub(super) identity_issuance_lifetime: String,
    /// Maximum clock skew between proxies and the control plane.
    #[arg(long, value_name = "DURATION", default_value = "20s")]
    pub(super) identity_clock_skew_allowance: String,

    /// Private key of the webhooks, PEM, if it is mounted; reloaded on change.
    #[arg(long, value_name = "FILE", default_value = "/var/run/linkerd/tls/tls.key")]
    pub(super) server_tls_key: PathBuf,
    /// Certificates of the webhooks, PEM, if they are mounted; reloaded on change. Otherwise each webhook creates its
    /// own certificate, keeps it in a Secret, and updates the CA bundle of its configuration.
    #[arg(long, value_name = "FILE", default_value = "/var/run/linkerd/tls/tls.crt")]
    pub(super) server_tls_certs: PathBuf,
    /// Disable the validation of policies on admission.
    #[arg(long, default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub(super) admission_controller_disabled: bool,
    /// The Deployment that owns the leases for writing statuses and EndpointSlices.
    #[arg(long, value_name = "NAME", default_value = "linkerd-destination")]
    pub(super) policy_deployment_name: String,
    /// Timeout of writing one status, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 5000)]
    pub(super) patch_timeout_ms: u64,

    /// Values of the chart for injected proxies, YAML; reloaded on change.
    #[arg(long, value_name = "FILE", default_value = "/var/run/linkerd/config/values")]
    pub(super) values: PathBuf,
    /// Interval of the search for pods that should have a proxy but have none.
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    pub(super) audit_interval: String,

    /// Address of destination, identity, sp-validator, proxy-injector or telemetry, if only one of these runs; cannot be
    /// combined with the flag of that service.
    #[arg(long)]
    pub(super) addr: Option<ListenAddr>,
    /// Address of destination; by default :8086.
    #[arg(long)]
    pub(super) destination_addr: Option<ListenAddr>,
    /// Address of identity; by default :8080.
    #[arg(long)]
    pub(super) identity_addr: Option<ListenAddr>,
    /// Address of policy.
    #[arg(long, visible_alias = "policy-addr", default_value_t = ListenAddr::AllInterfaces(port::POLICY))]
    pub(super) grpc_addr: ListenAddr,
    /// Address of the webhook for policies.
    #[arg(long, default_value_t = ListenAddr::AllInterfaces(9443))]
    pub(super) server_addr: ListenAddr,
    /// Address of the webhook for ServiceProfiles; by default :8443.
    #[arg(long)]
    pub(super) sp_validator_addr: Option<ListenAddr>,
    /// Address of the proxy injector; by default :8443.
    #[arg(long)]
    pub(super) proxy_injector_addr: Option<ListenAddr>,
    /// Address of telemetry; by default :8089, or 127.0.0.1:8089 without Kubernetes.
    #[arg(long)]
    pub(super) telemetry_addr: Option<ListenAddr>,
    /// Admin address (metrics, readiness, invalid manifests) of destination; by default :9996. In a process without destination,
    /// the admin address of sp-validator (by default :9997), proxy-injector (by default :9995) or service-mirror (by default
    /// :9999); rejected if several of these run.
    #[arg(long)]
    pub(super) metrics_addr: Option<ListenAddr>,
    /// Admin address of sp-validator; by default :9997.
    #[arg(long)]
    pub(super) sp_validator_metrics_addr: Option<ListenAddr>,
    #[command(flatten)]
    pub(crate) mirror: MirrorFlags,
    /// Admin address of identity and policy, and of telemetry in a process without destination.
    #[arg(long, default_value_t = ListenAddr::AllInterfaces(9990))]
    pub(super) admin_addr: ListenAddr,

    /// Log level: panic, fatal, error, warn, info, debug or trace, or a filter such as warn,tulle=debug.
    #[arg(long, default_value = "info")]
    pub(super) log_level: String,
    /// Log format: plain or json.
    #[arg(long, default_value = "plain")]
    pub(super) log_format: Format,

    /// Ignored, accepted for compatibility with charts: there are no queues, and a slow stream skips to the latest state. 0 is
    /// rejected.
    #[arg(long, hide = true)]
    pub(super) stream_queue_capacity: Option<u64>,
    /// Ignored, accepted for compatibility with charts.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(super) export_queue_metrics: Option<bool>,
    /// Ignored, accepted for compatibility with charts: both layouts of issuer directories are supported.
    #[arg(long, hide = true)]
    pub(super) identity_scheme: Option<String>,
    /// Ignored, accepted for compatibility with charts: there is no tracing.
    #[arg(long, hide = true)]
    pub(super) trace_collector: Option<String>,
    /// Ignored, accepted for compatibility with charts: there is no profiler.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(super) enable_pprof: Option<bool>,
}

/// Flags of the service mirror.
#[derive(Debug, Args)]
pub(crate) struct MirrorFlags {
    /// The Link to the cluster whose Services are mirrored; also accepted as the last argument without the flag.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["local_mirror", "all_links"])]
    pub(crate) link_name: Option<String>,
    /// Whether to mirror the Services of the clusters of all Links of --namespace, also of Links that are created later. Each Link has
    /// a lease of its own, and a probe Service, which is created if it does not exist.
    #[arg(long, default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set, conflicts_with = "local_mirror")]
    pub(super) all_links: bool,
    /// Names of Links that have service mirrors of their own, comma-separated, with --all-links.
    #[arg(long, value_name = "LIST", default_value = "")]
    pub(super) excluded_links: String,
    /// Whether to create the federated Services of this cluster, with its own Services as members, instead of mirrors of another
    /// cluster.
    #[arg(long, default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub(super) local_mirror: bool,
    /// Namespace of Links, their credentials, leases and probe Services.
    #[arg(long, value_name = "NAMESPACE", default_value = "linkerd-multicluster")]
    pub(super) namespace: String,
    /// The Service through which the gateway is probed; by default it is not probed. With --all-links, each Link has its own.
    #[arg(long, value_name = "NAME", default_value = "")]
    pub(super) probe_service: String,
    /// Whether to create the namespace of a mirror if this cluster does not have it.
    #[arg(long, default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub(super) enable_namespace_creation: bool,
    /// Interval at which the names of the gateway are resolved, and all mirrors are compared with the exported Services.
    #[arg(long, value_name = "DURATION", default_value = "1m")]
    pub(super) endpoint_refresh_period: String,
    /// Label selector of the Services that join federated Services, with --local-mirror.
    #[arg(long, value_name = "SELECTOR", default_value = label::FEDERATED)]
    pub(super) federated_service_selector: String,
    /// Labels that are not copied to federated Services, with --local-mirror: names, or prefixes such as example.com/*.
    #[arg(long, value_name = "LIST", default_value = "")]
    pub(super) excluded_labels: String,
    /// Annotations that are not copied to federated Services, with --local-mirror: names, or prefixes such as example.com/*.
    #[arg(long, value_name = "LIST", default_value = "")]
    pub(super) excluded_annotations: String,
    /// Whether each pod of a headless Service that has a host name, such as the pod of a StatefulSet, gets its own mirror. Otherwise
    /// a headless Service is mirrored like any other Service.
    #[arg(long, default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub(super) enable_headless_services: bool,
    /// Ignored, accepted for compatibility with charts: failed steps are retried until they succeed.
    #[arg(long, hide = true)]
    pub(super) event_requeue_limit: Option<u32>,
}

impl FromStr for ListenAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("{text:?} is not a listen address; expected :8086, 127.0.0.1:8086 or [::]:8086");
        match text.strip_prefix(':') {
            Some(port) => port.parse().map(Self::AllInterfaces).map_err(|_| invalid()),
            None => text.parse().map(Self::Socket).map_err(|_| invalid()),
        }
    }
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllInterfaces(port) => write!(f, ":{port}"),
            Self::Socket(addr) => write!(f, "{addr}"),
        }
    }
}
