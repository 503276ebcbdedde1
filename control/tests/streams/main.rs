//! Manifests in a directory to the messages that proxies get.
#![cfg(test)]

mod directory;
mod endpoints;
mod harness;
mod inbound;
mod outbound;
mod profiles;
