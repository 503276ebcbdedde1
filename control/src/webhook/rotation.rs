//! Decides when a webhook's certificate is generated, published, served and removed.
//!
//! The decision depends on its input only. A new certificate has a random key and the real time.
//!
//! A certificate is in the published CA bundle before it is served, and as long as any replica can serve it. The API
//! server therefore trusts every replica.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use pem::{EncodeConfig, LineEnding, Pem};
use rustls::pki_types::CertificateDer;
use time::OffsetDateTime;

use super::certificate::{self, CertificateKeyPair, Error};

/// The content of the Secret.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SecretContent {
    /// The certificate that every replica serves.
    pub(super) current: Arc<CertificateKeyPair>,
    /// The next certificate: published, but not served yet.
    pub(super) next: Option<Arc<CertificateKeyPair>>,
    /// The published CA bundle.
    bundle: Vec<CertificateDer<'static>>,
}

/// The input of a rotation.
pub(super) struct RotationInput<'a> {
    /// The content of the Secret, if it exists and is valid.
    pub(super) stored: Option<SecretContent>,
    /// The last state known to this process, to restore a deleted Secret.
    pub(super) last_known: Option<SecretContent>,
    /// The certificate that this process serves.
    pub(super) served: Option<&'a CertificateKeyPair>,
    /// How long the stored bundle has been published.
    pub(super) published_for: Option<Duration>,
    pub(super) now: OffsetDateTime,
}

/// Lifetime and delays of a certificate.
#[derive(Clone, Copy, Debug)]
pub struct RotationTimes {
    /// Validity of a new certificate. The next one is generated when a third of it is left.
    pub lifetime: Duration,
    /// How long a bundle must be published before its certificates are served.
    pub settle_time: Duration,
}

impl Default for RotationTimes {
    /// A lifetime of one year, as in Linkerd's charts. API servers read a new bundle within a second.
    fn default() -> Self {
        Self {
            lifetime: Duration::from_secs(365 * 24 * 3600),
            settle_time: Duration::from_secs(10),
        }
    }
}

impl SecretContent {
    /// Computes the content that the Secret should have, from the stored content, or else from the last known one.
    ///
    /// | current certificate | next one | action |
    /// |---|---|---|
    /// | any | valid, published for `settle_time` | the next one becomes the current one |
    /// | expired | valid | the next one becomes the current one |
    /// | valid | valid, published for less | none |
    /// | expired | none, or expired | generate a current one |
    /// | in the last third of its lifetime | none, or expired | generate the next one |
    /// | valid for longer | none, or expired | none |
    ///
    /// The bundle has the current and the next certificate, the served one, and older ones until they expire.
    ///
    /// # Errors
    /// Fails if a certificate cannot be generated.
    pub(super) fn rotate(input: RotationInput<'_>, name: &str, times: &RotationTimes) -> Result<Self, Error> {
        let RotationInput {
            stored,
            last_known,
            served,
            published_for,
            now,
        } = input;
        let generate = || CertificateKeyPair::generate(name, times.lifetime).map(Arc::new);
        let is_expired = |pair: &CertificateKeyPair| now >= pair.not_after;
        let Self {
            current,
            next,
            mut bundle,
        } = match stored.or(last_known) {
            Some(content) => content,
            None => Self::new(generate()?),
        };
        let is_settled = published_for.is_some_and(|time| time >= times.settle_time);
        let (current, next) = match next.filter(|next| !is_expired(next)) {
            Some(next) if is_settled || is_expired(&current) => (next, None),
            Some(next) => (current, Some(next)),
            None if is_expired(&current) => (generate()?, None),
            None if now >= renew_at(&current) => (current, Some(generate()?)),
            None => (current, None),
        };
        bundle.retain(|cert| certificate::validity(cert).is_ok_and(|(_, not_after)| now < not_after));
        let wanted = [
            Some(&*current),
            next.as_deref(),
            served.filter(|pair| !is_expired(pair)),
        ];
        for leaf in wanted
            .into_iter()
            .flatten()
            .filter_map(|pair| pair.chain().into_iter().next())
        {
            if !bundle.contains(&leaf) {
                bundle.push(leaf);
            }
        }
        Ok(Self { current, next, bundle })
    }

    fn new(current: Arc<CertificateKeyPair>) -> Self {
        Self {
            current,
            next: None,
            bundle: Vec::new(),
        }
    }

    /// Parses the data of a Secret.
    ///
    /// # Errors
    /// Fails if the current certificate is invalid. An invalid bundle or next certificate is ignored, and replaced
    /// later.
    pub(super) fn from_data(data: &BTreeMap<String, ByteString>, name: &str) -> Result<Self, Error> {
        let entry = |key: &str| data.get(key).map(|bytes| bytes.0.as_slice()).unwrap_or_default();
        let current = CertificateKeyPair::parse(entry(CERTIFICATE), entry(KEY))?;
        current.check_name(name)?;
        let next = CertificateKeyPair::parse(entry(NEXT_CERTIFICATE), entry(NEXT_KEY)).ok();
        Ok(Self {
            current: Arc::new(current),
            next: next.filter(|next| next.check_name(name).is_ok()).map(Arc::new),
            bundle: certificate::certificates(entry(BUNDLE)).unwrap_or_default(),
        })
    }

    pub(super) fn to_data(&self) -> BTreeMap<String, ByteString> {
        let mut data = BTreeMap::new();
        let mut put = |key: &str, text: &str| data.insert(key.to_owned(), ByteString(text.as_bytes().to_vec()));
        put(CERTIFICATE, &self.current.certificate_pem);
        put(KEY, &self.current.key_pem);
        put(BUNDLE, &self.bundle_pem());
        if let Some(next) = &self.next {
            put(NEXT_CERTIFICATE, &next.certificate_pem);
            put(NEXT_KEY, &next.key_pem);
        }
        data
    }

