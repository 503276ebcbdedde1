//! Renderings of the charts, without a cluster.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;

use serde::Deserialize as _;
use serde_json::{Value, json};
use tulle_control::cmd::Command;

use tulle_tests::charts::{Helm, chart_path};

/// Required values of an installation.
pub(crate) const REQUIRED_VALUES: &[&str] = &[
    "--set=identityTrustAnchorsPEM=anchors",
    "--set=identity.issuer.tls.crtPEM=certificate",
    "--set=identity.issuer.tls.keyPEM=key",
];

/// Different installations with their values.
pub(crate) fn installations() -> Vec<(&'static str, Vec<String>)> {
    let with = |values: &[&str]| {
        REQUIRED_VALUES
            .iter()
            .chain(values)
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    let ha = format!("--values={}/values-ha.yaml", chart_path("tulle-control-plane"));
    let external_ca = [
        "--set=identity.externalCA=true",
        "--set=identity.issuer.scheme=kubernetes.io/tls",
    ];
    vec![
        ("default", with(&[])),
        ("highly available", with(&[&ha])),
        ("with a CNI plugin", with(&["--set=cniEnabled=true"])),
        ("an external CA", external_ca.map(str::to_owned).to_vec()),
        ("a cert-manager issuer", {
            let mut values = with(&["--set=identity.issuer.scheme=kubernetes.io/tls"]);
            values.retain(|value| !value.contains("issuer.tls"));
            values
        }),
        (
            "certificates of webhooks given",
            with(&[
                "--set=proxyInjector.crtPEM=certificate,proxyInjector.keyPEM=key",
                "--set=policyValidator.externalSecret=true,policyValidator.caBundle=ca",
                "--set=profileValidator.externalSecret=true,profileValidator.injectCaFrom=linkerd/sp-validator",
            ]),
        ),
        (
            "with alerts and dashboards",
            with(&["--set=podMonitor.enabled=true,prometheusRule.enabled=true,dashboards.enabled=true"]),
        ),
        (
            "everything optional",
            with(&[
                "--set=podMonitor.enabled=true,enablePodDisruptionBudget=true,enablePodAntiAffinity=true",
                "--set=imagePullSecrets[0].name=registry,priorityClassName=high,runtimeClassName=gvisor,controllerGID=2103",
                "--set=tolerations[0].operator=Exists,podAnnotations.a=b,podLabels.a=b,commonLabels.c=d",
                "--set=configReaders[0].kind=Group,configReaders[0].name=readers,configReaders[0].apiGroup=rbac.authorization.k8s.io",
                "--set=destinationResources.cpu.request=1,destinationResources.memory.limit=1Gi",
                "--set=destinationController.additionalArgs[0]=-ext-endpoint-zone-weights",
                "--set=policyController.additionalEnv[0].name=A,policyController.additionalEnv[0].value=b",
                "--set=enableEndpointSlices=false,proxyInit.iptablesMode=native,cniEnabled=true,commonLabels.e=f",
                "--set=podMonitor.labels.release=prometheus,podMonitor.proxy.honorTimestamps=true",
                "--set=networkPolicies.enabled=true,networkPolicies.apiServer[0].ipBlock.cidr=192.0.2.1/32",
                "--set=kubeAPI.clientQPS=50,kubeAPI.clientBurst=60,identity.kubeAPI.clientQPS=70",
                "--set=identity.externalCA=true,controllerLogLevel=debug,controllerLogFormat=json",
                "--set=proxyInjector.crtPEM=certificate,proxyInjector.keyPEM=key,webhookFailurePolicy=Fail",
            ]),
        ),
    ]
}

/// The objects of a rendering.
pub(crate) fn objects(rendered: &str) -> Vec<Value> {
    let documents =
        serde_yaml_ng::Deserializer::from_str(rendered).map(|document| Value::deserialize(document).expect("YAML"));
    documents.filter(|object| !object.is_null()).collect()
}

fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects
        .iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("{kind} {name} is not rendered"))
}

