//! Runs a job: enters the namespace, takes the lock, selects a backend, applies the rules, removes those of other backends,
//! and verifies.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::time::Instant;

use crate::iptables::{self, Flavour, IptablesError, LegacyTables};
use crate::netlink::nftables::{self, Change, Comparison, MeshRules};
use crate::netlink::socket::{NetlinkError, Socket};
use crate::netlink::{conntrack, iptables_nft, routing};
use crate::options::{DEFAULT_PRIORITY, Families, Family, Options};
use crate::report::{Counts, Report};
use crate::rules::{self, Rules};
use crate::verify::{self, Verdict};
use crate::{lock, namespace, nft_script};

/// One run of `tulle-init`.
#[derive(Debug)]
pub struct Job {
    pub mode: Mode,
    /// The permitted backends, in order of preference; never empty.
    pub backends: Vec<Backend>,
    pub ipv6: Ipv6,
    /// The network namespace to work in; `None` is the current one.
    pub netns: Option<PathBuf>,
    pub close_wait_secs: Option<u32>,
    /// Maximum time to wait for locks and for concurrent changes of rules.
    pub wait: Duration,
}

#[derive(Debug)]
pub enum Mode {
    Apply(Options),
    ApplyAndVerify(Options),
    Check(Options),
    Simulate(Options),
    Clean(CleanMode),
}

