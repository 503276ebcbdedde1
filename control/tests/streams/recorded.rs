//! Compares tulle's responses with those that Linkerd's control plane gave for the manifests in `proto/recorded`.
//!
//! The tables list the intended differences.

use std::collections::HashSet;
use std::fmt::Debug;
use std::fs;

use prost::Message;
use prost_types::Duration;
use tonic::{Code, Status, Streaming};
use tulle_control::cluster::remote_clusters::RemoteCluster;
use tulle_control::cluster::{Config, Ipv6};
use tulle_control::destination;
use tulle_proto::destination::http2_client_params::KeepAlive;
use tulle_proto::destination::{DestinationProfile, Http2ClientParams, Update, update};
use tulle_proto::inbound::Server;
use tulle_proto::outbound::OutboundPolicy;

use self::read::{Recorded, path, recorded};
use self::updates::endpoints_after;
use crate::harness::{Mesh, mesh_with, with_timeout};

#[path = "../../../proto/recorded/read.rs"]
mod read;
#[path = "../../../proto/recorded/updates.rs"]
mod updates;

const CLIENT: &str = r#"{"ns":"front","pod":"front-0"}"#;
const TOKEN: &str = r#"{"ns":"front","nodeName":"node-a","pod":"front-0"}"#;

/// Intended differences from Linkerd's responses.
struct Differences {
    /// Linkerd's text, the text that replaces it here, and the reason.
    texts: &'static [(&'static str, &'static str, &'static str)],
    /// Requests with a different response, and the reason.
    responses: &'static [(&'static str, &'static str)],
}

#[tokio::test]
async fn recorded_outbound_policies_match() {
    let mesh = loaded("outbound").await;
    let mut comparison = Comparison::new(OUTBOUND);
    for recording in recorded("outbound") {
        let ours = first(mesh.watch_policy(CLIENT, &recording.target).await).await;
        comparison.compare(&recording, last::<OutboundPolicy>(&recording), ours);
    }
    comparison.check();
}

