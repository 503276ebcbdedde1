//! `tulle inject` and `tulle uninject`: manifests in, manifests with or without the mesh out, a report on standard error.
//!
//! What becomes of a pod is decided by the injector's own code.

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
use tulle_control::inject::values::Values;
use tulle_control::inject::{self, Config, Decision, Mode, Origin, Reason, Subject};
use tulle_core::names::annotation;

use self::flags::ProxyFlags;
use self::streams::Output;
use self::workload::{Title, Workload};
use crate::kubernetes;

/// Add the mesh to manifests
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Args {
    /// Files or directories of manifests; - is standard input
    #[arg(required = true, value_name = "FILE")]
    inputs: Vec<PathBuf>,
    /// Add the proxy's containers to the manifests, instead of the annotation that has the injector do so
    #[arg(long)]
    manual: bool,
    /// Route by the header l5d-dst-override, for ingress controllers that choose endpoints themselves
    #[arg(long)]
    ingress: bool,
    /// With --manual: do not read the configuration of the control plane
    #[arg(long)]
    ignore_cluster: bool,
    /// With --manual: a file of the control plane's values, instead of asking the cluster
    #[arg(long, value_name = "FILE")]
    values: Option<PathBuf>,
    /// How manifests are written; those that do not change stay as they are
    #[arg(short, long, value_name = "FORMAT", default_value = "yaml")]
    output: Output,
    #[command(flatten)]
    proxy: ProxyFlags,
}

/// Remove the mesh from manifests
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct UninjectArgs {
    /// Files or directories of manifests; - is standard input
    #[arg(required = true, value_name = "FILE")]
    inputs: Vec<PathBuf>,
    /// How manifests are written; those that do not change stay as they are
    #[arg(short, long, value_name = "FORMAT", default_value = "yaml")]
    output: Output,
}

