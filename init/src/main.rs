//! `tulle-init`: redirects traffic to the proxy, or, with `validate`, checks the redirection.

use std::error::Error;
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use tulle_core::error_chain::ErrorChain;
use tulle_core::logging;
use tulle_init::cli::{Cli, RedirectArgs, Subcommands, ValidateArgs, Validator};
use tulle_init::redirect::{self, Outcome};
use tulle_init::report::Report;
use tulle_init::validate;

fn main() -> ExitCode {
    // Images have this program under the names of Linkerd's two programs, `linkerd2-proxy-init` and `linkerd2-network-validator`.
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

/// Invalid flags end with exit code 1, as other failures do, instead of clap's 2.
fn parse<P: Parser>() -> Result<P, ExitCode> {
    P::try_parse().map_err(|error| {
        // If the terminal is closed, the error cannot be reported.
        let _ = error.print();
        match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    })
}

fn run_redirect(args: &RedirectArgs) -> ExitCode {
    let (format, filter) = args.log_format_and_filter();
    if let Err(error) = logging::init(filter, format) {
        return fail(&error);
    }
    let mut report = Report::default();
    let job = args.job().map_err(anyhow::Error::new);
    let outcome = job.and_then(|job| redirect::run(job, &mut report));
    let code = match &outcome {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Different) => ExitCode::from(3),
        Ok(Outcome::Absent) => ExitCode::from(4),
        Ok(Outcome::NotRedirected) => ExitCode::from(validate::EXIT_CODE_NOT_REDIRECTED_OR_UNPROVEN),
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
    let (format, filter) = args.log_format_and_filter();
    if let Err(error) = logging::init(filter, format) {
        return fail(&error);
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    match runtime.block_on(validate::run(args.config())) {
        Ok(()) => {
            tracing::info!("traffic is redirected");
            ExitCode::SUCCESS
        }
        Err(error) => {
            fail(&error);
            if error.is_unproven() {
                ExitCode::from(validate::EXIT_CODE_NOT_REDIRECTED_OR_UNPROVEN)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

#[allow(clippy::print_stdout)] // the output of --report
fn print_report(report: &Report) {
    match serde_json::to_string(report) {
        Ok(json) => println!("{json}"),
        Err(error) => {
            fail(&error);
        }
    }
}

/// Prints an error and its causes on one line.
fn fail(error: &dyn Error) -> ExitCode {
    eprintln!("Error: {}", ErrorChain(error));
    ExitCode::FAILURE
}

const VALIDATOR: &str = "linkerd2-network-validator";
