//! Client authentication on Kubernetes: accepts only the API server's front-proxy certificate.
//!
//! The API server authenticates the caller and checks with RBAC that it has access to the path, so every forwarded
//! request is authorized. The CA and the allowed names come from the ConfigMap `extension-apiserver-authentication`,
//! which the Role `extension-apiserver-authentication-reader` permits to `list` and `watch`.

use std::error::Error as StdError;
use std::fmt;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, SignatureScheme};
use tracing::{info, warn};
use tulle_core::drain::Watch;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::tls;
use crate::tls::anchors::{self, TrustAnchors};
use crate::webhook::server_credentials::ServerCredentials;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(
        "{NAMESPACE}/{CONFIG_MAP} has no {key}; the API server serves no aggregated APIs without --requestheader-client-ca-file"
    )]
    MissingKey { key: &'static str },
    #[error("there is no ConfigMap {NAMESPACE}/{CONFIG_MAP}; the API server creates it when it starts")]
    MissingConfigMap,
    #[error("reading the CA certificate in {NAMESPACE}/{CONFIG_MAP}")]
    ClientCa(#[source] anchors::Error),
    #[error("the allowed names in {NAMESPACE}/{CONFIG_MAP} are not a JSON list")]
    Names(#[source] serde_json::Error),
    #[error("preparing to verify the API server")]
    Verifier(#[source] rustls::server::VerifierBuilderError),
    #[error("installing the client verifier")]
    Install(#[source] rustls::Error),
}

/// Updates the client verifier from the ConfigMap until the drain.
pub(super) async fn watch_client_ca(client: Client, creds: Arc<ServerCredentials>, drain: Watch) {
    let api: Api<ConfigMap> = Api::namespaced(client, NAMESPACE);
    let mut changes = pin!(watch_object(api, CONFIG_MAP).default_backoff());
    loop {
        // Cancel-safe: both branches only wait.
        let seen = tokio::select! {
            () = drain.signaled() => return,
            Some(seen) = changes.next() => seen,
        };
        let updated = match seen {
            Ok(Some(map)) => set_client_verifier(&map, &creds),
            Ok(None) => Err(Error::MissingConfigMap),
            Err(err) => {
                warn!(
                    error = &err as &dyn StdError,
                    "watching {NAMESPACE}/{CONFIG_MAP} failed"
                );
                continue;
            }
        };
        handle_update_result(updated, &creds);
    }
}

/// Logs the result of an update. After an error all clients are rejected: the former CA may have been replaced because its key
/// is no longer secret.
fn handle_update_result(updated: Result<(), Error>, creds: &ServerCredentials) {
    match updated {
        Ok(()) => info!("the telemetry API accepts connections of the API server"),
        Err(err) => {
            creds.reject_all_clients();
            warn!(
                error = &err as &dyn StdError,
                "new connections to the telemetry API are rejected"
            );
        }
    }
}

fn set_client_verifier(map: &ConfigMap, creds: &ServerCredentials) -> Result<(), Error> {
    let entry = |key: &'static str| {
        let value = map.data.as_ref().and_then(|data| data.get(key));
        value.ok_or(Error::MissingKey { key })
    };
    let client_ca =
        TrustAnchors::parse(entry(CLIENT_CA_KEY)?.as_bytes(), Path::new(CLIENT_CA_KEY)).map_err(Error::ClientCa)?;
    let names = match entry(ALLOWED_NAMES_KEY) {
        Ok(names) => serde_json::from_str(names).map_err(Error::Names)?,
        Err(_) => Vec::new(),
    };
    let signed_by_ca = WebPkiClientVerifier::builder_with_provider(client_ca.roots(), tls::crypto_provider())
        .clear_root_hint_subjects()
        .build()
        .map_err(Error::Verifier)?;
    creds
        .set_client_verifier(Arc::new(FrontProxyVerifier {
            inner: signed_by_ca,
            names,
        }))
        .map_err(Error::Install)
}

/// Accepts certificates of the CA with one of the allowed names, or with any name if none are configured.
struct FrontProxyVerifier {
    inner: Arc<dyn ClientCertVerifier>,
    names: Vec<String>,
}

impl FrontProxyVerifier {
    fn has_allowed_name(&self, leaf: &CertificateDer<'_>) -> bool {
        let Ok((_, leaf)) = X509Certificate::from_der(leaf) else {
            return false;
        };
        let mut names = leaf.subject().iter_common_name().filter_map(|name| name.as_str().ok());
        self.names.is_empty() || names.any(|name| self.names.iter().any(|allowed| allowed == name))
    }
}

impl fmt::Debug for FrontProxyVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrontProxyVerifier({:?})", self.names)
    }
}

impl ClientCertVerifier for FrontProxyVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.inner.verify_client_cert(leaf, issuers, now)?;
        match self.has_allowed_name(leaf) {
            true => Ok(verified),
            false => Err(rustls::CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, cert, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

const NAMESPACE: &str = "kube-system";
const CONFIG_MAP: &str = "extension-apiserver-authentication";
const CLIENT_CA_KEY: &str = "requestheader-client-ca-file";
const ALLOWED_NAMES_KEY: &str = "requestheader-allowed-names";

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    #[test]
    fn allowed_names_restrict_the_common_name_if_configured() {
        let certificate = |name: &str| {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.self_signed(&KeyPair::generate().unwrap()).unwrap()
        };
        let client_ca = certificate("client CA");
        let map = |names: Option<&str>| {
            let mut data = std::collections::BTreeMap::from([(CLIENT_CA_KEY.to_owned(), client_ca.pem())]);
            data.extend(names.map(|names| (ALLOWED_NAMES_KEY.to_owned(), names.to_owned())));
            ConfigMap {
                data: Some(data),
                ..ConfigMap::default()
            }
        };
        for names in [None, Some("[]"), Some("[\"front-proxy-client\"]")] {
            set_client_verifier(&map(names), &ServerCredentials::for_verified_clients()).unwrap();
        }
        assert!(matches!(
            set_client_verifier(&map(Some("x")), &ServerCredentials::new()),
            Err(Error::Names(_))
        ));
        assert!(matches!(
            set_client_verifier(&ConfigMap::default(), &ServerCredentials::new()),
            Err(Error::MissingKey { .. })
        ));
        let inner = WebPkiClientVerifier::builder_with_provider(
            TrustAnchors::parse(client_ca.pem().as_bytes(), Path::new("x"))
                .unwrap()
                .roots(),
            tls::crypto_provider(),
        );
        let mut proxy = FrontProxyVerifier {
            inner: inner.build().unwrap(),
            names: vec!["front-proxy-client".to_owned()],
        };
        assert!(proxy.has_allowed_name(certificate("front-proxy-client").der()));
        assert!(!proxy.has_allowed_name(certificate("system:masters").der()));
        proxy.names.clear();
        assert!(proxy.has_allowed_name(certificate("anything").der()));
    }
}
