//! Flags, and what they mean for each room.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{ArgAction, Args};
use tracing::warn;
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
use crate::policy::{self, RequestHeaders};
use crate::resources::go_duration;

/// The whole configuration; nothing behind it looks at flags.
#[derive(Clone, Debug)]
pub struct Config {
    pub services: Services,
    /// Needed by destination and policy.
    pub manifests: Option<PathBuf>,
    pub cluster: cluster::Config,
    pub destination: destination::Config,
    pub policy: policy::Config,
    pub certificates: Certificates,
    pub listen: Listen,
}

/// Where certificates come from.
#[derive(Clone, Debug)]
pub enum Certificates {
    /// This process signs them.
    Here {
        identity: crate::identity::Config,
        token_keys: PathBuf,
    },
    /// An identity service elsewhere does.
    Remote(Remote),
}

/// Where the services of a process listen.
#[derive(Clone, Debug)]
pub struct Listen {
    pub destination: ListenAddr,
    pub identity: ListenAddr,
    pub policy: ListenAddr,
    /// Admin server of destination.
    pub metrics: ListenAddr,
    /// Admin server of identity and policy.
    pub admin: ListenAddr,
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
    /// Directory of manifests that describes services, workloads and policies; read again when it changes.
    #[arg(long, value_name = "DIR")]
    manifests: Option<PathBuf>,
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
    /// Directory of public keys for join tokens (*.pem, *.pub; ECDSA P-256); read again when it changes.
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

    /// Namespace of the control plane.
    #[arg(long, visible_alias = "control-plane-namespace", default_value = "linkerd")]
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

    /// Address of the one service that is named, destination or identity.
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
    /// Admin address of destination: metrics, readiness, refused manifests.
    #[arg(long, default_value_t = ListenAddr::All(9996))]
    metrics_addr: ListenAddr,
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
        let needs_manifests = services.destination || services.policy;
        ensure!(
            flags.manifests.is_some() || !needs_manifests,
            "--manifests is missing; expected the directory that describes services, workloads and policies"
        );
        Ok(Self {
            services,
            manifests: flags.manifests.clone().filter(|_| needs_manifests),
            certificates: flags.certificates(services, &domains)?,
            cluster: flags.cluster(domains)?,
            destination: flags.destination()?,
            policy: policy::Config {
                request_headers: match flags.allow_l5d_request_headers {
                    true => RequestHeaders::Honour,
                    false => RequestHeaders::Ignore,
                },
            },
            listen: flags.listen(services)?,
        })
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
        let Some(token_keys) = self.token_keys.clone() else {
            bail!("--token-keys is missing; expected the directory of public keys that join tokens are checked with");
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
        Ok(Certificates::Here { identity, token_keys })
    }

