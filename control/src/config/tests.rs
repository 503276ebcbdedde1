//! Lines of flags, and what they come to.

use std::ffi::OsString;

use super::*;
use crate::logs;

fn config(line: &str) -> Result<Config> {
    let line = std::iter::once("tulle-control").chain(line.split(' '));
    Config::new(&Command::parse_from_line(line.map(OsString::from))?)
}

fn refused(line: &str, expected: &str) {
    let err = format!("{:#}", config(line).unwrap_err());
    assert!(err.contains(expected), "{line}: {err} has no {expected}");
}

#[test]
fn defaults_are_those_of_linkerd() {
    let config = config("all-in-one --manifests m --token-keys k").unwrap();
    assert_eq!(config.cluster.cluster_domain, "cluster.local");
    assert_eq!(config.cluster.trust_domain, "cluster.local");
    assert_eq!(config.listen.destination, ListenAddr::All(8086));
    assert_eq!(config.listen.policy, ListenAddr::All(8090));
    assert_eq!(
        config.server_name("linkerd-identity"),
        "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local"
    );
    let Certificates::Here { identity, .. } = config.certificates else {
        panic!("identity is in this process");
    };
    assert_eq!(identity.validity.lifetime, Duration::from_secs(24 * 3600));
    assert_eq!(identity.validity.clock_skew, Duration::from_secs(20));
    assert_eq!(identity.issuer, PathBuf::from("/var/run/linkerd/identity/issuer"));
}

#[test]
fn charts_may_pass_what_they_pass_to_linkerd() {
    let config = config(
        "destination -addr=:18086 -controller-namespace=mesh -outbound-transport-mode=transport-header \
         -enable-h2-upgrade=false -log-level=info -log-format=plain -enable-endpoint-slices=true \
         -cluster-domain=a.b -identity-trust-domain=c.d -default-opaque-ports=25,3306 -enable-ipv6=false \
         -stream-queue-capacity=100 -export-queue-metrics --manifests m",
    )
    .unwrap();
    assert_eq!(config.listen.destination, ListenAddr::All(18086));
    assert_eq!(config.cluster.transport, TransportMode::TransportHeader);
    assert_eq!(config.cluster.h2_upgrade, H2Upgrade::Omit);
    assert_eq!(config.cluster.ipv6, Ipv6::Drop);
    assert!(config.cluster.default_opaque_ports.contains(3306));
    let Certificates::Remote(remote) = config.certificates else {
        panic!("identity is elsewhere");
    };
    assert_eq!(remote.addr.to_string(), "linkerd-identity-headless.mesh.svc.a.b:8080");
    assert_eq!(remote.name, "linkerd-identity.mesh.serviceaccount.identity.mesh.c.d");
    // A mode that nobody knows is told in the log, and no reason to stay away.
    let config = self::config("destination --manifests m -outbound-transport-mode=tunnel").unwrap();
    assert_eq!(config.cluster.transport, TransportMode::Transparent);
}

#[test]
fn without_a_directory_objects_and_tokens_are_those_of_kubernetes() {
    let check = |line: &str, source: Option<Source>, needs_kubernetes: bool| {
        let config = config(line).unwrap();
        assert_eq!(config.source, source, "{line}");
        assert_eq!(config.needs_kubernetes(), needs_kubernetes, "{line}");
    };
    check("destination policy sp-validator", Some(Source::Kubernetes), true);
    check("destination --manifests m", Some(Source::Directory("m".into())), false);
    check("identity", None, true);
    check("identity --token-keys k", None, false);
    check("proxy-injector -kubeconfig=f", None, true);
}

#[test]
fn addresses_belong_to_the_services_that_are_named() {
    let listen = |line: &str| config(line).unwrap().listen;
    let together = listen("destination policy sp-validator -metrics-addr :1 --sp-validator-addr :2");
    assert_eq!(together.metrics, ListenAddr::All(1));
    assert_eq!(together.sp_validator, ListenAddr::All(2));
    assert_eq!(together.sp_validator_admin, ListenAddr::All(9997));
    assert_eq!(together.policy_validator, ListenAddr::All(9443));
    let validator = listen("sp-validator -addr :1 -metrics-addr :2");
    assert_eq!(
        (validator.sp_validator, validator.sp_validator_admin),
        (ListenAddr::All(1), ListenAddr::All(2))
    );
    let injector = listen("proxy-injector -addr :1 -metrics-addr :2 -linkerd-namespace mesh");
    assert_eq!(
        (injector.proxy_injector, injector.proxy_injector_admin),
        (ListenAddr::All(1), ListenAddr::All(2))
    );
    assert_eq!(listen("proxy-injector").proxy_injector_admin, ListenAddr::All(9995));
}

