//! The identity service on Kubernetes: real tokens, an API server that reviews them, and Secrets as kubelets mount them.
#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

mod abuse;
mod fixture;
mod issuer;
mod tokens;
