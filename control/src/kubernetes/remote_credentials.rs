//! Access to another cluster by the kubeconfig in a Secret.

use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use tracing::warn;
use tulle_core::names::{annotation, label};

use crate::kubernetes::credentials_expiry;

/// Access to the API server of another cluster.
pub struct Access {
    pub config: kube::Config,
    /// The time at which the credentials expire, in seconds since 1970. `None` if they do not expire, or if this is not known.
    pub expires_at: Option<u64>,
}

/// The content of the Secret with which the destination service reads a linked cluster.
pub struct LinkedCluster {
    pub access: Access,
    pub trust_domain: String,
    pub cluster_domain: String,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    #[error("it does not have the label {}={cluster}", label::CREDENTIALS_OF_CLUSTER)]
    OtherCluster { cluster: String },
    #[error("it has no annotation {0}")]
    NoAnnotation(&'static str),
    #[error("it has no key {KUBECONFIG_KEY}")]
    NoKubeconfig,
    #[error("its kubeconfig has {0} bytes; at most {MAX_KUBECONFIG_BYTES} are accepted")]
    TooLarge(usize),
    #[error("its kubeconfig is invalid")]
    Invalid(#[source] Box<KubeconfigError>),
    #[error("its kubeconfig is not UTF-8")]
    NotUtf8,
    /// The parse error is left out, because its text can contain a token.
    #[error("its kubeconfig is not YAML with the fields of a kubeconfig")]
    NotYaml,
    #[error(
        "its kubeconfig has the field {0}, which is not supported here: a kubeconfig cannot refer to programs, files or proxies; \
         put a token or certificates into the kubeconfig itself"
    )]
    Unsupported(&'static str),
}

/// Reads the kubeconfig of a Secret. The kubeconfig comes from another cluster, so it must not make this process run a program,
/// read a file or use a proxy.
///
/// # Errors
/// Fails if there is no valid kubeconfig, or if it refers to a program, a file or a proxy.
pub async fn read(secret: &Secret) -> Result<Access, CredentialsError> {
    let data = secret.data.as_ref().and_then(|data| data.get(KUBECONFIG_KEY));
    let bytes = &data.ok_or(CredentialsError::NoKubeconfig)?.0;
    if bytes.len() > MAX_KUBECONFIG_BYTES {
        return Err(CredentialsError::TooLarge(bytes.len()));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| CredentialsError::NotUtf8)?;
    let invalid = |err| match err {
        KubeconfigError::Parse(_) => CredentialsError::NotYaml,
        err => CredentialsError::Invalid(Box::new(err)),
    };
    let kubeconfig = Kubeconfig::from_yaml(text).map_err(invalid)?;
    check_fields(&kubeconfig)?;
    let expires_at = credentials_expiry::expires_at(&kubeconfig, text);
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .map_err(invalid)?;
    // kube takes the URL of a proxy from this process's environment variables. Proxies are not supported.
    config.proxy_url = None;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // The watches retry themselves, because they report each failure.
    config.default_retry = false;
    if config.accept_invalid_certs {
        warn!(server = %config.cluster_url, "the kubeconfig disables the verification of the API server's certificate");
    }
    Ok(Access { config, expires_at })
}

/// Reads the Secret with which the destination service reads a linked cluster.
///
/// # Errors
/// Fails if the label names another cluster, if an annotation is missing, or if [`read`] fails.
pub async fn read_linked_cluster(secret: &Secret, cluster: &str) -> Result<LinkedCluster, CredentialsError> {
    let labelled = secret.labels().get(label::CREDENTIALS_OF_CLUSTER);
    if labelled.is_none_or(|name| name != cluster) {
        return Err(CredentialsError::OtherCluster {
            cluster: cluster.to_owned(),
        });
    }
    let annotated = |key| {
        let value = secret.annotations().get(key).filter(|value| !value.is_empty());
        value.cloned().ok_or(CredentialsError::NoAnnotation(key))
    };
    Ok(LinkedCluster {
        trust_domain: annotated(annotation::TRUST_DOMAIN)?,
        cluster_domain: annotated(annotation::CLUSTER_DOMAIN)?,
        access: read(secret).await?,
    })
}

/// The name of the Secrets that `link-gen` creates for the access to a cluster.
pub fn secret_name(cluster: &str) -> String {
    format!("cluster-credentials-{cluster}")
}

fn check_fields(kubeconfig: &Kubeconfig) -> Result<(), CredentialsError> {
    for cluster in kubeconfig
        .clusters
        .iter()
        .filter_map(|cluster| cluster.cluster.as_ref())
    {
        reject_if_set("certificate-authority", cluster.certificate_authority.is_some())?;
        reject_if_set("proxy-url", cluster.proxy_url.is_some())?;
    }
    for user in kubeconfig.auth_infos.iter().filter_map(|user| user.auth_info.as_ref()) {
        reject_if_set("exec", user.exec.is_some())?;
        reject_if_set("auth-provider", user.auth_provider.is_some())?;
        reject_if_set("tokenFile", user.token_file.is_some())?;
        reject_if_set("client-certificate", user.client_certificate.is_some())?;
        reject_if_set("client-key", user.client_key.is_some())?;
    }
    Ok(())
}

fn reject_if_set(field: &'static str, is_set: bool) -> Result<(), CredentialsError> {
    match is_set {
        true => Err(CredentialsError::Unsupported(field)),
        false => Ok(()),
    }
}

/// The key of the kubeconfig in the Secret.
pub(crate) const KUBECONFIG_KEY: &str = "kubeconfig";
const MAX_KUBECONFIG_BYTES: usize = 1 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use k8s_openapi::ByteString;

    use super::*;

