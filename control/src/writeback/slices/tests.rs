//! Tests of plans: tables, invariants for every plan, and the Services that a change affects.

use std::collections::BTreeMap;

use k8s_openapi::api::discovery::v1::Endpoint;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::reconcile::MAX_ENDPOINTS_PER_SLICE;
use super::*;
use crate::resources;
use crate::resources::service::{EndpointSlice as DecodedSlice, Service};
use crate::resources::workload::ExternalWorkload;

fn service(spec: Value) -> Arc<Service> {
    let manifest = json!({
        "metadata": {
            "name": "web", "namespace": "shop", "uid": "svc-uid",
            "labels": {"team": "a", "endpointslice.kubernetes.io/managed-by": "me"},
        },
        "spec": spec,
    });
    match resources::decode(Kind::Service, manifest).unwrap() {
        Object::Service(service) => service,
        other => panic!("{other:?}"),
    }
}

fn plain_service() -> Arc<Service> {
    service(json!({
        "clusterIP": "10.96.0.7", "selector": {"app": "web"}, "ipFamilies": ["IPv4"],
        "ports": [{"name": "http", "port": 80, "targetPort": 8080}],
    }))
}

struct Workload {
    name: String,
    ips: Vec<String>,
    ports: Value,
    ready: bool,
    labels: Value,
    version: String,
}

/// Returns a ready workload that serves port 8080.
fn workload(name: &str, ip: &str) -> Workload {
    Workload {
        name: name.to_owned(),
        ips: vec![ip.to_owned()],
        ports: json!([{"name": "web", "port": 8080}]),
        ready: true,
        labels: json!({"app": "web"}),
        version: "1".to_owned(),
    }
}

impl Workload {
    fn build(&self) -> Arc<ExternalWorkload> {
        let ips: Vec<Value> = self.ips.iter().map(|ip| json!({"ip": ip})).collect();
        let manifest = json!({
            "metadata": {
                "name": self.name, "namespace": "shop", "labels": self.labels, "uid": format!("{}-uid", self.name),
                "resourceVersion": self.version,
            },
            "spec": {
                "meshTLS": {"identity": "spiffe://root/x", "serverName": "x"},
                "ports": self.ports, "workloadIPs": ips,
            },
            "status": {"conditions": [{"type": "Ready", "status": if self.ready { "True" } else { "False" }}]},
        });
        match resources::decode(Kind::ExternalWorkload, manifest).unwrap() {
            Object::ExternalWorkload(workload) => workload,
            other => panic!("{other:?}"),
        }
    }
}

fn build(workloads: &[Workload]) -> Vec<Arc<ExternalWorkload>> {
    workloads.iter().map(Workload::build).collect()
}

fn workloads_in(range: std::ops::Range<usize>) -> Vec<Workload> {
    let one = |n: usize| workload(&format!("w{n:04}"), &format!("192.0.{}.{}", 2 + n / 250, 1 + n % 250));
    range.map(one).collect()
}

/// The slices in the API server.
#[derive(Clone, Default)]
struct TestSlices {
    objects: Vec<Arc<EndpointSlice>>,
    n_created: usize,
}

impl TestSlices {
    /// Applies a plan as the API server does.
    fn apply_plan(&mut self, plan: Plan) {
        for mut slice in plan.create {
            assert!(slice.metadata.name.is_none());
            self.n_created += 1;
            let name = format!("{}{:03}", slice.metadata.generate_name.take().unwrap(), self.n_created);
            slice.metadata.uid = Some(format!("{name}-uid"));
            slice.metadata.name = Some(name);
            slice.metadata.resource_version = Some("1".to_owned());
            self.objects.push(Arc::new(slice));
        }
        for slice in plan.update {
            let same = |held: &Arc<EndpointSlice>| held.metadata.name == slice.metadata.name;
            let index = self.objects.iter().position(same).expect("the slice exists");
            assert_eq!(
                self.objects[index].metadata.resource_version,
                slice.metadata.resource_version
            );
            assert_eq!(
                self.objects[index].address_type, slice.address_type,
                "the address type is immutable"
            );
            self.objects[index] = Arc::new(slice);
        }
        for slice in plan.delete {
            self.objects.retain(|held| held.metadata.name != slice.metadata.name);
        }
    }

