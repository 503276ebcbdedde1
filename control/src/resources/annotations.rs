//! Annotations for outbound policy: retries, timeouts, failure accrual and load bias.
//!
//! Each parser returns `None` if its annotations are absent, and an error if they are invalid. [`unused`] finds
//! annotations without effect.

use std::fmt::Display;
use std::time::Duration;

use tulle_core::names::annotation;
use tulle_core::{duration, retry};

use crate::model::outbound::{Backoff, FailureAccrual, Retry, RetryConditions, Timeouts};
use crate::resources::string_map::StringMap;

/// An annotation with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {reason}")]
pub struct InvalidAnnotation {
    pub key: &'static str,
    pub reason: String,
}

impl InvalidAnnotation {
    fn new(key: &'static str, reason: impl Display) -> Self {
        Self {
            key,
            reason: reason.to_string(),
        }
    }
}

/// Penalty that makes failures count as slow responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadBias {
    pub penalty: Duration,
    pub max_retry_after: Duration,
}

/// Maximum number of retries, if none is specified.
pub const DEFAULT_RETRY_LIMIT: u16 = 1;

/// Returns the invalid annotations of a route, at most one for each parser.
pub fn invalid_on_route(annotations: &StringMap) -> Vec<InvalidAnnotation> {
    let retries = [parse_http_retry(annotations).err(), parse_grpc_retry(annotations).err()];
    let mut invalid: Vec<InvalidAnnotation> = retries.into_iter().flatten().collect();
    // Both parsers read the limit and the timeout.
    invalid.dedup();
    invalid.extend(parse_timeouts(annotations).err());
    invalid
}

/// Returns the invalid annotations of a Service or EgressNetwork, including those that it shares with routes.
pub fn invalid_on_parent(annotations: &StringMap) -> Vec<InvalidAnnotation> {
    let mut invalid = invalid_on_route(annotations);
    invalid.extend(parse_failure_accrual(annotations).err());
    invalid.extend(parse_load_bias(annotations).err());
    invalid
}

/// Returns the annotations of this module that the object has.
pub fn present(annotations: &StringMap) -> impl Iterator<Item = &'static str> {
    find_present(annotations).map(|(key, _)| key)
}

/// Returns the annotations of this module that have no effect on an object of this kind, each with the reason: the
/// annotation is not for this kind, or another annotation that it depends on is missing.
pub fn unused(annotations: &StringMap, kind: &str) -> Vec<(&'static str, String)> {
    let reason = |key: &str, dependency: Dependency| {
        if !applies_to(key, kind) {
            return Some(format!("it has no effect on an object of kind {kind}"));
        }
        let missing = match dependency {
            Dependency::None => return None,
            Dependency::OneOf(keys) => {
                let keys: Vec<&str> = keys.iter().copied().filter(|key| applies_to(key, kind)).collect();
                let is_set = keys.iter().any(|key| annotations.contains_key(key));
                (!is_set).then(|| keys.join(" or "))
            }
            Dependency::UnifiedAccrual => {
                let key = annotation::FAILURE_ACCRUAL;
                (annotations.get(key) != Some(UNIFIED)).then(|| format!("{key}: {UNIFIED}"))
            }
        };
        missing.map(|missing| format!("it has no effect without {missing}"))
    };
    let found = find_present(annotations);
    found
        .filter_map(|(key, dependency)| Some((key, reason(key, dependency)?)))
        .collect()
}

/// Returns whether objects of this kind can have the annotation, according to its documentation.
fn applies_to(key: &str, kind: &str) -> bool {
    let documented = annotation::ALL.iter().find(|documented| documented.name == key);
    documented.is_some_and(|documented| documented.objects.split(", ").any(|object| object == kind))
}

fn find_present(annotations: &StringMap) -> impl Iterator<Item = (&'static str, Dependency)> {
    let all = ANNOTATIONS.iter().copied();
    all.filter(move |(key, _)| annotations.contains_key(key))
}

pub fn parse_http_retry(annotations: &StringMap) -> Result<Option<Retry>, InvalidAnnotation> {
    let Some(text) = annotations.get(annotation::RETRY_HTTP) else {
        return Ok(None);
    };
    let conditions =
        retry::parse_statuses(text).map_err(|error| InvalidAnnotation::new(annotation::RETRY_HTTP, error))?;
    parse_retry(annotations, RetryConditions::Http(conditions)).map(Some)
}

