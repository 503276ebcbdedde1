//! Network namespaces for the demo, the tests and the bench.
//!
//! A [`Namespace`] has a name under `/run/netns`, so that `ip netns` and `nsenter` find it; dropping the value removes it.
//! A [`VirtualNetwork`] is a bridge in its own namespace with hosts attached. It does not change the machine's network.
//! Links and addresses are created by the `ip` program: rtnetlink would save only a few milliseconds per host.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{panic, process, thread};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::unistd::{Gid, Pid, Uid, getgid, getuid, setgroups, setresgid, setresuid};
use tokio::time::Instant;

/// A named network namespace. Dropping it removes the name; the kernel removes the content when no process is inside.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    fd: Arc<OwnedFd>,
}

/// A bridge in its own namespace, with hosts attached. Dropping it removes them all.
#[derive(Debug)]
pub struct VirtualNetwork {
    name_prefix: String,
    bridge: Namespace,
    n_ports: u32,
    hosts: Vec<Arc<Namespace>>,
}

/// One host of a [`VirtualNetwork`].
#[derive(Clone, Copy, Debug)]
pub struct Host<'a> {
    /// Unique within the network; part of the namespace's name.
    pub name: &'a str,
    /// Addresses of `eth0`, IPv4 and IPv6, each with its prefix length (`10.77.0.5/24`).
    pub addrs: &'a [&'a str],
    /// Default routes. Without one, the host reaches only its own link.
    pub gateways: &'a [&'a str],
}

/// An operation on a network namespace failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetnsError {
    #[error("starting {program:?}; is it installed?")]
    Program {
        program: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{program} refused {input:?}: {output}")]
    Refused {
        program: &'static str,
        input: String,
        output: String,
    },
    #[error("opening the network namespace {path:?}")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("entering the network namespace {name}")]
    Enter {
        name: String,
        #[source]
        source: nix::Error,
    },
    #[error("link {link} of {name} is not up after {LINK_UP_TIMEOUT:?}: {state}; is its peer up?")]
    LinkDown {
        name: String,
        link: &'static str,
        state: String,
    },
    #[error("{name} has no local route for its address {addr} after {LINK_UP_TIMEOUT:?}")]
    NoLocalRoute { name: String, addr: String },
    #[error("reading the names in {RUN_NETNS}")]
    List {
        #[source]
        source: io::Error,
    },
    #[error("`{program}` is missing (package uidmap); install it, or run as root")]
    NoMapProgram { program: &'static str },
    #[error(
        "{file} grants user {user} fewer than the {wanted} subordinate ids that are needed; run as root, or add the line {user}:100000:65536"
    )]
    NoSubordinateIds {
        file: &'static str,
        wanted: usize,
        user: String,
    },
    #[error(
        "starting {program:?} again in a new user namespace; the kernel may forbid user namespaces (user.max_user_namespaces)"
    )]
    UserNamespace {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("waiting for the process in the user namespace")]
    Wait {
        #[source]
        source: io::Error,
    },
}

impl Namespace {
    /// Creates an empty namespace with `lo` up.
    ///
    /// # Errors
    /// If the name is taken, or this process may not create namespaces.
    pub fn create(name: &str) -> Result<Self, NetnsError> {
        ip(Command::new(IP), &format!("netns add {name}\n"))?;
        let namespace = Self::open(name).inspect_err(|_| remove_name(name))?;
        namespace.ip("link set lo up\n")?;
        Ok(namespace)
    }

    /// The name, as `ip netns` lists it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path for `nsenter --net=`.
    pub fn path(&self) -> PathBuf {
        Path::new(RUN_NETNS).join(&self.name)
    }

