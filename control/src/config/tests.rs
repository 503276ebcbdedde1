//! Lines of flags, and what they come to.

use std::ffi::OsString;

use super::*;

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
        &format!("destination {rest} -outbound-transport-mode x"),
        "expected transparent or transport-header",
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