#[test]
fn flags_of_the_policy_controller_reach_what_they_are_for() {
    let check = |flags: &str, headers: RequestHeaders, admission: Admission, deployment: &str, timeout: Duration| {
        let config = config(&format!("policy --manifests m{flags}")).unwrap();
        assert_eq!(config.policy.request_headers, headers, "{flags}");
        assert_eq!(config.webhooks.policy_admission, admission, "{flags}");
        let written = config.writeback();
        assert_eq!(written.deployment, deployment, "{flags}");
        assert_eq!(written.statuses.unwrap().patch_timeout, timeout, "{flags}");
    };
    let (deployment, timeout) = ("linkerd-destination", Duration::from_secs(5));
    check("", RequestHeaders::Ignore, Admission::Check, deployment, timeout);
    for (flags, headers, admission) in [
        (" --allow-l5d-request-headers", RequestHeaders::Honour, Admission::Check),
        (
            " --allow-l5d-request-headers=false",
            RequestHeaders::Ignore,
            Admission::Check,
        ),
        (
            " --admission-controller-disabled",
            RequestHeaders::Ignore,
            Admission::Disabled,
        ),
        (
            " --admission-controller-disabled=false",
            RequestHeaders::Ignore,
            Admission::Check,
        ),
    ] {
        check(flags, headers, admission, deployment, timeout);
    }
    check(
        " --policy-deployment-name=control --patch-timeout-ms 250",
        RequestHeaders::Ignore,
        Admission::Check,
        "control",
        Duration::from_millis(250),
    );
}

#[test]
fn flags_without_effect_are_accepted_and_each_is_told_once() {
    let told = |flags: &str| {
        let line = format!("identity --token-keys k {flags}");
        // Whether a line is wanted is decided where it is first reached, which may be a thread that logs nothing, and again
        // when a log begins.
        config(&line).unwrap();
        let lines = logs::tests::lines_of(|| {
            config(&line).unwrap();
        });
        let told = lines
            .iter()
            .filter_map(|line| line.split_once("no effect here\" flag="));
        told.map(|(_, flag)| flag.to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(
        told("-trace-collector=collector:55678 -enable-pprof=true -identity-scheme=kubernetes.io/tls"),
        ["-identity-scheme", "-trace-collector", "-enable-pprof"]
    );
    // What asks for nothing is not worth a line.
    assert_eq!(told("-trace-collector= -enable-pprof=false"), [""; 0]);
}

#[test]
fn a_bad_value_is_refused_with_what_would_be_accepted() {
    let rest = "--manifests m --token-keys k";
    refused(
        &format!("identity {rest} -identity-issuance-lifetime=1d"),
        "is not a duration such as",
    );
    refused(
        &format!("identity {rest} -identity-issuance-lifetime=0"),
        "no time at all",
    );
    refused(&format!("policy {rest} --default-policy all"), "--default-policy: ");
    refused(
        &format!("policy {rest} --cluster-networks 10.0.0.0/33"),
        "--cluster-networks: ",
    );
    refused(
        &format!("policy {rest} -default-opaque-ports 70000"),
        "-default-opaque-ports: ",
    );
    refused(&format!("policy {rest} -cluster-domain a..b"), "is not a DNS name");
    refused(&format!("policy {rest} -controller-namespace A"), "is not a namespace");
    refused(
        &format!("destination {rest} -stream-queue-capacity 0"),
        "would hold nothing",
    );
    refused(
        &format!("destination {rest} -meshed-http2-client-params {{"),
        "-meshed-http2-client-params={",
    );
    refused(
        &format!("destination {rest} -enable-endpoint-slices=false"),
        "-enable-ipv6 needs",
    );
    refused(
        &format!("all-in-one {rest} -addr :1"),
        "expected --destination-addr, --identity-addr",
    );
    refused(&format!("policy {rest} -addr :1"), "or none");
    refused("identity -metrics-addr :1", "expected --admin-addr");
    refused("identity -kube-apiclient-qps 0", "let nothing through");
    refused("proxy-injector -audit-interval 5", "-audit-interval");
    refused("proxy-injector -audit-interval 0s", "never rest");
    refused(
        &format!("policy {rest} --grpc-addr 8090"),
        "is not an address to listen on",
    );
}
