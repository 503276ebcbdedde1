//! `tulle inject` and `tulle uninject`: read manifests, write them with or without the mesh, and report on standard error.
//!
//! The code of the injector webhook decides whether and how a pod is injected.

mod flags;
mod streams;
mod uninject;
mod workload;
mod yaml;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use tulle_control::injection::values::Values;
use tulle_control::injection::{self, Config, Decision, InjectionOrigin, InjectionTarget, ProxyMode, SkipReason};
use tulle_core::names::annotation;

use self::flags::ProxyFlags;
use self::streams::Output;
use self::workload::{ManifestKind, ObjectName};
use crate::kubernetes;

/// Add the mesh to manifests
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    /// Files or directories of manifests; - reads standard input
    #[arg(required = true, value_name = "FILE")]
    inputs: Vec<PathBuf>,
    /// Add the proxy's containers to the manifests, instead of the annotation that makes the injector add them
    #[arg(long)]
    manual: bool,
    /// Route by the header l5d-dst-override, for ingress controllers that choose endpoints themselves
    #[arg(long)]
    ingress: bool,
    /// With --manual: do not read the configuration of the control plane
    #[arg(long)]
    ignore_cluster: bool,
    /// With --manual: read the control plane's values from this file instead of the cluster
    #[arg(long, value_name = "FILE")]
    values: Option<PathBuf>,
    /// Output format; with yaml, unchanged manifests keep their text
    #[arg(short, long, value_name = "FORMAT", default_value = "yaml")]
    output: Output,
    #[command(flatten)]
    proxy: ProxyFlags,
}

/// Remove the mesh from manifests
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct UninjectArgs {
    /// Files or directories of manifests; - reads standard input
    #[arg(required = true, value_name = "FILE")]
    inputs: Vec<PathBuf>,
    /// Output format; with yaml, unchanged manifests keep their text
    #[arg(short, long, value_name = "FORMAT", default_value = "yaml")]
    output: Output,
}

/// How objects are injected.
struct Injection {
    config: Config,
    manual: bool,
    mode: ProxyMode,
    /// The annotations of the flags.
    annotations: Vec<(&'static str, String)>,
    opaque_ports: Option<String>,
}

/// The result for a manifest.
enum ManifestOutcome {
    /// The manifest was injected or uninjected: annotations or containers were added or removed. The texts are notes for the user.
    InjectedOrUninjected(Vec<String>),
    /// The object is not a workload and only got annotations.
    AnnotatedOnly,
    /// The manifest is unchanged, for these reasons.
    Skipped(Vec<String>),
}

/// Runs `tulle inject`.
///
/// # Errors
/// Fails if a flag is invalid, or if a manifest or the configuration cannot be read.
pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let annotations = args.proxy.annotations()?;
    let values = match (&args.values, args.manual) {
        (Some(path), _) => {
            let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            Values::from_yaml(&text).with_context(|| format!("reading {}", path.display()))?
        }
        (None, true) if !args.ignore_cluster => fetch_values(flags)?,
        (None, _) => Values::default(),
    };
    // Without trust anchors the injected proxy would never start.
    ensure!(!args.manual || !values.trust_anchors().is_empty(), NO_ANCHORS);
    let injection = Injection {
        config: Config {
            values,
            control_plane_namespace: flags.linkerd_namespace.clone(),
            origin: InjectionOrigin::CommandLine,
        },
        manual: args.manual,
        mode: match args.ingress {
            true => ProxyMode::Ingress,
            false => ProxyMode::Standard,
        },
        annotations,
        opaque_ports: args.proxy.opaque_ports().map(str::to_owned),
    };
    let mut n_manual = 0;
    streams::transform_objects(&args.inputs, args.output, |object| {
        let object_name = ObjectName::from_object(object);
        let outcome = injection.apply(object).with_context(|| object_name.to_string())?;
        report(&object_name, "injected", &outcome);
        n_manual += usize::from(args.manual && matches!(outcome, ManifestOutcome::InjectedOrUninjected(_)));
        Ok(())
    })?;
    if n_manual > 0 {
        eprintln!("{NAMESPACES_NOT_READ}");
    }
    Ok(())
}

