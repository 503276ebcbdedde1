//! The configuration of each module, built from the command-line flags.

pub mod flags;
#[cfg(test)]
mod tests;
pub(crate) mod unsupported_flags;

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tracing::warn;
use tulle_core::dns_names::is_dns_label;
use tulle_core::identity::{self, Identity};
use tulle_core::logging::Format;
use tulle_core::names::{port, variable};
use tulle_core::networks::parse_networks;

use crate::cluster::{self, H2Upgrade, Ipv6, TransportMode};
use crate::cmd::{Command, Services};
use crate::config::flags::{Flags, ListenAddr};
use crate::destination::config::ZoneWeights;
use crate::destination::{self, http2};
use crate::identity::issuer::Validity;
use crate::identity::own_certificate::RemoteIdentity;
use crate::injector_webhook;
use crate::kubernetes;
use crate::kubernetes::request_layer::RequestRate;
use crate::mirror;
use crate::mirror::config::LocalMembers;
use crate::policy;
use crate::policy::config::L5dHeaders;
use crate::resources::go_duration;
use crate::resources::service::EndpointsSource;
use crate::tls::mesh_credentials::ClientCertificates;
use crate::webhook;
use crate::writeback;

/// The complete configuration. Only this module reads flags.
#[derive(Clone, Debug)]
pub struct Config {
    pub services: Services,
    /// Name of this process in leases and Events. It is the name of the pod.
    pub pod_name: String,
    /// Required by destination, policy and telemetry.
    pub source: Option<ObjectSource>,
    pub kubernetes: kubernetes::Config,
    pub cluster: cluster::Config,
    pub destination: destination::config::Config,
    pub policy: policy::config::Config,
    pub certificates: Certificates,
    /// Whether clients of destination and policy need a certificate. Default required.
    pub client_certificates: ClientCertificates,
    pub webhooks: Webhooks,
    pub writeback: Writeback,
    /// Set if the service mirror runs.
    pub mirror: Option<mirror::config::Config>,
    pub listen: ListenAddrs,
    /// `OmitServer` if only `all-in-one` starts telemetry, without Kubernetes and without --telemetry-addr. Another program may use
    /// the default port of telemetry, and this must not stop the other services.
    pub telemetry_listen_failure: ListenFailure,
    /// Flags with no effect in this control plane; each is logged at start.
    pub unsupported_flags: Vec<&'static str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectSource {
    Directory(PathBuf),
    Kubernetes,
}

/// How this process gets its own certificates.
#[derive(Clone, Debug)]
pub enum Certificates {
    /// The identity service in this process signs them.
    Local {
        identity: crate::identity::Config,
        tokens: TokenVerification,
    },
    /// Another identity service signs them.
    Remote(RemoteIdentity),
}

/// How service account tokens and join tokens are verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenVerification {
    /// Join tokens, verified with the public keys in a directory.
    PublicKeyDir(PathBuf),
    /// Service account tokens, verified by a TokenReview of the API server.
    TokenReview,
}

/// Settings of the admission webhooks.
#[derive(Clone, Debug)]
pub struct Webhooks {
    /// Paths of the mounted certificate and key, such as `/a/tls.crt`, that all webhooks and the telemetry API share. A server
    /// uses its own `/a/<name of its Service>/tls.crt` instead of the shared one if it exists. If neither is mounted, the server
    /// creates a certificate and keeps it in a Secret.
    pub certificate_paths: webhook::mounted_certificate::Paths,
    /// Whether policies are validated on admission. Default enabled; it has no effect without Kubernetes.
    pub policy_admission: Admission,
    pub injector: injector_webhook::Config,
}

/// Settings of the write-back to the cluster.
#[derive(Clone, Debug)]
pub struct Writeback {
    /// The Deployment that owns the leases for writing. Default `linkerd-destination`.
    pub lease_owner_deployment: String,
    /// Timeout of writing one status. Default 5 s.
    pub patch_timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Enabled,
    Disabled,
}

#[derive(Clone, Debug)]
pub struct ListenAddrs {
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
    pub destination_admin: ListenAddr,
    /// Admin server of identity and policy, and of telemetry in a process without destination.
    pub admin: ListenAddr,
    pub sp_validator_admin: ListenAddr,
    pub proxy_injector_admin: ListenAddr,
    pub mirror_admin: ListenAddr,
}

