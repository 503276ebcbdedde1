//! Several Links, with a service mirror for each, and then with one for all.

use super::all_links::check_all_links;
use super::exported_services::wait_for_event;
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn services_of_several_clusters_join_and_leave_a_federated_service() {
    // All Links refer to one cluster.
    let (west, other) = tokio::join!(cluster(&LINKS), cluster(&[]));
    let access = remote_access(&other).await;
    let selector = "mirror.linkerd.io/federated=member".parse().unwrap();
    let members = LocalMembers::new(selector, "", "");
    let this = Mirror::start(&west, "linkerd-local-service-mirror", Scope::ThisCluster(members)).await;
    let mut mirrors = BTreeMap::new();
    for name in LINKS {
        apply(&west, &link(name)).await;
        put_credentials(&west, name, &access).await;
        mirrors.insert(name, Mirror::start_for_link(&west, name).await);
    }
    for (name, mirror) in &mirrors {
        let synced = SYNCED.replace("east", name);
        let is_synced = async || (mirror.metric(&synced)? == 1.0).then_some(());
        eventually(&format!("{name} is listed"), is_synced).await;
    }
    let local = services(west.client());
    let members = async || {
        let found = local.get_opt("web-federated").await.unwrap()?;
        let annotations = found.metadata.annotations.unwrap_or_default();
        let value = |name: &str| annotations.get(name).cloned().unwrap_or_default();
        let remote = value("multicluster.linkerd.io/remote-discovery");
        let mut remote: Vec<String> = remote.split(',').map(str::to_owned).collect();
        remote.sort_unstable();
        Some((value("multicluster.linkerd.io/local-discovery"), remote.join(",")))
    };
    let wait_for = async |own: &str, remote: &str| {
        let expected = Some((own.to_owned(), remote.to_owned()));
        let holds = async || (members().await == expected).then_some(());
        eventually(&format!("the members are {expected:?}"), holds).await;
    };
    // All controllers write the federated Service at once.
    let member = json!({"mirror.linkerd.io/federated": "member"});
    apply(&west, &service("web", &member)).await;
    apply(&other, &service("web", &member)).await;
    let all = LINKS.map(|name| format!("web@{name}")).join(",");
    wait_for("web", &all).await;
    for name in LINKS {
        wait_for_condition(&west, name, "federatedServices", ("web", "True", "")).await;
    }
    apply(&west, &service("web", &json!({}))).await;
    wait_for("", &all).await;
    check_rejected_local_member(&west, &this).await;

    // A member that leaves while its controller does not run is removed when the controller runs again.
    for name in ["east", "north"] {
        mirrors.remove(name).unwrap().end().await;
    }
    services(other.client())
        .delete("web", &Default::default())
        .await
        .unwrap();
    apply(&other, &service("still", &member)).await;
    wait_for("", "web@east,web@north").await;
    mirrors.insert("east", Mirror::start_for_link(&west, "east").await);
    wait_for("", "web@north").await;
    mirrors.insert("north", Mirror::start_for_link(&west, "north").await);
    wait_until_gone(&west, "web-federated").await;
    assert!(
        Api::<Endpoints>::namespaced(west.client(), "shop")
            .get_opt("still-federated")
            .await
            .unwrap()
            .is_none()
    );
    for mirror in mirrors.into_values().chain([this]) {
        mirror.end().await;
    }
    Box::pin(check_all_links(&west, &other)).await;
}

/// A Service of this cluster that cannot join a federated Service has an Event with the cause, and is counted while it has the label.
async fn check_rejected_local_member(west: &ApiServer, this: &Mirror) {
    let headless = |labels: Value| {
        let mut headless = service("headless", &labels);
        headless["spec"]["clusterIP"] = json!("None");
        headless
    };
    apply(west, &headless(json!({"mirror.linkerd.io/federated": "member"}))).await;
    wait_for_event(west, "shop", "headless", "a headless Service cannot join").await;
    let n_counted = || {
        let labels = "kind=\"Service\",namespace=\"shop\",name=\"headless\",field=\"metadata.labels\"";
        this.metric(&format!("unserved_configuration{{{labels}}}"))
    };
    assert_eq!(n_counted(), Some(1.0));
    apply(west, &headless(json!({}))).await;
    eventually("the Service is not counted any more", async || {
        (n_counted().unwrap_or_default() == 0.0).then_some(())
    })
    .await;
    let federated = services(west.client()).get_opt("headless-federated").await.unwrap();
    assert!(federated.is_none());
}
