//! The policy of a destination, from `outbound.proto`.

use std::collections::BTreeMap;
use std::mem::take;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use tulle_core::backoff::Backoff;
use tulle_core::retry;
use tulle_proto::destination::WeightedAddr;
use tulle_proto::http_route::{self, HostMatch};
use tulle_proto::meta::Metadata;
use tulle_proto::outbound as proto;

use crate::policy::client::{
    AccrualKind, BackendSpec, BackendTarget, BackoffPolicy, ClientHttp, ClientPolicy, ClientProtocol, Distribution,
    FailureAccrual, HeaderOverrides, LoadParams, MirrorSpec, OpaqueFilter, OpaqueRoute, Queue, RetryConditions,
    RetryPolicy, RouteAction, RouteBackend, Timeouts, TlsRoute,
};
use crate::policy::decode::endpoint::endpoint;
use crate::policy::decode::fields::{DecodeError, client_meta, duration, optional_duration};
use crate::policy::decode::routes;
use crate::policy::endpoint::EndpointSpec;
use crate::policy::filter::{self, Filter};
use crate::policy::route::{Route, Rule};

/// Decodes the policy of a destination.
///
/// # Errors
/// A field is missing or invalid; then the whole message is refused.
pub(crate) fn client_policy(message: proto::OutboundPolicy) -> Result<ClientPolicy, DecodeError> {
    use proto::proxy_protocol::{Detect, Grpc, Http1, Http2, Kind};

    let meta = client_meta(message.metadata)?;
    let kind = message
        .protocol
        .and_then(|protocol| protocol.kind)
        .ok_or(DecodeError::Missing("protocol"))?;
    let http1 = |Http1 {
                     routes,
                     failure_accrual,
                 }| http(routes, failure_accrual);
    let http2 = |Http2 {
                     routes,
                     failure_accrual,
                 }| http(routes, failure_accrual);
    let protocol = match kind {
        Kind::Detect(Detect {
            timeout,
            opaque,
            http1: h1,
            http2: h2,
        }) => ClientProtocol::Detect {
            timeout: duration("detect timeout", timeout)?,
            http1: http1(h1.ok_or(DecodeError::Missing("protocol.detect.http1"))?)?,
            http2: http2(h2.ok_or(DecodeError::Missing("protocol.detect.http2"))?)?,
            opaque: opaque_route(opaque.ok_or(DecodeError::Missing("protocol.detect.opaque"))?.routes)?,
        },
        Kind::Opaque(opaque) => ClientProtocol::Opaque(opaque_route(opaque.routes)?),
        Kind::Http1(message) => ClientProtocol::Http1(http1(message)?),
        Kind::Http2(message) => ClientProtocol::Http2(http2(message)?),
        Kind::Grpc(Grpc {
            routes,
            failure_accrual,
        }) => ClientProtocol::Grpc(grpc(routes, failure_accrual)?),
        Kind::Tls(tls) => ClientProtocol::Tls(tls.routes.into_iter().map(tls_route).collect::<Result<_, _>>()?),
    };
    let mut policy = ClientPolicy { meta, protocol };
    if policy.compares_normalized_paths() {
        policy.protocol.normalize_path_matches();
    }
    Ok(policy)
}

fn http(messages: Vec<proto::HttpRoute>, accrual: Option<proto::FailureAccrual>) -> Result<ClientHttp, DecodeError> {
    let routes = messages.into_iter().map(|message| {
        let proto::HttpRoute { metadata, hosts, rules } = message;
        route(metadata, hosts, || rules.into_iter().map(http_rule).collect())
    });
    Ok(ClientHttp {
        routes: routes.collect::<Result<_, _>>()?,
        failure_accrual: accrual.map(failure_accrual).transpose()?,
    })
}

fn grpc(messages: Vec<proto::GrpcRoute>, accrual: Option<proto::FailureAccrual>) -> Result<ClientHttp, DecodeError> {
    let routes = messages.into_iter().map(|message| {
        let proto::GrpcRoute { metadata, hosts, rules } = message;
        route(metadata, hosts, || rules.into_iter().map(grpc_rule).collect())
    });
    Ok(ClientHttp {
        routes: routes.collect::<Result<_, _>>()?,
        failure_accrual: accrual.map(failure_accrual).transpose()?,
    })
}

