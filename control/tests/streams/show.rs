//! Formats outbound policies as short lines of text for tables.

use tulle_proto::destination::WeightedAddr;
use tulle_proto::meta::{Metadata, metadata};
use tulle_proto::outbound::backend::balance_p2c::Load;
use tulle_proto::outbound::backend::{Kind as BackendKind, endpoint_discovery};
use tulle_proto::outbound::proxy_protocol::Kind;
use tulle_proto::outbound::{
    Backend, ExponentialBackoff, FailureAccrual, FilterExtension, GrpcRoute, HttpRoute, OpaqueRoute, OutboundPolicy,
    TlsRoute, failure_accrual, filter_extension, grpc_route, http_route, opaque_route, tls_route,
};

/// Returns the protocol and the parent of the policy, then one line per rule: route, filters and settings, backends.
pub(crate) fn show(policy: &OutboundPolicy) -> Vec<String> {
    let about = name(policy.metadata.as_ref());
    let (protocol, routes) = match policy.protocol.as_ref().unwrap().kind.as_ref().unwrap() {
        Kind::Detect(detect) => {
            let (http1, http2) = (detect.http1.as_ref().unwrap(), detect.http2.as_ref().unwrap());
            assert_eq!(
                (&http1.routes, http1.failure_accrual),
                (&http2.routes, http2.failure_accrual)
            );
            let mut lines: Vec<_> = http1.routes.iter().flat_map(http).collect();
            lines.extend(detect.opaque.as_ref().unwrap().routes.iter().flat_map(opaque));
            let seconds = detect.timeout.unwrap().seconds;
            (format!("detect {seconds}s{}", accrual(http1.failure_accrual)), lines)
        }
        Kind::Http1(http1) => {
            let lines = http1.routes.iter().flat_map(http).collect();
            (format!("http1{}", accrual(http1.failure_accrual)), lines)
        }
        Kind::Http2(http2) => {
            let lines = http2.routes.iter().flat_map(http).collect();
            (format!("http2{}", accrual(http2.failure_accrual)), lines)
        }
        Kind::Grpc(all) => {
            let lines = all.routes.iter().flat_map(grpc).collect();
            (format!("grpc{}", accrual(all.failure_accrual)), lines)
        }
        Kind::Tls(all) => ("tls".to_owned(), all.routes.iter().flat_map(tls).collect()),
        Kind::Opaque(all) => ("opaque".to_owned(), all.routes.iter().flat_map(opaque).collect()),
    };
    let mut lines = vec![format!("{protocol} of {about}")];
    lines.extend(routes);
    lines
}

/// Returns the object or default in the metadata: `kind namespace/name`, with `:port` if it has one.
fn name(metadata: Option<&Metadata>) -> String {
    match metadata.unwrap().kind.as_ref().unwrap() {
        metadata::Kind::Default(name) => name.clone(),
        metadata::Kind::Resource(resource) => {
            let port = match resource.port {
                0 => String::new(),
                port => format!(":{port}"),
            };
            let group = match &*resource.group {
                "core" => "",
                "policy.linkerd.io" => "policy ",
                "gateway.networking.k8s.io" => "gateway ",
                other => panic!("the group {other:?}"),
            };
            format!(
                "{group}{} {}/{}{port}",
                resource.kind, resource.namespace, resource.name
            )
        }
    }
}

