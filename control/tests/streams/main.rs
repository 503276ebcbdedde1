//! Manifests in a directory to the messages that proxies get.

mod endpoints;
mod harness;