fn render(values: &[&str]) -> anyhow::Result<Vec<Value>> {
    Ok(objects(&Helm::new().unwrap().template(
        "tulle-control-plane",
        &[REQUIRED_VALUES, values].concat(),
    )?))
}

#[test]
fn helm_lint_accepts_the_charts() {
    for chart in ["tulle-crds", "tulle-control-plane", "tulle-multicluster"] {
        let needed = match chart {
            "tulle-control-plane" => REQUIRED_VALUES,
            _ => &[],
        };
        let report = Helm::new()
            .unwrap()
            .run(&[&["lint", "--strict", &chart_path(chart)], needed].concat())
            .unwrap();
        assert!(!report.contains("WARNING") && !report.contains("ERROR"), "{report}");
    }
}

#[test]
fn network_policies_name_every_port_of_every_component_once() {
    assert!(
        !render(&[])
            .unwrap()
            .iter()
            .any(|object| object["kind"] == "NetworkPolicy")
    );
    for telemetry in [true, false] {
        let telemetry = format!("--set=telemetry.enabled={telemetry}");
        let values = [
            "--set=networkPolicies.enabled=true,networkPolicies.apiServer[0].ipBlock.cidr=192.0.2.1/32",
            "--set=networkPolicies.admin[0].ipBlock.cidr=192.0.2.2/32",
            &telemetry,
        ];
        let objects = render(&values).unwrap();
        let numbers = |list: &Value, field: &str| -> Vec<u64> {
            let mut numbers: Vec<_> = list
                .as_array()
                .unwrap()
                .iter()
                .filter_map(|one| one[field].as_u64())
                .collect();
            numbers.sort_unstable();
            numbers
        };
        for component in ["identity", "destination", "proxy-injector"] {
            let name = format!("linkerd-{component}");
            let policy = &find(&objects, "NetworkPolicy", &name)["spec"];
            let template = &find(&objects, "Deployment", &name)["spec"]["template"];
            let selected = policy["podSelector"]["matchLabels"].as_object().unwrap();
            assert!(
                selected
                    .iter()
                    .all(|(key, value)| template["metadata"]["labels"][key] == *value)
            );
            assert_eq!(policy["policyTypes"], json!(["Ingress"]));
            let rules = policy["ingress"].as_array().unwrap();
            let mut allowed: Vec<u64> = rules.iter().flat_map(|rule| numbers(&rule["ports"], "port")).collect();
            allowed.sort_unstable();
            let container = &template["spec"]["containers"][0];
            assert_eq!(allowed, numbers(&container["ports"], "containerPort"), "{component}");
            // The port number determines the permitted clients of a rule.
            for rule in rules {
                let from_cidr = |cidr: &str| json!([{"ipBlock": {"cidr": cidr}}]);
                for port in numbers(&rule["ports"], "port") {
                    let expected = match port {
                        8080 | 8086 | 8090 => json!([{"namespaceSelector": {}}]),
                        8089 | 8443 | 9443 => from_cidr("192.0.2.1/32"),
                        _ => from_cidr("192.0.2.2/32"),
                    };
                    assert_eq!(rule["from"], expected, "{component} {port}");
                }
            }
        }
    }
}

#[test]
fn rendering_twice_gives_the_same_bytes() {
    let helm = Helm::new().unwrap();
    for (name, values) in installations() {
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        let [first, second] = [(); 2].map(|()| helm.template("tulle-control-plane", &values).unwrap());
        assert!(first == second, "{name}");
    }
}

