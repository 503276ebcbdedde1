//! HTTP/2 client parameters from the chart: the protobuf message in JSON.

use std::time::Duration;

use serde::Deserialize;
use serde::de::Error as _;
use tulle_proto::convert::wire_duration;
use tulle_proto::destination::Http2ClientParams;
use tulle_proto::destination::http2_client_params::{FlowControl, Internals, KeepAlive};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    flow_control: Option<RawFlowControl>,
    keep_alive: Option<RawKeepAlive>,
    internals: Option<RawInternals>,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
struct RawFlowControl {
    initial_connection_window_size: u32,
    initial_stream_window_size: u32,
    adaptive_flow_control: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawKeepAlive {
    interval: Option<RawDuration>,
    timeout: Option<RawDuration>,
    #[serde(default)]
    while_idle: bool,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
struct RawInternals {
    max_concurrent_reset_streams: u32,
    max_frame_size: u32,
    max_send_buf_size: u32,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
struct RawDuration {
    seconds: u64,
    nanos: u32,
}

/// Parses the value of `--meshed-http2-client-params`.
///
/// # Errors
/// Fails if the text is not JSON or has fields that the message does not have, and if `keep_alive` is set without an interval and a
/// timeout above zero: proxies would ignore it.
pub fn parse(json: &str) -> Result<Http2ClientParams, serde_json::Error> {
    let params: Params = serde_json::from_str(json)?;
    Ok(Http2ClientParams {
        flow_control: params.flow_control.map(|raw| FlowControl {
            initial_connection_window_size: raw.initial_connection_window_size,
            initial_stream_window_size: raw.initial_stream_window_size,
            adaptive_flow_control: raw.adaptive_flow_control,
        }),
        keep_alive: params.keep_alive.map(keep_alive).transpose()?,
        internals: params.internals.map(|raw| Internals {
            max_concurrent_reset_streams: raw.max_concurrent_reset_streams,
            max_frame_size: raw.max_frame_size,
            max_send_buf_size: raw.max_send_buf_size,
        }),
    })
}

fn keep_alive(raw: RawKeepAlive) -> Result<KeepAlive, serde_json::Error> {
    let duration = |field, raw: Option<RawDuration>| {
        let raw = raw.unwrap_or_default();
        // Nanoseconds above one second are added to the seconds.
        let duration = Duration::from_secs(raw.seconds).saturating_add(Duration::from_nanos(raw.nanos.into()));
        match duration.is_zero() {
            true => Err(serde_json::Error::custom(format_args!(
                "keep_alive.{field} is missing or zero, but keep_alive needs an interval and a timeout above zero"
            ))),
            false => Ok(Some(wire_duration(duration))),
        }
    };
    Ok(KeepAlive {
        interval: duration("interval", raw.interval)?,
        timeout: duration("timeout", raw.timeout)?,
        while_idle: raw.while_idle,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chart_default_is_valid_and_unknown_fields_are_rejected() {
        let json = r#"{"keep_alive":{"interval":{"seconds":10},"timeout":{"seconds":3},"while_idle":true}}"#;
        let keep_alive = parse(json).unwrap().keep_alive.unwrap();
        assert_eq!(keep_alive.interval, Some(wire_duration(Duration::from_secs(10))));
        assert_eq!(keep_alive.timeout, Some(wire_duration(Duration::from_secs(3))));
        assert!(keep_alive.while_idle);
        for invalid in ["", "{", r#"{"keepAlive":{}}"#, r#"{"internals":{"max_frame_size":-1}}"#] {
            assert!(parse(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn keep_alive_needs_an_interval_and_a_timeout() {
        for (keep_alive, field) in [
            (r#"{"interval":{"seconds":10}}"#, "keep_alive.timeout"),
            (r#"{"timeout":{"seconds":3},"while_idle":true}"#, "keep_alive.interval"),
            (r#"{"interval":{"seconds":10},"timeout":{}}"#, "keep_alive.timeout"),
            (
                r#"{"interval":{"nanos":0},"timeout":{"seconds":3}}"#,
                "keep_alive.interval",
            ),
            ("{}", "keep_alive.interval"),
        ] {
            let error = parse(&format!(r#"{{"keep_alive":{keep_alive}}}"#))
                .unwrap_err()
                .to_string();
            assert!(error.starts_with(field), "{keep_alive}: {error}");
        }
        let short = r#"{"keep_alive":{"interval":{"nanos":1},"timeout":{"nanos":1}}}"#;
        assert!(parse(short).is_ok());
    }
}
