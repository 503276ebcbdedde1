//! Access reviews of service accounts, as `kubectl auth can-i --as` makes them.

use std::fs;

use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::{Api, PostParams};
use serde_json::json;
use tulle_tests::cluster::ApiServer;

use crate::render::objects;

/// Applies the permissions and webhook configurations of a rendered chart.
pub(crate) async fn apply_permissions(server: &ApiServer, rendered: &str) {
    let kinds = [
        "ServiceAccount",
        "Role",
        "ClusterRole",
        "Binding",
        "WebhookConfiguration",
    ];
    let wanted = objects(rendered).into_iter().filter(|object| {
        object["kind"]
            .as_str()
            .is_some_and(|kind| kinds.iter().any(|end| kind.ends_with(end)))
    });
    let list = json!({"apiVersion": "v1", "kind": "List", "items": wanted.collect::<Vec<_>>()});
    let file = server.dir().join("objects.json");
    fs::write(&file, list.to_string()).unwrap();
    server
        .kubectl(&["apply", "--server-side", "-f", file.to_str().unwrap()])
        .await
        .unwrap();
}

/// One access review. An empty name means all objects, and an empty namespace means the whole cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessReview {
    pub(crate) account_namespace: &'static str,
    pub(crate) account: &'static str,
    pub(crate) verb: &'static str,
    /// With its group, as in `leases.coordination.k8s.io`, and its subresource, as in `pods/exec`.
    pub(crate) resource: &'static str,
    pub(crate) namespace: &'static str,
    pub(crate) name: &'static str,
}

impl AccessReview {
    pub(crate) async fn is_allowed(self, server: &ApiServer) -> bool {
        let (resource, subresource) = self.resource.split_once('/').unwrap_or((self.resource, ""));
        let (resource, group) = resource.split_once('.').unwrap_or((resource, ""));
        let text = |text: &str| Some(text.to_owned());
        let (of, account) = (self.account_namespace, self.account);
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(format!("system:serviceaccount:{of}:{account}")),
                groups: Some(vec![
                    "system:serviceaccounts".to_owned(),
                    format!("system:serviceaccounts:{of}"),
                    "system:authenticated".to_owned(),
                ]),
                resource_attributes: Some(ResourceAttributes {
                    group: text(group),
                    resource: text(resource),
                    subresource: text(subresource),
                    verb: text(self.verb),
                    namespace: text(self.namespace),
                    name: text(self.name),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let reviews: Api<SubjectAccessReview> = Api::all(server.client());
        let answer = reviews.create(&PostParams::default(), &review).await.unwrap();
        answer.status.unwrap().allowed
    }
}

/// An access review and whether it must be allowed.
pub(crate) type Expectation = (AccessReview, bool);

/// Panics with all reviews that have another result than expected.
pub(crate) async fn assert_permissions(server: &ApiServer, expectations: &[Expectation]) {
    let mut wrong = Vec::new();
    for (review, expected) in expectations {
        if review.is_allowed(server).await != *expected {
            wrong.push(format!("{review:?}: expected {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

pub(crate) const VERBS: [&str; 8] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
];

/// Verbs and resources that would allow privilege escalation.
pub(crate) const ESCALATIONS: [(&str, &str); 11] = [
    ("create", "pods/exec"),
    ("create", "pods"),
    ("create", "serviceaccounts/token"),
    ("impersonate", "users"),
    ("get", "nodes/proxy"),
    ("escalate", "clusterroles.rbac.authorization.k8s.io"),
    ("bind", "clusterroles.rbac.authorization.k8s.io"),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
    ("create", "rolebindings.rbac.authorization.k8s.io"),
    ("create", "certificatesigningrequests.certificates.k8s.io"),
    ("*", "*"),
];
