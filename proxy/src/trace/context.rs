//! The trace context of a request, from the header `traceparent` or `grpc-trace-bin`, or from B3 headers.
//!
//! Clients choose the values of these headers, so invalid ones are ignored.

use base64::{
    Engine as _,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use http::{HeaderMap, HeaderName, HeaderValue};
use tulle_core::names::header::{B3_FLAGS, B3_PARENT, B3_SAMPLED, B3_SPAN, B3_TRACE, GRPC_TRACE, TRACEPARENT};

/// The ids of a trace and of its current span, and whether the trace is sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    pub(super) trace_id: [u8; 16],
    /// The id of the parent of the next span.
    pub(super) span_id: [u8; 8],
    pub(super) is_sampled: bool,
    format: PropagationFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PropagationFormat {
    W3c,
    Grpc,
    B3,
}

impl Context {
    /// The context in the headers, if there is a valid one.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let value = |name: &HeaderName| headers.get(name).map(HeaderValue::as_bytes);
        let mut parents = headers.get_all(&TRACEPARENT).iter();
        let parent = parents.next().filter(|_| parents.next().is_none()); // several values are ambiguous, so none is used
        parent
            .and_then(|parent| parse_w3c(parent.as_bytes()))
            .or_else(|| value(&GRPC_TRACE).and_then(parse_grpc))
            .or_else(|| {
                let sampled = value(&B3_SAMPLED).is_some_and(|value| matches!(value, b"1" | b"true"));
                let is_debug = value(&B3_FLAGS) == Some(b"1");
                parse_b3(value(&B3_TRACE)?, value(&B3_SPAN)?, sampled || is_debug)
            })
    }

    /// Whether B3 headers say that the request is not sampled. Only for requests without a trace context.
    pub(super) fn is_marked_unsampled(headers: &HeaderMap) -> bool {
        let sampled = headers.get(&B3_SAMPLED).map(HeaderValue::as_bytes);
        matches!(sampled, Some(b"0" | b"false"))
    }

    /// A new trace, which starts at this proxy.
    pub(super) fn new_trace(trace_id: [u8; 16], is_sampled: bool) -> Self {
        Self {
            trace_id,
            span_id: [0; 8],
            is_sampled,
            format: PropagationFormat::W3c,
        }
    }

    /// Writes the context with `span_id` as the parent of later spans, in the format from which this context was read.
    pub(super) fn write(&self, span_id: [u8; 8], headers: &mut HeaderMap) {
        let mut put = |name: HeaderName, text: String| {
            // Hexadecimal and base64 text is always a valid header value.
            if let Ok(value) = HeaderValue::try_from(text) {
                headers.insert(name, value);
            }
        };
        match self.format {
            PropagationFormat::W3c => {
                let flags = u8::from(self.is_sampled);
                put(
                    TRACEPARENT,
                    format!("00-{}-{}-{flags:02x}", hex(&self.trace_id), hex(&span_id)),
                );
            }
            PropagationFormat::Grpc => {
                let mut bytes = vec![0, 0];
                bytes.extend(self.trace_id);
                bytes.push(1);
                bytes.extend(span_id);
                bytes.extend([2, u8::from(self.is_sampled)]);
                put(GRPC_TRACE, BASE64.encode(bytes));
            }
            PropagationFormat::B3 => {
                put(B3_PARENT, hex(&self.span_id));
                put(B3_SPAN, hex(&span_id));
            }
        }
    }
}

/// Parses `traceparent`: `<version>-<trace>-<span>-<flags>`. A later version may have more fields.
///
/// Source: W3C Trace Context, section 3.2.
fn parse_w3c(text: &[u8]) -> Option<Context> {
    let (version, rest) = (text.get(..3)?, text.get(3..)?);
    let (head, more) = rest.split_at_checked(52)?;
    if version.iter().chain(head).any(u8::is_ascii_uppercase) {
        return None;
    }
    let is_known = version == b"00-" && more.is_empty();
    let is_later = version != b"00-" && (more.is_empty() || more.starts_with(b"-"));
    let [version] = decode_hex::<1>(version.strip_suffix(b"-")?)?;
    if version == 0xff || !(is_known || is_later) || head[32] != b'-' || head[49] != b'-' {
        return None;
    }
    let [flags] = decode_hex::<1>(&head[50..])?;
    Context {
        trace_id: decode_hex(&head[..32])?,
        span_id: decode_hex(&head[33..49])?,
        is_sampled: flags & 1 == 1,
        format: PropagationFormat::W3c,
    }
    .if_valid()
}

