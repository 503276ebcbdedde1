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
use self::inputs::{Inputs, Member, Plan};
use self::mirrors::plan_mirrors;

pub(super) fn plan(inputs: &Inputs<'_>) -> Plan {
    let mut plan = Plan::default();
    if let Member::Linked(linked) = inputs.member {
        plan_mirrors(inputs, linked, &mut plan);
    }
    plan_federated(inputs, &mut plan);
    plan
}
