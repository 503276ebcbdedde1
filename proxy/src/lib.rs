pub mod admin;
pub mod api;
pub mod config;
pub mod env;
mod http;
pub mod identity;
mod metrics;
mod net;
pub mod tls;
