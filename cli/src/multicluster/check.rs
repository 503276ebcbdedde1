//! `tulle multicluster check`: checks each Link, from its credentials to the endpoints of its mirrors, and prints a fix for each
//! problem.
//!
//! [`check_state`] reads the state of this cluster and of each linked cluster. Checks are pure functions of this state.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tulle_core::duration;

use super::check_state::{self, Controller, LinkState, MulticlusterState};
use super::check_trust::{self, Finding};
use crate::check::problem::{CheckResult, Problem, error, listing, warning};
use crate::check::report::{self, CategoryReport, CheckReport};
use crate::check::{Output, check_proxies, print_conclusion, print_report};
use crate::kubernetes::{self, Cluster};
use crate::runtime;

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Check the proxies of one namespace too (-n)
    #[arg(long)]
    proxy: bool,
    /// The namespace whose proxies are checked (with --proxy) [default: that of the extension]
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// How long to wait for parts that are not ready yet
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    wait: Duration,
    /// How long to wait for the other clusters, and for the metrics of the controllers
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse)]
    timeout: Duration,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Runs the checks and prints the report.
///
/// # Errors
/// Fails if the cluster cannot be reached, or if the report cannot be printed.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let reports = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        Box::pin(run(&cluster, args)).await
    })?;
    print_conclusion(&reports, args.output)
}

/// Runs the checks of Links until they succeed, or until the wait time ends, and then those of proxies.
async fn run(cluster: &Cluster, args: &Args) -> anyhow::Result<Vec<CategoryReport>> {
    let deadline = Instant::now() + args.wait;
    let (state, report) = loop {
        let state = check_state::gather(cluster, args.timeout).await;
        let report = report(&state);
        if !has_retryable_failure(&report) || Instant::now() >= deadline {
            break (state, report);
        }
        sleep(RETRY_INTERVAL).await;
    };
    print_report(&report, args.output)?;
    let mut reports = vec![report];
    let namespace = args.namespace.clone().or_else(|| state.namespace.ok().flatten());
    if let Some(namespace) = namespace.filter(|_| args.proxy) {
        let of_proxies = Box::pin(check_proxies(cluster, &namespace, deadline, args.output));
        reports.extend(of_proxies.await?);
    }
    Ok(reports)
}

/// A check of all Links.
type LinkCheck = fn(&[LinkState], &MulticlusterState) -> CheckResult;

/// Runs all checks. The checks of Links are omitted if there are no Links, or if Links cannot be listed.
fn report(state: &MulticlusterState) -> CategoryReport {
    let mut checks = vec![CheckReport::new(EXTENSION_INSTALLED, extension_is_installed(state))];
    match &state.links {
        Err(cause) => {
            let fix = "tulle install --crds | kubectl apply -f -";
            let problem = error(format!("Links cannot be listed: {cause}"), fix);
            checks.push(CheckReport::new(LINK_CRD_EXISTS, Err(problem)));
        }
        Ok(links) if !links.is_empty() => {
            let link_checks: [(&str, LinkCheck); 15] = [
                (LINK_CRD_EXISTS, |_, _| Ok(())),
                ("Link resources are valid", each_cluster_has_one_link),
                ("Link and CLI versions match", versions_match),
                ("remote cluster access credentials are valid", credentials_are_valid),
                (
                    "remote cluster access credentials do not expire soon",
                    credentials_stay_valid,
                ),
                (
                    "the destination service has the credentials of linked clusters",
                    destination_has_credentials,
                ),
                (
                    "each linked cluster has one secret for the destination service",
                    each_cluster_has_one_secret,
                ),
                ("clusters share trust anchors", clusters_share_anchors),
                (
                    "service mirror controller has required permissions",
                    controllers_have_permissions,
                ),
                (CONTROLLERS_RUNNING, controllers_run),
                ("extension is managing controllers", controllers_are_managed),
                (
                    "exported services of linked clusters are known",
                    exported_services_are_known,
                ),
                ("probe services have a port for probes", probe_services_are_valid),
                (GATEWAYS_REACHABLE, gateways_are_alive),
                ("all mirror services have endpoints", mirrors_have_endpoints),
            ];
            let results = link_checks.map(|(description, run)| CheckReport::new(description, run(links, state)));
            checks.extend(results);
        }
        Ok(_) => checks.push(CheckReport::new(LINK_CRD_EXISTS, Ok(()))),
    }
    checks.extend([
        CheckReport::new("all mirror services are part of a Link", mirrors_belong_to_links(state)),
        CheckReport::new(
            "all members of federated services are part of a Link",
            members_belong_to_links(state),
        ),
        CheckReport::new(
            "routes of exported services have no mirror services as backends",
            routes_have_no_mirrors(state),
        ),
        CheckReport::new(PROXIES_HEALTHY, proxies_are_ready(state)),
    ]);
    CategoryReport {
        name: "linkerd-multicluster",
        checks,
    }
}

