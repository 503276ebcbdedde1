//! The order of work: enter, lock, choose a backend, apply, take other backends' rules away, prove.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::time::Instant;

use crate::iptables::{self, Flavour, IptablesError};
use crate::netlink::native::{self, Change, Live, Whose};
use crate::netlink::wire::{Socket, WireError};
use crate::netlink::{conntrack, foreign, routing};
use crate::options::{DEFAULT_PRIORITY, Families, Options};
use crate::report::{Counts, Report};
use crate::rules::{self, Rules};
use crate::verify::{self, Verdict};
use crate::{lock, nft_text, surroundings};

/// One run.
#[derive(Debug)]
pub struct Job {
    pub mode: Mode,
    /// Who may hold the rules, the best first; never empty.
    pub backends: Vec<Backend>,
    pub ipv6: Ipv6,
    /// Another network namespace to work in.
    pub netns: Option<PathBuf>,
    pub close_wait_secs: Option<u32>,
    /// How long to wait for locks and for other writers.
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
    Native,
    Iptables(Flavour),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ipv6 {
    /// Not having it is an error.
    Required,
    IfPresent,
    Off,
}

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Done,
    Different,
    Absent,
    NotRedirected,
}

#[derive(Debug, thiserror::Error)]
enum BackendError {
    #[error(transparent)]
    Native(#[from] WireError),
    #[error(transparent)]
    Iptables(#[from] IptablesError),
}

/// Does the work; what it came to is in the report, also when it fails.
///
/// # Errors
/// When rules could not be read or changed; the former ones stay then.
pub fn run(job: Job, report: &mut Report) -> anyhow::Result<End> {
    let started = Instant::now();
    if let (Some(path), false) = (&job.netns, matches!(job.mode, Mode::Simulate(_))) {
        surroundings::enter(path)?;
    }
    let end = match &job.mode {
        Mode::Simulate(options) => {
            simulate(&job, options);
            report.result = "simulated";
            Ok(End::Done)
        }
        Mode::Check(options) => check(&job, options, report),
        Mode::Clean(mode) => clean(&job, *mode, report).map(|()| End::Done),
        Mode::Apply(options) => apply(&job, options, report).map(|_| End::Done),
        Mode::ApplyAndVerify(options) => apply(&job, options, report).map(|options| prove(&options, report)),
    };
    report.took("all", started.elapsed());
    end
}

/// Prints what would be applied where nothing is yet; starts and changes nothing.
#[allow(clippy::print_stdout)] // the answer of this mode
fn simulate(job: &Job, options: &Options) {
    let rules = rules::plan(options);
    match job.backends.first() {
        Some(Backend::Iptables(flavour)) => {
            for (command, script) in iptables::scripts(*flavour, &rules) {
                print!("# {command}\n{script}");
            }
        }
        _ => print!("{}", nft_text::script(&rules)),
    }
    if rules.keep_clients() {
        for command in routing::commands(rules.families) {
            println!("# {command}");
        }
    }
}

fn apply(job: &Job, options: &Options, report: &mut Report) -> anyhow::Result<Options> {
    let options = with_present_families(job, options, report)?;
    let rules = rules::plan(&options);
    describe(&options, &rules, report);
    let _lock = locked(job.wait, report)?;
    if let Some(seconds) = job.close_wait_secs {
        surroundings::set_close_wait(seconds)?;
    }
    let started = Instant::now();
    // First: without rules that mark packets it has no effect.
    let routed = match rules.keep_clients() {
        true => routing::put(rules.families).context("routing answers back to the proxy")?,
        false => Change::Unchanged,
    };
    let (backend, change) = apply_to_best(job, &rules, report)?;
    let change = if routed == Change::Applied { routed } else { change };
    report.took("apply", started.elapsed());
    report.backend = Some(backend.to_string());
    report.result = match change {
        Change::Applied => "applied",
        Change::Unchanged => "unchanged",
    };
    // The new rules are live, so there is no moment without any.
    remove_others(job, backend, report);
    if !rules.keep_clients() {
        remove_routing(report);
    }
    warn_of_strangers(options.priority, report);
    warn_of_programs_of_the_proxy_s_user(&options, report);
    tracing::info!(
        %backend, result = report.result, families = ?report.families, rules = rules.list.len(), "redirect rules are in place"
    );
    Ok(options)
}

fn apply_to_best(job: &Job, rules: &Rules, report: &mut Report) -> anyhow::Result<(Backend, Change)> {
    let mut failed = None;
    for backend in &job.backends {
        let error = match apply_to(*backend, rules, job.wait, report) {
            Ok(change) => return Ok((*backend, change)),
            Err(error) => error,
        };
        // A permission that is missing here is missing everywhere, and the first answer says it best.
        let hopeless = matches!(&error, BackendError::Native(error) if !error.unsupported());
        if hopeless || job.backends.len() == 1 {
            return Err(anyhow::Error::new(error).context(format!("applying rules with {backend}")));
        }
        let error = anyhow::Error::new(error);
        report.warn(format!("{backend} cannot be used, trying the next: {error:#}"));
        failed = failed.or(Some(error.context(format!("applying rules with {backend}"))));
    }
    Err(failed.unwrap_or_else(|| anyhow::anyhow!("no backend may be used")))
}

fn apply_to(backend: Backend, rules: &Rules, wait: Duration, report: &mut Report) -> Result<Change, BackendError> {
    match backend {
        Backend::Native => {
            let applied = native::apply(&mut Socket::open()?, rules, wait)?;
            applied.warnings.into_iter().for_each(|warning| report.warn(warning));
            Ok(applied.change)
        }
        Backend::Iptables(flavour) => Ok(iptables::apply(flavour, rules, wait)?),
    }
}

/// Takes our rules away from backends that do not hold them any more; what stays would only be evaluated in vain.
fn remove_others(job: &Job, holder: Backend, report: &mut Report) {
    let native = match holder {
        Backend::Native => Some(Whose::Xtables),
        // The plain programs are one of the other two.
        Backend::Iptables(Flavour::Nft | Flavour::Plain) => Some(Whose::Native),
        Backend::Iptables(Flavour::Legacy) => Some(Whose::All),
    };
    let removed =
        native.map(|whose| Socket::open().and_then(|mut socket| native::remove(&mut socket, job.wait, whose)));
    match removed {
        Some(Ok(removed)) => report.removed.extend(removed),
        // iptables works on kernels that have nothing else, and then nothing else has rules.
        Some(Err(error)) if error.unsupported() => tracing::debug!(%error, "no nftables here"),
        Some(Err(error)) => report.warn(format!("old rules in nftables were not removed: {error}")),
        None => {}
    }
    let legacy_holds = matches!(holder, Backend::Iptables(Flavour::Legacy | Flavour::Plain));
    if !legacy_holds && iptables::legacy_in_use() {
        match iptables::remove(Flavour::Legacy, job.wait) {
            Ok(removed) => report.removed.extend(removed),
            Err(error) => report.warn(format!("old rules in iptables-legacy may remain: {error}")),
        }
    }
    if !report.removed.is_empty() {
        let removed = report.removed.join(", ");
        report.warn(format!("rules in other places were replaced and removed: {removed}"));
    }
}

/// Takes away how answers were routed that no rule marks any more.
fn remove_routing(report: &mut Report) {
    match routing::remove() {
        Ok(removed) => report.removed.extend(removed),
        Err(error) => report.warn(format!("old routes of answers may remain: {error}")),
    }
}

/// Applications whose connections the rules leave alone, because they run as the proxy's user. To refuse them would leave the others
/// without rules, too.
fn warn_of_programs_of_the_proxy_s_user(options: &Options, report: &mut Report) {
    let Some(uid) = options.proxy_uid else { return };
    let programs = surroundings::programs_of(uid);
    if !programs.is_empty() {
        report.warn(format!(
            "the connections of {} bypass the proxy: --proxy-uid {uid} is their user, too; run them as another user, or the proxy as \
             a user of its own",
            programs.join(", ")
        ));
    }
}

fn warn_of_strangers(priority: i32, report: &mut Report) {
    let mut strangers = Socket::open()
        .and_then(|mut socket| foreign::redirectors(&mut socket))
        .unwrap_or_default();
    if iptables::legacy_in_use() {
        strangers.extend(iptables::redirectors(Flavour::Legacy).unwrap_or_default());
    }
    for stranger in strangers {
        let advice = if priority < DEFAULT_PRIORITY {
            ""
        } else {
            "; --backend nft --priority -101 goes before it"
        };
        report.warn(format!(
            "{stranger} redirects too, and may take connections that ours leave alone{advice}"
        ));
    }
}

fn prove(options: &Options, report: &mut Report) -> End {
    let started = Instant::now();
    let mut end = End::Done;
    for (family, verdict) in verify::families(options) {
        let family = family.name();
        let said = match verdict {
            Verdict::Redirected => "redirected".to_owned(),
            Verdict::Skipped(reason) => {
                report.warn(format!("redirection of {family} is not proven: {reason}"));
                format!("skipped: {reason}")
            }
            Verdict::NotRedirected(how) => {
                tracing::error!(family, how, "traffic is not redirected although the rules are in place");
                end = End::NotRedirected;
                format!("not redirected: {how}")
            }
        };
        report.verified.insert(family, said);
    }
    report.took("verify", started.elapsed());
    end
}

fn check(job: &Job, options: &Options, report: &mut Report) -> anyhow::Result<End> {
    let options = with_present_families(job, options, report)?;
    let rules = rules::plan(&options);
    describe(&options, &rules, report);
    let mut best: Option<(Live, Backend)> = None;
    for backend in &job.backends {
        let live = match check_in(*backend, &rules) {
            Ok(live) => live,
            // Where a backend is missing it holds no rules; with others to ask that is no failure.
            Err(error) if job.backends.len() > 1 && missing(&error) => continue,
            Err(error) => return Err(anyhow::Error::new(error).context(format!("reading the rules of {backend}"))),
        };
        if best.is_none_or(|(known, _)| rank(live) < rank(known)) {
            best = Some((live, *backend));
        }
    }
    let Some((mut live, backend)) = best else {
        bail!("no backend could be asked for its rules")
    };
    if live == Live::Equal && rules.keep_clients() && !routing::is_there(rules.families).context("reading routes")? {
        live = Live::Different;
    }
    let (result, end) = match live {
        Live::Equal => ("equal", End::Done),
        Live::Different => ("different", End::Different),
        Live::Absent => ("absent", End::Absent),
    };
    report.result = result;
    report.backend = (live != Live::Absent).then(|| backend.to_string());
    tracing::info!(result, backend = report.backend, "rules were compared");
    Ok(end)
}

fn check_in(backend: Backend, rules: &Rules) -> Result<Live, BackendError> {
    match backend {
        Backend::Native => Ok(native::check(&mut Socket::open()?, rules)?),
        // Asking legacy programs about a namespace without legacy tables would make some.
        Backend::Iptables(Flavour::Legacy) if !iptables::legacy_in_use() => Ok(Live::Absent),
        Backend::Iptables(flavour) => Ok(iptables::check(flavour, rules)?),
    }
}

fn missing(error: &BackendError) -> bool {
    match error {
        BackendError::Native(error) => error.unsupported(),
        BackendError::Iptables(error) => matches!(error, IptablesError::Missing { .. }),
    }
}

fn rank(live: Live) -> u8 {
    match live {
        Live::Equal => 0,
        Live::Different => 1,
        Live::Absent => 2,
    }
}

fn clean(job: &Job, mode: CleanMode, report: &mut Report) -> anyhow::Result<()> {
    let _lock = locked(job.wait, report)?;
    let mut socket = Socket::open().context("removing rules")?;
    let legacy = iptables::legacy_in_use();
    if let CleanMode::Drain(limit) = mode {
        let started = Instant::now();
        let mut ports = native::let_pass(&mut socket, job.wait).context("letting connections pass")?;
        if legacy {
            ports.extend(iptables::let_pass(Flavour::Legacy, job.wait).context("letting connections pass")?);
        }
        wait_for_end(&mut socket, &ports, limit, report);
        report.took("drain", started.elapsed());
    }
    report.removed = native::remove(&mut socket, job.wait, Whose::All).context("removing rules")?;
    if legacy {
        report
            .removed
            .extend(iptables::remove(Flavour::Legacy, job.wait).context("removing rules")?);
    }
    report.removed.extend(routing::remove().context("removing routes")?);
    report.result = if report.removed.is_empty() { "absent" } else { "removed" };
    tracing::info!(removed = ?report.removed, "no rules are left");
    Ok(())
}

/// Waits until no open connection needs the rules any more, or the time is up.
fn wait_for_end(socket: &mut Socket, ports: &[u16], limit: Duration, report: &mut Report) {
    let deadline = Instant::now() + limit;
    loop {
        let open = match conntrack::open(socket, ports) {
            Ok(0) => return,
            Ok(open) => Some(open),
            Err(error) => {
                tracing::debug!(%error, "open connections cannot be counted");
                None
            }
        };
        if Instant::now() >= deadline {
            let open = open.map_or_else(|| "an unknown number of".to_owned(), |open| open.to_string());
            report.warn(format!(
                "{open} connections were still open after {limit:?} and are reset now"
            ));
            return;
        }
        thread::sleep(DRAIN_POLL);
    }
}

fn with_present_families(job: &Job, options: &Options, report: &mut Report) -> anyhow::Result<Options> {
    if options.families == Families::V4 || surroundings::has_ipv6() {
        if options.families == Families::V4DropV6 {
            tracing::info!(
                "IPv6 is not redirected: inbound IPv6 connections are dropped, apart from skipped ports and networks; \
                 --unredirected-ipv6=allow lets them bypass the proxy"
            );
        }
        return Ok(options.clone());
    }
    if job.ipv6 == Ipv6::Required {
        bail!("--ipv6 was asked for, but this network namespace has no IPv6 or has it disabled; use --ipv6=false");
    }
    if job.ipv6 != Ipv6::Off {
        report.warn("this network namespace has no IPv6 or has it disabled: only IPv4 is redirected".to_owned());
    }
    Ok(Options {
        families: Families::V4,
        ..options.clone()
    })
}

fn locked(wait: Duration, report: &mut Report) -> anyhow::Result<Option<lock::Lock>> {
    let lock = lock::take(wait).context("making the lock of this network namespace")?;
    if lock.is_none() {
        // Anything in the namespace can take the name, and must not be able to stop us with it.
        report.warn(format!(
            "another process has held the lock of init for {wait:?}; going on without it"
        ));
    }
    Ok(lock)
}

fn describe(options: &Options, rules: &Rules, report: &mut Report) {
    let count = |ports: &tulle_core::ports::PortSet| {
        ports
            .ranges()
            .map(|range| usize::from(range.end() - range.start()) + 1)
            .sum()
    };
    report.families = options.families.each().map(rules::Family::name).collect();
    report.hash = Some(nft_text::hash(rules));
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
            Self::Native => f.write_str("nftables"),
            Self::Iptables(flavour) => flavour.fmt(f),
        }
    }
}

const DRAIN_POLL: Duration = Duration::from_millis(100);
