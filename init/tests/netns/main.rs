//! The rules in real network namespaces: a pod with its proxy, a peer outside, sometimes somebody behind the pod.
//!
//! Numbers such as T05 are those of the test list of the specification.
//! Each test walks through backends and families itself, so that a namespace serves several of them.

#![allow(clippy::unwrap_used)] // as in every test; clippy sees only the functions marked as such

mod direct;
mod lifecycle;
mod load;
mod places;
mod pressure;
mod redirected;
mod scene;
mod tproxy;
mod validator;
