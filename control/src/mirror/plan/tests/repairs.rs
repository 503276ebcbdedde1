//! Repairs of existing mirrors while the exported Services are not known.

use super::*;

/// Executes the repairs as an API server would, and returns the names of the changed objects. Asserts that a second plan is empty.
fn repair(case: &mut Case) -> Vec<String> {
    let planned = plan_repairs(&case.inputs(Exporter::Linked(case.linked(&probe_service()))));
    case.execute(&planned);
    let again = plan_repairs(&case.inputs(Exporter::Linked(case.linked(&probe_service()))));
    assert!(again.steps.is_empty(), "the second plan: {:?}", again.steps);
    let mut names: Vec<String> = planned.steps.iter().map(|step| step.name.to_string()).collect();
    names.sort_unstable();
    names
}

#[test]
fn existing_mirrors_follow_the_gateway_while_the_exported_services_are_not_known() {
    let mut case = Case::new().exported();
    case.apply();
    let before = case.endpoints("web-east").unwrap();
    // The list of exported Services is lost.
    case.exporting = ExportingCluster::default();
    case.add_local(json!({"metadata": {"name": "probe-east", "namespace": "multicluster"}}));
    assert_eq!(repair(&mut case), ["multicluster/probe-east"]);
    case.is_alive = false;
    assert_eq!(repair(&mut case), ["shop/web-east"]);
    let ports = before["subsets"][0]["ports"].clone();
    let not_ready = json!([{"notReadyAddresses": [{"ip": "192.0.2.7"}], "ports": ports}]);
    let after = case.endpoints("web-east").unwrap();
    assert_eq!(after["subsets"], not_ready);
    for field in ["labels", "annotations"] {
        assert_eq!(after["metadata"][field], before["metadata"][field]);
    }

    case.is_alive = true;
    case.addresses = vec!["192.0.2.8".parse().unwrap()];
    let gateway = case.link.gateway.as_mut().unwrap();
    gateway.port = 4144;
    gateway.identity = Some("new.east".to_owned());
    assert_eq!(repair(&mut case), ["multicluster/probe-east", "shop/web-east"]);
    let after = case.endpoints("web-east").unwrap();
    assert_eq!(after["subsets"][0]["addresses"], json!([{"ip": "192.0.2.8"}]));
    assert_eq!(after["subsets"][0]["ports"][0]["port"], 4144);
    assert_eq!(
        after["metadata"]["annotations"][annotation::REMOTE_GATEWAY_IDENTITY],
        "new.east"
    );
    assert!(case.service("web-east").is_some());
}

#[test]
fn empty_mirrors_headless_mirrors_and_mirrors_of_other_clusters_are_not_repaired() {
    let mut case = headless();
    set_pods(&mut case, &["db-0"], &[]);
    apply_all(&mut case);
    case.exporting = ExportingCluster::default();
    let empty = json!({
        "metadata": {"name": "empty-east", "namespace": "shop", "labels": mirror_labels("east")}, "subsets": [],
    });
    let other = json!({
        "metadata": {"name": "web-north", "namespace": "shop", "labels": mirror_labels("north")},
        "subsets": [{"addresses": [{"ip": "192.0.2.9"}], "ports": [{"port": 4143}]}],
    });
    for endpoints in [empty, other] {
        case.add_local(json!({"metadata": endpoints["metadata"], "spec": {"clusterIP": "10.9.9.9"}}));
        let endpoints: Endpoints = serde_json::from_value(endpoints).unwrap();
        let name = object_name(&endpoints.metadata);
        case.local.endpoints.insert(name, Arc::new(endpoints));
    }
    case.is_alive = false;
    // The mirror of the pod is repaired; the headless mirror is not.
    assert_eq!(repair(&mut case), ["shop/db-0-east"]);
    // Without an address of the gateway, nothing changes.
    case.is_alive = true;
    case.addresses.clear();
    assert_eq!(repair(&mut case), Vec::<String>::new());
}
