//! `tulle multicluster`: links clusters, so that one can use the Services of another.
//!
//! Like `tulle install`, these commands do not change a cluster: they print manifests for `kubectl apply` and `kubectl delete`.

mod check;
mod check_permissions;
mod check_routes;
mod check_state;
mod check_trust;
mod extension;
mod gateways;
mod install;
mod link;
mod link_gen;
mod unlink;

use std::process::ExitCode;

use clap::Subcommand;

use crate::kubernetes;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print the manifests of the gateway, of the service mirrors, and of the account for other clusters
    #[command(after_help = install::INSTALL_EXAMPLES)]
    Install(install::InstallArgs),
    /// Print all objects of the multicluster extension, for `kubectl delete`
    Uninstall(install::UninstallArgs),
    /// Print a service account for another cluster, with its token and permissions
    #[command(after_help = install::ALLOW_EXAMPLES)]
    Allow(install::AllowArgs),
    /// Print the credentials and the Link with which another cluster mirrors this one
    #[command(after_help = link_gen::EXAMPLES)]
    LinkGen(Box<link_gen::Args>),
    /// Deprecated: print what `link-gen` prints, and a controller for the Link
    #[command(after_help = link::EXAMPLES)]
    Link(Box<link::LinkArgs>),
    /// Print the Link, its credentials and its mirrors, for `kubectl delete`
    #[command(after_help = unlink::EXAMPLES)]
    Unlink(unlink::Args),
    /// Check each Link, and print a fix for each problem
    Check(check::Args),
    /// Show whether the gateways of linked clusters can be reached
    Gateways(gateways::Args),
}

/// Runs one of the commands.
///
/// # Errors
/// The error of the command.
pub(crate) fn main(command: &Command, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    match command {
        Command::Install(args) => install::install(args, flags),
        Command::Uninstall(args) => install::uninstall(args, flags),
        Command::Allow(args) => install::allow(args, flags),
        Command::LinkGen(args) => link_gen::main(args, flags),
        Command::Link(args) => link::main(args, flags),
        Command::Unlink(args) => unlink::main(args, flags),
        Command::Check(args) => return check::main(args, flags),
        Command::Gateways(args) => gateways::main(args, flags),
    }?;
    Ok(ExitCode::SUCCESS)
}
