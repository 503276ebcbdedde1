//! `ServiceProfile`: routes, retry budget and traffic split of one service name.

use std::time::Duration;

use http::Method;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Deserialize;
use tulle_core::dns_names::is_dns_subdomain;

use crate::model::profile::{DstOverride, RequestMatch, ResponseClass, ResponseMatch, RetryBudget, Route};
use crate::resources::go_duration;
use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::policy::reference::RawResource;
use crate::resources::route::RouteKind;
use crate::resources::route_support;

#[derive(Clone, Debug, PartialEq)]
pub struct ServiceProfile {
    pub meta: Meta,
    pub routes: Vec<Route>,
    pub retry_budget: Option<RetryBudget>,
    pub overrides: Vec<DstOverride>,
}

/// A destination of a traffic split: a Service, or one pod of a headless Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverrideDestination {
    /// The hostname of a pod of a headless Service.
    hostname: Option<String>,
    service: String,
    namespace: String,
    port: Option<u16>,
}

impl DstOverride {
    /// Parses the authority: the name of a Service with its namespace, and optionally `svc`, the cluster domain, a
    /// final dot and a port.
    ///
    /// # Errors
    /// Fails if the authority is not the name of a Service in the cluster.
    pub fn parse_destination(&self, cluster_domain: &str) -> Result<OverrideDestination, String> {
        let invalid = || {
            format!(
                "authority {:?} is not a Service of the cluster; expected <service>.<namespace>.svc.{cluster_domain}:<port>",
                self.authority
            )
        };
        let (host, port) = match self.authority.split_once(':') {
            None => (self.authority.as_str(), None),
            Some((host, port)) => {
                let port = port.parse().ok().filter(|port: &u16| *port > 0);
                (host, Some(port.ok_or_else(invalid)?))
            }
        };
        let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        // `<service>.<namespace>` needs no `svc`. A name with a pod's hostname in front does.
        let (name, has_svc) = if let Some(name) = host.strip_suffix(&format!(".svc.{cluster_domain}")) {
            (name, true)
        } else if let Some(name) = host.strip_suffix(".svc") {
            (name, true)
        } else {
            (host.as_str(), false)
        };
        let labels: Vec<&str> = name.split('.').collect();
        if !labels.iter().all(|label| is_dns_subdomain(label)) {
            return Err(invalid());
        }
        let (hostname, service, namespace) = match *labels {
            [service, namespace] => (None, service, namespace),
            [hostname, service, namespace] if has_svc => (Some(hostname.to_owned()), service, namespace),
            _ => return Err(invalid()),
        };
        Ok(OverrideDestination {
            hostname,
            service: service.to_owned(),
            namespace: namespace.to_owned(),
            port,
        })
    }
}

impl OverrideDestination {
    /// Returns the full name with its own port, or else with `port`.
    pub fn authority(&self, port: u16, cluster_domain: &str) -> String {
        let Self {
            hostname,
            service,
            namespace,
            port: own_port,
        } = self;
        let hostname = hostname
            .as_ref()
            .map_or_else(String::new, |hostname| format!("{hostname}."));
        let port = own_port.unwrap_or(port);
        format!("{hostname}{service}.{namespace}.svc.{cluster_domain}:{port}")
    }
}

impl ServiceProfile {
    /// Returns the Service that the profile is named after. `None` if its name is not that of a Service in this cluster domain.
    pub fn service(&self, cluster_domain: &str) -> Option<NamespacedName> {
        let name = &self.meta.name.name;
        let labels = name.strip_suffix(cluster_domain)?.strip_suffix(".svc.")?;
        let (service, namespace) = labels.split_once('.')?;
        (!namespace.contains('.')).then(|| NamespacedName::new(namespace, service))
    }

    /// Returns whether proxies use this profile instead of the routes of this kind that refer to the Service.
    pub fn replaces_routes(&self, kind: RouteKind) -> bool {
        match kind {
            RouteKind::PolicyHttp | RouteKind::GatewayHttp | RouteKind::Grpc => {
                !self.routes.is_empty() || !self.overrides.is_empty()
            }
            RouteKind::Tls | RouteKind::Tcp => !self.overrides.is_empty(),
        }
    }

