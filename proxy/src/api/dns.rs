//! Resolves the addresses of the control plane: SRV records first, then address records, cached for their TTL within
//! the configured bounds. Also resolves names for applications.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::ResolverOpts;
use hickory_resolver::net::NetError;
use hickory_resolver::proto::rr::RData;
use hickory_resolver::proto::rr::rdata::SRV;
use parking_lot::Mutex;
use tokio::time::Instant;
use tulle_core::addr::NameAddr;
use tulle_core::metrics::Labels;

use crate::api::metrics::Metrics;

/// Bounds of the time that an answer is cached. Default: at least [`MIN_TTL`], and no maximum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    pub min_ttl: Option<Duration>,
    pub max_ttl: Option<Duration>,
}

/// Resolves names with the servers of `/etc/resolv.conf`.
///
/// The file is read at the first lookup: a proxy whose control plane is given by address needs no DNS.
#[derive(Clone)]
pub(crate) struct Resolver {
    shared: Arc<Shared>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum DnsError {
    #[error("the configuration of the resolver cannot be read")]
    Configuration(#[source] NetError),
    #[error("looking up {name} failed")]
    Lookup {
        name: Arc<str>,
        #[source]
        source: NetError,
    },
    #[error("looking up {name}: no answer within {limit:?}")]
    Timeout { name: Arc<str>, limit: Duration },
    #[error("{name} has no addresses")]
    NoAddresses { name: Arc<str> },
}

/// The addresses of a name, and when they expire.
#[derive(Debug)]
pub(crate) struct Addresses {
    pub(crate) ips: Vec<IpAddr>,
    pub(crate) expires_at: Instant,
}

struct Shared {
    config: Config,
    metrics: Metrics,
    resolver: Mutex<Option<TokioResolver>>,
}

impl Resolver {
    pub(crate) fn new(config: Config, metrics: Metrics) -> Self {
        Self {
            shared: Arc::new(Shared {
                config,
                metrics,
                resolver: Mutex::new(None),
            }),
        }
    }

    /// The addresses of a name, without duplicates, with the port of its SRV record if it has one.
    pub(crate) async fn resolve(&self, addr: &NameAddr) -> Result<Vec<SocketAddr>, DnsError> {
        let resolver = self.shared.resolver()?;
        let mut found = self.lookup_srv(&resolver, addr).await;
        if found.is_empty() {
            let ips = self.lookup_ips(&resolver, &addr.name, addr).await?;
            found = ips.into_iter().map(|ip| SocketAddr::new(ip, addr.port)).collect();
        }
        found.sort_unstable();
        found.dedup();
        match found.is_empty() {
            true => Err(DnsError::NoAddresses {
                name: addr.name.clone(),
            }),
            false => Ok(found),
        }
    }

    /// Looks up the IPv4 and IPv6 addresses of a name for an application.
    ///
    /// # Errors
    /// The name has no address, or no server answers within `limit`.
    pub(crate) async fn resolve_ips(&self, name: &str, limit: Duration) -> Result<Addresses, DnsError> {
        let resolver = self.shared.resolver()?;
        let lookup = tokio::time::timeout(limit, resolver.lookup_ip(name)).await;
        self.count(&"applications", "A/AAAA", matches!(lookup, Ok(Ok(_))));
        match lookup {
            Ok(Ok(lookup)) => Ok(Addresses {
                ips: lookup.iter().collect(),
                expires_at: Instant::from_std(lookup.valid_until()),
            }),
            Ok(Err(source)) => Err(DnsError::Lookup {
                name: name.into(),
                source,
            }),
            Err(_) => Err(DnsError::Timeout {
                name: name.into(),
                limit,
            }),
        }
    }

    /// The addresses from SRV records; empty if there are none, which is normal outside of Kubernetes.
    async fn lookup_srv(&self, resolver: &TokioResolver, addr: &NameAddr) -> Vec<SocketAddr> {
        let lookup = resolver.srv_lookup(&*addr.name).await;
        self.count(addr, "SRV", lookup.is_ok());
        let Ok(lookup) = lookup else { return Vec::new() };
        let mut found = Vec::new();
        for record in lookup.answers() {
            let RData::SRV(SRV { port, target, .. }) = &record.data else {
                continue;
            };
            let target = target.to_utf8();
            let ips = match ip_from_pod_name(&target) {
                Some(ip) => vec![ip],
                None => self.lookup_ips(resolver, &target, addr).await.unwrap_or_default(),
            };
            found.extend(ips.into_iter().map(|ip| SocketAddr::new(ip, *port)));
        }
        found
    }

    /// The addresses from A and AAAA records of `name`. The lookup is counted for `metric_client`.
    async fn lookup_ips(
        &self,
        resolver: &TokioResolver,
        name: &str,
        metric_client: &NameAddr,
    ) -> Result<Vec<IpAddr>, DnsError> {
        let lookup = resolver.lookup_ip(name).await;
        self.count(metric_client, "A/AAAA", lookup.is_ok());
        match lookup {
            Ok(lookup) => Ok(lookup.iter().collect()),
            Err(source) => Err(DnsError::Lookup {
                name: name.into(),
                source,
            }),
        }
    }

    fn count(&self, client: &dyn Display, record_type: &str, found: bool) {
        // As in Linkerd, every failed lookup counts as `not_found`.
        let result = if found { "ok" } else { "not_found" };
        let labels = Labels::new()
            .with("client", client)
            .with("record_type", record_type)
            .with("result", result);
        self.shared.metrics.resolutions.get(&labels).inc();
    }
}

impl Config {
    /// Sets the bounds of the time that answers are cached.
    fn apply_ttl_bounds(&self, options: &mut ResolverOpts) {
        let max = self.max_ttl.unwrap_or(Duration::MAX);
        options.positive_min_ttl = Some(self.min_ttl.unwrap_or(MIN_TTL).min(max));
        options.positive_max_ttl = self.max_ttl;
        options.negative_max_ttl = Some(NEGATIVE_TTL.min(max));
    }
}

impl Shared {
    fn resolver(&self) -> Result<TokioResolver, DnsError> {
        let mut resolver = self.resolver.lock();
        if let Some(resolver) = &*resolver {
            return Ok(resolver.clone());
        }
        let mut builder = TokioResolver::builder_tokio().map_err(DnsError::Configuration)?;
        self.config.apply_ttl_bounds(builder.options_mut());
        let built = builder.build().map_err(DnsError::Configuration)?;
        Ok(resolver.insert(built).clone())
    }
}

/// The address in the first label of a pod's DNS name: `10-0-0-1.…`, `fd00--1.…`.
fn ip_from_pod_name(name: &str) -> Option<IpAddr> {
    let label = name.split('.').next()?;
    let v4 = label.replace('-', ".").parse::<Ipv4Addr>().map(IpAddr::V4);
    v4.or_else(|_| label.replace('-', ":").parse::<Ipv6Addr>().map(IpAddr::V6))
        .ok()
}

/// Default minimum TTL. With a shorter TTL, DNS servers would get many lookups.
const MIN_TTL: Duration = Duration::from_secs(5);
/// Maximum TTL of negative answers. It is short, because the name of a control plane that restarts exists again soon. The callers
/// have their own backoff.
const NEGATIVE_TTL: Duration = Duration::from_secs(1);

#[cfg(test)]
pub(super) mod tests {
    use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig};
    use hickory_resolver::net::runtime::TokioRuntimeProvider;
    use hickory_resolver::proto::op::{Message, OpCode, ResponseCode};
    use hickory_resolver::proto::rr::rdata::{A, AAAA};
    use hickory_resolver::proto::rr::{Name, Record, RecordType};
    use tokio::net::UdpSocket;
    use tokio::task::JoinHandle;
    use tulle_core::metrics::Registry;

    use super::*;

    #[test]
    fn addresses_are_read_from_the_names_of_pods() {
        for (name, expected) in [
            (
                "10-0-0-1.linkerd-dst-headless.linkerd.svc.cluster.local.",
                Some("10.0.0.1"),
            ),
            (
                "fd00--1.linkerd-dst-headless.linkerd.svc.cluster.local.",
                Some("fd00::1"),
            ),
            ("linkerd-dst-0.linkerd-dst-headless.linkerd.svc.cluster.local.", None),
            ("", None),
        ] {
            assert_eq!(ip_from_pod_name(name), expected.map(|ip| ip.parse().unwrap()), "{name}");
        }
    }

    const LIMIT: Duration = Duration::from_secs(10);

    /// The records of a small test zone.
    fn zone(name: &str, kind: RecordType) -> Vec<RData> {
        let srv = |target: &str| RData::SRV(SRV::new(0, 1, 9086, Name::from_ascii(target).unwrap()));
        match (name, kind) {
            ("dst.mesh.", RecordType::SRV) => vec![srv("10-0-0-1.dst.mesh."), srv("node.mesh.")],
            ("node.mesh.", RecordType::A) => vec![RData::A(A::new(10, 0, 0, 2))],
            ("replicas.mesh.", RecordType::A) => (1..=3).map(|n| RData::A(A::new(127, 0, 0, n))).collect(),
            ("plain.mesh.", RecordType::A) => vec![RData::A(A::new(10, 0, 0, 3))],
            ("both.mesh.", RecordType::A) => vec![RData::A(A::new(10, 0, 0, 4))],
            ("both.mesh.", RecordType::AAAA) => vec![RData::AAAA(AAAA::new(0xfd00, 0, 0, 0, 0, 0, 0, 4))],
            _ => Vec::new(),
        }
    }

    /// A resolver that sends its queries to `server`.
    pub(in crate::api) fn resolver(server: SocketAddr, config: Config, registry: &Registry) -> Resolver {
        let mut connection = ConnectionConfig::udp();
        connection.port = server.port();
        let server = NameServerConfig::new(server.ip(), true, vec![connection]);
        let servers = ResolverConfig::from_name_servers(vec![server]);
        let mut builder = TokioResolver::builder_with_config(servers, TokioRuntimeProvider::default());
        config.apply_ttl_bounds(builder.options_mut());
        let resolver = Resolver::new(config, Metrics::new(registry));
        *resolver.shared.resolver.lock() = Some(builder.build().unwrap());
        resolver
    }

    /// A server of the test zone.
    pub(in crate::api) async fn name_server() -> (SocketAddr, JoinHandle<()>) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let addr = socket.local_addr().unwrap();
        let task = tokio::spawn(async move {
            let mut bytes = [0; 1024];
            loop {
                let (length, client) = socket.recv_from(&mut bytes).await.unwrap();
                let query = Message::from_vec(&bytes[..length]).unwrap();
                let question = query.queries[0].clone();
                let name = question.name().to_ascii().to_ascii_lowercase();
                let mut answer = Message::response(query.metadata.id, OpCode::Query);
                let found = zone(&name, question.query_type());
                if found.is_empty() {
                    answer.metadata.response_code = ResponseCode::NXDomain;
                }
                answer.add_answers(
                    found
                        .into_iter()
                        .map(|data| Record::from_rdata(question.name().clone(), 30, data)),
                );
                answer.add_query(question);
                socket.send_to(&answer.to_vec().unwrap(), client).await.unwrap();
            }
        });
        (addr, task)
    }