    /// Runs a closure on a new thread inside the namespace. Sockets that it creates stay in the namespace.
    ///
    /// A panic of the closure propagates to the caller.
    ///
    /// # Errors
    /// If the namespace cannot be entered; the closure did not run.
    pub fn run<T: Send>(&self, inside: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        let on_thread = || setns(self.fd.as_fd(), CloneFlags::CLONE_NEWNET).map(|()| inside());
        match thread::scope(|scope| scope.spawn(on_thread).join()) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(source)) => Err(NetnsError::Enter {
                name: self.name.clone(),
                source,
            }),
            Err(panicked) => panic::resume_unwind(panicked),
        }
    }

    /// A command that runs inside the network namespace. Its other namespaces are those of the caller.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        let fd = self.fd.clone();
        before_exec(&mut command, move || Ok(setns(fd.as_fd(), CloneFlags::CLONE_NEWNET)?));
        command
    }

    /// Runs lines of `ip -batch` inside the namespace (`link add …`, `route add …`), until one fails. IPv6 addresses that they add
    /// with `nodad` to a link that is up can be used at once.
    ///
    /// # Errors
    /// If `ip` fails, with its output, or if the kernel does not make an address usable in time.
    pub fn ip(&self, lines: &str) -> Result<(), NetnsError> {
        ip(self.command(IP), lines)?;
        match lines.contains("nodad") {
            true => self.wait_for_ipv6_addresses(),
            false => Ok(()),
        }
    }

    /// Waits until the kernel has a local route for each global IPv6 address of a link that is up.
    ///
    /// The kernel adds these routes in a task of its own, after `ip` has returned. Until then, connections to the namespace's own
    /// addresses are sent out on the link.
    fn wait_for_ipv6_addresses(&self) -> Result<(), NetnsError> {
        let deadline = Instant::now() + LINK_UP_TIMEOUT;
        loop {
            let routes = self.output(&["-6", "route", "show", "table", "local"])?;
            let has_route = |addr: &&str| {
                routes
                    .lines()
                    .any(|route| route.split_whitespace().nth(1) == Some(*addr))
            };
            let links = self.output(&["-6", "addr", "show", "scope", "global"])?;
            let Some(missing) = addresses_of_links_that_are_up(&links).find(|addr| !has_route(addr)) else {
                return Ok(());
            };
            if Instant::now() >= deadline {
                return Err(NetnsError::NoLocalRoute {
                    name: self.name.clone(),
                    addr: missing.to_owned(),
                });
            }
            thread::sleep(LINK_UP_INTERVAL);
        }
    }

    /// Runs `ip` with these arguments inside the namespace and returns what it prints.
    fn output(&self, args: &[&str]) -> Result<String, NetnsError> {
        let output = self.command(IP).args(args).output();
        let output = output.map_err(|source| NetnsError::Program { program: IP, source })?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Waits until the kernel reports a link and its peer as up, which it does after `ip` has returned.
    ///
    /// # Errors
    /// If the link is not up in time.
    pub fn wait_for_link(&self, link: &'static str) -> Result<(), NetnsError> {
        let deadline = Instant::now() + LINK_UP_TIMEOUT;
        loop {
            let state = self.output(&["-br", "link", "show", link])?;
            if state.split_whitespace().nth(1) == Some("UP") {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(NetnsError::LinkDown {
                    name: self.name.clone(),
                    link,
                    state: state.trim_end().to_owned(),
                });
            }
            thread::sleep(LINK_UP_INTERVAL);
        }
    }

    fn open(name: &str) -> Result<Self, NetnsError> {
        let path = Path::new(RUN_NETNS).join(name);
        match File::open(&path) {
            Ok(file) => Ok(Self {
                name: name.to_owned(),
                fd: Arc::new(file.into()),
            }),
            Err(source) => Err(NetnsError::Open { path, source }),
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        remove_name(&self.name);
    }
}

impl VirtualNetwork {
    /// Creates the bridge. Namespace names contain the prefix and the id of this process, so that parallel tests do not
    /// collide.
    ///
    /// # Errors
    /// As [`Namespace::create`].
    pub fn new(prefix: &str) -> Result<Self, NetnsError> {
        let n = NEXT_NETWORK_ID.fetch_add(1, Ordering::Relaxed);
        let name_prefix = format!("{prefix}{}-{n}-", process::id());
        let bridge = Namespace::create(&format!("{name_prefix}bridge"))?;
        // With snooping, neighbour discovery needs a multicast querier; without it, the bridge floods.
        bridge.ip("link add br0 type bridge mcast_snooping 0\nlink set br0 up\n")?;
        Ok(Self {
            name_prefix,
            bridge,
            n_ports: 0,
            hosts: Vec::new(),
        })
    }

    /// Adds a host with one IPv4 address, an optional IPv6 address, and no default route.
    ///
    /// # Errors
    /// As [`VirtualNetwork::add_host_with_routes`].
    pub fn add_host(&mut self, name: &str, ip4: &str, ip6: Option<&str>) -> Result<Arc<Namespace>, NetnsError> {
        let addrs: Vec<&str> = [ip4].into_iter().chain(ip6).collect();
        self.add_host_with_routes(Host {
            name,
            addrs: &addrs,
            gateways: &[],
        })
    }

    /// Adds a host with these addresses and default routes: a namespace whose `eth0` is attached to the bridge.
    ///
    /// # Errors
    /// If the name is taken within the network, or an address is malformed.
    pub fn add_host_with_routes(&mut self, host: Host<'_>) -> Result<Arc<Namespace>, NetnsError> {
        let namespace = self.add_isolated(host.name)?;
        self.connect(&namespace, "eth0", host.addrs)?;
        let routes = host
            .gateways
            .iter()
            .map(|gateway| format!("route add default via {gateway}\n"));
        if !host.gateways.is_empty() {
            namespace.ip(&routes.collect::<String>())?;
        }
        Ok(namespace)
    }

    /// Connects a namespace, which can be a host of another network, to the bridge: adds a link of this name, with these addresses.
    ///
    /// # Errors
    /// If the namespace has a link of this name, or an address is malformed.
    pub fn connect(&mut self, namespace: &Namespace, link: &'static str, addrs: &[&str]) -> Result<(), NetnsError> {
        let port = format!("port{}", self.n_ports);
        self.n_ports += 1;
        let name = namespace.name();
        self.bridge.ip(&format!(
            "link add {port} type veth peer name {link} netns {name}\nlink set {port} master br0 up\n"
        ))?;
        let addrs = addrs.iter().map(|addr| match addr.contains(':') {
            // Duplicate address detection makes an address unusable for one second.
            true => format!("addr add {addr} dev {link} nodad\n"),
            false => format!("addr add {addr} dev {link}\n"),
        });
        namespace.ip(&format!("link set {link} up\n"))?;
        namespace.wait_for_link(link)?;
        namespace.ip(&addrs.collect::<String>())
    }

    /// Adds a namespace without a link to the bridge.
    ///
    /// # Errors
    /// As [`Namespace::create`].
    pub fn add_isolated(&mut self, name: &str) -> Result<Arc<Namespace>, NetnsError> {
        let namespace = Arc::new(Namespace::create(&format!("{}{name}", self.name_prefix))?);
        self.hosts.push(namespace.clone());
        Ok(namespace)
    }
}

impl Drop for VirtualNetwork {
    /// Also removes the names of hosts that are still referenced, so that no name remains in `ip netns` after a test.
    fn drop(&mut self) {
        for host in &self.hosts {
            remove_name(&host.name);
        }
    }
}

/// The addresses in the output of `ip -6 addr show` that belong to links which are up and connected.
fn addresses_of_links_that_are_up(ip_output: &str) -> impl Iterator<Item = &str> {
    let mut is_up = false;
    ip_output.lines().filter_map(move |line| {
        if !line.starts_with(' ') {
            is_up = line.contains("LOWER_UP") && !line.contains("state DOWN");
            return None;
        }
        let addr = line.trim_start().strip_prefix("inet6 ")?.split('/').next()?;
        is_up.then_some(addr)
    })
}

/// Removes namespaces that a killed process left behind, and returns their names.
///
/// Removes all namespaces whose name starts with the prefix, except those of a [`VirtualNetwork`] of another living process. It
/// must be called before this process creates such namespaces, because it removes these too. [`Namespace::create`] adds no
/// process id to the name, so its namespaces are removed even if their process lives.
///
/// # Errors
/// If the names cannot be listed. A missing directory is not an error.
pub fn remove_stale(prefix: &str) -> Result<Vec<String>, NetnsError> {
    let entries = match fs::read_dir(RUN_NETNS) {
        Ok(entries) => entries,
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(NetnsError::List { source }),
    };
    let mut removed = Vec::new();
    for entry in entries {
        let name = entry.map_err(|source| NetnsError::List { source })?.file_name();
        let Some(name) = name.to_str() else { continue };
        let Some(rest) = name.strip_prefix(prefix) else {
            continue;
        };
        let creator = rest.split('-').next().and_then(|pid| pid.parse::<u32>().ok());
        if creator.is_some_and(|pid| pid != process::id() && Path::new(&format!("/proc/{pid}")).exists()) {
            continue;
        }
        remove_name(name);
        removed.push(name.to_owned());
    }
    Ok(removed)
}

/// Runs this program again, with the same arguments, as root of new user, network and mount namespaces with an empty
/// `/run/netns`: forwards signals to it, and exits with its status. Returns `Ok` without doing anything if this process is root.
///
/// In the namespace, id 0 is the caller's own id, and each of `ids` (for users and groups) is one of the caller's subordinate
/// ids. It must be called before any thread is started.
///
/// # Errors
/// If `newuidmap` or `newgidmap` is missing, too few subordinate ids are granted, or the kernel forbids user namespaces.
pub fn rerun_as_namespace_root(ids: &[u32]) -> Result<(), NetnsError> {
    if Uid::effective().is_root() {
        return Ok(());
    }
    let id_maps = IdMaps {
        users: id_map(MapTool::USERS, getuid().as_raw(), ids)?,
        groups: id_map(MapTool::GROUPS, getgid().as_raw(), ids)?,
    };
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("/proc/self/exe"));
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD]);
    let child = spawn_in_user_namespace(&program, &id_maps, signals)?;
    forward_signals(child, &signals).map_err(|source| NetnsError::Wait { source })
}