#[test]
fn a_value_that_does_not_exist_or_has_the_wrong_type_is_refused_by_its_name() {
    let check = |chart: &str, value: &str, expected: &[&str]| {
        let needed = if chart == "tulle-crds" {
            &[][..]
        } else {
            REQUIRED_VALUES
        };
        let refusal = Helm::new()
            .unwrap()
            .template(chart, &[needed, &[value]].concat())
            .unwrap_err()
            .to_string();
        for part in expected {
            assert!(refusal.contains(part), "{value}: {refusal}");
        }
    };
    check(
        "tulle-crds",
        "--set=installGatewayApi=true",
        &["installGatewayApi", "not allowed"],
    );
    check(
        "tulle-control-plane",
        "--set=controllerReplica=3",
        &["controllerReplica", "not allowed"],
    );
    check(
        "tulle-control-plane",
        "--set=proxy.logLvel=debug",
        &["/proxy", "logLvel"],
    );
    check(
        "tulle-control-plane",
        "--set=controllerReplicas=many",
        &["/controllerReplicas", "want integer"],
    );
    check(
        "tulle-control-plane",
        "--set=proxyInit.iptablesMode=plain",
        &["/proxyInit/iptablesMode", "nft", "legacy", "native"],
    );
    check(
        "tulle-control-plane",
        "--set=proxy.logHTTPHeaders=yes",
        &["/proxy/logHTTPHeaders", "insecure"],
    );
    check(
        "tulle-control-plane",
        "--set=proxy.accessLog=nginx",
        &["/proxy/accessLog", "apache", "json"],
    );
    // Connections of the proxy's user are not redirected, and many applications run as root.
    check("tulle-control-plane", "--set=proxy.uid=0", &["/proxy/uid", "want 1"]);
    check(
        "tulle-control-plane",
        "--set=proxy.securityContext.runAsUser=0",
        &["/proxy/securityContext/runAsUser", "want 1"],
    );
    check(
        "tulle-control-plane",
        "--set-json=proxy.additionalEnv=[{\"name\": \"A\", \"value\": 1}]",
        &["/proxy/additionalEnv/0/value", "got number"],
    );
    check(
        "tulle-control-plane",
        "--set=proxy.defaultInboundPolicy=allow",
        &["/proxy/defaultInboundPolicy", "audit"],
    );
    check(
        "tulle-control-plane",
        "--set=proxy.inboundMode=transparent",
        &["/proxy/inboundMode", "redirect", "tproxy"],
    );
}

#[test]
fn contradictory_values_are_refused_with_a_fix() {
    // Renders without the required values whose text contains `omitted`.
    let check = |omitted: &str, values: &[&str], expected: &[&str]| {
        let needed = REQUIRED_VALUES
            .iter()
            .filter(|value| omitted.is_empty() || !value.contains(omitted));
        let args: Vec<&str> = needed.chain(values).copied().collect();
        let refusal = Helm::new()
            .unwrap()
            .template("tulle-control-plane", &args)
            .unwrap_err()
            .to_string();
        for part in expected {
            assert!(refusal.contains(part), "{values:?}: {refusal}");
        }
    };
    check(
        "AnchorsPEM",
        &[],
        &["identityTrustAnchorsPEM is missing", "identity.externalCA=true"],
    );
    check(
        "crtPEM",
        &[],
        &["identity.issuer.tls.crtPEM is missing", "kubernetes.io/tls"],
    );
    check(
        "keyPEM",
        &[],
        &["identity.issuer.tls.keyPEM is missing", "kubernetes.io/tls"],
    );
    check(
        "",
        &["--set=proxyInit.closeWaitTimeoutSecs=10"],
        &["proxyInit.runAsRoot=true"],
    );
    check(
        "",
        &["--set=cniEnabled=true,proxy.inboundMode=tproxy"],
        &["proxy.inboundMode=tproxy needs cniEnabled=false"],
    );
    check(
        "",
        &["--set=proxy.tracing.enabled=true"],
        &["proxy.tracing.collector.endpoint is missing"],
    );
    let traced = "--set=proxy.tracing.enabled=true,proxy.tracing.collector.endpoint=collector:4317";
    check("", &[traced], &["proxy.tracing.collector.meshIdentity is missing"]);
    for webhook in ["proxyInjector", "profileValidator", "policyValidator"] {
        let set = |values: &[&str]| {
            let values: Vec<String> = values.iter().map(|value| format!("{webhook}.{value}")).collect();
            format!("--set={}", values.join(","))
        };
        check(
            "",
            &[&set(&["externalSecret=true"])],
            &[webhook, "caBundle, injectCaFrom or injectCaFromSecret"],
        );
        check("", &[&set(&["injectCaFrom=a/b"])], &[webhook, "externalSecret=true"]);
        check(
            "",
            &[&set(&["injectCaFrom=a/b", "injectCaFromSecret=a/b"])],
            &[webhook, "both"],
        );
        check(
            "",
            &[&set(&["externalSecret=true", "injectCaFrom=a/b", "caBundle=ca"])],
            &[webhook, "caBundle"],
        );
        check("", &[&set(&["crtPEM=certificate"])], &[webhook, "must be set together"]);
    }
}

