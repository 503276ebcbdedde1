//! The network namespace: enters it, detects its features and processes, and changes one sysctl.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::Context;
use nix::sched::{CloneFlags, setns};

/// Moves this process into a network namespace. It must be called before any thread is started.
///
/// # Errors
/// If the path is not a network namespace, or the capability `SYS_ADMIN` is missing.
pub fn enter(path: &Path) -> anyhow::Result<()> {
    let file = File::open(path).with_context(|| format!("opening the network namespace {}", path.display()))?;
    setns(&file, CloneFlags::CLONE_NEWNET).with_context(|| {
        format!(
            "entering the network namespace {} (needs the capability SYS_ADMIN)",
            path.display()
        )
    })
}

/// Whether IPv6 is enabled on an interface of the namespace other than loopback, or for new interfaces (`default`).
///
/// Each interface has its own setting; `all` only contains the value that was last written to it.
#[must_use]
pub fn has_ipv6() -> bool {
    // The directory belongs to the namespace of the reading thread.
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

/// Sets the connection tracking timeout of connections in CLOSE_WAIT, in seconds.
///
/// # Errors
/// If the sysctl does not exist or cannot be written.
pub fn set_close_wait_timeout(seconds: u32) -> anyhow::Result<()> {
    fs::write(CLOSE_WAIT_TIMEOUT_PATH, seconds.to_string()).with_context(|| {
        format!(
            "writing {seconds} to {CLOSE_WAIT_TIMEOUT_PATH} (needs the capability NET_ADMIN and a writable /proc/sys)"
        )
    })
}

/// Programs other than a proxy that run as this user in this network namespace, as "nginx (pid 77)"; unreadable processes
/// are skipped.
#[must_use]
pub fn processes_of_user(uid: u32) -> Vec<String> {
    let Ok(own_namespace) = fs::read_link("/proc/thread-self/ns/net") else {
        return Vec::new();
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let program = |entry: fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let is_user_process = pid != std::process::id() && entry.metadata().ok()?.uid() == uid;
        let path = entry.path();
        if !is_user_process || fs::read_link(path.join("ns/net")).ok()? != own_namespace {
            return None;
        }
        let name = fs::read_to_string(path.join("comm")).ok()?;
        let name = name.trim();
        (!PROXY_PROCESS_NAMES.contains(&name)).then(|| format!("{name} (pid {pid})"))
    };
    entries.filter_map(program).collect()
}

/// Programs that may run as the proxy's user, by their names in `/proc`. The kernel truncates these names to 15 bytes, for
/// example `linkerd2-proxy-identity` to `linkerd2-proxy-`.
const PROXY_PROCESS_NAMES: [&str; 4] = ["tulle-proxy", "linkerd2-proxy", "linkerd2-proxy-", "linkerd-await"];
const IPV6_INTERFACES: &str = "/proc/sys/net/ipv6/conf";
const CLOSE_WAIT_TIMEOUT_PATH: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait";
