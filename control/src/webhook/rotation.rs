//! When a webhook's certificate is made, announced, shown and forgotten; pure.
//!
//! A certificate is listed in the bundle before it is shown, and as long as any replica may show it,
//! so that the API server trusts whichever it meets.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use pem::{EncodeConfig, LineEnding, Pem};
use rustls::pki_types::CertificateDer;
use time::OffsetDateTime;

use super::certificate::{self, Error, Pair};

/// What the Secret holds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct State {
    /// What every replica shows.
    pub(super) current: Arc<Pair>,
    /// What is listed already, and shown next.
    pub(super) next: Option<Arc<Pair>>,
    /// What the API server is told to trust.
    bundle: Vec<CertificateDer<'static>>,
}

/// What a decision looks at.
pub(super) struct Situation<'a> {
    /// The Secret, if it is there and usable.
    pub(super) stored: Option<State>,
    /// What this process knew last, to mend a Secret that was lost.
    pub(super) held: Option<State>,
    /// What this process shows.
    pub(super) shown: Option<&'a Pair>,
    /// How long the API server has had the bundle that is stored.
    pub(super) published_for: Option<Duration>,
    pub(super) now: OffsetDateTime,
}

/// The times of a certificate's life.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// From its making to its end; a new one is made when a third of it is left.
    pub lifetime: Duration,
    /// How long a bundle is known before anything in it is relied upon.
    pub settle: Duration,
}

impl Default for Times {
    /// A year, as the certificates of Linkerd's charts; API servers learn of a new bundle within a second.
    fn default() -> Self {
        Self {
            lifetime: Duration::from_secs(365 * 24 * 3600),
            settle: Duration::from_secs(10),
        }
    }
}

impl State {
    /// What the Secret should hold.
    ///
    /// # Errors
    /// A certificate that cannot be made.
    pub(super) fn decide(situation: Situation<'_>, name: &str, times: &Times) -> Result<Self, Error> {
        let Situation {
            stored,
            held,
            shown,
            published_for,
            now,
        } = situation;
        let make = || Pair::make(name, times.lifetime).map(Arc::new);
        let is_good = |pair: &Pair| now < pair.not_after;
        let mut state = match stored.or(held) {
            Some(state) => state,
            None => Self::new(make()?),
        };
        state.next = state.next.filter(|next| is_good(next));
        let is_settled = published_for.is_some_and(|known| known >= times.settle);
        match state.next.take() {
            Some(next) if is_settled || !is_good(&state.current) => state.current = next,
            next @ Some(_) => state.next = next,
            None if !is_good(&state.current) => state.current = make()?,
            None if now >= renew_at(&state.current) => state.next = Some(make()?),
            None => {}
        }
        state
            .bundle
            .retain(|cert| certificate::validity(cert).is_ok_and(|(_, not_after)| now < not_after));
        let wanted = [
            Some(&*state.current),
            state.next.as_deref(),
            shown.filter(|pair| is_good(pair)),
        ];
        for leaf in wanted
            .into_iter()
            .flatten()
            .filter_map(|pair| pair.chain().into_iter().next())
        {
            if !state.bundle.contains(&leaf) {
                state.bundle.push(leaf);
            }
        }
        Ok(state)
    }

    fn new(current: Arc<Pair>) -> Self {
        Self {
            current,
            next: None,
            bundle: Vec::new(),
        }
    }

    /// Reads a Secret.
    ///
    /// # Errors
    /// A Secret whose certificate cannot be shown; a broken bundle or successor is forgotten and made anew.
    pub(super) fn from_data(data: &BTreeMap<String, ByteString>, name: &str) -> Result<Self, Error> {
        let entry = |key: &str| data.get(key).map(|bytes| bytes.0.as_slice()).unwrap_or_default();
        let current = Pair::parse(entry(CERTIFICATE), entry(KEY))?;
        current.check_name(name)?;
        let next = Pair::parse(entry(NEXT_CERTIFICATE), entry(NEXT_KEY)).ok();
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

    /// The `caBundle` of the webhook configuration.
    pub(super) fn bundle_pem(&self) -> String {
        let lines = EncodeConfig::new().set_line_ending(LineEnding::LF);
        let encode = |cert: &CertificateDer<'_>| pem::encode_config(&Pem::new("CERTIFICATE", cert.to_vec()), lines);
        self.bundle.iter().map(encode).collect()
    }

    /// When the next decision may be another one, if nothing happens in between.
    pub(super) fn due_at(&self) -> OffsetDateTime {
        match &self.next {
            Some(next) => self.current.not_after.min(next.not_after),
            None => renew_at(&self.current),
        }
    }
}

/// When two thirds of a certificate's life are over.
fn renew_at(pair: &Pair) -> OffsetDateTime {
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

    fn decide(stored: Option<State>, shown: Option<&Pair>, now: OffsetDateTime, known: Option<u64>) -> State {
        let situation = Situation {
            stored,
            held: None,
            shown,
            published_for: known.map(Duration::from_secs),
            now,
        };
        State::decide(situation, NAME, &Times::default()).unwrap()
    }

    fn leaf(pair: &Pair) -> CertificateDer<'static> {
        pair.chain().remove(0)
    }

