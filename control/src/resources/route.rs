//! HTTPRoute of both groups and GRPCRoute: what they match and where they send, in the shape of the Gateway API.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use crate::resources::go_duration;
use crate::resources::meta::{Meta, Name};
use crate::resources::policy::reference::{GATEWAY_GROUP, POLICY_GROUP, same_kind};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RouteKind {
    PolicyHttp,
    GatewayHttp,
    Grpc,
}

impl RouteKind {
    pub fn group(self) -> &'static str {
        match self {
            Self::PolicyHttp => POLICY_GROUP,
            Self::GatewayHttp | Self::Grpc => GATEWAY_GROUP,
        }
    }

    pub fn kind(self) -> &'static str {
        match self {
            Self::PolicyHttp | Self::GatewayHttp => "HTTPRoute",
            Self::Grpc => "GRPCRoute",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    pub meta: Meta,
    pub kind: RouteKind,
    /// Exact names, or `*.` and a suffix; none matches every host.
    pub hostnames: Vec<String>,
    pub parents: Vec<Parent>,
    pub rules: Rules,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Rules {
    Http(Vec<Rule<HttpMatch>>),
    Grpc(Vec<Rule<GrpcMatch>>),
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

/// What the status of a route says about one parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    Accepted,
    Refused,
    /// There is no status: the views judge for themselves.
    Unjudged,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", bound(deserialize = "M: Deserialize<'de>"))]
pub struct Rule<M> {
    pub matches: Option<Vec<M>>,
    #[serde(default)]
    pub filters: Vec<Filter>,
    #[serde(default)]
    pub backend_refs: Vec<BackendRef>,
    #[serde(default)]
    pub timeouts: RuleTimeouts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RuleTimeouts {
    #[serde(deserialize_with = "duration")]
    pub request: Option<Duration>,
    #[serde(deserialize_with = "duration")]
    pub backend_request: Option<Duration>,
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| go_duration::parse(&text))
        .transpose()
        .map_err(serde::de::Error::custom)
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HttpMatch {
    pub path: Option<PathMatch>,
    pub headers: Vec<NamedMatch>,
    pub query_params: Vec<NamedMatch>,
    pub method: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GrpcMatch {
    pub method: Option<RpcMatch>,
    pub headers: Vec<NamedMatch>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
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
    /// One that we do not implement; a route with it is not served.
    Unsupported(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HeaderModifier {
    pub add: Vec<Header>,
    pub set: Vec<Header>,
    pub remove: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Header {
    pub name: String,
    pub value: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Redirect {
    pub scheme: Option<String>,
    pub hostname: Option<String>,
    pub path: Option<PathModifier>,
    pub port: Option<u16>,
    pub status_code: Option<u16>,
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
#[serde(bound(deserialize = "M: DeserializeOwned"))]
pub(super) struct RawRoute<M> {
    metadata: ObjectMeta,
    spec: RawSpec<M>,
    status: Option<RawStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", bound(deserialize = "M: DeserializeOwned"))]
struct RawSpec<M> {
    #[serde(default)]
    parent_refs: Vec<RawParent>,
    #[serde(default)]
    hostnames: Vec<String>,
    rules: Option<Vec<Rule<M>>>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawParent {
    group: Option<String>,
    kind: Option<String>,
    name: String,
    namespace: Option<String>,
    port: Option<u16>,
    section_name: Option<String>,
}

#[derive(Deserialize)]
struct RawStatus {
    #[serde(default)]
    parents: Vec<RawParentStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawParentStatus {
    parent_ref: RawParent,
    controller_name: String,
    #[serde(default)]
    conditions: Vec<RawCondition>,
}

#[derive(Deserialize)]
struct RawCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

impl Route {
    pub(super) fn from_raw_http(raw: RawRoute<HttpMatch>, kind: RouteKind) -> Result<Self, String> {
        Self::from_raw(raw, kind, Rules::Http)
    }

    pub(super) fn from_raw_grpc(raw: RawRoute<GrpcMatch>) -> Result<Self, String> {
        Self::from_raw(raw, RouteKind::Grpc, Rules::Grpc)
    }

    fn from_raw<M>(
        raw: RawRoute<M>,
        kind: RouteKind,
        rules: impl FnOnce(Vec<Rule<M>>) -> Rules,
    ) -> Result<Self, String> {
        let meta = Meta::from_kubernetes(raw.metadata)?;
        let mut parents: Vec<Parent> = raw
            .spec
            .parent_refs
            .iter()
            .map(|parent| parent.resolve(kind, meta.namespace()))
            .collect();
        for parent in &mut parents {
            parent.acceptance = raw.status.as_ref().map_or(Acceptance::Unjudged, |status| {
                status.acceptance(parent, kind, meta.namespace())
            });
        }
        // The API's default for a route without rules is one that matches everything.
        let everything = || {
            vec![Rule {
                matches: None,
                filters: vec![],
                backend_refs: vec![],
                timeouts: RuleTimeouts::default(),
            }]
        };
        let rules = rules(raw.spec.rules.unwrap_or_else(everything));
        Ok(Self {
            meta,
            kind,
            hostnames: raw.spec.hostnames,
            parents,
            rules,
        })
    }

    /// Forgets what other controllers wrote into the status.
    pub fn forget_status(&mut self) {
        for parent in &mut self.parents {
            parent.acceptance = Acceptance::Unjudged;
        }
    }
}

impl RawParent {
    fn resolve(&self, route: RouteKind, namespace: &Arc<str>) -> Parent {
        let group = self.group.as_deref().unwrap_or_else(|| route.group());
        let named = self.kind.as_deref().unwrap_or("Gateway");
        let kind = if same_kind(group, named, POLICY_GROUP, "Server") {
            ParentKind::Server
        } else if same_kind(group, named, "", "Service") {
            ParentKind::Service
        } else if same_kind(group, named, POLICY_GROUP, "EgressNetwork") {
            ParentKind::EgressNetwork
        } else {
            ParentKind::Foreign
        };
        let namespace = self.namespace.as_deref().map_or_else(|| namespace.clone(), Arc::from);
        Parent {
            kind,
            name: Name::new(namespace, self.name.as_str()),
            port: self.port,
            section: self.section_name.clone(),
            acceptance: Acceptance::Unjudged,
        }
    }
}

impl RawStatus {
    fn acceptance(&self, parent: &Parent, route: RouteKind, namespace: &Arc<str>) -> Acceptance {
        let accepted = self.parents.iter().any(|status| {
            let judged = status.parent_ref.resolve(route, namespace);
            status.controller_name == CONTROLLER_NAME
                && (judged.kind, &judged.name, judged.port) == (parent.kind, &parent.name, parent.port)
                && status
                    .conditions
                    .iter()
                    .any(|condition| condition.kind == "Accepted" && condition.status == "True")
        });
        if accepted {
            Acceptance::Accepted
        } else {
            Acceptance::Refused
        }
    }
}

/// Who must have accepted a route for us to serve it.
pub const CONTROLLER_NAME: &str = "linkerd.io/policy-controller";