/// What happens if a server cannot listen, for example because another program uses its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenFailure {
    /// The process does not start.
    StopProcess,
    /// The process runs without this server.
    OmitServer,
}

#[derive(Clone, Debug)]
pub struct LogConfig {
    pub level: String,
    pub format: Format,
}

impl Config {
    /// Builds the configuration from the flags.
    ///
    /// # Errors
    /// Fails on an invalid value. The error has the flag, the value and the accepted form.
    pub fn from_command(command: &Command) -> Result<Self> {
        let (flags, services) = (&command.flags, command.services());
        let unsupported_flags = unsupported_flags::find(flags);
        for flag in &unsupported_flags {
            warn!(flag, "this flag has no effect here");
        }
        let domains = flags.domains(services)?;
        let listen = flags.listen(services)?;
        let source = || match &flags.manifests {
            Some(dir) => ObjectSource::Directory(dir.clone()),
            None => ObjectSource::Kubernetes,
        };
        Ok(Self {
            services,
            pod_name: pod_name(),
            source: services.need_object_source().then(source),
            kubernetes: flags.kubernetes()?,
            certificates: flags.certificates(services, &domains)?,
            client_certificates: flags.client_certificates,
            cluster: flags.cluster(domains, &listen)?,
            destination: flags.destination()?,
            policy: policy::config::Config {
                l5d_headers: match flags.allow_l5d_request_headers {
                    true => L5dHeaders::Honor,
                    false => L5dHeaders::Ignore,
                },
            },
            webhooks: flags.webhooks()?,
            writeback: Writeback {
                lease_owner_deployment: flags.policy_deployment_name.clone(),
                patch_timeout: Duration::from_millis(flags.patch_timeout_ms),
            },
            mirror: match services.service_mirror {
                true => Some(flags.service_mirror()?),
                false => None,
            },
            listen,
            telemetry_listen_failure: match flags.manifests.is_some()
                && flags.telemetry_addr.is_none()
                && !command.names_telemetry()
            {
                true => ListenFailure::OmitServer,
                false => ListenFailure::StopProcess,
            },
            unsupported_flags,
        })
    }

    /// Whether this process needs the API server.
    pub(crate) fn needs_kubernetes(&self) -> bool {
        let reviews_tokens = matches!(
            &self.certificates,
            Certificates::Local {
                tokens: TokenVerification::TokenReview,
                ..
            }
        );
        let webhooks = self.services.sp_validator || self.services.proxy_injector;
        self.source == Some(ObjectSource::Kubernetes) || reviews_tokens || webhooks || self.mirror.is_some()
    }

    pub(crate) fn writeback_config(&self) -> writeback::config::Config {
        let Services {
            destination, policy, ..
        } = self.services;
        let write_slices = destination && self.cluster.endpoints_source == EndpointsSource::EndpointSlices;
        writeback::config::Config {
            controller_namespace: self.cluster.controller_namespace.clone(),
            lease_holder: self.pod_name.clone(),
            lease_owner_deployment: self.writeback.lease_owner_deployment.clone(),
            write_slices,
            statuses: policy.then(|| self.statuses_config()),
        }
    }

    /// The settings of statuses. They also apply to a directory of manifests: it has no statuses, but their content is counted and
    /// logged.
    pub(crate) fn statuses_config(&self) -> writeback::config::StatusesConfig {
        writeback::config::StatusesConfig {
            cluster_domain: self.cluster.cluster_domain.clone(),
            cluster_networks: self.cluster.cluster_networks.clone(),
            global_egress_namespace: self.cluster.global_egress_namespace.clone(),
            default_opaque_ports: self.cluster.default_opaque_ports.clone(),
            patch_timeout: self.writeback.patch_timeout,
        }
    }

    /// The TLS server name of a service of the control plane, as proxies expect it.
    pub(crate) fn server_name(&self, service_account: &str) -> String {
        let ns = &self.cluster.controller_namespace;
        identity::service_account_identity(service_account, ns, ns, &self.cluster.trust_domain)
    }
}

