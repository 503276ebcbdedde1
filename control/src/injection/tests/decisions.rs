//! Decisions whether a pod gets a sidecar.

use super::*;

fn reasons(case: &Case) -> String {
    match case.outcome().decision {
        Decision::Inject(ProxyMode::Standard) => "inject".to_owned(),
        Decision::Inject(ProxyMode::Ingress) => "ingress".to_owned(),
        Decision::Skip(reasons) => join_reasons(&reasons),
    }
}

#[test]
fn annotations_of_namespace_and_pod_decide_together() {
    const AT_NAMESPACE: &str = "invalid_inject_annotation_at_ns";
    const AT_WORKLOAD: &str = "invalid_inject_annotation_at_workload";
    const DISABLED: &str = "injection_disable_annotation_present";
    const ABSENT: &str = "injection_enable_annotation_absent";
    for (namespace, pod, expected) in [
        (None, None, ABSENT),
        (None, Some("enabled"), "inject"),
        (None, Some("ingress"), "ingress"),
        (None, Some("disabled"), ABSENT),
        (None, Some("yes"), AT_WORKLOAD),
        (Some("enabled"), None, "inject"),
        (Some("enabled"), Some(""), "inject"),
        (Some("enabled"), Some("enabled"), "inject"),
        (Some("enabled"), Some("ingress"), "ingress"),
        (Some("enabled"), Some("disabled"), DISABLED),
        (Some("enabled"), Some("true"), AT_WORKLOAD),
        (Some("ingress"), None, "ingress"),
        (Some("ingress"), Some("enabled"), "inject"),
        (Some("ingress"), Some("disabled"), DISABLED),
        (Some("disabled"), None, ABSENT),
        (Some("disabled"), Some("enabled"), "inject"),
        (Some("disabled"), Some("disabled"), ABSENT),
        (Some("on"), None, AT_NAMESPACE),
        (Some("on"), Some("enabled"), AT_NAMESPACE),
    ] {
        let mut case = Case::pod("metadata: {annotations: null}");
        case = case.namespace(&Vec::from_iter(namespace.map(|value| (annotation::INJECT, value))));
        case = case.annotate(&Vec::from_iter(pod.map(|value| (annotation::INJECT, value))));
        assert_eq!(reasons(&case), expected, "namespace {namespace:?}, pod {pod:?}");
        let is_invalid = [AT_NAMESPACE, AT_WORKLOAD].contains(&expected);
        assert_eq!(
            !case.outcome().warnings.is_empty(),
            is_invalid,
            "{namespace:?}, {pod:?}"
        );
    }
}

