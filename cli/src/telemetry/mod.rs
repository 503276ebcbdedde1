//! `tulle stat`, `edges`, `routes`, `tap` and `top`: the traffic of workloads, from the control plane's telemetry API.
//!
//! On Kubernetes, the API server forwards the request and RBAC decides what the user can read. Without Kubernetes, the control
//! plane serves clients on its own machine.

pub(crate) mod golden;
pub(crate) mod tap;
pub(crate) mod top;

use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use bytes::Bytes;
use clap::ValueEnum;
use form_urlencoded::Serializer;
use http::{Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use kube::client::Body;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tulle_core::addr::Addr;
use tulle_core::names::telemetry::{API_SERVICE, GROUP, VERSION};

use crate::kubernetes::resource::{Kind, ResourceRef};
use crate::kubernetes::{self, reason};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct WorkloadArgs {
    /// A workload, or all of a type: deploy/web, pod/web-1, sts, svc, ns [default: workloads of every type]
    #[arg(value_name = "TYPE/NAME", num_args = 0..=2)]
    resource: Vec<String>,
    /// The namespace of the workloads [default: the namespace of the kubeconfig's context, or all with --control]
    #[arg(short, long, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// Select workloads of all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// The address that serves telemetry without Kubernetes, such as 127.0.0.1:8089
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_control_addr)]
    control: Option<Addr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Table for people
    Table,
    /// Table for people, with more columns
    Wide,
    /// JSON for programs
    Json,
}

/// A telemetry API, and the workloads to query.
pub(crate) struct TelemetryQuery {
    endpoint: TelemetryEndpoint,
    /// All namespaces if absent.
    pub(crate) namespace: Option<String>,
    kind: String,
    name: Option<String>,
}

enum TelemetryEndpoint {
    Cluster(kube::Client),
    Local(Addr),
}

type ApiResponse = Response<UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>>;

impl WorkloadArgs {
    /// Selects the telemetry API, and the workloads to query.
    ///
    /// # Errors
    /// Fails if the resource is not valid, or if there is no cluster to query.
    pub(crate) async fn query(&self, flags: &kubernetes::Flags) -> anyhow::Result<TelemetryQuery> {
        let (kind, name) = parse_selection(&self.resource)?;
        let (endpoint, default_namespace) = match &self.control {
            Some(addr) => (TelemetryEndpoint::Local(addr.clone()), None),
            None => {
                let cluster = flags.connect().await.context(
                    "querying a control plane on Kubernetes; without Kubernetes, use --control 127.0.0.1:8089",
                )?;
                (TelemetryEndpoint::Cluster(cluster.client), Some(cluster.namespace))
            }
        };
        let namespace = match (kind.as_str(), &name) {
            ("namespace", Some(name)) => Some(name.clone()),
            ("namespace", None) => None,
            _ if self.all_namespaces => None,
            _ => self.namespace.clone().or(default_namespace),
        };
        Ok(TelemetryQuery {
            endpoint,
            namespace,
            kind,
            name,
        })
    }
}

/// Parses a resource. Returns the name of its kind in the API, and its own name.
fn parse_selection(words: &[String]) -> anyhow::Result<(String, Option<String>)> {
    let Some(first) = words.first() else {
        return Ok(("workload".to_owned(), None));
    };
    let (kind, name) = match (first.split_once('/'), words.get(1)) {
        (Some((kind, name)), None) => (kind, Some(name.to_owned())),
        (None, second) => (first.as_str(), second.cloned()),
        (Some(_), Some(_)) => bail!("expected a resource such as deploy/web, got {:?}", words.join(" ")),
    };
    // ExternalWorkloads count as workloads, although they have no pods.
    if ["ew", "externalworkload", "externalworkloads"].contains(&kind.to_ascii_lowercase().as_str()) {
        return Ok(("externalworkload".to_owned(), name));
    }
    let ResourceRef { kind, name } = ResourceRef::parse(words)?;
    Ok((kind.api_name().to_owned(), name))
}

