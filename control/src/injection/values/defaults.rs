//! The defaults of the chart. Most are equal to the defaults of Linkerd.

use std::collections::BTreeMap;

use serde_json::Value;
use tulle_core::names::port;

use crate::injection::values::schema::{
    Collector, ControlClient, DebugContainer, Identity, Image, InboundMode, IptablesMode, Metrics, MountPath,
    NetworkValidator, PROXY_IMAGE, Ports, Probe, ProtocolParameters, Proxy, ProxyInit, ProxyInjector, Resources,
    Runtime, StartupProbe, StreamTimeouts, Tap, Tracing, Values, Workers,
};

impl Default for Values {
    fn default() -> Self {
        Self {
            linkerd_version: String::new(),
            cluster_domain: "cluster.local".to_owned(),
            cluster_networks: "10.0.0.0/8,100.64.0.0/10,172.16.0.0/12,192.168.0.0/16,fd00::/8".to_owned(),
            identity_trust_anchors_pem: String::new(),
            identity_trust_domain: String::new(),
            identity: Identity::default(),
            disable_ipv6: true,
            cni_enabled: false,
            image_pull_policy: "IfNotPresent".to_owned(),
            proxy: Proxy::default(),
            proxy_init: ProxyInit::default(),
            network_validator: NetworkValidator::default(),
            debug_container: DebugContainer::default(),
            proxy_injector: ProxyInjector::default(),
        }
    }
}

impl Default for Identity {
    fn default() -> Self {
        Self {
            service_account_token_projection: true,
        }
    }
}

impl Default for Proxy {
    fn default() -> Self {
        Self {
            image: Image::named(PROXY_IMAGE),
            log_level: "warn,linkerd=info,hickory=error".to_owned(),
            log_format: "plain".to_owned(),
            log_http_headers: "off".to_owned(),
            access_log: String::new(),
            ports: Ports::default(),
            uid: 2102,
            gid: -1,
            cores: String::new(),
            runtime: Runtime::default(),
            resources: Resources::default(),
            await_proxy: true,
            native_sidecar: true,
            wait_before_exit_seconds: 0,
            shutdown_grace_period: String::new(),
            opaque_ports: "25,587,3306,4444,4567,4568,5432,6379,9300,11211".to_owned(),
            default_inbound_policy: "all-unauthenticated".to_owned(),
            inbound_mode: InboundMode::Redirect,
            rewrite_probes: true,
            require_identity_on_inbound_ports: String::new(),
            require_tls_on_inbound_ports: String::new(),
            enable_external_profiles: false,
            enable_shutdown_endpoint: false,
            is_gateway: false,
            is_ingress: false,
            outbound_connect_timeout: "1000ms".to_owned(),
            inbound_connect_timeout: "100ms".to_owned(),
            outbound_discovery_cache_unused_timeout: "5s".to_owned(),
            inbound_discovery_cache_unused_timeout: "90s".to_owned(),
            disable_outbound_protocol_detect_timeout: false,
            disable_inbound_protocol_detect_timeout: false,
            control: ControlClient::default(),
            inbound: ProtocolParameters::keep_alive(),
            outbound: ProtocolParameters::keep_alive(),
            liveness_probe: Probe::default(),
            readiness_probe: Probe::default(),
            startup_probe: StartupProbe::default(),
            metrics: Metrics::default(),
            tracing: Tracing::default(),
            tap: Tap::default(),
            additional_env: Vec::new(),
            experimental_env: Vec::new(),
            security_context: None,
            capabilities: None,
        }
    }
}

impl ProtocolParameters {
    pub(super) fn keep_alive() -> Self {
        let parameters = [("keepAliveInterval", "10s"), ("keepAliveTimeout", "3s")];
        let http2 = parameters.map(|(name, value)| (name.to_owned(), Value::from(value)));
        let server = BTreeMap::from([("http2".to_owned(), BTreeMap::from(http2))]);
        Self(BTreeMap::from([("server".to_owned(), server)]))
    }
}

impl Image {
    fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..Self::default()
        }
    }
}

impl Default for Ports {
    fn default() -> Self {
        Self {
            admin: port::ADMIN,
            control: port::TAP,
            inbound: port::INBOUND,
            outbound: port::OUTBOUND,
        }
    }
}

impl Default for Workers {
    fn default() -> Self {
        Self {
            minimum: "1".to_owned(),
            maximum: String::new(),
            maximum_cpu_ratio: String::new(),
        }
    }
}

impl Default for StreamTimeouts {
    fn default() -> Self {
        Self {
            initial_timeout: "3s".to_owned(),
            idle_timeout: "5m".to_owned(),
            lifetime: "1h".to_owned(),
        }
    }
}

impl Default for Probe {
    fn default() -> Self {
        Self {
            initial_delay_seconds: None,
            timeout_seconds: 1,
        }
    }
}

impl Default for StartupProbe {
    fn default() -> Self {
        Self {
            initial_delay_seconds: 0,
            period_seconds: 1,
            failure_threshold: 120,
        }
    }
}

impl Default for Tracing {
    fn default() -> Self {
        Self {
            enabled: false,
            trace_service_name: "linkerd-proxy".to_owned(),
            labels: BTreeMap::new(),
            collector: Collector::default(),
        }
    }
}

impl Default for Tap {
    fn default() -> Self {
        Self {
            enabled: true,
            service_account_name: "linkerd-destination".to_owned(),
            namespace: String::new(),
        }
    }
}

impl Default for ProxyInit {
    fn default() -> Self {
        Self {
            iptables_mode: IptablesMode::Nft,
            // Linkerd skips the ports 4567 and 4568 of Galera. Skipped ports are open to all clients without a policy, so here both
            // ports are opaque instead.
            ignore_inbound_ports: String::new(),
            ignore_outbound_ports: String::new(),
            skip_subnets: String::new(),
            unredirected_ipv6: "drop".to_owned(),
            close_wait_timeout_secs: 0,
            log_level: String::new(),
            log_format: String::new(),
            privileged: false,
            run_as_root: false,
            run_as_user: 65534,
            run_as_group: 65534,
            xt_mount_path: MountPath::default(),
        }
    }
}

impl Default for MountPath {
    fn default() -> Self {
        Self {
            mount_path: "/run".to_owned(),
            name: "linkerd-proxy-init-xtables-lock".to_owned(),
        }
    }
}

impl Default for NetworkValidator {
    fn default() -> Self {
        Self {
            log_level: "debug".to_owned(),
            log_format: "plain".to_owned(),
            connect_addr: String::new(),
            listen_addr: String::new(),
            timeout: "10s".to_owned(),
            security_context: None,
        }
    }
}

impl Default for DebugContainer {
    fn default() -> Self {
        Self {
            // tulle publishes no debug image, so users must set one.
            image: Image::named(""),
            enabled: false,
        }
    }
}

/// Linkerd's debug image, which values files for Linkerd can name.
pub(in crate::injection) const LINKERD_DEBUG_IMAGE: &str = "cr.l5d.io/linkerd/debug";
/// Default version of Linkerd's debug image, which has other versions than tulle.
pub(in crate::injection) const LINKERD_DEBUG_IMAGE_VERSION: &str = "stable-2.14.10";
