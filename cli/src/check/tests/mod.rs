//! Tests of the checks. The clusters are plain objects: a healthy cluster, and variants of it with one fault each.

mod data_plane;
mod waiting;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tulle_control::trust::{self, CertificateAuthority};

use super::control_plane::CRDS;
use super::report::Outcome;
use super::snapshot::{ListError, ListResult, Permission, PermissionScope, Snapshot};
use super::*;

const DAY: u64 = 86_400;

pub(super) fn scope(mode: Mode) -> Scope {
    Scope {
        mode,
        control_plane_namespace: "linkerd".to_owned(),
        namespace: None,
        expected_version: None,
        cni_namespace: "linkerd-cni".to_owned(),
        check_cni: false,
    }
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
}

/// A cluster with these objects. A later object replaces an earlier one of the same name.
fn snapshot_from_objects(mode: Mode, objects: &[Value]) -> Snapshot {
    let mut snapshot = Snapshot::empty(scope(mode), now());
    snapshot.kubernetes_version = Ok("v1.34.2".to_owned());
    for object in objects {
        insert_object(&mut snapshot, object);
    }
    snapshot
}

fn insert_object(snapshot: &mut Snapshot, object: &Value) {
    fn add<K: DeserializeOwned + kube::Resource>(listed: &mut ListResult<K>, object: &Value) {
        let object: K = serde_json::from_value(object.clone()).unwrap();
        let listed = listed.as_mut().unwrap();
        listed.retain(|old| old.meta().name != object.meta().name || old.meta().namespace != object.meta().namespace);
        listed.push(object);
    }
    let s = snapshot;
    match object["kind"].as_str().unwrap() {
        "Namespace" => add(&mut s.namespaces, object),
        "CustomResourceDefinition" => add(&mut s.crds, object),
        "ClusterRole" => add(&mut s.cluster_roles, object),
        "ClusterRoleBinding" => add(&mut s.cluster_role_bindings, object),
        "MutatingWebhookConfiguration" => add(&mut s.mutating_webhooks, object),
        "ValidatingWebhookConfiguration" => add(&mut s.validating_webhooks, object),
        "APIService" => add(&mut s.api_services, object),
        "Node" => add(&mut s.nodes, object),
        "Lease" => add(&mut s.node_leases, object),
        "Pod" => add(&mut s.pods, object),
        "Service" => add(&mut s.services, object),
        "ConfigMap" => add(&mut s.config_maps, object),
        "Secret" => add(&mut s.secrets, object),
        "ServiceAccount" => add(&mut s.service_accounts, object),
        "Deployment" => add(&mut s.deployments, object),
        "ReplicaSet" => add(&mut s.replica_sets, object),
        "DaemonSet" => add(&mut s.cni_daemon_sets, object),
        other => panic!("the snapshot has no list of {other}"),
    }
}

struct Authorities {
    anchor: CertificateAuthority,
    issuer: CertificateAuthority,
}

fn authorities(days: u64) -> Authorities {
    let anchor = trust::create_anchor("root.linkerd.cluster.local", Duration::from_secs(days * DAY)).unwrap();
    let issuer = trust::create_issuer(
        "identity.linkerd.cluster.local",
        Duration::from_secs(days * DAY),
        &anchor,
    );
    Authorities {
        issuer: issuer.unwrap(),
        anchor,
    }
}

fn base64(bytes: &str) -> Value {
    serde_json::to_value(k8s_openapi::ByteString(bytes.as_bytes().to_vec())).unwrap()
}

fn named_object(kind: &str, name: &str) -> Value {
    json!({ "kind": kind, "metadata": { "name": name, "namespace": "linkerd" } })
}

fn values_config_map(more: &[(&str, Value)]) -> Value {
    let mut values = json!({
        "linkerdVersion": crate::version::CLI_VERSION,
        "clusterNetworks": "10.0.0.0/8,fd00::/8",
        "clusterDomain": "cluster.local",
    });
    for (key, value) in more {
        values[*key] = value.clone();
    }
    let mut map = named_object("ConfigMap", "linkerd-config");
    map["data"] = json!({ "values": serde_yaml_ng::to_string(&values).unwrap() });
    map
}

