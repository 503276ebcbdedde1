//! Rules that are not in our table: iptables' nft flavour of ours and of Linkerd's, and redirects of strangers.

use crate::netlink::attr::{self, Attrs, parse};
use crate::netlink::table::{self, verdict};
use crate::netlink::wire::{Answer, Message, NFTABLES, Socket, WireError};
use crate::nft_text::TABLE;
use crate::rules::Family;

/// What one table of iptables' nft flavour holds of ours.
#[derive(Clone, Debug)]
pub(crate) struct Xtables {
    family: u8,
    table: String,
    chains: Vec<String>,
    /// Chain and handle of rules that jump to our chains, from chains that are not ours.
    jumps: Vec<(String, u64)>,
}

/// What iptables' nft flavour holds of ours or of Linkerd's, a table each.
pub(crate) fn xtables(socket: &mut Socket) -> Result<Vec<Xtables>, WireError> {
    let mut found: Vec<Xtables> = Vec::new();
    for answer in socket.dump(&table::list(table::GET_CHAIN, table::ANY_FAMILY, None))? {
        let (Some(table), Some(chain)) = names(&answer, table::CHAIN_TABLE, table::CHAIN_NAME) else {
            continue;
        };
        if !IPTABLES_CHAINS.contains(&chain) || !IPTABLES_TABLES.contains(&table) {
            continue;
        }
        match found
            .iter_mut()
            .find(|known| known.family == answer.family && known.table == table)
        {
            Some(known) => known.chains.push(chain.to_owned()),
            None => found.push(Xtables {
                family: answer.family,
                table: table.to_owned(),
                chains: vec![chain.to_owned()],
                jumps: Vec::new(),
            }),
        }
    }
    for known in &mut found {
        for answer in socket.dump(&table::list(table::GET_RULE, known.family, Some(&known.table)))? {
            let (Some(table), Some(chain)) = names(&answer, table::RULE_TABLE, table::RULE_CHAIN) else {
                continue;
            };
            let target = expressions(&answer).find_map(|(_, data)| jump_target(data));
            let handle = attr::find(&answer.attrs, table::RULE_HANDLE).and_then(|handle| handle.try_into().ok());
            let Some(handle) = handle.map(u64::from_be_bytes) else {
                continue;
            };
            let ours = |chain: &str| known.chains.iter().any(|known| known == chain);
            if table == known.table && !ours(chain) && target.is_some_and(ours) {
                known.jumps.push((chain.to_owned(), handle));
            }
        }
    }
    Ok(found)
}

impl Xtables {
    pub(crate) fn name(&self) -> String {
        let family = if self.family == 10 { "ipv6" } else { "ipv4" };
        format!("iptables-nft {family} {}", self.table)
    }

    /// Deletes jumps and chains, and nothing else of the table.
    pub(crate) fn removal(&self) -> Vec<Message> {
        let jumps = self.jumps.iter().map(|(chain, handle)| {
            let attrs = Attrs::new()
                .text(table::RULE_TABLE, &self.table)
                .text(table::RULE_CHAIN, chain);
            self.delete(table::DEL_RULE, attrs.be64(table::RULE_HANDLE, *handle), chain)
        });
        // All chains are emptied before the first is deleted: they may jump to one another.
        let emptied = self.chains.iter().map(|chain| self.empty(chain));
        let chains = self.chains.iter().map(|chain| {
            let attrs = Attrs::new()
                .text(table::CHAIN_TABLE, &self.table)
                .text(table::CHAIN_NAME, chain);
            self.delete(table::DEL_CHAIN, attrs, chain)
        });
        jumps.chain(emptied).chain(chains).collect()
    }

    /// Makes the chains let everything pass, with a rule that keeps connection tracking in use.
    pub(crate) fn pass(&self) -> Vec<Message> {
        let passing = || self.chains.iter().filter(|chain| *chain != IPTABLES_ANSWERS);
        let filled = passing().map(|chain| {
            let mut pass = table::conntrack_state(table::CT_NEW);
            pass.push(verdict(table::RETURN, None));
            table::rule_message(self.family, &self.table, chain, &pass, "draining")
        });
        passing().map(|chain| self.empty(chain)).chain(filled).collect()
    }

    fn empty(&self, chain: &str) -> Message {
        let attrs = Attrs::new()
            .text(table::RULE_TABLE, &self.table)
            .text(table::RULE_CHAIN, chain);
        self.delete(table::DEL_RULE, attrs, chain)
    }

    fn delete(&self, kind: u16, attrs: Attrs, chain: &str) -> Message {
        let what = format!("a removal in chain {chain} of table {} ({})", self.table, self.name());
        Message {
            kind: NFTABLES << 8 | kind,
            flags: 0,
            family: self.family,
            attrs,
            what,
        }
    }
}

