//! Which tokens get a certificate, and where that is reported.

use rcgen::KeyPair;
use tonic::Code;
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::eventually;

use super::fixture::{AUDIENCE, IdentityFixture, Service, WEB, csr, dns};

#[tokio::test(flavor = "multi_thread")]
async fn a_service_account_gets_a_certificate_for_its_token_and_an_event_reports_it() {
    let fixture = IdentityFixture::new().await;
    let answer = fixture.certify(fixture.valid_request().await).await.unwrap();
    assert_eq!(answer.trust_anchors.len(), 1);
    assert_eq!(answer.intermediate_certificates.len(), 1);
    let event = fixture.event("shop", "IssuedLeafCertificate").await;
    let regarding = event.regarding.unwrap();
    assert_eq!(regarding.kind.as_deref(), Some("ServiceAccount"));
    assert_eq!(regarding.name.as_deref(), Some("web"));
    let account = fixture.api.kubectl(&[
        "get",
        "serviceaccount",
        "web",
        "-n",
        "shop",
        "-o",
        "jsonpath={.metadata.uid}",
    ]);
    assert_eq!(regarding.uid, Some(account.await.unwrap()));
    assert_eq!(event.type_.as_deref(), Some("Normal"));
    assert_eq!(event.reporting_controller.as_deref(), Some("linkerd-identity"));
    let note = event.note.unwrap();
    let hash = openssl_sha256(&answer.leaf_certificate).await;
    assert!(
        note.contains(WEB) && note.contains(&hash) && note.contains("until 20"),
        "{note}"
    );
    let described = fixture
        .api
        .kubectl(&["describe", "serviceaccount", "web", "-n", "shop"])
        .await
        .unwrap();
    assert!(described.contains("IssuedLeafCertificate"), "{described}");
}

/// Pods without a projected token have one for the API server.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_for_the_api_server_is_accepted_and_one_for_another_audience_is_not() {
    let fixture = IdentityFixture::new().await;
    let mut req = fixture.valid_request().await;
    req.token = fixture.api.token("shop", "web", &[]).await.unwrap().into_bytes();
    fixture.certify(req.clone()).await.unwrap();
    req.token = fixture.api.token("shop", "web", &["vault"]).await.unwrap().into_bytes();
    fixture
        .assert_refused(req.clone(), Code::InvalidArgument, "token audiences")
        .await;
    req.token = fixture
        .api
        .token("shop", "web", &["vault", AUDIENCE])
        .await
        .unwrap()
        .into_bytes();
    fixture.certify(req).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_review_tokens_the_service_is_not_ready_and_names_the_missing_rule() {
    let mut fixture = IdentityFixture::new().await;
    let stranger = fixture
        .api
        .service_account_kubeconfig("shop", "stranger")
        .await
        .unwrap();
    fixture.replace(Service::start(&fixture.mounts, &stranger).await.unwrap());
    let rule = "apiGroups: [authentication.k8s.io], resources: [tokenreviews], verbs: [create]";
    eventually("the reason", async || {
        let (status, text) = fixture.admin("/ready").await;
        (status == 500 && text.contains("may not review tokens") && text.contains(rule)).then_some(())
    })
    .await;
    let args = [
        "create",
        "clusterrolebinding",
        "stranger",
        "--clusterrole=system:auth-delegator",
    ];
    let account = "--serviceaccount=shop:stranger";
    fixture.api.kubectl(&[&args[..], &[account]].concat()).await.unwrap();
    fixture.wait_until_ready().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_review_tokens_requests_fail_and_the_service_keeps_running() {
    let fixture = IdentityFixture::new().await;
    let req = fixture.valid_request().await;
    let IdentityFixture { api, .. } = &fixture;
    let other = ApiServer::start().await.unwrap();
    // A token of another cluster is reviewed and refused.
    other.create_namespace("shop").await.unwrap();
    let foreign = other.token("shop", "web", &[AUDIENCE]).await.unwrap().into_bytes();
    fixture
        .assert_refused(
            tulle_proto::identity::CertifyRequest {
                token: foreign,
                ..req.clone()
            },
            Code::InvalidArgument,
            "invalid bearer token",
        )
        .await;
    api.kubectl(&["delete", "clusterrolebinding", "identity"])
        .await
        .unwrap();
    eventually("reviews are forbidden", async || {
        let status = fixture.certify(req.clone()).await.err()?;
        (status.code() == Code::Internal && status.message().contains("forbidden")).then_some(())
    })
    .await;
    assert_eq!(fixture.admin("/ready").await.0, 200);
    let key = KeyPair::generate().unwrap();
    let mut two = req.clone();
    two.certificate_signing_request = csr(&[dns(WEB), dns("b.c")], &key);
    let status = fixture.certify(two).await.unwrap_err();
    assert_eq!(
        status.code(),
        Code::FailedPrecondition,
        "the signing request is checked before the token is reviewed: {status}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn once_the_api_server_is_gone_requests_fail_as_internal_and_the_service_keeps_running() {
    let mut fixture = IdentityFixture::new().await;
    let req = fixture.valid_request().await;
    let other = ApiServer::start().await.unwrap();
    fixture.restart_with(&other).await;
    drop(other);
    let status = fixture.certify(req).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal, "{status}");
    assert!(status.message().contains("the token could not be reviewed"), "{status}");
    assert_eq!(fixture.admin("/ready").await.0, 200);
}

async fn openssl_sha256(bytes: &[u8]) -> String {
    use std::process::Stdio;
    use tokio::io::AsyncWriteExt as _;
    let mut child = tokio::process::Command::new("openssl")
        .args(["dgst", "-sha256", "-r"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(bytes).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    String::from_utf8(output.stdout)
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .to_owned()
}
