//! The only reader of environment variables: converts `LINKERD2_PROXY_*`, `TULLE_*` and a few others to [`Config`], or reports all
//! errors at once.
//!
//! Unknown variables are ignored, and an empty variable counts as not set.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tulle_core::addr::Addr;
use tulle_core::backoff::Backoff;
use tulle_core::identity::Identity;
use tulle_core::names::{self, port};
use tulle_core::ports::PortSet;

use crate::admin::{self, ShutdownEndpoint};
use crate::api;
use crate::api::channel::{ControlAddr, Security};
use crate::api::destination::{ProfileScope, Suffixes};
use crate::api::watch::StreamLimits;
use crate::config::{
    Accept, Config, Connect, Control, DirectionSettings, Http1Pool, Http2Server, Http2Windows, HttpServer, Inbound,
    InboundMode, IngressMode, KeepAlive, LoadBalancing, Log, MissingPolicyAction, Outbound, ResendPolicy, Visibility,
    Workers,
};
use crate::env::values::ParseError;
use crate::identity;
use crate::policy::server::DefaultPolicy;
use crate::tap;
use crate::trace;

pub mod reference;
mod values;

#[cfg(test)]
mod tests;

/// An error in a variable that prevents the process from starting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}{}: {reason}", .value.as_ref().map(|value| format!("={value:?}")).unwrap_or_default())]
pub struct EnvError {
    /// With its prefix.
    pub name: String,
    /// The value, with a replacement character for each sequence of bytes that is not UTF-8; `None` if the variable is missing.
    pub value: Option<String>,
    /// The problem, and the accepted values.
    pub reason: String,
}

/// Reads the configuration through `lookup`, which returns the value of a variable.
///
/// # Errors
/// All errors, in the order in which the variables are read.
pub fn load<V: Into<OsString>>(lookup: impl Fn(&str) -> Option<V>) -> Result<Config, Vec<EnvError>> {
    let lookup = |name: &str| lookup(name).map(Into::into);
    let mut env = Env {
        lookup: &lookup,
        errors: Vec::new(),
    };
    let config = config(&mut env);
    match config {
        Some(config) if env.errors.is_empty() => Ok(config),
        // `config` is `None` only if an error was recorded.
        _ => Err(env.errors),
    }
}

/// The variables that may be shown publicly: those of the proxy, except the probes, whose headers may contain secrets. Variables of
/// the workload may contain secrets too. Bytes of a value that are not UTF-8 are replaced.
pub fn public_variables(variables: impl Iterator<Item = (OsString, OsString)>) -> BTreeMap<String, String> {
    variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .filter(|(name, _)| {
            name.starts_with(LINKERD_PREFIX) || name.starts_with(TULLE_PREFIX) || name == INBOUND_UNKNOWN_POLICY
        })
        .filter(|(name, _)| name != names::probes::VARIABLE)
        .collect()
}

