//! Manifests in a directory to the messages that proxies get.

mod endpoints;
mod harness;
mod inbound;
mod profiles;