/// Runs `tulle uninject`.
///
/// # Errors
/// Fails if a manifest cannot be read.
pub(crate) fn uninject(args: &UninjectArgs) -> anyhow::Result<()> {
    streams::transform_objects(&args.inputs, args.output, |object| {
        let outcome = match uninject::apply(object) {
            true => ManifestOutcome::InjectedOrUninjected(Vec::new()),
            false => ManifestOutcome::Skipped(Vec::new()),
        };
        report(&ObjectName::from_object(object), "uninjected", &outcome);
        Ok(())
    })
}

/// The values that the control plane was installed with.
fn fetch_values(flags: &kubernetes::Flags) -> anyhow::Result<Values> {
    let value = crate::runtime()?.block_on(async { crate::config::values(&flags.connect().await?).await })?;
    Values::from_yaml(&value.to_string()).context("reading ConfigMap linkerd-config")
}

impl Injection {
    fn apply(&self, object: &mut Value) -> anyhow::Result<ManifestOutcome> {
        match ManifestKind::from_object(object) {
            ManifestKind::Pods(path) => self.inject_workload(object, path),
            ManifestKind::Namespace => {
                annotate(object, annotation::INJECT, self.inject_annotation_value());
                for (key, value) in &self.annotations {
                    annotate(object, key, value);
                }
                Ok(ManifestOutcome::AnnotatedOnly)
            }
            ManifestKind::Service => Ok(match &self.opaque_ports {
                Some(ports) => {
                    annotate(object, annotation::OPAQUE_PORTS, ports);
                    ManifestOutcome::AnnotatedOnly
                }
                None => ManifestOutcome::Skipped(Vec::new()),
            }),
            ManifestKind::Other => Ok(ManifestOutcome::Skipped(Vec::new())),
        }
    }

    fn inject_workload(&self, object: &mut Value, path: &'static [&'static str]) -> anyhow::Result<ManifestOutcome> {
        let object_name = ObjectName::from_object(object);
        let namespace = object
            .pointer("/metadata/namespace")
            .and_then(Value::as_str)
            .unwrap_or("default")
            .to_owned();
        // Work on a copy without an earlier injection.
        let mut changed = object.clone();
        uninject::remove_sidecar(&mut changed, path);
        let Some(pod_template) = workload::part_at(&mut changed, path) else {
            return Ok(ManifestOutcome::Skipped(vec!["it has no pod template".to_owned()]));
        };
        let is_disabled = pod_template
            .pointer("/metadata/annotations")
            .and_then(|all| all.get(annotation::INJECT))
            == Some(&json!("disabled"));
        if is_disabled {
            return Ok(ManifestOutcome::Skipped(vec![
                SkipReason::Disabled.description().to_owned(),
            ]));
        }
        let containers = pod_template.pointer("/spec/containers").and_then(Value::as_array);
        let has_containers = containers.is_some_and(|containers| !containers.is_empty());
        ensure!(
            has_containers || !self.manual,
            "the pod template has no spec.containers, so no proxy can be added: the manifest is incomplete; inject \
             the output of kustomize or a similar tool, or remove --manual"
        );
        annotate(pod_template, annotation::INJECT, self.inject_annotation_value());
        for (key, value) in &self.annotations {
            annotate(pod_template, key, value);
        }
        let template = workload::parse_template(pod_template)?;
        let (spec, no_annotations) = (template.spec.unwrap_or_default(), BTreeMap::new());
        let target = InjectionTarget {
            pointer: path,
            metadata: template.metadata.as_ref(),
            spec: &spec,
            namespace: &namespace,
            namespace_annotations: &no_annotations,
            owner: Some(injection::PodOwner {
                kind: object_name.kind,
                name: object_name.name,
            }),
        };
        let outcome = injection::inject_pod(&self.config, &target);
        if let Some(reason) = outcome.denial_reason {
            bail!(reason);
        }
        if let Decision::Skip(reasons) = &outcome.decision {
            let fatal = reasons.iter().find(|reason| FATAL_SKIP_REASONS.contains(reason));
            if let Some(reason) = fatal {
                bail!(reason.description());
            }
            return Ok(ManifestOutcome::Skipped(
                reasons.iter().map(|reason| reason.description().to_owned()).collect(),
            ));
        }
        let mut notes = outcome.warnings;
        if target.has_udp_ports() {
            notes.push(
                "it exposes UDP ports, which the proxy does not see (`udp_ports_enabled` in Linkerd's report)"
                    .to_owned(),
            );
        }
        if self.manual {
            json_patch::patch(&mut changed, &outcome.patch).context("adding the proxy")?;
        }
        *object = changed;
        Ok(ManifestOutcome::InjectedOrUninjected(notes))
    }

    fn inject_annotation_value(&self) -> &'static str {
        match self.mode {
            ProxyMode::Standard => "enabled",
            ProxyMode::Ingress => "ingress",
        }
    }
}

