//! The demo's processes: shipped binaries, each in the namespace of its host and as a user of its own.

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

/// How to start a process; the same value starts it again after a fault.
#[derive(Clone)]
pub(super) struct Spec {
    /// Of the log file, and in messages.
    pub(super) name: String,
    pub(super) program: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) env: Vec<(String, String)>,
    pub(super) host: Arc<Namespace>,
    pub(super) uid: u32,
}

/// A running process; killed when dropped, and by the kernel when this program dies.
pub(super) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

/// Where the standard output of a process goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Output {
    Log,
    /// To this program, which takes it by [`Process::take_output`].
    Piped,
}

impl Spec {
    /// Starts the process with its log appended to `<logs>/<name>.log`.
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
            // Ctrl-C is for this program, which then ends its children in order.
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

    /// How it ended, if it has.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Fails with the end of the log when the process has ended.
    pub(super) fn check_alive(&mut self) -> anyhow::Result<()> {
        match self.ended() {
            None => Ok(()),
            Some(status) => bail!("{} ended with {status}: {}", self.name, self.last_words()),
        }
    }

    /// Kills it and waits until it is gone.
    pub(super) async fn kill(&mut self) {
        // Fails only when it has ended already.
        let _ = self.child.kill().await;
    }

    /// Asks it to end.
    pub(super) fn terminate(&self) {
        if let Some(pid) = self.child.id() {
            // It may have ended by itself, which is as good.
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM);
        }
    }

    /// Waits for its end, and kills it when that takes too long.
    pub(super) async fn wait(&mut self, limit: Duration) {
        if timeout(limit, self.child.wait()).await.is_err() {
            self.kill().await;
        }
    }

    /// The end of the log, for messages.
    pub(super) fn last_words(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&log[log.len().saturating_sub(LAST_WORDS)..])
            .trim()
            .to_owned();
        if text.is_empty() {
            "it said nothing".to_owned()
        } else {
            text
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(pid) = self.child.id() {
            // Waited for, as who asks after the demo's end should find none of its processes.
            let _ = self.child.start_kill();
            let _ = waitpid(Pid::from_raw(pid.cast_signed()), None);
        }
    }
}

/// Gives up root before the program starts, and ties its life to ours.
///
/// After the step of [`Namespace::command`], which needs root, and before exec. The kernel forgets the death signal when
/// ids change, so that comes last; should this program have died by then, nobody would be left to signal.
#[allow(unsafe_code)]
fn become_user(command: &mut Command, uid: u32) {
    let parent = getpid();
    let step = move || {
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
    // SAFETY: the step runs between fork and exec, where only async-signal-safe functions may: it makes system calls
    // alone, allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(step);
    }
}

/// Bytes of a log that a message quotes.
const LAST_WORDS: usize = 1500;
