mod members;
mod pods;
mod repairs;

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Endpoints, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use tulle_core::names::annotation;

use super::federated::clusters_without_link;
use super::headless::is_headless;
use super::inputs::{ExportingCluster, GatewayState, LinkAge, Linked, LocalCluster, MirrorStatus, Step, Write};
use super::objects::{mirror_labels, object_name};
use super::*;
use crate::mirror::exported_endpoints::{ExportedEndpoints, endpoints_by_service};
use crate::mirror::link::{Exclusions, Link};
use crate::resources::meta::NamespacedName;

/// Objects of both clusters, as JSON.
struct Case {
    link: Link,
    exporting: ExportingCluster,
    local: LocalCluster,
    addresses: Vec<IpAddr>,
    is_alive: bool,
    may_create_namespaces: bool,
    mirrors_pods: bool,
    source_versions: HashMap<NamespacedName, String>,
}

impl Case {
    fn new() -> Self {
        let link = json!({
            "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link", "metadata": {"name": "east"},
            "spec": {
                "targetClusterName": "east", "targetClusterDomain": "east.test", "clusterCredentialsSecret": "east",
                "gatewayAddress": "192.0.2.7", "gatewayPort": "4143", "gatewayIdentity": "gateway.east",
                "probeSpec": {"path": "/ready", "port": "4191"},
                "selector": {"matchLabels": {"mirror.linkerd.io/exported": "true"}},
                "remoteDiscoverySelector": {"matchLabels": {"mirror.linkerd.io/exported": "remote-discovery"}},
                "federatedServiceSelector": {"matchLabels": {"mirror.linkerd.io/federated": "member"}},
                "excludedLabels": ["team", "corp/*"], "excludedAnnotations": ["note", "config.linkerd.io/*"],
            },
        });
        let mut case = Self {
            link: Link::parse(&serde_json::from_value(link).unwrap()).unwrap(),
            exporting: ExportingCluster::default(),
            local: LocalCluster::default(),
            addresses: vec!["192.0.2.7".parse().unwrap()],
            is_alive: true,
            may_create_namespaces: false,
            mirrors_pods: false,
            source_versions: HashMap::new(),
        };
        case.local.namespaces.insert("shop".to_owned());
        case.local.links = vec![link_age("east", 2)];
        case
    }

    /// Adds an exported Service `shop/web` with a ready endpoint.
    fn export(mut self, labels: Value, more: Value) -> Self {
        let mut service = json!({
            "metadata": {"name": "web", "namespace": "shop", "resourceVersion": "7", "labels": labels},
            "spec": {"clusterIP": "10.0.0.1", "ports": [{"name": "http", "port": 80, "targetPort": 8080, "protocol": "TCP"}]},
        });
        json_patch::merge(&mut service, &more);
        let service: Service = serde_json::from_value(service).unwrap();
        let name = object_name(&service.metadata);
        self.exporting.services.insert(name.clone(), Arc::new(service));
        let endpoints = exported_endpoints(json!({"subsets": [{"addresses": [{"ip": "10.1.0.1"}]}]}));
        self.exporting.endpoints.insert(name, endpoints);
        self
    }

    fn exported(self) -> Self {
        self.export(json!({"app": "web", "mirror.linkerd.io/exported": "true"}), json!({}))
    }

    fn plan(&self) -> Plan {
        self.plan_as(Exporter::Linked(self.linked(&probe_service())))
    }

    fn plan_as(&self, exporter: Exporter<'_>) -> Plan {
        plan(&self.inputs(exporter))
    }

    fn linked<'a>(&'a self, probe_service: &'a NamespacedName) -> Linked<'a> {
        Linked {
            link: &self.link,
            gateway: GatewayState {
                addresses: Some(&self.addresses).filter(|all| !all.is_empty()).map(Vec::as_slice),
                is_alive: self.is_alive,
            },
            probe_service: Some(probe_service),
        }
    }

    fn inputs<'a>(&'a self, exporter: Exporter<'a>) -> Inputs<'a> {
        Inputs {
            exporter,
            federated_selector: &self.link.federated_selector,
            excluded_labels: &self.link.excluded_labels,
            excluded_annotations: &self.link.excluded_annotations,
            exporting: &self.exporting,
            local: &self.local,
            may_create_namespaces: self.may_create_namespaces,
            mirrors_pods: self.mirrors_pods,
            source_versions: &self.source_versions,
        }
    }

