//! The sidecar proxy of tulle.

use std::process::ExitCode;

use tulle_core::telemetry;
use tulle_proxy::{
    app::{App, Surroundings},
    env,
};

/// The exit status of a wrong configuration, as in `sysexits.h`.
const EX_USAGE: u8 = 64;

fn main() -> ExitCode {
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