/// Whether a check found a problem that can end later.
fn has_retryable_failure(report: &CategoryReport) -> bool {
    let mut found = report
        .checks
        .iter()
        .filter(|check| check.result != report::Outcome::Success);
    found.any(|check| [CONTROLLERS_RUNNING, GATEWAYS_REACHABLE, PROXIES_HEALTHY].contains(&check.description))
}

fn extension_is_installed(state: &MulticlusterState) -> CheckResult {
    match &state.namespace {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(error(
            "no namespace has the label linkerd.io/extension=multicluster",
            "tulle multicluster install | kubectl apply -f -",
        )),
        Err(cause) => Err(error(cause.clone(), "grant this user permission to list namespaces")),
    }
}

/// Fails if several Links lead to one cluster, or if Links of several namespaces have one name.
fn each_cluster_has_one_link(links: &[LinkState], _: &MulticlusterState) -> CheckResult {
    let (mut by_cluster, mut by_name) = (BTreeMap::<&str, Vec<&str>>::new(), BTreeMap::<&str, Vec<&str>>::new());
    for link in links {
        by_cluster.entry(&link.cluster).or_default().push(&link.name);
        by_name.entry(&link.name).or_default().push(&link.namespace);
    }
    let of_one_cluster = by_cluster.iter().filter(|(_, names)| names.len() > 1);
    let of_one_cluster =
        of_one_cluster.map(|(cluster, names)| format!("several Links lead to {cluster}: {}", names.join(", ")));
    let of_one_name = by_name.iter().filter(|(_, namespaces)| namespaces.len() > 1);
    // The cluster-wide objects of a controller are named after its Link.
    let of_one_name = of_one_name.map(|(name, namespaces)| {
        format!(
            "the controllers of the Links {name} in the namespaces {} have the same names",
            namespaces.join(", ")
        )
    });
    fail_unless_empty(of_one_cluster.chain(of_one_name).collect(), |lines| {
        error(
            listing("Links that exclude each other:", lines),
            "tulle multicluster unlink --namespace NAMESPACE --cluster-name NAME | kubectl delete -f - (for all but one)",
        )
    })
}

fn versions_match(links: &[LinkState], _: &MulticlusterState) -> CheckResult {
    let own = env!("CARGO_PKG_VERSION");
    let is_other = |link: &&LinkState| {
        let version = link.created_by.as_deref().and_then(|text| text.rsplit_once(' '));
        version.is_none_or(|(program, version)| !program.ends_with("/cli") || version != own)
    };
    let lines: Vec<_> = links
        .iter()
        .filter(is_other)
        .map(|link| {
            let created_by = link.created_by.as_deref().unwrap_or("an unknown program");
            format!("{}: created by {created_by}, not by version {own}", link.name)
        })
        .collect();
    fail_unless_empty(lines, |lines| {
        warning(
            listing("Links of other versions:", lines),
            "tulle --context TARGET multicluster link-gen --cluster-name NAME | kubectl apply -f -",
        )
    })
}

fn credentials_are_valid(links: &[LinkState], _: &MulticlusterState) -> CheckResult {
    fail_unless_empty(
        failure_lines(links, |link| link.target.as_ref().err().cloned()),
        |lines| {
            error(
                listing("clusters that cannot be read:", lines),
                "tulle --context TARGET multicluster link-gen --cluster-name NAME | kubectl apply -f -",
            )
        },
    )
}

fn credentials_stay_valid(links: &[LinkState], _: &MulticlusterState) -> CheckResult {
    let expiring = links.iter().flat_map(|link| {
        let lines = link.expiring_credentials.iter();
        lines.map(move |text| format!("{}: {text}", link.name))
    });
    fail_unless_empty(expiring.collect(), |lines| {
        warning(
            listing("credentials that expire within a week:", lines),
            "tulle --context TARGET multicluster link-gen --cluster-name NAME --token-duration 90d | kubectl apply -f -",
        )
    })
}

