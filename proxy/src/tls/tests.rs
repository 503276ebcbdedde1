//! Handshakes over in-memory pipes, and parsers with arbitrary bytes. Tests of other modules use [`Authority`] too.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use proptest::prelude::*;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    NameConstraints, SanType,
};
use rustls::HandshakeKind;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tulle_core::identity::Identity;
use zeroize::Zeroizing;

use crate::tls::client;
use crate::tls::credentials::{Alpn, CertifiedKey, Credentials, CredentialsError, TrustAnchors};
use crate::tls::handshake_failure::HandshakeFailure;
use crate::tls::header::{Decoded, InvalidHeader, SessionProtocol, TransportHeader};
use crate::tls::lifetime::MAX_DELAY_AFTER_REMOVAL;
use crate::tls::server::{self, MAX_HELLO_BYTES, ParsedHello};
use crate::tls::sessions::EndpointSessions;

pub(crate) struct Authority {
    params: CertificateParams,
    pub(crate) issuer: Issuer<'static, KeyPair>,
    pub(crate) certificate: rcgen::Certificate,
}

impl Authority {
    pub(crate) fn new() -> Self {
        Self::named("root.linkerd.cluster.local")
    }

    pub(crate) fn named(name: &str) -> Self {
        Self::with_key(name, KeyPair::generate().unwrap())
    }

    /// An authority that signs with `key`.
    fn with_key(name: &str, key: KeyPair) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).unwrap();
        Self {
            params: params.clone(),
            issuer: Issuer::new(params, key),
            certificate,
        }
    }

    /// An expired certificate with the name and key of this authority.
    fn expired_certificate(&self, signer: &Issuer<'static, KeyPair>) -> CertificateDer<'static> {
        let mut params = self.params.clone();
        params.not_before = (SystemTime::now() - Duration::from_secs(7200)).into();
        params.not_after = (SystemTime::now() - Duration::from_secs(3600)).into();
        let certificate = params.signed_by(self.issuer.key(), signer).unwrap();
        certificate.der().clone()
    }

    /// An intermediate authority that is limited to one workload.
    pub(crate) fn single_identity_issuer(&self, identity: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.subject_alt_names = vec![san(identity)];
        params
            .distinguished_name
            .push(DnType::CommonName, "single-identity issuer");
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: Vec::new(),
            excluded_subtrees: vec![GeneralSubtree::DnsName(String::new())],
        });
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Self {
            params: params.clone(),
            issuer: Issuer::new(params, key),
            certificate,
        }
    }

    pub(crate) fn anchors(&self) -> TrustAnchors {
        TrustAnchors::from_pem(&self.certificate.pem()).unwrap()
    }

    /// A leaf certificate for `names`. `not_after` may be in the past.
    pub(crate) fn leaf(&self, names: &[&str], not_after: SystemTime) -> CertifiedKey {
        let mut params = CertificateParams::default();
        params.subject_alt_names = names.iter().map(|name| san(name)).collect();
        params.not_before = (SystemTime::now() - Duration::from_secs(3600)).into();
        params.not_after = not_after.into();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let key = Zeroizing::new(PrivatePkcs8KeyDer::from(key.serialize_der()));
        CertifiedKey {
            chain: vec![certificate.der().clone()],
            key,
        }
    }

    /// Credentials of `name` that are valid for an hour.
    pub(crate) fn credentials(&self, name: &str) -> Credentials {
        let creds = Credentials::new(name.parse().unwrap(), SERVER_NAME, self.anchors()).unwrap();
        creds.install(self.leaf(&[name], in_an_hour())).unwrap();
        creds
    }
}

fn san(name: &str) -> SanType {
    match name.contains("://") {
        true => SanType::URI(name.try_into().unwrap()),
        false => SanType::DnsName(name.try_into().unwrap()),
    }
}

pub(crate) fn in_an_hour() -> SystemTime {
    SystemTime::now() + Duration::from_secs(3600)
}

