//! Finds the processes of a cluster by their working directory.

use std::fs;
use std::path::Path;

use anyhow::Context as _;

/// Whether a process of the cluster in `dir` is running.
pub(super) fn is_alive(dir: &Path) -> anyhow::Result<bool> {
    Ok(!in_directory(dir)?.is_empty())
}

/// Processes that run in the directory of the cluster: those of this harness, and those that containerd started.
pub(super) fn in_directory(dir: &Path) -> anyhow::Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("reading /proc")?.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        let Some(pid) = pid else { continue };
        let path = entry.path();
        // A zombie has no working directory.
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

/// Names as in `/proc/<pid>/comm`, which has at most 15 bytes.
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
