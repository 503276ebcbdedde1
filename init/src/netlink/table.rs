//! Encodes our rules as nftables messages: sets, chains, and rules made of expressions.
//!
//! Messages and attributes: `linux/netfilter/nf_tables.h`. Comments and user data of sets are written as the `nft` program
//! writes them, so that its listings show the rules as if it had created them.

use std::net::IpAddr;

use ipnet::IpNet;
use tulle_core::ports::PortSet;

use crate::netlink::attr::{self, Attrs};
use crate::netlink::socket::{Message, NFNL_SUBSYS_NFTABLES, NLM_F_APPEND, NLM_F_CREATE};
use crate::options::Family;
use crate::rules::{self, Action, COMMENT_PREFIX, Chain, Direction, HASH_CHAIN, Hook, Match, Rule, Rules, Side, TABLE};

/// The number of tables that hold the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One `inet` table for both families.
    Inet,
    /// One table per family, for kernels without NAT in `inet` tables (before 5.2).
    Split,
}

/// The content of one of our tables, in the order of creation.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) family: u8,
    pub(crate) sets: Vec<Set>,
    pub(crate) chains: Vec<Message>,
    pub(crate) rules: Vec<Message>,
}

#[derive(Clone, Debug)]
pub(crate) struct Set {
    pub(crate) name: &'static str,
    /// The message that creates the set, without its id: ids are valid only within a transaction, and listings have none.
    pub(crate) message: Message,
    id: u32,
    /// First and last key of each range.
    pub(crate) ranges: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The tables for these rules; the hash is stored in each.
pub(crate) fn tables(rules: &Rules, layout: Layout, hash: &str) -> Vec<Table> {
    match layout {
        Layout::Inet => vec![table(NFPROTO_INET, rules, rules.list.iter().collect(), hash)],
        Layout::Split => rules
            .present_families()
            .map(|family| table(nfproto(family), rules, rules.for_family(family).collect(), hash))
            .collect(),
    }
}

/// A transaction that replaces our existing tables with these.
pub(crate) fn replace(tables: &[Table], existing: &[u8]) -> Vec<Message> {
    let mut messages: Vec<Message> = existing.iter().map(|family| delete_table(*family)).collect();
    for table in tables {
        messages.push(new_table(table.family));
        for set in &table.sets {
            let attrs = set.message.attrs.clone().be32(NFTA_SET_ID, set.id);
            messages.push(Message {
                attrs,
                ..set.message.clone()
            });
            messages.extend(elements(table.family, set));
        }
        messages.extend(table.chains.iter().cloned());
        messages.extend(table.rules.iter().cloned());
    }
    messages
}

pub(crate) fn new_table(family: u8) -> Message {
    let attrs = Attrs::new().text(NFTA_TABLE_NAME, TABLE).be32(NFTA_TABLE_FLAGS, 0);
    message(NFT_MSG_NEWTABLE, NLM_F_CREATE, family, attrs, format!("table {TABLE}"))
}

pub(crate) fn delete_table(family: u8) -> Message {
    message(
        NFT_MSG_DELTABLE,
        0,
        family,
        Attrs::new().text(NFTA_TABLE_NAME, TABLE),
        format!("the removal of table {TABLE}"),
    )
}

/// A request for all objects of a kind; limited to one table if the kernel supports it.
pub(crate) fn list(kind: u16, family: u8, table: Option<&str>) -> Message {
    let attrs = table.map_or_else(Attrs::new, |table| Attrs::new().text(NFTA_TABLE_NAME, table));
    message(kind, 0, family, attrs, "a listing of rules".to_owned())
}

pub(crate) fn list_elements(family: u8, set: &str) -> Message {
    let attrs = Attrs::new()
        .text(NFTA_SET_ELEM_LIST_TABLE, TABLE)
        .text(NFTA_SET_ELEM_LIST_SET, set);
    message(NFT_MSG_GETSETELEM, 0, family, attrs, format!("a listing of set {set}"))
}

fn table(family: u8, rules: &Rules, list: Vec<&Rule>, hash: &str) -> Table {
    let matches = list.iter().flat_map(|rule| &rule.matches);
    let sets = matches
        .filter_map(range_set)
        .zip(1..)
        .map(|(range_set, id)| set(family, range_set, id))
        .collect();
    let used_chains = Chain::ALL
        .into_iter()
        .filter(|chain| list.iter().any(|rule| rule.chain == *chain));
    let mut chains: Vec<Message> = used_chains
        .map(|used| chain(family, used.name(), used.hook(rules.priority).as_ref()))
        .collect();
    chains.push(chain(family, HASH_CHAIN, None));
    let mut messages: Vec<Message> = Chain::ALL
        .into_iter()
        .flat_map(|chain| list.iter().filter(move |rule| rule.chain == chain))
        .map(|rule| {
            let mut expressions = family_expressions(rule, family);
            expressions.extend(
                rule.matches
                    .iter()
                    .flat_map(|criterion| match_expressions(criterion, rule.family)),
            );
            expressions.push(expression("counter", Attrs::new()));
            expressions.extend(action(rule.action, family));
            let comment = format!("{COMMENT_PREFIX}{}", rule.comment);
            rule_message(family, TABLE, rule.chain.name(), &expressions, &comment)
        })
        .collect();
    let hash_rule = [verdict(NFT_RETURN, None)];
    messages.push(rule_message(family, TABLE, HASH_CHAIN, &hash_rule, hash));
    Table {
        family,
        sets,
        chains,
        rules: messages,
    }
}

/// The chain that must stay while connections drain, in tproxy mode: it routes replies to the proxy.
pub(crate) fn tproxy_replies(family: u8) -> [Message; 2] {
    let hook = Chain::TproxyReplies.hook(0);
    let mut mark_replies = match_expressions(&Match::Marked(rules::TPROXY_CLIENT_MARK, Direction::Reply), None);
    mark_replies.extend(action(Action::MarkPacket(rules::TPROXY_CLIENT_MARK), family));
    [
        chain(family, Chain::TproxyReplies.name(), hook.as_ref()),
        rule_message(family, TABLE, Chain::TproxyReplies.name(), &mark_replies, "draining"),
    ]
}

/// A table for both families needs a match on the family.
fn family_expressions(rule: &Rule, table_family: u8) -> Vec<Attrs> {
    match rule.family {
        Some(family) if table_family == NFPROTO_INET => {
            vec![meta(NFT_META_NFPROTO), compare(NFT_CMP_EQ, &[nfproto(family)])]
        }
        _ => Vec::new(),
    }
}

pub(crate) fn rule_message(family: u8, table: &str, chain: &str, expressions: &[Attrs], comment: &str) -> Message {
    let list = expressions
        .iter()
        .fold(Attrs::new(), |list, expression| list.nested(NFTA_LIST_ELEM, expression));
    let attrs = Attrs::new()
        .text(NFTA_RULE_TABLE, table)
        .text(NFTA_RULE_CHAIN, chain)
        .nested(NFTA_RULE_EXPRESSIONS, &list);
    let attrs = attrs.bytes(NFTA_RULE_USERDATA, &userdata_text(comment));
    message(
        NFT_MSG_NEWRULE,
        NLM_F_CREATE | NLM_F_APPEND,
        family,
        attrs,
        format!("rule {comment:?} of chain {chain}"),
    )
}

pub(crate) fn chain(family: u8, name: &str, hook: Option<&Hook>) -> Message {
    let mut attrs = Attrs::new().text(NFTA_CHAIN_TABLE, TABLE).text(NFTA_CHAIN_NAME, name);
    if let Some(hook) = hook {
        let hook_attrs = Attrs::new()
            .be32(NFTA_HOOK_HOOKNUM, hook.point)
            .be32(NFTA_HOOK_PRIORITY, u32::from_ne_bytes(hook.priority.to_ne_bytes()));
        attrs = attrs
            .nested(NFTA_CHAIN_HOOK, &hook_attrs)
            .be32(NFTA_CHAIN_POLICY, POLICY_ACCEPT)
            .text(NFTA_CHAIN_TYPE, hook.kind);
    }
    let hook_name = hook.map(|hook| format!(" ({} at {} {})", hook.kind, hook.point_name, hook.priority));
    message(
        NFT_MSG_NEWCHAIN,
        NLM_F_CREATE,
        family,
        attrs,
        format!("chain {name}{}", hook_name.unwrap_or_default()),
    )
}

/// A match in the form of a set of ranges.
struct RangeSet {
    name: &'static str,
    /// The number of the key type in `enum datatypes` of `nft`, for its listings.
    kind: u32,
    key_len: u32,
    ranges: Vec<(Vec<u8>, Vec<u8>)>,
}

fn range_set(criterion: &Match) -> Option<RangeSet> {
    match criterion {
        Match::Ports { set, ports } => Some(RangeSet {
            name: set,
            kind: TYPE_INET_SERVICE,
            key_len: 2,
            ranges: port_ranges(ports),
        }),
        Match::Nets { set, nets, .. } => {
            let (kind, key_len) = match nets.first().map(Family::of_network) {
                Some(Family::V6) => (TYPE_IP6ADDR, 16),
                _ => (TYPE_IPADDR, 4),
            };
            Some(RangeSet {
                name: set,
                kind,
                key_len,
                ranges: net_ranges(nets),
            })
        }
        _ => None,
    }
}

fn set(family: u8, set: RangeSet, id: u32) -> Set {
    let attrs = Attrs::new()
        .text(NFTA_SET_TABLE, TABLE)
        .text(NFTA_SET_NAME, set.name)
        .be32(NFTA_SET_FLAGS, NFT_SET_INTERVAL)
        .be32(NFTA_SET_KEY_TYPE, set.kind)
        .be32(NFTA_SET_KEY_LEN, set.key_len)
        .bytes(NFTA_SET_USERDATA, &AUTO_MERGE);
    let message = message(NFT_MSG_NEWSET, NLM_F_CREATE, family, attrs, format!("set {}", set.name));
    Set {
        name: set.name,
        message,
        id,
        ranges: set.ranges,
    }
}

fn port_ranges(ports: &PortSet) -> Vec<(Vec<u8>, Vec<u8>)> {
    ports
        .ranges()
        .map(|range| (range.start().to_be_bytes().to_vec(), range.end().to_be_bytes().to_vec()))
        .collect()
}

/// Adjacent networks are merged into one range, as the kernel shows them.
fn net_ranges(nets: &[IpNet]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let mut ranges: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    for net in nets {
        let (first, last) = (octets(net.network()), octets(net.broadcast()));
        match ranges.last_mut() {
            Some((_, end)) if after(end).as_ref() == Some(&first) => *end = last,
            _ => ranges.push((first, last)),
        }
    }
    ranges
}

/// The next key; `None` after the largest.
fn after(key: &[u8]) -> Option<Vec<u8>> {
    let mut next = key.to_vec();
    for byte in next.iter_mut().rev() {
        let (sum, carried) = byte.overflowing_add(1);
        *byte = sum;
        if !carried {
            return Some(next);
        }
    }
    None
}

/// The bounds of ranges as nftables stores them: for each range, its first key and the first key after the range. The flag is
/// `true` for a key after a range.
pub(crate) fn bounds(ranges: &[(Vec<u8>, Vec<u8>)]) -> impl Iterator<Item = (Vec<u8>, bool)> + '_ {
    ranges.iter().flat_map(|(first, last)| {
        let end = after(last).map(|end| (end, true));
        [(first.clone(), false)].into_iter().chain(end)
    })
}

