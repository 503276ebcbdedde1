//! JSON patches in the order in which Linkerd writes them.

use json_patch::jsonptr::{PointerBuf, Token};
use json_patch::{AddOperation, Patch, PatchOperation};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde_json::{Value, json};

use crate::inject::decision::Mode;
use crate::inject::metadata::Metadata;
use crate::inject::values::Values;
use crate::inject::{Config, Subject, containers, env};
use crate::resources::annotations::Annotations;

/// Additions to one object, below a root.
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
            patch.add(["spec", "volumes", "-"], &containers::lock_volume(values));
            patch.add(["spec", "initContainers", first], &containers::init(values, subject));
        }
    }
    if values.debug_container.enabled {
        patch.add(["spec", "containers", "-"], &containers::debug(values));
    }
    for volume in containers::proxy_volumes(values) {
        patch.add(["spec", "volumes", "-"], &volume);
    }
    let variables = env::variables(config, values, subject, annotations, mode);
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

    pub(super) fn add<const N: usize>(&mut self, path: [&str; N], value: &impl Serialize) {
        let mut pointer = self.root.clone();
        // Tokens escape what pointers cannot hold as it is, such as the slash of an annotation.
        path.iter().for_each(|token| pointer.push_back(Token::new(*token)));
        self.operations.push(PatchOperation::Add(AddOperation {
            path: pointer,
            // Only maps with keys that are no text cannot be written as JSON, and Kubernetes has none.
            value: serde_json::to_value(value).unwrap_or(Value::Null),
        }));
    }

    pub(super) fn into_patch(self) -> Patch {
        Patch(self.operations)
    }
}
