//! Applies the annotations of a pod to the values of the chart.
//!
//! An invalid value is ignored with a warning, and the chart's value applies. In a list of ports, the valid entries apply if
//! there are any. A pod is denied if an annotation that restricts access has an invalid value.

use std::collections::BTreeMap;
use std::time::Duration;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{EnvVar, PodSpec};
use tracing_subscriber::EnvFilter;
use tulle_core::names::annotation;

use crate::injection::values::{InboundMode, Values};
use crate::resources::exported_services;
use crate::resources::go_duration;
use crate::resources::policy::server::AccessPolicy;
use crate::resources::port_list::PortList;
use crate::resources::workload::resolve_ports;

/// The annotations of a Kubernetes object.
pub type Annotations = BTreeMap<String, String>;

/// The accepted values, as the end of an error message.
type Expected = &'static str;

/// The reason why a value does not apply.
enum InvalidValue {
    Expected(Expected),
    /// Another setting prevents the value. The text is a sentence with the reason and the fix.
    Prevented(&'static str),
    /// The value is below this minimum, which applies instead.
    Raised(&'static str),
}

impl From<Expected> for InvalidValue {
    fn from(expected: Expected) -> Self {
        Self::Expected(expected)
    }
}

/// Problems with annotations, one sentence each. Each problem is listed once, even if the annotation is read both from the
/// namespace and as an inherited annotation of the pod.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::injection) struct AnnotationProblems {
    /// Values that are ignored or raised.
    pub(in crate::injection) ignored: Vec<String>,
    /// Invalid values of annotations that restrict access to the pod.
    pub(in crate::injection) restriction_errors: Vec<String>,
}

/// Applies the annotations of a pod, which include those inherited from its namespace.
pub(in crate::injection) fn apply_annotations(
    values: &mut Values,
    namespace: &Annotations,
    pod: &Annotations,
    spec: &PodSpec,
) -> AnnotationProblems {
    let mut problems = AnnotationProblems::default();
    // The variables of the namespace are added first, even if the pod has its own list, so that the variables of the pod take
    // precedence.
    if let Some(text) = namespace.get(annotation::PROXY_ADDITIONAL_ENV) {
        let added = add_env(values, text).map_err(InvalidValue::from);
        problems.record(annotation::PROXY_ADDITIONAL_ENV, text, added);
    }
    // Keys are sorted. Stable names come after alpha names, so they take precedence.
    for (key, text) in pod {
        match port_list_field(values, key) {
            Some((ports, names)) => {
                let list = PortList::parse(text);
                let resolved = match names {
                    PortNames::Allowed => resolve_ports(&list, spec),
                    PortNames::NotAllowed => list.resolve(|_| Vec::new()),
                };
                if !resolved.has_only_invalid_entries() {
                    *ports = resolved.to_string();
                }
                resolved
                    .unknown
                    .iter()
                    .for_each(|part| problems.record_unknown_port(key, part, names));
            }
            None if is_unknown(key) => push_new(
                &mut problems.ignored,
                format!("{key} is not known and has no effect; check its spelling"),
            ),
            None => problems.record(key, text, apply_annotation(values, key, text.trim())),
        }
    }
    problems
}

/// Whether a list of ports can contain names of container ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PortNames {
    Allowed,
    NotAllowed,
}

/// The value that an annotation with a list of ports sets, and whether the list can contain names.
fn port_list_field<'a>(values: &'a mut Values, key: &str) -> Option<(&'a mut String, PortNames)> {
    let (proxy, init) = (&mut values.proxy, &mut values.proxy_init);
    match key {
        annotation::OPAQUE_PORTS => Some((&mut proxy.opaque_ports, PortNames::Allowed)),
        annotation::REQUIRE_IDENTITY_INBOUND_PORTS => {
            Some((&mut proxy.require_identity_on_inbound_ports, PortNames::Allowed))
        }
        annotation::SKIP_INBOUND_PORTS => Some((&mut init.ignore_inbound_ports, PortNames::Allowed)),
        annotation::SKIP_OUTBOUND_PORTS => Some((&mut init.ignore_outbound_ports, PortNames::NotAllowed)),
        _ => None,
    }
}