const SERVER: &str = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local";
const CLIENT: &str = "vote-bot.emojivoto.serviceaccount.identity.linkerd.cluster.local";
const SERVER_NAME: &str = SERVER;

type Connected = Result<tokio_rustls::client::TlsStream<DuplexStream>, client::TlsConnectError>;
type Accepted = Result<(tokio_rustls::server::TlsStream<DuplexStream>, server::ClientHandshake), server::AcceptError>;

async fn handshake(
    client: &Credentials,
    server: &Credentials,
    server_id: &str,
    (client_alpn, server_alpn): (Alpn, Alpn),
) -> (Connected, Accepted) {
    let (client_io, server_io) = duplex(64 * 1024);
    let connected_server = client::Server {
        id: &server_id.parse().unwrap(),
        name: SERVER_NAME,
        alpn: client_alpn,
        sessions: None,
    };
    tokio::join!(
        client::connect(client_io, client, connected_server),
        server::accept(server_io, server, server_alpn),
    )
}

/// A handshake of a connection with a transport header. The client asks for a ticket if there are `sessions`, and gets a byte, so
/// that it reads the ticket.
async fn handshake_with_sessions(
    client: &Credentials,
    server: &Credentials,
    server_id: &str,
    sessions: Option<&EndpointSessions>,
) -> Result<(HandshakeKind, Option<Identity>), HandshakeFailure> {
    let (client_io, server_io) = duplex(64 * 1024);
    let connected_server = client::Server {
        id: &server_id.parse().unwrap(),
        name: SERVER_NAME,
        alpn: Alpn::TransportHeader,
        sessions,
    };
    let (connected, accepted) = tokio::join!(
        client::connect(client_io, client, connected_server),
        server::accept(server_io, server, Alpn::TransportHeader),
    );
    let mut connected = connected.map_err(|error| error.failure())?;
    let (mut accepted, peer) = accepted.map_err(|error| error.failure())?;
    assert_eq!(peer.alpn, Alpn::TransportHeader);
    accepted.write_all(b"x").await.unwrap();
    accepted.flush().await.unwrap();
    connected.read_exact(&mut [0]).await.unwrap();
    let session = connected.get_ref().1;
    let n_tickets = u32::from(sessions.is_some());
    assert_eq!(
        session.tls13_tickets_received(),
        n_tickets,
        "only those that the client asked for"
    );
    Ok((session.handshake_kind().unwrap(), peer.client_id))
}

const NO_ALPN: (Alpn, Alpn) = (Alpn::Unset, Alpn::Unset);

#[tokio::test]
async fn a_handshake_authenticates_both_sides() {
    let authority = Authority::new();
    let (client, server) = (authority.credentials(CLIENT), authority.credentials(SERVER));
    let (connected, accepted) = handshake(&client, &server, SERVER, NO_ALPN).await;
    let (mut connected, (mut accepted, peer)) = (connected.unwrap(), accepted.unwrap());
    assert_eq!(peer.client_id, Some(CLIENT.parse().unwrap()));
    assert_eq!(peer.alpn, Alpn::Unset);
    connected.write_all(b"ping").await.unwrap();
    connected.flush().await.unwrap();
    let mut bytes = [0; 4];
    accepted.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"ping");
    let session = connected.get_ref().1;
    assert_eq!(session.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
    assert_eq!(
        session.negotiated_cipher_suite().map(|suite| suite.suite()),
        Some(rustls::CipherSuite::TLS13_AES_128_GCM_SHA256)
    );
    assert_eq!(
        session.negotiated_key_exchange_group().map(|group| group.name()),
        Some(rustls::NamedGroup::X25519MLKEM768)
    );
}

