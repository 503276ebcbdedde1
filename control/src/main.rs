//! The control plane as a program: parse, build, run, drain.

use std::process::ExitCode;

use anyhow::Result;
use tracing::error;
use tulle_control::app::{self, App};
use tulle_control::cmd::Command;
use tulle_control::config::{Config, Logs};

#[tokio::main]
async fn main() -> ExitCode {
    let command = match Command::parse_from_line(std::env::args_os()) {
        Ok(command) => command,
        Err(err) => err.exit(),
    };
    if let Err(err) = app::start_logs(&Logs::new(&command)) {
        eprintln!("{err:#}");
        return ExitCode::FAILURE;
    }
    match serve(&command).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            error!(error = AsRef::<dyn std::error::Error>::as_ref(&err), "ending");
            ExitCode::FAILURE
        }
    }
}

async fn serve(command: &Command) -> Result<()> {
    let mut app = App::build(Config::new(command)?).await?;
    let ended = app.run_until(app::asked_to_end()).await;
    app.drain().await;
    ended
}
