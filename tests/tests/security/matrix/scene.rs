//! The hosts of one run: a server with a sidecar, the control plane, clients outside of the mesh, and one function for
//! each state of the control plane.

use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::time::Instant;
use tulle_bench::run::process::Process;
use tulle_core::names::port;
use tulle_core::netns::{self, Lab, Namespace};
use tulle_tests::credentials::{Credentials, NAMESPACE};
use tulle_tests::hosts::{self, admin, command};
use tulle_tests::programs::{self, built};

use super::table::v6;

pub(super) const CONTROL: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 30);
pub(super) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 10);
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 20);
pub(super) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 40);

/// The hosts and what runs there; all of it vanishes with the value.
pub(super) struct Scene {
    // Dropped in this order: processes before the namespaces they live in, and those before the files.
    control_plane: Option<Process>,
    identity: Option<Process>,
    sidecar: Option<Process>,
    control: Arc<Namespace>,
    pub(super) client: Arc<Namespace>,
    pub(super) server: Arc<Namespace>,
    pub(super) outside: Arc<Namespace>,
    _lab: Lab,
    pub(super) credentials: Credentials,
    proxy: PathBuf,
    dir: TempDir,
    /// The host whose sidecar is looked at.
    meshed: &'static str,
    /// `INBOUND_PORTS` of the sidecar: what it asks for when it starts.
    asked: Vec<u16>,
}

/// Whether the rules of a host are for IPv6, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ipv6Rules {
    Written,
    /// As with `disableIPv6: true`.
    Disabled,
}

/// Whether scenes can be made here; a loud word where not.
pub(super) fn can_run() -> bool {
    if Uid::effective().is_root() {
        return true;
    }
    let reason = "network namespaces need root; run this test as root";
    assert!(std::env::var_os("CI").is_none(), "{reason}");
    eprintln!("\n*** SKIPPED: {reason} ***\n");
    false
}

/// The control plane is up.
pub(super) fn up(scene: &mut Scene) {
    scene.start_identity();
    scene.start_control_plane("manifests");
    scene.start_sidecar();
    scene.wait_for_policies();
}

/// Sidecars get certificates, but nobody has ever told them a policy.
pub(super) fn not_yet(scene: &mut Scene) {
    scene.start_identity();
    scene.start_sidecar();
}

/// The control plane has gone.
pub(super) fn down(scene: &mut Scene) {
    up(scene);
    scene.kill_control_plane();
}

/// The control plane has been replaced by one that knows nothing of the workload.
pub(super) fn not_found(scene: &mut Scene) {
    up(scene);
    scene.kill_control_plane();
    scene.start_control_plane("empty");
    let n_asked = scene.asked.len() as u64;
    scene.wait_for_answers("NotFound", n_asked);
}

/// The control plane is killed and started again until it is over; counts how often.
pub(super) fn restarting(scene: &Mutex<Scene>, n_restarts: &Mutex<u32>, is_over: impl Fn() -> bool) {
    while !is_over() {
        scene.lock().kill_control_plane();
        thread::sleep(DOWN_TIME);
        scene.lock().start_control_plane("manifests");
        thread::sleep(DOWN_TIME);
        *n_restarts.lock() += 1;
    }
}

impl Scene {
    /// The hosts, with these manifests for the control plane; the sidecar of the host `meshed` is going to ask for the
    /// policies of some ports.
    pub(super) fn build(meshed: &'static str, manifests: &str, asked: &[u16], ipv6: Ipv6Rules) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // The sidecars run as a user of their own and have to read what is in it.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let credentials = Credentials::create(dir.path());
        for (name, text) in [("manifests", manifests), ("empty", "")] {
            let manifests = dir.path().join(name);
            fs::create_dir(&manifests).unwrap();
            fs::write(manifests.join("mesh.yaml"), text).unwrap();
        }
        let proxy = programs::install("tulle-proxy", dir.path()).unwrap();

        netns::sweep(PREFIX).unwrap();
        let mut lab = Lab::new(PREFIX).unwrap();
        let hosts = [
            ("control", CONTROL),
            ("client", CLIENT),
            ("server", SERVER),
            ("outside", OUTSIDE),
        ];
        let [control, client, server, outside] = hosts.map(|(name, ip)| {
            let host = lab
                .host(name, &format!("{ip}/24"), Some(&format!("{}/64", v6(ip))))
                .unwrap();
            host.ip("route add default dev eth0\nroute add ::/0 dev eth0\n")
                .unwrap();
            host
        });
        redirect(&server, ipv6);
        redirect(&client, ipv6);
        Self {
            control_plane: None,
            identity: None,
            sidecar: None,
            control,
            client,
            server,
            outside,
            _lab: lab,
            credentials,
            proxy,
            dir,
            meshed,
            asked: asked.to_vec(),
        }
    }

