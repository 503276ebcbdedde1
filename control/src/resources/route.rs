//! HTTPRoute of both groups, GRPCRoute, TLSRoute and TCPRoute: matches and backends, in the structure of the Gateway
//! API.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Deserializer};

use crate::resources::meta::{Meta, NamespacedName};
use crate::resources::policy::reference::{GATEWAY_GROUP, POLICY_GROUP, same_kind};
use crate::resources::status::{self, CONTROLLER_NAME, ParentRef, ParentStatus};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RouteKind {
    PolicyHttp,
    GatewayHttp,
    Grpc,
    Tls,
    Tcp,
}

impl RouteKind {
    pub fn group(self) -> &'static str {
        match self {
            Self::PolicyHttp => POLICY_GROUP,
            Self::GatewayHttp | Self::Grpc | Self::Tls | Self::Tcp => GATEWAY_GROUP,
        }
    }

    pub fn kind(self) -> &'static str {
        match self {
            Self::PolicyHttp | Self::GatewayHttp => "HTTPRoute",
            Self::Grpc => "GRPCRoute",
            Self::Tls => "TLSRoute",
            Self::Tcp => "TCPRoute",
        }
    }

    /// Returns whether this kind takes precedence. The order is GRPCRoute, HTTPRoute, TLSRoute, TCPRoute; on one port of one
    /// parent, only routes of the first kind apply.
    pub fn takes_precedence_over(self, other: Self) -> bool {
        let rank = |kind| match kind {
            Self::Grpc => 3,
            Self::PolicyHttp | Self::GatewayHttp => 2,
            Self::Tls => 1,
            Self::Tcp => 0,
        };
        rank(self) > rank(other)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    pub meta: Meta,
    /// Changes with the spec.
    pub generation: Option<i64>,
    pub kind: RouteKind,
    /// Exact names, or `*.` and a suffix. An empty list matches all hosts.
    pub hostnames: Vec<String>,
    pub parents: Vec<Parent>,
    pub rules: Rules,
    /// Statuses from all controllers, including ours.
    pub statuses: Vec<ParentStatus>,
    /// Set if a field outside of the rules is unreadable, or if the route is invalid in a directory of manifests. No rule of the
    /// route is served then.
    pub unreadable: Option<UnreadablePart>,
}

/// Why a part of a route is unreadable. The requests that it matches fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadablePart {
    pub reason: String,
    /// Whether the requests that the part matches are known. Otherwise all requests of the parent could be affected.
    pub matches_are_readable: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Rules {
    Http(Vec<Rule<HttpMatch>>),
    Grpc(Vec<Rule<GrpcMatch>>),
    /// Rules of a TLSRoute, which matches host names with the SNI, or of a TCPRoute.
    Stream(Vec<StreamRule>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    pub kind: ParentKind,
    pub name: NamespacedName,
    pub port: Option<u16>,
    /// The section of the parent. No parent kind of the mesh has sections.
    pub section: Option<String>,
    pub acceptance: Acceptance,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ParentKind {
    Server,
    Service,
    EgressNetwork,
    /// A Gateway or another kind that the mesh does not support.
    Foreign,
}

impl ParentKind {
    /// Returns the kind as in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "Server",
            Self::Service => "Service",
            Self::EgressNetwork => "EgressNetwork",
            // Never written: statuses contain no foreign parents.
            Self::Foreign => "Gateway",
        }
    }
}

impl Rules {
    /// Returns the backends of all rules, and those of their mirrors.
    pub fn backend_refs(&self) -> Vec<&BackendRef> {
        match self {
            Self::Http(rules) => rules.iter().flat_map(Rule::all_backend_refs).collect(),
            Self::Grpc(rules) => rules.iter().flat_map(Rule::all_backend_refs).collect(),
            Self::Stream(rules) => rules.iter().flat_map(|rule| &rule.backend_refs).collect(),
        }
    }
}

