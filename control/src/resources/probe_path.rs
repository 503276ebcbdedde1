//! Paths of HTTP probes, as the kubelet sends them.
//!
//! The kubelet parses the path of a probe as a Go URL, and adds the address of the pod.
//! Source: `formatURL` in `k8s.io/kubernetes/pkg/probe/http`, and Go's `net/url`.

/// Returns the path that the kubelet requests for `httpGet.path`, without the query. `None` if it cannot send a
/// request.
pub(super) fn kubelet_request_path(text: &str) -> Option<String> {
    let path = match parse_url(text) {
        ParsedUrl::Path(raw) => encode(raw),
        // The kubelet sends an invalid URL as one escaped path.
        ParsedUrl::Invalid => percent_encode(text.as_bytes()),
        ParsedUrl::OpaqueUrl => return None,
    };
    Some(if path.starts_with('/') {
        path
    } else {
        format!("/{path}")
    })
}

enum ParsedUrl<'a> {
    Path(&'a str),
    /// A scheme that no `/` follows, such as `mailto:a` (Go's `URL.Opaque`). The kubelet cannot request it.
    OpaqueUrl,
    Invalid,
}

fn parse_url(text: &str) -> ParsedUrl<'_> {
    if text.bytes().any(|byte| byte.is_ascii_control()) {
        return ParsedUrl::Invalid;
    }
    let (rest, fragment) = text.split_once('#').unwrap_or((text, ""));
    if percent_decode(fragment).is_none() {
        return ParsedUrl::Invalid;
    }
    let (has_scheme, rest) = match scheme_len(rest) {
        Ok(0) => (false, rest),
        Ok(len) => (true, &rest[len + 1..]),
        Err(()) => return ParsedUrl::Invalid,
    };
    let rest = rest.split_once('?').map_or(rest, |(path, _)| path);
    if !rest.starts_with('/') {
        if has_scheme {
            return ParsedUrl::OpaqueUrl;
        }
        let first_segment = rest.split('/').next().unwrap_or_default();
        if first_segment.contains(':') {
            return ParsedUrl::Invalid;
        }
    }
    // The address of the pod replaces the host.
    let path = match rest.strip_prefix("//") {
        Some(after) if has_scheme || !after.starts_with('/') => {
            after.find('/').and_then(|at| after.get(at..)).unwrap_or_default()
        }
        _ => rest,
    };
    match percent_decode(path) {
        Some(_) => ParsedUrl::Path(path),
        None => ParsedUrl::Invalid,
    }
}

/// Returns the length of the scheme before a colon, or 0 without a scheme. A leading colon is an error.
fn scheme_len(text: &str) -> Result<usize, ()> {
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' => {}
            b'0'..=b'9' | b'+' | b'-' | b'.' if at > 0 => {}
            b':' if at == 0 => return Err(()),
            b':' => return Ok(at),
            _ => return Ok(0),
        }
    }
    Ok(0)
}

/// Returns the path unchanged if it has only valid characters. Otherwise decodes it, and encodes it again.
fn encode(raw: &str) -> String {
    let is_valid = |byte: u8| is_never_escaped(byte) || b"!'()*[]%".contains(&byte);
    if raw.bytes().all(is_valid) {
        return raw.to_owned();
    }
    percent_encode(&percent_decode(raw).unwrap_or_default())
}

fn percent_encode(path: &[u8]) -> String {
    let mut escaped = String::new();
    for byte in path {
        if is_never_escaped(*byte) {
            escaped.push(char::from(*byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

/// Returns `None` if two hexadecimal digits do not follow a percent sign.
fn percent_decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        if *byte != b'%' {
            bytes.push(*byte);
            rest = after;
            continue;
        }
        let digits = std::str::from_utf8(after.get(..2)?).ok()?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = after.get(2..)?;
    }
    Some(bytes)
}

/// Returns whether a byte is never escaped in a path.
fn is_never_escaped(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_sent_as_the_kubelet_sends_them() {
        let check = |text: &str, expected: Option<&str>| {
            assert_eq!(kubelet_request_path(text).as_deref(), expected, "{text:?}")
        };
        check("", Some("/"));
        check("/", Some("/"));
        check("/healthz", Some("/healthz"));
        check("healthz", Some("/healthz"));
        check("healthz/", Some("/healthz/"));
        check("healthz?full=1", Some("/healthz"));
        check("?full=1", Some("/"));
        check("/live#now", Some("/live"));
        check("/a b", Some("/a%20b"));
        check("/a%20b", Some("/a%20b"));
        check("/a%2Fb", Some("/a%2Fb"));
        check("/a%2fb c", Some("/a/b%20c"));
        check("/caf\u{e9}", Some("/caf%C3%A9"));
        check("/a!b(c)", Some("/a!b(c)"));
        check("/a\"b", Some("/a%22b"));
        // Invalid percent escapes are escaped, and so is the query.
        check("/100%", Some("/100%25"));
        check("100%?a", Some("/100%25%3Fa"));
        check("/a\tb?c", Some("/a%09b%3Fc"));
        // A host is replaced by that of the pod.
        check("http://localhost:8080/up?x", Some("/up"));
        check("//localhost/up", Some("/up"));
        check("///up", Some("///up"));
        check("http://localhost", Some("/"));
        check("1a:b", Some("/1a:b"));
        check(":b", Some("/:b"));
        check("up:8080/x", None);
    }
}
