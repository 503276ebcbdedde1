//! Whether the proxies of two linked clusters trust each other: the certificates of each cluster chain to a trust anchor of the
//! other one.

use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use kube::api::DynamicObject;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::certificates::{Certificate, chains_to};
use crate::kubernetes::{Cluster, reason};
use crate::{config, identity};

/// What the proxies of a cluster trust, and what they present.
pub(super) struct ClusterTrust {
    pub(super) anchors: Vec<Certificate>,
    /// The certificate of the issuer or of a proxy, with those that signed it; the reason if it is not known.
    pub(super) chain: Result<Vec<Certificate>, String>,
}

/// Why the proxies of two clusters may not trust each other.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// Handshakes between the clusters fail.
    Untrusted(String),
    /// It is not known whether handshakes fail.
    Unknown(String),
}

/// Compares the trust of this cluster with that of a linked one. Clusters with the same trust anchors trust each other.
///
/// # Errors
/// Fails if the certificates of one cluster do not chain to a trust anchor of the other one, or if this is not known.
pub(super) fn compare(own: &ClusterTrust, target: &ClusterTrust) -> Result<(), Finding> {
    let is_in = |anchors: &[Certificate], anchor: &Certificate| anchors.iter().any(|other| other.der == anchor.der);
    let in_both = own
        .anchors
        .iter()
        .filter(|anchor| is_in(&target.anchors, anchor))
        .count();
    if in_both == own.anchors.len() && target.anchors.iter().all(|anchor| is_in(&own.anchors, anchor)) {
        return Ok(());
    }
    let mut unknown = None;
    for (chain, anchors, untrusted) in [
        (
            &own.chain,
            &target.anchors,
            "certificates of this cluster chain to no trust anchor there",
        ),
        (
            &target.chain,
            &own.anchors,
            "its certificates chain to no trust anchor of this cluster",
        ),
    ] {
        match chain {
            Ok(chain) if chains_to(chain, anchors) => {}
            Ok(_) => return Err(Finding::Untrusted(untrusted.to_owned())),
            Err(cause) => unknown = unknown.or(Some(cause)),
        }
    }
    let Some(cause) = unknown else { return Ok(()) };
    if in_both == 0 && own.chain.is_err() && target.chain.is_err() {
        return Err(Finding::Untrusted("no trust anchor in common".to_owned()));
    }
    Err(Finding::Unknown(format!(
        "it has other trust anchors, and not all certificates are known: {cause}"
    )))
}

/// Reads the trust anchors and the issuer of this cluster.
///
/// # Errors
/// Fails if the trust anchors cannot be read.
pub(super) async fn read_own(cluster: &Cluster) -> anyhow::Result<ClusterTrust> {
    Ok(ClusterTrust {
        anchors: anchors(cluster).await?,
        chain: issuer_chain(cluster).await.map_err(|error| format!("{error:#}")),
    })
}

/// Reads the trust anchors of a linked cluster. The account of a Link can read no Secret, so the issuer is not read.
///
/// # Errors
/// Fails if the trust anchors cannot be read.
pub(super) async fn read_target(target: &Cluster) -> anyhow::Result<ClusterTrust> {
    Ok(ClusterTrust {
        anchors: anchors(target).await?,
        chain: Err("the certificate of the gateway was not read".to_owned()),
    })
}

/// Reads the certificate that the gateway of a Link presents, if the result of [`compare`] depends on it. `limit` is the timeout for
/// each address of the gateway.
pub(super) async fn read_gateway_if_needed(
    own: &ClusterTrust,
    target: &mut ClusterTrust,
    link: &DynamicObject,
    limit: Duration,
) {
    if matches!(compare(own, target), Err(Finding::Unknown(_))) {
        target.chain = gateway_chain(link, limit).await.map_err(|error| format!("{error:#}"));
    }
}

async fn gateway_chain(link: &DynamicObject, limit: Duration) -> anyhow::Result<Vec<Certificate>> {
    let field = |name: &str| link.data["spec"][name].as_str().unwrap_or_default();
    let addresses = field("gatewayAddress").split(',').map(str::trim);
    let mut failure = anyhow!("the Link has no gateway from which a certificate can be read");
    for address in addresses.filter(|address| !address.is_empty()) {
        let port: u16 = field("gatewayPort")
            .parse()
            .context("reading gatewayPort of the Link")?;
        let presenting = async {
            let stream = TcpStream::connect((address, port)).await.context("connecting")?;
            identity::chain_of_server(stream, field("gatewayIdentity")).await
        };
        let presented = match timeout(limit, presenting).await {
            Ok(presented) => presented,
            Err(_) => Err(anyhow!("no response within {limit:?}")),
        };
        match presented {
            Ok(chain) => return Ok(chain),
            Err(error) => failure = error.context(format!("reading the certificate of the gateway {address}:{port}")),
        }
    }
    Err(failure)
}

