//! Writes of the service mirror: in a burst of changes, with a new token, and without any change.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::Secret;
use tulle_tests::cluster::AuditRecord;

use super::recorded::versions;
use super::*;

/// Writes a kubeconfig with a token that is revoked when the Secret of this name is deleted.
async fn revocable_access(server: &ApiServer, secret: &str) -> PathBuf {
    let manifest = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret, "namespace": NAMESPACE},
    });
    apply(server, &manifest).await;
    let bound_to = format!("--bound-object-name={secret}");
    let args = [
        "create",
        "token",
        REMOTE_ACCOUNT,
        "-n",
        NAMESPACE,
        "--bound-object-kind=Secret",
        &bound_to,
    ];
    let token = server.kubectl(&args).await.unwrap();
    let path = remote_access(server).await;
    let mut access: Value = serde_yaml_ng::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    access["users"][0]["user"] = json!({"token": token.trim()});
    let path = path.with_extension(secret);
    fs::write(&path, access.to_string()).unwrap();
    path
}

/// Exports Services one after the other, and deletes them. Checks that the status of the Link is written at most once per second,
/// and that the entry of another controller stays as the only one.
async fn check_status_writes(west: &ApiServer, east: &ApiServer) {
    let links = links(west, "v1alpha3");
    let remote = json!({"group": "core", "kind": "Service", "name": "x", "namespace": "shop"});
    let foreign = json!({"controllerName": "example.com/other", "remoteRef": remote, "conditions": []});
    let status = Patch::Merge(json!({"status": {"mirrorServices": [foreign]}}));
    let params = PatchParams::default();
    links.patch_status("east", &params, &status).await.unwrap();

    let (n_records, started_at) = (west.audit_log().unwrap().len(), Instant::now());
    let (local, exported) = (services(west.client()), services(east.client()));
    let names: Vec<String> = (0..BURST_SIZE).map(|n| format!("burst-{n}")).collect();
    for name in &names {
        apply(east, &service(name, &json!({"mirror.linkerd.io/exported": "true"}))).await;
        let mirror = format!("{name}-east");
        eventually(&format!("{mirror} exists"), async || {
            local.get_opt(&mirror).await.unwrap().map(drop)
        })
        .await;
    }
    let last: &str = names.last().unwrap();
    wait_for_condition(west, "east", "mirrorServices", (last, "True", "")).await;
    for name in &names {
        exported.delete(name, &Default::default()).await.unwrap();
    }
    eventually("the only entry is that of the other controller", async || {
        let link = links.get("east").await.unwrap();
        (link.data["status"]["mirrorServices"] == json!([foreign])).then_some(())
    })
    .await;
    let took = started_at.elapsed();
    let log = west.audit_log().unwrap().split_off(n_records);
    let n_writes = log.iter().filter(|record| is_status_write(record)).count();
    let n_permitted = usize::try_from(took.as_secs()).unwrap() + 1;
    assert!((2..=n_permitted).contains(&n_writes), "{n_writes} writes in {took:?}");
}

fn is_status_write(record: &AuditRecord) -> bool {
    let object = record.object_ref.as_ref();
    object.is_some_and(|object| object.resource == "links" && object.subresource == "status")
}

/// Revokes the token `old` while a new one is put into the Secret of the Link. Checks that the mirrors follow the other cluster with
/// the new token in time, and that existing mirrors are not written.
async fn check_new_token(west: &ApiServer, east: &ApiServer, old: &Path) {
    let new = revocable_access(east, "second").await;
    let before = versions(west).await;
    let n_records = east.audit_log().unwrap().len();
    let secrets = Api::<Secret>::namespaced(east.client(), NAMESPACE);
    let params = Default::default();
    let replaced = async {
        let (revoked, ()) = tokio::join!(secrets.delete("first", &params), put_credentials(west, "east", &new));
        revoked.unwrap();
        eventually("all Services are listed again", async || {
            let log = east.audit_log().unwrap().split_off(n_records);
            log.iter().any(is_list_of_services).then_some(())
        })
        .await;
        apply(east, &service("later", &json!({"mirror.linkerd.io/exported": "true"}))).await;
        wait_for_condition(west, "east", "mirrorServices", ("later", "True", "")).await
    };
    in_time(Duration::from_secs(5), replaced).await;
    let after = versions(west).await;
    for mirror in ["Service shop/web-east", "Endpoints shop/web-east"] {
        assert!(before.contains_key(mirror), "{mirror}");
    }
    for (name, version) in &before {
        assert_eq!(after.get(name), Some(version), "{name}");
    }
    // The API server remembers for ten seconds that a token was valid.
    let client = kubeconfig::client(old).await.unwrap();
    eventually("the old token is refused", async || {
        let listed = services(client.clone()).get_opt("web").await;
        matches!(listed, Err(kube::Error::Api(status)) if status.code == 401).then_some(())
    })
    .await;
}