/// Checks a list of ports without knowing the pod. `None` if the annotation is not a list of ports.
///
/// # Errors
/// Returns the first entry that is invalid for every pod.
pub(in crate::injection) fn check_ports(key: &str, text: &str) -> Option<Result<(), String>> {
    let (_, names) = port_list_field(&mut Values::default(), key)?;
    let list = PortList::parse(text);
    let wrong = match names {
        PortNames::Allowed => list.malformed().next().map(str::to_owned),
        PortNames::NotAllowed => list.resolve(|_| Vec::new()).unknown.into_iter().next(),
    };
    Some(wrong.map_or(Ok(()), |part| Err(unknown_port(key, &part, names))))
}

fn unknown_port(key: &str, part: &str, names: PortNames) -> String {
    match names {
        PortNames::Allowed => {
            format!("{key}: {part:?} is neither a port, nor a range of ports, nor the name of a container's port")
        }
        PortNames::NotAllowed => format!("{key}: {part:?} is neither a port nor a range of ports such as 8000-8100"),
    }
}

impl AnnotationProblems {
    fn record(&mut self, key: &str, text: &str, outcome: Result<(), InvalidValue>) {
        let reason = match outcome {
            Ok(()) => return,
            Err(InvalidValue::Expected(expected)) => format!("expected {expected}"),
            Err(InvalidValue::Prevented(reason)) => reason.to_owned(),
            Err(InvalidValue::Raised(minimum)) => {
                let raised = format!("{key}: {text:?} is below the minimum; {minimum} is used");
                return push_new(&mut self.ignored, raised);
            }
        };
        match RESTRICTING_ANNOTATIONS.contains(&key) {
            true => push_new(
                &mut self.restriction_errors,
                format!("{key}: {text:?} is invalid; {reason}"),
            ),
            false => push_new(&mut self.ignored, format!("{key}: {text:?} is ignored; {reason}")),
        }
    }

    fn record_unknown_port(&mut self, key: &str, part: &str, names: PortNames) {
        let problem = unknown_port(key, part, names);
        match RESTRICTING_ANNOTATIONS.contains(&key) {
            true => push_new(&mut self.restriction_errors, problem),
            false => push_new(&mut self.ignored, problem),
        }
    }
}

/// Adds a problem unless the list contains it.
fn push_new(problems: &mut Vec<String>, problem: String) {
    if !problems.contains(&problem) {
        problems.push(problem);
    }
}

/// Applies one annotation. An annotation that the injector does not read changes nothing.
fn apply_annotation(values: &mut Values, key: &str, text: &str) -> Result<(), InvalidValue> {
    let proxy = &mut values.proxy;
    match key {
        annotation::PROXY_IMAGE => proxy.image.name = non_empty(text)?,
        annotation::PROXY_VERSION_OVERRIDE => proxy.image.version = non_empty(text)?,
        annotation::IMAGE_PULL_POLICY => proxy.image.pull_policy = pull_policy(text)?,
        annotation::DEBUG_IMAGE => values.debug_container.image.name = non_empty(text)?,
        annotation::DEBUG_IMAGE_VERSION => values.debug_container.image.version = non_empty(text)?,
        annotation::DEBUG_IMAGE_PULL_POLICY => values.debug_container.image.pull_policy = pull_policy(text)?,
        annotation::ENABLE_DEBUG_SIDECAR => values.debug_container.enabled = boolean(text)?,
        annotation::INBOUND_PORT => proxy.ports.inbound = port(text)?,
        annotation::OUTBOUND_PORT => proxy.ports.outbound = port(text)?,
        annotation::ADMIN_PORT => proxy.ports.admin = port(text)?,
        annotation::CONTROL_PORT => proxy.ports.control = port(text)?,
        annotation::UNREDIRECTED_IPV6 => {
            values.proxy_init.unredirected_ipv6 = one_of(text, &["drop", "allow"], "drop or allow")?;
        }
        annotation::SKIP_SUBNETS => values.proxy_init.skip_subnets = subnets(text)?,
        annotation::PROXY_CPU_REQUEST => {
            proxy.runtime.workers.minimum = whole_cores(text)?;
            // The deprecated setting would take precedence.
            proxy.cores.clear();
            text.clone_into(&mut proxy.resources.cpu.request);
        }
        annotation::PROXY_CPU_LIMIT => {
            proxy.runtime.workers.maximum = whole_cores(text)?;
            text.clone_into(&mut proxy.resources.cpu.limit);
        }
        annotation::PROXY_CPU_RATIO_LIMIT => proxy.runtime.workers.maximum_cpu_ratio = ratio(text)?,
        annotation::PROXY_MEMORY_REQUEST => proxy.resources.memory.request = quantity(text)?,
        annotation::PROXY_MEMORY_LIMIT => proxy.resources.memory.limit = quantity(text)?,
        annotation::PROXY_EPHEMERAL_STORAGE_REQUEST => proxy.resources.ephemeral_storage.request = quantity(text)?,
        annotation::PROXY_EPHEMERAL_STORAGE_LIMIT => proxy.resources.ephemeral_storage.limit = quantity(text)?,
        annotation::PROXY_UID => proxy.uid = uid(text)?,
        annotation::PROXY_GID => proxy.gid = gid(text)?,
        _ => apply_behaviour_annotation(values, key, text)?,
    }
    Ok(())
}