/// The acceptance of a route by one parent, according to the route's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    Accepted,
    /// Rejected because of an unsupported part. Matching requests fail: see [`RouteRejection::Unsupported`].
    ///
    /// [`RouteRejection::Unsupported`]: crate::resources::acceptance::RouteRejection::Unsupported
    Unsupported,
    /// Rejected for another reason, or not checked yet: the route has no status of our controller.
    NotAccepted,
    /// The source, a directory, has no statuses at all. The views compute the acceptance.
    ComputedByViews,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(
    rename_all = "camelCase",
    deny_unknown_fields,
    bound(deserialize = "M: Deserialize<'de>")
)]
pub struct Rule<M> {
    pub matches: Option<Vec<M>>,
    #[serde(default)]
    pub filters: Vec<Filter>,
    #[serde(default)]
    pub backend_refs: Vec<BackendRef>,
    #[serde(default)]
    pub timeouts: RuleTimeouts,
    pub retry: Option<RuleRetry>,
    /// Not implemented by proxies.
    pub(super) session_persistence: Option<IgnoredAny>,
    /// Accepted but not used.
    #[serde(rename = "name", default)]
    _name: IgnoredAny,
    #[serde(skip)]
    pub unreadable: Option<UnreadablePart>,
}

impl<M> Rule<M> {
    /// Returns the API's default for a route without rules: a rule that matches all requests.
    pub(super) fn match_all() -> Self {
        Self {
            matches: None,
            filters: Vec::new(),
            backend_refs: Vec::new(),
            timeouts: RuleTimeouts::default(),
            retry: None,
            session_persistence: None,
            _name: IgnoredAny,
            unreadable: None,
        }
    }

    pub(super) fn from_unreadable(matches: Option<Vec<M>>, unreadable: UnreadablePart) -> Self {
        Self {
            matches,
            unreadable: Some(unreadable),
            ..Self::match_all()
        }
    }

    pub fn mirrors(&self) -> impl Iterator<Item = &Mirror> {
        self.filters.iter().filter_map(|filter| match filter {
            Filter::Mirror(mirror) => Some(mirror),
            _ => None,
        })
    }

    fn all_backend_refs(&self) -> impl Iterator<Item = &BackendRef> {
        let mirrors = self.mirrors().map(|mirror| &mirror.backend_ref);
        self.backend_refs.iter().chain(mirrors)
    }

    /// Returns the first field that is set, but that proxies do not implement for routes of this kind.
    pub fn unimplemented_field(&self, kind: RouteKind) -> Option<&'static str> {
        let retry = self.retry.as_ref().filter(|_| kind != RouteKind::GatewayHttp);
        let session_persistence = self.session_persistence.map(|_| "sessionPersistence");
        retry.map(|_| "retry").or(session_persistence)
    }
}

/// A rule of a TLSRoute or TCPRoute: its backends.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StreamRule {
    #[serde(default)]
    pub backend_refs: Vec<BackendRef>,
    #[serde(rename = "name", default)]
    _name: IgnoredAny,
    #[serde(skip)]
    pub unreadable: Option<UnreadablePart>,
}

