//! One process that mirrors the clusters of all Links, while Links come and go.

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::DeleteParams;

use super::leadership::export;
use super::*;

/// Starts a service mirror for all Links of `west` except `b2`. All Links refer to the cluster `other`, and have credentials for it.
/// `a1` gets credentials that are not usable, `b1` has a service mirror of its own, which holds its lease, and which may not read the
/// Links of other namespaces, and the shared service mirror may not read the credentials of `b3`.
pub(super) async fn check_all_links(west: &ApiServer, other: &ApiServer) {
    let access = remote_access(other).await;
    let unusable = access.with_extension("unusable");
    fs::write(&unusable, "no kubeconfig").unwrap();
    put_credentials(west, "a1", &unusable).await;
    create_account_as_in_linkerd(west).await;
    let own = Mirror::start_with(west, AS_IN_LINKERD, own_config("b1")).await;
    wait_for_holder(west, "b1", "own").await;
    export(other, "shared").await;

    for link in LINKS.into_iter().filter(|link| !["b2", "b3"].contains(link)) {
        permit_credentials(west, link).await;
    }
    let shared = Mirror::start(west, ACCOUNT, Scope::all_links_except("b2")).await;
    for link in LINKS.into_iter().filter(|link| !["a1", "b2", "b3"].contains(link)) {
        wait_for_mirrored(west, link, "shared").await;
        let holder = if link == "b1" { "own" } else { "test" };
        wait_for_holder(west, link, holder).await;
    }
    eventually("the unusable credentials are reported", async || {
        let series = "tulle_mirror_errors_total{target_cluster_name=\"a1\",reason=\"Unreadable\"}";
        (shared.metric(series)? >= 1.0).then_some(())
    })
    .await;
    for link in ["a1", "b2"] {
        let mirror = services(west.client())
            .get_opt(&format!("shared-{link}"))
            .await
            .unwrap();
        assert!(mirror.is_none(), "{link}");
    }
    check_link_without_permission(west, &shared).await;
    check_handover(west, other, own).await;
    check_added_link(west, &access).await;
    check_removed_link(west, &shared).await;
    shared.end().await;
    wait_for_holder(west, "a4", "").await;
    check_moved_link(west, other).await;
    let log = west.audit_log().unwrap().into_iter();
    let has_account = |name: &str| [ACCOUNT, AS_IN_LINKERD].iter().any(|account| name.ends_with(account));
    let refused = log.filter(|record| record.is_forbidden() && has_account(&record.user.username));
    let refused = refused.map(|record| (record.verb, record.uri));
    let refused: Vec<_> = refused
        .filter(|(_, uri)| !uri.contains("cluster-credentials-b3"))
        .collect();
    assert!(refused.is_empty(), "{refused:?}");
}

/// Creates an account with the permissions of the controller of `b1`, except that it may read the Links of its namespace only, as in
/// Linkerd's chart.
async fn create_account_as_in_linkerd(west: &ApiServer) {
    let role = "linkerd-multicluster-controller-access-local-resources";
    let role = west.kubectl(&["get", "clusterrole", role, "-o", "json"]).await.unwrap();
    let mut role: Value = serde_json::from_str(&role).unwrap();
    role["metadata"] = json!({ "name": AS_IN_LINKERD });
    let rules = role["rules"].as_array_mut().unwrap();
    let n_rules = rules.len();
    rules.retain(|rule| rule["resources"] != json!(["links"]));
    assert_eq!(rules.len(), n_rules - 1);
    fs::write(west.dir().join("as-in-linkerd.json"), role.to_string()).unwrap();
    let account = format!("--serviceaccount={NAMESPACE}:{AS_IN_LINKERD}");
    let (cluster_role, role) = (
        format!("--clusterrole={AS_IN_LINKERD}"),
        format!("--role={AS_IN_LINKERD}"),
    );
    let (verbs, links) = ("--verb=list,watch", "--resource=links.multicluster.linkerd.io");
    let credentials = "--role=controller-read-remote-creds-b1";
    for args in [
        ["apply", "-f", "as-in-linkerd.json"].as_slice(),
        &["create", "clusterrolebinding", AS_IN_LINKERD, &cluster_role, &account],
        &["create", "role", AS_IN_LINKERD, "-n", NAMESPACE, verbs, links],
        &["create", "rolebinding", AS_IN_LINKERD, "-n", NAMESPACE, &role, &account],
        &[
            "create",
            "rolebinding",
            "credentials-of-b1",
            "-n",
            NAMESPACE,
            credentials,
            &account,
        ],
    ] {
        west.kubectl(args).await.unwrap();
    }
}

/// Lets the shared service mirror read the credentials of a Link, as the output of `link-gen` does.
async fn permit_credentials(west: &ApiServer, link: &str) {
    let name = format!("shared-credentials-{link}");
    let secret = format!("--resource-name=cluster-credentials-{link}");
    let (role, account) = (
        format!("--role={name}"),
        format!("--serviceaccount={NAMESPACE}:{ACCOUNT}"),
    );
    for args in [
        &[
            "create",
            "role",
            &name,
            "-n",
            NAMESPACE,
            "--verb=list,watch",
            "--resource=secrets",
            &secret,
        ][..],
        &["create", "rolebinding", &name, "-n", NAMESPACE, &role, &account],
    ] {
        west.kubectl(args).await.unwrap();
    }
}