fn trust_roots_config_map(authorities: &Authorities) -> Value {
    let mut map = named_object("ConfigMap", "linkerd-identity-trust-roots");
    map["data"] = json!({ "ca-bundle.crt": authorities.anchor.certificate });
    map
}

fn issuer_secret(authorities: &Authorities) -> Value {
    let mut secret = named_object("Secret", "linkerd-identity-issuer");
    secret["data"] = json!({
        "crt.pem": base64(&authorities.issuer.certificate),
        "key.pem": base64(&authorities.issuer.key),
    });
    secret
}

fn crd(name: &str, version: &str) -> Value {
    json!({
        "kind": "CustomResourceDefinition",
        "metadata": { "name": name },
        "spec": {
            "group": "g", "scope": "Namespaced", "names": { "kind": "K", "plural": "ks" },
            "versions": [{ "name": version, "served": true, "storage": true }],
        },
    })
}

fn control_plane_pod(component: &str, ready: &str) -> Value {
    json!({
        "kind": "Pod",
        "metadata": {
            "name": format!("linkerd-{component}-1"),
            "namespace": "linkerd",
            "labels": { "linkerd.io/control-plane-component": component, "linkerd.io/control-plane-ns": "linkerd" },
        },
        "spec": { "containers": [{ "name": component }] },
        "status": {
            "phase": "Running",
            "podIPs": [{ "ip": "10.1.0.2" }],
            "conditions": [{ "type": "Ready", "status": ready }],
        },
    })
}

/// The configuration and the Secret of a webhook, with a self-signed certificate.
fn webhook(kind: &str, service: &str) -> [Value; 2] {
    let name = format!("{service}.linkerd.svc");
    let (cert, key) = {
        let made = rcgen::generate_simple_self_signed([name]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    };
    let mut config = named_object(kind, &format!("{service}-webhook-config"));
    config["metadata"].as_object_mut().unwrap().remove("namespace");
    config["webhooks"] = json!([{
        "name": format!("{service}.linkerd.io"),
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": { "caBundle": base64(&cert) },
    }]);
    let mut secret = named_object("Secret", &format!("{service}-k8s-tls"));
    secret["data"] = json!({ "tls.crt": base64(&cert), "tls.key": base64(&key) });
    [config, secret]
}

/// All objects of a healthy installation.
fn healthy_objects(authorities: &Authorities) -> Vec<Value> {
    let mut objects = vec![
        named_object("Namespace", "linkerd"),
        values_config_map(&[]),
        trust_roots_config_map(authorities),
        issuer_secret(authorities),
    ];
    objects.extend(CRDS.iter().map(|(name, version)| crd(name, version)));
    objects.extend(["httproutes", "grpcroutes"].map(|name| crd(&format!("{name}.gateway.networking.k8s.io"), "v1")));
    for component in ["destination", "identity", "proxy-injector"] {
        objects.push(named_object("ClusterRole", &format!("linkerd-linkerd-{component}")));
        objects.push(named_object(
            "ClusterRoleBinding",
            &format!("linkerd-linkerd-{component}"),
        ));
        objects.push(named_object("ServiceAccount", &format!("linkerd-{component}")));
        let mut deployment = named_object("Deployment", &format!("linkerd-{component}"));
        deployment["status"] = json!({ "availableReplicas": 1 });
        objects.push(deployment);
        let mut set = named_object("ReplicaSet", &format!("linkerd-{component}-5d"));
        set["metadata"]["labels"] = json!({ "linkerd.io/control-plane-component": component });
        set["spec"] = json!({ "replicas": 1, "selector": {} });
        set["status"] = json!({ "replicas": 1, "readyReplicas": 1 });
        objects.push(set);
        objects.push(control_plane_pod(component, "True"));
    }
    objects.push(named_object("ClusterRole", "linkerd-policy"));
    objects.push(named_object("ClusterRoleBinding", "linkerd-destination-policy"));
    objects.extend(webhook("MutatingWebhookConfiguration", "linkerd-proxy-injector"));
    objects.extend(webhook("ValidatingWebhookConfiguration", "linkerd-sp-validator"));
    objects.extend(webhook("ValidatingWebhookConfiguration", "linkerd-policy-validator"));
    objects
}

fn meshed_pod(name: &str, ready: bool) -> Value {
    json!({
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "shop",
            "labels": { "app": name, "linkerd.io/control-plane-ns": "linkerd" },
            "annotations": { "linkerd.io/proxy-version": crate::version::CLI_VERSION },
        },
        "spec": {
            "containers": [{ "name": "app", "ports": [{ "name": "db", "containerPort": 3306 }] }],
            "initContainers": [{ "name": "linkerd-init" }, { "name": "linkerd-proxy" }],
        },
        "status": {
            "phase": "Running",
            "podIPs": [{ "ip": "10.1.0.9" }],
            "initContainerStatuses": [
                { "name": "linkerd-proxy", "ready": ready, "restartCount": 0, "image": "", "imageID": "" },
            ],
        },
    })
}

