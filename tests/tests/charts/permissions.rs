//! The permissions of the control plane's service accounts, as `kubectl auth can-i --as` reports them.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;
use tulle_control::kubernetes;
use tulle_control::webhook::certificate_controller::{CertificateController, Config};
use tulle_control::webhook::server_credentials::ServerCredentials;
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Readiness;
use tulle_tests::charts::Helm;
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::{eventually, within};

use crate::access_review::{AccessReview, ESCALATIONS, Expectation, VERBS, apply_permissions, assert_permissions};
use crate::multicluster_permissions;
use crate::render::REQUIRED_VALUES;

/// Starts an API server with the permissions and webhook configurations of the chart, rendered with these values.
async fn start_with_chart(values: &[&str]) -> ApiServer {
    let server = ApiServer::start().await.unwrap();
    for namespace in ["linkerd", "shop"] {
        server.create_namespace(namespace).await.unwrap();
    }
    let rendered = Helm::new()
        .unwrap()
        .template("tulle-control-plane", &[REQUIRED_VALUES, values].concat())
        .unwrap();
    apply_permissions(&server, &rendered).await;
    server
}

/// The namespace of the accounts.
const NAMESPACE: &str = "linkerd";
const IDENTITY: &str = "linkerd-identity";
const DESTINATION: &str = "linkerd-destination";
const INJECTOR: &str = "linkerd-proxy-injector";
const ACCOUNTS: [&str; 3] = [IDENTITY, DESTINATION, INJECTOR];
/// The verbs that a component may use on its own Secrets.
const SECRET_VERBS: [&str; 5] = ["list", "watch", "create", "update", "patch"];
const SECRETS: [(&str, &str); 4] = [
    (DESTINATION, "linkerd-sp-validator-k8s-tls"),
    (DESTINATION, "linkerd-policy-validator-k8s-tls"),
    (DESTINATION, "linkerd-telemetry-k8s-tls"),
    (INJECTOR, "linkerd-proxy-injector-k8s-tls"),
];

/// Resource, namespace, name, and the verbs that `linkerd-destination` may use. It may use no other verbs, and the other accounts
/// may use none.
const DESTINATION_ACCESS: [(&str, &str, &str, &[&str]); 13] = [
    (
        API_SERVICES,
        "",
        "v1alpha1.telemetry.tulle.dev",
        &["list", "watch", "patch"],
    ),
    (API_SERVICES, "", "another", &[]),
    (API_SERVICES, "", "", &[]),
    (
        "configmaps",
        "kube-system",
        "extension-apiserver-authentication",
        &["list", "watch"],
    ),
    ("configmaps", "kube-system", "another", &[]),
    ("configmaps", "kube-system", "", &[]),
    ("configmaps", "linkerd", "extension-apiserver-authentication", &[]),
    ("externalworkloads.workload.linkerd.io", "shop", "", &["list", "watch"]),
    ("externalworkloads.workload.linkerd.io/status", "shop", "", &["patch"]),
    ("deployments.apps", "linkerd", "linkerd-destination", &["get"]),
    ("deployments.apps", "linkerd", "another", &[]),
    ("deployments.apps", "linkerd", "", &[]),
    ("deployments.apps", "shop", "linkerd-destination", &[]),
];

/// Service account, verbs, resource, namespace, name, and whether these verbs are permitted.
type PermissionRow = (
    &'static str,
    &'static [&'static str],
    &'static str,
    &'static str,
    &'static str,
    bool,
);

