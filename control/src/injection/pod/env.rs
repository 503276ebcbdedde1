//! The environment variables of the proxy container, in Linkerd's order: Kubernetes expands `$(name)` only for variables
//! that are defined before.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use k8s_openapi::api::core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector};
use tulle_core::names::{self, annotation, label, port};

use crate::injection::annotations::Annotations;
use crate::injection::pod::probes::{self, RewrittenProbe};
use crate::injection::ports;
use crate::injection::target::{Config, InjectionTarget, PROXY_CONTAINER, PodInputs, ProxyMode};
use crate::injection::values::{InboundMode, ProtocolParameters, Values};

/// Directory of the projected token, and the token's file name.
pub(in crate::injection) const TOKEN_DIR: &str = "/var/run/secrets/tokens";
pub(in crate::injection) const TOKEN_NAME: &str = "linkerd-identity-token";
/// Directory of the service account token in every pod.
pub(in crate::injection) const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
pub(in crate::injection) const END_ENTITY_DIR: &str = "/var/run/linkerd/identity/end-entity";
pub(in crate::injection) const PODINFO_DIR: &str = "/var/run/linkerd/podinfo";

/// All variables of the proxy container.
pub(in crate::injection) fn variables(inputs: PodInputs<'_>, rewritten: &[RewrittenProbe]) -> Vec<EnvVar> {
    let PodInputs {
        config,
        values,
        target,
        annotations,
        mode,
    } = inputs;
    let mut env = EnvBuilder(Vec::new());
    set_workload(&mut env);
    set_runtime(&mut env, values);
    let exported_services = exported_services_field(values, annotations);
    set_control_plane(&mut env, config, values, &exported_services);
    set_traffic(&mut env, values, target, mode);
    set_tracing(&mut env, config, values, target, annotations);
    set_protocol_parameters(&mut env, "INBOUND", &values.proxy.inbound);
    set_protocol_parameters(&mut env, "OUTBOUND", &values.proxy.outbound);
    env.set("INBOUND_PORTS_DISABLE_PROTOCOL_DETECTION", &values.proxy.opaque_ports);
    set_identity(&mut env, config, values, &exported_services);
    env.set_unless_empty("ACCESS_LOG", &values.proxy.access_log);
    env.set_unless_empty("SHUTDOWN_GRACE_PERIOD", &values.proxy.shutdown_grace_period);
    if let Some(originals) = probes::original_probes_variable(rewritten) {
        env.set_unprefixed(names::probes::VARIABLE, originals);
    }
    let added = values.proxy.additional_env.iter().chain(&values.proxy.experimental_env);
    env.0.extend(added.cloned());
    env.0
}

fn set_workload(env: &mut EnvBuilder) {
    env.set_from_field("_pod_name", "metadata.name");
    env.set_from_field("_pod_ns", "metadata.namespace");
    env.set_from_field("_pod_uid", "metadata.uid");
    env.set_from_field("_pod_ip", "status.podIP");
    env.set_from_field("_pod_nodeName", "spec.nodeName");
    env.set_unprefixed("_pod_containerName", PROXY_CONTAINER);
}

fn set_runtime(env: &mut EnvBuilder, values: &Values) {
    let proxy = &values.proxy;
    let workers = &proxy.runtime.workers;
    let cores = match proxy.cores.as_str() {
        "" => &workers.minimum,
        cores => cores,
    };
    env.set("CORES", cores);
    env.set("CORES_MIN", cores);
    env.set_unless_empty("CORES_MAX", &workers.maximum);
    env.set_unless_empty("CORES_MAX_RATIO", &workers.maximum_cpu_ratio);
    env.set_unless_empty(
        "INBOUND_PORTS_REQUIRE_IDENTITY",
        &proxy.require_identity_on_inbound_ports,
    );
    env.set_unless_empty("INBOUND_PORTS_REQUIRE_TLS", &proxy.require_tls_on_inbound_ports);
    env.set("SHUTDOWN_ENDPOINT_ENABLED", proxy.enable_shutdown_endpoint);
    match proxy.log_http_headers.as_str() {
        "insecure" => env.set("LOG", &proxy.log_level),
        // Headers may contain secrets, so spans that log headers are off.
        _ => env.set(
            "LOG",
            format!("{},[{{headers}}]=off,[{{request}}]=off", proxy.log_level),
        ),
    }
    env.set("LOG_FORMAT", &proxy.log_format);
}

