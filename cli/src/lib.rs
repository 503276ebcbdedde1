//! The `tulle` command: credentials, diagnostics, and the demo.
#![allow(clippy::print_stdout, clippy::print_stderr)] // this is what a command does

pub mod app;
mod demo;
mod diagnostics;
mod trust;
