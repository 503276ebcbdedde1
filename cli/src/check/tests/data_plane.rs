//! Tests of the checks on proxies, pods and annotations.

use super::*;

fn snapshot_of_shop(more: &[Value]) -> Snapshot {
    let mut objects = healthy_objects(&authorities(100));
    objects.push(named_object("Namespace", "shop"));
    objects.push(meshed_pod("web", true));
    objects.extend_from_slice(more);
    snapshot_from_objects(Mode::Proxy, &objects)
}

#[test]
fn proxies_that_are_not_ready_are_found() {
    let snapshot = snapshot_of_shop(&[meshed_pod("db", false)]);
    assert_finding(
        &snapshot,
        Outcome::Error,
        &["shop/db", "kubectl logs POD -c linkerd-proxy"],
    );
}

#[test]
fn a_namespace_without_proxies_gets_a_hint_for_injection() {
    let mut snapshot = snapshot_of_shop(&[named_object("Namespace", "empty")]);
    snapshot.scope.namespace = Some("empty".to_owned());
    assert_finding(
        &snapshot,
        Outcome::Error,
        &["there is no proxy in namespace empty", "linkerd.io/inject=enabled"],
    );
    snapshot.scope.namespace = Some("nowhere".to_owned());
    assert_finding(&snapshot, Outcome::Error, &["there is no namespace nowhere"]);
}

#[test]
fn members_of_a_redis_cluster_need_the_mode_tproxy() {
    let member = |name: &str, command: &str, capabilities: Value| {
        let mut pod = meshed_pod(name, true);
        pod["spec"]["containers"][0]["command"] = json!(["sh", "-c", command]);
        pod["spec"]["initContainers"][1]["securityContext"] = json!({ "capabilities": { "add": capabilities } });
        pod
    };
    let enabled = "exec redis-server --cluster-enabled yes";
    let snapshot = snapshot_of_shop(&[
        member("redirected", enabled, json!([])),
        member("tproxy", enabled, json!(["NET_RAW"])),
        member("alone", "exec redis-server --cluster-enabled no", json!([])),
        member(
            "announced",
            &format!("{enabled} --cluster-announce-ip $POD_IP"),
            json!([]),
        ),
    ]);
    let findings = findings(&snapshot);
    let [(Outcome::Warning, finding)] = &findings[..] else {
        panic!("{findings:?}");
    };
    assert!(
        finding.contains("shop/redirected") && finding.contains("inbound-mode=tproxy"),
        "{finding}"
    );
}

/// The namespace `shop` with the injection annotation.
fn injected_namespace() -> Value {
    let mut namespace = named_object("Namespace", "shop");
    namespace["metadata"]["annotations"] = json!({ "linkerd.io/inject": "enabled" });
    namespace
}

fn pod_without_proxy(name: &str, annotations: Value, more: Value) -> Value {
    let mut spec = json!({ "containers": [{ "name": "app" }] });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({
        "kind": "Pod",
        "metadata": { "name": name, "namespace": "shop", "annotations": annotations },
        "spec": spec,
        "status": { "phase": "Running" },
    })
}

#[test]
fn pods_that_the_injector_missed_are_listed() {
    let mut done = pod_without_proxy("done", json!({}), json!({}));
    done["status"]["phase"] = json!("Succeeded");
    let snapshot = snapshot_of_shop(&[
        injected_namespace(),
        pod_without_proxy("missed", json!({}), json!({})),
        pod_without_proxy("unwanted", json!({ "linkerd.io/inject": "disabled" }), json!({})),
        pod_without_proxy("host", json!({}), json!({ "hostNetwork": true })),
        done,
    ]);
    assert_finding(
        &snapshot,
        Outcome::Error,
        &[
            "have no proxy:\n  * shop/missed →",
            "kubectl get pod missed -n shop -o yaml | kubectl replace --force -f -",
        ],
    );
}

#[test]
fn each_missed_pod_has_a_command_that_recreates_it() {
    let owned = |pod: &str, kind: &str, name: &str| {
        let mut pod = pod_without_proxy(pod, json!({}), json!({}));
        pod["metadata"]["labels"] = json!({ "pod-template-hash": "5d8f" });
        pod["metadata"]["ownerReferences"] =
            json!([{ "apiVersion": "v1", "kind": kind, "name": name, "uid": "u", "controller": true }]);
        pod
    };
    let snapshot = snapshot_of_shop(&[
        injected_namespace(),
        owned("api-5d8f-1", "ReplicaSet", "api-5d8f"),
        owned("api-5d8f-2", "ReplicaSet", "api-5d8f"),
        owned("db-0", "StatefulSet", "db"),
        owned("logs-x", "DaemonSet", "logs"),
        owned("once-x", "Job", "once"),
        owned("old-x", "ReplicaSet", "old"),
    ]);
    assert_finding(
        &snapshot,
        Outcome::Error,
        &[
            "→ kubectl delete pod old-x -n shop\nkubectl delete pod once-x -n shop\n\
           kubectl rollout restart daemonset/logs -n shop\nkubectl rollout restart deployment/api -n shop\n\
           kubectl rollout restart statefulset/db -n shop",
        ],
    );
}

