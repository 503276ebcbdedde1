//! Third-party clients through the shipped binaries, with real redirects and real mutual TLS.
//!
//! The tests are one program, because each program would be linked separately.
//! Each test has its own hosts: network namespaces on one bridge.
//! With `TULLE_TEST_FULL=1` tests with load send all their requests, which needs optimised binaries.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

mod costs;
mod direct;
mod dual_stack;
mod first_byte;
mod foreign_tls;
mod grpc;
mod h2spec;
mod http;
mod openssl;
mod programs;
mod redirected;
mod termination;
mod testbed;
mod tproxy;
mod vm;
mod websocket;
