//! `tulle stat`, `edges`, `routes`, `tap` and `top`: what workloads do, asked of the control plane's telemetry API.
//!
//! On Kubernetes the API server forwards the question, from wherever it can be reached and with the rights that RBAC
//! gives whoever asks; without it, the control plane answers its own machine.

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

use crate::kubernetes::resource::{Kind, Named};
use crate::kubernetes::{self, reason};

/// Which workloads, and of which control plane.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Workloads {
    /// A workload, or all of a type: deploy/web, pod/web-1, sts, svc, ns; workloads of every type if not given
    #[arg(value_name = "TYPE/NAME", num_args = 0..=2)]
    resource: Vec<String>,
    /// Their namespace; that of the kubeconfig's context if not given, and all of them with --control
    #[arg(short, long, value_name = "NAMESPACE", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// Those of all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Where telemetry is served without Kubernetes, such as 127.0.0.1:8089
    #[arg(long, value_name = "HOST:PORT", value_parser = control)]
    control: Option<Addr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people
    Table,
    /// For people with wide screens
    Wide,
    /// For programs
    Json,
}

/// A telemetry API, and what to ask it for.
pub(crate) struct Asked {
    place: Place,
    /// All of them if absent.
    pub(crate) namespace: Option<String>,
    by: String,
    name: Option<String>,
}

enum Place {
    Cluster(kube::Client),
    Machine(Addr),
}

type Answer = Response<UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>>;

impl Workloads {
    /// # Errors
    /// A resource that is none, and no cluster to ask.
    pub(crate) async fn asked(&self, flags: &kubernetes::Flags) -> anyhow::Result<Asked> {
        let (by, name) = selection(&self.resource)?;
        let (place, default) = match &self.control {
            Some(addr) => (Place::Machine(addr.clone()), None),
            None => {
                let cluster = flags
                    .connect()
                    .await
                    .context("asking a control plane on Kubernetes; ask one without it by --control 127.0.0.1:8089")?;
                (Place::Cluster(cluster.client), Some(cluster.namespace))
            }
        };
        let namespace = match (by.as_str(), &name) {
            ("namespace", Some(name)) => Some(name.clone()),
            ("namespace", None) => None,
            _ if self.all_namespaces => None,
            _ => self.namespace.clone().or(default),
        };
        Ok(Asked {
            place,
            namespace,
            by,
            name,
        })
    }
}

/// The kind by which the API counts, and the name.
fn selection(words: &[String]) -> anyhow::Result<(String, Option<String>)> {
    let Some(first) = words.first() else {
        return Ok(("workload".to_owned(), None));
    };
    let (kind, name) = match (first.split_once('/'), words.get(1)) {
        (Some((kind, name)), None) => (kind, Some(name.to_owned())),
        (None, second) => (first.as_str(), second.cloned()),
        (Some(_), Some(_)) => bail!("expected a resource such as deploy/web, got {:?}", words.join(" ")),
    };
    // They are workloads here, although they have no pods.
    if ["ew", "externalworkload", "externalworkloads"].contains(&kind.to_ascii_lowercase().as_str()) {
        return Ok(("externalworkload".to_owned(), name));
    }
    let Named { kind, name } = Named::parse(words)?;
    Ok((kind.singular().to_owned(), name))
}

/// An address, with or without a scheme before it.
fn control(text: &str) -> Result<Addr, String> {
    let addr = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
    addr.parse()
        .map_err(|_| format!("{text:?} is no address; expected HOST:PORT such as 127.0.0.1:8089"))
}

impl Asked {
    /// The path of a resource, with these parameters besides the workloads that are meant.
    fn path(&self, resource: &str, parameters: &[(&str, String)]) -> String {
        let namespace = match &self.namespace {
            Some(namespace) => format!("namespaces/{namespace}/"),
            None => String::new(),
        };
        let mut query = Serializer::new(String::new());
        query.append_pair("by", &self.by);
        if let Some(name) = &self.name {
            query.append_pair("name", name);
        }
        query.extend_pairs(parameters);
        format!("/apis/{GROUP}/{VERSION}/{namespace}{resource}?{}", query.finish())
    }

    /// Asks once.
    ///
    /// # Errors
    /// Nobody who answers, and a refusal, with what the server says.
    pub(crate) async fn get<T: DeserializeOwned>(
        &self,
        resource: &str,
        parameters: &[(&str, String)],
    ) -> anyhow::Result<T> {
        let asking = async {
            let answer = self.begin(resource, parameters).await?;
            let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
            body.map_err(|err| anyhow!(err)).context("reading the answer")
        };
        let body = timeout(LIMIT, asking)
            .await
            .with_context(|| format!("nothing was answered within {LIMIT:?}"))??;
        serde_json::from_slice(&body.to_bytes()).context("the answer is not what this version of tulle expects")
    }

