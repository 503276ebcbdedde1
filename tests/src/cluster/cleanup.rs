//! Stops a cluster and removes everything it created, found only by its directory and its names.
//!
//! Used after a test, by `./run cluster down`, and after the starting process was killed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tulle_core::netns;

use super::slot::{self, Slot};
use super::{cgroups, node, processes};

/// Stops the cluster in `slot` and removes everything it created; succeeds if there is none.
pub(super) fn stop_and_remove(slot: &Slot) -> anyhow::Result<()> {
    let dir = slot.dir();
    // Components that start pods stop before the pods.
    kill_processes("components", || processes::in_directory(dir))?;
    kill_processes("pods", || cgroups::processes(slot.cgroup_prefix()))?;
    for mount in mounts(dir)? {
        // Fails if the kernel has already detached this mount together with a parent mount.
        let _ = umount2(&mount, MntFlags::MNT_DETACH);
    }
    cgroups::remove(slot.cgroup_prefix())?;
    netns::remove_stale(slot.namespace_prefix()).context("removing network namespaces")?;
    remove_external_files(dir);
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Kills processes until none is left.
fn kill_processes(what: &str, processes: impl Fn() -> anyhow::Result<Vec<i32>>) -> anyhow::Result<()> {
    let mut left = processes()?;
    for _ in 0..MAX_KILL_ATTEMPTS {
        if left.is_empty() {
            return Ok(());
        }
        for pid in &left {
            // The process may have exited already.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        sleep(KILL_INTERVAL);
        left = processes()?;
    }
    ensure!(left.is_empty(), "{what} of the cluster do not end: processes {left:?}");
    Ok(())
}

/// Mount points below a directory, innermost first.
fn mounts(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mounts").context("reading /proc/self/mounts")?;
    let below = |line: &str| {
        let path = PathBuf::from(line.split(' ').nth(1)?);
        (path.starts_with(dir) && path != dir).then_some(path)
    };
    let mut found: Vec<PathBuf> = table.lines().filter_map(below).collect();
    found.reverse();
    Ok(found)
}

/// Removes files that third-party programs write to fixed paths; missing files are not an error.
fn remove_external_files(dir: &Path) {
    let entries = |dir: &str| {
        fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
    };
    // The kubelet creates links to logs by pod.
    for link in entries("/var/log/containers") {
        if fs::read_link(&link).is_ok_and(|target| target.starts_with(dir)) {
            let _ = fs::remove_file(link);
        }
    }
    // The network plugins store their results, with the network namespace.
    let ours = dir.to_string_lossy();
    for cni_result in entries("/var/lib/cni/results") {
        if fs::read_to_string(&cni_result).is_ok_and(|text| text.contains(&*ours)) {
            let _ = fs::remove_file(cni_result);
        }
    }
    // The path of the kubelet's plugin socket cannot be configured. If the lock is held, another cluster's kubelet is creating the
    // socket, and that cluster's cleanup removes it.
    if let Ok(Some(_lock)) = slot::try_lock_device_plugins() {
        let _ = fs::remove_file("/var/lib/kubelet/device-plugins/kubelet.sock");
        for empty in ["/var/lib/kubelet/device-plugins", "/var/lib/kubelet"] {
            let _ = fs::remove_dir(empty);
        }
    }
    // Each container's shim has a socket, whose path is in the container's directory.
    for container in node::containers(dir) {
        if let Ok(socket) = fs::read_to_string(container.join("address")) {
            let _ = fs::remove_file(socket.trim_start_matches("unix://"));
        }
    }
}

/// Ten seconds; a killed process needs milliseconds to exit.
const MAX_KILL_ATTEMPTS: u32 = 500;
const KILL_INTERVAL: Duration = Duration::from_millis(20);
