//! Checks of certificates: trust anchors, issuer, webhooks and proxies.

use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use serde_json::Value;
use tulle_core::names::telemetry::API_SERVICE;

use super::category::{Category, Check};
use super::control_plane::{INJECTOR_WEBHOOK, VALIDATOR_WEBHOOKS};
use super::problem::{CheckResult, Problem, error, listing, warning};
use super::snapshot::{ISSUER_SECRET, Snapshot, TRUST_ROOTS_CONFIG_MAP, value_at};
use crate::certificates::{Certificate, Key, Signature, chains_to};

pub(super) fn identity() -> Category {
    Category {
        name: "linkerd-identity",
        checks: vec![
            Check::new("certificate config is valid", config_is_valid).fatal(),
            Check::new(
                "trust anchors are using supported crypto algorithm",
                anchors_are_supported,
            ),
            Check::new("trust anchors are within their validity period", |s| {
                check_validity(s, &s.trust_anchors()?, Authority::TrustAnchor)
            }),
            Check::new("trust anchors are valid for at least 60 days", |s| {
                check_remaining_lifetime(s, &s.trust_anchors()?, Authority::TrustAnchor)
            }),
            Check::new("issuer cert is using supported crypto algorithm", issuer_is_supported),
            Check::new("issuer cert is within its validity period", |s| {
                check_validity(s, &issuer_chain(s)?, Authority::Issuer)
            }),
            Check::new("issuer cert is valid for at least 60 days", |s| {
                check_remaining_lifetime(s, &issuer_chain(s)?, Authority::Issuer)
            }),
            Check::new("issuer cert is issued by the trust anchor", issuer_is_trusted),
        ],
    }
}

pub(super) fn webhooks() -> Category {
    Category {
        name: "linkerd-webhooks-and-apisvc-tls",
        checks: vec![
            Check::new("proxy-injector webhook has valid cert", |s| {
                webhook_is_valid(s, &INJECTOR)
            })
            .with_retry(),
            Check::new("proxy-injector cert is valid for at least 60 days", |s| {
                webhook_is_not_expiring(s, &INJECTOR)
            }),
            Check::new("sp-validator webhook has valid cert", |s| {
                webhook_is_valid(s, &SP_VALIDATOR)
            })
            .with_retry(),
            Check::new("sp-validator cert is valid for at least 60 days", |s| {
                webhook_is_not_expiring(s, &SP_VALIDATOR)
            }),
            Check::new("policy-validator webhook has valid cert", |s| {
                webhook_is_valid(s, &POLICY_VALIDATOR)
            })
            .with_retry(),
            Check::new("policy-validator cert is valid for at least 60 days", |s| {
                webhook_is_not_expiring(s, &POLICY_VALIDATOR)
            }),
            Check::new("telemetry API service is available", telemetry_is_available).with_retry(),
        ],
    }
}

pub(super) fn data_plane() -> Category {
    Category {
        name: "linkerd-identity-data-plane",
        checks: vec![Check::new(
            "data plane proxies certificate match CA",
            proxy_certificates_match,
        )],
    }
}

/// The certificate authority that a problem concerns.
#[derive(Clone, Copy)]
enum Authority {
    TrustAnchor,
    Issuer,
}

/// The fix that replaces a certificate authority.
fn rotation_fix(snapshot: &Snapshot, authority: Authority) -> String {
    let upgrade = snapshot.scope.tulle_command("upgrade");
    match authority {
        Authority::TrustAnchor => format!(
            "tulle trust create-anchor --cert new-ca.crt --key new-ca.key, and `{upgrade} --identity-trust-anchors-file \
             both.crt | kubectl apply -f -` with old and new in both.crt"
        ),
        Authority::Issuer => format!(
            "tulle trust create-issuer --dir new-issuer, and `{upgrade} --identity-issuer-certificate-file \
             new-issuer/crt.pem --identity-issuer-key-file new-issuer/key.pem | kubectl apply -f -`"
        ),
    }
}

