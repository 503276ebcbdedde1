//! `tulle multicluster` between two API servers.

use tulle_control::trust;

use super::printed::{ACCOUNT, LEGACY_CONTROLLER, LINK, MIRRORED, UNINSTALLATION, assert_printed, printed_objects};
use super::*;
use crate::cli::{CommandOutput, assert_contains, kubectl, tulle};

/// The configuration that the chart of the control plane writes.
pub(super) async fn put_configuration(server: &ApiServer, domain: &str, anchor: &str) {
    let values = json!({"clusterDomain": domain, "identityTrustDomain": domain, "identityTrustAnchorsPEM": anchor});
    let manifest = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "linkerd-config", "namespace": "linkerd"},
        "data": {"values": values.to_string()},
    });
    apply(server, &manifest).await;
}

/// The trust anchors that the identity service uses.
async fn put_trust_roots(server: &ApiServer, anchor: &str) {
    let manifest = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "linkerd-identity-trust-roots", "namespace": "linkerd"},
        "data": {"ca-bundle.crt": anchor},
    });
    apply(server, &manifest).await;
}

/// Installs the extension in both clusters, each after its configuration. No control plane runs in them, so `install` is refused
/// without `--ignore-cluster`.
async fn install(west: &ApiServer, east: &ApiServer) {
    for server in [west, east] {
        install_custom_resources(server).await.unwrap();
        for namespace in ["linkerd", "shop"] {
            server.create_namespace(namespace).await.unwrap();
        }
    }
    let absent = tulle(east, "multicluster install").await;
    assert_contains(
        &absent.err,
        &[
            "× 'linkerd-config' config map exists",
            "fix: tulle install --crds | kubectl apply -f -",
        ],
    );
    let anchor = new_anchor();
    put_configuration(east, "east.test", &anchor).await;
    put_configuration(west, "west.test", &anchor).await;
    let without_pods = tulle(west, "multicluster install --wait 0").await;
    assert!(!without_pods.success, "{}", without_pods.out);
    assert_contains(
        &without_pods.err,
        &[
            "× control plane pods are ready",
            "fix: kubectl describe deployments,pods -n linkerd",
        ],
    );
    for (server, values) in [
        (east, "identityTrustDomain=east.test"),
        (west, "controllers[0].link.ref.name=east --gateway=false"),
    ] {
        let install = format!("multicluster install --ignore-cluster --set {values}");
        let manifests = tulle(server, &install).await;
        assert!(manifests.success, "{}", manifests.err);
        // The namespace comes first.
        kubectl(server, "apply --server-side -f -", &manifests.out).await;
    }
    check_labels(west).await;
    let gateways = tulle(west, "mc gateways --wait 10s").await;
    assert_eq!(
        gateways.out, "CLUSTER   ALIVE   NUM_SVC   LATENCY\n",
        "{}",
        gateways.err
    );
}

/// Checks the labels by which `linkerd multicluster check` finds the permissions of the controller.
async fn check_labels(west: &ApiServer) {
    let cluster_role = "clusterrole.rbac.authorization.k8s.io/linkerd-multicluster-controller-access-local-resources";
    let binding = cluster_role.replacen("clusterrole", "clusterrolebinding", 1) + "-east";
    let role = "role.rbac.authorization.k8s.io/controller-read-remote-creds-east";
    let role_binding = role.replacen("role", "rolebinding", 1);
    for (kind, is_of_link, expected) in [
        ("serviceaccounts", true, "serviceaccount/controller-east"),
        ("clusterroles", false, cluster_role),
        ("clusterrolebindings", true, &binding),
        ("roles", true, role),
        ("rolebindings", true, &role_binding),
    ] {
        let mut selector = "component=controller".to_owned();
        if is_of_link {
            selector += ",mirror.linkerd.io/cluster-name=east";
        }
        let args = ["get", kind, "-n", NAMESPACE, "-l", &selector, "-o", "name"];
        let found = west.kubectl(&args).await.unwrap();
        assert_eq!(found.trim(), expected);
    }
}

pub(super) fn new_anchor() -> String {
    let year = Duration::from_secs(365 * 86_400);
    trust::create_anchor("root.linkerd.cluster.local", year)
        .unwrap()
        .certificate
}

