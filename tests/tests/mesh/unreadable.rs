//! An outbound policy that a proxy cannot decode has no effect if an earlier one was valid, and is reported.

use tulle_proto::destination::TlsIdentity;
use tulle_proto::outbound::Backend;
use tulle_tests::apps;
use tulle_tests::eventually::eventually;
use tulle_tests::fake_policy_service::FakePolicyService;
use tulle_tests::mesh::{HTTP, Mesh};

use crate::scripted_policies::{
    ORIG_DST, destination_status, endpoint, forward, http1, rule, run_with_policies, wait_for_response,
};

#[test]
fn an_update_that_cannot_be_read_leaves_the_last_good_policy_in_force() {
    run_with_policies(async |mesh: &Mesh, policies: &FakePolicyService| {
        apps::start_echo(mesh, "legacy").await;
        let legacy = || endpoint((mesh.ip("legacy"), HTTP).into());
        let queueless = || {
            http1(rule(Backend {
                queue: None,
                ..forward(legacy())
            }))
        };
        let wait_until_counted = async |n: f64| {
            let kind = ["kind=\"outbound_policy\""];
            eventually("the invalid update is counted", async || {
                (mesh.metric("client", "tulle_unreadable_updates_total", &kind).await >= n).then_some(())
            })
            .await;
        };
        policies.set_destination_policy(Ok(queueless()));
        wait_for_response(
            mesh,
            "requests are refused without an earlier valid policy",
            (500, "invalid-policy"),
        )
        .await;
        wait_until_counted(1.0).await;

        policies.set_destination_policy(Ok(http1(rule(forward(legacy())))));
        wait_for_response(mesh, "good", (200, "")).await;
        assert_eq!(
            destination_status(mesh, ORIG_DST).await["policy_error"],
            serde_json::Value::Null
        );

        policies.set_destination_policy(Ok(queueless()));
        wait_until_counted(2.0).await;
        for _ in 0..10 {
            assert_eq!(mesh.get("client", ORIG_DST, "/").await.text(), "legacy\n");
        }
        let error = destination_status(mesh, ORIG_DST).await["policy_error"].clone();
        assert!(error.as_str().is_some_and(|error| error.contains("queue")), "{error}");

        // An endpoint with an unsupported identity is not reached in plaintext.
        let mut unsupported = legacy();
        unsupported.tls_identity = Some(TlsIdentity::default());
        policies.set_destination_policy(Ok(http1(rule(forward(unsupported)))));
        wait_until_counted(3.0).await;
        assert_eq!(mesh.get("client", ORIG_DST, "/").await.text(), "legacy\n");
        let error = destination_status(mesh, ORIG_DST).await["policy_error"].clone();
        assert!(
            error.as_str().is_some_and(|error| error.contains("identity")),
            "{error}"
        );
    });
}
