//! IPv4 and IPv6 with the shipped binaries: original destinations, endpoints, policies, and the proxy's own servers.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::time::Instant;
use tulle_core::names::port;
use tulle_core::netns::Namespace;
use tulle_tests::credentials::Validity;
use tulle_tests::hosts::admin_get;

use crate::openssl;
use crate::programs;
use crate::testbed::{
    CONTROL, GRPC, HTTP, OUTSIDE, RESTRICTED, SERVER, SERVICE, Setup, Testbed, both, can_run, identity, start_testbed,
    v6,
};

/// The host in a request to an IPv6 address is a literal in brackets, as clients write it.
#[test]
fn a_service_is_reached_by_either_of_its_addresses() {
    let Some(testbed) = start_testbed(&["curl"]) else {
        return;
    };
    for ip in both(SERVICE) {
        for (flag, version) in [("--http1.1", "1.1"), ("--http2-prior-knowledge", "2")] {
            let url = format!("http://{}/headers", SocketAddr::new(ip, HTTP));
            let args = ["-sS", flag, "-g", "-w", "\n%{http_version} %{http_code}", &url];
            let response = programs::run(&testbed.client, "curl", &args, b"");
            let (headers, version_and_status) = response.out.rsplit_once('\n').unwrap_or_default();
            assert_eq!(version_and_status, format!("{version} 200"), "{response:?}");
            // The header proves that both sidecars handled the request.
            let client = format!(r#""l5d-client-id":["{}"]"#, identity("client"));
            assert!(headers.contains(&client), "{response:?}");
        }
    }
    let host = format!("http://[{}]:{HTTP}/headers", v6(SERVICE));
    let lines = testbed.json_lines("server");
    assert!(lines.iter().any(|line| line["uri"] == host.as_str()), "{lines:?}");
}

#[test]
fn with_enable_ipv6_a_dual_stack_endpoint_is_reached_by_ipv6() {
    if !can_run(&["curl"]) {
        return;
    }
    let testbed = Testbed::build(Setup {
        control: &["-enable-ipv6"],
        ..Setup::default()
    });
    for (ip, n) in both(SERVICE).into_iter().zip(1..) {
        let answer = get(&testbed.client, None, (ip, HTTP).into());
        assert!(answer.starts_with("HTTP/1.1 200"), "{ip}: {answer}");
        let target = format!("target_addr=\"{}\"", SocketAddr::from((v6(SERVER), HTTP)));
        let allowed = "inbound_http_authz_allow_total";
        testbed.wait_for_series(allowed, &[&target], "client_id", &[(&identity("client"), n)]);
    }
}

#[test]
fn the_policy_of_a_port_applies_to_ipv6() {
    let Some(testbed) = start_testbed(&["openssl"]) else {
        return;
    };
    let to = SocketAddr::from((v6(SERVER), HTTP));
    assert!(get(&testbed.outside, None, to).starts_with("HTTP/1.1 403"));
    let peer = identity("peer");
    let valid = testbed.credentials.leaf(&peer, Validity::Current);
    // On the application's port and on the proxy's inbound port.
    for (port, alpn, expected) in [
        (HTTP, None, "HTTP/1.1 200 OK"),
        (RESTRICTED, None, "HTTP/1.1 403"),
        (
            port::INBOUND,
            Some("transport.l5d.io/v1"),
            "ALPN protocol: transport.l5d.io/v1",
        ),
    ] {
        let client = openssl::Client {
            to: (v6(SERVER), port).into(),
            name: &identity("server"),
            alpn,
            certificate: Some(&valid),
        };
        let response = client.connect_and_send(
            &testbed.outside,
            b"GET / HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n",
        );
        assert!(response.out.contains(expected), "{port}: {response:?}");
    }
    let target = format!("target_addr=\"{to}\"");
    testbed.wait_for_series("tulle_inbound_denied_total", &[&target], "reason", &[("no-tls", 1)]);
}

#[test]
fn networks_of_either_family_are_permitted_and_excepted() {
    let Some(testbed) = start_testbed(&[]) else { return };
    testbed.manifest("networks.yaml", NETWORKS);
    let unmeshed = [Ipv4Addr::new(10, 79, 0, 41), Ipv4Addr::new(10, 79, 0, 42)];
    for ip in unmeshed {
        let lines = format!("addr add {ip}/24 dev eth0\naddr add {}/64 dev eth0 nodad\n", v6(ip));
        testbed.outside.ip(&lines).unwrap();
    }
    let [excepted, other] = unmeshed;
    let response_to = |from: IpAddr| {
        let [v4, v6] = both(SERVER);
        let to = SocketAddr::new(if from.is_ipv4() { v4 } else { v6 }, GRPC);
        get(&testbed.outside, Some(from), to)
    };
    // Until the proxy receives the policy, only meshed clients may use the port.
    let deadline = Instant::now() + READ_TIMEOUT;
    while response_to(OUTSIDE.into()).starts_with("HTTP/1.1 403") {
        assert!(Instant::now() < deadline, "no client is permitted");
        thread::sleep(POLL_INTERVAL);
    }
    for (from, permitted) in [
        (IpAddr::from(OUTSIDE), true),
        (v6(OUTSIDE).into(), true),
        (excepted.into(), false),
        (v6(excepted).into(), false),
        (other.into(), true),
        (v6(other).into(), false),
    ] {
        // The proxy permits the request and forwards it, but no application listens.
        let expected = if permitted { "HTTP/1.1 502" } else { "HTTP/1.1 403" };
        let answer = response_to(from);
        assert!(answer.starts_with(expected), "{from}: {answer}");
    }
}

#[test]
fn an_egress_network_for_ipv6_denies_only_its_own_addresses() {
    let Some(testbed) = start_testbed(&[]) else { return };
    let [forbidden, neighbour] = ["2001:db8::1", "2001:db8:0:1::1"].map(|ip| ip.parse::<IpAddr>().unwrap());
    for ip in [forbidden, neighbour] {
        testbed
            .outside
            .ip(&format!("addr add {ip}/128 dev eth0 nodad\n"))
            .unwrap();
    }
    let application = testbed
        .outside
        .run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, HTTP)))
        .unwrap()
        .unwrap();
    // The thread ends with the test's process.
    thread::spawn(move || {
        for mut stream in application.incoming().flatten() {
            // Reads and ignores any request; the answer is always the same.
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n");
        }
    });
    let answer = |ip| get(&testbed.client, None, SocketAddr::new(ip, HTTP));
    assert!(answer(forbidden).starts_with("HTTP/1.1 204"), "{}", answer(forbidden));
    testbed.manifest("egress.yaml", EGRESS);
    let deadline = Instant::now() + READ_TIMEOUT;
    while !answer(forbidden).starts_with("HTTP/1.1 403") {
        assert!(Instant::now() < deadline, "{}", answer(forbidden));
        thread::sleep(POLL_INTERVAL);
    }
    assert!(answer(neighbour).starts_with("HTTP/1.1 204"), "{}", answer(neighbour));
}

