//! Parses retry conditions in the form of annotations and headers: `5xx,429` and `unavailable,internal`.

use std::ops::RangeInclusive;

/// An unknown retry condition.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{condition:?} is none of: {expected}")]
pub struct UnknownCondition {
    condition: String,
    expected: &'static str,
}

/// Parses a comma-separated list of HTTP statuses: `5xx`, `gateway-error` (502 to 504), a status, or a range such as `500-503`.
///
/// # Errors
/// If an entry is none of these.
pub fn parse_statuses(text: &str) -> Result<Vec<RangeInclusive<u16>>, UnknownCondition> {
    parse_list(
        text,
        parse_status_range,
        "5xx, gateway-error, a status code, a range of status codes",
    )
}

/// Parses a comma-separated list of names of gRPC codes.
///
/// # Errors
/// If an entry is not the name of a gRPC code that can be retried.
pub fn parse_grpc_codes(text: &str) -> Result<Vec<i32>, UnknownCondition> {
    parse_list(
        text,
        |name| {
            GRPC_CODES
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, code)| *code)
        },
        "cancelled, deadline-exceeded, internal, resource-exhausted, unavailable",
    )
}

fn parse_list<T>(
    text: &str,
    parse: impl Fn(&str) -> Option<T>,
    expected: &'static str,
) -> Result<Vec<T>, UnknownCondition> {
    let conditions = text.split(',').map(str::trim);
    let parsed = conditions.map(|condition| {
        parse(condition).ok_or_else(|| UnknownCondition {
            condition: condition.to_owned(),
            expected,
        })
    });
    parsed.collect()
}

fn parse_status_range(text: &str) -> Option<RangeInclusive<u16>> {
    match text {
        "5xx" => return Some(500..=599),
        "gateway-error" => return Some(502..=504),
        _ => {}
    }
    let (start, end) = text.split_once('-').unwrap_or((text, text));
    let (start, end) = (parse_status_code(start)?, parse_status_code(end)?);
    (start <= end).then_some(start..=end)
}

/// Parses a status code from 100 to 599. `parse` alone would accept a leading `+`.
fn parse_status_code(text: &str) -> Option<u16> {
    let is_number = text.bytes().all(|b| b.is_ascii_digit());
    let code: u16 = text.parse().ok().filter(|_| is_number)?;
    (100..=599).contains(&code).then_some(code)
}

/// The gRPC codes that can be retried.
pub const CANCELLED: i32 = 1;
pub const DEADLINE_EXCEEDED: i32 = 4;
pub const RESOURCE_EXHAUSTED: i32 = 8;
pub const INTERNAL: i32 = 13;
pub const UNAVAILABLE: i32 = 14;

const GRPC_CODES: [(&str, i32); 5] = [
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
        assert_eq!(parse_statuses("5xx").unwrap(), [500..=599]);
        assert_eq!(parse_statuses("gateway-error, 429").unwrap(), [502..=504, 429..=429]);
        assert_eq!(parse_statuses("500-503").unwrap(), [500..=503]);
        for bad in ["", "6xx", "99", "600", "503-500", "5xx,", "a-b", "+500", "500-+503"] {
            assert!(parse_statuses(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn grpc_codes_are_parsed_by_name() {
        assert_eq!(parse_grpc_codes("unavailable, cancelled").unwrap(), [14, 1]);
        let error = parse_grpc_codes("internal,sometimes").unwrap_err();
        assert!(
            error.to_string().starts_with("\"sometimes\" is none of: cancelled,"),
            "{error}"
        );
    }
}