/// Reads all variables before it fails, so that all errors are found.
fn config(env: &mut Env<'_>) -> Option<Config> {
    let cluster_networks = env.value_or_default("POLICY_CLUSTER_NETWORKS", values::networks);
    let ingress = match env.flag("INGRESS_MODE") {
        true => IngressMode::On,
        false => IngressMode::Off,
    };
    let outbound = outbound(env, ingress);
    let inbound = inbound(env);
    // Linkerd's proxy requires the networks for `audit` too, although that policy permits every network.
    let policy = inbound.default_policy;
    let needs_networks = policy.needs_cluster_networks() || policy == DefaultPolicy::Audit;
    if needs_networks && cluster_networks.is_empty() {
        env.record_invalid(
            "INBOUND_DEFAULT_POLICY",
            "this policy needs LINKERD2_PROXY_POLICY_CLUSTER_NETWORKS",
        );
    }
    let admin = admin::Config {
        listen: env.value_or("ADMIN_LISTEN_ADDR", values::listen_addr, ([127, 0, 0, 1], 4191).into()),
        shutdown_endpoint: match env.flag("SHUTDOWN_ENDPOINT_ENABLED") {
            true => ShutdownEndpoint::Enabled,
            false => ShutdownEndpoint::Disabled,
        },
        probes: env.value_or_default(names::probes::VARIABLE, values::probes),
    };
    let tap = env
        .get("TAP_SVC_NAME", values::identities)
        .map(|clients| tap::server::Config {
            listen: env.value_or(
                "CONTROL_LISTEN_ADDR",
                values::listen_addr,
                ([0, 0, 0, 0], port::TAP).into(),
            ),
            clients,
        });
    let workers = Workers {
        min: env
            .first_value(&["CORES_MIN", "CORES"], values::at_least_one)
            .unwrap_or(1),
        max: env.get("CORES_MAX", values::at_least_one),
        max_ratio: env.get("CORES_MAX_RATIO", values::ratio),
    };
    let log = Log {
        filter: env.value_or("LOG", values::text, DEFAULT_LOG.to_owned()),
        format: env.value_or_default("LOG_FORMAT", values::log_format),
        access_log_format: env.get("ACCESS_LOG", values::access_log),
        access_log_directions: env.value_or_default(ACCESS_LOG_DIRECTIONS, values::directions),
    };
    let shutdown_grace_period = env.value_or("SHUTDOWN_GRACE_PERIOD", values::duration, Duration::from_secs(120));
    let metrics_retain_idle = env.value_or("METRICS_RETAIN_IDLE", values::duration, Duration::from_secs(600));
    let memory_limit = env.get(MEMORY_LIMIT, values::number);
    let trace = trace(env);
    let unsupported_variables = env.unsupported_variables();
    let identity = identity(env);
    let control = control(env, cluster_networks);
    Some(Config {
        outbound,
        inbound,
        admin,
        tap,
        trace,
        control: control?,
        identity: identity?,
        workers,
        log,
        shutdown_grace_period,
        metrics_retain_idle,
        memory_limit_bytes: memory_limit,
        unsupported_variables,
    })
}

fn outbound(env: &mut Env<'_>, ingress: IngressMode) -> Outbound {
    let hide_by_default = ingress == IngressMode::On;
    let hidden = env.value_or("OUTBOUND_DISABLE_INFORMATIONAL_HEADERS", values::flag, hide_by_default);
    let single = env.get("OUTBOUND_LISTEN_ADDR", values::listen_addr);
    let several = env.get("OUTBOUND_LISTEN_ADDRS", values::listen_addrs);
    let defaults = DirectionDefaults {
        connect_timeout: Duration::from_secs(1),
        backoff_max: Duration::from_secs(60),
        discovery_idle_timeout: Duration::from_secs(5),
        max_idle_name: "OUTBOUND_MAX_IDLE_CONNS_PER_ENDPOINT",
    };
    Outbound {
        listen: several.unwrap_or_else(|| vec![single.unwrap_or_else(|| ([127, 0, 0, 1], 4140).into())]),
        direction: direction(env, "OUTBOUND", &defaults),
        http_queue_capacity: env.value_or(
            "OUTBOUND_HTTP_QUEUE_CAPACITY",
            values::at_least_one,
            DEFAULT_QUEUE_CAPACITY,
        ),
        http_failfast_timeout: env.value_or(
            "OUTBOUND_HTTP_FAILFAST_TIMEOUT",
            values::duration,
            Duration::from_secs(3),
        ),
        informational_headers: if hidden { Visibility::Hidden } else { Visibility::Shown },
        hostname_labels: match env.flag("OUTBOUND_METRICS_HOSTNAME_LABELS") {
            true => Visibility::Shown,
            false => Visibility::Hidden,
        },
        ingress_mode: ingress,
        explicit_listen: env.get(EXPLICIT_LISTEN_ADDR, values::loopback_addr),
        load_balancing: env.value_or_default::<LoadBalancing>(BALANCER, values::balancing),
    }
}

