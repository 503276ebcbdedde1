//! The part of the chart's values that affects a sidecar.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Capabilities, EnvVar, SecurityContext};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::resources::labels::Selector;

/// Invalid values.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ValuesError {
    #[error("decoding values; expected the YAML of the chart's values")]
    Decode(#[source] serde_yaml_ng::Error),
    #[error("decoding values; expected values of the chart tulle-control-plane")]
    Fields(#[source] serde_json::Error),
    #[error("proxyInit.iptablesMode {0:?} is none of: nft, legacy, native")]
    IptablesMode(String),
    #[error("proxy.inboundMode {0:?} is none of: redirect, tproxy")]
    InboundMode(String),
}

/// The values of the chart, with the chart's names and defaults.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Values {
    #[serde(deserialize_with = "string_or_scalar")]
    pub linkerd_version: String,
    pub cluster_domain: String,
    /// Networks in CIDR notation, separated by commas.
    pub cluster_networks: String,
    #[serde(rename = "identityTrustAnchorsPEM")]
    pub identity_trust_anchors_pem: String,
    /// Empty means the cluster domain; see [`Values::trust_domain`].
    pub identity_trust_domain: String,
    pub identity: Identity,
    #[serde(rename = "disableIPv6")]
    pub disable_ipv6: bool,
    pub cni_enabled: bool,
    pub image_pull_policy: String,
    pub proxy: Proxy,
    pub proxy_init: ProxyInit,
    pub network_validator: NetworkValidator,
    pub debug_container: DebugContainer,
    pub proxy_injector: ProxyInjector,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Identity {
    pub service_account_token_projection: bool,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Proxy {
    pub image: Image,
    pub log_level: String,
    pub log_format: String,
    /// `off` or `insecure`.
    #[serde(rename = "logHTTPHeaders", deserialize_with = "log_http_headers")]
    pub log_http_headers: String,
    /// `apache` or `json`. Empty means no access log.
    #[serde(deserialize_with = "access_log")]
    pub access_log: String,
    pub ports: Ports,
    pub uid: i64,
    /// Negative means the group of the image.
    pub gid: i64,
    /// Deprecated in favour of `runtime.workers.minimum`.
    #[serde(deserialize_with = "string_or_scalar")]
    pub cores: String,
    pub runtime: Runtime,
    pub resources: Resources,
    #[serde(rename = "await")]
    pub await_proxy: bool,
    pub native_sidecar: bool,
    pub wait_before_exit_seconds: u64,
    pub shutdown_grace_period: String,
    #[serde(deserialize_with = "string_or_scalar")]
    pub opaque_ports: String,
    pub default_inbound_policy: String,
    pub inbound_mode: InboundMode,
    /// Whether probes that a sidecar would break are sent to the proxy; set by an annotation.
    #[serde(skip)]
    pub rewrite_probes: bool,
    #[serde(deserialize_with = "string_or_scalar")]
    pub require_identity_on_inbound_ports: String,
    #[serde(rename = "requireTLSOnInboundPorts", deserialize_with = "string_or_scalar")]
    pub require_tls_on_inbound_ports: String,
    pub enable_external_profiles: bool,
    pub enable_shutdown_endpoint: bool,
    pub is_gateway: bool,
    pub is_ingress: bool,
    pub outbound_connect_timeout: String,
    pub inbound_connect_timeout: String,
    pub outbound_discovery_cache_unused_timeout: String,
    pub inbound_discovery_cache_unused_timeout: String,
    pub disable_outbound_protocol_detect_timeout: bool,
    pub disable_inbound_protocol_detect_timeout: bool,
    pub control: ControlClient,
    /// Each parameter becomes an environment variable of the proxy.
    pub inbound: ProtocolParameters,
    pub outbound: ProtocolParameters,
    pub liveness_probe: Probe,
    pub readiness_probe: Probe,
    pub startup_probe: StartupProbe,
    pub metrics: Metrics,
    pub tracing: Tracing,
    pub tap: Tap,
    pub additional_env: Vec<EnvVar>,
    pub experimental_env: Vec<EnvVar>,
    /// Replaces the sidecar's security context, unless it is empty. Its user becomes `uid`.
    #[serde(deserialize_with = "none_if_empty")]
    pub security_context: Option<SecurityContext>,
    /// Replaces the capabilities in the sidecar's security context, unless it is empty.
    #[serde(deserialize_with = "none_if_empty")]
    pub capabilities: Option<Capabilities>,
}

/// Values by scope, protocol and parameter, for example `server.http2.keepAliveInterval`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(transparent)]
pub struct ProtocolParameters(pub BTreeMap<String, BTreeMap<String, BTreeMap<String, Value>>>);

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Image {
    pub name: String,
    /// Empty means the version of the mesh.
    #[serde(deserialize_with = "string_or_scalar")]
    pub version: String,
    /// Empty means the value `imagePullPolicy`.
    pub pull_policy: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Ports {
    pub admin: u16,
    pub control: u16,
    pub inbound: u16,
    pub outbound: u16,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Runtime {
    pub workers: Workers,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Workers {
    #[serde(deserialize_with = "string_or_scalar")]
    pub minimum: String,
    #[serde(deserialize_with = "string_or_scalar")]
    pub maximum: String,
    #[serde(rename = "maximumCPURatio", deserialize_with = "string_or_scalar")]
    pub maximum_cpu_ratio: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct Resources {
    pub cpu: Constraints,
    pub memory: Constraints,
    pub ephemeral_storage: Constraints,
}

/// Kubernetes quantities; empty means not set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Constraints {
    #[serde(deserialize_with = "string_or_scalar")]
    pub request: String,
    #[serde(deserialize_with = "string_or_scalar")]
    pub limit: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ControlClient {
    pub streams: StreamTimeouts,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StreamTimeouts {
    pub initial_timeout: String,
    pub idle_timeout: String,
    pub lifetime: String,
}

/// Times of a probe, in seconds.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Probe {
    /// Default if absent: 10 for liveness, 0 for readiness.
    pub initial_delay_seconds: Option<i32>,
    pub timeout_seconds: i32,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StartupProbe {
    pub initial_delay_seconds: i32,
    pub period_seconds: i32,
    pub failure_threshold: i32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Metrics {
    pub hostname_labels: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Tracing {
    #[serde(alias = "enable")]
    pub enabled: bool,
    pub trace_service_name: String,
    /// Attributes of every trace.
    #[serde(deserialize_with = "strings_or_scalars")]
    pub labels: BTreeMap<String, String>,
    pub collector: Collector,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Collector {
    pub endpoint: String,
    pub mesh_identity: ServiceAccount,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceAccount {
    pub service_account_name: String,
    pub namespace: String,
}

/// The client that is allowed to tap the proxy.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Tap {
    pub enabled: bool,
    pub service_account_name: String,
    pub namespace: String,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProxyInit {
    pub iptables_mode: IptablesMode,
    #[serde(deserialize_with = "string_or_scalar")]
    pub ignore_inbound_ports: String,
    #[serde(deserialize_with = "string_or_scalar")]
    pub ignore_outbound_ports: String,
    #[serde(deserialize_with = "string_or_scalar")]
    pub skip_subnets: String,
    /// `drop` or `allow`: the handling of inbound IPv6 connections if IPv6 is not redirected.
    #[serde(rename = "unredirectedIPv6")]
    pub unredirected_ipv6: String,
    pub close_wait_timeout_secs: u64,
    pub log_level: String,
    pub log_format: String,
    pub privileged: bool,
    pub run_as_root: bool,
    pub run_as_user: i64,
    pub run_as_group: i64,
    pub xt_mount_path: MountPath,
}

/// How inbound connections are redirected to the proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum InboundMode {
    #[default]
    Redirect,
    /// Transparent: the application sees the client's address.
    Tproxy,
}

/// The tool that the init container sets up the redirection with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum IptablesMode {
    /// `iptables-nft`: the iptables programs on nftables.
    #[default]
    Nft,
    /// `iptables-legacy`: the iptables programs on the kernel's iptables.
    Legacy,
    /// nftables over netlink, without the iptables programs.
    Native,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct MountPath {
    pub mount_path: String,
    pub name: String,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NetworkValidator {
    pub log_level: String,
    pub log_format: String,
    /// Depends on the address family if empty, like `listen_addr`.
    pub connect_addr: String,
    pub listen_addr: String,
    pub timeout: String,
    #[serde(deserialize_with = "none_if_empty")]
    pub security_context: Option<SecurityContext>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DebugContainer {
    pub image: Image,
    /// Whether the container is added, if it has an image; set by an annotation.
    #[serde(skip)]
    pub enabled: bool,
}

/// Selectors of the webhook configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProxyInjector {
    pub namespace_selector: Option<Selector>,
    pub object_selector: Option<Selector>,
}

impl Values {
    /// Reads the YAML of a values file. Absent and null values have their defaults.
    ///
    /// # Errors
    /// Fails if the text is not YAML or a value is invalid.
    pub fn from_yaml(text: &str) -> Result<Self, ValuesError> {
        let mut value: Value = serde_yaml_ng::from_str(text).map_err(ValuesError::Decode)?;
        drop_nulls(&mut value);
        if value.is_null() {
            return Ok(Self::default());
        }
        let mut values: Self = serde_json::from_value(value).map_err(ValuesError::Fields)?;
        // A file can set the version of the image without its name.
        let image = &mut values.proxy.image;
        if image.name.is_empty() {
            PROXY_IMAGE.clone_into(&mut image.name);
        }
        // The user of the security context becomes `proxy.uid`. The group does not become `proxy.gid`, because that group is
        // excluded from redirection: other containers that run as the group of the security context would bypass the proxy.
        let security = values.proxy.security_context.as_ref();
        let user = security.and_then(|security| security.run_as_user);
        values.proxy.uid = user.unwrap_or(values.proxy.uid);
        Ok(values)
    }

    pub fn trust_domain(&self) -> &str {
        match self.identity_trust_domain.as_str() {
            "" => &self.cluster_domain,
            domain => domain,
        }
    }

    /// Trust anchors without the final line break that some ConfigMaps have.
    pub fn trust_anchors(&self) -> &str {
        self.identity_trust_anchors_pem.trim()
    }

    /// The default version of images.
    pub fn version(&self) -> &str {
        match self.linkerd_version.as_str() {
            "" => env!("CARGO_PKG_VERSION"),
            version => version,
        }
    }
}

/// Removes nulls: charts write `key: null` for unset values.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// Accepts a string, number or boolean, because in YAML an unquoted number or boolean is not a string.
fn string_or_scalar<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    match Value::deserialize(from)? {
        Value::String(text) => Ok(text),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(flag) => Ok(flag.to_string()),
        other => Err(D::Error::custom(format!("{other} is not a string, number or boolean"))),
    }
}

fn strings_or_scalars<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    let map = BTreeMap::<String, Value>::deserialize(from)?;
    let entries = map.into_iter().map(|(key, value)| {
        let value = string_or_scalar(value).map_err(D::Error::custom)?;
        Ok((key, value))
    });
    entries.collect()
}

/// In YAML 1.1, `off` without quotes is the boolean `false`.
fn log_http_headers<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = string_or_scalar(from)?;
    Ok(if text == "false" { "off".to_owned() } else { text })
}

/// `false` and `none` mean no access log.
fn access_log<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = string_or_scalar(from)?;
    Ok(if text == "false" || text == "none" {
        String::new()
    } else {
        text
    })
}

impl TryFrom<String> for InboundMode {
    type Error = ValuesError;

    fn try_from(text: String) -> Result<Self, ValuesError> {
        match text.as_str() {
            "redirect" => Ok(Self::Redirect),
            "tproxy" => Ok(Self::Tproxy),
            _ => Err(ValuesError::InboundMode(text)),
        }
    }
}

impl TryFrom<String> for IptablesMode {
    type Error = ValuesError;

    fn try_from(text: String) -> Result<Self, ValuesError> {
        match text.as_str() {
            "nft" => Ok(Self::Nft),
            "legacy" => Ok(Self::Legacy),
            "native" => Ok(Self::Native),
            _ => Err(ValuesError::IptablesMode(text)),
        }
    }
}

/// Decodes `{}` as `None`. Linkerd's chart writes `{}` for unset values, which must not remove the default restrictions.
fn none_if_empty<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: Deserialize<'de> + Default + PartialEq,
    D: Deserializer<'de>,
{
    let value = Option::<T>::deserialize(deserializer)?;
    Ok(value.filter(|value| *value != T::default()))
}

pub(super) const PROXY_IMAGE: &str = "ghcr.io/tulle-mesh/proxy";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_values_have_the_defaults_of_the_chart() {
        assert_eq!(Values::from_yaml("").unwrap(), Values::default());
        assert_eq!(Values::from_yaml("proxy: null").unwrap(), Values::default());
        let values = Values::from_yaml("proxy: {cores: null, ports: {inbound: 14143}}").unwrap();
        assert_eq!((values.proxy.ports.inbound, values.proxy.ports.admin), (14143, 4191));
        assert_eq!(values.proxy.inbound, ProtocolParameters::keep_alive());
    }

    #[test]
    fn the_chart_and_this_module_have_the_same_defaults() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/tulle-control-plane/values.yaml");
        let mut values = Values::from_yaml(&std::fs::read_to_string(path).unwrap()).unwrap();
        // The chart contains defaults that this module leaves empty.
        values.proxy_injector = ProxyInjector::default();
        let probes = (
            values.proxy.liveness_probe.initial_delay_seconds,
            values.proxy.readiness_probe.initial_delay_seconds,
        );
        assert_eq!(probes, (Some(10), Some(0)));
        values.proxy.liveness_probe.initial_delay_seconds = None;
        values.proxy.readiness_probe.initial_delay_seconds = None;
        assert_eq!(values, Values::default());
    }

    #[test]
    fn numbers_are_accepted_as_strings() {
        let yaml = "{proxy: {cores: 2, opaquePorts: 25, image: {version: 1.5}, resources: {cpu: {limit: 2}}}}";
        let proxy = Values::from_yaml(yaml).unwrap().proxy;
        assert_eq!(
            (
                proxy.cores.as_str(),
                proxy.opaque_ports.as_str(),
                proxy.image.version.as_str()
            ),
            ("2", "25", "1.5")
        );
        assert_eq!(proxy.resources.cpu.limit, "2");
    }

    #[test]
    fn every_spelling_that_turns_logs_off_in_the_chart_is_accepted() {
        for (headers, access) in [("off", "false"), ("false", "none"), ("'off'", "''")] {
            let yaml = format!("proxy: {{logHTTPHeaders: {headers}, accessLog: {access}}}");
            let proxy = Values::from_yaml(&yaml).unwrap().proxy;
            assert_eq!((&*proxy.log_http_headers, &*proxy.access_log), ("off", ""), "{yaml}");
        }
    }

    #[test]
    fn every_type_that_the_chart_permits_can_be_decoded() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../charts/tulle-control-plane/values.schema.json"
        );
        let schema: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let samples = samples(&schema, &schema);
        assert!(samples.len() > 300, "{}", samples.len());
        for sample in samples {
            if let Err(err) = Values::from_yaml(&sample.to_string()) {
                panic!("{sample}: {:#}", anyhow::Error::new(err));
            }
        }
    }

    /// Values that a part of a JSON schema permits: for each type, and each property, at least one.
    fn samples(schema: &Value, part: &Value) -> Vec<Value> {
        if let Some(name) = part["$ref"].as_str() {
            let name = name.strip_prefix("#/definitions/").unwrap();
            return samples(schema, &schema["definitions"][name]);
        }
        if let Some(choices) = part["enum"].as_array() {
            return choices.clone();
        }
        if let Some(parts) = part["anyOf"].as_array() {
            return parts.iter().flat_map(|part| samples(schema, part)).collect();
        }
        let types = part["type"].as_array().cloned();
        let types = types.unwrap_or_else(|| vec![part["type"].clone()]);
        types
            .iter()
            .flat_map(|kind| samples_of_type(schema, part, kind))
            .collect()
    }

    fn samples_of_type(schema: &Value, part: &Value, kind: &Value) -> Vec<Value> {
        let number = |limit: &str, default: i32| part[limit].as_i64().unwrap_or_else(|| default.into());
        match kind.as_str().unwrap() {
            "string" => vec!["x".into()],
            "number" => vec![1.5.into()],
            "integer" => vec![number("minimum", -1).into(), number("maximum", i32::MAX).into()],
            "boolean" => vec![true.into(), false.into()],
            "null" => vec![Value::Null],
            "array" => {
                let items = part.get("items").map(|item| samples(schema, item));
                let lists = items.into_iter().flatten().map(|item| Value::Array(vec![item]));
                lists.chain([Value::Array(Vec::new())]).collect()
            }
            "object" => {
                let required = part["required"].as_array().into_iter().flatten();
                let least: serde_json::Map<_, _> = required
                    .map(|key| (key.as_str().unwrap().to_owned(), "x".into()))
                    .collect();
                let properties = part["properties"].as_object().cloned().unwrap_or_default();
                let others = part["additionalProperties"]
                    .is_object()
                    .then(|| &part["additionalProperties"]);
                let all = properties.iter().map(|(key, part)| (&**key, part));
                let with_one = all.chain(others.map(|part| ("x", part))).flat_map(|(key, part)| {
                    let with = |value| {
                        let mut object = least.clone();
                        object.insert(key.to_owned(), value);
                        Value::Object(object)
                    };
                    samples(schema, part).into_iter().map(with).collect::<Vec<_>>()
                });
                with_one.chain([Value::Object(least.clone())]).collect()
            }
            other => panic!("{other}"),
        }
    }

    #[test]
    fn invalid_values_are_errors_with_the_reason() {
        for (yaml, reason) in [
            ("proxyInit: {iptablesMode: plain}", "nft, legacy, native"),
            ("proxy: {ports: {inbound: 70000}}", "70000"),
            ("proxy: {uid: root}", "root"),
            ("proxy: {cores: [1]}", "not a string, number or boolean"),
            ("[1", "YAML"),
        ] {
            let error = anyhow::Error::new(Values::from_yaml(yaml).unwrap_err());
            assert!(format!("{error:#}").contains(reason), "{yaml}: {error:#}");
        }
    }

    #[test]
    fn the_trust_domain_is_the_cluster_domain_unless_set() {
        let domain = |yaml| Values::from_yaml(yaml).unwrap().trust_domain().to_owned();
        assert_eq!(domain("clusterDomain: example.org"), "example.org");
        assert_eq!(domain("identityTrustDomain: mesh.test"), "mesh.test");
    }
}