    /// Executes a plan as an API server would, and returns it. Asserts that a second plan is empty.
    fn apply(&mut self) -> Plan {
        let planned = self.plan();
        self.execute(&planned);
        let again = self.plan();
        assert!(again.steps.is_empty(), "the second plan: {:?}", again.steps);
        planned
    }

    fn execute(&mut self, planned: &Plan) {
        for step in &planned.steps {
            for write in &step.writes {
                match write {
                    Write::CreateNamespace(namespace) => {
                        self.local.namespaces.extend(namespace.metadata.name.clone());
                    }
                    Write::PutService(service) => {
                        let mut service = service.clone();
                        service.metadata.resource_version = Some("1".to_owned());
                        let address = format!("10.9.0.{}", self.local.services.len());
                        service.spec.as_mut().unwrap().cluster_ip.get_or_insert(address);
                        let name = object_name(&service.metadata);
                        self.local.services.insert(name, Arc::new(*service));
                    }
                    Write::PutEndpoints(endpoints) => {
                        let mut endpoints = endpoints.clone();
                        endpoints.metadata.resource_version = Some("1".to_owned());
                        let name = object_name(&endpoints.metadata);
                        self.local.endpoints.insert(name, Arc::new(*endpoints));
                    }
                    Write::DeleteService(known) => drop(self.local.services.remove(&known.name)),
                    Write::DeleteEndpoints(known) => drop(self.local.endpoints.remove(&known.name)),
                }
            }
            if let Some(version) = &step.source_version {
                self.source_versions.insert(step.name.clone(), version.clone());
            }
        }
    }

    fn add_local(&mut self, service: Value) {
        let service: Service = serde_json::from_value(service).unwrap();
        self.local
            .services
            .insert(object_name(&service.metadata), Arc::new(service));
    }

    fn service(&self, name: &str) -> Option<Value> {
        let service = self.local.services.get(&NamespacedName::new("shop", name))?;
        Some(serde_json::to_value(&**service).unwrap())
    }

    fn endpoints(&self, name: &str) -> Option<Value> {
        let endpoints: &Arc<Endpoints> = self.local.endpoints.get(&NamespacedName::new("shop", name))?;
        Some(serde_json::to_value(&**endpoints).unwrap())
    }

    /// The members of `shop/web-federated`: the local member, and the list of remote members.
    fn members(&self) -> Option<(String, String)> {
        let annotations = self.service("web-federated")?["metadata"]["annotations"].clone();
        let value = |name: &str| annotations[name].as_str().unwrap_or_default().to_owned();
        Some((value(annotation::LOCAL_DISCOVERY), value(annotation::REMOTE_DISCOVERY)))
    }
}

fn probe_service() -> NamespacedName {
    NamespacedName::new("multicluster", "probe-east")
}

fn exported_endpoints(endpoints: Value) -> ExportedEndpoints {
    let endpoints: Endpoints = serde_json::from_value(endpoints).unwrap();
    ExportedEndpoints::from(&endpoints)
}

fn link_age(cluster: &str, second: i64) -> LinkAge {
    LinkAge {
        cluster: cluster.to_owned(),
        created_at: Some(Time(k8s_openapi::jiff::Timestamp::from_second(second).unwrap())),
        name: cluster.to_owned(),
        namespace: "multicluster".to_owned(),
    }
}

/// The message of the rejection in the only status.
fn rejection(statuses: &[MirrorStatus]) -> String {
    assert_eq!(statuses.len(), 1, "{statuses:?}");
    statuses[0].mirror.as_ref().unwrap_err().to_string()
}

