//! Requests of an API server to the webhooks.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::insecure_tls;

/// A request of an API server to a webhook.
#[derive(Clone, Copy)]
pub(crate) enum ReviewRequest {
    /// A pod that needs a sidecar.
    Injection,
    /// A valid ServiceProfile.
    Profile,
    /// A valid Server.
    Policy,
}

impl ReviewRequest {
    /// Sends the review as the API server would, and checks the response.
    pub(crate) async fn send_and_check(self, addr: SocketAddr) -> anyhow::Result<()> {
        let body = self.body().to_string();
        let tcp = TcpStream::connect(addr).await?;
        let name = ServerName::try_from("webhook.linkerd.svc").context("a name")?;
        let mut tls = TlsConnector::from(Arc::new(insecure_tls::config(None)))
            .connect(name, tcp)
            .await?;
        let head = format!(
            "POST / HTTP/1.1\r\nhost: webhook\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        tls.write_all(head.as_bytes()).await?;
        tls.write_all(body.as_bytes()).await?;
        let mut answer = String::new();
        // A connection that ends without a TLS close_notify has also ended.
        if let Err(error) = tls.read_to_string(&mut answer).await {
            ensure!(error.kind() == std::io::ErrorKind::UnexpectedEof, "{error}");
        }
        let (head, body) = answer.split_once("\r\n\r\n").context("there is no answer")?;
        ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
        let answer: Value = serde_json::from_str(body)?;
        let response = &answer["response"];
        ensure!(response["allowed"] == true, "{answer}");
        let is_patched = response["patch"].is_string();
        ensure!(is_patched == matches!(self, Self::Injection), "{answer}");
        Ok(())
    }

    fn body(self) -> Value {
        let (kind, group, version, resource, object) = match self {
            Self::Injection => {
                let spec = json!({"containers": [{"name": "app", "image": "app:1"}]});
                let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": spec});
                ("Pod", "", "v1", "pods", pod)
            }
            Self::Profile => {
                let route = json!({"name": "GET /", "condition": {"method": "GET", "pathRegex": "/"}});
                let name = "web.shop.svc.cluster.local";
                let profile = json!({
                    "apiVersion": "linkerd.io/v1alpha2", "kind": "ServiceProfile",
                    "metadata": {"name": name, "namespace": "shop"}, "spec": {"routes": [route]},
                });
                ("ServiceProfile", "linkerd.io", "v1alpha2", "serviceprofiles", profile)
            }
            Self::Policy => {
                let server = json!({
                    "apiVersion": "policy.linkerd.io/v1beta3", "kind": "Server",
                    "metadata": {"name": "web", "namespace": "shop"},
                    "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "port": 8080},
                });
                ("Server", "policy.linkerd.io", "v1beta3", "servers", server)
            }
        };
        json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u-1", "operation": "CREATE", "namespace": "shop", "userInfo": {"username": "me"}, "dryRun": true,
                "kind": {"group": group, "version": version, "kind": kind},
                "resource": {"group": group, "version": version, "resource": resource},
                "object": object,
            },
        })
    }
}
