//! What strangers and peers may do to the shipped binaries, in network namespaces.
//!
//! `cargo nextest run -p tulle-tests security` runs all of it.

#![allow(clippy::unwrap_used)] // as in every test; clippy sees only the functions marked as such

/// Names of tests begin with `security::`, so that the filter `security` selects them.
#[path = "."]
mod security {
    mod floods;
    mod matrix;
}