/// The control plane by its IPv6 address; readiness, metrics and tap by both addresses.
#[test]
fn the_proxys_own_servers_and_its_control_plane_are_reached_by_ipv6() {
    if !can_run(&["openssl"]) {
        return;
    }
    let at = |port: u16| SocketAddr::from((v6(CONTROL), port)).to_string();
    let (identity_addr, destination, policy) = (at(port::IDENTITY), at(port::DESTINATION), at(port::POLICY));
    let own = both(SERVER).map(|ip| ip.to_string()).join(",");
    let testbed = Testbed::build(Setup {
        variables: &[
            ("LINKERD2_PROXY_INBOUND_IPS", &own),
            ("LINKERD2_PROXY_IDENTITY_SVC_ADDR", &identity_addr),
            ("LINKERD2_PROXY_DESTINATION_SVC_ADDR", &destination),
            ("LINKERD2_PROXY_POLICY_SVC_ADDR", &policy),
            ("LINKERD2_PROXY_ADMIN_LISTEN_ADDR", "[::]:4191"),
            ("LINKERD2_PROXY_CONTROL_LISTEN_ADDR", "[::]:4190"),
            (
                "LINKERD2_PROXY_TAP_SVC_NAME",
                "tap.linkerd.serviceaccount.identity.linkerd.cluster.local",
            ),
        ],
        ..Setup::default()
    });
    for ip in both(SERVER) {
        // On a port that requires an identity, clients without one may read only readiness. Clients on the same host
        // may read all pages.
        let ready = get_path(&testbed.client, None, (ip, port::ADMIN).into(), "/ready");
        assert!(ready.starts_with("HTTP/1.1 200"), "{ip}: {ready}");
        let metrics = get_path(&testbed.server, None, (ip, port::ADMIN).into(), "/metrics");
        assert!(metrics.starts_with("HTTP/1.1 200"), "{ip}: {metrics}");
        let series = format!("control_request_total{{addr=\"{policy}\"");
        assert!(metrics.contains(&series), "{series}: {metrics}");
        let tap = openssl::Client {
            to: (ip, port::TAP).into(),
            name: &identity("server"),
            alpn: None,
            certificate: None,
        };
        let response = tap.connect_and_send(&testbed.client, b"no HTTP/2\r\n\r\n");
        assert!(response.certificate().starts_with("-----BEGIN"), "{ip}: {response:?}");
    }
}