fn inbound(env: &mut Env<'_>) -> Inbound {
    let defaults = DirectionDefaults {
        connect_timeout: MIN_INBOUND_CONNECT_TIMEOUT,
        backoff_max: Duration::from_secs(10),
        discovery_idle_timeout: Duration::from_secs(90),
        max_idle_name: "MAX_IDLE_CONNS_PER_ENDPOINT",
    };
    let mut direction = direction(env, "INBOUND", &defaults);
    let connect_timeout = &mut direction.connect.timeout;
    *connect_timeout = MIN_INBOUND_CONNECT_TIMEOUT.max(*connect_timeout);
    Inbound {
        listen: env.value_or("INBOUND_LISTEN_ADDR", values::listen_addr, ([0, 0, 0, 0], 4143).into()),
        mode: env.value_or_default::<InboundMode>(INBOUND_MODE, values::inbound_mode),
        direction,
        profile_timeout: env.value_or(
            "DESTINATION_PROFILE_INITIAL_TIMEOUT",
            values::duration,
            Duration::from_millis(500),
        ),
        authority_labels: match env.get("INBOUND_METRICS_AUTHORITY_LABELS", values::unsafe_flag) {
            Some(()) => Visibility::Shown,
            None => Visibility::Hidden,
        },
        missing_policy_action: env
            .value_or_default::<MissingPolicyAction>(INBOUND_UNKNOWN_POLICY, values::missing_policy_action),
        default_policy: env.value_or_default::<DefaultPolicy>("INBOUND_DEFAULT_POLICY", values::default_policy),
        watched_ports: env.value_or_default::<PortSet>("INBOUND_PORTS", values::from_str),
        opaque_ports: env.value_or_default::<PortSet>("INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION", values::from_str),
        local_ips: env.value_or_default("INBOUND_IPS", values::ips),
        gateway_suffixes: env.value_or_default::<Suffixes>("INBOUND_GATEWAY_SUFFIXES", values::suffixes),
    }
}

/// Minimum timeout for connecting to the application, also if the variable is set to a shorter one. If the application's accept
/// queue is full, the kernel drops the SYN and sends it again after one and after three seconds. An application that does not
/// listen refuses immediately.
const MIN_INBOUND_CONNECT_TIMEOUT: Duration = Duration::from_secs(4);

/// The defaults and the variable name that differ between the directions.
struct DirectionDefaults {
    connect_timeout: Duration,
    backoff_max: Duration,
    discovery_idle_timeout: Duration,
    /// The variable for the maximum number of idle HTTP/1 connections. Its inbound name has no direction.
    max_idle_name: &'static str,
}

fn direction(env: &mut Env<'_>, prefix: &str, defaults: &DirectionDefaults) -> DirectionSettings {
    let name = |rest: &str| format!("{prefix}_{rest}");
    let windows = windows(env);
    DirectionSettings {
        accept: Accept {
            keepalive: env.get(&name("ACCEPT_KEEPALIVE"), values::duration),
            user_timeout: env.get(&name("ACCEPT_USER_TIMEOUT"), values::duration),
            backlog: env.get(&name("TCP_LISTEN_BACKLOG"), values::number),
            detect_timeout: env.value_or(&name("DETECT_TIMEOUT"), values::duration, Duration::from_secs(10)),
        },
        connect: Connect {
            keepalive: env.get(&name("CONNECT_KEEPALIVE"), values::duration),
            user_timeout: env.get(&name("CONNECT_USER_TIMEOUT"), values::duration),
            timeout: env.value_or(&name("CONNECT_TIMEOUT"), values::duration, defaults.connect_timeout),
            backoff: backoff(env, &name("CONNECT_EXP_BACKOFF"), defaults.backoff_max),
        },
        http1_pool: Http1Pool {
            max_idle_per_endpoint: env.value_or(defaults.max_idle_name, values::number, 10_000),
            idle_timeout: env.value_or(
                &name("HTTP1_CONNECTION_POOL_IDLE_TIMEOUT"),
                values::duration,
                Duration::from_secs(3),
            ),
        },
        resend_policy: env.value_or(
            &format!("{TULLE_PREFIX}{prefix}_RESEND"),
            values::resend,
            ResendPolicy::IdempotentMethods,
        ),
        http_server: http_server(env, &name("HTTP")),
        http2_server: http2_server(env, &name("SERVER_HTTP2"), windows),
        http2_client: windows,
        max_in_flight_requests: env.value_or(&name("MAX_IN_FLIGHT"), values::at_least_one, 100_000),
        discovery_idle_timeout: env.value_or(
            &name("DISCOVERY_IDLE_TIMEOUT"),
            values::duration,
            defaults.discovery_idle_timeout,
        ),
    }
}

fn backoff(env: &mut Env<'_>, prefix: &str, default_max: Duration) -> Backoff {
    let (min_name, max_name) = (format!("{prefix}_MIN"), format!("{prefix}_MAX"));
    let bounds = env.pair((&min_name, values::duration), (&max_name, values::duration));
    let (min, max) = bounds.unwrap_or((Duration::from_millis(100), default_max));
    if min > max {
        env.record_invalid(&min_name, "it is above the maximum of the backoff");
    }
    Backoff {
        min,
        max,
        jitter: env.value_or(&format!("{prefix}_JITTER"), values::jitter, 0.1),
    }
}