#[test]
fn audit_findings_of_the_injector_are_reported_while_the_pods_have_no_proxy() {
    let audit = |names: &[&str]| {
        let pods = names.iter().map(|name| json!({ "namespace": "shop", "name": name }));
        let found = json!({ "auditedAt": "2026-11-21T12:00:00Z", "uninjectedPods": pods.collect::<Vec<_>>() });
        Some(Ok(serde_json::from_value(found).unwrap()))
    };
    // The injector decides with its own data. Here no annotation requests injection.
    let mut snapshot = snapshot_of_shop(&[pod_without_proxy("late", json!({}), json!({}))]);
    assert_eq!(findings(&snapshot), []);
    snapshot.injection_audit = audit(&["gone", "late", "web"]);
    assert_finding(
        &snapshot,
        Outcome::Warning,
        &[
            "audit of 2026-11-21T12:00:00Z",
            "have no proxy:\n  * shop/late →",
            "kubectl get pod late -n shop",
        ],
    );
    // Without permission to read namespaces, the check relies on the audit.
    snapshot.namespaces = Err(ListError {
        kind: "namespaces",
        reason: "no".to_owned(),
    });
    let found = findings(&snapshot);
    let errors: Vec<_> = found.iter().filter(|(outcome, _)| *outcome == Outcome::Error).collect();
    assert!(
        matches!(&errors[..], [(_, text)] if text.contains("shop/late")),
        "{errors:?}"
    );
    // A problem that an earlier check reports is not repeated.
    let mut snapshot = snapshot_of_shop(&[injected_namespace(), pod_without_proxy("late", json!({}), json!({}))]);
    snapshot.injection_audit = audit(&["late"]);
    assert_finding(&snapshot, Outcome::Error, &["these pods should be injected"]);
    // An audit without findings is not reported. An audit that cannot be read is.
    let mut snapshot = snapshot_of_shop(&[]);
    snapshot.injection_audit = audit(&[]);
    assert_eq!(findings(&snapshot), []);
    snapshot.injection_audit = Some(Err("forbidden".to_owned()));
    assert_finding(
        &snapshot,
        Outcome::Warning,
        &["cannot read the injector's audit: forbidden"],
    );
}

#[test]
fn namespaces_that_the_webhook_excludes_are_not_reported() {
    let mut namespace = named_object("Namespace", "kube-system");
    namespace["metadata"]["annotations"] = json!({ "linkerd.io/inject": "enabled" });
    namespace["metadata"]["labels"] = json!({ "kubernetes.io/metadata.name": "kube-system" });
    let mut pod = pod_without_proxy("dns", json!({}), json!({}));
    pod["metadata"]["namespace"] = json!("kube-system");
    assert_eq!(findings(&snapshot_of_shop(&[namespace, pod])), []);
}

#[test]
fn proxies_of_another_version_cause_a_warning() {
    let mut pod = meshed_pod("db", true);
    pod["metadata"]["annotations"]["linkerd.io/proxy-version"] = json!("0.0.1");
    assert_finding(
        &snapshot_of_shop(&[pod]),
        Outcome::Warning,
        &["shop/db runs 0.0.1", "kubectl rollout restart"],
    );
}

#[test]
fn labels_and_annotations_without_effect_are_found() {
    let mut pod = meshed_pod("db", true);
    pod["metadata"]["labels"]["linkerd.io/inject"] = json!("enabled");
    assert_finding(
        &snapshot_of_shop(&[pod]),
        Outcome::Warning,
        &["pod shop/db has the label linkerd.io/inject"],
    );

    let mut namespace = named_object("Namespace", "shop");
    namespace["metadata"]["annotations"] = json!({ "linkerd.io/injected": "enabled" });
    assert_finding(
        &snapshot_of_shop(&[namespace]),
        Outcome::Warning,
        &["linkerd.io/injected has no effect; the annotation that injects a proxy is linkerd.io/inject"],
    );

    let mut pod = meshed_pod("db", true);
    pod["metadata"]["annotations"]["config.linkerd.io/default-inbound-policy"] = json!("perhaps");
    assert_finding(
        &snapshot_of_shop(&[pod]),
        Outcome::Warning,
        &["pod shop/db: ", "default-inbound-policy"],
    );

    let service = json!({
        "kind": "Service",
        "metadata": {
            "name": "db", "namespace": "shop", "annotations": { "config.linkerd.io/opaque-ports": "mysql,33-99,99-33" },
        },
        "spec": { "ports": [{ "name": "mysql", "port": 3306 }] },
    });
    assert_finding(&snapshot_of_shop(&[service]), Outcome::Warning, &["names \"99-33\""]);
}

