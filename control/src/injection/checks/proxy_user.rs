//! Containers that run as the proxy's user or group. Redirection excludes that user and group, so the connections of such
//! containers bypass the mesh.

use k8s_openapi::api::core::v1::{Container, PodSpec};
use tulle_core::names::annotation;

use crate::injection::values::Values;
use crate::resources::workload::long_running_containers;

/// The error if an application container runs as the proxy's user or group. `None` if it does not, or if only the image sets
/// the user.
pub(in crate::injection) fn application_error(values: &Values, spec: &PodSpec) -> Option<String> {
    long_running_containers(spec).find_map(|container| {
        let SharedId { kind, id, field, key } = shared_id(values, spec, container)?;
        let name = &container.name;
        Some(format!(
            "container {name:?} runs as {kind} {id}, the {kind} of the proxy, so its connections would bypass the mesh and its \
             policies: run it as another {kind} (securityContext.{field}), or set another {kind} for the proxy (annotation {key})"
        ))
    })
}

/// Warnings about init containers that run as the proxy's user or group. They are not denied, because some need the network before
/// a sidecar that is not native starts.
pub(in crate::injection) fn init_container_warnings(values: &Values, spec: &PodSpec) -> Vec<String> {
    let is_no_sidecar = |container: &&Container| container.restart_policy.as_deref() != Some("Always");
    let without_sidecars = spec.init_containers.iter().flatten().filter(is_no_sidecar);
    let found = without_sidecars.filter_map(|container| {
        let SharedId { kind, id, .. } = shared_id(values, spec, container)?;
        let name = &container.name;
        Some(format!(
            "init container {name:?} runs as {kind} {id}, the {kind} of the proxy, so its connections bypass the mesh"
        ))
    });
    found.collect()
}

/// A user or group id that a container shares with the proxy.
struct SharedId {
    /// `user` or `group`.
    kind: &'static str,
    id: i64,
    /// Field of the security context.
    field: &'static str,
    /// The annotation that changes the proxy's id.
    key: &'static str,
}

/// Finds the id that a container shares with the proxy. Fields that the container does not set come from the pod's security
/// context.
fn shared_id(values: &Values, spec: &PodSpec, container: &Container) -> Option<SharedId> {
    let (container, pod) = (container.security_context.as_ref(), spec.security_context.as_ref());
    let user = container
        .and_then(|container| container.run_as_user)
        .or_else(|| pod.and_then(|pod| pod.run_as_user));
    let group = container
        .and_then(|container| container.run_as_group)
        .or_else(|| pod.and_then(|pod| pod.run_as_group));
    let (uid, gid) = (values.proxy.uid, values.proxy.gid);
    if user == Some(uid) {
        return Some(SharedId {
            kind: "user",
            id: uid,
            field: "runAsUser",
            key: annotation::PROXY_UID,
        });
    }
    (gid >= 0 && group == Some(gid)).then_some(SharedId {
        kind: "group",
        id: gid,
        field: "runAsGroup",
        key: annotation::PROXY_GID,
    })
}