/// Parses an address, with or without a scheme.
fn parse_control_addr(text: &str) -> Result<Addr, String> {
    let addr = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
    addr.parse()
        .map_err(|_| format!("{text:?} is not an address; expected HOST:PORT such as 127.0.0.1:8089"))
}

impl TelemetryQuery {
    /// The URL path of a resource, with these parameters and the selected workloads.
    fn path(&self, resource: &str, parameters: &[(&str, String)]) -> String {
        let namespace = match &self.namespace {
            Some(namespace) => format!("namespaces/{namespace}/"),
            None => String::new(),
        };
        let mut query = Serializer::new(String::new());
        query.append_pair("by", &self.kind);
        if let Some(name) = &self.name {
            query.append_pair("name", name);
        }
        query.extend_pairs(parameters);
        format!("/apis/{GROUP}/{VERSION}/{namespace}{resource}?{}", query.finish())
    }

    /// Sends one query.
    ///
    /// # Errors
    /// Fails if no server responds, or if the server rejects the request. The error contains the server's message.
    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        resource: &str,
        parameters: &[(&str, String)],
    ) -> anyhow::Result<T> {
        let response = async {
            let response = self.open_stream(resource, parameters).await?;
            let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await;
            body.map_err(|err| anyhow!(err)).context("reading the response")
        };
        let body = timeout(REQUEST_TIMEOUT, response)
            .await
            .with_context(|| format!("no response within {REQUEST_TIMEOUT:?}"))??;
        serde_json::from_slice(&body.to_bytes())
            .context("the response has a format that this version of tulle does not support")
    }

    /// Sends a query whose response can be a stream.
    ///
    /// # Errors
    /// Fails as [`get`](Self::get) does.
    async fn open_stream(&self, resource: &str, parameters: &[(&str, String)]) -> anyhow::Result<ApiResponse> {
        let path = self.path(resource, parameters);
        let response = match &self.endpoint {
            TelemetryEndpoint::Cluster(client) => {
                let request = Request::get(path).body(Body::empty())?;
                let response = client.send(request).await;
                let response = response.map_err(|error| anyhow!("querying the API server: {}", reason(&error)))?;
                response.map(|body| body.map_err(Into::into).boxed_unsync())
            }
            TelemetryEndpoint::Local(addr) => get_local(addr, &path)
                .await
                .with_context(|| format!("querying the control plane at {addr}"))?,
        };
        let status = response.status();
        if status == StatusCode::OK {
            return Ok(response);
        }
        let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await;
        let body = body.map(|body| body.to_bytes()).unwrap_or_default();
        Err(self.response_error(status, resource, &String::from_utf8_lossy(&body)))
    }

    /// Explains why a request was rejected, and how to fix it.
    fn response_error(&self, status: StatusCode, resource: &str, body: &str) -> anyhow::Error {
        let message = serde_json::from_str::<Value>(body)
            .ok()
            .and_then(|value| Some(value["message"].as_str()?.to_owned()))
            .filter(|message| !message.is_empty())
            .unwrap_or_else(|| format!("{status} {}", body.trim()));
        let on_cluster = matches!(self.endpoint, TelemetryEndpoint::Cluster(_));
        match status {
            StatusCode::FORBIDDEN => {
                let verb = if resource == "taps" { "watch" } else { "list" };
                let (kind, scope) = match &self.namespace {
                    Some(namespace) => ("role", format!(" -n {namespace}")),
                    None => ("clusterrole", String::new()),
                };
                anyhow!(
                    "{message}\nRBAC grants this permission: kubectl create {kind} telemetry --verb={verb} \
                     --resource={resource}.{GROUP}{scope}, and a binding of it"
                )
            }
            StatusCode::NOT_FOUND | StatusCode::SERVICE_UNAVAILABLE | StatusCode::BAD_GATEWAY if on_cluster => anyhow!(
                "the cluster serves no telemetry: {message}\n`kubectl get apiservice {API_SERVICE}` says why; telemetry \
                 is enabled by the chart value telemetry.enabled=true"
            ),
            _ => anyhow!(message),
        }
    }
}

