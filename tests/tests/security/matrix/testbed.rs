//! The hosts of one run: the control plane, a host outside the mesh, and a server and a client, one of which has the tested
//! sidecar. Functions bring the control plane into its states.

use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, Ipv6Addr};
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
use tulle_core::netns::{self, Namespace, VirtualNetwork};
use tulle_tests::credentials::Credentials;
pub(super) use tulle_tests::credentials::identity;
use tulle_tests::hosts::{self, admin_get, command};
use tulle_tests::programs::{self, built_binary};

pub(super) const CONTROL: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 30);
pub(super) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 10);
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 20);
pub(super) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 40);

/// The IPv6 address of a host: fd79::20 for 10.79.0.20. The decimal digits are reused as hexadecimal digits.
pub(super) fn v6(ip: Ipv4Addr) -> Ipv6Addr {
    let [_, network, _, host] = ip
        .octets()
        .map(|octet| u16::from_str_radix(&octet.to_string(), 16).unwrap());
    Ipv6Addr::new(0xfd00 + network, 0, 0, 0, 0, 0, 0, host)
}

/// The hosts and their processes. Dropping it removes everything.
pub(super) struct Testbed {
    // Fields drop in this order: processes, then their namespaces, then the files.
    control_plane: Option<Process>,
    identity: Option<Process>,
    sidecar: Option<Process>,
    control: Arc<Namespace>,
    pub(super) client: Arc<Namespace>,
    pub(super) server: Arc<Namespace>,
    pub(super) outside: Arc<Namespace>,
    _network: VirtualNetwork,
    pub(super) credentials: Credentials,
    proxy: PathBuf,
    dir: TempDir,
    /// The host whose sidecar is tested.
    meshed: &'static str,
    /// `INBOUND_PORTS` of the sidecar: the ports whose policies it requests at its start.
    watched_ports: Vec<u16>,
}

/// Whether a host has redirect rules for IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ipv6Rules {
    Written,
    /// As with `disableIPv6: true`.
    Disabled,
}

/// Whether the test has the rights it needs; prints a message if not.
pub(super) fn can_run() -> bool {
    if Uid::effective().is_root() {
        return true;
    }
    let reason = "network namespaces need root; run this test as root";
    assert!(std::env::var_os("CI").is_none(), "{reason}");
    eprintln!("\n*** SKIPPED: {reason} ***\n");
    false
}

/// Starts the control plane before the sidecar.
pub(super) fn start_control_plane_first(testbed: &mut Testbed) {
    testbed.start_identity();
    testbed.start_control_plane("manifests");
    testbed.start_sidecar();
    testbed.wait_for_policies();
}

/// The sidecar gets a certificate, but no policy.
pub(super) fn start_without_control_plane(testbed: &mut Testbed) {
    testbed.start_identity();
    testbed.start_sidecar();
}

pub(super) fn start_then_kill_control_plane(testbed: &mut Testbed) {
    start_control_plane_first(testbed);
    testbed.kill_control_plane();
}

/// Replaces the control plane by one that does not know the workload.
pub(super) fn replace_with_empty_control_plane(testbed: &mut Testbed) {
    start_control_plane_first(testbed);
    testbed.kill_control_plane();
    testbed.start_control_plane("empty");
    let n_watched = testbed.watched_ports.len() as u64;
    testbed.wait_for_answers("NotFound", n_watched);
}

/// Kills and restarts the control plane until `is_over`; counts the restarts.
pub(super) fn restart_until(testbed: &Mutex<Testbed>, n_restarts: &Mutex<u32>, is_over: impl Fn() -> bool) {
    while !is_over() {
        testbed.lock().kill_control_plane();
        thread::sleep(RESTART_PHASE);
        testbed.lock().start_control_plane("manifests");
        thread::sleep(RESTART_PHASE);
        *n_restarts.lock() += 1;
    }
}

