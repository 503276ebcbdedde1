//! The effect of each annotation of the injector.

use super::*;

/// Rows: an annotation without `config.linkerd.io/`, its value, the place of its effect, and the value at this place.
///
/// The place is `env NAME` or a JSON pointer, both in the sidecar's container, or `init --flag`.
const EFFECTS: &[(&str, &str, &str, &str)] = &[
    (
        "proxy-image",
        "example.test/proxy",
        "/image",
        "example.test/proxy:edge-1",
    ),
    ("proxy-version", "v9", "/image", "ghcr.io/tulle-mesh/proxy:v9"),
    ("image-pull-policy", "Always", "/imagePullPolicy", "Always"),
    ("inbound-port", "14143", "env INBOUND_LISTEN_ADDR", "0.0.0.0:14143"),
    ("inbound-port", "14143", "init --incoming-proxy-port", "14143"),
    ("inbound-port", "14143", "/ports/0/containerPort", "14143"),
    ("outbound-port", "14140", "env OUTBOUND_LISTEN_ADDRS", "127.0.0.1:14140"),
    ("outbound-port", "14140", "init --outgoing-proxy-port", "14140"),
    ("admin-port", "14191", "env ADMIN_LISTEN_ADDR", "0.0.0.0:14191"),
    ("admin-port", "14191", "/readinessProbe/httpGet/port", "14191"),
    ("admin-port", "14191", "init --inbound-ports-to-ignore", "4190,14191"),
    ("control-port", "14190", "env CONTROL_LISTEN_ADDR", "0.0.0.0:14190"),
    ("control-port", "14190", "init --inbound-ports-to-ignore", "14190,4191"),
    (
        "skip-inbound-ports",
        "22, 80-90",
        "init --inbound-ports-to-ignore",
        "4190,4191,22,80-90",
    ),
    ("skip-outbound-ports", "443", "init --outbound-ports-to-ignore", "443"),
    (
        "skip-subnets",
        "10.0.0.0/8, fd00::/8",
        "init --subnets-to-ignore",
        "10.0.0.0/8,fd00::/8",
    ),
    (
        "opaque-ports",
        "db,9000-9001",
        "env INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION",
        "3306,9000-9001",
    ),
    ("opaque-ports", "", "env INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION", ""),
    // Has no effect: the ports are those of the containers.
    ("pod-inbound-ports", "1", "env INBOUND_PORTS", "3306,8080"),
    ("proxy-cpu-request", "100m", "/resources/requests/cpu", "100m"),
    ("proxy-cpu-request", "1500m", "env CORES", "2"),
    ("proxy-cpu-request", "2100m", "env CORES_MIN", "3"),
    ("proxy-cpu-limit", "2.5", "/resources/limits/cpu", "2.5"),
    ("proxy-cpu-limit", "2.5", "env CORES_MAX", "3"),
    ("proxy-memory-request", "20Mi", "/resources/requests/memory", "20Mi"),
    ("proxy-memory-limit", "1Gi", "/resources/limits/memory", "1Gi"),
    (
        "proxy-ephemeral-storage-request",
        "1M",
        "/resources/requests/ephemeral-storage",
        "1M",
    ),
    (
        "proxy-ephemeral-storage-limit",
        "2e6",
        "/resources/limits/ephemeral-storage",
        "2e6",
    ),
    ("proxy-cpu-ratio-limit", "0.5", "env CORES_MAX_RATIO", "0.5"),
    ("proxy-uid", "3000", "/securityContext/runAsUser", "3000"),
    ("proxy-uid", "3000", "init --proxy-uid", "3000"),
    ("proxy-gid", "3001", "/securityContext/runAsGroup", "3001"),
    ("proxy-gid", "3001", "init --proxy-gid", "3001"),
    (
        "proxy-admin-shutdown",
        "enabled",
        "env SHUTDOWN_ENDPOINT_ENABLED",
        "true",
    ),
    (
        "proxy-log-level",
        "debug",
        "env LOG",
        "debug,[{headers}]=off,[{request}]=off",
    ),
    (
        "proxy-log-http-headers",
        "insecure",
        "env LOG",
        "warn,linkerd=info,hickory=error",
    ),
    ("proxy-log-format", "json", "env LOG_FORMAT", "json"),
    ("access-log", "apache", "env ACCESS_LOG", "apache"),
    ("access-log", "json", "env ACCESS_LOG", "json"),
    ("default-inbound-policy", "deny", "env INBOUND_DEFAULT_POLICY", "deny"),
    ("default-inbound-policy", "audit", "env INBOUND_DEFAULT_POLICY", "audit"),
    (
        "proxy-require-identity-inbound-ports",
        "80,90",
        "env INBOUND_PORTS_REQUIRE_IDENTITY",
        "80,90",
    ),
    (
        "proxy-metrics-hostname-labels",
        "t",
        "env OUTBOUND_METRICS_HOSTNAME_LABELS",
        "true",
    ),
    (
        "proxy-outbound-connect-timeout",
        "1.5s",
        "env OUTBOUND_CONNECT_TIMEOUT",
        "1500ms",
    ),
    (
        "proxy-inbound-connect-timeout",
        "1m",
        "env INBOUND_CONNECT_TIMEOUT",
        "60000ms",
    ),
    (
        "proxy-outbound-discovery-cache-unused-timeout",
        "1m30s",
        "env OUTBOUND_DISCOVERY_IDLE_TIMEOUT",
        "90s",
    ),
    (
        "proxy-inbound-discovery-cache-unused-timeout",
        "2m",
        "env INBOUND_DISCOVERY_IDLE_TIMEOUT",
        "120s",
    ),
    (
        "proxy-disable-outbound-protocol-detect-timeout",
        "true",
        "env OUTBOUND_DETECT_TIMEOUT",
        "365d",
    ),
    (
        "proxy-disable-inbound-protocol-detect-timeout",
        "1",
        "env INBOUND_DETECT_TIMEOUT",
        "365d",
    ),
    (
        "enable-external-profiles",
        "true",
        "env DESTINATION_PROFILE_SUFFIXES",
        ".",
    ),
    (
        "enable-gateway",
        "true",
        "env INBOUND_GATEWAY_SUFFIXES",
        "svc.cluster.local.",
    ),
    ("proxy-await", "disabled", "/startupProbe", "null"),
    ("shutdown-grace-period", "30s", "env SHUTDOWN_GRACE_PERIOD", "30000ms"),
    ("proxy-enable-native-sidecar", "false", "/restartPolicy", "null"),
    ("proxy-additional-env", r#"[{"name":"A","value":"b"}]"#, "env A", "b"),
];

#[test]
fn every_annotation_has_its_effect() {
    for (name, value, place, expected) in EFFECTS {
        let key = format!("config.linkerd.io/{name}");
        let injected = Case::pod("").annotate(&[(&key, value)]).injected();
        assert_eq!(
            effective_value(&injected, place),
            *expected,
            "{name}: {value} at {place}"
        );
        // The annotation must change the value.
        if *name != "pod-inbound-ports" {
            let plain = Case::pod("").injected();
            assert_ne!(
                effective_value(&plain, place),
                *expected,
                "{name}: {place} without the annotation"
            );
        }
    }
}

#[test]
fn annotations_of_the_namespace_are_inherited_except_those_for_pods_only() {
    let not_inherited = ["proxy-cpu-ratio-limit", "enable-gateway"];
    let plain = Case::pod("").injected();
    for (name, value, place, expected) in EFFECTS {
        let key = format!("config.linkerd.io/{name}");
        let injected = Case::pod("").namespace(&[(&key, value)]).injected();
        if not_inherited.contains(name) {
            assert_eq!(injected.annotation(&key), None, "{name}");
            assert_eq!(
                effective_value(&injected, place),
                effective_value(&plain, place),
                "{name}: {place}"
            );
        } else {
            assert_eq!(injected.annotation(&key), Some(*value), "{name}");
            assert_eq!(
                effective_value(&injected, place),
                *expected,
                "{name}: {value} at {place}"
            );
        }
    }
    let others = [
        ("config.linkerd.io/debug-image", "x"),
        ("config.linkerd.io/debug-image-version", "x"),
        ("config.linkerd.io/debug-image-pull-policy", "Never"),
        ("config.linkerd.io/close-wait-timeout", "5s"),
        ("config.beta.linkerd.io/proxy-enable-native-sidecar", "false"),
        ("config.linkerd.io/admission-webhooks", "disabled"),
        ("example.test/other", "x"),
    ];
    let injected = Case::pod("").namespace(&others).injected();
    for (key, _) in others {
        assert_eq!(injected.annotation(key), None, "{key}");
    }
    let mode = Case::pod("metadata: {annotations: null}").namespace(&[(annotation::INJECT, "ingress")]);
    assert_eq!(mode.injected().annotation(annotation::INJECT), Some("ingress"));
}

#[test]
fn the_annotation_of_the_pod_takes_precedence() {
    let key = "config.linkerd.io/proxy-version";
    let injected = Case::pod("")
        .namespace(&[(key, "ns")])
        .annotate(&[(key, "pod")])
        .injected();
    assert_eq!(effective_value(&injected, "/image"), "ghcr.io/tulle-mesh/proxy:pod");
    let chart = Case::pod("").values("proxy: {image: {version: chart}}");
    assert_eq!(
        effective_value(&chart.injected(), "/image"),
        "ghcr.io/tulle-mesh/proxy:chart"
    );
    assert_eq!(
        effective_value(&chart.annotate(&[(key, "pod")]).injected(), "/image"),
        "ghcr.io/tulle-mesh/proxy:pod"
    );
}

#[test]
fn a_list_of_ports_without_a_valid_entry_does_not_replace_the_list_of_the_chart() {
    let chart = "{proxyInit: {ignoreInboundPorts: '25', ignoreOutboundPorts: '25'}, proxy: {opaquePorts: '25'}}";
    let injected = |key: &str, ports: &str| {
        let case = Case::pod("")
            .values(chart)
            .annotate(&[(&format!("config.linkerd.io/{key}"), ports)]);
        case.patched(&case.outcome())
    };
    let unchanged = Case::pod("").values(chart).injected();
    for key in ["skip-inbound-ports", "skip-outbound-ports", "opaque-ports"] {
        assert_eq!(injected(key, "90-80, 70000").0["spec"], unchanged.0["spec"], "{key}");
        // The valid entries of a list apply, and an empty list is valid.
        assert_eq!(
            injected(key, "26, 90-80").0["spec"],
            injected(key, "26").0["spec"],
            "{key}"
        );
        assert_ne!(injected(key, "26").0["spec"], unchanged.0["spec"], "{key}");
        assert_ne!(injected(key, "").0["spec"], unchanged.0["spec"], "{key}");
    }
}

#[test]
fn invalid_values_are_ignored_with_a_warning() {
    let plain = Case::pod("").injected();
    let spec = plain.0["spec"].clone();
    for (name, value, reason) in [
        ("proxy-image", "a b", "expected "),
        ("proxy-version", "", "expected "),
        ("image-pull-policy", "Sometimes", "Always, Never or IfNotPresent"),
        ("debug-image-pull-policy", "x", "Always, Never or IfNotPresent"),
        ("enable-debug-sidecar", "yes", "true or false"),
        ("inbound-port", "0", "a port"),
        ("outbound-port", "65536", "a port"),
        ("admin-port", "-1", "a port"),
        ("control-port", "http", "a port"),
        ("skip-inbound-ports", "80-", "80-"),
        ("skip-outbound-ports", "90-80", "90-80"),
        ("skip-subnets", "10.0.0.0", "networks"),
        ("proxy-cpu-request", "half", "a quantity of CPU"),
        ("proxy-cpu-limit", "-1", "a quantity of CPU"),
        ("proxy-cpu-limit", "inf", "a quantity of CPU"),
        ("proxy-cpu-ratio-limit", "1", "above 0 and below 1"),
        ("proxy-memory-request", "20 Mi", "a quantity"),
        ("proxy-memory-limit", "20MB", "a quantity"),
        ("proxy-ephemeral-storage-request", "Mi", "a quantity"),
        ("proxy-ephemeral-storage-limit", "", "a quantity"),
        ("proxy-uid", "0", "a user id"),
        ("proxy-gid", "-2", "a group id"),
        ("proxy-log-level", "linkerd==x", "levels"),
        ("proxy-log-format", "xml", "plain or json"),
        ("proxy-log-http-headers", "on", "off or insecure"),
        ("access-log", "nginx", "apache, json or none"),
        ("proxy-metrics-hostname-labels", "on", "true or false"),
        ("proxy-outbound-connect-timeout", "5", "a duration"),
        ("proxy-inbound-connect-timeout", "-1s", "a duration"),
        ("proxy-outbound-discovery-cache-unused-timeout", "1d", "a duration"),
        ("proxy-inbound-discovery-cache-unused-timeout", "", "a duration"),
        ("proxy-disable-outbound-protocol-detect-timeout", "x", "true or false"),
        ("proxy-disable-inbound-protocol-detect-timeout", "x", "true or false"),
        ("enable-external-profiles", "x", "true or false"),
        ("enable-gateway", "x", "true or false"),
        ("close-wait-timeout", "x", "a duration"),
        ("close-wait-timeout", "30s", "runAsRoot"),
        ("proxy-await", "true", "enabled or disabled"),
        ("shutdown-grace-period", "x", "a duration"),
        ("proxy-enable-native-sidecar", "x", "true or false"),
        ("proxy-additional-env", "{}", "a JSON list"),
        ("proxy-additional-env", r#"[{"value":"x"}]"#, "a JSON list"),
        (
            "opaque-ports",
            "25,587,3306,4444,4567,4568,5432,6379,9300,11211,unknown",
            "unknown",
        ),
    ] {
        let key = format!("config.linkerd.io/{name}");
        let case = Case::pod("").annotate(&[(&key, value)]);
        let outcome = case.outcome();
        let [warning] = &outcome.warnings[..] else {
            panic!("{name}: {:?}", outcome.warnings);
        };
        assert!(warning.starts_with(&key) && warning.contains(reason), "{warning}");
        assert_eq!(case.patched(&outcome).0["spec"], spec, "{name}: {value}");
    }
    let wait = Case::pod("").annotate(&[(annotation::ALPHA_WAIT_BEFORE_EXIT_SECONDS, "-1")]);
    assert_eq!(wait.outcome().warnings.len(), 1);
}

#[test]
fn an_inbound_connect_timeout_below_the_minimum_is_raised_with_a_warning() {
    let key = annotation::PROXY_INBOUND_CONNECT_TIMEOUT;
    let case = Case::pod("")
        .values("proxy: {inboundConnectTimeout: 10s}")
        .annotate(&[(key, "3999ms")]);
    let outcome = case.outcome();
    let [warning] = &outcome.warnings[..] else {
        panic!("{:?}", outcome.warnings);
    };
    assert_eq!(*warning, format!("{key}: \"3999ms\" is below the minimum; 4s is used"));
    assert_eq!(case.patched(&outcome).env("INBOUND_CONNECT_TIMEOUT"), Some("4000ms"));
    let least = Case::pod("").annotate(&[(key, "4s")]).injected();
    assert_eq!(least.env("INBOUND_CONNECT_TIMEOUT"), Some("4000ms"));
}

#[test]
fn invalid_values_that_restrict_access_deny_the_pod() {
    for (key, value, reason) in [
        (
            annotation::DEFAULT_INBOUND_POLICY,
            "allow",
            "\"allow\" is invalid; expected all-unauthenticated",
        ),
        (annotation::DEFAULT_INBOUND_POLICY, "", "expected all-unauthenticated"),
        (
            annotation::REQUIRE_IDENTITY_INBOUND_PORTS,
            "8080,unknown",
            "\"unknown\" is neither a port",
        ),
        (
            annotation::REQUIRE_IDENTITY_INBOUND_PORTS,
            "80-",
            "\"80-\" is neither a port",
        ),
        (annotation::UNREDIRECTED_IPV6, "Drop", "expected "),
        (annotation::PROXY_ADMIN_SHUTDOWN, "true", "expected enabled or disabled"),
        (annotation::DISABLE_TAP, "yes", "expected true or false"),
    ] {
        for case in [
            Case::pod("").annotate(&[(key, value)]),
            Case::pod("").namespace(&[(key, value)]),
        ] {
            let outcome = case.outcome();
            assert_eq!(outcome.decision, Decision::Skip(vec![SkipReason::InvalidRestriction]));
            let denial_reason = outcome.denial_reason.clone().unwrap();
            assert!(
                denial_reason.starts_with(key) && denial_reason.contains(reason),
                "{denial_reason}"
            );
            // If the caller does not deny the pod, it has no sidecar.
            assert_eq!(case.patched(&outcome).container(PROXY_CONTAINER), &Value::Null);
        }
        assert!(
            check_annotation(key, value).is_err() || value.contains("unknown"),
            "{key}: {value}"
        );
    }
}

#[test]
fn the_proxy_of_a_gateway_sends_the_selector_of_exported_services() {
    let (gateway, exported) = (annotation::ENABLE_GATEWAY, annotation::GATEWAY_EXPORTED_SERVICES);
    let sent = |case: &Case| {
        let injected = case.injected();
        ["POLICY_WORKLOAD", "DESTINATION_CONTEXT"].map(|name| injected.env(name).unwrap().to_owned())
    };
    let plain = sent(&Case::pod(""));
    for (annotations, selector) in [
        (
            &[(gateway, "true"), (exported, " team in (a, b),!internal ")][..],
            "team in (a, b),!internal",
        ),
        (&[(gateway, "true"), (exported, "")], ""),
        (&[(gateway, "true")], ""),
        (&[(exported, "team=a")], ""),
    ] {
        let found = sent(&Case::pod("").annotate(annotations));
        for (found, plain) in found.iter().zip(&plain) {
            let mut expected: Value = serde_json::from_str(plain).unwrap();
            if !selector.is_empty() {
                expected["exportedServices"] = selector.into();
            }
            assert_eq!(
                serde_json::from_str::<Value>(found).unwrap(),
                expected,
                "{annotations:?}"
            );
        }
    }
    // The namespace has no influence.
    let case = Case::pod("")
        .annotate(&[(gateway, "true")])
        .namespace(&[(exported, "team=a")]);
    assert_eq!(sent(&case), plain);
    for invalid in ["team a", "team=$(_pod_ns)", "team=\"a\"", &*"a".repeat(257)] {
        let outcome = Case::pod("").annotate(&[(exported, invalid)]).outcome();
        assert_eq!(outcome.decision, Decision::Skip(vec![SkipReason::InvalidRestriction]));
        let reason = outcome.denial_reason.unwrap();
        assert!(
            reason.starts_with(exported) && reason.contains("expected a label selector"),
            "{reason}"
        );
        assert!(check_annotation(exported, invalid).is_err(), "{invalid}");
    }
}

#[test]
fn unknown_keys_of_the_mesh_are_reported() {
    for (key, is_reported) in [
        ("config.linkerd.io/default-inbound-policies", true),
        ("config.tulle.dev/inbound-modus", true),
        ("config.linkerd.io/proxy-await", false),
        ("example.org/default-inbound-policies", false),
        ("linkerd.io/inject", false),
    ] {
        let warnings = Case::pod("").annotate(&[(key, "enabled")]).outcome().warnings;
        let is_named = warnings.iter().any(|warning| warning.starts_with(key));
        assert_eq!(is_named, is_reported, "{key}: {warnings:?}");
        assert_eq!(check_annotation(key, "enabled").is_err(), is_reported, "{key}");
    }
}

const SIDECAR_PORTS: &str = "
spec:
  initContainers:
  - {name: setup, image: a, ports: [{containerPort: 1, name: setup}]}
  - {name: side, image: a, restartPolicy: Always, ports: [{containerPort: 9001, name: side}, {containerPort: 6379}],
     startupProbe: {httpGet: {port: 9002}}}
";

#[test]
fn port_lists_accept_names_of_container_ports_blanks_and_empty_entries() {
    let injected = Case::pod(SIDECAR_PORTS)
        .annotate(&[
            (annotation::OPAQUE_PORTS, "side,,3306"),
            (annotation::SKIP_INBOUND_PORTS, "http, side,"),
            (annotation::SKIP_OUTBOUND_PORTS, "25,"),
            (annotation::REQUIRE_IDENTITY_INBOUND_PORTS, "9000,side,"),
        ])
        .injected();
    assert_eq!(
        injected.env("INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION"),
        Some("9001,3306")
    );
    assert_eq!(
        injected.init_flag("--inbound-ports-to-ignore"),
        Some("4190,4191,8080,9001")
    );
    assert_eq!(injected.init_flag("--outbound-ports-to-ignore"), Some("25"));
    assert_eq!(injected.env("INBOUND_PORTS_REQUIRE_IDENTITY"), Some("9000,9001"));
    let plain = Case::pod(SIDECAR_PORTS).injected();
    assert_eq!(plain.env("INBOUND_PORTS"), Some("3306,6379,8080,9001,9002"));
    assert_eq!(plain.annotation(annotation::OPAQUE_PORTS), Some("3306,6379"));
    // Ports of init containers that end are ignored.
    let setup = Case::pod(SIDECAR_PORTS).annotate(&[(annotation::SKIP_INBOUND_PORTS, "setup")]);
    assert!(setup.outcome().warnings[0].contains("\"setup\""));
}

#[test]
fn annotations_with_alpha_and_beta_names_and_annotations_of_other_containers_take_effect() {
    let native = |annotations: &[(&str, &str)]| {
        let injected = Case::pod("").annotate(annotations).injected();
        injected.names("initContainers").contains(&PROXY_CONTAINER)
    };
    let (alpha, beta) = (
        annotation::ALPHA_ENABLE_NATIVE_SIDECAR,
        annotation::BETA_ENABLE_NATIVE_SIDECAR,
    );
    let stable = annotation::PROXY_ENABLE_NATIVE_SIDECAR;
    assert!(native(&[]));
    assert!(!native(&[(alpha, "false")]));
    assert!(native(&[(alpha, "false"), (beta, "true")]));
    assert!(!native(&[(alpha, "true"), (beta, "true"), (stable, "false")]));

    let wait = Case::pod("")
        .annotate(&[(annotation::ALPHA_WAIT_BEFORE_EXIT_SECONDS, "5")])
        .injected();
    assert_eq!(
        wait.container(PROXY_CONTAINER)["lifecycle"],
        parse("preStop: {exec: {command: [/bin/sleep, '5']}}")
    );

    let root = "proxyInit: {runAsRoot: true}";
    let close = Case::pod("")
        .values(root)
        .annotate(&[(annotation::CLOSE_WAIT_TIMEOUT, "90s")])
        .injected();
    assert_eq!(close.init_flag("--timeout-close-wait-secs"), Some("90"));
    assert_eq!(close.container(INIT_CONTAINER)["securityContext"]["privileged"], true);

    let debug = Case::pod("").annotate(&[
        (annotation::ENABLE_DEBUG_SIDECAR, "true"),
        (annotation::DEBUG_IMAGE, "example.test/debug"),
        (annotation::DEBUG_IMAGE_VERSION, "7"),
        (annotation::DEBUG_IMAGE_PULL_POLICY, "Never"),
    ]);
    let debug = debug.injected();
    let container = debug.container(DEBUG_CONTAINER);
    assert_eq!(
        (&container["image"], &container["imagePullPolicy"]),
        (&"example.test/debug:7".into(), &"Never".into())
    );

    let tap = |value: &str| Case::pod("").annotate(&[(annotation::DISABLE_TAP, value)]).injected();
    assert_eq!(
        tap("false").env("TAP_SVC_NAME"),
        Some("linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local")
    );
    assert_eq!(tap("true").env("TAP_SVC_NAME"), None);
    // Without tap an application can listen on the control port, so the port is redirected.
    assert_eq!(tap("false").init_flag("--inbound-ports-to-ignore"), Some("4190,4191"));
    assert_eq!(tap("true").init_flag("--inbound-ports-to-ignore"), Some("4191"));
}

#[test]
fn additional_variables_are_merged_by_name_from_chart_to_namespace_to_pod() {
    let key = annotation::PROXY_ADDITIONAL_ENV;
    let chart = "proxy: {additionalEnv: [{name: A, value: chart}, {name: B, value: chart}], experimentalEnv: [{name: X, value: x}]}";
    let case = Case::pod("")
        .values(chart)
        .namespace(&[(key, r#"[{"name":"B","value":"ns"},{"name":"C","value":"ns"}]"#)])
        .annotate(&[(key, r#"[{"name":"C","value":"pod"},{"name":"D","value":"pod"}]"#)]);
    let injected = case.injected();
    let env = injected.container(PROXY_CONTAINER)["env"].as_array().unwrap();
    let last: Vec<_> = env[env.len() - 5..]
        .iter()
        .map(|var| (&var["name"], &var["value"]))
        .collect();
    let expected =
        [("A", "chart"), ("B", "ns"), ("C", "pod"), ("D", "pod"), ("X", "x")].map(|(a, b)| (a.into(), b.into()));
    let expected: Vec<(&Value, &Value)> = expected.iter().map(|(name, value)| (name, value)).collect();
    assert_eq!(last, expected);
}

#[test]
fn each_invalid_value_has_one_warning() {
    let (env, log, ports) = (
        annotation::PROXY_ADDITIONAL_ENV,
        annotation::ACCESS_LOG,
        annotation::OPAQUE_PORTS,
    );
    // The variables of the namespace are applied before the annotations of the pod, so their warning is first, although the key
    // `access-log` sorts before theirs. The pod inherits them, but the same problem is not listed again.
    let case = Case::pod("")
        .namespace(&[(env, "nonsense")])
        .annotate(&[(log, "nginx"), (ports, "a b,80,a b")]);
    let warnings = case.outcome().warnings;
    let keys: Vec<_> = warnings
        .iter()
        .map(|warning| warning.split(':').next().unwrap())
        .collect();
    assert_eq!(keys, [env, log, ports], "{warnings:?}");
}

fn effective_value(injected: &Injected, place: &str) -> String {
    if let Some(name) = place.strip_prefix("env ") {
        return injected.env(name).unwrap_or("absent").to_owned();
    }
    if let Some(flag) = place.strip_prefix("init ") {
        return injected.init_flag(flag).unwrap_or("absent").to_owned();
    }
    let proxy = injected.container(PROXY_CONTAINER);
    let value = proxy.pointer(place).unwrap_or(&Value::Null);
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
