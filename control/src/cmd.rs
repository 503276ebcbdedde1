//! The command line: which services, with which flags.

use std::ffi::OsString;

use clap::{Parser, ValueEnum};

use crate::config::Flags;

/// Serves what the proxies of a mesh ask for: endpoints and profiles, policies, certificates.
#[derive(Debug, Parser)]
#[command(name = "tulle-control", version, after_long_help = EXAMPLE)]
pub struct Command {
    /// Which services to run; several can be named.
    #[arg(required = true, value_name = "SERVICE")]
    services: Vec<Name>,
    #[command(flatten)]
    pub(crate) flags: Flags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// Endpoints and profiles, on port 8086.
    Destination,
    /// Certificates, on port 8080.
    Identity,
    /// Inbound and outbound policies, on port 8090; on Kubernetes also their admission, on port 9443.
    Policy,
    /// Admission of ServiceProfiles, on port 8443.
    SpValidator,
    /// Injection of proxies into pods, on port 8443.
    ProxyInjector,
    /// Golden metrics and taps of workloads, on port 8089; without Kubernetes for this machine only.
    Telemetry,
    /// Destination, identity, policy and telemetry in one process.
    AllInOne,
}

/// The services of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Services {
    pub destination: bool,
    pub identity: bool,
    pub policy: bool,
    pub sp_validator: bool,
    pub proxy_injector: bool,
    pub telemetry: bool,
}

impl Services {
    /// Whether one of them answers from the objects of the cluster.
    pub fn need_source(self) -> bool {
        self.destination || self.policy || self.telemetry
    }
}

impl Command {
    /// Reads a command line, the program's name first.
    ///
    /// # Errors
    /// A line that is not understood, and requests for help, with the text to print.
    pub fn parse_from_line(line: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        Self::try_parse_from(line.into_iter().map(two_dashes))
    }

    pub(crate) fn services(&self) -> Services {
        let named = |name| self.services.contains(&name);
        let one_of_all = |name| named(name) || named(Name::AllInOne);
        Services {
            destination: one_of_all(Name::Destination),
            identity: one_of_all(Name::Identity),
            policy: one_of_all(Name::Policy),
            sp_validator: named(Name::SpValidator),
            proxy_injector: named(Name::ProxyInjector),
            telemetry: one_of_all(Name::Telemetry),
        }
    }
}

/// Linkerd's Go programs write long flags with one dash; its charts do so too.
fn two_dashes(arg: OsString) -> OsString {
    match arg.to_str() {
        Some(text) if text.len() > 2 && text.starts_with('-') && !text.starts_with("--") => format!("-{text}").into(),
        _ => arg,
    }
}

const EXAMPLE: &str = "\
Flags are taken with one dash or two, and with '=value' or the value as the next argument.

On Kubernetes objects are watched, with the service account of the pod or with -kubeconfig FILE:

  tulle-control destination policy sp-validator

A whole control plane on one machine, without Kubernetes:

  tulle trust create-anchor ...   makes ca.crt and ca.key; keep ca.key to yourself
  tulle trust create-issuer ...   makes issuer/crt.pem and issuer/key.pem, signed by it
  tulle trust create-token  ...   makes a key pair once, and a token for each workload

  tulle-control all-in-one \\
      --manifests ./manifests \\
      --trust-anchors ca.crt --issuer ./issuer --token-keys ./token-keys

  ./manifests    Services, Workloads and policies, the YAML that Kubernetes takes;
                 read again when it changes, and reported on /manifest-errors when it is wrong
  ./token-keys   the public halves of the keys that sign join tokens (*.pem, *.pub)

  tulle stat --control 127.0.0.1:8089  what the workloads do
  curl localhost:9990/ready            whether everything is there
  curl localhost:9996/metrics          what it does
  curl localhost:9996/manifest-errors  which manifests are refused, and why";

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        let line = std::iter::once("tulle-control").chain(line.split(' '));
        Command::parse_from_line(line.map(OsString::from))
    }

    #[test]
    fn several_services_can_be_named() {
        let check =
            |line: &str, [destination, identity, policy, sp_validator, proxy_injector, telemetry]: [bool; 6]| {
                let expected = Services {
                    destination,
                    identity,
                    policy,
                    sp_validator,
                    proxy_injector,
                    telemetry,
                };
                assert_eq!(parse(line).unwrap().services(), expected, "{line}");
            };
        check("destination", [true, false, false, false, false, false]);
        check("identity policy", [false, true, true, false, false, false]);
        check(
            "policy -log-level=debug destination sp-validator",
            [true, false, true, true, false, false],
        );
        check("telemetry destination", [true, false, false, false, false, true]);
        check("proxy-injector", [false, false, false, false, true, false]);
        check("all-in-one", [true, true, true, false, false, true]);
        for refused in ["", "--log-level debug", "proxy"] {
            assert!(parse(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn flags_have_one_dash_or_two_and_their_value_after_an_equals_sign_or_alone() {
        for line in [
            "identity -controller-namespace=mesh",
            "identity -controller-namespace mesh",
            "identity --controller-namespace=mesh",
            "--controller-namespace mesh identity",
            "policy --control-plane-namespace mesh",
        ] {
            assert_eq!(parse(line).unwrap().flags.controller_namespace, "mesh", "{line}");
        }
        assert!(
            parse("identity -controller mesh")
                .unwrap_err()
                .to_string()
                .contains("--controller")
        );
    }

    #[test]
    fn help_shows_a_whole_control_plane() {
        let help = parse("-help").unwrap_err();
        assert!(!help.use_stderr());
        assert!(help.to_string().contains("tulle-control all-in-one"), "{help}");
        assert!(parse("-version").unwrap_err().to_string().starts_with("tulle-control "));
    }
}
