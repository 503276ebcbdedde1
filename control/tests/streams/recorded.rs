//! What Linkerd's control plane answered to the manifests in `proto/recorded`, ours answers too, but for what the tables
//! here say.

use std::collections::HashSet;
use std::fmt::Debug;

use prost::Message;
use prost_types::Duration;
use tonic::{Code, Status, Streaming};
use tulle_control::cluster::Config;
use tulle_control::destination;
use tulle_proto::destination::http2_client_params::KeepAlive;
use tulle_proto::destination::{DestinationProfile, Http2ClientParams, Update, update};
use tulle_proto::inbound::Server;
use tulle_proto::outbound::OutboundPolicy;

use self::read::{Recorded, path, recorded};
use crate::harness::{Mesh, mesh_with, soon};

#[path = "../../../proto/recorded/read.rs"]
mod read;

const CLIENT: &str = r#"{"ns":"front","pod":"front-0"}"#;
const TOKEN: &str = r#"{"ns":"front","nodeName":"node-a","pod":"front-0"}"#;

/// What we answer otherwise than Linkerd.
struct Differences {
    /// Linkerd's words, ours in their place, and why.
    words: &'static [(&'static str, &'static str, &'static str)],
    /// Questions with another answer, and why.
    answers: &'static [(&'static str, &'static str)],
}

#[tokio::test]
async fn recorded_policies_of_destinations_are_ours() {
    let mesh = loaded("outbound").await;
    let mut found = Found::of(OUTBOUND);
    for one in recorded("outbound") {
        let ours = first(mesh.policies(CLIENT, &one.target).await).await;
        found.compare(&one, last::<OutboundPolicy>(&one), ours);
    }
    found.judge();
}

