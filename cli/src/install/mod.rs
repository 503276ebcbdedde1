//! `tulle install`, `upgrade`, `uninstall` and `prune`: the charts, rendered for `kubectl apply` and `kubectl delete`.
//!
//! Nothing here changes a cluster: manifests go to standard output, what was decided for the user to standard error.
//! The charts are those that Helm installs; [`charts`] has `helm template` render them, with [`values`] from flags.

mod charts;
mod existing;
mod removal;
mod values;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum;
use serde_json::{Value, json};
use tulle_control::trust::{self, CertificateAuthority};

pub(crate) use self::removal::{PruneArgs, UninstallArgs, prune, uninstall};

use self::charts::{CONTROL_PLANE, CRDS, Helm};
use self::existing::Existing;
use crate::certificates::{Certificate, leads_to};
use crate::{kubernetes, runtime};

/// What to install.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = INSTALL_EXAMPLES)]
pub(crate) struct InstallArgs {
    /// The CustomResourceDefinitions; they come before everything else
    #[arg(long)]
    crds: bool,
    /// Ask no cluster whether something is there already
    #[arg(long)]
    ignore_cluster: bool,
    #[command(flatten)]
    values: values::Flags,
    /// The form of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

/// What to change.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = UPGRADE_EXAMPLES)]
pub(crate) struct UpgradeArgs {
    /// The CustomResourceDefinitions
    #[arg(long)]
    crds: bool,
    /// Read what was installed from this file, as `kubectl get -o yaml` writes it, and ask no cluster; - is standard input
    #[arg(long, value_name = "FILE")]
    from_manifests: Option<PathBuf>,
    /// Change the issuer even where running proxies would not trust it
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    values: values::Flags,
    /// The form of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

#[derive(ValueEnum, Clone, Copy, Debug, Eq, PartialEq)]
enum Output {
    Yaml,
    Json,
}

/// Prints the manifests of a new installation.
///
/// # Errors
/// What is there already, what is missing, and values that the charts refuse.
pub(crate) fn install(args: &InstallArgs, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let helm = Helm::find(&flags.linkerd_namespace)?;
    let existing = match args.ignore_cluster {
        true => None,
        false => Some(runtime()?.block_on(async { existing::look(&flags.connect().await?).await })?),
    };
    let helm = helm.for_kubernetes(existing.as_ref().map(|existing| existing.kubernetes.as_str()));
    let given = values::merge(&helm, &args.values, None)?;
    if args.crds {
        if let Some(existing) = &existing {
            ensure_gateway_api(&given, existing)?;
        }
        crate::print(&show(&helm.render(&CRDS, &given)?, args.output)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(existing) = &existing {
        refuse_second_installation(existing, flags)?;
    }
    let complete = with_credentials(given)?;
    crate::print(&show(&control_plane(&helm, &complete, flags)?, args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the manifests of an installation with some values changed.
///
/// # Errors
/// No installation of this command, an issuer that running proxies would not trust, and values that the charts refuse.
pub(crate) fn upgrade(args: &UpgradeArgs, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let helm = Helm::find(&flags.linkerd_namespace)?;
    let existing = match &args.from_manifests {
        Some(path) => existing::from_manifests(path, &flags.linkerd_namespace)?,
        None => runtime()?.block_on(async { existing::look(&flags.connect().await?).await })?,
    };
    let helm = helm.for_kubernetes(Some(&existing.kubernetes));
    if args.crds {
        let given = values::merge(&helm, &args.values, None)?;
        crate::print(&show(&helm.render(&CRDS, &given)?, args.output)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let complete = values::merge(&helm, &args.values, Some(overrides(&existing, flags)?))?;
    if !args.force {
        ensure_trusted(&complete, &existing)?;
    }
    crate::print(&show(&control_plane(&helm, &complete, flags)?, args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

/// The manifests of a control plane with these values, the namespace and the record of the values included.
fn control_plane(helm: &Helm, values: &Value, flags: &kubernetes::Flags) -> anyhow::Result<Vec<Value>> {
    let namespace = &flags.linkerd_namespace;
    let mut manifests = vec![json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": namespace,
            // Pods of the control plane must start while no webhook answers.
            "annotations": { "linkerd.io/inject": "disabled" },
            "labels": {
                "config.linkerd.io/admission-webhooks": "disabled",
                "linkerd.io/control-plane-ns": namespace,
                "linkerd.io/is-control-plane": "true",
            },
        },
    })];
    manifests.extend(helm.render(&CONTROL_PLANE, values)?);
    manifests.push(json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": existing::OVERRIDES,
            "namespace": namespace,
            "labels": { "linkerd.io/control-plane-ns": namespace },
        },
        "stringData": { existing::OVERRIDES: serde_yaml_ng::to_string(values).context("writing the values")? },
    }));
    Ok(manifests)
}

/// What the last installation or upgrade was given.
fn overrides<'a>(existing: &'a Existing, flags: &kubernetes::Flags) -> anyhow::Result<&'a Value> {
    let namespace = &flags.linkerd_namespace;
    match (&existing.overrides, existing.is_installed) {
        (Some(overrides), _) => Ok(overrides),
        (None, true) => bail!(
            "the control plane in namespace {namespace} was not installed by `tulle install` (there is no Secret {}); \
             if Helm did, use helm upgrade",
            existing::OVERRIDES
        ),
        (None, false) => bail!("there is no control plane in namespace {namespace}; install one by `tulle install`"),
    }
}

fn ensure_gateway_api(given: &Value, existing: &Existing) -> anyhow::Result<()> {
    let installed = ["installGatewayAPI", "enableHttpRoutes"]
        .iter()
        .any(|key| given[*key] == json!(true));
    ensure!(
        installed
            || existing
                .crds
                .iter()
                .any(|crd| crd == "httproutes.gateway.networking.k8s.io"),
        "the cluster has no Gateway API, which routes are written in; add --set installGatewayAPI=true, or install it first"
    );
    Ok(())
}

fn refuse_second_installation(existing: &Existing, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let namespace = &flags.linkerd_namespace;
    ensure!(
        !existing.is_installed,
        "there is a control plane in namespace {namespace} already; change it by `tulle upgrade`, or render the manifests \
         anyway by --ignore-cluster"
    );
    let missing: Vec<_> = NEEDED_CRDS
        .iter()
        .filter(|name| !existing.crds.iter().any(|crd| crd == *name))
        .collect();
    ensure!(
        missing.is_empty(),
        "CustomResourceDefinitions are missing ({}); run `tulle install --crds | kubectl apply -f -` first",
        missing.iter().map(|name| **name).collect::<Vec<_>>().join(", ")
    );
    Ok(())
}

/// Makes a trust anchor and an issuer where no credentials are given; half a set is refused.
fn with_credentials(mut values: Value) -> anyhow::Result<Value> {
    let text = |pointer: &str| {
        values
            .pointer(pointer)
            .and_then(Value::as_str)
            .is_some_and(|text| !text.is_empty())
    };
    let anchors = text("/identityTrustAnchorsPEM") || values["identity"]["externalCA"] == json!(true);
    let cert = text("/identity/issuer/tls/crtPEM");
    let key = text("/identity/issuer/tls/keyPEM");
    let external = values["identity"]["issuer"]["scheme"] == json!("kubernetes.io/tls");
    if anchors && (external || (cert && key)) {
        return check_pair(values);
    }
    ensure!(
        !anchors && !cert && !key && !external,
        "of the credentials only some are given: it takes --identity-trust-anchors-file, --identity-issuer-certificate-file \
         and --identity-issuer-key-file (`tulle trust` makes such files), or none of them"
    );
    let domain = ["identityTrustDomain", "clusterDomain"]
        .iter()
        .find_map(|key| values[*key].as_str().filter(|domain| !domain.is_empty()))
        .unwrap_or("cluster.local");
    let anchor = trust::create_anchor(&format!("root.linkerd.{domain}"), YEAR)?;
    let issuer = trust::create_issuer(&format!("identity.linkerd.{domain}"), YEAR, &anchor)?;
    eprintln!(
        "tulle: made a trust anchor and an issuer that are good for a year, and keep no key of the anchor; to rotate them \
         one day, make your own by `tulle trust create-anchor` and give them"
    );
    put(&mut values, &anchor, &issuer);
    Ok(values)
}

fn put(values: &mut Value, anchor: &CertificateAuthority, issuer: &CertificateAuthority) {
    values["identityTrustAnchorsPEM"] = json!(anchor.certificate);
    values["identity"]["issuer"]["tls"] = json!({ "crtPEM": issuer.certificate, "keyPEM": issuer.key });
}

/// An issuer that its own anchors do not verify would sign certificates that nobody accepts.
fn check_pair(values: Value) -> anyhow::Result<Value> {
    let (Some(anchors), Some(issuer)) = (anchors(&values)?, issuer(&values)?) else {
        return Ok(values);
    };
    ensure!(
        leads_to(&issuer, &anchors),
        "the issuer's certificate is signed by none of the trust anchors; make one by `tulle trust create-issuer`"
    );
    Ok(values)
}

/// Proxies that run now know the anchors that are installed now.
fn ensure_trusted(values: &Value, existing: &Existing) -> anyhow::Result<()> {
    check_pair(values.clone())?;
    let (Some(installed), Some(issuer)) = (&existing.anchors, issuer(values)?) else {
        return Ok(());
    };
    ensure!(
        leads_to(&issuer, installed),
        "proxies that run now do not trust the new issuer; first upgrade with the old and the new trust anchors in one \
         bundle (--identity-trust-anchors-file), restart the workloads, and then change the issuer; or use --force"
    );
    Ok(())
}

fn anchors(values: &Value) -> anyhow::Result<Option<Vec<Certificate>>> {
    certificates(values, "/identityTrustAnchorsPEM", "the trust anchors")
}

fn issuer(values: &Value) -> anyhow::Result<Option<Vec<Certificate>>> {
    certificates(values, "/identity/issuer/tls/crtPEM", "the issuer's certificate")
}

fn certificates(values: &Value, pointer: &str, what: &str) -> anyhow::Result<Option<Vec<Certificate>>> {
    let pem = values
        .pointer(pointer)
        .and_then(Value::as_str)
        .filter(|pem| !pem.is_empty());
    pem.map(|pem| Certificate::parse_bundle(pem.as_bytes()).with_context(|| format!("reading {what}")))
        .transpose()
}

/// Manifests as a stream of documents, which `kubectl` takes in both forms.
fn show(manifests: &[Value], output: Output) -> anyhow::Result<String> {
    let mut text = String::new();
    for manifest in manifests {
        match output {
            Output::Yaml => {
                text.push_str("---\n");
                text.push_str(&serde_yaml_ng::to_string(manifest).context("writing YAML")?);
            }
            Output::Json => {
                text.push_str(&serde_json::to_string_pretty(manifest).context("writing JSON")?);
                text.push('\n');
            }
        }
    }
    Ok(text)
}

/// What tells an object from every other: group, kind, namespace, name.
fn key(object: &Value) -> (String, String, String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let version = object["apiVersion"].as_str().unwrap_or_default();
    let group = version.split_once('/').map(|(group, _)| group).unwrap_or_default();
    let metadata = &object["metadata"];
    (
        group.to_owned(),
        text(&object["kind"]),
        text(&metadata["namespace"]),
        text(&metadata["name"]),
    )
}

fn keys<'a>(objects: impl IntoIterator<Item = &'a Value>) -> BTreeSet<(String, String, String, String)> {
    objects.into_iter().map(key).collect()
}

/// Reads one file; `-` is standard input.
fn read(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return std::io::read_to_string(std::io::stdin()).context("reading standard input");
    }
    std::fs::read_to_string(path).with_context(|| format!("reading {path:?}"))
}

const YEAR: Duration = Duration::from_secs(365 * 86_400);

const NEEDED_CRDS: &[&str] = &[
    "authorizationpolicies.policy.linkerd.io",
    "servers.policy.linkerd.io",
    "serviceprofiles.linkerd.io",
    "externalworkloads.workload.linkerd.io",
];

const INSTALL_EXAMPLES: &str = "\
Prints manifests, made by `helm template` from the charts inside of this program:

