//! The rules through iptables' own programs, a transaction a family: `*-restore --noflush`, read back afterwards.
//!
//! Names and comments are Linkerd's, so that its tools and ours repair each other's work.

mod text;

use std::fs::File;
use std::io::{self, Seek, Write};
use std::panic::resume_unwind;
use std::process::Command;
use std::time::Duration;
use std::{fmt, fs, thread};

use nix::sys::memfd::{MFdFlags, memfd_create};

use tulle_core::caps;

use crate::iptables::text::Saved;
use crate::netlink::native::{Change, Live};
use crate::rules::{Family, Rules};

/// Which programs speak to which part of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    Nft,
    Legacy,
    /// Whatever the system has under the plain names.
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
    #[error("{program} failed ({status}): {answer}")]
    Refused {
        program: String,
        status: String,
        answer: String,
    },
    #[error("{program} accepted the rules but {family} shows others afterwards")]
    NotKept { program: String, family: &'static str },
    #[error("{cause}; and the former rules could not be put back: {undo}")]
    NotUndone { cause: Box<Self>, undo: Box<Self> },
}

/// Puts the rules in place in each family, unless they are already.
///
/// # Errors
/// When a program is missing or refuses. What was changed by then is put back, so the former rules stay.
pub fn apply(flavour: Flavour, rules: &Rules, wait: Duration) -> Result<Change, IptablesError> {
    let plans: Vec<Plan> = save_all(flavour, rules)?
        .into_iter()
        .map(|(family, saved)| Plan {
            family,
            script: text::apply(rules, family, &saved),
            saved,
        })
        .filter(|plan| !plan.script.is_empty())
        .collect();
    if plans.is_empty() {
        return Ok(Change::Unchanged);
    }
    // There is no trial before: it costs as much as the work, and iptables' own does not ask the kernel.
    let done = in_each(&plans, |plan| {
        restore(flavour, plan.family, &plan.script, wait, How::Add)?;
        kept(flavour, plan.family, rules)
    });
    match done {
        Ok(_) => Ok(Change::Applied),
        // What failed after its commit must be undone as well; what was not committed is undone to no effect.
        Err(cause) => Err(undo(flavour, &plans, wait, cause)),
    }
}

/// How the live rules of one flavour relate to the wanted ones.
///
/// # Errors
/// When a program is missing or fails.
pub fn check(flavour: Flavour, rules: &Rules) -> Result<Live, IptablesError> {
    let saved = save_all(flavour, rules)?;
    let equal = saved.iter().all(|(family, saved)| text::matches(rules, *family, saved));
    Ok(match saved.iter().any(|(_, saved)| saved.has_ours()) {
        true if equal => Live::Equal,
        true => Live::Different,
        false => Live::Absent,
    })
}

/// Removes our rules, and Linkerd's, from both families of one flavour; says where there were some.
///
/// # Errors
/// When a program is missing or refuses.
pub fn remove(flavour: Flavour, wait: Duration) -> Result<Vec<String>, IptablesError> {
    let mut removed = Vec::new();
    for family in in_use(flavour) {
        let script = text::remove(&save(flavour, family)?);
        if !script.is_empty() {
            restore(flavour, family, &script, wait, How::Add)?;
            removed.push(format!("{flavour} {}", family.name()));
        }
    }
    Ok(removed)
}

/// Lets new connections pass while open ones keep being translated; says which ports they are translated to.
///
/// # Errors
/// When a program is missing or refuses.
pub fn let_pass(flavour: Flavour, wait: Duration) -> Result<Vec<u16>, IptablesError> {
    let mut ports = Vec::new();
    for family in in_use(flavour) {
        let saved = save(flavour, family)?;
        ports.extend(saved.redirect_ports());
        let script = text::let_pass(&saved);
        if !script.is_empty() {
            restore(flavour, family, &script, wait, How::Add)?;
        }
    }
    Ok(ports)
}

/// Chains of strangers that translate destinations, for a warning.
///
/// # Errors
/// When a program is missing or fails.
pub fn redirectors(flavour: Flavour) -> Result<Vec<String>, IptablesError> {
    let mut found = Vec::new();
    for family in in_use(flavour) {
        let chains = save(flavour, family)?.redirectors();
        found.extend(
            chains
                .iter()
                .map(|chain| format!("chain {chain} of {flavour} ({})", family.name())),
        );
    }
    Ok(found)
}

/// What [`apply`] would feed to the restore programs where there are no rules yet, a script a family.
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
            (command, text::apply(rules, family, &Saved::default()))
        })
        .collect()
}

/// Seconds to wait for locks unless chosen.
pub const DEFAULT_WAIT_SECS: u64 = 5;

/// Whether the legacy part of the kernel is in use here for one of the families, and so may hold rules of ours.
#[must_use]
pub fn legacy_in_use() -> bool {
    in_use(Flavour::Legacy).next().is_some()
}

