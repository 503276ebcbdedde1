//! The command line of `tulle`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;

#[cfg(target_os = "linux")]
use crate::demo;
use crate::telemetry::{golden, tap, top};
use crate::{
    authz, check, diagnostics, explain, identity, inject, install, kubernetes, metrics, multicluster, profile, trust,
    version,
};

/// Runs and inspects a tulle service mesh.
#[derive(Debug, Parser)]
#[command(
    name = "tulle",
    version,
    after_help = FIRST_STEPS
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    cluster: kubernetes::Flags,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a whole mesh on this machine, with a live table
    #[cfg(target_os = "linux")]
    Demo(demo::Args),
    /// Check a cluster and its mesh, and print a fix for each problem
    Check(check::Args),
    /// Print the manifests of a control plane for `kubectl apply`
    Install(install::InstallArgs),
    /// Print the manifests that upgrade the installed control plane to the version of this command, with its values kept or changed
    Upgrade(install::UpgradeArgs),
    /// Print the objects that an upgrade left behind, for `kubectl delete`
    Prune(install::PruneArgs),
    /// Print all objects of a control plane, for `kubectl delete`
    Uninstall(install::UninstallArgs),
    /// Create trust anchors, issuers and join tokens
    #[command(subcommand)]
    Trust(trust::Command),
    /// Add the mesh to manifests
    Inject(Box<inject::Args>),
    /// Remove the mesh from manifests
    Uninject(inject::UninjectArgs),
    /// Query a running control plane as a proxy does
    #[command(visible_alias = "dg")]
    Diagnostics(diagnostics::Args),
    /// Show success, traffic and latency of workloads
    #[command(after_help = golden::STAT_EXAMPLES)]
    Stat(golden::Args),
    /// Show the clients and servers of workloads, and whether their connections use mTLS
    #[command(after_help = golden::EDGES_EXAMPLES)]
    Edges(golden::Args),
    /// Show success, traffic and latency of routes
    #[command(after_help = golden::ROUTES_EXAMPLES)]
    Routes(golden::Args),
    /// Show the most frequent requests in real time
    #[command(after_help = top::EXAMPLES)]
    Top(top::Args),
    /// Show requests in real time
    #[command(after_help = tap::EXAMPLES)]
    Tap(tap::Args),
    /// Explain why a request failed, from the headers of its response
    Explain(explain::Args),
    /// Show the certificates that the proxies of pods present
    Identity(identity::Args),
    /// Show the authorizations that apply to the ports of a workload
    Authz(authz::Args),
    /// Show the metrics of proxies
    Metrics(metrics::ProxyMetricsArgs),
    /// Use Services of other clusters
    #[command(subcommand, visible_alias = "mc")]
    Multicluster(multicluster::Command),
    /// Create a ServiceProfile
    Profile(profile::Args),
    /// Show the versions of this command, of the control plane and of proxies
    Version(version::Args),
    /// Write a script that completes this command in a shell
    #[command(after_help = COMPLETION_EXAMPLES)]
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Write the manual pages of this command and of its subcommands into a directory
    #[command(after_help = MAN_EXAMPLE)]
    Man {
        /// The directory; created if it does not exist
        dir: PathBuf,
    },
}