/// Applies an annotation that [`apply_annotation`] leaves to it: settings other than images, ports, resources and users.
fn apply_behaviour_annotation(values: &mut Values, key: &str, text: &str) -> Result<(), InvalidValue> {
    let proxy = &mut values.proxy;
    match key {
        annotation::PROXY_ADMIN_SHUTDOWN => proxy.enable_shutdown_endpoint = enabled_or_disabled(text)?,
        annotation::PROXY_LOG_LEVEL => proxy.log_level = log_level(text)?,
        annotation::PROXY_LOG_FORMAT => proxy.log_format = one_of(text, &["plain", "json"], "plain or json")?,
        annotation::PROXY_LOG_HTTP_HEADERS => {
            proxy.log_http_headers = one_of(text, &["off", "insecure"], "off or insecure")?;
        }
        annotation::ACCESS_LOG => proxy.access_log = access_log(text)?,
        annotation::DEFAULT_INBOUND_POLICY => {
            let policy: AccessPolicy = text.parse().map_err(|_| EXPECTED_POLICIES)?;
            policy.as_str().clone_into(&mut proxy.default_inbound_policy);
        }
        annotation::INBOUND_MODE => {
            let mode = InboundMode::try_from(text.to_owned()).map_err(|_| "redirect or tproxy")?;
            if mode == InboundMode::Tproxy && values.cni_enabled {
                return Err(InvalidValue::Prevented(
                    "a CNI plugin supports only redirect; tproxy needs the value cniEnabled=false",
                ));
            }
            proxy.inbound_mode = mode;
        }
        annotation::REWRITE_PROBES => proxy.rewrite_probes = boolean(text)?,
        annotation::PROXY_METRICS_HOSTNAME_LABELS => proxy.metrics.hostname_labels = boolean(text)?,
        annotation::PROXY_OUTBOUND_CONNECT_TIMEOUT => proxy.outbound_connect_timeout = duration_as_millis(text)?,
        annotation::PROXY_INBOUND_CONNECT_TIMEOUT => {
            let timeout = duration(text)?;
            proxy.inbound_connect_timeout = as_millis(timeout.max(MIN_INBOUND_CONNECT_TIMEOUT));
            if timeout < MIN_INBOUND_CONNECT_TIMEOUT {
                return Err(InvalidValue::Raised("4s"));
            }
        }
        annotation::PROXY_OUTBOUND_DISCOVERY_CACHE_TIMEOUT => {
            proxy.outbound_discovery_cache_unused_timeout = duration_as_seconds(text)?;
        }
        annotation::PROXY_INBOUND_DISCOVERY_CACHE_TIMEOUT => {
            proxy.inbound_discovery_cache_unused_timeout = duration_as_seconds(text)?;
        }
        annotation::PROXY_DISABLE_OUTBOUND_DETECT_TIMEOUT => {
            proxy.disable_outbound_protocol_detect_timeout = boolean(text)?;
        }
        annotation::PROXY_DISABLE_INBOUND_DETECT_TIMEOUT => {
            proxy.disable_inbound_protocol_detect_timeout = boolean(text)?;
        }
        annotation::ENABLE_EXTERNAL_PROFILES => proxy.enable_external_profiles = boolean(text)?,
        annotation::ENABLE_GATEWAY => proxy.is_gateway = boolean(text)?,
        // It becomes a part of variables, not of the values.
        annotation::GATEWAY_EXPORTED_SERVICES => check_exported_services(text)?,
        annotation::CLOSE_WAIT_TIMEOUT => {
            let timeout = duration(text)?;
            if !values.proxy_init.run_as_root {
                return Err(InvalidValue::Prevented(
                    "only root may set this timeout; it needs the value proxyInit.runAsRoot=true",
                ));
            }
            values.proxy_init.close_wait_timeout_secs = timeout.as_secs();
        }
        annotation::PROXY_AWAIT => proxy.await_proxy = enabled_or_disabled(text)?,
        annotation::SHUTDOWN_GRACE_PERIOD => proxy.shutdown_grace_period = duration_as_millis(text)?,
        annotation::PROXY_ENABLE_NATIVE_SIDECAR
        | annotation::BETA_ENABLE_NATIVE_SIDECAR
        | annotation::ALPHA_ENABLE_NATIVE_SIDECAR => proxy.native_sidecar = boolean(text)?,
        annotation::ALPHA_WAIT_BEFORE_EXIT_SECONDS => {
            // The Kubernetes API uses 32 bits.
            let n_seconds: u32 = text.parse().map_err(|_| "a number of seconds")?;
            proxy.wait_before_exit_seconds = n_seconds.into();
        }
        annotation::PROXY_ADDITIONAL_ENV => add_env(values, text)?,
        annotation::DISABLE_TAP => proxy.tap.enabled &= !boolean(text)?,
        _ => {}
    }
    Ok(())
}

