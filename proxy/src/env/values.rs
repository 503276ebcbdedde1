//! Parsers for the values of variables. Each error names the accepted values.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use tulle_core::error_chain::ErrorChain;
use tulle_core::identity::Identity;
use tulle_core::logging::Format;
use tulle_core::probes::OriginalProbe;

use crate::admin::{InvalidProbe, Probe};
use crate::api::destination::Suffixes;
use crate::config::{AccessLogDirections, InboundMode, LoadBalancing, MissingPolicyAction, ResendPolicy};
use crate::http::stack::access_log;
use crate::identity::anchors::TrustAnchorSource;
use crate::policy::endpoint::{FRAME_SIZES, MAX_WINDOW};
use crate::policy::server::DefaultPolicy;
use crate::tls::credentials::TrustAnchors;

/// The problem of a value, and the accepted values.
pub(super) type ParseError = String;

pub(super) fn from_str<T: FromStr<Err: ToString>>(value: &str) -> Result<T, ParseError> {
    value.trim().parse().map_err(|error: T::Err| error.to_string())
}

pub(super) fn text(value: &str) -> Result<String, ParseError> {
    Ok(value.to_owned())
}

pub(super) fn duration(value: &str) -> Result<Duration, ParseError> {
    tulle_core::duration::parse(value).map_err(|error| error.to_string())
}

pub(super) fn flag(value: &str) -> Result<bool, ParseError> {
    one_of(value, &[("true", true), ("false", false)])
}

pub(super) fn number<T: FromStr>(value: &str) -> Result<T, ParseError> {
    value
        .trim()
        .parse()
        .map_err(|_| "expected a number that is not negative, without sign or unit".to_owned())
}

/// The probes that the injector declares in JSON.
pub(super) fn probes(value: &str) -> Result<Vec<Probe>, ParseError> {
    let declared: Vec<OriginalProbe> = serde_json::from_str(value).map_err(|error| {
        format!(
            r#"expected probes such as [{{"container":"app","probe":"readiness","port":80,"timeoutSeconds":1,"tcpSocket":{{"port":80}}}}]: {error}"#
        )
    })?;
    let usable = declared.into_iter().map(Probe::try_from);
    usable
        .collect::<Result<_, InvalidProbe>>()
        .map_err(|error| error.to_string())
}

/// A flow-control window in bytes: RFC 9113 allows up to 2^31 - 1.
pub(super) fn window(value: &str) -> Result<u32, ParseError> {
    match number(value)? {
        size @ 1..=MAX_WINDOW => Ok(size),
        _ => Err(format!("expected a window of 1 to {MAX_WINDOW} bytes")),
    }
}

/// The largest frame that a peer may send, in bytes (RFC 9113 section 6.5.2).
pub(super) fn frame_size(value: &str) -> Result<u32, ParseError> {
    match number(value)? {
        size if FRAME_SIZES.contains(&size) => Ok(size),
        _ => Err("expected a frame size of 16384 to 16777215 bytes".to_owned()),
    }
}

pub(super) fn at_least_one(value: &str) -> Result<usize, ParseError> {
    match number(value)? {
        0 => Err("expected a number of at least 1".to_owned()),
        number => Ok(number),
    }
}

pub(super) fn ratio(value: &str) -> Result<f64, ParseError> {
    match value.trim().parse::<f64>() {
        Ok(ratio) if ratio > 0.0 && ratio <= 1.0 => Ok(ratio),
        _ => Err("expected a number above 0 and at most 1".to_owned()),
    }
}

pub(super) fn ratio_or_zero(value: &str) -> Result<f64, ParseError> {
    match value.trim().parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("expected a number from 0 to 1".to_owned()),
    }
}

/// One `name=value` on each line.
pub(super) fn attribute_lines(value: &str) -> Result<BTreeMap<String, String>, ParseError> {
    let lines = value.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.map(|line| attribute(line, '\n')).collect()
}

/// `name=value,name=value`, with `%2C` for a comma.
///
/// Source: `OTEL_RESOURCE_ATTRIBUTES` of OpenTelemetry, which is like W3C Baggage.
pub(super) fn attribute_list(value: &str) -> Result<BTreeMap<String, String>, ParseError> {
    let decode = |(name, value): (String, String)| {
        let mut bytes = Vec::with_capacity(value.len());
        let mut rest = value.as_bytes();
        while let Some((&byte, after)) = rest.split_first() {
            let escaped = (byte == b'%')
                .then(|| std::str::from_utf8(after.get(..2)?).ok())
                .flatten()
                // `from_str_radix` alone would also accept a sign.
                .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
                .and_then(|digits| u8::from_str_radix(digits, 16).ok());
            bytes.push(escaped.unwrap_or(byte));
            rest = if escaped.is_some() { &after[2..] } else { after };
        }
        (name, String::from_utf8_lossy(&bytes).into_owned())
    };
    comma_separated(value)
        .map(|pair| attribute(pair, ',').map(decode))
        .collect()
}

fn attribute(pair: &str, separator: char) -> Result<(String, String), ParseError> {
    match pair.split_once('=') {
        Some((name, value)) if !name.trim().is_empty() => Ok((name.trim().to_owned(), value.trim().to_owned())),
        _ => Err(format!(
            "expected <name>=<value> with {separator:?} between pairs, found {pair:?}"
        )),
    }
}

pub(super) fn jitter(value: &str) -> Result<f64, ParseError> {
    match value.trim().parse::<f64>() {
        Ok(jitter) if (0.0..=100.0).contains(&jitter) => Ok(jitter),
        _ => Err("expected a ratio from 0 to 100".to_owned()),
    }
}

