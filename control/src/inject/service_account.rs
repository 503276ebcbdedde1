//! Service accounts that no certificate can be made for.

use k8s_openapi::api::core::v1::PodSpec;

use crate::trust::is_label;

/// Why the service account of a pod keeps it out of the mesh; none where it does not.
///
/// Kubernetes permits dots in the names of service accounts. An identity is `<service account>.<namespace>.serviceaccount…`,
/// and is read from the left, by other proxies and control planes too: a dot would have it name another namespace.
pub(super) fn problem(spec: &PodSpec) -> Option<String> {
    let names = [&spec.service_account_name, &spec.service_account];
    // Without a name it is `default`.
    let name = names.into_iter().flatten().find(|name| !name.is_empty())?;
    (!is_label(name)).then(|| {
        format!(
            "the identity service certifies no service account named {name:?}, so that the proxy would never be ready: run the pod \
             as a service account whose name has lower-case letters, digits and '-' only, at most 63, or leave the pod out of \
             the mesh (annotation linkerd.io/inject: disabled)"
        )
    })
}
