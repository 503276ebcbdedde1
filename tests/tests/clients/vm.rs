//! A machine outside the cluster, set up with the files and commands of `docs/how-to/virtual-machines.md`. Only addresses and
//! directories are replaced.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use tulle_bench::run::process::Process;
use tulle_control::trust;
use tulle_core::netns::Namespace;
use tulle_tests::eventually::eventually_blocking;
use tulle_tests::hosts::admin_get;
use tulle_tests::machine::{ExternalMachine, IDENTITY};

use crate::testbed::{self, CONTROL, HTTP, OUTSIDE, RESTRICTED, Testbed, identity, start_testbed};

/// The cluster IP of the machine's service.
const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);

#[test]
fn a_machine_set_up_as_in_the_guide_receives_and_sends_mutual_tls() {
    let Some(testbed) = start_testbed(&["setpriv"]) else {
        return;
    };
    let machine = machine(&testbed);
    let _application = machine.start_application().unwrap();
    let _workload_api = machine.start("tulle-workload-api.service").unwrap();
    let init = machine.unit("tulle-init.service");
    machine.run(&init["ExecStart"]).unwrap();
    let mut proxy = machine.start("tulle-proxy.service").unwrap();
    let ready = |_: &Process| Ok(admin_get(&testbed.outside, "/ready").is_ok());
    proxy.wait_for("readiness", ready).unwrap();
    let check = machine
        .command(&format!("{} --check", init["ExecStart"]))
        .output()
        .unwrap();
    assert_eq!(check.status.code(), Some(0), "the rules are in force");

    // The mesh calls the machine. Its port accepts meshed clients only, so a response proves mutual TLS.
    let answer = send_request(&testbed.client, (SERVICE, 80).into());
    let client = identity("client");
    assert!(answer.contains("200 OK"), "{answer}");
    assert!(answer.contains(&format!(r#""l5d-client-id":["{client}"]"#)), "{answer}");
    let metrics = testbed.metrics(&testbed.client);
    assert!(
        has_series(
            &metrics,
            "request_total",
            &["direction=\"outbound\"", &format!("server_id=\"{IDENTITY}\"")]
        ),
        "{metrics}"
    );
    let metrics = testbed.metrics(&testbed.outside);
    assert!(
        has_series(
            &metrics,
            "inbound_http_authz_allow_total",
            &[&format!("client_id=\"{client}\"")]
        ),
        "{metrics}"
    );

    // The machine calls into the mesh, with an identity that policies permit.
    let answer = send_request(&testbed.outside, testbed::service(HTTP));
    assert!(answer.contains("200 OK"), "{answer}");
    assert!(
        answer.contains(&format!(r#""l5d-client-id":["{IDENTITY}"]"#)),
        "{answer}"
    );
    let answer = send_request(&testbed.outside, testbed::service(RESTRICTED));
    assert!(answer.contains("403 Forbidden"), "{answer}");
    testbed.wait_for_series(
        "tulle_inbound_denied_total",
        &["target_port=\"8081\""],
        "reason",
        &[("identity", 1)],
    );
    testbed.manifest("vm-policy.yaml", machine.file("policy.yaml"));
    testbed.manifest("vm-may-use-restricted.yaml", PERMISSION);
    eventually_blocking("the policy permits the machine", || {
        send_request(&testbed.outside, testbed::service(RESTRICTED)).contains("200 OK")
    });
    let allowed = testbed.series("inbound_http_authz_allow_total", &["target_port=\"8081\""], "client_id");
    assert_eq!(allowed.keys().collect::<Vec<_>>(), [IDENTITY]);

    // The machine starts to use a new issuer while it serves traffic.
    let before = renewals(&testbed);
    let issuer = trust::create_issuer("second", trust::ISSUER_LIFETIME, &testbed.credentials.anchor).unwrap();
    for (name, text) in [("key.pem", &issuer.key), ("crt.pem", &issuer.certificate)] {
        fs::write(machine.local_path("/etc/tulle/issuer").join(name), text).unwrap();
    }
    eventually_blocking("the certificate is renewed", || {
        let answer = send_request(&testbed.client, (SERVICE, 80).into());
        assert!(answer.contains("200 OK"), "{answer}");
        renewals(&testbed) > before
    });
    assert!(send_request(&testbed.outside, testbed::service(HTTP)).contains("200 OK"));

    drop(proxy);
    machine.run(&init["ExecStop"]).unwrap();
    let check = machine
        .command(&format!("{} --check", init["ExecStart"]))
        .output()
        .unwrap();
    assert_eq!(check.status.code(), Some(4), "the rules are gone");
}

#[test]
fn a_process_of_another_user_gets_no_identity() {
    let Some(testbed) = start_testbed(&["setpriv"]) else {
        return;
    };
    let machine = machine(&testbed);
    let unit = machine.unit("tulle-workload-api.service");
    let other = unit["ExecStart"].replace("--uid 2102", "--uid 2103");
    let _workload_api = machine.serve_workload_api(&other).unwrap();
    let proxy = machine.start("tulle-proxy.service").unwrap();
    eventually_blocking("the reason is logged", || {
        let log = proxy.log_tail();
        log.contains("no identity for user 2102") && log.contains("no certificate from the Workload API")
    });
    assert!(admin_get(&testbed.outside, "/ready").is_err());
}

/// The machine outside the mesh, and its manifests in the mesh.
fn machine(testbed: &Testbed) -> ExternalMachine {
    let (host, root) = (testbed.outside.clone(), testbed.dir().join("machine"));
    let machine = ExternalMachine::new(host, OUTSIDE, CONTROL, root, &testbed.credentials.anchor).unwrap();
    // A mesh from a directory needs an explicit address.
    let clustered = format!("spec:\n  clusterIP: {SERVICE}\n  selector:");
    let manifest = machine.file("external.yaml").replace("spec:\n  selector:", &clustered);
    assert!(manifest.contains("clusterIP"));
    testbed.manifest("external.yaml", &manifest);
    machine
}

/// Sends one request from a host and returns the whole response.
fn send_request(host: &Namespace, to: SocketAddr) -> String {
    let exchange = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(to)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        stream.write_all(b"GET /headers HTTP/1.1\r\nhost: mesh\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    host.run(exchange).unwrap().unwrap_or_else(|err| err.to_string())
}

/// Whether a metric family has a series with all these labels.
fn has_series(metrics: &str, family: &str, labels: &[&str]) -> bool {
    let of_family = |line: &&str| line.strip_prefix(family).is_some_and(|rest| rest.starts_with('{'));
    metrics
        .lines()
        .filter(of_family)
        .any(|line| labels.iter().all(|label| line.contains(label)))
}

fn renewals(testbed: &Testbed) -> u64 {
    let metrics = testbed.metrics(&testbed.outside);
    let prefix = "control_identity_cert_refreshes_total{result=\"ok\"} ";
    let value = metrics.lines().find_map(|line| line.strip_prefix(prefix)).unwrap();
    value.parse().unwrap()
}

/// `proxy-harness` is the MeshTLSAuthentication of the guide's `policy.yaml`.
const PERMISSION: &str = "\
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: vm-may-use-restricted, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: restricted}
  requiredAuthenticationRefs:
  - {group: policy.linkerd.io, kind: MeshTLSAuthentication, name: proxy-harness, namespace: simple-app}
";
const READ_TIMEOUT: Duration = Duration::from_secs(20);