#[tokio::test]
async fn certificates_signed_with_ecdsa_ed25519_or_rsa_are_accepted() {
    for algorithm in [
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &rcgen::PKCS_ECDSA_P384_SHA384,
        &rcgen::PKCS_ED25519,
        &rcgen::PKCS_RSA_SHA256,
    ] {
        let authority = Authority::with_key("root", KeyPair::generate_for(algorithm).unwrap());
        let (client, server) = (authority.credentials(CLIENT), authority.credentials(SERVER));
        let (connected, accepted) = handshake(&client, &server, SERVER, NO_ALPN).await;
        connected.unwrap();
        let id = accepted.unwrap().1.client_id;
        assert_eq!(id, Some(CLIENT.parse().unwrap()), "{algorithm:?}");
    }
}

#[tokio::test]
async fn a_session_with_an_endpoint_is_resumed_with_both_identities() {
    let authority = Authority::new();
    let (client, server) = (authority.credentials(CLIENT), authority.credentials(SERVER));
    let sessions = EndpointSessions::default();
    for expected in [HandshakeKind::Full, HandshakeKind::Resumed, HandshakeKind::Resumed] {
        let (kind, client_id) = handshake_with_sessions(&client, &server, SERVER, Some(&sessions))
            .await
            .unwrap();
        assert_eq!((kind, client_id), (expected, Some(CLIENT.parse().unwrap())));
    }
    let other = EndpointSessions::default();
    for sessions in [Some(&other), None] {
        let (kind, _) = handshake_with_sessions(&client, &server, SERVER, sessions)
            .await
            .unwrap();
        assert_eq!(kind, HandshakeKind::Full);
    }
    let refused = handshake_with_sessions(&client, &server, "other.example.com", Some(&sessions)).await;
    assert_eq!(refused, Err(HandshakeFailure::WrongIdentity));
}

#[tokio::test]
async fn a_session_is_not_resumed_after_a_change_of_credentials() {
    let authority = Authority::new();
    let (client, server) = (authority.credentials(CLIENT), authority.credentials(SERVER));
    let sessions = EndpointSessions::default();
    let kind = async || {
        let handshake = handshake_with_sessions(&client, &server, SERVER, Some(&sessions)).await;
        handshake.map(|(kind, _)| kind)
    };
    assert_eq!(kind().await, Ok(HandshakeKind::Full));
    for (creds, name) in [(&client, CLIENT), (&server, SERVER)] {
        assert_eq!(kind().await, Ok(HandshakeKind::Resumed));
        creds.install(authority.leaf(&[name], in_an_hour())).unwrap();
        assert_eq!(kind().await, Ok(HandshakeKind::Full), "new certificate of {name}");
        assert_eq!(kind().await, Ok(HandshakeKind::Resumed));
        creds.replace_anchors(authority.anchors()).unwrap();
        assert_eq!(kind().await, Ok(HandshakeKind::Full), "new anchors of {name}");
    }
    assert_eq!(kind().await, Ok(HandshakeKind::Resumed));
    server.replace_anchors(Authority::new().anchors()).unwrap();
    assert_eq!(
        kind().await,
        Err(HandshakeFailure::UnknownCa),
        "the server does not trust the client"
    );
}

#[tokio::test]
async fn open_connections_end_when_the_trust_anchors_no_longer_verify_their_clients() {
    let (authority, other) = (Authority::new(), Authority::named("other"));
    let server = authority.credentials(SERVER);
    let both = authority.anchors().union(&other.anchors()).unwrap();
    server.replace_anchors(both.clone()).unwrap();
    let client = other.credentials(CLIENT);
    client.replace_anchors(both.clone()).unwrap();
    let connect = async || {
        let (connected, accepted) = handshake(&client, &server, SERVER, NO_ALPN).await;
        let lifetime = client.lifetime();
        let retirement = lifetime.retirement(&connected.unwrap());
        (accepted.unwrap().1.chain.unwrap(), retirement)
    };
    let (chain, retirement) = connect().await;
    let (second, _) = connect().await;
    assert!(Arc::ptr_eq(&chain, &second), "connections share the chain of a client");
    let (ended, end) = tokio::sync::oneshot::channel();
    let waiting = tokio::spawn(async move {
        chain.wait_untrusted().await;
        ended.send(()).unwrap();
    });
    tokio::time::pause();
    let retirement_is_due = async || {
        tokio::time::advance(MAX_DELAY_AFTER_REMOVAL).await;
        retirement.is_due(tokio::time::Instant::now())
    };
    // Neither a renewed certificate nor the same or further trust anchors end a connection.
    server.install(authority.leaf(&[SERVER], in_an_hour())).unwrap();
    let further = both.union(&Authority::named("further").anchors()).unwrap();
    for anchors in [both, further] {
        server.replace_anchors(anchors.clone()).unwrap();
        client.replace_anchors(anchors).unwrap();
        assert!(!retirement_is_due().await && !waiting.is_finished());
    }
    server.replace_anchors(authority.anchors()).unwrap();
    end.await.unwrap();
    second.wait_untrusted().await;
    client.replace_anchors(authority.anchors()).unwrap();
    assert!(
        retirement_is_due().await,
        "a connection verified by former trust anchors gets no further request"
    );
}

