//! The control plane as a program: parse, build, run, drain.

use std::process::ExitCode;
use std::{env, io, thread};

use anyhow::Result;
use tokio::runtime::{Builder, Runtime};
use tracing::error;
use tulle_control::app::{self, App};
use tulle_control::cmd::Command;
use tulle_control::config::{Config, LogConfig};
use tulle_control::logs;
use tulle_core::names::variable;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let command = match Command::parse_from_line(env::args_os()) {
        Ok(command) => command,
        Err(err) => err.exit(),
    };
    if let Err(err) = logs::start(&LogConfig::new(&command)) {
        eprintln!("{err:#}");
        return ExitCode::FAILURE;
    }
    let served = runtime()
        .map_err(Into::into)
        .and_then(|runtime| runtime.block_on(serve(&command)));
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            error!(
                error = AsRef::<dyn std::error::Error>::as_ref(&err),
                "the process ends because of an error"
            );
            ExitCode::FAILURE
        }
    }
}

/// One thread per four processors: tasks take microseconds, and cost more if threads wake each other
/// (`docs/explanation/scale.md`). `TOKIO_WORKER_THREADS` sets another number.
fn runtime() -> io::Result<Runtime> {
    let n_threads = thread::available_parallelism().map_or(1, usize::from) / 4;
    let mut builder = match n_threads {
        _ if env::var_os(variable::WORKER_THREADS).is_some() => Builder::new_multi_thread(),
        0 | 1 => Builder::new_current_thread(),
        _ => {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(n_threads);
            builder
        }
    };
    builder.enable_all().build()
}

async fn serve(command: &Command) -> Result<()> {
    let mut app = App::build(Config::from_command(command)?).await?;
    let ended = app.run_until(app::shutdown_signal()).await;
    app.drain().await;
    ended
}