/// What is to be done in one family, and what was there before.
#[derive(Debug)]
struct Plan {
    family: Family,
    script: String,
    saved: Saved,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// Change what is named and leave the rest.
    Add,
    /// Replace the tables that are named.
    Replace,
}

fn kept(flavour: Flavour, family: Family, rules: &Rules) -> Result<(), IptablesError> {
    if text::matches(rules, family, &save(flavour, family)?) {
        return Ok(());
    }
    Err(IptablesError::NotKept {
        program: program(flavour, family, "restore"),
        family: family.name(),
    })
}

fn undo(flavour: Flavour, plans: &[Plan], wait: Duration, cause: IptablesError) -> IptablesError {
    let undone = in_each(plans, |plan| {
        let former = text::undo(&plan.script, &plan.saved);
        restore(flavour, plan.family, &former, wait, How::Replace)
    });
    match undone {
        Ok(_) => cause,
        Err(undo) => IptablesError::NotUndone {
            cause: Box::new(cause),
            undo: Box::new(undo),
        },
    }
}

/// What is there in both families: one that gets no rules may still have those of a former run.
fn save_all(flavour: Flavour, rules: &Rules) -> Result<Vec<(Family, Saved)>, IptablesError> {
    in_each(&[Family::V4, Family::V6], |family| match save(flavour, *family) {
        // Where the family cannot be asked, nothing of ours is there.
        Err(_) if rules.of(*family).next().is_none() => Ok((*family, Saved::default())),
        saved => Ok((*family, saved?)),
    })
}

/// Does the same in all families at once, each to its end; the time goes by in the programs.
fn in_each<F: Sync, T: Send>(
    families: &[F],
    work: impl Fn(&F) -> Result<T, IptablesError> + Sync,
) -> Result<Vec<T>, IptablesError> {
    let results: Vec<_> = thread::scope(|scope| {
        let runs: Vec<_> = families.iter().map(|family| scope.spawn(|| work(family))).collect();
        let ends = runs.into_iter().map(|run| run.join());
        ends.map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    results.into_iter().collect()
}

/// What the tables that we write to hold. Asking the legacy programs for one of them by its name would make it.
///
/// Who is not root may not know which there are, and then has to ask by name.
fn save(flavour: Flavour, family: Family) -> Result<Saved, IptablesError> {
    let program = program(flavour, family, "save");
    let unknown = |error: io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    if flavour == Flavour::Legacy && fs::read(legacy_tables(family)).is_err_and(unknown) {
        let nat = run(&program, &["-t", "nat"], "")?;
        // A kernel without it has no rules of ours there; if some are wanted, writing them says what is missing.
        let mangle = run(&program, &["-t", "mangle"], "").unwrap_or_default();
        return Ok(Saved::parse(&(nat + &mangle)));
    }
    Ok(Saved::parse(&run(&program, &[], "")?))
}

/// The families in which there can be rules.
fn in_use(flavour: Flavour) -> impl Iterator<Item = Family> {
    let families = [Family::V4, Family::V6].into_iter();
    families.filter(move |family| flavour != Flavour::Legacy || has_legacy_table(*family))
}

/// The kernel's list of the legacy tables of this network namespace.
fn legacy_tables(family: Family) -> &'static str {
    match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    }
}

/// Whether this network namespace has legacy tables of ours; without permission to know, it has none.
fn has_legacy_table(family: Family) -> bool {
    let names = fs::read_to_string(legacy_tables(family)).unwrap_or_default();
    names.lines().any(|name| name == "nat" || name == "mangle")
}

fn restore(flavour: Flavour, family: Family, script: &str, wait: Duration, how: How) -> Result<(), IptablesError> {
    let program = program(flavour, family, "restore");
    let wait = wait.as_secs().max(1).to_string();
    let mut arguments = vec!["--wait", &wait];
    arguments.extend((how != How::Replace).then_some("--noflush"));
    run(&program, &arguments, script).map(|_| ())
}

fn run(program: &str, arguments: &[&str], input: &str) -> Result<String, IptablesError> {
    let missing = |source| IptablesError::Missing {
        program: program.to_owned(),
        source,
    };
    caps::raise_ambient();
    // A file and no pipe: if we are killed meanwhile, the program has read all of it or will.
    let script = memfd_create(c"rules", MFdFlags::MFD_CLOEXEC).map_err(|errno| missing(errno.into()))?;
    let mut script = File::from(script);
    script
        .write_all(input.as_bytes())
        .and_then(|()| script.rewind())
        .map_err(missing)?;
    let mut command = Command::new(program);
    let output = command.args(arguments).stdin(script).output().map_err(missing)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let lacking = if caps::has_net_admin() {
        ""
    } else {
        "; the capability NET_ADMIN is missing"
    };
    Err(IptablesError::Refused {
        program: program.to_owned(),
        status: output.status.to_string(),
        answer: String::from_utf8_lossy(&output.stderr).trim().to_owned() + lacking,
    })
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