#[test]
fn pod_specs_can_prevent_injection() {
    let image = |image: &str| format!("spec: {{containers: [{{name: a, image: '{image}'}}]}}");
    let init = |name: &str, image: &str| format!("spec: {{initContainers: [{{name: {name}, image: '{image}'}}]}}");
    const EXISTS: &str = "sidecar_already_exists";
    const WINDOWS: &str = "windows_node";
    let affinity = |terms: &[&str]| {
        let terms = terms
            .iter()
            .map(|expression| format!("{{matchExpressions: [{expression}]}}"));
        let terms = terms.collect::<Vec<_>>().join(", ");
        format!(
            "spec: {{affinity: {{nodeAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: \
             {{nodeSelectorTerms: [{terms}]}}}}}}}}"
        )
    };
    for (yaml, expected) in [
        ("spec: {hostNetwork: true}".to_owned(), "host_network_enabled"),
        (image("cr.l5d.io/linkerd/proxy:edge-1"), EXISTS),
        (image("ghcr.io/tulle-mesh/proxy:1"), EXISTS),
        (image("gcr.io/istio-release/proxyv2:1.2"), EXISTS),
        (image("example.test/linkerd/proxy:1"), "inject"),
        ("spec: {containers: [{name: linkerd-proxy}]}".to_owned(), EXISTS),
        ("spec: {containers: [{name: istio-proxy}]}".to_owned(), EXISTS),
        (init("linkerd-proxy", "x"), EXISTS),
        (init("linkerd-init", "x"), EXISTS),
        (init("istio-init", "x"), EXISTS),
        (init("a", "cr.l5d.io/linkerd/proxy:edge-1"), EXISTS),
        (init("a", "cr.l5d.io/linkerd/proxy-init:v2"), EXISTS),
        (init("a", "gcr.io/istio-release/proxy_init:1"), EXISTS),
        (init("a", "x"), "inject"),
        (init("linkerd-network-validator", "x"), EXISTS),
        ("spec: {os: {name: windows}}".to_owned(), WINDOWS),
        ("spec: {os: {name: linux}}".to_owned(), "inject"),
        ("spec: {nodeSelector: {kubernetes.io/os: windows}}".to_owned(), WINDOWS),
        (
            "spec: {nodeSelector: {beta.kubernetes.io/os: windows}}".to_owned(),
            WINDOWS,
        ),
        ("spec: {nodeSelector: {kubernetes.io/os: linux}}".to_owned(), "inject"),
        ("spec: {nodeSelector: {os: windows}}".to_owned(), "inject"),
        (
            affinity(&["{key: kubernetes.io/os, operator: In, values: [windows]}"]),
            WINDOWS,
        ),
        (
            affinity(&["{key: kubernetes.io/os, operator: NotIn, values: [linux]}"]),
            WINDOWS,
        ),
        (
            affinity(&["{key: kubernetes.io/os, operator: In, values: [windows, linux]}"]),
            "inject",
        ),
        (affinity(&["{key: zone, operator: In, values: [windows]}"]), "inject"),
        (
            affinity(&[
                "{key: kubernetes.io/os, operator: In, values: [windows]}",
                "{key: zone, operator: Exists}",
            ]),
            "inject",
        ),
        // With a projected token, the service account token is not needed.
        ("spec: {automountServiceAccountToken: false}".to_owned(), "inject"),
        (
            "{metadata: {annotations: null}, spec: {hostNetwork: true, containers: [{name: linkerd-proxy}]}}"
                .to_owned(),
            "host_network_enabled,sidecar_already_exists,injection_enable_annotation_absent",
        ),
    ] {
        assert_eq!(reasons(&Case::pod(&yaml)), expected, "{yaml}");
    }
}

#[test]
fn an_application_that_runs_as_the_proxy_is_denied_with_both_fixes() {
    let app = |rest: &str| format!("spec: {{containers: [{{name: app, image: a, {rest}}}]}}");
    let denial_reason = |case: Case| {
        let outcome = case.outcome();
        assert_eq!(
            outcome.decision == Decision::Skip(vec![SkipReason::RunsAsProxyUser]),
            outcome.denial_reason.is_some()
        );
        outcome.denial_reason
    };
    let side =
        "spec: {initContainers: [{name: side, image: a, restartPolicy: Always, securityContext: {runAsUser: 2102}}]}";
    let pod_context = "spec: {securityContext: {runAsUser: 2102}}";
    for yaml in [
        app("securityContext: {runAsUser: 2102}"),
        side.to_owned(),
        pod_context.to_owned(),
    ] {
        let text = denial_reason(Case::pod(&yaml)).unwrap();
        for part in ["2102", "runAsUser", "config.linkerd.io/proxy-uid"] {
            assert!(text.contains(part), "{text}");
        }
        let other = [(annotation::PROXY_UID, "2103")];
        assert_eq!(denial_reason(Case::pod(&yaml).annotate(&other)), None, "{yaml}");
    }
    for yaml in [
        app("securityContext: {runAsUser: 1000}"),
        app("securityContext: {runAsUser: 2103, runAsGroup: 2102}"),
        "{spec: {securityContext: {runAsUser: 2102}, containers: [{name: app, securityContext: {runAsUser: 1}}]}}"
            .to_owned(),
    ] {
        assert_eq!(denial_reason(Case::pod(&yaml)), None, "{yaml}");
    }
    let same_group =
        Case::pod(&app("securityContext: {runAsGroup: 2103}")).annotate(&[(annotation::PROXY_GID, "2103")]);
    assert!(
        denial_reason(same_group)
            .unwrap()
            .contains("config.linkerd.io/proxy-gid")
    );
    // An init container may bypass the proxy, which may not run yet (a sidecar that is not native). It only causes a warning.
    let setup = Case::pod("spec: {initContainers: [{name: setup, image: a, securityContext: {runAsUser: 2102}}]}");
    let outcome = setup.outcome();
    assert_eq!(outcome.denial_reason, None);
    assert!(
        outcome.warnings[0].contains("\"setup\" runs as user 2102"),
        "{:?}",
        outcome.warnings
    );
}