  tulle check --pre
  tulle install --crds --set installGatewayAPI=true | kubectl apply -f -
  tulle install | kubectl apply -f -
  tulle check

With credentials of your own, and three replicas of everything:

  tulle trust create-anchor && tulle trust create-issuer
  tulle install --ha --identity-trust-anchors-file ca.crt --identity-issuer-certificate-file issuer/crt.pem \\
      --identity-issuer-key-file issuer/key.pem | kubectl apply -f -

Values of the chart are set as Helm sets them: -f values.yaml --set proxy.logLevel=debug";

const UPGRADE_EXAMPLES: &str = "\
What was given to `tulle install` and earlier upgrades stays; flags change some of it:

  tulle upgrade --crds | kubectl apply -f -
  tulle upgrade --controller-replicas 3 | kubectl apply -f -
  tulle prune | kubectl delete -f -

A control plane that Helm installed is upgraded by `helm upgrade`.";

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials() -> (CertificateAuthority, CertificateAuthority) {
        let anchor = trust::create_anchor("root", YEAR).unwrap();
        let issuer = trust::create_issuer("issuer", YEAR, &anchor).unwrap();
        (anchor, issuer)
    }

    #[test]
    fn credentials_are_made_where_none_are_given_and_kept_where_they_are() {
        let made = with_credentials(json!({ "identityTrustDomain": "t.example" })).unwrap();
        assert!(leads_to(
            &issuer(&made).unwrap().unwrap(),
            &anchors(&made).unwrap().unwrap()
        ));
        assert_eq!(anchors(&made).unwrap().unwrap()[0].name, "root.linkerd.t.example");
        assert_eq!(with_credentials(made.clone()).unwrap(), made);
        let external = json!({ "identity": { "externalCA": true, "issuer": { "scheme": "kubernetes.io/tls" } } });
        assert_eq!(with_credentials(external.clone()).unwrap(), external);
    }

