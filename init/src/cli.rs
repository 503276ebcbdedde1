//! Command line: the flags of Linkerd's init and validator, and those of tulle.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use tulle_core::duration;
use tulle_core::logging::Format;
use tulle_core::names::variable;

use crate::iptables::{DEFAULT_WAIT_SECS, Flavour};
use crate::options::{
    self, DEFAULT_PRIORITY, Families, InboundMode, InboundPorts, InvalidPackets, OnInvalidEntry, OptionError, Options,
    Scope,
};
use crate::redirect::{Backend, CleanMode, Ipv6, Job, Mode};
use crate::validate::ValidateConfig;

/// Redirects the TCP traffic of a network namespace through the tulle proxy.
///
/// Run it once in the namespace, before the application starts. Inbound connections then arrive at the proxy's inbound
/// port, and connections of the application at its outbound port. The proxy's own connections, loopback, UDP and skipped
/// traffic are not redirected. A further run with the same flags changes nothing; with other flags it replaces the rules, and
/// no connection bypasses the proxy meanwhile.
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
    /// Check that traffic of this namespace is redirected: exit code 0 if it is, 95 if this is not proven
    Validate(ValidateArgs),
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("mode").args(["simulate", "check", "clean"]))]
pub struct RedirectArgs {
    /// Proxy port for inbound connections (required, except with --clean)
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = -1, allow_negative_numbers = true, overrides_with = "incoming_proxy_port")]
    incoming_proxy_port: i64,
    /// Proxy port for outbound connections (required, except with --clean)
    #[arg(short = 'o', long, value_name = "PORT", default_value_t = -1, allow_negative_numbers = true, overrides_with = "outgoing_proxy_port")]
    outgoing_proxy_port: i64,
    /// User of the proxy; its connections are not redirected
    #[arg(short = 'u', long, value_name = "UID", default_value_t = -1, allow_negative_numbers = true, overrides_with = "proxy_uid")]
    proxy_uid: i64,
    /// Group of the proxy; its connections are not redirected
    #[arg(short = 'g', long, value_name = "GID", default_value_t = -1, allow_negative_numbers = true, overrides_with = "proxy_gid")]
    proxy_gid: i64,
    /// Redirect only these inbound ports [default: all]
    #[arg(short = 'r', long, value_name = "PORTS")]
    ports_to_redirect: Vec<String>,
    /// Inbound ports and ranges that are not redirected; must include ports that the proxy itself serves [default:
    /// 4190,4191]
    #[arg(long, value_name = "PORTS")]
    inbound_ports_to_ignore: Vec<String>,
    /// Outbound ports and ranges that are not redirected
    #[arg(long, value_name = "PORTS")]
    outbound_ports_to_ignore: Vec<String>,
    /// Source networks, IPv4 or IPv6, whose inbound connections are not redirected
    #[arg(long, value_name = "CIDRS")]
    subnets_to_ignore: Vec<String>,
    /// Destination networks, IPv4 or IPv6, to which outbound connections are not redirected
    #[arg(long, value_name = "CIDRS")]
    outbound_subnets_to_ignore: Vec<String>,
    /// Print the rules without applying them
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, overrides_with = "simulate")]
    simulate: Option<bool>,
    /// Network namespace to work in, such as /run/netns/pod
    #[arg(long, value_name = "PATH", overrides_with = "netns")]
    netns: Option<PathBuf>,
    /// Accepted for compatibility; tulle-init always waits for locks
    #[arg(short = 'w', long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, overrides_with = "use_wait_flag")]
    use_wait_flag: Option<bool>,
    /// Connection tracking timeout for connections in CLOSE_WAIT; 0 keeps the kernel's value
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 0,
        overrides_with = "timeout_close_wait_secs"
    )]
    timeout_close_wait_secs: u32,
    /// Format of log lines
    #[arg(
        long,
        value_name = "plain|json",
        default_value = "plain",
        overrides_with = "log_format"
    )]
    log_format: String,
    /// Minimum level of log lines
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
    /// Try the iptables programs of this flavour first, and nftables over netlink last; nft means iptables-nft here. It has no
    /// effect if --backend is set, or if --priority is not the default
    #[arg(long, value_name = "legacy|nft|plain", overrides_with = "iptables_mode")]
    iptables_mode: Option<String>,
    /// As --iptables-mode, by the name of the program: iptables-legacy, iptables-nft or iptables
    #[arg(long, value_name = "NAME", overrides_with = "firewall_bin_path")]
    firewall_bin_path: Option<String>,
    /// Accepted for compatibility; --iptables-mode and --firewall-bin-path select this program too
    #[arg(long, value_name = "NAME", overrides_with = "firewall_save_bin_path")]
    firewall_save_bin_path: Option<String>,
    /// Redirect IPv6 as well [default: true if the namespace has IPv6]; see --unredirected-ipv6
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, overrides_with = "ipv6")]
    ipv6: Option<bool>,

    /// Firewall backend: nft is nftables over netlink, without a program; auto uses it if available, otherwise the iptables
    /// programs
    #[arg(long, value_enum, value_name = "BACKEND", help_heading = TULLE_OPTIONS_HEADING)]
    backend: Option<BackendArg>,
    /// Remove the rules of tulle and of Linkerd; drain first lets new connections bypass the proxy, and waits until the open ones
    /// end
    #[arg(long, value_enum, value_name = "now|drain", num_args = 0..=1, require_equals = true, default_missing_value = "now", help_heading = TULLE_OPTIONS_HEADING)]
    clean: Option<CleanArg>,
    /// Maximum time that --clean=drain waits
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse, help_heading = TULLE_OPTIONS_HEADING)]
    drain_timeout: Duration,
    /// Compare the live rules with these options: exit code 0 equal, 3 different, 4 absent
    #[arg(long, help_heading = TULLE_OPTIONS_HEADING)]
    check: bool,
    /// Check the redirection after applying the rules; skipped if the proxy already listens on its port [default: true]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, help_heading = TULLE_OPTIONS_HEADING)]
    verify: Option<bool>,
    /// Whether forwarded traffic counts as inbound: all redirects it, local does not
    #[arg(long, value_enum, value_name = "local|all", default_value = "local", help_heading = TULLE_OPTIONS_HEADING)]
    inbound_scope: ScopeArg,
    /// How inbound connections reach the proxy: redirect translates the destination; tproxy does not, so that the
    /// application sees its clients' addresses. The proxy then needs TULLE_PROXY_INBOUND_MODE=tproxy and NET_RAW
    #[arg(long, value_enum, value_name = "redirect|tproxy", default_value = "redirect", help_heading = TULLE_OPTIONS_HEADING, overrides_with = "inbound_mode")]
    inbound_mode: InboundModeArg,
    /// If IPv6 is not redirected: drop inbound IPv6 connections, or allow them, past the proxy and its policies
    #[arg(long, value_enum, value_name = "drop|allow", default_value = "drop", help_heading = TULLE_OPTIONS_HEADING, overrides_with = "unredirected_ipv6")]
    unredirected_ipv6: UnredirectedArg,
    /// Drop TCP packets in an invalid connection tracking state, such as those outside the window; the kernel would answer them
    /// with resets
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, help_heading = TULLE_OPTIONS_HEADING)]
    drop_invalid: Option<bool>,
    /// Priority of the NAT chains; -101 is evaluated before other redirects. Only with nftables
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_PRIORITY, allow_negative_numbers = true, help_heading = TULLE_OPTIONS_HEADING)]
    priority: i32,
    /// Print one JSON object about the run to standard output
    #[arg(long, value_enum, value_name = "json", help_heading = TULLE_OPTIONS_HEADING)]
    report: Option<ReportArg>,
    /// Time to wait for locks and for other processes that change rules
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_WAIT_SECS, help_heading = TULLE_OPTIONS_HEADING)]
    wait_secs: u64,
    /// Skip invalid port entries with a warning instead of failing, as Linkerd's init does
    #[arg(long, help_heading = TULLE_OPTIONS_HEADING)]
    lenient: bool,
}