    /// Returns the message that the profile replaces the routes of this Service.
    pub fn replacement_message(&self, service: &NamespacedName) -> String {
        format!(
            "ServiceProfile {} replaces the route for Service {service}, because it has routes or dstOverrides; remove the route, or \
             these fields",
            self.meta.name
        )
    }

    /// Checks for values that have the schema, but that proxies refuse or ignore.
    ///
    /// # Errors
    /// Fails at the first such part. The error contains its value and the accepted form.
    fn validate(&self) -> Result<(), String> {
        for route in &self.routes {
            let checked = validate_condition(&route.condition);
            checked.map_err(|error| format!("route {:?}: {error}", route.name))?;
        }
        // The profile name contains the cluster domain, unless the profile is for an external host.
        if let Some((_, cluster_domain)) = self.meta.name.name.split_once(".svc.") {
            for destination in &self.overrides {
                let checked = destination.parse_destination(cluster_domain);
                checked.map_err(|error| format!("spec.dstOverrides: {error}"))?;
            }
        }
        let Some(budget) = self.retry_budget else {
            return Ok(());
        };
        if !(MIN_RETRY_BUDGET_TTL..=MAX_RETRY_BUDGET_TTL).contains(&budget.ttl) {
            return Err(format!("spec.retryBudget.ttl {:?} is not in 1s-60s", budget.ttl));
        }
        if budget.ratio > MAX_RETRY_RATIO {
            return Err(format!(
                "spec.retryBudget.retryRatio {} is above {MAX_RETRY_RATIO}",
                budget.ratio
            ));
        }
        Ok(())
    }
}

fn validate_condition(condition: &RequestMatch) -> Result<(), String> {
    match condition {
        RequestMatch::All(all) | RequestMatch::Any(all) => all.iter().try_for_each(validate_condition),
        RequestMatch::Not(condition) => validate_condition(condition),
        RequestMatch::PathRegex(regex) => route_support::validate_regex(regex),
        RequestMatch::Method(method) => Method::from_bytes(method.as_bytes())
            .map(|_| ())
            .map_err(|_| format!("{method:?} is not an HTTP method")),
    }
}

/// The limits of proxies for the period of a retry budget.
const MIN_RETRY_BUDGET_TTL: Duration = Duration::from_secs(1);
const MAX_RETRY_BUDGET_TTL: Duration = Duration::from_secs(60);

