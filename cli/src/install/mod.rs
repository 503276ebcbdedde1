//! `tulle install`, `upgrade`, `uninstall` and `prune`: render the charts for `kubectl apply` and `kubectl delete`.
//!
//! These commands do not change the cluster. Manifests go to standard output, and notes about defaults to standard error.
//! The charts are the ones that Helm installs. [`charts`] renders them by `helm template`, with [`values`] from flags.

pub(crate) mod charts;
mod existing;
pub(crate) mod manifests;
pub(crate) mod removal;
pub(crate) mod values;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tulle_control::trust::{self, CertificateAuthority};

pub(crate) use self::removal::{PruneArgs, UninstallArgs, prune, uninstall};

use self::charts::{CRDS, Helm};
use self::existing::ExistingInstallation;
use self::manifests::{Output, control_plane, format_manifests, recorded_overrides};
use crate::certificates::{Certificate, chains_to};
use crate::{kubernetes, runtime};

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = INSTALL_EXAMPLES)]
pub(crate) struct InstallArgs {
    /// Print the CustomResourceDefinitions, which must be applied first
    #[arg(long)]
    crds: bool,
    /// Do not check the cluster for an existing installation
    #[arg(long)]
    ignore_cluster: bool,
    #[command(flatten)]
    values: values::Flags,
    /// Output format of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = UPGRADE_EXAMPLES)]
pub(crate) struct UpgradeArgs {
    /// Print the CustomResourceDefinitions
    #[arg(long)]
    crds: bool,
    /// Read the existing installation from this file, as written by `kubectl get -o yaml`, instead of the cluster; - reads standard
    /// input
    #[arg(long, value_name = "FILE")]
    from_manifests: Option<PathBuf>,
    /// Change the issuer even if running proxies do not trust the new one
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    values: values::Flags,
    /// Output format of the manifests
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

/// Prints the manifests of a new installation.
///
/// # Errors
/// Fails if a control plane exists already, if a requirement is missing, or if the charts reject the values.
pub(crate) fn install(args: &InstallArgs, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let helm = Helm::find(&flags.linkerd_namespace)?;
    let existing = match args.ignore_cluster {
        true => None,
        false => Some(runtime()?.block_on(async { existing::read_cluster(&flags.connect().await?).await })?),
    };
    let helm = helm.with_kubernetes_version(existing.as_ref().map(|existing| existing.kubernetes_version.as_str()));
    let given = values::merge(&helm, &args.values, None)?;
    if args.crds {
        if let Some(existing) = &existing {
            ensure_gateway_api(&given, existing)?;
        }
        crate::print(&format_manifests(&helm.render(&CRDS, &given)?, args.output)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(existing) = &existing {
        check_installable(existing, flags)?;
    }
    let complete = complete_credentials(given)?;
    crate::print(&format_manifests(
        &control_plane(&helm, &complete, flags)?,
        args.output,
    )?)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the manifests that upgrade the installed control plane to the version of this command, with its values kept or changed.
///
/// # Errors
/// Fails if `tulle install` did not install the control plane, if running proxies would not trust the issuer, or if the charts
/// reject the values.
pub(crate) fn upgrade(args: &UpgradeArgs, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    let helm = Helm::find(&flags.linkerd_namespace)?;
    let existing = match &args.from_manifests {
        Some(path) => existing::read_manifests(path, &flags.linkerd_namespace)?,
        None => runtime()?.block_on(async { existing::read_cluster(&flags.connect().await?).await })?,
    };
    let helm = helm.with_kubernetes_version(Some(&existing.kubernetes_version));
    if args.crds {
        let given = values::merge(&helm, &args.values, None)?;
        crate::print(&format_manifests(&helm.render(&CRDS, &given)?, args.output)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let complete = values::merge(&helm, &args.values, Some(recorded_overrides(&existing, flags)?))?;
    if !args.force {
        ensure_trusted(&complete, &existing)?;
    }
    crate::print(&format_manifests(
        &control_plane(&helm, &complete, flags)?,
        args.output,
    )?)?;
    Ok(ExitCode::SUCCESS)
}

fn ensure_gateway_api(given: &Value, existing: &ExistingInstallation) -> anyhow::Result<()> {
    let is_requested = ["installGatewayAPI", "enableHttpRoutes"]
        .iter()
        .any(|key| given[*key] == json!(true));
    ensure!(
        is_requested
            || existing
                .crds
                .iter()
                .any(|crd| crd == "httproutes.gateway.networking.k8s.io"),
        "the cluster has no Gateway API, which routes require; add --set installGatewayAPI=true, or install it first"
    );
    Ok(())
}

fn check_installable(existing: &ExistingInstallation, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let namespace = &flags.linkerd_namespace;
    ensure!(
        !existing.is_installed,
        "there is a control plane in namespace {namespace} already; change it with `tulle upgrade`, or print the \
         manifests anyway with --ignore-cluster"
    );
    let missing: Vec<_> = REQUIRED_CRDS
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

/// Adds a new trust anchor and a new issuer to the values if they have no credentials. An incomplete set of credentials is an
/// error.
fn complete_credentials(mut values: Value) -> anyhow::Result<Value> {
    let is_set = |pointer: &str| {
        values
            .pointer(pointer)
            .and_then(Value::as_str)
            .is_some_and(|text| !text.is_empty())
    };
    let has_anchors = is_set("/identityTrustAnchorsPEM") || values["identity"]["externalCA"] == json!(true);
    let has_cert = is_set("/identity/issuer/tls/crtPEM");
    let has_key = is_set("/identity/issuer/tls/keyPEM");
    let is_external = values["identity"]["issuer"]["scheme"] == json!("kubernetes.io/tls");
    if has_anchors && (is_external || (has_cert && has_key)) {
        return check_issuer_and_anchors(values);
    }
    ensure!(
        !has_anchors && !has_cert && !has_key && !is_external,
        "the credentials are incomplete: pass --identity-trust-anchors-file, --identity-issuer-certificate-file \
         and --identity-issuer-key-file (`tulle trust` creates such files), or none of them"
    );
    let domain = ["identityTrustDomain", "clusterDomain"]
        .iter()
        .find_map(|key| values[*key].as_str().filter(|domain| !domain.is_empty()))
        .unwrap_or("cluster.local");
    let anchor = trust::create_anchor(&format!("root.linkerd.{domain}"), ONE_YEAR)?;
    let issuer = trust::create_issuer(&format!("identity.linkerd.{domain}"), ONE_YEAR, &anchor)?;
    eprintln!(
        "tulle: made a trust anchor and an issuer that are valid for one year; the key of the trust anchor is not stored. To be able \
         to rotate the issuer, create both with `tulle trust` and pass them"
    );
    set_credentials(&mut values, &anchor, &issuer);
    Ok(values)
}

fn set_credentials(values: &mut Value, anchor: &CertificateAuthority, issuer: &CertificateAuthority) {
    values["identityTrustAnchorsPEM"] = json!(anchor.certificate);
    values["identity"]["issuer"]["tls"] = json!({ "crtPEM": issuer.certificate, "keyPEM": issuer.key });
}

/// Fails if the issuer is not signed by one of the trust anchors in the values, because proxies would reject its certificates.
fn check_issuer_and_anchors(values: Value) -> anyhow::Result<Value> {
    let (Some(anchors), Some(issuer)) = (anchors(&values)?, issuer(&values)?) else {
        return Ok(values);
    };
    ensure!(
        chains_to(&issuer, &anchors),
        "the issuer's certificate is signed by none of the trust anchors; create one with `tulle trust create-issuer`"
    );
    Ok(values)
}

/// Fails if running proxies would not trust the issuer. Running proxies use the trust anchors that are installed now.
fn ensure_trusted(values: &Value, existing: &ExistingInstallation) -> anyhow::Result<()> {
    check_issuer_and_anchors(values.clone())?;
    let (Some(installed), Some(issuer)) = (&existing.anchors, issuer(values)?) else {
        return Ok(());
    };
    ensure!(
        chains_to(&issuer, installed),
        "running proxies do not trust the new issuer; first upgrade with the old and the new trust anchors in one \
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

fn certificates(values: &Value, pointer: &str, description: &str) -> anyhow::Result<Option<Vec<Certificate>>> {
    let pem = values
        .pointer(pointer)
        .and_then(Value::as_str)
        .filter(|pem| !pem.is_empty());
    pem.map(|pem| Certificate::parse_bundle(pem.as_bytes()).with_context(|| format!("reading {description}")))
        .transpose()
}

const ONE_YEAR: Duration = Duration::from_secs(365 * 86_400);

const REQUIRED_CRDS: &[&str] = &[
    "authorizationpolicies.policy.linkerd.io",
    "servers.policy.linkerd.io",
    "serviceprofiles.linkerd.io",
    "externalworkloads.workload.linkerd.io",
];

const INSTALL_EXAMPLES: &str = "\
Prints manifests, rendered by `helm template` from the charts in this program:

  tulle check --pre
  tulle install --crds --set installGatewayAPI=true | kubectl apply -f -
  tulle install | kubectl apply -f -
  tulle check

With your own credentials, and three replicas of each component:

  tulle trust create-anchor && tulle trust create-issuer
  tulle install --ha --identity-trust-anchors-file ca.crt --identity-issuer-certificate-file issuer/crt.pem \\
      --identity-issuer-key-file issuer/key.pem | kubectl apply -f -

Values of the chart are set as Helm sets them: -f values.yaml --set proxy.logLevel=debug";

const UPGRADE_EXAMPLES: &str = "\
Values passed to `tulle install` and earlier upgrades are kept; flags change single values:

  tulle upgrade --crds | kubectl apply -f -
  tulle upgrade --controller-replicas 3 | kubectl apply -f -
  tulle prune | kubectl delete -f -

A control plane that Helm installed is upgraded by `helm upgrade`.";

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials() -> (CertificateAuthority, CertificateAuthority) {
        let anchor = trust::create_anchor("root", ONE_YEAR).unwrap();
        let issuer = trust::create_issuer("issuer", ONE_YEAR, &anchor).unwrap();
        (anchor, issuer)
    }

    #[test]
    fn missing_credentials_are_created_and_existing_ones_are_kept() {
        let made = complete_credentials(json!({ "identityTrustDomain": "t.example" })).unwrap();
        assert!(chains_to(
            &issuer(&made).unwrap().unwrap(),
            &anchors(&made).unwrap().unwrap()
        ));
        assert_eq!(anchors(&made).unwrap().unwrap()[0].name, "root.linkerd.t.example");
        assert_eq!(complete_credentials(made.clone()).unwrap(), made);
        let external = json!({ "identity": { "externalCA": true, "issuer": { "scheme": "kubernetes.io/tls" } } });
        assert_eq!(complete_credentials(external.clone()).unwrap(), external);
    }

    #[test]
    fn incomplete_and_mismatched_credentials_are_refused() {
        let (anchor, issuer) = credentials();
        let incomplete = json!({ "identityTrustAnchorsPEM": anchor.certificate });
        assert!(
            complete_credentials(incomplete)
                .unwrap_err()
                .to_string()
                .contains("credentials are incomplete")
        );
        let mut mismatched = json!({});
        set_credentials(&mut mismatched, &credentials().0, &issuer);
        assert!(
            complete_credentials(mismatched)
                .unwrap_err()
                .to_string()
                .contains("signed by none of the trust anchors")
        );
    }

    fn existing(anchors: Option<&str>) -> ExistingInstallation {
        ExistingInstallation {
            kubernetes_version: "v1.34.0".to_owned(),
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
        set_credentials(&mut values, &new, &issuer);
        let error = ensure_trusted(&values, &existing(Some(&old.certificate)))
            .unwrap_err()
            .to_string();
        assert!(error.contains("--force") && error.contains("in one bundle"), "{error}");
        let both = format!("{}{}", old.certificate, new.certificate);
        ensure_trusted(&values, &existing(Some(&both))).unwrap();
    }

    #[test]
    fn a_second_installation_and_one_without_custom_resource_definitions_are_refused() {
        use clap::Parser as _;
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            flags: kubernetes::Flags,
        }
        let flags = Line::parse_from(["tulle"]).flags;
        let mut found = existing(None);
        let error = check_installable(&found, &flags).unwrap_err().to_string();
        assert!(error.contains("tulle upgrade"), "{error}");
        let error = recorded_overrides(&found, &flags).unwrap_err().to_string();
        assert!(error.contains("helm upgrade"), "{error}");
        found.is_installed = false;
        let error = check_installable(&found, &flags).unwrap_err().to_string();
        assert!(error.contains("tulle install --crds | kubectl apply -f -"), "{error}");
        let error = ensure_gateway_api(&json!({}), &found).unwrap_err().to_string();
        assert!(error.contains("--set installGatewayAPI=true"), "{error}");
        ensure_gateway_api(&json!({ "installGatewayAPI": true }), &found).unwrap();
    }
}
