//! JSON patches in the order in which Linkerd writes them.

use json_patch::jsonptr::{PointerBuf, Token};
use json_patch::{AddOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation};
use k8s_openapi::api::core::v1::{PodSpec, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde_json::{Value, json};

use crate::inject::decision::Mode;
use crate::inject::metadata::Metadata;
use crate::inject::values::Values;
use crate::inject::{Config, DEBUG_CONTAINER, Subject, containers, env, probes};
use crate::resources::annotations::Annotations;

/// Changes of one object, below a root.
pub(super) struct Additions {
    root: PointerBuf,
    operations: Vec<PatchOperation>,
}

/// Metadata, then volumes and containers; `annotations` are all that count for this pod.
pub(super) fn injection(
    config: &Config,
    values: &Values,
    subject: &Subject<'_>,
    metadata: &Metadata,
    annotations: &Annotations,
    mode: Mode,
) -> Patch {
    let mut patch = Additions::below(subject.root);
    patch.metadata(subject.metadata, metadata);
    let spec = subject.spec;
    // Before any container is added, as that moves the others.
    let rewritten = probes::rewritten(values, spec);
    for one in &rewritten {
        let (index, handler) = (one.index.to_string(), one.declared.handler.field());
        let probe = ["spec", one.list, &index, one.declared.probe.field()];
        let at = |field| [probe[0], probe[1], probe[2], probe[3], field];
        patch.remove(at(handler));
        patch.add(at("httpGet"), &probes::asking(values, &one.declared));
    }
    if spec.volumes.is_none() {
        patch.add(["spec", "volumes"], &json!([]));
    }
    if spec.init_containers.is_none() {
        patch.add(["spec", "initContainers"], &json!([]));
    }
    let (native, awaits) = (values.proxy.native_sidecar, values.proxy.awaits);
    // A native sidecar serves the init containers of the pod as well, so it comes before them.
    let first = if native { "0" } else { "-" };
    match values.cni_enabled {
        true => patch.add(["spec", "initContainers", first], &containers::validator(values)),
        false => {
            patch.volume(spec, &containers::lock_volume(values));
            patch.add(["spec", "initContainers", first], &containers::init(values, subject));
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
        patch.volume(spec, &volume);
    }
    let variables = env::variables(config, values, subject, annotations, mode, &rewritten);
    let at = match (native, awaits) {
        (true, _) => ["spec", "initContainers", "1"],
        // The kubelet starts containers in their order and waits for each one's postStart hook.
        (false, true) => ["spec", "containers", "0"],
        (false, false) => ["spec", "containers", "-"],
    };
    patch.add(at, &containers::proxy(values, subject, variables));
    patch.into_patch()
}

impl Additions {
    /// Starts a patch below a JSON pointer, which is empty for the object itself.
    pub(super) fn below(root: &[&str]) -> Self {
        Self {
            root: PointerBuf::from_tokens(root.iter().map(|token| Token::new(*token))),
            operations: Vec::new(),
        }
    }

    /// Adds labels and annotations, and the maps that hold them where there are none.
    pub(super) fn metadata(&mut self, existing: Option<&ObjectMeta>, added: &Metadata) {
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

    /// Adds a volume, in place of one that has its name: a pod with two of one name is refused.
    fn volume(&mut self, spec: &PodSpec, volume: &Volume) {
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
        // Tokens escape what pointers cannot hold as it is, such as the slash of an annotation.
        path.iter().for_each(|token| pointer.push_back(Token::new(*token)));
        pointer
    }

    pub(super) fn add<const N: usize>(&mut self, path: [&str; N], value: &impl Serialize) {
        self.operations.push(PatchOperation::Add(AddOperation {
            path: self.pointer(path),
            // Only maps with keys that are no text cannot be written as JSON, and Kubernetes has none.
            value: serde_json::to_value(value).unwrap_or(Value::Null),
        }));
    }

    pub(super) fn into_patch(self) -> Patch {
        Patch(self.operations)
    }
}
