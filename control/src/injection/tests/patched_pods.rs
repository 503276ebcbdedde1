//! Containers, volumes, ports, labels and annotations of patched pods.

use super::*;

const NOT_NATIVE: (&str, &str) = (annotation::PROXY_ENABLE_NATIVE_SIDECAR, "false");
const NO_AWAIT: (&str, &str) = (annotation::PROXY_AWAIT, "disabled");
const DEBUG: (&str, &str) = (annotation::ENABLE_DEBUG_SIDECAR, "true");
const IMAGE: (&str, &str) = (annotation::DEBUG_IMAGE, "example.test/debug");
const POD_WITH_INIT_CONTAINERS: &str = "spec: {initContainers: [{name: own, image: own}]}";

#[test]
fn the_order_of_containers_depends_on_the_sidecar_mode() {
    let names = |case: Case| {
        let injected = case.injected();
        (
            injected.names("initContainers").join(" "),
            injected.names("containers").join(" "),
        )
    };
    let check = |case: Case, init: &str, containers: &str| {
        assert_eq!(names(case), (init.to_owned(), containers.to_owned()));
    };
    check(
        Case::pod(POD_WITH_INIT_CONTAINERS),
        "linkerd-init linkerd-proxy own",
        "app",
    );
    check(
        Case::pod(POD_WITH_INIT_CONTAINERS).annotate(&[DEBUG, IMAGE]),
        "linkerd-init linkerd-proxy own",
        "app linkerd-debug",
    );
    check(
        Case::pod(POD_WITH_INIT_CONTAINERS).annotate(&[NOT_NATIVE]),
        "own linkerd-init",
        "linkerd-proxy app",
    );
    check(
        Case::pod(POD_WITH_INIT_CONTAINERS).annotate(&[NOT_NATIVE, NO_AWAIT, DEBUG, IMAGE]),
        "own linkerd-init",
        "app linkerd-debug linkerd-proxy",
    );
    let cni = "cniEnabled: true";
    check(
        Case::pod(POD_WITH_INIT_CONTAINERS).values(cni),
        "linkerd-network-validator linkerd-proxy own",
        "app",
    );
    check(
        Case::pod(POD_WITH_INIT_CONTAINERS).values(cni).annotate(&[NOT_NATIVE]),
        "own linkerd-network-validator",
        "linkerd-proxy app",
    );
}

#[test]
fn a_sidecar_that_is_not_native_makes_the_application_wait_by_a_hook() {
    let not_native = Case::pod("").annotate(&[NOT_NATIVE]).injected();
    let proxy = not_native.container(PROXY_CONTAINER);
    assert_eq!(
        proxy["lifecycle"],
        parse("postStart: {exec: {command: [/usr/lib/linkerd/linkerd-await, --timeout=2m, --port=4191]}}")
    );
    assert_eq!(
        (&proxy["startupProbe"], &proxy["restartPolicy"]),
        (&Value::Null, &Value::Null)
    );
    let without_await = Case::pod("").annotate(&[NOT_NATIVE, NO_AWAIT]).injected();
    assert_eq!(without_await.container(PROXY_CONTAINER)["lifecycle"], Value::Null);
    let native = Case::pod("").injected();
    let proxy = native.container(PROXY_CONTAINER);
    assert_eq!(
        (&proxy["restartPolicy"], &proxy["lifecycle"]),
        (&"Always".into(), &Value::Null)
    );
    assert_eq!(
        proxy["startupProbe"],
        parse("{httpGet: {path: /ready, port: 4191}, initialDelaySeconds: 0, periodSeconds: 1, failureThreshold: 120}")
    );
}