    fn reconcile(&mut self, service: &Service, workloads: &[Workload]) -> [usize; 3] {
        let workloads = build(workloads);
        let plan = reconcile(service, &workloads, &self.objects);
        let n_writes = [plan.create.len(), plan.update.len(), plan.delete.len()];
        self.apply_plan(plan);
        let again = reconcile(service, &workloads, &self.objects);
        assert!(again.is_empty(), "the second plan is not empty: {again:?}");
        n_writes
    }

    fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<usize> = self.objects.iter().map(|slice| slice.endpoints.len()).collect();
        sizes.sort_unstable();
        sizes
    }

    fn names(&self) -> Vec<String> {
        self.objects
            .iter()
            .map(|slice| slice.metadata.name.clone().unwrap())
            .collect()
    }
}

fn target(endpoint: &Endpoint) -> String {
    endpoint.target_ref.as_ref().unwrap().name.clone().unwrap()
}

#[test]
fn a_workload_becomes_an_endpoint_in_a_slice_of_ours() {
    let mut slices = TestSlices::default();
    let mut tagged = workload("vm-1", "192.0.2.1");
    tagged.labels = json!({"app": "web", "topology.kubernetes.io/zone": "north"});
    assert_eq!(slices.reconcile(&plain_service(), &[tagged]), [1, 0, 0]);
    let slice = json!(*slices.objects[0]);
    let expected = json!({
        "addressType": "IPv4", "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": "linkerd-external-web-001", "namespace": "shop", "uid": "linkerd-external-web-001-uid",
            "resourceVersion": "1",
            "labels": {
                "team": "a", "kubernetes.io/service-name": "web",
                "endpointslice.kubernetes.io/managed-by": "linkerd-external-workloads-controller",
            },
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "Service", "name": "web", "uid": "svc-uid",
                "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": [{
            "addresses": ["192.0.2.1"],
            "conditions": {"ready": true, "serving": true, "terminating": false},
            "targetRef": {"kind": "ExternalWorkload", "namespace": "shop", "name": "vm-1", "uid": "vm-1-uid"},
            "zone": "north",
        }],
    });
    assert_eq!(slice, expected, "{slice:#}");
}

#[test]
fn workloads_that_are_not_ready_are_listed_and_those_without_addresses_are_not() {
    let mut slices = TestSlices::default();
    let mut unready = workload("a", "192.0.2.1");
    unready.ready = false;
    let mut nowhere = workload("b", "192.0.2.2");
    nowhere.ips.clear();
    let other_family = workload("c", "2001:db8::1");
    let refused = workload("d", "127.0.0.1");
    slices.reconcile(&plain_service(), &[unready, nowhere, other_family, refused]);
    assert_eq!(slices.sizes(), [1]);
    let conditions = slices.objects[0].endpoints[0].conditions.clone().unwrap();
    assert_eq!(
        (conditions.ready, conditions.serving, conditions.terminating),
        (Some(false), Some(false), Some(false))
    );
}

