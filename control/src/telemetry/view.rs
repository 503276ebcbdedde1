//! Rows of an answer, from what sidecars did: pure functions.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::members::{Member, MemberKind};
use crate::model::endpoints::TlsIdentity;

use super::api::{Answer, Edge, Golden, Named, Route, Silent, Workload};
use super::counts::{self, Counts, Direction, Peer, Tally};
use super::recorder::Observed;

/// Which workloads are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selection {
    pub(super) by: By,
    /// All of them if absent.
    pub(super) name: Option<String>,
}

/// What a row stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// Whatever a pod belongs to, of any kind.
    Workload,
    /// What pods belong to, of this kind only.
    Owner(&'static str),
    Pod,
    Service,
    Namespace,
}

impl By {
    /// # Errors
    /// A kind that nothing is counted by, with all that there are.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "workload" => Ok(Self::Workload),
            "pod" => Ok(Self::Pod),
            "service" => Ok(Self::Service),
            "namespace" => Ok(Self::Namespace),
            other => match OWNERS.iter().find(|kind| **kind == other) {
                Some(kind) => Ok(Self::Owner(kind)),
                None => Err(format!(
                    "by={other:?} is no kind; expected workload, pod, service, namespace, {}",
                    OWNERS.join(", ")
                )),
            },
        }
    }
}

impl Selection {
    /// What a member is counted to: nothing, if it is not meant.
    pub(super) fn groups(&self, member: &Member) -> Vec<Named> {
        let in_namespace = |kind: &str, name: &str| Named {
            namespace: member.name.namespace.to_string(),
            kind: kind.to_owned(),
            name: name.to_owned(),
        };
        let mut groups = match &self.by {
            By::Workload => vec![owner(member)],
            By::Owner(kind) => {
                let owner = owner(member);
                if owner.kind == *kind { vec![owner] } else { Vec::new() }
            }
            By::Pod if member.kind == MemberKind::Pod => vec![in_namespace("pod", &member.name.name)],
            By::Pod => Vec::new(),
            By::Service => member
                .services
                .iter()
                .map(|name| in_namespace("service", name))
                .collect(),
            By::Namespace => vec![Named {
                namespace: String::new(),
                kind: "namespace".to_owned(),
                name: member.name.namespace.to_string(),
            }],
        };
        groups.retain(|group| self.name.as_ref().is_none_or(|name| *name == group.name));
        groups
    }

    fn selects(&self, member: &Member) -> bool {
        !self.groups(member).is_empty()
    }
}

/// What selected workloads answer.
pub(super) fn workloads(observed: &Observed, selection: &Selection) -> Answer<Workload> {
    #[derive(Default)]
    struct Sum {
        meshed: usize,
        total: usize,
        tally: Tally,
        causes: BTreeMap<String, f64>,
    }
    let mut sums: BTreeMap<Named, Sum> = BTreeMap::new();
    for (member, counts) in &observed.members {
        for group in selection.groups(member) {
            let sum = sums.entry(group).or_default();
            sum.total += 1;
            sum.meshed += usize::from(member.sidecar.is_some());
            let Some(counts) = counts else { continue };
            for tally in counts.sources.values() {
                sum.tally.add(tally);
            }
            for ((direction, cause), rate) in counts.failures.iter().filter(|(_, rate)| **rate > 0.0) {
                let direction = match direction {
                    Direction::Inbound => "inbound",
                    Direction::Outbound => "outbound",
                };
                *sum.causes.entry(format!("{direction}/{cause}")).or_default() += rate;
            }
        }
    }
    let rows = sums.into_iter().map(|(named, sum)| Workload {
        named,
        meshed: sum.meshed,
        total: sum.total,
        golden: Golden::from(&sum.tally),
        causes: sum.causes,
    });
    answer(observed, selection, rows.collect())
}