#[test]
fn an_exported_service_becomes_a_service_and_endpoints_of_the_gateway() {
    let mut case = Case::new().exported();
    let planned = case.apply();
    let service = case.service("web-east").unwrap();
    assert_eq!(
        service["metadata"]["labels"],
        json!({"app": "web", "mirror.linkerd.io/mirrored-service": "true", "mirror.linkerd.io/cluster-name": "east"})
    );
    assert_eq!(
        service["metadata"]["annotations"],
        json!({"mirror.linkerd.io/remote-resource-version": "7", "mirror.linkerd.io/remote-svc-fq-name": "web.shop.svc.east.test"})
    );
    // The cluster assigns the address.
    assert_eq!(
        service["spec"],
        json!({
            "clusterIP": "10.9.0.0",
            "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}],
        })
    );
    let endpoints = case.endpoints("web-east").unwrap();
    assert_eq!(
        endpoints["metadata"]["annotations"],
        json!({
            "mirror.linkerd.io/remote-gateway-identity": "gateway.east",
            "mirror.linkerd.io/remote-svc-fq-name": "web.shop.svc.east.test",
        })
    );
    assert_eq!(endpoints["metadata"]["labels"], service["metadata"]["labels"]);
    let ports = json!([{"name": "http", "port": 4143, "protocol": "TCP"}]);
    assert_eq!(
        endpoints["subsets"],
        json!([{"addresses": [{"ip": "192.0.2.7"}], "ports": ports}])
    );
    let mirror = Ok(NamespacedName::new("shop", "web-east"));
    assert_eq!((planned.mirrors.len(), &planned.mirrors[0].mirror), (1, &mirror));
}

#[test]
fn the_mode_depends_on_the_labels() {
    let exported = |value: &str| Case::new().export(json!({"mirror.linkerd.io/exported": value}), json!({}));
    let mut direct = exported("remote-discovery");
    direct.apply();
    let labels = direct.service("web-east").unwrap()["metadata"]["labels"].clone();
    assert_eq!(labels["multicluster.linkerd.io/remote-discovery"], "east");
    assert_eq!(labels["multicluster.linkerd.io/remote-service"], "web");
    assert_eq!(direct.endpoints("web-east"), None);

    let mut case = exported("true");
    case.apply();
    assert!(case.endpoints("web-east").is_some());
    case.exporting = exported("remote-discovery").exporting;
    case.apply();
    assert_eq!(case.endpoints("web-east"), None);
    case.exporting = exported("true").exporting;
    case.apply();
    assert!(case.endpoints("web-east").is_some());
    let labels = case.service("web-east").unwrap()["metadata"]["labels"].clone();
    assert_eq!(labels["multicluster.linkerd.io/remote-service"], Value::Null);
    case.exporting = exported("false").exporting;
    case.apply();
    assert_eq!((case.service("web-east"), case.endpoints("web-east")), (None, None));
}

#[test]
fn labels_and_annotations_are_copied_except_those_of_tools_and_exclusions() {
    let labels = json!({
        "mirror.linkerd.io/exported": "true", "app": "web", "team": "a", "corp/x": "y", "corporate/x": "y",
        "multicluster.linkerd.io/remote-service": "other",
    });
    let annotations = json!({"metadata": {"annotations": {
        "note": "x", "kept": "x", "config.linkerd.io/opaque-ports": "25", "config.linkerd.io/proxy-await": "x",
        "service.kubernetes.io/topology-mode": "Auto", "kubectl.kubernetes.io/last-applied-configuration": "{}",
        "retry.linkerd.io/http": "5xx",
    }}});
    let mut case = Case::new().export(labels, annotations);
    case.apply();
    let service = case.service("web-east").unwrap();
    let names = |field: &str| -> Vec<String> {
        let map = service["metadata"][field].as_object().unwrap();
        let names = map.keys().filter(|name| !name.starts_with("mirror.linkerd.io/"));
        names.cloned().collect()
    };
    assert_eq!(names("labels"), ["app", "corporate/x"]);
    assert_eq!(
        names("annotations"),
        ["config.linkerd.io/opaque-ports", "kept", "retry.linkerd.io/http"]
    );

    // A new exclusion removes an annotation that was copied before. Annotations of other writers stay until the exported Service
    // changes.
    let mut foreign = (**case.local.services.values().next().unwrap()).clone();
    foreign
        .metadata
        .annotations
        .as_mut()
        .unwrap()
        .insert("other.io/x".to_owned(), "1".to_owned());
    case.local
        .services
        .insert(object_name(&foreign.metadata), Arc::new(foreign));
    assert!(case.plan().steps.is_empty());
    case.link.excluded_annotations = Exclusions::from_list("kept");
    case.apply();
    let annotations = case.service("web-east").unwrap()["metadata"]["annotations"].clone();
    assert_eq!(
        (&annotations["kept"], &annotations["note"]),
        (&Value::Null, &json!("x"))
    );
}

