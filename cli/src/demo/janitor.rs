//! Cleans up after a demo that cannot do so itself: killed, or aborted by a panic.
//!
//! A process of its own that waits for the demo's end of a pipe to close. The kernel closes it whatever way the demo
//! ends, and kills the demo's other children as well, so that only names and files are left to remove.

use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;

use super::rundir::{Kept, RunDir};
use super::stage;

/// The janitor of this process, who is dismissed when this is dropped.
pub(super) struct Janitor(Child);

impl Janitor {
    /// Starts the janitor: this program again, as `tulle demo janitor`.
    pub(super) fn hire() -> anyhow::Result<Self> {
        let own = std::env::current_exe().context("finding this program")?;
        let child = Command::new(own)
            .args(["demo", "janitor", &std::process::id().to_string()])
            .stdin(Stdio::piped())
            // Whoever reads our output must not wait for the janitor.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("starting the janitor")?;
        Ok(Self(child))
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        // Nothing of this can be helped; the next start sweeps as well.
        if let Some(mut stdin) = self.0.stdin.take() {
            let _ = stdin.write_all(DISMISSED);
        }
        let _ = self.0.wait();
    }
}

/// What `tulle demo janitor` does.
pub(super) fn main(demo: u32) -> anyhow::Result<()> {
    let mut said = Vec::new();
    std::io::stdin()
        .read_to_end(&mut said)
        .context("waiting for the demo's end")?;
    if said == DISMISSED {
        return Ok(());
    }
    let proc = format!("/proc/{demo}");
    for _ in 0..TRIES {
        // Until it has been waited for, a dead process still looks like one that runs.
        stage::sweep(Kept::Leave)?;
        if !Path::new(&proc).exists() {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    stage::sweep(Kept::Leave)?;
    RunDir::remove_empty_base();
    Ok(())
}

const DISMISSED: &[u8] = b"done";
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(100);