fn windows(env: &mut Env<'_>) -> Http2Windows {
    Http2Windows {
        stream: env.value_or("HTTP2_INITIAL_STREAM_WINDOW_SIZE", values::window, 1 << 20),
        connection: env.value_or("HTTP2_INITIAL_CONNECTION_WINDOW_SIZE", values::window, 4 << 20),
    }
}

fn http_server(env: &mut Env<'_>, prefix: &str) -> HttpServer {
    let name = |rest: &str| format!("{TULLE_PREFIX}{prefix}_{rest}");
    HttpServer {
        max_header_bytes: env.value_or(&name("MAX_HEAD_SIZE"), values::at_least_one, 64 * 1024),
        header_read_timeout: env.value_or(&name("HEAD_TIMEOUT"), values::duration, Duration::from_secs(30)),
        idle_timeout: env.value_or(&name("IDLE_TIMEOUT"), values::duration, Duration::from_secs(3600)),
    }
}

fn http2_server(env: &mut Env<'_>, prefix: &str, windows: Http2Windows) -> Http2Server {
    let name = |rest: &str| format!("{prefix}_{rest}");
    let own_windows = env.pair(
        (&name("INITIAL_STREAM_WINDOW_SIZE"), values::window),
        (&name("INITIAL_CONNECTION_WINDOW_SIZE"), values::window),
    );
    let keep_alive = env.pair(
        (&name("KEEP_ALIVE_INTERVAL"), values::duration),
        (&name("KEEP_ALIVE_TIMEOUT"), values::duration),
    );
    Http2Server {
        windows: own_windows.map_or(windows, |(stream, connection)| Http2Windows { stream, connection }),
        keep_alive: keep_alive.map(|(interval, timeout)| KeepAlive { interval, timeout }),
        max_concurrent_streams: env.value_or(&name("MAX_CONCURRENT_STREAMS"), values::number, 16_384),
        max_frame_size: env.get(&name("MAX_FRAME_SIZE"), values::frame_size),
        max_header_list_bytes: env.get(&name("MAX_HEADER_LIST_SIZE"), values::number),
        max_pending_reset_streams: env.get(&name("MAX_PENDING_ACCEPT_RESET_STREAMS"), values::number),
        max_send_buffer_bytes: env.get(&name("MAX_SEND_BUF_SIZE"), values::at_least_one),
    }
}

fn identity(env: &mut Env<'_>) -> Option<identity::Config> {
    if env.get("IDENTITY_DISABLED", values::text).is_some() {
        env.record_invalid(
            "IDENTITY_DISABLED",
            "a proxy without identity is not supported, unset this variable",
        );
    }
    let socket_name = WORKLOAD_API_VARIABLES.iter().find(|name| env.value(name).is_some());
    let socket = socket_name.and_then(|name| env.get(name, values::unix_socket));
    let source = match (socket, socket_name) {
        (Some(socket), _) => Some(identity::IdentitySource::WorkloadApi {
            socket,
            anchors: env.get("IDENTITY_TRUST_ANCHORS", values::trust_anchors),
        }),
        // The address is invalid; the error is recorded.
        (None, Some(_)) => None,
        (None, None) => control_plane_source(env),
    };
    let names = env.pair(
        ("IDENTITY_SERVER_ID", values::from_str::<Identity>),
        ("IDENTITY_SERVER_NAME", values::from_str::<Identity>),
    );
    let (id, server_name) = match names {
        Some(names) => names,
        None => {
            let id = env.required("IDENTITY_LOCAL_NAME", values::from_str::<Identity>)?;
            (id.clone(), id)
        }
    };
    let Identity::Dns(server_name) = server_name else {
        env.record_invalid("IDENTITY_SERVER_NAME", "a TLS server name is a DNS name");
        return None;
    };
    match (&source, &id) {
        (Some(identity::IdentitySource::WorkloadApi { .. }), Identity::Dns(_)) => env.record_invalid(
            socket_name.unwrap_or(&WORKLOAD_API_VARIABLES[0]),
            "it needs LINKERD2_PROXY_IDENTITY_SERVER_ID, a spiffe:// URI, and LINKERD2_PROXY_IDENTITY_SERVER_NAME",
        ),
        (Some(identity::IdentitySource::ControlPlane { .. }), Identity::Uri(_)) => env.record_invalid(
            "IDENTITY_SERVER_ID",
            "the control plane certifies DNS names; a URI needs LINKERD2_PROXY_IDENTITY_SPIRE_WORKLOAD_API_ADDRESS",
        ),
        _ => {}
    }
    Some(identity::Config {
        id,
        server_name: server_name.to_string(),
        source: source?,
    })
}

