//! A node: a network namespace with containerd, the kubelet and kube-proxy.

use std::ffi::OsStr;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use serde_json::json;
use tulle_core::netns::{Host, Namespace, VirtualNetwork};

use super::addresses::ClusterAddresses;
use super::cgroups;
use super::component::Component;
use super::kubernetes_components::ComponentContext;
use super::pki::{Pki, Subject};
use super::slot::Slot;
use crate::programs;

pub struct Node {
    pub(super) name: String,
    number: u8,
    addresses: ClusterAddresses,
    addr: IpAddr,
    dir: PathBuf,
    cgroup: String,
    pub(super) namespace: Arc<Namespace>,
}

impl Node {
    /// `node1`, as in `kubectl get nodes`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address of the node itself.
    pub fn addr(&self) -> IpAddr {
        self.addr
    }

    /// The network namespace of the node. Pods, Services and nodes are reachable from it.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Connects a node to the network of all nodes, with routes to the pods of the others.
    pub(super) fn create(
        virtual_network: &mut VirtualNetwork,
        slot: &Slot,
        addresses: ClusterAddresses,
        number: u8,
        nodes: u8,
    ) -> anyhow::Result<Self> {
        let name = format!("node{number}");
        let addrs = addresses.interface_of_node(number);
        // The kubelet and the API server need a default route, even if no host has this address.
        let routers = addresses.all_of_node(ClusterAddresses::ROUTER);
        let routers: Vec<String> = routers.iter().map(ToString::to_string).collect();
        let namespace = virtual_network.add_host_with_routes(Host {
            name: &name,
            addrs: &addrs.iter().map(String::as_str).collect::<Vec<_>>(),
            gateways: &routers.iter().map(String::as_str).collect::<Vec<_>>(),
        })?;
        let others = (1..=nodes).filter(|other| *other != number);
        let routes = others.map(|other| route_to_pods(addresses, other));
        namespace.ip(&routes.collect::<String>())?;
        forward_packets(&namespace)?;
        namespace.run(|| fs::write("/proc/sys/net/ipv4/conf/all/route_localnet", "1"))??;
        let dir = slot.dir().join(&name);
        for sub in ["cni", "kubelet", "pod-logs", "plugins"] {
            let path = dir.join(sub);
            fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
        }
        let cgroup = format!("{}{number}", slot.cgroup_prefix());
        cgroups::create(&cgroup)?;
        Ok(Self {
            name,
            number,
            addresses,
            addr: addresses.node(number),
            dir,
            cgroup,
            namespace,
        })
    }

    /// Creates its certificate and kubeconfig.
    pub(super) fn create_credentials(&self, context: &ComponentContext<'_>, pki: &Pki) -> anyhow::Result<()> {
        let subject = Subject {
            common_name: &format!("system:node:{}", self.name),
            organization: Some("system:nodes"),
            names: &[&self.name],
            addrs: &[self.addr],
        };
        pki.issue(&self.name, subject)?;
        context.kubeconfig(&self.name)
    }