#[test]
fn volumes_are_those_that_the_containers_mount() {
    let volumes = |case: Case| case.injected().names("volumes").join(" ");
    let usual = "kube-api-access linkerd-proxy-init-xtables-lock linkerd-identity-end-entity linkerd-identity-token";
    assert_eq!(volumes(Case::pod("")), usual);
    assert_eq!(
        volumes(Case::pod("").values("cniEnabled: true")),
        "kube-api-access linkerd-identity-end-entity linkerd-identity-token"
    );
    assert_eq!(
        volumes(Case::pod("").values("identity: {serviceAccountTokenProjection: false}")),
        "kube-api-access linkerd-proxy-init-xtables-lock linkerd-identity-end-entity"
    );
    assert_eq!(
        volumes(Case::pod("").values(TRACING)),
        "kube-api-access linkerd-proxy-init-xtables-lock linkerd-identity-end-entity linkerd-podinfo linkerd-identity-token"
    );
    // The patch creates the list of a pod without volumes.
    let bare = Case::pod("spec: {volumes: null, containers: [{name: app, image: a}]}");
    assert_eq!(bare.injected().names("volumes").len(), 3);
}

#[test]
fn volumes_and_containers_that_have_our_names_are_not_added_twice() {
    let yaml = "spec: {volumes: [{name: linkerd-identity-token, emptyDir: {}}, {name: own, emptyDir: {}}, \
                {name: linkerd-identity-end-entity, hostPath: {path: /}}, {name: linkerd-podinfo, emptyDir: {}}, \
                {name: linkerd-proxy-init-xtables-lock, configMap: {name: a}}], \
                containers: [{name: app, image: a}, {name: linkerd-debug, image: own}]}";
    let plain = Case::pod("").values(TRACING).injected();
    let injected = Case::pod(yaml).values(TRACING).annotate(&[DEBUG, IMAGE]).injected();
    let mut names = injected.names("volumes");
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "linkerd-identity-end-entity",
            "linkerd-identity-token",
            "linkerd-podinfo",
            "linkerd-proxy-init-xtables-lock",
            "own"
        ]
    );
    // The volumes have the content that the proxy needs.
    for volume in injected.0["spec"]["volumes"].as_array().unwrap() {
        let ours = plain.0["spec"]["volumes"].as_array().unwrap().iter();
        let ours = ours.clone().find(|ours| ours["name"] == volume["name"]);
        assert!(volume["name"] == "own" || ours == Some(volume), "{volume}");
    }
    assert_eq!(injected.names("containers"), ["app", "linkerd-debug"]);
}

#[test]
fn the_hash_of_trust_anchors_ignores_a_final_line_break() {
    let mut case = Case::pod("");
    let injected = case.injected();
    case.config.values.identity_trust_anchors_pem.push('\n');
    let again = case.injected();
    assert_eq!(again.0, injected.0);
}

#[test]
fn the_init_container_gets_the_iptables_mode() {
    let args = |yaml: &str| {
        let injected = Case::pod("").values(yaml).injected();
        let args = injected.container(INIT_CONTAINER)["args"].as_array().unwrap().clone();
        Vec::from_iter(args.iter().map(|arg| arg.as_str().unwrap())).join(" ")
    };
    let common = "--incoming-proxy-port 4143 --outgoing-proxy-port 4140 --proxy-uid 2102 \
         --inbound-ports-to-ignore 4190,4191";
    let v4 = "--ipv6=false";
    let nft = "--firewall-bin-path iptables-nft --firewall-save-bin-path iptables-nft-save";
    let legacy = "--firewall-bin-path iptables-legacy --firewall-save-bin-path iptables-legacy-save";
    assert_eq!(args(""), format!("{nft} {v4} {common}"));
    assert_eq!(
        args("proxyInit: {iptablesMode: legacy}"),
        format!("{legacy} {v4} {common}")
    );
    assert_eq!(args("{disableIPv6: false, proxyInit: {iptablesMode: native}}"), common);
    let logs = args(
        "proxyInit: {iptablesMode: native, logLevel: debug, logFormat: json, ignoreInboundPorts: '', ignoreOutboundPorts: ''}",
    );
    assert_eq!(
        logs,
        "--ipv6=false --incoming-proxy-port 4143 --outgoing-proxy-port 4140 --proxy-uid 2102 \
         --inbound-ports-to-ignore 4190,4191 --log-format json --log-level debug"
    );
}

