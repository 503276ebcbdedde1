//! Memory limit and memory usage of this process.

use std::fs;
use std::path::{Path, PathBuf};

/// The control group of this process, if it has a memory limit. Limits of its parent groups are not taken into account.
#[derive(Debug, PartialEq, Eq)]
pub struct MemoryCgroup {
    pub limit_bytes: u64,
    usage_file: PathBuf,
    stat_file: PathBuf,
    /// The key in `stat_file` of page cache that the kernel can reclaim.
    reclaimable_key: &'static str,
}

/// The limit of the control group or the memory of the machine, whichever is smaller, in bytes; `None` if neither is known.
pub fn limit() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok();
    smaller_limit(MemoryCgroup::current(), meminfo.as_deref())
}

/// `meminfo` is the text of `/proc/meminfo`.
fn smaller_limit(group: Option<MemoryCgroup>, meminfo: Option<&str>) -> Option<u64> {
    let group = group.map(|group| group.limit_bytes);
    let machine = meminfo.and_then(|text| parse_field(text, "MemTotal:"));
    let machine = machine.map(|kibibytes| kibibytes * 1024);
    group.into_iter().chain(machine).min()
}

/// The number after a name, in text with a name and a number on each line.
pub fn parse_field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        if words.next()? != name {
            return None;
        }
        words.next()?.parse().ok()
    })
}

impl MemoryCgroup {
    /// The control group of this process; `None` if it has no limit.
    pub fn current() -> Option<Self> {
        let cgroup_file = fs::read_to_string("/proc/self/cgroup").ok()?;
        Self::find(Path::new("/sys/fs/cgroup"), &cgroup_file)
    }

    /// Memory that counts towards the limit, without reclaimable page cache, in bytes.
    pub fn usage_bytes(&self) -> Option<u64> {
        let used: u64 = fs::read_to_string(&self.usage_file).ok()?.trim().parse().ok()?;
        let stat = fs::read_to_string(&self.stat_file).ok()?;
        Some(used.saturating_sub(parse_field(&stat, self.reclaimable_key).unwrap_or(0)))
    }

    /// Finds the control group, version 1 or 2. `cgroup_file` is the text of `/proc/self/cgroup`.
    fn find(mount: &Path, cgroup_file: &str) -> Option<Self> {
        cgroup_file.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
            let (root, usage, limit, reclaimable_key) = match controllers {
                "" => (mount.to_owned(), "memory.current", "memory.max", "inactive_file"),
                _ if controllers.split(',').any(|name| name == "memory") => (
                    mount.join("memory"),
                    "memory.usage_in_bytes",
                    "memory.limit_in_bytes",
                    "total_inactive_file",
                ),
                _ => return None,
            };
            // In a container, its own control group may be mounted as the root, regardless of its name on the host.
            let dir = [root.join(path), root]
                .into_iter()
                .find(|dir| dir.join(usage).exists())?;
            let limit = fs::read_to_string(dir.join(limit)).ok()?.trim().parse().ok()?;
            let group = Self {
                limit_bytes: limit,
                usage_file: dir.join(usage),
                stat_file: dir.join("memory.stat"),
                reclaimable_key,
            };
            (limit < CGROUP_V1_UNLIMITED).then_some(group)
        })
    }
}

/// Control groups version 1 express "no limit" as a very high limit; values from here on count as unlimited.
const CGROUP_V1_UNLIMITED: u64 = 1 << 60;

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
        let found = |cgroup_file| {
            MemoryCgroup::find(mount.path(), cgroup_file).map(|group| (group.usage_bytes(), group.limit_bytes))
        };
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
    fn the_limit_is_the_smaller_of_group_and_machine() {
        let group = |limit_bytes| {
            Some(MemoryCgroup {
                limit_bytes,
                usage_file: PathBuf::new(),
                stat_file: PathBuf::new(),
                reclaimable_key: "",
            })
        };
        let meminfo = Some("MemTotal:  8 kB\nMemFree: 1 kB\n");
        assert_eq!(smaller_limit(group(9000), meminfo), Some(8192));
        assert_eq!(smaller_limit(group(5000), meminfo), Some(5000));
        assert_eq!(smaller_limit(group(5000), None), Some(5000));
        assert_eq!(smaller_limit(None, meminfo), Some(8192));
        assert_eq!(smaller_limit(None, None), None);
        assert!(limit().unwrap() > 1 << 20, "the memory limit of this machine is known");
    }
}