#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// Address to listen on in place of the proxy's outbound port
    #[arg(
        long,
        value_name = "ADDR",
        default_value = "0.0.0.0:4140",
        overrides_with = "listen_addr"
    )]
    listen_addr: SocketAddr,
    /// Address to connect to; must be routable and unused
    #[arg(
        long,
        value_name = "ADDR",
        default_value = "192.0.2.2:1404",
        overrides_with = "connect_addr"
    )]
    connect_addr: SocketAddr,
    /// Time limit of the check
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse, overrides_with = "timeout")]
    timeout: Duration,
    /// Format of log lines
    #[arg(
        long,
        env = variable::VALIDATOR_LOG_FORMAT,
        value_name = "plain|json",
        default_value = "plain",
        overrides_with = "log_format"
    )]
    log_format: String,
    /// Minimum level of log lines
    #[arg(
        long,
        env = variable::VALIDATOR_LOG_LEVEL,
        value_name = "LEVEL",
        default_value = "info",
        overrides_with = "log_level"
    )]
    log_level: String,
}

/// The validator under the name of Linkerd's program.
#[derive(Debug, Parser)]
#[command(
    name = "linkerd2-network-validator",
    version,
    about = "Checks that traffic of this namespace is redirected"
)]
pub struct Validator {
    #[command(flatten)]
    pub args: ValidateArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum BackendArg {
    Auto,
    #[value(aliases = ["nftables", "native"])]
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
    /// Validates the flags and converts them to a job.
    ///
    /// # Errors
    /// If a flag has an invalid value; the error names the flag and the valid values.
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
                None => Ipv6::IfPresent {
                    families_without_ipv6: self.families_if_ipv6_is_not_redirected(),
                },
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

    pub fn log_format_and_filter(&self) -> (Format, &'static str) {
        (log_format(&self.log_format), log_filter(&self.log_level))
    }

    fn options(&self) -> Result<Options, OptionError> {
        let on_invalid = if self.lenient {
            OnInvalidEntry::Skip
        } else {
            OnInvalidEntry::Refuse
        };
        let listed = options::ports("--ports-to-redirect", &self.ports_to_redirect, on_invalid)?;
        let families = match self.ipv6 {
            Some(false) => self.families_if_ipv6_is_not_redirected(),
            Some(true) | None => Families::Both,
        };
        let inbound_skip_ports = match self.inbound_ports_to_ignore.as_slice() {
            [] => options::default_inbound_skip_ports(),
            lists => options::ports("--inbound-ports-to-ignore", lists, on_invalid)?,
        };
        let (inbound_mode, scope) = self.inbound_mode_and_scope()?;
        Ok(Options {
            inbound_port: options::proxy_port("--incoming-proxy-port", self.incoming_proxy_port)?,
            outbound_port: options::proxy_port("--outgoing-proxy-port", self.outgoing_proxy_port)?,
            proxy_uid: options::user_or_group_id("--proxy-uid", self.proxy_uid)?,
            proxy_gid: options::user_or_group_id("--proxy-gid", self.proxy_gid)?,
            inbound_ports: if listed.is_empty() {
                InboundPorts::All
            } else {
                InboundPorts::Listed(listed)
            },
            inbound_skip_ports,
            inbound_skip_nets: options::networks("--subnets-to-ignore", &self.subnets_to_ignore)?,
            outbound_skip_ports: options::ports(
                "--outbound-ports-to-ignore",
                &self.outbound_ports_to_ignore,
                on_invalid,
            )?,
            outbound_skip_nets: options::networks("--outbound-subnets-to-ignore", &self.outbound_subnets_to_ignore)?,
            inbound_mode,
            scope,
            invalid: if self.drop_invalid == Some(true) {
                InvalidPackets::Drop
            } else {
                InvalidPackets::Pass
            },
            priority: self.priority,
            families,
        })
    }

    /// The families if IPv6 is not redirected.
    fn families_if_ipv6_is_not_redirected(&self) -> Families {
        match self.unredirected_ipv6 {
            UnredirectedArg::Drop => Families::V4DropV6,
            UnredirectedArg::Allow => Families::V4,
        }
    }

    fn inbound_mode_and_scope(&self) -> Result<(InboundMode, Scope), OptionError> {
        match (self.inbound_mode, self.inbound_scope) {
            (InboundModeArg::Tproxy, ScopeArg::All) => Err(OptionError::Invalid {
                flag: "--inbound-scope",
                value: "all".to_owned(),
                reason: "cannot be combined with --inbound-mode tproxy: replies to forwarded connections come from \
                         another host and would not pass the proxy"
                    .to_owned(),
            }),
            (InboundModeArg::Tproxy, ScopeArg::Local) => Ok((InboundMode::Tproxy, Scope::Local)),
            (InboundModeArg::Redirect, ScopeArg::Local) => Ok((InboundMode::Redirect, Scope::Local)),
            (InboundModeArg::Redirect, ScopeArg::All) => Ok((InboundMode::Redirect, Scope::All)),
        }
    }

    /// The permitted backends, in order of preference.
    fn backends(&self) -> Result<Vec<Backend>, OptionError> {
        let flavour = match (self.backend, self.flavour()?) {
            (Some(BackendArg::Nft), _) => return self.single_backend(Backend::Nftables),
            (Some(BackendArg::IptablesNft), _) => return self.single_backend(Backend::Iptables(Flavour::Nft)),
            (Some(BackendArg::IptablesLegacy), _) => return self.single_backend(Backend::Iptables(Flavour::Legacy)),
            (Some(BackendArg::Iptables), _) => return self.single_backend(Backend::Iptables(Flavour::Plain)),
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
            Some(_) => backends.push(Backend::Nftables),
            None => backends.insert(0, Backend::Nftables),
        }
        if self.priority != DEFAULT_PRIORITY {
            backends.retain(|backend| *backend == Backend::Nftables); // iptables has fixed priorities
        }
        Ok(backends)
    }

    /// A backend that a flag selects; fails if it does not support the priority.
    fn single_backend(&self, backend: Backend) -> Result<Vec<Backend>, OptionError> {
        if backend != Backend::Nftables && self.priority != DEFAULT_PRIORITY {
            return Err(OptionError::Invalid {
                flag: "--priority",
                value: self.priority.to_string(),
                reason: format!(
                    "needs --backend nft, because the priority of iptables chains is always {DEFAULT_PRIORITY}"
                ),
            });
        }
        Ok(vec![backend])
    }

    /// The iptables flavour that Linkerd's flags select; `--iptables-mode` takes precedence over `--firewall-bin-path`.
    fn flavour(&self) -> Result<Option<Flavour>, OptionError> {
        let mode = self.iptables_mode.as_deref().unwrap_or_default();
        let program = self.firewall_bin_path.as_deref().unwrap_or_default();
        let refused = |flag, value: &str, expected: &str| {
            Err(OptionError::Invalid {
                flag,
                value: value.to_owned(),
                reason: format!("is unknown; expected {expected}"),
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
    pub fn config(&self) -> ValidateConfig {
        ValidateConfig {
            listen: self.listen_addr,
            connect: self.connect_addr,
            timeout: self.timeout,
        }
    }

    pub fn log_format_and_filter(&self) -> (Format, &'static str) {
        (log_format(&self.log_format), log_filter(&self.log_level))
    }
}

/// Level names of logrus, because Linkerd's init uses them.
const LOG_LEVELS: [&str; 8] = ["trace", "debug", "info", "warn", "warning", "error", "fatal", "panic"];

/// As in Linkerd's init, every value except `json` means plain.
fn log_format(format: &str) -> Format {
    if format == "json" { Format::Json } else { Format::Plain }
}

/// `validate` accepts any level, so that it cannot prevent a pod from starting: an unknown or empty one means info. The
/// redirect command accepts only [`LOG_LEVELS`].
fn log_filter(level: &str) -> &'static str {
    match level.to_ascii_lowercase().as_str() {
        "trace" => "trace",
        "debug" => "debug",
        "warn" | "warning" => "warn",
        "error" | "fatal" | "panic" => "error",
        _ => "info",
    }
}

/// Parses booleans in the forms that flags of Go programs accept.
fn go_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("expected true or false".to_owned()),
    }
}

const TULLE_OPTIONS_HEADING: &str = "Options that Linkerd's init does not have";

const EXAMPLES: &str = "\
Examples:
  tulle-init -p 4143 -o 4140 -u 2102
      Redirect all traffic except the proxy's own, as in a pod.
  tulle-init -p 4143 -o 4140 -u 2102 --outbound-ports-to-ignore 25,3306 --subnets-to-ignore 10.9.0.0/16,fd09::/16
      The same, except SMTP, MySQL and connections from a monitoring network.
  tulle-init -p 4143 -o 4140 -u 2102 --check; echo $?
      0: these rules are live; 3: other rules are live; 4: no rules.
  tulle-init -p 4143 -o 4140 -u 2102 --simulate
      Print the rules as a script for nft.
  tulle-init --netns /run/netns/pod --clean=drain
      Let new connections bypass the proxy, wait for the open ones, then remove the rules.
  tulle-init -p 4143 -o 4140 -u 2102 --inbound-mode tproxy
      Redirect, and preserve client addresses for the application.
  tulle-init validate --timeout 5s
      Check that traffic is redirected.

Exit codes: 0 success, or nothing to do; 1 invalid flags or failure; 3, 4 see --check;
95 traffic is not redirected although the rules are in place.
After a failure the previous rules stay, unless the error says that they could not be put back.
A failed --clean may have removed a part of them, and with drain, new connections may bypass the proxy.

Needs the capability NET_ADMIN; the iptables-legacy programs also need NET_RAW, and --netns needs SYS_ADMIN.";

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
    fn flags_of_linkerds_chart_are_accepted() {
        let job = job(
            "--firewall-bin-path iptables-nft --firewall-save-bin-path iptables-nft-save --ipv6=false \
             --incoming-proxy-port 4143 --outgoing-proxy-port 4140 --proxy-uid 2102 \
             --inbound-ports-to-ignore 4190,4191,4567,4568 --outbound-ports-to-ignore 4567,4568 \
             --timeout-close-wait-secs 5 --log-format json --log-level info --subnets-to-ignore 10.0.0.0/8 -w",
        );
        assert_eq!(job.ipv6, Ipv6::Off);
        assert_eq!(job.close_wait_secs, Some(5));
        assert_eq!(job.backends.first(), Some(&Backend::Iptables(Flavour::Nft)));
        assert_eq!(job.backends.last(), Some(&Backend::Nftables));
        let Mode::ApplyAndVerify(options) = job.mode else {
            panic!("{:?}", job.mode)
        };
        assert_eq!(options.proxy_uid, Some(2102));
        assert_eq!(options.inbound_skip_ports.to_string(), "4190-4191,4567-4568");
        assert_eq!(options.families, Families::V4DropV6);
    }

    #[test]
    fn an_unknown_log_level_is_refused_with_the_known_ones() {
        let refused = Cli::try_parse_from(["tulle-init", "-p4143", "-o4140", "--log-level", "loud"]).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("loud") && text.contains("warning"), "{text}");
        assert!(Cli::try_parse_from(["tulle-init", "-p4143", "-o4140", "--log-level", "DEBUG"]).is_ok());
    }

