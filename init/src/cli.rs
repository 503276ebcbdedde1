//! Flags to jobs: all that Linkerd's init and validator take, and ours.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use tulle_core::duration;
use tulle_core::telemetry::Format;

use crate::iptables::{DEFAULT_WAIT_SECS, Flavour};
use crate::options::{
    self, BadEntry, DEFAULT_PRIORITY, Families, Inbound, InboundMode, Invalid, OptionError, Options, Scope,
};
use crate::redirect::{Backend, CleanMode, Ipv6, Job, Mode};
use crate::validate::Trial;

/// Redirects the TCP traffic of a network namespace through the tulle proxy.
///
/// Run it once in the namespace, before the application starts. Connections from outside then arrive at the proxy's
/// inbound port, and connections of the application at its outbound port; the proxy's own connections, loopback, UDP
/// and all that is skipped stay direct. Running it again changes nothing, or replaces the rules in one step.
#[derive(Debug, Parser)]
#[command(
    name = "tulle-init",
    version,
    after_help = EXAMPLES,
    args_conflicts_with_subcommands = true,
    subcommand_precedence_over_arg = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Subcommands>,
    #[command(flatten)]
    pub redirect: RedirectArgs,
}

#[derive(Debug, Subcommand)]
pub enum Subcommands {
    /// Proves that traffic of this namespace is redirected: exit code 0 if it is, 95 if not
    Validate(ValidateArgs),
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("mode").args(["simulate", "check", "clean"]))]
pub struct RedirectArgs {
    /// Port on which the proxy takes inbound connections (required, except by --clean)
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = -1, allow_negative_numbers = true, overrides_with = "incoming_proxy_port")]
    incoming_proxy_port: i64,
    /// Port on which the proxy takes outbound connections (required, except by --clean)
    #[arg(short = 'o', long, value_name = "PORT", default_value_t = -1, allow_negative_numbers = true, overrides_with = "outgoing_proxy_port")]
    outgoing_proxy_port: i64,
    /// User as which the proxy runs; its connections stay direct
    #[arg(short = 'u', long, value_name = "UID", default_value_t = -1, allow_negative_numbers = true, overrides_with = "proxy_uid")]
    proxy_uid: i64,
    /// Group as which the proxy runs; its connections stay direct
    #[arg(short = 'g', long, value_name = "GID", default_value_t = -1, allow_negative_numbers = true, overrides_with = "proxy_gid")]
    proxy_gid: i64,
    /// Redirect only these inbound ports [default: all]
    #[arg(short = 'r', long, value_name = "PORTS")]
    ports_to_redirect: Vec<String>,
    /// Inbound ports and ranges that stay direct, those that the proxy serves itself included [default: 4190,4191]
    #[arg(long, value_name = "PORTS")]
    inbound_ports_to_ignore: Vec<String>,
    /// Outbound ports and ranges that stay direct
    #[arg(long, value_name = "PORTS")]
    outbound_ports_to_ignore: Vec<String>,
    /// Networks whose inbound connections stay direct, of either family
    #[arg(long, value_name = "CIDRS")]
    subnets_to_ignore: Vec<String>,
    /// Networks to which outbound connections stay direct, of either family
    #[arg(long, value_name = "CIDRS")]
    outbound_subnets_to_ignore: Vec<String>,
    /// Print what would be applied, and do nothing
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, overrides_with = "simulate")]
    simulate: Option<bool>,
    /// Work in this network namespace, such as /run/netns/pod
    #[arg(long, value_name = "PATH", overrides_with = "netns")]
    netns: Option<PathBuf>,
    /// Accepted for compatibility: locks are always waited for
    #[arg(short = 'w', long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, overrides_with = "use_wait_flag")]
    use_wait_flag: Option<bool>,
    /// Set how long connection tracking keeps connections in CLOSE_WAIT; 0 leaves it
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 0,
        overrides_with = "timeout_close_wait_secs"
    )]
    timeout_close_wait_secs: u32,
    /// Form of log lines
    #[arg(
        long,
        value_name = "plain|json",
        default_value = "plain",
        overrides_with = "log_format"
    )]
    log_format: String,
    /// Least important log lines to show
    #[arg(
        long,
        value_name = "LEVEL",
        default_value = "info",
        value_parser = LOG_LEVELS,
        hide_possible_values = true,
        ignore_case = true,
        overrides_with = "log_level"
    )]
    log_level: String,
    /// Use iptables' programs of this flavour, as Linkerd's init does
    #[arg(long, value_name = "legacy|nft|plain", overrides_with = "iptables_mode")]
    iptables_mode: Option<String>,
    /// The same, by the name of the program: iptables-legacy, iptables-nft or iptables
    #[arg(long, value_name = "NAME", overrides_with = "firewall_bin_path")]
    firewall_bin_path: Option<String>,
    /// Accepted for compatibility: follows from the flavour
    #[arg(long, value_name = "NAME", overrides_with = "firewall_save_bin_path")]
    firewall_save_bin_path: Option<String>,
    /// Redirect IPv6 too [default: true, where the namespace has it]; see --unredirected-ipv6
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, overrides_with = "ipv6")]
    ipv6: Option<bool>,

    /// Who holds the rules; auto is nftables spoken natively, else iptables' programs
    #[arg(long, value_enum, value_name = "BACKEND", help_heading = OURS)]
    backend: Option<BackendArg>,
    /// Remove the rules, ours and Linkerd's; drain waits for open connections
    #[arg(long, value_enum, value_name = "now|drain", num_args = 0..=1, require_equals = true, default_missing_value = "now", help_heading = OURS)]
    clean: Option<CleanArg>,
    /// How long --clean=drain waits at most
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse, help_heading = OURS)]
    drain_timeout: Duration,
    /// Compare the live rules with these options: exit code 0 equal, 3 different, 4 absent
    #[arg(long, help_heading = OURS)]
    check: bool,
    /// Prove the redirection after applying, unless the proxy holds its port already [default: true]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, help_heading = OURS)]
    verify: Option<bool>,
    /// Whether traffic that is only forwarded through the namespace counts as inbound (all) or not (local)
    #[arg(long, value_enum, value_name = "local|all", default_value = "local", help_heading = OURS)]
    inbound_scope: ScopeArg,
    /// How inbound connections get to the proxy: redirect translates them; tproxy leaves them as they are, so that the
    /// application sees its clients' addresses. The proxy then needs TULLE_PROXY_INBOUND_MODE=tproxy and NET_RAW
    #[arg(long, value_enum, value_name = "redirect|tproxy", default_value = "redirect", help_heading = OURS, overrides_with = "inbound_mode")]
    inbound_mode: InboundModeArg,
    /// What happens to inbound IPv6 connections with --ipv6=false, where the namespace has IPv6: drop, or allow, which
    /// lets them bypass the proxy and its policies
    #[arg(long, value_enum, value_name = "drop|allow", default_value = "drop", help_heading = OURS, overrides_with = "unredirected_ipv6")]
    unredirected_ipv6: UnredirectedArg,
    /// Drop TCP packets that belong to no known connection, instead of letting them provoke resets
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, help_heading = OURS)]
    drop_invalid: Option<bool>,
    /// Priority of the NAT chains; -101 goes before other redirects. Only with nftables
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_PRIORITY, allow_negative_numbers = true, help_heading = OURS)]
    priority: i32,
    /// Print one JSON object about the run on standard output
    #[arg(long, value_enum, value_name = "json", help_heading = OURS)]
    report: Option<ReportArg>,
    /// How long to wait for locks and for other writers of rules
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_WAIT_SECS, help_heading = OURS)]
    wait_secs: u64,
    /// Leave bad port entries out with a warning instead of refusing them, as Linkerd's init does
    #[arg(long, help_heading = OURS)]
    lenient: bool,
}