fn route(
    metadata: Option<Metadata>,
    hosts: Vec<HostMatch>,
    rules: impl FnOnce() -> Result<Vec<Rule<RouteAction>>, DecodeError>,
) -> Result<Route<RouteAction>, DecodeError> {
    let meta = client_meta(metadata)?;
    let decode = || {
        Ok(Route {
            meta: meta.clone(),
            hosts: routes::hosts(hosts)?,
            rules: rules()?,
        })
    };
    decode().map_err(|error: DecodeError| error.in_resource(&meta))
}

/// Decodes the distribution of one kind of route. The kinds differ only in the module of their types. `$filters` decodes the
/// filters of a backend.
macro_rules! distribution {
    ($module:ident, $filters:expr, $message:expr) => {{
        use proto::$module::distribution::Kind;
        let route_backend = |mut message: proto::$module::RouteBackend| {
            Ok(RouteBackend {
                filters: $filters(&mut message)?,
                backend: backend(message.backend)?,
            })
        };
        match $message
            .and_then(|message| message.kind)
            .ok_or(DecodeError::Missing("backends"))?
        {
            Kind::Empty(_) => Ok(Distribution::Empty),
            Kind::FirstAvailable(list) => first_available(list.backends.into_iter().map(route_backend).collect()),
            Kind::RandomAvailable(list) => {
                let weighted = list.backends.into_iter().map(|message| {
                    let (message, weight) = (message.backend, message.weight);
                    Ok((route_backend(message.ok_or(DecodeError::Missing("backend"))?)?, weight))
                });
                random_available(weighted.collect())
            }
        }
    }};
}

fn http_rule(message: proto::http_route::Rule) -> Result<Rule<RouteAction>, DecodeError> {
    let mut filters = collect_filters(message.filters, http_filter)?;
    let mirrors = rule_extensions(message.filter_extensions, &mut filters)?;
    Ok(Rule {
        matches: routes::http_matches(message.matches)?,
        filters,
        action: RouteAction {
            backends: distribution!(
                http_route,
                |backend: &mut proto::http_route::RouteBackend| {
                    let filters = collect_filters(take(&mut backend.filters), http_filter)?;
                    backend_extensions(take(&mut backend.filter_extensions), filters)
                },
                message.backends
            )?,
            mirrors,
            timeouts: timeouts(message.timeouts, message.request_timeout)?,
            retry: message.retry.map(http_retry).transpose()?,
            header_overrides: header_overrides(message.allow_l5d_request_headers),
        },
    })
}

fn grpc_rule(message: proto::grpc_route::Rule) -> Result<Rule<RouteAction>, DecodeError> {
    let mut filters = collect_filters(message.filters, grpc_filter)?;
    let mirrors = rule_extensions(message.filter_extensions, &mut filters)?;
    Ok(Rule {
        matches: routes::grpc_matches(message.matches)?,
        filters,
        action: RouteAction {
            backends: distribution!(
                grpc_route,
                |backend: &mut proto::grpc_route::RouteBackend| {
                    let filters = collect_filters(take(&mut backend.filters), grpc_filter)?;
                    backend_extensions(take(&mut backend.filter_extensions), filters)
                },
                message.backends
            )?,
            mirrors,
            timeouts: timeouts(message.timeouts, message.request_timeout)?,
            retry: message.retry.map(grpc_retry).transpose()?,
            header_overrides: header_overrides(message.allow_l5d_request_headers),
        },
    })
}

fn opaque_route(messages: Vec<proto::OpaqueRoute>) -> Result<Option<OpaqueRoute>, DecodeError> {
    let count = messages.len();
    let mut messages = messages.into_iter();
    match (messages.next(), messages.next()) {
        (None, _) => Ok(None),
        (Some(message), None) => {
            let meta = client_meta(message.metadata)?;
            let decode = || {
                let rule = single_rule(message.rules)?;
                Ok(OpaqueRoute {
                    meta: meta.clone(),
                    filters: rule.filters.into_iter().map(opaque_filter).collect::<Result<_, _>>()?,
                    backends: distribution!(
                        opaque_route,
                        |backend: &mut proto::opaque_route::RouteBackend| {
                            collect_filters(take(&mut backend.filters), opaque_filter)
                        },
                        rule.backends
                    )?,
                })
            };
            decode()
                .map(Some)
                .map_err(|error: DecodeError| error.in_resource(&meta))
        }
        (Some(_), Some(_)) => Err(DecodeError::invalid("number of opaque routes", count, "one at most")),
    }
}

