//! Runs the commands of `docs/tutorials/first-cluster.md` unchanged on two nodes. Then checks what the control plane reports about
//! itself and the application, which requests it sends to the API server, and what it leaves behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::ensure;
use tokio::process::Command;
use tokio::time::Instant;
use tulle_tests::charts::{Helm, Repository, chart_path};
use tulle_tests::cluster::{AuditRecord, Cluster};
use tulle_tests::{commands, programs};

use crate::metrics::{self, MetricsSnapshot};
use crate::permissions::{self, Permission, UnusedGrant};
use crate::telemetry;

/// Grants whose use the audit log of this test does not show, with the reason.
const ALLOWED_UNUSED_GRANTS: &[UnusedGrant] = &[
    UnusedGrant {
        account: "linkerd-proxy-injector",
        verb: "get",
        resource: "namespaces",
        why: "only if the watch has not delivered the object yet",
    },
    UnusedGrant {
        account: "linkerd-proxy-injector",
        verb: "get",
        resource: "replicasets",
        why: "only if the watch has not delivered the object yet",
    },
    UnusedGrant {
        account: "linkerd-proxy-injector",
        verb: "get",
        resource: "jobs",
        why: "only if the watch has not delivered the object yet",
    },
    UnusedGrant {
        account: "linkerd-identity",
        verb: "patch",
        resource: "events",
        why: "patch is sent only for a repeated event",
    },
    UnusedGrant {
        account: "linkerd-proxy-injector",
        verb: "patch",
        resource: "events",
        why: "patch is sent only for a repeated event",
    },
    UnusedGrant {
        account: "linkerd-destination",
        verb: "create",
        resource: "secrets",
        why: "a server-side apply that creates an object is logged as a patch",
    },
    UnusedGrant {
        account: "linkerd-proxy-injector",
        verb: "create",
        resource: "secrets",
        why: "a server-side apply that creates an object is logged as a patch",
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn the_tutorial_meshes_an_application_with_exactly_the_needed_permissions() {
    let cluster = Cluster::start(2).await.unwrap();
    let repository = Repository::start().await.unwrap();
    let files = tempfile::tempdir().unwrap();
    let before = all_objects(&cluster).await;
    let run = async |block: &str| {
        let mut bash = Command::new("setpriv");
        // Only the URL of the chart repository differs from the page.
        let script = block.replace("https://tulle-mesh.github.io/tulle", &repository.url());
        bash.args(["--pdeathsig=KILL", "bash"])
            .current_dir(files.path())
            .env("PATH", programs::search_path())
            .env("HOME", files.path())
            .env("KUBECONFIG", cluster.kubeconfig_outside());
        commands::run_script(bash, &script).await.unwrap()
    };
    let blocks = blocks();
    let [
        create_certificates,
        install,
        wait_until_ready,
        apply_application,
        show_pods_and_log,
        show_identities,
        apply_policy,
        clean_up,
    ] = &blocks[..]
    else {
        panic!("the tutorial has {} blocks", blocks.len())
    };

    run(create_certificates).await;
    let begun = Instant::now();
    run(install).await;
    let helm_took = begun.elapsed();
    run(wait_until_ready).await;
    eprintln!(
        "helm took {helm_took:.1?}, every pod was ready after {:.1?}",
        begun.elapsed()
    );
    let metrics = MetricsSnapshot::read(&cluster).await.unwrap();
    check_log_and_requests_of_destination(&cluster).await;

    run(apply_application).await;
    let answered = async || {
        let logs = cluster
            .kubectl(&["logs", "-n", "quickstart", "deploy/client", "-c", "client"])
            .await?;
        ensure!(logs.contains("\"2xx\""), "{logs}");
        Ok(())
    };
    cluster.wait_until("the client gets answers", answered).await.unwrap();
    run(show_pods_and_log).await;
    run(show_identities).await;
    run(apply_policy).await;
    telemetry::check_telemetry(&cluster).await;

    exercise_control_plane(&cluster).await;
    metrics::wait_for_all_changes(&cluster, &metrics).await;
    check_permissions(&cluster, files.path()).await;
    // The telemetry API is available again with another certificate.
    telemetry::wait_until_available(&cluster).await;

    cluster.kubectl(&["delete", "namespace", "work"]).await.unwrap();
    // What remains until the namespace is deleted: the namespace, and what Kubernetes creates in each namespace.
    let of_namespace = [
        "Namespace/linkerd",
        "ConfigMap/kube-root-ca.crt",
        "ServiceAccount/default",
    ];
    let namespace = "kubectl delete namespace linkerd";
    let (uninstall, rest) = clean_up.split_once(namespace).expect("the namespace goes last");
    assert_eq!(rest.trim(), "");
    run(uninstall).await;
    wait_until_only_left(&cluster, &before, &of_namespace).await;
    run(namespace).await;
    wait_until_only_left(&cluster, &before, &[]).await;
}

/// Checks destination's log lines about watches, EndpointSlices and the lease, and its watches and renewals in the audit log.
async fn check_log_and_requests_of_destination(cluster: &Cluster) {
    let lease = "/namespaces/linkerd/leases/linkerd-destination-endpoint-write";
    let lines = async || {
        let logs = cluster.kubectl(LOGS).await?;
        let ensure_line = |what: &str, parts: &[&str]| {
            let is_logged = logs.lines().any(|line| parts.iter().all(|part| line.contains(part)));
            ensure!(is_logged, "no {what} in\n{logs}");
            Ok(())
        };
        for path in WATCHES {
            let start = format!(" msg=\"GET https://10.247.0.1:443{path}?allowWatchBookmarks=true&resourceVersion=");
            ensure_line(path, &["level=info", &start, "&watch=true 200 OK in "])?;
        }
        for service in ["linkerd-dst", "linkerd-policy", "linkerd-identity-headless"] {
            let of = format!(" addr=\":8086\" component=service-publisher ns=linkerd svc={service}");
            let updating = format!("level=debug msg=\"Updating service for linkerd/{service}\"{of}");
            ensure_line("Updating service", &[&updating])?;
            let adding = format!("level=debug msg=\"Adding ES linkerd/{service}-");
            ensure_line("Adding ES", &[&adding, &of])?;
        }
        let of = " addr=\":8086\" component=service-publisher ns=default svc=kubernetes";
        ensure_line("Adding ES", &[&format!("msg=\"Adding ES default/kubernetes\"{of}")])?;
        let watching = "msg=\"Watching EndpointSlice resources\" addr=\":8086\" component=endpoints-watcher";
        ensure_line("Watching EndpointSlice", &["level=debug ", watching])?;
        ensure_line("waiting for caches", &["level=info msg=\"waiting for caches to sync\""])?;
        ensure_line("caches synced", &["level=info msg=\"caches synced\""])?;
        let put = format!("level=info msg=\"PUT https://10.247.0.1:443/apis/coordination.k8s.io/v1{lease} 200 OK in ");
        ensure_line("renewal", &[&put, " milliseconds\""])
    };
    cluster.wait_until("the lines are in the log", lines).await.unwrap();

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
    cluster.wait_until("the lease is renewed", renewed).await.unwrap();
    let log = cluster.audit_log().unwrap();
    // `2026-01-02T03:04:05.678901Z`; the minute may change between two renewals.
    let second = |time: &String| time[17..26].parse::<f64>().unwrap();
    let times: Vec<f64> = renewals(&log).iter().map(second).collect();
    let gaps: Vec<f64> = times
        .windows(2)
        .map(|pair| (pair[1] - pair[0]).rem_euclid(60.))
        .collect();
    // A busy machine may delay a renewal, but none is early.
    let early = gaps.iter().any(|gap| *gap < 1.5);
    let in_time = gaps.iter().filter(|gap| **gap < 3.).count();
    assert!(!early && in_time * 2 > gaps.len(), "renewed after {gaps:?} s");

    let account = "system:serviceaccount:linkerd:linkerd-destination";
    let of_destination = |record: &&AuditRecord| record.verb == "watch" && record.user.username == account;
    let watches: Vec<_> = log.iter().filter(of_destination).collect();
    for path in WATCHES {
        let start = format!("{path}?allowWatchBookmarks=true&resourceVersion=");
        let watch = watches.iter().find(|record| record.uri.starts_with(&start));
        let watch = watch.unwrap_or_else(|| panic!("no watch of {path} under {account}"));
        assert_eq!(watch.annotations["authorization.k8s.io/decision"], "allow", "{path}");
        if !path.contains("policy.linkerd.io") {
            let reason = &watch.annotations["authorization.k8s.io/reason"];
            let expected = "RBAC: allowed by ClusterRoleBinding \"linkerd-linkerd-destination\" of ClusterRole \
                            \"linkerd-linkerd-destination\" to ServiceAccount \"linkerd-destination/linkerd\"";
            assert_eq!(reason, expected, "{path}");
        }
    }
}

/// The arguments of kubectl that show the log of destination.
const LOGS: &[&str] = &[
    "logs",
    "-n",
    "linkerd",
    "deploy/linkerd-destination",
    "-c",
    "destination",
];
/// Watches of destination.
const WATCHES: &[&str] = &[
    "/apis/workload.linkerd.io/v1beta1/externalworkloads",
    "/apis/discovery.k8s.io/v1/endpointslices",
    "/apis/batch/v1/jobs",
    "/api/v1/endpoints",
    "/apis/linkerd.io/v1alpha2/serviceprofiles",
    "/apis/policy.linkerd.io/v1beta3/servers",
    "/api/v1/services",
    "/api/v1/pods",
    "/apis/apps/v1/replicasets",
    "/api/v1/nodes",
];

/// Checks that the accounts of the control plane use every grant and request nothing else.
async fn check_permissions(cluster: &Cluster, files: &Path) {
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
    let granted = permissions::granted_permissions(&objects);
    let unused = |log: &[AuditRecord]| -> Vec<&Permission> {
        let used = permissions::permitted_requests(log, permissions::CONTROL_PLANE);
        let is_used = |grant: &&Permission| used.iter().any(|requested| grant.is_used_by(requested));
        granted.iter().filter(|grant| !is_used(grant)).collect()
    };
    let allowed_grant = |grant: &Permission| {
        ALLOWED_UNUSED_GRANTS
            .iter()
            .find(|allowed_grant| allowed_grant.covers(grant))
    };
    let all_used = async || {
        let unused = unused(&cluster.audit_log()?);
        let unused = unused.into_iter().filter(|grant| allowed_grant(grant).is_none());
        let unused: Vec<_> = unused.map(ToString::to_string).collect();
        ensure!(unused.is_empty(), "granted and never used:\n{}", unused.join("\n"));
        Ok(())
    };
    cluster.wait_until("every permission is used", all_used).await.unwrap();
    let log = cluster.audit_log().unwrap();
    for grant in unused(&log) {
        eprintln!(
            "not used here: {grant}: {}",
            allowed_grant(grant).map_or("?", |allowed_grant| allowed_grant.why)
        );
    }
    let refused: Vec<String> = permissions::refused_requests(&log, permissions::CONTROL_PLANE)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert!(refused.is_empty(), "refused requests:\n{}", refused.join("\n"));
}

/// Makes the control plane write everything it can write: EndpointSlices that are created, changed and deleted, a
/// status of each kind, certificates.
async fn exercise_control_plane(cluster: &Cluster) {
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
        cluster.wait_until("slices follow their workload", found).await.unwrap();
    };
    slices("192.0.2.10").await;
    kubectl(&[&workload[..], &[r#"{"spec": {"workloadIPs": [{"ip": "192.0.2.11"}]}}"#]].concat()).await;
    slices("192.0.2.11").await;
    kubectl(&["delete", "-n", "work", "externalworkload/vm"]).await;
    slices("").await;
    // A workload with the address of a Service gets a condition about it in its status.
    let ip = kubectl(&["get", "-n", "work", "service/web", "-o", "jsonpath={.spec.clusterIP}"]).await;
    let file = cluster.dir().join("claim.yaml");
    fs::write(&file, CLAIM.replace("ADDRESS", ip.trim())).unwrap();
    kubectl(&["apply", "-n", "work", "-f", file.to_str().unwrap()]).await;
    let written = async || {
        let logs = cluster.kubectl(LOGS).await?;
        for line in [
            "Updating ES work/",
            "Deleting ES work/",
            "reconciliation result for work/web",
        ] {
            ensure!(logs.contains(line), "no {line} in\n{logs}");
        }
        Ok(())
    };
    cluster.wait_until("slices are in the log", written).await.unwrap();
    for service in ["proxy-injector", "sp-validator", "policy-validator", "telemetry"] {
        // A broken certificate is replaced.
        let secret = format!("secret/linkerd-{service}-k8s-tls");
        let broken = r#"{"data": {"tls.crt": "YnJva2Vu"}}"#;
        kubectl(&["patch", "-n", "linkerd", &secret, "--type=merge", "-p", broken]).await;
    }
}

/// Waits until these kinds and names are all that is left of the installation, besides the definitions of the Gateway API, which
/// stay because other users may need them.
async fn wait_until_only_left(cluster: &Cluster, before: &BTreeSet<String>, allowed: &[&str]) {
    let is_cleaned_up = async || {
        let after = all_objects(cluster).await;
        let remaining = after.difference(before);
        let (definitions, others): (Vec<_>, Vec<_>) =
            remaining.partition(|name| name.contains("gateway.networking.k8s.io"));
        let others: BTreeSet<&str> = others.iter().map(|name| name.split_once(' ').unwrap().1).collect();
        ensure!(others == allowed.iter().copied().collect(), "{others:?} are left");
        ensure!(
            definitions.len() == 4,
            "definitions of the Gateway API: {definitions:?}"
        );
        Ok(())
    };
    let what = "only objects that are kept remain";
    cluster.wait_until(what, is_cleaned_up).await.unwrap();
}

/// All objects that an installation can create, as namespace, kind and name.
async fn all_objects(cluster: &Cluster) -> BTreeSet<String> {
    let kinds = "crd,clusterrole,clusterrolebinding,mutatingwebhookconfiguration,validatingwebhookconfiguration,\
                 namespace,role,rolebinding,lease,configmap,secret,serviceaccount,service,deployment,pdb,\
                 endpointslice";
    let each = "jsonpath={range .items[*]}{.metadata.namespace} {.kind}/{.metadata.name}{\"\\n\"}{end}";
    let names = cluster.kubectl(&["get", kinds, "-A", "-o", each]).await.unwrap();
    names.lines().map(str::to_owned).collect()
}

/// The code blocks with commands of the tutorial.
fn blocks() -> Vec<String> {
    let page = Path::new(&chart_path("..")).join("docs/tutorials/first-cluster.md");
    let page = fs::read_to_string(page).unwrap();
    let blocks = page.split("```sh\n").skip(1);
    blocks
        .map(|rest| rest.split("```").next().unwrap().to_owned())
        .collect()
}

const CLAIM: &str = "
apiVersion: workload.linkerd.io/v1beta1
kind: ExternalWorkload
metadata: {name: claim, labels: {app: claim}}
spec:
  meshTLS: {identity: 'spiffe://cluster.local/claim', serverName: claim}
  ports: [{port: 80}]
  workloadIPs: [{ip: ADDRESS}]
";
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
