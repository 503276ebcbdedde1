//! The output of `linkerd multicluster link-gen` links a cluster to tulle.

use serde::Deserialize as _;

use super::commands::{new_anchor, put_configuration};
use super::remote_endpoints::{CONTROL_PLANE, Destination, next, slice};
use super::*;
use crate::cli::{assert_contains, tulle};

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_linkerd_printed_is_used() {
    let (west, east) = tokio::join!(cluster(&["east"]), cluster(&[]));
    let account = ["create", "serviceaccount", "linkerd-destination", "-n", CONTROL_PLANE];
    west.kubectl(&account).await.unwrap();
    let anchor = new_anchor();
    for server in [&west, &east] {
        put_configuration(server, "cluster.local", &anchor).await;
    }
    apply(&east, &service("web", &json!({"mirror.linkerd.io/exported": "true"}))).await;
    apply(&east, &slice_of(&endpoints("web", &json!([{"ip": "10.1.0.1"}])))).await;
    let direct = json!({"mirror.linkerd.io/exported": "remote-discovery"});
    apply(&east, &service("app", &direct)).await;
    apply(&east, &slice(&["10.2.0.1"])).await;
    let access = fs::read_to_string(remote_access(&east).await).unwrap();
    for object in printed_objects(&serde_yaml_ng::from_str(&access).unwrap()) {
        apply(&west, &object).await;
    }

    let mirror = Mirror::start_for_link(&west, "east").await;
    wait_for_addresses(&west, "web-east", 1).await;
    wait_for_condition(&west, "east", "mirrorServices", ("app", "True", "")).await;
    let destination = Destination::start(&west).await;
    let mut stream = eventually("endpoints of the other cluster", async || {
        destination.get("app-east").await.ok()
    })
    .await;
    assert_eq!(next(&mut stream).await, "+10.2.0.1:8080");
    let checked = tulle(&west, "mc check --wait 0 --timeout 10s").await;
    assert_contains(
        &checked.out,
        &[
            "√ Link resources are valid",
            "east: created by linkerd/cli git-b24cd405",
            "√ remote cluster access credentials are valid",
            "√ the destination service has the credentials of linked clusters",
            "√ clusters share trust anchors",
            "√ service mirror controller has required permissions",
            "√ all mirror services are part of a Link",
        ],
    );
    mirror.end().await;
}

/// The objects that Linkerd printed, with the server and the token of this kubeconfig.
fn printed_objects(access: &Value) -> Vec<Value> {
    let path = format!(
        "{}/../proto/recorded/multicluster/link-gen.yaml",
        env!("CARGO_MANIFEST_DIR")
    );
    let text = fs::read_to_string(path).unwrap();
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    let mut objects: Vec<Value> = documents
        .map(|document| Value::deserialize(document).unwrap())
        .collect();
    objects.retain(|object| !object.is_null());
    assert_eq!(objects.len(), 3);
    for object in objects.iter_mut().filter(|object| object["kind"] == "Secret") {
        let kubeconfig: ByteString = serde_json::from_value(object["data"]["kubeconfig"].take()).unwrap();
        let mut kubeconfig: Value = serde_yaml_ng::from_slice(&kubeconfig.0).unwrap();
        kubeconfig["clusters"][0]["cluster"] = access["clusters"][0]["cluster"].clone();
        kubeconfig["users"][0]["user"] = access["users"][0]["user"].clone();
        object["data"]["kubeconfig"] = json!(ByteString(kubeconfig.to_string().into_bytes()));
    }
    objects
}
