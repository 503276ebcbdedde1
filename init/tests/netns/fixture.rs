//! A pod, a peer, stub servers that send their names, and clients with a user id.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use socket2::{Domain, Socket, Type};
use tokio::time::Instant;
use tulle_core::addr;
use tulle_core::netns::{Host, Namespace, VirtualNetwork};

/// All backends. The plain programs are one of the iptables backends under another name.
pub(crate) const BACKENDS: [&str; 3] = ["nft", "iptables-nft", "iptables-legacy"];
pub(crate) const PROXY_UID: u32 = 2102;
pub(crate) const APP: Client = Client {
    uid: 1000,
    gid: 1000,
    source: None,
};
pub(crate) const ROOT: Client = Client {
    uid: 0,
    gid: 0,
    source: None,
};
pub(crate) const PROXY: Client = Client {
    uid: PROXY_UID,
    gid: PROXY_UID,
    source: None,
};
/// The usual flags of a run that applies or checks rules.
pub(crate) const FLAGS: [&str; 6] = ["-p", "4143", "-o", "4140", "-u", "2102"];
pub(crate) const BIN: &str = env!("CARGO_BIN_EXE_tulle-init");

/// The addresses of one family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Family {
    pub(crate) pod: [IpAddr; 2],
    pub(crate) peer: IpAddr,
    /// Another address of the peer, in a network of its own.
    pub(crate) other_peer: IpAddr,
    pub(crate) loopbacks: &'static [&'static str],
}

/// A pod with a stub proxy and an application, and a peer with servers, on one bridge.
pub(crate) struct Fixture {
    pub(crate) network: VirtualNetwork,
    pub(crate) pod: Arc<Namespace>,
    pub(crate) peer: Arc<Namespace>,
}

/// The ids of a client process, and optionally its source address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Client {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) source: Option<IpAddr>,
}

/// A stub server's answer to a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) server: String,
    /// The original destination, read by the socket option of the client's family.
    pub(crate) orig_dst: Option<SocketAddr>,
}

/// Whether the test can run; prints a message if not. In CI it must run.
pub(crate) fn can_run() -> bool {
    const WHY: &str = "network namespaces need root; run this test as root";
    let is_root = Uid::effective().is_root();
    if !is_root {
        assert!(std::env::var_os("CI").is_none(), "{WHY}");
        eprintln!("\n*** SKIPPED: {WHY} ***\n");
    }
    is_root
}

pub(crate) fn families() -> [Family; 2] {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    [
        Family {
            pod: [ip("10.77.0.2"), ip("10.77.0.3")],
            peer: ip("10.77.0.1"),
            other_peer: ip("10.78.0.1"),
            loopbacks: &["127.0.0.1", "127.0.0.5"],
        },
        Family {
            pod: [ip("fd77::2"), ip("fd77::3")],
            peer: ip("fd77::1"),
            other_peer: ip("fd78::1"),
            loopbacks: &["::1"],
        },
    ]
}

impl Fixture {
    /// Creates a pod and a peer, each the default route of the other, without servers.
    pub(crate) fn bare() -> Self {
        let mut network = VirtualNetwork::new("ti-t-").unwrap();
        let pod = Host {
            name: "pod",
            addrs: &["10.77.0.2/24", "10.77.0.3/24", "fd77::2/64", "fd77::3/64"],
            gateways: &["10.77.0.1", "fd77::1"],
        };
        let peer = Host {
            name: "peer",
            addrs: &["10.77.0.1/24", "10.78.0.1/24", "fd77::1/64", "fd78::1/64"],
            gateways: &["10.77.0.2", "fd77::2"],
        };
        let pod = network.add_host_with_routes(pod).unwrap();
        let peer = network.add_host_with_routes(peer).unwrap();
        Self { network, pod, peer }
    }

    /// Creates a pod and a peer. The pod has the proxy's listeners and an application on these ports, and the peer has servers
    /// on the same ports.
    pub(crate) fn new(ports: &[u16]) -> Self {
        let fixture = Self::bare();
        fixture.start_proxy();
        for port in ports {
            serve(&fixture.pod, "app", &format!("[::]:{port}"));
            serve(&fixture.peer, "peer", &format!("[::]:{port}"));
        }
        fixture
    }

    /// Starts the listeners of the stub proxy.
    pub(crate) fn start_proxy(&self) {
        serve(&self.pod, "inbound", "[::]:4143");
        serve(&self.pod, "outbound", "127.0.0.1:4140");
        serve(&self.pod, "outbound", "[::1]:4140");
    }

