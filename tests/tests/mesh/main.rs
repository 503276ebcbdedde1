//! Whole meshes in this process: what an application, an operator and a peer see.
//!
//! One program, because each would link everything anew.

#![allow(clippy::unwrap_used)] // as in every test; clippy sees only the functions marked as such

mod admin_policy;
mod anchors;
mod balancing;
mod breakers;
mod control_plane;
mod counts;
mod dashboards;
mod debug;
mod direct;
mod discovery;
mod drain;
mod edges;
mod explicit;
mod failure;
mod http1;
mod http2;
mod http2_servers;
mod http_rules;
mod identity;
mod ingress;
mod invalid_policy;
mod limits;
mod messages;
mod metrics;
mod policy;
mod races;
mod refusals;
mod resets;
mod routing;
mod splits;
mod tap;
mod telemetry;
mod told;
mod trace;
mod transparency;
mod tries;
mod unknown_policy;
mod unreadable;
mod websocket;
