//! Explicit proxy: without redirect rules, applications name their destination by HTTP or SOCKS5. curl has four options for this.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Stdio;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tulle_tests::apps;
use tulle_tests::client::{AnyBody, Http1, Http2, empty};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Builder, DETECTED_TCP, HTTP, Mesh, OPAQUE, identity, mesh};
use tulle_tests::programs::find;

const PROXY: &str = "127.0.0.1:15001";

/// A client whose proxy listens for explicit requests, and services as destinations.
fn explicit_proxy_mesh() -> Builder {
    let client = mesh()
        .workload("client")
        .workload_env("TULLE_PROXY_EXPLICIT_LISTEN_ADDR", PROXY);
    client.workload("web").unmeshed("legacy")
}

async fn start_echo_servers(mesh: &Mesh) {
    for workload in ["web", "legacy"] {
        apps::start_echo(mesh, workload).await;
    }
}

/// The output of curl, with response heads, and its exit code.
async fn curl(args: &[&str]) -> (String, i32) {
    let mut command = Command::new(find("curl").unwrap());
    command.args([
        "--silent",
        "--show-error",
        "--include",
        "--max-time",
        "15",
        "--noproxy",
        "",
    ]);
    let output = command.args(args).stdin(Stdio::null()).output().await.unwrap();
    let received = [output.stdout, output.stderr].concat();
    (
        String::from_utf8_lossy(&received).into_owned(),
        output.status.code().unwrap_or(-1),
    )
}

fn name(service: &str, port: u16) -> String {
    format!("{service}.shop.svc.cluster.local:{port}")
}

/// A connection on which SOCKS5 has requested `name` and `port`, and the reply code.
async fn socks(name: &str, port: u16) -> (TcpStream, u8) {
    let mut stream = TcpStream::connect(PROXY).await.unwrap();
    let n = u8::try_from(name.len()).unwrap();
    let pipelined = [
        b"\x05\x01\x00\x05\x01\x00\x03",
        &[n][..],
        name.as_bytes(),
        &port.to_be_bytes(),
    ]
    .concat();
    stream.write_all(&pipelined).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer[..3], [5, 0, 5]);
    (stream, answer[3])
}

#[test]
fn curl_reaches_a_service_of_the_mesh_in_four_ways() {
    explicit_proxy_mesh().run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        let by_name = format!("http://{}/headers", name("web", HTTP));
        let by_addr = format!("http://{}/headers", mesh.service_addr("web", HTTP));
        let (http, client_id) = (format!("http://{PROXY}"), identity("client"));
        for proxy_args in [
            &["--proxy", &http][..],
            &["--proxytunnel", "--proxy", &http],
            &["--socks5-hostname", PROXY],
            &["--socks5", PROXY],
        ] {
            // With `--socks5` curl resolves names itself, which needs DNS, and the mesh has none.
            let urls = match proxy_args[0] {
                "--socks5" => &[&by_addr][..],
                _ => &[&by_name, &by_addr],
            };
            for url in urls {
                let (received, code) = curl(
                    &[
                        proxy_args,
                        &["--proxy-header", "proxy-authorization: Basic c2VjcmV0", url],
                    ]
                    .concat(),
                )
                .await;
                assert_eq!(code, 0, "{proxy_args:?} {url}: {received}");
                assert!(received.contains("x-replica: web"), "{proxy_args:?} {url}: {received}");
                assert!(
                    received.contains(&format!("\"l5d-client-id\":[\"{client_id}\"]")),
                    "{proxy_args:?} {url}: {received}"
                );
                assert!(!received.contains("c2VjcmV0"), "{proxy_args:?} {url}: {received}");
            }
        }
        let meshed = ["authority=\"web.shop.svc.cluster.local:8080\"", "tls=\"true\""];
        mesh.wait_for_metric("client", "request_total", &meshed, 7.0).await;
    });
}

