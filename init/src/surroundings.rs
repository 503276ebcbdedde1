//! The network namespace around us: entering it, what it can do, who runs in it, and its one setting that we change.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::Context;
use nix::sched::{CloneFlags, setns};

/// Moves this process into a network namespace; call it before any thread exists.
///
/// # Errors
/// When the path is no network namespace or the capability `SYS_ADMIN` is missing.
pub fn enter(path: &Path) -> anyhow::Result<()> {
    let file = File::open(path).with_context(|| format!("opening the network namespace {}", path.display()))?;
    setns(&file, CloneFlags::CLONE_NEWNET).with_context(|| {
        format!(
            "entering the network namespace {} (needs the capability SYS_ADMIN)",
            path.display()
        )
    })
}

/// Whether an interface of the namespace has IPv6, or a new one would have it. Loopback does not count.
///
/// Each interface has a setting of its own: `all` holds only the value that was last written to it.
#[must_use]
pub fn has_ipv6() -> bool {
    // The directory of settings is the one of the reading thread's namespace.
    let Ok(interfaces) = fs::read_dir(IPV6_INTERFACES) else {
        return false;
    };
    interfaces
        .flatten()
        .filter(|interface| !["all", "lo"].iter().any(|name| interface.file_name() == *name))
        .any(|interface| {
            fs::read_to_string(interface.path().join("disable_ipv6")).is_ok_and(|disabled| disabled.trim() == "0")
        })
}

/// Sets how long connection tracking keeps connections that wait for our side to close, in seconds.
///
/// # Errors
/// When the setting does not exist here or may not be written.
pub fn set_close_wait(seconds: u32) -> anyhow::Result<()> {
    fs::write(CLOSE_WAIT, seconds.to_string()).with_context(|| {
        format!("writing {seconds} to {CLOSE_WAIT} (needs the capability NET_ADMIN and a writable /proc/sys)")
    })
}

/// Programs other than a proxy that run as this user in this network namespace, as "nginx (pid 77)", as far as can be seen.
#[must_use]
pub fn programs_of(uid: u32) -> Vec<String> {
    let Ok(ours) = fs::read_link("/proc/thread-self/ns/net") else {
        return Vec::new();
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let program = |entry: fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let is_his = pid != std::process::id() && entry.metadata().ok()?.uid() == uid;
        let path = entry.path();
        if !is_his || fs::read_link(path.join("ns/net")).ok()? != ours {
            return None;
        }
        let name = fs::read_to_string(path.join("comm")).ok()?;
        let name = name.trim();
        (!PROXIES.contains(&name)).then(|| format!("{name} (pid {pid})"))
    };
    entries.filter_map(program).collect()
}

/// Programs whose traffic is to bypass the rules, by the names that the kernel knows them by.
const PROXIES: [&str; 4] = ["tulle-proxy", "linkerd2-proxy", "linkerd2-proxy-", "linkerd-await"];
const IPV6_INTERFACES: &str = "/proc/sys/net/ipv6/conf";
const CLOSE_WAIT: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait";
