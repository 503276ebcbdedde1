//! Runs programs with a time limit, after which they are killed with all processes that they started.

use std::io;
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;
use tokio::time::timeout;

/// Runs a program in a process group of its own, without input, until it ends.
///
/// # Errors
/// Fails if the program cannot be started, or does not end within two minutes: then its process group is killed, and the error
/// contains `what` and the output so far. A program that fails is not an error.
pub async fn output(what: &str, program: Command) -> anyhow::Result<Output> {
    output_within(OUTPUT_TIMEOUT, what, program).await
}

/// Runs a script, and returns its standard output. `bash` is a command line that ends in `bash`, such as `setpriv … bash`; the
/// script is added to it.
///
/// # Errors
/// Fails if a command of the script fails, or the script does not end within five minutes: then its process group is killed.
/// The error contains the script and its output so far.
pub async fn run_script(bash: Command, script: &str) -> anyhow::Result<String> {
    run_script_within(SCRIPT_TIMEOUT, bash, script).await
}

async fn run_script_within(limit: Duration, mut bash: Command, script: &str) -> anyhow::Result<String> {
    bash.args(["-euo", "pipefail", "-c", script]);
    let Output { status, stdout, stderr } = output_within(limit, script, bash).await?;
    let [stdout, stderr] = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(status.success(), "{status}:\n{script}\n{stdout}{stderr}");
    Ok(stdout)
}

/// [`output`] with another time limit.
///
/// # Errors
/// The same as [`output`].
pub async fn output_within(limit: Duration, what: &str, mut program: Command) -> anyhow::Result<Output> {
    let mut child = program
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("starting {what}"))?;
    let mut group = ProcessGroup(child.id());
    let (stdout_pipe, stderr_pipe) = (child.stdout.take(), child.stderr.take());
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let status = async {
        let status = child.wait().await?;
        if !status.success() {
            // Processes in the background keep the pipes open.
            group.kill();
        }
        Ok::<_, io::Error>(status)
    };
    let ended = async { tokio::try_join!(status, read(stdout_pipe, &mut stdout), read(stderr_pipe, &mut stderr)) };
    let Ok(ended) = timeout(limit, ended).await else {
        let [stdout, stderr] = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        bail!("timed out after {limit:?}:\n{what}\n{stdout}{stderr}");
    };
    let (status, (), ()) = ended.with_context(|| format!("reading the output of {what}"))?;
    group.0 = None;
    Ok(Output { status, stdout, stderr })
}

/// Reads a pipe to its end. What was read before the future is dropped stays in `output`.
async fn read(pipe: Option<impl AsyncRead + Unpin>, output: &mut Vec<u8>) -> io::Result<()> {
    let Some(mut pipe) = pipe else { return Ok(()) };
    while pipe.read_buf(output).await? > 0 {}
    Ok(())
}

/// The process group of a program, by the id of its leader. Dropping it kills the group.
struct ProcessGroup(Option<u32>);

impl ProcessGroup {
    fn kill(&self) {
        if let Some(leader) = self.0 {
            // Fails only if all processes have ended.
            let _ = killpg(Pid::from_raw(leader.cast_signed()), Signal::SIGKILL);
        }
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.kill();
    }
}

const OUTPUT_TIMEOUT: Duration = Duration::from_secs(120);
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::eventually::eventually;

    #[tokio::test]
    async fn a_script_returns_its_output_or_fails_with_its_commands_and_output() {
        let run = async |script: &str| run_script(Command::new("bash"), script).await;
        assert_eq!(run("echo a; echo b >&2").await.unwrap(), "a\n");
        // The background process does not delay the error.
        let failing = "sleep 1000 & echo a; echo b >&2; exit 3";
        let error = run(failing).await.unwrap_err().to_string();
        assert_eq!(error, format!("exit status: 3:\n{failing}\na\nb\n"));
    }

    #[tokio::test]
    async fn a_script_that_does_not_end_is_killed_with_its_processes() {
        let script = "sleep 1000 & echo $!; until false; do sleep 0.1; done";
        let ended = run_script_within(Duration::from_secs(3), Command::new("bash"), script).await;
        let error = ended.unwrap_err().to_string();
        let (message, sleep_pid) = error.trim_end().rsplit_once('\n').unwrap();
        assert_eq!(message, format!("timed out after 3s:\n{script}"));
        eventually("the background process has ended", async || {
            // A zombie has no command line.
            let command_line = fs::read(format!("/proc/{sleep_pid}/cmdline")).unwrap_or_default();
            command_line.is_empty().then_some(())
        })
        .await;
    }
}
