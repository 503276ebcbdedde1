//! A machine outside of the cluster, set up with the files and commands of `docs/vm.md`; only addresses and directories
//! are replaced.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tokio::time::Instant;
use tulle_bench::run::process::Process;
use tulle_control::trust;
use tulle_core::names::port;
use tulle_core::netns::Namespace;

use crate::scene::{self, CONTROL, GUARDED, HTTP, OUTSIDE, SERVER, Scene, command, identity, scene};

const PAGE: &str = include_str!("../../../docs/vm.md");
const VM: &str = "spiffe://root.linkerd.cluster.local/proxy-harness";
/// The cluster IP of the machine's service.
const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);

#[test]
fn a_machine_set_up_as_the_page_says_is_called_under_mutual_tls_and_calls_into_the_mesh() {
    let Some(scene) = scene(&["setpriv"]) else { return };
    let machine = Machine::new(&scene);
    let _application = machine.application();
    let _workload_api = machine.start("tulle-workload-api.service");
    let init = machine.unit("tulle-init.service");
    machine.run(&init["ExecStart"]);
    let mut proxy = machine.start("tulle-proxy.service");
    let ready = |_: &Process| Ok(scene::admin(&scene.outside, "/ready").is_ok());
    proxy.wait_for("certificate, by its /ready", ready).unwrap();
    let check = machine
        .line(&format!("{} --check", init["ExecStart"]))
        .output()
        .unwrap();
    assert_eq!(check.status.code(), Some(0), "the rules are in force");

    // The mesh calls the machine: its port is for members only, so an answer is proof of mutual TLS.
    let answer = ask(&scene.client, (SERVICE, 80).into());
    let client = identity("client");
    assert!(answer.contains("200 OK"), "{answer}");
    assert!(answer.contains(&format!(r#""l5d-client-id":["{client}"]"#)), "{answer}");
    let metrics = scene.metrics(&scene.client);
    assert!(
        has(
            &metrics,
            "request_total",
            &["direction=\"outbound\"", &format!("server_id=\"{VM}\"")]
        ),
        "{metrics}"
    );
    let metrics = scene.metrics(&scene.outside);
    assert!(
        has(
            &metrics,
            "inbound_http_authz_allow_total",
            &[&format!("client_id=\"{client}\"")]
        ),
        "{metrics}"
    );

    // The machine calls into the mesh, as somebody whom policies know.
    let answer = ask(&scene.outside, scene::service(HTTP));
    assert!(answer.contains("200 OK"), "{answer}");
    assert!(answer.contains(&format!(r#""l5d-client-id":["{VM}"]"#)), "{answer}");
    let answer = ask(&scene.outside, scene::service(GUARDED));
    assert!(answer.contains("403 Forbidden"), "{answer}");
    scene.counts(
        "tulle_inbound_denied_total",
        &["target_port=\"8081\""],
        "reason",
        &[("identity", 1)],
    );
    scene.manifest("vm-policy.yaml", &machine.files["policy.yaml"]);
    scene.manifest("vm-may-use-guarded.yaml", PERMISSION);
    until("the policy permits the machine", || {
        ask(&scene.outside, scene::service(GUARDED)).contains("200 OK")
    });
    let allowed = scene.series("inbound_http_authz_allow_total", &["target_port=\"8081\""], "client_id");
    assert_eq!(allowed.keys().collect::<Vec<_>>(), [VM]);

    // A new issuer is taken over while traffic goes on.
    let before = renewals(&scene);
    let issuer = trust::create_issuer("second", trust::ISSUER_LIFETIME, &scene.credentials.anchor).unwrap();
    for (name, text) in [("key.pem", &issuer.key), ("crt.pem", &issuer.certificate)] {
        fs::write(machine.at("/etc/tulle/issuer").join(name), text).unwrap();
    }
    until("the certificate is renewed", || {
        let answer = ask(&scene.client, (SERVICE, 80).into());
        assert!(answer.contains("200 OK"), "{answer}");
        renewals(&scene) > before
    });
    assert!(ask(&scene.outside, scene::service(HTTP)).contains("200 OK"));

    drop(proxy);
    machine.run(&init["ExecStop"]);
    let check = machine
        .line(&format!("{} --check", init["ExecStart"]))
        .output()
        .unwrap();
    assert_eq!(check.status.code(), Some(4), "the rules are gone");
}

#[test]
fn a_process_of_another_user_gets_no_identity() {
    let Some(scene) = scene(&["setpriv"]) else { return };
    let machine = Machine::new(&scene);
    let unit = machine.unit("tulle-workload-api.service");
    let other = unit["ExecStart"].replace("--uid 2102", "--uid 2103");
    let _workload_api = machine.serve_workload_api(&other);
    let proxy = machine.start("tulle-proxy.service");
    until("the reason is told", || {
        let said = proxy.last_words();
        said.contains("no identity for user 2102") && said.contains("no certificate from the Workload API")
    });
    assert!(scene::admin(&scene.outside, "/ready").is_err());
}

/// The machine and its files, below a directory of the scene.
struct Machine<'a> {
    scene: &'a Scene,
    root: PathBuf,
    files: BTreeMap<String, String>,
}

type Unit = BTreeMap<String, String>;

impl<'a> Machine<'a> {
    /// Writes the page's files, applies its manifests, and makes its issuer with its command.
    fn new(scene: &'a Scene) -> Self {
        let root = scene.dir().join("machine");
        let files = files(PAGE);
        let mut machine = Self { scene, root, files };
        for dir in ["/etc/tulle", "/etc/systemd/system", "/usr/local/bin"] {
            fs::create_dir_all(machine.at(dir)).unwrap();
        }
        for program in ["tulle", "tulle-init", "tulle-proxy"] {
            scene::install(program, &machine.at("/usr/local/bin"));
        }
        let replaced = machine
            .files
            .iter()
            .map(|(name, text)| (name.clone(), machine.replace(text)));
        machine.files = replaced.collect();
        for (name, text) in machine.files.iter().filter(|(name, _)| name.starts_with('/')) {
            fs::write(machine.at(name), text).unwrap();
        }
        // In a mesh from a directory an address has to be given.
        let clustered = format!("spec:\n  clusterIP: {SERVICE}\n  selector:");
        let manifest = machine.files["external.yaml"].replace("spec:\n  selector:", &clustered);
        assert!(manifest.contains("clusterIP"));
        scene.manifest("external.yaml", &manifest);

        let (anchor, etc) = (&scene.credentials.anchor, machine.at("/etc/tulle"));
        anchor
            .write(&machine.root.join("ca.crt"), &machine.root.join("ca.key"))
            .unwrap();
        let line = command_of(PAGE, "tulle trust create-issuer");
        let made = machine
            .line(&format!("{}/{line}", machine.at("/usr/local/bin").display()))
            .current_dir(&machine.root)
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        fs::rename(machine.root.join("proxy-harness-issuer"), etc.join("issuer")).unwrap();
        fs::rename(machine.root.join("ca.crt"), etc.join("ca.crt")).unwrap();
        fs::remove_file(machine.root.join("ca.key")).unwrap();
        fs::set_permissions(&machine.root, Permissions::from_mode(0o755)).unwrap();
        machine
    }

    /// A path of the page, here.
    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn replace(&self, text: &str) -> String {
        let control = |port: u16| SocketAddr::from((CONTROL, port)).to_string();
        let mut text = text.to_owned();
        for (theirs, ours) in [
            ("172.20.0.8", OUTSIDE.to_string()),
            (
                "linkerd-dst-headless.linkerd.svc.cluster.local.:8086",
                control(port::DESTINATION),
            ),
            ("linkerd-policy.linkerd.svc.cluster.local.:8090", control(port::POLICY)),
            ("/etc/tulle", self.at("/etc/tulle").display().to_string()),
            ("/run/tulle", self.at("/run/tulle").display().to_string()),
            ("/usr/local/bin", self.at("/usr/local/bin").display().to_string()),
        ] {
            text = text.replace(theirs, &ours);
        }
        text
    }

    /// The settings of a unit.
    fn unit(&self, name: &str) -> Unit {
        let text = self.files[&format!("/etc/systemd/system/{name}")].replace("\\\n", "");
        let settings = text.lines().filter_map(|line| line.split_once('='));
        settings
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    }

    /// Starts a service as its unit says.
    fn start(&self, name: &str) -> Process {
        let unit = self.unit(name);
        if name.contains("workload-api") {
            return self.serve_workload_api(&unit["ExecStart"]);
        }
        let user: Vec<String> = [("User", "--reuid"), ("Group", "--regid")]
            .into_iter()
            .filter_map(|(key, flag)| Some(format!("{flag}={}", unit.get(key)?)))
            .collect();
        let mut settings: Vec<&str> = user.iter().map(String::as_str).collect();
        settings.push("--clear-groups");
        let mut words = unit["ExecStart"].split_whitespace();
        let mut command = command(&self.scene.outside, &settings, Path::new(words.next().unwrap()));
        command.args(words).env_clear();
        if let Some(file) = unit.get("EnvironmentFile") {
            let text = fs::read_to_string(file).unwrap();
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            command.envs(lines.filter_map(|line| line.split_once('=')));
        }
        self.scene.start(name, command)
    }

    fn serve_workload_api(&self, line: &str) -> Process {
        let mut words = line.split_whitespace();
        let mut command = command(&self.scene.outside, &[], Path::new(words.next().unwrap()));
        command.args(words);
        let mut process = self.scene.start("tulle-workload-api", command);
        let socket = self.at("/run/tulle/workload-api.sock");
        process.wait_for("socket", |_| Ok(socket.exists())).unwrap();
        process
    }

    /// The server whose port the page speaks of.
    fn application(&self) -> Process {
        let mut command = command(&self.scene.outside, &[], &scene::binary("tulle-bench"));
        command.args(["serve", "--http", &SocketAddr::from((OUTSIDE, 80)).to_string()]);
        let mut application = self.scene.start("vm-application", command);
        application.listening(&[80]).unwrap();
        application
    }

    /// A command line, on the machine.
    fn line(&self, line: &str) -> Command {
        let mut words = line.split_whitespace();
        let mut command = self.scene.outside.command(words.next().unwrap());
        command.args(words);
        command
    }

    fn run(&self, line: &str) {
        let output = self.line(line).output().unwrap();
        assert!(
            output.status.success(),
            "{line}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// The files of a page: blocks that stand behind a line with nothing but a name.
fn files(page: &str) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let mut parts = page.split("\n```");
    let mut before = parts.next().unwrap_or_default();
    while let (Some(block), Some(after)) = (parts.next(), parts.next()) {
        let last = before.trim_end().lines().last().unwrap_or_default();
        if let Some(name) = last.strip_prefix('`').and_then(|rest| rest.strip_suffix("`:")) {
            let (_language, text) = block.split_once('\n').unwrap();
            files.insert(name.to_owned(), format!("{text}\n"));
        }
        before = after;
    }
    files
}

/// The command of a page that starts so, on one line.
fn command_of(page: &str, start: &str) -> String {
    let from = page.find(&format!("\n{start}")).unwrap();
    let text = &page[from..][..page[from..].find("\n```").unwrap()];
    text.replace("\\\n", "").trim().to_owned()
}

/// One request from a host; the whole answer.
fn ask(host: &Namespace, to: SocketAddr) -> String {
    let asking = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(to)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.write_all(b"GET /headers HTTP/1.1\r\nhost: mesh\r\nconnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    host.run(asking).unwrap().unwrap_or_else(|err| err.to_string())
}

/// Whether a family has a series with all these labels.
fn has(metrics: &str, family: &str, labels: &[&str]) -> bool {
    let of_family = |line: &&str| line.strip_prefix(family).is_some_and(|rest| rest.starts_with('{'));
    metrics
        .lines()
        .filter(of_family)
        .any(|line| labels.iter().all(|label| line.contains(label)))
}

fn renewals(scene: &Scene) -> u64 {
    let metrics = scene.metrics(&scene.outside);
    let prefix = "control_identity_cert_refreshes_total{result=\"ok\"} ";
    let value = metrics.lines().find_map(|line| line.strip_prefix(prefix)).unwrap();
    value.parse().unwrap()
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "not true in time: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_page_speaks_of_the_addresses_of_this_scene_only_after_replacing() {
    let files = files(PAGE);
    for name in ["external.yaml", "policy.yaml", "/etc/tulle/proxy.env"] {
        assert!(files.contains_key(name), "{name}");
    }
    assert!(!PAGE.contains(&SERVER.to_string()));
    assert!(command_of(PAGE, "tulle trust create-issuer").ends_with("--dir proxy-harness-issuer"));
}

const PERMISSION: &str = "\
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: vm-may-use-guarded, namespace: shop}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: guarded}
  requiredAuthenticationRefs:
  - {group: policy.linkerd.io, kind: MeshTLSAuthentication, name: proxy-harness, namespace: simple-app}
";
const LIMIT: Duration = Duration::from_secs(20);
