//! The Gateway API definitions of `tulle-crds` equal those of the Gateway API, without descriptions. The control plane reads
//! each version that the Gateway API serves.
//!
//! They are read from the Go module that `tools/gateway-api` pins, which generates them from its types.
//! `TULLE_WRITE_CRDS=1 cargo nextest run -p tulle-tests --test charts gateway_crds` rewrites the files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tulle_control::resources::KINDS;
use tulle_control::resources::policy::reference::GATEWAY_GROUP;

struct Version {
    name: &'static str,
    storage: bool,
    /// The version whose schema it uses, usually its own.
    schema: &'static str,
    /// The version that replaces a deprecated one, for the deprecation warning.
    instead: Option<&'static str>,
}

struct Kind {
    /// The definition of the module.
    definition: Value,
    /// The chart value that enables the kind.
    value: &'static str,
    versions: &'static [Version],
}

#[test]
fn the_gateway_api_definitions_are_those_of_the_pinned_module() {
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
            "{} is not what the module says; write it with \
             TULLE_WRITE_CRDS=1 cargo nextest run -p tulle-tests --test charts gateway_crds",
            file.display()
        );
    }
}

#[test]
fn the_control_plane_reads_each_served_version_of_both_channels() {
    let module = module();
    for info in KINDS.iter().filter(|info| info.group == GATEWAY_GROUP) {
        for channel in ["standard", "experimental"] {
            let Some(definition) = definition(&module, channel, &info.plural()) else {
                assert_eq!(
                    (channel, info.name),
                    ("standard", "TCPRoute"),
                    "the definition is missing"
                );
                continue;
            };
            let all = definition["spec"]["versions"].as_array().into_iter().flatten();
            for version in all.filter(|version| version["served"] == true) {
                let name = version["name"].as_str().expect("a name");
                assert!(info.versions.contains(&name), "{channel} {} {name}", info.name);
            }
        }
    }
}

fn kinds() -> [Kind; 4] {
    const HTTP: &[Version] = &[Version::stored("v1"), Version::served("v1beta1")];
    // The module no longer has v1alpha2 of GRPCRoute. The schema of that version was the same as that of v1.
    const GRPC: &[Version] = &[
        Version::stored("v1"),
        Version {
            schema: "v1",
            ..Version::deprecated("v1alpha2", "v1")
        },
    ];
    // Linkerd's control plane reads v1alpha2.
    const TLS: &[Version] = &[
        Version::stored("v1"),
        Version::deprecated("v1alpha3", "v1"),
        Version::deprecated("v1alpha2", "v1"),
    ];
    const TCP: &[Version] = &[Version::stored("v1alpha2")];
    let module = module();
    [
        Kind::read(&module, "httproutes", "enableHttpRoutes", HTTP),
        Kind::read(&module, "grpcroutes", "enableHttpRoutes", GRPC),
        Kind::read(&module, "tlsroutes", "enableTlsRoutes", TLS),
        Kind::read(&module, "tcproutes", "enableTcpRoutes", TCP),
    ]
}

/// The directory of the pinned module. Go downloads and verifies it if it is missing.
fn module() -> PathBuf {
    let tool = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tools/gateway-api");
    let ran = Command::new("go")
        .arg("-C")
        .arg(tool)
        .args(["mod", "download", "-json", "sigs.k8s.io/gateway-api"])
        .output()
        .expect("go is installed, as for the test cluster");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let downloaded: Value = serde_json::from_slice(&ran.stdout).expect("go prints JSON");
    assert_eq!(
        downloaded["Version"], BUNDLE_VERSION,
        "tools/gateway-api/go.mod names another release"
    );
    downloaded["Dir"].as_str().expect("a directory").into()
}

/// The definition of a kind in a channel of the module. `None` if the channel does not have it.
fn definition(module: &Path, channel: &str, plural: &str) -> Option<Value> {
    let file = format!("config/crd/{channel}/{GATEWAY_GROUP}_{plural}.yaml");
    let text = fs::read_to_string(module.join(file)).ok()?;
    Some(serde_yaml_ng::from_str(&text).expect("a definition is YAML"))
}

impl Version {
    const fn stored(name: &'static str) -> Self {
        Self {
            name,
            storage: true,
            schema: name,
            instead: None,
        }
    }

    const fn served(name: &'static str) -> Self {
        Self {
            storage: false,
            ..Self::stored(name)
        }
    }

    const fn deprecated(name: &'static str, instead: &'static str) -> Self {
        Self {
            instead: Some(instead),
            ..Self::served(name)
        }
    }
}

impl Kind {
    fn read(module: &Path, plural: &str, value: &'static str, versions: &'static [Version]) -> Self {
        Self {
            definition: definition(module, "experimental", plural).expect("the module has the definition"),
            value,
            versions,
        }
    }

    fn plural(&self) -> &str {
        self.definition["spec"]["names"]["plural"]
            .as_str()
            .expect("every kind has a plural name")
    }

    /// The template of the chart: the definition inside its condition.
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
            .expect("every definition has a kind");
        let versions = self.versions.iter().map(|version| {
            let mut all = self.definition["spec"]["versions"].as_array().into_iter().flatten();
            let found = all.find(|found| found["name"] == version.schema);
            let found = found.expect("the module has the version");
            let mut schema = found["schema"]["openAPIV3Schema"].clone();
            remove_descriptions(&mut schema);
            let mut entry = json!({
                "name": version.name,
                "served": true,
                "storage": version.storage,
                "subresources": { "status": {} },
                "additionalPrinterColumns": found["additionalPrinterColumns"],
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

/// Removes descriptions, but not the schema of a property named `description`.
fn remove_descriptions(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            if object.get("description").is_some_and(Value::is_string) {
                object.remove("description");
            }
            object.values_mut().for_each(remove_descriptions);
        }
        Value::Array(all) => all.iter_mut().for_each(remove_descriptions),
        _ => {}
    }
}

/// The release of the Gateway API.
const BUNDLE_VERSION: &str = "v1.5.1";