#[test]
fn the_control_plane_takes_the_flags_that_the_chart_passes() {
    for (name, values) in installations() {
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        let objects = objects(&Helm::new().unwrap().template("tulle-control-plane", &values).unwrap());
        for deployment in objects.iter().filter(|object| object["kind"] == "Deployment") {
            for container in deployment["spec"]["template"]["spec"]["containers"].as_array().unwrap() {
                let args = container["args"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|arg| arg.as_str().unwrap());
                let line = std::iter::once("tulle-control").chain(args).map(OsString::from);
                let parsed = Command::parse_from_line(line).map(drop);
                parsed.unwrap_or_else(|err| panic!("{name}, {}: {err}", container["name"]));
            }
        }
    }
}

#[test]
fn services_have_the_ports_that_proxies_and_the_api_server_dial() {
    let objects = render(&[]).unwrap();
    let check = |name: &str, headless: bool, component: &str, port: u16, target: Value| {
        let service = find(&objects, "Service", name);
        assert_eq!(service["spec"]["clusterIP"] == "None", headless, "{name}");
        assert_eq!(
            service["spec"]["selector"],
            json!({"linkerd.io/control-plane-component": component}),
            "{name}"
        );
        let ports = service["spec"]["ports"].as_array().unwrap();
        assert_eq!(
            (ports.len(), &ports[0]["port"], &ports[0]["targetPort"]),
            (1, &json!(port), &target),
            "{name}"
        );
        // A named port exists in the component's container.
        let deployment = find(&objects, "Deployment", &format!("linkerd-{component}"));
        let declared = deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
            .as_array()
            .unwrap();
        let key = if target.is_string() { "name" } else { "containerPort" };
        assert!(declared.iter().any(|port| port[key] == target), "{name}: {target}");
    };
    check("linkerd-dst", false, "destination", 8086, json!(8086));
    check("linkerd-dst-headless", true, "destination", 8086, json!(8086));
    check("linkerd-policy", true, "destination", 8090, json!(8090));
    check("linkerd-sp-validator", false, "destination", 443, json!("sp-validator"));
    check(
        "linkerd-policy-validator",
        false,
        "destination",
        443,
        json!("policy-https"),
    );
    check("linkerd-telemetry", false, "destination", 443, json!("telemetry"));
    check("linkerd-identity", false, "identity", 8080, json!(8080));
    check("linkerd-identity-headless", true, "identity", 8080, json!(8080));
    check(
        "linkerd-proxy-injector",
        false,
        "proxy-injector",
        443,
        json!("proxy-injector"),
    );
}

#[test]
fn without_telemetry_none_of_its_objects_are_rendered() {
    let of_telemetry = |values: &[&str]| {
        let text = Value::from(render(values).unwrap()).to_string();
        ["linkerd-telemetry", "telemetry.tulle.dev", "8089"].map(|word| text.contains(word))
    };
    assert_eq!(of_telemetry(&["--set=telemetry.enabled=false"]), [false; 3]);
    assert_eq!(of_telemetry(&[]), [true; 3]);
}

#[test]
fn queries_of_an_api_server_reach_one_replica_of_telemetry() {
    let objects = render(&[]).unwrap();
    let service = find(&objects, "Service", "linkerd-telemetry");
    assert_eq!(service["spec"]["sessionAffinity"], "ClientIP");
}

