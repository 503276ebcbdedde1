//! Annotations that shape outbound policy: retries, timeouts, failure accrual and load bias.
//!
//! Each reader returns nothing when its annotations are absent, and the reason when they cannot be read.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use tulle_core::names::annotation;
use tulle_core::{duration, retry};

/// Annotations of one object.
pub type Annotations = BTreeMap<String, String>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry<C> {
    pub conditions: C,
    pub limit: u16,
    pub timeout: Option<Duration>,
}

/// Status codes that are tried again.
pub type HttpConditions = Vec<RangeInclusive<u16>>;

/// gRPC codes that are tried again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrpcConditions {
    pub cancelled: bool,
    pub deadline_exceeded: bool,
    pub internal: bool,
    pub resource_exhausted: bool,
    pub unavailable: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    pub request: Option<Duration>,
    pub response: Option<Duration>,
    pub idle: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FailureAccrual {
    Consecutive {
        max_failures: u32,
        backoff: Backoff,
    },
    Unified {
        threshold: f64,
        window: Duration,
        min_requests: u32,
        max_failures: u32,
        backoff: Backoff,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    pub min: Duration,
    pub max: Duration,
    pub jitter: f32,
    pub honor_retry_after: bool,
}

/// Failures count as slow responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadBias {
    pub penalty: Duration,
    pub max_retry_after: Duration,
}

pub fn http_retry(annotations: &Annotations) -> Result<Option<Retry<HttpConditions>>, String> {
    let Some(text) = annotations.get(annotation::RETRY_HTTP) else {
        return Ok(None);
    };
    let conditions = retry::statuses(text).map_err(|error| format!("{}: {error}", annotation::RETRY_HTTP))?;
    retry_of(annotations, conditions).map(Some)
}

pub fn grpc_retry(annotations: &Annotations) -> Result<Option<Retry<GrpcConditions>>, String> {
    let Some(text) = annotations.get(annotation::RETRY_GRPC) else {
        return Ok(None);
    };
    let codes = retry::codes(text).map_err(|error| format!("{}: {error}", annotation::RETRY_GRPC))?;
    let conditions = GrpcConditions {
        cancelled: codes.contains(&retry::CANCELLED),
        deadline_exceeded: codes.contains(&retry::DEADLINE_EXCEEDED),
        internal: codes.contains(&retry::INTERNAL),
        resource_exhausted: codes.contains(&retry::RESOURCE_EXHAUSTED),
        unavailable: codes.contains(&retry::UNAVAILABLE),
    };
    retry_of(annotations, conditions).map(Some)
}

fn retry_of<C>(annotations: &Annotations, conditions: C) -> Result<Retry<C>, String> {
    let limit: u16 = parse(annotations, annotation::RETRY_LIMIT, "a number up to 65535", |text| {
        text.parse().ok()
    })?
    .filter(|limit| *limit > 0)
    .unwrap_or(1);
    let timeout = duration(annotations, annotation::RETRY_TIMEOUT)?.filter(|timeout| !timeout.is_zero());
    Ok(Retry {
        conditions,
        limit,
        timeout,
    })
}

/// Timeouts, of which 0 means none.
pub fn timeouts(annotations: &Annotations) -> Result<Option<Timeouts>, String> {
    let keys = [
        annotation::TIMEOUT_REQUEST,
        annotation::TIMEOUT_RESPONSE,
        annotation::TIMEOUT_IDLE,
    ];
    if keys.iter().all(|key| !annotations.contains_key(*key)) {
        return Ok(None);
    }
    let timeout = |key| duration(annotations, key).map(|timeout| timeout.filter(|timeout| !timeout.is_zero()));
    let [request, response, idle] = keys;
    Ok(Some(Timeouts {
        request: timeout(request)?,
        response: timeout(response)?,
        idle: timeout(idle)?,
    }))
}

pub fn failure_accrual(annotations: &Annotations) -> Result<Option<FailureAccrual>, String> {
    let Some(kind) = annotations.get(annotation::FAILURE_ACCRUAL) else {
        return Ok(None);
    };
    let max_failures = parse(annotations, annotation::CONSECUTIVE_MAX_FAILURES, "a number", |text| {
        text.parse().ok()
    })?
    .unwrap_or(7);
    match kind.as_str() {
        "consecutive" => {
            let backoff = backoff(annotations)?;
            Ok(Some(FailureAccrual::Consecutive { max_failures, backoff }))
        }
        "unified" => unified(annotations, max_failures).map(Some),
        _ => Err(format!(
            "{}: {kind:?} is none of: consecutive, unified",
            annotation::FAILURE_ACCRUAL
        )),
    }
}

