//! The normal form of a path, by which rules that differ by path judge requests.
//!
//! Applications normalise paths in different ways. A path that some of them would take for another one is ambiguous, and is
//! judged by no rule: one that has an encoded slash or backslash, a backslash, a semicolon, a dot segment (encoded or not),
//! repeated slashes, a percent sign that encodes nothing, or no slash at its beginning. In all other paths, characters that a
//! path may contain as they are stand for themselves, whether they are encoded or not, and all others are encoded. A request
//! goes on with the path that it came with.

use std::borrow::Cow;

use crate::policy::matches::nibble;

/// The normal form of a path; nothing if it is ambiguous.
pub(crate) fn normal(path: &str) -> Option<Cow<'_, str>> {
    let has_bare_percent = path.split('%').skip(1).any(|after| escaped(after.as_bytes()).is_none());
    if has_bare_percent {
        return None;
    }
    let normal = decode(path);
    let Some(segments) = normal.strip_prefix('/') else {
        // `OPTIONS *` and CONNECT have no path at all. Others of HTTP/2 may get their slash on the way.
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

/// Decodes characters that a path may contain as they are, and encodes all others, with capital digits.
///
/// Backslashes and semicolons stay as they are, because they make a path ambiguous.
pub(crate) fn decode(path: &str) -> Cow<'_, str> {
    if path.bytes().all(|byte| byte != b'%' && stays(byte)) {
        return Cow::Borrowed(path);
    }
    let mut normal = String::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        let encoded = (*byte == b'%').then(|| escaped(after)).flatten();
        let byte = match encoded {
            Some(byte) => {
                rest = &after[2..];
                byte
            }
            None => *byte,
        };
        let is_itself = match encoded {
            Some(byte) => is_plain(byte),
            None => stays(byte),
        };
        if is_itself {
            normal.push(char::from(byte));
        } else {
            normal.push_str(&format!("%{byte:02X}"));
        }
    }
    Cow::Owned(normal)
}

/// The bytes of `path` that the first `length` bytes of its normal form stand for.
pub(crate) fn original_len(path: &str, length: usize) -> usize {
    let mut original = 0;
    let mut normal = 0;
    while normal < length && original < path.len() {
        let (step, becomes) = match path.as_bytes()[original] {
            b'%' if escaped(&path.as_bytes()[original + 1..]).is_some_and(is_plain) => (3, 1),
            byte if stays(byte) => (1, 1),
            _ => (1, 3),
        };
        original += step;
        normal += becomes;
    }
    original
}

fn is_ambiguous(segment: &str) -> bool {
    matches!(segment, "." | "..") || segment.contains(['\\', ';']) || segment.contains("%2F") || segment.contains("%5C")
}

/// The byte that two digits at the beginning stand for.
fn escaped(text: &[u8]) -> Option<u8> {
    let [high, low] = text.first_chunk::<2>()?;
    Some(nibble(*high)? << 4 | nibble(*low)?)
}

/// Whether a path may contain this character as it is (RFC 3986, section 3.3), and nobody takes it for more than itself.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,=:@".contains(&byte)
}

/// Whether a character that is not encoded is left so.
fn stays(byte: u8) -> bool {
    is_plain(byte) || b"/%\\;".contains(&byte)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_character_is_the_same_raw_and_encoded() {
        for (raw, encoded) in [
            ("/café", "/caf%C3%A9"),
            ("/a|b", "/a%7Cb"),
            ("/{x}", "/%7bx%7D"),
            ("/a", "/%61"),
        ] {
            assert_eq!(normal(raw), normal(encoded), "{raw}");
        }
        // The part of a path that a prefix stands for.
        assert_eq!(original_len("/café/x", "/caf%C3%A9".len()), "/café".len());
        assert_eq!(original_len("/caf%c3%a9/x", "/caf%C3%A9".len()), "/caf%c3%a9".len());
    }

    #[test]
    fn a_path_that_applications_could_take_for_another_is_ambiguous() {
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
            assert_eq!(normal(path), None, "{path}");
        }
    }

    #[test]
    fn other_paths_are_judged_by_their_normal_form() {
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
            assert_eq!(normal(path).as_deref(), Some(expected), "{path}");
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
        fn a_normal_form_is_its_own(path in "/[%/.;a-f0-9\\\\é]{0,20}") {
            if let Some(once) = normal(&path) {
                let twice = normal(&once).map(Cow::into_owned);
                prop_assert_eq!(twice.as_deref(), Some(&*once));
                prop_assert!(path.is_char_boundary(original_len(&path, once.len())));
            }
        }
    }
}