#[test]
fn ports_resolve_by_name_or_number_and_protocol_and_group_the_endpoints() {
    let service = service(json!({
        "clusterIP": "10.96.0.7", "selector": {"app": "web"}, "ipFamilies": ["IPv4"],
        "ports": [
            {"name": "http", "port": 80, "targetPort": "web", "appProtocol": "http"},
            {"name": "dns", "port": 53, "protocol": "UDP"},
        ],
    }));
    let workload_with_ports = |name: &str, ip: &str, ports: Value| Workload {
        ports,
        ..workload(name, ip)
    };
    let workloads = [
        workload_with_ports(
            "both",
            "192.0.2.1",
            json!([{"name": "web", "port": 8080}, {"port": 53, "protocol": "UDP"}]),
        ),
        workload_with_ports(
            "tcp53",
            "192.0.2.2",
            json!([{"name": "web", "port": 8080}, {"port": 53}]),
        ),
        workload_with_ports("other", "192.0.2.3", json!([{"name": "web", "port": 9090}])),
        workload_with_ports(
            "same",
            "192.0.2.4",
            json!([{"name": "web", "port": 8080}, {"port": 22}]),
        ),
        workload_with_ports("none", "192.0.2.5", json!([])),
    ];
    let mut slices = TestSlices::default();
    assert_eq!(slices.reconcile(&service, &workloads), [4, 0, 0]);
    let groups: BTreeMap<String, Vec<String>> = slices
        .objects
        .iter()
        .map(|slice| {
            let ports = slice.ports.iter().flatten();
            let shown: Vec<String> = ports
                .map(|port| {
                    let app = port.app_protocol.as_deref().unwrap_or("-");
                    format!(
                        "{}={}/{}/{app}",
                        port.name.clone().unwrap(),
                        port.port.unwrap(),
                        port.protocol.clone().unwrap()
                    )
                })
                .collect();
            (shown.join(","), slice.endpoints.iter().map(target).collect())
        })
        .collect();
    let strings = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        groups,
        BTreeMap::from([
            ("dns=53/UDP/-,http=8080/TCP/http".to_owned(), strings(&["both"])),
            ("http=8080/TCP/http".to_owned(), strings(&["same", "tcp53"])),
            ("http=9090/TCP/http".to_owned(), strings(&["other"])),
            (String::new(), strings(&["none"])),
        ])
    );
}

#[test]
fn each_family_of_the_service_has_slices_of_its_own() {
    let dual = |families: Value| {
        service(
            json!({"clusterIP": "10.96.0.7", "selector": {"app": "web"}, "ipFamilies": families,
            "ports": [{"port": 8080}]}),
        )
    };
    let mut both = workload("a", "192.0.2.1");
    both.ips.push("2001:db8::1".to_owned());
    let types = |slices: &TestSlices| {
        let mut types: Vec<String> = slices.objects.iter().map(|slice| slice.address_type.clone()).collect();
        types.sort_unstable();
        types
    };
    let mut slices = TestSlices::default();
    slices.reconcile(&dual(json!([])), &[both]);
    assert_eq!(types(&slices), ["IPv4", "IPv6"], "no families means both");
    let mut both = workload("a", "192.0.2.1");
    both.ips.push("2001:db8::1".to_owned());
    assert_eq!(slices.reconcile(&dual(json!(["IPv6"])), &[both]), [0, 0, 1]);
    assert_eq!(types(&slices), ["IPv6"]);
}

#[test]
fn headless_services_have_hostnames_and_may_have_no_ports() {
    let headless = service(json!({"clusterIP": "None", "selector": {"app": "web"}, "ipFamilies": ["IPv4"]}));
    let mut slices = TestSlices::default();
    slices.reconcile(
        &headless,
        &[workload("vm-1", "192.0.2.1"), workload("vm.2", "192.0.2.2")],
    );
    let slice = &slices.objects[0];
    assert_eq!(
        slice.metadata.labels.as_ref().unwrap()["service.kubernetes.io/headless"],
        ""
    );
    assert_eq!(slice.ports.as_deref(), Some(&[][..]));
    let hostnames: Vec<_> = slice
        .endpoints
        .iter()
        .map(|endpoint| endpoint.hostname.as_deref())
        .collect();
    assert_eq!(hostnames, [Some("vm-1"), None], "a name with a dot is no hostname");
}

#[test]
fn slices_are_packed_to_a_hundred_and_gaps_are_filled() {
    let service = plain_service();
    let mut slices = TestSlices::default();
    assert_eq!(slices.reconcile(&service, &workloads_in(0..250)), [3, 0, 0]);
    assert_eq!(slices.sizes(), [50, 100, 100]);
    // Removes sixty of the first hundred: one slice is written.
    assert_eq!(slices.reconcile(&service, &workloads_in(60..250)), [0, 1, 0]);
    assert_eq!(slices.sizes(), [40, 50, 100]);
    // Adds thirty: they fit best into the fuller of the two.
    assert_eq!(slices.reconcile(&service, &workloads_in(60..280)), [0, 1, 0]);
    assert_eq!(slices.sizes(), [40, 80, 100]);
    // Removes one and adds seventy: the slice that has to be written is filled first, the rest fits into another one.
    assert_eq!(slices.reconcile(&service, &workloads_in(61..350)), [0, 2, 0]);
    assert_eq!(slices.sizes(), [89, 100, 100]);
    // Adds a hundred and twenty, which do not fit into existing slices.
    assert_eq!(slices.reconcile(&service, &workloads_in(61..470)), [2, 0, 0]);
    assert_eq!(slices.sizes(), [20, 89, 100, 100, 100]);
    // Adds a hundred and ten: a hundred fill a new slice, and ten fill the gap that they fit best.
    assert_eq!(slices.reconcile(&service, &workloads_in(61..580)), [1, 1, 0]);
    assert_eq!(slices.sizes(), [20, 99, 100, 100, 100, 100]);
    assert_eq!(slices.reconcile(&service, &[]), [0, 0, 6]);
}