#[tokio::test]
async fn connections_have_the_validity_of_the_first_certificate_that_expires() {
    let authority = Authority::new();
    let server = authority.credentials(SERVER);
    let client = authority.credentials(CLIENT);
    let soon = SystemTime::now() + Duration::from_secs(60);
    client.install(authority.leaf(&[CLIENT], soon)).unwrap();
    let (connected, accepted) = handshake(&client, &server, SERVER, NO_ALPN).await;
    let not_after = accepted.unwrap().1.chain.unwrap().not_after();
    let difference = soon.duration_since(not_after).unwrap();
    assert!(
        difference <= Duration::from_secs(1),
        "certificates have no fractions of seconds"
    );
    let retirement = client.lifetime().retirement(&connected.unwrap());
    let usable_for = retirement.at - tokio::time::Instant::now();
    let expected = Duration::from_secs(25)..Duration::from_secs(45);
    assert!(expected.contains(&usable_for), "{usable_for:?}");
}

/// A peer may send roots with its chain. Verification ignores their validity: it ends at the first trust anchor.
#[tokio::test]
async fn expired_roots_in_a_chain_do_not_end_its_connections() {
    let (authority, former) = (Authority::new(), Authority::named("former"));
    let with_expired_roots = |name: &str| {
        let mut leaf = authority.leaf(&[name], in_an_hour());
        leaf.chain.push(authority.expired_certificate(&former.issuer));
        leaf.chain.push(former.expired_certificate(&former.issuer));
        leaf
    };
    let (client, server) = (authority.credentials(CLIENT), authority.credentials(SERVER));
    client.install(with_expired_roots(CLIENT)).unwrap();
    server.install(with_expired_roots(SERVER)).unwrap();
    let (connected, accepted) = handshake(&client, &server, SERVER, NO_ALPN).await;
    let remaining = accepted.unwrap().1.chain.unwrap().remaining_validity();
    assert!(remaining > Duration::from_secs(3500), "{remaining:?}");
    let retirement = client.lifetime().retirement(&connected.unwrap());
    assert!(!retirement.is_due(tokio::time::Instant::now()));
    let sessions = EndpointSessions::default();
    for expected in [HandshakeKind::Full, HandshakeKind::Resumed] {
        let handshake = handshake_with_sessions(&client, &server, SERVER, Some(&sessions)).await;
        assert_eq!(handshake.map(|(kind, _)| kind), Ok(expected));
    }
}

#[tokio::test]
async fn a_client_that_does_not_ask_gets_no_session_ticket() {
    let authority = Authority::new();
    let (client, server) = (authority.credentials(CLIENT), authority.credentials(SERVER));
    for _ in 0..2 {
        let (connected, accepted) = handshake(&client, &server, SERVER, NO_ALPN).await;
        let (mut connected, (mut accepted, _)) = (connected.unwrap(), accepted.unwrap());
        // A server sends its session tickets before its first data.
        accepted.write_all(b"x").await.unwrap();
        accepted.flush().await.unwrap();
        connected.read_exact(&mut [0]).await.unwrap();
        let session = connected.get_ref().1;
        assert_eq!(session.handshake_kind(), Some(HandshakeKind::Full));
        assert_eq!(session.tls13_tickets_received(), 0);
    }
}

