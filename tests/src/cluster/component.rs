//! One process of a cluster, started with its own log and checked while a caller waits for it.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{getpid, getppid};
use tokio::time::{Instant, sleep};

/// A running process, killed when dropped.
pub(super) struct Component {
    name: String,
    child: Child,
    log: PathBuf,
}

/// Whether a process outlives its parent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ProcessLifetime {
    /// The kernel kills it when its parent dies for any reason.
    KilledWithParent,
    /// It keeps running until it is stopped.
    Detached,
}

impl Component {
    /// Starts `command` with its output appended to `<dir>/log/<name>.log`.
    pub(super) fn start(
        name: &str,
        mut command: Command,
        dir: &Path,
        lifetime: ProcessLifetime,
    ) -> anyhow::Result<Self> {
        let log = log_path(dir, name);
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("opening {}", log.display()))?;
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("sharing a log file")?)
            .stderr(file)
            // Ctrl-C goes to the parent only, which then stops all processes in order.
            .process_group(0);
        if lifetime == ProcessLifetime::KilledWithParent {
            kill_with_parent(&mut command);
        }
        let child = command
            .spawn()
            .with_context(|| format!("starting {:?}", command.get_program()))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log,
        })
    }

    /// Checks that the process has not exited. The error contains the end of the log.
    pub(super) fn check_alive(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait().context("waiting for a child")? {
            None => Ok(()),
            Some(status) => bail!("{} ended with {status}; {}", self.name, log_tail(&self.log)),
        }
    }

    /// Waits until a condition holds.
    ///
    /// # Errors
    /// Fails if the process exits, or [`START_TIMEOUT`] passes first; the error contains the end of the log and the
    /// condition's last result.
    pub(super) async fn wait_until(
        &mut self,
        what: &str,
        mut condition: impl AsyncFnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            self.check_alive()?;
            let Err(not_yet) = condition().await else { return Ok(()) };
            if Instant::now() > deadline {
                bail!(
                    "{}: timed out after {START_TIMEOUT:?}, waiting for: {what}: {not_yet:#}; {}",
                    self.name,
                    log_tail(&self.log)
                );
            }
            sleep(POLL_INTERVAL).await;
        }
    }
}

impl Drop for Component {
    fn drop(&mut self) {
        // Fails only if the process has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(super) fn log_path(dir: &Path, name: &str) -> PathBuf {
    dir.join("log").join(format!("{name}.log"))
}

/// The last lines of a log, for error messages.
pub(super) fn log_tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(LOG_TAIL_LINES)..];
    if last.is_empty() {
        return format!("{} is empty", log.display());
    }
    format!("the end of {}:\n{}", log.display(), last.join("\n"))
}

/// Makes the kernel kill the process of the command when this process dies.
#[allow(unsafe_code)]
fn kill_with_parent(command: &mut Command) {
    let parent = getpid();
    let step = move || {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // If the parent died before the signal was set, the kernel sends no signal.
        if getppid() != parent {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    };
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe functions are allowed. It only makes
    // system calls, allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(step);
    }
}

/// The slowest component starts in 3 s. Machines that also run other tests may need much longer.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
const LOG_TAIL_LINES: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> (tempfile::TempDir, Component) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("log")).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let component = Component::start("shell", command, dir.path(), ProcessLifetime::KilledWithParent).unwrap();
        (dir, component)
    }

    #[tokio::test]
    async fn a_component_that_exits_during_a_wait_is_reported_with_the_end_of_its_log() {
        let (_dir, mut component) = shell("echo no such flag >&2; exit 3");
        let never = async || bail!("not ready");
        let error = component.wait_until("readiness", never).await.unwrap_err().to_string();
        assert!(
            error.contains("shell ended with exit status: 3") && error.contains("no such flag"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn a_dropped_component_is_killed() {
        let (_dir, component) = shell("exec sleep 60");
        let proc = PathBuf::from(format!("/proc/{}", component.child.id()));
        assert!(proc.exists());
        drop(component);
        assert!(!proc.exists());
    }
}