    #[tokio::test]
    async fn services_are_found_by_srv_records_or_else_by_address_records() {
        let (addr, _server) = name_server().await;
        let registry = Registry::new();
        let resolver = resolver(addr, Config::default(), &registry);
        for (name, expected) in [
            ("dst.mesh.:8086", &["10.0.0.1:9086", "10.0.0.2:9086"][..]),
            ("plain.mesh.:8086", &["10.0.0.3:8086"]),
            ("both.mesh.:8086", &["10.0.0.4:8086", "[fd00::4]:8086"]),
        ] {
            let found = resolver.resolve(&name.parse().unwrap()).await.unwrap();
            let expected: Vec<SocketAddr> = expected.iter().map(|addr| addr.parse().unwrap()).collect();
            assert_eq!(found, expected, "{name}");
        }
        let missing = resolver
            .resolve(&"missing.mesh.:8086".parse().unwrap())
            .await
            .unwrap_err();
        assert_eq!(missing.to_string(), "looking up missing.mesh. failed");
        let counted = r#"control_dns_resolutions_total{client="dst.mesh.:8086",record_type="SRV",result="ok"} 1"#;
        assert!(registry.render().contains(counted), "{}", registry.render());
    }

    #[tokio::test]
    async fn answers_are_cached_for_their_ttl_within_bounds() {
        let (addr, _server) = name_server().await;
        let seconds = |n| Some(Duration::from_secs(n));
        for (min_ttl, max_ttl, expected) in [
            (None, None, 30),
            (seconds(60), None, 60),
            (None, seconds(20), 20),
            // Below the default minimum.
            (None, seconds(3), 3),
        ] {
            let resolver = resolver(addr, Config { min_ttl, max_ttl }, &Registry::new());
            let asked_at = Instant::now();
            let found = resolver.resolve_ips("both.mesh.", LIMIT).await.unwrap();
            let mut ips = found.ips;
            ips.sort_unstable();
            assert_eq!(ips, ["10.0.0.4", "fd00::4"].map(|ip| ip.parse::<IpAddr>().unwrap()));
            let kept = found.expires_at - asked_at;
            let expected = Duration::from_secs(expected);
            assert!(
                kept > expected - Duration::from_secs(2) && kept < expected + Duration::from_secs(2),
                "{kept:?}"
            );
        }
        let resolver = resolver(addr, Config::default(), &Registry::new());
        assert!(resolver.resolve_ips("missing.mesh.", LIMIT).await.is_err());
    }

    #[tokio::test]
    async fn a_lookup_without_an_answer_ends_at_its_limit_and_is_counted() {
        let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let registry = Registry::new();
        let resolver = resolver(silent.local_addr().unwrap(), Config::default(), &registry);
        let limit = Duration::from_millis(50);
        let error = resolver.resolve_ips("both.mesh.", limit).await.unwrap_err();
        assert_eq!(error.to_string(), "looking up both.mesh.: no answer within 50ms");
        let counted =
            r#"control_dns_resolutions_total{client="applications",record_type="A/AAAA",result="not_found"} 1"#;
        assert!(registry.render().contains(counted), "{}", registry.render());
    }
}