fn tls_route(message: proto::TlsRoute) -> Result<TlsRoute, DecodeError> {
    let meta = client_meta(message.metadata)?;
    let decode = || {
        let rule = single_rule(message.rules)?;
        let route = OpaqueRoute {
            meta: meta.clone(),
            filters: rule.filters.into_iter().map(tls_filter).collect::<Result<_, _>>()?,
            backends: distribution!(
                tls_route,
                |backend: &mut proto::tls_route::RouteBackend| collect_filters(take(&mut backend.filters), tls_filter),
                rule.backends
            )?,
        };
        Ok(TlsRoute {
            snis: routes::snis(message.snis)?,
            route,
        })
    };
    decode().map_err(|error: DecodeError| error.in_resource(&meta))
}

fn single_rule<R>(rules: Vec<R>) -> Result<R, DecodeError> {
    let [rule] = <[R; 1]>::try_from(rules)
        .map_err(|rules| DecodeError::invalid("number of rules", rules.len(), "exactly one"))?;
    Ok(rule)
}

fn collect_filters<M, F>(
    messages: Vec<M>,
    decode: impl FnMut(M) -> Result<F, DecodeError>,
) -> Result<Vec<F>, DecodeError> {
    messages.into_iter().map(decode).collect()
}

/// Decodes the extensions of a rule: adds its filters to `filters`, and returns its mirrors.
fn rule_extensions(
    messages: Vec<proto::FilterExtension>,
    filters: &mut Vec<Filter>,
) -> Result<Vec<MirrorSpec>, DecodeError> {
    use proto::filter_extension::Kind;
    let mut mirrors = Vec::new();
    for message in messages {
        match message.kind.ok_or(DecodeError::UnknownKind("a filter"))? {
            Kind::UrlRewrite(rewrite) => filters.push(routes::url_rewrite(rewrite)?),
            Kind::Cors(cors) => filters.push(routes::cors(cors)?),
            Kind::RequestMirror(mirror) => mirrors.push(MirrorSpec {
                backend: backend(mirror.backend)?,
                ratio: routes::ratio("mirror ratio", mirror.ratio)?,
            }),
        }
    }
    Ok(mirrors)
}

/// Adds the extensions of a backend to its filters. A backend has no mirrors, and no CORS filter.
fn backend_extensions(
    messages: Vec<proto::FilterExtension>,
    mut filters: Vec<Filter>,
) -> Result<Vec<Filter>, DecodeError> {
    let mirrors = rule_extensions(messages, &mut filters)?;
    let unsupported = match (mirrors.is_empty(), filter::find_cors(&filters)) {
        (true, None) => return Ok(filters),
        (false, _) => "RequestMirror",
        (true, Some(_)) => "CORS",
    };
    Err(DecodeError::invalid(
        "filter of a backend",
        unsupported,
        "a filter other than RequestMirror and CORS, which only rules can have",
    ))
}

fn http_filter(message: proto::http_route::Filter) -> Result<Filter, DecodeError> {
    use proto::http_route::filter::Kind;
    match message.kind.ok_or(DecodeError::UnknownKind("a filter"))? {
        Kind::FailureInjector(injector) => routes::http_failure(injector),
        Kind::RequestHeaderModifier(modifier) => routes::request_headers(modifier),
        Kind::Redirect(redirect) => routes::redirect(redirect),
        Kind::ResponseHeaderModifier(modifier) => routes::response_headers(modifier),
    }
}

fn grpc_filter(message: proto::grpc_route::Filter) -> Result<Filter, DecodeError> {
    use proto::grpc_route::filter::Kind;
    match message.kind.ok_or(DecodeError::UnknownKind("a filter"))? {
        Kind::FailureInjector(injector) => routes::grpc_failure(injector),
        Kind::RequestHeaderModifier(modifier) => routes::request_headers(modifier),
    }
}

