//! The iptables backend: one run of `*-restore --noflush` per family, which commits table by table. Then the rules are read
//! back and compared.
//!
//! Chain names and comments are those of Linkerd where it has the same chain or rule, so that either tool can repair the rules
//! of the other.

mod text;

use std::fs::File;
use std::io::{self, Seek, Write};
use std::panic::resume_unwind;
use std::process::Command;
use std::time::Duration;
use std::{fmt, fs, thread};

use nix::sys::memfd::{MFdFlags, memfd_create};

use tulle_core::capabilities;

use crate::iptables::text::SavedRules;
use crate::netlink::nftables::{Change, Comparison};
use crate::options::Family;
use crate::rules::Rules;

/// The flavour of the iptables programs, which determines the kernel interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// iptables-nft, whose rules are in nftables.
    Nft,
    Legacy,
    /// The programs without a suffix; their flavour depends on the system.
    Plain,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IptablesError {
    #[error("starting {program}; is it installed and on PATH?")]
    Missing {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("preparing the input of {program}")]
    Input {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("{program} failed ({status}): {answer}")]
    Refused {
        program: String,
        status: String,
        answer: String,
    },
    #[error("{program} accepted the rules, but reading {family} back shows different ones")]
    NotApplied { program: String, family: &'static str },
    #[error("{cause}; and the previous rules could not be put back: {undo}")]
    NotUndone { cause: Box<Self>, undo: Box<Self> },
}

impl IptablesError {
    /// Whether another process held the lock of iptables until the end of the wait. The error text is checked, because the exit
    /// status 4 has two meanings: the nft flavour also exits with 4 if the kernel refuses the rules.
    pub fn is_lock_held(&self) -> bool {
        match self {
            Self::Refused { answer, .. } => answer.contains("xtables lock"),
            Self::NotUndone { cause, .. } => cause.is_lock_held(),
            Self::Missing { .. } | Self::Input { .. } | Self::NotApplied { .. } => false,
        }
    }

    /// Whether the IPv6 programs are missing, refuse the rules although no other process holds the lock, or accept them without
    /// applying them.
    pub fn lacks_ipv6(&self) -> bool {
        match self {
            Self::Missing { program, .. } => program.starts_with(IPV6_PROGRAMS),
            Self::Refused { program, .. } => program.starts_with(IPV6_PROGRAMS) && !self.is_lock_held(),
            Self::NotApplied { family, .. } => *family == "ipv6",
            Self::NotUndone { cause, .. } => cause.lacks_ipv6(),
            Self::Input { .. } => false,
        }
    }
}

/// Applies the rules in each family, unless they are live already.
///
/// # Errors
/// If a program is missing or fails. Changes made by then are undone, so the previous rules stay, unless the error is
/// [`IptablesError::NotUndone`].
pub fn apply(flavour: Flavour, rules: &Rules, wait: Duration) -> Result<Change, IptablesError> {
    let plans: Vec<Plan> = read_all_rules(flavour, rules)?
        .into_iter()
        .map(|(family, saved)| Plan {
            family,
            script: text::apply_script(rules, family, &saved),
            saved,
        })
        .filter(|plan| !plan.script.is_empty())
        .collect();
    if plans.is_empty() {
        return Ok(Change::Unchanged);
    }
    // A run with `--test` first would take as long as the real run, and would not check the rules in the kernel.
    let done = run_in_parallel(&plans, |plan| {
        restore(flavour, plan.family, &plan.script, wait, RestoreMode::KeepOthers)?;
        verify_applied(flavour, plan.family, rules)
    });
    match done {
        Ok(_) => Ok(Change::Applied),
        // Some tables may be committed. On the others, the undo has no effect.
        Err(cause) => Err(undo(flavour, &plans, wait, cause)),
    }
}

/// Compares the live rules of one flavour with the wanted rules.
///
/// # Errors
/// If a program is missing or fails.
pub fn check(flavour: Flavour, rules: &Rules) -> Result<Comparison, IptablesError> {
    let saved = read_all_rules(flavour, rules)?;
    let equal = saved.iter().all(|(family, saved)| text::matches(rules, *family, saved));
    Ok(match saved.iter().any(|(_, saved)| saved.has_mesh_rules()) {
        true if equal => Comparison::Equal,
        true => Comparison::Different,
        false => Comparison::Absent,
    })
}

/// Removes the rules of tulle and Linkerd from both families of one flavour; returns the names of the backends and tables
/// from which rules were removed.
///
/// # Errors
/// If a program is missing or fails.
pub fn remove(flavour: Flavour, wait: Duration) -> Result<Vec<String>, IptablesError> {
    let mut removed = Vec::new();
    for family in families_to_search(flavour) {
        let script = text::removal_script(&read_rules(flavour, family)?);
        if !script.is_empty() {
            restore(flavour, family, &script, wait, RestoreMode::KeepOthers)?;
            removed.push(format!("{flavour} {}", family.name()));
        }
    }
    Ok(removed)
}

/// Lets new connections bypass the proxy while open connections stay translated; returns the ports to which open connections
/// are redirected.
///
/// # Errors
/// If a program is missing or fails.
pub fn bypass_new_connections(flavour: Flavour, wait: Duration) -> Result<Vec<u16>, IptablesError> {
    let mut ports = Vec::new();
    for family in families_to_search(flavour) {
        let saved = read_rules(flavour, family)?;
        ports.extend(saved.redirect_ports());
        let script = text::bypass_script(&saved);
        if !script.is_empty() {
            restore(flavour, family, &script, wait, RestoreMode::KeepOthers)?;
        }
    }
    Ok(ports)
}

/// Chains of other programs that translate destinations, for a warning.
///
/// # Errors
/// If a program is missing or fails.
pub fn foreign_dnat_chains(flavour: Flavour) -> Result<Vec<String>, IptablesError> {
    let mut found = Vec::new();
    for family in families_to_search(flavour) {
        let chains = read_rules(flavour, family)?.foreign_dnat_chains();
        found.extend(
            chains
                .iter()
                .map(|chain| format!("chain {chain} of {flavour} ({})", family.name())),
        );
    }
    Ok(found)
}

/// The input of the restore programs in a namespace without rules: one pair of command and script per family.
#[must_use]
pub fn scripts(flavour: Flavour, rules: &Rules) -> Vec<(String, String)> {
    rules
        .present_families()
        .map(|family| {
            let command = format!(
                "{} --noflush --wait {}",
                program(flavour, family, "restore"),
                DEFAULT_WAIT_SECS
            );
            (command, text::apply_script(rules, family, &SavedRules::default()))
        })
        .collect()
}

/// Default number of seconds to wait for locks.
pub const DEFAULT_WAIT_SECS: u64 = 5;

/// Whether legacy tables exist that can hold rules of tulle or Linkerd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegacyTables {
    Present,
    Absent,
    /// This user may not list them; only root may.
    Unknown,
}

