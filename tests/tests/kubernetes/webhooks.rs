//! Webhooks as an API server calls them: reviews of objects, and certificates that are repaired automatically.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tulle_control::admission::{PolicyValidator, ProfileValidator};
use tulle_control::webhook::certificate_controller::{CertificateController, Config, UnreadyWhenUntrusted};
use tulle_control::webhook::rotation::RotationTimes;
use tulle_control::webhook::server_credentials::ServerCredentials;
use tulle_control::webhook::{ReviewHandler, SharedResources, WebhookServer};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Readiness;
use tulle_tests::cluster::ApiServer;
use tulle_tests::eventually::{eventually, within};

const POLICIES: &str = "linkerd-policy-validator-webhook-config";
const PROFILES: &str = "linkerd-sp-validator-webhook-config";
const SECRET: &str = "linkerd-policy-validator-k8s-tls";

/// An API server with our webhooks.
struct WebhookFixture {
    server: ApiServer,
    signal: Option<drain::Signal>,
    drain: drain::Watch,
    registry: Registry,
    tasks: JoinSet<()>,
    readiness: Readiness,
}

impl WebhookFixture {
    async fn start(times: RotationTimes) -> Self {
        let server = ApiServer::start().await.unwrap();
        for namespace in ["linkerd", "shop"] {
            server.create_namespace(namespace).await.unwrap();
        }
        for (group, kind, plural, versions) in KINDS {
            define(&server, group, kind, plural, versions).await;
        }
        let (signal, drain) = drain::channel();
        let mut fixture = Self {
            server,
            signal: Some(signal),
            drain,
            registry: Registry::new(),
            tasks: JoinSet::new(),
            readiness: Readiness::new(),
        };
        let config = Config {
            server_name: "localhost".to_owned(),
            times,
            ..Config::policy_validator("linkerd".to_owned())
        };
        let port = fixture.serve(PolicyValidator, config).await;
        let groups = ["policy.linkerd.io", "gateway.networking.k8s.io"];
        fixture.register(POLICIES, &groups, port).await;
        let config = Config {
            server_name: "localhost".to_owned(),
            times,
            ..Config::sp_validator("linkerd".to_owned())
        };
        let port = fixture.serve(ProfileValidator, config).await;
        fixture.register(PROFILES, &["linkerd.io"], port).await;
        eventually("the certificates are ready", async || {
            fixture.readiness.is_ready().then_some(())
        })
        .await;
        // The API server reads configurations from its cache, and calls no webhook until they are there.
        for (api_version, kind) in [
            ("policy.linkerd.io/v1beta3", "Server"),
            ("linkerd.io/v1alpha2", "ServiceProfile"),
        ] {
            let bad = object(api_version, kind, json!({"name": "probe"}), json!({"nonsense": 1}));
            eventually("the webhook refuses an object", async || {
                let refused = fixture.create(&bad).await.err();
                if refused.is_none() {
                    fixture.delete(&bad).await;
                }
                refused
            })
            .await;
        }
        fixture
    }

    async fn serve(&mut self, handler: impl ReviewHandler, config: Config) -> u16 {
        let creds = Arc::new(ServerCredentials::new());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = SharedResources::new(None, &self.registry);
        let webhook = WebhookServer::new(config.service, creds.clone(), handler, shared);
        self.tasks.spawn(webhook.serve(listener, self.drain.clone()));
        let latch = self.readiness.latch(config.service);
        let controller = CertificateController::new(self.server.client(), config, creds);
        self.tasks.spawn(controller.run(latch, self.drain.clone()));
        port
    }