/// Runs all checks, and lists the problems as `description: message → fix`.
fn findings(snapshot: &Snapshot) -> Vec<(Outcome, String)> {
    let mut findings = Vec::new();
    for category in categories(snapshot) {
        let run = run_category(&category, snapshot);
        for check in run.report.checks {
            if check.result != Outcome::Success {
                let text = format!(
                    "{}: {} → {}",
                    check.description,
                    check.error.unwrap(),
                    check.hint.unwrap()
                );
                findings.push((check.result, text));
            }
        }
        if run.has_fatal_failure {
            break;
        }
    }
    findings
}

/// Asserts that there is exactly one problem, and that it contains all of these texts.
#[track_caller]
fn assert_finding(snapshot: &Snapshot, outcome: Outcome, texts: &[&str]) {
    let findings = findings(snapshot);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    assert_eq!(findings[0].0, outcome, "{findings:#?}");
    for text in texts {
        assert!(findings[0].1.contains(text), "{text:?} is not in {:?}", findings[0].1);
    }
}

#[test]
fn a_healthy_cluster_has_no_findings() {
    let mut objects = healthy_objects(&authorities(100));
    objects.push(named_object("Namespace", "shop"));
    objects.push(meshed_pod("web", true));
    assert_eq!(findings(&snapshot_from_objects(Mode::Proxy, &objects)), []);
}

#[test]
fn an_empty_cluster_needs_an_installation() {
    let snapshot = snapshot_from_objects(Mode::Installed, &[]);
    let findings = findings(&snapshot);
    assert_eq!(findings.len(), 2, "{findings:#?}");
    assert!(findings[0].1.contains("installGatewayAPI=true"), "{findings:#?}");
    let install = "tulle install --crds | kubectl apply -f - && tulle install | kubectl apply -f -";
    assert!(findings[1].1.contains(install), "{findings:#?}");
}

#[test]
fn a_namespace_other_than_linkerd_is_named_in_every_command() {
    let mut snapshot = snapshot_from_objects(Mode::Installed, &[crd("httproutes.gateway.networking.k8s.io", "v1")]);
    snapshot.scope.control_plane_namespace = "mesh".to_owned();
    for (_, text) in findings(&snapshot) {
        assert!(text.contains("-L mesh"), "{text}");
    }
}

#[test]
fn a_cluster_without_the_control_planes_kinds_needs_the_crds() {
    let mut objects = healthy_objects(&authorities(100));
    objects.retain(|object| object["metadata"]["name"] != "servers.policy.linkerd.io");
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Error,
        &[
            "servers.policy.linkerd.io is missing",
            "tulle install --crds | kubectl apply -f -",
        ],
    );
    objects.push(crd("servers.policy.linkerd.io", "v1beta1"));
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Error,
        &["servers.policy.linkerd.io does not serve version v1beta3"],
    );
}

