//! `helm install`, `upgrade` and `uninstall` from a repository, on an API server without nodes.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;
use tulle_tests::cluster::ApiServer;

use tulle_tests::charts::{Helm, Repository, chart_path};

use crate::render::objects;

#[tokio::test(flavor = "multi_thread")]
async fn an_installation_from_a_repository_is_upgraded_and_leaves_only_gateway_api_definitions_and_the_namespace() {
    let server = ApiServer::start().await.unwrap();
    let repository = Repository::start().await.unwrap();
    let helm = Helm::with_kubeconfig(server.kubeconfig()).unwrap();
    let run = |line: &str| helm.run(&line.split_whitespace().collect::<Vec<_>>()).unwrap();
    let before = list_objects(&server).await;

    run(&format!("repo add tulle {}", repository.url()));
    run("repo update");
    run("install tulle-crds tulle/tulle-crds -n linkerd --create-namespace --set installGatewayAPI=true");
    let pem = |name: &str| {
        let file = server.dir().join(name);
        fs::write(&file, format!("-----BEGIN {name}-----\n")).unwrap();
        file.display().to_string()
    };
    let control_plane = format!(
        "upgrade --install tulle-control-plane tulle/tulle-control-plane -n linkerd \
         --set-file identityTrustAnchorsPEM={} --set-file identity.issuer.tls.crtPEM={} \
         --set-file identity.issuer.tls.keyPEM={} --set controllerLogLevel=debug --set policyController.logLevel=debug \
         --set identityTrustDomain=east.id",
        pem("ca"),
        pem("certificate"),
        pem("key"),
    );
    let notes = run(&control_plane);
    assert!(notes.contains("linkerd.io/inject=enabled"), "{notes}");
    assert!(!notes.contains("Values without effect"), "{notes}");
    check_identity_of_the_gateway(&helm);

    // Values that components write at run time survive an upgrade.
    let bundle = r#"[{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": "Y2E="}]"#;
    let configuration = "mutatingwebhookconfiguration/linkerd-proxy-injector-webhook-config";
    server
        .kubectl(&["patch", configuration, "--type=json", "-p", bundle])
        .await
        .unwrap();
    let notes = run(&format!(
        "{control_plane} --set controllerReplicas=2 --set disableHeartBeat=false"
    ));
    assert!(
        notes.contains("disableHeartBeat: the control plane reports nothing"),
        "{notes}"
    );
    let written = [
        "get",
        configuration,
        "-o",
        "jsonpath={.webhooks[0].clientConfig.caBundle}",
    ];
    assert_eq!(server.kubectl(&written).await.unwrap(), "Y2E=");
    let replicas = [
        "get",
        "-n",
        "linkerd",
        "deploy/linkerd-destination",
        "-o",
        "jsonpath={.spec.replicas}",
    ];
    assert_eq!(server.kubectl(&replicas).await.unwrap(), "2");

    run("uninstall tulle-control-plane -n linkerd --wait");
    run("uninstall tulle-crds -n linkerd --wait");
    let after = list_objects(&server).await;
    let left: BTreeSet<&str> = after.difference(&before).map(String::as_str).collect();
    let kept = ["grpcroutes", "httproutes", "tcproutes", "tlsroutes"]
        .map(|plural| format!("{plural}.gateway.networking.k8s.io"));
    let expected: BTreeSet<String> = kept
        .iter()
        .map(|name| format!("customresourcedefinition.apiextensions.k8s.io/{name}"))
        .chain(["namespace/linkerd".to_owned()])
        .collect();
    assert_eq!(left, expected.iter().map(String::as_str).collect());
}

/// Checks that the gateway of the multicluster extension has the trust domain of the installed control plane, unless another is set.
fn check_identity_of_the_gateway(helm: &Helm) {
    let chart = chart_path("tulle-multicluster");
    let render = ["template", "multicluster", &chart, "-n", "linkerd-multicluster"];
    for (flags, domain) in [
        ("--dry-run=server", "east.id"),
        ("--dry-run=server --set=identityTrustDomain=other.id", "other.id"),
        // Without a cluster.
        ("--dry-run=client", "cluster.local"),
    ] {
        let flags: Vec<&str> = flags.split_whitespace().collect();
        let rendered = objects(&helm.run(&[&render[..], &flags].concat()).unwrap());
        let is_gateway =
            |object: &&Value| object["kind"] == "Service" && object["metadata"]["name"] == "linkerd-gateway";
        let service = rendered.iter().find(is_gateway).unwrap();
        let expected = format!("linkerd-gateway.linkerd-multicluster.serviceaccount.identity.linkerd.{domain}");
        let identity = &service["metadata"]["annotations"]["mirror.linkerd.io/gateway-identity"];
        assert_eq!(*identity, expected, "{flags:?}");
    }
}

/// The names of all objects. API services are left out, because the API server creates them for definitions, and so are events and
/// leases, which it creates itself.
async fn list_objects(server: &ApiServer) -> BTreeSet<String> {
    let kinds = server
        .kubectl(&["api-resources", "--verbs=list", "-o", "name"])
        .await
        .unwrap();
    let ignored = ["apiservices.", "events", "leases.", "componentstatuses"];
    let kinds: Vec<&str> = kinds
        .lines()
        .filter(|kind| !ignored.iter().any(|other| kind.starts_with(other)))
        .collect();
    let names = server
        .kubectl(&["get", &kinds.join(","), "-A", "-o", "name"])
        .await
        .unwrap();
    names.lines().map(str::to_owned).collect()
}