fn control_plane_source(env: &mut Env<'_>) -> Option<identity::IdentitySource> {
    let anchors = env.required("IDENTITY_TRUST_ANCHORS", values::trust_anchors);
    let token_file = env.required("IDENTITY_TOKEN_FILE", values::text);
    let min_refresh = env.value_or("IDENTITY_MIN_REFRESH", values::duration, Duration::from_secs(10));
    let max_refresh = env.value_or(
        "IDENTITY_MAX_REFRESH",
        values::duration,
        Duration::from_secs(24 * 60 * 60),
    );
    if min_refresh > max_refresh {
        env.record_invalid(
            "IDENTITY_MIN_REFRESH",
            "it is above LINKERD2_PROXY_IDENTITY_MAX_REFRESH",
        );
    }
    let dir = env.get("IDENTITY_DIR", values::text).map(PathBuf::from);
    let service = control_addr(env, "IDENTITY_SVC");
    Some(identity::IdentitySource::ControlPlane {
        anchors: anchors?,
        certify: identity::certify::Config {
            service: service?,
            dir,
            token_file: token_file?.into(),
            min_refresh,
            max_refresh,
        },
    })
}

fn control(env: &mut Env<'_>, cluster_networks: Vec<ipnet::IpNet>) -> Option<Control> {
    let destination = control_addr(env, "DESTINATION_SVC");
    let policy = control_addr(env, "POLICY_SVC");
    let workload = env.required("POLICY_WORKLOAD", values::text);
    let dns = api::dns::Config {
        min_ttl: env.get("DNS_MIN_TTL", values::duration),
        max_ttl: env.get("DNS_MAX_TTL", values::duration),
    };
    if let (Some(min), Some(max)) = (dns.min_ttl, dns.max_ttl)
        && min > max
    {
        env.record_invalid("DNS_MIN_TTL", "it is above LINKERD2_PROXY_DNS_MAX_TTL");
    }
    let cluster_local = || "svc.cluster.local.".parse().expect("the default suffix is a name");
    let profiles = ProfileScope {
        suffixes: env
            .get("DESTINATION_PROFILE_SUFFIXES", values::suffixes)
            .unwrap_or_else(cluster_local),
        networks: env.value_or_default("DESTINATION_PROFILE_NETWORKS", values::networks),
    };
    Some(Control {
        context_token: env.value_or_default("DESTINATION_CONTEXT", values::text),
        profiles,
        cluster_networks,
        stream_limits: stream_limits(env),
        dns,
        destination: destination?,
        policy: policy?,
        workload: workload?,
    })
}

/// The address of a control plane service. A loopback address is dialled in plaintext; any other address requires an identity.
fn control_addr(env: &mut Env<'_>, prefix: &str) -> Option<ControlAddr> {
    let (addr_name, identity_name) = (format!("{prefix}_ADDR"), format!("{prefix}_NAME"));
    let addr = env.required(&addr_name, values::from_str::<Addr>);
    let identity = env.get(&identity_name, values::from_str::<Identity>);
    let addr = addr?;
    if api::channel::is_loopback(&addr) {
        return Some(ControlAddr {
            addr,
            security: Security::Loopback,
        });
    }
    match identity {
        Some(identity) => Some(ControlAddr {
            addr,
            security: Security::MutualTls(identity),
        }),
        None => {
            env.record_missing(
                &identity_name,
                "the identity of the service is needed, because its address is not loopback",
            );
            None
        }
    }
}

