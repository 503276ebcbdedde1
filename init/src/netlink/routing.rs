//! Policy routing: packets with our mark are delivered here, whoever they are for.
//!
//! One rule a family sends them to a table of ours, whose one route leads to this namespace. Messages, names and
//! numbers are those of `linux/rtnetlink.h` and `linux/fib_rules.h`.

use crate::netlink::attr::{self, Attrs};
use crate::netlink::native::Change;
use crate::netlink::table::nfproto;
use crate::netlink::wire::{Answer, CREATE, Message, Socket, WireError};
use crate::options::Families;
use crate::rules::{AS_CLIENT, Family};

/// Makes what is missing of it.
///
/// # Errors
/// What the kernel refused.
pub fn put(families: Families) -> Result<Change, WireError> {
    let mut socket = Socket::open_routing()?;
    let mut change = Change::Unchanged;
    for part in families.each().flat_map(parts) {
        if !part.is_there(&mut socket)? {
            socket.change(&part.message(part.new, CREATE))?;
            change = Change::Applied;
        }
    }
    Ok(change)
}

/// Whether nothing of it is missing.
///
/// # Errors
/// When the kernel does not answer.
pub fn is_there(families: Families) -> Result<bool, WireError> {
    let mut socket = Socket::open_routing()?;
    for part in families.each().flat_map(parts) {
        if !part.is_there(&mut socket)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes it from both families; says where it was.
///
/// # Errors
/// What the kernel refused.
pub fn remove() -> Result<Vec<String>, WireError> {
    let mut socket = Socket::open_routing()?;
    let mut removed = Vec::new();
    for family in Families::Both.each() {
        for part in parts(family) {
            let there = match part.is_there(&mut socket) {
                Err(error) if error.unsupported() => false, // a kernel without this family
                there => there?,
            };
            if there {
                socket.change(&part.message(part.delete, 0))?;
                removed.push(format!("{} {}", part.name, family.name()));
            }
        }
    }
    Ok(removed)
}

/// The commands that would do the same.
#[must_use]
pub fn commands(families: Families) -> Vec<String> {
    let each = families.each().flat_map(|family| {
        let ip = if family == Family::V4 { "ip" } else { "ip -6" };
        [
            format!("{ip} rule add fwmark {AS_CLIENT:#x} lookup {TABLE} priority {PRIORITY}"),
            format!("{ip} route add local default dev lo table {TABLE}"),
        ]
    });
    each.collect()
}

/// The rule or the route of one family.
struct Part {
    family: Family,
    name: &'static str,
    new: u16,
    delete: u16,
    list: u16,
    /// What follows family, lengths and type of service in the header: table, three bytes, and flags.
    header: [u8; 8],
    attrs: Vec<(u16, u32)>,
}

fn parts(family: Family) -> [Part; 2] {
    let rule = Part {
        family,
        name: "routing rule",
        new: 32,
        delete: 33,
        list: 34,
        header: [TABLE, 0, 0, TO_TABLE, 0, 0, 0, 0],
        attrs: vec![
            (RULE_PRIORITY, PRIORITY),
            (RULE_MARK, AS_CLIENT),
            (RULE_MARK_MASK, u32::MAX),
        ],
    };
    let route = Part {
        family,
        name: "route",
        new: 24,
        delete: 25,
        list: 26,
        header: [TABLE, STATIC, HOST, LOCAL, 0, 0, 0, 0],
        attrs: vec![(ROUTE_INTERFACE, LOOPBACK)],
    };
    [rule, route]
}

impl Part {
    fn message(&self, kind: u16, flags: u16) -> Message {
        let head = Attrs::headed(self.header);
        let attrs = self.attrs.iter();
        Message {
            kind,
            flags,
            family: nfproto(self.family), // the same numbers as those of address families
            attrs: attrs.fold(head, |attrs, (kind, value)| attrs.bytes(*kind, &value.to_ne_bytes())),
            what: format!("the {} of {}", self.name, self.family.name()),
        }
    }

    fn is_there(&self, socket: &mut Socket) -> Result<bool, WireError> {
        let all = socket.dump(&self.message(self.list, 0))?;
        Ok(all.iter().any(|shown| self.is(shown) == Some(true)))
    }

    fn is(&self, shown: &Answer) -> Option<bool> {
        let (header, attrs) = shown.attrs.split_at_checked(self.header.len())?;
        let same =
            |(kind, value): &(u16, u32)| attr::find(attrs, *kind).is_some_and(|shown| shown == value.to_ne_bytes());
        // Others of the header are as the kernel likes: the scope of routes of IPv6 is always that of all.
        Some(header[0] == self.header[0] && header[3] == self.header[3] && self.attrs.iter().all(same))
    }
}

/// Neither the system's tables (253 to 255) nor those that others are known to take.
const TABLE: u8 = 143;
/// Behind the table of local addresses (0), before all that chooses by source.
const PRIORITY: u32 = 100;
/// Of every network namespace.
const LOOPBACK: u32 = 1;
const TO_TABLE: u8 = 1;
const STATIC: u8 = 4;
const HOST: u8 = 254;
const LOCAL: u8 = 2;
const RULE_PRIORITY: u16 = 6;
const RULE_MARK: u16 = 10;
const RULE_MARK_MASK: u16 = 16;
const ROUTE_INTERFACE: u16 = 4;
