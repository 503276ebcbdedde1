//! Tests of the rules in network namespaces: a pod with its proxy, a peer, and sometimes a host behind the pod.
//!
//! Each test iterates over backends and families itself, so that several cases share a namespace.

#![allow(clippy::unwrap_used)] // clippy exempts only functions marked as tests

mod direct;
mod environments;
mod fixture;
mod lifecycle;
mod load;
mod pressure;
mod redirected;
mod tproxy;
mod validator;
