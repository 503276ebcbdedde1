//! Computes the rows of responses from the metrics of sidecars: pure functions.

use std::collections::{BTreeMap, BTreeSet};

use tulle_core::identity::parse_service_account_identity;

use crate::cluster::views::workload_list::{Workload, WorkloadKind};
use crate::model::endpoints::TlsIdentity;

use super::api::{
    EdgeMetrics, GoldenMetrics, QueryResponse, ResourceName, RouteMetrics, UnreachableSidecar, WorkloadMetrics,
};
use super::counts::{self, Destination, Direction, PeerTls, Rates, SidecarValues, TrafficValues};
use super::scraper::ObservedWorkloads;

/// The workloads that a query selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selection {
    pub(super) by: GroupKind,
    /// All workloads if absent.
    pub(super) name: Option<String>,
}

/// How workloads are grouped into rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GroupKind {
    /// The owner of a workload, of any kind; the API calls it `workload`.
    Workload,
    /// The owner of a workload, if it is of this kind.
    Owner(&'static str),
    Pod,
    Service,
    Namespace,
}

impl GroupKind {
    /// # Errors
    /// Fails on an unknown kind; the error lists the accepted ones.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "workload" => Ok(Self::Workload),
            "pod" => Ok(Self::Pod),
            "service" => Ok(Self::Service),
            "namespace" => Ok(Self::Namespace),
            other => match OWNERS.iter().find(|kind| **kind == other) {
                Some(kind) => Ok(Self::Owner(kind)),
                None => Err(format!(
                    "unknown kind by={other:?}; expected workload, pod, service, namespace, {}",
                    OWNERS.join(", ")
                )),
            },
        }
    }
}

impl Selection {
    /// Returns the groups that a workload counts towards. Empty if it is not selected.
    pub(super) fn groups(&self, workload: &Workload) -> Vec<ResourceName> {
        let in_namespace = |kind: &str, name: &str| ResourceName {
            namespace: workload.name.namespace.to_string(),
            kind: kind.to_owned(),
            name: name.to_owned(),
        };
        let mut groups = match &self.by {
            GroupKind::Workload => vec![owner(workload)],
            GroupKind::Owner(kind) => {
                let owner = owner(workload);
                if owner.kind == *kind { vec![owner] } else { Vec::new() }
            }
            GroupKind::Pod if workload.kind == WorkloadKind::Pod => vec![in_namespace("pod", &workload.name.name)],
            GroupKind::Pod => Vec::new(),
            GroupKind::Service => workload
                .services
                .iter()
                .map(|name| in_namespace("service", name))
                .collect(),
            GroupKind::Namespace => vec![ResourceName {
                namespace: String::new(),
                kind: "namespace".to_owned(),
                name: workload.name.namespace.to_string(),
            }],
        };
        groups.retain(|group| self.name.as_ref().is_none_or(|name| *name == group.name));
        groups
    }

    /// The group that a destination in another cluster counts towards. `None` if it is not selected. Its pods and its other Services are
    /// not known.
    fn remote_group(&self, target: &Destination) -> Option<ResourceName> {
        let group = destination_resource(target);
        let is_of_kind = match &self.by {
            GroupKind::Workload => true,
            GroupKind::Owner(kind) => group.kind == *kind,
            GroupKind::Service => group.kind == "service",
            GroupKind::Pod | GroupKind::Namespace => false,
        };
        let is_selected = is_of_kind && self.name.as_ref().is_none_or(|name| *name == group.name);
        is_selected.then_some(group)
    }

    fn selects(&self, workload: &Workload) -> bool {
        !self.groups(workload).is_empty()
    }
}

