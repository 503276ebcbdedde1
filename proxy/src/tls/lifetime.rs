//! How long a connection to a server gets new requests. This depends on the validity of the certificates of both sides.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use rustls::RootCertStore;
use tokio::time::Instant;
use tokio_rustls::client::TlsStream;

use crate::net::retirement::Retirement;
use crate::tls::certificate::{self, MAX_REMAINING_VALIDITY};

/// How long connections that are opened with the current credentials can be used.
pub(crate) struct CredentialsLifetime {
    /// The time at which the first certificate of the proxy's own chain expires; `None` without a certificate.
    pub(super) not_after: Option<SystemTime>,
    pub(super) anchors: Arc<RootCertStore>,
    /// Set when a trust anchor is removed.
    pub(super) anchor_removed_at: Arc<OnceLock<Instant>>,
}

impl CredentialsLifetime {
    /// When the connection gets no further request: some time before a certificate of either side expires, or some seconds after a
    /// trust anchor was removed. A new connection then presents the renewed certificate, and verifies that of the server.
    ///
    /// Both times are random, so that not all connections are replaced at the same time. A server with tulle's proxy starts to
    /// close the connection only later: see `CertificateDeadlines` of the inbound side.
    pub(crate) fn retirement<IO>(self, stream: &TlsStream<IO>) -> Retirement {
        let (_, session) = stream.get_ref();
        let server_not_after = session
            .peer_certificates()
            .and_then(|certificates| certificate::chain_validity(certificates, &self.anchors).ok())
            .map(|validity| validity.not_after);
        let first_expiry = self.not_after.into_iter().chain(server_not_after).min();
        let remaining = first_expiry.map_or(MAX_REMAINING_VALIDITY, certificate::remaining_validity);
        Retirement {
            at: Instant::now() + usable_for(remaining, fastrand::f64()),
            anchor_removed_at: self.anchor_removed_at,
            delay_after_removal: MAX_DELAY_AFTER_REMOVAL.mul_f64(fastrand::f64()),
        }
    }
}

/// The time for which a connection is used, if its certificates are valid for `remaining`. `random` is from 0 to 1.
fn usable_for(remaining: Duration, random: f64) -> Duration {
    let time_before_expiry = remaining.min(MAX_REPLACEMENT_WINDOW).mul_f64(random.mul_add(0.2, 0.3));
    remaining - time_before_expiry
}

/// A connection is replaced some time before its certificates expire: a random 30 % to 50 % of their remaining validity, or of this
/// duration if the validity is longer.
const MAX_REPLACEMENT_WINDOW: Duration = Duration::from_secs(20 * 60);
/// Maximum time for which connections still get new requests after a trust anchor was removed.
pub(super) const MAX_DELAY_AFTER_REMOVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_replaced_before_their_certificates_expire() {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        for (remaining, latest, earliest) in [
            (minutes(24 * 60), minutes(24 * 60 - 6), minutes(24 * 60 - 10)),
            (minutes(20), minutes(14), minutes(10)),
            (minutes(1), Duration::from_secs(42), Duration::from_secs(30)),
            (Duration::ZERO, Duration::ZERO, Duration::ZERO),
        ] {
            for (random, expected) in [(0., latest), (1., earliest)] {
                let difference = usable_for(remaining, random).abs_diff(expected);
                assert!(difference < Duration::from_millis(1), "{remaining:?} {random}");
            }
        }
    }
}