    /// The metrics page of a host's sidecar.
    pub(super) fn metrics(host: &Namespace) -> String {
        admin(host, "/metrics").expect("the sidecar runs")
    }

    /// The end of what the sidecar has written.
    pub(super) fn last_words(&self) -> String {
        self.sidecar.as_ref().map_or_else(String::new, Process::last_words)
    }

    /// Starts what signs certificates, apart from the rest of the control plane.
    pub(super) fn start_identity(&mut self) {
        let mut command = self.control_command();
        command.args(["identity", "--admin-addr", "127.0.0.1:9980"]);
        let mut identity = self.start("identity", command);
        identity.listening(&[port::IDENTITY]).unwrap();
        self.identity = Some(identity);
    }

    /// Starts what tells policies and endpoints, from one of the directories of manifests.
    pub(super) fn start_control_plane(&mut self, manifests: &str) {
        let mut command = self.control_command();
        // It has to certify itself.
        command.args(["identity", "destination", "policy", "--identity-addr", "127.0.0.1:8079"]);
        command.arg("--manifests").arg(self.dir.path().join(manifests));
        command.args(["--cluster-networks", NETWORKS, "--default-policy", "all-authenticated"]);
        let mut control = self.start("control-plane", command);
        control
            .listening(&[port::DESTINATION, port::POLICY, CONTROL_ADMIN])
            .unwrap();
        let errors = hosts::page(&self.control, CONTROL_ADMIN, "/manifest-errors").unwrap();
        assert!(errors.ends_with("\r\n\r\n"), "manifests are refused: {errors}");
        self.control_plane = Some(control);
    }

    /// Ends the control plane without a word to anybody.
    pub(super) fn kill_control_plane(&mut self) {
        let control = self.control_plane.take().expect("it runs");
        kill(Pid::from_raw(control.id().cast_signed()), Signal::SIGKILL).unwrap();
    }

    /// Waits until the control plane has ended so many calls with this status.
    fn wait_for_answers(&self, code: &str, n: u64) {
        let status = format!("grpc_code=\"{code}\"");
        let deadline = Instant::now() + LIMIT;
        loop {
            let metrics = hosts::page(&self.control, CONTROL_ADMIN, "/metrics").unwrap();
            let found = sum(&metrics, "grpc_server_handled_total", &[&status]);
            if found >= n {
                return;
            }
            assert!(Instant::now() < deadline, "{found} calls ended with {code}, not {n}");
            thread::sleep(PAUSE);
        }
    }

