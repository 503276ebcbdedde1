//! The sidecar proxy of tulle.

use std::process::ExitCode;

use tulle_core::logging;
use tulle_proxy::{
    app::{App, ProcessContext},
    env,
};

/// Exit code for an invalid configuration, the same as in Linkerd's proxy: `EX_USAGE` of `sysexits.h`.
const EX_USAGE: u8 = 64;

/// Maximum free memory at the top of the heap that the C library keeps, in bytes; the rest is returned to the kernel. With the
/// default of 128 KiB, the kernel must zero the pages again for each large body, which took one twelfth of the time that the
/// proxy needed to forward the body. An allocation larger than 128 KiB is still returned as soon as it is freed.
#[cfg(target_env = "gnu")]
const MALLOC_TRIM_THRESHOLD_BYTES: libc::c_int = 2 << 20;

#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
fn set_malloc_trim_threshold() {
    // SAFETY: `mallopt` takes only numbers, and no other thread exists yet.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, MALLOC_TRIM_THRESHOLD_BYTES);
    }
}

#[cfg(not(target_env = "gnu"))]
fn set_malloc_trim_threshold() {}

fn main() -> ExitCode {
    set_malloc_trim_threshold();
    let config = match env::load(|name| std::env::var_os(name)) {
        Ok(config) => config,
        Err(errors) => {
            for error in errors {
                eprintln!("tulle-proxy: {error}");
            }
            return ExitCode::from(EX_USAGE);
        }
    };
    let log = match logging::init(&config.log.filter, config.log.format) {
        Ok(log) => log,
        Err(error) => {
            eprintln!("tulle-proxy: {error}");
            return ExitCode::from(EX_USAGE);
        }
    };
    for name in &config.unsupported_variables {
        tracing::info!("{name} is set, but it is not supported and has no effect");
    }
    let context = ProcessContext::with_redirect(Some(log), env::public_variables(std::env::vars_os()));
    match App::build(config, context).and_then(App::run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            eprintln!("tulle-proxy: {error:#}");
            ExitCode::FAILURE
        }
    }
}
