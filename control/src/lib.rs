//! The control plane of tulle: destination, policy and identity services, webhooks, and telemetry.

pub mod admission;
pub mod app;
pub mod cluster;
pub mod cmd;
pub mod config;
pub mod destination;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod grpc;
pub mod identity;
pub mod injection;
pub mod injector_webhook;
pub mod kubernetes;
mod listen;
pub mod logs;
pub mod mirror;
pub mod model;
pub mod policy;
mod proto_http_method;
pub mod remote;
pub mod resources;
pub mod serving;
pub mod source;
pub mod telemetry;
mod threads;
pub mod tls;
pub mod trust;
pub mod webhook;
pub mod writeback;
