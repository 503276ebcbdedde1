//! Checks the client namespace in a request against the client's certificate.
//!
//! Some objects apply only to the clients of their namespace, so only these clients may read them: consumer routes, EgressNetworks
//! that are not global, and ServiceProfiles outside the namespace of their Service. Pods are not looked up: the certificate of a
//! pod names its namespace, and the cluster state may not contain a new pod yet.

use std::fmt;

use tulle_core::identity::{Identity, service_account_identity};

use crate::cluster::Cluster;
use crate::cluster::store::objects::LookupKey;

/// No identity in the certificate of a client belongs to the namespace in its request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "only clients in namespace {namespace} may make this request: {service_accounts}, or the identity of an \
     ExternalWorkload in this namespace; the client's certificate is for {identities}"
)]
pub struct ClientNamespaceMismatch {
    namespace: String,
    service_accounts: String,
    identities: String,
}

impl Cluster {
    /// Checks that one of a client's identities belongs to a service account or an ExternalWorkload of the namespace.
    ///
    /// # Errors
    /// Fails if no identity does.
    pub fn check_client_namespace(
        &self,
        namespace: &str,
        identities: &[Identity],
    ) -> Result<(), ClientNamespaceMismatch> {
        let config = self.config();
        let (control_ns, trust_domain) = (&config.controller_namespace, &config.trust_domain);
        let is_service_account =
            |identity: &Identity| identity.service_account_namespace(control_ns, trust_domain) == Some(namespace);
        // The check of service accounts comes first: it needs no lock, and most clients are pods.
        if identities.iter().any(is_service_account) || self.has_external_workload(namespace, identities) {
            return Ok(());
        }
        Err(ClientNamespaceMismatch {
            namespace: namespace.to_owned(),
            service_accounts: service_account_identity("<service account>", namespace, control_ns, trust_domain),
            identities: IdentityList(identities).to_string(),
        })
    }

    /// Whether an ExternalWorkload of the namespace has one of these identities.
    fn has_external_workload(&self, namespace: &str, identities: &[Identity]) -> bool {
        let state = self.0.state.lock();
        identities.iter().any(|identity| {
            let key = LookupKey::Identity(namespace.into(), identity.as_str().into());
            state.store.find(&key).next().is_some()
        })
    }
}

/// Formats the identities of a certificate for error messages.
pub struct IdentityList<'a>(pub &'a [Identity]);

impl fmt::Display for IdentityList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("no identity"),
            [name] => f.write_str(name.as_str()),
            [name, others @ ..] => write!(f, "{name} and {} more", others.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tulle_core::metrics::Registry;

    use super::*;
    use crate::cluster::Config;
    use crate::resources::event::Event;
    use crate::resources::meta::NamespacedName;
    use crate::resources::{Kind, decode};

    /// A cluster with an ExternalWorkload in the namespace `vms`.
    fn cluster(identity: &str) -> Cluster {
        let cluster = Cluster::new(Config::default(), &Registry::new());
        let workload = serde_json::json!({
            "metadata": {"name": "vm", "namespace": "vms"},
            "spec": {"meshTLS": {"identity": identity, "serverName": "vm.example.org"}, "workloadIPs": [{"ip": "10.77.0.1"}]},
        });
        let workload = decode(Kind::ExternalWorkload, workload).unwrap();
        cluster.sink().apply(vec![Event::Applied(workload)]);
        cluster
    }

    fn parse(identities: &[&str]) -> Vec<Identity> {
        identities.iter().map(|identity| identity.parse().unwrap()).collect()
    }

    #[test]
    fn a_client_belongs_to_the_namespace_of_its_service_account_or_external_workload() {
        let check = |cluster: &Cluster, namespace: &str, identities: &[&str], belongs: bool| {
            let checked = cluster.check_client_namespace(namespace, &parse(identities));
            assert_eq!(checked.is_ok(), belongs, "{namespace} {identities:?}");
        };
        let (web, machine) = (
            "web.shop.serviceaccount.identity.linkerd.cluster.local",
            "spiffe://example.org/vm",
        );
        let spiffe = cluster(machine);
        for (namespace, identities, belongs) in [
            ("shop", &[web][..], true),
            ("vms", &[web], false),
            ("web", &[web], false),
            ("", &[web], false),
            ("vms", &[machine], true),
            ("shop", &[machine], false),
            ("vms", &["spiffe://example.org/other"], false),
            ("vms", &["vm.example.org"], false),
            ("shop", &[machine, web], true),
            ("vms", &[machine, web], true),
            ("other", &[machine, web], false),
            ("shop", &[], false),
        ] {
            check(&spiffe, namespace, identities, belongs);
        }
        // Identities of an ExternalWorkload that are not SPIFFE ids.
        for identity in [
            "Vm.example.org",
            web,
            "web.shop.serviceaccount.identity.linkerd.other.example",
        ] {
            check(&cluster(identity), "vms", &[identity], true);
        }
        let other_domain = "web.shop.serviceaccount.identity.linkerd.other.example";
        check(&spiffe, "shop", &[other_domain], false);
    }

    #[test]
    fn the_identity_of_a_deleted_external_workload_is_rejected() {
        let (cluster, identities) = (cluster("spiffe://example.org/vm"), parse(&["spiffe://example.org/vm"]));
        assert!(cluster.check_client_namespace("vms", &identities).is_ok());
        let name = NamespacedName::new("vms", "vm");
        cluster.sink().apply(vec![Event::Deleted(Kind::ExternalWorkload, name)]);
        assert!(cluster.check_client_namespace("vms", &identities).is_err());
    }

    #[test]
    fn the_error_names_the_expected_identities_and_the_client() {
        let refused = cluster("vm.example.org").check_client_namespace(
            "shop",
            &parse(&[
                "api.billing.serviceaccount.identity.linkerd.cluster.local",
                "vm.example.org",
            ]),
        );
        assert_eq!(
            refused.unwrap_err().to_string(),
            "only clients in namespace shop may make this request: \
             <service account>.shop.serviceaccount.identity.linkerd.cluster.local, or the identity of an ExternalWorkload in \
             this namespace; the client's certificate is for \
             api.billing.serviceaccount.identity.linkerd.cluster.local and 1 more"
        );
    }
}
