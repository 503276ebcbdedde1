use clap::Parser as _;

use super::*;

fn injection(manual: bool) -> Injection {
    Injection {
        config: Config {
            values: Values::from_yaml("identityTrustAnchorsPEM: anchors").unwrap(),
            control_plane_namespace: "linkerd".to_owned(),
            origin: InjectionOrigin::CommandLine,
        },
        manual,
        mode: ProxyMode::Standard,
        annotations: Vec::new(),
        opaque_ports: None,
    }
}

fn object(yaml: &str) -> Value {
    serde_yaml_ng::from_str(yaml).unwrap()
}

/// A workload with its pod template at a JSON pointer.
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
fn every_workload_is_annotated_in_its_pod_template() {
    for (api_version, kind, pointer) in KINDS {
        let before = workload(api_version, kind, pointer);
        let mut after = before.clone();
        assert!(
            matches!(
                injection(false).apply(&mut after).unwrap(),
                ManifestOutcome::InjectedOrUninjected(_)
            ),
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
fn manual_injection_adds_the_containers_and_uninjection_removes_them() {
    for (api_version, kind, pointer) in KINDS {
        let before = workload(api_version, kind, pointer);
        let mut object = before.clone();
        let mut injection = injection(true);
        injection
            .annotations
            .push((annotation::ENABLE_DEBUG_SIDECAR, "true".to_owned()));
        injection
            .annotations
            .push((annotation::DEBUG_IMAGE, "example.test/debug".to_owned()));
        assert!(
            matches!(
                injection.apply(&mut object).unwrap(),
                ManifestOutcome::InjectedOrUninjected(_)
            ),
            "{kind}"
        );
        let at = |tail: &str| object.pointer(&format!("{pointer}{tail}")).cloned().unwrap_or_default();
        assert_eq!(at("/spec/initContainers/1/name"), "linkerd-proxy", "{kind}");
        assert_eq!(at("/spec/containers/1/name"), "linkerd-debug", "{kind}");
        let owner = format!("/metadata/labels/linkerd.io~1proxy-{}", kind.to_lowercase());
        let labelled = if kind == "Pod" { Value::Null } else { "web".into() };
        assert_eq!(at(&owner), labelled, "{kind}");
        assert_eq!(at("/metadata/labels/linkerd.io~1workload-ns"), "shop", "{kind}");

        // A second injection replaces the sidecar.
        let mut again = object.clone();
        let outcome = injection.apply(&mut again).unwrap();
        assert!(matches!(outcome, ManifestOutcome::InjectedOrUninjected(_)), "{kind}");
        assert_eq!(again, object, "{kind}");

        assert!(uninject::apply(&mut object), "{kind}");
        // Annotations from flags remain as settings of the user.
        let mut expected = before;
        let part = workload::part_at(&mut expected, &pointer.split('/').skip(1).collect::<Vec<_>>()).unwrap();
        annotate(part, annotation::ENABLE_DEBUG_SIDECAR, "true");
        annotate(part, annotation::DEBUG_IMAGE, "example.test/debug");
        if kind != "Pod" {
            assert_eq!(object.pointer(pointer), expected.pointer(pointer), "{kind}");
        }
        assert_eq!(object, expected, "{kind}");
        assert!(!uninject::apply(&mut object), "{kind}");
    }
}

#[test]
fn uninjection_removes_a_renamed_volume_of_the_init_container() {
    for (kind, name) in [("Pod", "own-lock"), ("Deployment", "tmp")] {
        let (api_version, _, pointer) = KINDS.into_iter().find(|(_, other, _)| *other == kind).unwrap();
        let before = workload(api_version, kind, pointer);
        let mut object = before.clone();
        let mut injection = injection(true);
        injection.config.values.proxy_init.xt_mount_path.name = name.to_owned();
        injection.apply(&mut object).unwrap();
        assert!(object.to_string().contains(name), "{kind}");
        uninject::apply(&mut object);
        let spec = format!("{pointer}/spec");
        assert_eq!(object.pointer(&spec), before.pointer(&spec), "{kind}");
    }
}

#[test]
fn uninjection_keeps_volumes_that_the_application_mounts() {
    let mount = json!({"name": "access", "mountPath": "/var/run/secrets"});
    let app = json!({"name": "app", "image": "a", "volumeMounts": [mount]});
    let init =
        json!({"name": "linkerd-init", "image": "i", "volumeMounts": [mount, {"name": "lock", "mountPath": "/run"}]});
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {
        "containers": [app], "initContainers": [init], "volumes": [{"name": "access"}, {"name": "lock"}],
    }});
    assert!(uninject::apply(&mut pod));
    assert_eq!(
        pod["spec"],
        json!({"containers": [app], "volumes": [{"name": "access"}]})
    );
}

#[test]
fn skipped_objects_are_unchanged_and_workloads_get_a_reason() {
    let pod = |rest: &str| {
        object(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: a, annotations: {{{rest}}}}}, spec: {{containers: []}}}}"
        ))
    };
    for (object, expected) in [
        (pod("linkerd.io/inject: disabled"), Some("has the value disabled")),
        (
            object("{apiVersion: v1, kind: Pod, spec: {os: {name: windows}, containers: [{name: a}]}}"),
            Some("Windows"),
        ),
        (
            object("{apiVersion: apps/v1, kind: Deployment, spec: {}}"),
            Some("has no pod template"),
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
            let ManifestOutcome::Skipped(reasons) = injection(manual).apply(&mut after).unwrap() else {
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
    injection.mode = ProxyMode::Ingress;
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
    let mut manually_injected_namespace = namespace.clone();
    injection.apply(&mut namespace).unwrap();
    assert_eq!(
        namespace["metadata"]["annotations"],
        json!({"linkerd.io/inject": "ingress", "config.linkerd.io/opaque-ports": "25"})
    );
    injection.manual = true;
    injection.apply(&mut manually_injected_namespace).unwrap();
    assert_eq!(manually_injected_namespace, namespace);
    // Annotations from flags remain as settings of the user.
    uninject::apply(&mut namespace);
    assert_eq!(
        namespace["metadata"],
        json!({"name": "a", "annotations": {"config.linkerd.io/opaque-ports": "25"}})
    );
}

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    proxy: ProxyFlags,
}

#[test]
fn the_inbound_mode_applies_to_annotations_and_containers_and_an_unknown_one_is_refused() {
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
    let ManifestOutcome::InjectedOrUninjected(notes) = injection(false).apply(&mut pod).unwrap() else {
        panic!("{pod} is not injected");
    };
    assert!(notes[0].starts_with("config.linkerd.io/proxy-uid"), "{notes:?}");
    assert!(notes[1].contains("udp_ports_enabled"), "{notes:?}");
}

const DEPLOYMENT: &str = "
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - name: app
        image: a
        ports: [{containerPort: 8080, name: http}]
        readinessProbe: {tcpSocket: {port: http}, periodSeconds: 3}
        livenessProbe: {httpGet: {port: 8443, scheme: HTTPS, path: /live, httpHeaders: [{name: X, value: '$(y)'}]}}
        startupProbe: {httpGet: {port: 8080, path: /probes/app/startup}}
";

#[test]
fn new_flags_and_versions_apply_to_a_second_injection() {
    let original = object(DEPLOYMENT);
    let mut old = original.clone();
    injection(true).apply(&mut old).unwrap();
    let probe = |object: &Value, kind: &str| object["spec"]["template"]["spec"]["containers"][0][kind].clone();
    assert_eq!(
        probe(&old, "readinessProbe"),
        json!({"httpGet": {"path": "/probes/app/readiness", "port": 4191}, "periodSeconds": 3})
    );

    let mut newer = injection(true);
    newer.config.values.linkerd_version = "v-newer".to_owned();
    newer.annotations.push((annotation::ADMIN_PORT, "5191".to_owned()));
    let (mut again, mut injected_once) = (old.clone(), original.clone());
    assert!(matches!(
        newer.apply(&mut again).unwrap(),
        ManifestOutcome::InjectedOrUninjected(_)
    ));
    newer.apply(&mut injected_once).unwrap();
    assert_eq!(again, injected_once);
    assert_eq!(probe(&again, "readinessProbe")["httpGet"]["port"], 5191);
    assert!(again.to_string().contains(":v-newer\""), "{again}");

    // Without --manual, the sidecar is removed and the pod is annotated, so that the injector adds the sidecar.
    let (mut annotated, mut expected) = (old.clone(), original.clone());
    injection(false).apply(&mut annotated).unwrap();
    injection(false).apply(&mut expected).unwrap();
    assert_eq!(annotated, expected);
    assert!(uninject::apply(&mut old));
    assert_eq!(old, original);
}

#[test]
fn a_failed_injection_ends_the_command_with_the_reason() {
    for (yaml, reason) in [
        (
            "{apiVersion: v1, kind: Pod, spec: {hostNetwork: true, containers: [{name: a}]}}",
            "hostNetwork",
        ),
        (
            "{apiVersion: v1, kind: Pod, spec: {containers: [{name: istio-proxy}]}}",
            "a sidecar already",
        ),
        (
            "{apiVersion: v1, kind: Pod, spec: {containers: [{name: a, securityContext: {runAsUser: 2102}}]}}",
            "runs as user 2102",
        ),
        (
            "{apiVersion: v1, kind: Pod, metadata: {annotations: {config.linkerd.io/default-inbound-policy: none}}, \
             spec: {containers: [{name: a}]}}",
            "expected all-unauthenticated",
        ),
    ] {
        for manual in [false, true] {
            let mut pod = object(yaml);
            let error = injection(manual).apply(&mut pod).err().unwrap();
            assert!(error.to_string().contains(reason), "{error:#}");
            assert_eq!(pod, object(yaml));
        }
    }
}

#[test]
fn partial_manifests_get_annotations_only() {
    for template in [
        "{metadata: {labels: {a: b}}}",
        "{spec: null}",
        "{spec: {}}",
        "{spec: {containers: []}}",
        "{spec: {nodeSelector: {a: b}}}",
    ] {
        let yaml = format!(
            "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: web}}, spec: {{template: {template}}}}}"
        );
        let mut part = object(&yaml);
        let error = injection(true).apply(&mut part).err().unwrap();
        assert!(error.to_string().contains("has no spec.containers"), "{error:#}");
        assert_eq!(part, object(&yaml));
        assert!(
            matches!(
                injection(false).apply(&mut part).unwrap(),
                ManifestOutcome::InjectedOrUninjected(_)
            ),
            "{yaml}"
        );
        assert_eq!(
            part["spec"]["template"]["metadata"]["annotations"]["linkerd.io/inject"],
            "enabled"
        );
    }
}

#[test]
fn a_registry_applies_to_all_images() {
    let flags = |line: &[&str]| {
        let line = Line::parse_from([&["inject"], line].concat());
        let annotations = line.proxy.annotations().unwrap();
        annotations
            .into_iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        flags(&["--registry", "example.test/mesh/"]),
        ["config.linkerd.io/proxy-image=example.test/mesh/proxy"]
    );
    assert_eq!(
        flags(&[
            "--registry",
            "example.test",
            "--proxy-image",
            "own",
            "--enable-debug-sidecar"
        ]),
        [
            "config.linkerd.io/proxy-image=own",
            "config.linkerd.io/debug-image=example.test/debug",
            "config.linkerd.io/enable-debug-sidecar=true",
        ]
    );
}

#[derive(clap::Parser)]
struct ClusterLine {
    #[command(flatten)]
    cluster: kubernetes::Flags,
}

#[test]
fn injection_without_trust_anchors_is_refused() {
    let manifest = tempfile::NamedTempFile::new().unwrap();
    let input = manifest.path().to_owned();
    let cluster = ClusterLine::parse_from(["inject"]).cluster;
    let run = |manual| {
        let args = Args {
            inputs: vec![input.clone()],
            manual,
            ingress: false,
            ignore_cluster: true,
            values: None,
            output: Output::Yaml,
            proxy: ProxyFlags::default(),
        };
        main(&args, &cluster)
    };
    let error = run(true).unwrap_err().to_string();
    assert!(
        error.contains("trust anchors") && error.contains("--ignore-cluster"),
        "{error}"
    );
    run(false).unwrap();
}

#[test]
fn an_invalid_template_is_refused() {
    let mut pod = object("{apiVersion: v1, kind: Pod, spec: {containers: 5}}");
    assert!(injection(false).apply(&mut pod).is_err());
}
