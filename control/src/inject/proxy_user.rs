//! Containers that run as the proxy's user or group: redirection leaves the connections of both alone, so that theirs would
//! bypass the mesh.

use k8s_openapi::api::core::v1::{Container, PodSpec};
use tulle_core::names::annotation;

use crate::inject::values::Values;
use crate::resources::workload::running_containers;

/// Why an application must not run as it is; none where its user is another one, or is not known before its image is.
pub(super) fn of_application(values: &Values, spec: &PodSpec) -> Option<String> {
    running_containers(spec).find_map(|container| {
        let Shared { what, id, field, key } = shared(values, spec, container)?;
        let name = &container.name;
        Some(format!(
            "container {name:?} runs as {what} {id}, which is the proxy's, so that its connections would bypass the mesh and its \
             policies: run it as another {what} (securityContext.{field}), or give the proxy another one (annotation {key})"
        ))
    })
}

/// What to know of init containers that run as the proxy does: some do so on purpose, to reach the network before it.
pub(super) fn of_setup(values: &Values, spec: &PodSpec) -> Vec<String> {
    let is_setup = |container: &&Container| container.restart_policy.as_deref() != Some("Always");
    let setup = spec.init_containers.iter().flatten().filter(is_setup);
    let found = setup.filter_map(|container| {
        let Shared { what, id, .. } = shared(values, spec, container)?;
        let name = &container.name;
        Some(format!(
            "init container {name:?} runs as {what} {id}, which is the proxy's: its connections bypass the mesh"
        ))
    });
    found.collect()
}

/// What a container has in common with the proxy.
struct Shared {
    what: &'static str,
    id: i64,
    /// Of a security context.
    field: &'static str,
    /// The annotation that gives the proxy another one.
    key: &'static str,
}

/// What containers do not say themselves, the pod says for them.
fn shared(values: &Values, spec: &PodSpec, container: &Container) -> Option<Shared> {
    let (own, of_pod) = (container.security_context.as_ref(), spec.security_context.as_ref());
    let user = own
        .and_then(|own| own.run_as_user)
        .or_else(|| of_pod.and_then(|pod| pod.run_as_user));
    let group = own
        .and_then(|own| own.run_as_group)
        .or_else(|| of_pod.and_then(|pod| pod.run_as_group));
    let (uid, gid) = (values.proxy.uid, values.proxy.gid);
    if user == Some(uid) {
        return Some(Shared {
            what: "user",
            id: uid,
            field: "runAsUser",
            key: annotation::PROXY_UID,
        });
    }
    (gid >= 0 && group == Some(gid)).then_some(Shared {
        what: "group",
        id: gid,
        field: "runAsGroup",
        key: annotation::PROXY_GID,
    })
}