#[test]
fn requests_of_one_connection_may_have_different_targets() {
    explicit_proxy_mesh().run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        let build_request = |service: &str| {
            let req = http::Request::get(format!("http://{}/headers", name(service, HTTP)));
            req.header("host", "other.test").body::<AnyBody>(empty()).unwrap()
        };
        let mut one = Http1::handshake(TcpStream::connect(PROXY).await.unwrap()).await;
        let mut two = Http2::handshake(TcpStream::connect(PROXY).await.unwrap()).await;
        for service in ["web", "legacy", "web"] {
            let answer = one.fetch(build_request(service)).await.unwrap();
            assert_eq!(answer.header("x-replica"), service, "{}", answer.text());
            assert!(
                answer
                    .text()
                    .contains(&format!("\"host\":[\"{}\"]", name(service, HTTP))),
                "{}",
                answer.text()
            );
            let mut req = build_request(service);
            *req.version_mut() = http::Version::HTTP_2;
            // A host header would be used as the authority in HTTP/2, or be refused.
            req.headers_mut().remove("host");
            assert_eq!(two.fetch(req).await.unwrap().header("x-replica"), service);
        }
    });
}

#[test]
fn byte_streams_pass_whichever_side_sends_first() {
    explicit_proxy_mesh().run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        apps::start_greeting_server("web", mesh.app_addr("web", 9001)).await;
        for (host, port) in [("web", DETECTED_TCP), ("legacy", OPAQUE), ("web", OPAQUE)] {
            let (mut stream, code) = socks(&format!("{host}.shop.svc.cluster.local"), port).await;
            assert_eq!(code, 0, "{host} {port}");
            stream.write_all(b"\x01no HTTP at all\n").await.unwrap();
            let mut read = [0; 16];
            stream.read_exact(&mut read).await.unwrap();
            assert_eq!(&read, b"\x01no HTTP at all\n", "{host} {port}");
        }
        let (mut stream, code) = socks(&mesh.ip("web").to_string(), 9001).await;
        let mut greeting = [0; 15];
        stream.read_exact(&mut greeting).await.unwrap();
        assert_eq!((code, &greeting), (0, b"hello from web\n"));
    });
}

#[test]
fn unreachable_targets_are_reported_in_the_clients_protocol() {
    explicit_proxy_mesh().run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        let http = format!("http://{PROXY}");
        let closed_port = format!("http://{}:1/", mesh.ip("legacy"));
        let unknown = "http://unknown.invalid/";
        for (url, status, cause, reply) in [
            (&*closed_port, "502 Bad Gateway", "connect-refused", 5),
            (unknown, "503 Service Unavailable", "name-unresolved", 4),
        ] {
            for proxy_args in [&["--proxy", &http][..], &["--proxytunnel", "--proxy", &http]] {
                let (received, _) = curl(&[proxy_args, &[url]].concat()).await;
                assert!(
                    received.starts_with(&format!("HTTP/1.1 {status}")),
                    "{proxy_args:?} {url}: {received}"
                );
                assert!(
                    received.contains(&format!("l5d-proxy-cause: {cause};")),
                    "{proxy_args:?} {url}: {received}"
                );
                assert!(
                    received.contains("l5d-proxy-error: "),
                    "{proxy_args:?} {url}: {received}"
                );
            }
            let (received, code) = curl(&["--socks5-hostname", PROXY, url]).await;
            assert_eq!(code, 97, "{url}: {received}");
            assert!(received.contains(&format!("({reply})")), "{url}: {received}");
        }
        let (received, _) = curl(&[&format!("{http}/")]).await;
        assert!(
            received.starts_with("HTTP/1.1 400 ") && received.contains("this port is a proxy"),
            "{received}"
        );
        let (received, _) = curl(&["--proxytunnel", "--proxy", &http, &format!("http://{PROXY}/")]).await;
        assert!(received.starts_with("HTTP/1.1 502 "), "{received}");
    });
}