    pub(super) fn containerd(&self, context: &ComponentContext<'_>) -> anyhow::Result<Component> {
        let below = |path: &str| self.dir.join(path).display().to_string();
        let config = format!(
            r#"version = 2
root = "{root}"
state = "{state}"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  # Root may lack CAP_SYS_RESOURCE and then may not lower the OOM score; without this setting no container would start.
  restrict_oom_score_adj = true
  sandbox_image = "{SANDBOX_IMAGE}"
  netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{cni}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  Root = "{runc}"
"#,
            root = below(CONTAINERD_ROOT),
            state = below(CONTAINERD_STATE),
            socket = self.socket().display(),
            cni = below("cni"),
            runc = below("runc"),
        );
        self.write("containerd.toml", &config)?;
        // Every pod has its own link and is routed, so that connection tracking sees all traffic, including traffic to Services.
        let ranges = self.addresses.pods_of_node(self.number).into_iter();
        let ranges: Vec<_> = ranges.map(|subnet| [json!({"subnet": subnet})]).collect();
        let routes = ["0.0.0.0/0", "::/0"].map(|destination| json!({"dst": destination}));
        let routes = &routes[..ranges.len()];
        let network = json!({
            "cniVersion": "0.4.0",
            "name": self.cgroup,
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": false,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": below("addresses"),
                        "ranges": ranges,
                        "routes": routes,
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": true}},
            ],
        });
        self.write("cni/10-pods.conflist", &network.to_string())?;
        let mut command = self.command(context, "containerd")?;
        command.args(["--config", &below("containerd.toml")]);
        self.start(context, "containerd", command)
    }

    pub(super) fn kubelet(&self, context: &ComponentContext<'_>) -> anyhow::Result<Component> {
        let below = |path: &str| self.dir.join(path);
        let pki = |file: String| context.pki().join(file);
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": false},
                "webhook": {"enabled": true},
                "x509": {"clientCAFile": pki("ca.crt".to_owned())},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": format!("/{}", self.cgroup),
            "clusterDNS": [self.addresses.dns_service()],
            "clusterDomain": self.addresses.domain,
            "containerRuntimeEndpoint": format!("unix://{}", self.socket().display()),
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "100Mi"},
            "failSwapOn": false,
            // Images are loaded from files and cannot be pulled again.
            "imageGCHighThresholdPercent": 100,
            "maxPods": 200,
            "podLogsDir": below("pod-logs"),
            "resolvConf": below("resolv.conf"),
            // Pods see a changed Secret soon.
            "syncFrequency": "10s",
            "tlsCertFile": pki(format!("{}.crt", self.name)),
            "tlsPrivateKeyFile": pki(format!("{}.key", self.name)),
            "volumePluginDir": below("plugins"),
        });
        self.write("resolv.conf", "nameserver 127.0.0.1\n")?;
        self.write("kubelet.json", &config.to_string())?;
        let node_addrs = self.addresses.all_of_node(self.number);
        let node_addrs: Vec<String> = node_addrs.iter().map(ToString::to_string).collect();
        let mut command = self.command(context, "kubelet")?;
        command.args([
            format!("--config={}", below("kubelet.json").display()),
            format!("--kubeconfig={}", context.kubeconfig_path(&self.name).display()),
            format!("--root-dir={}", below("kubelet").display()),
            format!("--hostname-override={}", self.name),
            format!("--node-ip={}", node_addrs.join(",")),
            format!(
                "--node-labels=topology.kubernetes.io/zone={}",
                self.addresses.zone(self.number)
            ),
        ]);
        self.start(context, "kubelet", command)
    }

    /// Fails until the kubelet listens on its device plugin socket, one of its last start steps.
    pub(super) fn listens_for_device_plugins(&self) -> anyhow::Result<()> {
        let sockets = self
            .namespace
            .run(|| fs::read_to_string("/proc/thread-self/net/unix"))?
            .context("reading the sockets of a node")?;
        ensure!(
            sockets.contains("/device-plugins/kubelet.sock"),
            "the kubelet has no device plugin socket yet"
        );
        Ok(())
    }

    pub(super) fn kube_proxy(&self, context: &ComponentContext<'_>) -> anyhow::Result<Component> {
        let config = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": context.kubeconfig_path("kube-proxy")},
            "clusterCIDR": self.addresses.pods().join(","),
            "conntrack": {"maxPerCore": 0},
            "hostnameOverride": self.name,
            "mode": "nftables",
        });
        self.write("kube-proxy.json", &config.to_string())?;
        // A data race can end the start of kube-proxy 1.34: its `NodeConfig` may get events while handlers are added. Usually the
        // kubelet starts its container again. Here a shell starts it again, once.
        let mut command = self.command(context, "sh")?;
        command
            .args(["-c", r#"setpriv --pdeathsig=KILL "$@" || exec "$@""#, "sh"])
            .arg(programs::find("kube-proxy")?)
            .arg(format!("--config={}", self.dir.join("kube-proxy.json").display()));
        self.start(context, "kube-proxy", command)
    }

    /// Fails if containerd does not answer.
    pub(super) fn check_containerd(&self) -> anyhow::Result<()> {
        ctr(&self.socket(), &[OsStr::new("version")])
    }

    /// Loads the image of a docker archive on this node.
    pub(super) fn load_image(&self, archive: &Path) -> anyhow::Result<()> {
        load_image(&self.socket(), archive)
    }

    fn socket(&self) -> PathBuf {
        self.dir.join(CONTAINERD_SOCKET)
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.dir.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    }

    /// A command in this node's namespace. Its working directory marks it as part of the cluster.
    fn command(&self, context: &ComponentContext<'_>, program: &str) -> anyhow::Result<Command> {
        let node_context = ComponentContext {
            namespace: Some(&self.namespace),
            ..*context
        };
        node_context.command(program)
    }

    fn start(&self, context: &ComponentContext<'_>, program: &str, command: Command) -> anyhow::Result<Component> {
        context.start(&format!("{program}-{}", self.name), command)
    }
}

