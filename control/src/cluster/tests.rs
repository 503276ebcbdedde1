//! Subscriptions receive changed values, and only those.

use std::io;

use proptest::prelude::*;
use serde_yaml_ng::Value;

use super::*;
use crate::model::endpoints::Existence;
use crate::resources::exported_services::ExportedServices;
use crate::resources::{Object, decode};

/// Objects of a small mesh; some names have two versions.
const OBJECTS: &str = "
{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.2, ports: [{port: 80, name: a}, {port: 81, name: b}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: api}, spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.1.0.1], targetRef: {kind: Pod, name: a}}, {addresses: [10.1.0.2], targetRef: {kind: Pod, name: b}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: api}}
addressType: IPv4
ports: [{port: 9090}, {port: 7070, name: a}]
endpoints: [{addresses: [10.1.0.1], targetRef: {kind: Pod, name: a}}, {addresses: [10.1.0.9]}]
---
{apiVersion: v1, kind: Pod, metadata: {name: a, labels: {app: x}}, spec: {nodeName: n, containers: []}, status: {podIP: 10.1.0.1, phase: Running}}
---
{apiVersion: v1, kind: Pod, metadata: {name: a, labels: {app: y}}, spec: {containers: []}, status: {podIP: 10.1.0.2, phase: Running}}
---
apiVersion: v1
kind: Pod
metadata: {name: b, labels: {app: x, linkerd.io/control-plane-ns: linkerd}, ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: r, uid: u}]}
spec:
  containers:
  - name: linkerd-proxy
    env: [{name: LINKERD2_PROXY_ADMIN_LISTEN_ADDR, value: '[::]:4191'}, {name: LINKERD2_PROXY_CONTROL_LISTEN_ADDR, value: '[::]:4190'}]
status: {podIP: 10.1.0.2, phase: Running}
---
{apiVersion: apps/v1, kind: ReplicaSet, metadata: {name: r, ownerReferences: [{apiVersion: apps/v1, kind: Deployment, name: d, uid: u}]}}
---
{apiVersion: v1, kind: Node, metadata: {name: n, labels: {topology.kubernetes.io/zone: z}}}
---
{apiVersion: policy.linkerd.io/v1beta3, kind: Server, metadata: {name: s}, spec: {podSelector: {matchLabels: {app: x}}, port: 8080, proxyProtocol: opaque}}
---
{apiVersion: policy.linkerd.io/v1beta3, kind: Server, metadata: {name: s}, spec: {podSelector: {}, port: 8080}}
---
{apiVersion: policy.linkerd.io/v1beta3, kind: Server, metadata: {name: q}, spec: {podSelector: {}, port: 8080}}
---
apiVersion: policy.linkerd.io/v1alpha1
kind: AuthorizationPolicy
metadata: {name: p}
spec:
  targetRef: {group: policy.linkerd.io, kind: Server, name: s}
  requiredAuthenticationRefs: [{group: policy.linkerd.io, kind: NetworkAuthentication, name: net}]