#[tokio::test]
async fn recorded_inbound_policies_match() {
    let mesh = loaded("inbound").await;
    let mut comparison = Comparison::new(INBOUND);
    for recording in recorded("inbound") {
        let (workload, port) = recording.target.rsplit_once(':').unwrap();
        let (kind, workload) = match workload.strip_prefix("vm:") {
            Some(workload) => ("external_workload", workload),
            None => ("pod", workload),
        };
        let (namespace, name) = workload.split_once('/').unwrap();
        let workload = format!(r#"{{"ns":"{namespace}","{kind}":"{name}"}}"#);
        let ours = first(mesh.watch_port(&workload, port.parse().unwrap()).await).await;
        let theirs = last::<Server>(&recording).map(sort_authorizations);
        comparison.compare(&recording, theirs, ours.map(sort_authorizations));
    }
    comparison.check();
}

#[tokio::test]
async fn recorded_profiles_and_endpoints_match() {
    let (mesh, config) = (loaded("destination").await, destination_config());
    let mut comparison = Comparison::new(DESTINATION);
    for recording in recorded("destination") {
        if recording.kind == "profile" {
            let ours = first(mesh.get_profile_with(config.clone(), &recording.target, TOKEN).await).await;
            comparison.compare(&recording, last::<DestinationProfile>(&recording), ours);
        } else {
            let ours = first(mesh.get_with(config.clone(), &recording.target, TOKEN).await).await;
            let theirs = last::<Update>(&recording).map(sort_endpoints);
            comparison.compare(&recording, theirs, ours.map(sort_endpoints));
        }
    }
    comparison.check();
}

#[tokio::test]
async fn recorded_profiles_and_endpoints_of_linked_clusters_match() {
    let (mesh, config) = (loaded("multicluster/destination-west").await, destination_config());
    let remote = cluster_config().for_remote_cluster("east", "east.test", "east.test");
    let east = loaded_with("multicluster/destination-east", remote).await;
    mesh.remote_clusters
        .set("east", RemoteCluster::Listed(east.cluster.clone()));
    let mut comparison = Comparison::new(LINKED_CLUSTERS);
    for recording in recorded("multicluster/destination") {
        if recording.kind == "profile" {
            let ours = first(mesh.get_profile_with(config.clone(), &recording.target, TOKEN).await).await;
            comparison.compare(&recording, last::<DestinationProfile>(&recording), ours);
        } else {
            let ours = first(mesh.get_with(config.clone(), &recording.target, TOKEN).await).await;
            let theirs = last::<Update>(&recording).map(|_| {
                let messages = recording.messages.iter();
                messages.map(|bytes| Update::decode(&**bytes).unwrap()).collect()
            });
            comparison.compare(
                &recording,
                theirs.map(endpoints_after),
                ours.map(|update| endpoints_after(vec![update])),
            );
        }
    }
    comparison.check();
}

/// Returns a control plane with the flags that Linkerd's had during the recording.
async fn loaded(name: &str) -> Mesh {
    loaded_with(name, cluster_config()).await
}

async fn loaded_with(name: &str, config: Config) -> Mesh {
    let mesh = mesh_with(&fs::read_to_string(path(&format!("{name}.yaml"))).unwrap(), config).await;
    assert!(mesh.errors().is_empty(), "{:?}", mesh.errors());
    mesh
}

fn cluster_config() -> Config {
    Config {
        default_opaque_ports: "25,587,3306,4444,5432,6379,9300,11211".parse().unwrap(),
        probe_networks: ["0.0.0.0/0", "::/0"].map(|net| net.parse().unwrap()).to_vec(),
        ipv6: Ipv6::Serve,
        ..Config::default()
    }
}

fn destination_config() -> destination::config::Config {
    destination::config::Config {
        http2: Some(Http2ClientParams {
            keep_alive: Some(KeepAlive {
                interval: seconds(10),
                timeout: seconds(3),
                while_idle: true,
            }),
            ..Http2ClientParams::default()
        }),
        ..destination::config::Config::default()
    }
}

/// Returns the first message of a stream, or its status code.
async fn first<T>(stream: Result<Streaming<T>, Status>) -> Result<T, Code> {
    let mut stream = stream.map_err(|status| status.code())?;
    let message = with_timeout(stream.message()).await.map_err(|status| status.code())?;
    Ok(message.expect("the stream has a message"))
}

/// Returns the last recorded message, or the recorded status code.
fn last<T: Message + Default>(recording: &Recorded) -> Result<T, String> {
    match (recording.messages.last(), &recording.status) {
        (Some(bytes), None) => Ok(T::decode(&**bytes).unwrap()),
        (_, status) => Err(status.clone().expect("the recording has a message or a status")),
    }
}

/// The comparison of all responses of a recording, with the differences that were found.
struct Comparison {
    expected: Differences,
    texts: HashSet<&'static str>,
    /// Request and difference.
    responses: Vec<(String, String)>,
}

impl Comparison {
    fn new(expected: Differences) -> Self {
        Self {
            expected,
            texts: HashSet::new(),
            responses: Vec::new(),
        }
    }

    fn compare<T: Debug>(&mut self, recording: &Recorded, theirs: Result<T, String>, ours: Result<T, Code>) {
        let ours = format!("{:?}", ours.map_err(|code| format!("{code:?}")));
        let mut theirs = format!("{theirs:?}");
        for (text, replacement, _) in self.expected.texts {
            if theirs.contains(text) {
                self.texts.insert(text);
                theirs = theirs.replace(text, replacement);
            }
        }
        if theirs != ours {
            self.responses
                .push((recording.request(), first_difference(&theirs, &ours)));
        }
    }

    /// Checks that the differences are exactly the expected ones.
    fn check(self) {
        let Differences { texts, responses } = self.expected;
        let is_expected = |request: &str| responses.iter().any(|(expected, _)| *expected == request);
        let unexpected = self.responses.iter().filter(|(request, _)| !is_expected(request));
        let unexpected: Vec<_> = unexpected
            .map(|(request, difference)| format!("{request}\n{difference}"))
            .collect();
        assert!(unexpected.is_empty(), "{}", unexpected.join("\n"));
        for (request, reason) in responses {
            let differs = self.responses.iter().any(|(found, _)| found == request);
            assert!(
                differs,
                "{request} has the same response as from Linkerd, but is listed as different: {reason}"
            );
        }
        for (text, _, reason) in texts {
            assert!(
                self.texts.contains(text),
                "no recorded response contains {text:?}: {reason}"
            );
        }
    }
}

/// Returns the two texts around their first difference.
fn first_difference(theirs: &str, ours: &str) -> String {
    let same = theirs.bytes().zip(ours.bytes()).take_while(|(one, other)| one == other);
    let from = same.count().saturating_sub(150);
    let part = |text: &str| {
        String::from_utf8_lossy(&text.as_bytes()[from..])
            .chars()
            .take(900)
            .collect::<String>()
    };
    format!("- {}\n+ {}\n", part(theirs), part(ours))
}

/// Sorts authorizations, whose order has no meaning.
fn sort_authorizations(mut server: Server) -> Server {
    server.authorizations.sort_by_key(|authz| format!("{authz:?}"));
    server
}

/// Sorts endpoints, whose order has no meaning.
fn sort_endpoints(mut update: Update) -> Update {
    if let Some(update::Update::Add(set)) = &mut update.update {
        set.addrs.sort_by_key(|addr| format!("{:?}", addr.addr));
    }
    update
}

fn seconds(seconds: i64) -> Option<Duration> {
    Some(Duration { seconds, nanos: 0 })
}

const OUTBOUND: Differences = Differences {
    texts: &[
        (
            "timeouts: Some(Timeouts { response: None, request: None, idle: None })",
            "timeouts: None",
            "an empty Timeouts message is omitted",
        ),
        NO_HEADERS,
        (
            "response: None, request: Some(Duration { seconds: 10, nanos: 0 })",
            "response: Some(Duration { seconds: 2, nanos: 500000000 }), request: Some(Duration { seconds: 10, nanos: 0 })",
            "backendRequest limits each attempt; Linkerd ignores it",
        ),
        (
            "response: None, request: Some(Duration { seconds: 1, nanos: 0 })",
            "response: Some(Duration { seconds: 0, nanos: 500000000 }), request: Some(Duration { seconds: 1, nanos: 0 })",
            "as above",
        ),
        (
            "Rule { matches: [], ",
            "Rule { matches: [GrpcRouteMatch { rpc: Some(GrpcRpcMatch { service: \"\", method: \"\" }), headers: [] }], ",
            "a match on every service and method is explicit",
        ),
        (
            "GrpcFailureInjector { code: 500, ",
            "GrpcFailureInjector { code: 13, ",
            "gRPC has no status 500; INTERNAL is 13",
        ),
        (
            "HttpRouteMatch { path: None, headers: [], query_params: [], method: None }",
            "HttpRouteMatch { path: Some(PathMatch { kind: Some(Prefix(\"/\")) }), headers: [], query_params: [], method: None }",
            "a match on every path is explicit",
        ),
    ],
    responses: &[
        ("policy 198.51.100.1:80", FORBIDDEN),
        ("policy 198.51.100.1:81", FORBIDDEN),
        ("policy 198.51.100.1:443", FORBIDDEN),
        (
            "policy plain.shop.svc.cluster.local:0",
            "port 0 is invalid; Linkerd treats it as 80",
        ),
    ],
};
const FORBIDDEN: &str = "a forbidden opaque route has no backend";
const INBOUND: Differences = Differences {
    texts: &[NO_HEADERS],
    responses: &[(
        "port shop/web:25",
        "the cluster's opaque ports apply to pods without an annotation; Linkerd's injector adds one",
    )],
};
const DESTINATION: Differences = Differences {
    texts: &[
        DEFAULT_PROFILE,
        (
            "\"serviceaccount\": \"web\", \"zone\": \"\"}",
            "\"serviceaccount\": \"web\", \"zone\": \"a\"}",
            "an endpoint profile has the zone of its node, too",
        ),
    ],
    responses: &[
        (
            "profile alias.shop.svc.cluster.local:80",
            "an ExternalName Service is refused, as by Get; proxies continue without a profile in both cases",
        ),
        ("get empty.shop.svc.cluster.local:80", NOTIFIED),
    ],
};
const LINKED_CLUSTERS: Differences = Differences {
    texts: &[
        DEFAULT_PROFILE,
        (
            r#"server_name: None, strategy: Some(DnsLikeIdentity(DnsLikeIdentity { name: "gateway.linkerd-multicluster.serviceaccount.identity.linkerd.east.test" }"#,
            r#"server_name: Some(DnsLikeIdentity { name: "gateway.linkerd-multicluster.serviceaccount.identity.linkerd.east.test" }), strategy: Some(DnsLikeIdentity(DnsLikeIdentity { name: "gateway.linkerd-multicluster.serviceaccount.identity.linkerd.east.test" }"#,
            "the server name of a gateway is explicit; without it, proxies use the identity",
        ),
        (
            r#""target_service": "db-0", "target_service_namespace": "db""#,
            r#""target_service": "db", "target_service_namespace": "shop""#,
            "the mirror of a pod has the labels of the Service of the pod",
        ),
        (
            r#""service": "app", "serviceaccount": "web", "zone": "b", "zone_locality": "remote"}, tls_identity: None"#,
            r#""service": "app", "serviceaccount": "web", "target_cluster": "east", "zone": "b", "zone_locality": "remote"}, tls_identity: Some(TlsIdentity { server_name: Some(DnsLikeIdentity { name: "web.shop.serviceaccount.identity.mesh-system.east.test" }), strategy: Some(DnsLikeIdentity(DnsLikeIdentity { name: "web.shop.serviceaccount.identity.mesh-system.east.test" })) })"#,
            "the control plane of another cluster can be in another namespace; Linkerd has no identity for its pods",
        ),
        (
            r#""serviceaccount": "web", "zone": "a""#,
            r#""serviceaccount": "web", "target_cluster": "east", "zone": "a""#,
            "endpoints of another cluster have its name",
        ),
        (
            r#""serviceaccount": "default", "zone""#,
            r#""serviceaccount": "default", "target_cluster": "east", "zone""#,
            "as above",
        ),
        (
            r#""serviceaccount": "all", "zone": "b""#,
            r#""serviceaccount": "all", "target_cluster": "east", "zone": "b""#,
            "as above",
        ),
    ],
    responses: &[
        ("get unready-east.shop.svc.cluster.local:80", NOTIFIED),
        ("get empty-east.shop.svc.cluster.local:80", NOTIFIED),
        ("get absent-east.shop.svc.cluster.local:80", NOTIFIED),
        ("get none-federated.shop.svc.cluster.local:80", NOTIFIED),
        (
            "get all-federated.shop.svc.cluster.local:81",
            "a member that lacks the port has no endpoints for it; Linkerd uses the number of the port at its pods",
        ),
    ],
};
const NOTIFIED: &str = "clients are notified immediately that there are no endpoints, and fail fast";
const DEFAULT_PROFILE: (&str, &str, &str) = (
    "group: \"linkerd.io\", kind: \"\"",
    "group: \"linkerd.io\", kind: \"ServiceProfile\"",
    "the default profile has a kind, too",
);
const NO_HEADERS: (&str, &str, &str) = (
    "add: Some(Headers { headers: [] })",
    "add: None",
    "an empty Headers message is omitted",
);
