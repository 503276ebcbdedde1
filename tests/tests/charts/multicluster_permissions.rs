//! The permissions of the accounts of the chart `tulle-multicluster`: those of its pods, and the one for other clusters.

use tulle_tests::charts::Helm;
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;

use crate::access_review::{AccessReview, ESCALATIONS, Expectation, VERBS, apply_permissions, assert_permissions};

const NAMESPACE: &str = "linkerd-multicluster";
/// The controller of the Link `east`.
const CONTROLLER: &str = "controller-east";
/// The controller of all other Links, which may read the credentials that the output of `link-gen` permits.
const SERVICE_MIRROR: &str = "linkerd-service-mirror";
const LOCAL_MIRROR: &str = "linkerd-local-service-mirror";
const GATEWAY: &str = "linkerd-gateway";
/// The account whose token other clusters have.
const REMOTE_READER: &str = "linkerd-service-mirror-remote-access-default";
const ACCOUNTS: [&str; 5] = [CONTROLLER, SERVICE_MIRROR, LOCAL_MIRROR, GATEWAY, REMOTE_READER];

const READ: &[&str] = &["get", "list", "watch"];
const FOLLOW: &[&str] = &["list", "watch"];
const RECORD: &[&str] = &["create", "patch"];

/// Account, resource, namespace, name, and the verbs that the account may use. It may use no others.
type AccessRow = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    &'static [&'static str],
);

const ACCESS: &[AccessRow] = &[
    (REMOTE_READER, "pods", "", "", READ),
    (REMOTE_READER, "services", "", "", READ),
    (REMOTE_READER, "endpoints", "", "", READ),
    (REMOTE_READER, "replicasets.apps", "", "", READ),
    (REMOTE_READER, "jobs.batch", "", "", READ),
    (REMOTE_READER, "endpointslices.discovery.k8s.io", "", "", READ),
    (REMOTE_READER, "servers.policy.linkerd.io", "", "", READ),
    (REMOTE_READER, "externalworkloads.workload.linkerd.io", "", "", READ),
    (REMOTE_READER, "configmaps", "linkerd", "linkerd-config", &["get"]),
    (REMOTE_READER, "configmaps", "linkerd", "", &[]),
    (REMOTE_READER, "configmaps", "shop", "another", &[]),
    (REMOTE_READER, "events.events.k8s.io", "shop", "", RECORD),
    (REMOTE_READER, "events", "shop", "", RECORD),
    (REMOTE_READER, "namespaces", "", "", &[]),
    (REMOTE_READER, "nodes", "", "", &[]),
    (REMOTE_READER, "links.multicluster.linkerd.io", NAMESPACE, "", &[]),
    (
        CONTROLLER,
        "services",
        "",
        "",
        &["list", "watch", "create", "update", "delete"],
    ),
    (
        CONTROLLER,
        "endpoints",
        "",
        "",
        &["get", "list", "watch", "create", "update", "delete"],
    ),
    (CONTROLLER, "namespaces", "", "", FOLLOW),
    (CONTROLLER, "pods", "", "", &[]),
    (CONTROLLER, "links.multicluster.linkerd.io", "", "", FOLLOW),
    (
        CONTROLLER,
        "links.multicluster.linkerd.io/status",
        NAMESPACE,
        "east",
        &["patch"],
    ),
    (
        CONTROLLER,
        "links.multicluster.linkerd.io/status",
        NAMESPACE,
        "west",
        &[],
    ),
    (CONTROLLER, "events.events.k8s.io", NAMESPACE, "", RECORD),
    (CONTROLLER, "events.events.k8s.io", "shop", "", &[]),
    (CONTROLLER, "leases.coordination.k8s.io", NAMESPACE, "", &["create"]),
    (
        CONTROLLER,
        "leases.coordination.k8s.io",
        NAMESPACE,
        "service-mirror-write-east",
        &["create", "get", "update"],
    ),
    (CONTROLLER, "leases.coordination.k8s.io", "linkerd", "", &[]),
    (SERVICE_MIRROR, "namespaces", "", "", FOLLOW),
    (SERVICE_MIRROR, "pods", "", "", &[]),
    (SERVICE_MIRROR, "links.multicluster.linkerd.io", "", "", FOLLOW),
    (
        SERVICE_MIRROR,
        "links.multicluster.linkerd.io/status",
        NAMESPACE,
        "",
        &["patch"],
    ),
    (SERVICE_MIRROR, "links.multicluster.linkerd.io/status", "shop", "", &[]),
    (SERVICE_MIRROR, "events.events.k8s.io", NAMESPACE, "", RECORD),
    (SERVICE_MIRROR, "events.events.k8s.io", "shop", "", &[]),
    (
        SERVICE_MIRROR,
        "leases.coordination.k8s.io",
        NAMESPACE,
        "",
        &["create", "get", "update"],
    ),
    (SERVICE_MIRROR, "leases.coordination.k8s.io", "linkerd", "", &[]),
    (
        LOCAL_MIRROR,
        "services",
        "",
        "",
        &["list", "watch", "create", "update", "delete"],
    ),
    (LOCAL_MIRROR, "endpoints", "", "", &[]),
    (LOCAL_MIRROR, "namespaces", "", "", FOLLOW),
    (LOCAL_MIRROR, "links.multicluster.linkerd.io", "", "", FOLLOW),
    (
        LOCAL_MIRROR,
        "links.multicluster.linkerd.io/status",
        NAMESPACE,
        "east",
        &[],
    ),
    (LOCAL_MIRROR, "events.events.k8s.io", "shop", "", RECORD),
    (LOCAL_MIRROR, "events", "shop", "", &[]),
    (
        LOCAL_MIRROR,
        "leases.coordination.k8s.io",
        NAMESPACE,
        "local-service-mirror-write",
        &["create", "get", "update"],
    ),
    (GATEWAY, "services", "", "", &[]),
    (GATEWAY, "pods", NAMESPACE, "", &[]),
    (GATEWAY, "configmaps", "linkerd", "linkerd-config", &[]),
];

