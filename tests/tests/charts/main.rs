//! The Helm charts: their renderings, and how an API server handles them.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

mod access_review;
mod contract;
mod custom_resources;
mod gateway_crds;
mod install;
mod monitoring;
mod multicluster;
mod multicluster_commands;
mod multicluster_permissions;
mod objects;
mod permissions;
mod render;
mod values;