    /// Returns the `caBundle` of the webhook configuration.
    pub(super) fn bundle_pem(&self) -> String {
        let lines = EncodeConfig::new().set_line_ending(LineEnding::LF);
        let encode = |cert: &CertificateDer<'_>| pem::encode_config(&Pem::new("CERTIFICATE", cert.to_vec()), lines);
        self.bundle.iter().map(encode).collect()
    }

    /// Returns when the age of the current or the next certificate changes the result of [`Self::rotate`]. The end of
    /// `settle_time`, and the expiry of an older certificate in the bundle, can change it earlier.
    pub(super) fn due_at(&self) -> OffsetDateTime {
        match &self.next {
            Some(next) => self.current.not_after.min(next.not_after),
            None => renew_at(&self.current),
        }
    }
}

/// Returns when two thirds of a certificate's lifetime are over.
fn renew_at(pair: &CertificateKeyPair) -> OffsetDateTime {
    pair.not_after - (pair.not_after - pair.not_before) / 3
}

const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const BUNDLE: &str = "ca.crt";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "linkerd-sp-validator.linkerd.svc";
    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn rotate(
        stored: Option<SecretContent>,
        served: Option<&CertificateKeyPair>,
        now: OffsetDateTime,
        published_for: Option<u64>,
    ) -> SecretContent {
        let input = RotationInput {
            stored,
            last_known: None,
            served,
            published_for: published_for.map(Duration::from_secs),
            now,
        };
        SecretContent::rotate(input, NAME, &RotationTimes::default()).unwrap()
    }

    fn leaf(pair: &CertificateKeyPair) -> CertificateDer<'static> {
        pair.chain().remove(0)
    }

    #[test]
    fn a_certificate_is_published_before_it_is_served_and_trusted_until_it_expires() {
        let now = OffsetDateTime::now_utc();
        let first = rotate(None, None, now, None);
        assert_eq!(first.bundle, [leaf(&first.current)]);
        assert_eq!(first.bundle_pem(), first.current.certificate_pem);
        assert_eq!(rotate(Some(first.clone()), None, now + 200 * DAY, Some(1000)), first);
        assert!(first.due_at() > now + 242 * DAY && first.due_at() < now + 245 * DAY);

        let published = rotate(Some(first.clone()), Some(&first.current), now + 250 * DAY, Some(1000));
        let next = published.next.clone().unwrap();
        assert_eq!(published.current, first.current);
        assert_eq!(published.bundle, [leaf(&first.current), leaf(&next)]);
        for published_for in [None, Some(9)] {
            let rotated = rotate(Some(published.clone()), None, now + 250 * DAY, published_for);
            assert_eq!(rotated, published);
        }

        let served = rotate(Some(published.clone()), None, now + 250 * DAY, Some(10));
        assert_eq!((&served.current, &served.next), (&next, &None));
        assert_eq!(served.bundle, published.bundle);

        let expired = rotate(Some(served), None, now + 366 * DAY, Some(10));
        assert!(!expired.bundle.contains(&leaf(&first.current)));
    }

    #[test]
    fn a_deleted_secret_is_restored_from_memory() {
        let now = OffsetDateTime::now_utc();
        let last_known = rotate(None, None, now, None);
        let input = RotationInput {
            stored: None,
            last_known: Some(last_known.clone()),
            served: Some(&last_known.current),
            published_for: None,
            now,
        };
        assert_eq!(
            SecretContent::rotate(input, NAME, &RotationTimes::default()).unwrap(),
            last_known
        );
    }

    #[test]
    fn the_served_certificate_stays_trusted_when_the_secret_is_replaced() {
        let now = OffsetDateTime::now_utc();
        let served = rotate(None, None, now, None).current;
        let other = SecretContent::new(Arc::new(CertificateKeyPair::generate(NAME, DAY).unwrap()));
        let rotated = rotate(Some(other.clone()), Some(&served), now, None);
        assert_eq!(rotated.current, other.current);
        assert_eq!(rotated.bundle, [leaf(&other.current), leaf(&served)]);
    }

    #[test]
    fn an_expired_certificate_is_replaced_at_once() {
        let now = OffsetDateTime::now_utc();
        let old = rotate(None, None, now, None);
        let rotated = rotate(Some(old.clone()), Some(&old.current), now + 400 * DAY, None);
        assert_ne!(rotated.current, old.current);
        let published = rotate(Some(old.clone()), None, now + 364 * DAY, None);
        let rotated = rotate(Some(published), None, now + 366 * DAY, None);
        // `generate` takes the real time, not the `now` of the input, so at `now + 366 days` the next certificate has
        // expired too.
        assert_ne!(rotated.current, old.current);
    }

    #[test]
    fn a_secret_is_parsed_as_it_was_written_and_restored_where_it_is_invalid() {
        let now = OffsetDateTime::now_utc();
        let first = rotate(None, None, now, None);
        let published = rotate(Some(first), None, now + 250 * DAY, None);
        let data = published.to_data();
        assert_eq!(SecretContent::from_data(&data, NAME).unwrap(), published);
        assert!(matches!(
            SecretContent::from_data(&data, "other"),
            Err(Error::Name { .. })
        ));
        let without = |key: &str| {
            let mut data = data.clone();
            data.remove(key);
            SecretContent::from_data(&data, NAME)
        };
        assert!(without(CERTIFICATE).is_err());
        assert!(without(KEY).is_err());
        assert_eq!(without(NEXT_KEY).unwrap().next, None);
        let restored = rotate(Some(without(BUNDLE).unwrap()), None, now + 250 * DAY, None);
        assert_eq!(restored, published);
    }
}
