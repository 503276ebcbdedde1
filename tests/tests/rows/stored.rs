//! Objects on an API server, made of manifests that say only what a row is about.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use serde::Deserialize as _;
use serde_json::{Value, json};
use serde_yaml_ng::Deserializer;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tulle_control::resources::event::Writer;
use tulle_control::resources::{Kind, Scope};
use tulle_control::source::kubernetes::kinds::{Drives, Needs};
use tulle_control::source::kubernetes::{self, Config};
use tulle_control::writeback;
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::names::{label, port};
use tulle_core::ready::Readiness;
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;

/// The objects of one row.
pub(crate) struct Stored {
    client: Client,
    yaml: String,
    objects: Vec<(Api<DynamicObject>, String)>,
    /// Those that pods may use, with their namespaces.
    accounts: BTreeSet<(String, String)>,
    namespaces: BTreeSet<String>,
}

impl Stored {
    pub(crate) fn new(client: Client) -> Self {
        Self {
            client,
            yaml: String::new(),
            objects: Vec::new(),
            accounts: BTreeSet::new(),
            namespaces: BTreeSet::new(),
        }
    }

    /// Removes the objects of the row before, and creates those of this one. Routes get their status.
    pub(crate) async fn replace(&mut self, server: &ApiServer, yaml: &str) -> anyhow::Result<()> {
        if self.yaml == yaml {
            return Ok(());
        }
        self.clear().await?;
        let documents = Deserializer::from_str(yaml).map(Value::deserialize);
        let documents: Vec<Value> = documents.collect::<Result<_, _>>()?;
        let documents: Vec<Value> = documents.into_iter().filter(|document| !document.is_null()).collect();
        for document in &documents {
            self.make_room(server, document).await?;
        }
        // An API server writes the time of creation itself, in whole seconds.
        let mut by_age: BTreeMap<String, Vec<Value>> = BTreeMap::new();
        for mut document in documents {
            let metadata = document["metadata"].as_object_mut().context("metadata")?;
            let created = metadata.remove("creationTimestamp");
            let created = created.and_then(|time| time.as_str().map(str::to_owned));
            by_age
                .entry(created.unwrap_or_else(|| "later".to_owned()))
                .or_default()
                .push(document);
        }
        let mut uids = BTreeMap::new();
        for group in by_age.values() {
            loop {
                let (n_before, second) = (self.objects.len(), Timestamp::now().as_second());
                for document in group {
                    self.create(document, &mut uids).await?;
                }
                let is_one_age = Timestamp::now().as_second() == second;
                if !is_one_age {
                    for (api, name) in self.objects.split_off(n_before) {
                        delete(&api, &name).await?;
                    }
                }
                while Timestamp::now().as_second() == second && by_age.len() > 1 {
                    sleep(Duration::from_millis(10)).await;
                }
                if is_one_age {
                    break;
                }
            }
        }
        self.judge().await?;
        yaml.clone_into(&mut self.yaml);
        Ok(())
    }

    async fn clear(&mut self) -> anyhow::Result<()> {
        self.yaml.clear();
        for (api, name) in std::mem::take(&mut self.objects) {
            delete(&api, &name).await?;
        }
        Ok(())
    }

    /// Makes the namespace and the service account that an object needs.
    async fn make_room(&mut self, server: &ApiServer, document: &Value) -> anyhow::Result<()> {
        let Some(namespace) = document["metadata"]["namespace"].as_str() else {
            return Ok(());
        };
        let exists = ["default", "kube-system", "linkerd"].contains(&namespace);
        if self.namespaces.insert(namespace.to_owned()) && !exists {
            server.create_namespace(namespace).await?;
        }
        let account = document["spec"]["serviceAccountName"].as_str().unwrap_or("default");
        if document["kind"] == "Pod" && self.accounts.insert((namespace.to_owned(), account.to_owned())) {
            server.token(namespace, account, &[]).await?;
        }
        Ok(())
    }

