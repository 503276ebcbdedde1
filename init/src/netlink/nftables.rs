//! The nftables backend: compares our rules with those in force, and applies or removes them in one transaction.

use std::time::Duration;

use tokio::time::Instant;

use crate::netlink::attr;
use crate::netlink::iptables_nft::{self, IptablesNftTable};
use crate::netlink::socket::{Message, NetlinkError, Socket};
use crate::netlink::table::{self, Layout, Table};
use crate::nft_script;
use crate::rules::{Chain, Rules, TABLE};

/// The result of comparing the live rules with the wanted ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    Equal,
    Different,
    Absent,
}

/// The result of applying rules.
#[derive(Debug)]
pub struct Applied {
    pub change: Change,
    /// Features that were omitted because this kernel lacks them.
    pub warnings: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Applied,
    Unchanged,
}

/// Applies the rules, unless they are live already.
///
/// If the kernel lacks a feature, a simpler form is tried: without the match on local destinations, then with one table per
/// family.
///
/// # Errors
/// If the kernel refuses all forms; the error is that of the full form, and the previous rules stay. Also if other
/// processes keep changing rules until the wait is over.
pub fn apply(socket: &mut Socket, rules: &Rules, wait: Duration) -> Result<Applied, NetlinkError> {
    let mut first_error = None;
    for form in forms(rules) {
        match apply_form(socket, &form, wait) {
            Ok(change) => {
                let no_fib = (form.rules != *rules).then_some(
                    "this kernel cannot match local destinations (no fib expression): forwarded connections are redirected or \
                     dropped as inbound ones are",
                );
                let no_inet = (form.layout == Layout::Split)
                    .then_some("this kernel does not support NAT in inet tables: one table per family is used");
                let warnings = no_fib.into_iter().chain(no_inet).map(str::to_owned).collect();
                return Ok(Applied { change, warnings });
            }
            Err(error) if error.is_unsupported() => first_error = first_error.or(Some(error)),
            Err(error) => return Err(error),
        }
    }
    Err(first_error.unwrap_or(NetlinkError::ConcurrentChange))
}

/// A form of the rules: the complete rules, or an equivalent for kernels that lack a feature.
#[derive(Debug)]
struct Form {
    rules: Rules,
    layout: Layout,
    /// The hash of the complete rules, of which `rules` may be a simplification.
    hash: String,
}

impl Form {
    fn tables(&self) -> Vec<Table> {
        table::tables(&self.rules, self.layout, &self.hash)
    }
}

/// All forms of the rules, the complete one first.
fn forms(rules: &Rules) -> Vec<Form> {
    let hash = nft_script::hash(rules);
    let simpler = rules.without_local_match();
    [Layout::Inet, Layout::Split]
        .into_iter()
        .flat_map(|layout| [(layout, Some(rules)), (layout, simpler.as_ref())])
        .filter_map(|(layout, rules)| {
            Some(Form {
                rules: rules?.clone(),
                layout,
                hash: hash.clone(),
            })
        })
        .collect()
}

fn apply_form(socket: &mut Socket, form: &Form, wait: Duration) -> Result<Change, NetlinkError> {
    let wanted = form.tables();
    commit_with_retry(socket, wait, |socket| {
        let families = families_with_our_table(socket)?;
        if compare(socket, &wanted, &families)? == Comparison::Equal {
            return Ok(None);
        }
        Ok(Some(table::replace(&wanted, &families)))
    })
}

/// Compares the live rules with these, in each form in which a run may have applied them.
///
/// Two different rule sets can have the same simplified form; the stored hash of the complete rules tells them apart.
///
/// # Errors
/// If the kernel does not answer.
pub fn check(socket: &mut Socket, rules: &Rules) -> Result<Comparison, NetlinkError> {
    let families = families_with_our_table(socket)?;
    let mut comparison = Comparison::Absent;
    for form in forms(rules) {
        comparison = compare(socket, &form.tables(), &families)?;
        if comparison != Comparison::Different {
            break;
        }
    }
    Ok(comparison)
}

/// Removes our table, the rules of tulle or Linkerd made by iptables-nft, or both; returns the names of the backends and tables
/// from which rules were removed.
///
/// # Errors
/// If the kernel refuses; then nothing is removed.
pub fn remove(socket: &mut Socket, wait: Duration, which: MeshRules) -> Result<Vec<String>, NetlinkError> {
    let mut removed = Vec::new();
    commit_with_retry(socket, wait, |socket| {
        let (families, iptables_nft_tables) = find_rules(socket, which)?;
        removed = names(&families, &iptables_nft_tables);
        let tables = families.iter().map(|family| table::delete_table(*family));
        let messages: Vec<Message> = tables
            .chain(iptables_nft_tables.iter().flat_map(IptablesNftTable::removal))
            .collect();
        Ok((!messages.is_empty()).then_some(messages))
    })?;
    Ok(removed)
}

