//! Services whose endpoints are those of Services in other clusters, as the service mirror writes them.

use tulle_core::dns_names::{is_dns_label, is_dns_subdomain};
use tulle_core::names::{annotation, label};

use crate::model::remote_discovery::{FederatedMembers, MemberPreference, RemoteDiscovery, RemoteService};
use crate::resources::meta::Meta;
use crate::resources::service::Service;

/// Returns where the endpoints of a Service are found. `None` if they are its own, as those of a mirror with a gateway are.
pub fn discovery(service: &Service) -> Option<RemoteDiscovery> {
    let meta = &service.meta;
    let (remote, local) = (
        meta.annotation(annotation::REMOTE_DISCOVERY),
        meta.annotation(annotation::LOCAL_DISCOVERY),
    );
    if remote.is_some() || local.is_some() {
        return Some(RemoteDiscovery::Federated(FederatedMembers {
            local: local.filter(|name| !name.is_empty()).map(Into::into),
            remote: members(remote.unwrap_or_default()).filter_map(Result::ok).collect(),
            preference: match meta.annotation(annotation::PREFER_LOCAL) {
                Some("true") => MemberPreference::Local,
                _ => MemberPreference::All,
            },
        }));
    }
    let cluster = meta
        .label(label::REMOTE_DISCOVERY)
        .filter(|name| is_dns_subdomain(name))?;
    let name = meta.label(label::REMOTE_SERVICE).filter(|name| is_dns_label(name));
    Some(name.map_or(RemoteDiscovery::Unnamed, |name| {
        RemoteDiscovery::Mirror(RemoteService {
            cluster: cluster.into(),
            name: name.into(),
        })
    }))
}

/// Returns the entries of a federated Service's annotation that are not `<service>@<cluster>`.
pub fn invalid_members(meta: &Meta) -> Vec<&str> {
    let list = meta.annotation(annotation::REMOTE_DISCOVERY).unwrap_or_default();
    members(list).filter_map(Result::err).collect()
}

/// Returns for each entry the member that it names, or the entry itself if it is invalid or exceeds [`MAX_MEMBERS`].
fn members(list: &str) -> impl Iterator<Item = Result<RemoteService, &str>> {
    let entries = list.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    entries.enumerate().map(|(n, entry)| match entry.split_once('@') {
        Some((name, cluster)) if n < MAX_MEMBERS && is_dns_label(name) && is_dns_subdomain(cluster) => {
            Ok(RemoteService {
                cluster: cluster.into(),
                name: name.into(),
            })
        }
        _ => Err(entry),
    })
}

/// Maximum number of members of a Service in other clusters. The control plane watches the cluster of each of them.
pub const MAX_MEMBERS: usize = 100;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::resources::{Kind, Object, decode};

    fn service(labels: &Value, annotations: &Value) -> Service {
        let metadata = json!({"name": "web", "namespace": "shop", "labels": labels, "annotations": annotations});
        match decode(
            Kind::Service,
            &json!({"metadata": metadata, "spec": {"ports": [{"port": 80}]}}),
        )
        .unwrap()
        {
            Object::Service(service) => (*service).clone(),
            other => panic!("{other:?}"),
        }
    }

    fn remote(name: &str, cluster: &str) -> RemoteService {
        RemoteService {
            cluster: cluster.into(),
            name: name.into(),
        }
    }

    #[test]
    fn annotations_of_a_federated_service_take_precedence_over_labels_of_a_mirror() {
        let mirror = json!({
            "multicluster.linkerd.io/remote-discovery": "east", "multicluster.linkerd.io/remote-service": "web",
        });
        let parse = |labels: &Value, annotations: &Value| discovery(&service(labels, annotations));
        assert_eq!(parse(&json!({}), &json!({})), None);
        // A mirror with a gateway has endpoints.
        assert_eq!(
            parse(&json!({"mirror.linkerd.io/cluster-name": "east"}), &json!({})),
            None
        );
        assert_eq!(
            parse(&mirror, &json!({})),
            Some(RemoteDiscovery::Mirror(remote("web", "east")))
        );
        let unnamed = json!({"multicluster.linkerd.io/remote-discovery": "east"});
        assert_eq!(parse(&unnamed, &json!({})), Some(RemoteDiscovery::Unnamed));
        let empty = json!({"multicluster.linkerd.io/local-discovery": ""});
        assert_eq!(
            parse(&mirror, &empty),
            Some(RemoteDiscovery::Federated(FederatedMembers::default()))
        );
    }

    #[test]
    fn valid_members_keep_their_order_and_invalid_ones_are_left_out() {
        let annotations = json!({
            "multicluster.linkerd.io/remote-discovery": "web@east, api@north,@x,web,web@a@b,web@",
            "multicluster.linkerd.io/local-discovery": "web",
            "config.tulle.dev/prefer-local": "true",
        });
        let service = service(&json!({}), &annotations);
        let expected = FederatedMembers {
            local: Some("web".into()),
            remote: vec![remote("web", "east"), remote("api", "north")],
            preference: MemberPreference::Local,
        };
        assert_eq!(discovery(&service), Some(RemoteDiscovery::Federated(expected)));
        assert_eq!(invalid_members(&service.meta), ["@x", "web", "web@a@b", "web@"]);
    }

    #[test]
    fn members_above_the_maximum_are_left_out_and_reported() {
        let list = |n: usize| (0..n).map(|i| format!("web@c{i}")).collect::<Vec<_>>().join(",");
        for (n, left_out) in [(100, &[][..]), (102, &["web@c100", "web@c101"])] {
            let annotations = json!({"multicluster.linkerd.io/remote-discovery": list(n)});
            let service = service(&json!({}), &annotations);
            let discovery = discovery(&service).unwrap();
            let members = discovery.remote_services();
            assert_eq!(members.len(), 100, "{n} members");
            assert_eq!(members[99], remote("web", "c99"), "{n} members");
            assert_eq!(invalid_members(&service.meta), left_out, "{n} members");
        }
    }
}
