//! Values of command-line options.

use std::time::Duration;

/// Reads a number with a unit: "250us", "50ms", "10s", "2m".
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{text:?} is not a duration: give \"50ms\" or \"10s\""))?;
    match &text[digits.len()..] {
        "us" => Ok(Duration::from_micros(number)),
        "ms" => Ok(Duration::from_millis(number)),
        "s" => Ok(Duration::from_secs(number)),
        "m" => Ok(Duration::from_secs(number * 60)),
        unit => Err(format!("{text:?} has the unit {unit:?}: give us, ms, s or m")),
    }
}