fn destination_has_credentials(links: &[LinkState], _: &MulticlusterState) -> CheckResult {
    fail_unless_empty(
        failure_lines(links, |link| link.discovery_secret.as_ref().err().cloned()),
        |lines| {
            warning(
                listing(
                    "mirrors without a gateway and federated Services get no endpoints from these clusters:",
                    lines,
                ),
                "tulle --context TARGET multicluster link-gen --cluster-name NAME | kubectl apply -f -",
            )
        },
    )
}

fn each_cluster_has_one_secret(_: &[LinkState], state: &MulticlusterState) -> CheckResult {
    let secrets = listed_or_unknown("Secrets of the control plane", &state.discovery_secrets)?;
    let mut by_cluster = BTreeMap::<&str, Vec<&str>>::new();
    for secret in secrets {
        by_cluster.entry(&secret.cluster).or_default().push(&secret.name);
    }
    let duplicates = by_cluster.iter().filter(|(_, names)| names.len() > 1);
    let lines = duplicates.map(|(cluster, names)| format!("{cluster}: {}", names.join(", ")));
    fail_unless_empty(lines.collect(), |lines| {
        warning(
            listing(
                "several Secrets have the label of one cluster; only cluster-credentials-NAME is read:",
                lines,
            ),
            "kubectl delete secret -n linkerd SECRET (for the others, in the namespace of the control plane)",
        )
    })
}

fn clusters_share_anchors(links: &[LinkState], state: &MulticlusterState) -> CheckResult {
    let own = match &state.trust {
        Ok(own) => own,
        Err(cause) => {
            return Err(error(
                format!("the trust anchors of this cluster cannot be read: {cause}"),
                "pass the namespace of the control plane with -L",
            ));
        }
    };
    let (mut untrusted, mut unknown) = (Vec::new(), Vec::new());
    for link in links {
        let Ok(target) = &link.target else { continue };
        let compared = match &target.trust {
            Ok(trust) => check_trust::compare(own, trust),
            Err(cause) => Err(Finding::Untrusted(cause.clone())),
        };
        match compared {
            Ok(()) => {}
            Err(Finding::Untrusted(text)) => untrusted.push(format!("{}: {text}", link.name)),
            Err(Finding::Unknown(text)) => unknown.push(format!("{}: {text}", link.name)),
        }
    }
    let fix = "add the trust anchors of each cluster to those of the other, as in docs/how-to/multicluster.md";
    fail_unless_empty(untrusted, |lines| {
        error(
            listing(
                "clusters whose proxies do not trust those of this cluster, or are not trusted:",
                lines,
            ),
            fix,
        )
    })?;
    fail_unless_empty(unknown, |lines| {
        warning(
            listing(
                "clusters whose proxies may not trust those of this cluster, or not be trusted:",
                lines,
            ),
            fix,
        )
    })
}

fn controllers_have_permissions(links: &[LinkState], state: &MulticlusterState) -> CheckResult {
    fail_unless_empty(
        failure_lines(links, |link| link.permissions.as_ref().err().cloned()),
        |lines| {
            error(
                listing("controllers without their account or permissions:", lines),
                format!(
                    "{}; if the Role of the credentials is missing, apply the output of `tulle multicluster link-gen` for this Link again",
                    install_service_mirror(state)
                ),
            )
        },
    )
}

fn exported_services_are_known(links: &[LinkState], _: &MulticlusterState) -> CheckResult {
    fail_unless_empty(
        failure_lines(links, |link| link.status.as_ref().err().cloned()),
        |lines| {
            error(
                listing(
                    "Links whose mirrors do not change, because the linked cluster is not read:",
                    lines,
                ),
                "fix the cause; for a Secret that the service mirror may not read, apply the output of `tulle multicluster link-gen` for \
             this Link again",
            )
        },
    )
}

