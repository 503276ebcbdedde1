//! Objects on an API server, created from manifests that contain only the fields that a row needs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use serde::Deserialize as _;
use serde_json::{Value, json};
use serde_yaml_ng::Deserializer;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tulle_control::resources::event::EventSink;
use tulle_control::resources::service::EndpointsSource;
use tulle_control::resources::{Kind, Scope};
use tulle_control::source::kubernetes::kinds::WatchRequirements;
use tulle_control::source::kubernetes::{self, Config};
use tulle_control::writeback;
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::names::{label, port};
use tulle_core::readiness::Readiness;
use tulle_tests::cluster::{create_account, create_namespace};
use tulle_tests::eventually::{eventually, within};

/// The objects of the current row, on the server that all rows share.
pub(crate) static TEST_OBJECTS: Mutex<TestObjects> = Mutex::const_new(TestObjects {
    yaml: String::new(),
    objects: Vec::new(),
    accounts: BTreeSet::new(),
    namespaces: BTreeSet::new(),
});

pub(crate) struct TestObjects {
    yaml: String,
    objects: Vec<ObjectReference>,
    /// The service accounts of pods, with their namespaces.
    accounts: BTreeSet<(String, String)>,
    namespaces: BTreeSet<String>,
}

struct ObjectReference {
    resource: ApiResource,
    /// `None` for cluster-scoped kinds.
    namespace: Option<String>,
    name: String,
}

impl ObjectReference {
    fn api(&self, client: &Client) -> Api<DynamicObject> {
        match &self.namespace {
            None => Api::all_with(client.clone(), &self.resource),
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &self.resource),
        }
    }

    fn from_manifest(object: &Value) -> anyhow::Result<Self> {
        let field = |key: &str| object[key].as_str().unwrap_or_default();
        let api_version = field("apiVersion");
        let kind = Kind::find(api_version, field("kind")).with_context(|| format!("a kind of {object}"))?;
        let (group, version) = api_version.rsplit_once('/').unwrap_or(("", api_version));
        let gvk = GroupVersionKind::gvk(group, version, field("kind"));
        let metadata = &object["metadata"];
        let namespace = metadata["namespace"].as_str().unwrap_or("default");
        Ok(Self {
            resource: ApiResource::from_gvk_with_plural(&gvk, &kind.info().plural()),
            namespace: (kind.info().scope == Scope::Namespaced).then(|| namespace.to_owned()),
            name: metadata["name"].as_str().context("a name")?.to_owned(),
        })
    }
}

impl TestObjects {
    /// Removes the objects of the previous row, creates those of this row, and waits for the statuses of routes.
    pub(crate) async fn replace(&mut self, client: Client, yaml: &str) -> anyhow::Result<()> {
        if self.yaml == yaml {
            return Ok(());
        }
        self.yaml.clear();
        delete_all(&client, std::mem::take(&mut self.objects)).await?;
        let documents = Deserializer::from_str(yaml).map(Value::deserialize);
        let documents: Vec<Value> = documents.collect::<Result<_, _>>()?;
        let documents: Vec<Value> = documents.into_iter().filter(|document| !document.is_null()).collect();
        for document in &documents {
            self.create_prerequisites(&client, document).await?;
        }
        // The API server sets creation times itself, in whole seconds. Of objects of the same age, the first by name takes
        // precedence. Their creation may take longer than a second, so they are created in the order of their names. Between groups
        // of different ages, this waits for the next second.
        let mut groups: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        for mut document in documents {
            let metadata = document["metadata"].as_object_mut().context("metadata")?;
            let created = metadata.remove("creationTimestamp");
            let created = created.and_then(|time| time.as_str().map(str::to_owned));
            groups
                .entry(created.unwrap_or_else(|| "later".to_owned())) // sorts after every timestamp
                .or_default()
                .push(document);
        }
        let mut uids = BTreeMap::new();
        let last = groups.len().saturating_sub(1);
        for (index, mut group) in groups.into_values().enumerate() {
            // Owners come first, because an owned object contains the UID of its owner.
            group.sort_by_cached_key(|object| {
                let metadata = &object["metadata"];
                let field = |name: &str| metadata[name].as_str().map(str::to_owned);
                (
                    metadata["ownerReferences"].is_array(),
                    field("namespace"),
                    field("name"),
                )
            });
            for document in &group {
                self.create(&client, document, &mut uids).await?;
            }
            let second = Timestamp::now().as_second();
            while index < last && Timestamp::now().as_second() == second {
                sleep(Duration::from_millis(10)).await;
            }
        }
        self.write_route_statuses(&client).await?;
        yaml.clone_into(&mut self.yaml);
        Ok(())
    }

