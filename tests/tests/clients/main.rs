//! Clients that know nothing of us, through the shipped binaries, real redirects and real mutual TLS.
//!
//! One program, because each would link everything anew.
//! Each test has hosts of its own: network namespaces on one bridge.
//! With `TULLE_TEST_FULL=1` loads have their full size, for which the binaries should be optimised ones.

#![allow(clippy::unwrap_used)] // as in every test; clippy sees only the functions marked as such

mod costs;
mod direct;
mod dual_stack;
mod ending;
mod first_byte;
mod foreign_tls;
mod grpc;
mod h2spec;
mod http;
mod openssl;
mod programs;
mod redirected;
mod scene;
mod tproxy;
mod vm;
mod websocket;