impl LogConfig {
    pub fn new(command: &Command) -> Self {
        Self {
            level: command.flags.log_level.clone(),
            format: command.flags.log_format,
        }
    }
}

/// Returns the name of this pod, or the host name outside of Kubernetes.
fn pod_name() -> String {
    let hostname = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = std::env::var(variable::HOSTNAME)
        .ok()
        .filter(|name| !name.is_empty())
        .or_else(hostname);
    name.map_or_else(|| "unnamed".to_owned(), |name| name.trim().to_owned())
}

struct Domains {
    cluster: String,
    trust: String,
}

impl Flags {
    fn domains(&self, services: Services) -> Result<Domains> {
        let uses_domains = !services.is_mirror_only();
        ensure!(
            is_dns_label(&self.controller_namespace),
            "--controller-namespace={:?} is not a namespace; expected at most 63 lower-case letters, digits and '-', with no \
             '-' at the start or end",
            self.controller_namespace
        );
        let cluster = match self.cluster_domain.as_str() {
            "" if uses_domains => {
                warn!("--cluster-domain is not set; using {DEFAULT_CLUSTER_DOMAIN}");
                DEFAULT_CLUSTER_DOMAIN
            }
            "" => DEFAULT_CLUSTER_DOMAIN,
            domain => domain,
        };
        let trust = match self.identity_trust_domain.as_str() {
            "" if uses_domains => {
                warn!("--identity-trust-domain is not set; using {cluster}");
                cluster
            }
            "" => cluster,
            domain => domain,
        };
        for (flag, domain) in [("cluster-domain", cluster), ("identity-trust-domain", trust)] {
            ensure!(
                matches!(domain.parse(), Ok(Identity::Dns(_))),
                "--{flag}={domain:?} is not a DNS name; expected one such as {DEFAULT_CLUSTER_DOMAIN}"
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
            return Ok(Certificates::Remote(RemoteIdentity {
                addr: match &self.identity_svc_addr {
                    Some(addr) => addr.clone(),
                    None => default_addr()
                        .parse()
                        .context("the default of --identity-svc-addr is not an address")?,
                },
                name: identity::service_account_identity("linkerd-identity", ns, ns, &domains.trust),
                token: self.identity_token.clone(),
                trust_anchors: self.trust_anchors.clone(),
            }));
        }
        let tokens = match &self.token_keys {
            Some(dir) => TokenVerification::PublicKeyDir(dir.clone()),
            None => TokenVerification::TokenReview,
        };
        let identity = crate::identity::Config {
            issuer: self.issuer.clone(),
            trust_anchors: self.trust_anchors.clone(),
            controller_namespace: ns.clone(),
            trust_domain: domains.trust.clone(),
            validity: Validity {
                lifetime: parse_duration("identity-issuance-lifetime", &self.identity_issuance_lifetime)?,
                clock_skew: parse_duration("identity-clock-skew-allowance", &self.identity_clock_skew_allowance)?,
            },
        };
        ensure!(
            identity.validity.lifetime > Duration::ZERO,
            "--identity-issuance-lifetime={:?} must be greater than 0; expected a duration such as 24h0m0s",
            self.identity_issuance_lifetime
        );
        Ok(Certificates::Local { identity, tokens })
    }

    fn cluster(&self, domains: Domains, listen: &ListenAddrs) -> Result<cluster::Config> {
        ensure!(
            self.enable_endpoint_slices || !self.enable_ipv6,
            "--enable-ipv6 needs --enable-endpoint-slices; enable EndpointSlices, or also disable IPv6"
        );
        Ok(cluster::Config {
            controller_namespace: self.controller_namespace.clone(),
            trust_domain: domains.trust,
            cluster_domain: domains.cluster,
            cluster_networks: parse_networks(&self.cluster_networks).context("--cluster-networks")?,
            probe_networks: parse_networks(&self.probe_networks).context("--probe-networks")?,
            default_policy: self.default_policy.parse().context("--default-policy")?,
            default_opaque_ports: self.default_opaque_ports.parse().context("--default-opaque-ports")?,
            global_egress_namespace: self.global_egress_network_namespace.clone(),
            endpoints_source: match self.enable_endpoint_slices {
                true => EndpointsSource::EndpointSlices,
                false => EndpointsSource::Endpoints,
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
                mode => bail!("--outbound-transport-mode={mode:?} is unknown; accepted: transparent, transport-header"),
            },
            remote_name: None,
            log_addr: listen.destination.to_string(),
        })
    }

    fn destination(&self) -> Result<destination::config::Config> {
        ensure!(
            self.stream_queue_capacity != Some(0),
            "--stream-queue-capacity=0 is invalid; remove the flag, because there are no queues"
        );
        let http2 = match self.meshed_http2_client_params.as_str() {
            "" => None,
            json => Some(http2::parse(json).with_context(|| format!("--meshed-http2-client-params={json}"))?),
        };
        Ok(destination::config::Config {
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
            "--kube-apiclient-qps={qps} and --kube-apiclient-burst={burst} are out of range; expected numbers such as 100 \
             and 200"
        );
        Ok(kubernetes::Config {
            kubeconfig: self.kubeconfig.clone(),
            request_rate: RequestRate { qps, burst },
        })
    }

    fn webhooks(&self) -> Result<Webhooks> {
        Ok(Webhooks {
            certificate_paths: webhook::mounted_certificate::Paths {
                certificate: self.server_tls_certs.clone(),
                key: self.server_tls_key.clone(),
            },
            policy_admission: match self.admission_controller_disabled {
                true => Admission::Disabled,
                false => Admission::Enabled,
            },
            injector: self.injector()?,
        })
    }

    fn injector(&self) -> Result<injector_webhook::Config> {
        let interval = go_duration::parse(&self.audit_interval).map_err(|err| anyhow!("--audit-interval: {err}"))?;
        ensure!(
            !interval.is_zero(),
            "--audit-interval={:?} must be greater than 0; expected a duration such as 5m",
            self.audit_interval
        );
        Ok(injector_webhook::Config {
            files: injector_webhook::config_reload::Files {
                values: self.values.clone(),
                trust_anchors: self.trust_anchors.clone(),
                control_plane_namespace: self.controller_namespace.clone(),
            },
            audit: injector_webhook::audit::Config { interval },
        })
    }

    fn service_mirror(&self) -> Result<mirror::config::Config> {
        let flags = &self.mirror;
        ensure!(
            self.manifests.is_none(),
            "service-mirror needs Kubernetes; remove --manifests, or remove service-mirror and write manifests of the mirrors \
             (Services and Endpoints)"
        );
        let refresh_period = go_duration::parse(&flags.endpoint_refresh_period)
            .map_err(|err| anyhow!("--endpoint-refresh-period: {err}"))?;
        ensure!(
            refresh_period >= Duration::from_secs(1),
            "--endpoint-refresh-period={:?} must be at least 1s",
            flags.endpoint_refresh_period
        );
        ensure!(
            flags.all_links || flags.excluded_links.is_empty(),
            "--excluded-links={:?} has no effect without --all-links; remove it",
            flags.excluded_links
        );
        ensure!(
            !flags.all_links || flags.probe_service.is_empty(),
            "--probe-service={:?} has no effect with --all-links, because each Link has its own probe Service; remove it",
            flags.probe_service
        );
        let scope = match &flags.link_name {
            Some(name) => mirror::config::Scope::Link(name.clone()),
            None if flags.all_links => mirror::config::Scope::all_links_except(&flags.excluded_links),
            None if flags.local_mirror => mirror::config::Scope::ThisCluster(LocalMembers::new(
                flags
                    .federated_service_selector
                    .parse()
                    .map_err(|err| anyhow!("--federated-service-selector: {err}"))?,
                &flags.excluded_labels,
                &flags.excluded_annotations,
            )),
            None => bail!(
                "service-mirror needs --all-links, --link-name=NAME with the Link to the other cluster, or --local-mirror"
            ),
        };
        Ok(mirror::config::Config {
            namespace: flags.namespace.clone(),
            scope,
            probe_service: Some(flags.probe_service.clone()).filter(|name| !name.is_empty()),
            may_create_namespaces: flags.enable_namespace_creation,
            mirrors_pods: flags.enable_headless_services,
            refresh_period,
            lease_holder: pod_name(),
        })
    }

    fn listen(&self, services: Services) -> Result<ListenAddrs> {
        let mut listen = ListenAddrs {
            destination: self
                .destination_addr
                .unwrap_or(ListenAddr::AllInterfaces(port::DESTINATION)),
            identity: self.identity_addr.unwrap_or(ListenAddr::AllInterfaces(port::IDENTITY)),
            policy: self.grpc_addr,
            policy_validator: self.server_addr,
            sp_validator: self.sp_validator_addr.unwrap_or(ListenAddr::AllInterfaces(8443)),
            proxy_injector: self.proxy_injector_addr.unwrap_or(ListenAddr::AllInterfaces(8443)),
            telemetry: self.telemetry_addr.unwrap_or_else(|| match self.manifests {
                Some(_) => ListenAddr::Socket((Ipv4Addr::LOCALHOST, port::TELEMETRY).into()),
                None => ListenAddr::AllInterfaces(port::TELEMETRY),
            }),
            destination_admin: ListenAddr::AllInterfaces(9996),
            admin: self.admin_addr,
            sp_validator_admin: self
                .sp_validator_metrics_addr
                .unwrap_or(ListenAddr::AllInterfaces(9997)),
            proxy_injector_admin: ListenAddr::AllInterfaces(9995),
            mirror_admin: ListenAddr::AllInterfaces(9999),
        };
        if let Some(addr) = self.addr {
            let Services {
                destination,
                identity,
                policy: _,
                sp_validator,
                proxy_injector,
                telemetry,
                service_mirror: _,
            } = services;
            let (service_addr, own) = match [destination, identity, sp_validator, proxy_injector, telemetry] {
                [true, false, false, false, false] => {
                    (&mut listen.destination, ("--destination-addr", self.destination_addr))
                }
                [false, true, false, false, false] => (&mut listen.identity, ("--identity-addr", self.identity_addr)),
                [false, false, true, false, false] => (
                    &mut listen.sp_validator,
                    ("--sp-validator-addr", self.sp_validator_addr),
                ),
                [false, false, false, true, false] => (
                    &mut listen.proxy_injector,
                    ("--proxy-injector-addr", self.proxy_injector_addr),
                ),
                [false, false, false, false, true] => {
                    (&mut listen.telemetry, ("--telemetry-addr", self.telemetry_addr))
                }
                _ => bail!(
                    "--addr={addr} needs exactly one service that it can apply to; expected --destination-addr, --identity-addr, \
                     --grpc-addr, --sp-validator-addr, --proxy-injector-addr or --telemetry-addr"
                ),
            };
            reject_second_addr(("--addr", addr), own)?;
            *service_addr = addr;
        }
        if let Some(addr) = self.metrics_addr {
            let with_own_server = [services.sp_validator, services.proxy_injector, services.service_mirror];
            match (services.destination, with_own_server) {
                (true, _) => listen.destination_admin = addr,
                (false, [true, false, false]) => {
                    let own = ("--sp-validator-metrics-addr", self.sp_validator_metrics_addr);
                    reject_second_addr(("--metrics-addr", addr), own)?;
                    listen.sp_validator_admin = addr;
                }
                (false, [false, true, false]) => listen.proxy_injector_admin = addr,
                (false, [false, false, true]) if services.is_mirror_only() => listen.mirror_admin = addr,
                (false, _) => bail!(
                    "--metrics-addr={addr} needs exactly one service that it can apply to; expected --admin-addr for identity, \
                     policy or telemetry, or --sp-validator-metrics-addr"
                ),
            }
        }
        Ok(listen)
    }
}

/// Fails if both the flag that several services share and the service's own flag set its address.
fn reject_second_addr(shared: (&str, ListenAddr), own: (&str, Option<ListenAddr>)) -> Result<()> {
    if let (own_flag, Some(own_addr)) = own {
        let (flag, addr) = shared;
        bail!("{flag}={addr} and {own_flag}={own_addr} set the same address; expected only one of them");
    }
    Ok(())
}

fn parse_duration(flag: &str, text: &str) -> Result<Duration> {
    go_duration::parse(text).map_err(|reason| anyhow::anyhow!("--{flag}: {reason}"))
}

const DEFAULT_CLUSTER_DOMAIN: &str = "cluster.local";
