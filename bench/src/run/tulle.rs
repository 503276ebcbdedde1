//! tulle as a peer: the shipped binaries, with their own control plane.
//!
//! All features of a mesh are enabled: certificates come from the identity service, policy authorizes every request by the client's
//! identity, discovery and balancing are active, and metrics are counted.

use std::fs::Permissions;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use tulle_control::trust::{self, CertificateAuthority, TokenSubject};
use tulle_core::names::port;
use tulle_core::netns::Namespace;

use super::process::Process;
use super::setup::Side;
use super::setup::{Instrumentation, Rules, Setup, SidecarPath};
use super::sidecars::Sidecars;
use super::testbed::{self, CONTROL_IP, PROXY_UID, Testbed};
use super::{callgrind, tools};

/// The proxy as in its images, built with profile-guided optimization.
pub(super) const PROXY: &str = "tulle-proxy";
/// The proxy, built without profile-guided optimization.
pub(super) const PROXY_NO_PROFILE: &str = "tulle-proxy-no-profile";
/// The proxy with a counting allocator.
const COUNTING_PROXY: &str = "tulle-bench-proxy";
const CONTROL_PLANE: &str = "tulle-control";

/// Fails if a program that is needed to measure `proxy` is missing in the directory of this program.
pub(super) fn check(proxy: &str) -> anyhow::Result<()> {
    [proxy, COUNTING_PROXY, CONTROL_PLANE]
        .into_iter()
        .try_for_each(|name| tools::sibling_binary(name).map(drop))
}

/// Starts a control plane and the sidecars, and waits until each sidecar has its certificate.
pub(super) fn start(testbed: &Testbed, setup: &Setup, program: &str) -> anyhow::Result<Sidecars> {
    let manifests = match setup.path {
        SidecarPath::Both => include_str!("../../peers/mesh.yaml"),
        SidecarPath::Outbound | SidecarPath::Inbound => include_str!("../../peers/mesh-plain.yaml"),
    };
    let rules = match setup.rules {
        Rules::None => String::new(),
        Rules::Routes => with_inbound_route(include_str!("../../peers/mesh-routed.yaml")),
        Rules::Rewrite => with_inbound_route(include_str!("../../peers/mesh-rewritten.yaml")),
        Rules::Profile => include_str!("../../peers/mesh-profiled.yaml").to_owned(),
    };
    let mesh = Mesh::create(testbed.dir.path(), &format!("{manifests}---\n{rules}"))?;
    let mut command = testbed.control.command(tools::sibling_binary(CONTROL_PLANE)?);
    command.args(mesh.control_args());
    let mut control = Process::start("tulle-control", command, testbed.dir.path())?;
    control.wait_for_ports(&[port::IDENTITY, port::DESTINATION, port::POLICY])?;
    let proxies = Proxies {
        testbed,
        setup,
        mesh: &mesh,
        program,
    };
    Sidecars::start(testbed, setup, Some(control), |side| proxies.start(side))
}

/// Appends the server's route to the manifests of a client's route.
fn with_inbound_route(outbound: &str) -> String {
    format!("{outbound}---\n{}", include_str!("../../peers/mesh-inbound-route.yaml"))
}

/// The generated files of one mesh.
struct Mesh {
    dir: PathBuf,
    anchors: String,
    token_key: String,
}

impl Mesh {
    /// Creates trust anchor, issuer, token keys and manifests.
    fn create(dir: &std::path::Path, manifests: &str) -> anyhow::Result<Self> {
        let dir = dir.join("mesh");
        if dir.exists() {
            std::fs::remove_dir_all(&dir).with_context(|| format!("removing {}", dir.display()))?;
        }
        for part in ["manifests", "issuer", "token-keys"] {
            let part = dir.join(part);
            std::fs::create_dir_all(&part).with_context(|| format!("making {}", part.display()))?;
        }
        write_world_readable(&dir.join("manifests/mesh.yaml"), manifests)?;
        let anchor = trust::create_anchor("root.linkerd.cluster.local", LIFETIME)?;
        let issuer = trust::create_issuer("identity.linkerd.cluster.local", LIFETIME, &anchor)?;
        write_world_readable(&dir.join("anchors.pem"), &anchor.certificate)?;
        let CertificateAuthority { certificate, key } = issuer;
        write_world_readable(&dir.join("issuer/tls.crt"), &certificate)?;
        write_world_readable(&dir.join("issuer/tls.key"), &key)?;
        let tokens = trust::create_token_keys()?;
        write_world_readable(&dir.join("token-keys/bench.pem"), &tokens.public)?;
        Ok(Self {
            dir,
            anchors: anchor.certificate,
            token_key: tokens.private,
        })
    }

