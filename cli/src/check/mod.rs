//! `tulle check`: checks that a cluster is ready for a mesh or that its mesh is healthy, and prints a fix for each problem.
//!
//! [`gather`] takes a snapshot of the cluster. Checks are pure functions of it, so each one is tested on plain objects.
//! Checks that can succeed later are repeated until they succeed or the wait time ends. No check modifies the cluster.

mod category;
mod control_plane;
pub(crate) mod data_plane;
mod gather;
mod platform;
pub(crate) mod problem;
pub(crate) mod report;
mod scope;
mod snapshot;
#[cfg(test)]
mod tests;
mod trust;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::ensure;
use clap::ValueEnum;
use tokio::time::{Instant, sleep};
use tulle_core::duration;

use self::category::{Category, OnFailure, RetryMode};
use self::report::{CategoryReport, CheckReport};
use self::scope::{Mode, Scope};
use self::snapshot::Snapshot;
use crate::kubernetes::{self, Cluster};
use crate::runtime;

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
    /// How long to wait for parts that are not ready yet
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    wait: Duration,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// The expected version of all components
    #[arg(long, value_name = "VERSION")]
    expected_version: Option<String>,
    /// Check the CNI plugin; default if the control plane is configured for it
    #[arg(long)]
    linkerd_cni_enabled: bool,
    /// The namespace of the CNI plugin
    #[arg(long, value_name = "NAMESPACE", default_value = DEFAULT_CNI_NAMESPACE)]
    cni_namespace: String,
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Output {
    Table,
    Json,
    /// Only problems, and the conclusion
    Short,
}

/// Runs the checks and prints the report.
///
/// # Errors
/// Fails only if it cannot print the report. An unreachable cluster is a problem in the report.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let scope = args.scope(flags);
    let reports = runtime()?.block_on(async {
        let cluster = flags.connect().await.map_err(|error| format!("{error:#}"));
        Box::pin(run(cluster.as_ref().map_err(String::as_str), &scope, args)).await
    })?;
    print_conclusion(&reports, args.output)
}

/// Prints the report of a category. JSON is printed at the end, with all categories.
///
/// # Errors
/// Fails if it cannot print.
pub(crate) fn print_report(report: &CategoryReport, output: Output) -> anyhow::Result<()> {
    match output {
        Output::Table => crate::print(&report.table()),
        Output::Short => crate::print(&report.short()),
        Output::Json => Ok(()),
    }
}

/// Prints the end of the output: the conclusion, or all categories as JSON. Returns the exit code.
///
/// # Errors
/// Fails if it cannot print.
pub(crate) fn print_conclusion(reports: &[CategoryReport], output: Output) -> anyhow::Result<ExitCode> {
    match output {
        Output::Json => crate::print(&report::json(reports)?)?,
        Output::Table | Output::Short => crate::print(report::conclusion(reports))?,
    }
    Ok(match report::succeeded(reports) {
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
            control_plane_namespace: flags.linkerd_namespace.clone(),
            namespace: self.namespace.clone(),
            expected_version: self.expected_version.clone(),
            cni_namespace: self.cni_namespace.clone(),
            check_cni: self.linkerd_cni_enabled,
        }
    }
}

async fn run(cluster: Result<&Cluster, &str>, scope: &Scope, args: &Args) -> anyhow::Result<Vec<CategoryReport>> {
    let deadline = Instant::now() + args.wait;
    let snapshot = Box::pin(gather::take_snapshot(cluster, scope)).await;
    run_categories(categories(&snapshot), cluster, snapshot, (deadline, args.output)).await
}

/// Runs the checks of these categories until the first fatal failure, and prints each report when its category has ended.
async fn run_categories(
    categories: Vec<Category>,
    cluster: Result<&Cluster, &str>,
    mut snapshot: Snapshot,
    (deadline, output): (Instant, Output),
) -> anyhow::Result<Vec<CategoryReport>> {
    let mut reports = Vec::new();
    for category in categories {
        let CategoryRun {
            report,
            has_fatal_failure,
            ..
        } = run_with_retries(&category, cluster, &mut snapshot, deadline).await;
        print_report(&report, output)?;
        reports.push(report);
        if has_fatal_failure {
            break;
        }
    }
    Ok(reports)
}

/// Waits until the checks of the API server and of the control plane's objects and pods succeed.
///
/// # Errors
/// Fails with each failed check and its fix: after `wait` if a failed check can succeed later, otherwise at once.
pub(crate) async fn wait_for_control_plane(cluster: &Cluster, wait: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + wait;
    let scope = default_scope(cluster, Mode::ControlPlane);
    let mut snapshot = Box::pin(gather::take_snapshot(Ok(cluster), &scope)).await;
    for category in categories(&snapshot) {
        let run = run_with_retries(&category, Ok(cluster), &mut snapshot, deadline).await;
        let failures = run.report.failures();
        ensure!(
            failures.is_empty(),
            "checks of the control plane in namespace {} failed:\n{}",
            cluster.control_plane_namespace,
            failures.trim_end()
        );
    }
    Ok(())
}