fn unified(annotations: &Annotations, max_failures: u32) -> Result<FailureAccrual, String> {
    let threshold = parse(
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
    let window = duration(annotations, annotation::SUCCESS_RATE_WINDOW)?.unwrap_or(Duration::from_secs(10));
    let min_requests = parse(annotations, annotation::SUCCESS_RATE_MIN_REQUESTS, "a number", |text| {
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
    // Proxies take no message with more, whatever the threshold.
    if min_requests > 1_000_000 {
        return Err(format!(
            "{}: {min_requests} is not in 1-1000000",
            annotation::SUCCESS_RATE_MIN_REQUESTS
        ));
    }
    let mut backoff = backoff(annotations)?;
    backoff.honor_retry_after = boolean(annotations, annotation::HONOR_RETRY_AFTER)?.unwrap_or(false);
    Ok(FailureAccrual::Unified {
        threshold,
        window,
        min_requests,
        max_failures,
        backoff,
    })
}

fn backoff(annotations: &Annotations) -> Result<Backoff, String> {
    let min = duration(annotations, annotation::CONSECUTIVE_MIN_PENALTY)?.unwrap_or(Duration::from_secs(1));
    let max = duration(annotations, annotation::CONSECUTIVE_MAX_PENALTY)?.unwrap_or(Duration::from_secs(60));
    if max.is_zero() || min > max {
        return Err(format!(
            "{}: {max:?} is zero or below the least penalty of {min:?}",
            annotation::CONSECUTIVE_MAX_PENALTY
        ));
    }
    let jitter = parse(
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

pub fn load_bias(annotations: &Annotations) -> Result<Option<LoadBias>, String> {
    if boolean(annotations, annotation::PENALIZE_FAILURES)? != Some(true) {
        return Ok(None);
    }
    let penalty = duration(annotations, annotation::LOAD_BIASER_PENALTY)?.unwrap_or(Duration::from_secs(5));
    let max_retry_after =
        duration(annotations, annotation::LOAD_BIASER_MAX_RETRY_AFTER)?.unwrap_or(Duration::from_secs(300));
    Ok(Some(LoadBias {
        penalty,
        max_retry_after,
    }))
}

fn boolean(annotations: &Annotations, key: &str) -> Result<Option<bool>, String> {
    parse(annotations, key, "true or false", |text| match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    })
}

fn duration(annotations: &Annotations, key: &str) -> Result<Option<Duration>, String> {
    annotations
        .get(key)
        .map(|text| duration::parse(text).map_err(|error| format!("{key}: {error}")))
        .transpose()
}

fn parse<T>(
    annotations: &Annotations,
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
    use super::*;

    fn annotations(pairs: &[(&str, &str)]) -> Annotations {
        pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn http_retries_name_status_ranges() {
        let check = |text: &str, expected: &[RangeInclusive<u16>]| {
            let retry = http_retry(&annotations(&[(annotation::RETRY_HTTP, text)]))
                .unwrap()
                .unwrap();
            assert_eq!(retry.conditions, expected, "{text}");
            assert_eq!((retry.limit, retry.timeout), (1, None));
        };
        check("5xx", &[500..=599]);
        check("gateway-error, 429", &[502..=504, 429..=429]);
        check("500-503", &[500..=503]);
        for refused in ["", "6xx", "99", "503-500", "5xx,"] {
            assert!(
                http_retry(&annotations(&[(annotation::RETRY_HTTP, refused)])).is_err(),
                "{refused}"
            );
        }
        assert_eq!(http_retry(&annotations(&[])), Ok(None));
    }

    #[test]
    fn a_retry_limit_of_zero_counts_as_unset() {
        let read = |limit| {
            let annotations = annotations(&[(annotation::RETRY_GRPC, "internal"), (annotation::RETRY_LIMIT, limit)]);
            grpc_retry(&annotations).unwrap().unwrap().limit
        };
        assert_eq!((read("0"), read("3")), (1, 3));
    }

    #[test]
    fn a_timeout_of_zero_is_none() {
        let read = timeouts(&annotations(&[
            (annotation::TIMEOUT_REQUEST, "0"),
            (annotation::TIMEOUT_IDLE, "2s"),
        ]));
        assert_eq!(
            read,
            Ok(Some(Timeouts {
                request: None,
                response: None,
                idle: Some(Duration::from_secs(2))
            }))
        );
    }

    #[test]
    fn failure_accrual_has_the_documented_defaults_and_limits() {
        let consecutive = failure_accrual(&annotations(&[(annotation::FAILURE_ACCRUAL, "consecutive")]));
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
        for (key, refused) in [
            (annotation::FAILURE_ACCRUAL, "sometimes"),
            (annotation::CONSECUTIVE_MIN_PENALTY, "2m"),
            (annotation::CONSECUTIVE_MAX_PENALTY, "0"),
            (annotation::CONSECUTIVE_JITTER_RATIO, "101"),
            (annotation::SUCCESS_RATE_THRESHOLD, "1.1"),
            (annotation::SUCCESS_RATE_WINDOW, "5ms"),
            (annotation::SUCCESS_RATE_MIN_REQUESTS, "0"),
            (annotation::HONOR_RETRY_AFTER, "maybe"),
        ] {
            let annotations = annotations(&[(annotation::FAILURE_ACCRUAL, "unified"), (key, refused)]);
            assert!(failure_accrual(&annotations).is_err(), "{key}: {refused}");
        }
    }
}