#[test]
fn pods_have_no_privileges_no_sidecars_and_no_automounted_token() {
    for deployment in render(&[])
        .unwrap()
        .iter()
        .filter(|object| object["kind"] == "Deployment")
    {
        let pod = &deployment["spec"]["template"]["spec"];
        assert_eq!(pod["automountServiceAccountToken"], false);
        assert_eq!(
            pod["containers"].as_array().unwrap().len(),
            1,
            "the control plane has no sidecars"
        );
        assert_eq!(
            pod["containers"][0]["securityContext"],
            json!({
                "allowPrivilegeEscalation": false,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": true,
                "runAsNonRoot": true,
                "runAsUser": 2103,
                "seccompProfile": {"type": "RuntimeDefault"},
            })
        );
    }
}

#[test]
fn the_injector_webhook_excludes_the_namespace_of_the_control_plane() {
    let objects = render(&[]).unwrap();
    let configuration = find(
        &objects,
        "MutatingWebhookConfiguration",
        "linkerd-proxy-injector-webhook-config",
    );
    let expressions = configuration["webhooks"][0]["namespaceSelector"]["matchExpressions"]
        .as_array()
        .unwrap();
    let excluded: Vec<&Value> = expressions
        .iter()
        .filter(|expression| expression["key"] == "kubernetes.io/metadata.name" && expression["operator"] == "NotIn")
        .flat_map(|expression| expression["values"].as_array().unwrap())
        .collect();
    for namespace in ["linkerd", "kube-system"] {
        assert!(excluded.contains(&&json!(namespace)), "{namespace}: {expressions:?}");
    }
}

#[test]
fn keys_are_in_no_object_in_plain_text() {
    let values = [
        "--set=identity.issuer.tls.keyPEM=very-secret",
        "--set=proxyInjector.crtPEM=c,proxyInjector.keyPEM=very-secret",
    ];
    for object in render(&values).unwrap() {
        let text = object.to_string();
        assert!(!text.contains("very-secret"), "{text}");
    }
    let objects = render(&values).unwrap();
    let recorded = find(&objects, "ConfigMap", "linkerd-config")["data"]["values"]
        .as_str()
        .unwrap();
    let recorded: Value = serde_yaml_ng::from_str(recorded).unwrap();
    assert_eq!(recorded["identityTrustDomain"], "cluster.local");
    assert_eq!(recorded["proxy"]["ports"]["inbound"], 4143);
    assert_eq!(recorded["identity"]["issuer"]["tls"], Value::Null);
}

#[test]
fn external_credentials_are_mounted_and_not_created() {
    let helm = Helm::new().unwrap();
    let render_credentials = |values: &[&str]| {
        let objects = objects(&helm.template("tulle-control-plane", values).unwrap());
        let pod = &find(&objects, "Deployment", "linkerd-identity")["spec"]["template"]["spec"];
        let volumes = pod["volumes"].as_array().unwrap();
        assert!(
            volumes
                .iter()
                .any(|volume| volume["secret"]["secretName"] == "linkerd-identity-issuer")
        );
        assert!(
            volumes
                .iter()
                .any(|volume| volume["configMap"]["name"] == "linkerd-identity-trust-roots")
        );
        let find_object = |kind: &str, name: &str| {
            let found = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
            objects.iter().find(found).cloned()
        };
        (
            find_object("Secret", "linkerd-identity-issuer"),
            find_object("ConfigMap", "linkerd-identity-trust-roots"),
        )
    };
    let (issuer, anchors) = render_credentials(REQUIRED_VALUES);
    assert_eq!(
        issuer.unwrap()["data"],
        json!({"crt.pem": "Y2VydGlmaWNhdGU=", "key.pem": "a2V5"})
    );
    assert_eq!(anchors.unwrap()["data"], json!({"ca-bundle.crt": "anchors"}));
    let own = [
        "--set=identity.externalCA=true",
        "--set=identity.issuer.scheme=kubernetes.io/tls",
    ];
    assert_eq!(render_credentials(&own), (None, None));
    let (issuer, anchors) = render_credentials(&[own[1], REQUIRED_VALUES[0]]);
    assert!(issuer.is_none() && anchors.is_some());
}

