//! API servers for tests are independent of each other and leave nothing behind.

use std::fs;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Api, ListParams, PostParams};
use serde_json::{Value, json};
use tulle_tests::charts::install_custom_resources;
use tulle_tests::cluster::{ApiServer, AuditPolicy, Controllers, Options};
use tulle_tests::eventually::eventually;

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_api_servers_are_independent_and_leave_nothing_behind() {
    let (one, other) = tokio::join!(ApiServer::start(), ApiServer::start());
    let (one, other) = (one.unwrap(), other.unwrap());
    one.create_namespace("here").await.unwrap();
    let pod: Pod = object(json!({
        "metadata": {"name": "web"},
        "spec": {"containers": [{"name": "web", "image": "web"}]},
    }));
    let pods = Api::<Pod>::namespaced(one.client(), "here");
    let pod = pods.create(&PostParams::default(), &pod).await.unwrap();
    assert_eq!(pod.spec.unwrap().service_account_name.as_deref(), Some("default"));

    let other_namespaces = Api::<Namespace>::all(other.client());
    assert!(other_namespaces.get_opt("here").await.unwrap().is_none());
    assert_eq!(
        other
            .kubectl(&["get", "namespace", "default", "-o", "name"])
            .await
            .unwrap(),
        "namespace/default\n"
    );

    let dirs = [one.dir().to_owned(), other.dir().to_owned()];
    drop((one, other));
    assert!(!dirs.iter().any(|dir| dir.exists()));
    let mut mentions = fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        let arguments = fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
        dirs.iter().any(|dir| arguments.contains(dir.to_str().unwrap()))
    });
    assert!(mentions.next().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_account_has_only_its_grants_and_the_audit_log_records_requests() {
    let server = ApiServer::start().await.unwrap();
    let conf = server.service_account_kubeconfig("default", "reader").await.unwrap();
    let conf = conf.to_str().unwrap();
    let list = ["--kubeconfig", conf, "get", "pods", "-o", "name"];
    let refused = server.kubectl(&list).await.unwrap_err().to_string();
    assert!(refused.contains("system:serviceaccount:default:reader"), "{refused}");
    for grant in [
        ["create", "role", "reader", "--verb=list", "--resource=pods"].as_slice(),
        &[
            "create",
            "rolebinding",
            "reader",
            "--role=reader",
            "--serviceaccount=default:reader",
        ],
    ] {
        server.kubectl(grant).await.unwrap();
    }
    eventually("the binding is effective", async || server.kubectl(&list).await.ok()).await;
    let log = server.audit_log().unwrap();
    let lists = log.iter().filter(|record| {
        record.user.username == "system:serviceaccount:default:reader"
            && record.verb == "list"
            && record
                .object_ref
                .as_ref()
                .is_some_and(|object| object.resource == "pods")
    });
    let forbidden: Vec<bool> = lists.map(|record| record.is_forbidden()).collect();
    assert!(
        forbidden.first() == Some(&true) && forbidden.last() == Some(&false),
        "{forbidden:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_policy_with_bodies_records_core_kinds_and_mesh_kinds() {
    let options = Options {
        audit: AuditPolicy::WithBodies,
        ..Options::default()
    };
    let server = ApiServer::start_with(options).await.unwrap();
    install_custom_resources(&server).await.unwrap();
    for kind in [
        "services",
        "servers.policy.linkerd.io",
        "httproutes.gateway.networking.k8s.io",
        "serviceprofiles.linkerd.io",
        "leases.coordination.k8s.io",
        "endpointslices.discovery.k8s.io",
    ] {
        server.kubectl(&["get", kind, "-n", "default"]).await.unwrap();
    }
    let log = server.audit_log().unwrap();
    let by_us = log.iter().filter(|record| record.user_agent.starts_with("kubectl"));
    let lists = by_us.filter(|record| record.verb == "list" && record.stage == "ResponseComplete");
    let kinds = lists.filter_map(|record| Some(record.object_ref.as_ref()?.resource.as_str()));
    assert_eq!(
        kinds.collect::<Vec<_>>(),
        ["services", "servers", "httproutes", "serviceprofiles"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn with_controllers_a_deployment_creates_and_deletes_its_pods() {
    let options = Options {
        controllers: Controllers::All,
        ..Options::default()
    };
    let server = ApiServer::start_with(options).await.unwrap();
    let deployment: Deployment = object(json!({
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "web", "image": "web"}]},
            },
        },
    }));
    let deployments = Api::<Deployment>::namespaced(server.client(), "default");
    deployments.create(&PostParams::default(), &deployment).await.unwrap();
    let pods = Api::<Pod>::namespaced(server.client(), "default");
    let count = async |n: usize| {
        let found = pods.list(&ListParams::default()).await.ok()?;
        (found.items.len() == n).then_some(())
    };
    eventually("two pods", async || count(2).await).await;
    deployments.delete("web", &Default::default()).await.unwrap();
    eventually("no pods", async || count(0).await).await;
    let sets = Api::<ReplicaSet>::namespaced(server.client(), "default");
    assert!(sets.list(&ListParams::default()).await.unwrap().items.is_empty());
}