#[tokio::test]
async fn spiffe_identities_work_on_both_sides() {
    let authority = Authority::new();
    let id = "spiffe://root.linkerd.cluster.local/vm-1";
    let (client, server) = (authority.credentials(id), authority.credentials(id));
    let (connected, accepted) = handshake(&client, &server, id, NO_ALPN).await;
    connected.unwrap();
    assert_eq!(accepted.unwrap().1.client_id, Some(id.parse().unwrap()));
}

#[tokio::test]
async fn alpn_is_negotiated_only_if_both_sides_offer_it() {
    let authority = Authority::new();
    let (client, server) = (authority.credentials(CLIENT), authority.credentials(SERVER));
    for (offered, served, expected) in [
        (Alpn::TransportHeader, Alpn::TransportHeader, Alpn::TransportHeader),
        (Alpn::Unset, Alpn::TransportHeader, Alpn::Unset),
        (Alpn::TransportHeader, Alpn::Unset, Alpn::Unset),
    ] {
        let (connected, accepted) = handshake(&client, &server, SERVER, (offered, served)).await;
        assert_eq!(client::alpn(&connected.unwrap()), expected, "{offered:?} {served:?}");
        assert_eq!(accepted.unwrap().1.alpn, expected, "{offered:?} {served:?}");
    }
}

#[tokio::test]
async fn a_server_with_another_identity_is_refused() {
    let authority = Authority::new();
    let (client, server) = (
        authority.credentials(CLIENT),
        authority.credentials("other.example.com"),
    );
    let (connected, _) = handshake(&client, &server, SERVER, NO_ALPN).await;
    let error = connected.unwrap_err();
    assert_eq!(error.failure(), HandshakeFailure::WrongIdentity);
    assert_eq!(
        error.to_string(),
        format!("the peer has the identities [other.example.com], expected {SERVER}")
    );
}

#[tokio::test]
async fn each_side_refuses_a_certificate_of_another_authority() {
    let ours = Authority::new();
    for theirs in [Authority::new(), Authority::named("other")] {
        let (connected, _) = handshake(&ours.credentials(CLIENT), &theirs.credentials(SERVER), SERVER, NO_ALPN).await;
        assert_eq!(connected.unwrap_err().failure(), HandshakeFailure::UnknownCa);

        // The client trusts the server, but has a certificate of another authority.
        let untrusted = theirs.credentials(CLIENT);
        untrusted.replace_anchors(ours.anchors()).unwrap();
        let (_, accepted) = handshake(&untrusted, &ours.credentials(SERVER), SERVER, NO_ALPN).await;
        assert_eq!(accepted.unwrap_err().failure(), HandshakeFailure::UnknownCa);
    }
}

#[tokio::test]
async fn a_peer_that_was_accepted_is_refused_after_a_change_of_the_anchors() {
    let authority = Authority::new();
    let (client, server) = (authority.credentials(CLIENT), authority.credentials(SERVER));
    for _ in 0..2 {
        handshake(&client, &server, SERVER, NO_ALPN).await.1.unwrap();
    }
    server.replace_anchors(Authority::new().anchors()).unwrap();
    let (_, accepted) = handshake(&client, &server, SERVER, NO_ALPN).await;
    assert_eq!(accepted.unwrap_err().failure(), HandshakeFailure::UnknownCa);
    client.replace_anchors(Authority::new().anchors()).unwrap();
    let (connected, _) = handshake(&client, &server, SERVER, NO_ALPN).await;
    assert_eq!(connected.unwrap_err().failure(), HandshakeFailure::UnknownCa);
}