fn http(route: &HttpRoute) -> Vec<String> {
    use http_route::distribution::Kind;
    let line = |rule: &http_route::Rule| {
        let filters = |filters: &[http_route::Filter], extensions: &[FilterExtension]| -> String {
            filters
                .iter()
                .map(http_filter)
                .chain(extensions.iter().map(extension))
                .collect()
        };
        let to = match rule.backends.as_ref().unwrap().kind.as_ref().unwrap() {
            Kind::FirstAvailable(first) => backends(first.backends.iter().map(|one| {
                (
                    None,
                    one.backend.as_ref(),
                    filters(&one.filters, &one.filter_extensions),
                )
            })),
            Kind::RandomAvailable(random) => backends(random.backends.iter().map(|one| {
                let route = one.backend.as_ref().unwrap();
                let filters = filters(&route.filters, &route.filter_extensions);
                (Some(one.weight), route.backend.as_ref(), filters)
            })),
            Kind::Empty(_) => String::new(),
        };
        let mut what = filters(&rule.filters, &rule.filter_extensions);
        if let Some(timeouts) = rule.timeouts {
            what += &format!(" timeouts{}", shown_timeouts(timeouts));
        }
        if let Some(retry) = &rule.retry {
            assert_eq!(retry.max_request_bytes, 65_536);
            let ranges = &retry.conditions.as_ref().unwrap().status_ranges;
            let ranges: Vec<_> = ranges
                .iter()
                .map(|range| format!("{}-{}", range.start, range.end))
                .collect();
            let timeout = retry.timeout.map(|timeout| format!(" each {}", duration(timeout)));
            what += &format!(
                " retry {}x {}{}{}",
                retry.max_retries,
                ranges.join(","),
                timeout.unwrap_or_default(),
                retry_backoff(retry.backoff)
            );
        }
        format!("{}{what} -> {to}", name(route.metadata.as_ref()))
    };
    route.rules.iter().map(line).collect()
}

fn http_filter(filter: &http_route::Filter) -> String {
    use http_route::filter::Kind;
    match filter.kind.as_ref().unwrap() {
        Kind::FailureInjector(fail) => format!(" fail {} {:?}", fail.status, fail.message),
        Kind::RequestHeaderModifier(_) => " request-headers".to_owned(),
        Kind::ResponseHeaderModifier(_) => " response-headers".to_owned(),
        Kind::Redirect(to) => format!(" redirect {}", to.status),
    }
}

fn extension(extension: &FilterExtension) -> String {
    use filter_extension::Kind;
    use tulle_proto::http_route::path_modifier::Replace;
    match extension.kind.as_ref().unwrap() {
        Kind::UrlRewrite(to) => {
            let path = to.path.as_ref().map(|path| match path.replace.as_ref().unwrap() {
                Replace::Full(path) => format!(" {path}"),
                Replace::Prefix(prefix) => format!(" {prefix}*"),
            });
            format!(" rewrite {}{}", to.host, path.unwrap_or_default())
        }
        Kind::Cors(cors) => {
            let lists = [
                &cors.allow_origins,
                &cors.allow_methods,
                &cors.allow_headers,
                &cors.expose_headers,
            ];
            let lists = lists.map(|list| list.join(",")).join(" | ");
            let credentials = if cors.allow_credentials { " credentials" } else { "" };
            format!(" cors {lists} | {}s{credentials}", cors.max_age_seconds)
        }
        Kind::RequestMirror(to) => {
            let ratio = to.ratio.unwrap();
            let to = backends([(None, to.backend.as_ref(), String::new())].into_iter());
            format!(" mirror {}/{} to {to}", ratio.numerator, ratio.denominator)
        }
    }
}

