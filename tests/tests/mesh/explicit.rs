//! Where no redirect rule can be, applications say themselves what they want to reach: curl does so in four ways.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Stdio;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tulle_tests::apps;
use tulle_tests::client::{AnyBody, Http1, Http2, empty};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{Builder, HTTP, Mesh, OPAQUE, TCP, identity, mesh};
use tulle_tests::programs::find;

const PROXY: &str = "127.0.0.1:15001";

/// A client whose proxy listens for it, and services to reach.
fn explicit() -> Builder {
    let client = mesh()
        .workload("client")
        .its_env("TULLE_PROXY_EXPLICIT_LISTEN_ADDR", PROXY);
    client.workload("web").unmeshed("legacy")
}

async fn echo(mesh: &Mesh) {
    for workload in ["web", "legacy"] {
        apps::echo(mesh, workload).await;
    }
}

/// What curl says, heads of responses included, and the code that it ends with.
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
    let said = [output.stdout, output.stderr].concat();
    (
        String::from_utf8_lossy(&said).into_owned(),
        output.status.code().unwrap_or(-1),
    )
}

fn name(service: &str, port: u16) -> String {
    format!("{service}.shop.svc.cluster.local:{port}")
}

/// A connection on which SOCKS5 has been asked for `name` and `port`, and the code of the answer.
async fn socks(name: &str, port: u16) -> (TcpStream, u8) {
    let mut stream = TcpStream::connect(PROXY).await.unwrap();
    let n = u8::try_from(name.len()).unwrap();
    let asked = [
        b"\x05\x01\x00\x05\x01\x00\x03",
        &[n][..],
        name.as_bytes(),
        &port.to_be_bytes(),
    ]
    .concat();
    stream.write_all(&asked).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer[..3], [5, 0, 5]);
    (stream, answer[3])
}

#[test]
fn curl_reaches_a_service_of_the_mesh_in_four_ways() {
    explicit().run(async |mesh: &Mesh| {
        echo(mesh).await;
        let by_name = format!("http://{}/headers", name("web", HTTP));
        let by_addr = format!("http://{}/headers", mesh.service("web", HTTP));
        let (http, us) = (format!("http://{PROXY}"), identity("client"));
        for ways in [
            &["--proxy", &http][..],
            &["--proxytunnel", "--proxy", &http],
            &["--socks5-hostname", PROXY],
            &["--socks5", PROXY],
        ] {
            // Names that are resolved by curl itself need DNS, which the mesh has none of.
            let urls = match ways[0] {
                "--socks5" => &[&by_addr][..],
                _ => &[&by_name, &by_addr],
            };
            for url in urls {
                let (said, code) =
                    curl(&[ways, &["--proxy-header", "proxy-authorization: Basic c2VjcmV0", url]].concat()).await;
                assert_eq!(code, 0, "{ways:?} {url}: {said}");
                assert!(said.contains("x-replica: web"), "{ways:?} {url}: {said}");
                assert!(
                    said.contains(&format!("\"l5d-client-id\":[\"{us}\"]")),
                    "{ways:?} {url}: {said}"
                );
                assert!(!said.contains("c2VjcmV0"), "{ways:?} {url}: {said}");
            }
        }
        let meshed = ["authority=\"web.shop.svc.cluster.local:8080\"", "tls=\"true\""];
        assert_eq!(mesh.metric("client", "request_total", &meshed).await, 7.0);
    });
}

#[test]
fn a_connection_of_requests_may_go_to_many_targets() {
    explicit().run(async |mesh: &Mesh| {
        echo(mesh).await;
        let ask = |service: &str| {
            let req = http::Request::get(format!("http://{}/headers", name(service, HTTP)));
            req.header("host", "somebody.else").body::<AnyBody>(empty()).unwrap()
        };
        let mut one = Http1::over(TcpStream::connect(PROXY).await.unwrap()).await;
        let mut two = Http2::over(TcpStream::connect(PROXY).await.unwrap()).await;
        for service in ["web", "legacy", "web"] {
            let answer = one.ask(ask(service)).await.unwrap();
            assert_eq!(answer.header("x-replica"), service, "{}", answer.text());
            assert!(
                answer
                    .text()
                    .contains(&format!("\"host\":[\"{}\"]", name(service, HTTP))),
                "{}",
                answer.text()
            );
            let mut req = ask(service);
            *req.version_mut() = http::Version::HTTP_2;
            // Which in HTTP/2 would be the authority, or refused.
            req.headers_mut().remove("host");
            assert_eq!(two.ask(req).await.unwrap().header("x-replica"), service);
        }
    });
}