---
{apiVersion: policy.linkerd.io/v1alpha1, kind: NetworkAuthentication, metadata: {name: net}, spec: {networks: [{cidr: 10.0.0.0/8}]}}
---
{apiVersion: policy.linkerd.io/v1alpha1, kind: EgressNetwork, metadata: {name: e}, spec: {trafficPolicy: Deny}}
---
apiVersion: policy.linkerd.io/v1beta3
kind: HTTPRoute
metadata: {name: r}
spec:
  parentRefs: [{group: core, kind: Service, name: web}, {group: policy.linkerd.io, kind: Server, name: s}]
  rules: [{backendRefs: [{name: api, port: 80}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: g}
spec: {parentRefs: [{group: core, kind: Service, name: web}], rules: [{}]}
---
{apiVersion: linkerd.io/v1alpha2, kind: ServiceProfile, metadata: {name: web.default.svc.cluster.local}, spec: {routes: [{name: r, condition: {method: GET}}]}}
";

fn objects() -> Vec<Object> {
    let object = |document: serde_yaml_ng::Deserializer<'_>| {
        let value: Value = serde::Deserialize::deserialize(document).unwrap();
        let text = |field: &str| value[field].as_str().unwrap().to_owned();
        let kind = Kind::find(&text("apiVersion"), &text("kind")).unwrap();
        decode(kind, value).unwrap()
    };
    serde_yaml_ng::Deserializer::from_str(OBJECTS).map(object).collect()
}

fn object(kind: Kind) -> Object {
    objects().into_iter().find(|object| object.kind() == kind).unwrap()
}

fn cluster(config: Config) -> Cluster {
    Cluster::new(config, &Registry::new())
}

fn apply(cluster: &Cluster, objects: impl IntoIterator<Item = Object>) {
    cluster.sink().apply(objects.into_iter().map(Event::Applied).collect());
}

fn delete(cluster: &Cluster, kind: Kind, name: &str) {
    cluster
        .sink()
        .apply(vec![Event::Deleted(kind, NamespacedName::new("default", name))]);
}

fn web() -> endpoints::Key {
    endpoints::Key {
        service: NamespacedName::new("default", "web"),
        port: 80,
        hostname: None,
    }
}

#[test]
fn a_server_changes_values_of_workloads_that_it_may_select_and_no_others() {
    let [_, pod_a_with_label_y, pod_b_with_label_x] = <[_; 3]>::try_from(objects_of_kind(Kind::Pod)).unwrap();
    let [server_of_label_x, server_of_all, _] = <[_; 3]>::try_from(objects_of_kind(Kind::Server)).unwrap();
    let mut store = Store::default();
    // Applies an event. Returns for each of the two pods whether a changed lookup key affects its Servers.
    let mut changes = |event| {
        let mut changed_keys = AHashSet::new();
        store.apply(event, &mut changed_keys);
        [&pod_a_with_label_y, &pod_b_with_label_x].map(|pod| {
            let reader = Reader::new(&store);
            reader.server_candidates(pod.meta());
            !reader.into_dependencies().is_disjoint(&changed_keys)
        })
    };
    assert_eq!(changes(Event::Applied(server_of_label_x.clone())), [false, true]);
    assert_eq!(
        changes(Event::Applied(server_of_all)),
        [true, true],
        "the Server selected only pod b before, and selects both now"
    );
    assert_eq!(
        changes(Event::Applied(server_of_label_x)),
        [true, true],
        "the Server selected both pods before, and selects only pod b now"
    );
    let name = NamespacedName::new("default", "s");
    assert_eq!(changes(Event::Deleted(Kind::Server, name)), [false, true]);
}

fn objects_of_kind(kind: Kind) -> Vec<Object> {
    objects().into_iter().filter(|object| object.kind() == kind).collect()
}

fn is_new<T>(subscription: &Subscription<T>) -> bool {
    subscription.receiver.has_changed().unwrap()
}

#[test]
fn a_subscription_has_the_current_value_and_then_only_changes() {
    let cluster = cluster(Config::default());
    let mut web = cluster.endpoints(web());
    assert_eq!(web.current().existence, Existence::Missing);
    apply(&cluster, [object(Kind::Service)]);
    assert!(is_new(&web));
    assert_eq!(web.current().existence, Existence::Present);
    // The same object again, and objects that the value does not depend on.
    apply(
        &cluster,
        [
            object(Kind::Service),
            object(Kind::Pod),
            object(Kind::Server),
            object(Kind::Node),
        ],
    );
    assert!(!is_new(&web));
    apply(&cluster, [object(Kind::EndpointSlice)]);
    assert!(is_new(&web));
    assert_eq!(web.current().endpoints.len(), 1);
    // Changes that leave the value equal are not sent.
    apply(&cluster, [object(Kind::AuthorizationPolicy)]);
    delete(&cluster, Kind::Server, "q");
    assert!(!is_new(&web));
}

#[test]
fn a_slow_subscriber_skips_to_the_latest_value() {
    let cluster = cluster(Config::default());
    let mut web = cluster.endpoints(web());
    apply(&cluster, [object(Kind::Service)]);
    apply(&cluster, [object(Kind::EndpointSlice), object(Kind::Pod)]);
    delete(&cluster, Kind::Service, "web");
    assert_eq!(web.current().existence, Existence::Missing);
    assert!(!is_new(&web));
}

#[test]
fn values_are_dropped_with_their_last_subscription() {
    let cluster = cluster(Config::default());
    let (first, second) = (cluster.endpoints(web()), cluster.endpoints(web()));
    drop(first);
    assert!(!cluster.0.state.lock().endpoints.is_empty());
    drop(second);
    assert!(cluster.0.state.lock().endpoints.is_empty());
    apply(&cluster, objects());
}

#[tokio::test]
async fn the_cluster_is_synced_after_its_source_reports_it() {
    let cluster = cluster(Config::default());
    apply(&cluster, objects());
    assert!(!cluster.is_synced());
    cluster.sink().apply(vec![Event::Synced]);
    cluster.synced().await;
}

/// A slow reader of the log must not delay streams.
#[test]
fn nothing_is_logged_while_the_state_is_locked() {
    let slice = |spec: &str| {
        let text = format!("{{metadata: {{name: s, namespace: default}}, addressType: IPv4, endpoints: [], {spec}}}");
        decode(Kind::EndpointSlice, serde_yaml_ng::from_str::<Value>(&text).unwrap()).unwrap()
    };
    let unreadable = Unreadable {
        kind: Kind::Server,
        name: NamespacedName::new("default", "unreadable"),
        reason: "it is invalid".to_owned(),
        placeholder: None,
    };
    let unreadable = Event::Unreadable(Arc::new(unreadable));
    // Each line of the log, and whether the state was locked.
    let lines_of_changes = || {
        let (cluster, lines) = (cluster(Config::default()), Arc::new(Mutex::new(Vec::new())));
        let writer = {
            let (cluster, lines) = (cluster.clone(), lines.clone());
            move || LineWriter {
                lines: lines.clone(),
                is_locked: cluster.0.state.is_locked(),
            }
        };
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_writer(writer)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let _subscriptions = AllSubscriptions::new(&cluster);
            apply(&cluster, objects());
            apply(&cluster, [slice("ports: []")]);
            delete(&cluster, Kind::EndpointSlice, "web-1");
            cluster.sink().apply(vec![unreadable.clone(), Event::Synced]);
        });
        std::mem::take(&mut *lines.lock())
    };
    // The first call registers the tracing call sites. Otherwise a thread without a subscriber could have cached them as disabled.
    lines_of_changes();
    let lines = lines_of_changes();
    for message in [
        "an EndpointSlice names no Service",
        "Adding ES default/web-1",
        "Updating ES default/web-1",
        "Updating service for default/web",
        "Deleting ES default/web-1",
        "the mesh does not apply a part of the object",
        "an object cannot be read",
    ] {
        assert!(
            lines.iter().any(|(line, _)| line.contains(message)),
            "{message}: {lines:#?}"
        );
    }
    let locked: Vec<_> = lines.iter().filter(|(_, is_locked)| *is_locked).collect();
    assert!(locked.is_empty(), "{locked:#?}");
}

