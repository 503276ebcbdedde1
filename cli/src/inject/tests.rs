use clap::Parser as _;

use super::*;

fn injection(manual: bool) -> Injection {
    Injection {
        config: Config {
            values: Values::default(),
            control_plane_namespace: "linkerd".to_owned(),
            origin: Origin::CommandLine,
        },
        manual,
        mode: Mode::Usual,
        annotations: Vec::new(),
        opaque_ports: None,
    }
}

fn object(yaml: &str) -> Value {
    serde_yaml_ng::from_str(yaml).unwrap()
}

/// A workload whose pods are described at a pointer.
fn workload(api_version: &str, kind: &str, pointer: &str) -> Value {
    let mut pods = object("{spec: {containers: [{name: app, image: a}]}}");
    for key in pointer.rsplit('/').filter(|key| !key.is_empty()) {
        pods = json!({ key: pods });
    }
    json_patch::merge(
        &mut pods,
        &json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": "web", "namespace": "shop"}}),
    );
    pods
}

const KINDS: [(&str, &str, &str); 8] = [
    ("v1", "Pod", ""),
    ("v1", "ReplicationController", "/spec/template"),
    ("apps/v1", "Deployment", "/spec/template"),
    ("apps/v1", "ReplicaSet", "/spec/template"),
    ("apps/v1", "DaemonSet", "/spec/template"),
    ("apps/v1", "StatefulSet", "/spec/template"),
    ("batch/v1", "Job", "/spec/template"),
    ("batch/v1", "CronJob", "/spec/jobTemplate/spec/template"),
];

#[test]
fn every_workload_is_annotated_where_it_describes_its_pods() {
    for (api_version, kind, pointer) in KINDS {
        let before = workload(api_version, kind, pointer);
        let mut after = before.clone();
        assert!(
            matches!(injection(false).apply(&mut after).unwrap(), Verdict::Injected(_)),
            "{kind}"
        );
        let annotations = after.pointer(&format!("{pointer}/metadata/annotations"));
        assert_eq!(annotations, Some(&json!({"linkerd.io/inject": "enabled"})), "{kind}");
        assert_eq!(
            after.pointer(&format!("{pointer}/spec")),
            before.pointer(&format!("{pointer}/spec")),
            "{kind}"
        );
    }
}

#[test]
fn manual_injection_adds_the_containers_and_uninjection_takes_them_out() {
    for (api_version, kind, pointer) in KINDS {
        let before = workload(api_version, kind, pointer);
        let mut object = before.clone();
        let mut injection = injection(true);
        injection
            .annotations
            .push((annotation::ENABLE_DEBUG_SIDECAR, "true".to_owned()));
        assert!(
            matches!(injection.apply(&mut object).unwrap(), Verdict::Injected(_)),
            "{kind}"
        );
        let at = |tail: &str| object.pointer(&format!("{pointer}{tail}")).cloned().unwrap_or_default();
        assert_eq!(at("/spec/initContainers/1/name"), "linkerd-proxy", "{kind}");
        assert_eq!(at("/spec/containers/1/name"), "linkerd-debug", "{kind}");
        let owner = format!("/metadata/labels/linkerd.io~1proxy-{}", kind.to_lowercase());
        let labelled = if kind == "Pod" { Value::Null } else { "web".into() };
        assert_eq!(at(&owner), labelled, "{kind}");
        assert_eq!(at("/metadata/labels/linkerd.io~1workload-ns"), "shop", "{kind}");

        // A second time there is a sidecar already.
        let mut again = object.clone();
        let verdict = injection.apply(&mut again).unwrap();
        assert!(
            matches!(verdict, Verdict::Skipped(reasons) if reasons[0].contains("already")),
            "{kind}"
        );
        assert_eq!(again, object, "{kind}");

        assert!(uninject::apply(&mut object), "{kind}");
        // What the flags said stays as a setting of the user.
        let mut expected = before;
        let part = workload::at(&mut expected, &pointer.split('/').skip(1).collect::<Vec<_>>()).unwrap();
        annotate(part, annotation::ENABLE_DEBUG_SIDECAR, "true");
        if kind != "Pod" {
            assert_eq!(object.pointer(pointer), expected.pointer(pointer), "{kind}");
        }
        assert_eq!(object, expected, "{kind}");
        assert!(!uninject::apply(&mut object), "{kind}");
    }
}