/// Verbs that an account may or may not use on single resources.
const PERMISSIONS: &[PermissionRow] = &[
    (
        IDENTITY,
        &["create"],
        "tokenreviews.authentication.k8s.io",
        "",
        "",
        true,
    ),
    (IDENTITY, &["create", "patch"], "events.events.k8s.io", "shop", "", true),
    (IDENTITY, &["get", "list", "watch"], "pods", "", "", false),
    (IDENTITY, &["get", "list"], "configmaps", "linkerd", "", false),
    (DESTINATION, &["list", "watch"], "pods", "", "", true),
    (
        DESTINATION,
        &["list", "watch"],
        "servers.policy.linkerd.io",
        "",
        "",
        true,
    ),
    (
        DESTINATION,
        &["patch"],
        "httproutes.policy.linkerd.io/status",
        "shop",
        "",
        true,
    ),
    (
        DESTINATION,
        &["patch", "update"],
        "httproutes.policy.linkerd.io",
        "shop",
        "",
        false,
    ),
    (
        DESTINATION,
        &["create", "update", "delete"],
        "endpointslices.discovery.k8s.io",
        "shop",
        "",
        true,
    ),
    (
        DESTINATION,
        &["create", "update", "patch", "delete"],
        "pods",
        "shop",
        "",
        false,
    ),
    (
        DESTINATION,
        &["create"],
        "tokenreviews.authentication.k8s.io",
        "",
        "",
        false,
    ),
    (
        DESTINATION,
        &["get", "update"],
        "leases.coordination.k8s.io",
        "linkerd",
        "policy-controller-write",
        true,
    ),
    (
        DESTINATION,
        &["get", "update"],
        "leases.coordination.k8s.io",
        "linkerd",
        "another",
        false,
    ),
    (
        DESTINATION,
        &["get", "list"],
        "leases.coordination.k8s.io",
        "kube-system",
        "",
        false,
    ),
    (INJECTOR, &["get", "list", "watch"], "namespaces", "", "", true),
    (INJECTOR, &["list"], "pods", "", "", true),
    (
        INJECTOR,
        &["create", "update", "patch", "delete"],
        "pods",
        "shop",
        "",
        false,
    ),
    (
        INJECTOR,
        &["patch"],
        MUTATING,
        "",
        "linkerd-proxy-injector-webhook-config",
        true,
    ),
    (INJECTOR, &["patch"], MUTATING, "", "another", false),
    (INJECTOR, &["create", "update", "delete"], MUTATING, "", "", false),
    (
        DESTINATION,
        &["patch"],
        VALIDATING,
        "",
        "linkerd-sp-validator-webhook-config",
        true,
    ),
    (DESTINATION, &["patch"], VALIDATING, "", "another", false),
];

/// The rows of [`PERMISSIONS`], verb by verb.
fn single_permissions() -> Vec<Expectation> {
    let mut expected = Vec::new();
    for &(account, verbs, resource, namespace, name, is_allowed) in PERMISSIONS {
        for &verb in verbs {
            let review = AccessReview {
                account_namespace: NAMESPACE,
                account,
                verb,
                resource,
                namespace,
                name,
            };
            expected.push((review, is_allowed));
        }
    }
    expected
}

/// Every verb of every account for the rows of [`DESTINATION_ACCESS`].
fn access_only_for_destination() -> Vec<Expectation> {
    let mut expected = Vec::new();
    for (resource, namespace, name, verbs) in DESTINATION_ACCESS {
        for account in ACCOUNTS {
            for verb in VERBS {
                let review = AccessReview {
                    account_namespace: NAMESPACE,
                    account,
                    verb,
                    resource,
                    namespace,
                    name,
                };
                expected.push((review, account == DESTINATION && verbs.contains(&verb)));
            }
        }
    }
    expected
}

/// Each account has access to its own Secrets by name, and no account to another's, to the issuer's, or to all Secrets.
fn access_to_secrets() -> Vec<Expectation> {
    let names = SECRETS.map(|(_, name)| name);
    let others = ["", "linkerd-identity-issuer", "cluster-credentials-west"];
    let mut expected = Vec::new();
    for account in ACCOUNTS {
        for verb in VERBS {
            for (namespace, name) in names.into_iter().chain(others).map(|name| ("linkerd", name)).chain([
                ("", ""),
                ("kube-system", ""),
                ("shop", "linkerd-sp-validator-k8s-tls"),
            ]) {
                let review = AccessReview {
                    account_namespace: NAMESPACE,
                    account,
                    verb,
                    resource: "secrets",
                    namespace,
                    name,
                };
                let is_allowed =
                    namespace == "linkerd" && SECRETS.contains(&(account, name)) && SECRET_VERBS.contains(&verb);
                expected.push((review, is_allowed));
            }
        }
    }
    expected
}

/// No account may use any of [`ESCALATIONS`].
fn privilege_escalations() -> Vec<Expectation> {
    let mut expected = Vec::new();
    for account in ACCOUNTS {
        for (verb, resource) in ESCALATIONS {
            let review = AccessReview {
                account_namespace: NAMESPACE,
                account,
                verb,
                resource,
                namespace: "linkerd",
                name: "",
            };
            expected.push((review, false));
        }
    }
    expected
}