/// Links west to east. Before that, checks that an error names each missing prerequisite.
async fn link_clusters(west: &ApiServer, east: &ApiServer) {
    let link = "mc link-gen --cluster-name east";
    // The controller of tokens is not part of this API server.
    let without_token = tulle(east, link).await;
    assert_contains(&without_token.err, &["Kubernetes has not written a token"]);
    put_token(east).await;
    let account = ["create", "serviceaccount", "bare", "-n", NAMESPACE];
    east.kubectl(&account).await.unwrap();
    for (account, expected) in [
        ("nobody", "there is no ServiceAccount linkerd-multicluster/nobody"),
        ("bare", "the account linkerd-multicluster/bare has no token"),
    ] {
        let refused = tulle(east, &format!("{link} --service-account-name {account}")).await;
        assert!(!refused.success);
        assert_contains(&refused.err, &[expected]);
    }
    let on_loopback = tulle(east, link).await;
    assert_contains(
        &on_loopback.err,
        &["cannot reach the API server", "--api-server-address"],
    );
    let url = east
        .kubectl(&["config", "view", "-o", "jsonpath={.clusters[0].cluster.server}"])
        .await
        .unwrap();
    let link = format!("{link} --api-server-address {url}");
    let without_address = tulle(east, &link).await;
    assert_contains(
        &without_address.err,
        &[
            "the gateway linkerd-multicluster/linkerd-gateway has no address yet",
            "--gateway-addresses",
        ],
    );
    let link = format!("{link} --gateway-addresses 192.0.2.7");
    let linked = tulle(east, &link).await;
    assert!(linked.success, "{}", linked.err);
    kubectl(west, "apply -f -", &linked.out).await;
    let deprecated = tulle(east, &link.replacen("link-gen", "link --ha", 1)).await;
    replace_controller(west, &linked.out, &deprecated).await;
    // A token that expires replaces that of the Secret.
    let requested = tulle(east, &format!("{link} --token-duration 1h")).await;
    assert!(requested.success, "{}", requested.err);
    assert_contains(&requested.err, &["the token expires at 20"]);
    kubectl(west, "apply -f -", &requested.out).await;
    let account = "mc allow --service-account-name linkerd-service-mirror-remote-access-default";
    assert_contains(&tulle(east, account).await.err, &["exists", "--ignore-cluster"]);
    let allowed = tulle(east, "mc allow --service-account-name west").await;
    assert_printed(&allowed.out, ACCOUNT);
    kubectl(east, "apply --server-side -f -", &allowed.out).await;
}

/// The deprecated command `link` adds a controller with names of its own to the output of `link-gen`. `unlink --only-controller`
/// removes it.
async fn replace_controller(west: &ApiServer, link: &str, deprecated: &CommandOutput) {
    assert!(deprecated.success, "{}", deprecated.err);
    assert_contains(&deprecated.err, &["deprecated", "link-gen", "`controllers`"]);
    let controller = deprecated.out.strip_prefix(link);
    let controller = controller.expect("the output of link-gen comes first");
    for name_of_chart in ["controller-", ": controller\n", "ctrl-admin", "probe-east"] {
        assert!(
            !controller.contains(name_of_chart),
            "{name_of_chart} is in {controller}"
        );
    }
    let created = kubectl(west, "apply --server-side -f -", controller).await;
    assert_eq!(created.lines().count(), 10, "{created}");
    let all = tulle(west, "mc unlink --cluster-name east").await;
    assert_printed(&all.out, LEGACY_CONTROLLER.into_iter().chain(LINK));
    let unlinked = tulle(west, "mc unlink --cluster-name east --only-controller").await;
    assert_printed(&unlinked.out, LEGACY_CONTROLLER);
    let deleted = kubectl(west, "delete -f -", &unlinked.out).await;
    assert_eq!(deleted.lines().count(), 10, "{deleted}");
}

async fn check(west: &ApiServer, east: &ApiServer) {
    // Nothing runs the pods of the controller here.
    let checked = tulle(west, "mc check --wait 0 --timeout 10s").await;
    assert!(!checked.success);
    assert_contains(
        &checked.out,
        &[
            "√ multicluster extension is installed",
            "√ Link and CLI versions match",
            "√ remote cluster access credentials are valid",
            "√ the destination service has the credentials of linked clusters",
            "√ each linked cluster has one secret for the destination service",
            "√ clusters share trust anchors",
            "× service mirror controllers are running",
            "east: Deployment controller-east has no available pod",
            "√ probe services have a port for probes",
            "√ all mirror services have endpoints",
            "√ all mirror services are part of a Link",
        ],
    );
    put_configuration(east, "east.test", &new_anchor()).await;
    let checked = tulle(west, "mc check --wait 0 -o short").await;
    assert_contains(
        &checked.out,
        &["× clusters share trust anchors", "east: no trust anchor in common"],
    );
    // The anchors in use are others than those of the configuration, which has none with `identity.externalCA`.
    put_configuration(west, "west.test", "").await;
    let anchor = new_anchor();
    for server in [west, east] {
        put_trust_roots(server, &anchor).await;
    }
    // The command of docs/how-to/multicluster.md, whose outputs can be joined.
    let get = r#"get configmap linkerd-identity-trust-roots -n linkerd -o jsonpath={.data.ca-bundle\.crt}{"\n"}"#;
    assert_eq!(kubectl(east, get, "").await, anchor + "\n");
    // Requests that the gateway forwards to `web` go back to the other cluster.
    apply(west, &service("web", &json!({"mirror.linkerd.io/exported": "true"}))).await;
    apply(west, &route_to_mirror()).await;
    let checked = tulle(west, "mc check --wait 0 -o json").await;
    assert!(!checked.success);
    let report: Value = serde_json::from_str(&checked.out).unwrap();
    assert_eq!(report["success"], false);
    let checks = report["categories"][0]["checks"].as_array().unwrap();
    let text = |check: &Value, field: &str| check[field].as_str().unwrap_or_default().to_owned();
    let problems = checks.iter().filter(|check| check["result"] != "success");
    let problems: Vec<_> = problems
        .map(|check| (text(check, "description"), text(check, "result"), text(check, "error")))
        .collect();
    assert_eq!(checks.len(), 20, "{}", checked.out);
    assert_eq!(problems.len(), EXPECTED_PROBLEMS.len(), "{problems:?}");
    for ((description, result, error), expected) in problems.iter().zip(EXPECTED_PROBLEMS) {
        assert_eq!((&**description, &**result), (expected.0, expected.1));
        assert!(error.contains(expected.2), "{} is not in {error}", expected.2);
    }
    // The copy of the destination service has the same token.
    let copy = "east: those in Secret linkerd/cluster-credentials-east expire at 20";
    assert!(problems[0].2.contains(copy), "{}", problems[0].2);
}