/// The elements of a set, split into messages whose lists stay far below 64 KiB.
fn elements(family: u8, set: &Set) -> Vec<Message> {
    let bounds: Vec<(Vec<u8>, bool)> = bounds(&set.ranges).collect();
    let lists = bounds.chunks(ELEMENTS_PER_MESSAGE).map(|bounds| {
        let list = bounds.iter().fold(Attrs::new(), |list, (key, is_end)| {
            let flags = if *is_end {
                Attrs::new().be32(NFTA_SET_ELEM_FLAGS, NFT_SET_ELEM_INTERVAL_END)
            } else {
                Attrs::new()
            };
            let key = Attrs::new().bytes(NFTA_DATA_VALUE, key);
            list.nested(NFTA_LIST_ELEM, &flags.nested(NFTA_SET_ELEM_KEY, &key))
        });
        let attrs = Attrs::new()
            .text(NFTA_SET_ELEM_LIST_TABLE, TABLE)
            .text(NFTA_SET_ELEM_LIST_SET, set.name);
        let attrs = attrs.nested(NFTA_SET_ELEM_LIST_ELEMENTS, &list);
        message(
            NFT_MSG_NEWSETELEM,
            NLM_F_CREATE,
            family,
            attrs,
            format!("elements of set {}", set.name),
        )
    });
    lists.collect()
}

