//! Reviews of ServiceProfiles.

use crate::admission::ProfileValidator;
use crate::admission::tests::ExpectedAnswer::{self, Allowed, Denied};
use crate::admission::tests::{assert_answer, review};

const PROFILES: &[(&str, ExpectedAnswer)] = &[
    ("{}", Allowed),
    ("rout: []", Denied("unknown field `rout`")),
    ("opaquePorts: ['80']", Denied("spec.opaquePorts is not read")),
    // Routes.
    ("routes: []", Allowed),
    ("routes: [null]", Denied("invalid type: null")),
    ("routes: [{condition: {method: GET}}]", Denied("missing field `name`")),
    (
        "routes: [{name: '', condition: {method: GET}}]",
        Denied("name is empty"),
    ),
    ("routes: [{name: a}]", Denied("missing field `condition`")),
    // Traffic splits.
    (
        "dstOverrides: [{authority: a.b.svc.cluster.local, weight: 500m}, {authority: c.d, weight: 1}]",
        Allowed,
    ),
    (
        "dstOverrides: [{authority: a, weight: some}]",
        Denied("weight \"some\""),
    ),
];

/// Fields of a route that has a name and a condition.
const PROFILE_ROUTES: &[(&str, ExpectedAnswer)] = &[
    ("isRetryable: true, timeout: 1.5s", Allowed),
    ("isretryable: true", Denied("unknown field `isretryable`")),
    ("isRetryable: 7", Denied("invalid type")),
    ("timeout: ''", Allowed),
    ("timeout: soon", Denied("timeout: \"soon\" is not a duration")),
    ("timeout: '5'", Denied("timeout")),
];

const REQUEST_CONDITIONS: &[(&str, ExpectedAnswer)] = &[
    ("{path: /a}", Denied("unknown field `path`")),
    ("{not: [{method: GET}]}", Denied("invalid")),
    ("{}", Denied("route \"a\": condition sets none of")),
    ("{all: [null]}", Denied("invalid type: null")),
    ("{any: [null]}", Denied("invalid type: null")),
    ("{all: [{any: [{}]}]}", Denied("sets none of")),
    ("{not: {not: {}}}", Denied("sets none of")),
    ("{not: {pathRegex: /a}, method: GET, all: [{method: GET}]}", Allowed),
];

const RESPONSE_CLASSES: &[(&str, ExpectedAnswer)] = &[
    ("null", Denied("invalid type: null")),
    ("{isFailure: true}", Denied("missing field `condition`")),
    ("{condition: {}}", Denied("response condition sets none of")),
    ("{condition: {not: {}}}", Denied("response condition sets none of")),
    (
        "{condition: {any: [{status: {min: 500}}, {not: {status: {max: 499}}}]}, isFailure: true}",
        Allowed,
    ),
    // Statuses.
    ("{condition: {status: {minimum: 1}}}", Denied("unknown field `minimum`")),
    ("{condition: {status: {min: 99}}}", Denied("99 is not in 100-599")),
    ("{condition: {status: {max: 600}}}", Denied("600 is not in 100-599")),
    (
        "{condition: {status: {min: 500, max: 400}}}",
        Denied("ends at 400, before its start 500"),
    ),
    ("{condition: {status: {min: 0, max: 0}}}", Allowed),
    ("{condition: {all: [{status: {min: 1}}]}}", Denied("is not in 100-599")),
];

const RETRY_BUDGETS: &[(&str, ExpectedAnswer)] = &[
    ("retryRatio: 0.2, minRetriesPerSecond: 10, ttl: 10s", Allowed),
    (
        "retryRatio: -0.1, minRetriesPerSecond: 10, ttl: 10s",
        Denied("retryRatio -0.1 is negative"),
    ),
    (
        "retryRatio: 0.2, minRetriesPerSecond: 10",
        Denied("missing field `ttl`"),
    ),
    (
        "retryRatio: 0.2, minRetriesPerSecond: 10, ttl: soon",
        Denied("retryBudget.ttl"),
    ),
];

#[tokio::test]
async fn service_profiles() {
    let row = async |spec: &str, expected: ExpectedAnswer| {
        for version in ["linkerd.io/v1alpha1", "linkerd.io/v1alpha2"] {
            let metadata = "{name: web.shop.svc.cluster.local, namespace: shop}";
            let answer = review(version, "ServiceProfile", metadata, spec, ProfileValidator).await;
            assert_answer(spec, &answer, expected);
        }
    };
    for &(spec, expected) in PROFILES {
        row(spec, expected).await;
    }
    for &(fields, expected) in PROFILE_ROUTES {
        let spec = format!("routes: [{{name: a, condition: {{method: GET}}, {fields}}}]");
        row(&spec, expected).await;
    }
    for &(condition, expected) in REQUEST_CONDITIONS {
        row(&format!("routes: [{{name: a, condition: {condition}}}]"), expected).await;
    }
    for &(class, expected) in RESPONSE_CLASSES {
        let spec = format!("routes: [{{name: a, condition: {{method: GET}}, responseClasses: [{class}]}}]");
        row(&spec, expected).await;
    }
    for &(budget, expected) in RETRY_BUDGETS {
        row(&format!("retryBudget: {{{budget}}}"), expected).await;
    }
    // Names.
    for (name, expected) in [
        ("web.shop.svc.cluster.local", Allowed),
        ("www.example.com", Allowed),
        ("Web", Denied("ServiceProfile \"Web\": metadata.name is not a DNS name")),
        ("a_b", Denied("ServiceProfile \"a_b\"")),
        ("a..b", Denied("metadata.name")),
    ] {
        let metadata = format!("{{name: {name}, namespace: shop}}");
        let answer = review(
            "linkerd.io/v1alpha2",
            "ServiceProfile",
            &metadata,
            "{}",
            ProfileValidator,
        )
        .await;
        assert_answer(name, &answer, expected);
    }
}