/// The field with the Services that a gateway serves to other clusters, in the description of the client that its proxy sends to the
/// control plane. Empty if the gateway serves all Services, and for other proxies.
fn exported_services_field(values: &Values, annotations: &Annotations) -> String {
    match annotations.get(annotation::GATEWAY_EXPORTED_SERVICES) {
        Some(selector) if values.proxy.is_gateway && !selector.trim().is_empty() => {
            // The pod is denied if the selector has characters that would have to be escaped.
            format!(", \"exportedServices\":\"{}\"", selector.trim())
        }
        _ => String::new(),
    }
}

fn set_control_plane(env: &mut EnvBuilder, config: &Config, values: &Values, exported_services: &str) {
    let (proxy, streams) = (&values.proxy, &values.proxy.control.streams);
    let service = |name: &str, port: u16| service_addr(config, values, name, port);
    env.set(
        "DESTINATION_SVC_ADDR",
        service("linkerd-dst-headless", port::DESTINATION),
    );
    env.set("DESTINATION_PROFILE_NETWORKS", &values.cluster_networks);
    env.set("POLICY_SVC_ADDR", service("linkerd-policy", port::POLICY));
    env.set(
        "POLICY_WORKLOAD",
        format!("{{\"ns\":\"$(_pod_ns)\", \"pod\":\"$(_pod_name)\"{exported_services}}}\n"),
    );
    env.set("INBOUND_DEFAULT_POLICY", &proxy.default_inbound_policy);
    env.set("POLICY_CLUSTER_NETWORKS", &values.cluster_networks);
    env.set("CONTROL_STREAM_INITIAL_TIMEOUT", &streams.initial_timeout);
    env.set("CONTROL_STREAM_IDLE_TIMEOUT", &streams.idle_timeout);
    env.set("CONTROL_STREAM_LIFETIME", &streams.lifetime);
}

fn set_traffic(env: &mut EnvBuilder, values: &Values, target: &InjectionTarget<'_>, mode: ProxyMode) {
    let proxy = &values.proxy;
    env.set("INBOUND_CONNECT_TIMEOUT", &proxy.inbound_connect_timeout);
    env.set("OUTBOUND_CONNECT_TIMEOUT", &proxy.outbound_connect_timeout);
    env.set(
        "OUTBOUND_DISCOVERY_IDLE_TIMEOUT",
        &proxy.outbound_discovery_cache_unused_timeout,
    );
    env.set(
        "INBOUND_DISCOVERY_IDLE_TIMEOUT",
        &proxy.inbound_discovery_cache_unused_timeout,
    );
    if proxy.disable_outbound_protocol_detect_timeout {
        env.set("OUTBOUND_DETECT_TIMEOUT", "365d");
    }
    if proxy.disable_inbound_protocol_detect_timeout {
        env.set("INBOUND_DETECT_TIMEOUT", "365d");
    }
    let unspecified_addr = |port: u16| match values.disable_ipv6 {
        true => SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
        false => SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)),
    };
    env.set("CONTROL_LISTEN_ADDR", unspecified_addr(proxy.ports.control));
    env.set("ADMIN_LISTEN_ADDR", unspecified_addr(proxy.ports.admin));
    let outbound = SocketAddr::from((Ipv4Addr::LOCALHOST, proxy.ports.outbound));
    env.set("OUTBOUND_LISTEN_ADDR", outbound);
    match values.disable_ipv6 {
        true => env.set("OUTBOUND_LISTEN_ADDRS", outbound),
        false => {
            let second = SocketAddr::from((Ipv6Addr::LOCALHOST, proxy.ports.outbound));
            env.set("OUTBOUND_LISTEN_ADDRS", format!("{outbound},{second}"));
        }
    }
    env.set("INBOUND_LISTEN_ADDR", unspecified_addr(proxy.ports.inbound));
    if proxy.inbound_mode == InboundMode::Tproxy {
        env.set_unprefixed("TULLE_PROXY_INBOUND_MODE", "tproxy");
    }
    env.set_from_field("LINKERD2_PROXY_INBOUND_IPS", "status.podIPs");
    env.set("INBOUND_PORTS", ports::inbound_ports(target.spec));
    let suffix = format!("svc.{}.", values.cluster_domain);
    if proxy.is_gateway {
        env.set("INBOUND_GATEWAY_SUFFIXES", &suffix);
    }
    if proxy.is_ingress || mode == ProxyMode::Ingress {
        env.set("INGRESS_MODE", true);
    }
    match proxy.enable_external_profiles {
        true => env.set("DESTINATION_PROFILE_SUFFIXES", "."),
        false => env.set("DESTINATION_PROFILE_SUFFIXES", &suffix),
    }
    env.set("INBOUND_ACCEPT_KEEPALIVE", "10000ms");
    env.set("OUTBOUND_CONNECT_KEEPALIVE", "10000ms");
    env.set("INBOUND_ACCEPT_USER_TIMEOUT", "30s");
    env.set("OUTBOUND_CONNECT_USER_TIMEOUT", "30s");
    env.set("OUTBOUND_METRICS_HOSTNAME_LABELS", proxy.metrics.hostname_labels);
}

