//! HTTPRoute of both groups, GRPCRoute, TLSRoute and TCPRoute: what they match and where they send, in the shape of the
//! Gateway API.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Deserializer};

use crate::resources::meta::{Meta, Name};
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

    /// Of routes on one port of one parent, those of the most specific protocol hold.
    pub fn outranks(self, other: Self) -> bool {
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
    /// Changes whenever the spec does.
    pub generation: Option<i64>,
    pub kind: RouteKind,
    /// Exact names, or `*.` and a suffix; none matches every host.
    pub hostnames: Vec<String>,
    pub parents: Vec<Parent>,
    pub rules: Rules,
    /// What controllers, ours among them, have written about it.
    pub statuses: Vec<ParentStatus>,
    /// Set where what stands outside of the rules cannot be read: none of its rules is served.
    pub unread: Option<Unread>,
}

/// Why a part of a route cannot be read. Its requests are answered with an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    pub reason: String,
    /// Whether it can be told which requests the part is for.
    pub requests: Requests,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests {
    Known,
    Unknown,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Rules {
    Http(Vec<Rule<HttpMatch>>),
    Grpc(Vec<Rule<GrpcMatch>>),
    /// Of a TLSRoute, whose host names are matched with the server name, or of a TCPRoute.
    Stream(Vec<StreamRule>),
}

/// What a route attaches to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    pub kind: ParentKind,
    pub name: Name,
    pub port: Option<u16>,
    /// A section of the parent narrows it in a way that no parent of ours has.
    pub section: Option<String>,
    pub acceptance: Acceptance,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ParentKind {
    Server,
    Service,
    EgressNetwork,
    /// A gateway, or anything else that is not ours.
    Foreign,
}

impl ParentKind {
    /// As manifests spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "Server",
            Self::Service => "Service",
            Self::EgressNetwork => "EgressNetwork",
            Self::Foreign => "Gateway",
        }
    }
}

impl Rules {
    /// Everything that the rules send to.
    pub fn backend_refs(&self) -> Vec<&BackendRef> {
        match self {
            Self::Http(rules) => rules.iter().flat_map(|rule| &rule.backend_refs).collect(),
            Self::Grpc(rules) => rules.iter().flat_map(|rule| &rule.backend_refs).collect(),
            Self::Stream(rules) => rules.iter().flat_map(|rule| &rule.backend_refs).collect(),
        }
    }
}

/// What the status of a route says about one parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    Accepted,
    /// Refused for what the route asks, which is answered with an error: see [`Refusal::Unsupported`].
    ///
    /// [`Refusal::Unsupported`]: crate::resources::acceptance::Refusal::Unsupported
    Unsupported,
    Refused,
    /// Nobody writes statuses: the views judge for themselves.
    Unjudged,
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
    /// Parts of the Gateway API that no proxy implements.
    retry: Option<IgnoredAny>,
    session_persistence: Option<IgnoredAny>,
    /// For those who refer to the rule.
    #[serde(rename = "name", default)]
    _name: IgnoredAny,
    #[serde(skip)]
    pub unread: Option<Unread>,
}

impl<M> Rule<M> {
    /// The API's default for a route without rules is one that matches everything.
    pub(super) fn everything() -> Self {
        Self {
            matches: None,
            filters: Vec::new(),
            backend_refs: Vec::new(),
            timeouts: RuleTimeouts::default(),
            retry: None,
            session_persistence: None,
            _name: IgnoredAny,
            unread: None,
        }
    }

    pub(super) fn unread(matches: Option<Vec<M>>, unread: Unread) -> Self {
        Self {
            matches,
            unread: Some(unread),
            ..Self::everything()
        }
    }

    /// The first field that is set and that no proxy implements.
    pub fn unimplemented_field(&self) -> Option<&'static str> {
        let retry = self.retry.map(|_| "retry");
        retry.or_else(|| self.session_persistence.map(|_| "sessionPersistence"))
    }
}

/// Where a connection goes that nobody looks into.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StreamRule {
    #[serde(default)]
    pub backend_refs: Vec<BackendRef>,
    #[serde(rename = "name", default)]
    _name: IgnoredAny,
    #[serde(skip)]
    pub unread: Option<Unread>,
}