#[test]
fn each_component_uses_the_request_rate_of_its_values() {
    let rates = |values: &[&str]| {
        let objects = render(values).unwrap();
        ["destination", "identity", "proxy-injector"].map(|component| {
            let deployment = find(&objects, "Deployment", &format!("linkerd-{component}"));
            let args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
                .as_array()
                .unwrap();
            let flags = args
                .iter()
                .filter_map(|arg| arg.as_str()?.strip_prefix("-kube-apiclient-"));
            flags.collect::<Vec<_>>().join(" ")
        })
    };
    assert_eq!(rates(&[]), ["qps=100 burst=200"; 3]);
    let all = "--set=kubeAPI.clientQPS=2.5,kubeAPI.clientBurst=5";
    assert_eq!(rates(&[all]), ["qps=2.5 burst=5"; 3]);
    let one = "--set=identity.kubeAPI.clientQPS=70";
    assert_eq!(
        rates(&[all, one]),
        ["qps=2.5 burst=5", "qps=70 burst=5", "qps=2.5 burst=5"]
    );
}

#[test]
fn pod_monitors_have_the_configured_namespaces_and_labels() {
    let monitors = |values: &[&str]| {
        let mut monitors = render(&[&["--set=podMonitor.enabled=true"][..], values].concat()).unwrap();
        monitors.retain(|object| object["kind"] == "PodMonitor");
        assert_eq!(monitors.len(), 2);
        monitors
    };
    let namespace_selector = |values: &[&str]| {
        let monitors = monitors(values);
        find(&monitors, "PodMonitor", "linkerd-controller")["spec"]["namespaceSelector"].clone()
    };
    assert_eq!(namespace_selector(&[]), json!({"matchNames": ["linkerd"]}));
    let selector = "podMonitor.controller.namespaceSelector";
    let text = format!("--set-json={selector}=\"matchNames: ['{{{{ .Release.Namespace }}}}', linkerd-viz]\"");
    assert_eq!(
        namespace_selector(&[&text]),
        json!({"matchNames": ["linkerd", "linkerd-viz"]})
    );
    assert_eq!(
        namespace_selector(&[&format!("--set-json={selector}={{\"any\":true}}")]),
        json!({"any": true})
    );
    let values = [
        "--set=podMonitor.labels.release=prometheus,podMonitor.labels.team=ours,commonLabels.team=all",
        "--set=podMonitor.controller.honorTimestamps=true,podMonitor.proxy.honorTimestamps=null",
    ];
    let expected = [("linkerd-controller", json!(true)), ("linkerd-proxy", Value::Null)];
    let monitors = monitors(&values);
    for (name, honours) in expected {
        let monitor = find(&monitors, "PodMonitor", name);
        assert_eq!(
            monitor["metadata"]["labels"],
            json!({"linkerd.io/control-plane-ns": "linkerd", "release": "prometheus", "team": "ours"}),
            "{name}"
        );
        for endpoint in monitor["spec"]["podMetricsEndpoints"].as_array().unwrap() {
            assert_eq!(endpoint["honorTimestamps"], honours, "{name}");
        }
    }
}

#[test]
fn each_switch_of_the_gateway_api_installs_its_kinds() {
    let check = |values: &[&str], expected: &[&str]| {
        let objects = objects(&Helm::new().unwrap().template("tulle-crds", values).unwrap());
        let gateway = objects
            .iter()
            .filter(|object| object["spec"]["group"] == "gateway.networking.k8s.io");
        let plurals: BTreeSet<&str> = gateway
            .map(|object| object["spec"]["names"]["plural"].as_str().unwrap())
            .collect();
        assert_eq!(plurals, expected.iter().copied().collect(), "{values:?}");
    };
    let all = ["grpcroutes", "httproutes", "tcproutes", "tlsroutes"];
    check(&[], &[]);
    check(&["--set=installGatewayAPI=true"], &all);
    check(&["--set=enableHttpRoutes=true"], &["grpcroutes", "httproutes"]);
    check(
        &["--set=enableTlsRoutes=true,enableTcpRoutes=true"],
        &["tcproutes", "tlsroutes"],
    );
    check(
        &["--set=installGatewayAPI=true,enableTcpRoutes=false"],
        &["grpcroutes", "httproutes", "tlsroutes"],
    );
}

