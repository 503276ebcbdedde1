//! Service account names that the identity service does not issue certificates for.

use k8s_openapi::api::core::v1::PodSpec;
use tulle_core::dns_names::is_dns_label;

/// The error if the service account name of a pod cannot be part of an identity.
///
/// Kubernetes permits dots in service account names. An identity is `<service account>.<namespace>.serviceaccount…`; with a dot,
/// programs that read it from the left would take a part of the account's name for the namespace.
pub(in crate::injection) fn name_error(spec: &PodSpec) -> Option<String> {
    let names = [&spec.service_account_name, &spec.service_account];
    // The default name is `default`.
    let name = names.into_iter().flatten().find(|name| !name.is_empty())?;
    (!is_dns_label(name)).then(|| {
        format!(
            "the identity service issues no certificate for the service account name {name:?}, so the proxy would never be \
             ready: run the pod as a service account whose name is at most 63 lower-case letters, digits and '-', or \
             leave the pod out of the mesh (annotation linkerd.io/inject: disabled)"
        )
    })
}
