//! Tests that need an API server but no nodes.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

mod cli;
mod harness;
mod identity;
mod injection;
mod multicluster;
mod source;
mod telemetry;
mod webhooks;
mod writeback;
