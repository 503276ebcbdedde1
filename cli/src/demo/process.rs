//! The processes of the demo: shipped binaries, each in the network namespace of its host and under its own user.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{Gid, Pid, Uid, getpid, getppid, setgroups, setresgid, setresuid};
use tokio::process::{Child, ChildStdout};
use tokio::time::timeout;
use tulle_core::netns::Namespace;

/// How to start a process. The same value restarts it after a fault.
#[derive(Clone)]
pub(super) struct ProcessSpec {
    /// Name of the log file, also used in messages.
    pub(super) name: String,
    pub(super) program: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) env: Vec<(String, String)>,
    pub(super) host: Arc<Namespace>,
    pub(super) uid: u32,
}

/// A running process. It is killed when this value is dropped, and by the kernel when this program ends.
pub(super) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Output {
    /// The output is appended to the log.
    Log,
    /// This program reads the output through [`Process::take_output`].
    Piped,
}

impl ProcessSpec {
    /// Starts the process and appends its log to `<logs>/<name>.log`.
    pub(super) fn start(&self, logs: &Path, output: Output) -> anyhow::Result<Process> {
        let log = logs.join(format!("{}.log", self.name));
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("opening {}", log.display()))?;
        let mut command = self.host.command(&self.program);
        command
            .args(&self.args)
            .env_clear()
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(match output {
                Output::Log => Stdio::from(file.try_clone().context("sharing a log file")?),
                Output::Piped => Stdio::piped(),
            })
            .stderr(file)
            // Ctrl-C must reach only this program, which then stops its children in order.
            .process_group(0);
        become_user(&mut command, self.uid);
        let mut command = tokio::process::Command::from(command);
        let child = command
            .spawn()
            .with_context(|| format!("starting {} as user {}", self.program.display(), self.uid))?;
        Ok(Process {
            name: self.name.clone(),
            child,
            log,
        })
    }
}

impl Process {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn take_output(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// The exit status; `None` while the process runs.
    pub(super) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Fails with the end of the log if the process has exited.
    pub(super) fn check_alive(&mut self) -> anyhow::Result<()> {
        match self.exit_status() {
            None => Ok(()),
            Some(status) => bail!("{} ended with {status}: {}", self.name, self.log_tail()),
        }
    }

    /// Kills the process and waits until it has exited.
    pub(super) async fn kill(&mut self) {
        // Fails only if the process has already exited.
        let _ = self.child.kill().await;
    }

    /// Sends SIGTERM.
    pub(super) fn terminate(&self) {
        if let Some(pid) = self.child.id() {
            // An error means that the process has already exited.
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM);
        }
    }

    /// Waits until the process exits, and kills it after `limit`.
    pub(super) async fn wait(&mut self, limit: Duration) {
        if timeout(limit, self.child.wait()).await.is_err() {
            self.kill().await;
        }
    }

    /// The end of the log, for error messages.
    pub(super) fn log_tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&log[log.len().saturating_sub(LOG_TAIL_BYTES)..])
            .trim()
            .to_owned();
        if text.is_empty() {
            "the log is empty".to_owned()
        } else {
            text
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(pid) = self.child.id() {
            // Waits for the process, so that none is left when the demo ends.
            let _ = self.child.start_kill();
            let _ = waitpid(Pid::from_raw(pid.cast_signed()), None);
        }
    }
}

/// Drops root before exec, and makes the kernel kill the program when this process ends.
///
/// The closure runs after the pre-exec closure of [`Namespace::command`], which enters the namespace as root. The kernel clears the
/// parent death signal when user or group ids change, so it is set last. If the parent has ended before, the signal would never
/// arrive; then the closure returns an error, and the program does not start.
#[allow(unsafe_code)]
fn become_user(command: &mut Command, uid: u32) {
    let parent = getpid();
    let change_user = move || {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(uid));
        setgroups(&[])?;
        setresgid(gid, gid, gid)?;
        setresuid(uid, uid, uid)?;
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        if getppid() != parent {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe functions are allowed. It only makes system
    // calls, allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(change_user);
    }
}

/// Number of bytes of a log that an error message quotes.
const LOG_TAIL_BYTES: usize = 1500;

/// The user that sidecars run as. Its traffic is not redirected.
pub(super) const PROXY_UID: u32 = 2102;
/// The user that applications and load generators run as.
pub(super) const APP_UID: u32 = 2103;
/// The user that the control plane runs as.
pub(super) const CONTROL_UID: u32 = 2104;
