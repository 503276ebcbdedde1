//! HTTP/1 messages as a plain reader sees them: one that takes nothing but what everybody agrees on.

/// A message with its trailers among its headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) first_line: String,
    /// Names in small letters.
    pub(super) lines: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
    /// Whether all of it has come.
    pub(super) is_whole: bool,
}

/// What is known of what follows the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// More may come.
    Unknown,
    /// Nothing does.
    Here,
    /// The message has a head only.
    AfterHead,
}

impl Message {
    /// What is not a whole message, nor will be.
    pub(super) fn unread(bytes: &[u8]) -> Self {
        let (first_line, lines) = head(bytes);
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

    pub(super) fn value(&self, name: &str) -> Option<&str> {
        let line = self.lines.iter().find(|(known, _)| known == name);
        line.map(|(_, value)| value.as_str())
    }

    /// What of `wanted`, as in the table, is not so.
    pub(super) fn lacks<'a>(&self, wanted: &[&'a str]) -> Option<&'a str> {
        wanted.iter().copied().find(|line| match line.strip_prefix('!') {
            Some(absent) => match absent.split_once(": ") {
                Some((name, value)) => self.lines.iter().any(|(n, v)| n == name && v == value),
                None => self.value(absent).is_some(),
            },
            None => {
                let (name, value) = line.split_once(": ").unwrap_or((line, ""));
                !self.lines.iter().any(|(n, v)| n == name && v == value)
            }
        })
    }
}

/// The first message in `bytes` and its length; `None` while it is not whole and more may come.
pub(super) fn read(bytes: &[u8], end: End) -> Option<(Message, usize)> {
    let head_end = bytes.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let (first_line, lines) = head(&bytes[..head_end]);
    let mut message = Message {
        first_line,
        lines,
        ..Message::default()
    };
    let rest = &bytes[head_end..];
    let body = if end == End::AfterHead || has_no_body(&message) {
        Some(Body::default())
    } else if message.value("transfer-encoding").is_some() {
        chunks(rest)
    } else if let Some(length) = message.value("content-length") {
        let length = length.parse().ok()?;
        rest.get(..length).map(plain)
    } else if message.first_line.starts_with("HTTP/") {
        (end == End::Here).then(|| plain(rest))
    } else {
        Some(Body::default())
    };
    match body {
        Some(body) => {
            message.body = body.data;
            message.lines.extend(body.trailers);
            message.is_whole = true;
            Some((message, head_end + body.len))
        }
        None if end == End::Here => {
            message.body = rest.to_vec();
            Some((message, bytes.len()))
        }
        None => None,
    }
}

fn has_no_body(message: &Message) -> bool {
    message.first_line.starts_with("HTTP/") && matches!(message.status(), 100..200 | 204 | 304)
}

fn head(bytes: &[u8]) -> (String, Vec<(String, String)>) {
    let text = text(bytes);
    let mut lines = text.trim_end_matches("\r\n").split("\r\n");
    let first = lines.next().unwrap_or_default().to_owned();
    (first, lines.map(line).collect())
}

/// Bytes as characters.
fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

fn line(text: &str) -> (String, String) {
    let (name, value) = text.split_once(':').unwrap_or((text, ""));
    (name.to_ascii_lowercase(), value.trim_matches(' ').to_owned())
}

/// A whole body.
#[derive(Default)]
struct Body {
    data: Vec<u8>,
    trailers: Vec<(String, String)>,
    /// Bytes that it takes.
    len: usize,
}

fn plain(bytes: &[u8]) -> Body {
    Body {
        data: bytes.to_vec(),
        trailers: Vec::new(),
        len: bytes.len(),
    }
}

fn chunks(bytes: &[u8]) -> Option<Body> {
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
    let text = text(&bytes[at..at + length]);
    let trailers = text.trim_end_matches("\r\n").split("\r\n").map(line).collect();
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
    fn messages_are_read_one_by_one() {
        let text = b"POST / HTTP/1.1\r\nHost: x\r\ncontent-length: 2\r\n\r\nhiGET / HTTP/1.1\r\n\r\n";
        let (first, used) = read(text, End::Unknown).unwrap();
        assert_eq!(
            (first.body.as_slice(), first.lacks(&["host: x", "!a"])),
            (&b"hi"[..], None)
        );
        let (second, rest) = read(&text[used..], End::Unknown).unwrap();
        assert_eq!(
            (second.first_line.as_str(), used + rest),
            ("GET / HTTP/1.1", text.len())
        );
        assert!(read(&text[..used - 1], End::Unknown).is_none());
    }

    #[test]
    fn a_cut_response_is_told_from_a_whole_one() {
        for (text, is_whole) in [
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
            assert_eq!(read(text.as_bytes(), End::Here).unwrap().0.is_whole, is_whole, "{text}");
        }
    }
}
