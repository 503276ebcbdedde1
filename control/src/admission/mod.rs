//! Verdicts about policies, routes and ServiceProfiles, for the API server to ask before it stores them.
//!
//! The rules are those by which [`crate::resources`] decodes, so that manifests of a directory and objects of a cluster
//! are judged alike; this room adds what only a whole object of an API server has.
//! It reads no other object: rivals and missing references are for the status to tell.
//!
//! Permissions: none.

mod policy;
mod profile;

use crate::webhook::review::{Answer, Request};
use crate::webhook::{Failure, Handler};

/// Judges objects of `policy.linkerd.io` and the routes of `gateway.networking.k8s.io`.
#[derive(Clone, Copy, Debug, Default)]
pub struct PolicyValidator;

/// Judges ServiceProfiles.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProfileValidator;

impl Handler for PolicyValidator {
    async fn review(&self, req: Request) -> Result<Answer, Failure> {
        Ok(policy::verdict(req))
    }
}

impl Handler for ProfileValidator {
    async fn review(&self, req: Request) -> Result<Answer, Failure> {
        Ok(profile::verdict(req))
    }
}

#[cfg(test)]
mod route_tests;
#[cfg(test)]
mod tests;
