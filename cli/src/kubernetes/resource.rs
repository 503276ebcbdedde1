//! Parses resources in the syntax of kubectl (`deploy/web` or `deploy web`) and lists their pods.

use std::collections::BTreeMap;

use anyhow::{Context as _, anyhow, bail};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{Container, Pod, ReplicationController, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::ListParams;
use kube::core::NamespaceResourceScope;
use kube::{Api, Resource as _, ResourceExt as _};
use tulle_core::names::port;

use super::{Cluster, reason};

/// A resource with pods (workload, Service or namespace), or all of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResourceRef {
    pub(crate) kind: Kind,
    /// All resources of the kind if absent.
    pub(crate) name: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    CronJob,
    DaemonSet,
    Deployment,
    Job,
    Namespace,
    Pod,
    ReplicaSet,
    ReplicationController,
    Service,
    StatefulSet,
}

impl ResourceRef {
    /// Reads `TYPE`, `TYPE/NAME` or `TYPE NAME`.
    ///
    /// # Errors
    /// Fails if the type has no pods, or if there are too many words.
    pub(crate) fn parse(words: &[String]) -> anyhow::Result<Self> {
        let (kind, name) = match words {
            [resource] => resource
                .split_once('/')
                .map_or((resource.as_str(), None), |(kind, name)| (kind, Some(name))),
            [kind, name] => (kind.as_str(), Some(name.as_str())),
            _ => bail!("expected a resource such as deploy/web, got {:?}", words.join(" ")),
        };
        if name.is_some_and(str::is_empty) {
            bail!(
                "the resource {:?} has no name; expected a resource such as deploy/web",
                words.join(" ")
            );
        }
        Ok(Self {
            kind: Kind::parse(kind)?,
            name: name.map(str::to_owned),
        })
    }

    /// Lists the pods of the resource, without finished ones, sorted by name.
    ///
    /// For a workload type without a name: the pods that the injector has labelled with an owner of this type. For `pod`, `ns` and
    /// `svc` without a name: all pods of `namespace`.
    ///
    /// # Errors
    /// Fails if the resource does not exist, or if the API server rejects the request.
    pub(crate) async fn pods(&self, cluster: &Cluster, namespace: &str) -> anyhow::Result<Vec<Pod>> {
        let all = || async {
            let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
            let pods = cluster.list(&api, &ListParams::default()).await;
            pods.map_err(|error| anyhow!("listing pods of {namespace}: {}", reason(&error)))
        };
        let mut pods = match (&self.kind, &self.name) {
            (Kind::Pod, Some(name)) => vec![get_object::<Pod>(cluster, namespace, name).await?],
            (Kind::Namespace, Some(name)) => {
                let api: Api<Pod> = Api::namespaced(cluster.client.clone(), name);
                let pods = cluster.list(&api, &ListParams::default()).await;
                pods.map_err(|error| anyhow!("listing pods of {name}: {}", reason(&error)))?
            }
            (Kind::Pod | Kind::Namespace, None) => all().await?,
            (kind, None) => {
                let owner = kind.owner_label();
                let mut pods = all().await?;
                pods.retain(|pod| owner.is_none_or(|label| pod.labels().contains_key(label)));
                pods
            }
            (kind, Some(name)) => {
                let selected = pod_selector(cluster, namespace, *kind, name).await?;
                let mut pods = all().await?;
                pods.retain(|pod| match &selected {
                    PodSelector::Labels(selector) => selector_matches(selector, pod.labels()),
                    PodSelector::Jobs(jobs) => {
                        let owners = pod.owner_references();
                        owners
                            .iter()
                            .any(|owner| owner.kind == "Job" && jobs.contains(&owner.name))
                    }
                });
                pods
            }
        };
        pods.retain(|pod| {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            !matches!(phase, Some("Succeeded" | "Failed"))
        });
        pods.sort_by_key(|pod| pod.name_any());
        Ok(pods)
    }
}

