//! The cgroups of nodes: the pods of each node are below a cgroup of that node.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// Creates a cgroup of this name in every hierarchy, as the kubelet expects.
pub(super) fn create(name: &str) -> anyhow::Result<()> {
    for hierarchy in hierarchies()? {
        // The unified hierarchy of a hybrid system has no controllers, but containerd uses it.
        let group = hierarchy.join(name);
        fs::create_dir_all(&group).with_context(|| format!("creating the control group {}", group.display()))?;
        // Version 1: a new cgroup has no CPUs and no memory nodes until they are assigned.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let (from, to) = (hierarchy.join(file), group.join(file));
            if let Ok(all) = fs::read(&from) {
                fs::write(&to, all).with_context(|| format!("writing {}", to.display()))?;
            }
        }
        // By default, a cgroup weighs as much as a single thread in its parent, such as a thread of containerd or the kubelet:
        // starting a container would starve the pods of a node.
        for (file, share) in [("cpu.shares", "32768"), ("cpu.weight", "3200")] {
            let file = group.join(file);
            if file.exists() {
                fs::write(&file, share).with_context(|| format!("writing {}", file.display()))?;
            }
        }
        // Version 2: controllers are enabled one level at a time.
        for dir in [&hierarchy, &group] {
            let Ok(controllers) = fs::read_to_string(dir.join("cgroup.controllers")) else {
                continue;
            };
            for controller in controllers.split_whitespace() {
                // Some controllers cannot be enabled here; the kubelet reports the ones that it misses.
                let _ = fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}"));
            }
        }
    }
    Ok(())
}

/// The processes in all cgroups whose name starts with `prefix`, and in those below them.
pub(super) fn processes(prefix: &str) -> anyhow::Result<Vec<i32>> {
    let mut pids = Vec::new();
    for group in groups(prefix)? {
        // A cgroup may disappear while it is read.
        let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
    }
    pids.sort_unstable();
    pids.dedup();
    Ok(pids)
}

/// Removes all cgroups whose name starts with `prefix`, and those below them; they must have no processes.
pub(super) fn remove(prefix: &str) -> anyhow::Result<()> {
    for group in groups(prefix)?.into_iter().rev() {
        match fs::remove_dir(&group) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("removing the control group {}", group.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The cgroups whose name starts with `prefix`, and all below them; parents come before their children.
fn groups(prefix: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for hierarchy in hierarchies()? {
        let has_prefix = |dir: &PathBuf| {
            let name = dir.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(prefix))
        };
        let mut pending: Vec<PathBuf> = children(&hierarchy).into_iter().filter(has_prefix).collect();
        while let Some(group) = pending.pop() {
            pending.extend(children(&group));
            found.push(group);
        }
    }
    Ok(found)
}

fn children(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

fn hierarchies() -> anyhow::Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("reading /proc/self/mounts")?;
    let mount_point = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind) = (fields.next()?, fields.next()?);
        ["cgroup", "cgroup2"].contains(&kind).then(|| PathBuf::from(path))
    };
    Ok(mounts.lines().filter_map(mount_point).collect())
}
