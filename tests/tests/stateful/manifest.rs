//! The Kubernetes objects of servers and of their clients.

use std::path::PathBuf;

use serde_json::{Value, json};
use tulle_tests::images::Image;

use super::server::{InboundMode, Readiness, Server};

/// The namespace of servers and meshed clients.
pub(super) const NAMESPACE: &str = "stateful";
/// The namespace of pods without a sidecar.
pub(super) const OUTSIDE: &str = "outside";

/// Waits until no process of an earlier pod uses the files: a pod that is deleted by force can outlive its successor's start, and a
/// volume of a real cluster is attached to one of them only. The server inherits the lock.
const WAIT_FOR_STORAGE: &str = "exec 9> /data/lock; flock 9";

/// Both namespaces, with a client for each image.
pub(super) fn clients(images: &[Image]) -> Value {
    let namespaces = [
        json!({"name": NAMESPACE, "annotations": {
            "linkerd.io/inject": "enabled",
            "config.linkerd.io/default-inbound-policy": "all-authenticated",
        }}),
        json!({"name": OUTSIDE}),
    ];
    let namespaces = namespaces.map(|metadata| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}));
    let deployments = images
        .iter()
        .flat_map(|image| [NAMESPACE, OUTSIDE].map(|namespace| client(*image, namespace)));
    list(namespaces.into_iter().chain(deployments).collect())
}

/// The name of the Deployment of clients with an image.
pub(super) fn client_name(image: Image) -> &'static str {
    if image == Image::Databases {
        "database-client"
    } else {
        "broker-client"
    }
}

fn client(image: Image, namespace: &str) -> Value {
    let name = client_name(image);
    let pod = json!({
        "terminationGracePeriodSeconds": 0,
        "nodeSelector": {"kubernetes.io/hostname": "node1"}, // a test drains another node
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "containers": [{
            "name": "client",
            "image": image.reference(),
            "imagePullPolicy": "Never",
            "command": ["sleep", "infinity"],
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }],
    });
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    })
}

/// A server as its usual chart describes it.
pub(super) struct Deployed<'a> {
    pub(super) server: &'a Server,
    pub(super) namespace: &'static str,
    /// Also the name of its Service. That of its headless Service has the suffix `-pods`.
    pub(super) name: String,
    pub(super) port: u16,
    /// A directory with one for each pod, whose files outlive the pods. `None`: pods start without files.
    pub(super) storage: Option<PathBuf>,
}

impl<'a> Deployed<'a> {
    /// A server on its usual port.
    pub(super) fn new(server: &'a Server, namespace: &'static str) -> Self {
        Self {
            server,
            namespace,
            name: server.name.to_owned(),
            port: server.port,
            storage: None,
        }
    }

    /// The names of its pods.
    pub(super) fn pods(&self) -> impl Iterator<Item = String> {
        (0..self.server.members).map(|number| format!("{}-{number}", self.name))
    }

    pub(super) fn manifest(&self) -> Value {
        let (name, ports) = (&self.name, json!([{"name": "server", "port": self.port}]));
        let service = |name: String, spec: Value| {
            json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": spec,
            })
        };
        let headless = json!({
            "selector": {"app": name},
            "ports": ports,
            "clusterIP": "None",
            "publishNotReadyAddresses": true,
        });
        list(vec![
            service(name.clone(), json!({"selector": {"app": name}, "ports": ports})),
            service(format!("{name}-pods"), headless),
            self.stateful_set(),
            self.disruption_budget(),
        ])
    }

    fn stateful_set(&self) -> Value {
        let (name, user) = (&self.name, self.server.user);
        let names = ["data", "run", "tmp"];
        let mut volumes = names.map(|volume| json!({"name": volume, "emptyDir": {}}));
        let mut mounts = names.map(|volume| json!({"name": volume, "mountPath": format!("/{volume}")}));
        if let Some(storage) = &self.storage {
            volumes[0] = json!({"name": "data", "hostPath": {"path": storage}});
            mounts[0]["subPathExpr"] = json!("$(POD_NAME)");
        }
        let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
        let container = json!({
            "name": "server",
            "image": self.server.image.reference(),
            "imagePullPolicy": "Never",
            "command": ["bash", "-euo", "pipefail", "-c", format!("{WAIT_FOR_STORAGE}\n{}", self.server.start)],
            "env": [
                {"name": "PORT", "value": self.port.to_string()},
                field("POD_NAME", "metadata.name"),
                field("POD_NAMESPACE", "metadata.namespace"),
                field("POD_IP", "status.podIP"),
            ],
            "securityContext": {"runAsUser": user, "runAsGroup": user},
            "readinessProbe": self.readiness(),
            "volumeMounts": mounts,
        });
        let spread = json!({
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app": name}},
        });
        let annotations = match self.server.inbound_mode {
            InboundMode::Redirect => json!({}),
            InboundMode::Tproxy => json!({"config.tulle.dev/inbound-mode": "tproxy"}),
        };
        json!({
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "serviceName": format!("{name}-pods"),
                "replicas": self.server.members,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": {"app": name}},
                "template": {
                    "metadata": {"labels": {"app": name}, "annotations": annotations},
                    "spec": {
                        "terminationGracePeriodSeconds": if self.storage.is_some() { 30 } else { 5 },
                        "topologySpreadConstraints": [spread],
                        "volumes": volumes,
                        "containers": [container],
                    },
                },
            },
        })
    }

    /// Lets a drain evict one member at a time.
    fn disruption_budget(&self) -> Value {
        json!({
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": self.name}}},
        })
    }

    /// `null` without a probe.
    fn readiness(&self) -> Value {
        let mut probe = match self.server.readiness {
            Readiness::Tcp => json!({"tcpSocket": {"port": self.port}}),
            Readiness::Http(path, port) => json!({"httpGet": {"path": path, "port": port.unwrap_or(self.port)}}),
            Readiness::Script(run) => json!({"exec": {"command": ["bash", "-c", run]}}),
            Readiness::None => return Value::Null,
        };
        probe["periodSeconds"] = json!(2);
        probe["timeoutSeconds"] = json!(5);
        probe
    }
}

fn list(items: Vec<Value>) -> Value {
    json!({"apiVersion": "v1", "kind": "List", "items": items})
}
