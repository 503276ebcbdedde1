//! Compares the objects that the service mirror writes with those that Linkerd's service mirror wrote for the same inputs.
//!
//! `proto/recorded/multicluster` has the inputs and Linkerd's objects; `differences` lists the intended differences. The tests that
//! need `TULLE_TEST_LINKERD` compare what another version of Linkerd writes.

mod differences;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tulle_tests::cluster::AuditRecord;

use self::differences::{Difference, FieldDifferences};
use super::linkerd_controller::{LinkerdController, LinkerdProcess};
use super::*;

/// Inputs of a recording.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Inputs {
    enable_headless_services: bool,
    /// Links, and `local` for the Services of the cluster west.
    controllers: Vec<String>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    name: String,
    /// Whether the service mirrors do not run while the objects change.
    #[serde(default)]
    stopped: bool,
    #[serde(default)]
    deleted: Vec<Deleted>,
    #[serde(default)]
    east: Vec<Value>,
    #[serde(default)]
    west: Vec<Value>,
}

/// A Service of the cluster east that is deleted, with its Endpoints and EndpointSlices.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Deleted {
    namespace: String,
    name: String,
}

/// The objects that Linkerd had changed after a step.
#[derive(Deserialize)]
struct RecordedStep {
    step: String,
    #[serde(default)]
    deleted: Vec<Value>,
    #[serde(default)]
    written: Vec<Value>,
}

impl Inputs {
    fn links(&self) -> impl Iterator<Item = &str> {
        let controllers = self.controllers.iter().map(String::as_str);
        controllers.filter(|controller| *controller != "local")
    }
}

/// Whose service mirrors run.
#[derive(Clone, Copy)]
enum Program<'a> {
    Tulle,
    Linkerd(&'a LinkerdController),
}

/// A service mirror that runs.
enum RunningMirror {
    Tulle(Mirror),
    Linkerd(LinkerdProcess),
}

