//! The paths of HTTP probes, as the kubelet sends them.
//!
//! The kubelet reads the path of a probe as a URL of Go's, and writes the URL with the address of the pod.
//! Source: `formatURL` in `k8s.io/kubernetes/pkg/probe/http`, and Go's `net/url`.

/// The path of the request that the kubelet sends for `httpGet.path`, without its query; none if it can send none.
pub(super) fn path(text: &str) -> Option<String> {
    let path = match parse(text) {
        Parsed::Path(raw) => encode(raw),
        // What is no URL is sent as one path.
        Parsed::Invalid => escape(text.as_bytes()),
        Parsed::Opaque => return None,
    };
    Some(if path.starts_with('/') {
        path
    } else {
        format!("/{path}")
    })
}

enum Parsed<'a> {
    Path(&'a str),
    /// A scheme and no path: a URL without a host results.
    Opaque,
    Invalid,
}

fn parse(text: &str) -> Parsed<'_> {
    if text.bytes().any(|byte| byte.is_ascii_control()) {
        return Parsed::Invalid;
    }
    let (rest, fragment) = text.split_once('#').unwrap_or((text, ""));
    if unescape(fragment).is_none() {
        return Parsed::Invalid;
    }
    let (has_scheme, rest) = match scheme_len(rest) {
        Ok(0) => (false, rest),
        Ok(len) => (true, &rest[len + 1..]),
        Err(()) => return Parsed::Invalid,
    };
    let rest = rest.split_once('?').map_or(rest, |(path, _)| path);
    if !rest.starts_with('/') {
        if has_scheme {
            return Parsed::Opaque;
        }
        let first_segment = rest.split('/').next().unwrap_or_default();
        if first_segment.contains(':') {
            return Parsed::Invalid;
        }
    }
    // The address of the pod takes the place of a host.
    let path = match rest.strip_prefix("//") {
        Some(after) if has_scheme || !after.starts_with('/') => {
            after.find('/').and_then(|at| after.get(at..)).unwrap_or_default()
        }
        _ => rest,
    };
    match unescape(path) {
        Some(_) => Parsed::Path(path),
        None => Parsed::Invalid,
    }
}

/// The length of the scheme before a colon, 0 without one; a colon at the start is an error.
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

/// A path stays as it was written where that is a valid encoding, and is encoded anew where it is not.
fn encode(raw: &str) -> String {
    let is_valid = |byte: u8| is_plain(byte) || b"!'()*[]%".contains(&byte);
    if raw.bytes().all(is_valid) {
        return raw.to_owned();
    }
    escape(&unescape(raw).unwrap_or_default())
}

fn escape(path: &[u8]) -> String {
    let mut escaped = String::new();
    for byte in path {
        if is_plain(*byte) {
            escaped.push(char::from(*byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

/// None where a percent sign is not followed by two hexadecimal digits.
fn unescape(text: &str) -> Option<Vec<u8>> {
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

/// Bytes of a path that are never escaped.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_sent_as_the_kubelet_sends_them() {
        let check = |text: &str, expected: Option<&str>| assert_eq!(path(text).as_deref(), expected, "{text:?}");
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
        // Percent signs that escape nothing are escaped, and so is the query.
        check("/100%", Some("/100%25"));
        check("100%?a", Some("/100%25%3Fa"));
        check("/a\tb?c", Some("/a%09b%3Fc"));
        // A host of its own is replaced by the pod's.
        check("http://localhost:8080/up?x", Some("/up"));
        check("//localhost/up", Some("/up"));
        check("///up", Some("///up"));
        check("http://localhost", Some("/"));
        check("1a:b", Some("/1a:b"));
        check(":b", Some("/:b"));
        check("up:8080/x", None);
    }
}