fn issuer_secret(snapshot: &Snapshot) -> Result<&Secret, Problem> {
    snapshot.secret(ISSUER_SECRET)?.ok_or_else(|| {
        error(
            format!(
                "Secret {ISSUER_SECRET} is not in namespace {}, so no certificate can be signed",
                snapshot.scope.control_plane_namespace
            ),
            rotation_fix(snapshot, Authority::Issuer),
        )
    })
}

/// The issuer's certificate and its chain.
fn issuer_chain(snapshot: &Snapshot) -> Result<Vec<Certificate>, Problem> {
    let secret = issuer_secret(snapshot)?;
    let data = secret.data.as_ref();
    let pem = ["crt.pem", "tls.crt"].iter().find_map(|key| data?.get(*key));
    let Some(pem) = pem else {
        return Err(error(
            format!("Secret {ISSUER_SECRET} has neither crt.pem nor tls.crt"),
            rotation_fix(snapshot, Authority::Issuer),
        ));
    };
    Certificate::parse_bundle(&pem.0).map_err(|parse_error| {
        error(
            format!("the certificate in Secret {ISSUER_SECRET} cannot be used: {parse_error:#}"),
            rotation_fix(snapshot, Authority::Issuer),
        )
    })
}

fn config_is_valid(snapshot: &Snapshot) -> CheckResult {
    snapshot.trust_anchors()?;
    issuer_chain(snapshot)?;
    let data = issuer_secret(snapshot)?.data.as_ref();
    let has_key = |key: &str| data.is_some_and(|data| data.contains_key(key));
    if !has_key("key.pem") && !has_key("tls.key") {
        return Err(error(
            format!("Secret {ISSUER_SECRET} has neither key.pem nor tls.key"),
            rotation_fix(snapshot, Authority::Issuer),
        ));
    }
    let values = snapshot.values()?;
    let scheme = value_at(&values, "identity.issuer.scheme")
        .as_str()
        .unwrap_or(SCHEME_LINKERD);
    let has_keys_of_scheme = match scheme {
        SCHEME_LINKERD => has_key("crt.pem"),
        SCHEME_KUBERNETES => has_key("tls.crt"),
        _ => false,
    };
    if has_keys_of_scheme {
        return Ok(());
    }
    Err(error(
        format!("identity.issuer.scheme is {scheme:?}, but Secret {ISSUER_SECRET} has the data keys of another scheme"),
        format!(
            "{} --set identity.issuer.scheme={} | kubectl apply -f -",
            snapshot.scope.tulle_command("upgrade"),
            if has_key("tls.crt") {
                SCHEME_KUBERNETES
            } else {
                SCHEME_LINKERD
            }
        ),
    ))
}

fn anchors_are_supported(snapshot: &Snapshot) -> CheckResult {
    let unsupported: Vec<_> = snapshot
        .trust_anchors()?
        .iter()
        .filter(|anchor| !matches!(anchor.key, Key::EcdsaP256 | Key::Rsa(2048 | 4096)))
        .map(|anchor| format!("{}: {:?}", anchor.name, anchor.key))
        .collect();
    if unsupported.is_empty() {
        return Ok(());
    }
    Err(error(
        listing(
            "trust anchors need an ECDSA P-256 key, or RSA of 2048 or 4096 bits:",
            &unsupported,
        ),
        rotation_fix(snapshot, Authority::TrustAnchor),
    ))
}

fn issuer_is_supported(snapshot: &Snapshot) -> CheckResult {
    let issuer = issuer_chain(snapshot)?;
    let Some(issuer) = issuer.first() else { return Ok(()) };
    if issuer.key != Key::EcdsaP256 {
        return Err(error(
            format!(
                "the issuer {} needs an ECDSA P-256 key, but has {:?}",
                issuer.name, issuer.key
            ),
            rotation_fix(snapshot, Authority::Issuer),
        ));
    }
    if !matches!(issuer.signature, Signature::EcdsaSha256 | Signature::RsaSha256) {
        return Err(error(
            format!(
                "the issuer {} must be signed by ECDSA or RSA with SHA-256, but is signed by {:?}",
                issuer.name, issuer.signature
            ),
            rotation_fix(snapshot, Authority::Issuer),
        ));
    }
    Ok(())
}