#[test]
fn the_init_container_has_the_capabilities_for_redirection_and_of_the_first_container() {
    let security = |case: Case| case.injected().container(INIT_CONTAINER)["securityContext"].clone();
    let usual = parse(
        "{allowPrivilegeEscalation: false, privileged: false, readOnlyRootFilesystem: true, runAsNonRoot: true, \
         runAsUser: 65534, runAsGroup: 65534, seccompProfile: {type: RuntimeDefault}, \
         capabilities: {add: [NET_ADMIN, NET_RAW]}}",
    );
    assert_eq!(security(Case::pod("")), usual);
    let first = "spec: {containers: [{name: app, securityContext: {capabilities: {add: [CHOWN, NET_RAW], drop: [ALL, NET_ADMIN]}}}]}";
    assert_eq!(
        security(Case::pod(first))["capabilities"],
        parse("{add: [NET_ADMIN, NET_RAW, CHOWN], drop: [ALL]}")
    );
    let root = security(Case::pod("").values("proxyInit: {runAsRoot: true}"));
    assert_eq!(
        (
            &root["runAsUser"],
            &root["runAsGroup"],
            &root["runAsNonRoot"],
            &root["privileged"]
        ),
        (&0.into(), &0.into(), &false.into(), &false.into())
    );
    let zero = security(Case::pod("").values("proxyInit: {runAsUser: 0}"));
    assert_eq!(zero["runAsUser"], 65_534);
    let privileged = security(Case::pod("").values("proxyInit: {privileged: true}"));
    assert_eq!(
        (&privileged["privileged"], &privileged["allowPrivilegeEscalation"]),
        (&true.into(), &true.into())
    );
}

#[test]
fn inbound_ipv6_that_is_not_redirected_passes_only_where_it_is_allowed() {
    let init = |case: Case| case.injected().container(INIT_CONTAINER)["args"].to_string();
    let allowed = r#""--unredirected-ipv6=allow""#;
    let by_annotation = [(annotation::UNREDIRECTED_IPV6, "allow")];
    assert!(init(Case::pod("").annotate(&by_annotation)).contains(allowed));
    assert!(init(Case::pod("").namespace(&by_annotation)).contains(allowed));
    assert!(init(Case::pod("").values("proxyInit: {unredirectedIPv6: allow}")).contains(allowed));
    assert!(!init(Case::pod("")).contains("unredirected"));
    let redirected = Case::pod("").values("disableIPv6: false").annotate(&by_annotation);
    assert!(!init(redirected).contains("unredirected"));
    let denied = Case::pod("").annotate(&[(annotation::UNREDIRECTED_IPV6, "true")]);
    let denial_reason = denied.outcome().denial_reason.unwrap();
    assert!(denial_reason.contains("drop or allow"), "{denial_reason}");
}

