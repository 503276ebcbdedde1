//! ServiceProfiles, from `destination.proto`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tulle_core::addr::NameAddr;
use tulle_proto::destination as proto;

use crate::policy::decode::endpoint::endpoint;
use crate::policy::decode::fields::{DecodeError, client_meta, duration, optional_duration};
use crate::policy::decode::routes;
use crate::policy::profile::{
    Class, Profile, ProfileRoute, RequestCondition, ResponseClass, ResponseCondition, RetryBudget, WeightedDestination,
};

/// Decodes a profile. If the keep-alive settings of its endpoint are incomplete, `on_incomplete` is called with the reason, and the
/// endpoint is used without them.
///
/// # Errors
/// A field is invalid; then the whole message is refused.
pub(crate) fn profile(
    message: proto::DestinationProfile,
    on_incomplete: impl FnMut(DecodeError),
) -> Result<Profile, DecodeError> {
    let name = Some(message.fully_qualified_name).filter(|name| !name.is_empty());
    let traffic_split = message.dst_overrides.into_iter().filter(|dst| dst.weight > 0);
    let traffic_split = traffic_split.map(|dst| destination(dst, name.as_deref()));
    let endpoint_message = message
        .endpoint
        .filter(|endpoint| *endpoint != proto::WeightedAddr::default());
    Ok(Profile {
        is_opaque: message.opaque_protocol,
        routes: message.routes.into_iter().map(route).collect::<Result<_, _>>()?,
        retry_budget: message.retry_budget.map(|budget| retry_budget(&budget)).transpose()?,
        traffic_split: traffic_split.collect::<Result<_, _>>()?,
        endpoint: endpoint_message
            .map(|message| endpoint(message, &BTreeMap::new(), on_incomplete))
            .transpose()?
            .map(Arc::new),
        parent: client_meta(message.parent_ref).ok(),
        resource: client_meta(message.profile_ref).ok(),
        name: name.map(Arc::from),
    })
}

fn route(message: proto::Route) -> Result<ProfileRoute, DecodeError> {
    let classes = message.response_classes.into_iter();
    Ok(ProfileRoute {
        condition: request_condition(message.condition.ok_or(DecodeError::Missing("condition"))?)?,
        response_classes: classes.map(response_class).collect::<Result<_, _>>()?,
        labels: message.metrics_labels,
        is_retryable: message.is_retryable,
        timeout: optional_duration("timeout", message.timeout)?.filter(|timeout| !timeout.is_zero()),
    })
}

fn request_condition(message: proto::RequestMatch) -> Result<RequestCondition, DecodeError> {
    use proto::request_match::Match;
    let conditions =
        |seq: proto::request_match::Seq| seq.matches.into_iter().map(request_condition).collect::<Result<_, _>>();
    Ok(match message.r#match.ok_or(DecodeError::Missing("condition"))? {
        Match::All(seq) => RequestCondition::All(conditions(seq)?),
        Match::Any(seq) => RequestCondition::Any(conditions(seq)?),
        Match::Not(condition) => RequestCondition::Not(Box::new(request_condition(*condition)?)),
        Match::Path(path) => RequestCondition::Path(routes::pattern("path of a condition", &path.regex)?),
        Match::Method(method) => RequestCondition::Method(routes::method(method)?),
    })
}

fn response_class(message: proto::ResponseClass) -> Result<ResponseClass, DecodeError> {
    Ok(ResponseClass {
        condition: response_condition(message.condition.ok_or(DecodeError::Missing("condition"))?)?,
        class: if message.is_failure {
            Class::Failure
        } else {
            Class::Success
        },
    })
}

