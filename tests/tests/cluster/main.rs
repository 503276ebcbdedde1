//! Tests that need nodes: pods of a real cluster.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

mod chaos;
mod harness;
mod how_to;
mod images;
mod injection;
mod installation;
mod machine;
mod metrics;
mod multicluster;
mod permissions;
mod probes;
mod telemetry;
mod traffic;
