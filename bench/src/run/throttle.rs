//! Limits each thread of a process to a share of a core, with the cpu controller of cgroup v1, which can limit single threads.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use super::process::Process;

/// Active limits. Dropping the value removes them, which requires that the process has ended.
pub(super) struct Throttle(Vec<PathBuf>);

/// Fails unless this machine has the cpu controller of cgroup v1.
pub(super) fn check() -> anyhow::Result<()> {
    check_controller(Path::new(CPU_CONTROLLER_DIR))
}

fn check_controller(root: &Path) -> anyhow::Result<()> {
    ensure!(
        root.join("cpu.cfs_quota_us").exists(),
        "limits of threads need the cpu controller of cgroup v1, which is not mounted at {}",
        root.display()
    );
    Ok(())
}

impl Throttle {
    /// Limits all current threads of the process.
    pub(super) fn limit_threads(process: &Process, percent: u16) -> anyhow::Result<Self> {
        Self::limit_thread_ids(Path::new(CPU_CONTROLLER_DIR), process.threads()?, percent)
    }

    /// Limits these threads in groups below the directory of the controller.
    fn limit_thread_ids(root: &Path, threads: Vec<u64>, percent: u16) -> anyhow::Result<Self> {
        check_controller(root)?;
        let mut throttle = Self(Vec::new());
        for thread in threads {
            let dir = root.join(format!("tulle-bench-{thread}"));
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

const CPU_CONTROLLER_DIR: &str = "/sys/fs/cgroup/cpu";
/// Period of the limit. It is short, so that a throttled worker continues soon.
const PERIOD_US: u64 = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_controller_no_group_is_created() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cpu");
        let error = Throttle::limit_thread_ids(&root, vec![1], 25)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("cgroup v1"), "{error}");
        assert!(!root.exists());
    }
}
