//! Shows requests to tap observers.

use std::{borrow::Cow, collections::BTreeMap};

use http::Request;
use tulle_proto::tap::tap_event::ProxyDirection;

use crate::{
    http::body::Body,
    inbound::{
        connection_addrs::ConnectionAddrs,
        metrics::meta_labels,
        profiles::ProfileRequestGuard,
        request::{context::HttpConnection, observe::AuthorizedRouteMetrics},
    },
    tap::{RequestInfo, SamplingTaps, TappedRequest},
    tls::status::{ClientTls, NoClientTls},
};

impl HttpConnection {
    /// Shows the request to the observers that sample it. `route_metrics` is `None` if the request was denied.
    pub(super) fn start_tap(
        &self,
        req: &Request<Body>,
        route_metrics: Option<&AuthorizedRouteMetrics>,
        profile_request: Option<&ProfileRequestGuard>,
    ) -> Option<Box<TappedRequest>> {
        let taps = self.inbound.taps.sample()?;
        self.start_sampled_tap(&taps, req, route_metrics, profile_request)
    }

    #[cold]
    fn start_sampled_tap(
        &self,
        taps: &SamplingTaps,
        req: &Request<Body>,
        route_metrics: Option<&AuthorizedRouteMetrics>,
        profile_request: Option<&ProfileRequestGuard>,
    ) -> Option<Box<TappedRequest>> {
        let ConnectionAddrs { client, target } = self.addrs;
        let current = self.port_policy.current();
        let to_owned = |(key, value): (String, &str)| (key, value.to_owned());
        let mut labels = BTreeMap::from(meta_labels("srv", &current.server_policy.meta).map(to_owned));
        let mut route_labels = profile_request
            .map(ProfileRequestGuard::route_labels)
            .unwrap_or_default();
        if let Some(route_metrics) = route_metrics {
            let route = meta_labels("route", &route_metrics.route_meta).map(to_owned);
            route_labels.extend(route.clone());
            labels.extend(route);
            labels.extend(meta_labels("authz", &route_metrics.authorization_meta).map(to_owned));
        }
        let request_info = RequestInfo {
            source_labels: self.tls.tap_labels(),
            destination_labels: Cow::Owned(labels),
            destination_tls: ClientTls::Plain(NoClientTls::Loopback).tap_labels(),
            route_labels,
            ..RequestInfo::new(req, ProxyDirection::Inbound, client.0, target)
        };
        self.inbound.taps.show(taps, request_info)
    }
}
