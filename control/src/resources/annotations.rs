//! Annotations for outbound policy: retries, timeouts, failure accrual and load bias.
//!
//! Each parser returns `None` if its annotations are absent, and an error if they are invalid.

use std::time::Duration;

use tulle_core::names::annotation;
use tulle_core::{duration, retry};

use crate::model::outbound::{Backoff, FailureAccrual, Retry, RetryConditions, Timeouts};
use crate::resources::string_map::StringMap;

/// Penalty that makes failures count as slow responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadBias {
    pub penalty: Duration,
    pub max_retry_after: Duration,
}

/// Maximum number of retries, if none is specified.
pub const DEFAULT_RETRY_LIMIT: u16 = 1;

pub fn parse_http_retry(annotations: &StringMap) -> Result<Option<Retry>, String> {
    let Some(text) = annotations.get(annotation::RETRY_HTTP) else {
        return Ok(None);
    };
    let conditions = retry::parse_statuses(text).map_err(|error| format!("{}: {error}", annotation::RETRY_HTTP))?;
    parse_retry(annotations, RetryConditions::Http(conditions)).map(Some)
}

pub fn parse_grpc_retry(annotations: &StringMap) -> Result<Option<Retry>, String> {
    let Some(text) = annotations.get(annotation::RETRY_GRPC) else {
        return Ok(None);
    };
    let codes = retry::parse_grpc_codes(text).map_err(|error| format!("{}: {error}", annotation::RETRY_GRPC))?;
    let conditions = RetryConditions::Grpc {
        cancelled: codes.contains(&retry::CANCELLED),
        deadline_exceeded: codes.contains(&retry::DEADLINE_EXCEEDED),
        internal: codes.contains(&retry::INTERNAL),
        resource_exhausted: codes.contains(&retry::RESOURCE_EXHAUSTED),
        unavailable: codes.contains(&retry::UNAVAILABLE),
    };
    parse_retry(annotations, conditions).map(Some)
}

fn parse_retry(annotations: &StringMap, conditions: RetryConditions) -> Result<Retry, String> {
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
pub fn parse_timeouts(annotations: &StringMap) -> Result<Option<Timeouts>, String> {
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

pub fn parse_failure_accrual(annotations: &StringMap) -> Result<Option<FailureAccrual>, String> {
    let Some(kind) = annotations.get(annotation::FAILURE_ACCRUAL) else {
        return Ok(None);
    };
    let max_failures = parse_annotation(annotations, annotation::CONSECUTIVE_MAX_FAILURES, "a number", |text| {
        text.parse().ok()
    })?
    .unwrap_or(7);
    match kind {
        "consecutive" => {
            let backoff = parse_backoff(annotations)?;
            Ok(Some(FailureAccrual::Consecutive { max_failures, backoff }))
        }
        "unified" => parse_unified(annotations, max_failures).map(Some),
        _ => Err(format!(
            "{}: {kind:?} is not supported; use consecutive or unified",
            annotation::FAILURE_ACCRUAL
        )),
    }
}

fn parse_unified(annotations: &StringMap, max_failures: u32) -> Result<FailureAccrual, String> {
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
            return Err(format!("{}: {window:?} is below 10ms", annotation::SUCCESS_RATE_WINDOW));
        }
        if min_requests == 0 {
            return Err(format!(
                "{}: 0 is not in 1-1000000",
                annotation::SUCCESS_RATE_MIN_REQUESTS
            ));
        }
    }
    // Proxies reject messages with a higher value.
    if min_requests > 1_000_000 {
        return Err(format!(
            "{}: {min_requests} is not in 1-1000000",
            annotation::SUCCESS_RATE_MIN_REQUESTS
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

fn parse_backoff(annotations: &StringMap) -> Result<Backoff, String> {
    let min = parse_duration(annotations, annotation::CONSECUTIVE_MIN_PENALTY)?.unwrap_or(Duration::from_secs(1));
    let max = parse_duration(annotations, annotation::CONSECUTIVE_MAX_PENALTY)?.unwrap_or(Duration::from_secs(60));
    if max.is_zero() || min > max {
        return Err(format!(
            "{}: {max:?} is zero or below the minimum penalty of {min:?}",
            annotation::CONSECUTIVE_MAX_PENALTY
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

pub fn parse_load_bias(annotations: &StringMap) -> Result<Option<LoadBias>, String> {
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

fn parse_bool(annotations: &StringMap, key: &str) -> Result<Option<bool>, String> {
    parse_annotation(annotations, key, "true or false", |text| match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    })
}

fn parse_duration(annotations: &StringMap, key: &str) -> Result<Option<Duration>, String> {
    annotations
        .get(key)
        .map(|text| duration::parse(text).map_err(|error| format!("{key}: {error}")))
        .transpose()
}

fn parse_annotation<T>(
    annotations: &StringMap,
    key: &str,
    accepted: &str,
    read: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, String> {
    let Some(text) = annotations.get(key) else {
        return Ok(None);
    };
    read(text)
        .map(Some)
        .ok_or_else(|| format!("{key}: {text:?} is not {accepted}"))
}

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
    fn a_timeout_of_zero_is_not_an_absent_one() {
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
