//! Validated options; other modules do not validate them again.

use std::num::NonZeroU16;

use ipnet::IpNet;
use tulle_core::names::port;
use tulle_core::networks;
use tulle_core::ports::PortSet;

/// Selects the traffic of a network namespace that is redirected, and its targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The proxy's port for inbound connections.
    pub inbound_port: NonZeroU16,
    /// The proxy's port for outbound connections.
    pub outbound_port: NonZeroU16,
    /// The proxy's user; its connections are not redirected.
    pub proxy_uid: Option<u32>,
    /// The proxy's group; its connections are not redirected.
    pub proxy_gid: Option<u32>,
    pub inbound_ports: InboundPorts,
    pub inbound_mode: InboundMode,
    /// Inbound ports that are not redirected, including those of the proxy's own servers.
    pub inbound_skip_ports: PortSet,
    /// Source networks of both families.
    pub inbound_skip_nets: Vec<IpNet>,
    pub outbound_skip_ports: PortSet,
    /// Destination networks of both families.
    pub outbound_skip_nets: Vec<IpNet>,
    pub scope: Scope,
    pub invalid: InvalidPackets,
    /// Priority of the NAT chains; lower values are evaluated earlier. Configurable only with nftables.
    pub priority: i32,
    pub families: Families,
}

/// The inbound TCP ports that are redirected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InboundPorts {
    All,
    Listed(PortSet),
}

/// How inbound connections reach the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InboundMode {
    /// The destination is translated to the proxy's port; connection tracking knows the original destination.
    Redirect,
    /// Packets are unchanged. The proxy accepts connections to any address, and dials the application from the client's
    /// address.
    Tproxy,
}

/// Whether forwarded packets count as inbound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Only packets to an address of this namespace.
    Local,
    /// All packets that arrive, as with Linkerd's init.
    All,
}

/// Handling of TCP packets whose connection tracking state is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidPackets {
    Pass,
    Drop,
}

/// The address families that are redirected, and the handling of IPv6 if it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Families {
    /// IPv4 is redirected; IPv6 is ignored.
    V4,
    /// IPv4 is redirected. Inbound IPv6 connections are dropped, because they would bypass the proxy and its policies.
    V4DropV6,
    Both,
}

impl Families {
    /// Whether this family is redirected; `false` for one that is dropped.
    #[must_use]
    pub fn redirects(self, family: Family) -> bool {
        self == Self::Both || family == Family::V4
    }

    /// The redirected families, IPv4 first.
    pub fn redirected(self) -> impl Iterator<Item = Family> {
        [Family::V4, Family::V6]
            .into_iter()
            .filter(move |family| self.redirects(*family))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    #[must_use]
    pub fn of_network(net: &IpNet) -> Self {
        match net {
            IpNet::V4(_) => Self::V4,
            IpNet::V6(_) => Self::V6,
        }
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::V4 => "ipv4",
            Self::V6 => "ipv6",
        }
    }
}

/// A flag with an invalid value, or a required flag that is missing.
#[derive(Debug, thiserror::Error)]
pub enum OptionError {
    #[error("{flag} {value:?} {reason}")]
    Invalid {
        flag: &'static str,
        value: String,
        reason: String,
    },
    #[error("{flag} is required; expected a TCP port number, 1 to 65535")]
    MissingPort { flag: &'static str },
}

/// Handling of invalid list entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnInvalidEntry {
    Refuse,
    /// Skip it with a warning, as Linkerd's init does.
    Skip,
}

/// The default of skipped inbound ports: tap and admin, which the proxy itself serves.
#[must_use]
pub fn default_inbound_skip_ports() -> PortSet {
    let mut ports = PortSet::default();
    ports.insert_range(port::TAP..=port::ADMIN);
    ports
}

/// Default priority of the NAT chains; the same as that of iptables.
pub const DEFAULT_PRIORITY: i32 = -100;

/// Parses a proxy port.
///
/// # Errors
/// If the value is not between 1 and 65535. As in Linkerd's init, -1 means that the flag is absent.
pub fn proxy_port(flag: &'static str, value: i64) -> Result<NonZeroU16, OptionError> {
    if value == -1 {
        return Err(OptionError::MissingPort { flag });
    }
    let port = u16::try_from(value).ok().and_then(NonZeroU16::new);
    port.ok_or_else(|| OptionError::Invalid {
        flag,
        value: value.to_string(),
        reason: "must be a valid TCP port number, 1 to 65535".to_owned(),
    })
}

