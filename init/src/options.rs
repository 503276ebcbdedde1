//! What to redirect, checked: nothing behind this module validates again.

use std::num::NonZeroU16;

use ipnet::IpNet;
use tulle_core::names::port;
use tulle_core::nets;
use tulle_core::ports::PortSet;

/// Which traffic of one network namespace goes where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Where the proxy takes connections for the application.
    pub inbound_port: NonZeroU16,
    /// Where the proxy takes connections of the application.
    pub outbound_port: NonZeroU16,
    /// The user whose connections are never redirected: the proxy's.
    pub proxy_uid: Option<u32>,
    /// The group whose connections are never redirected.
    pub proxy_gid: Option<u32>,
    pub inbound: Inbound,
    pub inbound_mode: InboundMode,
    /// Inbound ports that stay direct, those of the proxy's own servers included.
    pub inbound_skip_ports: PortSet,
    /// Source networks, of both families.
    pub inbound_skip_nets: Vec<IpNet>,
    pub outbound_skip_ports: PortSet,
    /// Destination networks, of both families.
    pub outbound_skip_nets: Vec<IpNet>,
    pub scope: Scope,
    pub invalid: Invalid,
    /// Of the NAT chains; lower runs earlier. Only nftables can choose.
    pub priority: i32,
    pub families: Families,
}

/// Which inbound TCP ports are redirected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inbound {
    All,
    Listed(PortSet),
}

/// How connections that arrive get to the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InboundMode {
    /// Translated to the proxy's address; connection tracking knows what was dialled.
    Redirect,
    /// As they are, to a proxy that takes connections for any address and dials the application as the client.
    Tproxy,
}

/// Whether packets that are only forwarded through this namespace are taken as inbound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Only packets for an address of this namespace.
    Local,
    /// All that arrive, as Linkerd's init does.
    All,
}

/// What happens to TCP packets that connection tracking cannot place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalid {
    Pass,
    Drop,
}

/// Which address families are redirected, and what happens to IPv6 where it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Families {
    /// IPv4 is redirected; IPv6 is left alone.
    V4,
    /// IPv4 is redirected; inbound IPv6 connections are dropped, because they would bypass the proxy and its policies.
    V4DropV6,
    Both,
}

/// A flag with a value that we refuse.
#[derive(Debug, thiserror::Error)]
#[error("{flag} {value:?} {reason}")]
pub struct OptionError {
    pub flag: &'static str,
    pub value: String,
    pub reason: String,
}

/// What becomes of list entries that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadEntry {
    Refuse,
    /// Left out with a warning, as Linkerd's init does.
    Skip,
}

/// The inbound ports that stay direct unless a list is given: tap and admin, which the proxy serves itself.
#[must_use]
pub fn default_inbound_skip_ports() -> PortSet {
    let mut ports = PortSet::default();
    ports.insert_range(port::TAP..=port::ADMIN);
    ports
}

/// Priority of the NAT chains unless chosen: where iptables has its own.
pub const DEFAULT_PRIORITY: i32 = -100;

/// Reads a proxy port.
///
/// # Errors
/// Anything but 1 to 65535; -1 is how Linkerd's init says that the flag was not given.
pub fn proxy_port(flag: &'static str, value: i64) -> Result<NonZeroU16, OptionError> {
    let port = u16::try_from(value).ok().and_then(NonZeroU16::new);
    port.ok_or_else(|| OptionError {
        flag,
        value: value.to_string(),
        reason: "must be a valid TCP port number, 1 to 65535".to_owned(),
    })
}

/// Reads a user or group id; -1 is nobody.
///
/// # Errors
/// What is neither -1 nor an id.
pub fn owner(flag: &'static str, value: i64) -> Result<Option<u32>, OptionError> {
    match (value, u32::try_from(value)) {
        (-1, _) => Ok(None),
        (_, Ok(id)) if id != u32::MAX => Ok(Some(id)),
        _ => Err(OptionError {
            flag,
            value: value.to_string(),
            reason: "is no id; expected 0 to 4294967294, or -1 for none".to_owned(),
        }),
    }
}

/// Reads comma lists of ports and ranges.
///
/// # Errors
/// The first bad entry, unless such entries are skipped.
pub fn ports(flag: &'static str, lists: &[String], bad: BadEntry) -> Result<PortSet, OptionError> {
    let mut set = PortSet::default();
    for entry in lists.iter().flat_map(|list| list.split(',')).map(str::trim) {
        match entry.parse::<PortSet>() {
            Ok(ports) if !ports.is_empty() => ports.ranges().for_each(|range| set.insert_range(range)),
            _ if bad == BadEntry::Skip => tracing::warn!(flag, entry, "left out: neither a port nor a range of ports"),
            _ => {
                return Err(OptionError {
                    flag,
                    value: entry.to_owned(),
                    reason: "is not a port or a range; expected a comma list such as 4190,5000-5010 of 1 to 65535"
                        .to_owned(),
                });
            }
        }
    }
    Ok(set)
}

/// Reads comma lists of networks, of both families, and joins those that overlap.
///
/// # Errors
/// The first that is not in CIDR notation.
pub fn networks(flag: &'static str, lists: &[String]) -> Result<Vec<IpNet>, OptionError> {
    let mut all = Vec::new();
    for entry in lists.iter().flat_map(|list| list.split(',')) {
        let parsed = nets::parse_networks(entry).ok().filter(|parsed| !parsed.is_empty());
        let parsed = parsed.ok_or_else(|| OptionError {
            flag,
            value: entry.to_owned(),
            reason: "is not a valid CIDR address; expected a comma list such as 10.0.0.0/8,fd00::/8".to_owned(),
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
    fn lists_are_read_and_joined() {
        let lists = ["80, 90-100".to_owned(), "101".to_owned()];
        assert_eq!(ports("--f", &lists, BadEntry::Refuse).unwrap().to_string(), "80,90-101");
        let lists = ["10.0.0.0/9,10.128.0.0/9".to_owned(), "fd00::1".to_owned()];
        let nets: Vec<String> = networks("--f", &lists).unwrap().iter().map(IpNet::to_string).collect();
        assert_eq!(nets, ["10.0.0.0/8", "fd00::1/128"]);
    }

    #[test]
    fn a_bad_entry_is_refused_with_flag_and_value_or_skipped() {
        for bad in ["70000", "", "90-80", "x"] {
            let lists = [format!("80,{bad}")];
            let error = ports("--skip", &lists, BadEntry::Refuse).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--skip {bad:?} is not a port")), "{error}");
            assert_eq!(ports("--skip", &lists, BadEntry::Skip).unwrap().to_string(), "80");
        }
        for bad in ["10.0.0.0/33", "", "host"] {
            assert!(networks("--nets", &[bad.to_owned()]).is_err(), "{bad}");
        }
        for bad in [-1, 0, 65536] {
            assert!(proxy_port("--p", bad).is_err(), "{bad}");
        }
        assert_eq!(owner("--u", -1).unwrap(), None);
        assert_eq!(owner("--u", 0).unwrap(), Some(0));
        assert!(owner("--u", -2).is_err() && owner("--u", 1 << 32).is_err());
    }
}
