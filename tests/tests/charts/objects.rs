//! An API server accepts the objects of the charts.

use std::fs;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tulle_control::injection::annotations::Annotations;
use tulle_control::injection::values::Values;
use tulle_control::injection::{self, Config, Decision, InjectionOrigin, InjectionTarget};
use tulle_tests::charts::Helm;
use tulle_tests::cluster::ApiServer;

use crate::render;

#[tokio::test]
async fn an_api_server_accepts_every_object_of_every_installation() {
    let server = ApiServer::start().await.unwrap();
    server.create_namespace("linkerd").await.unwrap();
    let helm = Helm::with_kubeconfig(server.kubeconfig()).unwrap();
    let apply = async |name: &str, text: &str, dry: &[&str]| {
        let file = server.dir().join("objects.yaml");
        fs::write(&file, text).unwrap();
        let fixed = [
            "apply",
            "--server-side",
            "--validate=strict",
            "-f",
            file.to_str().unwrap(),
        ];
        let answer = server.kubectl(&[&fixed[..], dry].concat()).await;
        answer.unwrap_or_else(|err| panic!("{name}: {err:#}"))
    };
    let dry = &["--dry-run=server"][..];
    let crds = helm.template("tulle-crds", &["--set=installGatewayAPI=true"]).unwrap();
    assert_eq!(render::objects(&crds).len(), 14);
    apply("the custom resources, dry run", &crds, dry).await;
    apply("the custom resources", &crds, &[]).await;
    // Minimal definitions of the kinds of the Prometheus operator.
    for kind in ["PodMonitor", "PrometheusRule"] {
        apply(kind, &prometheus_operator_definition(kind), &[]).await;
    }
    server.wait_for_custom_resources().await.unwrap();
    for (name, values) in render::installations() {
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        let rendered = helm.template("tulle-control-plane", &values).unwrap();
        let accepted = apply(name, &rendered, dry).await;
        assert_eq!(
            accepted.lines().count(),
            render::objects(&rendered).len(),
            "{name}:\n{accepted}"
        );
    }
}

#[tokio::test]
async fn pods_of_the_control_plane_are_admitted_where_the_restricted_standard_is_enforced() {
    let server = ApiServer::start().await.unwrap();
    server.create_namespace("linkerd").await.unwrap();
    enforce_restricted_standard(&server, "linkerd").await;
    let helm = Helm::new().unwrap();
    for (name, values) in render::installations() {
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        let rendered = render::objects(&helm.template("tulle-control-plane", &values).unwrap());
        let deployments: Vec<_> = rendered
            .iter()
            .filter(|object| object["kind"] == "Deployment")
            .collect();
        assert_eq!(deployments.len(), 3, "{name}");
        for deployment in deployments {
            let mut pod = deployment["spec"]["template"].clone();
            pod["apiVersion"] = "v1".into();
            pod["kind"] = "Pod".into();
            pod["metadata"]["name"] = deployment["metadata"]["name"].clone();
            pod["metadata"]["namespace"] = "linkerd".into();
            // These fields refer to objects that do not exist here.
            for field in ["serviceAccountName", "priorityClassName", "runtimeClassName"] {
                pod["spec"].as_object_mut().unwrap().remove(field);
            }
            let created = create(&server, &pod).await;
            created.unwrap_or_else(|err| panic!("{name}: {err:#}"));
        }
    }
    // Checks that the standard is enforced at all.
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "linkerd"},
        "spec": {"containers": [{"name": "a", "image": "a"}]}});
    let refused = format!("{:#}", create(&server, &pod).await.unwrap_err());
    assert!(refused.contains("violates PodSecurity \"restricted"), "{refused}");
}

#[tokio::test]
async fn an_injected_pod_is_admitted_by_the_restricted_standard_with_a_cni_plugin_and_not_with_an_init_container() {
    let server = ApiServer::start().await.unwrap();
    server.create_namespace("shop").await.unwrap();
    enforce_restricted_standard(&server, "shop").await;
    let restricted = json!({"allowPrivilegeEscalation": false, "runAsNonRoot": true, "runAsUser": 1000,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}});
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"containers": [{"name": "web", "image": "web", "securityContext": restricted}]}});
    create(&server, &pod).await.unwrap();
    for native in [true, false] {
        for cni in [true, false] {
            let injected = inject_sidecar(&pod, cni, native);
            let created = create(&server, &injected)
                .await
                .map(drop)
                .map_err(|err| format!("{err:#}"));
            if cni {
                created.unwrap_or_else(|err| panic!("native: {native}: {err}"));
                continue;
            }
            // Only the container that writes the redirect rules needs rights that the standard refuses.
            let err = created.unwrap_err();
            assert!(err.contains("linkerd-init") && err.contains("NET_ADMIN"), "{err}");
            assert!(!err.contains("\"linkerd-proxy\""), "{err}");
        }
    }
}

/// Injects a sidecar into a copy of the pod.
fn inject_sidecar(pod: &Value, cni_enabled: bool, native_sidecar: bool) -> Value {
    let mut values = Values {
        cni_enabled,
        ..Values::default()
    };
    values.proxy.native_sidecar = native_sidecar;
    let config = Config {
        values,
        control_plane_namespace: "linkerd".to_owned(),
        origin: InjectionOrigin::Webhook,
    };
    let typed: Pod = serde_json::from_value(pod.clone()).unwrap();
    let enabled = Annotations::from([("linkerd.io/inject".to_owned(), "enabled".to_owned())]);
    let outcome = injection::inject_pod(
        &config,
        &InjectionTarget {
            pointer: &[],
            metadata: Some(&typed.metadata),
            spec: typed.spec.as_ref().unwrap(),
            namespace: "shop",
            namespace_annotations: &enabled,
            owner: None,
        },
    );
    assert!(matches!(outcome.decision, Decision::Inject(_)), "{outcome:?}");
    let mut injected = pod.clone();
    json_patch::patch(&mut injected, &outcome.patch).unwrap();
    injected
}

/// Enforces the Pod Security Standard `restricted` in a namespace.
async fn enforce_restricted_standard(server: &ApiServer, namespace: &str) {
    let label = "pod-security.kubernetes.io/enforce=restricted";
    server.kubectl(&["label", "namespace", namespace, label]).await.unwrap();
}

async fn create(server: &ApiServer, object: &Value) -> anyhow::Result<String> {
    let file = server.dir().join("object.json");
    fs::write(&file, object.to_string())?;
    server
        .kubectl(&["create", "--dry-run=server", "-f", file.to_str().unwrap()])
        .await
}

/// A minimal CustomResourceDefinition for a kind of the Prometheus operator.
fn prometheus_operator_definition(kind: &str) -> String {
    let singular = kind.to_ascii_lowercase();
    format!(
        "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: {singular}s.monitoring.coreos.com
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {{kind: {kind}, plural: {singular}s, singular: {singular}}}
  versions:
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema: {{type: object, x-kubernetes-preserve-unknown-fields: true}}
"
    )
}