/// Starts the program with the arguments of this process, as root in new namespaces. Blocks the signals in this process.
///
/// 1. The child creates its namespaces and sends its pid.
/// 2. A thread of this process writes the id maps of the child and reports the result to it.
/// 3. The child becomes root and executes the program; only then `spawn` returns.
fn spawn_in_user_namespace(program: &Path, id_maps: &IdMaps, signals: SigSet) -> Result<process::Child, NetnsError> {
    let failed = |source| NetnsError::UserNamespace {
        program: program.to_owned(),
        source,
    };
    let (mut from_child, to_parent) = io::pipe().map_err(failed)?;
    let (from_parent, mut to_child) = io::pipe().map_err(failed)?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1));
    before_exec(&mut command, move || {
        signals.thread_unblock()?; // the parent blocks them, and the child inherits the mask
        enter_namespaces_as_root(&to_parent, &from_parent)
    });
    signals.thread_block().map_err(|errno| failed(errno.into()))?;
    thread::scope(|scope| {
        let mapper = scope.spawn(move || {
            let mut pid = [0; 4];
            if from_child.read_exact(&mut pid).is_err() {
                return Ok(()); // the child failed to create its namespaces; `spawn` returns the error
            }
            let mapped = id_maps.write(i32::from_ne_bytes(pid));
            to_child.write_all(&[u8::from(mapped.is_ok())]).map_err(failed)?;
            mapped
        });
        let spawned = command.spawn();
        drop(command); // closes the child's ends of the pipes, so that the mapper does not wait forever
        let mapped = mapper.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked));
        mapped?;
        spawned.map_err(failed)
    })
}