#[test]
fn services_and_pods_that_disagree_on_opaque_ports_are_found() {
    let service = |annotations: Value| {
        json!({
            "kind": "Service",
            "metadata": { "name": "db", "namespace": "shop", "annotations": annotations },
            "spec": { "selector": { "app": "db" }, "ports": [{ "port": 13306, "targetPort": "db" }] },
        })
    };
    let pod = |annotations: &[(&str, &str)]| {
        let mut pod = meshed_pod("db", true);
        for (key, value) in annotations {
            pod["metadata"]["annotations"][*key] = json!(value);
        }
        pod
    };
    const OPAQUE: &str = "config.linkerd.io/opaque-ports";
    let both = snapshot_of_shop(&[service(json!({ OPAQUE: "13306" })), pod(&[(OPAQUE, "3306")])]);
    assert_eq!(findings(&both), []);
    let by_name = snapshot_of_shop(&[service(json!({ OPAQUE: "13306," })), pod(&[(OPAQUE, "unknown, db")])]);
    assert_eq!(findings(&by_name), []);
    // The port can belong to a native sidecar.
    let mut sidecar = pod(&[(OPAQUE, "3306")]);
    let app = sidecar["spec"]["containers"][0].take();
    sidecar["spec"]["containers"][0] = json!({ "name": "app" });
    let inits = sidecar["spec"]["initContainers"].as_array_mut().unwrap();
    inits.push(json!({ "name": "db", "ports": app["ports"], "restartPolicy": "Always" }));
    assert_eq!(
        findings(&snapshot_of_shop(&[
            service(json!({ OPAQUE: "13306" })),
            sidecar.clone()
        ])),
        []
    );
    assert_finding(
        &snapshot_of_shop(&[service(json!({})), sidecar]),
        Outcome::Warning,
        &[
            "kubectl annotate --overwrite service db -n shop config.linkerd.io/opaque-ports=25,587,3306,4444,4567,4568,5432,6379,9300,11211,13306",
        ],
    );
    assert_finding(
        &snapshot_of_shop(&[service(json!({})), pod(&[(OPAQUE, "3300-3310")])]),
        Outcome::Warning,
        &[
            "kubectl annotate --overwrite service db -n shop config.linkerd.io/opaque-ports=25,587,3306,4444,4567,4568,5432,6379,9300,11211,13306",
        ],
    );
    assert_finding(
        &snapshot_of_shop(&[service(json!({ OPAQUE: "25, 13307" })), pod(&[(OPAQUE, "3306")])]),
        Outcome::Warning,
        &["kubectl annotate --overwrite service db -n shop config.linkerd.io/opaque-ports=25,13307,13306"],
    );
    assert_finding(
        &snapshot_of_shop(&[service(json!({ OPAQUE: "13306" })), pod(&[(OPAQUE, "25")])]),
        Outcome::Warning,
        &[
            "port 3306 is opaque in service db but not in pod shop/db: annotate the pod template with",
            "\"25,3306\"",
        ],
    );
    // Without an annotation, the default of the cluster applies, which contains 3306.
    let by_default = snapshot_of_shop(&[service(json!({ OPAQUE: "13306" })), pod(&[])]);
    assert_eq!(findings(&by_default), []);
}

#[test]
fn certificates_of_proxies_must_chain_to_the_trust_anchors() {
    let good = authorities(100);
    let parse_certificate =
        |ca: &CertificateAuthority| crate::certificates::Certificate::parse_bundle(ca.certificate.as_bytes());
    let mut objects = healthy_objects(&good);
    objects.push(named_object("Namespace", "shop"));
    objects.push(meshed_pod("web", true));
    let mut snapshot = snapshot_from_objects(Mode::Proxy, &objects);
    snapshot
        .proxy_certificates
        .insert("shop/web".to_owned(), Ok(parse_certificate(&good.issuer).unwrap()));
    assert_eq!(findings(&snapshot), []);
    snapshot.proxy_certificates.insert(
        "shop/web".to_owned(),
        Ok(parse_certificate(&authorities(100).issuer).unwrap()),
    );
    assert_finding(
        &snapshot,
        Outcome::Error,
        &[
            "shop/web has a certificate that chains to none",
            "kubectl rollout restart",
        ],
    );
    snapshot
        .proxy_certificates
        .insert("shop/web".to_owned(), Err("connection refused".to_owned()));
    assert_finding(&snapshot, Outcome::Warning, &["shop/web: connection refused"]);
}

#[test]
fn the_cni_plugin_is_checked_if_the_control_plane_uses_it() {
    let mut objects = healthy_objects(&authorities(100));
    objects.push(values_config_map(&[("cniEnabled", json!(true))]));
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Error,
        &["there is no DaemonSet linkerd-cni"],
    );
    let mut set = named_object("DaemonSet", "linkerd-cni");
    set["status"] = json!({
        "desiredNumberScheduled": 2, "numberReady": 1, "currentNumberScheduled": 2, "numberMisscheduled": 0,
    });
    objects.push(set.clone());
    assert_finding(
        &snapshot_from_objects(Mode::Installed, &objects),
        Outcome::Error,
        &["ready on 1 of 2 nodes"],
    );
    set["status"]["numberReady"] = json!(2);
    objects.push(set);
    assert_eq!(findings(&snapshot_from_objects(Mode::Installed, &objects)), []);
}
