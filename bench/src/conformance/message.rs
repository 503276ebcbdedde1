//! A simple parser of HTTP/1 messages. Only CRLF ends a line; header lines are not validated.

/// A message. `lines` has its header lines and its trailer lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) first_line: String,
    /// Names in lower case.
    pub(super) lines: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
    /// Whether the message is complete.
    pub(super) is_complete: bool,
}

/// Whether more bytes can follow those in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamEnd {
    /// More bytes can follow.
    Unknown,
    /// The connection has ended.
    Eof,
}

impl Message {
    /// A message from bytes that cannot be parsed completely.
    pub(super) fn unparsed(bytes: &[u8]) -> Self {
        let (first_line, lines) = parse_head(bytes);
        Self {
            first_line,
            lines,
            ..Self::default()
        }
    }

    pub(super) fn status(&self) -> u16 {
        let status = self.first_line.split(' ').nth(1);
        status.and_then(|status| status.parse().ok()).unwrap_or_default()
    }

    pub(super) fn field_value(&self, name: &str) -> Option<&str> {
        let line = self.lines.iter().find(|(known, _)| known == name);
        line.map(|(_, value)| value.as_str())
    }

    /// Returns the first condition of `wanted` that the message does not satisfy. `Request::lines` documents the conditions.
    pub(super) fn first_unmet_condition<'a>(&self, wanted: &[&'a str]) -> Option<&'a str> {
        wanted.iter().copied().find(|line| match line.strip_prefix('!') {
            Some(absent) => match absent.split_once(": ") {
                Some((name, value)) => self.lines.iter().any(|(n, v)| n == name && v == value),
                None => self.field_value(absent).is_some(),
            },
            None => {
                let (name, value) = line.split_once(": ").unwrap_or((line, ""));
                !self.lines.iter().any(|(n, v)| n == name && v == value)
            }
        })
    }
}

/// Parses the first message in `bytes`. Returns the message and its length.
///
/// Returns `None` if the head is incomplete, if content-length is not a number, or if the body is incomplete and more bytes can
/// follow.
pub(super) fn parse(bytes: &[u8], is_response_to_head: bool, end: StreamEnd) -> Option<(Message, usize)> {
    let head_end = bytes.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let (first_line, lines) = parse_head(&bytes[..head_end]);
    let mut message = Message {
        first_line,
        lines,
        ..Message::default()
    };
    let rest = &bytes[head_end..];
    let body = if is_response_to_head || has_no_body(&message) {
        Some(Body::default())
    } else if message.field_value("transfer-encoding").is_some() {
        parse_chunked_body(rest)
    } else if let Some(length) = message.field_value("content-length") {
        let length = length.parse().ok()?;
        rest.get(..length).map(unchunked_body)
    } else if message.first_line.starts_with("HTTP/") {
        (end == StreamEnd::Eof).then(|| unchunked_body(rest))
    } else {
        Some(Body::default())
    };
    match body {
        Some(body) => {
            message.body = body.data;
            message.lines.extend(body.trailers);
            message.is_complete = true;
            Some((message, head_end + body.len))
        }
        None if end == StreamEnd::Eof => {
            message.body = rest.to_vec();
            Some((message, bytes.len()))
        }
        None => None,
    }
}

fn has_no_body(message: &Message) -> bool {
    message.first_line.starts_with("HTTP/") && matches!(message.status(), 100..200 | 204 | 304)
}

fn parse_head(bytes: &[u8]) -> (String, Vec<(String, String)>) {
    let text = decode_latin1(bytes);
    let mut lines = text.trim_end_matches("\r\n").split("\r\n");
    let first = lines.next().unwrap_or_default().to_owned();
    (first, lines.map(parse_line).collect())
}

/// Decodes bytes as Latin-1.
fn decode_latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

fn parse_line(text: &str) -> (String, String) {
    let (name, value) = text.split_once(':').unwrap_or((text, ""));
    (name.to_ascii_lowercase(), value.trim_matches(' ').to_owned())
}

/// A complete body.
#[derive(Default)]
struct Body {
    data: Vec<u8>,
    trailers: Vec<(String, String)>,
    /// Length in the buffer, including framing.
    len: usize,
}

fn unchunked_body(bytes: &[u8]) -> Body {
    Body {
        data: bytes.to_vec(),
        trailers: Vec::new(),
        len: bytes.len(),
    }
}

fn parse_chunked_body(bytes: &[u8]) -> Option<Body> {
    let (mut data, mut at) = (Vec::new(), 0);
    loop {
        let rest = &bytes[at..];
        let line_end = rest.windows(2).position(|two| two == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line_end]).ok()?, 16).ok()?;
        at += line_end + 2;
        if size == 0 {
            break;
        }
        data.extend_from_slice(bytes.get(at..)?.get(..size)?);
        at += size;
        if bytes.get(at..at + 2)? != b"\r\n" {
            return None;
        }
        at += 2;
    }
    if bytes[at..].starts_with(b"\r\n") {
        return Some(Body {
            data,
            trailers: Vec::new(),
            len: at + 2,
        });
    }
    let length = bytes[at..].windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let text = decode_latin1(&bytes[at..at + length]);
    let trailers = text.trim_end_matches("\r\n").split("\r\n").map(parse_line).collect();
    Some(Body {
        data,
        trailers,
        len: at + length,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipelined_messages_are_parsed_in_turn() {
        let text = b"POST / HTTP/1.1\r\nHost: x\r\ncontent-length: 2\r\n\r\nhiGET / HTTP/1.1\r\n\r\n";
        let (first, used) = parse(text, false, StreamEnd::Unknown).unwrap();
        assert_eq!(
            (first.body.as_slice(), first.first_unmet_condition(&["host: x", "!a"])),
            (&b"hi"[..], None)
        );
        let (second, rest) = parse(&text[used..], false, StreamEnd::Unknown).unwrap();
        assert_eq!(
            (second.first_line.as_str(), used + rest),
            ("GET / HTTP/1.1", text.len())
        );
        assert!(parse(&text[..used - 1], false, StreamEnd::Unknown).is_none());
    }

    #[test]
    fn truncated_responses_are_not_complete() {
        for (text, is_complete) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", true),
            ("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", false),
            ("HTTP/1.1 200 OK\r\n\r\nok", true),
            ("HTTP/1.1 204 No Content\r\n\r\n", true),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
                true,
            ),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\na: b\r\n\r\n",
                true,
            ),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
                false,
            ),
        ] {
            assert_eq!(
                parse(text.as_bytes(), false, StreamEnd::Eof).unwrap().0.is_complete,
                is_complete,
                "{text}"
            );
        }
    }
}