    /// Waits until the sidecar knows the policies of all ports that it asks for.
    fn wait_for_policies(&self) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let page = admin(self.meshed_host(), "/debug/policies").expect("the sidecar runs");
            let (_, text) = page.split_once("\r\n\r\n").unwrap();
            let shown: Vec<serde_json::Value> = serde_yaml_ng::from_str(text).unwrap();
            let known = shown.iter().filter(|port| port["source"] == "control plane");
            let known: Vec<_> = known.filter_map(|port| port["port"].as_u64()).collect();
            if self.asked.iter().all(|port| known.contains(&u64::from(*port))) {
                return;
            }
            assert!(Instant::now() < deadline, "known are {known:?} of {:?}", self.asked);
            thread::sleep(PAUSE);
        }
    }

    fn meshed_host(&self) -> &Namespace {
        match self.meshed {
            "server" => &self.server,
            _ => &self.client,
        }
    }

    /// Starts the sidecar and waits until it has its certificate.
    fn start_sidecar(&mut self) {
        let name = self.meshed;
        let host = self.meshed_host();
        // The rules know the proxy by its user; entering the namespace needs root, so the user changes after it.
        let user = [format!("--reuid={PROXY_UID}"), format!("--regid={PROXY_UID}")];
        let mut command = command(host, &[&user[0], &user[1], "--clear-groups"], &self.proxy);
        command.env_clear();
        let at = |port: u16| SocketAddr::from((CONTROL, port)).to_string();
        let control = |account| {
            tulle_core::identity::service_account(account, CONTROL_NAMESPACE, CONTROL_NAMESPACE, TRUST_DOMAIN)
        };
        let workload = serde_json::json!({"ns": NAMESPACE, "external_workload": name}).to_string();
        let ports: Vec<_> = self.asked.iter().map(u16::to_string).collect();
        for (variable, value) in [
            ("LOG", "warn,tulle_proxy=info".to_owned()),
            ("DESTINATION_SVC_ADDR", at(port::DESTINATION)),
            ("DESTINATION_SVC_NAME", control("linkerd-destination")),
            ("DESTINATION_CONTEXT", workload.clone()),
            ("DESTINATION_PROFILE_NETWORKS", NETWORKS.into()),
            ("INBOUND_LISTEN_ADDR", format!("[::]:{}", port::INBOUND)),
            (
                "OUTBOUND_LISTEN_ADDRS",
                format!("127.0.0.1:{0},[::1]:{0}", port::OUTBOUND),
            ),
            ("POLICY_SVC_ADDR", at(port::POLICY)),
            ("POLICY_SVC_NAME", control("linkerd-destination")),
            ("POLICY_WORKLOAD", workload),
            ("POLICY_CLUSTER_NETWORKS", NETWORKS.into()),
            // As the chart has it: whoever is judged by it instead of by the port's policy gets in.
            ("INBOUND_DEFAULT_POLICY", "all-unauthenticated".into()),
            ("INBOUND_PORTS", ports.join(",")),
            ("INBOUND_DETECT_TIMEOUT", "2s".into()),
            ("OUTBOUND_DETECT_TIMEOUT", "2s".into()),
            ("IDENTITY_SVC_ADDR", at(port::IDENTITY)),
            ("IDENTITY_SVC_NAME", control("linkerd-identity")),
            ("IDENTITY_LOCAL_NAME", identity(name)),
            ("IDENTITY_TRUST_ANCHORS", self.credentials.anchor.certificate.clone()),
            (
                "IDENTITY_TOKEN_FILE",
                self.credentials.token(name).display().to_string(),
            ),
        ] {
            command.env(format!("LINKERD2_PROXY_{variable}"), value);
        }
        for direction in ["INBOUND", "OUTBOUND"] {
            command.env(format!("TULLE_PROXY_{direction}_HTTP1_HEAD_TIMEOUT"), "2s");
        }
        let mut sidecar = self.start(&format!("sidecar-{name}"), command);
        let is_ready = |_: &Process| Ok(admin(host, "/ready").is_ok());
        sidecar.wait_for("certificate, by its /ready", is_ready).unwrap();
        self.sidecar = Some(sidecar);
    }

    fn control_command(&self) -> Command {
        let mut command = command(&self.control, &[], &built("tulle-control").unwrap());
        for (flag, path) in [
            ("--trust-anchors", self.credentials.anchors()),
            ("--issuer", self.credentials.issuer()),
            ("--token-keys", self.credentials.token_keys()),
        ] {
            command.arg(flag).arg(path);
        }
        command
    }

    fn start(&self, name: &str, command: Command) -> Process {
        Process::start(name, command, self.dir.path()).unwrap()
    }
}

/// The sum of a family's series that have all these labels.
pub(super) fn sum(metrics: &str, family: &str, labels: &[&str]) -> u64 {
    let of_family = |line: &&str| line.strip_prefix(family).is_some_and(|rest| rest.starts_with('{'));
    let lines = metrics.lines().filter(of_family);
    let lines = lines.filter(|line| labels.iter().all(|label| line.contains(label)));
    let value = |line: &str| line.rsplit_once(' ').and_then(|(_, value)| value.parse::<u64>().ok());
    lines.map(|line| value(line).expect("counters are whole numbers")).sum()
}

/// The identity of a service account.
pub(super) fn identity(service_account: &str) -> String {
    tulle_core::identity::service_account(service_account, NAMESPACE, CONTROL_NAMESPACE, TRUST_DOMAIN)
}

fn redirect(host: &Namespace, ipv6: Ipv6Rules) {
    let mut command = host.command(built("tulle-init").unwrap());
    command.args(["-p", &port::INBOUND.to_string(), "-o", &port::OUTBOUND.to_string()]);
    command.args(["-u", &PROXY_UID.to_string()]);
    command.arg(match ipv6 {
        Ipv6Rules::Written => "--ipv6=true",
        Ipv6Rules::Disabled => "--ipv6=false",
    });
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

const CONTROL_NAMESPACE: &str = "linkerd";
const TRUST_DOMAIN: &str = "cluster.local";
const NETWORKS: &str = "10.0.0.0/8,fd00::/8";
const CONTROL_ADMIN: u16 = 9990;
/// The user whose traffic is not redirected.
const PROXY_UID: u32 = 2102;
const PREFIX: &str = "tm-";
const LIMIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(20);
/// How long the control plane stays down, and up, while it restarts.
const DOWN_TIME: Duration = Duration::from_millis(200);