/// Runs in the child between fork and exec: creates the namespaces, waits for its ids, becomes root, mounts `/run/netns`.
fn enter_namespaces_as_root(mut to_parent: &io::PipeWriter, mut from_parent: &io::PipeReader) -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
    to_parent.write_all(&Pid::this().as_raw().to_ne_bytes())?;
    let mut mapped = [0];
    from_parent.read_exact(&mut mapped)?;
    if mapped == [0] {
        return Err(nix::Error::ECANCELED.into());
    }
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)?;
    prctl::set_pdeathsig(Signal::SIGTERM)?;
    let none = None::<&Path>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let tmpfs = |at: &str| mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"));
    // Before the first `ip netns add` on the machine there is no `/run/netns`. This process may not create it in the machine's
    // `/run`, so it gets a `/run` of its own.
    match tmpfs(RUN_NETNS) {
        Err(nix::Error::ENOENT) => {
            tmpfs("/run")?;
            nix::unistd::mkdir(RUN_NETNS, nix::sys::stat::Mode::from_bits_truncate(0o755))?;
        }
        other => other?,
    }
    Ok(())
}

/// Forwards signals until the child ends, then exits with its status.
fn forward_signals(mut child: process::Child, signals: &SigSet) -> io::Result<()> {
    let signal_fd = SignalFd::new(signals)?;
    let pid = Pid::from_raw(child.id().cast_signed());
    loop {
        if let Some(status) = child.try_wait()? {
            use std::os::unix::process::ExitStatusExt;
            process::exit(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)));
        }
        let Some(info) = signal_fd.read_signal()? else { continue };
        let signal = Signal::try_from(info.ssi_signo.cast_signed())?;
        // The kernel sends a signal of the terminal (Ctrl-C) to the child itself. It is not forwarded, because the child treats a
        // second signal as a request to exit immediately.
        if signal != Signal::SIGCHLD && info.ssi_code != SI_KERNEL {
            kill(pid, signal)?;
        }
    }
}

/// The program and the file for one of the two id maps of a user namespace.
#[derive(Clone, Copy)]
struct MapTool {
    program: &'static str,
    subid_file: &'static str,
}