/// Parses `grpc-trace-bin`: a version, then fields in any order, each after its number. 0 is the trace, 1 the span, 2 the
/// flags.
fn parse_grpc(text: &[u8]) -> Option<Context> {
    let decoded = BASE64.decode(text).ok()?;
    let (&[0], mut rest) = decoded.split_first_chunk()? else {
        return None;
    };
    let mut context = Context {
        format: PropagationFormat::Grpc,
        ..Context::new_trace([0; 16], false)
    };
    while let Some((&field, remaining)) = rest.split_first() {
        rest = match field {
            0 => {
                let (trace, remaining) = remaining.split_first_chunk()?;
                context.trace_id = *trace;
                remaining
            }
            1 => {
                let (span, remaining) = remaining.split_first_chunk()?;
                context.span_id = *span;
                remaining
            }
            2 => {
                let (flags, remaining) = remaining.split_first()?;
                context.is_sampled = flags & 1 == 1;
                remaining
            }
            // An unknown field cannot be skipped, because its length is unknown.
            _ => break,
        };
    }
    context.if_valid()
}

/// Parses the ids of B3. A trace id of 8 bytes is the second half of an id of 16 bytes.
fn parse_b3(trace: &[u8], span: &[u8], is_sampled: bool) -> Option<Context> {
    let trace = match decode_hex::<8>(trace) {
        Some(half) => {
            let mut whole = [0; 16];
            whole[8..].copy_from_slice(&half);
            whole
        }
        None => decode_hex(trace)?,
    };
    Context {
        trace_id: trace,
        span_id: decode_hex(span)?,
        is_sampled,
        format: PropagationFormat::B3,
    }
    .if_valid()
}

impl Context {
    /// Returns `None` if an id is invalid, which means that it is zero.
    fn if_valid(self) -> Option<Self> {
        (self.trace_id != [0; 16] && self.span_id != [0; 8]).then_some(self)
    }
}