/// Lists the legacy tables of both families.
#[must_use]
pub fn legacy_tables() -> LegacyTables {
    let of_families = [Family::V4, Family::V6].map(legacy_tables_in_family);
    [LegacyTables::Present, LegacyTables::Unknown]
        .into_iter()
        .find(|state| of_families.contains(state))
        .unwrap_or(LegacyTables::Absent)
}

/// The script for one family, and the rules that were saved before.
#[derive(Debug)]
struct Plan {
    family: Family,
    script: String,
    saved: SavedRules,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RestoreMode {
    /// Changes the named chains and keeps the rest.
    KeepOthers,
    /// Replaces the named tables.
    ReplaceTables,
}

fn verify_applied(flavour: Flavour, family: Family, rules: &Rules) -> Result<(), IptablesError> {
    if text::matches(rules, family, &read_rules(flavour, family)?) {
        return Ok(());
    }
    Err(IptablesError::NotApplied {
        program: program(flavour, family, "restore"),
        family: family.name(),
    })
}

fn undo(flavour: Flavour, plans: &[Plan], wait: Duration, cause: IptablesError) -> IptablesError {
    let undone = run_in_parallel(plans, |plan| {
        let previous = text::undo_script(&plan.script, &plan.saved);
        restore(flavour, plan.family, &previous, wait, RestoreMode::ReplaceTables)
    });
    match undone {
        Ok(_) => cause,
        Err(undo) => IptablesError::NotUndone {
            cause: Box::new(cause),
            undo: Box::new(undo),
        },
    }
}

/// The live rules of both families. A family without wanted rules may still have rules of a previous run.
fn read_all_rules(flavour: Flavour, rules: &Rules) -> Result<Vec<(Family, SavedRules)>, IptablesError> {
    run_in_parallel(&[Family::V4, Family::V6], |family| match read_rules(flavour, *family) {
        // A family that is unavailable has no rules of tulle or Linkerd.
        Err(_) if rules.for_family(*family).next().is_none() => Ok((*family, SavedRules::default())),
        saved => Ok((*family, saved?)),
    })
}

/// Runs `work` for all items (families, or plans of families) in parallel, and waits for all of them; the time is spent in child
/// processes.
fn run_in_parallel<I: Sync, T: Send>(
    items: &[I],
    work: impl Fn(&I) -> Result<T, IptablesError> + Sync,
) -> Result<Vec<T>, IptablesError> {
    let results: Vec<_> = thread::scope(|scope| {
        let runs: Vec<_> = items.iter().map(|item| scope.spawn(|| work(item))).collect();
        let joined = runs.into_iter().map(|run| run.join());
        joined
            .map(|result| result.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    results.into_iter().collect()
}

/// Reads the live rules with the `-save` program, without naming a table: the legacy programs create each table that is named.
///
/// Users other than root name the legacy tables nevertheless, because they cannot list the existing ones.
fn read_rules(flavour: Flavour, family: Family) -> Result<SavedRules, IptablesError> {
    let program = program(flavour, family, "save");
    if flavour == Flavour::Legacy && legacy_tables_in_family(family) == LegacyTables::Unknown {
        let nat = run(&program, &["-t", "nat"], "")?;
        // A kernel without the mangle table has no rules in it; if rules are wanted, applying them reports the error.
        let mangle = run(&program, &["-t", "mangle"], "").unwrap_or_default();
        return Ok(SavedRules::parse(&(nat + &mangle)));
    }
    Ok(SavedRules::parse(&run(&program, &[], "")?))
}

/// The families that can have rules: for the legacy flavour those with a table, otherwise both. A user other than root cannot
/// list the legacy tables; then no family of the legacy flavour is searched, because [`read_rules`] would create the tables.
fn families_to_search(flavour: Flavour) -> impl Iterator<Item = Family> {
    let families = [Family::V4, Family::V6].into_iter();
    families
        .filter(move |family| flavour != Flavour::Legacy || legacy_tables_in_family(*family) == LegacyTables::Present)
}

/// Whether a legacy nat or mangle table of this family exists in this network namespace.
fn legacy_tables_in_family(family: Family) -> LegacyTables {
    let list = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    match fs::read_to_string(list) {
        Ok(names) if names.lines().any(|name| name == "nat" || name == "mangle") => LegacyTables::Present,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => LegacyTables::Unknown,
        // Without the file, the kernel has no legacy tables.
        Ok(_) | Err(_) => LegacyTables::Absent,
    }
}

fn restore(
    flavour: Flavour,
    family: Family,
    script: &str,
    wait: Duration,
    mode: RestoreMode,
) -> Result<(), IptablesError> {
    let program = program(flavour, family, "restore");
    let wait = wait.as_secs().max(1).to_string();
    let mut arguments = vec!["--wait", &wait];
    arguments.extend((mode != RestoreMode::ReplaceTables).then_some("--noflush"));
    run(&program, &arguments, script).map(|_| ())
}

fn run(program: &str, arguments: &[&str], input: &str) -> Result<String, IptablesError> {
    let script = input_file(input).map_err(|source| IptablesError::Input {
        program: program.to_owned(),
        source,
    })?;
    capabilities::raise_ambient();
    let mut command = Command::new(program);
    let output = command.args(arguments).stdin(script).output();
    let output = output.map_err(|source| IptablesError::Missing {
        program: program.to_owned(),
        source,
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let missing_capability = if capabilities::has_net_admin() {
        ""
    } else {
        "; the capability NET_ADMIN is missing"
    };
    Err(IptablesError::Refused {
        program: program.to_owned(),
        status: output.status.to_string(),
        answer: String::from_utf8_lossy(&output.stderr).trim().to_owned() + missing_capability,
    })
}

/// A file instead of a pipe: if this process is killed, the program still reads the complete script.
fn input_file(input: &str) -> io::Result<File> {
    let mut file = File::from(memfd_create(c"rules", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(input.as_bytes())?;
    file.rewind()?;
    Ok(file)
}

fn program(flavour: Flavour, family: Family, verb: &str) -> String {
    let stem = if family == Family::V6 { "ip6tables" } else { "iptables" };
    match flavour {
        Flavour::Nft => format!("{stem}-nft-{verb}"),
        Flavour::Legacy => format!("{stem}-legacy-{verb}"),
        Flavour::Plain => format!("{stem}-{verb}"),
    }
}

impl fmt::Display for Flavour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nft => "iptables-nft",
            Self::Legacy => "iptables-legacy",
            Self::Plain => "iptables",
        })
    }
}

/// The common prefix of the programs for IPv6, such as `ip6tables-nft-restore`.
const IPV6_PROGRAMS: &str = "ip6tables";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_ipv6_programs_without_a_held_lock_mean_that_ipv6_is_missing() {
        let refused = |program: &str, answer: &str| IptablesError::Refused {
            program: program.to_owned(),
            status: "exit status: 4".to_owned(),
            answer: answer.to_owned(),
        };
        let no_nat =
            "ip6tables-nft-restore v1.8.9: line 4: CHAIN_ADD failed (No such file or directory): chain PREROUTING";
        let lock = "Another app is currently holding the xtables lock; still 0s 0us time ahead to have a chance to grab the lock...";
        for (error, is_lock_held, lacks_ipv6) in [
            (refused("ip6tables-nft-restore", no_nat), false, true),
            (refused("ip6tables-legacy-restore", lock), true, false),
            (refused("iptables-legacy-restore", lock), true, false),
            (refused("iptables-nft-restore", no_nat), false, false),
        ] {
            assert_eq!(
                (error.is_lock_held(), error.lacks_ipv6()),
                (is_lock_held, lacks_ipv6),
                "{error}"
            );
        }
    }
}
