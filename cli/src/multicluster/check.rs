//! `tulle multicluster check`: checks each Link, from its credentials to the endpoints of its mirrors, and prints a fix for each
//! problem.
//!
//! [`check_state`] reads the state of this cluster and of each linked cluster. Checks are pure functions of this state.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tulle_core::duration;

use super::check_state::{self, LinkState, MulticlusterState};
use crate::check::problem::{CheckResult, Problem, error, listing, warning};
use crate::check::report::{self, CategoryReport, CheckReport};
use crate::check::{Output, print_conclusion};
use crate::{kubernetes, runtime};

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
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
    let report = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        let deadline = Instant::now() + args.wait;
        loop {
            let state = check_state::gather(&cluster, args.timeout).await;
            let report = report(&state);
            if !has_retryable_failure(&report) || Instant::now() >= deadline {
                return anyhow::Ok(report);
            }
            sleep(RETRY_INTERVAL).await;
        }
    })?;
    let reports = [report];
    let text = match args.output {
        Output::Table => reports[0].table(),
        Output::Short => reports[0].short(),
        Output::Json => String::new(),
    };
    crate::print(&text)?;
    print_conclusion(&reports, args.output)
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
            let link_checks: [(&str, LinkCheck); 9] = [
                (LINK_CRD_EXISTS, |_, _| Ok(())),
                ("Link resources are valid", each_cluster_has_one_link),
                ("Link and CLI versions match", versions_match),
                ("remote cluster access credentials are valid", credentials_are_valid),
                (
                    "the destination service has the credentials of linked clusters",
                    destination_has_credentials,
                ),
                ("clusters share trust anchors", clusters_share_anchors),
                (CONTROLLERS_RUNNING, controllers_run),
                (GATEWAYS_REACHABLE, gateways_are_alive),
                ("all mirror services have endpoints", mirrors_have_endpoints),
            ];
            let results = link_checks.map(|(description, run)| CheckReport::new(description, run(links, state)));
            checks.extend(results);
        }
        Ok(_) => checks.push(CheckReport::new(LINK_CRD_EXISTS, Ok(()))),
    }
    checks.push(CheckReport::new(
        "all mirror services are part of a Link",
        mirrors_belong_to_links(state),
    ));
    CategoryReport {
        name: "linkerd-multicluster",
        checks,
    }
}