#[test]
fn bytes_pass_whoever_speaks_first() {
    explicit().run(async |mesh: &Mesh| {
        echo(mesh).await;
        apps::greeter("web", mesh.app("web", 9001)).await;
        for (host, port) in [("web", TCP), ("legacy", OPAQUE), ("web", OPAQUE)] {
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
fn who_cannot_be_reached_is_told_in_the_clients_protocol() {
    explicit().run(async |mesh: &Mesh| {
        echo(mesh).await;
        let http = format!("http://{PROXY}");
        let nobody = format!("http://{}:1/", mesh.ip("legacy"));
        let unknown = "http://nobody.invalid/";
        for (url, status, cause, reply) in [
            (&*nobody, "502 Bad Gateway", "connect-refused", 5),
            (unknown, "503 Service Unavailable", "name-unresolved", 4),
        ] {
            for ways in [&["--proxy", &http][..], &["--proxytunnel", "--proxy", &http]] {
                let (said, _) = curl(&[ways, &[url]].concat()).await;
                assert!(
                    said.starts_with(&format!("HTTP/1.1 {status}")),
                    "{ways:?} {url}: {said}"
                );
                assert!(
                    said.contains(&format!("l5d-proxy-cause: {cause};")),
                    "{ways:?} {url}: {said}"
                );
                assert!(said.contains("l5d-proxy-error: "), "{ways:?} {url}: {said}");
            }
            let (said, code) = curl(&["--socks5-hostname", PROXY, url]).await;
            assert_eq!(code, 97, "{url}: {said}");
            assert!(said.contains(&format!("({reply})")), "{url}: {said}");
        }
        let (said, _) = curl(&[&format!("{http}/")]).await;
        assert!(
            said.starts_with("HTTP/1.1 400 ") && said.contains("this port is a proxy"),
            "{said}"
        );
        let (said, _) = curl(&["--proxytunnel", "--proxy", &http, &format!("http://{PROXY}/")]).await;
        assert!(said.starts_with("HTTP/1.1 502 "), "{said}");
    });
}

#[test]
fn nobody_is_led_to_loopback_or_the_link() {
    let mesh = explicit().dns([127, 0, 0, 1]).env("INGRESS_MODE", "true");
    let mesh = mesh.env("DESTINATION_PROFILE_SUFFIXES", ".");
    let mesh = mesh.env("OUTBOUND_DISABLE_INFORMATIONAL_HEADERS", "false");
    mesh.run(async |mesh: &Mesh| {
        echo(mesh).await;
        apps::echo_at("local", ([127, 0, 0, 1], HTTP).into()).await;
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
            for ways in [&["--proxy", &http][..], &["--proxytunnel", "--proxy", &http]] {
                let (said, _) = curl(&[ways, &[&url]].concat()).await;
                assert!(said.starts_with("HTTP/1.1 403 "), "{ways:?} {url}: {said}");
                assert!(
                    said.contains("l5d-proxy-cause: target-forbidden;"),
                    "{ways:?} {url}: {said}"
                );
            }
            let (said, code) = curl(&["--socks5", PROXY, &url]).await;
            assert_eq!(code, 97, "{url}: {said}");
            assert!(said.contains("(2)"), "{url}: {said}"); // not allowed
        }
        let dir = tempfile::tempdir().unwrap();
        write_hosts(
            dir.path(),
            &["127.0.0.1", "169.254.169.254"].map(|ip| ip.parse().unwrap()),
        );
        let _server = dns(dir.path());
        let url = format!("http://files.example:{HTTP}/");
        eventually("the name is known, and none of its addresses is used", async || {
            let (said, _) = curl(&["--proxy", &http, &url]).await;
            assert!(said.starts_with("HTTP/1.1 503 "), "{said}");
            let found = ["client=\"applications\"", "result=\"ok\""];
            (mesh.metric("client", "control_dns_resolutions_total", &found).await >= 1.0).then_some(())
        })
        .await;
        let mut ingress = Http1::over(mesh.dial("client", mesh.service("web", HTTP)).await).await;
        let req = http::Request::get("/").header("host", "web.test");
        let req = req.header("l5d-dst-override", format!("files.example:{HTTP}"));
        let answer = ingress.ask(req.body::<AnyBody>(empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status, 503, "{}", answer.text());
    });
}

/// Writes what [`dns`] says of `files.example`.
fn write_hosts(dir: &Path, ips: &[IpAddr]) {
    let lines: String = ips.iter().map(|ip| format!("{ip} files.example\n")).collect();
    fs::write(dir.join("hosts"), lines).unwrap();
}

/// A DNS server at port 53.
fn dns(dir: &Path) -> Child {
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
fn where_nobody_listens_at_an_address_of_a_name_the_next_is_tried() {
    let mesh = explicit().dns([127, 0, 0, 1]).env("INGRESS_MODE", "true");
    let mesh = mesh.env("DESTINATION_PROFILE_SUFFIXES", "svc.cluster.local.,files.example.");
    mesh.run(async |mesh: &Mesh| {
        let [nobody, somebody] = [9, 10].map(|last| IpAddr::from([10, 66, 9, last]));
        apps::echo_at("files", (somebody, HTTP).into()).await;
        let dir = tempfile::tempdir().unwrap();
        write_hosts(dir.path(), &[nobody, somebody]);
        let _server = dns(dir.path());
        let (http, url) = (format!("http://{PROXY}"), format!("http://files.example:{HTTP}/echo"));
        let body = "x".repeat(100_000); // more than is kept of any request
        let ask = async |ways: &[&str]| curl(&[ways, &["--data-binary", &body, &url]].concat()).await;
        eventually("the name is known", async || {
            let (said, _) = ask(&["--proxy", &http]).await;
            said.contains("x-replica: files").then_some(())
        })
        .await;
        // They begin with one address and with the other.
        for _ in 0..2 {
            for ways in [
                &["--proxy", &http][..],
                &["--proxytunnel", "--proxy", &http],
                &["--socks5-hostname", PROXY],
            ] {
                for _ in 0..2 {
                    let (said, _) = ask(ways).await;
                    let is_answered = said.contains("x-replica: files") && said.contains(&body);
                    assert!(is_answered, "{ways:?}: {}", &said[..said.len().min(1_000)]);
                }
            }
        }
        let mut ingress = Http1::over(mesh.dial("client", mesh.service("web", HTTP)).await).await;
        for _ in 0..4 {
            let req = http::Request::get("/").header("host", "web.test");
            let req = req.header("l5d-dst-override", format!("files.example:{HTTP}"));
            let answer = ingress.ask(req.body::<AnyBody>(empty()).unwrap()).await.unwrap();
            assert_eq!(answer.header("x-replica"), "files", "{}", answer.text());
        }
    });
}

#[test]
fn names_that_are_of_no_service_go_where_dns_says_and_where_it_said_once_it_is_gone() {
    // Everything in the mesh's namespace is local, and a server on loopback needs no address of its own.
    let mesh = explicit()
        .env("DNS_MIN_TTL", "1s")
        .env("DNS_MAX_TTL", "1s")
        .dns([127, 0, 0, 1]);
    mesh.run(async |mesh: &Mesh| {
        let [old, new] = [9, 10].map(|last| SocketAddr::from(([10, 66, 9, last], HTTP)));
        for (name, addr) in [("old", old), ("new", new)] {
            apps::echo_at(name, addr).await;
        }
        let dir = tempfile::tempdir().unwrap();
        let say = |addr: SocketAddr| write_hosts(dir.path(), &[addr.ip()]);
        say(old);
        let mut server = dns(dir.path());
        let http = format!("http://{PROXY}");
        let answers = async |expected: &str| {
            let url = format!("http://files.example:{HTTP}/");
            let (said, _) = curl(&["--proxy", &http, &url]).await;
            said.contains(&format!("x-replica: {expected}")).then_some(())
        };
        eventually("the name leads to its address", async || answers("old").await).await;
        say(new);
        eventually("a new answer counts", async || answers("new").await).await;
        let failed = ["client=\"applications\"", "result=\"not_found\""];
        let failures = async || mesh.metric("client", "control_dns_resolutions_total", &failed).await;
        let before = failures().await;
        server.kill().await.unwrap();
        eventually("DNS has been asked again in vain", async || {
            answers("new").await.expect("the last answer stays");
            (failures().await > before).then_some(())
        })
        .await;
        assert_eq!(answers("new").await, Some(()));
    });
}