/// Who sends to selected workloads, and whom they send to.
///
/// What is sent from where we look is told by who sends it; what comes from elsewhere, by who gets it.
pub(super) fn edges(observed: &Observed, selection: &Selection) -> Answer<Edge> {
    type Key = (Named, Named, Option<String>, Option<String>, Option<String>);
    let mut sums: BTreeMap<Key, Tally> = BTreeMap::new();
    let identities: BTreeSet<_> = observed
        .members
        .iter()
        .filter_map(|(member, counts)| counts.as_ref().and_then(|_| identity(member)))
        .collect();
    let selected: BTreeSet<_> = observed
        .members
        .iter()
        .filter(|(member, _)| selection.selects(member))
        .map(|(member, _)| owner(member))
        .collect();
    for (member, counts) in counted(observed) {
        let own = owner(member);
        for (target, tally) in counts.targets.iter().filter(|(_, tally)| !tally.is_idle()) {
            let destination = Named {
                namespace: target.namespace.clone(),
                kind: kind(&target.kind).to_owned(),
                name: target.name.clone(),
            };
            if !selection.selects(member) && !selected.contains(&destination) {
                continue;
            }
            let (client_id, server_id, why_plain) = match &target.peer {
                Peer::Meshed(id) => (identity(member), Some(id.clone()), None),
                Peer::Plain(why) => (None, None, Some(why.clone())),
            };
            let key = (own.clone(), destination, client_id, server_id, why_plain);
            sums.entry(key).or_default().add(tally);
        }
        if !selection.selects(member) {
            continue;
        }
        for (peer, tally) in counts.sources.iter().filter(|(_, tally)| !tally.is_idle()) {
            let (source, client_id, server_id, why_plain) = match peer {
                Peer::Meshed(id) if identities.contains(id) => continue,
                Peer::Meshed(id) => (named_by(id), Some(id.clone()), identity(member), None),
                Peer::Plain(why) => (unmeshed(), None, None, Some(why.clone())),
            };
            let key = (source, own.clone(), client_id, server_id, why_plain);
            sums.entry(key).or_default().add(tally);
        }
    }
    let rows = sums.into_iter().map(|(key, tally)| {
        let (source, destination, client_id, server_id, why_plain) = key;
        Edge {
            source,
            destination,
            client_id,
            server_id,
            why_plain,
            golden: Golden::from(&tally),
        }
    });
    answer(observed, selection, rows.collect())
}

/// The routes of selected workloads, and those that they send by.
pub(super) fn routes(observed: &Observed, selection: &Selection) -> Answer<Route> {
    let mut sums: BTreeMap<(Named, counts::Route), Tally> = BTreeMap::new();
    for (member, counts) in counted(observed) {
        for group in selection.groups(member) {
            for (route, tally) in &counts.routes {
                sums.entry((group.clone(), route.clone())).or_default().add(tally);
            }
        }
    }
    let rows = sums
        .into_iter()
        .filter(|(_, tally)| !tally.is_idle())
        .map(|((workload, route), tally)| Route {
            workload,
            direction: route.direction,
            parent: route.parent,
            name: route.name,
            golden: Golden::from(&tally),
        });
    answer(observed, selection, rows.collect())
}

fn counted(observed: &Observed) -> impl Iterator<Item = (&Member, &Counts)> {
    let members = observed.members.iter();
    members.filter_map(|(member, counts)| Some((member, counts.as_ref()?)))
}

fn answer<Row>(observed: &Observed, selection: &Selection, rows: Vec<Row>) -> Answer<Row> {
    let silent = observed.silent.iter().filter(|(member, _)| selection.selects(member));
    let silent = silent.map(|(member, reason)| Silent {
        workload: itself(member),
        reason: reason.clone(),
    });
    Answer {
        window_seconds: observed.seconds,
        rows,
        silent: silent.collect(),
    }
}

/// The member as what it is itself.
pub(super) fn itself(member: &Member) -> Named {
    let kind = match member.kind {
        MemberKind::Pod => "pod",
        MemberKind::External => "externalworkload",
    };
    Named {
        namespace: member.name.namespace.to_string(),
        kind: kind.to_owned(),
        name: member.name.name.to_string(),
    }
}

fn owner(member: &Member) -> Named {
    Named {
        namespace: member.name.namespace.to_string(),
        kind: kind(&member.owner.0).to_owned(),
        name: member.owner.1.to_string(),
    }
}

/// The name of a kind, of which labels have another for some.
fn kind(label: &str) -> &str {
    match label {
        "k8s_job" => "job",
        "external_workload" => "externalworkload",
        other => other,
    }
}

fn identity(member: &Member) -> Option<String> {
    let identity = member.sidecar.as_ref()?.identity.as_ref()?;
    Some(match identity {
        TlsIdentity::Dns { name, .. } => name.to_string(),
        TlsIdentity::Uri { uri, .. } => uri.to_string(),
    })
}

/// The service account in an identity, or the identity where it has another form.
fn named_by(identity: &str) -> Named {
    let mut parts = identity.split('.');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(account), Some(namespace), Some("serviceaccount")) => Named {
            namespace: namespace.to_owned(),
            kind: "serviceaccount".to_owned(),
            name: account.to_owned(),
        },
        _ => Named {
            namespace: String::new(),
            kind: "identity".to_owned(),
            name: identity.to_owned(),
        },
    }
}

fn unmeshed() -> Named {
    Named {
        namespace: String::new(),
        kind: "unmeshed".to_owned(),
        name: "clients".to_owned(),
    }
}