/// Parses the bounds in a listing of elements, in the form of [`bounds`].
///
/// The `nft` program puts an element with the key 0 and the flag `INTERVAL_END` first into every set; it ends no range, and is
/// skipped.
pub(crate) fn shown_bounds(attrs: &[u8]) -> Vec<(Vec<u8>, bool)> {
    let list = attr::find(attrs, NFTA_SET_ELEM_LIST_ELEMENTS).unwrap_or_default();
    let bounds = attr::parse(list).filter_map(|(_, element)| {
        let key = attr::find(element, NFTA_SET_ELEM_KEY).and_then(|key| attr::find(key, NFTA_DATA_VALUE))?;
        let flags = attr::find_be32(element, NFTA_SET_ELEM_FLAGS).unwrap_or(0);
        Some((key.to_vec(), flags & NFT_SET_ELEM_INTERVAL_END != 0))
    });
    bounds
        .filter(|(key, is_end)| !(*is_end && key.iter().all(|byte| *byte == 0)))
        .collect()
}

fn match_expressions(criterion: &Match, family: Option<Family>) -> Vec<Attrs> {
    let tcp = || [meta(NFT_META_L4PROTO), compare(NFT_CMP_EQ, &[IPPROTO_TCP])];
    match criterion {
        Match::Tcp => tcp().into(),
        Match::NewConnection => tcp()
            .into_iter()
            .chain([
                payload(NFT_PAYLOAD_TRANSPORT_HEADER, 13, 1),
                mask(&[FIN | SYN | RST | ACK]),
                compare(NFT_CMP_EQ, &[SYN]),
            ])
            .collect(),
        Match::ToLocalAddress => vec![
            address_type(NFTA_FIB_F_DADDR),
            compare(NFT_CMP_EQ, &RTN_LOCAL.to_ne_bytes()),
        ],
        Match::OutputInterfaceLo => vec![meta(NFT_META_OIFNAME), compare(NFT_CMP_EQ, &LOOPBACK)],
        Match::InputInterfaceLo => vec![meta(NFT_META_IIFNAME), compare(NFT_CMP_EQ, &LOOPBACK)],
        Match::FromNonLocalAddress => vec![
            address_type(NFTA_FIB_F_SADDR),
            compare(NFT_CMP_NEQ, &RTN_LOCAL.to_ne_bytes()),
        ],
        Match::Marked(mark, direction) => vec![
            conntrack(NFT_CT_MARK),
            compare(NFT_CMP_EQ, &mark.to_ne_bytes()),
            conntrack(NFT_CT_DIRECTION),
            compare(NFT_CMP_EQ, &[u8::from(*direction == Direction::Reply)]),
        ],
        Match::Ports { set, .. } => tcp()
            .into_iter()
            .chain([payload(NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2), lookup(set)])
            .collect(),
        Match::Nets { set, side, .. } => {
            let (offset, len) = match (family, side) {
                (Some(Family::V6), Side::Source) => (8, 16),
                (Some(Family::V6), Side::Destination) => (24, 16),
                (_, Side::Source) => (12, 4),
                (_, Side::Destination) => (16, 4),
            };
            vec![payload(NFT_PAYLOAD_NETWORK_HEADER, offset, len), lookup(set)]
        }
        Match::User(uid) => vec![meta(NFT_META_SKUID), compare(NFT_CMP_EQ, &uid.to_ne_bytes())],
        Match::Group(gid) => vec![meta(NFT_META_SKGID), compare(NFT_CMP_EQ, &gid.to_ne_bytes())],
        Match::Invalid => conntrack_state(CT_STATE_INVALID),
    }
}