/// Adds variables, or replaces the values of existing ones.
fn add_env(values: &mut Values, text: &str) -> Result<(), Expected> {
    const EXPECTED: Expected = r#"a JSON list of variables such as [{"name": "A", "value": "b"}]"#;
    let added: Vec<EnvVar> = serde_json::from_str(text).map_err(|_| EXPECTED)?;
    if added.iter().any(|var| var.name.is_empty()) {
        return Err(EXPECTED);
    }
    for var in added {
        let env = &mut values.proxy.additional_env;
        match env.iter_mut().find(|other| other.name == var.name) {
            Some(other) => *other = var,
            None => env.push(var),
        }
    }
    Ok(())
}

fn non_empty(text: &str) -> Result<String, Expected> {
    // The API server rejects a pod whose image contains whitespace.
    match text.is_empty() || text.contains(char::is_whitespace) {
        true => Err("a name without whitespace"),
        false => Ok(text.to_owned()),
    }
}

fn one_of(text: &str, allowed: &[&str], expected: Expected) -> Result<String, Expected> {
    allowed.contains(&text).then(|| text.to_owned()).ok_or(expected)
}

fn pull_policy(text: &str) -> Result<String, Expected> {
    one_of(
        text,
        &["Always", "Never", "IfNotPresent"],
        "Always, Never or IfNotPresent",
    )
}

/// Accepts the same booleans as Go's `strconv.ParseBool`.
fn boolean(text: &str) -> Result<bool, Expected> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("true or false"),
    }
}

fn check_exported_services(text: &str) -> Result<(), Expected> {
    match exported_services::parse(text) {
        Some(_) => Ok(()),
        None => Err("a label selector of at most 256 characters, such as mirror.linkerd.io/exported"),
    }
}

fn enabled_or_disabled(text: &str) -> Result<bool, Expected> {
    match text {
        "enabled" => Ok(true),
        "disabled" => Ok(false),
        _ => Err("enabled or disabled"),
    }
}

fn port(text: &str) -> Result<u16, Expected> {
    text.parse()
        .ok()
        .filter(|port| *port > 0)
        .ok_or("a port from 1 to 65535")
}

fn subnets(text: &str) -> Result<String, Expected> {
    let is_network = |part: &str| part.trim().parse::<IpNet>().is_ok();
    match text.split(',').all(is_network) {
        true => Ok(trimmed_list(text)),
        false => Err("networks such as 10.0.0.0/8,fd00::/8"),
    }
}

fn trimmed_list(text: &str) -> String {
    text.split(',').map(str::trim).collect::<Vec<_>>().join(",")
}

fn quantity(text: &str) -> Result<String, Expected> {
    parse_quantity(text)
        .map(|_| text.to_owned())
        .ok_or("a quantity such as 100m, 0.5 or 64Mi")
}