    #[test]
    fn a_certificate_is_announced_before_it_is_shown_and_trusted_until_it_ends() {
        let now = OffsetDateTime::now_utc();
        let first = decide(None, None, now, None);
        assert_eq!(first.bundle, [leaf(&first.current)]);
        assert_eq!(first.bundle_pem(), first.current.certificate_pem);
        assert_eq!(decide(Some(first.clone()), None, now + 200 * DAY, Some(1000)), first);
        assert!(first.due_at() > now + 242 * DAY && first.due_at() < now + 245 * DAY);

        let announced = decide(Some(first.clone()), Some(&first.current), now + 250 * DAY, Some(1000));
        let next = announced.next.clone().unwrap();
        assert_eq!(announced.current, first.current);
        assert_eq!(announced.bundle, [leaf(&first.current), leaf(&next)]);
        for known in [None, Some(9)] {
            assert_eq!(decide(Some(announced.clone()), None, now + 250 * DAY, known), announced);
        }

        let shown = decide(Some(announced.clone()), None, now + 250 * DAY, Some(10));
        assert_eq!((&shown.current, &shown.next), (&next, &None));
        assert_eq!(shown.bundle, announced.bundle);

        let forgotten = decide(Some(shown), None, now + 366 * DAY, Some(10));
        assert!(!forgotten.bundle.contains(&leaf(&first.current)));
    }

    #[test]
    fn a_secret_that_is_gone_is_made_again_from_memory() {
        let now = OffsetDateTime::now_utc();
        let held = decide(None, None, now, None);
        let situation = Situation {
            stored: None,
            held: Some(held.clone()),
            shown: Some(&held.current),
            published_for: None,
            now,
        };
        assert_eq!(State::decide(situation, NAME, &Times::default()).unwrap(), held);
    }

    #[test]
    fn what_is_shown_stays_trusted_when_somebody_replaces_the_certificate() {
        let now = OffsetDateTime::now_utc();
        let shown = decide(None, None, now, None).current;
        let other = State::new(Arc::new(Pair::make(NAME, DAY).unwrap()));
        let decided = decide(Some(other.clone()), Some(&shown), now, None);
        assert_eq!(decided.current, other.current);
        assert_eq!(decided.bundle, [leaf(&other.current), leaf(&shown)]);
    }

    #[test]
    fn a_certificate_that_ended_is_replaced_at_once() {
        let now = OffsetDateTime::now_utc();
        let old = decide(None, None, now, None);
        let decided = decide(Some(old.clone()), Some(&old.current), now + 400 * DAY, None);
        assert_ne!(decided.current, old.current);
        let announced = decide(Some(old.clone()), None, now + 364 * DAY, None);
        let decided = decide(Some(announced), None, now + 366 * DAY, None);
        // Its successor was made by today's clock and has ended with it.
        assert_ne!(decided.current, old.current);
    }

    #[test]
    fn a_secret_is_read_as_it_was_written_and_mended_where_it_is_broken() {
        let now = OffsetDateTime::now_utc();
        let first = decide(None, None, now, None);
        let announced = decide(Some(first), None, now + 250 * DAY, None);
        let data = announced.to_data();
        assert_eq!(State::from_data(&data, NAME).unwrap(), announced);
        assert!(matches!(State::from_data(&data, "other"), Err(Error::Name { .. })));
        let without = |key: &str| {
            let mut data = data.clone();
            data.remove(key);
            State::from_data(&data, NAME)
        };
        assert!(without(CERTIFICATE).is_err());
        assert!(without(KEY).is_err());
        assert_eq!(without(NEXT_KEY).unwrap().next, None);
        let mended = decide(Some(without(BUNDLE).unwrap()), None, now + 250 * DAY, None);
        assert_eq!(mended, announced);
    }
}
