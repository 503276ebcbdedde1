//! Plans the writes that make the mirrors of a cluster match its exported Services. A plan is a pure function: it sends no requests
//! and does not read the clock.

pub(super) mod federated;
mod headless;
pub(super) mod inputs;
mod mirrors;
pub(super) mod objects;
#[cfg(test)]
mod tests;

use self::federated::plan_federated;
use self::inputs::{Exporter, Inputs, Plan};
use self::mirrors::{plan_endpoint_repairs, plan_mirrors};

pub(super) fn plan(inputs: &Inputs<'_>) -> Plan {
    let mut plan = Plan::default();
    if let Exporter::Linked(linked) = inputs.exporter {
        plan_mirrors(inputs, linked, &mut plan);
    }
    plan_federated(inputs, &mut plan);
    plan
}

/// Plans only the Endpoints of existing mirrors, while the exported Services are not known: `inputs.exporting` is not read. No
/// Service is created, changed or deleted.
pub(super) fn plan_repairs(inputs: &Inputs<'_>) -> Plan {
    let mut plan = Plan::default();
    if let Exporter::Linked(linked) = inputs.exporter {
        plan_endpoint_repairs(inputs, linked, &mut plan);
    }
    plan
}
