//! Removes from a manifest what injection added.

use serde_json::Value;
use tulle_control::injection::{
    DEBUG_CONTAINER, INIT_CONTAINER, INJECTED_VOLUMES, PROXY_CONTAINER, VALIDATOR_CONTAINER, has_injected_containers,
    restore_probes,
};
use tulle_core::names::{annotation, label};

use super::workload::{self, ManifestKind};

/// Returns whether anything was removed.
pub(super) fn apply(object: &mut Value) -> bool {
    let before = object.clone();
    match ManifestKind::of(object) {
        ManifestKind::Pods(path) => {
            if let Some(template) = workload::at(object, path) {
                remove_from_pod_template(template);
            }
        }
        ManifestKind::Namespace => remove_mesh_metadata(object),
        ManifestKind::Service | ManifestKind::Other => {}
    }
    *object != before
}

/// Removes injected containers from the pods of an object before they are injected again. Pods without such containers stay
/// unchanged.
pub(super) fn remove_sidecar(object: &mut Value, path: &[&str]) {
    let Some(template) = workload::at(object, path) else {
        return;
    };
    let is_injected =
        workload::template(template).is_ok_and(|pod| pod.spec.is_some_and(|spec| has_injected_containers(&spec)));
    if is_injected {
        remove_from_pod_template(template);
    }
}

fn remove_from_pod_template(template: &mut Value) {
    remove_mesh_metadata(template);
    // Must run before the proxy container is removed, because that container holds the original probes.
    if let Some(Value::Object(spec)) = template.get_mut("spec") {
        restore_probes(spec);
    }
    let added = [PROXY_CONTAINER, INIT_CONTAINER, VALIDATOR_CONTAINER, DEBUG_CONTAINER];
    let volumes = injected_volumes(template, &added);
    let volumes: Vec<&str> = volumes.iter().map(String::as_str).collect();
    let lists: [(&str, &[&str]); 3] = [
        ("containers", &added),
        ("initContainers", &added),
        ("volumes", &volumes),
    ];
    for (list, names) in lists {
        let Some(Value::Object(spec)) = template.get_mut("spec") else {
            return;
        };
        let Some(Value::Array(items)) = spec.get_mut(list) else {
            continue;
        };
        let n_items = items.len();
        items.retain(|item| !item["name"].as_str().is_some_and(|name| names.contains(&name)));
        // A list that the user left empty stays.
        if items.is_empty() && n_items > 0 && list != "containers" {
            spec.remove(list);
        }
    }
}

/// The volumes to remove: those with a fixed name that injection uses, and those that the init container mounts and no container of
/// the user does, because a value of the chart can rename the volume of the init container.
fn injected_volumes(template: &Value, injected_containers: &[&str]) -> Vec<String> {
    let lists = ["containers", "initContainers"].map(|list| template["spec"][list].as_array());
    let containers = || lists.into_iter().flatten().flatten();
    let name_of = |object: &Value| object["name"].as_str().unwrap_or_default().to_owned();
    let mounts_of = |container: &Value| {
        let mounts = container["volumeMounts"].as_array().into_iter().flatten();
        mounts.map(name_of).collect::<Vec<_>>()
    };
    let of_init = containers().filter(|container| container["name"] == INIT_CONTAINER);
    let of_others = containers().filter(|container| !injected_containers.contains(&name_of(container).as_str()));
    let kept: Vec<String> = of_others.flat_map(mounts_of).collect();
    let only_ours = of_init.flat_map(mounts_of).filter(|name| !kept.contains(name));
    INJECTED_VOLUMES
        .map(str::to_owned)
        .into_iter()
        .chain(only_ours)
        .collect()
}

/// Whether injection added an entry.
type IsOurs = fn(&str, &Value) -> bool;

/// Removes the mesh's own keys. Settings of the user (`config.linkerd.io/*`) and a disabled injection stay.
fn remove_mesh_metadata(object: &mut Value) {
    let Some(Value::Object(metadata)) = object.get_mut("metadata") else {
        return;
    };
    let maps: [(&str, IsOurs); 2] = [("annotations", is_our_annotation), ("labels", is_our_label)];
    for (map, is_ours) in maps {
        let Some(Value::Object(entries)) = metadata.get_mut(map) else {
            continue;
        };
        let n_entries = entries.len();
        entries.retain(|key, value| !is_ours(key, value));
        if entries.is_empty() && n_entries > 0 {
            metadata.remove(map);
        }
    }
}

fn is_our_annotation(key: &str, value: &Value) -> bool {
    key.starts_with("linkerd.io/") && !(key == annotation::INJECT && value == "disabled")
}

fn is_our_label(key: &str, _: &Value) -> bool {
    key == label::CONTROL_PLANE_NS || key == label::WORKLOAD_NS || key.starts_with(label::PROXY_OWNER_PREFIX)
}
