//! Credentials and handshakes of the control plane, which has no sidecars and terminates mTLS itself.
//!
//! TLS 1.3 only, no ALPN, no resumption: a session would outlive the certificates it was checked with.
//! A server shows its certificate to those who ask for its name, and says whether a client has to show one; that is verified.
//! What is inside the connection is not known here.

pub mod anchors;
pub mod client;
pub mod creds;
pub mod files;

use std::sync::{Arc, LazyLock};

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, OtherError};
use tulle_core::authority;

/// The one choice of algorithms, for all handshakes and for checking chains.
///
/// Source: suites and key exchanges of the proxies, in their order.
pub fn provider() -> Arc<CryptoProvider> {
    PROVIDER.clone()
}

/// Whether the authorities of a chain may sign its leaf: those of virtual machines are for one workload.
fn may_sign(leaf: &CertificateDer<'_>, issuers: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
    authority::may_sign(leaf, issuers.iter().map(AsRef::as_ref))
        .map_err(|err| CertificateError::Other(OtherError(Arc::new(err))).into())
}

/// The SHA-256 of these bytes, in hexadecimal, as certificates are told apart.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    let suite = aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13();
    let hash = suite.map(|suite| suite.common.hash_provider.hash(bytes));
    let hash = hash.as_ref().map(AsRef::as_ref).unwrap_or_default();
    hash.iter().map(|byte: &u8| format!("{byte:02x}")).collect()
}

static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    use aws_lc_rs::{cipher_suite, kx_group};
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        kx_groups: vec![
            kx_group::X25519MLKEM768,
            kx_group::X25519,
            kx_group::SECP256R1,
            kx_group::SECP384R1,
        ],
        ..aws_lc_rs::default_provider()
    })
});

#[cfg(test)]
mod tests {
    use super::sha256;

    #[test]
    fn a_fingerprint_is_that_of_other_programs() {
        assert_eq!(
            sha256(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
