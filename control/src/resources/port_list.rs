//! Lists of ports in annotations: numbers, ranges, and names of ports that a workload or a Service declares.
//!
//! The injector, the destination service and the policy service all use this parser, so that they give the same result.

use std::fmt;
use std::ops::RangeInclusive;

use tulle_core::names::annotation;
use tulle_core::ports::PortSet;

use crate::resources::meta::Meta;

/// The entries of a comma-separated list. Whitespace around entries and empty entries are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortList {
    entries: Vec<PortListEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum PortListEntry {
    Range(RangeInclusive<u16>),
    Name(String),
    Malformed(String),
}

/// The ports of a list, resolved for one workload or Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedPorts {
    /// In the order of the list.
    pub(crate) ranges: Vec<RangeInclusive<u16>>,
    /// Entries that are neither a port, nor a range, nor the name of a declared port.
    pub unknown: Vec<String>,
}

impl PortList {
    /// Parses a list. Invalid entries are kept for [`PortList::malformed`] and [`ResolvedPorts::unknown`].
    pub fn parse(text: &str) -> Self {
        let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        Self {
            entries: entries.map(PortListEntry::parse).collect(),
        }
    }

    /// Returns the entries that are invalid for every workload, for callers that do not know the declared ports.
    pub fn malformed(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().filter_map(|entry| match entry {
            PortListEntry::Malformed(text) => Some(text.as_str()),
            PortListEntry::Range(_) | PortListEntry::Name(_) => None,
        })
    }

    /// Replaces each name by the ports that `declared` returns for it.
    pub fn resolve(&self, declared: impl Fn(&str) -> Vec<u16>) -> ResolvedPorts {
        let mut resolved = ResolvedPorts::default();
        for entry in &self.entries {
            match entry {
                PortListEntry::Range(range) => resolved.ranges.push(range.clone()),
                PortListEntry::Malformed(text) => resolved.unknown.push(text.clone()),
                PortListEntry::Name(name) => {
                    let ports = declared(name);
                    if ports.is_empty() {
                        resolved.unknown.push(name.clone());
                    }
                    resolved.ranges.extend(ports.into_iter().map(|port| port..=port));
                }
            }
        }
        resolved
    }
}

impl PortListEntry {
    fn parse(text: &str) -> Self {
        if let Ok(ports) = text.parse::<PortSet>()
            && let Some(range) = ports.ranges().next()
        {
            return Self::Range(range);
        }
        if is_port_name(text) {
            Self::Name(text.to_owned())
        } else {
            Self::Malformed(text.to_owned())
        }
    }
}

impl ResolvedPorts {
    /// Returns whether the list has entries, but none that is valid. The default applies instead of such a list; an empty
    /// list stands for no ports.
    pub fn has_only_invalid_entries(&self) -> bool {
        self.ranges.is_empty() && !self.unknown.is_empty()
    }

    pub fn to_set(&self) -> PortSet {
        let mut ports = PortSet::default();
        for range in &self.ranges {
            ports.insert_range(range.clone());
        }
        ports
    }
}

/// Formats a comma-separated list of numbers and ranges, without the unknown entries.
impl fmt::Display for ResolvedPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, range) in self.ranges.iter().enumerate() {
            let comma = if n == 0 { "" } else { "," };
            if range.start() == range.end() {
                write!(f, "{comma}{}", range.start())?;
            } else {
                write!(f, "{comma}{}-{}", range.start(), range.end())?;
            }
        }
        Ok(())
    }
}

/// Returns whether a port of an object is opaque. `declared` resolves port names in the object's annotation.
pub fn is_marked_opaque(meta: &Meta, port: u16, default: &PortSet, declared: impl Fn(&str) -> Vec<u16>) -> bool {
    let annotated = meta.annotation(annotation::OPAQUE_PORTS);
    contains_or_default(
        annotated.map(|text| PortList::parse(text).resolve(declared)),
        default,
        port,
    )
}

/// Returns whether an annotation contains the port. Without the annotation, or if none of its entries is valid, the default
/// applies, as for the injector.
pub fn contains_or_default(annotated: Option<ResolvedPorts>, default: &PortSet, port: u16) -> bool {
    match annotated {
        Some(ports) if !ports.has_only_invalid_entries() => ports.to_set().contains(port),
        _ => default.contains(port),
    }
}

/// Returns whether the API server accepts a port name: a DNS label, as for Services. Valid names of container ports are
/// a subset. The name needs a letter, to be distinct from a number.
fn is_port_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let is_inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    bytes.len() <= 63
        && bytes.iter().all(is_inner)
        && bytes.iter().any(u8::is_ascii_lowercase)
        && bytes.first() != Some(&b'-')
        && bytes.last() != Some(&b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(name: &str) -> Vec<u16> {
        match name {
            "http" => vec![8080],
            "twice" => vec![1, 2],
            _ => Vec::new(),
        }
    }

    #[test]
    fn entries_are_ports_ranges_and_declared_names() {
        let check = |text: &str, expected: &str, unknown: &[&str]| {
            let resolved = PortList::parse(text).resolve(declared);
            assert_eq!(resolved.to_string(), expected, "{text:?}");
            assert_eq!(resolved.unknown, unknown, "{text:?}");
            let only_invalid = expected.is_empty() && !unknown.is_empty();
            assert_eq!(resolved.has_only_invalid_entries(), only_invalid, "{text:?}");
        };
        check("", "", &[]);
        check(" , ,", "", &[]);
        check("9000,", "9000", &[]);
        check(",9000", "9000", &[]);
        check("80,,90", "80,90", &[]);
        check(" 90 - 100 ,http, 80 ", "90-100,8080,80", &[]);
        check("twice", "1,2", &[]);
        check("http,9000", "8080,9000", &[]);
        check("grpc,9000", "9000", &["grpc"]);
        check(
            "0,65536,9-8,Http,a_b,-1,80;90,1-2-3,a b",
            "",
            &["0", "65536", "9-8", "Http", "a_b", "-1", "80;90", "1-2-3", "a b"],
        );
        check("65535,1-65535", "65535,1-65535", &[]);
    }

    #[test]
    fn entries_that_no_workload_can_declare_are_malformed() {
        let malformed = |text: &str| {
            let list = PortList::parse(text);
            list.malformed().map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(malformed("http,80,90-100,,").is_empty());
        assert_eq!(malformed("http,80/tcp,99999"), ["80/tcp", "99999"]);
    }

    #[test]
    fn a_set_has_all_ports_of_the_list() {
        let ports = PortList::parse("90-100,http,80").resolve(declared).to_set();
        assert_eq!(ports.to_string(), "80,90-100,8080");
    }
}
