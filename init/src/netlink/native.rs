//! Our rules in nftables: put in place, compared and removed, each in one transaction.

use std::time::Duration;

use tokio::time::Instant;

use crate::netlink::attr;
use crate::netlink::foreign::{self, Xtables};
use crate::netlink::table::{self, Layout, Table};
use crate::netlink::wire::{Message, Socket, WireError};
use crate::nft_text::TABLE;
use crate::rules::{Chain, Rules};

/// How the live rules relate to the wanted ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    Equal,
    Different,
    Absent,
}

/// What an application of rules came to.
#[derive(Debug)]
pub struct Applied {
    pub change: Change,
    /// What had to be left out for this kernel.
    pub warnings: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Applied,
    Unchanged,
}

/// Puts the rules in place, unless they are already.
///
/// Where the kernel lacks a part, the next best form is tried: without the test for local destinations, then with a
/// table a family.
///
/// # Errors
/// What the kernel refused of the full form; the rules are as before then. Also when others keep changing rules.
pub fn apply(socket: &mut Socket, rules: &Rules, wait: Duration) -> Result<Applied, WireError> {
    let simpler = rules.any_destination();
    let forms = [Layout::Inet, Layout::Split]
        .into_iter()
        .flat_map(|layout| [(layout, Some(rules)), (layout, simpler.as_ref())])
        .filter_map(|(layout, rules)| Some((layout, rules?)));
    let mut first = None;
    for (layout, form) in forms {
        match apply_form(socket, form, layout, wait) {
            Ok(change) => {
                let no_fib = (form != rules).then_some(
                    "this kernel cannot tell local destinations (no fib expression): forwarded traffic is redirected too",
                );
                let no_inet = (layout == Layout::Split).then_some(
                    "this kernel cannot translate addresses in tables of both families: one table a family is used",
                );
                let warnings = no_fib.into_iter().chain(no_inet).map(str::to_owned).collect();
                return Ok(Applied { change, warnings });
            }
            Err(error) if error.unsupported() => first = first.or(Some(error)),
            Err(error) => return Err(error),
        }
    }
    Err(first.unwrap_or(WireError::Raced))
}

fn apply_form(socket: &mut Socket, rules: &Rules, layout: Layout, wait: Duration) -> Result<Change, WireError> {
    let wanted = table::tables(rules, layout);
    transact(socket, wait, |socket| {
        let present = present(socket)?;
        if compare(socket, &wanted, &present)? == Live::Equal {
            return Ok(None);
        }
        Ok(Some(table::replace(&wanted, &present)))
    })
}

/// How the live rules relate to these.
///
/// # Errors
/// When the kernel does not answer.
pub fn check(socket: &mut Socket, rules: &Rules) -> Result<Live, WireError> {
    let present = present(socket)?;
    compare(socket, &table::tables(rules, Layout::Inet), &present)
}

/// Removes our table, and what iptables' nft flavour has of ours; says what there was.
///
/// # Errors
/// What the kernel refused; nothing is removed then.
pub fn remove(socket: &mut Socket, wait: Duration, whose: Whose) -> Result<Vec<String>, WireError> {
    let mut removed = Vec::new();
    transact(socket, wait, |socket| {
        let (present, xtables) = found(socket, whose)?;
        removed = names(&present, &xtables);
        let tables = present.iter().map(|family| table::delete_table(*family));
        let messages: Vec<Message> = tables.chain(xtables.iter().flat_map(Xtables::removal)).collect();
        Ok((!messages.is_empty()).then_some(messages))
    })?;
    Ok(removed)
}

/// Lets new connections pass while open ones keep being translated; says which ports they are translated to.
///
/// Translation ends for all connections when the last rule that uses connection tracking goes, so one stays.
///
/// # Errors
/// What the kernel refused; nothing changes then.
pub fn let_pass(socket: &mut Socket, wait: Duration) -> Result<Vec<u16>, WireError> {
    let mut ports = Vec::new();
    transact(socket, wait, |socket| {
        let (present, xtables) = found(socket, Whose::All)?;
        if ports.is_empty() {
            ports = foreign::redirect_ports(socket)?;
        }
        let mut messages = Vec::new();
        for family in &present {
            messages.extend([table::delete_table(*family), table::new_table(*family)]);
            for chain in [Chain::Prerouting, Chain::Output] {
                let hook = chain.hook(crate::options::DEFAULT_PRIORITY);
                messages.push(table::chain(*family, chain.name(), hook.as_ref()));
                let mut pass = table::conntrack_state(table::CT_NEW);
                pass.push(table::verdict(table::ACCEPTED, None));
                messages.push(table::rule_message(*family, TABLE, chain.name(), &pass, "draining"));
            }
            // Connections of clients that keep their address have no translation, but answers that must come back.
            let chains = of_ours(socket, table::GET_CHAIN, *family)?;
            let answers = |chain: &Vec<u8>| attr::find_text(chain, table::CHAIN_NAME) == Some(Chain::Answers.name());
            if chains.iter().any(answers) {
                messages.extend(table::answers(*family));
            }
        }
        messages.extend(xtables.iter().flat_map(Xtables::pass));
        Ok((!messages.is_empty()).then_some(messages))
    })?;
    Ok(ports)
}

/// Which rules to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Only our own table.
    Native,
    /// Only those of iptables' nft flavour.
    Xtables,
    All,
}