    /// Creates the namespace and the service account that an object needs.
    async fn create_prerequisites(&mut self, client: &Client, document: &Value) -> anyhow::Result<()> {
        let Some(namespace) = document["metadata"]["namespace"].as_str() else {
            return Ok(());
        };
        let exists = ["default", "kube-system", "linkerd"].contains(&namespace);
        if self.namespaces.insert(namespace.to_owned()) && !exists {
            create_namespace(client, namespace).await?;
        }
        let account = document["spec"]["serviceAccountName"].as_str().unwrap_or("default");
        if document["kind"] == "Pod" && self.accounts.insert((namespace.to_owned(), account.to_owned())) {
            create_account(client, namespace, account).await?;
        }
        Ok(())
    }

    async fn create(
        &mut self,
        client: &Client,
        document: &Value,
        uids: &mut BTreeMap<String, String>,
    ) -> anyhow::Result<()> {
        let mut object = document.clone();
        let reference = ObjectReference::from_manifest(&object)?;
        let (api, name) = (reference.api(client), reference.name.clone());
        fill_required_fields(&mut object);
        let metadata = object["metadata"].as_object_mut().context("metadata")?;
        let uid = metadata.remove("uid");
        let is_deleted = metadata.remove("deletionTimestamp").is_some();
        if is_deleted {
            // A finalizer keeps the deleted object.
            metadata.insert("finalizers".to_owned(), json!([FINALIZER]));
        }
        for owner in metadata
            .get_mut("ownerReferences")
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            if let Some(uid) = owner["uid"].as_str().and_then(|uid| uids.get(uid)) {
                owner["uid"] = json!(uid);
            }
        }
        let status = object.as_object_mut().and_then(|object| object.remove("status"));
        let created = api
            .create(&PostParams::default(), &serde_json::from_value(object)?)
            .await;
        let created = created.with_context(|| document.to_string())?;
        self.objects.push(reference);
        if let (Some(uid), Some(real)) = (uid.as_ref().and_then(Value::as_str), created.metadata.uid) {
            uids.insert(uid.to_owned(), real);
        }
        if let Some(status) = status {
            let patch = Patch::Merge(json!({"status": status}));
            let patched = api.patch_status(&name, &PatchParams::default(), &patch).await;
            patched.with_context(|| document.to_string())?;
        }
        if is_deleted {
            api.delete(&name, &DeleteParams::default().grace_period(0)).await?;
        }
        Ok(())
    }

    /// Runs the status controller until every route has a status.
    async fn write_route_statuses(&self, client: &Client) -> anyhow::Result<()> {
        let mut without_status = Vec::new();
        for object in &self.objects {
            let (api, name) = (object.api(client), &object.name);
            if n_parents(&serde_json::to_value(api.get(name).await?)?) > 0 {
                without_status.push((api, name));
            }
        }
        if without_status.is_empty() {
            return Ok(());
        }
        let registry = Registry::new();
        let (signal, drain) = drain::channel();
        let config = writeback::config::Config {
            controller_namespace: "linkerd".to_owned(),
            lease_holder: "rows".to_owned(),
            lease_owner_deployment: "linkerd-destination".to_owned(),
            write_slices: false,
            statuses: Some(writeback::config::StatusesConfig {
                cluster_domain: tulle_control::cluster::Config::default().cluster_domain,
                cluster_networks: tulle_control::cluster::Config::default().cluster_networks,
                global_egress_namespace: tulle_control::cluster::Config::default().global_egress_namespace,
                default_opaque_ports: tulle_control::cluster::Config::default().default_opaque_ports,
                patch_timeout: Duration::from_secs(5),
            }),
        };
        let (sink, controllers) = writeback::add_controllers(client, config, EventSink::new(|_| {}), &registry, &drain);
        let mut tasks = JoinSet::new();
        for controller in controllers {
            tasks.spawn(controller.run);
        }
        let source = Config {
            requirements: WatchRequirements {
                destination: false,
                policy: true,
                endpoints_source: EndpointsSource::EndpointSlices,
            },
            log_addr: ":8086".to_owned(),
            stale_kinds: Readiness::new(),
        };
        let watching = kubernetes::run(client.clone(), source, sink, registry.clone(), drain);
        tasks.spawn(async move { watching.await.expect("the watches last as long as the controller") });
        for (api, name) in without_status {
            let has_status = async || {
                let route = serde_json::to_value(api.get(name).await.ok()?).ok()?;
                let n_statuses = route["status"]["parents"].as_array().map_or(0, Vec::len);
                (n_statuses >= n_parents(&route)).then_some(())
            };
            eventually(&format!("a status of {name}"), has_status).await;
        }
        let ended = async {
            signal.drain().await;
            tasks.join_all().await
        };
        let ended = within("the controller has ended", ended).await;
        ensure!(!ended.is_empty(), "no controller has run");
        Ok(())
    }
}

