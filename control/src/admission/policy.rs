//! What becomes of a policy or a route.

use kube::core::DynamicObject;
use kube::core::GroupVersionKind;
use serde_json::{Value, json};

use crate::resources::policy::reference::{GATEWAY_GROUP, POLICY_GROUP};
use crate::resources::unserved::{self, Unserved};
use crate::resources::{self, KINDS, Kind, Object, route_admission};
use crate::webhook::review::{Answer, Request};

/// Gateway routes may use what we do not know yet: they are admitted with a warning when they cannot be read.
pub(super) fn verdict(req: Request) -> Answer {
    let Some(kind) = judged(&req.kind) else {
        let GroupVersionKind { group, version, kind } = &req.kind;
        return Answer::deny(format!("unsupported resource type: {group}.{version}.{kind}"));
    };
    let Some(object) = req.object else {
        return Answer::deny("there is no object to judge");
    };
    match resources::decode(kind, spec_of(object, req.namespace.as_deref())) {
        Ok(object) => match admit(&object) {
            Ok(()) => Answer::allow(),
            Err(reason) => Answer::deny(reason),
        },
        Err(err) if req.kind.group == GATEWAY_GROUP => {
            let kind = &req.kind.kind;
            Answer::allow().warn(format!("the mesh cannot read this {kind} and does not serve it: {err}"))
        }
        Err(err) => Answer::deny(err.to_string()),
    }
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
