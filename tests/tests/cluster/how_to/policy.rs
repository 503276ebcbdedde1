//! `policy.md`, `debug-a-request.md`, and the part of `monitoring.md` on strict policies.

use super::guide::{Guide, ROLLED_OUT};
use super::objects;

const POLICY: &str = "how-to/policy.md";
const DEBUG: &str = "how-to/debug-a-request.md";

/// Follows steps 1 to 4 of `policy.md`, after which every client needs a policy.
pub(super) async fn enforce(guide: &mut Guide) {
    let audit = guide.commands(POLICY, "1. Audit", 0);
    let (begin, logs) = audit
        .split_once("kubectl logs")
        .expect("the block ends with kubectl logs");
    guide.bash(begin).await.unwrap();
    // The first requests may arrive later.
    let edges = guide
        .run_until_output_contains(&format!("kubectl logs{logs}"), "request audited")
        .await;
    assert!(edges.contains("other"), "{edges}");
    guide.wait_for_response("shop/front", "http://web.shop/", 200, "").await;
    guide
        .wait_for_response("plain/stranger", "http://web.shop/", 200, "")
        .await;

    let by_identity = guide.yaml(POLICY, "2. Permit clients by identity", 0);
    guide.apply(&by_identity).await;
    guide
        .run_until_output_contains("tulle authz deploy/web -n shop", "web-from-front")
        .await;
    guide.wait_for_response("shop/front", "http://web.shop/", 200, "").await;
    guide.wait_for_response("shop/other", "http://web.shop/", 200, "").await;

    let balancer = "kubectl get pod -n plain -l app=balancer -o jsonpath='{.items[0].status.podIP}'";
    let balancer = guide.bash(balancer).await.unwrap();
    guide.values.insert("balancer", balancer);
    let by_network = guide.yaml(POLICY, "3. Permit clients by network", 0);
    guide.apply(&by_network).await;
    guide
        .run_until_output_contains("tulle authz deploy/web -n shop", "web-from-balancers")
        .await;

    guide.apply(&by_identity.replace(", accessPolicy: audit", "")).await;
    let deny = "kubectl annotate --overwrite namespace shop config.linkerd.io/default-inbound-policy=deny
                kubectl rollout restart deployment -n shop";
    guide.bash(deny).await.unwrap();
    // Probes of the kubelet stay permitted.
    guide.bash(ROLLED_OUT).await.unwrap();
    guide.wait_for_response("shop/front", "http://web.shop/", 200, "").await;
    guide
        .wait_for_response("plain/balancer", "http://web.shop/", 200, "")
        .await;
    let denied = "l5d-proxy-cause: policy-denied:";
    guide
        .wait_for_response("shop/other", "http://web.shop/", 403, denied)
        .await;
    guide
        .wait_for_response("plain/stranger", "http://web.shop/", 403, "")
        .await;
    // A port that no Server selects.
    guide
        .wait_for_response("shop/other", "http://front.shop/", 403, denied)
        .await;

    // The newest pod: those before the rollout may still be terminating.
    let web = "kubectl get pod -n shop -l app=web --sort-by=.metadata.creationTimestamp \
               -o jsonpath='{.items[-1:].status.podIP}'";
    let metrics = format!("http://{}:4191/metrics", guide.bash(web).await.unwrap());
    guide.wait_for_response("plain/balancer", &metrics, 403, "").await;
    let scrape = guide.yaml("how-to/monitoring.md", "Scraping under a strict policy", 0);
    guide.apply(&scrape).await;
    guide
        .wait_for_response("plain/balancer", &metrics, 200, "process_start_time_seconds")
        .await;
    guide.wait_for_response("plain/stranger", &metrics, 403, "").await;
    guide
        .run_until_output_contains("tulle stat deploy/web -n shop", "rps")
        .await;
}