#[test]
fn bytes_that_are_neither_http_nor_socks_are_reset() {
    explicit_proxy_mesh().run(async |_: &Mesh| {
        let mut stream = TcpStream::connect(PROXY).await.unwrap();
        stream.write_all(b"\x01neither HTTP nor SOCKS\n").await.unwrap();
        let ended = stream.read(&mut [0]).await;
        assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn loopback_and_link_local_targets_are_refused() {
    let mesh = explicit_proxy_mesh().dns([127, 0, 0, 1]).env("INGRESS_MODE", "true");
    let mesh = mesh.env("DESTINATION_PROFILE_SUFFIXES", ".");
    let mesh = mesh.env("OUTBOUND_DISABLE_INFORMATIONAL_HEADERS", "false");
    mesh.run(async |mesh: &Mesh| {
        start_echo_servers(mesh).await;
        apps::start_echo_at("local", ([127, 0, 0, 1], HTTP).into()).await;
        let http = format!("http://{PROXY}");
        for target in [
            "127.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "0.0.0.0",
            "169.254.169.254",
            "[fe80::1]",
        ] {
            let url = format!("http://{target}:{HTTP}/");
            for proxy_args in [&["--proxy", &http][..], &["--proxytunnel", "--proxy", &http]] {
                let (received, _) = curl(&[proxy_args, &[&url]].concat()).await;
                assert!(
                    received.starts_with("HTTP/1.1 403 "),
                    "{proxy_args:?} {url}: {received}"
                );
                assert!(
                    received.contains("l5d-proxy-cause: target-forbidden;"),
                    "{proxy_args:?} {url}: {received}"
                );
            }
            let (received, code) = curl(&["--socks5", PROXY, &url]).await;
            assert_eq!(code, 97, "{url}: {received}");
            assert!(received.contains("(2)"), "{url}: {received}"); // connection not allowed by ruleset
        }
        let dir = tempfile::tempdir().unwrap();
        write_hosts(
            dir.path(),
            &["127.0.0.1", "169.254.169.254"].map(|ip| ip.parse().unwrap()),
        );
        let _server = start_dns_server(dir.path());
        let url = format!("http://files.example:{HTTP}/");
        eventually("the name is known, and none of its addresses is used", async || {
            let (received, _) = curl(&["--proxy", &http, &url]).await;
            assert!(received.starts_with("HTTP/1.1 503 "), "{received}");
            let found = ["client=\"applications\"", "result=\"ok\""];
            (mesh.metric("client", "control_dns_resolutions_total", &found).await >= 1.0).then_some(())
        })
        .await;
        let mut ingress = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let req = http::Request::get("/").header("host", "web.test");
        let req = req.header("l5d-dst-override", format!("files.example:{HTTP}"));
        let answer = ingress.fetch(req.body::<AnyBody>(empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status, 503, "{}", answer.text());
    });
}

/// Writes the addresses that [`dns`] returns for `files.example`.
fn write_hosts(dir: &Path, ips: &[IpAddr]) {
    let lines: String = ips.iter().map(|ip| format!("{ip} files.example\n")).collect();
    fs::write(dir.join("hosts"), lines).unwrap();
}

/// Starts a DNS server on port 53.
fn start_dns_server(dir: &Path) -> Child {
    let hosts = dir.join("hosts");
    let zone = format!(
        ".:53 {{\n hosts {} {{\n ttl 1\n reload 100ms\n }}\n}}\n",
        hosts.display()
    );
    fs::write(dir.join("Corefile"), zone).unwrap();
    let mut server = Command::new(find("coredns").unwrap());
    server.arg("-conf").arg(dir.join("Corefile"));
    server.stdout(Stdio::null()).kill_on_drop(true).spawn().unwrap()
}

#[test]
fn the_next_address_of_a_name_is_tried_after_a_refused_connection() {
    let mesh = explicit_proxy_mesh().dns([127, 0, 0, 1]).env("INGRESS_MODE", "true");
    let mesh = mesh.env("DESTINATION_PROFILE_SUFFIXES", "svc.cluster.local.,files.example.");
    mesh.run(async |mesh: &Mesh| {
        let [closed, open] = [9, 10].map(|last| IpAddr::from([10, 66, 9, last]));
        apps::start_echo_at("files", (open, HTTP).into()).await;
        let dir = tempfile::tempdir().unwrap();
        write_hosts(dir.path(), &[closed, open]);
        let _server = start_dns_server(dir.path());
        let (http, url) = (format!("http://{PROXY}"), format!("http://files.example:{HTTP}/echo"));
        let body = "x".repeat(100_000); // more than the limit of replayed request bodies
        let curl_with_body =
            async |proxy_args: &[&str]| curl(&[proxy_args, &["--data-binary", &body, &url]].concat()).await;
        eventually("the name is known", async || {
            let (received, _) = curl_with_body(&["--proxy", &http]).await;
            received.contains("x-replica: files").then_some(())
        })
        .await;
        // Attempts start with one address or the other.
        for _ in 0..2 {
            for proxy_args in [
                &["--proxy", &http][..],
                &["--proxytunnel", "--proxy", &http],
                &["--socks5-hostname", PROXY],
            ] {
                for _ in 0..2 {
                    let (received, _) = curl_with_body(proxy_args).await;
                    let is_answered = received.contains("x-replica: files") && received.contains(&body);
                    assert!(
                        is_answered,
                        "{proxy_args:?}: {}",
                        &received[..received.len().min(1_000)]
                    );
                }
            }
        }
        let mut ingress = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        for _ in 0..4 {
            let req = http::Request::get("/").header("host", "web.test");
            let req = req.header("l5d-dst-override", format!("files.example:{HTTP}"));
            let answer = ingress.fetch(req.body::<AnyBody>(empty()).unwrap()).await.unwrap();
            assert_eq!(answer.header("x-replica"), "files", "{}", answer.text());
        }
    });
}

#[test]
fn other_names_are_resolved_by_dns_and_keep_their_last_answer_when_it_fails() {
    // All addresses are local in the mesh's namespace, so a server on loopback needs no address of its own.
    let mesh = explicit_proxy_mesh()
        .env("DNS_MIN_TTL", "1s")
        .env("DNS_MAX_TTL", "1s")
        .dns([127, 0, 0, 1]);
    mesh.run(async |mesh: &Mesh| {
        let [old, new] = [9, 10].map(|last| SocketAddr::from(([10, 66, 9, last], HTTP)));
        for (name, addr) in [("old", old), ("new", new)] {
            apps::start_echo_at(name, addr).await;
        }
        let dir = tempfile::tempdir().unwrap();
        let set_address = |addr: SocketAddr| write_hosts(dir.path(), &[addr.ip()]);
        set_address(old);
        let mut server = start_dns_server(dir.path());
        let http = format!("http://{PROXY}");
        let answers = async |expected: &str| {
            let url = format!("http://files.example:{HTTP}/");
            let (received, _) = curl(&["--proxy", &http, &url]).await;
            received.contains(&format!("x-replica: {expected}")).then_some(())
        };
        eventually("the name leads to its address", async || answers("old").await).await;
        set_address(new);
        eventually("the new answer is used", async || answers("new").await).await;
        let failed = ["client=\"applications\"", "result=\"not_found\""];
        let failures = async || mesh.metric("client", "control_dns_resolutions_total", &failed).await;
        let before = failures().await;
        server.kill().await.unwrap();
        eventually("a DNS lookup has failed", async || {
            answers("new").await.expect("the last answer stays");
            (failures().await > before).then_some(())
        })
        .await;
        assert_eq!(answers("new").await, Some(()));
    });
}
