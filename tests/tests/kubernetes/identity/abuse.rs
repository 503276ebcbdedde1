//! Malicious or invalid requests: each is refused with its reason, and the next valid request succeeds.

use std::fs;

use jsonwebtoken::{EncodingKey, Header};
use rcgen::{KeyPair, SanType};
use serde_json::Value;
use tonic::Code::{self, FailedPrecondition, Internal, InvalidArgument, OutOfRange};
use tulle_proto::identity::CertifyRequest;

use super::fixture::{AUDIENCE, IdentityFixture, WEB, csr, dns};

const ADMIN: &str = "admin.shop.serviceaccount.identity.linkerd.cluster.local";
const FORGED: &str = "web.linkerd.serviceaccount.identity.linkerd.cluster.local";

#[tokio::test(flavor = "multi_thread")]
async fn invalid_tokens_are_refused() {
    let fixture = IdentityFixture::new().await;
    let good = fixture.valid_request().await;
    let expired = token_with_changed_claims(&fixture, &good.token, |claims| {
        for (claim, seconds) in [("iat", 7200), ("nbf", 7200), ("exp", 3600)] {
            claims[claim] = (claims["iat"].as_i64().unwrap() - seconds).into();
        }
    });
    let early = token_with_changed_claims(&fixture, &good.token, |claims| {
        claims["nbf"] = (claims["nbf"].as_i64().unwrap() + 3600).into();
    });
    let foreign_issuer = token_with_changed_claims(&fixture, &good.token, |claims| {
        claims["iss"] = "https://elsewhere".into()
    });
    let gone = fixture
        .api
        .token("shop", "gone", &[AUDIENCE])
        .await
        .unwrap()
        .into_bytes();
    fixture
        .api
        .kubectl(&["delete", "serviceaccount", "gone", "-n", "shop"])
        .await
        .unwrap();
    let audience = fixture.api.token("shop", "web", &["vault"]).await.unwrap().into_bytes();
    // The payload of one token with the header and signature of another.
    let other = fixture.api.token("linkerd", "web", &[AUDIENCE]).await.unwrap();
    let [mine, theirs] = [std::str::from_utf8(&good.token).unwrap(), &other].map(|token| {
        let parts: Vec<_> = token.split('.').map(str::to_owned).collect();
        <[String; 3]>::try_from(parts).unwrap()
    });
    let forged = [mine[0].as_str(), &theirs[1], &mine[2]].join(".").into_bytes();
    for (token, reason) in [
        (expired, "service account token has expired"),
        (early, "not valid yet"),
        (foreign_issuer, "invalid bearer token"),
        (gone, "serviceaccounts \"gone\" not found"),
        (audience, "token audiences [\"vault\"] is invalid"),
        (forged, "cryptographic primitive"),
        (b"hello".to_vec(), "invalid bearer token"),
        (b"a.b.c".to_vec(), "invalid bearer token"),
        (vec![0xff; 100], "it is not text"),
        (Vec::new(), "has no token"),
    ] {
        let req = CertifyRequest { token, ..good.clone() };
        fixture.assert_refused(req, InvalidArgument, reason).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_valid_for_its_own_identity_only() {
    let fixture = IdentityFixture::new().await;
    let good = fixture.valid_request().await;
    for identity in [
        ADMIN,
        FORGED,
        "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local",
        "example.com",
    ] {
        let req = CertifyRequest {
            identity: identity.to_owned(),
            certificate_signing_request: csr(&[dns(identity)], &KeyPair::generate().unwrap()),
            ..good.clone()
        };
        fixture
            .assert_refused(req, FailedPrecondition, &format!("the token is for {WEB}"))
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signing_request_asks_for_one_name_with_an_ecdsa_key() {
    let fixture = IdentityFixture::new().await;
    let good = fixture.valid_request().await;
    let key = KeyPair::generate().unwrap();
    let uri = SanType::URI("spiffe://root/web".try_into().unwrap());
    let ip = SanType::IpAddress("10.0.0.1".parse().unwrap());
    let email = SanType::Rfc822Name("web@shop".try_into().unwrap());
    let rsa = KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).unwrap();
    let ed25519 = KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let mut broken = csr(&[dns(WEB)], &key);
    *broken.last_mut().unwrap() ^= 1;
    let cases: [(Vec<u8>, Code, &str); 12] = [
        (
            csr(&[dns(WEB), dns(ADMIN)], &key),
            FailedPrecondition,
            "2 subject alternative names",
        ),
        (
            csr(&[dns(WEB), dns(WEB)], &key),
            FailedPrecondition,
            "2 subject alternative names",
        ),
        (csr(&[], &key), FailedPrecondition, "0 subject alternative names"),
        (csr(&[dns(ADMIN)], &key), FailedPrecondition, "asks for the DNS name"),
        (
            csr(&[dns(WEB), uri], &key),
            FailedPrecondition,
            "the URI \"spiffe://root/web\"",
        ),
        (csr(&[ip], &key), FailedPrecondition, "the IP address \"10.0.0.1\""),
        (csr(&[dns(WEB), email], &key), FailedPrecondition, "the email address"),
        (csr(&[dns(WEB)], &rsa), Internal, "expected ECDSA P-256 or P-384"),
        (csr(&[dns(WEB)], &ed25519), Internal, "expected ECDSA P-256 or P-384"),
        (broken, InvalidArgument, "not signed by its own key"),
        (vec![0x30; 1000], InvalidArgument, "cannot be read"),
        (Vec::new(), InvalidArgument, "no certificate signing request"),
    ];
    for (certificate_signing_request, code, reason) in cases {
        let req = CertifyRequest {
            certificate_signing_request,
            ..good.clone()
        };
        fixture.assert_refused(req, code, reason).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_too_large_are_refused_unread() {
    let fixture = IdentityFixture::new().await;
    let good = fixture.valid_request().await;
    for n in [100 * 1024, 5 * 1024 * 1024] {
        for req in [
            CertifyRequest {
                token: vec![b'a'; n],
                ..good.clone()
            },
            CertifyRequest {
                certificate_signing_request: vec![0x30; n],
                ..good.clone()
            },
            CertifyRequest {
                identity: "a".repeat(n),
                ..good.clone()
            },
        ] {
            let status = fixture.certify(req).await.unwrap_err();
            assert_eq!(status.code(), OutOfRange, "{status:?}");
            fixture.certify(good.clone()).await.unwrap();
        }
    }
    // A large request within the limit is checked normally.
    let req = CertifyRequest {
        identity: "a".repeat(60 * 1024),
        ..good.clone()
    };
    fixture
        .assert_refused(req, InvalidArgument, "expected a DNS name")
        .await;
}

/// A token with changed claims, signed with the key of the API server.
fn token_with_changed_claims(fixture: &IdentityFixture, token: &[u8], change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut data = jsonwebtoken::dangerous::insecure_decode::<Value>(token).unwrap();
    change(&mut data.claims);
    let header = Header {
        kid: data.header.kid,
        ..Header::new(data.header.alg)
    };
    let key = fs::read(fixture.api.dir().join("pki/sa.key")).unwrap();
    let key = EncodingKey::from_ec_pem(&key).unwrap();
    jsonwebtoken::encode(&header, &data.claims, &key).unwrap().into_bytes()
}
