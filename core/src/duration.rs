//! Durations in configuration: `10s`, `100ms`.

use std::time::Duration;

/// The text is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a duration; expected digits and one of ms, s, m, h, d, such as 100ms, or 0")]
pub struct ParseDurationError {
    text: String,
}

/// Parses digits and a unit (`ms`, `s`, `m`, `h`, `d`). Only 0 needs no unit. Surrounding white space is ignored.
///
/// # Errors
/// If the text has another form, or the value in milliseconds does not fit into 64 bits.
pub fn parse(text: &str) -> Result<Duration, ParseDurationError> {
    parse_millis(text.trim())
        .map(Duration::from_millis)
        .ok_or_else(|| ParseDurationError { text: text.to_owned() })
}

fn parse_millis(text: &str) -> Option<u64> {
    let n_digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(n_digits);
    let number: u64 = number.parse().ok()?;
    let millis_per_unit = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        "" if number == 0 => 0,
        _ => return None,
    };
    number.checked_mul(millis_per_unit)
}

/// Parses the lifetime of a certificate or token. It must not be zero.
///
/// # Errors
/// Returns why the text is not a lifetime.
pub fn parse_lifetime(text: &str) -> Result<Duration, String> {
    match parse(text) {
        Ok(lifetime) if !lifetime.is_zero() => Ok(lifetime),
        Ok(_) => Err("the lifetime is zero; expected one such as 24h or 365d".to_owned()),
        Err(err) => Err(err.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_parsed() {
        for (text, millis) in [
            ("100ms", 100),
            (" 10s ", 10_000),
            ("2m", 120_000),
            ("1h", 3_600_000),
            ("1d", 86_400_000),
            ("0", 0),
            ("0s", 0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn invalid_durations_are_refused() {
        for text in [
            "",
            "1",
            "s",
            "1.5s",
            "-1s",
            "+1s",
            "1 s",
            "1m30s",
            "1us",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn lifetimes_are_positive_durations() {
        assert_eq!(parse_lifetime("2d"), Ok(Duration::from_secs(172_800)));
        assert!(parse_lifetime("0").is_err() && parse_lifetime("soon").is_err());
    }
}
