//! When a request is tried again, as operators write it: `5xx,429` and `unavailable,internal`.

use std::ops::RangeInclusive;

/// A condition that nobody knows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{condition:?} is none of: {expected}")]
pub struct UnknownCondition {
    condition: String,
    expected: &'static str,
}

/// Statuses of HTTP: `5xx`, `gateway-error` (502 to 504), a status, or a range such as `500-503`, between commas.
///
/// # Errors
/// One of them is none of these.
pub fn statuses(text: &str) -> Result<Vec<RangeInclusive<u16>>, UnknownCondition> {
    each(text, status, "5xx, gateway-error, a status code, a range of them")
}

/// Codes of gRPC, by their names between commas.
///
/// # Errors
/// One of them is not among those that can be asked for.
pub fn codes(text: &str) -> Result<Vec<i32>, UnknownCondition> {
    each(
        text,
        |name| CODES.iter().find(|(known, _)| *known == name).map(|(_, code)| *code),
        "cancelled, deadline-exceeded, internal, resource-exhausted, unavailable",
    )
}

fn each<T>(text: &str, parse: impl Fn(&str) -> Option<T>, expected: &'static str) -> Result<Vec<T>, UnknownCondition> {
    let conditions = text.split(',').map(str::trim);
    let parsed = conditions.map(|condition| {
        parse(condition).ok_or_else(|| UnknownCondition {
            condition: condition.to_owned(),
            expected,
        })
    });
    parsed.collect()
}

fn status(text: &str) -> Option<RangeInclusive<u16>> {
    match text {
        "5xx" => return Some(500..=599),
        "gateway-error" => return Some(502..=504),
        _ => {}
    }
    let (start, end) = text.split_once('-').unwrap_or((text, text));
    let (start, end) = (start.parse().ok()?, end.parse().ok()?);
    (100 <= start && start <= end && end <= 599).then_some(start..=end)
}

/// Codes of gRPC that can be asked for.
pub const CANCELLED: i32 = 1;
pub const DEADLINE_EXCEEDED: i32 = 4;
pub const RESOURCE_EXHAUSTED: i32 = 8;
pub const INTERNAL: i32 = 13;
pub const UNAVAILABLE: i32 = 14;

const CODES: [(&str, i32); 5] = [
    ("cancelled", CANCELLED),
    ("deadline-exceeded", DEADLINE_EXCEEDED),
    ("internal", INTERNAL),
    ("resource-exhausted", RESOURCE_EXHAUSTED),
    ("unavailable", UNAVAILABLE),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_words_numbers_and_ranges() {
        assert_eq!(statuses("5xx").unwrap(), [500..=599]);
        assert_eq!(statuses("gateway-error, 429").unwrap(), [502..=504, 429..=429]);
        assert_eq!(statuses("500-503").unwrap(), [500..=503]);
        for bad in ["", "6xx", "99", "600", "503-500", "5xx,", "a-b"] {
            assert!(statuses(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn codes_have_names() {
        assert_eq!(codes("unavailable, cancelled").unwrap(), [14, 1]);
        let error = codes("internal,sometimes").unwrap_err();
        assert!(
            error.to_string().starts_with("\"sometimes\" is none of: cancelled,"),
            "{error}"
        );
    }
}
