//! Discovery while the control plane cannot tell which pod has an address.

use std::net::SocketAddr;

use tulle_tests::apps;
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, mesh};

#[test]
fn requests_to_an_address_of_two_pods_wait_and_never_use_plaintext() {
    // This pod has the podIP of `web`, the second workload.
    let ghost = "\
apiVersion: v1
kind: Pod
metadata: {name: ghost, namespace: shop, labels: {app: ghost}}
spec: {serviceAccountName: ghost, containers: [{name: app}]}
status: {podIP: 10.66.0.11}
";
    let mesh = mesh().workload("client").workload("web").manifest("pod-ghost", ghost);
    mesh.run(async |mesh: &Mesh| {
        apps::start_echo(mesh, "web").await;
        let dst = SocketAddr::from((mesh.ip("web"), HTTP));
        assert_eq!(dst.to_string(), "10.66.0.11:8080");
        let remove_ghost = async {
            let ambiguous = ["grpc_status=\"9\""];
            eventually("the control plane reports the address as ambiguous", async || {
                (mesh.metric("client", "control_response_total", &ambiguous).await >= 2.).then_some(())
            })
            .await;
            mesh.remove("pod-ghost");
        };
        let (answer, ()) = tokio::join!(mesh.get("client", dst, "/"), remove_ghost);
        assert_eq!(answer.text(), "web\n");
        let to_web = ["direction=\"outbound\"", "target_addr=\"10.66.0.11:8080\""];
        let with = |tls: &'static str| [to_web[0], to_web[1], tls];
        mesh.wait_for_metric("client", "request_total", &with("tls=\"true\""), 1.0)
            .await;
        assert_eq!(
            mesh.metric("client", "request_total", &with("tls=\"no_identity\""))
                .await,
            0.0
        );
    });
}
