//! Credentials and handshakes of the control plane, which has no sidecars and terminates mTLS itself.
//!
//! TLS 1.3 only, no ALPN, no resumption: a session would outlive the certificates it was checked with.
//! A server shows its certificate to those who ask for its name; a client's certificate is optional and verified if sent.
//! What is inside the connection is not known here.

pub mod anchors;
pub mod client;
pub mod creds;

use std::sync::{Arc, LazyLock};

use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// The one choice of algorithms, for all handshakes and for checking chains.
///
/// Source: suites and key exchanges of the proxies, in their order.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    PROVIDER.clone()
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
