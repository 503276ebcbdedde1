//! A machine outside the cluster, set up with the files and commands of `docs/how-to/virtual-machines.md`. Only addresses and
//! directories are replaced.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use tulle_bench::run::process::Process;
use tulle_control::trust::CertificateAuthority;
use tulle_core::names::port;
use tulle_core::netns::Namespace;

use crate::{hosts, programs};

/// The identity of the machine in the guide.
pub const IDENTITY: &str = "spiffe://root.linkerd.cluster.local/proxy-harness";
const VM_GUIDE: &str = include_str!("../../docs/how-to/virtual-machines.md");

/// The machine and its files, below a directory of the test.
pub struct ExternalMachine {
    host: Arc<Namespace>,
    addr: Ipv4Addr,
    root: PathBuf,
    files: BTreeMap<String, String>,
}

type Unit = BTreeMap<String, String>;

impl ExternalMachine {
    /// Writes the files of the guide below `root`, and creates the machine's issuer with the command of the guide.
    ///
    /// `control` is the address of the control plane.
    ///
    /// # Errors
    /// Fails if a file cannot be written, or `tulle trust` fails.
    pub fn new(
        host: Arc<Namespace>,
        addr: Ipv4Addr,
        control: Ipv4Addr,
        root: PathBuf,
        anchor: &CertificateAuthority,
    ) -> anyhow::Result<Self> {
        let mut machine = Self {
            host,
            addr,
            root,
            files: files(VM_GUIDE),
        };
        for dir in ["/etc/tulle", "/etc/systemd/system", "/usr/local/bin"] {
            fs::create_dir_all(machine.local_path(dir))?;
        }
        for program in ["tulle", "tulle-init", "tulle-proxy"] {
            programs::install(program, &machine.local_path("/usr/local/bin"))?;
        }
        let replaced = machine
            .files
            .iter()
            .map(|(name, text)| (name.clone(), machine.replace(text, control)));
        machine.files = replaced.collect();
        for (name, text) in machine.files.iter().filter(|(name, _)| name.starts_with('/')) {
            fs::write(machine.local_path(name), text)?;
        }

        let etc = machine.local_path("/etc/tulle");
        anchor.write(&machine.root.join("ca.crt"), &machine.root.join("ca.key"))?;
        let line = guide_command(VM_GUIDE, "tulle trust create-issuer").context("the guide's command for an issuer")?;
        let output = machine
            .command(&format!("{}/{line}", machine.local_path("/usr/local/bin").display()))
            .current_dir(&machine.root)
            .output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::rename(machine.root.join("proxy-harness-issuer"), etc.join("issuer"))?;
        fs::rename(machine.root.join("ca.crt"), etc.join("ca.crt"))?;
        fs::remove_file(machine.root.join("ca.key"))?;
        fs::set_permissions(&machine.root, Permissions::from_mode(0o755))?;
        Ok(machine)
    }

    /// The content of a file of the guide, by its path in the guide.
    pub fn file(&self, name: &str) -> &str {
        &self.files[name]
    }

    /// The local path of a path in the guide.
    pub fn local_path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn replace(&self, text: &str, control: Ipv4Addr) -> String {
        let control = |port: u16| SocketAddr::from((control, port)).to_string();
        let mut text = text.to_owned();
        for (in_guide, local) in [
            ("172.20.0.8", self.addr.to_string()),
            (
                "linkerd-dst-headless.linkerd.svc.cluster.local.:8086",
                control(port::DESTINATION),
            ),
            ("linkerd-policy.linkerd.svc.cluster.local.:8090", control(port::POLICY)),
            ("/etc/tulle", self.local_path("/etc/tulle").display().to_string()),
            ("/run/tulle", self.local_path("/run/tulle").display().to_string()),
            (
                "/usr/local/bin",
                self.local_path("/usr/local/bin").display().to_string(),
            ),
        ] {
            text = text.replace(in_guide, &local);
        }
        text
    }

    /// The settings of a systemd unit.
    pub fn unit(&self, name: &str) -> Unit {
        let text = self.files[&format!("/etc/systemd/system/{name}")].replace("\\\n", "");
        let settings = text.lines().filter_map(|line| line.split_once('='));
        settings
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    }