/// Maximum retries per request that proxies accept.
const MAX_RETRY_RATIO: f32 = 1000.0;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Spec {
    #[serde(default)]
    routes: Vec<RawRoute>,
    retry_budget: Option<RawBudget>,
    #[serde(default)]
    dst_overrides: Vec<RawOverride>,
    #[serde(default)]
    opaque_ports: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawRoute {
    name: String,
    condition: RawRequestMatch,
    #[serde(default)]
    response_classes: Vec<RawResponseClass>,
    #[serde(default)]
    is_retryable: bool,
    timeout: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawRequestMatch {
    all: Option<Vec<Self>>,
    any: Option<Vec<Self>>,
    not: Option<Box<Self>>,
    path_regex: Option<String>,
    method: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawResponseClass {
    condition: RawResponseMatch,
    #[serde(default)]
    is_failure: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawResponseMatch {
    all: Option<Vec<Self>>,
    any: Option<Vec<Self>>,
    not: Option<Box<Self>>,
    status: Option<RawStatusRange>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStatusRange {
    #[serde(default)]
    min: u32,
    #[serde(default)]
    max: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawBudget {
    retry_ratio: f32,
    min_retries_per_second: u32,
    ttl: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawOverride {
    authority: String,
    weight: Quantity,
}

impl ServiceProfile {
    pub(super) fn from_raw(raw: RawResource<Spec>) -> Result<Self, String> {
        let Spec {
            routes: raw_routes,
            retry_budget,
            dst_overrides,
            opaque_ports,
        } = raw.spec;
        let meta = Meta::from_kubernetes(raw.metadata)?;
        if !opaque_ports.is_empty() {
            return Err(
                "spec.opaquePorts is not read; annotate the Service with config.linkerd.io/opaque-ports".to_owned(),
            );
        }
        let mut routes = Vec::new();
        for route in raw_routes {
            let name = route.name.clone();
            routes.push(Route::from_raw(route).map_err(|error| format!("route {name:?}: {error}"))?);
        }
        let mut overrides = Vec::new();
        for RawOverride { authority, weight } in dst_overrides {
            overrides.push(DstOverride {
                weight: parse_weight(&weight.0)?,
                authority,
            });
        }
        let profile = Self {
            meta,
            routes,
            retry_budget: retry_budget.map(RetryBudget::from_raw).transpose()?,
            overrides,
        };
        profile.validate()?;
        Ok(profile)
    }
}

impl Route {
    fn from_raw(raw: RawRoute) -> Result<Self, String> {
        if raw.name.is_empty() {
            return Err("name is empty".to_owned());
        }
        // As in Linkerd, an empty timeout counts as absent.
        let timeout = raw.timeout.as_deref().filter(|timeout| !timeout.is_empty());
        let timeout = timeout.map(go_duration::parse).transpose();
        let mut response_classes = Vec::new();
        for class in raw.response_classes {
            let condition = ResponseMatch::from_raw(class.condition)?;
            response_classes.push(ResponseClass {
                condition,
                is_failure: class.is_failure,
            });
        }
        Ok(Self {
            condition: RequestMatch::from_raw(raw.condition)?,
            name: raw.name,
            response_classes,
            is_retryable: raw.is_retryable,
            timeout: timeout.map_err(|error| format!("timeout: {error}"))?,
        })
    }
}

impl RequestMatch {
    /// If a condition has several fields, all of them must match.
    fn from_raw(raw: RawRequestMatch) -> Result<Self, String> {
        let mut matches = Vec::new();
        if let Some(all) = raw.all {
            matches.push(Self::All(
                all.into_iter().map(Self::from_raw).collect::<Result<_, _>>()?,
            ));
        }
        if let Some(any) = raw.any {
            matches.push(Self::Any(
                any.into_iter().map(Self::from_raw).collect::<Result<_, _>>()?,
            ));
        }
        if let Some(method) = raw.method {
            matches.push(Self::Method(method));
        }
        if let Some(not) = raw.not {
            matches.push(Self::Not(Box::new(Self::from_raw(*not)?)));
        }
        if let Some(path) = raw.path_regex {
            matches.push(Self::PathRegex(path));
        }
        match (matches.pop(), matches.is_empty()) {
            (None, _) => Err("condition sets none of `all`, `any`, `not`, `pathRegex` and `method`".to_owned()),
            (Some(only), true) => Ok(only),
            (Some(last), false) => {
                matches.push(last);
                Ok(Self::All(matches))
            }
        }
    }
}

impl ResponseMatch {
    fn from_raw(raw: RawResponseMatch) -> Result<Self, String> {
        let mut matches = Vec::new();
        if let Some(all) = raw.all {
            matches.push(Self::All(
                all.into_iter().map(Self::from_raw).collect::<Result<_, _>>()?,
            ));
        }
        if let Some(any) = raw.any {
            matches.push(Self::Any(
                any.into_iter().map(Self::from_raw).collect::<Result<_, _>>()?,
            ));
        }
        if let Some(RawStatusRange { min, max }) = raw.status {
            for bound in [min, max] {
                if bound != 0 && !(100..=599).contains(&bound) {
                    return Err(format!("response status {bound} is not in 100-599"));
                }
            }
            if max != 0 && max < min {
                return Err(format!("response status range ends at {max}, before its start {min}"));
            }
            matches.push(Self::Status { min, max });
        }
        if let Some(not) = raw.not {
            matches.push(Self::Not(Box::new(Self::from_raw(*not)?)));
        }
        match (matches.pop(), matches.is_empty()) {
            (None, _) => Err("response condition sets none of `all`, `any`, `not` and `status`".to_owned()),
            (Some(only), true) => Ok(only),
            (Some(last), false) => {
                matches.push(last);
                Ok(Self::All(matches))
            }
        }
    }
}

impl RetryBudget {
    fn from_raw(raw: RawBudget) -> Result<Self, String> {
        if raw.retry_ratio.is_nan() || raw.retry_ratio < 0.0 {
            return Err(format!("spec.retryBudget.retryRatio {} is negative", raw.retry_ratio));
        }
        let ttl = go_duration::parse(&raw.ttl).map_err(|error| format!("spec.retryBudget.ttl: {error}"))?;
        Ok(Self {
            ratio: raw.retry_ratio,
            min_per_second: raw.min_retries_per_second,
            ttl,
        })
    }
}

/// Parses a Kubernetes quantity. Returns it in ten-thousandths.
fn parse_weight(text: &str) -> Result<u32, String> {
    let invalid = || format!("weight {text:?} is not a number such as 1, 0.5 or 500m");
    let unit_at = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(unit_at).ok_or_else(invalid)?;
    let per_unit = match unit {
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "Ki" => 1024.0,
        exponent => {
            let exponent = exponent.strip_prefix(['e', 'E']).ok_or_else(invalid)?;
            10f64.powi(exponent.parse().map_err(|_| invalid())?)
        }
    };
    let weight = number.parse::<f64>().map_err(|_| invalid())? * per_unit * 10_000.0;
    if !(0.0..=f64::from(u32::MAX)).contains(&weight) {
        return Err(invalid());
    }
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the range was checked above"
    )]
    Ok(weight.round() as u32)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::resources::{self, Kind};

    /// Decoding rejects the values that proxies refuse, whatever the source of the object is.
    #[test]
    fn a_profile_that_proxies_refuse_is_not_decoded() {
        let decode = |spec: Value| {
            let metadata = json!({"name": "web.shop.svc.cluster.local", "namespace": "shop"});
            let decoded = resources::decode(Kind::ServiceProfile, json!({"metadata": metadata, "spec": spec}));
            decoded.map(drop).map_err(|error| error.to_string())
        };
        let route = |condition: Value| json!({"routes": [{"name": "a", "condition": condition}]});
        let budget =
            |ttl: &str, ratio: f32| json!({"retryBudget": {"ttl": ttl, "retryRatio": ratio, "minRetriesPerSecond": 1}});
        for valid in [route(json!({"pathRegex": "/a.*"})), budget("10s", 0.2)] {
            assert_eq!(decode(valid.clone()), Ok(()), "{valid}");
        }
        for (invalid, part) in [
            (route(json!({"pathRegex": "("})), "route \"a\": "),
            (route(json!({"not": {"method": "G T"}})), "is not an HTTP method"),
            (budget("0s", 0.2), "retryBudget.ttl"),
            (budget("10s", 1001.0), "retryRatio"),
            (
                json!({"dstOverrides": [{"authority": "a b", "weight": "1"}]}),
                "dstOverrides",
            ),
        ] {
            let error = decode(invalid.clone()).expect_err("the value is invalid");
            assert!(error.contains(part), "{invalid}: {error}");
        }
    }

    #[test]
    fn weights_are_quantities_in_ten_thousandths() {
        assert_eq!(parse_weight("500m"), Ok(5000));
        assert_eq!(parse_weight("1"), Ok(10_000));
        assert_eq!(parse_weight("0.5"), Ok(5000));
        assert_eq!(parse_weight("2k"), Ok(20_000_000));
        assert_eq!(parse_weight("1e2"), Ok(1_000_000));
        for invalid in ["", "m", "-1", "1Gi", "NaN", "1e9"] {
            assert!(parse_weight(invalid).is_err(), "{invalid}");
        }
    }
}
