//! Tests of probes that are sent to the proxy's admin port, and that are restored in manifests.

use super::*;

const NOT_NATIVE: (&str, &str) = (annotation::PROXY_ENABLE_NATIVE_SIDECAR, "false");

/// A pod whose container `app` has this readiness probe.
fn probed(probe: &str) -> Case {
    Case::pod(&format!(
        "spec: {{containers: [{{name: app, image: a, ports: [{{containerPort: 8080, name: http}}], readinessProbe: {probe}}}]}}"
    ))
}

/// The original probes in the variable of the proxy; null without the variable.
fn original_probes(injected: &Injected) -> Value {
    injected
        .env("TULLE_PROXY_PROBES")
        .map_or(Value::Null, |text| serde_json::from_str(text).unwrap())
}

#[test]
fn probes_that_a_sidecar_would_break_are_sent_to_the_proxy() {
    for (probe, port, seconds) in [
        ("{tcpSocket: {port: 8080}}", 8080, 1),
        (
            "{tcpSocket: {port: http}, timeoutSeconds: 7, periodSeconds: 3, failureThreshold: 9}",
            8080,
            7,
        ),
        ("{tcpSocket: {port: '81', host: ''}}", 81, 1),
        ("{grpc: {port: 9000}}", 9000, 1),
        ("{grpc: {port: 9000, service: up}, initialDelaySeconds: 2}", 9000, 1),
        ("{httpGet: {port: http, scheme: HTTPS}, timeoutSeconds: 2}", 8080, 2),
        (
            "{httpGet: {port: 8443, scheme: HTTPS, path: '/x?y=$(HOME)', httpHeaders: [{name: Host, value: web.test}, {name: X, value: ''}]}}",
            8443,
            1,
        ),
    ] {
        let case = probed(probe);
        let injected = case.injected();
        // Only the handler changes.
        let mut expected = parse(probe);
        for handler in ["tcpSocket", "grpc", "httpGet"] {
            expected.as_object_mut().unwrap().remove(handler);
        }
        expected["httpGet"] = parse("{path: /probes/app/readiness, port: 4191}");
        assert_eq!(injected.container("app")["readinessProbe"], expected, "{probe}");
        let originals = original_probes(&injected);
        assert_eq!(originals.as_array().unwrap().len(), 1, "{probe}");
        let [container, kind] = ["container", "probe"].map(|key| originals[0][key].as_str());
        assert_eq!((container, kind), (Some("app"), Some("readiness")));
        assert_eq!(
            (&originals[0]["port"], &originals[0]["timeoutSeconds"]),
            (&port.into(), &seconds.into()),
            "{probe}"
        );
        // The kubelet must not expand variables in the JSON.
        assert!(!injected.env("TULLE_PROXY_PROBES").unwrap().contains('$'));

        let mut pod = injected.0.clone();
        restore_probes(pod["spec"].as_object_mut().unwrap());
        let mut handler = parse(probe);
        if let Some(tcp) = handler.get_mut("tcpSocket") {
            tcp.as_object_mut().unwrap().remove("host");
        }
        assert_eq!(Injected(pod).container("app")["readinessProbe"], handler);
    }
}

#[test]
fn other_probes_are_not_rewritten() {
    for probe in [
        "{httpGet: {port: 8080, path: /ready}}",
        "{httpGet: {port: 8080, scheme: HTTP}}",
        "{exec: {command: [test, -e, /ready]}}",
        // Probes of other hosts do not pass through the proxy.
        "{tcpSocket: {port: 8080, host: 10.0.0.1}}",
        "{httpGet: {port: 8080, scheme: HTTPS, host: other.test}}",
        // Invalid probes.
        "{tcpSocket: {port: unknown}}",
        "{tcpSocket: {port: 0}}",
        "{httpGet: {port: 8443, scheme: HTTPS, httpHeaders: [{name: 'a b', value: x}]}}",
        "{httpGet: {port: 8443, scheme: HTTPS, httpHeaders: [{name: a, value: \"x\\ny\"}]}}",
    ] {
        let case = probed(probe);
        let injected = case.injected();
        assert_eq!(injected.container("app")["readinessProbe"], parse(probe), "{probe}");
        assert_eq!(original_probes(&injected), Value::Null, "{probe}");
    }
    let tcp = "{tcpSocket: {port: 8080}}";
    let off = [(annotation::REWRITE_PROBES, "false")];
    for case in [
        probed(tcp).annotate(&off),
        probed(tcp).namespace(&off),
        // Linkerd's proxy cannot execute probes.
        probed(tcp).annotate(&[(annotation::PROXY_IMAGE, "cr.l5d.io/linkerd/proxy")]),
    ] {
        let injected = case.injected();
        assert_eq!(injected.container("app")["readinessProbe"], parse(tcp));
        assert_eq!(original_probes(&injected), Value::Null);
    }
    let wrong = probed(tcp).annotate(&[(annotation::REWRITE_PROBES, "no")]).outcome();
    assert!(wrong.warnings[0].contains("true or false"), "{:?}", wrong.warnings);
}

const ALL_PROBES: &str = "
spec:
  initContainers:
  - {name: setup, image: a}
  - name: side
    image: a
    restartPolicy: Always
    startupProbe: {tcpSocket: {port: 1}}
    readinessProbe: {grpc: {port: 2}}
    livenessProbe: {httpGet: {port: 3, scheme: HTTPS}}
  containers:
  - {name: plain, image: a, livenessProbe: {httpGet: {port: 80}}}
  - name: app
    image: a
    startupProbe: {grpc: {port: 4}}
    readinessProbe: {httpGet: {port: 5, scheme: HTTPS}}
    livenessProbe: {tcpSocket: {port: 6}}
";

#[test]
fn every_kind_of_probe_of_every_container_is_rewritten() {
    let rewritten_paths = |injected: &Injected| {
        let mut all = Vec::new();
        for name in ["side", "app", "plain"] {
            for field in ["startupProbe", "readinessProbe", "livenessProbe"] {
                let path = &injected.container(name)[field]["httpGet"]["path"];
                all.extend(path.as_str().map(str::to_owned));
            }
        }
        all.join(" ")
    };
    let native = Case::pod(ALL_PROBES)
        .annotate(&[(annotation::ADMIN_PORT, "5191")])
        .injected();
    assert_eq!(
        rewritten_paths(&native),
        "/probes/side/startup /probes/side/readiness /probes/side/liveness /probes/app/startup /probes/app/readiness \
         /probes/app/liveness"
    );
    assert_eq!(native.container("app")["startupProbe"]["httpGet"]["port"], 5191);
    assert_eq!(original_probes(&native).as_array().unwrap().len(), 6);
    // A sidecar that is not native starts after the init containers, so it cannot execute their startup and liveness probes.
    let not_native = Case::pod(ALL_PROBES).annotate(&[NOT_NATIVE]).injected();
    assert_eq!(
        rewritten_paths(&not_native),
        "/probes/side/readiness /probes/app/startup /probes/app/readiness /probes/app/liveness"
    );
    for case in [Case::pod(ALL_PROBES), Case::pod(ALL_PROBES).annotate(&[NOT_NATIVE])] {
        let mut pod = case.injected().0;
        restore_probes(pod["spec"].as_object_mut().unwrap());
        let restored = Injected(pod);
        let before = Injected(case.manifest.clone());
        for name in ["side", "app", "plain"] {
            assert_eq!(restored.container(name), before.container(name));
        }
    }
}