/// The certificate of the issuer, with those that signed it.
async fn issuer_chain(cluster: &Cluster) -> anyhow::Result<Vec<Certificate>> {
    let namespace = &cluster.control_plane_namespace;
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), namespace);
    let secret = api.get_opt(ISSUER_SECRET).await;
    let secret = secret.map_err(|error| anyhow!("reading Secret {namespace}/{ISSUER_SECRET}: {}", reason(&error)))?;
    let data = secret.and_then(|secret| secret.data);
    let data = data.with_context(|| format!("there is no Secret {namespace}/{ISSUER_SECRET}"))?;
    let pem = ["crt.pem", "tls.crt"].iter().find_map(|key| data.get(*key));
    let pem = pem.with_context(|| format!("Secret {namespace}/{ISSUER_SECRET} has neither crt.pem nor tls.crt"))?;
    Certificate::parse_bundle(&pem.0).with_context(|| format!("Secret {namespace}/{ISSUER_SECRET}"))
}

/// The trust anchors of a control plane: those in use, or else those in its configuration. An account for other clusters may have
/// permission to read only the configuration. With `identity.externalCA`, the configuration has no trust anchors.
async fn anchors(cluster: &Cluster) -> anyhow::Result<Vec<Certificate>> {
    let bundle = match anchors_in_use(cluster).await? {
        Ok(bundle) => bundle,
        Err(unreadable) => {
            let values = config::values(cluster).await?;
            let bundle = values["identityTrustAnchorsPEM"]
                .as_str()
                .filter(|bundle| !bundle.is_empty());
            let bundle = bundle.with_context(|| {
                format!("{unreadable}; the ConfigMap linkerd-config has no identityTrustAnchorsPEM")
            })?;
            bundle.to_owned()
        }
    };
    Certificate::parse_bundle(bundle.as_bytes())
}

/// The bundle that the identity service reads. The inner error is the reason if there is none, or if the account has no permission
/// to read it.
async fn anchors_in_use(cluster: &Cluster) -> anyhow::Result<Result<String, String>> {
    let namespace = &cluster.control_plane_namespace;
    let api: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), namespace);
    let bundle = match api.get_opt(TRUST_ROOTS_CONFIG_MAP).await {
        Ok(map) => map.and_then(|mut map| map.data.as_mut()?.remove(TRUST_ROOTS_KEY)),
        Err(error) => {
            let cause = format!(
                "reading ConfigMap {TRUST_ROOTS_CONFIG_MAP} of namespace {namespace}: {}",
                reason(&error)
            );
            let is_forbidden = matches!(&error, kube::Error::Api(status) if status.code == 403);
            ensure!(is_forbidden, "{cause}");
            return Ok(Err(cause));
        }
    };
    Ok(bundle.ok_or_else(|| {
        format!(
            "there is no ConfigMap {TRUST_ROOTS_CONFIG_MAP} with the key {TRUST_ROOTS_KEY:?} in namespace {namespace}"
        )
    }))
}