fn opaque_filter(message: proto::opaque_route::Filter) -> Result<OpaqueFilter, DecodeError> {
    use proto::opaque_route::filter::Kind;
    Ok(match message.kind.ok_or(DecodeError::UnknownKind("a filter"))? {
        Kind::Invalid(invalid) => OpaqueFilter::Invalid(invalid.message.into()),
        Kind::Forbidden(_) => OpaqueFilter::Forbidden,
    })
}

fn tls_filter(message: proto::tls_route::Filter) -> Result<OpaqueFilter, DecodeError> {
    use proto::tls_route::filter::Kind;
    Ok(match message.kind.ok_or(DecodeError::UnknownKind("a filter"))? {
        Kind::Invalid(invalid) => OpaqueFilter::Invalid(invalid.message.into()),
        Kind::Forbidden(_) => OpaqueFilter::Forbidden,
    })
}

fn first_available<F>(backends: Result<Vec<RouteBackend<F>>, DecodeError>) -> Result<Distribution<F>, DecodeError> {
    let backends = backends?;
    if backends.is_empty() {
        return Err(DecodeError::Missing("backends"));
    }
    Ok(Distribution::FirstAvailable(backends.into()))
}

fn random_available<F>(
    backends: Result<Vec<(RouteBackend<F>, u32)>, DecodeError>,
) -> Result<Distribution<F>, DecodeError> {
    let mut backends = backends?;
    match backends.len() {
        0 => Err(DecodeError::Missing("backends")),
        // If all weights are zero, this rule has no backend. Other rules are not affected.
        _ if backends.iter().all(|(_, weight)| *weight == 0) => Ok(Distribution::Empty),
        // The weight of a single backend has no effect, unless it is zero.
        1 => Ok(Distribution::FirstAvailable(
            backends.drain(..).map(|(backend, _)| backend).collect(),
        )),
        _ => Ok(Distribution::RandomAvailable(backends.into())),
    }
}

fn backend(message: Option<proto::Backend>) -> Result<Arc<BackendSpec>, DecodeError> {
    let message = message.ok_or(DecodeError::Missing("backend"))?;
    let meta = client_meta(message.metadata)?;
    let decode = || {
        let target = match message.kind {
            Some(proto::backend::Kind::Forward(message)) => BackendTarget::Forward(Arc::new(fixed_endpoint(message)?)),
            Some(proto::backend::Kind::Balancer(message)) => balancer(message)?,
            None => BackendTarget::Fail,
        };
        let queue = queue(message.queue.ok_or(DecodeError::Missing("queue"))?)?;
        Ok(BackendSpec {
            meta: meta.clone(),
            queue,
            target,
        })
    };
    decode()
        .map(Arc::new)
        .map_err(|error: DecodeError| error.in_resource(&meta))
}

/// # Errors
/// The errors of [`endpoint`], or the keep-alive settings are incomplete.
fn fixed_endpoint(message: WeightedAddr) -> Result<EndpointSpec, DecodeError> {
    let mut incomplete = None;
    let spec = endpoint(message, &BTreeMap::new(), |error| incomplete = Some(error))?;
    incomplete.map_or(Ok(spec), Err)
}