pub fn parse_grpc_retry(annotations: &StringMap) -> Result<Option<Retry>, InvalidAnnotation> {
    let Some(text) = annotations.get(annotation::RETRY_GRPC) else {
        return Ok(None);
    };
    let codes = retry::parse_grpc_codes(text).map_err(|error| InvalidAnnotation::new(annotation::RETRY_GRPC, error))?;
    let conditions = RetryConditions::Grpc {
        cancelled: codes.contains(&retry::CANCELLED),
        deadline_exceeded: codes.contains(&retry::DEADLINE_EXCEEDED),
        internal: codes.contains(&retry::INTERNAL),
        resource_exhausted: codes.contains(&retry::RESOURCE_EXHAUSTED),
        unavailable: codes.contains(&retry::UNAVAILABLE),
    };
    parse_retry(annotations, conditions).map(Some)
}

fn parse_retry(annotations: &StringMap, conditions: RetryConditions) -> Result<Retry, InvalidAnnotation> {
    let limit: u16 = parse_annotation(annotations, annotation::RETRY_LIMIT, "a number up to 65535", |text| {
        text.parse().ok()
    })?
    .filter(|limit| *limit > 0)
    .unwrap_or(DEFAULT_RETRY_LIMIT);
    let timeout = parse_duration(annotations, annotation::RETRY_TIMEOUT)?.filter(|timeout| !timeout.is_zero());
    Ok(Retry {
        conditions,
        limit,
        timeout,
        backoff: None,
    })
}

/// Parses the timeouts. A value of zero disables a timeout that would apply without the annotation.
pub fn parse_timeouts(annotations: &StringMap) -> Result<Option<Timeouts>, InvalidAnnotation> {
    let keys = [
        annotation::TIMEOUT_REQUEST,
        annotation::TIMEOUT_RESPONSE,
        annotation::TIMEOUT_IDLE,
    ];
    if keys.iter().all(|key| !annotations.contains_key(key)) {
        return Ok(None);
    }
    let timeout = |key| parse_duration(annotations, key);
    let [request, response, idle] = keys;
    Ok(Some(Timeouts {
        request: timeout(request)?,
        response: timeout(response)?,
        idle: timeout(idle)?,
    }))
}

pub fn parse_failure_accrual(annotations: &StringMap) -> Result<Option<FailureAccrual>, InvalidAnnotation> {
    let Some(kind) = annotations.get(annotation::FAILURE_ACCRUAL) else {
        return Ok(None);
    };
    let max_failures = parse_annotation(annotations, annotation::CONSECUTIVE_MAX_FAILURES, "a number", |text| {
        text.parse().ok()
    })?
    .unwrap_or(7);
    match kind {
        CONSECUTIVE => {
            let backoff = parse_backoff(annotations)?;
            Ok(Some(FailureAccrual::Consecutive { max_failures, backoff }))
        }
        UNIFIED => parse_unified(annotations, max_failures).map(Some),
        _ => Err(InvalidAnnotation::new(
            annotation::FAILURE_ACCRUAL,
            format_args!("{kind:?} is not supported; use {CONSECUTIVE} or {UNIFIED}"),
        )),
    }
}

fn parse_unified(annotations: &StringMap, max_failures: u32) -> Result<FailureAccrual, InvalidAnnotation> {
    let threshold = parse_annotation(
        annotations,
        annotation::SUCCESS_RATE_THRESHOLD,
        "a number from 0 to 1",
        |text| {
            text.parse()
                .ok()
                .filter(|threshold: &f64| (0.0..=1.0).contains(threshold))
        },
    )?
    .unwrap_or(0.8);
    let window = parse_duration(annotations, annotation::SUCCESS_RATE_WINDOW)?.unwrap_or(Duration::from_secs(10));
    let min_requests = parse_annotation(annotations, annotation::SUCCESS_RATE_MIN_REQUESTS, "a number", |text| {
        text.parse::<u32>().ok()
    })?
    .unwrap_or(5);
    if threshold != 0.0 {
        if window < Duration::from_millis(10) {
            return Err(InvalidAnnotation::new(
                annotation::SUCCESS_RATE_WINDOW,
                format_args!("{window:?} is below 10ms"),
            ));
        }
        if min_requests == 0 {
            return Err(InvalidAnnotation::new(
                annotation::SUCCESS_RATE_MIN_REQUESTS,
                "0 is not in 1-1000000",
            ));
        }
    }
    // Proxies reject messages with a higher value.
    if min_requests > 1_000_000 {
        return Err(InvalidAnnotation::new(
            annotation::SUCCESS_RATE_MIN_REQUESTS,
            format_args!("{min_requests} is not in 1-1000000"),
        ));
    }
    let mut backoff = parse_backoff(annotations)?;
    backoff.honor_retry_after = parse_bool(annotations, annotation::HONOR_RETRY_AFTER)?.unwrap_or(false);
    Ok(FailureAccrual::Unified {
        threshold,
        window,
        min_requests,
        max_failures,
        backoff,
    })
}