impl StreamRule {
    pub(super) fn from_unreadable(unreadable: UnreadablePart) -> Self {
        Self {
            unreadable: Some(unreadable),
            ..Self::default()
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct RuleTimeouts {
    #[serde(deserialize_with = "deserialize_duration")]
    pub request: Option<Duration>,
    #[serde(deserialize_with = "deserialize_duration")]
    pub backend_request: Option<Duration>,
}

/// Retries of the requests of a rule (GEP-1731).
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleRetry {
    /// HTTP statuses that are retried.
    pub codes: Vec<u16>,
    /// Maximum number of retries.
    pub attempts: Option<u16>,
    /// Minimum delay before a retry.
    #[serde(deserialize_with = "deserialize_duration")]
    pub backoff: Option<Duration>,
}

fn deserialize_duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| parse_gateway_duration(&text))
        .transpose()
        .map_err(serde::de::Error::custom)
}

/// Parses a duration of the Gateway API: up to four numbers of up to five digits, each with a unit.
///
/// Source: GEP-2257, and the field's pattern in the CRDs.
fn parse_gateway_duration(text: &str) -> Result<Duration, String> {
    let invalid =
        || format!("{text:?} is not a duration of up to four whole numbers with h, m, s or ms, such as 1h30m");
    let mut rest = text;
    let (mut total, mut n_parts) = (Duration::ZERO, 0);
    while !rest.is_empty() {
        let n_digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = rest.split_at(n_digits);
        let (millis, after) = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)]
            .into_iter()
            .find_map(|(unit, millis)| Some((millis, after.strip_prefix(unit)?)))
            .ok_or_else(invalid)?;
        let number: u64 = number.parse().map_err(|_| invalid())?;
        n_parts += 1;
        if n_digits > 5 || n_parts > 4 {
            return Err(invalid());
        }
        total += Duration::from_millis(number * millis);
        rest = after;
    }
    if n_parts == 0 { Err(invalid()) } else { Ok(total) }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct HttpMatch {
    pub path: Option<PathMatch>,
    pub headers: Vec<NamedMatch>,
    pub query_params: Vec<NamedMatch>,
    pub method: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GrpcMatch {
    pub method: Option<GrpcMethodMatch>,
    pub headers: Vec<NamedMatch>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathMatch {
    #[serde(rename = "type", default)]
    pub kind: PathKind,
    #[serde(default = "default_path")]
    pub value: String,
}

fn default_path() -> String {
    "/".to_owned()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum PathKind {
    Exact,
    #[default]
    PathPrefix,
    RegularExpression,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedMatch {
    #[serde(rename = "type", default)]
    pub kind: ValueKind,
    pub name: String,
    pub value: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum ValueKind {
    #[default]
    Exact,
    RegularExpression,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GrpcMethodMatch {
    #[serde(rename = "type", default)]
    pub kind: ValueKind,
    pub service: Option<String>,
    pub method: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    RequestHeaders(HeaderModifier),
    ResponseHeaders(HeaderModifier),
    Redirect(Redirect),
    UrlRewrite(UrlRewrite),
    Mirror(Mirror),
    Cors(Cors),
    /// A filter that proxies do not implement. Requests that match its rule fail.
    Unsupported(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HeaderModifier {
    pub add: Vec<Header>,
    pub set: Vec<Header>,
    pub remove: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    pub name: String,
    pub value: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Redirect {
    pub scheme: Option<String>,
    pub hostname: Option<String>,
    pub path: Option<PathModifier>,
    pub port: Option<u16>,
    #[serde(default = "default_redirect_status")]
    pub status_code: Option<u16>,
}

/// Returns the API's default for redirects.
#[allow(clippy::unnecessary_wraps, reason = "it is a default of an optional field")]
fn default_redirect_status() -> Option<u16> {
    Some(302)
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UrlRewrite {
    pub hostname: Option<String>,
    pub path: Option<PathModifier>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mirror {
    pub backend_ref: BackendRef,
    pub percent: Option<u32>,
    pub fraction: Option<Fraction>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fraction {
    pub numerator: u32,
    #[serde(default = "default_denominator")]
    pub denominator: u32,
}

/// Returns the API's default for fractions.
fn default_denominator() -> u32 {
    100
}

impl Mirror {
    /// Returns the fraction of requests that are mirrored.
    pub fn fraction(&self) -> Fraction {
        let percent = |numerator| Fraction {
            numerator,
            denominator: 100,
        };
        self.fraction.unwrap_or_else(|| percent(self.percent.unwrap_or(100)))
    }
}

/// Cross-origin requests that browsers may send (GEP-1767).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Cors {
    pub allow_origins: Vec<String>,
    pub allow_credentials: bool,
    pub allow_methods: Vec<String>,
    pub allow_headers: Vec<String>,
    pub expose_headers: Vec<String>,
    /// In seconds.
    pub max_age: u32,
}

impl Default for Cors {
    fn default() -> Self {
        Self {
            allow_origins: Vec::new(),
            allow_credentials: false,
            allow_methods: Vec::new(),
            allow_headers: Vec::new(),
            expose_headers: Vec::new(),
            // The API's default.
            max_age: 5,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "type")]
pub enum PathModifier {
    ReplaceFullPath {
        #[serde(rename = "replaceFullPath")]
        path: String,
    },
    ReplacePrefixMatch {
        #[serde(rename = "replacePrefixMatch")]
        prefix: String,
    },
}

impl PathModifier {
    /// Returns the path or prefix that replaces that of the request.
    pub fn replacement(&self) -> &str {
        match self {
            Self::ReplaceFullPath { path } => path,
            Self::ReplacePrefixMatch { prefix } => prefix,
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawFilter {
    #[serde(rename = "type")]
    kind: String,
    request_header_modifier: Option<HeaderModifier>,
    response_header_modifier: Option<HeaderModifier>,
    request_redirect: Option<Redirect>,
    url_rewrite: Option<UrlRewrite>,
    request_mirror: Option<Mirror>,
    cors: Option<Cors>,
}

impl<'de> Deserialize<'de> for Filter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = RawFilter::deserialize(deserializer)?;
        let missing = |field: &'static str| serde::de::Error::missing_field(field);
        Ok(match raw.kind.as_str() {
            "RequestHeaderModifier" => Self::RequestHeaders(
                raw.request_header_modifier
                    .ok_or_else(|| missing("requestHeaderModifier"))?,
            ),
            "ResponseHeaderModifier" => Self::ResponseHeaders(
                raw.response_header_modifier
                    .ok_or_else(|| missing("responseHeaderModifier"))?,
            ),
            "RequestRedirect" => Self::Redirect(raw.request_redirect.ok_or_else(|| missing("requestRedirect"))?),
            "URLRewrite" => Self::UrlRewrite(raw.url_rewrite.ok_or_else(|| missing("urlRewrite"))?),
            "RequestMirror" => Self::Mirror(raw.request_mirror.ok_or_else(|| missing("requestMirror"))?),
            "CORS" => Self::Cors(raw.cors.ok_or_else(|| missing("cors"))?),
            _ => Self::Unsupported(raw.kind),
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendRef {
    #[serde(default)]
    group: String,
    #[serde(default = "default_backend_kind")]
    kind: String,
    pub name: String,
    pub namespace: Option<String>,
    pub port: Option<u16>,
    #[serde(default = "default_weight")]
    pub weight: u32,
    #[serde(default)]
    pub filters: Vec<Filter>,
}

fn default_backend_kind() -> String {
    "Service".to_owned()
}

fn default_weight() -> u32 {
    1
}

impl BackendRef {
    pub fn is_service(&self) -> bool {
        same_kind(&self.group, &self.kind, "", "Service")
    }

    pub fn is_egress_network(&self) -> bool {
        same_kind(&self.group, &self.kind, POLICY_GROUP, "EgressNetwork")
    }

    pub fn resolve(&self, namespace: &Arc<str>) -> NamespacedName {
        NamespacedName::new(
            self.namespace.as_deref().map_or_else(|| namespace.clone(), Arc::from),
            self.name.as_str(),
        )
    }
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "R: DeserializeOwned"))]
pub(super) struct RawRoute<R> {
    metadata: ObjectMeta,
    spec: RawSpec<R>,
    status: Option<RawStatus>,
}

#[derive(Deserialize)]
#[serde(
    rename_all = "camelCase",
    deny_unknown_fields,
    bound(deserialize = "R: DeserializeOwned")
)]
struct RawSpec<R> {
    #[serde(default)]
    parent_refs: Vec<ParentRef>,
    #[serde(default)]
    hostnames: Vec<String>,
    rules: Option<Vec<R>>,
    /// Ignored, because it applies to gateways only.
    #[serde(rename = "useDefaultGateways", default)]
    _default_gateways: IgnoredAny,
}

#[derive(Deserialize)]
pub(super) struct RawStatus {
    #[serde(default)]
    parents: Vec<ParentStatus>,
}

impl Route {
    pub(super) fn from_raw_http(raw: RawRoute<Rule<HttpMatch>>, kind: RouteKind) -> Result<Self, String> {
        Self::from_raw(raw, kind, |rules| Rules::Http(rules.unwrap_or_else(match_all_rules)))
    }

    pub(super) fn from_raw_grpc(raw: RawRoute<Rule<GrpcMatch>>) -> Result<Self, String> {
        Self::from_raw(raw, RouteKind::Grpc, |rules| {
            Rules::Grpc(rules.unwrap_or_else(match_all_rules))
        })
    }

    pub(super) fn from_raw_stream(raw: RawRoute<StreamRule>, kind: RouteKind) -> Result<Self, String> {
        Self::from_raw(raw, kind, |rules| Rules::Stream(rules.unwrap_or_default()))
    }

    fn from_raw<R>(
        raw: RawRoute<R>,
        kind: RouteKind,
        rules: impl FnOnce(Option<Vec<R>>) -> Rules,
    ) -> Result<Self, String> {
        let generation = raw.metadata.generation;
        let meta = Meta::from_kubernetes(raw.metadata)?;
        let mut route = Self {
            meta,
            generation,
            kind,
            hostnames: raw.spec.hostnames,
            parents: Vec::new(),
            rules: rules(raw.spec.rules),
            statuses: Vec::new(),
            unreadable: None,
        };
        route.set_parents(&raw.spec.parent_refs, raw.status);
        Ok(route)
    }

    /// Sets the parents from the references, and their acceptance from the status.
    pub(super) fn set_parents(&mut self, references: &[ParentRef], status: Option<RawStatus>) {
        self.statuses = status.map(|status| status.parents).unwrap_or_default();
        let namespace = self.meta.namespace();
        let parent = |reference| {
            let mut parent = Parent::resolve(reference, self.kind, namespace);
            parent.acceptance = parent.acceptance_from_status(&self.statuses, self.kind, namespace);
            parent
        };
        self.parents = references.iter().map(parent).collect();
    }

    /// Returns whether a parent is a Server, Service or EgressNetwork. A route without such a parent is ignored.
    pub fn has_mesh_parent(&self) -> bool {
        self.parents.iter().any(|parent| parent.kind != ParentKind::Foreign)
    }

    /// Returns whether all parents that belong to the mesh are Servers.
    pub fn has_only_server_parents(&self) -> bool {
        let mut mesh_parents = self.parents.iter().filter(|parent| parent.kind != ParentKind::Foreign);
        self.has_mesh_parent() && mesh_parents.all(|parent| parent.kind == ParentKind::Server)
    }

    /// Returns the first unreadable part of the route.
    pub fn unreadable_part(&self) -> Option<&UnreadablePart> {
        let part_of_rules = || match &self.rules {
            Rules::Http(rules) => rules.iter().find_map(|rule| rule.unreadable.as_ref()),
            Rules::Grpc(rules) => rules.iter().find_map(|rule| rule.unreadable.as_ref()),
            Rules::Stream(rules) => rules.iter().find_map(|rule| rule.unreadable.as_ref()),
        };
        self.unreadable.as_ref().or_else(part_of_rules)
    }

    /// Removes the status, for a source without write-back.
    pub fn clear_status(&mut self) {
        self.statuses.clear();
        for parent in &mut self.parents {
            parent.acceptance = Acceptance::ComputedByViews;
        }
    }
}

pub(super) fn match_all_rules<M>() -> Vec<Rule<M>> {
    vec![Rule::match_all()]
}

impl Parent {
    /// Resolves a reference of a route of this kind in this namespace.
    pub fn resolve(reference: &ParentRef, route: RouteKind, namespace: &Arc<str>) -> Self {
        let group = reference.group.as_deref().unwrap_or_else(|| route.group());
        let named = reference.kind.as_deref().unwrap_or("Gateway");
        let kind = if same_kind(group, named, POLICY_GROUP, "Server") {
            ParentKind::Server
        } else if same_kind(group, named, "", "Service") {
            ParentKind::Service
        } else if same_kind(group, named, POLICY_GROUP, "EgressNetwork") {
            ParentKind::EgressNetwork
        } else {
            ParentKind::Foreign
        };
        let namespace = reference
            .namespace
            .as_deref()
            .map_or_else(|| namespace.clone(), Arc::from);
        Self {
            kind,
            name: NamespacedName::new(namespace, reference.name.as_str()),
            port: reference.port,
            section: reference.section_name.clone(),
            acceptance: Acceptance::ComputedByViews,
        }
    }

    fn acceptance_from_status(&self, statuses: &[ParentStatus], route: RouteKind, namespace: &Arc<str>) -> Acceptance {
        let our_statuses = statuses.iter().filter(|status| {
            let reported = Self::resolve(&status.parent_ref, route, namespace);
            status.controller_name == CONTROLLER_NAME
                && (reported.kind, &reported.name, reported.port) == (self.kind, &self.name, self.port)
        });
        let conditions: Vec<_> = our_statuses.flat_map(|status| &status.conditions).cloned().collect();
        if status::is_accepted(&conditions) {
            Acceptance::Accepted
        } else if status::is_unsupported(&conditions) {
            Acceptance::Unsupported
        } else {
            Acceptance::NotAccepted
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_the_gateway_api_are_whole_numbers_with_units() {
        let check = |text: &str, millis: u64| {
            assert_eq!(
                parse_gateway_duration(text),
                Ok(Duration::from_millis(millis)),
                "{text}"
            );
        };
        check("0s", 0);
        check("10s", 10_000);
        check("1h30m", 5_400_000);
        check("1h1m1s1ms", 3_661_001);
        check("99999h", 359_996_400_000);
        check("1s1s", 2_000);
        for invalid in [
            "",
            "10",
            "0",
            "-1s",
            "+1s",
            "1.5h",
            "1d",
            "100us",
            "1 s",
            "s",
            "100000s",
            "1h1m1s1ms1s",
            "1S",
        ] {
            let error = parse_gateway_duration(invalid).unwrap_err();
            assert!(
                error.contains(&format!("{invalid:?}")) && error.contains("1h30m"),
                "{error}"
            );
        }
    }
}
