//! One peer: how to reach it, what it costs, whether it is available, and what is counted of it.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use http::Version;
use tulle_core::identity::Identity;

use crate::{
    balance::{balancer::Candidate, breaker::Breaker, load::Load},
    http::{
        client::{Client, PoolConfig, Protocol},
        h2,
    },
    metrics::http::Series,
    net::connect,
    outbound::{
        Mode,
        connector::Connector,
        metrics::{Families, endpoint_labels},
    },
    policy::endpoint::{EndpointSpec, ProtocolHint},
    tap::Taps,
    tls::{
        creds::Credentials,
        status::{ClientTls, WhyClientPlain},
    },
    trace::Tracer,
};

/// What all endpoints of the process share.
pub(crate) struct Common {
    pub(crate) creds: Credentials,
    pub(crate) connect: connect::Config,
    pub(crate) http2: h2::Params,
    pub(crate) pool: PoolConfig,
    pub(crate) families: Families,
    /// Addresses of this workload: what is there is reached without a proxy on the other side.
    pub(crate) ips: BTreeSet<IpAddr>,
    pub(crate) workers: usize,
    /// Who watches requests.
    pub(crate) taps: Arc<Taps>,
    /// Who makes spans of traces, where there are any.
    pub(crate) tracer: Option<Tracer>,
    pub(crate) mode: Mode,
}

/// A peer that requests and connections can be sent to.
pub(crate) struct Endpoint {
    pub(super) spec: Arc<EndpointSpec>,
    load: Load,
    breaker: Breaker,
    pub(super) connector: Arc<Connector>,
    /// Connections belong to the worker that opened them.
    clients: Box<[OnceLock<Client>]>,
    http2: h2::Params,
    pool: PoolConfig,
    pub(super) tls: ClientTls,
    pub(super) series: Arc<Series>,
    pub(super) taps: Arc<Taps>,
    pub(super) tracer: Option<Tracer>,
}

impl Endpoint {
    /// `authority` is the logical destination, for metrics.
    pub(super) fn new(
        common: &Common,
        authority: Option<&str>,
        spec: Arc<EndpointSpec>,
        load: Load,
        breaker: Breaker,
    ) -> Self {
        let local = common.ips.contains(&spec.addr.ip()) || spec.addr.ip().is_loopback();
        let tls = match &spec.tls {
            _ if local => ClientTls::Plain(WhyClientPlain::Loopback),
            Some(tls) => ClientTls::Meshed(tls.identity.clone()),
            None if common.mode == Mode::Ingress && authority.is_none() => {
                ClientTls::Plain(WhyClientPlain::IngressWithoutOverride)
            }
            None => ClientTls::Plain(WhyClientPlain::NotProvidedByServiceDiscovery),
        };
        let labels = endpoint_labels(authority, &spec, &tls);
        let cost = common.families.connections.cost(spec.locality);
        let counts = common
            .families
            .tcp
            .with_cost(labels.clone().with("peer", "dst"), Some(cost));
        let creds = (!local).then_some(&common.creds);
        let spec = if local && (spec.hint != ProtocolHint::Unknown || spec.authority_override.is_some()) {
            Arc::new(EndpointSpec {
                hint: ProtocolHint::Unknown,
                authority_override: None,
                ..EndpointSpec::clone(&spec)
            })
        } else {
            spec
        };
        Self {
            connector: Arc::new(Connector::new(&spec, creds, common.connect, counts)),
            http2: http2_params(&common.http2, &spec),
            pool: common.pool,
            clients: (0..common.workers).map(|_| OnceLock::new()).collect(),
            series: common.families.http.series(labels),
            taps: common.taps.clone(),
            tracer: common.tracer.clone(),
            tls,
            spec,
            load,
            breaker,
        }
    }

    /// This worker's connections.
    pub(super) fn client(&self, worker: usize) -> &Client {
        self.clients[worker].get_or_init(|| {
            let connector = self.connector.clone();
            let open = move |protocol| -> std::pin::Pin<Box<dyn Future<Output = _> + Send>> {
                let connector = connector.clone();
                Box::pin(async move { connector.open(Some(protocol)).await })
            };
            Client::new(self.spec.addr, Box::new(open), self.http2, self.pool)
        })
    }

    /// The version in which a request travels to this endpoint; `as_it_is` keeps HTTP/1 what it is.
    pub(super) fn protocol(&self, version: Version, as_it_is: bool) -> Protocol {
        match version {
            _ if as_it_is => Protocol::Http1,
            Version::HTTP_2 => Protocol::Http2,
            _ if self.spec.hint == ProtocolHint::H2 => Protocol::Http2,
            _ => Protocol::Http1,
        }
    }

    /// Whether there is a proxy that makes HTTP/1 again of what travels as HTTP/2.
    pub(super) fn restores_http1(&self) -> bool {
        self.spec.hint == ProtocolHint::H2 && self.identity().is_some()
    }

    /// Who is there; `None` where nobody proves it.
    pub(super) fn identity(&self) -> Option<&Identity> {
        match &self.tls {
            ClientTls::Meshed(identity) => Some(identity),
            ClientTls::Plain(_) => None,
        }
    }
}

impl Candidate for Endpoint {
    fn load(&self) -> &Load {
        &self.load
    }

    fn breaker(&self) -> &Breaker {
        &self.breaker
    }
}

/// Our settings, where discovery has none for this endpoint.
fn http2_params(ours: &h2::Params, spec: &EndpointSpec) -> h2::Params {
    let theirs = &spec.http2;
    h2::Params {
        stream_window: theirs.stream_window.unwrap_or(ours.stream_window),
        connection_window: theirs.connection_window.unwrap_or(ours.connection_window),
        keep_alive: theirs
            .keep_alive
            .filter(|pings| pings.interval > Duration::ZERO && pings.timeout > Duration::ZERO)
            .map(|pings| h2::KeepAlive {
                interval: pings.interval,
                timeout: pings.timeout,
            })
            .or(ours.keep_alive),
        max_frame_size: theirs.max_frame_size.or(ours.max_frame_size),
        max_send_buffer: theirs
            .max_send_buf_size
            .map(|size| size as usize)
            .or(ours.max_send_buffer),
        max_resets: theirs
            .max_concurrent_reset_streams
            .map(|streams| streams as usize)
            .or(ours.max_resets),
        ..*ours
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::endpoint::{Http2Params, KeepAlive};

    #[test]
    fn what_discovery_says_of_http2_wins_over_our_settings() {
        let ours = h2::Params::default();
        let (interval, timeout) = (Duration::from_secs(10), Duration::from_secs(3));
        let mut spec = EndpointSpec::plain(([10, 0, 0, 1], 80).into());
        assert_eq!(http2_params(&ours, &spec), ours);
        spec.http2 = Http2Params {
            connection_window: Some(1),
            stream_window: Some(2),
            keep_alive: Some(KeepAlive { interval, timeout }),
            max_concurrent_reset_streams: Some(3),
            max_frame_size: Some(4),
            max_send_buf_size: Some(5),
        };
        let expected = h2::Params {
            connection_window: 1,
            stream_window: 2,
            keep_alive: Some(h2::KeepAlive { interval, timeout }),
            max_resets: Some(3),
            max_frame_size: Some(4),
            max_send_buffer: Some(5),
            ..ours
        };
        assert_eq!(http2_params(&ours, &spec), expected);
    }
}
