//! The sidecar proxy of tulle.

use std::process::ExitCode;

use tulle_core::telemetry;
use tulle_proxy::{
    app::{App, Surroundings},
    env,
};

/// The exit status of a wrong configuration, as in `sysexits.h`.
const EX_USAGE: u8 = 64;

/// Free memory that a thread keeps for what comes next, in bytes. By default the C library gives all but 128 KiB back at
/// once, and has every page of it cleared for the next large body: a twelfth of what such a body costs. What is larger
/// than 128 KiB itself is given back all the same.
#[cfg(target_env = "gnu")]
const KEPT: libc::c_int = 2 << 20;

#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
fn keep_memory() {
    // SAFETY: it takes numbers alone, and there is no other thread yet.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
    }
}

#[cfg(not(target_env = "gnu"))]
fn keep_memory() {}

fn main() -> ExitCode {
    keep_memory();
    let lookup = |name: &str| std::env::var(name).ok();
    let config = match env::load(lookup) {
        Ok(config) => config,
        Err(errors) => {
            for error in errors {
                eprintln!("tulle-proxy: {error}");
            }
            return ExitCode::from(EX_USAGE);
        }
    };
    let log = match telemetry::init(&config.log.filter, config.log.format) {
        Ok(log) => log,
        Err(error) => {
            eprintln!("tulle-proxy: {error}");
            return ExitCode::from(EX_USAGE);
        }
    };
    for ignored in &config.ignored {
        tracing::info!("{ignored} is set, but what it asks for is not supported yet: it has no effect");
    }
    let surroundings = Surroundings::redirected(Some(log), env::shown(std::env::vars()));
    match App::build(config, surroundings).and_then(App::run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            eprintln!("tulle-proxy: {error:#}");
            ExitCode::FAILURE
        }
    }
}