/// Decodes exactly `N` bytes, two hexadecimal digits each.
fn decode_hex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    if text.len() != 2 * N {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The encoding of gRPC metadata, with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The names of the headers of each format.
#[cfg(any(test, fuzzing))]
pub(crate) fn format_headers() -> [Vec<HeaderName>; 3] {
    [vec![TRACEPARENT], vec![GRPC_TRACE], vec![B3_TRACE, B3_SPAN]]
}

/// Checks that a context stays the same if it is read, written, and read again.
#[cfg(any(test, fuzzing))]
pub(crate) fn check_round_trip(mut headers: HeaderMap) {
    if let Some(context) = Context::from_headers(&headers) {
        context.write([9; 8], &mut headers);
        let expected = Context {
            span_id: [9; 8],
            ..context
        };
        assert_eq!(Context::from_headers(&headers), Some(expected));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let line = |(name, value): &(&'static str, &str)| (HeaderName::from_static(name), value.parse().unwrap());
        let mut headers = HeaderMap::new();
        for (name, value) in lines.iter().map(line) {
            headers.append(name, value);
        }
        headers
    }

    /// The ids of trace and span, and whether the trace is sampled.
    fn parsed(lines: &[(&'static str, &str)]) -> Option<(String, String, bool)> {
        let context = Context::from_headers(&headers(lines))?;
        Some((hex(&context.trace_id), hex(&context.span_id), context.is_sampled))
    }

    #[test]
    fn traceparents_are_read_as_the_standard_says() {
        let sampled = Some((TRACE.to_owned(), SPAN.to_owned(), true));
        let unsampled = Some((TRACE.to_owned(), SPAN.to_owned(), false));
        let long = format!("{TRACE}-{SPAN}");
        for (value, expected) in [
            (format!("00-{long}-01"), sampled.clone()),
            (format!("00-{long}-03"), sampled.clone()),
            (format!("00-{long}-00"), unsampled),
            (format!("01-{long}-01"), sampled.clone()),
            (format!("cc-{long}-01-what-comes-then"), sampled),
            (format!("cc-{long}-01.what-comes-then"), None),
            (format!("ff-{long}-01"), None),
            (format!("FF-{long}-01"), None),
            (format!("0A-{long}-01"), None),
            (format!("00-{}-{SPAN}-01", TRACE.to_uppercase()), None),
            (format!("00-{TRACE}-{}-01", SPAN.to_uppercase()), None),
            (format!("00-{long}-0A"), None),
            (format!("00-{long}-01-more"), None),
            (format!("00-{long}-1"), None),
            (format!("00-{long}-0g"), None),
            (format!("00-{long}"), None),
            (format!("00_{long}-01"), None),
            (format!("00-{}-{SPAN}-01", "0".repeat(32)), None),
            (format!("00-{TRACE}-{}-01", "0".repeat(16)), None),
            (format!("00-{SPAN}-{TRACE}-01"), None),
            (String::new(), None),
        ] {
            assert_eq!(parsed(&[("traceparent", &value)]), expected, "{value:?}");
        }
    }

    #[test]
    fn several_traceparents_are_ignored() {
        let parent = format!("00-{TRACE}-{SPAN}-01");
        let header = ("traceparent", parent.as_str());
        assert!(parsed(&[header]).is_some());
        assert_eq!(parsed(&[header, header]), None);
    }

    #[test]
    fn b3_is_read_with_ids_of_either_length() {
        let half = &TRACE[16..];
        for (lines, expected) in [
            (
                vec![("x-b3-traceid", TRACE), ("x-b3-spanid", SPAN)],
                Some((TRACE.to_owned(), false)),
            ),
            (
                vec![("x-b3-traceid", half), ("x-b3-spanid", SPAN), ("x-b3-sampled", "1")],
                Some((format!("{:0>32}", half), true)),
            ),
            (
                vec![("x-b3-traceid", TRACE), ("x-b3-spanid", SPAN), ("x-b3-flags", "1")],
                Some((TRACE.to_owned(), true)),
            ),
            (vec![("x-b3-traceid", TRACE)], None),
            (vec![("x-b3-traceid", &TRACE[1..]), ("x-b3-spanid", SPAN)], None),
        ] {
            let found = parsed(&lines).map(|(trace, _, sampled)| (trace, sampled));
            assert_eq!(found, expected, "{lines:?}");
        }
    }

    #[test]
    fn metadata_of_grpc_is_read_with_and_without_padding() {
        let mut bytes = vec![0, 0];
        bytes.extend(decode_hex::<16>(TRACE.as_bytes()).unwrap());
        bytes.push(1);
        bytes.extend(decode_hex::<8>(SPAN.as_bytes()).unwrap());
        bytes.extend([2, 1]);
        let (whole, known) = (BASE64.encode(&bytes), Some((TRACE.to_owned(), SPAN.to_owned(), true)));
        assert_eq!(parsed(&[("grpc-trace-bin", &whole)]), known);
        assert_eq!(parsed(&[("grpc-trace-bin", whole.trim_end_matches('='))]), known);
        for end in 0..bytes.len() - 2 {
            assert_eq!(
                parsed(&[("grpc-trace-bin", &BASE64.encode(&bytes[..end]))]),
                None,
                "{end}"
            );
        }
        bytes[0] = 1;
        assert_eq!(parsed(&[("grpc-trace-bin", &BASE64.encode(&bytes))]), None);
        assert_eq!(parsed(&[("grpc-trace-bin", "*")]), None);
    }

    #[test]
    fn a_written_context_is_read_back_in_the_same_format() {
        let mut grpc = vec![0, 0];
        grpc.extend([7; 16]);
        grpc.extend([1, 8, 8, 8, 8, 8, 8, 8, 8, 2, 1]);
        let traceparent = format!("00-{TRACE}-{SPAN}-01");
        for lines in [
            vec![("traceparent", traceparent.as_str()), ("tracestate", "a=b")],
            vec![("grpc-trace-bin", &BASE64.encode(&grpc))],
            vec![("x-b3-traceid", TRACE), ("x-b3-spanid", SPAN), ("x-b3-sampled", "1")],
        ] {
            let mut headers = headers(&lines);
            check_round_trip(headers.clone());
            let context = Context::from_headers(&headers).unwrap();
            context.write([9; 8], &mut headers);
            assert_eq!(headers.contains_key("traceparent"), lines[0].0 == "traceparent");
            assert_eq!(headers.contains_key("tracestate"), lines[0].0 == "traceparent");
        }
    }
}
