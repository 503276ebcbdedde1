//! The custom resource `Link`: another cluster, whose exported Services are mirrored in this one.

use std::collections::BTreeMap;
use std::time::Duration;

use kube::ResourceExt as _;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Deserialize;
use serde_json::Value;
use tulle_core::dns_names::is_dns_label;

use crate::resources::go_duration;
use crate::resources::labels::Selector;

/// A valid Link.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Link {
    pub(super) name: String,
    /// The name of the other cluster: the suffix of its mirrors, and the value of their label.
    pub(crate) cluster: String,
    /// The DNS domain of the other cluster.
    pub(crate) domain: String,
    /// The name of the Secret with the kubeconfig.
    pub(crate) credentials_secret: String,
    /// `None` for clusters with one flat network.
    pub(crate) gateway: Option<Gateway>,
    pub(crate) probe: Option<ProbeSpec>,
    /// Services that are reached through the gateway.
    pub(super) gateway_selector: ExportSelector,
    /// Services whose pods are reached directly.
    pub(super) remote_discovery_selector: ExportSelector,
    /// Services that are members of a federated Service.
    pub(super) federated_selector: ExportSelector,
    pub(super) excluded_labels: Exclusions,
    pub(super) excluded_annotations: Exclusions,
    /// Settings that are replaced by their defaults, because their values are invalid or missing.
    pub(super) warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gateway {
    /// IP addresses and DNS names.
    pub(crate) hosts: Vec<String>,
    pub(crate) port: u16,
    /// The TLS name that the certificate of the gateway must have. `None` means plaintext connections to the gateway.
    pub(super) identity: Option<String>,
}

/// Settings of the probes of a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProbeSpec {
    pub(crate) path: String,
    /// The port of the gateway that answers probes.
    pub(crate) port: u16,
    pub(crate) period: Duration,
    pub(crate) timeout: Duration,
    /// Consecutive failures after which the gateway counts as unhealthy.
    pub(crate) failure_threshold: u32,
}

/// A selector of exported Services. In contrast to selectors of Kubernetes, an absent or empty selector selects no Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct ExportSelector(Option<Selector>);

