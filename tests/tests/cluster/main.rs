//! What needs nodes: pods of a real cluster.

#![allow(clippy::unwrap_used)] // as in every test; clippy sees only the functions marked as such

mod chaos;
mod harness;
mod images;
mod injection;
mod installation;
mod machine;
mod meshed;
mod metrics;
mod permissions;
mod probes;
mod telemetry;
mod traffic;