/// The description, the result and a part of the text of each problem that `check` finds.
const EXPECTED_PROBLEMS: [(&str, &str, &str); 4] = [
    (
        "remote cluster access credentials do not expire soon",
        "warning",
        "east: those in Secret linkerd-multicluster/cluster-credentials-east expire at 20",
    ),
    (
        "service mirror controllers are running",
        "error",
        "east: Deployment controller-east has no available pod",
    ),
    (
        "probe services able to communicate with all gateway mirrors",
        "error",
        "east: no controller has probed it",
    ),
    (
        "routes of exported services have no mirror services as backends",
        "warning",
        "HTTPRoute shop/split: Service web, backend web-east",
    ),
];

fn route_to_mirror() -> Value {
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"name": "split", "namespace": "shop"},
        "spec": {
            "parentRefs": [{"group": "core", "kind": "Service", "name": "web", "port": 80}],
            "rules": [{"backendRefs": [{"name": "web", "port": 80}, {"name": "web-east", "port": 80}]}],
        },
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn clusters_are_linked_and_unlinked_by_the_output_of_commands() {
    let (west, east) = tokio::join!(ApiServer::start(), ApiServer::start());
    let (west, east) = (west.unwrap(), east.unwrap());
    install(&west, &east).await;
    link_clusters(&west, &east).await;

    // The account has the permissions of the service mirror.
    apply(&east, &service("web", &json!({"mirror.linkerd.io/exported": "true"}))).await;
    apply(&east, &slice_of(&endpoints("web", &json!([{"ip": "10.1.0.1"}])))).await;
    let mirror = Mirror::start_for_link(&west, "east").await;
    wait_for_addresses(&west, "web-east", 1).await;
    check(&west, &east).await;

    apply(&west, &link("north")).await;
    let still_linked = tulle(&west, "mc uninstall").await;
    // `kubectl delete` would delete what is printed.
    assert_eq!((still_linked.success, &*still_linked.out), (false, ""));
    assert_contains(
        &still_linked.err,
        &["there are Links to east, north; ", "tulle multicluster unlink"],
    );
    links(&west, "v1alpha3")
        .delete("north", &Default::default())
        .await
        .unwrap();
    let missing = tulle(&west, "mc unlink --cluster-name north").await;
    assert_contains(&missing.err, &["there is no Link linkerd-multicluster/north"]);
    let unlinked = tulle(&west, "mc unlink --cluster-name east").await;
    assert_printed(&unlinked.out, LINK.into_iter().chain(MIRRORED));
    kubectl(&west, "delete -f -", &unlinked.out).await;
    mirror.end().await;
    wait_until_gone(&west, "web-east").await;
    let federated = json!({"mirror.linkerd.io/mirrored-service": "true"});
    apply(&west, &service("web-federated", &federated)).await;
    let all = tulle(&west, "mc uninstall").await;
    assert_eq!(printed_objects(&all.out), UNINSTALLATION);
    let deleted = kubectl(&west, "delete --wait=false -f -", &all.out).await;
    assert_eq!(deleted.lines().count(), UNINSTALLATION.len(), "{deleted}");
}

/// Writes the token of the account as Kubernetes does.
async fn put_token(server: &ApiServer) {
    let account = "linkerd-service-mirror-remote-access-default";
    let token = server
        .kubectl(&["create", "token", account, "-n", NAMESPACE])
        .await
        .unwrap();
    let patch = json!({"data": {"token": ByteString(token.trim().as_bytes().to_vec())}}).to_string();
    let secret = format!("{account}-token");
    let args = [
        "patch",
        "secret",
        &secret,
        "-n",
        NAMESPACE,
        "--type=merge",
        "-p",
        &patch,
    ];
    server.kubectl(&args).await.unwrap();
}