impl Testbed {
    /// Creates the hosts, with these manifests for the control plane. The sidecar of the host `meshed` requests the
    /// policies of the ports in `watched_ports` at its start.
    pub(super) fn build(meshed: &'static str, manifests: &str, watched_ports: &[u16], ipv6: Ipv6Rules) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // The sidecars run as another user and have to read the directory.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let credentials = Credentials::create(dir.path());
        for (name, text) in [("manifests", manifests), ("empty", "")] {
            let manifests = dir.path().join(name);
            fs::create_dir(&manifests).unwrap();
            fs::write(manifests.join("mesh.yaml"), text).unwrap();
        }
        let proxy = programs::install("tulle-proxy", dir.path()).unwrap();

        netns::remove_stale(NAMESPACE_PREFIX).unwrap();
        let mut virtual_network = VirtualNetwork::new(NAMESPACE_PREFIX).unwrap();
        let hosts = [
            ("control", CONTROL),
            ("client", CLIENT),
            ("server", SERVER),
            ("outside", OUTSIDE),
        ];
        let [control, client, server, outside] = hosts.map(|(name, ip)| {
            let host = virtual_network
                .add_host(name, &format!("{ip}/24"), Some(&format!("{}/64", v6(ip))))
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
            _network: virtual_network,
            credentials,
            proxy,
            dir,
            meshed,
            watched_ports: watched_ports.to_vec(),
        }
    }

    pub(super) fn metrics(host: &Namespace) -> String {
        admin_get(host, "/metrics").expect("the sidecar runs")
    }

    /// The end of the sidecar's log.
    pub(super) fn log_tail(&self) -> String {
        self.sidecar.as_ref().map_or_else(String::new, Process::log_tail)
    }

    /// Starts the identity service, separately from the rest of the control plane.
    pub(super) fn start_identity(&mut self) {
        let mut command = self.control_command();
        command.args(["identity", "--admin-addr", "127.0.0.1:9980"]);
        let mut identity = self.start("identity", command);
        identity.wait_for_ports(&[port::IDENTITY]).unwrap();
        self.identity = Some(identity);
    }

    /// Starts the destination and policy services with one of the directories of manifests.
    pub(super) fn start_control_plane(&mut self, manifests: &str) {
        let mut command = self.control_command();
        // The servers of these services get their certificate from an identity service in the same process.
        command.args(["identity", "destination", "policy", "--identity-addr", "127.0.0.1:8079"]);
        command.arg("--manifests").arg(self.dir.path().join(manifests));
        command.args([
            "--cluster-networks",
            CLUSTER_NETWORKS,
            "--default-policy",
            "all-authenticated",
        ]);
        let mut control = self.start("control-plane", command);
        control
            .wait_for_ports(&[port::DESTINATION, port::POLICY, CONTROL_ADMIN])
            .unwrap();
        let errors = hosts::http_get(&self.control, CONTROL_ADMIN, "/manifest-errors").unwrap();
        assert!(errors.ends_with("\r\n\r\n"), "manifests are refused: {errors}");
        self.control_plane = Some(control);
    }

    /// Kills the control plane without a graceful shutdown.
    pub(super) fn kill_control_plane(&mut self) {
        let control = self.control_plane.take().expect("it runs");
        kill(Pid::from_raw(control.id().cast_signed()), Signal::SIGKILL).unwrap();
    }

    /// Waits until the control plane has completed `n` calls with this status.
    fn wait_for_answers(&self, code: &str, n: u64) {
        let status = format!("grpc_code=\"{code}\"");
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let metrics = hosts::http_get(&self.control, CONTROL_ADMIN, "/metrics").unwrap();
            let found = sum(&metrics, "grpc_server_handled_total", &[&status]);
            if found >= n {
                return;
            }
            assert!(Instant::now() < deadline, "{found} calls ended with {code}, not {n}");
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until the sidecar knows the policies of all ports that it requested.
    fn wait_for_policies(&self) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let page = admin_get(self.meshed_host(), "/debug/policies").expect("the sidecar runs");
            let (_, text) = page.split_once("\r\n\r\n").unwrap();
            let shown: Vec<serde_json::Value> = serde_yaml_ng::from_str(text).unwrap();
            let known = shown.iter().filter(|port| port["source"] == "control plane");
            let known: Vec<_> = known.filter_map(|port| port["port"].as_u64()).collect();
            if self.watched_ports.iter().all(|port| known.contains(&u64::from(*port))) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "known are {known:?} of {:?}",
                self.watched_ports
            );
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn meshed_host(&self) -> &Namespace {
        match self.meshed {
            "server" => &self.server,
            _ => &self.client,
        }
    }

    fn start_sidecar(&mut self) {
        let name = self.meshed;
        let host = self.meshed_host();
        // The redirect rules identify the proxy by its user. Entering the namespace needs root, so the user changes after it.
        let user = [format!("--reuid={PROXY_UID}"), format!("--regid={PROXY_UID}")];
        let mut command = command(host, &[&user[0], &user[1], "--clear-groups"], &self.proxy);
        command.env_clear();
        command.envs(self.credentials.sidecar_variables(name, CONTROL, NETWORKS));
        let ports: Vec<_> = self.watched_ports.iter().map(u16::to_string).collect();
        for (variable, value) in [
            (
                "OUTBOUND_LISTEN_ADDRS",
                format!("127.0.0.1:{0},[::1]:{0}", port::OUTBOUND),
            ),
            // As in the chart. A connection judged by this default instead of the port's policy would be permitted.
            ("INBOUND_DEFAULT_POLICY", "all-unauthenticated".into()),
            ("INBOUND_PORTS", ports.join(",")),
            ("INBOUND_DETECT_TIMEOUT", "2s".into()),
            ("OUTBOUND_DETECT_TIMEOUT", "2s".into()),
        ] {
            command.env(format!("LINKERD2_PROXY_{variable}"), value);
        }
        for direction in ["INBOUND", "OUTBOUND"] {
            for timeout in ["HEAD", "IDLE"] {
                command.env(format!("TULLE_PROXY_{direction}_HTTP_{timeout}_TIMEOUT"), "2s");
            }
        }
        let mut sidecar = self.start(&format!("sidecar-{name}"), command);
        let is_ready = |_: &Process| Ok(admin_get(host, "/ready").is_ok());
        sidecar.wait_for("readiness", is_ready).unwrap();
        self.sidecar = Some(sidecar);
    }

    fn control_command(&self) -> Command {
        let mut command = command(&self.control, &[], &built_binary("tulle-control").unwrap());
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

/// The sum of a metric family's series with all these labels.
pub(super) fn sum(metrics: &str, family: &str, labels: &[&str]) -> u64 {
    let of_family = |line: &&str| line.strip_prefix(family).is_some_and(|rest| rest.starts_with('{'));
    let lines = metrics.lines().filter(of_family);
    let lines = lines.filter(|line| labels.iter().all(|label| line.contains(label)));
    let value = |line: &str| line.rsplit_once(' ').and_then(|(_, value)| value.parse::<u64>().ok());
    lines.map(|line| value(line).expect("counters are whole numbers")).sum()
}

fn redirect(host: &Namespace, ipv6: Ipv6Rules) {
    let mut command = host.command(built_binary("tulle-init").unwrap());
    command.args(["-p", &port::INBOUND.to_string(), "-o", &port::OUTBOUND.to_string()]);
    command.args(["-u", &PROXY_UID.to_string()]);
    command.arg(match ipv6 {
        Ipv6Rules::Written => "--ipv6=true",
        Ipv6Rules::Disabled => "--ipv6=false",
    });
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The networks of which the sidecar requests profiles.
const NETWORKS: &str = "10.0.0.0/8,fd00::/8";
/// The networks of the cluster. They contain the hosts' IPv4 addresses, and not their IPv6 addresses.
const CLUSTER_NETWORKS: &str = "10.0.0.0/8,fd00::/16";
const CONTROL_ADMIN: u16 = 9990;
/// The user id of the proxy, whose traffic is not redirected.
const PROXY_UID: u32 = 2102;
const NAMESPACE_PREFIX: &str = "tm-";
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long the control plane is down, and then up, during restarts.
const RESTART_PHASE: Duration = Duration::from_millis(200);
