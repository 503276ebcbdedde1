//! Validates a ServiceProfile.

use kube::core::DynamicObject;
use serde_json::json;
use tulle_core::dns_names::is_dns_subdomain;

use crate::resources::{self, Kind};
use crate::webhook::review::{AdmissionResponse, Request};

pub(super) fn review(req: Request) -> AdmissionResponse {
    let Some(object) = req.object else {
        return AdmissionResponse::deny("the request has no object");
    };
    match validate(object) {
        Ok(()) => AdmissionResponse::allow(),
        Err(reason) => AdmissionResponse::deny(reason),
    }
}

fn validate(object: DynamicObject) -> Result<(), String> {
    let DynamicObject { metadata, mut data, .. } = object;
    let name = metadata.name.unwrap_or_default();
    let validate_name_and_fields = || {
        if !is_dns_subdomain(&name) {
            return Err("metadata.name is not a DNS name of lower-case letters, digits, `-` and `.`".to_owned());
        }
        let fields = data.as_object().ok_or("the object is not a mapping")?;
        if let Some(unknown) = fields.keys().find(|field| *field != "spec") {
            return Err(format!("unknown field {unknown:?}, expected spec"));
        }
        Ok(())
    };
    validate_name_and_fields()
        .and_then(|()| {
            let mut value = json!({"metadata": {"name": name}});
            if let Some(spec) = data.get_mut("spec") {
                value["spec"] = spec.take();
            }
            let decoded = resources::decode(Kind::ServiceProfile, value);
            decoded.map(drop).map_err(|err| err.to_string())
        })
        .map_err(|reason| format!("ServiceProfile {name:?}: {reason}"))
}
