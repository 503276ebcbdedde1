//! Validates a policy or a route.

use kube::core::DynamicObject;
use kube::core::GroupVersionKind;
use serde_json::{Value, json};

use crate::resources::policy::reference::{GATEWAY_GROUP, POLICY_GROUP};
use crate::resources::unreadable::Unreadable;
use crate::resources::unserved::{self, UnservedPart};
use crate::resources::{self, KINDS, Kind, Object, validation};
use crate::webhook::review::{AdmissionResponse, Request};

pub(super) fn review(req: Request) -> AdmissionResponse {
    let Some(kind) = validated_kind(&req.kind) else {
        let GroupVersionKind { group, version, kind } = &req.kind;
        return AdmissionResponse::deny(format!("unsupported resource type: {group}.{version}.{kind}"));
    };
    let Some(object) = req.object else {
        return AdmissionResponse::deny("the request has no object");
    };
    let value = validated_parts(object, req.namespace.as_deref());
    match resources::decode(kind, &value) {
        // Routes of other controllers are not validated.
        Ok(object)
            if object
                .route()
                .is_some_and(|route| is_gateway_api_kind(kind) && !route.has_mesh_parent()) =>
        {
            AdmissionResponse::allow()
        }
        Ok(object) => match validation::validate(&object) {
            Ok(()) => warnings(&object)
                .into_iter()
                .fold(AdmissionResponse::allow(), AdmissionResponse::warn),
            Err(reason) => AdmissionResponse::deny(reason),
        },
        Err(err) => match is_gateway_api_kind(kind) && !Unreadable::concerns_mesh(kind, &value) {
            true => AdmissionResponse::allow(),
            false => AdmissionResponse::deny(format!("the mesh cannot read this {}: {err}", req.kind.kind)),
        },
    }
}

/// Whether objects of this kind can also have parents of other controllers, such as Gateways.
fn is_gateway_api_kind(kind: Kind) -> bool {
    kind.info().group == GATEWAY_GROUP
}

/// Warnings about the unserved parts of an object. The object is not denied, because other controllers may support a part of a
/// route, and because an annotation may need another one that is added later.
fn warnings(object: &Object) -> Vec<String> {
    unserved::unserved_parts(object)
        .into_iter()
        .map(|UnservedPart { field, reason }| format!("the mesh does not apply a part of {field}: {reason}"))
        .collect()
}

/// The kind, if this webhook validates it. The version does not matter.
fn validated_kind(kind: &GroupVersionKind) -> Option<Kind> {
    let groups = [POLICY_GROUP, GATEWAY_GROUP];
    let found = KINDS
        .iter()
        .find(|info| groups.contains(&info.group) && info.group == kind.group && info.name == kind.kind);
    found.map(|info| info.kind)
}

/// The parts of the object that are validated. If the name is not generated yet, `generateName` replaces it.
fn validated_parts(object: DynamicObject, namespace: Option<&str>) -> Value {
    let DynamicObject { metadata, mut data, .. } = object;
    let namespace = metadata.namespace.as_deref().or(namespace);
    let mut value = json!({
        "metadata": {
            "name": metadata.name.as_deref().or(metadata.generate_name.as_deref()).unwrap_or("unnamed"),
            "namespace": namespace,
            "annotations": metadata.annotations,
        },
    });
    if let Some(spec) = data.get_mut("spec") {
        value["spec"] = spec.take();
    }
    value
}
