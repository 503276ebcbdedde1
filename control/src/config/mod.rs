//! Flags, and what they mean for each room.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{ArgAction, Args};
use tracing::{error, warn};
use tulle_core::addr::Addr;
use tulle_core::identity::{self, Identity};
use tulle_core::names::port;
use tulle_core::nets::parse_networks;
use tulle_core::telemetry::Format;

use crate::cluster::{self, EndpointsFrom, H2Upgrade, Ipv6, TransportMode};
use crate::cmd::{Command, Services};
use crate::destination::{self, ZoneWeights, http2};
use crate::identity::issuer::Validity;
use crate::identity::leaf::Remote;
use crate::injector;
use crate::kubernetes::{self, Rate};
use crate::policy::{self, RequestHeaders};
use crate::resources::go_duration;
use crate::tls::creds::ClientCertificates;
use crate::webhook;
use crate::writeback;

/// The whole configuration; nothing behind it looks at flags.
#[derive(Clone, Debug)]
pub struct Config {
    pub services: Services,
    /// Who we are in leases and Events: the name of this pod.
    pub pod_name: String,
    /// Needed by destination and policy.
    pub source: Option<Source>,
    pub kubernetes: kubernetes::Config,
    pub cluster: cluster::Config,
    pub destination: destination::Config,
    pub policy: policy::Config,
    pub certificates: Certificates,
    /// Whether clients of destination and policy have to show a certificate. Default required.
    pub client_certificates: ClientCertificates,
    pub webhooks: Webhooks,
    pub listen: Listen,
}

/// Where objects come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Manifests below a directory.
    Directory(PathBuf),
    /// The API server.
    Kubernetes,
}

/// Where certificates come from.
#[derive(Clone, Debug)]
pub enum Certificates {
    /// This process signs them.
    Here {
        identity: crate::identity::Config,
        tokens: Tokens,
    },
    /// An identity service elsewhere does.
    Remote(Remote),
}

/// Who says whose a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// Join tokens, checked with the public keys of a directory.
    Keys(PathBuf),
    /// Tokens of service accounts, reviewed by the API server.
    TokenReview,
}

/// What the API server asks before it stores an object, and what is written back.
#[derive(Clone, Debug)]
pub struct Webhooks {
    /// Certificate and key of the servers, where they are mounted, or where directories of the webhooks' names are that
    /// have them; otherwise each webhook keeps its own in a Secret.
    pub files: webhook::mounted::Paths,
    /// Whether policies are checked on admission. Default yes, on Kubernetes.
    pub policy_admission: Admission,
    /// The Deployment that owns the lease for writing statuses. Default `linkerd-destination`.
    pub policy_deployment: String,
    /// How long writing one status may take. Default 5 s.
    pub patch_timeout: Duration,
    pub injector: injector::Config,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Check,
    Disabled,
}

/// Where the services of a process listen.
#[derive(Clone, Debug)]
pub struct Listen {
    pub destination: ListenAddr,
    pub identity: ListenAddr,
    pub policy: ListenAddr,
    /// The webhook for policies.
    pub policy_validator: ListenAddr,
    /// The webhook for ServiceProfiles.
    pub sp_validator: ListenAddr,
    pub proxy_injector: ListenAddr,
    pub telemetry: ListenAddr,
    /// Admin server of destination.
    pub metrics: ListenAddr,
    /// Admin server of identity and policy.
    pub admin: ListenAddr,
    pub sp_validator_admin: ListenAddr,
    pub proxy_injector_admin: ListenAddr,
}

/// An address to listen on, as Go writes them: `:8086` is all addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenAddr {
    All(u16),
    At(SocketAddr),
}

/// How this process logs.
#[derive(Clone, Debug)]
pub struct Logs {
    pub level: String,
    pub format: Format,
}