impl MapTool {
    const USERS: Self = Self {
        program: "newuidmap",
        subid_file: "/etc/subuid",
    };
    const GROUPS: Self = Self {
        program: "newgidmap",
        subid_file: "/etc/subgid",
    };
}

/// The id maps of a user namespace, each a list of `[inside, outside, count]`.
struct IdMaps {
    users: Vec<[u32; 3]>,
    groups: Vec<[u32; 3]>,
}

impl IdMaps {
    /// Writes the maps of the process `pid`, with `newuidmap` and `newgidmap`.
    fn write(&self, pid: i32) -> Result<(), NetnsError> {
        write_map(MapTool::USERS, pid, &self.users)?;
        write_map(MapTool::GROUPS, pid, &self.groups)
    }
}

/// The id map: inside the namespace, id 0 is the caller's own id, and each of `ids` is one of the caller's subordinate ids.
fn id_map(tool: MapTool, own_id: u32, ids: &[u32]) -> Result<Vec<[u32; 3]>, NetnsError> {
    let grants = fs::read_to_string(tool.subid_file).unwrap_or_default();
    let user = nix::unistd::User::from_uid(getuid())
        .ok()
        .flatten()
        .map(|user| user.name);
    let number = getuid().to_string();
    let user = user.unwrap_or_else(|| number.clone());
    let outside: Vec<u32> = subordinate_ids(&grants, &[&user, &number]).take(ids.len()).collect();
    if outside.len() < ids.len() {
        return Err(NetnsError::NoSubordinateIds {
            file: tool.subid_file,
            wanted: ids.len(),
            user,
        });
    }
    let others = ids.iter().zip(outside).map(|(inside, outside)| [*inside, outside, 1]);
    Ok([[0, own_id, 1]].into_iter().chain(others).collect())
}

/// All ids that lines `owner:first:count` grant to one of these owners.
fn subordinate_ids<'a>(grants: &'a str, owners: &'a [&'a str]) -> impl Iterator<Item = u32> + 'a {
    grants.lines().flat_map(move |line| {
        let mut fields = line.trim().split(':');
        let owned = fields.next().is_some_and(|owner| owners.contains(&owner));
        let mut number = || {
            fields
                .next()
                .and_then(|field| field.parse::<u32>().ok())
                .filter(|_| owned)
        };
        let (first, count) = (number().unwrap_or(0), number().unwrap_or(0));
        first..first.saturating_add(count)
    })
}