/// The fields of objects and their values as JSON, by the name of the object.
type Objects = BTreeMap<String, BTreeMap<String, String>>;

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_of_exported_services_are_those_of_linkerd() {
    compare("mirrors", differences::MIRRORS, Program::Tulle).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_of_pods_are_those_of_linkerd() {
    compare("headless", differences::HEADLESS, Program::Tulle).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn federated_services_are_those_of_linkerd() {
    compare("federated", differences::FEDERATED, Program::Tulle).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_that_linkerd_wrote_are_kept() {
    take_over("mirrors", differences::MIRRORS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_of_pods_that_linkerd_wrote_are_kept() {
    take_over("headless", differences::HEADLESS).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs TULLE_TEST_LINKERD"]
async fn linkerd_writes_the_recorded_mirrors() {
    compare_linkerd("mirrors").await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs TULLE_TEST_LINKERD"]
async fn linkerd_writes_the_recorded_mirrors_of_pods() {
    compare_linkerd("headless").await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs TULLE_TEST_LINKERD"]
async fn linkerd_writes_the_recorded_federated_services() {
    compare_linkerd("federated").await;
}

async fn compare_linkerd(name: &str) {
    let controller = LinkerdController::from_env().await;
    let expected = match name {
        "headless" if controller.is_before([26, 5, 1]) => differences::HEADLESS_OF_OLDER_LINKERD,
        _ => &[],
    };
    compare(name, expected, Program::Linkerd(&controller)).await;
}

/// Applies the inputs step by step, and compares the objects after each step. For tulle, the cluster east has EndpointSlices
/// instead of the Endpoints of the inputs.
async fn compare(name: &str, expected: &[Difference], program: Program<'_>) {
    let inputs: Inputs = read(&format!("{name}.yaml"));
    let recorded: Vec<RecordedStep> = read(&format!("{name}-linkerd.yaml"));
    assert_eq!(inputs.steps.len(), recorded.len());
    let (west, east) = clusters(&inputs).await;
    let access = remote_access(&east).await;
    put_all_credentials(&inputs, &west, &access).await;
    let mut mirrors = Vec::new();
    let mut theirs = Objects::new();
    for (n, (step, recorded)) in inputs.steps.iter().zip(recorded).enumerate() {
        assert_eq!(step.name, recorded.step);
        if step.stopped {
            end_all(&mut mirrors).await;
        }
        delete_objects(step, &east).await;
        for object in &step.east {
            match (object["kind"].as_str(), program) {
                (Some("Endpoints"), Program::Tulle) => apply(&east, &slice_of(object)).await,
                _ => create(&east, object).await,
            }
        }
        create_all(&west, &step.west).await;
        if mirrors.is_empty() {
            mirrors = start_all(&inputs, &west, program).await;
        }
        apply_recorded_step(&mut theirs, recorded);
        let expected = differences::expected_after_step(expected, n);
        let (limit, stable_for) = match program {
            Program::Tulle => (time_limit(&step.name), Duration::ZERO),
            Program::Linkerd(_) => (CONVERGENCE_TIMEOUT + STABLE_TIME, STABLE_TIME),
        };
        let converged = wait_for_differences(&step.name, &expected, stable_for, async || {
            found_differences(&theirs, &objects(&west, &east).await)
        });
        in_time(limit, converged).await;
    }
    end_all(&mut mirrors).await;
}

/// The time until the objects must be as expected after a step.
fn time_limit(step: &str) -> Duration {
    let limit = TIME_LIMITS.iter().find(|(name, _)| *name == step);
    limit.map_or(CONVERGENCE_TIMEOUT, |(_, limit)| *limit)
}

/// Starts the service mirrors where Linkerd's have written their objects. Objects without differences are not written, and the others
/// are not created again. As Linkerd's, they read Endpoints, because the account may not read EndpointSlices.
async fn take_over(name: &str, expected: &[Difference]) {
    let inputs: Inputs = read(&format!("{name}.yaml"));
    let recorded: Vec<RecordedStep> = read(&format!("{name}-linkerd.yaml"));
    let (west, east) = clusters(&inputs).await;
    let access = remote_access_without_slices(&east).await;
    put_all_credentials(&inputs, &west, &access).await;
    create_all(&east, &inputs.steps[0].east).await;
    create_all(&west, &inputs.steps[0].west).await;
    let first = recorded.into_iter().next().unwrap();
    for kind in ["Service", "Endpoints"] {
        for object in first.written.iter().filter(|object| object["kind"] == kind) {
            apply(&west, &linkerd_object(object, &west, &east).await).await;
        }
    }
    let before = versions(&west).await;
    let mut theirs = Objects::new();
    apply_recorded_step(&mut theirs, first);
    let expected = differences::expected_after_step(expected, 0);
    let mut mirrors = start_all(&inputs, &west, Program::Tulle).await;
    wait_for_differences("taking over", &expected, Duration::ZERO, async || {
        found_differences(&theirs, &objects(&west, &east).await)
    })
    .await;
    end_all(&mut mirrors).await;
    let after = versions(&west).await;
    for (name, (uid, version)) in before {
        let fields: Vec<_> = expected.iter().filter(|(object, ..)| *object == name).collect();
        match after.get(&name) {
            Some((new_uid, new_version)) => {
                assert_eq!(uid, *new_uid, "{name} is another object");
                assert_eq!(version == *new_version, fields.is_empty(), "{name}: {fields:?}");
            }
            None => assert!(!fields.is_empty(), "{name} is deleted"),
        }
    }
    let is_for_slices = |record: &AuditRecord| {
        let object = record.object_ref.as_ref();
        object.is_some_and(|object| object.resource == "endpointslices")
    };
    assert!(!east.audit_log().unwrap().iter().any(is_for_slices));
}

/// An object of the recording, with the versions and addresses in these clusters.
async fn linkerd_object(recorded: &Value, west: &ApiServer, east: &ApiServer) -> Value {
    let text = |field: &str| recorded[field].as_str().unwrap();
    let namespace = text("namespace");
    let mut object = json!({
        "apiVersion": "v1", "kind": text("kind"), "metadata": {"namespace": namespace, "name": text("name")},
    });
    for field in ["labels", "annotations"] {
        if let Some(value) = recorded.get(field) {
            object["metadata"][field] = value.clone();
        }
    }
    for field in ["spec", "subsets"] {
        if let Some(value) = recorded.get(field) {
            object[field] = value.clone();
        }
    }
    if let Some(version) = object.pointer_mut("/metadata/annotations/mirror.linkerd.io~1remote-resource-version") {
        let headless = recorded["labels"]["mirror.linkerd.io/headless-mirror-svc-name"].as_str();
        let name = headless.unwrap_or_else(|| text("name")).strip_suffix("-east").unwrap();
        let remote = match version.as_str().unwrap() {
            "of the Service" => {
                Api::<Service>::namespaced(east.client(), namespace)
                    .get(name)
                    .await
                    .unwrap()
                    .metadata
            }
            "of the Endpoints" => {
                Api::<Endpoints>::namespaced(east.client(), namespace)
                    .get(name)
                    .await
                    .unwrap()
                    .metadata
            }
            other => panic!("{other}"),
        };
        *version = remote.resource_version.into();
    }
    let services = Api::<Service>::namespaced(west.client(), namespace);
    let subsets = object.get_mut("subsets").and_then(Value::as_array_mut);
    for subset in subsets.into_iter().flatten() {
        for address in subset["addresses"].as_array_mut().into_iter().flatten() {
            if let Some(name) = address["ip"].as_str().unwrap().strip_prefix("cluster IP of ") {
                let spec = services.get(name).await.unwrap().spec.unwrap();
                address["ip"] = spec.cluster_ip.into();
            }
        }
    }
    object
}

/// The uid and resource version of each Service and Endpoints.
pub(super) async fn versions(server: &ApiServer) -> BTreeMap<String, (String, String)> {
    let mut versions = BTreeMap::new();
    for (kind, objects) in [
        ("Service", list::<Service>(server).await),
        ("Endpoints", list::<Endpoints>(server).await),
    ] {
        for object in objects {
            let text = |field: &str| object["metadata"][field].as_str().unwrap().to_owned();
            let name = format!("{kind} {}/{}", text("namespace"), text("name"));
            versions.insert(name, (text("uid"), text("resourceVersion")));
        }
    }
    versions
}

/// The clusters west and east.
async fn clusters(inputs: &Inputs) -> (ApiServer, ApiServer) {
    let links: Vec<&str> = inputs.links().collect();
    let (west, east) = tokio::join!(cluster(&links), cluster(&[]));
    for (server, namespace) in [(&west, "other"), (&east, "other"), (&east, "only-east")] {
        server.create_namespace(namespace).await.unwrap();
    }
    // The inputs have all Services of the recording.
    let services = ["delete", "services", "--all", "-n", NAMESPACE];
    west.kubectl(&services).await.unwrap();
    (west, east)
}

async fn put_all_credentials(inputs: &Inputs, west: &ApiServer, access: &Path) {
    for link in inputs.links() {
        put_credentials(west, link, access).await;
    }
}

async fn start_all(inputs: &Inputs, west: &ApiServer, program: Program<'_>) -> Vec<RunningMirror> {
    let mut mirrors = Vec::new();
    for controller in &inputs.controllers {
        mirrors.push(match program {
            Program::Tulle => RunningMirror::Tulle(start_tulle(inputs, west, controller).await),
            Program::Linkerd(linkerd) => RunningMirror::Linkerd(start_linkerd(linkerd, inputs, west, controller)),
        });
    }
    mirrors
}

async fn start_tulle(inputs: &Inputs, west: &ApiServer, controller: &str) -> Mirror {
    let (account, scope) = match controller {
        "local" => {
            let selector = "mirror.linkerd.io/federated=member".parse().unwrap();
            let members = LocalMembers::new(selector, "", "");
            ("linkerd-local-service-mirror".to_owned(), Scope::ThisCluster(members))
        }
        link => (format!("controller-{link}"), Scope::Link(link.to_owned())),
    };
    let config = Config {
        mirrors_pods: inputs.enable_headless_services,
        probe_service: Some(format!("probe-{controller}")),
        ..mirror_config(scope)
    };
    Mirror::start_with(west, &account, config).await
}

fn start_linkerd(linkerd: &LinkerdController, inputs: &Inputs, west: &ApiServer, controller: &str) -> LinkerdProcess {
    let mut args = vec![
        format!("-namespace={NAMESPACE}"),
        format!("-probe-service=probe-{controller}"),
        format!("-enable-headless-services={}", inputs.enable_headless_services),
        // Changes by hand are undone in this interval, by default a minute.
        "-endpoint-refresh-period=5s".to_owned(),
    ];
    args.push(match controller {
        "local" => "-local-mirror".to_owned(),
        // Not a flag: all flags come before it.
        link => link.to_owned(),
    });
    linkerd.start("service-mirror", &format!("mirror-{controller}"), west, &args)
}

async fn end_all(mirrors: &mut Vec<RunningMirror>) {
    for mirror in mirrors.drain(..) {
        match mirror {
            RunningMirror::Tulle(mirror) => mirror.end().await,
            RunningMirror::Linkerd(process) => drop(process),
        }
    }
}

async fn delete_objects(step: &Step, east: &ApiServer) {
    for Deleted { namespace, name } in &step.deleted {
        let services = Api::<Service>::namespaced(east.client(), namespace);
        services.delete(name, &Default::default()).await.unwrap();
        // Kubernetes deletes both with their Service.
        delete_if_exists(&Api::<Endpoints>::namespaced(east.client(), namespace), name).await;
        let slices = Api::<EndpointSlice>::namespaced(east.client(), namespace);
        delete_if_exists(&slices, &slice_name(name)).await;
    }
}

async fn delete_if_exists<K>(api: &Api<K>, name: &str)
where
    K: Clone + std::fmt::Debug + DeserializeOwned,
{
    if api.get_opt(name).await.unwrap().is_some() {
        api.delete(name, &Default::default()).await.unwrap();
    }
}

async fn create_all(server: &ApiServer, objects: &[Value]) {
    for object in objects {
        create(server, object).await;
    }
}

/// Creates an object, or replaces it. It can be a namespace.
async fn create(server: &ApiServer, object: &Value) {
    match object["kind"].as_str() {
        Some("Namespace") => {
            let name = object["metadata"]["name"].as_str().unwrap();
            server.create_namespace(name).await.unwrap();
        }
        _ => apply(server, object).await,
    }
}

/// Waits until the differences are the expected ones, and have been for this time.
async fn wait_for_differences(
    step: &str,
    expected: &FieldDifferences,
    stable_for: Duration,
    found: impl AsyncFn() -> FieldDifferences,
) {
    let deadline = Instant::now() + CONVERGENCE_TIMEOUT;
    let mut stable_since: Option<Instant> = None;
    loop {
        let found = found().await;
        if found == *expected {
            if stable_since.get_or_insert_with(Instant::now).elapsed() >= stable_for {
                return;
            }
        } else {
            stable_since = None;
            let lines = |one: &FieldDifferences, other: &FieldDifferences| {
                let lines = one.difference(other).map(|difference| format!("{difference:?}"));
                lines.collect::<Vec<_>>().join("\n")
            };
            assert!(
                Instant::now() < deadline,
                "{step}: differences from the recording that are not listed:\n{}\nlisted differences that do not occur:\n{}",
                lines(&found, expected),
                lines(expected, &found)
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Applies a step of the recording to the objects of Linkerd.
fn apply_recorded_step(objects: &mut Objects, step: RecordedStep) {
    for deleted in &step.deleted {
        assert!(objects.remove(&object_key(deleted)).is_some(), "{deleted}");
    }
    for mut written in step.written {
        let key = object_key(&written);
        for field in ["kind", "namespace", "name"] {
            written.as_object_mut().unwrap().remove(field);
        }
        objects.insert(key, flatten(&written));
    }
}

fn object_key(object: &Value) -> String {
    let text = |field: &str| object[field].as_str().unwrap();
    format!("{} {}/{}", text("kind"), text("namespace"), text("name"))
}

fn found_differences(theirs: &Objects, ours: &Objects) -> FieldDifferences {
    let mut found = FieldDifferences::new();
    let names: BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
    for name in names {
        let mut add = |field: &str, here: &str| found.insert((name.clone(), field.to_owned(), here.to_owned()));
        match (theirs.get(name), ours.get(name)) {
            (Some(theirs), Some(ours)) => {
                let fields: BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
                for field in fields
                    .into_iter()
                    .filter(|field| theirs.get(*field) != ours.get(*field))
                {
                    add(field, ours.get(field).map_or("absent", String::as_str));
                }
            }
            (_, ours) => {
                add("", if ours.is_some() { "exists" } else { "absent" });
            }
        }
    }
    found
}

/// The objects of the cluster west in the form of the recording.
async fn objects(west: &ApiServer, east: &ApiServer) -> Objects {
    let mut endpoints = list::<Endpoints>(east).await;
    endpoints.extend(list::<EndpointSlice>(east).await);
    let versions = Versions {
        services: list::<Service>(east).await.iter().filter_map(version).collect(),
        endpoints: endpoints.iter().filter_map(version).collect(),
    };
    let services = list::<Service>(west).await;
    let name_of = |object: &Value| ["namespace", "name"].map(|field| object["metadata"][field].to_string());
    let names: BTreeSet<_> = services.iter().map(name_of).collect();
    let mut cluster_ips = BTreeMap::new();
    for service in &services {
        let ip = service["spec"]["clusterIP"].as_str().unwrap_or_default();
        let name = service["metadata"]["name"].as_str().unwrap();
        cluster_ips.insert(ip.to_owned(), name.to_owned());
    }
    let mut objects = Objects::new();
    for endpoints in list::<Endpoints>(west).await {
        // Kubernetes deletes Endpoints with their Service.
        if names.contains(&name_of(&endpoints)) {
            let mut subsets = endpoints["subsets"].as_array().cloned().unwrap_or_default();
            name_cluster_ips(&mut subsets, &cluster_ips);
            let (key, mut fields) = versions.metadata("Endpoints", &endpoints);
            fields["subsets"] = subsets.into();
            objects.insert(key, flatten(&fields));
        }
    }
    for mut service in services {
        let (key, mut fields) = versions.metadata("Service", &service);
        let spec = service["spec"].as_object_mut().unwrap();
        spec.retain(|field, value| match field.as_str() {
            "clusterIP" => *value == "None",
            field => !["clusterIPs", "ipFamilies", "ipFamilyPolicy"].contains(&field),
        });
        fields["spec"] = service["spec"].take();
        objects.insert(key, flatten(&fields));
    }
    objects.extend(link_statuses(west).await);
    objects
}

/// Resource versions of the objects of the cluster east.
struct Versions {
    services: Vec<String>,
    /// Those of EndpointSlices, too.
    endpoints: Vec<String>,
}

impl Versions {
    /// The name, labels and annotations of an object. In the annotation of the remote resource version, the kind of the remote
    /// object that has this version (or "older") replaces the version.
    fn metadata(&self, kind: &str, object: &Value) -> (String, Value) {
        let metadata = &object["metadata"];
        let mut fields = json!({});
        for field in ["labels", "annotations"] {
            if metadata[field].is_object() {
                fields[field] = metadata[field].clone();
            }
        }
        if let Some(version) = fields.pointer_mut("/annotations/mirror.linkerd.io~1remote-resource-version") {
            let is_in = |versions: &[String]| versions.iter().any(|known| *version == **known);
            *version = match (is_in(&self.services), is_in(&self.endpoints)) {
                (true, _) => "of the Service".into(),
                (false, true) => "of the Endpoints".into(),
                (false, false) => "older".into(),
            };
        }
        let text = |field: &str| metadata[field].as_str().unwrap();
        (format!("{kind} {}/{}", text("namespace"), text("name")), fields)
    }
}

fn version(object: &Value) -> Option<String> {
    object["metadata"]["resourceVersion"].as_str().map(str::to_owned)
}

/// Replaces the cluster IPs of Services by the names of the Services.
fn name_cluster_ips(subsets: &mut [Value], names: &BTreeMap<String, String>) {
    for subset in subsets {
        for addresses in ["addresses", "notReadyAddresses"] {
            for address in subset[addresses].as_array_mut().into_iter().flatten() {
                match names.get(address["ip"].as_str().unwrap()) {
                    Some(name) => address["ip"] = format!("cluster IP of {name}").into(),
                    // Mirrors of pods have host names, and the addresses of Services.
                    None if address["hostname"].is_string() => {
                        address["ip"] = "cluster IP of a deleted Service".into();
                    }
                    None => {}
                }
            }
        }
        subset.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    }
}

/// The entries of the statuses of Links.
async fn link_statuses(west: &ApiServer) -> Objects {
    let mut entries = Objects::new();
    for link in links(west, "v1alpha3").list(&ListParams::default()).await.unwrap() {
        let name = link.metadata.name.unwrap();
        for field in ["mirrorServices", "federatedServices"] {
            for mut entry in link.data["status"][field].as_array().cloned().unwrap_or_default() {
                for condition in entry["conditions"].as_array_mut().unwrap() {
                    condition.as_object_mut().unwrap().remove("lastTransitionTime");
                }
                let remote = &entry["remoteRef"];
                let text = |field: &str| remote[field].as_str().unwrap();
                let key = format!("Link {name} {field} {}/{}", text("namespace"), text("name"));
                entries.insert(key, flatten(&entry));
            }
        }
    }
    entries
}

/// All objects of a kind, except those in the namespace default, where Kubernetes has its own.
async fn list<K>(server: &ApiServer) -> Vec<Value>
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::Serialize + DeserializeOwned,
{
    let all = Api::<K>::all(server.client())
        .list(&ListParams::default())
        .await
        .unwrap();
    let values = all.items.iter().map(|object| serde_json::to_value(object).unwrap());
    values
        .filter(|object| object["metadata"]["namespace"] != "default")
        .collect()
}

/// The fields of an object: paths and values as JSON.
fn flatten(value: &Value) -> BTreeMap<String, String> {
    fn add(path: &str, value: &Value, fields: &mut BTreeMap<String, String>) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                let dot = if path.is_empty() { "" } else { "." };
                for (name, value) in map {
                    add(&format!("{path}{dot}{name}"), value, fields);
                }
            }
            Value::Array(items) if !items.is_empty() => {
                for (n, value) in items.iter().enumerate() {
                    add(&format!("{path}[{n}]"), value, fields);
                }
            }
            value => {
                fields.insert(path.to_owned(), value.to_string());
            }
        }
    }
    let mut fields = BTreeMap::new();
    add("", value, &mut fields);
    fields
}

/// Reads a file of the recordings.
fn read<T: DeserializeOwned>(file: &str) -> T {
    let path = format!("{}/../proto/recorded/multicluster/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(path).unwrap();
    let mut value: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
    value.apply_merge().unwrap();
    serde_yaml_ng::from_value(value).unwrap()
}

/// Steps after which the objects must be as expected in a shorter time.
const TIME_LIMITS: [(&str, Duration); 2] = [
    ("the Link changes", Duration::from_secs(2)),
    ("the member of the oldest Link leaves", Duration::from_secs(2)),
];
/// Maximum time until the objects are as expected after a step.
const CONVERGENCE_TIMEOUT: Duration = Duration::from_secs(40);
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The time for which the objects have to stay as expected with Linkerd's service mirrors. Some steps change nothing, so the
/// objects are as expected before Linkerd has looked at them.
const STABLE_TIME: Duration = Duration::from_secs(5);