/// Lets new connections bypass the proxy while open connections stay translated; returns the ports to which open connections
/// are redirected.
///
/// Connection tracking stops translating when the last rule that uses it is removed, so one such rule stays.
///
/// # Errors
/// If the kernel refuses; then nothing changes.
pub fn bypass_new_connections(socket: &mut Socket, wait: Duration) -> Result<Vec<u16>, NetlinkError> {
    let mut ports = Vec::new();
    commit_with_retry(socket, wait, |socket| {
        let (families, iptables_nft_tables) = find_rules(socket, MeshRules::Both)?;
        if ports.is_empty() {
            ports = iptables_nft::redirect_ports(socket)?;
        }
        let mut messages = Vec::new();
        for family in &families {
            messages.extend([table::delete_table(*family), table::new_table(*family)]);
            for chain in [Chain::Prerouting, Chain::Output] {
                let hook = chain.hook(crate::options::DEFAULT_PRIORITY);
                messages.push(table::chain(*family, chain.name(), hook.as_ref()));
                let mut pass = table::conntrack_state(table::CT_STATE_NEW);
                pass.push(table::verdict(table::NF_ACCEPT, None));
                messages.push(table::rule_message(*family, TABLE, chain.name(), &pass, "draining"));
            }
            // In tproxy mode inbound connections are not translated, but the application's replies must still be routed to the
            // proxy.
            let chains = objects_in_our_table(socket, table::NFT_MSG_GETCHAIN, *family)?;
            let is_tproxy_replies =
                |chain: &Vec<u8>| attr::find_text(chain, table::NFTA_CHAIN_NAME) == Some(Chain::TproxyReplies.name());
            if chains.iter().any(is_tproxy_replies) {
                messages.extend(table::tproxy_replies(*family));
            }
        }
        messages.extend(
            iptables_nft_tables
                .iter()
                .flat_map(IptablesNftTable::bypass_new_connections),
        );
        Ok((!messages.is_empty()).then_some(messages))
    })?;
    Ok(ports)
}

/// Which rules of tulle or Linkerd, by the backend that made them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeshRules {
    /// Only our own nftables table.
    Nftables,
    /// Only rules made by iptables-nft.
    IptablesNft,
    /// Both. Rules of iptables-legacy are not in nftables and not included.
    Both,
}

fn find_rules(socket: &mut Socket, which: MeshRules) -> Result<(Vec<u8>, Vec<IptablesNftTable>), NetlinkError> {
    let families = if which == MeshRules::IptablesNft {
        Vec::new()
    } else {
        families_with_our_table(socket)?
    };
    let iptables_nft_tables = if which == MeshRules::Nftables {
        Vec::new()
    } else {
        iptables_nft::find_tables(socket)?
    };
    Ok((families, iptables_nft_tables))
}

fn names(families: &[u8], iptables_nft_tables: &[IptablesNftTable]) -> Vec<String> {
    let own = (!families.is_empty()).then(|| "nftables".to_owned());
    own.into_iter()
        .chain(iptables_nft_tables.iter().map(IptablesNftTable::name))
        .collect()
}

/// Commits the messages that `plan` computes from the live rules; repeats both steps if another process has changed rules in
/// between.
fn commit_with_retry(
    socket: &mut Socket,
    wait: Duration,
    mut plan: impl FnMut(&mut Socket) -> Result<Option<Vec<Message>>, NetlinkError>,
) -> Result<Change, NetlinkError> {
    let deadline = Instant::now() + wait;
    loop {
        let generation = socket.generation()?;
        let Some(messages) = plan(socket)? else {
            return Ok(Change::Unchanged);
        };
        match socket.commit(&messages, generation) {
            Err(NetlinkError::ConcurrentChange) if Instant::now() < deadline => {}
            done => return done.map(|()| Change::Applied),
        }
    }
}

/// The families in which our table exists; `inet` counts as a family.
fn families_with_our_table(socket: &mut Socket) -> Result<Vec<u8>, NetlinkError> {
    let tables = socket.dump(&table::list(table::NFT_MSG_GETTABLE, table::NFPROTO_UNSPEC, None))?;
    let ours = tables
        .iter()
        .filter(|table| attr::find_text(&table.attrs, table::NFTA_TABLE_NAME) == Some(TABLE));
    Ok(ours.map(|table| table.family).collect())
}