fn response_condition(message: proto::ResponseMatch) -> Result<ResponseCondition, DecodeError> {
    use proto::response_match::Match;
    let conditions = |seq: proto::response_match::Seq| {
        seq.matches
            .into_iter()
            .map(response_condition)
            .collect::<Result<_, _>>()
    };
    Ok(match message.r#match.ok_or(DecodeError::Missing("condition"))? {
        Match::All(seq) => ResponseCondition::All(conditions(seq)?),
        Match::Any(seq) => ResponseCondition::Any(conditions(seq)?),
        Match::Not(condition) => ResponseCondition::Not(Box::new(response_condition(*condition)?)),
        Match::Status(range) => {
            let bound = |bound: u32| {
                u16::try_from(bound).map_err(|_| DecodeError::invalid("status of a condition", bound, "65535 at most"))
            };
            let open_end = |max| if max == 0 { u16::MAX } else { max };
            ResponseCondition::Status {
                min: bound(range.min)?,
                max: open_end(bound(range.max)?),
            }
        }
    })
}

fn retry_budget(message: &proto::RetryBudget) -> Result<RetryBudget, DecodeError> {
    if !(0.0..=f32::MAX).contains(&message.retry_ratio) {
        return Err(DecodeError::invalid(
            "ratio of a retry budget",
            message.retry_ratio,
            "0 or more",
        ));
    }
    Ok(RetryBudget {
        ratio: message.retry_ratio,
        min_per_second: message.min_retries_per_second,
        ttl: duration("ttl of a retry budget", message.ttl)?.max(MIN_BUDGET_TTL),
    })
}

/// Minimum `ttl` of a retry budget; shorter values are raised to it. With a `ttl` below one second, a budget would allow fewer
/// retries than `min_retries_per_second`. Linkerd's proxy ignores such budgets.
const MIN_BUDGET_TTL: Duration = Duration::from_secs(1);

/// `service` is the name of the profile's service.
fn destination(message: proto::WeightedDst, service: Option<&str>) -> Result<WeightedDestination, DecodeError> {
    let destination: NameAddr = message
        .authority
        .parse()
        .map_err(|_| DecodeError::invalid("authority of a destination", &message.authority, "<name>:<port>"))?;
    Ok(WeightedDestination {
        destination: fully_qualified(destination, service),
        weight: message.weight,
        backend: client_meta(message.backend_ref).ok(),
    })
}