#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Directory of manifests that describes services, workloads and policies; read again when it changes. Without it
    /// the API server of Kubernetes is watched.
    #[arg(long, value_name = "DIR")]
    manifests: Option<PathBuf>,
    /// How the API server is reached; by default with the service account of this pod.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Requests a second to the API server, in the long run.
    #[arg(long, value_name = "N", default_value_t = 100.0)]
    kube_apiclient_qps: f64,
    /// Requests at once to the API server.
    #[arg(long, value_name = "N", default_value_t = 200)]
    kube_apiclient_burst: u32,
    /// Trust anchors, a PEM bundle; read again when it changes.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/var/run/linkerd/identity/trust-roots/ca-bundle.crt"
    )]
    trust_anchors: PathBuf,
    /// Directory of the issuer: crt.pem and key.pem, or tls.crt and tls.key; read again when it changes.
    #[arg(long, value_name = "DIR", default_value = "/var/run/linkerd/identity/issuer")]
    issuer: PathBuf,
    /// Directory of public keys for join tokens (*.pem, *.pub; ECDSA P-256); read again when it changes. Without it
    /// tokens are reviewed by the API server of Kubernetes.
    #[arg(long, value_name = "DIR")]
    token_keys: Option<PathBuf>,
    /// Identity service to ask for a certificate, where this process has none; by default the one in the namespace.
    #[arg(long, value_name = "HOST:PORT")]
    identity_svc_addr: Option<Addr>,
    /// Token to ask it with; read anew each time.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/var/run/secrets/tokens/linkerd-identity-token"
    )]
    identity_token: PathBuf,
    /// Whether clients of destination and policy have to show a certificate of the mesh. Without one, in plaintext, they are
    /// served on loopback only. Optional is for proxies that connect before they have a certificate.
    #[arg(long, value_name = "RULE", value_enum, default_value_t = ClientCertificates::Required)]
    client_certificates: ClientCertificates,

    /// Namespace of the control plane.
    #[arg(long, visible_aliases = ["control-plane-namespace", "linkerd-namespace"], default_value = "linkerd")]
    pub(crate) controller_namespace: String,
    /// Domain of service names.
    #[arg(long, default_value = "")]
    cluster_domain: String,
    /// Domain of identities; by default the cluster domain.
    #[arg(long, visible_alias = "identity-domain", default_value = "")]
    identity_trust_domain: String,
    /// Networks of the cluster.
    #[arg(long, default_value = "10.0.0.0/8,100.64.0.0/10,172.16.0.0/12,192.168.0.0/16")]
    cluster_networks: String,
    /// Networks that health probes come from.
    #[arg(long, default_value = "")]
    probe_networks: String,
    /// Ports that are opaque unless an annotation says otherwise, such as 25,3306,8000-8100.
    #[arg(long, default_value = "")]
    default_opaque_ports: String,
    /// Policy of ports that no Server selects: all-unauthenticated, all-authenticated, cluster-unauthenticated,
    /// cluster-authenticated, deny or audit.
    #[arg(long, value_name = "POLICY", default_value = "all-unauthenticated")]
    default_policy: String,
    /// Namespace of the EgressNetworks for namespaces that have none.
    #[arg(long, default_value = "linkerd-egress")]
    global_egress_network_namespace: String,

    /// Whether meshed endpoints are offered HTTP/2.
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    enable_h2_upgrade: bool,
    /// Whether endpoints are read from EndpointSlices instead of Endpoints.
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    enable_endpoint_slices: bool,
    /// Whether IPv6 endpoints are served.
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    enable_ipv6: bool,
    /// Whether endpoints in the client's own zone weigh more.
    #[arg(long, default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    ext_endpoint_zone_weights: bool,
    /// When clients use a transport header: transparent or transport-header.
    #[arg(long, value_name = "MODE", default_value = "transparent")]
    outbound_transport_mode: String,
    /// HTTP/2 settings for clients of meshed endpoints, as JSON.
    #[arg(long, value_name = "JSON", default_value = "")]
    meshed_http2_client_params: String,
    /// Whether proxies honour l5d-timeout and l5d-retry-* headers of requests.
    #[arg(long, default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    allow_l5d_request_headers: bool,

    /// How long certificates are good for.
    #[arg(long, value_name = "DURATION", default_value = "24h0m0s")]
    identity_issuance_lifetime: String,
    /// How far the clocks of the mesh may be apart.
    #[arg(long, value_name = "DURATION", default_value = "20s")]
    identity_clock_skew_allowance: String,

    /// Private key of the webhooks, PEM, where it is mounted; read again when it changes.
    #[arg(long, value_name = "FILE", default_value = "/var/run/linkerd/tls/tls.key")]
    server_tls_key: PathBuf,
    /// Certificates of the webhooks, PEM, where they are mounted; otherwise each webhook makes its own and keeps it in a
    /// Secret, and the bundle of its configuration current.
    #[arg(long, value_name = "FILE", default_value = "/var/run/linkerd/tls/tls.crt")]
    server_tls_certs: PathBuf,
    /// Whether policies are left unchecked on admission.
    #[arg(long, default_value_t = false, num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    admission_controller_disabled: bool,
    /// The Deployment that owns the lease for writing statuses of policies.
    #[arg(long, value_name = "NAME", default_value = "linkerd-destination")]
    policy_deployment_name: String,
    /// How long writing one status may take, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 5000)]
    patch_timeout_ms: u64,

    /// The chart's values, YAML, which shape injected proxies; read again when they change.
    #[arg(long, value_name = "FILE", default_value = "/var/run/linkerd/config/values")]
    values: PathBuf,
    /// How often the injector looks for pods that have no proxy although they should.
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    audit_interval: String,

    /// Address of the one service that is named: destination, identity, sp-validator, proxy-injector or telemetry.
    #[arg(long)]
    addr: Option<ListenAddr>,
    /// Address of destination.
    #[arg(long, default_value_t = ListenAddr::All(port::DESTINATION))]
    destination_addr: ListenAddr,
    /// Address of identity.
    #[arg(long, default_value_t = ListenAddr::All(port::IDENTITY))]
    identity_addr: ListenAddr,
    /// Address of policy.
    #[arg(long, visible_alias = "policy-addr", default_value_t = ListenAddr::All(port::POLICY))]
    grpc_addr: ListenAddr,
    /// Address of the webhook for policies.
    #[arg(long, default_value_t = ListenAddr::All(9443))]
    server_addr: ListenAddr,
    /// Address of the webhook for ServiceProfiles.
    #[arg(long, default_value_t = ListenAddr::All(8443))]
    sp_validator_addr: ListenAddr,
    /// Address of the proxy injector.
    #[arg(long, default_value_t = ListenAddr::All(8443))]
    proxy_injector_addr: ListenAddr,
    /// Address of telemetry; by default :8089, and without Kubernetes 127.0.0.1:8089.
    #[arg(long)]
    telemetry_addr: Option<ListenAddr>,
    /// Admin address of destination, or else of sp-validator or proxy-injector: metrics, readiness, refused manifests;
    /// by default :9996, :9997 and :9995.
    #[arg(long)]
    metrics_addr: Option<ListenAddr>,
    /// Admin address of sp-validator.
    #[arg(long, default_value_t = ListenAddr::All(9997))]
    sp_validator_metrics_addr: ListenAddr,
    /// Admin address of identity and policy.
    #[arg(long, default_value_t = ListenAddr::All(9990))]
    admin_addr: ListenAddr,

    /// What is logged: panic, fatal, error, warn, info, debug or trace, or a filter such as warn,tulle=debug.
    #[arg(long, default_value = "info")]
    log_level: String,
    /// Form of log lines: plain or json.
    #[arg(long, default_value = "plain")]
    log_format: Format,

    /// Accepted for charts that pass it: there are no queues, a slow stream skips to the latest answer.
    #[arg(long, hide = true)]
    stream_queue_capacity: Option<u64>,
    /// As above.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    export_queue_metrics: Option<bool>,
    /// Accepted for charts that pass it: both layouts of issuer directories are understood.
    #[arg(long, hide = true)]
    identity_scheme: Option<String>,
    /// Accepted for charts that pass it: nothing is traced.
    #[arg(long, hide = true)]
    trace_collector: Option<String>,
    /// Accepted for charts that pass it: there is no profiler inside.
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_pprof: Option<bool>,
}