/// Matches packets whose connection is in one of these states.
pub(crate) fn conntrack_state(states: u32) -> Vec<Attrs> {
    vec![
        conntrack(NFT_CT_STATE),
        mask(&states.to_ne_bytes()),
        compare(NFT_CMP_NEQ, &0_u32.to_ne_bytes()),
    ]
}

fn conntrack(key: u32) -> Attrs {
    expression("ct", Attrs::new().be32(NFTA_CT_DREG, NFT_REG_1).be32(NFTA_CT_KEY, key))
}

/// The type (`RTN_*`) of the source or destination address.
fn address_type(address: u32) -> Attrs {
    expression(
        "fib",
        Attrs::new()
            .be32(NFTA_FIB_DREG, NFT_REG_1)
            .be32(NFTA_FIB_RESULT, NFT_FIB_RESULT_ADDRTYPE)
            .be32(NFTA_FIB_FLAGS, address),
    )
}

fn action(action: Action, table_family: u8) -> Vec<Attrs> {
    match action {
        Action::Return => vec![verdict(NFT_RETURN, None)],
        Action::Drop => vec![verdict(NF_DROP, None)],
        Action::Jump(chain) => vec![verdict(NFT_JUMP, Some(chain.name()))],
        Action::Redirect(port) => {
            vec![
                load(&port.to_be_bytes()),
                expression(
                    "redir",
                    Attrs::new()
                        .be32(NFTA_REDIR_REG_PROTO_MIN, NFT_REG_1)
                        .be32(NFTA_REDIR_FLAGS, NF_NAT_RANGE_PROTO_SPECIFIED),
                ),
            ]
        }
        Action::Tproxy(port) => {
            let family = if table_family == NFPROTO_INET {
                NFPROTO_UNSPEC
            } else {
                table_family
            };
            vec![
                load(&port.to_be_bytes()),
                expression(
                    "tproxy",
                    Attrs::new()
                        .be32(NFTA_TPROXY_FAMILY, family.into())
                        .be32(NFTA_TPROXY_REG_PORT, NFT_REG_1),
                ),
                verdict(NF_ACCEPT, None),
            ]
        }
        Action::MarkConnection(mark) => vec![
            load(&mark.to_ne_bytes()),
            expression(
                "ct",
                Attrs::new()
                    .be32(NFTA_CT_KEY, NFT_CT_MARK)
                    .be32(NFTA_CT_SREG, NFT_REG_1),
            ),
        ],
        Action::MarkPacket(mark) => vec![
            load(&mark.to_ne_bytes()),
            expression(
                "meta",
                Attrs::new()
                    .be32(NFTA_META_KEY, NFT_META_MARK)
                    .be32(NFTA_META_SREG, NFT_REG_1),
            ),
        ],
    }
}

