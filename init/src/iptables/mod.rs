//! The rules through iptables' own programs, a transaction a family: `*-restore --noflush`, read back afterwards.
//!
//! Names and comments are Linkerd's, so that its tools and ours repair each other's work.

mod text;

use std::io::{self, Write};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{fmt, fs};

use crate::caps;
use crate::iptables::text::Saved;
use crate::netlink::native::{Change, Live};
use crate::rules::{Chain, Family, Rules};

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
    #[error("{cause}; and the former rules of ipv4 could not be put back: {undo}")]
    NotUndone { cause: Box<Self>, undo: Box<Self> },
}

/// Puts the rules in place in each family, unless they are already.
///
/// # Errors
/// When a program is missing or refuses. Both families are tried out before the first is changed, and what was changed
/// is put back, so the former rules stay.
pub fn apply(flavour: Flavour, rules: &Rules, wait: Duration) -> Result<Change, IptablesError> {
    let families: Vec<Family> = rules.families.each().collect();
    let saved = save_all(flavour, rules)?;
    let mut pairs = families.iter().zip(&saved);
    if pairs.all(|(family, saved)| text::matches(rules, *family, saved)) {
        return Ok(Change::Unchanged);
    }
    let scripts: Vec<String> = families
        .iter()
        .zip(&saved)
        .map(|(family, saved)| text::apply(rules, *family, saved))
        .collect();
    for (family, script) in families.iter().zip(&scripts) {
        restore(flavour, *family, script, wait, How::Test)?;
    }
    let mut done: Vec<(Family, &Saved)> = Vec::new();
    for ((family, saved), script) in families.iter().zip(&saved).zip(&scripts) {
        let kept = restore(flavour, *family, script, wait, How::Add).and_then(|()| kept(flavour, *family, rules));
        // What failed after its commit must be undone as well; what was not committed is undone to no effect.
        done.push((*family, saved));
        if let Err(cause) = kept {
            return Err(undo(flavour, &done, wait, cause));
        }
    }
    Ok(Change::Applied)
}

/// How the live rules of one flavour relate to the wanted ones.
///
/// # Errors
/// When a program is missing or fails.
pub fn check(flavour: Flavour, rules: &Rules) -> Result<Live, IptablesError> {
    let families: Vec<Family> = rules.families.each().collect();
    let saved = save_all(flavour, rules)?;
    let equal = families
        .iter()
        .zip(&saved)
        .all(|(family, saved)| text::matches(rules, *family, saved));
    Ok(match saved.iter().any(Saved::has_ours) {
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
        let script = text::remove(&save(flavour, family, Mangle::IfUsed)?);
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
        let saved = save(flavour, family, Mangle::IfUsed)?;
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
        let chains = save(flavour, family, Mangle::IfUsed)?.redirectors();
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
    let families = rules.families.each();
    families
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

/// Whether the mangle table is to be written to in any case.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mangle {
    Wanted,
    IfUsed,
}

impl Mangle {
    fn of(rules: &Rules) -> Self {
        let wanted = rules.list.iter().any(|rule| rule.chain == Chain::Invalid);
        if wanted { Self::Wanted } else { Self::IfUsed }
    }
}

/// Whether the legacy part of the kernel is in use here for one of the families, and so may hold rules of ours.
#[must_use]
pub fn legacy_in_use() -> bool {
    in_use(Flavour::Legacy).next().is_some()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// Say whether it would work.
    Test,
    /// Change what is named and leave the rest.
    Add,
    /// Replace the tables that are named.
    Replace,
}

fn kept(flavour: Flavour, family: Family, rules: &Rules) -> Result<(), IptablesError> {
    if text::matches(rules, family, &save(flavour, family, Mangle::of(rules))?) {
        return Ok(());
    }
    Err(IptablesError::NotKept {
        program: program(flavour, family, "restore"),
        family: family.name(),
    })
}

fn undo(flavour: Flavour, done: &[(Family, &Saved)], wait: Duration, cause: IptablesError) -> IptablesError {
    let undone = done.iter().try_for_each(|(family, saved)| {
        let whole = saved.whole();
        restore(flavour, *family, &whole, wait, How::Replace)
    });
    match undone {
        Ok(()) => cause,
        Err(undo) => IptablesError::NotUndone {
            cause: Box::new(cause),
            undo: Box::new(undo),
        },
    }
}

fn save_all(flavour: Flavour, rules: &Rules) -> Result<Vec<Saved>, IptablesError> {
    rules
        .families
        .each()
        .map(|family| save(flavour, family, Mangle::of(rules)))
        .collect()
}

/// What the tables that we write to hold. Asking the legacy programs for a table makes it, so only for those in use.
fn save(flavour: Flavour, family: Family, mangle: Mangle) -> Result<Saved, IptablesError> {
    let program = program(flavour, family, "save");
    let mut saved = Saved::parse(&run(&program, &["-t", "nat"], "")?);
    if mangle == Mangle::Wanted || flavour != Flavour::Legacy || has_legacy_table(family, "mangle") {
        saved.join(Saved::parse(&run(&program, &["-t", "mangle"], "")?));
    }
    Ok(saved)
}

/// The families in which there can be rules.
fn in_use(flavour: Flavour) -> impl Iterator<Item = Family> {
    let families = [Family::V4, Family::V6].into_iter();
    families.filter(move |family| flavour != Flavour::Legacy || has_legacy_table(*family, "nat"))
}

/// Whether this network namespace has a legacy table; without permission to know, it has none.
fn has_legacy_table(family: Family, table: &str) -> bool {
    let names = if family == Family::V6 {
        "ip6_tables_names"
    } else {
        "ip_tables_names"
    };
    let names = fs::read_to_string(format!("/proc/thread-self/net/{names}")).unwrap_or_default();
    names.lines().any(|name| name == table)
}

fn restore(flavour: Flavour, family: Family, script: &str, wait: Duration, how: How) -> Result<(), IptablesError> {
    let program = program(flavour, family, "restore");
    let wait = wait.as_secs().max(1).to_string();
    let mut arguments = vec!["--wait", &wait];
    arguments.extend((how != How::Replace).then_some("--noflush"));
    arguments.extend((how == How::Test).then_some("--test"));
    run(&program, &arguments, script).map(|_| ())
}

fn run(program: &str, arguments: &[&str], input: &str) -> Result<String, IptablesError> {
    let missing = |source| IptablesError::Missing {
        program: program.to_owned(),
        source,
    };
    caps::raise_ambient();
    let mut command = Command::new(program);
    let command = command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().map_err(missing)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that refuses early closes the pipe; its answer says more than the broken pipe does.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(missing)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(IptablesError::Refused {
        program: program.to_owned(),
        status: output.status.to_string(),
        answer: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
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