impl Kind {
    fn parse(text: &str) -> anyhow::Result<Self> {
        Ok(match text.to_ascii_lowercase().as_str() {
            "cj" | "cronjob" | "cronjobs" => Self::CronJob,
            "ds" | "daemonset" | "daemonsets" => Self::DaemonSet,
            "deploy" | "deployment" | "deployments" => Self::Deployment,
            "job" | "jobs" => Self::Job,
            "ns" | "namespace" | "namespaces" => Self::Namespace,
            "po" | "pod" | "pods" => Self::Pod,
            "rs" | "replicaset" | "replicasets" => Self::ReplicaSet,
            "rc" | "replicationcontroller" | "replicationcontrollers" => Self::ReplicationController,
            "svc" | "service" | "services" => Self::Service,
            "sts" | "statefulset" | "statefulsets" => Self::StatefulSet,
            _ => bail!(
                "{text:?} is not a resource with pods; expected one of cj, deploy, ds, job, ns, po, rc, rs, sts, svc, \
                 such as deploy/web"
            ),
        })
    }

    /// The label in which the injector stores the owner of a pod.
    fn owner_label(self) -> Option<&'static str> {
        Some(match self {
            Self::CronJob => "linkerd.io/proxy-cronjob",
            Self::DaemonSet => "linkerd.io/proxy-daemonset",
            Self::Deployment => "linkerd.io/proxy-deployment",
            Self::Job => "linkerd.io/proxy-job",
            Self::ReplicaSet => "linkerd.io/proxy-replicaset",
            Self::ReplicationController => "linkerd.io/proxy-replicationcontroller",
            Self::StatefulSet => "linkerd.io/proxy-statefulset",
            Self::Namespace | Self::Pod | Self::Service => return None,
        })
    }
}

/// Selects the pods of a workload.
enum PodSelector {
    Labels(LabelSelector),
    /// The names of the Jobs that own the pods of a CronJob.
    Jobs(Vec<String>),
}

async fn pod_selector(cluster: &Cluster, namespace: &str, kind: Kind, name: &str) -> anyhow::Result<PodSelector> {
    let labels = |labels: Option<BTreeMap<String, String>>| LabelSelector {
        match_labels: labels,
        match_expressions: None,
    };
    let selector = match kind {
        Kind::DaemonSet => get_object::<DaemonSet>(cluster, namespace, name)
            .await?
            .spec
            .map(|spec| spec.selector),
        Kind::Deployment => get_object::<Deployment>(cluster, namespace, name)
            .await?
            .spec
            .map(|spec| spec.selector),
        Kind::ReplicaSet => get_object::<ReplicaSet>(cluster, namespace, name)
            .await?
            .spec
            .map(|spec| spec.selector),
        Kind::StatefulSet => get_object::<StatefulSet>(cluster, namespace, name)
            .await?
            .spec
            .map(|spec| spec.selector),
        Kind::Job => get_object::<Job>(cluster, namespace, name)
            .await?
            .spec
            .and_then(|spec| spec.selector),
        Kind::ReplicationController => {
            let spec = get_object::<ReplicationController>(cluster, namespace, name)
                .await?
                .spec;
            spec.map(|spec| labels(spec.selector))
        }
        Kind::Service => {
            let spec = get_object::<Service>(cluster, namespace, name).await?.spec;
            spec.map(|spec| labels(spec.selector))
        }
        Kind::CronJob => {
            let uid = get_object::<CronJob>(cluster, namespace, name).await?.metadata.uid;
            let api: Api<Job> = Api::namespaced(cluster.client.clone(), namespace);
            let mut jobs = cluster
                .list(&api, &ListParams::default())
                .await
                .map_err(|error| anyhow!("listing jobs of {namespace}: {}", reason(&error)))?;
            jobs.retain(|job| {
                job.owner_references()
                    .iter()
                    .any(|owner| Some(&owner.uid) == uid.as_ref())
            });
            return Ok(PodSelector::Jobs(jobs.iter().map(|job| job.name_any()).collect()));
        }
        Kind::Namespace | Kind::Pod => None,
    };
    selector
        .map(PodSelector::Labels)
        .with_context(|| format!("{name} in {namespace} selects no pods"))
}