    fn secret(kubeconfig: &str) -> Secret {
        let value = ByteString(kubeconfig.as_bytes().to_vec());
        Secret {
            data: Some([(KUBECONFIG_KEY.to_owned(), value)].into()),
            ..Secret::default()
        }
    }

    fn kubeconfig(cluster: &str, user: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
             clusters: [{{name: c, cluster: {{server: 'https://192.0.2.1:6443'{cluster}}}}}]\n\
             users: [{{name: u, user: {{{user}}}}}]\n"
        )
    }

    /// A Secret as `link-gen` creates it for the cluster `east`.
    fn linked_secret() -> Secret {
        let mut secret = secret(&kubeconfig("", "token: t"));
        secret.type_ = Some("mirror.linkerd.io/remote-kubeconfig".to_owned());
        let label = (label::CREDENTIALS_OF_CLUSTER.to_owned(), "east".to_owned());
        secret.metadata.labels = Some([label].into());
        let annotations = [
            (annotation::TRUST_DOMAIN, "east.id"),
            (annotation::CLUSTER_DOMAIN, "east.test"),
        ];
        let annotations = annotations.map(|(key, value)| (key.to_owned(), value.to_owned()));
        secret.metadata.annotations = Some(annotations.into());
        secret
    }

    async fn linked_error(secret: &Secret) -> String {
        let refused = read_linked_cluster(secret, "east").await.err();
        refused.expect("the Secret is refused").to_string()
    }

    async fn error(secret: &Secret) -> String {
        read(secret).await.err().expect("the kubeconfig is refused").to_string()
    }

    #[tokio::test]
    async fn the_expiry_of_a_token_is_read() {
        let payload = URL_SAFE_NO_PAD.encode(r#"{"exp":1800000000}"#);
        for (token, expires_at) in [
            (format!("h.{payload}.s"), Some(1_800_000_000)),
            ("opaque".to_owned(), None),
        ] {
            let access = read(&secret(&kubeconfig("", &format!("token: {token}"))))
                .await
                .unwrap();
            assert_eq!(access.config.cluster_url, "https://192.0.2.1:6443/");
            assert_eq!(access.expires_at, expires_at, "{token}");
        }
    }

    #[tokio::test]
    async fn references_to_programs_files_and_proxies_are_refused() {
        for (cluster, user, field) in [
            ("", "exec: {command: id}", "exec"),
            ("", "auth-provider: {name: gcp, config: {}}", "auth-provider"),
            ("", "tokenFile: /etc/passwd", "tokenFile"),
            ("", "client-certificate: /etc/passwd", "client-certificate"),
            ("", "client-key: /etc/passwd", "client-key"),
            (
                ", certificate-authority: /etc/passwd",
                "token: t",
                "certificate-authority",
            ),
            (", proxy-url: 'http://192.0.2.2'", "token: t", "proxy-url"),
        ] {
            let refused = error(&secret(&kubeconfig(cluster, user))).await;
            assert!(refused.contains(&format!("field {field},")), "{field}: {refused}");
        }
    }

    #[tokio::test]
    async fn a_secret_without_a_valid_kubeconfig_is_refused() {
        assert!(error(&Secret::default()).await.contains("no key kubeconfig"));
        let refused = error(&secret("users: [{name: u, user: {token: hunter2")).await;
        assert!(
            refused.contains("not YAML") && !refused.contains("hunter2"),
            "{refused}"
        );
        assert!(error(&secret("{}")).await.contains("invalid"));
        assert!(
            error(&secret(&" ".repeat(MAX_KUBECONFIG_BYTES + 1)))
                .await
                .contains("at most")
        );
    }

    /// The Secret is found by its name, so its type has no effect.
    #[tokio::test]
    async fn a_linked_cluster_is_read_from_a_secret_of_any_type() {
        for secret_type in ["mirror.linkerd.io/remote-kubeconfig", "Opaque"] {
            let mut secret = linked_secret();
            secret.type_ = Some(secret_type.to_owned());
            let linked = read_linked_cluster(&secret, "east").await;
            let linked = linked.unwrap_or_else(|err| panic!("{secret_type}: {err}"));
            assert_eq!(linked.trust_domain, "east.id");
            assert_eq!(linked.cluster_domain, "east.test");
            assert_eq!(linked.access.config.cluster_url, "https://192.0.2.1:6443/");
        }
    }

    #[tokio::test]
    async fn a_secret_without_the_label_of_the_cluster_is_refused() {
        for labelled in [None, Some(""), Some("west"), Some("East")] {
            let mut secret = linked_secret();
            let label = labelled.map(|name| (label::CREDENTIALS_OF_CLUSTER.to_owned(), name.to_owned()));
            secret.metadata.labels = Some(label.into_iter().collect());
            assert_eq!(
                linked_error(&secret).await,
                "it does not have the label multicluster.linkerd.io/cluster-name=east",
                "{labelled:?}"
            );
        }
    }

    #[tokio::test]
    async fn a_secret_without_an_annotation_of_the_cluster_is_refused_with_its_name() {
        for key in [annotation::TRUST_DOMAIN, annotation::CLUSTER_DOMAIN] {
            let expected = format!("it has no annotation {key}");
            let mut secret = linked_secret();
            secret.annotations_mut().insert(key.to_owned(), String::new());
            assert_eq!(linked_error(&secret).await, expected, "an empty value");
            secret.annotations_mut().remove(key);
            assert_eq!(linked_error(&secret).await, expected);
        }
    }

    #[tokio::test]
    async fn a_linked_secret_without_a_kubeconfig_is_refused() {
        let mut secret = linked_secret();
        secret.data = None;
        assert_eq!(linked_error(&secret).await, "it has no key kubeconfig");
    }
}
