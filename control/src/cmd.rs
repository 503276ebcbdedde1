//! The command line: services and flags.

use std::ffi::OsString;

use clap::{Parser, ValueEnum};

use crate::config::flags::Flags;

/// Control plane of the mesh: endpoints, profiles, policies and certificates for proxies.
#[derive(Debug, Parser)]
#[command(name = "tulle-control", version, after_long_help = EXAMPLE)]
pub struct Command {
    /// Services to run; several can be named.
    #[arg(required = true, value_name = "SERVICE")]
    services: Vec<ServiceName>,
    #[command(flatten)]
    pub(crate) flags: Flags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ServiceName {
    /// Endpoints and profiles, on port 8086.
    Destination,
    /// Certificates, on port 8080.
    Identity,
    /// Inbound and outbound policies, on port 8090; on Kubernetes also the validation of policies and routes, on port 9443.
    Policy,
    /// Validation of ServiceProfiles, on port 8443.
    SpValidator,
    /// Injection of proxies into pods, on port 8443.
    ProxyInjector,
    /// Golden metrics and taps of workloads, on port 8089; without Kubernetes on loopback only.
    Telemetry,
    /// Mirrors of the exported Services of other clusters, those of all Links (--all-links) or of one (--link-name), or, with
    /// --local-mirror, the federated Services of this cluster. Only on Kubernetes.
    ServiceMirror,
    /// Destination, identity, policy and telemetry in one process.
    AllInOne,
}

/// Whether each service runs in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Services {
    pub destination: bool,
    pub identity: bool,
    pub policy: bool,
    pub sp_validator: bool,
    pub proxy_injector: bool,
    pub telemetry: bool,
    pub service_mirror: bool,
}

impl Services {
    /// Whether a service reads the objects of the cluster.
    pub fn need_object_source(self) -> bool {
        self.destination || self.policy || self.telemetry
    }

    /// Whether the service mirror is the only service.
    pub(crate) fn is_mirror_only(self) -> bool {
        let mirror = Self {
            service_mirror: true,
            ..Self::default()
        };
        self == mirror
    }

    /// Whether the proxy injector is the only service, so that only the API server uses the process.
    pub(crate) fn is_injector_only(self) -> bool {
        let injector = Self {
            proxy_injector: true,
            ..Self::default()
        };
        self == injector
    }
}

impl Command {
    /// Parses a command line, with the program name first.
    ///
    /// # Errors
    /// Fails on invalid arguments. Also fails on a request for help or version; the error is then the text to print.
    pub fn parse_from_line(line: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut line: Vec<OsString> = line.into_iter().map(with_two_dashes).collect();
        convert_link_argument(&mut line);
        Self::try_parse_from(line)
    }

    /// Whether the command line names telemetry itself. `all-in-one` alone does not name it.
    pub(crate) fn names_telemetry(&self) -> bool {
        self.services.contains(&ServiceName::Telemetry)
    }

    pub(crate) fn services(&self) -> Services {
        let is_named = |name| self.services.contains(&name);
        let is_named_or_all_in_one = |name| is_named(name) || is_named(ServiceName::AllInOne);
        Services {
            destination: is_named_or_all_in_one(ServiceName::Destination),
            identity: is_named_or_all_in_one(ServiceName::Identity),
            policy: is_named_or_all_in_one(ServiceName::Policy),
            sp_validator: is_named(ServiceName::SpValidator),
            proxy_injector: is_named(ServiceName::ProxyInjector),
            telemetry: is_named_or_all_in_one(ServiceName::Telemetry),
            service_mirror: is_named(ServiceName::ServiceMirror),
        }
    }
}

/// Adds the second dash to a long flag with one dash. Linkerd's Go programs and charts use such flags.
fn with_two_dashes(arg: OsString) -> OsString {
    match arg.to_str() {
        Some(text) if text.len() > 2 && text.starts_with('-') && !text.starts_with("--") => format!("-{text}").into(),
        _ => arg,
    }
}

