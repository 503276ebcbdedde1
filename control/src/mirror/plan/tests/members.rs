//! Federated Services with members of several clusters that join and leave.

use std::collections::BTreeMap;
use std::mem;

use super::super::federated::members_without_ports;
use super::*;

/// The cluster with the Links and with the federated Service.
const THIS_CLUSTER: &str = "west";

/// The exporters of `shop/web`, each with its own plan. All plan for the objects of one cluster.
struct Federation {
    local: LocalCluster,
    exporters: BTreeMap<&'static str, Case>,
}

impl Federation {
    /// The names are those of the linked clusters, in the order of their Links' creation.
    fn new(linked: &[&'static str]) -> Self {
        let mut local = Case::new().local;
        local.links = linked.iter().zip(1..).map(|(name, n)| link_age(name, n)).collect();
        let exporters = linked.iter().chain([&THIS_CLUSTER]).map(|name| {
            let mut case = Case::new();
            case.link.cluster = (*name).to_owned();
            (*name, case)
        });
        Self {
            exporters: exporters.collect(),
            local,
        }
    }

    fn join(&mut self, cluster: &'static str) {
        let member = json!({"app": cluster, "mirror.linkerd.io/federated": "member"});
        self.export(cluster, member);
    }

    fn leave(&mut self, cluster: &'static str) {
        self.export(cluster, json!({"app": cluster}));
    }

    fn export(&mut self, cluster: &'static str, labels: Value) {
        let case = self.exporters.remove(cluster).unwrap();
        self.exporters.insert(cluster, case.export(labels, json!({})));
        self.execute_all();
    }

    /// Executes the plans of all exporters until nothing is left to write.
    fn execute_all(&mut self) {
        for _ in 0..10 {
            let mut n_steps = 0;
            for (cluster, case) in &mut self.exporters {
                case.local = mem::take(&mut self.local);
                let unlinked = BTreeSet::new();
                let planned = match *cluster {
                    THIS_CLUSTER => case.plan_as(Exporter::ThisCluster { unlinked: &unlinked }),
                    _ => case.plan(),
                };
                case.execute(&planned);
                n_steps += planned.steps.len();
                assert_eq!(case.endpoints("web-federated"), None);
                self.local = mem::take(&mut case.local);
            }
            if n_steps == 0 {
                return;
            }
        }
        panic!("the plans do not end");
    }

    /// Asserts the local member, the remote members, and the cluster whose member determines the labels. `None` means that there is
    /// no federated Service.
    #[track_caller]
    fn assert_federated(&self, expected: Option<[&str; 3]>) {
        let name = NamespacedName::new("shop", "web-federated");
        let found = self.local.services.get(&name).map(|service| {
            let text = |map: &Option<BTreeMap<String, String>>, name: &str| {
                let value = map.as_ref().and_then(|map| map.get(name));
                value.cloned().unwrap_or_default()
            };
            let metadata = &service.metadata;
            [
                text(&metadata.annotations, annotation::LOCAL_DISCOVERY),
                text(&metadata.annotations, annotation::REMOTE_DISCOVERY),
                text(&metadata.labels, "app"),
            ]
        });
        assert_eq!(found, expected.map(|fields| fields.map(str::to_owned)));
    }
}

#[test]
fn a_federated_service_is_deleted_when_the_local_member_leaves_as_the_last() {
    let mut federation = Federation::new(&["east"]);
    federation.join("east");
    federation.assert_federated(Some(["", "web@east", "east"]));
    federation.join(THIS_CLUSTER);
    federation.assert_federated(Some(["web", "web@east", "west"]));
    federation.leave("east");
    federation.assert_federated(Some(["web", "", "west"]));
    federation.leave(THIS_CLUSTER);
    federation.assert_federated(None);
}

#[test]
fn when_the_member_with_the_oldest_link_leaves_the_next_oldest_determines_the_metadata() {
    let mut federation = Federation::new(&["north", "east", "south"]);
    federation.join("south");
    federation.assert_federated(Some(["", "web@south", "south"]));
    federation.join("north");
    federation.assert_federated(Some(["", "web@south,web@north", "north"]));
    // East is neither the oldest nor the youngest.
    federation.join("east");
    federation.assert_federated(Some(["", "web@south,web@north,web@east", "north"]));
    federation.leave("north");
    federation.assert_federated(Some(["", "web@south,web@east", "east"]));
    federation.leave("east");
    federation.assert_federated(Some(["", "web@south", "south"]));
    federation.leave("south");
    federation.assert_federated(None);
}

#[test]
fn members_that_lack_ports_of_the_federated_service_are_named() {
    let member = json!({"mirror.linkerd.io/federated": "member"});
    let missing = |case: &Case, planned: &Plan| {
        let members = members_without_ports(planned, &case.exporting, &case.local);
        let texts: Vec<_> = members
            .into_iter()
            .map(|(name, text)| format!("{name}: {text}"))
            .collect();
        texts.join("\n")
    };
    // The local member determines the ports.
    let mut east = Case::new().export(member.clone(), json!({}));
    east.add_local(json!({
        "metadata": {
            "name": "web-federated", "namespace": "shop", "labels": {"mirror.linkerd.io/mirrored-service": "true"},
            "annotations": {"multicluster.linkerd.io/local-discovery": "web"},
        },
        "spec": {"ports": [{"name": "http", "port": 80}, {"name": "a", "port": 81}, {"name": "b", "port": 82}]},
    }));
    let expected = "shop/web: the Service lacks ports of shop/web-federated, and has no endpoints for them: 81, 82";
    let planned = east.apply();
    assert_eq!(east.members(), Some(("web".to_owned(), "web@east".to_owned())));
    assert_eq!(missing(&east, &planned), expected);
    assert_eq!(missing(&east, &east.plan()), expected);

    // A member that determines the ports lacks none, also in the plan that changes them.
    let mut alone = Case::new().export(member.clone(), json!({}));
    let joined = alone.apply();
    assert_eq!(missing(&alone, &joined), "");
    let other_port = json!({"metadata": {"resourceVersion": "8"}, "spec": {"ports": [{"name": "http", "port": 90}]}});
    alone = alone.export(member, other_port);
    let changed = alone.plan();
    assert!(!changed.steps.is_empty());
    assert_eq!(missing(&alone, &changed), "");
}