    /// A webhook configuration as the chart writes it, without a CA bundle.
    async fn register(&self, name: &str, groups: &[&str], port: u16) {
        let rules: Vec<_> = groups
            .iter()
            .map(|group| {
                json!({"operations": ["CREATE", "UPDATE"], "apiGroups": [group], "apiVersions": ["*"], "resources": ["*"]})
            })
            .collect();
        let configuration = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": name},
            "webhooks": [{
                "name": name.replace("-webhook-config", ".linkerd.io"),
                "clientConfig": {"url": format!("https://localhost:{port}/")},
                "failurePolicy": "Fail",
                "admissionReviewVersions": ["v1", "v1beta1"],
                "sideEffects": "None",
                "rules": rules,
            }],
        });
        let configuration = serde_json::from_value(configuration).unwrap();
        self.configurations()
            .create(&PostParams::default(), &configuration)
            .await
            .unwrap();
    }

    fn configurations(&self) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", "ValidatingWebhookConfiguration");
        Api::all_with(self.server.client(), &ApiResource::from_gvk(&kind))
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.server.client(), "linkerd")
    }

    fn api(&self, object: &DynamicObject) -> Api<DynamicObject> {
        let types = object.types.as_ref().unwrap();
        let (group, version) = types.api_version.split_once('/').unwrap();
        let plural = KINDS
            .iter()
            .find(|(in_group, kind, ..)| (*in_group, *kind) == (group, &types.kind))
            .unwrap()
            .2;
        let kind = GroupVersionKind::gvk(group, version, &types.kind);
        Api::namespaced_with(
            self.server.client(),
            "shop",
            &ApiResource::from_gvk_with_plural(&kind, plural),
        )
    }

    /// Creates an object; the error is the reason of the API server.
    async fn create(&self, object: &DynamicObject) -> Result<(), String> {
        match self.api(object).create(&PostParams::default(), object).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) => Err(status.message),
            Err(err) => panic!("{err}"),
        }
    }

    async fn delete(&self, object: &DynamicObject) {
        let name = object.metadata.name.as_deref().unwrap();
        self.api(object).delete(name, &DeleteParams::default()).await.unwrap();
    }

    async fn data(&self, key: &str) -> Option<String> {
        let secret = self.secrets().get_opt(SECRET).await.unwrap()?;
        let bytes = secret.data?.remove(key)?;
        Some(String::from_utf8(bytes.0).unwrap())
    }

    async fn bundle(&self) -> Value {
        let configuration = self.configurations().get(POLICIES).await.unwrap();
        configuration
            .data
            .pointer("/webhooks/0/clientConfig/caBundle")
            .cloned()
            .unwrap_or_default()
    }

    async fn end(mut self) {
        let ended = async {
            self.signal.take().unwrap().drain().await;
            self.tasks.join_all().await;
        };
        within("the webhook server has ended", ended).await;
    }
}

const KINDS: &[(&str, &str, &str, &[&str])] = &[
    ("policy.linkerd.io", "Server", "servers", &["v1beta3"]),
    ("policy.linkerd.io", "HTTPRoute", "httproutes", &["v1beta3"]),
    ("policy.linkerd.io", "EgressNetwork", "egressnetworks", &["v1alpha1"]),
    ("policy.linkerd.io", "Other", "others", &["v1"]),
    ("gateway.networking.k8s.io", "HTTPRoute", "httproutes", &["v1"]),
    ("gateway.networking.k8s.io", "TCPRoute", "tcproutes", &["v1alpha2"]),
    ("linkerd.io", "ServiceProfile", "serviceprofiles", &["v1alpha2"]),
];

/// Defines a kind without a schema, so that only the webhooks refuse its objects.
async fn define(server: &ApiServer, group: &str, kind: &str, plural: &str, versions: &[&str]) {
    let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let versions: Vec<_> = versions
        .iter()
        .map(|name| json!({"name": name, "served": true, "storage": true, "schema": schema}))
        .collect();
    let mut definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{group}")},
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": plural},
            "scope": "Namespaced",
            "versions": versions,
        },
    });
    if group.ends_with("k8s.io") {
        definition["metadata"]["annotations"] = json!({"api-approved.kubernetes.io": "unapproved, a test"});
    }
    let definitions = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
    let definitions = Api::<DynamicObject>::all_with(server.client(), &ApiResource::from_gvk(&definitions));
    let definition = serde_json::from_value(definition).unwrap();
    definitions.create(&PostParams::default(), &definition).await.unwrap();
    let name = format!("{plural}.{group}");
    eventually("the kind is served", async || {
        let found = definitions.get(&name).await.unwrap();
        let conditions = found.data.pointer("/status/conditions").cloned().unwrap_or_default();
        let is_established = |condition: &Value| condition["type"] == "Established" && condition["status"] == "True";
        conditions
            .as_array()
            .is_some_and(|all| all.iter().any(is_established))
            .then_some(())
    })
    .await;
}

