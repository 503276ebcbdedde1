//! The flags of `tulle inject` that become annotations, with Linkerd's names.

use tulle_control::injection::check_annotation;
use tulle_core::names::annotation;

#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Proxy options")]
pub(super) struct ProxyFlags {
    /// The registry of the images, such as registry.example.com/mesh
    #[arg(long, value_name = "REGISTRY")]
    registry: Option<String>,
    /// The proxy's image, without its tag
    #[arg(long, value_name = "IMAGE")]
    proxy_image: Option<String>,
    /// The tag of the proxy's image
    #[arg(long, value_name = "TAG")]
    proxy_version: Option<String>,
    /// When images are pulled: Always, Never or IfNotPresent
    #[arg(long, value_name = "POLICY")]
    image_pull_policy: Option<String>,
    /// The port to which inbound connections are redirected [default: 4143]
    #[arg(long, value_name = "PORT")]
    inbound_port: Option<String>,
    /// The port to which outbound connections are redirected [default: 4140]
    #[arg(long, value_name = "PORT")]
    outbound_port: Option<String>,
    /// The port for metrics and probes [default: 4191]
    #[arg(long, value_name = "PORT")]
    admin_port: Option<String>,
    /// The port for tap [default: 4190]
    #[arg(long, value_name = "PORT")]
    control_port: Option<String>,
    /// Inbound ports that bypass the proxy, such as 22,8000-8100
    #[arg(long, value_name = "PORTS")]
    skip_inbound_ports: Option<String>,
    /// Outbound ports that bypass the proxy
    #[arg(long, value_name = "PORTS")]
    skip_outbound_ports: Option<String>,
    /// Networks of clients whose inbound connections bypass the proxy, such as 10.0.0.0/8
    #[arg(long, value_name = "CIDRS")]
    skip_subnets: Option<String>,
    /// How inbound connections reach the proxy: redirect, or tproxy, which preserves client addresses
    #[arg(long, value_name = "MODE")]
    inbound_mode: Option<String>,
    /// Ports whose traffic the proxy treats as opaque; also set on Services
    #[arg(long, value_name = "PORTS")]
    opaque_ports: Option<String>,
    /// The CPU request, such as 100m
    #[arg(long, value_name = "QUANTITY")]
    proxy_cpu_request: Option<String>,
    /// The CPU limit
    #[arg(long, value_name = "QUANTITY")]
    proxy_cpu_limit: Option<String>,
    /// The memory request, such as 20Mi
    #[arg(long, value_name = "QUANTITY")]
    proxy_memory_request: Option<String>,
    /// The memory limit
    #[arg(long, value_name = "QUANTITY")]
    proxy_memory_limit: Option<String>,
    /// The user that the proxy runs as [default: 2102]
    #[arg(long, value_name = "UID")]
    proxy_uid: Option<String>,
    /// The group that the proxy runs as
    #[arg(long, value_name = "GID")]
    proxy_gid: Option<String>,
    /// The log level, such as warn,linkerd=debug
    #[arg(long, value_name = "LEVELS")]
    proxy_log_level: Option<String>,
    /// The log format: plain or json
    #[arg(long, value_name = "FORMAT")]
    proxy_log_format: Option<String>,
    /// The format of the access log: apache or json
    #[arg(long, value_name = "FORMAT")]
    access_log: Option<String>,
    /// The default inbound policy, such as all-authenticated
    #[arg(long, value_name = "POLICY")]
    default_inbound_policy: Option<String>,
    /// Ports whose clients must have an identity
    #[arg(long, value_name = "PORTS")]
    require_identity_on_inbound_ports: Option<String>,
    /// Also query ServiceProfiles for names outside the cluster
    #[arg(long)]
    enable_external_profiles: bool,
    /// Inject the proxy as a native sidecar, an init container that keeps running [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    native_sidecar: Option<String>,
    /// Seconds that the proxy continues to serve when the pod is stopped, before it drains
    #[arg(long, value_name = "SECONDS")]
    wait_before_exit_seconds: Option<String>,
    /// Maximum time for open requests to end when the proxy shuts down, such as 2m
    #[arg(long, value_name = "DURATION")]
    shutdown_grace_period: Option<String>,
    /// The timeout of connections in CLOSE_WAIT, such as 60s; requires proxyInit.runAsRoot
    #[arg(long, value_name = "DURATION")]
    close_wait_timeout: Option<String>,
    /// Add a debug container with network tools
    #[arg(long)]
    enable_debug_sidecar: bool,
}

