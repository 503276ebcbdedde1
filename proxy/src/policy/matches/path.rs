//! The normal form of request paths. If rules of an inbound policy or of an EgressNetwork depend on the path, the normal form is
//! compared with the rules. The request is forwarded with its original path.
//!
//! Applications normalize paths in different ways. A path is ambiguous if applications could interpret it differently. It has no
//! normal form: if user-defined rules depend on the path, the request is refused, otherwise its original path is compared. A path
//! is ambiguous if it has an encoded slash or backslash, a backslash, a semicolon, a dot segment (encoded or not), repeated
//! slashes, a percent sign that starts no valid escape, or no leading slash.
//!
//! The normal form of any other path decodes each character that a path may contain unencoded, except `/` and `;`, and encodes each
//! other character.

use std::borrow::Cow;

/// The normal form of a path; `None` if the path is ambiguous.
pub(crate) fn normalize(path: &str) -> Option<Cow<'_, str>> {
    let has_bare_percent = path
        .split('%')
        .skip(1)
        .any(|after| percent_decoded_byte(after.as_bytes()).is_none());
    if has_bare_percent {
        return None;
    }
    let normal = normalize_escapes(path);
    let Some(segments) = normal.strip_prefix('/') else {
        // `OPTIONS *` and CONNECT have no path. Any other path without a leading slash is ambiguous: the application, or a
        // proxy before it, may add the slash.
        return matches!(path, "" | "*").then_some(normal);
    };
    let mut segments = segments.split('/').peekable();
    while let Some(segment) = segments.next() {
        let is_inner = segments.peek().is_some();
        if is_ambiguous(segment) || (is_inner && segment.is_empty()) {
            return None;
        }
    }
    Some(normal)
}

/// Decodes characters that a path may contain unencoded, except `/` and `;`, and encodes all others, with upper-case digits.
///
/// Backslashes, semicolons and bare percent signs stay as they are, because they make a path ambiguous.
pub(crate) fn normalize_escapes(path: &str) -> Cow<'_, str> {
    if path.bytes().all(|byte| byte != b'%' && stays_unencoded(byte)) {
        return Cow::Borrowed(path);
    }
    let mut normal = String::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        let decoded = (*byte == b'%').then(|| percent_decoded_byte(after)).flatten();
        let byte = match decoded {
            Some(byte) => {
                rest = &after[2..];
                byte
            }
            None => *byte,
        };
        let is_plain = match decoded {
            Some(byte) => is_unreserved_or_delim(byte),
            None => stays_unencoded(byte),
        };
        if is_plain {
            normal.push(char::from(byte));
        } else {
            normal.push_str(&format!("%{byte:02X}"));
        }
    }
    Cow::Owned(normal)
}

/// The number of bytes of `path` that correspond to the first `length` bytes of its normal form.
pub(crate) fn original_len(path: &str, length: usize) -> usize {
    let mut original = 0;
    let mut normal = 0;
    while normal < length && original < path.len() {
        let (step, normalized_step) = match path.as_bytes()[original] {
            b'%' if percent_decoded_byte(&path.as_bytes()[original + 1..]).is_some_and(is_unreserved_or_delim) => {
                (3, 1)
            }
            byte if stays_unencoded(byte) => (1, 1),
            _ => (1, 3),
        };
        original += step;
        normal += normalized_step;
    }
    original
}

fn is_ambiguous(segment: &str) -> bool {
    matches!(segment, "." | "..") || segment.contains(['\\', ';']) || segment.contains("%2F") || segment.contains("%5C")
}

/// The byte that the two leading hexadecimal digits encode.
fn percent_decoded_byte(text: &[u8]) -> Option<u8> {
    let [high, low] = text.first_chunk::<2>()?;
    Some(nibble(*high)? << 4 | nibble(*low)?)
}

pub(super) fn nibble(digit: u8) -> Option<u8> {
    // The value is at most 15, so the cast does not truncate it.
    char::from(digit).to_digit(16).map(|value| value as u8)
}

/// Whether a path may contain this character unencoded (RFC 3986, section 3.3), with no special meaning for any application.
fn is_unreserved_or_delim(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,=:@".contains(&byte)
}

/// Whether a character that is not encoded stays so in the normal form.
fn stays_unencoded(byte: u8) -> bool {
    is_unreserved_or_delim(byte) || b"/%\\;".contains(&byte)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn raw_and_encoded_characters_have_the_same_normal_form() {
        for (raw, encoded) in [
            ("/café", "/caf%C3%A9"),
            ("/a|b", "/a%7Cb"),
            ("/{x}", "/%7bx%7D"),
            ("/a", "/%61"),
        ] {
            assert_eq!(normalize(raw), normalize(encoded), "{raw}");
        }
        // The part of a path that corresponds to a prefix.
        assert_eq!(original_len("/café/x", "/caf%C3%A9".len()), "/café".len());
        assert_eq!(original_len("/caf%c3%a9/x", "/caf%C3%A9".len()), "/caf%c3%a9".len());
    }

    #[test]
    fn a_path_that_applications_could_interpret_differently_is_ambiguous() {
        for path in [
            "//admin",
            "/x//admin",
            "/admin//",
            "/./admin",
            "/x/../admin",
            "/x/..",
            "/x/.",
            "/x/%2e%2e/admin",
            "/x/%2E./admin",
            "/x/.%2e/admin",
            "/x%2fadmin",
            "/x%2Fadmin",
            "/admin%2f..",
            "/x%5cadmin",
            "/x%5C..%5Cadmin",
            "/x\\admin",
            "/x/..;/admin",
            "/admin;x=1",
            "/;/admin",
            "/a%2",
            "/a%zz",
            "/%",
            "/%%32e%%32e/admin",
            "admin",
            "../admin",
            "%2Fadmin",
        ] {
            assert_eq!(normalize(path), None, "{path}");
        }
    }

    #[test]
    fn unambiguous_paths_are_normalized() {
        for (path, expected) in [
            ("", ""),
            ("*", "*"),
            ("/", "/"),
            ("/admin", "/admin"),
            ("/admin/", "/admin/"),
            ("/%61dmin", "/admin"),
            ("/%61%64%6D%69%6e", "/admin"),
            ("/%40me", "/@me"),
            ("/a%20b", "/a%20b"),
            ("/caf%c3%a9", "/caf%C3%A9"),
            ("/file%2etxt", "/file.txt"),
            ("/...", "/..."),
            ("/.well-known/x", "/.well-known/x"),
            ("/%2561dmin", "/%2561dmin"),
        ] {
            assert_eq!(normalize(path).as_deref(), Some(expected), "{path}");
        }
    }

    #[test]
    fn a_prefix_of_the_normal_form_is_found_in_the_path() {
        for (path, length, expected) in [
            ("/%61dmin/x", 6, "/%61dmin"),
            ("/admin/x", 6, "/admin"),
            ("/a%20b/x", 6, "/a%20b"),
            ("/a", 0, ""),
            ("/a", 9, "/a"),
        ] {
            assert_eq!(&path[..original_len(path, length)], expected, "{path}");
        }
    }

    proptest! {
        #[test]
        fn normalization_is_idempotent(path in "/[%/.;a-f0-9\\\\é]{0,20}") {
            if let Some(once) = normalize(&path) {
                let twice = normalize(&once).map(Cow::into_owned);
                prop_assert_eq!(twice.as_deref(), Some(&*once));
                prop_assert!(path.is_char_boundary(original_len(&path, once.len())));
            }
        }
    }
}
