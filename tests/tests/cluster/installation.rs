//! The commands of `docs/quickstart.md` as they stand there, on two nodes; what the control plane then shows of itself,
//! asks the API server for, and leaves behind.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Output;

use anyhow::ensure;
use tokio::process::Command;
use tokio::time::Instant;
use tulle_tests::charts::{Helm, Repository, path_of};
use tulle_tests::cluster::{AuditRecord, Cluster};
use tulle_tests::programs;

use crate::metrics::{self, Pages};
use crate::permissions::{self, Excuse, Permission};

/// What is granted, and used only at times that this test does not wait for.
const EXCUSES: &[Excuse] = &[
    Excuse {
        account: "linkerd-proxy-injector",
        verb: "get",
        resource: "namespaces",
        why: "only for a pod that is quicker than the watch",
    },
    Excuse {
        account: "linkerd-proxy-injector",
        verb: "get",
        resource: "replicasets",
        why: "only for a pod that is quicker than the watch",
    },
    Excuse {
        account: "linkerd-proxy-injector",
        verb: "get",
        resource: "jobs",
        why: "only for a pod that is quicker than the watch",
    },
    Excuse {
        account: "linkerd-identity",
        verb: "patch",
        resource: "events",
        why: "only an event that repeats is counted",
    },
    Excuse {
        account: "linkerd-proxy-injector",
        verb: "patch",
        resource: "events",
        why: "only an event that repeats is counted",
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn the_tutorial_meshes_an_application_with_permissions_that_are_just_enough() {
    let cluster = Cluster::start(2).await.unwrap();
    let repository = Repository::start().await.unwrap();
    let files = tempfile::tempdir().unwrap();
    let before = everything(&cluster).await;
    let run = async |block: &str| {
        let mut bash = Command::new("bash");
        // The repository is the only thing that is not where the page says.
        let script = block.replace("https://tulle-mesh.github.io/tulle", &repository.url());
        bash.args(["-euo", "pipefail", "-c", &script])
            .current_dir(files.path())
            .env("PATH", path())
            .env("HOME", files.path())
            .env("KUBECONFIG", cluster.kubeconfig_outside());
        let Output { status, stdout, stderr } = bash.output().await.unwrap();
        let [stdout, stderr] = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(status.success(), "{script}\n{stdout}{stderr}");
        stdout
    };
    let blocks = blocks();
    let [
        certificates,
        install,
        ready,
        application,
        look,
        identities,
        policy,
        clean_up,
    ] = &blocks[..]
    else {
        panic!("the tutorial has {} blocks", blocks.len())
    };

    run(certificates).await;
    let begun = Instant::now();
    run(install).await;
    let helm = begun.elapsed();
    run(ready).await;
    eprintln!(
        "helm took {helm:.1?}, every pod was ready after {:.1?}",
        begun.elapsed()
    );
    let metrics = Pages::read(&cluster).await.unwrap();
    shows_what_the_tutorial_shows(&cluster).await;

    run(application).await;
    let answered = async || {
        let logs = cluster
            .kubectl(&["logs", "-n", "quickstart", "deploy/client", "-c", "client"])
            .await?;
        ensure!(logs.contains("\"2xx\""), "{logs}");
        Ok(())
    };
    cluster.until("the client gets answers", answered).await.unwrap();
    run(look).await;
    run(identities).await;
    run(policy).await;

    work(&cluster).await;
    metrics::all_move(&cluster, &metrics).await;
    may_what_it_does(&cluster, files.path()).await;

    cluster.kubectl(&["delete", "namespace", "work"]).await.unwrap();
    run(clean_up).await;
    let left = async || {
        let after = everything(&cluster).await;
        let left: Vec<_> = after.difference(&before).collect();
        ensure!(
            left.iter().all(|name| name.contains("gateway.networking.k8s.io")),
            "{left:?}"
        );
        ensure!(left.len() == 4, "definitions of the Gateway API: {left:?}");
        Ok(())
    };
    cluster
        .until("nothing is left but what is to be kept", left)
        .await
        .unwrap();
}

/// The lines of the tutorials about logs, watches and leases.
async fn shows_what_the_tutorial_shows(cluster: &Cluster) {
    let logs = async || {
        cluster
            .kubectl(&[
                "logs",
                "-n",
                "linkerd",
                "deploy/linkerd-destination",
                "-c",
                "destination",
            ])
            .await
    };
    let lines = async || {
        let logs = logs().await?;
        for kind in [
            "externalworkloads",
            "endpointslices",
            "jobs",
            "serviceprofiles",
            "servers",
            "services",
            "pods",
        ] {
            let start = format!("/{kind}?allowWatchBookmarks=true&resourceVersion=");
            let watch = |line: &str| line.contains(&start) && line.contains("&watch=true 200 OK in ");
            ensure!(logs.lines().any(watch), "no watch of {kind} in\n{logs}");
        }
        Ok(())
    };
    cluster.until("watches are in the log", lines).await.unwrap();

    let lease = "/namespaces/linkerd/leases/linkerd-destination-endpoint-write";
    let renewals = |log: &[AuditRecord]| {
        let ours = |record: &&AuditRecord| record.verb == "update" && record.uri.contains(lease);
        let times = log
            .iter()
            .filter(ours)
            .map(|record| record.request_received_timestamp.clone());
        times.collect::<Vec<_>>()
    };
    let renewed = async || {
        let times = renewals(&cluster.audit_log()?);
        ensure!(times.len() >= 6, "{times:?}");
        Ok(())
    };
    cluster.until("the lease is renewed", renewed).await.unwrap();
    let log = cluster.audit_log().unwrap();
    // `2026-01-02T03:04:05.678901Z`; a minute may end between two.
    let second = |time: &String| time[17..26].parse::<f64>().unwrap();
    let times: Vec<f64> = renewals(&log).iter().map(second).collect();
    let gaps: Vec<f64> = times
        .windows(2)
        .map(|pair| (pair[1] - pair[0]).rem_euclid(60.))
        .collect();
    // A busy machine may delay one; none comes early.
    let shortest = gaps.iter().copied().fold(f64::INFINITY, f64::min);
    assert!((1.5..3.).contains(&shortest), "renewed after {gaps:?} s");

    let watches = |record: &&AuditRecord| {
        record.verb == "watch" && record.user.username == "system:serviceaccount:linkerd:linkerd-destination"
    };
    assert!(
        log.iter().filter(watches).count() > 10,
        "destination watches under its own account"
    );
}

/// What the accounts of the control plane ask for is what they may, and the other way around.
async fn may_what_it_does(cluster: &Cluster, files: &Path) {
    let helm = Helm::new().unwrap();
    let values = [
        "identityTrustAnchorsPEM",
        "identity.issuer.tls.crtPEM",
        "identity.issuer.tls.keyPEM",
    ];
    let pems = ["ca.crt", "issuer.crt", "issuer.key"];
    let set = values
        .iter()
        .zip(pems)
        .map(|(value, pem)| format!("--set-file={value}={}", files.join("certificates").join(pem).display()));
    let set: Vec<String> = set.collect();
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    let rendered = helm.template("tulle-control-plane", &set).unwrap();
    let objects: Vec<serde_json::Value> = serde_yaml_ng::Deserializer::from_str(&rendered)
        .map(|document| serde::Deserialize::deserialize(document).unwrap())
        .collect();
    let granted = permissions::granted(&objects);
    let unused = |used: &BTreeSet<Permission>| -> Vec<String> {
        let unused = granted.difference(used);
        unused
            .filter(|one| !EXCUSES.iter().any(|excuse| excuse.covers(one)))
            .map(ToString::to_string)
            .collect()
    };
    let all_used = async || {
        let unused = unused(&permissions::used(&cluster.audit_log()?));
        ensure!(unused.is_empty(), "granted and never used:\n{}", unused.join("\n"));
        Ok(())
    };
    cluster.until("every permission is used", all_used).await.unwrap();
    let log = cluster.audit_log().unwrap();
    for permission in granted.difference(&permissions::used(&log)) {
        let excuse = EXCUSES.iter().find(|excuse| excuse.covers(permission));
        eprintln!(
            "not used here: {permission}: {}",
            excuse.map_or("?", |excuse| excuse.why)
        );
    }
    let refused: Vec<String> = permissions::refused(&log).iter().map(ToString::to_string).collect();
    assert!(refused.is_empty(), "asked for in vain:\n{}", refused.join("\n"));
}

/// Makes the control plane write what it writes: slices that come, change and go, a status of each kind, certificates.
async fn work(cluster: &Cluster) {
    let file = cluster.dir().join("work.yaml");
    fs::write(&file, OBJECTS).unwrap();
    let kubectl = async |args: &[&str]| cluster.kubectl(args).await.unwrap();
    kubectl(&["create", "namespace", "work"]).await;
    kubectl(&["apply", "-n", "work", "-f", file.to_str().unwrap()]).await;
    let workload = ["patch", "-n", "work", "externalworkload/vm", "--type=merge", "-p"];
    let ready = r#"{"status": {"conditions": [{"type": "Ready", "status": "True"}]}}"#;
    kubectl(&[&workload[..], &[ready, "--subresource=status"]].concat()).await;
    let slices = async |expected: &str| {
        let path = "jsonpath={.items[*].endpoints[*].addresses[*]}";
        let found = async || {
            let found = cluster
                .kubectl(&["get", "endpointslices", "-n", "work", "-o", path])
                .await?;
            ensure!(found == expected, "slices have {found:?}, not {expected:?}");
            Ok(())
        };
        cluster.until("slices follow their workload", found).await.unwrap();
    };
    slices("192.0.2.10").await;
    kubectl(&[&workload[..], &[r#"{"spec": {"workloadIPs": [{"ip": "192.0.2.11"}]}}"#]].concat()).await;
    slices("192.0.2.11").await;
    kubectl(&["delete", "-n", "work", "externalworkload/vm"]).await;
    slices("").await;
    for webhook in ["proxy-injector", "sp-validator", "policy-validator"] {
        // A broken certificate is replaced.
        let secret = format!("secret/linkerd-{webhook}-k8s-tls");
        let broken = r#"{"data": {"tls.crt": "YnJva2Vu"}}"#;
        kubectl(&["patch", "-n", "linkerd", &secret, "--type=merge", "-p", broken]).await;
    }
}

/// The names of all objects that an installation can make.
async fn everything(cluster: &Cluster) -> BTreeSet<String> {
    let kinds = "crd,clusterrole,clusterrolebinding,mutatingwebhookconfiguration,validatingwebhookconfiguration,\
                 namespace,role,rolebinding,lease,configmap,secret,serviceaccount,service,deployment,pdb";
    let names = cluster.kubectl(&["get", kinds, "-A", "-o", "name"]).await.unwrap();
    names.lines().map(str::to_owned).collect()
}

/// The blocks of commands of the tutorial.
fn blocks() -> Vec<String> {
    let page = Path::new(&path_of("..")).join("docs/quickstart.md");
    let page = fs::read_to_string(page).unwrap();
    let blocks = page.split("```sh\n").skip(1);
    blocks
        .map(|rest| rest.split("```").next().unwrap().to_owned())
        .collect()
}

fn path() -> OsString {
    let tools: BTreeSet<_> = ["helm", "step", "kubectl"]
        .map(|tool| programs::find(tool).unwrap().parent().unwrap().to_owned())
        .into();
    let path = env::var_os("PATH").unwrap_or_default();
    env::join_paths(tools.into_iter().chain(env::split_paths(&path))).unwrap()
}

const OBJECTS: &str = "
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 80}]
---
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {name: vm, labels: {app: web}}
spec:
  meshTLS: {identity: 'spiffe://cluster.local/vm', serverName: vm}
  ports: [{port: 80}]
  workloadIPs: [{ip: 192.0.2.10}]
---
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: web}
spec:
  externalWorkloadSelector: {matchLabels: {app: web}}
  port: 80
---
apiVersion: policy.linkerd.io/v1alpha1
kind: HTTPLocalRateLimitPolicy
metadata: {name: web}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: web}
  total: {requestsPerSecond: 100}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: EgressNetwork
metadata: {name: all}
spec: {trafficPolicy: Allow}
---
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {name: policy}
spec: {parentRefs: [{name: web, kind: Server}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: http}
spec: {parentRefs: [{name: web, kind: Service, group: core, port: 80}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: grpc}
spec: {parentRefs: [{name: web, kind: Service, group: core, port: 80}], rules: [{}]}
---
apiVersion: gateway.networking.k8s.io/v1alpha2
kind: TLSRoute
metadata: {name: tls}
spec: {parentRefs: [{name: web, kind: Service, group: core, port: 80}], rules: [{backendRefs: [{name: web, port: 80}]}]}
---
apiVersion: gateway.networking.k8s.io/v1alpha2
kind: TCPRoute
metadata: {name: tcp}
spec: {parentRefs: [{name: web, kind: Service, group: core, port: 80}], rules: [{backendRefs: [{name: web, port: 80}]}]}
";