/// Follows `debug-a-request.md` while the policies refuse the client `other`.
pub(super) async fn debug(guide: &mut Guide) {
    let explained = guide.run(DEBUG, "1. Read the cause of the response", 0).await;
    let titles = explained.matches("policy-denied: No authorization permits this client.");
    assert_eq!(titles.count(), 2, "{explained}");
    assert!(explained.contains("What to do"), "{explained}");
    let found = guide.run(DEBUG, "2. Find failures without the response", 0).await;
    assert!(found.contains("policy-denied") && found.contains("other"), "{found}");
    let compared = guide.run(DEBUG, "3. Compare with the control plane", 0).await;
    assert!(compared.contains("web-from-front"), "{compared}");

    // One port-forward serves all of these commands.
    let mut look = vec!["trap 'kill $(jobs -p)' EXIT".to_owned()];
    look.push(guide.commands(DEBUG, "4. Inspect the proxy", 0));
    // The proxy forgets a destination without requests.
    look.push("kubectl exec -n shop deploy/front -c front -- curl -sSf http://web.shop/".to_owned());
    look.push(guide.commands(DEBUG, "4. Inspect the proxy", 1));
    let pages = ["destinations", "policies", "connections", "certificates"];
    look.extend(pages.map(|page| format!("curl -sSf localhost:4191/debug/{page} >{page}")));
    look.push(guide.commands(DEBUG, "5. Raise the log level", 0));
    look.push("curl -sSf localhost:4191/proxy-log-level".to_owned());
    let seen = guide.bash(&look.join("\n")).await.unwrap();
    assert!(seen.trim_end().ends_with("warn,tulle=debug"), "{seen}");
    assert!(
        guide.read("destinations").contains("web.shop"),
        "{}",
        guide.read("destinations")
    );
    assert!(guide.read("policies").contains("4191"), "{}", guide.read("policies"));
    let certificates = guide.read("certificates");
    assert!(
        certificates.contains("front.shop.serviceaccount.identity.linkerd.cluster.local"),
        "{certificates}"
    );
}

/// Follows steps 5 and 6 of `policy.md`.
pub(super) async fn refine(guide: &mut Guide) {
    let route = guide.yaml(POLICY, "5. Permit per route", 0);
    // The page: "add a route for their path, too, with such a policy".
    let probe = route
        .replace("web-public", "web-probe")
        .replace("anybody", "probe")
        .replace("/headers", "/ready");
    guide.apply(&format!("{probe}---\n{route}")).await;
    guide
        .wait_for_response("shop/other", "http://web.shop/headers", 200, "")
        .await;
    guide
        .wait_for_response("plain/stranger", "http://web.shop/headers", 200, "")
        .await;
    guide
        .wait_for_response("shop/front", "http://web.shop/", 404, "l5d-proxy-cause: no-route")
        .await;
    guide.bash(ROLLED_OUT).await.unwrap();

    let limits = guide.yaml(POLICY, "6. Limit rates, and restrict egress", 0);
    guide.apply(&limits).await;
    let many = "kubectl exec -n shop deploy/front -c front -- curl -si 'http://web.shop/headers?[1-100]'";
    guide
        .run_until_output_contains(many, "l5d-proxy-cause: rate-limited")
        .await;
    guide
        .wait_for_response("shop/front", "http://198.51.100.1/", 403, "l5d-proxy-cause: ")
        .await;
    let accepted = "kubectl get tlsroute api -n shop -o jsonpath='{.status.parents[*].conditions[?(@.type==\"Accepted\")].status}'";
    guide.run_until_output_contains(accepted, "True").await;
}

/// Deletes the objects in the order of the page: Servers, routes and EgressNetworks first, AuthorizationPolicies last.
pub(super) async fn undo(guide: &Guide) {
    let kinds = "servers.policy.linkerd.io,httproutes.policy.linkerd.io,egressnetworks.policy.linkerd.io,\
                 httplocalratelimitpolicies.policy.linkerd.io,tlsroutes.gateway.networking.k8s.io";
    let last = "authorizationpolicies.policy.linkerd.io,networkauthentications.policy.linkerd.io";
    let undo = format!(
        "kubectl delete -n shop --all {kinds}
         kubectl delete -n shop --all {last}
         kubectl annotate namespace shop config.linkerd.io/default-inbound-policy-
         kubectl rollout restart deployment -n shop"
    );
    guide.bash(&undo).await.unwrap();
    guide.bash(ROLLED_OUT).await.unwrap();
    guide
        .wait_for_response("plain/stranger", "http://web.shop/", 200, "")
        .await;
    guide.apply(objects::LOAD).await;
}
