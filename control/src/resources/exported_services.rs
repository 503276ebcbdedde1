//! The Services that a gateway serves to other clusters.

use std::sync::Arc;

use crate::resources::labels::{Labels, Selector};

/// The Services that the proxy of a client may request by name. The injector writes the selector of a gateway into its
/// description of the client, which the proxy sends with each request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum ExportedServices {
    /// Also those that do not exist. This is what proxies that are not gateways need.
    #[default]
    All,
    Selected(Arc<Selector>),
    /// The client has sent an invalid selector, so nothing is known to be exported.
    None,
}

impl ExportedServices {
    /// Reads what a client has sent. Without a selector, all Services are exported.
    pub fn from_client(selector: &str) -> Self {
        if selector.trim().is_empty() {
            return Self::All;
        }
        parse(selector).map_or(Self::None, |selector| Self::Selected(Arc::new(selector)))
    }

    /// Whether a Service with these labels is exported. `None` means that it does not exist.
    pub fn contain(&self, labels: Option<&Labels>) -> bool {
        match self {
            Self::All => true,
            Self::Selected(selector) => labels.is_some_and(|labels| selector.matches(labels)),
            Self::None => false,
        }
    }
}

/// Parses the selector of a gateway. It has no character that JSON escapes, or that the kubelet expands in variables. The length is
/// limited because each stream of the gateway keeps the selector in memory.
pub fn parse(selector: &str) -> Option<Selector> {
    let is_permitted = |ch: char| ch.is_ascii_alphanumeric() || "-_./=!,() ".contains(ch);
    match selector.len() <= MAX_SELECTOR_BYTES && selector.chars().all(is_permitted) {
        true => selector.parse().ok(),
        false => None,
    }
}

const MAX_SELECTOR_BYTES: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_selector_exports_no_service() {
        let exports = |selector: &str, labels: Option<&[(&str, &str)]>| {
            let labels: Option<Labels> = labels.map(|pairs| pairs.iter().copied().collect());
            ExportedServices::from_client(selector).contain(labels.as_ref())
        };
        let marked = [("example.org/exported", "true")];
        // Whether a Service with the label, one without it, and one that does not exist are exported.
        for (selector, expected) in [
            ("", [true; 3]),
            (" ", [true; 3]),
            ("example.org/exported", [true, false, false]),
            ("example.org/exported in (true, yes)", [true, false, false]),
            ("!example.org/exported", [false, true, false]),
            ("a b", [false; 3]),
            ("!app=\"x\"", [false; 3]),
            ("app!=$(_pod_ns)", [false; 3]),
            (&*"!a".repeat(MAX_SELECTOR_BYTES), [false; 3]),
        ] {
            let found = [Some(&marked[..]), Some(&[][..]), None].map(|labels| exports(selector, labels));
            assert_eq!(found, expected, "{selector}");
        }
    }
}
