//! Limits each thread of a process to a share of a core, with the cpu controller of cgroup v1, which can limit single threads.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::process::Process;

/// Active limits. Dropping the value removes them, which requires that the process has ended.
pub(super) struct Throttle(Vec<PathBuf>);

/// Whether this machine has the cpu controller of cgroup v1.
pub(super) fn available() -> bool {
    Path::new(ROOT).join("cpu.cfs_quota_us").exists()
}

impl Throttle {
    /// Limits all current threads of the process.
    pub(super) fn threads_of(process: &Process, percent: u16) -> anyhow::Result<Self> {
        let mut throttle = Self(Vec::new());
        for thread in process.threads()? {
            let dir = Path::new(ROOT).join(format!("tulle-bench-{thread}"));
            let write = |file: &str, value: u64| {
                fs::write(dir.join(file), value.to_string())
                    .with_context(|| format!("writing {file} of {}", dir.display()))
            };
            // A directory left by an earlier run that was killed can be reused, because the thread in it has ended.
            fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
            throttle.0.push(dir.clone());
            write("cpu.cfs_period_us", PERIOD_US)?;
            write("cpu.cfs_quota_us", PERIOD_US * u64::from(percent) / 100)?;
            write("tasks", thread)?;
        }
        Ok(throttle)
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        for dir in &self.0 {
            if let Err(error) = fs::remove_dir(dir) {
                eprintln!("tulle-bench: removing {}: {error}", dir.display());
            }
        }
    }
}

const ROOT: &str = "/sys/fs/cgroup/cpu";
/// In microseconds. Short, so that a throttled worker continues soon.
const PERIOD_US: u64 = 10_000;