/// Runs the checks of the proxies of one namespace, without those of the control plane, and prints the reports.
///
/// # Errors
/// Fails if it cannot print.
pub(crate) async fn check_proxies(
    cluster: &Cluster,
    namespace: &str,
    deadline: Instant,
    output: Output,
) -> anyhow::Result<Vec<CategoryReport>> {
    let scope = Scope {
        namespace: Some(namespace.to_owned()),
        ..default_scope(cluster, Mode::Proxy)
    };
    let snapshot = Box::pin(gather::take_snapshot(Ok(cluster), &scope)).await;
    run_categories(proxy_categories().into(), Ok(cluster), snapshot, (deadline, output)).await
}

fn default_scope(cluster: &Cluster, mode: Mode) -> Scope {
    Scope {
        mode,
        control_plane_namespace: cluster.control_plane_namespace.clone(),
        namespace: None,
        expected_version: None,
        cni_namespace: DEFAULT_CNI_NAMESPACE.to_owned(),
        check_cni: false,
    }
}

/// Runs the checks of a category, and repeats them until those that can succeed later succeed, or until the deadline.
async fn run_with_retries(
    category: &Category,
    cluster: Result<&Cluster, &str>,
    snapshot: &mut Snapshot,
    deadline: Instant,
) -> CategoryRun {
    let mut last_message = None;
    loop {
        let run = run_category(category, snapshot);
        let Some(description) = run.first_retryable_failure.filter(|_| Instant::now() < deadline) else {
            return run;
        };
        if last_message.replace(description) != Some(description) {
            eprintln!("waiting for: {description}");
        }
        sleep(REFRESH_INTERVAL).await;
        match cluster {
            Ok(cluster) => Box::pin(gather::refresh(cluster, snapshot)).await,
            Err(_) => return run,
        }
    }
}

/// The results of one run of a category.
struct CategoryRun {
    report: CategoryReport,
    /// The description of the first failed check that can succeed later.
    first_retryable_failure: Option<&'static str>,
    /// Whether a fatal check failed. All later checks depend on it.
    has_fatal_failure: bool,
}

/// Runs the checks of a category and stops after a fatal failure.
fn run_category(category: &Category, snapshot: &Snapshot) -> CategoryRun {
    let mut first_retryable_failure = None;
    let mut has_fatal_failure = false;
    let mut checks = Vec::new();
    for check in &category.checks {
        let result = (check.run)(snapshot);
        let failed = result
            .as_ref()
            .is_err_and(|problem| problem.severity == problem::Severity::Error);
        checks.push(CheckReport::new(check.description, result));
        if failed && check.retry == RetryMode::UntilTimeout {
            first_retryable_failure.get_or_insert(check.description);
        }
        if failed && check.on_failure == OnFailure::Abort {
            has_fatal_failure = true;
            break;
        }
    }
    let report = CategoryReport {
        name: category.name,
        checks,
    };
    CategoryRun {
        report,
        first_retryable_failure,
        has_fatal_failure,
    }
}

/// The checks of this mode, in order.
fn categories(snapshot: &Snapshot) -> Vec<Category> {
    let mut categories = vec![platform::kubernetes_api(), platform::kubernetes_version()];
    match snapshot.scope.mode {
        Mode::Pre => categories.push(platform::pre_kubernetes_setup()),
        Mode::Crds => categories.extend([platform::gateway_api(), control_plane::crds()]),
        Mode::ControlPlane => categories.push(control_plane::existence()),
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
                categories.extend(proxy_categories());
            }
            let values = snapshot.values().unwrap_or_default();
            if snapshot.scope.check_cni || snapshot::value_at(&values, "cniEnabled") == &serde_json::Value::Bool(true) {
                categories.push(control_plane::cni());
            }
            categories.push(control_plane::high_availability());
        }
    }
    categories
}

fn proxy_categories() -> [Category; 3] {
    [
        data_plane::data_plane(),
        trust::data_plane(),
        data_plane::opaque_ports(),
    ]
}

const DEFAULT_CNI_NAMESPACE: &str = "linkerd-cni";
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);

const EXAMPLES: &str = "\
Before, between and after the two steps of an installation:

  tulle check --pre
  tulle install --crds | kubectl apply -f -
  tulle check --crds
  tulle install | kubectl apply -f -
  tulle check

The proxies of a namespace, with the control plane:

  tulle check --proxy -n shop

For a script: prints only problems and the conclusion. The exit code is 1 if a check fails (× in the table):

  tulle check -o short --wait 0";
