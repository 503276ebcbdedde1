//! What becomes of a policy or a route.

use kube::core::DynamicObject;
use kube::core::GroupVersionKind;
use serde_json::{Value, json};

use crate::resources::policy::reference::{GATEWAY_GROUP, POLICY_GROUP};
use crate::resources::unreadable::Unreadable;
use crate::resources::unserved::{self, Unserved};
use crate::resources::{self, KINDS, Kind, Object, route_admission};
use crate::webhook::review::{Answer, Request};

pub(super) fn verdict(req: Request) -> Answer {
    let Some(kind) = judged(&req.kind) else {
        let GroupVersionKind { group, version, kind } = &req.kind;
        return Answer::deny(format!("unsupported resource type: {group}.{version}.{kind}"));
    };
    let Some(object) = req.object else {
        return Answer::deny("there is no object to judge");
    };
    let value = spec_of(object, req.namespace.as_deref());
    match resources::decode(kind, &value) {
        // What others serve is theirs to judge.
        Ok(object) if object.route().is_some_and(|route| is_of_others(kind, route.is_ours())) => Answer::allow(),
        Ok(object) => match admit(&object) {
            Ok(()) => warnings(&object).into_iter().fold(Answer::allow(), Answer::warn),
            Err(reason) => Answer::deny(reason),
        },
        Err(err) => {
            let reason = err.to_string();
            let is_ours = Unreadable::of(kind, &value, &reason).is_some();
            match is_of_others(kind, is_ours) {
                true => Answer::allow(),
                false => Answer::deny(format!("the mesh cannot read this {}: {reason}", req.kind.kind)),
            }
        }
    }
}

/// Routes of the Gateway API may be for gateways only.
fn is_of_others(kind: Kind, names_ours: bool) -> bool {
    kind.info().group == GATEWAY_GROUP && !names_ours
}

/// What is stored and not served: others may serve it, but for the mesh it has no effect, or answers with an error.
fn warnings(object: &Object) -> Vec<String> {
    let found = object.route().map(|_| unserved::of(object)).unwrap_or_default();
    found
        .into_iter()
        .map(|Unserved { field, reason }| format!("the mesh does not serve a part of {field}: {reason}"))
        .collect()
}

/// The kinds that are judged, whatever their version.
fn judged(kind: &GroupVersionKind) -> Option<Kind> {
    let groups = [POLICY_GROUP, GATEWAY_GROUP];
    let found = KINDS
        .iter()
        .find(|info| groups.contains(&info.group) && info.group == kind.group && info.name == kind.kind);
    found.map(|info| info.kind)
}

/// What is judged: nothing that others wrote into the status matters, and a name may be yet to come.
fn spec_of(object: DynamicObject, namespace: Option<&str>) -> Value {
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

fn admit(object: &Object) -> Result<(), String> {
    match object {
        Object::PolicyHttpRoute(route)
        | Object::GatewayHttpRoute(route)
        | Object::GrpcRoute(route)
        | Object::TlsRoute(route)
        | Object::TcpRoute(route) => route_admission::admit(route),
        Object::EgressNetwork(_) => match unserved::of(object).into_iter().next() {
            Some(Unserved { reason, .. }) => Err(reason),
            None => Ok(()),
        },
        // Decoding refuses all that is wrong with the others.
        _ => Ok(()),
    }
}