fn set_tracing(
    env: &mut EnvBuilder,
    config: &Config,
    values: &Values,
    target: &InjectionTarget<'_>,
    annotations: &Annotations,
) {
    let tracing = &values.proxy.tracing;
    if !tracing.enabled {
        return;
    }
    let collector = &tracing.collector;
    env.set("TRACE_ATTRIBUTES_PATH", format!("{PODINFO_DIR}/labels"));
    env.set("TRACE_ANNOTATIONS_PATH", format!("{PODINFO_DIR}/annotations"));
    env.set("TRACE_PROTOCOL", "opentelemetry");
    env.set("TRACE_SERVICE_NAME", trace_service_name(values, target, annotations));
    env.set("TRACE_COLLECTOR_SVC_ADDR", &collector.endpoint);
    let account = &collector.mesh_identity;
    let name = service_account_identity(config, values, &account.service_account_name, &account.namespace);
    env.set("TRACE_COLLECTOR_SVC_NAME", name);
    let sidecar_attributes = [
        ("k8s.pod.ip", "$(_pod_ip)"),
        ("k8s.pod.uid", "$(_pod_uid)"),
        ("k8s.container.name", "$(_pod_containerName)"),
    ];
    let chart_attributes = tracing.labels.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let pod_attributes = annotations
        .iter()
        .filter_map(|(key, value)| Some((key.strip_prefix(annotation::TRACE_RESOURCE_PREFIX)?, value.as_str())));
    // For duplicate keys, the first position and the last value apply.
    let mut attributes: Vec<(&str, &str)> = Vec::new();
    for (key, value) in sidecar_attributes
        .into_iter()
        .chain(chart_attributes)
        .chain(pod_attributes)
    {
        match attributes.iter_mut().find(|(other, _)| *other == key) {
            Some(known) => known.1 = value,
            None => attributes.push((key, value)),
        }
    }
    // Each line is one attribute, so line breaks in values are removed.
    let line = |(key, value): &(&str, &str)| format!("{key}={}\n", value.replace(['\n', '\r'], " "));
    env.set(
        "TRACE_EXTRA_ATTRIBUTES",
        attributes.iter().map(line).collect::<String>(),
    );
}

/// The service name in traces, by the conventions of OpenTelemetry: from the pod's annotation, otherwise from its labels, otherwise
/// from the chart.
fn trace_service_name(values: &Values, target: &InjectionTarget<'_>, annotations: &Annotations) -> String {
    let labels = target.metadata.and_then(|meta| meta.labels.as_ref());
    let label = |key: &str| labels.and_then(|labels| labels.get(key));
    let annotated = annotations.get(&format!("{}service.name", annotation::TRACE_RESOURCE_PREFIX));
    let name = annotated
        .or_else(|| label(label::APP_INSTANCE))
        .or_else(|| label(label::APP_NAME));
    name.unwrap_or(&values.proxy.tracing.trace_service_name).clone()
}

fn set_protocol_parameters(env: &mut EnvBuilder, direction: &str, parameters: &ProtocolParameters) {
    for (scope, protocols) in &parameters.0 {
        for (protocol, parameters) in protocols {
            for (parameter, value) in parameters {
                let name = [scope, protocol, parameter]
                    .map(|part| upper_snake_case(part))
                    .join("_");
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                env.set(&format!("{direction}_{name}"), value);
            }
        }
    }
}

