//! The Gateway API definitions of `tulle-crds` are generated from the types of the `gateway-api` crate.
//!
//! Its types carry the fields; defaults and bounds, which types do not have, are in the table below.
//! `TULLE_WRITE_CRDS=1 cargo nextest run -p tulle-tests --test charts gateway_crds` writes the files anew.

use std::fs;
use std::path::PathBuf;

use gateway_api::experimental::grpcroutes::GrpcRoute;
use gateway_api::experimental::httproutes::HttpRoute;
use gateway_api::experimental::tcproutes::TcpRoute;
use gateway_api::experimental::tlsroutes::TlsRoute;
use gateway_kube::core::CustomResourceExt;
use serde_json::{Value, json};

/// A version of a kind, and what clients of a deprecated one are told to use.
struct Version {
    name: &'static str,
    storage: bool,
    instead: Option<&'static str>,
}

struct Kind {
    definition: Value,
    /// The value of the chart that installs it.
    value: &'static str,
    versions: &'static [Version],
}

#[test]
fn the_gateway_api_definitions_are_those_of_the_types() {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../charts/tulle-crds/templates/gateway");
    for kind in kinds() {
        let file = dir.join(format!("{}.yaml", kind.plural()));
        let expected = kind.template();
        if std::env::var_os("TULLE_WRITE_CRDS").is_some() {
            fs::write(&file, &expected).expect("the chart is writable");
        }
        let found = fs::read_to_string(&file).unwrap_or_default();
        assert!(
            found == expected,
            "{} is not what the types say; write it with \
             TULLE_WRITE_CRDS=1 cargo nextest run -p tulle-tests --test charts gateway_crds",
            file.display()
        );
    }
}

fn kinds() -> [Kind; 4] {
    const HTTP: &[Version] = &[Version::stored("v1"), Version::served("v1beta1")];
    const GRPC: &[Version] = &[Version::stored("v1"), Version::deprecated("v1alpha2", "v1")];
    const ALPHA: &[Version] = &[Version::stored("v1alpha2")];
    [
        Kind::new::<HttpRoute>("enableHttpRoutes", HTTP),
        Kind::new::<GrpcRoute>("enableHttpRoutes", GRPC),
        Kind::new::<TlsRoute>("enableTlsRoutes", ALPHA),
        Kind::new::<TcpRoute>("enableTcpRoutes", ALPHA),
    ]
}

impl Version {
    const fn stored(name: &'static str) -> Self {
        Self {
            name,
            storage: true,
            instead: None,
        }
    }

    const fn served(name: &'static str) -> Self {
        Self {
            name,
            storage: false,
            instead: None,
        }
    }

    const fn deprecated(name: &'static str, instead: &'static str) -> Self {
        Self {
            name,
            storage: false,
            instead: Some(instead),
        }
    }
}

impl Kind {
    fn new<K: CustomResourceExt>(value: &'static str, versions: &'static [Version]) -> Self {
        let definition = serde_json::to_value(K::crd()).expect("a definition is JSON");
        Self {
            definition,
            value,
            versions,
        }
    }

    fn plural(&self) -> &str {
        self.definition["spec"]["names"]["plural"]
            .as_str()
            .expect("every kind has one")
    }

    /// The file of the chart: the definition, inside the condition under which it is installed.
    fn template(&self) -> String {
        let spec = serde_yaml_ng::to_string(&json!({ "spec": self.spec() })).expect("JSON is YAML");
        let (value, plural) = (self.value, self.plural());
        format!(
            r#"{{{{- if eq (include "tulle-crds.routes" (dict "value" .Values.{value} "all" .Values.installGatewayAPI)) "true" }}}}
# Generated; see tests/tests/charts/gateway_crds.rs.
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: {plural}.gateway.networking.k8s.io
  annotations:
    api-approved.kubernetes.io: https://github.com/kubernetes-sigs/gateway-api/pull/2997
    gateway.networking.k8s.io/bundle-version: {BUNDLE_VERSION}
    gateway.networking.k8s.io/channel: experimental
    helm.sh/resource-policy: keep
    {{{{- include "tulle-crds.annotations" . | nindent 4 }}}}
  labels:
    {{{{- include "tulle-crds.labels" . | nindent 4 }}}}
{spec}{{{{- end }}}}
"#
        )
    }

