//! The state of the inbound side that all connections share.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use tulle_core::log_limit::LogLimiter;

use crate::{
    http::stack::layers::ServiceStack,
    inbound::{
        app_clients::AppClients,
        connection_addrs::ConnectionAddrs,
        gateway::Gateway,
        http_server_configs::HttpServerConfigs,
        metrics::Families,
        policy::{ActivePolicy, PortPolicies},
        profiles::Profiles,
    },
    metrics::hosts::HostMap,
    net::{orig_dst, tcp_metrics::ConnectionMetrics},
    tap::TapRegistry,
    tls::{credentials::Credentials, status::ServerTls},
    trace::Tracer,
};

/// The inbound side of the process; shared by all workers.
pub(crate) struct Inbound {
    /// The port of the proxy's inbound listener.
    pub(crate) own_port: u16,
    /// Addresses of this workload; empty if unknown.
    pub(crate) local_ips: BTreeSet<IpAddr>,
    pub(crate) orig_dst_lookup: orig_dst::OrigDstLookup,
    pub(crate) creds: Credentials,
    pub(crate) port_policies: Arc<PortPolicies>,
    pub(crate) profiles: Arc<Profiles>,
    pub(crate) detect_timeout: Duration,
    pub(crate) server_configs: HttpServerConfigs,
    pub(crate) service_stack: ServiceStack,
    pub(crate) families: Families,
    pub(crate) identity_name: Arc<str>,
    pub(crate) taps: Arc<TapRegistry>,
    /// `None` if tracing is disabled.
    pub(crate) tracer: Option<Tracer>,
    /// The server names (from SNI and transport headers) that are metric labels. The set has a limited size.
    pub(crate) server_name_labels: HostMap<()>,
    /// The request authorities that are metric labels. The set has a limited size. `None` if requests are not counted by authority.
    pub(crate) authority_labels: Option<HostMap<Arc<str>>>,
    /// `None` if this proxy is not a gateway.
    pub(crate) gateway: Option<Arc<dyn Gateway>>,
    /// Limits log lines about refused clients.
    pub(crate) log_limiter: LogLimiter,
    /// Limits log lines about clients that the authorization `audit` permits, by client and port.
    pub(crate) audit_log_limiter: LogLimiter<(IpAddr, u16)>,
    pub(crate) app_clients: AppClients,
}

impl Inbound {
    /// The metrics of connections from the client.
    pub(super) fn client_connection_metrics(
        &self,
        addrs: &ConnectionAddrs,
        tls: &ServerTls,
        active_policy: &ActivePolicy,
    ) -> Arc<ConnectionMetrics> {
        let server = &active_policy.server_policy.meta;
        let labels = self.families.connection_labels(addrs.target, tls, server);
        self.families.tcp.series(labels.with("peer", "src"))
    }
}