#[test]
fn each_missing_object_is_named() {
    for (kind, name) in [
        ("ClusterRole", "linkerd-policy"),
        ("ClusterRoleBinding", "linkerd-linkerd-identity"),
        ("ServiceAccount", "linkerd-destination"),
        ("Deployment", "linkerd-proxy-injector"),
    ] {
        let mut objects = healthy_objects(&authorities(100));
        objects.retain(|object| object["kind"] != kind || object["metadata"]["name"] != name);
        let snapshot = snapshot_from_objects(Mode::Installed, &objects);
        assert_finding(
            &snapshot,
            Outcome::Error,
            &[&format!("{kind} {name}"), "tulle upgrade | kubectl apply -f -"],
        );
    }
}

#[test]
fn unready_components_are_waited_for_and_explained() {
    let mut objects = healthy_objects(&authorities(100));
    let mut pod = control_plane_pod("identity", "False");
    pod["status"]["containerStatuses"] = json!([{
        "name": "identity", "ready": false, "restartCount": 3, "image": "", "imageID": "",
        "state": { "waiting": { "reason": "ImagePullBackOff" } },
    }]);
    objects.push(pod);
    let snapshot = snapshot_from_objects(Mode::Installed, &objects);
    assert_finding(
        &snapshot,
        Outcome::Error,
        &[
            "linkerd-identity-1: container identity is in ImagePullBackOff",
            "kubectl describe deployments,pods -n linkerd",
        ],
    );
    let run = run_category(&control_plane::existence(), &snapshot);
    assert_eq!(run.first_retryable_failure, Some("control plane pods are ready"));
}

#[test]
fn a_replica_set_without_ready_replicas_and_unschedulable_pods_are_found() {
    let mut objects = healthy_objects(&authorities(100));
    let mut set = objects
        .iter()
        .find(|object| object["kind"] == "ReplicaSet")
        .unwrap()
        .clone();
    set["status"] = json!({ "replicas": 1, "readyReplicas": 0 });
    objects.push(set);
    let texts = ["linkerd-destination-5d: 0 of 1 replicas are ready"];
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Error,
        &texts,
    );

    let mut objects = healthy_objects(&authorities(100));
    let mut pod = control_plane_pod("identity", "True");
    pod["status"]["conditions"] = json!([
        { "type": "Ready", "status": "True" },
        { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes" },
    ]);
    objects.push(pod);
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Error,
        &["linkerd-identity-1: 0/1 nodes"],
    );
}

#[test]
fn addresses_outside_of_the_clusters_networks_are_found() {
    let node = json!({ "kind": "Node", "metadata": { "name": "n1" }, "spec": { "podCIDRs": ["192.168.4.0/24"] } });
    let service = json!({
        "kind": "Service", "metadata": { "name": "web", "namespace": "shop" }, "spec": { "clusterIPs": ["172.16.0.7"] },
    });
    let mut pod = meshed_pod("web", true);
    pod["status"]["podIPs"] = json!([{ "ip": "10.1.0.9" }, { "ip": "2001:db8::9" }]);
    for (object, text) in [
        (node, "node n1 (192.168.4.0/24)"),
        (service, "service shop/web (172.16.0.7)"),
        (pod, "pod shop/web (2001:db8::9)"),
    ] {
        let mut objects = healthy_objects(&authorities(100));
        objects.push(object);
        let fix = "tulle upgrade --set clusterNetworks=\"10.0.0.0/8\\,fd00::/8\\,";
        assert_finding(
            &snapshot_from_objects(Mode::Installed, &objects),
            Outcome::Error,
            &[text, fix],
        );
    }
    // A host-network pod causes no problem.
    let mut objects = healthy_objects(&authorities(100));
    let mut pod = meshed_pod("web", true);
    pod["status"]["podIPs"] = json!([{ "ip": "203.0.113.5" }]);
    pod["spec"]["hostNetwork"] = json!(true);
    objects.push(pod);
    assert_eq!(findings(&snapshot_from_objects(Mode::Installed, &objects)), []);
}