    #[test]
    fn half_a_set_of_credentials_and_one_that_does_not_fit_are_refused() {
        let (anchor, issuer) = credentials();
        let half = json!({ "identityTrustAnchorsPEM": anchor.certificate });
        assert!(
            with_credentials(half)
                .unwrap_err()
                .to_string()
                .contains("only some are given")
        );
        let mut odd = json!({});
        put(&mut odd, &credentials().0, &issuer);
        assert!(
            with_credentials(odd)
                .unwrap_err()
                .to_string()
                .contains("signed by none of the trust anchors")
        );
    }

    fn existing(anchors: Option<&str>) -> Existing {
        Existing {
            kubernetes: "v1.34.0".to_owned(),
            is_installed: true,
            overrides: None,
            crds: Vec::new(),
            anchors: anchors.map(|pem| Certificate::parse_bundle(pem.as_bytes()).unwrap()),
        }
    }

    #[test]
    fn an_issuer_that_running_proxies_do_not_trust_needs_both_anchors_first() {
        let ((old, _), (new, issuer)) = (credentials(), credentials());
        let mut values = json!({});
        put(&mut values, &new, &issuer);
        let error = ensure_trusted(&values, &existing(Some(&old.certificate)))
            .unwrap_err()
            .to_string();
        assert!(error.contains("--force") && error.contains("in one bundle"), "{error}");
        let both = format!("{}{}", old.certificate, new.certificate);
        ensure_trusted(&values, &existing(Some(&both))).unwrap();
    }

    #[test]
    fn a_second_installation_and_one_without_kinds_are_refused() {
        use clap::Parser as _;
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            flags: kubernetes::Flags,
        }
        let flags = Line::parse_from(["tulle"]).flags;
        let mut found = existing(None);
        let error = refuse_second_installation(&found, &flags).unwrap_err().to_string();
        assert!(error.contains("tulle upgrade"), "{error}");
        let error = overrides(&found, &flags).unwrap_err().to_string();
        assert!(error.contains("helm upgrade"), "{error}");
        found.is_installed = false;
        let error = refuse_second_installation(&found, &flags).unwrap_err().to_string();
        assert!(error.contains("tulle install --crds | kubectl apply -f -"), "{error}");
        let error = ensure_gateway_api(&json!({}), &found).unwrap_err().to_string();
        assert!(error.contains("--set installGatewayAPI=true"), "{error}");
        ensure_gateway_api(&json!({ "installGatewayAPI": true }), &found).unwrap();
    }
}