#[tokio::test]
async fn each_side_refuses_an_expired_certificate() {
    let authority = Authority::new();
    let soon = Duration::from_secs(3);
    let expiring = Credentials::new(CLIENT.parse().unwrap(), SERVER_NAME, authority.anchors()).unwrap();
    expiring
        .install(authority.leaf(&[CLIENT], SystemTime::now() + soon))
        .unwrap();
    let fresh = authority.credentials(SERVER);
    let (to_fresh, to_expiring) = (EndpointSessions::default(), EndpointSessions::default());
    // An earlier success does not change the result.
    handshake(&expiring, &fresh, SERVER, NO_ALPN).await.1.unwrap();
    handshake(&fresh, &expiring, CLIENT, NO_ALPN).await.0.unwrap();
    handshake_with_sessions(&expiring, &fresh, SERVER, Some(&to_fresh))
        .await
        .unwrap();
    handshake_with_sessions(&fresh, &expiring, CLIENT, Some(&to_expiring))
        .await
        .unwrap();
    while SystemTime::now() <= expiring.validity().unwrap().not_after + Duration::from_secs(1) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (_, accepted) = handshake(&expiring, &fresh, SERVER, NO_ALPN).await;
    assert_eq!(accepted.unwrap_err().failure(), HandshakeFailure::Expired);
    let (connected, _) = handshake(&fresh, &expiring, CLIENT, NO_ALPN).await;
    assert_eq!(connected.unwrap_err().failure(), HandshakeFailure::Expired);
    for (client, server, server_id, sessions) in [
        (&expiring, &fresh, SERVER, &to_fresh),
        (&fresh, &expiring, CLIENT, &to_expiring),
    ] {
        let refused = handshake_with_sessions(client, server, server_id, Some(sessions)).await;
        assert_eq!(refused, Err(HandshakeFailure::Expired), "{server_id}");
    }
}

#[tokio::test]
async fn a_client_without_certificate_is_accepted_without_identity() {
    let authority = Authority::new();
    let anonymous = Credentials::new(CLIENT.parse().unwrap(), SERVER_NAME, authority.anchors()).unwrap();
    let (connected, accepted) = handshake(&anonymous, &authority.credentials(SERVER), SERVER, NO_ALPN).await;
    connected.unwrap();
    assert_eq!(accepted.unwrap().1.client_id, None);
}

#[tokio::test]
async fn a_certificate_without_identity_is_not_installed() {
    let authority = Authority::new();
    let nameless = Credentials::new(CLIENT.parse().unwrap(), SERVER_NAME, authority.anchors()).unwrap();
    let refused = nameless.install(authority.leaf(&[], in_an_hour())).unwrap_err();
    assert!(matches!(refused, CredentialsError::LeafName { .. }), "{refused}");
    assert_eq!(nameless.generation(), 0);
}

#[tokio::test]
async fn a_server_without_a_certificate_accepts_no_connection() {
    let authority = Authority::new();
    let uncertified = Credentials::new(SERVER.parse().unwrap(), SERVER_NAME, authority.anchors()).unwrap();
    let (_, server_io) = duplex(64);
    let error = server::accept(server_io, &uncertified, Alpn::Unset).await.unwrap_err();
    assert_eq!(error.failure(), HandshakeFailure::NotCertified);
    let certified = tokio::spawn({
        let uncertified = uncertified.clone();
        async move { uncertified.wait_certified().await }
    });
    uncertified.install(authority.leaf(&[SERVER], in_an_hour())).unwrap();
    certified.await.unwrap();
}

#[test]
fn an_invalid_certificate_is_not_installed() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let creds = ours.credentials(SERVER);
    for leaf in [
        theirs.leaf(&[SERVER], in_an_hour()),
        ours.leaf(&[CLIENT], in_an_hour()),
        ours.leaf(&[SERVER], SystemTime::now() - Duration::from_secs(1)),
        CertifiedKey {
            key: ours.leaf(&[SERVER], in_an_hour()).key,
            ..ours.leaf(&[SERVER], in_an_hour())
        },
        CertifiedKey {
            chain: Vec::new(),
            ..ours.leaf(&[SERVER], in_an_hour())
        },
    ] {
        let config_before = creds.client_config(Alpn::Unset, None);
        creds.install(leaf).unwrap_err();
        assert_eq!(creds.generation(), 1);
        assert!(Arc::ptr_eq(&config_before, &creds.client_config(Alpn::Unset, None)));
    }
}