/// Unless `disableIPv6` is set, the injector sets both loopback addresses as outbound listen addresses; the machine may still
/// lack IPv6.
#[test]
fn a_machine_without_ipv6_uses_ipv4() {
    let Some(testbed) = start_testbed(&["curl"]) else {
        return;
    };
    let host = &testbed.outside;
    let disabled = || std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
    host.run(disabled).unwrap().unwrap();
    let mut sidecar = testbed.start_sidecar("client", host, &testbed.dir().join("tulle-proxy"), Setup::default());
    sidecar
        .wait_for("readiness", |_| Ok(admin_get(host, "/ready").is_ok()))
        .unwrap();
    let listening = host
        .run(|| TcpStream::connect((Ipv4Addr::LOCALHOST, port::OUTBOUND)))
        .unwrap();
    listening.unwrap();
    let refused = host
        .run(|| TcpStream::connect((Ipv6Addr::LOCALHOST, port::OUTBOUND)))
        .unwrap();
    refused.unwrap_err();
    let log = std::fs::read_to_string(testbed.dir().join("sidecar-client.log")).unwrap();
    assert!(log.contains("[::1]:4140"), "{log}");
}

fn get(host: &Namespace, from: Option<IpAddr>, to: SocketAddr) -> String {
    get_path(host, from, to, "/")
}

fn get_path(host: &Namespace, from: Option<IpAddr>, to: SocketAddr, path: &str) -> String {
    let exchange = || {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        if let Some(from) = from {
            socket.bind(&SocketAddr::new(from, 0).into())?;
        }
        socket.connect_timeout(&to.into(), READ_TIMEOUT)?;
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        write!(stream, "GET {path} HTTP/1.1\r\nhost: {to}\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer: std::io::Result<String> = host.run(exchange).unwrap();
    answer.unwrap_or_else(|error| panic!("{from:?} to {to}: {error}"))
}

const NETWORKS: &str = "\
apiVersion: policy.linkerd.io/v1beta3
kind: Server
metadata: {name: grpc, namespace: shop}
spec:
  externalWorkloadSelector: {matchLabels: {app: server}}
  port: grpc
  accessPolicy: deny
---
apiVersion: policy.linkerd.io/v1alpha1
kind: NetworkAuthentication
metadata: {name: networks, namespace: shop}
spec:
  networks:
  - {cidr: 10.79.0.0/24, except: [10.79.0.41]}
  - {cidr: \"fd79::40/127\", except: [\"fd79::41/128\"]}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: networks, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: grpc}
  requiredAuthenticationRefs:
  - {group: policy.linkerd.io, kind: NetworkAuthentication, name: networks}
";
const EGRESS: &str = "\
apiVersion: policy.linkerd.io/v1alpha1
kind: EgressNetwork
metadata: {name: documents, namespace: shop}
spec: {trafficPolicy: Deny, networks: [{cidr: \"2001:db8::/64\"}]}
";
const READ_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