    #[test]
    fn tproxy_excludes_forwarded_traffic() {
        let flags = "-p 4143 -o 4140 --inbound-mode tproxy";
        assert_eq!(options(flags).inbound_mode, InboundMode::Tproxy);
        let words = format!("tulle-init {flags} --inbound-scope all");
        let refused = Cli::try_parse_from(words.split(' '))
            .unwrap()
            .redirect
            .job()
            .unwrap_err();
        assert!(
            refused
                .to_string()
                .starts_with("--inbound-scope \"all\" cannot be combined"),
            "{refused}"
        );
    }

    #[test]
    fn short_repeated_and_absent_flags_mean_the_same_as_in_linkerds_init() {
        let options = options(
            "-p 1 -p 4143 -o4140 -u -1 -g=-1 -r 80,90-91 -r 100 --outbound-ports-to-ignore 1 --outbound-ports-to-ignore 2",
        );
        assert_eq!(options.inbound_port.get(), 4143); // the last value takes precedence
        assert_eq!((options.proxy_uid, options.proxy_gid), (None, None));
        assert_eq!(
            options.inbound_ports,
            InboundPorts::Listed("80,90-91,100".parse().unwrap())
        );
        assert_eq!(options.outbound_skip_ports.to_string(), "1-2"); // lists are merged
    }

    #[test]
    fn backends_are_tried_in_order_of_preference() {
        let backends = |flags: &str| job(&format!("-p 4143 -o 4140 {flags}")).backends;
        let [nft, plain, legacy] = [Flavour::Nft, Flavour::Plain, Flavour::Legacy].map(Backend::Iptables);
        assert_eq!(backends("--ipv6"), [Backend::Nftables, nft, plain, legacy]);
        assert_eq!(
            backends("--iptables-mode legacy"),
            [legacy, nft, plain, Backend::Nftables]
        );
        assert_eq!(
            backends("--iptables-mode plain --firewall-bin-path iptables-nft")[0],
            plain
        );
        for name in ["nft", "nftables", "native"] {
            let flags = format!("--backend {name} --iptables-mode nft");
            assert_eq!(backends(&flags), [Backend::Nftables], "{name}");
        }
        assert_eq!(backends("--backend iptables-legacy"), [legacy]);
        assert_eq!(backends("--backend auto --iptables-mode nft")[0], Backend::Nftables);
        assert_eq!(backends("--priority -101"), [Backend::Nftables]);
    }

    #[test]
    fn modes_exclude_each_other_and_clean_needs_no_ports() {
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