impl ProxyFlags {
    /// The annotations for these flags.
    ///
    /// # Errors
    /// Fails if the injector would ignore a value as invalid.
    pub(super) fn annotations(&self) -> anyhow::Result<Vec<(&'static str, String)>> {
        let true_if = |flag: bool| flag.then(|| "true".to_owned());
        let image_in_registry = |name: &str| {
            let registry = self.registry.as_ref()?.trim_end_matches('/');
            Some(format!("{registry}/{name}"))
        };
        let all = [
            (
                annotation::PROXY_IMAGE,
                self.proxy_image.clone().or_else(|| image_in_registry("proxy")),
            ),
            (
                annotation::DEBUG_IMAGE,
                image_in_registry("debug").filter(|_| self.enable_debug_sidecar),
            ),
            (annotation::PROXY_VERSION_OVERRIDE, self.proxy_version.clone()),
            (annotation::IMAGE_PULL_POLICY, self.image_pull_policy.clone()),
            (annotation::INBOUND_PORT, self.inbound_port.clone()),
            (annotation::OUTBOUND_PORT, self.outbound_port.clone()),
            (annotation::ADMIN_PORT, self.admin_port.clone()),
            (annotation::CONTROL_PORT, self.control_port.clone()),
            (annotation::SKIP_INBOUND_PORTS, self.skip_inbound_ports.clone()),
            (annotation::SKIP_OUTBOUND_PORTS, self.skip_outbound_ports.clone()),
            (annotation::SKIP_SUBNETS, self.skip_subnets.clone()),
            (annotation::INBOUND_MODE, self.inbound_mode.clone()),
            (annotation::OPAQUE_PORTS, self.opaque_ports.clone()),
            (annotation::PROXY_CPU_REQUEST, self.proxy_cpu_request.clone()),
            (annotation::PROXY_CPU_LIMIT, self.proxy_cpu_limit.clone()),
            (annotation::PROXY_MEMORY_REQUEST, self.proxy_memory_request.clone()),
            (annotation::PROXY_MEMORY_LIMIT, self.proxy_memory_limit.clone()),
            (annotation::PROXY_UID, self.proxy_uid.clone()),
            (annotation::PROXY_GID, self.proxy_gid.clone()),
            (annotation::PROXY_LOG_LEVEL, self.proxy_log_level.clone()),
            (annotation::PROXY_LOG_FORMAT, self.proxy_log_format.clone()),
            (annotation::ACCESS_LOG, self.access_log.clone()),
            (annotation::DEFAULT_INBOUND_POLICY, self.default_inbound_policy.clone()),
            (
                annotation::REQUIRE_IDENTITY_INBOUND_PORTS,
                self.require_identity_on_inbound_ports.clone(),
            ),
            (
                annotation::ENABLE_EXTERNAL_PROFILES,
                true_if(self.enable_external_profiles),
            ),
            (annotation::PROXY_ENABLE_NATIVE_SIDECAR, self.native_sidecar.clone()),
            (
                annotation::ALPHA_WAIT_BEFORE_EXIT_SECONDS,
                self.wait_before_exit_seconds.clone(),
            ),
            (annotation::SHUTDOWN_GRACE_PERIOD, self.shutdown_grace_period.clone()),
            (annotation::CLOSE_WAIT_TIMEOUT, self.close_wait_timeout.clone()),
            (annotation::ENABLE_DEBUG_SIDECAR, true_if(self.enable_debug_sidecar)),
        ];
        let set: Vec<_> = all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
        for (key, value) in &set {
            check_annotation(key, value).map_err(anyhow::Error::msg)?;
        }
        Ok(set)
    }

    /// The value of the opaque ports annotation for Services.
    pub(super) fn opaque_ports(&self) -> Option<&str> {
        self.opaque_ports.as_deref()
    }
}