/// Loads the image of a docker archive into the containerd of a socket.
pub(super) fn load_image(socket: &Path, archive: &Path) -> anyhow::Result<()> {
    ctr(socket, &["images".as_ref(), "import".as_ref(), archive.as_os_str()])
}

fn ctr(socket: &Path, args: &[&OsStr]) -> anyhow::Result<()> {
    let output = Command::new("ctr")
        .arg("--address")
        .arg(socket)
        .args(["--namespace", "k8s.io"])
        .args(args)
        .output()
        .context("starting ctr (package containerd)")?;
    if !output.status.success() {
        let answer = String::from_utf8_lossy(&output.stderr);
        bail!("ctr {args:?} at {}: {}", socket.display(), answer.trim());
    }
    Ok(())
}

/// The sockets of all containerd processes of the cluster in `dir`.
pub(super) fn sockets(dir: &Path) -> Vec<PathBuf> {
    let nodes = fs::read_dir(dir).into_iter().flatten().flatten();
    let sockets = nodes.map(|node| node.path().join(CONTAINERD_SOCKET));
    sockets.filter(|socket| socket.exists()).collect()
}

/// The directories of all containers on all nodes of the cluster in `dir`.
pub(super) fn containers(dir: &Path) -> Vec<PathBuf> {
    let entries = |dir: &Path| {
        fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
    };
    let of_node = |node: PathBuf| {
        let tasks = node.join(CONTAINERD_STATE).join("io.containerd.runtime.v2.task/k8s.io");
        entries(&tasks).collect::<Vec<_>>()
    };
    entries(dir).flat_map(of_node).collect()
}

/// Adds a host beside the nodes, with routes to their pods. The first node forwards to Services.
pub(super) fn add_machine(
    virtual_network: &mut VirtualNetwork,
    name: &str,
    addr: Ipv4Addr,
    nodes: &[Node],
) -> anyhow::Result<Arc<Namespace>> {
    let host = virtual_network.add_host_with_routes(Host {
        name,
        addrs: &[&format!("{addr}/24")],
        gateways: &[&nodes[0].addr.to_string()],
    })?;
    let routes = nodes.iter().map(|node| route_to_pods(node.addresses, node.number));
    host.ip(&routes.collect::<String>())?;
    Ok(host)
}

/// The lines of `ip -batch` for the routes to the pods of node `number`.
pub(super) fn route_to_pods(addresses: ClusterAddresses, number: u8) -> String {
    routes(&addresses.pods_of_node(number), &addresses.all_of_node(number))
}

/// The lines of `ip -batch` for the routes to these networks through a node, which have an entry for each address family.
pub(super) fn routes(networks: &[String], node: &[IpAddr]) -> String {
    let routes = networks.iter().zip(node);
    routes
        .map(|(network, addr)| format!("route add {network} via {addr}\n"))
        .collect()
}

/// Makes a namespace forward packets of both address families.
pub(super) fn forward_packets(namespace: &Namespace) -> anyhow::Result<()> {
    namespace.run(|| {
        for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            let path = format!("/proc/sys/net/{setting}");
            fs::write(&path, "1").with_context(|| format!("writing {path}"))?;
        }
        anyhow::Ok(())
    })?
}

pub(super) const SANDBOX_IMAGE: &str = "tulle.test/pause:local";
const CONTAINERD_SOCKET: &str = "containerd.sock";
const CONTAINERD_ROOT: &str = "containerd/root";
const CONTAINERD_STATE: &str = "containerd/state";