fn object(api_version: &str, kind: &str, metadata: Value, spec: Value) -> DynamicObject {
    let mut object = json!({"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec});
    object["metadata"]["namespace"] = json!("shop");
    serde_json::from_value(object).unwrap()
}

fn server_named(name: &str) -> DynamicObject {
    object(
        "policy.linkerd.io/v1beta3",
        "Server",
        json!({"name": name}),
        json!({"podSelector": {}, "port": 80}),
    )
}

/// API version, kind, `spec`, and the result of the review: an error is the reason for the refusal.
type Review = (&'static str, &'static str, Value, Result<(), &'static str>);

fn reviews() -> [Review; 12] {
    let parent = |kind: &str| json!([{"group": "policy.linkerd.io", "kind": kind, "name": "x"}]);
    let deep = (0..500).fold(json!({}), |inner, _| json!({"all": [inner]}));
    [
        (
            "policy.linkerd.io/v1beta3",
            "Server",
            json!({"podSelector": {}, "port": 80}),
            Ok(()),
        ),
        (
            "policy.linkerd.io/v1beta3",
            "Server",
            json!({"podSelector": {}, "port": 80, "accessPolicy": "some"}),
            Err("\"some\" is not an access policy"),
        ),
        (
            "policy.linkerd.io/v1alpha1",
            "EgressNetwork",
            json!({"trafficPolicy": "Deny", "networks": []}),
            Err("spec.networks is empty"),
        ),
        (
            "policy.linkerd.io/v1beta3",
            "HTTPRoute",
            json!({"parentRefs": parent("EgressNetwork")}),
            Err("needs a port"),
        ),
        (
            "gateway.networking.k8s.io/v1",
            "HTTPRoute",
            json!({"parentRefs": parent("Server")}),
            Ok(()),
        ),
        // This route has no parent in the mesh, so it is not read.
        ("gateway.networking.k8s.io/v1", "HTTPRoute", json!({"rules": 7}), Ok(())),
        (
            "gateway.networking.k8s.io/v1",
            "HTTPRoute",
            json!({"parentRefs": parent("Server"), "rules": 7}),
            Err("the mesh cannot read this HTTPRoute"),
        ),
        (
            "gateway.networking.k8s.io/v1alpha2",
            "TCPRoute",
            json!({"parentRefs": [{"group": "policy.linkerd.io", "kind": "EgressNetwork", "name": "x", "port": 80}], "rules": []}),
            Err("exactly one is accepted"),
        ),
        (
            "policy.linkerd.io/v1",
            "Other",
            json!({}),
            Err("unsupported resource type: policy.linkerd.io.v1.Other"),
        ),
        ("linkerd.io/v1alpha2", "ServiceProfile", json!({"routes": []}), Ok(())),
        (
            "linkerd.io/v1alpha2",
            "ServiceProfile",
            json!({"routes": [{"name": "a", "condition": {}}]}),
            Err("condition sets none of"),
        ),
        (
            "linkerd.io/v1alpha2",
            "ServiceProfile",
            json!({"routes": [{"name": "a", "condition": deep}]}),
            Err("recursion limit"),
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn valid_objects_are_stored_and_others_are_refused_with_a_reason() {
    let fixture = WebhookFixture::start(RotationTimes::default()).await;
    for (i, (api_version, kind, spec, expected)) in reviews().into_iter().enumerate() {
        let object = object(api_version, kind, json!({"name": format!("row-{i}")}), spec.clone());
        let found = fixture.create(&object).await;
        match (&found, expected) {
            (Ok(()), Ok(())) => {}
            (Err(found), Err(expected)) if found.contains("denied the request") && found.contains(expected) => {}
            _ => panic!("{kind} {spec}: {found:?}"),
        }
    }
    // Existing objects are checked when they change.
    let patch = json!({"spec": {"proxyProtocol": "HTTP/9"}});
    let servers = fixture.api(&server_named("row-0"));
    let refused = servers
        .patch("row-0", &PatchParams::default(), &Patch::Merge(patch))
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("unknown variant `HTTP/9`"), "{refused}");
    let page = fixture.registry.render();
    assert!(
        page.contains(r#"http_server_requests_total{code="200",method="post"}"#),
        "{page}"
    );
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_supplied_certificate_makes_the_webhook_ready_once_the_ca_bundle_contains_its_ca() {
    let server = ApiServer::start().await.unwrap();
    server.create_namespace("linkerd").await.unwrap();
    let (signal, drain) = drain::channel();
    let mut fixture = WebhookFixture {
        server,
        signal: Some(signal),
        drain,
        registry: Registry::new(),
        tasks: JoinSet::new(),
        readiness: Readiness::new(),
    };
    let [(ca, signer), (other, _)] = [(); 2].map(|()| {
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        (certificate, rcgen::Issuer::new(params, key))
    });
    let key = rcgen::KeyPair::generate().unwrap();
    let leaf = rcgen::CertificateParams::new(["localhost".to_owned()])
        .unwrap()
        .signed_by(&key, &signer)
        .unwrap();
    let [pem, key] = [leaf.pem(), key.serialize_pem()].map(|text| ByteString(text.into_bytes()));
    let supplied = json!({"metadata": {"name": SECRET}, "data": {"tls.crt": pem, "tls.key": key}});
    let supplied = serde_json::from_value(supplied).unwrap();
    fixture
        .secrets()
        .create(&PostParams::default(), &supplied)
        .await
        .unwrap();
    fixture.register(POLICIES, &["policy.linkerd.io"], 1).await;
    let config = Config {
        server_name: "localhost".to_owned(),
        unready_when_untrusted: UnreadyWhenUntrusted::Always,
        ..Config::policy_validator("linkerd".to_owned())
    };
    fixture.serve(PolicyValidator, config).await;
    let publish = async |bundle: &rcgen::Certificate| {
        let bundle = json!(ByteString(bundle.pem().into_bytes()));
        let name = POLICIES.replace("-webhook-config", ".linkerd.io");
        let patch = json!({"webhooks": [{"name": name, "clientConfig": {"caBundle": bundle}}]});
        fixture
            .configurations()
            .patch(POLICIES, &PatchParams::default(), &Patch::Strategic(patch))
            .await
            .unwrap();
    };
    let wait_for_reason = |part: &'static str| {
        let readiness = &fixture.readiness;
        eventually(part, async move || {
            readiness
                .reasons()
                .iter()
                .any(|reason| reason.contains(part))
                .then_some(())
        })
    };
    wait_for_reason("has no CA bundle").await;
    publish(&other).await;
    wait_for_reason("is not verified by the CA bundle of linkerd-policy-validator-webhook-config").await;
    publish(&ca).await;
    let refused_metric_is = |n: u8| {
        let line = format!("webhook_certificate_refused{{webhook=\"linkerd-policy-validator\"}} {n}\n");
        fixture.registry.render().contains(&line)
    };
    // The error is reported again when it recurs.
    for _ in 0..2 {
        eventually("readiness", async || fixture.readiness.is_ready().then_some(())).await;
        assert!(refused_metric_is(0));
        publish(&other).await;
        wait_for_reason("is not verified by the CA bundle of linkerd-policy-validator-webhook-config").await;
        assert!(refused_metric_is(1));
        publish(&ca).await;
    }
    eventually("readiness", async || fixture.readiness.is_ready().then_some(())).await;
    // The certificate and the bundle are used unchanged.
    assert_eq!(fixture.data("tls.crt").await, Some(leaf.pem()));
    assert_eq!(fixture.bundle().await, json!(ByteString(ca.pem().into_bytes())));
    fixture.end().await;
}

/// Creates and deletes an object repeatedly, and counts the failed reviews.
fn load(fixture: &Arc<WebhookFixture>) -> (JoinHandle<(usize, Vec<String>)>, drain::Signal) {
    let (signal, end) = drain::channel();
    let fixture = fixture.clone();
    let running = tokio::spawn(async move {
        let (mut n, mut failed) = (0, Vec::new());
        let object = server_named("load");
        while !end.is_signaled() {
            n += 1;
            match fixture.create(&object).await {
                Ok(()) => fixture.delete(&object).await,
                Err(reason) => failed.push(reason),
            }
        }
        (n, failed)
    });
    (running, signal)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_or_broken_certificate_is_repaired_and_a_replaced_one_adopted_while_reviews_continue() {
    let fixture = Arc::new(WebhookFixture::start(RotationTimes::default()).await);
    let (running, signal) = load(&fixture);
    let (certificate, bundle) = (fixture.data("tls.crt").await.unwrap(), fixture.bundle().await);
    let secret = fixture.secrets().get(SECRET).await.unwrap();
    assert_eq!(secret.type_.as_deref(), Some("kubernetes.io/tls"));
    assert_eq!(secret.metadata.owner_references.unwrap()[0].name, POLICIES);

    fixture
        .secrets()
        .delete(SECRET, &DeleteParams::default())
        .await
        .unwrap();
    eventually("the certificate is restored", async || {
        (fixture.data("tls.crt").await.as_ref() == Some(&certificate)).then_some(())
    })
    .await;
    let broken = json!({"data": {"tls.crt": ByteString(b"nonsense".to_vec())}});
    fixture
        .secrets()
        .patch(SECRET, &PatchParams::default(), &Patch::Merge(broken))
        .await
        .unwrap();
    eventually("the certificate is repaired", async || {
        (fixture.data("tls.crt").await.as_ref() == Some(&certificate)).then_some(())
    })
    .await;

    // A different certificate for the name is adopted: first the bundle contains it, then the webhook presents it.
    let key = rcgen::KeyPair::generate().unwrap();
    let other = rcgen::CertificateParams::new(["localhost".to_owned()])
        .unwrap()
        .self_signed(&key)
        .unwrap();
    let [pem, key] = [other.pem(), key.serialize_pem()].map(|text| ByteString(text.into_bytes()));
    let replaced = json!({"data": {"tls.crt": pem, "tls.key": key}});
    fixture
        .secrets()
        .patch(SECRET, &PatchParams::default(), &Patch::Merge(replaced))
        .await
        .unwrap();
    eventually("the bundle contains both certificates", async || {
        let listed = fixture.data("ca.crt").await?;
        (listed.contains(other.pem().trim()) && listed.contains(certificate.trim()) && fixture.bundle().await != bundle)
            .then_some(())
    })
    .await;
    signal.drain().await;
    let (n, failed) = within("the load has ended", running).await.unwrap();
    assert!(n > 1 && failed.is_empty(), "{} of {n} failed: {failed:?}", failed.len());

    // A broken bundle fails reviews until it is repaired.
    let listed = fixture.bundle().await;
    let foreign = json!(ByteString(other.pem().into_bytes()));
    let name = POLICIES.replace("-webhook-config", ".linkerd.io");
    let patch = json!({"webhooks": [{"name": name, "clientConfig": {"caBundle": foreign}}]});
    let params = PatchParams::default();
    fixture
        .configurations()
        .patch(POLICIES, &params, &Patch::Strategic(patch))
        .await
        .unwrap();
    eventually("the bundle is repaired", async || {
        (fixture.bundle().await == listed).then_some(())
    })
    .await;
    eventually("a review succeeds again", async || {
        fixture.create(&server_named("after")).await.ok()
    })
    .await;
    Arc::into_inner(fixture).unwrap().end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_before_they_expire_and_no_review_fails() {
    // The lifetime is so short that the allowance for clock skew is most of it, so a renewal is due immediately.
    let times = RotationTimes {
        lifetime: Duration::from_secs(60),
        settle_time: Duration::from_secs(1),
    };
    let fixture = Arc::new(WebhookFixture::start(times).await);
    let (running, signal) = load(&fixture);
    let mut current = fixture.data("tls.crt").await;
    for _ in 0..3 {
        current = Some(
            eventually("the certificate is renewed", async || {
                fixture
                    .data("tls.crt")
                    .await
                    .filter(|now| Some(now) != current.as_ref())
            })
            .await,
        );
    }
    signal.drain().await;
    let (n, failed) = within("the load has ended", running).await.unwrap();
    assert!(n > 1 && failed.is_empty(), "{} of {n} failed: {failed:?}", failed.len());
    Arc::into_inner(fixture).unwrap().end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_share_a_certificate_and_do_not_change_an_external_one() {
    let mut fixture = WebhookFixture::start(RotationTimes::default()).await;
    let certificate = fixture.data("tls.crt").await.unwrap();
    let replica = |namespace: &str| Config {
        server_name: "localhost".to_owned(),
        ..Config::policy_validator(namespace.to_owned())
    };
    fixture.serve(PolicyValidator, replica("linkerd")).await;
    eventually("the second replica is ready", async || {
        fixture.readiness.is_ready().then_some(())
    })
    .await;
    assert_eq!(fixture.data("tls.crt").await, Some(certificate));

    // Without the configuration no API server calls the webhook, so no replica writes the Secret.
    let version = fixture.secrets().get(SECRET).await.unwrap().metadata.resource_version;
    fixture
        .configurations()
        .delete(POLICIES, &DeleteParams::default())
        .await
        .unwrap();
    let supplied = Secret {
        metadata: kube::api::ObjectMeta {
            name: Some(SECRET.to_owned()),
            ..Default::default()
        },
        ..Secret::default()
    };
    // A replica that has read the configuration before can still write the Secret once.
    let supplied = eventually("the supplied Secret replaces that of the control plane", async || {
        fixture
            .secrets()
            .delete(SECRET, &DeleteParams::default())
            .await
            .unwrap();
        fixture.secrets().create(&PostParams::default(), &supplied).await.ok()
    })
    .await;
    fixture.register(POLICIES, &["policy.linkerd.io"], 1).await;
    // Both controllers check at the same interval. So when the sp-validator's controller has restored its Secret, the policy
    // validator's has checked, too.
    fixture
        .secrets()
        .delete("linkerd-sp-validator-k8s-tls", &DeleteParams::default())
        .await
        .unwrap();
    eventually("the sp-validator's Secret is created again", async || {
        fixture.secrets().get_opt("linkerd-sp-validator-k8s-tls").await.unwrap()
    })
    .await;
    let now = fixture.secrets().get(SECRET).await.unwrap().metadata;
    assert_eq!(now.resource_version, supplied.metadata.resource_version);
    assert_ne!(now.resource_version, version);
    assert_eq!(fixture.bundle().await, Value::Null);
    fixture.end().await;
}