/// Returns the golden metrics of the selected workloads, and of those in other clusters that the observed clients use.
pub(super) fn workloads(observed: &ObservedWorkloads, selection: &Selection) -> QueryResponse<WorkloadMetrics> {
    #[derive(Default)]
    struct AggregatedValues {
        meshed: usize,
        total: usize,
        inbound: TrafficValues,
        causes: BTreeMap<String, f64>,
    }
    let mut sums: BTreeMap<ResourceName, AggregatedValues> = BTreeMap::new();
    for (workload, rates) in &observed.workloads {
        for group in selection.groups(workload) {
            let sum = sums.entry(group).or_default();
            sum.total += 1;
            sum.meshed += usize::from(workload.sidecar.is_some());
            let Some(Rates { per_second }) = rates else { continue };
            for inbound in per_second.sources.values() {
                sum.inbound.add(inbound);
            }
            for ((direction, cause), rate) in per_second.failures.iter().filter(|(_, rate)| **rate > 0.0) {
                let direction = match direction {
                    Direction::Inbound => "inbound",
                    Direction::Outbound => "outbound",
                };
                *sum.causes.entry(format!("{direction}/{cause}")).or_default() += rate;
            }
        }
    }
    let rows = sums.into_iter().map(|(resource, sum)| WorkloadMetrics {
        resource,
        cluster: String::new(),
        meshed: sum.meshed,
        total: sum.total,
        golden: GoldenMetrics::from(&sum.inbound),
        causes: sum.causes,
    });
    response(
        observed,
        selection,
        rows.chain(remote_workloads(observed, selection)).collect(),
    )
}

fn remote_workloads(
    observed: &ObservedWorkloads,
    selection: &Selection,
) -> impl Iterator<Item = WorkloadMetrics> + use<> {
    let mut sums: BTreeMap<(String, ResourceName), TrafficValues> = BTreeMap::new();
    for (_, per_second) in scraped_workloads(observed) {
        for (target, rates) in &per_second.destinations {
            if !target.cluster.is_empty()
                && !rates.is_idle()
                && let Some(group) = selection.remote_group(target)
            {
                sums.entry((target.cluster.clone(), group)).or_default().add(rates);
            }
        }
    }
    sums.into_iter().map(|((cluster, resource), rates)| WorkloadMetrics {
        resource,
        cluster,
        meshed: 0,
        total: 0,
        golden: GoldenMetrics::from(&rates),
        causes: BTreeMap::new(),
    })
}

/// Returns the traffic to and from the selected workloads.
///
/// Both sidecars of an edge report it, and one report must be ignored: the server's, if any sidecar with the client's identity
/// was scraped. A server's report names only the client's identity. If two clients share it and only one was scraped, the
/// server's report is ignored for both, so the edge of the other client is missing. Its sidecar is in `unreachable` if the query
/// selects it.
pub(super) fn edges(observed: &ObservedWorkloads, selection: &Selection) -> QueryResponse<EdgeMetrics> {
    type Key = (
        ResourceName,
        (String, ResourceName),
        Option<String>,
        Option<String>,
        Option<String>,
    );
    let mut sums: BTreeMap<Key, TrafficValues> = BTreeMap::new();
    let scraped_identities: BTreeSet<_> = observed
        .workloads
        .iter()
        .filter_map(|(workload, rates)| rates.as_ref().and_then(|_| identity(workload)))
        .collect();
    let selected: BTreeSet<_> = observed
        .workloads
        .iter()
        .filter(|(workload, _)| selection.selects(workload))
        .map(|(workload, _)| owner(workload))
        .collect();
    for (workload, per_second) in scraped_workloads(observed) {
        let workload_owner = owner(workload);
        for (target, rates) in per_second.destinations.iter().filter(|(_, rates)| !rates.is_idle()) {
            let destination = destination_resource(target);
            let is_selected = target.cluster.is_empty() && selected.contains(&destination);
            if !selection.selects(workload) && !is_selected {
                continue;
            }
            let (client_id, server_id, no_tls_reason) = match &target.peer {
                PeerTls::Meshed(id) => (identity(workload), Some(id.clone()), None),
                PeerTls::Plain(why) => (None, None, Some(why.clone())),
            };
            let destination = (target.cluster.clone(), destination);
            let key = (workload_owner.clone(), destination, client_id, server_id, no_tls_reason);
            sums.entry(key).or_default().add(rates);
        }
        if !selection.selects(workload) {
            continue;
        }
        for (peer, rates) in per_second.sources.iter().filter(|(_, rates)| !rates.is_idle()) {
            let (source, client_id, server_id, no_tls_reason) = match peer {
                PeerTls::Meshed(id) if scraped_identities.contains(id) => continue,
                PeerTls::Meshed(id) => (identity_resource(id), Some(id.clone()), identity(workload), None),
                PeerTls::Plain(why) => (unmeshed_clients(), None, None, Some(why.clone())),
            };
            let destination = (String::new(), workload_owner.clone());
            let key = (source, destination, client_id, server_id, no_tls_reason);
            sums.entry(key).or_default().add(rates);
        }
    }
    let rows = sums.into_iter().map(|(key, rates)| {
        let (source, (destination_cluster, destination), client_id, server_id, no_tls_reason) = key;
        EdgeMetrics {
            source,
            destination,
            destination_cluster,
            client_id,
            server_id,
            no_tls_reason,
            golden: GoldenMetrics::from(&rates),
        }
    });
    response(observed, selection, rows.collect())
}