/// The Secret with the certificate and the key of the issuer.
const ISSUER_SECRET: &str = "linkerd-identity-issuer";
/// The ConfigMap with the trust anchors of the identity service, and the key of the bundle in it.
const TRUST_ROOTS_CONFIG_MAP: &str = "linkerd-identity-trust-roots";
const TRUST_ROOTS_KEY: &str = "ca-bundle.crt";

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future;
    use std::sync::Arc;

    use http::{Request, Response};
    use kube::client::Body;
    use rustls::ServerConfig;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
    use serde_json::{Value, json};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;
    use tulle_control::trust::{self, CertificateAuthority, Svid};

    use super::super::extension::link_resource;
    use super::*;

    fn anchor(name: &str) -> CertificateAuthority {
        trust::create_anchor(name, LIFETIME).unwrap()
    }

    fn parsed(authority: &CertificateAuthority) -> Vec<Certificate> {
        Certificate::parse_bundle(authority.certificate.as_bytes()).unwrap()
    }

    /// A cluster with these trust anchors, and with an issuer that was signed by one, if it is known.
    fn cluster_trust(anchors: &[&CertificateAuthority], signer: Option<&CertificateAuthority>) -> ClusterTrust {
        let issuer = signer.map(|signer| trust::create_issuer("issuer", LIFETIME, signer).unwrap());
        ClusterTrust {
            anchors: anchors.iter().flat_map(|anchor| parsed(anchor)).collect(),
            chain: issuer
                .map(|issuer| parsed(&issuer))
                .ok_or_else(|| "forbidden".to_owned()),
        }
    }

    #[test]
    fn certificates_of_each_cluster_chain_to_an_anchor_of_the_other() {
        let (old, new) = (&anchor("old"), &anchor("new"));
        let untrusted = |text: &str| Err(Finding::Untrusted(text.to_owned()));
        let unknown = || {
            let text = "it has other trust anchors, and not all certificates are known: forbidden";
            Err(Finding::Unknown(text.to_owned()))
        };
        let rows = [
            // The anchors of one cluster are a part of those of the other.
            (
                cluster_trust(&[old, new], Some(old)),
                cluster_trust(&[old], Some(old)),
                Ok(()),
            ),
            (
                cluster_trust(&[old, new], Some(new)),
                cluster_trust(&[old], Some(old)),
                untrusted("certificates of this cluster chain to no trust anchor there"),
            ),
            (
                cluster_trust(&[old], Some(old)),
                cluster_trust(&[old, new], Some(new)),
                untrusted("its certificates chain to no trust anchor of this cluster"),
            ),
            (
                cluster_trust(&[old, new], None),
                cluster_trust(&[old], Some(old)),
                unknown(),
            ),
            (
                cluster_trust(&[old, new], Some(old)),
                cluster_trust(&[old], None),
                unknown(),
            ),
            // The anchors are the same.
            (
                cluster_trust(&[old, new], Some(old)),
                cluster_trust(&[new, old], Some(new)),
                Ok(()),
            ),
            (
                cluster_trust(&[old, new], None),
                cluster_trust(&[new, old], None),
                Ok(()),
            ),
            // No anchor is in both.
            (
                cluster_trust(&[old], Some(new)),
                cluster_trust(&[new], Some(old)),
                Ok(()),
            ),
            (
                cluster_trust(&[old], None),
                cluster_trust(&[new], None),
                untrusted("no trust anchor in common"),
            ),
        ];
        for (number, (own, target, expected)) in rows.into_iter().enumerate() {
            assert_eq!(compare(&own, &target), expected, "row {number}");
        }
    }

    /// Serves one TLS connection with this certificate. Returns the port.
    async fn serve_tls(svid: Svid) -> u16 {
        let chain = svid.chain.into_iter().map(CertificateDer::from).collect();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(svid.key));
        let config = ServerConfig::builder_with_provider(tulle_control::tls::crypto_provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            TlsAcceptor::from(Arc::new(config)).accept(stream).await.map(drop)
        });
        port
    }

    fn link(spec: Value) -> DynamicObject {
        DynamicObject::new("east", &link_resource()).data(json!({ "spec": spec }))
    }

    #[tokio::test]
    async fn the_certificate_of_the_gateway_is_read_if_the_anchors_differ() {
        let (old, new) = (&anchor("old"), &anchor("new"));
        let issuer = trust::create_issuer("issuer", LIFETIME, old).unwrap();
        let svid = trust::create_svid("spiffe://east.test/gateway", LIFETIME, &issuer).unwrap();
        let port = serve_tls(svid).await;
        let gateway = json!({
            "gatewayAddress": "127.0.0.1", "gatewayPort": port.to_string(), "gatewayIdentity": "gateway.east.test",
        });
        let own = cluster_trust(&[old, new], Some(old));
        let limit = Duration::from_secs(10);

        let mut same = cluster_trust(&[new, old], None);
        read_gateway_if_needed(&own, &mut same, &link(gateway.clone()), limit).await;
        assert_eq!(same.chain, Err("forbidden".to_owned()));

        let mut other = cluster_trust(&[old], None);
        read_gateway_if_needed(&own, &mut other, &link(json!({})), limit).await;
        let unknown = compare(&own, &other).unwrap_err();
        assert!(
            matches!(&unknown, Finding::Unknown(text) if text.contains("the Link has no gateway")),
            "{unknown:?}"
        );
        read_gateway_if_needed(&own, &mut other, &link(gateway), limit).await;
        assert_eq!(compare(&own, &other), Ok(()), "{:?}", other.chain);
    }

    #[tokio::test]
    async fn the_issuer_of_this_cluster_is_read_from_its_secret() {
        let issuer = parsed(&anchor("issuer"));
        let pem = issuer[0].to_pem();
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {},
            "data": {"tls.crt": k8s_openapi::ByteString(pem.clone().into_bytes())},
        });
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}, "data": {TRUST_ROOTS_KEY: pem}});
        let service = tower::service_fn(move |req: Request<Body>| {
            let body = match req.uri().path().ends_with("/linkerd-identity-issuer") {
                true => &secret,
                false => &map,
            };
            future::ready(Ok::<_, Infallible>(response(200, body)))
        });
        let found = read_own(&cluster(kube::Client::new(service, "default"))).await.unwrap();
        assert_eq!((found.chain, found.anchors), (Ok(issuer.clone()), issuer));
    }

    /// Reads the anchors of a control plane. `used` is the bundle in use, or the status and reason of the API server's error.
    /// `configured` is the bundle in the configuration.
    async fn read_anchors(
        used: Result<&str, (u16, &'static str)>,
        configured: &str,
    ) -> anyhow::Result<Vec<Certificate>> {
        let used = used.map(|bundle| json!({ TRUST_ROOTS_KEY: bundle }));
        let values = json!({ "identityTrustAnchorsPEM": configured }).to_string();
        let service = tower::service_fn(move |req: Request<Body>| {
            let found = match req.uri().path().rsplit('/').next() {
                Some(TRUST_ROOTS_CONFIG_MAP) => used.clone(),
                _ => Ok(json!({ "values": values })),
            };
            let (code, body) = match found {
                Ok(data) => (
                    200,
                    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": {}, "data": data }),
                ),
                Err((code, reason)) => (
                    code,
                    json!({ "apiVersion": "v1", "kind": "Status", "code": code, "reason": reason, "message": reason }),
                ),
            };
            future::ready(Ok::<_, Infallible>(response(code, &body)))
        });
        anchors(&cluster(kube::Client::new(service, "default"))).await
    }

    fn response(code: u16, body: &Value) -> Response<Body> {
        let body = Body::from(body.to_string().into_bytes());
        Response::builder().status(code).body(body).unwrap()
    }

    fn cluster(client: kube::Client) -> Cluster {
        Cluster {
            client,
            control_plane_namespace: "linkerd".to_owned(),
            namespace: "default".to_owned(),
        }
    }

    const ABSENT: (u16, &str) = (404, "NotFound");
    const FORBIDDEN: (u16, &str) = (403, "Forbidden");

    #[tokio::test]
    async fn the_anchors_in_use_are_read_before_those_of_the_configuration() {
        let anchor = |name| {
            let anchor = trust::create_anchor(name, LIFETIME);
            anchor.unwrap().certificate
        };
        let (used, configured) = (anchor("used.test"), anchor("configured.test"));
        let (used, configured) = (used.as_str(), configured.as_str());
        for (in_use, in_configuration, expected) in [
            (Ok(used), "", used),
            (Ok(used), configured, used),
            (Err(ABSENT), configured, configured),
            (Err(FORBIDDEN), configured, configured),
        ] {
            let expected = Certificate::parse_bundle(expected.as_bytes()).unwrap();
            let found = read_anchors(in_use, in_configuration).await.unwrap();
            assert_eq!(found, expected, "{in_use:?}");
        }
        for (in_use, in_configuration, expected) in [
            (ABSENT, "", "there is no ConfigMap linkerd-identity-trust-roots"),
            (
                FORBIDDEN,
                "",
                "of namespace linkerd: Forbidden; the ConfigMap linkerd-config has no",
            ),
            // The anchors in use can differ from those in the configuration.
            (
                (500, "InternalError"),
                configured,
                "of namespace linkerd: InternalError",
            ),
        ] {
            let error = read_anchors(Err(in_use), in_configuration).await.unwrap_err();
            let text = format!("{error:#}");
            assert!(text.contains(expected), "{expected:?} is not in {text:?}");
        }
    }

    const LIFETIME: Duration = Duration::from_secs(86_400);
}
