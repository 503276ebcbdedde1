//! TLS credentials and handshakes of the control plane, which has no sidecars and terminates mTLS itself.
//!
//! TLS 1.3 only, without ALPN and without resumption: a session would outlive the certificates that were verified for
//! it. A server presents its certificate only for its own SNI. Client certificates are optional or required. A
//! certificate that is sent is always verified. This module does not depend on the protocol inside the connection.

pub(crate) mod accept;
pub mod anchors;
pub mod client;
pub mod file_watcher;
pub mod mesh_credentials;
pub(crate) mod unserved_files;

use std::sync::{Arc, LazyLock};

use ::aws_lc_rs::digest;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, OtherError};
use tulle_core::issuer_constraints;

/// Returns the algorithms of all handshakes and verifications.
///
/// Source: cipher suites and key exchange groups of the proxies, in their order.
pub fn crypto_provider() -> Arc<CryptoProvider> {
    PROVIDER.clone()
}

/// Checks that the issuers of a chain are allowed to issue its leaf. A single-identity issuer, which belongs to a workload
/// outside of clusters, may issue for its identity only.
fn verify_issuer_constraints(leaf: &CertificateDer<'_>, issuers: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
    issuer_constraints::verify_issuers(leaf, issuers.iter().map(AsRef::as_ref))
        .map_err(|err| CertificateError::Other(OtherError(Arc::new(err))).into())
}

/// Returns the SHA-256 hash in hexadecimal, as used for certificate fingerprints.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    let hash = digest::digest(&digest::SHA256, bytes);
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
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
    use super::sha256_hex;

    #[test]
    fn fingerprints_match_those_of_other_programs() {
        assert_eq!(
            sha256_hex(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
