//! The identity service on Kubernetes: real tokens, a real API server that reviews them, and Secrets as kubelets mount them.
#![allow(clippy::unwrap_used)] // as in every test; clippy sees only the functions marked as such

mod abuse;
mod issuer;
mod scene;
mod tokens;