#[test]
fn the_log_levels_of_destination_and_policy_become_one_filter() {
    let check = |all: &str, policy: &str, expected: &str| {
        let values = [
            format!("--set=controllerLogLevel={all}"),
            format!("--set=policyController.logLevel={policy}"),
        ];
        let objects = render(&values.each_ref().map(String::as_str)).unwrap();
        let deployment = find(&objects, "Deployment", "linkerd-destination");
        let args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
            .as_array()
            .unwrap();
        let levels: Vec<&str> = args
            .iter()
            .filter_map(|arg| arg.as_str()?.strip_prefix("-log-level="))
            .collect();
        assert_eq!(levels, [expected]);
    };
    check("debug", "debug", "debug");
    check("info", "info", "info");
    check("info", "debug", "warn,tulle=info,tulle_control::policy=debug");
}

#[test]
fn every_value_has_a_comment_and_a_schema() {
    for chart in ["tulle-crds", "tulle-control-plane", "tulle-multicluster"] {
        let text = fs::read_to_string(format!("{}/values.yaml", chart_path(chart))).unwrap();
        let schema = fs::read_to_string(format!("{}/values.schema.json", chart_path(chart))).unwrap();
        let values: Value = serde_yaml_ng::from_str(&text).unwrap();
        let mut names = BTreeSet::new();
        collect_field_names(&values, "", &mut names);
        for name in names {
            assert!(
                schema.contains(&format!("\"{name}\"")),
                "{chart}: {name} is not in the schema"
            );
        }
        let mut unexplained = Vec::new();
        let lines: Vec<&str> = text.lines().collect();
        for (n, line) in lines.iter().enumerate().skip(1) {
            // A key with a value in its line, or without a field in the lines below.
            let is_leaf = line
                .split_once(": ")
                .is_some_and(|(key, _)| !key.trim_start().starts_with(['#', '-']))
                || line.trim_end().ends_with(':') && lines.get(n + 1).is_none_or(|next| indent(next) <= indent(line));
            if is_leaf && !has_comment_above(&lines, n) {
                unexplained.push(format!("line {}: {line}", n + 1));
            }
        }
        assert!(unexplained.is_empty(), "{chart}\n{}", unexplained.join("\n"));
    }
}

/// Adds the names of all fields in `value`, which is the field `parent`.
fn collect_field_names<'a>(value: &'a Value, parent: &str, names: &mut BTreeSet<&'a str>) {
    // Fields below these are defined by the user or by Kubernetes.
    const USER_DEFINED_FIELDS: &[&str] = &[
        "nodeSelector",
        "namespaceSelector",
        "objectSelector",
        "meshedHttp2ClientProtobuf",
    ];
    if let Value::Object(fields) = value
        && !USER_DEFINED_FIELDS.contains(&parent)
    {
        for (name, value) in fields {
            names.insert(name);
            collect_field_names(value, name, names);
        }
    }
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Whether a comment is directly above a line, or above one of the lines that contain it.
fn has_comment_above(lines: &[&str], mut n: usize) -> bool {
    let is_comment = |line: &str| line.trim_start().starts_with('#');
    loop {
        if n > 0 && is_comment(lines[n - 1]) {
            return true;
        }
        let is_outside = |line: &&str| !line.is_empty() && !is_comment(line) && indent(line) < indent(lines[n]);
        match lines[..n].iter().rposition(is_outside) {
            Some(outside) => n = outside,
            None => return false,
        }
    }
}
