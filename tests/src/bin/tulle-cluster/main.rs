//! The test cluster for manual use: `./run cluster` and `./run multicluster-demo`.

mod multicluster_demo;

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use tulle_tests::cluster::{self, ApiServer, AuditPolicy, Cluster, ClusterOptions};
use tulle_tests::images::{self, Image};

/// A Kubernetes cluster on this machine, the same as in the tests: real components, each node in a network namespace.
#[derive(Parser)]
#[command(name = "./run cluster")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Starts the cluster and loads the images controller, proxy and bench
    Up {
        /// Number of nodes, 1 to 3; node N is in zone-N
        #[arg(long, default_value_t = 1, value_name = "N")]
        nodes: u8,
        /// Which requests are written to log/audit.log
        #[arg(long, value_enum, default_value_t = Audit::ServiceAccounts)]
        audit: Audit,
    },
    /// Stops the cluster and removes everything it created, including leftovers of killed tests
    Down,
    /// Succeeds only if a cluster that `up` started is running
    Status,
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
    /// Runs a program with an API server that has the custom resources but no nodes; it stops when the program exits;
    /// KUBECONFIG is set
    #[command(disable_help_flag = true)]
    ApiServer {
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Two linked clusters, and a Service that fails over from one to the other; they stop when the program exits
    MulticlusterDemo(multicluster_demo::Args),
    /// Loads the image of a docker archive on every node
    LoadImage { archive: PathBuf },
    /// Writes the images of this repository into a directory as docker archives
    Images {
        dir: PathBuf,
        /// Directory of the static binaries
        binaries: PathBuf,
    },
    /// Writes the image of the workload of the conformance tests as a docker archive
    EchoImage {
        archive: PathBuf,
        /// Directory of the static binaries `client` and `server`
        binaries: PathBuf,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Audit {
    /// All requests of service accounts, without bodies
    ServiceAccounts,
    /// Requests of any user for core kinds, policies, profiles and routes, with bodies
    #[value(alias = "tutorial")]
    WithBodies,
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
                Audit::WithBodies => AuditPolicy::WithBodies,
            };
            let options = ClusterOptions {
                nodes,
                audit,
                ..ClusterOptions::default()
            };
            runtime.block_on(Cluster::start_detached(options))?;
            eprintln!(
                "cluster: started; inspect it with `./run cluster kubectl get pods -A`, stop it with `./run cluster down`"
            );
            Ok(())
        }
        Command::Status => {
            ensure!(
                cluster::is_detached_running()?,
                "no detached cluster is running; `./run cluster up` starts one"
            );
            Ok(())
        }
        Command::Down => runtime.block_on(cluster::stop_detached()),
        Command::Kubectl { args } => exec_on_first_node("kubectl", &args),
        Command::Exec { program, args } => exec_on_first_node(&program, &args),
        Command::ApiServer { program, args } => runtime.block_on(run_with_api_server(&program, &args)),
        Command::MulticlusterDemo(args) => runtime.block_on(multicluster_demo::run(args)),
        Command::LoadImage { archive } => cluster::load_archive_on_detached(&archive),
        Command::Images { dir, binaries } => {
            std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
            for (image, name) in Image::SHIPPED.into_iter().zip(["controller", "proxy", "bench"]) {
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
        Command::EchoImage { archive, binaries } => images::write(Image::Echo, &binaries, &archive),
    }
}

/// Starts an API server, runs a program, and stops the API server when the program exits.
async fn run_with_api_server(program: &Path, args: &[String]) -> anyhow::Result<()> {
    let server = ApiServer::start().await?;
    tulle_tests::charts::install_custom_resources(&server).await?;
    let mut child = tokio::process::Command::new(program)
        .args(args)
        .env("KUBECONFIG", server.kubeconfig())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("starting {}", program.display()))?;
    let status = tokio::select! {
        status = child.wait() => status,
        // The program gets the interrupt as well and exits first.
        _ = tokio::signal::ctrl_c() => child.wait().await,
    };
    let status = status.with_context(|| format!("waiting for {}", program.display()))?;
    ensure!(status.success(), "{} ended with {status}", program.display());
    Ok(())
}

/// Replaces this process by a program on the first node.
fn exec_on_first_node(program: &str, args: &[String]) -> anyhow::Result<()> {
    let error = cluster::command_on_first_detached_node(program)?.args(args).exec();
    Err(error).with_context(|| format!("starting {program}"))
}