#[test]
fn changes_of_the_service_and_of_the_gateway_reach_the_mirror() {
    let mut case = Case::new().exported();
    case.apply();
    let ports = json!({"metadata": {"resourceVersion": "8"}, "spec": {"ports": [
        {"name": "http", "port": 81, "targetPort": "web", "protocol": "TCP", "appProtocol": "kubernetes.io/h2c", "nodePort": 30000},
    ]}});
    let labels = json!({"mirror.linkerd.io/exported": "true"});
    case = case.export(labels, ports);
    case.addresses = vec!["2001:db8::7".parse().unwrap(), "192.0.2.9".parse().unwrap()];
    case.is_alive = false;
    case.apply();
    let service = case.service("web-east").unwrap();
    assert_eq!(
        service["metadata"]["labels"]["app"],
        Value::Null,
        "the label is removed when the exported Service loses it"
    );
    assert_eq!(
        service["spec"]["ports"],
        json!([{"name": "http", "port": 81, "targetPort": "web", "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"}])
    );
    let subset = case.endpoints("web-east").unwrap()["subsets"][0].clone();
    assert_eq!(subset["addresses"], Value::Null);
    assert_eq!(
        subset["notReadyAddresses"],
        json!([{"ip": "192.0.2.9"}, {"ip": "2001:db8::7"}])
    );

    // Without an address of the gateway, the existing Endpoints stay.
    case.addresses.clear();
    let planned = case.plan();
    assert!(planned.steps.is_empty() && planned.mirrors[0].mirror.is_ok());
    let mut new = Case::new().exported();
    new.addresses.clear();
    assert!(rejection(&new.plan().mirrors).contains("no address of the gateway 192.0.2.7"));
    new.link.gateway = None;
    assert!(rejection(&new.plan().mirrors).contains("the Link has no gateway"));
    case.addresses.push("192.0.2.7".parse().unwrap());
    case.is_alive = true;
    let unready = json!({"subsets": [{"notReadyAddresses": [{"ip": "10.1.0.1"}]}]});
    for endpoints in case.exporting.endpoints.values_mut() {
        *endpoints = exported_endpoints(unready.clone());
    }
    case.apply();
    assert_eq!(case.endpoints("web-east").unwrap()["subsets"], json!([]));
}

#[test]
fn services_that_cannot_be_mirrored_are_rejected_with_the_cause() {
    let long = "w".repeat(60);
    for (service, cause) in [
        (json!({"spec": {"type": "ExternalName"}}), "ExternalName"),
        (json!({"spec": {"ports": []}}), "no ports"),
        (json!({"metadata": {"name": long}}), "has 65 characters; at most 63"),
        (
            json!({"metadata": {"namespace": "unknown"}}),
            "namespace unknown does not exist",
        ),
    ] {
        let case = Case::new().export(json!({"mirror.linkerd.io/exported": "true"}), service);
        let planned = case.plan();
        assert!(
            rejection(&planned.mirrors).contains(cause),
            "{cause}: {:?}",
            planned.mirrors
        );
        assert!(planned.steps.is_empty(), "{cause}");
    }
    let mut taken = Case::new().exported();
    taken.add_local(json!({"metadata": {"name": "web-east", "namespace": "shop"}, "spec": {"ports": [{"port": 1}]}}));
    let planned = taken.plan();
    assert!(rejection(&planned.mirrors).contains("is not a mirror of east"));
    assert!(planned.steps.is_empty());

    let mirror = json!({"mirror.linkerd.io/exported": "true", "mirror.linkerd.io/mirrored-service": "true"});
    let planned = Case::new().export(mirror, json!({})).plan();
    assert!(
        planned.steps.is_empty() && planned.mirrors.is_empty(),
        "mirrors are not mirrored"
    );
}

