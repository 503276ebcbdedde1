//! The intended differences from the objects that Linkerd's service mirror writes.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// An object, a field and the value here; the field is empty if the object exists only here or only in the recording.
pub(super) type FieldDifferences = BTreeSet<(String, String, String)>;

/// Fields of objects that differ, and the reason.
pub(super) struct Difference {
    reason: &'static str,
    /// Indices of the steps after which the fields differ.
    steps: RangeInclusive<usize>,
    /// Objects, with their fields and the values here. A field is empty if the object exists only here or only in the recording.
    objects: &'static [(&'static str, &'static [(&'static str, &'static str)])],
}

/// The differences that are expected after a step.
pub(super) fn expected_after_step(differences: &[Difference], step: usize) -> FieldDifferences {
    let mut expected = FieldDifferences::new();
    for difference in differences.iter().filter(|difference| difference.steps.contains(&step)) {
        for (object, fields) in difference.objects {
            for (field, here) in *fields {
                let [object, field, here] = [*object, *field, *here].map(str::to_owned);
                let is_new = expected.insert((object, field, here));
                assert!(is_new, "listed twice: {}", difference.reason);
            }
        }
    }
    expected
}

/// The differences of Linkerd's versions before edge-26.5.1, such as 2.18, from the recording, which is that of edge-26.8.3.
pub(super) const HEADLESS_OF_OLDER_LINKERD: &[Difference] = &[Difference {
    reason: "the mirrors of pods of Services with the same name in other namespaces are deleted, too",
    steps: 4..=4,
    objects: &[
        ("Endpoints other/db-0-east", &[("", "absent")]),
        (
            "Endpoints other/db-east",
            &[("subsets[0].addresses[0].ip", r#""cluster IP of a deleted Service""#)],
        ),
        ("Service other/db-0-east", &[("", "absent")]),
    ],
}];

pub(super) const MIRRORS: &[Difference] = &[
    Difference {
        reason: "a Service of type ExternalName has no pods that the gateway could reach: it is refused",
        steps: 0..=5,
        objects: &[
            ("Endpoints shop/alias-east", &[("", "absent")]),
            (
                "Link east mirrorServices shop/alias",
                &[
                    ("conditions[0].localRef.group", "absent"),
                    ("conditions[0].localRef.kind", "absent"),
                    ("conditions[0].localRef.name", "absent"),
                    ("conditions[0].localRef.namespace", "absent"),
                    (
                        "conditions[0].message",
                        r#""a Service of type ExternalName cannot be mirrored""#,
                    ),
                    ("conditions[0].reason", r#""InvalidService""#),
                    ("conditions[0].status", r#""False""#),
                ],
            ),
            ("Service shop/alias-east", &[("", "absent")]),
        ],
    },
    Difference {
        reason: "`evil/*` excludes only names that begin with `evil/`",
        steps: 0..=5,
        objects: &[
            ("Endpoints shop/labelled-east", &[("labels.evilcorp/label", r#""1""#)]),
            (
                "Service shop/labelled-east",
                &[
                    ("annotations.evilcorp/note", r#""text""#),
                    ("labels.evilcorp/label", r#""1""#),
                ],
            ),
        ],
    },
    Difference {
        reason: "labels that only mirror controllers write are not copied",
        steps: 0..=5,
        objects: &[
            (
                "Endpoints shop/labelled-east",
                &[("labels.multicluster.linkerd.io/remote-service", "absent")],
            ),
            (
                "Service shop/labelled-east",
                &[("labels.multicluster.linkerd.io/remote-service", "absent")],
            ),
        ],
    },
    Difference {
        reason: "a mirror is not mirrored again",
        steps: 0..=5,
        objects: &[
            ("Endpoints shop/mirror-west-east", &[("", "absent")]),
            ("Link east mirrorServices shop/mirror-west", &[("", "absent")]),
            ("Service shop/mirror-west-east", &[("", "absent")]),
        ],
    },
    Difference {
        reason: "the message names the namespace",
        steps: 0..=0,
        objects: &[(
            "Link east mirrorServices only-east/web",
            &[("conditions[0].message", r#""namespace only-east does not exist here""#)],
        )],
    },
    Difference {
        reason: "the name can never be valid, and the message says why",
        steps: 0..=5,
        objects: &[(
            "Link east mirrorServices shop/a-name-of-sixty-characters-which-is-too-long-for-the-mirrors",
            &[
                (
                    "conditions[0].message",
                    r#""the name a-name-of-sixty-characters-which-is-too-long-for-the-mirrors-east of the mirror has 65 characters; at most 63 are accepted""#,
                ),
                ("conditions[0].reason", r#""InvalidService""#),
            ],
        )],
    },
    Difference {
        reason: "a Service that is in the way of a mirror is reported",
        steps: 0..=5,
        objects: &[("Link east mirrorServices shop/taken", &[("", "exists")])],
    },
    Difference {
        reason: "the configuration that kubectl applied is that of another object",
        steps: 0..=5,
        objects: &[(
            "Service shop/labelled-east",
            &[("annotations.kubectl.kubernetes.io/last-applied-configuration", "absent")],
        )],
    },
    Difference {
        reason: "the protocol of a port is copied, so that the policy of the mirror uses it",
        steps: 0..=5,
        objects: &[("Service shop/web-east", &[("spec.ports[0].appProtocol", r#""http""#)])],
    },
    Difference {
        reason: "the labels of Endpoints follow those of the Service, too",
        steps: 2..=5,
        objects: &[("Endpoints shop/web-east", &[("labels.app", "absent")])],
    },
    Difference {
        reason: "the labels of Endpoints follow those of the Service, too",
        steps: 2..=2,
        objects: &[("Endpoints shop/web-east", &[("labels.tier", r#""front""#)])],
    },
    Difference {
        reason: "a change of the domain or of the exclusions in the Link reaches all mirrors at once",
        steps: 3..=3,
        objects: &[
            (
                "Endpoints shop/direct-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""direct.shop.svc.new.test""#,
                )],
            ),
            (
                "Service shop/both-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""both.shop.svc.new.test""#,
                )],
            ),
            (
                "Service shop/direct-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""direct.shop.svc.new.test""#,
                )],
            ),
        ],
    },
    Difference {
        reason: "a change of the domain or of the exclusions in the Link reaches all mirrors at once",
        steps: 3..=5,
        objects: &[
            (
                "Endpoints shop/empty-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""empty.shop.svc.new.test""#,
                )],
            ),
            (
                "Endpoints shop/headless-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""headless.shop.svc.new.test""#,
                )],
            ),
            (
                "Endpoints shop/labelled-east",
                &[
                    (
                        "annotations.mirror.linkerd.io/remote-svc-fq-name",
                        r#""labelled.shop.svc.new.test""#,
                    ),
                    ("labels.evil/label", r#""1""#),
                    ("labels.secret", r#""1""#),
                ],
            ),
            (
                "Endpoints shop/unready-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""unready.shop.svc.new.test""#,
                )],
            ),
            (
                "Endpoints shop/web-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""web.shop.svc.new.test""#,
                )],
            ),
            (
                "Service shop/empty-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""empty.shop.svc.new.test""#,
                )],
            ),
            (
                "Service shop/headless-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""headless.shop.svc.new.test""#,
                )],
            ),
            (
                "Service shop/labelled-east",
                &[
                    ("annotations.evil/note", r#""text""#),
                    (
                        "annotations.mirror.linkerd.io/remote-svc-fq-name",
                        r#""labelled.shop.svc.new.test""#,
                    ),
                    ("annotations.note", r#""text""#),
                    ("labels.evil/label", r#""1""#),
                    ("labels.secret", r#""1""#),
                ],
            ),
            (
                "Service shop/unnamed-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""unnamed.shop.svc.new.test""#,
                )],
            ),
            (
                "Service shop/unready-east",
                &[(
                    "annotations.mirror.linkerd.io/remote-svc-fq-name",
                    r#""unready.shop.svc.new.test""#,
                )],
            ),
            (
                "Service shop/web-east",
                &[
                    (
                        "annotations.mirror.linkerd.io/remote-svc-fq-name",
                        r#""web.shop.svc.new.test""#,
                    ),
                    ("labels.tier", "absent"),
                ],
            ),
        ],
    },
    Difference {
        reason: "entries of Services that were deleted while no service mirror ran are removed",
        steps: 4..=5,
        objects: &[("Link east mirrorServices shop/both", &[("", "absent")])],
    },
];

pub(super) const HEADLESS: &[Difference] = &[
    Difference {
        reason: "clients connect to the mirrors of pods, which have the ports of the Service",
        steps: 0..=4,
        objects: &[("Endpoints shop/moved-east", &[("subsets[0].ports[0].port", "80")])],
    },
    Difference {
        reason: "the mirror exists, and the status says so",
        steps: 0..=4,
        objects: &[
            (
                "Link east mirrorServices other/db",
                &[
                    ("conditions[0].localRef.group", r#""core""#),
                    ("conditions[0].localRef.kind", r#""Service""#),
                    ("conditions[0].localRef.name", r#""db-east""#),
                    ("conditions[0].localRef.namespace", r#""other""#),
                    ("conditions[0].message", r#""""#),
                    ("conditions[0].reason", r#""Mirrored""#),
                    ("conditions[0].status", r#""True""#),
                ],
            ),
            (
                "Link east mirrorServices shop/moved",
                &[
                    ("conditions[0].localRef.group", r#""core""#),
                    ("conditions[0].localRef.kind", r#""Service""#),
                    ("conditions[0].localRef.name", r#""moved-east""#),
                    ("conditions[0].localRef.namespace", r#""shop""#),
                    ("conditions[0].message", r#""""#),
                    ("conditions[0].reason", r#""Mirrored""#),
                    ("conditions[0].status", r#""True""#),
                ],
            ),
            (
                "Link east mirrorServices shop/nameless",
                &[
                    ("conditions[0].localRef.group", r#""core""#),
                    ("conditions[0].localRef.kind", r#""Service""#),
                    ("conditions[0].localRef.name", r#""nameless-east""#),
                    ("conditions[0].localRef.namespace", r#""shop""#),
                    ("conditions[0].message", r#""""#),
                    ("conditions[0].reason", r#""Mirrored""#),
                    ("conditions[0].status", r#""True""#),
                ],
            ),
        ],
    },
    Difference {
        reason: "the mirror exists, and the status says so",
        steps: 0..=3,
        objects: &[(
            "Link east mirrorServices shop/db",
            &[
                ("conditions[0].localRef.group", r#""core""#),
                ("conditions[0].localRef.kind", r#""Service""#),
                ("conditions[0].localRef.name", r#""db-east""#),
                ("conditions[0].localRef.namespace", r#""shop""#),
                ("conditions[0].message", r#""""#),
                ("conditions[0].reason", r#""Mirrored""#),
                ("conditions[0].status", r#""True""#),
            ],
        )],
    },
    Difference {
        reason: "a headless Service in remote-discovery mode is mirrored, without being headless",
        steps: 0..=4,
        objects: &[
            (
                "Link east mirrorServices shop/direct",
                &[
                    ("conditions[0].localRef.group", r#""core""#),
                    ("conditions[0].localRef.kind", r#""Service""#),
                    ("conditions[0].localRef.name", r#""direct-east""#),
                    ("conditions[0].localRef.namespace", r#""shop""#),
                    ("conditions[0].message", r#""""#),
                    ("conditions[0].reason", r#""Mirrored""#),
                    ("conditions[0].status", r#""True""#),
                ],
            ),
            ("Service shop/direct-east", &[("", "exists")]),
        ],
    },
    Difference {
        reason: "the message says what is wrong",
        steps: 0..=4,
        objects: &[(
            "Link east mirrorServices shop/portless",
            &[("conditions[0].message", r#""the Service has no ports""#)],
        )],
    },
    Difference {
        reason: "the state can change, and the message says what is missing",
        steps: 0..=4,
        objects: &[(
            "Link east mirrorServices shop/waiting",
            &[
                (
                    "conditions[0].message",
                    r#""the headless Service has no pods yet, so it is unknown whether they have host names""#,
                ),
                ("conditions[0].reason", r#""Error""#),
            ],
        )],
    },
];

pub(super) const FEDERATED: &[Difference] = &[
    Difference {
        reason: "the message is another one",
        steps: 0..=6,
        objects: &[(
            "Link east federatedServices shop/headless",
            &[(
                "conditions[0].message",
                r#""a headless Service cannot join a federated Service""#,
            )],
        )],
    },
    Difference {
        reason: "a Service that is in the way of a federated Service is not changed, and it is reported",
        steps: 0..=6,
        objects: &[
            (
                "Link east federatedServices shop/taken",
                &[
                    ("conditions[0].localRef.group", "absent"),
                    ("conditions[0].localRef.kind", "absent"),
                    ("conditions[0].localRef.name", "absent"),
                    ("conditions[0].localRef.namespace", "absent"),
                    (
                        "conditions[0].message",
                        r#""the Service shop/taken-federated exists and is not a federated Service""#,
                    ),
                    ("conditions[0].reason", r#""InvalidService""#),
                    ("conditions[0].status", r#""False""#),
                ],
            ),
            (
                "Service shop/taken-federated",
                &[
                    ("annotations.multicluster.linkerd.io/remote-discovery", "absent"),
                    ("labels.app", r#""taken""#),
                    ("labels.mirror.linkerd.io/mirrored-service", "absent"),
                    ("spec.ports[0].port", "8000"),
                    ("spec.ports[0].targetPort", "8000"),
                ],
            ),
        ],
    },
    Difference {
        reason: "a member that lacks a port has no endpoints for it, and its status says so",
        steps: 1..=1,
        objects: &[(
            "Link east federatedServices shop/web",
            &[(
                "conditions[0].message",
                r#""the Service lacks ports of shop/web-federated, and has no endpoints for them: 9990""#,
            )],
        )],
    },
    Difference {
        reason: "a member that lacks a port has no endpoints for it, and its status says so",
        steps: 2..=2,
        objects: &[
            (
                "Link east federatedServices shop/web",
                &[(
                    "conditions[0].message",
                    r#""the Service lacks ports of shop/web-federated, and has no endpoints for them: 80, 9990""#,
                )],
            ),
            (
                "Link north federatedServices shop/web",
                &[(
                    "conditions[0].message",
                    r#""the Service lacks ports of shop/web-federated, and has no endpoints for them: 80, 9990""#,
                )],
            ),
        ],
    },
    Difference {
        reason: "the next member determines ports and metadata at once, not after ten minutes",
        steps: 3..=4,
        objects: &[(
            "Service shop/web-federated",
            &[
                ("annotations.note", r#""remote""#),
                ("labels.app", r#""east""#),
                ("spec.ports[0].port", "8000"),
                ("spec.ports[0].targetPort", "8080"),
                ("spec.ports[1].name", "absent"),
                ("spec.ports[1].port", "absent"),
                ("spec.ports[1].protocol", "absent"),
                ("spec.ports[1].targetPort", "absent"),
            ],
        )],
    },
    Difference {
        reason: "the next member determines ports and metadata at once, not after ten minutes",
        steps: 3..=3,
        objects: &[("Service shop/web-federated", &[("labels.not-north", r#""1""#)])],
    },
    Difference {
        reason: "the next member determines ports and metadata at once, not after ten minutes",
        steps: 4..=4,
        objects: &[("Service shop/web-federated", &[("labels.not-east", r#""1""#)])],
    },
    Difference {
        reason: "the last entry is removed, too",
        steps: 5..=6,
        objects: &[("Link north federatedServices shop/web", &[("", "absent")])],
    },
    Difference {
        reason: "members that were deleted while no service mirror ran are removed",
        steps: 6..=6,
        objects: &[
            ("Link east federatedServices shop/stale", &[("", "absent")]),
            ("Service shop/stale-federated", &[("", "absent")]),
        ],
    },
];