fn parse_backoff(annotations: &StringMap) -> Result<Backoff, InvalidAnnotation> {
    let min = parse_duration(annotations, annotation::CONSECUTIVE_MIN_PENALTY)?.unwrap_or(Duration::from_secs(1));
    let max = parse_duration(annotations, annotation::CONSECUTIVE_MAX_PENALTY)?.unwrap_or(Duration::from_secs(60));
    if max.is_zero() || min > max {
        return Err(InvalidAnnotation::new(
            annotation::CONSECUTIVE_MAX_PENALTY,
            format_args!("{max:?} is zero or below the minimum penalty of {min:?}"),
        ));
    }
    let jitter = parse_annotation(
        annotations,
        annotation::CONSECUTIVE_JITTER_RATIO,
        "a number from 0 to 100",
        |text| text.parse().ok().filter(|jitter: &f32| (0.0..=100.0).contains(jitter)),
    )?
    .unwrap_or(0.5);
    Ok(Backoff {
        min,
        max,
        jitter,
        honor_retry_after: false,
    })
}

pub fn parse_load_bias(annotations: &StringMap) -> Result<Option<LoadBias>, InvalidAnnotation> {
    if parse_bool(annotations, annotation::PENALIZE_FAILURES)? != Some(true) {
        return Ok(None);
    }
    let penalty = parse_duration(annotations, annotation::LOAD_BIASER_PENALTY)?.unwrap_or(Duration::from_secs(5));
    let max_retry_after =
        parse_duration(annotations, annotation::LOAD_BIASER_MAX_RETRY_AFTER)?.unwrap_or(Duration::from_secs(300));
    Ok(Some(LoadBias {
        penalty,
        max_retry_after,
    }))
}

fn parse_bool(annotations: &StringMap, key: &'static str) -> Result<Option<bool>, InvalidAnnotation> {
    parse_annotation(annotations, key, "true or false", |text| match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    })
}

fn parse_duration(annotations: &StringMap, key: &'static str) -> Result<Option<Duration>, InvalidAnnotation> {
    annotations
        .get(key)
        .map(|text| duration::parse(text).map_err(|error| InvalidAnnotation::new(key, error)))
        .transpose()
}

fn parse_annotation<T>(
    annotations: &StringMap,
    key: &'static str,
    accepted: &str,
    read: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, InvalidAnnotation> {
    let Some(text) = annotations.get(key) else {
        return Ok(None);
    };
    read(text)
        .map(Some)
        .ok_or_else(|| InvalidAnnotation::new(key, format_args!("{text:?} is not {accepted}")))
}

/// What an annotation depends on: without it, the annotation has no effect.
#[derive(Clone, Copy)]
enum Dependency {
    None,
    /// One of these annotations.
    OneOf(&'static [&'static str]),
    /// The failure accrual `unified`.
    UnifiedAccrual,
}

/// The annotations of this module.
const ANNOTATIONS: &[(&str, Dependency)] = &[
    (annotation::RETRY_HTTP, Dependency::None),
    (annotation::RETRY_GRPC, Dependency::None),
    (annotation::RETRY_LIMIT, NEEDS_RETRY),
    (annotation::RETRY_TIMEOUT, NEEDS_RETRY),
    (annotation::TIMEOUT_REQUEST, Dependency::None),
    (annotation::TIMEOUT_RESPONSE, Dependency::None),
    (annotation::TIMEOUT_IDLE, Dependency::None),
    (annotation::FAILURE_ACCRUAL, Dependency::None),
    (annotation::CONSECUTIVE_MAX_FAILURES, NEEDS_ACCRUAL),
    (annotation::CONSECUTIVE_MIN_PENALTY, NEEDS_ACCRUAL),
    (annotation::CONSECUTIVE_MAX_PENALTY, NEEDS_ACCRUAL),
    (annotation::CONSECUTIVE_JITTER_RATIO, NEEDS_ACCRUAL),
    (annotation::SUCCESS_RATE_THRESHOLD, Dependency::UnifiedAccrual),
    (annotation::SUCCESS_RATE_WINDOW, Dependency::UnifiedAccrual),
    (annotation::SUCCESS_RATE_MIN_REQUESTS, Dependency::UnifiedAccrual),
    (annotation::HONOR_RETRY_AFTER, Dependency::UnifiedAccrual),
    (annotation::PENALIZE_FAILURES, Dependency::None),
    (annotation::LOAD_BIASER_PENALTY, NEEDS_LOAD_BIAS),
    (annotation::LOAD_BIASER_MAX_RETRY_AFTER, NEEDS_LOAD_BIAS),
];