/// The shared service mirror does not compete for the lease of a Link whose credentials it may not read, and reports why nobody mirrors
/// it. Another one that may read them mirrors it.
async fn check_link_without_permission(west: &ApiServer, shared: &Mirror) {
    wait_for_link_event(west, "b3", "Unreadable", "tulle multicluster link-gen").await;
    let series = "tulle_mirror_errors_total{target_cluster_name=\"b3\",reason=\"Unreadable\"}";
    eventually("the missing permission is counted", async || {
        (shared.metric(series)? >= 1.0).then_some(())
    })
    .await;
    wait_for_holder(west, "b3", "").await;
    let own = Mirror::start_with(west, "controller-b3", own_config("b3")).await;
    wait_for_holder(west, "b3", "own").await;
    wait_for_mirrored(west, "b3", "shared").await;
    own.end().await;
    wait_for_holder(west, "b3", "").await;
}

/// When the own service mirror of `b1` ends, the shared one mirrors the cluster.
async fn check_handover(west: &ApiServer, other: &ApiServer, own: Mirror) {
    own.end().await;
    wait_for_holder(west, "b1", "test").await;
    export(other, "later").await;
    for link in ["b1", "east"] {
        wait_for_mirrored(west, link, "later").await;
    }
}

/// A Link that is created later is mirrored. The Service through which its gateway is probed belongs to it. Those of other Links are
/// the ones of the chart.
async fn check_added_link(west: &ApiServer, access: &Path) {
    put_credentials(west, "added", access).await;
    permit_credentials(west, "added").await;
    let mut added = link("added");
    added["spec"]["probeSpec"] = json!({"path": "/ready", "port": "4191"});
    apply(west, &added).await;
    wait_for_mirrored(west, "added", "shared").await;
    let in_extension = Api::<Service>::namespaced(west.client(), NAMESPACE);
    let probe = eventually("the probe Service is created", async || {
        in_extension.get_opt("mirror-probe-added").await.unwrap()
    })
    .await;
    let link = links(west, "v1alpha3").get("added").await.unwrap();
    let owners = probe.metadata.owner_references.unwrap();
    assert_eq!(owners.len(), 1);
    assert_eq!(Some(&owners[0].uid), link.metadata.uid.as_ref());
    let of_chart = in_extension.get("probe-a2").await.unwrap();
    assert_eq!(of_chart.metadata.owner_references, None);
    let probes = Api::<Endpoints>::namespaced(west.client(), NAMESPACE);
    let endpoints = eventually("the probe Service has endpoints", async || {
        probes.get_opt("mirror-probe-added").await.unwrap()
    })
    .await;
    let subsets = endpoints.subsets.unwrap();
    assert_eq!(subsets[0].addresses.as_ref().unwrap()[0].ip, "192.0.2.7");
}

/// A Link that is deleted loses its metrics and its lease, and keeps its mirrors. Other Links stay mirrored, and the deleted Link is
/// mirrored again when it exists again.
async fn check_removed_link(west: &ApiServer, shared: &Mirror) {
    let has_series = |value: &str| shared.registry.render().contains(&format!("=\"{value}\""));
    assert!(has_series("a3") && has_series("service-mirror-write-a3"));
    let all = links(west, "v1alpha3");
    all.delete("a3", &DeleteParams::default()).await.unwrap();
    wait_for_holder(west, "a3", "").await;
    eventually("the metrics of the Link are gone", async || {
        (!has_series("a3") && !has_series("service-mirror-write-a3")).then_some(())
    })
    .await;
    assert!(has_series("a4"));
    let mirror = services(west.client()).get_opt("shared-a3").await.unwrap();
    assert!(mirror.is_some());
    apply(west, &link("a3")).await;
    wait_for_holder(west, "a3", "test").await;
    wait_for_mirrored(west, "a3", "shared").await;
    assert!(has_series("a3"));
}

/// A Link is moved to a service mirror of its own, without which the shared one is started again, and back. Its mirrors stay, and are
/// kept up to date.
async fn check_moved_link(west: &ApiServer, other: &ApiServer) {
    let uid = async || services(west.client()).get("shared-b1").await.unwrap().metadata.uid;
    let before = uid().await;
    let shared = Mirror::start(west, ACCOUNT, Scope::all_links_except("b1,b2")).await;
    let own = Mirror::start_with(west, AS_IN_LINKERD, own_config("b1")).await;
    wait_for_holder(west, "b1", "own").await;
    export(other, "moved").await;
    for link in ["b1", "east"] {
        wait_for_mirrored(west, link, "moved").await;
    }
    own.end().await;
    shared.end().await;
    let shared = Mirror::start(west, ACCOUNT, Scope::all_links_except("b2")).await;
    wait_for_holder(west, "b1", "test").await;
    export(other, "returned").await;
    wait_for_mirrored(west, "b1", "returned").await;
    shared.end().await;
    assert_eq!(uid().await, before);
}

/// The configuration of a service mirror for one Link.
fn own_config(link: &str) -> Config {
    Config {
        lease_holder: "own".to_owned(),
        ..mirror_config(Scope::Link(link.to_owned()))
    }
}

async fn wait_for_mirrored(west: &ApiServer, link: &str, exported: &str) {
    wait_for_condition(west, link, "mirrorServices", (exported, "True", "")).await;
}

/// Waits until the lease of a Link has this holder. An empty name means that the lease is released.
async fn wait_for_holder(west: &ApiServer, link: &str, expected: &str) {
    let leases = Api::<Lease>::namespaced(west.client(), NAMESPACE);
    let name = format!("service-mirror-write-{link}");
    eventually(&format!("the holder of {name} is {expected:?}"), async || {
        let spec = leases.get_opt(&name).await.unwrap()?.spec?;
        (spec.holder_identity.unwrap_or_default() == expected).then_some(())
    })
    .await;
}

const ACCOUNT: &str = "linkerd-service-mirror";
const AS_IN_LINKERD: &str = "as-in-linkerd";