impl Config {
    /// What the flags mean.
    ///
    /// # Errors
    /// A value that cannot be, with its flag and what would be accepted.
    pub fn new(command: &Command) -> Result<Self> {
        let (flags, services) = (&command.flags, command.services());
        flags.tell_ignored();
        let domains = flags.domains()?;
        let listen = flags.listen(services)?;
        let source = || match &flags.manifests {
            Some(dir) => Source::Directory(dir.clone()),
            None => Source::Kubernetes,
        };
        Ok(Self {
            services,
            pod_name: pod_name(),
            source: services.need_source().then(source),
            kubernetes: flags.kubernetes()?,
            certificates: flags.certificates(services, &domains)?,
            client_certificates: flags.client_certificates,
            cluster: flags.cluster(domains, &listen)?,
            destination: flags.destination()?,
            policy: policy::Config {
                request_headers: match flags.allow_l5d_request_headers {
                    true => RequestHeaders::Honour,
                    false => RequestHeaders::Ignore,
                },
            },
            webhooks: flags.webhooks()?,
            listen,
        })
    }

    /// Whether anything here asks the API server.
    pub(crate) fn needs_kubernetes(&self) -> bool {
        let reviews = matches!(
            &self.certificates,
            Certificates::Here {
                tokens: Tokens::TokenReview,
                ..
            }
        );
        let webhooks = self.services.sp_validator || self.services.proxy_injector;
        self.source == Some(Source::Kubernetes) || reviews || webhooks
    }

