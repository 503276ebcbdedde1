//! Command lines and the resulting configuration.

use std::ffi::OsString;

use tulle_core::metrics::Registry;

use super::*;
use crate::logs;

fn config(line: &str) -> Result<Config> {
    let line = std::iter::once("tulle-control").chain(line.split(' '));
    Config::from_command(&Command::parse_from_line(line.map(OsString::from))?)
}

fn assert_rejected(line: &str, expected: &str) {
    let err = format!("{:#}", config(line).unwrap_err());
    assert!(err.contains(expected), "{line}: {err} has no {expected}");
}

#[test]
fn defaults_are_those_of_linkerd() {
    let config = config("all-in-one --manifests m --token-keys k").unwrap();
    assert_eq!(config.cluster.cluster_domain, "cluster.local");
    assert_eq!(config.cluster.trust_domain, "cluster.local");
    assert_eq!(config.listen.destination, ListenAddr::AllInterfaces(8086));
    assert_eq!(config.listen.policy, ListenAddr::AllInterfaces(8090));
    assert_eq!(
        config.server_name("linkerd-identity"),
        "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local"
    );
    let Certificates::Local { identity, .. } = config.certificates else {
        panic!("expected certificates of the identity service in this process");
    };
    assert_eq!(identity.validity.lifetime, Duration::from_secs(24 * 3600));
    assert_eq!(identity.validity.clock_skew, Duration::from_secs(20));
    assert_eq!(identity.issuer, PathBuf::from("/var/run/linkerd/identity/issuer"));
}

#[test]
fn flags_that_charts_pass_to_linkerd_are_accepted() {
    let config = config(
        "destination -addr=:18086 -controller-namespace=mesh -outbound-transport-mode=transport-header \
         -enable-h2-upgrade=false -log-level=info -log-format=plain -enable-endpoint-slices=true \
         -cluster-domain=a.b -identity-trust-domain=c.d -default-opaque-ports=25,3306 -enable-ipv6=false \
         -stream-queue-capacity=100 -export-queue-metrics --manifests m",
    )
    .unwrap();
    assert_eq!(config.listen.destination, ListenAddr::AllInterfaces(18086));
    assert_eq!(config.cluster.transport, TransportMode::TransportHeader);
    assert_eq!(config.cluster.h2_upgrade, H2Upgrade::Omit);
    assert_eq!(config.cluster.ipv6, Ipv6::Drop);
    assert!(config.cluster.default_opaque_ports.contains(3306));
    let Certificates::Remote(remote) = config.certificates else {
        panic!("expected certificates of another identity service");
    };
    assert_eq!(remote.addr.to_string(), "linkerd-identity-headless.mesh.svc.a.b:8080");
    assert_eq!(remote.name, "linkerd-identity.mesh.serviceaccount.identity.mesh.c.d");
    let config = self::config("destination --manifests m -outbound-transport-mode=transparent").unwrap();
    assert_eq!(config.cluster.transport, TransportMode::Transparent);
}

#[test]
fn kubernetes_is_needed_for_objects_token_reviews_and_webhooks() {
    let check = |line: &str, source: Option<ObjectSource>, needs_kubernetes: bool| {
        let config = config(line).unwrap();
        assert_eq!(config.source, source, "{line}");
        assert_eq!(config.needs_kubernetes(), needs_kubernetes, "{line}");
    };
    check("destination policy sp-validator", Some(ObjectSource::Kubernetes), true);
    check(
        "destination --manifests m",
        Some(ObjectSource::Directory("m".into())),
        false,
    );
    check("identity", None, true);
    check("identity --token-keys k", None, false);
    check("proxy-injector -kubeconfig=f", None, true);
}