/// Loads a value into the register.
fn load(value: &[u8]) -> Attrs {
    let value = Attrs::new().bytes(NFTA_DATA_VALUE, value);
    expression(
        "immediate",
        Attrs::new()
            .be32(NFTA_IMMEDIATE_DREG, NFT_REG_1)
            .nested(NFTA_IMMEDIATE_DATA, &value),
    )
}

pub(crate) fn verdict(code: i32, chain: Option<&str>) -> Attrs {
    let verdict = Attrs::new().be32(NFTA_VERDICT_CODE, u32::from_ne_bytes(code.to_ne_bytes()));
    let verdict = chain
        .into_iter()
        .fold(verdict, |verdict, chain| verdict.text(NFTA_VERDICT_CHAIN, chain));
    let data = Attrs::new().nested(NFTA_DATA_VERDICT, &verdict);
    expression(
        "immediate",
        Attrs::new()
            .be32(NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT)
            .nested(NFTA_IMMEDIATE_DATA, &data),
    )
}

fn expression(name: &str, data: Attrs) -> Attrs {
    let named = Attrs::new().text(NFTA_EXPR_NAME, name);
    // Counters have no data: they start at zero, and their values must not count as a difference later.
    if data == Attrs::new() {
        named
    } else {
        named.nested(NFTA_EXPR_DATA, &data)
    }
}