fn trace(env: &mut Env<'_>) -> Option<trace::export::Config> {
    let sampling = env.value_or(TRACE_SAMPLING, values::ratio_or_zero, 0.0);
    if env.value("TRACE_COLLECTOR_SVC_ADDR").is_none() {
        if sampling > 0.0 {
            env.record_invalid(TRACE_SAMPLING, "traces need LINKERD2_PROXY_TRACE_COLLECTOR_SVC_ADDR");
        }
        return None;
    }
    let mut attributes = env.value_or_default("TRACE_EXTRA_ATTRIBUTES", values::attribute_lines);
    attributes.extend(
        env.get_by_full_name("OTEL_RESOURCE_ATTRIBUTES", values::attribute_list)
            .unwrap_or_default(),
    );
    Some(trace::export::Config {
        collector: control_addr(env, "TRACE_COLLECTOR_SVC")?,
        sampling,
        service: env.value_or("TRACE_SERVICE_NAME", values::text, "linkerd-proxy".to_owned()),
        host: env.get_by_full_name("HOSTNAME", values::text),
        labels_path: env.get("TRACE_ATTRIBUTES_PATH", values::text).map(PathBuf::from),
        attributes,
    })
}

fn stream_limits(env: &mut Env<'_>) -> StreamLimits {
    let names = ["INITIAL_TIMEOUT", "IDLE_TIMEOUT", "LIFETIME"].map(|rest| format!("CONTROL_STREAM_{rest}"));
    let limits = names.each_ref().map(|name| env.get(name, values::duration));
    let set = names
        .iter()
        .zip(limits)
        .filter_map(|(name, limit)| limit.map(|limit| (name, limit)));
    let set: Vec<_> = set.collect();
    if let Some(pair) = set.windows(2).find(|pair| pair[0].1 > pair[1].1) {
        env.record_invalid(pair[0].0, &format!("it is above {LINKERD_PREFIX}{}", pair[1].0));
    }
    let [initial, idle, lifetime] = limits;
    StreamLimits {
        initial,
        idle,
        lifetime,
    }
}

/// Access to the variables, and the errors of the variables that were read.
struct Env<'a> {
    lookup: &'a dyn Fn(&str) -> Option<OsString>,
    errors: Vec<EnvError>,
}

impl Env<'_> {
    /// The value of a variable, if it is set. Bytes that are not UTF-8 are replaced; [`Self::get`] then records an error.
    fn value(&self, name: &str) -> Option<String> {
        let value = self.os_value(&full_name(name))?;
        Some(value.to_string_lossy().into_owned())
    }

    fn os_value(&self, full_name: &str) -> Option<OsString> {
        (self.lookup)(full_name).filter(|value| !value.to_string_lossy().trim().is_empty())
    }

    /// The parsed value of a variable that is set; an error is recorded once.
    fn get<T>(&mut self, name: &str, parse: impl Fn(&str) -> Result<T, ParseError>) -> Option<T> {
        self.get_by_full_name(&full_name(name), parse)
    }

    /// The parsed value of a variable that is given by its full name; an error is recorded once.
    fn get_by_full_name<T>(&mut self, full_name: &str, parse: impl Fn(&str) -> Result<T, ParseError>) -> Option<T> {
        let value = self.os_value(full_name)?;
        let parsed = match value.to_str() {
            Some(text) => parse(text),
            None => Err("it is not UTF-8".to_owned()),
        };
        match parsed {
            Ok(parsed) => Some(parsed),
            Err(reason) => {
                self.record_error(full_name.to_owned(), Some(value.to_string_lossy().into_owned()), reason);
                None
            }
        }
    }

    fn value_or<T>(&mut self, name: &str, parse: impl Fn(&str) -> Result<T, ParseError>, default: T) -> T {
        self.get(name, parse).unwrap_or(default)
    }

    fn value_or_default<T: Default>(&mut self, name: &str, parse: impl Fn(&str) -> Result<T, ParseError>) -> T {
        self.get(name, parse).unwrap_or_default()
    }

    fn flag(&mut self, name: &str) -> bool {
        self.value_or(name, values::flag, false)
    }

    /// The parsed value of the first of several variables that is set.
    fn first_value<T>(&mut self, names: &[&str], parse: impl Fn(&str) -> Result<T, ParseError> + Copy) -> Option<T> {
        let name = names.iter().find(|name| self.value(name).is_some())?;
        self.get(name, parse)
    }

    fn required<T>(&mut self, name: &str, parse: impl Fn(&str) -> Result<T, ParseError>) -> Option<T> {
        if self.value(name).is_none() {
            self.record_missing(name, "it is required");
        }
        self.get(name, parse)
    }

    /// The parsed values of two variables that must be set together.
    fn pair<A, B>(
        &mut self,
        (first, parse_first): (&str, impl Fn(&str) -> Result<A, ParseError>),
        (second, parse_second): (&str, impl Fn(&str) -> Result<B, ParseError>),
    ) -> Option<(A, B)> {
        for (set, other) in [(first, second), (second, first)] {
            if self.value(set).is_some() && self.value(other).is_none() {
                self.record_missing(other, &format!("it is required together with {}", full_name(set)));
            }
        }
        self.get(first, parse_first).zip(self.get(second, parse_second))
    }

    fn record_missing(&mut self, name: &str, reason: &str) {
        self.record_error(full_name(name), None, reason.to_owned());
    }

    /// Records that the value of a variable is not supported, or conflicts with another setting.
    fn record_invalid(&mut self, name: &str, reason: &str) {
        let value = self.value(name);
        self.record_error(full_name(name), value, reason.to_owned());
    }

    fn record_error(&mut self, name: String, value: Option<String>, reason: ParseError) {
        let error = EnvError {
            name,
            value: value.map(shortened),
            reason,
        };
        if !self.errors.contains(&error) {
            self.errors.push(error);
        }
    }

    fn unsupported_variables(&self) -> Vec<String> {
        let set = UNSUPPORTED_VARIABLES
            .iter()
            .filter(|name| self.value(name).is_some_and(|value| value != "false"));
        set.map(|name| full_name(name)).collect()
    }
}