/// Stores a line of the log, and whether the state was locked. Created for each line.
struct LineWriter {
    lines: Arc<Mutex<Vec<(String, bool)>>>,
    is_locked: bool,
}

impl io::Write for LineWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let line = String::from_utf8_lossy(bytes).into_owned();
        self.lines.lock().push((line, self.is_locked));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Subscriptions to values of every view.
struct AllSubscriptions {
    endpoints: Vec<Subscription<Endpoints>>,
    profiles: Vec<Subscription<Profile>>,
    inbound: Vec<Subscription<Option<InboundPolicy>>>,
    outbound: Vec<Subscription<Outbound>>,
}

type AllValues = (
    Vec<Arc<PublishedValue<Endpoints>>>,
    Vec<Arc<PublishedValue<Profile>>>,
    Vec<Arc<PublishedValue<Option<InboundPolicy>>>>,
    Vec<Arc<PublishedValue<Outbound>>>,
);

impl AllSubscriptions {
    fn new(cluster: &Cluster) -> Self {
        let addrs = [
            "10.96.0.1:80",
            "10.96.0.2:81",
            "10.1.0.1:8080",
            "10.1.0.2:8080",
            "203.0.113.1:80",
        ];
        let addrs = addrs.map(|addr| addr.parse().unwrap());
        let pods = ["a", "b"].map(|name| inbound::WorkloadId::Pod(NamespacedName::new("default", name)));
        Self {
            endpoints: vec![
                cluster.endpoints(web()),
                cluster.endpoints(endpoints::Key {
                    service: NamespacedName::new("default", "api"),
                    ..web()
                }),
            ],
            profiles: addrs
                .map(|addr| {
                    cluster.profile(profiles::Key::Address {
                        addr,
                        client_namespace: None,
                    })
                })
                .into(),
            inbound: pods
                .map(|workload| cluster.inbound(inbound::Key { workload, port: 8080 }))
                .into(),
            outbound: addrs
                .map(|addr| {
                    let (client_namespace, target) = ("default".into(), outbound::Target::Address(addr));
                    cluster.outbound(outbound::Key {
                        client_namespace,
                        exported_services: ExportedServices::All,
                        target,
                    })
                })
                .into(),
        }
    }

    fn values(&mut self) -> AllValues {
        (
            self.endpoints.iter_mut().map(Subscription::current).collect(),
            self.profiles.iter_mut().map(Subscription::current).collect(),
            self.inbound.iter_mut().map(Subscription::current).collect(),
            self.outbound.iter_mut().map(Subscription::current).collect(),
        )
    }
}

proptest! {
    /// A subscription that received all updates has the same value as a new subscription. A missing dependency would break this.
    #[test]
    fn an_updated_subscription_has_the_value_of_a_new_one(steps in prop::collection::vec((0..19usize, any::<bool>()), 1..40)) {
        let objects = objects();
        let updated = cluster(Config::default());
        let mut subscriptions = AllSubscriptions::new(&updated);
        for (index, applied) in steps {
            let object = objects[index % objects.len()].clone();
            let event = if applied {
                Event::Applied(object)
            } else {
                Event::Deleted(object.kind(), object.meta().name.clone())
            };
            updated.sink().apply(vec![event]);
            let fresh = cluster(Config::default());
            let state = updated.0.state.lock();
            let stored: Vec<_> = state.store.all().cloned().collect();
            drop(state);
            apply(&fresh, stored);
            prop_assert_eq!(subscriptions.values(), AllSubscriptions::new(&fresh).values());
        }
    }
}