#[test]
fn docker_needs_an_init_container_that_is_root() {
    let node = json!({
        "kind": "Node",
        "metadata": { "name": "n1" },
        "status": { "nodeInfo": {
            "containerRuntimeVersion": "docker://24", "architecture": "", "bootID": "", "kernelVersion": "",
            "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "", "operatingSystem": "", "osImage": "",
            "systemUUID": "",
        } },
    });
    let mut objects = healthy_objects(&authorities(100));
    objects.push(node);
    let fix = "--set proxyInit.runAsRoot=true";
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Error,
        &["node n1 uses Docker", fix],
    );
    objects.push(values_config_map(&[("proxyInit", json!({ "runAsRoot": true }))]));
    assert_eq!(findings(&snapshot_from_objects(Mode::Installed, &objects)), []);
}

#[test]
fn certificates_that_expire_soon_cause_a_warning_and_expired_ones_fail() {
    let mut snapshot = snapshot_from_objects(Mode::Installed, &healthy_objects(&authorities(100)));
    snapshot.now += 50 * DAY as i64;
    let expiring = findings(&snapshot);
    assert_eq!(expiring.len(), 2, "{expiring:#?}");
    assert!(
        expiring.iter().all(|(outcome, _)| *outcome == Outcome::Warning),
        "{expiring:#?}"
    );
    assert!(
        expiring[0].1.contains("in 50 days") && expiring[0].1.contains("create-anchor"),
        "{expiring:#?}"
    );
    assert!(expiring[1].1.contains("create-issuer"), "{expiring:#?}");

    snapshot.now += 51 * DAY as i64;
    let expired_findings = findings(&snapshot);
    let expired = expired_findings
        .iter()
        .filter(|(outcome, text)| *outcome == Outcome::Error && text.contains("expired on"));
    assert_eq!(expired.count(), 2, "{expired_findings:#?}");
}

#[test]
fn an_issuer_of_another_anchor_is_refused() {
    let mut objects = healthy_objects(&authorities(100));
    objects.push(issuer_secret(&authorities(100)));
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Error,
        &[
            "is signed by none of the trust anchors",
            "--identity-issuer-certificate-file",
        ],
    );
}

#[test]
fn missing_or_invalid_credentials_end_the_check() {
    let good = authorities(100);
    let mut without_key = issuer_secret(&good);
    without_key["data"].as_object_mut().unwrap().remove("key.pem");
    let mut broken = issuer_secret(&good);
    broken["data"]["crt.pem"] = base64("no certificate");
    let mut roots = trust_roots_config_map(&good);
    roots["data"] = json!({});
    let mut other_scheme = issuer_secret(&good);
    other_scheme["data"] = json!({
        "tls.crt": other_scheme["data"]["crt.pem"].clone(), "tls.key": other_scheme["data"]["key.pem"].clone(),
    });
    for (object, text) in [
        (without_key, "neither key.pem nor tls.key"),
        (
            broken,
            "the certificate in Secret linkerd-identity-issuer cannot be used",
        ),
        (roots, "\"ca-bundle.crt\" is not in namespace linkerd"),
        (other_scheme, "--set identity.issuer.scheme=kubernetes.io/tls"),
    ] {
        let mut objects = healthy_objects(&good);
        objects.push(object);
        assert_finding(
            &snapshot_from_objects(Mode::Installed, &objects),
            Outcome::Error,
            &[text],
        );
    }
}

#[test]
fn a_webhook_whose_bundle_and_certificate_differ_is_found() {
    let mut objects = healthy_objects(&authorities(100));
    let [_, secret] = webhook("MutatingWebhookConfiguration", "linkerd-proxy-injector");
    objects.push(secret);
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Error,
        &[
            "proxy-injector webhook has valid cert",
            "does not verify the certificate",
            "kubectl rollout restart deployment linkerd-proxy-injector -n linkerd",
        ],
    );
}

