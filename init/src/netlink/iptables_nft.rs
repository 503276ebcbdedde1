//! Rules outside our table: those of tulle and Linkerd made by iptables-nft, and redirects of other programs.

use crate::iptables_chains::{self, is_mesh_chain};
use crate::netlink::attr::{self, Attrs, parse};
use crate::netlink::socket::{Answer, Message, NFNL_SUBSYS_NFTABLES, NetlinkError, Socket};
use crate::netlink::table::{self, verdict};
use crate::options::Family;
use crate::rules::TABLE;

/// The chains and jumps of tulle or Linkerd in one table of iptables-nft.
#[derive(Clone, Debug)]
pub(crate) struct IptablesNftTable {
    family: u8,
    table: String,
    chains: Vec<String>,
    /// Chain and handle of the rules in other chains that jump to these.
    jumps: Vec<(String, u64)>,
}

/// The iptables-nft tables that contain chains of tulle or Linkerd.
pub(crate) fn find_tables(socket: &mut Socket) -> Result<Vec<IptablesNftTable>, NetlinkError> {
    let mut found: Vec<IptablesNftTable> = Vec::new();
    for answer in socket.dump(&table::list(table::NFT_MSG_GETCHAIN, table::NFPROTO_UNSPEC, None))? {
        let (Some(table), Some(chain)) = names(&answer, table::NFTA_CHAIN_TABLE, table::NFTA_CHAIN_NAME) else {
            continue;
        };
        let is_searched_table = iptables_chains::TABLES.iter().any(|(searched, _)| *searched == table);
        if !is_mesh_chain(chain) || !is_searched_table {
            continue;
        }
        match found
            .iter_mut()
            .find(|other| other.family == answer.family && other.table == table)
        {
            Some(other) => other.chains.push(chain.to_owned()),
            None => found.push(IptablesNftTable {
                family: answer.family,
                table: table.to_owned(),
                chains: vec![chain.to_owned()],
                jumps: Vec::new(),
            }),
        }
    }
    for mesh_table in &mut found {
        for answer in socket.dump(&table::list(
            table::NFT_MSG_GETRULE,
            mesh_table.family,
            Some(&mesh_table.table),
        ))? {
            let (Some(table), Some(chain)) = names(&answer, table::NFTA_RULE_TABLE, table::NFTA_RULE_CHAIN) else {
                continue;
            };
            let target = expressions(&answer).find_map(|(_, data)| jump_target(data));
            let handle = attr::find(&answer.attrs, table::NFTA_RULE_HANDLE).and_then(|handle| handle.try_into().ok());
            let Some(handle) = handle.map(u64::from_be_bytes) else {
                continue;
            };
            let is_listed = |chain: &str| mesh_table.chains.iter().any(|listed| listed == chain);
            if table == mesh_table.table && !is_listed(chain) && target.is_some_and(is_listed) {
                mesh_table.jumps.push((chain.to_owned(), handle));
            }
        }
    }
    Ok(found)
}

impl IptablesNftTable {
    pub(crate) fn name(&self) -> String {
        let family = if self.family == table::nfproto(Family::V6) {
            "ipv6"
        } else {
            "ipv4"
        };
        format!("iptables-nft {family} {}", self.table)
    }

    /// Messages that delete these chains and the jumps to them, and nothing else.
    pub(crate) fn removal(&self) -> Vec<Message> {
        let jumps = self.jumps.iter().map(|(chain, handle)| {
            let attrs = Attrs::new()
                .text(table::NFTA_RULE_TABLE, &self.table)
                .text(table::NFTA_RULE_CHAIN, chain);
            self.delete_message(
                table::NFT_MSG_DELRULE,
                attrs.be64(table::NFTA_RULE_HANDLE, *handle),
                chain,
            )
        });
        // All chains are emptied before the first is deleted, because they may jump to one another.
        let emptied = self.chains.iter().map(|chain| self.flush_message(chain));
        let chains = self.chains.iter().map(|chain| {
            let attrs = Attrs::new()
                .text(table::NFTA_CHAIN_TABLE, &self.table)
                .text(table::NFTA_CHAIN_NAME, chain);
            self.delete_message(table::NFT_MSG_DELCHAIN, attrs, chain)
        });
        jumps.chain(emptied).chain(chains).collect()
    }

    /// Messages that make these chains return new connections unchanged, with a rule that keeps connection tracking active.
    pub(crate) fn bypass_new_connections(&self) -> Vec<Message> {
        let bypassed = || {
            self.chains
                .iter()
                .filter(|chain| *chain != iptables_chains::TPROXY_REPLIES)
        };
        let filled = bypassed().map(|chain| {
            let mut pass = table::conntrack_state(table::CT_STATE_NEW);
            pass.push(verdict(table::NFT_RETURN, None));
            table::rule_message(self.family, &self.table, chain, &pass, "draining")
        });
        bypassed()
            .map(|chain| self.flush_message(chain))
            .chain(filled)
            .collect()
    }