fn issuer_is_trusted(snapshot: &Snapshot) -> CheckResult {
    let chain = issuer_chain(snapshot)?;
    if chains_to(&chain, &snapshot.trust_anchors()?) {
        return Ok(());
    }
    let name = chain.first().map(|cert| cert.name.as_str()).unwrap_or_default();
    Err(error(
        format!(
            "the issuer {name} in Secret {ISSUER_SECRET} is signed by none of the trust anchors in ConfigMap {TRUST_ROOTS_CONFIG_MAP}"
        ),
        rotation_fix(snapshot, Authority::Issuer),
    ))
}

fn check_validity(snapshot: &Snapshot, certs: &[Certificate], authority: Authority) -> CheckResult {
    let invalid: Vec<_> = certs
        .iter()
        .filter_map(|cert| validity_problem(cert, snapshot.now))
        .collect();
    if invalid.is_empty() {
        return Ok(());
    }
    Err(error(
        listing("certificates:", &invalid),
        rotation_fix(snapshot, authority),
    ))
}

fn check_remaining_lifetime(snapshot: &Snapshot, certs: &[Certificate], authority: Authority) -> CheckResult {
    let expiring: Vec<_> = certs
        .iter()
        .filter_map(|cert| expiry_warning(cert, snapshot.now))
        .collect();
    if expiring.is_empty() {
        return Ok(());
    }
    Err(warning(
        listing("certificates:", &expiring),
        rotation_fix(snapshot, authority),
    ))
}

fn validity_problem(cert: &Certificate, now: i64) -> Option<String> {
    if now < cert.not_before {
        Some(format!(
            "{} is not valid before {}",
            cert.name,
            format_date(cert.not_before)
        ))
    } else if now > cert.not_after {
        Some(format!("{} expired on {}", cert.name, format_date(cert.not_after)))
    } else {
        None
    }
}

fn expiry_warning(cert: &Certificate, now: i64) -> Option<String> {
    (cert.not_after < now + EXPIRY_WARNING_SECONDS).then(|| {
        let days = (cert.not_after - now).max(0) / DAY_SECONDS;
        let unit = if days == 1 { "day" } else { "days" };
        format!(
            "{} expires on {}, in {days} {unit}",
            cert.name,
            format_date(cert.not_after)
        )
    })
}

fn format_date(seconds: i64) -> String {
    let format = time::format_description::well_known::Rfc3339;
    let time = time::OffsetDateTime::from_unix_timestamp(seconds).ok();
    time.and_then(|time| time.format(&format).ok())
        .unwrap_or_else(|| format!("second {seconds} since 1970"))
}

/// A webhook of the control plane.
pub(super) struct Webhook {
    /// The name of its webhook configuration.
    pub(super) config: &'static str,
    /// The name of its Service.
    pub(super) service: &'static str,
    /// The component whose pods serve the webhook.
    pub(super) component: &'static str,
    pub(super) port: u16,
}

impl Webhook {
    /// The name of the Secret with its certificate.
    pub(super) fn secret_name(&self) -> String {
        format!("{}-k8s-tls", self.service)
    }
}

const INJECTOR: Webhook = Webhook {
    config: INJECTOR_WEBHOOK,
    service: "linkerd-proxy-injector",
    component: "proxy-injector",
    port: 8443,
};
const SP_VALIDATOR: Webhook = Webhook {
    config: VALIDATOR_WEBHOOKS[0],
    service: "linkerd-sp-validator",
    component: "destination",
    port: 8443,
};
const POLICY_VALIDATOR: Webhook = Webhook {
    config: VALIDATOR_WEBHOOKS[1],
    service: "linkerd-policy-validator",
    component: "destination",
    port: 9443,
};
pub(super) const WEBHOOKS: [&Webhook; 3] = [&INJECTOR, &SP_VALIDATOR, &POLICY_VALIDATOR];

