//! An API server without nodes: objects are stored, admitted and watched as in any cluster, but no pod runs.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{fs, process};

use anyhow::{Context as _, bail, ensure};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ListParams, ObjectMeta, PostParams};
use serde_json::json;
use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::{Instant, sleep};

use super::addresses::ClusterAddresses;
use super::audit::{AuditPolicy, AuditRecord};
use super::component::{Component, ProcessLifetime};
use super::kubeconfig;
use super::kubernetes_components::{API_PORT, ComponentContext, check_ready, wait_for_default_account};
use crate::{commands, programs};

/// etcd and an API server. Dropping it stops both and removes all files that they wrote.
///
/// Each has its own loopback address, so many can run at the same time, up to four in a process.
/// If this process is killed, the kernel kills them too, and the next start of an API server removes the files.
pub struct ApiServer {
    // Fields drop in declaration order: each process before the one it connects to, the directory last.
    controllers: Option<Component>,
    server: Component,
    etcd: Component,
    client: kube::Client,
    addr: IpAddr,
    dir: TempDir,
}

/// Options of an [`ApiServer`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    pub controllers: Controllers,
    pub audit: AuditPolicy,
}

/// Which controllers act on objects after they are stored.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Controllers {
    /// No controllers: a Deployment gets no pods, and dependents of a deleted object stay.
    #[default]
    None,
    /// The controller manager, without the controllers that delete pods that no node runs.
    All,
}

impl ApiServer {
    /// Starts an API server with the defaults: no controllers.
    ///
    /// # Errors
    /// Fails if a program is missing or does not become ready; the error contains the end of its log.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_with(Options::default()).await
    }

    /// Starts an API server with options.
    ///
    /// # Errors
    /// The same as [`ApiServer::start`].
    pub async fn start_with(options: Options) -> anyhow::Result<Self> {
        remove_stale_dirs()?;
        let prefix = format!("{DIRECTORY_PREFIX}{}-", process::id());
        let dir = tempfile::Builder::new()
            .prefix(&prefix)
            .tempdir()
            .context("creating a directory")?;
        let addr = free_addr()?;
        let context = ComponentContext {
            dir: dir.path(),
            namespace: None,
            addresses: ClusterAddresses::FIRST,
            addr,
            lifetime: ProcessLifetime::KilledWithParent,
        };
        context.prepare(options.audit)?;
        let mut etcd = context.etcd()?;
        let mut server = context.api_server(ADVERTISED_IP)?;
        let client = kubeconfig::client(&context.kubeconfig_path("admin")).await?;
        server
            .wait_until("readiness", async || {
                etcd.check_alive()?;
                check_ready(&client).await
            })
            .await?;
        let mut controllers = match options.controllers {
            Controllers::None => None,
            Controllers::All => Some(context.controller_manager(CONTROLLERS_WITHOUT_NODES)?),
        };
        match &mut controllers {
            None => create_account(&client, "default", "default").await?,
            Some(controllers) => wait_for_default_account(controllers, client.clone()).await?,
        }
        Ok(Self {
            controllers,
            server,
            etcd,
            client,
            addr,
            dir,
        })
    }

    /// A client with administrator rights.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.context().kubeconfig_path("admin")
    }

    /// The URL of the API server: `https://127.x.y.z:6443`.
    pub fn url(&self) -> String {
        self.context().url()
    }

    /// The path of the CA certificate that signed the server's certificate, PEM.
    pub fn ca(&self) -> PathBuf {
        self.context().pki().join("ca.crt")
    }

    /// A directory for files of a test, removed with the server.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Creates a namespace with its `default` service account, because no pod is admitted without one.
    ///
    /// # Errors
    /// Fails if the API server refuses.
    pub async fn create_namespace(&self, name: &str) -> anyhow::Result<()> {
        create_namespace(&self.client, name).await
    }

    /// Writes a kubeconfig with a token of a service account, and creates the account if it is missing.
    ///
    /// # Errors
    /// Fails if the API server refuses.
    pub async fn service_account_kubeconfig(&self, namespace: &str, account: &str) -> anyhow::Result<PathBuf> {
        let token = self.token(namespace, account, &[]).await?;
        let path = self.context().kubeconfig_path(&format!("{namespace}-{account}"));
        kubeconfig::write(&path, &self.url(), &self.ca(), &json!({"token": token}))?;
        Ok(path)
    }

    /// Creates a token of a service account, valid for one hour, and creates the account if it is missing.
    ///
    /// Without audiences the token is for the API server itself.
    ///
    /// # Errors
    /// Fails if the API server refuses.
    pub async fn token(&self, namespace: &str, account: &str, audiences: &[&str]) -> anyhow::Result<String> {
        create_account(&self.client, namespace, account).await?;
        let accounts = Api::<ServiceAccount>::namespaced(self.client(), namespace);
        let request = TokenRequest {
            spec: TokenRequestSpec {
                audiences: audiences.iter().map(|&audience| audience.to_owned()).collect(),
                ..TokenRequestSpec::default()
            },
            ..TokenRequest::default()
        };
        let answer = accounts
            .create_token_request(account, &PostParams::default(), &request)
            .await?;
        Ok(answer.status.context("a token request without an answer")?.token)
    }

    /// Waits until every custom resource can be used.
    ///
    /// # Errors
    /// Fails if one is not available after a minute.
    pub async fn wait_for_custom_resources(&self) -> anyhow::Result<()> {
        let definitions = Api::<CustomResourceDefinition>::all(self.client());
        let is_established = |definition: &CustomResourceDefinition| {
            let conditions = definition
                .status
                .iter()
                .flat_map(|status| status.conditions.iter().flatten());
            let mut established = conditions.filter(|one| one.type_ == "Established");
            established.any(|one| one.status == "True")
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let all = definitions.list(&ListParams::default()).await?.items;
            let Some(missing) = all.iter().find(|one| !is_established(one)) else {
                return Ok(());
            };
            ensure!(
                Instant::now() < deadline,
                "not established: {:?}",
                missing.metadata.name
            );
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Runs `kubectl` as the administrator and returns its standard output.
    ///
    /// # Errors
    /// Fails if the command fails, or does not end within two minutes; the error contains its output.
    pub async fn kubectl(&self, args: &[&str]) -> anyhow::Result<String> {
        let mut kubectl = Command::new(programs::find("kubectl")?);
        kubectl
            .arg("--kubeconfig")
            .arg(self.kubeconfig())
            .args(args)
            .current_dir(self.dir());
        let line = format!("kubectl {}", args.join(" "));
        let output = commands::output(&line, kubectl).await?;
        if !output.status.success() {
            let answer = String::from_utf8_lossy(&output.stderr);
            bail!("{line}: {}", answer.trim());
        }
        String::from_utf8(output.stdout).context("kubectl's output")
    }

    /// The audit records so far; the audit policy selects which requests are recorded.
    ///
    /// # Errors
    /// Fails if the log cannot be read.
    pub fn audit_log(&self) -> anyhow::Result<Vec<AuditRecord>> {
        self.context().audit_log()
    }

    /// Checks that no process of the server has exited.
    ///
    /// # Errors
    /// Fails if a process has exited; the error contains the end of its log.
    pub fn check_alive(&mut self) -> anyhow::Result<()> {
        for component in [&mut self.etcd, &mut self.server]
            .into_iter()
            .chain(&mut self.controllers)
        {
            component.check_alive()?;
        }
        Ok(())
    }

    fn context(&self) -> ComponentContext<'_> {
        ComponentContext {
            dir: self.dir.path(),
            namespace: None,
            addresses: ClusterAddresses::FIRST,
            addr: self.addr,
            lifetime: ProcessLifetime::KilledWithParent,
        }
    }
}