/// The audit log contains only requests of service accounts.
fn is_list_of_services(record: &AuditRecord) -> bool {
    let object = record.object_ref.as_ref();
    record.verb == "list" && object.is_some_and(|object| object.resource == "services")
}

/// Waits until two refresh periods pass in which the service mirror compares all mirrors and writes nothing.
async fn wait_until_nothing_is_written(west: &ApiServer, mirror: &Mirror) {
    let user = format!("system:serviceaccount:{NAMESPACE}:controller-east");
    let n_writes = || {
        let records = west.audit_log().unwrap();
        let is_write = |record: &&AuditRecord| {
            let is_of_lease = record
                .object_ref
                .as_ref()
                .is_some_and(|object| object.resource == "leases");
            record.user.username == user && !["get", "list", "watch"].contains(&&*record.verb) && !is_of_lease
        };
        records.iter().filter(is_write).count()
    };
    assert!(n_writes() > 0, "no write of {user} in the audit log");
    eventually("two refresh periods without a write", async || {
        let (compared, written) = (mirror.metric(COMPARISONS).unwrap_or(0.0), n_writes());
        eventually("the mirrors are compared twice", async || {
            (mirror.metric(COMPARISONS)? >= compared + 2.0).then_some(())
        })
        .await;
        (n_writes() == written).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_survive_a_burst_of_changes_and_a_revoked_token_and_are_not_written_without_a_change() {
    let (west, east) = tokio::join!(cluster(&["east"]), cluster(&[]));
    let access = revocable_access(&east, "first").await;
    apply(&west, &link("east")).await;
    put_credentials(&west, "east", &access).await;
    let mirror = Mirror::start_for_link(&west, "east").await;
    check_status_writes(&west, &east).await;
    apply(&east, &service("web", &json!({"mirror.linkerd.io/exported": "true"}))).await;
    apply(&east, &slice_of(&endpoints("web", &json!([{"ip": "10.1.0.1"}])))).await;
    wait_for_condition(&west, "east", "mirrorServices", ("web", "True", "")).await;
    wait_for_addresses(&west, "web-east", 1).await;
    let until_expiry = mirror.metric(UNTIL_EXPIRY).unwrap();
    assert!((1.0..=3600.0).contains(&until_expiry), "{until_expiry}");
    check_new_token(&west, &east, &access).await;

    mirror.end().await;

    // Nothing differs, so a mirror that compares all objects often writes nothing.
    let config = Config {
        refresh_period: Duration::from_secs(1),
        ..mirror_config(Scope::Link("east".to_owned()))
    };
    let mirror = Mirror::start_with(&west, "controller-east", config).await;
    wait_until_nothing_is_written(&west, &mirror).await;
    mirror.end().await;
}

/// The time until the token expires, in seconds. By default, a token is valid for an hour.
const UNTIL_EXPIRY: &str = "tulle_mirror_credentials_expiry_seconds{target_cluster_name=\"east\"}";
/// Each of these Services causes a plan of its own. The plans follow each other in less than a second.
const BURST_SIZE: usize = 15;
/// How often all mirrors were compared with the exported Services of `east`.
const COMPARISONS: &str = "service_mirror_endpoint_repairs{target_cluster_name=\"east\"}";