#[test]
fn tproxy_mode_sets_the_init_flag_the_variable_and_the_capability() {
    let by_chart = Case::pod("").values("proxy: {inboundMode: tproxy}");
    let by_pod = Case::pod("").annotate(&[(annotation::INBOUND_MODE, "tproxy")]);
    let by_namespace = Case::pod("").namespace(&[(annotation::INBOUND_MODE, "tproxy")]);
    let plain = Case::pod("").injected();
    for injected in [by_chart, by_pod, by_namespace].map(|case| case.injected()) {
        let args = injected.container(INIT_CONTAINER)["args"].to_string();
        assert!(args.contains(r#""--inbound-mode","tproxy""#), "{args}");
        let proxy = injected.container(PROXY_CONTAINER);
        let env = proxy["env"].to_string();
        assert!(
            env.contains(r#"{"name":"TULLE_PROXY_INBOUND_MODE","value":"tproxy"}"#),
            "{env}"
        );
        let mut security = plain.container(PROXY_CONTAINER)["securityContext"].clone();
        security["capabilities"] = parse("{add: [NET_RAW], drop: [ALL]}");
        assert_eq!(proxy["securityContext"], security);
    }
    assert!(!plain.0.to_string().contains("tproxy"));
    // The pod's annotation takes precedence, and configured capabilities are kept.
    let back = Case::pod("").values("proxy: {inboundMode: tproxy}");
    let back = back.annotate(&[(annotation::INBOUND_MODE, "redirect")]).injected();
    assert!(!back.0["spec"].to_string().contains("tproxy"));
    let own =
        Case::pod("").values("proxy: {inboundMode: tproxy, capabilities: {add: [NET_BIND_SERVICE], drop: [ALL]}}");
    assert_eq!(
        own.injected().container(PROXY_CONTAINER)["securityContext"]["capabilities"],
        parse("{add: [NET_BIND_SERVICE, NET_RAW], drop: [ALL]}")
    );
    for (values, value, reason) in [
        ("", "transparent", "redirect or tproxy"),
        ("cniEnabled: true", "tproxy", "cniEnabled"),
    ] {
        let refused = Case::pod("")
            .values(values)
            .annotate(&[(annotation::INBOUND_MODE, value)]);
        let outcome = refused.outcome();
        assert!(outcome.warnings[0].contains(reason), "{:?}", outcome.warnings);
        assert!(!refused.patched(&outcome).0["spec"].to_string().contains("tproxy"));
    }
}

#[test]
fn the_validator_listens_and_dials_in_the_family_of_the_mesh() {
    let args = |yaml: &str| {
        let injected = Case::pod("").values(yaml).injected();
        injected.container(VALIDATOR_CONTAINER)["args"].to_string()
    };
    let v4 = args("cniEnabled: true");
    assert!(
        v4.contains(r#""--connect-addr","1.1.1.1:20001","--listen-addr","0.0.0.0:4140""#),
        "{v4}"
    );
    let v6 = args("{cniEnabled: true, disableIPv6: false}");
    assert!(
        v6.contains(r#""--connect-addr","[fd00::1]:20001","--listen-addr","[::]:4140""#),
        "{v6}"
    );
    let own = args("{cniEnabled: true, networkValidator: {connectAddr: '10.0.0.1:1', timeout: 3s}}");
    assert!(
        own.contains(r#""--connect-addr","10.0.0.1:1""#) && own.contains(r#""--timeout","3s""#),
        "{own}"
    );
}

#[test]
fn labels_name_the_control_plane_the_namespace_and_the_owner() {
    let injected = Case::pod("").owner("deployment", "web").injected();
    assert_eq!(injected.label("linkerd.io/control-plane-ns"), Some("linkerd"));
    assert_eq!(injected.label("linkerd.io/workload-ns"), Some("shop"));
    for kind in [
        "deployment",
        "replicationcontroller",
        "replicaset",
        "job",
        "daemonset",
        "statefulset",
    ] {
        let injected = Case::pod("").owner(kind, "web").injected();
        assert_eq!(injected.label(&format!("linkerd.io/proxy-{kind}")), Some("web"));
    }
    let mut cron = Case::pod("").owner("cronjob", "web");
    assert_eq!(cron.injected().label("linkerd.io/proxy-cronjob"), None);
    cron.config.origin = InjectionOrigin::CommandLine;
    assert_eq!(cron.injected().label("linkerd.io/proxy-cronjob"), Some("web"));
    // A label value has at most 63 characters and ends with a letter or digit.
    let long = Case::pod("")
        .owner("deployment", &format!("{}-x", "a".repeat(62)))
        .injected();
    assert_eq!(long.label("linkerd.io/proxy-deployment"), Some("a".repeat(62).as_str()));
}

#[test]
fn the_version_annotation_omits_the_digest() {
    let injected = Case::pod("")
        .values("{proxy: {image: {version: 'v9@sha256:1f'}}}")
        .injected();
    assert_eq!(injected.annotation(annotation::PROXY_VERSION), Some("v9"));
    let image = &injected.container("linkerd-proxy")["image"];
    assert_eq!(image, "ghcr.io/tulle-mesh/proxy:v9@sha256:1f");
}

#[test]
fn annotations_name_the_injector_and_the_versions() {
    let injected = Case::pod("").injected();
    assert_eq!(
        injected.annotation(annotation::CREATED_BY),
        Some("linkerd/proxy-injector edge-1")
    );
    assert_eq!(injected.annotation(annotation::PROXY_VERSION), Some("edge-1"));
    assert_eq!(
        injected.annotation(annotation::TRUST_ROOT_SHA256),
        // printf anchors | sha256sum
        Some("197129aec34bcd1814b9f325984f4fc47efee8a39bafc0f6d2f8e304a0f2699e")
    );
    assert_eq!(injected.annotation(annotation::OPAQUE_PORTS), Some("3306"));
}

#[test]
fn inbound_ports_are_those_exposed_or_probed() {
    let yaml = "
spec:
  containers:
  - name: a
    ports: [{containerPort: 8080}, {containerPort: 90}, {containerPort: 8080}]
    livenessProbe: {httpGet: {port: 9000}}
    readinessProbe: {httpGet: {port: named}}
  - name: b
    readinessProbe: {httpGet: {port: 81}}
    livenessProbe: {tcpSocket: {port: 82}}
";
    assert_eq!(Case::pod(yaml).injected().env("INBOUND_PORTS"), Some("8080,81,90,9000"));
}

#[test]
fn values_of_the_chart_apply_to_the_sidecar() {
    let case = Case::pod("").values(
        "{clusterDomain: example.org, identityTrustDomain: mesh.test, disableIPv6: false, clusterNetworks: 10.0.0.0/8, \
         proxy: {cores: 4, requireIdentityOnInboundPorts: 8080, inbound: {server: {http2: {maxConcurrentStreams: 7}}}, requireTLSOnInboundPorts: 80, \
         resources: {cpu: {request: 1}}, tap: {enabled: false}, capabilities: {drop: [CHOWN]}, \
         control: {streams: {lifetime: 2h}}, livenessProbe: {timeoutSeconds: 3}}}",
    );
    let injected = case.injected();
    for (name, expected) in [
        ("CORES", "4"),
        ("CORES_MIN", "4"),
        (
            "DESTINATION_SVC_ADDR",
            "linkerd-dst-headless.linkerd.svc.example.org.:8086",
        ),
        ("POLICY_SVC_ADDR", "linkerd-policy.linkerd.svc.example.org.:8090"),
        (
            "IDENTITY_SVC_ADDR",
            "linkerd-identity-headless.linkerd.svc.example.org.:8080",
        ),
        (
            "POLICY_SVC_NAME",
            "linkerd-destination.linkerd.serviceaccount.identity.linkerd.mesh.test",
        ),
        (
            "IDENTITY_LOCAL_NAME",
            "$(_pod_sa).$(_pod_ns).serviceaccount.identity.linkerd.mesh.test",
        ),
        ("DESTINATION_PROFILE_NETWORKS", "10.0.0.0/8"),
        ("POLICY_CLUSTER_NETWORKS", "10.0.0.0/8"),
        ("OUTBOUND_LISTEN_ADDRS", "127.0.0.1:4140,[::1]:4140"),
        ("INBOUND_LISTEN_ADDR", "[::]:4143"),
        ("INBOUND_SERVER_HTTP2_MAX_CONCURRENT_STREAMS", "7"),
        ("OUTBOUND_SERVER_HTTP2_KEEP_ALIVE_INTERVAL", "10s"),
        ("INBOUND_PORTS_REQUIRE_TLS", "80"),
        ("CONTROL_STREAM_LIFETIME", "2h"),
    ] {
        assert_eq!(injected.env(name), Some(expected), "{name}");
    }
    assert_eq!(injected.env("TAP_SVC_NAME"), None);
    assert_eq!(injected.init_flag("--inbound-ports-to-ignore"), Some("4191"));
    // Settings for the policy of a port become annotations of the pod; the pod's own annotation takes precedence.
    let key = annotation::REQUIRE_IDENTITY_INBOUND_PORTS;
    assert_eq!(injected.annotation(key), Some("8080"));
    let own = Case::pod("")
        .values("{proxy: {requireIdentityOnInboundPorts: 8080}}")
        .annotate(&[(key, "9")]);
    assert_eq!(own.injected().annotation(key), Some("9"));
    let proxy = injected.container(PROXY_CONTAINER);
    assert_eq!(proxy["resources"], parse("requests: {cpu: '1'}"));
    assert_eq!(injected.container(INIT_CONTAINER)["resources"], proxy["resources"]);
    assert_eq!(proxy["securityContext"]["capabilities"], parse("drop: [CHOWN]"));
    assert_eq!(proxy["livenessProbe"]["timeoutSeconds"], 3);
    assert_eq!(
        Case::pod("").injected().container(PROXY_CONTAINER)["securityContext"]["capabilities"],
        parse("drop: [ALL]")
    );
}

#[test]
fn empty_security_contexts_in_values_keep_the_defaults() {
    let empty = "{cniEnabled: true, proxy: {securityContext: {}, capabilities: {}}, networkValidator: {securityContext: {}}, \
                 debugContainer: {image: {name: debug, version: ''}}}";
    let containers = |values: &str| {
        let injected = Case::pod("").values(values).annotate(&[DEBUG]).injected();
        [PROXY_CONTAINER, VALIDATOR_CONTAINER, DEBUG_CONTAINER].map(|name| injected.container(name).clone())
    };
    assert_eq!(
        containers(empty),
        containers("{cniEnabled: true, debugContainer: {image: {name: debug}}}")
    );
}

#[test]
fn a_configured_security_context_keeps_what_the_redirection_requires() {
    let values = |more: &str| {
        format!("proxy: {{uid: 5, gid: 6, securityContext: {{runAsUser: 3000, privileged: false}}{more}}}")
    };
    let ids = |case: Case| {
        let injected = case.injected();
        let security = &injected.container(PROXY_CONTAINER)["securityContext"];
        let proxy_ids = ["runAsUser", "runAsGroup"].map(|field| security[field].as_i64());
        let excluded_ids = ["--proxy-uid", "--proxy-gid"].map(|flag| injected.init_flag(flag)?.parse().ok());
        assert_eq!(
            proxy_ids, excluded_ids,
            "the init container excludes the user and group of the proxy"
        );
        proxy_ids
    };
    assert_eq!(ids(Case::pod("").values(&values(""))), [Some(3000), Some(6)]);
    let annotated = [(annotation::PROXY_UID, "3001"), (annotation::PROXY_GID, "-1")];
    let case = || Case::pod("").values(&values("")).annotate(&annotated);
    assert_eq!(ids(case()), [Some(3001), None]);
    assert_eq!(
        case().injected().container(PROXY_CONTAINER)["securityContext"],
        parse("{runAsUser: 3001, privileged: false}")
    );
    let only_group = Case::pod("")
        .values("proxy: {securityContext: {runAsGroup: 7}}")
        .injected();
    let security = &only_group.container(PROXY_CONTAINER)["securityContext"];
    let proxy_ids = ["runAsUser", "runAsGroup"].map(|field| security[field].as_i64());
    assert_eq!(proxy_ids, [Some(2102), Some(7)]);
    // Applications can have the same group, and their connections must be redirected.
    assert_eq!(only_group.init_flag("--proxy-gid"), None);
    let same_user = "spec: {containers: [{name: app, securityContext: {runAsUser: 3000}}]}";
    let denial_reason = Case::pod(same_user)
        .values(&values(""))
        .outcome()
        .denial_reason
        .unwrap();
    assert!(denial_reason.contains("user 3000"), "{denial_reason}");

    let capabilities = |more: &str| {
        let injected = Case::pod("").values(&values(more)).injected();
        injected.container(PROXY_CONTAINER)["securityContext"]["capabilities"].clone()
    };
    assert_eq!(capabilities(""), Value::Null);
    assert_eq!(capabilities(", inboundMode: tproxy"), parse("add: [NET_RAW]"));
    assert_eq!(capabilities(", capabilities: {drop: [CHOWN]}"), parse("drop: [CHOWN]"));
}

#[test]
fn a_debug_container_without_an_image_is_omitted_with_a_warning() {
    let outcome = Case::pod("").annotate(&[DEBUG]).outcome();
    assert!(
        outcome.warnings[0].contains("debugContainer.image.name"),
        "{:?}",
        outcome.warnings
    );
    assert!(!serde_json::to_string(&outcome.patch).unwrap().contains(DEBUG_CONTAINER));
    let named = Case::pod("").annotate(&[DEBUG, IMAGE]);
    assert!(named.outcome().warnings.is_empty());
    assert!(named.injected().container(DEBUG_CONTAINER)["image"].is_string());
}

#[test]
fn ingress_mode_sets_the_proxy_variable() {
    assert_eq!(Case::pod("").injected().env("INGRESS_MODE"), None);
    let ingress = Case::pod("").annotate(&[(annotation::INJECT, "ingress")]).injected();
    assert_eq!(ingress.env("INGRESS_MODE"), Some("true"));
    // The chart's value applies to all proxies; the annotation value `enabled` does not change the mode.
    for annotations in [
        &[][..],
        &[(annotation::INJECT, "enabled")],
        &[(annotation::INJECT, "ingress")],
    ] {
        let valued = Case::pod("").values("proxy: {isIngress: true}").annotate(annotations);
        assert_eq!(valued.injected().env("INGRESS_MODE"), Some("true"), "{annotations:?}");
    }
}

#[test]
fn traces_have_the_resource_attributes_of_the_workload() {
    let traced = |case: Case| case.values(TRACING).injected();
    let plain = traced(Case::pod(""));
    assert_eq!(plain.env("TRACE_SERVICE_NAME"), Some("mesh"));
    assert_eq!(plain.env("TRACE_COLLECTOR_SVC_ADDR"), Some("collector.obs:4317"));
    assert_eq!(
        plain.env("TRACE_COLLECTOR_SVC_NAME"),
        Some("collector.obs.serviceaccount.identity.linkerd.cluster.local")
    );
    assert_eq!(
        plain.env("TRACE_EXTRA_ATTRIBUTES"),
        Some("k8s.pod.ip=$(_pod_ip)\nk8s.pod.uid=$(_pod_uid)\nk8s.container.name=$(_pod_containerName)\nzone=a\n")
    );
    // Linkerd's chart has the first three attributes in its labels. They are not listed twice.
    let listed = TRACING.replace("{zone: a}", "{zone: a, k8s.pod.uid: $(_pod_uid)}");
    let listed = Case::pod("").values(&listed).injected();
    assert_eq!(
        listed.env("TRACE_EXTRA_ATTRIBUTES"),
        plain.env("TRACE_EXTRA_ATTRIBUTES")
    );
    assert_eq!(Case::pod("").injected().env("TRACE_PROTOCOL"), None);
    let app = "metadata: {labels: {app.kubernetes.io/name: app}}";
    assert_eq!(traced(Case::pod(app)).env("TRACE_SERVICE_NAME"), Some("app"));
    let instance = "metadata: {labels: {app.kubernetes.io/name: app, app.kubernetes.io/instance: app-1}}";
    assert_eq!(traced(Case::pod(instance)).env("TRACE_SERVICE_NAME"), Some("app-1"));
    let own = [
        ("resource.opentelemetry.io/service.name", "own"),
        ("resource.opentelemetry.io/team", "a\nb=c"),
    ];
    let annotated = traced(Case::pod(instance).annotate(&own));
    assert_eq!(annotated.env("TRACE_SERVICE_NAME"), Some("own"));
    let attributes = annotated.env("TRACE_EXTRA_ATTRIBUTES").unwrap();
    assert!(
        attributes.ends_with("zone=a\nservice.name=own\nteam=a b=c\n"),
        "{attributes}"
    );
}

const TRACING: &str = "
proxy:
  tracing:
    enabled: true
    traceServiceName: mesh
    labels: {zone: a}
    collector: {endpoint: 'collector.obs:4317', meshIdentity: {serviceAccountName: collector, namespace: obs}}
";