fn grpc(route: &GrpcRoute) -> Vec<String> {
    use grpc_route::distribution::Kind;
    let line = |rule: &grpc_route::Rule| {
        let filters = |filters: &[grpc_route::Filter], extensions: &[FilterExtension]| -> String {
            filters
                .iter()
                .map(grpc_filter)
                .chain(extensions.iter().map(extension))
                .collect()
        };
        let to = match rule.backends.as_ref().unwrap().kind.as_ref().unwrap() {
            Kind::FirstAvailable(first) => backends(first.backends.iter().map(|one| {
                (
                    None,
                    one.backend.as_ref(),
                    filters(&one.filters, &one.filter_extensions),
                )
            })),
            Kind::RandomAvailable(random) => backends(random.backends.iter().map(|one| {
                let route = one.backend.as_ref().unwrap();
                let filters = filters(&route.filters, &route.filter_extensions);
                (Some(one.weight), route.backend.as_ref(), filters)
            })),
            Kind::Empty(_) => String::new(),
        };
        let mut what = filters(&rule.filters, &rule.filter_extensions);
        if let Some(timeouts) = rule.timeouts {
            what += &format!(" timeouts{}", shown_timeouts(timeouts));
        }
        if let Some(retry) = &rule.retry {
            assert_eq!(retry.max_request_bytes, 65_536);
            let on = retry.conditions.unwrap();
            let codes = [
                (on.cancelled, 1),
                (on.deadine_exceeded, 4),
                (on.resource_exhausted, 8),
                (on.internal, 13),
                (on.unavailable, 14),
            ];
            let codes: Vec<_> = codes
                .iter()
                .filter(|(on, _)| *on)
                .map(|(_, code)| code.to_string())
                .collect();
            let timeout = retry.timeout.map(|timeout| format!(" each {}", duration(timeout)));
            what += &format!(
                " retry {}x {}{}{}",
                retry.max_retries,
                codes.join(","),
                timeout.unwrap_or_default(),
                retry_backoff(retry.backoff)
            );
        }
        format!("{}{what} -> {to}", name(route.metadata.as_ref()))
    };
    route.rules.iter().map(line).collect()
}

fn grpc_filter(filter: &grpc_route::Filter) -> String {
    use grpc_route::filter::Kind;
    match filter.kind.as_ref().unwrap() {
        Kind::FailureInjector(fail) => format!(" fail {} {:?}", fail.code, fail.message),
        Kind::RequestHeaderModifier(_) => " request-headers".to_owned(),
    }
}

/// Formats an opaque or TLS route. The message types differ only in their names.
macro_rules! stream_lines {
    ($route:expr, $family:ident, $about:expr) => {{
        use $family::distribution::Kind;
        let filters = |filters: &[$family::Filter]| -> String {
            let shown = |filter: &$family::Filter| match filter.kind.as_ref().unwrap() {
                $family::filter::Kind::Invalid(invalid) => format!(" invalid {:?}", invalid.message),
                $family::filter::Kind::Forbidden(_) => " forbidden".to_owned(),
            };
            filters.iter().map(shown).collect()
        };
        let line = |rule: &$family::Rule| {
            let to = match rule.backends.as_ref().unwrap().kind.as_ref().unwrap() {
                Kind::FirstAvailable(first) => backends(
                    first
                        .backends
                        .iter()
                        .map(|one| (None, one.backend.as_ref(), filters(&one.filters))),
                ),
                Kind::RandomAvailable(random) => backends(random.backends.iter().map(|one| {
                    let route = one.backend.as_ref().unwrap();
                    (Some(one.weight), route.backend.as_ref(), filters(&route.filters))
                })),
                Kind::Empty(_) => "nowhere".to_owned(),
            };
            format!("{}{} -> {to}", $about, filters(&rule.filters))
        };
        $route.rules.iter().map(line).collect()
    }};
}

fn opaque(route: &OpaqueRoute) -> Vec<String> {
    stream_lines!(route, opaque_route, name(route.metadata.as_ref()))
}

fn tls(route: &TlsRoute) -> Vec<String> {
    use tulle_proto::tls_route::sni_match::Match;
    let snis = route.snis.iter().map(|sni| match sni.r#match.as_ref().unwrap() {
        Match::Exact(name) => format!(" {name}"),
        Match::Suffix(suffix) => format!(" {}.*", suffix.reverse_labels.join(".")),
    });
    let about = format!("{}{}", name(route.metadata.as_ref()), snis.collect::<String>());
    stream_lines!(route, tls_route, about)
}