#[test]
fn an_invalid_service_account_name_is_denied_with_both_fixes() {
    let denial_reason = |fields: &str| Case::pod(&format!("spec: {{{fields}}}")).outcome().denial_reason;
    for fields in [
        "serviceAccountName: web.v2".to_owned(),
        "serviceAccountName: null, serviceAccount: web.v2".to_owned(),
        format!("serviceAccountName: {}", "a".repeat(64)),
    ] {
        let outcome = Case::pod(&format!("spec: {{{fields}}}")).outcome();
        assert_eq!(
            outcome.decision,
            Decision::Skip(vec![SkipReason::InvalidServiceAccount]),
            "{fields}"
        );
        let text = outcome.denial_reason.unwrap();
        for part in [
            "run the pod as a service account whose name",
            "linkerd.io/inject: disabled",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
    assert!(
        denial_reason("serviceAccountName: web.v2")
            .unwrap()
            .contains("\"web.v2\"")
    );
    for fields in [
        "serviceAccountName: web-v2",
        "serviceAccountName: null",
        "serviceAccountName: ''",
    ] {
        assert_eq!(denial_reason(fields), None, "{fields}");
    }
    // A pod outside the mesh needs no identity.
    let outside = Case::pod("{metadata: {annotations: null}, spec: {serviceAccountName: web.v2}}").outcome();
    assert_eq!(outside.denial_reason, None);
}

#[test]
fn without_a_projected_token_the_pod_needs_its_service_account_token() {
    const OFF: &str = "identity: {serviceAccountTokenProjection: false}";
    const LACKS: &str = "disabled_automount_service_account_token_account";
    let bare = "spec: {containers: [{name: app, image: a}]}";
    assert_eq!(reasons(&Case::pod("").values(OFF)), "inject");
    assert_eq!(reasons(&Case::pod(bare).values(OFF)), LACKS);
    let unmounted = "spec: {automountServiceAccountToken: false}";
    assert_eq!(reasons(&Case::pod(unmounted).values(OFF)), LACKS);
    // Manifests have no token mount yet.
    let mut case = Case::pod(bare).values(OFF);
    case.config.origin = InjectionOrigin::CommandLine;
    assert_eq!(reasons(&case), "inject");
}

#[test]
fn the_outcome_has_the_location_of_the_annotation() {
    let inject = [(annotation::INJECT, "enabled")];
    let bare = "metadata: {annotations: null}";
    assert_eq!(Case::pod(bare).outcome().annotation_location, None);
    assert_eq!(
        Case::pod(bare).namespace(&inject).outcome().annotation_location,
        Some(AnnotationLocation::Namespace)
    );
    assert_eq!(
        Case::pod("").namespace(&inject).outcome().annotation_location,
        Some(AnnotationLocation::Workload)
    );
}

#[test]
fn a_misspelled_inject_annotation_has_no_effect_and_causes_a_warning() {
    let typo = [("linkerd.io/injected", "enabled")];
    let bare = "metadata: {annotations: null}";
    for (case, object) in [
        (Case::pod(bare).annotate(&typo), "pod"),
        (Case::pod(bare).namespace(&typo), "namespace"),
    ] {
        let outcome = case.outcome();
        assert_eq!(outcome.decision, Decision::Skip(vec![SkipReason::NotEnabled]));
        let [warning] = &outcome.warnings[..] else {
            panic!("{outcome:?}");
        };
        assert!(
            warning.contains(object) && warning.ends_with("the key is linkerd.io/inject"),
            "{warning}"
        );
    }
}

#[test]
fn a_skipped_pod_still_gets_its_opaque_ports_annotation() {
    let bare = "metadata: {annotations: null}";
    let opaque = |case: Case| {
        let injected = case.patched(&case.outcome());
        injected.annotation(annotation::OPAQUE_PORTS).map(str::to_owned)
    };
    let namespace = [(annotation::OPAQUE_PORTS, "9000")];
    assert_eq!(opaque(Case::pod(bare)).as_deref(), Some("3306"));
    assert_eq!(opaque(Case::pod(bare).namespace(&namespace)).as_deref(), Some("9000"));
    let own = Case::pod(bare)
        .annotate(&[(annotation::OPAQUE_PORTS, "1")])
        .namespace(&namespace);
    assert!(own.outcome().patch.0.is_empty());
    let plain = Case::pod("{metadata: {annotations: null}, spec: {containers: [{name: a}]}}");
    assert!(plain.outcome().patch.0.is_empty());
}

#[test]
fn a_pod_that_already_has_a_sidecar_gets_the_restrictions_of_its_namespace() {
    const POLICY: &str = annotation::DEFAULT_INBOUND_POLICY;
    const PORTS: &str = annotation::REQUIRE_IDENTITY_INBOUND_PORTS;
    let namespace = [
        (POLICY, "deny"),
        (PORTS, "80"),
        (annotation::PROXY_CPU_REQUEST, "1"),
        (annotation::INJECT, "enabled"),
    ];
    let manual = "{spec: {containers: [{name: app, image: a}, {name: linkerd-proxy, image: p}]}}";
    let restricted = |case: Case| {
        let outcome = case.outcome();
        assert_eq!(outcome.decision, Decision::Skip(vec![SkipReason::SidecarExists]));
        let pod = case.patched(&outcome);
        assert_eq!(pod.annotation(annotation::PROXY_CPU_REQUEST), None);
        [POLICY, PORTS].map(|key| pod.annotation(key).map(str::to_owned))
    };
    let annotations = |policy: &str, ports: &str| [policy, ports].map(|value| Some(value.to_owned()));
    assert_eq!(
        restricted(Case::pod(manual).namespace(&namespace)),
        annotations("deny", "80")
    );
    // The pod's own annotations take precedence, as in injected pods.
    let own = [(POLICY, "all-authenticated"), (PORTS, "")];
    let case = Case::pod(manual).namespace(&namespace).annotate(&own);
    assert_eq!(restricted(case), annotations("all-authenticated", ""));
    let chart_ports = Case::pod(manual).values("proxy: {requireIdentityOnInboundPorts: '90'}");
    assert_eq!(restricted(chart_ports), [None, Some("90".to_owned())]);
    // A sidecar of another mesh does not read these annotations.
    let foreign = "{spec: {containers: [{name: app, image: a}, {name: istio-proxy, image: p}]}}";
    assert_eq!(restricted(Case::pod(foreign).namespace(&namespace)), [None, None]);
}

#[test]
fn a_service_gets_only_the_opaque_ports_annotation() {
    let namespace = [(annotation::OPAQUE_PORTS, "9000")];
    for (yaml, namespace, expected) in [
        ("spec: {ports: [{port: 80}]}", &[][..], None),
        ("spec: {ports: [{port: 3306}]}", &[], Some("3306")),
        (
            "spec: {ports: [{port: 3307, targetPort: 3306}, {port: 25}]}",
            &[],
            Some("3307,25"),
        ),
        // The target port decides, not the port. The number of a named target port is unknown.
        ("spec: {ports: [{port: 3306, targetPort: 80}]}", &[], None),
        ("spec: {ports: [{port: 3306, targetPort: db}]}", &[], None),
        ("spec: {ports: [{port: 80}]}", &namespace, Some("9000")),
        ("spec: {type: ExternalName}", &[], None),
        (
            "{metadata: {annotations: {config.linkerd.io/opaque-ports: ''}}, spec: {ports: [{port: 25}]}}",
            &namespace,
            None,
        ),
    ] {
        let patch = service_patch(yaml, namespace, "");
        let written = patch.0.last().map(|last| serde_json::to_value(last).unwrap());
        let value = written.as_ref().map(|last| last["value"].as_str().unwrap());
        assert_eq!(value, expected, "{yaml}");
    }
    let patch = service_patch(
        "spec: {ports: [{port: 8005}]}",
        &[],
        "proxy: {opaquePorts: '8000-8010'}",
    );
    assert_eq!(
        serde_json::to_value(patch).unwrap(),
        parse(
            "[{op: add, path: /metadata/annotations, value: {}}, \
             {op: add, path: /metadata/annotations/config.linkerd.io~1opaque-ports, value: '8005'}]"
        )
    );
}