/// Runs the command.
///
/// Must be called before any thread is started, because `tulle demo` can re-execute this program.
///
/// # Errors
/// The error of the command, with its sources.
pub fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    let cluster = &cli.cluster;
    match &cli.command {
        #[cfg(target_os = "linux")]
        Command::Demo(args) => demo::main(args),
        Command::Trust(command) => trust::main(command).map(|()| ExitCode::SUCCESS),
        Command::Inject(args) => inject::main(args, cluster).map(|()| ExitCode::SUCCESS),
        Command::Uninject(args) => inject::uninject(args).map(|()| ExitCode::SUCCESS),
        Command::Diagnostics(args) => diagnostics::main(args, cluster),
        Command::Check(args) => check::main(args, cluster),
        Command::Install(args) => install::install(args, cluster),
        Command::Upgrade(args) => install::upgrade(args, cluster),
        Command::Prune(args) => install::prune(args, cluster),
        Command::Uninstall(args) => install::uninstall(args, cluster),
        Command::Stat(args) => golden::stat(args, cluster),
        Command::Edges(args) => golden::edges(args, cluster),
        Command::Routes(args) => golden::routes(args, cluster),
        Command::Top(args) => top::main(args, cluster),
        Command::Tap(args) => tap::main(args, cluster),
        Command::Explain(args) => explain::main(args),
        Command::Identity(args) => identity::main(args, cluster),
        Command::Authz(args) => authz::main(args, cluster),
        Command::Metrics(args) => metrics::print_proxy_metrics(args, cluster),
        Command::Multicluster(command) => multicluster::main(command, cluster),
        Command::Profile(args) => profile::main(args, cluster),
        Command::Version(args) => version::main(args, cluster),
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "tulle", &mut script);
            crate::print(&String::from_utf8(script)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { dir } => write_manual_pages(dir).map(|()| ExitCode::SUCCESS),
    }
}

fn write_manual_pages(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    clap_mangen::generate_to(Cli::command(), dir)
        .with_context(|| format!("writing manual pages into {}", dir.display()))
}

/// The demo exists only on Linux.
const FIRST_STEPS: &str = if cfg!(target_os = "linux") {
    "Start with `tulle demo`, a whole mesh on this machine, or with `tulle check --pre`, if you have a cluster."
} else {
    "Start with `tulle check --pre`."
};

const COMPLETION_EXAMPLES: &str = "\
  source <(tulle completion bash)                                    # this shell
  tulle completion bash > /etc/bash_completion.d/tulle               # all shells
  tulle completion zsh > \"${fpath[1]}/_tulle\"
  tulle completion fish > ~/.config/fish/completions/tulle.fish";