#[test]
fn addr_flags_apply_to_the_services_named() {
    let listen = |line: &str| config(line).unwrap().listen;
    let together = listen("destination policy sp-validator -metrics-addr :1 --sp-validator-addr :2");
    assert_eq!(together.destination_admin, ListenAddr::AllInterfaces(1));
    assert_eq!(together.sp_validator, ListenAddr::AllInterfaces(2));
    assert_eq!(together.sp_validator_admin, ListenAddr::AllInterfaces(9997));
    assert_eq!(together.policy_validator, ListenAddr::AllInterfaces(9443));
    let validator = listen("sp-validator -addr :1 -metrics-addr :2");
    assert_eq!(
        (validator.sp_validator, validator.sp_validator_admin),
        (ListenAddr::AllInterfaces(1), ListenAddr::AllInterfaces(2))
    );
    let injector = listen("proxy-injector -addr :1 -metrics-addr :2 -linkerd-namespace mesh");
    assert_eq!(
        (injector.proxy_injector, injector.proxy_injector_admin),
        (ListenAddr::AllInterfaces(1), ListenAddr::AllInterfaces(2))
    );
    assert_eq!(
        listen("proxy-injector").proxy_injector_admin,
        ListenAddr::AllInterfaces(9995)
    );
    let own_flags = listen("destination sp-validator -metrics-addr :1 --sp-validator-metrics-addr :2");
    assert_eq!(
        (own_flags.destination_admin, own_flags.sp_validator_admin),
        (ListenAddr::AllInterfaces(1), ListenAddr::AllInterfaces(2))
    );
    let defaults = listen("destination identity sp-validator");
    assert_eq!(
        [
            defaults.destination,
            defaults.identity,
            defaults.sp_validator,
            defaults.proxy_injector,
            defaults.sp_validator_admin
        ],
        [8086, 8080, 8443, 8443, 9997].map(ListenAddr::AllInterfaces)
    );
}

#[test]
fn a_service_has_its_address_from_one_flag_only() {
    for (service, own_flag) in [
        ("destination", "--destination-addr"),
        ("identity", "--identity-addr"),
        ("sp-validator", "--sp-validator-addr"),
        ("proxy-injector", "--proxy-injector-addr"),
        ("telemetry", "--telemetry-addr"),
    ] {
        assert_rejected(
            &format!("{service} -addr :1 {own_flag} :2"),
            &format!("--addr=:1 and {own_flag}=:2 set the same address"),
        );
    }
    assert_rejected(
        "sp-validator -metrics-addr :1 --sp-validator-metrics-addr :2",
        "--metrics-addr=:1 and --sp-validator-metrics-addr=:2 set the same address",
    );
}

#[test]
fn a_listen_failure_of_telemetry_is_ignored_only_if_no_argument_names_telemetry() {
    for (line, expected) in [
        ("all-in-one --manifests m", ListenFailure::OmitServer),
        ("all-in-one", ListenFailure::StopProcess),
        (
            "all-in-one --manifests m --telemetry-addr :8089",
            ListenFailure::StopProcess,
        ),
        ("all-in-one telemetry --manifests m", ListenFailure::StopProcess),
        ("destination telemetry --manifests m", ListenFailure::StopProcess),
        ("telemetry --manifests m -addr :1", ListenFailure::StopProcess),
    ] {
        assert_eq!(config(line).unwrap().telemetry_listen_failure, expected, "{line}");
    }
}

#[test]
fn policy_controller_flags_set_their_config_fields() {
    let check = |flags: &str, headers: L5dHeaders, admission: Admission, deployment: &str, timeout: Duration| {
        let config = config(&format!("policy --manifests m{flags}")).unwrap();
        assert_eq!(config.policy.l5d_headers, headers, "{flags}");
        assert_eq!(config.webhooks.policy_admission, admission, "{flags}");
        let written = config.writeback_config();
        assert_eq!(written.lease_owner_deployment, deployment, "{flags}");
        assert_eq!(written.statuses.unwrap().patch_timeout, timeout, "{flags}");
    };
    let (deployment, timeout) = ("linkerd-destination", Duration::from_secs(5));
    check("", L5dHeaders::Ignore, Admission::Enabled, deployment, timeout);
    for (flags, headers, admission) in [
        (" --allow-l5d-request-headers", L5dHeaders::Honor, Admission::Enabled),
        (
            " --allow-l5d-request-headers=false",
            L5dHeaders::Ignore,
            Admission::Enabled,
        ),
        (
            " --admission-controller-disabled",
            L5dHeaders::Ignore,
            Admission::Disabled,
        ),
        (
            " --admission-controller-disabled=false",
            L5dHeaders::Ignore,
            Admission::Enabled,
        ),
    ] {
        check(flags, headers, admission, deployment, timeout);
    }
    check(
        " --policy-deployment-name=control --patch-timeout-ms 250",
        L5dHeaders::Ignore,
        Admission::Enabled,
        "control",
        Duration::from_millis(250),
    );
}