/// Sends a request to a control plane on this machine.
async fn get_local(addr: &Addr, path: &str) -> anyhow::Result<ApiResponse> {
    let stream = match addr {
        Addr::Socket(addr) => TcpStream::connect(addr).await,
        Addr::Name(name) => TcpStream::connect((name.name.to_string(), name.port)).await,
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream?)).await?;
    // The task ends with the response.
    tokio::spawn(connection);
    let request = Request::get(path)
        .header(header::HOST, addr.to_string())
        .body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    ensure!(
        response.status() != StatusCode::SWITCHING_PROTOCOLS,
        "the server is not a control plane"
    );
    // The body holds the sender. Without the sender the connection would close after the response headers.
    Ok(response.map(|body| {
        let body = body.map_frame(move |frame| {
            let _open = &sender;
            frame
        });
        body.map_err(Into::into).boxed_unsync()
    }))
}

impl Kind {
    /// The name of the kind in the API.
    fn api_name(self) -> &'static str {
        match self {
            Self::CronJob => "cronjob",
            Self::DaemonSet => "daemonset",
            Self::Deployment => "deployment",
            Self::Job => "job",
            Self::Namespace => "namespace",
            Self::Pod => "pod",
            Self::ReplicaSet => "replicaset",
            Self::ReplicationController => "replicationcontroller",
            Self::Service => "service",
            Self::StatefulSet => "statefulset",
        }
    }
}

/// Must be long enough for the first query, which waits for two scrapes of every sidecar.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_RESPONSE_BYTES: usize = 64 << 20;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn telemetry_query(namespace: Option<&str>, resource: &str) -> TelemetryQuery {
        let words: Vec<_> = resource
            .split(' ')
            .filter(|word| !word.is_empty())
            .map(str::to_owned)
            .collect();
        let (kind, name) = parse_selection(&words).unwrap();
        TelemetryQuery {
            endpoint: TelemetryEndpoint::Local("127.0.0.1:1".parse().unwrap()),
            namespace: namespace.map(str::to_owned),
            kind,
            name,
        }
    }

    #[test]
    fn a_query_becomes_an_api_path() {
        let path =
            |namespace, resource| telemetry_query(namespace, resource).path("edges", &[("window", "10".to_owned())]);
        let base = "/apis/telemetry.tulle.dev/v1alpha1";
        assert_eq!(
            path(Some("shop"), "deploy/web"),
            format!("{base}/namespaces/shop/edges?by=deployment&name=web&window=10")
        );
        assert_eq!(path(None, ""), format!("{base}/edges?by=workload&window=10"));
        assert_eq!(
            path(None, "ew vm"),
            format!("{base}/edges?by=externalworkload&name=vm&window=10")
        );
    }

    #[test]
    fn invalid_resources_are_refused() {
        for words in [&["deploy/web", "db"][..], &["cm/x"], &["deploy/"]] {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            assert!(parse_selection(&words).is_err(), "{words:?}");
        }
        assert!(parse_control_addr("http://127.0.0.1:8089/").is_ok() && parse_control_addr("8089").is_err());
    }

    #[test]
    fn the_error_of_a_rejected_request_contains_the_fix() {
        let error = |status, body| {
            telemetry_query(Some("shop"), "deploy")
                .response_error(status, "taps", body)
                .to_string()
        };
        let forbidden = error(StatusCode::FORBIDDEN, r#"{"message": "you may not"}"#);
        assert!(
            forbidden.starts_with("you may not\n") && forbidden.contains("--verb=watch"),
            "{forbidden}"
        );
        assert_eq!(error(StatusCode::BAD_REQUEST, "no"), "400 Bad Request no");
    }
}