const MAN_EXAMPLE: &str = "\
  tulle man ~/.local/share/man/man1 && man tulle-check";

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_shell_has_a_script_that_completes_tulle() {
        let check = |shell: &str, expected: &str| {
            let cli = Cli::try_parse_from(["tulle", "completion", shell]).unwrap();
            let Command::Completion { shell } = cli.command else {
                panic!("{shell} is not a known shell");
            };
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "tulle", &mut script);
            let script = String::from_utf8(script).unwrap();
            for expected in [expected, "controller-metrics"] {
                assert!(script.contains(expected), "{shell}: no {expected} in\n{script}");
            }
        };
        check("bash", "complete -F _tulle ");
        check("elvish", "edit:completion:arg-completer[tulle]");
        check("fish", "complete -c tulle ");
        check("powershell", "Register-ArgumentCompleter -Native -CommandName 'tulle'");
        check("zsh", "#compdef tulle");
        assert_eq!(Shell::value_variants().len(), 5);
    }

    #[test]
    fn every_command_has_a_manual_page() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("man1");
        write_manual_pages(&dir).unwrap();
        for (page, expected) in [
            ("tulle.1", "tulle\\-check(1)"),
            ("tulle-trust-create-anchor.1", "\\-\\-"),
            ("tulle-completion.1", "source <(tulle completion bash)"),
        ] {
            let text = std::fs::read_to_string(dir.join(page)).unwrap();
            assert!(text.contains(expected), "{page}: no {expected} in\n{text}");
        }
        for command in Cli::command().get_subcommands() {
            let page = dir.join(format!("tulle-{}.1", command.get_name()));
            assert!(page.is_file(), "there is no {}", page.display());
        }
    }

    const VALID: &[&str] = &[
        "tulle demo",
        "tulle demo --once 30 --json table.json",
        "tulle demo --once 30 --balancer round-robin -o json",
        "tulle demo --manifests demo",
        "tulle demo break control-plane --for 20s",
        "tulle demo break replica",
        "tulle demo break certificate",
        "tulle trust create-anchor",
        "tulle trust create-token --service-account web --out web.token",
        "tulle trust serve-workload-api --identity spiffe://root.linkerd.cluster.local/vm-1 --uid 2102",
        "tulle diagnostics endpoints web.demo.svc.cluster.local:80",
        "tulle dg endpoints web.demo.svc.cluster.local:80 ws.demo.svc.cluster.local:80 -o json",
        "tulle dg profile 10.96.0.10:80 --destination-addr 127.0.0.1:8086",
        "tulle dg policy demo/web-1 8080",
        "tulle inject web.yaml",
        "tulle inject --manual --proxy-log-level debug manifests/ -L mesh",
        "tulle inject --ingress --enable-debug-sidecar --close-wait-timeout 60s - -o json",
        "tulle inject --inbound-mode tproxy web.yaml",
        "tulle uninject meshed.yaml",
        "tulle dg policy deploy/web 8080 -n shop -o yaml",
        "tulle dg controller-metrics",
        "tulle dg proxy-metrics --obfuscate deploy web",
        "tulle metrics deploy/web -n shop",
        "tulle authz deploy -n shop",
        "tulle profile --template web -n shop",
        "tulle profile --open-api web.yaml web --ignore-cluster -o json",
        "tulle multicluster install --ha --gateway=false --set controllers[0].link.ref.name=east",
        "tulle multicluster install --wait 0 --gateway-port 4143",
        "tulle mc link --cluster-name east --gateway=false --ha --log-level debug --log-format json -o json",
        "tulle mc link --cluster-name east --registry r.example --control-plane-version 1.0.0 -f a.yaml --set a=b",
        "tulle mc link-gen --cluster-name east --context east --gateway-addresses 192.0.2.1",
        "tulle mc unlink --cluster-name east --only-controller -o json",
        "tulle mc allow --service-account-name west --ignore-cluster",
        "tulle mc gateways --cluster-name east -o json",
        "tulle mc gateways -w 10s",
        "tulle mc uninstall",
        "tulle mc check -o short --wait 0 --timeout 5s",
        "tulle mc check --proxy -n linkerd-multicluster",
        "tulle version --short --client",
        "tulle version --proxy -n shop",
        "tulle completion zsh",
        "tulle man man1",
        "tulle install --crds --set installGatewayAPI=true",
        "tulle install --ha -f a.yaml -f b.yaml --set-string a=1 --set-file b=c -o json --ignore-cluster",
        "tulle upgrade --from-manifests all.yaml --force --controller-replicas 3",
        "tulle uninstall --force -L mesh",
        "tulle prune",
        "tulle check --pre",
        "tulle check --proxy -n shop -o json --wait 10s -L mesh --context test --as me --as-group us",
        "tulle -L mesh check --crds -o short --expected-version 1.0.0",
        "tulle stat",
        "tulle stat deploy/web -n shop -o wide -t 5m",
        "tulle stat -A --control http://127.0.0.1:8089",
        "tulle edges deploy -n shop",
        "tulle routes svc web -o json",
        "tulle tap deploy/web -n shop --to deploy/db --method POST --path /a --one-in 10 --count 5",
        "tulle top ns/shop --hide-sources --lines 5",
        "tulle explain",
        "tulle explain no-endpoints; direction=outbound; hop=web.shop; target=10.0.0.7:80 -o json",
        "tulle identity web-1 -n shop",
        "tulle identity -l app=web",
        "tulle dg policy --outbound 10.96.0.10:80 --namespace demo -o json",
    ];

    const INVALID: &[&str] = &[
        "tulle",
        "tulle demo --once 0",
        "tulle demo break",
        "tulle demo break everything",
        "tulle trust serve-workload-api --identity vm.example.com",
        "tulle dg policy",
        "tulle check --pre --proxy",
        "tulle inject",
        "tulle identity",
        "tulle stat deploy -n shop -A",
        "tulle stat -t 1h",
        "tulle tap --one-in 0",
        "tulle profile web",
        "tulle mc",
        "tulle mc link-gen",
        "tulle mc link",
        "tulle profile web --template --proto a.proto",
        "tulle completion tcsh",
        "tulle man",
    ];

    #[test]
    fn documented_command_lines_are_parsed() {
        for line in VALID {
            Cli::try_parse_from(line.split(' ')).unwrap_or_else(|err| panic!("{line}: {err}"));
        }
        for line in INVALID {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