fn write_map(tool: MapTool, pid: i32, map: &[[u32; 3]]) -> Result<(), NetnsError> {
    let arguments = map.iter().flatten().map(u32::to_string);
    let output = Command::new(tool.program).arg(pid.to_string()).args(arguments).output();
    let output = output.map_err(|source| map_program_error(tool.program, source))?;
    if output.status.success() {
        return Ok(());
    }
    Err(NetnsError::Refused {
        program: tool.program,
        input: format!("{map:?}"),
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

fn map_program_error(program: &'static str, source: io::Error) -> NetnsError {
    match source.kind() {
        io::ErrorKind::NotFound => NetnsError::NoMapProgram { program },
        _ => NetnsError::Program { program, source },
    }
}

fn ip(mut command: Command, lines: &str) -> Result<(), NetnsError> {
    let failed = |source| NetnsError::Program { program: IP, source };
    let command = command
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // If `ip` rejects the batch early, it closes the pipe; its output explains the failure better than `EPIPE`.
        let _ = stdin.write_all(lines.as_bytes());
    }
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    Err(NetnsError::Refused {
        program: IP,
        input: lines.to_owned(),
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Removes a name. Errors are ignored, because drops cannot report them; [`remove_stale`] removes what remains.
fn remove_name(name: &str) {
    let path = Path::new(RUN_NETNS).join(name);
    let _ = umount2(&path, MntFlags::MNT_DETACH);
    let _ = fs::remove_file(path);
}

/// Adds a step that runs in the child between fork and exec.
#[allow(unsafe_code)]
fn before_exec(command: &mut Command, step: impl FnMut() -> io::Result<()> + Send + Sync + 'static) {
    // SAFETY: after fork only async-signal-safe functions may run. Both callers in this module only make system calls
    // (setns, unshare, getpid, read, write, setgroups, setres*id, mount, mkdir, prctl, sigprocmask); they do not allocate and
    // take no lock.
    unsafe {
        command.pre_exec(step);
    }
}

const IP: &str = "ip";
const RUN_NETNS: &str = "/run/netns";
const LINK_UP_TIMEOUT: Duration = Duration::from_secs(30);
const LINK_UP_INTERVAL: Duration = Duration::from_millis(1);
/// `si_code` of a signal from the kernel, such as that of Ctrl-C.
const SI_KERNEL: i32 = 0x80;
static NEXT_NETWORK_ID: AtomicU32 = AtomicU32::new(0);

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn has_root() -> bool {
        let is_root = Uid::effective().is_root();
        if !is_root {
            assert!(std::env::var_os("CI").is_none(), "network namespaces need root");
            eprintln!("SKIPPED: network namespaces need root");
        }
        is_root
    }

    #[test]
    fn addresses_of_a_link_without_carrier_are_not_waited_for() {
        let shown = "1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 state UNKNOWN qlen 1000\n    \
                     inet6 fd99::1/128 scope global nodad \n       valid_lft forever preferred_lft forever\n\
                     2: eth0@if2: <NO-CARRIER,BROADCAST,MULTICAST,UP> mtu 1500 state LOWERLAYERDOWN qlen 1000\n    \
                     inet6 fd77::1/64 scope global nodad tentative \n       valid_lft forever preferred_lft forever\n\
                     3: eth1@if3: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 state UP qlen 1000\n    \
                     inet6 fd77::2/64 scope global nodad \n    inet6 fd77::3/64 scope global nodad \n";
        let found: Vec<&str> = addresses_of_links_that_are_up(shown).collect();
        assert_eq!(found, ["fd99::1", "fd77::2", "fd77::3"]);
    }

    #[test]
    fn hosts_of_a_network_reach_each_other_over_both_families_and_are_removed() {
        if !has_root() {
            return;
        }
        let mut network = VirtualNetwork::new("ti-core-").unwrap();
        let a = network.add_host("a", "10.77.0.1/24", Some("fd77::1/64")).unwrap();
        let b = network.add_host("b", "10.77.0.2/24", Some("fd77::2/64")).unwrap();
        for addr in ["10.77.0.2:80", "[fd77::2]:80"] {
            let listener = b.run(|| TcpListener::bind(addr)).unwrap().unwrap();
            a.run(|| TcpStream::connect(addr)).unwrap().unwrap();
            listener.accept().unwrap();
        }
        let output = b.command("ip").args(["-br", "addr", "show", "eth0"]).output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains("10.77.0.2/24"));
        let paths = [a.path(), b.path(), network.bridge.path()];
        assert!(paths.iter().all(|path| path.exists()));
        drop(network);
        assert!(!paths.iter().any(|path| path.exists()));
    }

    #[test]
    fn a_panic_of_the_closure_propagates_and_the_namespace_is_removed() {
        if !has_root() {
            return;
        }
        let name = format!("ti-core-panic-{}", process::id());
        let caught = panic::catch_unwind(|| {
            let namespace = Namespace::create(&name).unwrap();
            namespace.run(|| panic!("inside")).unwrap();
        });
        assert_eq!(caught.unwrap_err().downcast_ref(), Some(&"inside"));
        assert!(!Path::new(RUN_NETNS).join(name).exists());
    }

    #[test]
    fn remove_stale_keeps_the_namespaces_of_living_processes() {
        if !has_root() {
            return;
        }
        let prefix = format!("ti-core-sweep-{}-", process::id());
        let leak = |name: &str| std::mem::forget(Namespace::create(&format!("{prefix}{name}")).unwrap());
        leak("plain");
        leak("1-0-living"); // process 1 is always alive
        leak("4194999-0-dead"); // larger than the largest pid
        let mut removed = remove_stale(&prefix).unwrap();
        removed.sort();
        assert_eq!(removed, [format!("{prefix}4194999-0-dead"), format!("{prefix}plain")]);
        remove_name(&format!("{prefix}1-0-living"));
    }

    #[test]
    fn the_package_is_suggested_only_if_the_program_is_missing() {
        let error = |kind| map_program_error("newuidmap", io::Error::from(kind)).to_string();
        assert!(error(io::ErrorKind::NotFound).contains("package uidmap"));
        assert!(!error(io::ErrorKind::PermissionDenied).contains("uidmap)"));
    }

    #[test]
    fn subordinate_ids_are_those_of_the_owner_only() {
        let grants = "root:1:5\nann:100000:2\n1000:200000:3\nann:oops\n";
        let ids: Vec<u32> = subordinate_ids(grants, &["ann", "1000"]).collect();
        assert_eq!(ids, [100_000, 100_001, 200_000, 200_001, 200_002]);
    }
}