/// The CA bundle by which the API server verifies the webhook; `None` if the webhook is not configured.
fn ca_bundle(snapshot: &Snapshot, webhook: &Webhook) -> Result<Option<Vec<u8>>, Problem> {
    let mutating = snapshot.mutating_webhooks.as_ref()?.iter();
    let mutating = mutating.filter(|config| config.name_any() == webhook.config);
    let mutating = mutating.flat_map(|config| config.webhooks.iter().flatten().map(|hook| &hook.client_config));
    let validating = snapshot.validating_webhooks.as_ref()?.iter();
    let validating = validating.filter(|config| config.name_any() == webhook.config);
    let validating = validating.flat_map(|config| config.webhooks.iter().flatten().map(|hook| &hook.client_config));
    let client_config = mutating.chain(validating).next();
    Ok(client_config.map(|config| config.ca_bundle.clone().map(|bundle| bundle.0).unwrap_or_default()))
}

/// The certificate that the webhook presents, or the certificate in its Secret if none could be fetched.
fn webhook_certificate(snapshot: &Snapshot, webhook: &Webhook) -> Result<Certificate, Problem> {
    let presented = snapshot.webhook_certificates.get(webhook.service);
    if let Some(Ok(cert)) = presented {
        return Ok(cert.clone());
    }
    let secret = snapshot.secret(&webhook.secret_name())?;
    let pem = secret.and_then(|secret| {
        let data = secret.data.as_ref()?;
        data.get("tls.crt").or_else(|| data.get("crt.pem"))
    });
    let certs = pem.map(|pem| Certificate::parse_bundle(&pem.0));
    match (certs, presented) {
        (Some(Ok(mut certs)), _) => Ok(certs.remove(0)),
        (Some(Err(parse_error)), _) => Err(error(
            format!(
                "the certificate in Secret {} cannot be used: {parse_error:#}",
                webhook.secret_name()
            ),
            renewal_fix(snapshot, webhook),
        )),
        (None, Some(Err(why))) => Err(error(why.clone(), restart_fix(snapshot, webhook))),
        (None, _) => Err(error(
            format!("{} presents no certificate", webhook.service),
            restart_fix(snapshot, webhook),
        )),
    }
}

fn restart_fix(snapshot: &Snapshot, webhook: &Webhook) -> String {
    format!(
        "kubectl rollout restart deployment linkerd-{} -n {}; its pods create their certificate when they start",
        webhook.component, snapshot.scope.control_plane_namespace
    )
}

/// The fix that renews a certificate. The control plane recreates its own certificates after their Secret is deleted.
fn renewal_fix(snapshot: &Snapshot, webhook: &Webhook) -> String {
    format!(
        "kubectl delete secret {} -n {}, and then {}",
        webhook.secret_name(),
        snapshot.scope.control_plane_namespace,
        restart_fix(snapshot, webhook)
    )
}

fn webhook_is_valid(snapshot: &Snapshot, webhook: &Webhook) -> CheckResult {
    let Some(bundle) = ca_bundle(snapshot, webhook)? else {
        return Err(error(
            format!(
                "{} does not exist, so the API server does not call the webhook",
                webhook.config
            ),
            snapshot.scope.upgrade_command(),
        ));
    };
    let cert = webhook_certificate(snapshot, webhook)?;
    let name = format!("{}.{}.svc", webhook.service, snapshot.scope.control_plane_namespace);
    if !cert.subject_alt_names.contains(&name) {
        return Err(error(
            format!(
                "the certificate is for {}, and the API server calls {name}",
                cert.subject_alt_names.join(", ")
            ),
            renewal_fix(snapshot, webhook),
        ));
    }
    if let Some(why) = validity_problem(&cert, snapshot.now) {
        return Err(error(why, renewal_fix(snapshot, webhook)));
    }
    match Certificate::parse_bundle(&bundle) {
        Ok(authorities) if chains_to(std::slice::from_ref(&cert), &authorities) => Ok(()),
        Ok(_) => Err(error(
            format!(
                "the CA bundle of {} does not verify the certificate that {name} presents",
                webhook.config
            ),
            restart_fix(snapshot, webhook),
        )),
        Err(parse_error) => Err(error(
            format!("the CA bundle of {} cannot be used: {parse_error:#}", webhook.config),
            restart_fix(snapshot, webhook),
        )),
    }
}