/// Converts the last argument of a service mirror to `--link-name`: Linkerd's charts pass the name of the Link without a flag.
fn convert_link_argument(line: &mut [OsString]) {
    let is_mirror = line.iter().any(|arg| arg == SERVICE_MIRROR);
    let [.., before, last] = line else { return };
    let (before, name) = (before.to_string_lossy(), last.to_string_lossy());
    // The argument after another flag is its value.
    let is_value = before.starts_with("--") && !before.contains('=') && !MIRROR_BOOLEAN_FLAGS.contains(&&*before);
    if is_mirror && !is_value && !name.starts_with("--") && name != SERVICE_MIRROR {
        *last = format!("--link-name={name}").into();
    }
}

const SERVICE_MIRROR: &str = "service-mirror";

/// Boolean flags of the service mirror. Without a value they are true, so the next argument is not their value.
const MIRROR_BOOLEAN_FLAGS: [&str; 5] = [
    "--all-links",
    "--enable-headless-services",
    "--enable-namespace-creation",
    "--enable-pprof",
    "--local-mirror",
];

const EXAMPLE: &str = "\
Flags can have one dash or two. The value follows after '=' or as the next argument;
true and false only after '='.

On Kubernetes, with the service account of the pod or with --kubeconfig FILE:

  tulle-control destination policy sp-validator

A whole control plane on one machine, without Kubernetes:

  tulle trust create-anchor ...   creates ca.crt and ca.key; keep ca.key secret
  tulle trust create-issuer ...   creates issuer/crt.pem and issuer/key.pem, signed by ca.crt
  tulle trust create-token  ...   creates a key pair once, and a token for each workload

  tulle-control all-in-one \\
      --manifests ./manifests \\
      --trust-anchors ca.crt --issuer ./issuer --token-keys ./token-keys

  ./manifests    Services, workloads and policies as Kubernetes YAML; reloaded on
                 change, errors are listed on /manifest-errors
  ./token-keys   public keys for verifying join tokens (*.pem, *.pub)

  tulle stat --control 127.0.0.1:8089  golden metrics of the workloads
  curl localhost:9990/ready            readiness
  curl localhost:9996/metrics          metrics of the control plane
  curl localhost:9996/manifest-errors  invalid manifests";

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
                    service_mirror: false,
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
        for invalid in ["", "--log-level debug", "proxy"] {
            assert!(parse(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn the_injector_is_the_only_service_if_no_other_is_named() {
        let is_injector_only = |line: &str| parse(line).unwrap().services().is_injector_only();
        assert!(is_injector_only("proxy-injector"));
        for line in [
            "destination",
            "destination policy proxy-injector",
            "proxy-injector sp-validator",
            "all-in-one proxy-injector",
        ] {
            assert!(!is_injector_only(line), "{line}");
        }
    }

    #[test]
    fn flags_have_one_dash_or_two_and_their_value_after_an_equals_sign_or_as_the_next_argument() {
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
    fn the_last_argument_of_a_service_mirror_is_its_link() {
        for line in [
            "service-mirror east",
            "service-mirror -namespace mc -probe-service=probe-east east",
            "service-mirror -enable-namespace-creation east",
            "service-mirror -link-name=east",
            "service-mirror -link-name east",
        ] {
            let command = parse(line).unwrap();
            assert!(command.services().service_mirror);
            assert_eq!(command.flags.mirror.link_name.as_deref(), Some("east"), "{line}");
        }
        for without_name in [
            "service-mirror -local-mirror",
            "service-mirror -all-links",
            "service-mirror -all-links -excluded-links east,west",
        ] {
            let command = parse(without_name).unwrap();
            assert_eq!(command.flags.mirror.link_name, None, "{without_name}");
        }
        for two_scopes in ["-local-mirror east", "-all-links east", "-all-links -local-mirror"] {
            assert!(parse(&format!("service-mirror {two_scopes}")).is_err(), "{two_scopes}");
        }
        assert!(parse("destination east").is_err());
    }

    #[test]
    fn help_shows_a_whole_control_plane() {
        let help = parse("-help").unwrap_err();
        assert!(!help.use_stderr());
        assert!(help.to_string().contains("tulle-control all-in-one"), "{help}");
        assert!(parse("-version").unwrap_err().to_string().starts_with("tulle-control "));
    }
}