#[test]
fn flags_without_effect_are_accepted_and_each_is_logged_once_and_has_a_metric() {
    let logged = |flags: &str| {
        let line = format!("identity --token-keys k {flags}");
        let mut in_metric = Vec::new();
        let lines = logs::tests::capture_lines(|| {
            in_metric = flags_in_metric(&config(&line).unwrap());
        });
        let logged = lines
            .iter()
            .filter_map(|line| line.split_once("no effect here\" flag="));
        let mut logged: Vec<_> = logged.map(|(_, flag)| flag.to_owned()).collect();
        let in_order = logged.clone();
        logged.sort();
        assert_eq!(in_metric, logged, "{flags}");
        in_order
    };
    assert_eq!(
        logged("-trace-collector=collector:55678 -enable-pprof=true -identity-scheme=kubernetes.io/tls"),
        ["--identity-scheme", "--trace-collector", "--enable-pprof"]
    );
    // A flag that is empty or false is not logged.
    assert_eq!(
        logged("-trace-collector= -enable-pprof=false -export-queue-metrics=false -identity-scheme="),
        [""; 0]
    );
    assert_eq!(logged("-export-queue-metrics"), ["--export-queue-metrics"]);
}

/// The flags that the metric reports, sorted.
fn flags_in_metric(config: &Config) -> Vec<String> {
    let registry = Registry::new();
    let _gauges = unsupported_flags::register(&registry, &config.unsupported_flags);
    let page = registry.render();
    let flags = page.lines().filter_map(|line| {
        let line = line.strip_prefix("tulle_unsupported_flag{name=\"")?;
        Some(line.strip_suffix("\"} 1")?.to_owned())
    });
    let mut flags: Vec<_> = flags.collect();
    flags.sort();
    flags
}

#[test]
fn a_service_mirror_for_all_links_leaves_out_those_with_their_own() {
    let config = config("service-mirror -all-links -excluded-links=east,north").unwrap();
    let Some(mirror::config::Scope::AllLinks(excluded)) = config.mirror.map(|mirror| mirror.scope) else {
        panic!("expected all Links");
    };
    assert_eq!(Vec::from_iter(excluded), ["east", "north"]);
    for (line, expected) in [
        ("service-mirror", "needs --all-links, --link-name=NAME"),
        (
            "service-mirror -local-mirror -excluded-links=east",
            "--excluded-links=\"east\"",
        ),
        (
            "service-mirror -all-links -probe-service=probe",
            "--probe-service=\"probe\"",
        ),
    ] {
        assert_rejected(line, expected);
    }
}

#[test]
fn an_invalid_value_is_rejected_with_the_expected_form() {
    let rest = "--manifests m --token-keys k";
    assert_rejected(
        &format!("identity {rest} -identity-issuance-lifetime=1d"),
        "is not a duration such as",
    );
    assert_rejected(
        &format!("identity {rest} -identity-issuance-lifetime=0"),
        "must be greater than 0",
    );
    assert_rejected(&format!("policy {rest} --default-policy all"), "--default-policy: ");
    assert_rejected(
        &format!("policy {rest} --cluster-networks 10.0.0.0/33"),
        "--cluster-networks: ",
    );
    assert_rejected(
        &format!("policy {rest} -default-opaque-ports 70000"),
        "--default-opaque-ports: ",
    );
    assert_rejected(
        &format!("destination {rest} -outbound-transport-mode=tunnel"),
        "accepted: transparent, transport-header",
    );
    assert_rejected(&format!("policy {rest} -cluster-domain a..b"), "is not a DNS name");
    assert_rejected(&format!("policy {rest} -controller-namespace A"), "is not a namespace");
    assert_rejected(&format!("policy {rest} -controller-namespace A"), "lower-case letters");
    assert_rejected(
        &format!("destination {rest} -stream-queue-capacity 0"),
        "because there are no queues",
    );
    assert_rejected(
        &format!("destination {rest} -meshed-http2-client-params {{"),
        "--meshed-http2-client-params={",
    );
    assert_rejected(
        &format!("destination {rest} -enable-endpoint-slices=false"),
        "--enable-ipv6 needs",
    );
    assert_rejected(
        &format!("all-in-one {rest} -addr :1"),
        "expected --destination-addr, --identity-addr",
    );
    assert_rejected(&format!("policy {rest} -addr :1"), "needs exactly one service");
    assert_rejected("identity -metrics-addr :1", "expected --admin-addr");
    assert_rejected("identity -kube-apiclient-qps 0", "are out of range");
    assert_rejected("proxy-injector -audit-interval 5", "--audit-interval");
    assert_rejected("proxy-injector -audit-interval 0s", "must be greater than 0");
    assert_rejected(&format!("policy {rest} --grpc-addr 8090"), "is not a listen address");
}