    /// Adds a namespace that reaches the peer only through the pod.
    pub(crate) fn add_inner_namespace(&mut self) -> Arc<Namespace> {
        let inner = self.network.add_isolated("inner").unwrap();
        let name = inner.name().to_owned();
        let link = format!("link add eth1 type veth peer name eth0 netns {name}\nlink set eth1 up\n");
        self.pod.ip(&link).unwrap();
        inner.ip("link set eth0 up\n").unwrap();
        inner.wait_for_link("eth0").unwrap();
        self.pod.wait_for_link("eth1").unwrap();
        let pod = "addr add 10.79.0.1/24 dev eth1\naddr add fd79::1/64 dev eth1 nodad\n";
        self.pod.ip(pod).unwrap();
        let lines = "addr add 10.79.0.2/24 dev eth0\naddr add fd79::2/64 dev eth0 nodad\n\
                     route add default via 10.79.0.1\nroute add default via fd79::1\n";
        inner.ip(lines).unwrap();
        self.sysctl("net/ipv4/ip_forward", "1");
        self.sysctl("net/ipv6/conf/all/forwarding", "1");
        inner
    }

    /// Writes a sysctl of the pod.
    pub(crate) fn sysctl(&self, name: &str, value: &str) {
        let path = format!("/proc/sys/{name}");
        self.pod
            .run(|| fs::write(&path, value))
            .unwrap()
            .unwrap_or_else(|error| panic!("{path}: {error}"));
    }

    /// Runs the program in the pod with only these flags.
    pub(crate) fn init(&self, flags: &[&str]) -> Output {
        self.pod.command(BIN).args(flags).output().unwrap()
    }

    /// Applies rules with the usual flags and more; panics on failure.
    pub(crate) fn apply(&self, backend: &str, more: &[&str]) -> String {
        let output = self.init(&flags(backend, more));
        assert_success(&output);
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn exit_code(&self, flags: &[&str]) -> i32 {
        self.init(flags).status.code().unwrap()
    }

    /// Runs the program in the pod with these flags; returns exit code and report.
    pub(crate) fn report(&self, flags: &[&str]) -> (i32, serde_json::Value) {
        let output = self.init(&[flags, &["--report", "json"]].concat());
        let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        (output.status.code().unwrap(), report)
    }

    /// Runs a shell command in the pod; panics on failure.
    pub(crate) fn sh(&self, script: &str) -> String {
        let output = self.pod.command("sh").args(["-ec", script]).output().unwrap();
        assert_success(&output);
        String::from_utf8(output.stdout).unwrap()
    }

    /// All rules of the pod, of both families and all backends, without timestamps and counters.
    ///
    /// Built-in tables and chains are included only if they have rules, because iptables creates them on demand.
    pub(crate) fn dump(&self) -> String {
        let listed = self.sh(
            "nft list tables | grep -vE ' ip6? (nat|mangle|filter|raw)$' | while read table; do nft list $table; done",
        );
        let saved = self.sh(
            "for tool in iptables-nft ip6tables-nft iptables-legacy ip6tables-legacy; do for table in nat mangle filter raw; do
               case $tool in
                 iptables-legacy) grep -qx $table /proc/thread-self/net/ip_tables_names 2>/dev/null || continue ;;
                 ip6tables-legacy) grep -qx $table /proc/thread-self/net/ip6_tables_names 2>/dev/null || continue ;;
               esac
               $tool-save -t $table 2>/dev/null | sed -n \"/^-A\\|^:.* - /s/^/$tool $table /p\"
             done; done",
        );
        let lines = listed.lines().chain(saved.lines());
        lines.map(without_counts).collect::<Vec<_>>().join("\n")
    }
}

fn without_counts(line: &str) -> String {
    let mut words = line.split(' ').peekable();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        kept.push(word);
        if matches!(word, "packets" | "bytes") {
            words.next();
        }
    }
    kept.join(" ")
}

/// The usual flags for a backend, with more.
pub(crate) fn flags<'a>(backend: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    // Verification opens a connection, which would change counters; it has tests of its own.
    FLAGS
        .iter()
        .copied()
        .chain(["--backend", backend, "--verify=false"])
        .chain(more.iter().copied())
        .collect()
}

pub(crate) fn assert_success(output: &Output) {
    assert!(
        output.status.success(),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Starts a server that sends its name, the original destination and the client's address on every connection, then echoes.
/// Returns the counter of its connections.
pub(crate) fn serve(namespace: &Namespace, name: &'static str, addr: &str) -> Arc<AtomicUsize> {
    let listener = namespace.run(|| TcpListener::bind(addr)).unwrap();
    serve_on(
        listener.unwrap_or_else(|error| panic!("{name} at {addr}: {error}")),
        name,
    )
}

pub(crate) fn serve_on(listener: TcpListener, name: &'static str) -> Arc<AtomicUsize> {
    let accepted = Arc::new(AtomicUsize::new(0));
    let count = accepted.clone();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            count.fetch_add(1, Ordering::Relaxed);
            thread::Builder::new()
                .stack_size(64 << 10)
                .spawn(move || answer(stream, name))
                .unwrap();
        }
    });
    accepted
}

