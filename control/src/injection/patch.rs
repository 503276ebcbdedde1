//! JSON patches, with operations in Linkerd's order.

use json_patch::jsonptr::{PointerBuf, Token};
use json_patch::{AddOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation};
use k8s_openapi::api::core::v1::{PodSpec, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde_json::{Value, json};

use crate::injection::pod::metadata::Metadata;
use crate::injection::pod::{containers, env, probes};
use crate::injection::target::{DEBUG_CONTAINER, PodInputs};

/// Operations on one object, with paths relative to `root`.
pub(super) struct PatchBuilder {
    root: PointerBuf,
    operations: Vec<PatchOperation>,
}

/// Makes the patch of an injected pod: metadata and probes, then volumes and containers.
pub(super) fn pod_patch(inputs: PodInputs<'_>, metadata: &Metadata) -> Patch {
    let PodInputs { values, target, .. } = inputs;
    let mut patch = PatchBuilder::at(target.pointer);
    patch.add_metadata(target.metadata, metadata);
    let spec = target.spec;
    // Probes come before containers, because adding containers changes the indexes of the others.
    let rewritten = probes::probes_to_rewrite(values, spec);
    for probe in &rewritten {
        let (index, handler) = (probe.index.to_string(), probe.original.handler.field());
        let path = ["spec", probe.list, &index, probe.original.kind.field()];
        let field_path = |field| [path[0], path[1], path[2], path[3], field];
        patch.remove(field_path(handler));
        patch.add(field_path("httpGet"), &probes::probe_action(values, &probe.original));
    }
    if spec.volumes.is_none() {
        patch.add(["spec", "volumes"], &json!([]));
    }
    if spec.init_containers.is_none() {
        patch.add(["spec", "initContainers"], &json!([]));
    }
    let (native, awaits) = (values.proxy.native_sidecar, values.proxy.await_proxy);
    // A native sidecar also serves the pod's init containers, so it comes before them, after the init container that redirects
    // or checks the redirection. `-` appends.
    let init_index = if native { "0" } else { "-" };
    match values.cni_enabled {
        true => patch.add(["spec", "initContainers", init_index], &containers::validator(values)),
        false => {
            patch.add_volume(spec, &containers::xtables_lock_volume(values));
            patch.add(
                ["spec", "initContainers", init_index],
                &containers::init(values, target),
            );
        }
    }
    let has_debug = spec
        .containers
        .iter()
        .any(|container| container.name == DEBUG_CONTAINER);
    let has_image = !values.debug_container.image.name.is_empty();
    if values.debug_container.enabled && has_image && !has_debug {
        patch.add(["spec", "containers", "-"], &containers::debug(values));
    }
    for volume in containers::proxy_volumes(values) {
        patch.add_volume(spec, &volume);
    }
    let variables = env::variables(inputs, &rewritten);
    let proxy_path = match (native, awaits) {
        (true, _) => ["spec", "initContainers", "1"],
        // The kubelet starts containers in order and waits for the postStart hook of each one.
        (false, true) => ["spec", "containers", "0"],
        (false, false) => ["spec", "containers", "-"],
    };
    patch.add(proxy_path, &containers::proxy(values, target, variables));
    patch.into_patch()
}

impl PatchBuilder {
    /// Starts a patch at a JSON pointer; empty means the object itself.
    pub(super) fn at(root: &[&str]) -> Self {
        Self {
            root: PointerBuf::from_tokens(root.iter().map(|token| Token::new(*token))),
            operations: Vec::new(),
        }
    }

    /// Adds labels and annotations, and creates missing maps.
    pub(super) fn add_metadata(&mut self, existing: Option<&ObjectMeta>, added: &Metadata) {
        if added.annotations.is_empty() && added.labels.is_empty() {
            return;
        }
        if existing.is_none() {
            self.add(["metadata"], &json!({}));
        }
        let maps = [
            (
                "annotations",
                existing.is_some_and(|meta| meta.annotations.is_some()),
                &added.annotations,
            ),
            (
                "labels",
                existing.is_some_and(|meta| meta.labels.is_some()),
                &added.labels,
            ),
        ];
        for (name, exists, added) in maps {
            if !exists && !added.is_empty() {
                self.add(["metadata", name], &json!({}));
            }
            for (key, value) in added {
                self.add(["metadata", name, key], value);
            }
        }
    }

    /// Adds a volume, or replaces the volume of that name: the API server rejects duplicate names.
    fn add_volume(&mut self, spec: &PodSpec, volume: &Volume) {
        let mut existing = spec.volumes.iter().flatten();
        match existing.position(|existing| existing.name == volume.name) {
            Some(index) => {
                let path = self.pointer(["spec", "volumes", &index.to_string()]);
                let value = serde_json::to_value(volume).unwrap_or(Value::Null);
                self.operations
                    .push(PatchOperation::Replace(ReplaceOperation { path, value }));
            }
            None => self.add(["spec", "volumes", "-"], volume),
        }
    }

    fn remove<const N: usize>(&mut self, path: [&str; N]) {
        let path = self.pointer(path);
        self.operations.push(PatchOperation::Remove(RemoveOperation { path }));
    }

    fn pointer<const N: usize>(&self, path: [&str; N]) -> PointerBuf {
        let mut pointer = self.root.clone();
        // `Token` escapes special characters such as the slash in an annotation key.
        path.iter().for_each(|token| pointer.push_back(Token::new(*token)));
        pointer
    }

    pub(super) fn add<const N: usize>(&mut self, path: [&str; N], value: &impl Serialize) {
        self.operations.push(PatchOperation::Add(AddOperation {
            path: self.pointer(path),
            // Serialization fails only for maps with keys that are not strings; Kubernetes types have none.
            value: serde_json::to_value(value).unwrap_or(Value::Null),
        }));
    }

    pub(super) fn into_patch(self) -> Patch {
        Patch(self.operations)
    }
}