/// `weight*target`, or `nothing` with the object that the reference names if there is no target, and the filters of the backend.
fn backends<'a>(all: impl Iterator<Item = (Option<u32>, Option<&'a Backend>, String)>) -> String {
    let shown = all.map(|(weight, backend, filters)| {
        let backend = backend.unwrap();
        let queue = backend.queue.unwrap();
        assert_eq!((queue.capacity, queue.failfast_timeout.unwrap().seconds), (100, 3));
        let weight = weight.map(|weight| format!("{weight}*")).unwrap_or_default();
        let target = match &backend.kind {
            None => format!("nothing ({})", name(backend.metadata.as_ref())),
            Some(BackendKind::Forward(to)) => forward(to),
            Some(BackendKind::Balancer(balancer)) => {
                let Some(endpoint_discovery::Kind::Dst(get)) = &balancer.discovery.as_ref().unwrap().kind else {
                    panic!("no path")
                };
                format!(
                    "{}{}",
                    get.path.replace(".svc.cluster.local", ""),
                    load(balancer.load.as_ref())
                )
            }
        };
        format!("{weight}{target}{filters}")
    });
    shown.collect::<Vec<_>>().join(" | ")
}

fn forward(to: &WeightedAddr) -> String {
    std::net::SocketAddr::try_from(to.addr.unwrap()).unwrap().to_string()
}

fn load(load: Option<&Load>) -> String {
    match load.unwrap() {
        Load::PeakEwma(load) => {
            assert_eq!(
                (load.default_rtt.unwrap().nanos, load.decay.unwrap().seconds),
                (30_000_000, 10)
            );
            String::new()
        }
        Load::PenaltyPeakEwma(load) => {
            assert_eq!(
                (load.default_rtt.unwrap().nanos, load.decay.unwrap().seconds),
                (30_000_000, 10)
            );
            assert_eq!(load.penalty_decay.unwrap().seconds, 10);
            format!(
                " penalty {} retry-after {}",
                duration(load.penalty.unwrap()),
                duration(load.max_retry_after.unwrap())
            )
        }
    }
}

fn accrual(accrual: Option<FailureAccrual>) -> String {
    match accrual.and_then(|accrual| accrual.kind) {
        None => String::new(),
        Some(failure_accrual::Kind::ConsecutiveFailures(failures)) => {
            format!(" accrual {} {}", failures.max_failures, backoff(failures.backoff))
        }
        Some(failure_accrual::Kind::Unified(unified)) => format!(
            " accrual {} or {} of {} in {} {}",
            unified.max_consecutive_failures,
            unified.success_rate_threshold,
            unified.min_requests,
            duration(unified.decay.unwrap()),
            backoff(unified.backoff)
        ),
    }
}

fn backoff(backoff: Option<ExponentialBackoff>) -> String {
    let backoff = backoff.unwrap();
    let hint = match backoff.respect_retry_after_hint {
        true => " retry-after",
        false => "",
    };
    format!(
        "{}-{}~{}{hint}",
        duration(backoff.min_backoff.unwrap()),
        duration(backoff.max_backoff.unwrap()),
        backoff.jitter_ratio
    )
}

/// Returns the retry backoff, unless it has its default values.
fn retry_backoff(retry: Option<ExponentialBackoff>) -> String {
    match &*backoff(retry) {
        "25ms-250ms~1" => String::new(),
        other => format!(" after {other}"),
    }
}

fn shown_timeouts(timeouts: tulle_proto::http_route::Timeouts) -> String {
    let all = [
        ("request", timeouts.request),
        ("response", timeouts.response),
        ("idle", timeouts.idle),
    ];
    all.iter()
        .filter_map(|(name, timeout)| Some(format!(" {name} {}", duration((*timeout)?))))
        .collect()
}

fn duration(duration: prost_types::Duration) -> String {
    match duration.nanos {
        0 => format!("{}s", duration.seconds),
        nanos => format!("{}ms", duration.seconds * 1000 + i64::from(nanos) / 1_000_000),
    }
}
