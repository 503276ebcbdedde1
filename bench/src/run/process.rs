//! A process that is measured, or only has to run: its CPU time, memory, and when it listens.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::Instant;

/// A child process; ended when dropped.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command`, with its output in `<dir>/<name>.log`.
    pub fn start(name: &str, mut command: Command, dir: &Path) -> anyhow::Result<Self> {
        let log = dir.join(format!("{name}.log"));
        let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let errors = file.try_clone().context("sharing the log file")?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(errors)
            .spawn()
            .with_context(|| format!("starting {:?}", command.get_program()))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log,
        })
    }

    /// Waits until the process's namespace has a listener on each of `ports`.
    pub fn listening(&mut self, ports: &[u16]) -> anyhow::Result<()> {
        self.wait_for(&format!("listeners on {ports:?}"), |process| {
            let mut open = listeners(&process.proc("net/tcp")?);
            open.extend(listeners(&process.proc("net/tcp6").unwrap_or_default()));
            Ok(ports.iter().all(|port| open.contains(port)))
        })
    }

    /// Waits until `condition` holds; fails when the process ends or the time is over.
    pub fn wait_for(
        &mut self,
        what: &str,
        mut condition: impl FnMut(&Self) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        for _ in 0..START_TRIES {
            if let Some(status) = self.child.try_wait().context("waiting for a child")? {
                bail!("{} ended with {status}: {}", self.name, self.last_words());
            }
            if condition(self)? {
                return Ok(());
            }
            std::thread::sleep(START_PAUSE);
        }
        bail!(
            "{} has no {what} after {:?}: {}",
            self.name,
            START_PAUSE * START_TRIES,
            self.last_words()
        )
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The numbers of all living threads.
    pub fn threads(&self) -> anyhow::Result<Vec<u64>> {
        let dir = format!("/proc/{}/task", self.child.id());
        let number = |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
        let threads = std::fs::read_dir(&dir).with_context(|| format!("reading {dir}"))?;
        Ok(threads.filter_map(number).collect())
    }

    /// CPU time of all living threads, from the scheduler: exact to the nanosecond, where utime counts ticks.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        let mut nanos = 0;
        for thread in self.threads()? {
            // A thread that ended in between is no longer counted; sidecars keep theirs.
            let Ok(text) = self.proc(&format!("task/{thread}/schedstat")) else {
                continue;
            };
            nanos += first_number(&text).with_context(|| format!("schedstat of {thread} says {text:?}"))?;
        }
        Ok(Duration::from_nanos(nanos))
    }

    /// CPU time in user mode and in the kernel so far, in ticks.
    pub fn ticks(&self) -> anyhow::Result<(u64, u64)> {
        let stat = self.proc("stat")?;
        // The second field is the program's name, which may contain anything but is closed by the last bracket.
        let fields: Vec<&str> = stat
            .rsplit_once(')')
            .map_or_else(Vec::new, |(_, rest)| rest.split_whitespace().collect());
        let number = |at: usize| fields.get(at).and_then(|field| field.parse().ok());
        match (number(11), number(12)) {
            (Some(user), Some(kernel)) => Ok((user, kernel)),
            _ => bail!("stat of {} says {stat:?}", self.name),
        }
    }

    /// Resident memory in KiB.
    pub fn rss_kib(&self) -> anyhow::Result<u64> {
        self.status("VmRSS:")
    }

    /// The most that was ever resident, in KiB.
    pub fn peak_rss_kib(&self) -> anyhow::Result<u64> {
        self.status("VmHWM:")
    }

    fn status(&self, name: &str) -> anyhow::Result<u64> {
        let status = self.proc("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(first_number)
            .with_context(|| format!("no {name} in the status of {}", self.name))
    }

    fn proc(&self, file: &str) -> anyhow::Result<String> {
        let path = format!("/proc/{}/{file}", self.child.id());
        std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))
    }

    /// The end of the log.
    pub fn last_words(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&log[log.len().saturating_sub(LAST_WORDS)..])
            .trim()
            .to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let asked_at = Instant::now();
        let pid = i32::try_from(self.child.id()).map(Pid::from_raw);
        while matches!(self.child.try_wait(), Ok(None)) && asked_at.elapsed() < PATIENCE {
            // Asking and killing fail only when it has ended already. Asked once, a server's sidecar serves on for as long as the
            // application listens, which may be longer than this process has patience; asked again, it ends.
            let _ = pid.map(|pid| kill(pid, Signal::SIGTERM));
            std::thread::sleep(ASK_AGAIN);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How long it may take to end by itself, as it has to where it writes something at its end.
const PATIENCE: Duration = Duration::from_secs(2);
const ASK_AGAIN: Duration = Duration::from_millis(20);

fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

/// Local ports in state LISTEN of a table like `/proc/net/tcp`.
fn listeners(table: &str) -> Vec<u16> {
    let port = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, _, state) = (fields.next()?, fields.next()?, fields.next()?);
        (state == "0A")
            .then(|| u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok())
            .flatten()
    };
    table.lines().filter_map(port).collect()
}

/// Under callgrind a start takes some seconds.
const START_TRIES: u32 = 6000;
const START_PAUSE: Duration = Duration::from_millis(10);
const LAST_WORDS: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_told_from_connections() {
        let table = "  sl  local_address rem_address   st tx_queue\n   \
                     0: 0100007F:102C 00000000:0000 0A 00000000:00000000\n   \
                     1: 0100007F:1F90 0100007F:D431 01 00000000:00000000\n";
        assert_eq!(listeners(table), [4140]);
        assert!(listeners("garbage\n: : 0A").is_empty());
    }

    #[test]
    fn cpu_time_and_memory_of_a_process_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo done; sleep 60",
        ]);
        let mut process = Process::start("loop", command, dir.path()).unwrap();
        process
            .wait_for("done", |process| Ok(process.last_words() == "done"))
            .unwrap();
        assert!(process.cpu().unwrap() > Duration::from_millis(1));
        assert!(process.rss_kib().unwrap() > 100);
        let (user, kernel) = process.ticks().unwrap();
        assert!(user + kernel > 0);
        assert_eq!(process.threads().unwrap().len(), 1);
    }

    #[test]
    fn a_process_that_wants_to_be_asked_twice_ends_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let written = dir.path().join("written");
        let at_the_second = format!("echo all > {}; exit", written.display());
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "trap 'trap \"$1\" TERM' TERM; echo ready; while :; do sleep 0.01; done",
            "sh",
            &at_the_second,
        ]);
        let mut process = Process::start("patient", command, dir.path()).unwrap();
        process
            .wait_for("handler", |process| Ok(process.last_words() == "ready"))
            .unwrap();
        drop(process);
        assert_eq!(std::fs::read_to_string(written).unwrap(), "all\n");
    }

    #[test]
    fn a_process_that_ends_is_reported_with_its_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such file >&2; exit 3"]);
        let error = Process::start("broken", command, dir.path())
            .unwrap()
            .listening(&[1])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("exit status: 3") && error.contains("no such file"),
            "{error}"
        );
    }
}