    fn cluster(&self, domains: Domains) -> Result<cluster::Config> {
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
                mode => bail!("-outbound-transport-mode={mode:?}; expected transparent or transport-header"),
            },
        })
    }

    fn destination(&self) -> Result<destination::Config> {
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

    fn listen(&self, services: Services) -> Result<Listen> {
        let mut listen = Listen {
            destination: self.destination_addr,
            identity: self.identity_addr,
            policy: self.grpc_addr,
            metrics: self.metrics_addr,
            admin: self.admin_addr,
        };
        match (self.addr, services.destination, services.identity) {
            (None, _, _) => {}
            (Some(addr), true, false) => listen.destination = addr,
            (Some(addr), false, true) => listen.identity = addr,
            (Some(addr), _, _) => bail!(
                "-addr={addr} could mean more than one service, or none; expected --destination-addr, --identity-addr or \
                 --grpc-addr"
            ),
        }
        Ok(listen)
    }

    fn tell_ignored(&self) {
        let ignored = [
            ("-stream-queue-capacity", self.stream_queue_capacity.is_some()),
            ("-export-queue-metrics", self.export_queue_metrics.is_some()),
            ("-identity-scheme", self.identity_scheme.is_some()),
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
mod tests {
    use std::ffi::OsString;

    use super::*;

    fn config(line: &str) -> Result<Config> {
        let line = std::iter::once("tulle-control").chain(line.split(' '));
        Config::new(&Command::parse_from_line(line.map(OsString::from))?)
    }

    fn refused(line: &str, expected: &str) {
        let err = format!("{:#}", config(line).unwrap_err());
        assert!(err.contains(expected), "{line}: {err} has no {expected}");
    }

    #[test]
    fn defaults_are_those_of_linkerd() {
        let config = config("all-in-one --manifests m --token-keys k").unwrap();
        assert_eq!(config.cluster.cluster_domain, "cluster.local");
        assert_eq!(config.cluster.trust_domain, "cluster.local");
        assert_eq!(config.listen.destination, ListenAddr::All(8086));
        assert_eq!(config.listen.policy, ListenAddr::All(8090));
        assert_eq!(
            config.server_name("linkerd-identity"),
            "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local"
        );
        let Certificates::Here { identity, .. } = config.certificates else {
            panic!("identity is in this process");
        };
        assert_eq!(identity.validity.lifetime, Duration::from_secs(24 * 3600));
        assert_eq!(identity.validity.clock_skew, Duration::from_secs(20));
        assert_eq!(identity.issuer, PathBuf::from("/var/run/linkerd/identity/issuer"));
    }

    #[test]
    fn charts_may_pass_what_they_pass_to_linkerd() {
        let config = config(
            "destination -addr=:18086 -controller-namespace=mesh -outbound-transport-mode=transport-header \
             -enable-h2-upgrade=false -log-level=info -log-format=plain -enable-endpoint-slices=true \
             -cluster-domain=a.b -identity-trust-domain=c.d -default-opaque-ports=25,3306 -enable-ipv6=false \
             -stream-queue-capacity=100 -export-queue-metrics --manifests m",
        )
        .unwrap();
        assert_eq!(config.listen.destination, ListenAddr::All(18086));
        assert_eq!(config.cluster.transport, TransportMode::TransportHeader);
        assert_eq!(config.cluster.h2_upgrade, H2Upgrade::Omit);
        assert_eq!(config.cluster.ipv6, Ipv6::Drop);
        assert!(config.cluster.default_opaque_ports.contains(3306));
        let Certificates::Remote(remote) = config.certificates else {
            panic!("identity is elsewhere");
        };
        assert_eq!(remote.addr.to_string(), "linkerd-identity-headless.mesh.svc.a.b:8080");
        assert_eq!(remote.name, "linkerd-identity.mesh.serviceaccount.identity.mesh.c.d");
    }

    #[test]
    fn a_bad_value_is_refused_with_what_would_be_accepted() {
        let rest = "--manifests m --token-keys k";
        refused("destination", "--manifests is missing");
        refused("identity", "--token-keys is missing");
        refused(
            &format!("identity {rest} -identity-issuance-lifetime=1d"),
            "is not a duration such as",
        );
        refused(
            &format!("identity {rest} -identity-issuance-lifetime=0"),
            "no time at all",
        );
        refused(&format!("policy {rest} --default-policy all"), "--default-policy: ");
        refused(
            &format!("policy {rest} --cluster-networks 10.0.0.0/33"),
            "--cluster-networks: ",
        );
        refused(
            &format!("policy {rest} -default-opaque-ports 70000"),
            "-default-opaque-ports: ",
        );
        refused(&format!("policy {rest} -cluster-domain a..b"), "is not a DNS name");
        refused(&format!("policy {rest} -controller-namespace A"), "is not a namespace");
        refused(
            &format!("destination {rest} -outbound-transport-mode x"),
            "expected transparent or transport-header",
        );
        refused(
            &format!("destination {rest} -meshed-http2-client-params {{"),
            "-meshed-http2-client-params={",
        );
        refused(
            &format!("destination {rest} -enable-endpoint-slices=false"),
            "-enable-ipv6 needs",
        );
        refused(
            &format!("all-in-one {rest} -addr :1"),
            "expected --destination-addr, --identity-addr",
        );
        refused(&format!("policy {rest} -addr :1"), "or none");
        refused(
            &format!("policy {rest} --grpc-addr 8090"),
            "is not an address to listen on",
        );
    }
}