#[test]
fn missing_namespaces_are_created_if_the_configuration_permits_it() {
    let labels = json!({"mirror.linkerd.io/exported": "true", "mirror.linkerd.io/federated": "member"});
    let mut case = Case::new().export(labels, json!({"metadata": {"namespace": "new"}}));
    assert!(case.plan().steps.is_empty());
    case.may_create_namespaces = true;
    let planned = case.plan();
    let [Step { writes, .. }] = planned.steps.as_slice() else {
        panic!("{:?}", planned.steps)
    };
    let [Write::CreateNamespace(namespace)] = writes.as_slice() else {
        panic!("{writes:?}")
    };
    assert_eq!(namespace.metadata.labels, Some(mirror_labels("east")));
    case.execute(&planned);
    case.apply();
    assert_eq!(case.local.services.len(), 2);
}

#[test]
fn mirrors_without_an_exported_service_are_deleted_and_mirrors_of_other_clusters_are_not() {
    let mut case = Case::new().exported();
    case.apply();
    let mirror = |name: &str, cluster: &str| {
        let labels = json!({"mirror.linkerd.io/mirrored-service": "true", "mirror.linkerd.io/cluster-name": cluster});
        json!({"metadata": {"name": name, "namespace": "shop", "labels": labels}, "spec": {"ports": [{"port": 80}]}})
    };
    case.add_local(mirror("gone-east", "east"));
    case.add_local(mirror("web-north", "north"));
    case.add_local(json!({"metadata": {"name": "own-east", "namespace": "shop"}}));
    let left_over: Endpoints = serde_json::from_value(mirror("old-east", "east")).unwrap();
    case.local
        .endpoints
        .insert(object_name(&left_over.metadata), Arc::new(left_over));
    case.apply();
    let names: Vec<_> = case.local.services.keys().map(|name| &*name.name).collect();
    assert_eq!(names, ["own-east", "web-east", "web-north"]);
    assert!(case.endpoints("old-east").is_none() && case.endpoints("web-east").is_some());
}

#[test]
fn the_endpoints_of_the_probe_service_are_ready_even_if_the_gateway_is_not_alive() {
    let mut case = Case::new();
    case.is_alive = false;
    case.add_local(json!({"metadata": {"name": "probe-east", "namespace": "multicluster"}}));
    case.apply();
    let endpoints = &case.local.endpoints[&probe_service()];
    let endpoints = serde_json::to_value(&**endpoints).unwrap();
    let ports = json!([{"name": "mc-probe", "port": 4191, "protocol": "TCP"}]);
    assert_eq!(
        endpoints["subsets"],
        json!([{"addresses": [{"ip": "192.0.2.7"}], "ports": ports}])
    );
    assert_eq!(
        endpoints["metadata"]["labels"],
        json!({"mirror.linkerd.io/cluster-name": "east"})
    );
}