#[test]
fn a_deleted_slice_is_reused_for_a_new_one() {
    let narrow = plain_service();
    let mut slices = TestSlices::default();
    slices.reconcile(&narrow, &workloads_in(0..150));
    let before = slices.names();
    let moved: Vec<Workload> = workloads_in(0..150)
        .into_iter()
        .map(|workload| Workload {
            ports: json!([{"name": "web", "port": 8080}, {"name": "more", "port": 1}]),
            ..workload
        })
        .collect();
    assert_eq!(
        slices.reconcile(&narrow, &moved),
        [0, 0, 0],
        "a port that the Service does not have changes nothing"
    );
    let wider = service(json!({
        "clusterIP": "10.96.0.7", "selector": {"app": "web"}, "ipFamilies": ["IPv4"],
        "ports": [{"name": "http", "port": 80, "targetPort": 8080}, {"name": "more", "port": 1}],
    }));
    assert_eq!(slices.reconcile(&wider, &moved), [0, 2, 0]);
    let mut after = slices.names();
    after.sort_unstable();
    assert_eq!(after, before);
    assert_eq!(slices.sizes(), [50, 100]);
}

#[test]
fn slices_of_another_owner_are_deleted_and_not_reused() {
    let service = plain_service();
    let mut slices = TestSlices::default();
    slices.reconcile(&service, &workloads_in(0..1));
    let mut foreign = (*slices.objects[0]).clone();
    foreign.metadata.owner_references.as_mut().unwrap()[0].uid = "an-older-service".to_owned();
    slices.objects = vec![Arc::new(foreign)];
    assert_eq!(slices.reconcile(&service, &workloads_in(0..1)), [1, 0, 1]);
}

#[test]
fn labels_follow_those_of_the_service() {
    let mut service = plain_service();
    let mut slices = TestSlices::default();
    slices.reconcile(&service, &workloads_in(0..3));
    Arc::make_mut(&mut service).meta.labels = [("team", "b")].into_iter().collect();
    assert_eq!(slices.reconcile(&service, &workloads_in(0..3)), [0, 1, 0]);
    assert_eq!(slices.objects[0].metadata.labels.as_ref().unwrap()["team"], "b");
}

#[test]
fn nothing_is_created_for_a_service_that_is_being_deleted() {
    let mut service = plain_service();
    let mut slices = TestSlices::default();
    slices.reconcile(&service, &workloads_in(0..3));
    Arc::make_mut(&mut service).meta.terminating = true;
    let workloads = build(&workloads_in(0..300));
    let plan = reconcile(&service, &workloads, &slices.objects);
    assert!(plan.create.is_empty(), "{plan:?}");
    assert_eq!(plan.update[0].endpoints.len(), 100, "existing slices are kept");
    slices.apply_plan(plan);
    let plan = reconcile(&service, &workloads, &slices.objects);
    assert!(plan.is_empty(), "{plan:?}");
}

#[test]
fn a_modified_slice_is_restored() {
    let service = plain_service();
    let mut slices = TestSlices::default();
    slices.reconcile(&service, &workloads_in(0..120));
    let mut changed = (*slices.objects[0]).clone();
    let copy = slices.objects[1].endpoints[0].clone();
    changed.endpoints[0].addresses = vec!["192.0.2.250".to_owned()];
    changed.endpoints.extend([copy.clone(), copy, Endpoint::default()]);
    slices.objects[0] = Arc::new(changed);
    slices.reconcile(&service, &workloads_in(0..120));
    assert_eq!(slices.sizes().iter().sum::<usize>(), 120);
}

