//! The expiry of the credentials in a kubeconfig.

use std::convert::Infallible;
use std::mem;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use kube::config::Kubeconfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde::Deserialize;
use tokio::time::sleep;
use tulle_core::metrics::{Family, Gauge, Labels};

/// Exports the time until the credentials for a cluster expire, and says when to warn of it. The series ends when this is dropped.
pub(crate) struct ExpiryReport {
    /// In seconds since 1970.
    expires_at: u64,
    seconds_left: Family<Gauge>,
    /// The name and the value of the label of the series.
    label: (&'static str, String),
    has_warned: bool,
}

impl ExpiryReport {
    pub(crate) fn new(expires_at: u64, seconds_left: Family<Gauge>, label: (&'static str, String)) -> Self {
        Self {
            expires_at,
            seconds_left,
            label,
            has_warned: false,
        }
    }

    /// Updates the metric until the future is dropped. Calls `warn` once with the number of hours that are left, at the latest a
    /// minute after they are less than [`EXPIRY_WARNING`].
    pub(crate) async fn run(&mut self, mut warn: impl FnMut(u64)) -> Infallible {
        loop {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            if let Some(hours) = self.update(now.as_secs()) {
                warn(hours);
            }
            sleep(UPDATE_INTERVAL).await;
        }
    }

    fn update(&mut self, now: u64) -> Option<u64> {
        let left = self.expires_at.saturating_sub(now);
        let (name, value) = &self.label;
        let gauge = self.seconds_left.get(&Labels::new().with(name, value));
        gauge.set(i64::try_from(left).unwrap_or(i64::MAX));
        let is_first = left < EXPIRY_WARNING.as_secs() && !mem::replace(&mut self.has_warned, true);
        is_first.then_some(left / 3600)
    }
}

impl Drop for ExpiryReport {
    fn drop(&mut self) {
        let (name, value) = &self.label;
        self.seconds_left.remove_series(name, value);
    }
}

/// The time at which the token or the client certificate of the current context's user expires, in seconds since 1970, whichever is
/// first. `None` if neither expires, or if this is not known. `text` is the text of the kubeconfig.
pub(super) fn expires_at(kubeconfig: &Kubeconfig, text: &str) -> Option<u64> {
    let current = kubeconfig.current_context.as_deref()?;
    let context = kubeconfig.contexts.iter().find(|context| context.name == current)?;
    let user = context.context.as_ref()?.user.as_deref()?;
    let credentials: RawKubeconfig = serde_yaml_ng::from_str(text).unwrap_or_default();
    let found = credentials.users.iter().find(|named| named.name == user)?;
    let token = found.user.token.as_deref().and_then(jwt_expiry);
    let certificate = found.user.client_certificate_data.as_deref();
    token.into_iter().chain(certificate.and_then(certificate_expiry)).min()
}

/// The credentials of a kubeconfig. kube's type does not expose tokens.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RawKubeconfig {
    users: Vec<RawNamedUser>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawNamedUser {
    name: String,
    user: RawUser,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct RawUser {
    token: Option<String>,
    client_certificate_data: Option<String>,
}

/// The expiry of a JWT, in seconds since 1970. The signature is not verified: only the other cluster can do that.
fn jwt_expiry(token: &str) -> Option<u64> {
    #[derive(Deserialize)]
    struct Claims {
        exp: u64,
    }
    let payload = token.split('.').nth(1)?;
    let bytes = URL_SAFE_NO_PAD.decode(payload).ok()?;
    serde_json::from_slice(&bytes).ok().map(|claims: Claims| claims.exp)
}

/// The expiry of the first certificate in base64-encoded PEM, in seconds since 1970.
fn certificate_expiry(data: &str) -> Option<u64> {
    let pem = STANDARD.decode(data.trim()).ok()?;
    let certificate = CertificateDer::from_pem_slice(&pem).ok()?;
    let (_, parsed) = x509_parser::parse_x509_certificate(&certificate).ok()?;
    u64::try_from(parsed.validity().not_after.timestamp()).ok()
}

/// How long before the expiry of credentials a warning is logged, and printed by `tulle multicluster check`.
pub const EXPIRY_WARNING: Duration = Duration::from_secs(7 * 86_400);
/// Interval at which the time until the expiry is exported.
const UPDATE_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};
    use serde_json::{Value, json};
    use tulle_core::metrics::Registry;

    use super::*;

    fn token(expires_at: u64) -> String {
        let payload = URL_SAFE_NO_PAD.encode(json!({"exp": expires_at}).to_string());
        format!("h.{payload}.s")
    }

    /// A certificate that expires at the beginning of 2027, and this time in seconds since 1970.
    fn certificate() -> (String, u64) {
        let end = date_time_ymd(2027, 1, 1);
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.not_after = end;
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let expires_at = u64::try_from(end.unix_timestamp()).unwrap();
        (STANDARD.encode(certificate.pem()), expires_at)
    }

    #[test]
    fn credentials_expire_with_the_token_or_the_certificate_of_the_current_user() {
        let (pem, expires_at) = certificate();
        let (before, after) = (expires_at - 1, expires_at + 1);
        let other = json!({"token": token(1)});
        for (current, user, expected) in [
            ("mine", json!({"token": token(before)}), Some(before)),
            ("mine", json!({"token": "opaque"}), None),
            ("mine", json!({"client-certificate-data": pem}), Some(expires_at)),
            ("mine", json!({"client-certificate-data": "x"}), None),
            (
                "mine",
                json!({"token": token(before), "client-certificate-data": pem}),
                Some(before),
            ),
            (
                "mine",
                json!({"token": token(after), "client-certificate-data": pem}),
                Some(expires_at),
            ),
            ("theirs", json!({"token": token(before)}), Some(1)),
            ("absent", json!({"token": token(before)}), None),
        ] {
            let context =
                |name: &str| json!({"name": name, "context": {"cluster": "c", "user": format!("user-{name}")}});
            let named = |name: &str, user: &Value| json!({"name": format!("user-{name}"), "user": user});
            let text = json!({
                "current-context": current, "contexts": [context("theirs"), context("mine")],
                "users": [named("theirs", &other), named("mine", &user)],
            })
            .to_string();
            let kubeconfig = Kubeconfig::from_yaml(&text).unwrap();
            assert_eq!(super::expires_at(&kubeconfig, &text), expected, "{current}: {user}");
        }
    }

    #[test]
    fn the_expiry_is_reported_once_a_week_ahead_and_its_series_ends_with_the_credentials() {
        let (registry, expires_at) = (Registry::new(), 10_000_000);
        let family = registry.gauge("left", "Seconds.");
        let mut report = ExpiryReport::new(expires_at, family, ("cluster", "east".to_owned()));
        let week = EXPIRY_WARNING.as_secs();
        for (left, expected) in [(week + 1, None), (week, None), (week - 1, Some(167)), (week - 60, None)] {
            assert_eq!(report.update(expires_at - left), expected, "{left}");
            let series = format!("left{{cluster=\"east\"}} {left}\n");
            assert!(registry.render().contains(&series), "{}", registry.render());
        }
        assert_eq!(report.update(expires_at + 1), None);
        assert!(registry.render().contains("left{cluster=\"east\"} 0\n"));
        drop(report);
        assert!(!registry.render().contains("east"));
    }
}