    /// Asks for an answer that may go on.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    async fn begin(&self, resource: &str, parameters: &[(&str, String)]) -> anyhow::Result<Answer> {
        let path = self.path(resource, parameters);
        let answer = match &self.place {
            Place::Cluster(client) => {
                let request = Request::get(path).body(Body::empty())?;
                let answer = client.send(request).await;
                let answer = answer.map_err(|error| anyhow!("asking the cluster: {}", reason(&error)))?;
                answer.map(|body| body.map_err(Into::into).boxed_unsync())
            }
            Place::Machine(addr) => machine(addr, &path)
                .await
                .with_context(|| format!("asking the control plane at {addr}"))?,
        };
        let status = answer.status();
        if status == StatusCode::OK {
            return Ok(answer);
        }
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
        let body = body.map(|body| body.to_bytes()).unwrap_or_default();
        Err(self.refusal(status, resource, &String::from_utf8_lossy(&body)))
    }

    /// What a refusal means, and what to do.
    fn refusal(&self, status: StatusCode, resource: &str, body: &str) -> anyhow::Error {
        let said = serde_json::from_str::<Value>(body)
            .ok()
            .and_then(|value| Some(value["message"].as_str()?.to_owned()))
            .filter(|message| !message.is_empty())
            .unwrap_or_else(|| format!("{status} {}", body.trim()));
        let on_cluster = matches!(self.place, Place::Cluster(_));
        match status {
            StatusCode::FORBIDDEN => {
                let verb = if resource == "taps" { "watch" } else { "list" };
                let (kind, place) = match &self.namespace {
                    Some(namespace) => ("role", format!(" -n {namespace}")),
                    None => ("clusterrole", String::new()),
                };
                anyhow!(
                    "{said}\nwho may, is said by RBAC: kubectl create {kind} telemetry --verb={verb} \
                     --resource={resource}.{GROUP}{place}, and a binding of it"
                )
            }
            StatusCode::NOT_FOUND | StatusCode::SERVICE_UNAVAILABLE | StatusCode::BAD_GATEWAY if on_cluster => anyhow!(
                "the cluster serves no telemetry: {said}\n`kubectl get apiservice {API_SERVICE}` says why; a control plane \
                 has it with the value telemetry.enabled=true"
            ),
            _ => anyhow!(said),
        }
    }
}

/// Asks a control plane on this machine.
async fn machine(addr: &Addr, path: &str) -> anyhow::Result<Answer> {
    let stream = match addr {
        Addr::Socket(addr) => TcpStream::connect(addr).await,
        Addr::Name(name) => TcpStream::connect((name.name.to_string(), name.port)).await,
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream?)).await?;
    // Ends with the answer.
    tokio::spawn(connection);
    let request = Request::get(path)
        .header(header::HOST, addr.to_string())
        .body(Empty::<Bytes>::new())?;
    let answer = sender.send_request(request).await?;
    ensure!(
        answer.status() != StatusCode::SWITCHING_PROTOCOLS,
        "it is no control plane"
    );
    // The sender stays with the body: without it the connection would end after the head.
    Ok(answer.map(|body| {
        let body = body.map_frame(move |frame| {
            let _open = &sender;
            frame
        });
        body.map_err(Into::into).boxed_unsync()
    }))
}

impl Kind {
    /// As the API has it.
    fn singular(self) -> &'static str {
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

/// A first answer takes two pages of every sidecar.
const LIMIT: Duration = Duration::from_secs(30);
const MAX_ANSWER: usize = 64 << 20;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn asked(namespace: Option<&str>, resource: &str) -> Asked {
        let words: Vec<_> = resource
            .split(' ')
            .filter(|word| !word.is_empty())
            .map(str::to_owned)
            .collect();
        let (by, name) = selection(&words).unwrap();
        Asked {
            place: Place::Machine("127.0.0.1:1".parse().unwrap()),
            namespace: namespace.map(str::to_owned),
            by,
            name,
        }
    }

    #[test]
    fn a_question_is_a_path_of_the_api() {
        let path = |namespace, resource| asked(namespace, resource).path("edges", &[("window", "10".to_owned())]);
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
    fn what_is_no_resource_is_refused() {
        for words in [&["deploy/web", "db"][..], &["cm/x"], &["deploy/"]] {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            assert!(selection(&words).is_err(), "{words:?}");
        }
        assert!(control("http://127.0.0.1:8089/").is_ok() && control("8089").is_err());
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let refused = |status, body| asked(Some("shop"), "deploy").refusal(status, "taps", body).to_string();
        let forbidden = refused(StatusCode::FORBIDDEN, r#"{"message": "you may not"}"#);
        assert!(
            forbidden.starts_with("you may not\n") && forbidden.contains("--verb=watch"),
            "{forbidden}"
        );
        assert_eq!(refused(StatusCode::BAD_REQUEST, "no"), "400 Bad Request no");
    }
}
