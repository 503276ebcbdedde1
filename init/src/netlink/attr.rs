//! Netlink attributes: type, length and payload, nested and padded to four bytes.

/// A buffer to which attributes are appended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attrs(Vec<u8>);

impl Attrs {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Starts with the header that routing messages have before their attributes.
    pub(crate) fn with_header(header: [u8; 8]) -> Self {
        Self(header.into())
    }

    pub(crate) fn bytes(mut self, kind: u16, payload: &[u8]) -> Self {
        // Lists are split into messages long before a payload exceeds its length field.
        let len = u16::try_from(payload.len() + HEADER_LEN).expect("attributes stay below 64 KiB");
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(payload);
        self.0.resize(self.0.len().next_multiple_of(NLA_ALIGNTO), 0);
        self
    }

    /// A NUL-terminated string.
    pub(crate) fn text(self, kind: u16, text: &str) -> Self {
        self.bytes(kind, &[text.as_bytes(), &[0]].concat())
    }

    /// nftables uses network byte order.
    pub(crate) fn be32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub(crate) fn be64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    pub(crate) fn nested(self, kind: u16, inner: &Self) -> Self {
        self.bytes(kind | NLA_F_NESTED, &inner.0)
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Parses attributes, without the flags of their types; stops at the first truncated one.
pub(crate) fn parse(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    raw(bytes).map(|(kind, payload)| (kind & NLA_TYPE_MASK, payload))
}

/// The first attribute of a type.
pub(crate) fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    parse(bytes)
        .find(|(found, _)| *found == kind)
        .map(|(_, payload)| payload)
}

/// A string attribute without its NUL byte.
pub(crate) fn find_text(bytes: &[u8], kind: u16) -> Option<&str> {
    let payload = find(bytes, kind)?;
    std::str::from_utf8(payload.strip_suffix(&[0]).unwrap_or(payload)).ok()
}

pub(crate) fn find_be32(bytes: &[u8], kind: u16) -> Option<u32> {
    Some(u32::from_be_bytes(find(bytes, kind)?.try_into().ok()?))
}

pub(crate) fn find_be16(bytes: &[u8], kind: u16) -> Option<u16> {
    Some(u16::from_be_bytes(find(bytes, kind)?.try_into().ok()?))
}

/// Whether the attributes that the kernel shows contain all wanted ones.
///
/// The kernel adds attributes (handles, defaults, counters) but never duplicates one. So each wanted type must occur
/// equally often, with the same payload; nested attributes are compared recursively.
pub(crate) fn covers(shown: &[u8], wanted: &[u8]) -> bool {
    raw(wanted).enumerate().all(|(at, (kind, payload))| {
        let plain = kind & NLA_TYPE_MASK;
        let n_earlier = parse(wanted).take(at).filter(|(other, _)| *other == plain).count();
        let n_wanted = parse(wanted).filter(|(other, _)| *other == plain).count();
        let mut shown_of_kind = parse(shown).filter(|(other, _)| *other == plain);
        let n_shown = parse(shown).filter(|(other, _)| *other == plain).count();
        let Some((_, shown_payload)) = shown_of_kind.nth(n_earlier) else {
            return false;
        };
        n_wanted == n_shown
            && if kind & NLA_F_NESTED != 0 {
                covers(shown_payload, payload)
            } else {
                shown_payload == payload
            }
    })
}

fn raw(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (head, _) = bytes.split_at_checked(HEADER_LEN)?;
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let kind = u16::from_ne_bytes([head[2], head[3]]);
        let payload = bytes.get(HEADER_LEN..len)?;
        bytes = bytes.get(len.next_multiple_of(NLA_ALIGNTO)..).unwrap_or_default();
        Some((kind, payload))
    })
}

const HEADER_LEN: usize = 4;
const NLA_ALIGNTO: usize = 4;
const NLA_F_NESTED: u16 = 0x8000;
const NLA_TYPE_MASK: u16 = 0x3fff;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn written_attributes_are_parsed() {
        let inner = Attrs::new().be32(1, 7);
        let attrs = Attrs::new().text(1, "abc").nested(2, &inner).be64(3, 9);
        let read: Vec<(u16, &[u8])> = parse(attrs.as_bytes()).collect();
        assert_eq!(
            read,
            [
                (1, &b"abc\0"[..]),
                (2, inner.as_bytes()),
                (3, &[0, 0, 0, 0, 0, 0, 0, 9])
            ]
        );
        assert_eq!(find_text(attrs.as_bytes(), 1), Some("abc"));
        assert_eq!(find_be32(inner.as_bytes(), 1), Some(7));
        assert_eq!(find(attrs.as_bytes(), 4), None);
    }

    #[test]
    fn attributes_added_by_the_kernel_are_ignored_and_differences_are_not() {
        let list = |values: &[u32]| values.iter().fold(Attrs::new(), |attrs, value| attrs.be32(1, *value));
        let wanted = Attrs::new().text(1, "a").nested(2, &list(&[1, 2]));
        let shown = |values: &[u32]| Attrs::new().be64(9, 1).text(1, "a").nested(2, &list(values).be32(8, 8));
        let covered = |attrs: Attrs| covers(attrs.as_bytes(), wanted.as_bytes());
        assert!(covered(shown(&[1, 2])));
        assert!(!covered(shown(&[2, 1])) && !covered(shown(&[1])) && !covered(shown(&[1, 2, 3])));
        assert!(!covered(Attrs::new().text(1, "b").nested(2, &list(&[1, 2]))));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>, wanted: Vec<u8>) {
            for (_, payload) in parse(&bytes) {
                prop_assert!(payload.len() <= bytes.len());
            }
            covers(&bytes, &wanted);
        }
    }
}
