//! Validates decoded objects, for admission and for directories of manifests.

use crate::resources::unsupported::{self, UnsupportedPart};
use crate::resources::{Object, route_admission};

/// Checks routes, and the annotations of EgressNetworks. Decoding rejects all invalid objects of other kinds.
///
/// # Errors
/// Fails at the first invalid value. The error has the value and the accepted form.
pub fn validate(object: &Object) -> Result<(), String> {
    match object {
        Object::EgressNetwork(network) => match unsupported::invalid_egress_annotations(network).into_iter().next() {
            Some(UnsupportedPart { reason, .. }) => Err(reason),
            None => Ok(()),
        },
        object => object
            .route()
            .map_or(Ok(()), |route| route_admission::validate_route(route)),
    }
}
