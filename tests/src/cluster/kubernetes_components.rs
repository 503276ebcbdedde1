//! Starts the components of Kubernetes' control plane: etcd, the API server, the controller manager and the scheduler.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::Api;
use tulle_core::netns::Namespace;

use super::addresses::ClusterAddresses;
use super::audit::{self, AuditPolicy, AuditRecord};
use super::component::{Component, ProcessLifetime};
use super::kubeconfig;
use super::pki::{Pki, Subject};
use crate::programs;

/// Settings shared by the components of Kubernetes' control plane.
pub(super) struct ComponentContext<'a> {
    /// Holds certificates, logs, data and kubeconfigs.
    pub(super) dir: &'a Path,
    /// The network namespace of the processes; `None` is the namespace of this process.
    pub(super) namespace: Option<&'a Namespace>,
    pub(super) addresses: ClusterAddresses,
    /// The address that all components listen on.
    pub(super) addr: IpAddr,
    pub(super) lifetime: ProcessLifetime,
}

impl ComponentContext<'_> {
    /// Creates the directories, the CA, and the credentials of the components and of an administrator.
    pub(super) fn prepare(&self, audit: AuditPolicy) -> anyhow::Result<Pki> {
        for name in ["log", "etcd"] {
            let dir = self.dir.join(name);
            fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
        }
        let pki = Pki::create(&self.pki())?;
        let service = self.addresses.api_service();
        let service_name = format!("kubernetes.default.svc.{}", self.addresses.domain);
        let subject = |common_name| Subject {
            common_name,
            ..Subject::default()
        };
        pki.issue(
            "apiserver",
            Subject {
                names: &[
                    "kubernetes",
                    "kubernetes.default",
                    "kubernetes.default.svc",
                    &service_name,
                    "localhost",
                ],
                addrs: &[service, IpAddr::from([127, 0, 0, 1]), self.addr],
                ..subject("kube-apiserver")
            },
        )?;
        pki.create_front_proxy()?;
        let organization = Some("system:masters"); // the group of administrators
        for name in ["admin", "kube-apiserver-kubelet-client"] {
            pki.issue(
                name,
                Subject {
                    organization,
                    ..subject(name)
                },
            )?;
        }
        for user in [
            "system:kube-controller-manager",
            "system:kube-scheduler",
            "system:kube-proxy",
        ] {
            pki.issue(file_name(user), subject(user))?;
        }
        for name in ["admin", "kube-controller-manager", "kube-scheduler", "kube-proxy"] {
            self.kubeconfig(name)?;
        }
        audit.write(&self.dir.join("audit-policy.json"))?;
        Ok(pki)
    }

    /// Writes `<name>.conf` for the client with the certificate of this name.
    pub(super) fn kubeconfig(&self, name: &str) -> anyhow::Result<()> {
        let user = kubeconfig::certificate_user(&self.pki(), name);
        let ca = self.pki().join("ca.crt");
        kubeconfig::write(&self.kubeconfig_path(name), &self.url(), &ca, &user)
    }

    /// The path of the kubeconfig of the client with this name.
    pub(super) fn kubeconfig_path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.conf"))
    }

    pub(super) fn url(&self) -> String {
        format!("https://{}:{API_PORT}", self.addr)
    }

    pub(super) fn pki(&self) -> PathBuf {
        self.dir.join("pki")
    }

    /// All audit records so far.
    pub(super) fn audit_log(&self) -> anyhow::Result<Vec<AuditRecord>> {
        audit::read(&self.dir.join(AUDIT_LOG))
    }

    pub(super) fn etcd(&self) -> anyhow::Result<Component> {
        // Only the API server uses this address.
        let (client_url, peer_url) = (self.etcd_url(), format!("http://{}:2380", self.addr));
        let mut command = self.command("etcd")?;
        command
            .args(["--data-dir", "etcd", "--unsafe-no-fsync"])
            .args([
                "--listen-client-urls",
                &client_url,
                "--advertise-client-urls",
                &client_url,
            ])
            .args([
                "--listen-peer-urls",
                &peer_url,
                "--initial-advertise-peer-urls",
                &peer_url,
            ])
            .args(["--initial-cluster", &format!("default={peer_url}")]);
        self.start("etcd", command)
    }

    /// `advertised` is the address that pods use.
    pub(super) fn api_server(&self, advertised: IpAddr) -> anyhow::Result<Component> {
        let pki = |name: &str| self.pki().join(name).display().to_string();
        let mut command = self.command("kube-apiserver")?;
        command.args([
            format!("--etcd-servers={}", self.etcd_url()),
            format!("--bind-address={}", self.addr),
            format!("--secure-port={API_PORT}"),
            format!("--advertise-address={advertised}"),
            format!("--tls-cert-file={}", pki("apiserver.crt")),
            format!("--tls-private-key-file={}", pki("apiserver.key")),
            format!("--client-ca-file={}", pki("ca.crt")),
            format!("--service-account-key-file={}", pki("sa.pub")),
            format!("--service-account-signing-key-file={}", pki("sa.key")),
            format!(
                "--service-account-issuer=https://kubernetes.default.svc.{}",
                self.addresses.domain
            ),
            format!("--service-cluster-ip-range={}", self.addresses.services().join(",")),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            "--allow-privileged=true".to_owned(),
            format!(
                "--kubelet-client-certificate={}",
                pki("kube-apiserver-kubelet-client.crt")
            ),
            format!("--kubelet-client-key={}", pki("kube-apiserver-kubelet-client.key")),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
            format!("--requestheader-client-ca-file={}", pki("front-proxy-ca.crt")),
            "--requestheader-allowed-names=front-proxy-client".to_owned(),
            "--requestheader-username-headers=X-Remote-User".to_owned(),
            "--requestheader-group-headers=X-Remote-Group".to_owned(),
            "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
            format!("--proxy-client-cert-file={}", pki("front-proxy-client.crt")),
            format!("--proxy-client-key-file={}", pki("front-proxy-client.key")),
            "--audit-policy-file=audit-policy.json".to_owned(),
            format!("--audit-log-path={AUDIT_LOG}"),
            // Readers of the log need all requests up to now.
            "--audit-log-mode=blocking-strict".to_owned(),
        ]);
        self.start("kube-apiserver", command)
    }

    /// `controllers` is the value of the flag of this name (`*,-name`).
    pub(super) fn controller_manager(&self, controllers: &str) -> anyhow::Result<Component> {
        let conf = self.kubeconfig_path("kube-controller-manager").display().to_string();
        let pki = |name: &str| self.pki().join(name).display().to_string();
        let mut command = self.command("kube-controller-manager")?;
        command.args([
            format!("--kubeconfig={conf}"),
            format!("--authentication-kubeconfig={conf}"),
            format!("--authorization-kubeconfig={conf}"),
            format!("--bind-address={}", self.addr),
            format!("--service-account-private-key-file={}", pki("sa.key")),
            format!("--root-ca-file={}", pki("ca.crt")),
            format!("--cluster-signing-cert-file={}", pki("ca.crt")),
            format!("--cluster-signing-key-file={}", pki("ca.key")),
            format!("--service-cluster-ip-range={}", self.addresses.services().join(",")),
            format!("--controllers={controllers}"),
            "--use-service-account-credentials".to_owned(),
            "--leader-elect=false".to_owned(),
        ]);
        self.start("kube-controller-manager", command)
    }

    pub(super) fn scheduler(&self) -> anyhow::Result<Component> {
        let conf = self.kubeconfig_path("kube-scheduler").display().to_string();
        let mut command = self.command("kube-scheduler")?;
        command.args([
            format!("--kubeconfig={conf}"),
            format!("--authentication-kubeconfig={conf}"),
            format!("--authorization-kubeconfig={conf}"),
            format!("--bind-address={}", self.addr),
            "--leader-elect=false".to_owned(),
        ]);
        self.start("kube-scheduler", command)
    }

    /// A command that starts in this namespace and in the directory of the cluster.
    pub(super) fn command(&self, program: &str) -> anyhow::Result<Command> {
        let path = programs::find(program)?;
        let mut command = match self.namespace {
            Some(namespace) => namespace.command(path),
            None => Command::new(path),
        };
        command.current_dir(self.dir);
        Ok(command)
    }

    pub(super) fn start(&self, name: &str, command: Command) -> anyhow::Result<Component> {
        Component::start(name, command, self.dir, self.lifetime)
    }

    fn etcd_url(&self) -> String {
        format!("http://{}:2379", self.addr)
    }
}

/// Checks whether the API server is ready, which includes its post-start hooks.
pub(super) async fn check_ready(client: &kube::Client) -> anyhow::Result<()> {
    let request = http::Request::get("/readyz").body(Vec::new())?;
    client.request_text(request).await?;
    Ok(())
}

/// Waits until pods of the default namespace can be created.
pub(super) async fn wait_for_default_account(controllers: &mut Component, client: kube::Client) -> anyhow::Result<()> {
    let accounts = Api::<ServiceAccount>::namespaced(client, "default");
    let exists = async || {
        let account = accounts.get("default").await;
        account.map(drop).context("the default service account")
    };
    controllers
        .wait_until("the default service account exists", exists)
        .await
}

/// The file name for the certificate of a system user.
fn file_name(user: &str) -> &str {
    user.strip_prefix("system:").unwrap_or(user)
}

pub(super) const API_PORT: u16 = 6443;
/// Below the directory of the cluster.
pub(super) const AUDIT_LOG: &str = "log/audit.log";