#[tokio::test(flavor = "multi_thread")]
async fn service_accounts_have_the_permissions_of_the_table() {
    let server = start_with_chart(&[]).await;
    let expectations = [
        single_permissions(),
        access_only_for_destination(),
        access_to_secrets(),
        privilege_escalations(),
    ];
    assert_permissions(&server, &expectations.concat()).await;
}

const API_SERVICES: &str = "apiservices.apiregistration.k8s.io";
const MUTATING: &str = "mutatingwebhookconfigurations.admissionregistration.k8s.io";
const VALIDATING: &str = "validatingwebhookconfigurations.admissionregistration.k8s.io";

#[tokio::test(flavor = "multi_thread")]
async fn components_with_given_webhook_certificates_have_no_access_to_secrets() {
    let pairs = ["proxyInjector", "policyValidator", "profileValidator"]
        .map(|name| format!("--set={name}.crtPEM=certificate,{name}.keyPEM=key"));
    let values: Vec<&str> = pairs
        .iter()
        .map(String::as_str)
        .chain(["--set=telemetry.enabled=false"])
        .collect();
    let server = start_with_chart(&values).await;
    for (account, name) in SECRETS {
        for verb in SECRET_VERBS {
            let review = AccessReview {
                account_namespace: NAMESPACE,
                account,
                verb,
                resource: "secrets",
                namespace: "linkerd",
                name,
            };
            assert!(!review.is_allowed(&server).await, "{review:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_destination_service_can_read_the_credentials_of_linked_clusters_only() {
    let server = start_with_chart(&["--set=linkedClusters={east}"]).await;
    for account in ACCOUNTS {
        for name in ["cluster-credentials-east", "cluster-credentials-west", ""] {
            for verb in VERBS {
                let review = AccessReview {
                    account_namespace: NAMESPACE,
                    account,
                    verb,
                    resource: "secrets",
                    namespace: "linkerd",
                    name,
                };
                let is_linked = account == DESTINATION && name == "cluster-credentials-east";
                let expected = is_linked && ["list", "watch"].contains(&verb);
                assert_eq!(review.is_allowed(&server).await, expected, "{review:?}");
            }
        }
    }
    multicluster_permissions::check(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_component_creates_its_own_secrets_by_apply_and_no_others() {
    let server = start_with_chart(&[]).await;
    let access = kubernetes::Config {
        kubeconfig: Some(server.service_account_kubeconfig("linkerd", DESTINATION).await.unwrap()),
        ..kubernetes::Config::default()
    };
    let client = kubernetes::client(&access, &Registry::new()).await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "linkerd");
    let secret = |name: &str| -> Secret { serde_json::from_value(json!({"metadata": {"name": name}})).unwrap() };
    let assert_forbidden = |result: Result<Secret, kube::Error>| match result {
        Err(kube::Error::Api(status)) => assert_eq!(status.code, 403, "{status:?}"),
        other => panic!("{other:?}"),
    };
    let (own, params) = ("linkerd-sp-validator-k8s-tls", PatchParams::apply("a-test"));
    assert_forbidden(secrets.create(&PostParams::default(), &secret(own)).await);
    assert_forbidden(secrets.create(&PostParams::default(), &secret("a-token")).await);
    assert_forbidden(
        secrets
            .patch("a-token", &params, &Patch::Apply(&secret("a-token")))
            .await,
    );
    assert_forbidden(secrets.get("linkerd-identity-issuer").await);

    let (readiness, (signal, drain)) = (Readiness::new(), drain::channel());
    let controllers = [Config::sp_validator, Config::policy_validator].map(|config| {
        let config = config("linkerd".to_owned());
        let latch = readiness.latch(config.service);
        let controller = CertificateController::new(client.clone(), config, Arc::new(ServerCredentials::new()));
        tokio::spawn(controller.run(latch, drain.clone()))
    });
    eventually("certificates", async || readiness.is_ready().then_some(())).await;
    let all: Api<Secret> = Api::namespaced(server.client(), "linkerd");
    let made = all.get(own).await.unwrap();
    assert_eq!(made.type_.as_deref(), Some("kubernetes.io/tls"));
    drop(drain);
    let ended = async {
        signal.drain().await;
        for controller in controllers {
            controller.await.unwrap();
        }
    };
    within("the controllers have ended", ended).await;
}