    fn control_args(&self) -> Vec<String> {
        let path = |part: &str| self.dir.join(part).display().to_string();
        vec![
            "all-in-one".into(),
            "--manifests".into(),
            path("manifests"),
            "--issuer".into(),
            path("issuer"),
            "--trust-anchors".into(),
            path("anchors.pem"),
            "--token-keys".into(),
            path("token-keys"),
        ]
    }

    /// Creates a join token in a file that the proxy's user can read.
    fn create_token(&self, service_account: &str) -> anyhow::Result<PathBuf> {
        let subject = TokenSubject {
            service_account,
            namespace: NAMESPACE,
            lifetime: LIFETIME,
        };
        let path = self.dir.join(format!("{service_account}.token"));
        write_world_readable(&path, &trust::create_token(&self.token_key, &subject)?)?;
        Ok(path)
    }
}

/// Starts the proxies of one mesh.
struct Proxies<'a> {
    testbed: &'a Testbed,
    setup: &'a Setup,
    mesh: &'a Mesh,
    program: &'a str,
}

/// Copies a program to a directory that every user can access. Binaries built below a home directory may not be accessible.
fn copy_executable(program: &str, dir: &std::path::Path) -> anyhow::Result<PathBuf> {
    let copy = dir.join(program);
    if !copy.exists() {
        std::fs::copy(tools::sibling_binary(program)?, &copy).with_context(|| format!("copying {program}"))?;
    }
    Ok(copy)
}

impl Proxies<'_> {
    /// Starts the proxy of one side and waits for its certificate.
    fn start(&self, side: Side) -> anyhow::Result<Process> {
        let Self {
            testbed,
            setup,
            mesh,
            program,
        } = *self;
        let (name, namespace) = (side.name(), testbed.namespace(side));
        let copy_program = |program| copy_executable(program, testbed.dir.path());
        let mut command = match setup.instrumentation {
            Instrumentation::None => {
                testbed::command_as_proxy_user_in_mode(namespace, setup.inbound_mode, copy_program(program)?)
            }
            Instrumentation::CountingAllocator => {
                let mut command = testbed::command_as_proxy_user(namespace, copy_program(COUNTING_PROXY)?);
                command.arg(ALLOCATION_COUNTER_ADDR);
                command
            }
            Instrumentation::Callgrind => {
                let dir = testbed.dir.path().join(callgrind::DUMP_DIR);
                std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
                chown(&dir, Some(PROXY_UID), Some(PROXY_UID))
                    .context("changing the owner of the directory of callgrind")?;
                let mut command = testbed::command_as_proxy_user(namespace, "valgrind");
                command.args(callgrind::arguments(&callgrind::dump_path(testbed, side)));
                command.arg(copy_program(program)?);
                command
            }
        };
        // Only valgrind needs PATH.
        command.env_clear().env("PATH", "/usr/bin:/bin");
        let identity = |account: &str, namespace: &str| {
            tulle_core::identity::service_account_identity(account, namespace, "linkerd", "cluster.local")
        };
        let workload = serde_json::json!({"ns": NAMESPACE, "external_workload": name}).to_string();
        let destination = identity("linkerd-destination", "linkerd");
        let token = mesh.create_token(name)?.display().to_string();
        for (variable, value) in [
            ("LOG", "warn"),
            ("TAP_SVC_NAME", &identity("tap", "linkerd")),
            ("CORES", &setup.workers.to_string()),
            ("INBOUND_DEFAULT_POLICY", "all-authenticated"),
            ("POLICY_WORKLOAD", &workload),
            ("DESTINATION_CONTEXT", &workload),
            ("DESTINATION_PROFILE_NETWORKS", "10.0.0.0/8"),
            ("DESTINATION_SVC_ADDR", &format!("{CONTROL_IP}:{}", port::DESTINATION)),
            ("DESTINATION_SVC_NAME", &destination),
            ("POLICY_SVC_ADDR", &format!("{CONTROL_IP}:{}", port::POLICY)),
            ("POLICY_SVC_NAME", &destination),
            ("IDENTITY_SVC_ADDR", &format!("{CONTROL_IP}:{}", port::IDENTITY)),
            ("IDENTITY_SVC_NAME", &identity("linkerd-identity", "linkerd")),
            ("IDENTITY_LOCAL_NAME", &identity(name, NAMESPACE)),
            ("IDENTITY_TRUST_ANCHORS", &mesh.anchors),
            ("IDENTITY_TOKEN_FILE", &token),
        ] {
            command.env(format!("LINKERD2_PROXY_{variable}"), value);
        }
        command.env("TULLE_PROXY_INBOUND_MODE", setup.inbound_mode.name());
        if let Some(timeout) = setup.head_timeout {
            for side in ["INBOUND", "OUTBOUND"] {
                let variable = format!("TULLE_PROXY_{side}_HTTP_HEAD_TIMEOUT");
                command.env(variable, format!("{}ms", timeout.as_millis()));
            }
        }
        let mut process = Process::start(&format!("tulle-proxy-{name}"), command, testbed.dir.path())?;
        process.wait_for("certificate (not ready at /ready)", |_| {
            namespace.run(is_ready).context("checking readiness")
        })?;
        Ok(process)
    }
}