    /// The message that deletes all rules of a chain.
    fn flush_message(&self, chain: &str) -> Message {
        let attrs = Attrs::new()
            .text(table::NFTA_RULE_TABLE, &self.table)
            .text(table::NFTA_RULE_CHAIN, chain);
        self.delete_message(table::NFT_MSG_DELRULE, attrs, chain)
    }

    fn delete_message(&self, kind: u16, attrs: Attrs, chain: &str) -> Message {
        let what = format!("a removal in chain {chain} of table {} ({})", self.table, self.name());
        Message {
            kind: NFNL_SUBSYS_NFTABLES << 8 | kind,
            flags: 0,
            family: self.family,
            attrs,
            what,
        }
    }
}

/// Tables and chains of other programs that redirect connections, for a warning.
///
/// # Errors
/// If the kernel does not answer.
pub fn foreign_redirect_chains(socket: &mut Socket) -> Result<Vec<String>, NetlinkError> {
    let mut found = Vec::new();
    for answer in socket.dump(&table::list(table::NFT_MSG_GETRULE, table::NFPROTO_UNSPEC, None))? {
        let (Some(table), Some(chain)) = names(&answer, table::NFTA_RULE_TABLE, table::NFTA_RULE_CHAIN) else {
            continue;
        };
        let ours = table == TABLE || is_mesh_chain(chain);
        if !ours && expressions(&answer).any(|(name, data)| is_redirect(name, data)) {
            let location = format!("chain {chain} of nftables table {table}");
            if !found.contains(&location) {
                found.push(location);
            }
        }
    }
    Ok(found)
}

/// The ports to which rules of tulle or Linkerd redirect.
pub(crate) fn redirect_ports(socket: &mut Socket) -> Result<Vec<u16>, NetlinkError> {
    let mut ports = Vec::new();
    for answer in socket.dump(&table::list(table::NFT_MSG_GETRULE, table::NFPROTO_UNSPEC, None))? {
        let (Some(table), Some(chain)) = names(&answer, table::NFTA_RULE_TABLE, table::NFTA_RULE_CHAIN) else {
            continue;
        };
        let mut loaded = None;
        for (name, data) in expressions(&answer).filter(|_| table == TABLE || is_mesh_chain(chain)) {
            match name {
                "immediate" => {
                    let value = attr::find(data, table::NFTA_IMMEDIATE_DATA);
                    loaded = value
                        .and_then(|value| attr::find_be16(value, table::NFTA_DATA_VALUE))
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

/// The port of iptables' REDIRECT target, whose data nftables treats as opaque.
fn target_port(data: &[u8], family: u8) -> Option<u16> {
    let info =
        attr::find(data, NFTA_TARGET_INFO).filter(|_| attr::find_text(data, NFTA_TARGET_NAME) == Some("REDIRECT"))?;
    // The port follows a count, flags and two addresses (IPv4), or flags and two addresses (IPv6).
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

/// Names and data of a rule's expressions.
fn expressions(answer: &Answer) -> impl Iterator<Item = (&str, &[u8])> {
    let list = attr::find(&answer.attrs, table::NFTA_RULE_EXPRESSIONS).unwrap_or_default();
    parse(list).filter_map(|(_, expression)| {
        let name = attr::find_text(expression, table::NFTA_EXPR_NAME)?;
        Some((name, attr::find(expression, table::NFTA_EXPR_DATA).unwrap_or_default()))
    })
}

fn jump_target(immediate: &[u8]) -> Option<&str> {
    let verdict = attr::find(
        attr::find(immediate, table::NFTA_IMMEDIATE_DATA)?,
        table::NFTA_DATA_VERDICT,
    )?;
    attr::find_text(verdict, table::NFTA_VERDICT_CHAIN)
}

/// Whether an expression redirects connections. It is a native nftables expression, or contains an iptables target.
fn is_redirect(name: &str, data: &[u8]) -> bool {
    match name {
        "redir" | "tproxy" => true,
        "nat" => attr::find_be32(data, NFTA_NAT_TYPE) == Some(NFT_NAT_DNAT),
        "target" => attr::find_text(data, NFTA_TARGET_NAME).is_some_and(|target| REDIRECT_TARGETS.contains(&target)),
        _ => false,
    }
}

const NFTA_NAT_TYPE: u16 = 1;
const NFT_NAT_DNAT: u32 = 1;
const NFTA_TARGET_NAME: u16 = 1;
const NFTA_TARGET_INFO: u16 = 3;
const REDIRECT_TARGETS: [&str; 3] = ["REDIRECT", "DNAT", "TPROXY"];
