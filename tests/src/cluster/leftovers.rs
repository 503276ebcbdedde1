//! Ends a cluster and removes whatever it made, with nothing to go by but its directory and its names.
//!
//! The same after a test, by `./run cluster down`, and when who started it was killed.

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

use super::cgroups;
use super::node;

/// Leaves nothing of the cluster in `dir`; fine when there is none.
pub(super) fn remove(dir: &Path) -> anyhow::Result<()> {
    // Who starts pods ends before the pods do.
    end("components", || components(dir))?;
    end("pods", || cgroups::processes(node::CGROUP_PREFIX))?;
    for mount in mounts(dir)? {
        // It may have gone with one that it was inside of.
        let _ = umount2(&mount, MntFlags::MNT_DETACH);
    }
    cgroups::remove(node::CGROUP_PREFIX)?;
    netns::sweep(node::NAMESPACE_PREFIX).context("removing network namespaces")?;
    outside(dir);
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Whether a process of the cluster in `dir` is alive.
pub(super) fn is_alive(dir: &Path) -> anyhow::Result<bool> {
    Ok(!components(dir)?.is_empty())
}

/// Kills processes until there are none.
fn end(what: &str, processes: impl Fn() -> anyhow::Result<Vec<i32>>) -> anyhow::Result<()> {
    let mut left = processes()?;
    for _ in 0..END_TRIES {
        if left.is_empty() {
            return Ok(());
        }
        for pid in &left {
            // It may have ended by itself, which is as good.
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        sleep(END_PAUSE);
        left = processes()?;
    }
    ensure!(left.is_empty(), "{what} of the cluster do not end: processes {left:?}");
    Ok(())
}

/// Programs of ours that work in the directory of the cluster: what we started, and what containerd did for it.
fn components(dir: &Path) -> anyhow::Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("reading /proc")?.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        let Some(pid) = pid else { continue };
        let path = entry.path();
        // Dead processes, which only wait to be collected, have no directory.
        let Ok(works_in) = fs::read_link(path.join("cwd")) else {
            continue;
        };
        let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
        if works_in.starts_with(dir) && PROGRAMS.contains(&name.trim()) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Mount points below a directory, the innermost first.
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

/// What programs of others write to places that they cannot be talked out of; what is not there is fine.
fn outside(dir: &Path) {
    let entries = |dir: &str| {
        fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
    };
    // The kubelet links logs by pod.
    for link in entries("/var/log/containers") {
        if fs::read_link(&link).is_ok_and(|target| target.starts_with(dir)) {
            let _ = fs::remove_file(link);
        }
    }
    // The network plugins remember what they answered, and in which namespace.
    let ours = dir.to_string_lossy();
    for answer in entries("/var/lib/cni/results") {
        if fs::read_to_string(&answer).is_ok_and(|text| text.contains(&*ours)) {
            let _ = fs::remove_file(answer);
        }
    }
    // The kubelet listens for plugins at a place that no setting moves.
    let _ = fs::remove_file("/var/lib/kubelet/device-plugins/kubelet.sock");
    for empty in ["/var/lib/kubelet/device-plugins", "/var/lib/kubelet"] {
        let _ = fs::remove_dir(empty);
    }
    // Each container's shim has a socket, and says so in the container's directory.
    for container in node::containers(dir) {
        if let Ok(socket) = fs::read_to_string(container.join("address")) {
            let _ = fs::remove_file(socket.trim_start_matches("unix://"));
        }
    }
}

/// As `/proc/<pid>/comm` has them: 15 bytes.
const PROGRAMS: &[&str] = &[
    "etcd",
    "kube-apiserver",
    "kube-controller",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "containerd",
    "containerd-shim",
    "runc",
];
/// Ten seconds; a killed process needs milliseconds.
const END_TRIES: u32 = 500;
const END_PAUSE: Duration = Duration::from_millis(20);