impl StreamRule {
    pub(super) fn unread(unread: Unread) -> Self {
        Self {
            unread: Some(unread),
            ..Self::default()
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct RuleTimeouts {
    #[serde(deserialize_with = "duration")]
    pub request: Option<Duration>,
    #[serde(deserialize_with = "duration")]
    pub backend_request: Option<Duration>,
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| gateway_duration(&text))
        .transpose()
        .map_err(serde::de::Error::custom)
}

/// Reads a duration of the Gateway API: up to four numbers of up to five digits, each with a unit.
///
/// Source: GEP-2257, and the pattern of the field in the definitions.
fn gateway_duration(text: &str) -> Result<Duration, String> {
    let refused =
        || format!("{text:?} is not a duration of up to four whole numbers with h, m, s or ms, such as 1h30m");
    let mut rest = text;
    let (mut total, mut n_parts) = (Duration::ZERO, 0);
    while !rest.is_empty() {
        let n_digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = rest.split_at(n_digits);
        let (millis, after) = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)]
            .into_iter()
            .find_map(|(unit, millis)| Some((millis, after.strip_prefix(unit)?)))
            .ok_or_else(refused)?;
        let number: u64 = number.parse().map_err(|_| refused())?;
        n_parts += 1;
        if n_digits > 5 || n_parts > 4 {
            return Err(refused());
        }
        total += Duration::from_millis(number * millis);
        rest = after;
    }
    if n_parts == 0 { Err(refused()) } else { Ok(total) }
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
    pub method: Option<RpcMatch>,
    pub headers: Vec<NamedMatch>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathMatch {
    #[serde(rename = "type", default)]
    pub kind: PathKind,
    #[serde(default = "root")]
    pub value: String,
}

fn root() -> String {
    "/".to_owned()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum PathKind {
    Exact,
    #[default]
    PathPrefix,
    RegularExpression,
}

/// A header or a query parameter by name.
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
pub struct RpcMatch {
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
    /// One that no proxy implements; requests that it is for are answered with an error.
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
    #[serde(default = "found")]
    pub status_code: Option<u16>,
}

/// The API's default for redirects.
#[allow(clippy::unnecessary_wraps, reason = "it is a default of an optional field")]
fn found() -> Option<u16> {
    Some(302)
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

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawFilter {
    #[serde(rename = "type")]
    kind: String,
    request_header_modifier: Option<HeaderModifier>,
    response_header_modifier: Option<HeaderModifier>,
    request_redirect: Option<Redirect>,
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
            _ => Self::Unsupported(raw.kind),
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendRef {
    #[serde(default)]
    group: String,
    #[serde(default = "service_kind")]
    kind: String,
    pub name: String,
    pub namespace: Option<String>,
    pub port: Option<u16>,
    #[serde(default = "one")]
    pub weight: u32,
    #[serde(default)]
    pub filters: Vec<Filter>,
}

fn service_kind() -> String {
    "Service".to_owned()
}

fn one() -> u32 {
    1
}

impl BackendRef {
    pub fn is_service(&self) -> bool {
        same_kind(&self.group, &self.kind, "", "Service")
    }

    pub fn is_egress_network(&self) -> bool {
        same_kind(&self.group, &self.kind, POLICY_GROUP, "EgressNetwork")
    }

    pub fn resolve(&self, namespace: &Arc<str>) -> Name {
        Name::new(
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
    /// Says something of gateways only.
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
        Self::from_raw(raw, kind, |rules| Rules::Http(rules.unwrap_or_else(everything)))
    }

    pub(super) fn from_raw_grpc(raw: RawRoute<Rule<GrpcMatch>>) -> Result<Self, String> {
        Self::from_raw(raw, RouteKind::Grpc, |rules| {
            Rules::Grpc(rules.unwrap_or_else(everything))
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
            unread: None,
        };
        route.attach(&raw.spec.parent_refs, raw.status);
        Ok(route)
    }

    /// Takes the parents, and what the status says of them.
    pub(super) fn attach(&mut self, references: &[ParentRef], status: Option<RawStatus>) {
        self.statuses = status.map(|status| status.parents).unwrap_or_default();
        let namespace = self.meta.namespace();
        let parent = |reference| {
            let mut parent = Parent::resolve(reference, self.kind, namespace);
            parent.acceptance = parent.judged_by(&self.statuses, self.kind, namespace);
            parent
        };
        self.parents = references.iter().map(parent).collect();
    }

    /// Whether it names a parent that the mesh may serve it for; routes of others are none of our business.
    pub fn is_ours(&self) -> bool {
        self.parents.iter().any(|parent| parent.kind != ParentKind::Foreign)
    }

    /// Why the route, or one of its rules, cannot be read.
    pub fn unread(&self) -> Option<&Unread> {
        let of_rules = || match &self.rules {
            Rules::Http(rules) => rules.iter().find_map(|rule| rule.unread.as_ref()),
            Rules::Grpc(rules) => rules.iter().find_map(|rule| rule.unread.as_ref()),
            Rules::Stream(rules) => rules.iter().find_map(|rule| rule.unread.as_ref()),
        };
        self.unread.as_ref().or_else(of_rules)
    }

    /// Forgets the status, for a source that nobody writes one into.
    pub fn forget_status(&mut self) {
        self.statuses.clear();
        for parent in &mut self.parents {
            parent.acceptance = Acceptance::Unjudged;
        }
    }
}

pub(super) fn everything<M>() -> Vec<Rule<M>> {
    vec![Rule::everything()]
}

impl Parent {
    /// What a reference of a route of this kind in this namespace names.
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
            name: Name::new(namespace, reference.name.as_str()),
            port: reference.port,
            section: reference.section_name.clone(),
            acceptance: Acceptance::Unjudged,
        }
    }

    fn judged_by(&self, statuses: &[ParentStatus], route: RouteKind, namespace: &Arc<str>) -> Acceptance {
        let ours = statuses.iter().filter(|status| {
            let judged = Self::resolve(&status.parent_ref, route, namespace);
            status.controller_name == CONTROLLER_NAME
                && (judged.kind, &judged.name, judged.port) == (self.kind, &self.name, self.port)
        });
        let conditions: Vec<_> = ours.flat_map(|status| &status.conditions).cloned().collect();
        if status::is_accepted(&conditions) {
            Acceptance::Accepted
        } else if status::is_unsupported(&conditions) {
            Acceptance::Unsupported
        } else {
            Acceptance::Refused
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_the_gateway_api_are_whole_numbers_with_units() {
        let check = |text: &str, millis: u64| {
            assert_eq!(gateway_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        };
        check("0s", 0);
        check("10s", 10_000);
        check("1h30m", 5_400_000);
        check("1h1m1s1ms", 3_661_001);
        check("99999h", 359_996_400_000);
        check("1s1s", 2_000);
        for refused in [
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
            let error = gateway_duration(refused).unwrap_err();
            assert!(
                error.contains(&format!("{refused:?}")) && error.contains("1h30m"),
                "{error}"
            );
        }
    }
}