fn meta(key: u32) -> Attrs {
    expression(
        "meta",
        Attrs::new().be32(NFTA_META_DREG, NFT_REG_1).be32(NFTA_META_KEY, key),
    )
}

fn payload(base: u32, offset: u32, len: u32) -> Attrs {
    expression(
        "payload",
        Attrs::new()
            .be32(NFTA_PAYLOAD_DREG, NFT_REG_1)
            .be32(NFTA_PAYLOAD_BASE, base)
            .be32(NFTA_PAYLOAD_OFFSET, offset)
            .be32(NFTA_PAYLOAD_LEN, len),
    )
}

fn compare(operator: u32, value: &[u8]) -> Attrs {
    let data = Attrs::new().bytes(NFTA_DATA_VALUE, value);
    expression(
        "cmp",
        Attrs::new()
            .be32(NFTA_CMP_SREG, NFT_REG_1)
            .be32(NFTA_CMP_OP, operator)
            .nested(NFTA_CMP_DATA, &data),
    )
}

fn mask(bits: &[u8]) -> Attrs {
    let len = u32::try_from(bits.len()).unwrap_or(u32::MAX);
    let mask = Attrs::new().bytes(NFTA_DATA_VALUE, bits);
    let zero = Attrs::new().bytes(NFTA_DATA_VALUE, &vec![0; bits.len()]);
    let attrs = Attrs::new()
        .be32(NFTA_BITWISE_SREG, NFT_REG_1)
        .be32(NFTA_BITWISE_DREG, NFT_REG_1)
        .be32(NFTA_BITWISE_LEN, len)
        .nested(NFTA_BITWISE_MASK, &mask)
        .nested(NFTA_BITWISE_XOR, &zero);
    expression("bitwise", attrs)
}

fn lookup(set: &str) -> Attrs {
    expression(
        "lookup",
        Attrs::new()
            .text(NFTA_LOOKUP_SET, set)
            .be32(NFTA_LOOKUP_SREG, NFT_REG_1),
    )
}

/// A comment in the form of `nft`: type 0, length, NUL-terminated text.
fn userdata_text(text: &str) -> Vec<u8> {
    let len = u8::try_from(text.len() + 1).expect("comments are short and our own");
    [&[0, len], text.as_bytes(), &[0]].concat()
}

fn message(kind: u16, flags: u16, family: u8, attrs: Attrs, what: String) -> Message {
    Message {
        kind: NFNL_SUBSYS_NFTABLES << 8 | kind & 0xff,
        flags,
        family,
        attrs,
        what,
    }
}