/// Kinds that pods belong to.
const OWNERS: &[&str] = &[
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
    use crate::cluster::members::Sidecar;
    use crate::resources::meta::Name;

    fn member(name: &str, deployment: &str) -> Member {
        let addr: SocketAddr = ([127, 0, 0, 1], 1).into();
        let id = format!("{deployment}.shop.serviceaccount.identity.linkerd.cluster.local");
        Member {
            name: Name::new("shop", name),
            kind: MemberKind::Pod,
            owner: ("deployment".into(), deployment.into()),
            services: vec![deployment.into()],
            sidecar: Some(Sidecar {
                admin: addr,
                tap: addr,
                identity: Some(TlsIdentity::Dns {
                    name: id.as_str().into(),
                    server_name: id.into(),
                }),
            }),
        }
    }

    /// Two pods of `web`, of which one has no sidecar, and `client`, which calls `web` and something outside.
    fn observed() -> Observed {
        let id = "client.shop.serviceaccount.identity.linkerd.cluster.local";
        let web = format!(
            "response_total{{direction=\"inbound\",tls=\"true\",client_id=\"{id}\",classification=\"success\"}} 8\n\
             response_total{{direction=\"inbound\",tls=\"true\",client_id=\"x.y.serviceaccount.z\",srv_kind=\"default\",\
             srv_name=\"all\",route_kind=\"default\",route_name=\"default\",classification=\"failure\"}} 2\n\
             tulle_failures_total{{direction=\"inbound\",cause=\"connect-refused\"}} 2\n"
        );
        let client = "response_total{direction=\"outbound\",tls=\"true\",server_id=\"web\",dst_namespace=\"shop\",\
             dst_deployment=\"web\",classification=\"success\"} 8\n\
             tcp_open_connections{direction=\"outbound\",peer=\"dst\",target_addr=\"1.1.1.1:443\",tls=\"no_identity\",\
             no_tls_reason=\"not_provided_by_service_discovery\"} 1\n";
        let plain = Member {
            sidecar: None,
            ..member("web-2", "web")
        };
        let silent = (member("web-3", "web"), "gone".to_owned());
        Observed {
            members: vec![
                (member("client-1", "client"), Some(Counts::parse(client))),
                (member("web-1", "web"), Some(Counts::parse(&web))),
                (plain, None),
            ],
            seconds: 10.0,
            silent: vec![silent],
        }
    }

    fn all(by: By) -> Selection {
        Selection { by, name: None }
    }

    fn one(name: &str) -> Selection {
        Selection {
            by: By::Owner("deployment"),
            name: Some(name.to_owned()),
        }
    }

    #[test]
    fn workloads_are_counted_by_what_is_asked_for() {
        let names = |by: By| -> Vec<_> {
            let answer = workloads(&observed(), &all(by));
            answer
                .rows
                .into_iter()
                .map(|row| (row.named.name, row.meshed, row.total))
                .collect()
        };
        let row = |name: &str, meshed, total| (name.to_owned(), meshed, total);
        for by in [By::Workload, By::Owner("deployment"), By::Service] {
            assert_eq!(names(by), [row("client", 1, 1), row("web", 1, 2)]);
        }
        assert_eq!(names(By::Namespace), [row("shop", 2, 3)]);
        assert_eq!(names(By::Pod).len(), 3);
        assert_eq!(names(By::Owner("statefulset")), []);
        let web = workloads(&observed(), &one("web"));
        assert_eq!(web.rows[0].golden.success_rate, Some(0.8));
        assert_eq!(web.rows[0].causes["inbound/connect-refused"], 2.0);
        assert_eq!((web.window_seconds, web.silent.len()), (10.0, 1));
        assert!(workloads(&observed(), &one("client")).silent.is_empty());
    }

    #[test]
    fn an_edge_is_told_once_by_whichever_end_we_see() {
        let text = |selection: &Selection| -> Vec<_> {
            let rows = edges(&observed(), selection).rows.into_iter();
            rows.map(|edge| {
                let name = |named: &Named| format!("{}/{}", named.kind, named.name);
                let secured = if edge.why_plain.is_none() { "mTLS" } else { "plain" };
                format!("{} {} {secured}", name(&edge.source), name(&edge.destination))
            })
            .collect()
        };
        let to_web = "deployment/client deployment/web mTLS".to_owned();
        let from_elsewhere = "serviceaccount/x deployment/web mTLS".to_owned();
        let outside = "deployment/client address/1.1.1.1:443 plain".to_owned();
        assert_eq!(text(&one("web")), [to_web.clone(), from_elsewhere]);
        assert_eq!(text(&one("client")), [outside, to_web]);
        assert_eq!(text(&all(By::Workload)).len(), 3);
    }

    #[test]
    fn routes_are_those_that_were_used() {
        let rows = routes(&observed(), &all(By::Workload)).rows;
        let route = &rows[0];
        assert_eq!((rows.len(), route.parent.as_str()), (1, "default:all"));
        assert_eq!(
            (route.golden.success_rate, route.workload.name.as_str()),
            (Some(0.0), "web")
        );
    }

    #[test]
    fn kinds_are_refused_with_those_that_there_are() {
        assert_eq!(By::parse("deployment"), Ok(By::Owner("deployment")));
        assert!(By::parse("deploy").unwrap_err().contains("deployment"));
    }
}
