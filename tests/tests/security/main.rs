//! Attacks by unauthenticated clients and peers on the shipped binaries, in network namespaces.
//!
//! `cargo nextest run -p tulle-tests security` runs all of these tests.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

/// Test names begin with `security::`, so that the filter `security` selects them.
#[path = "."]
mod security {
    mod floods;
    mod matrix;
}
