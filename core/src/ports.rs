//! Sets of TCP ports, written as `80,90-100`; empty list entries are ignored.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::addr::parse_port;

/// A set of ports, stored as sorted ranges that neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PortSet {
    ranges: Vec<(u16, u16)>,
}

/// The text is not a [`PortSet`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{part:?} is not a port or a range of ports; expected a comma-separated list of ports from 1 to 65535, \
     such as 80,90-100"
)]
pub struct ParsePortsError {
    part: String,
}

impl PortSet {
    pub fn contains(&self, port: u16) -> bool {
        let after = self.ranges.partition_point(|(_, last)| *last < port);
        self.ranges.get(after).is_some_and(|(first, _)| *first <= port)
    }

    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The ranges in ascending order.
    pub fn ranges(&self) -> impl Iterator<Item = RangeInclusive<u16>> + '_ {
        self.ranges.iter().map(|(first, last)| *first..=*last)
    }

    pub fn insert(&mut self, port: u16) {
        self.insert_range(port..=port);
    }

    /// Adds all ports of a range; an empty range adds none.
    pub fn insert_range(&mut self, range: RangeInclusive<u16>) {
        if range.is_empty() {
            return;
        }
        let (mut first, mut last) = range.into_inner();
        // Ranges that overlap or touch the new one are merged into it.
        self.ranges.retain(|(low, high)| {
            let apart = high.checked_add(1).is_some_and(|next| next < first)
                || last.checked_add(1).is_some_and(|next| next < *low);
            if !apart {
                first = first.min(*low);
                last = last.max(*high);
            }
            apart
        });
        let at = self.ranges.partition_point(|(low, _)| *low < first);
        self.ranges.insert(at, (first, last));
    }
}

impl FromStr for PortSet {
    type Err = ParsePortsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut set = Self::default();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            let range = parse_range(part.trim()).ok_or_else(|| ParsePortsError { part: part.to_owned() })?;
            set.insert_range(range);
        }
        Ok(set)
    }
}

fn parse_range(part: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = part.split_once('-').unwrap_or((part, part));
    let range = parse_port(first.trim())?..=parse_port(last.trim())?;
    (!range.is_empty()).then_some(range)
}

impl fmt::Display for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (first, last)) in self.ranges.iter().enumerate() {
            let comma = if n == 0 { "" } else { "," };
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_and_ranges_are_merged_and_sorted() {
        let set: PortSet = " 90-100, 80,101 ,95-98,65535".parse().unwrap();
        assert_eq!(set.to_string(), "80,90-101,65535");
        assert!(set.contains(80) && set.contains(95) && set.contains(65535));
        assert!(!set.contains(81) && !set.contains(102) && !set.contains(0));
        assert!("".parse::<PortSet>().unwrap().is_empty());
        assert_eq!("80,, 90 ,".parse::<PortSet>().unwrap().to_string(), "80,90");
    }

    #[test]
    fn invalid_lists_are_refused() {
        for text in ["0", "65536", "a", "80;90", "9-8", "1-", "-1", "+1", "1-2-3"] {
            assert!(text.parse::<PortSet>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_set_contains_exactly_the_inserted_ports(ranges in prop::collection::vec((1u16.., 0u16..9), 0..20), probe: u16) {
            let mut set = PortSet::default();
            for (first, n) in &ranges {
                set.insert_range(*first..=first.saturating_add(*n));
            }
            let expected = |port: u16| ranges.iter().any(|(first, n)| (*first..=first.saturating_add(*n)).contains(&port));
            for port in ranges.iter().flat_map(|(first, n)| [first - 1, *first, first.saturating_add(*n)]).chain([probe]) {
                prop_assert_eq!(set.contains(port), expected(port));
            }
            prop_assert_eq!(set.to_string().parse(), Ok(set));
        }
    }
}