/// Number of cores in a CPU quantity, rounded up, at least 1.
fn whole_cores(text: &str) -> Result<String, Expected> {
    let cores = parse_quantity(text).ok_or("a quantity of CPU such as 100m or 2")?;
    Ok(cores.ceil().max(1.0).to_string())
}

/// Value of a Kubernetes quantity. Negative numbers are invalid.
fn parse_quantity(text: &str) -> Option<f64> {
    let digits = text.trim_end_matches(|ch: char| !ch.is_ascii_digit() && ch != '.');
    let scale = match text.strip_prefix(digits)? {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1024f64.powi(2),
        "Gi" => 1024f64.powi(3),
        "Ti" => 1024f64.powi(4),
        "Pi" => 1024f64.powi(5),
        "Ei" => 1024f64.powi(6),
        _ => return None,
    };
    // Rust also parses names such as `inf`.
    let is_number = digits.starts_with(|ch: char| ch.is_ascii_digit() || ch == '.');
    let number: f64 = digits.parse().ok().filter(|_| is_number)?;
    Some(number * scale)
}

fn ratio(text: &str) -> Result<String, Expected> {
    match text.parse::<f64>() {
        Ok(ratio) if 0.0 < ratio && ratio < 1.0 => Ok(text.to_owned()),
        _ => Err("a number above 0 and below 1"),
    }
}

/// 0 is rejected, because the proxy must not run as root.
fn uid(text: &str) -> Result<i64, Expected> {
    match text.parse::<u32>() {
        Ok(uid) if (1..=MAX_ID).contains(&uid) => Ok(uid.into()),
        _ => Err("a user id from 1 to 2147483647"),
    }
}

fn gid(text: &str) -> Result<i64, Expected> {
    match (text, text.parse::<u32>()) {
        ("-1", _) => Ok(-1),
        (_, Ok(gid)) if gid <= MAX_ID => Ok(gid.into()),
        _ => Err("a group id from 0 to 2147483647, or -1 for the group of the image"),
    }
}

fn log_level(text: &str) -> Result<String, Expected> {
    match EnvFilter::try_new(text) {
        Ok(_) if !text.is_empty() => Ok(text.to_owned()),
        _ => Err("levels such as warn,linkerd=debug"),
    }
}

fn access_log(text: &str) -> Result<String, Expected> {
    match text {
        "apache" | "json" => Ok(text.to_owned()),
        "" | "none" => Ok(String::new()),
        _ => Err("apache, json or none"),
    }
}

fn duration(text: &str) -> Result<Duration, Expected> {
    go_duration::parse(text).map_err(|_| "a duration such as 100ms, 1.5s or 1h30m")
}

fn duration_as_millis(text: &str) -> Result<String, Expected> {
    duration(text).map(as_millis)
}

fn as_millis(duration: Duration) -> String {
    format!("{}ms", duration.as_millis())
}

fn duration_as_seconds(text: &str) -> Result<String, Expected> {
    duration(text).map(|duration| format!("{}s", duration.as_secs()))
}

/// Annotations that can restrict access to a pod or its proxy.
const RESTRICTING_ANNOTATIONS: [&str; 6] = [
    annotation::DEFAULT_INBOUND_POLICY,
    annotation::REQUIRE_IDENTITY_INBOUND_PORTS,
    annotation::UNREDIRECTED_IPV6,
    annotation::DISABLE_TAP,
    annotation::PROXY_ADMIN_SHUTDOWN,
    annotation::GATEWAY_EXPORTED_SERVICES,
];

/// Whether a key has a prefix of the mesh but is not one of its annotations. Such a key is usually misspelled.
fn is_unknown(key: &str) -> bool {
    annotation::has_configuration_prefix(key) && annotation::find(key).is_none()
}

/// Minimum of the timeout: the proxy replaces a shorter timeout by it.
const MIN_INBOUND_CONNECT_TIMEOUT: Duration = Duration::from_secs(4);

/// Maximum user or group id that the API server accepts.
const MAX_ID: u32 = i32::MAX.unsigned_abs();

const EXPECTED_POLICIES: Expected = "all-unauthenticated, all-authenticated, cluster-unauthenticated, \
     cluster-authenticated, deny or audit";