/// Allocations of the counting proxy so far.
pub(super) struct AllocationCounts {
    pub(super) calls: u64,
    pub(super) bytes: u64,
}

/// Reads the counters of the counting proxy in a namespace.
pub(super) fn read_allocations(namespace: &Namespace) -> anyhow::Result<AllocationCounts> {
    let read = || -> std::io::Result<String> {
        let mut answer = String::new();
        TcpStream::connect(ALLOCATION_COUNTER_ADDR)?.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = namespace
        .run(read)?
        .context("reading the counters of the counting proxy")?;
    let numbers: Vec<u64> = answer
        .split_whitespace()
        .filter_map(|number| number.parse().ok())
        .collect();
    match numbers[..] {
        [calls, bytes] => Ok(AllocationCounts { calls, bytes }),
        _ => anyhow::bail!("unexpected response of the counting proxy: {answer:?}"),
    }
}

/// Fails unless metrics show that the sidecars processed the traffic. Traffic that bypasses the mesh would appear fast.
pub(super) fn verify(testbed: &Testbed, path: SidecarPath) -> anyhow::Result<()> {
    let (namespace, labels): (_, &[&str]) = match path {
        SidecarPath::Both => (&testbed.server, &AUTHORIZED_REQUEST_LABELS),
        SidecarPath::Inbound => (&testbed.server, &AUTHORIZED_REQUEST_LABELS[..2]),
        SidecarPath::Outbound => (&testbed.client, &BALANCED_REQUEST_LABELS),
    };
    let metrics = namespace
        .run(|| admin_get("/metrics"))?
        .context("reading the sidecar's metrics")?;
    anyhow::ensure!(
        metrics
            .lines()
            .any(|line| labels.iter().all(|label| line.contains(label))),
        "the sidecar's metrics have no line with {labels:?}"
    );
    Ok(())
}

/// Whether the proxy in the current namespace reports that it is ready.
fn is_ready() -> bool {
    admin_get("/ready").is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// Sends a request to the admin server in the current namespace.
fn admin_get(path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port::ADMIN))?;
    stream.set_read_timeout(Some(ADMIN_TIMEOUT))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: proxy\r\nconnection: close\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Writes a file that every user can read. Keys in it are valid for one run only.
fn write_world_readable(path: &std::path::Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text)
        .and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(0o644)))
        .with_context(|| format!("writing {}", path.display()))
}

/// Listen address for the counters of the counting proxy.
const ALLOCATION_COUNTER_ADDR: &str = "127.0.0.1:4199";
const NAMESPACE: &str = "bench";
const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Labels of a counter that is incremented only for a verified client certificate and an AuthorizationPolicy.
const AUTHORIZED_REQUEST_LABELS: [&str; 4] = [
    "authz_allow_total{",
    "authz_kind=\"authorizationpolicy\"",
    "tls=\"true\"",
    "client_id=\"client.bench.",
];
/// Labels of a counter that is incremented only for requests to an endpoint of a service.
const BALANCED_REQUEST_LABELS: [&str; 3] = ["request_total{", "direction=\"outbound\"", "dst_service=\"server\""];
const ADMIN_TIMEOUT: Duration = Duration::from_secs(2);