#[tokio::test]
async fn recorded_policies_of_ports_are_ours() {
    let mesh = loaded("inbound").await;
    let mut found = Found::of(INBOUND);
    for one in recorded("inbound") {
        let (workload, port) = one.target.rsplit_once(':').unwrap();
        let (kind, workload) = match workload.strip_prefix("vm:") {
            Some(workload) => ("external_workload", workload),
            None => ("pod", workload),
        };
        let (namespace, name) = workload.split_once('/').unwrap();
        let workload = format!(r#"{{"ns":"{namespace}","{kind}":"{name}"}}"#);
        let ours = first(mesh.ports(&workload, port.parse().unwrap()).await).await;
        found.compare(&one, last::<Server>(&one).map(ordered), ours.map(ordered));
    }
    found.judge();
}

#[tokio::test]
async fn recorded_profiles_and_endpoints_are_ours() {
    let mesh = loaded("destination").await;
    let config = destination::config::Config {
        http2: Some(Http2ClientParams {
            keep_alive: Some(KeepAlive {
                interval: seconds(10),
                timeout: seconds(3),
                while_idle: true,
            }),
            ..Http2ClientParams::default()
        }),
        ..destination::config::Config::default()
    };
    let mut found = Found::of(DESTINATION);
    for one in recorded("destination") {
        if one.kind == "profile" {
            let ours = first(mesh.profiles_with(config.clone(), &one.target, TOKEN).await).await;
            found.compare(&one, last::<DestinationProfile>(&one), ours);
        } else {
            let ours = first(mesh.get_with(config.clone(), &one.target, TOKEN).await).await;
            found.compare(&one, last::<Update>(&one).map(sorted), ours.map(sorted));
        }
    }
    found.judge();
}

/// A control plane with the flags of the one that was recorded.
async fn loaded(name: &str) -> Mesh {
    let config = Config {
        default_opaque_ports: "25,587,3306,4444,5432,6379,9300,11211".parse().unwrap(),
        probe_networks: ["0.0.0.0/0", "::/0"].map(|net| net.parse().unwrap()).to_vec(),
        ..Config::default()
    };
    let mesh = mesh_with(&std::fs::read_to_string(path(&format!("{name}.yaml"))).unwrap(), config).await;
    assert!(mesh.errors().is_empty(), "{:?}", mesh.errors());
    mesh
}

/// The first message of a stream, or the code that it ended with.
async fn first<T>(stream: Result<Streaming<T>, Status>) -> Result<T, Code> {
    let mut stream = stream.map_err(|status| status.code())?;
    let message = soon(stream.message()).await.map_err(|status| status.code())?;
    Ok(message.expect("a message"))
}

/// The last message of a recording, or the code that it ended with.
fn last<T: Message + Default>(one: &Recorded) -> Result<T, String> {
    match (one.messages.last(), &one.status) {
        (Some(bytes), None) => Ok(T::decode(&**bytes).unwrap()),
        (_, status) => Err(status.clone().expect("an answer")),
    }
}

/// What differs, by question.
struct Found {
    expected: Differences,
    words: HashSet<&'static str>,
    answers: Vec<(String, String)>,
}

impl Found {
    fn of(expected: Differences) -> Self {
        Self {
            expected,
            words: HashSet::new(),
            answers: Vec::new(),
        }
    }

    fn compare<T: Debug>(&mut self, one: &Recorded, theirs: Result<T, String>, ours: Result<T, Code>) {
        let ours = format!("{:?}", ours.map_err(|code| format!("{code:?}")));
        let mut theirs = format!("{theirs:?}");
        for (words, in_place, _) in self.expected.words {
            if theirs.contains(words) {
                self.words.insert(words);
                theirs = theirs.replace(words, in_place);
            }
        }
        if theirs != ours {
            self.answers.push((one.question(), told(&theirs, &ours)));
        }
    }

    /// Checks that what differs is what is expected to, and no less.
    fn judge(self) {
        let Differences { words, answers } = self.expected;
        let is_expected = |question: &str| answers.iter().any(|(expected, _)| *expected == question);
        let unexpected = self.answers.iter().filter(|(question, _)| !is_expected(question));
        let unexpected: Vec<_> = unexpected
            .map(|(question, told)| format!("{question}\n{told}"))
            .collect();
        assert!(unexpected.is_empty(), "{}", unexpected.join("\n"));
        for (question, reason) in answers {
            let differs = self.answers.iter().any(|(found, _)| found == question);
            assert!(differs, "{question} is answered as by Linkerd, not otherwise: {reason}");
        }
        for (words, _, reason) in words {
            assert!(self.words.contains(words), "Linkerd does not say {words:?}: {reason}");
        }
    }
}

/// Where two texts begin to differ.
fn told(theirs: &str, ours: &str) -> String {
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

/// The order of authorizations and of their networks means nothing.
fn ordered(mut server: Server) -> Server {
    server.authorizations.sort_by_key(|authz| format!("{authz:?}"));
    server
}

/// Nor does that of endpoints.
fn sorted(mut update: Update) -> Update {
    if let Some(update::Update::Add(set)) = &mut update.update {
        set.addrs.sort_by_key(|addr| format!("{:?}", addr.addr));
    }
    update
}

fn seconds(seconds: i64) -> Option<Duration> {
    Some(Duration { seconds, nanos: 0 })
}

const OUTBOUND: Differences = Differences {
    words: &[
        (
            "timeouts: Some(Timeouts { response: None, request: None, idle: None })",
            "timeouts: None",
            "no timeouts are left out",
        ),
        NO_HEADERS,
        (
            "response: None, request: Some(Duration { seconds: 10, nanos: 0 })",
            "response: Some(Duration { seconds: 2, nanos: 500000000 }), request: Some(Duration { seconds: 10, nanos: 0 })",
            "backendRequest limits each try; Linkerd does not use it",
        ),
        (
            "response: None, request: Some(Duration { seconds: 1, nanos: 0 })",
            "response: Some(Duration { seconds: 0, nanos: 500000000 }), request: Some(Duration { seconds: 1, nanos: 0 })",
            "as above",
        ),
        (
            "Rule { matches: [], ",
            "Rule { matches: [GrpcRouteMatch { rpc: Some(GrpcRpcMatch { service: \"\", method: \"\" }), headers: [] }], ",
            "a call of any service and method is any call",
        ),
        (
            "GrpcFailureInjector { code: 500, ",
            "GrpcFailureInjector { code: 13, ",
            "gRPC knows no status 500; an internal error is 13",
        ),
        (
            "HttpRouteMatch { path: None, headers: [], query_params: [], method: None }",
            "HttpRouteMatch { path: Some(PathMatch { kind: Some(Prefix(\"/\")) }), headers: [], query_params: [], method: None }",
            "any path begins with a slash",
        ),
    ],
    answers: &[
        ("policy 198.51.100.1:80", FORBIDDEN),
        ("policy 198.51.100.1:81", FORBIDDEN),
        ("policy 198.51.100.1:443", FORBIDDEN),
        (
            "policy plain.shop.svc.cluster.local:0",
            "there is no port 0; Linkerd takes it for 80",
        ),
    ],
};
const FORBIDDEN: &str = "bytes that are forbidden have no backend either";
const INBOUND: Differences = Differences {
    words: &[NO_HEADERS],
    answers: &[(
        "port shop/web:25",
        "ports that are opaque in the cluster are so for pods that have no annotation, which Linkerd's injector writes",
    )],
};
const DESTINATION: Differences = Differences {
    words: &[
        (
            "group: \"linkerd.io\", kind: \"\"",
            "group: \"linkerd.io\", kind: \"ServiceProfile\"",
            "a profile that nobody has written has a kind, too",
        ),
        (
            "\"serviceaccount\": \"web\", \"zone\": \"\"}",
            "\"serviceaccount\": \"web\", \"zone\": \"a\"}",
            "an endpoint is in the zone of its node, also where its address is asked for",
        ),
    ],
    answers: &[
        (
            "profile alias.shop.svc.cluster.local:80",
            "a Service that is another name is refused, as by Get; proxies go on without a profile either way",
        ),
        (
            "get empty.shop.svc.cluster.local:80",
            "callers learn at once that there is nobody, and fail fast",
        ),
    ],
};
const NO_HEADERS: (&str, &str, &str) = (
    "add: Some(Headers { headers: [] })",
    "add: None",
    "no headers are left out",
);
