//! Whole meshes in this process, tested from the side of an application, an operator and a peer.
//!
//! The tests are one program, because each program would be linked separately.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

mod admin_policy;
mod anchors;
mod balancing;
mod breakers;
mod client_certificates;
mod control_plane;
mod corner_cases;
mod cors;
mod counts;
mod dashboards;
mod debug;
mod direct;
mod discovery;
mod drain;
mod egress;
mod explicit;
mod failure;
mod fallback_endpoints;
mod gateway;
mod http1;
mod http2;
mod http2_servers;
mod http_rules;
mod identity;
mod ingress;
mod invalid_policy;
mod keep_alive;
mod limits;
mod messages;
mod metrics;
mod mirrors;
mod policy;
mod races;
mod refusals;
mod resets;
mod retries;
mod rewrites;
mod routing;
mod scripted_policies;
mod splits;
mod tap;
mod telemetry;
mod trace;
mod transparency;
mod unknown_policy;
mod unreadable;
mod websocket;