/// Names of labels or annotations that are not copied to mirrors: exact names, or `prefix/*`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct Exclusions(Vec<String>);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("spec is invalid: {0}")]
    Spec(String),
    #[error("spec.{field} is invalid: {cause}")]
    Selector { field: &'static str, cause: String },
    #[error("spec.{0} is empty")]
    Empty(&'static str),
    #[error(
        "spec.targetClusterName {0:?} is not a DNS label: at most 63 lower-case letters, digits and '-', with no '-' at the start \
         or end"
    )]
    ClusterName(String),
    #[error("spec.{field} {value:?} is not a port; accepted: 1-65535")]
    Port { field: &'static str, value: String },
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawSpec {
    target_cluster_name: String,
    target_cluster_domain: String,
    cluster_credentials_secret: String,
    gateway_address: String,
    gateway_port: String,
    gateway_identity: String,
    probe_spec: RawProbeSpec,
    selector: Value,
    remote_discovery_selector: Value,
    federated_service_selector: Value,
    excluded_annotations: Exclusions,
    excluded_labels: Exclusions,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RawProbeSpec {
    path: String,
    port: String,
    period: String,
    timeout: String,
    failure_threshold: String,
}

impl Link {
    /// The resource in the API version that is read and written. Older versions do not have all fields.
    pub(super) fn resource() -> ApiResource {
        ApiResource::from_gvk(&GroupVersionKind::gvk("multicluster.linkerd.io", "v1alpha3", "Link"))
    }

    /// The name of the cluster in a Link whose other fields may be invalid.
    pub(crate) fn cluster_name(object: &DynamicObject) -> Option<&str> {
        object.data["spec"]["targetClusterName"].as_str()
    }

    /// The name of the cluster in metrics. It is that of the Link if the Link does not name a cluster.
    pub(super) fn metrics_cluster(object: &DynamicObject) -> String {
        let cluster = Self::cluster_name(object).filter(|cluster| !cluster.is_empty());
        cluster.map_or_else(|| object.name_any(), str::to_owned)
    }

    /// # Errors
    /// Fails if a required field is empty, or a value is invalid. An invalid selector must not select nothing: the mirrors of the
    /// Link would be deleted because of a typing error.
    pub(crate) fn parse(object: &DynamicObject) -> Result<Self, LinkError> {
        let spec = object.data.get("spec").cloned().unwrap_or(Value::Null);
        let raw: RawSpec = match spec {
            Value::Null => RawSpec::default(),
            spec => serde_json::from_value(spec).map_err(|err| LinkError::Spec(err.to_string()))?,
        };
        for (field, value) in [
            ("targetClusterName", &raw.target_cluster_name),
            ("targetClusterDomain", &raw.target_cluster_domain),
            ("clusterCredentialsSecret", &raw.cluster_credentials_secret),
        ] {
            if value.is_empty() {
                return Err(LinkError::Empty(field));
            }
        }
        if !is_dns_label(&raw.target_cluster_name) {
            return Err(LinkError::ClusterName(raw.target_cluster_name));
        }
        let mut warnings = Vec::new();
        let gateway = raw.gateway()?;
        if gateway.as_ref().is_some_and(|gateway| gateway.identity.is_none()) {
            warnings.push("gatewayIdentity is empty; connections to the gateway are not encrypted".to_owned());
        }
        Ok(Self {
            name: object.name_any(),
            gateway,
            probe: raw.probe_spec.parse(&mut warnings)?,
            warnings,
            cluster: raw.target_cluster_name,
            domain: raw.target_cluster_domain,
            credentials_secret: raw.cluster_credentials_secret,
            gateway_selector: parse_selector("selector", raw.selector)?,
            remote_discovery_selector: parse_selector("remoteDiscoverySelector", raw.remote_discovery_selector)?,
            federated_selector: parse_selector("federatedServiceSelector", raw.federated_service_selector)?,
            excluded_labels: raw.excluded_labels,
            excluded_annotations: raw.excluded_annotations,
        })
    }
}

impl RawSpec {
    fn gateway(&self) -> Result<Option<Gateway>, LinkError> {
        let hosts: Vec<String> = comma_separated(&self.gateway_address).map(str::to_owned).collect();
        if hosts.is_empty() {
            return Ok(None);
        }
        Ok(Some(Gateway {
            hosts,
            port: parse_port("gatewayPort", &self.gateway_port)?,
            identity: (!self.gateway_identity.is_empty()).then(|| self.gateway_identity.clone()),
        }))
    }
}

impl RawProbeSpec {
    /// Returns `None` if there is no path. An invalid period, timeout or threshold is replaced by its default, so that the gateway
    /// is still probed.
    fn parse(&self, warnings: &mut Vec<String>) -> Result<Option<ProbeSpec>, LinkError> {
        if self.path.is_empty() {
            return Ok(None);
        }
        let mut duration = |field: &str, value: &str, default: Duration| match go_duration::parse(value) {
            Ok(duration) if !duration.is_zero() => duration,
            _ => {
                if !value.is_empty() {
                    warnings.push(format!(
                        "probeSpec.{field} {value:?} is not a duration; {default:?} is used"
                    ));
                }
                default
            }
        };
        let period = duration("period", &self.period, DEFAULT_PERIOD);
        let timeout = duration("timeout", &self.timeout, DEFAULT_TIMEOUT);
        let failure_threshold = self.failure_threshold.parse().ok().filter(|n| *n > 0);
        if failure_threshold.is_none() && !self.failure_threshold.is_empty() {
            warnings.push(format!(
                "probeSpec.failureThreshold {:?} is not a positive number; {DEFAULT_FAILURE_THRESHOLD} is used",
                self.failure_threshold
            ));
        }
        Ok(Some(ProbeSpec {
            path: match self.path.starts_with('/') {
                true => self.path.clone(),
                false => format!("/{}", self.path),
            },
            port: parse_port("probeSpec.port", &self.port)?,
            period,
            timeout,
            failure_threshold: failure_threshold.unwrap_or(DEFAULT_FAILURE_THRESHOLD),
        }))
    }
}

impl ExportSelector {
    pub(super) fn new(selector: Selector) -> Self {
        Self(Some(selector))
    }

    pub(super) fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let selector = self.0.as_ref().filter(|selector| !selector.is_empty());
        selector.is_some_and(|selector| selector.matches_map(labels))
    }
}

impl Exclusions {
    pub(super) fn from_list(list: &str) -> Self {
        Self(comma_separated(list).map(str::to_owned).collect())
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|excluded| match excluded.strip_suffix('*') {
            Some(prefix) if prefix.ends_with('/') => name.starts_with(prefix),
            _ => name == excluded,
        })
    }
}

