//! The cluster of the tests by hand: `./run cluster`.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use tulle_tests::cluster::{self, ApiServer, AuditPolicy, Cluster, ClusterOptions};
use tulle_tests::images::{self, Image};

/// A Kubernetes cluster on this machine, as the tests have it: real components, each node a network namespace.
#[derive(Parser)]
#[command(name = "./run cluster")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Starts it, with the images of this repository loaded
    Up {
        /// 1 to 3; node N is in zone-N
        #[arg(long, default_value_t = 1, value_name = "N")]
        nodes: u8,
        /// Which requests are written to log/audit.log
        #[arg(long, value_enum, default_value_t = Audit::ServiceAccounts)]
        audit: Audit,
    },
    /// Ends it and removes all that it made, also what a killed test left
    Down,
    /// Runs kubectl on the first node; KUBECONFIG is set
    #[command(disable_help_flag = true)]
    Kubectl {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Runs any program on the first node: helm, curl, a shell; KUBECONFIG is set
    #[command(disable_help_flag = true)]
    Exec {
        program: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Runs a program beside an API server without nodes, which ends with it; KUBECONFIG is set
    #[command(disable_help_flag = true)]
    ApiServer {
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Makes the image of a docker archive known to every node
    LoadImage { archive: PathBuf },
    /// Writes the images of this repository as docker archives into a directory
    Images {
        dir: PathBuf,
        /// Where the static binaries are
        binaries: PathBuf,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Audit {
    /// All that service accounts ask, without bodies
    ServiceAccounts,
    /// Core kinds and those of the mesh, with bodies, as in the tutorials
    Tutorial,
}

fn main() -> ExitCode {
    match run(Args::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cluster: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("starting")?;
    match command {
        Command::Up { nodes, audit } => {
            let audit = match audit {
                Audit::ServiceAccounts => AuditPolicy::ServiceAccounts,
                Audit::Tutorial => AuditPolicy::Tutorial,
            };
            let options = ClusterOptions {
                nodes,
                audit,
                ..ClusterOptions::default()
            };
            runtime.block_on(Cluster::leave_running(options))?;
            eprintln!("cluster: up; `./run cluster kubectl get pods -A` looks inside, `./run cluster down` ends it");
            Ok(())
        }
        Command::Down => runtime.block_on(cluster::down()),
        Command::Kubectl { args } => enter("kubectl", &args),
        Command::Exec { program, args } => enter(&program, &args),
        Command::ApiServer { program, args } => runtime.block_on(beside_api_server(&program, &args)),
        Command::LoadImage { archive } => cluster::load_archive(&archive),
        Command::Images { dir, binaries } => {
            std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
            let all = [
                (Image::Controller, "controller"),
                (Image::Proxy, "proxy"),
                (Image::Workload, "bench"),
            ];
            for (image, name) in all {
                let archive = dir.join(format!("{name}.tar"));
                images::write(image, &binaries, &archive)?;
                let size = std::fs::metadata(&archive).context("the size of an archive")?.len();
                eprintln!(
                    "{}: {}, {:.1} MB",
                    archive.display(),
                    image.reference(),
                    size as f64 / 1e6
                );
            }
            Ok(())
        }
    }
}

/// Starts an API server, runs a program, and ends the API server with it.
async fn beside_api_server(program: &Path, args: &[String]) -> anyhow::Result<()> {
    let server = ApiServer::start().await?;
    let mut child = tokio::process::Command::new(program)
        .args(args)
        .env("KUBECONFIG", server.kubeconfig())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("starting {}", program.display()))?;
    let status = tokio::select! {
        status = child.wait() => status,
        // The program is interrupted as well, and ends first.
        _ = tokio::signal::ctrl_c() => child.wait().await,
    };
    let status = status.with_context(|| format!("waiting for {}", program.display()))?;
    ensure!(status.success(), "{} ended with {status}", program.display());
    Ok(())
}

/// Becomes a program on the first node.
fn enter(program: &str, args: &[String]) -> anyhow::Result<()> {
    let error = cluster::inside(program)?.args(args).exec();
    Err(error).with_context(|| format!("starting {program}"))
}
