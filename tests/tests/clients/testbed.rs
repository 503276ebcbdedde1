//! Four hosts: the control plane, a client and a server with sidecars, and one outside the mesh.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use nix::unistd::Uid;
use tempfile::TempDir;
use tokio::time::Instant;
use tulle_bench::run::process::Process;
use tulle_core::names::port;
use tulle_core::netns::{self, Namespace, VirtualNetwork};
use tulle_tests::credentials::Credentials;
pub(crate) use tulle_tests::credentials::identity;
use tulle_tests::hosts::{admin_get, command};
use tulle_tests::programs::{self, built_binary};

/// The mesh and its hosts. Dropping it removes everything.
pub(crate) struct Testbed {
    // Fields drop in this order: processes, then their namespaces, then the files.
    processes: Vec<Process>,
    pub(crate) client: Arc<Namespace>,
    pub(crate) server: Arc<Namespace>,
    pub(crate) outside: Arc<Namespace>,
    _network: VirtualNetwork,
    pub(crate) credentials: Credentials,
    dir: TempDir,
}

/// Settings that differ between tests.
#[derive(Clone, Copy)]
pub(crate) struct Setup<'a> {
    /// Flags of the control plane.
    pub(crate) control: &'a [&'a str],
    /// Flags of `tulle-init` on the server.
    pub(crate) init_flags: &'a [&'a str],
    /// Variables of the server's sidecar, with their prefix.
    pub(crate) variables: &'a [(&'a str, &'a str)],
    /// Arguments of `setpriv` for the server's sidecar.
    pub(crate) setpriv_args: &'a [&'a str],
}

impl Default for Setup<'_> {
    fn default() -> Self {
        Self {
            control: &["-enable-ipv6=false"],
            init_flags: &[],
            variables: &[],
            setpriv_args: &[],
        }
    }
}

/// Builds the testbed for a test that needs these programs; `None` if it cannot run.
pub(crate) fn start_testbed(needed: &[&str]) -> Option<Testbed> {
    can_run(needed).then(|| Testbed::build(Setup::default()))
}

/// Whether the test has the rights and programs it needs; prints a message if not.
///
/// In CI missing rights or programs are an error.
pub(crate) fn can_run(needed: &[&str]) -> bool {
    let missing: Vec<_> = needed.iter().filter(|name| programs::find(name).is_err()).collect();
    let reason = match (Uid::effective().is_root(), &missing[..]) {
        (true, []) => return true,
        (true, missing) => format!("{missing:?} are not installed; ./run setup installs them"),
        (false, _) => "network namespaces need root; run this test as root".to_owned(),
    };
    assert!(std::env::var_os("CI").is_none(), "{reason}");
    eprintln!("\n*** SKIPPED: {reason} ***\n");
    false
}

impl Testbed {
    pub(crate) fn build(setup: Setup<'_>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // The sidecars run as another user and have to read the directory.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let credentials = Credentials::create(dir.path());
        let manifests = dir.path().join("manifests");
        fs::create_dir(&manifests).unwrap();
        fs::write(manifests.join("mesh.yaml"), include_str!("mesh.yaml")).unwrap();
        let proxy = programs::install("tulle-proxy", dir.path()).unwrap();

        netns::remove_stale(NAMESPACE_PREFIX).unwrap();
        let mut virtual_network = VirtualNetwork::new(NAMESPACE_PREFIX).unwrap();
        let [control, client, server, outside] = [
            ("control", CONTROL),
            ("client", CLIENT),
            ("server", SERVER),
            ("outside", OUTSIDE),
        ]
        .map(|(name, ip)| {
            let v6 = format!("{}/64", v6(ip));
            let host = virtual_network.add_host(name, &format!("{ip}/24"), Some(&v6)).unwrap();
            // The addresses of the service belong to no host. A packet needs a route to reach the redirect rules.
            host.ip("route add default dev eth0\nroute add ::/0 dev eth0\n")
                .unwrap();
            host
        });
        let mut testbed = Self {
            processes: Vec::new(),
            client,
            server,
            outside,
            _network: virtual_network,
            credentials,
            dir,
        };
        testbed.add_process(testbed.start_control_plane(&control, &manifests, setup.control));
        testbed.add_process(testbed.start_application());
        for (name, host, setup) in [
            ("server", testbed.server.clone(), setup),
            ("client", testbed.client.clone(), Setup::default()),
        ] {
            redirect(&host, setup.init_flags);
            let sidecar = testbed.start_sidecar(name, &host, &proxy, setup);
            testbed.add_process(wait_until_ready(sidecar, &host));
        }
        testbed
    }