/// Creates a namespace with its `default` service account.
///
/// # Errors
/// Fails if the API server refuses.
pub async fn create_namespace(client: &kube::Client, name: &str) -> anyhow::Result<()> {
    let namespace = Namespace {
        metadata: metadata_with_name(name),
        ..Namespace::default()
    };
    let namespaces = Api::<Namespace>::all(client.clone());
    namespaces.create(&PostParams::default(), &namespace).await?;
    create_account(client, name, "default").await
}

/// Creates a service account, which pods need. Another client may have created it already.
///
/// # Errors
/// Fails if the API server refuses.
pub async fn create_account(client: &kube::Client, namespace: &str, name: &str) -> anyhow::Result<()> {
    let accounts = Api::<ServiceAccount>::namespaced(client.clone(), namespace);
    let account = ServiceAccount {
        metadata: metadata_with_name(name),
        ..ServiceAccount::default()
    };
    match accounts.create(&PostParams::default(), &account).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(error).with_context(|| format!("creating the service account {name}")),
    }
}

fn metadata_with_name(name: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        ..ObjectMeta::default()
    }
}

/// A loopback address that no other server uses, from the process id (22 bits) and a counter.
fn free_addr() -> anyhow::Result<IpAddr> {
    for _ in 0..4 {
        let n = NEXT_ADDRESS.fetch_add(1, Ordering::Relaxed) % 4;
        let [_, b, c, d] = (process::id() << 2 | n).to_be_bytes();
        let addr = IpAddr::from(Ipv4Addr::new(127, b, c, d));
        if TcpListener::bind((addr, API_PORT)).is_ok() {
            return Ok(addr);
        }
    }
    bail!("a process can run at most four API servers")
}

/// Removes the directories of killed processes.
fn remove_stale_dirs() -> anyhow::Result<()> {
    let dir = std::env::temp_dir();
    let entries = fs::read_dir(&dir).with_context(|| format!("reading {}", dir.display()))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix(DIRECTORY_PREFIX)?.split('-').next());
        let Some(pid) = pid else { continue };
        if !Path::new("/proc").join(pid).exists() {
            // Another test may be removing the directory at the same time.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

const DIRECTORY_PREFIX: &str = "tulle-api-server-";
/// Endpoints of the Service `kubernetes` may not be loopback addresses. This address is reserved for documentation and
/// not reachable.
const ADVERTISED_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
/// Disables the controllers that delete pods without a live node.
const CONTROLLERS_WITHOUT_NODES: &str =
    "*,-pod-garbage-collector-controller,-node-lifecycle-controller,-taint-eviction-controller";
static NEXT_ADDRESS: AtomicU32 = AtomicU32::new(0);