/// Parses a user or group id; -1 means none.
///
/// # Errors
/// If the value is neither -1 nor an id.
pub fn user_or_group_id(flag: &'static str, value: i64) -> Result<Option<u32>, OptionError> {
    match (value, u32::try_from(value)) {
        (-1, _) => Ok(None),
        (_, Ok(id)) if id != u32::MAX => Ok(Some(id)),
        _ => Err(OptionError::Invalid {
            flag,
            value: value.to_string(),
            reason: "is not an id; expected 0 to 4294967294, or -1 for none".to_owned(),
        }),
    }
}

/// Parses comma-separated lists of ports and ranges.
///
/// # Errors
/// If an entry is invalid and such entries are not skipped.
pub fn ports(flag: &'static str, lists: &[String], on_invalid: OnInvalidEntry) -> Result<PortSet, OptionError> {
    let mut set = PortSet::default();
    for entry in lists.iter().flat_map(|list| list.split(',')).map(str::trim) {
        match entry.parse::<PortSet>() {
            Ok(ports) if !ports.is_empty() => ports.ranges().for_each(|range| set.insert_range(range)),
            _ if on_invalid == OnInvalidEntry::Skip => {
                tracing::warn!(flag, entry, "skipped: not a port or a range of ports")
            }
            _ => {
                return Err(OptionError::Invalid {
                    flag,
                    value: entry.to_owned(),
                    reason: "is not a port or a range; expected a comma-separated list of ports from 1 to 65535, \
                             such as 4190,5000-5010"
                        .to_owned(),
                });
            }
        }
    }
    Ok(set)
}

/// Parses comma-separated lists of networks of both families, and merges overlapping ones.
///
/// # Errors
/// If an entry is neither a network in CIDR notation nor an address.
pub fn networks(flag: &'static str, lists: &[String]) -> Result<Vec<IpNet>, OptionError> {
    let mut all = Vec::new();
    for entry in lists.iter().flat_map(|list| list.split(',')) {
        let parsed = networks::parse_networks(entry).ok().filter(|parsed| !parsed.is_empty());
        let parsed = parsed.ok_or_else(|| OptionError::Invalid {
            flag,
            value: entry.to_owned(),
            reason: "is not a valid CIDR address; expected a comma-separated list such as 10.0.0.0/8,fd00::/8"
                .to_owned(),
        })?;
        all.extend(parsed);
    }
    let mut nets = IpNet::aggregate(&all);
    nets.sort();
    Ok(nets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_parsed_and_merged() {
        let lists = ["80, 90-100".to_owned(), "101".to_owned()];
        assert_eq!(
            ports("--f", &lists, OnInvalidEntry::Refuse).unwrap().to_string(),
            "80,90-101"
        );
        let lists = ["10.0.0.0/9,10.128.0.0/9".to_owned(), "fd00::1".to_owned()];
        let nets: Vec<String> = networks("--f", &lists).unwrap().iter().map(IpNet::to_string).collect();
        assert_eq!(nets, ["10.0.0.0/8", "fd00::1/128"]);
    }

    #[test]
    fn a_bad_entry_is_refused_with_flag_and_value_or_skipped() {
        for bad in ["70000", "", "90-80", "x"] {
            let lists = [format!("80,{bad}")];
            let error = ports("--skip", &lists, OnInvalidEntry::Refuse).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--skip {bad:?} is not a port")), "{error}");
            assert_eq!(ports("--skip", &lists, OnInvalidEntry::Skip).unwrap().to_string(), "80");
        }
        for bad in ["10.0.0.0/33", "", "host"] {
            assert!(networks("--nets", &[bad.to_owned()]).is_err(), "{bad}");
        }
        for bad in [-1, 0, 65536] {
            assert!(proxy_port("--p", bad).is_err(), "{bad}");
        }
        let missing = proxy_port("--p", -1).unwrap_err().to_string();
        assert!(missing.starts_with("--p is required"), "{missing}");
        assert_eq!(user_or_group_id("--u", -1).unwrap(), None);
        assert_eq!(user_or_group_id("--u", 0).unwrap(), Some(0));
        assert!(user_or_group_id("--u", -2).is_err() && user_or_group_id("--u", 1 << 32).is_err());
    }
}
