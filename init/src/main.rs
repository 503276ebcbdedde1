//! `tulle-init`: redirects traffic to the proxy, or, as `validate`, proves that it is redirected.

use std::error::Error;
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use tulle_core::telemetry;
use tulle_init::cli::{Cli, RedirectArgs, Subcommands, ValidateArgs, Validator};
use tulle_init::redirect::{self, End};
use tulle_init::report::Report;
use tulle_init::validate;

fn main() -> ExitCode {
    // Images call the one program by the names of the two that it replaces.
    let name = std::env::args_os().next().unwrap_or_default();
    if Path::new(&name).file_name() == Some(OsStr::new(VALIDATOR)) {
        return parse::<Validator>().map_or_else(|code| code, |validator| run_validate(&validator.args));
    }
    match parse::<Cli>() {
        Err(code) => code,
        Ok(Cli {
            command: Some(Subcommands::Validate(args)),
            ..
        }) => run_validate(&args),
        Ok(Cli {
            command: None,
            redirect,
        }) => run_redirect(&redirect),
    }
}

/// Every mistake in the flags ends with 1: other codes mean something to those who call us.
fn parse<P: Parser>() -> Result<P, ExitCode> {
    P::try_parse().map_err(|error| {
        // Nobody is left to tell when the terminal is gone.
        let _ = error.print();
        match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    })
}

fn run_redirect(args: &RedirectArgs) -> ExitCode {
    let (format, filter) = args.log();
    if let Err(error) = telemetry::init(filter, format) {
        return fail(&error);
    }
    let mut report = Report::default();
    let job = args.job().map_err(anyhow::Error::new);
    let end = job.and_then(|job| redirect::run(job, &mut report));
    let code = match &end {
        Ok(End::Done) => ExitCode::SUCCESS,
        Ok(End::Different) => ExitCode::from(3),
        Ok(End::Absent) => ExitCode::from(4),
        Ok(End::NotRedirected) => ExitCode::from(validate::NOT_REDIRECTED),
        Err(error) => {
            report.result = "failed";
            report.error = Some(format!("{error:#}"));
            fail(error.as_ref())
        }
    };
    if args.json_report() {
        print_report(&report);
    }
    code
}

fn run_validate(args: &ValidateArgs) -> ExitCode {
    let (format, filter) = args.log();
    if let Err(error) = telemetry::init(filter, format) {
        return fail(&error);
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    match runtime.block_on(validate::run(args.trial())) {
        Ok(()) => {
            tracing::info!("traffic is redirected");
            ExitCode::SUCCESS
        }
        Err(error) => {
            fail(&error);
            if error.is_verdict() {
                ExitCode::from(validate::NOT_REDIRECTED)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

#[allow(clippy::print_stdout)] // what --report asks for
fn print_report(report: &Report) {
    match serde_json::to_string(report) {
        Ok(json) => println!("{json}"),
        Err(error) => {
            fail(&error);
        }
    }
}

/// Says what went wrong and why, on one line.
fn fail(error: &dyn Error) -> ExitCode {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    eprintln!("Error: {text}");
    ExitCode::FAILURE
}

const VALIDATOR: &str = "linkerd2-network-validator";
