//! `tulle check`: is a cluster ready for a mesh, is the mesh well, and if not, which command mends it.
//!
//! [`gather`] takes a snapshot of the cluster; checks are pure functions of it, so each verdict is tested on objects.
//! What time may heal is looked at again until it is well or the wait is over. Nothing is changed.

mod control_plane;
mod data_plane;
mod gather;
mod platform;
mod report;
mod snapshot;
#[cfg(test)]
mod tests;
mod trust;
mod verdict;

use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use tokio::time::{Instant, sleep};
use tulle_core::duration;

use self::report::{CategoryReport, CheckReport};
use self::snapshot::Snapshot;
use self::verdict::{Category, Patience, Weight};
use crate::kubernetes::{self, Cluster};
use crate::runtime;

/// What to check, and how to show it.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Check whether a control plane can be installed
    #[arg(long, conflicts_with_all = ["crds", "proxy"])]
    pre: bool,
    /// Check the CustomResourceDefinitions only
    #[arg(long, conflicts_with = "proxy")]
    crds: bool,
    /// Check the proxies too, of one namespace (-n) or of all
    #[arg(long)]
    proxy: bool,
    /// The namespace whose proxies are checked (with --proxy)
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// How long to wait for what is about to become ready
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    wait: Duration,
    /// How the result is shown
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// The version that everything should have
    #[arg(long, value_name = "VERSION")]
    expected_version: Option<String>,
    /// Check the CNI plugin; implied where the control plane is configured for it
    #[arg(long)]
    linkerd_cni_enabled: bool,
    /// The namespace of the CNI plugin
    #[arg(long, value_name = "NAMESPACE", default_value = "linkerd-cni")]
    cni_namespace: String,
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
enum Output {
    Table,
    Json,
    /// Only what is not well
    Short,
}

/// What is checked, and where.
#[derive(Clone, Debug)]
struct Scope {
    mode: Mode,
    /// The namespace of the control plane.
    control_plane: String,
    /// The namespace whose proxies are checked; all if absent.
    namespace: Option<String>,
    expected_version: Option<String>,
    cni_namespace: String,
    cni: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Pre,
    Crds,
    Installed,
    Proxy,
}

/// Checks, and reports while it goes on.
///
/// # Errors
/// Only what keeps it from reporting; a cluster that cannot be reached is a finding.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let scope = args.scope(flags);
    let reports = runtime()?.block_on(async {
        let cluster = flags.connect().await.map_err(|error| format!("{error:#}"));
        Box::pin(run(cluster.as_ref().map_err(String::as_str), &scope, args)).await
    })?;
    match args.output {
        Output::Json => crate::print(&report::json(&reports)?)?,
        Output::Table | Output::Short => crate::print(report::conclusion(&reports))?,
    }
    Ok(match report::succeeded(&reports) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

impl Args {
    fn scope(&self, flags: &kubernetes::Flags) -> Scope {
        let mode = match (self.pre, self.crds, self.proxy) {
            (true, ..) => Mode::Pre,
            (_, true, _) => Mode::Crds,
            (.., true) => Mode::Proxy,
            _ => Mode::Installed,
        };
        Scope {
            mode,
            control_plane: flags.linkerd_namespace.clone(),
            namespace: self.namespace.clone(),
            expected_version: self.expected_version.clone(),
            cni_namespace: self.cni_namespace.clone(),
            cni: self.linkerd_cni_enabled,
        }
    }
}

impl Scope {
    /// A command of ours for this control plane.
    fn tulle(&self, command: &str) -> String {
        match self.control_plane.as_str() {
            "linkerd" => format!("tulle {command}"),
            other => format!("tulle {command} -L {other}"),
        }
    }

    fn install_command(&self) -> String {
        let install = self.tulle("install");
        format!("{install} --crds | kubectl apply -f - && {install} | kubectl apply -f -")
    }

    fn upgrade_command(&self) -> String {
        format!(
            "{} | kubectl apply -f - (or `helm upgrade`, if Helm installed it)",
            self.tulle("upgrade")
        )
    }
}

async fn run(cluster: Result<&Cluster, &str>, scope: &Scope, args: &Args) -> anyhow::Result<Vec<CategoryReport>> {
    let deadline = Instant::now() + args.wait;
    let mut snapshot = Box::pin(gather::snapshot(cluster, scope)).await;
    let mut reports = Vec::new();
    let mut told = None;
    for category in categories(&snapshot) {
        let (report, weight) = loop {
            let (report, waiting, weight) = judge(&category, &snapshot);
            let Some(what) = waiting.filter(|_| Instant::now() < deadline) else {
                break (report, weight);
            };
            if told.replace(what) != Some(what) {
                eprintln!("waiting until it is true that {what}");
            }
            sleep(BETWEEN_REFRESHES).await;
            match cluster {
                Ok(cluster) => Box::pin(gather::refresh(cluster, &mut snapshot)).await,
                Err(_) => break (report, weight),
            }
        };
        let text = match args.output {
            Output::Table => report.table(),
            Output::Short => report.short(),
            Output::Json => String::new(),
        };
        crate::print(&text)?;
        reports.push(report);
        if weight == Weight::EndsTheRun {
            break;
        }
    }
    Ok(reports)
}

/// Judges a category until something fails after which nothing means anything.
///
/// Names the first failure that time may heal, if there is one.
fn judge(category: &Category, snapshot: &Snapshot) -> (CategoryReport, Option<&'static str>, Weight) {
    let mut waiting = None;
    let mut weight = Weight::Others;
    let mut checks = Vec::new();
    for check in &category.checks {
        let judgement = (check.judge)(snapshot);
        let failed = judgement
            .as_ref()
            .is_err_and(|problem| problem.severity == verdict::Severity::Error);
        checks.push(CheckReport::new(check.description, judgement));
        if failed && check.patience == Patience::UntilItSettles {
            waiting.get_or_insert(check.description);
        }
        if failed && check.weight == Weight::EndsTheRun {
            weight = Weight::EndsTheRun;
            break;
        }
    }
    let report = CategoryReport {
        name: category.name,
        checks,
    };
    (report, waiting, weight)
}

/// The checks of this mode, in order.
fn categories(snapshot: &Snapshot) -> Vec<Category> {
    let mut categories = vec![platform::kubernetes_api(), platform::kubernetes_version()];
    match snapshot.scope.mode {
        Mode::Pre => categories.push(platform::pre_kubernetes_setup()),
        Mode::Crds => categories.extend([platform::gateway_api(), control_plane::crds()]),
        Mode::Installed | Mode::Proxy => {
            categories.extend([
                platform::gateway_api(),
                control_plane::config(),
                control_plane::existence(),
                trust::identity(),
                trust::webhooks(),
                control_plane::version(),
            ]);
            if snapshot.scope.mode == Mode::Proxy {
                categories.extend([
                    data_plane::data_plane(),
                    trust::data_plane(),
                    data_plane::opaque_ports(),
                ]);
            }
            let values = snapshot.values().unwrap_or_default();
            if snapshot.scope.cni || snapshot::value(&values, "cniEnabled") == &serde_json::Value::Bool(true) {
                categories.push(control_plane::cni());
            }
            categories.push(control_plane::high_availability());
        }
    }
    categories
}

const BETWEEN_REFRESHES: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
Before, between and after the two steps of an installation:

  tulle check --pre
  tulle install --crds | kubectl apply -f -
  tulle check --crds
  tulle install | kubectl apply -f -
  tulle check

The proxies of a namespace, with the control plane:

  tulle check --proxy -n shop

For a script: exit code 1 if a check fails (× in the table), and only what is not well:

  tulle check -o short --wait 0";