/// Converts `keepAliveInterval` to `KEEP_ALIVE_INTERVAL`.
fn upper_snake_case(camel: &str) -> String {
    let mut name = String::new();
    for ch in camel.chars() {
        if ch.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(ch.to_ascii_uppercase());
    }
    name
}

fn set_identity(env: &mut EnvBuilder, config: &Config, values: &Values, exported_services: &str) {
    let pod = "\"ns\":\"$(_pod_ns)\", \"nodeName\":\"$(_pod_nodeName)\", \"pod\":\"$(_pod_name)\"";
    env.set("DESTINATION_CONTEXT", format!("{{{pod}{exported_services}}}"));
    env.set_from_field("_pod_sa", "spec.serviceAccountName");
    env.set_unprefixed("_l5d_ns", &config.control_plane_namespace);
    env.set_unprefixed("_l5d_trustdomain", values.trust_domain());
    env.set("IDENTITY_DIR", END_ENTITY_DIR);
    env.set("IDENTITY_TRUST_ANCHORS", values.trust_anchors());
    let token = match values.identity.service_account_token_projection {
        true => format!("{TOKEN_DIR}/{TOKEN_NAME}"),
        false => format!("{SERVICE_ACCOUNT_DIR}/token"),
    };
    env.set("IDENTITY_TOKEN_FILE", token);
    env.set(
        "IDENTITY_SVC_ADDR",
        service_addr(config, values, "linkerd-identity-headless", port::IDENTITY),
    );
    env.set(
        "IDENTITY_LOCAL_NAME",
        service_account_identity(config, values, "$(_pod_sa)", "$(_pod_ns)"),
    );
    let component = |name: &str| service_account_identity(config, values, name, &config.control_plane_namespace);
    env.set("IDENTITY_SVC_NAME", component("linkerd-identity"));
    env.set("DESTINATION_SVC_NAME", component("linkerd-destination"));
    env.set("POLICY_SVC_NAME", component("linkerd-destination"));
    let tap = &values.proxy.tap;
    if tap.enabled {
        let namespace = match tap.namespace.as_str() {
            "" => &config.control_plane_namespace,
            namespace => namespace,
        };
        env.set(
            "TAP_SVC_NAME",
            service_account_identity(config, values, &tap.service_account_name, namespace),
        );
    }
}

/// The address of a Service of the control plane. The final dot of the name prevents lookups in search domains.
fn service_addr(config: &Config, values: &Values, name: &str, port: u16) -> String {
    let (namespace, domain) = (&config.control_plane_namespace, &values.cluster_domain);
    format!("{name}.{namespace}.svc.{domain}.:{port}")
}

fn service_account_identity(config: &Config, values: &Values, service_account: &str, namespace: &str) -> String {
    let (control_plane, domain) = (&config.control_plane_namespace, values.trust_domain());
    format!("{service_account}.{namespace}.serviceaccount.identity.{control_plane}.{domain}")
}

struct EnvBuilder(Vec<EnvVar>);

impl EnvBuilder {
    /// Adds a variable of the proxy; `name` is without the prefix `LINKERD2_PROXY_`.
    fn set(&mut self, name: &str, value: impl ToString) {
        self.set_unprefixed(&format!("LINKERD2_PROXY_{name}"), value);
    }

    fn set_unless_empty(&mut self, name: &str, value: &str) {
        if !value.is_empty() {
            self.set(name, value);
        }
    }

    fn set_unprefixed(&mut self, name: &str, value: impl ToString) {
        self.0.push(EnvVar {
            name: name.to_owned(),
            value: Some(value.to_string()),
            ..EnvVar::default()
        });
    }

    /// Adds a variable that the kubelet sets from a field of the pod.
    fn set_from_field(&mut self, name: &str, path: &str) {
        let field_ref = ObjectFieldSelector {
            field_path: path.to_owned(),
            ..ObjectFieldSelector::default()
        };
        self.0.push(EnvVar {
            name: name.to_owned(),
            value_from: Some(EnvVarSource {
                field_ref: Some(field_ref),
                ..EnvVarSource::default()
            }),
            ..EnvVar::default()
        });
    }
}