impl fmt::Debug for Env<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Env").field("errors", &self.errors).finish()
    }
}

fn full_name(name: &str) -> String {
    match name.starts_with(TULLE_PREFIX) || name == INBOUND_UNKNOWN_POLICY {
        true => name.to_owned(),
        false => format!("{LINKERD_PREFIX}{name}"),
    }
}

/// Shortens a long value, such as a certificate bundle, so that the reason in the error stays visible.
fn shortened(value: String) -> String {
    match value.char_indices().nth(MAX_VALUE_CHARS_IN_ERROR) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value,
    }
}

const LINKERD_PREFIX: &str = "LINKERD2_PROXY_";
/// The variables that name the socket of a SPIFFE Workload API; the second is the older name.
const WORKLOAD_API_VARIABLES: &[&str] = &["IDENTITY_SPIRE_WORKLOAD_API_ADDRESS", "IDENTITY_SPIRE_SOCKET"];
/// Prefix of the variables that only tulle has.
const TULLE_PREFIX: &str = "TULLE_PROXY_";
const BALANCER: &str = "TULLE_PROXY_BALANCER";
const INBOUND_UNKNOWN_POLICY: &str = "TULLE_INBOUND_UNKNOWN_POLICY";
const INBOUND_MODE: &str = "TULLE_PROXY_INBOUND_MODE";
const TRACE_SAMPLING: &str = "TULLE_PROXY_TRACE_SAMPLING";
const ACCESS_LOG_DIRECTIONS: &str = "TULLE_PROXY_ACCESS_LOG_DIRECTIONS";
const EXPLICIT_LISTEN_ADDR: &str = "TULLE_PROXY_EXPLICIT_LISTEN_ADDR";
const MEMORY_LIMIT: &str = "TULLE_PROXY_MEMORY_LIMIT";
const DEFAULT_LOG: &str = "warn,tulle=info,hickory=error";
const DEFAULT_QUEUE_CAPACITY: usize = 10_000;
const MAX_VALUE_CHARS_IN_ERROR: usize = 80;
/// Variables of Linkerd that have no effect here.
///
/// `INBOUND_PORTS_REQUIRE_IDENTITY` is not in this list although the proxy does not read it: injectors set it from an annotation
/// that does have an effect, by the policies that the control plane sends for these ports.
const UNSUPPORTED_VARIABLES: &[&str] = &[
    "OUTBOUND_TCP_QUEUE_CAPACITY",
    "OUTBOUND_TCP_FAILFAST_TIMEOUT",
    "INBOUND_SERVER_HTTP2_ADAPTIVE_FLOW_CONTROL",
    "OUTBOUND_SERVER_HTTP2_ADAPTIVE_FLOW_CONTROL",
    "INBOUND_HTTP_QUEUE_CAPACITY",
    "INBOUND_HTTP_FAILFAST_TIMEOUT",
    "INBOUND_PORTS_REQUIRE_TLS",
];