fn controllers_run(links: &[LinkState], state: &MulticlusterState) -> CheckResult {
    let controllers = listed_objects("Deployments", &state.controllers)?;
    let lines = links.iter().filter_map(|link| {
        let own = |controller: &&Controller| controller.link_name.as_ref() == Some(&link.name);
        let for_all =
            |controller: &&Controller| controller.link_name.is_none() && controller.namespace == link.namespace;
        let mut found: Vec<_> = controllers.iter().filter(own).collect();
        if found.is_empty() {
            found.extend(controllers.iter().filter(for_all));
        }
        match &found[..] {
            [controller] if controller.available > 0 => None,
            [controller] => Some(format!(
                "{}: Deployment {} has no available pod",
                link.name, controller.name
            )),
            [] => Some(format!("{}: there is no controller", link.name)),
            _ => Some(format!("{}: there are {} controllers", link.name, found.len())),
        }
    });
    fail_unless_empty(lines.collect(), |lines| {
        error(
            listing("Links without exactly one running controller:", lines),
            install_service_mirror(state),
        )
    })
}

/// The fix that installs the service mirror for all Links. The extension has a gateway only if it is installed with one.
fn install_service_mirror(state: &MulticlusterState) -> String {
    let (gateway, hint) = match state.has_gateway {
        Ok(true) => ("", ""),
        Ok(false) => (" --gateway=false", ""),
        Err(_) => ("", ", and with --gateway=false if this cluster has no gateway"),
    };
    format!(
        "`tulle multicluster install{gateway} --set serviceMirror.enabled=true | kubectl apply -f -` with the other values of the \
         installation{hint}"
    )
}

fn controllers_are_managed(links: &[LinkState], state: &MulticlusterState) -> CheckResult {
    let controllers = listed_objects("Deployments", &state.controllers)?;
    let legacy = controllers.iter().filter(|controller| controller.is_legacy);
    let lines = legacy.filter_map(|controller| {
        let link = links
            .iter()
            .find(|link| controller.link_name.as_ref() == Some(&link.name))?;
        Some(format!("{}: Deployment {}", link.name, controller.name))
    });
    fail_unless_empty(lines.collect(), |lines| {
        warning(
            listing("controllers that the deprecated command `link` created:", lines),
            "install the service mirror for all Links (serviceMirror.enabled of the chart), apply the output of `tulle multicluster \
             link-gen` for the Link again, by which it may read the credentials, and then: tulle multicluster unlink --cluster-name NAME \
             --only-controller | kubectl delete -f -",
        )
    })
}

fn probe_services_are_valid(links: &[LinkState], _: &MulticlusterState) -> CheckResult {
    let failure = |link: &LinkState| {
        let failure = link.probe_service.as_ref().err();
        failure.filter(|_| link.has_gateway).cloned()
    };
    fail_unless_empty(failure_lines(links, failure), |lines| {
        error(
            listing("gateways that are not probed, and count as alive:", lines),
            "kubectl logs -n linkerd-multicluster deploy/linkerd-service-mirror (it creates a missing Service; one without the port \
             is not changed), or, for a Link of `controllers`, install the chart again",
        )
    })
}

fn gateways_are_alive(links: &[LinkState], _: &MulticlusterState) -> CheckResult {
    let failure = |link: &LinkState| link.gateway.as_ref().err().filter(|_| link.has_gateway).cloned();
    fail_unless_empty(failure_lines(links, failure), |lines| {
        error(
            listing(
                "gateways that do not respond to probes, or of which this is not known:",
                lines,
            ),
            "check that pods of this cluster reach gatewayAddress of the Link at its ports (`kubectl get links -A -o yaml`); \
             if the metrics of a controller are not read, pass a longer --timeout, or see the logs of its pod",
        )
    })
}

fn mirrors_have_endpoints(_: &[LinkState], state: &MulticlusterState) -> CheckResult {
    let mirrors = listed_objects("Services and Endpoints", &state.mirrors)?;
    let empty = mirrors
        .iter()
        .filter(|mirror| mirror.needs_endpoints && !mirror.has_endpoints);
    let lines = empty.map(|mirror| format!("{}/{}", mirror.namespace, mirror.name));
    fail_unless_empty(lines.collect(), |lines| {
        error(
            listing("mirrors without endpoints:", lines),
            "check that the Services have ready endpoints in their cluster, and the status of the Link",
        )
    })
}

