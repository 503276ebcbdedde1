//! The issuer's Secret and the ConfigMap of trust anchors, replaced as kubelets do.

use std::time::Duration;

use tonic::Code;
use tulle_control::trust;
use tulle_tests::eventually::eventually;

use super::fixture::IdentityFixture;

#[tokio::test(flavor = "multi_thread")]
async fn a_new_issuer_signs_when_its_secret_is_mounted_unless_it_is_invalid() {
    for names in [["crt.pem", "key.pem"], ["tls.crt", "tls.key"]] {
        let fixture = IdentityFixture::with_file_names(names).await;
        let [certificate, key] = names;
        let first = signing_issuer(&fixture).await;
        let second = trust::create_issuer("second", trust::ISSUER_LIFETIME, &fixture.anchor).unwrap();
        let files = [
            (certificate, second.certificate.as_str()),
            (key, &second.key),
            // cert-manager adds this key to the Secret.
            ("ca.crt", &fixture.anchor.certificate),
        ];
        fixture.mounts.swap("issuer", &files);
        eventually("the second issuer signs", async || {
            (signing_issuer(&fixture).await != first).then_some(())
        })
        .await;
        let event = fixture.event("linkerd", "IssuerUpdated").await;
        let regarding = event.regarding.unwrap();
        assert_eq!(
            (regarding.kind.as_deref(), regarding.name.as_deref()),
            (Some("Deployment"), Some("linkerd-identity"))
        );
        assert_eq!(event.type_.as_deref(), Some("Normal"));

        // An issuer that no trust anchor has signed.
        let foreign = trust::create_anchor("foreign", trust::ANCHOR_LIFETIME).unwrap();
        let third = trust::create_issuer("third", trust::ISSUER_LIFETIME, &foreign).unwrap();
        let before = signing_issuer(&fixture).await;
        fixture
            .mounts
            .swap("issuer", &[(certificate, &third.certificate), (key, &third.key)]);
        let event = fixture.event("linkerd", "IssuerUpdateSkipped").await;
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        let note = event.note.unwrap();
        assert!(note.contains("is not verified by the trust anchors"), "{note}");
        assert_eq!(signing_issuer(&fixture).await, before, "the old issuer is still in use");

        // The ConfigMap is read again when it changes, and then contains the anchor of that issuer.
        let both = [fixture.anchor.certificate.as_str(), &foreign.certificate].concat();
        fixture.mounts.swap("trust-roots", &[("ca-bundle.crt", &both)]);
        eventually("the third issuer signs, and both anchors are published", async || {
            let answer = fixture.certify(fixture.valid_request().await).await.ok()?;
            (answer.intermediate_certificates[0] != before && answer.trust_anchors.len() == 2).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_issuer_that_expires_signs_nothing_and_is_reported_until_it_is_replaced() {
    let fixture = IdentityFixture::new().await;
    let short = trust::create_issuer("short", Duration::from_secs(5), &fixture.anchor).unwrap();
    fixture
        .mounts
        .swap("issuer", &[("crt.pem", &short.certificate), ("key.pem", &short.key)]);
    // A new connection would get an expired certificate, because the service's own is signed by this issuer too.
    let channel = fixture.connect().await.unwrap();
    let status = eventually("the issuer has expired", async || {
        IdentityFixture::certify_over(channel.clone(), fixture.valid_request().await)
            .await
            .err()
    })
    .await;
    assert_eq!(status.code(), Code::Unknown, "{status:?}");
    assert!(status.message().contains("xpired"), "{status:?}");
    let event = fixture.event("linkerd", "IssuerValidationFailed").await;
    assert_eq!(event.type_.as_deref(), Some("Warning"));
    let ttl = fixture.admin("/metrics").await.1;
    let ttl = ttl
        .lines()
        .find_map(|line| line.strip_prefix("issuer_cert_ttl_seconds "))
        .unwrap();
    assert!(ttl.parse::<f64>().unwrap() <= 0.0, "{ttl}");

    let issuer = trust::create_issuer("issuer", trust::ISSUER_LIFETIME, &fixture.anchor).unwrap();
    fixture
        .mounts
        .swap("issuer", &[("crt.pem", &issuer.certificate), ("key.pem", &issuer.key)]);
    eventually("the new issuer signs", async || {
        fixture.certify(fixture.valid_request().await).await.ok()
    })
    .await;
}

/// The certificate of the issuer that signs certificates now.
async fn signing_issuer(fixture: &IdentityFixture) -> Vec<u8> {
    let answer = fixture.certify(fixture.valid_request().await).await.unwrap();
    answer.intermediate_certificates[0].clone()
}