    /// Starts a process with its output in the testbed's directory.
    pub(crate) fn start(&self, name: &str, command: Command) -> Process {
        Process::start(name, command, self.dir.path()).unwrap()
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Writes a manifest of the mesh, or replaces it atomically.
    pub(crate) fn manifest(&self, name: &str, yaml: &str) {
        let partial = self.dir.path().join("partial");
        fs::write(&partial, yaml).unwrap();
        fs::rename(partial, self.dir.path().join("manifests").join(name)).unwrap();
    }

    pub(crate) fn metrics(&self, host: &Namespace) -> String {
        admin_get(host, "/metrics").expect("the sidecar runs")
    }

    /// A metric family of the server's sidecar: the sum of the series with all these labels, by the value of the label `by`.
    pub(crate) fn series(&self, family: &str, labels: &[&str], by: &str) -> BTreeMap<String, u64> {
        let mut found = BTreeMap::new();
        for line in self.metrics(&self.server).lines() {
            let Some((series, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let Some(text) = series.strip_prefix(family).and_then(|rest| rest.strip_prefix('{')) else {
                continue;
            };
            if !labels.iter().all(|label| text.contains(label)) {
                continue;
            }
            let mut values = text.trim_end_matches("\"}").split("\",");
            let name = values.find_map(|label| label.strip_prefix(by)?.strip_prefix("=\""));
            let value: u64 = value.parse().expect("counters are whole numbers");
            *found.entry(name.unwrap_or_default().to_owned()).or_default() += value;
        }
        found
    }

    /// Waits until [`Self::series`] has these values. A client may see its response before it is counted.
    pub(crate) fn wait_for_series(&self, family: &str, labels: &[&str], by: &str, expected: &[(&str, u64)]) {
        let expected: BTreeMap<_, _> = expected.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect();
        let deadline = Instant::now() + METRICS_TIMEOUT;
        loop {
            let found = self.series(family, labels, by);
            if found == expected {
                eprintln!("{family}: {found:?}");
                return;
            }
            assert!(Instant::now() < deadline, "{family} counts {found:?}, not {expected:?}");
            std::thread::sleep(METRICS_POLL_INTERVAL);
        }
    }

    /// Waits until a sidecar's output has a line of JSON, and returns all lines of JSON.
    pub(crate) fn json_lines(&self, name: &str) -> Vec<serde_json::Value> {
        self.lines(name, |line| serde_json::from_str(line).ok())
    }

    /// Waits until a sidecar's output has a line that `parse` accepts, and returns the results for all such lines.
    pub(crate) fn lines<T>(&self, name: &str, parse: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let deadline = Instant::now() + METRICS_TIMEOUT;
        loop {
            let log = fs::read_to_string(self.dir().join(format!("sidecar-{name}.log"))).unwrap();
            let lines: Vec<_> = log.lines().filter_map(&parse).collect();
            if !lines.is_empty() {
                return lines;
            }
            assert!(Instant::now() < deadline, "no such line in {log}");
            std::thread::sleep(METRICS_POLL_INTERVAL);
        }
    }

    pub(crate) fn process(&self, name: &str) -> &Process {
        let named = self.processes.iter().find(|process| process.name() == name);
        named.expect("the named process was started")
    }

    /// Waits until a metric family of the server's sidecar has this value, in series with all these labels. Counters only grow, so
    /// a higher value is an error.
    pub(crate) fn wait_for_count(&self, family: &str, labels: &[&str], n: u64) {
        let deadline = Instant::now() + METRICS_TIMEOUT;
        loop {
            let found = self.series(family, labels, "direction").values().sum::<u64>();
            if found == n {
                return;
            }
            let is_in_time = found < n && Instant::now() < deadline;
            assert!(is_in_time, "{family} counts {found}, not {n}");
            std::thread::sleep(METRICS_POLL_INTERVAL);
        }
    }

    fn add_process(&mut self, process: Process) {
        self.processes.push(process);
    }

    fn start_control_plane(&self, host: &Namespace, manifests: &Path, flags: &[&str]) -> Process {
        let mut command = command(host, &[], &built_binary("tulle-control").unwrap());
        command.arg("all-in-one");
        for (flag, path) in [
            ("--manifests", manifests),
            ("--trust-anchors", &self.credentials.anchors()),
            ("--issuer", &self.credentials.issuer()),
            ("--token-keys", &self.credentials.token_keys()),
        ] {
            command.arg(flag).arg(path);
        }
        command.args(["--cluster-networks", NETWORKS, "--default-policy", POLICY]);
        command.args(flags);
        let mut control = self.start("tulle-control", command);
        control
            .wait_for_ports(&[port::IDENTITY, port::DESTINATION, port::POLICY])
            .unwrap();
        control
    }

    /// The HTTP echo servers, on ports with three policies.
    fn start_application(&self) -> Process {
        let mut command = command(&self.server, &[], &built_binary("tulle-bench").unwrap());
        command.arg("serve");
        let ports = [HTTP, RESTRICTED, H2C];
        for port in ports {
            command.args(["--http", &SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)).to_string()]);
        }
        let mut application = self.start("application", command);
        application.wait_for_ports(&ports).unwrap();
        application
    }

    /// Starts a sidecar without waiting until it is ready.
    pub(crate) fn start_sidecar(&self, name: &str, host: &Namespace, program: &Path, setup: Setup<'_>) -> Process {
        // The redirect rules identify the proxy by its user. Entering the namespace needs root, so the user changes after it.
        let user = [format!("--reuid={PROXY_UID}"), format!("--regid={PROXY_UID}")];
        let setpriv_args = [&[&user[0], &user[1], "--clear-groups"], setup.setpriv_args].concat();
        let mut command = command(host, &setpriv_args, program);
        command.env_clear();
        command.envs(self.credentials.sidecar_variables(name, CONTROL, NETWORKS));
        for (variable, value) in [
            ("ACCESS_LOG", "json".to_owned()),
            (
                "OUTBOUND_LISTEN_ADDRS",
                format!("127.0.0.1:{0},[::1]:{0}", port::OUTBOUND),
            ),
            ("INBOUND_DEFAULT_POLICY", POLICY.into()),
            // The sidecar knows the policies of these ports before it is ready.
            (
                "INBOUND_PORTS",
                format!("{HTTP},{RESTRICTED},{SERVER_SPEAKS_FIRST},{GRPC},{TLS},{OPEN_TLS}"),
            ),
        ] {
            command.env(format!("LINKERD2_PROXY_{variable}"), value);
        }
        command.envs(setup.variables.iter().copied());
        self.start(&format!("sidecar-{name}"), command)
    }
}

fn wait_until_ready(mut sidecar: Process, host: &Namespace) -> Process {
    let is_ready = |_: &Process| Ok(admin_get(host, "/ready").is_ok());
    sidecar.wait_for("readiness", is_ready).unwrap();
    sidecar
}

/// The address that clients in the mesh dial for a port of the server.
pub(crate) fn service(port: u16) -> SocketAddr {
    (SERVICE, port).into()
}

/// The IPv6 address of a host or of the service: fd79::20 for 10.79.0.20. The decimal digits are reused as hexadecimal digits.
pub(crate) fn v6(ip: Ipv4Addr) -> Ipv6Addr {
    let [_, network, _, host] = ip
        .octets()
        .map(|octet| u16::from_str_radix(&octet.to_string(), 16).unwrap());
    Ipv6Addr::new(0xfd00 + network, 0, 0, 0, 0, 0, 0, host)
}

/// Both addresses of a host or of the service.
pub(crate) fn both(ip: Ipv4Addr) -> [IpAddr; 2] {
    [ip.into(), v6(ip).into()]
}

pub(crate) fn redirect(host: &Namespace, flags: &[&str]) {
    let mut command = host.command(built_binary("tulle-init").unwrap());
    let skipped = format!("{},{}", port::TAP, port::ADMIN);
    command.args(["-p", &port::INBOUND.to_string(), "-o", &port::OUTBOUND.to_string()]);
    command.args(["-u", &PROXY_UID.to_string(), "--inbound-ports-to-ignore", &skipped]);
    command.args(flags);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 20);
pub(crate) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 40);
pub(crate) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 10);
pub(crate) const CONTROL: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 30);
/// The cluster IP of the service, whose only endpoint is the server.
pub(crate) const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);

/// HTTP for every meshed client.
pub(crate) const HTTP: u16 = 8080;
/// HTTP for the client only.
pub(crate) const RESTRICTED: u16 = 8081;
/// HTTP/2 only, for all clients.
pub(crate) const H2C: u16 = 8082;
/// A server that speaks first.
pub(crate) const SERVER_SPEAKS_FIRST: u16 = 5000;
pub(crate) const GRPC: u16 = 10000;
/// TLS of the application itself, for every meshed client.
pub(crate) const TLS: u16 = 8443;
/// TLS of the application itself, for all clients.
pub(crate) const OPEN_TLS: u16 = 8444;

const NETWORKS: &str = "10.0.0.0/8,fd00::/8";
const POLICY: &str = "all-authenticated";
/// The user id of the proxy, whose traffic is not redirected.
const PROXY_UID: u32 = 2102;
const NAMESPACE_PREFIX: &str = "tr-";
const METRICS_TIMEOUT: Duration = Duration::from_secs(5);
const METRICS_POLL_INTERVAL: Duration = Duration::from_millis(10);
