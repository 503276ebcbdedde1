//! Tests of injection. Each table has one row per rule, which is checked on the patched pod.

mod annotations;
mod decisions;
mod golden;
mod patched_pods;
mod probes;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, Service};
use serde_json::Value;

use super::*;

/// The input of a test.
pub(super) struct Case {
    pub(super) config: Config,
    pub(super) manifest: Value,
    pub(super) namespace: Annotations,
    pub(super) owner: Option<PodOwner>,
}

impl Case {
    /// A pod as the API server sends it to the webhook, merged with `yaml`.
    pub(super) fn pod(yaml: &str) -> Self {
        let mut manifest = parse(POD);
        json_patch::merge(&mut manifest, &parse(yaml));
        Self {
            config: config(""),
            manifest,
            namespace: BTreeMap::new(),
            owner: None,
        }
    }

    pub(super) fn values(mut self, yaml: &str) -> Self {
        self.config = config(yaml);
        self
    }

    pub(super) fn annotate(mut self, annotations: &[(&str, &str)]) -> Self {
        for (key, value) in annotations {
            self.manifest["metadata"]["annotations"][*key] = (*value).into();
        }
        self
    }

    pub(super) fn namespace(mut self, annotations: &[(&str, &str)]) -> Self {
        let owned = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        self.namespace.extend(owned);
        self
    }

    pub(super) fn owner(mut self, kind: &str, name: &str) -> Self {
        self.owner = Some(PodOwner {
            kind: kind.to_owned(),
            name: name.to_owned(),
        });
        self
    }

    pub(super) fn outcome(&self) -> InjectionOutcome {
        let pod: Pod = serde_json::from_value(self.manifest.clone()).unwrap();
        let target = InjectionTarget {
            pointer: &[],
            metadata: Some(&pod.metadata),
            spec: pod.spec.as_ref().unwrap(),
            namespace: "shop",
            namespace_annotations: &self.namespace,
            owner: self.owner.clone(),
        };
        inject_pod(&self.config, &target)
    }

    /// The pod after injection. Panics if the pod is skipped or there are warnings.
    pub(super) fn injected(&self) -> Injected {
        let outcome = self.outcome();
        assert!(matches!(outcome.decision, Decision::Inject(_)), "{outcome:?}");
        assert_eq!(outcome.warnings, Vec::<String>::new());
        self.patched(&outcome)
    }

    pub(super) fn patched(&self, outcome: &InjectionOutcome) -> Injected {
        let mut pod = self.manifest.clone();
        json_patch::patch(&mut pod, &outcome.patch).unwrap();
        Injected(pod)
    }
}

/// A pod after injection.
#[derive(Debug)]
pub(super) struct Injected(pub(super) Value);

impl Injected {
    /// The container of this name, from both lists.
    pub(super) fn container(&self, name: &str) -> &Value {
        let all = ["containers", "initContainers"]
            .into_iter()
            .filter_map(|list| self.0["spec"][list].as_array());
        let found = all.flatten().find(|container| container["name"] == name);
        found.unwrap_or(&Value::Null)
    }

    /// The names of a list of containers or volumes, in order.
    pub(super) fn names(&self, list: &str) -> Vec<&str> {
        let all = self.0["spec"][list].as_array().into_iter().flatten();
        all.map(|item| item["name"].as_str().unwrap()).collect()
    }

    /// A variable of the proxy container; the prefix `LINKERD2_PROXY_` is optional.
    pub(super) fn env(&self, name: &str) -> Option<&str> {
        let all = self.container(PROXY_CONTAINER)["env"].as_array().unwrap();
        let full = format!("LINKERD2_PROXY_{name}");
        let found = all.iter().find(|var| var["name"] == name || var["name"] == *full)?;
        found["value"].as_str()
    }

    /// The value of a flag of the init container.
    pub(super) fn init_flag(&self, flag: &str) -> Option<&str> {
        let args = self.container(INIT_CONTAINER)["args"].as_array().unwrap();
        let at = args.iter().position(|arg| arg == flag)?;
        args.get(at + 1)?.as_str()
    }

    pub(super) fn annotation(&self, key: &str) -> Option<&str> {
        self.0["metadata"]["annotations"][key].as_str()
    }

    pub(super) fn label(&self, key: &str) -> Option<&str> {
        self.0["metadata"]["labels"][key].as_str()
    }
}

pub(super) fn config(yaml: &str) -> Config {
    let mut values = Values::from_yaml(yaml).unwrap();
    if values.linkerd_version.is_empty() {
        values.linkerd_version = "edge-1".to_owned();
    }
    values.identity_trust_anchors_pem = "anchors".to_owned();
    Config {
        values,
        control_plane_namespace: "linkerd".to_owned(),
        origin: InjectionOrigin::Webhook,
    }
}

pub(super) fn parse(yaml: &str) -> Value {
    match yaml {
        "" => Value::Object(serde_json::Map::new()),
        yaml => serde_yaml_ng::from_str(yaml).unwrap(),
    }
}

pub(super) fn service_patch(yaml: &str, namespace: &[(&str, &str)], values: &str) -> Patch {
    let service: Service = serde_yaml_ng::from_str(yaml).unwrap();
    let namespace = namespace
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    let ports = service.spec.and_then(|spec| spec.ports).unwrap_or_default();
    annotate_service(&config(values), Some(&service.metadata), &ports, &namespace.collect())
}

/// A pod with injection enabled and two ports; 3306 is opaque by default.
const POD: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: web
  namespace: shop
  annotations: {linkerd.io/inject: enabled}
spec:
  serviceAccountName: web
  containers:
  - name: app
    image: example.test/app:1
    ports: [{containerPort: 8080, name: http}, {containerPort: 3306, name: db}]
    volumeMounts:
    - {name: kube-api-access, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
  volumes:
  - {name: kube-api-access, emptyDir: {}}
";