/// Tables and chains of strangers that translate destinations, for a warning.
///
/// # Errors
/// When the kernel does not answer.
pub fn redirectors(socket: &mut Socket) -> Result<Vec<String>, WireError> {
    let mut found = Vec::new();
    for answer in socket.dump(&table::list(table::GET_RULE, table::ANY_FAMILY, None))? {
        let (Some(table), Some(chain)) = names(&answer, table::RULE_TABLE, table::RULE_CHAIN) else {
            continue;
        };
        let ours = table == TABLE || IPTABLES_CHAINS.contains(&chain);
        if !ours && expressions(&answer).any(|(name, data)| translates(name, data)) {
            let place = format!("chain {chain} of nftables table {table}");
            if !found.contains(&place) {
                found.push(place);
            }
        }
    }
    Ok(found)
}

/// The ports to which rules of ours redirect.
pub(crate) fn redirect_ports(socket: &mut Socket) -> Result<Vec<u16>, WireError> {
    let mut ports = Vec::new();
    for answer in socket.dump(&table::list(table::GET_RULE, table::ANY_FAMILY, None))? {
        let (Some(table), Some(chain)) = names(&answer, table::RULE_TABLE, table::RULE_CHAIN) else {
            continue;
        };
        let mut loaded = None;
        for (name, data) in expressions(&answer).filter(|_| table == TABLE || IPTABLES_CHAINS.contains(&chain)) {
            match name {
                "immediate" => {
                    let value = attr::find(data, table::IMMEDIATE_DATA);
                    loaded = value
                        .and_then(|value| attr::find_be16(value, table::DATA_VALUE))
                        .or(loaded);
                }
                "redir" => ports.extend(loaded),
                "target" => ports.extend(target_port(data, answer.family)),
                _ => {}
            }
        }
    }
    Ok(ports)
}

/// The port in iptables' own REDIRECT, which nftables carries without looking into it.
fn target_port(data: &[u8], family: u8) -> Option<u16> {
    let info = attr::find(data, TARGET_INFO).filter(|_| attr::find_text(data, TARGET_NAME) == Some("REDIRECT"))?;
    // Behind a count, flags and two addresses (IPv4), or flags and two addresses (IPv6).
    let offset = if family == table::nfproto(Family::V6) {
        4 + 2 * 16
    } else {
        4 + 4 + 2 * 4
    };
    Some(u16::from_be_bytes(info.get(offset..offset + 2)?.try_into().ok()?))
}

fn names(answer: &Answer, table: u16, chain: u16) -> (Option<&str>, Option<&str>) {
    (
        attr::find_text(&answer.attrs, table),
        attr::find_text(&answer.attrs, chain),
    )
}

/// Name and data of a rule's expressions.
fn expressions(answer: &Answer) -> impl Iterator<Item = (&str, &[u8])> {
    let list = attr::find(&answer.attrs, table::RULE_EXPRESSIONS).unwrap_or_default();
    parse(list).filter_map(|(_, expression)| {
        let name = attr::find_text(expression, table::EXPRESSION_NAME)?;
        Some((name, attr::find(expression, table::EXPRESSION_DATA).unwrap_or_default()))
    })
}

fn jump_target(immediate: &[u8]) -> Option<&str> {
    let verdict = attr::find(attr::find(immediate, table::IMMEDIATE_DATA)?, table::DATA_VERDICT)?;
    attr::find_text(verdict, table::VERDICT_CHAIN)
}

/// Natively, or through a target of iptables that nftables has no expression for.
fn translates(name: &str, data: &[u8]) -> bool {
    match name {
        "redir" | "tproxy" => true,
        "nat" => attr::find_be32(data, NAT_TYPE) == Some(NAT_DESTINATION),
        "target" => attr::find_text(data, TARGET_NAME).is_some_and(|target| TARGETS.contains(&target)),
        _ => false,
    }
}

/// The chains that we and Linkerd make with iptables, wherever they are.
pub(crate) const IPTABLES_CHAINS: [&str; 6] = [
    "PROXY_INIT_REDIRECT",
    "PROXY_INIT_OUTPUT",
    "PROXY_INIT_TPROXY_INBOUND",
    "PROXY_INIT_TPROXY",
    IPTABLES_ANSWERS,
    "PROXY_INIT_INVALID",
];
/// Open connections need it to their end.
pub(crate) const IPTABLES_ANSWERS: &str = "PROXY_INIT_ANSWERS";
const IPTABLES_TABLES: [&str; 2] = ["nat", "mangle"];
const NAT_TYPE: u16 = 1;
const NAT_DESTINATION: u32 = 1;
const TARGET_NAME: u16 = 1;
const TARGET_INFO: u16 = 3;
const TARGETS: [&str; 3] = ["REDIRECT", "DNAT", "TPROXY"];