    async fn create(&mut self, document: &Value, uids: &mut BTreeMap<String, String>) -> anyhow::Result<()> {
        let mut object = document.clone();
        let api = self.api(&object)?;
        let name = object["metadata"]["name"].as_str().context("a name")?.to_owned();
        complete(&mut object);
        let metadata = object["metadata"].as_object_mut().context("metadata")?;
        let uid = metadata.remove("uid");
        let is_deleted = metadata.remove("deletionTimestamp").is_some();
        if is_deleted {
            // Somebody still holds it.
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
        self.objects.push((api.clone(), name.clone()));
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

    fn api(&self, object: &Value) -> anyhow::Result<Api<DynamicObject>> {
        let of = |key: &str| object[key].as_str().unwrap_or_default();
        let kind = Kind::find(of("apiVersion"), of("kind")).with_context(|| format!("a kind of {object}"))?;
        let api_version = of("apiVersion");
        let (group, version) = api_version.rsplit_once('/').unwrap_or(("", api_version));
        let of_kind = GroupVersionKind::gvk(group, version, of("kind"));
        let resource = ApiResource::from_gvk_with_plural(&of_kind, &kind.info().plural());
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default");
        Ok(match kind.info().scope {
            Scope::Cluster => Api::all_with(self.client.clone(), &resource),
            Scope::Namespaced => Api::namespaced_with(self.client.clone(), namespace, &resource),
        })
    }

    /// Runs the controller that writes statuses until every route has one.
    async fn judge(&self) -> anyhow::Result<()> {
        let mut unjudged = Vec::new();
        for (api, name) in &self.objects {
            if n_parents(&serde_json::to_value(api.get(name).await?)?) > 0 {
                unjudged.push((api, name));
            }
        }
        if unjudged.is_empty() {
            return Ok(());
        }
        let registry = Registry::new();
        let (signal, drain) = drain::channel();
        let config = writeback::Config {
            controller_namespace: "linkerd".to_owned(),
            holder: "rows".to_owned(),
            deployment: "linkerd-destination".to_owned(),
            slices: None,
            statuses: Some(writeback::Statuses {
                cluster_networks: tulle_control::cluster::Config::default().cluster_networks,
                global_egress_namespace: tulle_control::cluster::Config::default().global_egress_namespace,
                patch_timeout: Duration::from_secs(5),
            }),
        };
        let (writer, controllers) = writeback::attach(&self.client, config, Writer::new(|_| {}), &registry, &drain);
        let mut tasks = JoinSet::new();
        for controller in controllers {
            tasks.spawn(controller.run);
        }
        let source = Config {
            needs: Needs {
                destination: false,
                policy: true,
                drives: Drives::Slices,
            },
            addr: ":8086".to_owned(),
            kinds: Readiness::new(),
        };
        let watching = kubernetes::run(self.client.clone(), source, writer, registry.clone(), drain);
        tasks.spawn(async move { watching.await.expect("the watches last as long as the controller") });
        for (api, name) in unjudged {
            let judged = async || {
                let route = serde_json::to_value(api.get(name).await.ok()?).ok()?;
                let n_judged = route["status"]["parents"].as_array().map_or(0, Vec::len);
                (n_judged >= n_parents(&route)).then_some(())
            };
            eventually(&format!("a status of {name}"), judged).await;
        }
        signal.drain().await;
        let ended = tasks.join_all().await;
        ensure!(!ended.is_empty(), "a controller has run");
        Ok(())
    }
}

/// How many parents of a route are ours to judge.
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

/// Adds what the API server demands, and what rows leave out as nobody here looks at it.
fn complete(object: &mut Value) {
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
    // What the injector adds, and the pods of rows have without saying so.
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

async fn delete(api: &Api<DynamicObject>, name: &str) -> anyhow::Result<()> {
    // In the background, because jobs would otherwise wait for a collector of garbage, which there is none of.
    let now = DeleteParams::background().grace_period(0);
    // An API server deletes the Endpoints of a Service together with it.
    let Some(object) = api.get_opt(name).await? else {
        return Ok(());
    };
    // What was deleted before waits for its finalizer only.
    if object.metadata.finalizers.is_some() {
        let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        api.patch(name, &PatchParams::default(), &free).await?;
    } else {
        api.delete(name, &now).await?;
    }
    Ok(())
}

const FINALIZER: &str = "tulle.dev/kept";
