//! `tulle` with an API server: each error names its fix, and the API server accepts the manifests of the fix.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;
use tulle_tests::{commands, programs};

#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) success: bool,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// Runs `tulle` as the administrator, or with the kubeconfig in its arguments.
pub(crate) async fn tulle(server: &ApiServer, line: &str) -> CommandOutput {
    run(&server.kubeconfig(), line, programs::search_path()).await
}

async fn run(kubeconfig: &Path, line: &str, path: String) -> CommandOutput {
    let tulle = programs::built_binary("tulle").unwrap();
    let mut tulle = tokio::process::Command::new(tulle);
    tulle
        .args(line.split_whitespace())
        .env("KUBECONFIG", kubeconfig)
        .env("PATH", path);
    let output = commands::output(line, tulle).await.unwrap();
    CommandOutput {
        success: output.status.success(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Runs `kubectl` with manifests on standard input.
pub(crate) async fn kubectl(server: &ApiServer, line: &str, manifests: &str) -> String {
    let mut child = tokio::process::Command::new("kubectl")
        .arg("--kubeconfig")
        .arg(server.kubeconfig())
        .args(line.split_whitespace())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(manifests.as_bytes()).await.unwrap();
    drop(stdin);
    let ended = timeout(KUBECTL_TIMEOUT, child.wait_with_output()).await;
    let output = ended
        .unwrap_or_else(|_| panic!("kubectl {line} has not ended within {KUBECTL_TIMEOUT:?}"))
        .unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubectl {line}: {err}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
pub(crate) fn assert_contains(text: &str, wanted: &[&str]) {
    for wanted in wanted {
        assert!(text.contains(wanted), "{wanted:?} is not in\n{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_cluster_is_ready_for_an_installation() {
    let server = ApiServer::start().await.unwrap();
    let ready = tulle(&server, "check --pre").await;
    assert!(ready.success, "{ready:?}");
    assert_contains(
        &ready.out,
        &[
            "√ can create Deployments",
            "√ no clock skew detected",
            "Status check results are √",
        ],
    );

    let empty = tulle(&server, "check --wait 0").await;
    assert!(!empty.success);
    assert_contains(
        &empty.out,
        &[
            "× control plane Namespace exists",
            "fix: tulle install --crds | kubectl apply -f - && tulle install | kubectl apply -f -",
        ],
    );
    let crds = tulle(&server, "check --crds -o json").await;
    assert!(!crds.success);
    let json: Value = serde_json::from_str(&crds.out).unwrap();
    assert_eq!(json["success"], false);
    let last = &json["categories"].as_array().unwrap().last().unwrap()["checks"][0];
    assert_eq!(
        (&last["result"], &last["hint"]),
        (&"error".into(), &"tulle install --crds | kubectl apply -f -".into())
    );

    let unprivileged = server.service_account_kubeconfig("default", "nobody").await.unwrap();
    let refused = run(&unprivileged, "check --pre", programs::search_path()).await;
    assert!(!refused.success);
    assert_contains(
        &refused.out,
        &[
            "× can create Secrets",
            "you may not create secrets",
            "kubectl auth can-i create secrets -n linkerd",
        ],
    );
    let impersonated = tulle(&server, "check --pre -o short --as somebody --as-group nobodies").await;
    assert!(
        !impersonated.success && impersonated.out.contains("you may not create namespaces"),
        "{impersonated:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_server_is_reported() {
    let server = ApiServer::start().await.unwrap();
    let kubeconfig = server.dir().join("elsewhere.conf");
    let text = std::fs::read_to_string(server.kubeconfig()).unwrap();
    // A loopback port without a listener.
    std::fs::write(&kubeconfig, text.replace(":6443", ":1")).unwrap();
    let finished = run(&kubeconfig, "check --wait 0", programs::search_path()).await;
    assert!(!finished.success);
    assert_contains(
        &finished.out,
        &["× can query the Kubernetes API", "fix: kubectl cluster-info"],
    );
    let finished = tulle(&server, "check --context nowhere").await;
    assert_contains(
        &finished.out,
        &["× can initialize the client", "nowhere", "kubectl config get-contexts"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_reached_by_the_name_of_its_host() {
    let server = ApiServer::start().await.unwrap();
    let text = std::fs::read_to_string(server.kubeconfig()).unwrap();
    let url = server.url();
    let addr = url.strip_prefix("https://").unwrap().to_owned();
    // The server has its own loopback address; its certificate is also valid for localhost.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let forwarding = tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            let mut server = tokio::net::TcpStream::connect(&addr).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
        }
    });
    for (host, reached) in [("localhost", true), ("nowhere.invalid", false)] {
        let kubeconfig = server.dir().join(format!("{host}.conf"));
        std::fs::write(&kubeconfig, text.replace(&url, &format!("https://{host}:{port}"))).unwrap();
        let finished = run(&kubeconfig, "check --pre --wait 0", programs::search_path()).await;
        assert_eq!(finished.success, reached, "{finished:?}");
        let line = match reached {
            true => "√ can query the Kubernetes API",
            false => "× can query the Kubernetes API",
        };
        assert_contains(&finished.out, &[line]);
    }
    forwarding.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_control_plane_is_installed_checked_upgraded_pruned_and_removed() {
    let server = ApiServer::start().await.unwrap();
    let installed = install(&server).await;
    check_without_pods(&server).await;
    upgrade(&server, &installed).await;
    prune_an_old_service(&server).await;
    prune_with_external_credentials(&server).await;
    uninstall(&server).await;
}

/// Installs a control plane with log level `debug`, and returns its manifests.
async fn install(server: &ApiServer) -> String {
    let refused = tulle(server, "install").await;
    assert!(!refused.success);
    assert_contains(&refused.err, &["tulle install --crds | kubectl apply -f -"]);
    let refused = tulle(server, "install --crds").await;
    assert_contains(&refused.err, &["--set installGatewayAPI=true"]);

    let crds = tulle(server, "install --crds --set installGatewayAPI=true").await;
    assert!(crds.success, "{}", crds.err);
    kubectl(server, "apply -f -", &crds.out).await;
    let checked = tulle(server, "check --crds").await;
    assert!(checked.success, "{}", checked.out);

    let installed = tulle(server, "install --set controllerLogLevel=debug").await;
    assert!(installed.success, "{}", installed.err);
    assert_contains(&installed.err, &["made a trust anchor and an issuer"]);
    kubectl(server, "apply -f -", &installed.out).await;
    let again = tulle(server, "install").await;
    assert_contains(
        &again.err,
        &["there is a control plane in namespace linkerd already", "tulle upgrade"],
    );
    installed.out
}

/// No node runs the pods, and no component creates the certificates of webhooks; everything else passes.
async fn check_without_pods(server: &ApiServer) {
    let checked = tulle(server, "check --wait 0").await;
    assert!(!checked.success);
    assert_contains(
        &checked.out,
        &[
            "√ control plane ClusterRoleBindings exist",
            "√ 'linkerd-config' config map exists",
            "× control plane pods are ready",
            "there is no pod of linkerd-identity",
            "√ cluster networks contains all services",
            "√ issuer cert is issued by the trust anchor",
            "× proxy-injector webhook has valid cert",
            "fix: kubectl rollout restart deployment linkerd-proxy-injector -n linkerd",
            "√ control plane and cli versions match",
        ],
    );
    // A pending check is printed only when its message changes.
    let waited = tulle(server, "check --wait 3s").await;
    let mut progress: Vec<_> = waited.err.lines().filter(|line| line.starts_with("waiting")).collect();
    assert_contains(&progress.join("\n"), &["control plane pods are ready"]);
    let all = progress.len();
    progress.dedup();
    assert_eq!(progress.len(), all, "{}", waited.err);
}

/// An upgrade keeps the issuer and the values of the installed manifests.
async fn upgrade(server: &ApiServer, installed: &str) {
    let before = tulle(server, "upgrade").await;
    let upgraded = tulle(server, "upgrade --controller-replicas 2").await;
    assert!(upgraded.success, "{}", upgraded.err);
    assert_eq!(before.out, tulle(server, "upgrade").await.out);
    let issuer = |text: &str| {
        let at = text.find("crt.pem: ").expect("an issuer");
        text[at..].lines().next().unwrap().to_owned()
    };
    assert_eq!(issuer(&upgraded.out), issuer(installed));
    kubectl(server, "apply -f -", &upgraded.out).await;
    let replicas = "get deployment linkerd-destination -n linkerd -o jsonpath={.spec.replicas}";
    assert_eq!(kubectl(server, replicas, "").await, "2");
    let log_level = kubectl(server, "get configmap linkerd-config -n linkerd -o yaml", "").await;
    assert_contains(&log_level, &["controllerLogLevel: debug", "controllerReplicas: 2"]);
}

async fn prune_an_old_service(server: &ApiServer) {
    assert_eq!(tulle(server, "prune").await.out, "");
    kubectl(server, "create service clusterip old -n linkerd --tcp=80", "").await;
    kubectl(
        server,
        "label service old -n linkerd linkerd.io/control-plane-ns=linkerd",
        "",
    )
    .await;
    let pruned = tulle(server, "prune").await;
    assert_contains(&pruned.out, &["kind: Service", "name: old"]);
    assert_eq!(pruned.out.matches("kind:").count(), 1, "{}", pruned.out);
}

/// Objects that the chart created, and that now have external credentials, keep their labels. `prune` does not list them, because
/// they are in use.
async fn prune_with_external_credentials(server: &ApiServer) {
    let external = tulle(server, "upgrade --identity-external-issuer --identity-external-ca").await;
    assert!(external.success, "{}", external.err);
    kubectl(server, "apply -f -", &external.out).await;
    let policies = tulle(server, "upgrade --set networkPolicies.enabled=true").await;
    let documents = policies.out.split("---\n");
    let policies: Vec<_> = documents.filter(|text| text.contains("kind: NetworkPolicy")).collect();
    assert!(!policies.is_empty());
    kubectl(server, "apply -f -", &policies.join("---\n")).await;
    let pruned = tulle(server, "prune").await;
    for used in ["linkerd-identity-issuer", "linkerd-identity-trust-roots"] {
        assert!(!pruned.out.contains(used), "{}", pruned.out);
    }
    assert_eq!(
        pruned.out.matches("kind: NetworkPolicy").count(),
        policies.len(),
        "{}",
        pruned.out
    );
    // The policies and the old Service.
    assert_eq!(
        pruned.out.matches("kind:").count(),
        policies.len() + 1,
        "{}",
        pruned.out
    );
}

/// Removes the control plane, which is refused as long as a pod has one of its proxies.
async fn uninstall(server: &ApiServer) {
    kubectl(server, "create namespace shop", "").await;
    kubectl(server, "create serviceaccount default -n shop", "").await;
    let pod = "\
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {linkerd.io/control-plane-ns: linkerd}}
spec: {containers: [{name: linkerd-proxy, image: none}]}
";
    // The webhook has no CA bundle yet and lets pods pass.
    kubectl(server, "apply -f -", pod).await;
    let refused = tulle(server, "uninstall").await;
    assert!(!refused.success);
    assert_contains(
        &refused.err,
        &["1 pod has a proxy of this control plane (shop/web)", "--force"],
    );
    kubectl(server, "delete pod web -n shop --force --grace-period=0", "").await;

    let all = tulle(server, "uninstall").await;
    assert!(all.success, "{}", all.err);
    kubectl(server, "delete --wait=false -f -", &all.out).await;
    eventually("nothing of the control plane is left", async || {
        let left = "get clusterrole,clusterrolebinding,crd,role,rolebinding -A -o name";
        (!kubectl(server, left, "").await.contains("linkerd")).then_some(())
    })
    .await;
    let gone = tulle(server, "upgrade").await;
    assert_contains(&gone.err, &["there is no control plane in namespace linkerd"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_helm_the_error_names_a_fix() {
    let finished = run(
        Path::new("/dev/null"),
        "install --ignore-cluster",
        "/nowhere".to_owned(),
    )
    .await;
    assert!(!finished.success);
    assert_contains(
        &finished.err,
        &[
            "helm, which renders the charts, is not on the PATH",
            "https://helm.sh/docs/intro/install",
            "helm install linkerd-crds tulle/tulle-crds",
            "helm install linkerd-control-plane tulle/tulle-control-plane",
        ],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn values_have_the_syntax_of_helm_and_unknown_values_are_refused() {
    let line = "install --ignore-cluster --set proxy.logLevel=a\\,b --set-string podLabels.n=1 -o json";
    let finished = run(Path::new("/dev/null"), line, programs::search_path()).await;
    assert!(finished.success, "{}", finished.err);
    let documents = serde_json::Deserializer::from_str(&finished.out).into_iter::<Value>();
    let documents: Vec<Value> = documents.collect::<Result<_, _>>().unwrap();
    let secret = documents
        .iter()
        .find(|document| document["metadata"]["name"] == "linkerd-config-overrides")
        .unwrap();
    let overrides = secret["stringData"]["linkerd-config-overrides"].as_str().unwrap();
    assert_contains(overrides, &["logLevel: a,b", "n: '1'", "BEGIN CERTIFICATE"]);
    let finished = run(
        Path::new("/dev/null"),
        "install --ignore-cluster --set proxy.colour=red",
        programs::search_path(),
    )
    .await;
    assert!(!finished.success && finished.err.contains("colour"), "{}", finished.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn profiles_and_authorizations_match_the_api_server() {
    let server = ApiServer::start().await.unwrap();
    let crds = tulle(&server, "install --crds --set installGatewayAPI=true").await;
    kubectl(&server, "apply -f -", &crds.out).await;
    server.create_namespace("shop").await.unwrap();
    let template = tulle(&server, "profile --template web -n shop --ignore-cluster").await;
    assert_contains(&kubectl(&server, "apply -f -", &template.out).await, &["created"]);
    let refused = tulle(&server, "profile --template web -n shop").await;
    assert_contains(
        &refused.err,
        &["--ignore-cluster", "there is no control plane in namespace linkerd"],
    );

    let objects = "\
{apiVersion: v1, kind: Pod, metadata: {name: web, namespace: shop, labels: {app: web}}, spec: {containers: [{name: a, image: a}]}}
---
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: web-http, namespace: shop}
spec: {podSelector: {matchLabels: {app: web}}, port: 80, proxyProtocol: HTTP/1}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: friends, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: web-http}
  requiredAuthenticationRefs: [{kind: ServiceAccount, name: friend}]
";
    kubectl(&server, "apply -f -", objects).await;
    for resource in ["pod/web -n shop", "po -n shop", "ns/shop"] {
        let finished = tulle(&server, &format!("authz {resource}")).await;
        assert_contains(
            &finished.out,
            &["ROUTE   SERVER     AUTHORIZATION_POLICY", "*       web-http   friends"],
        );
    }
    let finished = tulle(&server, "authz deploy/web -n shop").await;
    assert!(!finished.success);
    assert_contains(
        &finished.err,
        &["getting deployment web of namespace shop", "not found"],
    );
    let finished = tulle(&server, "metrics pod/web -n shop").await;
    assert_contains(&finished.err, &["pod/web of namespace shop has no pod with a proxy"]);
    let finished = tulle(&server, "diagnostics endpoints web.shop.svc.cluster.local:80").await;
    assert_contains(
        &finished.err,
        &[
            "namespace linkerd has no ready pod of linkerd-destination",
            "tulle check",
        ],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_asked_of_every_admin_port_of_the_control_plane() {
    let server = ApiServer::start().await.unwrap();
    server.create_namespace("linkerd").await.unwrap();
    let none = tulle(&server, "diagnostics controller-metrics").await;
    assert!(!none.success);
    assert_contains(
        &none.err,
        &["namespace linkerd has no pod of a control plane; use -L for another namespace"],
    );

    // No controller creates pods of Deployments here.
    let installed = tulle(&server, "install --ignore-cluster -o json").await;
    assert!(installed.success, "{}", installed.err);
    let documents = serde_json::Deserializer::from_str(&installed.out).into_iter::<Value>();
    let objects = documents.filter_map(|document| {
        let document = document.unwrap();
        let template = &document["spec"]["template"];
        match document["kind"].as_str() {
            Some("ServiceAccount") => Some(document),
            Some("Deployment") => {
                let name = &document["metadata"]["name"];
                let labels = &template["metadata"]["labels"];
                let metadata = json!({"name": name, "namespace": "linkerd", "labels": labels});
                Some(json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}))
            }
            _ => None,
        }
    });
    let other = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "namespace": "linkerd"},
        "spec": {"containers": [
            {"name": "a", "image": "a", "ports": [{"name": "a-admin", "containerPort": 9990}]},
        ]},
    });
    let objects: Vec<Value> = objects.chain([other]).collect();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    kubectl(&server, "apply -f -", &list.to_string()).await;

    // Without nodes there are no pages, and each missing page is reported.
    let finished = tulle(&server, "diagnostics controller-metrics").await;
    assert!(!finished.success);
    let headings: Vec<_> = finished.out.lines().filter(|line| *line != "#").collect();
    let mut expected = Vec::new();
    let pages = [
        ("linkerd-destination", "destination", 9996),
        ("linkerd-destination", "destination", 9997),
        ("linkerd-destination", "destination", 9990),
        ("linkerd-identity", "identity", 9990),
        ("linkerd-proxy-injector", "proxy-injector", 9995),
    ];
    for (number, (pod, container, port)) in pages.into_iter().enumerate() {
        expected.push(format!("# POD {pod} ({} of 5)", number + 1));
        expected.push(format!("# CONTAINER {container}, port {port}"));
        assert_contains(
            &finished.err,
            &[&format!("forwarding port {port} of pod linkerd/{pod}")],
        );
    }
    assert_eq!(headings, expected);
}

const KUBECTL_TIMEOUT: Duration = Duration::from_secs(120);
