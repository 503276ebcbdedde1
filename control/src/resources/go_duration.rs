//! Durations in Go's syntax: `1h30m`, `1.5s`, `100ms`. Used in flags, in ServiceProfiles and in annotations of the injector.
//!
//! Routes use the syntax of the Gateway API (`route.rs`), and annotations of policies use the syntax of
//! `tulle_core::duration`.

use std::time::Duration;

/// Parses a sum of numbers with units. Only `0` can have no unit.
///
/// # Errors
/// Fails if the text is not a duration, is negative, or exceeds 292 years.
pub fn parse(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is not a duration such as 100ms, 1.5s or 1h30m");
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let (amount, after) = split_while(rest, |byte| byte.is_ascii_digit() || byte == b'.');
        let (unit, after) = split_while(after, |byte| !byte.is_ascii_digit() && byte != b'.');
        let scale: u128 = match unit {
            "ns" => 1,
            "us" | "µs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return Err(invalid()),
        };
        nanos = parse_scaled(amount, scale)
            .and_then(|more| nanos.checked_add(more))
            .ok_or_else(invalid)?;
        rest = after;
    }
    match i64::try_from(nanos) {
        Ok(nanos) => Ok(Duration::from_nanos(nanos.unsigned_abs())),
        Err(_) => Err(invalid()),
    }
}

fn split_while(text: &str, wanted: impl Fn(u8) -> bool) -> (&str, &str) {
    let end = text.bytes().position(|byte| !wanted(byte)).unwrap_or(text.len());
    text.split_at_checked(end).unwrap_or((text, ""))
}

/// Multiplies a decimal number by its unit, without floating point.
fn parse_scaled(amount: &str, scale: u128) -> Option<u128> {
    let (whole, fraction) = amount.split_once('.').unwrap_or((amount, ""));
    if whole.is_empty() && fraction.is_empty() || whole.len() > 19 || fraction.len() > 18 {
        return None;
    }
    let number = |digits: &str| {
        if digits.is_empty() {
            Some(0)
        } else {
            digits.parse::<u128>().ok()
        }
    };
    let divisor = 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    Some(number(whole)?.checked_mul(scale)? + number(fraction)?.checked_mul(scale)? / divisor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_sums_of_decimal_numbers_with_units() {
        let check = |text: &str, millis: u64| assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        check("0", 0);
        check("0s", 0);
        check("100ms", 100);
        check("1.5s", 1500);
        check(".5s", 500);
        check("1h30m", 5_400_000);
        check("+2s", 2000);
        check("1000us", 1);
        check("1000µs", 1);
        for invalid in ["", "5", "-1s", "1d", "s", ".s", "1..5s", "1s ", "99999999999h", "1e3s"] {
            assert!(parse(invalid).is_err(), "{invalid}");
        }
    }
}