#[test]
fn what_gets_no_sidecar_is_not_touched_and_says_why() {
    let pod = |rest: &str| {
        object(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: a, annotations: {{{rest}}}}}, spec: {{containers: []}}}}"
        ))
    };
    for (object, expected) in [
        (pod("linkerd.io/inject: disabled"), Some("is disabled")),
        (
            object("{apiVersion: v1, kind: Pod, spec: {hostNetwork: true, containers: []}}"),
            Some("hostNetwork"),
        ),
        (
            object("{apiVersion: apps/v1, kind: Deployment, spec: {}}"),
            Some("describes no pods"),
        ),
        (
            object("{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {ports: [{port: 25}]}}"),
            None,
        ),
        (object("{apiVersion: v1, kind: ConfigMap, data: {a: b}}"), None),
        (
            object("{apiVersion: example.test/v1, kind: Deployment, spec: {template: {spec: {containers: []}}}}"),
            None,
        ),
        (Value::Null, None),
    ] {
        for manual in [false, true] {
            let mut after = object.clone();
            let Verdict::Skipped(reasons) = injection(manual).apply(&mut after).unwrap() else {
                panic!("{object} is injected");
            };
            assert_eq!(after, object);
            let reason = reasons.first().map(String::as_str);
            assert_eq!(reason.is_some(), expected.is_some(), "{object}: {reason:?}");
            assert!(
                reason.is_none_or(|reason| reason.contains(expected.unwrap())),
                "{object}: {reason:?}"
            );
        }
    }
}

#[test]
fn flags_become_annotations_of_pods_and_opaque_ports_of_services() {
    let mut injection = injection(false);
    injection.mode = Mode::Ingress;
    injection.annotations.push((annotation::OPAQUE_PORTS, "25".to_owned()));
    injection.opaque_ports = Some("25".to_owned());
    let mut pod = object("{apiVersion: v1, kind: Pod, metadata: {annotations: null}, spec: {containers: []}}");
    injection.apply(&mut pod).unwrap();
    assert_eq!(
        pod["metadata"]["annotations"],
        json!({"linkerd.io/inject": "ingress", "config.linkerd.io/opaque-ports": "25"})
    );
    let mut service = object("{apiVersion: v1, kind: Service, spec: {}}");
    injection.apply(&mut service).unwrap();
    assert_eq!(
        service["metadata"]["annotations"],
        json!({"config.linkerd.io/opaque-ports": "25"})
    );
    let mut namespace = object("{apiVersion: v1, kind: Namespace, metadata: {name: a}}");
    injection.apply(&mut namespace).unwrap();
    assert_eq!(
        namespace["metadata"]["annotations"],
        json!({"linkerd.io/inject": "ingress"})
    );
    uninject::apply(&mut namespace);
    assert_eq!(namespace["metadata"], json!({"name": "a"}));
}

/// A line of flags.
#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    proxy: ProxyFlags,
}

#[test]
fn the_inbound_mode_reaches_both_halves_of_a_manifest_and_one_that_is_none_is_refused() {
    let flags = |mode: &str| Line::parse_from(["inject", "--inbound-mode", mode]).proxy.annotations();
    let mut injection = injection(true);
    injection.annotations = flags("tproxy").unwrap();
    let mut object = workload("apps/v1", "Deployment", "/spec/template");
    injection.apply(&mut object).unwrap();
    let template = &object["spec"]["template"];
    assert_eq!(
        template["metadata"]["annotations"]["config.tulle.dev/inbound-mode"],
        "tproxy"
    );
    let [init, proxy] = [0, 1].map(|at| template["spec"]["initContainers"][at].to_string());
    assert!(init.contains(r#""--inbound-mode","tproxy""#), "{init}");
    assert!(
        proxy.contains(r#"{"name":"TULLE_PROXY_INBOUND_MODE","value":"tproxy"}"#) && proxy.contains("NET_RAW"),
        "{proxy}"
    );
    let refused = flags("transparent").unwrap_err().to_string();
    assert!(
        refused.contains("transparent") && refused.contains("redirect or tproxy"),
        "{refused}"
    );
}

#[test]
fn udp_ports_and_ignored_annotations_are_reported() {
    let mut pod = object(
        "{apiVersion: v1, kind: Pod, metadata: {annotations: {config.linkerd.io/proxy-uid: root}}, \
         spec: {containers: [{name: a, ports: [{containerPort: 53, protocol: UDP}]}]}}",
    );
    let Verdict::Injected(notes) = injection(false).apply(&mut pod).unwrap() else {
        panic!("{pod} is not injected");
    };
    assert!(notes[0].starts_with("config.linkerd.io/proxy-uid"), "{notes:?}");
    assert!(notes[1].contains("udp_ports_enabled"), "{notes:?}");
}

#[test]
fn a_template_that_is_none_is_refused_with_its_place() {
    let mut pod = object("{apiVersion: v1, kind: Pod, spec: {containers: 5}}");
    assert!(injection(false).apply(&mut pod).is_err());
}