fn found(socket: &mut Socket, whose: Whose) -> Result<(Vec<u8>, Vec<Xtables>), WireError> {
    let present = if whose == Whose::Xtables {
        Vec::new()
    } else {
        present(socket)?
    };
    let xtables = if whose == Whose::Native {
        Vec::new()
    } else {
        foreign::xtables(socket)?
    };
    Ok((present, xtables))
}

fn names(present: &[u8], xtables: &[Xtables]) -> Vec<String> {
    let native = (!present.is_empty()).then(|| "native".to_owned());
    native.into_iter().chain(xtables.iter().map(Xtables::name)).collect()
}

/// Plans on what is there and commits, and does both again when somebody else was faster.
fn transact(
    socket: &mut Socket,
    wait: Duration,
    mut plan: impl FnMut(&mut Socket) -> Result<Option<Vec<Message>>, WireError>,
) -> Result<Change, WireError> {
    let deadline = Instant::now() + wait;
    loop {
        let generation = socket.generation()?;
        let Some(messages) = plan(socket)? else {
            return Ok(Change::Unchanged);
        };
        match socket.commit(&messages, generation) {
            Err(WireError::Raced) if Instant::now() < deadline => {}
            done => return done.map(|()| Change::Applied),
        }
    }
}

/// The families in which a table of ours exists.
fn present(socket: &mut Socket) -> Result<Vec<u8>, WireError> {
    let tables = socket.dump(&table::list(table::GET_TABLE, table::ANY_FAMILY, None))?;
    let ours = tables
        .iter()
        .filter(|table| attr::find_text(&table.attrs, table::TABLE_NAME) == Some(TABLE));
    Ok(ours.map(|table| table.family).collect())
}

fn compare(socket: &mut Socket, wanted: &[Table], present: &[u8]) -> Result<Live, WireError> {
    if present.is_empty() {
        return Ok(Live::Absent);
    }
    let same_tables = wanted.len() == present.len() && wanted.iter().all(|table| present.contains(&table.family));
    for table in wanted.iter().filter(|_| same_tables) {
        let sets = table.sets.iter().map(|set| set.message.clone()).collect();
        let kinds = [
            (table::GET_CHAIN, table::CHAIN_NAME, table.chains.clone()),
            (table::GET_SET, table::SET_NAME, sets),
            (table::GET_RULE, table::RULE_CHAIN, table.rules.clone()),
        ];
        for (kind, name, wanted) in kinds {
            if !same(of_ours(socket, kind, table.family)?, wanted, name) {
                return Ok(Live::Different);
            }
        }
        for set in &table.sets {
            let shown = socket.dump(&table::list_elements(table.family, set.name))?;
            let mut shown: Vec<_> = shown.iter().flat_map(|part| table::shown_bounds(&part.attrs)).collect();
            let mut wanted: Vec<_> = table::bounds(&set.ranges).collect();
            shown.sort();
            wanted.sort();
            if shown != wanted {
                return Ok(Live::Different);
            }
        }
    }
    Ok(if same_tables { Live::Equal } else { Live::Different })
}

/// The objects of a kind in our table.
fn of_ours(socket: &mut Socket, kind: u16, family: u8) -> Result<Vec<Vec<u8>>, WireError> {
    let all = socket.dump(&table::list(kind, family, Some(TABLE)))?;
    // Chains are listed whatever the table; every kind of object names its table in its first attribute.
    let ours = all
        .into_iter()
        .filter(|answer| attr::find_text(&answer.attrs, table::TABLE_NAME) == Some(TABLE));
    Ok(ours.map(|answer| answer.attrs).collect())
}

/// Whether exactly the wanted objects are shown, those with the same name (or in the same chain) in the same order.
///
/// Listings go through chains and sets in an order of the kernel's own.
fn same(mut shown: Vec<Vec<u8>>, mut wanted: Vec<Message>, name: u16) -> bool {
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
    use crate::options::{Invalid, Options};
    use crate::rules::plan;
    use crate::rules::tests::example;

    /// What kernels get that lack parts which the kernel of the tests has.
    #[test]
    fn the_lesser_forms_are_applied_recognised_and_replaced_too() {
        if !nix::unistd::Uid::effective().is_root() {
            assert!(std::env::var_os("CI").is_none(), "network namespaces need root");
            eprintln!("SKIPPED: network namespaces need root");
            return;
        }
        let namespace = Namespace::create(&format!("ti-forms-{}", std::process::id())).unwrap();
        let rules = plan(&Options {
            invalid: Invalid::Drop,
            ..example()
        });
        let lesser = rules.any_destination().unwrap();
        let wait = Duration::from_secs(1);
        namespace
            .run(|| {
                let mut socket = Socket::open().unwrap();
                let mut apply = |rules: &Rules, layout| apply_form(&mut socket, rules, layout, wait).unwrap();
                assert_eq!(apply(&rules, Layout::Split), Change::Applied);
                assert_eq!(apply(&rules, Layout::Split), Change::Unchanged);
                assert_eq!(apply(&lesser, Layout::Split), Change::Applied);
                assert_eq!(apply(&lesser, Layout::Inet), Change::Applied);
                assert_eq!(check(&mut socket, &lesser).unwrap(), Live::Equal);
                assert_eq!(check(&mut socket, &rules).unwrap(), Live::Different);
                assert_eq!(remove(&mut socket, wait, Whose::All).unwrap(), ["native"]);
                assert_eq!(check(&mut socket, &rules).unwrap(), Live::Absent);
            })
            .unwrap();
    }
}
