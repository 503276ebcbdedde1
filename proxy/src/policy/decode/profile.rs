//! ServiceProfiles, from `destination.proto`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tracing::warn;
use tulle_proto::destination as proto;

use crate::policy::decode::endpoint::endpoint;
use crate::policy::decode::{DecodeError, client_meta, duration, optional_duration, routes};
use crate::policy::profile::{
    Class, Profile, ProfileRoute, RequestCondition, ResponseClass, ResponseCondition, RetryBudget, WeightedDestination,
};

/// Reads a profile; routes, destinations and budgets that cannot be meant are left out.
pub(crate) fn profile(message: proto::DestinationProfile) -> Profile {
    Profile {
        name: Some(message.fully_qualified_name)
            .filter(|name| !name.is_empty())
            .map(Arc::from),
        is_opaque: message.opaque_protocol,
        routes: message
            .routes
            .into_iter()
            .filter_map(|message| kept("route", route(message)))
            .collect(),
        retry_budget: message
            .retry_budget
            .and_then(|message| kept("retry budget", retry_budget(&message))),
        overrides: message
            .dst_overrides
            .into_iter()
            .filter(|destination| destination.weight > 0)
            .filter_map(|message| kept("destination", destination(message)))
            .collect(),
        endpoint: message
            .endpoint
            .and_then(|message| kept("endpoint", endpoint(message, &BTreeMap::new())))
            .map(Arc::new),
        parent: client_meta(message.parent_ref).ok(),
        resource: client_meta(message.profile_ref).ok(),
    }
}

fn kept<T>(what: &'static str, decoded: Result<T, DecodeError>) -> Option<T> {
    decoded
        .inspect_err(|error| warn!(%error, what, "part of a profile left out"))
        .ok()
}

fn route(message: proto::Route) -> Result<ProfileRoute, DecodeError> {
    let classes = message.response_classes.into_iter();
    Ok(ProfileRoute {
        condition: request_condition(message.condition.ok_or(DecodeError::Missing("condition"))?)?,
        response_classes: classes
            .filter_map(|message| kept("response class", response_class(message)))
            .collect(),
        labels: message.metrics_labels,
        is_retryable: message.is_retryable,
        timeout: optional_duration("timeout", message.timeout)?.filter(|timeout| !timeout.is_zero()),
    })
}

fn request_condition(message: proto::RequestMatch) -> Result<RequestCondition, DecodeError> {
    use proto::request_match::Match;
    let all = |seq: proto::request_match::Seq| seq.matches.into_iter().map(request_condition).collect::<Result<_, _>>();
    Ok(match message.r#match.ok_or(DecodeError::Missing("condition"))? {
        Match::All(seq) => RequestCondition::All(all(seq)?),
        Match::Any(seq) => RequestCondition::Any(all(seq)?),
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
    let all = |seq: proto::response_match::Seq| {
        seq.matches
            .into_iter()
            .map(response_condition)
            .collect::<Result<_, _>>()
    };
    Ok(match message.r#match.ok_or(DecodeError::Missing("condition"))? {
        Match::All(seq) => ResponseCondition::All(all(seq)?),
        Match::Any(seq) => ResponseCondition::Any(all(seq)?),
        Match::Not(condition) => ResponseCondition::Not(Box::new(response_condition(*condition)?)),
        Match::Status(range) => {
            let bound = |bound: u32| {
                u16::try_from(bound).map_err(|_| DecodeError::invalid("status of a condition", bound, "a status"))
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
    let ttl = duration("ttl of a retry budget", message.ttl)?;
    if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
        return Err(DecodeError::invalid(
            "ttl of a retry budget",
            format!("{ttl:?}"),
            "1 to 60 seconds",
        ));
    }
    if !(0.0..=MAX_RATIO).contains(&message.retry_ratio) {
        return Err(DecodeError::invalid(
            "ratio of a retry budget",
            message.retry_ratio,
            "0 to 1000",
        ));
    }
    Ok(RetryBudget {
        ratio: message.retry_ratio,
        min_per_second: message.min_retries_per_second,
        ttl,
    })
}

fn destination(message: proto::WeightedDst) -> Result<WeightedDestination, DecodeError> {
    let destination = message
        .authority
        .parse()
        .map_err(|_| DecodeError::invalid("authority of a destination", &message.authority, "<name>:<port>"))?;
    Ok(WeightedDestination {
        destination,
        weight: message.weight,
        backend: client_meta(message.backend_ref).ok(),
    })
}

const MIN_TTL: Duration = Duration::from_secs(1);
const MAX_TTL: Duration = Duration::from_secs(60);
const MAX_RATIO: f32 = 1000.0;

#[cfg(test)]
mod tests {
    use http::{HeaderMap, Method, StatusCode};
    use proto::request_match::Match;
    use tulle_proto::http_types::{HttpMethod, http_method};

    use super::*;
    use crate::policy::matches::Head;
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
        profile(message)
    }

    #[test]
    fn routes_that_cannot_be_read_are_left_out() {
        let number = http_method::Type::Registered(99);
        let no_method = Match::Method(HttpMethod { r#type: Some(number) });
        let profile = decode(|profile| {
            profile.routes = vec![
                route(None),
                route(Some(proto::RequestMatch { r#match: None })),
                route(condition(path("("))),
                route(condition(no_method)),
                route(condition(path("/a.*"))),
            ];
        });
        assert_eq!(profile.routes.len(), 1);
        assert!(profile.rules_http());
        let headers = HeaderMap::new();
        let find = |target| {
            let head = Head {
                method: &Method::GET,
                authority: None,
                path: target,
                query: None,
                headers: &headers,
            };
            policy::find(&profile.routes, &head).is_some()
        };
        assert!(find("/ab") && !find("/b/ab"));
    }

    #[test]
    fn statuses_have_open_ends() {
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
                response_classes: vec![class(70_000, 0), class(404, 404), class(450, 0)],
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

    #[test]
    fn destinations_without_weight_or_name_are_left_out() {
        let destination = |authority: &str, weight| proto::WeightedDst {
            authority: authority.into(),
            weight,
            backend_ref: None,
        };
        let profile = decode(|profile| {
            profile.dst_overrides = vec![
                destination("a.test:80", 0),
                destination("no name:80", 1),
                destination("b.test", 1),
                destination("c.test:80", 3),
            ];
        });
        assert_eq!(profile.overrides.len(), 1);
        assert_eq!(profile.overrides[0].destination.to_string(), "c.test:80");
        assert!(profile.rules_opaque());
    }

    #[test]
    fn a_retry_budget_has_bounds() {
        let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
        for (retry_ratio, ttl, expected) in [
            (0.2, seconds(10), true),
            (0.0, seconds(1), true),
            (1000.0, seconds(60), true),
            (f32::NAN, seconds(10), false),
            (-0.1, seconds(10), false),
            (1000.5, seconds(10), false),
            (0.2, seconds(61), false),
            (0.2, seconds(0), false),
            (0.2, seconds(-1), false),
            (0.2, None, false),
        ] {
            let budget = proto::RetryBudget {
                retry_ratio,
                min_retries_per_second: 10,
                ttl,
            };
            let found = decode(|profile| profile.retry_budget = Some(budget)).retry_budget;
            assert_eq!(found.is_some(), expected, "{budget:?}");
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