/// Sets an annotation of an object or template.
fn annotate(object: &mut Value, key: &str, value: &str) {
    for path in ["/metadata", "/metadata/annotations"] {
        let (parent, name) = path.rsplit_once('/').unwrap_or_default();
        if let Some(Value::Object(parent)) = object.pointer_mut(parent)
            && parent.get(name).is_none_or(Value::is_null)
        {
            parent.insert(name.to_owned(), json!({}));
        }
    }
    if let Some(Value::Object(annotations)) = object.pointer_mut("/metadata/annotations") {
        annotations.insert(key.to_owned(), value.into());
    }
}

/// Prints the outcome of an object. Nothing is printed for a document without an object.
fn report(object_name: &ObjectName, action: &str, outcome: &ManifestOutcome) {
    let ObjectName { kind, name } = object_name;
    if kind.is_empty() {
        return;
    }
    match outcome {
        ManifestOutcome::InjectedOrUninjected(notes) => {
            eprintln!("{kind} \"{name}\" {action}");
            for note in notes {
                eprintln!("{kind} \"{name}\": {note}");
            }
        }
        ManifestOutcome::AnnotatedOnly => eprintln!("{kind} \"{name}\" annotated"),
        ManifestOutcome::Skipped(reasons) if reasons.is_empty() => eprintln!("{kind} \"{name}\" skipped"),
        ManifestOutcome::Skipped(reasons) => eprintln!("{kind} \"{name}\" skipped: {}", reasons.join("; ")),
    }
}

/// Skip reasons that are errors: the pod needs a proxy, and its manifest has to be changed to get one. Manifests with other
/// reasons are skipped: injection is disabled, or there is no proxy for the pod's operating system.
const FATAL_SKIP_REASONS: [SkipReason; 3] = [
    SkipReason::HostNetwork,
    SkipReason::SidecarExists,
    SkipReason::NoServiceAccountToken,
];
const NAMESPACES_NOT_READ: &str = "tulle: the annotations of namespaces were not read. Copy config.linkerd.io/*, \
     config.alpha.linkerd.io/*, config.tulle.dev/* and viz.linkerd.io/disable-tap of each namespace into the pod templates. If \
     an injector runs in the cluster, two of these annotations can be omitted, because it copies them from the namespace when \
     a pod is created: \
     config.linkerd.io/default-inbound-policy and, unless the value proxy.requireIdentityOnInboundPorts is set, \
     config.linkerd.io/proxy-require-identity-inbound-ports";
const NO_ANCHORS: &str = "no trust anchors given, and a proxy does not start without them: remove --ignore-cluster, or pass a \
     file with identityTrustAnchorsPEM by --values";

const EXAMPLE: &str = "\
Manifests are written to standard output, the report to standard error:

  tulle inject web.yaml | kubectl apply -f -
  kubectl get deploy -n shop -o yaml | tulle inject - | kubectl apply -f -
  tulle inject --manual --proxy-log-level debug manifests/ > meshed.yaml
  tulle uninject meshed.yaml | kubectl apply -f -";

#[cfg(test)]
mod tests;