#[derive(Clone, Copy, Debug)]
pub enum CleanMode {
    Now,
    /// Waits for open connections, at most this long.
    Drain(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// nftables over netlink.
    Nftables,
    Iptables(Flavour),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ipv6 {
    /// Fails if the namespace has no IPv6.
    Required,
    IfPresent {
        /// The families if the namespace has no IPv6.
        families_without_ipv6: Families,
    },
    Off,
}

/// The result of a run, which determines the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Different,
    Absent,
    NotRedirected,
}

#[derive(Debug, thiserror::Error)]
enum BackendError {
    #[error(transparent)]
    Nftables(#[from] NetlinkError),
    #[error(transparent)]
    Iptables(#[from] IptablesError),
}

/// Runs the job. The report is filled in even if the job fails.
///
/// # Errors
/// If rules could not be read or changed. If applying fails, the previous rules stay, unless the error says that they could not
/// be put back. If removing fails, a part may be removed already, and with [`CleanMode::Drain`] new connections may bypass the
/// proxy.
pub fn run(job: Job, report: &mut Report) -> anyhow::Result<Outcome> {
    let started = Instant::now();
    if let (Some(path), false) = (&job.netns, matches!(job.mode, Mode::Simulate(_))) {
        namespace::enter(path)?;
    }
    let outcome = match &job.mode {
        Mode::Simulate(options) => {
            simulate(&job, options);
            report.result = "simulated";
            Ok(Outcome::Done)
        }
        Mode::Check(options) => check(&job, options, report),
        Mode::Clean(mode) => clean(&job, *mode, report).map(|()| Outcome::Done),
        Mode::Apply(options) => apply(&job, options, report).map(|_| Outcome::Done),
        Mode::ApplyAndVerify(options) => apply(&job, options, report).map(|options| verify(&options, report)),
    };
    report.record_duration("all", started.elapsed());
    outcome
}

/// Prints the rules for an empty namespace; it starts no program and changes nothing.
#[allow(clippy::print_stdout)] // the output of this mode
fn simulate(job: &Job, options: &Options) {
    let rules = rules::build_rules(options);
    match job.backends.first() {
        Some(Backend::Iptables(flavour)) => {
            for (command, script) in iptables::scripts(*flavour, &rules) {
                print!("# {command}\n{script}");
            }
        }
        _ => print!("{}", nft_script::script(&rules)),
    }
    if rules.is_tproxy() {
        for command in routing::commands(rules.families) {
            println!("# {command}");
        }
    }
}

fn apply(job: &Job, options: &Options, report: &mut Report) -> anyhow::Result<Options> {
    let (mut options, ipv4_only) = options_for_namespace(job, options, report)?;
    let mut rules = rules::build_rules(&options);
    record_rules(&options, &rules, report);
    let _lock = take_lock(job.wait, report)?;
    if let Some(seconds) = job.close_wait_secs {
        namespace::set_close_wait_timeout(seconds)?;
    }
    let started = Instant::now();
    // Routes before rules: marked packets need the routes, and the routes alone change nothing.
    let routes_change = match rules.is_tproxy() {
        true => routing::ensure(rules.families).context("adding the routes that lead replies back to the proxy")?,
        false => Change::Unchanged,
    };
    let (backend, change) = match (apply_with_first_usable(job, &rules, report), ipv4_only) {
        (Err(error), Some(ipv4_only)) if lacks_ipv6(&error) => {
            options = ipv4_only;
            rules = rules::build_rules(&options);
            record_rules(&options, &rules, report);
            let applied = apply_with_first_usable(job, &rules, report)?;
            report.warn(format!(
                "this kernel accepts no rules for IPv6: if IPv6 is enabled here later, it bypasses the proxy: {error:#}"
            ));
            applied
        }
        (applied, _) => applied?,
    };
    let change = match (routes_change, change) {
        (Change::Unchanged, Change::Unchanged) => Change::Unchanged,
        _ => Change::Applied,
    };
    report.record_duration("apply", started.elapsed());
    report.backend = Some(backend.to_string());
    report.result = match change {
        Change::Applied => "applied",
        Change::Unchanged => "unchanged",
    };
    // After the new rules are live, so that there is no moment without rules.
    remove_rules_of_other_backends(job, backend, report);
    if !rules.is_tproxy() {
        remove_routing(report);
    }
    warn_about_other_redirects(options.priority, report);
    warn_about_proxy_uid_processes(&options, report);
    tracing::info!(
        %backend, result = report.result, families = ?report.families, rules = rules.list.len(), "redirect rules are in place"
    );
    Ok(options)
}

fn apply_with_first_usable(job: &Job, rules: &Rules, report: &mut Report) -> anyhow::Result<(Backend, Change)> {
    let mut first_error = None;
    for backend in &job.backends {
        let error = match apply_with(*backend, rules, job.wait, report) {
            Ok(change) => return Ok((*backend, change)),
            Err(error) => error,
        };
        // Another backend does not help against these two errors: a netlink error other than "not supported", usually a missing
        // permission; and a held lock of iptables, because its holder is changing rules now.
        let is_final = match &error {
            BackendError::Nftables(error) => !error.is_unsupported(),
            BackendError::Iptables(error) => error.is_lock_held(),
        };
        if is_final || job.backends.len() == 1 {
            return Err(anyhow::Error::new(error).context(format!("applying rules with {backend}")));
        }
        let error = anyhow::Error::new(error);
        report.warn(format!("{backend} cannot be used, trying the next backend: {error:#}"));
        first_error = first_error.or(Some(error.context(format!("applying rules with {backend}"))));
    }
    Err(first_error.unwrap_or_else(|| anyhow::anyhow!("no backend is permitted")))
}

/// Whether an error can mean that the kernel or the programs have no IPv6. Temporary errors, such as a lock that is held, do not.
fn lacks_ipv6(error: &anyhow::Error) -> bool {
    match error.downcast_ref::<BackendError>() {
        Some(BackendError::Nftables(error)) => error.is_unsupported(),
        Some(BackendError::Iptables(error)) => error.lacks_ipv6(),
        None => false,
    }
}

fn apply_with(backend: Backend, rules: &Rules, wait: Duration, report: &mut Report) -> Result<Change, BackendError> {
    match backend {
        Backend::Nftables => {
            let applied = nftables::apply(&mut Socket::open()?, rules, wait)?;
            applied.warnings.into_iter().for_each(|warning| report.warn(warning));
            Ok(applied.change)
        }
        Backend::Iptables(flavour) => Ok(iptables::apply(flavour, rules, wait)?),
    }
}

/// Removes the rules of earlier runs from the other backends. Once a new rule has redirected a connection, the old rules have no
/// effect and only cost time.
fn remove_rules_of_other_backends(job: &Job, active_backend: Backend, report: &mut Report) {
    let rules_to_remove = match active_backend {
        Backend::Nftables => MeshRules::IptablesNft,
        // The plain programs may be the nft flavour, whose rules must stay.
        Backend::Iptables(Flavour::Nft | Flavour::Plain) => MeshRules::Nftables,
        Backend::Iptables(Flavour::Legacy) => MeshRules::Both,
    };
    match Socket::open().and_then(|mut socket| nftables::remove(&mut socket, job.wait, rules_to_remove)) {
        Ok(removed) => report.removed.extend(removed),
        // A kernel without nftables has no rules in it.
        Err(error) if error.is_unsupported() => tracing::debug!(%error, "no nftables here"),
        Err(error) => report.warn(format!("removing old rules from nftables failed: {error}")),
    }
    let may_be_legacy = matches!(active_backend, Backend::Iptables(Flavour::Legacy | Flavour::Plain));
    if !may_be_legacy && iptables::legacy_tables() == LegacyTables::Present {
        match iptables::remove(Flavour::Legacy, job.wait) {
            Ok(removed) => report.removed.extend(removed),
            Err(error) => report.warn(format!("removing old rules from iptables-legacy failed: {error}")),
        }
    }
    if !report.removed.is_empty() {
        let removed = report.removed.join(", ");
        report.warn(format!("rules in other backends were replaced and removed: {removed}"));
    }
}

/// Removes the routes that lead replies back to the proxy, which no rule uses any more.
fn remove_routing(report: &mut Report) {
    match routing::remove() {
        Ok(removed) => report.removed.extend(removed),
        Err(error) => report.warn(format!(
            "removing the old routes that led replies back to the proxy failed: {error}"
        )),
    }
}

/// Warns about processes that run with the proxy's uid, because their connections are not redirected. This is not an error: the
/// rules are correct for all other processes.
fn warn_about_proxy_uid_processes(options: &Options, report: &mut Report) {
    let Some(uid) = options.proxy_uid else { return };
    let programs = namespace::processes_of_user(uid);
    if !programs.is_empty() {
        report.warn(format!(
            "the connections of {} bypass the proxy, because these processes run as --proxy-uid {uid}; run them as another \
             user, or the proxy as a user of its own",
            programs.join(", ")
        ));
    }
}

fn warn_about_other_redirects(priority: i32, report: &mut Report) {
    let mut others = Socket::open()
        .and_then(|mut socket| iptables_nft::foreign_redirect_chains(&mut socket))
        .unwrap_or_default();
    if iptables::legacy_tables() == LegacyTables::Present {
        others.extend(iptables::foreign_dnat_chains(Flavour::Legacy).unwrap_or_default());
    }
    for other in others {
        let advice = if priority < DEFAULT_PRIORITY {
            ""
        } else {
            "; --backend nft --priority -101 takes precedence over it"
        };
        report.warn(format!(
            "{other} redirects connections too, possibly before these rules{advice}"
        ));
    }
}

fn verify(options: &Options, report: &mut Report) -> Outcome {
    let started = Instant::now();
    let mut outcome = Outcome::Done;
    for (family, verdict) in verify::verify_families(options) {
        let family = family.name();
        let description = match verdict {
            Verdict::Redirected => "redirected".to_owned(),
            Verdict::Skipped(reason) => {
                report.warn(format!("redirection of {family} was not checked: {reason}"));
                format!("skipped: {reason}")
            }
            Verdict::NotRedirected(reason) => {
                tracing::error!(
                    family,
                    reason,
                    "traffic is not redirected although the rules are in place"
                );
                outcome = Outcome::NotRedirected;
                format!("not redirected: {reason}")
            }
        };
        report.verified.insert(family, description);
    }
    report.record_duration("verify", started.elapsed());
    outcome
}

fn check(job: &Job, options: &Options, report: &mut Report) -> anyhow::Result<Outcome> {
    let (mut options, ipv4_only) = options_for_namespace(job, options, report)?;
    let mut rules = rules::build_rules(&options);
    let mut closest = closest_backend(job, &rules);
    if let Some(ipv4_only) = ipv4_only
        && !matches!(closest, Ok((Comparison::Equal, _)))
    {
        // A run applies these rules if the kernel accepts none for IPv6.
        let ipv4_rules = rules::build_rules(&ipv4_only);
        let ipv4_closest = closest_backend(job, &ipv4_rules);
        if closest.is_err() || matches!(ipv4_closest, Ok((Comparison::Equal, _))) {
            if matches!(ipv4_closest, Ok((Comparison::Equal, _))) {
                report.warn(
                    "there are only rules for IPv4: if IPv6 is enabled here later, it bypasses the proxy".to_owned(),
                );
            }
            (options, rules, closest) = (ipv4_only, ipv4_rules, ipv4_closest);
        }
    }
    record_rules(&options, &rules, report);
    let (mut comparison, backend) = closest?;
    if comparison == Comparison::Equal
        && rules.is_tproxy()
        && !routing::exists(rules.families).context("reading routes")?
    {
        comparison = Comparison::Different;
    }
    let (result, outcome) = match comparison {
        Comparison::Equal => ("equal", Outcome::Done),
        Comparison::Different => ("different", Outcome::Different),
        Comparison::Absent => ("absent", Outcome::Absent),
    };
    if comparison == Comparison::Absent && job.backends.len() > 1 && iptables::legacy_tables() == LegacyTables::Unknown
    {
        report.warn(
            "rules of iptables-legacy were not looked for, because only root may list its tables; run this as root, or with \
             --backend iptables-legacy"
                .to_owned(),
        );
    }
    report.result = result;
    report.backend = (comparison != Comparison::Absent).then(|| backend.to_string());
    tracing::info!(result, backend = report.backend, "compared the rules");
    Ok(outcome)
}

/// The backend whose rules are closest to these.
fn closest_backend(job: &Job, rules: &Rules) -> anyhow::Result<(Comparison, Backend)> {
    let mut closest: Option<(Comparison, Backend)> = None;
    for backend in &job.backends {
        let comparison = match check_with(*backend, rules, job.backends.len() > 1) {
            Ok(comparison) => comparison,
            // A missing backend has no rules; this is not an error if others can be checked.
            Err(error) if job.backends.len() > 1 && is_backend_missing(&error) => continue,
            Err(error) => return Err(anyhow::Error::new(error).context(format!("reading the rules of {backend}"))),
        };
        if closest.is_none_or(|(known, _)| rank(comparison) < rank(known)) {
            closest = Some((comparison, *backend));
        }
    }
    closest.context("reading the rules failed for every backend")
}

fn check_with(backend: Backend, rules: &Rules, is_one_of_several: bool) -> Result<Comparison, BackendError> {
    let has_no_rules = backend == Backend::Iptables(Flavour::Legacy)
        && match iptables::legacy_tables() {
            LegacyTables::Present => false,
            LegacyTables::Absent => true,
            // The programs would create the tables that they read, so they run only if `--backend` names this backend.
            // Otherwise `check` warns.
            LegacyTables::Unknown => is_one_of_several,
        };
    match backend {
        Backend::Iptables(_) if has_no_rules => Ok(Comparison::Absent),
        Backend::Iptables(flavour) => Ok(iptables::check(flavour, rules)?),
        Backend::Nftables => Ok(nftables::check(&mut Socket::open()?, rules)?),
    }
}

fn is_backend_missing(error: &BackendError) -> bool {
    match error {
        BackendError::Nftables(error) => error.is_unsupported(),
        BackendError::Iptables(error) => matches!(error, IptablesError::Missing { .. }),
    }
}

/// The rank of a comparison; a lower rank is closer to the wanted rules.
fn rank(comparison: Comparison) -> u8 {
    match comparison {
        Comparison::Equal => 0,
        Comparison::Different => 1,
        Comparison::Absent => 2,
    }
}

fn clean(job: &Job, mode: CleanMode, report: &mut Report) -> anyhow::Result<()> {
    let _lock = take_lock(job.wait, report)?;
    let mut socket = Socket::open().context("removing rules")?;
    let legacy_tables = iptables::legacy_tables();
    let has_legacy_tables = legacy_tables == LegacyTables::Present;
    if legacy_tables == LegacyTables::Unknown {
        report.warn(
            "rules of iptables-legacy, if any, are not removed, because only root may list its tables; run this as root"
                .to_owned(),
        );
    }
    if let CleanMode::Drain(limit) = mode {
        let started = Instant::now();
        let mut ports = nftables::bypass_new_connections(&mut socket, job.wait)
            .context("letting new connections bypass the proxy")?;
        if has_legacy_tables {
            ports.extend(
                iptables::bypass_new_connections(Flavour::Legacy, job.wait)
                    .context("letting new connections bypass the proxy")?,
            );
        }
        wait_for_connections(&mut socket, &ports, limit, report);
        report.record_duration("drain", started.elapsed());
    }
    report.removed = nftables::remove(&mut socket, job.wait, MeshRules::Both).context("removing rules")?;
    if has_legacy_tables {
        report
            .removed
            .extend(iptables::remove(Flavour::Legacy, job.wait).context("removing rules")?);
    }
    report.removed.extend(routing::remove().context("removing routes")?);
    report.result = if report.removed.is_empty() { "absent" } else { "removed" };
    tracing::info!(removed = ?report.removed, "removed the rules");
    Ok(())
}

/// Waits until no open connection needs the rules, or the time limit is reached.
fn wait_for_connections(socket: &mut Socket, ports: &[u16], limit: Duration, report: &mut Report) {
    let deadline = Instant::now() + limit;
    loop {
        let open = match conntrack::count_open(socket, ports) {
            Ok(0) => return,
            Ok(open) => Some(open),
            Err(error) => {
                tracing::debug!(%error, "counting open connections failed");
                None
            }
        };
        if Instant::now() >= deadline {
            let open = match open {
                Some(1) => "1 connection was".to_owned(),
                Some(open) => format!("{open} connections were"),
                None => "an unknown number of connections was".to_owned(),
            };
            report.warn(format!(
                "{open} still open after {limit:?}; the removal of the rules resets them"
            ));
            return;
        }
        thread::sleep(DRAIN_POLL_INTERVAL);
    }
}

/// The options with the families for this namespace, and those to use instead if the kernel accepts no rules for IPv6.
///
/// # Errors
/// If `--ipv6` requires IPv6 and the namespace has none.
fn options_for_namespace(
    job: &Job,
    options: &Options,
    report: &mut Report,
) -> anyhow::Result<(Options, Option<Options>)> {
    let has_ipv6 = namespace::has_ipv6();
    let with_families = |families| Options {
        families,
        ..options.clone()
    };
    let families = resolve_families(options.families, job.ipv6, has_ipv6)?;
    if families != options.families {
        let later = match families {
            Families::V4DropV6 => "inbound IPv6 connections are dropped",
            _ => "IPv6 connections bypass the proxy",
        };
        report.warn(format!(
            "this network namespace has no IPv6, or IPv6 is disabled in it: only IPv4 is redirected; \
             if IPv6 is enabled later, {later}"
        ));
    } else if families == Families::V4DropV6 {
        tracing::info!(
            "IPv6 is not redirected: inbound IPv6 connections are dropped, apart from skipped ports and networks; \
             --unredirected-ipv6=allow lets them bypass the proxy"
        );
    }
    // If the namespace has IPv6 and the kernel accepts no rules that drop it, the run must fail: IPv6 would bypass the proxy.
    let can_omit_ipv6 = !has_ipv6 && families == Families::V4DropV6;
    Ok((
        with_families(families),
        can_omit_ipv6.then(|| with_families(Families::V4)),
    ))
}

/// The families for a namespace with or without IPv6.
///
/// Rules that drop IPv6 also apply to a namespace without IPv6, because it may be enabled there later.
///
/// # Errors
/// If IPv6 is required and the namespace has none.
fn resolve_families(families: Families, ipv6: Ipv6, has_ipv6: bool) -> anyhow::Result<Families> {
    match ipv6 {
        Ipv6::IfPresent { families_without_ipv6 } if !has_ipv6 => Ok(families_without_ipv6),
        Ipv6::Required if !has_ipv6 => {
            bail!("--ipv6 is set, but this network namespace has no IPv6, or IPv6 is disabled in it; use --ipv6=false")
        }
        Ipv6::IfPresent { .. } | Ipv6::Required | Ipv6::Off => Ok(families),
    }
}

fn take_lock(wait: Duration, report: &mut Report) -> anyhow::Result<Option<lock::Lock>> {
    let lock = lock::take(wait).context("creating the lock of this network namespace")?;
    if lock.is_none() {
        // Any process in the namespace can bind this name, and must not be able to block init with it.
        report.warn(format!(
            "another process held the init lock for {wait:?}; continuing without it"
        ));
    }
    Ok(lock)
}

fn record_rules(options: &Options, rules: &Rules, report: &mut Report) {
    let count = |ports: &tulle_core::ports::PortSet| {
        ports
            .ranges()
            .map(|range| usize::from(range.end() - range.start()) + 1)
            .sum()
    };
    report.families = options.families.redirected().map(Family::name).collect();
    report.hash = Some(nft_script::hash(rules));
    report.counts = Some(Counts {
        rules: rules.list.len(),
        inbound_skip_ports: count(&options.inbound_skip_ports),
        outbound_skip_ports: count(&options.outbound_skip_ports),
        inbound_skip_subnets: options.inbound_skip_nets.len(),
        outbound_skip_subnets: options.outbound_skip_nets.len(),
    });
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nftables => f.write_str("nftables"),
            Self::Iptables(flavour) => flavour.fmt(f),
        }
    }
}

const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inbound_ipv6_is_dropped_even_if_the_namespace_has_no_ipv6_yet() {
        let dropped = Families::V4DropV6;
        let if_present = Ipv6::IfPresent {
            families_without_ipv6: dropped,
        };
        for (families, ipv6, has_ipv6, expected) in [
            (dropped, Ipv6::Off, false, dropped),
            (dropped, Ipv6::Off, true, dropped),
            (Families::V4, Ipv6::Off, false, Families::V4),
            (Families::Both, if_present, false, dropped),
            (Families::Both, if_present, true, Families::Both),
            (Families::Both, Ipv6::Required, true, Families::Both),
        ] {
            let resolved = resolve_families(families, ipv6, has_ipv6).unwrap();
            assert_eq!(resolved, expected, "{families:?}, {ipv6:?}, {has_ipv6}");
        }
        assert!(resolve_families(Families::Both, Ipv6::Required, false).is_err());
    }
}
