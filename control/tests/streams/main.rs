//! Tests of the messages that proxies get for the manifests in a directory.

#![cfg(test)]

mod client_namespaces;
mod derived;
mod destination_rows;
mod directory;
mod endpoints;
mod gateway_exports;
mod harness;
mod inbound;
mod inbound_rows;
mod manifest_store;
mod mirror_rows;
mod outbound;
mod outbound_rows;
mod profile_changes;
mod profiles;
mod recorded;
mod remote_clusters;
mod route_rows;
mod sharing;
mod show;
mod unreadable;
