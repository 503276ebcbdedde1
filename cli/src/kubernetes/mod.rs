//! Access to the cluster: connects to it, lists objects, and explains errors of the API server.

pub(crate) mod forward;
pub(crate) mod resource;

use std::fmt::Debug;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::de::DeserializeOwned;
use tulle_control::kubernetes::connect;
use tulle_control::resources::Kind;
use tulle_core::addr::Addr;
use tulle_core::error_chain::ErrorChain;
use tulle_core::logging;
use tulle_core::names::variable;

#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Cluster options")]
pub(crate) struct Flags {
    /// The namespace of the control plane
    #[arg(
        short = 'L',
        long,
        global = true,
        env = variable::NAMESPACE,
        value_name = "NAMESPACE",
        default_value = "linkerd"
    )]
    pub(crate) linkerd_namespace: String,
    /// The kubeconfig file [default: $KUBECONFIG or ~/.kube/config]
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig file
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// The user to act as
    #[arg(long = "as", global = true, value_name = "USER")]
    as_user: Option<String>,
    /// A group to act as a member of; may be repeated
    #[arg(long = "as-group", global = true, value_name = "GROUP", requires = "as_user")]
    as_groups: Vec<String>,
    /// Only for `tulle diagnostics endpoints` and `tulle diagnostics profile`: query the destination service at this address, as with
    /// --destination-addr, instead of through a port forwarded by the API server
    #[arg(long, global = true, value_name = "HOST:PORT")]
    pub(crate) api_addr: Option<Addr>,
    /// Print each request to the API server on standard error
    #[arg(long, global = true)]
    verbose: bool,
}

/// A connection to a cluster.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: Client,
    /// The namespace of the control plane.
    pub(crate) control_plane_namespace: String,
    /// The namespace of the kubeconfig's context.
    pub(crate) namespace: String,
}

impl Flags {
    /// Creates a client for the cluster. No request is sent yet.
    ///
    /// # Errors
    /// Fails if there is no kubeconfig, or if it is incomplete.
    pub(crate) async fn connect(&self) -> anyhow::Result<Cluster> {
        if self.verbose {
            // Fails only if an earlier call has started logging.
            let _ = logging::init("warn,kube=debug", logging::Format::Plain);
        }
        let config = self.config().await?;
        let namespace = config.default_namespace.clone();
        Ok(Cluster {
            client: connect::builder(config)
                .context("creating a client for the cluster")?
                .build(),
            control_plane_namespace: self.linkerd_namespace.clone(),
            namespace,
        })
    }

    /// Reads how to reach the cluster.
    ///
    /// # Errors
    /// Fails if there is no kubeconfig, or if it is incomplete.
    pub(crate) async fn config(&self) -> anyhow::Result<Config> {
        self.read_config()
            .await
            .context("no cluster configured; pass --kubeconfig FILE and --context NAME, or check `kubectl config view`")
    }

    async fn read_config(&self) -> anyhow::Result<Config> {
        let options = KubeConfigOptions {
            context: self.context.clone(),
            ..KubeConfigOptions::default()
        };
        let mut config = match &self.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path)?;
                Config::from_custom_kubeconfig(file, &options).await?
            }
            None if self.context.is_some() => Config::from_kubeconfig(&options).await?,
            None => Config::infer().await?,
        };
        if let Some(user) = &self.as_user {
            config.auth_info.impersonate = Some(user.clone());
        }
        if !self.as_groups.is_empty() {
            config.auth_info.impersonate_groups = Some(self.as_groups.clone());
        }
        Ok(config)
    }
}

impl Cluster {
    /// Lists all objects of one kind in pages, to limit the size of a response.
    ///
    /// # Errors
    /// Fails with the error of the API server; see [`reason`].
    pub(crate) async fn list<K>(&self, api: &Api<K>, params: &ListParams) -> Result<Vec<K>, kube::Error>
    where
        K: Clone + DeserializeOwned + Debug,
    {
        let mut params = params.clone().limit(LIST_PAGE_SIZE);
        let mut found = Vec::new();
        loop {
            let page = api.list(&params).await?;
            found.extend(page.items);
            match page.metadata.continue_ {
                Some(token) if !token.is_empty() => params = params.continue_token(&token),
                _ => return Ok(found),
            }
        }
    }

    /// Lists the objects of a kind in one namespace or in all, in the newest version that the cluster serves. Returns an empty list if
    /// the kind is not installed.
    ///
    /// # Errors
    /// Fails if they cannot be listed.
    pub(crate) async fn list_kind(&self, namespace: Option<&str>, kind: Kind) -> anyhow::Result<Vec<DynamicObject>> {
        let info = kind.info();
        // `versions` is ordered from new to old.
        for version in info.versions {
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(info.group, version, info.name));
            let api: Api<DynamicObject> = match namespace {
                Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
                None => Api::all_with(self.client.clone(), &resource),
            };
            match self.list(&api, &ListParams::default()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {}
                listed => {
                    let scope = namespace.unwrap_or("all namespaces");
                    return listed
                        .map_err(|error| anyhow!("listing {} of {scope}: {}", resource.plural, reason(&error)));
                }
            }
        }
        Ok(Vec::new())
    }
}

/// Formats the error in one line, without the wrapping error types.
pub(crate) fn reason(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        kube::Error::Service(source) => ErrorChain(source.as_ref()).to_string(),
        other => ErrorChain(other).to_string(),
    }
}

const LIST_PAGE_SIZE: u32 = 500;

/// Maximum time to open a forwarded port, to exchange data through it, or to get the version of the API server, unless a command
/// has a limit of its own. Other requests to the API server do not have this limit.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