fn webhook_is_not_expiring(snapshot: &Snapshot, webhook: &Webhook) -> CheckResult {
    // A missing certificate is reported by the check before this one.
    let Ok(cert) = webhook_certificate(snapshot, webhook) else {
        return Ok(());
    };
    match expiry_warning(&cert, snapshot.now) {
        // The control plane renews its own certificates. Other certificates have to be renewed by their owner.
        Some(why) if is_externally_managed(snapshot, webhook) => Err(warning(
            why,
            format!("renew the certificate in Secret {}", webhook.secret_name()),
        )),
        _ => Ok(()),
    }
}

fn is_externally_managed(snapshot: &Snapshot, webhook: &Webhook) -> bool {
    let Ok(values) = snapshot.values() else { return false };
    let key = match webhook.service {
        "linkerd-proxy-injector" => "proxyInjector.externalSecret",
        "linkerd-sp-validator" => "profileValidator.externalSecret",
        _ => "policyValidator.externalSecret",
    };
    value_at(&values, key) == &Value::Bool(true)
}

/// Fails if the API server cannot reach telemetry. Telemetry is optional in the chart.
fn telemetry_is_available(snapshot: &Snapshot) -> CheckResult {
    let mut services = snapshot.api_services.as_ref()?.iter();
    let Some(service) = services.find(|service| service.name_any() == API_SERVICE) else {
        return match value_at(&snapshot.values()?, "telemetry.enabled") {
            Value::Bool(true) => Err(error(
                format!(
                    "APIService {API_SERVICE} does not exist, so `tulle stat`, `tap` and similar commands do not work"
                ),
                snapshot.scope.upgrade_command(),
            )),
            _ => Ok(()),
        };
    };
    let conditions = service
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let available = conditions.into_iter().find(|condition| condition.type_ == "Available");
    let why = match available {
        Some(condition) if condition.status == "True" => return Ok(()),
        Some(condition) => condition.message.as_ref().or(condition.reason.as_ref()),
        None => None,
    };
    Err(error(
        format!(
            "APIService {API_SERVICE} is not available; until it is, Kubernetes cannot finish deleting namespaces: {}",
            why.map_or("the API server has not checked it yet", String::as_str)
        ),
        format!(
            "kubectl rollout restart deployment linkerd-destination -n {}; or disable it: {} --set telemetry.enabled=false \
             | kubectl apply -f -, and kubectl delete apiservice {API_SERVICE}",
            snapshot.scope.control_plane_namespace,
            snapshot.scope.tulle_command("upgrade"),
        ),
    ))
}

fn proxy_certificates_match(snapshot: &Snapshot) -> CheckResult {
    let anchors = snapshot.trust_anchors()?;
    let mut untrusted = Vec::new();
    let mut fetch_errors = Vec::new();
    for (pod, chain) in &snapshot.proxy_certificates {
        match chain {
            Err(why) => fetch_errors.push(format!("{pod}: {why}")),
            Ok(chain) if !chains_to(chain, &anchors) => {
                untrusted.push(format!(
                    "{pod} has a certificate that chains to none of the trust anchors"
                ));
            }
            Ok(chain) => untrusted.extend(
                chain
                    .first()
                    .and_then(|leaf| validity_problem(leaf, snapshot.now))
                    .map(|why| format!("{pod}: {why}")),
            ),
        }
    }
    if !untrusted.is_empty() {
        return Err(error(
            listing("these proxies cannot connect to other proxies:", &untrusted),
            "kubectl rollout restart their workloads, so that they get the current trust anchors",
        ));
    }
    if !fetch_errors.is_empty() {
        return Err(warning(
            listing("no certificate could be read from:", &fetch_errors),
            "kubectl logs POD -c linkerd-proxy shows why; reading certificates requires permission to create pods/portforward",
        ));
    }
    Ok(())
}

const SCHEME_LINKERD: &str = "linkerd.io/tls";
const SCHEME_KUBERNETES: &str = "kubernetes.io/tls";
const DAY_SECONDS: i64 = 86_400;
const EXPIRY_WARNING_SECONDS: i64 = 60 * DAY_SECONDS;
