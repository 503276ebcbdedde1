//! The server to which a query is sent, and the output format of its response.

use std::future::Future;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::ValueEnum;
use http::uri::Authority;
use kube::ResourceExt as _;
use tonic::Status;
use tulle_control::tls::client::{self, Channel};
use tulle_core::addr::Addr;
use tulle_core::duration;
use tulle_core::names::{label, port};

use crate::kubernetes::forward::{self, ForwardedPort};
use crate::kubernetes::resource::{Kind, ResourceRef};
use crate::kubernetes::{self, Cluster};

#[derive(clap::Args, Clone, Debug)]
pub(super) struct ServerArgs {
    /// The address that serves endpoints and profiles without Kubernetes, such as 127.0.0.1:8086
    #[arg(long, global = true, value_name = "HOST:PORT")]
    destination_addr: Option<Addr>,
    /// The address that serves policies without Kubernetes, such as 127.0.0.1:8090
    #[arg(long, global = true, value_name = "HOST:PORT")]
    policy_addr: Option<Addr>,
    /// The pod of the control plane to query [default: the first ready one]
    #[arg(long, global = true, value_name = "POD")]
    destination_pod: Option<String>,
    /// Output format
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// How long to wait for the response
    #[arg(long, global = true, value_name = "DURATION", default_value = "5s", value_parser = duration::parse)]
    wait: Duration,
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Output {
    /// A table, or YAML if the response has no table form
    #[value(alias = "yaml")]
    Table,
    Json,
}

pub(super) struct QueryContext<'a> {
    pub(super) args: &'a ServerArgs,
    pub(super) flags: &'a kubernetes::Flags,
}

impl QueryContext<'_> {
    pub(super) async fn connect_to_destination(&self) -> anyhow::Result<Channel> {
        let addr = self.args.destination_addr.as_ref().or(self.flags.api_addr.as_ref());
        self.connect(addr, port::DESTINATION, "--destination-addr").await
    }

    pub(super) async fn connect_to_policy(&self) -> anyhow::Result<Channel> {
        self.connect(self.args.policy_addr.as_ref(), port::POLICY, "--policy-addr")
            .await
    }

    /// Whether the address of the policy service is given, so that no cluster is needed.
    pub(super) fn has_policy_addr(&self) -> bool {
        self.args.policy_addr.is_some()
    }

    pub(super) async fn connect(&self, addr: Option<&Addr>, port: u16, flag: &str) -> anyhow::Result<Channel> {
        if let Some(addr) = addr {
            let connected = client::connect_plaintext(addr).await;
            return connected.with_context(|| format!("connecting to the control plane at {addr}"));
        }
        let cluster = self.cluster(flag, port).await?;
        let pod = match &self.args.destination_pod {
            Some(pod) => pod.clone(),
            None => destination_pod(&cluster).await?,
        };
        let ForwardedPort { stream, .. } =
            forward::open(&cluster, &cluster.control_plane_namespace, &pod, port).await?;
        let authority = Authority::from_static("localhost");
        client::connect_over(stream, &authority).await.with_context(|| {
            format!(
                "connecting to port {port} of pod {}/{pod}",
                cluster.control_plane_namespace
            )
        })
    }

    pub(super) async fn cluster(&self, flag: &str, port: u16) -> anyhow::Result<Cluster> {
        let cluster = self.flags.connect().await;
        cluster.with_context(|| {
            format!("querying a control plane on Kubernetes; without Kubernetes, use {flag} 127.0.0.1:{port}")
        })
    }

    pub(super) fn output(&self) -> Output {
        self.args.output
    }

    /// Waits for a response, not longer than `--wait`, and converts a gRPC status to an error.
    pub(super) async fn with_timeout<T>(
        &self,
        api: &str,
        exchange: impl Future<Output = Result<T, Status>>,
    ) -> anyhow::Result<T> {
        match tokio::time::timeout(self.args.wait, exchange).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(status)) => Err(status_error(api, &status)),
            Err(_) => Err(anyhow!("{api} error: no response within {:?}", self.args.wait)),
        }
    }
}

/// Formats a gRPC status as Linkerd does: `Destination API error: Invalid authority: foo`.
pub(super) fn status_error(api: &str, status: &Status) -> anyhow::Error {
    match status.message() {
        "" => anyhow!("{api} error: {:?}", status.code()),
        message => anyhow!("{api} error: {message}"),
    }
}

/// Finds a ready pod of the destination service.
async fn destination_pod(cluster: &Cluster) -> anyhow::Result<String> {
    let all_pods = ResourceRef {
        kind: Kind::Pod,
        name: None,
    };
    let pods = all_pods.pods(cluster, &cluster.control_plane_namespace).await?;
    let ready = pods.iter().find(|pod| {
        let component = pod.labels().get(label::CONTROL_PLANE_COMPONENT).map(String::as_str);
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let ready = conditions
            .into_iter()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True");
        component == Some("destination") && ready
    });
    let pod = ready.with_context(|| {
        format!(
            "namespace {} has no ready pod of linkerd-destination; `tulle check` shows why; use -L for another namespace",
            cluster.control_plane_namespace
        )
    })?;
    Ok(pod.name_any())
}

/// Formats a response as JSON or, if a table was requested, as YAML.
pub(super) fn format_response(value: &serde_json::Value, output: Output) -> anyhow::Result<String> {
    Ok(match output {
        Output::Json => serde_json::to_string_pretty(value).context("writing JSON")? + "\n",
        Output::Table => serde_yaml_ng::to_string(value).context("writing YAML")?,
    })
}
