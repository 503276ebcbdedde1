//! A child process with its CPU time, memory and listening ports.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::Instant;

/// A child process. Dropping the value ends it.
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
    pub fn wait_for_ports(&mut self, ports: &[u16]) -> anyhow::Result<()> {
        self.wait_for(&format!("listeners on {ports:?}"), |process| {
            let mut open = listening_ports(&process.read_proc_file("net/tcp")?);
            open.extend(listening_ports(&process.read_proc_file("net/tcp6").unwrap_or_default()));
            Ok(ports.iter().all(|port| open.contains(port)))
        })
    }

    /// Waits until `condition` holds. Fails if the process ends or the timeout is reached.
    pub fn wait_for(
        &mut self,
        what: &str,
        mut condition: impl FnMut(&Self) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        for _ in 0..MAX_START_POLLS {
            if let Some(status) = self.child.try_wait().context("waiting for a child")? {
                bail!("{} ended with {status}: {}", self.name, self.log_tail());
            }
            if condition(self)? {
                return Ok(());
            }
            std::thread::sleep(START_POLL_INTERVAL);
        }
        bail!(
            "{} has no {what} after {:?}: {}",
            self.name,
            START_POLL_INTERVAL * MAX_START_POLLS,
            self.log_tail()
        )
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Ids of all running threads.
    pub fn threads(&self) -> anyhow::Result<Vec<u64>> {
        let dir = format!("/proc/{}/task", self.child.id());
        let number = |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
        let threads = std::fs::read_dir(&dir).with_context(|| format!("reading {dir}"))?;
        Ok(threads.filter_map(number).collect())
    }

    /// CPU time of all running threads, from the scheduler, which counts in nanoseconds. `utime` would count clock ticks.
    pub fn cpu_time(&self) -> anyhow::Result<Duration> {
        self.cpu_time_without_thread("")
    }

    /// CPU time of all running threads except those with this name.
    pub fn cpu_time_without_thread(&self, name: &str) -> anyhow::Result<Duration> {
        let mut nanos = 0;
        for thread in self.threads()? {
            let is_excluded = |thread_name: String| thread_name.trim_end() == name;
            if self
                .read_proc_file(&format!("task/{thread}/comm"))
                .is_ok_and(is_excluded)
            {
                continue;
            }
            // A thread that has ended is not counted. The threads of sidecars do not end.
            let Ok(text) = self.read_proc_file(&format!("task/{thread}/schedstat")) else {
                continue;
            };
            nanos += first_number(&text).with_context(|| format!("schedstat of {thread} says {text:?}"))?;
        }
        Ok(Duration::from_nanos(nanos))
    }

    /// CPU time in user mode and in the kernel so far, in clock ticks.
    pub fn cpu_ticks(&self) -> anyhow::Result<(u64, u64)> {
        let stat = self.read_proc_file("stat")?;
        // The second field is the program's name in brackets. The name can contain brackets, so the last one ends the field.
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
        self.status_number("VmRSS:")
    }

    /// Maximum resident memory so far, in KiB.
    pub fn peak_rss_kib(&self) -> anyhow::Result<u64> {
        self.status_number("VmHWM:")
    }

    /// Resets the value of `peak_rss_kib` to the current resident memory.
    pub fn reset_peak_rss(&self) -> anyhow::Result<()> {
        let path = format!("/proc/{}/clear_refs", self.child.id());
        std::fs::write(&path, "5").with_context(|| format!("writing {path}"))
    }

    fn status_number(&self, name: &str) -> anyhow::Result<u64> {
        let status = self.read_proc_file("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(first_number)
            .with_context(|| format!("no {name} in the status of {}", self.name))
    }

    fn read_proc_file(&self, file: &str) -> anyhow::Result<String> {
        let path = format!("/proc/{}/{file}", self.child.id());
        std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))
    }

    /// The end of the log.
    pub fn log_tail(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&log[log.len().saturating_sub(LOG_TAIL_BYTES)..])
            .trim()
            .to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let started_at = Instant::now();
        let pid = i32::try_from(self.child.id()).map(Pid::from_raw);
        while matches!(self.child.try_wait(), Ok(None)) && started_at.elapsed() < EXIT_TIMEOUT {
            // A signal fails only if the process has already ended. After the first SIGTERM, the server's sidecar serves until
            // the application stops listening, which can take longer than the timeout. A second SIGTERM ends it.
            let _ = pid.map(|pid| kill(pid, Signal::SIGTERM));
            std::thread::sleep(SIGTERM_RETRY_INTERVAL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Time to exit after SIGTERM before the process is killed. Some programs write results when they exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
const SIGTERM_RETRY_INTERVAL: Duration = Duration::from_millis(20);

fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

/// Local ports in state LISTEN of a table like `/proc/net/tcp`.
fn listening_ports(table: &str) -> Vec<u16> {
    let port = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, _, state) = (fields.next()?, fields.next()?, fields.next()?);
        (state == "0A")
            .then(|| u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok())
            .flatten()
    };
    table.lines().filter_map(port).collect()
}

/// Maximum number of polls until a process has started. Under callgrind, a start takes several seconds.
const MAX_START_POLLS: u32 = 6000;
const START_POLL_INTERVAL: Duration = Duration::from_millis(10);
const LOG_TAIL_BYTES: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_do_not_count_as_listeners() {
        let table = "  sl  local_address rem_address   st tx_queue\n   \
                     0: 0100007F:102C 00000000:0000 0A 00000000:00000000\n   \
                     1: 0100007F:1F90 0100007F:D431 01 00000000:00000000\n";
        assert_eq!(listening_ports(table), [4140]);
        assert!(listening_ports("garbage\n: : 0A").is_empty());
    }

    #[test]
    fn cpu_time_and_memory_of_a_process_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo done; sleep 60; :",
        ]);
        let mut process = Process::start("loop", command, dir.path()).unwrap();
        process
            .wait_for("done", |process| Ok(process.log_tail() == "done"))
            .unwrap();
        assert!(process.cpu_time().unwrap() > Duration::from_millis(1));
        assert_eq!(process.cpu_time_without_thread("sh").unwrap(), Duration::ZERO);
        assert!(process.rss_kib().unwrap() > 100);
        let (user, kernel) = process.cpu_ticks().unwrap();
        assert!(user + kernel > 0);
        assert_eq!(process.threads().unwrap().len(), 1);
    }

    #[test]
    fn a_process_that_needs_two_sigterms_exits_without_being_killed() {
        let dir = tempfile::tempdir().unwrap();
        let written = dir.path().join("written");
        let on_second_term = format!("echo all > {}; exit", written.display());
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "trap 'trap \"$1\" TERM' TERM; echo ready; while :; do sleep 0.01; done",
            "sh",
            &on_second_term,
        ]);
        let mut process = Process::start("patient", command, dir.path()).unwrap();
        process
            .wait_for("handler", |process| Ok(process.log_tail() == "ready"))
            .unwrap();
        drop(process);
        assert_eq!(std::fs::read_to_string(written).unwrap(), "all\n");
    }

    #[test]
    fn a_process_that_ends_is_reported_with_the_end_of_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such file >&2; exit 3"]);
        let error = Process::start("broken", command, dir.path())
            .unwrap()
            .wait_for_ports(&[1])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("exit status: 3") && error.contains("no such file"),
            "{error}"
        );
    }
}