pub(crate) fn nfproto(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

pub(crate) const NFPROTO_INET: u8 = 1;
pub(crate) const NFPROTO_UNSPEC: u8 = 0;

// Operations.
const NFT_MSG_NEWTABLE: u16 = 0;
pub(crate) const NFT_MSG_GETTABLE: u16 = 1;
const NFT_MSG_DELTABLE: u16 = 2;
const NFT_MSG_NEWCHAIN: u16 = 3;
pub(crate) const NFT_MSG_GETCHAIN: u16 = 4;
pub(crate) const NFT_MSG_DELCHAIN: u16 = 5;
const NFT_MSG_NEWRULE: u16 = 6;
pub(crate) const NFT_MSG_GETRULE: u16 = 7;
pub(crate) const NFT_MSG_DELRULE: u16 = 8;
const NFT_MSG_NEWSET: u16 = 9;
pub(crate) const NFT_MSG_GETSET: u16 = 10;
const NFT_MSG_NEWSETELEM: u16 = 12;
const NFT_MSG_GETSETELEM: u16 = 13;

// Attributes of tables, chains, rules, sets and their elements, and of expressions.
pub(crate) const NFTA_TABLE_NAME: u16 = 1;
const NFTA_TABLE_FLAGS: u16 = 2;
pub(crate) const NFTA_CHAIN_TABLE: u16 = 1;
pub(crate) const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_HOOK_PRIORITY: u16 = 2;
pub(crate) const NFTA_RULE_TABLE: u16 = 1;
pub(crate) const NFTA_RULE_CHAIN: u16 = 2;
pub(crate) const NFTA_RULE_HANDLE: u16 = 3;
pub(crate) const NFTA_RULE_EXPRESSIONS: u16 = 4;
pub(crate) const NFTA_RULE_USERDATA: u16 = 7;
const NFTA_SET_TABLE: u16 = 1;
pub(crate) const NFTA_SET_NAME: u16 = 2;
const NFTA_SET_FLAGS: u16 = 3;
const NFTA_SET_KEY_TYPE: u16 = 4;
const NFTA_SET_KEY_LEN: u16 = 5;
const NFTA_SET_ID: u16 = 10;
const NFTA_SET_USERDATA: u16 = 13;
const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_SET: u16 = 2;
const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;
const NFTA_SET_ELEM_KEY: u16 = 1;
const NFTA_SET_ELEM_FLAGS: u16 = 3;
const NFTA_LIST_ELEM: u16 = 1;
pub(crate) const NFTA_EXPR_NAME: u16 = 1;
pub(crate) const NFTA_EXPR_DATA: u16 = 2;
pub(crate) const NFTA_DATA_VALUE: u16 = 1;
pub(crate) const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_IMMEDIATE_DREG: u16 = 1;
pub(crate) const NFTA_IMMEDIATE_DATA: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
pub(crate) const NFTA_VERDICT_CHAIN: u16 = 2;
const NFTA_META_DREG: u16 = 1;
const NFTA_META_KEY: u16 = 2;
const NFTA_META_SREG: u16 = 3;
const NFTA_CT_DREG: u16 = 1;
const NFTA_CT_KEY: u16 = 2;
const NFTA_CT_SREG: u16 = 4;
const NFTA_FIB_DREG: u16 = 1;
const NFTA_FIB_RESULT: u16 = 2;
const NFTA_FIB_FLAGS: u16 = 3;
const NFTA_PAYLOAD_DREG: u16 = 1;
const NFTA_PAYLOAD_BASE: u16 = 2;
const NFTA_PAYLOAD_OFFSET: u16 = 3;
const NFTA_PAYLOAD_LEN: u16 = 4;
const NFTA_CMP_SREG: u16 = 1;
const NFTA_CMP_OP: u16 = 2;
const NFTA_CMP_DATA: u16 = 3;
const NFTA_BITWISE_SREG: u16 = 1;
const NFTA_BITWISE_DREG: u16 = 2;
const NFTA_BITWISE_LEN: u16 = 3;
const NFTA_BITWISE_MASK: u16 = 4;
const NFTA_BITWISE_XOR: u16 = 5;
const NFTA_LOOKUP_SET: u16 = 1;
const NFTA_LOOKUP_SREG: u16 = 2;
const NFTA_REDIR_REG_PROTO_MIN: u16 = 1;
const NFTA_REDIR_FLAGS: u16 = 3;
const NFTA_TPROXY_FAMILY: u16 = 1;
const NFTA_TPROXY_REG_PORT: u16 = 3;

const NFT_SET_INTERVAL: u32 = 4;
const NFT_SET_ELEM_INTERVAL_END: u32 = 1;
const ELEMENTS_PER_MESSAGE: usize = 500;
const TYPE_IPADDR: u32 = 7;
const TYPE_IP6ADDR: u32 = 8;
const TYPE_INET_SERVICE: u32 = 13;
/// User data of a set in the form of `nft`: keys are big-endian (type 0), overlapping elements are merged (type 2).
const AUTO_MERGE: [u8; 12] = {
    let [a, b, c, d] = 2_u32.to_ne_bytes();
    let [e, f, g, h] = 1_u32.to_ne_bytes();
    [0, 4, a, b, c, d, 2, 4, e, f, g, h]
};

// Operands of expressions; one register carries every value.
const NFT_REG_1: u32 = 1;
const NFT_REG_VERDICT: u32 = 0;
const NFT_CMP_EQ: u32 = 0;
const NFT_CMP_NEQ: u32 = 1;
/// Padded to the full length, so that "lo" does not match "lo1".
const LOOPBACK: [u8; 16] = [b'l', b'o', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const NFT_META_MARK: u32 = 3;
const NFT_META_IIFNAME: u32 = 6;
const NFT_META_OIFNAME: u32 = 7;
const NFT_META_SKUID: u32 = 10;
const NFT_META_SKGID: u32 = 11;
const NFT_META_NFPROTO: u32 = 15;
const NFT_META_L4PROTO: u32 = 16;
const NFT_PAYLOAD_NETWORK_HEADER: u32 = 1;
const NFT_PAYLOAD_TRANSPORT_HEADER: u32 = 2;
const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
const NFTA_FIB_F_SADDR: u32 = 1;
const NFTA_FIB_F_DADDR: u32 = 2;
const RTN_LOCAL: u32 = 2;
const NFT_CT_STATE: u32 = 0;
const NFT_CT_DIRECTION: u32 = 1;
const NFT_CT_MARK: u32 = 3;
/// `NF_CT_STATE_INVALID_BIT`.
const CT_STATE_INVALID: u32 = 1;
/// `NF_CT_STATE_BIT(IP_CT_NEW)`.
pub(crate) const CT_STATE_NEW: u32 = 8;
const NF_NAT_RANGE_PROTO_SPECIFIED: u32 = 2;
const IPPROTO_TCP: u8 = 6;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;
const NF_DROP: i32 = 0;
/// `NF_ACCEPT` as the policy of a chain.
const POLICY_ACCEPT: u32 = 1;
pub(crate) const NF_ACCEPT: i32 = 1;
const NFT_JUMP: i32 = -3;
pub(crate) const NFT_RETURN: i32 = -5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_networks_become_one_range() {
        let nets: Vec<IpNet> = ["10.0.0.0/24", "10.0.1.0/25", "10.9.0.0/16", "255.255.255.0/24"]
            .iter()
            .map(|net| net.parse().unwrap())
            .collect();
        let ranges = net_ranges(&nets);
        assert_eq!(ranges[0], (vec![10, 0, 0, 0], vec![10, 0, 1, 127]));
        let bounds: Vec<(Vec<u8>, bool)> = bounds(&ranges).collect();
        assert_eq!(bounds[1], (vec![10, 0, 1, 128], true));
        // There is no key after the largest, so its range has no end.
        assert_eq!(bounds.last().unwrap(), &(vec![255, 255, 255, 0], false));
    }
}
