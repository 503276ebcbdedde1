//! The Helm charts: what they render, and what an API server makes of it.

#![allow(clippy::unwrap_used)] // as in every test; clippy sees only the functions marked as such

mod custom_resources;
mod gateway_crds;
mod golden;
mod install;
mod objects;
mod permissions;
mod render;
mod values;