    /// What is written into the cluster, and under which name.
    pub(crate) fn writeback(&self) -> writeback::Config {
        let Services {
            destination, policy, ..
        } = self.services;
        let statuses = || writeback::Statuses {
            cluster_networks: self.cluster.cluster_networks.clone(),
            global_egress_namespace: self.cluster.global_egress_namespace.clone(),
            patch_timeout: self.webhooks.patch_timeout,
        };
        let slices = destination && self.cluster.endpoints_from == EndpointsFrom::Slices;
        writeback::Config {
            controller_namespace: self.cluster.controller_namespace.clone(),
            holder: self.pod_name.clone(),
            deployment: self.webhooks.policy_deployment.clone(),
            slices: slices.then_some(writeback::Slices),
            statuses: policy.then(statuses),
        }
    }

    /// The TLS name under which proxies look for a service of the control plane.
    pub(crate) fn server_name(&self, service_account: &str) -> String {
        let ns = &self.cluster.controller_namespace;
        identity::service_account(service_account, ns, ns, &self.cluster.trust_domain)
    }
}

impl Logs {
    pub fn new(command: &Command) -> Self {
        Self {
            level: command.flags.log_level.clone(),
            format: command.flags.log_format,
        }
    }
}

/// The name of this pod, or of this machine where there is none.
fn pod_name() -> String {
    let of_machine = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = std::env::var("HOSTNAME")
        .ok()
        .filter(|name| !name.is_empty())
        .or_else(of_machine);
    name.map_or_else(|| "unnamed".to_owned(), |name| name.trim().to_owned())
}

struct Domains {
    cluster: String,
    trust: String,
}

impl Flags {
    fn domains(&self) -> Result<Domains> {
        ensure!(
            crate::trust::is_label(&self.controller_namespace),
            "-controller-namespace={:?} is not a namespace; expected letters, digits and '-', at most 63",
            self.controller_namespace
        );
        let cluster = match self.cluster_domain.as_str() {
            "" => {
                warn!("-cluster-domain is not given; using {DEFAULT_DOMAIN}");
                DEFAULT_DOMAIN
            }
            domain => domain,
        };
        let trust = match self.identity_trust_domain.as_str() {
            "" => {
                warn!("-identity-trust-domain is not given; using {cluster}");
                cluster
            }
            domain => domain,
        };
        for (flag, domain) in [("cluster-domain", cluster), ("identity-trust-domain", trust)] {
            ensure!(
                matches!(domain.parse(), Ok(Identity::Dns(_))),
                "-{flag}={domain:?} is not a DNS name; expected one such as {DEFAULT_DOMAIN}"
            );
        }
        Ok(Domains {
            cluster: cluster.to_owned(),
            trust: trust.to_owned(),
        })
    }