fn mirrors_belong_to_links(state: &MulticlusterState) -> CheckResult {
    let links = state.links.as_deref().unwrap_or_default();
    let mirrors = listed_objects("Services and Endpoints", &state.mirrors)?;
    let orphans = mirrors.iter().filter(|mirror| {
        let cluster = mirror.cluster.as_deref();
        cluster.is_some_and(|cluster| links.iter().all(|link| link.cluster != cluster))
    });
    let lines = orphans.map(|mirror| {
        let cluster = mirror.cluster.as_deref().unwrap_or_default();
        format!("{}/{} of {cluster}", mirror.namespace, mirror.name)
    });
    fail_unless_empty(lines.collect(), |lines| {
        warning(
            listing("mirrors of clusters without a Link:", lines),
            "kubectl delete service -n NAMESPACE NAME (for each), or link the cluster again",
        )
    })
}

fn members_belong_to_links(state: &MulticlusterState) -> CheckResult {
    // If the Links could not be listed, it is unknown which clusters have no Link.
    let Ok(links) = &state.links else { return Ok(()) };
    let mirrors = listed_objects("Services and Endpoints", &state.mirrors)?;
    let mut lines = Vec::new();
    for federated in mirrors {
        for member in &federated.members {
            let cluster = member.rsplit_once('@').map_or("", |(_, cluster)| cluster);
            if links.iter().all(|link| link.cluster != cluster) {
                lines.push(format!("{}/{}: {member}", federated.namespace, federated.name));
            }
        }
    }
    fail_unless_empty(lines, |lines| {
        warning(
            listing("members of clusters without a Link:", lines),
            "kubectl logs -n linkerd-multicluster deploy/linkerd-local-service-mirror (it removes them after a minute), or link the \
             cluster again",
        )
    })
}

/// Warns of routes by which requests from another cluster are sent on to another cluster. If that one has such a route, too, they
/// loop.
fn routes_have_no_mirrors(state: &MulticlusterState) -> CheckResult {
    let lines = listed_or_unknown("routes of all namespaces", &state.routes_to_mirrors)?;
    fail_unless_empty(lines.to_vec(), |lines| {
        warning(
            listing("routes that send requests of other clusters to another cluster:", lines),
            "export a Service that has no such route, because requests that clusters send to each other end with status 508",
        )
    })
}

fn proxies_are_ready(state: &MulticlusterState) -> CheckResult {
    let lines = listed_or_unknown("pods of the extension", &state.unready_proxies)?;
    fail_unless_empty(lines.to_vec(), |lines| {
        warning(
            listing("pods without a proxy that is ready:", lines),
            "tulle check --proxy -n linkerd-multicluster",
        )
    })
}

/// Returns the listed objects, or a warning if they could not be listed.
fn listed_or_unknown<'a, T>(kinds: &str, found: &'a Result<Vec<T>, String>) -> Result<&'a [T], Problem> {
    found.as_deref().map_err(|cause| {
        warning(
            format!("unknown: {cause}"),
            format!("act as a user with permission to list {kinds} (--as USER, --context NAME)"),
        )
    })
}

/// Returns a line for each Link for which `failure` returns a text.
fn failure_lines(links: &[LinkState], failure: impl Fn(&LinkState) -> Option<String>) -> Vec<String> {
    let lines = links
        .iter()
        .filter_map(|link| Some(format!("{}: {}", link.name, failure(link)?)));
    lines.collect()
}

/// Returns the listed objects, or a problem if they could not be listed.
fn listed_objects<'a, T>(kinds: &str, found: &'a Result<Vec<T>, String>) -> Result<&'a [T], Problem> {
    found.as_deref().map_err(|cause| {
        error(
            format!("listing {kinds}: {cause}"),
            format!("grant this user permission to list {kinds} of all namespaces"),
        )
    })
}

/// Fails with a problem of these lines if there are any.
fn fail_unless_empty(lines: Vec<String>, problem: impl FnOnce(&[String]) -> Problem) -> CheckResult {
    match lines.is_empty() {
        true => Ok(()),
        false => Err(problem(&lines)),
    }
}

/// Descriptions of checks.
const EXTENSION_INSTALLED: &str = "multicluster extension is installed";
const LINK_CRD_EXISTS: &str = "Link CRD exists";
const CONTROLLERS_RUNNING: &str = "service mirror controllers are running";
const PROXIES_HEALTHY: &str = "multicluster extension proxies are healthy";
const GATEWAYS_REACHABLE: &str = "probe services able to communicate with all gateway mirrors";
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

const EXAMPLES: &str = "\
In the cluster that uses Services of others:

  tulle multicluster check
  tulle multicluster check -o short --wait 0

With the proxies of the extension, as `tulle check --proxy` checks them:

  tulle multicluster check --proxy";
