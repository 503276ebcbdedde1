//! Validates decoded objects, for admission and for directories of manifests.

use crate::resources::unserved::{self, UnservedPart};
use crate::resources::{Object, route_support};

/// Checks routes, and the annotations of EgressNetworks. Decoding rejects all invalid objects of other kinds.
///
/// # Errors
/// Fails at the first invalid value. The error contains the value and the accepted form.
pub fn validate(object: &Object) -> Result<(), String> {
    match object {
        Object::EgressNetwork(network) => match unserved::invalid_egress_annotations(network).into_iter().next() {
            Some(UnservedPart { reason, .. }) => Err(reason),
            None => Ok(()),
        },
        object => object
            .route()
            .map_or(Ok(()), |route| route_support::validate_route(route)),
    }
}
