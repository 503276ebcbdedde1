//! Policy routing: delivers packets with our mark locally, regardless of their destination address.
//!
//! One rule per family selects our routing table, whose only route is local. Messages and attributes:
//! `linux/rtnetlink.h` and `linux/fib_rules.h`.

use crate::netlink::attr::{self, Attrs};
use crate::netlink::nftables::Change;
use crate::netlink::socket::{Answer, Message, NLM_F_CREATE, NetlinkError, Socket};
use crate::netlink::table::nfproto;
use crate::options::{Families, Family};
use crate::rules::TPROXY_CLIENT_MARK;

/// Adds the missing rules and routes.
///
/// # Errors
/// If the kernel refuses.
pub fn ensure(families: Families) -> Result<Change, NetlinkError> {
    let mut socket = Socket::open_routing()?;
    let mut change = Change::Unchanged;
    for object in families.redirected().flat_map(routing_objects) {
        if !object.exists(&mut socket)? {
            socket.change(&object.message(object.new_kind, NLM_F_CREATE))?;
            change = Change::Applied;
        }
    }
    Ok(change)
}

/// Whether all rules and routes exist.
///
/// # Errors
/// If the kernel does not answer.
pub fn exists(families: Families) -> Result<bool, NetlinkError> {
    let mut socket = Socket::open_routing()?;
    for object in families.redirected().flat_map(routing_objects) {
        if !object.exists(&mut socket)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes the rules and routes of both families; returns those that existed.
///
/// # Errors
/// If the kernel refuses.
pub fn remove() -> Result<Vec<String>, NetlinkError> {
    let mut socket = Socket::open_routing()?;
    let mut removed = Vec::new();
    for family in Families::Both.redirected() {
        for object in routing_objects(family) {
            let existed = match object.exists(&mut socket) {
                Err(error) if error.is_unsupported() => false, // the kernel lacks this family
                exists => exists?,
            };
            if existed {
                socket.change(&object.message(object.delete_kind, 0))?;
                removed.push(format!("{} {}", object.name, family.name()));
            }
        }
    }
    Ok(removed)
}

/// The equivalent `ip` commands.
#[must_use]
pub fn commands(families: Families) -> Vec<String> {
    let commands = families.redirected().flat_map(|family| {
        let ip = if family == Family::V4 { "ip" } else { "ip -6" };
        [
            format!(
                "{ip} rule add fwmark {TPROXY_CLIENT_MARK:#x} lookup {ROUTING_TABLE} priority {ROUTING_RULE_PRIORITY}"
            ),
            format!("{ip} route add local default dev lo table {ROUTING_TABLE}"),
        ]
    });
    commands.collect()
}

/// The rule or the route of one family.
struct RoutingObject {
    family: Family,
    name: &'static str,
    /// The kinds of the messages that create, delete and list the object.
    new_kind: u16,
    delete_kind: u16,
    list_kind: u16,
    /// The last eight bytes of `rtmsg` (table, protocol, scope, type, flags) or of `fib_rule_hdr` (table, two reserved bytes, action,
    /// flags).
    header: [u8; 8],
    attrs: Vec<(u16, u32)>,
}

fn routing_objects(family: Family) -> [RoutingObject; 2] {
    let rule = RoutingObject {
        family,
        name: "routing rule",
        new_kind: RTM_NEWRULE,
        delete_kind: RTM_DELRULE,
        list_kind: RTM_GETRULE,
        header: [ROUTING_TABLE, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0],
        attrs: vec![
            (FRA_PRIORITY, ROUTING_RULE_PRIORITY),
            (FRA_FWMARK, TPROXY_CLIENT_MARK),
            (FRA_FWMASK, u32::MAX),
        ],
    };
    let route = RoutingObject {
        family,
        name: "route",
        new_kind: RTM_NEWROUTE,
        delete_kind: RTM_DELROUTE,
        list_kind: RTM_GETROUTE,
        header: [ROUTING_TABLE, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, 0, 0, 0, 0],
        attrs: vec![(RTA_OIF, LOOPBACK_IFINDEX)],
    };
    [rule, route]
}

impl RoutingObject {
    fn message(&self, kind: u16, flags: u16) -> Message {
        let head = Attrs::with_header(self.header);
        let attrs = self.attrs.iter();
        Message {
            kind,
            flags,
            family: nfproto(self.family), // NFPROTO_* and AF_* have the same numbers
            attrs: attrs.fold(head, |attrs, (kind, value)| attrs.bytes(*kind, &value.to_ne_bytes())),
            what: format!("the {} of {}", self.name, self.family.name()),
        }
    }

    fn exists(&self, socket: &mut Socket) -> Result<bool, NetlinkError> {
        let all = socket.dump(&self.message(self.list_kind, 0))?;
        Ok(all.iter().any(|shown| self.equals(shown) == Some(true)))
    }

    fn equals(&self, shown: &Answer) -> Option<bool> {
        let (header, attrs) = shown.attrs.split_at_checked(self.header.len())?;
        let same =
            |(kind, value): &(u16, u32)| attr::find(attrs, *kind).is_some_and(|shown| shown == value.to_ne_bytes());
        // Other header fields are chosen by the kernel; for example, IPv6 routes always have the scope `universe`.
        Some(header[0] == self.header[0] && header[3] == self.header[3] && self.attrs.iter().all(same))
    }
}

/// The number of our routing table. System tables are 253 to 255, and no other program is known to use this number.
const ROUTING_TABLE: u8 = 143;
/// The priority of our routing rules: after the rule for local addresses (0), before rules that select by source.
const ROUTING_RULE_PRIORITY: u32 = 100;
/// The interface index of `lo` in every network namespace.
const LOOPBACK_IFINDEX: u32 = 1;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const RTM_GETRULE: u16 = 34;
const FR_ACT_TO_TBL: u8 = 1;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_FWMASK: u16 = 16;
const RTA_OIF: u16 = 4;
