//! Tests of the checks: each state has no problem, or exactly one.

use std::sync::LazyLock;

use serde_json::Value;
use tulle_control::trust;

use super::super::check_state::{Controller, DiscoverySecret, MirrorService, Target};
use super::super::check_trust::ClusterTrust;
use super::super::gateways::Probes;
use super::*;
use crate::certificates::Certificate;

static ANCHORS: LazyLock<[Vec<Certificate>; 2]> = LazyLock::new(|| {
    ["one", "two"].map(|name| {
        let anchor = trust::create_anchor(name, Duration::from_secs(86_400)).unwrap();
        Certificate::parse_bundle(anchor.certificate.as_bytes()).unwrap()
    })
});

/// A cluster that trusts these of [`ANCHORS`], and whose certificates are not known.
fn trust_in(anchors: &[usize]) -> ClusterTrust {
    ClusterTrust {
        anchors: anchors.iter().flat_map(|index| ANCHORS[*index].clone()).collect(),
        chain: Err("forbidden".to_owned()),
    }
}

fn link(name: &str) -> LinkState {
    LinkState {
        namespace: "linkerd-multicluster".to_owned(),
        name: name.to_owned(),
        cluster: name.to_owned(),
        created_by: Some(format!("tulle/cli {}", env!("CARGO_PKG_VERSION"))),
        has_gateway: true,
        target: Ok(Target {
            trust: Ok(trust_in(&[0])),
        }),
        discovery_secret: Ok(()),
        expiring_credentials: Vec::new(),
        permissions: Ok(()),
        status: Ok(()),
        probe_service: Ok(()),
        gateway: Ok(()),
    }
}

fn discovery_secret(name: &str) -> DiscoverySecret {
    DiscoverySecret {
        name: name.to_owned(),
        cluster: "east".to_owned(),
    }
}