#[test]
fn members_join_and_leave_a_federated_service() {
    const NONE: BTreeSet<String> = BTreeSet::new();
    let member = json!({"app": "web", "mirror.linkerd.io/federated": "member"});
    let mut east = Case::new().export(member.clone(), json!({}));
    let planned = east.apply();
    assert_eq!(east.members(), Some((String::new(), "web@east".to_owned())));
    let service = east.service("web-federated").unwrap();
    assert_eq!(
        service["metadata"]["labels"],
        json!({"app": "web", "mirror.linkerd.io/mirrored-service": "true"})
    );
    assert_eq!(
        planned.federated[0].mirror,
        Ok(NamespacedName::new("shop", "web-federated"))
    );
    assert!(east.endpoints("web-federated").is_none());

    // The local member joins, and determines the metadata.
    let own = Case::new().export(
        json!({"app": "own", "mirror.linkerd.io/federated": "member"}),
        json!({}),
    );
    let mut this_cluster = Case {
        local: east.local,
        ..own
    };
    let local = Exporter::ThisCluster { unlinked: &NONE };
    let planned = this_cluster.plan_as(local);
    this_cluster.execute(&planned);
    assert!(this_cluster.plan_as(local).steps.is_empty());
    assert_eq!(this_cluster.members(), Some(("web".to_owned(), "web@east".to_owned())));
    assert_eq!(
        this_cluster.service("web-federated").unwrap()["metadata"]["labels"]["app"],
        "own"
    );

    // Another cluster whose Link is older than that of east joins without changing the metadata.
    let mut north = Case::new().export(member.clone(), json!({"metadata": {"labels": {"app": "north"}}}));
    north.link.cluster = "north".to_owned();
    north.local = this_cluster.local;
    north.local.links = vec![link_age("east", 2), link_age("north", 1)];
    north.apply();
    assert_eq!(
        north.members(),
        Some(("web".to_owned(), "web@east,web@north".to_owned()))
    );
    assert_eq!(
        north.service("web-federated").unwrap()["metadata"]["labels"]["app"],
        "own"
    );

    // The local member leaves, and the member with the oldest Link determines the metadata.
    let mut this_cluster = Case {
        local: north.local,
        ..Case::new()
    };
    let planned = this_cluster.plan_as(local);
    this_cluster.execute(&planned);
    let mut north = Case {
        local: this_cluster.local,
        ..Case::new().export(member, json!({"metadata": {"labels": {"app": "north"}}}))
    };
    north.link.cluster = "north".to_owned();
    north.apply();
    assert_eq!(north.members(), Some((String::new(), "web@east,web@north".to_owned())));
    assert_eq!(
        north.service("web-federated").unwrap()["metadata"]["labels"]["app"],
        "north"
    );

    // The member of a cluster without a Link is removed. Then the last member leaves, and the federated Service is deleted.
    let gone = BTreeSet::from(["east".to_owned()]);
    let mut this_cluster = Case {
        local: north.local,
        ..Case::new()
    };
    this_cluster.local.links.retain(|link| link.cluster == "north");
    assert_eq!(clusters_without_link(&this_cluster.local), gone);
    let planned = this_cluster.plan_as(Exporter::ThisCluster { unlinked: &gone });
    this_cluster.execute(&planned);
    assert_eq!(this_cluster.members(), Some((String::new(), "web@north".to_owned())));
    let mut north = Case {
        local: this_cluster.local,
        ..Case::new()
    };
    north.link.cluster = "north".to_owned();
    north.apply();
    assert_eq!(north.members(), None);
}

#[test]
fn services_that_cannot_join_are_rejected_and_leave() {
    let member = json!({"mirror.linkerd.io/federated": "member"});
    let mut case = Case::new().export(member.clone(), json!({}));
    case.apply();
    case = case.export(member.clone(), json!({"spec": {"clusterIP": "None"}}));
    let planned = case.apply();
    assert!(rejection(&planned.federated).contains("headless"));
    assert_eq!(case.members(), None);

    let mut taken = Case::new().export(member, json!({}));
    taken.add_local(json!({"metadata": {"name": "web-federated", "namespace": "shop"}}));
    let planned = taken.plan();
    assert!(rejection(&planned.federated).contains("is not a federated Service"));
    assert!(planned.steps.is_empty());
}

#[test]
fn a_federated_service_follows_the_member_that_determines_its_metadata() {
    let member = json!({"app": "web", "mirror.linkerd.io/federated": "member"});
    let mut case = Case::new().export(member, json!({}));
    case.apply();
    // A label of another writer stays, until the member changes.
    let name = NamespacedName::new("shop", "web-federated");
    let mut service = (*case.local.services[&name]).clone();
    service
        .metadata
        .labels
        .as_mut()
        .unwrap()
        .insert("foreign".to_owned(), "x".to_owned());
    case.local.services.insert(name, Arc::new(service));
    assert!(case.plan().steps.is_empty());
    let changed = json!({"metadata": {"resourceVersion": "8"}, "spec": {"ports": [{"port": 81}]}});
    case = case.export(json!({"mirror.linkerd.io/federated": "member"}), changed);
    case.apply();
    let service = case.service("web-federated").unwrap();
    assert_eq!(
        service["metadata"]["labels"],
        json!({"mirror.linkerd.io/mirrored-service": "true"})
    );
    assert_eq!(service["spec"]["ports"][0]["port"], 81);
}

