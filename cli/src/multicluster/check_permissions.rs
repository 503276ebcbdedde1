//! The account, roles and bindings of the controller of a Link.

use anyhow::ensure;
use tulle_core::names::multicluster::SERVICE_MIRROR;

use super::extension::{LOCAL_ACCESS_OF_CHART, LegacyController, RBAC, find_object};
use crate::kubernetes::Cluster;

/// Names of the objects that give a controller its permissions.
struct ObjectNames {
    account: String,
    cluster_role: String,
    cluster_role_binding: String,
    /// The Roles, each with a RoleBinding of the same name.
    roles: Vec<String>,
}

impl ObjectNames {
    fn of_chart(link: &str) -> Self {
        Self {
            account: format!("controller-{link}"),
            cluster_role: LOCAL_ACCESS_OF_CHART.to_owned(),
            cluster_role_binding: format!("{LOCAL_ACCESS_OF_CHART}-{link}"),
            roles: vec![format!("controller-read-remote-creds-{link}")],
        }
    }

    /// The names of the service mirror for all Links, and of the Role by which it may read the credentials of this one. `link-gen`
    /// gives the Role the name of the Secret.
    fn of_service_mirror(credentials_secret: &str) -> Self {
        Self {
            account: SERVICE_MIRROR.to_owned(),
            cluster_role: LOCAL_ACCESS_OF_CHART.to_owned(),
            cluster_role_binding: format!("{SERVICE_MIRROR}-access-local-resources"),
            roles: vec![SERVICE_MIRROR.to_owned(), credentials_secret.to_owned()],
        }
    }

    /// The names of the deprecated command `link`.
    fn of_legacy_controller(link: &str) -> Self {
        let names = LegacyController::new(link);
        Self {
            account: names.service_mirror,
            cluster_role: names.local_access.clone(),
            cluster_role_binding: names.local_access,
            roles: vec![names.credentials],
        }
    }
}

/// Checks that a Link has the permissions of one of three controllers: that of the chart for this Link, the service mirror for all
/// Links, or that of the deprecated command `link`.
///
/// # Errors
/// Fails if none of them has all its objects. The error names the missing ones of the controller that lacks the fewest.
pub(super) async fn check(
    cluster: &Cluster,
    link: &str,
    namespace: &str,
    credentials_secret: &str,
) -> anyhow::Result<()> {
    let mut missing = missing_objects(cluster, &ObjectNames::of_chart(link), namespace).await?;
    for names in [
        ObjectNames::of_service_mirror(credentials_secret),
        ObjectNames::of_legacy_controller(link),
    ] {
        if missing.is_empty() {
            break;
        }
        let of_other = missing_objects(cluster, &names, namespace).await?;
        if of_other.len() < missing.len() {
            missing = of_other;
        }
    }
    ensure!(missing.is_empty(), "there is no {}", missing.join(", no "));
    Ok(())
}

async fn missing_objects(cluster: &Cluster, names: &ObjectNames, namespace: &str) -> anyhow::Result<Vec<String>> {
    let namespace = Some(namespace);
    let mut missing = Vec::new();
    let roles = names
        .roles
        .iter()
        .flat_map(|name| [(RBAC, "Role", namespace, name), (RBAC, "RoleBinding", namespace, name)]);
    let objects = [
        ("v1", "ServiceAccount", namespace, &names.account),
        (RBAC, "ClusterRole", None, &names.cluster_role),
        (RBAC, "ClusterRoleBinding", None, &names.cluster_role_binding),
    ];
    for (api_version, kind, namespace, name) in objects.into_iter().chain(roles) {
        let found = find_object(cluster, api_version, kind, namespace, name).await?;
        if found.is_none() {
            missing.push(format!("{kind} {name}"));
        }
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::*;

    /// Checks the Link `east` in a cluster that has objects with these names only.
    async fn check_with(names: &'static [&'static str]) -> anyhow::Result<()> {
        let service = tower::service_fn(move |req: Request<Body>| {
            let name = req.uri().path().rsplit('/').next().unwrap_or_default();
            let (code, body) = match names.contains(&name) {
                true => (
                    200,
                    json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {"name": name}}),
                ),
                false => (
                    404,
                    json!({"apiVersion": "v1", "kind": "Status", "code": 404, "reason": "NotFound", "message": "not found"}),
                ),
            };
            let body = Body::from(body.to_string().into_bytes());
            let response = Response::builder().status(code).body(body).unwrap();
            future::ready(Ok::<_, Infallible>(response))
        });
        let cluster = Cluster {
            client: kube::Client::new(service, "default"),
            control_plane_namespace: "linkerd".to_owned(),
            namespace: "default".to_owned(),
        };
        check(&cluster, "east", "linkerd-multicluster", "cluster-credentials-east").await
    }

    #[tokio::test]
    async fn the_permissions_are_those_of_the_chart_or_of_the_deprecated_command() {
        check_with(&[
            "linkerd-service-mirror",
            "linkerd-multicluster-controller-access-local-resources",
            "linkerd-service-mirror-access-local-resources",
            "cluster-credentials-east",
        ])
        .await
        .unwrap();
        check_with(&[
            "controller-east",
            "linkerd-multicluster-controller-access-local-resources",
            "linkerd-multicluster-controller-access-local-resources-east",
            "controller-read-remote-creds-east",
        ])
        .await
        .unwrap();
        check_with(&[
            "linkerd-service-mirror-east",
            "linkerd-service-mirror-access-local-resources-east",
            "linkerd-service-mirror-read-remote-creds-east",
        ])
        .await
        .unwrap();
        for (names, expected) in [
            (
                SERVICE_MIRROR_WITHOUT_CREDENTIALS,
                "there is no Role cluster-credentials-east, no RoleBinding cluster-credentials-east",
            ),
            (
                WITHOUT_CLUSTER_ROLE_BINDING,
                "there is no ClusterRoleBinding linkerd-multicluster-controller-access-local-resources-east",
            ),
            (
                LEGACY_WITHOUT_ROLE,
                "there is no Role linkerd-service-mirror-read-remote-creds-east, \
                 no RoleBinding linkerd-service-mirror-read-remote-creds-east",
            ),
        ] {
            let error = check_with(names).await.unwrap_err().to_string();
            assert_eq!(error, expected);
        }
    }

    /// The output of `link-gen` was not applied, or is that of an older version.
    const SERVICE_MIRROR_WITHOUT_CREDENTIALS: &[&str] = &[
        "linkerd-service-mirror",
        "linkerd-multicluster-controller-access-local-resources",
        "linkerd-service-mirror-access-local-resources",
    ];
    const WITHOUT_CLUSTER_ROLE_BINDING: &[&str] = &[
        "controller-east",
        "linkerd-multicluster-controller-access-local-resources",
        "controller-read-remote-creds-east",
    ];
    const LEGACY_WITHOUT_ROLE: &[&str] = &[
        "linkerd-service-mirror-east",
        "linkerd-service-mirror-access-local-resources-east",
    ];
}