    /// Starts a service as its unit describes.
    ///
    /// # Errors
    /// Fails if its program does not start.
    pub fn start(&self, name: &str) -> anyhow::Result<Process> {
        let unit = self.unit(name);
        if name.contains("workload-api") {
            return self.serve_workload_api(&unit["ExecStart"]);
        }
        let user: Vec<String> = [("User", "--reuid"), ("Group", "--regid")]
            .into_iter()
            .filter_map(|(key, flag)| Some(format!("{flag}={}", unit.get(key)?)))
            .collect();
        let mut setpriv_options: Vec<&str> = user.iter().map(String::as_str).collect();
        setpriv_options.push("--clear-groups");
        let mut words = unit["ExecStart"].split_whitespace();
        let program = Path::new(words.next().context("a program")?);
        let mut command = hosts::command(&self.host, &setpriv_options, program);
        command.args(words).env_clear();
        if let Some(file) = unit.get("EnvironmentFile") {
            let text = fs::read_to_string(file)?;
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            command.envs(lines.filter_map(|line| line.split_once('=')));
        }
        Process::start(name, command, &self.root)
    }

    /// Starts the Workload API with a command line, and waits for its socket.
    ///
    /// # Errors
    /// Fails if the process does not start.
    pub fn serve_workload_api(&self, line: &str) -> anyhow::Result<Process> {
        let mut words = line.split_whitespace();
        let mut command = hosts::command(&self.host, &[], Path::new(words.next().context("a program")?));
        command.args(words);
        let mut process = Process::start("tulle-workload-api", command, &self.root)?;
        let socket = self.local_path("/run/tulle/workload-api.sock");
        process.wait_for("socket", |_| Ok(socket.exists()))?;
        Ok(process)
    }

    /// Starts a server on the application port of the guide.
    ///
    /// # Errors
    /// Fails if the process does not start.
    pub fn start_application(&self) -> anyhow::Result<Process> {
        let mut command = hosts::command(&self.host, &[], &programs::built_binary("tulle-bench")?);
        command.args(["serve", "--http", &SocketAddr::from((self.addr, 80)).to_string()]);
        let mut application = Process::start("vm-application", command, &self.root)?;
        application.wait_for_ports(&[80])?;
        Ok(application)
    }

    /// A command line on the machine.
    pub fn command(&self, line: &str) -> Command {
        let mut words = line.split_whitespace();
        let mut command = self.host.command(words.next().unwrap_or_default());
        command.args(words);
        command
    }

    /// Runs a command line on the machine.
    ///
    /// # Errors
    /// Fails if the command fails; the error contains its output.
    pub fn run(&self, line: &str) -> anyhow::Result<()> {
        let output = self.command(line).output()?;
        let stderr_text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{line}: {stderr_text}");
        Ok(())
    }
}

/// The files of a guide: code blocks after a line that consists of a path.
fn files(page: &str) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let mut parts = page.split("\n```");
    let mut before = parts.next().unwrap_or_default();
    while let (Some(block), Some(after)) = (parts.next(), parts.next()) {
        let last = before.trim_end().lines().last().unwrap_or_default();
        let name = last.strip_prefix('`').and_then(|rest| rest.strip_suffix("`:"));
        if let (Some(name), Some((_language, text))) = (name, block.split_once('\n')) {
            files.insert(name.to_owned(), format!("{text}\n"));
        }
        before = after;
    }
    files
}

/// The command of a guide that starts with `start`, joined to one line.
fn guide_command(page: &str, start: &str) -> Option<String> {
    let (_, text) = page.split_once(&format!("\n{start}"))?;
    let (text, _) = text.split_once("\n```")?;
    Some(format!("{start}{text}").replace("\\\n", ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_its_files_and_commands() {
        let files = files(VM_GUIDE);
        for name in ["external.yaml", "policy.yaml", "/etc/tulle/proxy.env"] {
            assert!(files.contains_key(name), "{name}");
        }
        let line = guide_command(VM_GUIDE, "tulle trust create-issuer").unwrap();
        assert!(line.ends_with("--dir proxy-harness-issuer"), "{line}");
    }
}
