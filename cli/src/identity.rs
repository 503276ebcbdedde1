//! `tulle identity`: the certificates that proxies present in a TLS handshake.
//!
//! Certificates are printed without verification; `tulle check --proxy` verifies them.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, anyhow, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::certificates::Certificate;
use crate::kubernetes::forward::{self, ForwardedPort};
use crate::kubernetes::resource::{self, ResourceRef};
use crate::kubernetes::{self, Cluster, REQUEST_TIMEOUT, reason};
use crate::{config, runtime};

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Names of pods, or resources with pods such as deploy/web
    #[arg(value_name = "POD or TYPE/NAME", required_unless_present = "selector")]
    pods: Vec<String>,
    /// Select pods by label
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "pods")]
    selector: Option<String>,
    /// The namespace of the pods [default: the namespace of the kubeconfig's context]
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
}

pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let (text, complete) = runtime()?.block_on(async {
        let cluster = flags.connect().await?;
        let namespace = args.namespace.as_deref().unwrap_or(&cluster.namespace);
        let pods = list_pods(args, &cluster, namespace).await?;
        ensure!(!pods.is_empty(), "no matching pod in namespace {namespace}");
        let trust_domain = config::values(&cluster)
            .await
            .map(|values| trust_domain(&values))
            .unwrap_or_default();
        let mut text = String::new();
        let mut complete = true;
        for (number, pod) in pods.iter().enumerate() {
            let _ = writeln!(text, "POD {} ({} of {})\n", pod.name_any(), number + 1, pods.len());
            match fetch_certificate_chain(&cluster, pod, &trust_domain).await {
                Ok(chain) => {
                    let leaf = chain.first().map(Certificate::to_pem).unwrap_or_default();
                    let _ = writeln!(text, "{leaf}");
                }
                Err(error) => {
                    complete = false;
                    let _ = writeln!(text, "{error:#}\n");
                }
            }
        }
        anyhow::Ok((text, complete))
    })?;
    crate::print(&text)?;
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn list_pods(args: &Args, cluster: &Cluster, namespace: &str) -> anyhow::Result<Vec<Pod>> {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    if let Some(selector) = &args.selector {
        let listed = cluster.list(&api, &ListParams::default().labels(selector)).await;
        return listed.map_err(|error| anyhow!("listing the pods with {selector}: {}", reason(&error)));
    }
    let mut pods = Vec::new();
    for name in &args.pods {
        if name.contains('/') {
            pods.extend(
                ResourceRef::parse(std::slice::from_ref(name))?
                    .pods(cluster, namespace)
                    .await?,
            );
        } else {
            let pod = api.get(name).await;
            pods.push(pod.map_err(|error| anyhow!("getting pod {name} of {namespace}: {}", reason(&error)))?);
        }
    }
    Ok(pods)
}

/// The trust domain of a control plane installed with these values.
pub(crate) fn trust_domain(values: &Value) -> String {
    let text = |key: &str| values[key].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    text("identityTrustDomain")
        .or_else(|| text("clusterDomain"))
        .unwrap_or_default()
}

/// The certificate chain that a pod's proxy presents, with the leaf first.
///
/// # Errors
/// Fails if the pod has no proxy, or if the proxy cannot be reached or has no certificate.
pub(crate) async fn fetch_certificate_chain(
    cluster: &Cluster,
    pod: &Pod,
    trust_domain: &str,
) -> anyhow::Result<Vec<Certificate>> {
    let (namespace, name) = (resource::namespace(pod), pod.name_any());
    let spec = pod.spec.as_ref().context("the pod has no spec")?;
    let mut containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let Some(proxy) = containers.find(|container| container.name == "linkerd-proxy") else {
        bail!("pod {namespace}/{name} has no proxy");
    };
    let account = spec.service_account_name.as_deref().unwrap_or("default");
    let trust_domain = if trust_domain.is_empty() {
        "cluster.local"
    } else {
        trust_domain
    };
    let identity = format!(
        "{account}.{namespace}.serviceaccount.identity.{}.{trust_domain}",
        cluster.control_plane_namespace
    );
    // A forwarded port is a connection to loopback inside the pod. On such a connection, the inbound port requires a client
    // certificate. The admin port presents the proxy's certificate to every client.
    presented_chain(cluster, namespace, &name, resource::admin_port(proxy), &identity).await
}

/// The certificate chain that a pod presents on a port, with the leaf first.
///
/// Verifies only that the server has the private key. Callers that rely on the identity must check it.
///
/// # Errors
/// Fails if the port cannot be reached or does not speak TLS.
pub(crate) async fn presented_chain(
    cluster: &Cluster,
    namespace: &str,
    pod: &str,
    port: u16,
    server_name: &str,
) -> anyhow::Result<Vec<Certificate>> {
    let ForwardedPort {
        stream,
        error: forward_error,
    } = forward::open(cluster, namespace, pod, port).await?;
    forward_error
        .add_context(chain_of_server(stream, server_name).await)
        .with_context(|| format!("TLS with {server_name} on port {port} of pod {namespace}/{pod}"))
}

/// The certificate chain that the server at the other end of this stream presents, with the leaf first.
///
/// Verifies only that the server has the private key. Callers that rely on the identity must check it.
///
/// # Errors
/// Fails if the server does not speak TLS, or if it presents no certificate.
pub(crate) async fn chain_of_server(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    server_name: &str,
) -> anyhow::Result<Vec<Certificate>> {
    let provider = tulle_control::tls::crypto_provider();
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .context("preparing TLS")?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyServerCert(provider)))
        .with_no_client_auth();
    let name = ServerName::try_from(server_name.to_owned())
        .with_context(|| format!("{server_name:?} is not a server name"))?;
    let connecting = timeout(
        REQUEST_TIMEOUT,
        TlsConnector::from(Arc::new(config)).connect(name, stream),
    );
    let connected = match connecting.await {
        Ok(connected) => connected.context("the handshake failed"),
        Err(_) => Err(anyhow!("the handshake took longer than {REQUEST_TIMEOUT:?}")),
    }?;
    let (_, connection) = connected.get_ref();
    let chain = connection.peer_certificates().unwrap_or_default();
    ensure!(!chain.is_empty(), "the server presents no certificate");
    chain.iter().map(|cert| Certificate::parse(cert)).collect()
}

/// Accepts every certificate, because the certificate is only inspected.
#[derive(Debug)]
struct AcceptAnyServerCert(Arc<rustls::crypto::CryptoProvider>);

impl ServerCertVerifier for AcceptAnyServerCert {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

const EXAMPLES: &str = "\
  tulle identity web-5d8f6bbd4-x7k2p -n shop
  tulle identity deploy/web -n shop
  tulle identity -l app=web -n shop | openssl x509 -noout -text";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_trust_domain_is_the_cluster_domain() {
        let domain = |values: Value| trust_domain(&values);
        assert_eq!(
            domain(serde_json::json!({ "identityTrustDomain": "", "clusterDomain": "c.example" })),
            "c.example"
        );
        assert_eq!(
            domain(serde_json::json!({ "identityTrustDomain": "t.example", "clusterDomain": "c.example" })),
            "t.example"
        );
    }
}