/// Whether a check failed that can succeed later.
fn has_retryable_failure(report: &CategoryReport) -> bool {
    let failed = report
        .checks
        .iter()
        .filter(|check| check.result == report::Outcome::Error);
    failed
        .into_iter()
        .any(|check| [CONTROLLERS_RUNNING, GATEWAYS_REACHABLE].contains(&check.description))
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

/// Fails if several Links lead to one cluster.
fn each_cluster_has_one_link(links: &[LinkState], _: &MulticlusterState) -> CheckResult {
    let mut by_cluster = BTreeMap::<&str, Vec<&str>>::new();
    for link in links {
        by_cluster.entry(&link.cluster).or_default().push(&link.name);
    }
    let duplicates = by_cluster.iter().filter(|(_, names)| names.len() > 1);
    let lines: Vec<_> = duplicates
        .map(|(cluster, names)| format!("{cluster}: {}", names.join(", ")))
        .collect();
    fail_unless_empty(lines, |lines| {
        error(
            listing("several Links lead to one cluster:", lines),
            "tulle multicluster unlink --cluster-name NAME | kubectl delete -f - (for all but one)",
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

fn clusters_share_anchors(links: &[LinkState], state: &MulticlusterState) -> CheckResult {
    let own = match &state.anchors {
        Ok(own) => own,
        Err(cause) => {
            return Err(error(
                format!("the trust anchors of this cluster cannot be read: {cause}"),
                "pass the namespace of the control plane with -L",
            ));
        }
    };
    let mut lines = Vec::new();
    for link in links {
        let Ok(target) = &link.target else { continue };
        match &target.anchors {
            Ok(anchors) if anchors.iter().any(|anchor| own.contains(anchor)) => {}
            Ok(_) => lines.push(format!("{}: no trust anchor in common", link.name)),
            Err(cause) => lines.push(format!("{}: {cause}", link.name)),
        }
    }
    fail_unless_empty(lines, |lines| {
        error(
            listing("clusters whose identities are not trusted here:", lines),
            "add the anchor of each cluster to the bundle of the other, as in docs/how-to/rotate-trust.md",
        )
    })
}

fn controllers_run(links: &[LinkState], state: &MulticlusterState) -> CheckResult {
    let controllers = listed_objects("Deployments", &state.controllers)?;
    let lines = links.iter().filter_map(|link| {
        let found = controllers
            .iter()
            .filter(|controller| controller.link_name == link.name);
        let found: Vec<_> = found.collect();
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
            "add each Link to `controllers` of the chart, once: tulle multicluster install --set 'controllers[0].link.ref.name=NAME' | \
             kubectl apply -f -",
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
const GATEWAYS_REACHABLE: &str = "probe services able to communicate with all gateway mirrors";
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

const EXAMPLES: &str = "\
In the cluster that uses Services of others:

  tulle multicluster check
  tulle multicluster check -o short --wait 0";

#[cfg(test)]
mod tests {
    use super::super::check_state::{Controller, MirrorService, Target};
    use super::super::gateways::Probes;
    use super::*;

    fn link(name: &str) -> LinkState {
        LinkState {
            name: name.to_owned(),
            cluster: name.to_owned(),
            created_by: Some(format!("tulle/cli {}", env!("CARGO_PKG_VERSION"))),
            has_gateway: true,
            target: Ok(Target {
                anchors: Ok(vec![vec![1]]),
            }),
            discovery_secret: Ok(()),
            gateway: Ok(()),
        }
    }

    fn healthy() -> MulticlusterState {
        MulticlusterState {
            namespace: Ok(Some("linkerd-multicluster".to_owned())),
            links: Ok(vec![link("east")]),
            anchors: Ok(vec![vec![1], vec![2]]),
            controllers: Ok(vec![Controller {
                name: "controller-east".to_owned(),
                link_name: "east".to_owned(),
                available: 1,
            }]),
            mirrors: Ok(vec![MirrorService {
                namespace: "shop".to_owned(),
                name: "web-east".to_owned(),
                cluster: Some("east".to_owned()),
                needs_endpoints: true,
                has_endpoints: true,
            }]),
        }
    }

    fn problems(state: &MulticlusterState) -> Vec<String> {
        let checks = report(state).checks.into_iter();
        checks.filter_map(|check| check.error).collect()
    }

    #[test]
    fn a_healthy_link_has_no_problem() {
        assert_eq!(problems(&healthy()), Vec::<String>::new());
        assert!(!has_retryable_failure(&report(&healthy())));
        let unused = MulticlusterState {
            links: Ok(Vec::new()),
            controllers: Ok(Vec::new()),
            mirrors: Ok(Vec::new()),
            ..healthy()
        };
        assert_eq!(problems(&unused), Vec::<String>::new());
    }

    #[test]
    fn each_problem_is_found_with_its_link() {
        let with_link = |change: fn(&mut LinkState)| {
            let mut state = healthy();
            state.links.as_mut().unwrap().iter_mut().for_each(change);
            state
        };
        let with_state = |change: fn(&mut MulticlusterState)| {
            let mut state = healthy();
            change(&mut state);
            state
        };
        for (state, expected) in [
            (
                with_state(|state| state.namespace = Ok(None)),
                "no namespace has the label",
            ),
            (
                with_state(|state| {
                    state.links.as_mut().unwrap().push(LinkState {
                        cluster: "east".to_owned(),
                        ..link("e2")
                    })
                }),
                "east: east, e2",
            ),
            (
                with_link(|link| link.created_by = Some("tulle/cli 0.0.1".to_owned())),
                "created by tulle/cli 0.0.1",
            ),
            (
                with_link(|link| link.target = Err("it is away".to_owned())),
                "east: it is away",
            ),
            (
                with_link(|link| link.discovery_secret = Err("no label".to_owned())),
                "east: no label",
            ),
            (
                with_state(|state| state.anchors = Ok(vec![vec![9]])),
                "east: no trust anchor in common",
            ),
            (
                with_state(|state| state.controllers = Ok(Vec::new())),
                "east: there is no controller",
            ),
            (
                with_state(|state| state.controllers.as_mut().unwrap()[0].available = 0),
                "has no available pod",
            ),
            (
                with_link(|link| link.gateway = Err("it does not respond".to_owned())),
                "east: it does not respond",
            ),
            (
                with_state(|state| state.controllers = Err("forbidden".to_owned())),
                "listing Deployments: forbidden",
            ),
            (
                with_state(|state| state.mirrors = Err("forbidden".to_owned())),
                "listing Services and Endpoints: forbidden",
            ),
            (
                with_state(|state| state.mirrors.as_mut().unwrap()[0].has_endpoints = false),
                "shop/web-east",
            ),
            (
                with_state(|state| state.mirrors.as_mut().unwrap()[0].cluster = Some("gone".to_owned())),
                "shop/web-east of gone",
            ),
        ] {
            let found = problems(&state).join("\n");
            assert!(found.contains(expected), "{expected} is not in {found:?}");
        }
        let mut state = healthy();
        state.controllers = Ok(Vec::new());
        assert!(has_retryable_failure(&report(&state)));
    }

    #[test]
    fn the_problem_of_a_gateway_is_why_the_metrics_of_its_controller_are_not_read() {
        let mut probes = Probes::default();
        let cause = "getting /metrics from port 9999 of pod a/b: no response within 10s";
        probes.failures.insert("east".to_owned(), cause.to_owned());
        let mut state = healthy();
        state.links.as_mut().unwrap()[0].gateway = probes.check("east", "east");
        let found = problems(&state).join("\n");
        assert!(found.contains(&format!("east: {cause}")), "{found}");
    }
}