#[test]
fn invalid_trust_anchors_are_refused_with_the_reason() {
    for (text, reason) in [
        (
            "",
            "the trust anchors are empty, expected at least one PEM CERTIFICATE block",
        ),
        (
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "certificate 1 of the trust anchors cannot be used",
        ),
        (
            "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
            "the trust anchors have a PRIVATE KEY block, expected only CERTIFICATE blocks",
        ),
    ] {
        assert_eq!(TrustAnchors::from_pem(text).unwrap_err().to_string(), reason);
    }
}

#[test]
fn secrets_are_not_printed() {
    let leaf = Authority::new().leaf(&[SERVER], in_an_hour());
    assert_eq!(format!("{leaf:?}"), r#"CertifiedKey { certificates: 1, key: "…" }"#);
}

/// A ClientHello as rustls encodes it.
fn client_hello(server_name: &str) -> Vec<u8> {
    let creds = Authority::new().credentials(CLIENT);
    let name = server_name.to_owned().try_into().unwrap();
    let mut session = rustls::ClientConnection::new(creds.client_config(Alpn::TransportHeader, None), name).unwrap();
    let mut bytes = Vec::new();
    session.write_tls(&mut bytes).unwrap();
    bytes
}

/// The same handshake bytes in records of `size` bytes.
fn fragmented(hello: &[u8], size: usize) -> Vec<u8> {
    let records = hello[5..].chunks(size).map(|fragment| {
        let length = u16::try_from(fragment.len()).unwrap().to_be_bytes();
        [&[22, 3, 1], &length[..], fragment].concat()
    });
    records.collect::<Vec<_>>().concat()
}

#[test]
fn sni_is_found_in_whole_and_fragmented_hellos() {
    let hello = client_hello(SERVER);
    let found = ParsedHello::ClientHello {
        sni: Some(SERVER.to_owned()),
    };
    for bytes in [
        hello.clone(),
        fragmented(&hello, 1),
        fragmented(&hello, 7),
        fragmented(&hello, 1000),
    ] {
        assert_eq!(server::parse_client_hello(&bytes), found);
    }
    let ip = client_hello("10.0.0.1");
    assert_eq!(server::parse_client_hello(&ip), ParsedHello::ClientHello { sni: None });
}

#[test]
fn a_hello_is_incomplete_until_its_server_name_is_complete() {
    let hello = fragmented(&client_hello(SERVER), 100);
    let first = (0..=hello.len())
        .find(|length| server::parse_client_hello(&hello[..*length]) != ParsedHello::Incomplete)
        .unwrap();
    for length in first..=hello.len() {
        assert_eq!(
            server::parse_client_hello(&hello[..length]),
            ParsedHello::ClientHello {
                sni: Some(SERVER.to_owned())
            }
        );
    }
}

#[test]
fn bytes_that_are_not_tls_are_detected_at_once() {
    for bytes in [
        &b"GET / HTTP/1.1\r\n"[..],
        b"PRI",
        b"\x16\x02",
        b"\x16\x03\x04\x00",
        b"\x16\x03\x01\x00\x00",
        b"\x17",
    ] {
        assert_eq!(server::parse_client_hello(bytes), ParsedHello::NotTls, "{bytes:?}");
    }
    assert_eq!(server::parse_client_hello(b""), ParsedHello::Incomplete);
    assert_eq!(server::parse_client_hello(b"\x16\x03\x01"), ParsedHello::Incomplete);
    let server_hello = b"\x16\x03\x03\x00\x04\x02\x00\x00\x00";
    assert_eq!(server::parse_client_hello(server_hello), ParsedHello::NotTls);
}

fn header() -> impl Strategy<Value = TransportHeader> {
    let protocol = prop_oneof![
        Just(None),
        Just(Some(SessionProtocol::Http1)),
        Just(Some(SessionProtocol::Http2))
    ];
    (1..=u16::MAX, proptest::option::of("[a-z.]{1,80}"), protocol).prop_map(|(port, name, protocol)| TransportHeader {
        port: port.try_into().unwrap(),
        name,
        protocol,
    })
}

proptest! {
    #[test]
    fn the_hello_parser_accepts_any_bytes_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        server::parse_client_hello(&bytes);
    }

    #[test]
    fn the_hello_parser_accepts_damaged_hellos_without_panic(at in 0..400usize, byte in any::<u8>(), size in 1..300usize) {
        let mut hello = fragmented(HELLO.get_or_init(|| client_hello(SERVER)), size);
        hello[at] = byte;
        server::parse_client_hello(&hello);
    }

    #[test]
    fn the_hello_parser_never_needs_more_than_its_limit(tail in proptest::collection::vec(any::<u8>(), MAX_HELLO_BYTES..MAX_HELLO_BYTES + 50)) {
        let head = [22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xff];
        prop_assert_ne!(server::parse_client_hello(&[&head[..], &tail].concat()), ParsedHello::Incomplete);
    }

    #[test]
    fn a_transport_header_is_decoded_as_it_was_encoded(header in header(), tail in proptest::collection::vec(any::<u8>(), 0..20)) {
        let mut bytes = BytesMut::new();
        header.encode(&mut bytes);
        let length = bytes.len();
        for short in 0..length {
            prop_assert!(matches!(TransportHeader::decode(&bytes[..short]), Decoded::Incomplete));
        }
        bytes.extend_from_slice(&tail);
        match TransportHeader::decode(&bytes) {
            Decoded::Header(decoded, consumed) => prop_assert_eq!((decoded, consumed), (header, length)),
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn the_header_parser_accepts_any_bytes_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        TransportHeader::decode(&[b"transport.l5d.io/v1\r\n\r\n\0\0\0", &bytes[..]].concat());
        TransportHeader::decode(&bytes);
    }
}

static HELLO: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();

#[test]
fn a_transport_header_is_encoded_as_linkerd_does() {
    let header = TransportHeader {
        port: 8080.try_into().unwrap(),
        name: None,
        protocol: Some(SessionProtocol::Http2),
    };
    let mut bytes = BytesMut::new();
    header.encode(&mut bytes);
    assert_eq!(
        &bytes[..],
        b"transport.l5d.io/v1\r\n\r\n\x00\x00\x00\x07\x08\x90\x3f\x1a\x02\x12\x00"
    );
}

#[test]
fn invalid_transport_headers_are_refused_with_the_reason() {
    let preface = b"transport.l5d.io/v1\r\n\r\n";
    for (bytes, reason) in [
        (
            b"transport.l5d.io/v2\r\n".to_vec(),
            "the bytes do not start with the preface of a transport header",
        ),
        (
            [&preface[..], &[0, 1, 0, 1]].concat(),
            "the transport header has 65537 bytes, at most 65536 are accepted",
        ),
        (
            [&preface[..], &[0, 0, 0, 1, 0xff]].concat(),
            "the transport header cannot be decoded",
        ),
        (
            [&preface[..], &[0, 0, 0, 0]].concat(),
            "the transport header has port 0, expected 1 to 65535",
        ),
    ] {
        match TransportHeader::decode(&bytes) {
            Decoded::Invalid(error) => assert_eq!(error.to_string(), reason),
            other => panic!("{other:?} for {bytes:?}"),
        }
    }
    assert!(matches!(
        TransportHeader::decode(b"GET "),
        Decoded::Invalid(InvalidHeader::Preface)
    ));
}