/// The fully qualified name of a service. A short name, `web.shop` or `web.shop.svc`, gets the cluster domain of the profile's
/// own service; a final dot is removed.
fn fully_qualified(destination: NameAddr, service: Option<&str>) -> NameAddr {
    let NameAddr { name, port } = &destination;
    if let Some(absolute) = name.strip_suffix('.') {
        return NameAddr {
            name: absolute.into(),
            port: *port,
        };
    }
    // `svc.cluster.local` of `web.shop.svc.cluster.local`.
    let suffix = service.and_then(|service| service.trim_end_matches('.').splitn(3, '.').nth(2));
    let (first_label, other_labels) = suffix.and_then(|suffix| suffix.split_once('.')).unzip();
    let missing = match name.split('.').collect::<Vec<_>>()[..] {
        // `web.shop` lacks `svc.cluster.local`.
        [_, _] => suffix,
        // `web.shop.svc` lacks `cluster.local`.
        [_, _, third] if first_label == Some(third) => other_labels,
        _ => None,
    };
    match missing {
        Some(missing) => NameAddr {
            name: format!("{name}.{missing}").into(),
            port: *port,
        },
        None => destination,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use http::{HeaderMap, Method, StatusCode};
    use proto::request_match::Match;
    use tulle_proto::http_types::{HttpMethod, http_method};

    use super::*;
    use crate::policy::matches::RequestAttributes;
    use crate::policy::profile as policy;

    fn condition(condition: Match) -> Option<proto::RequestMatch> {
        Some(proto::RequestMatch {
            r#match: Some(condition),
        })
    }

    fn path(regex: &str) -> Match {
        Match::Path(proto::PathMatch { regex: regex.into() })
    }

    fn route(matching: Option<proto::RequestMatch>) -> proto::Route {
        proto::Route {
            condition: matching,
            ..Default::default()
        }
    }

    fn decode(edit: impl FnOnce(&mut proto::DestinationProfile)) -> Profile {
        let mut message = proto::DestinationProfile {
            fully_qualified_name: "web.test".into(),
            ..Default::default()
        };
        edit(&mut message);
        profile(message, |error| panic!("{error}")).unwrap()
    }

    fn is_refused(edit: impl FnOnce(&mut proto::DestinationProfile)) -> bool {
        let mut message = proto::DestinationProfile::default();
        edit(&mut message);
        profile(message, drop).is_err()
    }

    #[test]
    fn a_profile_with_an_invalid_part_is_refused() {
        let number = http_method::Type::Registered(99);
        let no_method = Match::Method(HttpMethod { r#type: Some(number) });
        for bad in [
            route(None),
            route(Some(proto::RequestMatch { r#match: None })),
            route(condition(path("("))),
            route(condition(no_method)),
            proto::Route {
                response_classes: vec![proto::ResponseClass::default()],
                ..route(condition(path("/a.*")))
            },
        ] {
            let routes = vec![bad, route(condition(path("/a.*")))];
            assert!(is_refused(|profile| profile.routes = routes.clone()), "{routes:?}");
        }
        let without_identity = proto::WeightedAddr {
            addr: Some(SocketAddr::from(([10, 0, 0, 1], 80)).into()),
            tls_identity: Some(proto::TlsIdentity::default()),
            ..Default::default()
        };
        assert!(is_refused(|profile| profile.endpoint = Some(without_identity)));
    }

    #[test]
    fn incomplete_keep_alive_settings_are_reported_and_the_endpoint_is_used() {
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        for (timeout, expected) in [
            (seconds(3), None),
            (None, Some("HTTP/2 keep-alive timeout of an endpoint is missing")),
        ] {
            let keep_alive = proto::http2_client_params::KeepAlive {
                interval: seconds(10),
                timeout,
                while_idle: true,
            };
            let endpoint = proto::WeightedAddr {
                addr: Some(SocketAddr::from(([10, 0, 0, 1], 80)).into()),
                http2: Some(proto::Http2ClientParams {
                    keep_alive: Some(keep_alive),
                    ..Default::default()
                }),
                ..Default::default()
            };
            let message = proto::DestinationProfile {
                endpoint: Some(endpoint),
                ..Default::default()
            };
            let mut reasons = Vec::new();
            let decoded = profile(message, |error| reasons.push(error.to_string())).unwrap();
            let keep_alive = decoded.endpoint.unwrap().http2.keep_alive;
            assert_eq!(keep_alive.is_some(), expected.is_none());
            assert_eq!(reasons, Vec::from_iter(expected));
        }
    }

    #[test]
    fn a_route_is_found_by_its_condition() {
        let profile = decode(|profile| profile.routes = vec![route(condition(path("/a.*")))]);
        assert!(profile.overrides_http_policy());
        let headers = HeaderMap::new();
        let find = |target| {
            let head = RequestAttributes {
                method: &Method::GET,
                authority: None,
                path: target,
                query: None,
                headers: &headers,
            };
            policy::find_route(&profile.routes, &head).is_some()
        };
        assert!(find("/ab") && !find("/b/ab"));
    }

    #[test]
    fn a_status_range_without_a_maximum_has_no_upper_bound() {
        let class = |min, max| {
            let range = proto::response_match::Match::Status(proto::HttpStatusRange { min, max });
            let condition = Some(proto::ResponseMatch { r#match: Some(range) });
            proto::ResponseClass {
                condition,
                is_failure: true,
            }
        };
        let profile = decode(|profile| {
            profile.routes = vec![proto::Route {
                response_classes: vec![class(404, 404), class(450, 0)],
                ..route(condition(path("/")))
            }];
        });
        let route = &profile.routes[0];
        assert_eq!(route.response_classes.len(), 2);
        for (status, expected) in [(200, None), (404, Some(Class::Failure)), (499, Some(Class::Failure))] {
            assert_eq!(
                route.classify(StatusCode::from_u16(status).unwrap()),
                expected,
                "{status}"
            );
        }
    }

    fn weighted(authority: &str, weight: u32) -> proto::WeightedDst {
        proto::WeightedDst {
            authority: authority.into(),
            weight,
            backend_ref: None,
        }
    }

    #[test]
    fn destinations_with_weight_zero_are_left_out_and_a_profile_with_an_invalid_name_is_refused() {
        let profile =
            decode(|profile| profile.dst_overrides = vec![weighted("a.test:80", 0), weighted("c.test:80", 3)]);
        assert_eq!(profile.traffic_split.len(), 1);
        assert!(profile.overrides_opaque_policy());
        for bad in ["no name:80", "b.test", "b.test:0", ""] {
            assert!(
                is_refused(|profile| profile.dst_overrides = vec![weighted(bad, 1)]),
                "{bad}"
            );
        }
    }

    #[test]
    fn short_service_names_get_the_cluster_domain_of_the_profile() {
        for (service, authority, expected) in [
            (
                "web.shop.svc.cluster.local",
                "srv2.shop.svc.cluster.local:80",
                "srv2.shop.svc.cluster.local:80",
            ),
            (
                "web.shop.svc.cluster.local",
                "srv2.shop.svc.cluster.local.:80",
                "srv2.shop.svc.cluster.local:80",
            ),
            (
                "web.shop.svc.cluster.local",
                "Srv2.Shop:80",
                "srv2.shop.svc.cluster.local:80",
            ),
            (
                "web.shop.svc.cluster.local",
                "srv2.shop.svc:80",
                "srv2.shop.svc.cluster.local:80",
            ),
            (
                "web.shop.svc.k8s.example.",
                "srv2.shop.svc:80",
                "srv2.shop.svc.k8s.example:80",
            ),
            ("web.shop.svc.cluster.local", "srv2.shop.:80", "srv2.shop:80"),
            ("web.shop.svc.cluster.local", "a.b.example:80", "a.b.example:80"),
            ("web.shop.svc.cluster.local", "srv2:80", "srv2:80"),
            ("", "srv2.shop:80", "srv2.shop:80"),
        ] {
            let profile = decode(|profile| {
                profile.fully_qualified_name = service.into();
                profile.dst_overrides = vec![weighted(authority, 1)];
            });
            assert_eq!(
                profile.traffic_split[0].destination.to_string(),
                expected,
                "{authority} of {service}"
            );
        }
    }

    #[test]
    fn a_retry_budget_with_an_invalid_value_is_refused_and_a_short_ttl_is_raised() {
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        for (retry_ratio, ttl, expected) in [
            (0.2, seconds(10), Some(10)),
            (0.0, seconds(0), Some(1)), // a ttl of 0 would permit no retry
            (1000.5, seconds(3600), Some(3600)),
            (f32::NAN, seconds(10), None),
            (f32::INFINITY, seconds(10), None),
            (-0.1, seconds(10), None),
            (0.2, seconds(-1), None),
            (0.2, None, None),
        ] {
            let budget = proto::RetryBudget {
                retry_ratio,
                min_retries_per_second: 10,
                ttl,
            };
            let edit = |profile: &mut proto::DestinationProfile| profile.retry_budget = Some(budget);
            assert_eq!(is_refused(edit), expected.is_none(), "{budget:?}");
            if let Some(ttl) = expected {
                let decoded = decode(edit).retry_budget.unwrap();
                assert_eq!(
                    (decoded.ratio, decoded.min_per_second, decoded.ttl.as_secs()),
                    (retry_ratio, 10, ttl)
                );
            }
        }
    }

    #[test]
    fn empty_fields_are_absent() {
        let profile = decode(|profile| {
            profile.fully_qualified_name.clear();
            profile.endpoint = Some(proto::WeightedAddr::default());
        });
        assert_eq!(profile, Profile::default());
    }
}