/// The non-empty parts of a comma-separated list, without surrounding spaces.
pub(super) fn comma_separated(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

fn parse_selector(field: &'static str, selector: Value) -> Result<ExportSelector, LinkError> {
    serde_json::from_value(selector).map_err(|err| LinkError::Selector {
        field,
        cause: err.to_string(),
    })
}

fn parse_port(field: &'static str, value: &str) -> Result<u16, LinkError> {
    match value.parse() {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(LinkError::Port {
            field,
            value: value.to_owned(),
        }),
    }
}

const DEFAULT_PERIOD: Duration = Duration::from_secs(3);
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
const DEFAULT_FAILURE_THRESHOLD: u32 = 3;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(spec: Value) -> Result<Link, LinkError> {
        let object = json!({
            "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
            "metadata": {"name": "east", "namespace": "multicluster"}, "spec": spec,
        });
        Link::parse(&serde_json::from_value(object).unwrap())
    }

    /// Parses a Link with the required fields and `more` fields.
    fn parse_with(more: Value) -> Result<Link, LinkError> {
        let mut spec = json!({
            "targetClusterName": "east", "targetClusterDomain": "east.test", "clusterCredentialsSecret": "cred",
        });
        let spec_fields = spec.as_object_mut().unwrap();
        spec_fields.extend(more.as_object().unwrap().clone());
        parse(spec)
    }

    #[test]
    fn a_link_without_a_gateway_needs_three_fields() {
        let link = parse_with(json!({"probeSpec": {}})).unwrap();
        assert_eq!((link.gateway, link.probe), (None, None));
        assert_eq!(parse(Value::Null), Err(LinkError::Empty("targetClusterName")));
        assert_eq!(
            parse_with(json!({"clusterCredentialsSecret": ""})),
            Err(LinkError::Empty("clusterCredentialsSecret"))
        );
        assert!(matches!(
            parse_with(json!({"gatewayAddress": 1})),
            Err(LinkError::Spec(_))
        ));
        // A comma would separate two members of a federated Service.
        for name in ["a,b", "east ", "East", "a@b"] {
            let error = parse_with(json!({"targetClusterName": name})).unwrap_err();
            assert_eq!(error, LinkError::ClusterName(name.to_owned()));
        }
    }

    #[test]
    fn a_gateway_has_trimmed_hosts_and_a_port() {
        let gateway = json!({"gatewayAddress": "192.0.2.7, gw.test ,", "gatewayPort": "4143", "gatewayIdentity": "gw"});
        let expected = Gateway {
            hosts: vec!["192.0.2.7".to_owned(), "gw.test".to_owned()],
            port: 4143,
            identity: Some("gw".to_owned()),
        };
        assert_eq!(parse_with(gateway).unwrap().gateway, Some(expected));
        for port in ["", "0", "70000", "http"] {
            let error = parse_with(json!({"gatewayAddress": "192.0.2.7", "gatewayPort": port})).unwrap_err();
            assert!(error.to_string().contains("accepted: 1-65535"), "{error}");
        }
        let link = parse_with(json!({"gatewayAddress": "192.0.2.7", "gatewayPort": "4143"})).unwrap();
        assert_eq!(link.gateway.unwrap().identity, None);
        assert!(
            link.warnings[0].contains("gatewayIdentity is empty"),
            "{:?}",
            link.warnings
        );
    }

    #[test]
    fn invalid_probe_settings_are_replaced_by_defaults() {
        for (spec, expected) in [
            (json!({"path": "ready", "port": "4191"}), (3, 30, 3)),
            (
                json!({"path": "/ready", "port": "4191", "period": "5s", "timeout": "1m", "failureThreshold": "2"}),
                (5, 60, 2),
            ),
            (
                json!({"path": "/ready", "port": "4191", "period": "soon", "timeout": "0s", "failureThreshold": "-1"}),
                (3, 30, 3),
            ),
        ] {
            let link = parse_with(json!({ "probeSpec": spec })).unwrap();
            assert_eq!(
                link.warnings.len(),
                if spec["period"] == "soon" { 3 } else { 0 },
                "{:?}",
                link.warnings
            );
            let probe = link.probe.unwrap();
            assert_eq!(probe.path, "/ready");
            let found = (probe.period.as_secs(), probe.timeout.as_secs(), probe.failure_threshold);
            assert_eq!(found, expected, "{spec}");
        }
    }

    #[test]
    fn empty_selectors_match_nothing() {
        let labels = BTreeMap::from([("mirror.linkerd.io/exported".to_owned(), "true".to_owned())]);
        for (selector, expected) in [
            (Value::Null, false),
            (json!({}), false),
            (json!({"matchLabels": {}}), false),
            (json!({"matchLabels": {"mirror.linkerd.io/exported": "true"}}), true),
            (
                json!({"matchExpressions": [{"key": "mirror.linkerd.io/exported", "operator": "Exists"}]}),
                true,
            ),
            (json!({"matchLabels": {"mirror.linkerd.io/exported": "other"}}), false),
        ] {
            let link = parse_with(json!({ "selector": selector })).unwrap();
            assert_eq!(link.gateway_selector.matches(&labels), expected, "{selector}");
        }
    }

    #[test]
    fn a_link_with_an_invalid_selector_is_invalid_and_the_selector_is_named() {
        for field in ["selector", "remoteDiscoverySelector", "federatedServiceSelector"] {
            for (expression, problem) in [
                (
                    json!({"key": "app", "operator": "In", "values": []}),
                    "In with 0 values",
                ),
                (
                    json!({"key": "app", "operator": "Exists", "values": ["a"]}),
                    "Exists with 1 values",
                ),
                (json!({"key": "app", "operator": "Near"}), "Near with 0 values"),
            ] {
                let selector = json!({"matchExpressions": [expression]});
                let error = parse_with(json!({ (field): selector })).unwrap_err().to_string();
                let expected = format!("spec.{field} is invalid: selector on app: {problem};");
                assert!(error.starts_with(&expected), "{error}");
            }
        }
    }

    #[test]
    fn exclusions_are_names_or_prefixes_that_end_with_a_slash() {
        let excluded = Exclusions(vec!["a".to_owned(), "evil/*".to_owned(), "b*".to_owned()]);
        for (name, expected) in [
            ("a", true),
            ("ab", false),
            ("evil/x", true),
            ("evil", false),
            ("evilcorp/x", false),
            ("bc", false),
        ] {
            assert_eq!(excluded.contains(name), expected, "{name}");
        }
    }
}