/// Sets the pods of the exported headless Service, given by their host names.
fn set_pods(case: &mut Case, ready: &[&str], not_ready: &[&str]) {
    let addresses = |host_names: &[&str]| -> Value {
        let address = |host_name: &&str| json!({"ip": "10.1.0.1", "hostname": host_name});
        host_names.iter().map(address).collect()
    };
    let subset = json!({"addresses": addresses(ready), "notReadyAddresses": addresses(not_ready)});
    for (service, endpoints_of) in &mut case.exporting.endpoints {
        let version = endpoints_of.resource_version.as_deref();
        let version = version.map_or(1, |version| version.parse::<u32>().unwrap() + 1);
        let version = version.to_string();
        *endpoints_of = exported_endpoints(json!({"metadata": {"resourceVersion": version}, "subsets": [subset]}));
        // EndpointSlices, here an empty one and one for each pod, say the same.
        let slice = |endpoints: Value| {
            let labels = json!({"kubernetes.io/service-name": &*service.name});
            let metadata = json!({"namespace": &*service.namespace, "labels": labels, "resourceVersion": version});
            json!({"addressType": "IPv4", "metadata": metadata, "endpoints": endpoints})
        };
        let mut slices = vec![slice(json!([]))];
        for (host_names, is_ready) in [(ready, true), (not_ready, false)] {
            slices.extend(host_names.iter().map(|host_name| {
                slice(json!([{"addresses": ["10.1.0.1"], "hostname": host_name, "conditions": {"ready": is_ready}}]))
            }));
        }
        let slices: Vec<EndpointSlice> = serde_json::from_value(slices.into()).unwrap();
        let joined = endpoints_by_service(slices.into_iter().map(Arc::new));
        assert_eq!(joined[service], *endpoints_of);
    }
}

fn headless() -> Case {
    let mut case = Case::new().export(
        json!({"app": "web", "mirror.linkerd.io/exported": "true"}),
        json!({"spec": {"clusterIP": "None"}}),
    );
    case.mirrors_pods = true;
    case
}

/// Executes plans until nothing is left to write, and returns the last statuses.
fn apply_all(case: &mut Case) -> Vec<MirrorStatus> {
    for _ in 0..3 {
        let planned = case.plan();
        if planned.steps.is_empty() {
            return planned.mirrors;
        }
        case.execute(&planned);
    }
    panic!("the plans do not end: {:?}", case.plan().steps);
}

/// The host names of the mirror's endpoints, and the names of all local Services.
fn host_names_and_services(case: &Case) -> (Vec<String>, Vec<String>) {
    let endpoints = &case.local.endpoints[&NamespacedName::new("shop", "web-east")];
    let addresses = endpoints.subsets.iter().flatten();
    let addresses = addresses.flat_map(|subset| subset.addresses.iter().flatten());
    let services = case.local.services.keys().map(|name| name.name.to_string());
    (
        addresses.filter_map(|address| address.hostname.clone()).collect(),
        services.collect(),
    )
}

#[test]
fn each_pod_with_a_host_name_gets_a_mirror_that_is_deleted_with_the_pod() {
    let mut case = headless();
    set_pods(&mut case, &["db-0", "db-1"], &["db-2"]);
    let statuses = apply_all(&mut case);
    assert_eq!(statuses[0].mirror, Ok(NamespacedName::new("shop", "web-east")));
    assert!(is_headless(
        &case.local.services[&NamespacedName::new("shop", "web-east")]
    ));
    let pod = case.service("db-0-east").unwrap();
    assert_eq!(
        pod["metadata"]["labels"],
        json!({
            "app": "web", "mirror.linkerd.io/cluster-name": "east", "mirror.linkerd.io/mirrored-service": "true",
            "mirror.linkerd.io/headless-mirror-svc-name": "web-east",
        })
    );
    let remote_name = &pod["metadata"]["annotations"]["mirror.linkerd.io/remote-svc-fq-name"];
    assert_eq!(remote_name, "db-0.web.shop.svc.east.test");
    let version = &pod["metadata"]["annotations"]["mirror.linkerd.io/remote-resource-version"];
    assert_eq!(version, "1");
    let endpoints = case.endpoints("db-0-east").unwrap();
    assert_eq!(endpoints["metadata"]["labels"], pod["metadata"]["labels"]);
    assert_eq!(
        endpoints["metadata"]["annotations"]["mirror.linkerd.io/remote-svc-fq-name"],
        *remote_name
    );
    assert_eq!(endpoints["subsets"][0]["addresses"], json!([{"ip": "192.0.2.7"}]));
    assert_eq!(endpoints["subsets"][0]["ports"][0]["port"], 4143);
    let root = case.endpoints("web-east").unwrap();
    let address = &root["subsets"][0]["addresses"][0];
    assert_eq!(
        (&address["ip"], &address["hostname"]),
        (&pod["spec"]["clusterIP"], &json!("db-0"))
    );
    // Clients connect to the mirrors of pods. These have the ports of the exported Service.
    assert_eq!(root["subsets"][0]["ports"][0]["port"], 80);
    // A change of one pod does not rewrite the mirrors of the others.
    set_pods(&mut case, &["db-0", "db-1", "db-2"], &[]);
    assert!(!case.plan().steps.iter().any(|step| &*step.name.name == "db-0-east"));
    for (ready, not_ready) in [
        (&["db-0", "db-1", "db-2"][..], &[][..]),
        (&["db-1"], &["db-0"]),
        (&[], &["db-1"]),
    ] {
        set_pods(&mut case, ready, not_ready);
        apply_all(&mut case);
        let (host_names, services) = host_names_and_services(&case);
        assert_eq!(host_names, ready);
        let pod_mirrors = ready.iter().map(|host_name| format!("{host_name}-east"));
        assert_eq!(services, pod_mirrors.chain(["web-east".to_owned()]).collect::<Vec<_>>());
    }
    // Without pods, the mirror stays headless.
    set_pods(&mut case, &[], &[]);
    assert!(case.plan().steps.is_empty());
    case.exporting.services.clear();
    apply_all(&mut case);
    assert!(case.local.services.is_empty() && case.local.endpoints.is_empty());
}