/// Returns the inbound and outbound routes of the selected workloads.
pub(super) fn routes(observed: &ObservedWorkloads, selection: &Selection) -> QueryResponse<RouteMetrics> {
    let mut sums: BTreeMap<(ResourceName, counts::Route), TrafficValues> = BTreeMap::new();
    for (workload, per_second) in scraped_workloads(observed) {
        for group in selection.groups(workload) {
            for (route, rates) in &per_second.routes {
                sums.entry((group.clone(), route.clone())).or_default().add(rates);
            }
        }
    }
    let rows = sums
        .into_iter()
        .filter(|(_, rates)| !rates.is_idle())
        .map(|((workload, route), rates)| RouteMetrics {
            workload,
            direction: route.direction,
            parent: route.parent,
            name: route.name,
            golden: GoldenMetrics::from(&rates),
        });
    response(observed, selection, rows.collect())
}

/// Returns the workloads whose sidecars were scraped, with their rates per second.
fn scraped_workloads(observed: &ObservedWorkloads) -> impl Iterator<Item = (&Workload, &SidecarValues)> {
    let workloads = observed.workloads.iter();
    workloads.filter_map(|(workload, rates)| Some((workload, &rates.as_ref()?.per_second)))
}

fn response<Row>(observed: &ObservedWorkloads, selection: &Selection, rows: Vec<Row>) -> QueryResponse<Row> {
    let unreachable = observed
        .unreachable
        .iter()
        .filter(|(workload, _)| selection.selects(workload));
    let unreachable = unreachable.map(|(workload, reason)| UnreachableSidecar {
        workload: own_resource(workload),
        reason: reason.clone(),
    });
    QueryResponse {
        window_seconds: observed.seconds,
        rows,
        unreachable: unreachable.collect(),
    }
}

/// Returns the resource of the workload itself, not of its owner.
pub(super) fn own_resource(workload: &Workload) -> ResourceName {
    let kind = match workload.kind {
        WorkloadKind::Pod => "pod",
        WorkloadKind::External => "externalworkload",
    };
    ResourceName {
        namespace: workload.name.namespace.to_string(),
        kind: kind.to_owned(),
        name: workload.name.name.to_string(),
    }
}

fn owner(workload: &Workload) -> ResourceName {
    ResourceName {
        namespace: workload.name.namespace.to_string(),
        kind: kind_of_label(&workload.owner.0).to_owned(),
        name: workload.owner.1.to_string(),
    }
}

fn destination_resource(target: &Destination) -> ResourceName {
    ResourceName {
        namespace: target.namespace.clone(),
        kind: kind_of_label(&target.kind).to_owned(),
        name: target.name.clone(),
    }
}

/// Returns the name of a kind, given its metric label.
fn kind_of_label(label: &str) -> &str {
    match label {
        "k8s_job" => "job",
        "external_workload" => "externalworkload",
        other => other,
    }
}

fn identity(workload: &Workload) -> Option<String> {
    let identity = workload.sidecar.as_ref()?.identity.as_ref()?;
    Some(match identity {
        TlsIdentity::Dns { name, .. } => name.to_string(),
        TlsIdentity::Uri { uri, .. } => uri.to_string(),
    })
}

/// Returns the service account of an identity, or the identity itself if it has another form.
fn identity_resource(identity: &str) -> ResourceName {
    match parse_service_account_identity(identity) {
        Some((account, namespace)) => ResourceName {
            namespace: namespace.to_owned(),
            kind: "serviceaccount".to_owned(),
            name: account.to_owned(),
        },
        None => ResourceName {
            namespace: String::new(),
            kind: "identity".to_owned(),
            name: identity.to_owned(),
        },
    }
}