/// Namespaces and names of Secrets. An empty name means all Secrets.
const SECRETS: [(&str, &str); 8] = [
    ("", ""),
    ("linkerd", ""),
    ("linkerd", "cluster-credentials-east"),
    ("shop", ""),
    ("shop", "cluster-credentials-east"),
    (NAMESPACE, ""),
    (NAMESPACE, "cluster-credentials-east"),
    (NAMESPACE, "cluster-credentials-west"),
];

/// Applies the permissions of the chart with a controller for the Link `east`, and checks them.
pub(crate) async fn check(server: &ApiServer) {
    server.create_namespace(NAMESPACE).await.unwrap();
    let values = ["--namespace", NAMESPACE, "--set=controllers[0].link.ref.name=east"];
    let rendered = Helm::new().unwrap().template("tulle-multicluster", &values).unwrap();
    apply_permissions(server, &rendered).await;
    let last = AccessReview {
        account_namespace: NAMESPACE,
        account: REMOTE_READER,
        verb: "list",
        resource: "pods",
        namespace: "",
        name: "",
    };
    eventually("the permissions apply", async || {
        last.is_allowed(server).await.then_some(())
    })
    .await;
    let expectations = [access(), access_to_secrets(), privilege_escalations()];
    assert_permissions(server, &expectations.concat()).await;
}

/// Every verb for the rows of [`ACCESS`].
fn access() -> Vec<Expectation> {
    let mut expected = Vec::new();
    for &(account, resource, namespace, name, verbs) in ACCESS {
        for verb in VERBS {
            let review = AccessReview {
                account_namespace: NAMESPACE,
                account,
                verb,
                resource,
                namespace,
                name,
            };
            expected.push((review, verbs.contains(&verb)));
        }
    }
    expected
}

/// The controller can read the credentials of its Link. No account can read another Secret, list all, or write one.
fn access_to_secrets() -> Vec<Expectation> {
    let mut expected = Vec::new();
    for account in ACCOUNTS {
        for (namespace, name) in SECRETS {
            for verb in VERBS {
                let review = AccessReview {
                    account_namespace: NAMESPACE,
                    account,
                    verb,
                    resource: "secrets",
                    namespace,
                    name,
                };
                let is_own = (account, namespace, name) == (CONTROLLER, NAMESPACE, "cluster-credentials-east");
                expected.push((review, is_own && FOLLOW.contains(&verb)));
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
                namespace: NAMESPACE,
                name: "",
            };
            expected.push((review, false));
        }
    }
    expected
}
