//! The command line of `tulle`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{demo, diagnostics, trust};

/// Runs and inspects a tulle service mesh.
#[derive(Debug, Parser)]
#[command(
    name = "tulle",
    version,
    after_help = "Start with `tulle demo`: a whole mesh on this machine."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a whole mesh on this machine, with a live table
    Demo(demo::Args),
    /// Make trust anchors, issuers and join tokens
    #[command(subcommand)]
    Trust(trust::Command),
    /// Ask a running control plane what it would tell a proxy
    #[command(visible_alias = "dg")]
    Diagnostics(diagnostics::Args),
}

/// Runs what the command line asks for.
///
/// Call it before there is any thread: the demo may start this program again.
///
/// # Errors
/// What went wrong, with its causes.
pub fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    match &cli.command {
        Command::Demo(args) => demo::main(args),
        Command::Trust(command) => trust::main(command).map(|()| ExitCode::SUCCESS),
        Command::Diagnostics(args) => diagnostics::main(args).map(|()| ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn lines_of_the_documentation_are_understood() {
        for line in [
            "tulle demo",
            "tulle demo --once 30 --json table.json",
            "tulle demo --once 30 --balancer round-robin -o json",
            "tulle demo --manifests demo",
            "tulle demo break control-plane --for 20s",
            "tulle demo break replica",
            "tulle demo break certificate",
            "tulle trust create-anchor",
            "tulle trust create-token --service-account web --out web.token",
            "tulle diagnostics endpoints web.demo.svc.cluster.local:80",
            "tulle dg endpoints web.demo.svc.cluster.local:80 ws.demo.svc.cluster.local:80 -o json",
            "tulle dg profile 10.96.0.10:80 --destination-addr 127.0.0.1:8086",
            "tulle dg policy demo/web-1 8080",
            "tulle dg policy --outbound 10.96.0.10:80 --namespace demo -o json",
        ] {
            Cli::try_parse_from(line.split(' ')).unwrap_or_else(|err| panic!("{line}: {err}"));
        }
        for line in [
            "tulle",
            "tulle demo --once 0",
            "tulle demo break",
            "tulle demo break everything",
            "tulle dg policy",
        ] {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