#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// Where the proxy would take connections of its application
    #[arg(
        long,
        value_name = "ADDR",
        default_value = "0.0.0.0:4140",
        overrides_with = "listen_addr"
    )]
    listen_addr: SocketAddr,
    /// Whom to dial: routable, and nobody
    #[arg(
        long,
        value_name = "ADDR",
        default_value = "192.0.2.2:1404",
        overrides_with = "connect_addr"
    )]
    connect_addr: SocketAddr,
    /// How long to try
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse, overrides_with = "timeout")]
    timeout: Duration,
    /// Form of log lines
    #[arg(
        long,
        env = "LINKERD_NETWORK_VALIDATOR_LOG_FORMAT",
        value_name = "plain|json",
        default_value = "plain",
        overrides_with = "log_format"
    )]
    log_format: String,
    /// Least important log lines to show
    #[arg(
        long,
        env = "LINKERD_NETWORK_VALIDATOR_LOG_LEVEL",
        value_name = "LEVEL",
        default_value = "info",
        overrides_with = "log_level"
    )]
    log_level: String,
}

/// The validator under Linkerd's name for it.
#[derive(Debug, Parser)]
#[command(
    name = "linkerd2-network-validator",
    version,
    about = "Proves that traffic of this namespace is redirected"
)]
pub struct Validator {
    #[command(flatten)]
    pub args: ValidateArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum BackendArg {
    Auto,
    #[value(alias = "native")]
    Nft,
    IptablesNft,
    IptablesLegacy,
    Iptables,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CleanArg {
    Now,
    Drain,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ScopeArg {
    Local,
    All,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum InboundModeArg {
    Redirect,
    Tproxy,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum UnredirectedArg {
    Drop,
    Allow,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ReportArg {
    Json,
}

impl RedirectArgs {
    /// Checks the flags and makes them the work to do.
    ///
    /// # Errors
    /// The first flag whose value makes no sense, with what would.
    pub fn job(&self) -> Result<Job, OptionError> {
        let on = |flag: Option<bool>| flag == Some(true);
        let mode = match self.clean {
            Some(CleanArg::Now) => Mode::Clean(CleanMode::Now),
            Some(CleanArg::Drain) => Mode::Clean(CleanMode::Drain(self.drain_timeout)),
            None if self.check => Mode::Check(self.options()?),
            None if on(self.simulate) => Mode::Simulate(self.options()?),
            None if self.verify.unwrap_or(true) => Mode::ApplyAndVerify(self.options()?),
            None => Mode::Apply(self.options()?),
        };
        Ok(Job {
            mode,
            backends: self.backends()?,
            ipv6: match self.ipv6 {
                None => Ipv6::IfPresent,
                Some(true) => Ipv6::Required,
                Some(false) => Ipv6::Off,
            },
            netns: self.netns.clone().filter(|path| !path.as_os_str().is_empty()),
            close_wait_secs: (self.timeout_close_wait_secs > 0).then_some(self.timeout_close_wait_secs),
            wait: Duration::from_secs(self.wait_secs),
        })
    }

    pub fn json_report(&self) -> bool {
        self.report.is_some()
    }

    pub fn log(&self) -> (Format, &'static str) {
        (log_format(&self.log_format), log_filter(&self.log_level))
    }

    fn options(&self) -> Result<Options, OptionError> {
        let bad = if self.lenient { BadEntry::Skip } else { BadEntry::Refuse };
        let listed = options::ports("--ports-to-redirect", &self.ports_to_redirect, bad)?;
        let families = match (self.ipv6, self.unredirected_ipv6) {
            (Some(false), UnredirectedArg::Drop) => Families::V4DropV6,
            (Some(false), UnredirectedArg::Allow) => Families::V4,
            _ => Families::Both,
        };
        let inbound_skip_ports = match self.inbound_ports_to_ignore.as_slice() {
            [] => options::default_inbound_skip_ports(),
            lists => options::ports("--inbound-ports-to-ignore", lists, bad)?,
        };
        let (inbound_mode, scope) = self.inbound()?;
        Ok(Options {
            inbound_port: options::proxy_port("--incoming-proxy-port", self.incoming_proxy_port)?,
            outbound_port: options::proxy_port("--outgoing-proxy-port", self.outgoing_proxy_port)?,
            proxy_uid: options::owner("--proxy-uid", self.proxy_uid)?,
            proxy_gid: options::owner("--proxy-gid", self.proxy_gid)?,
            inbound: if listed.is_empty() {
                Inbound::All
            } else {
                Inbound::Listed(listed)
            },
            inbound_skip_ports,
            inbound_skip_nets: options::networks("--subnets-to-ignore", &self.subnets_to_ignore)?,
            outbound_skip_ports: options::ports("--outbound-ports-to-ignore", &self.outbound_ports_to_ignore, bad)?,
            outbound_skip_nets: options::networks("--outbound-subnets-to-ignore", &self.outbound_subnets_to_ignore)?,
            inbound_mode,
            scope,
            invalid: if self.drop_invalid == Some(true) {
                Invalid::Drop
            } else {
                Invalid::Pass
            },
            priority: self.priority,
            families,
        })
    }

    fn inbound(&self) -> Result<(InboundMode, Scope), OptionError> {
        match (self.inbound_mode, self.inbound_scope) {
            (InboundModeArg::Tproxy, ScopeArg::All) => Err(OptionError {
                flag: "--inbound-scope",
                value: "all".to_owned(),
                reason: "does not go with --inbound-mode tproxy: who answers forwarded traffic is not here".to_owned(),
            }),
            (InboundModeArg::Tproxy, ScopeArg::Local) => Ok((InboundMode::Tproxy, Scope::Local)),
            (InboundModeArg::Redirect, ScopeArg::Local) => Ok((InboundMode::Redirect, Scope::Local)),
            (InboundModeArg::Redirect, ScopeArg::All) => Ok((InboundMode::Redirect, Scope::All)),
        }
    }

    /// Who may hold the rules, the best first.
    fn backends(&self) -> Result<Vec<Backend>, OptionError> {
        let flavour = match (self.backend, self.flavour()?) {
            (Some(BackendArg::Nft), _) => return self.only(Backend::Native),
            (Some(BackendArg::IptablesNft), _) => return self.only(Backend::Iptables(Flavour::Nft)),
            (Some(BackendArg::IptablesLegacy), _) => return self.only(Backend::Iptables(Flavour::Legacy)),
            (Some(BackendArg::Iptables), _) => return self.only(Backend::Iptables(Flavour::Plain)),
            (Some(BackendArg::Auto), _) => None,
            (None, flavour) => flavour,
        };
        let all = [Flavour::Nft, Flavour::Plain, Flavour::Legacy];
        let others = all
            .into_iter()
            .filter(|other| Some(*other) != flavour)
            .map(Backend::Iptables);
        let mut backends: Vec<Backend> = flavour.into_iter().map(Backend::Iptables).chain(others).collect();
        match flavour {
            Some(_) => backends.push(Backend::Native),
            None => backends.insert(0, Backend::Native),
        }
        if self.priority != DEFAULT_PRIORITY {
            backends.retain(|backend| *backend == Backend::Native); // iptables cannot choose
        }
        Ok(backends)
    }

    fn only(&self, backend: Backend) -> Result<Vec<Backend>, OptionError> {
        if backend != Backend::Native && self.priority != DEFAULT_PRIORITY {
            return Err(OptionError {
                flag: "--priority",
                value: self.priority.to_string(),
                reason: format!("needs --backend nft: iptables' chains are always at {DEFAULT_PRIORITY}"),
            });
        }
        Ok(vec![backend])
    }

    /// What the flags of Linkerd's init ask for; the mode wins over the name of a program.
    fn flavour(&self) -> Result<Option<Flavour>, OptionError> {
        let mode = self.iptables_mode.as_deref().unwrap_or_default();
        let program = self.firewall_bin_path.as_deref().unwrap_or_default();
        let refused = |flag, value: &str, expected: &str| {
            Err(OptionError {
                flag,
                value: value.to_owned(),
                reason: format!("is not known; expected {expected}"),
            })
        };
        match (mode, program) {
            ("legacy", _) | ("", "iptables-legacy") => Ok(Some(Flavour::Legacy)),
            ("nft", _) | ("", "iptables-nft") => Ok(Some(Flavour::Nft)),
            ("plain", _) | ("", "iptables") => Ok(Some(Flavour::Plain)),
            ("", "") => Ok(None),
            ("", program) => refused(
                "--firewall-bin-path",
                program,
                "iptables-legacy, iptables-nft or iptables",
            ),
            (mode, _) => refused("--iptables-mode", mode, "legacy, nft or plain"),
        }
    }
}

impl ValidateArgs {
    pub fn trial(&self) -> Trial {
        Trial {
            listen: self.listen_addr,
            connect: self.connect_addr,
            timeout: self.timeout,
        }
    }

    pub fn log(&self) -> (Format, &'static str) {
        (log_format(&self.log_format), log_filter(&self.log_level))
    }
}

/// The names of logrus, because that is what Linkerd's init takes.
const LOG_LEVELS: [&str; 8] = ["trace", "debug", "info", "warn", "warning", "error", "fatal", "panic"];

/// Anything but json is plain, as with Linkerd's init.
fn log_format(format: &str) -> Format {
    if format == "json" { Format::Json } else { Format::Plain }
}

/// Charts pass Linkerd's level names, also none; an unknown one must not keep a pod from starting.
fn log_filter(level: &str) -> &'static str {
    match level.to_ascii_lowercase().as_str() {
        "trace" => "trace",
        "debug" => "debug",
        "warn" | "warning" => "warn",
        "error" | "fatal" | "panic" => "error",
        _ => "info",
    }
}

/// The truth values that flags of Go programs take.
fn go_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("expected true or false".to_owned()),
    }
}

const OURS: &str = "Options that Linkerd's init does not have";

const EXAMPLES: &str = "\
Examples:
  tulle-init -p 4143 -o 4140 -u 2102
      Redirect all but the proxy's own traffic, as in a pod.
  tulle-init -p 4143 -o 4140 -u 2102 --outbound-ports-to-ignore 25,3306 --subnets-to-ignore 10.9.0.0/16,fd09::/16
      The same, but leave mail and MySQL direct, and all that comes from a monitoring network.
  tulle-init -p 4143 -o 4140 -u 2102 --check; echo $?
      0: these rules are live; 3: others are; 4: none are.
  tulle-init -p 4143 -o 4140 -u 2102 --simulate
      Print the rules as text that nft reads.
  tulle-init --netns /run/netns/pod --clean=drain
      Take the rules away without breaking open connections.
  tulle-init -p 4143 -o 4140 -u 2102 --inbound-mode tproxy
      Redirect, and let the application see its clients' addresses.
  tulle-init validate --timeout 5s
      Prove that traffic is redirected.

Exit codes: 0 done, or nothing to do; 1 refused or failed, and the former rules stay; 3, 4 see --check;
95 traffic is not redirected although the rules are in place.

Needs the capability NET_ADMIN; iptables' legacy programs need NET_RAW too, and --netns needs SYS_ADMIN.";

#[cfg(test)]
mod tests {
    use super::*;

    fn job(flags: &str) -> Job {
        let words = std::iter::once("tulle-init").chain(flags.split(' '));
        Cli::try_parse_from(words).unwrap().redirect.job().unwrap()
    }

    fn options(flags: &str) -> Options {
        match job(flags).mode {
            Mode::ApplyAndVerify(options) => options,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_linkerds_chart_passes_is_understood() {
        let job = job(
            "--firewall-bin-path iptables-nft --firewall-save-bin-path iptables-nft-save --ipv6=false \
             --incoming-proxy-port 4143 --outgoing-proxy-port 4140 --proxy-uid 2102 \
             --inbound-ports-to-ignore 4190,4191,4567,4568 --outbound-ports-to-ignore 4567,4568 \
             --timeout-close-wait-secs 5 --log-format json --log-level info --subnets-to-ignore 10.0.0.0/8 -w",
        );
        assert_eq!(job.ipv6, Ipv6::Off);
        assert_eq!(job.close_wait_secs, Some(5));
        assert_eq!(job.backends.first(), Some(&Backend::Iptables(Flavour::Nft)));
        assert_eq!(job.backends.last(), Some(&Backend::Native));
        let Mode::ApplyAndVerify(options) = job.mode else {
            panic!("{:?}", job.mode)
        };
        assert_eq!(options.proxy_uid, Some(2102));
        assert_eq!(options.inbound_skip_ports.to_string(), "4190-4191,4567-4568");
        assert_eq!(options.families, Families::V4DropV6);
    }

    #[test]
    fn a_level_that_is_none_is_refused_with_those_there_are() {
        let refused = Cli::try_parse_from(["tulle-init", "-p4143", "-o4140", "--log-level", "loud"]).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("loud") && text.contains("warning"), "{text}");
        assert!(Cli::try_parse_from(["tulle-init", "-p4143", "-o4140", "--log-level", "DEBUG"]).is_ok());
    }

    #[test]
    fn forwarded_traffic_does_not_keep_its_address() {
        let flags = "-p 4143 -o 4140 --inbound-mode tproxy";
        assert_eq!(options(flags).inbound_mode, InboundMode::Tproxy);
        let words = format!("tulle-init {flags} --inbound-scope all");
        let refused = Cli::try_parse_from(words.split(' '))
            .unwrap()
            .redirect
            .job()
            .unwrap_err();
        assert!(
            refused.to_string().starts_with("--inbound-scope \"all\" does not go"),
            "{refused}"
        );
    }

    #[test]
    fn short_flags_repeated_flags_and_absent_owners_are_taken_as_linkerds_init_takes_them() {
        let options = options(
            "-p 1 -p 4143 -o4140 -u -1 -g=-1 -r 80,90-91 -r 100 --outbound-ports-to-ignore 1 --outbound-ports-to-ignore 2",
        );
        assert_eq!(options.inbound_port.get(), 4143); // the last one counts
        assert_eq!((options.proxy_uid, options.proxy_gid), (None, None));
        assert_eq!(options.inbound, Inbound::Listed("80,90-91,100".parse().unwrap()));
        assert_eq!(options.outbound_skip_ports.to_string(), "1-2"); // lists add up
    }

    #[test]
    fn backends_are_tried_in_the_right_order() {
        let backends = |flags: &str| job(&format!("-p 4143 -o 4140 {flags}")).backends;
        let [nft, plain, legacy] = [Flavour::Nft, Flavour::Plain, Flavour::Legacy].map(Backend::Iptables);
        assert_eq!(backends("--ipv6"), [Backend::Native, nft, plain, legacy]);
        assert_eq!(
            backends("--iptables-mode legacy"),
            [legacy, nft, plain, Backend::Native]
        );
        assert_eq!(
            backends("--iptables-mode plain --firewall-bin-path iptables-nft")[0],
            plain
        );
        assert_eq!(backends("--backend native --iptables-mode nft"), [Backend::Native]);
        assert_eq!(backends("--backend iptables-legacy"), [legacy]);
        assert_eq!(backends("--backend auto --iptables-mode nft")[0], Backend::Native);
        assert_eq!(backends("--priority -101"), [Backend::Native]);
    }

    #[test]
    fn modes_exclude_each_other_and_cleaning_needs_no_ports() {
        assert!(matches!(job("--clean").mode, Mode::Clean(CleanMode::Now)));
        let draining = job("--clean=drain --drain-timeout 5s").mode;
        assert!(matches!(draining, Mode::Clean(CleanMode::Drain(limit)) if limit == Duration::from_secs(5)));
        assert!(matches!(job("-p 1 -o 2 --verify=false").mode, Mode::Apply(_)));
        for flags in [
            "--check --clean",
            "--simulate --check",
            "--inbound-mode transparent",
            "--ipv6=maybe",
            "extra",
        ] {
            let words = std::iter::once("tulle-init").chain(flags.split(' '));
            assert!(Cli::try_parse_from(words).is_err(), "{flags}");
        }
    }
}
