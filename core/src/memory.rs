//! How much memory this process may use, and how much of that is used.

use std::fs;
use std::path::{Path, PathBuf};

/// The control group of this process, which has a limit.
#[derive(Debug, PartialEq, Eq)]
pub struct Group {
    /// In bytes.
    pub limit: u64,
    usage: PathBuf,
    stat: PathBuf,
    /// The name in `stat` of what the kernel can drop.
    droppable: &'static str,
}

/// In bytes: the limit of our control group, or what the machine has; nothing where neither is known.
pub fn limit() -> Option<u64> {
    Group::own().map(|group| group.limit).or_else(|| {
        let machine = fs::read_to_string("/proc/meminfo").ok()?;
        Some(named(&machine, "MemTotal:")? * 1024)
    })
}

/// The number behind a name, in lines of names and numbers.
pub fn named(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    lines.find_map(|mut words| (words.next()? == name).then(|| words.next()?.parse().ok())?)
}

impl Group {
    /// That of this process, if it has a limit.
    pub fn own() -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        Self::find(Path::new("/sys/fs/cgroup"), &own)
    }

    /// What the kernel counts towards the limit, without the files that it can drop, in bytes.
    pub fn used(&self) -> Option<u64> {
        let used: u64 = fs::read_to_string(&self.usage).ok()?.trim().parse().ok()?;
        let stat = fs::read_to_string(&self.stat).ok()?;
        Some(used.saturating_sub(named(&stat, self.droppable).unwrap_or(0)))
    }

    /// In either version of control groups.
    fn find(mount: &Path, own: &str) -> Option<Self> {
        own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
            let (root, usage, limit, droppable) = match controllers {
                "" => (mount.to_owned(), "memory.current", "memory.max", "inactive_file"),
                _ if controllers.split(',').any(|name| name == "memory") => (
                    mount.join("memory"),
                    "memory.usage_in_bytes",
                    "memory.limit_in_bytes",
                    "total_inactive_file",
                ),
                _ => return None,
            };
            // A container may see its own group as the root, whatever it is called outside.
            let own = [root.join(path), root]
                .into_iter()
                .find(|dir| dir.join(usage).exists())?;
            let limit = fs::read_to_string(own.join(limit)).ok()?.trim().parse().ok()?;
            let group = Self {
                limit,
                usage: own.join(usage),
                stat: own.join("memory.stat"),
                droppable,
            };
            (limit < NO_LIMIT).then_some(group)
        })
    }
}

/// A limit so high is none: version 1 has no other way to say so.
const NO_LIMIT: u64 = 1 << 60;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_both_versions_are_found_wherever_they_are_mounted() {
        let mount = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = mount.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("pod/memory.current", "5000\n");
        write("pod/memory.max", "8000\n");
        write("pod/memory.stat", "anon 1\ninactive_file 2000\n");
        write("memory/memory.usage_in_bytes", "700\n");
        write("memory/memory.limit_in_bytes", "9000\n");
        write("memory/memory.stat", "inactive_file 1\ntotal_inactive_file 100\n");
        write("free/memory.current", "1\n");
        write("free/memory.max", "max\n");
        let found = |own| Group::find(mount.path(), own).map(|group| (group.used(), group.limit));
        assert_eq!(found("0::/pod\n"), Some((Some(3000), 8000)));
        assert_eq!(
            found("5:cpu:/x\n4:memory:/kubepods/of/outside\n0::/\n"),
            Some((Some(600), 9000))
        );
        assert_eq!(found("0::/free\n"), None);
        assert_eq!(found("0::/gone\n"), None);
        assert_eq!(found(""), None);
    }

    #[test]
    fn the_memory_of_the_machine_is_known() {
        assert!(limit().unwrap() > 1 << 20);
    }
}
