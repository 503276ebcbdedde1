//! The audit logs of both clusters: the service mirrors of `west` use all permissions that the chart grants them, and no request of
//! the extension is refused.

use anyhow::ensure;
use serde::Deserialize as _;
use serde_json::Value;
use tulle_tests::charts::Helm;
use tulle_tests::linked_clusters::{LinkedClusters, NAMESPACE, SERVICE_MIRROR};

use crate::permissions::{self, UnusedGrant};

/// The accounts in `west` whose permissions the chart grants.
const ACCOUNTS: [&str; 2] = [SERVICE_MIRROR, LOCAL_MIRROR];
const LOCAL_MIRROR: &str = "linkerd-local-service-mirror";

/// Grants that the earlier steps can leave unused. Those of the account for other clusters are not compared: Linkerd's service mirror
/// and destination service use more of them than those of tulle.
const ALLOWED_UNUSED_GRANTS: [UnusedGrant; 8] = [
    UnusedGrant {
        account: SERVICE_MIRROR,
        verb: "get",
        resource: "endpoints",
        why: "only if Endpoints of another owner have the name of a mirror",
    },
    UnusedGrant {
        account: SERVICE_MIRROR,
        verb: "create",
        resource: "events",
        why: "only if the Link has a problem",
    },
    UnusedGrant {
        account: SERVICE_MIRROR,
        verb: "patch",
        resource: "events",
        why: "only if a problem of the Link ends and comes back soon",
    },
    UnusedGrant {
        account: LOCAL_MIRROR,
        verb: "create",
        resource: "services",
        why: "the other service mirror can create the federated Service first",
    },
    UnusedGrant {
        account: LOCAL_MIRROR,
        verb: "update",
        resource: "services",
        why: "only if the other service mirror has created the federated Service, or if the local member changes",
    },
    UnusedGrant {
        account: LOCAL_MIRROR,
        verb: "delete",
        resource: "services",
        why: "the federated Service keeps its members",
    },
    UnusedGrant {
        account: LOCAL_MIRROR,
        verb: "create",
        resource: "events",
        why: "only if a Service cannot join its federated Service",
    },
    UnusedGrant {
        account: LOCAL_MIRROR,
        verb: "patch",
        resource: "events",
        why: "only if the same cause ends and comes back soon",
    },
];

pub(super) async fn permissions_are_those_that_are_used(linked: &LinkedClusters) {
    let (west, east) = (&linked.west.cluster, &linked.east.cluster);
    let namespace = ["--namespace", NAMESPACE];
    let rendered = Helm::new().unwrap().template("tulle-multicluster", &namespace).unwrap();
    let objects: Vec<Value> = serde_yaml_ng::Deserializer::from_str(&rendered)
        .map(|document| Value::deserialize(document).unwrap())
        .collect();
    let mut granted = permissions::granted_permissions(&objects);
    granted.retain(|grant| {
        let is_allowed = ALLOWED_UNUSED_GRANTS.iter().any(|allowed| allowed.covers(grant));
        ACCOUNTS.contains(&&*grant.account) && !is_allowed
    });
    assert!(granted.len() > 20, "{granted:?}");
    let all_used = async || {
        let log = west.audit_log()?;
        let used = permissions::permitted_requests(&log, NAMESPACE);
        let is_used = |grant: &&permissions::Permission| used.iter().any(|requested| grant.is_used_by(requested));
        let unused = granted.iter().filter(|grant| !is_used(grant));
        let unused: Vec<_> = unused.map(ToString::to_string).collect();
        ensure!(unused.is_empty(), "granted and never used:\n{}", unused.join("\n"));
        Ok(())
    };
    west.wait_until("every permission is used", all_used).await.unwrap();
    for (name, cluster) in [("west", west), ("east", east)] {
        let refused = permissions::refused_requests(&cluster.audit_log().unwrap(), NAMESPACE);
        assert!(refused.is_empty(), "{name}: {refused:?}");
    }
}