/// The number of parents of a route that our controller handles.
fn n_parents(route: &Value) -> usize {
    let ours = |parent: &&Value| {
        let group = parent["group"].as_str().unwrap_or("gateway.networking.k8s.io");
        matches!(
            (group, parent["kind"].as_str().unwrap_or_default()),
            ("" | "core", "Service") | ("policy.linkerd.io", "Server" | "EgressNetwork")
        )
    };
    let parents = route["spec"]["parentRefs"].as_array().into_iter().flatten();
    parents.filter(ours).count()
}

/// Adds fields that the API server requires and that rows leave out because they do not matter here.
fn fill_required_fields(object: &mut Value) {
    match object["kind"].as_str() {
        Some("Pod") => complete_pod(object),
        Some("ReplicaSet" | "Job") if object["spec"].is_null() => {
            let labels = json!({"app": "app"});
            let spec = json!({"containers": [{"name": "app", "image": "image"}]});
            object["spec"] = json!({"template": {"metadata": {"labels": labels}, "spec": spec}});
            if object["kind"] == "Job" {
                object["spec"]["template"]["spec"]["restartPolicy"] = json!("Never");
            } else {
                object["spec"]["selector"] = json!({"matchLabels": labels});
            }
        }
        _ => {}
    }
}

fn complete_pod(pod: &mut Value) {
    let labels = &pod["metadata"]["labels"];
    let is_meshed = labels[label::CONTROL_PLANE_NS].is_string() && labels[label::CONTROL_PLANE_COMPONENT].is_null();
    let list = |name: &str| pod["spec"][name].as_array().cloned().unwrap_or_default();
    let (mut init, mut containers) = (list("initContainers"), list("containers"));
    if containers.is_empty() {
        containers.push(json!({"name": "app"}));
    }
    // In a cluster the injector adds these fields; rows leave them out.
    if is_meshed && !init.iter().chain(&containers).any(|one| one["name"] == "linkerd-proxy") {
        let env = [("INBOUND", port::INBOUND), ("ADMIN", port::ADMIN), ("CONTROL", port::TAP)].map(|(name, port)| {
            json!({"name": format!("LINKERD2_PROXY_{name}_LISTEN_ADDR"), "value": format!("0.0.0.0:{port}")})
        });
        init.push(json!({"name": "linkerd-proxy", "env": env, "restartPolicy": "Always"}));
    }
    for container in init.iter_mut().chain(&mut containers) {
        container["image"] = json!("image");
    }
    if pod["spec"]["hostNetwork"] == true && pod["status"]["hostIP"].is_null() {
        pod["status"]["hostIP"] = pod["status"]["podIP"].clone();
    }
    if pod["status"]["phase"].is_null() {
        pod["status"]["phase"] = json!("Running");
    }
    pod["spec"]["initContainers"] = init.into();
    pod["spec"]["containers"] = containers.into();
}

async fn delete_all(client: &Client, objects: Vec<ObjectReference>) -> anyhow::Result<()> {
    // Background deletion, because deletion of jobs would otherwise wait for the garbage collector, which does not run.
    let immediate = DeleteParams::background().grace_period(0);
    for object in objects {
        let (api, name) = (object.api(client), &object.name);
        // The object may be gone: Endpoints are deleted with their Service.
        let Some(stored) = api.get_opt(name).await? else {
            continue;
        };
        // An object that was deleted before only waits for its finalizer.
        if stored.metadata.finalizers.is_some() {
            let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
            api.patch(name, &PatchParams::default(), &free).await?;
        } else {
            api.delete(name, &immediate).await?;
        }
    }
    Ok(())
}

const FINALIZER: &str = "tulle.dev/kept";
