//! What needs an API server and no node.

#![allow(clippy::unwrap_used)] // as in every test; clippy sees only the functions marked as such

mod cli;
mod harness;
mod identity;
mod injection;
mod source;
mod telemetry;
mod webhooks;
mod writeback;