fn answer(mut stream: TcpStream, name: &str) -> io::Result<()> {
    let peer = addr::canonical(stream.peer_addr()?);
    let orig_dst = if peer.is_ipv4() {
        getsockopt(&stream, sockopt::OriginalDst)
            .map(|addr| SocketAddr::from((addr.sin_addr.s_addr.to_ne_bytes(), u16::from_be(addr.sin_port))))
    } else {
        getsockopt(&stream, sockopt::Ip6tOriginalDst)
            .map(|addr| SocketAddr::from((addr.sin6_addr.s6_addr, u16::from_be(addr.sin6_port))))
    };
    let orig_dst = orig_dst.map(|addr| addr.to_string()).unwrap_or_default();
    stream.write_all(format!("{name} {orig_dst} {peer}\n").as_bytes())?;
    let mut buffer = vec![0; 16 << 10];
    loop {
        match stream.read(&mut buffer)? {
            0 => return stream.shutdown(Shutdown::Both),
            len => stream.write_all(&buffer[..len])?,
        }
    }
}

/// Connects and returns the server's answer.
pub(crate) fn fetch_answer(namespace: &Namespace, client: Client, to: SocketAddr) -> io::Result<Answer> {
    let (stream, answer) = open(namespace, client, to)?;
    // Closes with a reset, so that thousands of connections do not wait in TIME_WAIT.
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    Ok(answer)
}

/// Connects and keeps the connection after the server's answer.
pub(crate) fn open(namespace: &Namespace, client: Client, to: SocketAddr) -> io::Result<(TcpStream, Answer)> {
    namespace.run(|| dial(client, to)).unwrap()
}

/// As [`open`], on a thread that is already in the namespace.
pub(crate) fn dial(client: Client, to: SocketAddr) -> io::Result<(TcpStream, Answer)> {
    // A socket gets the fsuid and fsgid of the thread that creates it.
    setfsgid(Gid::from_raw(client.gid));
    setfsuid(Uid::from_raw(client.uid));
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    if let Some(source) = client.source {
        socket.bind(&SocketAddr::new(source, 0).into())?;
    }
    socket.connect_timeout(&to.into(), TIMEOUT)?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut line = String::new();
    BufReader::with_capacity(128, &stream).read_line(&mut line)?;
    let mut words = line.trim_end().split(' ');
    let answer = Answer {
        server: words.next().unwrap_or_default().to_owned(),
        orig_dst: words.next().and_then(|word| word.parse().ok()),
    };
    // Only destinations are translated. The source port may differ nevertheless: connection tracking changes it if two
    // connections from the same port are translated to the same destination.
    if let Some(seen) = words.next() {
        let seen: SocketAddr = seen.parse().unwrap();
        assert_eq!(
            seen.ip(),
            stream.local_addr()?.ip(),
            "{} sees another client address",
            answer.server
        );
    }
    Ok((stream, answer))
}

/// Sends bytes and expects them back.
pub(crate) fn echo(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    let mut writer = stream.try_clone()?;
    let mut back = vec![0; bytes.len()];
    thread::scope(|scope| {
        let written = scope.spawn(move || writer.write_all(bytes));
        stream.read_exact(&mut back)?;
        written.join().unwrap()
    })?;
    assert_eq!(back, bytes);
    Ok(())
}

/// The expected answer to a connection to `to`.
pub(crate) fn expected_answer(server: &str, to: SocketAddr) -> Answer {
    Answer {
        server: server.to_owned(),
        orig_dst: Some(to),
    }
}

/// Expects an answer from the server of this name. The proxy must report the original destination.
pub(crate) fn expect(namespace: &Namespace, client: Client, to: impl Into<SocketAddr>, server: &str, case: &str) {
    let to = to.into();
    let answer =
        fetch_answer(namespace, client, to).unwrap_or_else(|error| panic!("{case}: {client:?} to {to}: {error}"));
    assert_eq!(answer.server, server, "{case}: {client:?} to {to}");
    if ["inbound", "outbound"].contains(&server) {
        assert_eq!(answer, expected_answer(server, to), "{case}: {client:?}");
    }
}

/// Waits for a condition, for at most 10 seconds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

const TIMEOUT: Duration = Duration::from_secs(5);
