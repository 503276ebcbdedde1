//! One process of a cluster: started with a log of its own, watched while somebody waits for it.

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

/// A running process; killed when dropped.
pub(super) struct Component {
    name: String,
    child: Child,
    log: PathBuf,
}

/// Whether a process outlives the one that started it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Life {
    /// The kernel kills it when its starter dies, however that happens.
    WithStarter,
    /// It stays until somebody ends it.
    OnItsOwn,
}

impl Component {
    /// Starts `command` with its output appended to `<dir>/log/<name>.log`.
    pub(super) fn start(name: &str, mut command: Command, dir: &Path, life: Life) -> anyhow::Result<Self> {
        let log = log_of(dir, name);
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("opening {}", log.display()))?;
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone().context("sharing a log file")?)
            .stderr(file)
            // Ctrl-C is for whoever started it, who then ends all in order.
            .process_group(0);
        if life == Life::WithStarter {
            die_with_starter(&mut command);
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

    /// Fails with the end of the log when the process has ended.
    pub(super) fn check_alive(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait().context("waiting for a child")? {
            None => Ok(()),
            Some(status) => bail!("{} ended with {status}; {}", self.name, last_words(&self.log)),
        }
    }

    /// Waits until a condition of this process holds.
    ///
    /// # Errors
    /// The end of its log, when the process ends or [`START_LIMIT`] is over before; the condition's last answer too.
    pub(super) async fn until(
        &mut self,
        what: &str,
        mut condition: impl AsyncFnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            self.check_alive()?;
            let Err(not_yet) = condition().await else { return Ok(()) };
            if Instant::now() > deadline {
                bail!(
                    "{}: {what}: not within {START_LIMIT:?}: {not_yet:#}; {}",
                    self.name,
                    last_words(&self.log)
                );
            }
            sleep(PAUSE).await;
        }
    }
}

impl Drop for Component {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where the output of a component goes.
pub(super) fn log_of(dir: &Path, name: &str) -> PathBuf {
    dir.join("log").join(format!("{name}.log"))
}

/// The last lines of a log, for messages.
pub(super) fn last_words(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
    if last.is_empty() {
        return format!("{} is empty", log.display());
    }
    format!("the end of {}:\n{}", log.display(), last.join("\n"))
}

/// Ties the life of a command's process to ours.
#[allow(unsafe_code)]
fn die_with_starter(command: &mut Command) {
    let parent = getpid();
    let step = move || {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // Should the starter have died by now, nobody would be left to signal.
        if getppid() != parent {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    };
    // SAFETY: the step runs between fork and exec, where only async-signal-safe functions may: it makes system calls
    // alone, allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(step);
    }
}

/// Half a minute is ten times what the slowest component takes; a machine full of other tests needs the rest.
pub(super) const START_LIMIT: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(50);
const LAST_LINES: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> (tempfile::TempDir, Component) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("log")).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let component = Component::start("shell", command, dir.path(), Life::WithStarter).unwrap();
        (dir, component)
    }

    #[tokio::test]
    async fn a_component_that_ends_while_it_is_waited_for_is_reported_with_the_end_of_its_log() {
        let (_dir, mut component) = shell("echo no such flag >&2; exit 3");
        let never = async || bail!("not ready");
        let error = component.until("readiness", never).await.unwrap_err().to_string();
        assert!(
            error.contains("shell ended with exit status: 3") && error.contains("no such flag"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn a_dropped_component_is_gone() {
        let (_dir, component) = shell("exec sleep 60");
        let proc = PathBuf::from(format!("/proc/{}", component.child.id()));
        assert!(proc.exists());
        drop(component);
        assert!(!proc.exists());
    }
}
