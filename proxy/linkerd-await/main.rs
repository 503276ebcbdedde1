//! `linkerd-await [FLAGS] [PROGRAM ARGUMENTS]`.

use std::process::ExitCode;

use clap::Parser as _;
use tulle_proxy::linkerd_await;

fn main() -> ExitCode {
    linkerd_await::run(&linkerd_await::Args::parse())
}