    fn spec(&self) -> Value {
        let kind = self.definition["spec"]["names"]["kind"]
            .as_str()
            .expect("every kind has one");
        let mut schema = self.definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
        complete(&mut schema, "", kind);
        let mut columns = vec![json!({ "name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp" })];
        if schema["properties"]["spec"]["properties"].get("hostnames").is_some() {
            columns.insert(
                0,
                json!({ "name": "Hostnames", "type": "string", "jsonPath": ".spec.hostnames" }),
            );
        }
        let versions = self.versions.iter().map(|version| {
            let mut entry = json!({
                "name": version.name,
                "served": true,
                "storage": version.storage,
                "subresources": { "status": {} },
                "additionalPrinterColumns": columns,
                "schema": { "openAPIV3Schema": schema },
            });
            if let Some(instead) = version.instead {
                entry["deprecated"] = json!(true);
                entry["deprecationWarning"] = json!(format!(
                    "gateway.networking.k8s.io/{} {kind} is deprecated; use gateway.networking.k8s.io/{instead} {kind}",
                    version.name
                ));
            }
            entry
        });
        json!({
            "group": "gateway.networking.k8s.io",
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "plural": self.plural(),
                "singular": kind.to_lowercase(),
                "categories": ["gateway-api"],
            },
            "conversion": { "strategy": "None" },
            "versions": versions.collect::<Vec<_>>(),
        })
    }
}

/// Drops descriptions and what only Rust's types say, and adds defaults and bounds.
fn complete(schema: &mut Value, name: &str, kind: &str) {
    let Some(object) = schema.as_object_mut() else { return };
    object.remove("description");
    object.remove("title");
    // An `Option` may be absent; the API takes no `null` for it.
    object.remove("nullable");
    if let Some(Value::Array(choices)) = object.get_mut("enum") {
        choices.retain(|choice| !choice.is_null());
    }
    if let Some(Value::Object(properties)) = object.get_mut("properties") {
        for (property, schema) in properties.iter_mut() {
            complete(schema, property, kind);
            let fitting = RULES.iter().filter(|rule| {
                rule.property == property
                    && (rule.within.is_empty() || rule.within.contains(&name))
                    && (rule.kind.is_empty() || rule.kind == kind)
            });
            for rule in fitting {
                merge(schema, serde_json::from_str(rule.add).expect("the table is JSON"));
            }
        }
    }
    // TLSRoute requires names from v1 on only.
    if kind == "TLSRoute"
        && name == "spec"
        && let Some(Value::Array(required)) = object.get_mut("required")
    {
        required.retain(|field| field != "hostnames");
    }
    if let Some(items) = object.get_mut("items") {
        complete(items, name, kind);
        if let Some((_, add)) = ITEMS.iter().find(|(property, _)| *property == name) {
            merge(items, serde_json::from_str(add).expect("the table is JSON"));
        }
    }
}

fn merge(into: &mut Value, add: Value) {
    let (Some(into), Value::Object(add)) = (into.as_object_mut(), add) else {
        panic!("rules are about schemas");
    };
    // A `path` is matched in one place and replaced in another: their types differ.
    if let (Some(Value::Array(choices)), Some(default)) = (into.get("enum"), add.get("default"))
        && !choices.contains(default)
    {
        return;
    }
    into.extend(add);
}

/// What the API says about a property beyond its type.
struct Rule {
    property: &'static str,
    /// The property that holds it; empty for any.
    within: &'static [&'static str],
    /// The kind of route; empty for any.
    kind: &'static str,
    /// JSON that is merged into its schema.
    add: &'static str,
}

const fn rule(property: &'static str, within: &'static [&'static str], add: &'static str) -> Rule {
    Rule {
        property,
        within,
        kind: "",
        add,
    }
}

const fn of_kind(
    kind: &'static str,
    property: &'static str,
    within: &'static [&'static str],
    add: &'static str,
) -> Rule {
    Rule {
        property,
        within,
        kind,
        add,
    }
}

const PARENT: &[&str] = &["parentRefs", "parentRef"];
const BACKEND: &[&str] = &["backendRefs", "backendRef"];
const REFERENCE: &[&str] = &["parentRefs", "parentRef", "backendRefs", "backendRef", "extensionRef"];
const MATCH: &[&str] = &["headers", "queryParams"];
const HEADER: &[&str] = &["set", "add"];