    fn certificates(&self, services: Services, domains: &Domains) -> Result<Certificates> {
        let ns = &self.controller_namespace;
        if !services.identity {
            let default_addr = || {
                format!(
                    "linkerd-identity-headless.{ns}.svc.{}:{}",
                    domains.cluster,
                    port::IDENTITY
                )
            };
            return Ok(Certificates::Remote(Remote {
                addr: match &self.identity_svc_addr {
                    Some(addr) => addr.clone(),
                    None => default_addr()
                        .parse()
                        .context("the default of --identity-svc-addr is not an address")?,
                },
                name: identity::service_account("linkerd-identity", ns, ns, &domains.trust),
                token: self.identity_token.clone(),
                trust_anchors: self.trust_anchors.clone(),
            }));
        }
        let tokens = match &self.token_keys {
            Some(dir) => Tokens::Keys(dir.clone()),
            None => Tokens::TokenReview,
        };
        let identity = crate::identity::Config {
            issuer: self.issuer.clone(),
            trust_anchors: self.trust_anchors.clone(),
            controller_namespace: ns.clone(),
            trust_domain: domains.trust.clone(),
            validity: Validity {
                lifetime: duration("identity-issuance-lifetime", &self.identity_issuance_lifetime)?,
                clock_skew: duration("identity-clock-skew-allowance", &self.identity_clock_skew_allowance)?,
            },
        };
        ensure!(
            identity.validity.lifetime > Duration::ZERO,
            "-identity-issuance-lifetime={:?} is no time at all; expected a duration such as 24h0m0s",
            self.identity_issuance_lifetime
        );
        Ok(Certificates::Here { identity, tokens })
    }

    fn cluster(&self, domains: Domains, listen: &Listen) -> Result<cluster::Config> {
        ensure!(
            self.enable_endpoint_slices || !self.enable_ipv6,
            "-enable-ipv6 needs -enable-endpoint-slices; disable both or neither"
        );
        Ok(cluster::Config {
            controller_namespace: self.controller_namespace.clone(),
            trust_domain: domains.trust,
            cluster_domain: domains.cluster,
            cluster_networks: parse_networks(&self.cluster_networks).context("--cluster-networks")?,
            probe_networks: parse_networks(&self.probe_networks).context("--probe-networks")?,
            default_policy: self.default_policy.parse().context("--default-policy")?,
            default_opaque_ports: self.default_opaque_ports.parse().context("-default-opaque-ports")?,
            global_egress_namespace: self.global_egress_network_namespace.clone(),
            endpoints_from: match self.enable_endpoint_slices {
                true => EndpointsFrom::Slices,
                false => EndpointsFrom::Endpoints,
            },
            ipv6: match self.enable_ipv6 {
                true => Ipv6::Serve,
                false => Ipv6::Drop,
            },
            h2_upgrade: match self.enable_h2_upgrade {
                true => H2Upgrade::Offer,
                false => H2Upgrade::Omit,
            },
            transport: match self.outbound_transport_mode.as_str() {
                "transparent" => TransportMode::Transparent,
                "transport-header" => TransportMode::TransportHeader,
                mode => {
                    // A chart that names a mode of a later version must not keep the mesh from starting.
                    error!(
                        mode,
                        "-outbound-transport-mode is neither transparent nor transport-header; using transparent"
                    );
                    TransportMode::Transparent
                }
            },
            addr: listen.destination.to_string(),
        })
    }

    fn destination(&self) -> Result<destination::Config> {
        ensure!(
            self.stream_queue_capacity != Some(0),
            "-stream-queue-capacity=0 would hold nothing; leave the flag out, as there are no queues"
        );
        let http2 = match self.meshed_http2_client_params.as_str() {
            "" => None,
            json => Some(http2::parse(json).with_context(|| format!("-meshed-http2-client-params={json}"))?),
        };
        Ok(destination::Config {
            http2,
            zone_weights: match self.ext_endpoint_zone_weights {
                true => ZoneWeights::PreferLocal,
                false => ZoneWeights::Equal,
            },
        })
    }

    fn kubernetes(&self) -> Result<kubernetes::Config> {
        let (qps, burst) = (self.kube_apiclient_qps, self.kube_apiclient_burst);
        ensure!(
            qps > 0.0 && qps <= 1e6 && burst > 0,
            "-kube-apiclient-qps={qps} and -kube-apiclient-burst={burst} let nothing through; expected numbers such as 100 \
             and 200"
        );
        Ok(kubernetes::Config {
            kubeconfig: self.kubeconfig.clone(),
            rate: Rate { qps, burst },
        })
    }

    fn webhooks(&self) -> Result<Webhooks> {
        Ok(Webhooks {
            files: webhook::mounted::Paths {
                certificate: self.server_tls_certs.clone(),
                key: self.server_tls_key.clone(),
            },
            policy_admission: match self.admission_controller_disabled {
                true => Admission::Disabled,
                false => Admission::Check,
            },
            policy_deployment: self.policy_deployment_name.clone(),
            patch_timeout: Duration::from_millis(self.patch_timeout_ms),
            injector: self.injector()?,
        })
    }