const NEEDS_RETRY: Dependency = Dependency::OneOf(&[annotation::RETRY_HTTP, annotation::RETRY_GRPC]);
const NEEDS_ACCRUAL: Dependency = Dependency::OneOf(&[annotation::FAILURE_ACCRUAL]);
const NEEDS_LOAD_BIAS: Dependency = Dependency::OneOf(&[annotation::PENALIZE_FAILURES]);

const CONSECUTIVE: &str = "consecutive";
const UNIFIED: &str = "unified";

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use super::*;

    fn annotations(pairs: &[(&str, &str)]) -> StringMap {
        pairs.iter().copied().collect()
    }

    #[test]
    fn http_retries_name_status_ranges() {
        let check = |text: &str, expected: &[RangeInclusive<u16>]| {
            let retry = parse_http_retry(&annotations(&[(annotation::RETRY_HTTP, text)]))
                .unwrap()
                .unwrap();
            assert_eq!(retry.conditions, RetryConditions::Http(expected.to_vec()), "{text}");
            assert_eq!((retry.limit, retry.timeout), (1, None));
        };
        check("5xx", &[500..=599]);
        check("gateway-error, 429", &[502..=504, 429..=429]);
        check("500-503", &[500..=503]);
        for invalid in ["", "6xx", "99", "503-500", "5xx,"] {
            assert!(
                parse_http_retry(&annotations(&[(annotation::RETRY_HTTP, invalid)])).is_err(),
                "{invalid}"
            );
        }
        assert_eq!(parse_http_retry(&annotations(&[])), Ok(None));
    }

    #[test]
    fn a_retry_limit_of_zero_counts_as_unset() {
        let read = |limit| {
            let annotations = annotations(&[(annotation::RETRY_GRPC, "internal"), (annotation::RETRY_LIMIT, limit)]);
            parse_grpc_retry(&annotations).unwrap().unwrap().limit
        };
        assert_eq!((read("0"), read("3")), (1, 3));
    }

    #[test]
    fn a_timeout_of_zero_differs_from_an_absent_timeout() {
        let read = parse_timeouts(&annotations(&[
            (annotation::TIMEOUT_REQUEST, "0"),
            (annotation::TIMEOUT_IDLE, "2s"),
        ]));
        assert_eq!(
            read,
            Ok(Some(Timeouts {
                request: Some(Duration::ZERO),
                response: None,
                idle: Some(Duration::from_secs(2))
            }))
        );
    }

    #[test]
    fn an_error_names_the_invalid_annotation() {
        let http = (annotation::RETRY_HTTP, "5xx");
        let grpc = (annotation::RETRY_GRPC, "internal");
        let unified = (annotation::FAILURE_ACCRUAL, UNIFIED);
        let bias = (annotation::PENALIZE_FAILURES, "true");
        for (others, key, value) in [
            (&[][..], annotation::RETRY_HTTP, "6xx"),
            (&[], annotation::RETRY_GRPC, "sometimes"),
            (&[http, grpc], annotation::RETRY_LIMIT, "many"),
            (&[grpc], annotation::RETRY_TIMEOUT, "1h30m"),
            (&[], annotation::TIMEOUT_REQUEST, "1.5s"),
            (&[], annotation::TIMEOUT_RESPONSE, "-1s"),
            (&[], annotation::TIMEOUT_IDLE, "soon"),
            (&[], annotation::FAILURE_ACCRUAL, "sometimes"),
            (&[unified], annotation::CONSECUTIVE_MAX_FAILURES, "many"),
            (&[unified], annotation::CONSECUTIVE_MIN_PENALTY, "soon"),
            (&[unified], annotation::CONSECUTIVE_MAX_PENALTY, "1ms"),
            (&[unified], annotation::CONSECUTIVE_JITTER_RATIO, "101"),
            (&[unified], annotation::SUCCESS_RATE_THRESHOLD, "1.1"),
            (&[unified], annotation::SUCCESS_RATE_WINDOW, "5ms"),
            (&[unified], annotation::SUCCESS_RATE_MIN_REQUESTS, "0"),
            (&[unified], annotation::HONOR_RETRY_AFTER, "maybe"),
            (&[], annotation::PENALIZE_FAILURES, "maybe"),
            (&[bias], annotation::LOAD_BIASER_PENALTY, "soon"),
            (&[bias], annotation::LOAD_BIASER_MAX_RETRY_AFTER, "soon"),
        ] {
            let all = annotations(&[others, &[(key, value)]].concat());
            let invalid = invalid_on_parent(&all);
            let keys: Vec<_> = invalid.iter().map(|invalid| invalid.key).collect();
            assert_eq!(keys, [key], "{value}: {invalid:?}");
        }
    }

    #[test]
    fn annotations_without_effect_are_found_with_the_reason() {
        let check = |kind: &str, set: &[(&str, &str)], expected: &[(&str, &str)]| {
            let found = unused(&annotations(set), kind);
            let found: Vec<_> = found.iter().map(|(key, reason)| (*key, &**reason)).collect();
            assert_eq!(found, expected, "{kind} {set:?}");
        };
        let limit = (annotation::RETRY_LIMIT, "many");
        let http = (annotation::RETRY_HTTP, "5xx");
        let grpc = (annotation::RETRY_GRPC, "internal");
        let without_retry = "it has no effect without retry.linkerd.io/http or retry.linkerd.io/grpc";
        check("Service", &[limit], &[(limit.0, without_retry)]);
        check("EgressNetwork", &[limit], &[(limit.0, without_retry)]);
        check("Service", &[limit, grpc], &[]);
        let without_http = "it has no effect without retry.linkerd.io/http";
        check("HTTPRoute", &[limit, http], &[]);
        check(
            "HTTPRoute",
            &[limit, grpc],
            &[
                (grpc.0, "it has no effect on an object of kind HTTPRoute"),
                (limit.0, without_http),
            ],
        );
        check(
            "TCPRoute",
            &[(annotation::TIMEOUT_IDLE, "1s")],
            &[(
                annotation::TIMEOUT_IDLE,
                "it has no effect on an object of kind TCPRoute",
            )],
        );
        let accrual = |value| (annotation::FAILURE_ACCRUAL, value);
        let failures = (annotation::CONSECUTIVE_MAX_FAILURES, "many");
        let threshold = (annotation::SUCCESS_RATE_THRESHOLD, "0.5");
        let without_unified = "it has no effect without balancer.linkerd.io/failure-accrual: unified";
        check("Service", &[accrual(UNIFIED), failures, threshold], &[]);
        check(
            "Service",
            &[accrual(CONSECUTIVE), failures, threshold],
            &[(threshold.0, without_unified)],
        );
        check(
            "Service",
            &[failures, threshold],
            &[
                (
                    failures.0,
                    "it has no effect without balancer.linkerd.io/failure-accrual",
                ),
                (threshold.0, without_unified),
            ],
        );
        let penalize = (annotation::PENALIZE_FAILURES, "false");
        let penalty = (annotation::LOAD_BIASER_PENALTY, "1s");
        check("Service", &[penalize, penalty], &[]);
        check(
            "EgressNetwork",
            &[penalize],
            &[(penalize.0, "it has no effect on an object of kind EgressNetwork")],
        );
    }

    #[test]
    fn every_annotation_is_documented_for_services() {
        for (key, _) in ANNOTATIONS {
            assert!(applies_to(key, "Service"), "{key}");
        }
    }

    #[test]
    fn failure_accrual_has_the_documented_defaults_and_limits() {
        let consecutive = parse_failure_accrual(&annotations(&[(annotation::FAILURE_ACCRUAL, "consecutive")]));
        let backoff = Backoff {
            min: Duration::from_secs(1),
            max: Duration::from_secs(60),
            jitter: 0.5,
            honor_retry_after: false,
        };
        assert_eq!(
            consecutive,
            Ok(Some(FailureAccrual::Consecutive {
                max_failures: 7,
                backoff
            }))
        );
        for (key, invalid) in [
            (annotation::FAILURE_ACCRUAL, "sometimes"),
            (annotation::CONSECUTIVE_MIN_PENALTY, "2m"),
            (annotation::CONSECUTIVE_MAX_PENALTY, "0"),
            (annotation::CONSECUTIVE_JITTER_RATIO, "101"),
            (annotation::SUCCESS_RATE_THRESHOLD, "1.1"),
            (annotation::SUCCESS_RATE_WINDOW, "5ms"),
            (annotation::SUCCESS_RATE_MIN_REQUESTS, "0"),
            (annotation::HONOR_RETRY_AFTER, "maybe"),
        ] {
            let annotations = annotations(&[(annotation::FAILURE_ACCRUAL, "unified"), (key, invalid)]);
            assert!(parse_failure_accrual(&annotations).is_err(), "{key}: {invalid}");
        }
    }
}
