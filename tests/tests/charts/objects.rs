//! What an API server says to the objects of the charts.

use std::fs;

use tulle_tests::cluster::ApiServer;

use crate::render;
use tulle_tests::charts::Helm;

#[tokio::test]
async fn an_api_server_accepts_every_object_of_every_installation() {
    let server = ApiServer::start().await.unwrap();
    server.create_namespace("linkerd").await.unwrap();
    let helm = Helm::of(server.kubeconfig()).unwrap();
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
    apply("the custom resources, twice", &crds, dry).await;
    apply("the custom resources", &crds, &[]).await;
    // The Prometheus operator's kind, as far as the API server cares about it here.
    apply("PodMonitor", POD_MONITOR, &[]).await;
    server.custom_resources_ready().await.unwrap();
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

const POD_MONITOR: &str = "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: podmonitors.monitoring.coreos.com
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {kind: PodMonitor, plural: podmonitors, singular: podmonitor}
  versions:
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}
";