fn balancer(message: proto::backend::BalanceP2c) -> Result<BackendTarget, DecodeError> {
    use proto::backend::balance_p2c::{Load, PeakEwma, PenaltyPeakEwma};
    use proto::backend::endpoint_discovery::Kind;

    let discovery = message.discovery.and_then(|discovery| discovery.kind);
    let Kind::Dst(dst) = discovery.ok_or(DecodeError::Missing("balancer.discovery"))?;
    if dst.path.is_empty() {
        return Err(DecodeError::Missing("balancer.discovery.path"));
    }
    let duration_or =
        |field, message, default| Ok::<_, DecodeError>(optional_duration(field, message)?.unwrap_or(default));
    let load = match message.load.ok_or(DecodeError::Missing("balancer.load"))? {
        Load::PeakEwma(PeakEwma { default_rtt, decay }) => LoadParams::PeakEwma {
            default_rtt: duration("default RTT", default_rtt)?,
            decay: duration("decay", decay)?,
        },
        // `penalty_decay` is not used: the penalty decays like the round-trip time, because both are one estimate.
        Load::PenaltyPeakEwma(PenaltyPeakEwma {
            default_rtt,
            decay,
            penalty,
            max_retry_after,
            penalty_decay: _,
        }) => LoadParams::PenaltyPeakEwma {
            default_rtt: duration_or("default RTT", default_rtt, Duration::from_millis(30))?,
            decay: duration_or("decay", decay, Duration::from_secs(10))?,
            penalty: duration_or("penalty", penalty, Duration::from_secs(5))?,
            max_retry_after: duration_or("max retry-after", max_retry_after, Duration::from_secs(300))?,
        },
    };
    Ok(BackendTarget::Balance {
        authority: dst.path.into(),
        load,
    })
}

fn queue(message: proto::Queue) -> Result<Queue, DecodeError> {
    let capacity = match message.capacity {
        // The capacity is not set: some control planes send only the timeout.
        0 => DEFAULT_QUEUE_CAPACITY,
        capacity => usize::try_from(capacity).unwrap_or(DEFAULT_QUEUE_CAPACITY),
    };
    Ok(Queue {
        capacity,
        failfast_timeout: duration("failfast timeout", message.failfast_timeout)?,
    })
}

fn failure_accrual(message: proto::FailureAccrual) -> Result<FailureAccrual, DecodeError> {
    use proto::failure_accrual::{ConsecutiveFailures, Kind, Unified};
    let (kind, backoff) = match message.kind.ok_or(DecodeError::Missing("failure accrual"))? {
        Kind::ConsecutiveFailures(ConsecutiveFailures { max_failures, backoff }) => {
            (AccrualKind::Consecutive { max_failures }, backoff)
        }
        Kind::Unified(Unified {
            success_rate_threshold,
            decay,
            min_requests,
            max_consecutive_failures,
            backoff,
        }) => {
            if !(0.0..=1.0).contains(&success_rate_threshold) {
                return Err(DecodeError::invalid(
                    "success rate threshold",
                    success_rate_threshold,
                    "0 to 1",
                ));
            }
            let window = optional_duration("decay of a failure accrual", decay)?.unwrap_or(Duration::from_secs(10));
            // With a threshold of 0 the window is not used.
            if window < MIN_ACCRUAL_WINDOW && success_rate_threshold > 0.0 {
                return Err(DecodeError::invalid(
                    "decay of a failure accrual",
                    format!("{window:?}"),
                    "10 ms or more",
                ));
            }
            if min_requests > MAX_ACCRUAL_MIN_REQUESTS {
                return Err(DecodeError::invalid("min requests", min_requests, "1000000 at most"));
            }
            let kind = AccrualKind::Unified {
                success_rate: success_rate_threshold,
                window: window.max(MIN_ACCRUAL_WINDOW),
                min_requests,
                max_consecutive_failures,
            };
            (kind, backoff)
        }
    };
    Ok(FailureAccrual {
        kind,
        backoff: backoff_from(backoff.ok_or(DecodeError::Missing("failure_accrual.backoff"))?)?,
        min_ready_endpoints: message.ejection.map_or(0, |ejection| ejection.min_ready_endpoints),
    })
}

fn backoff_from(message: proto::ExponentialBackoff) -> Result<BackoffPolicy, DecodeError> {
    let min = duration("min backoff", message.min_backoff)?;
    let max = duration("max backoff", message.max_backoff)?;
    let jitter = f64::from(message.jitter_ratio);
    if min > max || max.is_zero() {
        return Err(DecodeError::invalid(
            "max backoff",
            format!("{max:?}"),
            "more than 0, and no less than min backoff",
        ));
    }
    if !(0.0..=MAX_JITTER).contains(&jitter) {
        return Err(DecodeError::invalid("jitter ratio", jitter, "0 to 100"));
    }
    Ok(BackoffPolicy {
        delays: Backoff { min, max, jitter },
        honors_retry_after: message.respect_retry_after_hint,
    })
}