#[test]
fn the_served_certificate_of_a_webhook_takes_precedence_over_its_secret() {
    let mut snapshot = snapshot_from_objects(Mode::Installed, &healthy_objects(&authorities(100)));
    let other = rcgen::generate_simple_self_signed(["elsewhere.linkerd.svc".to_owned()]).unwrap();
    let other = crate::certificates::Certificate::parse(other.cert.der()).unwrap();
    snapshot
        .webhook_certificates
        .insert("linkerd-sp-validator".to_owned(), Ok(other));
    assert_finding(
        &snapshot,
        Outcome::Error,
        &[
            "sp-validator webhook has valid cert",
            "the certificate is for elsewhere.linkerd.svc",
        ],
    );
}

#[test]
fn a_missing_webhook_certificate_is_reported_with_a_restart_as_its_fix() {
    let mut objects = healthy_objects(&authorities(100));
    objects.retain(|object| object["metadata"]["name"] != "linkerd-policy-validator-k8s-tls");
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Error,
        &[
            "linkerd-policy-validator presents no certificate",
            "rollout restart deployment linkerd-destination",
        ],
    );
}

#[test]
fn unreachable_telemetry_is_reported_if_it_is_installed() {
    let name = "v1alpha1.telemetry.tulle.dev";
    let snapshot_with = |more: &[Value]| {
        let mut objects = healthy_objects(&authorities(100));
        objects.extend_from_slice(more);
        snapshot_from_objects(Mode::Installed, &objects)
    };
    let service = |conditions: Value| {
        json!({
            "kind": "APIService",
            "metadata": { "name": name },
            "status": { "conditions": conditions },
        })
    };
    let enabled = |enabled: bool| values_config_map(&[("telemetry", json!({ "enabled": enabled }))]);
    assert_eq!(findings(&snapshot_with(&[enabled(false)])), []);
    assert_finding(
        &snapshot_with(&[enabled(true)]),
        Outcome::Error,
        &[
            "APIService v1alpha1.telemetry.tulle.dev does not exist",
            "tulle upgrade | kubectl apply -f -",
        ],
    );
    let available = service(json!([{ "type": "Available", "status": "True" }]));
    assert_eq!(findings(&snapshot_with(&[enabled(true), available])), []);
    let why = "endpoints for service/linkerd-telemetry in \"linkerd\" have no addresses";
    let condition = json!({ "type": "Available", "status": "False", "reason": "MissingEndpoints", "message": why });
    assert_finding(
        &snapshot_with(&[enabled(true), service(json!([condition]))]),
        Outcome::Error,
        &[why, "kubectl rollout restart deployment linkerd-destination -n linkerd"],
    );
    assert_finding(
        &snapshot_with(&[service(json!([]))]),
        Outcome::Error,
        &["has not checked it yet"],
    );
    let mut unavailable = snapshot_with(&[service(json!([]))]);
    let run = run_category(&super::trust::webhooks(), &unavailable);
    assert_eq!(run.first_retryable_failure, Some("telemetry API service is available"));
    unavailable.api_services = Err(ListError {
        kind: "apiservices",
        reason: "you may not".to_owned(),
    });
    assert_finding(&unavailable, Outcome::Warning, &["apiservices", "you may not"]);
}

#[test]
fn different_versions_cause_a_warning() {
    let mut objects = healthy_objects(&authorities(100));
    objects.push(values_config_map(&[("linkerdVersion", json!("0.0.1"))]));
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Warning,
        &["the control plane is 0.0.1"],
    );

    let mut snapshot = snapshot_from_objects(Mode::Installed, &healthy_objects(&authorities(100)));
    snapshot.scope.expected_version = Some("9.9.9".to_owned());
    assert_finding(
        &snapshot,
        Outcome::Warning,
        &["control plane is up-to-date", "expected 9.9.9"],
    );
}

#[test]
fn high_availability_needs_more_than_one_replica() {
    let mut objects = healthy_objects(&authorities(100));
    objects.push(values_config_map(&[("highAvailability", json!(true))]));
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Warning,
        &["linkerd-identity: 1 replicas are available", "tulle upgrade --ha"],
    );
}

