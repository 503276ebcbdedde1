//! Removes from a manifest what injection added.

use serde_json::Value;
use tulle_control::injection::{
    DEBUG_CONTAINER, INIT_CONTAINER, INJECTED_VOLUMES, PROXY_CONTAINER, VALIDATOR_CONTAINER, has_injected_containers,
    restore_probes,
};
use tulle_core::names::{annotation, label};

use super::workload::{self, ManifestKind};

/// Removes from an object what injection added. Returns whether the object has changed.
pub(super) fn apply(object: &mut Value) -> bool {
    let before = object.clone();
    match ManifestKind::from_object(object) {
        ManifestKind::Pods(path) => {
            if let Some(template) = workload::part_at(object, path) {
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
    let Some(template) = workload::part_at(object, path) else {
        return;
    };
    let is_injected =
        workload::parse_template(template).is_ok_and(|pod| pod.spec.is_some_and(|spec| has_injected_containers(&spec)));
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

/// The names of the volumes to remove: the fixed names that injection uses, and the volumes that the init container mounts and no
/// container of the user mounts.
///
/// A value of the chart can rename the volume of the init container, so this volume is found by its mounts.
fn injected_volumes(template: &Value, injected_containers: &[&str]) -> Vec<String> {
    let lists = ["containers", "initContainers"].map(|list| template["spec"][list].as_array());
    let containers = || lists.into_iter().flatten().flatten();
    let name_of = |object: &Value| object["name"].as_str().unwrap_or_default().to_owned();
    let mounted_volumes = |container: &Value| {
        let mounts = container["volumeMounts"].as_array().into_iter().flatten();
        mounts.map(name_of).collect::<Vec<_>>()
    };
    let init_containers = containers().filter(|container| container["name"] == INIT_CONTAINER);
    let user_containers = containers().filter(|container| !injected_containers.contains(&name_of(container).as_str()));
    let user_volumes: Vec<String> = user_containers.flat_map(mounted_volumes).collect();
    let init_only_volumes = init_containers
        .flat_map(mounted_volumes)
        .filter(|name| !user_volumes.contains(name));
    INJECTED_VOLUMES
        .map(str::to_owned)
        .into_iter()
        .chain(init_only_volumes)
        .collect()
}

/// A function that returns whether injection added an annotation or label.
type IsMeshEntry = fn(&str, &Value) -> bool;

/// Removes the annotations and labels of the mesh. Settings of the user (`config.linkerd.io/*`) and a disabled injection stay.
fn remove_mesh_metadata(object: &mut Value) {
    let Some(Value::Object(metadata)) = object.get_mut("metadata") else {
        return;
    };
    let maps: [(&str, IsMeshEntry); 2] = [("annotations", is_mesh_annotation), ("labels", is_mesh_label)];
    for (map, is_mesh_entry) in maps {
        let Some(Value::Object(entries)) = metadata.get_mut(map) else {
            continue;
        };
        let n_entries = entries.len();
        entries.retain(|key, value| !is_mesh_entry(key, value));
        if entries.is_empty() && n_entries > 0 {
            metadata.remove(map);
        }
    }
}

fn is_mesh_annotation(key: &str, value: &Value) -> bool {
    key.starts_with("linkerd.io/") && !(key == annotation::INJECT && value == "disabled")
}

fn is_mesh_label(key: &str, _: &Value) -> bool {
    key == label::CONTROL_PLANE_NS || key == label::WORKLOAD_NS || key.starts_with(label::PROXY_OWNER_PREFIX)
}