fn http_retry(message: proto::http_route::Retry) -> Result<RetryPolicy, DecodeError> {
    let conditions = message.conditions.ok_or(DecodeError::Missing("retry.conditions"))?;
    let ranges = conditions.status_ranges.into_iter().map(|range| {
        let bound = |bound| u16::try_from(bound).ok().filter(|bound| (1..=599).contains(bound));
        match (bound(range.start), bound(range.end)) {
            (Some(start), Some(end)) if start <= end => Ok(RangeInclusive::new(start, end)),
            _ => {
                let range = format!("{}-{}", range.start, range.end);
                Err(DecodeError::invalid(
                    "status range of a retry",
                    range,
                    "a range from 1 to 599",
                ))
            }
        }
    });
    let conditions = RetryConditions {
        http: ranges.collect::<Result<_, _>>()?,
        grpc: Vec::new(),
    };
    retry_from(
        message.max_retries,
        message.max_request_bytes,
        conditions,
        message.timeout,
        message.backoff,
    )
}

fn grpc_retry(message: proto::grpc_route::Retry) -> Result<RetryPolicy, DecodeError> {
    let conditions = message.conditions.ok_or(DecodeError::Missing("retry.conditions"))?;
    let codes = [
        (conditions.cancelled, retry::CANCELLED),
        (conditions.deadine_exceeded, retry::DEADLINE_EXCEEDED),
        (conditions.resource_exhausted, retry::RESOURCE_EXHAUSTED),
        (conditions.internal, retry::INTERNAL),
        (conditions.unavailable, retry::UNAVAILABLE),
    ];
    let codes = codes.into_iter().filter(|(is_set, _)| *is_set).map(|(_, code)| code);
    let conditions = RetryConditions {
        http: Vec::new(),
        grpc: codes.collect(),
    };
    retry_from(
        message.max_retries,
        message.max_request_bytes,
        conditions,
        message.timeout,
        message.backoff,
    )
}

fn retry_from(
    max_retries: u32,
    max_request_bytes: u32,
    conditions: RetryConditions,
    timeout: Option<prost_types::Duration>,
    backoff: Option<proto::ExponentialBackoff>,
) -> Result<RetryPolicy, DecodeError> {
    Ok(RetryPolicy {
        max_retries: u16::try_from(max_retries)
            .map_err(|_| DecodeError::invalid("max retries", max_retries, "65535 at most"))?,
        max_request_bytes: usize::try_from(max_request_bytes).unwrap_or(usize::MAX),
        conditions,
        timeout: optional_timeout("timeout of a retry", timeout)?,
        backoff: backoff.map(backoff_from).transpose()?,
    })
}

fn timeouts(
    message: Option<http_route::Timeouts>,
    legacy_request: Option<prost_types::Duration>,
) -> Result<Timeouts, DecodeError> {
    let message = message.unwrap_or_default();
    Ok(Timeouts {
        request: optional_timeout("request timeout", message.request.or(legacy_request))?,
        response: optional_timeout("response timeout", message.response)?,
        idle: optional_timeout("idle timeout", message.idle)?,
    })
}

/// An optional timeout; 0 means no timeout.
fn optional_timeout(
    field: &'static str,
    message: Option<prost_types::Duration>,
) -> Result<Option<Duration>, DecodeError> {
    Ok(optional_duration(field, message)?.filter(|limit| !limit.is_zero()))
}

fn header_overrides(allow: bool) -> HeaderOverrides {
    if allow {
        HeaderOverrides::Allow
    } else {
        HeaderOverrides::Ignore
    }
}

/// The default of `LINKERD2_PROXY_OUTBOUND_HTTP_QUEUE_CAPACITY`.
const DEFAULT_QUEUE_CAPACITY: usize = 10_000;
const MIN_ACCRUAL_WINDOW: Duration = Duration::from_millis(10);
const MAX_ACCRUAL_MIN_REQUESTS: u32 = 1_000_000;
const MAX_JITTER: f64 = 100.0;

#[cfg(test)]
mod incomplete_tests;
#[cfg(test)]
mod table_tests;
#[cfg(test)]
mod tests;