#[test]
fn an_old_or_unknown_kubernetes_version_is_found() {
    for (version, outcome) in [
        ("v1.30.9", Some(Outcome::Error)),
        ("v1.31.0+k3s1", None),
        ("v2.0.0", None),
        ("nightly", Some(Outcome::Warning)),
    ] {
        let mut snapshot = snapshot_from_objects(Mode::Crds, &healthy_objects(&authorities(100)));
        snapshot.kubernetes_version = Ok(version.to_owned());
        let found = findings(&snapshot).first().map(|(outcome, _)| *outcome);
        assert_eq!(found, outcome, "{version}");
    }
}

#[test]
fn a_cluster_that_cannot_be_reached_is_the_only_finding() {
    let mut snapshot = snapshot_from_objects(Mode::Installed, &[]);
    snapshot.kubernetes_version = Err("connection refused".to_owned());
    assert_finding(
        &snapshot,
        Outcome::Error,
        &["connection refused", "kubectl cluster-info"],
    );
    snapshot.client = Err("no kubeconfig".to_owned());
    assert_finding(&snapshot, Outcome::Error, &["no kubeconfig", "--kubeconfig FILE"]);
}

#[test]
fn a_kind_that_cannot_be_listed_causes_warnings() {
    let mut snapshot = snapshot_from_objects(Mode::Installed, &healthy_objects(&authorities(100)));
    snapshot.nodes = Err(ListError {
        kind: "nodes",
        reason: "nodes is forbidden".to_owned(),
    });
    let found = findings(&snapshot);
    assert_eq!(found.len(), 2, "{found:#?}");
    for (outcome, text) in found {
        assert_eq!(outcome, Outcome::Warning);
        assert!(
            text.contains("unknown: nodes cannot be read: nodes is forbidden"),
            "{text}"
        );
        assert!(text.contains("--as USER"), "{text}");
    }
}

fn ready_to_install() -> Snapshot {
    let mut snapshot = snapshot_from_objects(Mode::Pre, &[]);
    snapshot.permissions = platform::required_permissions()
        .into_iter()
        .map(|permission| (permission, Ok(true)))
        .collect();
    snapshot
}

#[test]
fn before_an_installation_the_namespace_must_be_free() {
    assert_eq!(findings(&ready_to_install()), []);
    let mut snapshot = ready_to_install();
    insert_object(&mut snapshot, &named_object("Namespace", "linkerd"));
    assert_finding(
        &snapshot,
        Outcome::Error,
        &["the namespace linkerd exists already", "tulle uninstall"],
    );
}

#[test]
fn before_an_installation_the_user_must_have_the_permissions() {
    let mut snapshot = ready_to_install();
    let permission = Permission {
        verb: "create",
        group: "apps",
        resource: "deployments",
        scope: PermissionScope::Namespace,
    };
    assert!(snapshot.permissions.insert(permission, Ok(false)).is_some());
    let fix = "kubectl auth can-i create deployments.apps -n linkerd";
    assert_finding(&snapshot, Outcome::Error, &["you may not create deployments.apps", fix]);
}

#[test]
fn clocks_of_ready_nodes_must_agree() {
    let node = |ready: &str| {
        json!({
            "kind": "Node", "metadata": { "name": "n1" },
            "status": { "conditions": [{ "type": "Ready", "status": ready }] },
        })
    };
    let lease = json!({
        "kind": "Lease", "metadata": { "name": "n1", "namespace": "kube-node-lease" },
        "spec": { "renewTime": "2026-01-01T00:00:00.000000Z" },
    });
    let renewed = 1_767_225_600;
    for (now, ready, text) in [
        (renewed + 5, "True", None),
        (renewed - 100, "True", Some("n1 is 100 s ahead")),
        (renewed + 100, "True", Some("n1 is up to 100 s behind")),
        // The lease of a node that is down is not renewed.
        (renewed + 100, "False", None),
    ] {
        let mut snapshot = ready_to_install();
        insert_object(&mut snapshot, &node(ready));
        insert_object(&mut snapshot, &lease);
        snapshot.now = now;
        match text {
            Some(text) => assert_finding(&snapshot, Outcome::Warning, &[text]),
            None => assert_eq!(findings(&snapshot), []),
        }
    }
}
