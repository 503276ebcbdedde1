//! Validates policies, routes and ServiceProfiles before the API server stores them.
//!
//! The rules are the decoding rules of [`crate::resources`], so manifests of a directory and objects of a cluster are validated by
//! the same rules. This module adds rules for requests of the API server: [`PolicyValidator`] denies kinds that it does not know,
//! allows routes of the Gateway API that have no parent in the mesh, accepts an object with `generateName` and no name, and returns
//! warnings. It reads no other objects: conflicts and missing references are reported in the status.
//!
//! RBAC: none.

mod policy;
mod profile;

use crate::webhook::review::{AdmissionResponse, Request};
use crate::webhook::{Failure, ReviewHandler};

/// Validates objects of `policy.linkerd.io` and the routes of `gateway.networking.k8s.io`.
#[derive(Clone, Copy, Debug, Default)]
pub struct PolicyValidator;

/// Validates ServiceProfiles.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProfileValidator;

impl ReviewHandler for PolicyValidator {
    async fn review(&self, req: Request) -> Result<AdmissionResponse, Failure> {
        Ok(policy::review(req))
    }
}

impl ReviewHandler for ProfileValidator {
    async fn review(&self, req: Request) -> Result<AdmissionResponse, Failure> {
        Ok(profile::review(req))
    }
}

#[cfg(test)]
mod profile_tests;
#[cfg(test)]
mod route_tests;
#[cfg(test)]
mod tests;