fn unmeshed_clients() -> ResourceName {
    ResourceName {
        namespace: String::new(),
        kind: "unmeshed".to_owned(),
        name: "clients".to_owned(),
    }
}

/// Kinds of owners.
pub(super) const OWNERS: &[&str] = &[
    "cronjob",
    "daemonset",
    "deployment",
    "externalworkload",
    "job",
    "replicaset",
    "replicationcontroller",
    "statefulset",
];

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::cluster::views::workload_list::Sidecar;
    use crate::resources::meta::NamespacedName;

    fn workload(name: &str, deployment: &str) -> Workload {
        let addr: SocketAddr = ([127, 0, 0, 1], 1).into();
        let id = format!("{deployment}.shop.serviceaccount.identity.linkerd.cluster.local");
        Workload {
            name: NamespacedName::new("shop", name),
            kind: WorkloadKind::Pod,
            owner: ("deployment".into(), deployment.into()),
            services: vec![deployment.into()],
            sidecar: Some(Sidecar {
                admin_addr: addr,
                tap_addr: addr,
                identity: Some(TlsIdentity::Dns {
                    name: id.as_str().into(),
                    server_name: id.into(),
                }),
            }),
        }
    }

    fn rates(page: &str) -> Rates {
        Rates {
            per_second: SidecarValues::parse(page),
        }
    }

    /// Returns two pods of `web`, one without a sidecar, and `client`, which calls `web` and an address outside the mesh.
    fn observed() -> ObservedWorkloads {
        let id = "client.shop.serviceaccount.identity.linkerd.cluster.local";
        let web = format!(
            "response_total{{direction=\"inbound\",tls=\"true\",client_id=\"{id}\",classification=\"success\"}} 8\n\
             response_total{{direction=\"inbound\",tls=\"true\",client_id=\"x.y.serviceaccount.identity.linkerd.other.test\",srv_kind=\"default\",\
             srv_name=\"all\",route_kind=\"default\",route_name=\"default\",classification=\"failure\"}} 2\n\
             tulle_failures_total{{direction=\"inbound\",cause=\"connect-refused\"}} 2\n"
        );
        let client = "response_total{direction=\"outbound\",tls=\"true\",server_id=\"web\",dst_namespace=\"shop\",\
             dst_deployment=\"web\",classification=\"success\"} 8\n\
             tcp_open_connections{direction=\"outbound\",peer=\"dst\",target_addr=\"1.1.1.1:443\",tls=\"no_identity\",\
             no_tls_reason=\"not_provided_by_service_discovery\"} 1\n";
        let plain = Workload {
            sidecar: None,
            ..workload("web-2", "web")
        };
        let unreachable = (workload("web-3", "web"), "gone".to_owned());
        ObservedWorkloads {
            workloads: vec![
                (workload("client-1", "client"), Some(rates(client))),
                (workload("web-1", "web"), Some(rates(&web))),
                (plain, None),
            ],
            seconds: 10.0,
            unreachable: vec![unreachable],
        }
    }

    fn all(by: GroupKind) -> Selection {
        Selection { by, name: None }
    }

    fn one(name: &str) -> Selection {
        Selection {
            by: GroupKind::Owner("deployment"),
            name: Some(name.to_owned()),
        }
    }

    #[test]
    fn workloads_are_grouped_by_the_requested_kind() {
        let names = |by: GroupKind| -> Vec<_> {
            let response = workloads(&observed(), &all(by));
            response
                .rows
                .into_iter()
                .map(|row| (row.resource.name, row.meshed, row.total))
                .collect()
        };
        let row = |name: &str, meshed, total| (name.to_owned(), meshed, total);
        for by in [GroupKind::Workload, GroupKind::Owner("deployment"), GroupKind::Service] {
            assert_eq!(names(by), [row("client", 1, 1), row("web", 1, 2)]);
        }
        assert_eq!(names(GroupKind::Namespace), [row("shop", 2, 3)]);
        assert_eq!(names(GroupKind::Pod).len(), 3);
        assert_eq!(names(GroupKind::Owner("statefulset")), []);
        let web = workloads(&observed(), &one("web"));
        assert_eq!(web.rows[0].golden.success_rate, Some(0.8));
        assert_eq!(web.rows[0].causes["inbound/connect-refused"], 2.0);
        assert_eq!((web.window_seconds, web.unreachable.len()), (10.0, 1));
        assert!(workloads(&observed(), &one("client")).unreachable.is_empty());
    }

    #[test]
    fn an_edge_is_reported_by_one_end_only() {
        let text = |selection: &Selection| -> Vec<_> {
            let rows = edges(&observed(), selection).rows.into_iter();
            rows.map(|edge| {
                let name = |named: &ResourceName| format!("{}/{}", named.kind, named.name);
                let secured = if edge.no_tls_reason.is_none() { "mTLS" } else { "plain" };
                format!("{} {} {secured}", name(&edge.source), name(&edge.destination))
            })
            .collect()
        };
        let to_web = "deployment/client deployment/web mTLS".to_owned();
        let from_elsewhere = "serviceaccount/x deployment/web mTLS".to_owned();
        let outside = "deployment/client address/1.1.1.1:443 plain".to_owned();
        assert_eq!(text(&one("web")), [to_web.clone(), from_elsewhere]);
        assert_eq!(text(&one("client")), [outside, to_web]);
        assert_eq!(text(&all(GroupKind::Workload)).len(), 3);
    }

    #[test]
    fn a_workload_of_another_cluster_is_not_the_local_one_with_the_same_name() {
        let east_labels = "dst_target_cluster=\"east\",classification=\"success\"} 8\n";
        let page = format!(
            "response_total{{direction=\"outbound\",tls=\"true\",server_id=\"web\",dst_namespace=\"shop\",dst_deployment=\"web\",{east_labels}\
             response_total{{direction=\"outbound\",tls=\"true\",server_id=\"gateway\",dst_namespace=\"shop\",dst_service=\"pay-east\",\
             dst_target_service=\"pay\",dst_target_service_namespace=\"bank\",{east_labels}"
        );
        let mut observed = observed();
        observed.workloads[0].1 = Some(rates(&page));
        let shown = |selection: &Selection| -> Vec<_> {
            let rows = edges(&observed, selection).rows.into_iter();
            let rows = rows.filter(|edge| edge.source.name == "client");
            rows.map(|edge| (edge.destination_cluster, edge.destination)).collect()
        };
        assert_eq!(shown(&one("web")), []);
        let name = |namespace: &str, kind: &str, name: &str| ResourceName {
            namespace: namespace.to_owned(),
            kind: kind.to_owned(),
            name: name.to_owned(),
        };
        let east = |name| ("east".to_owned(), name);
        assert_eq!(
            shown(&one("client")),
            [
                east(name("bank", "service", "pay")),
                east(name("shop", "deployment", "web"))
            ]
        );
        // They have rows of their own, with the traffic that the clients report.
        let remote = |selection: &Selection| -> Vec<_> {
            let rows = workloads(&observed, selection).rows.into_iter();
            let rows = rows.filter(|row| !row.cluster.is_empty());
            rows.map(|row| (row.cluster, row.resource, row.golden.success_rate))
                .collect()
        };
        let pay = ("east".to_owned(), name("bank", "service", "pay"), Some(1.0));
        let web = ("east".to_owned(), name("shop", "deployment", "web"), Some(1.0));
        let both = [pay, web];
        assert_eq!(remote(&all(GroupKind::Service)), both[..1]);
        assert_eq!(remote(&one("web")), both[1..]);
        assert_eq!(remote(&all(GroupKind::Workload)), both);
        assert_eq!(remote(&all(GroupKind::Namespace)), []);
        assert_eq!(remote(&one("client")), []);
    }

    #[test]
    fn unused_routes_are_omitted() {
        let rows = routes(&observed(), &all(GroupKind::Workload)).rows;
        let route = &rows[0];
        assert_eq!((rows.len(), route.parent.as_str()), (1, "default:all"));
        assert_eq!(
            (route.golden.success_rate, route.workload.name.as_str()),
            (Some(0.0), "web")
        );
    }

    #[test]
    fn unknown_kinds_are_refused_with_the_accepted_ones() {
        assert_eq!(GroupKind::parse("deployment"), Ok(GroupKind::Owner("deployment")));
        assert!(GroupKind::parse("deploy").unwrap_err().contains("deployment"));
    }
}