fn compare(socket: &mut Socket, wanted: &[Table], families: &[u8]) -> Result<Comparison, NetlinkError> {
    if families.is_empty() {
        return Ok(Comparison::Absent);
    }
    let same_tables = wanted.len() == families.len() && wanted.iter().all(|table| families.contains(&table.family));
    if !same_tables {
        return Ok(Comparison::Different);
    }
    for table in wanted {
        let sets = table.sets.iter().map(|set| set.message.clone()).collect();
        let kinds = [
            (table::NFT_MSG_GETCHAIN, table::NFTA_CHAIN_NAME, table.chains.clone()),
            (table::NFT_MSG_GETSET, table::NFTA_SET_NAME, sets),
            (table::NFT_MSG_GETRULE, table::NFTA_RULE_CHAIN, table.rules.clone()),
        ];
        for (kind, name, wanted) in kinds {
            if !has_same_objects(objects_in_our_table(socket, kind, table.family)?, wanted, name) {
                return Ok(Comparison::Different);
            }
        }
        for set in &table.sets {
            let shown = socket.dump(&table::list_elements(table.family, set.name))?;
            let mut shown: Vec<_> = shown.iter().flat_map(|part| table::shown_bounds(&part.attrs)).collect();
            let mut wanted: Vec<_> = table::bounds(&set.ranges).collect();
            shown.sort();
            wanted.sort();
            if shown != wanted {
                return Ok(Comparison::Different);
            }
        }
    }
    Ok(Comparison::Equal)
}

/// The objects of one kind in our table.
fn objects_in_our_table(socket: &mut Socket, kind: u16, family: u8) -> Result<Vec<Vec<u8>>, NetlinkError> {
    let all = socket.dump(&table::list(kind, family, Some(TABLE)))?;
    // The kernel lists chains of all tables; the first attribute of every object is its table.
    let ours = all
        .into_iter()
        .filter(|answer| attr::find_text(&answer.attrs, table::NFTA_TABLE_NAME) == Some(TABLE));
    Ok(ours.map(|answer| answer.attrs).collect())
}

/// Whether exactly the wanted objects exist. Objects with the same name (or in the same chain) must have the same order.
///
/// The kernel lists chains and sets in an order of its own.
fn has_same_objects(mut shown: Vec<Vec<u8>>, mut wanted: Vec<Message>, name: u16) -> bool {
    let by_name = |attrs: &[u8]| attr::find(attrs, name).map(<[u8]>::to_vec);
    shown.sort_by_key(|attrs| by_name(attrs));
    wanted.sort_by_key(|message| by_name(message.attrs.as_bytes()));
    shown.len() == wanted.len()
        && shown
            .iter()
            .zip(&wanted)
            .all(|(shown, wanted)| attr::covers(shown, wanted.attrs.as_bytes()))
}

#[cfg(test)]
mod tests {
    use tulle_core::netns::Namespace;

    use super::*;
    use crate::options::{InvalidPackets, Options, Scope};
    use crate::rules::build_rules;
    use crate::rules::tests::example;

    /// Tests the forms for kernels without features that the test kernel has.
    #[test]
    fn the_simpler_forms_are_applied_recognised_and_replaced() {
        if !nix::unistd::Uid::effective().is_root() {
            assert!(std::env::var_os("CI").is_none(), "network namespaces need root");
            eprintln!("SKIPPED: network namespaces need root");
            return;
        }
        let namespace = Namespace::create(&format!("ti-forms-{}", std::process::id())).unwrap();
        let rules = build_rules(&Options {
            invalid: InvalidPackets::Drop,
            ..example()
        });
        let other_scope = build_rules(&Options {
            scope: Scope::All,
            invalid: InvalidPackets::Drop,
            ..example()
        });
        let wait = Duration::from_secs(1);
        namespace
            .run(|| {
                let mut socket = Socket::open().unwrap();
                for form in forms(&rules) {
                    assert_eq!(
                        apply_form(&mut socket, &form, wait).unwrap(),
                        Change::Applied,
                        "{form:?}"
                    );
                    assert_eq!(
                        apply_form(&mut socket, &form, wait).unwrap(),
                        Change::Unchanged,
                        "{form:?}"
                    );
                    assert_eq!(check(&mut socket, &rules).unwrap(), Comparison::Equal, "{form:?}");
                    assert_eq!(
                        check(&mut socket, &other_scope).unwrap(),
                        Comparison::Different,
                        "{form:?}"
                    );
                }
                assert_eq!(remove(&mut socket, wait, MeshRules::Both).unwrap(), ["nftables"]);
                assert_eq!(check(&mut socket, &rules).unwrap(), Comparison::Absent);
            })
            .unwrap();
    }
}