/// Later rules win over earlier ones.
const RULES: &[Rule] = &[
    rule("group", REFERENCE, r#"{"maxLength": 253}"#),
    rule("kind", REFERENCE, r#"{"minLength": 1, "maxLength": 63}"#),
    rule("name", REFERENCE, r#"{"minLength": 1, "maxLength": 253}"#),
    rule("namespace", REFERENCE, r#"{"minLength": 1, "maxLength": 63}"#),
    rule("sectionName", REFERENCE, r#"{"minLength": 1, "maxLength": 253}"#),
    rule("group", PARENT, r#"{"default": "gateway.networking.k8s.io"}"#),
    rule("kind", PARENT, r#"{"default": "Gateway"}"#),
    rule("group", BACKEND, r#"{"default": ""}"#),
    rule("kind", BACKEND, r#"{"default": "Service"}"#),
    rule("weight", BACKEND, r#"{"default": 1, "minimum": 0, "maximum": 1000000}"#),
    rule("port", &[], r#"{"minimum": 1, "maximum": 65535}"#),
    rule("controllerName", &[], r#"{"minLength": 1, "maxLength": 253}"#),
    rule(
        "conditions",
        &[],
        r#"{"maxItems": 8, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}"#,
    ),
    rule("parents", &[], r#"{"maxItems": 32}"#),
    rule("parentRefs", &[], r#"{"maxItems": 32}"#),
    rule("hostnames", &[], r#"{"maxItems": 16}"#),
    rule("rules", &[], r#"{"minItems": 1, "maxItems": 16}"#),
    of_kind(
        "HTTPRoute",
        "rules",
        &["spec"],
        r#"{"default": [{"matches": [{"path": {"type": "PathPrefix", "value": "/"}}]}]}"#,
    ),
    rule("matches", &["rules"], r#"{"maxItems": 64}"#),
    of_kind(
        "HTTPRoute",
        "matches",
        &["rules"],
        r#"{"default": [{"path": {"type": "PathPrefix", "value": "/"}}]}"#,
    ),
    rule("filters", &[], r#"{"maxItems": 16}"#),
    rule("backendRefs", &[], r#"{"maxItems": 16}"#),
    of_kind(
        "HTTPRoute",
        "path",
        &["matches"],
        r#"{"default": {"type": "PathPrefix", "value": "/"}}"#,
    ),
    rule("type", &["path"], r#"{"default": "PathPrefix"}"#),
    rule("value", &["path"], r#"{"default": "/", "maxLength": 1024}"#),
    rule("type", &["method"], r#"{"default": "Exact"}"#),
    rule("service", &["method"], r#"{"maxLength": 1024}"#),
    rule("method", &["method"], r#"{"maxLength": 1024}"#),
    rule(
        "headers",
        &["matches"],
        r#"{"maxItems": 16, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}"#,
    ),
    rule(
        "queryParams",
        &["matches"],
        r#"{"maxItems": 16, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}"#,
    ),
    rule("type", MATCH, r#"{"default": "Exact"}"#),
    rule("name", MATCH, r#"{"minLength": 1, "maxLength": 256}"#),
    rule("value", MATCH, r#"{"minLength": 1, "maxLength": 4096}"#),
    rule("set", &["requestHeaderModifier", "responseHeaderModifier"], HEADERS),
    rule("add", &["requestHeaderModifier", "responseHeaderModifier"], HEADERS),
    rule(
        "remove",
        &["requestHeaderModifier", "responseHeaderModifier"],
        r#"{"maxItems": 16, "x-kubernetes-list-type": "set"}"#,
    ),
    rule("name", HEADER, r#"{"minLength": 1, "maxLength": 256}"#),
    rule("value", HEADER, r#"{"minLength": 1, "maxLength": 4096}"#),
    rule(
        "statusCode",
        &["requestRedirect"],
        r#"{"default": 302, "enum": [301, 302, 303, 307, 308]}"#,
    ),
    rule("replaceFullPath", &[], r#"{"maxLength": 1024}"#),
    rule("replacePrefixMatch", &[], r#"{"maxLength": 1024}"#),
    rule("hostname", &[], HOSTNAME),
    rule("percent", &["requestMirror"], r#"{"minimum": 0, "maximum": 100}"#),
    rule("numerator", &["fraction"], r#"{"minimum": 0}"#),
    rule("denominator", &["fraction"], r#"{"default": 100, "minimum": 1}"#),
    rule("request", &["timeouts"], DURATION),
    rule("backendRequest", &["timeouts"], DURATION),
    rule("backoff", &["retry"], DURATION),
    rule("type", &["sessionPersistence"], r#"{"default": "Cookie"}"#),
    rule("absoluteTimeout", &[], DURATION),
    rule("idleTimeout", &[], DURATION),
    rule("lifetimeType", &[], r#"{"default": "Session"}"#),
    rule("sessionName", &[], r#"{"maxLength": 128}"#),
    rule("maxAge", &["cors"], r#"{"default": 5, "minimum": 1}"#),
];

/// The same for the members of a list.
const ITEMS: &[(&str, &str)] = &[(
    "hostnames",
    r#"{"minLength": 1, "maxLength": 253, "pattern": "^(\\*\\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}"#,
)];

const HEADERS: &str = r#"{"maxItems": 16, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}"#;
const HOSTNAME: &str = r#"{"minLength": 1, "maxLength": 253, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}"#;
const DURATION: &str = r#"{"pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}"#;

/// The release of the Gateway API that the crate's types are of.
const BUNDLE_VERSION: &str = "v1.5.1";