async fn get_object<K>(cluster: &Cluster, namespace: &str, name: &str) -> anyhow::Result<K>
where
    K: kube::Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(cluster.client.clone(), namespace);
    let kind = K::kind(&()).to_ascii_lowercase();
    api.get(name)
        .await
        .map_err(|error| anyhow!("getting {kind} {name} of namespace {namespace}: {}", reason(&error)))
}

/// Whether a selector matches these labels. As in a Service, an empty selector matches nothing.
pub(crate) fn selector_matches(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let match_labels = selector.match_labels.iter().flatten();
    let expressions = selector.match_expressions.as_deref().unwrap_or_default();
    let empty = selector.match_labels.as_ref().is_none_or(BTreeMap::is_empty) && expressions.is_empty();
    !empty
        && match_labels
            .into_iter()
            .all(|(key, value)| labels.get(key) == Some(value))
        && expressions.iter().all(|expression| {
            let value = labels.get(&expression.key);
            let listed = value.is_some_and(|value| expression.values.iter().flatten().any(|v| v == value));
            match expression.operator.as_str() {
                "In" => listed,
                "NotIn" => !listed,
                "Exists" => value.is_some(),
                "DoesNotExist" => value.is_none(),
                _ => false,
            }
        })
}

pub(crate) fn namespace(pod: &Pod) -> &str {
    pod.meta().namespace.as_deref().unwrap_or("default")
}

/// The ports that a container declares, with their names.
pub(crate) fn ports(container: &Container) -> impl Iterator<Item = (&str, u16)> {
    container.ports.iter().flatten().filter_map(|port| {
        let number = u16::try_from(port.container_port).ok()?;
        Some((port.name.as_deref().unwrap_or_default(), number))
    })
}

/// The port on which the proxy in this container serves metrics and presents its certificate.
pub(crate) fn admin_port(proxy: &Container) -> u16 {
    let named = ports(proxy).find(|(name, _)| *name == "linkerd-admin");
    named.map_or(port::ADMIN, |(_, port)| port)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> anyhow::Result<ResourceRef> {
        ResourceRef::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn resources_have_the_syntax_of_kubectl() {
        let web = ResourceRef {
            kind: Kind::Deployment,
            name: Some("web".to_owned()),
        };
        for text in ["deploy/web", "deployment/web", "Deployments/web", "deploy web"] {
            assert_eq!(parse(text).unwrap(), web, "{text}");
        }
        assert_eq!(
            parse("po").unwrap(),
            ResourceRef {
                kind: Kind::Pod,
                name: None
            }
        );
        for text in ["deploy/", "cm/web", "deploy web db", ""] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_admin_port_is_found_by_its_name() {
        let container = |ports| Container {
            ports: serde_json::from_value(ports).unwrap(),
            ..Container::default()
        };
        let named_ports = serde_json::json!([
            { "name": "linkerd-proxy", "containerPort": 4143 },
            { "name": "linkerd-admin", "containerPort": 9191 },
        ]);
        assert_eq!(admin_port(&container(named_ports)), 9191);
        assert_eq!(admin_port(&container(serde_json::json!([]))), 4191);
    }

    #[test]
    fn every_clause_of_a_selector_must_match() {
        let selector: LabelSelector = serde_json::from_value(serde_json::json!({
            "matchLabels": { "app": "web" },
            "matchExpressions": [
                { "key": "tier", "operator": "In", "values": ["a", "b"] },
                { "key": "old", "operator": "DoesNotExist" },
            ],
        }))
        .unwrap();
        let labels = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        assert!(selector_matches(&selector, &labels(&[("app", "web"), ("tier", "b")])));
        assert!(!selector_matches(&selector, &labels(&[("app", "web"), ("tier", "c")])));
        assert!(!selector_matches(&selector, &labels(&[("app", "web")])));
        assert!(!selector_matches(
            &selector,
            &labels(&[("app", "web"), ("tier", "b"), ("old", "")])
        ));
        assert!(!selector_matches(&LabelSelector::default(), &labels(&[("app", "web")])));
    }
}