/// A state of the Service and its workloads.
#[derive(Clone, Debug)]
struct Step {
    /// The state of each of 40 groups of ten workloads: absent, one of three variants, or unchanged.
    variants: Vec<u8>,
    headless: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step =
        (prop::collection::vec(0u8..5, 40), any::<bool>()).prop_map(|(variants, headless)| Step { variants, headless });
    prop::collection::vec(step, 1..6)
}

impl Step {
    fn service(&self) -> Arc<Service> {
        service(json!({
            "clusterIP": if self.headless { "None" } else { "10.96.0.7" }, "selector": {"app": "web"},
            "ports": [{"name": "http", "port": 80, "targetPort": "web"}],
        }))
    }

    fn workloads(&self) -> Vec<Workload> {
        let mut workloads = Vec::new();
        for (group, variant) in self.variants.iter().enumerate() {
            for mut workload in workloads_in(group * 10..group * 10 + 10) {
                match variant {
                    0 => continue,
                    1 => workload.ready = false,
                    2 => workload.ports = json!([{"name": "web", "port": 9090}]),
                    3 => workload.ips.push(format!("2001:db8::{:x}", group + 1)),
                    _ => {}
                }
                workloads.push(workload);
            }
        }
        workloads
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn no_endpoint_is_lost_or_doubled_and_no_slice_is_longer_than_a_hundred(steps in steps()) {
        let mut slices = TestSlices::default();
        for step in steps {
            let (service, workloads) = (step.service(), step.workloads());
            let before = slices.clone();
            let writes = slices.reconcile(&service, &workloads);
            let mut expected: Vec<(String, String)> = Vec::new();
            for workload in &workloads {
                expected.extend(workload.ips.iter().map(|ip| (workload.name.clone(), ip.clone())));
            }
            let mut found: Vec<(String, String)> = Vec::new();
            for slice in &slices.objects {
                prop_assert!((1..=MAX_ENDPOINTS_PER_SLICE).contains(&slice.endpoints.len()));
                for endpoint in &slice.endpoints {
                    found.push((target(endpoint), endpoint.addresses[0].clone()));
                }
            }
            expected.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(found, expected);
            // Unchanged slices are not written.
            let changed = slices.objects.iter().filter(|slice| !before.objects.contains(slice)).count();
            prop_assert_eq!(writes[0] + writes[1], changed);
            // Within one address family, a slice is created only if none is deleted.
            let [created, _, deleted] = writes;
            let are_all_ipv4 = |slices: &[Arc<EndpointSlice>]| slices.iter().all(|slice| slice.address_type == "IPv4");
            if are_all_ipv4(&before.objects) && are_all_ipv4(&slices.objects) {
                prop_assert!(created == 0 || deleted == 0, "{created} created, {deleted} deleted");
            }
        }
    }
}

fn names(affected: &BTreeSet<NamespacedName>) -> Vec<&str> {
    affected.iter().map(|name| &*name.name).collect()
}

fn named_service(name: &str, selector: Value) -> Arc<Service> {
    let mut service = service(json!({"clusterIP": "10.96.0.7", "selector": selector}));
    Arc::make_mut(&mut service).meta.name = NamespacedName::new("shop", name);
    service
}

#[test]
fn a_workload_change_affects_the_services_that_select_it() {
    let mut index = SliceIndex::default();
    for service in [
        named_service("app", json!({"app": "web"})),
        named_service("blue", json!({"app": "web", "color": "blue"})),
        named_service("green", json!({"color": "green"})),
        named_service("no-selector", json!({})),
    ] {
        index.apply_service(&service);
    }
    let vm = |version: &str, labels: Value, ready: bool| {
        Workload {
            version: version.to_owned(),
            labels,
            ready,
            ..workload("vm", "192.0.2.1")
        }
        .build()
    };
    let blue = json!({"app": "web", "color": "blue"});
    let green = json!({"app": "web", "color": "green"});
    assert_eq!(
        names(&index.apply_workload(&vm("1", blue.clone(), true))),
        ["app", "blue"],
        "added"
    );
    assert!(
        index.apply_workload(&vm("1", blue.clone(), true)).is_empty(),
        "unchanged version"
    );
    assert!(
        index.apply_workload(&vm("2", blue.clone(), true)).is_empty(),
        "no relevant change"
    );
    assert_eq!(
        names(&index.apply_workload(&vm("3", blue, false))),
        ["app", "blue"],
        "endpoints"
    );
    let moved = index.apply_workload(&vm("4", green.clone(), false));
    assert_eq!(names(&moved), ["blue", "green"], "labels: the old and the new Services");
    let both = index.apply_workload(&vm("5", json!({"app": "web"}), true));
    assert_eq!(
        names(&both),
        ["app", "green"],
        "labels and endpoints: all Services that select it"
    );
    index.apply_workload(&vm("6", green, true));
    assert_eq!(
        names(&index.delete_workload(&NamespacedName::new("shop", "vm"))),
        ["app", "green"]
    );
    assert!(index.delete_workload(&NamespacedName::new("shop", "vm")).is_empty());
}

fn decode_slice(name: &str, labels: Value, generation: i64) -> DecodedSlice {
    let manifest = json!({
        "metadata": {"name": name, "namespace": "shop", "uid": name, "labels": labels, "generation": generation},
        "addressType": "IPv4", "endpoints": [],
    });
    match resources::decode(Kind::EndpointSlice, manifest).unwrap() {
        Object::EndpointSlice(slice) => (*slice).clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_change_of_a_slice_by_another_client_affects_its_service() {
    let mut index = SliceIndex::default();
    let ours = |service: &str| {
        json!({"kubernetes.io/service-name": service,
            "endpointslice.kubernetes.io/managed-by": "linkerd-external-workloads-controller"})
    };
    let foreign = json!({"kubernetes.io/service-name": "web",
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"});
    assert!(
        index.apply_slice(&decode_slice("k8s", foreign.clone(), 1)).is_empty(),
        "not ours"
    );
    assert_eq!(
        names(&index.apply_slice(&decode_slice("a", ours("web"), 1))),
        ["web"],
        "unknown"
    );
    let web = NamespacedName::new("shop", "web");
    index
        .tracker
        .record_write(&web, &decode_slice("a", ours("web"), 2).managed_object.unwrap());
    assert!(
        index.apply_slice(&decode_slice("a", ours("web"), 2)).is_empty(),
        "our own write"
    );
    assert_eq!(
        names(&index.apply_slice(&decode_slice("a", ours("web"), 3))),
        ["web"],
        "tampered with"
    );
    let moved = index.apply_slice(&decode_slice("a", ours("api"), 4));
    assert_eq!(names(&moved), ["api", "web"], "moved to another Service");
    assert_eq!(
        names(&index.apply_slice(&decode_slice("a", foreign, 5))),
        ["api"],
        "no longer ours"
    );
    index.apply_slice(&decode_slice("b", ours("web"), 1));
    index
        .tracker
        .record_delete(&web, &decode_slice("b", ours("web"), 1).managed_object.unwrap());
    assert!(
        index.delete_slice(&NamespacedName::new("shop", "b")).is_empty(),
        "deleted by us"
    );
    index.apply_slice(&decode_slice("c", ours("web"), 1));
    assert_eq!(
        names(&index.delete_slice(&NamespacedName::new("shop", "c"))),
        ["web"],
        "deleted by others"
    );
}

#[test]
fn services_without_selectors_and_external_names_are_ignored() {
    let mut index = SliceIndex::default();
    index.apply_service(&named_service("plain", json!({"app": "web"})));
    index.apply_service(&named_service("none", json!({})));
    let mut alias = service(json!({"type": "ExternalName", "externalName": "x.example", "selector": {"app": "web"}}));
    Arc::make_mut(&mut alias).meta.name = NamespacedName::new("shop", "alias");
    index.apply_service(&alias);
    index.apply_workload(&workload("vm", "192.0.2.1").build());
    let inputs = |name: &str| index.reconcile_inputs(&NamespacedName::new("shop", name));
    assert_eq!(inputs("plain").unwrap().workloads.len(), 1);
    assert!(inputs("none").is_none());
    assert!(inputs("alias").is_none());
    assert!(inputs("gone").is_none());
}

#[test]
fn workloads_of_other_namespaces_are_left_out() {
    let mut index = SliceIndex::default();
    index.apply_service(&plain_service());
    index.apply_workload(&workload("here", "192.0.2.1").build());
    for namespace in ["default", "sho", "shop-2", "shops"] {
        let mut elsewhere = workload("there", "192.0.2.2").build();
        Arc::make_mut(&mut elsewhere).meta.name = NamespacedName::new(namespace, "there");
        let affected = index.apply_workload(&elsewhere);
        assert!(affected.is_empty(), "{namespace}: {affected:?}");
    }
    let inputs = index.reconcile_inputs(&NamespacedName::new("shop", "web")).unwrap();
    let workloads = inputs.workloads.iter().map(|workload| workload.meta.name.to_string());
    assert_eq!(workloads.collect::<Vec<_>>(), ["shop/here"]);
}

/// Returns a controller whose API server rejects all requests.
fn failing_controller() -> Controller {
    let service = tower::service_fn(|_: http::Request<kube::client::Body>| {
        let refusal = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500});
        let rsp = http::Response::builder().status(500);
        let rsp = rsp.body(kube::client::Body::from(refusal.to_string().into_bytes()));
        std::future::ready(Ok::<_, Infallible>(rsp.unwrap()))
    });
    Controller::new(Client::new(service, "default"), &Registry::new())
}

/// Runs the controller as the leader until `checks` ends.
async fn lead_until(controller: &Controller, checks: impl Future<Output = ()>) {
    controller.start_leading();
    tokio::select! {
        never = controller.run_worker() => match never {},
        never = controller.resync_periodically() => match never {},
        () = checks => {}
    }
}

#[tokio::test]
async fn services_in_kube_system_are_ignored() {
    let controller = failing_controller();
    let mut system = plain_service();
    Arc::make_mut(&mut system).meta.name = NamespacedName::new("kube-system", "web");
    let mut workload = workload("vm", "192.0.2.1").build();
    Arc::make_mut(&mut workload).meta.name = NamespacedName::new("kube-system", "vm");
    let events = || {
        vec![
            Event::Applied(Object::Service(system.clone())),
            Event::Applied(Object::ExternalWorkload(workload.clone())),
        ]
    };
    let added = || controller.0.metrics.adds.get();
    // Events before leadership starts, and events after that.
    controller.apply(events());
    controller.start_leading();
    controller.apply(events());
    assert_eq!(added(), 0);
    controller.apply(vec![Event::Applied(Object::Service(plain_service()))]);
    assert_eq!(added(), 1);
}

#[tokio::test(start_paused = true)]
async fn all_services_are_resynced_every_ten_minutes() {
    let controller = failing_controller();
    // No slices are written for services that select no workloads.
    for name in ["api", "web"] {
        let service = named_service(name, json!({"app": name}));
        controller.apply(vec![Event::Applied(Object::Service(service))]);
    }
    let start = Instant::now();
    let checks = async {
        for (seconds, added) in [(1, 2), (599, 2), (601, 4), (1199, 4), (1201, 6)] {
            sleep_until(start + Duration::from_secs(seconds)).await;
            let metrics = &controller.0.metrics;
            assert_eq!(
                (metrics.adds.get(), metrics.depth.get()),
                (added, 0),
                "after {seconds} s"
            );
        }
    };
    lead_until(&controller, checks).await;
}

#[tokio::test(start_paused = true)]
async fn a_dropped_service_is_retried_at_the_next_resync() {
    let controller = failing_controller();
    controller.apply(vec![
        Event::Applied(Object::Service(plain_service())),
        Event::Applied(Object::ExternalWorkload(workload("vm", "192.0.2.1").build())),
    ]);
    let start = Instant::now();
    let checks = async {
        for (seconds, retries, drops) in [(599, 15, 1), (1199, 30, 2)] {
            sleep_until(start + Duration::from_secs(seconds)).await;
            let metrics = &controller.0.metrics;
            assert_eq!(
                (metrics.retries.get(), metrics.drops.get()),
                (retries, drops),
                "after {seconds} s"
            );
        }
    };
    lead_until(&controller, checks).await;
}