/// What is done to each object.
struct Injection {
    config: Config,
    manual: bool,
    mode: Mode,
    /// The flags.
    annotations: Vec<(&'static str, String)>,
    opaque_ports: Option<String>,
}

/// What became of an object.
enum Verdict {
    Injected(Vec<String>),
    /// It got an annotation and is no workload.
    Annotated,
    Skipped(Vec<String>),
}

/// Runs `tulle inject`.
///
/// # Errors
/// Flags, manifests and configurations that cannot be used.
pub(crate) fn main(args: &Args, cluster: &kubernetes::Flags) -> anyhow::Result<()> {
    let annotations = args.proxy.annotations()?;
    let values = match (&args.values, args.manual) {
        (Some(path), _) => {
            let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            Values::from_yaml(&text).with_context(|| format!("reading {}", path.display()))?
        }
        (None, true) if !args.ignore_cluster => values_of(cluster)?,
        (None, _) => Values::default(),
    };
    // Such a proxy trusts nobody, and would never start.
    ensure!(!args.manual || !values.trust_anchors().is_empty(), NO_ANCHORS);
    let injection = Injection {
        config: Config {
            values,
            control_plane_namespace: cluster.linkerd_namespace.clone(),
            origin: Origin::CommandLine,
        },
        manual: args.manual,
        mode: match args.ingress {
            true => Mode::Ingress,
            false => Mode::Usual,
        },
        annotations,
        opaque_ports: args.proxy.opaque_ports().map(str::to_owned),
    };
    let mut n_manual = 0;
    streams::each(&args.inputs, args.output, |object| {
        let title = Title::of(object);
        let verdict = injection.apply(object).with_context(|| title.to_string())?;
        report(&title, "injected", &verdict);
        n_manual += usize::from(args.manual && matches!(verdict, Verdict::Injected(_)));
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
/// Manifests that cannot be read.
pub(crate) fn uninject(args: &UninjectArgs) -> anyhow::Result<()> {
    streams::each(&args.inputs, args.output, |object| {
        let verdict = match uninject::apply(object) {
            true => Verdict::Injected(Vec::new()),
            false => Verdict::Skipped(Vec::new()),
        };
        report(&Title::of(object), "uninjected", &verdict);
        Ok(())
    })
}

/// The values that the control plane was installed with.
fn values_of(cluster: &kubernetes::Flags) -> anyhow::Result<Values> {
    let value = crate::runtime()?.block_on(async { crate::config::values(&cluster.connect().await?).await })?;
    Values::from_yaml(&value.to_string()).context("reading ConfigMap linkerd-config")
}

impl Injection {
    fn apply(&self, object: &mut Value) -> anyhow::Result<Verdict> {
        match Workload::of(object) {
            Workload::Pods(path) => self.workload(object, path),
            Workload::Namespace => {
                annotate(object, annotation::INJECT, self.wish());
                for (key, value) in &self.annotations {
                    annotate(object, key, value);
                }
                Ok(Verdict::Annotated)
            }
            Workload::Service => Ok(match &self.opaque_ports {
                Some(ports) => {
                    annotate(object, annotation::OPAQUE_PORTS, ports);
                    Verdict::Annotated
                }
                None => Verdict::Skipped(Vec::new()),
            }),
            Workload::Other => Ok(Verdict::Skipped(Vec::new())),
        }
    }

    fn workload(&self, object: &mut Value, path: &'static [&'static str]) -> anyhow::Result<Verdict> {
        let title = Title::of(object);
        let namespace = object
            .pointer("/metadata/namespace")
            .and_then(Value::as_str)
            .unwrap_or("default")
            .to_owned();
        let mut changed = object.clone();
        uninject::sidecar(&mut changed, path);
        let Some(part) = workload::at(&mut changed, path) else {
            return Ok(Verdict::Skipped(vec!["it describes no pods".to_owned()]));
        };
        let refused = part
            .pointer("/metadata/annotations")
            .and_then(|all| all.get(annotation::INJECT))
            == Some(&json!("disabled"));
        if refused {
            return Ok(Verdict::Skipped(vec![Reason::Disabled.sentence().to_owned()]));
        }
        let containers = part.pointer("/spec/containers").and_then(Value::as_array);
        let is_whole = containers.is_some_and(|containers| !containers.is_empty());
        ensure!(
            is_whole || !self.manual,
            "it describes pods without spec.containers, to which no proxy can be added: it is a part of a manifest; inject \
             what kustomize or another tool makes of it, or leave out --manual"
        );
        annotate(part, annotation::INJECT, self.wish());
        for (key, value) in &self.annotations {
            annotate(part, key, value);
        }
        let template = workload::template(part)?;
        let (spec, of_namespace) = (template.spec.unwrap_or_default(), BTreeMap::new());
        let subject = Subject {
            root: path,
            metadata: template.metadata.as_ref(),
            spec: &spec,
            namespace: &namespace,
            namespace_annotations: &of_namespace,
            owner: Some(inject::Workload {
                kind: title.kind,
                name: title.name,
            }),
        };
        let outcome = inject::pod(&self.config, &subject);
        if let Some(refusal) = outcome.refusal {
            bail!(refusal);
        }
        if let Decision::Skip(reasons) = &outcome.decision {
            // Who asks for a proxy that cannot be there is to know it from the exit code.
            let impossible = reasons.iter().find(|reason| IMPOSSIBLE.contains(reason));
            if let Some(reason) = impossible {
                bail!(reason.sentence());
            }
            return Ok(Verdict::Skipped(
                reasons.iter().map(|reason| reason.sentence().to_owned()).collect(),
            ));
        }
        let mut notes = outcome.warnings;
        if subject.has_udp_ports() {
            notes.push("it exposes UDP ports, which the proxy does not see (udp_ports_enabled)".to_owned());
        }
        if self.manual {
            json_patch::patch(&mut changed, &outcome.patch).context("adding the proxy")?;
        }
        *object = changed;
        Ok(Verdict::Injected(notes))
    }

    fn wish(&self) -> &'static str {
        match self.mode {
            Mode::Usual => "enabled",
            Mode::Ingress => "ingress",
        }
    }
}

/// Sets an annotation of an object or template.
fn annotate(part: &mut Value, key: &str, value: &str) {
    for path in ["/metadata", "/metadata/annotations"] {
        let (parent, name) = path.rsplit_once('/').unwrap_or_default();
        if let Some(Value::Object(parent)) = part.pointer_mut(parent)
            && parent.get(name).is_none_or(Value::is_null)
        {
            parent.insert(name.to_owned(), json!({}));
        }
    }
    if let Some(Value::Object(annotations)) = part.pointer_mut("/metadata/annotations") {
        annotations.insert(key.to_owned(), value.into());
    }
}

/// Tells what became of an object; documents without one are not worth a line.
fn report(title: &Title, done: &str, verdict: &Verdict) {
    let Title { kind, name } = title;
    if kind.is_empty() {
        return;
    }
    match verdict {
        Verdict::Injected(notes) => {
            eprintln!("{kind} \"{name}\" {done}");
            for note in notes {
                eprintln!("{kind} \"{name}\": {note}");
            }
        }
        Verdict::Annotated => eprintln!("{kind} \"{name}\" annotated"),
        Verdict::Skipped(reasons) if reasons.is_empty() => eprintln!("{kind} \"{name}\" skipped"),
        Verdict::Skipped(reasons) => eprintln!("{kind} \"{name}\" skipped: {}", reasons.join("; ")),
    }
}

/// What ends the command: the others say that no proxy is wanted, or needed.
const IMPOSSIBLE: [Reason; 3] = [
    Reason::HostNetwork,
    Reason::SidecarExists,
    Reason::NoServiceAccountToken,
];
const NAMESPACES_NOT_READ: &str = "tulle: annotations of namespaces have not been read. Of these, the injector adds \
     config.linkerd.io/default-inbound-policy and config.linkerd.io/proxy-require-identity-inbound-ports when the pods are made; \
     where it does not run, or for other annotations, write them into the manifests";
const NO_ANCHORS: &str = "there are no trust anchors, without which no proxy starts: leave out --ignore-cluster, or give a file with \
     identityTrustAnchorsPEM by --values";

const EXAMPLE: &str = "\
Manifests are written to standard output, the report to standard error:

  tulle inject web.yaml | kubectl apply -f -
  kubectl get deploy -n shop -o yaml | tulle inject - | kubectl apply -f -
  tulle inject --manual --proxy-log-level debug manifests/ > meshed.yaml
  tulle uninject meshed.yaml | kubectl apply -f -";

#[cfg(test)]
mod tests;