fn healthy() -> MulticlusterState {
    MulticlusterState {
        namespace: Ok(Some("linkerd-multicluster".to_owned())),
        links: Ok(vec![link("east")]),
        trust: Ok(trust_in(&[0])),
        controllers: Ok(vec![Controller {
            namespace: "linkerd-multicluster".to_owned(),
            name: "controller-east".to_owned(),
            link_name: Some("east".to_owned()),
            available: 1,
            is_legacy: false,
        }]),
        has_gateway: Ok(true),
        mirrors: Ok(vec![
            MirrorService {
                namespace: "shop".to_owned(),
                name: "web-east".to_owned(),
                cluster: Some("east".to_owned()),
                members: Vec::new(),
                needs_endpoints: true,
                has_endpoints: true,
            },
            MirrorService {
                namespace: "shop".to_owned(),
                name: "web-federated".to_owned(),
                cluster: None,
                members: vec!["web@east".to_owned()],
                needs_endpoints: false,
                has_endpoints: false,
            },
        ]),
        discovery_secrets: Ok(vec![discovery_secret("cluster-credentials-east")]),
        unready_proxies: Ok(Vec::new()),
        routes_to_mirrors: Ok(Vec::new()),
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
fn the_service_mirror_for_all_links_serves_those_without_a_controller_in_its_namespace() {
    let state = |n_links: usize, available: i32, namespace: &str| {
        let mut state = healthy();
        state.controllers.as_mut().unwrap().push(Controller {
            namespace: namespace.to_owned(),
            name: "linkerd-service-mirror".to_owned(),
            link_name: None,
            available,
            is_legacy: false,
        });
        let links = [link("east"), link("north")].into_iter().take(n_links);
        state.links = Ok(links.collect());
        state
    };
    for healthy in [state(2, 1, "linkerd-multicluster"), state(1, 0, "linkerd-multicluster")] {
        assert_eq!(problems(&healthy), Vec::<String>::new());
    }
    for (state, expected) in [
        (
            state(2, 0, "linkerd-multicluster"),
            "north: Deployment linkerd-service-mirror has no available pod",
        ),
        (state(2, 1, "mesh"), "north: there is no controller"),
    ] {
        let found = problems(&state).join("\n");
        assert!(found.contains(expected), "{expected} is not in {found:?}");
    }
}

fn with_link(change: fn(&mut LinkState)) -> MulticlusterState {
    let mut state = healthy();
    state.links.as_mut().unwrap().iter_mut().for_each(change);
    state
}

fn with_state(change: fn(&mut MulticlusterState)) -> MulticlusterState {
    let mut state = healthy();
    change(&mut state);
    state
}

/// A state with one problem, the check that finds it, its result, and a part of its text.
type ProblemRow = (MulticlusterState, &'static str, report::Outcome, &'static str);

/// Checks that in each state, the named check alone has a problem, and that it is in the JSON of the report.
fn check_problems(rows: impl IntoIterator<Item = ProblemRow>) {
    for (state, description, result, expected) in rows {
        let report = report(&state);
        let found: Vec<_> = report
            .checks
            .iter()
            .filter(|check| check.result != report::Outcome::Success)
            .collect();
        let [check] = found[..] else {
            panic!("{description}: {found:?}")
        };
        assert_eq!((check.description, check.result), (description, result));
        let text = check.error.clone().unwrap();
        assert!(text.contains(expected), "{expected} is not in {text:?}");

        let n_checks = report.checks.len();
        let position = report.checks.iter().position(|check| check.description == description);
        let is_success = result == report::Outcome::Warning;
        let json: Value = serde_json::from_str(&report::json(&[report]).unwrap()).unwrap();
        // The exit code depends on it, too.
        assert_eq!(json["success"], is_success, "{description}");
        let category = &json["categories"][0];
        assert_eq!(category["categoryName"], "linkerd-multicluster");
        assert_eq!(category["checks"].as_array().unwrap().len(), n_checks);
        let check = &category["checks"][position.unwrap()];
        assert_eq!(check["description"], description);
        assert_eq!(check["result"], if is_success { "warning" } else { "error" });
        assert_eq!(check["error"], text);
        assert!(check["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{check}");
    }
}

#[test]
fn links_of_equal_clusters_or_names_are_found() {
    check_problems([
        (
            with_state(|state| {
                let second = LinkState {
                    cluster: "east".to_owned(),
                    ..link("e2")
                };
                state.links.as_mut().unwrap().push(second);
                let mut controller = healthy().controllers.unwrap().remove(0);
                controller.link_name = Some("e2".to_owned());
                state.controllers.as_mut().unwrap().push(controller);
            }),
            "Link resources are valid",
            report::Outcome::Error,
            "east: east, e2",
        ),
        (
            with_state(|state| {
                let other_namespace = LinkState {
                    namespace: "mesh".to_owned(),
                    cluster: "north".to_owned(),
                    ..link("east")
                };
                state.links.as_mut().unwrap().push(other_namespace);
            }),
            "Link resources are valid",
            report::Outcome::Error,
            "the Links east in the namespaces linkerd-multicluster, mesh have the same names",
        ),
    ]);
}

#[test]
fn each_problem_of_a_link_is_found() {
    check_problems([
        (
            with_link(|link| link.created_by = Some("tulle/cli 0.0.1".to_owned())),
            "Link and CLI versions match",
            report::Outcome::Warning,
            "created by tulle/cli 0.0.1",
        ),
        (
            with_link(|link| link.target = Err("it is away".to_owned())),
            "remote cluster access credentials are valid",
            report::Outcome::Error,
            "east: it is away",
        ),
        (
            with_link(|link| link.expiring_credentials = vec!["those in Secret a/b expire at noon".to_owned()]),
            "remote cluster access credentials do not expire soon",
            report::Outcome::Warning,
            "east: those in Secret a/b expire at noon",
        ),
        (
            with_link(|link| link.discovery_secret = Err("no label".to_owned())),
            "the destination service has the credentials of linked clusters",
            report::Outcome::Warning,
            "east: no label",
        ),
        (
            with_state(|state| {
                let secrets = state.discovery_secrets.as_mut().unwrap();
                secrets.push(discovery_secret("east"));
            }),
            "each linked cluster has one secret for the destination service",
            report::Outcome::Warning,
            "east: cluster-credentials-east, east",
        ),
        (
            with_state(|state| state.trust = Ok(trust_in(&[1]))),
            "clusters share trust anchors",
            report::Outcome::Error,
            "east: no trust anchor in common",
        ),
        (
            with_state(|state| state.trust = Ok(trust_in(&[0, 1]))),
            "clusters share trust anchors",
            report::Outcome::Warning,
            "east: it has other trust anchors, and not all certificates are known: forbidden",
        ),
        (
            with_link(|link| link.permissions = Err("there is no Role r".to_owned())),
            "service mirror controller has required permissions",
            report::Outcome::Error,
            "east: there is no Role r",
        ),
        (
            with_link(|link| link.status = Err("watching services failed".to_owned())),
            "exported services of linked clusters are known",
            report::Outcome::Error,
            "east: watching services failed",
        ),
        (
            with_link(|link| link.probe_service = Err("it has no port".to_owned())),
            "probe services have a port for probes",
            report::Outcome::Error,
            "east: it has no port",
        ),
        (
            with_link(|link| link.gateway = Err("it does not respond".to_owned())),
            GATEWAYS_REACHABLE,
            report::Outcome::Error,
            "east: it does not respond",
        ),
    ]);
}

#[test]
fn each_problem_of_the_extension_and_of_mirrors_is_found() {
    check_problems([
        (
            with_state(|state| state.namespace = Ok(None)),
            EXTENSION_INSTALLED,
            report::Outcome::Error,
            "no namespace has the label",
        ),
        (
            with_state(|state| state.controllers = Ok(Vec::new())),
            CONTROLLERS_RUNNING,
            report::Outcome::Error,
            "east: there is no controller",
        ),
        (
            with_state(|state| state.controllers.as_mut().unwrap()[0].available = 0),
            CONTROLLERS_RUNNING,
            report::Outcome::Error,
            "has no available pod",
        ),
        (
            with_state(|state| state.controllers.as_mut().unwrap()[0].is_legacy = true),
            "extension is managing controllers",
            report::Outcome::Warning,
            "east: Deployment controller-east",
        ),
        (
            with_state(|state| state.mirrors.as_mut().unwrap()[0].has_endpoints = false),
            "all mirror services have endpoints",
            report::Outcome::Error,
            "shop/web-east",
        ),
        (
            with_state(|state| state.mirrors.as_mut().unwrap()[0].cluster = Some("gone".to_owned())),
            "all mirror services are part of a Link",
            report::Outcome::Warning,
            "shop/web-east of gone",
        ),
        (
            with_state(|state| state.mirrors.as_mut().unwrap()[1].members.push("web@gone".to_owned())),
            "all members of federated services are part of a Link",
            report::Outcome::Warning,
            "shop/web-federated: web@gone",
        ),
        (
            with_state(|state| state.routes_to_mirrors = Ok(vec!["HTTPRoute shop/split".to_owned()])),
            "routes of exported services have no mirror services as backends",
            report::Outcome::Warning,
            "HTTPRoute shop/split",
        ),
        (
            with_state(|state| state.unready_proxies = Ok(vec!["linkerd-multicluster/gateway".to_owned()])),
            PROXIES_HEALTHY,
            report::Outcome::Warning,
            "linkerd-multicluster/gateway",
        ),
    ]);
}

#[test]
fn the_fix_for_a_link_without_a_controller_keeps_the_gateway() {
    let mut state = with_link(|link| link.permissions = Err("there is no Role r".to_owned()));
    state.links.as_mut().unwrap().push(link("north"));
    for (has_gateway, fix) in [
        (Ok(true), "`tulle multicluster install --set serviceMirror"),
        (
            Ok(false),
            "`tulle multicluster install --gateway=false --set serviceMirror",
        ),
        (
            Err("forbidden".to_owned()),
            "with --gateway=false if this cluster has no gateway",
        ),
    ] {
        state.has_gateway = has_gateway;
        let fixes = report(&state).checks.into_iter().filter_map(|check| check.hint);
        // One fix is for the controllers without permissions, the other for the Link `north` without a controller.
        let fixes: Vec<_> = fixes.filter(|found| found.contains(fix)).collect();
        assert_eq!(fixes.len(), 2, "{fixes:?}");
    }
}

#[test]
fn what_cannot_be_listed_is_reported_with_the_cause() {
    let state = with_state(|state| {
        state.controllers = Err("controllers are forbidden".to_owned());
        state.mirrors = Err("mirrors are forbidden".to_owned());
        state.discovery_secrets = Err("secrets are forbidden".to_owned());
        state.routes_to_mirrors = Err("routes are forbidden".to_owned());
        state.unready_proxies = Err("pods are forbidden".to_owned());
    });
    let found = problems(&state).join("\n");
    for expected in [
        "listing Deployments: controllers are forbidden",
        "listing Services and Endpoints: mirrors are forbidden",
        "unknown: secrets are forbidden",
        "unknown: routes are forbidden",
        "unknown: pods are forbidden",
    ] {
        assert!(found.contains(expected), "{expected} is not in {found:?}");
    }
    let absent = problems(&with_state(|state| {
        state.links = Err("the kind is not installed".to_owned())
    }));
    assert_eq!(absent[0], "Links cannot be listed: the kind is not installed");
}

#[test]
fn problems_that_can_end_are_checked_again() {
    for (state, expected) in [
        (with_state(|state| state.controllers = Ok(Vec::new())), true),
        (with_link(|link| link.gateway = Err("no".to_owned())), true),
        (
            with_state(|state| state.unready_proxies = Ok(vec!["gateway".to_owned()])),
            true,
        ),
        (with_link(|link| link.target = Err("it is away".to_owned())), false),
        (with_link(|link| link.created_by = None), false),
    ] {
        let found = has_retryable_failure(&report(&state));
        assert_eq!(found, expected, "{:?}", problems(&state));
    }
}

#[test]
fn a_gateway_whose_metrics_cannot_be_read_is_reported_with_the_cause() {
    let mut probes = Probes::default();
    let cause = "getting /metrics from port 9999 of pod a/b: no response within 10s";
    probes.failures.insert("east".to_owned(), cause.to_owned());
    let mut state = healthy();
    state.links.as_mut().unwrap()[0].gateway = probes.check("east", "east");
    let found = problems(&state).join("\n");
    assert!(found.contains(&format!("east: {cause}")), "{found}");
}
