//! A machine outside the cluster, set up as in `docs/how-to/virtual-machines.md`, and the leader that maintains its EndpointSlice.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::ensure;
use k8s_openapi::jiff::Timestamp;
use nix::sys::signal::{Signal, kill};
use tulle_bench::run::process::Process;
use tulle_control::trust::CertificateAuthority;
use tulle_tests::hosts::admin_get;
use tulle_tests::machine::{ExternalMachine, IDENTITY};

use tulle_tests::meshed::{Client, MeshedCluster, assert_all_ok, find_process};

/// An address in the network of the nodes.
const ADDR: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 8);
const CLIENT: Client = Client {
    namespace: "simple-app",
    deployment: "client",
    container: "client",
};

#[tokio::test(flavor = "multi_thread")]
async fn an_external_machine_is_meshed_and_its_slice_outlives_the_leader() {
    let mut meshed = MeshedCluster::start().await.unwrap();
    let host = meshed.cluster.add_machine("machine", ADDR).unwrap();
    meshed.apply(APPLICATION).await.unwrap();
    meshed
        .cluster
        .wait_for_deployment("simple-app", "client")
        .await
        .unwrap();

    let files = tempfile::tempdir().unwrap();
    // The proxy runs as another user.
    fs::set_permissions(files.path(), Permissions::from_mode(0o755)).unwrap();
    let selector = "linkerd.io/control-plane-component=destination";
    let path = "get pods -n linkerd -o jsonpath={.items[0].status.podIP} -l";
    let control = meshed.kubectl(&format!("{path} {selector}")).await.unwrap();
    let anchor = CertificateAuthority::read(&meshed.file("ca.crt"), &meshed.file("ca.key")).unwrap();
    let machine = ExternalMachine::new(
        host.clone(),
        ADDR,
        control.parse().unwrap(),
        files.path().join("machine"),
        &anchor,
    )
    .unwrap();

    // A workload that is not ready gets no traffic.
    meshed.apply(machine.file("external.yaml")).await.unwrap();
    meshed.apply(machine.file("policy.yaml")).await.unwrap();
    wait_for_slices(&meshed, &format!("{ADDR}:false")).await;
    let ready = r#"{"status":{"conditions":[{"type":"Ready","status":"True"}]}}"#;
    patch(&meshed, &["--subresource=status", "-p", ready]).await;
    wait_for_slices(&meshed, &format!("{ADDR}:true")).await;

    let _application = machine.start_application().unwrap();
    let _workload_api = machine.start("tulle-workload-api.service").unwrap();
    let init = machine.unit("tulle-init.service");
    machine.run(&init["ExecStart"]).unwrap();
    let mut proxy = machine.start("tulle-proxy.service").unwrap();
    let is_ready = |_: &Process| Ok(admin_get(&host, "/ready").is_ok());
    proxy.wait_for("readiness", is_ready).unwrap();

    // Both sides have verified each other.
    let line = "simple-app-v1.simple-app.svc.cluster.local:80/headers --rate=50 --requests=100";
    let report = meshed.load(CLIENT, line).await.unwrap();
    assert_all_ok(&report, "the machine");
    let client = "default.simple-app.serviceaccount.identity.linkerd.cluster.local";
    let metrics = admin_get(&host, "/metrics").unwrap();
    let verified = format!("client_id=\"{client}\"");
    assert!(metrics.lines().any(|line| line.contains(&verified)), "{metrics}");
    let pod = &meshed.pods("simple-app", "app=client").await.unwrap()[0];
    let metrics = meshed.proxy_metrics("simple-app", pod).await.unwrap();
    let verified = format!("server_id=\"{IDENTITY}\"");
    assert!(metrics.lines().any(|line| line.contains(&verified)), "{metrics}");

    // The machine sends a request to the cluster.
    let path = "get service -n simple-app inside -o jsonpath={.spec.clusterIP}";
    let inside = meshed.kubectl(path).await.unwrap();
    let answer = machine
        .command(&format!("curl -sS -m 20 http://{inside}/headers"))
        .output()
        .unwrap();
    let answer = String::from_utf8_lossy(&answer.stdout).into_owned();
    assert!(
        answer.contains(&format!(r#""l5d-client-id":["{IDENTITY}"]"#)),
        "{answer}"
    );

    assert_slice_outlives_leader(&meshed).await;
}

/// After the leader is killed, another replica continues its work.
async fn assert_slice_outlives_leader(meshed: &MeshedCluster) {
    let scale = "scale -n linkerd deploy/linkerd-destination --replicas=2";
    meshed.kubectl(scale).await.unwrap();
    meshed
        .cluster
        .wait_for_deployment("linkerd", "linkerd-destination")
        .await
        .unwrap();
    let holder = async || {
        let path = "get lease -n linkerd linkerd-destination-endpoint-write -o jsonpath={.spec.holderIdentity}";
        meshed.kubectl(path).await
    };
    let leader = holder().await.unwrap();
    let hostname = format!("HOSTNAME={leader}\0");
    let process = find_process("the process of the leader", |read| {
        read("comm").trim() == "tulle-control" && read("environ").contains(&hostname)
    });
    let process = process.unwrap();
    // A killed container would restart under the same name, and hold the lease again. A stopped process neither restarts nor gives up
    // the lease when its pod is deleted.
    kill(process, Signal::SIGSTOP).unwrap();
    let killed = Timestamp::now();
    let delete = format!("delete pod -n linkerd {leader} --force --grace-period=0");
    meshed.kubectl(&delete).await.unwrap();
    // Fails if the kubelet has already killed it.
    let _ = kill(process, Signal::SIGKILL);
    let moved = r#"{"spec":{"workloadIPs":[{"ip":"172.30.0.9"}]}}"#;
    patch(meshed, &["-p", moved]).await;
    wait_for_slices(meshed, "172.30.0.9:true").await;
    let written = Timestamp::now().duration_since(killed);
    assert_ne!(holder().await.unwrap(), leader);
    let path = "get lease -n linkerd linkerd-destination-endpoint-write -o jsonpath={.spec.acquireTime}";
    let acquired: Timestamp = meshed.kubectl(path).await.unwrap().parse().unwrap();
    let took = acquired.duration_since(killed);
    let [took_s, written_s] = [took, written].map(|of| of.as_secs_f64());
    eprintln!(
        "another replica leads {took_s:.1} s after the leader was killed, and has written after {written_s:.1} s"
    );
    assert!(took_s <= 30.0, "{took_s:.1} s");
}

async fn patch(meshed: &MeshedCluster, args: &[&str]) {
    let workload = "externalworkload/external-simple-app-v1-0e340584";
    let fixed = ["patch", "-n", "simple-app", workload, "--type=merge"];
    meshed.cluster.kubectl(&[&fixed[..], args].concat()).await.unwrap();
}

/// Waits until the slices of the control plane have these addresses, each with its readiness.
async fn wait_for_slices(meshed: &MeshedCluster, expected: &str) {
    let path = "jsonpath={range .items[*].endpoints[*]}{.addresses[0]}:{.conditions.ready}{end}";
    let ours = "endpointslice.kubernetes.io/managed-by=linkerd-external-workloads-controller,\
                kubernetes.io/service-name=simple-app-v1";
    let args = ["get", "endpointslices", "-n", "simple-app", "-l", ours, "-o", path];
    let found = async || {
        let found = meshed.cluster.kubectl(&args).await?;
        ensure!(found == expected, "slices have {found:?}, not {expected:?}");
        Ok(())
    };
    meshed
        .cluster
        .wait_until("slices follow their workload", found)
        .await
        .unwrap();
}

const APPLICATION: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: simple-app, annotations: {linkerd.io/inject: enabled}}
---
apiVersion: v1
kind: Service
metadata: {name: inside, namespace: simple-app}
spec:
  selector: {app: client}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: client, namespace: simple-app}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}}
    spec:
      containers:
        - name: client
          image: ghcr.io/tulle-mesh/bench:0.1.0
          args: [serve, '--http=0.0.0.0:8080']
";
