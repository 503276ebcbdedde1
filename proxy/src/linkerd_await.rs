//! The program `linkerd-await`, for post-start hooks and jobs: waits until the proxy of this pod is ready, then runs the given
//! program.

use std::{
    net::{Ipv4Addr, SocketAddr},
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    process::{Command, ExitCode, ExitStatus},
    time::Duration,
};

use clap::Parser;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    signal::unix::{SignalKind, signal},
    time::{sleep, timeout},
};
use tulle_core::{duration, names::variable};

/// Waits until the proxy of this pod is ready, then runs a program, if one is given.
///
/// If LINKERD_AWAIT_DISABLED or LINKERD_DISABLED is set and not empty, it neither waits nor shuts the proxy down.
/// LINKERD_AWAIT_VERBOSE, set and not empty, is the same as --verbose.
#[derive(Debug, Parser)]
#[command(name = "linkerd-await", version)]
pub struct Args {
    /// The proxy's admin port, on loopback
    #[arg(short, long, value_name = "PORT", default_value_t = 4191)]
    port: u16,
    /// Time between two readiness checks
    #[arg(short, long, value_name = "DURATION", default_value = "1s", value_parser = duration::parse)]
    backoff: Duration,
    /// Maximum time to wait [default: no limit]
    #[arg(short, long, value_name = "DURATION", value_parser = duration::parse)]
    timeout: Option<Duration>,
    /// Whether to exit with code 69 after --timeout; if false, continue as if the proxy were ready
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_value_t = true, default_missing_value = "true", require_equals = true, action = clap::ArgAction::Set)]
    timeout_fatal: bool,
    /// Shut the proxy down after the program has ended, so that a Job can complete. SIGTERM is passed on to the program
    #[arg(short = 'S', long, requires = "program")]
    shutdown: bool,
    /// Print the result of each failed readiness check, and why no check is made
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// The program to run, with its arguments
    #[arg(trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<String>,
}

/// Waits for the proxy, then runs the program. Returns the exit code of this process.
pub fn run(args: &Args) -> ExitCode {
    let non_empty_variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let is_verbose = args.verbose > 0 || non_empty_variable(variable::AWAIT_VERBOSE).is_some();
    let disabled = non_empty_variable(variable::AWAIT_DISABLED).or_else(|| non_empty_variable(variable::DISABLED));
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(format_args!("starting: {error}")),
    };
    if let Some(reason) = &disabled
        && is_verbose
    {
        eprintln!("linkerd-await: does not wait for the proxy: {}", reason.display());
    }
    if disabled.is_none()
        && let Err(limit) = runtime.block_on(wait(args, is_verbose))
        && args.timeout_fatal
    {
        eprintln!(
            "linkerd-await: the proxy's port {} was not ready within {limit:?}",
            args.port
        );
        return ExitCode::from(EX_UNAVAILABLE);
    }
    let Some((program, arguments)) = args.program.split_first() else {
        return ExitCode::SUCCESS;
    };
    let mut command = Command::new(program);
    command.args(arguments);
    if disabled.is_some() || !args.shutdown {
        return fail(format_args!("running {program}: {}", command.exec()));
    }
    let ended = runtime.block_on(run_until_end(command));
    if let Err(error) = runtime.block_on(request_status(args.port, "POST /shutdown")) {
        eprintln!("linkerd-await: shutting the proxy down: {error}");
    }
    match ended {
        Ok(status) => {
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
            ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
        }
        Err(error) => fail(format_args!("running {program}: {error}")),
    }
}

/// Runs a program until it ends, and passes SIGTERM on to it: the kubelet sends it to this process only.
async fn run_until_end(command: Command) -> std::io::Result<ExitStatus> {
    let mut sigterm = signal(SignalKind::terminate())?;
    let mut child = tokio::process::Command::from(command).spawn()?;
    loop {
        tokio::select! {
            ended = child.wait() => return ended,
            _ = sigterm.recv() => {
                if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
                    let _ = kill(Pid::from_raw(pid), Signal::SIGTERM); // fails if the program has ended
                }
            }
        }
    }
}

/// Waits until the proxy is ready.
///
/// # Errors
/// The time limit, if the proxy was not ready within it.
async fn wait(args: &Args, is_verbose: bool) -> Result<(), Duration> {
    let ready = async {
        loop {
            match request_status(args.port, "GET /ready").await {
                Ok(200) => return,
                _ if !is_verbose => {}
                Ok(status) => eprintln!("linkerd-await: not ready: the admin server returned {status}"),
                Err(error) => eprintln!("linkerd-await: not ready: {error}"),
            }
            sleep(args.backoff).await;
        }
    };
    match args.timeout {
        Some(limit) => timeout(limit, ready).await.map_err(|_| limit),
        None => {
            ready.await;
            Ok(())
        }
    }
}

/// Sends a request, such as `GET /ready`, to the admin server, and returns the status of the response.
async fn request_status(port: u16, request: &str) -> std::io::Result<u16> {
    let exchange = async {
        let mut stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await?;
        let request =
            format!("{request} HTTP/1.1\r\nhost: localhost:{port}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut head = String::new();
        BufReader::new(stream).read_line(&mut head).await?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
        status.ok_or_else(|| std::io::Error::other(format!("not an HTTP response: {head:?}")))
    };
    timeout(ADMIN_RESPONSE_TIMEOUT, exchange).await?
}

fn fail(message: std::fmt::Arguments<'_>) -> ExitCode {
    eprintln!("linkerd-await: {message}");
    ExitCode::FAILURE
}

/// Maximum time for a response of the admin server. A proxy that does not respond in this time is not ready.
const ADMIN_RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Exit code of `sysexits.h` for a service that is not available.
const EX_UNAVAILABLE: u8 = 69;