    fn injector(&self) -> Result<injector::Config> {
        let interval = go_duration::parse(&self.audit_interval).map_err(|err| anyhow!("-audit-interval: {err}"))?;
        ensure!(
            !interval.is_zero(),
            "-audit-interval={:?} would never rest; expected a duration such as 5m",
            self.audit_interval
        );
        Ok(injector::Config {
            files: injector::settings::Files {
                values: self.values.clone(),
                trust_anchors: self.trust_anchors.clone(),
                control_plane_namespace: self.controller_namespace.clone(),
            },
            audit: injector::audit::Config { interval },
        })
    }

    fn listen(&self, services: Services) -> Result<Listen> {
        let mut listen = Listen {
            destination: self.destination_addr,
            identity: self.identity_addr,
            policy: self.grpc_addr,
            policy_validator: self.server_addr,
            sp_validator: self.sp_validator_addr,
            proxy_injector: self.proxy_injector_addr,
            telemetry: self.telemetry_addr.unwrap_or_else(|| match self.manifests {
                Some(_) => ListenAddr::At((Ipv4Addr::LOCALHOST, port::TELEMETRY).into()),
                None => ListenAddr::All(port::TELEMETRY),
            }),
            metrics: ListenAddr::All(9996),
            admin: self.admin_addr,
            sp_validator_admin: self.sp_validator_metrics_addr,
            proxy_injector_admin: ListenAddr::All(9995),
        };
        if let Some(addr) = self.addr {
            let Services {
                destination,
                identity,
                policy: _,
                sp_validator,
                proxy_injector,
                telemetry,
            } = services;
            match [destination, identity, sp_validator, proxy_injector, telemetry] {
                [true, false, false, false, false] => listen.destination = addr,
                [false, true, false, false, false] => listen.identity = addr,
                [false, false, true, false, false] => listen.sp_validator = addr,
                [false, false, false, true, false] => listen.proxy_injector = addr,
                [false, false, false, false, true] => listen.telemetry = addr,
                _ => bail!(
                    "-addr={addr} could mean more than one service, or none; expected --destination-addr, --identity-addr, \
                     --grpc-addr, --sp-validator-addr, --proxy-injector-addr or --telemetry-addr"
                ),
            }
        }
        if let Some(addr) = self.metrics_addr {
            match (services.destination, services.sp_validator, services.proxy_injector) {
                (true, _, _) => listen.metrics = addr,
                (false, true, false) => listen.sp_validator_admin = addr,
                (false, false, true) => listen.proxy_injector_admin = addr,
                (false, _, _) => bail!(
                    "-metrics-addr={addr} could mean more than one service, or none; expected --admin-addr for identity and \
                     policy, or --sp-validator-metrics-addr"
                ),
            }
        }
        Ok(listen)
    }

    fn tell_ignored(&self) {
        let ignored = [
            ("-stream-queue-capacity", self.stream_queue_capacity.is_some()),
            ("-export-queue-metrics", self.export_queue_metrics.is_some()),
            ("-identity-scheme", self.identity_scheme.is_some()),
            (
                "-trace-collector",
                self.trace_collector.as_ref().is_some_and(|addr| !addr.is_empty()),
            ),
            ("-enable-pprof", self.enable_pprof == Some(true)),
        ];
        for (flag, _) in ignored.iter().filter(|(_, given)| *given) {
            warn!(flag, "this flag has no effect here");
        }
    }
}

impl FromStr for ListenAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused =
            || format!("{text:?} is not an address to listen on; expected :8086, 127.0.0.1:8086 or [::]:8086");
        match text.strip_prefix(':') {
            Some(port) => port.parse().map(Self::All).map_err(|_| refused()),
            None => text.parse().map(Self::At).map_err(|_| refused()),
        }
    }
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All(port) => write!(f, ":{port}"),
            Self::At(addr) => write!(f, "{addr}"),
        }
    }
}

fn duration(flag: &str, text: &str) -> Result<Duration> {
    go_duration::parse(text).map_err(|reason| anyhow::anyhow!("-{flag}: {reason}"))
}

const DEFAULT_DOMAIN: &str = "cluster.local";

#[cfg(test)]
mod tests;