pub(super) fn listen_addr(value: &str) -> Result<SocketAddr, ParseError> {
    value
        .trim()
        .parse()
        .map_err(|_| "expected <ip>:<port> or [<ipv6>]:<port>".to_owned())
}

pub(super) fn loopback_addr(value: &str) -> Result<SocketAddr, ParseError> {
    let addr = listen_addr(value)?;
    match addr.ip().to_canonical().is_loopback() {
        true => Ok(addr),
        false => Err(
            "expected a loopback address such as 127.0.0.1:15001, because every client of this port acts with this workload's identity".to_owned(),
        ),
    }
}

pub(super) fn listen_addrs(value: &str) -> Result<Vec<SocketAddr>, ParseError> {
    let addrs: Vec<_> = comma_separated(value).map(listen_addr).collect::<Result<_, _>>()?;
    match addrs.len() {
        1 | 2 => Ok(addrs),
        found => Err(format!("expected one or two addresses, found {found}")),
    }
}

pub(super) fn networks(value: &str) -> Result<Vec<IpNet>, ParseError> {
    tulle_core::networks::parse_networks(value).map_err(|error| error.to_string())
}

pub(super) fn ips(value: &str) -> Result<BTreeSet<IpAddr>, ParseError> {
    let parse = |part: &str| {
        part.parse()
            .map_err(|_| format!("expected a comma-separated list of IP addresses, found {part:?}"))
    };
    comma_separated(value).map(parse).collect()
}

pub(super) fn suffixes(value: &str) -> Result<Suffixes, ParseError> {
    from_str(value)
}

pub(super) fn default_policy(value: &str) -> Result<DefaultPolicy, ParseError> {
    one_of(value, &DefaultPolicy::ALL.map(|policy| (policy.as_str(), policy)))
}

pub(super) fn missing_policy_action(value: &str) -> Result<MissingPolicyAction, ParseError> {
    one_of(
        value,
        &[
            ("refuse", MissingPolicyAction::Refuse),
            ("default", MissingPolicyAction::Default),
        ],
    )
}

pub(super) fn balancing(value: &str) -> Result<LoadBalancing, ParseError> {
    one_of(
        value,
        &[
            ("peak-ewma", LoadBalancing::PeakEwma),
            ("round-robin", LoadBalancing::RoundRobin),
        ],
    )
}

pub(super) fn resend(value: &str) -> Result<ResendPolicy, ParseError> {
    one_of(
        value,
        &[
            ("never", ResendPolicy::Never),
            ("safe", ResendPolicy::SafeMethods),
            ("idempotent", ResendPolicy::IdempotentMethods),
        ],
    )
}

pub(super) fn inbound_mode(value: &str) -> Result<InboundMode, ParseError> {
    one_of(
        value,
        &[("redirect", InboundMode::Redirect), ("tproxy", InboundMode::Tproxy)],
    )
}

pub(super) fn log_format(value: &str) -> Result<Format, ParseError> {
    from_str(value)
}

pub(super) fn access_log(value: &str) -> Result<access_log::Format, ParseError> {
    let formats = [
        ("apache", access_log::Format::Apache),
        ("json", access_log::Format::Json),
    ];
    one_of(&value.to_ascii_lowercase(), &formats)
}

pub(super) fn identities(value: &str) -> Result<Vec<Identity>, ParseError> {
    value.split(',').map(from_str).collect()
}

pub(super) fn directions(value: &str) -> Result<AccessLogDirections, ParseError> {
    one_of(
        value,
        &[
            ("inbound", AccessLogDirections::Inbound),
            ("outbound", AccessLogDirections::Outbound),
            ("both", AccessLogDirections::Both),
        ],
    )
}

pub(super) fn unsafe_flag(value: &str) -> Result<(), ParseError> {
    one_of(value, &[("unsafe", ())])
}

/// PEM text, or else the path of a PEM file, which is watched for changes.
pub(super) fn trust_anchors(value: &str) -> Result<TrustAnchorSource, ParseError> {
    if !value.contains("-----BEGIN") {
        return match value.contains('\n') {
            true => Err("expected PEM CERTIFICATE blocks, or the path of a file of them".to_owned()),
            false => Ok(TrustAnchorSource::File(PathBuf::from(value.trim()))),
        };
    }
    let anchors = TrustAnchors::from_pem(value).map_err(|error| ErrorChain(&error).to_string())?;
    Ok(TrustAnchorSource::Fixed(anchors))
}

/// A Unix socket, as a `unix:` URI or as a path.
pub(super) fn unix_socket(value: &str) -> Result<PathBuf, ParseError> {
    let value = value.trim();
    let path = match value.strip_prefix("unix:") {
        Some(rest) => rest.strip_prefix("//").unwrap_or(rest),
        None => value,
    };
    match path.starts_with('/') {
        true => Ok(PathBuf::from(path)),
        false => Err("expected unix:///<absolute path of a socket>".to_owned()),
    }
}

fn one_of<T: Copy>(value: &str, accepted: &[(&str, T)]) -> Result<T, ParseError> {
    let found = accepted.iter().find(|(name, _)| *name == value);
    found.map(|(_, meaning)| *meaning).ok_or_else(|| {
        let names: Vec<_> = accepted.iter().map(|(name, _)| *name).collect();
        format!("expected {}", names.join(" or "))
    })
}

fn comma_separated(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim).filter(|part| !part.is_empty())
}