#[test]
fn pods_of_equal_names_in_two_namespaces_are_kept_apart() {
    let mut case = headless();
    case.local.namespaces.insert("bank".to_owned());
    let service = case.exporting.services.values().next().unwrap().clone();
    let mut other = (*service).clone();
    other.metadata.namespace = Some("bank".to_owned());
    let name = object_name(&other.metadata);
    case.exporting.services.insert(name.clone(), Arc::new(other));
    case.exporting.endpoints.insert(name, ExportedEndpoints::default());
    set_pods(&mut case, &["db-0"], &[]);
    apply_all(&mut case);
    assert_eq!(case.local.services.len(), 4);
    case.exporting.services.remove(&NamespacedName::new("bank", "web"));
    apply_all(&mut case);
    assert_eq!(
        host_names_and_services(&case),
        (
            vec!["db-0".to_owned()],
            vec!["db-0-east".to_owned(), "web-east".to_owned()]
        )
    );
}

#[test]
fn a_headless_service_without_host_names_is_mirrored_as_any_other() {
    // Without pods, it is unknown whether the mirror must be headless.
    let mut case = headless();
    set_pods(&mut case, &[], &[]);
    let planned = case.plan();
    assert!(
        planned.steps.is_empty() && rejection(&planned.mirrors).contains("no pods yet"),
        "{planned:?}"
    );
    let mut case = headless();
    apply_all(&mut case);
    let web = NamespacedName::new("shop", "web-east");
    assert!(!is_headless(&case.local.services[&web]));
    assert_eq!(
        case.endpoints("web-east").unwrap()["subsets"][0]["ports"][0]["port"],
        4143
    );
    // When pods have host names, the mirror is replaced by a headless Service.
    set_pods(&mut case, &["db-0"], &[]);
    apply_all(&mut case);
    assert!(is_headless(&case.local.services[&web]));
    case.mirrors_pods = false;
    apply_all(&mut case);
    assert!(!is_headless(&case.local.services[&web]));
    assert_eq!(case.local.services.len(), 1);
}

#[test]
fn the_mirror_of_a_pod_does_not_replace_another_service() {
    let mut case = headless();
    case.add_local(json!({"metadata": {"name": "db-0-east", "namespace": "shop"}, "spec": {}}));
    set_pods(&mut case, &["db-0", "db-1"], &[]);
    let statuses = apply_all(&mut case);
    let cause = rejection(&statuses);
    assert!(
        cause.contains("shop/db-0-east exists and is not the mirror of a pod"),
        "{cause}"
    );
    let (host_names, services) = host_names_and_services(&case);
    assert_eq!(host_names, ["db-1"]);
    assert_eq!(services, ["db-0-east", "db-1-east", "web-east"]);
    assert!(case.service("db-0-east").unwrap()["metadata"]["labels"].is_null());
}
